"""A file that is kept whole: read within limits, replaced as a whole, and set aside when it cannot be used.

It is always either the old one or the new one, whoever is killed and whatever the disk does. What stands in
it, and what follows from it, is the business of those who keep it.
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
from agent.system.flock import is_file, unlock
from agent.system.read_file import ReadError, read_bounded

ASIDE_MAX: Final = 5
"""Files of one kind that are set aside; the oldest makes room."""
WALL_MAX_S: Final = 253_402_300_799
"""The end of the year 9999, the last that people, programs and Kubernetes can be told [s since 1970]."""

T = TypeVar("T")


class WriteError(DrahealthError):
    """It could not be written; the file is what it was before."""

    def __init__(self, path: Path, size: int, errno: int, reason: str) -> None:
        super().__init__(f"{path}: {size} bytes could not be kept: {reason}")
        self.path = path
        self.size = size
        self.errno = errno
        """Of the system call that failed; 0 if none did."""


class CorruptFile(Exception):
    """Why a file cannot be used, and the word that it is set aside with."""

    def __init__(self, reason: str, kind: str = "corrupt") -> None:
        super().__init__(reason)
        self.kind = kind


# --- reading -----------------------------------------------------------------------------------------------


def load(path: Path, size_max: int, decode: Callable[[bytes], T], empty: T) -> tuple[T, str]:
    """What is kept, and why there is less than was kept, with the file; empty if all is well.

    A file that cannot be used is renamed ``<name>.corrupt-1`` to ``-5``, or ``.newer-1`` if a later version
    wrote it, so that the next save does not destroy it. Raises nothing: to start without it is better than
    not to start.
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
        fate = f"set aside as {set_aside(path, unusable.kind)}"
    except OSError as error:
        fate = f"could not be set aside: {error.strerror}"
    return empty, f"{path}: {unusable}; {fate}"


def set_aside(path: Path, kind: str) -> str:
    names = [path.with_name(f"{path.name}.{kind}-{number}") for number in range(1, ASIDE_MAX + 1)]
    free = next((name for name in names if not os.path.lexists(name)), None)
    target = free or min(names, key=lambda name: name.lstat().st_mtime_ns)
    path.rename(target)
    return target.name


class _Head(msgspec.Struct):
    version: int


def decode_json(data: bytes, kind: type[T], version: int) -> T:
    """The JSON of a file as a value of ``kind``, strictly; its ``version`` is looked at before the rest.

    Raises:
        Unusable: with the reason, and where in the file it is.
    """
    try:
        found = msgspec.json.decode(data, type=_Head).version
        if found > version:
            raise CorruptFile(f"is of version {found}, this agent reads {version}", "newer")
        if found != version:
            raise CorruptFile(f"is of version {found}, which never was")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        text = text if text.startswith("JSON") else f"{text[:1].lower()}{text[1:]}"
        raise CorruptFile(f"is not understood: {text}") from None


def record(of: type, **limits: object) -> type[msgspec.Struct]:
    """A named tuple of the model as an object of the file, every key given and no other."""
    fields = [
        (name, Annotated[hint, limits[name]] if name in limits else hint)
        for name, hint in get_type_hints(of).items()
    ]
    return msgspec.defstruct(of.__name__, fields, forbid_unknown_fields=True)


# --- writing -----------------------------------------------------------------------------------------------


def encode_json(document: object) -> bytes:
    """The file's text, indented: people look into it, too."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def replace(path: Path, data: bytes, size_max: int) -> None:
    """Puts these bytes in the place of the file; on the disk when this returns, which can take as long as a
    disk takes.

    Raises:
        NotKept: The directory or the disk does not take it, with the path, the size and errno; or it is
            larger than a file may be.
    """
    if len(data) > size_max:
        raise WriteError(path, len(data), 0, f"the limit is {size_max}")
    try:
        make_directory(path.parent)
        put(path, data, new=path.with_name(path.name + ".new"), mode=0o600)
        _sync_directory(path.parent)
    except OSError as error:
        raise WriteError(path, len(data), error.errno or 0, error.strerror or str(error)) from None


def make_directory(directory: Path, mode: int = 0o700) -> None:
    """Makes a directory, and those above it, unless they are there. None of them is everybody's to write in,
    whatever the umask. Raises OSError.
    """
    try:
        directory.mkdir(mode, exist_ok=True)
    except FileNotFoundError:
        make_directory(directory.parent, 0o755)
        directory.mkdir(mode, exist_ok=True)


def put(path: Path, data: bytes, *, new: Path, mode: int) -> None:
    """Writes the bytes to ``new``, and gives that the name ``path`` when they are on the disk.

    Whoever else is at it is waited for: two would write into the same file.

    Raises:
        OSError: There is nothing at ``new``, and at ``path`` what was there before.
    """
    with _alone(new) as fd:
        try:
            os.ftruncate(fd, 0)  # one that a killed agent left...
            os.fchmod(fd, mode)  # ...may have been anybody's
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
            new.rename(path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise


@contextmanager
def _alone(path: Path) -> Iterator[int]:
    """The file, made if it is not there, for nobody else to write. The kernel lets go of it for the dead."""
    while True:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if is_file(fd, path):  # else whoever had it before has finished it
                yield fd
                return
        finally:
            unlock(fd)


def _sync_directory(directory: Path) -> None:
    """The rename itself is on the disk only when the directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
