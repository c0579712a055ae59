"""State file of the published taints of devices, with the time since which each taint is published.

The time survives an agent restart, because tolerationSeconds counts from it.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec.structs import astuple

from agent.model.claim import DeviceRef
from agent.model.taint import Taint, Taints
from agent.store import state_files
from agent.store.state_files import (
    WALL_MAX_S,
    UnusableFile,
    decode_json,
    encode_json,
    struct_type_of,
)

FILE: Final = "taints.json"
VERSION: Final = 1
SIZE_MAX: Final = 4 << 20
"""Largest accepted state file of taints [bytes]: room for 512 devices with sixteen taints each."""


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
    """Load the taints of devices and the problem of the file; empty: no problem. Raises nothing."""
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
