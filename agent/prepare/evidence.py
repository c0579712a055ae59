"""Kinds of evidence for the class of a failed prepare: values with a short, stable text.

agent.prepare.extract finds evidence, agent.prepare.codes and agent.prepare.scoring classify it.
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
"""Return codes of NVML, as in native/src/gpu/nvml.h."""

GRPC_NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""gRPC status names, indexed by number."""


def _during(operation: Operation | None) -> str:
    return f" during {operation}" if operation else ""


class Errno(NamedTuple):
    """Error number of a system call."""

    number: int
    operation: Operation | None = None
    path: str = ""
    text: str = ""
    """Text of the C library for the number."""

    @property
    def name(self) -> str:
        """Name of the number, such as ``ENOSPC``; an unknown number as digits."""
        return errno.errorcode.get(self.number, str(self.number))

    def __str__(self) -> str:
        return f"errno {self.name}{_during(self.operation)}"


class NvmlCode(NamedTuple):
    """Return code of NVML."""

    code: int
    device: str = ""
    """Device of the claim that the call was about; empty: unknown."""

    @property
    def name(self) -> str:
        """NVML's name of the code, without its prefix."""
        return NVML_NAMES.get(self.code, "unknown code")

    def __str__(self) -> str:
        return f"NVML {self.code} ({self.name})"


class GrpcStatus(NamedTuple):
    """gRPC status of a call to another service."""

    code: int
    message: str = ""

    @property
    def name(self) -> str:
        """gRPC's name of the status."""
        return GRPC_NAMES[self.code] if 0 <= self.code < len(GRPC_NAMES) else "unknown code"

    def __str__(self) -> str:
        return f"gRPC {self.code} ({self.name})"


class HttpStatus(NamedTuple):
    """HTTP status of a server's answer."""

    status: int
    reason: str = ""
    """Reason of the API server's Status, such as ``Conflict``; else the phrase of the status line."""
    message: str = ""
    kubernetes: bool = False
    """True: the API server answered. False: any server may have answered."""

    def __str__(self) -> str:
        return f"{'API' if self.kubernetes else 'HTTP'} {self.status} {self.reason}".rstrip()


class DecodeFailure(NamedTuple):
    """Input that could not be decoded, or that a type check rejected."""

    by: str
    """Name of the exception type that reported the error."""
    text: str
    operation: Operation | None = None
    rejected: bool = False
    """True: the input was decoded, but a type check rejected it. False: it could not be decoded."""

    def __str__(self) -> str:
        return f"{self.by}{_during(self.operation)}"


class WrongValue(NamedTuple):
    """A ValueError, LookupError or TypeError of Python while parameters were read."""

    by: str
    text: str

    def __str__(self) -> str:
        return f"{self.by}{_during(Operation.CONFIG)}"


class NoConnection(NamedTuple):
    """A failed connection without an errno: an unknown address, or a TLS error."""

    by: str
    text: str
    operation: Operation | None = None

    def __str__(self) -> str:
        return f"{self.by}{_during(self.operation)}"


class UnreadableCdiFile(NamedTuple):
    """A CDI file that cannot be parsed."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"CDI file {self.path} cannot be parsed" if self.path else "CDI file cannot be parsed"


class HealthEngineEvidence(NamedTuple):
    """Health of a device as the health engine evaluated it."""

    device: DeviceRef
    health: Health
    code: str = ""
    """Code of the device's worst cause."""
    text: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return f"health engine: {self.device} {self.health.name.capitalize()}{self.code and f', {self.code}'}"


class TimedOut(NamedTuple):
    """An operation that did not finish in time."""

    by: str
    operation: Operation | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.by}{_during(self.operation)}"


class Interrupted(NamedTuple):
    """A call that another task cancelled, or that a signal or process exit ended."""

    by: str
    process_exit: bool = False
    """True: the whole process is ending. False: only the call was ended."""

    def __str__(self) -> str:
        return self.by


class BackendUnreachable(NamedTuple):
    """A health backend that does not answer."""

    text: str = ""

    def __str__(self) -> str:
        return "health backend does not answer"


class UnknownException(NamedTuple):
    """An exception of which only the type is known."""

    name: str
    bug: bool
    """True if the type is a built-in one for programming errors, such as TypeError, and not a subclass."""
    text: str = ""

    def __str__(self) -> str:
        return f"exception {self.name}"


class ErrorText(NamedTuple):
    """An error text without any type or number."""

    text: str

    def __str__(self) -> str:
        return "error text"


class DriverReportedError(NamedTuple):
    """A failure whose class the driver named with an agent.prepare.errors.DriverError."""

    error_class: ErrorClass
    code: str
    summary: str
    detail: str = ""
    requests: tuple[str, ...] = ()
    retry_after_s: float | None = None
    device: DeviceRef | str | None = None
    scope: Scope | None = None

    def __str__(self) -> str:
        return f"driver reports {self.error_class}, {self.code}"


class ClassifiedBefore(NamedTuple):
    """A failure that already has a verdict."""

    verdict: PrepareVerdict

    def __str__(self) -> str:
        return f"classified before as {self.verdict.error_class}, {self.verdict.code}"


class HandledBefore(NamedTuple):
    """An exception that was being handled when the failure was raised; it need not be the cause."""

    evidence: "Evidence"

    def __str__(self) -> str:
        return f"{self.evidence}, handled before"


Evidence = (
    Errno
    | NvmlCode
    | GrpcStatus
    | HttpStatus
    | DecodeFailure
    | WrongValue
    | NoConnection
    | UnreadableCdiFile
    | HealthEngineEvidence
    | TimedOut
    | Interrupted
    | BackendUnreachable
    | UnknownException
    | ErrorText
    | DriverReportedError
    | ClassifiedBefore
    | HandledBefore
)
