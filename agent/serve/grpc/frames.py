"""DATA frames, made by ourselves: the same bytes go to every subscriber.

h2 makes each frame anew for each stream, and copies what is in it three times. Here h2 is asked whether a
stream may send, and told how much it did, by what its own ``send_data`` asks and changes; frames are made
once for all streams of the same number. What ends a stream, or must wait for the peer's window, is h2's.
"""

import struct
from functools import lru_cache
from typing import Final

from h2.connection import ConnectionInputs, H2Connection
from h2.exceptions import ProtocolError
from h2.stream import StreamInputs

DATA: Final = 0
"""What a frame of data calls itself."""
_HEAD: Final = struct.Struct(">HBBBI")
"""Before a frame's payload: its length in 24 bits, type, flags, stream."""
PREFIX: Final = struct.Struct(">BI")
"""Before a message: whether it is compressed, and its length."""


def take_window(connection: H2Connection, stream_id: int, size: int) -> bool:
    """Takes so many bytes from the windows of a stream and its connection, if both have them, else none.

    Returns:
        Whether they were taken, and are to be sent. Not of a stream that has ended, nor after GOAWAY.
    """
    stream = connection.streams.get(stream_id)
    if stream is None:
        return False
    if size > min(connection.outbound_flow_control_window, stream.outbound_flow_control_window):
        return False
    try:
        connection.state_machine.process_input(ConnectionInputs.SEND_DATA)
        stream.state_machine.process_input(StreamInputs.SEND_DATA)
    except ProtocolError:
        return False
    connection.outbound_flow_control_window -= size
    stream.outbound_flow_control_window -= size
    return True


def frames(data: bytes, stream_id: int, most: int) -> bytes:
    """Bytes in frames of a stream that goes on, each with ``most`` of them at most."""
    pieces = (data[at : at + most] for at in range(0, len(data), most))
    return b"".join(
        _HEAD.pack(len(piece) >> 8, len(piece) & 0xFF, DATA, 0, stream_id) + piece for piece in pieces
    )


@lru_cache(maxsize=2)  # most subscribers are the first stream of their connection, and get one of two lists
def message_frames(message: bytes, stream_id: int, most: int) -> bytes:
    """An encoded message in frames, likewise."""
    return frames(PREFIX.pack(0, len(message)) + message, stream_id, most)
