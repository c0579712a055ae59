"""Cgroup settings that the audit compares: files in cgroup v1 and v2, and display of values."""

from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.cpuset import format_cpus
from agent.model.pod_findings import NO_LIMIT

UNLIMITED_FROM: Final = 2**62
"""Smallest value of a setting that means no limit.

The kubelet writes this value for hugepages; cgroup v1 shows a larger one for unlimited memory.
"""


class SettingKind(StrEnum):
    """Kind of cgroup setting: the resource, and whether the setting is a weight, a limit or a CPU set."""

    WEIGHT = "cpu weight"
    """``cpu.weight``; in v1, ``cpu.shares``."""
    QUOTA = "cpu quota"
    PERIOD = "cpu period"
    MEMORY = "memory limit"
    PAGES = "hugepages limit"
    RESERVED = "hugepages reservation limit"
    CPUS = "cpus"
    EFFECTIVE = "effective cpus"
    HIGH = "memory high"
    """``memory.high``: above it, the kernel throttles and reclaims. v2 only."""
    MIN = "memory min"
    """``memory.min``: memory that the kernel never reclaims. v2 only."""
    LOW = "memory low"
    """``memory.low``: memory that the kernel reclaims last. v2 only."""
    SWAP = "swap limit"
    """``memory.swap.max``; in v1, the limit on memory and swap together."""
    OOM_SCORE = "OOM score"
    """``oom_score_adj`` of the container's first process."""


class CgroupSettingId(NamedTuple):
    """Identity of a setting within a cgroup: its kind, and for hugepages the page size."""

    kind: SettingKind
    size_kib: int = 0
    """Hugepage size [KiB]; 0 for settings other than hugepages."""


class SettingFile(NamedTuple):
    """File that holds a cgroup setting. In cgroup v2, the file ``cpu.max`` holds two settings."""

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
    SettingKind.HIGH: ("memory", "memory.high", "memory.high"),
    SettingKind.MIN: ("memory", "memory.min", "memory.min"),
    SettingKind.LOW: ("memory", "memory.low", "memory.low"),
    SettingKind.SWAP: ("memory", "memory.memsw.limit_in_bytes", "memory.swap.max"),
    SettingKind.OOM_SCORE: ("", "oom_score_adj", "oom_score_adj"),
}
BYTES: Final = frozenset(
    {
        SettingKind.MEMORY,
        SettingKind.PAGES,
        SettingKind.RESERVED,
        SettingKind.HIGH,
        SettingKind.MIN,
        SettingKind.LOW,
        SettingKind.SWAP,
    }
)
"""Kinds of cgroup settings whose value is an amount of memory [bytes]."""
PROTECTIONS: Final = frozenset({SettingKind.MIN, SettingKind.LOW})
"""Kinds of settings that protect memory from reclaim, so that 0 is the absence of a setting."""


def setting_file(setting: CgroupSettingId, version: int) -> SettingFile:
    """Return the file that holds a setting; ``version``: cgroup version, 1 or 2."""
    controller, *names = _FILES[setting.kind]
    return SettingFile(controller, names[version - 1].format(hugepage_size_name(setting.size_kib)))


def normalize_limit(value: int) -> int:
    """Replace a value that means no limit, such as the large number in cgroup v1 files, by NO_LIMIT."""
    return NO_LIMIT if value >= UNLIMITED_FROM else value


def hugepage_size_name(size_kib: int) -> str:
    """Format a hugepage size as the kernel does in its hugetlb files: ``64KB``, ``2MB``, ``1GB``."""
    for factor, unit in ((1 << 20, "GB"), (1 << 10, "MB")):
        if size_kib >= factor:
            return f"{size_kib // factor}{unit}"
    return f"{size_kib}KB"


def format_bytes(value: int) -> str:
    """Format bytes as a Kubernetes quantity: ``384Mi``, or ``1000000000`` if no binary suffix is exact."""
    for factor, unit in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def format_setting_value(kind: SettingKind, value: int) -> str:
    """Format the value of a cgroup setting with its unit."""
    if kind in {SettingKind.CPUS, SettingKind.EFFECTIVE}:
        return f"CPUs {format_cpus(value)}"
    if value == NO_LIMIT:
        return "unlimited"
    if kind in BYTES:
        return format_bytes(value)
    return f"{value} us" if kind in {SettingKind.QUOTA, SettingKind.PERIOD} else str(value)
