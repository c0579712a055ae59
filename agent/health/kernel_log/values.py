"""What is remembered of the host's lines in the kernel log: one fact per kind and place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agent.model.log import LogLine
from agent.model.time import Instant


class LogCode(StrEnum):
    """A kind of line. What stands behind each is the form of its ``place``."""

    MACHINE_CHECK = "machine-check"
    """Uncorrected; ``cpu<N>``."""
    MACHINE_CHECK_CORRECTED = "machine-check-corrected"
    """``cpu<N>``; empty: some were logged, and the line says no more."""
    HARDWARE_ERROR = "hardware-error"
    """Uncorrected, told by firmware, of a part that the line does not name. Empty."""
    HARDWARE_ERROR_CORRECTED = "hardware-error-corrected"
    """Likewise."""
    SOFT_LOCKUP = "soft-lockup"
    """``cpu<N>``."""
    HARD_LOCKUP = "hard-lockup"
    """``cpu<N>``."""
    RCU_STALL = "rcu-stall"
    """Empty: several lines that follow it name CPUs."""
    HUNG_TASK = "hung-task"
    """The task's name."""
    OOM_KILL = "oom-kill"
    """The cgroup whose limit it was; empty: the whole node had no memory left."""
    MEMORY_FAILURE = "memory-failure"
    """hwpoison: a page with a hardware error. Empty."""
    EDAC_CORRECTED = "edac-corrected"
    """``mc<N>`` and the module's label, if the line has one: ``mc0 CPU_SrcID#0_MC#0_Chan#0_DIMM#0``."""
    EDAC_UNCORRECTED = "edac-uncorrected"
    """Likewise."""
    AER_CORRECTED = "aer-corrected"
    """A PCI address, ``0000:3b:00.0``."""
    AER_NONFATAL = "aer-nonfatal"
    """Likewise; or uncorrected, and told by firmware, which does not say whether it was fatal."""
    AER_FATAL = "aer-fatal"
    """Likewise."""
    PCI_FAULT = "pci-fault"
    """A link that went down, a device that left its slot, a bridge that could not recover; a PCI address."""
    NVME = "nvme"
    """A controller that times out, is reset or given up: ``nvme0``."""
    READ_ONLY = "read-only"
    """A filesystem that the kernel made read-only, or shut down: its device, ``nvme0n1p1``."""
    HUGEPAGES_SHORT = "hugepages-short"
    """At boot, fewer than asked for: ``<size KiB>``, and ``<size KiB> node<N>`` if the line names a node."""


class LogFact(NamedTuple):
    """Lines of one kind about one place."""

    code: LogCode
    place: str
    times: int
    """Since boot, as far as the log was read."""
    first: Instant
    last: Instant
    text: str
    """The newest line."""
    values: tuple[str, ...] = ()
    """What its rule wants of the newest line; agent.health.kernel_log.parse says what for each code."""


class Entry(NamedTuple):
    """What tells an entry of the reader's table from others, while it is there."""

    pattern: int
    first_us: int
    first_text: str


@dataclass(frozen=True, slots=True)
class LogPast:
    """What is remembered of the log."""

    facts: Mapping[tuple[LogCode, str], LogFact] = field(default_factory=dict)
    """Bounded: of each code those that came last."""
    lines: tuple[LogLine, ...] = ()
    """Those that have been looked at."""
    counted: Mapping[Entry, int] = field(default_factory=dict)
    """How many times each of them had come."""
    looked_ns: int = 0
    """CLOCK_MONOTONIC when there were new ones; 0: not all has been read that the log held at the start."""

    def of(self, *codes: LogCode, where: Callable[[str], bool] = lambda _: True) -> tuple[LogFact, ...]:
        """The facts of some codes about some places, oldest first."""
        found = (fact for fact in self.facts.values() if fact.code in codes and where(fact.place))
        return tuple(sorted(found, key=lambda fact: (fact.first.mono_ns, fact.place)))
