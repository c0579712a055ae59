"""Pods that use devices, and the findings of the cgroup audit about them.

agent.node.pods.tracker collects the values and the findings that agent.allocatable.evaluate derives from an
audit; the rules of agent.health.host.pod.attribution evaluate them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import DeviceRef
from agent.model.source import SourceSample


class Resource(StrEnum):
    """Resource of the Kubernetes node that a pod is allocated."""

    CPU = "cpu"
    MEMORY = "memory"
    HUGEPAGES = "hugepages"


class PodFinding(NamedTuple):
    """One audit finding about a pod: a cgroup that differs from its expected allocation, or a risk."""

    pod_uid: str
    """Pod UID as in the cgroup's name; for a static pod the hash of its configuration."""
    container: str
    """Container name; empty: the finding concerns the pod."""
    code: str
    """Code: ``cgroup.<verdict>`` of agent.allocatable.verdicts, or the code of a risk."""
    evidence: str
    """One line with the compared numbers. It changes only when they change."""
    advice: str = ""
    """Action for the operator; empty: the rule's advice applies."""
    resource: Resource | None = None
    """Resource that the finding concerns; None: several."""
    size_kib: int = 0
    """Hugepage size [KiB]; 0 for other resources."""


@dataclass(frozen=True, slots=True)
class PodsSample:
    """Newest known uses of devices by pods, with the audit findings about pods."""

    source: SourceSample
    uses: Mapping[str, tuple[DeviceRef, ...]] = field(default_factory=dict)
    """Devices prepared on this node, by the pod's UID as in the cgroup's name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """``<namespace>/<name>`` by UID, for pods whose name is known."""
    findings: tuple[PodFinding, ...] = ()
