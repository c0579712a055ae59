"""Writes down what a driver declares over its socket, as the file that it could have written itself.

So there is one way into the agent for what is declared, one set of limits, and one place where an operator
looks; and it outlives the agent. What the file may say is agent.sources.declared_file's.
"""

import json
from collections.abc import Iterable
from errno import EISDIR
from pathlib import Path
from typing import Final

from agent.errors import Busy, ConfigError
from agent.model.reading import Absence
from agent.serve.driver_link.service import Row
from agent.sources.declared import FILE_BYTES, SUFFIX
from agent.sources.declared_file import LINE_BYTES, VERSION, parse_declaration, who
from agent.store.files import WriteError, make_directory, put
from agent.system.read_file import ReadError, read_bounded

MARK: Final = "# Written by drahealth: "
"""The beginning of a file that is ours to replace."""
MODE: Final = 0o644
DIRECTORY_MODE: Final = 0o755


def declare(directory: Path, driver: str, node: str, rows: Iterable[Row]) -> int:
    """Puts the driver's file into the directory, unless it is there as it should be. Takes as long as a
    disk takes.

    Args:
        directory: ``devices.d`` of the runtime directory.
        driver: Whose file.
        node: The pool of devices that name none.
        rows: All devices of the driver.

    Returns:
        How many there are.

    Raises:
        ConfigError: Names the device, the key, and the value with its limit.
        Busy: Somebody else wrote the driver's file.
        NotKept: The disk does not take it.
    """
    path = directory / f"{driver}{SUFFIX}"
    data = file_of(driver, rows)
    if len(data) > FILE_BYTES:
        raise ConfigError(f"the devices take {len(data)} bytes as a file, limit {FILE_BYTES}")
    devices = parse_declaration(data, driver, node)
    try:
        if _found(path) != data:
            make_directory(directory, DIRECTORY_MODE)
            put(path, data, new=path.with_name(f".{path.name}.new"), mode=MODE)
    except OSError as error:
        raise WriteError(path, len(data), error.errno or 0, error.strerror or str(error)) from None
    return len(devices)


def _found(path: Path) -> bytes:
    """What is in the file; nothing if there is none. Raises Busy if it is not ours, and OSError."""
    try:
        found = read_bounded(path, FILE_BYTES).data
    except ReadError as error:
        if error.absence is Absence.ABSENT:
            return b""
        if error.errno not in {0, EISDIR}:
            raise OSError(error.errno, error.reason) from None
        found = b""
    if path.is_symlink() or not found.startswith(MARK.encode()):
        raise Busy(f"{path}: not written by drahealth; remove it to declare devices over the socket")
    return found


def file_of(driver: str, rows: Iterable[Row]) -> bytes:
    """The file, in the order of the rows.

    Raises:
        ConfigError: A value takes more than a line of such a file. Names the device, the key, and the limit.
    """
    lines = [
        f"{MARK}what {driver} declared over its socket; its next word replaces it.",
        f"version = {VERSION}",
    ]
    for number, row in enumerate(rows, start=1):
        lines += ["", "[[device]]"]
        keys = {**row.keys, "pool": row.pool} if row.pool else row.keys
        for key, value in keys.items():
            line = _line(key, value)
            if (size := len(line.encode())) > LINE_BYTES:
                of = f"{who(number, row.keys.get('name'))}: {key}"
                raise ConfigError(f"{of}: takes a line of {size} bytes, limit {LINE_BYTES}")
            lines.append(line)
    return ("\n".join(lines) + "\n").encode()


def _line(key: str, value: object) -> str:
    """TOML has JSON's texts, numbers and switches, but for one character."""
    return f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
