"""Latched GPU faults: one module for each step, from new reports to the checkpoint for restarts."""
