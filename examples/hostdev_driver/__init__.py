"""A DRA driver for what every Linux host has: hugepages, CPUs, and NVIDIA's GPUs if there are any.

An example of a driver on drahealth's public API, small enough to be read and real enough to be run. README.md
says how.
"""
