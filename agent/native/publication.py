"""What a thread of the core publishes, as Python gets it: copied out whole, decoded as far as it changed."""

import errno
import os
import struct
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from agent.native._core import ffi, lib

T = TypeVar("T")
S = TypeVar("S")

_WORDS: Final = 1 << 14  # of the buffer at first; it follows what there is, and 128 KiB hold 100 groups


class Publication(Generic[T]):
    """The newest of one thread's publications.

    Args:
        copy: Copies it into a buffer of so many bytes; how many it used, or a code of the core.
        most: How many bytes there can be at most.
        decode: Makes a value of the copy.
        wake_fd: Written to when there must be another look.
    """

    def __init__(
        self,
        copy: Callable[[Any, int], int],
        most: Callable[[], int],
        decode: Callable[[bytes], T],
        wake_fd: int,
    ) -> None:
        self._copy = copy
        self._most = most
        self._decode = decode
        self._wake_fd = wake_fd
        self._buffer = ffi.new("uint64_t[]", _WORDS)
        self._last: T | None = None

    def read(self) -> T | None:
        """The newest that is whole, or None before the thread was started.

        If the writer is held up in the middle of a copy, the last that was whole, and a wake to read again.
        """
        while True:
            size = ffi.sizeof(self._buffer)
            used = self._copy(self._buffer, size)
            if used != -errno.ENOSPC:
                break
            self._buffer = ffi.new("uint64_t[]", min(2 * size, self._most() + 8) // 8 + 1)
        if used == lib.DH_ETORN:
            os.eventfd_write(self._wake_fd, 1)  # what the last wake was for may not have been read
        elif used >= 0:
            self._last = self._decode(ffi.buffer(self._buffer, used)[:])
            if size > max(4 * used, 8 * _WORDS):
                self._buffer = ffi.new("uint64_t[]", max(2 * used // 8, _WORDS))
        return self._last


class Table(Generic[S]):
    """Records of one kind, in any order; their samples in that of a key. Equal bytes keep their sample."""

    def __init__(
        self,
        layout: struct.Struct,
        decode: Callable[[tuple[Any, ...]], S],
        key: Callable[[S], tuple[int, ...]],
    ) -> None:
        self._layout = layout
        self._decode = decode
        self._key = key
        self._data = b""
        self._known: list[tuple[bytes, S]] = []
        self._samples: tuple[S, ...] = ()

    def samples(self, data: bytes) -> tuple[S, ...]:
        """Of all records that follow each other in the bytes."""
        if data == self._data:
            return self._samples
        size = self._layout.size
        for slot, at in enumerate(range(0, len(data), size)):
            raw = data[at : at + size]
            if slot == len(self._known):
                self._known.append((raw, self._decode(self._layout.unpack(raw))))
            elif self._known[slot][0] != raw:
                self._known[slot] = (raw, self._decode(self._layout.unpack(raw)))
        self._data = data
        self._samples = tuple(sorted((sample for _, sample in self._known), key=self._key))
        return self._samples
