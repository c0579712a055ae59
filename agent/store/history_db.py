"""The history's file as SQLite sees it: made, opened, and looked at whether it is one.

What stands in it, and when it is written, is agent.store.history's.
"""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.model.uses import DeviceUsage
from agent.store.files import CorruptFile
from agent.store.history_rows import SCHEMA, use_of

VERSION: Final = 1
APPLICATION: Final = 0x64726168
"""SQLite's field for whose a file is; reads ``drah``."""
NEWER: Final = "newer"
FOREIGN: Final = "foreign"

_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})
"""The last is of a table or a column that is not there."""


def make(path: Path) -> None:
    """An empty file that is nobody else's, unless there is one.

    Raises:
        OSError: It cannot be made.
        Unusable: What is there is no file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise CorruptFile("is no regular file") from None
        if stat.S_IMODE(mode) & 0o077:
            os.chmod(path, 0o600)


@contextmanager
def connected(path: Path, mode: str, wait_s: float) -> Iterator[sqlite3.Connection]:
    """An open file, without a word of what is in it.

    Args:
        mode: ``ro`` or ``rw``; neither makes a file.
        wait_s: How long somebody else may have it locked [s].

    Raises:
        Unusable: It is damaged.
        sqlite3.Error: Anything else.
    """
    uri = f"{Path(os.path.abspath(path)).as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None)
    try:
        db.row_factory = sqlite3.Row
        db.text_factory = lambda data: data.decode(errors="replace")
        yield db
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF in _DAMAGED:
            raise CorruptFile(f"is not understood: {error}") from None
        raise
    finally:
        db.close()


def create(db: sqlite3.Connection) -> None:
    """The tables, unless there is something; all or none, so that whoever is killed leaves an empty file."""
    db.execute("BEGIN IMMEDIATE")
    if not number(db, "application_id") and not number(db, "schema_version"):
        for statement in SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def check(db: sqlite3.Connection) -> None:
    """Raises Unusable unless the file is a history, and one that we understand."""
    if number(db, "application_id") != APPLICATION:
        raise CorruptFile("is no history of drahealth", FOREIGN)
    version = number(db, "user_version")
    if version > VERSION:
        raise CorruptFile(f"is of version {version}, this agent reads {VERSION}", NEWER)
    if version != VERSION:
        raise CorruptFile(f"is of version {version}, which never was")


def number(db: sqlite3.Connection, pragma: str) -> int:
    """What a pragma says that says a number."""
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


def left(db: sqlite3.Connection) -> float:
    """When the agent last wrote [s since 1970]; 0: never."""
    (left_s,) = db.execute("SELECT max(left_s) FROM agent").fetchone()
    return float(left_s or 0)


def uses(db: sqlite3.Connection, query: str, *values: object) -> tuple[DeviceUsage, ...]:
    """The uses that a query finds; Unusable if there is one that nobody writes so."""
    try:
        return tuple(use_of(row) for row in db.execute(query, values))
    except (ValueError, TypeError, IndexError) as error:
        raise CorruptFile(f"is not understood: {error}") from None


def words(error: sqlite3.Error) -> str:
    """What SQLite says, and its name for that."""
    return f"{error} ({error.sqlite_errorname})"
