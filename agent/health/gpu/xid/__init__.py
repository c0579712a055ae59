"""XIDs and SXids: the tables, the kernel log's lines that tell of them, and what each means."""
