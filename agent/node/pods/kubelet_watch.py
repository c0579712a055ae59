"""Watch of the kubelet's directory by inotify, and of the node's pods by the kubelet's pods API.

Where a watch fails, the caller polls instead. The module is for use in an asyncio loop.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from agent.errors import ProbeError
from agent.model.claim_sources import SourceAnswer
from agent.model.json_values import JsonObject
from agent.model.time import Instant
from agent.native.kernel_events import discard_watch_events, watch_directory
from agent.node.pods.queries import query_pods
from agent.serve.kubelet.pods_api import SOCKET, PodsWatcher
from agent.sources.kubelet_files import CLAIMS_FILE
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.worker_threads import DISK_TIMEOUT_S, HungGuard

_FileId = tuple[int, ...] | None
"""Numbers that identify a directory, or one version of a file (with time and size); None: it is absent."""


class _DirectoryState(NamedTuple):
    """State of the kubelet's directory and its claims checkpoint file; two states differ after a change."""

    directory: _FileId = None
    checkpoint: _FileId = None
    is_link: bool = False
    """Whether the directory is a symbolic link: inotify does not report a changed target."""


class KubeletDirWatcher:
    """Watcher that notices changes in the kubelet's directory, which may be absent. Event loop only."""

    def __init__(self, path: Path, guard: HungGuard, on_change: Callable[[], None]) -> None:
        """Create the watcher.

        Args:
            path: The kubelet's directory.
            guard: Guard that allows one waiting call per hung path.
            on_change: Called in the loop after any change in the directory.
        """
        self._path = path
        self._guard = guard
        self._on_change = on_change
        self._last_state = _DirectoryState()
        self._watched_id: _FileId = None
        self._opened: tuple[_FileId, int] | None = None
        """Identity and inotify descriptor of the directory, before the event loop waits for them."""
        self._descriptor: int | None = None

    @property
    def is_watched(self) -> bool:
        """Whether the directory is watched and `on_change` is called; False: the caller has to poll."""
        return self._descriptor is not None and not self._last_state.is_link

    async def check_for_change(self) -> bool:
        """Return whether the kubelet's directory or its claims checkpoint changed since the last call.

        False if the disk hangs.
        """
        try:
            state = await self._guard.run(self._path, self._read_state, DISK_TIMEOUT_S)
        except TimeoutError:
            return False
        if state.directory != self._watched_id or self._opened is not None:
            self._start_watching(state.directory)
        before, self._last_state = self._last_state, state
        return state != before

    def close(self) -> None:
        """Stop the inotify watch of the kubelet's directory."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
        if self._opened is not None:
            os.close(self._opened[1])
        self._watched_id = self._descriptor = self._opened = None

    def _read_state(self) -> _DirectoryState:
        """Read the state of the kubelet's directory, and watch it if it is not watched. Runs in a thread."""
        # the id is read before the watch is opened, so that a replaced directory is noticed
        directory = _file_id(self._path, file=False)
        unwatched = self._descriptor is None or directory != self._watched_id
        if directory is not None and unwatched and self._opened is None:
            with suppress(ProbeError):
                self._opened = directory, watch_directory(self._path)
        claims = _file_id(self._path / CLAIMS_FILE, file=True)
        return _DirectoryState(directory, claims, os.path.islink(self._path))

    def _start_watching(self, directory: _FileId) -> None:
        # a watch opened late may be of another directory
        watched, descriptor = self._opened or (directory, None)
        self._opened = None
        self.close()
        if descriptor is not None:
            try:
                asyncio.get_running_loop().add_reader(descriptor, self._drain, descriptor)
            except OSError:  # the watches of this user's epoll are used up
                os.close(descriptor)
                return
        self._watched_id, self._descriptor = watched, descriptor

    def _drain(self, descriptor: int) -> None:
        if discard_watch_events(descriptor):
            self.close()
        self._on_change()


def _file_id(path: Path, *, file: bool) -> _FileId:
    try:
        found = path.stat()
    except OSError:
        return None
    directory = (found.st_dev, found.st_ino)
    return (*directory, found.st_mtime_ns, found.st_size) if file else directory


class PodList:
    """List of the pods on this Kubernetes node, from a watch of the kubelet's pods API or else from a query.

    Event loop only.
    """

    def __init__(
        self, kubelet_dir: Path, clock: Callable[[], Instant], on_change: Callable[[], None]
    ) -> None:
        """Create the pod list; the first :meth:`get` starts the watch.

        Args:
            kubelet_dir: Directory with the socket of the pods API.
            clock: Returns the current time.
            on_change: Called in the loop when a pod is added, removed or changes its phase.
        """
        self._kubelet_dir = kubelet_dir
        self._latest: LatestValue[SourceAnswer[JsonObject]] = LatestValue()
        self._on_change = on_change
        self._changed = False
        self._watch = PodsWatcher(kubelet_dir / SOCKET, self._latest, clock, self._on_watch_change)
        self._task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop the watch of the kubelet's pods API."""
        if self._task is not None:
            self._task.cancel()

    async def get(self) -> SourceAnswer[JsonObject]:
        """Return all pods as v1.Pod objects, and start the watch if it does not run."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch.run())
        self._changed = False
        _, answer = self._latest.peek()
        if answer is not None and self._watch.is_current:
            return answer
        return await query_pods(self._kubelet_dir)

    def has_changed(self) -> bool:
        """Return whether the pod list changed since the last :meth:`get`."""
        return self._changed

    def _on_watch_change(self) -> None:
        self._changed = True
        self._on_change()
