"""Types of kernel-log facts: code, location and number of the lines that report a fault."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from agent.health.rules import OK, RuleInconclusive, RuleNotApplicable, RuleResult
from agent.model.kernel_messages import LogLine, LogSample
from agent.model.source_state import SourceState
from agent.model.time import Instant


class KernelLogCode(StrEnum):
    """Code of a fault that a kernel-log line reports.

    The docstring of a member ends with the form of its location in ``KernelLogFact.location``.
    """

    MACHINE_CHECK = "machine-check"
    """Uncorrected machine check; location: ``cpu<N>``."""
    MACHINE_CHECK_CORRECTED = "machine-check-corrected"
    """Corrected machine check.

    Location: ``cpu<N>``, or empty if the line states only that some were logged.
    """
    HARDWARE_ERROR = "hardware-error"
    """Uncorrected error of an unnamed part, reported by firmware; location: empty."""
    HARDWARE_ERROR_CORRECTED = "hardware-error-corrected"
    """Corrected error of an unnamed part, reported by firmware; location: empty."""
    HARDWARE_SECTION = "hardware-section"
    """Kind of part that a report of firmware names; location: the kind, ``memory`` or ``PCIe``."""
    SOFT_LOCKUP = "soft-lockup"
    """CPU that one task kept for too long; location: ``cpu<N>``."""
    HARD_LOCKUP = "hard-lockup"
    """CPU that handled no interrupts; location: ``cpu<N>``."""
    RCU_STALL = "rcu-stall"
    """CPU or task that delayed an RCU grace period; location: empty, because later lines name the CPUs."""
    HUNG_TASK = "hung-task"
    """Task that was blocked for minutes in a system call; location: the task's name."""
    OOM_KILL = "oom-kill"
    """Process that the kernel killed because memory ran out.

    Location: the cgroup whose limit was hit, or empty if the whole machine was out of memory.
    """
    OOM_VICTIM = "oom-victim"
    """Task that a kernel before 5.0 killed at the limit of a cgroup which no line names.

    Location: the task's name.
    """
    MEMORY_FAILURE = "memory-failure"
    """Page with a hardware error (hwpoison); location: empty."""
    EDAC_CORRECTED = "edac-corrected"
    """Corrected memory error.

    Location: ``mc<N>`` and the module's label if any: ``mc0 CPU_SrcID#0_MC#0_Chan#0_DIMM#0``.
    """
    EDAC_UNCORRECTED = "edac-uncorrected"
    """Uncorrected memory error; location: ``mc<N>`` and the module's label if any."""
    AER_CORRECTED = "aer-corrected"
    """Corrected PCIe error; location: a PCI address, ``0000:3b:00.0``."""
    AER_NONFATAL = "aer-nonfatal"
    """Non-fatal PCIe error, or one from firmware, which does not state whether it was fatal.

    Location: a PCI address.
    """
    AER_FATAL = "aer-fatal"
    """Fatal PCIe error; location: a PCI address."""
    PCI_FAULT = "pci-fault"
    """Link that went down, device that left its slot, or bridge that could not recover.

    Location: a PCI address.
    """
    NVME = "nvme"
    """NVMe controller that timed out, was reset or was given up; location: ``nvme0``."""
    READ_ONLY = "read-only"
    """Filesystem that the kernel made read-only or shut down; location: its device, ``nvme0n1p1``."""
    NVME_PATH = "nvme-path"
    """NVMe disk that cannot be reached over any of its paths; location: ``nvme0n1``."""
    IO_ERROR = "io-error"
    """Disk that failed a read or a write.

    Location: the disk without the number of a partition, ``nvme0n1``.
    """
    RAID = "raid"
    """Disk that a RAID array lost; location: the array and the disk, ``md1 sda1``, or the array."""
    BEYOND_END = "beyond-end"
    """Access behind the end of a disk; location: the disk or partition, or empty in old kernels."""
    FILESYSTEM = "filesystem"
    """Filesystem with an error; location: its device, ``nvme0n1p1``."""
    NFS = "nfs"
    """NFS server that stopped answering, or answers again.

    Location: the server, or empty for lost file locks.
    """
    PANIC = "panic"
    """Panic of the kernel; location: empty."""
    OOPS = "oops"
    """Fault inside the kernel; location: empty."""
    TABLE_FULL = "table-full"
    """Full table of the kernel; location: its name, ``nf_conntrack`` or ``file-max``."""
    NETDEV_HELD = "netdev-held"
    """Network interface that cannot be removed because something still uses it; location: the interface."""
    PEERMEM = "peermem"
    """Error of the module for RDMA to GPU memory; location: empty."""
    NCCL = "nccl"
    """Process that crashed in libnccl; location: the task's name."""
    NIC_HEALTH = "nic-health"
    """Firmware of a ConnectX NIC that stopped, or recovered; location: a PCI address."""
    NIC_HARDWARE = "nic-hardware"
    """Error that the firmware of a ConnectX NIC reports; location: a PCI address."""
    NIC_COMMAND = "nic-command"
    """Command that a ConnectX NIC did not answer; location: a PCI address."""
    NIC_REGISTER = "nic-register"
    """Access to a register that a ConnectX NIC refused; location: a PCI address."""
    NIC_POWER = "nic-power"
    """Power of the slot of a ConnectX NIC, too low or sufficient again; location: a PCI address."""
    NIC_MODULE = "nic-module"
    """Transceiver or cable of a ConnectX NIC with an error, unplugged or plugged.

    Location: a PCI address.
    """
    EFA = "efa"
    """EFA that does not answer its driver.

    Location: a PCI address, or the RDMA device if its name has none.
    """
    TX_TIMEOUT = "tx-timeout"
    """Network interface whose transmit queue hangs.

    Location: a PCI address, or the interface if the line has none.
    """
    HUGEPAGES_SHORT = "hugepages-short"
    """Fewer hugepages at boot than requested.

    Location: ``<size KiB>``, or ``<size KiB> node<N>`` if the line names a NUMA node.
    """


class KernelLogFact(NamedTuple):
    """Fault that kernel-log lines of one code report about one location (a CPU, memory module, PCI
    address)."""

    code: KernelLogCode
    location: str
    """Faulty part, in the form that KernelLogCode defines for the code; empty: unknown."""
    times: int
    """Number of lines about the fault since boot, as far as the log was read; for EDAC, the number of errors
    that the lines state."""
    first: Instant
    last: Instant
    text: str
    """Text of the newest line about the fault."""
    values: tuple[str, ...] = ()
    """Values parsed from the newest line, such as a duration; :mod:`agent.health.kernel_log.parse` lists them
    by code.
    """
    series_first: Instant | None = None
    """Time of the first line after a pause in which the fault was over; None: no such pause."""

    @property
    def since(self) -> Instant:
        """Time at which the fault began: that of the first line, or of the first line after a pause without
        fault.
        """
        return self.series_first or self.first


def earliest_line(facts: Iterable[KernelLogFact]) -> Instant | None:
    """Return the time at which the first of several kernel-log faults began; None without facts."""
    return min((fact.since for fact in facts), default=None)


class KernelLogLineGroupId(NamedTuple):
    """Identity of a group of similar kernel-log lines, which the native reader counts together."""

    pattern: int
    first_us: int
    """Time of the entry's first line by the kernel log's clock [us]."""
    first_text: str


@dataclass(frozen=True, slots=True)
class KernelLogState:
    """Faults that the kernel log has reported so far, with the lines that were counted already."""

    facts: Mapping[tuple[KernelLogCode, str], KernelLogFact] = field(default_factory=dict)
    """Facts by code and location; only the newest facts of each code are kept."""
    lines: tuple[LogLine, ...] = ()
    """Entries that the native kernel-log reader had at the last evaluation: equal lines with their number."""
    counted: Mapping[KernelLogLineGroupId, int] = field(default_factory=dict)
    """Number of lines of each entry (equal lines that the native reader counts together) at the last
    evaluation.
    """
    caught_up_ns: int = 0
    """CLOCK_MONOTONIC of the last evaluation with new lines [ns]; 0: lines from before the agent's start are
    still being read."""

    def select(
        self, *codes: KernelLogCode, where: Callable[[str], bool] = lambda _: True
    ) -> tuple[KernelLogFact, ...]:
        """Return the kernel-log facts with one of ``codes``, oldest first.

        Args:
            where: Returns whether a fact with this location is included.
        """
        found = (fact for fact in self.facts.values() if fact.code in codes and where(fact.location))
        return tuple(sorted(found, key=lambda fact: (fact.first.mono_ns, fact.location)))


_NO_LINES_RESULTS: Final[Mapping[SourceState, RuleResult]] = {
    SourceState.ABSENT: RuleNotApplicable("no kernel log"),
    SourceState.FAILING: RuleNotApplicable("the kernel log cannot be read"),
    SourceState.STARTING: RuleInconclusive("the kernel log is still being read"),
    SourceState.OK: OK,
    SourceState.STALLED: OK,  # reported as a stalled source
}


def log_reader_state(log: LogSample | None) -> SourceState:
    """Return the state of the native kernel-log reader; ABSENT if the snapshot has no sample of the log."""
    return log.source.state if log else SourceState.ABSENT


def no_log_lines_result(reader: SourceState) -> RuleResult:
    """Return the result of a rule that reads only the kernel log and found no line: OK if the log is read,
    not applicable if it cannot be, not evaluated while old lines are still being read."""
    return _NO_LINES_RESULTS[reader]
