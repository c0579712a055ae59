"""What one cgroup is set to, as it was read on demand. What it should be set to is for agent.allocatable."""

from dataclasses import dataclass
from typing import Final

from agent.model.reading import Reading

NO_LIMIT: Final = 2**64 - 1
"""What "max" and -1 are read as."""


@dataclass(frozen=True, slots=True)
class PageKnobs:
    """Limits of hugepages of one size [bytes]. No limit reads as ``NO_LIMIT`` here and below."""

    size_kib: int
    max: Reading
    rsvd_max: Reading
    """Of reservations."""


@dataclass(frozen=True, slots=True)
class CgroupKnobs:
    """One cgroup at one moment."""

    controllers: frozenset[str] | None
    """Those of ``cpu``, ``memory``, ``hugetlb`` and ``cpuset`` that are enabled, as far as some file of
    theirs was read; None: not known."""
    weight: Reading
    """``cpu.weight``; in v1, ``cpu.shares``."""
    quota_us: Reading
    period_us: Reading
    throttled: Reading
    """Periods in which it was throttled, since it was made. This and the sets are read only if asked for."""
    memory: Reading
    """Limit [bytes]."""
    cpus: Reading
    """``cpuset.cpus``, a set: bit ``n`` is CPU ``n``. Empty in v2: as the cgroup above."""
    effective: Reading
    """CPUs that it can run on, likewise."""
    pages: tuple[PageKnobs, ...]
