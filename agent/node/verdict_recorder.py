"""Recorder of changes in devices' health and causes, in a file. It compares each health report with the last.

Every report is compared when it is published, in the core thread, which runs the engine loop; the thread
``dh-history`` writes, so a full or hung disk delays no verdict. Changes wait in memory until they are
written. If too many wait, the present period of observation ends before the first change that is dropped, and
a new one begins after the next write: the time between counts as not observed, and no interval has a wrong
state.

A report without changes wakes no thread, because two threads would compete for the interpreter lock. The
thread wakes by itself shortly after each heartbeat, and stores until when the devices were observed.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from agent.errors import DrahealthError
from agent.health.verdict import VerdictChangeLog
from agent.model.claim import DeviceRef
from agent.model.history import GONE, ObservedPeriod, StoredVerdicts, VerdictChange
from agent.model.report import Report
from agent.model.settings import UsageHistoryLimits
from agent.model.time import NS, Instant
from agent.store.history_file import HistoryFile, period_file_path, write_period_file
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError
from agent.system.timing import WallClockStepDetector, read_boot_clock

WRITE_S: Final = 300.0
"""Interval of writes to the history file without a change [s]. The observed-period file has the time of the
last report."""
PAUSE_S: Final = 0.5
"""Shortest time between two writes to the history file [s].

A device whose verdict changes all the time costs two writes a second.
"""
RETRY_S: Final = 10.0
"""Time between two attempts to write the history file after a failed write [s]."""
MARK_DELAY: Final = 0.05
"""Time from the latest moment of a heartbeat to the write of the observed-period file [heartbeats]."""
SILENT_HEARTBEATS: Final = 3
"""Number of heartbeats without a report after which the time since the last one counts as not observed."""

log = get_logger(__name__)


class _Job(NamedTuple):
    """Content of one write to the history file: observed periods and changed health of devices."""

    periods: tuple[ObservedPeriod, ...]
    changes: tuple[VerdictChange, ...]
    now: Instant
    by_age: bool


class VerdictRecorder:
    """Recorder of changes in devices' health, with a queue of those that are not written yet. Thread-safe."""

    def __init__(
        self,
        file: HistoryFile,
        *,
        limits: UsageHistoryLimits,
        boot_id: str,
        heartbeat_s: float,
        boot_clock: Callable[[], float] = read_boot_clock,
    ) -> None:
        """Create the recorder; the first report starts its thread.

        Args:
            file: History file; created by the first write.
            limits: Limits of the history file.
            boot_id: The kernel's id of the current boot; empty: unknown.
            heartbeat_s: Longest time between two reports of a running agent [s].
            boot_clock: Returns the time since boot, with the time in which the machine slept [s].
        """
        self._file = file
        self._limits = limits
        self._boot_clock = boot_clock
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        # --- guarded by the condition ---
        self._log = VerdictChangeLog(
            os.urandom(6).hex(), boot_id, SILENT_HEARTBEATS * heartbeat_s, rows=limits.rows
        )
        self._wall_clock = WallClockStepDetector()
        self._has_news = False
        self._reported_s = 0.0
        """Monotonic time at which the last report came [s]."""
        self._is_overdue = False
        """True: no report came until the mark was due, so the next report wakes the thread."""
        # --- used by the thread only ---
        self._stored: dict[DeviceRef, VerdictChange] | None = None
        """Newest change of each present device in the history file; None: the file has not been read yet."""
        self._written_ns = self._retry_ns = -(10**18)
        self.error = ""
        """Error of the last write; empty: it succeeded, or there was none."""
        self._logged_period_file_error = False

    # --- called by the core ----------------------------------------------------------------------------

    def handle_report(self, report: Report) -> None:
        """Queue the changes in devices' health since the last report, which wake the writer. Never blocks."""
        if report.starting:
            return
        with self._changed:
            if self._closing:
                return
            self._log.handle_report(report, self._boot_clock())
            self._wall_clock.observe(report.at)
            self._has_news, self._reported_s = True, time.monotonic()
            if self._has_work():
                self._changed.notify()
            if self._thread is None:
                self._start_thread()

    def reconfigure(self, heartbeat_s: float) -> None:
        """Set the longest time between two reports of the running agent, `heartbeat_s` [s]. Never blocks."""
        with self._changed:
            self._heartbeat_s = heartbeat_s
            self._is_overdue = True  # the thread waits for a heartbeat of the former length
            self._log.set_silence_limit(SILENT_HEARTBEATS * heartbeat_s)

    def close(self, timeout_s: float) -> bool:
        """Write the queued changes of devices' health and end the thread.

        Returns False if the disk takes longer than `timeout_s` seconds.
        """
        with self._changed:
            self._log.end_period(self._boot_clock())
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _start_thread(self) -> None:
        thread = DaemonThread(self._run, "dh-history")
        try:
            thread.start()
        except ThreadStartError as error:  # the next report tries again
            self._log_error(f"thread not started: {error}")
            return
        self._thread = thread

    # --- recorder thread only --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._has_work(), self._mark_due_in_s())
                has_news, self._has_news = self._has_news, False
                self._is_overdue = not has_news
                is_last = self._closing
                job = self._next_job()
            if not (has_news or is_last):
                continue
            try:
                self._handle(job, is_last=is_last)
            except Exception:  # a bug here must not stop the next write
                log.exception("history: changes of verdicts not written: internal error; will retry")
                self.error = f"history file {self._file.path}: internal error"
                self._retry_ns = job.now.mono_ns + round(RETRY_S * NS)
            if is_last:
                return

    def _has_work(self) -> bool:
        """Return whether there was a report since the last write, and changes or a late mark wait for it."""
        return self._has_news and bool(self._is_overdue or self._log.pending or len(self._log.periods) > 1)

    def _mark_due_in_s(self) -> float:
        """Return the time until the observed-period file is written next, after the next heartbeat [s]."""
        age_s = (time.monotonic() - self._reported_s) % self._heartbeat_s
        return (1 + MARK_DELAY) * self._heartbeat_s - age_s

    def _next_job(self) -> _Job:
        return _Job(
            tuple(self._log.periods.values()),
            tuple(self._log.pending),
            self._log.now,
            self._wall_clock.is_trusted(self._log.now),
        )

    def _handle(self, job: _Job, *, is_last: bool) -> None:
        """Write the queued changes to the history file.

        If nothing waits, only the end of the observed period is written, to the observed-period file: while a
        change waits, that end would count the time after the change to the state before it.

        Args:
            is_last: True: the recorder closes, so write even if no write is due.
        """
        now_ns = job.now.mono_ns
        is_due = bool(job.changes) or len(job.periods) > 1 or now_ns - self._written_ns >= WRITE_S * NS
        if is_last or (is_due and now_ns >= self._retry_ns):
            self._write(job.now)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, PAUSE_S)
        elif self._stored is not None and len(job.periods) == 1 and not job.changes:
            self._write_mark(job.periods[0])

    def _write(self, now: Instant) -> None:
        try:
            stored = self._file.verdicts_if_replaced()
            with self._changed:
                if stored is not None:
                    self._merge_stored(stored)
                job = self._next_job()
            self._file.write_verdicts(job.periods, job.changes, job.now.wall_s, delete_by_age=job.by_age)
        except DrahealthError as error:
            self._log_error(str(error))
            self._retry_ns = now.mono_ns + round(RETRY_S * NS)
            return
        self._written_ns, self.error = now.mono_ns, ""
        with self._changed:
            dropped = self._forget_written(job)
        if dropped:
            log.warning(
                "history %s: %d changes of verdicts were lost while the file could not be written: limit of "
                "%d; the time from the first of them until now counts as not observed",
                self._file.path,
                dropped,
                max(self._limits.rows, len(self._log.seen)),
            )

    def _merge_stored(self, stored: StoredVerdicts) -> None:
        """Continue the health history of the agent's earlier runs, after the first read of the history file.

        A later call means that the file was removed or damaged: queue each device's newest change again.
        """
        if self._stored is not None:  # the file was removed, or a damaged one was renamed
            changes = {(row.period, row.number): row for row in (*self._stored.values(), *self._log.pending)}
            self._log.pending = list(changes.values())
            return
        self._stored = {change.device: change for change in stored.changes}
        if stored.periods:  # with its end from the mark
            newest = stored.periods[-1]
            self._log.periods = {newest.id: newest, **self._log.periods}
        self._log.pending = list(self._log.changes_after(self._stored))
        self._stored = {ref: old for ref, old in self._stored.items() if old.verdict != GONE}

    def _forget_written(self, job: _Job) -> int:
        """Remove the written changes from the queue.

        Returns how many changes were dropped before the write for lack of room.
        """
        assert self._stored is not None
        for change in job.changes:
            if change.verdict == GONE:
                self._stored.pop(change.device, None)
            else:
                self._stored[change.device] = change
        del self._log.pending[: len(job.changes)]
        self._log.periods = {
            period.id: period
            for period in self._log.periods.values()
            if period is self._log.period or period not in job.periods  # or changed during the write
        }
        dropped, self._log.dropped = self._log.dropped, 0
        if dropped:
            self._log.period = None  # the next report begins another one
        return dropped

    def _log_error(self, error: str) -> None:
        if error != self.error:
            log.warning(
                "history: changes of verdicts not written: %s; they are kept in memory and written later; "
                "check --state-dir",
                error,
            )
        self.error = error

    def _write_mark(self, period: ObservedPeriod) -> None:
        try:
            write_period_file(period_file_path(self._file.path), period)
        except OSError as error:
            if not self._logged_period_file_error:
                log.warning(
                    "observed-period file %s: not written: %s; if the agent is killed, up to %g s count as "
                    "not observed",
                    period_file_path(self._file.path),
                    error.strerror,
                    WRITE_S,
                )
            self._logged_period_file_error = True
        else:
            self._logged_period_file_error = False
