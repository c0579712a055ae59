"""Reading and writing of state files: bounded reads, atomic replacement, renaming of unusable files.

A crash at any moment leaves either the old file or the new one. Unknown fields are ignored, so that a release
reads the files of a later one; a change that it must not ignore gets a new format version.
"""

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR, ELOOP, ENOENT, ENOTDIR, ENXIO
from pathlib import Path
from typing import Annotated, Final, TypeVar, get_type_hints

import msgspec

from agent.errors import DrahealthError
from agent.system.files import (
    CheckedDirectory,
    OpenDirectory,
    ReadError,
    UnsafeReadError,
    make_directory,
    own_file_problem,
    read_bounded,
    unlock_and_close,
)

UNUSABLE_FILES_MAX: Final = 5
"""Largest number of renamed unusable files for each name and kind; the oldest is overwritten."""
READ_ATTEMPTS: Final = 4
"""Number of reads of a state file that the system cannot read for now, such as for lack of descriptors."""
READ_PAUSE_S: Final = 0.2
"""Pause between two reads of such a file [s]."""

_WRONG_KIND: Final = frozenset({0, EISDIR, ELOOP, ENOTDIR, ENXIO})
"""Error numbers of a read of a path that is no regular file; 0: no system call failed."""

T = TypeVar("T")


class StateWriteError(DrahealthError):
    """A state file could not be written; the old file is unchanged."""

    def __init__(self, path: Path, size: int, errno: int, reason: str) -> None:
        super().__init__(f"{path}: {size} bytes could not be written: {reason}")
        self.path = path
        self.size = size
        self.errno = errno
        """Error number of the failed system call; 0 if no system call failed."""


class UnusableFile(Exception):
    """The content of a state file cannot be used by this agent.

    Args:
        kind: Part of the name to which the file is renamed: ``<name>.<kind>-1``.
    """

    def __init__(self, reason: str, kind: str = "corrupt") -> None:
        super().__init__(reason)
        self.kind = kind


def load_state_file(path: Path, size_max: int, decode: Callable[[bytes], T], empty: T) -> tuple[T, str]:
    """Load a state file. Returns its content and the text of a problem; empty: the file is valid or absent.

    Returns `empty` if the file is absent or unusable. An unusable file is renamed ``<name>.corrupt-1``, or
    ``.newer-1`` if a later version wrote it. A file that the system cannot read for now is read again; if
    that fails, it stays in place and gets a second name, ``<name>.unreadable-1``, which the next write of the
    state does not replace. Raises nothing. Blocks up to 0.6 s if the file cannot be read.
    """
    failure = ""
    for attempt in range(READ_ATTEMPTS):
        if attempt:
            time.sleep(READ_PAUSE_S)
        try:
            return read_state_file(path, size_max, decode, empty)
        except UnsafeReadError as error:
            return empty, f"{error}; neither read nor replaced"
        except ReadError as error:
            failure = str(error)
            if error.is_forbidden:
                break
    try:
        outcome = f"left in place, and kept as {_keep_unreadable_file(path)}"
    except OSError as error:
        outcome = f"could not be kept: {error.strerror}; the next write replaces it"
    return empty, f"{failure}; {outcome}"


def read_state_file(path: Path, size_max: int, decode: Callable[[bytes], T], empty: T) -> tuple[T, str]:
    """Like :func:`load_state_file`, but reads once, and raises ReadError if the system cannot read it."""
    try:
        return decode(read_bounded(path, size_max, is_own=True).data), ""
    except ReadError as error:
        if error.errno == ENOENT:
            return empty, ""
        if error.errno not in _WRONG_KIND:  # says nothing about the content
            raise
        unusable = UnusableFile(error.reason)
    except UnusableFile as error:
        unusable = error
    try:
        outcome = f"renamed to {rename_unusable_file(path, unusable.kind)}"
    except OSError as error:
        outcome = f"could not be renamed: {error.strerror}; the next write replaces it"
    return empty, f"{path}: {unusable}; {outcome}"


def rename_unusable_file(path: Path, kind: str) -> str:
    """Rename an unusable state file to ``<name>.<kind>-1`` to ``-5``; return the new name. Raises OSError."""
    target = _free_path(path, kind)
    with CheckedDirectory(path.parent) as directory:
        directory.rename(path.name, target.name)
    return target.name


def _keep_unreadable_file(path: Path) -> str:
    """Link ``<name>.unreadable-1`` to ``-5`` to a state file, and return that name. Raises OSError."""
    target = _free_path(path, "unreadable")
    target.unlink(missing_ok=True)
    os.link(path, target, follow_symlinks=False)  # needs no descriptor, which may be what is missing
    return target.name


def _free_path(path: Path, kind: str) -> Path:
    """Return the first free path of ``<name>.<kind>-1`` to ``-5``, else that of the oldest file."""
    names = [path.with_name(f"{path.name}.{kind}-{number}") for number in range(1, UNUSABLE_FILES_MAX + 1)]
    free = next((name for name in names if not os.path.lexists(name)), None)
    return free or min(names, key=lambda name: name.lstat().st_mtime_ns)


class _Head(msgspec.Struct):
    version: int


def decode_json(data: bytes, kind: type[T], version: int) -> T:
    """Decode the JSON of a state file strictly into an object of type `kind`.

    Raises:
        UnusableFile: The format version or the content is not valid; the text has the reason.
    """
    try:
        found = msgspec.json.decode(data, type=_Head).version
        if found > version:
            raise UnusableFile(
                f"state file has format version {found}, this agent reads up to {version}; update the agent",
                "newer",
            )
        if found != version:
            raise UnusableFile(f"state file has the unknown format version {found}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        text = text if text.startswith("JSON") else f"{text[:1].lower()}{text[1:]}"
        raise UnusableFile(f"state file cannot be parsed: {text}") from None


def struct_type_of(model: type, without: Collection[str] = (), **limits: object) -> type[msgspec.Struct]:
    """Return a msgspec struct type with the fields of a named tuple.

    Args:
        without: Fields that are left out.
        limits: Value limits by field.
    """
    fields = [
        (name, Annotated[hint, limits[name]] if name in limits else hint)
        for name, hint in get_type_hints(model).items()
        if name not in without
    ]
    return msgspec.defstruct(model.__name__, fields)


def encode_json(document: object) -> bytes:
    """Encode a document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def replace_file(path: Path, data: bytes, size_max: int) -> None:
    """Replace a state file atomically and durably. Blocks on the disk.

    Raises:
        StateWriteError: The directory or disk refuses the write, or `data` is larger than `size_max`.
    """
    if len(data) > size_max:
        raise StateWriteError(path, len(data), 0, f"the content is over the limit of {size_max} bytes")
    try:
        make_directory(path.parent)
        write_and_rename(path, data, temporary=path.with_name(path.name + ".new"), mode=0o600)
        with CheckedDirectory(path.parent) as directory:
            os.fsync(directory.fd)  # makes the rename durable
    except OSError as error:
        raise StateWriteError(path, len(data), error.errno or 0, error.strerror or str(error)) from None


def write_and_rename(
    path: Path,
    data: bytes,
    *,
    temporary: Path,
    mode: int,
    directory_type: type[OpenDirectory] = CheckedDirectory,
) -> None:
    """Write `data` to the file `temporary` in the same directory, sync it and rename it to `path`.

    Waits for another writer. ``directory_type``: OpenDirectory for a directory that other programs create.

    Raises:
        OSError: The write failed, or another user could replace the files of a CheckedDirectory; `path` is
            unchanged.
    """
    with directory_type(path.parent) as directory, _locked_file(directory, temporary.name) as fd:
        try:
            os.ftruncate(fd, 0)  # a file left by a killed agent...
            os.fchmod(fd, mode)  # ...may have any mode
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
            directory.rename(temporary.name, path.name)
        except OSError:
            with suppress(OSError):
                directory.unlink(temporary.name)
            raise


@contextmanager
def _locked_file(directory: OpenDirectory, name: str) -> Iterator[int]:
    """Open a file for writing under an exclusive lock, which the kernel releases at process exit.

    A file that may be another program's, such as one with a second name, loses the name. Raises OSError.
    """
    while True:
        fd = directory.open(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)  # O_WRONLY fails for a FIFO
        try:
            if own_file_problem(fd):
                directory.unlink(name)
                continue
            fcntl.flock(fd, fcntl.LOCK_EX)
            if directory.is_current_file(fd, name):  # else the previous holder has renamed it
                yield fd
                return
        finally:
            unlock_and_close(fd)
