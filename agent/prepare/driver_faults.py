"""Faults of devices that a driver reported while it prepared a claim. Pure.

The health engine cannot verify what only the driver saw. So a fault ends when the driver prepares the device
again, or after a time limit, when the next prepare tries the device. One fault is kept per device and code.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from agent.health.state_machine import HEALTH
from agent.health.verdict import message
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict

LIMIT_S: Final = 600.0
"""Time that a device counts as broken if only the driver reported the fault [s]."""
EXPIRED_KEPT_S: Final = 3600.0
"""Time that an expired fault is kept, so that every reader sees its end [s]."""
FAULTS_MAX: Final = 256
"""Most faults that are kept; expired ones are dropped first, then the oldest."""


class DriverFaults(NamedTuple):
    """Faults of devices that one driver reported while it prepared claims."""

    faults: tuple[DriverFault, ...] = ()
    """Driver-reported faults, sorted by fault number."""
    next_number: int = 1


def record(
    known: DriverFaults,
    claim: ClaimRef,
    verdict: PrepareVerdict,
    now_wall_s: float,
    unhealthy: Collection[DeviceRef],
) -> DriverFaults:
    """Add a fault for each device that caused a failed prepare, or cannot be prepared because of the failure.

    Args:
        unhealthy: Devices that are Unhealthy anyway: no fault is recorded for them.
    """
    is_broken = verdict.error_class is ErrorClass.FAILED_DEVICE
    health = Health.UNHEALTHY if is_broken else verdict.health
    if health is None or health is Health.HEALTHY:
        return known
    blamed = [device for device in dict.fromkeys(verdict.devices) if device not in unhealthy]
    new_devices = [device for device in blamed if not is_active(known, device, verdict.code)]
    added = [
        DriverFault(
            number,
            device,
            verdict.code,
            verdict.summary,
            verdict.advice,
            now_wall_s,
            claim,
            health=health,
            keep_away=is_broken or verdict.taint is not None,
        )
        for number, device in enumerate(new_devices, known.next_number)
    ]
    # A new number for an expired fault: a reader must not take it for the one that ended.
    replaced = {_key(fault) for fault in added}
    others = [fault for fault in known.faults if _key(fault) not in replaced]
    return DriverFaults(_bounded([*others, *added]), known.next_number + len(added))


def is_active(known: DriverFaults, device: DeviceRef, code: str) -> bool:
    """Return True if the device has an unexpired driver-reported fault with this code."""
    return any(_key(fault) == (device, code) and not fault.expired_wall_s for fault in known.faults)


def clear(known: DriverFaults, devices: Collection[DeviceRef], now_wall_s: float) -> DriverFaults:
    """End the faults of devices that the driver has prepared again."""
    return known._replace(
        faults=tuple(
            fault._replace(expired_wall_s=now_wall_s)
            if fault.device in devices and not fault.expired_wall_s
            else fault
            for fault in known.faults
        )
    )


def expire(known: DriverFaults, now_wall_s: float) -> DriverFaults:
    """End faults older than :data:`LIMIT_S`, and drop those that ended :data:`EXPIRED_KEPT_S` ago."""
    return known._replace(faults=tuple(_expired(known.faults, now_wall_s)))


def _expired(faults: Iterable[DriverFault], now_wall_s: float) -> Iterator[DriverFault]:
    for fault in faults:
        if not fault.expired_wall_s:
            is_within_limit = 0 <= now_wall_s - fault.reported_wall_s < LIMIT_S
            yield fault if is_within_limit else fault._replace(expired_wall_s=now_wall_s)
        elif abs(now_wall_s - fault.expired_wall_s) < EXPIRED_KEPT_S:
            yield fault


def next_expiry_wall_s(known: DriverFaults) -> float | None:
    """Return the wall-clock time at which the next fault expires; None: no fault is active."""
    active = (fault.reported_wall_s for fault in known.faults if not fault.expired_wall_s)
    first = min(active, default=None)
    return None if first is None else first + LIMIT_S


def merge(mine: DriverFaults, theirs: DriverFaults) -> DriverFaults:
    """Return the merged driver-reported faults of two instances of a driver.

    For each device and code the newest fault is kept; it is expired if either instance ended it. Faults of
    ``theirs`` keep their numbers; faults of ``mine`` keep numbers that are free.
    """
    found = {_key(fault): fault for fault in theirs.faults}
    taken = {fault.number for fault in theirs.faults}
    next_number = max(mine.next_number, theirs.next_number)
    for fault in mine.faults:
        other = found.get(_key(fault))
        if other and other.reported_wall_s == fault.reported_wall_s:
            expired_wall_s = max(other.expired_wall_s, fault.expired_wall_s)
            found[_key(fault)] = other._replace(expired_wall_s=expired_wall_s)
        elif other is None or other.reported_wall_s < fault.reported_wall_s:
            number = fault.number
            if number in taken:
                number, next_number = next_number, next_number + 1
            taken.add(number)
            found[_key(fault)] = fault._replace(number=number)
    return DriverFaults(_bounded(found.values()), next_number)


def without_faults(faults: Iterable[DriverFault], device: DeviceHealth) -> DeviceHealth:
    """Return a device's health without these driver-reported faults; causes that the engine found stay."""
    subject = str(DeviceRef(device.driver, device.pool, device.device))
    codes = {fault.code for fault in faults if fault.subject == subject}
    rest = tuple(cause for cause in device.causes if not (cause.driver_reported and cause.code in codes))
    if len(rest) == len(device.causes):
        return device
    worst = max((cause.severity for cause in rest), default=Severity.OK)
    return device._replace(health=HEALTH[worst], severity=worst, causes=rest, message=message(rest))


def _key(fault: DriverFault) -> tuple[DeviceRef, str]:
    return (fault.device, fault.code)


def _bounded(faults: Iterable[DriverFault]) -> tuple[DriverFault, ...]:
    ranked = sorted(faults, key=lambda fault: (bool(fault.expired_wall_s), -fault.reported_wall_s))
    return tuple(sorted(ranked[:FAULTS_MAX], key=lambda fault: fault.number))
