"""All drivers that are linked to an agent over their sockets, and the way of their word to the core.

Nothing of what a link needs is imported before a driver says something: an agent that only serves health does
without.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio

from agent.config.config import DRIVERS
from agent.driver.report_hub import ReportHub
from agent.model.prepare import DriverFault
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import Instant

if TYPE_CHECKING:
    from agent.driver.link import DriverSession

log = logging.getLogger(__name__)


class SnapshotSource(Protocol):
    """What wakes the core and is read by it. Its descriptor is an eventfd."""

    def fileno(self) -> int:
        """Readable when something that a rule can see has changed."""

    def clear(self) -> None:
        """Take note of the wake, before :meth:`read`."""

    def read(self) -> Snapshot | None:
        """The newest whole picture, or None if there is none yet."""


class LinkedSource:
    """The host's sources, with what linked drivers found broken."""

    def __init__(self, host: SnapshotSource) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._told: dict[str, tuple[DriverFault, ...]] = {}
        self._closed = False

    def fileno(self) -> int:
        """The host's own."""
        return self._host.fileno()

    def clear(self) -> None:
        """Take note of the wake, before :meth:`read`."""
        self._host.clear()

    def read(self) -> Snapshot | None:
        """The newest of everything, or None if the host has nothing yet."""
        snapshot = self._host.read()
        if snapshot is None:
            return None
        with self._lock:
            told = tuple(fault for faults in self._told.values() for fault in faults)
        return replace(snapshot, told=told) if told else snapshot

    def tell(self, driver: str, faults: Sequence[DriverFault]) -> None:
        """All devices that a driver found broken. From any thread."""
        with self._lock:
            self._told[driver] = tuple(faults)
            if not self._closed:
                os.eventfd_write(self._host.fileno(), 1)

    def close(self) -> None:
        """Nobody is woken any more: the descriptor may be somebody else's from now on."""
        with self._lock:
            self._closed = True


class Links:
    """The links of the drivers that have a socket. From any thread, unless it says otherwise."""

    def __init__(
        self,
        drivers: Sequence[str],
        state_dir: Path,
        board: ReportHub,
        make: "Callable[[str, Path], DriverSession]",
    ) -> None:
        """
        Args:
            drivers: Those with a socket.
            state_dir: The agent's.
            board: Where reports are posted.
            make: A link of a driver, given the directory of what is remembered of it.
        """
        self._directories = {driver: state_dir / DRIVERS / driver for driver in drivers}
        self._board = board
        self._make = make
        self._lock = threading.Lock()
        self._opening = {driver: threading.Lock() for driver in drivers}
        self._links: Mapping[str, DriverSession] = {}
        self._news = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    def restore(self) -> None:
        """Opens those of which something is remembered: what they found broken still is."""
        for driver, directory in self._directories.items():
            with suppress(OSError):
                if directory.is_dir():
                    self.open(driver)

    def open(self, driver: str) -> "DriverSession":
        """The driver's link, made if it is not there: that can take as long as a disk takes."""
        with self._opening[driver]:
            link = self._links.get(driver)
            if link is None:
                link = self._make(driver, self._directories[driver])
                with self._lock:
                    self._links = {**self._links, driver: link}
                    if self._token is not None:
                        with suppress(trio.RunFinishedError):  # the agent ends
                            self._token.run_sync_soon(self._tell)
        return link

    def take(self, report: Report, now: Instant) -> None:
        """A newer report, from the core's thread: taints first, then whoever reads."""
        for link in self._links.values():
            link.take(report, now)
        self._board.publish(report)

    async def run(self) -> None:
        """Runs what links do in the core's loop, until cancelled."""
        running: set[str] = set()
        with self._lock:
            self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            while True:
                self._news = trio.Event()
                for driver, link in self._links.items():
                    if driver not in running:
                        running.add(driver)
                        if (report := self._board.report) is not None:
                            link.take(report, report.at)
                        nursery.start_soon(link.run)
                await self._news.wait()

    def close(self, end_s: float) -> Sequence[str]:
        """Writes what is not yet written, until that time of the monotonic clock [s].

        Returns:
            What hangs, in words.
        """
        return [
            f"what writes the prepares of {driver}"
            for driver, link in self._links.items()
            if not link.close(max(0.0, end_s - time.monotonic()))
        ]

    def _tell(self) -> None:
        self._news.set()
