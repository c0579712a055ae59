"""Devices of the machine: inventory, taints, and the pods that use them. No I/O."""
