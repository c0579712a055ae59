"""Kinds of evidence for the cause of a failed prepare; ``str()`` of each is a short, stable text."""

import errno
from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.model.claim import DeviceRef
from agent.model.health import Health, Repair
from agent.model.prepare import ErrorClass, Operation, PrepareVerdict, Scope

ERRNO_NAMES: Final[Mapping[int, str]] = {133: "EHWPOISON", **errno.errorcode}
"""Name of each errno. Before 3.14, Python lacks the name of 133: a page of memory is damaged."""

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
"""Names of NVML return codes without the prefix NVML_ERROR, by code."""

GRPC_NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""gRPC status names, indexed by number."""


def _operation_text(operation: Operation | None) -> str:
    return f" during {operation}" if operation else ""


_PATH_OPERATIONS: Final[Mapping[str, Operation]] = {
    "/etc/cdi/": Operation.CDI,
    "/run/cdi/": Operation.CDI,
    "/var/run/cdi/": Operation.CDI,
    "/sys/fs/cgroup/": Operation.CGROUP,
    "/sys/": Operation.DEVICE,
    "/dev/": Operation.DEVICE,
}
"""Operation by path prefix of a file; the first match counts."""


def operation_of_path(path: str) -> Operation | None:
    """Return the operation that a file shows, for an error that names none; None: the file shows none."""
    return next((found for start, found in _PATH_OPERATIONS.items() if f"{path}/".startswith(start)), None)


class ErrnoEvidence(NamedTuple):
    """Evidence for the cause of a failed prepare: error number of a failed system call."""

    number: int
    operation: Operation | None = None
    path: str = ""
    text: str = ""
    """Error text of the exception; empty: none."""

    @property
    def name(self) -> str:
        """Name of the errno, such as ``ENOSPC``; the digits of an unknown number."""
        return ERRNO_NAMES.get(self.number, str(self.number))

    def __str__(self) -> str:
        return f"errno {self.name}{_operation_text(self.operation)}"


class NvmlCode(NamedTuple):
    """Evidence for the cause of a failed prepare: return code of an NVML call."""

    code: int
    device: str = ""
    """Name of the claim's device that the call concerned; empty: unknown."""

    @property
    def name(self) -> str:
        """Name of the NVML return code, such as ``GPU_IS_LOST``."""
        return NVML_NAMES.get(self.code, "unknown code")

    def __str__(self) -> str:
        return f"NVML {self.code} ({self.name})"


class GrpcStatus(NamedTuple):
    """Evidence for the cause of a failed prepare: gRPC status of a call to another service."""

    code: int
    message: str = ""

    @property
    def name(self) -> str:
        """Name of the gRPC status, such as ``UNAVAILABLE``."""
        return GRPC_NAMES[self.code] if 0 <= self.code < len(GRPC_NAMES) else "unknown code"

    def __str__(self) -> str:
        return f"gRPC {self.code} ({self.name})"


class HttpStatus(NamedTuple):
    """Evidence for the cause of a failed prepare: HTTP status of a failed request, 400 to 599."""

    status: int
    reason: str = ""
    """Reason in the API server's Status, such as ``Conflict``; else the phrase of the HTTP status line."""
    message: str = ""
    from_api_server: bool = False
    """True: the API server answered. False: any server may have answered."""

    def __str__(self) -> str:
        return f"{'API' if self.from_api_server else 'HTTP'} {self.status} {self.reason}".rstrip()


class DecodeFailure(NamedTuple):
    """Evidence for the cause of a failed prepare: input that could not be decoded, or that a type check
    rejected."""

    exception_type: str
    """Name of the exception's type, such as ``JSONDecodeError``."""
    text: str
    operation: Operation | None = None
    rejected_by_type_check: bool = False
    """True: the input was decoded, but a type check rejected it. False: it could not be decoded."""
    requests: tuple[str, ...] = ()
    """Requests of the claim whose parameters failed; empty: not known."""

    def __str__(self) -> str:
        return f"{self.exception_type}{_operation_text(self.operation)}"


class WrongParameterValue(NamedTuple):
    """Evidence for the cause of a failed prepare: ValueError, LookupError or TypeError while the driver read
    the claim's parameters."""

    exception_type: str
    text: str

    def __str__(self) -> str:
        return f"{self.exception_type}{_operation_text(Operation.CONFIG)}"


class ConnectionFailure(NamedTuple):
    """Evidence for the cause of a failed prepare: failed connection without an errno, such as an unknown host
    or a TLS error."""

    exception_type: str
    text: str
    operation: Operation | None = None

    def __str__(self) -> str:
        return f"{self.exception_type}{_operation_text(self.operation)}"


class UnreadableCdiFile(NamedTuple):
    """Evidence for the cause of a failed prepare: CDI file that cannot be parsed."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"CDI file {self.path} cannot be parsed" if self.path else "CDI file cannot be parsed"


class HealthEngineEvidence(NamedTuple):
    """Evidence for the cause of a failed prepare: health of a device of the claim, as the health engine
    evaluated it."""

    device: DeviceRef
    health: Health
    code: str = ""
    """Code of the device's worst fault; empty: none."""
    text: str = ""
    advice: str = ""
    repair: Repair | None = None
    """Worst repair of the device's faults; None: not known."""

    def __str__(self) -> str:
        return f"health engine: {self.device} {self.health.name.capitalize()}{self.code and f', {self.code}'}"


class OperationTimeout(NamedTuple):
    """Evidence for the cause of a failed prepare: operation that did not finish in time."""

    exception_type: str
    operation: Operation | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.exception_type}{_operation_text(self.operation)}"


class InterruptedPrepare(NamedTuple):
    """Evidence for the cause of a failure: the prepare was cancelled, or a signal or the end of the process
    interrupted it."""

    exception_type: str
    process_exit: bool = False
    """True: the process is ending. False: only the call was cancelled."""

    def __str__(self) -> str:
        return self.exception_type


class HealthBackendUnreachable(NamedTuple):
    """Evidence for the cause of a failed prepare: the drahealth agent does not answer the driver."""

    text: str = ""

    def __str__(self) -> str:
        return "health backend does not answer"


class UnclassifiedException(NamedTuple):
    """Evidence for the cause of a failed prepare: exception of which only the type is known."""

    exception_type: str
    is_programming_error: bool
    """True: a built-in type for programming errors, such as TypeError. False: any other type."""
    text: str = ""

    def __str__(self) -> str:
        return f"exception {self.exception_type}"


class ErrorText(NamedTuple):
    """Evidence for the cause of a failed prepare: error text without an exception type or error number."""

    text: str

    def __str__(self) -> str:
        return "error text"


class DriverReportedError(NamedTuple):
    """Evidence for the cause of a failed prepare: error class that the driver named by raising an
    agent.prepare.errors.DriverError."""

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


class ExistingVerdict(NamedTuple):
    """Evidence for the cause of a failed prepare: class and code of a PrepareError whose failure was
    classified before."""

    verdict: PrepareVerdict

    def __str__(self) -> str:
        return f"classified before as {self.verdict.error_class}, {self.verdict.code}"


class EarlierException(NamedTuple):
    """Evidence for the cause of a failed prepare: exception that was being handled when the failure occurred.

    The exception need not be the cause.
    """

    evidence: "Evidence"

    def __str__(self) -> str:
        return f"{self.evidence}, handled before"


Evidence = (
    ErrnoEvidence
    | NvmlCode
    | GrpcStatus
    | HttpStatus
    | DecodeFailure
    | WrongParameterValue
    | ConnectionFailure
    | UnreadableCdiFile
    | HealthEngineEvidence
    | OperationTimeout
    | InterruptedPrepare
    | HealthBackendUnreachable
    | UnclassifiedException
    | ErrorText
    | DriverReportedError
    | ExistingVerdict
    | EarlierException
)
