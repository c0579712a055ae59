"""Verdicts: health, message, time of the last change and lease of a device, from its causes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.devices.inventory import Device
from agent.health.evaluation import Evaluation
from agent.health.stalls import SourceStall
from agent.health.state_machine import HEALTH
from agent.model.health import Cause, DeviceHealth, Health, Severity
from agent.model.source import SourceSample
from agent.model.time import NS, Instant, at_mono

LIMIT: Final = 1024
"""Maximum size of a device's message [bytes]. The kubelet truncates longer messages, even within a character
(KEP-4680)."""
_CUT: Final = "..."


def truncated(text: str, limit: int = LIMIT) -> str:
    """Return ``text`` as valid UTF-8 of at most ``limit`` bytes; a truncated text ends in ``...``."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len(_CUT)].decode("utf-8", "ignore") + _CUT


def message(causes: Sequence[Cause]) -> str:
    """Return the message for the kubelet: codes and evidence, worst first, then the advice on the worst.

    Causes of severity ``info`` are left out. The message changes only when the facts do.
    """
    reported = [cause for cause in causes if cause.severity > Severity.INFO]
    if not reported:
        return ""
    facts = "; ".join(f"{cause.code}: {cause.evidence}" for cause in reported)
    return truncated(f"{facts}. Advice: {reported[0].advice}" if reported[0].advice else facts)


@dataclass(frozen=True, slots=True)
class PreviousVerdicts:
    """Verdicts of the last evaluation, and values that all verdicts of this evaluation share."""

    started: Instant
    """Time of the first evaluation."""
    evaluated: Instant | None = None
    """Time of the last evaluation; None in the first one."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """Verdicts of the last evaluation, by device."""
    stalled: Mapping[str, SourceStall] = field(default_factory=dict)
    """Sources that are stalled or have only just resumed, by name."""
    lease_salt_s: int = 0
    """Number added to every lease [s]."""


def verdict(
    evaluation: Evaluation,
    previous: PreviousVerdicts,
    device: Device,
    severity: Severity,
    causes: Sequence[Cause],
    verified: Instant,
    timeout_s: int,
    attributes: tuple[tuple[str, str], ...] = (),
) -> DeviceHealth:
    """Return the verdict on a device.

    Args:
        severity: Severity of its worst cause, or a higher one.
        causes: Causes, worst first.
        timeout_s: Lease without ``lease_salt_s``.
    """
    last = previous.devices.get(device.subject)
    if last and not causes and _is_unchanged_ok(last, device, severity, attributes):
        return last.again(verified, timeout_s + previous.lease_salt_s)
    health, text = HEALTH[severity], message(causes)
    return DeviceHealth(
        driver=device.driver,
        pool=device.pool or evaluation.settings.node,
        device=device.name,
        kind=device.kind,
        health=health,
        severity=severity,
        message=text,
        since=_since(previous, last, (health, severity, text), causes, evaluation.now),
        verified=verified,
        timeout_s=timeout_s + previous.lease_salt_s,
        causes=tuple(causes),
        attributes=attributes,
    )


def _is_unchanged_ok(
    last: DeviceHealth, device: Device, severity: Severity, attributes: tuple[tuple[str, str], ...]
) -> bool:
    """Return True if the last verdict on a device had no causes, and had this severity and these
    attributes."""
    return (
        not last.causes
        and last.severity is severity
        and last.kind == device.kind
        and last.attributes == attributes
    )


def with_causes(
    evaluation: Evaluation,
    previous: PreviousVerdicts,
    device: Device,
    found: DeviceHealth,
    causes: Iterable[Cause],
) -> DeviceHealth:
    """Return a verdict with other causes.

    Args:
        found: Verdict to extend.
        causes: All causes, including those of ``found``; causes of equal severity stay in this order.
    """
    worst_first = sorted(causes, key=lambda cause: -cause.severity)
    severity = max([found.severity, *(cause.severity for cause in worst_first)])
    lease_s = found.timeout_s - previous.lease_salt_s
    return verdict(
        evaluation, previous, device, severity, worst_first, found.verified, lease_s, found.attributes
    )


def with_minor_causes(
    evaluation: Evaluation,
    previous: PreviousVerdicts,
    device: Device,
    found: DeviceHealth,
    causes: Iterable[Cause],
) -> DeviceHealth:
    """Return a verdict with additional causes that leave the device usable, listed after the causes that make
    it Unknown or Unhealthy.

    Args:
        found: Verdict to extend.
        causes: Additional causes, at most ``degraded``.
    """
    more = tuple(causes)
    ranked = sorted([*found.causes, *more], key=lambda cause: -min(cause.severity, Severity.UNKNOWN))
    severity = max([found.severity, *(cause.severity for cause in more)])
    lease_s = found.timeout_s - previous.lease_salt_s
    return verdict(evaluation, previous, device, severity, ranked, found.verified, lease_s, found.attributes)


def _since(
    previous: PreviousVerdicts,
    last: DeviceHealth | None,
    shown: tuple[Health, Severity, str],
    causes: Iterable[Cause],
    now: Instant,
) -> Instant:
    """Return when the shown verdict began: as before if the verdict is unchanged; else when its newest cause
    began if that was after the last evaluation, else now.
    """
    if last is not None and (last.health, last.severity, last.message) == shown:
        return last.since
    newest = max((cause.since for cause in causes if cause.severity > Severity.INFO), default=now)
    return newest if previous.evaluated is None or newest > previous.evaluated else now


def verified_at(sources: Iterable[SourceSample], now: Instant) -> Instant:
    """Return the time of the oldest last pass among the device's sources, on both clocks."""
    return at_mono(min((source.beat_ns for source in sources), default=now.mono_ns), now)


def lease_seconds(evaluation: Evaluation, sources: Iterable[SourceSample]) -> int:
    """Return the lease of a verdict [s]: at least three periods of the slowest source, so that the lease
    outlives the next verification.
    """
    return max(evaluation.settings.lease_s, *(-(-3 * source.period_ns // NS) for source in sources), 0)
