"""The history's file: which pod used which device, and how that was when it ended. SQLite, bounded.

What a use is, and when it ends, is agent.devices.consumers.usage's. The file is opened for each write and
closed again: nothing is held of one that an operator moves away, and no memory between two changes.

Its journal is a file that goes when a transaction is done (``DELETE``), and no write-ahead log: whoever reads
such a log writes its index, which another user and a read-only file system cannot, and no network file system
has. Reader and writer wait for one another instead, which at a write a minute nobody notices. ``EXTRA`` puts
the end of each transaction on the disk, so that a power failure leaves the newest, and leaves it whole.
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
from agent.model.use_limits import RUNNING_MAX, Limits
from agent.model.uses import DeviceUsage, Ending, Kept
from agent.store.files import CorruptFile, make_directory, set_aside
from agent.store.history_db import NEWER, check, connected, create, left, make, number, uses, words
from agent.store.history_rows import INSERT_ENDED, INSERT_RUNNING, row_of

WRITE_WAIT_S: Final = 5.0
"""For a reader to end [s]."""
READ_WAIT_S: Final = 2.0
"""For the writer likewise [s]."""
FULL: Final = 0.9
"""Of the pages that there may be: from here on the oldest go, before SQLite takes no more at all."""
BATCH: Final = 500
"""Uses that are written at once: a tenth of the file has room for them."""


class NotRecorded(DrahealthError):
    """The file could not be used; it is as it was before, or it was set aside."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class Record(NamedTuple):
    """All that the file has."""

    running: tuple[DeviceUsage, ...]
    """Those that were seen to begin last come first."""
    ended: tuple[DeviceUsage, ...]
    """Those that ended last come first."""
    left_s: float
    """When the agent last wrote [s since 1970]."""


def read(path: Path, *, wait_s: float = READ_WAIT_S) -> Record:
    """All that the file has; needs no agent, and writes nothing.

    Raises:
        OSError: It is not there, or may not be read.
        Unusable: It is no history, or of a later version.
        Busy: The agent has been writing for too long.
    """
    if not _size(path):  # an agent is about to make it
        return Record((), (), 0.0)
    try:
        return _read(path, "ro", wait_s)
    except sqlite3.OperationalError as error:
        code = error.sqlite_errorcode
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            raise Busy(f"{path}: the agent is writing, for over {wait_s:g} s") from None
        if code != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise CorruptFile(words(error)) from None
    try:
        return _read(path, "rw", wait_s)  # an agent was killed in a transaction, and half of it is taken back
    except sqlite3.OperationalError as error:
        raise CorruptFile(f"an agent was killed while it wrote, and to undo that: {words(error)}") from None


def _size(path: Path) -> int:
    """Of a file that may be read. SQLite tells no errno, and a FIFO would block it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFile("is no regular file")
    return found.st_size


def _read(path: Path, mode: str, wait_s: float) -> Record:
    with connected(path, mode, wait_s) as db:
        db.execute("BEGIN")  # all of it as of one moment
        check(db)
        running = uses(db, "SELECT * FROM running ORDER BY number DESC")
        return Record(running, uses(db, "SELECT * FROM ended ORDER BY number DESC"), left(db))


class History:
    """The file, for its only writer. A call takes as long as a disk takes."""

    def __init__(self, path: Path, limits: Limits, *, wait_s: float = WRITE_WAIT_S) -> None:
        self._path = path
        self._limits = limits
        self._wait_s = wait_s
        self._place: tuple[int, int] | None = None
        """Device and inode of the file that was written last; None: there is none."""

    def news(self) -> Kept | None:
        """What is in the file, if it is another one than was written last; None: it is the same.

        Raises:
            NotRecorded: It cannot be used: damaged or somebody else's, and then it was set aside; or a later
                version of the agent wrote it, and it is left as it is.
        """
        place = self._where()
        if place == self._place:
            return None
        self._place = None
        if place is None:
            return Kept()
        with self._open() as db:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise CorruptFile(f"is damaged: {found}")
            over = "SELECT * FROM ended WHERE ending IN (?, ?) ORDER BY number DESC LIMIT ?"
            kept = Kept(
                running=uses(db, "SELECT * FROM running ORDER BY number"),
                over=uses(db, over, Ending.SUCCEEDED, Ending.FAILED, RUNNING_MAX),
                left_s=left(db),
            )
        self._place = self._where()
        return kept

    def write(
        self, changed: Collection[DeviceUsage], merged: Iterable[str], left_s: float, *, by_age: bool
    ) -> None:
        """Keeps these uses as they are now, and makes room. Each of them as a whole, or not at all; written
        again, they are the same.

        Args:
            merged: Ids of those that are no more.
            left_s: Now [s since 1970].
            by_age: The wall clock can be trusted: those that ended too long ago go.

        Raises:
            NotRecorded: The disk does not take it, or as of :meth:`news`.
        """
        rows = iter(changed)
        with self._open() as db:
            while batch := tuple(islice(rows, BATCH)):
                with _transaction(db):
                    self._make_room(db)
                    _keep(db, batch)
            with _transaction(db):
                db.executemany("DELETE FROM running WHERE id = ?", ((id_,) for id_ in merged))
                db.execute("UPDATE agent SET left_s = ?", (left_s,))
                newest = "(SELECT max(number) FROM ended)"
                db.execute(f"DELETE FROM ended WHERE number <= {newest} - ?", (self._limits.rows,))
                if by_age:
                    db.execute("DELETE FROM ended WHERE noticed_s < ?", (left_s - self._limits.age_s,))
        self._place = self._where()

    def _make_room(self, db: sqlite3.Connection) -> None:
        """The oldest go, a tenth at a time, until there is some."""
        pages = FULL * number(db, "max_page_count")
        newest, oldest = "(SELECT max(number) FROM ended)", "(SELECT min(number) FROM ended)"
        tenth = f"DELETE FROM ended WHERE number <= {oldest} + ({newest} - {oldest}) / 10"
        while number(db, "page_count") - number(db, "freelist_count") > pages:
            if not db.execute(tenth).rowcount:
                break

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The file, made if there is none."""
        try:
            make_directory(self._path.parent)
            make(self._path)
            with connected(self._path, "rw", self._wait_s) as db:
                db.execute("PRAGMA journal_mode = DELETE")
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA temp_store = MEMORY")
                pages = self._limits.size // number(db, "page_size")
                db.execute(f"PRAGMA max_page_count = {pages}")
                if not number(db, "schema_version"):
                    create(db)
                check(db)
                yield db
        except CorruptFile as error:
            raise NotRecorded(self._path, f"{error}; {self._fate(error)}") from None
        except OSError as error:
            raise NotRecorded(self._path, error.strerror or str(error)) from None
        except sqlite3.Error as error:
            raise NotRecorded(self._path, words(error)) from None

    def _fate(self, error: CorruptFile) -> str:
        """What becomes of a file that cannot be used. Its journal goes with it: SQLite would put what is in
        that into the next file of the name."""
        if error.kind == NEWER:
            return "it is left as it is, and nothing is recorded"
        journal = self._path.with_name(f"{self._path.name}-journal")
        try:
            name = set_aside(self._path, error.kind)
            with suppress(FileNotFoundError):
                journal.rename(self._path.with_name(f"{name}-journal"))
        except OSError as refused:
            return f"could not be set aside: {refused.strerror}"
        return f"set aside as {self._path.with_name(name)}"

    def _where(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise NotRecorded(self._path, error.strerror or str(error)) from None
        return found.st_dev, found.st_ino


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it, or nothing: what is not committed goes when the file is closed."""
    db.execute("BEGIN IMMEDIATE")
    yield
    db.execute("COMMIT")


def _keep(db: sqlite3.Connection, batch: Collection[DeviceUsage]) -> None:
    db.executemany(INSERT_RUNNING, (row_of(use) for use in batch if not use.ended))
    db.executemany(INSERT_ENDED, (row_of(use) for use in batch if use.ended))
    db.executemany("DELETE FROM running WHERE id = ?", ((use.id,) for use in batch if use.ended))
