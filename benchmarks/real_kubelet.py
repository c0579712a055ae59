"""Time from a fault to the sync request of the real kubelet's DRA manager, as a table in Markdown.

``python benchmarks/real_kubelet.py [REPETITIONS] [VERSION]``, after ``make test-kubelet``. A driver in its
own process reports the fault of a device that a pod uses, and the kubelet's own code receives it over its
health stream.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

TOP: Final = Path(__file__).parents[1]
sys.path[:0] = [str(TOP / "tests"), str(TOP / "examples")]

from driver_scenarios.node import NODE, PAGES, Ask, Node  # noqa: E402
from driver_scenarios.program import Program  # noqa: E402
from go_driver.module import DRIVER as GO_DRIVER  # noqa: E402
from go_driver.module import go_module  # noqa: E402
from go_driver.node import GoNode  # noqa: E402
from go_driver.objects import decoder  # noqa: E402
from hostdev_driver.claims import ClaimFiles  # noqa: E402
from kubelet import Pod  # noqa: E402
from kubelet_real.kubelet import RealKubelet  # noqa: E402

import drahealth  # noqa: E402

DRIVER: Final = "card.example.com"
CHECK_S: Final = 0.1
"""Interval of the driver's check [s], the shortest allowed."""
SLOW_S: Final = 3600.0
PAUSE_S: Final = (0.5, 0.6)
"""Pause between repetitions [s], so that each fault is the first in a while, at any point of an interval."""
NS_PER_MS: Final = 1e6

Switch = Callable[[bool], None]
"""Breaks the device, or repairs it."""
Case = tuple[Node, Pod, Switch]


class Cards:
    """Driver whose claims always succeed."""

    def prepare(self, claim: drahealth.Claim) -> list[drahealth.PreparedDevice]:
        return [
            drahealth.PreparedDevice(requests=(device.request,), pool=device.pool, device=device.device)
            for device in claim.devices
        ]

    def unprepare(self, ref: drahealth.ClaimRef) -> None:
        """Nothing was set up."""


def run_driver(kubelet: Path, claims: Path, fault: Path, count: int) -> None:
    """Run a driver with ``count`` devices, of which the first is broken while the file ``fault`` exists."""
    state = kubelet / "plugins" / DRIVER / "drahealth"
    monitor = drahealth.Monitor(
        DRIVER, hardware=False, state_dir=state, config=drahealth.Config(node_name=NODE)
    )
    monitor.add(*(drahealth.Device(f"card-{number}") for number in range(count)))

    @monitor.check(every_s=CHECK_S, timeout_s=5, devices="card-0", raise_after=1, clear_after=1)
    def link(device: drahealth.Device) -> drahealth.Finding | None:
        return drahealth.unhealthy("card.link_down", "no link") if fault.exists() else None

    @monitor.check(every_s=SLOW_S, timeout_s=5)
    def exists(device: drahealth.Device) -> bool:
        return True

    server = drahealth.PluginServer(
        monitor, Cards(), get_claim=ClaimFiles(claims, DRIVER), kubelet_dir=kubelet
    )
    server.run()


# --- cases ----------------------------------------------------------------------------------------------


@contextmanager
def card_driver(count: int, root: Path, version: str) -> Iterator[Case]:
    """Run a driver of ``count`` devices and a pod that uses the first one."""
    with Node(root, real=True, version=version) as node, _cards(node, count) as found:
        yield found


@contextmanager
def _cards(node: Node, count: int) -> Iterator[Case]:
    fault = node.root / "fault"
    places = (str(node.kubelet.root), str(node.claims), str(fault))
    program = Program(
        "benchmarks.real_kubelet", "driver", *places, str(count), log_file=node.root / "log-driver"
    )
    try:
        node.kubelet.wait_health(DRIVER, NODE, f"card-{count - 1}", "Healthy")
        pod = node.run("it", Ask("it", {"card": "card-0"}), driver=DRIVER)
        node.kubelet.wait_running(pod)
        yield node, pod, lambda broken: fault.touch() if broken else fault.unlink()
    finally:
        program.close()


@contextmanager
def pool_driver(root: Path, version: str) -> Iterator[Case]:
    """Run the example driver and a pod that uses a hugepage pool of plain files."""
    with Node(root, real=True, version=version) as node:
        node.hostdev()
        node.wait_healthy(PAGES)
        yield _pool(node)


@contextmanager
def go_driver(root: Path, version: str) -> Iterator[Case]:
    """Run the agent, the Go driver and a pod that uses a hugepage pool of plain files."""
    module, binary, messages = go_module(GO_DRIVER), root / "go-driver", root / "messages"
    messages.mkdir()
    module.build(binary)
    decode = decoder(module.directories(), messages)
    with GoNode(root, binary, decode, real=True, version=version) as node:
        node.agent()
        node.driver()
        node.wait_healthy(PAGES)
        yield _pool(node)


def _pool(node: Node) -> Case:
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}))
    return node, pod, lambda broken: node.sysfs.resize(7 if broken else 8)


def durations_ms(node: Node, pod: Pod, switch: Switch, repetitions: int) -> list[float]:
    """Break and repair the device; return the times from each fault to the manager's request [ms]."""
    kubelet = node.kubelet
    assert isinstance(kubelet, RealKubelet)

    def switched(broken: bool) -> float:
        seen = len(kubelet.updates)
        start_ns = time.monotonic_ns()
        switch(broken)
        at_ns, pods = kubelet.wait_for(lambda: kubelet.updates[seen:], "a request")[0]
        assert pods == [pod.uid]
        expected = "Unhealthy" if broken else "Healthy"
        kubelet.wait_for(lambda: shown(kubelet, pod) == {expected}, f"the pod is {expected}")
        return (at_ns - start_ns) / NS_PER_MS

    found = []
    for _ in range(repetitions):
        time.sleep(random.uniform(*PAUSE_S))
        found.append(switched(True))
        switched(False)
    return found


def shown(kubelet: RealKubelet, pod: Pod) -> set[str]:
    """Return the health of the devices in the pod's status."""
    resources = kubelet.pod_status(pod).resources
    return {entry.health for claims in resources.values() for found in claims.values() for entry in found}


def main(repetitions: int, version: str) -> None:
    """Print the table."""
    cases = {
        "own check, every 100 ms": partial(card_driver, 1),
        "own check, every 100 ms, 1,000 devices": partial(card_driver, 1000),
        "hugepage pool, read every 1 s": pool_driver,
        "hugepage pool, read every 50 ms, agent and Go driver": go_driver,
    }
    print(f"| fault, {repetitions} times, kubelet {version} | p50 | p99 | max |\n|---|---|---|---|")
    for name, case in cases.items():
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp")))
            node, pod, switch = stack.enter_context(case(root, version))
            found = sorted(durations_ms(node, pod, switch, repetitions))
        p50, p99 = statistics.median(found), found[-1 - repetitions // 100]
        print(f"| {name} | {p50:.1f} ms | {p99:.1f} ms | {found[-1]:.1f} ms |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        run_driver(*map(Path, sys.argv[2:5]), int(sys.argv[5]))
    else:
        main(int((sys.argv[1:2] or ["50"])[0]), (sys.argv[2:3] or ["1.37"])[0])
