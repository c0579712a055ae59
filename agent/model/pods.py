"""What is known of pods that use devices: who has which, and what their cgroups do not say as they should.

Words only: agent.node.pods.tracker finds it out, with what agent.allocatable.findings makes of an audit; the
rules of agent.health.host.pod.rules judge it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.claim import DeviceRef
from agent.model.source import SourceSample


class Resource(StrEnum):
    """What of a node a pod is given."""

    CPU = "cpu"
    MEMORY = "memory"
    HUGEPAGES = "hugepages"


class PodFinding(NamedTuple):
    """One thing that an audit found in a pod: a promise that is not kept, or a risk."""

    pod_uid: str
    """As its cgroup has it: of a static pod, the hash of its configuration."""
    container: str
    """Name; empty: it is the pod's."""
    code: str
    """``cgroup.<verdict>`` of agent.allocatable.verdicts, or that of a risk."""
    evidence: str
    """One line with the numbers that were compared. Stable while they are."""
    advice: str = ""
    """Empty: the rule's own counts."""
    resource: Resource | None = None
    """What it is about; None: more than one."""
    size_kib: int = 0
    """Of the hugepages, else 0."""


@dataclass(frozen=True, slots=True)
class PodsSample:
    """The newest that is known."""

    source: SourceSample
    uses: Mapping[str, tuple[DeviceRef, ...]] = field(default_factory=dict)
    """By the pod's UID, as its cgroup has it: the devices that were prepared for it on this node."""
    names: Mapping[str, str] = field(default_factory=dict)
    """``<namespace>/<name>`` by UID, of those whose name somebody told."""
    findings: tuple[PodFinding, ...] = ()
