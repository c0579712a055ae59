"""Pods and claims, for ``drahealth explain``: their devices, each in a line, and how prepares ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from agent.cli.explain.assertions import container_of
from agent.cli.explain.device_text import age, belief_facts, origins
from agent.cli.explain.find import title
from agent.cli.output.text import GAP, LOOKS, Entry, brief, clean, format_count, format_entries, wrap
from agent.devices.consumers.affected import HERE, consumers_of
from agent.devices.consumers.reservations import by_kind
from agent.model.health import DeviceHealth, Severity

if TYPE_CHECKING:
    from agent.cli.explain.words import ClaimFacts, DeviceFacts, Explained, PodFacts
    from agent.cli.output.terminal import Style
    from agent.cli.prepares.text import Claim
    from agent.model.claim_sources import PodRef, Provenance, Reservation
    from agent.model.consumers import ConsumerEdge, DeviceEdge

REQUESTS_MAX: Final = 6
"""Requests of a claim that are named for a device."""


def of_pod(explained: Explained, style: Style) -> Iterator[str]:
    """A pod, or several of which it is not clear who is meant; below them their claims."""
    told = _edges(explained)
    for pod in explained.pods:
        yield from _pod(pod, told.get(pod.view.ref, ()), style)
    for claim in explained.claims:
        yield ""
        yield from _claim(claim, explained, style)
    if not explained.claims:
        named = [one for pod in explained.pods if pod.view.known for one in pod.view.known.claims]
        yield ""
        yield "it names no claim" if explained.pods[0].view.known and not named else "no claim of it is known"


def of_claim(explained: Explained, style: Style) -> Iterator[str]:
    """A claim likewise; below it its pods."""
    for claim in explained.claims:
        yield from _claim(claim, explained, style)
        yield ""
    if explained.pods:
        yield f"{format_count(len(explained.pods), 'pod')}:"
        told = _edges(explained)
        for pod in explained.pods:
            yield from _pod(pod, told.get(pod.view.ref, ()), style, first="  ")
    else:
        yield "no pod of it is known"


def _edges(explained: Explained) -> Mapping[PodRef, Sequence[ConsumerEdge]]:
    """Who says that the claims are a pod's, by pod."""
    found: dict[PodRef, list[ConsumerEdge]] = {}
    for claim in explained.claims:
        for pod, edges in consumers_of(claim.view).items():
            found.setdefault(pod, []).extend(edges)
    return found


def _pod(pod: PodFacts, edges: Sequence[ConsumerEdge], style: Style, first: str = "") -> Iterator[str]:
    ref, known = pod.view.ref, pod.view.known
    words = [f"uid {ref.uid}" if ref.uid else "uid not known"] if ref.name else ["name not known"]
    if known:
        words += filter(None, [known.phase, str(known.controller or "")])
        words += [f"pod group {known.group}"] if known.group else []
    if pod.view.running is not None:
        words.append("processes of it run" if pod.view.running else "no process of it runs")
    words += ["told by " + origins(edge.witness for edge in edges)] if edges else []
    if edges and not any(edge.relation in HERE for edge in edges):
        words.append("not seen to be prepared for it")
    who = str(ref) if not ref.name else f"pod {ref}"
    yield from _headed(who, words, style, first)
    for one in known.claims if known else ():
        if not one.claim:
            text = f"its claim {one.name} was not made yet, or is not needed"
            yield from wrap(clean(text), style, first=first + "  ", rest=first + "    ")
    for note in pod.notes:
        container = container_of(note, pod.view)
        of = f"container {container}: " if container else ""
        text = f"{of}{note.cause.code}: {brief(note.cause.evidence)}"
        yield from wrap(clean(text), style, first=first + "  ", rest=first + "    ")


def _headed(what: str, words: Sequence[str], style: Style, first: str = "") -> Iterator[str]:
    """What it is, and behind it what is known of it."""
    name = clean(what)
    indent = f"{first}{' ' * len(name)}{GAP}"
    line, *rest = wrap(clean(", ".join(words)), style, first=indent, rest=first + "    ")
    yield f"{first}{style.paint(name, 'bold')}{line[len(first) + len(name) :]}"
    yield from rest


def _claim(claim: ClaimFacts, explained: Explained, style: Style) -> Iterator[str]:
    """A claim with its devices, each with its verdict in one line, and how its prepares ended."""
    view = claim.view
    words = [f"uid {view.ref.uid}" if view.ref.uid else "known by its name alone"]
    words += [f"told by {origins(_witnesses(claim))}"] if _witnesses(claim) else []
    yield from _headed(f"claim {view.ref}", words, style)
    by_ref = {one.ref: one for one in explained.devices}
    edges: dict[object, list[DeviceEdge]] = {}
    for edge in view.devices:
        edges.setdefault(edge.use.device, []).append(edge)
    uses = [(by_ref[of[0].use.device], of) for of in edges.values()]
    width = max((len(title(device.ref)) for device, _ in uses), default=0)
    for device, of in uses:
        yield from _device_line(device, of, width, explained, style)
    entries = [*_uses(claim, explained), *(_prepare(one, explained) for one in claim.records)]
    yield from (f"  {line}" for line in format_entries(entries, style))


def _witnesses(claim: ClaimFacts) -> tuple[Provenance, ...]:
    view = claim.view
    told = [edge.witness for edge in view.devices] + [edge.witness for edge in view.consumers]
    return tuple(dict.fromkeys([*told, *(witness for _, witness in view.objects)]))


def _device_line(
    device: DeviceFacts, edges: Sequence[DeviceEdge], width: int, explained: Explained, style: Style
) -> Iterator[str]:
    look = LOOKS[device.severity]
    sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
    name = clean(title(device.ref))
    lead = f"  {sign} {name}{' ' * (width - len(name))}{GAP}{style.paint(look.word.ljust(9), look.colour)}"
    requests = list(dict.fromkeys(one for edge in edges for one in edge.use.requests))[:REQUESTS_MAX]
    texts = [f"for {', '.join(requests)}"] if requests else []
    if device.verdict:
        texts += _why(device.verdict.health)
    else:
        texts.append("nobody judges it")
    if device.disbelieved or device.verdict is None or device.severity > Severity.DEGRADED:
        facts = belief_facts(device, explained) if device.belief else ()
        texts += [f"the kubelet {text}" for _, text, _ in facts]
    indent = " " * (4 + width + len(GAP) + 9 + len(GAP))
    first, *rest = wrap(clean("; ".join(texts)), style, first=indent, rest=indent) or [indent]
    yield (lead + GAP + first[len(indent) :]).rstrip()
    yield from rest


def _why(health: DeviceHealth) -> list[str]:
    """Why a device is not simply Healthy, without what to do."""
    causes = [one for one in health.causes if one.severity > Severity.INFO]
    if not causes:
        return [health.message] if health.message else []
    return [f"{one.code}: {brief(one.evidence)}" for one in causes]


def _uses(claim: ClaimFacts, explained: Explained) -> Iterator[Entry]:
    """Which containers use it, and for whom else it is reserved."""
    view = claim.view
    containers = dict.fromkeys(
        use.name if explained.kind == "pod" else f"{use.name} of {hurt.affected.pod.ref}"
        for hurt in explained.hurt
        if hurt.affected.claim == view.ref
        for use in hurt.affected.containers
    )
    if containers:
        yield Entry("containers", clean(", ".join(containers)))
    if view.waiting:
        yield Entry("waits for", clean(f"{', '.join(view.waiting)}: no device yet"), ("yellow",))
    if view.skipped:
        yield Entry("not called", clean(", ".join(view.skipped)))
    yield from _reserved(claim)


def _reserved(claim: ClaimFacts) -> Iterator[Entry]:
    for obj, witness in claim.view.objects[:1]:
        over = (
            f"; {len(obj.reserved)} entries, more than the API server takes"
            if by_kind(obj.reserved).is_over
            else ""
        )
        allocated = "" if obj.allocated else "not allocated; "
        text = f"{allocated}{_words(obj.reserved) or 'nobody'}{over} ({witness.origin})"
        yield Entry("reserved for", clean(text))
        if obj.meant_for or obj.any_pod:
            anybody = "any pod" if obj.any_pod else ""
            text = ", ".join(filter(None, [_words(obj.meant_for), anybody]))
            yield Entry("meant for", clean(f"{text}: no kubelet looks at that ({witness.origin})"))
    if claim.orphans:
        text = f"{_words(claim.orphans)}: none of the pods of --pods is behind that"
        yield Entry("orphaned?", clean(text), ("yellow",))


def _words(reserved: Sequence[Reservation]) -> str:
    """For whom; of pods only how many, for there may be hundreds."""
    kinds = by_kind(reserved)
    words = [
        format_count(len(kinds.pods), "pod") if kinds.pods else "",
        *(f"pod group {one.name}" for one in kinds.groups),
        *(f"{one.resource or 'something'} {one.name}" for one in kinds.others),
    ]
    return ", ".join(filter(None, words))


def _prepare(record: Claim, explained: Explained) -> Entry:
    outcome, over_s = record.outcome, record.over_wall_s
    last = f"{age(explained, outcome.at_wall_s)} ago"
    if outcome.verdict is None:
        over = f", unprepared {age(explained, over_s)} ago" if over_s else ""
        return Entry("prepare", clean(f"{record.driver}: prepared {last}{over}"))
    verdict = outcome.verdict
    text = f"{record.driver}: {verdict.error_class}, {verdict.code}: {verdict.summary}"
    first = f"{age(explained, verdict.first_wall_s)} ago"
    times = f"{format_count(verdict.count, 'time')}, first {first}, last {last}"
    over = ", unprepared since" if over_s else ""
    advice = f"; {verdict.advice}" if verdict.advice and not over_s else ""
    return Entry("prepare", clean(f"{text} ({times}{over}){advice}"), ("dim",) if over_s else ("red",))
