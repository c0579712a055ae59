"""A fleet of random nodes over days violates no invariant. Slow: minutes of evaluations."""

import pytest

from agent.simulate.fault_model import random_script
from agent.simulate.node_run import NodeRun


@pytest.mark.parametrize("rate_factor", [10, 200, 2000])
@pytest.mark.parametrize("node", range(8))
def test_fleet_over_days_violates_no_invariant(node, rate_factor):
    days = {10: 10.0, 200: 1.0, 2000: 0.1}[rate_factor]
    assert NodeRun(random_script(100, node, days, rate_factor)).run().violation is None
