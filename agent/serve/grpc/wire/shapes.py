"""Messages of others, of which little is wanted: read by the numbers of their fields, everything else unread.

A shape says which fields there are to read and what they are called. The result is plain values under those
names, as the same message looks in JSON: a field that is not in the bytes is not in the result.

For v1.Pod, which has a thousand fields in two hundred messages. Generated classes of it would be a megabyte
of code, and betterproto takes a millisecond for what this passes over at once.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from agent.model.time import rfc3339
from agent.model.wire import FIXED, LAST_FIELD, LENGTH, VARINT, varint
from agent.serve.grpc.wire.fields import text

_SIGN: Final = 1 << 63
_UINT64: Final = (1 << 64) - 1


class Kind(Enum):
    """What a field holds, unless it is a message."""

    TEXT = auto()
    BYTES = auto()
    NUMBER = auto()
    """An int32, int64 or enum."""
    SWITCH = auto()
    QUANTITY = auto()
    """A message of one text, which stands for it in JSON."""
    TIME = auto()
    """Seconds and nanoseconds; RFC 3339 in JSON, to the second."""


class Part(NamedTuple):
    """One field of a shape."""

    name: str
    of: "Kind | Mapping[int, Part]" = Kind.TEXT
    many: bool = False
    keyed: bool = False
    """It is a map from text to such values."""


Shape = Mapping[int, Part]
"""By field number."""

_WIRE: Final = {Kind.NUMBER: VARINT, Kind.SWITCH: VARINT}
_QUANTITY: Final[Shape] = {1: Part("string")}
_TIME: Final[Shape] = {1: Part("seconds", Kind.NUMBER)}


def read_shape(data: bytes, shape: Shape, where: str) -> dict[str, Any]:
    """The values in a message.

    Args:
        data: The message.
        shape: What to read of it.
        where: What it is called in errors.

    Raises:
        ValueError: It is no well-formed message, or a field is of another type than the shape has it.
    """
    found: dict[int, list[Any]] = {}
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        if tag < 0x80:  # most are: a call for each would be a third of the time
            at += 1
        else:
            tag, at = varint(data, at, where)
        number, wire = tag >> 3, tag & 7
        if not 0 < number <= LAST_FIELD:
            raise ValueError(f"{where}: field number {number} is none of protobuf's")
        start, value = at, 0
        if wire == VARINT:
            value, at = varint(data, at, where)
        elif wire == LENGTH:
            size, start = varint(data, at, where)
            at = start + size
        elif wire in FIXED:
            at += FIXED[wire]
        else:
            raise ValueError(f"{where}: wire type {wire} is none of protobuf's")
        if at > end:
            raise ValueError(f"{where}: field {number} ends {at - end} bytes after the message's {end}")
        part = shape.get(number)
        if part is None:
            continue
        due = _WIRE.get(part.of, LENGTH) if isinstance(part.of, Kind) else LENGTH
        if wire != due:
            raise ValueError(f"{where}.{part.name}: wire type {wire}, should be {due}")
        found.setdefault(number, []).append(value if wire == VARINT else data[start:at])
    return {shape[number].name: _value(shape[number], raw, where) for number, raw in found.items()}


def _value(part: Part, raw: list[Any], where: str) -> Any:
    where = f"{where}.{part.name}"
    if part.keyed:
        entry: Shape = {1: Part("key"), 2: Part("value", part.of)}
        entries = [read_shape(one, entry, where) for one in raw]
        return {one.get("key", ""): one.get("value", "") for one in entries}
    if part.many:
        return [_one(part.of, one, where) for one in raw]
    if isinstance(part.of, Kind):
        return _one(part.of, raw[-1], where)
    return _one(part.of, b"".join(raw), where)  # of a message that is there twice, one is made


def _one(of: "Kind | Shape", raw: Any, where: str) -> Any:
    match of:
        case Kind.TEXT:
            return text(raw, where)
        case Kind.BYTES:
            return raw
        case Kind.NUMBER:
            number = raw & _UINT64
            return number - (_SIGN << 1) if number & _SIGN else number
        case Kind.SWITCH:
            return raw != 0
        case Kind.QUANTITY:
            return read_shape(raw, _QUANTITY, where).get("string", "")
        case Kind.TIME:
            return _time(read_shape(raw, _TIME, where).get("seconds", 0), where)
    return read_shape(raw, of, where)


def _time(seconds: int, where: str) -> str:
    try:
        return rfc3339(seconds)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{where}: {seconds} s since 1970 is no time") from None
