"""Directories in which only this user and root can replace files, and locks on files in them."""

import fcntl
import os
import stat
from contextlib import suppress
from errno import ELOOP
from pathlib import Path
from typing import Final

from agent.system.files import is_current_file, unlock_and_close

LOCK_FILE: Final = "agent.lock"
"""Name of the file that DirectoryLock locks in the agent's runtime directory and in its state directory."""


class UnsafeDirectory(Exception):
    """Another user could replace the files of a directory; the message is the reason, without the path."""


class LockHeld(Exception):
    """Another process holds the lock of a directory.

    Attributes:
        pid: Its process id, or ``unknown``.
    """

    def __init__(self, pid: str) -> None:
        super().__init__(f"held by pid {pid}")
        self.pid = pid


def make_directory(directory: Path, mode: int = 0o700) -> None:
    """Create a directory with exactly this mode, whatever the umask, and its missing parents with mode 0755.

    An existing directory is kept as it is. Raises OSError.
    """
    try:
        _make_directory(directory, mode)
    except FileNotFoundError:
        make_directory(directory.parent, 0o755)
        _make_directory(directory, mode)  # fails again on a file system without mkdir, such as procfs


def _make_directory(directory: Path, mode: int) -> None:
    try:
        directory.mkdir(mode)
    except FileExistsError:
        if not directory.is_dir():
            raise
        return
    directory.chmod(mode)


def check_directory(path: Path, *, accepts_link: bool = True) -> None:
    """Check that only this user, root and the directory's group can replace files in a directory.

    Args:
        path: The directory.
        accepts_link: False: a symbolic link is refused. True: one of this user or of root is followed.

    Raises:
        UnsafeDirectory: Another user owns the directory or the link, or all users may write to it.
        OSError: The directory cannot be examined; ENOTDIR: the path is no directory.
    """
    trusted = {0, os.geteuid()}
    entry = path.lstat()
    if stat.S_ISLNK(entry.st_mode) and not accepts_link:
        raise UnsafeDirectory("is a symbolic link; remove it")
    if entry.st_uid not in trusted:
        raise UnsafeDirectory(_foreign_owner(entry.st_uid))
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if found.st_uid not in trusted:
        raise UnsafeDirectory(_foreign_owner(found.st_uid))
    if found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        raise UnsafeDirectory(f"has mode {mode:04o}: all users may write to it; run chmod o-w on it")


def _foreign_owner(uid: int) -> str:
    allowed = "root" if os.geteuid() == 0 else f"root or uid {os.geteuid()}"
    return f"belongs to uid {uid}, who can replace its files; it must belong to {allowed}"


class DirectoryLock:
    """Exclusive lock of a directory: a locked file, which the kernel unlocks when the process ends."""

    def __init__(self, directory: Path) -> None:
        """Create and lock the file :data:`LOCK_FILE` in a directory, and write this process's id to it.

        Raises:
            LockHeld: Another process holds the lock.
            OSError: The file cannot be opened; ELOOP: it is a symbolic link.
            ValueError: The file is not a regular file with one name.
        """
        self.path = directory / LOCK_FILE
        self._fd = self._lock()

    def ensure(self) -> bool:
        """Lock the file again if another process removed or replaced it; return True if so.

        Raises the same errors as the constructor; then the old lock is kept.
        """
        if is_current_file(self._fd, self.path):
            return False
        removed_fd, self._fd = self._fd, self._lock()
        os.close(removed_fd)
        return True

    def close(self) -> None:
        """Release the lock of the directory; the locked file stays."""
        unlock_and_close(self._fd)

    def _lock(self) -> int:
        parent = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.path.name, flags, 0o640, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            _lock_own_file(fd)
            with suppress(OSError):  # on a full disk a second agent cannot name the first one
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _lock_own_file(fd: int) -> None:
    """Lock an open file for a DirectoryLock.

    Raises LockHeld, or ValueError if the file may be another program's.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("is not a regular file")
    if found.st_nlink > 1:  # the content of the other name would be overwritten
        raise ValueError("has a second name (hard link)")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockHeld(os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown") from None


def open_error_reason(error: OSError) -> str:
    """Return why a file could not be opened with O_NOFOLLOW, as text: for example, it is a symbolic link."""
    return "is a symbolic link" if error.errno == ELOOP else error.strerror or str(error)
