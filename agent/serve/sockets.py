"""Unix sockets: made with the right mode, removed when stale, and never taken from somebody alive."""

import errno
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.errors import Busy, ConfigError, PermissionDenied
from agent.model.sockets import PATH_LIMIT

MODE: Final = 0o660

BACKLOG: Final = 100

GONE: Final = "no such socket"
UNSERVED: Final = "nobody serves this socket"


class UnixListener:
    """A listening unix socket and its file.

    Attributes:
        sock: The socket. Whoever serves it may close it; :meth:`close` removes the file.
    """

    def __init__(self, path: Path) -> None:
        """Binds and listens; clients that come before anybody serves the socket wait.

        The directory must exist.

        Raises:
            Busy: somebody serves a socket there.
            ConfigError: the path is taken by something that is no socket, or too long.
            PermissionDenied: we may not make a file there.
        """
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            # Linux takes a socket file's mode from the socket's inode, less the umask: this way it is
            # never wider than it should be, and the second call undoes a umask that narrows it.
            os.fchmod(self.sock.fileno(), MODE)
            self.sock.bind(os.fspath(path))
            self._identity = _identity(path)
            path.chmod(MODE)
            self.sock.listen(BACKLOG)
        except PermissionError as error:
            self.sock.close()
            raise PermissionDenied(f"{path}: may not make this socket ({error.strerror})") from error
        except OSError as error:
            self.sock.close()
            raise ConfigError(f"{path}: cannot make this socket ({error.strerror})") from error
        except (Busy, ConfigError):
            self.sock.close()
            raise

    def is_there(self) -> bool:
        """Whether the file is still the one that we made. Raises OSError if nobody can tell."""
        return _identity(self.path) == self._identity

    def remove(self) -> None:
        """Removes the file if it is still the one that we made. Who is connected stays so."""
        if self.is_there():
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the socket, and removes the file likewise."""
        self.sock.close()
        self.remove()


def make_directory(path: Path, *, flag: str) -> None:
    """Makes a directory for sockets (0750) and those above it, unless they are there.

    Raises:
        ConfigError: it cannot be made.
        PermissionDenied: we may not make it; ``flag`` is what chooses another.
    """
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
    except PermissionError as error:
        raise PermissionDenied(f"{path}: may not make this directory; choose another with {flag}") from error
    except FileExistsError as error:
        raise ConfigError(f"{path}: is no directory; choose another with {flag}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot make this directory ({error.strerror})") from error


def check_length(path: Path, *, base: Path, flag: str) -> None:
    """Refuses a path that no unix socket can have.

    Raises:
        ConfigError: with the arithmetic.
    """
    size = len(os.fsencode(path))
    if size > PATH_LIMIT:
        used = len(os.fsencode(base))
        raise ConfigError(f"socket path is {size} bytes, limit {PATH_LIMIT}; {flag} uses {used} of them")


def why_no_connection(path: Path | str, error: OSError) -> str:
    """Why connecting to a socket failed, in words, without the path."""
    size = len(os.fsencode(path))
    if size > PATH_LIMIT:
        return f"is {size} bytes, a socket's limit is {PATH_LIMIT}"
    if isinstance(error, FileNotFoundError):
        return GONE
    if isinstance(error, ConnectionRefusedError):
        return UNSERVED if Path(path).is_socket() else "is no socket"
    return error.strerror or str(error)


def remove_leftovers(directory: Path, *, keep: Collection[Path]) -> None:
    """Removes our own sockets (``*.sock``) that nobody serves, e.g. of a driver that is no longer configured.

    What is somebody else's stays, and so does what cannot be removed: it is in nobody's way.
    """
    for path in directory.glob("*.sock"):
        with suppress(OSError, Busy, ConfigError):
            if path not in keep and path.lstat().st_uid == os.geteuid():
                _remove_stale(path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _remove_stale(path: Path) -> None:
    """Removes a socket on which nobody accepts. Nothing there is fine."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path}: is in the way, and is no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(os.fspath(path))
    if code == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif code in (0, errno.EAGAIN):  # accepted, or waiting in a full queue
        raise Busy(f"{path}: another process serves this socket")
    elif code != errno.ENOENT:  # gone meanwhile
        raise OSError(code, os.strerror(code))
