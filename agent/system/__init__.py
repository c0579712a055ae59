"""Wrappers of the operating system: clock, files, locks, output and threads."""
