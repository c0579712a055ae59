"""Which lines of the kernel log are looked for on account of the host: patterns, by what they tell of.

Owns the table; the language is agent.health.kernel_log.pattern's, and what a line says
agent.health.kernel_log.parse'.

Texts of Linux 5.4 to 6.18. A fault that the kernel tells in several lines is looked for in one of them, so
that it counts once: an OOM kill in its summary, a PCIe error in the line of the device that has it.
"""

from collections.abc import Mapping
from typing import Final

from agent.health.kernel_log.values import LogCode

# A bank's status as 16 hexadecimal digits: the highest bit is set in all, and bit 61 in the uncorrected ones
_BANK: Final = "mce: [Hardware Error]: CPU %d: Machine Check%* Bank %*: "
_AMD: Final = "[Hardware Error]: CPU:%d (%*) MC%*_STATUS["
# Firmware's reports, each with a number; without one, it is of the boot before this one
_GHES: Final = "{%*}[Hardware Error]: event severity: "
_LOCKED: Final = "Watchdog detected hard LOCKUP on cpu %d"
_AER: Final = "%* %b: %*PCIe Bus Error: severity="
_SHORT: Final = "HugeTLB: allocating %d of page size %w %w failed"

HOST: Final[Mapping[LogCode, tuple[str, ...]]] = {
    LogCode.MACHINE_CHECK: (*(f"{_BANK}{digit}%*" for digit in "abef"), f"{_AMD}%*|UE|%*"),
    LogCode.MACHINE_CHECK_CORRECTED: (
        f"{_BANK}%*",
        f"{_AMD}%*",
        "mce: [Hardware Error]: Machine check events logged%*",
    ),
    LogCode.HARDWARE_ERROR: (f"{_GHES}fatal%*", f"{_GHES}recoverable%*"),
    LogCode.HARDWARE_ERROR_CORRECTED: (f"{_GHES}corrected%*",),
    LogCode.SOFT_LOCKUP: ("watchdog: BUG: soft lockup - CPU#%d stuck for %*",),
    LogCode.HARD_LOCKUP: (
        f"watchdog: {_LOCKED}%*",
        f"watchdog: CPU%*: {_LOCKED}%*",  # 6.10 and later: who noticed comes first
        f"NMI watchdog: {_LOCKED}%*",  # before 6.5, on x86
    ),
    LogCode.RCU_STALL: (
        "rcu: INFO: %w self-detected stall on CPU%*",
        "rcu: INFO: %w detected stalls on %*",
        "rcu: INFO: %w detected expedited stalls on %*",
    ),
    # Names hold blanks and colons, and the number behind them is another each time. So all are one kind
    LogCode.HUNG_TASK: (
        "INFO: task %* blocked for more than %*",
        "INFO: task %* blocked in I/O wait for more than %*",
    ),
    LogCode.OOM_KILL: (
        "oom-kill:constraint=%*,oom_memcg=%w,%*",
        "oom-kill:constraint=%w,%*",
    ),
    LogCode.MEMORY_FAILURE: ("Memory failure: %*: recovery action for %*: %w",),
    LogCode.EDAC_CORRECTED: ("EDAC MC%d: %* CE %*on %w (%*", "EDAC MC%d: %* CE %*"),
    LogCode.EDAC_UNCORRECTED: ("EDAC MC%d: %* UE %*on %w (%*", "EDAC MC%d: %* UE %*"),
    LogCode.NVME: (
        "nvme nvme%d: I/O %* timeout, %*",
        "nvme nvme%d: controller is down%*",
        "nvme nvme%d: Device not ready; %*",
        "nvme nvme%d: Removing after probe failure%*",
        "nvme nvme%d: Disabling device after reset failure%*",
    ),
    LogCode.READ_ONLY: (
        "EXT4-fs (%w): Remounting filesystem read-only%*",
        "XFS (%w): %*Shutting down filesystem%*",
        "BTRFS info (device %w%*): forced readonly%*",
        "FAT-fs (%w): Filesystem has been set read-only%*",
    ),
    LogCode.HUGEPAGES_SHORT: (
        f"{_SHORT} node%d.  Only allocated %d hugepages%*",
        f"{_SHORT}.  Only allocated %d hugepages%*",
    ),
    # Whose driver it is stands first, so that these take a look at every line: they come last
    LogCode.AER_CORRECTED: (f"{_AER}Correct%*",),  # -ed; in newer kernels -able, and so below
    LogCode.AER_FATAL: (f"{_AER}Uncorrect%*(Fatal)%*",),
    LogCode.AER_NONFATAL: (
        f"{_AER}Uncorrect%*(Non-Fatal)%*",
        "%* %b: AER: aer_uncor_severity: %*",  # told by firmware; whether it was fatal no line says
    ),
    LogCode.PCI_FAULT: (
        "%* %b: pciehp: Slot(%*): Link Down%*",
        "%* %b: pciehp: Slot(%*): Card not present%*",
        "%* %b: DPC: containment event%*",
        "%* %b: AER: device recovery failed%*",
        "%* %b: Unable to change power state from %*, device inaccessible%*",
    ),
}
HOST_PATTERNS: Final = tuple(pattern for patterns in HOST.values() for pattern in patterns)
"""For the kernel-log reader, in order."""
