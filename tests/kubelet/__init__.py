"""A simulated kubelet, as a DRA plugin sees it: registration, health streams, prepare calls and pods.

It uses grpcio and imports none of this project's code, so that a mistake in the agent is not repeated here.
It follows the sources of kubelet 1.34 to 1.38. Where those sources leave a detail open, a comment marks the
assumption. It does not run containers. ``kubelet_real`` runs those sources of 1.36 and 1.37 with the same
interface, and the tests of the fake kubelet with both.
"""

from kubelet.claims import PreparedDevice, allocated_claim
from kubelet.fake import FakeKubelet
from kubelet.pace import Pace
from kubelet.pods import Pod, PodStatus
from kubelet.status import ResourceHealth

__all__ = [
    "FakeKubelet",
    "Pace",
    "Pod",
    "PodStatus",
    "PreparedDevice",
    "ResourceHealth",
    "allocated_claim",
]
