"""Totals over the reports since the agent started, which no single report has: changes, times in states."""

import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.source_state import SourceState
from agent.model.time import NS
from agent.model.verdict_history import STATE_OF_SEVERITY, RecordedState

DeviceIdentity = tuple[str, str, str]
"""Identity of a device: driver, pool and name."""


@dataclass(slots=True)
class DeviceTotals:
    """Number of changed health states of one device, and time in each state, since its first report."""

    state: RecordedState
    since_ns: int
    """CLOCK_MONOTONIC at which the device's present state began [ns]."""
    transitions: dict[RecordedState, int] = field(default_factory=dict)
    """Number of changes of the device's state to each state."""
    past_ns: dict[RecordedState, int] = field(default_factory=dict)
    """Time that the device spent in each state before the present state began [ns]."""

    def seconds(self, now_ns: int) -> dict[RecordedState, float]:
        """Return the time that the device spent in each state until ``now_ns`` [s]."""
        present_ns = self.past_ns.get(self.state, 0) + max(0, now_ns - self.since_ns)
        return {state: ns / NS for state, ns in {**self.past_ns, self.state: present_ns}.items()}


class Totals(NamedTuple):
    """Totals of the devices in the newest report, and numbers of stalls of the agent's sources."""

    version: int
    """Number that grows with each changed state and each new device."""
    devices: dict[DeviceIdentity, DeviceTotals]
    stalls: dict[str, int]
    """Number of stalls since the agent started, by name of the source."""


class TotalsSinceStart:
    """Counter of changed states and of the time in each state, over all reports. Thread-safe.

    The totals of a device that the newest report lacks are dropped.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._version = 0
        self._devices: dict[DeviceIdentity, DeviceTotals] = {}
        self._reported: tuple[DeviceHealth, ...] = ()
        self._stalled: frozenset[str] = frozenset()
        self._stalls: dict[str, int] = {}

    def note_report(self, report: Report) -> None:
        """Count the changes from the last report to this one. Core thread only. Never blocks for long."""
        now_ns = report.at.mono_ns
        stalled = frozenset(one.name for one in report.sources if one.state is SourceState.STALLED)
        with self._lock:
            for name in stalled - self._stalled:
                self._stalls[name] = self._stalls.get(name, 0) + 1
            self._stalled = stalled
            before, now = self._devices, dict[DeviceIdentity, DeviceTotals]()
            is_changed = len(before) != len(report.devices)
            for device in report.devices:
                key, state = device.key, STATE_OF_SEVERITY[device.severity]
                known = before.get(key)
                if known is None:
                    known, is_changed = DeviceTotals(state, now_ns), True
                elif known.state is not state:
                    past_ns = known.past_ns.get(known.state, 0) + now_ns - known.since_ns
                    known = DeviceTotals(
                        state,
                        now_ns,
                        {**known.transitions, state: known.transitions.get(state, 0) + 1},
                        {**known.past_ns, known.state: past_ns},
                    )
                    is_changed = True
                now[key] = known
            self._devices = now
            self._version += is_changed

    def read(self) -> Totals:
        """Return the totals up to the last report. Thread-safe."""
        with self._lock:
            return Totals(self._version, self._devices, dict(self._stalls))
