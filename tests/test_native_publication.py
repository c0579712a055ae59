"""Copies of publications: their memory, and which records are decoded again."""

import mmap
import os
import struct
from contextlib import closing
from typing import Any

import pytest
from agent.native._core import ffi

from agent.native.published_tables import (
    CopiedBytes,
    PublicationReader,
    StampedRecordTable,
    UnchangedBytesCache,
)

MIB = 1 << 20
RESIDENT = 1 << 63 | 1 << 62  # bits of a pagemap entry: in memory, or swapped out
STAMP = struct.Struct("=Q")
RECORD = struct.Struct("=QQ")


class Published:
    """Publications of the given sizes, one after the other."""

    def __init__(self, sizes: list[int], most: int) -> None:
        self._sizes = iter(sizes)
        self._most = most
        self._start = 0
        self._wake_fd = os.eventfd(0)
        self._publication = PublicationReader(self._copy, most, len, self._wake_fd)

    def close(self) -> None:
        os.close(self._wake_fd)

    def read(self) -> int | None:
        return self._publication.read()

    def kept_bytes(self) -> int:
        """Return the bytes that the kernel keeps for the buffer alone, swapped out or not."""
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(
                pagemap.fileno(), self._most // mmap.PAGESIZE * 8, self._start // mmap.PAGESIZE * 8
            )
        assert len(entries) == self._most // mmap.PAGESIZE * 8
        return sum(entry & RESIDENT != 0 for entry in memoryview(entries).cast("Q")) * mmap.PAGESIZE

    def _copy(self, buffer: Any, room: int) -> int:
        self._start = int(ffi.cast("uintptr_t", buffer))
        size = next(self._sizes)
        assert size <= room
        ffi.memmove(buffer, b"x" * size, size)
        return size


@pytest.mark.parametrize("sizes", [[64, 1], [64, 40, 25, 16, 10, 6, 4]], ids=("at-once", "little-by-little"))
def test_shrunk_publication_releases_memory(sizes: list[int]) -> None:
    with closing(Published([size * MIB for size in sizes], 64 * MIB)) as published:
        assert published.read() == published.kept_bytes() == 64 * MIB
        for size in sizes[1:]:
            assert published.read() == size * MIB
        assert published.kept_bytes() < 2 * sizes[-1] * MIB


def test_large_publication_keeps_its_memory() -> None:
    with closing(Published([64 * MIB, 40 * MIB, 33 * MIB], 64 * MIB)) as published:
        for _ in range(3):
            published.read()
        assert published.kept_bytes() == 64 * MIB  # released memory would have to be cleared for every read


def make_copy(*records: tuple[int, int], since: int = 0) -> CopiedBytes:
    """Return a copy: a head of 16 bytes, all stamps, and the newer records of a stamp and a number."""
    stamps = b"".join(STAMP.pack(stamp) for stamp, _ in records)
    newer = b"".join(RECORD.pack(*record) for record in records if record[0] > since)
    copy: CopiedBytes = ffi.buffer(ffi.from_buffer(bytes(16) + stamps + newer))
    return copy


def decode(raw: tuple[int, int]) -> list[int] | None:
    return list(raw[1:]) if raw[1] else None


def test_record_with_the_same_stamp_keeps_its_sample() -> None:
    table = StampedRecordTable(RECORD, decode)
    first = table.samples(make_copy((1, 10), (2, 20), (3, 0)), 16, 3)
    assert first == ([10], [20])
    assert table.newest == 3
    assert table.samples(make_copy((1, 10), (2, 20), (3, 0), since=3), 16, 3) is first
    second = table.samples(make_copy((4, 40), (1, 10), (5, 20), since=3), 16, 3)
    assert second == ([40], [10], [20])
    assert second[1] is first[0]
    assert second[2] is not first[1]
    assert table.samples(make_copy((1, 10), since=5), 16, 1) == ([10],)
    assert table.samples(make_copy(), 16, 0) == ()
    assert table.newest == 5, "what was copied is not asked for again when it is gone"
    with pytest.raises(KeyError):
        table.samples(make_copy((1, 10), since=5), 16, 1)  # a copy that lacks a record is invalid


def test_value_of_equal_bytes_outlives_their_copy() -> None:
    copy = bytearray(b"one")
    decoder = UnchangedBytesCache(lambda data: [data[:]])
    first = decoder(ffi.buffer(ffi.from_buffer(copy)))
    copy[:] = b"two"
    second = decoder(ffi.buffer(ffi.from_buffer(copy)))
    assert (first, second) == ([b"one"], [b"two"])
    assert decoder(ffi.buffer(ffi.from_buffer(bytearray(b"two")))) is second
