"""Health checks that a driver defines for its devices: their settings, valid answers and results.

After an exception, an invalid answer or a timeout a health check has no result.
:mod:`agent.embed.check_scheduler` calls the checks.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, NamedTuple

from agent.config.values import number_within, parse_count, seconds_within
from agent.driver.check_results import validated_finding
from agent.embed.devices import Device
from agent.errors import ConfigError, unwrap_error
from agent.model.health import Finding, Repair, Severity
from agent.prepare.normalize_text import exception_text, normalize, shorten

EVERY_MIN_S: Final = 0.1
EVERY_MAX_S: Final = 3600.0
TIMEOUT_MIN_S: Final = 0.01
TIMEOUT_MAX_S: Final = 3600.0
COUNT_MAX: Final = 1000
NAME_BYTES: Final = 63
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_REPORTED: Final = (Severity.DEGRADED, Severity.UNKNOWN, Severity.UNHEALTHY)

HealthCheckAnswer = Finding | bool | None
"""Answer of a health check. None or True: no fault. A finding: the fault. False is invalid."""
HealthCheckFunction = Callable[[Device], HealthCheckAnswer | Awaitable[HealthCheckAnswer]]
"""Driver's function that checks the health of one device."""


def unhealthy(code: str, evidence: str, advice: str = "", *, repair: Repair | None = None) -> Finding:
    """Return the finding of a device that cannot be used.

    Args:
        code: Stable dotted code of the driver, ``fpga.bank_locked``.
        evidence: One line with the compared numbers, but no times or counters: each change is a new report.
            Cut to 500 bytes; line breaks and control characters become spaces.
        advice: What the operator should do, in one line; cut to 300 bytes.
        repair: Repair that ends the fault, for programs that act on reports; None: reported as NONE.

    Raises:
        ValueError: The code is not dotted, or is longer than 100 bytes.
        TypeError: A text is not a string, or the repair is not a Repair.
    """
    return validated_finding(Finding(code, Severity.UNHEALTHY, evidence, advice, repair=repair))


def degraded(code: str, evidence: str, advice: str = "", *, repair: Repair | None = None) -> Finding:
    """Return the finding of a device that works worse than it should: it stays Healthy, with a message.

    Arguments and errors are those of :func:`unhealthy`.
    """
    return validated_finding(Finding(code, Severity.DEGRADED, evidence, advice, repair=repair))


def unknown(code: str, evidence: str, advice: str = "", *, repair: Repair | None = None) -> Finding:
    """Return the finding of a device whose health cannot be determined.

    Arguments and errors are those of :func:`unhealthy`.
    """
    return validated_finding(Finding(code, Severity.UNKNOWN, evidence, advice, repair=repair))


# --- a check -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HealthCheck:
    """Health check of a driver, for all devices that match its patterns. Validated when it is created.

    Raises:
        ConfigError: A setting is invalid.
    """

    name: str
    """Name of the health check: a DNS label."""
    function: HealthCheckFunction
    """Function of the driver: plain (called in a worker thread) or async (in the core thread's loop)."""
    every_s: float
    """Period of the health check's calls [s]."""
    timeout_s: float
    """Longest duration of a call of the health check [s]."""
    devices: tuple[str, ...]
    """Shell patterns of the names of devices that the health check applies to."""
    raise_after: int
    """Number of failing calls in a row before the health check's fault is reported."""
    clear_after: int
    """Number of passing calls in a row before the health check's fault is cleared."""

    def __post_init__(self) -> None:
        name: object = self.name
        if not (isinstance(name, str) and len(name) <= NAME_BYTES and _NAME.fullmatch(name)):
            rule = f"not a DNS label of at most {NAME_BYTES} bytes, such as link-up; set one with name="
            raise ConfigError(f"health check {str(name)[:NAME_BYTES]!r}: the name is {rule}")
        if not callable(self.function):
            raise ConfigError(
                f"health check {self.name!r}: {self.function!r} is not callable; pass a function"
            )
        patterns: tuple[object, ...] = self.devices
        if not (patterns and all(isinstance(one, str) and one for one in patterns)):
            raise ConfigError(
                f"health check {self.name!r}: devices: {patterns!r} is not a pattern of device names"
            )
        count = number_within(1, COUNT_MAX)
        self._check_setting("every_s", self.every_s, _read_seconds, seconds_within(EVERY_MIN_S, EVERY_MAX_S))
        self._check_setting(
            "timeout_s", self.timeout_s, _read_seconds, seconds_within(TIMEOUT_MIN_S, TIMEOUT_MAX_S)
        )
        self._check_setting("raise_after", self.raise_after, parse_count, count)
        self._check_setting("clear_after", self.clear_after, parse_count, count)

    def _check_setting(
        self, label: str, value: object, read: Callable[[object], object], check: Callable[[Any], None]
    ) -> None:
        try:
            check(read(value))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"health check {self.name!r}: {label}: {error}") from None

    @property
    def is_async(self) -> bool:
        """Whether the health check's function is async."""
        function: object = self.function
        while isinstance(function, partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object of a class
        )

    def applies_to(self, device: Device) -> bool:
        """Return True if one of the patterns matches the device's name."""
        return any(fnmatchcase(device.name, pattern) for pattern in self.devices)


def default_check_name(function: object) -> str:
    """Return the name of a health check without ``name=``: its function ``link_up`` gives ``link-up``."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("_").replace("_", "-").lower()


def as_patterns(devices: str | Sequence[str]) -> tuple[str, ...]:
    return (devices,) if isinstance(devices, str) else tuple(devices)


def _read_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number of seconds; pass an int or a float")
    return value


# --- answers -----------------------------------------------------------------------------------------------


class HealthCheckResult(NamedTuple):
    """Result of one call of a health check: no fault, a finding, or no result."""

    finding: Finding | None = None
    """Fault of the device that the call found; None: no fault, or no result."""
    unread: str = ""
    """Reason why the call has no result; empty: it has a result."""
    error: BaseException | None = None
    """Exception that the health check's function raised; None: it raised none."""


def result_from_answer(answer: object) -> HealthCheckResult:
    """Convert the answer of a health check to its result."""
    if answer is None or answer is True:
        return HealthCheckResult()
    if isinstance(answer, Finding) and answer.severity in _REPORTED:
        try:
            return HealthCheckResult(validated_finding(answer))
        except (ValueError, TypeError) as error:
            return result_from_error(error)
    if inspect.iscoroutine(answer):
        answer.close()
    given = "False" if answer is False else f"a {type(answer).__name__}"
    return HealthCheckResult(unread=f"answered {given}, which is neither None, True nor a finding")


def result_from_error(error: BaseException) -> HealthCheckResult:
    """Return the result of a health check that raised an exception: no result, with the exception's text."""
    root = unwrap_error(error)
    name, text = type(root).__name__, normalize(exception_text(root))
    return HealthCheckResult(unread=shorten(f"{name}: {text}" if text else name), error=error)
