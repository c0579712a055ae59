"""A driver's own checks: what one is, what it may answer, and what its answer means.

Whoever cannot answer has not looked: an exception, a wrong answer and silence are never health, and no fault
of the device either. When checks are called is :mod:`agent.embed.check_scheduler`'.
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
from agent.prepare.normalize import mask, shorten, text_of

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
_TOLD: Final = (Severity.DEGRADED, Severity.UNKNOWN, Severity.UNHEALTHY)

Answer = Finding | bool | None
"""None or True: all is well. A finding: what is wrong."""
Function = Callable[[Device], Answer | Awaitable[Answer]]


def unhealthy(code: str, evidence: str, advice: str = "") -> Finding:
    """The device cannot be used.

    Args:
        code: Stable dotted code in the driver's own words, ``fpga.bank_locked``.
        evidence: One line with the numbers that were compared; no times, addresses or counters in it, for a
            line that changes is told anew each time.
        advice: What to do about it.

    Raises:
        ValueError: names what cannot be told, and the limit.
    """
    return _checked(Finding(code, Severity.UNHEALTHY, evidence, advice))


def degraded(code: str, evidence: str, advice: str = "") -> Finding:
    """The device can be used, and works worse than it should: it stays Healthy, with a message.

    Args and errors are those of :func:`unhealthy`.
    """
    return _checked(Finding(code, Severity.DEGRADED, evidence, advice))


def unknown(code: str, evidence: str, advice: str = "") -> Finding:
    """Nobody can tell whether the device can be used, and that is all there is to say.

    Args and errors are those of :func:`unhealthy`.
    """
    return _checked(Finding(code, Severity.UNKNOWN, evidence, advice))


def _checked(finding: Finding) -> Finding:
    _check_text("code", finding.code, CODE_BYTES)
    _check_text("evidence", finding.evidence, EVIDENCE_BYTES)
    _check_text("advice", finding.advice, ADVICE_BYTES)
    if not _CODE.fullmatch(finding.code):
        raise ValueError(f"code {finding.code!r} is no dotted code, such as fpga.bank_locked")
    if not finding.evidence:
        raise ValueError(f"{finding.code}: no evidence; write what was compared with what")
    return finding


def _check_text(what: str, text: object, limit: int) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what} is a {type(text).__name__}, and no text")
    if (size := len(text.encode("utf-8", "replace"))) > limit:
        raise ValueError(f"{what} is {size} bytes, limit {limit}")
    if not _LINE.fullmatch(text):
        raise ValueError(f"{what} {text!r} is more than one line, or has control characters")


# --- a check -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Check:
    """One check of a driver, of as many devices as it is meant for. Checked when it is made.

    Raises:
        ConfigError: names the check, what is wrong, and the limit.
    """

    name: str
    """A DNS label."""
    function: Function
    """Plain, and called in a worker thread, or async, and called in the core's Trio loop."""
    every_s: float
    timeout_s: float
    devices: tuple[str, ...]
    """Patterns as a shell's, of device names."""
    raise_after: int
    clear_after: int

    def __post_init__(self) -> None:
        name: object = self.name
        if not (isinstance(name, str) and len(name) <= NAME_BYTES and _NAME.fullmatch(name)):
            rule = f"no DNS label of at most {NAME_BYTES} bytes, such as link-up; say one, name="
            raise ConfigError(f"check {str(name)[:NAME_BYTES]!r}: the name is {rule}")
        if not callable(self.function):
            raise ConfigError(f"check {self.name!r}: {self.function!r} cannot be called")
        patterns: tuple[object, ...] = self.devices
        if not (patterns and all(isinstance(one, str) and one for one in patterns)):
            raise ConfigError(f"check {self.name!r}: devices: {patterns!r} is no pattern of device names")
        count = number_within(1, COUNT_MAX)
        self._check("every", self.every_s, _seconds, seconds_within(EVERY_MIN_S, EVERY_MAX_S))
        self._check("timeout", self.timeout_s, _seconds, seconds_within(TIMEOUT_MIN_S, TIMEOUT_MAX_S))
        self._check("raise_after", self.raise_after, read_count, count)
        self._check("clear_after", self.clear_after, read_count, count)

    def _check(
        self, what: str, value: object, read: Callable[[object], object], check: Callable[[Any], None]
    ) -> None:
        try:
            check(read(value))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"check {self.name!r}: {what}: {error}") from None

    @property
    def is_async(self) -> bool:
        """Whether it is called in the Trio loop."""
        function: object = self.function
        while isinstance(function, partial):
            function = function.func
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object of a class
        )

    def concerns(self, device: Device) -> bool:
        """Whether it is meant for a device."""
        return any(fnmatchcase(device.name, pattern) for pattern in self.devices)


def name_of(function: object) -> str:
    """What a check is called after its function: ``link_up`` is ``link-up``."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__)).strip("_").replace("_", "-").lower()


def patterns_of(devices: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern, or several."""
    return (devices,) if isinstance(devices, str) else tuple(devices)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number of seconds")
    return value


# --- what it answers ---------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What one look of a check came to."""

    finding: Finding | None = None
    unread: str = ""
    """Why nobody could look; stable while that is so."""
    error: BaseException | None = None
    """What was raised, for its traceback."""


def read_answer(answer: object) -> Seen:
    """What an answer means."""
    if answer is None or answer is True:
        return Seen()
    if isinstance(answer, Finding) and answer.severity in _TOLD:
        try:
            return Seen(_checked(answer))
        except (ValueError, TypeError) as error:
            return read_error(error)
    if inspect.iscoroutine(answer):
        answer.close()
    said = "False" if answer is False else f"a {type(answer).__name__}"
    return Seen(unread=f"answered {said}, which is neither None, True nor a finding")


def read_error(error: BaseException) -> Seen:
    """What an exception means: by its type and its text, as far as that is the same each time."""
    root = root_of(error)
    name, text = type(root).__name__, mask(text_of(root))
    return Seen(unread=shorten(f"{name}: {text}" if text else name), error=error)
