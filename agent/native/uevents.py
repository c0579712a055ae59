"""The listener to the kernel's device events: opened, started, read and stopped. And watches of directories.

Owns the thread. What an event means is its reader's business.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agent.errors import ProbeError
from agent.model.reading import error_text
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS
from agent.model.uevent import Subsystem, UeventSample
from agent.native._core import ffi, lib
from agent.native.publication import Copied, Publication, Same
from agent.native.records import SOURCE_STATES, source

_SIZE: Final = ffi.sizeof("struct dh_uevent_sample")
_SUBSYSTEMS: Final = {getattr(lib, f"DH_SUBSYSTEM_{one.name}"): one for one in Subsystem}
_DEAF: Final = "the kernel sends no device events into this network namespace (a user namespace's)"
_BY_TIME: Final = "; looked at by time instead"


class Uevents:
    """One listener, in the network namespace of the thread that starts it.

    Args:
        wake_fd: An eventfd, to stay open until :meth:`stop`. Becomes readable when there is something new.
        pokes: Eventfds of those who read CPUs, memory and NUMA nodes from files, at most 4. Written to when
            one of these came, went or changed, or events were lost. Duplicated.

    Raises:
        ProbeError: the kernel refused descriptors or memory.
    """

    def __init__(self, wake_fd: int, pokes: Sequence[int] = ()) -> None:
        out = ffi.new("struct dh_uevents **")
        code = lib.dh_uevents_open(wake_fd, list(pokes), len(pokes), out)
        if code:
            raise ProbeError(f"device events: {os.strerror(-code)}")
        self._uevents = out[0]
        self._publication = Publication(
            lambda buffer, size: lib.dh_uevents_read(self._uevents, buffer, size),
            _SIZE,
            Same(_sample),
            wake_fd,
        )

    def start(self) -> None:
        """Start the thread. What happens before it listens is not heard."""
        code = lib.dh_uevents_start(self._uevents)
        if code:
            raise ProbeError(f"device events' thread: {os.strerror(-code)}")

    def read(self) -> UeventSample | None:
        """The newest whole publication, or None before :meth:`start`.

        If the writer is held up in the middle of a copy, the last that was whole, and a wake to read again.
        """
        return self._publication.read()

    def stop(self, timeout_s: float) -> bool:
        """End the thread. False if it hangs in the kernel: then it is left behind, and harmless."""
        uevents, self._uevents = self._uevents, ffi.NULL
        return uevents == ffi.NULL or int(lib.dh_uevents_stop(uevents, int(timeout_s * NS))) == 0


def watch_directory(path: Path) -> int:
    """An inotify descriptor that becomes readable when something in a directory has changed.

    A file that is being written counts when it is closed, a link only when it was moved there. The
    descriptor does not block, and is the caller's to close. What is read from it says nothing: read until
    there is no more, then look at the directory. When the directory itself goes, it is readable a last time.

    Raises:
        ProbeError: there is no such directory, or no watch to be had.
    """
    fd: int = lib.dh_directory_watch(os.fsencode(path))
    if fd < 0:
        raise ProbeError(f"{path}: {os.strerror(-fd)}")
    return fd


def _sample(data: Copied) -> UeventSample:
    record = ffi.from_buffer("struct dh_uevent_sample *", data)
    changes = {subsystem: record.changes[i] for i, subsystem in _SUBSYSTEMS.items()}
    return UeventSample(_source(record), changes)


def _source(record: Any) -> SourceSample:
    detail = _detail(record) + (_BY_TIME if SOURCE_STATES[record.state] is SourceState.ABSENT else "")
    return source(record, "uevents", detail, vital=False)  # all that events tell is looked at by time as well


def _detail(record: Any) -> str:
    """Why it is absent, the last failure, or what was not heard; empty if nothing."""
    if record.err:
        return f"socket of device events: {error_text(record.err)}"
    if record.deaf:
        return _DEAF
    parts = [
        (record.lost, "times the kernel had to throw events away"),
        (record.malformed, "events were not understood"),
        (record.foreign, "messages were not the kernel's"),
    ]
    return ", ".join(f"{count} {what}" for count, what in parts if count)
