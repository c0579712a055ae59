"""The kernel's news of directory entries, made and removed: what the kubelet's plugin watcher asks for."""

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


class News(NamedTuple):
    """What happened to a path."""

    path: Path
    made: bool
    """Or moved here. Else removed; what is moved away the kubelet does not hear of."""


class Inotify:
    """Watches on directories; closed once."""

    def __init__(self) -> None:
        self._fd = _checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._paths: dict[int, Path] = {}

    def add(self, directory: Path) -> None:
        """Watches a directory, not what is in its directories.

        Raises:
            OSError: it cannot be watched; it may be gone.
        """
        mask = IN_CREATE | IN_MOVED_TO | IN_DELETE
        self._paths[_checked(_libc.inotify_add_watch(self._fd, bytes(directory), mask))] = directory

    def wait(self) -> list[News] | None:
        """Blocks until something happened, or :meth:`stop` was called: None."""
        ready, _, _ = select.select([self._fd, self._stop], [], [])
        if self._stop in ready:
            return None
        data, found = os.read(self._fd, 65536), []
        while data:
            watch, mask, _cookie, size = HEAD.unpack_from(data)
            name = data[HEAD.size : HEAD.size + size].rstrip(b"\0")
            data = data[HEAD.size + size :]
            if mask & (IN_CREATE | IN_MOVED_TO | IN_DELETE):  # else the watch itself ended
                found.append(News(self._paths[watch] / os.fsdecode(name), not mask & IN_DELETE))
        return found

    def stop(self) -> None:
        """From any thread: :meth:`wait` returns None, now or when it is called."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """When nobody waits any more."""
        os.close(self._fd)
        os.close(self._stop)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
