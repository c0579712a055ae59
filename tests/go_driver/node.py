"""Node for the Go driver: a kubelet, an API server, and an agent that the test starts, stops and kills.

The host has plain files with two CPUs and 8 pages of 2 MiB, unless a test uses the real host. The base class
is in ``driver_scenarios.node``.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agents import Agent, run_command
from driver_scenarios.node import CPU_0, CPU_1, FAILED, NODE, PAGES, Ask, Node
from driver_scenarios.program import Program
from kubelet import Pod
from kubelet.events import Event

from go_driver.api_server import ApiServer
from go_driver.objects import Decode

__all__ = [
    "AGENT_ABSENT",
    "CPU_0",
    "CPU_1",
    "GO",
    "NODE",
    "PAGES",
    "SHORT",
    "SHORT_LEASE_S",
    "Ask",
    "GoNode",
    "parameters",
]
GO: Final = "godev.drahealth.example.com"
SHORT: Final = '[stream]\nheartbeat = "500ms"\nlease = "9s"\n'
"""Agent configuration with a lease of seconds: a silence counts soon, a pause of a busy machine does not."""
SHORT_LEASE_S: Final = 9
AGENT_ABSENT: Final = "drahealth agent does not answer"
"""Prefix of a device's message while the driver cannot reach the agent."""


def parameters(kind: str, **fields: object) -> dict[str, Any]:
    """Return opaque parameters of a claim for the Go driver."""
    parameters_ = {"apiVersion": f"{GO}/v1", "kind": kind, **fields}
    return {"source": "FromClaim", "requests": [], "opaque": {"driver": GO, "parameters": parameters_}}


class GoNode(Node):
    """Node whose kubelet and API server run while it is entered; at exit all programs are killed."""

    def __init__(self, root: Path, binary: Path, decode: Decode, **kubelet: Any) -> None:
        """
        Args:
            root: Directory of all files; short, because of the limit of socket paths.
            binary: Path of the driver.
            decode: Decoder of request bodies for the API server.
            kubelet: Arguments of the kubelet; its pace is fast.
        """
        super().__init__(root, **kubelet)
        self.binary = binary
        self.own: set[str] = set()
        """Texts of the driver that the agent replaces by the text of the device's health."""
        self.api = ApiServer(decode)
        (root / "cgroup").mkdir()
        (root / "agent").mkdir()

    def __enter__(self) -> Self:
        super().__enter__()
        self._open.enter_context(self.api)
        self.api.add_node(NODE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None:
            for program in self._programs:
                assert "panic" not in program.log, program.log
                assert "reports are stale" not in program.log, (
                    program.log
                )  # kubeletplugin logs this when a lease has expired

    # --- programs -----------------------------------------------------------------------------------------

    def agent(self, *flags: str, real: bool = False, config: str = "") -> Agent:
        """Start an agent with the state and socket directories of the previous one."""
        paper = ("--sysfs-root", self.sysfs.root, "--procfs-root", self.root / "proc")
        roots = ("--cgroupfs-root", self.root / "cgroup", *(() if real else paper))
        identity = ("--driver", GO, "--node-name", NODE, "--period", "50ms")
        directory = self.root / "agent"
        return self._open.enter_context(Agent(directory, *identity, *map(str, roots), *flags, config=config))

    @property
    def socket(self) -> Path:
        """Agent's socket for the driver."""
        return self.root / "agent" / "run" / "drivers" / f"{GO}.sock"

    @property
    def plugin_socket(self) -> Path:
        """Driver's socket for the kubelet."""
        return self.kubelet.root / "plugins" / GO / "dra.sock"

    def driver(self, *flags: str, real: bool = False, pages: int = 8, devices: Sequence[str] = ()) -> Program:
        """Start the Go driver with the devices of these flags, by default two CPUs and the hugepages."""
        directories = ("--kubelet-dir", str(self.kubelet.root), "--cdi-dir", str(self.cdi))
        agent = ("--drahealth-socket", str(self.socket))
        identity = ("--api-server", self.api.url, "--node-name", NODE, "--driver-name", GO)
        devices = devices or ("--cpus", "0", "--cpus", "1", "--hugepages", f"2Mi:{pages}")
        host = () if real else ("--sysfs-root", str(self.sysfs.root))
        log_file = self.root / f"log-{len(self._programs)}"
        program = GoProgram(
            self.binary, *directories, *agent, *identity, *devices, *host, *flags, log_file=log_file
        )
        self._programs.append(program)
        return program

    # --- pods and waiting ---------------------------------------------------------------------------------

    def pod(self, name: str, *asks: Ask, driver: str = GO) -> Pod:
        """Create a pod and its claims without starting it."""
        pod = super().pod(name, *asks, driver=driver)
        for ask in asks:
            self.api.add_claim(self.kubelet.claims["default", ask.name])
        return pod

    def run(self, name: str, *asks: Ask, driver: str = GO) -> Pod:
        """Create a pod and its claims, and bind it to the node."""
        return super().run(name, *asks, driver=driver)

    def run_and_wait(self, name: str, *asks: Ask, driver: str = GO) -> Pod:
        """Run a pod and wait until its claims are prepared."""
        return super().run_and_wait(name, *asks, driver=driver)

    def failures(self, pod: Pod) -> list[Event]:
        """Return the pod's events of claims that a driver could not prepare.

        Not those of :meth:`late_failures`.
        """
        late = self.late_failures(pod)
        return [event for event in super().failures(pod) if event not in late]

    def late_failures(self, pod: Pod) -> list[Event]:
        """Return failure events with the driver's own text, if there is also one with the agent's text.

        The driver returns its own text of a prepare for which the agent was slower than the driver waits
        (0.5 s). The agent's text contains it, unless the agent names a cause of its own, see ``own``.
        """
        events = super().failures(pod)
        texts = [event.message.removeprefix(FAILED).partition(": ")[2] for event in events]
        if not any(text.startswith("[class=") for text in texts):
            return []
        return [
            event
            for event, text in zip(events, texts, strict=True)
            if text in self.own or any(text in other and text != other for other in texts)
        ]

    def unanswered_tries(self, pod: Pod) -> int:
        """Return how often the agent was slower than the driver waits."""
        return sum(event.count for event in self.late_failures(pod))

    def wait_healthy(self, *devices: str, driver: str = GO) -> None:
        """Wait until the kubelet has these devices as Healthy."""
        super().wait_healthy(*devices, driver=driver)

    def wait_agent_absent(self, *devices: str) -> None:
        """Wait until the kubelet has these devices as Unknown because the agent is absent."""
        for device in devices:
            self.kubelet.wait_for(
                lambda name=device: self._agent_absent(name), f"{device} Unknown with reason"
            )

    def _agent_absent(self, device: str) -> bool:
        found = self.kubelet.health(GO, NODE, device)
        return found.health == "Unknown" and found.message.startswith(AGENT_ABSENT)

    def drahealth(self, *words: str) -> Any:
        """Run a drahealth command; return its JSON output."""
        return json.loads(run_command(*words, "-o", "json").stdout)

    def prepares(self) -> dict[str, Any]:
        """Return the output of ``drahealth prepares``, by claim name."""
        directories = (
            "--kubelet-dir",
            str(self.kubelet.root),
            "--state-dir",
            str(self.root / "agent/run/state"),
        )
        return {claim["name"]: claim for claim in self.drahealth("prepares", *directories)["claims"]}

    def wait_prepared(self, claim: str) -> None:
        """Wait until the agent has recorded the claim as prepared."""

        def is_prepared() -> bool:
            return self.prepares().get(claim, {}).get("state") == "prepared"

        self.kubelet.wait_for(is_prepared, f"{claim} is prepared")


class GoProgram(Program):
    """Running program that is not written in Python."""

    def __init__(self, binary: Path, *flags: str, log_file: Path) -> None:
        """
        Args:
            binary: Path of the program.
            flags: Arguments.
            log_file: File for stdout and stderr, truncated at the start.
        """
        self.log_file = log_file
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("NODE_", "POD_", "KUBE"))}
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [binary, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )
