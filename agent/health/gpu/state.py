"""State of all GPUs between evaluations, and its update, which decides the severity of latched faults.

A latched fault is reported once, such as an XID, and kept until it is resolved. The module also has the cache
of verdicts on GPUs: a GPU without faults is evaluated again only if it has changed.

The C core counts the passes (readings) of a GPU that wake the engine. If another source wakes the
engine, the results of GPUs without such passes are reused. Readings that wake nothing, such as a temperature
below its limit, count at the next full evaluation, which is at most one heartbeat later.
"""

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from agent.devices.inventory import InventoryDevice
from agent.health.evaluation import Conditions, Evaluation
from agent.health.gpu.faults.checkpoint import (
    RecoverySigns,
    build_checkpoint,
    resolve_faults,
    update_recovery_signs,
)
from agent.health.gpu.faults.decide_severity import evaluate_faults, latched_fault_row
from agent.health.gpu.faults.fault_log import SHARED, Fault, FaultKey, FaultLog, number_in_code
from agent.health.gpu.faults.ingest import ingest_faults
from agent.health.gpu.faults.match_reports import next_wait_end_ns
from agent.health.gpu.rule_input import is_answering, is_identifying_gpus, is_listing_gpus
from agent.health.gpu.rule_state import GpuRuleState, next_gpu_rule_state, replaced_gpu_numbers
from agent.health.gpu.xid.decisions import FaultDecision
from agent.health.rules import XID_PREFIX
from agent.model.cleared_faults import ClearedFault
from agent.model.gpu import GpuSample, NvmlSample
from agent.model.health import NotApplicable, Severity, XidOverride
from agent.model.persistent_faults import NO_MODULE, DriverModule, PersistentState
from agent.model.settings import EngineSettings, GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

RECORD_KEPT_S: Final = 86_400.0
"""Time for which the record of a cleared fault is kept and reported [s]."""
RECORDS_MAX: Final = 256
"""Largest number of records of cleared faults; the oldest are dropped."""


class GpuState(NamedTuple):
    """State of all GPUs that one evaluation passes to the next: rules, faults, and signs of a recovery."""

    rule_state: GpuRuleState = GpuRuleState()
    fault_log: FaultLog = FaultLog()
    recovery_signs: Mapping[int, RecoverySigns] = {}
    checkpoint: PersistentState = PersistentState()
    """GPUs and GPU faults that must survive a restart of the agent."""
    evaluated_ns: int = 0
    cleared: tuple[ClearedFault, ...] = ()
    """Records of faults, of all kinds of devices, that operators cleared within a day."""
    module: DriverModule = NO_MODULE
    reloaded_at: Instant | None = None
    """Earliest time of a reload since the last run; None: no fault was restored, or NVML was read since."""


class GpuEvaluationResult(NamedTuple):
    """State of all GPUs after one evaluation, with severity and advice of each latched fault (such as an
    XID)."""

    state: GpuState
    decisions: Mapping[FaultKey, FaultDecision]
    """Severity, evidence and advice of each unresolved latched fault, by fault."""
    faults_by_key: Mapping[FaultKey, Fault]
    replaced: frozenset[int]
    """Numbers of GPUs that were replaced by another GPU, whose earlier state is invalid."""
    due_ns: int | None
    """Monotonic time at which latched faults must be evaluated again [ns]; None: no such time."""
    unchanged: frozenset[int] = frozenset()
    """Numbers of GPUs whose cached verdicts are valid."""


def evaluate_gpus(
    previous: GpuState,
    snapshot: Snapshot,
    limits: GpuLimits,
    now: Instant,
    unchanged: frozenset[int] = frozenset(),
) -> GpuEvaluationResult:
    """Return the state of all GPUs after a snapshot, with severity and advice of each latched fault.

    Args:
        unchanged: Numbers of GPUs whose cached verdicts are valid. If they have latched faults, they are
            evaluated again.
    """
    if snapshot.gpus is None:  # GPUs are not read: keep their state
        return GpuEvaluationResult(previous, {}, {}, frozenset(), None)
    rule_state = next_gpu_rule_state(previous.rule_state, snapshot, limits, now, unchanged)
    is_unchanged = (
        unchanged
        and len(unchanged) == len(rule_state.registry)
        and not (previous.fault_log.faults or previous.fault_log.waiting)
    )
    if is_unchanged:
        cleared = recent_clears(previous.cleared, now)
        state = previous._replace(rule_state=rule_state, evaluated_ns=now.mono_ns, cleared=cleared)
        return GpuEvaluationResult(state, {}, {}, frozenset(), None, unchanged)
    replaced = replaced_gpu_numbers(previous.rule_state.registry, rule_state.registry)
    unidentified = _unidentified_gpus(rule_state, snapshot.gpus, limits, previous.fault_log.started_ns, now)
    log = ingest_faults(previous.fault_log, snapshot, rule_state, previous.evaluated_ns, now, unidentified)
    decisions = evaluate_faults(log, rule_state, limits, now)
    module, reloaded_at = previous.module, None
    if log.boot_id and snapshot.gpus.module:
        module = DriverModule(log.boot_id, snapshot.gpus.module)
        if previous.module.number and module != previous.module:
            reloaded_at = previous.reloaded_at
    generation = snapshot.gpus.generation
    signs = update_recovery_signs(previous.recovery_signs, rule_state, generation, now, reloaded_at)
    log, resolve_ns = resolve_faults(log, decisions, signs, previous.fault_log.faults, now)
    decisions = {key: found for key, found in decisions.items() if not log.faults[key].resolved}
    due = [at for at in (resolve_ns, next_wait_end_ns(log)) if at is not None]
    cleared = recent_clears(previous.cleared, now)
    waiting = None if snapshot.gpus.module else previous.reloaded_at
    state = GpuState(rule_state, log, signs, previous.checkpoint, now.mono_ns, cleared, module, waiting)
    state = with_checkpoint(state, decisions)
    faulty = {key.gpu_number for key in decisions}
    unchanged = frozenset() if SHARED in faulty else unchanged - faulty
    return GpuEvaluationResult(state, decisions, log.faults, replaced, min(due, default=None), unchanged)


def _unidentified_gpus(
    gpus: GpuRuleState, read: NvmlSample, limits: GpuLimits, started_ns: int, now: Instant
) -> frozenset[int]:
    """Return the numbers of known GPUs that NVML may still find at another PCI address after the start."""
    if started_ns and now.mono_ns - started_ns >= limits.dead_s * NS:
        return frozenset()
    # the XID of a GPU that hangs must not wait longer than the deadline
    if not (is_listing_gpus(read) or is_identifying_gpus(read, limits.deadline_s, now.mono_ns)):
        return frozenset()
    found = {number for number, sample in gpus.samples.items() if sample.uuid}
    return frozenset(gpu.number for gpu in gpus.registry if gpu.uuid and gpu.number not in found)


def unlisted_gpus(log: FaultLog, snapshot: Snapshot, limits: GpuLimits, now: Instant) -> tuple[str, ...]:
    """Return the PCI addresses of unknown GPUs of which the kernel log reports faults above INFO, with the
    finding codes. Empty while NVML may still list the GPUs, for at most the time ``limits.dead_s``."""
    gpus = snapshot.gpus
    if not log.unlisted or gpus is None or (limits.expect is not None and len(gpus.gpus) >= limits.expect):
        return ()
    overrides = dict(limits.xids)
    is_bus_read = isinstance(snapshot.host.bus_gpus, tuple)
    may_appear = is_listing_gpus(gpus) or is_identifying_gpus(gpus, limits.dead_s, now.mono_ns)
    if now.mono_ns - log.started_ns < limits.dead_s * NS and (may_appear or not is_bus_read):
        return ()
    found: dict[str, list[str]] = {}
    for address, code in sorted(log.unlisted.values()):
        codes = found.setdefault(address, [])
        default = XidOverride.INFO if latched_fault_row(code, limits).severity <= Severity.INFO else None
        override = overrides.get(number_in_code(code), default) if code.startswith(XID_PREFIX) else default
        if code not in codes and override not in (XidOverride.IGNORE, XidOverride.INFO):
            codes.append(code)
    return tuple(f"{address} ({', '.join(codes)})" for address, codes in found.items() if codes)


def with_checkpoint(state: GpuState, decisions: Mapping[FaultKey, FaultDecision]) -> GpuState:
    """Return the GPUs' state with an updated checkpoint (the GPUs and faults to store on disk).

    The result is ``state`` itself if the checkpoint has not changed.
    """
    log, registry = state.fault_log, state.rule_state.registry
    checkpoint = build_checkpoint(log, decisions, registry, state.recovery_signs, state.cleared, state.module)
    return state if checkpoint == state.checkpoint else state._replace(checkpoint=checkpoint)


def recent_clears(records: Sequence[ClearedFault], now: Instant) -> tuple[ClearedFault, ...]:
    """Return the records of cleared faults that are younger than RECORD_KEPT_S. If there are more than
    RECORDS_MAX, the newest are returned."""
    kept = tuple(record for record in records if abs(now.wall_s - record.at_wall_s) < RECORD_KEPT_S)
    return kept[-RECORDS_MAX:]


# --- cache of verdicts -------------------------------------------------------------------------------------


_passes: Final = attrgetter("passes")
_status: Final = attrgetter("status")
_call: Final = attrgetter("call")
_numbered_readings: Final = attrgetter("index", "uuid", "changes", "event_mask", "events", "xids")
_visible_readings: Final = attrgetter("uuid", "changes", "event_mask", "events", "xids")
"""Function that returns a GPU's UUID and the C core's counts of its changes, events and XIDs.

If these values are equal, no reading that a rule evaluates has changed.
"""


class CachedGpu(NamedTuple):
    """Cached results of the last evaluation of one GPU without faults, and of its MIG instances."""

    readings: tuple[object, ...]
    """Values that show each change that rules evaluate; see ``_visible_readings``."""
    devices: tuple[tuple[InventoryDevice, tuple[tuple[str, str], ...]], ...]
    """The GPU and its MIG instances, each with its attributes."""
    not_applicable: tuple[NotApplicable, ...]
    not_evaluated: tuple[NotApplicable, ...]
    due_ns: tuple[int, ...]
    """Monotonic times at which the GPU must be evaluated again [ns]."""


class GpuVerdictCache(NamedTuple):
    """Cached results of GPUs, and the part of the rules' input that all GPUs share."""

    inputs: tuple[object, ...] = ()
    gpus: Mapping[int, CachedGpu] = {}
    """Cached results of GPUs without faults, by GPU number."""
    all_readings: tuple[object, ...] = ()
    """Values that show each change of any GPU, by sample; empty: a GPU has no cached results."""
    subjects: frozenset[str] = frozenset()
    """Names of all GPUs and MIG instances with cached results."""
    due_ns: int | None = None
    """Monotonic time at which the first of the GPUs must be evaluated again [ns]; None: no such time."""


def shared_inputs(snapshot: Snapshot, settings: EngineSettings) -> tuple[object, ...]:
    """Return the part of the rules' input that all GPUs share; empty if GPUs are not monitored."""
    gpus, log = snapshot.gpus, snapshot.log
    if gpus is None:
        return ()
    return (
        *(gpus.nvml.state, gpus.nvml.detail, gpus.events.state, gpus.err, gpus.generation, gpus.count),
        *(gpus.driver, gpus.library, gpus.call, gpus.process, len(gpus.gpus)),
        *((log.source.state, log.lines) if log else ()),
        *(snapshot.host, snapshot.pci, settings),
    )


def unchanged_gpus(
    cache: GpuVerdictCache,
    previous: GpuRuleState,
    conditions: Conditions,
    snapshot: Snapshot,
    settings: EngineSettings,
    now: Instant,
) -> frozenset[int]:
    """Return the numbers of the GPUs whose cached results are still valid.

    Args:
        conditions: Raised and pending faults after the last evaluation. GPUs that have any are evaluated
            again.
    """
    if snapshot.gpus is None or not cache.gpus or cache.inputs != shared_inputs(snapshot, settings):
        return frozenset()
    samples = snapshot.gpus.gpus
    subjects, now_ns, limits = {subject for subject, _ in conditions}, now.mono_ns, settings.gpu
    if (
        cache.all_readings
        and cache.all_readings == _all_readings(samples)
        and cache.subjects.isdisjoint(subjects)
        and not (cache.due_ns is not None and now_ns >= cache.due_ns)
    ):
        return frozenset(cache.gpus)  # the usual case, at little cost
    numbers = {sample.index: number for number, sample in previous.samples.items()}
    found = set()
    for sample in samples:
        number = numbers.get(sample.index, -1)
        entry = cache.gpus.get(number)
        if (
            entry is not None
            and entry.readings == _visible_readings(sample)
            and is_answering(sample, limits, now_ns)
            and not (subjects and any(device.name in subjects for device, _ in entry.devices))
            and not (entry.due_ns and now_ns >= min(entry.due_ns))
        ):
            found.add(number)
    return frozenset(found)


def _all_readings(samples: Sequence[GpuSample]) -> tuple[object, ...]:
    """Return the values that show each change of any GPU; empty if a GPU does not answer, or is in a call."""
    if not all(map(_passes, samples)) or any(map(_status, samples)) or any(map(_call, samples)):
        return ()
    return tuple(map(_numbered_readings, samples))


def next_gpu_cache(
    snapshot: Snapshot, settings: EngineSettings, gpus: Mapping[int, CachedGpu], numbers: Collection[int]
) -> GpuVerdictCache:
    """Return the cache for the next evaluation. ``gpus``: results without faults of this evaluation, by GPU
    number; ``numbers``: numbers of all GPUs."""
    samples = snapshot.gpus.gpus if snapshot.gpus else ()
    return GpuVerdictCache(
        shared_inputs(snapshot, settings),
        gpus,
        _all_readings(samples) if len(gpus) == len(numbers) == len(samples) else (),
        frozenset(device.name for entry in gpus.values() for device, _ in entry.devices),
        min((at_ns for entry in gpus.values() for at_ns in entry.due_ns), default=None),
    )


def cached_gpu(
    evaluation: Evaluation,
    sample: GpuSample,
    devices: Sequence[tuple[InventoryDevice, tuple[tuple[str, str], ...]]],
    begin: tuple[int, int, int],
) -> CachedGpu | None:
    """Return the results of a GPU that the next evaluation can reuse.

    None: the GPU has raised or pending faults (found, but not confirmed yet), so it must be evaluated again.

    Args:
        devices: The GPU and its MIG instances, each with its attributes.
        begin: Lengths of the evaluation's lists (not applicable, not evaluated, due times) before the GPU was
            evaluated. Later entries of the lists are those of the GPU.
    """
    if any(evaluation.stable_codes(device.name) != () for device, _ in devices):
        return None
    not_applicable, not_evaluated, due = begin
    return CachedGpu(
        _visible_readings(sample),
        tuple(devices),
        tuple(evaluation.not_applicable[not_applicable:]),
        tuple(evaluation.not_evaluated[not_evaluated:]),
        tuple(evaluation.due_ns[due:]),
    )
