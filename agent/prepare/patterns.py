"""Patterns for the texts of errors: what is looked at when nothing else shows anything.

Ours name no class that lasts: a text proves nothing. An operator may name any, and vouches for it.

A search cannot be interrupted, and holds up every thread of the process. So patterns and texts are short, and
a pattern may not repeat what repeats, nor have many repeats: the time that such take explodes.
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
"""Of a text. The worst pattern that is taken then costs about two seconds; with 4,096 it would be minutes."""
OPEN_REPEATS_MAX: Final = 2
"""``*``, ``+`` and ``{1,9}`` in a pattern."""
CHOICES_MAX: Final = 4
"""``?`` and, within a group, ``|``."""
_KEYS: Final = ("match", "code", "class", "summary")
_CLASSES: Final = tuple(map(str, ErrorClass))


class Pattern(NamedTuple):
    """Texts that show a kind of failure."""

    match: re.Pattern[str]
    code: str
    error_class: ErrorClass
    summary: str = ""
    """What is said instead of the text; empty: the text."""
    confidence: float = 0.3

    def takes(self, text: str) -> bool:
        """It is found in the text."""
        return self.match.search(text[:SEARCH_CHARS]) is not None


def _ours(match: str, code: str) -> Pattern:
    return Pattern(re.compile(match, re.IGNORECASE), code, ErrorClass.TRANSIENT)


PATTERNS: Final = (
    _ours(r"device or resource busy|device is (?:busy|in use)", "text.busy"),
    _ours(r"resource temporarily unavailable|try again later", "text.try_again"),
    _ours(r"driver/library version mismatch", "gpu.driver.mismatch"),
    _ours(r"too many open files", "text.too_many_files"),
    _ours(r"connection (?:refused|reset|aborted)|broken pipe|network is unreachable|no route to host",
          "text.no_connection"),
    _ours(r"deadline exceeded|timed? ?out\b", "text.timeout"),
    _ours(r"text file busy", "text.file_busy"),
    _ours(r"no space left on device|disk quota exceeded", "text.no_space"),
    _ours(r"cannot allocate memory|out of memory", "text.no_memory"),
    _ours(r"input/output error", "text.io"),
    _ours(r"context canceled|operation (?:was )?cancell?ed", "text.cancelled"),
)  # fmt: skip
"""Ours, looked at after those of the configuration."""


def read_patterns(value: object) -> tuple[Pattern, ...]:
    """Patterns of a configuration: a list of tables ``match``, ``code``, ``class`` and perhaps ``summary``.

    Raises:
        ValueError: naming the number of the entry, what it says, and the limit.
        TypeError: likewise, for what is of another kind.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is no list of patterns; begin each with [[prepare.patterns]]")
    if len(value) > PATTERNS_MAX:
        raise ValueError(f"{len(value)} patterns, limit {PATTERNS_MAX}")
    return tuple(_read(f"pattern {number}", entry) for number, entry in enumerate(value, 1))


def _read(place: str, entry: object) -> Pattern:
    if not isinstance(entry, Mapping):
        raise TypeError(f"{place}: {entry!r} is no table of {', '.join(_KEYS)}")
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"{place}: unknown key {key!r}{suggestion(str(key), _KEYS)}")
    match, code, name = (_text(place, entry, key) for key in _KEYS[:3])
    if not is_code(code):
        raise ValueError(f"{place}: code {code!r} is no dotted code, such as fpga.bank_locked")
    if name not in _CLASSES:
        raise ValueError(
            f"{place}: class {name!r} is none of {', '.join(_CLASSES)}{suggestion(name, _CLASSES)}"
        )
    summary = _text(place, entry, "summary") if "summary" in entry else ""
    return Pattern(_compiled(place, match), code, ErrorClass(name), summary, 0.5)


def _text(place: str, entry: Mapping[object, object], key: str) -> str:
    if key not in entry:
        raise ValueError(f"{place}: {key} is missing")
    if not isinstance(text := entry[key], str):
        raise TypeError(f"{place}: {key}: {text!r} is no text; put it in quotes")
    if not text.strip():
        raise ValueError(f"{place}: {key} is empty")
    return text


def _compiled(place: str, match: str) -> re.Pattern[str]:
    if len(match) > PATTERN_CHARS:
        raise ValueError(f"{place}: match is {len(match)} characters, limit {PATTERN_CHARS}")
    try:
        compiled = re.compile(match)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise ValueError(f"{place}: match {match!r}: {error}") from None
    if compiled.search(""):
        raise ValueError(f"{place}: match {match!r} takes every text")
    if reason := _explodes(match):
        raise ValueError(f"{place}: match {match!r} {reason}")
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


def _explodes(match: str) -> str:
    """Why a search for it could take for ever; empty: it cannot."""
    groups = [False]  # of all that are open, the outermost first: something in it repeats, or can be chosen
    ended = False  # the same of the group that ended just before
    repeats = choices = 0
    for token in _TOKEN.finditer(match):
        kind = token.lastgroup
        if ended and kind in {"open_repeat", "fixed_repeat"}:
            return "repeats a group in which something repeats or can be chosen"
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
