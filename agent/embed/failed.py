"""What is said when the core itself has failed: nothing is known any more, of any device."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from agent.devices.inventory import declared_device
from agent.health.catalog import Row
from agent.health.message import message
from agent.model.declared import Declared
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.time import Instant

FAILED: Final = Row(
    code="agent.failed",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    threshold="an exception in what decides",
    why="nobody looks any more",
    advice="restart the driver; its log has the traceback",
    try_it="let the clock of a monitor raise an exception",
)


def failed_report(
    last: Report | None,
    declared: Iterable[Declared],
    error: BaseException,
    node: str,
    lease_s: int,
    now: Instant,
) -> Report:
    """Every device Unknown: those of the last report, and those that were declared since.

    Args:
        last: None: there was none.
        error: What ended the core. Only its type is told, for its text may change.
        node: Whose report it is.
        lease_s: Of devices that were in no report [s].
        now: When that was found out.
    """
    cause = Cause(FAILED.code, FAILED.severity, FAILED.blame, type(error).__name__, FAILED.advice, now)
    known = {device.key: device for device in last.devices} if last else {}
    for one in declared:
        key = (one.driver, one.pool, one.name)
        known.setdefault(key, _unheard(one, lease_s, now))
    devices = tuple(_unknown(device, cause) for device in known.values())
    drivers = tuple(sorted({*(last.declaring if last else ()), *(one.driver for one in declared)}))
    return replace(last or Report(node, now), at=now, devices=devices, declaring=drivers, starting=False)


def _unknown(device: DeviceHealth, cause: Cause) -> DeviceHealth:
    return device._replace(
        health=Health.UNKNOWN,
        severity=Severity.UNKNOWN,
        message=message([cause]),
        causes=(cause,),
        since=cause.since,
    )


def _unheard(declared: Declared, lease_s: int, now: Instant) -> DeviceHealth:
    """A device that was in no report yet."""
    return DeviceHealth(
        driver=declared.driver,
        pool=declared.pool,
        device=declared.name,
        kind=declared_device(declared).kind,
        health=Health.UNKNOWN,
        severity=Severity.UNKNOWN,
        message="",
        since=now,
        verified=now,
        timeout_s=declared.lease_s or lease_s,
    )
