"""What a reader of a health stream may believe: lists merged as the kubelet merges them. Pure."""

from typing import Final

from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.serve.grpc.gen.health_v1 import v1

DEFAULT_LEASE_S: Final = 30
"""The kubelet's, for a device whose timeout is not positive [s]."""

LONGEST_LEASE_S: Final = 86_400
"""Anything longer is cut to this [s]."""

HEALTHS: Final[dict[int, Health]] = {int(health): health for health in Health}

# A health stream tells no severity; a message with HEALTHY is how it says degraded.
SEVERITIES: Final = {
    Health.UNKNOWN: Severity.UNKNOWN,
    Health.HEALTHY: Severity.OK,
    Health.UNHEALTHY: Severity.UNHEALTHY,
}


class Merge:
    """The last word on each device, for as long as its lease lasts.

    A device that a list leaves out keeps what was said of it. Once its lease has run out it is
    Unknown until it is named again. It is never forgotten.
    """

    def __init__(self) -> None:
        self._devices: dict[tuple[str, str], DeviceHealth] = {}

    def take(self, response: v1.NodeWatchResourcesResponse, now: Instant) -> None:
        """Merges a list that was received ``now``. Of entries for one device the last counts."""
        for entry in response.devices:
            key = (entry.device.pool_name, entry.device.device_name)
            self._devices[key] = _heard(entry, self._devices.get(key), now)

    def expire(self, now: Instant) -> None:
        """Makes Unknown whatever has outlived its lease."""
        for key, device in self._devices.items():
            if device.health is not Health.UNKNOWN and _expiry_ns(device) <= now.mono_ns:
                self._devices[key] = device._replace(
                    health=Health.UNKNOWN,
                    severity=Severity.UNKNOWN,
                    message=f"not confirmed within its lease of {device.timeout_s} s",
                    since=now,
                )

    def expires_in_s(self, now: Instant) -> float | None:
        """How long until the next lease runs out [s]; None if none can."""
        leases = [_expiry_ns(one) for one in self._devices.values() if one.health is not Health.UNKNOWN]
        return max(0, min(leases) - now.mono_ns) / NS if leases else None

    def report(self, now: Instant) -> Report:
        """Everything heard so far, as a report that has devices only."""
        devices = sorted(self._devices.values(), key=lambda device: (device.pool, device.device))
        return Report(node="", at=now, devices=tuple(devices))


def _expiry_ns(device: DeviceHealth) -> int:
    return device.verified.mono_ns + device.timeout_s * NS


def _heard(entry: v1.DeviceHealth, before: DeviceHealth | None, now: Instant) -> DeviceHealth:
    health, message = HEALTHS.get(int(entry.health)), entry.message
    if health is None:  # the kubelet takes it for Unknown, too
        health = Health.UNKNOWN
        message = (
            f"peer says health {int(entry.health)}, which is none of 0, 1 and 2; {message}".removesuffix("; ")
        )
    lease_s = entry.health_check_timeout_seconds
    device = DeviceHealth(
        pool=entry.device.pool_name,
        device=entry.device.device_name,
        kind="",
        health=health,
        severity=Severity.DEGRADED if health is Health.HEALTHY and message else SEVERITIES[health],
        message=message,
        since=now,
        verified=Instant(now.mono_ns, float(entry.last_updated_time)),
        timeout_s=min(lease_s, LONGEST_LEASE_S) if lease_s > 0 else DEFAULT_LEASE_S,
    )
    if before and (before.health, before.message) == (health, message):
        return device._replace(since=before.since)
    return device
