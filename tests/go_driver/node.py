"""A node for the driver in Go: a kubelet, an API server, and an agent that the test starts, stops and kills.

The host is one of plain files, unless a test asks for the real one: two CPUs and 8 pages of 2 MiB. Everything
else of a node stands in ``driver_scenarios.node``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agents import Agent
from driver_scenarios.node import CPU_0, CPU_1, NODE, PAGES, Ask, Node
from driver_scenarios.program import Program
from kubelet import Pod

from go_driver.api_server import ApiServer
from go_driver.objects import Decode

__all__ = ["AWAY", "CPU_0", "CPU_1", "GO", "NODE", "PAGES", "SHORT", "Ask", "GoNode", "parameters"]
GO: Final = "godev.drahealth.example.com"
SHORT: Final = '[stream]\nheartbeat = "500ms"\nlease = "3s"\n'
"""Of an agent, so that a silence of seconds is one."""
AWAY: Final = "drahealth agent does not answer"
"""How the text begins of a device that the driver knows nothing of."""


def parameters(kind: str, **fields: object) -> dict[str, Any]:
    """What a claim says to the driver in Go."""
    said = {"apiVersion": f"{GO}/v1", "kind": kind, **fields}
    return {"source": "FromClaim", "requests": [], "opaque": {"driver": GO, "parameters": said}}


class GoNode(Node):
    """One node. Entered, its kubelet and its API server live; left, all that has not ended is killed."""

    def __init__(self, root: Path, binary: Path, decode: Decode, **kubelet: Any) -> None:
        """
        Args:
            root: For all files; its path leaves room for a socket's.
            binary: The driver.
            decode: What the API server reads with.
            kubelet: What the kubelet is told beside its directory; its pace is fast.
        """
        super().__init__(root, **kubelet)
        self.binary = binary
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
                assert "reports are stale" not in program.log, program.log  # of kubeletplugin: a lease ended

    # --- what runs on it ------------------------------------------------------------------------------------

    def agent(self, *flags: str, real: bool = False, config: str = "") -> Agent:
        """The agent, where the one before had its state and its sockets; of the host on paper, or not."""
        paper = ("--sysfs-root", self.sysfs.root, "--procfs-root", self.root / "proc")
        roots = ("--cgroupfs-root", self.root / "cgroup", *(() if real else paper))
        whose = ("--driver", GO, "--node-name", NODE, "--period", "50ms")
        directory = self.root / "agent"
        return self._open.enter_context(Agent(directory, *whose, *map(str, roots), *flags, config=config))

    @property
    def socket(self) -> Path:
        """Where the agent listens for the driver."""
        return self.root / "agent" / "run" / "drivers" / f"{GO}.sock"

    @property
    def plugin_socket(self) -> Path:
        """Where the driver listens for the kubelet."""
        return self.kubelet.root / "plugins" / GO / "dra.sock"

    def driver(self, *flags: str, real: bool = False, pages: int = 8) -> Program:
        """The driver in Go: each of the two CPUs is a device, and the 8 pages are one."""
        places = ("--kubelet-dir", str(self.kubelet.root), "--cdi-dir", str(self.cdi))
        agent = ("--drahealth-socket", str(self.socket))
        whose = ("--api-server", self.api.url, "--node-name", NODE, "--driver-name", GO)
        what = ("--cpus", "0", "--cpus", "1", "--hugepages", f"2Mi:{pages}")
        host = () if real else ("--sysfs-root", str(self.sysfs.root))
        log_file = self.root / f"log-{len(self._programs)}"
        program = GoProgram(self.binary, *places, *agent, *whose, *what, *host, *flags, log_file=log_file)
        self._programs.append(program)
        return program

    # --- what is asked of it, and what can be seen ----------------------------------------------------------

    def pod(self, name: str, *asks: Ask, driver: str = GO) -> Pod:
        """A pod, and its claims; it does not run yet."""
        pod = super().pod(name, *asks, driver=driver)
        for ask in asks:
            self.api.add_claim(self.kubelet.claims["default", ask.name])
        return pod

    def run(self, name: str, *asks: Ask, driver: str = GO) -> Pod:
        """A pod, and its claims; bound to this node."""
        return super().run(name, *asks, driver=driver)

    def running(self, name: str, *asks: Ask, driver: str = GO) -> Pod:
        """The same, once its claims are prepared."""
        return super().running(name, *asks, driver=driver)

    def wait_healthy(self, *devices: str, driver: str = GO) -> None:
        """Returns when the kubelet believes that these are Healthy."""
        super().wait_healthy(*devices, driver=driver)

    def wait_away(self, *devices: str) -> None:
        """Returns when the kubelet holds these Unknown, and says why."""
        for device in devices:
            self.kubelet.wait_for(lambda name=device: self._away(name), f"why {device} is Unknown")

    def _away(self, device: str) -> bool:
        found = self.kubelet.health(GO, NODE, device)
        return found.health == "Unknown" and found.message.startswith(AWAY)

    def drahealth(self, *words: str) -> Any:
        """What a verb of the command line says in JSON."""
        command = [sys.executable, "-m", "agent", *words, "-o", "json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)

    def prepares(self) -> dict[str, Any]:
        """What ``drahealth prepares`` says of each claim, by its name."""
        places = ("--kubelet-dir", str(self.kubelet.root), "--state-dir", str(self.root / "agent/run/state"))
        return {claim["name"]: claim for claim in self.drahealth("prepares", *places)["claims"]}

    def remembers_prepared(self, claim: str) -> None:
        """Returns when the agent remembers the claim as prepared; it may hear of it late."""

        def prepared() -> bool:
            return self.prepares().get(claim, {}).get("state") == "prepared"

        self.kubelet.wait_for(prepared, f"{claim} is prepared")


class GoProgram(Program):
    """A program that is no Python."""

    def __init__(self, binary: Path, *flags: str, log_file: Path) -> None:
        """
        Args:
            binary: The program.
            flags: Its arguments.
            log_file: Of both its outputs; made anew.
        """
        self.log_file = log_file
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("NODE_", "POD_", "KUBE"))}
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [binary, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )
