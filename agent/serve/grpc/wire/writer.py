"""Writers of protobuf messages: field by field by number, or a whole message from plain values.

betterproto takes 30 us for a field and 4 MiB of memory. A caller that writes field by field joins the fields
in the order of their numbers. As everywhere in proto3, a field that is zero or empty is left out; a message
within a message is not.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from agent.model.wire import FIXED64, LENGTH, VARINT
from agent.serve.grpc.wire.reader import DOUBLE, MessageField, fields_by_name

if TYPE_CHECKING:
    import betterproto

_UINT64: Final = (1 << 64) - 1
_BYTES: Final = tuple(bytes([byte]) for byte in range(256))


def varint(value: int) -> bytes:
    """Encode a number from 0 to 2**64 - 1: seven bits to a byte, the lowest first."""
    if value < 0x80:
        return _BYTES[value]
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number(field: int, value: int) -> bytes:
    """Encode an int64, enum or bool field."""
    return varint(field << 3 | VARINT) + varint(value & _UINT64) if value else b""


def double(field: int, value: float) -> bytes:
    """Encode a double field."""
    return varint(field << 3 | FIXED64) + DOUBLE.pack(value) if value else b""


def text(field: int, value: str) -> bytes:
    """Encode a string field; replaces surrogates, because no reader accepts them."""
    return message(field, value.encode("utf-8", "replace")) if value else b""


def texts(field: int, values: Iterable[str]) -> bytes:
    """Encode a repeated string field; empty strings are included."""
    return b"".join(message(field, value.encode("utf-8", "replace")) for value in values)


def message(field: int, data: bytes) -> bytes:
    """Encode a message field from the message's bytes."""
    return varint(field << 3 | LENGTH) + varint(len(data)) + data


def write_message(message_type: "type[betterproto.Message]", values: Mapping[str, Any]) -> bytes:
    """Encode a message of a generated type from its values by field name; missing fields are unset or zero.

    Raises:
        LookupError: The type has no field of that name.
    """
    fields = fields_by_name(message_type)
    encoded = []
    for name, value in values.items():
        field = fields[name]
        if field.repeated:
            encoded += [_encode_field(field, entry) for entry in value]
        elif field.message or field.oneof or field.optional or value:
            encoded.append(_encode_field(field, value))
    return b"".join(encoded)


def _encode_field(field: MessageField, value: Any) -> bytes:
    if field.wire_type == VARINT:
        return varint(field.number << 3 | VARINT) + varint(int(value) & _UINT64)
    if field.wire_type == FIXED64:
        return varint(field.number << 3 | FIXED64) + DOUBLE.pack(value)
    data = write_message(field.message, value) if field.message else value.encode("utf-8", "replace")
    return message(field.number, data)
