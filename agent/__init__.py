"""drahealth: one verdict for each of a node's devices, with its evidence, for the kubelet and for people."""

__version__ = "0.1.0"
