"""Copy the tables that the C core's threads publish, and decode the parts that changed."""

import mmap
import os
import struct
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from agent.native._core import ffi, lib

T = TypeVar("T")
S = TypeVar("S")

_BLOCK: Final = 64  # records that are compared at once
_RELEASE_MIN: Final = 64 << 10  # bytes; less memory is not given back


class CopiedBytes(Protocol):
    """Bytes that the core copied. The next copy overwrites them; a slice is a copy that stays."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class Publication(Generic[T]):
    """Reader of the newest publication of one thread of the core.

    The buffer reserves address space for the largest publication, and memory for recent ones. Releasing the
    memory after each read would triple its cost: the kernel clears the pages again.

    Args:
        copy: Copies a publication into a buffer of the given size; returns the bytes used, or a code.
        max_size: Size of the largest publication [bytes].
        decode: Decodes the copied bytes into the result of :meth:`read`.
        wake_fd: Written to when the reader must read again.
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
        self._last: T | None = None

    def read(self) -> T | None:
        """Return the newest complete publication, or None before the thread was started.

        While the writer is preempted in the middle of a copy, returns the publication before and writes to
        ``wake_fd``, so that the reader reads again.
        """
        used = self._copy(self._buffer, len(self._memory))
        if used == lib.DH_ETORN:
            os.eventfd_write(self._wake_fd, 1)  # the change behind the last wake may be missing in this copy
        elif used >= 0:
            self._last = self._decode(ffi.buffer(self._buffer, used))
            if max(_RELEASE_MIN, used) < self._touched // 2:
                self._memory.madvise(mmap.MADV_DONTNEED)
                self._touched = 0
            self._touched = max(self._touched, used)
        return self._last


class CachedDecoder(Generic[T]):
    """Decoder that returns the last value again while the bytes are the same."""

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
    """Decoded records that begin with a 64-bit stamp, which is unique and grows whenever the record changes.

    Only the samples are kept, and of unchanged records only the stamp is copied. Arguments as for
    :class:`RecordTable`.
    """

    def __init__(self, layout: struct.Struct, decode: Callable[[tuple[Any, ...]], S | None]) -> None:
        self._layout = layout
        self._decode = decode
        self._known: dict[int, S | None] = {}
        self._samples: tuple[S, ...] = ()
        self.newest = 0
        """Highest stamp of the records read so far: the next copy contains exactly the records with higher
        stamps."""

    def samples(self, data: CopiedBytes, start: int, count: int) -> tuple[S, ...]:
        """Return the samples of ``count`` records. ``start``: offset of their stamps, before the records."""
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
    """Decoded records of one kind. Equal bytes keep their sample, and equal tables their tuple.

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
        """Return the samples of the records between two offsets."""
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
        """Decode a block of consecutive records. Return whether any of them changed."""
        before, known = self._blocks[block] if block < len(self._blocks) else (b"", [])
        if raw == before:
            return False
        size = self._layout.size
        samples = [
            known[i] if raw[at : at + size] == before[at : at + size] else self._sample(raw[at : at + size])
            for i, at in enumerate(range(0, len(raw), size))
        ]
        self._blocks[block : block + 1] = [(raw, samples)]
        return True

    def _sample(self, raw: bytes) -> S | None:
        return self._decode(self._layout.unpack(raw))
