"""Read access of the HTTP server to the agent: newest report and snapshot, history, usage, JSON documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agent.config.config import Config
from agent.http.health_totals import HealthTotals
from agent.model.report import AgentStatus, ConfigReload, Report, SocketSubscribers
from agent.model.snapshot import Snapshot
from agent.system.threads.latest_value import LatestValue


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
