"""Verdicts on GPUs and their MIG instances, from the results of rules and from latched faults."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from agent.devices.inventory import Device, DeviceKind, gpu_device
from agent.health.evaluation import Evaluation, row_with_code
from agent.health.gpu.answers import NOT_ANSWERING, next_step_ns
from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.faults.evaluate import (
    LatchedFinding,
    fault_row,
    gpu_findings,
    instance_findings,
    is_latched_code,
)
from agent.health.gpu.rule_state import GpuRuleState, gpu_devices, gpu_views
from agent.health.gpu.state import GpuEvaluation
from agent.health.gpu.view import GpuView, is_opening
from agent.health.rules import OK, CatalogRow, Rule, RuleNotEvaluated
from agent.health.stalls import stall_cause
from agent.health.verdict import PreviousVerdicts, lease_seconds, verdict, verified_at
from agent.model.faults import KnownGpu
from agent.model.gpu import GpuAttributes, GpuHost, GpuSet, MigSample, NvmlStatus
from agent.model.health import Blame, Cause, DeviceHealth, Finding, Severity
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

NVML: Final = "nvml"
START_NS: Final = 2 * NS
"""Longest wait for the first pass over a new GPU before it is reported as not read [ns]."""
NOT_ANSWERING_RESULT: Final = RuleNotEvaluated("the GPU does not answer")
NO_FAULT: Final[tuple[Finding | None, Instant | None]] = (None, None)
NOT_READ_YET: Final = CatalogRow(
    code="gpu.unseen",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="gpu",
    threshold="no pass over the GPU has finished since the agent started",
    why="the state of the GPU is not known",
    advice="wait for the first pass; if none finishes, see the sources in drahealth status",
)
REMOVED: Final = CatalogRow(
    code="gpu.mig.gone",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="gpu",
    threshold="the instance existed, and was removed less than 10 min ago",
    why="a pod that still claims the instance has lost its device",
    advice="delete pods that claim it; publish the GPU's new instances",
)


def is_answering(view: GpuView) -> bool:
    """Return whether the last pass over the GPU succeeded and no NVML call exceeds its deadline."""
    gpu = view.gpu
    if gpu is None or not gpu.passes or gpu.status != NvmlStatus.OK:
        return False
    return not gpu.call or view.now_ns - gpu.call_ns < view.limits.deadline_s * NS


def not_read_causes(view: GpuView, since: Instant) -> tuple[Cause, ...]:
    """Return the cause NOT_READ_YET of a GPU; empty if the GPU was read, or a rule reports it as missing."""
    gpu = view.gpu
    if gpu.passes if gpu is not None else not is_opening(view.gpus):
        return ()
    evidence = "no pass over the GPU has finished yet"
    return (
        Cause(
            NOT_READ_YET.code, NOT_READ_YET.severity, NOT_READ_YET.blame, evidence, NOT_READ_YET.advice, since
        ),
    )


def removed_finding(rule_state: GpuRuleState, device: Device) -> Finding | None:
    """Return the finding for a MIG instance that was removed; None if the instance exists."""
    for mig, removed_at in rule_state.per_gpu[device.gpu].instances:
        if (mig.gi, mig.ci) == (device.gi, device.ci):
            return (
                Finding(REMOVED.code, REMOVED.severity, "the MIG instance no longer exists")
                if removed_at
                else None
            )
    return None


def attributes_of(
    rule_state: GpuRuleState, gpus: GpuSet | None, host: GpuHost, device: Device
) -> tuple[tuple[str, str], ...]:
    """Return the known attributes of a GPU or MIG instance, as (name, value)."""
    known = next(gpu for gpu in rule_state.registry if gpu.number == device.gpu)
    sample = rule_state.samples.get(device.gpu)
    found = next((gpu for gpu in host.inventory if known.uuid and gpu.uuid == known.uuid), None)
    found = found or GpuAttributes(known.uuid, known.bus)
    mig = None
    if device.kind is DeviceKind.MIG:
        migs = (instance.mig for instance in rule_state.per_gpu[device.gpu].instances)
        mig = next(mig for mig in migs if (mig.gi, mig.ci) == (device.gi, device.ci))
    return _attributes(known, found, mig, sample.serial if sample else "", gpus.driver if gpus else "")


@lru_cache(1024)
def _attributes(
    known: KnownGpu, found: GpuAttributes, mig: MigSample | None, serial: str, driver: str
) -> tuple[tuple[str, str], ...]:
    own = {"uuid": known.uuid}
    if mig is not None:
        profile = dict(found.profiles).get(mig.uuid, "")
        own = {"uuid": mig.uuid, "profile": profile, "parentUUID": known.uuid}
    named = {
        **own,
        "pciBusId": known.bus,
        "product": found.product or known.name,
        "serial": found.serial or serial,
        "driver": found.driver or driver,
        "vbios": found.vbios,
        "architecture": found.architecture,
        "numaNode": "" if found.numa_node is None else str(found.numa_node),
    }
    return tuple((name, value) for name, value in named.items() if value)


def evaluate_gpu(
    evaluation: Evaluation,
    device: Device,
    view: GpuView,
    rules: Sequence[Rule],
    gpus: GpuEvaluation,
    source: SourceSample,
) -> None:
    """Evaluate the rules and latched faults of one GPU, and update its raised and pending faults."""
    answering, had_no_conditions = is_answering(view), not evaluation.previous_codes(device.name)
    for rule in rules:
        result = rule.evaluate(view) if answering or rule.valid_when_stalled else NOT_ANSWERING_RESULT
        if result is OK and had_no_conditions and not rule.counter:
            continue  # the most frequent case, and nothing changes
        rule_source = source if rule.source == "gpu" else evaluation.sources.get(rule.source, source)
        evaluation.apply_result(device.name, rule, result, rule_source)
    found = gpu_findings(gpus.decisions, gpus.faults, gpus.state.rule_state, device.gpu)
    _update_fault_conditions(evaluation, device, found, source)
    if not answering and (step_ns := next_step_ns(view)) is not None:
        evaluation.due_ns.append(step_ns)


def evaluate_instance(
    evaluation: Evaluation, device: Device, gpus: GpuEvaluation, source: SourceSample
) -> None:
    """Update the raised and pending faults of one MIG instance."""
    evaluation.update_condition(
        device.name, REMOVED, removed_finding(gpus.state.rule_state, device), source, valid_when_stalled=True
    )
    found = instance_findings(gpus.decisions, gpus.faults, device.gpu, device.gi, device.ci)
    _update_fault_conditions(evaluation, device, found, source)


def _update_fault_conditions(
    evaluation: Evaluation, device: Device, found: Mapping[str, LatchedFinding], source: SourceSample
) -> None:
    """Update the conditions of a device's latched faults, which also hold while the GPU does not answer."""
    codes = evaluation.previous_codes(device.name)
    cleared = [code for code in codes if is_latched_code(code) and code not in found]
    for code in sorted([*found, *cleared]):
        finding, since = found.get(code, NO_FAULT)
        row = fault_row(code, evaluation.settings.gpu)
        evaluation.update_condition(device.name, row, finding, source, valid_when_stalled=True, since=since)


def gpu_row(rules: Sequence[Rule], limits: GpuLimits, code: str) -> CatalogRow:
    """Return the catalog row of a finding code of a GPU or MIG instance."""
    if code == REMOVED.code:
        return REMOVED
    return fault_row(code, limits) if is_latched_code(code) else row_with_code(rules, code)


def gpu_verdicts(
    evaluation: Evaluation, previous: PreviousVerdicts, gpus: GpuEvaluation, snapshot: Snapshot
) -> Iterator[tuple[Device, DeviceHealth]]:
    """Yield the verdict on each GPU, then on its MIG instances, which inherit the causes of their GPU."""
    if snapshot.gpus is None:
        return
    rule_state, limits = gpus.state.rule_state, evaluation.settings.gpu
    rules = gpu_rules(limits)
    views = gpu_views(rule_state, snapshot, limits, evaluation.now)
    source, verified, lease_s = None, evaluation.now, evaluation.settings.lease_s
    of_source: tuple[Cause, ...] = ()
    for device in gpu_devices(rule_state):
        if device.kind is DeviceKind.GPU:
            view = views[device.gpu]
            source = evaluation.sources.get(device.name) or evaluation.sources[NVML]
            if (
                _is_new_and_unread(evaluation, previous, device, source)
                and not rule_state.per_gpu[device.gpu].instances
            ):
                evaluation.due_ns.append(source.beat_ns + START_NS)
                continue
            answering = is_answering(view)
            evaluate_gpu(evaluation, device, view, rules, gpus, source)
            # a GPU that does not answer was verified now: it does not answer
            verified = verified_at([source], evaluation.now) if answering else evaluation.now
            of_source = not_read_causes(view, previous.started)
            if answering and source.state is SourceState.STALLED:
                of_source = (stall_cause(source, previous.stalled, evaluation.now),)
            lease_s = lease_seconds(evaluation, [source])
            parent = ""
        else:
            assert source is not None, "a GPU comes before its instances"
            evaluate_instance(evaluation, device, gpus, source)
            parent = gpu_device(device.gpu).name
        causes = evaluation.causes(device.name, partial(gpu_row, rules, limits), parent)
        if of_source and not any(
            cause.code == NOT_ANSWERING for cause in causes
        ):  # NOT_ANSWERING is the better cause
            causes = sorted([*of_source, *causes], key=lambda cause: -cause.severity)
        severity = causes[0].severity if causes else Severity.OK
        attributes = attributes_of(rule_state, snapshot.gpus, snapshot.host, device)
        yield device, verdict(evaluation, previous, device, severity, causes, verified, lease_s, attributes)


def _is_new_and_unread(
    evaluation: Evaluation, previous: PreviousVerdicts, device: Device, source: SourceSample
) -> bool:
    """Return whether a GPU is new and was not read yet; such a GPU is not reported for up to START_NS."""
    if source.name != device.name or source.state is not SourceState.STARTING:
        return False
    known = device.name in previous.devices or evaluation.previous_codes(device.name)
    return not known and evaluation.now.mono_ns < source.beat_ns + START_NS
