"""Devices that pods use, and faults of pods that the cgroup audit finds.

The audit compares the cgroups of each pod with their expected values.

agent.node.pods.tracker collects both from the kubelet and the cgroup audit; the rules of
agent.health.host.pod evaluate the findings.

The module also has the settings of one cgroup, which the cgroup audit compares with the expected settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef
from agent.model.reading import NEVER_READ, Reading, SourceSample


class Resource(StrEnum):
    """Resource (CPU, memory, hugepages) that a finding of the cgroup audit concerns."""

    CPU = "cpu"
    MEMORY = "memory"
    HUGEPAGES = "hugepages"


class PodFinding(NamedTuple):
    """Finding of the cgroup audit about a pod: a cgroup that differs from its expected values, or a risk."""

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


# --- settings of a cgroup ----------------------------------------------------------------------------------

NO_LIMIT: Final = 2**64 - 1
"""Value of a limit that is not set: the cgroup file contains ``max`` (v2) or -1 (v1)."""


@dataclass(frozen=True, slots=True)
class HugepageLimits:
    """Hugepage limits of one cgroup for one page size [bytes]; ``NO_LIMIT``: no limit."""

    size_kib: int
    max: Reading
    """Limit on hugepage use [bytes]."""
    rsvd_max: Reading
    """Limit on hugepage reservations [bytes]."""


@dataclass(frozen=True, slots=True)
class CgroupSettings:
    """Settings of one cgroup, as its files show them at one moment."""

    controllers: frozenset[str] | None
    """Enabled cgroup controllers among ``cpu``, ``memory``, ``hugetlb`` and ``cpuset``; None: unknown."""
    weight: Reading
    """Content of the file ``cpu.weight``; in v1, of ``cpu.shares``."""
    quota_us: Reading
    period_us: Reading
    """Length of a CPU period in ``cpu.max`` [us]; in each, the tasks may use ``quota_us`` of CPU time."""
    throttled: Reading
    """Number of CPU periods since the cgroup was created in which its quota stopped the tasks."""
    memory: Reading
    """Memory limit of the cgroup [bytes]; ``NO_LIMIT``: no limit."""
    cpus: Reading
    """``cpuset.cpus`` as a bit set: bit ``n`` is CPU ``n``. Empty in v2: inherited from the parent."""
    effective: Reading
    """``cpuset.cpus.effective`` as a bit set: the CPUs that the tasks can use."""
    pages: tuple[HugepageLimits, ...]
    high: Reading = NEVER_READ
    """``memory.high`` [bytes]; ``NO_LIMIT``: no limit."""
    min: Reading = NEVER_READ
    """``memory.min`` [bytes]."""
    low: Reading = NEVER_READ
    """``memory.low`` [bytes]."""
    swap: Reading = NEVER_READ
    """``memory.swap.max`` [bytes]; in v1, the limit on memory and swap together. ``NO_LIMIT``: no limit."""
    oom_score: Reading = NEVER_READ
    """OOM score adjustment (``oom_score_adj``) of the oldest process in the cgroup and in those below it."""
