"""The file of a driver's prepares: how the last one of each claim ended, and which devices it found broken.

Two instances of a driver have the same file while one takes the other's place: each reads, merges and
replaces it under a lock. What is remembered, and for how long, is agent.prepare.ledger's.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import Health
from agent.model.prepare import DriverFault, ErrorClass, Outcome, PrepareVerdict, Remediation, Scope
from agent.model.taint import Effect
from agent.prepare.driver_faults import DriverFaults
from agent.prepare.ledger import LedgerEntry, PrepareLedger, merge
from agent.store import files
from agent.store.files import WALL_MAX_S, CorruptFile, WriteError
from agent.system.flock import unlock

FILE: Final = "prepares.json"
LOCK: Final = "prepares.lock"
VERSION: Final = 1
SIZE_MAX: Final = 4 << 20
"""A thousand claims of eight devices each; of more, the oldest are left out [bytes]."""


class Prepares(NamedTuple):
    """What a file holds."""

    driver: str
    version: str
    """Of the driver that wrote it last."""
    book: PrepareLedger


# --- reading -----------------------------------------------------------------------------------------------


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    namespace: str
    name: str
    uid: str


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    driver: str
    pool: str
    device: str


class _Taint(msgspec.Struct, forbid_unknown_fields=True):
    effect: Effect
    value: str


_Natural = Annotated[int, Meta(ge=0)]
_Time = Annotated[float, Meta(ge=0, le=WALL_MAX_S)]


class _Verdict(msgspec.Struct, forbid_unknown_fields=True):
    error_class: ErrorClass
    code: str
    scope: Scope
    summary: str
    requests: tuple[str, ...]
    devices: tuple[_Device, ...]
    detail: str
    evidence: tuple[str, ...]
    confidence: float
    advice: str
    retry_after_s: float | None
    sticky_s: _Natural
    health: Health | None
    taint: _Taint | None
    first_wall_s: _Time
    last_wall_s: _Time
    count: Annotated[int, Meta(ge=1)]


class _Outcome(msgspec.Struct, forbid_unknown_fields=True):
    claim: _Claim
    fingerprint: str
    generation: str
    devices: tuple[_Device, ...]
    at_wall_s: _Time
    version: str
    over_wall_s: _Time
    verdict: _Verdict | None


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1)]
    device: _Device
    code: str
    evidence: str
    advice: str
    told_wall_s: _Time
    claim: _Claim
    excused_wall_s: _Time
    health: Literal[0, 2]  # UNKNOWN, UNHEALTHY
    keep_away: bool


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    driver: str
    driver_version: str
    next_number: Annotated[int, Meta(ge=1)]
    outcomes: list[_Outcome]
    told: list[_Told]


def decode(data: bytes) -> Prepares:
    """What a file holds.

    Raises:
        Unusable: with the reason, and where in the file it is.
    """
    file = files.decode_json(data, _File, VERSION)
    claims = {one.claim.uid: _kept(one) for one in file.outcomes}
    if len(claims) < len(file.outcomes):
        raise CorruptFile(f"has {len(file.outcomes)} outcomes of {len(claims)} claims")
    told = tuple(_fault(one) for one in file.told)
    numbers = {fault.number for fault in told}
    if len(numbers) < len(told) or any(number >= file.next_number for number in numbers):
        raise CorruptFile(
            f"has {len(told)} told faults of numbers {sorted(numbers)}, next {file.next_number}"
        )
    return Prepares(
        file.driver, file.driver_version, PrepareLedger(claims, DriverFaults(told, file.next_number))
    )


def _kept(one: _Outcome) -> LedgerEntry:
    claim = _ref(one.claim)
    verdict = _verdict(one.verdict, claim) if one.verdict else None
    outcome = Outcome(claim, one.fingerprint, one.generation, _devices(one.devices), one.at_wall_s, verdict)
    return LedgerEntry(outcome, one.version, one.over_wall_s)


def _verdict(one: _Verdict, claim: ClaimRef) -> PrepareVerdict:
    given = msgspec.structs.asdict(one)
    taint = Remediation(one.taint.effect, one.taint.value) if one.taint else None
    return PrepareVerdict(**{**given, "claim": claim, "devices": _devices(one.devices), "taint": taint})


def _fault(one: _Told) -> DriverFault:
    given = msgspec.structs.asdict(one)
    given |= {"device": _device(one.device), "claim": _ref(one.claim), "health": Health(one.health)}
    return DriverFault(**given)


def _ref(one: _Claim) -> ClaimRef:
    return ClaimRef(one.namespace, one.name, one.uid)


def _device(one: _Device) -> DeviceRef:
    return DeviceRef(one.driver, one.pool, one.device)


def _devices(some: Iterable[_Device]) -> tuple[DeviceRef, ...]:
    return tuple(map(_device, some))


def load(directory: Path, driver: str) -> tuple[PrepareLedger, str]:
    """What a driver remembers, or an empty book: at the first start, and with a problem if the file cannot be
    used, see :func:`agent.store.files.load`."""

    def of_driver(data: bytes) -> PrepareLedger:
        found = decode(data)
        if found.driver != driver:
            raise CorruptFile(f"is of driver {found.driver!r}, not of {driver!r}")
        return found.book

    return files.load(directory / FILE, SIZE_MAX, of_driver, PrepareLedger())


# --- writing -----------------------------------------------------------------------------------------------


def encode(prepares: Prepares) -> bytes:
    """The file's text, without the oldest outcomes if all of them are more than a file may hold."""
    book = prepares.book
    kept = sorted(book.claims.values(), key=lambda one: one.at_wall_s, reverse=True)
    while True:
        data = _encode(
            {
                "version": VERSION,
                "driver": prepares.driver,
                "driver_version": prepares.version,
                "next_number": book.told.next_number,
                "outcomes": [_outcome_document(one) for one in kept],
                "told": [_told_document(fault) for fault in book.told.faults],
            }
        )
        if len(data) <= SIZE_MAX or not kept:
            return data
        kept = kept[: len(kept) * SIZE_MAX // len(data) * 9 // 10]


def _outcome_document(kept: LedgerEntry) -> dict[str, Any]:
    outcome = kept.outcome
    verdict = outcome.verdict
    return {
        **outcome._asdict(),
        "claim": outcome.claim._asdict(),
        "devices": [device._asdict() for device in outcome.devices],
        "version": kept.version,
        "over_wall_s": kept.over_wall_s,
        "verdict": verdict and _verdict_document(verdict),
    }


def _verdict_document(verdict: PrepareVerdict) -> dict[str, Any]:
    document = {name: getattr(verdict, name) for name in _Verdict.__struct_fields__}
    document["devices"] = [device._asdict() for device in verdict.devices]
    document["taint"] = verdict.taint and verdict.taint._asdict()
    return document


def _told_document(fault: DriverFault) -> dict[str, Any]:
    return {**fault._asdict(), "device": fault.device._asdict(), "claim": fault.claim._asdict()}


def _encode(document: dict[str, Any]) -> bytes:
    """A driver's texts may have come from anywhere; only if UTF-8 cannot hold one is each looked at."""
    try:
        return files.encode_json(document)
    except UnicodeEncodeError:
        return files.encode_json(_clean(document))


def _clean(value: Any) -> Any:
    """The same with texts that UTF-8 can hold."""
    match value:
        case str():
            return str(value).encode("utf-8", "replace").decode()
        case dict():
            return {key: _clean(one) for key, one in value.items()}
        case list() | tuple():
            return [_clean(one) for one in value]
        case _:
            return value


def save(
    directory: Path, driver: str, version: str, book: PrepareLedger, now_wall_s: float
) -> tuple[PrepareLedger, str]:
    """Merges what is remembered into the file; on the disk when this returns.

    Takes as long as a disk takes, and waits for another instance that is at it.

    Returns:
        What the file holds now, and why what it held was not usable, if it was not.

    Raises:
        NotKept: The directory or the disk does not take it; the file is what it was before.
    """
    path = directory / FILE
    try:
        files.make_directory(directory)
        with _locked(directory / LOCK):
            theirs, problem = load(directory, driver)
            merged = merge(book, theirs, now_wall_s)
            files.replace(path, encode(Prepares(driver, version, merged)), SIZE_MAX)
    except OSError as error:
        size = len(encode(Prepares(driver, version, book)))
        raise WriteError(path, size, error.errno or 0, error.strerror or str(error)) from None
    return merged, problem


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else's instance writes meanwhile. The kernel frees the lock of whoever is killed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        unlock(fd)
