"""SQLite access to the history file: connection, format version, checksums of records.

The module also has the tables of the verdict history in the history file: schema, conversion of rows,
deletion of old rows.

The tables are created with the first verdict. Versions of the agent that do not know them ignore them.
"""

import errno
import json
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote_from_bytes

from agent.model.claim import DeviceRef
from agent.model.health import Severity
from agent.model.history import (
    ObservedPeriod,
    RecordedCause,
    RecordedState,
    RecordedVerdict,
    StoredVerdicts,
    VerdictChange,
)
from agent.store.state_files import UnusableFile
from agent.system.files import CheckedDirectory, absolute_path

Number = TypeVar("Number", int, float)

TEXT_MAX: Final = 512
"""Length to which texts in a row of the history file are cut [characters]."""

NO_CHECKSUM: Final = -1
"""Value of the checksum column in rows that were written before the column existed."""
CHECKSUM_COLUMN: Final = f"checksum INTEGER NOT NULL DEFAULT {NO_CHECKSUM}"


def insert_statement(table: str, columns: Iterable[str]) -> str:
    """Return the SQL statement that inserts a row, or updates the row with the same id."""
    names = [column.partition(" ")[0] for column in columns]
    values = ", ".join("?" * len(names))
    newest = ", ".join(f"{name} = excluded.{name}" for name in names)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values}) ON CONFLICT (id) DO UPDATE SET {newest}"
    )


def row_checksum(values: Iterable[object]) -> int:
    """Return the CRC-32 of a record's values, which finds damage inside of values that SQLite cannot find.

    SQLite returns a number as integer or float, whatever the column's type, so both count as float.
    """
    parts = (f"{float(value)!r}" if isinstance(value, int | float) else f"{value!r}" for value in values)
    return zlib.crc32("\n".join(parts).encode())


def truncate(text: str) -> str:
    """Return a text cut to TEXT_MAX characters, in a form that SQLite accepts."""
    return text[:TEXT_MAX].encode(errors="replace").decode()  # SQLite refuses half of a surrogate pair


def check_row(row: sqlite3.Row) -> None:
    """Raise ValueError if the checksum of a row in the history file is wrong."""
    *values, checksum = tuple(row)[1:]
    has_checksum = row.keys()[-1] == "checksum" and checksum != NO_CHECKSUM
    if has_checksum and checksum != row_checksum(values):
        raise ValueError(f"checksum of row {row['number']} is wrong")


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
"""SQLite error codes that mean that the history file is damaged."""


def create_empty_file(path: Path) -> os.stat_result:
    """Create an empty file with mode 0600, or remove other users' access to an existing file.

    Returns the status of the file, for :func:`check_opened`.

    Raises:
        OSError: The file cannot be created, or another user could replace the directory's files.
        UnusableFile: The path is not a regular file.
    """
    with CheckedDirectory(path.parent) as directory:
        with suppress(FileExistsError):
            os.close(directory.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        found = directory.stat(path.name)  # not open(): its close() would release SQLite's locks
        if not stat.S_ISREG(found.st_mode):
            raise UnusableFile("is not a regular file")
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.chmod(path.name, 0o600, dir_fd=directory.fd)
    return found


def check_opened(path: Path, expected: os.stat_result) -> None:
    """Check that the path, which SQLite has opened by name, is the file of the checked directory.

    Raises:
        OSError: The directory or the file was replaced meanwhile.
    """
    if not os.path.samestat(os.lstat(path), expected):
        raise OSError(errno.ESTALE, "was replaced by another process while it was opened")


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
    # not Path.as_uri(), which loads urllib.request and OpenSSL in Python 3.14
    uri = f"file://{quote_from_bytes(os.fsencode(absolute_path(path)))}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None)
    try:
        db.row_factory = sqlite3.Row
        db.text_factory = lambda data: data.decode(errors="replace")
        yield db
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DAMAGED:
            raise UnusableFile(f"history file cannot be parsed: {error}") from None
        raise
    except UnicodeDecodeError:  # of SQLite's message, which quotes the file
        raise UnusableFile(
            "history file cannot be parsed: SQLite reports damage in bytes that are not text"
        ) from None
    finally:
        db.close()


def add_checksums(db: sqlite3.Connection) -> None:
    """Add the column for checksums to the tables of a history file that an older version created."""
    for table in ("running", "ended"):
        if all(name != "checksum" for _, name, *_ in db.execute(f"PRAGMA table_info({table})")):
            db.execute(f"ALTER TABLE {table} ADD COLUMN {CHECKSUM_COLUMN}")


def check_version(db: sqlite3.Connection) -> None:
    """Raise UnusableFile unless the file is a history file of format version 1."""
    if pragma_number(db, "application_id") != APPLICATION_ID:
        raise UnusableFile("file is not a history file of drahealth", FOREIGN_FILE)
    version = pragma_number(db, "user_version")
    if version > VERSION:
        raise UnusableFile(
            f"history file has format version {version}, this agent reads up to {VERSION}; update the agent",
            NEWER_VERSION,
        )
    if version != VERSION:
        raise UnusableFile(f"history file has the unknown format version {version}")


def pragma_number(db: sqlite3.Connection, pragma: str) -> int:
    """Return the value of a numeric SQLite pragma. Raises UnusableFile if it is no number."""
    return _first_number(db, f"PRAGMA {pragma}", int)


def _first_number(db: sqlite3.Connection, query: str, kind: Callable[[Any], Number]) -> Number:
    try:
        return kind(db.execute(query).fetchone()[0] or 0)
    except (ValueError, TypeError, OverflowError) as error:
        raise UnusableFile(f"history file cannot be parsed: query {query}: {error}") from None


def last_write_s(db: sqlite3.Connection) -> float:
    """Return the time of the agent's last write to the history file [s since 1970]; 0: never."""
    return _first_number(db, "SELECT max(left_s) FROM agent", float)


def describe_sqlite_error(error: sqlite3.Error) -> str:
    """Return the message and error name of an SQLite error."""
    return f"{error} ({getattr(error, 'sqlite_errorname', 'no SQLite error')})"


# --- tables of verdicts ------------------------------------------------------------------------------------

_PERIOD_COLUMNS: Final = (
    "id TEXT NOT NULL UNIQUE",
    "boot_id TEXT NOT NULL",
    "began_boot_s REAL NOT NULL",
    "lasted_s REAL NOT NULL",
    "ended_s REAL NOT NULL",
    "checksum INTEGER NOT NULL",
)
_CHANGE_COLUMNS: Final = (
    "id TEXT NOT NULL UNIQUE",
    "period TEXT NOT NULL",
    "in_period INTEGER NOT NULL",
    *(f"device_{name} TEXT NOT NULL" for name in DeviceRef._fields),
    "before TEXT NOT NULL",
    "state TEXT NOT NULL",
    "causes TEXT NOT NULL",
    "at_s REAL NOT NULL",
    "offset_s REAL NOT NULL",
    "checksum INTEGER NOT NULL",
)
CREATE_STATEMENTS: Final = (
    f"CREATE TABLE IF NOT EXISTS observed (number INTEGER PRIMARY KEY, {', '.join(_PERIOD_COLUMNS)})",
    f"CREATE TABLE IF NOT EXISTS verdicts (number INTEGER PRIMARY KEY, {', '.join(_CHANGE_COLUMNS)})",
)
_INSERT_PERIOD: Final = insert_statement("observed", _PERIOD_COLUMNS)
_INSERT_NEW_PERIOD: Final = _INSERT_PERIOD.partition(" DO UPDATE")[0] + " DO NOTHING"
_INSERT_CHANGE: Final = insert_statement("verdicts", _CHANGE_COLUMNS)

_BY_DEVICE: Final = ", ".join(f"device_{name}" for name in DeviceRef._fields)
_OLDEST_NEEDED: Final = f"SELECT max(number) FROM verdicts WHERE {{older}} GROUP BY {_BY_DEVICE}"
"""SQL query of the old changes that must not be deleted: each device's newest before the limit."""
_DELETE_CHANGES: Final = (
    f"DELETE FROM verdicts WHERE {{older}} AND (state = '{RecordedState.ABSENT}' "
    f"OR number NOT IN ({_OLDEST_NEEDED}))"
)
_DELETE_PERIODS: Final = (
    "DELETE FROM observed WHERE {old} AND id NOT IN "
    "(SELECT period FROM verdicts WHERE before != '' AND NOT ({older}))"
)
"""SQL statement that keeps the periods of changes within the limit, except of first records of devices."""


def create_verdict_tables(db: sqlite3.Connection) -> None:
    """Create the tables of the verdict history in a history file that does not have them."""
    for statement in CREATE_STATEMENTS:
        db.execute(statement)


def has_verdict_tables(db: sqlite3.Connection) -> bool:
    """Return whether a history file has the tables of the verdict history."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('observed', 'verdicts')"
    (found,) = db.execute(query).fetchone()
    return bool(found)


def insert_verdicts(
    db: sqlite3.Connection, periods: Iterable[ObservedPeriod], changes: Iterable[VerdictChange]
) -> None:
    """Insert or update changes of verdicts, and the periods in which an agent observed the devices.

    A change that the file has already is not inserted twice.
    """
    db.executemany(_INSERT_PERIOD, ((*period, row_checksum(period)) for period in periods))
    db.executemany(_INSERT_CHANGE, map(_row_from_change, changes))


def insert_new_periods(db: sqlite3.Connection, periods: Iterable[ObservedPeriod]) -> None:
    """Insert the starts of the periods that the file does not have; the others stay as they are."""
    starts = (period._replace(lasted_s=0.0, ended_s=period.ended_s - period.lasted_s) for period in periods)
    db.executemany(_INSERT_NEW_PERIOD, ((*period, row_checksum(period)) for period in starts))


def delete_verdicts_by_count(db: sqlite3.Connection, rows: int) -> None:
    """Delete the oldest changes of verdicts, and periods, beyond the newest `rows`.

    The newest change of each present device stays, and so do the periods of the newest `rows` changes.
    """
    newest = "(SELECT max(number) FROM {table})"
    older = f"number <= {newest.format(table='verdicts')} - {rows:d}"
    if db.execute(f"SELECT count(*) FROM verdicts WHERE {older}").fetchone()[0]:
        db.execute(_DELETE_CHANGES.format(older=older))
    old = f"number <= {newest.format(table='observed')} - {rows:d}"
    db.execute(_DELETE_PERIODS.format(old=old, older=older))


def delete_verdicts_by_age(db: sqlite3.Connection, oldest_s: float, now_s: float) -> None:
    """Delete changes of verdicts, and periods without later changes, from before `oldest_s` [s since 1970].

    The newest change of each present device before that time stays, because it shows the state at that time.
    A change whose clock was behind is not old if it is after `oldest_s` by the end of its period, or if a
    period before its own ended between `oldest_s` and `now_s`.
    """
    first = f"(SELECT min(number) FROM observed WHERE ended_s BETWEEN {oldest_s!r} AND {now_s!r})"
    is_newer = f"ended_s - lasted_s + offset_s >= {oldest_s!r} OR observed.number > {first}"
    newer = f"SELECT 1 FROM observed WHERE id = period AND ({is_newer})"
    older = f"at_s < {oldest_s!r} AND NOT EXISTS ({newer})"
    db.execute(_DELETE_CHANGES.format(older=older))
    old = f"ended_s < {oldest_s!r} AND number < {first}"
    db.execute(_DELETE_PERIODS.format(old=old, older=older))


def delete_oldest_verdicts(db: sqlite3.Connection) -> int:
    """Delete the oldest tenth of the changes of verdicts; return how many were deleted.

    The function deletes more than a tenth if each change of that tenth is the present state of a device.
    """
    if not has_verdict_tables(db):
        return 0
    newest, oldest = "(SELECT max(number) FROM verdicts)", "(SELECT min(number) FROM verdicts)"
    for part in (10, 2, 1):
        older = f"number <= {oldest} + ({newest} - {oldest}) / {part}"
        if deleted := db.execute(_DELETE_CHANGES.format(older=older)).rowcount:
            return deleted
    return 0


def select_verdicts(db: sqlite3.Connection) -> StoredVerdicts:
    """Return the verdict history in a history file. Raises UnusableFile if a row is damaged."""
    if not has_verdict_tables(db):
        return StoredVerdicts()
    try:
        return StoredVerdicts(
            tuple(_periods(db.execute("SELECT * FROM observed ORDER BY number"))),
            tuple(_changes(db.execute("SELECT * FROM verdicts ORDER BY number"))),
        )
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise UnusableFile(f"history file cannot be parsed: {error}") from None


def _row_from_change(change: VerdictChange) -> tuple[object, ...]:
    causes = [
        [truncate(cause.code), int(cause.severity), truncate(cause.evidence)]
        for cause in change.verdict.causes
    ]
    values = (
        f"{change.period}-{change.number}",
        change.period,
        change.number,
        *map(truncate, change.device),
        str(change.before or ""),
        str(change.verdict.state),
        json.dumps(causes, ensure_ascii=False),
        change.at_s,
        change.offset_s,
    )
    return (*values, row_checksum(values))


def _periods(rows: Iterable[sqlite3.Row]) -> Iterator[ObservedPeriod]:
    for row in rows:
        check_row(row)
        times = (float(row[name]) for name in ("began_boot_s", "lasted_s", "ended_s"))
        yield ObservedPeriod(row["id"], row["boot_id"], *times)


def _changes(rows: Iterable[sqlite3.Row]) -> Iterator[VerdictChange]:
    for row in rows:
        check_row(row)
        yield VerdictChange(
            row["period"],
            int(row["in_period"]),
            DeviceRef(*(row[f"device_{name}"] for name in DeviceRef._fields)),
            RecordedState(row["before"]) if row["before"] else None,
            RecordedVerdict(
                RecordedState(row["state"]), tuple(_cause(*cause) for cause in json.loads(row["causes"]))
            ),
            float(row["at_s"]),
            float(row["offset_s"]),
        )


def _cause(code: str, severity: int, evidence: str) -> RecordedCause:
    return RecordedCause(code, Severity(severity), evidence)
