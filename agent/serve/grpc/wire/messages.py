"""Bytes to betterproto messages, strictly.

What comes in is checked before betterproto sees it. Fields that nobody here knows it never sees: it takes
time that grows with the square of their number.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final, TypeVar

import betterproto
from betterproto import encode_varint
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.model.wire import LENGTH
from agent.serve.grpc.wire.fields import text, walk

M = TypeVar("M", bound=betterproto.Message)

FIELDS_PER_ENTRY: Final = 8
"""Fields that a message with a limit may hold in all, for each entry that it may hold."""


def decode(data: bytes, kind: type[M], entries: int | None) -> M:
    """The message in ``data``.

    Args:
        data: Its bytes.
        kind: What it is.
        entries: As of :class:`~agent.serve.grpc.codec.Codec`.

    Raises:
        ValueError: The bytes are no such message; says what is wrong where.
        GRPCError: RESOURCE_EXHAUSTED for more entries or fields than the limit.
    """
    return kind().parse(_known(data, kind, kind.__name__, entries, count(1)))


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
