"""Two instances of a driver at once, as in a rolling update: which of them speaks to the kubelet.

The kubelet keeps one picture per driver, whoever paints it: an old instance would overwrite what the new
one says, and when the old one's stream ends the picture is thrown away. So only the newest instance
speaks, and it says everything once more when another one is gone.

Each instance holds a locked file in the driver's directory for as long as it lives. The kernel lets go of
the lock when the process ends, however it ends, so nobody has to ask whether a pid is alive.
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
from agent.system.flock import is_file, unlock

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"instance-([0-9]{20})-([0-9a-f]{16})\.lock")
_READ_LIMIT: Final = 4096


class Turn(NamedTuple):
    """What a look at the directory showed."""

    speaks: bool
    """No living instance is newer than this one."""
    others: int
    """How many other instances live."""
    gone: bool
    """One that lived at the last look does not any more."""


class Instances:
    """This instance's file, and a look at those of the others. Of one thread; waits for nobody who lives."""

    def __init__(self, directory: Path, pod_uid: str = "") -> None:
        """Makes the file. The directory must exist.

        Raises:
            ConfigError: the file cannot be made there.
            PermissionDenied: we may not make it.
        """
        self._directory = directory
        self._pod_uid = pod_uid
        # boot time goes on while the machine sleeps, and no clock that is set disturbs it
        started_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._path = directory / f"instance-{started_ns:020d}-{secrets.token_hex(8)}.lock"
        self._others: frozenset[str] = frozenset()
        try:
            self._fd = self._hold()
        except PermissionError as error:
            raise PermissionDenied(f"{self._path}: may not make this file ({error.strerror})") from error
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot make this file ({error.strerror})") from error

    def look(self) -> Turn:
        """Who else lives. Removes the files of those that do not, and makes ours again if it was removed.

        Raises:
            OSError: the directory cannot be read, or our file not be made again.
        """
        if not is_file(self._fd, self._path):
            os.close(self._hold_again())
        others = frozenset(name for name in os.listdir(self._directory) if self._lives(name))
        gone, self._others = self._others - others, others
        return Turn(
            speaks=all(name < self._path.name for name in others), others=len(others), gone=bool(gone)
        )

    def leave(self) -> None:
        """Removes the file and lets go of it, as a process that is killed does without removing it."""
        with suppress(OSError):
            if is_file(self._fd, self._path):
                self._path.unlink()
        unlock(self._fd)

    def _hold(self) -> int:
        """Makes and locks the file; returns its descriptor."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # at most for as long as somebody else's look at it takes
                if is_file(fd, self._path):  # else that look took it for a dead one's
                    os.pwrite(fd, json.dumps({"pid": os.getpid(), "podUid": self._pod_uid}).encode(), 0)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _hold_again(self) -> int:
        """The same for a file that was removed; returns the descriptor that is of no use any more."""
        log.warning("%s: was removed, and is made again", self._path)
        before, self._fd = self._fd, self._hold()
        return before

    def _lives(self, name: str) -> bool:
        if name == self._path.name or not _NAME.fullmatch(name):
            return False
        path = self._directory / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False  # removed meanwhile, or no file of an instance
        try:
            # shared: two that look at the same time must not take each other for its owner
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if name not in self._others:
                log.info("%s: another instance of the driver (%s)", path, _owner(fd))
            return True
        except OSError:
            return False
        else:
            with suppress(OSError):  # it is in nobody's way
                path.unlink()
                log.info("%s: that instance is gone (%s)", path, _owner(fd))
            return False
        finally:
            os.close(fd)


def _owner(fd: int) -> str:
    """What its file says of an instance, for people; whatever stands there."""
    try:
        said = json.loads(os.pread(fd, _READ_LIMIT, 0))
        return f"pid {int(said['pid'])}, pod {str(said['podUid'])[:80] or 'unknown'!r}"
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return "its file does not say which"
