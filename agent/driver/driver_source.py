"""Snapshot source of the host, completed with what drivers report: devices, check samples and broken devices.

Any thread may report; the engine loop reads everything in one snapshot together with the host's newest
sample.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from agent.engine.loop import SnapshotSource
from agent.model.declared import CheckSample, Declarations, Declared, DeclaredFile
from agent.model.prepare import DriverFault
from agent.model.reading import NEVER_READ
from agent.model.snapshot import CpuSample, Snapshot

_UNREAD_CPUS: Final = CpuSample(NEVER_READ, NEVER_READ, NEVER_READ)

CheckKey = tuple[str, str]
"""Name of a device in reports, and name of a health check of the driver."""


class EmptySource:
    """Source for a host that is not monitored: its snapshots are empty, and only the driver wakes the
    core."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return a descriptor that is readable after a report of the driver."""
        return self._fd

    def clear(self) -> None:
        """Acknowledge the wake; called before :meth:`read`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def read(self) -> Snapshot:
        """Return a snapshot without samples."""
        return Snapshot(0, _UNREAD_CPUS)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class DriverSource:
    """The host's snapshots with the reports of drivers.

    Every report of a driver replaces its report before. Reports before :meth:`open` are read after it; after
    :meth:`close` a report wakes no loop.
    """

    def __init__(self, driver: str = "") -> None:
        """Create a source that is not open.

        Args:
            driver: Driver that embeds the monitor and declares devices by :meth:`declare`. Empty: drivers
                declare devices in files, which the host's source reads.
        """
        self._driver = driver
        self._host: SnapshotSource | None = None
        self._on_declared: Callable[[Declarations], None] | None = None
        self._lock = threading.Lock()
        self._declared: Declarations | None = (DeclaredFile(driver, ()),) if driver else None
        self._checks: dict[CheckKey, CheckSample] = {}
        self._faults: dict[str, tuple[DriverFault, ...]] = {}

    def open(self, host: SnapshotSource, on_declared: Callable[[Declarations], None] | None = None) -> None:
        """Start to read the host's source.

        Args:
            host: Source whose descriptor is an eventfd; it stays open at :meth:`close`.
            on_declared: Called with all declared devices, for a host that must find their hardware.
        """
        with self._lock:
            self._host, self._on_declared = host, on_declared
            if on_declared is not None:
                on_declared(self._declared or ())

    def close(self) -> None:
        """Drop the host's source, whose descriptor may belong to another file from now on."""
        with self._lock:
            self._host = self._on_declared = None

    # --- engine loop ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return a descriptor that is readable when the host or a driver has new input for the rules."""
        return self._opened.fileno()

    def clear(self) -> None:
        """Acknowledge the wake; called before :meth:`read`."""
        self._opened.clear()

    def read(self) -> Snapshot | None:
        """Return the host's newest snapshot with all reports, or None before the host's first one."""
        snapshot = self._opened.read()
        if snapshot is None:
            return None
        with self._lock:
            faults = tuple(fault for reported in self._faults.values() for fault in reported)
            if self._declared is not None:
                checks = tuple(self._checks.values())
                return replace(snapshot, declared=self._declared, checks=checks, driver_faults=faults)
        return replace(snapshot, driver_faults=faults) if faults else snapshot

    # --- drivers: thread-safe ------------------------------------------------------------------------------

    def declare(
        self,
        devices: Iterable[Declared],
        begun: Iterable[CheckSample] = (),
        ended: Iterable[CheckKey] = (),
    ) -> None:
        """Replace the embedding driver's devices, together with the checks of added and removed ones.

        Args:
            devices: All devices of the driver.
            begun: Samples of new checks, valid until their first call has returned.
            ended: Checks whose samples are dropped.
        """
        with self._lock:
            for key in ended:
                self._checks.pop(key, None)
            for sample in begun:
                self._checks[sample.subject, sample.check] = sample
            self._declared = (DeclaredFile(self._driver, tuple(devices)),)
            if self._on_declared is not None:
                self._on_declared(self._declared)
            self._wake()

    def add_sample(self, sample: CheckSample, *, wake: bool) -> None:
        """Replace a health check's sample; without ``wake`` the loop reads it later. Ended checks are
        ignored."""
        with self._lock:
            key = sample.subject, sample.check
            if key in self._checks:
                self._checks[key] = sample
                if wake:
                    self._wake()

    def set_faults(self, driver: str, faults: Iterable[DriverFault]) -> None:
        """Replace the faults that a driver reported."""
        with self._lock:
            self._faults[driver] = tuple(faults)
            self._wake()

    @property
    def _opened(self) -> SnapshotSource:
        host = self._host
        if host is None:
            raise RuntimeError("the source is not open")
        return host

    def _wake(self) -> None:
        if self._host is not None:
            os.eventfd_write(self._host.fileno(), 1)
