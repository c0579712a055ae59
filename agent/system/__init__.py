"""Wrappers of operating-system services: clock, files, file locks, standard output, threads."""
