"""Readers and writers of messages as plain values: the same as Google's protobuf, with limits."""

import math
import re
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from wire.google import load_descriptors
from wire.link import API, message
from wire.random_messages import messages

from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire import TooManyEntries, encode_message, read_message

MESSAGES = load_descriptors()[API].message_types_by_name
REQUESTS = [item for name, item in MESSAGES.items() if name.endswith("Request")]


def values_of(google: Any) -> dict[str, Any]:
    """Return the values of a message of Google's protobuf."""
    values: dict[str, Any] = {}
    for field in google.DESCRIPTOR.fields:
        value = getattr(google, field.name)
        if field.is_repeated:
            values[field.name] = [values_of(item) if field.message_type else item for item in value]
        elif not field.has_presence or google.HasField(field.name):
            known = field.enum_type is None or value in field.enum_type.values_by_number
            values[field.name] = values_of(value) if field.message_type else value if known else 0
    return values


def equal(value: Any, expected: Any) -> bool:
    """Return whether two values are equal, where NaN equals only NaN."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            equal(value, expected[name]) for name, value in value.items()
        )
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(equal, value, expected))
    if isinstance(value, float) and isinstance(expected, float) and math.isnan(value):
        return math.isnan(expected)
    return bool(value == expected) and type(value) is type(expected)


def any_message() -> st.SearchStrategy[Any]:
    return st.sampled_from(REQUESTS).flatmap(messages)


def generated_type(kind: Descriptor) -> Any:
    return getattr(v1, kind.name)


@given(any_message())
def test_messages_are_read_and_written_as_by_google_protobuf(google: Any) -> None:
    kind = generated_type(google.DESCRIPTOR)
    values = read_message(google.SerializeToString(), kind, {})
    assert equal(values, values_of(google))
    assert equal(values_of(type(google).FromString(encode_message(kind, values))), values)


@given(any_message(), st.data())
def test_concatenated_messages_are_merged_as_by_google_protobuf(first: Any, data: st.DataObject) -> None:
    second = data.draw(messages(first.DESCRIPTOR))
    both = first.SerializeToString() + second.SerializeToString()
    assert equal(
        read_message(both, generated_type(first.DESCRIPTOR), {}), values_of(type(first).FromString(both))
    )


@given(any_message(), st.binary(max_size=12), st.integers(0, 40))
def test_accepted_bytes_are_accepted_by_google_protobuf(google: Any, data: bytes, at: int) -> None:
    whole = google.SerializeToString()
    broken = whole[:at] + data + whole[at:]
    try:
        values = read_message(broken, generated_type(google.DESCRIPTOR), {})
    except ValueError:
        return
    assert equal(values, values_of(type(google).FromString(broken)))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0a\x05ab", "claims: ends 3 bytes after the end of the message"),
        (b"\x0a\x02\x1a\x05", "claims[0].uid: ends 5 bytes after the end of the message"),
        (b"\x0a\x00\x0a\x03\x1a\x01\xff", "claims[1].uid: not UTF-8 at byte 0 of 1"),
        (b"\x0a\x04\x22\x02\x08\x05", "claims[0].devices[0].request: wire type is 0, must be 2"),
        (b"\x0a\x03\x22\x01\x0b", "claims[0].devices[0].request: wire type 3 is not valid"),
        (b"\x08", "claims: message ends inside a varint"),
        (b"\xff", "the request: message ends inside a varint"),
        (b"\x7f", "the request field 15: wire type 7 is not valid"),
        (b"\x8a\x80\x80\x80\x80\x00\x00", "the request: varint is longer than 5 bytes"),
        (b"\x0a\x80\x80\x80\x80\x80\x00", "claims: varint is longer than 5 bytes"),
        (b"\x0a\x02\x00\x00", "claims[0]: field number 0 is not valid"),
    ],
)
def test_invalid_message_is_refused_with_place(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_message(data, v1.CheckClaimsRequest, {})


def test_entries_above_the_limit_are_refused_unread() -> None:
    limits = {v1.CheckClaimsRequest: {"claims": 3}}
    assert len(read_message(b"\x0a\x00" * 3, v1.CheckClaimsRequest, limits)["claims"]) == 3
    with pytest.raises(TooManyEntries, match=r"^claims: 4 entries, limit 3$"):
        read_message(b"\x0a\x00" * 3 + b"\x0a\x01\xff", v1.CheckClaimsRequest, limits)


@pytest.mark.parametrize("value", [math.nan, -1.0, 11.0, math.inf, -math.inf])
def test_number_outside_of_limits_is_refused(value: float) -> None:
    data = message("DriverReportedError", retry_after_s=value).SerializeToString()
    with pytest.raises(ValueError, match=f"^retry_after_s: {value} is not within 0 and 10$"):
        read_message(data, v1.DriverReportedError, {v1.DriverReportedError: {"retry_after_s": (0, 10)}})


def test_missing_number_is_checked_as_zero() -> None:
    with pytest.raises(ValueError, match=r"^number: 0 is not within 1 and 4095$"):
        read_message(b"", v1.Errno, {v1.Errno: {"number": (1, 4095)}})


def test_limit_of_a_string_is_in_bytes() -> None:
    limits = {v1.Errno: {"path": 4}}
    assert read_message(message("Errno", path="ää").SerializeToString(), v1.Errno, limits)["path"] == "ää"
    with pytest.raises(ValueError, match=r"^path: 5 bytes, limit 4$"):
        read_message(message("Errno", path="ääb").SerializeToString(), v1.Errno, limits)


def test_writing_an_unknown_field_raises() -> None:
    with pytest.raises(LookupError):
        encode_message(v1.Errno, {"nummer": 5})
