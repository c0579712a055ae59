"""Regular expressions for error texts, used if neither exception type nor error number shows the class.

Built-in patterns only name the class transient, because a text proves nothing. An operator's pattern may name
any class. A search cannot be interrupted and blocks all threads. So texts are short, and a pattern may have
neither nested nor many repeats, whose search time grows exponentially.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agent.errors import suggestion
from agent.model.prepare import ErrorClass
from agent.prepare.failure_kinds import is_dotted_code

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


class ErrorPattern(NamedTuple):
    """Regular expression for error texts, with the code and class of a failure whose text matches."""

    match: re.Pattern[str]
    code: str
    error_class: ErrorClass
    summary: str = ""
    """Summary of a failure that matches, for operators; empty: the error text."""
    confidence: float = 0.3
    """Confidence in the class of a failure that matches, from 0 to 1."""

    def matches(self, text: str) -> bool:
        """Return True if the regular expression matches a part of an error text."""
        return self.match.search(text[:SEARCH_CHARS]) is not None


def _builtin(match: str, code: str) -> ErrorPattern:
    return ErrorPattern(re.compile(match, re.IGNORECASE), code, ErrorClass.TRANSIENT)


BUILTIN_PATTERNS: Final = (
    _builtin(r"device or resource busy|device is (?:busy|in use)", "text.busy"),
    _builtin(r"resource temporarily unavailable|try again later", "text.try_again"),
    _builtin(r"driver/library version mismatch", "gpu.driver.mismatch"),
    _builtin(r"too many open files", "text.too_many_files"),
    _builtin(r"connection (?:refused|reset|aborted)|broken pipe|network is unreachable|no route to host",
          "text.no_connection"),
    _builtin(r"deadline exceeded|timed? ?out\b", "text.timeout"),
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
