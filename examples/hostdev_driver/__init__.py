"""Example of a DRA driver on drahealth's public API: hugepages, CPUs, and NVIDIA GPUs if there are any.

Small enough to be read and complete enough to be run; see README.md.
"""
