"""Log lines that name the pods affected by a change of a device's health. Pure."""

from collections.abc import Container, Mapping, Sequence
from typing import Final, NamedTuple

from agent.devices.consumers.consumer_queries import affected_pods
from agent.devices.consumers.current_uses import current_uses
from agent.devices.consumers.device_health_lookup import health_lookup
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.claim_sources import PodRef
from agent.model.consumers import AffectedPod, ConsumerMap
from agent.model.health import DeviceHealth, Health
from agent.model.report import Report

PODS_MAX: Final = 4
"""Largest number of pods that one log line names as affected, and again as possibly affected."""
LINES_MAX: Final = 16
"""Largest number of log lines that one call of :func:`impact_lines` returns."""
_TEXT_MAX: Final = 253
"""Length to which names are cut, the limit of names in Kubernetes [characters]."""
_URGENCY: Final = (Health.UNHEALTHY, Health.UNKNOWN, Health.HEALTHY)

HealthByDevice = Mapping[DeviceRef, Health]
"""Last logged health of each device in use that is not Healthy."""


class ImpactLines(NamedTuple):
    """Log lines about changed health of devices in use, and the health that was logged so far."""

    not_healthy: tuple[str, ...]
    """Log lines about devices that are Unhealthy or Unknown; a last line counts devices without a line."""
    recovered: tuple[str, ...]
    """Log lines about devices that are Healthy again."""
    reported: HealthByDevice


def health_of_claimed_devices(
    consumers: ConsumerMap, report: Report, served: Container[str]
) -> Mapping[DeviceRef, DeviceHealth]:
    """Return the health of each device that a claim has allocated.

    Args:
        consumers: Map of claims, devices and pods.
        report: Newest health report.
        served: Drivers that the agent serves.
    """
    health_of = health_lookup(report, served)
    return {ref: health for ref in consumers.devices if (health := health_of(ref)) is not None}


def prepared_devices_by_pod(consumers: ConsumerMap) -> Mapping[str, tuple[DeviceRef, ...]]:
    """Return the devices that are prepared for each pod, by pod UID."""
    found: dict[str, set[DeviceRef]] = {}
    for use in current_uses(consumers).values():
        if use.pod.uid:
            found.setdefault(use.pod.uid, set()).add(use.device)
    return {uid: tuple(sorted(devices)) for uid, devices in sorted(found.items())}


def pod_names_by_uid(consumers: ConsumerMap) -> Mapping[str, str]:
    """Return ``<namespace>/<name>`` of each pod whose name is known, by pod UID."""
    return {ref.uid: str(ref) for ref in consumers.pods if ref.uid and ref.name}


def impact_lines(
    consumers: ConsumerMap, devices: Mapping[DeviceRef, DeviceHealth], reported: HealthByDevice
) -> ImpactLines:
    """Return one line about each device in use whose health differs from `reported`, up to LINES_MAX.

    Args:
        consumers: Map of claims, devices and pods.
        devices: Result of :func:`health_of_claimed_devices`.
        reported: ``reported`` of the last result. It lacks devices that no pod used; they get a line once a
            pod uses them.
    """
    now = {ref: device.health for ref, device in devices.items()}
    changed = [ref for ref, health in now.items() if health is not reported.get(ref, Health.HEALTHY)]
    changed.sort(key=lambda ref: (_URGENCY.index(now[ref]), ref))
    lines: dict[bool, list[str]] = {True: [], False: []}
    unused, left_out = set(), 0
    for ref in changed:
        if sum(map(len, lines.values())) >= LINES_MAX:
            left_out += any(consumers.claims[claim].consumers for claim in consumers.devices[ref])
        elif users := [use for use in affected_pods(consumers, ref) if not use.pod.has_ended]:
            lines[now[ref] is Health.HEALTHY].append(_impact_line(ref, devices[ref], users))
        else:
            unused.add(ref)
    if left_out:
        lines[False].append(
            f"{left_out} more devices in use have changed their health; run drahealth explain to see them"
        )
    now_reported: dict[DeviceRef, Health] = {
        ref: health for ref, health in now.items() if health is not Health.HEALTHY and ref not in unused
    }
    # of an embedding driver that does not answer, the last health counts
    now_reported |= {
        ref: last for ref, last in reported.items() if ref in consumers.devices and ref not in now
    }
    return ImpactLines(
        tuple(map(_printable, lines[False])), tuple(map(_printable, lines[True])), now_reported
    )


def _impact_line(ref: DeviceRef, health: DeviceHealth, users: Sequence[AffectedPod]) -> str:
    sure = [use for use in users if use.is_certain]
    maybe = [use for use in users if not use.is_certain]
    if health.health is Health.HEALTHY:
        return f"{ref} is Healthy again; used by {_pods_text(sure or maybe)}"
    code = f" ({health.causes[0].code})" if health.causes else ""
    parts = [f"affects {_pods_text(sure)}"] if sure else []
    parts += [f"may affect {_pods_text(maybe)}"] if maybe else []
    return f"{ref} is {health.health.name.capitalize()}{code}: {'; '.join(parts)}"


def _pods_text(users: Sequence[AffectedPod]) -> str:
    by_pod: dict[PodRef, list[AffectedPod]] = {}
    for use in users:
        by_pod.setdefault(use.pod.ref, []).append(use)
    texts = [_pod_text(ref, uses) for ref, uses in list(by_pod.items())[:PODS_MAX]]
    more = len(by_pod) - len(texts)
    return ", ".join([*texts, f"and {more} more"] if more else texts)


def _pod_text(ref: PodRef, uses: Sequence[AffectedPod]) -> str:
    pod = uses[0].pod.known
    owner = f"{pod.controller}, " if pod and pod.controller else ""
    claims = dict.fromkeys(_claim_text(use.claim, use) for use in uses)
    return f"{_truncated(str(ref))} ({_truncated(owner)}{'; '.join(claims)})"


def _claim_text(claim: ClaimRef, use: AffectedPod) -> str:
    names = ", ".join(_truncated(container.name) for container in use.containers[:PODS_MAX])
    noun = "container" if len(use.containers) == 1 else "containers"
    group = f" of pod group {_truncated(use.group)}" if use.group else ""
    return f"claim {_truncated(str(claim))}{group}" + (f": {noun} {names}" if names else "")


def _truncated(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


def _printable(text: str) -> str:
    """Replace unprintable characters in a text, such as a pod's name, which would break the log line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
