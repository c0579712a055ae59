"""Error text for the kubelet about a claim that was not prepared: one line, equal for equal failures.

The kubelet shows the error of only one claim of a call, and calls the pod's next driver only if this one
succeeded. So each text names all failed claims of the call, and those that failed at the pod's other drivers.
Class, code, devices and the other claims always fit; the detail is cut first. Lists have a limit that leaves
room for the rest, and fill the room that the rest does not need: devices first, then requests, then claims.

The module also has the normalization of error texts for the kubelet: one printable line, equal for each try
of the same failure.

Kubernetes merges events with equal texts and throttles those that differ. So parts that change between tries,
such as times, are replaced in texts of other libraries. Texts of drahealth and the driver are only sanitized.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.health.verdict import MAX_MESSAGE_BYTES, truncate_utf8
from agent.model.claim import ClaimRef
from agent.model.prepare import ErrorClass, OtherDriverFailure, PrepareVerdict
from agent.prepare.failure_kinds import RetryCondition, failure_kind

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
    _mask(r"(?i)\b(port[ =:]+)\d{4,5}\b", r"\1<port>"),  # one digit is a port of a NIC
    _mask(
        r"\b(?:\d+(?:\.\d+)?(?:h|m(?=\d)))*\d+(?:\.\d+)? ?(?:ns|[uµμ]s|ms|s|secs?|seconds?|minutes?)\b",
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


# --- message for the kubelet -------------------------------------------------------------------------------

CODE_BYTES: Final = 80
DEVICES_BYTES: Final = 260
REQUESTS_BYTES: Final = 80
OTHERS_BYTES: Final = 320
"""Limit of the list of other failed claims in the error text [bytes].

100 bytes are left for the summary. The lists of devices, requests and claims may be longer where summary and
detail leave room.
"""
SHARED_OTHERS_BYTES: Final = 140
ELSEWHERE_BYTES: Final = 120
"""Limit of each of two lists of claims [bytes]: those that failed in the same call, and at other drivers.

Both lists together need no more than OTHERS_BYTES.
"""
OTHER_BYTES: Final = 200
"""Limit of the text about one claim in a list of failed claims [bytes]; a name can have 317 bytes."""
END_BYTES: Final = 40
"""Number of bytes that are kept at the end of a shortened claim name."""

NODE_OR_DRIVER: Final = "the node or its driver must be fixed"
CONSEQUENCE_TEXTS: Final[Mapping[ErrorClass, str]] = {
    ErrorClass.UNKNOWN: "the kubelet retries",
    ErrorClass.TRANSIENT: "the kubelet retries",
    ErrorClass.BAD_CONFIG: "the claim must change",
    ErrorClass.FAILED_DEVICE: "the device is Unhealthy, its taint is offered",
    ErrorClass.PERMANENT: NODE_OR_DRIVER,
}


def kubelet_text(verdict: PrepareVerdict, others: Sequence[PrepareVerdict] = ()) -> str:
    """Return the error text for the kubelet, at most 1,024 bytes of UTF-8.

    Args:
        others: Verdicts on all claims that failed in the same call; the one on the claim itself is ignored.
    """
    return _format_text(
        verdict, sorted({_describe_other_claim(other) for other in others if other.claim != verdict.claim})
    )


def kubelet_texts(
    verdicts: Sequence[PrepareVerdict],
    elsewhere: Callable[[ClaimRef], Sequence[OtherDriverFailure]] = lambda _: (),
) -> list[str]:
    """Return the :func:`kubelet_text` of each claim that failed in one call.

    Args:
        elsewhere: Function that returns the failures of other drivers for the pods that use a claim.
    """
    own_entries = [_describe_other_claim(verdict) for verdict in verdicts]
    counts = Counter(own_entries)
    entries = sorted(counts)
    index = {entry: at for at, entry in enumerate(entries)}
    lines = []
    for verdict, own in zip(verdicts, own_entries, strict=True):
        at = index[own]
        others = entries if counts[own] > 1 else [*entries[:at], *entries[at + 1 :]]
        at_drivers = {
            _describe_other_claim(other.verdict, other.driver) for other in elsewhere(verdict.claim)
        }
        lines.append(_format_text(verdict, others, sorted(at_drivers)))
    return lines


def _format_text(verdict: PrepareVerdict, others: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    lists = {
        "device": _BoundedList(_unique_words(map(str, verdict.devices)), ",", DEVICES_BYTES),
        "request": _BoundedList(_unique_words(verdict.requests), ",", REQUESTS_BYTES),
        "others": _BoundedList(others, ", ", SHARED_OTHERS_BYTES if elsewhere else OTHERS_BYTES),
        "elsewhere": _BoundedList(elsewhere, ", ", ELSEWHERE_BYTES),
    }
    joined = {name: _join_bounded(*each) for name, each in lists.items()}
    line = _compose_text(verdict, **joined)
    for name, each in lists.items():
        spare = MAX_MESSAGE_BYTES - _byte_count(line)
        if each.words and spare > 0:
            joined[name] = _join_bounded(each.words, each.separator, _byte_count(joined[name]) + spare)
            line = _compose_text(verdict, **joined)
    return line


class _BoundedList(NamedTuple):
    """List in the error text for the kubelet, and the number of bytes that are always left for it."""

    words: Sequence[str]
    separator: str
    limit: int


def _compose_text(verdict: PrepareVerdict, *, device: str, request: str, others: str, elsewhere: str) -> str:
    retry = failure_kind(verdict.code, verdict.error_class).retry
    head = " ".join([
        f"class={verdict.error_class}",
        f"code={truncate_utf8(_escape_separators(verdict.code), CODE_BYTES)}",
        *([f"device={device}"] if device else []),
        *([f"request={request}"] if request else []),
        f"retry={retry}",
    ])  # fmt: skip
    tail = f" Other failing claims in this call: {others}." if others else ""
    tail += f" Failing claims of the pod's other drivers: {elsewhere}." if elsewhere else ""
    is_fix_needed = retry is RetryCondition.AFTER_FIX
    follows = f"; {NODE_OR_DRIVER if is_fix_needed else _consequence(verdict)}."
    room = MAX_MESSAGE_BYTES - _byte_count(f"[{head}] ") - _byte_count(follows) - _byte_count(tail)
    summary = truncate_utf8(_strip_punctuation(sanitize(verdict.summary)) or "no reason given", room)
    room -= _byte_count(summary) + 1
    detail = sanitize(verdict.detail)
    if detail and detail[-1] not in ".!?":
        detail += "."
    detail = f" {truncate_utf8(detail, room)}" if detail and room >= 16 else ""
    return f"[{head}] {summary}{follows}{detail}{tail}"


def _consequence(verdict: PrepareVerdict) -> str:
    """Return the consequence of a failed prepare as text, such as ``the kubelet retries``.

    For several broken devices the text has their number and the number of requested devices.
    """
    count = len(set(verdict.devices))
    if verdict.error_class is not ErrorClass.FAILED_DEVICE or count < 2:
        return CONSEQUENCE_TEXTS[verdict.error_class]
    broken = f"{count} of {verdict.request_devices}" if verdict.request_devices >= count else f"{count}"
    return f"{broken} devices are Unhealthy, their taints are offered"


def _strip_punctuation(summary: str) -> str:
    """Return the summary of a failure without its final punctuation; the dots of a cut summary stay."""
    bare = summary.rstrip(".;, ")
    return f"{bare}..." if bare and summary.endswith("...") else bare


def _unique_words(values: Iterable[str]) -> list[str]:
    return sorted({_escape_separators(value) for value in values})


def _describe_other_claim(verdict: PrepareVerdict, driver: str = "") -> str:
    """Describe another failed claim for the kubelet's text: name, driver, class, code and broken device."""
    words = [str(verdict.error_class), truncate_utf8(_escape_separators(verdict.code), CODE_BYTES)]
    if driver:
        words.insert(0, driver)
    if verdict.error_class is ErrorClass.FAILED_DEVICE and verdict.devices:
        devices = _join_bounded(_unique_words(map(str, verdict.devices)), ",", OTHER_BYTES // 2)
        words.append(f"device={devices}")
    about = f" ({' '.join(words)})"
    return _cut_middle(_escape_separators(str(verdict.claim)), OTHER_BYTES) + about


def _cut_middle(name: str, limit: int) -> str:
    """Cut the middle out of a claim's name that is longer than ``limit`` bytes.

    The end stays, because generated names differ there.
    """
    data = name.encode()
    if len(data) <= limit:
        return name
    return truncate_utf8(name, limit - END_BYTES) + data[-END_BYTES:].decode("utf-8", "ignore")


def _join_bounded(words: Sequence[str], separator: str, limit: int) -> str:
    """Join as many words of a list as fit within ``limit`` bytes, at least one, and append "and N more"."""
    if len(words) <= limit and _byte_count(line := separator.join(words)) <= limit:
        return line
    count = 1
    while count + 1 < len(words) and _byte_count(_join_with_count(words, separator, count + 1)) <= limit:
        count += 1
    line = _join_with_count(words, separator, count)
    if _byte_count(line) <= limit:
        return line
    more = line[len(words[0]) :]
    return truncate_utf8(words[0], limit - _byte_count(more)) + more


def _join_with_count(words: Sequence[str], separator: str, count: int) -> str:
    more = len(words) - count
    return separator.join(words[:count]) + (f" and {more} more" if more else "")


def _escape_separators(value: str) -> str:
    """Replace spaces, brackets, commas and equal signs, which separate fields in the kubelet's text."""
    return sanitize(value).translate(_PLAIN) or "-"


_PLAIN: Final = str.maketrans({" ": "_", "[": "(", "]": ")", ",": "_", "=": "_"})


def _byte_count(line: str) -> int:
    return len(line.encode())
