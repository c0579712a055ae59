"""grpclib codec of all gRPC streams: ``bytes`` pass unchanged, betterproto messages are checked and
decoded."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

from agent.serve.grpc.wire import decode_utf8, encoded_fields, message_field

if TYPE_CHECKING:
    import betterproto

M = TypeVar("M", bound="betterproto.Message | bytes")

FIELDS_PER_ENTRY: Final = 8
"""Largest number of fields of a message, as a multiple of the limit of its entries, if these are limited."""


class EmptyRequest(bytes):
    """Request of a method without parameters: any well-formed protobuf message, whose fields are ignored."""

    def __new__(cls, data: bytes) -> "EmptyRequest":
        """Check the encoded request, and drop it. Raises ValueError if it is not a protobuf message."""
        for _ in encoded_fields(data, None, "the request", ""):
            pass
        return super().__new__(cls, data)


class Codec(CodecBase):
    """grpclib codec for betterproto messages and for encoded messages as ``bytes``; refuses invalid fields.

    Args:
        max_entries: Maximum number of messages nested directly in one decoded message, because betterproto
            blocks the event loop up to 0.1 ms for each nested message; None: no limit. The number of all
            fields of the message is limited to :data:`FIELDS_PER_ENTRY` times this number.
    """

    __content_subtype__ = "proto"

    def __init__(self, max_entries: int | None = None) -> None:
        self._max_entries = max_entries

    def encode(self, message: "betterproto.Message | bytes", message_type: type[M]) -> bytes:
        """Return the encoded message; ``bytes`` are returned unchanged, because they are encoded already."""
        return bytes(message)

    def decode(self, data: bytes, message_type: type[M]) -> M:
        """Decode a message; for the type ``bytes`` return the data for the caller to decode.

        Raises:
            GRPCError: INTERNAL for data that are not a valid message of the type; the error names the field.
                RESOURCE_EXHAUSTED for more entries or fields than the limit.
        """
        try:
            if issubclass(message_type, bytes):
                return message_type(data)
            known: Any = message_type
            decoded: M = known().parse(
                _known_fields(data, known, known.__name__, self._max_entries, count(1))
            )
        except ValueError as error:
            raise GRPCError(Status.INTERNAL, str(error)) from None
        return decoded


def _known_fields(
    data: bytes,
    message_type: "type[betterproto.Message]",
    message_name: str,
    limit: int | None,
    field_count: Iterator[int],
) -> bytes:
    """Check an encoded message, and return it without its unknown fields.

    betterproto's time grows with the square of the number of unknown fields.

    Args:
        data: Encoded message.
        message_type: Type of the message.
        message_name: Name of the message in error texts.
        limit: Largest number of entries (messages nested directly) of this message; None: no limit.
        field_count: Counter of the fields of the outermost message.

    Raises:
        ValueError: The data are not a valid message of the type; the error names the field.
        GRPCError: There are too many entries or fields.
    """
    kept: list[bytes] = []
    entries = 0
    for name, field, value, encoded in encoded_fields(data, message_type, message_name, f"{message_name}."):
        if limit is not None and next(field_count) > (maximum := limit * FIELDS_PER_ENTRY):
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"{message_name}: more than {maximum} fields in all; send fewer"
            )
        if field is None:
            continue
        if isinstance(value, bytes) and field.message:
            entries += 1
            if limit is not None and entries > limit:
                raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{name}: more than {limit} entries; send fewer")
            inner = _known_fields(value, field.message, name, limit, field_count)
            if len(inner) < len(value):
                encoded = message_field(field.number, inner)
        elif isinstance(value, bytes) and field.proto_type == "string":
            decode_utf8(value, name)
        kept.append(encoded)
    return b"".join(kept)
