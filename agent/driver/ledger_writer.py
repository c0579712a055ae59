"""The newest book of a driver's prepares, on its way to the disk, without letting the disk delay a prepare.

A failure is written at once, and whoever tells of it waits for that, but not for long; the rest is written
within a second. A disk that is full or gone is told of once, and asked again.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from agent.prepare import ledger as books
from agent.prepare.driver_faults import due_wall_s
from agent.prepare.ledger import PrepareLedger
from agent.store import prepares
from agent.store.files import WriteError

WRITE_S: Final = 1.5
"""How long anybody waits for the disk [s]."""
DEBOUNCE_S: Final = 0.5
"""What can wait is written after this time, together with what else comes [s]."""
RETRY_S: Final = 60.0
"""A disk that does not take it is asked again after this time, or when there is more to write [s]."""
LOOK_S: Final = 10.0
"""The wall clock may be set at any time, so nobody sleeps longer than this for one of its times [s]."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class LedgerWriter:
    """Keeps a book. From any thread.

    A thread of its own is there only while something is to be written, or a told fault waits for its end.
    """

    def __init__(
        self,
        driver: str,
        directory: Path | None,
        version: str,
        clock: Callable[[], float],
        news: Callable[[], None],
    ) -> None:
        """
        Args:
            driver: Whose book it is.
            directory: Of its file; made when there is something to be kept. None: nothing is kept.
            version: Of the driver.
            clock: Seconds since 1970.
            news: Called, in whatever thread, when told faults may be others than before.
        """
        self._driver = driver
        self._directory = directory
        self._version = version
        self._clock = clock
        self._news = news
        self._changed = threading.Condition()  # guards the rest; nobody is waited for while it is held
        self._book = PrepareLedger()
        self._revision = 0  # of the book...
        self._tried = 0  # ...the one that was or could not be written...
        self._saved = 0  # ...and the one that was
        self._due = 0.0  # when to write it, by our own watch
        self._thread: threading.Thread | None = None
        self._stuck = False
        self._closed = False
        self._errno: int | None = None

    @property
    def book(self) -> PrepareLedger:
        """The newest."""
        return self._book

    def restore(self) -> None:
        """Reads what was remembered. Nobody waits for a disk for ever: what comes late is news."""
        directory = self._directory
        if directory is None:
            log.info("%s: how prepares end is forgotten when the driver ends", self._driver)
            return
        done = threading.Event()
        late = threading.Event()

        def read() -> None:
            book, problem = prepares.load(directory, self._driver)
            if problem:
                log.warning("%s", problem)
            with self._changed:
                self._book = books.merge(self._book, book, self._clock())
                self._start()  # a fault that was told in an earlier life has its end, too
            done.set()
            if late.is_set():
                self._news()

        threading.Thread(target=read, name="dh-desk", daemon=True).start()
        if not done.wait(WRITE_S):
            late.set()
            log.warning("%s: not read within %g s; goes on without what was remembered", directory, WRITE_S)

    def change(
        self, note: Callable[[PrepareLedger, float], tuple[PrepareLedger, T]], *, urgent: bool = False
    ) -> T:
        """Writes something into the book.

        Args:
            note: Given the book and the time, says what it is from now on, and what to return.
            urgent: Return when it is on the disk, or when that takes too long.
        """
        with self._changed:
            is_clean = self._saved == self._revision
            self._book, result = note(self._book, self._clock())
            self._revision += 1
            revision = self._revision
            due = time.monotonic() + (0 if urgent else DEBOUNCE_S)
            self._due = due if is_clean else min(self._due, due)
            if self._start() and urgent and self._directory and not self._stuck:
                self._stuck = not self._changed.wait_for(lambda: self._tried >= revision, WRITE_S)
                if self._stuck:
                    log.warning("%s: not written within %g s; nobody waits for it", self._directory, WRITE_S)
        return result

    def close(self, timeout_s: float) -> bool:
        """Writes what is not yet written. False if it is not kept in the end."""
        with self._changed:
            self._closed = True
            if self._directory is None:
                self._changed.notify_all()
                return True
            revision = self._revision  # what comes later has a try of its own, and is not waited for
            self._start()
            self._changed.wait_for(lambda: self._tried >= revision, timeout_s)
            return self._saved >= revision

    # --- the thread ----------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Sees to it that somebody writes; under the lock."""
        self._changed.notify_all()
        if self._thread is None and self._wait_s() is not None:
            self._thread = threading.Thread(target=self._run, name="dh-desk", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the machine has no thread left
                self._thread = None
                log.warning("%s: %s", self._directory or self._driver, error)
        return self._thread is not None

    def _wait_s(self) -> float | None:
        """For how long there is nothing to do; None: for ever. Under the lock."""
        write_s = self._write_s()
        due = None if self._closed else due_wall_s(self._book.told)
        age_s = None if due is None else min(max(0.0, due - self._clock()), LOOK_S)
        return min((one for one in (write_s, age_s) if one is not None), default=None)

    def _write_s(self) -> float | None:
        if self._directory is None or self._saved == self._revision:
            return None
        if self._closed:
            return 0.0 if self._tried < self._revision else None  # one try, the last
        return max(0.0, self._due - time.monotonic())

    def _run(self) -> None:
        try:
            while self._has_work():
                self._age()
                self._write()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _has_work(self) -> bool:
        with self._changed:
            while wait_s := self._wait_s():
                self._changed.wait(wait_s)
            if wait_s is None:
                self._thread = None  # at once: whoever has more to write starts another
            return wait_s is not None

    def _age(self) -> None:
        """Excuses those whose time is over."""
        with self._changed:
            before, self._book = self._book, books.age(self._book, self._clock())
            if is_news := self._book is not before:
                self._due = time.monotonic()
                self._revision += 1
        if is_news:
            self._news()

    def _write(self) -> None:
        with self._changed:
            book, revision = self._book, self._revision
            if self._directory is None or self._write_s() != 0.0:
                return
        try:
            kept, problem = prepares.save(self._directory, self._driver, self._version, book, self._clock())
        except WriteError as error:
            self._missed(error, revision)
            return
        if problem:
            log.warning("%s", problem)
        with self._changed:
            self._book = books.merge(self._book, kept, self._clock())
            self._tried = self._saved = revision
            self._stuck, self._errno = False, None
            self._changed.notify_all()
        self._news()

    def _missed(self, error: WriteError, revision: int) -> None:
        with self._changed:
            self._tried, self._due = revision, time.monotonic() + RETRY_S
            self._stuck = False
            is_told, self._errno = error.errno == self._errno, error.errno
            self._changed.notify_all()
        if not is_told:
            log.warning("%s; how prepares end is forgotten when the driver ends", error)
