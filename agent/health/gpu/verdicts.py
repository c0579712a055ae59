"""Verdicts on GPUs and their MIG instances, from rule results and from faults such as XIDs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from agent.devices.inventory import DeviceKind, InventoryDevice, gpu_device, mig_device
from agent.health.evaluation import Evaluation, row_with_code
from agent.health.gpu.faults.decide_severity import (
    LatchedFinding,
    gpu_findings,
    is_latched_fault_code,
    latched_fault_row,
    mig_findings,
)
from agent.health.gpu.responsiveness import NOT_ANSWERING, next_not_answering_change_ns
from agent.health.gpu.rule_input import (
    GpuRuleInput,
    gpu_reading,
    is_answering,
    is_identifying_gpus,
    is_listing_gpus,
)
from agent.health.gpu.rule_state import GpuRuleState, gpu_rules, gpu_views
from agent.health.gpu.state import CachedGpu, GpuEvaluationResult, GpuVerdictCache, cached_gpu, next_gpu_cache
from agent.health.rules import (
    OK,
    CatalogRow,
    Rule,
    RuleInconclusive,
    RuleResult,
    cause_from_row,
    evaluate_rule,
)
from agent.health.verdict import VerdictContext, lease_seconds, make_verdict, oldest_pass_time, stall_cause
from agent.model.gpu import GpuAttributes, GpuOsSample, GpuWakeMode, MigSample, NvmlSample
from agent.model.health import Blame, Cause, DeviceHealth, Finding, Repair, Severity
from agent.model.persistent_faults import KnownGpu
from agent.model.reading import SourceSample, SourceState
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant, instant_at_mono

NVML: Final = "nvml"
FIRST_PASS_WAIT_NS: Final = 2 * NS
"""Time for which a new GPU is not reported while its first pass has not finished [ns]."""
NOT_ANSWERING_RESULT: Final = RuleInconclusive("the GPU does not answer")
NOT_READ_YET: Final = CatalogRow(
    code="gpu.unseen",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="gpu",
    threshold="no pass over the GPU has finished since the agent started",
    why="the state of the GPU is not known",
    advice="wait for the first pass; if none finishes, see the sources in drahealth status",
    repair=Repair.NONE,
)
REMOVED_INSTANCE: Final = CatalogRow(
    code="gpu.mig.gone",
    severity=Severity.UNKNOWN,
    blame=Blame.CONFIGURATION,
    source="gpu",
    threshold="the instance existed, and was removed less than 10 min ago",
    why="a pod that still claims the instance has lost its device",
    advice="delete pods that claim it; publish the GPU's new instances",
    repair=Repair.RESTART_WORKLOAD,
)


def unread_gpu_causes(view: GpuRuleInput, since: Instant) -> tuple[Cause, ...]:
    """Return the cause NOT_READ_YET for a GPU without readings; empty if the GPU was read or is missing."""
    gpu, gpus = view.sample, view.gpu_set
    may_appear = is_listing_gpus(gpus) or is_identifying_gpus(gpus, view.limits.dead_s, view.now_ns)
    if gpu.passes if gpu is not None else not may_appear:
        return ()
    return (cause_from_row(NOT_READ_YET, "no pass over the GPU has finished yet", since),)


def removed_instance_finding(rule_state: GpuRuleState, device: InventoryDevice) -> Finding | None:
    """Return the finding for a MIG instance that was removed; None: the instance exists."""
    for mig, removed_at in rule_state.per_gpu[device.gpu_number].instances:
        if (mig.gi, mig.ci) == (device.gi, device.ci):
            return (
                Finding(REMOVED_INSTANCE.code, REMOVED_INSTANCE.severity, "the MIG instance no longer exists")
                if removed_at
                else None
            )
    return None


def gpu_attributes(
    rule_state: GpuRuleState, gpus: NvmlSample | None, host: GpuOsSample, device: InventoryDevice
) -> tuple[tuple[str, str], ...]:
    """Return the known attributes of a GPU or MIG instance (UUID, product, driver ...), as (name, value)."""
    known = next(gpu for gpu in rule_state.registry if gpu.number == device.gpu_number)
    sample = rule_state.samples.get(device.gpu_number)
    found = next((gpu for gpu in host.inventory if known.uuid and gpu.uuid == known.uuid), None)
    found = found or GpuAttributes(known.uuid, known.bus)
    mig = None
    if device.kind is DeviceKind.MIG:
        migs = (instance.mig for instance in rule_state.per_gpu[device.gpu_number].instances)
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
    device: InventoryDevice,
    view: GpuRuleInput,
    rules: Sequence[Rule],
    gpus: GpuEvaluationResult,
    source: SourceSample,
) -> None:
    """Run the rules for one GPU, and update the GPU's conditions (raised and pending faults). The conditions
    of latched faults (reported once, such as XIDs) are updated too."""
    answering = is_answering(view.sample, view.limits, view.now_ns)
    had_no_conditions = not evaluation.previous_codes(device.name)
    may_be_changed = bool(evaluation.settings.rules)
    for rule in rules:
        limit = None
        if may_be_changed:
            if (change := evaluation.change_of(device.name, rule)) is None:
                continue
            limit = change.limit
        if not (answering or rule.valid_when_stalled):
            result: RuleResult = NOT_ANSWERING_RESULT
        elif limit is None:
            result = rule.evaluate(view)  # at each heartbeat 40 times per GPU, without a further call
        else:
            result = evaluate_rule(rule, view, limit)
        if had_no_conditions:
            if result is OK and not rule.counts_growth:
                continue  # the most frequent case, and nothing changes
        elif (
            isinstance(result, RuleInconclusive)
            and (device.name, rule.code) in evaluation.previous
            and answering
            and _are_counters_zero(rule, view)
        ):
            result = OK  # the history is short, but the GPU was reset while the agent was stopped
        rule_source = source if rule.source == "gpu" else evaluation.sources.get(rule.source, source)
        evaluation.apply_result(device.name, rule, result, rule_source)
    found = gpu_findings(gpus.decisions, gpus.faults_by_key, gpus.state.rule_state, device.gpu_number)
    _update_fault_conditions(evaluation, device, found, source)
    if not answering and (step_ns := next_not_answering_change_ns(view)) is not None:
        evaluation.due_ns.append(step_ns)


def _are_counters_zero(rule: Rule, view: GpuRuleInput) -> bool:
    """Return whether a rule evaluates the growth of counters, and all of them are 0."""
    counters = [wake.field for wake in rule.gpu_reads if wake.mode is GpuWakeMode.RISE]
    return rule.counts_growth and bool(counters) and all(gpu_reading(view, field) == 0 for field in counters)


def evaluate_mig_instance(
    evaluation: Evaluation, device: InventoryDevice, gpus: GpuEvaluationResult, source: SourceSample
) -> None:
    """Update the conditions (raised faults, and faults not confirmed yet) of one MIG instance."""
    evaluation.update_condition(
        device.name,
        REMOVED_INSTANCE,
        removed_instance_finding(gpus.state.rule_state, device),
        source,
        valid_when_stalled=True,
    )
    found = mig_findings(gpus.decisions, gpus.faults_by_key, device.gpu_number, device.gi, device.ci)
    _update_fault_conditions(evaluation, device, found, source)


def _update_fault_conditions(
    evaluation: Evaluation, device: InventoryDevice, found: Mapping[str, LatchedFinding], source: SourceSample
) -> None:
    """Raise or clear the conditions of a device's latched faults, even while the GPU does not answer.

    Args:
        found: Finding and begin of each latched fault that the device has now, by code.
    """
    codes = evaluation.previous_codes(device.name)
    cleared = [code for code in codes if is_latched_fault_code(code) and code not in found]
    for code in sorted([*found, *cleared]):
        finding, since = found.get(code, (None, None))
        held = evaluation.previous.get((device.name, code))
        is_unhealthy = held is not None and held.finding.severity is Severity.UNHEALTHY
        row = latched_fault_row(code, evaluation.settings.gpu, is_unhealthy=is_unhealthy)
        evaluation.update_condition(device.name, row, finding, source, valid_when_stalled=True, since=since)


def gpu_catalog_row(rules: Sequence[Rule], limits: GpuLimits, code: str) -> CatalogRow:
    """Return the catalog row of a GPU's finding code: of a rule, latched fault or removed MIG instance."""
    if code == REMOVED_INSTANCE.code:
        return REMOVED_INSTANCE
    return latched_fault_row(code, limits) if is_latched_fault_code(code) else row_with_code(rules, code)


def gpu_verdicts(
    evaluation: Evaluation,
    previous: VerdictContext,
    gpus: GpuEvaluationResult,
    snapshot: Snapshot,
    cache: GpuVerdictCache,
) -> tuple[dict[InventoryDevice, DeviceHealth], GpuVerdictCache]:
    """Return the verdict on each GPU, followed by its MIG instances, which inherit the causes of their GPU.

    Args:
        cache: Cached results, which are used for the GPUs in ``gpus.unchanged``.

    Returns:
        The verdicts, and the cached results for the next evaluation.
    """
    if snapshot.gpus is None:
        return {}, cache
    rule_state, limits = gpus.state.rule_state, evaluation.settings.gpu
    sources = {
        gpu.number: evaluation.sources.get(gpu_device(gpu.number).name) or evaluation.sources[NVML]
        for gpu in rule_state.registry
    }
    cached = {
        number: entry
        for number, entry in cache.gpus.items()
        if number in gpus.unchanged and sources[number].state is SourceState.OK
    }
    found: dict[InventoryDevice, DeviceHealth] = {}
    if len(cached) == len(sources) == len(cache.gpus):
        for number, known in cached.items():
            _add_cached_verdicts(evaluation, previous, known, sources[number], found)
        return found, cache
    views = gpu_views(rule_state, snapshot, limits, evaluation.now, cached)
    kept: dict[int, CachedGpu] = {}
    for number, source in sources.items():
        entry = cached.get(number)
        if entry is not None:
            _add_cached_verdicts(evaluation, previous, entry, source, found)
        else:
            begin, gpu = evaluation.list_lengths(), gpu_device(number)
            verdicts = _evaluated_verdicts(evaluation, previous, gpus, snapshot, gpu, views[number], source)
            found.update(verdicts)
            sample = rule_state.samples.get(number)
            if sample is not None and verdicts:
                devices = [(device, verdict.attributes) for device, verdict in verdicts.items()]
                entry = cached_gpu(evaluation, sample, devices, begin)
        if entry is not None:
            kept[number] = entry
    return found, next_gpu_cache(snapshot, evaluation.settings, kept, sources)


def _add_cached_verdicts(
    evaluation: Evaluation,
    previous: VerdictContext,
    entry: CachedGpu,
    source: SourceSample,
    found: dict[InventoryDevice, DeviceHealth],
) -> None:
    """Add the unchanged verdicts on a GPU and its MIG instances to `found`, with a new lease."""
    evaluation.not_applicable += entry.not_applicable
    if entry.not_evaluated or entry.due_ns:
        evaluation.not_evaluated += entry.not_evaluated
        evaluation.due_ns += entry.due_ns
    verified, lease_s = instant_at_mono(source.beat_ns, evaluation.now), lease_seconds(evaluation, (source,))
    for device, attributes in entry.devices:
        last = previous.devices.get(device.name)
        if last and not last.causes and last.severity is Severity.OK and last.attributes == attributes:
            found[device] = last.with_verification(verified, lease_s + previous.lease_salt_s)
        else:
            found[device] = make_verdict(
                evaluation, previous, device, Severity.OK, (), verified, lease_s, attributes
            )


def _evaluated_verdicts(
    evaluation: Evaluation,
    previous: VerdictContext,
    gpus: GpuEvaluationResult,
    snapshot: Snapshot,
    gpu: InventoryDevice,
    view: GpuRuleInput,
    source: SourceSample,
) -> dict[InventoryDevice, DeviceHealth]:
    """Evaluate a GPU and its MIG instances, and return their verdicts. Empty for a new GPU whose first pass
    (reading) has not finished."""
    rule_state, limits = gpus.state.rule_state, evaluation.settings.gpu
    rules, instances = gpu_rules(limits), rule_state.per_gpu[gpu.gpu_number].instances
    if _is_new_and_unread(evaluation, previous, gpu, source) and not instances:
        evaluation.due_ns.append(source.beat_ns + FIRST_PASS_WAIT_NS)
        return {}
    answering = is_answering(view.sample, limits, view.now_ns)
    # a GPU that does not answer was verified now: it does not answer
    verified = oldest_pass_time([source], evaluation.now) if answering else evaluation.now
    of_source = unread_gpu_causes(view, previous.started)
    if answering and source.state is SourceState.STALLED:
        of_source = (stall_cause(source, previous.stalls, evaluation.now),)
    lease_s = lease_seconds(evaluation, [source])
    migs = [mig_device(gpu.gpu_number, instance.mig.gi, instance.mig.ci) for instance in instances]
    found = {}
    for device in (gpu, *migs):
        if device is gpu:
            evaluate_gpu(evaluation, device, view, rules, gpus, source)
        else:
            evaluate_mig_instance(evaluation, device, gpus, source)
        parent = "" if device is gpu else gpu.name
        causes = evaluation.causes(device.name, partial(gpu_catalog_row, rules, limits), parent)
        if of_source and not any(
            cause.code == NOT_ANSWERING for cause in causes
        ):  # NOT_ANSWERING is the better cause
            causes = sorted([*of_source, *causes], key=lambda cause: -cause.severity)
        severity = causes[0].severity if causes else Severity.OK
        attributes = gpu_attributes(rule_state, snapshot.gpus, snapshot.host, device)
        found[device] = make_verdict(
            evaluation, previous, device, severity, causes, verified, lease_s, attributes
        )
    return found


def _is_new_and_unread(
    evaluation: Evaluation, previous: VerdictContext, device: InventoryDevice, source: SourceSample
) -> bool:
    """Return whether a GPU is new and was not read yet. Such a GPU is not reported for FIRST_PASS_WAIT_NS."""
    if source.name != device.name or source.state is not SourceState.STARTING:
        return False
    known = device.name in previous.devices or evaluation.previous_codes(device.name)
    return not known and evaluation.now.mono_ns < source.beat_ns + FIRST_PASS_WAIT_NS
