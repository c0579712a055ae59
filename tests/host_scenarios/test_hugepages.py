"""Pools of the real host that shrink, grow and run out; limits that are hit."""

import pytest
from agents import HEALTHY, UNHEALTHY
from machine import hugetlb_hit

from host_scenarios.declarations import device
from host_scenarios.figures import REAL
from host_scenarios.hosts import PAGES, RealHost
from host_scenarios.listeners import device_of
from host_scenarios.stage import OWNER

POOL = "hugepages-2mi-node0"
POD = "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0"
CONTAINER = "c" * 64


def test_a_pool_that_shrinks_is_short_until_the_pages_are_back(real: RealHost) -> None:
    real.stage.cause("hugepage pool shrunk", REAL)
    real.pool.resize(PAGES - 1)
    text = f"mem.hugepages.pool_shrunk: {PAGES - 1} pages of 2mi, {PAGES} at start"
    real.stage.hears(POOL, UNHEALTHY, text)
    real.stage.cause("hugepage pool as large as before", REAL)
    real.pool.resize(PAGES)
    real.stage.hears(POOL, HEALTHY, "")


def test_what_a_pool_has_grown_by_is_nobodys_due(real: RealHost) -> None:
    real.pool.resize(PAGES + 2)
    real.pool.resize(PAGES)
    real.stage.hears(POOL, HEALTHY, "")
    real.stage.cause("hugepage pool grown, then shrunk below its size at start", REAL)
    real.pool.resize(PAGES - 1)
    text = f"mem.hugepages.pool_shrunk: {PAGES - 1} pages of 2mi, {PAGES} at start"
    real.stage.hears(POOL, UNHEALTHY, text)
    real.pool.resize(PAGES)
    real.stage.hears(POOL, HEALTHY, "")


def test_declared_pages_are_missed_when_the_pool_has_fewer_than_all_of_them(real: RealHost) -> None:
    one, two = (device(f"huge-{i}", "hugepages", size="2Mi", pages=i + 1, numa=0) for i in (0, 1))
    real.stage.declare(one + two)
    real.stage.hears("huge-0", HEALTHY, "", OWNER)
    real.stage.hears("huge-1", HEALTHY, "", OWNER)
    real.pool.resize(PAGES - 1)
    real.stage.hears(POOL, UNHEALTHY, "mem.hugepages.pool_shrunk")
    real.stage.hears("huge-1", HEALTHY, "", OWNER)
    real.stage.cause("hugepage pool smaller than two declarations together", REAL)
    real.pool.resize(PAGES - 2)
    text = f"mem.hugepages.pool_shrunk: {PAGES - 2} pages of 2mi on node 0, 3 declared by 2 devices"
    real.stage.hears("huge-1", UNHEALTHY, text, OWNER)
    real.stage.hears("huge-0", UNHEALTHY, text, OWNER)
    real.stage.cause("declared hugepages are back", REAL)
    real.pool.resize(PAGES)
    real.stage.hears("huge-1", HEALTHY, "", OWNER)


def test_a_limit_that_kills_with_sigbus_is_a_note_on_the_container(real: RealHost) -> None:
    group = real.pods.make("burstable", POD, CONTAINER)
    (group / "hugetlb.2MB.max").write_text("4M\n")
    real.stage.follower.hear(lambda one: one["cgroups"]["watched"] == 2, "a pod and its container")
    at_ns = hugetlb_hit(group, 3).at_ns
    real.stage.cause("hugetlb limit hit, SIGBUS (cgroup v2)", REAL, at_ns)
    text = "cgroup.hugetlb.max_hit: 2mi pages hit the limit (limit 4 MiB)"
    real.stage.notes(f"pod {POD} container {CONTAINER}", text)
    real.stage.hears(POOL, HEALTHY, "")
    real.pods.remove("burstable", POD)


@pytest.mark.usefixtures("full_pool")
def test_a_pool_that_has_just_run_out_is_no_news(real: RealHost) -> None:
    began = real.stage.follower.newest["at"]
    now = real.stage.follower.hear(lambda one: one["at"] > began, "a later document")
    pool = device_of(now, POOL)
    assert pool is not None
    assert pool["causes"] == []
