"""Codec of every gRPC stream: bytes pass through unchanged, betterproto messages are checked and decoded.

A list that the native core has encoded is sent as it is, and bytes that another module decodes are received
as they are.
"""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from agent.serve.grpc.wire.reader import decode_utf8, raw_fields
from agent.serve.grpc.wire.writer import message as encode_message

if TYPE_CHECKING:
    import betterproto

M = TypeVar("M", bound="betterproto.Message | bytes")

FIELDS_PER_ENTRY: Final = 8
"""Maximum number of fields of a message with a limit on entries, for each entry that it may hold."""


class UnreadRequest(bytes):
    """Request whose fields are not read; only its well-formedness is checked."""

    def __new__(cls, data: bytes) -> "UnreadRequest":
        """Check that the data are well-formed. Raises ValueError if they are not a protobuf message."""
        for _ in raw_fields(data, None, "the request", ""):
            pass
        return super().__new__(cls, data)


class Codec(CodecBase):
    """Codec that passes ``bytes`` through as an encoded message, and decodes strictly.

    Args:
        entries: Maximum of messages directly in one decoded message; None: no limit. betterproto takes up to
            0.1 ms for each, which blocks the event loop. With a limit, all fields together are limited to
            :data:`FIELDS_PER_ENTRY` times as many.
    """

    __content_subtype__ = "proto"

    def __init__(self, entries: int | None = None) -> None:
        self._entries = entries

    def encode(self, message: "betterproto.Message | bytes", message_type: type[M]) -> bytes:
        """Return the encoded message; ``bytes`` are already encoded and returned unchanged."""
        return bytes(message)

    def decode(self, data: bytes, message_type: type[M]) -> M:
        """Decode a message; for the type ``bytes`` return the data for the caller to decode.

        Raises:
            GRPCError: INTERNAL, as in gRPC, for data that are not such a message; names the field.
                RESOURCE_EXHAUSTED for more entries or fields than the limit.
        """
        try:
            if issubclass(message_type, bytes):
                return message_type(data)
            known: Any = message_type
            decoded: M = known().parse(_known_fields(data, known, known.__name__, self._entries, count(1)))
        except ValueError as error:
            raise GRPCError(Status.INTERNAL, str(error)) from None
        return decoded


def _known_fields(
    data: bytes,
    message_type: "type[betterproto.Message]",
    where: str,
    limit: int | None,
    field_count: Iterator[int],
) -> bytes:
    """Check an encoded message and return it without the fields that its message types do not have.

    betterproto must not see unknown fields: its time grows with the square of their number. `field_count`
    counts the fields of the outermost message.

    Raises:
        ValueError: The data are not a well-formed message of that type; names the field.
        GRPCError: The message holds more entries than `limit`, or more fields in all; raised before the rest
        is
            read.
    """
    kept: list[bytes] = []
    entries = 0
    for name, field, value, encoded in raw_fields(data, message_type, where, f"{where}."):
        if limit is not None and next(field_count) > (maximum := limit * FIELDS_PER_ENTRY):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{where}: more than {maximum} fields in all")
        if field is None:
            continue
        if isinstance(value, bytes) and field.message:
            entries += 1
            if limit is not None and entries > limit:
                raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{name}: more than {limit} entries")
            inner = _known_fields(value, field.message, name, limit, field_count)
            if len(inner) < len(value):
                encoded = encode_message(field.number, inner)
        elif isinstance(value, bytes) and field.proto_type == "string":
            decode_utf8(value, name)
        kept.append(encoded)
    return b"".join(kept)
