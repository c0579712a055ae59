"""Health rules for memory and its error counters."""
