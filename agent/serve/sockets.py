"""Unix sockets: created with the right mode, removed when stale, and never taken from a running server."""

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

NO_SOCKET: Final = "no such socket"
NO_SERVER: Final = "no process serves this socket"


class UnixListener:
    """Listening unix socket and its file.

    Attributes:
        sock: The socket. Its server may close it; :meth:`close` removes the file.
    """

    def __init__(self, path: Path) -> None:
        """Bind the socket and listen; clients that connect before the socket is served wait.

        The directory must exist.

        Raises:
            Busy: Another process serves a socket there.
            ConfigError: The path is taken by a file that is not a socket, or too long.
            PermissionDenied: The file may not be created.
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
            raise PermissionDenied(f"{path}: may not create this socket ({error.strerror})") from error
        except OSError as error:
            self.sock.close()
            raise ConfigError(f"{path}: cannot create this socket ({error.strerror})") from error
        except (Busy, ConfigError):
            self.sock.close()
            raise

    def is_intact(self) -> bool:
        """Return whether the file at the path is still this socket. Raises OSError if that cannot be
        determined."""
        return _identity(self.path) == self._identity

    def remove(self) -> None:
        """Remove the file if it is still this socket. Connections continue."""
        if self.is_intact():
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the socket, and remove the file if it is still this socket."""
        self.sock.close()
        self.remove()


def make_directory(path: Path, *, flag: str) -> None:
    """Create a directory for sockets (0750) and its parents, unless they exist.

    Raises:
        ConfigError: The directory cannot be created.
        PermissionDenied: The directory may not be created; ``flag`` chooses another.
    """
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
    except PermissionError as error:
        raise PermissionDenied(
            f"{path}: may not create this directory; choose another with {flag}"
        ) from error
    except FileExistsError as error:
        raise ConfigError(f"{path}: is not a directory; choose another with {flag}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot create this directory ({error.strerror})") from error


def check_length(path: Path, *, base: Path, flag: str) -> None:
    """Refuse a path that is too long for a unix socket.

    Raises:
        ConfigError: The path is too long; has its length and the limit.
    """
    size = len(os.fsencode(path))
    if size > PATH_LIMIT:
        used = len(os.fsencode(base))
        raise ConfigError(f"socket path is {size} bytes, limit {PATH_LIMIT}; {flag} uses {used} of them")


def why_no_connection(path: Path | str, error: OSError) -> str:
    """Return the reason why connecting to a socket failed, without the path."""
    size = len(os.fsencode(path))
    if size > PATH_LIMIT:
        return f"is {size} bytes, a socket's limit is {PATH_LIMIT}"
    if isinstance(error, FileNotFoundError):
        return NO_SOCKET
    if isinstance(error, ConnectionRefusedError):
        return NO_SERVER if Path(path).is_socket() else "is not a socket"
    return error.strerror or str(error)


def remove_leftovers(directory: Path, *, keep: Collection[Path]) -> None:
    """Remove our own sockets (``*.sock``) on which no server listens, e.g. of a driver that is no longer
    configured.

    Sockets of other users, and those that cannot be removed, stay: they do no harm.
    """
    for path in directory.glob("*.sock"):
        with suppress(OSError, Busy, ConfigError):
            if path not in keep and path.lstat().st_uid == os.geteuid():
                _remove_stale(path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _remove_stale(path: Path) -> None:
    """Remove the socket at a path if no server listens on it; do nothing if there is no socket."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path}: is not a socket; remove this file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(os.fspath(path))
    if code == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif code in (0, errno.EAGAIN):  # accepted, or waiting in a full queue
        raise Busy(f"{path}: another process serves this socket")
    elif code != errno.ENOENT:  # gone meanwhile
        raise OSError(code, os.strerror(code))
