"""Numbers read from the machine, or the reason why a number is missing."""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

NATIVE_CORE_ERRORS: Final = {
    -4096: "the C core and the Python package have different versions; reinstall drahealth",  # DH_EABI
    -4097: "text cannot be parsed",  # DH_EPARSE
    -4099: "more data than the buffer holds",  # DH_EFULL
}
"""Text of each error code that the native core (the C core) defines itself."""


def error_text(code: int) -> str:
    """Return the text of an error code: an errno (positive) or a code of the native core (negative)."""
    return os.strerror(code) if code > 0 else NATIVE_CORE_ERRORS.get(code, f"unknown C core error {code}")


def return_code_text(code: int) -> str:
    """Return the text of a negative return code of the native core: -errno, or a code that it defines."""
    return error_text(code if code <= max(NATIVE_CORE_ERRORS) else -code)


class Absence(StrEnum):
    """Reason why a reading (a number from a file or counter) is missing."""

    ABSENT = "absent"
    """The machine lacks the source of the reading: the file did not exist at start."""
    UNREADABLE = "unreadable"
    """The reading was available before and cannot be read now."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Reason why a number could not be read. Rules never treat it as 0, Healthy or Unhealthy."""

    absence: Absence
    errno: int = 0
    """errno of the failed read; 0: unknown; negative: a code of the native core."""

    def __str__(self) -> str:
        return error_text(self.errno) if self.errno else str(self.absence)


Reading = int | Missing
"""Number read from the machine, or the reason why it is missing."""

NEVER_READ: Final = Missing(Absence.ABSENT)
"""Value of a reading before the first read, and of a reading that the machine does not have."""


def is_absent(reading: Reading) -> bool:
    """Return True if the machine does not have the reading; False for a number and for an unreadable
    reading."""
    return isinstance(reading, Missing) and reading.absence is Absence.ABSENT
