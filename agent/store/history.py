"""History of device uses: which pod used which device, and its health when the use ended. Bounded SQLite
file.

The file is opened for each write and closed again, so an operator can move it away, and no memory is held
between two changes. agent.devices.consumers.usage decides when a use begins and ends.

The journal mode is ``DELETE`` and not a write-ahead log: a reader of such a log must write its index, which
another user and a read-only file system cannot, and network file systems do not support it. Reader and writer
lock each other out instead, which is short at one write a minute. ``EXTRA`` makes each transaction durable.
"""

import os
import sqlite3
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import Busy, DrahealthError
from agent.model.use_limits import RUNNING_MAX, UseLimits
from agent.model.uses import DeviceUsage, StoredUses, UsageEndKind
from agent.store.files import CorruptFile, make_directory, set_aside
from agent.store.history_db import (
    INSERT_ENDED,
    INSERT_RUNNING,
    NEWER,
    check_version,
    connection,
    create_empty_file,
    create_tables,
    describe,
    last_write_s,
    pragma_number,
    row_of,
    select_uses,
)

WRITE_WAIT_S: Final = 5.0
"""Time that the writer waits for a reader [s]."""
READ_WAIT_S: Final = 2.0
"""Time that a reader waits for the writer [s]."""
FULL: Final = 0.9
"""Share of the history file's page limit from which the oldest rows are deleted, before SQLite refuses a
write."""
BATCH: Final = 500
"""Number of device uses per transaction: a tenth of the file has room for them."""


class HistoryError(DrahealthError):
    """History file that could not be used; it is unchanged, or it was set aside."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class HistoryContent(NamedTuple):
    """Content of the history file."""

    running: tuple[DeviceUsage, ...]
    """Current uses, newest first."""
    ended: tuple[DeviceUsage, ...]
    """Ended uses, newest end first."""
    left_s: float
    """Time of the agent's last write [s since 1970]."""


def read(path: Path, *, wait_s: float = READ_WAIT_S) -> HistoryContent:
    """Read the whole history file. Needs no running agent.

    Raises:
        OSError: The file is absent, or this user may not read it.
        CorruptFile: The file is not a history, or of a later version.
        Busy: The agent holds the write lock for longer than `wait_s`.
    """
    if not _size(path):  # an agent is about to create it
        return HistoryContent((), (), 0.0)
    try:
        return _read(path, "ro", wait_s)
    except sqlite3.OperationalError as error:
        code = error.sqlite_errorcode
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            raise Busy(f"{path}: the agent is writing, for over {wait_s:g} s") from None
        if code != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise CorruptFile(describe(error)) from None
    try:
        return _read(path, "rw", wait_s)  # rolls back the transaction of a killed agent
    except sqlite3.OperationalError as error:
        raise CorruptFile(
            f"the interrupted write of a killed agent cannot be rolled back: {describe(error)}"
        ) from None


def _size(path: Path) -> int:
    """Return the size of a readable regular file. SQLite reports no errno, and a FIFO would block it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFile("is not a regular file")
    return found.st_size


def _read(path: Path, mode: str, wait_s: float) -> HistoryContent:
    with connection(path, mode, wait_s) as db:
        db.execute("BEGIN")  # one consistent snapshot
        check_version(db)
        running = select_uses(db, "SELECT * FROM running ORDER BY number DESC")
        return HistoryContent(
            running, select_uses(db, "SELECT * FROM ended ORDER BY number DESC"), last_write_s(db)
        )


class HistoryFile:
    """History file, for its only writer. Calls block on the disk."""

    def __init__(self, path: Path, limits: UseLimits, *, wait_s: float = WRITE_WAIT_S) -> None:
        self._path = path
        self._limits = limits
        self._wait_s = wait_s
        self._known_id: tuple[int, int] | None = None
        """Device and inode of the file after the last read or write; None: there is no file."""

    def changed_file(self) -> StoredUses | None:
        """Return the content of the file if another file is at its path since the last read or write (empty
        if there is none now); None: the file is the same.

        Raises:
            HistoryError: The file is damaged or no history, and was set aside; or a later version of the
                agent wrote it, and it is left unchanged.
        """
        file_id = self._file_id()
        if file_id == self._known_id:
            return None
        self._known_id = None
        if file_id is None:
            return StoredUses()
        with self._open() as db:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise CorruptFile(f"is damaged: {found}")
            over = "SELECT * FROM ended WHERE ending IN (?, ?) ORDER BY number DESC LIMIT ?"
            content = StoredUses(
                running=select_uses(db, "SELECT * FROM running ORDER BY number"),
                over=select_uses(db, over, UsageEndKind.SUCCEEDED, UsageEndKind.FAILED, RUNNING_MAX),
                left_s=last_write_s(db),
            )
        self._known_id = self._file_id()
        return content

    def write(
        self, changed: Collection[DeviceUsage], merged: Iterable[str], left_s: float, *, by_age: bool
    ) -> None:
        """Insert or update uses, and delete old ones. Idempotent; each batch is written completely or not at
        all.

        Args:
            changed: Uses to insert or update.
            merged: Ids of uses to delete, because they became part of others.
            left_s: Time of this write [s since 1970].
            by_age: Whether the wall clock is reliable, so that uses beyond the age limit are deleted.

        Raises:
            HistoryError: The disk refuses the write, or as in :meth:`changed_file`.
        """
        rows = iter(changed)
        with self._open() as db:
            while batch := tuple(islice(rows, BATCH)):
                with _transaction(db):
                    self._make_room(db)
                    _insert_uses(db, batch)
            with _transaction(db):
                db.executemany("DELETE FROM running WHERE id = ?", ((id_,) for id_ in merged))
                db.execute("UPDATE agent SET left_s = ?", (left_s,))
                newest = "(SELECT max(number) FROM ended)"
                db.execute(f"DELETE FROM ended WHERE number <= {newest} - ?", (self._limits.rows,))
                if by_age:
                    db.execute("DELETE FROM ended WHERE noticed_s < ?", (left_s - self._limits.age_s,))
        self._known_id = self._file_id()

    def _make_room(self, db: sqlite3.Connection) -> None:
        """Delete the oldest ended uses, a tenth at a time, until there is room."""
        pages = FULL * pragma_number(db, "max_page_count")
        newest, oldest = "(SELECT max(number) FROM ended)", "(SELECT min(number) FROM ended)"
        tenth = f"DELETE FROM ended WHERE number <= {oldest} + ({newest} - {oldest}) / 10"
        while pragma_number(db, "page_count") - pragma_number(db, "freelist_count") > pages:
            if not db.execute(tenth).rowcount:
                break

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the history file, creating it if needed."""
        try:
            make_directory(self._path.parent)
            create_empty_file(self._path)
            with connection(self._path, "rw", self._wait_s) as db:
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA temp_store = MEMORY")
                pages = self._limits.size // pragma_number(db, "page_size")
                db.execute(f"PRAGMA max_page_count = {pages}")
                if not pragma_number(db, "schema_version"):
                    create_tables(db)
                check_version(db)
                yield db
        except CorruptFile as error:
            raise HistoryError(self._path, f"{error}; {self._handle_corrupt(error)}") from None
        except OSError as error:
            raise HistoryError(self._path, error.strerror or str(error)) from None
        except sqlite3.Error as error:
            raise HistoryError(self._path, describe(error)) from None

    def _handle_corrupt(self, error: CorruptFile) -> str:
        """Set an unusable file aside with its journal, which SQLite would apply to the next file of that
        name.

        Returns a text for the error message.
        """
        if error.kind == NEWER:
            return "it is left unchanged, and nothing is recorded"
        journal = self._path.with_name(f"{self._path.name}-journal")
        try:
            name = set_aside(self._path, error.kind)
            with suppress(FileNotFoundError):
                journal.rename(self._path.with_name(f"{name}-journal"))
        except OSError as failure:
            return f"could not be set aside: {failure.strerror}"
        return f"set aside as {self._path.with_name(name)}"

    def _file_id(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise HistoryError(self._path, error.strerror or str(error)) from None
        return found.st_dev, found.st_ino


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction: without the commit, closing the file rolls it back."""
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")


def _insert_uses(db: sqlite3.Connection, batch: Collection[DeviceUsage]) -> None:
    db.executemany(INSERT_RUNNING, (row_of(use) for use in batch if not use.ended))
    db.executemany(INSERT_ENDED, (row_of(use) for use in batch if use.ended))
    db.executemany("DELETE FROM running WHERE id = ?", ((use.id,) for use in batch if use.ended))
