"""File with the end of the period in which the agent observes the devices, next to the history file.

The file has one line, which is overwritten with each report, without a sync: much less work for the disk than
a transaction of the history file. After a kill of the agent the file shows the time of the last report.
"""

import os
import zlib
from pathlib import Path
from typing import Final

from agent.model.verdict_history import ObservedPeriod, StoredVerdicts

SUFFIX: Final = ".observed"
SIZE: Final = 128
"""Size of the observed-period file's only line, padded with spaces [bytes]."""


def period_file_path(history: Path) -> Path:
    """Return the path of the observed-period file next to a history file."""
    return history.with_name(history.name + SUFFIX)


def write_period_file(path: Path, period: ObservedPeriod) -> None:
    """Overwrite the observed-period file with the end of a period. Blocks on the disk. Raises OSError."""
    content = f"{period.id} {period.lasted_s!r} {period.ended_s!r}"
    line = f"{content} {zlib.crc32(content.encode()):08x}".ljust(SIZE - 1) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.pwrite(fd, line.encode(), 0)
    finally:
        os.close(fd)


def read_period_file(path: Path) -> tuple[str, float, float] | None:
    """Read the observed-period file; None: there is no valid file.

    Returns the period's id, its duration [s] and its end [s since 1970].
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content, _, checksum = os.read(fd, SIZE).decode().strip().rpartition(" ")
        if int(checksum, 16) != zlib.crc32(content.encode()):
            return None
        id_, lasted, ended = content.split()
        return id_, float(lasted), float(ended)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def extend_newest_period(stored: StoredVerdicts, mark: tuple[str, float, float] | None) -> StoredVerdicts:
    """Return the verdict history with the end of its newest period from the observed-period file, if later.

    Args:
        mark: Content of the file: id, duration and end of a period; None: no valid file.
    """
    if not stored.periods or mark is None:
        return stored
    *before, newest = stored.periods
    id_, lasted_s, ended_s = mark
    if newest.id != id_ or not newest.lasted_s < lasted_s:
        return stored
    return stored._replace(periods=(*before, newest._replace(lasted_s=lasted_s, ended_s=ended_s)))
