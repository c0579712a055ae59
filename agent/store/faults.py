"""The fault memory's file: JSON, replaced as a whole, so that it is always either the old one or the new one.

A file that cannot be used is set aside under another name and told of: the agent starts without it. What is
remembered, and what follows from it, is agent.health's.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, NamedTuple, get_type_hints

import msgspec

from agent.errors import DrahealthError
from agent.model.faults import FaultMemory, KeptFault, KnownGpu
from agent.model.gpu import WHOLE_GPU
from agent.model.health import Severity

FILE: Final = "gpu-faults.json"
VERSION: Final = 1
SIZE_MAX: Final = 1 << 20
"""Hundreds of times what the faults of 32 GPUs take [bytes]."""
ASIDE_MAX: Final = 5
"""Files of one kind that are set aside; the oldest makes room."""


class NotKept(DrahealthError):
    """The memory could not be written; the file is what it was before."""

    def __init__(self, path: Path, size: int, errno: int, reason: str) -> None:
        super().__init__(f"{path}: {size} bytes could not be kept: {reason}")
        self.path = path
        self.size = size
        self.errno = errno
        """Of the system call that failed; 0 if none did."""


class Loaded(NamedTuple):
    """What was found."""

    memory: FaultMemory
    problem: str
    """Why there is less than was kept, with the file; empty if all is well."""


class Unusable(Exception):
    """Why a file cannot be used, and the word that it is set aside with."""

    def __init__(self, reason: str, kind: str = "corrupt") -> None:
        super().__init__(reason)
        self.kind = kind


def _record(of: type, **limits: object) -> type[msgspec.Struct]:
    """A named tuple of the model as an object of the file, every key given and no other."""
    fields = [
        (name, Annotated[hint, limits[name]] if name in limits else hint)
        for name, hint in get_type_hints(of).items()
    ]
    return msgspec.defstruct(of.__name__, fields, forbid_unknown_fields=True)


_NATURAL: Final = msgspec.Meta(ge=0)
_INSTANCE: Final = msgspec.Meta(ge=0, le=WHOLE_GPU)
_GPU: Final = _record(KnownGpu, number=_NATURAL)
_FAULT: Final = _record(
    KeptFault,
    gi=_INSTANCE,
    ci=_INSTANCE,
    times=_NATURAL,
    log_us=_NATURAL,
    severity=msgspec.Meta(ge=int(min(Severity)), le=int(max(Severity))),
)


class _Head(msgspec.Struct):
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    gpus: list[_GPU]  # type: ignore[valid-type]  # made at run time from the model's
    faults: list[_FAULT]  # type: ignore[valid-type]


# --- loading -----------------------------------------------------------------------------------------------


def load(path: Path) -> Loaded:
    """The memory, or an empty one: at the first start, and with a problem if the file cannot be used.

    Such a file is renamed ``<name>.corrupt-1`` to ``-5``, or ``.newer-1`` if a later version wrote it, so
    that the next save does not destroy it. Raises nothing: an agent without a memory is better than none.
    """
    try:
        return Loaded(decode(_read(path)), "")
    except FileNotFoundError:
        return Loaded(FaultMemory(), "")
    except OSError as error:
        unusable = Unusable(error.strerror or str(error))
    except Unusable as error:
        unusable = error
    try:
        fate = f"set aside as {_set_aside(path, unusable.kind)}"
    except OSError as error:
        fate = f"could not be set aside: {error.strerror}"
    return Loaded(FaultMemory(), f"{path}: {unusable}; {fate}")


def _read(path: Path) -> bytes:
    with open(path, "rb", opener=_open_to_read) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Unusable("is no regular file")
        if found.st_size > SIZE_MAX:
            raise Unusable(f"is {found.st_size} bytes, limit {SIZE_MAX}")
        return file.read(SIZE_MAX)


def _open_to_read(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block


def decode(data: bytes) -> FaultMemory:
    """The memory that a file holds.

    Raises:
        Unusable: with the reason, and where in the file it is.
    """
    try:
        version = msgspec.json.decode(data, type=_Head).version
        if version > VERSION:
            raise Unusable(f"is of version {version}, this agent reads {VERSION}", "newer")
        if version != VERSION:
            raise Unusable(f"is of version {version}, which never was")
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error)
        raise Unusable(f"is not understood: {text[:1].lower()}{text[1:]}") from None
    memory = FaultMemory(
        gpus=tuple(KnownGpu(*msgspec.structs.astuple(gpu)) for gpu in file.gpus),
        faults=tuple(KeptFault(*msgspec.structs.astuple(fault)) for fault in file.faults),
    )
    numbers = [gpu.number for gpu in memory.gpus]
    for number in numbers:
        if numbers.count(number) > 1:
            raise Unusable(f"has {numbers.count(number)} GPUs of number {number}")
    return memory


def _set_aside(path: Path, kind: str) -> str:
    names = [path.with_name(f"{path.name}.{kind}-{number}") for number in range(1, ASIDE_MAX + 1)]
    free = next((name for name in names if not os.path.lexists(name)), None)
    target = free or min(names, key=lambda name: name.lstat().st_mtime_ns)
    path.rename(target)
    return target.name


# --- saving ------------------------------------------------------------------------------------------------


def encode(memory: FaultMemory) -> bytes:
    """The file's text, indented: people look into it, too."""
    document = {
        "version": VERSION,
        "gpus": [gpu._asdict() for gpu in memory.gpus],
        "faults": [fault._asdict() for fault in memory.faults],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def save(path: Path, memory: FaultMemory) -> None:
    """Replaces the file by the memory; on the disk when this returns, which can take as long as a disk takes.

    Raises:
        NotKept: The directory or the disk does not take it, with the path, the size and errno; or it is
            larger than a file may be.
    """
    data = encode(memory)
    if len(data) > SIZE_MAX:
        raise NotKept(path, len(data), 0, f"the limit is {SIZE_MAX}")
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _write(new, data)
            new.rename(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise NotKept(path, len(data), error.errno or 0, error.strerror or str(error)) from None


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=_open_to_write) as file:
        os.fchmod(file.fileno(), 0o600)  # one that a killed agent left may have been anybody's
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _open_to_write(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _sync_directory(directory: Path) -> None:
    """The rename itself is on the disk only when the directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
