"""Device faults that drivers report while preparing claims.

The agent trusts the report. A fault ends when an evaluation after the report found no fault of the
device, and the driver's ledger shows that the driver prepared the device again or that a time limit has
passed. An evaluation with a pending fault, or without readings, does not count.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import Device
from agent.health.declared.checks import UNCHECKED, checks_subject
from agent.health.evaluation import Evaluation, Subject
from agent.health.rules import CatalogRow
from agent.health.verdict import PreviousVerdicts, with_causes
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault
from agent.model.time import NS, Instant

FAILED_DEVICE: Final = CatalogRow(
    code="driver.failed_device",
    severity=Severity.UNHEALTHY,
    blame=Blame.DRIVER,
    source="any",
    threshold="a prepare failed and the driver reported the device as faulty, under this or its own code",
    why="the driver uses the device and reports it as faulty",
    advice="read the driver's log; the fault ends when the driver prepares the device again, or in 10 min",
    try_it="raise FailedDevice in a driver's prepare",
)
REEVALUATE_NS: Final = NS
SEVERITIES: Final = {Health.UNHEALTHY: Severity.UNHEALTHY, Health.UNKNOWN: Severity.UNKNOWN}


class OpenDriverFault(NamedTuple):
    """A driver-reported fault that has not ended."""

    fault: DriverFault
    since: Instant
    """Time at which the agent received the report."""
    verified: bool = False
    """Whether an evaluation after the report found no fault of the device."""


DriverFaultKey = tuple[Subject, str, float]
"""Device, code and report time. Fault numbers can change when the ledgers of two instances are merged."""
DriverFaultState = Mapping[DriverFaultKey, OpenDriverFault]


def update_driver_faults(
    evaluation: Evaluation,
    past: DriverFaultState,
    faults: Iterable[DriverFault],
    found: Mapping[Subject, DeviceHealth],
) -> DriverFaultState:
    """Return the open driver-reported faults after an evaluation.

    Args:
        evaluation: Evaluation in which all rules have run.
        past: Open faults after the last evaluation.
        faults: Faults in the drivers' ledgers.
        found: Verdicts by device, without driver-reported faults.
    """
    suspects = {
        key[0]
        for key, condition in evaluation.conditions.items()
        if condition.finding.severity >= Severity.UNKNOWN
    }
    remaining: dict[DriverFaultKey, OpenDriverFault] = {}
    for fault in faults:
        key = (fault.subject, fault.code, fault.reported_wall_s)
        one = past.get(key)
        if one is not None:
            one = one._replace(fault=fault)
            if not one.verified and checks_subject(fault.subject) not in suspects:
                one = one._replace(verified=_is_well(found.get(fault.subject), one.since))
        elif not fault.expired_wall_s:  # else it ended before the agent received it
            one = OpenDriverFault(fault, evaluation.now)
        if one is not None and not (fault.expired_wall_s and one.verified):
            remaining[key] = one
    return remaining


def _is_well(device: DeviceHealth | None, since: Instant) -> bool:
    if device is None:
        return False
    unchecked = [cause.code for cause in device.causes] == [UNCHECKED.code]
    well = device.severity < Severity.UNKNOWN and device.verified.mono_ns > since.mono_ns
    return well or unchecked


def with_driver_faults(
    evaluation: Evaluation,
    before: PreviousVerdicts,
    past: DriverFaultState,
    devices: Mapping[Subject, Device],
    found: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """Yield the verdicts that driver-reported faults change; only the newest fault of each code counts.

    Args:
        past: Open driver-reported faults.
        devices: All declared devices.
        found: Verdicts by device, without driver-reported faults.
    """
    reported: dict[str, dict[str, Cause]] = {}
    for one in past.values():
        cause = _cause(one)
        reported.setdefault(one.fault.subject, {})[cause.code] = cause
    expired = {one.fault.subject for one in past.values() if one.fault.expired_wall_s}
    for subject, causes in reported.items():
        if subject not in found:
            continue
        device, health = devices[subject], found[subject]
        if subject in expired:
            evaluation.due_ns.append(evaluation.now.mono_ns + REEVALUATE_NS)
        known = {cause.code: cause.severity for cause in health.causes}
        new = [one for one in causes.values() if known.get(one.code, Severity.OK) < one.severity]
        yield subject, with_causes(evaluation, before, device, health, [*health.causes, *new])


def _cause(open_fault: OpenDriverFault) -> Cause:
    fault = open_fault.fault
    return Cause(
        fault.code,
        SEVERITIES[fault.health],
        FAILED_DEVICE.blame,
        fault.evidence,
        fault.advice or FAILED_DEVICE.advice,
        open_fault.since,
        keep_away=fault.keep_away,
        driver_reported=True,
    )
