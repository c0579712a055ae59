"""Watcher of the directory in which drivers declare devices.

The directory is watched with inotify and read in a thread after a change. A directory that changes all the
time is read less often. After a read error the directory is read again after a pause, even if it does not
change.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

import trio

from agent.errors import ProbeError
from agent.model.declared_devices import Declarations
from agent.model.reading import SourceSample, SourceState
from agent.model.time import NS
from agent.native.kernel_events import discard_watch_events, watch_directory
from agent.sources.declaration_file import DIRECTORY, DIRECTORY_MODE, read_declarations
from agent.system.files import make_directory
from agent.system.output import get_logger
from agent.system.threads.trio_calls import call_in_thread_when_possible
from agent.system.timing import PassTimer

DEBOUNCE_S: Final = 0.1
"""Delay of a read of the directory after a change in it [s]; changes within it cause no further read."""
MAX_DUTY_CYCLE: Final = 4
"""Pause after a read of the directory, in multiples of the read's duration: at most a fifth of a CPU is used.
"""
POLL_S: Final = 10.0
"""Interval of reads while the directory cannot be watched with inotify or read completely [s]."""

log = get_logger(__name__)

_DirectoryIdentity = tuple[int, int]
"""Device and inode of a directory, which change when it is replaced while it exists."""


class _WatchedDirectory(NamedTuple):
    descriptor: int
    id: _DirectoryIdentity


class _ReadResult(NamedTuple):
    """Result of one read of the declaration directory."""

    id: _DirectoryIdentity | None
    """Identity of the directory that was read; None: there is no directory."""
    declarations: Declarations | None
    """Declarations that were read; None: the directory cannot be read."""
    error: str
    """Reason why the directory cannot be read; empty if it was read."""
    is_complete: bool
    """False: the directory or a file could not be read; a later read may succeed without a change."""


class DeclarationWatcher:
    """Watcher of the directory in which drivers declare devices; holds the newest list of each driver."""

    def __init__(
        self, runtime_dir: Path, default_pool: str, watch: Callable[[Path], int] = watch_directory
    ) -> None:
        """Create the watcher.

        Args:
            runtime_dir: Runtime directory of the agent; the directory of declarations is created in it.
            default_pool: Pool of devices that name no pool.
            watch: Opens the inotify descriptor of a directory, or raises ProbeError.
        """
        self.timer: Final = PassTimer(DIRECTORY)
        self._directory = runtime_dir / DIRECTORY
        self._node = default_pool
        self._watch = watch
        self._declarations: Declarations = ()
        self._watch_problem = ""
        self._read_error = ""
        self._is_complete = True
        self._passes = 0
        self._failures = 0

    @property
    def declarations(self) -> Declarations:
        """Devices that drivers declare, as of the last read of the directory."""
        return self._declarations

    @property
    def source(self) -> SourceSample:
        """State of the declaration directory, in the form that all data sources have. It never stalls."""
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
            watched = await call_in_thread_when_possible(self._try_watch, "dh-declared")
            if watched is None:
                await self._read_and_store(wake)
                await trio.sleep(POLL_S)
                continue
            try:
                await self._read_after_changes(watched, wake)
            finally:
                os.close(watched.descriptor)

    async def _read_after_changes(self, watched: _WatchedDirectory, wake: Callable[[], None]) -> None:
        """Read the watched directory after each change until the directory is replaced or removed.

        After a read error it is read again after POLL_S.
        """
        current: _DirectoryIdentity | None = watched.id
        while current == watched.id:
            began_s = trio.current_time()
            current = await self._read_and_store(wake)
            rest_until_s = trio.current_time() + MAX_DUTY_CYCLE * (trio.current_time() - began_s)
            if current == watched.id:
                with trio.move_on_after(inf if self._is_complete else POLL_S):
                    await trio.lowlevel.wait_readable(watched.descriptor)
            await trio.sleep_until(max(trio.current_time() + DEBOUNCE_S, rest_until_s))
            current = None if discard_watch_events(watched.descriptor) else current

    async def _read_and_store(self, wake: Callable[[], None]) -> _DirectoryIdentity | None:
        """Read all declaration files and store their devices.

        Returns the identity of the directory; None: the directory does not exist.
        """
        read = partial(read_declarations, self._directory, self._declarations, self._node)
        result = await call_in_thread_when_possible(partial(self._read_now, read), "dh-declared")
        is_changed = not self._passes
        if result.declarations is not None and result.declarations != self._declarations:
            self._declarations, is_changed = result.declarations, True
        self._passes += 1
        self._read_error, self._is_complete = result.error, result.is_complete
        self._failures += bool(result.error)
        if is_changed:
            wake()
        return result.id

    # --- in a thread ---------------------------------------------------------------------------------------

    def _try_watch(self) -> _WatchedDirectory | None:
        """Create the directory of declarations if it is absent, and watch it with inotify.

        Returns None, after a log line, if the directory cannot be watched.
        """
        try:
            watched = self._create_and_watch()
        except (OSError, ProbeError) as error:
            reason = str(error) if isinstance(error, ProbeError) else f"{self._directory}: {error.strerror}"
            logged, self._watch_problem = self._watch_problem, f"{reason}; polled every {POLL_S:g} s"
            if logged != self._watch_problem:
                log.warning("declaration directory: cannot be watched for changes: %s", self._watch_problem)
            return None
        self._watch_problem = ""
        return watched

    def _create_and_watch(self) -> _WatchedDirectory:
        self._directory.parent.stat()  # a missing runtime directory is not created
        with suppress(FileExistsError):
            make_directory(self._directory, DIRECTORY_MODE)
        if self._directory.is_symlink():  # inotify does not report a changed target
            raise ProbeError(f"{self._directory} is a symbolic link")
        found = _directory_id(self._directory)  # before the watch: a directory replaced in between is noticed
        return _WatchedDirectory(self._watch(self._directory), found)

    def _read_now(self, read: Callable[[Callable[[], None]], Declarations]) -> _ReadResult:
        """Read all declaration files in a thread. The error of a single file is part of its declaration."""
        read_errors = 0

        def count_error() -> None:
            nonlocal read_errors
            read_errors += 1

        try:
            directory = _directory_id(self._directory)
        except OSError:
            directory = None
        try:
            with self.timer.measure():
                declarations = read(count_error)
        except ProbeError as error:
            return _ReadResult(directory, None, str(error), is_complete=False)
        return _ReadResult(directory, declarations, "", is_complete=not read_errors)


def _directory_id(directory: Path) -> _DirectoryIdentity:
    found = directory.stat()
    return found.st_dev, found.st_ino
