"""A use as a row of the history's tables, and back. What the tables are for is agent.store.history's."""

import sqlite3
from collections.abc import Iterable
from typing import Final

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import Origin, PodRef
from agent.model.health import Health, Severity
from agent.model.time import Instant
from agent.model.uses import DeviceState, DeviceUsage, Ending, UsageEnd

TEXT_MAX: Final = 512
"""Longer texts are cut: a row is to have an end [characters]."""

_STATE: Final = ("health", "severity", "code", "evidence", "since_s")
_COMMON: Final = (
    "id TEXT NOT NULL UNIQUE",
    *(f"pod_{name} TEXT NOT NULL" for name in PodRef._fields),
    *(f"claim_{name} TEXT NOT NULL" for name in ClaimRef._fields),
    *(f"device_{name} TEXT NOT NULL" for name in DeviceRef._fields),
    "began_s REAL NOT NULL",
    "before INTEGER NOT NULL",
    *(f"{which}_{name} NOT NULL" for which in ("state", "worst") for name in _STATE),
    *(f"{name} TEXT NOT NULL" for name in ("told_by", "requests", "containers", "owner", "maybe")),
)
_ENDED: Final = (
    "ending TEXT NOT NULL",
    "seen_s REAL NOT NULL",
    "noticed_s REAL NOT NULL",
    "lasted_s REAL NOT NULL",
)

SCHEMA: Final = (
    "CREATE TABLE agent (left_s REAL NOT NULL)",
    "INSERT INTO agent VALUES (0)",
    f"CREATE TABLE running (number INTEGER PRIMARY KEY, {', '.join(_COMMON)})",
    f"CREATE TABLE ended (number INTEGER PRIMARY KEY, {', '.join((*_COMMON, *_ENDED))})",
)
"""Of version 1. Rows are numbered as they come: the wall clock can be set, so it orders nothing."""


def _insert(table: str, columns: Iterable[str]) -> str:
    """A row, or the newest of the one that has its id."""
    names = [column.partition(" ")[0] for column in columns]
    values = ", ".join("?" * len(names))
    newest = ", ".join(f"{name} = excluded.{name}" for name in names)
    return (
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values}) ON CONFLICT (id) DO UPDATE SET {newest}"
    )


INSERT_RUNNING: Final = _insert("running", _COMMON)
INSERT_ENDED: Final = _insert("ended", (*_COMMON, *_ENDED))


def row_of(use: DeviceUsage) -> tuple[object, ...]:
    """The values of :data:`INSERT_RUNNING`, or of :data:`INSERT_ENDED` if it has ended."""
    values = (
        use.id,
        *use.pod,
        *use.claim,
        *use.device,
        use.began.wall_s,
        use.before,
        *use.state,
        *use.worst,
        " ".join(use.told_by),
        " ".join(use.requests),
        " ".join(use.containers),
        use.owner,
        " ".join(use.maybe),
        *(use.ended or ()),
    )
    return tuple(_text(value) if isinstance(value, str) else value for value in values)


def _text(text: str) -> str:
    return text[:TEXT_MAX].encode(errors="replace").decode()  # SQLite takes no half of a surrogate pair


def use_of(row: sqlite3.Row) -> DeviceUsage:
    """The use that a row of either table has.

    Raises:
        ValueError, TypeError: Nobody writes such a row.
    """
    told_by = tuple(map(Origin, row["told_by"].split()))
    if not told_by:
        raise ValueError("nobody told of it")
    return DeviceUsage(
        id=row["id"],
        pod=PodRef(*(row[f"pod_{name}"] for name in PodRef._fields)),
        claim=ClaimRef(*(row[f"claim_{name}"] for name in ClaimRef._fields)),
        device=DeviceRef(*(row[f"device_{name}"] for name in DeviceRef._fields)),
        began=Instant(0, float(row["began_s"])),
        before=bool(row["before"]),
        state=_state(row, "state"),
        worst=_state(row, "worst"),
        told_by=told_by,
        requests=tuple(row["requests"].split()),
        containers=tuple(row["containers"].split()),
        owner=row["owner"],
        maybe=tuple(row["maybe"].split()),
        resumed=True,
        ended=_ended(row) if "ending" in row.keys() else None,  # noqa: SIM118  # a row is no mapping
    )


def _state(row: sqlite3.Row, which: str) -> DeviceState:
    health, severity, code, evidence, since_s = (row[f"{which}_{name}"] for name in _STATE)
    return DeviceState(Health(health), Severity(severity), code, evidence, float(since_s))


def _ended(row: sqlite3.Row) -> UsageEnd:
    times = (float(row[name]) for name in ("seen_s", "noticed_s", "lasted_s"))
    return UsageEnd(Ending(row["ending"]), *times)
