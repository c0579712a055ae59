"""Faults that drivers report: findings of their health checks, and errors when they prepare a device. Pure.

Findings of a driver's health checks raise and clear faults in the same way as findings of rules. The runs of
a health check are counted for each device, so that a check that hangs for one device does not affect other
devices.

A fault that a driver reports when a prepare fails is added to the device's verdict. The fault ends when two
conditions hold. First, the driver prepared the device again, or a time limit has passed. Second, an
evaluation after the report found no fault of the device. An evaluation does not count if it had no readings,
or if a rule has found a fault that is not raised yet.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice
from agent.health.evaluation import Conditions, Evaluation, Subject
from agent.health.rules import CatalogRow
from agent.health.state_machine import Condition, ConditionPhase
from agent.health.verdict import Pause, VerdictContext, paused_ns, replace_causes
from agent.model.claim import DeviceRef
from agent.model.declared_devices import DriverCheckSample
from agent.model.health import Blame, Cause, DeviceHealth, Finding, Health, Repair, Severity
from agent.model.persistent_faults import PersistentCondition
from agent.model.prepare import DriverFault
from agent.model.reading import SourceSample, SourceState
from agent.model.settings import CUSTOM_PREFIX
from agent.model.time import NS, Instant

UNCHECKED: Final = CatalogRow(
    code="declared.unchecked",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="a declared device without a host part and without a check of its driver",
    why="no source reports the state of the device",
    advice="let the driver declare the host part of the device, or add a check for it",
    repair=Repair.NONE,
    try_it="add a device without a part to a monitor, and no check",
)
CHECK_WITHOUT_RESULT: Final = CatalogRow(
    code="check.<name>.unreadable",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="as many consecutive runs as the check is raised after, each timed out or with an exception",
    why="the driver's check of the device gave no result",
    advice="read the driver's log; the check, or what it calls, fails or hangs",
    repair=Repair.NONE,
    try_it="raise an exception in a check",
)
CHECK_EXPIRED: Final = CatalogRow(
    code="check.<name>.expired",
    severity=Severity.UNKNOWN,
    blame=Blame.DRIVER,
    source="any",
    threshold="no result of a declared check over the driver's socket within the lease of the last one",
    why="the driver no longer reports the result of its check of the device",
    advice="see whether the driver runs, and read its log; the check, or the whole driver, hangs",
    repair=Repair.NONE,
    try_it="stop a driver that reports its checks to the agent",
)
CUSTOM_FAULT: Final = CatalogRow(
    code="custom.<name>",
    severity=Severity.UNHEALTHY,
    blame=Blame.CONFIGURATION,
    source="any",
    threshold="as many consecutive runs as raise-after of the [[check]], each with exit code 1",
    why="the operator's check found a fault; its severity is that of the [[check]]",
    advice="read the text, which is the output of the check's command",
    repair=Repair.NONE,
    try_it="configure a [[check]] with the command /bin/false",
)
CUSTOM_WITHOUT_RESULT: Final = CatalogRow(
    code="custom.<name>.unknown",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="any",
    threshold="as many consecutive runs as raise-after of the [[check]], each without exit code 0 or 1",
    why="the operator's check gave no result",
    advice="run the command of the [[check]] by hand, as its user",
    repair=Repair.NONE,
    try_it="configure a [[check]] with a command that does not exist",
)
_UNREADABLE: Final = "!"
"""Finding code of a health check that returned no result; drivers cannot use this code."""
_EXPIRED: Final = "?"
"""Finding code of a health check whose last result is too old; drivers cannot use this code."""
FIRST_RESULT_NS: Final = 2 * NS
"""Time that a driver has for the first result of a check after it declared the device [ns]."""
NEVER_STALLED_NS: Final = 1 << 62
"""Stall limit of a check whose results have a lease [ns].

It never stalls as a source: the lease ends for each device on its own.
"""
NEVER_BY_TIME_NS: Final = 1 << 62
"""Clearing time that never ends [ns]: a fault from a health check clears after a number of good runs."""

STORED_MAX: Final = 256
"""Largest number of conditions in the checkpoint; the most severe are stored."""
_SUBJECT: Final = "check:"

CheckSamplesByDevice = Mapping[Subject, Sequence[DriverCheckSample]]
"""Newest results (samples) of health checks, by device."""


def samples_by_device(samples: Iterable[DriverCheckSample]) -> CheckSamplesByDevice:
    """Group the newest results of health checks by device."""
    found: dict[Subject, list[DriverCheckSample]] = {}
    for sample in samples:
        found.setdefault(sample.subject, []).append(sample)
    return found


def is_of_former_hardware(subject: Subject, beat_ns: int, redeclared: Mapping[Subject, Instant]) -> bool:
    """Return whether a result of a check is from before its device was declared with other hardware.

    Args:
        subject: The device.
        beat_ns: Monotonic time of the result [ns].
        redeclared: Times at which devices were declared with other hardware.
    """
    return subject in redeclared and beat_ns < redeclared[subject].mono_ns


def declared_check_samples(
    samples: tuple[DriverCheckSample, ...],
    checked: Mapping[Subject, Sequence[str]],
    since: Mapping[Subject, Instant],
    redeclared: Mapping[Subject, Instant],
    pauses: Sequence[Pause] = (),
) -> tuple[DriverCheckSample, ...]:
    """Return the results of health checks that are evaluated.

    They are all results of checks that run in this process, and one result for each check that a driver in
    another process declares and runs.

    Args:
        samples: Newest results of all checks.
        checked: Names of the declared checks by device. Reported results of other checks are ignored.
        since: Time of each device's declaration. From then on, a check has two seconds for its first result.
        redeclared: Times at which devices were declared with other hardware. Earlier reported results are
            about the former hardware, and ignored.
        pauses: Times in which the agent was stopped. They do not count for leases.
    """
    reported = {
        (sample.subject, sample.check): sample
        for sample in samples
        if sample.lease_ns and not is_of_former_hardware(sample.subject, sample.beat_ns, redeclared)
    }
    if not (reported or checked):
        return samples
    own = [sample for sample in samples if not sample.lease_ns]
    declared = [
        reported.get((subject, name)) or _awaited_sample(name, subject, since[subject])
        for subject, names in checked.items()
        for name in names
    ]
    if pauses:  # usually, all results are newer
        end_ns = pauses[-1][1]
        declared = [
            sample if sample.beat_ns >= end_ns else _with_longer_lease(sample, pauses) for sample in declared
        ]
    return (*own, *declared)


def _with_longer_lease(sample: DriverCheckSample, pauses: Sequence[Pause]) -> DriverCheckSample:
    lost_ns = paused_ns(pauses, sample.beat_ns, sample.lease_ns)
    return sample._replace(lease_ns=sample.lease_ns + lost_ns)


def _awaited_sample(check: str, subject: Subject, since: Instant) -> DriverCheckSample:
    """Return the result that is used for a declared check until the driver has reported its first result."""
    return DriverCheckSample(
        check,
        subject,
        finding=None,
        no_result_reason="",
        passes=0,
        beat_ns=since.mono_ns,
        period_ns=NS,
        raise_after=1,
        clear_after=1,
        lease_ns=FIRST_RESULT_NS,
    )


def expiry_reason(sample: DriverCheckSample, now: Instant) -> str:
    """Return why the result of a check is too old to be used; empty: it is not too old."""
    if not sample.lease_ns or now.mono_ns - sample.beat_ns <= sample.lease_ns:
        return ""
    if not sample.passes:
        return "the driver has not reported a result"
    return f"no result of the driver for more than {sample.lease_ns / NS:g} s"


def health_check_sources(samples: Iterable[DriverCheckSample], now: Instant) -> Iterable[SourceSample]:
    """Yield one source for each health check, for the list of sources in the report. The source has the state
    FAILING if the check gives no result for some device. Its age is that of the check's oldest run."""
    for name, group in groupby(sorted(samples, key=_source_name), key=_source_name):
        of_check = list(group)
        reasons = [sample.no_result_reason or expiry_reason(sample, now) for sample in of_check]
        unread = [reason for reason in reasons if reason]
        state = SourceState.FAILING if unread else SourceState.OK
        is_starting = all(not (sample.passes or sample.lease_ns) for sample in of_check)
        yield SourceSample(
            name,
            SourceState.STARTING if is_starting else state,
            min(sample.beat_ns for sample in of_check),
            of_check[0].period_ns,
            len(unread),
            unread[0] if unread else "",
            passes=min(sample.passes for sample in of_check),
            vital=False,
            limit_ns=NEVER_STALLED_NS if of_check[0].lease_ns else 0,
        )


def _source_name(sample: DriverCheckSample) -> str:
    """Return the name of a health check's source in the report. If drivers report their checks over sockets,
    the name contains the driver's name."""
    driver = f"{sample.subject.partition('/')[0]}/" if sample.lease_ns else ""
    return f"check.{driver}{sample.check}"


def subject_of_checks(subject: Subject) -> Subject:
    """Return the subject ``check:<device>``, under which faults from health checks of a device are stored.

    It differs from the device's own subject, because a driver's finding code can be equal to one of the
    agent's.
    """
    return f"{_SUBJECT}{subject}"


def conditions_to_store(
    conditions: Conditions, growth_codes: Container[str] = ()
) -> tuple[PersistentCondition, ...]:
    """Return the raised conditions that the agent's next start would not find in its first readings.

    They are those of health checks, of Unhealthy GPUs, of counters that grow, and in their probation.

    Args:
        growth_codes: Finding codes of the rules that evaluate the growth of a counter.
    """
    stored = [
        PersistentCondition(
            subject.removeprefix(_SUBJECT),
            key.removesuffix(condition.finding.code).removesuffix("/"),
            condition.finding.code,
            condition.finding.severity,
            condition.finding.evidence,
            condition.finding.advice,
            condition.finding.blame,
            condition.finding.repair,
            condition.since.mono_ns,
            condition.since.wall_s,
            condition.run_start_ns if condition.phase is ConditionPhase.PROBATION else 0,
        )
        for (subject, key), condition in conditions.items()
        if condition.is_cause
        and (
            condition.finding.code not in (_UNREADABLE, _EXPIRED)
            if subject.startswith(_SUBJECT)
            else (key.startswith("gpu.") and condition.finding.severity is Severity.UNHEALTHY)
            or (
                (key in growth_codes or condition.phase is ConditionPhase.PROBATION)
                and condition.finding.severity > Severity.INFO
            )
        )
    ]
    return tuple(sorted(stored, key=lambda fault: (-fault.severity, fault[:3]))[:STORED_MAX])


def restored_conditions(stored: Iterable[PersistentCondition]) -> Conditions:
    """Return the conditions that the agent stored before its restart. Each counts in the verdict until its
    check has passed often enough or no longer exists, until its rule has enough history, or until its
    probation is over and the device was read."""

    def key(fault: PersistentCondition) -> tuple[Subject, str]:
        of_check = subject_of_checks(fault.device), f"{fault.check}/{fault.code}"
        return of_check if fault.check else (fault.device, fault.code)

    return {
        key(fault): Condition(
            ConditionPhase.PROBATION if fault.ended_ns else ConditionPhase.RAISED,
            Finding(
                fault.code, fault.severity, fault.evidence, fault.advice, fault.blame, repair=fault.repair
            ),
            Instant(fault.since_ns, fault.since_wall_s),
            int(fault.ended_ns > 0),  # a probation ends with the first pass at the earliest
            fault.ended_ns,
            0,
        )
        for fault in stored
    }


def keep_restored_faults(evaluation: Evaluation, subject: Subject) -> list[Cause]:
    """Keep the stored faults of a device that was not evaluated since the agent's start; return those of its
    health checks as causes, worst first."""
    own = subject_of_checks(subject)
    for name in (own, subject):
        for code in evaluation.previous_codes(name):
            condition = evaluation.previous[name, code]
            if condition.last_pass == 0 and condition.finding.code not in (_UNREADABLE, _EXPIRED):
                evaluation.repeat_finding(name, code, passes=0)
    return evaluation.causes(own, _public_row)


def evaluate_driver_checks(
    evaluation: Evaluation, subject: Subject, samples: Iterable[DriverCheckSample]
) -> list[Cause]:
    """Update the faults of one device from results of its health checks; return its causes, worst first."""
    own = subject_of_checks(subject)
    for sample in samples:
        source = device_check_source(sample)
        expired = expiry_reason(sample, evaluation.now)
        # a check without passes has not run yet
        seen = bool(sample.passes) and not (sample.no_result_reason or expired)
        found = sample.finding
        if expired:
            found = Finding(_EXPIRED, Severity.UNKNOWN, expired)
        elif sample.no_result_reason:
            found = Finding(_UNREADABLE, Severity.UNKNOWN, sample.no_result_reason)
        if sample.lease_ns and not expired:
            evaluation.due_ns.append(sample.beat_ns + sample.lease_ns + 1)
        prefix = f"{sample.check}/"
        keys = {code for code in evaluation.previous_codes(own) if code.startswith(prefix)}
        key = prefix + found.code if found else ""
        for code in keys - {key}:
            equal_passes = 0 if found else sample.equal_passes
            evaluation.update_condition(
                own, _row(sample, code), None, source, seen=seen, equal_passes=equal_passes
            )
        if found:
            equal_passes = 0 if expired else sample.equal_passes
            evaluation.update_condition(own, _row(sample, key), found, source, equal_passes=equal_passes)
    return evaluation.causes(own, _public_row)


def device_check_source(sample: DriverCheckSample) -> SourceSample:
    """Convert the newest result of a device's health check to a source; its passes are the check's runs."""
    return SourceSample(
        _source_name(sample),
        SourceState.FAILING if sample.no_result_reason else SourceState.OK,
        sample.beat_ns,
        sample.period_ns,
        0,
        sample.no_result_reason,
        passes=sample.passes,
        vital=False,
    )


def is_custom(check: str) -> bool:
    """Return whether an operator, not a driver, configured a check. The name of the check shows it."""
    return check.startswith(CUSTOM_PREFIX)


def _row(sample: DriverCheckSample, key: str) -> CatalogRow:
    expires = key.endswith(f"/{_EXPIRED}")  # at once, and the next result ends it
    return replace(
        CHECK_WITHOUT_RESULT,
        code=key,
        raise_after=1 if expires else sample.raise_after,
        clear_after=1 if expires else sample.clear_after,
        clear_ns=NEVER_BY_TIME_NS,
    )


def _public_row(key: str) -> CatalogRow:
    """Return the catalog row for a finding of a health check, with the finding code that operators see.

    Args:
        key: Internal code of the finding, ``<check>/<code>``.
    """
    check, _, code = key.partition("/")
    if is_custom(check):
        if code == _UNREADABLE:
            return replace(CUSTOM_WITHOUT_RESULT, code=f"{check}.unknown")
        return replace(CUSTOM_FAULT, code=code)
    if code == _UNREADABLE:
        return replace(CHECK_WITHOUT_RESULT, code=f"check.{check}.unreadable")
    if code == _EXPIRED:
        return replace(CHECK_EXPIRED, code=f"check.{check}.expired")
    return replace(CHECK_WITHOUT_RESULT, code=code, advice="")


# --- faults that drivers report ----------------------------------------------------------------------------

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
DECLARATIONS_SOURCE: Final = "devices.d"
REEVALUATE_NS: Final = NS
SEVERITY_OF_HEALTH: Final = {Health.UNHEALTHY: Severity.UNHEALTHY, Health.UNKNOWN: Severity.UNKNOWN}


class OpenDriverFault(NamedTuple):
    """A driver-reported fault that has not ended."""

    fault: DriverFault
    subject: Subject
    """Faulty device: one that the driver declares, or a host device if the driver declares none."""
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
    declaring: Container[str],
    found: Mapping[Subject, DeviceHealth],
) -> DriverFaultState:
    """Return the driver-reported faults that have not ended after an evaluation.

    Args:
        evaluation: Evaluation in which all rules have run.
        past: Faults that had not ended after the last evaluation.
        faults: Faults in the prepare ledgers (the records of prepared claims) of all drivers.
        declaring: Drivers that declare devices. Other drivers serve the host's devices.
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
        subject = _faulty_device(fault.device, evaluation, declaring)
        open_fault = past.get(key)
        if open_fault is not None:
            open_fault = open_fault._replace(fault=fault, subject=subject)
            if not open_fault.verified and subject_of_checks(subject) not in suspects:
                is_verified = _is_well(found.get(subject), open_fault.since)
                open_fault = open_fault._replace(verified=is_verified)
        elif not fault.expired_wall_s:  # else it ended before the agent received it
            open_fault = OpenDriverFault(fault, subject, evaluation.now)
        if open_fault is not None and not (fault.expired_wall_s and open_fault.verified):
            remaining[key] = open_fault
    return remaining


def _faulty_device(ref: DeviceRef, evaluation: Evaluation, declaring: Container[str]) -> Subject:
    """Return the device that a driver names in a fault. A driver that declares no devices names a host
    device, whose pool is the node's name. Until the declarations are read, every driver may declare some."""
    source = evaluation.sources.get(DECLARATIONS_SOURCE)
    is_read = source is None or source.state is not SourceState.STARTING
    is_of_host = is_read and ref.driver not in declaring and ref.pool == evaluation.settings.node
    return ref.device if is_of_host else str(ref)


def _is_well(device: DeviceHealth | None, since: Instant) -> bool:
    if device is None:
        return False
    unchecked = [cause.code for cause in device.causes] == [UNCHECKED.code]
    is_healthy = device.severity < Severity.UNKNOWN and device.verified.mono_ns > since.mono_ns
    return is_healthy or unchecked


def with_driver_faults(
    evaluation: Evaluation,
    before: VerdictContext,
    past: DriverFaultState,
    devices: Mapping[Subject, InventoryDevice],
    found: Mapping[Subject, DeviceHealth],
) -> Iterator[tuple[Subject, DeviceHealth]]:
    """Yield each device with driver-reported faults, with its verdict after these faults are added as causes.

    Args:
        past: Driver-reported faults that have not ended; of several faults with one code, the newest counts.
        devices: All devices. A fault of the GPU driver is a cause of all GPUs of its DRA driver.
        found: Verdicts by device, without driver-reported faults.
    """
    reported: dict[str, dict[str, Cause]] = {}
    for open_fault in past.values():
        if open_fault.cleared:
            continue
        cause = _cause(open_fault)
        for subject in _reached_devices(open_fault, devices):
            reported.setdefault(subject, {})[cause.code] = cause
    expired = {open_fault.subject for open_fault in past.values() if open_fault.fault.expired_wall_s}
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


def _reached_devices(
    open_fault: OpenDriverFault, devices: Mapping[Subject, InventoryDevice]
) -> Iterator[Subject]:
    """Yield the devices that a driver-reported fault affects. The fault affects the device that it names. A
    fault of the GPU driver affects all GPUs of its DRA driver."""
    yield open_fault.subject
    origin = devices.get(open_fault.subject)
    if origin is None or open_fault.fault.code not in GPU_DRIVER_CODES:
        return
    kinds = GPU_KINDS if origin.kind in GPU_KINDS else {origin.kind}
    for subject, device in devices.items():
        if subject != open_fault.subject and device.driver == origin.driver and device.kind in kinds:
            yield subject


def _with_keep_away(cause: Cause, reported: Cause | None) -> Cause:
    """Return the cause of a rule; a cause with severity Unknown gets the taint of the cause ``reported``.
    ``reported`` is the cause of a driver-reported fault; None: there is no such fault."""
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
