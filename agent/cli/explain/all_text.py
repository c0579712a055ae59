"""Text of ``drahealth explain --all``: one line for each consumer of each claim on the node. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from agent.cli.explain.build import devices_of_claim
from agent.cli.explain.device_text import claim_name, pod_name_with_state
from agent.cli.explain.name_lookup import full_device_name
from agent.cli.output.table import TextTable
from agent.cli.output.text import BADGES, clean, format_count
from agent.devices.consumers.consumer_queries import direct_consumers, pod_owner
from agent.model.claim_sources import ConsumerKind
from agent.model.consumers import Relation
from agent.model.health import Severity

if TYPE_CHECKING:
    from agent.cli.explain.model import ClaimFacts, DeviceFacts, Explanation
    from agent.cli.output.terminal import TextStyle
    from agent.model.claim import ClaimRef, DeviceRef
    from agent.model.claim_sources import PodRef
    from agent.model.consumers import ClaimConsumerEdge, PodView

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
    """Return the pods that use, or may use, a claim through their pod group, by claim."""
    found: dict[ClaimRef, dict[PodRef, PodView]] = {}
    for use in explanation.affected:
        if use.affected.group:
            found.setdefault(use.affected.claim, {})[use.affected.pod.ref] = use.affected.pod
    return {claim: tuple(pods.values()) for claim, pods in found.items()}


def _consumer_rows(
    claim: ClaimFacts, pods: dict[PodRef, PodView], members: Iterable[PodView]
) -> Iterator[Row]:
    for ref, edges in direct_consumers(claim.view).items():
        yield pod_name_with_state(pods[ref]), _strongest(edges), clean(pod_owner(pods[ref]))
    for edge in dict.fromkeys(edge.consumer for edge in claim.view.consumers if not edge.consumer.pod):
        is_group = edge.kind is ConsumerKind.POD_GROUP
        kind = edge.kind.value if is_group else edge.resource or "object"
        yield clean(f"{kind} {edge.name}"), Relation.RESERVED, ""
    for pod in members:
        yield pod_name_with_state(pod), "member", clean(pod_owner(pod))


def _strongest(edges: Sequence[ClaimConsumerEdge]) -> str:
    return min((edge.relation for edge in edges), key=_STRENGTHS.__getitem__)


def _device_names(refs: Sequence[DeviceRef]) -> str:
    """Return the names of devices.

    Driver and pool are left out if they are those of the device before.
    """
    names = []
    for number, ref in enumerate(refs[:MAX_DEVICES]):
        before = refs[number - 1] if number else None
        is_same = before is not None and (before.driver, before.pool) == (ref.driver, ref.pool)
        names.append(ref.device if is_same else full_device_name(ref))
    more = len(refs) - len(names)
    return clean(", ".join([*names, f"{more} more"] if more else names)) or "not known"


def _state(claim: ClaimFacts, devices: Sequence[DeviceFacts]) -> str:
    """Return the worst state of a claim's devices with its code, and the codes of its failing prepares."""
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
