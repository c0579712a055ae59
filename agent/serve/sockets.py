"""Listening unix sockets: created with mode 0660, removed with their file.

The module also detects a socket that another server uses. Servers of drahealth create, replace and remove
sockets only while they hold a lock of the directory (flock(2)), so that none removes the socket with which
another one has just replaced a stale socket.
"""

import asyncio
import errno
import fcntl
import os
import resource
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError
from agent.model.socket_address import SOCKET_PATH_LIMIT
from agent.system.files import (
    CheckedDirectory,
    UnsafeDirectory,
    check_directory,
    is_current_file,
    make_directory,
    unlock_and_close,
)

if TYPE_CHECKING:
    import asyncio.trsock

Connection = TypeVar("Connection")

SOCKET_MODE: Final = 0o660

BACKLOG: Final = 100
"""Number of connections that may wait until a server accepts them."""
ACCEPT_LIMIT: Final = 8
"""Largest number of connections that a server accepts at once, before its limit of connections applies."""
ACCEPT_STEPS: Final = 8
"""Number of steps of the event loop in which accepted connections reach their server."""

CONNECTION_LIMIT: Final = 128
"""Largest number of connections that one socket serves at a time. The kubelet needs one."""
CONNECTION_MIN: Final = 4
"""Number of connections that a socket serves even if the process may open few descriptors."""

STARTUP_S: Final = 0.5
"""Age up to which a socket may belong to a server that has created it and does not listen yet [s]."""
_PROBE_S: Final = 0.02
"""Interval of the checks whether that server listens [s]."""
LOCK_S: Final = 2 * STARTUP_S
"""Longest wait for the lock of a directory, which a server holds while it creates a socket [s]."""

_UCRED: Final = struct.Struct("iII")
"""Layout of the kernel's ``struct ucred``: pid, uid, gid."""

NO_SOCKET: Final = "no such socket"
NO_SERVER: Final = "no process serves this socket"
SERVED: Final = "another process serves it; stop that process"


class UnixListener:
    """Listening unix socket and its file.

    Attributes:
        path: Path of the socket's file.
        sock: The socket. A server that serves it may close it.
    """

    def __init__(self, path: Path) -> None:
        """Create the socket at a path in an existing directory, and listen. Replaces a stale socket.

        Blocks up to 0.5 s, if the path has a new socket on which no server listens yet, and up to 1 s, if
        another server creates a socket in the directory.

        Raises:
            ResourceBusyError: Another process serves a socket at the path, or creates it.
            ConfigError: The path is too long, or a file that is not a socket is there.
            PermissionDeniedError: This process may not create the file.
        """
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._file = -1
        try:
            with _locked_directory(path.parent) as directory:
                _remove_stale(directory, path)
                # bind() gives the file the socket's mode, less the umask. chmod() after it undoes the umask.
                os.fchmod(self.sock.fileno(), SOCKET_MODE)
                # By path, which ss(8) shows; /proc/self/fd would be shown instead, and the current directory
                # is that of all threads. So the file is looked up in the checked directory before listen():
                # it is missing there if the directory was replaced, and no client can have connected.
                self.sock.bind(os.fspath(path))
                # open, so that no other file gets its inode number while this object compares it
                self._file = _open_bound(directory, path.name)
                os.chmod(path.name, SOCKET_MODE, dir_fd=directory.fd)
                self.sock.listen(BACKLOG)
        except PermissionError as error:
            self.close()
            raise PermissionDeniedError(
                f"socket {path}: cannot be created: {error.strerror}; run as root, or change the directory's "
                "permissions"
            ) from error
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:  # by a server without the lock, after the check
                raise ResourceBusyError(f"socket {path}: {SERVED}") from error
            raise ConfigError(f"socket {path}: cannot be created: {error.strerror}") from error
        except (ResourceBusyError, ConfigError):
            self.close()
            raise

    def is_intact(self) -> bool:
        """Return True if the file at the path is still this socket.

        False if another process removed or replaced it. Raises OSError if the directory cannot be read.
        """
        return self._file >= 0 and is_current_file(self._file, self.path)

    def remove(self) -> None:
        """Remove the socket's file if the file is still this socket. Open connections stay open.

        The file stays if another server creates a socket in the directory for over a second, or if another
        user could replace the directory's files.
        """
        with suppress(FileNotFoundError, ResourceBusyError, UnsafeDirectory):
            if self.is_intact():
                with _locked_directory(self.path.parent) as directory:
                    if directory.is_current_file(self._file, self.path.name):
                        directory.unlink(self.path.name)

    def close(self) -> None:
        """Close the socket, and remove its file if the file is still this socket."""
        self.sock.close()
        try:
            self.remove()
        finally:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def set_backlog(server: asyncio.AbstractServer, sock: socket.socket) -> None:
    """Let BACKLOG connections wait for a server, whose backlog is ACCEPT_LIMIT; close it if that fails."""
    try:
        sock.listen(BACKLOG)
    except OSError:
        server.close()
        raise


async def close_server(server: asyncio.AbstractServer) -> None:
    """Close the listening sockets of a server of asyncio, after the accepted connections reached it.

    asyncio neither serves nor closes a connection that it has accepted before the server is closed.
    """
    assert isinstance(server, asyncio.Server)
    for sock in server.sockets:
        asyncio.get_running_loop().remove_reader(sock)
    for _ in range(ACCEPT_STEPS):
        await asyncio.sleep(0)
    server.close()


def is_lost(transport: asyncio.BaseTransport) -> bool:
    """Return True if asyncio has closed the socket of a connection.

    write() and abort() of asyncio raise AttributeError then if data waited for the peer when the connection
    was closed, and were sent later.
    """
    return transport.is_closing() and transport.get_extra_info("socket").fileno() < 0


def abort_transport(transport: asyncio.WriteTransport) -> None:
    """Close a connection without sending what waits for its peer; does nothing if it has ended."""
    if not is_lost(transport):
        transport.abort()


class PeerCredentials(NamedTuple):
    """Process that connected to a unix socket, as the kernel recorded it at the time of the connection."""

    pid: int
    uid: int


def peer_credentials(connection: "socket.socket | asyncio.trsock.TransportSocket") -> PeerCredentials:
    """Return the process that connected to a unix socket. Raises OSError if the connection is closed."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(data)
    return PeerCredentials(pid, uid)


def largest_peers(
    connections: Iterable[Connection], peer_of: Callable[[Connection], Hashable]
) -> tuple[list[Connection], int]:
    """Return all connections of the peers that have most of them, in the given order.

    Also returns the number of connections that each of these peers has. A full server ends one of these
    connections, so that no peer can take the place of one that has fewer.
    """
    connections = tuple(connections)
    numbers = Counter(map(peer_of, connections))
    most = max(numbers.values(), default=0)
    return [connection for connection in connections if numbers[peer_of(connection)] == most], most


def longest_wait_of_largest_peer(
    waiting: Iterable[Connection],
    peer_of: Callable[[Connection], Hashable],
    size_of: Callable[[list[Connection]], int],
) -> Connection:
    """Return the longest wait of the peer whose waits together take most memory.

    Args:
        waiting: At least one wait for a peer to read, the longest first.
        peer_of: Returns the peer of a wait.
        size_of: Returns the memory of one peer's waits together [bytes].
    """
    by_peer: dict[Hashable, list[Connection]] = {}
    for wait in waiting:
        by_peer.setdefault(peer_of(wait), []).append(wait)
    return max(by_peer.values(), key=size_of)[0]


def connection_limit(sockets: int) -> int:
    """Return the number of connections that each of a process's sockets may serve at a time.

    All sockets together take half of the descriptors that the process may open (RLIMIT_NOFILE): the other
    half is for the devices and files that the process reads. The HTTP server counts as one socket, however
    many addresses it has.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return CONNECTION_LIMIT
    return max(CONNECTION_MIN, min(CONNECTION_LIMIT, descriptors // 2 // sockets))


def make_socket_directory(path: Path, *, setting: str, accepts_link: bool = True) -> None:
    """Create a directory for sockets (mode 0750) and its parents, unless they exist, and check its safety.

    No other user may be able to replace files in it.

    Args:
        path: The directory.
        setting: Flag or argument that the error text recommends to choose another directory.
        accepts_link: False: the directory must not be a symbolic link.

    Raises:
        ConfigError: The directory cannot be created, or another user can replace its files.
        PermissionDeniedError: This process may not create the directory.
    """
    try:
        make_directory(path, 0o750)
        check_directory(path, accepts_link=accepts_link)
    except UnsafeDirectory as error:
        raise ConfigError(
            f"directory {path}: {error.reason}, or choose another directory with {setting}"
        ) from None
    except PermissionError as error:
        raise PermissionDeniedError(
            f"directory {path}: cannot be created: no permission; choose another with {setting}"
        ) from error
    except FileExistsError as error:
        raise ConfigError(f"path {path}: is not a directory; choose another with {setting}") from error
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
                with _locked_directory(directory) as locked:
                    _remove_stale(locked, path)


def _open_bound(directory: CheckedDirectory, name: str) -> int:
    """Open the file of a socket that was bound by its path; return a descriptor.

    Raises OSError if the directory, or the file, is not the one at the path.
    """
    with suppress(FileNotFoundError):
        fd = directory.open(name, os.O_PATH)
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise OSError(errno.ESTALE, "the directory was replaced by another process")


@contextmanager
def _locked_directory(path: Path) -> Iterator[CheckedDirectory]:
    """Open and lock a directory for changes of its sockets in a ``with`` block. Blocks up to 1 s.

    Raises:
        ResourceBusyError: Another process holds the lock.
        OSError: The directory cannot be opened, or another user could replace its files.
    """
    directory = CheckedDirectory(path)
    try:
        until_s = time.monotonic() + LOCK_S
        while not _try_lock(directory.fd):
            if time.monotonic() >= until_s:
                raise ResourceBusyError(
                    f"directory {path}: another process has locked it (flock) for {LOCK_S:g} s; find that "
                    "process with lslocks(8), and stop it"
                )
            time.sleep(_PROBE_S)
        yield directory
    finally:
        unlock_and_close(directory.fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(directory: CheckedDirectory, path: Path) -> None:
    """Remove the socket at a path if no server listens on it; do nothing if there is no file.

    The caller holds the lock of the path's directory.

    A new socket may belong to a server between its bind() and its listen(), so the function waits until the
    file is :data:`STARTUP_S` old.

    Raises:
        ResourceBusyError: A server listens on the socket.
        ConfigError: The file is not a socket.
    """
    try:
        status = directory.stat(path.name)
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
        if _is_replaced(directory, path.name, status):  # by a server without the lock
            _remove_stale(directory, path)
        else:
            directory.unlink(path.name)
    elif code in (0, errno.EAGAIN):  # accepted, or waiting in a full queue
        raise ResourceBusyError(f"socket {path}: {SERVED}")
    elif code != errno.ENOENT:  # gone meanwhile
        raise OSError(code, os.strerror(code))


def _is_replaced(directory: CheckedDirectory, name: str, before: os.stat_result) -> bool:
    """Return whether a name has another file than before, even one with the same inode number."""
    with suppress(FileNotFoundError):
        found = directory.stat(name)
        return not os.path.samestat(found, before) or found.st_ctime_ns != before.st_ctime_ns
    return False


def _connect_code(path: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fspath(path))
