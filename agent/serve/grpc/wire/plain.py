"""Messages as plain values: dictionaries by the fields' names, read strictly and within limits.

For requests of thousands of entries: betterproto takes up to 0.1 ms for each, and keeps no limit. Names,
numbers and types are those of the generated messages all the same.

A field that can be unset is not there when it is; any other has its zero. An enum is a number, and one that
our version does not know is 0. Of what is there twice the last counts, and messages are merged, as everywhere
in protobuf.
"""

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import betterproto
from betterproto import encode_varint

from agent.model.wire import FIXED64, VARINT
from agent.serve.grpc.wire.fields import Field, fields_of, text, walk

Limit = int | tuple[float, float]
"""Entries of a repeated field, or bytes of a text; the least and the most of a number."""
Limits = Mapping[type[betterproto.Message], Mapping[str, Limit]]
"""By message and field; what is not there has none."""
Values = dict[str, Any]

_ZEROS: Final[Mapping[str, object]] = {"string": "", "int64": 0, "bool": False, "enum": 0, "double": 0.0}
_UINT64: Final = (1 << 64) - 1
_UINT32: Final = (1 << 32) - 1
_INT64_MAX: Final = (1 << 63) - 1
_DOUBLE: Final = struct.Struct("<d")


class TooMany(ValueError):
    """More entries than the limit of their field."""


def read(data: bytes, kind: type[betterproto.Message], limits: Limits) -> Values:
    """The values in ``data``.

    Raises:
        TooMany: ``claims[2].devices: 600 entries, limit 512``; nothing of these was read.
        ValueError: Something else is wrong, said alike: with its place, and the limit if there is one.
    """
    return _read(data, kind, limits, "the request", "")


def write(kind: type[betterproto.Message], values: Mapping[str, Any]) -> bytes:
    """A message of that kind; what is not among the values is unset, or zero.

    Raises:
        LookupError: The kind has no field of that name.
    """
    fields = _named(kind)
    pieces = []
    for name, value in values.items():
        field = fields[name]
        if field.repeated:
            pieces += [_written(field, one) for one in value]
        elif field.message or field.oneof or field.optional or value:
            pieces.append(_written(field, value))
    return b"".join(pieces)


@cache
def _named(kind: type[betterproto.Message]) -> Mapping[str, Field]:
    return {field.name: field for field in fields_of(kind).values()}


# --- reading -----------------------------------------------------------------------------------------------


def _read(data: bytes, kind: type[betterproto.Message], limits: Limits, where: str, prefix: str) -> Values:
    found: dict[str, list[Any]] = {}
    for _, field, raw, _ in walk(data, kind, where, prefix):
        if field is None:
            continue
        if field.oneof and field.name not in found:
            for other in _named(kind).values():
                if other.oneof == field.oneof:
                    found.pop(other.name, None)
        found.setdefault(field.name, []).append(raw)
    values: Values = {}
    of = limits.get(kind, {})
    for field in fields_of(kind).values():
        given, limit = found.get(field.name), of.get(field.name)
        if field.repeated:
            name = f"{prefix}{field.name}"
            if isinstance(limit, int) and len(given or ()) > limit:
                raise TooMany(f"{name}: {len(given or ())} entries, limit {limit}")
            values[field.name] = [
                _value(field, one, limits, f"{name}[{number}]") for number, one in enumerate(given or ())
            ]
        elif given is not None:
            name = f"{prefix}{field.name}"
            last = b"".join(given) if field.message else given[-1]
            values[field.name] = value = _value(field, last, limits, name)
            _check(value, limit, name)
        elif not (field.message or field.oneof or field.optional):
            values[field.name] = value = _ZEROS[field.proto_type]
            _check(value, limit, f"{prefix}{field.name}")
    return values


def _value(field: Field, raw: Any, limits: Limits, name: str) -> Any:
    match field.proto_type:
        case "string":
            return text(raw, name)
        case "int64":
            number = raw & _UINT64
            return number if number <= _INT64_MAX else number - _UINT64 - 1
        case "enum":
            number = raw & _UINT32
            return number if number in field.numbers else 0
        case "bool":
            return raw & _UINT64 != 0
        case "double":
            return _DOUBLE.unpack(raw)[0]
    assert field.message is not None, f"{name}: {field.proto_type} is read nowhere"
    return _read(raw, field.message, limits, name, f"{name}.")


def _check(value: Any, limit: Limit | None, name: str) -> None:
    if isinstance(limit, tuple):
        low, high = limit
        if not low <= value <= high:  # which no NaN is
            raise ValueError(f"{name}: {value} is not within {low} and {high}")
    elif limit is not None and (size := len(value.encode())) > limit:
        raise ValueError(f"{name}: {size} bytes, limit {limit}")


# --- writing -----------------------------------------------------------------------------------------------


def _written(field: Field, value: Any) -> bytes:
    tag = encode_varint(field.number << 3 | field.wire_type)
    if field.wire_type == VARINT:
        return tag + encode_varint(int(value) & _UINT64)
    if field.wire_type == FIXED64:
        return tag + _DOUBLE.pack(value)
    data = write(field.message, value) if field.message else value.encode("utf-8", "replace")
    return tag + encode_varint(len(data)) + data
