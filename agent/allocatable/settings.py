"""Cgroup settings that hold an allocation: file names in v1 and v2, and formats of values."""

from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import format_cpus

UNLIMITED_FROM: Final = 2**62
"""Smallest value that means no limit: the kubelet's value for hugepages; v1 uses about twice as much for
memory."""


class SettingKind(StrEnum):
    """Kind of cgroup setting that holds an allocation."""

    WEIGHT = "cpu weight"
    """``cpu.weight``; in v1, ``cpu.shares``."""
    QUOTA = "cpu quota"
    PERIOD = "cpu period"
    MEMORY = "memory limit"
    PAGES = "hugepages limit"
    RESERVED = "hugepages reservation limit"
    CPUS = "cpus"
    EFFECTIVE = "effective cpus"


class SettingId(NamedTuple):
    """One cgroup setting: a file, or half of a file, since v2 has quota and period in ``cpu.max``."""

    knob: SettingKind
    size_kib: int = 0
    """Hugepage size [KiB]; 0 for settings other than hugepages."""


class SettingFile(NamedTuple):
    """File that holds a cgroup setting."""

    controller: str
    name: str


_FILES: Final[dict[SettingKind, tuple[str, str, str]]] = {  # controller, name in v1, name in v2
    SettingKind.WEIGHT: ("cpu", "cpu.shares", "cpu.weight"),
    SettingKind.QUOTA: ("cpu", "cpu.cfs_quota_us", "cpu.max"),
    SettingKind.PERIOD: ("cpu", "cpu.cfs_period_us", "cpu.max"),
    SettingKind.MEMORY: ("memory", "memory.limit_in_bytes", "memory.max"),
    SettingKind.PAGES: ("hugetlb", "hugetlb.{}.limit_in_bytes", "hugetlb.{}.max"),
    SettingKind.RESERVED: ("hugetlb", "hugetlb.{}.rsvd.limit_in_bytes", "hugetlb.{}.rsvd.max"),
    SettingKind.CPUS: ("cpuset", "cpuset.cpus", "cpuset.cpus"),
    SettingKind.EFFECTIVE: ("cpuset", "cpuset.effective_cpus", "cpuset.cpus.effective"),
}


def file_of(knob: SettingId, version: int) -> SettingFile:
    """Return the file that holds a setting in cgroup v1 or v2."""
    controller, *names = _FILES[knob.knob]
    return SettingFile(controller, names[version - 1].format(page_name(knob.size_kib)))


def limit_of(value: int) -> int:
    """Return the value of a limit file, or NO_LIMIT if the value means no limit."""
    return NO_LIMIT if value >= UNLIMITED_FROM else value


def page_name(size_kib: int) -> str:
    """Format a page size as in the kernel's hugetlb file names: ``64KB``, ``2MB``, ``1GB``."""
    for factor, unit in ((1 << 20, "GB"), (1 << 10, "MB")):
        if size_kib >= factor:
            return f"{size_kib // factor}{unit}"
    return f"{size_kib}KB"


def bytes_text(value: int) -> str:
    """Format bytes as a Kubernetes quantity, with a binary suffix if exact: ``384Mi``, ``1000000000``."""
    for factor, unit in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def value_text(knob: SettingKind, value: int) -> str:
    """Format the value of a cgroup setting with its unit."""
    if knob in {SettingKind.CPUS, SettingKind.EFFECTIVE}:
        return f"CPUs {format_cpus(value)}"
    if value == NO_LIMIT:
        return "unlimited"
    if knob in {SettingKind.MEMORY, SettingKind.PAGES, SettingKind.RESERVED}:
        return bytes_text(value)
    return f"{value} us" if knob in {SettingKind.QUOTA, SettingKind.PERIOD} else str(value)
