"""State files of a driver: the ledger of its prepares, and the taints that it publishes.

The ledger has the last result of each claim, and driver-reported faults. Two instances of a driver share the
file during a rolling update: each reads, merges and replaces it under a lock.

The taints have the time since which each is published. The time survives an agent restart, because
tolerationSeconds counts from it.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, astuple

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Effect, Health, Repair, Taint, Taints
from agent.model.prepare import DriverFault, ErrorClass, FaultTaint, LastPrepareResult, PrepareVerdict, Scope
from agent.model.time import WALL_MAX_S
from agent.prepare.prepare_ledger import DriverFaults, LedgerEntry, PrepareLedger, merge_ledgers
from agent.store import state_files
from agent.store.state_files import (
    StateWriteError,
    UnusableFile,
    decode_json,
    encode_json,
    struct_type_of,
)
from agent.system.files import CheckedDirectory, ReadError, make_directory, unlock_and_close

LEDGER_FILE: Final = "prepares.json"
LOCK: Final = "prepares.lock"
VERSION: Final = 1
SIZE_MAX: Final = 4 << 20
"""Largest accepted ledger file [bytes]: room for a thousand claims of eight devices each."""


class LedgerFileContent(NamedTuple):
    """Content of a prepare ledger's state file."""

    driver: str
    version: str
    """Version of the driver that wrote the file."""
    ledger: PrepareLedger


class _ClaimRow(msgspec.Struct):
    namespace: str
    name: str
    uid: str


class _DeviceRow(msgspec.Struct):
    driver: str
    pool: str
    device: str


class _TaintRow(msgspec.Struct):
    effect: Effect
    value: str


_Natural = Annotated[int, Meta(ge=0)]
_Time = Annotated[float, Meta(ge=0, le=WALL_MAX_S)]


class _VerdictRow(msgspec.Struct, omit_defaults=True):
    error_class: ErrorClass
    code: str
    scope: Scope
    summary: str
    requests: tuple[str, ...]
    devices: tuple[_DeviceRow, ...]
    detail: str
    evidence: tuple[str, ...]
    confidence: float
    advice: str
    retry_after_s: float | None
    sticky_s: _Natural
    health: Health | None
    taint: _TaintRow | None
    first_wall_s: _Time
    last_wall_s: _Time
    count: Annotated[int, Meta(ge=1)]
    repair: Repair = Repair.NONE
    request_devices: _Natural = 0


class _EntryRow(msgspec.Struct, rename={"unprepared_wall_s": "over_wall_s"}):
    claim: _ClaimRow
    fingerprint: str
    generation: str
    devices: tuple[_DeviceRow, ...]
    at_wall_s: _Time
    verdict: _VerdictRow | None
    version: str
    unprepared_wall_s: _Time


class _FaultRow(
    msgspec.Struct,
    omit_defaults=True,
    rename={"reported_wall_s": "told_wall_s", "expired_wall_s": "excused_wall_s"},
):
    number: Annotated[int, Meta(ge=1)]
    device: _DeviceRow
    code: str
    evidence: str
    advice: str
    reported_wall_s: _Time
    claim: _ClaimRow
    expired_wall_s: _Time
    health: Literal[0, 2]  # UNKNOWN, UNHEALTHY
    keep_away: bool
    repair: Repair = Repair.NONE


class _PreparesFile(msgspec.Struct, rename={"entries": "outcomes", "faults": "told"}):
    version: int
    driver: str
    driver_version: str
    next_number: Annotated[int, Meta(ge=1)]
    entries: list[_EntryRow]
    faults: list[_FaultRow]


def decode_ledger(data: bytes) -> LedgerFileContent:
    """Decode the content of the prepare ledger's state file.

    Raises:
        UnusableFile: The content is not valid; the text has the reason and the JSON path.
    """
    file = state_files.decode_json(data, _PreparesFile, VERSION)
    claims = {found.claim.uid: _to_entry(found) for found in file.entries}
    if len(claims) < len(file.entries):
        raise UnusableFile(
            f"prepare ledger has {len(file.entries)} results of only {len(claims)} different claims"
        )
    faults = tuple(map(_to_fault, file.faults))
    numbers = {fault.number for fault in faults}
    if len(numbers) < len(faults) or any(number >= file.next_number for number in numbers):
        raise UnusableFile(
            f"prepare ledger has {len(faults)} driver faults with the numbers {sorted(numbers)}: not unique, "
            f"or not below the next number {file.next_number}"
        )
    ledger = PrepareLedger(claims, DriverFaults(faults, file.next_number))
    return LedgerFileContent(file.driver, file.driver_version, ledger)


def _to_entry(found: _EntryRow) -> LedgerEntry:
    claim = ClaimRef(*astuple(found.claim))
    verdict = _to_verdict(found.verdict, claim) if found.verdict else None
    devices = _to_devices(found.devices)
    outcome = LastPrepareResult(claim, found.fingerprint, found.generation, devices, found.at_wall_s, verdict)
    return LedgerEntry(outcome, found.version, found.unprepared_wall_s)


def _to_verdict(found: _VerdictRow, claim: ClaimRef) -> PrepareVerdict:
    taint = FaultTaint(*astuple(found.taint)) if found.taint else None
    values = asdict(found) | {"claim": claim, "devices": _to_devices(found.devices), "taint": taint}
    return PrepareVerdict(**values)


def _to_fault(found: _FaultRow) -> DriverFault:
    device, claim = DeviceRef(*astuple(found.device)), ClaimRef(*astuple(found.claim))
    return DriverFault(**asdict(found) | {"device": device, "claim": claim, "health": Health(found.health)})


def _to_devices(found: Iterable[_DeviceRow]) -> tuple[DeviceRef, ...]:
    return tuple(DeviceRef(*astuple(device)) for device in found)


def load_ledger(directory: Path, driver: str) -> tuple[PrepareLedger, str]:
    """Load the prepare ledger of a driver from its state file, and return the problem of the file as text.

    Empty text: no problem. Raises nothing.
    """
    path, decode = directory / LEDGER_FILE, partial(_decode_ledger_of, driver)
    return state_files.load_state_file(path, SIZE_MAX, decode, PrepareLedger())


def _decode_ledger_of(driver: str, data: bytes) -> PrepareLedger:
    found = decode_ledger(data)
    if found.driver != driver:
        raise UnusableFile(f"prepare ledger belongs to driver {found.driver!r}, not to {driver!r}")
    return found.ledger


def encode_ledger(prepares: LedgerFileContent) -> bytes:
    """Encode a prepare ledger as its state file; drops the oldest claims if it would be too large."""
    ledger = prepares.ledger
    newest_first = sorted(ledger.claims.values(), key=lambda entry: entry.changed_wall_s, reverse=True)
    entries = list(map(_from_entry, newest_first))
    faults = list(map(_from_fault, ledger.driver_faults.faults))
    while True:
        file = _PreparesFile(
            VERSION, prepares.driver, prepares.version, ledger.driver_faults.next_number, entries, faults
        )
        data = _encode(file)
        if len(data) <= SIZE_MAX or not entries:
            return data
        entries = entries[: len(entries) * SIZE_MAX // len(data) * 9 // 10]


def _from_entry(entry: LedgerEntry) -> _EntryRow:
    outcome = entry.outcome
    return _EntryRow(
        claim=_ClaimRow(*outcome.claim),
        fingerprint=outcome.fingerprint,
        generation=outcome.generation,
        devices=_from_devices(outcome.devices),
        at_wall_s=outcome.at_wall_s,
        verdict=_from_verdict(outcome.verdict) if outcome.verdict else None,
        version=entry.driver_version,
        unprepared_wall_s=entry.unprepared_wall_s,
    )


def _from_verdict(verdict: PrepareVerdict) -> _VerdictRow:
    values = {name: getattr(verdict, name) for name in _VerdictRow.__struct_fields__}
    taint = verdict.taint and _TaintRow(*verdict.taint)
    return _VerdictRow(**values | {"devices": _from_devices(verdict.devices), "taint": taint})


def _from_fault(fault: DriverFault) -> _FaultRow:
    rows = {"device": _DeviceRow(*fault.device), "claim": _ClaimRow(*fault.claim)}
    return _FaultRow(**fault._asdict() | rows)


def _from_devices(devices: Iterable[DeviceRef]) -> tuple[_DeviceRow, ...]:
    return tuple(_DeviceRow(*device) for device in devices)


def _encode(file: _PreparesFile) -> bytes:
    """Encode the content of a ledger's state file as JSON.

    Surrogates in a driver's texts, which UTF-8 refuses, are replaced.
    """
    try:
        return state_files.encode_json(file)
    except UnicodeEncodeError:
        return state_files.encode_json(_encodable(msgspec.to_builtins(file)))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return str(value).encode("utf-8", "replace").decode()
        case dict():
            return {key: _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
        case _:
            return value


def save_ledger(
    directory: Path, driver: str, version: str, ledger: PrepareLedger, now_wall_s: float
) -> tuple[PrepareLedger, str]:
    """Merge a prepare ledger into the driver's state file. Blocks on the disk and on the file's lock.

    Returns:
        The merged ledger, and the problem of the previous file; empty: no problem.

    Raises:
        StateWriteError: The directory or the disk refuses the write, or the file cannot be read, so that a
            write would lose entries of other instances; the file is unchanged.
    """
    path = directory / LEDGER_FILE
    try:
        make_directory(directory)
        with _lock_file(directory / LOCK):
            stored, problem = state_files.read_state_file(
                path, SIZE_MAX, partial(_decode_ledger_of, driver), PrepareLedger()
            )
            merged = merge_ledgers(ledger, stored, now_wall_s)
            state_files.replace_file(
                path, encode_ledger(LedgerFileContent(driver, version, merged)), SIZE_MAX
            )
    except (OSError, ReadError) as error:
        size = len(encode_ledger(LedgerFileContent(driver, version, ledger)))
        reason = error.reason if isinstance(error, ReadError) else error.strerror or str(error)
        raise StateWriteError(path, size, error.errno or 0, reason) from None
    return merged, problem


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of a driver's ledger file in a ``with`` block, so that other instances wait.

    The kernel releases the lock at process exit.
    """
    with CheckedDirectory(path.parent) as directory:
        fd = directory.open(path.name, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        unlock_and_close(fd)


TAINTS_FILE: Final = "taints.json"


# --- taints ------------------------------------------------------------------------------------------------

_TAINT: Final = struct_type_of(Taint, added_wall_s=msgspec.Meta(ge=0, le=WALL_MAX_S))


class _TaintedDeviceRow(msgspec.Struct):
    driver: str
    pool: str
    device: str
    taints: Annotated[list[_TAINT], msgspec.Meta(min_length=1)]  # type: ignore[valid-type]  # made at run time


class _TaintsFile(msgspec.Struct):
    version: int
    devices: list[_TaintedDeviceRow]


def load_taints(path: Path) -> tuple[Taints, str]:
    """Load the taints of devices from the state file, and return the problem of the file as text.

    Empty text: no problem. Raises nothing.
    """
    return state_files.load_state_file(path, SIZE_MAX, decode_taints, Taints())


def decode_taints(data: bytes) -> Taints:
    """Decode the taints from the content of the state file.

    Raises:
        UnusableFile: The content is not valid; the text has the reason and the JSON path.
    """
    devices: dict[DeviceRef, tuple[Taint, ...]] = {}
    for found in decode_json(data, _TaintsFile, VERSION).devices:
        ref = DeviceRef(found.driver, found.pool, found.device)
        if ref in devices:
            raise UnusableFile(f"taint file has device {ref} twice")
        taints = {(taint.key, taint.value): taint for taint in (Taint(*astuple(row)) for row in found.taints)}
        if len(taints) < len(found.taints):
            raise UnusableFile(
                f"taint file has {len(found.taints)} taints of device {ref}, but only {len(taints)} with "
                "different key and value"
            )
        devices[ref] = tuple(taints.values())
    return Taints(devices)


def encode_taints(taints: Taints) -> bytes:
    """Encode taints as the content of the state file; devices without taints are left out."""
    devices = [
        {**ref._asdict(), "taints": [taint._asdict() for taint in tainted]}
        for ref, tainted in taints.devices.items()
        if tainted
    ]
    return encode_json({"version": VERSION, "devices": devices})


def save_taints(path: Path, taints: Taints) -> None:
    """Write the state file of taints. Blocks on the disk. Raises StateWriteError."""
    state_files.replace_file(path, encode_taints(taints), SIZE_MAX)
