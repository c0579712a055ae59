"""Verdict history: changes in health and causes of devices, and periods of observation by the agent.

A verdict is the state of a device with its causes. agent.node.verdict_recorder records the history,
agent.store.history_file stores it, and agent.health.availability_statistics computes from it how long each
device was in each state.
"""

from enum import StrEnum
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef
from agent.model.health import Severity

CAUSES_MAX: Final = 8
"""Largest number of causes that the history records of one verdict, the worst first."""


class RecordedState(StrEnum):
    """State of a device in the verdict history."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """The device works with limitations: Healthy for the kubelet."""
    UNKNOWN = "unknown"
    UNHEALTHY = "unhealthy"
    ABSENT = "absent"
    """The agent observes the node, and its report does not have the device."""


STATE_OF_SEVERITY: Final = {
    Severity.OK: RecordedState.HEALTHY,
    Severity.INFO: RecordedState.HEALTHY,
    Severity.DEGRADED: RecordedState.DEGRADED,
    Severity.UNKNOWN: RecordedState.UNKNOWN,
    Severity.UNHEALTHY: RecordedState.UNHEALTHY,
}
"""State that is recorded of a device, by the severity of the device's worst cause."""


USABLE: Final = frozenset({RecordedState.HEALTHY, RecordedState.DEGRADED})
"""States in which the kubelet has the device as Healthy."""


class RecordedCause(NamedTuple):
    """Cause of a device's state, as the verdict history records it: code, severity and evidence."""

    code: str
    severity: Severity
    evidence: str
    """Evidence of the cause at the time of the change: one line with the compared numbers."""


class RecordedVerdict(NamedTuple):
    """Verdict on a device: its state, and the causes of the state with a severity above INFO, worst first."""

    state: RecordedState
    causes: tuple[RecordedCause, ...] = ()

    def is_same(self, other: "RecordedVerdict | None") -> bool:
        """Return whether this verdict and another one have the same state and the same codes of causes.

        Verdicts that differ only in their evidence are the same.
        """
        return other is not None and self._substance() == other._substance()

    def _substance(self) -> object:
        return self.state, sorted({(cause.code, cause.severity) for cause in self.causes})


GONE: Final = RecordedVerdict(RecordedState.ABSENT)


class VerdictChange(NamedTuple):
    """Change of the verdict (state and causes) on a device. The new verdict holds until the next change."""

    period: str
    """Id of the observed period (usually a run of the agent) in which the agent found the verdict."""
    number: int
    """Number of the change within its observed period, from 0."""
    device: DeviceRef
    before: RecordedState | None
    """State that the device had before; None: unknown, this is the first record of the device."""
    verdict: RecordedVerdict
    at_s: float
    """Time of the change on the wall clock, as it was set then [s since 1970]."""
    offset_s: float
    """Time from the start of the period to the change [s]; 0: the first report of the period has the verdict,
    which may have begun earlier."""


class ObservedPeriod(NamedTuple):
    """Time in which the agent observed the devices without interruption, usually one run of the agent."""

    id: str
    """Id of the period, unique over all runs of the agent."""
    boot_id: str
    """ID of the machine's boot in which the agent observed; empty: unknown."""
    began_boot_s: float
    """CLOCK_BOOTTIME of the period's first report [s]."""
    lasted_s: float
    """Time from the period's first report to the last report that is known [s]."""
    ended_s: float
    """Time of the period's last report on the wall clock [s since 1970]."""


class StoredVerdicts(NamedTuple):
    """Content of the verdict history: observed periods and changes of verdicts."""

    periods: tuple[ObservedPeriod, ...] = ()
    """Observed periods of all runs of the agent, the oldest first."""
    changes: tuple[VerdictChange, ...] = ()
    """Changes of verdicts on all devices, the oldest first."""


class ClockReading(NamedTuple):
    """One moment on two clocks: the wall clock and the clock since boot."""

    wall_s: float
    boot_s: float
    """CLOCK_BOOTTIME [s]: continues while the machine sleeps, and is never set."""
    boot_id: str = ""
