"""State of all GPUs between evaluations, and its update, which decides the severity of latched faults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.devices.gpu_identity import replaced_gpu_numbers
from agent.health.gpu.faults.checkpoint import build_checkpoint
from agent.health.gpu.faults.correlate import next_wait_end_ns
from agent.health.gpu.faults.evaluate import evaluate_faults
from agent.health.gpu.faults.fault_log import SHARED, Fault, FaultKey, FaultLog
from agent.health.gpu.faults.ingest import ingest_faults
from agent.health.gpu.faults.recovery import RecoverySigns, resolve_faults, update_recovery_signs
from agent.health.gpu.rule_state import GpuRuleState, next_gpu_rule_state
from agent.health.gpu.xid.conditions import FaultDecision
from agent.model.cleared_faults import ClearedFault
from agent.model.persistent_faults import PersistentState
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import Instant

RECORD_KEPT_S: Final = 86_400.0
"""Time for which the record of a cleared fault is kept and reported [s]."""
RECORDS_MAX: Final = 256
"""Largest number of records of cleared faults; the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """State of all GPUs (rules, latched faults, signs of recovery) that one evaluation passes to the next."""

    rule_state: GpuRuleState = field(default_factory=GpuRuleState)
    fault_log: FaultLog = field(default_factory=FaultLog)
    recovery_signs: Mapping[int, RecoverySigns] = field(default_factory=dict)
    checkpoint: PersistentState = field(default_factory=PersistentState)
    """GPUs and GPU faults that must survive a restart of the agent."""
    evaluated_ns: int = 0
    cleared: tuple[ClearedFault, ...] = ()
    """Records of faults, of all kinds of devices, that operators cleared within a day."""


class GpuEvaluationResult(NamedTuple):
    """State of all GPUs after one evaluation, with severity and advice of each latched fault."""

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
        unchanged: Numbers of GPUs whose cached verdicts are valid, unless they have latched faults.
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
        state = replace(previous, rule_state=rule_state, evaluated_ns=now.mono_ns, cleared=cleared)
        return GpuEvaluationResult(state, {}, {}, frozenset(), None, unchanged)
    replaced_numbers = replaced_gpu_numbers(previous.rule_state.registry, rule_state.registry)
    log = ingest_faults(previous.fault_log, snapshot, rule_state, previous.evaluated_ns, now)
    decisions = evaluate_faults(log, rule_state, limits, now)
    signs = update_recovery_signs(previous.recovery_signs, rule_state, snapshot.gpus.generation, now)
    log, resolve_ns = resolve_faults(log, decisions, signs, now)
    decisions = {key: found for key, found in decisions.items() if not log.faults[key].resolved}
    due = [at for at in (resolve_ns, next_wait_end_ns(log)) if at is not None]
    cleared = recent_clears(previous.cleared, now)
    state = GpuState(rule_state, log, signs, previous.checkpoint, now.mono_ns, cleared)
    state = with_checkpoint(state, decisions)
    faulty = {key.gpu_number for key in decisions}
    unchanged = frozenset() if SHARED in faulty else unchanged - faulty
    return GpuEvaluationResult(
        state, decisions, log.faults, replaced_numbers, min(due, default=None), unchanged
    )


def with_checkpoint(state: GpuState, decisions: Mapping[FaultKey, FaultDecision]) -> GpuState:
    """Return the GPUs' state with its checkpoint (the GPUs and faults to store on disk) computed again.

    The result is ``state`` itself if the checkpoint has not changed.

    Args:
        decisions: Severity, advice and cure of each unresolved latched fault.
    """
    checkpoint = build_checkpoint(
        state.fault_log, decisions, state.rule_state.registry, state.recovery_signs, state.cleared
    )
    return state if checkpoint == state.checkpoint else replace(state, checkpoint=checkpoint)


def recent_clears(records: Sequence[ClearedFault], now: Instant) -> tuple[ClearedFault, ...]:
    """Return the records of cleared faults that are younger than RECORD_KEPT_S; of many, the newest
    RECORDS_MAX.
    """
    kept = tuple(record for record in records if abs(now.wall_s - record.at_wall_s) < RECORD_KEPT_S)
    return kept[-RECORDS_MAX:]
