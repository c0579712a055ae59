"""From causes to a verdict: what is said of a device, since when, and for how long that may be believed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.devices.inventory import Device
from agent.health import message
from agent.health.evaluation import Evaluation
from agent.health.stalls import Stall
from agent.health.state_machine import HEALTH
from agent.model.health import Cause, DeviceHealth, Health, Severity
from agent.model.source import SourceSample
from agent.model.time import NS, Instant, at_mono


@dataclass(frozen=True, slots=True)
class PreviousVerdicts:
    """What was said last, and what all verdicts of a look have in common."""

    began: Instant
    """When the first look was."""
    looked: Instant | None = None
    """When the last look was."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """The last verdicts, by subject."""
    stalled: Mapping[str, Stall] = field(default_factory=dict)
    """Sources that stand still, or did so until a moment ago."""
    nudge_s: int = 0
    """Added to every lease [s]."""


def verdict(
    look: Evaluation,
    before: PreviousVerdicts,
    device: Device,
    severity: Severity,
    causes: Sequence[Cause],
    verified: Instant,
    timeout_s: int,
    attributes: tuple[tuple[str, str], ...] = (),
) -> DeviceHealth:
    """What is said of a device.

    Args:
        severity: Its worst cause's, unless something outranks that.
        causes: Worst first.
        timeout_s: The lease, before the nudge.
    """
    said = before.devices.get(device.subject)
    if said and not causes and _is_well(said, device, severity, attributes):
        return said.again(verified, timeout_s + before.nudge_s)
    health, text = HEALTH[severity], message.message(causes)
    return DeviceHealth(
        driver=device.driver,
        pool=device.pool or look.settings.node,
        device=device.name,
        kind=device.kind,
        health=health,
        severity=severity,
        message=text,
        since=_since(before, said, (health, severity, text), causes, look.now),
        verified=verified,
        timeout_s=timeout_s + before.nudge_s,
        causes=tuple(causes),
        attributes=attributes,
    )


def _is_well(
    said: DeviceHealth, device: Device, severity: Severity, attributes: tuple[tuple[str, str], ...]
) -> bool:
    """Whether a device was as it is now, and there was nothing to say of it."""
    return (
        not said.causes
        and said.severity is severity
        and said.kind == device.kind
        and said.attributes == attributes
    )


def with_causes(
    look: Evaluation, before: PreviousVerdicts, device: Device, found: DeviceHealth, causes: Iterable[Cause]
) -> DeviceHealth:
    """A verdict with more causes than it had.

    Args:
        found: The verdict.
        causes: All of them, its own too; of those that are as severe, the first are told first.
    """
    worst_first = sorted(causes, key=lambda cause: -cause.severity)
    severity = max([found.severity, *(cause.severity for cause in worst_first)])
    lease_s = found.timeout_s - before.nudge_s
    return verdict(look, before, device, severity, worst_first, found.verified, lease_s, found.attributes)


def with_lesser(
    look: Evaluation, before: PreviousVerdicts, device: Device, found: DeviceHealth, causes: Iterable[Cause]
) -> DeviceHealth:
    """A verdict with more causes, which leave the device usable: what says that it is not goes before them.

    Args:
        found: The verdict.
        causes: Those that come to its own, degraded at most.
    """
    more = tuple(causes)
    ranked = sorted([*found.causes, *more], key=lambda cause: -min(cause.severity, Severity.UNKNOWN))
    severity = max([found.severity, *(cause.severity for cause in more)])
    lease_s = found.timeout_s - before.nudge_s
    return verdict(look, before, device, severity, ranked, found.verified, lease_s, found.attributes)


def _since(
    before: PreviousVerdicts,
    last: DeviceHealth | None,
    said: tuple[Health, Severity, str],
    causes: Iterable[Cause],
    now: Instant,
) -> Instant:
    """When what is said of a device began: with its newest cause, if that came since the last look."""
    if last is not None and (last.health, last.severity, last.message) == said:
        return last.since
    newest = max((cause.since for cause in causes if cause.severity > Severity.INFO), default=now)
    return newest if before.looked is None or newest > before.looked else now


def verified_by(sources: Iterable[SourceSample], now: Instant) -> Instant:
    """When the last of the device's sources was read to its end, on both clocks."""
    return at_mono(min((source.beat_ns for source in sources), default=now.mono_ns), now)


def lease_of(look: Evaluation, sources: Iterable[SourceSample]) -> int:
    """At least three periods of the slowest source: a lease must outlive the next verification [s]."""
    return max(look.settings.lease_s, *(-(-3 * source.period_ns // NS) for source in sources), 0)
