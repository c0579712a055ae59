"""Background writer of the prepare ledger, a file with the results of prepares.

Because of the writer, a slow disk does not block prepares.

A failed prepare is written at once, and its caller waits at most a limited time for the disk; other changes
are written within a second. A write error is logged once, and the write is retried.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from agent.prepare import prepare_ledger as ledgers
from agent.prepare.prepare_ledger import PrepareLedger, next_expiry_wall_s
from agent.store import driver_files
from agent.store.state_files import StateWriteError
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread, ThreadStartError

MAX_DISK_WAIT_S: Final = 1.5
"""Longest time that a caller waits for a read or write of the ledger file [s]."""
DEBOUNCE_S: Final = 0.5
"""Delay of changes of the ledger that are not urgent, so that several are written together [s]."""
RETRY_S: Final = 60.0
"""Delay after a failed write of the ledger, unless the ledger changes meanwhile [s]."""
MAX_CLOCK_SLEEP_S: Final = 10.0
"""Longest sleep before the wall clock is read again, because the clock may be set meanwhile [s]."""

log = get_logger(__name__)

T = TypeVar("T")


class LedgerWriter:
    """Background writer of the prepare ledger. Thread-safe.

    The writer thread exists only while there are unsaved changes or driver-reported faults that will expire.
    """

    def __init__(
        self,
        driver: str,
        directory: Path | None,
        version: str,
        clock: Callable[[], float],
        on_faults_changed: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a writer with an empty ledger.

        Args:
            driver: Name of the driver.
            directory: Directory of the ledger file, created at the first write. None: no ledger is saved.
            version: Version of the driver.
            clock: Returns the seconds since 1970.
            on_faults_changed: Called in any thread when driver-reported faults may have changed.
            monotonic: Returns a monotonic time [s], by which records of this run age.
        """
        self._driver = driver
        self._directory = directory
        self._version = version
        self._clock = clock
        self._on_faults_changed = on_faults_changed
        self._monotonic = monotonic
        self._changed = threading.Condition()  # guards all below; never held during a write
        self._ledger = PrepareLedger()
        self._revision = 0  # number of the ledger's changes; the two below are earlier revisions
        self._tried = 0  # revision of the last write, successful or not
        self._saved = 0  # revision on disk
        self._due = 0.0  # monotonic time of the next write
        self._thread: threading.Thread | None = None
        self._disk_hangs = False
        self._closed = False
        self._errno: int | None = None
        _writers.add(self)

    @property
    def ledger(self) -> PrepareLedger:
        """Newest prepare ledger, including changes that are not on disk yet."""
        return self._ledger

    def restore(self) -> None:
        """Load the saved ledger. Blocks up to 1.5 s.

        If the disk is slower, the ledger is merged as soon as it is read.
        """
        directory = self._directory
        if directory is None:
            log.info(
                "driver %s: no directory for the prepare ledger; prepare results are lost on restart",
                self._driver,
            )
            return
        done = threading.Event()
        late = threading.Event()

        def read() -> None:
            saved, problem = driver_files.load_ledger(directory, self._driver)
            if problem:
                log.warning("%s", problem)
            with self._changed:
                self._ledger = ledgers.merge_ledgers(self._ledger, saved, self._clock())
                self._ensure_thread()  # restored faults expire, too
            done.set()
            if late.is_set():
                self._on_faults_changed()

        DaemonThread(read, "dh-ledger").start()
        if not done.wait(MAX_DISK_WAIT_S):
            late.set()
            log.warning(
                "prepare ledger in %s: not read within %g s; starting without saved prepare results",
                directory,
                MAX_DISK_WAIT_S,
            )

    def update(
        self, change: Callable[[PrepareLedger, float], tuple[PrepareLedger, T]], *, urgent: bool = False
    ) -> T:
        """Replace the ledger by the result of ``change``, and schedule a write.

        Args:
            change: Gets the ledger and the wall-clock time [s]; returns the new ledger and the
                result that this method returns.
            urgent: Write now and block until the ledger is on disk, up to 1.5 s.
        """
        with self._changed:
            is_clean = self._saved == self._revision
            now_wall_s, now_mono_s = self._clock(), self._monotonic()
            before = ledgers.expire_entries(self._ledger, now_wall_s, now_mono_s)
            changed, result = change(before, now_wall_s)
            self._ledger = ledgers.with_monotonic_times(before, changed, now_mono_s)
            self._revision += 1
            revision = self._revision
            due = time.monotonic() + (0 if urgent else DEBOUNCE_S)
            self._due = due if is_clean else min(self._due, due)
            if self._ensure_thread() and urgent and self._directory and not self._disk_hangs:
                self._disk_hangs = not self._changed.wait_for(
                    lambda: self._tried >= revision, MAX_DISK_WAIT_S
                )
                if self._disk_hangs:
                    log.warning(
                        "prepare ledger in %s: not written within %g s; prepares no longer wait for the disk",
                        self._directory,
                        MAX_DISK_WAIT_S,
                    )
        return result

    def close(self, timeout_s: float) -> bool:
        """Write unsaved changes of the ledger. Returns False if that took longer than ``timeout_s``."""
        with self._changed:
            self._closed = True
            if self._directory is None:
                self._changed.notify_all()
                return True
            self._tried = self._saved  # one more try, also after a failed write
            revision = self._revision  # later changes are written, too, but not awaited
            self._ensure_thread()
            return self._changed.wait_for(lambda: self._tried >= revision, timeout_s)

    # --- writer thread -------------------------------------------------------------------------------------

    def _ensure_thread(self) -> bool:
        """Start the writer thread if it has work; returns True if it runs. The caller holds the lock."""
        self._changed.notify_all()
        # a thread from before a fork is not alive in the child
        if (self._thread is None or not self._thread.is_alive()) and self._wait_s() is not None:
            self._thread = DaemonThread(self._run, "dh-ledger")
            try:
                self._thread.start()
            except ThreadStartError as error:
                self._thread = None
                log.warning(
                    "driver %s: prepare results not saved: writer thread not started: %s; retried with the "
                    "next result",
                    self._driver,
                    error,
                )
        return self._thread is not None

    def _wait_s(self) -> float | None:
        """Return the time until the writer thread has work [s]; None: no work. The caller holds the lock."""
        write_s = self._write_s()
        now = self._clock()
        due = None if self._closed else next_expiry_wall_s(self._ledger.driver_faults, now, self._monotonic())
        expiry_s = None if due is None else min(max(0.0, due - now), MAX_CLOCK_SLEEP_S)
        return min((wait_s for wait_s in (write_s, expiry_s) if wait_s is not None), default=None)

    def _write_s(self) -> float | None:
        if self._directory is None or self._saved == self._revision:
            return None
        if self._closed:
            return 0.0 if self._tried < self._revision else None  # one last try
        return max(0.0, self._due - time.monotonic())

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._expire_faults()
                self._write()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _wait_for_work(self) -> bool:
        with self._changed:
            while wait_s := self._wait_s():
                self._changed.wait(wait_s)
            if wait_s is None:
                self._thread = None  # under this lock, so that the next change starts another thread
            return wait_s is not None

    def _expire_faults(self) -> None:
        with self._changed:
            before = self._ledger
            self._ledger = ledgers.expire_entries(before, self._clock(), self._monotonic())
            has_changed = self._ledger is not before
            if has_changed:
                self._due = time.monotonic()
                self._revision += 1
        if has_changed:
            self._on_faults_changed()

    def _write(self) -> None:
        with self._changed:
            ledger, revision = self._ledger, self._revision
            if self._directory is None or self._write_s() != 0.0:
                return
        try:
            saved, problem = driver_files.save_ledger(
                self._directory, self._driver, self._version, ledger, self._clock()
            )
        except StateWriteError as error:
            self._write_failed(error, revision)
            return
        if problem:
            log.warning("%s", problem)
        with self._changed:
            self._ledger = ledgers.merge_ledgers(self._ledger, saved, self._clock())
            self._tried = self._saved = revision
            self._disk_hangs, self._errno = False, None
            self._changed.notify_all()
        self._on_faults_changed()

    def _write_failed(self, error: StateWriteError, revision: int) -> None:
        with self._changed:
            self._tried, self._due = revision, time.monotonic() + RETRY_S
            self._disk_hangs = False
            is_logged, self._errno = error.errno == self._errno, error.errno
            self._changed.notify_all()
        if not is_logged:
            log.warning("%s; prepare results are kept in memory only and are lost on restart", error)


# --- fork ---------------------------------------------------------------------------------------------------

_writers: Final = weakref.WeakSet[LedgerWriter]()


def _after_fork_in_child() -> None:
    """Replace the locks of all writers: a lock that another thread held at the fork stays locked for ever."""
    for writer in list(_writers):
        writer._changed = threading.Condition()


os.register_at_fork(after_in_child=_after_fork_in_child)
