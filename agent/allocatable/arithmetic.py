"""From thousandths of a CPU, and bytes, to what stands in a cgroup's file. Integers, truncated as upstream's.

Source: kubelet v1.37.1, pkg/kubelet/cm (shares, quota, linear weight); github.com/opencontainers/cgroups
v0.0.7 (quadratic weight, systemd's round-up); kernel, mm/page_counter.c and mm/hugetlb_cgroup.c (pages).
"""

import math
from typing import Final

MIN_SHARES: Final = 2
MAX_SHARES: Final = 262_144
MIN_QUOTA_US: Final = 1000
PERIOD_US: Final = 100_000
"""The kubelet's own, unless its cpuCFSQuotaPeriod and the gate for it say otherwise."""
_STEP_US: Final = 10_000
"""systemd keeps a quota as a percentage of a CPU: 10 ms of each second."""
_SECOND_US: Final = 1_000_000


def shares_of(milli: int) -> int:
    """``cpu.shares`` for thousandths of a CPU."""
    return max(MIN_SHARES, min(milli * 1024 // 1000, MAX_SHARES))


def linear_weight(shares: int) -> int:
    """``cpu.weight`` as the kubelet converts for pods and classes, and older OCI runtimes for containers."""
    return 1 + (max(MIN_SHARES, min(shares, MAX_SHARES)) - 2) * 9999 // 262_142


def quadratic_weight(shares: int) -> int:
    """``cpu.weight`` as runc converts from 1.3.2 on, and crun from 1.23: 1024 shares are the default, 100."""
    if shares <= MIN_SHARES:
        return 1
    if shares >= MAX_SHARES:
        return 10_000
    exponent = math.log2(shares)
    # The order of evaluation decides whether 1024 shares are 100 or 101.
    return math.ceil(math.pow(10, (exponent * exponent + 125 * exponent) / 612.0 - 7.0 / 34.0))


def quota_of(milli: int, period_us: int) -> int:
    """CFS quota [us] for thousandths of a CPU; 0 for none, which leaves the file alone."""
    return max(milli * period_us // 1000, MIN_QUOTA_US) if milli else 0


def systemd_quota(quota_us: int, period_us: int) -> int:
    """The quota that systemd makes of one: up to the next 10 ms of each second."""
    per_second = quota_us * _SECOND_US // period_us
    if per_second % _STEP_US == 0:
        return quota_us
    return (per_second // _STEP_US + 1) * _STEP_US * period_us // _SECOND_US


def whole_pages(limit_bytes: int, page_bytes: int) -> int:
    """A limit as the kernel keeps it: in pages, rounded down."""
    return limit_bytes - limit_bytes % page_bytes
