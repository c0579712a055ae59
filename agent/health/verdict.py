"""Verdicts on devices: health, message for the kubelet, time of the last change and lease (how long the
kubelet may use the verdict), derived from the causes (confirmed faults) of a device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.devices.inventory import InventoryDevice
from agent.health.evaluation import Evaluation
from agent.health.stalls import SourceStall
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.health import Cause, DeviceHealth, Health, Severity
from agent.model.source_state import SourceSample
from agent.model.time import NS, Instant, instant_at_mono

MAX_MESSAGE_BYTES: Final = 1024
"""Maximum size of a device's message [bytes]: the kubelet cuts longer ones, even within a character
(KEP-4680).
"""
_ELLIPSIS: Final = "..."


def truncate_utf8(text: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    """Return ``text`` as valid UTF-8 of at most ``limit`` bytes; a truncated text ends in ``...``."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len(_ELLIPSIS)].decode("utf-8", "ignore") + _ELLIPSIS


def kubelet_message(causes: Sequence[Cause]) -> str:
    """Return a device's message for the kubelet: code and evidence of each cause above ``info``, worst first,
    then the advice of the worst; empty if there is no such cause."""
    reported = [cause for cause in causes if cause.severity > Severity.INFO]
    if not reported:
        return ""
    facts = "; ".join(f"{cause.code}: {cause.evidence}" for cause in reported)
    return truncate_utf8(f"{facts}. Advice: {reported[0].advice}" if reported[0].advice else facts)


@dataclass(frozen=True, slots=True)
class VerdictContext:
    """Input of new verdicts, apart from rule results: last verdicts, stalled sources, addition to leases."""

    started: Instant
    """Time of the agent's first evaluation."""
    evaluated: Instant | None = None
    """Time of the last evaluation; None during the first evaluation."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """Verdicts of the last evaluation, by device."""
    stalls: Mapping[str, SourceStall] = field(default_factory=dict)
    """Sources that are stalled, or that resumed too recently to be trusted, by name of the source."""
    lease_salt_s: int = 0
    """Seconds added to every lease, 0 or 1: lets the first report after a gap differ from the last report."""


def make_verdict(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    severity: Severity,
    causes: Sequence[Cause],
    verified: Instant,
    timeout_s: int,
    attributes: tuple[tuple[str, str], ...] = (),
) -> DeviceHealth:
    """Return the verdict on a device; without causes and changes, the last verdict with a new lease.

    Args:
        severity: Severity of the device's worst cause, or a higher severity.
        causes: Causes, worst first.
        verified: Time at which the device's sources last finished a pass.
        timeout_s: Lease (how long the kubelet trusts the verdict) before ``lease_salt_s`` is added [s].
        attributes: Attributes of the device as (name, value).
    """
    last = previous.devices.get(device.subject)
    if last and not causes and _is_unchanged_ok(last, device, severity, attributes):
        return last.with_verification(verified, timeout_s + previous.lease_salt_s)
    health, text = HEALTH_OF_SEVERITY[severity], kubelet_message(causes)
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
    last: DeviceHealth, device: InventoryDevice, severity: Severity, attributes: tuple[tuple[str, str], ...]
) -> bool:
    return (
        not last.causes
        and last.severity is severity
        and last.kind == device.kind
        and last.attributes == attributes
    )


def replace_causes(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    base: DeviceHealth,
    causes: Iterable[Cause],
) -> DeviceHealth:
    """Return the verdict ``base`` with its causes replaced by ``causes``.

    Args:
        causes: All causes, including those of ``base``; causes of equal severity stay in this order.
    """
    worst_first = sorted(causes, key=lambda cause: -cause.severity)
    severity = max([base.severity, *(cause.severity for cause in worst_first)])
    lease_s = base.timeout_s - previous.lease_salt_s
    return make_verdict(
        evaluation, previous, device, severity, worst_first, base.verified, lease_s, base.attributes
    )


def add_minor_causes(
    evaluation: Evaluation,
    previous: VerdictContext,
    device: InventoryDevice,
    base: DeviceHealth,
    causes: Iterable[Cause],
) -> DeviceHealth:
    """Return the verdict ``base`` with additional causes of severity ``degraded`` or lower.

    They are listed after the causes that make the device Unknown or Unhealthy.
    """
    more = tuple(causes)
    ranked = sorted([*base.causes, *more], key=lambda cause: -min(cause.severity, Severity.UNKNOWN))
    severity = max([base.severity, *(cause.severity for cause in more)])
    lease_s = base.timeout_s - previous.lease_salt_s
    return make_verdict(
        evaluation, previous, device, severity, ranked, base.verified, lease_s, base.attributes
    )


def _since(
    previous: VerdictContext,
    last: DeviceHealth | None,
    shown: tuple[Health, Severity, str],
    causes: Iterable[Cause],
    now: Instant,
) -> Instant:
    """Return when the health, severity and message in ``shown`` began: as in the last verdict if they are
    equal; else when the newest cause began, or now if that cause is older than the last evaluation."""
    if last is not None and (last.health, last.severity, last.message) == shown:
        return last.since
    newest = max((cause.since for cause in causes if cause.severity > Severity.INFO), default=now)
    return newest if previous.evaluated is None or newest > previous.evaluated else now


def oldest_pass_time(sources: Iterable[SourceSample], now: Instant) -> Instant:
    """Return the time up to which all of a device's sources were read: the oldest of their last passes."""
    return instant_at_mono(min((source.beat_ns for source in sources), default=now.mono_ns), now)


def lease_seconds(evaluation: Evaluation, sources: Iterable[SourceSample]) -> int:
    """Return the lease of a verdict, how long the kubelet trusts it [s]: the configured one, but at least
    three periods of the slowest source, so that the verdict does not expire between two passes."""
    return max(evaluation.settings.lease_s, *(-(-3 * source.period_ns // NS) for source in sources), 0)
