"""Background recorder of the snapshots that the health engine evaluates.

The core thread queues the inputs of each evaluation, which are immutable; the thread ``dh-record`` compares,
packs and writes them. A disk that is slow or full delays no verdict: when too many evaluations wait, all of
them are dropped, and the next segment has the engine's state after the gap.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from agent.engine.step import EngineState, StepOutcome
from agent.health.gpu.state import GpuVerdictCache
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.record.events import RecordedStep, SegmentHead, Verdicts, recorded_verdicts
from agent.record.segment_file import (
    SegmentWriter,
    cut_torn_tail,
    import_zstandard,
    segment_number,
    segment_path,
    segment_paths,
)
from agent.system.files import CheckedDirectory, make_directory, open_error_reason
from agent.system.output import LogRateLimiter, get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError
from agent.system.timing import WallClockStepDetector

QUEUE_MAX: Final = 1000
"""Largest number of evaluations that wait in memory for the disk."""
DELAY_S: Final = 0.05
"""Delay of a write after an evaluation [s]: other threads get the interpreter first."""
RETRY_S: Final = 10.0
"""Pause after a failed write before the next attempt [s]."""
SEGMENT_AGE_S: Final = 6 * 3600.0
"""Age at which a segment is ended and the next one begins [s]; a replay can begin at each segment."""
SEGMENTS: Final = 8
"""Number of full segments that RecordLimits.size has room for: to delete one loses at most an eighth."""

log = get_logger(__name__)


class RecordLimits(NamedTuple):
    """Limits of a record: the size of all its files (segments) together, and their age."""

    size: int
    """Largest size of all segments of a record together [bytes]."""
    age_s: int
    """Age at which a segment is deleted [s]."""


class _Queued(NamedTuple):
    """Evaluation that waits to be written: prior state, snapshot, report, and whether it was published."""

    state: EngineState
    snapshot: Snapshot
    report: Report
    use: StepOutcome


class SnapshotRecorder:
    """Recorder of evaluated snapshots, with a queue of evaluations that are not written yet. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        limits: RecordLimits,
        head: SegmentHead,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        previous: "SnapshotRecorder | None" = None,
    ) -> None:
        """Create the recorder; the first evaluation starts its thread.

        Args:
            directory: Directory of the segments; created by the first write.
            limits: Limits of all segments (files of the record) in the directory.
            head: Head (agent, node and settings) with which each segment begins.
            clock: Returns the time on a clock that never goes back [s].
            wall_clock: Returns the wall-clock time from which the age of files is computed [s since 1970].
            previous: Closed recorder that may still write its queue; the new thread waits for its end.

        Raises:
            ConfigError: The package zstandard is not installed.
        """
        import_zstandard()
        self._directory = directory
        self._limits = limits
        self._head = head
        self._clock = clock
        self._wall_clock = wall_clock
        while previous is not None and previous._thread is None:  # wrote nothing, its own may still write
            previous = previous._previous
        self._previous: SnapshotRecorder | None = previous
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # --- guarded by the condition ---
        self._queue: list[_Queued] = []
        self._dropped = 0
        self._closing = False
        # --- used by the thread only ---
        self._writer: SegmentWriter | None = None
        self._begun_s = 0.0
        self._settings: object = None
        self._verdicts: Verdicts = ()
        self._needs_verdicts = False
        self.lost = 0
        """Number of evaluations that were not recorded. The core counts them after the thread's end."""
        self._lost = 0
        self._lost_before = 0
        """Number of evaluations lost before the current segment, as its head states."""
        self._retry_s = 0.0
        self.error = ""
        """Error of the last write; empty: it succeeded, or there was none."""
        self._clock_steps = WallClockStepDetector()
        self._others: dict[Path, int] = {}
        """Size of each segment except the current one [bytes], the oldest first."""
        self._complaints = LogRateLimiter()

    # --- called by the core ----------------------------------------------------------------------------

    def record(self, state: EngineState, snapshot: Snapshot, report: Report, use: StepOutcome) -> None:
        """Queue an evaluation: the engine's state before it, its snapshot and its report. Never blocks."""
        with self._changed:
            if self._closing:
                self.lost += 1
                return
            if len(self._queue) >= QUEUE_MAX:
                self._dropped += len(self._queue)
                self._queue.clear()
            self._queue.append(_Queued(state, snapshot, report, use))
            self._changed.notify()
            if self._thread is None:
                thread = DaemonThread(self._run, "dh-record")
                try:
                    thread.start()
                except ThreadStartError as error:  # the next step tries again
                    if self._complaints.tick():
                        log.warning(
                            "record: writer thread not started: %s; snapshots wait in memory for the next "
                            "attempt",
                            error,
                        )
                    return
                self._thread = thread

    def close(self, timeout_s: float) -> bool:
        """Write the queued evaluations and end the thread.

        Returns False if the disk takes longer than `timeout_s` seconds.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._previous is not None:
            assert self._previous._thread is not None
            self._previous._thread.join()  # a segment with two writers would be damaged
        self._previous = None
        self._repair_last_segment()
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._closing:
                    self._changed.wait(DELAY_S)
                queue, self._queue = self._queue, []
                dropped, self._dropped = self._dropped, 0
                is_end = self._closing
            if dropped:
                self._lose(dropped)
                self._end_segment()
            if queue:
                try:
                    self._write(queue, is_end=is_end)
                except Exception:  # a defect must not keep every later step in memory
                    log.exception(
                        "record: snapshots not written: internal error; recording ends, restart the agent"
                    )
                    self.error = f"{self._directory}: internal error; restart the agent"
                    with self._changed:
                        self._closing = is_end = True
                        self._lose(len(queue) + len(self._queue))
                        self._queue.clear()
            if is_end:
                self._end_segment()
                return

    def _repair_last_segment(self) -> None:
        """Cut an incomplete frame, which a killed agent left, from the end of the last segment's file."""
        try:
            with CheckedDirectory(self._directory) as directory:
                paths = segment_paths(self._directory)
                problem = cut_torn_tail(directory, paths[-1]) if paths else None
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning(
                "record %s: last segment not checked for an incomplete frame: %s; a replay may end there",
                self._directory,
                open_error_reason(error),
            )
            return
        if problem:
            log.warning(
                "record: last segment cut off at a damaged frame: %s; the snapshots after it are lost",
                problem,
            )

    def _write(self, queue: list[_Queued], *, is_end: bool) -> None:
        """Write queued evaluations; begin a new segment (file) if settings change or the old one is full.

        Args:
            is_end: True: the recorder closes, so write even during the pause after a failed write.
        """
        if self._writer is None and self._clock() < self._retry_s and not is_end:
            self._lose(len(queue))
            return
        written = 0
        try:
            if self._writer is not None and not self._writer.is_in_place():
                log.warning(
                    "record: segment %s was removed by another process; its snapshots are lost, and a new "
                    "segment begins",
                    self._writer.path,
                )
                self._end_segment()
            for part in _by_settings(queue):
                writer = self._writer
                if writer is not None and (
                    part[0].state.settings is not self._settings
                    or (self._is_segment_full(writer) and _can_begin(part[0]))
                ):
                    self._end_segment()
                if self._writer is None:
                    first = next((at for at, queued in enumerate(part) if _can_begin(queued)), len(part))
                    self._lose(first)
                    written, part = written + first, part[first:]
                    if not part:
                        continue
                    self._begin_segment(part[0])
                assert self._writer is not None
                steps = [self._step(queued) for queued in part]
                while steps:
                    appended = self._writer.append(steps)
                    written, steps = written + appended, steps[appended:]
            self._delete_old()
            if self._writer is not None:  # otherwise nothing was written
                self.error = ""
        except OSError as error:
            self.error = f"{self._directory}: {error.strerror}"
            self._lose(len(queue) - written)
            self._retry_s = self._clock() + RETRY_S
            self._end_segment()
            if self._complaints.tick():
                log.warning(
                    "record %s: snapshots not written: %s; lost snapshots: %d, next attempt in %g s",
                    self._directory,
                    error.strerror,
                    self._lost,
                    RETRY_S,
                )

    def _lose(self, evaluations: int) -> None:
        self._lost += evaluations
        self.lost += evaluations

    def _is_segment_full(self, writer: SegmentWriter) -> bool:
        age_s = self._clock() - self._begun_s
        return writer.size >= self._limits.size // SEGMENTS or age_s >= SEGMENT_AGE_S

    def _step(self, queued: _Queued) -> RecordedStep:
        report = queued.report
        # verdicts of a silent report are those of the published one, which may be among the lost ones
        is_silent = queued.use is StepOutcome.SILENT and not report.starting
        if queued.use is StepOutcome.PUBLISHED or (self._needs_verdicts and is_silent):
            self._verdicts = recorded_verdicts(report)
            self._needs_verdicts = False
        return RecordedStep(queued.snapshot, report.at, queued.use, self._verdicts, report.is_full)

    def _begin_segment(self, first: _Queued) -> None:
        make_directory(self._directory)
        with CheckedDirectory(self._directory) as directory:
            paths = segment_paths(self._directory)
            self._others = {path: directory.stat(path.name).st_size for path in paths}
        number = max((segment_number(path) or 0 for path in self._others), default=0) + 1
        self._delete_old()
        path = segment_path(self._directory, number)
        self._writer = SegmentWriter(path, self._head._replace(lost=self._lost), first.state)
        self._needs_verdicts = True
        self._begun_s, self._settings = self._clock(), first.state.settings
        self._lost_before, self._lost = self._lost, 0

    def _end_segment(self) -> None:
        """End the current segment; remove its file if it has no evaluation, because the disk was full."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if writer.is_empty:
            self._lost += self._lost_before
            writer.remove()
        else:
            writer.close()
            self._others[writer.path] = writer.size

    def _delete_old(self) -> None:
        """Delete the oldest files of the record beyond the limits of size and age; keep the current one.

        Age counts only while the wall clock is trusted: at boot it can be ahead until NTP sets it.
        """
        current = self._writer.size if self._writer else 0
        now = Instant(round(self._clock() * NS), self._wall_clock())
        self._clock_steps.observe(now)
        oldest_s = now.wall_s - self._limits.age_s if self._clock_steps.is_trusted(now) else 0.0
        while self._others:
            path = next(iter(self._others))
            if sum(self._others.values()) + current <= self._limits.size and not _is_older(path, oldest_s):
                return
            with CheckedDirectory(self._directory) as directory:
                directory.unlink(path.name)
            del self._others[path]


def _can_begin(queued: _Queued) -> bool:
    """Return whether a record file can begin with an evaluation.

    It can if the evaluation used no cached results of GPUs: records have no cached results, and only those of
    GPUs change a report.
    """
    return queued.report.is_full or queued.state.gpu_cache == GpuVerdictCache()


def _is_older(path: Path, wall_s: float) -> bool:
    try:
        return os.stat(path).st_mtime < wall_s
    except FileNotFoundError:
        return True


def _by_settings(queue: list[_Queued]) -> list[list[_Queued]]:
    """Divide queued evaluations into parts with equal settings.

    A segment (file of a record) has one set of settings.
    """
    parts: list[list[_Queued]] = []
    for queued in queue:
        if parts and parts[-1][-1].state.settings is queued.state.settings:
            parts[-1].append(queued)
        else:
            parts.append([queued])
    return parts
