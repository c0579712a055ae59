"""Simulated nodes whose steps are recorded, with random days."""

import random
from dataclasses import replace
from typing import Any, Final

from golden import stories
from gpu_samples import H100
from paper_gpus import GpuNode

from agent.engine.step import EngineState, StepUse, step
from agent.model.pod_findings import PodsSample
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot

Step = tuple[EngineState, Snapshot, Report, StepUse]
"""State before a step, snapshot, report and use, as the engine loop gives them to a recorder."""

XIDS: Final = (13, 31, 43, 48, 63, 74, 79, 94, 95, 119, 154)


class RecordedHost(stories.Host):
    """Host whose steps are kept."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self.steps: list[Step] = []
        super().__init__(settings)

    def evaluate(self) -> Report:
        before, snapshot = self.state, self.snapshot() if self.passes else self.starting()
        self.state, report = step(before, snapshot, self.now)
        use = StepUse.SILENT if report.starting else StepUse.PUBLISHED
        self.steps.append((before, snapshot, report, use))
        return report


class RecordedGpuNode(GpuNode):
    """Node with GPUs whose steps are kept."""

    def __init__(self, gpus: int = 2, **limits: Any) -> None:
        self.steps: list[Step] = []
        self.pods: PodsSample | None = None
        super().__init__(gpus, **limits)

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), pods=self.pods)

    def evaluate(self) -> Report:
        before, snapshot = self.state, self.snapshot() if self.passes else self.starting()
        self.state, report = step(before, snapshot, self.now, is_full=len(self.steps) % 3 != 1)
        use = StepUse.SILENT if report.starting else StepUse.PUBLISHED
        self.steps.append((before, snapshot, report, use))
        return report


def host_day(seed: int, events: int = 25) -> list[Step]:
    """Return the steps of a host with random events."""
    draw = random.Random(seed)
    node = RecordedHost()
    node.evaluate()
    for _ in range(events):
        stories._happens(draw, node)
        node.next(draw.randrange(1, 5))
    return node.steps


def gpu_day(seed: int, events: int = 25, **limits: Any) -> list[Step]:
    """Return the steps of a node with random events of its GPUs."""
    draw = random.Random(seed)
    node = RecordedGpuNode(3, **limits)
    for _ in range(events):
        gpu = draw.randrange(3)
        match draw.randrange(8):
            case 0:
                node.xid(gpu, draw.choice(XIDS))
            case 1:
                node.set_readings(gpu, temp=draw.choice((40, 85, 95)))
            case 2:
                node.set_readings(
                    gpu, ecc_correctable=draw.choice((0, 500, 5000)), pcie_width=draw.choice((8, 16))
                )
            case 3:
                node.lose(gpu)
            case 4:
                node.recover(gpu)
            case 5:
                node.hang(gpu)
            case 6:
                node.return_from_hang(gpu)
            case _:
                node.set_readings(gpu, **{field.value: H100[field] for field in H100})
        node.rest(draw.choice((3, 30, 120)))
    return node.steps
