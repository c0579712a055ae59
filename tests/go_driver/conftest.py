"""Fixtures: the driver, built once, and nodes for it."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from agents import Agent
from driver_scenarios.node import REAL
from driver_scenarios.program import Program

from go_driver.module import DRIVER, LIBRARY, GoModule, go_module
from go_driver.node import CPU_0, CPU_1, PAGES, GoNode
from go_driver.objects import Decode, decoder

COMPILE_S: Final = 1800
"""Limit of a test here [s]: the first one waits for Go, which compiles for minutes on a busy machine."""


@pytest.fixture(scope="session")
def go() -> GoModule:
    """Go module of the driver, which can be built here."""
    return go_module(DRIVER)


@pytest.fixture(scope="session")
def library() -> GoModule:
    """Go module of the client library, which can be built here."""
    return go_module(LIBRARY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this directory their own limit."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(COMPILE_S))


@pytest.fixture(params=[LIBRARY, DRIVER], ids=lambda path: path.name)
def module(request: pytest.FixtureRequest) -> GoModule:
    """Each of the two Go modules."""
    return go_module(request.param)


@pytest.fixture(scope="session")
def binary(go: GoModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the driver's binary."""
    path = tmp_path_factory.mktemp("go") / "go-driver"
    go.build(path)
    return path


@pytest.fixture(scope="session")
def decode(go: GoModule, tmp_path_factory: pytest.TempPathFactory) -> Decode:
    """Decoder of request bodies for the API server."""
    return decoder(go.directories(), tmp_path_factory.mktemp("proto"))


@pytest.fixture
def make_node(binary: Path, decode: Decode) -> Iterator[Callable[..., GoNode]]:
    """Factory of nodes that live until the end of the test; the arguments go to the kubelet."""
    with ExitStack() as stack:

        def make(**kubelet: Any) -> GoNode:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp"))
            return stack.enter_context(GoNode(Path(directory), binary, decode, **kubelet))

        yield make


@pytest.fixture(params=[pytest.param(("1.37", False), id="fake-1.37"), *REAL])
def node(request: pytest.FixtureRequest, make_node: Callable[..., GoNode]) -> GoNode:
    """Node with the fake kubelet 1.37 and with real ones, without agent and driver."""
    version, real = request.param
    return make_node(version=version, real=real)


@pytest.fixture
def agent(node: GoNode) -> Agent:
    """Agent of the node."""
    return node.agent()


@pytest.fixture
def driver(node: GoNode, agent: Agent) -> Program:
    """Driver of the node with the agent; all devices are Healthy."""
    started = node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    return started
