"""Read access of the HTTP server to the agent: newest report and snapshot, history, usage, JSON documents.

The module also has the totals over the reports since the agent started, which no single report has: changes,
times in states.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.config.config import Config
from agent.model.consumers import ConsumerMap
from agent.model.gpu import GpuSample, XidCount
from agent.model.health import DeviceHealth
from agent.model.history import STATE_OF_SEVERITY, USABLE, RecordedState
from agent.model.reading import PassDurations, SourceState
from agent.model.report import AgentStatus, PartsStatus, Report, SocketSubscriberCounts
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.system.threads.latest_value import LatestValue

DeviceIdentity = tuple[str, str, str]
"""Identity of a device: driver, pool and name."""


@dataclass(slots=True)
class DeviceTotals:
    """Number of a device's changes of health state, and its time in each state, since its first report."""

    state: RecordedState
    since_ns: int
    """CLOCK_MONOTONIC at which the device's present state began [ns]."""
    transitions: dict[RecordedState, int] = field(default_factory=dict)
    """Number of changes of the device's state to each state."""
    losses: int = 0
    """Number of changes from a usable state to Unknown or Unhealthy, as the history counts them."""
    past_ns: dict[RecordedState, int] = field(default_factory=dict)
    """Time that the device spent in each state before the present state began [ns]."""

    def seconds(self, until_ns: int) -> dict[RecordedState, float]:
        """Return the time that the device spent in each state until ``until_ns`` [s]."""
        present_ns = self.past_ns.get(self.state, 0) + max(0, until_ns - self.since_ns)
        return {state: ns / NS for state, ns in {**self.past_ns, self.state: present_ns}.items()}


class Totals(NamedTuple):
    """Totals of each device in the newest report, of stalls of each source, and of XIDs of each GPU."""

    version: int
    """Number that grows with each changed state and each new device."""
    devices: dict[DeviceIdentity, DeviceTotals]
    stalls: dict[str, int]
    """Number of stalls since the agent started, by name of the source."""
    xids: dict[tuple[str, int], int]
    """Number of reported XIDs since the agent started, by the GPU's UUID and the XID."""


class TotalsSinceStart:
    """Counter of each device's changes of state and its time in each state, over all reports. Thread-safe.

    The totals of a device that the newest report lacks are dropped.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._version = 0
        self._devices: dict[DeviceIdentity, DeviceTotals] = {}
        self._reported: tuple[DeviceHealth, ...] = ()
        self._stalled: frozenset[str] = frozenset()
        self._stalls: dict[str, int] = {}
        self._xids: dict[tuple[str, int], int] = {}
        self._xid_counts: dict[str, tuple[XidCount, ...]] = {}
        """Last counts of XIDs, by the GPU's UUID."""

    def count_xids(self, gpus: Iterable[GpuSample]) -> None:
        """Add the XIDs that NVML reported since the last samples of these GPUs. Core thread only.

        The counts of a sample begin again with each start of the NVML process, and are empty before it. An
        XID whose count was dropped for lack of room has a new count with its next event.
        """
        for gpu in gpus:
            last = self._xid_counts.get(gpu.uuid, ())
            if not gpu.uuid or not gpu.xids or gpu.xids is last:
                continue
            self._xid_counts[gpu.uuid] = gpu.xids
            counted = {(xid.code, xid.gi, xid.ci, xid.first_ns): xid.times for xid in last}
            with self._lock:
                for code, gi, ci, times, first_ns, _ in gpu.xids:
                    grown = times - counted.get((code, gi, ci, first_ns), 0)
                    self._xids[gpu.uuid, code] = self._xids.get((gpu.uuid, code), 0) + grown

    def handle_report(self, report: Report) -> None:
        """Count the changes from the last report to this one. Core thread only. Never blocks for long."""
        now_ns = report.at.mono_ns
        stalled = frozenset(source.name for source in report.sources if source.state is SourceState.STALLED)
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
                        known.losses + (known.state in USABLE and state not in USABLE),
                        {**known.past_ns, known.state: past_ns},
                    )
                    is_changed = True
                now[key] = known
            self._devices = now
            self._version += is_changed

    def read(self) -> Totals:
        """Return the totals over all reports since the agent started. Thread-safe."""
        with self._lock:
            return Totals(self._version, self._devices, dict(self._stalls), dict(self._xids))


# --- the view ----------------------------------------------------------------------------------------------

SILENT_HEARTBEATS: Final = 3
"""Number of heartbeats without a report after which the agent counts as hung.

The devices' leases last at least as long.
"""


@dataclass(frozen=True, slots=True)
class AgentView:
    """Read access of the HTTP server to a running agent. Thread-safe."""

    latest: LatestValue[Report]
    """Cell with the newest published report; only tasks of the HTTP server's loop wait for newer ones."""
    config: Callable[[], Config]
    """Function that returns the configuration in effect."""
    snapshot: Callable[[], Snapshot | None]
    """Function that returns the snapshot of the newest evaluation; None: there was no evaluation yet."""
    consumers: Callable[[], ConsumerMap | None]
    """Function that returns the newest map of claims, devices and pods; None: it is not known yet."""
    pass_durations: Callable[[], Mapping[str, PassDurations]]
    """Function that returns the durations of the passes of each source."""
    status: Callable[[], AgentStatus | str]
    """Function that reads the state of the agent's process from procfs, or returns why it cannot be read."""
    totals: TotalsSinceStart
    """Number of changed health states of each device, and the time in each state, since the agent started."""
    subscribers: Callable[[], tuple[SocketSubscriberCounts, ...]]
    """Function that returns the number of open streams of each gRPC socket."""
    prepares: Callable[[], Mapping[tuple[str, str, str], int]]
    """Function that returns the number of finished prepares by driver, error class and code."""
    parts: Callable[[], PartsStatus]
    """Function that returns the status of parts of the agent that no report describes."""
    history_file: Path
    """Path of the history file, which agent.store.history_file reads; absent until the first record."""
    encode_report: Callable[[Report], dict[str, Any]]
    """Function that returns a report as ``drahealth scan -o json`` prints it, without ``processes``."""

    def report(self) -> Report | None:
        """Return the newest published report; None: there is none yet."""
        return self.latest.peek()[1]

    def staleness_error(self, now: Instant) -> str:
        """Return an error text if the newest report is so old that the agent may hang; else an empty text.

        The text is also empty before the first report.
        """
        report = self.report()
        limit_s = SILENT_HEARTBEATS * self.config().heartbeat_s
        if report is None or (age_s := (now.mono_ns - report.at.mono_ns) / NS) <= limit_s:
            return ""
        return f"the newest health report is {age_s:.0f} s old, limit {limit_s:g} s"
