"""Verdict histories for tests: changes, periods, and a simulated node that records them."""

from collections.abc import Iterable
from typing import Final

from agent.model.claim import DeviceRef
from agent.model.health import Severity
from agent.model.history import (
    ClockReading,
    ObservedPeriod,
    RecordedCause,
    RecordedState,
    RecordedVerdict,
    StoredVerdicts,
    VerdictChange,
)

GPU: Final = DeviceRef("", "node-1", "gpu-3")
OTHER_GPU: Final = DeviceRef("", "node-1", "gpu-4")
START_S: Final = 1_700_000_000.0

HEALTHY: Final = RecordedVerdict(RecordedState.HEALTHY)
LOST: Final = RecordedVerdict(
    RecordedState.UNHEALTHY, (RecordedCause("gpu.xid.79", Severity.UNHEALTHY, "1 time"),)
)
HOT: Final = RecordedVerdict(
    RecordedState.DEGRADED, (RecordedCause("gpu.heat", Severity.DEGRADED, "91 C, 90 allowed"),)
)
STALLED: Final = RecordedVerdict(
    RecordedState.UNKNOWN, (RecordedCause("source.stalled", Severity.UNKNOWN, "no pass"),)
)


class SimulatedNode:
    """A node whose agent, clocks and devices a test moves; records periods and changes as the agent does.

    `true_s` counts for each device the seconds that it was in each state while the agent ran, and `away_s`
    those in which the agent did not run.
    """

    def __init__(self, *, wall_s: float = START_S) -> None:
        self.wall_s = wall_s
        self.boot_s = 100.0
        self.boots = 1
        self.periods: list[ObservedPeriod] = []
        self.changes: list[VerdictChange] = []
        self.verdicts: dict[DeviceRef, RecordedVerdict] = {}
        self.true_s: dict[DeviceRef, dict[RecordedState, float]] = {}
        self.away_s: dict[DeviceRef, float] = {}

    def start(self, *verdicts: tuple[DeviceRef, RecordedVerdict]) -> None:
        """Start the agent; its first report has these verdicts."""
        id_ = f"run-{len(self.periods) + 1}"
        boot_id = f"boot-{self.boots}"
        self.periods.append(ObservedPeriod(id_, boot_id, self.boot_s, 0.0, self.wall_s))
        for device, verdict in verdicts:
            self.change(device, verdict)

    def change(self, device: DeviceRef, verdict: RecordedVerdict) -> None:
        """Change the verdict on a device."""
        before = self.verdicts.get(device)
        if verdict.is_same(before):
            return
        period = self.periods[-1]
        self.verdicts[device] = verdict
        self.away_s.setdefault(device, 0.0)
        self.true_s.setdefault(device, dict.fromkeys(RecordedState, 0.0))
        offset_s = self.boot_s - period.began_boot_s
        state = before.state if before else RecordedState.ABSENT if offset_s else None
        self.changes.append(
            VerdictChange(period.id, len(self.changes), device, state, verdict, self.wall_s, offset_s)
        )

    def run(self, seconds: float) -> None:
        """Let time pass while the agent runs."""
        self._pass_time(seconds)
        period = self.periods[-1]
        lasted_s = self.boot_s - period.began_boot_s
        self.periods[-1] = period._replace(lasted_s=lasted_s, ended_s=self.wall_s)
        for device, verdict in self.verdicts.items():
            self.true_s[device][verdict.state] += seconds

    def stop(self, seconds: float) -> None:
        """Let time pass without the agent."""
        self._pass_time(seconds)
        for device in self.verdicts:
            self.away_s[device] += seconds

    def reboot(self) -> None:
        """Start the clock since boot at zero."""
        self.boots += 1
        self.boot_s = 0.0

    def set_wall_clock(self, by_s: float) -> None:
        """Set the wall clock forward or back."""
        self.wall_s += by_s

    def _pass_time(self, seconds: float) -> None:
        self.wall_s += seconds
        self.boot_s += seconds

    @property
    def clocks(self) -> ClockReading:
        return ClockReading(self.wall_s, self.boot_s, f"boot-{self.boots}")

    @property
    def stored(self) -> StoredVerdicts:
        return StoredVerdicts(tuple(self.periods), tuple(self.changes))

    def follow(self, *steps: tuple[RecordedVerdict, float], device: DeviceRef = GPU) -> None:
        """Give the device one verdict after another, each for some seconds."""
        for verdict, seconds in steps:
            self.change(device, verdict)
            self.run(seconds)


def node_with(steps: Iterable[tuple[RecordedVerdict, float]]) -> SimulatedNode:
    """Return a node on which the agent saw a device in these states."""
    node = SimulatedNode()
    node.start()
    node.follow(*steps)
    return node
