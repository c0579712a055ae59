"""The codec of every gRPC stream: bytes pass through, betterproto messages are checked and coded.

A list that the native core has encoded goes out as it is. What comes in is checked before
betterproto sees it, because betterproto 2.0.0b7 takes a truncated string for a short one and a
number for a string. Fields that nobody here knows it never sees: it takes time that grows with the
square of their number.
"""

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Final, NamedTuple, TypeVar

import betterproto
from betterproto import encode_varint
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError

M = TypeVar("M", bound=betterproto.Message)

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5
LAST_FIELD: Final = (1 << 29) - 1
FIXED: Final = {FIXED64: 8, FIXED32: 4}
FIELDS_PER_ENTRY: Final = 8
"""Fields that a message with a limit may hold in all, for each entry that it may hold."""

# The protobuf types that our messages use; a new one is a KeyError in every test that decodes it.
WIRE_TYPES: Final = {
    "bool": VARINT, "enum": VARINT, "int64": VARINT, "double": FIXED64, "string": LENGTH, "message": LENGTH,
    "map": LENGTH,
}  # fmt: skip


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

    def encode(self, message: bytes | betterproto.Message, message_type: type[betterproto.Message]) -> bytes:
        """The message's bytes. ``bytes`` are taken to be a ``message_type`` already."""
        return bytes(message)

    def decode(self, data: bytes, message_type: type[M]) -> M:
        """The message in ``data``.

        Raises:
            GRPCError: INTERNAL, as gRPC has it for bytes that are no such message; says what is wrong where.
                RESOURCE_EXHAUSTED for more entries or fields than the limit.
        """
        try:
            known = _known(data, message_type, message_type.__name__, self._entries, count(1))
        except ValueError as error:
            raise GRPCError(Status.INTERNAL, str(error)) from None
        return message_type().parse(known)


class _Field(NamedTuple):
    name: str
    wire_type: int
    text: bool
    message: type[betterproto.Message] | None


@cache
def _fields(kind: type[betterproto.Message]) -> dict[int, _Field]:
    meta = kind._betterproto  # type: ignore[arg-type]  # private, untypable, and pinned with the release
    table: dict[int, _Field] = {}
    for name, field in meta.meta_by_field_name.items():
        # an entry of a map is a message of a key and a value, on the wire and in betterproto
        message = meta.cls_by_field[name] if field.proto_type in {"message", "map"} else None
        table[field.number] = _Field(
            name, WIRE_TYPES[field.proto_type], field.proto_type == "string", message
        )
    return table


def _known(
    data: bytes, kind: type[betterproto.Message], where: str, limit: int | None, fields: Iterator[int]
) -> bytes:
    """The same message without the fields that its ``kind`` does not have, nor those of messages in it.

    Raises ValueError, naming the field, unless ``data`` is a well-formed message of ``kind``; GRPCError for
    one that holds more messages or fields than ``limit`` allows, as soon as that is clear. ``fields`` counts
    those of the whole.
    """
    table = _fields(kind)
    pieces: list[bytes] = []
    entries = 0
    at = 0
    while at < len(data):
        if limit is not None and next(fields) > (most := limit * FIELDS_PER_ENTRY):
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{where}: more than {most} fields in all")
        begin = at
        tag, at = _varint(data, at, where)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{where}: field number {number} is none of protobuf's")
        field = table.get(number)
        name = f"{where}.{field.name}" if field else f"{where} field {number}"
        start = at
        if wire_type == VARINT:
            _, at = _varint(data, at, name)
        elif wire_type == LENGTH:
            size, start = _varint(data, at, name)
            at = start + size
        elif wire_type in FIXED:
            at += FIXED[wire_type]
        else:
            raise ValueError(f"{name}: wire type {wire_type} is none of protobuf's")
        if at > len(data):
            raise ValueError(f"{name}: ends {at - len(data)} bytes after the message's {len(data)}")
        if field is None:
            continue
        if wire_type != field.wire_type:
            raise ValueError(f"{name}: wire type {wire_type}, should be {field.wire_type}")
        if field.message:
            entries += 1
            if limit is not None and entries > limit:
                raise GRPCError(Status.RESOURCE_EXHAUSTED, f"{name}: more than {limit} entries")
            inner = _known(data[start:at], field.message, name, limit, fields)
            if len(inner) < at - start:
                pieces.append(encode_varint(tag) + encode_varint(len(inner)) + inner)
                continue
        elif field.text:
            try:
                data[start:at].decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{name}: not UTF-8 at byte {error.start} of {at - start}") from None
        pieces.append(data[begin:at])
    return b"".join(pieces)


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"{where}: ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"{where}: a number of more than 10 bytes")
