"""Normalization of error texts for the kubelet: one printable line, equal for each try of the same failure.

Kubernetes merges events with equal texts and throttles those that differ. So parts that change between tries,
such as times, are replaced in texts of other libraries. Texts of drahealth and the driver are only sanitized.
"""

import re
from typing import Final, NamedTuple

SUMMARY_CHARS: Final = 200
TEXT_CHARS: Final = 4096
"""Length to which texts are cut, since an exception may hold a whole file [characters]."""
_CUT: Final = "..."
_OBJECT: Final = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


class TextMask(NamedTuple):
    """Regular expression for a part of an error text that differs between tries, and its replacement."""

    pattern: re.Pattern[str]
    replacement: str


def _mask(pattern: str, replacement: str) -> TextMask:
    return TextMask(re.compile(pattern), replacement)


TEXT_MASKS: Final = (
    # 2026-11-21T10:04:04.123Z, 2026/11/21 10:04:04
    _mask(r"\b\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z\b| ?[+-]\d\d:?\d\d\b)?", "<time>"),
    _mask(r"(?<![\d:.])\d\d:\d\d:\d\d(?:[.,]\d+)?(?![\d:])", "<time>"),  # not part of a PCI or MAC address
    _mask(
        r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d\d? [A-Z][a-z]{2} \d{4} (?:\d\d:\d\d:\d\d|<time>)(?: GMT)?",
        "<time>",
    ),
    _mask(r"\b1\d{9}\.\d+\b", "<time>"),  # seconds since 1970 with a fraction; without one they may be bytes
    _mask(
        r"(?i)\b((?:request|req|trace|span|correlation|session)[-_ ]?id[\"']?[ =:]+[\"']?)[\w.-]+", r"\1<id>"
    ),
    _mask(r"(?i)\b(resourceversion[\"']?[ =:]+[\"']?)\d+", r"\1<version>"),
    # GPU UUIDs have a prefix and stay: they name the device
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
    # names of Python's tempfile, with and without a prefix
    _mask(r"(?<=/)tmp[a-z0-9_]{8}(?![\w.-])|\btmp(?=[a-z0-9_]{8}\b)[a-z0-9_]*[0-9_][a-z0-9_]*", "<name>"),
    _mask(r"(/\.[\w.-]*[._-])(?=[a-z_]{0,7}\d)[a-z0-9_]{8}(?![\w.-])", r"\1<name>"),
    _mask(r"(\.te?mp[._-]?)(?=[A-Za-z_-]*\d)[\w-]+", r"\1<name>"),
    _mask(r"(/proc/)\d+\b", r"\1<number>"),
    _mask(r"\b(Task|Thread|Process|ThreadPoolExecutor)-\d+(?:_\d+)?\b", r"\1-<number>"),
    _mask(r"(?<![\w-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}\b|\b[0-9a-f]{32,}\b", "<hex>"),
    _mask(r"\b\d{16,}\b", "<number>"),  # nanoseconds since 1970
)
"""Replacements of parts that differ between tries, applied in this order."""


def exception_text(error: BaseException) -> str:
    """Return the exception's text, cut to :data:`TEXT_CHARS`; empty if ``str()`` fails."""
    try:
        return str(error)[:TEXT_CHARS]
    except BaseException:  # a broken __str__ must not end the caller
        return ""


def sanitize(text: str) -> str:
    """Return a text as one line of printable characters, without memory addresses of Python objects."""
    text = text[:TEXT_CHARS].encode("utf-8", "replace").decode()
    line = "".join(char if char.isprintable() else " " for char in text)
    return _OBJECT.sub("", " ".join(line.split()))


def normalize(text: str) -> str:
    """Sanitize an error text and replace parts that change between tries, such as times and PIDs."""
    text = sanitize(text)
    for mask in TEXT_MASKS:
        text = mask.pattern.sub(mask.replacement, text)
    return text


def shorten(text: str, limit: int = SUMMARY_CHARS) -> str:
    """Cut a text to ``limit`` characters; a cut text ends in ``...``."""
    return text if len(text) <= limit else text[: limit - len(_CUT)].rstrip() + _CUT
