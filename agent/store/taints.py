"""The taints' file: JSON, replaced as a whole (:mod:`agent.store.files`).

Kept is since when each taint is published: tolerations count from there, also over a restart of the agent.
"""

from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from agent.model.claim import DeviceRef
from agent.model.taint import Taint, Taints
from agent.store import files
from agent.store.files import WALL_MAX_S, CorruptFile, WriteError, decode_json, encode_json, record

__all__ = [
    "FILE",
    "SIZE_MAX",
    "VERSION",
    "Loaded",
    "WriteError",
    "CorruptFile",
    "decode",
    "encode",
    "load",
    "save",
]

FILE: Final = "taints.json"
VERSION: Final = 1
SIZE_MAX: Final = 4 << 20
"""What 512 devices take, each with sixteen taints and all names at their longest [bytes]."""


class Loaded(NamedTuple):
    """What was found."""

    taints: Taints
    """Of tainted devices alone."""
    problem: str
    """Why there is less than was kept, with the file; empty if all is well."""


_TAINT: Final = record(Taint, added_wall_s=msgspec.Meta(ge=0, le=WALL_MAX_S))


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    driver: str
    pool: str
    device: str
    taints: Annotated[list[_TAINT], msgspec.Meta(min_length=1)]  # type: ignore[valid-type]  # made at run time


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    devices: list[_Device]


def load(path: Path) -> Loaded:
    """The taints that were kept, or none: at the first start, and with a problem if the file cannot be used.

    See :func:`agent.store.files.load` for what becomes of such a file. Raises nothing.
    """
    return Loaded(*files.load(path, SIZE_MAX, decode, Taints()))


def decode(data: bytes) -> Taints:
    """The taints that a file holds.

    Raises:
        Unusable: with the reason, and where in the file it is.
    """
    devices: dict[DeviceRef, tuple[Taint, ...]] = {}
    for one in decode_json(data, _File, VERSION).devices:
        ref = DeviceRef(one.driver, one.pool, one.device)
        if ref in devices:
            raise CorruptFile(f"has device {ref} twice")
        taints = {(taint.key, taint.value): taint for taint in map(_taint_of, one.taints)}
        if len(taints) < len(one.taints):
            raise CorruptFile(
                f"has {len(one.taints)} taints of {ref}, {len(taints)} of different key and value"
            )
        devices[ref] = tuple(taints.values())
    return Taints(devices)


def _taint_of(found: msgspec.Struct) -> Taint:
    return Taint(*msgspec.structs.astuple(found))


def encode(taints: Taints) -> bytes:
    """The file's text; devices without taints are left out."""
    devices = [
        {**ref._asdict(), "taints": [taint._asdict() for taint in tainted]}
        for ref, tainted in taints.devices.items()
        if tainted
    ]
    return encode_json({"version": VERSION, "devices": devices})


def save(path: Path, taints: Taints) -> None:
    """Replaces the file; on the disk when this returns, which can take as long as a disk takes.

    Raises:
        NotKept: The directory or the disk does not take it, with the path, the size and errno; or it is
            larger than a file may be.
    """
    files.replace(path, encode(taints), SIZE_MAX)
