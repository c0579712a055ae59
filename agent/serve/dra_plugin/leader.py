"""Leader election between two instances of a driver, as in a rolling update.

The kubelet keeps one health state per driver: an old instance would overwrite the verdicts of the new one,
and when the old one's stream ends the kubelet forgets them all. So only the newest instance is the leader
and sends health, and it sends all devices again when another instance has ended.

Each instance holds a locked file in the driver's directory. The kernel releases the lock when the process
ends, however it ends, so that no instance has to check a pid.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ConfigError, PermissionDenied
from agent.system.files import is_open_file, unlock

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"instance-([0-9]{20})-([0-9a-f]{16})\.lock")
_READ_LIMIT: Final = 4096


class LeaderState(NamedTuple):
    """State of the driver's instances when the directory was last checked."""

    is_leader: bool
    """Whether this instance is the leader: no other running instance is newer."""
    others: int
    """Number of other running instances of the driver."""
    departed: bool
    """Whether an instance that ran at the check before has ended."""


class LeaderElection:
    """Lock file of this instance, and checks of the others. One thread at a time. Never waits for another
    instance.
    """

    def __init__(self, directory: Path, pod_uid: str = "") -> None:
        """Create the lock file. The directory must exist.

        Raises:
            ConfigError: The file cannot be created there.
            PermissionDenied: The file may not be created.
        """
        self._directory = directory
        self._pod_uid = pod_uid
        # boot time continues while the machine sleeps, and setting a clock does not change it
        started_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._path = directory / f"instance-{started_ns:020d}-{secrets.token_hex(8)}.lock"
        self._others: frozenset[str] = frozenset()
        try:
            self._fd = self._create()
        except PermissionError as error:
            raise PermissionDenied(f"{self._path}: may not create this file ({error.strerror})") from error
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot create this file ({error.strerror})") from error

    def check(self) -> LeaderState:
        """Return the state of all instances. Removes the files of ended instances, and creates ours again
        if it was removed.

        Raises:
            OSError: The directory cannot be read, or our file not be created again.
        """
        if not is_open_file(self._fd, self._path):
            os.close(self._recreate())
        others = frozenset(name for name in os.listdir(self._directory) if self._is_running(name))
        departed, self._others = self._others - others, others
        return LeaderState(
            is_leader=all(name < self._path.name for name in others),
            others=len(others),
            departed=bool(departed),
        )

    def leave(self) -> None:
        """Remove the lock file of this instance and release the lock."""
        with suppress(OSError):
            if is_open_file(self._fd, self._path):
                self._path.unlink()
        unlock(self._fd)

    def _create(self) -> int:
        """Create and lock the file of this instance; return its descriptor."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # waits at most for the check of another instance
                if is_open_file(fd, self._path):  # else that check removed the file, which was not yet locked
                    os.pwrite(fd, json.dumps({"pid": os.getpid(), "podUid": self._pod_uid}).encode(), 0)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _recreate(self) -> int:
        """Create and lock a file that was removed; return the old descriptor."""
        log.warning("%s: lock file was removed by another process; created again", self._path)
        before, self._fd = self._fd, self._create()
        return before

    def _is_running(self, name: str) -> bool:
        if name == self._path.name or not _NAME.fullmatch(name):
            return False
        path = self._directory / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False  # removed meanwhile, or not readable
        try:
            # shared: two instances that check at the same time must not take each other for the owner
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if name not in self._others:
                log.info("%s: another instance of the driver is running (%s)", path, _describe_owner(fd))
            return True
        except OSError:
            return False
        else:
            with suppress(OSError):  # a file that stays does no harm
                path.unlink()
                log.info("%s: instance has ended (%s); file removed", path, _describe_owner(fd))
            return False
        finally:
            os.close(fd)


def _describe_owner(fd: int) -> str:
    """Describe an instance from the contents of its file, for the log."""
    try:
        owner = json.loads(os.pread(fd, _READ_LIMIT, 0))
        return f"pid {int(owner['pid'])}, pod {str(owner['podUid'])[:80] or 'unknown'!r}"
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return "owner unknown"
