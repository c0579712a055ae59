"""Missing readings: their reason as text, and absence."""

import errno

import pytest
from agent.native._core import lib

from agent.model.reading import NATIVE_CORE_ERRORS, NEVER_READ, Absence, Missing, is_absent, return_code_text


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (NEVER_READ, "absent"),
        (Missing(Absence.UNREADABLE), "unreadable"),
        (Missing(Absence.UNREADABLE, errno.EIO), "Input/output error"),
        (Missing(Absence.UNREADABLE, lib.DH_EPARSE), "text cannot be parsed"),
        (Missing(Absence.UNREADABLE, lib.DH_EFULL), "more data than the buffer holds"),
        (Missing(Absence.UNREADABLE, -9999), "unknown C core error -9999"),
    ],
)
def test_missing_reading_has_its_reason_as_text(missing: Missing, text: str) -> None:
    assert str(missing) == text


def test_codes_of_the_c_core_are_those_of_its_header() -> None:
    assert set(NATIVE_CORE_ERRORS) == {lib.DH_EABI, lib.DH_EPARSE, lib.DH_EFULL}


@pytest.mark.parametrize(
    ("code", "text"), [(-errno.EMFILE, "Too many open files"), (lib.DH_EABI, NATIVE_CORE_ERRORS[lib.DH_EABI])]
)
def test_return_code_of_the_c_core_has_its_reason_as_text(code: int, text: str) -> None:
    assert return_code_text(code) == text


def test_only_an_absent_reading_is_absent() -> None:
    assert is_absent(NEVER_READ)
    assert not is_absent(0)
    assert not is_absent(Missing(Absence.UNREADABLE, errno.EIO))
