"""What is told only when it has lasted for a minute, or is looked for now and then. Begun long before."""

from agents import HEALTHY, UNHEALTHY

from host_scenarios.hosts import Paper, RealHost
from host_scenarios.stage import Cause

POOL = "hugepages-2mi-node0"


def test_pages_that_were_taken_out_are_their_nodes(paper: Paper, poisoned: Cause) -> None:
    text = "mem.poisoned: 1 page with hardware errors"
    paper.stage.recall(poisoned)
    paper.stage.knows("memory-node0", "unhealthy", text)
    paper.stage.hears("memory-node0", UNHEALTHY, text)


def test_a_pool_that_has_been_full_for_a_minute_is_told_to_people(real: RealHost, full_pool: Cause) -> None:
    real.stage.recall(full_pool)
    real.stage.knows(POOL, "info", "mem.hugepages.exhausted: all 5 pages of 2mi are in use", more_s=60)
    real.stage.knows(POOL, "info", "mem.hugepages.surplus: 1 surplus page of 2mi in use")
    real.stage.hears(POOL, HEALTHY, "")
