"""Devices that pods use, and findings of the cgroup audit about the pods.

agent.node.pods.tracker collects them from the kubelet and the cgroup audit; the rules of
agent.health.host.pod.findings_to_causes evaluate them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import DeviceRef
from agent.model.source_state import SourceSample


class Resource(StrEnum):
    """Resource (CPU, memory, hugepages) that a finding of the cgroup audit concerns."""

    CPU = "cpu"
    MEMORY = "memory"
    HUGEPAGES = "hugepages"


class PodFinding(NamedTuple):
    """One audit finding about a pod: a cgroup that differs from its expected allocation, or a risk."""

    pod_uid: str
    """Pod UID as in the cgroup's name; for a static pod the hash of its configuration."""
    container: str
    """Name of the container; empty: the finding concerns the whole pod."""
    code: str
    """Finding code: ``cgroup.<verdict>`` of agent.cgroup_audit.audit_verdicts, or the code of a risk."""
    evidence: str
    """One line with the compared numbers. It changes only when they change."""
    advice: str = ""
    """Action for the operator; empty: the rule's advice applies."""
    resource: Resource | None = None
    """Resource that the finding concerns; None: several."""
    size_kib: int = 0
    """Size of the hugepages that the finding concerns [KiB]; 0 for other resources."""


@dataclass(frozen=True, slots=True)
class PodsSample:
    """Devices that pods use now, and the newest findings of the cgroup audit about pods."""

    source: SourceSample
    uses: Mapping[str, tuple[DeviceRef, ...]] = field(default_factory=dict)
    """Devices prepared on this Kubernetes node, by the UID of the pod, as in the name of the pod's cgroup."""
    names: Mapping[str, str] = field(default_factory=dict)
    """``<namespace>/<name>`` of pods by UID; a missing key: the name is unknown."""
    findings: tuple[PodFinding, ...] = ()
