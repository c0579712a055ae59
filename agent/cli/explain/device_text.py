"""A device and whom it hurts, for ``drahealth explain``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from agent.cli.explain.assertions import container_of, pod_of
from agent.cli.explain.find import title
from agent.cli.explain.words import AGENT
from agent.cli.output.fold import identity_of
from agent.cli.output.text import (
    GAP,
    LOOKS,
    Entry,
    brief,
    clean,
    format_age,
    format_count,
    format_entries,
    wrap,
)
from agent.model.claim_sources import Origin
from agent.model.consumers import Affected
from agent.model.health import DeviceHealth, Severity

if TYPE_CHECKING:
    from agent.cli.explain.words import DeviceFacts, Explained
    from agent.cli.output.terminal import Style
    from agent.model.claim import ClaimRef
    from agent.model.claim_sources import PodRef, Provenance
    from agent.model.health import Note

Fact = tuple[str, str, tuple[str, ...]]
"""What it is about, the text, and its colours."""

TITLES: Final = ("CLAIM", "POD", "CONTAINERS", "OWNER", "TOLD BY")
INDENT: Final = " " * 4


def age(explained: Explained, wall_s: float) -> str:
    """How long ago that was."""
    return format_age(explained.now.wall_s - wall_s)


def origins(witnesses: Iterable[Provenance]) -> str:
    """Who says so, each once."""
    said = {one.origin for one in witnesses}
    return ", ".join(origin for origin in Origin if origin in said)


def of_device(explained: Explained, style: Style) -> Iterator[str]:
    """A device in full, and below it who uses it."""
    for device in explained.devices:
        yield from _device(device, explained, style)
    yield ""
    over = {one.affected.pod.ref for one in explained.hurt if one.affected.pod.has_ended}
    sure = {one.affected.pod.ref for one in explained.hurt if one.affected.sure} - over
    others = {one.affected.pod.ref for one in explained.hurt} - sure - over
    if not explained.hurt and not explained.claims:
        yield "nobody is known to use it"
        return
    may = f", {format_count(len(others), 'other')} may" if others else ""
    did = f", {len(over)} {'has' if len(over) == 1 else 'have'} ended" if over else ""
    claims = format_count(len(explained.claims), "claim")
    yield f"used by {_least(explained, sure)}{format_count(len(sure), 'pod')}{may}{did}, through {claims}"
    yield ""
    yield from _table(explained, style)


def _least(explained: Explained, users: AbstractSet[PodRef]) -> str:
    """How many pods there are at least, if those with names may be those with UIDs; else nothing."""
    halves = [one.view.ref for one in explained.pods if one.maybe and one.view.ref in users]
    twice = min(sum(not ref.name for ref in halves), sum(not ref.uid for ref in halves))
    return f"{len(users) - twice} to " if twice else ""


def _device(device: DeviceFacts, explained: Explained, style: Style) -> Iterator[str]:
    """A device in full."""
    look = LOOKS[device.severity]
    sign = style.paint(look.sign if style.unicode else look.ascii, look.colour)
    name = style.paint(clean(title(device.ref)), "bold")
    yield f"{sign} {name}{GAP}{style.paint(look.word, look.colour)}{_when(device, explained)}"
    if device.verdict:
        health = device.verdict.health
        yield from _causes(health, explained, style)
        yield from wrap(identity_of(health), style, first=INDENT, rest=INDENT + "  ", paint=("dim",))
    entries = [Entry(name, clean(text), paint) for name, text, paint in _facts(device, explained)]
    yield from (f"  {line}" for line in format_entries(entries, style))


def _when(device: DeviceFacts, explained: Explained) -> str:
    """Since when, how fresh, and who says so."""
    verdict = device.verdict
    if verdict is None:
        is_belief = device.severity is not Severity.UNKNOWN
        return ": nobody else than the kubelet says so" if is_belief else ": nobody judges it"
    verified = f"verified {age(explained, verdict.health.verified.wall_s)} ago"
    if verdict.by != AGENT:
        return f", {verified}, says {clean(verdict.by)}"
    return f" for {age(explained, _so_since_s(verdict.health))}, {verified}, says the agent"


def _so_since_s(health: DeviceHealth) -> float:
    """Since when it is as bad as it is [s since 1970]; the verdict's own time moves with lesser causes."""
    worst = (cause.since.wall_s for cause in health.causes if cause.severity is health.severity)
    return min(worst, default=health.since.wall_s)


def _causes(health: DeviceHealth, explained: Explained, style: Style) -> Iterator[str]:
    arrow = "→ " if style.unicode else "> "
    if not health.causes:
        yield from wrap(brief(health.message), style, first=INDENT, rest=INDENT)
    for cause in health.causes:
        text = f"{clean(cause.code)}: {brief(cause.evidence)} ({age(explained, cause.since.wall_s)} ago)"
        paint = () if cause.severity > Severity.INFO else ("dim",)
        yield from wrap(text, style, first=INDENT, rest=INDENT + "  ", paint=paint)
        if cause.advice and cause.severity > Severity.INFO:
            advice = arrow + clean(cause.advice)
            yield from wrap(advice, style, first=INDENT, rest=INDENT + "  ", paint=("cyan",))


def _facts(device: DeviceFacts, explained: Explained) -> Iterator[Fact]:
    """What else there is to say of a device."""
    if device.told and device.verdict and device.told.by != device.verdict.by:
        yield "told", f"{_told(device.told.health, device.verdict.health)} ({device.told.by})", ()
    yield from belief_facts(device, explained)
    for taint in device.taints or ():
        value = f"{taint.key}={taint.value}:{taint.effect}"
        yield "taint", f"{value}, offered for {age(explained, taint.added_wall_s)}", ("yellow",)
    if device.taints == ():
        yield "taint", "none is offered", ()
    for fault in device.broken:
        when = f"{age(explained, fault.told_wall_s)} ago, while preparing {fault.claim}"
        yield "found broken", f"{fault.code}: {fault.evidence} ({when})", ("red",)
    causes = device.verdict.health.causes if device.verdict else ()
    for note in device.notes:
        cause, whose = note.cause, _whose(note, explained)
        if any(one.code == cause.code and f"{whose}: {cause.evidence}" in one.evidence for one in causes):
            continue  # it was told as a cause
        text = f"{whose}: {cause.code}: {brief(cause.evidence)}"
        paint = ("yellow",) if cause.severity > Severity.INFO else ()
        yield "noted", f"{text} ({age(explained, cause.since.wall_s)} ago)", paint


def _whose(note: Note, explained: Explained) -> str:
    """The pod that a note is about, by its name if that is known, and the container."""
    uid = pod_of(note)
    of = next((one.view for one in explained.pods if uid and one.view.ref.uid == uid), None)
    if of is None:
        return note.subject
    container = container_of(note, of)
    return f"{of.ref if of.ref.name else f'pod {of.ref.uid}'}{container and f' container {container}'}"


def _told(health: DeviceHealth, judged: DeviceHealth) -> str:
    """What the kubelet, or whoever forwards it, is told, beside what is so."""
    if (health.health, health.message) == (judged.health, judged.message):
        return "the same"
    return f"{health.health.name.capitalize()}{_message(health.message)}"


def belief_facts(device: DeviceFacts, explained: Explained) -> Iterator[Fact]:
    """What the kubelet believes."""
    belief = device.belief
    if belief is None:
        if any(one.source == "health-state" and not one.absence for one in explained.accounts):
            yield "kubelet", "has written nothing of it: Unknown, or not watched", ()
        return
    text = f"believes {belief.health.name.capitalize()}{_message(belief.message)}"
    if belief.heard_s > 0:
        text += f", heard {age(explained, belief.heard_s)} ago"
    if belief.has_lapsed(explained.now.wall_s):
        text += f"; over its lease of {belief.lease_s:g} s: unless it has heard the same since, Unknown"
    if device.verdict and device.disbelieved:
        text += f"; it is {device.verdict.health.health.name.capitalize()}"
    yield "kubelet", text, ("yellow",) if device.disbelieved else ()


def _message(text: str) -> str:
    return f": {brief(text)}" if text else ""


# --- who uses it -------------------------------------------------------------------------------------------


def _table(explained: Explained, style: Style) -> Iterator[str]:
    """A line for each pod and claim; one for each claim of which no pod is known."""
    rows = [(one.affected.sure, _row(one.affected)) for one in explained.hurt]
    seen = {one.affected.claim for one in explained.hurt}
    for claim in explained.claims:
        if claim.view.ref not in seen:
            told = origins(edge.witness for edge in claim.view.devices)
            rows.append((False, (_claim_name(claim.view.ref), "no pod is known", "", "", told)))
    widths = [max(len(row[i]) for row in (TITLES, *(row for _, row in rows))) for i in range(len(TITLES))]

    def cells(row: Sequence[str]) -> str:
        return GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    yield style.paint(f"  {cells(TITLES)}", "dim")
    for is_sure, row in rows:
        sign = ("•" if style.unicode else "*") if is_sure else style.paint("?", "dim")
        yield f"{sign} {cells(row)}"
    if not all(is_sure for is_sure, _ in rows):
        yield style.paint("  ? may use it: the claim is not seen to be prepared for it here", "dim")


def _row(one: Affected) -> tuple[str, ...]:
    containers = ", ".join(use.name if use.sure else f"{use.name}?" for use in one.containers)
    told = origins(edge.witness for edge in one.edges)
    state = "no process" if one.pod.running is False else ""
    if one.pod.known and one.pod.has_ended:
        state = one.pod.known.phase
    pod = f"{one.pod.ref}{state and f' ({state})'}"
    return (_claim_name(one.claim), clean(pod), clean(containers), _owner(one), told)


def _owner(one: Affected) -> str:
    known = one.pod.known
    owner = known.controller if known else None
    group = one.group or (known.group if known else "")
    return clean(", ".join(filter(None, [str(owner or ""), group and f"pod group {group}"])))


def _claim_name(ref: ClaimRef) -> str:
    return clean(str(ref) if ref.uid else f"{ref} (by name)")
