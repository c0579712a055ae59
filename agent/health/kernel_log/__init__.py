"""Facts about the host from the kernel log: patterns, parser, and the facts seen so far. Pure: no module
reads a clock, file or socket."""
