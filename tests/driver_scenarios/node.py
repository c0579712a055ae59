"""A node as drivers find it: a kubelet, the claims and pods of the cluster, and the drivers themselves."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from agents import PlainSysfs
from kubelet import FakeKubelet, Pace, Pod, allocated_claim
from kubelet.events import Event
from kubelet.history import Called

from driver_scenarios.program import Program

HOSTDEV: Final = "hostdev.drahealth.example.com"
SICK: Final = "sick.example.com"
NODE: Final = "node-1"
PAGES: Final = "hugepages-2mi-node0-0"
CPU_0, CPU_1 = "cpus-node0-0", "cpus-node0-1"
TEXT_LIMIT: Final = 1024
FAILED: Final = (
    "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for"
    " ResourceClaim"
)


class Ask(NamedTuple):
    """A claim of the namespace ``default``, as a user made it and the scheduler allocated it."""

    name: str
    devices: Mapping[str, str]
    """By request."""
    config: Sequence[Mapping[str, Any]] = ()

    @property
    def uid(self) -> str:
        """Follows from the name, and is no longer than those of Kubernetes."""
        return f"uid-{self.name[-32:]}"


def parameters(kind: str, *requests: str, **fields: object) -> dict[str, Any]:
    """What a claim says of its requests to the example driver."""
    said = {"apiVersion": f"{HOSTDEV}/v1", "kind": kind, **fields}
    return {
        "source": "FromClaim",
        "requests": list(requests),
        "opaque": {"driver": HOSTDEV, "parameters": said},
    }


UNKNOWN: Final = "could not be prepared: [class=unknown"


class Node:
    """One node. Entered, its kubelet lives; left, all its drivers are killed that have not ended."""

    def __init__(self, root: Path, **kubelet: Any) -> None:
        """
        Args:
            root: For all files; its path leaves room for a socket's.
            kubelet: What the kubelet is told beside its directory; its pace is fast.
        """
        self.root = root
        self.cdi = root / "cdi"
        self.claims = root / "claims"
        self.fates = root / "fates.json"
        self.claims.mkdir()
        (root / "proc").mkdir()
        self.sysfs = PlainSysfs(root / "sys")
        (root / "kubelet" / "plugins_registry").mkdir(parents=True)
        self.kubelet = FakeKubelet(root / "kubelet", **{"pace": Pace.fast(), **kubelet})
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
                # the log has one for each claim that failed nobody knows why, and no other
                assert program.log.count("Traceback") == program.log.count(UNKNOWN), program.log

    # --- drivers --------------------------------------------------------------------------------------------

    def hostdev(self, *flags: str, within: Sequence[str] = (), real: bool = False) -> Program:
        """The example driver; of the host on paper, unless it is to be that of the real one."""
        roots = ("--sysfs-root", str(self.sysfs.root), "--procfs-root", str(self.root / "proc"))
        places = ("--kubelet-dir", str(self.kubelet.root), "--cdi-dir", str(self.cdi))
        whose = ("--claims", str(self.claims), "--node-name", NODE, "--cpus-each", "1")
        return self._start("hostdev_driver", *places, *whose, *(() if real else roots), *flags, within=within)

    def sick(self, *words: str) -> Program:
        """The driver of the tests' own: see ``sick_driver.py``."""
        places = (str(self.kubelet.root), str(self.claims), str(self.fates))
        return self._start("driver_scenarios.sick_driver", *places, *words)

    def _start(self, module: str, *flags: str, within: Sequence[str] = ()) -> Program:
        log_file = self.root / f"log-{len(self._programs)}"
        program = Program(module, *flags, log_file=log_file, within=within)
        self._programs.append(program)
        return program

    def fate(self, **of_claims: Sequence[str]) -> None:
        """What befalls claims at the sick driver from now on; those that are not named are prepared."""
        new = self.fates.with_suffix(".new")
        new.write_text(json.dumps(of_claims))
        new.rename(self.fates)

    def wait_healthy(self, *devices: str, driver: str = HOSTDEV) -> None:
        """Returns when the kubelet believes that these are Healthy."""
        for device in devices:
            self.kubelet.wait_health(driver, NODE, device, "Healthy")

    # --- pods and claims ------------------------------------------------------------------------------------

    def pod(self, name: str, *asks: Ask, driver: str = HOSTDEV) -> Pod:
        """A pod, and its claims; it does not run yet."""
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
        """Where the drivers read a claim."""
        return self.claims / f"default_{claim}.json"

    def run(self, name: str, *asks: Ask, driver: str = HOSTDEV) -> Pod:
        """A pod, and its claims; bound to this node."""
        pod = self.pod(name, *asks, driver=driver)
        self.kubelet.run_pod(pod)
        return pod

    def running(self, name: str, *asks: Ask, driver: str = HOSTDEV) -> Pod:
        """The same, once its claims are prepared."""
        pod = self.run(name, *asks, driver=driver)
        self.kubelet.wait_running(pod)
        return pod

    def end(self, *pods: Pod) -> None:
        """Pods are deleted; returns when they are gone."""
        for pod in pods:
            self.kubelet.delete_pod(pod)
        for pod in pods:
            self.kubelet.wait_gone(pod)

    # --- what can be seen -----------------------------------------------------------------------------------

    def failures(self, pod: Pod) -> list[Event]:
        """The pod's events of claims that a driver could not prepare."""
        return [event for event in self.kubelet.events_of(pod) if event.message.startswith(FAILED)]

    def tells(self, pod: Pod, claim: str, text: str, *, times: int = 2) -> None:
        """Returns when a failure of the pod's was told so often; there must be but one, with this text."""
        self.kubelet.wait_for(
            lambda: any(event.count >= times for event in self.failures(pod)), f"an event, {times} times"
        )
        told = [event.message for event in self.failures(pod)]
        assert told == [f"{FAILED} {claim}: {text}"], told
        assert len(text.encode()) <= TEXT_LIMIT

    def prepares(self) -> dict[str, Any]:
        """What ``drahealth prepares -o json`` says of each claim, by its name."""
        command = [sys.executable, "-m", "agent", "prepares", "-o", "json"]
        places = ["--kubelet-dir", str(self.kubelet.root), "--state-dir", str(self.root / "no-agents")]
        said = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
        assert not said.stderr
        return {claim["name"]: claim for claim in json.loads(said.stdout)["claims"]}

    def verdict(self, claim: str) -> Any:
        """Of one claim's last prepare."""
        return self.prepares()[claim]["verdict"]

    def remembers_prepared(self, claim: str) -> None:
        """Returns when the claim is remembered as prepared; that is written a moment later."""
        self.kubelet.wait_for(lambda: self.prepares()[claim]["state"] == "prepared", f"{claim} is prepared")

    def cdi_files(self) -> set[str]:
        """The uids of the claims that have a CDI file; and any other file by its name."""
        names = [path.name for path in self.cdi.iterdir()] if self.cdi.is_dir() else []
        return {name.removeprefix(f"{HOSTDEV}-device_").removesuffix(".json") for name in names}

    def resources(self, pod: Pod) -> dict[str, tuple[str, str]]:
        """Health and message of each device of a pod, as its status has it, by the resourceID."""
        said = self.kubelet.pod_status(pod).resources["main"].values()
        return {one.resource_id: (one.health, one.message) for entry in said for one in entry}

    def wait_resources(self, pod: Pod, expected: Iterable[tuple[str, str]]) -> None:
        """Returns when the pod's status has these pairs of health and message."""
        wanted = sorted(expected)
        with suppress(AssertionError):  # of which the one below says more
            self.kubelet.wait_for(lambda: sorted(self.resources(pod).values()) == wanted, "the status")
        found = sorted(self.resources(pod).values())
        assert found == wanted, f"{found} in the status of {pod.uid}, not {wanted}"

    def calls(self, method: str = "NodePrepareResources") -> list[Called]:
        """All that have ended."""
        return [call for call in self.kubelet.history.of(Called) if call.method == method]
