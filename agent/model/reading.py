"""Readings: numbers that can be missing, with the reason."""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OWN_ERRORS: Final = {
    -4097: "text cannot be parsed",  # DH_EPARSE
    -4099: "more data than the buffer holds",  # DH_EFULL
}
"""Texts of the native core's own error codes."""


def error_text(code: int) -> str:
    """Describe a failed read: an errno (positive) or a code of the native core (negative)."""
    return os.strerror(code) if code > 0 else OWN_ERRORS.get(code, f"code {code}")


class Absence(StrEnum):
    """Reason why a reading is missing."""

    ABSENT = "absent"
    """The machine lacks the source of the reading: the file did not exist at start."""
    UNREADABLE = "unreadable"
    """The reading was available before and cannot be read now."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing reading with its reason. Rules never treat it as 0, Healthy or Unhealthy."""

    absence: Absence
    errno: int = 0
    """errno of the failed read; 0: unknown; negative: a code of the native core."""

    def __str__(self) -> str:
        return error_text(self.errno) if self.errno else str(self.absence)


Reading = int | Missing
"""A number, or the reason why it is missing."""

NEVER_READ: Final = Missing(Absence.ABSENT)
"""Reading that was never read, or that does not exist."""


def is_absent(reading: Reading) -> bool:
    """Return True if the machine lacks the reading (ABSENT), False for a number or an unreadable one."""
    return isinstance(reading, Missing) and reading.absence is Absence.ABSENT
