"""State file of taints: JSON, replaced as a whole (:mod:`agent.store.files`).

It keeps the time since which each taint is published: tolerations count from there, also over an agent
restart.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from agent.model.claim import DeviceRef
from agent.model.taint import Taint, Taints
from agent.store import files
from agent.store.files import WALL_MAX_S, CorruptFile, WriteError, decode_json, encode_json, struct_of

__all__ = [
    "FILE",
    "SIZE_MAX",
    "VERSION",
    "CorruptFile",
    "WriteError",
    "decode",
    "encode",
    "load",
    "save",
]

FILE: Final = "taints.json"
VERSION: Final = 1
SIZE_MAX: Final = 4 << 20
"""Size of 512 devices, each with sixteen taints and all names at their longest [bytes]."""


_TAINT: Final = struct_of(Taint, added_wall_s=msgspec.Meta(ge=0, le=WALL_MAX_S))


class _TaintedDeviceRow(msgspec.Struct, forbid_unknown_fields=True):
    driver: str
    pool: str
    device: str
    taints: Annotated[list[_TAINT], msgspec.Meta(min_length=1)]  # type: ignore[valid-type]  # made at run time


class _TaintsFile(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    devices: list[_TaintedDeviceRow]


def load(path: Path) -> tuple[Taints, str]:
    """Load the taints of devices. Returns them with the problem of the file, empty if none. Raises
    nothing."""
    return files.load(path, SIZE_MAX, decode, Taints())


def decode(data: bytes) -> Taints:
    """Decode the taints from the content of the state file.

    Raises:
        CorruptFile: The text has the reason and the place in the file.
    """
    devices: dict[DeviceRef, tuple[Taint, ...]] = {}
    for found in decode_json(data, _TaintsFile, VERSION).devices:
        ref = DeviceRef(found.driver, found.pool, found.device)
        if ref in devices:
            raise CorruptFile(f"has device {ref} twice")
        taints = {(taint.key, taint.value): taint for taint in map(_taint_of, found.taints)}
        if len(taints) < len(found.taints):
            raise CorruptFile(
                f"has {len(found.taints)} taints of {ref}, {len(taints)} of different key and value"
            )
        devices[ref] = tuple(taints.values())
    return Taints(devices)


def _taint_of(found: msgspec.Struct) -> Taint:
    return Taint(*msgspec.structs.astuple(found))


def encode(taints: Taints) -> bytes:
    """Encode taints as the content of the state file; devices without taints are left out."""
    devices = [
        {**ref._asdict(), "taints": [taint._asdict() for taint in tainted]}
        for ref, tainted in taints.devices.items()
        if tainted
    ]
    return encode_json({"version": VERSION, "devices": devices})


def save(path: Path, taints: Taints) -> None:
    """Replace the state file of taints. Blocks on the disk. Raises WriteError if the write fails."""
    files.replace_file(path, encode(taints), SIZE_MAX)
