"""Fixtures: the node, the machine's hugepages, the driver, and the table of times."""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import yaml
from driver_scenarios.program import Program
from go_driver.module import DRIVER, go_module
from machine import HugepagePool, hugepages

from node_real.node import GO_DRIVER, NODE, RealNode
from node_real.programs import BINARIES, build
from node_real.workloads import CLAIMS, GO_CLASS, PODS, RESOURCE, SLICE, deploy_objects, device_class

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
            objects = [obj for obj in deploy_objects() if obj["kind"] != "DaemonSet"]
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
    for file in (node.directory / "log" / "pods").glob("*/*/*.log"):
        shutil.copy(file, logs / f"{file.parent.parent.name}-{file.name}")


class DriverProcess:
    """The example driver as a process of the node. It outlives tests: claims end before their driver."""

    def __init__(self, node: RealNode) -> None:
        self._node = node
        self._flags: tuple[str, ...] = ()
        self._program: Program | None = None

    def start(self, *flags: str) -> None:
        """Start the driver, unless it runs with these flags."""
        if self._program is not None and self._flags == flags:
            return
        self.stop()
        api = ("--kubeconfig", str(self._node.directory / "admin.conf"))
        devices = ("--node-name", NODE, "--hugepage-shares", str(SHARES))
        self._flags, self._program = flags, self._node.program("hostdev_driver", *api, *devices, *flags)
        self._program.logs("registered with the kubelet")
        self._node.api.wait(SLICE, lambda _: True, "published")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the driver, if it runs."""
        if self._program is not None:
            self._program.end(number)
            self._program = None


@pytest.fixture(scope="session")
def driver_process(node: RealNode) -> Iterator[DriverProcess]:
    """The example driver, not started; it ends after the last test."""
    process = DriverProcess(node)
    yield process
    process.stop()


@pytest.fixture
def driver(driver_process: DriverProcess) -> None:
    """The example driver as a running process of the node."""
    driver_process.start()


@pytest.fixture(scope="session")
def go_driver(node: RealNode, agent: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The example driver in Go as a process of the node, linked to the agent; two devices of the pool."""
    binary = tmp_path_factory.mktemp("go") / "go-driver"
    go_module(DRIVER).build(binary)
    pages = f"2Mi:{POOL_PAGES // SHARES}"
    socket_file = f"/run/drahealth/drivers/{GO_DRIVER}.sock"
    node.spawn(
        "go-driver", str(binary), "--kubeconfig", str(node.directory / "admin.conf"), "--node-name", NODE,
        "--hugepages", pages, "--hugepages", pages, "--drahealth-socket", socket_file,
    )  # fmt: skip
    node.api.call("POST", f"{RESOURCE}/deviceclasses", device_class(GO_CLASS, GO_DRIVER))


@pytest.fixture(scope="session")
def agent(node: RealNode) -> None:
    """The agent, with the paths of any node."""
    node.start_agent()


@pytest.fixture
def clean(node: RealNode, pool: HugepagePool) -> Iterator[None]:
    """Restore the pool, delete all pods, then all claims, after the test: a claim's end needs its driver."""
    yield
    pool.resize(POOL_PAGES)
    for kind in (PODS, CLAIMS):
        for item in node.api.call("GET", kind)["items"]:
            node.api.delete(f"{kind}/{item['metadata']['name']}")
