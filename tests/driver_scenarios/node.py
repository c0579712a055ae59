"""A node for drivers: a kubelet, the claims and pods of the cluster, and the drivers themselves."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pytest
from agents import PlainSysfs
from kubelet import FakeKubelet, Pace, Pod, allocated_claim
from kubelet.events import Event
from kubelet.history import Called
from kubelet_real.implementations import MARKS, real_kubelet

from driver_scenarios.program import Program

HOSTDEV: Final = "hostdev.drahealth.example.com"
SICK: Final = "sick.example.com"
NODE: Final = "node-1"
PAGES: Final = "hugepages-2mi-node0-0"
CPU_0, CPU_1 = "cpus-node0-0", "cpus-node0-1"
ORDER_TRIES: Final = 400
"""Calls after which the kubelet has shown each failed claim.

The kubelet shows the first failed claim of a Go map. Go begins at a random one of eight slots, so a call
shows a given claim in at least one of eight cases, and 400 calls miss it once in 10^23 runs.
"""
TEXT_LIMIT: Final = 1024
FAILED: Final = (
    "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for"
    " ResourceClaim"
)


class Ask(NamedTuple):
    """A claim of the namespace ``default``, created by a user and allocated by the scheduler."""

    name: str
    devices: Mapping[str, str]
    """Device by request."""
    config: Sequence[Mapping[str, Any]] = ()

    @property
    def uid(self) -> str:
        """UID made from the name, no longer than those of Kubernetes."""
        return f"uid-{self.name[-32:]}"


def parameters(kind: str, *requests: str, **fields: object) -> dict[str, Any]:
    """Return parameters of a claim for the example driver."""
    given = {"apiVersion": f"{HOSTDEV}/v1", "kind": kind, **fields}
    return {
        "source": "FromClaim",
        "requests": list(requests),
        "opaque": {"driver": HOSTDEV, "parameters": given},
    }


FAKE: Final = pytest.param(("1.36", False), id="fake-1.36")
REAL: Final = [
    pytest.param((version, True), id=f"real-{version}", marks=MARKS) for version in ("1.36", "1.37")
]
"""Kubelets of the fixture ``node``: the version, and whether the kubelet's own code runs."""
UNKNOWN: Final = "prepare failed: [class=unknown"


class Node:
    """One node. The context runs its kubelet; its end kills all drivers that still run."""

    def __init__(self, root: Path, *, real: bool = False, **kubelet: Any) -> None:
        """Create the node's directories.

        Args:
            root: Directory of all files; short enough for the path of a socket.
            real: The kubelet's own code runs, where it is built.
            kubelet: Arguments of the kubelet other than its directory; its pace is fast.
        """
        self.root = root
        self.is_real = real
        """Whether the kubelet's own code runs, so that its checkpoint is that of a kubelet."""
        self.cdi = root / "cdi"
        self.claims = root / "claims"
        self.fates = root / "fates.json"
        self.claims.mkdir()
        self.reboot("boot-1")
        self.sysfs = PlainSysfs(root / "sys")
        (root / "kubelet" / "plugins_registry").mkdir(parents=True)
        new = real_kubelet(kubelet["version"]) if real else FakeKubelet
        # The real kubelet wipes after 30 s; a pod that fails so long must need fewer than 25 events.
        pace = replace(Pace.fast(), resync_s=(2.0, 3.0)) if real else Pace.fast()
        self.kubelet: FakeKubelet = new(root / "kubelet", **{"pace": pace, **kubelet})
        self._programs: list[Program] = []

    def __enter__(self) -> Self:
        self._open = ExitStack()
        self._open.enter_context(self.kubelet)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs:
            program.close()
        self._open.close()
        if kind is None:
            for program in self._programs:
                # the log has a traceback for each unknown failure, and no other
                assert program.log.count("Traceback") == program.log.count(UNKNOWN), program.log

    # --- drivers --------------------------------------------------------------------------------------------

    def hostdev(self, *flags: str, within: Sequence[str] = (), real: bool = False) -> Program:
        """Start the example driver, on the plain files or on the ``real`` host."""
        roots = ("--sysfs-root", str(self.sysfs.root), "--procfs-root", str(self.root / "proc"))
        places = ("--kubelet-dir", str(self.kubelet.root), "--cdi-dir", str(self.cdi))
        whose = ("--claims", str(self.claims), "--node-name", NODE, "--cpus-each", "1")
        return self._start("hostdev_driver", *places, *whose, *(() if real else roots), *flags, within=within)

    def start_failing_driver(self, *words: str) -> Program:
        """Start the driver of ``failing_driver.py``."""
        places = (str(self.kubelet.root), str(self.claims), str(self.fates))
        return self._start("driver_scenarios.failing_driver", *places, *words)

    def _start(self, module: str, *flags: str, within: Sequence[str] = ()) -> Program:
        log_file = self.root / f"log-{len(self._programs)}"
        program = Program("driver_scenarios.patient", module, *flags, log_file=log_file, within=within)
        self._programs.append(program)
        return program

    def reboot(self, boot_id: str) -> None:
        """Set the boot id that the drivers read."""
        file = self.root / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{boot_id}\n")

    def fate(self, **of_claims: Sequence[str]) -> None:
        """Set which claims fail at the failing driver from now on; all others are prepared."""
        new = self.fates.with_suffix(".new")
        new.write_text(json.dumps(of_claims))
        new.rename(self.fates)

    def wait_healthy(self, *devices: str, driver: str = HOSTDEV) -> None:
        """Wait until the kubelet has these devices as Healthy."""
        for device in devices:
            self.kubelet.wait_health(driver, NODE, device, "Healthy")

    # --- pods and claims ------------------------------------------------------------------------------------

    def pod(self, name: str, *asks: Ask, driver: str = HOSTDEV) -> Pod:
        """Create a pod with its claims, without running it."""
        pod = Pod(f"pod-{name}", {ask.name: ask.name for ask in asks}, {"main": tuple(a.name for a in asks)})
        for ask in asks:
            devices = [(request, driver, NODE, device) for request, device in ask.devices.items()]
            claim = allocated_claim(ask.name, ask.uid, *devices, pods=[pod.uid], config=ask.config)
            self.kubelet.add_claim(claim)
            new = self.claims / ".new"
            new.write_text(json.dumps(claim))
            new.rename(self.claim_file(ask.name))
        return pod

    def claim_file(self, claim: str) -> Path:
        """Return the file from which the drivers read a claim."""
        return self.claims / f"default_{claim}.json"

    def run(self, name: str, *asks: Ask, driver: str = HOSTDEV) -> Pod:
        """Create a pod with its claims and bind it to this node."""
        pod = self.pod(name, *asks, driver=driver)
        self.kubelet.run_pod(pod)
        return pod

    def run_and_wait(self, name: str, *asks: Ask, driver: str = HOSTDEV) -> Pod:
        """Create a bound pod and wait until its claims are prepared."""
        pod = self.run(name, *asks, driver=driver)
        self.kubelet.wait_running(pod)
        return pod

    def end(self, *pods: Pod) -> None:
        """Delete pods and wait until they are gone."""
        for pod in pods:
            self.kubelet.delete_pod(pod)
        for pod in pods:
            self.kubelet.wait_gone(pod)

    # --- state of pods and files ----------------------------------------------------------------------------

    def failures(self, pod: Pod) -> list[Event]:
        """Return the pod's events of claims that a driver could not prepare.

        Not those of a driver that was ending: whether the kubelet's retry finds it so is chance.
        """
        events = [event for event in self.kubelet.events_of(pod) if event.message.startswith(FAILED)]
        return [event for event in events if "code=driver.shutting_down" not in event.message]

    def wait_event(self, pod: Pod, claim: str, text: str, *, times: int = 2) -> None:
        """Wait until the pod's only failure event has this text and this count."""
        expected = f"{FAILED} {claim}: {text}"

        def counts() -> dict[str, int]:
            return {event.message: event.count for event in self.failures(pod)}

        with suppress(AssertionError):  # the assertion below has the details
            self.kubelet.wait_for(lambda: counts().get(expected, 0) >= times, f"the event, {times} times")
        assert list(counts()) == [expected], counts()
        assert counts()[expected] >= times
        assert len(text.encode()) <= TEXT_LIMIT

    def prepares(self) -> dict[str, Any]:
        """Return the output of ``drahealth prepares -o json``, by claim name."""
        command = [sys.executable, "-m", "agent", "prepares", "-o", "json"]
        places = ["--kubelet-dir", str(self.kubelet.root), "--state-dir", str(self.root / "no-agents")]
        done = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
        assert not done.stderr
        return {claim["name"]: claim for claim in json.loads(done.stdout)["claims"]}

    def verdict(self, claim: str) -> Any:
        """Return the verdict of a claim's last prepare."""
        return self.prepares()[claim]["verdict"]

    def wait_prepared(self, claim: str) -> None:
        """Wait until the claim is recorded as prepared, which is saved a moment later."""

        def is_prepared() -> bool:
            return bool(self.prepares().get(claim, {}).get("state") == "prepared")

        self.kubelet.wait_for(is_prepared, f"{claim} is prepared")

    def cdi_files(self) -> set[str]:
        """Return the UIDs of claims with a CDI file, and the names of other files."""
        names = [path.name for path in self.cdi.iterdir()] if self.cdi.is_dir() else []
        return {name.removeprefix(f"{HOSTDEV}-device_").removesuffix(".json") for name in names}

    def resources(self, pod: Pod) -> dict[str, tuple[str, str]]:
        """Return health and message of each device in a pod's status, by resourceID.

        The status has no containers until a restarted kubelet has read them.
        """
        resources = self.kubelet.pod_status(pod).resources.get("main", {})
        return {
            health.resource_id: (health.health, health.message)
            for entry in resources.values()
            for health in entry
        }

    def wait_resources(self, pod: Pod, expected: Iterable[tuple[str, str]]) -> None:
        """Wait until the pod's status has these pairs of health and message."""
        wanted = sorted(expected)
        with suppress(AssertionError):  # the assertion below has the details
            self.kubelet.wait_for(lambda: sorted(self.resources(pod).values()) == wanted, "the status")
        found = sorted(self.resources(pod).values())
        assert found == wanted, f"{found} in the status of {pod.uid}, not {wanted}"

    def calls(self, method: str = "NodePrepareResources") -> list[Called]:
        """Return all finished calls of a method."""
        return [call for call in self.kubelet.history.of(Called) if call.method == method]
