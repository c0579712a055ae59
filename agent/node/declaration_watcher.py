"""Follows what drivers declare, while the agent runs.

The directory is watched by inotify, and read in a thread when something in it was made, replaced or removed:
a minute in which nobody declares anything wakes nobody. Who declares something else all the time is read
less often. What counts as a file is in agent.sources.declared.
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
"""Files that are written together are read together [s]."""
MAX_DUTY_CYCLE: Final = 4
"""After a reading that took long it rests so many times as long: a fifth of a core at most."""
BLIND_S: Final = 10.0
"""How often the directory is read where it cannot be watched [s]."""

log = logging.getLogger(__name__)

_Place = tuple[int, int]
"""Device and inode of a directory: another one can be made in its place."""


class _Watched(NamedTuple):
    descriptor: int
    place: _Place


class _Look(NamedTuple):
    """What one reading of the directory found."""

    place: _Place | None
    """Where it was read; None: there is no directory."""
    declarations: Declarations | None
    """None: it cannot be read..."""
    unread: str
    """...and why."""


class DeclarationWatcher:
    """The newest of what is declared."""

    def __init__(self, runtime_dir: Path, node: str, watch: Callable[[Path], int] = watch_directory) -> None:
        """
        Args:
            runtime_dir: The agent's; the directory of declarations is made in it.
            node: The pool of devices whose file names none.
            watch: Makes the inotify descriptor of a directory, or raises ProbeError.
        """
        self._directory = runtime_dir / DIRECTORY
        self._node = node
        self._watch = watch
        self._declarations: Declarations = ()
        self._trouble = ""
        self._unread = ""
        self._passes = 0
        self._failures = 0

    @property
    def declarations(self) -> Declarations:
        """What was read last."""
        return self._declarations

    @property
    def source(self) -> SourceSample:
        """How reading the directory is going: until it was read once, nobody knows what is declared.

        It always beats: what nobody changes is not read again, and is known all the same.
        """
        state = SourceState.FAILING if self._unread else SourceState.OK
        return SourceSample(
            DIRECTORY,
            state if self._passes else SourceState.STARTING,
            time.monotonic_ns(),
            int(BLIND_S * NS),
            self._failures,
            self._unread or self._trouble,
            passes=self._passes,
            vital=False,  # what was declared last is judged on
        )

    async def run(self, wake: Callable[[], None]) -> None:
        """Follows until cancelled, and calls ``wake`` when something else is declared."""
        while True:
            # if it hangs at the end, so what: the descriptor ends with the process
            watched = await trio.to_thread.run_sync(self._open, abandon_on_cancel=True)
            if watched is None:
                await self._read(wake)
                await trio.sleep(BLIND_S)
                continue
            try:
                await self._follow(watched, wake)
            finally:
                os.close(watched.descriptor)

    async def _follow(self, watched: _Watched, wake: Callable[[], None]) -> None:
        """Until another directory is in its place, or none."""
        place: _Place | None = watched.place
        while place == watched.place:
            began_s = trio.current_time()
            place = await self._read(wake)
            rest_until_s = trio.current_time() + MAX_DUTY_CYCLE * (trio.current_time() - began_s)
            if place == watched.place:
                await trio.lowlevel.wait_readable(watched.descriptor)
            await trio.sleep_until(max(trio.current_time() + DEBOUNCE_S, rest_until_s))
            _drain(watched.descriptor)

    async def _read(self, wake: Callable[[], None]) -> _Place | None:
        """Takes what is declared now. Returns where it was read."""
        read = partial(read_declarations, self._directory, self._declarations, self._node)
        look = await trio.to_thread.run_sync(partial(self._look, read), abandon_on_cancel=True)
        is_news = not self._passes
        if look.declarations is not None and look.declarations != self._declarations:
            self._declarations, is_news = look.declarations, True
        self._passes += 1
        self._unread = look.unread
        self._failures += bool(look.unread)
        if is_news:
            wake()
        return look.place

    # --- in a thread ---------------------------------------------------------------------------------------

    def _open(self) -> _Watched | None:
        """The directory, made if it is not there; None if it cannot be watched."""
        try:
            watched = self._made()
        except (OSError, ProbeError) as error:
            why = str(error) if isinstance(error, ProbeError) else f"{self._directory}: {error.strerror}"
            told, self._trouble = self._trouble, f"{why}; looked at every {BLIND_S:g} s instead"
            if told != self._trouble:
                log.warning("%s", self._trouble)
            return None
        self._trouble = ""
        return watched

    def _made(self) -> _Watched:
        with suppress(FileExistsError):
            self._directory.mkdir(mode=0o755)
        if self._directory.is_symlink():  # that it leads elsewhere from now on, inotify tells nobody
            raise ProbeError(f"{self._directory}: is a symbolic link")
        place = _place_of(self._directory)  # first: of two directories the older one, which is found out
        return _Watched(self._watch(self._directory), place)

    def _look(self, read: Callable[[], Declarations]) -> _Look:
        """What is declared now. What is wrong with a file is in it, for the notes to tell."""
        try:
            place = _place_of(self._directory)
        except OSError:
            place = None
        found, unread = None, ""
        try:
            found = read()
        except ProbeError as error:
            unread = str(error)
        return _Look(place, found, unread)


def _place_of(directory: Path) -> _Place:
    found = directory.stat()
    return found.st_dev, found.st_ino


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass
