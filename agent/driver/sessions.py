"""Sessions of all DRA drivers that call the agent over a socket. A session handles one driver's calls.

agent.driver.session is imported at the first call of a driver, which saves memory if no driver calls.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from agent.config.config import DRIVERS, Config
from agent.engine.loop import ReportHub
from agent.model.claim import ClaimRef
from agent.model.prepare import DriverFault, OtherDriverFailure
from agent.model.report import Report
from agent.model.time import Instant

if TYPE_CHECKING:
    from agent.driver.session import DriverSession
    from agent.model.consumers import ConsumerMap


class DriverSessions:
    """Sessions of all drivers that have a socket, each opened at its driver's first call. Thread-safe."""

    def __init__(
        self,
        drivers: Sequence[str],
        state_dir: Path,
        hub: ReportHub,
        open_session: "Callable[[str, Path], DriverSession]",
        consumer_map: "Callable[[], ConsumerMap | None]" = lambda: None,
    ) -> None:
        """Create a collection without open sessions.

        Args:
            drivers: Names of the drivers that have a socket.
            state_dir: The agent's state directory.
            hub: Hub with the newest report.
            open_session: Opens the session of a driver, given the driver's state directory.
            consumer_map: Returns the newest map of claims and pods; None: not known yet.
        """
        self._directories = {driver: state_dir / DRIVERS / driver for driver in drivers}
        self._hub = hub
        self._open_session = open_session
        self._consumer_map = consumer_map
        self._lock = threading.Lock()
        self._opening = {driver: threading.Lock() for driver in drivers}
        self._sessions: Mapping[str, DriverSession] = {}
        self._reloaded: Config | None = None
        """Configuration of the last reload; None: there was none."""
        self._added = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    def restore(self) -> None:
        """Open the session of each driver with saved state, because its reported faults are still valid."""
        for driver, directory in self._directories.items():
            with suppress(OSError):
                if directory.is_dir():
                    self.open(driver)

    def open(self, driver: str) -> "DriverSession":
        """Return a driver's session, and open it if it is not open. Blocks while a disk hangs."""
        with self._opening[driver]:
            session = self._sessions.get(driver)
            if session is None:
                session = self._open_session(driver, self._directories[driver])
                with self._lock:
                    self._sessions = {**self._sessions, driver: session}
                    if self._reloaded is not None:  # perhaps while the session was opened
                        session.reconfigure(self._reloaded)
                    if self._token is not None:
                        with suppress(trio.RunFinishedError):  # the agent ends
                            self._token.run_sync_soon(lambda: self._added.set())
        return session

    def failures_at_other_drivers(self, driver: str, claim: ClaimRef) -> Sequence[OtherDriverFailure]:
        """Return recent failures of all other drivers for the pods that use a driver's claim. Thread-safe.

        The kubelet stops at the first driver that fails, so the pod's event has the error of only one.
        """
        others = {name: session for name, session in self._sessions.items() if name != driver}
        if not others:
            return ()
        uids = {claim.uid}
        if (known := self._consumer_map()) is not None:
            from agent.devices.consumers.consumer_queries import claims_used_with  # loaded with the map

            uids |= claims_used_with(known, claim.uid)
        return [
            OtherDriverFailure(name, verdict)
            for name, session in sorted(others.items())
            for verdict in session.recent_failures(uids)
        ]

    def reconfigure(self, config: Config) -> None:
        """Apply a reloaded configuration to all sessions, including those that are opened later.

        Never blocks.
        """
        with self._lock:
            self._reloaded = config
            for session in self._sessions.values():
                session.reconfigure(config)

    def update_taints(self, report: Report, now: Instant) -> None:
        """Update the taints of all drivers that have a session, for a new report.

        Called only in the core thread.
        """
        for session in self._sessions.values():
            session.update_taints(report, now)

    def prepare_counts(self) -> Mapping[tuple[str, str, str], int]:
        """Return the number of reported prepares by driver, error class and code. Thread-safe."""
        return {
            (driver, *key): count
            for driver, session in self._sessions.items()
            for key, count in session.prepare_counts.copy().items()
        }

    def record_clear(self, cleared: Iterable[DriverFault]) -> None:
        """End driver-reported faults that an operator cleared.

        Called only in the core thread. Never blocks.
        """
        by_driver: dict[str, list[DriverFault]] = {}
        for fault in cleared:
            by_driver.setdefault(fault.device.driver, []).append(fault)
        for driver, faults in by_driver.items():
            if (session := self._sessions.get(driver)) is not None:
                session.record_clear(faults)

    async def run(self) -> None:
        """Publish and save the taints of all sessions until cancelled. Called only in the core thread."""
        running: set[str] = set()
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            while True:
                self._added = trio.Event()
                for driver, session in self._sessions.items():
                    if driver not in running:
                        running.add(driver)
                        if (report := self._hub.report) is not None:
                            session.update_taints(report, report.at)
                        nursery.start_soon(session.run)
                await self._added.wait()

    def close(self, end_s: float) -> Sequence[str]:
        """Save the prepare ledgers of all sessions, and wait until ``end_s`` on the monotonic clock [s].

        Returns:
            Names of the ledger writers that did not finish in time.
        """
        return [
            f"ledger writer of {driver}"
            for driver, session in self._sessions.items()
            if not session.close(max(0.0, end_s - time.monotonic()))
        ]
