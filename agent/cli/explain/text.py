"""Text of ``drahealth explain``. Pure: takes values, a style and a time, and returns text.

The text has these parts, in this order: the device, pod or claim; the users of it; contradictions and risks;
the sources with their age; what is not known because sources are missing.

With ``--all`` the text has one line for each consumer of each claim on the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from agent.cli.explain.build import ALL, container_name, devices_of_claim, pod_uid
from agent.cli.explain.model import AGENT, CONSEQUENCES, full_device_name
from agent.cli.history.text import usage_lines
from agent.cli.output.text import (
    BADGES,
    GAP,
    ListEntry,
    RowText,
    TableCell,
    TextTable,
    advice_of_device,
    clean,
    format_count,
    format_entries,
    hardware_identity,
    shorten_ids,
    wrap,
)
from agent.devices.consumers.consumer_queries import USE_ON_THIS_NODE, direct_consumers, pod_owner, pod_state
from agent.devices.consumers.kube_objects import reservations_by_kind
from agent.model.claim_sources import ConsumerKind, Origin
from agent.model.consumers import AffectedPod, PodView, Relation
from agent.model.health import DeviceHealth, Severity, most_needed_first
from agent.model.reading import Absence
from agent.model.time import format_age

if TYPE_CHECKING:
    from agent.cli.explain.model import ClaimFacts, DeviceFacts, Explanation, PodFacts
    from agent.cli.output.terminal import TextStyle
    from agent.cli.prepares.text import PrepareRecord
    from agent.model.claim import ClaimRef, DeviceRef
    from agent.model.claim_sources import PodRef, Provenance, Reservation
    from agent.model.consumers import ClaimConsumerEdge, DeviceEdge
    from agent.model.health import NonDeviceCause

MAX_DEVICES: Final = 4
"""Largest number of devices that the line of a claim names; the others are counted."""
_STRENGTHS: Final = {relation: number for number, relation in enumerate(Relation)}

Row = tuple[str, str, str]
"""Columns of one table row: consumer of a claim, its strongest relation to the claim, its owner."""


def all_lines(explanation: Explanation, style: TextStyle) -> Iterator[str]:
    """Yield the table of all claims and their consumers, the claims with the worst devices first."""
    if not explanation.claims:
        yield "no claim on this node is known"
        return
    devices = {device.ref: device for device in explanation.devices}
    pods = {pod.view.ref: pod.view for pod in explanation.pods}
    members = _group_members(explanation)
    table = TextTable("CLAIM", "CONSUMER", "USE", "OWNER", "DEVICES", "STATE")
    consumers = 0
    for claim in sorted(explanation.claims, key=lambda claim: -_severity(claim, devices)):
        badge = BADGES[_severity(claim, devices)]
        rows = list(_consumer_rows(claim, pods, members.get(claim.view.ref, ())))
        consumers += len(rows)
        refs = devices_of_claim(claim)
        for row in rows or [("no consumer is known", "", "")]:
            table.add(
                claim_name(claim.view.ref),
                *row,
                _device_names(refs),
                _state(claim, [devices[ref] for ref in refs]),
                sign=badge.coloured_sign(style),
            )
    yield _counts(explanation, consumers)
    yield ""
    yield from table.lines(style)


def _severity(claim: ClaimFacts, devices: Mapping[DeviceRef, DeviceFacts]) -> Severity:
    """Return the worst severity of a claim's devices; UNKNOWN for a claim without a known device."""
    return max((devices[ref].severity for ref in devices_of_claim(claim)), default=Severity.UNKNOWN)


def _counts(explanation: Explanation, consumers: int) -> str:
    by_word = Counter(BADGES[device.severity].word for device in explanation.devices)
    words = dict.fromkeys(BADGES[severity].word for severity in sorted(BADGES, reverse=True))
    found = ", ".join(f"{by_word[word]} {word}" for word in words if by_word[word])
    counts = (
        format_count(len(explanation.claims), "claim"),
        format_count(consumers, "consumer"),
        format_count(len(explanation.devices), "device"),
    )
    return ", ".join(counts) + (f": {found}" if found else "")


def _group_members(explanation: Explanation) -> dict[ClaimRef, tuple[PodView, ...]]:
    """Return, for each claim, the pods that use or may use the claim through their pod group."""
    found: dict[ClaimRef, dict[PodRef, PodView]] = {}
    for use in explanation.affected:
        if use.affected.group:
            found.setdefault(use.affected.claim, {})[use.affected.pod.ref] = use.affected.pod
    return {claim: tuple(pods.values()) for claim, pods in found.items()}


def _consumer_rows(
    claim: ClaimFacts, pods: dict[PodRef, PodView], members: Iterable[PodView]
) -> Iterator[Row]:
    for ref, edges in direct_consumers(claim.view).items():
        relation = min((edge.relation for edge in edges), key=_STRENGTHS.__getitem__)
        yield pod_name_with_state(pods[ref]), relation, clean(pod_owner(pods[ref]))
    for edge in dict.fromkeys(edge.consumer for edge in claim.view.consumers if not edge.consumer.pod):
        is_group = edge.kind is ConsumerKind.POD_GROUP
        kind = edge.kind.value if is_group else edge.resource or "object"
        yield clean(f"{kind} {edge.name}"), Relation.RESERVED, ""
    for pod in members:
        yield pod_name_with_state(pod), "member", clean(pod_owner(pod))


def _device_names(refs: Sequence[DeviceRef]) -> str:
    """Return the names of devices as text.

    The driver and the pool of a device are left out if they are equal to those of the previous device.
    """
    names = []
    for number, ref in enumerate(refs[:MAX_DEVICES]):
        before = refs[number - 1] if number else None
        is_same = before is not None and (before.driver, before.pool) == (ref.driver, ref.pool)
        names.append(ref.device if is_same else full_device_name(ref))
    more = len(refs) - len(names)
    return clean(", ".join([*names, f"{more} more"] if more else names)) or "not known"


def _state(claim: ClaimFacts, devices: Sequence[DeviceFacts]) -> str:
    """Return the worst state of a claim's devices with its finding code, and codes of failing prepares."""
    worst = max(devices, key=lambda device: device.severity, default=None)
    health = worst.reported.health if worst and worst.reported else None
    code = health.causes[0].code if health and health.causes else ""
    severity = worst.severity if worst else Severity.UNKNOWN
    states = [BADGES[severity].word + (f" ({code})" if code and severity > Severity.INFO else "")]
    states += [
        f"prepare fails ({record.outcome.verdict.code})"
        for record in claim.prepares
        if record.state == "failing" and record.outcome.verdict
    ]
    return clean("; ".join(states))


# --- output ------------------------------------------------------------------------------------------------

MAX_REQUESTS: Final = 6
"""Largest number of a claim's requests that are listed for one device."""


def render(explanation: Explanation, style: TextStyle) -> str:
    by_kind = {"device": device_lines, "pod": _pod_lines, "claim": _claim_lines, ALL: all_lines}
    render_lines = by_kind[explanation.kind]
    exists = explanation.kind == ALL or explanation.devices or explanation.claims or explanation.pods
    lines = list(render_lines(explanation, style)) if exists else ["no longer on this node; recorded use:"]
    if explanation.ended:
        heading = ["", "earlier use:"] if exists else []
        lines += [*heading, "", *usage_lines(explanation.ended, style, explanation.now.wall_s)]
    for entries in (_finding_entries(explanation), _source_entries(explanation)):
        if entries:
            lines += ["", *format_entries(entries, style)]
    return "\n".join(lines) + "\n"


# --- pods --------------------------------------------------------------------------------------------------


def _pod_lines(explanation: Explanation, style: TextStyle) -> Iterator[str]:
    """Yield the text about the explained pod (several if sources disagree on its UID) and its claims."""
    edges = _edges_by_pod(explanation)
    for pod in explanation.pods:
        yield from _pod(pod, edges.get(pod.view.ref, ()), style)
    for claim in explanation.claims:
        yield ""
        yield from _claim(claim, explanation, style)
    if not explanation.claims:
        named = [claim for pod in explanation.pods if pod.view.known for claim in pod.view.known.claims]
        has_none = explanation.pods[0].view.known and not named
        yield ""
        yield "the pod refers to no claim" if has_none else "no claim of the pod is known"


def _edges_by_pod(explanation: Explanation) -> Mapping[PodRef, Sequence[ClaimConsumerEdge]]:
    found: dict[PodRef, list[ClaimConsumerEdge]] = {}
    for claim in explanation.claims:
        for pod, edges in direct_consumers(claim.view).items():
            found.setdefault(pod, []).extend(edges)
    return found


def _pod(
    pod: PodFacts, edges: Sequence[ClaimConsumerEdge], style: TextStyle, first: str = ""
) -> Iterator[str]:
    ref, known = pod.view.ref, pod.view.known
    facts = [f"uid {ref.uid}" if ref.uid else "uid not known"] if ref.name else ["name not known"]
    if known:
        facts += filter(None, [known.phase, str(known.controller or "")])
        facts += [f"pod group {known.group}"] if known.group else []
    if pod.view.running is not None:
        facts.append("has running processes" if pod.view.running else "has no running process")
    facts += ["from " + format_sources(edge.provenance for edge in edges)] if edges else []
    if edges and not any(edge.relation in USE_ON_THIS_NODE for edge in edges):
        facts.append("claim not known to be prepared for the pod")
    name = str(ref) if not ref.name else f"pod {ref}"
    yield from _heading(name, facts, style, first)
    named = {entry.name for obj, _ in pod.view.objects for entry in obj.claims if entry.claim}
    for entry in known.claims if known else ():
        if not entry.claim and entry.name not in named:
            is_hidden = all(obj.lacks_claim_names for obj, _ in pod.view.objects)
            text = f"claim {entry.name} is not created yet, or not needed"
            if is_hidden:
                text = f"claim {entry.name}: its name is not in the pods API, but in the API server (--pods)"
            yield from wrap(clean(text), style, first=first + "  ", rest=first + "    ")
    for note in pod.notes:
        container = container_name(note, pod.view)
        subject = f"container {container}: " if container else ""
        text = f"{subject}{note.cause.code}: {shorten_ids(note.cause.evidence)}"
        yield from wrap(clean(text), style, first=first + "  ", rest=first + "    ")


def _heading(name: str, facts: Sequence[str], style: TextStyle, first: str = "") -> Iterator[str]:
    name = clean(name)
    indent = f"{first}{' ' * len(name)}{GAP}"
    line, *rest = wrap(clean(", ".join(facts)), style, first=indent, rest=first + "    ")
    yield f"{first}{style.paint(name, 'bold')}{line[len(first) + len(name) :]}"
    yield from rest


# --- claims ------------------------------------------------------------------------------------------------


def _claim_lines(explanation: Explanation, style: TextStyle) -> Iterator[str]:
    """Yield the text about the explained claim (several if sources disagree on its UID) and its pods."""
    for claim in explanation.claims:
        yield from _claim(claim, explanation, style)
        yield ""
    if not explanation.pods:
        yield "no pod of the claim is known"
        return
    yield f"{format_count(len(explanation.pods), 'pod')}:"
    edges = _edges_by_pod(explanation)
    for pod in explanation.pods:
        yield from _pod(pod, edges.get(pod.view.ref, ()), style, first="  ")


def _claim(claim: ClaimFacts, explanation: Explanation, style: TextStyle) -> Iterator[str]:
    """Yield the text about a claim: its devices, consumers, and the results of its prepares."""
    view, sources = claim.view, format_sources(_provenances(claim))
    facts = [f"uid {view.ref.uid}" if view.ref.uid else "known by its name only"]
    yield from _heading(f"claim {view.ref}", [*facts, f"from {sources}"] if sources else facts, style)
    by_ref = {device.ref: device for device in explanation.devices}
    edges_by_device: dict[DeviceRef, list[DeviceEdge]] = {}
    for edge in view.devices:
        edges_by_device.setdefault(edge.use.device, []).append(edge)
    table = TextTable(indent=4)
    failed = {ref: ["its prepare failed"] for ref in claim.devices_of_failed_prepares}
    for ref in (*edges_by_device, *failed):
        device = by_ref[ref]
        badge = BADGES[device.severity]
        texts = [*failed.get(ref, ()), *_device_texts(device, edges_by_device.get(ref, ()), explanation)]
        text = RowText(clean("; ".join(texts)))
        word = TableCell(badge.word.ljust(9), (badge.colour,))
        table.add(clean(full_device_name(device.ref)), word, sign=badge.coloured_sign(style), text=[text])
    yield from table.lines(style)
    entries = [
        *_claim_use_entries(claim, explanation),
        *(_prepare_entry(record, explanation) for record in claim.prepares),
    ]
    yield from format_entries(entries, style, indent=4)


def _provenances(claim: ClaimFacts) -> tuple[Provenance, ...]:
    devices = (edge.provenance for edge in claim.view.devices)
    consumers = (edge.provenance for edge in claim.view.consumers)
    objects = (provenance for _, provenance in claim.view.objects)
    return tuple(dict.fromkeys([*devices, *consumers, *objects]))


def _device_texts(
    device: DeviceFacts, edges: Sequence[DeviceEdge], explanation: Explanation
) -> Iterator[str]:
    """Yield the texts about a device of a claim: the requests of the claim that it serves, and its faults."""
    requests = list(dict.fromkeys(request for edge in edges for request in edge.use.requests))[:MAX_REQUESTS]
    if requests:
        yield f"for {', '.join(requests)}"
    if device.reported:
        yield from _reasons(device.reported.health)
    else:
        yield "no source reports its health"
    is_unclear = device.kubelet_differs or device.reported is None or device.severity > Severity.DEGRADED
    if is_unclear and device.kubelet_health:
        yield from (f"kubelet: {text}" for _, text, _ in kubelet_health_facts(device, explanation))


def _reasons(health: DeviceHealth) -> list[str]:
    """Return the causes of a device's health that are worse than INFO.

    If there is no such cause, return the message of the health, if any.
    """
    causes = [cause for cause in health.causes if cause.severity > Severity.INFO]
    if not causes:
        return [health.message] if health.message else []
    return [f"{cause.code}: {shorten_ids(cause.evidence)}" for cause in causes]


def _claim_use_entries(claim: ClaimFacts, explanation: Explanation) -> Iterator[ListEntry]:
    """Yield the lines about a claim's containers and reservations, and about drivers without a device.

    A driver without a device for the claim is still awaited, or is not called by the kubelet.
    """
    view = claim.view
    containers = dict.fromkeys(
        container.name if explanation.kind == "pod" else f"{container.name} of {use.affected.pod.ref}"
        for use in explanation.affected
        if use.affected.claim == view.ref
        for container in use.affected.containers
    )
    if containers:
        yield ListEntry("containers", clean(", ".join(containers)))
    if view.waiting:
        yield ListEntry("waits for", clean(f"{', '.join(view.waiting)}: no device yet"), ("yellow",))
    if view.skipped:
        yield ListEntry("not called", clean(", ".join(view.skipped)))
    for obj, provenance in view.objects[:1]:
        too_many = (
            f"; {len(obj.reserved)} entries, more than the API server accepts"
            if reservations_by_kind(obj.reserved).exceeds_limit
            else ""
        )
        allocated = "" if obj.allocated else "not allocated; "
        consumers = _reservations(obj.reserved) or "no consumer"
        yield ListEntry("reserved for", clean(f"{allocated}{consumers}{too_many} ({provenance.origin})"))
        if obj.spec_reserved or obj.any_pod:
            any_pod = "any pod" if obj.any_pod else ""
            text = ", ".join(filter(None, [_reservations(obj.spec_reserved), any_pod]))
            yield ListEntry("meant for", clean(f"{text}: ignored by every kubelet ({provenance.origin})"))
    if claim.unmatched_reservations:
        yield ListEntry("orphaned?", clean(_orphans_text(claim)), ("yellow",))


def _orphans_text(claim: ClaimFacts) -> str:
    unmatched = claim.unmatched_reservations or ()
    noun = "object" if any(reservation.kind is ConsumerKind.OTHER for reservation in unmatched) else "pod"
    return f"{_reservations(unmatched)}: no {noun} in --pods matches"


def _reservations(reserved: Sequence[Reservation]) -> str:
    """Return the consumers that a claim is reserved for, as text.

    The text has only the number of pods, because a claim may have hundreds of them.
    """
    kinds = reservations_by_kind(reserved)
    parts = [
        format_count(len(kinds.pods), "pod") if kinds.pods else "",
        *(f"pod group {reservation.name}" for reservation in kinds.groups),
        *(f"{reservation.resource or 'object'} {reservation.name}" for reservation in kinds.others),
    ]
    return ", ".join(filter(None, parts))


def _prepare_entry(record: PrepareRecord, explanation: Explanation) -> ListEntry:
    outcome, unprepared_s = record.outcome, record.unprepared_wall_s
    last = f"{age_text(explanation, outcome.at_wall_s)} ago"
    if outcome.verdict is None:
        unprepared = f", unprepared {age_text(explanation, unprepared_s)} ago" if unprepared_s else ""
        return ListEntry("prepare", clean(f"{record.driver}: prepared {last}{unprepared}"))
    verdict = outcome.verdict
    text = f"{record.driver}: {verdict.error_class}, {verdict.code}: {verdict.summary}"
    first = f"{age_text(explanation, verdict.first_wall_s)} ago"
    times = f"{format_count(verdict.count, 'time')}, first {first}, last {last}"
    unprepared = ", unprepared since" if unprepared_s else ""
    action = f"; {verdict.advice}" if verdict.advice and not unprepared_s else ""
    paint = ("dim",) if unprepared_s else ("red",)
    return ListEntry("prepare", clean(f"{text} ({times}{unprepared}){action}"), paint)


# --- findings and sources ----------------------------------------------------------------------------------


def _finding_entries(explanation: Explanation) -> list[ListEntry]:
    """Return the lines about consumers that are no pods, pods that may be the same, risks, contradictions."""
    entries = [ListEntry("consumer", clean(text)) for text in _other_consumers(explanation)]
    if explanation.kind == ALL:
        entries += [
            ListEntry("orphaned?", clean(f"{claim.view.ref}: {_orphans_text(claim)}"), ("yellow",))
            for claim in explanation.claims
            if claim.unmatched_reservations
        ]
    if explanation.claims_elsewhere:
        count = format_count(explanation.claims_elsewhere, "claim")
        entries.append(ListEntry("elsewhere", f"{count} that no source on this node has: left out"))
    entries += [ListEntry("same pod?", clean(text)) for text in _possibly_same_pods(explanation)]
    for risk in explanation.risks:
        text = f"{risk.pod} would be refused {risk.claim} if its sandbox were created again: {risk.reason}"
        if risk.is_pending:
            text = f"{risk.pod} is refused {risk.claim} by the kubelet, and stays pending: {risk.reason}"
        entries.append(ListEntry("risk", clean(f"{text} ({risk.kubelets})"), ("yellow",)))
    for conflict in explanation.conflicts:
        sides = "; ".join(
            f"{assertion.provenance.origin}: {assertion.text}" for assertion in conflict.assertions
        )
        entries.append(ListEntry("conflict", clean(f"{conflict.subject}: {sides}"), ("yellow",)))
    return entries


def _other_consumers(explanation: Explanation) -> Iterator[str]:
    """Yield a text on each consumer of the explained device's claims that is no pod.

    Yield no text if a pod or a claim is explained.
    """
    if explanation.kind != "device":
        return
    for claim in explanation.claims:
        for edge in claim.view.consumers:
            if edge.consumer.kind is not ConsumerKind.POD:
                yield f"{claim.view.ref} is reserved for {_consumer(edge)} ({edge.provenance.origin})"


def _possibly_same_pods(explanation: Explanation) -> Iterator[str]:
    """Yield texts on pods that may be the same pod: one is known only by name, and the other only by UID."""
    halves: dict[tuple[PodRef, ...], list[PodRef]] = {}
    for pod in explanation.pods:
        if pod.possibly_same:
            halves.setdefault(pod.possibly_same, []).append(pod.view.ref)
    pairs = {
        tuple(sorted((tuple(sorted(some)), tuple(sorted(others))), key=lambda refs: not refs[0].name))
        for others, some in halves.items()
    }
    for named, others in sorted(pairs):
        end = "one pod or two" if len(named) == len(others) == 1 else "some may be the same"
        first, second = f"{_pod_names(named)} (UID not known)", f"{_pod_names(others)} (name not known)"
        yield f"{first} and {second} share a claim: {end}"


def _pod_names(pods: Sequence[PodRef]) -> str:
    return str(pods[0]) if len(pods) == 1 else f"{len(pods)} pods"


def _consumer(edge: ClaimConsumerEdge) -> str:
    consumer = edge.consumer
    kind = consumer.kind.value if consumer.kind is ConsumerKind.POD_GROUP else consumer.resource or "object"
    return f"{kind} {consumer.name}"


def _source_entries(explanation: Explanation) -> list[ListEntry]:
    """Return the lines about the sources with an answer and its age, then about those without an answer.

    The line about a source without an answer states what is not known for this reason.
    """
    entries = []
    for result in explanation.sources:
        if result.absence:
            continue
        when = "queried now" if result.written_s is None else f"{age_text(explanation, result.written_s)} old"
        entries.append(
            ListEntry("sources", clean(f"{result.source}: {result.found}, {when} ({result.place})"))
        )
        entries += [
            ListEntry("sources", clean(f"{result.source}: {text}"), ("yellow",)) for text in result.invalid
        ]
    for result in explanation.sources:
        if result.absence:
            consequence = CONSEQUENCES.get(result.source, "")
            paint = () if result.absence is Absence.ABSENT else ("yellow",)
            entries.append(
                ListEntry("without", clean(f"{result.source}: {consequence} ({result.reason})"), paint)
            )
    return entries


# --- devices -----------------------------------------------------------------------------------------------

Fact = tuple[str, str, tuple[str, ...]]
"""Line below a device in the text: title, text, and colours of the text."""

INDENT: Final = " " * 4


def age_text(explanation: Explanation, wall_s: float) -> str:
    """Return the age of the time `wall_s` [s since 1970] at the explanation as text, such as ``12m``."""
    return format_age(explanation.now.wall_s - wall_s)


def format_sources(provenances: Iterable[Provenance]) -> str:
    """Return the names of the sources in `provenances` as text. Each name appears once."""
    found = {provenance.origin for provenance in provenances}
    return ", ".join(origin for origin in Origin if origin in found)


def device_lines(explanation: Explanation, style: TextStyle) -> Iterator[str]:
    """Yield the text about the explained device, and below it the pods that use it."""
    for device in explanation.devices:
        yield from _device_lines(device, explanation, style)
    yield ""
    uses = [use.affected for use in explanation.affected]
    ended = {use.pod.ref for use in uses if use.pod.has_ended}
    sure = {use.pod.ref for use in uses if use.is_certain} - ended
    possible = {use.pod.ref for use in uses} - sure - ended
    if not uses and not explanation.claims:
        yield "no known pod uses the device"
        return
    more = f", {len(possible)} more may use the device" if possible else ""
    gone = f", {len(ended)} {'has' if len(ended) == 1 else 'have'} ended" if ended else ""
    claims = format_count(len(explanation.claims), "claim")
    minimum = _least_pods(explanation, sure)
    yield f"used by {minimum}{format_count(len(sure), 'pod')}{more}{gone}, through {claims}"
    yield ""
    yield from _consumer_table(explanation, style)


def _least_pods(explanation: Explanation, users: AbstractSet[PodRef]) -> str:
    """Return ``N to `` as the lower limit of the number of pods; empty: the number is exact.

    Two pods may be the same pod if one is known only by its name and the other only by its UID.
    """
    halves = [pod.view.ref for pod in explanation.pods if pod.possibly_same and pod.view.ref in users]
    double = min(sum(not ref.name for ref in halves), sum(not ref.uid for ref in halves))
    return f"{len(users) - double} to " if double else ""


def _device_lines(device: DeviceFacts, explanation: Explanation, style: TextStyle) -> Iterator[str]:
    badge = BADGES[device.severity]
    name = style.paint(clean(full_device_name(device.ref)), "bold")
    word = badge.coloured_word(style)
    yield f"{badge.coloured_sign(style)} {name}{GAP}{word}{_health_origin(device, explanation)}"
    if device.reported:
        health = device.reported.health
        yield from _causes(health, explanation, style)
        yield from wrap(hardware_identity(health), style, first=INDENT, rest=INDENT + "  ", paint=("dim",))
    entries = [
        ListEntry(name, clean(text), paint) for name, text, paint in _device_facts(device, explanation)
    ]
    yield from format_entries(entries, style, indent=4)


def _health_origin(device: DeviceFacts, explanation: Explanation) -> str:
    """Return a text with the age of a device's health, the time of verification, and the reporting source."""
    reported = device.reported
    if reported is None:
        from_kubelet = device.severity is not Severity.UNKNOWN
        return ": only the kubelet has this health" if from_kubelet else ": no source reports its health"
    verified = f"verified {age_text(explanation, reported.health.verified.wall_s)} ago"
    if reported.source != AGENT:
        return f", {verified}, from {clean(reported.source)}"
    return f" for {age_text(explanation, _worst_since_s(reported.health))}, {verified}, from the agent"


def _worst_since_s(health: DeviceHealth) -> float:
    """Return the time since which the worst cause of a device's health exists [s since 1970].

    ``health.since`` is not this time, because it changes with any cause.
    """
    worst = (cause.since.wall_s for cause in health.causes if cause.severity is health.severity)
    return min(worst, default=health.since.wall_s)


def _causes(health: DeviceHealth, explanation: Explanation, style: TextStyle) -> Iterator[str]:
    if not health.causes:
        yield from wrap(shorten_ids(health.message), style, first=INDENT, rest=INDENT)
    for cause in health.causes:
        evidence = shorten_ids(cause.evidence)
        text = f"{clean(cause.code)}: {evidence} ({age_text(explanation, cause.since.wall_s)} ago)"
        paint = () if cause.severity > Severity.INFO else ("dim",)
        yield from wrap(text, style, first=INDENT, rest=INDENT + "  ", paint=paint)
    advices = (cause.advice for cause in most_needed_first(health.causes))
    for row_text in advice_of_device(advices, style):
        yield from wrap(row_text.text, style, first=INDENT, rest=INDENT + "  ", paint=row_text.paint)


def _device_facts(device: DeviceFacts, explanation: Explanation) -> Iterator[Fact]:
    """Yield the lines about a device: its health on the driver's socket and in the kubelet, and its faults.

    Further lines show taints, cleared faults, and the agent's findings about pods that use the device.
    """
    driver_reported = device.driver_reported
    if driver_reported and device.reported and driver_reported.source != device.reported.source:
        comparison = _comparison(driver_reported.health, device.reported.health)
        yield "on socket", f"{comparison} ({driver_reported.source})", ()
    yield from kubelet_health_facts(device, explanation)
    for taint in device.taints or ():
        value = f"{taint.key}={taint.value}:{taint.effect}"
        yield "taint", f"{value}, offered for {age_text(explanation, taint.added_wall_s)}", ("yellow",)
    if device.taints == ():
        yield "taint", "none is offered", ()
    for fault in device.driver_faults:
        when = f"{age_text(explanation, fault.reported_wall_s)} ago, while preparing {fault.claim}"
        yield "found broken", f"{fault.code}: {fault.evidence} ({when})", ("red",)
    for record in device.cleared:
        when = age_text(explanation, record.at_wall_s)
        yield "cleared", f"{record.code}: {when} ago by {record.operator}", ()
    causes = device.reported.health.causes if device.reported else ()
    for note in device.notes:
        cause, subject = note.cause, _subject(note, explanation)
        text = f"{subject}: {cause.evidence}"
        if any(known.code == cause.code and text in known.evidence for known in causes):
            continue  # the causes of the device already include the note
        text = f"{subject}: {cause.code}: {shorten_ids(cause.evidence)}"
        paint = ("yellow",) if cause.severity > Severity.INFO else ()
        yield "note", f"{text} ({age_text(explanation, cause.since.wall_s)} ago)", paint


def _subject(note: NonDeviceCause, explanation: Explanation) -> str:
    """Return the pod (by name if known) and the container that the finding `note` is about."""
    uid = pod_uid(note)
    pod = next((pod.view for pod in explanation.pods if uid and pod.view.ref.uid == uid), None)
    if pod is None:
        return note.subject
    container = container_name(note, pod)
    name = pod.ref if pod.ref.name else f"pod {pod.ref.uid}"
    return f"{name}{container and f' container {container}'}"


def _comparison(sent: DeviceHealth, reported: DeviceHealth) -> str:
    if (sent.health, sent.message) == (reported.health, reported.message):
        return "same health and message"
    return f"{sent.health.name.capitalize()}{_message(sent.message)}"


def kubelet_health_facts(device: DeviceFacts, explanation: Explanation) -> Iterator[Fact]:
    """Yield the line with the health of the device that the kubelet last stored in its state file."""
    belief = device.kubelet_health
    if belief is None:
        if any(result.source == "health-state" and not result.absence for result in explanation.sources):
            yield "kubelet", "no record: Unknown, or not watched", ()
        return
    text = f"{belief.health.name.capitalize()}{_message(belief.message)}"
    if belief.updated_s > 0:
        text += f", updated {age_text(explanation, belief.updated_s)} ago"
    if belief.has_lapsed(explanation.now.wall_s):
        text += f"; older than its lease of {belief.lease_s:g} s: Unknown, unless the lease was renewed since"
    if device.reported and device.kubelet_differs:
        text += f"; the device is {device.reported.health.health.name.capitalize()}"
    yield "kubelet", text, ("yellow",) if device.kubelet_differs else ()


def _message(text: str) -> str:
    return f": {shorten_ids(text)}" if text else ""


# --- the pods that use a device ----------------------------------------------------------------------------


def _consumer_table(explanation: Explanation, style: TextStyle) -> Iterator[str]:
    """Yield a table of the pods that use a device, each with its claim, and of claims without a known pod."""
    table = TextTable("CLAIM", "POD", "CONTAINERS", "OWNER", "SOURCES")
    sure, unsure = ("•" if style.unicode else "*"), style.paint("?", "dim")
    for use in explanation.affected:
        table.add(*_consumer_cells(use.affected), sign=sure if use.affected.is_certain else unsure)
    listed = {use.affected.claim for use in explanation.affected}
    without_pods = [claim.view for claim in explanation.claims if claim.view.ref not in listed]
    for view in without_pods:
        sources = format_sources(edge.provenance for edge in view.devices)
        table.add(claim_name(view.ref), "no pod is known", "", "", sources, sign=unsure)
    yield from table.lines(style)
    if without_pods or not all(use.affected.is_certain for use in explanation.affected):
        yield style.paint("  ? may use the device: no source lists the claim as prepared for the pod", "dim")


def _consumer_cells(affected: AffectedPod) -> tuple[str, ...]:
    containers = ", ".join(
        container.name if container.is_certain else f"{container.name}?" for container in affected.containers
    )
    sources = format_sources(edge.provenance for edge in affected.edges)
    owner = clean(pod_owner(affected.pod, affected.group))
    return (
        claim_name(affected.claim),
        pod_name_with_state(affected.pod),
        clean(containers),
        owner,
        sources,
    )


def pod_name_with_state(pod: PodView) -> str:
    """Return the pod's name, followed by the phase of an ended pod or by ``no process``, in brackets."""
    state = pod_state(pod)
    return clean(f"{pod.ref}{state and f' ({state})'}")


def claim_name(ref: ClaimRef) -> str:
    """Return the name of a claim, with a mark if its UID is not known."""
    return clean(str(ref) if ref.uid else f"{ref} (by name)")
