"""Recorder of which pod used which device and when, in a SQLite file.

It compares successive consumer maps (maps of claims, devices and pods).

Uses of devices that cannot be written yet are queued in memory, up to a limit. Modules that take memory are
imported with the first consumer map.
"""

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agent.errors import DrahealthError
from agent.model.report import Report
from agent.model.settings import TRACKED_USAGES_MAX, UsageHistoryLimits
from agent.model.time import NS, Instant
from agent.store.history_file import HistoryFile
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError
from agent.system.timing import WallClockStepDetector

if TYPE_CHECKING:
    from agent.devices.consumers.usage import UsageState
    from agent.model.consumers import ConsumerMap
    from agent.model.device_usage import PodDeviceUsage

RUNNING_WRITE_S: Final = 300.0
"""Interval of writes while a device is in use, so that the file shows until when the agent saw it [s]."""
RETRY_S: Final = 10.0
"""Time between two attempts to write the history file after a failed write [s]."""

log = get_logger(__name__)


class UsageRecorder:
    """Recorder of uses of devices by pods, with a queue of uses that are not written yet. Thread-safe."""

    def __init__(self, file: HistoryFile, *, limits: UsageHistoryLimits, drivers: Iterable[str] = ()) -> None:
        """Create the recorder.

        Args:
            file: History file; created by the first write.
            limits: Limits of the history file; 0 rows: nothing is recorded.
            drivers: DRA drivers whose health the agent serves.
        """
        self._file = file
        self._limits = limits
        self._drivers = frozenset(drivers)
        self._uses: UsageState | None = None
        self._pending: dict[str, PodDeviceUsage] = {}
        self._merged: set[str] = set()
        self._dropped = 0
        self._now = Instant(0, 0)
        self._last_write_ns = self._retry_ns = 0
        self._is_read = False  # whether the last read of the history file succeeded
        self._wall_clock = WallClockStepDetector()
        self.error = ""
        """Error of the last write; empty: it succeeded, or there was none."""
        self._logged_left_out = False
        self._lock = threading.Lock()

    def record(self, consumers: "ConsumerMap", report: Report, now: Instant) -> None:
        """Record which pods use which devices. Blocks on the disk; a disk error is only logged.

        Args:
            consumers: Map of claims, devices and pods.
            report: Newest health report.
            now: Time at which the consumer map was built.
        """
        if not self._limits.rows or report.starting:
            return
        from agent.devices.consumers.consumer_queries import state_lookup
        from agent.devices.consumers.usage import UsageState, update_usages

        with self._lock:
            self._wall_clock.observe(now)
            uses = self._resume_from_file(self._uses or UsageState(os.urandom(6).hex()))
            if not self._wall_clock.is_trusted(now):  # a boot can begin with the clock behind
                now = Instant(now.mono_ns, max(now.wall_s, uses.last_written_s))
            step = update_usages(uses, consumers, state_lookup(report, self._drivers), now)
            self._uses, self._now = step.usages, now
            self._merged.update(step.merged)
            self._queue(step.changed)
            self._log_left_out(step.usages.dropped)
            is_due = bool(step.usages.running) and now.mono_ns - self._last_write_ns >= RUNNING_WRITE_S * NS
            if (self._pending or self._merged or is_due) and now.mono_ns >= self._retry_ns:
                self._write()

    def close(self, timeout_s: float) -> bool:
        """Write the queued uses of devices at shutdown.

        Returns False if that takes longer than `timeout_s` seconds.
        """
        thread = DaemonThread(self._write_queued, "dh-pods-record")
        try:
            thread.start()
        except ThreadStartError:  # here a hung disk would block, but without the write the uses are lost
            self._write_queued()
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _write_queued(self) -> None:
        with self._lock:
            if self._uses and (self._pending or self._merged or self._uses.running):
                self._uses = self._resume_from_file(self._uses)
                self._write()

    # --- memory ----------------------------------------------------------------------------------------

    def _queue(self, changed: "Iterable[PodDeviceUsage]") -> None:
        """Queue uses of devices for the next write to the history file.

        Beyond the limit of rows, the oldest ended uses are dropped.
        """
        for use in changed:
            self._pending.pop(use.id, None)
            self._pending[use.id] = use
        for id_ in self._merged:
            self._pending.pop(id_, None)
        ended = [id_ for id_, use in self._pending.items() if use.ended]
        for id_ in ended[: max(0, len(ended) - self._limits.rows)]:
            del self._pending[id_]
            self._dropped += 1

    def _log_left_out(self, left_out: int) -> None:
        if left_out and not self._logged_left_out:
            log.warning(
                "history: %d uses of devices by pods not recorded: %d uses are tracked at the same time, the "
                "limit; 'drahealth history' does not show them",
                left_out,
                TRACKED_USAGES_MAX,
            )
        self._logged_left_out = bool(left_out)

    # --- the disk --------------------------------------------------------------------------------------

    def _resume_from_file(self, uses: "UsageState") -> "UsageState":
        """Return the current uses of devices.

        If the recorder has not read the history file yet, the uses that an earlier run of the agent stored
        continue, with their ids. Without a read nothing is written, else such a use has two ids.
        """
        from agent.devices.consumers.usage import merge_usages, resume_usages, usage_key

        self._is_read = False
        try:
            content = self._file.content_if_replaced()
        except DrahealthError as error:
            self._log_error(error)
        else:
            self._is_read = True
            if not (self._pending or self._merged or uses.running):
                self.error = ""  # no write follows that would show it
            if content is None:
                return uses
            stored = {usage_key(use): use for use in reversed(content.running)}
            ended = [use for use in self._pending.values() if use.ended]
            merged = (merge_usages(stored.pop(usage_key(use), use), use) for use in ended)
            self._pending = {use.id: use for use in merged}
            uses = resume_usages(uses, content._replace(running=tuple(stored.values())[::-1]))
            kept = {active.use.id for active in uses.running.values()} | self._pending.keys()
            self._merged.update({use.id for use in content.running} - kept)
        self._queue(active.use for active in uses.running.values())  # a new file has none of them
        return uses

    def _write(self) -> None:
        if not self._is_read:
            return
        by_age = self._wall_clock.is_trusted(self._now)
        changed = tuple(self._pending.values())
        try:
            self._file.write_uses(changed, self._merged, self._now.wall_s, delete_by_age=by_age)
        except DrahealthError as error:
            self._log_error(error)
            self._retry_ns = self._now.mono_ns + round(RETRY_S * NS)
            return
        if self._dropped:
            log.warning(
                "history file %s: %d ended uses of devices were lost while the file could not be written; "
                "'drahealth history' does not show them",
                self._file.path,
                self._dropped,
            )
        self._pending.clear()
        self._merged.clear()
        self._dropped, self.error, self._last_write_ns = 0, "", self._now.mono_ns

    def _log_error(self, error: DrahealthError) -> None:
        if str(error) != self.error:
            log.warning(
                "history: uses of devices not written: %s; they are kept in memory and written later; check "
                "--state-dir",
                error,
            )
        self.error = str(error)
