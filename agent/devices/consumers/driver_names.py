"""What a report says of a device by the name that a driver has for it.

On the socket of a driver that has declared nothing the agent tells of the host's own devices: by their pool
and name that driver means these.
"""

from collections.abc import Callable, Container

from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.uses import NOT_KNOWN, DeviceState


def mirrored(
    device: DeviceRef, *, known: Container[DeviceRef], declaring: Container[str], served: Container[str]
) -> DeviceRef | None:
    """The host's own device that a driver's is; None: it is the driver's own.

    Args:
        known: All devices that are judged.
        declaring: Drivers that have declared devices.
        served: Drivers that the agent serves.
    """
    if not device.driver or device.driver in declaring or device.driver not in served:
        return None
    host = device._replace(driver="")
    return host if host in known else None


def healths(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceHealth | None]:
    """What the report says of each device; None: it does not have it.

    Args:
        report: Of the agent.
        served: As of :func:`mirrored`.
    """
    known = {DeviceRef(*one.key): one for one in report.devices}
    declaring = {ref.driver for ref in known} | set(report.declaring)

    def health_of(device: DeviceRef) -> DeviceHealth | None:
        host = mirrored(device, known=known, declaring=declaring, served=served)
        return known.get(host or device)

    return health_of


def states(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceState]:
    """How each device is; of one that the report does not have nobody knows."""
    health_of = healths(report, served)

    def state_of(device: DeviceRef) -> DeviceState:
        found = health_of(device)
        return _state(found) if found else NOT_KNOWN

    return state_of


def _state(health: DeviceHealth) -> DeviceState:
    if not health.causes:
        return DeviceState(health.health, health.severity, "", health.message, health.since.wall_s)
    leading = health.causes[0]
    since_s = leading.since.wall_s  # the verdict's own moves when a lesser cause comes or goes
    return DeviceState(health.health, health.severity, leading.code, leading.evidence, since_s)
