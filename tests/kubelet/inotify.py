"""Inotify watches for created and removed directory entries, as the kubelet's plugin watcher uses them."""

import ctypes
import os
import select
import struct
from pathlib import Path
from typing import Final, NamedTuple

# linux/inotify.h
IN_MOVED_TO: Final = 0x80
IN_CREATE: Final = 0x100
IN_DELETE: Final = 0x200
HEAD: Final = struct.Struct("iIII")

_libc: Final = ctypes.CDLL(None, use_errno=True)


class PathEvent(NamedTuple):
    """A path was created or removed."""

    path: Path
    created: bool
    """True for a created path or one moved here, False for a removed one. Moving a path away causes no
    event."""


class Inotify:
    """Inotify watches on directories."""

    def __init__(self) -> None:
        self._fd = _check_result(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._paths: dict[int, Path] = {}

    def add(self, directory: Path) -> None:
        """Watch a directory without its subdirectories.

        Raises:
            OSError: the directory cannot be watched, for example because it is gone.
        """
        mask = IN_CREATE | IN_MOVED_TO | IN_DELETE
        self._paths[_check_result(_libc.inotify_add_watch(self._fd, bytes(directory), mask))] = directory

    def wait(self) -> list[PathEvent] | None:
        """Wait for events and return them, or None after :meth:`stop`."""
        ready, _, _ = select.select([self._fd, self._stop], [], [])
        if self._stop in ready:
            return None
        data, found = os.read(self._fd, 65536), []
        while data:
            watch, mask, _cookie, size = HEAD.unpack_from(data)
            name = data[HEAD.size : HEAD.size + size].rstrip(b"\0")
            data = data[HEAD.size + size :]
            if mask & (IN_CREATE | IN_MOVED_TO | IN_DELETE):  # else the watch was removed
                found.append(PathEvent(self._paths[watch] / os.fsdecode(name), not mask & IN_DELETE))
        return found

    def stop(self) -> None:
        """Make the current or next :meth:`wait` return None. Any thread may call it."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Close the watches. No thread may be in :meth:`wait`."""
        os.close(self._fd)
        os.close(self._stop)


def _check_result(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
