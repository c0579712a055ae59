"""Read access of the HTTP server to the agent: newest report and snapshot, history, usage, JSON documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.config.config import Config
from agent.http.health_totals import HealthTotals
from agent.model.report import AgentStatus, ConfigReload, Report, SocketSubscribers
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.system.threads.latest_value import LatestValue

SILENT_HEARTBEATS: Final = 3
"""Number of heartbeats without a report after which the agent counts as hung; a lease is at least as long."""


class Documents(NamedTuple):
    """Encoders of JSON documents, which the command line provides."""

    report: Callable[[Report], dict[str, Any]]
    """Returns the document of ``drahealth scan -o json``, without its key ``processes``."""


@dataclass(frozen=True, slots=True)
class AgentView:
    """Read access to a running agent. Thread-safe."""

    latest: LatestValue[Report]
    """Newest published report. Only tasks of the HTTP server's loop wait for newer ones."""
    config: Callable[[], Config]
    """Returns the configuration in effect."""
    snapshot: Callable[[], Snapshot | None]
    """Returns the snapshot of the newest evaluation; None: there was no evaluation yet."""
    status: Callable[[], AgentStatus]
    """Returns the state of the agent's process. Reads procfs."""
    totals: HealthTotals
    """Changes and times in states since the agent started."""
    subscribers: Callable[[], tuple[SocketSubscribers, ...]]
    """Returns the open streams of each socket."""
    prepares: Callable[[], Mapping[tuple[str, str, str], int]]
    """Returns the number of prepares by driver, error class and code."""
    config_reload: Callable[[], ConfigReload | None]
    """Returns the last reload of the configuration; None: there was none."""
    history_file: Path
    """File of the history: agent.store.history_file reads it. Absent until the first record."""
    documents: Documents

    def report(self) -> Report | None:
        """Return the newest published report; None: there is none yet."""
        return self.latest.peek()[1]

    def silence(self, now: Instant) -> str:
        """Return why the newest report is too old; empty: it is not, or there is none yet."""
        report = self.report()
        limit_s = SILENT_HEARTBEATS * self.config().heartbeat_s
        if report is None or (age_s := (now.mono_ns - report.at.mono_ns) / NS) <= limit_s:
            return ""
        return f"the last report is {age_s:.0f} s old, limit {limit_s:g} s"
