"""Pods that use the machine's devices: queries and polling, audit of their cgroups, and history."""
