"""What is said of a reading that is not there."""

import errno

import pytest
from agent.native._core import lib

from agent.model.reading import NEVER_READ, OWN_ERRORS, Absence, Missing, is_absent


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (NEVER_READ, "absent"),
        (Missing(Absence.UNREADABLE), "unreadable"),
        (Missing(Absence.UNREADABLE, errno.EIO), "Input/output error"),
        (Missing(Absence.UNREADABLE, lib.DH_EPARSE), "unintelligible text"),
        (Missing(Absence.UNREADABLE, lib.DH_EFULL), "more than there is room for"),
        (Missing(Absence.UNREADABLE, -9999), "code -9999"),
    ],
)
def test_a_missing_reading_says_why(missing: Missing, text: str) -> None:
    assert str(missing) == text


def test_the_cores_own_codes_are_those_of_its_header() -> None:
    assert set(OWN_ERRORS) == {lib.DH_EPARSE, lib.DH_EFULL}


def test_what_was_never_there_is_absent_and_neither_zero_nor_unreadable() -> None:
    assert is_absent(NEVER_READ)
    assert not is_absent(0)
    assert not is_absent(Missing(Absence.UNREADABLE, errno.EIO))
