"""Audit of pod cgroups: computes the value that each cgroup file should have, and compares it with the file.

Pure: the caller reads the files.
"""
