"""Log lines that name the pods affected by a change of a device's health. Pure.

Each device in use gets one line, up to a limit; unused devices get none.
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
"""Largest number of pods named as affected, and as possibly affected."""
LINES_MAX: Final = 16
"""Largest number of lines."""
_TEXT_MAX: Final = 253
"""Length limit of names in Kubernetes."""
_URGENCY: Final = (Health.UNHEALTHY, Health.UNKNOWN, Health.HEALTHY)

HealthByDevice = Mapping[DeviceRef, Health]
"""Last logged health of devices in use that are not Healthy."""


class ImpactLines(NamedTuple):
    """Lines to log, and the health that they report."""

    bad: tuple[str, ...]
    """Lines about devices that are not Healthy, and the number of lines left out."""
    good: tuple[str, ...]
    """Lines about devices that are Healthy again."""
    reported: HealthByDevice


def healths_of_claimed(
    known: ConsumerMap, report: Report, served: Container[str]
) -> Mapping[DeviceRef, DeviceHealth]:
    """Return the health of claimed devices, by the driver, pool and device name that claims use.

    Args:
        known: Map of claims, devices and pods.
        report: Newest report.
        served: Drivers that the agent serves; without declarations their devices are the host's own.
    """
    health_of = healths(report, served)
    return {ref: health for ref in known.devices if (health := health_of(ref)) is not None}


def prepared_for(known: ConsumerMap) -> Mapping[str, tuple[DeviceRef, ...]]:
    """Return the devices prepared on this node for each pod, by the pod's UID."""
    found: dict[str, set[DeviceRef]] = {}
    for use in in_use(known).values():
        if use.pod.uid:
            found.setdefault(use.pod.uid, set()).add(use.device)
    return {uid: tuple(sorted(devices)) for uid, devices in sorted(found.items())}


def names_of(known: ConsumerMap) -> Mapping[str, str]:
    """Return ``<namespace>/<name>`` of pods by UID, for pods whose name is known."""
    return {ref.uid: str(ref) for ref in known.pods if ref.uid and ref.name}


def impact_lines(
    known: ConsumerMap, devices: Mapping[DeviceRef, DeviceHealth], reported: HealthByDevice
) -> ImpactLines:
    """Return lines about devices whose health differs from `reported`.

    Args:
        known: Map of claims, devices and pods.
        devices: Result of :func:`healths_of_claimed`.
        reported: Result of the last call. A device that was unused then is not in it, so a line follows once
            a pod uses the device.
    """
    now = {ref: device.health for ref, device in devices.items()}
    changed = [ref for ref, health in now.items() if health is not reported.get(ref, Health.HEALTHY)]
    changed.sort(key=lambda ref: (_URGENCY.index(now[ref]), ref))
    lines: dict[bool, list[str]] = {True: [], False: []}
    unused, left_out = set(), 0
    for ref in changed:
        if sum(map(len, lines.values())) >= LINES_MAX:
            left_out += any(known.claims[claim].consumers for claim in known.devices[ref])
        elif users := [use for use in affected(known, ref) if not use.pod.has_ended]:
            lines[now[ref] is Health.HEALTHY].append(_line(ref, devices[ref], users))
        else:
            unused.add(ref)
    if left_out:
        lines[False].append(
            f"{left_out} more devices in use have changed their health; see drahealth explain"
        )
    now_reported = {
        ref: health for ref, health in now.items() if health is not Health.HEALTHY and ref not in unused
    }
    return ImpactLines(
        tuple(map(_printable, lines[False])), tuple(map(_printable, lines[True])), now_reported
    )


def _line(ref: DeviceRef, health: DeviceHealth, users: Sequence[Affected]) -> str:
    sure = [use for use in users if use.sure]
    maybe = [use for use in users if not use.sure]
    if health.health is Health.HEALTHY:
        return f"{ref} is Healthy again; used by {_pods(sure or maybe)}"
    code = f" ({health.causes[0].code})" if health.causes else ""
    parts = [f"affects {_pods(sure)}"] if sure else []
    parts += [f"may affect {_pods(maybe)}"] if maybe else []
    return f"{ref} is {health.health.name.capitalize()}{code}: {'; '.join(parts)}"


def _pods(users: Sequence[Affected]) -> str:
    by_pod: dict[PodRef, list[Affected]] = {}
    for use in users:
        by_pod.setdefault(use.pod.ref, []).append(use)
    texts = [_pod(ref, uses) for ref, uses in list(by_pod.items())[:PODS_MAX]]
    more = len(by_pod) - len(texts)
    return ", ".join([*texts, f"and {more} more"] if more else texts)


def _pod(ref: PodRef, uses: Sequence[Affected]) -> str:
    pod = uses[0].pod.known
    owner = f"{pod.controller}, " if pod and pod.controller else ""
    claims = dict.fromkeys(_claim(use.claim, use) for use in uses)
    return f"{_truncated(str(ref))} ({_truncated(owner)}{'; '.join(claims)})"


def _claim(claim: ClaimRef, use: Affected) -> str:
    names = ", ".join(_truncated(container.name) for container in use.containers[:PODS_MAX])
    noun = "container" if len(use.containers) == 1 else "containers"
    group = f" of pod group {_truncated(use.group)}" if use.group else ""
    return f"claim {_truncated(str(claim))}{group}" + (f": {noun} {names}" if names else "")


def _truncated(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


def _printable(text: str) -> str:
    """Replace characters that would break the line, such as in a pod's name."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
