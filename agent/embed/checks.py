"""Health checks that a driver defines for its devices: definition, valid answers and their meaning.

An exception, an invalid answer or a timeout is neither health nor a fault: the check has no result.
:mod:`agent.embed.check_scheduler` calls the checks.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, NamedTuple

from agent.config.values import number_within, read_count, seconds_within
from agent.embed.devices import Device
from agent.errors import ConfigError, root_of
from agent.model.health import Finding, Severity
from agent.prepare.normalize import exception_text, normalize, shorten

EVERY_MIN_S: Final = 0.1
EVERY_MAX_S: Final = 3600.0
TIMEOUT_MIN_S: Final = 0.01
TIMEOUT_MAX_S: Final = 3600.0
COUNT_MAX: Final = 1000
NAME_BYTES: Final = 63
CODE_BYTES: Final = 100
EVIDENCE_BYTES: Final = 500
ADVICE_BYTES: Final = 300

_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_CODE: Final = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+")
_LINE: Final = re.compile(r"[^\x00-\x1f\x7f\x85\u2028\u2029]*")
_REPORTED: Final = (Severity.DEGRADED, Severity.UNKNOWN, Severity.UNHEALTHY)

CheckAnswer = Finding | bool | None
"""Answer of a health check. None or True: no fault. A finding: the fault. False is invalid."""
CheckFunction = Callable[[Device], CheckAnswer | Awaitable[CheckAnswer]]


def unhealthy(code: str, evidence: str, advice: str = "") -> Finding:
    """Return the finding of a device that cannot be used.

    Args:
        code: Stable dotted code of the driver, ``fpga.bank_locked``.
        evidence: One line with the numbers that were compared. No times, addresses or counters: every change
            of the line is a new report.
        advice: Remedy for the operator.

    Raises:
        ValueError: A text is invalid; names the text and the limit.
    """
    return _checked(Finding(code, Severity.UNHEALTHY, evidence, advice))


def degraded(code: str, evidence: str, advice: str = "") -> Finding:
    """Return the finding of a device that works, but worse than it should: it stays Healthy, with a message.

    Arguments and errors are those of :func:`unhealthy`.
    """
    return _checked(Finding(code, Severity.DEGRADED, evidence, advice))


def unknown(code: str, evidence: str, advice: str = "") -> Finding:
    """Return the finding of a device whose health cannot be determined.

    Arguments and errors are those of :func:`unhealthy`.
    """
    return _checked(Finding(code, Severity.UNKNOWN, evidence, advice))


def _checked(finding: Finding) -> Finding:
    _check_text("code", finding.code, CODE_BYTES)
    _check_text("evidence", finding.evidence, EVIDENCE_BYTES)
    _check_text("advice", finding.advice, ADVICE_BYTES)
    if not _CODE.fullmatch(finding.code):
        raise ValueError(f"code {finding.code!r} is not a dotted code, such as fpga.bank_locked")
    if not finding.evidence:
        raise ValueError(f"{finding.code}: evidence is empty; give the compared numbers")
    return finding


def _check_text(label: str, text: object, limit: int) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{label} is a {type(text).__name__}, not a string")
    if (size := len(text.encode("utf-8", "replace"))) > limit:
        raise ValueError(f"{label} is {size} bytes, limit {limit}")
    if not _LINE.fullmatch(text):
        raise ValueError(f"{label} {text!r} is more than one line, or has control characters")


# --- a check -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Check:
    """One check of a driver, for all devices that match its patterns. Validated when it is created.

    Raises:
        ConfigError: A setting is invalid; names the check, the setting and the limit.
    """

    name: str
    """Name of the check: a DNS label."""
    function: CheckFunction
    """Function of the driver; a plain one is called in a worker thread, an async one in the core's Trio
    loop."""
    every_s: float
    timeout_s: float
    devices: tuple[str, ...]
    """Shell patterns of device names."""
    raise_after: int
    clear_after: int

    def __post_init__(self) -> None:
        name: object = self.name
        if not (isinstance(name, str) and len(name) <= NAME_BYTES and _NAME.fullmatch(name)):
            rule = f"not a DNS label of at most {NAME_BYTES} bytes, such as link-up; set one with name="
            raise ConfigError(f"check {str(name)[:NAME_BYTES]!r}: the name is {rule}")
        if not callable(self.function):
            raise ConfigError(f"check {self.name!r}: {self.function!r} is not callable")
        patterns: tuple[object, ...] = self.devices
        if not (patterns and all(isinstance(one, str) and one for one in patterns)):
            raise ConfigError(f"check {self.name!r}: devices: {patterns!r} is not a pattern of device names")
        count = number_within(1, COUNT_MAX)
        self._check("every", self.every_s, _seconds, seconds_within(EVERY_MIN_S, EVERY_MAX_S))
        self._check("timeout", self.timeout_s, _seconds, seconds_within(TIMEOUT_MIN_S, TIMEOUT_MAX_S))
        self._check("raise_after", self.raise_after, read_count, count)
        self._check("clear_after", self.clear_after, read_count, count)

    def _check(
        self, label: str, value: object, read: Callable[[object], object], check: Callable[[Any], None]
    ) -> None:
        try:
            check(read(value))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"check {self.name!r}: {label}: {error}") from None

    @property
    def is_async(self) -> bool:
        """True if the check's function is async."""
        function: object = self.function
        while isinstance(function, partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object of a class
        )

    def applies_to(self, device: Device) -> bool:
        """Return True if a pattern of the check matches the device's name."""
        return any(fnmatchcase(device.name, pattern) for pattern in self.devices)


def default_name(function: object) -> str:
    """Return the default name of a check, made from its function's name: ``link_up`` gives ``link-up``."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("_").replace("_", "-").lower()


def patterns_of(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Return one device name pattern or several as a tuple."""
    return (devices,) if isinstance(devices, str) else tuple(devices)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number of seconds")
    return value


# --- answers -----------------------------------------------------------------------------------------------


class CheckCallResult(NamedTuple):
    """Result of one call of a check."""

    finding: Finding | None = None
    unread: str = ""
    """Reason why the check has no result; empty: it has a result."""
    error: BaseException | None = None
    """Exception that the check raised, for its traceback; None: no exception."""


def result_of_answer(answer: object) -> CheckCallResult:
    """Return the result of a check call from the answer that the check returned."""
    if answer is None or answer is True:
        return CheckCallResult()
    if isinstance(answer, Finding) and answer.severity in _REPORTED:
        try:
            return CheckCallResult(_checked(answer))
        except (ValueError, TypeError) as error:
            return result_of_error(error)
    if inspect.iscoroutine(answer):
        answer.close()
    given = "False" if answer is False else f"a {type(answer).__name__}"
    return CheckCallResult(unread=f"answered {given}, which is neither None, True nor a finding")


def result_of_error(error: BaseException) -> CheckCallResult:
    """Return the result of a check call that raised an exception: no result, with the exception's text."""
    root = root_of(error)
    name, text = type(root).__name__, normalize(exception_text(root))
    return CheckCallResult(unread=shorten(f"{name}: {text}" if text else name), error=error)
