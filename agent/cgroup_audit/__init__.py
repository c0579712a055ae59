"""Audit of pod cgroups: computes the value that each cgroup file should have, and compares it with the file.

The package does not read files; the caller reads them.
"""
