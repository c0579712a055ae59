"""Helpers for threads: newest-value cells, event loops in a thread, worker pools, calls with a timeout."""
