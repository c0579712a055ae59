"""Patterns for error texts, used when neither a type nor a number determines the class.

Built-in patterns only name the transient class, because a text proves nothing. An operator's pattern may name
any class.

A search cannot be interrupted and blocks every thread of the process. So patterns and texts are short, and a
pattern may have neither nested nor many repeats: their search time grows exponentially.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from agent.errors import suggestion
from agent.model.prepare import ErrorClass
from agent.prepare.taxonomy import is_code

PATTERNS_MAX: Final = 64
PATTERN_CHARS: Final = 256
SEARCH_CHARS: Final = 1024
"""Most characters that are searched. The worst accepted pattern then takes about 2 s; with 4,096, minutes."""
OPEN_REPEATS_MAX: Final = 2
"""Most repeats ``*``, ``+`` and ``{1,9}`` in a pattern."""
CHOICES_MAX: Final = 4
"""Most choices in a pattern: ``?`` and, within a group, ``|``."""
_KEYS: Final = ("match", "code", "class", "summary")
_CLASSES: Final = tuple(map(str, ErrorClass))


class Pattern(NamedTuple):
    """Pattern for error texts, with the code and class that it stands for."""

    match: re.Pattern[str]
    code: str
    error_class: ErrorClass
    summary: str = ""
    """Summary instead of the error text; empty: the error text."""
    confidence: float = 0.3

    def matches(self, text: str) -> bool:
        """Return whether the pattern is found in the text."""
        return self.match.search(text[:SEARCH_CHARS]) is not None


def _builtin(match: str, code: str) -> Pattern:
    return Pattern(re.compile(match, re.IGNORECASE), code, ErrorClass.TRANSIENT)


PATTERNS: Final = (
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
"""Built-in patterns, tried after those of the configuration."""


def read_patterns(value: object) -> tuple[Pattern, ...]:
    """Parse the patterns of a configuration: tables of ``match``, ``code``, ``class``, maybe ``summary``.

    Raises:
        ValueError: A value is wrong; names the entry, the value and the limit.
        TypeError: A value has the wrong type; names the entry and the value.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is not a list of patterns; begin each with [[prepare.patterns]]")
    if len(value) > PATTERNS_MAX:
        raise ValueError(f"{len(value)} patterns, limit {PATTERNS_MAX}")
    return tuple(_read(f"pattern {number}", entry) for number, entry in enumerate(value, 1))


def _read(entry_name: str, entry: object) -> Pattern:
    if not isinstance(entry, Mapping):
        raise TypeError(f"{entry_name}: {entry!r} is not a table of {', '.join(_KEYS)}")
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"{entry_name}: unknown key {key!r}{suggestion(str(key), _KEYS)}")
    match, code, name = (_text(entry_name, entry, key) for key in _KEYS[:3])
    if not is_code(code):
        raise ValueError(f"{entry_name}: code {code!r} is not a dotted code, such as fpga.bank_locked")
    if name not in _CLASSES:
        raise ValueError(
            f"{entry_name}: class {name!r} is not one of {', '.join(_CLASSES)}{suggestion(name, _CLASSES)}"
        )
    summary = _text(entry_name, entry, "summary") if "summary" in entry else ""
    return Pattern(_compiled(entry_name, match), code, ErrorClass(name), summary, 0.5)


def _text(entry_name: str, entry: Mapping[object, object], key: str) -> str:
    if key not in entry:
        raise ValueError(f"{entry_name}: {key} is missing")
    if not isinstance(text := entry[key], str):
        raise TypeError(f"{entry_name}: {key}: {text!r} is not a string; put it in quotes")
    if not text.strip():
        raise ValueError(f"{entry_name}: {key} is empty")
    return text


def _compiled(entry_name: str, match: str) -> re.Pattern[str]:
    if len(match) > PATTERN_CHARS:
        raise ValueError(f"{entry_name}: match is {len(match)} characters, limit {PATTERN_CHARS}")
    try:
        compiled = re.compile(match)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise ValueError(f"{entry_name}: match {match!r}: {error}") from None
    if compiled.search(""):
        raise ValueError(f"{entry_name}: match {match!r} matches every text")
    if reason := _backtracking_risk(match):
        raise ValueError(f"{entry_name}: match {match!r} {reason}")
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
    """Return why a search with the pattern could take exponential time; empty: the pattern is safe."""
    groups = [False]  # open groups, the outermost first: whether the group has a repeat or a choice
    ended = False  # the same for the group that has just closed
    repeats = choices = 0
    for token in _TOKEN.finditer(match):
        kind = token.lastgroup
        if ended and kind in {"open_repeat", "fixed_repeat"}:
            return "repeats a group that has a repeat or a choice"
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
        return f"has {repeats} open repeats, limit {OPEN_REPEATS_MAX}"
    if choices > CHOICES_MAX:
        return f"has {choices} choices within groups, limit {CHOICES_MAX}"
    return ""
