"""What can show of what kind a failure is: values with a short, stable form for people.

Owns the kinds of evidence. Where they come from is agent.prepare.exceptions; what they mean,
agent.prepare.codes and agent.prepare.classify.
"""

import errno
from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef
from agent.model.health import Health
from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope

NVML_NAMES: Final[Mapping[int, str]] = {
    0: "SUCCESS",
    1: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    3: "NOT_SUPPORTED",
    4: "NO_PERMISSION",
    5: "ALREADY_INITIALIZED",
    6: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    9: "DRIVER_NOT_LOADED",
    10: "TIMEOUT",
    11: "IRQ_ISSUE",
    12: "LIBRARY_NOT_FOUND",
    13: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    15: "GPU_IS_LOST",
    16: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    18: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    21: "NO_DATA",
    22: "VGPU_ECC_NOT_SUPPORTED",
    23: "INSUFFICIENT_RESOURCES",
    24: "FREQ_NOT_SUPPORTED",
    25: "ARGUMENT_VERSION_MISMATCH",
    26: "DEPRECATED",
    27: "NOT_READY",
    28: "GPU_NOT_FOUND",
    29: "INVALID_STATE",
    30: "RESET_TYPE_NOT_SUPPORTED",
    999: "UNKNOWN",
}
"""Of native/src/gpu/nvml.h."""

GRPC_NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""By number."""


def _while(operation: Operation | None) -> str:
    return f" while {operation}" if operation else ""


class Errno(NamedTuple):
    """The kernel's answer to a system call."""

    number: int
    operation: Operation | None = None
    path: str = ""
    text: str = ""
    """What the C library calls it."""

    @property
    def name(self) -> str:
        """``ENOSPC``; a number that nobody knows as it is."""
        return errno.errorcode.get(self.number, str(self.number))

    def __str__(self) -> str:
        return f"errno {self.name}{_while(self.operation)}"


class NvmlCode(NamedTuple):
    """What NVML returned."""

    code: int
    device: str = ""
    """Which of the claim's devices was asked about; empty: not said."""

    @property
    def name(self) -> str:
        """NVML's own name without its prefix."""
        return NVML_NAMES.get(self.code, "unknown code")

    def __str__(self) -> str:
        return f"NVML {self.code} ({self.name})"


class GrpcStatus(NamedTuple):
    """How a call of another service ended."""

    code: int
    message: str = ""

    @property
    def name(self) -> str:
        """gRPC's own name."""
        return GRPC_NAMES[self.code] if 0 <= self.code < len(GRPC_NAMES) else "unknown code"

    def __str__(self) -> str:
        return f"gRPC {self.code} ({self.name})"


class HttpStatus(NamedTuple):
    """What an HTTP server answered."""

    status: int
    reason: str = ""
    """Of the API server's Status, ``Conflict``; else the phrase of the status line."""
    message: str = ""
    kubernetes: bool = False
    """The API server is known to have said it; else it may have been any."""

    def __str__(self) -> str:
        return f"{'API' if self.kubernetes else 'HTTP'} {self.status} {self.reason}".rstrip()


class DecodeError(NamedTuple):
    """Something could not be decoded, or is not what it should be."""

    by: str
    """The exception's name."""
    text: str
    operation: Operation | None = None
    refused: bool = False
    """It could be read, and a check of types refused it: few check anything but parameters that way."""

    def __str__(self) -> str:
        return f"{self.by}{_while(self.operation)}"


class WrongValue(NamedTuple):
    """One of the language's own errors about a value came while parameters were read."""

    by: str
    text: str

    def __str__(self) -> str:
        return f"{self.by}{_while(Operation.CONFIG)}"


class Unconnected(NamedTuple):
    """A connection could not be made, and no number of the kernel's says why: no address, no trust."""

    by: str
    text: str
    operation: Operation | None = None

    def __str__(self) -> str:
        return f"{self.by}{_while(self.operation)}"


class UnreadableCdiFile(NamedTuple):
    """A CDI file that cannot be understood."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"CDI file {self.path} not understood" if self.path else "CDI file not understood"


class HealthEngineEvidence(NamedTuple):
    """What the health engine holds of a device."""

    device: DeviceRef
    health: Health
    code: str = ""
    """Of its worst cause."""
    text: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return f"health engine: {self.device} {self.health.name.capitalize()}{self.code and f', {self.code}'}"


class TimedOut(NamedTuple):
    """Something was not done in time."""

    by: str
    operation: Operation | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.by}{_while(self.operation)}"


class ClaimResult(NamedTuple):
    """It was given up from outside."""

    by: str
    leaving: bool = False
    """The whole process is ending."""

    def __str__(self) -> str:
        return self.by


class NoBackend(NamedTuple):
    """The health backend was asked, and does not answer."""

    text: str = ""

    def __str__(self) -> str:
        return "health backend does not answer"


class Raised(NamedTuple):
    """An exception of which only the type is known."""

    name: str
    bug: bool
    """It is one of the language's own for mistakes in programs, as it is: no subclass that somebody named."""
    text: str = ""

    def __str__(self) -> str:
        return f"exception {self.name}"


class Text(NamedTuple):
    """A text, and nothing else."""

    text: str

    def __str__(self) -> str:
        return "a text"


class DriverReportedError(NamedTuple):
    """What the driver itself says: an agent.prepare.errors.DriverError."""

    error_class: ErrorClass
    code: str
    summary: str
    detail: str = ""
    requests: tuple[str, ...] = ()
    retry_after_s: float | None = None
    device: DeviceRef | str | None = None
    scope: Scope | None = None

    def __str__(self) -> str:
        return f"driver says {self.error_class}, {self.code}"


class Judged(NamedTuple):
    """It was judged before."""

    verdict: PrepareVerdict

    def __str__(self) -> str:
        return f"judged {self.verdict.error_class}, {self.verdict.code}"


class Handled(NamedTuple):
    """What was being dealt with when the exception came: perhaps its reason, perhaps not."""

    evidence: "Evidence"

    def __str__(self) -> str:
        return f"{self.evidence} before"


Evidence = (
    Errno
    | NvmlCode
    | GrpcStatus
    | HttpStatus
    | DecodeError
    | WrongValue
    | Unconnected
    | UnreadableCdiFile
    | HealthEngineEvidence
    | TimedOut
    | ClaimResult
    | NoBackend
    | Raised
    | Text
    | DriverReportedError
    | Judged
    | Handled
)
