"""Rules for memory and its error counters."""
