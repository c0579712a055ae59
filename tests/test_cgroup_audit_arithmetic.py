"""CPU shares, weights, quotas and page counts, compared with those of kubelet, OCI runtimes and kernel.

The rows come from kubelet v1.37.1 (the docstrings name its tests) and opencontainers/cgroups v0.0.7.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cgroup_audit.expected_values import (
    linear_weight,
    quadratic_weight,
    quota_from_millicores,
    shares_from_millicores,
    systemd_quota,
    whole_pages,
)
from agent.cgroup_audit.kubelet_config import PERIOD_US


@pytest.mark.parametrize(
    ("milli", "as_shares", "linear", "quadratic"),
    [
        (0, 2, 1, 1), (1, 2, 1, 1), (10, 10, 1, 4), (50, 51, 2, 11), (100, 102, 4, 17), (250, 256, 10, 35),
        (500, 512, 20, 59), (1000, 1024, 39, 100), (2000, 2048, 79, 174), (4000, 4096, 157, 303),
        (5000, 5120, 196, 363), (8000, 8192, 313, 532), (16000, 16384, 625, 942), (64000, 65536, 2500, 3023),
        (256000, 262144, 10000, 10000), (10**6, 262144, 10000, 10000),
    ],
)  # fmt: skip
def test_shares_and_both_weights_match_the_reference_table(
    milli: int, as_shares: int, linear: int, quadratic: int
) -> None:
    assert shares_from_millicores(milli) == as_shares
    assert linear_weight(as_shares) == linear
    assert quadratic_weight(as_shares) == quadratic


@pytest.mark.parametrize(("as_shares", "weight"), [(2, 1), (262144, 10000), (10**9, 10000)])
def test_linear_weight_matches_the_kubelets_table(as_shares: int, weight: int) -> None:
    """Kubelet test: TestGetCpuWeight."""
    assert linear_weight(as_shares) == weight


@pytest.mark.parametrize(
    ("milli", "quota"),
    [(0, 0), (5, 1000), (9, 1000), (10, 1000), (200, 20000), (500, 50000), (1000, 100000), (1500, 150000)],
)
def test_quota_matches_the_kubelets_table(milli: int, quota: int) -> None:
    """Kubelet test: TestMilliCPUToQuota."""
    assert quota_from_millicores(milli, PERIOD_US) == quota


def test_quota_with_period_of_5_ms_is_at_least_the_minimum() -> None:
    """Kubelet test: TestResourceConfigForPod, guaranteed-with-tuned-quota."""
    assert quota_from_millicores(100, 5000) == 1000


@pytest.mark.parametrize(
    ("milli", "cgroupfs", "systemd"),
    [(1255, 125500, 126000), (5, 1000, 1000), (15, 1500, 2000), (1250, 125000, 125000)],
)
def test_systemd_quota_is_rounded_up_to_10_ms(milli: int, cgroupfs: int, systemd: int) -> None:
    """Test vectors V12 and V13."""
    assert quota_from_millicores(milli, PERIOD_US) == cgroupfs
    assert systemd_quota(cgroupfs, PERIOD_US) == systemd


def test_limit_is_rounded_down_to_whole_pages() -> None:
    """Test vector V17."""
    assert whole_pages(10**9, 4096) == 999997440
    assert whole_pages(10**9, 65536) == 999948288
    assert whole_pages(3 << 20, 2 << 20) == 2 << 20


# --- properties --------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_cpu_never_lowers_shares_weight_or_quota(period: int, other: int) -> None:
    less, more = sorted((period, other))
    assert shares_from_millicores(less) <= shares_from_millicores(more)
    assert linear_weight(shares_from_millicores(less)) <= linear_weight(shares_from_millicores(more))
    assert quadratic_weight(shares_from_millicores(less)) <= quadratic_weight(shares_from_millicores(more))
    assert quota_from_millicores(less, PERIOD_US) <= quota_from_millicores(more, PERIOD_US)


@given(st.integers(1, 10**6), st.integers(1000, 10**6))
def test_systemd_quota_grows_by_less_than_one_step(milli: int, period_us: int) -> None:
    quota = quota_from_millicores(milli, period_us)
    up = systemd_quota(quota, period_us)
    assert 0 <= up - quota < 10_000 * period_us // 1_000_000 + 1
    assert systemd_quota(up, period_us) - up <= 10_000 * period_us // 1_000_000 + 1


@given(st.integers(0, 2**62), st.sampled_from([4096, 65536, 2 << 20, 1 << 30]))
def test_limit_in_whole_pages_never_exceeds_the_limit(limit: int, page: int) -> None:
    assert 0 <= limit - whole_pages(limit, page) < page
    assert whole_pages(limit, page) % page == 0
