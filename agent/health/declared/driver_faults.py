"""Devices that their driver found broken, or could not hand out, while it prepared a claim, whatever we had
seen of them.

The driver is believed. It is over when we have looked at the device since then and found nothing, and the
driver has prepared it again, or a time limit is over: which of those, the driver's records say. A look that
found something is none of those, though it be not believed yet; nor one that could not be had.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import Device
from agent.health.catalog import Row
from agent.health.declared.checks import UNCHECKED, tracked_as
from agent.health.evaluation import Evaluation, Subject
from agent.health.verdict import PreviousVerdicts, with_causes
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault
from agent.model.time import NS, Instant

TOLD: Final = Row(
    code="driver.failed_device",
    severity=Severity.UNHEALTHY,
    blame=Blame.DRIVER,
    source="any",
    threshold="a prepare failed, and the driver said that the device is broken; it may say another code",
    why="the driver uses the device, and knows",
    advice="look at the driver's log; it is over when the driver prepares the device again, or in 10 min",
    try_it="raise FailedDevice in a driver's prepare",
)
LOOK_AGAIN_NS: Final = NS
SEVERITIES: Final = {Health.UNHEALTHY: Severity.UNHEALTHY, Health.UNKNOWN: Severity.UNKNOWN}


class DriverFaultView(NamedTuple):
    """A fault that is not over."""

    fault: DriverFault
    since: Instant
    """When we heard of it."""
    verified: bool = False
    """Since then we have looked at the device, and found nothing."""


Key = tuple[Subject, str, float]
"""Device, code and when it was told. Numbers may change where the records of two instances are merged."""
DriverFaultState = Mapping[Key, DriverFaultView]


def remember_told(
    look: Evaluation,
    past: DriverFaultState,
    faults: Iterable[DriverFault],
    found: Mapping[Subject, DeviceHealth],
) -> DriverFaultState:
    """The past after a look.

    Args:
        look: In which everything but what was told has been judged.
        faults: What the driver's records hold.
        found: By subject, what was found of its devices, without what was told.
    """
    suspects = {key[0] for key, track in look.tracks.items() if track.finding.severity >= Severity.UNKNOWN}
    still: dict[Key, DriverFaultView] = {}
    for fault in faults:
        key = (fault.subject, fault.code, fault.told_wall_s)
        one = past.get(key)
        if one is not None:
            one = one._replace(fault=fault)
            if not one.verified and tracked_as(fault.subject) not in suspects:
                one = one._replace(verified=_is_well(found.get(fault.subject), one.since))
        elif not fault.excused_wall_s:  # else it is over, or was before we began
            one = DriverFaultView(fault, look.now)
        if one is not None and not (fault.excused_wall_s and one.verified):
            still[key] = one
    return still


def _is_well(device: DeviceHealth | None, since: Instant) -> bool:
    if device is None:
        return False
    nobody_looks = [cause.code for cause in device.causes] == [UNCHECKED.code]
    well = device.severity < Severity.UNKNOWN and device.verified.mono_ns > since.mono_ns
    return well or nobody_looks


def with_told(
    look: Evaluation,
    before: PreviousVerdicts,
    past: DriverFaultState,
    devices: Mapping[Subject, Device],
    found: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """The devices that are not well because their driver says so; of one code the newest counts.

    Args:
        devices: All that drivers declare.
        found: As of :func:`remember_told`.
    """
    told: dict[str, dict[str, Cause]] = {}
    for one in past.values():
        cause = _cause(one)
        told.setdefault(one.fault.subject, {})[cause.code] = cause
    excused = {one.fault.subject for one in past.values() if one.fault.excused_wall_s}
    for subject, causes in told.items():
        if subject not in found:
            continue
        device, health = devices[subject], found[subject]
        if subject in excused:
            look.due_ns.append(look.now.mono_ns + LOOK_AGAIN_NS)
        known = {cause.code: cause.severity for cause in health.causes}
        news = [one for one in causes.values() if known.get(one.code, Severity.OK) < one.severity]
        yield subject, with_causes(look, before, device, health, [*health.causes, *news])


def _cause(told: DriverFaultView) -> Cause:
    fault = told.fault
    return Cause(
        fault.code,
        SEVERITIES[fault.health],
        TOLD.blame,
        fault.evidence,
        fault.advice or TOLD.advice,
        told.since,
        keep_away=fault.keep_away,
        told=True,
    )
