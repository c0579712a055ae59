"""Tables from error numbers (errno, NVML, gRPC, HTTP) to a code such as ``api.forbidden`` and an error class.

The class is what the number alone proves: a failure is permanent only if it lasts until an operator changes
the Kubernetes node. agent.prepare.failure_kinds describes each pair of code and class.
"""

import errno as e
from collections.abc import Mapping
from typing import Final

from agent.model.prepare import ErrorClass, Operation
from agent.prepare.evidence import GRPC_NAMES, NVML_NAMES

CodeAndClass = tuple[str, ErrorClass]
"""Dotted code of a failed prepare and its error class."""

_UNKNOWN, _TRANSIENT = ErrorClass.UNKNOWN, ErrorClass.TRANSIENT
_FAILED_DEVICE, _PERMANENT = ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT


def _for_each(meaning: CodeAndClass, *numbers: int) -> dict[int, CodeAndClass]:
    return dict.fromkeys(numbers, meaning)


_NO_CONNECTION: Final = (
    e.ECONNREFUSED, e.ECONNRESET, e.ECONNABORTED, e.EPIPE, e.ENOTCONN, e.ENETDOWN, e.ENETUNREACH, e.ENETRESET,
    e.EHOSTDOWN, e.EHOSTUNREACH,
)  # fmt: skip
TRANSIENT_ERRNOS: Final = frozenset({
    e.EAGAIN, e.EINTR, e.EBUSY, e.ENOMEM, e.EMFILE, e.ENFILE, e.ENOSPC, e.EDQUOT, e.EIO, e.ETXTBSY, e.ESTALE,
    e.ENOLCK, e.EDEADLK, e.ENOBUFS, e.ETIMEDOUT, e.ETIME, e.ECANCELED, e.ESHUTDOWN, *_NO_CONNECTION,
})  # fmt: skip
"""Errnos of failures that a retry may solve, whatever the system call was."""

_DENIED: Final = (e.EACCES, e.EPERM)
_NOT_WRITABLE: Final = (e.EROFS, *_DENIED)  # no write succeeds before an operator changes the installation

ERRNO_MEANINGS: Final[Mapping[Operation, Mapping[int, CodeAndClass]]] = {
    Operation.DEVICE: {
        **_for_each(("device.busy", _TRANSIENT), e.EBUSY, e.EAGAIN, e.ETXTBSY),
        **_for_each(("device.gone", _TRANSIENT), e.ENODEV, e.ENXIO, e.ENOENT, e.ENOTCONN),
        **_for_each(("device.io", _TRANSIENT), e.EIO, e.EREMOTEIO, e.ESHUTDOWN),
        **_for_each(("device.timeout", _TRANSIENT), e.ETIMEDOUT, e.ETIME),
        **_for_each(("device.denied", _UNKNOWN), *_DENIED),
    },
    Operation.CDI: {
        **_for_each(("cdi.write", _TRANSIENT), *TRANSIENT_ERRNOS),
        **_for_each(("cdi.write", _PERMANENT), *_NOT_WRITABLE),
        **_for_each(("cdi.dir_missing", _TRANSIENT), e.ENOENT, e.ENOTDIR),
    },
    Operation.STATE: {
        **_for_each(("state.write", _TRANSIENT), *TRANSIENT_ERRNOS),
        **_for_each(("state.write", _PERMANENT), *_NOT_WRITABLE),
    },
    Operation.CONFIG: {},
    Operation.API: {
        **_for_each(("api.timeout", _TRANSIENT), e.ETIMEDOUT),
        **_for_each(("api.unreachable", _TRANSIENT), *_NO_CONNECTION),
    },
    Operation.LOCK: {
        **_for_each(("lock.timeout", _TRANSIENT), e.EAGAIN, e.EACCES, e.EBUSY, e.EINTR, e.EDEADLK, e.ENOLCK),
        **_for_each(("lock.timeout", _TRANSIENT), e.ETIMEDOUT),
    },
    Operation.CGROUP: {
        **_for_each(("cgroup.rejected", _TRANSIENT), e.EINVAL, e.ERANGE, e.EBUSY, e.ENOSPC, e.EDOM),
        **_for_each(("cgroup.gone", _TRANSIENT), e.ENOENT, e.ENODEV),
        **_for_each(("cgroup.denied", _UNKNOWN), *_NOT_WRITABLE),
    },
}  # fmt: skip
"""Code and class by operation and errno; see :func:`classify_errno` for errnos that are not listed."""

TIMEOUT_CODES: Final[Mapping[Operation, str]] = {
    Operation.DEVICE: "device.timeout",
    Operation.API: "api.timeout",
    Operation.LOCK: "lock.timeout",
}
"""Code of a timeout by operation; operations that are not listed have ``deadline``."""

_MISUSED: Final = ("driver.bug.nvml", _UNKNOWN)

NVML_MEANINGS: Final[Mapping[int, CodeAndClass]] = {
    **{code: (f"gpu.nvml.{name.lower()}", _UNKNOWN) for code, name in NVML_NAMES.items()},
    **_for_each(_MISUSED, 0, 1, 2, 5, 7, 25),  # not initialised, wrong argument, buffer or structure
    **{code: (f"gpu.nvml.{NVML_NAMES[code].lower()}", _TRANSIENT) for code in (10, 20, 21, 23, 27)},
    **_for_each(("gpu.driver.init", _TRANSIENT), 9, 12),
    15: ("gpu.lost", _FAILED_DEVICE),
    16: ("gpu.reset_required", _FAILED_DEVICE),
    18: ("gpu.driver.mismatch", _TRANSIENT),
    19: ("gpu.busy", _TRANSIENT),
    28: ("gpu.not_found", _TRANSIENT),
}
"""Code and class by NVML return code."""

_GRPC_FAILED: Final = ("grpc.failed", _UNKNOWN)

GRPC_MEANINGS: Final[Mapping[int, CodeAndClass]] = {
    **_for_each(_GRPC_FAILED, *range(len(GRPC_NAMES))),
    1: ("driver.cancelled", _TRANSIENT),
    4: ("deadline", _TRANSIENT),
    **_for_each(("grpc.unavailable", _TRANSIENT), 8, 10, 14),
}
"""Code and class by gRPC status; none is permanent, because another service answered."""

_CONFLICT, _BUSY, _TIMEOUT = (
    ("api.conflict", _TRANSIENT),
    ("api.429", _TRANSIENT),
    ("api.timeout", _TRANSIENT),
)
_SERVER_ERROR, _UNAUTHORIZED = ("api.5xx", _TRANSIENT), ("api.unauthorized", _TRANSIENT)
_FORBIDDEN, _INVALID = ("api.forbidden", _PERMANENT), ("api.invalid", _PERMANENT)
_NOT_FOUND: Final = ("claim.not_found", _TRANSIENT)

API_REASON_MEANINGS: Final[Mapping[str, CodeAndClass]] = {
    "Conflict": _CONFLICT,
    "AlreadyExists": _CONFLICT,
    "Gone": _CONFLICT,
    "Expired": _CONFLICT,
    "TooManyRequests": _BUSY,
    "Timeout": _TIMEOUT,
    "ServerTimeout": _TIMEOUT,
    "InternalError": _SERVER_ERROR,
    "ServiceUnavailable": _SERVER_ERROR,
    "Unauthorized": _UNAUTHORIZED,
    "Forbidden": _FORBIDDEN,
    "Invalid": _INVALID,
    "NotFound": _NOT_FOUND,
}
"""Code and class by the reason in the API server's Status, which is more precise than the HTTP status."""

API_STATUS_MEANINGS: Final[Mapping[int, CodeAndClass]] = {
    401: _UNAUTHORIZED,
    403: _FORBIDDEN,
    404: _NOT_FOUND,
    408: _TIMEOUT,
    409: _CONFLICT,
    410: _CONFLICT,
    422: _INVALID,
    429: _BUSY,
    504: _TIMEOUT,
}
"""Code and class by the API server's HTTP status, for answers without a known reason."""


def classify_errno(number: int, operation: Operation | None) -> CodeAndClass:
    """Return the dotted code and the error class of an errno.

    Args:
        operation: Operation of the driver that failed; None: unknown.
    """
    if operation and (found := ERRNO_MEANINGS[operation].get(number)):
        return found
    name = e.errorcode.get(number, f"errno_{abs(number)}").lower()
    return f"os.{name}", _TRANSIENT if number in TRANSIENT_ERRNOS else _UNKNOWN


def classify_nvml_code(code: int) -> CodeAndClass:
    """Return code and error class of an NVML return code, such as ``gpu.lost`` and failed device."""
    return NVML_MEANINGS.get(code, ("gpu.nvml.unknown", _UNKNOWN))


def classify_grpc_status(code: int) -> CodeAndClass:
    """Return code and error class of a failed gRPC call, such as ``grpc.unavailable`` and transient."""
    return GRPC_MEANINGS.get(code, _GRPC_FAILED)


def classify_http_status(status: int, reason: str, from_api_server: bool) -> CodeAndClass:
    """Return the dotted code and the error class of an HTTP status.

    Args:
        reason: Reason in the API server's Status; empty: none.
        from_api_server: True: the API server answered. False: another server, whose refusal proves nothing.
    """
    if not from_api_server:
        passes = status in {408, 429} or status >= 500
        return ("http.unavailable", _TRANSIENT) if passes else ("http.refused", _UNKNOWN)
    if found := API_REASON_MEANINGS.get(reason) or API_STATUS_MEANINGS.get(status):
        return found
    return _SERVER_ERROR if status >= 500 else ("api.refused", _UNKNOWN)
