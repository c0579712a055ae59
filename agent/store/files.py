"""Functions for state files: read within limits, replaced atomically, and set aside when they cannot be used.

A crash at any moment leaves either the old file or the new one.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from pathlib import Path
from typing import Annotated, Final, TypeVar, get_type_hints

import msgspec

from agent.errors import DrahealthError
from agent.system.files import ReadError, is_open_file, read_bounded, unlock

ASIDE_MAX: Final = 5
"""Largest number of files of one kind that are set aside; the oldest is overwritten."""
WALL_MAX_S: Final = 253_402_300_799
"""End of the year 9999, the last that common time formats can represent [s since 1970]."""

T = TypeVar("T")


class WriteError(DrahealthError):
    """Failed write of a state file; the file is unchanged."""

    def __init__(self, path: Path, size: int, errno: int, reason: str) -> None:
        super().__init__(f"{path}: {size} bytes could not be written: {reason}")
        self.path = path
        self.size = size
        self.errno = errno
        """Error number of the failed system call; 0 if no system call failed."""


class CorruptFile(Exception):
    """Reason why a file cannot be used; ``kind`` becomes part of the name under which it is set aside."""

    def __init__(self, reason: str, kind: str = "corrupt") -> None:
        super().__init__(reason)
        self.kind = kind


# --- reading -----------------------------------------------------------------------------------------------


def load(path: Path, size_max: int, decode: Callable[[bytes], T], empty: T) -> tuple[T, str]:
    """Load a state file. Returns the decoded value and a problem with the path, or `empty` and the problem.

    A file that cannot be used is renamed ``<name>.corrupt-1`` to ``-5``, or ``.newer-1`` if a later version
    wrote it, so that the next save does not destroy it. Raises nothing: a start without state is better than
    no start. The problem is empty if the file is fine or absent.
    """
    try:
        return decode(read_bounded(path, size_max).data), ""
    except ReadError as error:
        if error.errno == ENOENT:
            return empty, ""
        unusable = CorruptFile(error.reason)
    except CorruptFile as error:
        unusable = error
    try:
        outcome = f"set aside as {set_aside(path, unusable.kind)}"
    except OSError as error:
        outcome = f"could not be set aside: {error.strerror}"
    return empty, f"{path}: {unusable}; {outcome}"


def set_aside(path: Path, kind: str) -> str:
    """Rename an unusable file and return its new name. Raises OSError."""
    names = [path.with_name(f"{path.name}.{kind}-{number}") for number in range(1, ASIDE_MAX + 1)]
    free = next((name for name in names if not os.path.lexists(name)), None)
    target = free or min(names, key=lambda name: name.lstat().st_mtime_ns)
    path.rename(target)
    return target.name


class _Head(msgspec.Struct):
    version: int


def decode_json(data: bytes, kind: type[T], version: int) -> T:
    """Decode the JSON of a file strictly into `kind`; the file's ``version`` is checked first.

    Raises:
        CorruptFile: The text has the reason and the place in the file.
    """
    try:
        found = msgspec.json.decode(data, type=_Head).version
        if found > version:
            raise CorruptFile(f"is of version {found}, this agent reads {version}", "newer")
        if found != version:
            raise CorruptFile(f"is of unknown version {found}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        text = text if text.startswith("JSON") else f"{text[:1].lower()}{text[1:]}"
        raise CorruptFile(f"cannot be parsed: {text}") from None


def struct_of(model: type, **limits: object) -> type[msgspec.Struct]:
    """Return the struct for a named tuple of the model: a JSON object with exactly the tuple's fields."""
    fields = [
        (name, Annotated[hint, limits[name]] if name in limits else hint)
        for name, hint in get_type_hints(model).items()
    ]
    return msgspec.defstruct(model.__name__, fields, forbid_unknown_fields=True)


# --- writing -----------------------------------------------------------------------------------------------


def encode_json(document: object) -> bytes:
    """Encode a document as indented JSON, readable for operators."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def replace_file(path: Path, data: bytes, size_max: int) -> None:
    """Replace the file by `data` atomically and durably. Blocks on the disk.

    Raises:
        WriteError: The directory or the disk refuses it, with the path, the size and errno; or `data` is
            larger than `size_max`.
    """
    if len(data) > size_max:
        raise WriteError(path, len(data), 0, f"the limit is {size_max}")
    try:
        make_directory(path.parent)
        write_and_rename(path, data, new=path.with_name(path.name + ".new"), mode=0o600)
        _sync_directory(path.parent)
    except OSError as error:
        raise WriteError(path, len(data), error.errno or 0, error.strerror or str(error)) from None


def make_directory(directory: Path, mode: int = 0o700) -> None:
    """Create a directory and its missing parents, none of them world-writable. Raises OSError."""
    try:
        directory.mkdir(mode, exist_ok=True)
    except FileNotFoundError:
        make_directory(directory.parent, 0o755)
        directory.mkdir(mode, exist_ok=True)


def write_and_rename(path: Path, data: bytes, *, new: Path, mode: int) -> None:
    """Write `data` to `new`, sync it and rename it to `path`. Waits for another writer of `new`.

    Raises:
        OSError: `path` is unchanged and `new` is removed.
    """
    with _locked_file(new) as fd:
        try:
            os.ftruncate(fd, 0)  # a file left by a killed agent...
            os.fchmod(fd, mode)  # ...may have any mode
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
            new.rename(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise


@contextmanager
def _locked_file(path: Path) -> Iterator[int]:
    """Open the file for writing under an exclusive lock, creating it if needed. The kernel unlocks it for a
    killed process."""
    while True:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if is_open_file(fd, path):  # else the previous holder has renamed it
                yield fd
                return
        finally:
            unlock(fd)


def _sync_directory(directory: Path) -> None:
    """Sync a directory: a rename is durable only once its directory is synced."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
