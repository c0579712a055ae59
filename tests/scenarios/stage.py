"""Stage that plays one row: the agent as a process on its machine, its clients, and a chronicle.

The chronicle is printed if the row fails.
"""

import time
from pathlib import Path

import psutil
from agents import Agent, print_figure
from patience import PATIENCE_S

from scenarios.clients import Clients
from scenarios.machine_files import MachineFiles
from scenarios.row import Row, Step


class Stage:
    """Machine of a row, at first without an agent."""

    def __init__(self, row: Row, directory: Path) -> None:
        self.row = row
        self.directory = directory
        self.chronicle: list[str] = []
        self._began_s = time.monotonic()
        self._logged = ""
        self.machine = MachineFiles(row, directory)
        hangs = any(command.startswith("init hang") for command in row.setup)
        self.clients = Clients(row.limit_s + PATIENCE_S, self.note, gpus=row.gpus, until_read=not hangs)
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """Running agent."""
        assert self._agent is not None, "no agent runs"
        return self._agent

    def perform(self, step: Step) -> None:
        """Play one step of the row."""
        self.note(f"{'?' if step.is_view else '>'} {step.text}")
        if not step.is_view:
            self.clients.settle_beginning()
            self.clients.note_action()
        step.play(self)

    def note(self, text: str) -> None:
        """Add a line to the chronicle."""
        self.chronicle.append(f"{time.monotonic() - self._began_s:7.2f} s  {text}")

    def start(self) -> None:
        """Start an agent, and connect the clients to it."""
        self._agent = Agent(
            self.directory,
            *self.machine.flags,
            *("--node-name", "node", "--period", self.row.period, *self.row.flags),
            config=self.row.file,
            environ=self.machine.environ,
            expect="cpu-node0",
        )
        self.clients.open(self._agent)

    def stop(self, *, kill: bool = False) -> float:
        """Stop the agent with SIGTERM, expecting exit code 0, or kill it. Return how long it took [s]."""
        agent, begun_s = self.agent, time.monotonic()
        if kill:
            agent.process.kill()
            agent.process.wait()
        else:
            code = agent.end()
            assert code == 0, f"SIGTERM was answered with exit code {code}"
        took_s = time.monotonic() - begun_s
        self.clients.close()
        self._logged, self._agent = self.log(), None
        assert "Traceback" not in self._logged, "an agent raised"
        return took_s

    def end(self) -> None:
        """Kill the agent if it still runs, and disconnect the clients."""
        if self._agent is not None:
            self._agent.process.kill()
            self._agent.process.wait()
        self.clients.close()

    def log(self) -> str:
        """Return the logs of all agents of the row."""
        return self._logged + (self._agent.log if self._agent is not None else "")

    def memory_mib(self) -> float:
        """Return the agent's resident memory."""
        return float(psutil.Process(self.agent.pid).memory_info().rss) / (1 << 20)

    def figure(self, text: str) -> None:
        """Note and print a measurement."""
        self.note(f"  {text}")
        print_figure(f"{self.row.name}: {text}")

    def is_over(self) -> bool:
        """Return whether the row itself stopped its agent."""
        return self._agent is None


def play(row: Row, directory: Path) -> str:
    """Play a row.

    Returns:
        Failure with the chronicle and the agent's log; empty if the row passed.
    """
    stage = Stage(row, directory)
    try:
        stage.start()
        for step in row.steps:
            stage.perform(step)
        stage.clients.check_order()
        if not stage.is_over():
            stage.stop()
    except Exception as error:  # the failure text includes the chronicle
        story = "\n".join(stage.chronicle)
        return f"{error!r}\n\n{story}\n\n{stage.log()}"
    finally:
        stage.end()
    return ""
