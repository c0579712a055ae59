"""The fault memory's file: JSON, replaced as a whole (:mod:`agent.store.files`).

What is remembered, and what follows from it, is agent.health's.
"""

from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from agent.model.faults import FaultMemory, KeptFault, KnownGpu
from agent.model.gpu import WHOLE_GPU
from agent.model.health import Severity
from agent.store import files
from agent.store.files import CorruptFile, WriteError, decode_json, encode_json, record

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

FILE: Final = "gpu-faults.json"
VERSION: Final = 1
SIZE_MAX: Final = 1 << 20
"""Hundreds of times what the faults of 32 GPUs take [bytes]."""


class Loaded(NamedTuple):
    """What was found."""

    memory: FaultMemory
    problem: str
    """Why there is less than was kept, with the file; empty if all is well."""


_NATURAL: Final = msgspec.Meta(ge=0)
_INSTANCE: Final = msgspec.Meta(ge=0, le=WHOLE_GPU)
_GPU: Final = record(KnownGpu, number=_NATURAL)
_FAULT: Final = record(
    KeptFault,
    gi=_INSTANCE,
    ci=_INSTANCE,
    times=_NATURAL,
    log_us=_NATURAL,
    severity=msgspec.Meta(ge=int(min(Severity)), le=int(max(Severity))),
)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    gpus: list[_GPU]  # type: ignore[valid-type]  # made at run time from the model's
    faults: list[_FAULT]  # type: ignore[valid-type]


def load(path: Path) -> Loaded:
    """The memory, or an empty one: at the first start, and with a problem if the file cannot be used.

    See :func:`agent.store.files.load` for what becomes of such a file. Raises nothing: an agent without a
    memory is better than none.
    """
    return Loaded(*files.load(path, SIZE_MAX, decode, FaultMemory()))


def decode(data: bytes) -> FaultMemory:
    """The memory that a file holds.

    Raises:
        Unusable: with the reason, and where in the file it is.
    """
    file = decode_json(data, _File, VERSION)
    memory = FaultMemory(
        gpus=tuple(KnownGpu(*msgspec.structs.astuple(gpu)) for gpu in file.gpus),
        faults=tuple(KeptFault(*msgspec.structs.astuple(fault)) for fault in file.faults),
    )
    numbers = [gpu.number for gpu in memory.gpus]
    for number in numbers:
        if numbers.count(number) > 1:
            raise CorruptFile(f"has {numbers.count(number)} GPUs of number {number}")
    return memory


def encode(memory: FaultMemory) -> bytes:
    """The file's text."""
    return encode_json(
        {
            "version": VERSION,
            "gpus": [gpu._asdict() for gpu in memory.gpus],
            "faults": [fault._asdict() for fault in memory.faults],
        }
    )


def save(path: Path, memory: FaultMemory) -> None:
    """Replaces the file by the memory; on the disk when this returns, which can take as long as a disk takes.

    Raises:
        NotKept: The directory or the disk does not take it, with the path, the size and errno; or it is
            larger than a file may be.
    """
    files.replace(path, encode(memory), SIZE_MAX)
