"""Devices of the node: inventory, names, taints. Pure."""
