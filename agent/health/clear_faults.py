"""Clears faults that the agent still reports, when an operator states that the device was repaired. Pure.

Four kinds of faults can be cleared:

- latched GPU faults: events such as XIDs, which are reported once and kept until they are resolved;
- ended faults that are still reported for a probation time;
- faults that a driver reported while it prepared a claim;
- readings that differ from those at the agent's start, which the present readings then replace; and
  kernel-log lines about a PCI function, of which only later lines then count.

A request clears all faults that it names, or none. It is refused while a reading shows another fault of the
GPU.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.devices.inventory import DeviceKind, InventoryDevice, declared_device, gpu_device, pools_by_device
from agent.errors import suggestion
from agent.health.declared.driver_reports import DriverFaultKey, DriverFaultState
from agent.health.declared.state import DeclaredState
from agent.health.declared.verdicts import find_host_device, find_host_gpu
from agent.health.evaluation import Conditions, Subject
from agent.health.gpu.faults.checkpoint import affected_devices
from agent.health.gpu.faults.decide_severity import is_latched_fault_code
from agent.health.gpu.faults.fault_log import SHARED, Fault, FaultKey
from agent.health.gpu.rule_input import GpuRuleInput, is_answering
from agent.health.gpu.rule_state import GpuRuleState, gpu_devices, gpu_rules, gpu_views, rebaseline_gpu
from agent.health.gpu.state import GpuEvaluationResult, recent_clears, with_checkpoint
from agent.health.gpu.xid.log_lines import normal_pci_address
from agent.health.host.nic.state import NicRuleInput
from agent.health.host.verdicts import (
    DECLARED_RULES,
    HOST_RULES,
    HostRuleState,
    declared_rule_input,
    device_rule_input,
)
from agent.health.rules import (
    Rule,
    RuleChanges,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleResult,
    evaluate_rule,
    unreadable_row,
    with_severity,
)
from agent.health.state_machine import ConditionPhase
from agent.health.state_updates import rebaseline_declared_part, rebaseline_host_device
from agent.model.cleared_faults import ClearedFault, ClearRefusal, ClearRequest, ClearResult
from agent.model.declared_devices import DeclaredGpuDevice
from agent.model.gpu import WHOLE_GPU
from agent.model.health import DeviceHealth, Finding, Severity
from agent.model.persistent_faults import KnownGpu
from agent.model.settings import EngineSettings, GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import Instant

UNREPAIRED_CODES: Final = frozenset({"gpu.recovery_action", "gpu.remap.pending", "gpu.retired.pending"})
"""Codes of readings that show an unfinished repair whatever their severity: the GPU has yet to be reset."""


@dataclass(frozen=True, slots=True)
class ClearOutcome:
    """State after operators' requests to clear faults have been handled, and the answers to the requests."""

    gpus: GpuEvaluationResult
    host: HostRuleState
    driver_faults: DriverFaultState
    last_request: int
    """Number of the newest request that was handled."""
    dropped: frozenset[tuple[Subject, str]] = frozenset()
    """Faults that end at once, by device and finding code, without readings that confirm the end."""
    results: tuple[ClearResult, ...] = ()


class _Target(NamedTuple):
    """Device that a request to clear faults names, with all of its names in reports."""

    name: str
    host_device: InventoryDevice | None
    """GPU or MIG instance of the host; None: the device is something else."""
    subjects: tuple[Subject, ...]
    """Names of the device in reports: as the host's device, and as the device that drivers declare."""


@dataclass(slots=True)
class _Remembered:
    """Faults of one device that the agent still reports although no present reading shows them."""

    latched: dict[FaultKey, tuple[Subject, ...]] = field(default_factory=dict)
    """Latched faults, each with the names of the devices that report it."""
    conditions: list[tuple[Subject, str]] = field(default_factory=list)
    """Faults that rules found in earlier readings, by device and finding code: those in their probation, and
    those of counters whose history is too short since the agent's start."""
    driver_faults: list[DriverFaultKey] = field(default_factory=list)
    from_start: list[tuple[Subject, str]] = field(default_factory=list)
    """Raised faults whose readings differ from those at start, by device and finding code."""

    @property
    def is_empty(self) -> bool:
        """True: the device has no fault that can be cleared."""
        return not (self.latched or self.conditions or self.driver_faults or self.from_start)


def clear_faults(
    requests: Iterable[ClearRequest],
    before: ClearOutcome,
    conditions: Conditions,
    known_devices: Mapping[Subject, DeviceHealth],
    declared: DeclaredState,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> ClearOutcome:
    """Handle the requests that are newer than ``before.last_request``, in the order of their numbers.

    Args:
        requests: Requests of operators to clear faults. The source repeats a request until it is answered.
        before: State of GPUs, the host and driver-reported faults, with this snapshot (the newest readings).
        conditions: Raised and pending faults of the last evaluation.
        known_devices: Verdicts of the last evaluation.
        snapshot: Newest readings. A fault in them can cause the refusal of a request.
    """
    outcome = before
    for request in sorted(requests):
        if request.number <= outcome.last_request:
            continue
        outcome = replace(outcome, last_request=request.number)
        names = [*known_devices, *declared.known]
        name = _name_in_reports(request.device, names, declared, settings)
        target = _find_target(name, outcome.gpus.state.rule_state, declared, known_devices)
        if target is None:
            reason = f"no device {request.device!r} is known{suggestion(request.device, names)}"
            outcome = _refuse(outcome, request, ClearRefusal.UNKNOWN, reason)
            continue
        found = _find_remembered(outcome, target, request.code, conditions)
        rebaselined = _with_new_baseline(outcome, target, request.code, declared, snapshot, settings, now)
        raised = list(_reading_faults(outcome, target, request.code, conditions))
        found.conditions += [
            key
            for key in raised
            if key not in found.conditions
            and _waits_for_history(key[1], target, declared, outcome, snapshot, settings, now)
        ]
        ending = [
            key
            for key in raised
            if _ends_with(key[1], target, declared, outcome, rebaselined, snapshot, settings, now)
        ]
        found.from_start = [key for key in ending if request.code in ("", key[1])]
        others = [code for _, code in ending if request.code not in ("", code)]
        accepted = rebaselined if found.from_start else outcome
        if found.is_empty:
            outcome = _refuse(outcome, request, *_nothing_to_clear(outcome, target, request.code, conditions))
        elif found.from_start and others:
            reason = (
                f"{target.name}: {request.code} cannot be cleared alone: {', '.join(others)} would end too"
            )
            outcome = _refuse(outcome, request, ClearRefusal.STILL_PRESENT, reason)
        elif reason := _shown_by_reading(accepted.gpus, found, target, conditions, snapshot, settings, now):
            outcome = _refuse(outcome, request, ClearRefusal.STILL_PRESENT, reason)
        else:
            outcome = _remove_faults(accepted, request, found, now)
    return outcome


def reported_clears(
    records: Sequence[ClearedFault], declared: DeclaredState, gpus: GpuRuleState
) -> tuple[ClearedFault, ...]:
    """Return the records of cleared faults, with copies for declared devices. The record of a GPU is followed
    by a copy for each device of a driver's declaration that is this GPU."""
    if not records:
        return ()
    aliases: dict[Subject, list[Subject]] = {}
    for subject in declared.devices:
        if host := _declared_host_device(subject, declared, gpus):
            aliases.setdefault(host.name, []).append(subject)
    return tuple(
        record._replace(device=device)
        for record in records
        for device in (record.device, *aliases.get(record.device, ()))
    )


# --- the device ---------------------------------------------------------------------------------------------


def _name_in_reports(
    name: str, known: Iterable[Subject], declared: DeclaredState, settings: EngineSettings
) -> str:
    """Return the name in reports of a device that an operator names as any command prints it: without the
    node's pool, without driver and pool, or as a host device of a driver that declares none."""
    name = name.removeprefix(f"{settings.node}/")
    driver, _, device = name.partition("/")
    if driver in settings.drivers and driver not in declared.declaring:
        return device.removeprefix(f"{settings.node}/")
    ends = {name, f"{driver}/{settings.node}/{device}"} & set(known)
    ends = ends or {subject for subject in known if subject.endswith(f"/{name}")}
    return ends.pop() if len(ends) == 1 else name


def _find_target(
    name: str, gpus: GpuRuleState, declared: DeclaredState, known_devices: Mapping[Subject, DeviceHealth]
) -> _Target | None:
    """Return the device with a name, UUID, PCI address or ``driver/pool/name``; None: no such device."""
    host = None
    if name in declared.known:
        host = _declared_host_device(name, declared, gpus)
        if host is None:
            return _Target(name, None, (name,))
    host = host or next((device for device in gpu_devices(gpus) if device.name == name), None)
    host = host or _find_by_id(name, gpus.registry, list(gpu_devices(gpus)))
    if host is None:
        return _Target(name, None, (name,)) if name in known_devices else None
    subjects = [s for s in declared.devices if _declared_host_device(s, declared, gpus) == host]
    return _Target(host.name, host, (host.name, *subjects))


def _declared_host_device(
    subject: Subject, declared: DeclaredState, gpus: GpuRuleState
) -> InventoryDevice | None:
    device = declared.devices.get(subject)
    if device is None or not isinstance(device.part, DeclaredGpuDevice):
        return None
    return find_host_device(device.part, find_host_gpu(device.part, gpus.registry))


def _find_by_id(
    name: str, registry: Iterable[KnownGpu], devices: Sequence[InventoryDevice]
) -> InventoryDevice | None:
    address = normal_pci_address(name) if ":" in name else ""
    for gpu in registry:
        if name == gpu.uuid or (address and address == gpu.bus):
            return gpu_device(gpu.number)
        for mig in gpu.migs:
            if name == mig.uuid:
                return next(d for d in devices if (d.gpu_number, d.gi, d.ci) == (gpu.number, mig.gi, mig.ci))
    return None


# --- faults that can be cleared -----------------------------------------------------------------------------


def _find_remembered(
    outcome: ClearOutcome, target: _Target, code: str, conditions: Conditions
) -> _Remembered:
    """Return the faults of a device that the agent still reports although no present reading shows them.

    Args:
        code: Finding code of the faults to return; empty: all.
    """
    found = _Remembered()
    found.driver_faults = [
        key
        for key, open_fault in outcome.driver_faults.items()
        if open_fault.subject in target.subjects
        and code in ("", open_fault.fault.code)
        and not open_fault.cleared
    ]
    found.conditions = [
        (name, known_code)
        for (name, known_code), condition in conditions.items()
        if name == target.name
        and code in ("", known_code)
        and condition.phase is ConditionPhase.PROBATION
        and not is_latched_fault_code(known_code)
        and (name, known_code) not in outcome.dropped
    ]
    host, gpus = target.host_device, outcome.gpus
    if host is None:
        return found
    for key, fault in gpus.faults_by_key.items():
        if code not in ("", key.code) or not _has_fault(host, key):
            continue
        affected = tuple(affected_devices(key, gpus.state.rule_state.registry))
        raised = tuple(
            name
            for name in affected
            if _is_reported(conditions, name, key.code) and (name, key.code) not in outcome.dropped
        )
        decision = gpus.decisions.get(key)
        is_open = fault.resolved is None and decision is not None and decision.severity > Severity.INFO
        if key.gpu_number == SHARED:  # not of a GPU without NVLinks
            if host.name in raised:
                found.latched[key] = raised
        elif is_open or raised:
            found.latched[key] = affected
    return found


def _has_fault(device: InventoryDevice, key: FaultKey) -> bool:
    """Return whether a fault affects a GPU or MIG instance.

    A fault of a MIG instance also affects its GPU.
    """
    if device.kind is DeviceKind.GPU:
        return key.gpu_number in (device.gpu_number, SHARED)
    return (key.gpu_number, key.gi) == (device.gpu_number, device.gi) and key.ci in (device.ci, WHOLE_GPU)


def _is_reported(conditions: Conditions, name: Subject, code: str) -> bool:
    condition = conditions.get((name, code))
    return condition is not None and condition.is_cause and condition.finding.severity > Severity.INFO


# --- readings that differ from those at start ---------------------------------------------------------------


def _reading_faults(
    outcome: ClearOutcome, target: _Target, code: str, conditions: Conditions
) -> Iterator[tuple[Subject, str]]:
    """Yield the raised faults of a device that its present readings show. Faults of severity INFO are left
    out, except that with the code ``code``."""
    for key, condition in conditions.items():
        subject, known_code = key
        named = code == known_code or condition.finding.severity > Severity.INFO
        if subject == target.name and named and condition.is_cause and key not in outcome.dropped:
            yield key


def _with_new_baseline(
    outcome: ClearOutcome,
    target: _Target,
    code: str,
    declared: DeclaredState,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> ClearOutcome:
    """Return the state in which a device's present values replace its values at the agent's start.

    Args:
        code: Finding code of the rule whose values are replaced; empty: the values of all rules.
    """
    gpu = target.host_device
    if gpu is not None:
        if gpu.kind is not DeviceKind.GPU or snapshot.gpus is None:
            return outcome
        state = outcome.gpus.state
        rule_state = rebaseline_gpu(state.rule_state, gpu.gpu_number, snapshot.host)
        if code:  # keep what other rules compare with
            of_gpu = rule_state.per_gpu[gpu.gpu_number]
            present, seen = of_gpu.seen, state.rule_state.per_gpu[gpu.gpu_number].seen
            if code == "gpu.nvlink.down":
                seen = seen._replace(links_up=present.links_up)
            elif code == "gpu.fabric.manager":
                seen = seen._replace(fabric_manager=present.fabric_manager)
            per_gpu = {**rule_state.per_gpu, gpu.gpu_number: replace(of_gpu, seen=seen)}
            rule_state = replace(rule_state, per_gpu=per_gpu)
        return replace(outcome, gpus=outcome.gpus._replace(state=state._replace(rule_state=rule_state)))
    if target.name in declared.devices:
        part = declared.devices[target.name].part
        return replace(outcome, host=rebaseline_declared_part(outcome.host, snapshot, part, code, now))
    device = next((device for device in outcome.host.devices if device.name == target.name), None)
    if device is None:
        return outcome
    return replace(outcome, host=rebaseline_host_device(outcome.host, snapshot, settings, device, code))


def _ends_with(
    code: str,
    target: _Target,
    declared: DeclaredState,
    before: ClearOutcome,
    rebaselined: ClearOutcome,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> bool:
    """Return whether a fault would end or become milder in the state `rebaselined`. In that state, rules
    compare the device's readings with its present values, not with those at start."""
    if rebaselined is before:
        return False
    (_, was), (_, is_now) = (
        _result(code, target, declared, outcome, snapshot, settings, now) for outcome in (before, rebaselined)
    )
    if not isinstance(was, Finding) or isinstance(is_now, RuleInputUnreadable):
        return False
    return not isinstance(is_now, Finding) or is_now.severity < was.severity


def _waits_for_history(
    code: str,
    target: _Target,
    declared: DeclaredState,
    outcome: ClearOutcome,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> bool:
    """Return whether a raised fault is that of a counter whose history is too short since the agent's start,
    so that no reading shows the fault."""
    rule, result = _result(code, target, declared, outcome, snapshot, settings, now)
    return rule is not None and rule.counts_growth and isinstance(result, RuleInconclusive)


def _result(
    code: str,
    target: _Target,
    declared: DeclaredState,
    outcome: ClearOutcome,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> tuple[Rule | None, RuleResult | None]:
    """Evaluate the rule with the finding code ``code`` for a device. Return the rule and its result; None:
    there is no such rule, or no such device."""
    gpu, pools = target.host_device, pools_by_device(snapshot)
    rules: Sequence[Rule]
    view: object
    if gpu is not None:
        rules = gpu_rules(settings.gpu)
        view = gpu_views(outcome.gpus.state.rule_state, snapshot, settings.gpu, now).get(gpu.gpu_number)
    elif target.name in declared.devices:
        device = declared.devices[target.name]
        rules = DECLARED_RULES[declared_device(device).kind]
        view = None
        if rules:
            view = declared_rule_input(outcome.host, snapshot, pools, settings, device, now)
            if isinstance(view, NicRuleInput) and code.startswith("pci."):
                view = view.function
    else:
        known = next((device for device in outcome.host.devices if device.name == target.name), None)
        rules = HOST_RULES[known.kind] if known else ()
        view = device_rule_input(outcome.host, snapshot, pools, settings, known, now) if known else None
    rule = next((rule for rule in rules if rule.code == code), None)
    if rule is None or view is None:
        return rule, None
    return rule, evaluate_rule(rule, view, RuleChanges(settings.rules).of(target.name, code).limit)


# --- refusals -----------------------------------------------------------------------------------------------


def _nothing_to_clear(
    outcome: ClearOutcome, target: _Target, code: str, conditions: Conditions
) -> tuple[ClearRefusal, str]:
    """Return why no fault of a device can be cleared."""
    held = {
        known_code: condition.finding
        for (name, known_code), condition in conditions.items()
        if name in target.subjects and condition.is_cause
    }
    if not code:
        shown = sorted(c for c, finding in held.items() if finding.severity > Severity.INFO)
        by_readings = f"; readings decide {', '.join(shown)}" if shown else ""
        return ClearRefusal.UNKNOWN, f"{target.name} has no latched fault{by_readings}"
    host = target.host_device
    if host is not None and host.kind is DeviceKind.MIG and is_latched_fault_code(code):
        gpu = gpu_device(host.gpu_number).name
        if _is_reported(conditions, gpu, code):
            return ClearRefusal.UNKNOWN, f"{target.name} has {code} from {gpu}; name {gpu}"
    if code in held and is_latched_fault_code(code):
        return (
            ClearRefusal.UNKNOWN,
            f"{target.name}: {code} is for information only; nothing is to be cleared",
        )
    if code in held:
        return (
            ClearRefusal.NOT_LATCHED,
            f"{target.name}: {code} is not latched: a reading decides it, and shows {held[code].evidence}",
        )
    rules = gpu_rules(GpuLimits()) if host is not None else ()
    if any(code in (rule.code, unreadable_row(rule).code) for rule in rules):
        return ClearRefusal.NOT_LATCHED, f"{target.name}: {code} is not latched: a reading decides it"
    return ClearRefusal.UNKNOWN, f"{target.name} has no latched fault {code}"


def _shown_by_reading(
    gpus: GpuEvaluationResult,
    found: _Remembered,
    target: _Target,
    conditions: Conditions,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> str:
    """Return the fault that present readings of a GPU show, as text; empty: no fault.

    The device's own GPU is checked. If ``found`` has faults that all GPUs share, every GPU that reports such
    a fault is checked too.
    """
    host = target.host_device
    if host is None or not (found.latched or found.conditions or found.from_start):
        return ""
    shared = [key.code for key in found.latched if key.gpu_number == SHARED]
    views = gpu_views(gpus.state.rule_state, snapshot, settings.gpu, now)
    for number, view in views.items():
        name = gpu_device(number).name
        has_shared = any(_is_reported(conditions, name, code) for code in shared)
        if (number == host.gpu_number or has_shared) and (shown := _shown_fault(view, settings)):
            return f"{name}: a reading still shows a fault: {shown}"
    return ""


def _shown_fault(view: GpuRuleInput, settings: EngineSettings) -> str:
    """Return the fault that the readings of a GPU show, as code and evidence; empty: no fault."""
    answering = is_answering(view.sample, view.limits, view.now_ns)
    changes = RuleChanges(settings.rules)
    for rule in gpu_rules(settings.gpu):
        change = changes.of(view.name, rule.code)
        if change.is_off or not (answering or rule.valid_when_stalled):
            continue
        result = evaluate_rule(rule, view, change.limit)
        if isinstance(result, Finding):
            result = with_severity(result, change.severity, rule)
        if isinstance(result, Finding) and (
            result.severity >= Severity.UNKNOWN or result.code in UNREPAIRED_CODES
        ):
            return f"{result.code}: {result.evidence}"
    if answering:
        return ""
    return "it was not read yet" if view.sample is None or not view.sample.passes else "it does not answer"


# --- the answers --------------------------------------------------------------------------------------------


def _refuse(outcome: ClearOutcome, request: ClearRequest, refusal: ClearRefusal, reason: str) -> ClearOutcome:
    result = ClearResult(request.number, refusal=refusal, reason=reason)
    return replace(outcome, results=(*outcome.results, result))


def _remove_faults(
    outcome: ClearOutcome, request: ClearRequest, found: _Remembered, now: Instant
) -> ClearOutcome:
    """Return the state without the faults in ``found``, with records that an operator cleared them."""
    gpus = outcome.gpus
    names: dict[tuple[Subject, str], None] = dict.fromkeys([*found.conditions, *found.from_start])
    instances: set[tuple[Subject, str]] = set()
    resolved: dict[FaultKey, Fault] = {}
    for key, devices in found.latched.items():
        names.update(dict.fromkeys((name, key.code) for name in devices))
        if key.gpu_number != SHARED:  # the GPU reports faults of its instances, too
            instances.add((gpu_device(key.gpu_number).name, key.code))
        fault = gpus.faults_by_key[key]
        decision = gpus.decisions.get(key) or fault.last_decision
        resolved[key] = replace(fault, resolved=now, last_decision=decision)
    dropped = outcome.dropped | names.keys() | instances
    driver_faults = {
        key: open_fault._replace(cleared=True) if key in found.driver_faults else open_fault
        for key, open_fault in outcome.driver_faults.items()
    }
    reported = [outcome.driver_faults[key] for key in found.driver_faults]
    names.update(dict.fromkeys((open_fault.subject, open_fault.fault.code) for open_fault in reported))
    operator, at_wall_s = request.operator, round(now.wall_s, 3)
    records = tuple(
        ClearedFault(device, code, at_wall_s, operator.uid, operator.pid, operator.login_uid)
        for device, code in names
    )
    decisions = {key: decision for key, decision in gpus.decisions.items() if key not in resolved}
    log = gpus.state.fault_log
    state = gpus.state._replace(
        fault_log=replace(log, faults={**log.faults, **resolved}),
        cleared=recent_clears((*gpus.state.cleared, *records), now),
    )
    result = ClearResult(
        request.number,
        records,
        tuple(open_fault.fault for open_fault in reported),
    )
    return replace(
        outcome,
        gpus=gpus._replace(
            state=with_checkpoint(state, decisions),
            decisions=decisions,
            faults_by_key={**gpus.faults_by_key, **resolved},
        ),
        driver_faults=driver_faults,
        dropped=dropped,
        results=(*outcome.results, result),
    )
