"""What ``drahealth audit`` found, as a table; and its exit code. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.allocatable.cgroups import Level
from agent.allocatable.compare import expected_text
from agent.allocatable.evaluate import UNJUDGED
from agent.allocatable.knobs import Knob, limit_of, page_name, value_text
from agent.allocatable.verdicts import CONCERNS, Verdict
from agent.cli.output.text import GAP, Entry, Look, clean, format_age, format_count, format_entries, wrap
from agent.model.claim_sources import Origin
from agent.model.objects import Object
from agent.model.reading import Missing

if TYPE_CHECKING:
    from agent.allocatable.evaluate import JudgedPod
    from agent.allocatable.facts import NodeFacts
    from agent.allocatable.risks import Risk
    from agent.allocatable.verdicts import Compared
    from agent.cli.output.terminal import Style
    from agent.model.claim_sources import SourceAnswer
    from agent.node.cgroup_audit import Audit

KEPT: Final = Look("●", "+", "as promised", "green")
FOUND: Final = Look("▲", "!", "not as promised", "yellow")
UNKNOWN: Final = Look("◌", "?", "not judged", "magenta")
IDLE: Final = Look("·", "-", "not running", "dim")
_ORDER: Final = (FOUND, UNKNOWN, KEPT, IDLE)
LISTED_MAX: Final = 20
"""Pods that are as promised and get a line of their own."""
TITLES: Final = ("CGROUP", "KNOB", "EXPECTED", "ACTUAL", "VERDICT")
_SOURCES: Final = {Origin.PODS_API: "the kubelet's pods API", Origin.PODS_FILE: "a file"}
_COSTS: Final = "what cgroups should say follows from pods' objects, and nobody could tell any"
_GET: Final = (
    "kubectl get pods -A -o json --field-selector spec.nodeName=NODE >FILE; drahealth audit --pods FILE"
)


class Shown(NamedTuple):
    """All that there is to show."""

    node: str
    told: SourceAnswer[Object]
    """The pods' objects, or why there are none."""
    wrong: tuple[str, ...]
    """Pods that cannot be read."""
    audit: Audit
    now_s: float
    whole: bool
    """One pod in full."""


def exit_of(shown: Shown) -> int:
    """0: all as promised; 1: something is not; 3: nothing was found, and something could not be judged."""
    verdicts = {one.verdict for one in compared_of(shown.audit)}
    if verdicts & CONCERNS:
        return 1
    is_blind = shown.told.absence is not None or shown.audit.facts is None or bool(unread_of(shown))
    is_idle = shown.whole and not verdicts
    return 3 if is_blind or is_idle or verdicts & UNJUDGED else 0


def unread_of(shown: Shown) -> tuple[str, ...]:
    """Pods that could not be judged, with the reason."""
    return (*shown.wrong, *shown.audit.unread)


def compared_of(audit: Audit) -> Iterator[Compared]:
    """Every knob that was judged."""
    for pod in audit.pods:
        yield from pod.compared
    yield from audit.classes


def _look(compared: Iterable[Compared]) -> Look:
    verdicts = {one.verdict for one in compared}
    if verdicts & CONCERNS:
        return FOUND
    if verdicts & UNJUDGED:
        return UNKNOWN
    return KEPT if verdicts else IDLE


# --- for people --------------------------------------------------------------------------------------------


def render(shown: Shown, style: Style) -> str:
    """Of each pod what is not as promised; of one that is shown in full, all."""
    audit = shown.audit
    lines = [_head(shown, style)]
    if audit.pods or audit.classes:
        lines.append("")
    pods, more = _listed(audit.pods)
    for pod in pods:
        look = _look(pod.compared)
        lines.append(_pod_line(pod, look, style))
        lines += _rows(pod.compared, audit.facts, style, whole=shown.whole)
        lines += _risks(pod.risks, style)
        if pod.idle and pod.compared:
            names = clean(", ".join(pod.idle))
            lines += wrap(f"not running: {names}", style, first="    ", rest="      ", paint=("dim",))
    if more:
        told = style.paint(f"{more} more", "bold")
        lines.append(f"{_sign(KEPT, style)} {told}{GAP}{style.paint(KEPT.word, KEPT.colour)}")
    if audit.classes:
        look = _look(audit.classes)
        lines.append(f"{_sign(look, style)} QoS classes{GAP}{style.paint(look.word, look.colour)}")
        lines += _rows(audit.classes, audit.facts, style, whole=shown.whole)
    entries = [*_unknown(shown), *(Entry("not known", clean(gap)) for gap in audit.gaps)]
    if entries:
        lines += ["", *format_entries(entries, style)]
    return "\n".join([*lines, "", _sum(shown, style)]) + "\n"


def _listed(pods: Iterable[JudgedPod]) -> tuple[Sequence[JudgedPod], int]:
    """The worst first, and how many are left out of whom there is nothing to say: they would push what was
    found out of sight."""
    listed, plain = [], 0
    for pod in sorted(pods, key=lambda one: _ORDER.index(_look(one.compared))):
        is_plain = _look(pod.compared) is KEPT and not pod.risks and not pod.idle
        plain += is_plain
        if not is_plain or plain <= LISTED_MAX:
            listed.append(pod)
    return listed, max(0, plain - LISTED_MAX)


def _head(shown: Shown, style: Style) -> str:
    parts = [style.paint(clean(shown.node), "bold")]
    if facts := shown.audit.facts:
        counts = "" if facts.counts_claims else ", a kubelet that does not count claims"
        parts.append(f"cgroup v{facts.version}, {facts.driver}{counts}")
    if shown.told.absence is None:
        witness = shown.told.witness
        age = f", {format_age(shown.now_s - witness.written_s)} old" if witness.written_s else ""
        parts.append(f"{format_count(len(shown.told.items), 'pod')} in {_SOURCES[witness.origin]}{age}")
    return GAP.join(parts)


def _sign(look: Look, style: Style) -> str:
    return style.paint(look.sign if style.unicode else look.ascii, look.colour)


def _pod_line(pod: JudgedPod, look: Look, style: Style) -> str:
    counted = f", {format_count(len(pod.compared), 'knob')}" if look is KEPT else ""
    return (
        f"{_sign(look, style)} {style.paint(clean(str(pod.pod)), 'bold')}{GAP}{pod.pod.qos}{GAP}"
        f"{style.paint(look.word, look.colour)}{counted}"
    )


def _rows(
    compared: Sequence[Compared], facts: NodeFacts | None, style: Style, *, whole: bool
) -> Iterator[str]:
    """The knobs that are not well, or all; a cgroup that is gone once."""
    shown = [one for one in _gone_once(compared) if whole or one.verdict in CONCERNS | UNJUDGED]
    if not shown or facts is None:
        return
    rows = [_cells(one) for one in shown]
    widths = [max(len(row[i]) for row in (TITLES, *rows)) for i in range(len(TITLES))]

    def line(row: Sequence[str]) -> str:
        return GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    yield style.paint(f"    {line(TITLES)}", "dim")
    for one, row in zip(shown, rows, strict=True):
        look = _look([one])
        text = line(row)
        at = text.rindex(row[-1])
        yield f"    {text[:at]}{style.paint(row[-1], look.colour)}"
        yield from wrap(clean(_why(one)), style, first="      ", rest="      ", paint=("dim",))
        if one.risk:
            arrow = "→ " if style.unicode else "> "
            yield from wrap(arrow + one.risk, style, first="      ", rest="        ", paint=("cyan",))


def _gone_once(compared: Iterable[Compared]) -> Iterator[Compared]:
    gone = set()
    for one in compared:
        if one.verdict is not Verdict.VANISHED or one.group not in gone:
            yield one
        if one.verdict is Verdict.VANISHED:
            gone.add(one.group)


def _cells(one: Compared) -> tuple[str, ...]:
    name = clean(one.group.container) if one.group.level is Level.CONTAINER else "pod"
    name = one.group.qos if one.group.level is Level.QOS else name
    if one.verdict is Verdict.VANISHED:
        return (name, "all", "", "", one.verdict)
    size = f" {page_name(one.knob.size_kib)}" if one.knob.size_kib else ""
    return (name, f"{one.knob.knob}{size}", expected_text(one.expected), _actual_text(one), one.verdict)


def _why(one: Compared) -> str:
    """Without the numbers that are in the row already."""
    return one.why.removeprefix(f"{_actual_text(one)}, expected {expected_text(one.expected)}: ")


def _actual_text(one: Compared) -> str:
    if isinstance(one.actual, Missing):
        return str(one.actual.absence)
    return value_text(one.knob.knob, limited(one, one.actual))


def _risks(risks: Iterable[Risk], style: Style) -> Iterator[str]:
    for risk in risks:
        who = f"{risk.container}: " if risk.container else ""
        yield from wrap(f"{risk.code}{GAP}{clean(who + risk.what)}", style, first="    ", rest="      ")
        arrow = "→ " if style.unicode else "> "
        yield from wrap(arrow + risk.advice, style, first="      ", rest="        ", paint=("cyan",))


def _unknown(shown: Shown) -> Iterator[Entry]:
    if shown.told.absence is not None:
        yield Entry("no pods", clean(shown.told.why))
        yield Entry("", _COSTS)
        yield Entry("instead", _GET)
    for wrong in unread_of(shown):
        yield Entry("unread", clean(wrong))


def _sum(shown: Shown, style: Style) -> str:
    pods = shown.audit.pods
    if not pods:
        what = "could be judged" if exit_of(shown) == 3 else "has claims and runs"
        return f"no pod {what}"
    counts = Counter(_look(pod.compared) for pod in pods)
    told = ", ".join(
        style.paint(f"{counts[look]} {look.word}", look.colour) for look in _ORDER if counts[look]
    )
    return f"{format_count(len(pods), 'pod')}: {told}"


def limited(one: Compared, value: int) -> int:
    """A value as it is compared: "as good as none" is none, but in a set of CPUs."""
    return value if one.knob.knob in {Knob.CPUS, Knob.EFFECTIVE} else limit_of(value)
