"""Tables from error numbers and error texts to a code such as ``api.forbidden`` and an error class.

The numbers are those of errno, NVML, gRPC and HTTP. The class is what the number alone proves: a failure is
permanent only if it lasts until an operator changes the Kubernetes node. agent.prepare.failure_kinds
describes each pair of code and class.

Regular expressions for texts are used if neither exception type nor error number shows the class. Built-in
patterns only name the class transient, because a text proves nothing. An operator's pattern may name any
class. A search cannot be interrupted and blocks all threads. So texts are short, and a pattern may have
neither nested nor many repeats, whose search time grows exponentially.
"""

import errno as e
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.errors import ConfigError, suggestion
from agent.model.prepare import ErrorClass, Operation
from agent.prepare.evidence import ERRNO_NAMES, GRPC_NAMES, NVML_NAMES
from agent.prepare.failure_kinds import is_dotted_code

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
    **_for_each(_MISUSED, 0, 1, 2, 5, 7, 25),  # not initialized, wrong argument, buffer or structure
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
    name = ERRNO_NAMES.get(number, f"errno_{abs(number)}").lower()
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


# --- patterns of texts -------------------------------------------------------------------------------------

PATTERNS_MAX: Final = 64
PATTERN_CHARS: Final = 256
SEARCH_CHARS: Final = 1024
"""Length to which a searched text is cut [characters]: the worst accepted pattern then takes about 2 s."""
OPEN_REPEATS_MAX: Final = 2
"""Largest number of repeats (``*``, ``+``, ``{1,9}``) in one regular expression."""
CHOICES_MAX: Final = 4
"""Largest number of choices in one regular expression: ``?`` and, within parentheses, ``|``."""
_KEYS: Final = ("match", "code", "class", "summary")
_CLASSES: Final = tuple(map(str, ErrorClass))


@dataclass(frozen=True, slots=True)
class ErrorPattern:
    """Regular expression for error texts, with the code and class of a failure whose text matches."""

    match: re.Pattern[str]
    code: str
    error_class: ErrorClass
    summary: str = ""
    """Summary of a failure that matches, for operators; empty: the error text."""
    confidence: float = 0.3
    """Confidence in the class of a failure that matches, from 0 to 1."""

    def __post_init__(self) -> None:
        if (type(self.match), type(self.error_class)) != (re.Pattern, ErrorClass):
            raise ConfigError(f"{self}: match must be re.compile(...), and error_class an ErrorClass")

    def matches(self, text: str) -> bool:
        """Return True if the regular expression matches a part of an error text."""
        return self.match.search(text[:SEARCH_CHARS]) is not None


def _builtin(match: str, code: str) -> ErrorPattern:
    return ErrorPattern(re.compile(match, re.IGNORECASE), code, ErrorClass.TRANSIENT)


BUILTIN_PATTERNS: Final = (
    _builtin(r"device or resource busy|device is (?:busy|in use)|in use by another client", "text.busy"),
    _builtin(r"resource temporarily unavailable|try again later|object has been modified|leader changed|"
             r"insufficient resources|code = (?:aborted|unavailable)|unable to handle the request|"
             r"is being unprepared|ResourceClaim not created yet", "text.try_again"),
    _builtin(r"\bnot (?:yet )?ready\b", "text.not_ready"),
    _builtin(r"\bDRA driver \S+ is not registered", "kubelet.not_registered"),
    _builtin(r"feature gate is disabled on kubelet", "kubelet.gate_off"),
    _builtin(r"claim \S+ not allocated", "claim.unallocated"),
    _builtin(r'resourceclaims\.resource\.k8s\.io "\S+" not found', "claim.not_found"),
    _builtin(r"not allowed to use ResourceClaim|ResourceClaim \S+ was not created for", "claim.not_reserved"),
    _builtin(r"claim \S+ got replaced|different UID \S+ still exists", "claim.uid_mismatch"),
    _builtin(r"driver/library version mismatch", "gpu.driver.mismatch"),
    _builtin(r"too many open files", "text.too_many_files"),
    _builtin(r"connection (?:refused|reset|aborted|lost)|broken pipe|network is unreachable|unexpected EOF|"
             r"no route to host|no such host|transport is closing", "text.no_connection"),
    _builtin(r"deadline exceeded|exceed context deadline|timed? ?out\b", "text.timeout"),
    _builtin(r"text file busy", "text.file_busy"),
    _builtin(r"no space left on device|disk quota exceeded", "text.no_space"),
    _builtin(r"cannot allocate memory|out of memory", "text.no_memory"),
    _builtin(r"input/output error", "text.io"),
    _builtin(r"context canceled|operation (?:was )?cancell?ed", "text.cancelled"),
)  # fmt: skip
"""Built-in regular expressions for error texts, tried after those of the configuration."""


def parse_patterns(value: object) -> tuple[ErrorPattern, ...]:
    """Parse the tables ``[[prepare.patterns]]`` of the configuration: match, code, class, optional summary.

    Raises:
        ValueError: A value is wrong; the text has the number of the table, the value and the limit.
        TypeError: A value has the wrong type; the text has the number of the table and the value.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is not a list of error patterns; begin each with [[prepare.patterns]]")
    check_pattern_count(value)
    return tuple(_parse_pattern(number, entry) for number, entry in enumerate(value, 1))


def check_pattern_count(patterns: Sequence[object]) -> None:
    """Check that there are at most PATTERNS_MAX patterns; raises ValueError."""
    if len(patterns) > PATTERNS_MAX:
        raise ValueError(f"{len(patterns)} patterns, limit {PATTERNS_MAX}; remove some")


def _parse_pattern(number: int, entry: object) -> ErrorPattern:
    if not isinstance(entry, Mapping):
        raise TypeError(f"pattern {number}: {entry!r} is not a table of {', '.join(_KEYS)}")
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"pattern {number}: unknown key {key!r}{suggestion(str(key), _KEYS)}")
    match, code, name = (_required_text(number, entry, key) for key in _KEYS[:3])
    if not is_dotted_code(code):
        raise ValueError(f"pattern {number}: code {code!r} is not a dotted code, such as fpga.bank_locked")
    if name not in _CLASSES:
        raise ValueError(
            f"pattern {number}: class {name!r} is not one of "
            f"{', '.join(_CLASSES)}{suggestion(name, _CLASSES)}"
        )
    summary = _required_text(number, entry, "summary") if "summary" in entry else ""
    return ErrorPattern(_compile_safe(number, match), code, ErrorClass(name), summary, 0.5)


def _required_text(number: int, entry: Mapping[object, object], key: str) -> str:
    if key not in entry:
        raise ValueError(f"pattern {number}: {key} is missing; each pattern needs match, code and class")
    if not isinstance(text := entry[key], str):
        raise TypeError(f"pattern {number}: {key}: {text!r} is not a string; put it in quotes")
    if not text.strip():
        raise ValueError(f"pattern {number}: {key} is empty")
    return text


def _compile_safe(number: int, match: str) -> re.Pattern[str]:
    if len(match) > PATTERN_CHARS:
        raise ValueError(
            f"pattern {number}: match is {len(match)} characters long, limit {PATTERN_CHARS}; shorten it"
        )
    try:
        with warnings.catch_warnings(action="error", category=FutureWarning):
            compiled = re.compile(match)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise ValueError(f"pattern {number}: match {match!r} is not a regular expression: {error}") from None
    if compiled.search(""):
        raise ValueError(f"pattern {number}: match {match!r} matches every text; make it specific")
    if reason := _backtracking_risk(match):
        raise ValueError(f"pattern {number}: match {match!r} {reason}")
    return compiled


_TOKEN: Final = re.compile(
    r"""(?x)
    \\. | \[\^?\]?(?:\\.|[^\]\\])*\]                # an escape, a class
    | (?P<opens>\((?:\?(?:[aiLmsux-]*:|P<\w+>|<?[=!]|>))?)
    | (?P<closes>\))
    | (?P<open_repeat>[*+][?+]?|\{\d*,\d*\}[?+]?)
    | (?P<fixed_repeat>\{\d+\}[?+]?)
    | (?P<choice>\?|\|)
    | .""",
    re.DOTALL,
)


def _backtracking_risk(match: str) -> str:
    """Return why a search for an expression could take exponential time; empty: the expression is safe."""
    groups = [False]  # open groups, the outermost first: whether the group has a repeat or a choice
    ended = False  # the same for the group that has just closed
    repeats = choices = 0
    for token in _TOKEN.finditer(match):
        kind = token.lastgroup
        if ended and kind in {"open_repeat", "fixed_repeat"}:
            return "repeats parentheses that contain a repeat or a choice; its search could take minutes"
        ended = False
        if kind == "opens":
            groups.append(False)
        elif kind == "closes" and len(groups) > 1:
            ended = groups.pop()
            groups[-1] |= ended
        elif kind == "open_repeat":
            repeats += 1
            groups[-1] = True
        elif kind == "choice":
            choices += token[0] == "?" or len(groups) > 1
            groups[-1] = True
    if repeats > OPEN_REPEATS_MAX:
        return f"has {repeats} repeats such as * and +, limit {OPEN_REPEATS_MAX}"
    if choices > CHOICES_MAX:
        return f"has {choices} choices (? and |) within parentheses, limit {CHOICES_MAX}"
    return ""
