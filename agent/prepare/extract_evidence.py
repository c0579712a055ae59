"""Extraction of evidence from an exception, its causes and the members of an exception group.

Exceptions are classified by type, error number and recorded operation, never by their text. Classes of other
libraries are recognized by name, without importing the library: any release of it works.
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
    BadConfigError,
    DriverError,
    FailedDeviceError,
    PermanentError,
    PrepareError,
    RecordedOperation,
    TransientError,
    recorded_operation,
)
from agent.prepare.evidence import (
    GRPC_NAMES,
    ConnectionFailure,
    DecodeFailure,
    DriverReportedError,
    EarlierException,
    ErrnoEvidence,
    Evidence,
    ExistingVerdict,
    GrpcStatus,
    HealthBackendUnreachable,
    HttpStatus,
    InterruptedPrepare,
    NvmlCode,
    OperationTimeout,
    UnclassifiedException,
    UnreadableCdiFile,
    WrongParameterValue,
    operation_of_path,
)
from agent.prepare.kubelet_message import exception_text

FAILURES_MAX: Final = 64
"""Largest number of failures of one exception group that are classified, including nested groups."""
CHAIN_LENGTH_MAX: Final = 16
API_BODY_MAX_BYTES: Final = 65_536
"""Largest answer of the API server that is parsed [bytes]."""

DRIVER_ERROR_CLASSES: Final[tuple[tuple[type[DriverError], ErrorClass], ...]] = (
    (TransientError, ErrorClass.TRANSIENT),
    (BadConfigError, ErrorClass.BAD_CONFIG),
    (FailedDeviceError, ErrorClass.FAILED_DEVICE),
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
"""Errno that an exception type stands for, if the exception was raised without an errno."""

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

EvidenceChain = tuple[Evidence, ...]
EvidenceReader = Callable[[BaseException, RecordedOperation | None], Evidence | None]


def extract_evidence(error: BaseException, recorded: RecordedOperation | None = None) -> Evidence:
    """Return the evidence for a failed prepare that one exception gives, without the evidence of its causes.

    Args:
        recorded: Operation that :class:`doing` recorded; None: unknown.
    """
    for reader in _READERS:
        if (evidence := reader(error, recorded)) is not None:
            return evidence
    kind = type(error)
    bug = kind.__module__ == "builtins" and issubclass(kind, _BUGS)
    return UnclassifiedException(kind.__name__, bug, exception_text(error))


def _classified(error: BaseException, _: RecordedOperation | None) -> Evidence | None:
    return ExistingVerdict(error.verdict) if isinstance(error, PrepareError) else None


def _driver_reported(error: BaseException, _: RecordedOperation | None) -> Evidence | None:
    # attributes are optional: a subclass need not have called the base __init__
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


def _backend(error: BaseException, _: RecordedOperation | None) -> Evidence | None:
    return HealthBackendUnreachable(exception_text(error)) if isinstance(error, AgentUnreachable) else None


def _interrupted(error: BaseException, _: RecordedOperation | None) -> Evidence | None:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return InterruptedPrepare(type(error).__name__, process_exit=not isinstance(error, GeneratorExit))
    return InterruptedPrepare(type(error).__name__) if _CANCELLED & _qualified_names(error) else None


def _nvml_code(error: BaseException, mark: RecordedOperation | None) -> Evidence | None:
    code = _get_attribute(error, "value")
    if type(code) is not int or not any(kind.__name__ == "NVMLError" for kind in type(error).__mro__):
        return None
    return NvmlCode(code, mark.path if mark else "")  # without its text: pynvml would call the library


def _grpc_status(error: BaseException, _: RecordedOperation | None) -> Evidence | None:
    # grpclib: ``status``, an enum of numbers; grpcio: ``code()``, an enum of pairs
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


def _http_status(error: BaseException, mark: RecordedOperation | None) -> Evidence | None:
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
        from_api_server=is_api_call or library or api_status.get("kind") == "Status",
    )


def _timed_out(error: BaseException, mark: RecordedOperation | None) -> Evidence | None:
    by_builtin = isinstance(error, TimeoutError) and error.errno is None
    if not by_builtin and not _TIMEOUTS & _qualified_names(error):
        return None
    return OperationTimeout(type(error).__name__, mark.operation if mark else None, exception_text(error))


def _unconnected(error: BaseException, mark: RecordedOperation | None) -> Evidence | None:
    # before _errno: these are OSErrors whose number is not the kernel's; the last has none, since asyncio
    # joins the errors of a host's addresses to a text
    is_joined = type(error) is OSError and error.errno is None and mark and mark.operation is Operation.API
    if not (is_joined or _UNCONNECTED & _qualified_names(error)):
        return None
    return ConnectionFailure(type(error).__name__, exception_text(error), mark.operation if mark else None)


def _errno(error: BaseException, mark: RecordedOperation | None) -> Evidence | None:
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
    by_path = operation_of_path(path)
    marked = recorded_operation(error) is not None or by_path is None
    operation = mark.operation if mark and marked else by_path
    return ErrnoEvidence(number, operation, path, text if isinstance(text, str) else "")


def _decode_error(error: BaseException, mark: RecordedOperation | None) -> Evidence | None:
    operation = mark.operation if mark else None
    names = {kind.__name__ for kind in type(error).__mro__}
    is_rejected = bool(names & _REFUSED)
    if is_rejected or names & _UNREADABLE:
        if operation is Operation.CDI:
            return UnreadableCdiFile(mark.path if mark else "", exception_text(error))
        return DecodeFailure(type(error).__name__, exception_text(error), operation, is_rejected)
    if operation is Operation.CONFIG and isinstance(error, _VALUES):
        return WrongParameterValue(type(error).__name__, exception_text(error))
    return None


_READERS: Final[tuple[EvidenceReader, ...]] = (
    _classified, _driver_reported, _backend, _interrupted, _nvml_code, _grpc_status, _http_status, _timed_out,
    _unconnected, _errno, _decode_error,
)  # fmt: skip
"""Functions that extract evidence from an exception, in order; the first result counts."""


def _qualified_names(error: BaseException) -> set[str]:
    """Return the names of the exception's class and base classes, such as ``trio.TooSlowError``."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _get_attribute(obj: object, name: str) -> object:
    try:
        return getattr(obj, name, None)
    except Exception:  # a foreign property may raise anything
        return None


def _to_text(value: object) -> str:
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
    """Return the API server's object ``Status`` in an exception of a client library; empty: the exception has
    none."""
    for body in (
        _get_attribute(error, "body"),
        _get_attribute(response, "text"),
        _get_attribute(error, "status"),
    ):
        if isinstance(body, str | bytes) and 0 < len(body) <= API_BODY_MAX_BYTES:
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


def extract_evidence_chains(
    error: BaseException, operation: Operation | None = None
) -> tuple[EvidenceChain, ...]:
    """Return the evidence of each failure in an exception: one tuple per failure, outermost exception first.

    Each member of an exception group is a failure of its own. Causes (``raise ... from``) and exceptions that
    were being handled are evidence of the same failure.

    Args:
        operation: Operation that failed, used if the exception shows none.
    """
    default = RecordedOperation(operation) if operation else None
    return tuple(islice(_split_groups(error, default, (), frozenset()), FAILURES_MAX))


def _split_groups(
    error: BaseException, mark: RecordedOperation | None, above: EvidenceChain, seen: frozenset[int]
) -> Iterator[EvidenceChain]:
    mark = recorded_operation(error) or mark
    seen |= {id(error)}
    if isinstance(error, BaseExceptionGroup):
        if len(seen) > CHAIN_LENGTH_MAX:
            yield (*above, extract_evidence(error, mark))
            return
        for member in error.exceptions[:FAILURES_MAX]:
            yield from _split_groups(member, mark, above, seen)
        return
    here = (*above, extract_evidence(error, mark))
    cause = error.__cause__
    if cause is not None and id(cause) not in seen and len(seen) <= CHAIN_LENGTH_MAX:
        yield from _split_groups(cause, mark, here, seen)
    else:
        yield (*here, *_handled_before(error, mark, seen))


def _handled_before(
    error: BaseException, mark: RecordedOperation | None, seen: frozenset[int]
) -> EvidenceChain:
    found: list[Evidence] = []
    while not error.__suppress_context__ and (before := error.__context__) is not None:
        if id(before) in seen or len(seen) > CHAIN_LENGTH_MAX:
            break
        seen |= {id(before)}
        found.append(EarlierException(extract_evidence(before, recorded_operation(before) or mark)))
        error = before
    return tuple(found)
