"""Findings that must last for a minute or are read rarely; their causes began before."""

from agents import HEALTHY, UNHEALTHY

from host_scenarios.hosts import POOL, Paper, RealHost
from host_scenarios.stage import Cause


def test_poisoned_pages_count_for_their_node(paper: Paper, poisoned_page: Cause) -> None:
    text = "mem.poisoned: 1 page with hardware errors"
    paper.stage.resume_cause(poisoned_page)
    paper.stage.expect_cause("memory-node0", "unhealthy", text)
    paper.stage.expect_health("memory-node0", UNHEALTHY, text)


def test_pool_exhausted_for_a_minute_is_reported_as_info(real: RealHost, full_pool: Cause) -> None:
    real.stage.resume_cause(full_pool)
    real.stage.expect_cause(POOL, "info", "mem.hugepages.exhausted: all 5 pages of 2mi are in use", more_s=60)
    real.stage.expect_cause(POOL, "info", "mem.hugepages.surplus: 1 surplus page of 2mi in use")
    real.stage.expect_health(POOL, HEALTHY, "")
