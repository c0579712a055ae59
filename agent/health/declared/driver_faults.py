"""Device faults that drivers report when a prepare fails.

The agent adds the reported fault to the device's verdict. The fault ends if the driver prepared the device
again or a time limit has passed, and an evaluation after the report found no fault of the device. An
evaluation with a pending fault, or without readings, does not count.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.declared.driver_checks import UNCHECKED, check_conditions_subject
from agent.health.evaluation import Evaluation, Subject
from agent.health.rules import CatalogRow
from agent.health.verdict import VerdictContext, replace_causes
from agent.model.health import Blame, Cause, DeviceHealth, Health, Repair, Severity
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
    repair=Repair.INSPECT_HARDWARE,
    try_it="report a failed device in a driver's prepare",
)
GPU_DRIVER_CODES: Final = frozenset({"gpu.driver.mismatch", "gpu.driver.init"})
"""Codes of faults of the NVIDIA driver: after one failed prepare no GPU of the machine can be prepared."""
GPU_KINDS: Final = frozenset({DeviceKind.GPU, DeviceKind.MIG})
REEVALUATE_NS: Final = NS
SEVERITY_OF_HEALTH: Final = {Health.UNHEALTHY: Severity.UNHEALTHY, Health.UNKNOWN: Severity.UNKNOWN}


class OpenDriverFault(NamedTuple):
    """A driver-reported fault that has not ended."""

    fault: DriverFault
    since: Instant
    """Time at which the agent received the driver's report of the fault."""
    verified: bool = False
    """Whether an evaluation after the report found the device without fault."""
    cleared: bool = False
    """Whether an operator cleared the fault, so that it is no cause until the ledger drops it."""


DriverFaultKey = tuple[Subject, str, float]
"""Identity of a driver-reported fault: device, finding code, and wall-clock time of the report [s]."""
DriverFaultState = Mapping[DriverFaultKey, OpenDriverFault]
"""Driver-reported faults that have not ended, by their identity."""


def update_driver_faults(
    evaluation: Evaluation,
    past: DriverFaultState,
    faults: Iterable[DriverFault],
    found: Mapping[Subject, DeviceHealth],
) -> DriverFaultState:
    """Return the driver-reported faults that have not ended after an evaluation.

    Args:
        evaluation: Evaluation in which all rules have run.
        past: Faults that had not ended after the last evaluation.
        faults: Faults in the prepare ledgers of all drivers.
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
        open_fault = past.get(key)
        if open_fault is not None:
            open_fault = open_fault._replace(fault=fault)
            if not open_fault.verified and check_conditions_subject(fault.subject) not in suspects:
                is_verified = _is_well(found.get(fault.subject), open_fault.since)
                open_fault = open_fault._replace(verified=is_verified)
        elif not fault.expired_wall_s:  # else it ended before the agent received it
            open_fault = OpenDriverFault(fault, evaluation.now)
        if open_fault is not None and not (fault.expired_wall_s and open_fault.verified):
            remaining[key] = open_fault
    return remaining


def _is_well(device: DeviceHealth | None, since: Instant) -> bool:
    if device is None:
        return False
    unchecked = [cause.code for cause in device.causes] == [UNCHECKED.code]
    well = device.severity < Severity.UNKNOWN and device.verified.mono_ns > since.mono_ns
    return well or unchecked


def with_driver_faults(
    evaluation: Evaluation,
    before: VerdictContext,
    past: DriverFaultState,
    devices: Mapping[Subject, InventoryDevice],
    found: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """Yield the devices with driver-reported faults, with their verdicts after adding these faults as causes.

    Args:
        past: Driver-reported faults that have not ended; of several with one code, the newest counts.
        devices: All declared devices. A fault of the GPU driver is a cause of all GPUs of its DRA driver.
        found: Verdicts by device, without driver-reported faults.
    """
    reported: dict[str, dict[str, Cause]] = {}
    for open_fault in past.values():
        if open_fault.cleared:
            continue
        cause = _cause(open_fault)
        for subject in _reached_devices(open_fault.fault, devices):
            reported.setdefault(subject, {})[cause.code] = cause
    expired = {key[0] for key, open_fault in past.items() if open_fault.fault.expired_wall_s}
    for subject, causes in reported.items():
        if subject not in found:
            continue
        device, health = devices[subject], found[subject]
        if subject in expired:
            evaluation.due_ns.append(evaluation.now.mono_ns + REEVALUATE_NS)
        known = {cause.code: cause.severity for cause in health.causes}
        new = [cause for cause in causes.values() if known.get(cause.code, Severity.OK) < cause.severity]
        kept = [_with_keep_away(cause, causes.get(cause.code)) for cause in health.causes]
        yield subject, replace_causes(evaluation, before, device, health, [*kept, *new])


def _reached_devices(fault: DriverFault, devices: Mapping[Subject, InventoryDevice]) -> Iterator[Subject]:
    """Yield the devices that a driver-reported fault affects.

    They are the device that the fault names, and for a fault of the GPU driver all GPUs of its DRA driver.
    """
    yield fault.subject
    origin = devices.get(fault.subject)
    if origin is None or fault.code not in GPU_DRIVER_CODES:
        return
    kinds = GPU_KINDS if origin.kind in GPU_KINDS else {origin.kind}
    for subject, device in devices.items():
        if subject != fault.subject and device.driver == origin.driver and device.kind in kinds:
            yield subject


def _with_keep_away(cause: Cause, reported: Cause | None) -> Cause:
    """Return a rule's cause; an Unknown one gets the taint of the driver-reported cause ``reported``."""
    needs_taint = reported is not None and reported.keep_away and cause.severity is Severity.UNKNOWN
    return replace(cause, keep_away=True) if needs_taint else cause


def _cause(open_fault: OpenDriverFault) -> Cause:
    fault = open_fault.fault
    return Cause(
        fault.code,
        SEVERITY_OF_HEALTH[fault.health],
        FAILED_DEVICE.blame,
        fault.evidence,
        fault.advice or FAILED_DEVICE.advice,
        open_fault.since,
        keep_away=fault.keep_away,
        repair=fault.repair,
        driver_reported=True,
    )
