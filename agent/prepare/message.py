"""Text for the kubelet about a claim that was not prepared: one line, the same bytes for the same facts.

The kubelet shows the error of one claim, whichever it meets first. So each text names all claims that failed
in the call. Class, code, devices and the other claims always fit; the detail is cut first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent.health.verdict import LIMIT, truncated
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.normalize import sanitize
from agent.prepare.taxonomy import Retry, row_of

CODE_BYTES: Final = 80
DEVICES_BYTES: Final = 260
REQUESTS_BYTES: Final = 80
OTHERS_BYTES: Final = 320
"""Limit for all other failed claims together; the text then has 100 bytes left for the summary."""
OTHER_BYTES: Final = 200
"""Limit for the entry of one other failed claim, whose name alone can have 317 bytes."""
END_BYTES: Final = 40
"""Bytes that are kept at the end of a shortened claim name."""

NODE_OR_DRIVER: Final = "the node or its driver must be fixed"
FOLLOWS: Final[Mapping[ErrorClass, str]] = {
    ErrorClass.UNKNOWN: "the kubelet retries",
    ErrorClass.TRANSIENT: "the kubelet retries",
    ErrorClass.BAD_CONFIG: "the claim must change",
    ErrorClass.FAILED_DEVICE: "the device is Unhealthy, its taint is offered",
    ErrorClass.PERMANENT: NODE_OR_DRIVER,
}


def kubelet_text(verdict: PrepareVerdict, others: Sequence[PrepareVerdict] = ()) -> str:
    """Return the error text for the kubelet, at most 1,024 bytes of UTF-8.

    Args:
        others: Verdicts of the same call; the claim's own verdict among them is ignored.
    """
    return _text(verdict, sorted({_other(other) for other in others if other.claim != verdict.claim}))


def kubelet_texts(verdicts: Sequence[PrepareVerdict]) -> list[str]:
    """Return the :func:`kubelet_text` of each claim that failed in one call, in linear time."""
    own_entries = [_other(verdict) for verdict in verdicts]
    counts = Counter(own_entries)
    entries = sorted(counts)
    index = {entry: at for at, entry in enumerate(entries)}
    lines = []
    for verdict, own in zip(verdicts, own_entries, strict=True):
        at = index[own]
        lines.append(_text(verdict, entries if counts[own] > 1 else [*entries[:at], *entries[at + 1 :]]))
    return lines


def _text(verdict: PrepareVerdict, others: Sequence[str]) -> str:
    retry = row_of(verdict.code, verdict.error_class).retry
    head = " ".join([
        f"class={verdict.error_class}",
        f"code={truncated(_word(verdict.code), CODE_BYTES)}",
        *_field("device", map(str, verdict.devices), DEVICES_BYTES),
        *_field("request", verdict.requests, REQUESTS_BYTES),
        f"retry={retry}",
    ])  # fmt: skip
    tail = f" Other failing claims in this call: {_listed(others, ', ', OTHERS_BYTES)}." if others else ""
    follows = f"; {NODE_OR_DRIVER if retry is Retry.AFTER_FIX else FOLLOWS[verdict.error_class]}."
    room = LIMIT - _size(f"[{head}] ") - _size(follows) - _size(tail)
    summary = truncated(_open_ended(sanitize(verdict.summary)) or "no reason given", room)
    room -= _size(summary) + 1
    detail = sanitize(verdict.detail)
    if detail and detail[-1] not in ".!?":
        detail += "."
    detail = f" {truncated(detail, room)}" if detail and room >= 16 else ""
    return f"[{head}] {summary}{follows}{detail}{tail}"


def _open_ended(summary: str) -> str:
    """Return the summary without its final stop; a cut summary keeps its dots."""
    bare = summary.rstrip(".;, ")
    return f"{bare}..." if bare and summary.endswith("...") else bare


def _field(name: str, values: Iterable[str], limit: int) -> list[str]:
    words = sorted({_word(value) for value in values})
    return [f"{name}={_listed(words, ',', limit)}"] if words else []


def _other(verdict: PrepareVerdict) -> str:
    """Return the entry for another failed claim: its name, class, code and the broken device."""
    words = [str(verdict.error_class), truncated(_word(verdict.code), CODE_BYTES)]
    if verdict.error_class is ErrorClass.FAILED_DEVICE:
        words += _field("device", map(str, verdict.devices), OTHER_BYTES // 2)
    about = f" ({' '.join(words)})"
    return _inside(_word(str(verdict.claim)), OTHER_BYTES) + about


def _inside(name: str, limit: int) -> str:
    """Return the name without its middle if it is too long: generated names differ in their last part."""
    data = name.encode()
    if len(data) <= limit:
        return name
    return truncated(name, limit - END_BYTES) + data[-END_BYTES:].decode("utf-8", "ignore")


def _listed(words: Sequence[str], separator: str, limit: int) -> str:
    """Join the entries that fit, at least one (cut if necessary), and add the number of the others."""
    if len(words) <= limit and _size(line := separator.join(words)) <= limit:
        return line
    count = 1
    while count + 1 < len(words) and _size(_line(words, separator, count + 1)) <= limit:
        count += 1
    line = _line(words, separator, count)
    if _size(line) <= limit:
        return line
    more = line[len(words[0]) :]
    return truncated(words[0], limit - _size(more)) + more


def _line(words: Sequence[str], separator: str, count: int) -> str:
    more = len(words) - count
    return separator.join(words[:count]) + (f" and {more} more" if more else "")


def _word(value: str) -> str:
    """Return a value for the kubelet's text, with spaces, brackets, commas and equal signs replaced."""
    return sanitize(value).translate(_PLAIN) or "-"


_PLAIN: Final = str.maketrans({" ": "_", "[": "(", "]": ")", ",": "_", "=": "_"})


def _size(line: str) -> int:
    return len(line.encode())
