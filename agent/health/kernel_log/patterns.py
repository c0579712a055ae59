"""Patterns that select kernel-log lines about faults of the host, and their pattern language.

The native kernel-log reader matches the patterns in C; :func:`compile_pattern` gives the equivalent regular
expression. The patterns for GPUs are in :mod:`agent.health.gpu.xid.log_lines`.

A pattern is literal text and directives, matched from the start of a message; the first match counts:

    %b  a PCI bus id        %d  a decimal number    %x  a hexadecimal number with its 0x
    %w  a word              %k  the rest of the line
    %*  anything up to the next literal, or to the end

The reader counts lines together if all directives except %* match the same text. So parts that differ between
the lines of a flood (a process, a channel, an address) are matched by %*.

The table holds texts of Linux 4.4 to 6.18. The reader has room for 160 patterns, so some of them match
more than faults: :mod:`agent.health.kernel_log.parse` decides. If the kernel logs a fault in several lines,
only one is matched, so that the fault counts once: the summary of an OOM kill, the line of the device that
has a PCIe error.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Final

from agent.health.kernel_log.facts import KernelLogCode

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
        "Unable to handle kernel %*",  # arm64
    ),
    KernelLogCode.TABLE_FULL: (
        "nf_conntrack: %*table full%*, dropping packet%*",
        "VFS: file-max limit %* reached%*",
    ),
    KernelLogCode.NETDEV_HELD: ("unregister_netdevice: waiting for %w to become free%*",),
    KernelLogCode.PEERMEM: ("nvidia-peermem %w ERROR %*",),
    KernelLogCode.NCCL: ("%*: segfault at %* in libnccl%*", "traps: %* in libnccl%*"),
    # A function of the driver, a line number and a PID may stand before the text
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
        "%* %b: pciehp: Slot(%*): Link Down%*",
        "%* %b: pciehp: Slot(%*): Card not present%*",
        "%* %b: DPC: containment event%*",
        "%* %b: AER: device recovery failed%*",
        "%* %b: Unable to change power state from %*, device inaccessible%*",
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
    """Regular expression that is compiled at its first use, not at import. Thread-safe.

    A start of the agent without lines in the kernel log uses no such expression.
    """

    def __init__(self, expression: str, flags: int = 0) -> None:
        self._expression = expression
        self._flags = flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._expression, self._flags)

    def match(self, text: str) -> re.Match[str] | None:
        """Match the expression from the start of a text; None: it does not match."""
        return self._compiled.match(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Match the expression with a whole text; None: it does not match."""
        return self._compiled.fullmatch(text)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the expression's first match within a text; None: there is none."""
        return self._compiled.search(text)


class LazyLinePattern:
    """Pattern whose regular expression is compiled at the first line that begins like it. Thread-safe."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._begin = pattern.partition("%")[0]

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return compile_pattern(self._pattern)

    def match(self, text: str) -> re.Match[str] | None:
        """Match a message of the kernel log from its start; None: it does not match."""
        return self._compiled.match(text) if text.startswith(self._begin) else None


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that accepts the same messages as the reader in C, with one group for
    each directive. Groups are possessive, because the reader does not backtrack."""
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
