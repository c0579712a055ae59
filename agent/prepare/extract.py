"""Extraction of evidence from an exception, its causes and the members of an exception group.

Reads types, numbers and the recorded operation of exceptions, never their text. Known libraries are not
imported: their classes are found by name, their numbers by attribute. So nothing is loaded that the driver
does not use, and any release works.
"""

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final

from agent.errors import AgentUnreachable
from agent.model.claim import DeviceRef
from agent.model.prepare import ErrorClass, Operation, Scope
from agent.prepare.errors import (
    BadConfig,
    DriverError,
    FailedDevice,
    OperationMark,
    PermanentError,
    PrepareError,
    TransientError,
    operation_of,
)
from agent.prepare.evidence import (
    GRPC_NAMES,
    BackendUnreachable,
    ClassifiedBefore,
    DecodeFailure,
    DriverReportedError,
    Errno,
    Evidence,
    GrpcStatus,
    HandledBefore,
    HttpStatus,
    Interrupted,
    NoConnection,
    NvmlCode,
    TimedOut,
    UnknownException,
    UnreadableCdiFile,
    WrongValue,
)
from agent.prepare.normalize import exception_text

FAILURES_MAX: Final = 64
"""Most failures that are read from one exception group, including nested groups."""
CHAIN_MAX: Final = 16
BODY_BYTES: Final = 65_536
"""Most bytes of an API server's answer that are parsed."""

PATH_OPERATIONS: Final[Mapping[str, Operation]] = {
    "/etc/cdi/": Operation.CDI,
    "/run/cdi/": Operation.CDI,
    "/var/run/cdi/": Operation.CDI,
    "/sys/fs/cgroup/": Operation.CGROUP,
    "/sys/": Operation.DEVICE,
    "/dev/": Operation.DEVICE,
}
"""Operation by directory of the file, for exceptions without a recorded operation; the first match counts."""

DRIVER_ERROR_CLASSES: Final[tuple[tuple[type[DriverError], ErrorClass], ...]] = (
    (TransientError, ErrorClass.TRANSIENT),
    (BadConfig, ErrorClass.BAD_CONFIG),
    (FailedDevice, ErrorClass.FAILED_DEVICE),
    (PermanentError, ErrorClass.PERMANENT),
    (DriverError, ErrorClass.UNKNOWN),
)

_ERRNOS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (MemoryError, errno.ENOMEM),
    (BlockingIOError, errno.EAGAIN),
    (BrokenPipeError, errno.EPIPE),
    (ConnectionAbortedError, errno.ECONNABORTED),
    (ConnectionRefusedError, errno.ECONNREFUSED),
    (ConnectionError, errno.ECONNRESET),
    (FileNotFoundError, errno.ENOENT),
    (InterruptedError, errno.EINTR),
    (NotADirectoryError, errno.ENOTDIR),
    (PermissionError, errno.EACCES),
)
"""Errno that stands for an exception type, for exceptions that were raised without an errno."""

_BUGS: Final = (
    ArithmeticError, AssertionError, AttributeError, BufferError, ImportError, LookupError, NameError,
    NotImplementedError, RecursionError, ReferenceError, SyntaxError, SystemError, TypeError, ValueError,
)  # fmt: skip
_VALUES: Final = (ValueError, LookupError, TypeError)
_CANCELLED: Final = frozenset({"trio.Cancelled", "asyncio.CancelledError", "concurrent.CancelledError"})
_TIMEOUTS: Final = frozenset({
    "trio.TooSlowError", "subprocess.TimeoutExpired", "httpx.TimeoutException", "httpcore.TimeoutException",
    "requests.Timeout", "urllib3.TimeoutError",
})  # fmt: skip
_UNCONNECTED: Final = frozenset({"ssl.SSLError", "socket.gaierror", "socket.herror"})
_KUBERNETES: Final = frozenset({"kubernetes", "kubernetes_asyncio", "kr8s", "lightkube", "pykube"})
_REFUSED: Final = frozenset({"ValidationError"})  # msgspec, pydantic, jsonschema, marshmallow
_UNREADABLE: Final = frozenset(
    {"JSONDecodeError", "TOMLDecodeError", "DecodeError", "YAMLError", "UnicodeDecodeError"}
)

Chain = tuple[Evidence, ...]
Reader = Callable[[BaseException, OperationMark | None], Evidence | None]


def extract_evidence(error: BaseException, mark: OperationMark | None = None) -> Evidence:
    """Return the evidence in one exception, without its causes."""
    for reader in _READERS:
        if (evidence := reader(error, mark)) is not None:
            return evidence
    kind = type(error)
    bug = kind.__module__ == "builtins" and issubclass(kind, _BUGS)
    return UnknownException(kind.__name__, bug, exception_text(error))


def _classified(error: BaseException, _: OperationMark | None) -> Evidence | None:
    return ClassifiedBefore(error.verdict) if isinstance(error, PrepareError) else None


def _driver_reported(error: BaseException, _: OperationMark | None) -> Evidence | None:
    """Return the class that a DriverError names; a subclass need not have called the base ``__init__``."""
    if not isinstance(error, DriverError):
        return None
    device, scope = _get_attribute(error, "device"), _get_attribute(error, "scope")
    requests, retry = _get_attribute(error, "requests"), _get_attribute(error, "retry_after_s")
    return DriverReportedError(
        next(error_class for kind, error_class in DRIVER_ERROR_CLASSES if isinstance(error, kind)),
        _to_text(_get_attribute(error, "code")) or error.default_code,
        _to_text(_get_attribute(error, "summary")) or exception_text(error),
        _to_text(_get_attribute(error, "detail")),
        tuple(map(_to_text, requests)) if isinstance(requests, tuple) else (),
        retry if isinstance(retry, int | float) else None,
        device if isinstance(device, str | DeviceRef) else None,
        scope if isinstance(scope, Scope) else None,
    )


def _backend(error: BaseException, _: OperationMark | None) -> Evidence | None:
    return BackendUnreachable(exception_text(error)) if isinstance(error, AgentUnreachable) else None


def _interrupted(error: BaseException, _: OperationMark | None) -> Evidence | None:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return Interrupted(type(error).__name__, process_exit=not isinstance(error, GeneratorExit))
    return Interrupted(type(error).__name__) if _CANCELLED & _qualified_names(error) else None


def _nvml_code(error: BaseException, mark: OperationMark | None) -> Evidence | None:
    code = _get_attribute(error, "value")
    if type(code) is not int or not any(kind.__name__ == "NVMLError" for kind in type(error).__mro__):
        return None
    return NvmlCode(code, mark.path if mark else "")  # without its text: pynvml would call the library


def _grpc_status(error: BaseException, _: OperationMark | None) -> Evidence | None:
    """Return the gRPC status: grpclib's ``status`` is an enum of numbers, grpcio's ``code()`` one of
    pairs."""
    status = _get_attribute(error, "status")
    if status is None and callable(getter := _get_attribute(error, "code")):
        status = _call_or_none(getter)
    value, name = _get_attribute(status, "value"), _get_attribute(status, "name")
    code = value[0] if isinstance(value, tuple) and value else value
    if type(code) is not int or not 0 <= code < len(GRPC_NAMES) or name != GRPC_NAMES[code]:
        return None
    message = _get_attribute(error, "message")
    if message is None and callable(getter := _get_attribute(error, "details")):
        message = _call_or_none(getter)
    return GrpcStatus(code, message if isinstance(message, str) else "")


def _http_status(error: BaseException, mark: OperationMark | None) -> Evidence | None:
    response = _get_attribute(error, "response")
    api_status = _status_object(error, response)
    numbers = (
        _get_attribute(error, "status"),
        _get_attribute(error, "status_code"),
        _get_attribute(response, "status_code"),
        _get_attribute(response, "status"),
        api_status.get("code"),
    )
    status = next((number for number in numbers if type(number) is int and 400 <= number < 600), None)
    if status is None:
        return None
    reason = api_status.get("reason") or _get_attribute(error, "reason")
    reason = reason or _get_attribute(response, "reason_phrase")
    is_api_call = mark is not None and mark.operation is Operation.API
    library = type(error).__module__.partition(".")[0] in _KUBERNETES
    message = api_status.get("message") or _get_attribute(error, "message")
    if not message and not library:  # the Kubernetes client's text has all headers, Date among them
        message = exception_text(error)
    return HttpStatus(
        status,
        reason if isinstance(reason, str) else "",
        message if isinstance(message, str) else "",
        kubernetes=is_api_call or library or api_status.get("kind") == "Status",
    )


def _timed_out(error: BaseException, mark: OperationMark | None) -> Evidence | None:
    by_builtin = isinstance(error, TimeoutError) and error.errno is None
    if not by_builtin and not _TIMEOUTS & _qualified_names(error):
        return None
    return TimedOut(type(error).__name__, mark.operation if mark else None, exception_text(error))


def _unconnected(error: BaseException, mark: OperationMark | None) -> Evidence | None:
    """Return a failed connection: an OSError whose number belongs to a library, not to the kernel."""
    if not _UNCONNECTED & _qualified_names(error):
        return None
    return NoConnection(type(error).__name__, exception_text(error), mark.operation if mark else None)


def _errno(error: BaseException, mark: OperationMark | None) -> Evidence | None:
    number = error.errno if isinstance(error, OSError) else None
    if type(number) is not int:  # OSError accepts any object as its errno
        number = next((number for kind, number in _ERRNOS if isinstance(error, kind)), None)
    if number is None:
        return None
    name, text = _get_attribute(error, "filename"), _get_attribute(error, "strerror")
    path = (
        name.decode("utf-8", "replace") if isinstance(name, bytes) else name if isinstance(name, str) else ""
    )
    path = path or (mark.path if mark else "")
    by_path = next((found for start, found in PATH_OPERATIONS.items() if f"{path}/".startswith(start)), None)
    marked = operation_of(error) is not None or by_path is None
    operation = mark.operation if mark and marked else by_path
    return Errno(number, operation, path, text if isinstance(text, str) else "")


def _decode_error(error: BaseException, mark: OperationMark | None) -> Evidence | None:
    operation = mark.operation if mark else None
    names = {kind.__name__ for kind in type(error).__mro__}
    is_rejected = bool(names & _REFUSED)
    if is_rejected or names & _UNREADABLE:
        if operation is Operation.CDI:
            return UnreadableCdiFile(mark.path if mark else "", exception_text(error))
        return DecodeFailure(type(error).__name__, exception_text(error), operation, is_rejected)
    if operation is Operation.CONFIG and isinstance(error, _VALUES):
        return WrongValue(type(error).__name__, exception_text(error))
    return None


_READERS: Final[tuple[Reader, ...]] = (
    _classified, _driver_reported, _backend, _interrupted, _nvml_code, _grpc_status, _http_status, _timed_out,
    _unconnected, _errno, _decode_error,
)  # fmt: skip
"""Functions that extract evidence, in order; the first result counts. urllib's HTTPError and timeouts are
OSErrors, too."""


def _qualified_names(error: BaseException) -> set[str]:
    """Return the names of the exception's classes with their library, such as ``trio.TooSlowError``."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _get_attribute(obj: object, name: str) -> object:
    """Return an attribute; None if it is missing or cannot be read."""
    try:
        return getattr(obj, name, None)
    except Exception:  # a foreign property may raise anything
        return None


def _to_text(value: object) -> str:
    """Return a text as it is, the text of an exception, or the ``repr`` of another object."""
    if isinstance(value, BaseException):
        return exception_text(value)
    return (
        value if isinstance(value, str) else "" if value is None else str(_call_or_none(partial(repr, value)))
    )


def _call_or_none(function: Callable[..., object]) -> object:
    try:
        return function()
    except Exception:
        return None


_REASON: Final = re.compile(r"[A-Za-z]{1,64}")


def _status_object(error: BaseException, response: object) -> Mapping[str, object]:
    """Return the API server's Status in an exception, as JSON or parsed by a client library; else empty."""
    for body in (
        _get_attribute(error, "body"),
        _get_attribute(response, "text"),
        _get_attribute(error, "status"),
    ):
        if isinstance(body, str | bytes) and 0 < len(body) <= BODY_BYTES:
            try:
                body = json.loads(body)
            except (ValueError, RecursionError):
                continue
        if isinstance(body, Mapping) and body.get("kind") == "Status":
            return body
        if isinstance(reason := _get_attribute(body, "reason"), str) and _REASON.fullmatch(reason):
            return {
                "kind": "Status",
                **{name: _get_attribute(body, name) for name in ("reason", "message", "code")},
            }
    return {}


def evidence_chains(error: BaseException, operation: Operation | None = None) -> tuple[Chain, ...]:
    """Return the evidence of each failure in an exception, the outermost exception first.

    Each member of a group is a failure of its own. A cause (``raise ... from``) is evidence of the same
    failure; an exception that was only being handled is marked as such.

    Args:
        operation: Operation of the call, if neither the exception nor a path shows the operation.
    """
    default = OperationMark(operation) if operation else None
    return tuple(islice(_split_groups(error, default, (), frozenset()), FAILURES_MAX))


def _split_groups(
    error: BaseException, mark: OperationMark | None, above: Chain, seen: frozenset[int]
) -> Iterator[Chain]:
    mark = operation_of(error) or mark
    seen |= {id(error)}
    if isinstance(error, BaseExceptionGroup):
        if len(seen) > CHAIN_MAX:
            yield (*above, extract_evidence(error, mark))
            return
        for member in error.exceptions[:FAILURES_MAX]:
            yield from _split_groups(member, mark, above, seen)
        return
    here = (*above, extract_evidence(error, mark))
    cause = error.__cause__
    if cause is not None and id(cause) not in seen and len(seen) <= CHAIN_MAX:
        yield from _split_groups(cause, mark, here, seen)
    else:
        yield (*here, *_handled_before(error, mark, seen))


def _handled_before(error: BaseException, mark: OperationMark | None, seen: frozenset[int]) -> Chain:
    found: list[Evidence] = []
    while not error.__suppress_context__ and (before := error.__context__) is not None:
        if id(before) in seen or len(seen) > CHAIN_MAX:
            break
        seen |= {id(before)}
        found.append(HandledBefore(extract_evidence(before, operation_of(before) or mark)))
        error = before
    return tuple(found)
