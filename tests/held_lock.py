"""Lock of a state's temporary file, which makes its writer wait as for a disk that hangs."""

import fcntl
from pathlib import Path
from typing import BinaryIO


def held_lock(path: Path) -> BinaryIO:
    """Create a file and hold its lock (flock(2)) until the result is closed."""
    file = path.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
