"""Locks between the running instances of a driver: the election of the leader, and one prepare at a time.

During a rolling update two instances run, and the kubelet keeps one health state per driver: each would
overwrite the other's verdicts. So the newest instance that the kubelet uses is the leader, which alone sends
health. A newer instance that the kubelet does not use yet mutes no other. When a stream of one instance ends,
the kubelet forgets all verdicts, so the leader sends all devices again.

Another lock serializes prepares and unprepares across all instances on the Kubernetes node. Threads of one
process acquire it in the order of their calls. Both locks are on files in the driver's directory, which the
kernel unlocks when the process ends.
"""

import fcntl
import json
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ConfigError, PermissionDeniedError
from agent.prepare.errors import TransientError
from agent.system.files import CheckedDirectory, unlock_and_close
from agent.system.output import get_logger

log = get_logger(__name__)

_NAME: Final = re.compile(r"instance-([0-9]{20})-([0-9a-f]{16})\.lock")
_UNNAMED: Final = "."
"""Prefix of the name of an instance file that is not locked yet, or whose instance does not count yet."""
_READ_LIMIT: Final = 4096


class InstancesState(NamedTuple):
    """Result of one check of the running instances of a driver."""

    is_leader: bool
    """True: this instance is the newest running one of the driver."""
    other_count: int
    """Number of other running instances of the driver."""
    has_any_ended: bool
    """Whether another instance has ended since the previous check."""


class LeaderElection:
    """Leader election among the instances of a driver: each instance has one lock file. Not thread-safe."""

    def __init__(self, directory: Path, pod_uid: str = "", *, counts: bool = True) -> None:
        """Create the lock file. The directory must exist. Without `counts` other instances ignore this one.

        Raises:
            ConfigError: The file cannot be created in the directory.
            PermissionDeniedError: This process may not create the file.
        """
        self._directory = directory
        self._pod_uid = pod_uid
        # boot time: setting the clock does not change it
        started_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._path = directory / f"instance-{started_ns:020d}-{secrets.token_hex(8)}.lock"
        self._name = self._path.name if counts else f"{_UNNAMED}{self._path.name}"
        self._others: frozenset[str] = frozenset()
        try:
            self._fd = self._create()
        except PermissionError as error:
            raise PermissionDeniedError(
                f"instance file {self._path}: cannot be created: {error.strerror}; run as root"
            ) from error
        except OSError as error:
            raise ConfigError(f"instance file {self._path}: cannot be created: {error.strerror}") from error

    def check_instances(self, *, counts: bool = True) -> InstancesState:
        """Check all instances of the driver, and remove the lock files of ended instances.

        A missing lock file of this instance is created again. With `counts` other instances count this one
        from now on.

        Raises OSError if the directory cannot be read, or the file cannot be created.
        """
        with CheckedDirectory(self._directory) as directory:
            if not directory.is_current_file(self._fd, self._name):
                log.warning("instance file %s: was removed by another process; created again", self._path)
                removed_fd, self._fd = self._fd, self._create()
                os.close(removed_fd)
            if counts and self._name != self._path.name:
                directory.rename(self._name, self._path.name)
                self._name = self._path.name
            others = frozenset(name for name in directory.names() if self._check_other(directory, name))
        departed, self._others = self._others - others, others
        return InstancesState(
            is_leader=all(name < self._path.name for name in others),
            other_count=len(others),
            has_any_ended=bool(departed),
        )

    def leave(self) -> None:
        """Remove the lock file of this instance and release the lock."""
        with suppress(OSError), CheckedDirectory(self._directory) as directory:
            if directory.is_current_file(self._fd, self._name):
                directory.unlink(self._name)
        unlock_and_close(self._fd)

    def _create(self) -> int:
        """Create this instance's file in the driver's directory; return its descriptor.

        The file gets its name when it is locked: other instances remove unlocked files with such a name. It
        keeps the first name while other instances do not count this one.
        """
        new = f"{_UNNAMED}{self._path.name}"
        with CheckedDirectory(self._directory) as directory:
            while True:
                fd = directory.open(new, os.O_RDWR | os.O_CREAT, 0o640)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX)  # may wait for the check of another instance
                    os.pwrite(fd, json.dumps({"pid": os.getpid(), "podUid": self._pod_uid}).encode(), 0)
                    # else another instance removed it before the lock
                    if directory.is_current_file(fd, new):
                        directory.rename(new, self._name)
                        return fd
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)

    def _check_other(self, directory: CheckedDirectory, name: str) -> bool:
        """Return whether the instance that owns a file runs; remove the file if not."""
        instance = name.removeprefix(_UNNAMED)
        if instance == self._path.name or not _NAME.fullmatch(instance):
            return False
        path = self._directory / name
        while True:
            try:
                fd = directory.open(name, os.O_RDONLY | os.O_NONBLOCK)
            except OSError:
                return False  # removed meanwhile, or not readable
            try:
                # shared, so that two instances that check a third at the same time both see that it has ended
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not directory.is_current_file(fd, name):
                    continue  # its instance, or an operator, replaced it meanwhile
            except BlockingIOError:
                if name == instance and name not in self._others:
                    log.info(
                        "instance file %s: another instance of the driver is running: %s; the newest one "
                        "leads",
                        path,
                        _describe_owner(fd),
                    )
                return name == instance
            except OSError:
                return False
            else:
                with suppress(OSError):  # a file that stays does no harm
                    directory.unlink(name)
                    log.info(
                        "instance file %s: removed: the instance of the driver that wrote it has ended: %s",
                        path,
                        _describe_owner(fd),
                    )
                return False
            finally:
                os.close(fd)


def _describe_owner(fd: int) -> str:
    """Return PID and pod of the driver instance that wrote an open file, for the log."""
    try:
        owner = json.loads(os.pread(fd, _READ_LIMIT, 0))
        return f"pid {int(owner['pid'])}, pod {str(owner['podUid'])[:80] or 'unknown'!r}"
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return "owner unknown"


# --- one prepare at a time ---------------------------------------------------------------------------------

FILE: Final = "serialize.lock"
"""Name of the locked file in the driver's directory, as in Kubernetes' own drivers."""
POLL_S: Final = 0.05
"""Time between two attempts to lock a file that another instance holds [s]."""


class SerializeLock:
    """Lock that all threads of all instances of a driver share. Thread-safe, not reentrant."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._waiters: deque[threading.Event] = deque()
        """Event of each thread that holds the lock or waits. The first holds it, and its event is set."""

    @contextmanager
    def hold(self, until_s: float) -> Iterator[None]:
        """Acquire the lock for a ``with`` block; block until it is acquired.

        Args:
            until_s: Time at which the wait ends, on the clock of :func:`time.monotonic`.

        Raises:
            TransientError: The lock was not acquired: code ``deadline`` if other threads of this instance
                hold it, ``lock.timeout`` if another instance does.
            OSError: The lock's file cannot be created or locked.
        """
        self._enqueue(until_s)
        try:
            fd = self._lock_file(until_s)
            try:
                yield
            finally:
                unlock_and_close(fd)
        finally:
            self._release()

    def _enqueue(self, until_s: float) -> None:
        turn = threading.Event()
        with self._lock:
            self._waiters.append(turn)
            self._waiters[0].set()
        if turn.wait(min(max(0.0, until_s - time.monotonic()), threading.TIMEOUT_MAX)):
            return
        with self._lock:
            if turn.is_set():  # acquired at this moment
                return
            self._waiters.remove(turn)
        raise TransientError(
            "earlier prepares or unprepares of this driver still hang, so this claim was not begun; "
            "restart the driver if they never end",
            code="deadline",
        )

    def _release(self) -> None:
        with self._lock:
            self._waiters.popleft()
            if self._waiters:
                self._waiters[0].set()

    def _lock_file(self, until_s: float) -> int:
        while (fd := self._try_lock()) is None:
            if time.monotonic() >= until_s:
                raise TransientError(
                    f"{FILE}: another instance of the driver did not release this lock in time; "
                    "restart that instance if it hangs",
                    code="lock.timeout",
                )
            time.sleep(POLL_S)
        return fd

    def _try_lock(self) -> int | None:
        """Try to lock the file once; return its descriptor, or None if another instance holds the lock."""
        with CheckedDirectory(self._path.parent) as directory:
            fd = directory.open(self._path.name, os.O_RDWR | os.O_CREAT, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if directory.is_current_file(fd, self._path.name):  # else it was removed meanwhile
                    return fd
            except BlockingIOError:
                pass
            except BaseException:
                os.close(fd)
                raise
        os.close(fd)
        return None
