"""``drahealth explain`` for people. Pure: it takes values, a style and a time, and returns text.

First what was asked for, then whom it concerns, then what is wrong with what was said; last of all who said
what, how old it is, and what it costs that others said nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from agent.cli.explain.claim_text import of_claim, of_pod
from agent.cli.explain.device_text import age, of_device
from agent.cli.explain.words import COSTS
from agent.cli.history.text import table
from agent.cli.output.text import Entry, clean, format_entries
from agent.model.claim_sources import ConsumerKind
from agent.model.consumers import ConsumerEdge
from agent.model.reading import Absence

if TYPE_CHECKING:
    from agent.cli.explain.words import Explained
    from agent.cli.output.terminal import Style
    from agent.model.claim_sources import PodRef


def render(explained: Explained, style: Style) -> str:
    """All of it."""
    parts = {"device": of_device, "pod": of_pod, "claim": of_claim}[explained.kind]
    is_there = explained.devices or explained.claims or explained.pods
    lines = list(parts(explained, style)) if is_there else ["nobody knows it any more; it was recorded:"]
    if explained.ended:
        title = ["", "before:"] if is_there else []
        lines += [*title, "", *table(explained.ended, style, explained.now.wall_s)]
    for entries in (_troubles(explained), _sources(explained)):
        if entries:
            lines += ["", *format_entries(entries, style)]
    return "\n".join(lines) + "\n"


def _troubles(explained: Explained) -> list[Entry]:
    """What is not as it should be, or not clear."""
    entries = [Entry("consumer", clean(text)) for text in _others(explained)]
    entries += [Entry("the same?", clean(text)) for text in _same(explained)]
    for risk in explained.risks:
        text = f"{risk.pod} would be refused {risk.claim} if its sandbox were made again: {risk.why}"
        entries.append(Entry("risk", clean(f"{text} ({risk.kubelets})"), ("yellow",)))
    for conflict in explained.conflicts:
        said = "; ".join(f"{one.witness.origin}: {one.text}" for one in conflict.assertions)
        entries.append(Entry("conflict", clean(f"{conflict.subject}: {said}"), ("yellow",)))
    return entries


def _others(explained: Explained) -> Iterator[str]:
    """Who holds a claim and is no pod; of a claim that is shown in full, it says so itself."""
    if explained.kind != "device":
        return
    for claim in explained.claims:
        for edge in claim.view.consumers:
            if edge.consumer.kind is not ConsumerKind.POD:
                yield f"{claim.view.ref} is reserved for {_consumer(edge)} ({edge.witness.origin})"


def _same(explained: Explained) -> Iterator[str]:
    """Pods that may be the same: of some only the names are known, of others only the UIDs."""
    halves: dict[tuple[PodRef, ...], list[PodRef]] = {}
    for pod in explained.pods:
        if pod.maybe:
            halves.setdefault(pod.maybe, []).append(pod.view.ref)
    pairs = {
        tuple(sorted((tuple(sorted(some)), tuple(sorted(others))), key=lambda refs: not refs[0].name))
        for others, some in halves.items()
    }
    for named, others in sorted(pairs):
        text = f"{_whom(named)}, whose UID nobody tells, and {_whom(others)}, whose name nobody tells"
        end = "one pod or two" if len(named) == len(others) == 1 else "some may be the same"
        yield f"{text}, have a claim in common: {end}"


def _whom(pods: Sequence[PodRef]) -> str:
    return str(pods[0]) if len(pods) == 1 else f"{len(pods)} pods"


def _consumer(edge: ConsumerEdge) -> str:
    one = edge.consumer
    what = one.kind.value if one.kind is ConsumerKind.POD_GROUP else one.resource or "something"
    return f"{what} {one.name}"


def _sources(explained: Explained) -> list[Entry]:
    """Who said what, how old it is; then who did not, and what that costs."""
    entries = []
    for one in explained.accounts:
        if one.absence:
            continue
        at = explained.now.wall_s if one.written_s is None else one.written_s
        when = "asked now" if one.written_s is None else f"of {age(explained, at)} ago"
        text = f"{one.source}: {one.found}, {when} ({one.place})"
        entries.append(Entry("sources", clean(text)))
        entries += [Entry("sources", clean(f"{one.source}: {wrong}"), ("yellow",)) for wrong in one.wrong]
    for one in explained.accounts:
        if one.absence:
            cost = COSTS.get(one.source, "")
            paint = () if one.absence is Absence.ABSENT else ("yellow",)
            entries.append(Entry("without", clean(f"{one.source}: {cost} ({one.why})"), paint))
    return entries
