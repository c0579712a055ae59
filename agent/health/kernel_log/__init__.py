"""What the kernel log says of the host: patterns, lines, and what is remembered of them. Pure."""
