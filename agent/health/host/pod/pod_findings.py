"""What is wrong with pods, as notes and as causes of the devices that they use.

A note names all devices of its pod. It is a cause of one only where it says something of what that device
gives: that a pod ran out of memory says nothing of its GPU. Which those are is said beside the rules, in
agent.health.host.cgroup.rules and agent.health.host.pod.rules.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from agent.devices.inventory import Device
from agent.health.evaluation import Evaluation, Subject
from agent.health.message import cut
from agent.health.verdict import PreviousVerdicts, with_lesser
from agent.model.health import Cause, DeviceHealth, Note, Severity

NAMED: Final = 3
TEXT_LIMIT: Final = 512
"""Of one thing among several that are told as one [bytes]."""


class AffectedDevice(NamedTuple):
    """What is wrong with a pod, as it is told of one device that it uses."""

    subject: str
    """Of the device."""
    cause: Cause
    severity: Severity
    evidence: str
    """The pod first."""


class PodIssue(NamedTuple):
    """One thing that is wrong with a pod or a container."""

    note: Note
    concerns: tuple[AffectedDevice, ...] = ()


def listed(texts: Iterable[str]) -> str:
    """The first of them, and how many more there are; the same in whatever order they came."""
    kinds = sorted(set(texts))
    more = [f"and {len(kinds) - NAMED} more"] if len(kinds) > NAMED else []
    return "; ".join([*map(brief, kinds[:NAMED]), *more])


def brief(text: str) -> str:
    """As much of it as is told where it is one among several."""
    return cut(text, TEXT_LIMIT)


def with_troubles(
    look: Evaluation,
    before: PreviousVerdicts,
    troubles: Iterable[PodIssue],
    devices: Mapping[Subject, Device],
    verdicts: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """The verdicts on devices whose pods are in trouble: what all of these suffer alike is one cause.

    Args:
        devices: All that are judged.
        verdicts: On them, without what is wrong with pods.
    """
    found: dict[str, dict[str, list[AffectedDevice]]] = {}
    for trouble in troubles:
        for one in trouble.concerns:
            found.setdefault(one.subject, {}).setdefault(one.cause.code, []).append(one)
    for subject, by_code in found.items():
        causes = map(_cause, by_code.values())
        yield subject, with_lesser(look, before, devices[subject], verdicts[subject], causes)


def _cause(alike: Sequence[AffectedDevice]) -> Cause:
    """What is told of one code: what is only a word for this device gives way to what is more."""
    severity = max(one.severity for one in alike)
    worst = [one for one in alike if one.severity is severity]
    return replace(
        worst[0].cause,
        severity=severity,
        evidence=listed(one.evidence for one in worst),
        since=min((one.cause.since for one in worst), key=lambda since: since.mono_ns),
    )
