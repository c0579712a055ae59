"""A value that may be missing, and why."""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OWN_ERRORS: Final = {
    -4097: "unintelligible text",  # DH_EPARSE
    -4099: "more than there is room for",  # DH_EFULL
}
"""The native core's own codes of a read that failed."""


def error_text(code: int) -> str:
    """Why a read failed, in words: by errno, or by a code of the native core's own."""
    return os.strerror(code) if code > 0 else OWN_ERRORS.get(code, f"code {code}")


class Absence(StrEnum):
    """Why a value is not there."""

    ABSENT = "absent"
    """The machine does not have it: the file was not there at start."""
    UNREADABLE = "unreadable"
    """It was read before and cannot be read now."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A reading that is not there. Never 0, never Healthy, never Unhealthy."""

    absence: Absence
    errno: int = 0
    """errno of the failed read, 0 if unknown; negative codes are the native core's own."""

    def __str__(self) -> str:
        return error_text(self.errno) if self.errno else str(self.absence)


Reading = int | Missing
"""A number or the reason why there is none."""

NEVER_READ: Final = Missing(Absence.ABSENT)
"""Nobody has read it yet, or there is nothing to read."""


def is_absent(reading: Reading) -> bool:
    """Whether it was never there to be read."""
    return isinstance(reading, Missing) and reading.absence is Absence.ABSENT
