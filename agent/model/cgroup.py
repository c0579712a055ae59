"""Settings of one cgroup, read on demand. The expected settings are computed by agent.allocatable."""

from dataclasses import dataclass
from typing import Final

from agent.model.reading import Reading

NO_LIMIT: Final = 2**64 - 1
"""Value that stands for no limit: the file contains ``max`` (v2) or -1 (v1)."""


@dataclass(frozen=True, slots=True)
class HugepageLimits:
    """Hugepage limits of one cgroup for one page size [bytes]; ``NO_LIMIT``: no limit."""

    size_kib: int
    max: Reading
    rsvd_max: Reading
    """Limit on hugepage reservations [bytes]."""


@dataclass(frozen=True, slots=True)
class CgroupSettings:
    """Settings of one cgroup at one moment. A limit of ``NO_LIMIT`` means no limit."""

    controllers: frozenset[str] | None
    """Enabled controllers among ``cpu``, ``memory``, ``hugetlb`` and ``cpuset``, if one of their files was
    read; None: unknown."""
    weight: Reading
    """``cpu.weight``; in v1, ``cpu.shares``."""
    quota_us: Reading
    period_us: Reading
    throttled: Reading
    """Throttled CPU periods since the cgroup was created. Read on request only, as are the CPU sets."""
    memory: Reading
    """Memory limit of the cgroup [bytes]; ``NO_LIMIT``: no limit."""
    cpus: Reading
    """``cpuset.cpus`` as a bit set: bit ``n`` is CPU ``n``. Empty in v2: inherited from the parent."""
    effective: Reading
    """Effective CPUs of the cpuset, as a bit set."""
    pages: tuple[HugepageLimits, ...]
