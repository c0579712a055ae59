"""Text of ``drahealth explain`` about a device and the pods that use it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from agent.cli.explain.build import container_name, pod_uid
from agent.cli.explain.model import AGENT, full_device_name
from agent.cli.output.text import (
    BADGES,
    GAP,
    ListEntry,
    TextTable,
    advice_of_device,
    clean,
    format_count,
    format_entries,
    hardware_identity,
    shorten_ids,
    wrap,
)
from agent.devices.consumers.consumer_queries import pod_owner, pod_state
from agent.model.claim_sources import Origin
from agent.model.consumers import AffectedPod, PodView
from agent.model.health import DeviceHealth, Severity, most_needed_first
from agent.model.time import format_age

if TYPE_CHECKING:
    from agent.cli.explain.model import DeviceFacts, Explanation
    from agent.cli.output.terminal import TextStyle
    from agent.model.claim import ClaimRef
    from agent.model.claim_sources import PodRef, Provenance
    from agent.model.health import NonDeviceCause

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
    yield from (f"  {line}" for line in format_entries(entries, style))


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
