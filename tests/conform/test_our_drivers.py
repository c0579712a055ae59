"""Our example drivers and the agent pass, as processes with real sockets."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from agents import Agent, PlainSysfs
from driver_scenarios.node import CPU_0, CPU_1, HOSTDEV, NODE, PAGES, Node
from kubelet import allocated_claim
from test_embed_processes import CARD, Program, config_of, generated_code
from test_embed_processes import PAGES as PAGES_DRIVER
from wire.plugin import Kubelet
from wire.serving import eventually, is_served

from conform.actions import Actions
from conform.running import ConformRun, Runs, checked_run, concurrent_runs, conform

__all__ = ["generated_code"]

pytestmark = pytest.mark.timeout(1800)  # a repeated run waits for the others
DURATION: Final = ("--for", "12s")
"""Duration above their default heartbeat of ten seconds."""
OLD_POD, NEW_POD = "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0", "7d1c9a52-0000-4000-8000-3f5e6a7b8c9d"


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp") as directory:
        yield Path(directory)


def _conform_all(kubelet_dir: Path, *flags: object) -> ConformRun:
    """Run conform against everything that is registered."""
    registry = kubelet_dir / "plugins_registry"
    return conform("--plugin-dir", registry, "--kubelet-dir", kubelet_dir, "--refuse", *DURATION, *flags)


def _claim_flags(
    root: Path, driver: str, *claims: tuple[str, Sequence[str]], file: str
) -> tuple[object, ...]:
    """Write claims, each a name with its devices, to the files that a driver reads; return the flags for
    them."""
    objects = [
        allocated_claim(
            name,
            f"uid-{name}",
            *(
                (f"r{at}", driver, NODE if driver == HOSTDEV else "node-a", device)
                for at, device in enumerate(devices)
            ),
            pods=[],
        )
        for name, devices in claims
    ]
    for obj in objects:
        (root / "claims" / file.format(**obj["metadata"])).write_text(json.dumps(obj))
    (root / "given.json").write_text(json.dumps(objects))
    return "--prepare", "--claims", root / "given.json", "--cdi-dir", root / "cdi"


# --- the example --------------------------------------------------------------------------------------------


def _hostdev_socket() -> ConformRun:
    with _directory() as root, Node(root, version="1.37") as node:
        node.hostdev()
        node.wait_healthy(PAGES, CPU_0, CPU_1)
        return conform("--socket", node.kubelet.root / "plugins" / HOSTDEV / "dra.sock", *DURATION)


def _hostdev() -> ConformRun:
    """Run conform with claims, restarts, a device that is removed, and a claim that is made and deleted."""
    with _directory() as root, Node(root, version="1.37") as node:
        programs = [node.hostdev()]
        node.wait_healthy(PAGES, CPU_0, CPU_1)

        def restart(text: str) -> None:
            programs[-1].end()
            programs.append(node.hostdev())
            node.wait_healthy(PAGES, CPU_0, CPU_1)

        def create(text: str) -> None:
            node.claim_file(json.loads(text)["metadata"]["name"]).write_text(text)

        def delete(text: str) -> None:
            node.claim_file(json.loads(text)["metadata"]["name"]).unlink()

        actions = {
            "restart": restart,
            "create": create,
            "delete": delete,
            "remove": lambda text: node.sysfs.resize(0),
            "restore": lambda text: node.sysfs.resize(8),
        }
        claims = ("pages", [PAGES]), ("cpus", [CPU_0])
        flags = _claim_flags(root, HOSTDEV, *claims, file="{namespace}_{name}.json")
        act = root / "act"
        more = ("--restart-command", f"{act} restart", "--remove-cdi", "--device-command", act)
        made = ("--device", f"{NODE}/{CPU_1}", "--claim-command", act)
        with Actions(root, actions):
            return _conform_all(node.kubelet.root, *flags, *more, *made)


def _hostdev_rolling() -> ConformRun:
    with _directory() as root, Node(root, version="1.37") as node:
        old = node.hostdev("--pod-uid", OLD_POD)
        node.wait_healthy(PAGES, CPU_0, CPU_1)
        node.hostdev("--pod-uid", NEW_POD)
        node.kubelet.wait_registered(HOSTDEV, count=2)
        old.logs("a newer instance leads; this instance sends no health")
        return _conform_all(node.kubelet.root)


# --- drahealth in other programs ----------------------------------------------------------------------------


def _run_embedded_driver(
    name: str,
    prepare: Callable[[Path], object] = lambda root: None,
    driver: str = CARD,
    devices: Sequence[str] = ("card-0", "card-1"),
    **options: Any,
) -> ConformRun:
    with _directory() as root:
        for directory in ("plugins_registry", "claims", "held"):
            (root / directory).mkdir()
        for card in ("card-0", "card-1"):
            (root / card).write_text("up\n")
        prepare(root)
        (root / "cdi").mkdir()
        claims = ("all", devices), ("one", devices[:1])
        flags = _claim_flags(root, driver, *claims, file="{name}.json")
        with Program(root, name, **options):
            _wait_registration(root)
            return _conform_all(root, *flags)


def _wait_registration(root: Path) -> None:
    registry = root / "plugins_registry"
    eventually(lambda: any(map(is_served, registry.glob("*.sock"))), "the driver registers")
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
    "asyncio": partial(_run_embedded_driver, "asyncio_driver.py"),
    "trio": partial(_run_embedded_driver, "trio_driver.py"),
    "threads": partial(_run_embedded_driver, "threaded_driver.py", config_of, PAGES_DRIVER, ["pages-0"]),
    "agent": _agent,
}
KNOWN: Final[dict[str, dict[str, str]]] = {
    # kubelets up to 1.38 use both; therefore our older instance is mute
    "hostdev in a rolling update": {"registration.several": "warn"},
    # it writes the errors of claims that do not exist itself
    "own server": {"prepare.errors.names": "warn"},
}
OWN: Final = "own server"


PREPARING: Final = ("hostdev", "asyncio", "trio", "threads", OWN)
"""Drivers that conform also prepares claims with."""

Work = dict[str, Callable[[], ConformRun]]


@pytest.fixture(scope="module")
def work(generated_code: Path) -> Work:
    return {
        **DRIVERS,
        OWN: partial(_run_embedded_driver, "own_server_driver.py", devices=["card-0"], path=generated_code),
    }


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
    if name in PREPARING:
        assert run.results["unprepare.all"] == "pass"
    if name == "hostdev":
        assert not any(result == "skipped" for result in run.results.values())
    assert run.errors == ""
