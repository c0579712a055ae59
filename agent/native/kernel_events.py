"""Events of the kernel, through the C core: matching lines of the kernel log, device events (uevents), and
inotify watches of directories."""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agent.errors import ProbeError
from agent.model.machine_samples import LogLine, LogSample, Subsystem, UeventCounts
from agent.model.reading import SourceState, error_text, return_code_text
from agent.native._core import ffi, lib
from agent.native.published_tables import (
    SOURCE_STATES,
    CopiedBytes,
    CoreThread,
    RecordTable,
    UnchangedBytesCache,
    check_record_size,
    printable_text,
    source_sample,
)

_HEAD_SIZE: Final = ffi.sizeof("struct dh_log")
_LINE: Final = struct.Struct(f"=II4Q{lib.DH_LOG_TEXT}s{lib.DH_LOG_TEXT}s")

check_record_size("dh_log_line", _LINE)


class KernelLogReader(CoreThread[LogSample]):
    """Thread that reads the kernel log and counts the lines that match a pattern.

    It begins with the oldest record that the kernel holds. Until it has reached the end of the log once, the
    source's state is "starting".

    Args:
        path: ``/dev/kmsg``, or a file or FIFO with records in the same format.
        patterns: Tried in order; the first match counts. drahealth.h documents their syntax: literal text and
            ``%b %d %x %w %k %*``.
        wake_fd: An eventfd, to stay open until :meth:`stop`. Becomes readable after a matching line.
        any_facility: Also read messages from user space. For tests: any process that may write to the log
            can then forge faults.

    Raises:
        ValueError: A pattern is invalid, or there are more than 160.
        ProbeError: The kernel refused descriptors or memory.
    """

    def __init__(self, path: Path, patterns: Sequence[str], wake_fd: int, any_facility: bool) -> None:
        if len(patterns) > lib.DH_PATTERN_MAX:
            raise ValueError(f"there are {len(patterns)} kernel log patterns, limit {lib.DH_PATTERN_MAX}")
        table = b"".join(_pattern_bytes(pattern) + b"\0" for pattern in patterns)
        options = ffi.new(
            "struct dh_kmsg_options *",
            {
                "size": ffi.sizeof("struct dh_kmsg_options"),
                "version": lib.DH_VERSION,
                "any_facility": int(any_facility),
            },
        )
        out = ffi.new("struct dh_kmsg **")
        code = lib.dh_kmsg_open(options, os.fsencode(path), table, len(table), wake_fd, out)
        if code:
            raise ProbeError(f"kernel log {path}: cannot be opened: {return_code_text(code)}")
        self._path = path
        self._lines = RecordTable(_LINE, _decode_line, lambda line: (line.first_us, line.seq))
        decode = UnchangedBytesCache(self._sample)
        super().__init__("kmsg", "kernel log thread", out[0], lib.dh_kmsg_size(out[0]), decode, wake_fd)

    def _sample(self, data: CopiedBytes) -> LogSample:
        head = ffi.from_buffer("struct dh_log *", data)
        detail = f"{self._path}: {error_text(head.err)}" if head.err else _losses_text(head)
        return LogSample(
            lines=self._lines.samples(data, _HEAD_SIZE, len(data)),
            # a container may have no kernel log; NVML reports most of its faults too
            source=source_sample(head, "kmsg", detail, vital=False),
            lost=head.lost,
            # the kernel numbers records from 0
            is_complete=head.next_seq == head.lines and not head.evicted,
        )


def _losses_text(head: Any) -> str:
    """Return a text with the numbers of lost kernel-log records and of lost counted lines; empty: none."""
    parts = [
        (head.lost, "records were overwritten before they were read"),
        (head.evicted, "kinds of lines were dropped for lack of room"),
    ]
    return ", ".join(f"{count} {text}" for count, text in parts if count)


def _pattern_bytes(pattern: str) -> bytes:
    """Return a valid pattern as bytes for the C core. Raises ValueError for an invalid pattern."""
    if not pattern.isascii() or "\0" in pattern:
        raise ValueError(
            f"kernel log pattern {pattern!r}: has a zero byte or a character that is not ASCII; the kernel "
            "log has neither"
        )
    raw = pattern.encode()
    error = lib.dh_pattern_check(raw)
    if error:
        raise ValueError(f"kernel log pattern {pattern!r}: syntax error at character {error - 1}")
    return raw


def _decode_line(raw: tuple[Any, ...]) -> LogLine:
    pattern, _, times, first_us, last_us, seq, first, last = raw
    return LogLine(pattern, times, first_us, last_us, printable_text(first), printable_text(last), seq)


# --- device events -----------------------------------------------------------------------------------------

_SIZE: Final = ffi.sizeof("struct dh_uevent_sample")
_SUBSYSTEMS: Final = {getattr(lib, f"DH_SUBSYSTEM_{member.name}"): member for member in Subsystem}
_SILENT: Final = "the kernel sends no device events to this network namespace (of a user namespace)"
_POLLED: Final = "; devices are polled instead"
_INOTIFY_EVENT: Final = struct.Struct("iIII")
"""Layout of an inotify event: watch, mask, cookie, length of the name that follows. Source: inotify(7)."""
_ENDED: Final = 0x8000 | 0x4000  # IN_IGNORED; IN_Q_OVERFLOW, which may have taken its place


class UeventListener(CoreThread[UeventCounts]):
    """Thread that counts the kernel's device events by subsystem, in the caller's network namespace.

    Events before its start are not received.

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
        super().__init__(
            "uevents", "uevent thread", out[0], _SIZE, UnchangedBytesCache(_decode_sample), wake_fd
        )


def watch_directory(path: Path, *, includes_writes: bool = True) -> int:
    """Return an inotify descriptor that becomes readable when an entry of a directory has changed.

    A written file counts when it is closed, a link only when it is moved there. The descriptor is
    non-blocking, and the caller closes it. The caller discards its data (:func:`discard_watch_events`), then
    lists the directory. When the directory itself is removed, the descriptor becomes readable a last time.
    Without ``includes_writes``, only moved and removed entries count.

    Raises:
        ProbeError: The directory does not exist, or inotify refused a watch.
    """
    fd: int = lib.dh_directory_watch(os.fsencode(path), includes_writes)
    if fd < 0:
        raise ProbeError(f"directory {path}: cannot be watched: {os.strerror(-fd)}")
    return fd


def discard_watch_events(descriptor: int) -> bool:
    """Read and discard the data of an inotify descriptor; return whether its directory may have been removed.

    A directory that is created instead is not watched, and may have the same inode.
    """
    is_removed = False
    with suppress(BlockingIOError):
        while events := os.read(descriptor, 4096):
            while events:
                _, mask, _, name_size = _INOTIFY_EVENT.unpack_from(events)
                is_removed |= bool(mask & _ENDED)
                events = events[_INOTIFY_EVENT.size + name_size :]
    return is_removed


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
