"""Faults of devices that a driver reported when it failed to prepare a claim. Pure.

The health engine cannot verify what only the driver saw. So a fault ends when the driver prepares the device
again, or after a time limit, so that a prepare tries the device. One fault is kept per device and code.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.health.verdict import kubelet_message
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict, Scope
from agent.prepare.failure_kinds import failure_kind

FAULT_LIMIT_S: Final = 600.0
"""Time after which a driver-reported fault expires [s]."""
EXPIRED_KEPT_S: Final = 3600.0
"""Time for which an expired fault is kept, so that clients of the agent see its end [s]."""
FAULTS_MAX: Final = 256
"""Largest number of faults of one driver that are kept; expired ones are dropped first, then the oldest."""


class DriverFaults(NamedTuple):
    """Active and expired faults that one driver reported while it prepared claims."""

    faults: tuple[DriverFault, ...] = ()
    """Active and expired faults, sorted by their number."""
    next_number: int = 1
    """Number that the next new fault gets."""


def record_faults(
    known: DriverFaults,
    claim: ClaimRef,
    verdict: PrepareVerdict,
    now_wall_s: float,
    unhealthy: Collection[DeviceRef],
) -> DriverFaults:
    """Add a fault for each device that a failed prepare shows to be Unhealthy or Unknown.

    Args:
        verdict: Verdict on the failed prepare of ``claim``.
        unhealthy: Devices that the health engine reports Unhealthy: no fault is added for them.
    """
    is_broken = verdict.error_class is ErrorClass.FAILED_DEVICE
    health = Health.UNHEALTHY if is_broken else verdict.health
    if health is None or health is Health.HEALTHY:
        return known
    blamed = [device for device in dict.fromkeys(verdict.devices) if device not in unhealthy]
    new_devices = [device for device in blamed if not has_active_fault(known, device, verdict.code)]
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
            repair=verdict.repair,
        )
        for number, device in enumerate(new_devices, known.next_number)
    ]
    # A new number for an expired fault: a reader must not take it for the one that ended.
    replaced = {_key(fault) for fault in added}
    others = [fault for fault in known.faults if _key(fault) not in replaced]
    return DriverFaults(_keep_newest([*others, *added]), known.next_number + len(added))


def has_active_fault(known: DriverFaults, device: DeviceRef, code: str) -> bool:
    """Return True if a driver-reported fault of the device with this code has not expired."""
    return any(_key(fault) == (device, code) and not fault.expired_wall_s for fault in known.faults)


def expire_faults_of_devices(
    known: DriverFaults, devices: Collection[DeviceRef], now_wall_s: float
) -> DriverFaults:
    """Return the faults with those of ``devices`` expired, because the driver has prepared the devices.

    Faults of the driver itself, such as its state file, expire on all devices.
    """
    return known._replace(
        faults=tuple(
            fault._replace(expired_wall_s=now_wall_s)
            if (fault.device in devices or _concerns_driver(fault)) and not fault.expired_wall_s
            else fault
            for fault in known.faults
        )
    )


def expire_cleared_faults(
    known: DriverFaults, cleared: Collection[DriverFault], now_wall_s: float
) -> DriverFaults:
    """Return the faults with those expired that an operator cleared, found by their numbers."""
    numbers = {(fault.number, fault.reported_wall_s) for fault in cleared}
    return known._replace(
        faults=tuple(
            fault._replace(expired_wall_s=now_wall_s)
            if (fault.number, fault.reported_wall_s) in numbers and not fault.expired_wall_s
            else fault
            for fault in known.faults
        )
    )


def _concerns_driver(fault: DriverFault) -> bool:
    kind = failure_kind(fault.code, ErrorClass.PERMANENT)
    return fault.health is Health.UNKNOWN and kind.scope is Scope.DRIVER


def expire_old_faults(known: DriverFaults, now_wall_s: float) -> DriverFaults:
    """Return the faults with those older than :data:`FAULT_LIMIT_S` expired.

    Faults that expired more than :data:`EXPIRED_KEPT_S` ago are dropped.
    """
    return known._replace(faults=tuple(_expired(known.faults, now_wall_s)))


def _expired(faults: Iterable[DriverFault], now_wall_s: float) -> Iterator[DriverFault]:
    for fault in faults:
        if not fault.expired_wall_s:
            is_within_limit = 0 <= now_wall_s - fault.reported_wall_s < FAULT_LIMIT_S
            yield fault if is_within_limit else fault._replace(expired_wall_s=now_wall_s)
        elif abs(now_wall_s - fault.expired_wall_s) < EXPIRED_KEPT_S:
            yield fault


def next_expiry_wall_s(known: DriverFaults) -> float | None:
    """Return the wall-clock time at which the next fault expires; None: no fault is active."""
    active = (fault.reported_wall_s for fault in known.faults if not fault.expired_wall_s)
    first = min(active, default=None)
    return None if first is None else first + FAULT_LIMIT_S


def merge_faults(mine: DriverFaults, theirs: DriverFaults) -> DriverFaults:
    """Merge the faults of two instances of a driver: for each device and code the newest fault.

    It is expired if it is expired in either instance. Faults of ``mine`` get new numbers where ``theirs`` has
    the same number.
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
    return DriverFaults(_keep_newest(found.values()), next_number)


def health_without_faults(faults: Iterable[DriverFault], device: DeviceHealth) -> DeviceHealth:
    """Return a device's health without the driver-reported ``faults``; faults that rules found stay."""
    subject = str(DeviceRef(device.driver, device.pool, device.device))
    codes = {fault.code for fault in faults if fault.subject == subject}
    rest = tuple(cause for cause in device.causes if not (cause.driver_reported and cause.code in codes))
    if len(rest) == len(device.causes):
        return device
    worst = max((cause.severity for cause in rest), default=Severity.OK)
    return device._replace(
        health=HEALTH_OF_SEVERITY[worst], severity=worst, causes=rest, message=kubelet_message(rest)
    )


def _key(fault: DriverFault) -> tuple[DeviceRef, str]:
    return (fault.device, fault.code)


def _keep_newest(faults: Iterable[DriverFault]) -> tuple[DriverFault, ...]:
    ranked = sorted(faults, key=lambda fault: (bool(fault.expired_wall_s), -fault.reported_wall_s))
    return tuple(sorted(ranked[:FAULTS_MAX], key=lambda fault: fault.number))
