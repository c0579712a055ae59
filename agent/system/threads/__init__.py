"""Helpers for threads: cells that hold a newest value, event loops, worker pools, calls with a timeout."""
