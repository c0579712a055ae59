"""Result of an audit as a table, as JSON and as an exit code. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.allocatable.cgroups import Level
from agent.allocatable.compare import expected_text
from agent.allocatable.evaluate import INCONCLUSIVE
from agent.allocatable.settings import SettingKind, file_of, limit_of, page_name, value_text
from agent.allocatable.verdicts import DRIFT, AuditVerdict
from agent.cli.output.json import API_VERSION, ObjectKeys, each
from agent.cli.output.table import (
    GAP,
    Cell,
    ListEntry,
    Paragraph,
    TextTable,
    advice,
    format_entries,
    wrap,
)
from agent.cli.output.text import Badge, clean, format_age, format_count
from agent.model.cgroup import NO_LIMIT
from agent.model.claim_sources import Origin
from agent.model.cpuset import format_cpus
from agent.model.objects import Object
from agent.model.reading import Missing
from agent.model.time import rfc3339

if TYPE_CHECKING:
    from agent.allocatable.evaluate import PodAudit
    from agent.allocatable.facts import NodeFacts
    from agent.allocatable.risks import Risk
    from agent.allocatable.verdicts import SettingComparison
    from agent.cli.output.terminal import TextStyle
    from agent.model.claim_sources import SourceAnswer
    from agent.node.cgroup_audit import CgroupComparisonResult

EXPECTED: Final = Badge("●", "+", "as expected", "green")
UNEXPECTED: Final = Badge("▲", "!", "not as expected", "yellow")
UNKNOWN: Final = Badge("◌", "?", "not evaluated", "magenta")
IDLE: Final = Badge("·", "-", "not running", "dim")
_ORDER: Final = (UNEXPECTED, UNKNOWN, EXPECTED, IDLE)
MAX_LISTED: Final = 20
"""Pods without findings that get a line of their own."""
_SOURCES: Final = {Origin.PODS_API: "the kubelet's pods API", Origin.PODS_FILE: "a file"}
_CONSEQUENCE: Final = "without the pods' objects, the expected cgroup values cannot be computed"
_ALTERNATIVE: Final = (
    "kubectl get pods -A -o json --field-selector spec.nodeName=NODE >FILE; drahealth audit --pods FILE"
)
_CPU_SETS: Final = frozenset({SettingKind.CPUS, SettingKind.EFFECTIVE})


class AuditReport(NamedTuple):
    """Result of an audit, with the pod objects that it is based on."""

    node: str
    answer: SourceAnswer[Object]
    """Pod objects that were read, or the reason why there are none."""
    wrong: tuple[str, ...]
    """Pods whose objects cannot be used, each with the reason."""
    audit: CgroupComparisonResult
    now_s: float
    whole: bool
    """True: every comparison of one pod is shown; False: only the findings of each pod."""


def exit_of(report: AuditReport) -> int:
    """Return 0: all cgroup settings are as expected; 1: one differs; 3: none differs, some are unknown."""
    verdicts = {comparison.verdict for comparison in compared_of(report.audit)}
    if verdicts & DRIFT:
        return 1
    is_blind = report.answer.absence is not None or report.audit.facts is None or bool(unread_of(report))
    is_idle = report.whole and not verdicts
    return 3 if is_blind or is_idle or verdicts & INCONCLUSIVE else 0


def unread_of(report: AuditReport) -> tuple[str, ...]:
    """Return the pods that could not be audited, each with the reason."""
    return (*report.wrong, *report.audit.unreadable)


def compared_of(audit: CgroupComparisonResult) -> Iterator[SettingComparison]:
    """Yield the comparison of each cgroup setting with its expected value."""
    for pod in audit.pods:
        yield from pod.compared
    yield from audit.classes


def _badge(compared: Iterable[SettingComparison]) -> Badge:
    verdicts = {comparison.verdict for comparison in compared}
    if verdicts & DRIFT:
        return UNEXPECTED
    if verdicts & INCONCLUSIVE:
        return UNKNOWN
    return EXPECTED if verdicts else IDLE


# --- table -------------------------------------------------------------------------------------------------


def render(report: AuditReport, style: TextStyle) -> str:
    """Return the findings of each pod; of a pod that is shown in full, every comparison."""
    audit = report.audit
    lines = [_headline(report, style)]
    if audit.pods or audit.classes:
        lines.append("")
    pods, more = _listed(audit.pods)
    for pod in pods:
        lines.append(_pod_line(pod, style))
        lines += _rows(pod.compared, style, whole=report.whole)
        lines += _risks(pod.risks, style)
        if pod.idle and pod.compared:
            names = clean(", ".join(pod.idle))
            lines += wrap(f"not running: {names}", style, first="    ", rest="      ", paint=("dim",))
    if more:
        number = style.paint(f"{more} more", "bold")
        lines.append(f"{EXPECTED.mark(style)} {number}{GAP}{EXPECTED.label(style)}")
    if audit.classes:
        badge = _badge(audit.classes)
        lines.append(f"{badge.mark(style)} QoS classes{GAP}{badge.label(style)}")
        lines += _rows(audit.classes, style, whole=report.whole)
    entries = [*_unknown(report), *(ListEntry("not known", clean(gap)) for gap in audit.gaps)]
    if entries:
        lines += ["", *format_entries(entries, style)]
    return "\n".join([*lines, "", _total(report, style)]) + "\n"


def _listed(pods: Iterable[PodAudit]) -> tuple[Sequence[PodAudit], int]:
    """Return the pods to list, worst first, and the number of the others.

    Pods without findings are limited: they would push the findings off the screen.
    """
    listed, plain = [], 0
    for pod in sorted(pods, key=lambda pod: _ORDER.index(_badge(pod.compared))):
        is_plain = _badge(pod.compared) is EXPECTED and not pod.risks and not pod.idle
        plain += is_plain
        if not is_plain or plain <= MAX_LISTED:
            listed.append(pod)
    return listed, max(0, plain - MAX_LISTED)


def _headline(report: AuditReport, style: TextStyle) -> str:
    parts = [style.paint(clean(report.node), "bold")]
    if facts := report.audit.facts:
        counts = "" if facts.counts_claims else ", a kubelet that does not count claims"
        parts.append(f"cgroup v{facts.version}, {facts.driver}{counts}")
    if report.answer.absence is None:
        origin = report.answer.provenance
        age = f", {format_age(report.now_s - origin.written_s)} old" if origin.written_s else ""
        parts.append(f"{format_count(len(report.answer.items), 'pod')} in {_SOURCES[origin.origin]}{age}")
    return GAP.join(parts)


def _pod_line(pod: PodAudit, style: TextStyle) -> str:
    badge = _badge(pod.compared)
    counted = f", {format_count(len(pod.compared), 'knob')}" if badge is EXPECTED else ""
    name = style.paint(clean(str(pod.pod)), "bold")
    return f"{badge.mark(style)} {name}{GAP}{pod.pod.qos}{GAP}{badge.label(style)}{counted}"


def _rows(compared: Sequence[SettingComparison], style: TextStyle, *, whole: bool) -> Iterator[str]:
    """Yield a table of the settings with findings, if `whole` of all; a vanished cgroup gets one line."""
    rows = [
        comparison
        for comparison in _vanished_once(compared)
        if whole or comparison.verdict in DRIFT | INCONCLUSIVE
    ]
    if not rows:
        return
    titles = ("CGROUP", "KNOB", "EXPECTED", "ACTUAL", "VERDICT")
    table = TextTable(*titles, indent=4, text_below=True, text_indent=6)
    for comparison in rows:
        text = [Paragraph(clean(_reason(comparison)), ("dim",))]
        text += [advice(comparison.risk, style)] if comparison.risk else []
        table.add(*_cells(comparison), Cell(comparison.verdict, (_badge([comparison]).colour,)), text=text)
    yield from table.lines(style)


def _vanished_once(compared: Iterable[SettingComparison]) -> Iterator[SettingComparison]:
    vanished = set()
    for comparison in compared:
        if comparison.verdict is not AuditVerdict.VANISHED or comparison.group not in vanished:
            yield comparison
        if comparison.verdict is AuditVerdict.VANISHED:
            vanished.add(comparison.group)


def _cells(comparison: SettingComparison) -> tuple[str, str, str, str]:
    name = clean(comparison.group.container) if comparison.group.level is Level.CONTAINER else "pod"
    name = comparison.group.qos if comparison.group.level is Level.QOS else name
    if comparison.verdict is AuditVerdict.VANISHED:
        return name, "all", "", ""
    size = f" {page_name(comparison.knob.size_kib)}" if comparison.knob.size_kib else ""
    return name, f"{comparison.knob.knob}{size}", expected_text(comparison.expected), _actual_text(comparison)


def _reason(comparison: SettingComparison) -> str:
    """Return why a cgroup setting has its verdict, without the numbers that the table already shows."""
    return comparison.why.removeprefix(
        f"{_actual_text(comparison)}, expected {expected_text(comparison.expected)}: "
    )


def _actual_text(comparison: SettingComparison) -> str:
    if isinstance(comparison.actual, Missing):
        return str(comparison.actual.absence)
    return value_text(comparison.knob.knob, _limited(comparison, comparison.actual))


def _risks(risks: Iterable[Risk], style: TextStyle) -> Iterator[str]:
    for risk in risks:
        container = f"{risk.container}: " if risk.container else ""
        yield from wrap(f"{risk.code}{GAP}{clean(container + risk.what)}", style, first="    ", rest="      ")
        action = style.arrow + risk.advice
        yield from wrap(action, style, first="      ", rest="        ", paint=("cyan",))


def _unknown(report: AuditReport) -> Iterator[ListEntry]:
    if report.answer.absence is not None:
        yield ListEntry("no pods", clean(report.answer.reason))
        yield ListEntry("", _CONSEQUENCE)
        yield ListEntry("instead", _ALTERNATIVE)
    for wrong in unread_of(report):
        yield ListEntry("unread", clean(wrong))


def _total(report: AuditReport, style: TextStyle) -> str:
    pods = report.audit.pods
    if not pods:
        return "no pod could be audited" if exit_of(report) == 3 else "no running pod has claims"
    counts = Counter(_badge(pod.compared) for pod in pods)
    parts = (style.paint(f"{counts[badge]} {badge.word}", badge.colour) for badge in _ORDER if counts[badge])
    return f"{format_count(len(pods), 'pod')}: {', '.join(parts)}"


def _limited(comparison: SettingComparison, value: int) -> int:
    """Return the value of a cgroup setting; a very large limit becomes "no limit", a CPU set is unchanged."""
    return value if comparison.knob.knob in _CPU_SETS else limit_of(value)


# --- JSON --------------------------------------------------------------------------------------------------

FACTS: Final = ObjectKeys("version driver pageBytes hugepageSizesKiB:hugepages_kib countsClaims")
SOURCE: Final = ObjectKeys(
    """
    origin:provenance.origin read:provenance.read written?:provenance.written_s pods:items absence why:reason
    """,
    pods=len,
)
RISK: Final = ObjectKeys("code container what advice")
POD: Final = ObjectKeys(
    "namespace:pod.namespace name:pod.name uid:pod.uid qosClass:pod.qos claims:pod.claims"
)
POD_FINDINGS: Final = ObjectKeys("risks notRunning:idle", risks=each(RISK))


def document(report: AuditReport) -> dict[str, Any]:
    """Return the audit as JSON. Keys are only ever added."""
    audit, facts = report.audit, report.audit.facts
    return {
        "apiVersion": API_VERSION,
        "node": report.node,
        "at": rfc3339(report.now_s),
        "cgroups": facts and FACTS(facts),
        "source": SOURCE(report.answer),
        "pods": [
            {
                **POD(pod),
                "knobs": [_knob(comparison, facts) for comparison in pod.compared],
                **POD_FINDINGS(pod),
            }
            for pod in audit.pods
        ],
        "classes": [_knob(comparison, facts) for comparison in audit.classes],
        "unread": list(unread_of(report)),
        "notKnown": list(audit.gaps),
        "summary": dict(Counter(comparison.verdict.value for comparison in compared_of(audit))),
    }


def _knob(comparison: SettingComparison, facts: NodeFacts | None) -> dict[str, Any]:
    return {
        "level": comparison.group.level,
        "qosClass": comparison.group.qos,
        "container": comparison.group.container,
        "knob": comparison.knob.knob,
        "sizeKiB": comparison.knob.size_kib or None,
        "file": file_of(comparison.knob, facts.version).name if facts else None,
        "expected": [_value(comparison, option.value) for option in comparison.expected.accepted],
        "arithmetic": comparison.expected.arithmetic,
        "actual": None
        if isinstance(comparison.actual, Missing)
        else _value(comparison, _limited(comparison, comparison.actual)),
        "verdict": comparison.verdict,
        "why": comparison.why,
        "risk": comparison.risk,
    }


def _value(comparison: SettingComparison, value: int) -> int | str:
    """Return the JSON value of a setting: a CPU set as ``0-3,8``, no limit as ``max`` (JSON ends at 2^53)."""
    if comparison.knob.knob in _CPU_SETS:
        return format_cpus(value) if value else ""
    return "max" if value == NO_LIMIT else value
