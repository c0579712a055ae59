"""drahealth: one verdict for each of a node's devices, with its evidence, for the kubelet and for people."""

from agent.version import VERSION as __version__

__all__ = ["__version__"]
