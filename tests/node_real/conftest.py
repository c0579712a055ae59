"""Fixtures: the node, the machine's hugepages, the driver, and the table of times."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import yaml
from driver_scenarios.program import Program
from machine import HugepagePool, hugepages

from node_real.node import ADMIN_TOKEN, NODE, SERVICE_IP, RealNode
from node_real.programs import BINARIES, build
from node_real.workloads import CLAIMS, PODS, SLICE, deploy_objects

POOL_PAGES: Final = 32
SHARES: Final = 4
"""Devices of the pool, of 8 pages each."""
HERE: Final = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this directory time for compilers and for waits of minutes."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))


class Times:
    """Measured times of the scenarios; not asserted."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Record how long the body took."""
        began = time.monotonic()
        yield
        self.rows.append((what, time.monotonic() - began))

    def table(self) -> str:
        """Return the times as Markdown."""
        lines = [f"| {what} | {seconds:.2f} s |" for what, seconds in self.rows]
        return "\n".join(["| from | to, after |", "|---|---:|", *lines, ""])


@pytest.fixture(scope="session")
def times() -> Iterator[Times]:
    """Times of this run; written to build/node-real/times.md and printed at the end."""
    result = Times()
    yield result
    (BINARIES / "times.md").write_text(result.table())


@pytest.fixture(scope="session")
def pool() -> Iterator[HugepagePool]:
    """Hugepages of 2 MiB; the machine's lock is held until the end of the session."""
    with hugepages(2048, POOL_PAGES) as pool:
        yield pool


@pytest.fixture(scope="session")
def node(pool: HugepagePool, times: Times) -> Iterator[RealNode]:
    """The node, Ready, with the objects of the driver's deploy.yaml except its DaemonSet."""
    binaries = build()
    with (
        tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory,
        RealNode(Path(directory), binaries) as node,
    ):
        times.rows += [(f"start to {what}", seconds) for what, seconds in node.times.items()]
        try:
            objects = [one for one in deploy_objects() if one["kind"] != "DaemonSet"]
            node.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))
            default = "/api/v1/namespaces/default/serviceaccounts/default"
            node.api.wait(default, lambda _: True, "created")
            yield node
        finally:
            save_logs(node)


def save_logs(node: RealNode) -> None:
    """Keep the logs of the last run in build/node-real/logs."""
    logs = BINARIES / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    shutil.copytree(node.directory / "logs", logs)


@pytest.fixture(scope="session")
def start_driver(node: RealNode) -> Iterator[Callable[..., Program]]:
    """Start the example driver as a process of the node; ended with the session."""
    started: list[Program] = []
    token = node.directory / "driver-token"
    token.write_text(ADMIN_TOKEN)

    def start(*flags: str) -> Program:
        api = ("--api-server", f"https://{SERVICE_IP}", "--api-token", str(token))
        ca = ("--api-ca", str(node.directory / "pki" / "apiserver.crt"))
        devices = ("--node-name", NODE, "--hugepage-shares", str(SHARES))
        program = node.program("hostdev_driver", *api, *ca, *devices, *flags)
        started.append(program)
        node.api.wait(SLICE, lambda _: True, "published")
        return program

    try:
        yield start
    finally:
        for program in started:
            program.close()


@pytest.fixture(scope="session")
def driver(start_driver: Callable[..., Program]) -> Program:
    """The example driver as a process of the node."""
    return start_driver()


@pytest.fixture
def clean(node: RealNode) -> Iterator[None]:
    """Delete all pods, then all claims, after the test: a claim's end needs its driver."""
    yield
    for kind in (PODS, CLAIMS):
        for one in node.api.call("GET", kind)["items"]:
            node.api.delete(f"{kind}/{one['metadata']['name']}")
