"""Snapshot source that adds the reports of drivers to the host's snapshots (newest readings of all sources).

Drivers report their devices, the results of their health checks, and faults of devices, from any thread. The
engine loop reads the newest reports together with the host's newest samples in one snapshot.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from agent.engine.loop import SnapshotSource
from agent.model.cleared_faults import ClearRequest
from agent.model.declared_devices import Declarations, DeclaredFile, DriverCheckSample, DriverDevice
from agent.model.health import Severity
from agent.model.prepare import DriverFault
from agent.model.reading import NEVER_READ
from agent.model.settings import CustomCheckResult
from agent.model.snapshot import CpuSetsSample, Snapshot

_UNREAD_CPUS: Final = CpuSetsSample(NEVER_READ, NEVER_READ, NEVER_READ)

DriverCheckKey = tuple[str, str]
"""Identity of a health check of one device: the device's name in reports, and the check's name."""


class UnmonitoredHostSource:
    """Snapshot source for a host that is not monitored: its snapshots have no samples of the host.

    Only reports of the driver wake the engine loop.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the file descriptor of an eventfd that is readable after a report of the driver."""
        return self._fd

    def clear(self) -> None:
        """Reset the eventfd after a wake; the engine loop calls this before :meth:`read`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def read(self) -> Snapshot:
        """Return a snapshot (newest readings of all sources) without samples of the host."""
        return Snapshot(0, _UNREAD_CPUS)

    def close(self) -> None:
        """Close the eventfd."""
        os.close(self._fd)


class HostAndDriverSource:
    """Snapshot source that adds the newest reports of drivers to the host's snapshots. Thread-safe.

    A report replaces the driver's previous report. Reports that come before :meth:`open` are in the first
    snapshot after it; reports that come after :meth:`close` do not wake the engine loop.
    """

    def __init__(self, driver: str = "") -> None:
        """Create a source without the host's snapshots; :meth:`open` adds them.

        Args:
            driver: Name of the driver that embeds the monitor and calls :meth:`declare`. Empty: drivers
                declare their devices in files, which the host's source reads.
        """
        self._driver = driver
        self._host: SnapshotSource | None = None
        self._on_declared: Callable[[Declarations], None] | None = None
        self._lock = threading.Lock()
        self._declared: Declarations | None = (DeclaredFile(driver, ()),) if driver else None
        self._checks: dict[DriverCheckKey, DriverCheckSample] = {}
        self._reported_checks: dict[str, tuple[DriverCheckSample, ...]] = {}
        self._faults: dict[str, tuple[DriverFault, ...]] = {}
        self._clear_requests: tuple[ClearRequest, ...] = ()
        self._custom_checks: tuple[CustomCheckResult, ...] = ()
        self.is_urgent = False
        """Whether a request or a driver-reported fault waits for the next snapshot."""
        self.newest: Snapshot | None = None
        """Snapshot that :meth:`read` returned last; None: it has returned none yet."""

    def open(self, host: SnapshotSource, on_declared: Callable[[Declarations], None] | None = None) -> None:
        """Use a source for the host's samples and for waking the engine loop.

        Args:
            host: Source whose descriptor is an eventfd; the caller closes it after :meth:`close`.
            on_declared: Called with all declared devices, now and after each change; None: not called.
        """
        with self._lock:
            self._host, self._on_declared = host, on_declared
            if on_declared is not None:
                on_declared(self._declared or ())

    def close(self) -> None:
        """Stop using the host's snapshot source, so that the caller can close it."""
        with self._lock:
            self._host = self._on_declared = None

    # --- engine loop ---------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Return the file descriptor of an eventfd that is readable after changes of host or driver."""
        return self._opened.fileno()

    def clear(self) -> None:
        """Reset the eventfd after a wake; the engine loop calls this before :meth:`read`."""
        self._opened.clear()

    def read(self) -> Snapshot | None:
        """Return the host's newest snapshot and all drivers' reports; None: the host has no snapshot yet."""
        self.newest = snapshot = self._read()
        return snapshot

    def _read(self) -> Snapshot | None:
        snapshot = self._opened.read()
        if snapshot is None:
            return None
        with self._lock:
            self.is_urgent = False
            if self._clear_requests:
                snapshot = replace(snapshot, clear_requests=self._clear_requests)
            if self._custom_checks:
                snapshot = replace(snapshot, custom_checks=self._custom_checks)
            faults = tuple(fault for reported in self._faults.values() for fault in reported)
            if self._declared is not None:
                checks = tuple(self._checks.values())
                return replace(snapshot, declared=self._declared, checks=checks, driver_faults=faults)
            if self._reported_checks:
                checks = tuple(sample for reported in self._reported_checks.values() for sample in reported)
                snapshot = replace(snapshot, checks=checks)
        return replace(snapshot, driver_faults=faults) if faults else snapshot

    # --- drivers: thread-safe ------------------------------------------------------------------------------

    def declare(
        self,
        devices: Iterable[DriverDevice],
        new_checks: Iterable[DriverCheckSample] = (),
        removed_checks: Iterable[DriverCheckKey] = (),
    ) -> None:
        """Replace the devices of the driver that embeds the monitor, with the samples of their checks.

        Args:
            devices: All devices of the driver.
            new_checks: Samples of new checks, valid until their first call has returned.
            removed_checks: Checks whose samples are dropped.
        """
        with self._lock:
            for key in removed_checks:
                self._checks.pop(key, None)
            for sample in new_checks:
                self._checks[sample.subject, sample.check] = sample
            self._declared = (DeclaredFile(self._driver, tuple(devices)),)
            if self._on_declared is not None:
                self._on_declared(self._declared)
            self._wake()

    def update_check_sample(self, sample: DriverCheckSample, *, wake: bool) -> None:
        """Replace the newest result (sample) of a health check; a removed check is ignored.

        Args:
            wake: Whether the engine loop reads the sample at once, and not at its next wake.
        """
        with self._lock:
            key = sample.subject, sample.check
            if key in self._checks:
                self._checks[key] = sample
                if wake:
                    self._wake()

    def set_reported_checks(self, driver: str, samples: Iterable[DriverCheckSample], wake: bool) -> None:
        """Replace the newest results of all health checks that a driver reports over its socket.

        Args:
            wake: Whether the engine loop reads the samples at once, and not at its next wake.
        """
        with self._lock:
            self._reported_checks[driver] = tuple(samples)
            if wake:
                self._wake()

    def failing_checks(self, subjects: Collection[str]) -> frozenset[DriverCheckKey]:
        """Return the keys of the devices' health checks whose newest result is Unhealthy, reported or not."""
        with self._lock:
            return frozenset(
                key
                for key, sample in self._checks.items()
                if sample.subject in subjects
                and sample.finding is not None
                and sample.finding.severity is Severity.UNHEALTHY
            )

    def request_evaluation(self) -> None:
        """Wake the engine loop, so that it evaluates the newest samples."""
        with self._lock:
            self._wake(is_urgent=True)

    def set_driver_faults(self, driver: str, faults: Iterable[DriverFault]) -> None:
        """Replace the device faults that a driver reported."""
        with self._lock:
            self._faults[driver] = tuple(faults)
            self._wake(is_urgent=True)

    def set_clear_requests(self, requests: Iterable[ClearRequest]) -> None:
        """Replace the unanswered requests of operators to clear faults."""
        with self._lock:
            self._clear_requests = tuple(requests)
            if self._clear_requests:
                self._wake(is_urgent=True)

    def set_custom_checks(self, results: Iterable[CustomCheckResult], wake: bool) -> None:
        """Replace the newest results of the checks that the operator configures as commands.

        Args:
            wake: Whether the engine loop reads the results at once, and not at its next wake.
        """
        with self._lock:
            self._custom_checks = tuple(results)
            if wake:
                self._wake()

    @property
    def _opened(self) -> SnapshotSource:
        host = self._host
        if host is None:
            raise RuntimeError("snapshot source of the host and its drivers: not open; call open() first")
        return host

    def _wake(self, *, is_urgent: bool = False) -> None:
        self.is_urgent |= is_urgent
        if self._host is not None:
            os.eventfd_write(self._host.fileno(), 1)
