"""Listener to the kernel's device events (uevents), and inotify watches of directories, by the C core."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agent.errors import ProbeError
from agent.model.kernel_messages import Subsystem, UeventCounts
from agent.model.reading import error_text
from agent.model.source_state import SourceState
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.published_tables import CopiedBytes, PublicationReader, UnchangedBytesCache
from agent.native.sampler_records import SOURCE_STATES, source_sample

_SIZE: Final = ffi.sizeof("struct dh_uevent_sample")
_SUBSYSTEMS: Final = {getattr(lib, f"DH_SUBSYSTEM_{member.name}"): member for member in Subsystem}
_SILENT: Final = "the kernel sends no device events to this network namespace (of a user namespace)"
_POLLED: Final = "; devices are polled instead"


class UeventListener:
    """Thread that counts the kernel's device events by subsystem, in the network namespace of its starter.

    Args:
        wake_fd: An eventfd, to stay open until :meth:`stop`. Becomes readable after new events.
        rescan_fds: Eventfds of threads that read CPUs, memory and NUMA nodes from files, at most 4. Written
            to when a CPU, memory block or NUMA node was added, removed or changed, or events were lost.
            The listener writes to duplicates of them.

    Raises:
        ProbeError: The kernel refused descriptors or memory.
    """

    def __init__(self, wake_fd: int, rescan_fds: Sequence[int] = ()) -> None:
        out = ffi.new("struct dh_uevents **")
        code = lib.dh_uevents_open(wake_fd, list(rescan_fds), len(rescan_fds), out)
        if code:
            raise ProbeError(f"uevent listener: cannot be opened: {os.strerror(-code)}")
        self._uevents = out[0]
        self._publication = PublicationReader(
            lambda buffer, size: lib.dh_uevents_read(self._uevents, buffer, size),
            _SIZE,
            UnchangedBytesCache(_decode_sample),
            wake_fd,
        )

    def start(self) -> None:
        """Start the thread that counts device events. Earlier events are not received."""
        code = lib.dh_uevents_start(self._uevents)
        if code:
            raise ProbeError(f"uevent thread cannot be started: {os.strerror(-code)}")

    def read(self) -> UeventCounts | None:
        """Return the number of events by subsystem, and the state of the source; None: not started."""
        return self._publication.read()

    def stop(self, timeout_s: float) -> bool:
        """End the thread that counts device events.

        Returns False if it still hangs in the kernel after ``timeout_s`` seconds; it is abandoned.
        """
        uevents, self._uevents = self._uevents, ffi.NULL
        return uevents == ffi.NULL or int(lib.dh_uevents_stop(uevents, int(timeout_s * NS))) == 0


def watch_directory(path: Path) -> int:
    """Return an inotify descriptor that becomes readable when an entry of a directory has changed.

    A written file counts when it is closed, a link only when it is moved there. The descriptor is
    non-blocking, and the caller closes it. The caller reads and discards its data, then lists the directory.
    When the directory itself is removed, the descriptor becomes readable a last time.

    Raises:
        ProbeError: The directory does not exist, or inotify refused a watch.
    """
    fd: int = lib.dh_directory_watch(os.fsencode(path))
    if fd < 0:
        raise ProbeError(f"directory {path}: cannot be watched: {os.strerror(-fd)}")
    return fd


def _decode_sample(data: CopiedBytes) -> UeventCounts:
    record = ffi.from_buffer("struct dh_uevent_sample *", data)
    changes = {subsystem: record.changes[i] for i, subsystem in _SUBSYSTEMS.items()}
    detail = _detail_text(record) + (_POLLED if SOURCE_STATES[record.state] is SourceState.ABSENT else "")
    # not vital: devices are also polled
    return UeventCounts(source_sample(record, "uevents", detail, vital=False), changes)


def _detail_text(record: Any) -> str:
    """Return the detail of the source ``uevents``: why there are no events, the last failure, or lost events.

    Empty: no problem.
    """
    if record.err:
        return f"socket of device events: {error_text(record.err)}"
    if record.silent:
        return _SILENT
    parts = [
        (record.lost, "times the kernel dropped device events"),
        (record.malformed, "device events could not be parsed"),
        (record.foreign, "messages on the uevent socket came from other senders than the kernel"),
    ]
    return ", ".join(f"{count} {text}" for count, text in parts if count)
