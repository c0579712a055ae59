"""Streams that wait for their next message, to which a thread other than the event loop's may send it.

The event loop lends a stream while nothing waits to be sent on its connection, and the peer's windows have
room. A thread that has a new message sends it to all lent streams with one system call each, and need not
wake the event loop's thread for that. Before the event loop writes to a connection, reads what its peer has
sent, or closes it, it takes the stream back: it subtracts what was sent from HTTP/2's windows, and sends
the rest of a message of which the socket has taken a part.
"""

import threading
from typing import Protocol

from grpclib import server

from agent.native.idle_streams import IdleStreamRow, IdleStreamTable
from agent.serve.grpc.hardened import HardenedStream, LentStream, message_frames


class StreamOwner(Protocol):
    """Interface to the owner of a stream, which remembers what was sent on the stream."""

    number: int
    """Last publication that the stream has got."""

    def mark_sent(self, number: int, lists: int) -> None:
        """Note that the stream got publication ``number`` and ``lists`` messages while it was lent."""


class IdleStreams:
    """Lent streams of one server. The lock guards all calls; any thread may send."""

    def __init__(self, lock: "threading.RLock") -> None:
        self.lock = lock
        self.table = IdleStreamTable()


class IdleStream(LentStream):
    """Stream of a server's request that waits for its next message. Used only in the event loop."""

    def __init__(self, streams: IdleStreams, stream: HardenedStream, owner: StreamOwner, group: int) -> None:
        """Create a stream that is not lent; streams of a group get equal messages."""
        self._streams = streams
        self._stream = stream
        self._owner = owner
        self._group = group
        self._row: IdleStreamRow | None = None

    @property
    def is_lent(self) -> bool:
        """True while another thread may send on the stream."""
        return self._row is not None

    def is_behind(self, number: int) -> bool:
        """Return True if the stream is lent, and lacks publication ``number`` or a part of a message."""
        with self._streams.lock:
            return self._row is not None and self._streams.table.is_behind(self._row, number)

    def lend(self) -> None:
        """Lend the stream, unless data wait on its connection or another stream of the connection is lent.

        Call it only while the request's task waits for a message.
        """
        stream = self._stream
        if self._row is not None or stream.lent is not None or not stream.is_idle():
            return
        assert stream.id is not None
        with self._streams.lock:
            self._row = self._streams.table.add(
                descriptor=stream.write_buffer.get_extra_info("socket").fileno(),
                stream_id=stream.id,
                frame_size=stream.frame_size,
                room=stream.room,
                group=self._group,
                number=self._owner.number,
            )
        stream.lent = self

    def take_back(self) -> None:
        """Take the stream back if it is lent: from now on, only the event loop sends on its connection."""
        row, self._row = self._row, None
        if row is None:
            return
        stream = self._stream
        stream.lent = None
        with self._streams.lock:
            sent = self._streams.table.remove(row)
        stream.use_window(sent.size)
        if sent.unsent:
            assert stream.id is not None
            stream.write_rest(message_frames(sent.cut_message, stream.id, stream.frame_size)[-sent.unsent :])
        if sent.number != self._owner.number:
            self._owner.mark_sent(sent.number, sent.lists)


def idle_stream(
    streams: IdleStreams, stream: server.Stream[object, bytes], owner: StreamOwner, group: int
) -> IdleStream | None:
    """Return the stream as one that can be lent; None: it belongs to a server of the driver."""
    h2_stream = stream._stream
    return IdleStream(streams, h2_stream, owner, group) if isinstance(h2_stream, HardenedStream) else None
