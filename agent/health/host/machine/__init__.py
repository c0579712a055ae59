"""Health rules for the machine as a whole."""
