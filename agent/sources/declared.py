"""Reader of the directory in which drivers declare their devices, with checks of ownership and size.

An invalid file removes no device: the devices of its last valid version stay, together with the error.
agent.sources.declared_file parses the files.
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
"""Directory name in the runtime directory."""
SUFFIX: Final = ".toml"
FILE_BYTES: Final = 1 << 20
FILES_MAX: Final = 64
ERROR_CHARS: Final = 1000
"""Length to which errors are cut: a quoted value can be as long as the file."""


def read_declarations(directory: Path, before: Declarations, node: str) -> Declarations:
    """Read the declarations of all drivers; an absent directory has no declarations.

    Args:
        directory: ``devices.d`` of the runtime directory.
        before: Result of the last call, whose devices stay if a file has become invalid.
        node: Default pool of devices.

    Raises:
        ProbeError: The directory cannot be read.
    """
    try:
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX) and name[0] != "."]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ProbeError(f"{directory}: {error.strerror}") from None
    present = {_driver_of(name) for name in names}
    known = {file.driver: file.devices for file in before if file.driver in present}
    names.sort(key=lambda name: (not known.get(_driver_of(name)), name))  # the newest file exceeds the limit
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
    """Read one driver's declaration file; None: the file no longer exists."""
    try:
        return DeclaredFile(driver, _read(path, driver, node))
    except FileNotFoundError:
        return None
    except ConfigError as error:
        return DeclaredFile(driver, before, f"{_printable(str(path))}: {error}"[:ERROR_CHARS])


def _with_room(file: DeclaredFile, known: Mapping[str, tuple[Declared, ...]], path: Path) -> DeclaredFile:
    """Return the declaration, or its previous devices with an error if all drivers together exceed the device
    limit.

    So a growing file never removes devices of other drivers.
    """
    others = sum(len(devices) for driver, devices in known.items() if driver != file.driver)
    if others + len(file.devices) <= DEVICES_MAX:
        return file
    text = f"{len(file.devices)} devices and {others} of other drivers, limit {DEVICES_MAX}"
    return DeclaredFile(file.driver, known.get(file.driver, ()), f"{_printable(str(path))}: {text}")


def _driver_of(name: str) -> str:
    return _printable(name.removesuffix(SUFFIX))


def _printable(name: str) -> str:
    """Escape a file name, which can hold any bytes."""
    return name.encode("ascii", "backslashreplace").decode()


def _read(path: Path, driver: str, node: str) -> tuple[Declared, ...]:
    try:
        check_driver(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        # neither a symbolic link nor a FIFO without a writer
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        raise ConfigError(reason) from None
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
    """Check that only the file's owner can write it, and that the owner is allowed to declare devices.

    Raises:
        ConfigError: The text names the problem and the requirement.
    """
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("is not a regular file")
    if found.st_uid not in allowed:
        users = " or ".join(map(str, sorted(allowed)))
        raise ConfigError(f"belongs to user {found.st_uid}; must be {users}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"group or others can write to it: mode {mode:04o}, at most 0644")
