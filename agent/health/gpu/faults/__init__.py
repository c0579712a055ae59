"""Latched GPU faults: faults that are reported once, such as XIDs, and kept until something ends them."""
