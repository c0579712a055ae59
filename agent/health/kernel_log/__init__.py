"""Hardware and kernel faults from the kernel log: line patterns, parser, and the faults found since boot.

Pure: no module here reads a clock, file or socket.
"""
