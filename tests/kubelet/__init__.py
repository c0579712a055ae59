"""A kubelet as a DRA plugin meets it, on gRPC's own library: registration, health, prepare, pods.

An independent opinion: it imports nothing of ours, and follows the sources of kubelet 1.34 to 1.37. Where
upstream says nothing and something had to be inferred, the place says so. It is no kubelet to run pods with.
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
