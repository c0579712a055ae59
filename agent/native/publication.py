"""What a thread of the core publishes, as Python gets it: copied out whole, decoded as far as it changed."""

import mmap
import os
import struct
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from agent.native._core import ffi, lib

T = TypeVar("T")
S = TypeVar("S")

_BLOCK: Final = 64  # records that are compared at once
_KEPT: Final = 64 << 10  # bytes of memory that are not worth giving back


class Copied(Protocol):
    """Bytes that the core copied out. The next copy overwrites them; a slice is one's own."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class Publication(Generic[T]):
    """The newest of one thread's publications.

    The buffer has room for the most that there can be, and memory for what was there lately. To give that
    back after each look would make it three times as dear: the kernel clears the pages anew.

    Args:
        copy: Copies it into a buffer of so many bytes; how many it used, or a code of the core.
        most: How many bytes there can be at most.
        decode: Makes a value of the copy.
        wake_fd: Written to when there must be another look.
    """

    def __init__(
        self,
        copy: Callable[[Any, int], int],
        most: int,
        decode: Callable[[Copied], T],
        wake_fd: int,
    ) -> None:
        self._copy = copy
        self._decode = decode
        self._wake_fd = wake_fd
        self._memory = mmap.mmap(-1, most, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._buffer = ffi.from_buffer(self._memory)
        self._touched = 0
        self._last: T | None = None

    def read(self) -> T | None:
        """The newest that is whole, or None before the thread was started.

        If the writer is held up in the middle of a copy, the last that was whole, and a wake to read again.
        """
        used = self._copy(self._buffer, len(self._memory))
        if used == lib.DH_ETORN:
            os.eventfd_write(self._wake_fd, 1)  # what the last wake was for may not have been read
        elif used >= 0:
            self._last = self._decode(ffi.buffer(self._buffer, used))
            if max(_KEPT, used) < self._touched // 2:
                self._memory.madvise(mmap.MADV_DONTNEED)
                self._touched = 0
            self._touched = max(self._touched, used)
        return self._last


class Same(Generic[T]):
    """A decoder of which equal bytes keep their value: as long as a source has made no other pass."""

    def __init__(self, decode: Callable[[Copied], T]) -> None:
        self._decode = decode
        self._raw = b""
        self._value: T | None = None

    def __call__(self, data: Copied) -> T:
        raw = data[:]
        if self._value is None or raw != self._raw:
            self._raw, self._value = raw, self._decode(raw)
        return self._value


class StampedTable(Generic[S]):
    """Records that begin with a stamp, 64 bits: of no other, and a higher one whenever they have changed.

    So nothing is kept of them but their samples, and of those that did not change nothing else is copied.
    Arguments as of :class:`Table`.
    """

    def __init__(self, layout: struct.Struct, decode: Callable[[tuple[Any, ...]], S | None]) -> None:
        self._layout = layout
        self._decode = decode
        self._known: dict[int, S | None] = {}
        self._samples: tuple[S, ...] = ()
        self.newest = 0
        """The highest stamp until now: of records with a higher one a copy has all, and of others none."""

    def samples(self, data: Copied, start: int, count: int) -> tuple[S, ...]:
        """Of so many records: their stamps stand there, and what of them was copied until the end."""
        with memoryview(data) as view:
            records = start + 8 * count
            stamps = view[start:records].cast("Q").tolist()
            if stamps != list(self._known):
                fresh = {raw[0]: self._decode(raw) for raw in self._layout.iter_unpack(view[records:])}
                known = self._known | fresh
                self._known = {stamp: known[stamp] for stamp in stamps}
                self._samples = tuple(one for one in self._known.values() if one is not None)
                self.newest = max((self.newest, *fresh))
        return self._samples


class Table(Generic[S]):
    """Records of one kind and their samples. Equal bytes keep their sample, and equal tables their tuple.

    Args:
        layout: Of one record.
        decode: Makes a sample of a record; None of one that is a gap.
        key: By which samples are sorted; without one they stand as the records do.
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

    def samples(self, data: Copied, start: int, end: int) -> tuple[S, ...]:
        """Of all records that follow each other there."""
        starts = range(start, end, _BLOCK * self._layout.size)
        changed = len(starts) < len(self._blocks)
        del self._blocks[len(starts) :]
        for block, at in enumerate(starts):
            changed |= self._take(block, data[at : min(at + starts.step, end)])
        if changed:
            samples = [one for _, known in self._blocks for one in known if one is not None]
            self._samples = tuple(sorted(samples, key=self._key) if self._key else samples)
        return self._samples

    def _take(self, block: int, raw: bytes) -> bool:
        """Some records that follow each other. Whether any of them is another than before."""
        before, known = self._blocks[block] if block < len(self._blocks) else (b"", [])
        if raw == before:
            return False
        size = self._layout.size
        samples = [
            known[i] if raw[at : at + size] == before[at : at + size] else self._one(raw[at : at + size])
            for i, at in enumerate(range(0, len(raw), size))
        ]
        self._blocks[block : block + 1] = [(raw, samples)]
        return True

    def _one(self, raw: bytes) -> S | None:
        return self._decode(self._layout.unpack(raw))
