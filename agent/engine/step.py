"""One step of the health engine, which computes its next state and a health report from a snapshot.

Read this first. The step is pure: it reads no clock, file or socket, so that recorded snapshots can be
replayed with the same reports. The rules and decisions are in these modules:

    health/host/              rules for CPUs, memory, hugepages, PCI functions, cgroups, pods and the machine;
                              checks that operators configure as commands
    health/gpu/               rules for GPUs, from readings of NVML
    health/gpu/faults/        GPU faults that the hardware reports only once, such as XIDs, and when they end
    health/kernel_log/        information about the host in lines of the kernel log
    health/declared/          devices that drivers declare, their own checks and the faults they report
    health/clear_faults.py    latched (kept) faults, which operators clear
    health/state_updates.py   values at start, kept over restarts of the agent until a reboot; new settings
    health/state_machine.py   when the finding of a rule becomes the cause of a verdict, and when it clears
    health/verdict.py         stalled sources; health, message and lease of a device
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

from agent.devices.inventory import in_report_order
from agent.health.clear_faults import ClearOutcome, clear_faults, reported_clears
from agent.health.declared.driver_reports import (
    DriverFaultState,
    conditions_to_store,
    declared_check_samples,
    health_check_sources,
    is_of_former_hardware,
    restored_conditions,
    subject_of_checks,
    update_driver_faults,
    with_driver_faults,
)
from agent.health.declared.state import (
    NO_VERDICTS,
    DeclaredState,
    VerdictCache,
    redeclared_devices,
    update_declared,
)
from agent.health.declared.verdicts import declared_verdicts, invalid_file_notes
from agent.health.evaluation import CachedOkResults, Conditions, Evaluation, Subject
from agent.health.gpu.faults.checkpoint import RestoredFaults, with_present_times
from agent.health.gpu.rule_state import gpu_devices, gpu_rules, gpu_sources
from agent.health.gpu.state import (
    GpuEvaluationResult,
    GpuState,
    GpuVerdictCache,
    evaluate_gpus,
    recent_clears,
    unchanged_gpus,
    unlisted_gpus,
)
from agent.health.gpu.verdicts import FIRST_PASS_WAIT_NS, gpu_verdicts
from agent.health.host.cgroup.state import cgroup_rule_inputs
from agent.health.host.pod import PodsSampleState, evaluate_pods, next_pods_sample_state
from agent.health.host.unchanged_parts import (
    HostResults,
    due_times,
    host_inputs,
    next_host_results,
    unchanged_parts,
)
from agent.health.host.verdicts import (
    ALL_HOST_RULES,
    CustomCheckEvaluation,
    HostRuleState,
    custom_check_sources,
    evaluate_host,
    host_verdicts,
    is_snapshot_incomplete,
    machine_causes,
    next_host_state,
)
from agent.health.state_updates import (
    Basis,
    collect_baseline,
    conditions_after_pause,
    conditions_with_settings,
    gpus_with_settings,
    host_with_settings,
    restored_host_state,
    start_basis,
    values_of_boot,
    with_milder_severities,
    with_seen_features,
)
from agent.health.verdict import (
    PAUSE_DELAY_NS,
    Pause,
    SourceStall,
    VerdictContext,
    find_stalls,
    next_pauses,
    stall_limit_ns,
    with_pauses,
    with_stall,
)
from agent.model.health import DeviceHealth
from agent.model.persistent_faults import PersistentState
from agent.model.reading import SourceSample, SourceState, source_name, sources_in_state
from agent.model.report import Report
from agent.model.settings import EngineSettings, GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant, with_present_clock

STALL_RECHECK_NS: Final = NS
_GROWTH_CODES: Final = frozenset(
    rule.code for rule in (*ALL_HOST_RULES, *gpu_rules(GpuLimits())) if rule.counts_growth
)
"""Finding codes of the rules that need some minutes of readings after the agent's start."""
RUN_LEASE_S: Final = 4
"""Seconds that every second run of the agent adds to each lease. Within a run, leases differ by less, so that
two runs in a row have no lease in common."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """State that the health engine keeps from one evaluation to the next."""

    settings: EngineSettings
    host: HostRuleState = field(default_factory=HostRuleState)
    gpus: GpuState = field(default_factory=GpuState)
    declared: DeclaredState = field(default_factory=DeclaredState)
    verdict_cache: VerdictCache = field(default_factory=VerdictCache)
    """Cached verdicts on declared devices; they save work and do not change results."""
    gpu_cache: GpuVerdictCache = field(default_factory=GpuVerdictCache)
    """Cached results of GPUs, which are used between full evaluations."""
    host_results: HostResults = field(default_factory=HostResults)
    """Results of the parts of the host, reused between full evaluations while their input is equal."""
    ok_cache: Mapping[Subject, CachedOkResults] = field(default_factory=dict)
    """Cached rule results of devices and cgroups without findings; they save work, results stay the same."""
    driver_faults: DriverFaultState = field(default_factory=dict)
    pods: PodsSampleState = field(default_factory=PodsSampleState)
    conditions: Conditions = field(default_factory=dict)
    stalled: Mapping[str, SourceStall] = field(default_factory=dict)
    """Sources that are stalled, or that resumed so recently that they have too few passes, by name."""
    devices: Mapping[str, DeviceHealth] = field(default_factory=dict)
    """Verdicts of the last evaluation, by name of the device."""
    pauses: tuple[Pause, ...] = ()
    """Newest times in which the agent was stopped; they do not count for the age of readings."""
    started: Instant | None = None
    """Time of the first evaluation since the agent's start; None: there was none."""
    evaluated: Instant | None = None
    """Time of the evaluation that produced this state; None before the first one."""
    last_clear_request: int = 0
    """Number of the newest answered request to clear faults."""
    lease_salt_s: int = 0
    """Number added to every lease [s]; see :func:`_lease_salt`."""
    checkpoint: PersistentState = field(default_factory=PersistentState)
    """State that must survive a restart of the agent."""
    start_basis: Basis = ()
    """Values from which those at start in ``checkpoint`` were computed; the same values save the work."""
    due_ns: int | None = None
    """Monotonic time of the next evaluation if no source wakes the engine earlier [ns]; None: no such
    time."""


class StepOutcome(IntEnum):
    """Action of the engine loop on the state and the report of one evaluation."""

    DISCARDED = 0
    """State and report are discarded, and the sources read again, because a stall is new."""
    SILENT = 1
    """The report is not published: nothing changed, and no heartbeat is due."""
    PUBLISHED = 2


def initial_state(
    settings: EngineSettings,
    restored: RestoredFaults | None = None,
    saved: PersistentState | None = None,
    boot_id: str = "",
) -> EngineState:
    """Return the engine's state at the agent's start.

    Args:
        settings: Settings of the engine.
        restored: GPU faults from before a restart of the agent; None: GPUs begin without state.
        saved: State that the last run of the agent stored; None: nothing is stored, and runs of the agent are
            not counted.
        boot_id: Boot ID of the running kernel, whose stored baseline (values at start) is restored; empty:
            unknown.
    """
    state = EngineState(settings)
    if restored is not None:
        gpus = GpuState(
            restored.gpus,
            restored.faults,
            restored.recovery_signs,
            restored.saved,
            cleared=restored.cleared,
            module=restored.module,
            reloaded_at=restored.reloaded_at,
        )
        state = replace(state, gpus=gpus, conditions=restored.conditions)
    if saved is None:
        return state
    start = values_of_boot(saved.start, boot_id)
    seen = with_seen_features(state.gpus.rule_state, start.gpus)
    conditions = saved.conditions if start is saved.start else ()
    held = with_milder_severities(restored_conditions(conditions), settings)
    return replace(
        state,
        conditions={**held, **state.conditions},
        host=restored_host_state(start),
        gpus=state.gpus._replace(rule_state=seen, checkpoint=saved.gpu_part),
        checkpoint=replace(saved, start=start, conditions=conditions, runs=saved.runs + 1),
    )


def with_settings(state: EngineState, settings: EngineSettings, now: Instant) -> EngineState:
    """Return the engine's state after the settings have changed between two evaluations.

    Reported, latched (kept) and not yet confirmed faults stay. The baseline (the machine's values at start)
    stays, too, except for values that the settings replace.
    """
    before, gpus = state.settings, state.gpus.rule_state
    rule_state = gpus_with_settings(gpus, before.gpu, settings.gpu)
    return replace(
        state,
        settings=settings,
        host=host_with_settings(state.host, before, settings),
        gpus=state.gpus._replace(rule_state=rule_state),
        conditions=conditions_with_settings(state.conditions, gpus, before, settings, now),
        verdict_cache=VerdictCache(),
        gpu_cache=GpuVerdictCache(),
        host_results=HostResults(),
        ok_cache={},
        start_basis=(),
        due_ns=now.mono_ns,
    )


def step(
    state: EngineState, snapshot: Snapshot, now: Instant, *, is_full: bool = True
) -> tuple[EngineState, Report]:
    """Evaluate the health of the machine, its devices and its pods once.

    Args:
        state: State from the last step, or from :func:`initial_state`.
        snapshot: Newest complete snapshot of all sources.
        now: Time of this evaluation, not earlier than the snapshot.
        is_full: True: everything is evaluated. False: only GPUs with faults, those that woke the engine loop
            since the last evaluation, and parts of the host with faults or changed readings.

    Returns:
        The next state and the report. A report with ``starting`` set is incomplete and must not be published:
        at least one source has not finished its first reading.
    """
    # 1. Update what the rules compare with: values at start, counter windows, facts of the kernel log
    settings = state.settings
    started = state.started or now
    pauses = state.pauses
    if state.evaluated is not None and now.mono_ns - state.evaluated.mono_ns > PAUSE_DELAY_NS:
        is_leased = any(sample.lease_ns for sample in snapshot.checks)
        due_ns = state.due_ns if is_leased else None
        pauses = next_pauses(pauses, state.evaluated, due_ns, settings.lease_s, now)
    inputs, is_incomplete = host_inputs(snapshot, settings), is_snapshot_incomplete(snapshot)
    parts = frozenset[str]()
    if not (is_full or is_incomplete or snapshot.clear_requests):
        parts = unchanged_parts(state.host_results, inputs, state.conditions, now)
    host = next_host_state(state.host, snapshot, settings, now, parts)
    declared = update_declared(state.declared, snapshot.declared, now)
    checks = declared_check_samples(
        snapshot.checks, declared.checked, declared.since, declared.redeclared, pauses
    )
    if checks is not snapshot.checks:
        snapshot = replace(snapshot, checks=checks)
    unchanged = frozenset[int]()
    if not (is_full or snapshot.clear_requests):
        unchanged = unchanged_gpus(
            state.gpu_cache, state.gpus.rule_state, state.conditions, snapshot, settings, now
        )
    before = state.gpus
    if state.evaluated is None or with_present_clock(state.evaluated, now) != state.evaluated:
        before = before._replace(fault_log=with_present_times(before.fault_log, now))
    gpus = evaluate_gpus(before, snapshot, settings.gpu, now, unchanged)

    # 2. Mark the sources that are stalled
    read = (
        *snapshot.sources,
        *gpu_sources(gpus.state.rule_state, snapshot.gpus, settings.gpu),
        *health_check_sources(snapshot.checks, now),
        *custom_check_sources(settings.checks, snapshot.custom_checks, now),
    )
    aged = tuple(with_pauses(source, pauses) for source in read) if pauses else read
    stalled = find_stalls(state.stalled, aged, now)
    sources = dict(zip(map(source_name, aged), aged, strict=True))
    if stalled:
        sources |= {source.name: with_stall(source, stalled) for source in read if source.name in stalled}
    pods = next_pods_sample_state(state.pods, snapshot.pods, sources, now)

    starting = list(sources_in_state(sources.values(), SourceState.STARTING))
    is_late = now.mono_ns - started.mono_ns >= FIRST_PASS_WAIT_NS
    is_starting = any(source.vital or not is_late for source in starting)

    # 3. Clear the latched faults that operators state to be repaired; a later report answers early requests
    changed = _changed_devices(state, gpus, declared)
    conditions = _conditions_without(state.conditions, changed)
    if pauses is not state.pauses:
        conditions = conditions_after_pause(conditions, pauses[-1])
    clears = ClearOutcome(gpus, host, state.driver_faults, state.last_clear_request)
    verdict_cache, ok_cache = state.verdict_cache, state.ok_cache
    if snapshot.clear_requests and not is_starting:
        clears = clear_faults(
            snapshot.clear_requests, clears, conditions, state.devices, declared, snapshot, settings, now
        )
        conditions = {key: held for key, held in conditions.items() if key not in clears.dropped}
        verdict_cache, ok_cache = VerdictCache(), {}
    gpus, host = clears.gpus, clears.host

    # 4. Run the rules and derive verdicts: the host's devices and GPUs, declared devices, driver-reported
    # faults
    evaluation = Evaluation(settings, conditions, sources, now, ok_cache)
    _schedule_stall_detection(evaluation, stalled, starting, started, is_late=is_late)
    lease_salt_s = _lease_salt(state, now)
    # If kubelet and agent end together, the kubelet loads its last verdicts, which have expired. A first list
    # with the same leases would renew them without updating the pods.
    run_lease_s = RUN_LEASE_S * (max(state.checkpoint.runs - 1, 0) % 2)
    previous = VerdictContext(started, state.evaluated, state.devices, stalled, lease_salt_s + run_lease_s)
    if not is_incomplete:
        evaluate_host(evaluation, host, snapshot, parts)
        if host.kernel_log.ends:
            evaluation.due_ns.append(now.mono_ns + STALL_RECHECK_NS)
    own = dict(host_verdicts(evaluation, previous, host))
    found_gpus, gpu_cache = gpu_verdicts(evaluation, previous, gpus, snapshot, state.gpu_cache)
    own.update(found_gpus)
    results = (
        result
        for result in snapshot.custom_checks
        if result.device not in changed
        and not is_of_former_hardware(result.device, result.beat_ns, declared.redeclared)
    )
    custom = CustomCheckEvaluation(evaluation, settings.checks, results)
    custom.add_to_host(previous, own)
    if settings.checks:
        of_declared = [sample for subject in declared.devices for sample in custom.samples(subject)]
        snapshot = replace(snapshot, checks=(*snapshot.checks, *of_declared))
    found: dict[str, DeviceHealth] = {}
    if declared.known:
        found, verdict_cache = declared_verdicts(
            evaluation, previous, declared, host, gpus, snapshot, own, verdict_cache, parts
        )
    else:
        verdict_cache = NO_VERDICTS
    own_devices = in_report_order(tuple(own))  # reported before declared devices
    known = {**own_devices, **declared.known}
    devices = dict(zip(own_devices, map(own.__getitem__, own_devices.values()), strict=True)) | found
    driver_faults: DriverFaultState = {}
    if snapshot.driver_faults:
        driver_faults = update_driver_faults(
            evaluation, clears.driver_faults, snapshot.driver_faults, declared.declaring, devices
        )
        devices.update(with_driver_faults(evaluation, previous, driver_faults, known, devices))

    # 5. Evaluate cgroups and pods, and add their causes to the devices they use
    groups = cgroup_rule_inputs(host.groups, snapshot, settings, now)
    pod_notes, affected = evaluate_pods(
        evaluation, previous, pods, groups, known, devices, declared.declaring
    )
    devices.update(affected)
    custom.keep_faults_of_unread_devices(known)
    unlisted = unlisted_gpus(gpus.state.fault_log, snapshot, settings.gpu, now)
    notes = (
        *machine_causes(evaluation, host, snapshot, unlisted, parts),
        *custom.notes(),
        *pod_notes,
        *invalid_file_notes(declared),
    )

    # 6. Return the report and the next state
    report = Report(
        node=settings.node,
        at=now,
        devices=tuple(devices.values()),
        notes=notes,
        declaring=declared.declaring,
        declarations=declared.declarations,
        not_applicable=tuple(evaluation.not_applicable),
        not_evaluated=tuple(evaluation.not_evaluated),
        sources=tuple(sources.values()),
        core=snapshot.core,
        groups=len(snapshot.groups),
        cleared=reported_clears(recent_clears(gpus.state.cleared, now), declared, gpus.state.rule_state),
        clear_results=clears.results,
        starting=is_starting,
        is_full=is_full,
    )
    if gpus.due_ns is not None:
        evaluation.due_ns.append(max(gpus.due_ns, now.mono_ns + STALL_RECHECK_NS // 10))
    ok_cache = evaluation.next_cached_ok
    host_results = HostResults()
    if not is_incomplete:
        host_results = next_host_results(state.host_results, inputs, parts, host, ok_cache, settings, now)
    evaluation.due_ns += due_times(host_results, parts)
    if is_starting or is_incomplete:  # what was restored waits for the first readings
        restored = {key: held for key, held in conditions.items() if held.is_cause}
        evaluation.conditions = restored | evaluation.conditions
    basis, checkpoint = _next_checkpoint(state, host, gpus.state, evaluation.conditions)
    state = EngineState(
        settings,
        host=host,
        gpus=gpus.state,
        declared=declared,
        verdict_cache=verdict_cache,
        gpu_cache=gpu_cache,
        host_results=host_results,
        ok_cache=ok_cache,
        driver_faults=driver_faults,
        pods=pods,
        conditions=evaluation.conditions,
        stalled=stalled,
        pauses=pauses,
        devices=devices,
        started=started,
        evaluated=now,
        last_clear_request=clears.last_request,
        lease_salt_s=lease_salt_s,
        checkpoint=checkpoint,
        start_basis=basis,
        due_ns=min(evaluation.due_ns, default=None),
    )
    return state, report


def _next_checkpoint(
    state: EngineState, host: HostRuleState, gpus: GpuState, conditions: Conditions
) -> tuple[Basis, PersistentState]:
    """Return the input of the machine's baseline (values at start), and the state to store for a restart of
    the agent. The stored state is the same object if nothing in it has changed."""
    before, basis = state.checkpoint, start_basis(host, gpus.rule_state)
    start = before.start
    if host.started and basis != state.start_basis:
        start = collect_baseline(start.boot_id, host, gpus.rule_state, state.settings)
    stored = conditions_to_store(conditions, _GROWTH_CODES)
    same = (start, stored) == (before.start, before.conditions)
    if same and gpus.checkpoint is state.gpus.checkpoint:
        return basis, before
    return basis, replace(gpus.checkpoint, start=start, conditions=stored, runs=before.runs)


def _schedule_stall_detection(
    evaluation: Evaluation,
    stalled: Mapping[str, SourceStall],
    starting: Sequence[SourceSample],
    started: Instant,
    *,
    is_late: bool,
) -> None:
    """Schedule evaluations that detect stalled and resumed sources.

    The evaluations are necessary because such sources do not wake the engine.
    """
    now_ns = evaluation.now.mono_ns
    for name in stalled:
        evaluation.due_ns.append(now_ns + max(evaluation.sources[name].period_ns, STALL_RECHECK_NS))
    for source in starting:
        if source.vital:
            evaluation.due_ns.append(source.beat_ns + stall_limit_ns(source) + 1)
        elif not is_late:
            evaluation.due_ns.append(started.mono_ns + FIRST_PASS_WAIT_NS)


def _lease_salt(state: EngineState, now: Instant) -> int:
    """Return 0 or 1 second, which is added to every lease (how long the kubelet trusts a verdict).

    If the first list of devices after the leases expired equals the last list, the kubelet renews the leases
    but does not update the pods. A lease that differs by one second makes the kubelet update them.
    """
    gap_ns = now.mono_ns - state.evaluated.mono_ns if state.evaluated else 0
    if gap_ns <= state.settings.lease_s * NS:  # no device has a shorter lease
        return state.lease_salt_s
    lease_s = max((device.timeout_s for device in state.devices.values()), default=0)
    return 1 - state.lease_salt_s if gap_ns > lease_s * NS else state.lease_salt_s


def _changed_devices(
    state: EngineState, gpus: GpuEvaluationResult, declared: DeclaredState
) -> frozenset[str]:
    """Return the names of devices that are other hardware than before: declared again, or replaced GPUs."""
    names = redeclared_devices(state.declared.devices, declared.devices)
    if not gpus.replaced:
        return names
    known = gpu_devices(state.gpus.rule_state)
    return names | {device.name for device in known if device.gpu_number in gpus.replaced}


def _conditions_without(conditions: Conditions, devices: frozenset[str]) -> Conditions:
    """Return conditions (raised and pending faults) without those of some devices."""
    if not devices:
        return conditions
    subjects = devices | {subject_of_checks(name) for name in devices}
    return {key: condition for key, condition in conditions.items() if key[0] not in subjects}
