"""Tables of the verdict history in the history file: schema, conversion of rows, deletion of old rows.

The tables are created with the first verdict. Versions of the agent that do not know them ignore them.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, Final

from agent.model.claim import DeviceRef
from agent.model.health import Severity
from agent.model.verdict_history import (
    ObservedPeriod,
    RecordedCause,
    RecordedState,
    RecordedVerdict,
    StoredVerdicts,
    VerdictChange,
)
from agent.store.history_sqlite import check_row, insert_statement, row_checksum, truncate
from agent.store.state_files import UnusableFile

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
_INSERT_CHANGE: Final = insert_statement("verdicts", _CHANGE_COLUMNS)

_BY_DEVICE: Final = ", ".join(f"device_{name}" for name in DeviceRef._fields)
_OLDEST_NEEDED: Final = f"SELECT max(number) FROM verdicts WHERE {{older}} GROUP BY {_BY_DEVICE}"
"""SQL query of the old changes that must not be deleted: each device's newest before the limit."""
_DELETE_CHANGES: Final = (
    f"DELETE FROM verdicts WHERE {{older}} AND (state = '{RecordedState.ABSENT}' "
    f"OR number NOT IN ({_OLDEST_NEEDED}))"
)


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
    """Insert or update observed periods and changes of verdicts.

    A change that the file has already is not inserted twice.
    """
    db.executemany(_INSERT_PERIOD, map(_row_from_period, periods))
    db.executemany(_INSERT_CHANGE, map(_row_from_change, changes))


def delete_verdicts_by_count(db: sqlite3.Connection, rows: int) -> None:
    """Delete the oldest changes of verdicts, and periods, beyond the newest `rows`.

    The newest change of each present device stays.
    """
    newest = "(SELECT max(number) FROM {table})"
    older = f"number <= {newest.format(table='verdicts')} - {rows:d}"
    if db.execute(f"SELECT count(*) FROM verdicts WHERE {older}").fetchone()[0]:
        db.execute(_DELETE_CHANGES.format(older=older))
    db.execute(f"DELETE FROM observed WHERE number <= {newest.format(table='observed')} - {rows:d}")


def delete_verdicts_by_age(db: sqlite3.Connection, oldest_s: float) -> None:
    """Delete changes of verdicts, and periods, from before `oldest_s` [s since 1970].

    The newest change of each present device before that time stays, because it shows the state at that time.
    """
    db.execute(_DELETE_CHANGES.format(older=f"at_s < {oldest_s!r}"))
    newest = "(SELECT max(number) FROM observed)"
    db.execute(f"DELETE FROM observed WHERE ended_s < ? AND number < {newest}", (oldest_s,))


def delete_oldest_verdicts(db: sqlite3.Connection) -> int:
    """Delete the oldest tenth of the changes of verdicts; return how many were deleted.

    They are more than a tenth if each change of that tenth is the present state of a device.
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


def _row_from_period(period: ObservedPeriod) -> tuple[object, ...]:
    return (*period, row_checksum(period))


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
        times = (_time(row[name]) for name in ("began_boot_s", "lasted_s", "ended_s"))
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
                RecordedState(row["state"]), tuple(_cause(*one) for one in json.loads(row["causes"]))
            ),
            _time(row["at_s"]),
            _time(row["offset_s"]),
        )


def _cause(code: str, severity: int, evidence: str) -> RecordedCause:
    return RecordedCause(code, Severity(severity), evidence)


def _time(value: Any) -> float:
    return float(value)
