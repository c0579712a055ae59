"""Tables from numbers of errno, NVML, gRPC and HTTP to a code and its class.

The class is what the number alone proves: a failure is permanent only if it cannot pass before an operator
changes the node. Each pair has its row in agent.prepare.taxonomy.
"""

import errno as e
from collections.abc import Mapping
from typing import Final

from agent.model.prepare import ErrorClass, Operation
from agent.prepare.evidence import GRPC_NAMES, NVML_NAMES

Meaning = tuple[str, ErrorClass]

_UNKNOWN, _TRANSIENT = ErrorClass.UNKNOWN, ErrorClass.TRANSIENT
_FAILED_DEVICE, _PERMANENT = ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT


def _all(meaning: Meaning, *numbers: int) -> dict[int, Meaning]:
    return dict.fromkeys(numbers, meaning)


_NO_CONNECTION: Final = (
    e.ECONNREFUSED, e.ECONNRESET, e.ECONNABORTED, e.EPIPE, e.ENOTCONN, e.ENETDOWN, e.ENETUNREACH, e.ENETRESET,
    e.EHOSTDOWN, e.EHOSTUNREACH,
)  # fmt: skip
PASSING: Final = frozenset({
    e.EAGAIN, e.EINTR, e.EBUSY, e.ENOMEM, e.EMFILE, e.ENFILE, e.ENOSPC, e.EDQUOT, e.EIO, e.ETXTBSY, e.ESTALE,
    e.ENOLCK, e.EDEADLK, e.ENOBUFS, e.ETIMEDOUT, e.ETIME, e.ECANCELED, e.ESHUTDOWN, *_NO_CONNECTION,
})  # fmt: skip
"""Errnos of failures that can pass without a repair, whatever the system call was."""

_DENIED: Final = (e.EACCES, e.EPERM)
_NOT_WRITABLE: Final = (e.EROFS, *_DENIED)  # no write succeeds before an operator changes the installation

ERRNOS: Final[Mapping[Operation, Mapping[int, Meaning]]] = {
    Operation.DEVICE: {
        **_all(("device.busy", _TRANSIENT), e.EBUSY, e.EAGAIN, e.ETXTBSY),
        **_all(("device.gone", _TRANSIENT), e.ENODEV, e.ENXIO, e.ENOENT, e.ENOTCONN),
        **_all(("device.io", _TRANSIENT), e.EIO, e.EREMOTEIO, e.ESHUTDOWN),
        **_all(("device.timeout", _TRANSIENT), e.ETIMEDOUT, e.ETIME),
        **_all(("device.denied", _UNKNOWN), *_DENIED),
    },
    Operation.CDI: {
        **_all(("cdi.write", _TRANSIENT), *PASSING),
        **_all(("cdi.write", _PERMANENT), *_NOT_WRITABLE),
        **_all(("cdi.dir_missing", _TRANSIENT), e.ENOENT, e.ENOTDIR),
    },
    Operation.STATE: {
        **_all(("state.write", _TRANSIENT), *PASSING),
        **_all(("state.write", _PERMANENT), *_NOT_WRITABLE),
    },
    Operation.CONFIG: {},
    Operation.API: {
        **_all(("api.timeout", _TRANSIENT), e.ETIMEDOUT),
        **_all(("api.unreachable", _TRANSIENT), *_NO_CONNECTION),
    },
    Operation.LOCK: {
        **_all(("lock.timeout", _TRANSIENT), e.EAGAIN, e.EACCES, e.EBUSY, e.EINTR, e.EDEADLK, e.ENOLCK),
        **_all(("lock.timeout", _TRANSIENT), e.ETIMEDOUT),
    },
    Operation.CGROUP: {
        **_all(("cgroup.rejected", _TRANSIENT), e.EINVAL, e.ERANGE, e.EBUSY, e.ENOSPC, e.EDOM),
        **_all(("cgroup.gone", _TRANSIENT), e.ENOENT, e.ENODEV),
        **_all(("cgroup.denied", _UNKNOWN), *_NOT_WRITABLE),
    },
}  # fmt: skip
"""Code and class of an errno by operation; errnos that are not listed mean the same in all operations."""

TIMEOUTS: Final[Mapping[Operation, str]] = {
    Operation.DEVICE: "device.timeout",
    Operation.API: "api.timeout",
    Operation.LOCK: "lock.timeout",
}
"""Code of a timeout by operation; ``deadline`` for the others."""

_MISUSED: Final = ("driver.bug.nvml", _UNKNOWN)

NVML: Final[Mapping[int, Meaning]] = {
    **{code: (f"gpu.nvml.{name.lower()}", _UNKNOWN) for code, name in NVML_NAMES.items()},
    **_all(_MISUSED, 0, 1, 2, 5, 7, 25),  # not initialised, wrong argument, buffer or structure
    **{code: (f"gpu.nvml.{NVML_NAMES[code].lower()}", _TRANSIENT) for code in (10, 20, 21, 23, 27)},
    **_all(("gpu.driver.init", _TRANSIENT), 9, 12),
    15: ("gpu.lost", _FAILED_DEVICE),
    16: ("gpu.reset_required", _FAILED_DEVICE),
    18: ("gpu.driver.mismatch", _TRANSIENT),
    19: ("gpu.busy", _TRANSIENT),
    28: ("gpu.not_found", _TRANSIENT),
}
"""Meaning of NVML's return codes; the codes are those of the health engine."""

_GRPC_FAILED: Final = ("grpc.failed", _UNKNOWN)

GRPC: Final[Mapping[int, Meaning]] = {
    **_all(_GRPC_FAILED, *range(len(GRPC_NAMES))),
    1: ("driver.cancelled", _TRANSIENT),
    4: ("deadline", _TRANSIENT),
    **_all(("grpc.unavailable", _TRANSIENT), 8, 10, 14),
}
"""Meaning of a gRPC status: an answer of a service proves nothing permanent about the node."""

_CONFLICT, _BUSY, _TIMEOUT = (
    ("api.conflict", _TRANSIENT),
    ("api.429", _TRANSIENT),
    ("api.timeout", _TRANSIENT),
)
_SERVER_ERROR, _UNAUTHORIZED = ("api.5xx", _TRANSIENT), ("api.unauthorized", _TRANSIENT)
_FORBIDDEN, _INVALID = ("api.forbidden", _PERMANENT), ("api.invalid", _PERMANENT)
_NOT_FOUND: Final = ("claim.not_found", _TRANSIENT)

REASONS: Final[Mapping[str, Meaning]] = {
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
"""Meaning of the reason in the API server's Status, which is more precise than the number."""

STATUSES: Final[Mapping[int, Meaning]] = {
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
"""Meaning of the API server's HTTP status, for answers without a reason."""


def meaning_of_errno(number: int, operation: Operation | None) -> Meaning:
    """Return the code and class of an errno in an operation."""
    if operation and (found := ERRNOS[operation].get(number)):
        return found
    name = e.errorcode.get(number, f"errno_{abs(number)}").lower()
    return f"os.{name}", _TRANSIENT if number in PASSING else _UNKNOWN


def meaning_of_nvml(code: int) -> Meaning:
    """Return the code and class of an NVML return code; codes of newer releases are unknown."""
    return NVML.get(code, ("gpu.nvml.unknown", _UNKNOWN))


def meaning_of_grpc(code: int) -> Meaning:
    """Return the code and class of a gRPC status."""
    return GRPC.get(code, _GRPC_FAILED)


def meaning_of_http(status: int, reason: str, kubernetes: bool) -> Meaning:
    """Return the code and class of an HTTP status; only the API server's refusal may prove anything."""
    if not kubernetes:
        passes = status in {408, 429} or status >= 500
        return ("http.unavailable", _TRANSIENT) if passes else ("http.refused", _UNKNOWN)
    if found := REASONS.get(reason) or STATUSES.get(status):
        return found
    return _SERVER_ERROR if status >= 500 else ("api.refused", _UNKNOWN)
