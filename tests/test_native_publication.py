"""Copies of what a thread of the core publishes: the memory that they take, and what is decoded anew."""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from agent.native._core import ffi

from agent.native.publication import Copied, Publication, Same, StampedTable

MIB = 1 << 20
RECORD = struct.Struct("=QQ")


@contextmanager
def published(sizes: list[int]) -> Iterator[Publication[int]]:
    """Publications of so many bytes, one after the other."""

    def copy(buffer: Any, room: int) -> int:
        size = sizes.pop(0)
        assert size <= room
        ffi.buffer(buffer, size)[:] = b"x" * size
        return size

    wake_fd = os.eventfd(0)
    try:
        yield Publication(copy, 64 * MIB, len, wake_fd)
    finally:
        os.close(wake_fd)


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("sizes", [[64, 1], [64, 40, 25, 16, 10, 6, 4]], ids=("at-once", "little-by-little"))
def test_what_is_no_longer_there_takes_no_memory(sizes: list[int]) -> None:
    with published([size * MIB for size in sizes]) as publication:
        assert publication.read() == 64 * MIB
        most = resident()
        for size in sizes[1:]:
            assert publication.read() == size * MIB
        assert most - resident() > 40 * MIB


def test_what_is_there_keeps_its_memory() -> None:
    with published([64 * MIB, 40 * MIB, 33 * MIB]) as publication:
        publication.read()
        most = resident()
        publication.read()
        publication.read()
        assert most - resident() < 8 * MIB  # the kernel would have to clear it for every look


def copied(*records: tuple[int, int]) -> Copied:
    """A head of 16 bytes, and records: a stamp and a number."""
    copy: Copied = ffi.buffer(ffi.from_buffer(bytes(16) + b"".join(RECORD.pack(*one) for one in records)))
    return copy


def decode(raw: tuple[int, int]) -> list[int] | None:
    return list(raw[1:]) if raw[1] else None


def test_a_record_of_the_same_stamp_keeps_its_sample_wherever_it_stands() -> None:
    table = StampedTable(RECORD, decode)
    first = table.samples(copied((1, 10), (2, 20), (3, 0)), 16, 64)
    assert first == ([10], [20])
    assert table.samples(copied((1, 10), (2, 20), (3, 0)), 16, 64) is first
    second = table.samples(copied((4, 40), (1, 10), (5, 20)), 16, 64)
    assert second == ([40], [10], [20])
    assert second[1] is first[0]
    assert second[2] is not first[1]
    assert table.samples(copied((1, 10)), 16, 32) == ([10],)
    assert table.samples(copied(), 16, 16) == ()
    assert table.samples(copied((1, 11)), 16, 32) == ([11],)  # a stamp that is gone is forgotten


def test_what_was_made_of_equal_bytes_outlives_their_copy() -> None:
    copy = bytearray(b"one")
    decoder = Same(lambda data: [data[:]])
    first = decoder(ffi.buffer(ffi.from_buffer(copy)))
    copy[:] = b"two"
    second = decoder(ffi.buffer(ffi.from_buffer(copy)))
    assert (first, second) == ([b"one"], [b"two"])
    assert decoder(ffi.buffer(ffi.from_buffer(bytearray(b"two")))) is second
