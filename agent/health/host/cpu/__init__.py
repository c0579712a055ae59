"""Health rules for CPUs."""
