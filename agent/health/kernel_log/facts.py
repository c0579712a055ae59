"""Types for faults that kernel-log lines report: the code, location and number of the lines.

The module also has the patterns that select kernel-log lines about faults of the host, and their pattern
language.

The native kernel-log reader matches the patterns in C; :func:`compile_pattern` gives the equivalent regular
expression. The patterns for GPUs are in :mod:`agent.health.gpu.xid.log_lines`.

A pattern is literal text and directives, matched from the start of a message; the first match counts:

    %b  a PCI bus id        %d  a decimal number    %x  a hexadecimal number with its 0x
    %w  a word              %k  the rest of the line
    %*  anything up to the next literal, or to the end

The reader counts lines together if all directives except %* match the same text. So %* is used for the parts
that differ between the lines of a flood (a process, a channel, an address).

The table has texts of Linux 4.4 to 6.18. The reader has room for only 160 patterns, so some patterns also
match lines that report no fault; :mod:`agent.health.kernel_log.parse` decides. If the kernel logs a fault in
several lines, only one line is matched, so that the fault counts once. For example, the summary of an OOM
kill is matched, and for a PCIe error the line of the device that has the error.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final, NamedTuple

from agent.health.rules import OK, RuleInconclusive, RuleNotApplicable, RuleResult
from agent.model.machine_samples import LogLine, LogSample
from agent.model.reading import SourceState
from agent.model.time import Instant


class KernelLogCode(StrEnum):
    """Code of a fault that a kernel-log line reports. The docstring of each member ends with the form of the
    location in ``KernelLogFact.location``."""

    MACHINE_CHECK = "machine-check"
    """Uncorrected machine check; location: ``cpu<N>``."""
    MACHINE_CHECK_CORRECTED = "machine-check-corrected"
    """Corrected machine check.

    Location: ``cpu<N>``, or empty if the line states only that some were logged.
    """
    MACHINE_CHECK_DEFERRED = "machine-check-deferred"
    """Uncorrected error in data that nothing has used yet (AMD), mostly of memory; location: empty."""
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
    NIC_HEAT = "nic-heat"
    """ConnectX NIC that is too hot; location: a PCI address."""
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
    """Fault that the kernel log reports: all lines of one code about one location (a CPU, memory module,
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
        """Time at which the fault began: that of its first line since the fault was last over."""
        return self.series_first or self.first


def earliest_line(facts: Iterable[KernelLogFact]) -> Instant | None:
    """Return the time at which the first of several kernel-log faults began; None: ``facts`` is empty."""
    return min((fact.since for fact in facts), default=None)


class KernelLogLineGroupId(NamedTuple):
    """Identity of a group of similar kernel-log lines. The native kernel-log reader counts the lines of a
    group."""

    pattern: int
    first_us: int
    """Time of the entry's first line by the kernel log's clock [us]."""
    first_text: str


@dataclass(frozen=True, slots=True)
class KernelLogState:
    """Faults that the kernel log has reported so far, with the numbers of lines that were already counted."""

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
    ends: tuple[KernelLogFact, ...] = ()
    """Lines that end a fault of the last evaluation. The next evaluation applies them, so that the fault is
    reported."""

    def select(
        self, *codes: KernelLogCode, where: Callable[[str], bool] = lambda _: True
    ) -> tuple[KernelLogFact, ...]:
        """Return the kernel-log faults with one of ``codes``, oldest first.

        Args:
            where: Function that returns whether a fault with a given location is included.
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


def is_log_complete(log: LogSample | None) -> bool:
    """Return whether all lines of the kernel log since boot were read, so that a missing line was not
    written."""
    return log is not None and log.is_complete and log.source.state is SourceState.OK


def no_log_lines_result(reader: SourceState) -> RuleResult:
    """Return the result of a rule that reads only the kernel log and found no line of a fault. The result is
    OK if the log is read, not applicable if it cannot be read, and not evaluated while old lines are still
    being read."""
    return _NO_LINES_RESULTS[reader]


# --- patterns ----------------------------------------------------------------------------------------------

# A bank's status is 16 hexadecimal digits: the highest bit is always set, bit 61 if the error is uncorrected
_BANK: Final = "mce: [Hardware Error]: CPU %d: Machine Check%* Bank %*: "
_AMD: Final = "[Hardware Error]: CPU:%d (%*) MC%*_STATUS["
# Reports of firmware have a number in braces; a report without one is of the previous boot
_GHES: Final = "{%*}[Hardware Error]: event severity: "
_LOCKED: Final = "Watchdog detected hard LOCKUP on cpu %d"
_STUCK: Final = "BUG: soft lockup - CPU#%d stuck for "
_BEYOND: Final = "attempt to access beyond end of device"
_MLX5: Final = "mlx5_core %b: %*"
_AER: Final = "%* %b: %*PCIe Bus Error: severity="
_SHORT: Final = "HugeTLB: allocating %d of page size %w %w failed"

HOST_PATTERNS_BY_CODE: Final[Mapping[KernelLogCode, tuple[str, ...]]] = {
    KernelLogCode.MACHINE_CHECK: (*(f"{_BANK}{digit}%*" for digit in "abef"), f"{_AMD}%*|UE|%*"),
    KernelLogCode.MACHINE_CHECK_DEFERRED: (f"{_AMD}%*|Deferred|%*",),
    KernelLogCode.MACHINE_CHECK_CORRECTED: (
        f"{_BANK}%*",
        f"{_AMD}%*",
        "mce: [Hardware Error]: Machine check events logged%*",
    ),
    KernelLogCode.HARDWARE_ERROR: (f"{_GHES}fatal%*", f"{_GHES}recoverable%*"),
    KernelLogCode.HARDWARE_ERROR_CORRECTED: (f"{_GHES}corrected%*",),
    KernelLogCode.HARDWARE_SECTION: ("{%*}[Hardware Error]: %*section_type: %k",),
    KernelLogCode.SOFT_LOCKUP: (
        f"watchdog: {_STUCK}%*",
        f"NMI watchdog: {_STUCK}%*",  # before 4.17
        f"{_STUCK}%*",  # before 4.6
    ),
    KernelLogCode.HARD_LOCKUP: (
        f"watchdog: %*{_LOCKED}%*",  # 6.10 and later: the detecting CPU comes first
        f"NMI watchdog: {_LOCKED}%*",  # before 6.5, on x86
    ),
    KernelLogCode.RCU_STALL: (
        "rcu: INFO: %w %*detected stall%* on %*",  # and "self-detected"
        "rcu: INFO: %w detected expedited stalls on %*",
        "INFO: %w %*detected stall%* on %*",  # before 4.20
    ),
    # Names contain blanks and colons, and the number after them varies, so all lines are one kind
    KernelLogCode.HUNG_TASK: (
        "INFO: task %* blocked for more than %*",
        "INFO: task %* blocked in I/O wait for more than %*",
    ),
    KernelLogCode.OOM_KILL: (
        "oom-kill:constraint=%*,oom_memcg=%w,%*",
        "oom-kill:constraint=%w,%*",
        "Task in %* killed as a result of limit of %k",  # before 5.0, as the next one
        "Out of memory: Kill process %*",
    ),
    KernelLogCode.OOM_VICTIM: ("Memory cgroup out of memory: Kill process %*",),
    KernelLogCode.MEMORY_FAILURE: ("Memory failure: %*: recovery action for %*: %w",),
    KernelLogCode.EDAC_CORRECTED: ("EDAC MC%d: %* CE %*on %w (%*", "EDAC MC%d: %* CE %*"),
    KernelLogCode.EDAC_UNCORRECTED: ("EDAC MC%d: %* UE %*on %w (%*", "EDAC MC%d: %* UE %*"),
    KernelLogCode.NVME: (
        "nvme nvme%d: I/O %* timeout, %*",
        "nvme nvme%d: controller is down%*",
        "nvme nvme%d: Device not ready; %*",
        "nvme nvme%d: %*ing %*after %* failure%*",  # Removing after probe, Disabling device after reset
    ),
    KernelLogCode.NVME_PATH: ("block %w no %* path - %*",),
    KernelLogCode.IO_ERROR: (
        "Buffer I/O error on dev %w,%*",
        "%* error, dev %w,%*",  # "critical medium"; before 5.16 after the name of a function
    ),
    KernelLogCode.RAID: ("md/%w Disk failure on %w%*", "md/%w Cannot continue operation%*"),
    KernelLogCode.BEYOND_END: (f"{_BEYOND}%*", f"%*: {_BEYOND}%*"),  # 5.11 and later: the task comes first
    KernelLogCode.READ_ONLY: (
        "%w (%w): Remounting filesystem read-only%*",
        "XFS (%w): %*hut%* down%*",  # "Shutting down filesystem", "has been shut down due to"
        "BTRFS info (device %w%*): forced readonly%*",
        "FAT-fs (%w): Filesystem has been set read-only%*",
    ),
    KernelLogCode.FILESYSTEM: (
        "EXT4-fs error (device %w%*",
        "EXT4-fs (%w): %*I/O error %*superblock%*",
        "XFS (%w): %*etadata %*",  # "Metadata corruption", "metadata I/O error"
        "XFS (%w): %*nternal error %*",
        "XFS (%w): %*orruption detected%*",
        "EXT4-fs warning (device %w%*I/O error %*",  # writes of a file's data
        "Aborting journal on device %w%*",
        "JBD2: Error %* journal superblock for %w%*",
        "BTRFS error (device %w%* errs: wr %*",
        "BTRFS critical (device %w%*",
    ),
    KernelLogCode.NFS: (
        "%w server %w %w%*",  # "not responding", "OK"
        "NFS: %w Lock reclaim failed%*",
        "nfs4_reclaim_open_state: Lock reclaim failed%*",  # before 3.4
    ),
    KernelLogCode.PANIC: ("Kernel panic - not syncing: %*",),
    KernelLogCode.OOPS: (
        "BUG: %w %*",  # "unable to handle", "kernel NULL pointer"
        "Oops: %*",
        "general protection fault%*[#%*",
        "kernel BUG at %*",
        "Unable to handle kernel %*",  # arm64, as the next one
        "Internal error: %*[#%*",
    ),
    KernelLogCode.TABLE_FULL: (
        "nf_conntrack: %*table full%*, dropping packet%*",
        "VFS: file-max limit %* reached%*",
    ),
    KernelLogCode.NETDEV_HELD: ("unregister_netdevice: waiting for %w to become free%*",),
    KernelLogCode.PEERMEM: ("nvidia-peermem %w ERROR %*",),
    KernelLogCode.NCCL: ("%*: segfault at %* in libnccl%*", "traps: %* in libnccl%*"),
    # A function of the driver, a line number and a PID may stand before the text
    KernelLogCode.NIC_HEAT: (f"{_MLX5}: High temperature%*", f"{_MLX5}, High temperature%*"),
    KernelLogCode.NIC_HEALTH: (f"{_MLX5}ealth %w%*",),  # "health compromised", "Health issue observed"
    KernelLogCode.NIC_HARDWARE: (f"{_MLX5}synd %x%*",),
    KernelLogCode.NIC_COMMAND: (f"{_MLX5} timeout.%*",),
    KernelLogCode.NIC_REGISTER: (f"{_MLX5}ACCESS_REG(%*failed, status %*",),
    KernelLogCode.NIC_POWER: (f"{_MLX5}sufficient power %*",),  # and "insufficient"
    KernelLogCode.NIC_MODULE: (f"{_MLX5}Port module event%*: module %d, %*",),
    KernelLogCode.EFA: (
        "efa %b%*: %w%*",
        "infiniband %w %*dmin %*",
        "infiniband %w %*n't %*",
        "infiniband %w Wait for %*",
    ),
    KernelLogCode.TX_TIMEOUT: (
        "NETDEV WATCHDOG: %w (%*",
        "%w %w%*: NETDEV WATCHDOG: CPU%*",  # 6.6 and later
        "mlx5_core %b %w TX timeout detected%*",
    ),
    KernelLogCode.HUGEPAGES_SHORT: (
        f"{_SHORT} node%d.  Only allocated %d hugepages%*",
        f"{_SHORT}.  Only allocated %d hugepages%*",
    ),
    # These begin with the driver's name and so scan every line: they come last
    KernelLogCode.AER_CORRECTED: (f"{_AER}Correct%*",),  # "Corrected", in newer kernels "Correctable"
    KernelLogCode.AER_FATAL: (f"{_AER}Uncorrect%*(Fatal)%*",),
    KernelLogCode.AER_NONFATAL: (
        f"{_AER}Uncorrect%*(Non-Fatal)%*",
        "%* %b: AER: aer_uncor_severity: %*",  # from firmware, which does not state whether it was fatal
    ),
    KernelLogCode.PCI_FAULT: (
        "%* %b:%*: Slot(%*): Link Down%*",  # before 5.3 without "pciehp", as the next two
        "%* %b:%*: Slot(%*): Card not present%*",
        "%* %b:%*DPC%* containment event%*",
        "%* %b: AER: device recovery failed%*",
        "%* %b: %* change power state from %* inaccessible%*",
        "%* %b: Refused to change power state, currently in D3%*",  # before 5.5
    ),
}
"""Patterns of kernel-log lines, by code of the fault that they report."""
HOST_PATTERNS: Final = tuple(pattern for patterns in HOST_PATTERNS_BY_CODE.values() for pattern in patterns)
"""Patterns of all kernel-log lines about the host, in the order in which the native reader tries them."""


_DIRECTIVES: Final = {
    "%b": r"([0-9a-fA-F]{4,8}+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?+)",
    "%d": r"([0-9]++)",
    "%x": r"(0x[0-9a-fA-F]++)",
    "%w": r"([^ \t,()]++)",
    "%k": r"(.*+)",
}


class LateExpression:
    """Regular expression that is compiled at its first use, not at import. Thread-safe. If the kernel log has
    no lines for such an expression, the agent starts without compiling it."""

    def __init__(self, expression: str, flags: int = 0) -> None:
        self._expression = expression
        self._flags = flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._expression, self._flags)

    def match(self, text: str) -> re.Match[str] | None:
        """Match the expression from the start of a text; None: the text does not match."""
        return self._compiled.match(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Match the expression with a whole text; None: the text does not match."""
        return self._compiled.fullmatch(text)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the expression's first match within a text; None: the text has no match."""
        return self._compiled.search(text)


class LazyLinePattern:
    """Pattern of kernel-log lines whose regular expression is compiled only when it is needed. Thread-safe.
    It is compiled at the first line that begins with the literal text of the pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._begin = pattern.partition("%")[0]

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return compile_pattern(self._pattern)

    def match(self, text: str) -> re.Match[str] | None:
        """Match a message of the kernel log from its start; None: the message does not match."""
        return self._compiled.match(text) if text.startswith(self._begin) else None


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that accepts the same messages as the kernel-log reader in C.

    The expression has one group for each directive. Groups are possessive, because the reader does not
    backtrack.
    """
    tokens = re.split(r"(%[bdxwk*])", pattern)
    parts = []
    for index, token in enumerate(tokens):
        if index % 2 == 0:
            parts.append(re.escape(token))
        elif token != "%*":
            parts.append(_DIRECTIVES[token])
        elif literal := tokens[index + 1]:
            parts.append(f"((?>(?:(?!{re.escape(literal)}).)*))")  # not *+: wrong in 3.11.2
        else:
            parts.append("(.*+)")
    return re.compile("".join(parts), re.DOTALL)
