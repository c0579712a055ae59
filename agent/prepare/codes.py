"""What numbers and words of others mean: tables from errno, NVML, gRPC and HTTP to a code and its class.

The class is what they show of themselves, and no more: only what cannot change while nobody mends the node is
permanent. Each pair has its row in agent.prepare.taxonomy.
"""

import errno as e
from collections.abc import Mapping
from typing import Final

from agent.model.prepare import ErrorClass, Operation
from agent.prepare.evidence import GRPC_NAMES, NVML_NAMES

Meaning = tuple[str, ErrorClass]

_UNKNOWN, _PASSES = ErrorClass.UNKNOWN, ErrorClass.TRANSIENT
_BROKEN, _STAYS = ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT


def _each(meaning: Meaning, *numbers: int) -> dict[int, Meaning]:
    return dict.fromkeys(numbers, meaning)


_NO_PEER: Final = (
    e.ECONNREFUSED, e.ECONNRESET, e.ECONNABORTED, e.EPIPE, e.ENOTCONN, e.ENETDOWN, e.ENETUNREACH, e.ENETRESET,
    e.EHOSTDOWN, e.EHOSTUNREACH,
)  # fmt: skip
PASSING: Final = frozenset({
    e.EAGAIN, e.EINTR, e.EBUSY, e.ENOMEM, e.EMFILE, e.ENFILE, e.ENOSPC, e.EDQUOT, e.EIO, e.ETXTBSY, e.ESTALE,
    e.ENOLCK, e.EDEADLK, e.ENOBUFS, e.ETIMEDOUT, e.ETIME, e.ECANCELED, e.ESHUTDOWN, *_NO_PEER,
})  # fmt: skip
"""What the kernel says when it could not just now, whatever was asked of it."""

_MAY_NOT: Final = (e.EACCES, e.EPERM)
_NO_WAY: Final = (e.EROFS, *_MAY_NOT)  # no write can come through until somebody changes the installation

ERRNOS: Final[Mapping[Operation, Mapping[int, Meaning]]] = {
    Operation.DEVICE: {
        **_each(("device.busy", _PASSES), e.EBUSY, e.EAGAIN, e.ETXTBSY),
        **_each(("device.gone", _PASSES), e.ENODEV, e.ENXIO, e.ENOENT, e.ENOTCONN),
        **_each(("device.io", _PASSES), e.EIO, e.EREMOTEIO, e.ESHUTDOWN),
        **_each(("device.timeout", _PASSES), e.ETIMEDOUT, e.ETIME),
        **_each(("device.denied", _UNKNOWN), *_MAY_NOT),
    },
    Operation.CDI: {
        **_each(("cdi.write", _PASSES), *PASSING),
        **_each(("cdi.write", _STAYS), *_NO_WAY),
        **_each(("cdi.dir_missing", _PASSES), e.ENOENT, e.ENOTDIR),
    },
    Operation.STATE: {
        **_each(("state.write", _PASSES), *PASSING),
        **_each(("state.write", _STAYS), *_NO_WAY),
    },
    Operation.CONFIG: {},
    Operation.API: {
        **_each(("api.timeout", _PASSES), e.ETIMEDOUT),
        **_each(("api.unreachable", _PASSES), *_NO_PEER),
    },
    Operation.LOCK: {
        **_each(("lock.timeout", _PASSES), e.EAGAIN, e.EACCES, e.EBUSY, e.EINTR, e.EDEADLK, e.ENOLCK),
        **_each(("lock.timeout", _PASSES), e.ETIMEDOUT),
    },
    Operation.CGROUP: {
        **_each(("cgroup.rejected", _PASSES), e.EINVAL, e.ERANGE, e.EBUSY, e.ENOSPC, e.EDOM),
        **_each(("cgroup.gone", _PASSES), e.ENOENT, e.ENODEV),
        **_each(("cgroup.denied", _UNKNOWN), *_NO_WAY),
    },
}  # fmt: skip
"""By what was being done; other numbers mean the same everywhere."""

TIMEOUTS: Final[Mapping[Operation, str]] = {
    Operation.DEVICE: "device.timeout",
    Operation.API: "api.timeout",
    Operation.LOCK: "lock.timeout",
}
"""The code of what was not done in time; ``deadline`` elsewhere."""

_MISUSED: Final = ("driver.bug.nvml", _UNKNOWN)

NVML: Final[Mapping[int, Meaning]] = {
    **{code: (f"gpu.nvml.{name.lower()}", _UNKNOWN) for code, name in NVML_NAMES.items()},
    **_each(_MISUSED, 0, 1, 2, 5, 7, 25),  # not initialised, wrong argument, buffer or structure
    **{code: (f"gpu.nvml.{NVML_NAMES[code].lower()}", _PASSES) for code in (10, 20, 21, 23, 27)},
    **_each(("gpu.driver.init", _PASSES), 9, 12),
    15: ("gpu.lost", _BROKEN),
    16: ("gpu.reset_required", _BROKEN),
    18: ("gpu.driver.mismatch", _PASSES),
    19: ("gpu.busy", _PASSES),
    28: ("gpu.not_found", _PASSES),
}
"""By return code, as the health engine names the same."""

_FAILED: Final = ("grpc.failed", _UNKNOWN)

GRPC: Final[Mapping[int, Meaning]] = {
    **_each(_FAILED, *range(len(GRPC_NAMES))),
    1: ("driver.cancelled", _PASSES),
    4: ("deadline", _PASSES),
    **_each(("grpc.unavailable", _PASSES), 8, 10, 14),
}
"""By status: what a service answers shows nothing permanent of the node."""

_CONFLICT, _BUSY, _TIMEOUT = ("api.conflict", _PASSES), ("api.429", _PASSES), ("api.timeout", _PASSES)
_TROUBLE, _UNAUTHORIZED = ("api.5xx", _PASSES), ("api.unauthorized", _PASSES)
_FORBIDDEN, _INVALID = ("api.forbidden", _STAYS), ("api.invalid", _STAYS)
_GONE: Final = ("claim.not_found", _PASSES)

REASONS: Final[Mapping[str, Meaning]] = {
    "Conflict": _CONFLICT,
    "AlreadyExists": _CONFLICT,
    "Gone": _CONFLICT,
    "Expired": _CONFLICT,
    "TooManyRequests": _BUSY,
    "Timeout": _TIMEOUT,
    "ServerTimeout": _TIMEOUT,
    "InternalError": _TROUBLE,
    "ServiceUnavailable": _TROUBLE,
    "Unauthorized": _UNAUTHORIZED,
    "Forbidden": _FORBIDDEN,
    "Invalid": _INVALID,
    "NotFound": _GONE,
}
"""By the reason of the API server's Status; it says more than the number."""

STATUSES: Final[Mapping[int, Meaning]] = {
    401: _UNAUTHORIZED,
    403: _FORBIDDEN,
    404: _GONE,
    408: _TIMEOUT,
    409: _CONFLICT,
    410: _CONFLICT,
    422: _INVALID,
    429: _BUSY,
    504: _TIMEOUT,
}
"""By the HTTP status of the API server, where it gives no reason."""


def meaning_of_errno(number: int, operation: Operation | None) -> Meaning:
    """What the kernel's answer shows, by what was being done."""
    if operation and (found := ERRNOS[operation].get(number)):
        return found
    name = e.errorcode.get(number, f"errno_{abs(number)}").lower()
    return f"os.{name}", _PASSES if number in PASSING else _UNKNOWN


def meaning_of_nvml(code: int) -> Meaning:
    """What NVML's return code shows; codes of newer releases nothing."""
    return NVML.get(code, ("gpu.nvml.unknown", _UNKNOWN))


def meaning_of_grpc(code: int) -> Meaning:
    """What a gRPC status shows."""
    return GRPC.get(code, _FAILED)


def meaning_of_http(status: int, reason: str, kubernetes: bool) -> Meaning:
    """What an HTTP status shows. Any server's refusal proves nothing; the API server's may."""
    if not kubernetes:
        passes = status in {408, 429} or status >= 500
        return ("http.unavailable", _PASSES) if passes else ("http.refused", _UNKNOWN)
    if found := REASONS.get(reason) or STATUSES.get(status):
        return found
    return _TROUBLE if status >= 500 else ("api.refused", _UNKNOWN)
