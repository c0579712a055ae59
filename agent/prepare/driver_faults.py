"""Devices that a driver found broken, or could not hand out, while it prepared a claim: told once, and
excused in the end. Pure.

A driver is believed, but nobody can look a second time at what it saw. So a fault is over when the driver
prepares the device again, or when a time limit is over: then it is tried again. One fault is kept per device
and code.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from agent.health.message import message
from agent.health.state_machine import HEALTH
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, PrepareVerdict

LIMIT_S: Final = 600.0
"""For how long a device is broken by its driver's word alone [s]."""
EXCUSED_KEPT_S: Final = 3600.0
"""Within this time whoever watches the device learns that it is excused [s]."""
TOLD_MAX: Final = 256
"""Faults that are kept; the oldest goes, those that are excused before all."""


class DriverFaults(NamedTuple):
    """All that a driver told of."""

    faults: tuple[DriverFault, ...] = ()
    """By number."""
    next_number: int = 1


def tell(
    told: DriverFaults,
    claim: ClaimRef,
    verdict: PrepareVerdict,
    now_wall_s: float,
    held: Collection[DeviceRef],
) -> DriverFaults:
    """What is told after a failed prepare: a fault of each device that is to blame for it, or that cannot be
    handed out because of it.

    Args:
        held: Devices that are Unhealthy anyway: of them nothing needs to be told.
    """
    broken = verdict.error_class is ErrorClass.FAILED_DEVICE
    health = Health.UNHEALTHY if broken else verdict.health
    if health is None or health is Health.HEALTHY:
        return told
    blamed = [device for device in dict.fromkeys(verdict.devices) if device not in held]
    news = [device for device in blamed if not is_told(told, device, verdict.code)]
    faults = [
        DriverFault(
            number,
            device,
            verdict.code,
            verdict.summary,
            verdict.advice,
            now_wall_s,
            claim,
            health=health,
            keep_away=broken or verdict.taint is not None,
        )
        for number, device in enumerate(news, told.next_number)
    ]
    # A new number for what was excused: whoever watches must not take it for the one that is over.
    again = {_key(fault) for fault in faults}
    others = [fault for fault in told.faults if _key(fault) not in again]
    return DriverFaults(_bounded([*others, *faults]), told.next_number + len(faults))


def is_told(told: DriverFaults, device: DeviceRef, code: str) -> bool:
    """Whether this device is broken with this code by its driver's word."""
    return any(_key(fault) == (device, code) and not fault.excused_wall_s for fault in told.faults)


def excuse(told: DriverFaults, devices: Collection[DeviceRef], now_wall_s: float) -> DriverFaults:
    """Its driver prepared these devices."""
    return told._replace(
        faults=tuple(
            fault._replace(excused_wall_s=now_wall_s)
            if fault.device in devices and not fault.excused_wall_s
            else fault
            for fault in told.faults
        )
    )


def age(told: DriverFaults, now_wall_s: float) -> DriverFaults:
    """What is left by now: who was told of too long ago is excused, and forgotten in the end."""
    return told._replace(faults=tuple(_aged(told.faults, now_wall_s)))


def _aged(faults: Iterable[DriverFault], now_wall_s: float) -> Iterator[DriverFault]:
    for fault in faults:
        if not fault.excused_wall_s:
            in_time = 0 <= now_wall_s - fault.told_wall_s < LIMIT_S
            yield fault if in_time else fault._replace(excused_wall_s=now_wall_s)
        elif abs(now_wall_s - fault.excused_wall_s) < EXCUSED_KEPT_S:
            yield fault


def due_wall_s(told: DriverFaults) -> float | None:
    """When :func:`age` has somebody to excuse; None: never."""
    live = (fault.told_wall_s for fault in told.faults if not fault.excused_wall_s)
    first = min(live, default=None)
    return None if first is None else first + LIMIT_S


def merge(mine: DriverFaults, theirs: DriverFaults) -> DriverFaults:
    """Both as one. Of the same device and code the newest counts, and that it is excused; theirs keep their
    numbers, and mine where they are free."""
    found = {_key(fault): fault for fault in theirs.faults}
    taken = {fault.number for fault in theirs.faults}
    next_number = max(mine.next_number, theirs.next_number)
    for fault in mine.faults:
        other = found.get(_key(fault))
        if other and other.told_wall_s == fault.told_wall_s:
            excused = max(other.excused_wall_s, fault.excused_wall_s)
            found[_key(fault)] = other._replace(excused_wall_s=excused)
        elif other is None or other.told_wall_s < fault.told_wall_s:
            number = fault.number
            if number in taken:
                number, next_number = next_number, next_number + 1
            taken.add(number)
            found[_key(fault)] = fault._replace(number=number)
    return DriverFaults(_bounded(found.values()), next_number)


def without_faults(faults: Iterable[DriverFault], device: DeviceHealth) -> DeviceHealth:
    """What is known of a device without these faults of it; what others found stays, whatever its code."""
    subject = str(DeviceRef(device.driver, device.pool, device.device))
    codes = {fault.code for fault in faults if fault.subject == subject}
    rest = tuple(cause for cause in device.causes if not (cause.told and cause.code in codes))
    if len(rest) == len(device.causes):
        return device
    worst = max((cause.severity for cause in rest), default=Severity.OK)
    return device._replace(health=HEALTH[worst], severity=worst, causes=rest, message=message(rest))


def _key(fault: DriverFault) -> tuple[DeviceRef, str]:
    return (fault.device, fault.code)


def _bounded(faults: Iterable[DriverFault]) -> tuple[DriverFault, ...]:
    ranked = sorted(faults, key=lambda fault: (bool(fault.excused_wall_s), -fault.told_wall_s))
    return tuple(sorted(ranked[:TOLD_MAX], key=lambda fault: fault.number))
