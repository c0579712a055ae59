"""Rules for the host's devices, for the cgroups of its pods, and for the node. Pure."""
