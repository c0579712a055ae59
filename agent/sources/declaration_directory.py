"""Reader of the directory in which drivers declare their devices, with checks of ownership and size.

An invalid file removes no device: the devices of its last valid version stay, together with the error.
agent.sources.declaration_file parses the files.
"""

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from agent.config.values import check_driver_name
from agent.errors import ConfigError, ProbeError
from agent.model.declared_devices import Declarations, DeclaredFile, DriverDevice
from agent.sources.declaration_file import DEVICES_MAX, parse_declaration

DIRECTORY: Final = "devices.d"
"""Name of the directory of declaration files, in the agent's runtime directory."""
SUFFIX: Final = ".toml"
FILE_BYTES: Final = 1 << 20
"""Largest accepted declaration file [bytes]."""
FILES_MAX: Final = 64
ERROR_CHARS: Final = 1000
"""Length to which the text of an error in a declaration file is cut [characters].

A quoted value can be as long as the file.
"""


def read_declarations(directory: Path, previous: Declarations, default_pool: str) -> Declarations:
    """Read the declaration files of all drivers; an absent directory yields an empty result.

    Args:
        directory: ``devices.d`` of the runtime directory.
        previous: Result of the last call; devices of a file that has become invalid are taken from it.
        default_pool: Pool of devices that name no pool.

    Raises:
        ProbeError: The directory cannot be read.
    """
    try:
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX) and name[0] != "."]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ProbeError(f"declaration directory {directory}: cannot be listed: {error.strerror}") from None
    present = {_driver_of_file(name) for name in names}
    known = {file.driver: file.devices for file in previous if file.driver in present}
    names.sort(
        key=lambda name: (not known.get(_driver_of_file(name)), name)
    )  # the newest file exceeds the limit
    files: dict[str, DeclaredFile] = {}
    for name in names[:FILES_MAX]:
        driver = _driver_of_file(name)
        if file := _read_declaration(directory / name, driver, known.get(driver, ()), default_pool):
            files[driver] = file = _within_device_limit(file, known, directory / name)
            known[driver] = file.devices
    for name in names[FILES_MAX : FILES_MAX + 1]:
        path = _printable(str(directory / name))
        text = f"declaration file {path}: not read: one of {len(names)} files, limit {FILES_MAX}"
        files[_driver_of_file(name)] = DeclaredFile(_driver_of_file(name), (), text)
    return tuple(files[driver] for driver in sorted(files))


def _read_declaration(
    path: Path, driver: str, before: tuple[DriverDevice, ...], node: str
) -> DeclaredFile | None:
    """Read one driver's declaration file; None: the file no longer exists."""
    try:
        return DeclaredFile(driver, _read_devices(path, driver, node))
    except FileNotFoundError:
        return None
    except ConfigError as error:
        return DeclaredFile(
            driver, before, f"declaration file {_printable(str(path))}: {error}"[:ERROR_CHARS]
        )


def _within_device_limit(
    file: DeclaredFile, known: Mapping[str, tuple[DriverDevice, ...]], path: Path
) -> DeclaredFile:
    """Return a declaration file if the devices of all drivers are within DEVICES_MAX.

    Otherwise return its previous devices with an error, so that a growing file never removes devices of other
    drivers.

    Args:
        file: New content of the file.
        known: Files that were read before it.
        path: Path of the file.
    """
    others = sum(len(devices) for driver, devices in known.items() if driver != file.driver)
    if others + len(file.devices) <= DEVICES_MAX:
        return file
    text = f"declares {len(file.devices)} devices, other drivers {others}; limit of all: {DEVICES_MAX}"
    return DeclaredFile(
        file.driver, known.get(file.driver, ()), f"declaration file {_printable(str(path))}: {text}"
    )


def _driver_of_file(name: str) -> str:
    return _printable(name.removesuffix(SUFFIX))


def _printable(name: str) -> str:
    """Escape a file name for error texts: it can hold any bytes."""
    return name.encode("ascii", "backslashreplace").decode()


def _read_devices(path: Path, driver: str, node: str) -> tuple[DriverDevice, ...]:
    try:
        check_driver_name(driver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        # fails for a symbolic link, and does not wait for the writer of a FIFO
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
        raise ConfigError(reason) from None
    try:
        check_owner_and_mode(os.fstat(fd), {0, os.geteuid()})
        with open(fd, "rb", closefd=False) as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(error.strerror)) from None
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES:
        raise ConfigError(f"is larger than {FILE_BYTES} bytes, the limit")
    return parse_declaration(data, driver, node)


def check_owner_and_mode(status: os.stat_result, allowed_uids: Iterable[int]) -> None:
    """Check that only the file's owner can write it, and that the owner is allowed to declare devices.

    Raises:
        ConfigError: The file is not regular, has another owner, or is writable by others.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("is not a regular file")
    if status.st_uid not in allowed_uids:
        users = " or ".join(map(str, sorted(allowed_uids)))
        raise ConfigError(f"belongs to user id {status.st_uid}; must belong to user id {users}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"is writable by group or others: mode {mode:04o}; set at most 0644")
