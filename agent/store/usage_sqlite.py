"""Tables of device uses in the history file: schema, conversion of rows."""

import sqlite3
from typing import Final

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.device_usage import DeviceState, PodDeviceUsage, UsageEnd, UsageEndKind
from agent.model.health import Health, Severity
from agent.model.time import Instant
from agent.store.history_sqlite import (
    APPLICATION_ID,
    CHECKSUM_COLUMN,
    VERSION,
    check_row,
    insert_statement,
    pragma_number,
    row_checksum,
    truncate,
)
from agent.store.state_files import UnusableFile

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

_RUNNING_COLUMNS: Final = (*_COMMON, CHECKSUM_COLUMN)
_ENDED_COLUMNS: Final = (*_COMMON, *_ENDED, CHECKSUM_COLUMN)

SCHEMA_STATEMENTS: Final = (
    "CREATE TABLE agent (left_s REAL NOT NULL)",
    "INSERT INTO agent VALUES (0)",
    f"CREATE TABLE running (number INTEGER PRIMARY KEY, {', '.join(_RUNNING_COLUMNS)})",
    f"CREATE TABLE ended (number INTEGER PRIMARY KEY, {', '.join(_ENDED_COLUMNS)})",
)
"""SQL statements that create the tables of device uses, format version 1.

Rows are ordered by number, because the wall clock can be set back.
"""


INSERT_RUNNING: Final = insert_statement("running", _RUNNING_COLUMNS)
INSERT_ENDED: Final = insert_statement("ended", _ENDED_COLUMNS)


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of device uses in an empty history file, in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    if not pragma_number(db, "application_id") and not pragma_number(db, "schema_version"):
        for statement in SCHEMA_STATEMENTS:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def row_from_use(use: PodDeviceUsage) -> tuple[object, ...]:
    """Convert a device use to a row: the values of :data:`INSERT_RUNNING`, or of INSERT_ENDED if the use has
    ended."""
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
    stored = tuple(truncate(value) if isinstance(value, str) else value for value in values)
    return (*stored, row_checksum(stored))


def use_from_row(row: sqlite3.Row) -> PodDeviceUsage:
    """Convert a row of running or ended uses to a device use. Raises ValueError, TypeError if damaged."""
    check_row(row)
    sources = tuple(map(Origin, row["told_by"].split()))
    if not sources:
        raise ValueError("a row of the table of uses has no source")
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


def check_ended_rows(db: sqlite3.Connection) -> None:
    """Raise UnusableFile if the checksum of an ended device use in the history file is wrong."""
    try:
        for row in db.execute("SELECT * FROM ended"):
            check_row(row)
    except (ValueError, TypeError) as error:
        raise UnusableFile(f"history file cannot be parsed: {error}") from None


def _state_from_row(row: sqlite3.Row, prefix: str) -> DeviceState:
    health, severity, code, evidence, since_s = (row[f"{prefix}_{name}"] for name in _STATE)
    return DeviceState(Health(health), Severity(severity), code, evidence, float(since_s))


def _end_from_row(row: sqlite3.Row) -> UsageEnd:
    times = (float(row[name]) for name in ("seen_s", "noticed_s", "lasted_s"))
    return UsageEnd(UsageEndKind(row["ending"]), *times)


def select_uses(db: sqlite3.Connection, query: str, *values: object) -> tuple[PodDeviceUsage, ...]:
    """Return the device uses in the rows that a query selects.

    Raises UnusableFile if a row cannot be converted.
    """
    try:
        return tuple(use_from_row(row) for row in db.execute(query, values))
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UnusableFile(f"history file cannot be parsed: {error}") from None
