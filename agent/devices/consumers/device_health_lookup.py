"""Lookup of a device's health in a report, by the name that the DRA driver uses for the device.

A driver without declared devices uses the names of host devices. A driver that embeds drahealth reports its
devices itself.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from agent.model.claim import DeviceRef
from agent.model.device_usage import STATE_NOT_KNOWN, DeviceState
from agent.model.health import DeviceHealth, Health
from agent.model.report import Report
from agent.model.time import Instant


def host_device(
    device: DeviceRef, *, known: Container[DeviceRef], declaring: Container[str], served: Container[str]
) -> DeviceRef | None:
    """Return the host device that a driver's device name means; None: it means the driver's own device.

    Args:
        known: All devices in the report.
        declaring: Drivers that have declared devices.
        served: Drivers that the agent serves.
    """
    if not device.driver or device.driver in declaring or device.driver not in served:
        return None
    host = device._replace(driver="")
    return host if host in known else None


def health_lookup(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceHealth | None]:
    """Return a function that returns the health of a device; it returns None if the report lacks the device.

    Args:
        report: The agent's report.
        served: Drivers that the agent serves.
    """
    known = {DeviceRef(*one.key): one for one in report.devices}
    declaring = {ref.driver for ref in known} | set(report.declaring)

    def health_of(device: DeviceRef) -> DeviceHealth | None:
        host = host_device(device, known=known, declaring=declaring, served=served)
        return known.get(host or device)

    return health_of


def best_known_health(own: DeviceHealth | None, sent: DeviceHealth | None) -> DeviceHealth | None:
    """Return the agent's health of a device or, if missing or Unknown, the health that its driver sends.

    None: both are missing.

    Args:
        own: Health in the agent's report, with causes.
        sent: Health from the driver's socket, without causes.
    """
    if own is None or (sent is not None and own.health is Health.UNKNOWN is not sent.health):
        return sent
    return own


def with_embedding_drivers(report: Report, sent: Mapping[str, Iterable[DeviceHealth]]) -> Report:
    """Return the agent's report with the devices of drivers that embed drahealth.

    Args:
        report: The agent's report.
        sent: Devices that the driver's own socket reports, by driver. Their ``since`` is dropped: it is the
            time of the read.
    """
    found = {device.key: device for device in report.devices}
    for driver, devices in sent.items():
        for device in devices:
            named = device._replace(driver=driver, since=Instant(0, 0.0))
            found[named.key] = best_known_health(found.get(named.key), named) or named
    return replace(report, devices=tuple(found.values())) if sent else report


def state_lookup(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceState]:
    """Return a function that returns the state of a device.

    The state is STATE_NOT_KNOWN if the report lacks the device.
    """
    health_of = health_lookup(report, served)

    def state_of(device: DeviceRef) -> DeviceState:
        found = health_of(device)
        return _to_device_state(found) if found else STATE_NOT_KNOWN

    return state_of


def _to_device_state(health: DeviceHealth) -> DeviceState:
    if not health.causes:
        return DeviceState(health.health, health.severity, "", health.message, health.since.wall_s)
    leading = health.causes[0]
    since_s = leading.since.wall_s  # the verdict's own moves when a lesser cause comes or goes
    return DeviceState(health.health, health.severity, leading.code, leading.evidence, since_s)
