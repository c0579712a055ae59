"""drahealth: one health verdict with evidence for each device of a Kubernetes node, for kubelet and users.

The public API is the package :mod:`drahealth`; everything here may change at any time.
"""

from agent.version import VERSION as __version__

__all__ = ["__version__"]
