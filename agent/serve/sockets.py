"""Listening unix sockets: created with mode 0660, removed with their file.

The module also detects a socket that another server uses.
"""

import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.system.files import UnsafeDirectory, check_directory, make_directory

if TYPE_CHECKING:
    import asyncio.trsock

SOCKET_MODE: Final = 0o660

BACKLOG: Final = 100

STARTUP_S: Final = 0.5
"""Age up to which a socket may belong to a server that has created it and does not listen yet [s]."""
_PROBE_S: Final = 0.02
"""Interval of the checks whether that server listens [s]."""

_UCRED: Final = struct.Struct("iII")
"""Layout of the kernel's ``struct ucred``: pid, uid, gid."""

NO_SOCKET: Final = "no such socket"
NO_SERVER: Final = "no process serves this socket"


class UnixListener:
    """Listening unix socket and its file.

    Attributes:
        path: Path of the socket's file.
        sock: The socket. A server that serves it may close it.
    """

    def __init__(self, path: Path) -> None:
        """Create the socket at a path in an existing directory, and listen. Replaces a stale socket.

        Blocks up to 0.5 s, if the path has a new socket on which no server listens yet.

        Raises:
            ResourceBusyError: Another process serves a socket at the path.
            ConfigError: The path is too long, or a file that is not a socket is there.
            PermissionDeniedError: This process may not create the file.
        """
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            # bind() gives the file the socket's mode, less the umask. The chmod() after it undoes the umask.
            os.fchmod(self.sock.fileno(), SOCKET_MODE)
            self.sock.bind(os.fspath(path))
            self._identity = _identity(path)
            path.chmod(SOCKET_MODE)
            self.sock.listen(BACKLOG)
        except PermissionError as error:
            self.sock.close()
            raise PermissionDeniedError(
                f"socket {path}: cannot be created: {error.strerror}; run as root, or change the directory's "
                "permissions"
            ) from error
        except OSError as error:
            self.sock.close()
            raise ConfigError(f"socket {path}: cannot be created: {error.strerror}") from error
        except (ResourceBusyError, ConfigError):
            self.sock.close()
            raise

    def is_intact(self) -> bool:
        """Return True if the file at the path is still this socket.

        False if another process removed or replaced it. Raises OSError if the directory cannot be read.
        """
        return _identity(self.path) == self._identity

    def remove(self) -> None:
        """Remove the socket's file if the file is still this socket. Open connections stay open."""
        if self.is_intact():
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the socket, and remove its file if the file is still this socket."""
        self.sock.close()
        self.remove()


class PeerCredentials(NamedTuple):
    """Process that connected to a unix socket, as the kernel recorded it at the time of the connection."""

    pid: int
    uid: int


def peer_credentials(connection: "socket.socket | asyncio.trsock.TransportSocket") -> PeerCredentials:
    """Return the process that connected to a unix socket. Raises OSError if the connection is closed."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
    return PeerCredentials(pid, uid)


def make_socket_directory(path: Path, *, flag: str, accepts_link: bool = True) -> None:
    """Create a directory for sockets (mode 0750) and its parents, unless they exist, and check its safety.

    No other user may be able to replace files in it.

    Args:
        path: The directory.
        flag: Command-line flag that the error text recommends to choose another directory.
        accepts_link: False: the directory must not be a symbolic link.

    Raises:
        ConfigError: The directory cannot be created, or another user can replace its files.
        PermissionDeniedError: This process may not create the directory.
    """
    try:
        make_directory(path, 0o750)
        check_directory(path, accepts_link=accepts_link)
    except UnsafeDirectory as error:
        raise ConfigError(f"directory {path}: {error}, or choose another directory with {flag}") from None
    except PermissionError as error:
        raise PermissionDeniedError(
            f"directory {path}: cannot be created: no permission; choose another with {flag}"
        ) from error
    except FileExistsError as error:
        raise ConfigError(f"path {path}: is not a directory; choose another with {flag}") from error
    except OSError as error:
        raise ConfigError(f"directory {path}: cannot be created: {error.strerror}") from error


def check_path_length(path: Path, *, flag: str) -> None:
    """Check that a socket's path is not too long for a unix socket; ``flag`` sets its directory.

    Raises:
        ConfigError: The path is too long.
    """
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"socket path {path}: {size} bytes, limit {SOCKET_PATH_LIMIT}; choose a shorter one with {flag}"
        )


def connection_failure_reason(path: Path | str, error: OSError) -> str:
    """Return the reason of a failed connection to the socket at `path`, as text without the path."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        return f"path is {size} bytes, limit {SOCKET_PATH_LIMIT} for a unix socket"
    if isinstance(error, FileNotFoundError):
        return NO_SOCKET
    if isinstance(error, ConnectionRefusedError):
        return NO_SERVER if Path(path).is_socket() else "is not a socket"
    return error.strerror or str(error)


def remove_stale_sockets(directory: Path, *, keep: Collection[Path]) -> None:
    """Remove sockets (``*.sock``) of this user on which no server listens, except the paths in ``keep``.

    Such a socket belongs, for example, to a driver that is no longer configured. A socket that cannot be
    removed stays. If the directory is a symbolic link, all sockets stay.
    """
    if directory.is_symlink():
        return
    for path in directory.glob("*.sock"):
        with suppress(OSError, ResourceBusyError, ConfigError):
            if path not in keep and path.lstat().st_uid == os.geteuid():
                _remove_stale(path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _remove_stale(path: Path) -> None:
    """Remove the socket at a path if no server listens on it; do nothing if there is no file.

    A new socket may belong to a server between its bind() and its listen(), so the function waits until the
    file is :data:`STARTUP_S` old.

    Raises:
        ResourceBusyError: A server listens on the socket.
        ConfigError: The file is not a socket.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(
            f"file {path}: is not a socket, but a socket must be created there; remove the file"
        )
    age_s = max(0.0, time.time() - status.st_ctime)  # negative after a step of the clock
    deadline_s = time.monotonic() + STARTUP_S - age_s
    while (code := _connect_code(path)) == errno.ECONNREFUSED and time.monotonic() < deadline_s:
        time.sleep(_PROBE_S)
    if code == errno.ECONNREFUSED:
        path.unlink(missing_ok=True)
    elif code in (0, errno.EAGAIN):  # accepted, or waiting in a full queue
        raise ResourceBusyError(f"socket {path}: another process serves it; stop that process")
    elif code != errno.ENOENT:  # gone meanwhile
        raise OSError(code, os.strerror(code))


def _connect_code(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fspath(path))
