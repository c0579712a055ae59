"""Our example drivers and the agent pass, as processes with real sockets."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from agents import Agent, PlainSysfs
from driver_scenarios.node import CPU_0, CPU_1, HOSTDEV, PAGES, Node
from test_embed_processes import Program, config_of, generated
from wire.plugin import Kubelet
from wire.serving import eventually

from conform.running import ConformRun, Runs, checked_run, concurrent_runs, conform

__all__ = ["generated"]

DURATION: Final = ("--for", "12s")
"""Duration above their default heartbeat of ten seconds."""
OLD_POD, NEW_POD = "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0", "7d1c9a52-0000-4000-8000-3f5e6a7b8c9d"


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        yield Path(directory)


def _conform_all(kubelet_dir: Path) -> ConformRun:
    """Run conform against everything that is registered."""
    registry = kubelet_dir / "plugins_registry"
    return conform("--plugin-dir", registry, "--kubelet-dir", kubelet_dir, "--refuse", *DURATION)


# --- the example --------------------------------------------------------------------------------------------


def _hostdev_socket() -> ConformRun:
    with _directory() as root, Node(root, version="1.37") as node:
        node.hostdev()
        node.wait_healthy(PAGES, CPU_0, CPU_1)
        return conform("--socket", node.kubelet.root / "plugins" / HOSTDEV / "dra.sock", *DURATION)


def _hostdev() -> ConformRun:
    with _directory() as root, Node(root, version="1.37") as node:
        node.hostdev()
        node.wait_healthy(PAGES, CPU_0, CPU_1)
        return _conform_all(node.kubelet.root)


def _hostdev_rolling() -> ConformRun:
    with _directory() as root, Node(root, version="1.37") as node:
        old = node.hostdev("--pod-uid", OLD_POD)
        node.wait_healthy(PAGES, CPU_0, CPU_1)
        node.hostdev("--pod-uid", NEW_POD)
        node.kubelet.wait_registered(HOSTDEV, count=2)
        old.logs("a newer instance of the driver leads; this one sends no health")
        return _conform_all(node.kubelet.root)


# --- drahealth in other programs ----------------------------------------------------------------------------


def _embedded(name: str, prepare: Callable[[Path], object] = lambda root: None, **options: Any) -> ConformRun:
    with _directory() as root:
        for directory in ("plugins_registry", "claims", "held"):
            (root / directory).mkdir()
        for card in ("card-0", "card-1"):
            (root / card).write_text("up\n")
        prepare(root)
        with Program(root, name, **options):
            _wait_registration(root)
            return _conform_all(root)


def _wait_registration(root: Path) -> None:
    registry = root / "plugins_registry"
    eventually(lambda: any(path.is_socket() for path in registry.iterdir()), "the driver registers")
    [socket] = registry.iterdir()
    with Kubelet(socket) as kubelet:
        kubelet.get_info()


# --- the agent ----------------------------------------------------------------------------------------------


def _agent() -> ConformRun:
    with _directory() as root, ExitStack() as stack:
        sysfs, cgroups = PlainSysfs(root / "sys"), root / "cgroup"
        cgroups.mkdir()
        roots = ("--sysfs-root", str(sysfs.root), "--cgroupfs-root", str(cgroups))
        agent = stack.enter_context(Agent(root, *roots, "--node-name", "paper"))
        return conform("--socket", agent.health_socket, *DURATION)


DRIVERS: Final[dict[str, Callable[[], ConformRun]]] = {
    "hostdev, its service socket": _hostdev_socket,
    "hostdev": _hostdev,
    "hostdev in a rolling update": _hostdev_rolling,
    "asyncio": partial(_embedded, "asyncio_driver.py"),
    "trio": partial(_embedded, "trio_driver.py"),
    "threads": partial(_embedded, "threaded_driver.py", config_of),
    "agent": _agent,
}
KNOWN: Final[dict[str, dict[str, str]]] = {
    # kubelets up to 1.38 use both; therefore our older instance is mute
    "hostdev in a rolling update": {"registration.several": "warn"},
}
OWN: Final = "own server"


Work = dict[str, Callable[[], ConformRun]]


@pytest.fixture(scope="module")
def work(generated: Path) -> Work:
    return {**DRIVERS, OWN: partial(_embedded, "own_server_driver.py", path=generated)}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, work: Work) -> Iterator[Runs]:
    with concurrent_runs(request, work) as started:
        yield started


@pytest.mark.parametrize("name", [*DRIVERS, OWN])
def test_our_driver_passes_all_checks(runs: Runs, work: Work, name: str) -> None:
    expected = KNOWN.get(name, {})
    run = checked_run(runs, name, work[name], expected)
    assert run.matches(expected), json.dumps(run.document, indent=1)
    assert run.results["health.heartbeat"] == "pass", "the session was long enough"
    assert run.errors == ""
