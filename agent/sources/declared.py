"""The directory in which drivers declare their devices: who may write there, and what counts as a file.

A file is read as a whole or not at all, and one that is wrong costs no device: what it declared when it was
last right stays, with what is wrong beside it. What a file says is in agent.sources.declared_file.
"""

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from agent.config.values import check_driver
from agent.errors import ConfigError, ProbeError
from agent.model.declared import Declarations, Declared, DeclaredFile
from agent.sources.declared_file import DEVICES_MAX, parse_declaration

DIRECTORY: Final = "devices.d"
"""In the runtime directory."""
SUFFIX: Final = ".toml"
FILE_BYTES: Final = 1 << 20
FILES_MAX: Final = 64
ERROR_CHARS: Final = 1000
"""A value that is quoted in an error can be as long as the file."""


def read_declarations(directory: Path, before: Declarations, node: str) -> Declarations:
    """What all drivers declare now; none if there is no such directory.

    Args:
        directory: ``devices.d`` of the runtime directory.
        before: What this returned last: of a file that is wrong its devices stay.
        node: The pool of devices whose file names none.

    Raises:
        ProbeError: The directory cannot be read.
    """
    try:
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX) and name[0] != "."]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ProbeError(f"{directory}: {error.strerror}") from None
    there = {_driver_of(name) for name in names}
    known = {file.driver: file.devices for file in before if file.driver in there}
    names.sort(key=lambda name: (not known.get(_driver_of(name)), name))  # the newest is one too many
    files: dict[str, DeclaredFile] = {}
    for name in names[:FILES_MAX]:
        driver = _driver_of(name)
        if file := _declared(directory / name, driver, known.get(driver, ()), node):
            files[driver] = file = _with_room(file, known, directory / name)
            known[driver] = file.devices
    for name in names[FILES_MAX : FILES_MAX + 1]:
        text = f"{_printable(str(directory / name))}: one of {len(names)} files, limit {FILES_MAX}"
        files[_driver_of(name)] = DeclaredFile(_driver_of(name), (), text)
    return tuple(files[driver] for driver in sorted(files))


def _declared(path: Path, driver: str, before: tuple[Declared, ...], node: str) -> DeclaredFile | None:
    """What one file says; None if it is gone."""
    try:
        return DeclaredFile(driver, _read(path, driver, node))
    except FileNotFoundError:
        return None
    except ConfigError as error:
        return DeclaredFile(driver, before, f"{_printable(str(path))}: {error}"[:ERROR_CHARS])


def _with_room(file: DeclaredFile, known: Mapping[str, tuple[Declared, ...]], path: Path) -> DeclaredFile:
    """The file, unless all drivers together would declare too many: then what this one declared before stays.

    One that grows pushes nobody out.
    """
    others = sum(len(devices) for driver, devices in known.items() if driver != file.driver)
    if others + len(file.devices) <= DEVICES_MAX:
        return file
    text = f"{len(file.devices)} devices and {others} of other drivers, limit {DEVICES_MAX}"
    return DeclaredFile(file.driver, known.get(file.driver, ()), f"{_printable(str(path))}: {text}")


def _driver_of(name: str) -> str:
    return _printable(name.removesuffix(SUFFIX))


def _printable(name: str) -> str:
    """A name of a file can hold any bytes."""
    return name.encode("ascii", "backslashreplace").decode()


def _read(path: Path, driver: str, node: str) -> tuple[Declared, ...]:
    try:
        check_driver(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        # neither a link to elsewhere nor a pipe that nobody writes to
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        raise ConfigError(what) from None
    try:
        check_owner(os.fstat(fd), {0, os.geteuid()})
        with open(fd, "rb", closefd=False) as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(error.strerror)) from None
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES:
        raise ConfigError(f"over {FILE_BYTES} bytes, the limit")
    return parse_declaration(data, driver, node)


def check_owner(found: os.stat_result, allowed: Iterable[int]) -> None:
    """Nobody but its owner can write the file, and that is one of those who are allowed to declare devices.

    Raises:
        ConfigError: says what is wrong, and what would be right.
    """
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("is no regular file")
    if found.st_uid not in allowed:
        users = " or ".join(map(str, sorted(allowed)))
        raise ConfigError(f"belongs to user {found.st_uid}; must be {users}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"others may write to it: mode {mode:04o}, at most 0644")
