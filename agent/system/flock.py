"""Locked files: what who holds one, or looks for one, must take care of. The locks are flock(2)'s."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def is_file(fd: int, path: Path) -> bool:
    """Whether a descriptor is of the file at that path: it may have been removed, and another made."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def unlock(fd: int) -> None:
    """Lets go of a lock, and closes its file. A child that was forked meanwhile has the same lock, and would
    keep it for as long as it lives.
    """
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
