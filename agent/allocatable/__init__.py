"""Expected allocation of a pod's cgroups, and its comparison with the actual values. Pure."""
