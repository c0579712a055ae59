"""What one exception shows: by its type, its numbers and its mark, not by its text.

The libraries whose exceptions are known here are not imported: a class is known by its name and its
library's, a number by its attribute. So nothing is loaded that the driver does not use, and any release of
theirs will do.
"""

import errno
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from agent.errors import AgentUnreachable
from agent.model.claim import DeviceRef
from agent.model.prepare import ErrorClass, Operation, Scope
from agent.prepare.doing import Doing, done_by
from agent.prepare.errors import (
    BadConfig,
    DriverError,
    FailedDevice,
    PermanentError,
    PrepareError,
    TransientError,
)
from agent.prepare.evidence import (
    GRPC_NAMES,
    ClaimResult,
    DecodeError,
    DriverReportedError,
    Errno,
    Evidence,
    GrpcStatus,
    HttpStatus,
    Judged,
    NoBackend,
    NvmlCode,
    Raised,
    TimedOut,
    Unconnected,
    UnreadableCdiFile,
    WrongValue,
)
from agent.prepare.normalize import text_of

BODY_BYTES: Final = 65_536
"""What is read of an API server's answer."""

PLACES: Final[Mapping[str, Operation]] = {
    "/etc/cdi/": Operation.CDI,
    "/run/cdi/": Operation.CDI,
    "/var/run/cdi/": Operation.CDI,
    "/sys/fs/cgroup/": Operation.CGROUP,
    "/sys/": Operation.DEVICE,
    "/dev/": Operation.DEVICE,
}
"""What is done to these directories and to files below if nobody marked it; the first that fits."""

WORDS: Final[tuple[tuple[type[DriverError], ErrorClass], ...]] = (
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
"""Of exceptions that were raised without their number."""

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

Reader = Callable[[BaseException, Doing | None], Evidence | None]


def read(error: BaseException, doing: Doing | None = None) -> Evidence:
    """What one exception shows, apart from those that it came from."""
    for reader in _READERS:
        if (evidence := reader(error, doing)) is not None:
            return evidence
    kind = type(error)
    bug = kind.__module__ == "builtins" and issubclass(kind, _BUGS)
    return Raised(kind.__name__, bug, text_of(error))


def _judged(error: BaseException, _: Doing | None) -> Evidence | None:
    return Judged(error.verdict) if isinstance(error, PrepareError) else None


def _driver(error: BaseException, _: Doing | None) -> Evidence | None:
    """A subclass may have forgotten its base's ``__init__``, or give no texts: its type still counts."""
    if not isinstance(error, DriverError):
        return None
    device, scope = _attribute(error, "device"), _attribute(error, "scope")
    requests, retry = _attribute(error, "requests"), _attribute(error, "retry_after_s")
    return DriverReportedError(
        next(error_class for kind, error_class in WORDS if isinstance(error, kind)),
        _string(_attribute(error, "code")) or error.default_code,
        _string(_attribute(error, "summary")) or text_of(error),
        _string(_attribute(error, "detail")),
        tuple(map(_string, requests)) if isinstance(requests, tuple) else (),
        retry if isinstance(retry, int | float) else None,
        device if isinstance(device, str | DeviceRef) else None,
        scope if isinstance(scope, Scope) else None,
    )


def _backend(error: BaseException, _: Doing | None) -> Evidence | None:
    return NoBackend(text_of(error)) if isinstance(error, AgentUnreachable) else None


def _ended(error: BaseException, _: Doing | None) -> Evidence | None:
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return ClaimResult(type(error).__name__, leaving=not isinstance(error, GeneratorExit))
    return ClaimResult(type(error).__name__) if _CANCELLED & _names(error) else None


def _nvml(error: BaseException, doing: Doing | None) -> Evidence | None:
    code = _attribute(error, "value")
    if type(code) is not int or not any(kind.__name__ == "NVMLError" for kind in type(error).__mro__):
        return None
    return NvmlCode(
        code, doing.path if doing else ""
    )  # its text is not asked for: pynvml would ask the library


def _grpc(error: BaseException, _: Doing | None) -> Evidence | None:
    """``status`` of grpclib is a member of an enum, ``code()`` of grpcio gives one of pairs."""
    status = _attribute(error, "status")
    if status is None and callable(asked := _attribute(error, "code")):
        status = _called(asked)
    value, name = _attribute(status, "value"), _attribute(status, "name")
    code = value[0] if isinstance(value, tuple) and value else value
    if type(code) is not int or not 0 <= code < len(GRPC_NAMES) or name != GRPC_NAMES[code]:
        return None
    message = _attribute(error, "message")
    if message is None and callable(asked := _attribute(error, "details")):
        message = _called(asked)
    return GrpcStatus(code, message if isinstance(message, str) else "")


def _http(error: BaseException, doing: Doing | None) -> Evidence | None:
    response = _attribute(error, "response")
    said = _status_object(error, response)
    numbers = (
        _attribute(error, "status"),
        _attribute(error, "status_code"),
        _attribute(response, "status_code"),
        _attribute(response, "status"),
        said.get("code"),
    )
    status = next((number for number in numbers if type(number) is int and 400 <= number < 600), None)
    if status is None:
        return None
    reason = said.get("reason") or _attribute(error, "reason") or _attribute(response, "reason_phrase")
    asked = doing is not None and doing.operation is Operation.API
    library = type(error).__module__.partition(".")[0] in _KUBERNETES
    message = said.get("message") or _attribute(error, "message")
    if not message and not library:  # Kubernetes' own client tells all headers of the answer, Date among them
        message = text_of(error)
    return HttpStatus(
        status,
        reason if isinstance(reason, str) else "",
        message if isinstance(message, str) else "",
        kubernetes=asked or library or said.get("kind") == "Status",
    )


def _timed_out(error: BaseException, doing: Doing | None) -> Evidence | None:
    by_builtin = isinstance(error, TimeoutError) and error.errno is None
    if not by_builtin and not _TIMEOUTS & _names(error):
        return None
    return TimedOut(type(error).__name__, doing.operation if doing else None, text_of(error))


def _unconnected(error: BaseException, doing: Doing | None) -> Evidence | None:
    """These are OSErrors, whose numbers are a library's own."""
    if not _UNCONNECTED & _names(error):
        return None
    return Unconnected(type(error).__name__, text_of(error), doing.operation if doing else None)


def _errno(error: BaseException, doing: Doing | None) -> Evidence | None:
    number = error.errno if isinstance(error, OSError) else None
    if type(number) is not int:  # OSError takes anything for its number
        number = next((number for kind, number in _ERRNOS if isinstance(error, kind)), None)
    if number is None:
        return None
    name, text = _attribute(error, "filename"), _attribute(error, "strerror")
    path = (
        name.decode("utf-8", "replace") if isinstance(name, bytes) else name if isinstance(name, str) else ""
    )
    path = path or (doing.path if doing else "")
    place = next((one for start, one in PLACES.items() if f"{path}/".startswith(start)), None)
    marked = done_by(error) is not None or place is None
    operation = doing.operation if doing and marked else place
    return Errno(number, operation, path, text if isinstance(text, str) else "")


def _decoding(error: BaseException, doing: Doing | None) -> Evidence | None:
    operation = doing.operation if doing else None
    names = {kind.__name__ for kind in type(error).__mro__}
    refused = bool(names & _REFUSED)
    if refused or names & _UNREADABLE:
        if operation is Operation.CDI:
            return UnreadableCdiFile(doing.path if doing else "", text_of(error))
        return DecodeError(type(error).__name__, text_of(error), operation, refused)
    if operation is Operation.CONFIG and isinstance(error, _VALUES):
        return WrongValue(type(error).__name__, text_of(error))
    return None


_READERS: Final[tuple[Reader, ...]] = (
    _judged, _driver, _backend, _ended, _nvml, _grpc, _http, _timed_out, _unconnected, _errno, _decoding,
)  # fmt: skip
"""The first that knows it. urllib's HTTPError is an OSError too, and a timeout is one without its number."""


def _names(error: BaseException) -> set[str]:
    """The names of the exception's classes behind their libraries', ``trio.TooSlowError``."""
    return {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _attribute(of: object, name: str) -> object:
    """An attribute; None where there is none, or it cannot be had."""
    try:
        return getattr(of, name, None)
    except Exception:  # a property of somebody else's may raise anything
        return None


def _string(value: object) -> str:
    """A text; of other things what they say of themselves."""
    if isinstance(value, BaseException):
        return text_of(value)
    return value if isinstance(value, str) else "" if value is None else str(_called(partial(repr, value)))


def _called(function: Callable[..., object]) -> object:
    try:
        return function()
    except Exception:
        return None


_REASON: Final = re.compile(r"[A-Za-z]{1,64}")


def _status_object(error: BaseException, response: object) -> Mapping[str, object]:
    """The API server's own Status, where the exception has it: as text, or as its library has read it."""
    for body in (_attribute(error, "body"), _attribute(response, "text"), _attribute(error, "status")):
        if isinstance(body, str | bytes) and 0 < len(body) <= BODY_BYTES:
            try:
                body = json.loads(body)
            except (ValueError, RecursionError):
                continue
        if isinstance(body, Mapping) and body.get("kind") == "Status":
            return body
        if isinstance(reason := _attribute(body, "reason"), str) and _REASON.fullmatch(reason):
            return {
                "kind": "Status",
                **{name: _attribute(body, name) for name in ("reason", "message", "code")},
            }
    return {}
