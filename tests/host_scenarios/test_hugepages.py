"""Pools of the real host that shrink, grow and run out, and hugepage limits that are hit."""

import pytest
from agents import HEALTHY, UNHEALTHY
from machine import hugetlb_hit

from host_scenarios.declarations import device
from host_scenarios.figures import REAL
from host_scenarios.hosts import PAGES, POOL, RealHost
from host_scenarios.stage import OWNER
from host_scenarios.subscribers import device_of

POD = "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
CONTAINER = "c" * 64


@pytest.mark.usefixtures("free_pool")
def test_shrunk_pool_is_unhealthy_until_the_pages_return(real: RealHost) -> None:
    real.stage.cause("hugepage pool shrunk", REAL)
    real.pool.resize(PAGES - 1)
    text = f"mem.hugepages.pool_shrunk: {PAGES - 1} pages of 2mi, {PAGES} at start"
    real.stage.expect_health(POOL, UNHEALTHY, text)
    real.stage.cause("hugepage pool as large as before", REAL)
    real.pool.resize(PAGES)
    real.stage.expect_health(POOL, HEALTHY, "")


@pytest.mark.usefixtures("free_pool")
def test_grown_pool_does_not_raise_the_expected_pages(real: RealHost) -> None:
    real.pool.resize(PAGES + 2)
    real.pool.resize(PAGES)
    real.stage.expect_health(POOL, HEALTHY, "")
    real.stage.cause("hugepage pool grown, then shrunk below its size at start", REAL)
    real.pool.resize(PAGES - 1)
    text = f"mem.hugepages.pool_shrunk: {PAGES - 1} pages of 2mi, {PAGES} at start"
    real.stage.expect_health(POOL, UNHEALTHY, text)
    real.pool.resize(PAGES)
    real.stage.expect_health(POOL, HEALTHY, "")


@pytest.mark.usefixtures("free_pool")
def test_pool_below_declared_pages_is_unhealthy(real: RealHost) -> None:
    first, two = (device(f"huge-{i}", "hugepages", size="2Mi", pages=i + 1, numa=0) for i in (0, 1))
    real.stage.declare(first + two)
    real.stage.expect_health("huge-0", HEALTHY, "", OWNER)
    real.stage.expect_health("huge-1", HEALTHY, "", OWNER)
    real.pool.resize(PAGES - 1)
    real.stage.expect_health(POOL, UNHEALTHY, "mem.hugepages.pool_shrunk")
    real.stage.expect_health("huge-1", HEALTHY, "", OWNER)
    real.stage.cause("hugepage pool smaller than two declarations together", REAL)
    real.pool.resize(PAGES - 2)
    text = f"mem.hugepages.pool_shrunk: {PAGES - 2} pages of 2mi on NUMA node 0, 3 declared by 2 devices"
    real.stage.expect_health("huge-1", UNHEALTHY, text, OWNER)
    real.stage.expect_health("huge-0", UNHEALTHY, text, OWNER)
    real.stage.cause("declared hugepages are back", REAL)
    real.pool.resize(PAGES)
    real.stage.expect_health("huge-1", HEALTHY, "", OWNER)


@pytest.mark.usefixtures("free_pool")
def test_hugetlb_sigbus_is_a_note_on_the_container(real: RealHost) -> None:
    group = real.pods.make("burstable", POD, CONTAINER)
    (group / "hugetlb.2MB.max").write_text("4M\n")
    real.stage.follower.wait_for(lambda entry: entry["cgroups"]["watched"] == 2, "a pod and its container")
    at_ns = hugetlb_hit(group, 3).at_ns
    real.stage.cause("hugetlb limit hit, SIGBUS (cgroup v2)", REAL, at_ns)
    text = "cgroup.hugetlb.max_hit: 2mi pages hit the limit (limit 4 MiB)"
    real.stage.expect_note(f"pod {POD} container {CONTAINER}", text)
    real.stage.expect_health(POOL, HEALTHY, "")
    real.pods.remove("burstable", POD)


@pytest.mark.usefixtures("just_filled_pool")
def test_recently_exhausted_pool_is_not_reported(real: RealHost) -> None:
    began = real.stage.follower.newest["at"]
    now = real.stage.follower.wait_for(lambda entry: entry["at"] > began, "a later document")
    pool = device_of(now, POOL)
    assert pool is not None
    assert pool["causes"] == []
