"""Read access of the HTTP server to the agent: newest report and snapshot, history, usage, JSON documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.config.config import Config
from agent.http.totals_since_start import TotalsSinceStart
from agent.model.consumers import ConsumerMap
from agent.model.report import (
    AgentStatus,
    ClusterStatus,
    ConfigReload,
    NvmlCosts,
    Report,
    SentinelStatus,
    SocketSubscriberCounts,
)
from agent.model.snapshot import Snapshot
from agent.model.source_state import PassDurations
from agent.model.time import NS, Instant
from agent.system.threads.latest_value import LatestValue

SILENT_HEARTBEATS: Final = 3
"""Number of heartbeats without a report after which the agent counts as hung.

The devices' leases last at least as long.
"""


class JsonEncoders(NamedTuple):
    """Functions that encode a report as a JSON document; the command line provides them."""

    report: Callable[[Report], dict[str, Any]]
    """Function that returns the document of ``drahealth scan -o json`` for a report.

    The document lacks the key ``processes``.
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
    nvml_costs: Callable[[], NvmlCosts | None]
    """Function that returns the costs of the calls to NVML; None: NVML is not called."""
    consumers: Callable[[], ConsumerMap | None]
    """Function that returns the newest map of claims, devices and pods; None: it is not known yet."""
    pass_durations: Callable[[], Mapping[str, PassDurations]]
    """Function that returns the durations of the passes of each source."""
    status: Callable[[], AgentStatus]
    """Function that returns the state of the agent's process. It reads procfs."""
    totals: TotalsSinceStart
    """Number of changed health states of each device, and the time in each state, since the agent started."""
    subscribers: Callable[[], tuple[SocketSubscriberCounts, ...]]
    """Function that returns the number of open streams of each gRPC socket."""
    prepares: Callable[[], Mapping[tuple[str, str, str], int]]
    """Function that returns the number of finished prepares by driver, error class and code."""
    config_reload: Callable[[], ConfigReload | None]
    """Function that returns the last reload of the configuration; None: there was none."""
    cluster: Callable[[], ClusterStatus | None]
    """Function that returns the status of writes to the API server; None: ``k8s.enabled`` is false."""
    nvsentinel: Callable[[], SentinelStatus | None]
    """Function that returns the state of the events to NVSentinel; None: none are sent."""
    history_file: Path
    """Path of the history file, which agent.store.history_file reads; absent until the first record."""
    documents: JsonEncoders

    def report(self) -> Report | None:
        """Return the newest published report; None: there is none yet."""
        return self.latest.peek()[1]

    def silence(self, now: Instant) -> str:
        """Return a text that the newest report is too old, so that the agent may hang; empty: it is not.

        Empty also before the first report.
        """
        report = self.report()
        limit_s = SILENT_HEARTBEATS * self.config().heartbeat_s
        if report is None or (age_s := (now.mono_ns - report.at.mono_ns) / NS) <= limit_s:
            return ""
        return f"the newest health report is {age_s:.0f} s old, limit {limit_s:g} s"
