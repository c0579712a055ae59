"""Nodes for the scenarios."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from driver_scenarios.node import CPU_0, CPU_1, FAKE, PAGES, REAL, SICK, Node
from driver_scenarios.program import Program


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    """Return a function that starts a node with a kubelet of this kind until the end of the test."""
    with ExitStack() as stack:

        def make(**kubelet: Any) -> Node:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp"))
            return stack.enter_context(Node(Path(directory), **kubelet))

        yield make


@pytest.fixture(params=[FAKE, *REAL])
def node(request: pytest.FixtureRequest, make_node: Callable[..., Node]) -> Node:
    """Return a node without a driver, with the fake kubelet 1.36 and with real ones."""
    version, real = request.param
    return make_node(version=version, real=real)


@pytest.fixture
def hostdev(node: Node) -> Program:
    """Return the example driver on the node, with all devices Healthy."""
    driver = node.hostdev()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    return driver


@pytest.fixture
def failing_driver(node: Node) -> Program:
    """Return the failing driver on the node, with all devices Healthy."""
    driver = node.start_failing_driver()
    node.wait_healthy("thing-0", "thing-1", driver=SICK)
    return driver
