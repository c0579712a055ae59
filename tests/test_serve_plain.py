"""Messages as plain values: read and written as Google's protobuf does it, and refused beyond the limits."""

import math
import re
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from wire.google import described
from wire.link import API, message
from wire.random_messages import messages

from agent.serve.grpc.gen.driver_link.drahealth import v1
from agent.serve.grpc.wire.plain import TooMany, read, write

KINDS = described()[API].message_types_by_name
REQUESTS = [one for name, one in KINDS.items() if name.endswith("Request")]


def values_of(google: Any) -> dict[str, Any]:
    """The same as Google's protobuf has it."""
    values: dict[str, Any] = {}
    for field in google.DESCRIPTOR.fields:
        value = getattr(google, field.name)
        if field.is_repeated:
            values[field.name] = [values_of(one) if field.message_type else one for one in value]
        elif not field.has_presence or google.HasField(field.name):
            known = field.enum_type is None or value in field.enum_type.values_by_number
            values[field.name] = values_of(value) if field.message_type else value if known else 0
    return values


def same(one: Any, other: Any) -> bool:
    """Equal, and no number is equal to NaN but NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other) and type(one) is type(other)


def any_message() -> st.SearchStrategy[Any]:
    return st.sampled_from(REQUESTS).flatmap(messages)


def ours(kind: Descriptor) -> Any:
    return getattr(v1, kind.name)


@given(any_message())
def test_a_message_is_read_as_google_reads_it_and_written_so_that_google_reads_the_same(google: Any) -> None:
    kind = ours(google.DESCRIPTOR)
    values = read(google.SerializeToString(), kind, {})
    assert same(values, values_of(google))
    assert same(values_of(type(google).FromString(write(kind, values))), values)


@given(any_message(), st.data())
def test_two_messages_one_after_the_other_are_merged_as_google_merges_them(
    first: Any, data: st.DataObject
) -> None:
    second = data.draw(messages(first.DESCRIPTOR))
    both = first.SerializeToString() + second.SerializeToString()
    assert same(read(both, ours(first.DESCRIPTOR), {}), values_of(type(first).FromString(both)))


@given(any_message(), st.binary(max_size=12), st.integers(0, 40))
def test_any_bytes_are_a_message_or_an_error_and_google_takes_what_we_take(
    google: Any, data: bytes, at: int
) -> None:
    whole = google.SerializeToString()
    broken = whole[:at] + data + whole[at:]
    try:
        values = read(broken, ours(google.DESCRIPTOR), {})
    except ValueError:
        return
    assert same(values, values_of(type(google).FromString(broken)))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x0a\x05ab", "claims: ends 3 bytes after the message's 4"),
        (b"\x0a\x02\x1a\x05", "claims[0].uid: ends 5 bytes after the message's 2"),
        (b"\x0a\x00\x0a\x03\x1a\x01\xff", "claims[1].uid: not UTF-8 at byte 0 of 1"),
        (b"\x0a\x04\x22\x02\x08\x05", "claims[0].devices[0].request: wire type 0, should be 2"),
        (b"\x0a\x03\x22\x01\x0b", "claims[0].devices[0].request: wire type 3 is none of protobuf's"),
        (b"\x08", "claims: ends in the middle of a number"),
        (b"\xff", "the request: ends in the middle of a number"),
        (b"\x7f", "the request field 15: wire type 7 is none of protobuf's"),
        (b"\x0a\x02\x00\x00", "claims[0]: field number 0 is none of protobuf's"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read(data, v1.CheckClaimsRequest, {})


def test_more_entries_than_the_limit_are_refused_before_they_are_read() -> None:
    limits = {v1.CheckClaimsRequest: {"claims": 3}}
    assert len(read(b"\x0a\x00" * 3, v1.CheckClaimsRequest, limits)["claims"]) == 3
    with pytest.raises(TooMany, match=r"^claims: 4 entries, limit 3$"):
        read(b"\x0a\x00" * 3 + b"\x0a\x01\xff", v1.CheckClaimsRequest, limits)


@pytest.mark.parametrize("value", [math.nan, -1.0, 11.0, math.inf, -math.inf])
def test_a_number_that_is_none_is_within_no_limits(value: float) -> None:
    data = message("DriverWord", retry_after_s=value).SerializeToString()
    with pytest.raises(ValueError, match=f"^retry_after_s: {value} is not within 0 and 10$"):
        read(data, v1.DriverWord, {v1.DriverWord: {"retry_after_s": (0, 10)}})


def test_a_zero_that_nobody_sent_is_held_against_the_limits_too() -> None:
    with pytest.raises(ValueError, match=r"^number: 0 is not within 1 and 4095$"):
        read(b"", v1.Errno, {v1.Errno: {"number": (1, 4095)}})


def test_the_limit_of_a_text_is_in_bytes() -> None:
    limits = {v1.Errno: {"path": 4}}
    assert read(message("Errno", path="ää").SerializeToString(), v1.Errno, limits)["path"] == "ää"
    with pytest.raises(ValueError, match=r"^path: 5 bytes, limit 4$"):
        read(message("Errno", path="ääb").SerializeToString(), v1.Errno, limits)


def test_what_is_written_must_be_a_field() -> None:
    with pytest.raises(LookupError):
        write(v1.Errno, {"nummer": 5})
