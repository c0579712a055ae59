"""Whom a change of devices' health hurts, in lines for the log. Pure.

One line for each device that somebody uses, and nothing for the others; of very many, a bounded number.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Final, NamedTuple

from agent.devices.consumers.affected import affected
from agent.devices.consumers.driver_names import healths
from agent.devices.consumers.in_use import in_use
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodRef
from agent.model.consumers import Affected, ConsumerMap
from agent.model.health import DeviceHealth, Health
from agent.model.report import Report

PODS_MAX: Final = 4
"""Pods that are named of those that a device surely hurts, and of those that it may."""
LINES_MAX: Final = 16
"""Devices that are told of one by one."""
_TEXT_MAX: Final = 253
"""As long as names in Kubernetes are."""
_URGENCY: Final = (Health.UNHEALTHY, Health.UNKNOWN, Health.HEALTHY)

Told = Mapping[DeviceRef, Health]
"""Of the devices that pods use and that are not Healthy: what was last told of them."""


class ImpactLines(NamedTuple):
    """What there is to be told, and what has been told with it."""

    bad: tuple[str, ...]
    """Lines about devices that are no longer Healthy, and about what was left out of them."""
    good: tuple[str, ...]
    """Lines about devices that are Healthy again."""
    told: Told


def health_of(known: ConsumerMap, report: Report, served: Container[str]) -> Mapping[DeviceRef, DeviceHealth]:
    """The devices of a report that claims have, under the names that claims have for them.

    Args:
        served: Drivers that the agent serves: before they declare anything they mean the host's own devices.
    """
    of = healths(report, served)
    return {ref: health for ref in known.devices if (health := of(ref)) is not None}


def prepared_for(known: ConsumerMap) -> Mapping[str, tuple[DeviceRef, ...]]:
    """The devices that were prepared on this node for each pod, by its UID."""
    found: dict[str, set[DeviceRef]] = {}
    for one in in_use(known).values():
        if one.pod.uid:
            found.setdefault(one.pod.uid, set()).add(one.device)
    return {uid: tuple(sorted(devices)) for uid, devices in sorted(found.items())}


def names_of(known: ConsumerMap) -> Mapping[str, str]:
    """Pods by UID, of those whose name somebody told."""
    return {ref.uid: str(ref) for ref in known.pods if ref.uid and ref.name}


def tell(known: ConsumerMap, devices: Mapping[DeviceRef, DeviceHealth], told: Told) -> ImpactLines:
    """What is to be said of devices whose health is no longer what was last told of it.

    Args:
        known: Who uses what.
        devices: As of :func:`health_of`.
        told: By the last call. A device that nobody used then was not told of: who is given it is told.
    """
    now = {ref: one.health for ref, one in devices.items()}
    changed = [ref for ref, health in now.items() if health is not told.get(ref, Health.HEALTHY)]
    changed.sort(key=lambda ref: (_URGENCY.index(now[ref]), ref))
    lines: dict[bool, list[str]] = {True: [], False: []}
    unused, untold = set(), 0
    for ref in changed:
        if sum(map(len, lines.values())) >= LINES_MAX:
            untold += any(known.claims[claim].consumers for claim in known.devices[ref])
        elif hurt := [one for one in affected(known, ref) if not one.pod.has_ended]:
            lines[now[ref] is Health.HEALTHY].append(_line(ref, devices[ref], hurt))
        else:
            unused.add(ref)
    if untold:
        lines[False].append(f"{untold} more devices that pods use have changed; see drahealth explain")
    now_told = {
        ref: health for ref, health in now.items() if health is not Health.HEALTHY and ref not in unused
    }
    return ImpactLines(tuple(map(_plain, lines[False])), tuple(map(_plain, lines[True])), now_told)


def _line(ref: DeviceRef, health: DeviceHealth, hurt: Sequence[Affected]) -> str:
    sure = [one for one in hurt if one.sure]
    maybe = [one for one in hurt if not one.sure]
    if health.health is Health.HEALTHY:
        return f"{ref} is Healthy again; used by {_pods(sure or maybe)}"
    code = f" ({health.causes[0].code})" if health.causes else ""
    parts = [f"hurts {_pods(sure)}"] if sure else []
    parts += [f"may hurt {_pods(maybe)}"] if maybe else []
    return f"{ref} is {health.health.name.capitalize()}{code}: {'; '.join(parts)}"


def _pods(hurt: Sequence[Affected]) -> str:
    by_pod: dict[PodRef, list[Affected]] = {}
    for one in hurt:
        by_pod.setdefault(one.pod.ref, []).append(one)
    texts = [_pod(ref, uses) for ref, uses in list(by_pod.items())[:PODS_MAX]]
    more = len(by_pod) - len(texts)
    return ", ".join([*texts, f"and {more} more"] if more else texts)


def _pod(ref: PodRef, uses: Sequence[Affected]) -> str:
    pod = uses[0].pod.known
    owner = f"{pod.controller}, " if pod and pod.controller else ""
    claims = dict.fromkeys(_claim(one.claim, one) for one in uses)
    return f"{_short(str(ref))} ({_short(owner)}{'; '.join(claims)})"


def _claim(claim: ClaimRef, use: Affected) -> str:
    names = ", ".join(_short(one.name) for one in use.containers[:PODS_MAX])
    word = "container" if len(use.containers) == 1 else "containers"
    through = f" of pod group {_short(use.group)}" if use.group else ""
    return f"claim {_short(str(claim))}{through}" + (f": {word} {names}" if names else "")


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


def _plain(text: str) -> str:
    """On one line, whatever somebody called his pod."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
