"""Open, start, read and stop the listener to the kernel's device events; watch directories.

Owns the thread; the caller of :meth:`Uevents.read` interprets the events.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agent.errors import ProbeError
from agent.model.kernel_messages import Subsystem, UeventSample
from agent.model.reading import error_text
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.publication import CachedDecoder, CopiedBytes, Publication
from agent.native.records import SOURCE_STATES, source

_SIZE: Final = ffi.sizeof("struct dh_uevent_sample")
_SUBSYSTEMS: Final = {getattr(lib, f"DH_SUBSYSTEM_{member.name}"): member for member in Subsystem}
_SILENT: Final = "the kernel sends no device events to this network namespace (of a user namespace)"
_POLLED: Final = "; devices are polled instead"


class UeventListener:
    """Listener to device events, in the network namespace of the thread that starts it.

    Args:
        wake_fd: An eventfd, to stay open until :meth:`stop`. Becomes readable after new events.
        rescan_fds: Eventfds of threads that read CPUs, memory and NUMA nodes from files, at most 4. Written
            to when a CPU, memory block or NUMA node was added, removed or changed, or events were lost.
            Duplicated.

    Raises:
        ProbeError: the kernel refused descriptors or memory.
    """

    def __init__(self, wake_fd: int, rescan_fds: Sequence[int] = ()) -> None:
        out = ffi.new("struct dh_uevents **")
        code = lib.dh_uevents_open(wake_fd, list(rescan_fds), len(rescan_fds), out)
        if code:
            raise ProbeError(f"device events: {os.strerror(-code)}")
        self._uevents = out[0]
        self._publication = Publication(
            lambda buffer, size: lib.dh_uevents_read(self._uevents, buffer, size),
            _SIZE,
            CachedDecoder(_sample),
            wake_fd,
        )

    def start(self) -> None:
        """Start the thread. Device events before the thread opens its socket are not received."""
        code = lib.dh_uevents_start(self._uevents)
        if code:
            raise ProbeError(f"device event thread: {os.strerror(-code)}")

    def read(self) -> UeventSample | None:
        """Return the newest complete publication, or None before :meth:`start`.

        While the writer is preempted in the middle of a copy, returns the publication before and wakes the
        reader again.
        """
        return self._publication.read()

    def stop(self, timeout_s: float) -> bool:
        """End the thread. Returns True if it ended, False if it hangs in the kernel and is abandoned. Blocks
        up to ``timeout_s``."""
        uevents, self._uevents = self._uevents, ffi.NULL
        return uevents == ffi.NULL or int(lib.dh_uevents_stop(uevents, int(timeout_s * NS))) == 0


def watch_directory(path: Path) -> int:
    """Return an inotify descriptor that becomes readable when an entry of a directory has changed.

    A written file counts when it is closed, a link only when it is moved there. The descriptor is
    non-blocking, and the caller closes it. Its data have no meaning: read until there are no more, then list
    the directory. When the directory itself is removed, the descriptor is readable a last time.

    Raises:
        ProbeError: the directory does not exist, or inotify refused a watch.
    """
    fd: int = lib.dh_directory_watch(os.fsencode(path))
    if fd < 0:
        raise ProbeError(f"{path}: {os.strerror(-fd)}")
    return fd


def _sample(data: CopiedBytes) -> UeventSample:
    record = ffi.from_buffer("struct dh_uevent_sample *", data)
    changes = {subsystem: record.changes[i] for i, subsystem in _SUBSYSTEMS.items()}
    return UeventSample(_source(record), changes)


def _source(record: Any) -> SourceSample:
    detail = _detail(record) + (_POLLED if SOURCE_STATES[record.state] is SourceState.ABSENT else "")
    return source(record, "uevents", detail, vital=False)  # devices are also polled


def _detail(record: Any) -> str:
    """Return a text: why the source is absent, its last failure, or lost events; empty: none of these."""
    if record.err:
        return f"socket of device events: {error_text(record.err)}"
    if record.silent:
        return _SILENT
    parts = [
        (record.lost, "times the kernel dropped events"),
        (record.malformed, "events could not be parsed"),
        (record.foreign, "messages came from other senders than the kernel"),
    ]
    return ", ".join(f"{count} {text}" for count, text in parts if count)
