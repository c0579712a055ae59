"""The codec of every gRPC stream: bytes pass through, betterproto messages are checked and coded.

A list that the native core has encoded goes out as it is, and what is decoded elsewhere comes in as it is.
What is done with messages stands in :mod:`~agent.serve.grpc.wire.messages`.
"""

from typing import TYPE_CHECKING, TypeVar

from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from agent.serve.grpc.wire.fields import walk

if TYPE_CHECKING:
    import betterproto

M = TypeVar("M", bound="betterproto.Message | bytes")


class Unread(bytes):
    """A request in which there is nothing that we would read; that it is a message is checked."""

    def __new__(cls, data: bytes) -> "Unread":
        """Raises ValueError if it is none."""
        for _ in walk(data, None, "the request", ""):
            pass
        return super().__new__(cls, data)


class Codec(CodecBase):
    """Lets ``bytes`` through as an already encoded message, and decodes strictly.

    Args:
        entries: How many messages may stand directly in one message that is decoded; None: any number.
            betterproto takes up to 0.1 ms for each, in which the loop does nothing else. With a limit there
            is one on all of its fields, too: see :data:`~agent.serve.grpc.wire.messages.FIELDS_PER_ENTRY`.
    """

    __content_subtype__ = "proto"

    def __init__(self, entries: int | None = None) -> None:
        self._entries = entries

    def encode(self, message: "betterproto.Message | bytes", message_type: type[M]) -> bytes:
        """The message's bytes. ``bytes`` are taken to be a ``message_type`` already."""
        return bytes(message)

    def decode(self, data: bytes, message_type: type[M]) -> M:
        """The message in ``data``. Of the type ``bytes`` it is what it is: whoever asked decodes it.

        Raises:
            GRPCError: INTERNAL, as gRPC has it for bytes that are no such message; says what is wrong where.
                RESOURCE_EXHAUSTED for more entries or fields than the limit.
        """
        try:
            if issubclass(message_type, bytes):
                return message_type(data)
            from agent.serve.grpc.wire.messages import decode  # betterproto, 4 MiB that bytes do without

            return decode(data, message_type, self._entries)
        except ValueError as error:
            raise GRPCError(Status.INTERNAL, str(error)) from None
