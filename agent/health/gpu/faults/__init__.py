"""GPU faults that are told once and cannot be read again: taken in, joined, judged, ended, kept."""
