"""Devices of the machine: inventory, stable names, taints, and the pods that use them. No I/O."""
