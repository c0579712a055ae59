"""Protobuf messages are those of the release before, byte for byte; requests are understood as it did."""

from typing import Any

import pytest
from golden import files, messages
from golden.compare import check
from golden.files import load


@pytest.fixture(scope="module")
def encoded_messages() -> dict[str, str]:
    return messages.encode_messages()


@pytest.fixture(scope="module")
def replies() -> dict[str, Any]:
    return messages.replies()


def test_each_kind_of_message_is_sent(encoded_messages: dict[str, str]) -> None:
    assert list(encoded_messages) == list(load(files.MESSAGES))


@pytest.mark.parametrize("name", load(files.MESSAGES))
def test_bytes_of_a_message_equal_the_golden_ones(encoded_messages: dict[str, str], name: str) -> None:
    assert encoded_messages[name] == load(files.MESSAGES)[name]


def test_stored_report_and_status_decoded_are_encoded_to_equal_bytes() -> None:
    golden = load(files.MESSAGES)
    assert messages.report_again(bytes.fromhex(golden["report"])).hex() == golden["report"]
    for name in ("status", "status.new"):
        assert messages.status_again(bytes.fromhex(golden[name])).hex() == golden[name]


@pytest.mark.parametrize("name", messages.REQUESTS)
def test_request_of_a_driver_is_understood_and_answered_as_before(replies: dict[str, Any], name: str) -> None:
    check(load(files.REPLIES)["replies"][name], replies[name])


def test_unusable_requests_are_refused_with_the_same_status() -> None:
    assert messages.refusals() == load(files.REPLIES)["refusals"]


def test_error_lines_name_the_same_classes_codes_and_claims() -> None:
    check(load(files.REPLIES)["lines"], messages.lines())
