"""The fields of a message, one after the other, as they stand in its bytes; and which ones its kind has.

betterproto 2.0.0b7 takes a truncated string for a short one and a number for a string. So what comes in is
walked here, strictly. What becomes of the fields is :mod:`~agent.serve.grpc.codec`'s, where betterproto makes
a message of them, and :mod:`~agent.serve.grpc.wire.plain`'s, where none is made.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.model.wire import FIXED, FIXED64, LAST_FIELD, LENGTH, VARINT, varint

if (
    TYPE_CHECKING
):  # 4 MiB: whoever has a kind of message has it, and an agent that only serves health has none
    import betterproto

# The protobuf types that our messages use; a new one is a KeyError in every test that decodes it.
WIRE_TYPES: Final = {
    "bool": VARINT, "enum": VARINT, "int64": VARINT, "double": FIXED64, "string": LENGTH, "message": LENGTH,
    "map": LENGTH,
}  # fmt: skip


class Field(NamedTuple):
    """A field as its message has it."""

    number: int
    name: str
    proto_type: str
    """``int64``."""
    message: "type[betterproto.Message] | None"
    """Of a field that holds messages, what they are; an entry of a map is one of a key and a value."""
    numbers: frozenset[int]
    """Those of an enum."""
    repeated: bool
    oneof: str
    """Of which only one is set; empty: none."""
    optional: bool
    """It can be unset, which is something else than zero."""

    @property
    def wire_type(self) -> int:
        """How its value stands in the bytes."""
        return WIRE_TYPES[self.proto_type]


class Piece(NamedTuple):
    """One field as it stands in the bytes."""

    name: str
    """With its message's name before it."""
    field: Field | None
    """None: one that the message's kind does not have."""
    value: int | bytes
    """The number of a varint, of anything else the bytes behind tag and length."""
    data: bytes
    """All of it, its tag included."""


@cache
def fields_of(kind: "type[betterproto.Message]") -> Mapping[int, Field]:
    """The fields of a kind of message by number, in the order of its file."""
    meta = kind._betterproto  # type: ignore[arg-type]  # private, untypable, and pinned with the release
    table: dict[int, Field] = {}
    for name, field in meta.meta_by_field_name.items():
        of = meta.cls_by_field[name]
        table[field.number] = Field(
            number=field.number,
            name=name,
            proto_type=field.proto_type,
            message=of if field.proto_type in {"message", "map"} else None,
            numbers=frozenset(int(one) for one in of) if field.proto_type == "enum" else frozenset(),
            repeated=meta.default_gen[name] is list,
            oneof=field.group or "",
            optional=bool(field.optional),
        )
    return table


def walk(data: bytes, kind: "type[betterproto.Message] | None", where: str, prefix: str) -> Iterator[Piece]:
    """The fields in ``data``, in their order.

    Args:
        data: A message of this kind, if all is well.
        kind: Which fields are known; None: none are.
        where: What the message is called in errors.
        prefix: What stands before the name of a field.

    Raises:
        ValueError: ``data`` is no well-formed message of that kind; names the field.
    """
    table = fields_of(kind) if kind else {}
    at = 0
    while at < len(data):
        begin = at
        tag, at = varint(data, at, where)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{where}: field number {number} is none of protobuf's")
        field = table.get(number)
        name = f"{prefix}{field.name}" if field else f"{where} field {number}"
        start, value = at, 0
        if wire_type == VARINT:
            value, at = varint(data, at, name)
        elif wire_type == LENGTH:
            size, start = varint(data, at, name)
            at = start + size
        elif wire_type in FIXED:
            at += FIXED[wire_type]
        else:
            raise ValueError(f"{name}: wire type {wire_type} is none of protobuf's")
        if at > len(data):
            raise ValueError(f"{name}: ends {at - len(data)} bytes after the message's {len(data)}")
        if field and wire_type != field.wire_type:
            raise ValueError(f"{name}: wire type {wire_type}, should be {field.wire_type}")
        yield Piece(name, field, value if wire_type == VARINT else data[start:at], data[begin:at])


def text(data: bytes, name: str) -> str:
    """The text in a field's bytes. Raises ValueError, with the place, if it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start} of {len(data)}") from None
