"""Table of HTTP/2 streams to which the C core sends one message with a system call per stream."""

from collections import Counter
from typing import Final, NamedTuple

from agent.native._core import ffi, lib

MESSAGE_LIMIT: Final[int] = lib.DH_STREAM_MESSAGE
"""Longest message that the C core sends [bytes]."""
_FIRST_CAPACITY: Final = 8


class IdleStreamRow:
    """Row of the table: one stream. Only the table uses its attributes."""

    __slots__ = ("cut_message", "index")

    def __init__(self, index: int) -> None:
        self.index = index
        self.cut_message = b""
        """Message of which the socket has taken only a part; empty: there is none."""


class SentToStream(NamedTuple):
    """Messages that the C core has sent to a stream while it was in the table."""

    number: int
    """Last publication that the stream has got."""
    size: int
    """Size of the messages with their prefixes, which their flow-control windows lack now [bytes]."""
    lists: int
    """Number of the messages."""
    cut_message: bytes
    """Message of which the socket has taken only a part; empty: there is none."""
    unsent: int
    """Size of the end of this message's frames that must be sent before any other byte [bytes]."""


class IdleStreamTable:
    """Table of streams for whose connections no bytes wait.

    The caller ensures that one thread at a time uses the table, and that nothing else writes to the sockets.
    """

    def __init__(self) -> None:
        self._array = ffi.new("struct dh_stream[]", _FIRST_CAPACITY)
        self._rows: list[IdleStreamRow] = []
        self._cut = ffi.new("uint32_t *")
        self._group_sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, *, descriptor: int, stream_id: int, frame_size: int, room: int, group: int, number: int
    ) -> IdleStreamRow:
        """Add a stream.

        Args:
            descriptor: Socket of the stream's connection; no other stream in the table has the connection.
            stream_id: Number of the stream in its connection.
            frame_size: Largest size of the data in one frame [bytes].
            room: Room in the flow-control windows of stream and connection [bytes].
            group: Number of the group of streams that get equal messages.
            number: Last publication that the stream has got.
        """
        index = len(self._rows)
        if index == len(self._array):
            larger = ffi.new("struct dh_stream[]", 2 * index)
            ffi.memmove(larger, self._array, ffi.sizeof(self._array))
            self._array = larger
        row = IdleStreamRow(index)
        self._rows.append(row)
        stream = self._array[index]
        stream.fd, stream.id, stream.frame_size = descriptor, stream_id, frame_size
        stream.room, stream.group, stream.number = room, group, number
        stream.sent, stream.unsent, stream.lists = 0, 0, 0
        self._group_sizes[group] += 1
        return row

    def remove(self, row: IdleStreamRow) -> SentToStream:
        """Remove a stream; return what was sent to it."""
        stream = self._array[row.index]
        sent = SentToStream(stream.number, stream.sent, stream.lists, row.cut_message, stream.unsent)
        self._group_sizes[stream.group] -= 1
        last = self._rows.pop()
        if last is not row:
            self._array[row.index] = self._array[last.index]
            self._rows[row.index] = last
            last.index = row.index
        return sent

    def has_group(self, group: int) -> bool:
        """Return whether a stream in the table belongs to a group."""
        return self._group_sizes[group] > 0

    def send(self, message: bytes, *, group: int, since: int, number: int) -> int:
        """Send a message of publication ``number`` to the streams of a group that have publication ``since``.

        An empty message is not sent: the streams then count as having got the publication. A stream without
        room for the message stays as it was. Returns the number of streams that have got the publication.
        """
        count: int = lib.dh_streams_send(
            self._array, len(self._rows), group, since, number, message, len(message), self._cut
        )
        if self._cut[0]:
            for row in self._rows:
                if self._array[row.index].unsent and not row.cut_message:
                    row.cut_message = message
        return count

    def count_behind(self, number: int) -> int:
        """Return how many streams lack publication ``number`` or a part of their last message."""
        count: int = lib.dh_streams_behind(self._array, len(self._rows), number)
        return count

    def is_behind(self, row: IdleStreamRow, number: int) -> bool:
        """Return whether a stream lacks publication ``number`` or a part of its last message."""
        stream = self._array[row.index]
        return bool(stream.number != number or stream.unsent)
