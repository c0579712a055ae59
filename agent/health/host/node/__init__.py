"""Rules for the machine as a whole."""
