"""The codec of every gRPC stream: bytes pass through, betterproto messages are checked and coded.

A list that the native core has encoded goes out as it is, and what is decoded elsewhere comes in as it is.
Everything else that comes in is checked before betterproto sees it. Fields that nobody here knows it never
sees: it takes time that grows with the square of their number.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final, TypeVar

import betterproto
from betterproto import encode_varint
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from agent.serve.rpc.fields import LENGTH, text, walk

M = TypeVar("M", bound=betterproto.Message | bytes)

FIELDS_PER_ENTRY: Final = 8
"""Fields that a message with a limit may hold in all, for each entry that it may hold."""


class Codec(CodecBase):
    """Lets ``bytes`` through as an already encoded message, and decodes strictly.

    Args:
        entries: How many messages may stand directly in one message that is decoded; None: any number.
            betterproto takes up to 0.1 ms for each, in which the loop does nothing else. With a limit there
            is one on all of its fields, too: see :data:`FIELDS_PER_ENTRY`.
    """

    __content_subtype__ = "proto"

    def __init__(self, entries: int | None = None) -> None:
        self._entries = entries

    def encode(self, message: betterproto.Message | bytes, message_type: type[M]) -> bytes:
        """The message's bytes. ``bytes`` are taken to be a ``message_type`` already."""
        return bytes(message)

    def decode(self, data: bytes, message_type: type[M]) -> M:
        """The message in ``data``. Of the type ``bytes`` it is what it is: whoever asked decodes it.

        Raises:
            GRPCError: INTERNAL, as gRPC has it for bytes that are no such message; says what is wrong where.
                RESOURCE_EXHAUSTED for more entries or fields than the limit.
        """
        if issubclass(message_type, bytes):
            return message_type(data)
        try:
            known = _known(data, message_type, message_type.__name__, self._entries, count(1))
        except ValueError as error:
            raise GRPCError(Status.INTERNAL, str(error)) from None
        return message_type().parse(known)


def _known(
    data: bytes, kind: type[betterproto.Message], where: str, limit: int | None, fields: Iterator[int]
) -> bytes:
    """The same message without the fields that its ``kind`` does not have, nor those of messages in it.

    Raises ValueError, naming the field, unless ``data`` is a well-formed message of ``kind``; GRPCError for
    one that holds more messages or fields than ``limit`` allows, as soon as that is clear. ``fields`` counts
    those of the whole.
    """
    pieces: list[bytes] = []
    entries = 0
    for name, field, value, piece in walk(data, kind, where, f"{where}."):
        if limit is not None and next(fields) > (most := limit * FIELDS_PER_ENTRY):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{where}: more than {most} fields in all")
        if field is None:
            continue
        if isinstance(value, bytes) and field.message:
            entries += 1
            if limit is not None and entries > limit:
                raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{name}: more than {limit} entries")
            inner = _known(value, field.message, name, limit, fields)
            if len(inner) < len(value):
                piece = encode_varint(field.number << 3 | LENGTH) + encode_varint(len(inner)) + inner
        elif isinstance(value, bytes) and field.proto_type == "string":
            text(value, name)
        pieces.append(piece)
    return b"".join(pieces)
