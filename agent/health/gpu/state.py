"""One look at all GPUs: what is remembered of them, which faults are latched, and what ends them.

The order matters and stands here: first who is there, then what came, then what it means, then what is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.devices.gpu_identity import replaced
from agent.health.gpu.faults.checkpoint import keep
from agent.health.gpu.faults.correlate import next_ns
from agent.health.gpu.faults.evaluate import judge_faults
from agent.health.gpu.faults.ingest import take_in
from agent.health.gpu.faults.recovery import Watched, heal, watch
from agent.health.gpu.faults.values import Fault, FaultLog, Key
from agent.health.gpu.views import GpuRuleState, remember_gpus
from agent.health.gpu.xid.facts import Decision
from agent.model.faults import FaultMemory
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import Instant


@dataclass(frozen=True, slots=True)
class GpuState:
    """Everything that is known of GPUs between two looks."""

    memory: GpuRuleState = field(default_factory=GpuRuleState)
    log: FaultLog = field(default_factory=FaultLog)
    watched: Mapping[int, Watched] = field(default_factory=dict)
    kept: FaultMemory = field(default_factory=FaultMemory)
    """What is to outlive the agent."""
    looked_ns: int = 0


class GpuLook(NamedTuple):
    """What a look found."""

    state: GpuState
    decisions: Mapping[Key, Decision]
    """What each fault that is not over means."""
    faults: Mapping[Key, Fault]
    replaced: frozenset[int]
    """GPUs that have another in their place: nothing that was known of them counts any more."""
    due_ns: int | None
    """Look again then: a fault may be over, or a line has waited for long enough."""


def look_at_gpus(before: GpuState, snapshot: Snapshot, limits: GpuLimits, now: Instant) -> GpuLook:
    """The next state, and what every latched fault means in it."""
    if snapshot.gpus is None:  # nobody looks for GPUs: what was known of them is kept as it is
        return GpuLook(before, {}, {}, frozenset(), None)
    memory = remember_gpus(before.memory, snapshot, limits, now)
    gone = replaced(before.memory.roll, memory.roll)
    log = take_in(before.log, snapshot, memory, before.looked_ns, now)
    decisions = judge_faults(log, memory, limits, now)
    watched = watch(before.watched, memory, snapshot.gpus.generation, now)
    log, heal_ns = heal(log, decisions, watched, now)
    decisions = {key: found for key, found in decisions.items() if not log.faults[key].healed}
    due = [at for at in (heal_ns, next_ns(log)) if at is not None]
    kept = keep(log, decisions, memory.roll, watched)
    state = GpuState(memory, log, watched, before.kept if kept == before.kept else kept, now.mono_ns)
    return GpuLook(state, decisions, log.faults, gone, min(due, default=None))
