"""Health of a device by the name that its driver uses.

The socket of a driver without declared devices reports the host devices, so this driver's pool and device
names mean host devices.
"""

from collections.abc import Callable, Container

from agent.model.claim import DeviceRef
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.uses import NOT_KNOWN, DeviceState


def host_device(
    device: DeviceRef, *, known: Container[DeviceRef], declaring: Container[str], served: Container[str]
) -> DeviceRef | None:
    """Return the host device that a driver's device name means; None: the name means a device of the driver
    itself.

    Args:
        known: All devices in the report.
        declaring: Drivers that have declared devices.
        served: Drivers that the agent serves.
    """
    if not device.driver or device.driver in declaring or device.driver not in served:
        return None
    host = device._replace(driver="")
    return host if host in known else None


def healths(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceHealth | None]:
    """Return a function that maps a device to its health; None: the report does not have the device.

    Args:
        report: Report of the agent.
        served: Drivers that the agent serves.
    """
    known = {DeviceRef(*one.key): one for one in report.devices}
    declaring = {ref.driver for ref in known} | set(report.declaring)

    def health_of(device: DeviceRef) -> DeviceHealth | None:
        host = host_device(device, known=known, declaring=declaring, served=served)
        return known.get(host or device)

    return health_of


def states(report: Report, served: Container[str]) -> Callable[[DeviceRef], DeviceState]:
    """Return a function that maps a device to its state; a device that is not in the report is NOT_KNOWN."""
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
