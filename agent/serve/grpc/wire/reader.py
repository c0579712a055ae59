"""Strict table-driven readers of protobuf messages: of generated message types, and of hand-written shapes.

betterproto 2.0.0b7 takes a truncated string for a short one and a number for a string, spends up to 0.1 ms on
each entry and keeps no limit. These readers check every field and report its place. This module does not
import betterproto, which takes 4 MiB: an agent that serves only health runs without it.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.model.time import rfc3339
from agent.model.wire import FIXED, FIXED64, LAST_FIELD, LENGTH, VARINT, varint

if TYPE_CHECKING:
    import betterproto

# The protobuf types that our messages use; a new type is a KeyError in every test that decodes the message.
WIRE_TYPES: Final = {
    "bool": VARINT, "enum": VARINT, "int64": VARINT, "double": FIXED64, "string": LENGTH, "message": LENGTH,
    "map": LENGTH,
}  # fmt: skip

FieldLimit = int | tuple[float, float]
"""Limit of a field: maximum number of entries or bytes; for a number, its minimum and maximum."""
FieldLimits = Mapping["type[betterproto.Message]", Mapping[str, FieldLimit]]
"""Limits by message type and field name; a field without a limit is missing."""
FieldValues = dict[str, Any]
"""Decoded values of a message by field name."""

_ZEROS: Final[Mapping[str, object]] = {"string": "", "int64": 0, "bool": False, "enum": 0, "double": 0.0}
_SIGN: Final = 1 << 63
_UINT64: Final = (1 << 64) - 1
_UINT32: Final = (1 << 32) - 1
DOUBLE: Final = struct.Struct("<d")


class TooManyEntries(ValueError):
    """A repeated field has more entries than its limit."""


class MessageField(NamedTuple):
    """Description of a field of a generated message type."""

    number: int
    name: str
    proto_type: str
    """Type of the value in the proto file, such as ``int64``."""
    message: "type[betterproto.Message] | None"
    """Message type of the value; None: the value is not a message. An entry of a map has the fields key and
    value."""
    numbers: frozenset[int]
    """Valid numbers of the enum; empty: the field is not an enum."""
    repeated: bool
    oneof: str
    """Name of the oneof that the field belongs to; empty: none."""
    optional: bool
    """Whether the field can be unset, which differs from zero."""

    @property
    def wire_type(self) -> int:
        """Protobuf wire type of the field's value."""
        return WIRE_TYPES[self.proto_type]


class RawField(NamedTuple):
    """Encoded field of a protobuf message."""

    name: str
    """Name of the field, after the prefix of its message."""
    field: MessageField | None
    """Description of the field; None: the message type does not have this field."""
    value: int | bytes
    """Value of the field: the number of a varint, otherwise the bytes after tag and length."""
    data: bytes
    """All bytes of the field, with its tag."""


class ValueKind(Enum):
    """Type of a field of a MessageShape whose value is not read as a message."""

    STRING = auto()
    BYTES = auto()
    INTEGER = auto()
    """The field is an int32, int64 or enum."""
    BOOL = auto()
    QUANTITY = auto()
    """The field is a resource.Quantity: a message of one string, which stands for the message in JSON."""
    TIME = auto()
    """The field is a meta.v1.Time: seconds and nanoseconds; RFC 3339 in JSON, to the second."""


class ShapeField(NamedTuple):
    """Description of a field of a MessageShape."""

    name: str
    kind: "ValueKind | Mapping[int, ShapeField]" = ValueKind.STRING
    repeated: bool = False
    is_map: bool = False
    """Whether the field is a map from string to such values."""


MessageShape = Mapping[int, ShapeField]
"""Fields to read of a message that has no generated class, by number; the reader skips all other fields.

For messages such as v1.Pod, which has a thousand fields in two hundred messages: generated classes would be a
megabyte of code.
"""

_WIRE_TYPES_OF_KINDS: Final = {ValueKind.INTEGER: VARINT, ValueKind.BOOL: VARINT}
_QUANTITY: Final[MessageShape] = {1: ShapeField("string")}
_TIME: Final[MessageShape] = {1: ShapeField("seconds", ValueKind.INTEGER)}


# --- fields as encoded --------------------------------------------------------------------------------------


def scan(
    data: bytes, where: str, name_of: Callable[[int], str]
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield each field: number, wire type, value of a varint, offsets of field, value and end.

    Args:
        data: Encoded message.
        where: Name of the message in errors.
        name_of: Returns the name of a field in errors, by its number.

    Raises:
        ValueError: The data are not a well-formed message; names the place.
    """
    at, end = 0, len(data)
    while at < end:
        begin = at
        tag = data[at]
        if tag < 0x80:  # most tags: a call for each would take a third of the time
            at += 1
        else:
            tag, at = varint(data, at, where)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{where}: field number {number} is not valid")
        start, value = at, 0
        if wire_type == LENGTH:
            if at < end and data[at] < 0x80:
                start = at + 1
                at = start + data[at]
            else:
                size, start = varint(data, at, name_of(number))
                at = start + size
        elif wire_type == VARINT:
            value, at = varint(data, at, name_of(number))
        elif wire_type in FIXED:
            at += FIXED[wire_type]
        else:
            raise ValueError(f"{name_of(number)}: wire type {wire_type} is not valid")
        if at > end:
            raise ValueError(f"{name_of(number)}: ends {at - end} bytes after the message's {end}")
        yield number, wire_type, value, begin, start, at


def raw_fields(
    data: bytes, message_type: "type[betterproto.Message] | None", where: str, prefix: str
) -> Iterator[RawField]:
    """Yield the fields of an encoded message in their order.

    Args:
        data: Encoded message.
        message_type: Type that describes the fields; None: no field is known.
        where: Name of the message in errors.
        prefix: Prefix of the field names in errors.

    Raises:
        ValueError: The data are not a well-formed message of that type; names the field.
    """
    table = fields_of(message_type) if message_type else {}

    def name_of(number: int) -> str:
        field = table.get(number)
        return f"{prefix}{field.name}" if field else f"{where} field {number}"

    for number, wire_type, value, begin, start, end in scan(data, where, name_of):
        field = table.get(number)
        name = name_of(number)
        if field and wire_type != field.wire_type:
            raise ValueError(f"{name}: wire type {wire_type}, should be {field.wire_type}")
        yield RawField(name, field, value if wire_type == VARINT else data[start:end], data[begin:end])


@cache
def fields_of(message_type: "type[betterproto.Message]") -> Mapping[int, MessageField]:
    """Return the fields of a generated message type by number, in the order of the proto file."""
    meta = message_type._betterproto  # type: ignore[arg-type]  # private, untypable, and pinned with the release
    table: dict[int, MessageField] = {}
    for name, field in meta.meta_by_field_name.items():
        value_type = meta.cls_by_field[name]
        table[field.number] = MessageField(
            number=field.number,
            name=name,
            proto_type=field.proto_type,
            message=value_type if field.proto_type in {"message", "map"} else None,
            numbers=frozenset(int(number) for number in value_type)
            if field.proto_type == "enum"
            else frozenset(),
            repeated=meta.default_gen[name] is list,
            oneof=field.group or "",
            optional=bool(field.optional),
        )
    return table


@cache
def fields_by_name(message_type: "type[betterproto.Message]") -> Mapping[str, MessageField]:
    """Return the fields of a generated message type by name."""
    return {field.name: field for field in fields_of(message_type).values()}


def decode_utf8(data: bytes, name: str) -> str:
    """Return the text of a string field. Raises ValueError with the field's `name` if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start} of {len(data)}") from None


def signed64(raw: int) -> int:
    """Return the signed int64 value of a varint."""
    number = raw & _UINT64
    return number - _UINT64 - 1 if number & _SIGN else number


# --- messages of a generated type as plain values -----------------------------------------------------------


def read_message(data: bytes, message_type: "type[betterproto.Message]", limits: FieldLimits) -> FieldValues:
    """Return the values of an encoded message by field name.

    A field that can be unset is missing when it is unset; any other unset field is zero. An enum is a number;
    an unknown number is 0. Of a repeated occurrence of a field the last counts and messages are merged, as in
    every protobuf reader.

    Raises:
        TooManyEntries: ``claims[2].devices: 600 entries, limit 512``; none of the entries was read.
        ValueError: The data are not valid, or a value is outside of its limit; names the place.
    """
    return _read(data, message_type, limits, "the request", "")


def _read(
    data: bytes, message_type: "type[betterproto.Message]", limits: FieldLimits, where: str, prefix: str
) -> FieldValues:
    found: dict[str, list[Any]] = {}
    for _, field, raw, _ in raw_fields(data, message_type, where, prefix):
        if field is None:
            continue
        if field.oneof and field.name not in found:
            for other in fields_by_name(message_type).values():
                if other.oneof == field.oneof:
                    found.pop(other.name, None)
        found.setdefault(field.name, []).append(raw)
    values: FieldValues = {}
    limit_of = limits.get(message_type, {})
    for field in fields_of(message_type).values():
        given, limit = found.get(field.name), limit_of.get(field.name)
        if field.repeated:
            name = f"{prefix}{field.name}"
            if isinstance(limit, int) and len(given or ()) > limit:
                raise TooManyEntries(f"{name}: {len(given or ())} entries, limit {limit}")
            values[field.name] = [
                _field_value(field, raw, limits, f"{name}[{index}]") for index, raw in enumerate(given or ())
            ]
        elif given is not None:
            name = f"{prefix}{field.name}"
            last = b"".join(given) if field.message else given[-1]
            values[field.name] = value = _field_value(field, last, limits, name)
            _check_limit(value, limit, name)
        elif not (field.message or field.oneof or field.optional):
            values[field.name] = value = _ZEROS[field.proto_type]
            _check_limit(value, limit, f"{prefix}{field.name}")
    return values


def _field_value(field: MessageField, raw: Any, limits: FieldLimits, name: str) -> Any:
    match field.proto_type:
        case "string":
            return decode_utf8(raw, name)
        case "int64":
            return signed64(raw)
        case "enum":
            number = raw & _UINT32
            return number if number in field.numbers else 0
        case "bool":
            return raw & _UINT64 != 0
        case "double":
            return DOUBLE.unpack(raw)[0]
    assert field.message is not None, f"{name}: no reader for {field.proto_type}"
    return _read(raw, field.message, limits, name, f"{name}.")


def _check_limit(value: Any, limit: FieldLimit | None, name: str) -> None:
    if isinstance(limit, tuple):
        low, high = limit
        if not low <= value <= high:  # also true for NaN
            raise ValueError(f"{name}: {value} is not within {low} and {high}")
    elif limit is not None and (size := len(value.encode())) > limit:
        raise ValueError(f"{name}: {size} bytes, limit {limit}")


# --- messages by shape --------------------------------------------------------------------------------------


def read_shape(data: bytes, shape: MessageShape, where: str) -> dict[str, Any]:
    """Return the values of an encoded message as in its JSON; a field that is not in the data is missing.

    Args:
        data: Encoded message.
        shape: Fields to read.
        where: Name of the message in errors.

    Raises:
        ValueError: The data are not a well-formed message, or a field has another type than in the shape.
    """
    found: dict[int, list[Any]] = {}
    for number, wire_type, value, _, start, end in scan(
        data, where, lambda number: f"{where} field {number}"
    ):
        field = shape.get(number)
        if field is None:
            continue
        kind = field.kind
        expected = _WIRE_TYPES_OF_KINDS.get(kind, LENGTH) if isinstance(kind, ValueKind) else LENGTH
        if wire_type != expected:
            raise ValueError(f"{where}.{field.name}: wire type {wire_type}, should be {expected}")
        found.setdefault(number, []).append(value if wire_type == VARINT else data[start:end])
    return {shape[number].name: _shape_field(shape[number], raw, where) for number, raw in found.items()}


def _shape_field(field: ShapeField, raw: list[Any], where: str) -> Any:
    where = f"{where}.{field.name}"
    if field.is_map:
        entry: MessageShape = {1: ShapeField("key"), 2: ShapeField("value", field.kind)}
        entries = [read_shape(data, entry, where) for data in raw]
        return {item.get("key", ""): item.get("value", "") for item in entries}
    if field.repeated:
        return [_shape_value(field.kind, value, where) for value in raw]
    if isinstance(field.kind, ValueKind):
        return _shape_value(field.kind, raw[-1], where)
    return _shape_value(field.kind, b"".join(raw), where)  # occurrences of one message are merged


def _shape_value(kind: "ValueKind | MessageShape", raw: Any, where: str) -> Any:
    match kind:
        case ValueKind.STRING:
            return decode_utf8(raw, where)
        case ValueKind.BYTES:
            return raw
        case ValueKind.INTEGER:
            return signed64(raw)
        case ValueKind.BOOL:
            return raw != 0
        case ValueKind.QUANTITY:
            return read_shape(raw, _QUANTITY, where).get("string", "")
        case ValueKind.TIME:
            return _format_time(read_shape(raw, _TIME, where).get("seconds", 0), where)
    return read_shape(raw, kind, where)


def _format_time(seconds: int, where: str) -> str:
    try:
        return rfc3339(seconds)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{where}: {seconds} s since 1970 is not a valid time") from None
