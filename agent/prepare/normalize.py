"""Texts of others made fit for the kubelet: one line, valid, and the same each time.

Kubernetes counts an event whose text is the same, and throttles those that differ. So what differs from one
try to the next is masked in texts that nobody of ours wrote. A driver's own words are only cleaned.
"""

import re
from typing import Final, NamedTuple

SUMMARY_CHARS: Final = 200
TEXT_CHARS: Final = 4096
"""What is looked at of a text: an exception may hold a whole file."""
_CUT: Final = "..."
_OBJECT: Final = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


class Mask(NamedTuple):
    """One thing that differs from one try to the next."""

    match: re.Pattern[str]
    instead: str


def _mask(match: str, instead: str) -> Mask:
    return Mask(re.compile(match), instead)


MASKS: Final = (
    # 2026-11-21T10:04:04.123Z, 2026/11/21 10:04:04
    _mask(r"\b\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z\b| ?[+-]\d\d:?\d\d\b)?", "<time>"),
    _mask(r"(?<![\d:.])\d\d:\d\d:\d\d(?:[.,]\d+)?(?![\d:])", "<time>"),  # no part of a PCI or MAC address
    _mask(
        r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d? [A-Z][a-z]{2} \d{4} (?:\d\d:\d\d:\d\d|<time>)(?: GMT)?",
        "<time>",
    ),
    _mask(r"\b1\d{9}\.\d+\b", "<time>"),  # seconds since 1970 with a fraction; without one they may be bytes
    _mask(
        r"(?i)\b((?:request|req|trace|span|correlation|session)[-_ ]?id[\"']?[ =:]+[\"']?)[\w.-]+", r"\1<id>"
    ),
    _mask(r"(?i)\b(resourceversion[\"']?[ =:]+[\"']?)\d+", r"\1<version>"),
    # Not a GPU's: those say which
    _mask(r"(?i)(?<![\w-])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![\w-])", "<uuid>"),
    _mask(r"\b0x[0-9a-fA-F]{6,}\b", "<address>"),  # short ones are registers and error codes
    _mask(r"(?i)\b(pid|tid|process|thread|fd)([ =:#]+)\d+\b", r"\1\2<number>"),
    _mask(r"(?i)\b(attempt|retry|try)([ =:#]+)\d+(?:/\d+)?", r"\1\2<number>"),
    _mask(r"(\b\d{1,3}(?:\.\d{1,3}){3}|\blocalhost|\[[0-9a-fA-F:]+\]):\d{1,5}\b", r"\1:<port>"),
    _mask(r"(?i)\b(port[ =:]+)\d+\b", r"\1<port>"),
    _mask(
        r"\b(?:\d+(?:\.\d+)?(?:h|m(?=\d)))*\d+(?:\.\d+)? ?(?:ns|us|ms|s|secs?|seconds?|minutes?)\b",
        "<duration>",
    ),
    _mask(r"(?<![\w/])(/(?:var/)?tmp/)[^\s'\":,)\]]+", r"\1<name>"),
    # As Python's tempfile makes them, with and without a beginning of the caller's
    _mask(r"(?<=/)tmp[a-z0-9_]{8}(?![\w.-])|\btmp(?=[a-z0-9_]{8}\b)[a-z0-9_]*[0-9_][a-z0-9_]*", "<name>"),
    _mask(r"(/\.[\w.-]*[._-])(?=[a-z_]{0,7}\d)[a-z0-9_]{8}(?![\w.-])", r"\1<name>"),
    _mask(r"(\.te?mp[._-]?)(?=[A-Za-z_-]*\d)[\w-]+", r"\1<name>"),
    _mask(r"(/proc/)\d+\b", r"\1<number>"),
    _mask(r"\b(Task|Thread|Process|ThreadPoolExecutor)-\d+(?:_\d+)?\b", r"\1-<number>"),
    _mask(r"(?<![\w-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b|\b[0-9a-f]{32,}\b", "<hex>"),
    _mask(r"\b\d{16,}\b", "<number>"),  # nanoseconds since 1970
)
"""In this order: what one leaves, the next ones look at."""


def text_of(error: BaseException) -> str:
    """What an exception says of itself, as far as it is looked at; one that cannot speak says nothing."""
    try:
        return str(error)[:TEXT_CHARS]
    except BaseException:  # whose __str__ is broken, or ends the program, is no reason to do so in turn
        return ""


def clean(text: str) -> str:
    """One line of printable characters, without the addresses of Python's own objects."""
    text = text[:TEXT_CHARS].encode("utf-8", "replace").decode()
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return _OBJECT.sub("", " ".join(line.split()))


def mask(text: str) -> str:
    """A text of others, cleaned, without what differs from one try to the next."""
    text = clean(text)
    for one in MASKS:
        text = one.match.sub(one.instead, text)
    return text


def shorten(text: str, limit: int = SUMMARY_CHARS) -> str:
    """At most ``limit`` characters; what is cut ends in ``...``."""
    return text if len(text) <= limit else text[: limit - len(_CUT)].rstrip() + _CUT
