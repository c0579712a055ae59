"""Result of an audit as a table, as JSON and as an exit code. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.cgroup_audit.audit import INCONCLUSIVE_VERDICTS
from agent.cgroup_audit.audit_verdicts import DRIFT_VERDICTS, AuditVerdict
from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import (
    SettingKind,
    format_setting_value,
    hugepage_size_name,
    normalize_limit,
    setting_file,
)
from agent.cgroup_audit.compare import format_expected
from agent.cli.output.json import API_VERSION, ObjectKeys, encode_each
from agent.cli.output.text import (
    GAP,
    Badge,
    ListEntry,
    RowText,
    TableCell,
    TextTable,
    advice,
    clean,
    format_count,
    format_entries,
    wrap,
)
from agent.model.claim_sources import Origin
from agent.model.cpuset import format_cpus
from agent.model.json_values import JsonObject
from agent.model.pod_findings import NO_LIMIT
from agent.model.reading import Missing
from agent.model.time import format_age, rfc3339

if TYPE_CHECKING:
    from agent.cgroup_audit.audit import PodAudit, PodRisk
    from agent.cgroup_audit.audit_verdicts import SettingComparison
    from agent.cgroup_audit.kubelet_config import NodeFacts
    from agent.cli.output.terminal import TextStyle
    from agent.model.claim_sources import SourceAnswer
    from agent.node.cgroup_audit import CgroupAuditReport

EXPECTED: Final = Badge("●", "+", "as expected", "green")
UNEXPECTED: Final = Badge("▲", "!", "not as expected", "yellow")
UNKNOWN: Final = Badge("◌", "?", "not evaluated", "magenta")
IDLE: Final = Badge("·", "-", "not running", "dim")
_ORDER: Final = (UNEXPECTED, UNKNOWN, EXPECTED, IDLE)
MAX_LISTED: Final = 20
"""Largest number of pods without a wrong cgroup setting that are listed."""
_SOURCES: Final = {Origin.PODS_API: "the kubelet's pods API", Origin.PODS_FILE: "a file"}
_CONSEQUENCE: Final = "without the pods' objects, the expected cgroup values cannot be computed"
_ALTERNATIVE: Final = (
    "kubectl get pods -A -o json --field-selector spec.nodeName=NODE >FILE; drahealth audit --pods FILE"
)
_CPU_SETS: Final = frozenset({SettingKind.CPUS, SettingKind.EFFECTIVE})


class AuditReport(NamedTuple):
    """Result of an audit, with the pod objects that it is based on."""

    node: str
    answer: SourceAnswer[JsonObject]
    """Pod objects that were read, or the reason why there are none."""
    invalid_pods: tuple[str, ...]
    """Pods whose objects cannot be used, each with the reason."""
    audit: CgroupAuditReport
    now_s: float
    in_full: bool
    """True: show every comparison; False: only comparisons with findings."""


def exit_of(report: AuditReport) -> int:
    """Return the exit code. 0: all cgroup settings are as expected; 1: one differs; 3: some are unknown."""
    verdicts = {comparison.verdict for comparison in all_comparisons(report.audit)}
    if verdicts & DRIFT_VERDICTS:
        return 1
    is_blind = report.answer.absence is not None or report.audit.facts is None or bool(unaudited_pods(report))
    is_idle = report.in_full and not verdicts
    return 3 if is_blind or is_idle or verdicts & INCONCLUSIVE_VERDICTS else 0


def unaudited_pods(report: AuditReport) -> tuple[str, ...]:
    """Return a text for each pod that could not be audited: its name and the reason."""
    return (*report.invalid_pods, *report.audit.unreadable)


def all_comparisons(audit: CgroupAuditReport) -> Iterator[SettingComparison]:
    """Yield the comparisons of actual with expected cgroup settings, for pods, QoS classes and the node."""
    for pod in audit.pods:
        yield from pod.comparisons
    yield from audit.qos_classes
    yield from audit.node_cgroups


def _badge(compared: Iterable[SettingComparison]) -> Badge:
    verdicts = {comparison.verdict for comparison in compared}
    if verdicts & DRIFT_VERDICTS:
        return UNEXPECTED
    if verdicts & INCONCLUSIVE_VERDICTS:
        return UNKNOWN
    return EXPECTED if verdicts else IDLE


# --- table -------------------------------------------------------------------------------------------------


def render(report: AuditReport, style: TextStyle) -> str:
    """Return the audit as text: the findings of each pod or, with ``report.in_full``, every comparison."""
    audit = report.audit
    lines = [_headline(report, style)]
    if audit.pods or audit.qos_classes or audit.node_cgroups:
        lines.append("")
    pods, more = _pods_to_list(audit.pods)
    for pod in pods:
        lines.append(_pod_line(pod, style))
        lines += _comparison_table(pod.comparisons, style, whole=report.in_full)
        lines += _risks(pod.risks, style)
        if pod.stopped_containers and pod.comparisons:
            names = clean(", ".join(pod.stopped_containers))
            lines += wrap(f"not running: {names}", style, first="    ", rest="      ", paint=("dim",))
    if more:
        number = style.paint(f"{more} more", "bold")
        lines.append(f"{EXPECTED.coloured_sign(style)} {number}{GAP}{EXPECTED.coloured_word(style)}")
    for title, compared in (("QoS classes", audit.qos_classes), ("node cgroups", audit.node_cgroups)):
        if compared:
            badge = _badge(compared)
            lines.append(f"{badge.coloured_sign(style)} {title}{GAP}{badge.coloured_word(style)}")
            lines += _comparison_table(compared, style, whole=report.in_full)
    entries = [*_unknown(report), *(ListEntry("not known", clean(gap)) for gap in audit.gaps)]
    entries += [ListEntry("note", clean(note)) for note in audit.notes]
    if entries:
        lines += ["", *format_entries(entries, style)]
    return "\n".join([*lines, "", _summary_line(report, style)]) + "\n"


def _pods_to_list(pods: Iterable[PodAudit]) -> tuple[Sequence[PodAudit], int]:
    """Return the audited pods to list, worst first, and the number of pods that are only counted.

    At most MAX_LISTED pods without findings are listed: more would push the findings off the screen.
    """
    listed, plain = [], 0
    for pod in sorted(pods, key=lambda pod: _ORDER.index(_badge(pod.comparisons))):
        is_plain = _badge(pod.comparisons) is EXPECTED and not pod.risks and not pod.stopped_containers
        plain += is_plain
        if not is_plain or plain <= MAX_LISTED:
            listed.append(pod)
    return listed, max(0, plain - MAX_LISTED)


def _headline(report: AuditReport, style: TextStyle) -> str:
    parts = [style.paint(clean(report.node), "bold")]
    if facts := report.audit.facts:
        counts = "" if facts.counts_claims else ", a kubelet that does not count claims"
        parts.append(f"cgroup v{facts.cgroup_version}, {facts.cgroup_driver}{counts}")
    if report.answer.absence is None:
        origin = report.answer.provenance
        age = f", {format_age(report.now_s - origin.written_s)} old" if origin.written_s else ""
        parts.append(f"{format_count(len(report.answer.items), 'pod')} in {_SOURCES[origin.origin]}{age}")
    return GAP.join(parts)


def _pod_line(pod: PodAudit, style: TextStyle) -> str:
    badge = _badge(pod.comparisons)
    counted = f", {format_count(len(pod.comparisons), 'setting')}" if badge is EXPECTED else ""
    name = style.paint(clean(str(pod.pod)), "bold")
    return f"{badge.coloured_sign(style)} {name}{GAP}{pod.pod.qos}{GAP}{badge.coloured_word(style)}{counted}"


def _comparison_table(
    compared: Sequence[SettingComparison], style: TextStyle, *, whole: bool
) -> Iterator[str]:
    """Yield the lines of a table of cgroup settings: all settings if `whole`, else only those with findings.

    A cgroup that has vanished takes one line.
    """
    rows = [
        comparison
        for comparison in _vanished_once(compared)
        if whole or comparison.verdict in DRIFT_VERDICTS | INCONCLUSIVE_VERDICTS
    ]
    if not rows:
        return
    titles = ("CGROUP", "SETTING", "EXPECTED", "ACTUAL", "VERDICT")
    table = TextTable(*titles, indent=4, text_below=True, text_indent=6)
    for comparison in rows:
        text = [RowText(clean(_reason(comparison)), ("dim",))]
        text += [advice(comparison.consequence, style)] if comparison.consequence else []
        table.add(
            *_cells(comparison), TableCell(comparison.verdict, (_badge([comparison]).colour,)), text=text
        )
    yield from table.lines(style)


def _vanished_once(compared: Iterable[SettingComparison]) -> Iterator[SettingComparison]:
    vanished = set()
    for comparison in compared:
        if comparison.verdict is not AuditVerdict.VANISHED or comparison.cgroup not in vanished:
            yield comparison
        if comparison.verdict is AuditVerdict.VANISHED:
            vanished.add(comparison.cgroup)


def _cells(comparison: SettingComparison) -> tuple[str, str, str, str]:
    name = clean(comparison.cgroup.container) if comparison.cgroup.level is CgroupLevel.CONTAINER else "pod"
    name = comparison.cgroup.qos if comparison.cgroup.level is CgroupLevel.QOS else name
    name = comparison.cgroup.name or name
    if comparison.verdict is AuditVerdict.VANISHED:
        return name, "all", "", ""
    size = f" {hugepage_size_name(comparison.setting.size_kib)}" if comparison.setting.size_kib else ""
    return (
        name,
        f"{comparison.setting.kind}{size}",
        format_expected(comparison.expected),
        _actual_text(comparison),
    )


def _reason(comparison: SettingComparison) -> str:
    """Return the reason for the verdict on a cgroup setting, without values that the table already shows."""
    return comparison.reason.removeprefix(
        f"{_actual_text(comparison)}, expected {format_expected(comparison.expected)}: "
    )


def _actual_text(comparison: SettingComparison) -> str:
    if isinstance(comparison.actual, Missing):
        return str(comparison.actual.absence)
    return format_setting_value(comparison.setting.kind, _without_huge_limit(comparison, comparison.actual))


def _risks(risks: Iterable[PodRisk], style: TextStyle) -> Iterator[str]:
    for risk in risks:
        container = f"{risk.container}: " if risk.container else ""
        yield from wrap(
            f"{risk.code}{GAP}{clean(container + risk.description)}", style, first="    ", rest="      "
        )
        action = style.arrow + risk.advice
        yield from wrap(action, style, first="      ", rest="        ", paint=("cyan",))


def _unknown(report: AuditReport) -> Iterator[ListEntry]:
    if report.answer.absence is not None:
        yield ListEntry("no pods", clean(report.answer.reason))
        yield ListEntry("", _CONSEQUENCE)
        yield ListEntry("instead", _ALTERNATIVE)
    for wrong in unaudited_pods(report):
        yield ListEntry("unread", clean(wrong))


def _summary_line(report: AuditReport, style: TextStyle) -> str:
    pods = report.audit.pods
    if not pods:
        return "no pod could be audited" if exit_of(report) == 3 else "no running pod has claims"
    counts = Counter(_badge(pod.comparisons) for pod in pods)
    parts = (style.paint(f"{counts[badge]} {badge.word}", badge.colour) for badge in _ORDER if counts[badge])
    return f"{format_count(len(pods), 'pod')}: {', '.join(parts)}"


def _without_huge_limit(comparison: SettingComparison, value: int) -> int:
    """Return `value` of a cgroup setting. A limit that is too large to have an effect becomes NO_LIMIT."""
    return value if comparison.setting.kind in _CPU_SETS else normalize_limit(value)


# --- JSON --------------------------------------------------------------------------------------------------

FACTS: Final = ObjectKeys(
    "version:cgroup_version driver:cgroup_driver pageBytes hugepageSizesKiB:hugepages_kib countsClaims "
    "kubeletConfig?:kubelet_source"
)
SOURCE: Final = ObjectKeys(
    """
    origin:provenance.origin read:provenance.read_at written?:provenance.written_s pods:items absence
    why:reason
    """,
    pods=len,
)
RISK: Final = ObjectKeys("code container what:description advice")
POD: Final = ObjectKeys(
    "namespace:pod.namespace name:pod.name uid:pod.uid qosClass:pod.qos claims:pod.claims"
)
POD_FINDINGS: Final = ObjectKeys("risks notRunning:stopped_containers", risks=encode_each(RISK))


def document(report: AuditReport) -> dict[str, Any]:
    """Return the audit as JSON. Later versions only add keys."""
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
                "knobs": [_setting_document(comparison, facts) for comparison in pod.comparisons],
                **POD_FINDINGS(pod),
            }
            for pod in audit.pods
        ],
        "classes": [_setting_document(comparison, facts) for comparison in audit.qos_classes],
        "nodeCgroups": [
            {"name": comparison.cgroup.name, **_setting_document(comparison, facts)}
            for comparison in audit.node_cgroups
        ],
        "unread": list(unaudited_pods(report)),
        "notKnown": list(audit.gaps),
        "notes": list(audit.notes),
        "summary": dict(Counter(comparison.verdict.value for comparison in all_comparisons(audit))),
    }


def _setting_document(comparison: SettingComparison, facts: NodeFacts | None) -> dict[str, Any]:
    return {
        "level": comparison.cgroup.level,
        "qosClass": comparison.cgroup.qos,
        "container": comparison.cgroup.container,
        "knob": comparison.setting.kind,
        "sizeKiB": comparison.setting.size_kib or None,
        "file": setting_file(comparison.setting, facts.cgroup_version).name if facts else None,
        "expected": [_json_value(comparison, option.value) for option in comparison.expected.accepted],
        "atLeast": comparison.expected.at_least,
        "arithmetic": comparison.expected.arithmetic,
        "actual": None
        if isinstance(comparison.actual, Missing)
        else _json_value(comparison, _without_huge_limit(comparison, comparison.actual)),
        "verdict": comparison.verdict,
        "why": comparison.reason,
        "risk": comparison.consequence,
    }


def _json_value(comparison: SettingComparison, value: int) -> int | str:
    """Return the value of a cgroup setting for JSON: a CPU set as ``0-3,8``, and NO_LIMIT as ``max``.

    NO_LIMIT is not a number in JSON, because JSON numbers are exact only up to 2^53.
    """
    if comparison.setting.kind in _CPU_SETS:
        return format_cpus(value) if value else ""
    return "max" if value == NO_LIMIT else value
