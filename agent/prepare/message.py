"""What the kubelet is told of a claim that was not prepared: one line, the same bytes for the same facts.

The kubelet shows one claim of one driver, whichever it comes upon first. So the text of each names all that
failed in the call. Class, code, devices and the others come through however long the rest is; the detail goes
first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent.health.message import LIMIT, cut
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.normalize import clean
from agent.prepare.taxonomy import Retry, row_of

CODE_BYTES: Final = 80
DEVICES_BYTES: Final = 260
REQUESTS_BYTES: Final = 80
OTHERS_BYTES: Final = 320
"""With all these, the words between them and what follows, 100 bytes are left for the summary."""
OTHER_BYTES: Final = 200
"""Of one of the others: a claim's name alone can have 317..."""
END_BYTES: Final = 40
"""...of which its last ones stay."""

MENDED: Final = "the node or its driver must be mended"
FOLLOWS: Final[Mapping[ErrorClass, str]] = {
    ErrorClass.UNKNOWN: "it is tried again",
    ErrorClass.TRANSIENT: "it is tried again",
    ErrorClass.BAD_CONFIG: "the claim must change",
    ErrorClass.FAILED_DEVICE: "the device is Unhealthy, its taint is offered",
    ErrorClass.PERMANENT: MENDED,
}


def text(verdict: PrepareVerdict, others: Sequence[PrepareVerdict] = ()) -> str:
    """At most 1,024 bytes of UTF-8.

    Args:
        others: What else failed in the same call; the claim's own verdict among them does not matter.
    """
    return _text(verdict, sorted({_other(other) for other in others if other.claim != verdict.claim}))


def texts(verdicts: Sequence[PrepareVerdict]) -> list[str]:
    """The text of each of all that failed in one call, as :func:`text` says it, without n times n work."""
    others = [_other(verdict) for verdict in verdicts]
    times = Counter(others)
    told = sorted(times)
    place = {other: at for at, other in enumerate(told)}
    lines = []
    for verdict, own in zip(verdicts, others, strict=True):
        at = place[own]
        lines.append(_text(verdict, told if times[own] > 1 else [*told[:at], *told[at + 1 :]]))
    return lines


def _text(verdict: PrepareVerdict, told: Sequence[str]) -> str:
    retry = row_of(verdict.code, verdict.error_class).retry
    head = " ".join([
        f"class={verdict.error_class}",
        f"code={cut(_word(verdict.code), CODE_BYTES)}",
        *_field("device", map(str, verdict.devices), DEVICES_BYTES),
        *_field("request", verdict.requests, REQUESTS_BYTES),
        f"retry={retry}",
    ])  # fmt: skip
    tail = f" Other failing claims in this call: {_listed(told, ', ', OTHERS_BYTES)}." if told else ""
    follows = f"; {MENDED if retry is Retry.AFTER_FIX else FOLLOWS[verdict.error_class]}."
    room = LIMIT - _size(f"[{head}] ") - _size(follows) - _size(tail)
    summary = cut(_open_ended(clean(verdict.summary)) or "no reason given", room)
    room -= _size(summary) + 1
    detail = clean(verdict.detail)
    if detail and detail[-1] not in ".!?":
        detail += "."
    detail = f" {cut(detail, room)}" if detail and room >= 16 else ""
    return f"[{head}] {summary}{follows}{detail}{tail}"


def _open_ended(summary: str) -> str:
    """Without the stop at its end, for it goes on; one that was cut still says so."""
    bare = summary.rstrip(".;, ")
    return f"{bare}..." if bare and summary.endswith("...") else bare


def _field(name: str, values: Iterable[str], limit: int) -> list[str]:
    words = sorted({_word(value) for value in values})
    return [f"{name}={_listed(words, ',', limit)}"] if words else []


def _other(verdict: PrepareVerdict) -> str:
    """A claim, its class and code, and the device to blame."""
    words = [str(verdict.error_class), cut(_word(verdict.code), CODE_BYTES)]
    if verdict.error_class is ErrorClass.FAILED_DEVICE:
        words += _field("device", map(str, verdict.devices), OTHER_BYTES // 2)
    about = f" ({' '.join(words)})"
    return _inside(_word(str(verdict.claim)), OTHER_BYTES) + about


def _inside(name: str, limit: int) -> str:
    """Without its middle, if it is too long: names that are generated differ in what they end in."""
    data = name.encode()
    if len(data) <= limit:
        return name
    return cut(name, limit - END_BYTES) + data[-END_BYTES:].decode("utf-8", "ignore")


def _listed(words: Sequence[str], separator: str, limit: int) -> str:
    """As many as fit, and how many more there are; at least one, cut if need be."""
    if len(words) <= limit and _size(line := separator.join(words)) <= limit:
        return line
    count = 1
    while count + 1 < len(words) and _size(_line(words, separator, count + 1)) <= limit:
        count += 1
    line = _line(words, separator, count)
    if _size(line) <= limit:
        return line
    more = line[len(words[0]) :]
    return cut(words[0], limit - _size(more)) + more


def _line(words: Sequence[str], separator: str, count: int) -> str:
    more = len(words) - count
    return separator.join(words[:count]) + (f" and {more} more" if more else "")


def _word(value: str) -> str:
    """Without what would end the value, or the brackets: a driver may write anything."""
    return clean(value).translate(_PLAIN) or "-"


_PLAIN: Final = str.maketrans({" ": "_", "[": "(", "]": ")", ",": "_", "=": "_"})


def _size(line: str) -> int:
    return len(line.encode())
