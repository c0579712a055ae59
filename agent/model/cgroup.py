"""Settings of one cgroup, which the cgroup audit compares with the expected settings."""

from dataclasses import dataclass
from typing import Final

from agent.model.reading import NEVER_READ, Reading

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
