"""Pods that use the node's devices: sources, polling, audit of their cgroups, and history."""
