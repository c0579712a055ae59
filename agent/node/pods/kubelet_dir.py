"""Notices that the kubelet has written its checkpoint, or that its directory is another one.

By inotify; where that is not to be had, by looking now and then. For a loop of asyncio's.
"""

import asyncio
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ProbeError
from agent.native.uevents import watch_directory
from agent.sources.kubelet_checkpoint import NAME
from agent.system.threads.with_timeout import DISK_S, HungGuard

_EVENT: Final = struct.Struct("iIII")
"""An event of inotify: watch, mask, cookie, length of the name behind it. Source: inotify(7)."""
_IN_IGNORED: Final = 0x8000

_Identity = tuple[int, ...] | None
"""Of a directory or a file as it was written; None: there is none."""


class _Look(NamedTuple):
    directory: _Identity = None
    checkpoint: _Identity = None
    is_link: bool = False
    """That it leads elsewhere from now on, inotify tells nobody."""


class KubeletDirWatcher:
    """The kubelet's directory, which need not be there."""

    def __init__(self, path: Path, patience: HungGuard, on_change: Callable[[], None]) -> None:
        """
        Args:
            path: Of the directory.
            patience: With a disk that hangs.
            on_change: Called in the loop when something in it has changed, whatever that is.
        """
        self._path = path
        self._patience = patience
        self._on_change = on_change
        self._seen = _Look()
        self._watched: _Identity = None
        self._opened: tuple[_Identity, int] | None = None
        """A directory and its descriptor, to which nobody listens yet."""
        self._descriptor: int | None = None

    @property
    def is_watched(self) -> bool:
        """Whether ``on_change`` is called; else one has to look."""
        return self._descriptor is not None and not self._seen.is_link

    async def has_changed(self) -> bool:
        """Whether directory or checkpoint are others than when this was last asked. No answer: no change."""
        try:
            look = await self._patience.in_time(self._path, self._look, DISK_S)
        except TimeoutError:
            return False
        if look.directory != self._watched or self._opened is not None:
            self._listen(look.directory)
        before, self._seen = self._seen, look
        return look != before

    def close(self) -> None:
        """Listens no more."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
        if self._opened is not None:
            os.close(self._opened[1])
        self._watched = self._descriptor = self._opened = None

    def _look(self) -> _Look:
        """In a thread. What is there; of a directory that has no watch, one is opened."""
        # first: of two directories the older one, which is found out
        place = _identity(self._path, file=False)
        unwatched = self._descriptor is None or place != self._watched
        if place is not None and unwatched and self._opened is None:
            with suppress(ProbeError):
                self._opened = place, watch_directory(self._path)
        return _Look(place, _identity(self._path / NAME, file=True), _is_link(self._path))

    def _listen(self, directory: _Identity) -> None:
        watched, descriptor = self._opened or (directory, None)  # one opened late may be of another
        self._opened = None
        self.close()
        self._watched, self._descriptor = watched, descriptor
        if descriptor is not None:
            asyncio.get_running_loop().add_reader(descriptor, self._drain, descriptor)

    def _drain(self, descriptor: int) -> None:
        has_ended = False
        with suppress(BlockingIOError):
            while data := os.read(descriptor, 4096):
                has_ended |= _has_ended(data)
        if has_ended:  # whatever is made in its place may have its inode
            self.close()
        self._on_change()


def _has_ended(events: bytes) -> bool:
    """Whether the watch is over: its directory is gone."""
    at = 0
    while at < len(events):
        _, mask, _, name = _EVENT.unpack_from(events, at)
        if mask & _IN_IGNORED:
            return True
        at += _EVENT.size + name
    return False


def _is_link(path: Path) -> bool:
    try:
        return path.is_symlink()
    except OSError:  # nobody may look there, a disk is broken, ...
        return False


def _identity(path: Path, *, file: bool) -> _Identity:
    try:
        found = path.stat()
    except OSError:
        return None
    place = (found.st_dev, found.st_ino)
    return (*place, found.st_mtime_ns, found.st_size) if file else place
