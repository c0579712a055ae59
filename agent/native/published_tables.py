"""Threads of the C core, readers of the record tables that they publish, and decoders of common values in
records.

Only changed records are decoded.
"""

import errno
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from agent.errors import ProbeError
from agent.model.reading import (
    Absence,
    Missing,
    PassDurations,
    Reading,
    SourceSample,
    SourceState,
    error_text,
)
from agent.model.time import NS
from agent.native._core import ffi, lib

T = TypeVar("T")
S = TypeVar("S")

_BLOCK: Final = 64  # records that are compared at once
_TORN_MAX: Final = 10  # further torn copies in a row are of a writer that was stopped in a write
_RELEASE_MIN: Final = 64 << 10  # bytes; less memory is not given back


def check_record_size(struct_name: str, layout: struct.Struct) -> None:
    """Raise ImportError if `layout` and the C core's struct differ in size, as after an upgrade."""
    if layout.size != (size := ffi.sizeof(f"struct {struct_name}")):
        raise ImportError(
            f"C core: struct {struct_name} has {size} bytes, expected {layout.size}: rebuild it"
        )


class CopiedBytes(Protocol):
    """Buffer that the C core has filled with a table of records.

    The next read overwrites the buffer; a slice of it is a copy that stays.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class PublicationReader(Generic[T]):
    """Reader of the newest table that one thread of the C core has published.

    The buffer is as large as the largest table, but keeps only the memory that recent tables needed.

    Args:
        copy: Copies the table into a buffer of the given size; returns the bytes used, or a negative code.
        max_size: Size of the largest table [bytes].
        decode: Decodes the copied bytes into the result of :meth:`read`.
        wake_fd: Eventfd that is written to when the caller must read again.
    """

    def __init__(
        self,
        copy: Callable[[Any, int], int],
        max_size: int,
        decode: Callable[[CopiedBytes], T],
        wake_fd: int,
    ) -> None:
        self._copy = copy
        self._decode = decode
        self._wake_fd = wake_fd
        self._memory = mmap.mmap(-1, max_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = ffi.from_buffer(self._memory)
        self._touched = 0
        self._torn = 0
        self._last: T | None = None

    def read(self) -> T | None:
        """Return the newest complete table, decoded; None: the thread was not started.

        If the writer changes the table during the copy, the last result is returned again, and ``wake_fd`` is
        written to so that the caller reads again.
        """
        used = self._copy(self._buffer, len(self._memory))
        self._torn = self._torn + 1 if used == lib.DH_ETORN else 0
        if 0 < self._torn <= _TORN_MAX:
            os.eventfd_write(self._wake_fd, 1)  # the change behind the last wake may be missing in this copy
        elif used >= 0:
            self._last = self._decode(ffi.buffer(self._buffer, used))
            if max(_RELEASE_MIN, used) < self._touched // 2:
                self._memory.madvise(mmap.MADV_DONTNEED)
                self._touched = 0
            self._touched = max(self._touched, used)
        return self._last


class CoreThread(Generic[T]):
    """Thread of the C core, or several threads together, and the table that they publish.

    Args:
        name: Name in the C functions: ``dh_<name>_start()``, ``_read()``, ``_request_stop()``, ``_stop()``.
        title: Name in error texts.
        handle: Pointer from ``dh_<name>_open()``.
        max_size: Size of the largest table [bytes].
        decode: Decodes the copied bytes into the result of :meth:`read`.
        wake_fd: Eventfd that is written to when the caller must read again.
        copy: Copies the table, like the argument of PublicationReader; None: ``dh_<name>_read()``.
    """

    def __init__(
        self,
        name: str,
        title: str,
        handle: Any,
        max_size: int,
        decode: Callable[[CopiedBytes], T],
        wake_fd: int,
        copy: Callable[[Any, int], int] | None = None,
    ) -> None:
        self._name, self._title, self._handle = name, title, handle
        read = getattr(lib, f"dh_{name}_read")
        copy = copy or (lambda buffer, size: read(self._handle, buffer, size))
        try:
            self._publication = PublicationReader(copy, max_size, decode, wake_fd)
        except OSError as error:
            self.stop(0)
            raise ProbeError(f"{title} cannot be started: {error.strerror}") from None

    def start(self) -> None:
        """Start the thread, which begins to read at once. Raises ProbeError if the kernel refused it."""
        code = getattr(lib, f"dh_{self._name}_start")(self._handle)
        if code:
            raise ProbeError(f"{self._title} cannot be started: {os.strerror(-code)}")

    def read(self) -> T | None:
        """Return the newest published table, decoded; None: the thread was not started. Never blocks.

        A source that was never read has the state "starting".
        """
        return self._publication.read()

    def request_stop(self) -> None:
        """Request the thread to end. :meth:`stop` waits for it. Never blocks."""
        if self._handle != ffi.NULL:
            getattr(lib, f"dh_{self._name}_request_stop")(self._handle)

    def stop(self, timeout_s: float) -> bool:
        """End the thread.

        Returns False if it still hangs in the kernel or a driver after ``timeout_s`` seconds; it is
        abandoned.
        """
        handle, self._handle = self._handle, ffi.NULL
        stop = getattr(lib, f"dh_{self._name}_stop")
        return handle == ffi.NULL or int(stop(handle, int(timeout_s * NS))) == 0


class UnchangedBytesCache(Generic[T]):
    """Decoder of copied bytes, which returns its last value again if the bytes are the same."""

    def __init__(self, decode: Callable[[CopiedBytes], T]) -> None:
        self._decode = decode
        self._raw = b""
        self._value: T | None = None

    def __call__(self, data: CopiedBytes) -> T:
        raw = data[:]
        if self._value is None or raw != self._raw:
            self._raw, self._value = raw, self._decode(raw)
        return self._value


class StampedRecordTable(Generic[S]):
    """Table of the C core's records with stamps: unique 64-bit numbers that grow when their record changes.

    The C core copies all stamps, but only the records that are new to this reader. Arguments as for
    :class:`RecordTable`.
    """

    def __init__(self, layout: struct.Struct, decode: Callable[[tuple[Any, ...]], S | None]) -> None:
        self._layout = layout
        self._decode = decode
        self._known: dict[int, S | None] = {}
        self._samples: tuple[S, ...] = ()
        self.newest = 0
        """Highest stamp read so far: the next copy contains exactly the records with higher stamps."""

    def samples(self, data: CopiedBytes, start: int, count: int) -> tuple[S, ...]:
        """Return the samples of ``count`` records in a copied table.

        Args:
            start: Offset of the stamps, which precede the records [bytes].
        """
        with memoryview(data) as view:
            records = start + 8 * count
            stamps = view[start:records].cast("Q").tolist()
            if stamps != list(self._known):
                fresh = {raw[0]: self._decode(raw) for raw in self._layout.iter_unpack(view[records:])}
                known = self._known | fresh
                self._known = {stamp: known[stamp] for stamp in stamps}
                self._samples = tuple(sample for sample in self._known.values() if sample is not None)
                self.newest = max((self.newest, *fresh))
        return self._samples


class RecordTable(Generic[S]):
    """Table of one kind of the C core's records, decoded into samples; unchanged records keep their sample.

    Args:
        layout: Layout of one record.
        decode: Decodes a record; returns None for an unused one.
        key: Sort key of the samples; without it they have the order of the records.
    """

    def __init__(
        self,
        layout: struct.Struct,
        decode: Callable[[tuple[Any, ...]], S | None],
        key: Callable[[S], tuple[int, ...]] | None = None,
    ) -> None:
        self._layout = layout
        self._decode = decode
        self._key = key
        self._blocks: list[tuple[bytes, list[S | None]]] = []
        self._samples: tuple[S, ...] = ()

    def samples(self, data: CopiedBytes, start: int, end: int) -> tuple[S, ...]:
        """Return the samples of the records between two offsets of a copied table [bytes]."""
        if len(self._blocks) == 1 and self._blocks[0][0] == data[start:end]:
            return self._samples  # the usual case
        starts = range(start, end, _BLOCK * self._layout.size)
        changed = len(starts) < len(self._blocks)
        del self._blocks[len(starts) :]
        for block, at in enumerate(starts):
            changed |= self._update(block, data[at : min(at + starts.step, end)])
        if changed:
            samples = [sample for _, known in self._blocks for sample in known if sample is not None]
            self._samples = tuple(sorted(samples, key=self._key) if self._key else samples)
        return self._samples

    def _update(self, block: int, raw: bytes) -> bool:
        """Decode a block of consecutive records that has changed; return whether a record changed."""
        before, known = self._blocks[block] if block < len(self._blocks) else (b"", [])
        if raw == before:
            return False
        size = self._layout.size
        samples = [
            known[i]
            if raw[at : at + size] == before[at : at + size]
            else self._decode(self._layout.unpack_from(raw, at))
            for i, at in enumerate(range(0, len(raw), size))
        ]
        self._blocks[block : block + 1] = [(raw, samples)]
        return True


# --- values that records of several threads have -----------------------------------------------------------

ABSENT: Final = Missing(Absence.ABSENT, errno.ENOENT)
SOURCE_STATES: Final = {
    lib.DH_STATE_ABSENT: SourceState.ABSENT,
    lib.DH_STATE_OK: SourceState.OK,
    lib.DH_STATE_FAILING: SourceState.FAILING,
    lib.DH_STATE_STARTING: SourceState.STARTING,
}


def failure_text(name: str, root: Path | None, err: int) -> str:
    """Return the text of a failed read: ``nr_hugepages: I/O error`` or ``sysfs root /x: Not a directory``."""
    return f"{name} {root}: {error_text(err)}" if root else f"{name}: {error_text(err)}"


def missing_member(seen: int, err: int, field: int) -> Missing:
    """Return why a member of a C record has no value; arguments as for :func:`reading_of_member`."""
    return Missing(Absence.UNREADABLE, err) if seen >> field & 1 else ABSENT


def reading_of_member(value: int, field: int, valid: int, seen: int, err: int) -> Reading:
    """Return the value of a member of a C record, or Missing with the reason.

    Args:
        value: Value of the member in the record.
        field: Number of the member's bit in the masks.
        valid: Mask of the members that were read.
        seen: Mask of the members that exist, or existed before.
        err: Errno of an existing member that cannot be read.
    """
    return value if valid >> field & 1 else missing_member(seen, err, field)


def printable_text(padded: bytes) -> str:
    """Decode zero-padded text, which the C core has made printable ASCII."""
    return padded.rstrip(b"\0").decode("ascii")


def source_sample(record: Any, name: str, detail: str, *, vital: bool) -> SourceSample:
    """Convert a record with the members of ``struct dh_source`` to the sample of the source `name`.

    ``detail``: text of the last failure; ``vital``: whether no device can be evaluated without the source.
    """
    return SourceSample(
        name=name,
        state=SOURCE_STATES[record.state],
        beat_ns=record.heartbeat_ns,
        period_ns=record.period_ns,
        failures=record.failures,
        detail=detail,
        passes=record.passes,
        vital=vital,
    )


def pass_durations(record: Any) -> PassDurations:
    """Convert a ``struct dh_durations`` of the C core to a histogram of durations."""
    return PassDurations(tuple(record.count), record.sum_ns / NS)


def pass_durations_by_source(
    read: Callable[[Any], None], names: Sequence[str]
) -> Mapping[str, PassDurations]:
    """Return how long the readings of several sources took, by source name.

    ``read`` stores one ``struct dh_durations`` per name into its argument, in the order of ``names``.
    """
    records = ffi.new("struct dh_durations[]", len(names))
    read(records)
    return {name: pass_durations(record) for name, record in zip(names, records, strict=True)}
