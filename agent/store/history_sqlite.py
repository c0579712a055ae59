"""SQLite access to the history file: schema, connection, format version, conversion of rows."""

import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.device_usage import DeviceState, PodDeviceUsage, UsageEnd, UsageEndKind
from agent.model.health import Health, Severity
from agent.model.time import Instant
from agent.store.state_files import UnusableFile

Number = TypeVar("Number", int, float)

TEXT_MAX: Final = 512
"""Length to which texts in a row are cut [characters]."""

_STATE: Final = ("health", "severity", "code", "evidence", "since_s")
_COMMON: Final = (
    "id TEXT NOT NULL UNIQUE",
    *(f"pod_{name} TEXT NOT NULL" for name in PodRef._fields),
    *(f"claim_{name} TEXT NOT NULL" for name in ClaimRef._fields),
    *(f"device_{name} TEXT NOT NULL" for name in DeviceRef._fields),
    "began_s REAL NOT NULL",
    "before INTEGER NOT NULL",
    *(f"{prefix}_{name} NOT NULL" for prefix in ("state", "worst") for name in _STATE),
    *(f"{name} TEXT NOT NULL" for name in ("told_by", "requests", "containers", "owner", "maybe")),
)
_ENDED: Final = (
    "ending TEXT NOT NULL",
    "seen_s REAL NOT NULL",
    "noticed_s REAL NOT NULL",
    "lasted_s REAL NOT NULL",
)

NO_CHECKSUM: Final = -1
"""Checksum of the rows of a file to which the column was added."""
_CHECKSUM: Final = f"checksum INTEGER NOT NULL DEFAULT {NO_CHECKSUM}"
_RUNNING_COLUMNS: Final = (*_COMMON, _CHECKSUM)
_ENDED_COLUMNS: Final = (*_COMMON, *_ENDED, _CHECKSUM)

SCHEMA_STATEMENTS: Final = (
    "CREATE TABLE agent (left_s REAL NOT NULL)",
    "INSERT INTO agent VALUES (0)",
    f"CREATE TABLE running (number INTEGER PRIMARY KEY, {', '.join(_RUNNING_COLUMNS)})",
    f"CREATE TABLE ended (number INTEGER PRIMARY KEY, {', '.join(_ENDED_COLUMNS)})",
)
"""Schema of format version 1. Rows are ordered by number, because the wall clock can be set back."""


def _insert_statement(table: str, columns: Iterable[str]) -> str:
    """Return the SQL statement that inserts a row, or updates the row with the same id."""
    names = [column.partition(" ")[0] for column in columns]
    values = ", ".join("?" * len(names))
    newest = ", ".join(f"{name} = excluded.{name}" for name in names)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values}) ON CONFLICT (id) DO UPDATE SET {newest}"
    )


INSERT_RUNNING: Final = _insert_statement("running", _RUNNING_COLUMNS)
INSERT_ENDED: Final = _insert_statement("ended", _ENDED_COLUMNS)


def row_from_use(use: PodDeviceUsage) -> tuple[object, ...]:
    """Convert a device use to the values of :data:`INSERT_RUNNING`, or of INSERT_ENDED if it has ended."""
    values = (
        use.id,
        *use.pod,
        *use.claim,
        *use.device,
        use.began.wall_s,
        use.before,
        *use.state,
        *use.worst,
        " ".join(use.sources),
        " ".join(use.requests),
        " ".join(use.containers),
        use.owner,
        " ".join(use.maybe),
        *(use.ended or ()),
    )
    stored = tuple(_truncate(value) if isinstance(value, str) else value for value in values)
    return (*stored, _checksum(stored))


def _checksum(values: Iterable[object]) -> int:
    """Return the CRC-32 of the values of a record, which finds damage inside of them that SQLite cannot find.

    SQLite returns a number as integer or float, whatever the column's type, so both count as float.
    """
    parts = (f"{float(value)!r}" if isinstance(value, int | float) else f"{value!r}" for value in values)
    return zlib.crc32("\n".join(parts).encode())


def _truncate(text: str) -> str:
    return text[:TEXT_MAX].encode(errors="replace").decode()  # SQLite refuses half of a surrogate pair


def use_from_row(row: sqlite3.Row) -> PodDeviceUsage:
    """Convert a row of running or ended uses to a device use. Raises ValueError, TypeError if damaged."""
    _check_row(row)
    sources = tuple(map(Origin, row["told_by"].split()))
    if not sources:
        raise ValueError("row without a source of the use")
    return PodDeviceUsage(
        id=row["id"],
        pod=PodRef(*(row[f"pod_{name}"] for name in PodRef._fields)),
        claim=ClaimRef(*(row[f"claim_{name}"] for name in ClaimRef._fields)),
        device=DeviceRef(*(row[f"device_{name}"] for name in DeviceRef._fields)),
        began=Instant(0, float(row["began_s"])),
        before=bool(row["before"]),
        state=_state_from_row(row, "state"),
        worst=_state_from_row(row, "worst"),
        sources=sources,
        requests=tuple(row["requests"].split()),
        containers=tuple(row["containers"].split()),
        owner=row["owner"],
        maybe=tuple(row["maybe"].split()),
        resumed=True,
        ended=_end_from_row(row) if "ending" in row.keys() else None,  # noqa: SIM118  # a row is not a mapping
    )


def _check_row(row: sqlite3.Row) -> None:
    *values, checksum = tuple(row)[1:]
    has_checksum = row.keys()[-1] == "checksum" and checksum != NO_CHECKSUM
    if has_checksum and checksum != _checksum(values):
        raise ValueError(f"checksum of record {row['number']} is wrong")


def check_ended_rows(db: sqlite3.Connection) -> None:
    """Raise UnusableFile if the checksum of an ended use is wrong."""
    try:
        for row in db.execute("SELECT * FROM ended"):
            _check_row(row)
    except (ValueError, TypeError) as error:
        raise UnusableFile(f"file cannot be parsed: {error}") from None


def _state_from_row(row: sqlite3.Row, prefix: str) -> DeviceState:
    health, severity, code, evidence, since_s = (row[f"{prefix}_{name}"] for name in _STATE)
    return DeviceState(Health(health), Severity(severity), code, evidence, float(since_s))


def _end_from_row(row: sqlite3.Row) -> UsageEnd:
    times = (float(row[name]) for name in ("seen_s", "noticed_s", "lasted_s"))
    return UsageEnd(UsageEndKind(row["ending"]), *times)


VERSION: Final = 1
APPLICATION_ID: Final = 0x64726168
"""SQLite application id of history files: ``drah`` in ASCII."""
NEWER_VERSION: Final = "newer"
FOREIGN_FILE: Final = "foreign"

_DAMAGED: Final = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_FORMAT,
        sqlite3.SQLITE_ERROR,  # a missing table or column
        sqlite3.SQLITE_CONSTRAINT,  # the schema in the file is not that of create_tables()
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
    }
)
"""SQLite error codes of a damaged file."""


def create_empty_file(path: Path) -> None:
    """Create an empty file with mode 0600, or remove other users' access to an existing file.

    Raises:
        OSError: The file cannot be created.
        UnusableFile: The path is not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise UnusableFile("is not a regular file") from None
        if stat.S_IMODE(mode) & 0o077:
            os.chmod(path, 0o600)


@contextmanager
def open_connection(path: Path, mode: str, wait_s: float) -> Iterator[sqlite3.Connection]:
    """Open the history file as an SQLite database; the format version is not checked.

    Args:
        mode: ``ro`` or ``rw``; neither creates a file.
        wait_s: Time to wait for another process's lock [s].

    Raises:
        UnusableFile: The file is damaged.
        sqlite3.Error: SQLite fails for another reason.
    """
    uri = f"{Path(os.path.abspath(path)).as_uri()}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None)
    try:
        db.row_factory = sqlite3.Row
        db.text_factory = lambda data: data.decode(errors="replace")
        yield db
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGED:
            raise UnusableFile(f"file cannot be parsed: {error}") from None
        raise
    except UnicodeDecodeError:  # of SQLite's message, which quotes the file
        raise UnusableFile("file cannot be parsed: SQLite reports damage in bytes that are no text") from None
    finally:
        db.close()


def create_tables(db: sqlite3.Connection) -> None:
    """Create the history tables in an empty file, in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    if not pragma_number(db, "application_id") and not pragma_number(db, "schema_version"):
        for statement in SCHEMA_STATEMENTS:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def add_checksums(db: sqlite3.Connection) -> None:
    """Add the column of the checksums to the tables of a file that has none."""
    for table in ("running", "ended"):
        if all(name != "checksum" for _, name, *_ in db.execute(f"PRAGMA table_info({table})")):
            db.execute(f"ALTER TABLE {table} ADD COLUMN {_CHECKSUM}")


def check_version(db: sqlite3.Connection) -> None:
    """Raise UnusableFile unless the file is a history file of format version 1."""
    if pragma_number(db, "application_id") != APPLICATION_ID:
        raise UnusableFile("file is not a history file of drahealth", FOREIGN_FILE)
    version = pragma_number(db, "user_version")
    if version > VERSION:
        raise UnusableFile(
            f"file has format version {version}, this agent reads up to {VERSION}; update the agent",
            NEWER_VERSION,
        )
    if version != VERSION:
        raise UnusableFile(f"file has the unknown format version {version}")


def pragma_number(db: sqlite3.Connection, pragma: str) -> int:
    """Return the value of a numeric SQLite pragma. Raises UnusableFile if it is no number."""
    return _first_number(db, f"PRAGMA {pragma}", int)


def _first_number(db: sqlite3.Connection, query: str, kind: Callable[[Any], Number]) -> Number:
    try:
        return kind(db.execute(query).fetchone()[0] or 0)
    except (ValueError, TypeError, OverflowError) as error:
        raise UnusableFile(f"file cannot be parsed: {query}: {error}") from None


def last_write_s(db: sqlite3.Connection) -> float:
    """Return the time of the agent's last write [s since 1970]; 0: never."""
    return _first_number(db, "SELECT max(left_s) FROM agent", float)


def select_uses(db: sqlite3.Connection, query: str, *values: object) -> tuple[PodDeviceUsage, ...]:
    """Return the device uses that a query selects. Raises UnusableFile if a row cannot be converted."""
    try:
        return tuple(use_from_row(row) for row in db.execute(query, values))
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UnusableFile(f"file cannot be parsed: {error}") from None


def describe_sqlite_error(error: sqlite3.Error) -> str:
    """Return the message and error name of an SQLite error."""
    return f"{error} ({getattr(error, 'sqlite_errorname', 'no SQLite error')})"
