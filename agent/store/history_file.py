"""History file (SQLite, bounded size): which pod used which device, and how the verdicts on devices changed.

The file is opened for each write and closed again, so an operator can move it away. The journal mode is
``DELETE``: readers of a write-ahead log need write access. ``EXTRA`` makes each transaction durable.
The model of device uses is imported late: an agent without a kubelet does not need it.

A second file next to the history file has the end of the period in which the agent observes the devices.

It has one line, which is overwritten with each report, without a sync: much less work for the disk than a
transaction of the history file. After a kill of the agent the file shows the time of the last report.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from agent.errors import DrahealthError, ResourceBusyError
from agent.model.history import ObservedPeriod, StoredVerdicts, VerdictChange
from agent.model.settings import TRACKED_USAGES_MAX, UsageHistoryLimits
from agent.store.history_sqlite import (
    NEWER_VERSION,
    add_checksums,
    check_opened,
    check_version,
    create_empty_file,
    create_verdict_tables,
    delete_oldest_verdicts,
    delete_verdicts_by_age,
    delete_verdicts_by_count,
    describe_sqlite_error,
    insert_new_periods,
    insert_verdicts,
    last_write_s,
    open_connection,
    pragma_number,
    select_verdicts,
)
from agent.store.state_files import UnusableFile, rename_unusable_file
from agent.system.files import CheckedDirectory, make_directory

if TYPE_CHECKING:
    from agent.model.device_usage import PodDeviceUsage, StoredUsages

SUFFIX: Final = ".observed"
SIZE: Final = 128
"""Size of the observed-period file's only line, padded with spaces [bytes]."""


def period_file_path(history: Path) -> Path:
    """Return the path of the observed-period file next to a history file."""
    return history.with_name(history.name + SUFFIX)


def write_period_file(path: Path, period: ObservedPeriod) -> None:
    """Overwrite the observed-period file with the end of a period in which the agent observed devices.

    Blocks on the disk. Raises OSError.
    """
    content = f"{period.id} {period.lasted_s!r} {period.ended_s!r}"
    line = f"{content} {zlib.crc32(content.encode()):08x}".ljust(SIZE - 1) + "\n"
    with CheckedDirectory(path.parent) as directory:
        fd = directory.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
    try:
        os.pwrite(fd, line.encode(), 0)
    finally:
        os.close(fd)


def read_period_file(path: Path) -> tuple[str, float, float] | None:
    """Read the observed-period file; None: there is no valid file.

    Returns the period's id, its duration [s] and its end [s since 1970].
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content, _, checksum = os.read(fd, SIZE).decode().strip().rpartition(" ")
        if int(checksum, 16) != zlib.crc32(content.encode()):
            return None
        id_, lasted, ended = content.split()
        return id_, float(lasted), float(ended)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def extend_newest_period(stored: StoredVerdicts, mark: tuple[str, float, float] | None) -> StoredVerdicts:
    """Return the verdict history with the end of its newest period from the observed-period file, if that end
    is later.

    Args:
        mark: Content of the file: id, duration and end of a period; None: no valid file.
    """
    if not stored.periods or mark is None:
        return stored
    *before, newest = stored.periods
    id_, lasted_s, ended_s = mark
    if newest.id != id_ or not newest.lasted_s < lasted_s:
        return stored
    return stored._replace(periods=(*before, newest._replace(lasted_s=lasted_s, ended_s=ended_s)))


# --- the history file --------------------------------------------------------------------------------------

T = TypeVar("T")

WRITE_WAIT_S: Final = 5.0
"""Time that a write waits for the lock of a reader [s]."""
READ_WAIT_S: Final = 2.0
"""Time that a read waits for the lock of the writer [s]."""
FULL_SHARE: Final = 0.9
"""Share of the history file's size limit from which on the oldest records are deleted.

SQLite refuses a write at the limit itself.
"""
USES_PER_TRANSACTION: Final = 500
"""Largest number of device uses that one transaction writes."""
CHANGES_PER_TRANSACTION: Final = 100
"""Largest number of changed verdicts that one transaction writes: with the longest causes, 3 MiB."""


class HistoryError(DrahealthError):
    """The history file could not be read or written; it is unchanged, or it was renamed."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"history file {path}: {reason}")


class HistoryContent(NamedTuple):
    """Uses of devices by pods, as the history file has them."""

    running: tuple[PodDeviceUsage, ...]
    """Uses that had not ended at the last write, newest first."""
    ended: tuple[PodDeviceUsage, ...]
    """Ended uses, newest end first."""
    last_write_s: float
    """Time of the agent's last write to the history file [s since 1970]; 0: never."""


def read_history(path: Path, *, wait_s: float = READ_WAIT_S) -> HistoryContent:
    """Read all device uses in the history file, also without a running agent.

    Raises:
        OSError: The file is absent, or this user may not read it.
        UnusableFile: The file is not a history, or of a later version.
        ResourceBusyError: The agent holds the write lock for longer than `wait_s`.
    """
    return _read_file(path, _select_content, HistoryContent((), (), 0.0), wait_s)


def read_verdicts(path: Path, *, wait_s: float = READ_WAIT_S) -> StoredVerdicts:
    """Read the history of devices' health, also without a running agent. Raises as read_history()."""
    stored = _read_file(path, select_verdicts, StoredVerdicts(), wait_s)
    return extend_newest_period(stored, read_period_file(period_file_path(path)))


def _read_file(path: Path, select: Callable[[sqlite3.Connection], T], empty: T, wait_s: float) -> T:
    """Open the history file and return what `select` reads from it in one transaction.

    Args:
        empty: Result if the file is still empty, because an agent is about to create it.
        wait_s: Longest wait for the lock of the agent [s].
    """
    if not _file_size(path):
        return empty
    try:
        return _read_snapshot(path, "ro", select, wait_s)
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF == sqlite3.SQLITE_CANTOPEN and not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from None
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            raise ResourceBusyError(
                f"history file {path}: locked by the agent's write for over {wait_s:g} s; try again"
            ) from None
        if code != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise UnusableFile(describe_sqlite_error(error)) from None
    try:
        return _read_snapshot(path, "rw", select, wait_s)  # rolls back the transaction of a killed agent
    except sqlite3.OperationalError as error:
        raise UnusableFile(
            f"the interrupted write of a killed agent cannot be rolled back: {describe_sqlite_error(error)}"
        ) from None


def _file_size(path: Path) -> int:
    """Return the size of the history file; raises UnusableFile if the path is not a regular file."""
    found = os.stat(path)  # not open(): its close() would release SQLite's locks in this process
    if not stat.S_ISREG(found.st_mode):
        raise UnusableFile("is not a regular file")
    return found.st_size


def _read_snapshot(path: Path, mode: str, select: Callable[[sqlite3.Connection], T], wait_s: float) -> T:
    with open_connection(path, mode, wait_s) as db:
        db.execute("BEGIN")  # one consistent snapshot
        check_version(db)
        return select(db)


def _select_content(db: sqlite3.Connection) -> HistoryContent:
    from agent.store.usage_sqlite import select_uses

    return HistoryContent(
        select_uses(db, "SELECT * FROM running ORDER BY number DESC"),
        select_uses(db, "SELECT * FROM ended ORDER BY number DESC"),
        last_write_s(db),
    )


class HistoryFile:
    """History file, as opened by its only writer. Thread-safe. Calls block on the disk."""

    def __init__(self, path: Path, limits: UsageHistoryLimits, *, wait_s: float = WRITE_WAIT_S) -> None:
        self._path = path
        self._limits = limits
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._known_id: tuple[int, int] | None = None
        """Device and inode of the history file after the last read or write of uses; None: no file."""
        self._known_verdicts_id: tuple[int, int] | None = None
        """Device and inode of the history file after the last read or write of verdicts; None: no file."""

    @property
    def path(self) -> Path:
        """Path of the history file."""
        return self._path

    def content_if_replaced(self) -> StoredUsages | None:
        """Return the content of the history file if the file was replaced or removed; None: it is the same.

        Raises:
            HistoryError: The file cannot be used and was renamed; or a later version of the agent wrote it,
                and it is left unchanged.
        """
        from agent.model.device_usage import StoredUsages, UsageEndKind
        from agent.store.usage_sqlite import check_ended_rows, select_uses

        file_id = self._file_id()
        if file_id == self._known_id:
            return None
        self._known_id = None
        if file_id is None:
            return StoredUsages()
        with self._open() as db:
            _check_database(db)
            check_ended_rows(db)  # all of them: a reader lists them all
            over = "SELECT * FROM ended WHERE ending IN (?, ?) ORDER BY number DESC LIMIT ?"
            content = StoredUsages(
                running=select_uses(db, "SELECT * FROM running ORDER BY number"),
                ended=select_uses(db, over, UsageEndKind.SUCCEEDED, UsageEndKind.FAILED, TRACKED_USAGES_MAX),
                last_written_s=last_write_s(db),
            )
            self._known_id = self._file_id()
        return content

    def write_uses(
        self,
        changed: Collection[PodDeviceUsage],
        merged_ids: Iterable[str],
        now_wall_s: float,
        *,
        delete_by_age: bool,
    ) -> None:
        """Insert or update device uses, and delete old ones. Idempotent.

        Args:
            changed: Uses to insert or update.
            merged_ids: Ids of uses to delete, because they were merged into others.
            now_wall_s: Time of this write [s since 1970].
            delete_by_age: True: uses beyond the age limit are deleted. False: the wall clock is not reliable.

        Raises:
            HistoryError: The disk refuses the write; or see :meth:`content_if_replaced`.
        """
        rows = iter(changed)
        with self._open() as db:
            while batch := tuple(islice(rows, USES_PER_TRANSACTION)):
                with _transaction(db):
                    self._make_room(db)
                    _insert_uses(db, batch)
            with _transaction(db):
                db.executemany("DELETE FROM running WHERE id = ?", ((id_,) for id_ in merged_ids))
                db.execute("UPDATE agent SET left_s = ?", (now_wall_s,))
                newest = "(SELECT max(number) FROM ended)"
                db.execute(f"DELETE FROM ended WHERE number <= {newest} - ?", (self._limits.rows,))
                if delete_by_age:
                    db.execute("DELETE FROM ended WHERE noticed_s < ?", (now_wall_s - self._limits.age_s,))
            self._known_id = self._file_id()

    def verdicts_if_replaced(self) -> StoredVerdicts | None:
        """Return the verdict history if the history file was replaced or removed; None: it is the same file.

        Raises the errors of :meth:`content_if_replaced`.
        """
        file_id = self._file_id()
        if file_id == self._known_verdicts_id and file_id is not None:
            return None
        self._known_verdicts_id = None
        if file_id is None:
            return StoredVerdicts()
        with self._open() as db:
            _check_database(db)
            stored = select_verdicts(db)
            self._known_verdicts_id = self._file_id()
        return extend_newest_period(stored, read_period_file(period_file_path(self._path)))

    def write_verdicts(
        self,
        periods: Collection[ObservedPeriod],
        changes: Collection[VerdictChange],
        now_wall_s: float,
        *,
        delete_by_age: bool,
    ) -> None:
        """Insert or update observed periods and changes of verdicts, and delete old ones. Idempotent.

        Arguments and errors are those of :meth:`write_uses`.
        """
        rows = iter(changes)
        with self._open() as db:
            with _transaction(db):
                create_verdict_tables(db)
                insert_new_periods(db, periods)
            while batch := tuple(islice(rows, CHANGES_PER_TRANSACTION)):
                with _transaction(db):
                    self._make_room(db)
                    insert_verdicts(db, (), batch)
            with _transaction(db):  # no longer period without the changes in it
                insert_verdicts(db, periods, ())
                delete_verdicts_by_count(db, self._limits.rows)
                if delete_by_age:
                    delete_verdicts_by_age(db, now_wall_s - self._limits.age_s, now_wall_s)
            self._known_verdicts_id = self._file_id()

    def _make_room(self, db: sqlite3.Connection) -> None:
        """Delete the oldest records, a tenth at a time, while the file is above :data:`FULL_SHARE`."""
        pages = FULL_SHARE * pragma_number(db, "max_page_count")
        newest, oldest = "(SELECT max(number) FROM ended)", "(SELECT min(number) FROM ended)"
        tenth = f"DELETE FROM ended WHERE number <= {oldest} + ({newest} - {oldest}) / 10"
        while pragma_number(db, "page_count") - pragma_number(db, "freelist_count") > pages:
            if not db.execute(tenth).rowcount + delete_oldest_verdicts(db):
                break

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the history file in a ``with`` block, and create it if needed.

        The lock of this object is held meanwhile, because an unusable file is renamed at the end.
        """
        with self._lock, self._open_database() as db:
            yield db

    @contextmanager
    def _open_database(self) -> Iterator[sqlite3.Connection]:
        try:
            make_directory(self._path.parent)
            file = create_empty_file(self._path)
            if not file.st_size:  # a new file can have the inode of the removed one
                self._known_id = self._known_verdicts_id = None
            with open_connection(self._path, "rw", self._wait_s) as db:
                check_opened(self._path, file)
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA temp_store = MEMORY")
                pages = self._limits.size // pragma_number(db, "page_size")
                db.execute(f"PRAGMA max_page_count = {pages}")
                if not pragma_number(db, "schema_version"):
                    from agent.store.usage_sqlite import create_tables

                    create_tables(db)
                check_version(db)
                add_checksums(db)
                yield db
        except UnusableFile as error:
            raise HistoryError(self._path, f"{error}; {self._handle_corrupt(error)}") from None
        except OSError as error:
            raise HistoryError(self._path, error.strerror or str(error)) from None
        except sqlite3.Error as error:
            raise HistoryError(self._path, describe_sqlite_error(error)) from None

    def _handle_corrupt(self, error: UnusableFile) -> str:
        """Rename an unusable history file and its journal; return a text about the renaming.

        A file of a newer version is left unchanged.
        """
        if error.kind == NEWER_VERSION:
            return "the file is left unchanged"
        journal = self._path.with_name(f"{self._path.name}-journal")
        try:
            name = rename_unusable_file(self._path, error.kind)
            with suppress(FileNotFoundError):
                journal.rename(self._path.with_name(f"{name}-journal"))
        except OSError as failure:
            return f"the file could not be renamed: {failure.strerror}"
        return f"renamed to {self._path.with_name(name)}"

    def _file_id(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HistoryError(self._path, error.strerror or str(error)) from None
        return found.st_dev, found.st_ino


def _check_database(db: sqlite3.Connection) -> None:
    """Raise UnusableFile if SQLite finds damage in the history file."""
    found = db.execute("PRAGMA quick_check(1)").fetchone()
    if found is None or found[0] != "ok":
        raise UnusableFile(f"history file is damaged: {found and found[0]}")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a write transaction on the history file; after an exception, closing the file rolls it back."""
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")


def _insert_uses(db: sqlite3.Connection, batch: Collection[PodDeviceUsage]) -> None:
    from agent.store.usage_sqlite import INSERT_ENDED, INSERT_RUNNING, row_from_use

    db.executemany(INSERT_RUNNING, (row_from_use(use) for use in batch if not use.ended))
    db.executemany(INSERT_ENDED, (row_from_use(use) for use in batch if use.ended))
    db.executemany("DELETE FROM running WHERE id = ?", ((use.id,) for use in batch if use.ended))
