"""Files and directories of the agent: bounded reads, locks (flock(2)), and directories in which only this
user and root can replace files.

Callers of the public API pass paths as strings or as path objects.
"""

import fcntl
import os
import select
import stat
from contextlib import suppress
from errno import EACCES, EEXIST, EINVAL, ELOOP, ENOTDIR, ENXIO, EPERM
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from agent.errors import ConfigError
from agent.model.reading import Absence

WRITER_S: Final = 10.0
"""Longest time that a command waits for a process that writes to the pipe that it reads [s]."""


class FileContent(NamedTuple):
    """Content of a file, and the time of its last write."""

    data: bytes
    written_s: float
    """Time of the last write to the file [s since 1970]."""


class ReadError(Exception):
    """A file could not be read; the message is the path and the reason."""

    def __init__(
        self, path: Path, reason: str, absence: Absence = Absence.UNREADABLE, errno: int = 0
    ) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason
        """Reason why the file could not be read, without its path."""
        self.absence = absence
        self.errno = errno
        """errno of the failed system call; 0: no system call failed."""

    @property
    def is_forbidden(self) -> bool:
        """True: the file exists, but the process may not read it."""
        return self.errno in {EACCES, EPERM}


class UnsafeReadError(ReadError):
    """A file was not read, because another user could replace it (UnsafeDirectory)."""


def read_bounded(path: Path, limit: int, *, is_own: bool = False, is_input: bool = False) -> FileContent:
    """Read a whole file. Blocks on the disk, but not on a pipe unless `is_input` is True.

    Args:
        path: A regular file, or a link to one; see also `is_input`.
        limit: Largest accepted size of the file [bytes].
        is_own: True: the file is opened in its checked directory (:class:`CheckedDirectory`), and must be no
            link.
        is_input: True: ``-`` is standard input, and a pipe or socket is read up to its end.

    Raises:
        ReadError: With absence ABSENT if the file does not exist, else UNREADABLE, also if it is too large.
        UnsafeReadError: The checked directory is refused.
    """
    try:
        opener = _open_own if is_own else open_input if is_input else _open
        with open(path, "rb", opener=opener) as file:
            found = os.fstat(file.fileno())
            is_pipe = is_input and stat.S_IFMT(found.st_mode) in {stat.S_IFIFO, stat.S_IFSOCK}
            if not (is_pipe or stat.S_ISREG(found.st_mode)):
                raise ReadError(path, "is not a regular file")
            data = file.read(limit + 1) or b""  # None: a pseudo file, such as /proc/kmsg, has no data now
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _read_error(path, error, Absence.ABSENT) from None
    except UnsafeDirectory as error:
        raise UnsafeReadError(path, str(error), errno=EPERM) from None
    except OSError as error:
        if is_own and error.errno == ELOOP:
            raise ReadError(path, open_error_reason(error), errno=ELOOP) from None
        raise _read_error(path, error, Absence.UNREADABLE) from None
    if len(data) > limit:
        raise ReadError(path, f"file is {max(found.st_size, len(data))} bytes, limit {limit}")
    return FileContent(data, found.st_mtime)


CREDENTIALS_MAX: Final = 1 << 20
"""Largest accepted file of a token or of certificates [bytes]; the CA certificates of Debian have 0.2 MiB."""


def read_credentials(path: "StrPath") -> bytes:
    """Read a file with a token, a key or certificates, which the configuration names.

    Libraries such as OpenSSL open it by its path: a pipe would stop them, and a device has no end. Blocks on
    the disk. Raises OSError with the path, also for what is not a regular file or is over CREDENTIALS_MAX.
    """
    try:
        return read_bounded(Path(path), CREDENTIALS_MAX).data
    except ReadError as error:
        raise OSError(error.errno or EINVAL, error.reason, os.fspath(path)) from None


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block


def open_input(path: str, flags: int) -> int:
    """Open a file that a command reads once; ``-`` is standard input. An opener of :func:`open`.

    Blocks up to WRITER_S on a pipe without data. Raises OSError; ENXIO: no process writes to the pipe.
    """
    # a copy of the descriptor: the pipe may belong to another user
    fd = os.dup(0) if path == "-" else os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if path != "-" and stat.S_ISFIFO(os.fstat(fd).st_mode):
        pipe = select.poll()
        pipe.register(fd, select.POLLIN)
        if not pipe.poll(WRITER_S * 1000):
            with suppress(PermissionError):  # a writer that ends: at the pipe's end, if it was the only one
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            if pipe.poll(0) == [(fd, select.POLLHUP)]:  # at its end, and without data
                os.close(fd)
                raise OSError(ENXIO, f"no process wrote to this pipe within {WRITER_S:g} s; start its writer")
    os.set_blocking(fd, True)
    return fd


def _open_own(path: str, flags: int) -> int:
    with CheckedDirectory(Path(path).parent) as directory:
        return directory.open(Path(path).name, flags | os.O_NONBLOCK)


def _read_error(path: Path, error: OSError, absence: Absence) -> ReadError:
    return ReadError(path, error.strerror or str(error), absence, error.errno or 0)


def is_current_file(fd: int, path: Path) -> bool:
    """Return True if descriptor `fd` is open on the file that now has the path `path`; False: it was
    replaced."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(fd))


def unlock_and_close(fd: int) -> None:
    """Release the flock(2) lock of descriptor `fd` and close it. Closing alone keeps the lock if a forked
    child process has the descriptor too."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


# --- directories and locks ---------------------------------------------------------------------------------

LOCK_FILE: Final = "agent.lock"
"""Name of the file that DirectoryLock locks in the agent's runtime directory and in its state directory."""


class UnsafeDirectory(OSError):
    """Another user could replace the files of a directory; the message has the directory and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(EPERM, f"directory {path} {reason}")
        self.reason = reason
        """Reason without the path."""

    def __str__(self) -> str:
        return str(self.strerror)


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
            raise FileExistsError(EEXIST, f"{directory} is not a directory") from None
        return
    directory.chmod(mode)


class OpenDirectory:
    """Open directory, whose files are opened, made, renamed and removed by their names in it.

    No symbolic link to a file is followed.

    Attributes:
        path: Path of the directory, for texts.
        fd: Descriptor of the directory, which :meth:`close` closes.
    """

    def __init__(self, path: Path) -> None:
        """Open a directory. Raises OSError; ENOTDIR: the path is no directory."""
        self.path = path
        self.fd = self._open_path()

    def _open_path(self) -> int:
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file; return its descriptor. Raises OSError; ELOOP: the file is a symbolic link."""
        try:
            return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=self.fd)
        except OSError as error:
            error.filename = os.fspath(self.path / name)
            raise

    def stat(self, name: str) -> os.stat_result:
        """Return the status of a file, or of a link itself. Raises OSError."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def is_current_file(self, fd: int, name: str) -> bool:
        """Return True if descriptor `fd` is open on the file that now has this name; False: it was
        replaced."""
        try:
            return os.path.samestat(self.stat(name), os.fstat(fd))
        except FileNotFoundError:
            return False

    def rename(self, name: str, new: str) -> None:
        """Rename a file; replaces a file or a link that has the new name. Raises OSError."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file if there is one. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def names(self) -> list[str]:
        """Return the names of the directory's files. Raises OSError."""
        return os.listdir(self.fd)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.fd)


class CheckedDirectory(OpenDirectory):
    """Open directory in which only this user, root and the directory's group can replace files.

    Neither the directory nor a file can be replaced between the check and the use.
    """

    def __init__(self, path: Path, *, accepts_link: bool = True) -> None:
        """Open and check a directory.

        Args:
            path: The directory.
            accepts_link: False: a symbolic link is refused. True: a link that this user or root owns is
                followed.

        Raises:
            UnsafeDirectory: Another user owns the directory or the link, or all users may write to it.
            OSError: The directory cannot be opened; ENOTDIR: the path is no directory.
        """
        self._accepts_link = accepts_link
        super().__init__(path)
        try:
            _check_open_directory(path, os.fstat(self.fd))
        except UnsafeDirectory:
            self.close()
            raise

    def _open_path(self) -> int:
        return _open_directory(self.path, accepts_link=self._accepts_link)


LINKS_MAX: Final = 8
"""Largest number of symbolic links that lead to a directory."""


def _open_directory(path: Path, *, accepts_link: bool, links: int = 0) -> int:
    """Open a directory; follow a link of a trusted owner. Owner and target are read from one descriptor."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in {ELOOP, ENOTDIR}:
            raise
        refusal = error
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode) or links == LINKS_MAX:
            raise refusal
        if not accepts_link:
            raise UnsafeDirectory(path, "is a symbolic link; remove it")
        _check_owner(path, found)
        target = os.readlink("", dir_fd=link)
    finally:
        os.close(link)
    return _open_directory(path.parent / target, accepts_link=True, links=links + 1)


def _check_open_directory(path: Path, found: os.stat_result) -> None:
    _check_owner(path, found)
    if found.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(found.st_mode)
        advice = "name a directory in it" if mode & stat.S_ISVTX else "run chmod o-w on it"
        raise UnsafeDirectory(path, f"has mode {mode:04o}: all users may write to it; {advice}")


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in {0, os.geteuid()}:
        raise UnsafeDirectory(path, _foreign_owner(found.st_uid))


def check_directory(path: Path, *, accepts_link: bool = True) -> None:
    """Check a directory as :class:`CheckedDirectory` does. Raises the same errors."""
    CheckedDirectory(path, accepts_link=accepts_link).close()


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

    def relock_if_replaced(self) -> bool:
        """Lock the file again if another process removed or replaced it; return True if so.

        A removed directory is created again. Raises the same errors as the constructor; then the old lock is
        kept.
        """
        if is_current_file(self._fd, self.path):
            return False
        make_directory(self.path.parent)
        removed_fd, self._fd = self._fd, self._lock()
        os.close(removed_fd)
        return True

    def close(self) -> None:
        """Release the lock of the directory; the locked file stays."""
        unlock_and_close(self._fd)

    def _lock(self) -> int:
        with CheckedDirectory(self.path.parent) as directory:
            fd = directory.open(self.path.name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o640)
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
    if problem := own_file_problem(fd):
        raise ValueError(problem)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockHeld(os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown") from None


def own_file_problem(fd: int) -> str:
    """Return why an open file must not be written: it may belong to another program; empty: it may be."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    return "has a second name (hard link)" if found.st_nlink > 1 else ""


def open_error_reason(error: OSError) -> str:
    """Return why a file could not be opened with O_NOFOLLOW, as text: for example, it is a symbolic link."""
    return "is a symbolic link" if error.errno == ELOOP else error.strerror or str(error)


# --- paths -------------------------------------------------------------------------------------------------

StrPath = str | os.PathLike[str]
"""Path of a file or directory, as :func:`open` accepts it."""


def exists(path: Path, *, follow_symlinks: bool = True) -> bool:
    """Return whether a file exists. Raises OSError if the kernel does not say, unlike Path in Python 3.14."""
    try:
        path.stat(follow_symlinks=follow_symlinks)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def may_exist(path: Path) -> bool:
    """Return False if a file does not exist; True if it exists, or if the kernel does not say."""
    try:
        return exists(path)
    except OSError:
        return True


def absolute_path(path: StrPath) -> str:
    """Return a path made absolute from the working directory, without following links.

    Raises:
        ConfigError: The path is relative, and the working directory was removed or cannot be found.
    """
    try:
        return os.path.abspath(os.fspath(path))
    except OSError as error:
        raise ConfigError(
            f"path {os.fspath(path)!r} is relative, and the working directory cannot be used: "
            f"{error.strerror}; write an absolute path"
        ) from None


def as_path(argument: str, value: StrPath | None) -> Path | None:
    """Convert the value of an argument to a Path; None stays None.

    Raises:
        ConfigError: The value is neither a string nor a path object, or is empty.
    """
    if value is None:
        return None
    given: object = value
    if not isinstance(given, str | os.PathLike) or not given or not isinstance(os.fspath(given), str):
        raise ConfigError(f"argument {argument}: {value!r} is not a path; pass a string or a Path")
    return Path(value)
