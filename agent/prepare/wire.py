"""The class on the wire: what may be appended to a NodePrepareResourceResponse (KEP-5322).

No release of Kubernetes has the field: its first draft was a flag, its last an enum of the same number. So
nothing is sent unless the operator says so; a peer that does not know the field passes it over.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from agent.model.prepare import ErrorClass


class WireMode(StrEnum):
    """Which shape of the field is sent."""

    NONE = "none"
    ERROR_TYPE = "error-type"
    """The enum: 0 unknown, 1 permanent."""
    PERMANENT_ERROR = "permanent-error"
    """The older flag."""


FIELD: Final = 3
"""Of both shapes."""
_TYPES: Final[Mapping[ErrorClass, int]] = {
    ErrorClass.UNKNOWN: 0,
    ErrorClass.TRANSIENT: 0,  # upstream has no name for it
    ErrorClass.BAD_CONFIG: 1,
    ErrorClass.FAILED_DEVICE: 1,
    ErrorClass.PERMANENT: 1,
}
NUMBERS: Final[Mapping[WireMode, Mapping[ErrorClass, int]]] = {
    WireMode.NONE: dict.fromkeys(ErrorClass, 0),
    WireMode.ERROR_TYPE: _TYPES,
    WireMode.PERMANENT_ERROR: _TYPES,  # a flag is a number of 0 or 1
}
"""By mode and class; 0 is a field that is not sent. Below 128, so that each fits into a byte."""


def extension(error_class: ErrorClass, mode: WireMode) -> bytes:
    """The field as protobuf has it, to be appended to an encoded NodePrepareResourceResponse."""
    number = NUMBERS[mode][error_class]
    return bytes((FIELD << 3, number)) if number else b""  # wire type 0: varint
