"""Content of the HTML page, computed from a report, the pods' devices and the health history. No I/O.

All texts are plain: the template escapes them.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlencode

from agent.devices.consumers.consumer_queries import affected_pods, health_lookup, pod_owner, pod_state
from agent.health.availability_statistics import ObservedTimeAxis, VerdictSpan
from agent.health.rules import format_duration
from agent.model.claim import DeviceRef
from agent.model.consumers import AffectedPod, ConsumerMap
from agent.model.health import Cause, DeviceHealth, NonDeviceCause, Repair, Severity, most_needed_first
from agent.model.history import RecordedState
from agent.model.pod_findings import PodsSample
from agent.model.reading import SourceSample, SourceState
from agent.model.report import AgentStatus, Report
from agent.model.time import NS, Instant, format_age, rfc3339

ROWS_MAX: Final = 200
"""Largest number of devices in one part of the page; links lead to the other parts."""
NOTES_MAX: Final = 100
"""Largest number of findings about pods or the node (not about a device) on the page."""
PODS_MAX: Final = 20
"""Largest number of pods that are listed for a device."""
STRIP_S: Final = 24 * 3600
"""Time that the strip of a device, a drawing of its health history, shows [s]."""
STRIP_STEPS: Final = 720
"""Width of a strip in units of its drawing: one unit is 2 minutes."""

_WORST_FIRST: Final = (Severity.UNHEALTHY, Severity.UNKNOWN, Severity.DEGRADED, Severity.INFO, Severity.OK)


class StateStyle(NamedTuple):
    """Appearance of a severity on the page: word, sign and CSS class."""

    word: str
    sign: str
    css: str


STATES: Final[Mapping[Severity, StateStyle]] = {
    Severity.OK: StateStyle("Healthy", "●", "healthy"),
    Severity.INFO: StateStyle("Healthy", "●", "healthy"),
    Severity.DEGRADED: StateStyle("Degraded", "▲", "degraded"),
    Severity.UNKNOWN: StateStyle("Unknown", "◌", "unknown"),
    Severity.UNHEALTHY: StateStyle("Unhealthy", "✖", "unhealthy"),
}
_NOT_OBSERVED: Final = "not observed"
_STRIP_WORDS: Final[Mapping[RecordedState | str, str]] = {
    RecordedState.HEALTHY: "Healthy",
    RecordedState.DEGRADED: "Degraded",
    RecordedState.UNKNOWN: "Unknown",
    RecordedState.UNHEALTHY: "Unhealthy",
    RecordedState.ABSENT: "absent",
    _NOT_OBSERVED: _NOT_OBSERVED,
}


class StripPart(NamedTuple):
    """Part of the timeline of a device's health on the page, in which the device had one state."""

    begin: int
    """Left end of the part, in the units of STRIP_STEPS."""
    width: int
    css: str


class Strip(NamedTuple):
    """Timeline of a device's health over the last STRIP_S, as parts of a drawing and as a sentence."""

    parts: tuple[StripPart, ...]
    text: str
    """Sentence for screen readers and the tooltip: ``Healthy 23 h 50 min, Unhealthy 10 min``."""


class CauseText(NamedTuple):
    """Cause of a device's or pod's state, as texts of the page."""

    code: str
    css: str
    evidence: str
    advice: str
    repair: str
    """Repair of the fault, worded as on the command line; empty: none."""


class PagePod(NamedTuple):
    """Pod that uses or may use a device."""

    name: str
    facts: str
    """Claim, containers, controller, pod group and state of the pod; empty: none is known."""
    is_certain: bool
    """False: the pod may use the device; for example, the claim is only reserved for it."""


class PageDevice(NamedTuple):
    """Row of the page's table of devices."""

    id: str
    """Identifier of the device in the page, the same in each report: driver, pool and name."""
    name: str
    kind: str
    driver: str
    """Driver that declared the device; empty: a host device."""
    state: StateStyle
    causes: tuple[CauseText, ...]
    """Causes of the device's state, in the order in which they need a repair; empty: no fault is known."""
    message: str
    """Health message of the device that the kubelet gets; empty: none."""
    since: str
    """Time at which the device's health last changed, RFC 3339."""
    age: str
    """Time since ``since`` as text."""
    verified: str
    attributes: tuple[tuple[str, str], ...]
    pods: tuple[PagePod, ...]
    """Pods that use or may use the device, at most PODS_MAX."""
    more_pods: int
    """Number of further pods that use or may use the device."""
    strip: Strip | None
    """Health of the last 24 hours; None: the history has no record of the device."""


class FindingRow(NamedTuple):
    """Row of the page's table of findings about pods or the node."""

    subject: str
    cause: CauseText
    devices: str


class SourceRow(NamedTuple):
    """Row of the page's table of the agent's sources."""

    name: str
    state: str
    css: str
    age: str
    period: str
    failures: int
    detail: str


class CountOfState(NamedTuple):
    """Number of devices in one state, at the top of the page."""

    state: StateStyle
    devices: int


@dataclass(frozen=True, slots=True)
class PageContent:
    """Values from which the template renders the page."""

    node: str
    at: str
    """Time of the report, RFC 3339."""
    counts: tuple[CountOfState, ...]
    """Number of devices by state, worst first; states without devices are left out."""
    rows: tuple[PageDevice, ...]
    first: int
    """Position of the first shown device in the list of all devices, from 1; 0: none is shown."""
    total: int
    previous: str
    """Query of the link to the devices before the shown ones; empty: there are none."""
    following: str
    """Query of the link to the devices after the shown ones; empty: there are none."""
    notes: tuple[FindingRow, ...]
    more_notes: int
    pods_problem: str
    """Reason why the page does not name the pods that use devices; empty: it does."""
    history_problem: str
    """Reason why the page has no strips; empty: it has them."""
    sources: tuple[SourceRow, ...]
    costs: tuple[tuple[str, str], ...]
    """CPU time, memory and other costs of the agent, as (what, how much)."""


@dataclass(frozen=True, slots=True)
class PageInput:
    """Values of the agent from which the page's content is computed."""

    report: Report
    now: Instant
    pods: PodsSample | None
    """Pods that use devices; None: the agent does not track them."""
    consumers: ConsumerMap | None
    """Claims, devices and pods, as ``drahealth explain`` joins them; None: not known yet."""
    drivers: Container[str]
    """Names of the drivers that the agent serves."""
    history: "History"
    status: AgentStatus | str
    """Status of the agent, or the reason why it cannot be read."""


@dataclass(frozen=True, slots=True)
class History:
    """Recorded health of devices up to now, from which the page's timelines are drawn."""

    timeline: ObservedTimeAxis
    spans: Mapping[DeviceRef, Sequence[VerdictSpan]]
    problem: str = ""
    """Reason why the history cannot be shown; empty: it can."""


def first_of_part(first: int, devices: int) -> int:
    """Return how many devices come before the part of the page that has device number `first`."""
    return min(first, max(devices - 1, 0)) // ROWS_MAX * ROWS_MAX


def page_content(given: PageInput, first: int = 0) -> PageContent:
    """Return the content of the page for one part of the devices.

    Args:
        given: Report, pods, history and status of the agent.
        first: Number of devices to leave out, from the beginning of the list that has the worst states first.
    """
    report = given.report
    ordered = sorted(report.devices, key=lambda device: _WORST_FIRST.index(device.severity))
    first = first_of_part(first, len(ordered))
    shown = ordered[first : first + ROWS_MAX]
    users = _pods_by_device(given)
    counts = Counter(STATES[device.severity] for device in report.devices)
    return PageContent(
        node=report.node,
        at=rfc3339(report.at.wall_s),
        counts=tuple(
            CountOfState(style, counts[style])
            for style in dict.fromkeys(STATES[severity] for severity in _WORST_FIRST)
            if counts[style]
        ),
        rows=tuple(_row(device, given, users.get(device.key, ())) for device in shown),
        first=first + 1 if shown else 0,
        total=len(ordered),
        previous=urlencode({"first": max(first - ROWS_MAX, 0)}) if first else "",
        following=urlencode({"first": first + ROWS_MAX}) if first + ROWS_MAX < len(ordered) else "",
        notes=tuple(_note(note) for note in report.notes[:NOTES_MAX]),
        more_notes=max(len(report.notes) - NOTES_MAX, 0),
        pods_problem=_pods_problem(given.pods),
        history_problem=given.history.problem,
        sources=tuple(_source(source, given.now) for source in report.sources),
        costs=tuple(_costs(given)),
    )


def _pods_problem(pods: PodsSample | None) -> str:
    if pods is None:
        return "the agent does not track the pods of this node"
    if pods.source.state is SourceState.OK:
        return ""
    return f"the source {pods.source.name} is {pods.source.state}: {pods.source.detail or 'no detail'}"


def _pods_by_device(given: PageInput) -> Mapping[tuple[str, str, str], Sequence[PagePod]]:
    """Return the pods that use or may use each device, by the device's key; certain uses come first."""
    health_of = health_lookup(given.report, given.drivers)
    users: dict[tuple[str, str, str], list[PagePod]] = defaultdict(list)
    if given.consumers is not None:
        for ref in given.consumers.devices:
            if device := health_of(ref):
                users[device.key] += map(_pod, affected_pods(given.consumers, ref))
    for uid, refs in given.pods.uses.items() if given.pods is not None else ():
        name = given.pods.names.get(uid, f"pod UID {uid}") if given.pods is not None else ""
        for device in filter(None, map(health_of, refs)):
            if all(name != pod.name for pod in users[device.key]):
                users[device.key].append(PagePod(name, "", is_certain=True))
    return {key: sorted(pods, key=lambda pod: (not pod.is_certain, pod)) for key, pods in users.items()}


def _pod(affected: AffectedPod) -> PagePod:
    names = [use.name if use.is_certain else f"{use.name}?" for use in affected.containers]
    containers = f"container{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
    owner, state = pod_owner(affected.pod, affected.group), pod_state(affected.pod)
    facts = filter(None, (f"claim {affected.claim}", containers, owner, state))
    return PagePod(str(affected.pod.ref), ", ".join(facts), affected.is_certain)


def _row(device: DeviceHealth, given: PageInput, pods: Sequence[PagePod]) -> PageDevice:
    default_pool = given.report.node
    pool = "" if device.pool == default_pool else device.pool
    return PageDevice(
        id="/".join(device.key),
        name="/".join(filter(None, (pool, device.device))),
        kind=device.kind,
        driver=device.driver,
        state=STATES[device.severity],
        causes=tuple(_cause_texts(device)),
        message=device.message,
        since=rfc3339(device.since.wall_s),
        age=format_age(_age_s(device.since, given.now)),
        verified=format_age(_age_s(device.verified, given.now)),
        attributes=device.attributes,
        pods=tuple(pods[:PODS_MAX]),
        more_pods=max(len(pods) - PODS_MAX, 0),
        strip=_strip(given.history, DeviceRef(*device.key)),
    )


def _cause_texts(device: DeviceHealth) -> list[CauseText]:
    urgent = most_needed_first(device.causes)
    others = [cause for cause in device.causes if cause.severity <= Severity.INFO]
    return [_cause_text(cause) for cause in (*urgent, *others)]


def _cause_text(cause: Cause) -> CauseText:
    repair = "" if cause.repair is Repair.NONE else str(cause.repair)
    return CauseText(cause.code, STATES[cause.severity].css, cause.evidence, cause.advice, repair)


def _note(note: NonDeviceCause) -> FindingRow:
    return FindingRow(note.subject, _cause_text(note.cause), ", ".join(note.devices))


def _source(source: SourceSample, now: Instant) -> SourceRow:
    is_bad = source.state in (SourceState.FAILING, SourceState.STALLED)
    return SourceRow(
        name=source.name,
        state=str(source.state),
        css="unhealthy" if is_bad else "absent" if source.state is SourceState.ABSENT else "healthy",
        age="" if source.state is SourceState.ABSENT else format_age((now.mono_ns - source.beat_ns) / NS),
        period=format_duration(source.period_ns / NS),
        failures=source.failures,
        detail=source.detail,
    )


def _costs(given: PageInput) -> list[tuple[str, str]]:
    if isinstance(status := given.status, str):
        return [("Process", status)]
    lived_s = max(given.now.wall_s - status.started_wall_s, 1.0)
    core = given.report.core
    return [
        ("Version", status.version),
        ("Running for", format_age(lived_s)),
        ("CPU time", f"{status.cpu_s:.1f} s, {100 * status.cpu_s / lived_s:.2f} % of a CPU"),
        ("Memory (RSS)", f"{status.rss_bytes / (1 << 20):.1f} MiB"),
        ("Kernel memory of watched files", f"{core.kernel_bytes / (1 << 20):.1f} MiB"),
        ("Threads", str(status.threads)),
        ("Open descriptors", str(status.descriptors)),
        ("Watched cgroups", str(given.report.groups)),
        ("Passes over watched files", str(core.passes)),
        ("Wakes of the engine", str(core.wakes)),
        ("Health streams", str(sum(subscriber.streams for subscriber in status.subscribers))),
    ]


def _age_s(then: Instant, now: Instant) -> float:
    return max((now.mono_ns - then.mono_ns) / NS, 0.0)


# --- strips ------------------------------------------------------------------------------------------------


def _strip(history: History, device: DeviceRef) -> Strip | None:
    """Return the timeline of a device's health; None: the history has no record of it in the last STRIP_S."""
    end_s = history.timeline.now_s
    begin_s = end_s - STRIP_S
    seconds: defaultdict[RecordedState | str, float] = defaultdict(float)
    parts: list[StripPart] = []
    for span in history.spans.get(device, ()):
        since_s, until_s = max(span.begin_s, begin_s), min(span.end_s, end_s)
        if until_s < since_s or (until_s == since_s and not span.is_newest):
            continue
        unobserved_s = history.timeline.unobserved_s(since_s, until_s)
        seconds[span.verdict.state] += until_s - since_s - unobserved_s
        seconds[_NOT_OBSERVED] += unobserved_s
        parts.append(_part(since_s - begin_s, until_s - begin_s, str(span.verdict.state)))
        parts += [
            _part(gap_begin_s - begin_s, gap_end_s - begin_s, "unobserved")
            for gap_begin_s, gap_end_s in history.timeline.gaps(since_s, until_s)
        ]
    if not parts:
        return None
    words = [
        f"{_STRIP_WORDS[state]} {format_age(spent)}"
        for state, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent >= 1
    ]
    return Strip(tuple(parts), ", ".join(words) or "first report")


def _part(begin_s: float, end_s: float, css: str) -> StripPart:
    """Return a part of a device's timeline, at least one unit wide: a short fault stays visible.

    Args:
        begin_s: Begin of the part, from the left end of the timeline [s].
        end_s: End of the part, from the left end of the timeline [s].
        css: CSS class of the state.
    """
    scale = STRIP_STEPS / STRIP_S
    begin = min(int(begin_s * scale), STRIP_STEPS - 1)
    return StripPart(begin, max(round(end_s * scale) - begin, 1), css)
