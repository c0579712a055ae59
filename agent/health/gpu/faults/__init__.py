"""Latched GPU faults: faults such as XIDs, which are reported once and kept until they are resolved."""
