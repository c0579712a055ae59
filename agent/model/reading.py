"""A value that may be missing, and why."""

import os
from dataclasses import dataclass
from enum import StrEnum


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
        if not self.errno:
            return str(self.absence)
        return os.strerror(self.errno) if self.errno > 0 else "unintelligible text"


Reading = int | Missing
"""A number or the reason why there is none."""
