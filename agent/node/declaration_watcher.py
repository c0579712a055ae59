"""Watcher of the directory in which drivers declare devices.

The directory is watched with inotify and read in a thread after a change, so an unchanged directory causes no
work. A driver that changes its declaration all the time is read less often.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from agent.errors import ProbeError
from agent.model.declared import Declarations
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS
from agent.native.uevents import watch_directory
from agent.sources.declared import DIRECTORY, read_declarations

DEBOUNCE_S: Final = 0.1
"""Debounce: changes within this time are read together [s]."""
MAX_DUTY_CYCLE: Final = 4
"""Pause after a read, in multiples of the read's duration: at most a fifth of a core is used."""
POLL_S: Final = 10.0
"""Interval of reads where the directory cannot be watched [s]."""

log = logging.getLogger(__name__)

_DirectoryId = tuple[int, int]
"""Device and inode of a directory, which change when it is replaced."""


class _WatchedDirectory(NamedTuple):
    descriptor: int
    id: _DirectoryId


class _ReadResult(NamedTuple):
    """Result of one read of the directory."""

    id: _DirectoryId | None
    """Directory that was read; None: there is no directory."""
    declarations: Declarations | None
    """Declarations that were read; None: the directory cannot be read."""
    error: str
    """Reason why the directory cannot be read; empty if it was read."""


class DeclarationWatcher:
    """Watcher that holds the newest declarations of all drivers."""

    def __init__(self, runtime_dir: Path, node: str, watch: Callable[[Path], int] = watch_directory) -> None:
        """Create the watcher.

        Args:
            runtime_dir: Runtime directory of the agent; the directory of declarations is created in it.
            node: Default pool of devices.
            watch: Opens the inotify descriptor of a directory, or raises ProbeError.
        """
        self._directory = runtime_dir / DIRECTORY
        self._node = node
        self._watch = watch
        self._declarations: Declarations = ()
        self._watch_problem = ""
        self._read_error = ""
        self._passes = 0
        self._failures = 0

    @property
    def declarations(self) -> Declarations:
        """Declarations of drivers' devices, as of the last read of the directory."""
        return self._declarations

    @property
    def source(self) -> SourceSample:
        """State of the directory as a source. Its heartbeat is always current: an unchanged directory needs
        no read."""
        state = SourceState.FAILING if self._read_error else SourceState.OK
        return SourceSample(
            DIRECTORY,
            state if self._passes else SourceState.STARTING,
            time.monotonic_ns(),
            int(POLL_S * NS),
            self._failures,
            self._read_error or self._watch_problem,
            passes=self._passes,
            vital=False,  # the rules go on with the last declarations
        )

    async def run(self, wake: Callable[[], None]) -> None:
        """Watch the directory until cancelled, and call `wake` when the declarations have changed."""
        while True:
            # a hanging call may be abandoned: the descriptor is closed with the process
            watched = await trio.to_thread.run_sync(self._try_watch, abandon_on_cancel=True)
            if watched is None:
                await self._read(wake)
                await trio.sleep(POLL_S)
                continue
            try:
                await self._follow(watched, wake)
            finally:
                os.close(watched.descriptor)

    async def _follow(self, watched: _WatchedDirectory, wake: Callable[[], None]) -> None:
        """Read the watched directory after each change until it is replaced or removed."""
        current: _DirectoryId | None = watched.id
        while current == watched.id:
            began_s = trio.current_time()
            current = await self._read(wake)
            rest_until_s = trio.current_time() + MAX_DUTY_CYCLE * (trio.current_time() - began_s)
            if current == watched.id:
                await trio.lowlevel.wait_readable(watched.descriptor)
            await trio.sleep_until(max(trio.current_time() + DEBOUNCE_S, rest_until_s))
            _drain(watched.descriptor)

    async def _read(self, wake: Callable[[], None]) -> _DirectoryId | None:
        """Read and keep the declarations. Returns the id of the directory that was read; None: there is no
        directory."""
        read = partial(read_declarations, self._directory, self._declarations, self._node)
        result = await trio.to_thread.run_sync(partial(self._read_now, read), abandon_on_cancel=True)
        is_changed = not self._passes
        if result.declarations is not None and result.declarations != self._declarations:
            self._declarations, is_changed = result.declarations, True
        self._passes += 1
        self._read_error = result.error
        self._failures += bool(result.error)
        if is_changed:
            wake()
        return result.id

    # --- in a thread ---------------------------------------------------------------------------------------

    def _try_watch(self) -> _WatchedDirectory | None:
        """Create and watch the directory. Returns None, after a log line, if it cannot be watched."""
        try:
            watched = self._create_and_watch()
        except (OSError, ProbeError) as error:
            reason = str(error) if isinstance(error, ProbeError) else f"{self._directory}: {error.strerror}"
            logged, self._watch_problem = self._watch_problem, f"{reason}; read every {POLL_S:g} s instead"
            if logged != self._watch_problem:
                log.warning("%s", self._watch_problem)
            return None
        self._watch_problem = ""
        return watched

    def _create_and_watch(self) -> _WatchedDirectory:
        with suppress(FileExistsError):
            self._directory.mkdir(mode=0o755)
        if self._directory.is_symlink():  # inotify does not report a changed target
            raise ProbeError(f"{self._directory}: is a symbolic link")
        found = _directory_id(self._directory)  # before the watch: a directory replaced in between is noticed
        return _WatchedDirectory(self._watch(self._directory), found)

    def _read_now(self, read: Callable[[], Declarations]) -> _ReadResult:
        """Read all declarations in the directory. The error of a single file is part of its declaration."""
        try:
            directory = _directory_id(self._directory)
        except OSError:
            directory = None
        try:
            return _ReadResult(directory, read(), "")
        except ProbeError as error:
            return _ReadResult(directory, None, str(error))


def _directory_id(directory: Path) -> _DirectoryId:
    found = directory.stat()
    return found.st_dev, found.st_ino


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass
