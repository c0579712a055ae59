"""One row being played: the agent as a process on its machine, who listens to it, and a chronicle of it all.

What is done and what must come of it is in the rows; the chronicle is what a row that fails shows.
"""

import time
from pathlib import Path

import psutil
from agents import Agent, say
from patience import PATIENCE_S

from scenarios.ears import Ears
from scenarios.machine_files import MachineFiles
from scenarios.row import Row, Step


class Stage:
    """A machine, no agent yet, and nothing heard."""

    def __init__(self, row: Row, directory: Path) -> None:
        self.row = row
        self.directory = directory
        self.chronicle: list[str] = []
        self._began_s = time.monotonic()
        self._logged = ""
        self.machine = MachineFiles(row, directory)
        self.ears = Ears(row.limit_s + PATIENCE_S, self.note)
        self._agent: Agent | None = None

    @property
    def agent(self) -> Agent:
        """The one that runs."""
        assert self._agent is not None, "no agent runs"
        return self._agent

    def perform(self, step: Step) -> None:
        """One line of the row."""
        self.note(f"{'?' if step.is_view else '>'} {step.text}")
        if not step.is_view:
            self.ears.settle_beginning()
        step.play(self)

    def note(self, text: str) -> None:
        """A line of the chronicle."""
        self.chronicle.append(f"{time.monotonic() - self._began_s:7.2f} s  {text}")

    def start(self) -> None:
        """An agent starts, and is listened to."""
        self._agent = Agent(
            self.directory,
            *self.machine.flags,
            *("--node-name", "node", "--period", self.row.period, *self.row.flags),
            config=self.row.file,
            environ=self.machine.environ,
            expect="cpu-node0",
        )
        self.ears.open(self._agent)

    def stop(self, *, kill: bool = False) -> float:
        """The agent is told to end, and does with exit code 0; or is killed. Returns how long it took [s]."""
        agent, begun_s = self.agent, time.monotonic()
        if kill:
            agent.process.kill()
            agent.process.wait()
        else:
            code = agent.end()
            assert code == 0, f"SIGTERM was answered with exit code {code}"
        took_s = time.monotonic() - begun_s
        self.ears.close()
        self._logged, self._agent = self.log(), None
        assert "Traceback" not in self._logged, "an agent raised"
        return took_s

    def end(self) -> None:
        """Whatever happened, no agent is left."""
        if self._agent is not None:
            self._agent.process.kill()
            self._agent.process.wait()
        self.ears.close()

    def log(self) -> str:
        """What all agents of the row have written."""
        return self._logged + (self._agent.log if self._agent is not None else "")

    def memory_mib(self) -> float:
        """The agent's resident memory."""
        return float(psutil.Process(self.agent.pid).memory_info().rss) / (1 << 20)

    def figure(self, text: str) -> None:
        """Something that was measured."""
        self.note(f"  {text}")
        say(f"{self.row.name}: {text}")

    def is_over(self) -> bool:
        """Whether the row itself ended its agent."""
        return self._agent is None


def play(row: Row, directory: Path) -> str:
    """Plays a row to its end.

    Returns:
        What went wrong, with the chronicle and the agent's log; empty if all was as the row says.
    """
    stage = Stage(row, directory)
    try:
        stage.start()
        for step in row.steps:
            stage.perform(step)
        stage.ears.as_expected()
        if not stage.is_over():
            stage.stop()
    except Exception as error:  # whatever it is, it is told with what was heard before
        story = "\n".join(stage.chronicle)
        return f"{error!r}\n\n{story}\n\n{stage.log()}"
    finally:
        stage.end()
    return ""
