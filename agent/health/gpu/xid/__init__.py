"""XIDs and SXids: their tables, the kernel log lines that report them, and the decision on each."""
