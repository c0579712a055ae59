"""Step 4 for latched faults: detect resets and other recoveries of GPUs, and resolve the faults they end.

Resolved faults stay in the fault log, because they may recur, and old kernel log lines must not raise them
again. Their causes are reported until their probation ends.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from agent.health.gpu.faults.fault_log import DAY_NS, SHARED, Fault, FaultKey, FaultLog
from agent.health.gpu.rule_state import GpuRuleState
from agent.health.gpu.xid.conditions import FaultDecision
from agent.model.gpu import GpuField, GpuSample, NvmlReturnCode
from agent.model.persistent_faults import Cure
from agent.model.reading import Reading
from agent.model.time import NS, Instant, instant_at_mono

SETTLE_NS: Final = 10 * NS
"""Time after a fault until the driver's recovery action takes the fault into account [ns]."""
EXPIRE_NS: Final = 600 * NS
"""Time after which faults that end without a recovery are resolved [ns]."""

_BY_RESET: Final = frozenset({Cure.ACTION, Cure.NOTHING_PENDING, Cure.LINKS_UP, Cure.RESET})
_WHEN_CALM: Final = frozenset({Cure.ACTION, Cure.NOTHING_PENDING})
VOLATILE_COUNTERS: Final = (
    GpuField.ECC_UNCORRECTABLE,
    GpuField.ECC_CORRECTABLE,
    GpuField.ECC_UNCORRECTABLE_DRAM,
    GpuField.ECC_UNCORRECTABLE_SRAM,
    GpuField.ECC_CORRECTABLE_DRAM,
    GpuField.ECC_CORRECTABLE_SRAM,
    GpuField.PCIE_REPLAY,
)
"""Counters that only a reset of the GPU or a reload of the driver clears, so that smaller values show one."""
_PENDING: Final = (GpuField.REMAP_PENDING, GpuField.REMAP_FAILURE, GpuField.RETIRED_PENDING)
RECOVERY_READINGS: Final = frozenset(
    {*VOLATILE_COUNTERS, *_PENDING, GpuField.RECOVERY_ACTION, GpuField.LINKS_UP}
)
"""Readings that show a recovery."""


class RecoverySigns(NamedTuple):
    """Readings of a GPU, or of all GPUs together, that show a recovery such as a reset."""

    counters: tuple[Reading, ...] = ()
    """Last readings of the GPU's counters in VOLATILE_COUNTERS, in its order."""
    action: int = 0
    """Last recovery action that the driver requested for the GPU; 0: no action, or never read."""
    reset_required: bool = False
    """True: NVML returned RESET_REQUIRED in the last pass over the GPU."""
    generation: int = 0
    """Number of NVML initialisations at the last evaluation; a reload of the driver adds one."""
    reloaded_at: Instant | None = None
    """Time of a driver reload after which the GPU was not read yet; else None."""
    read_ns: int = 0
    """Monotonic time of the GPU's last reading [ns]: a fault is resolved only by later readings."""
    reset_at: Instant | None = None
    """Time at which the last reset of the GPU was detected; None: no reset."""
    calm_since: Instant | None = None
    """Time since which no recovery action is requested, and no memory waits for a reset.

    None: one of both does.
    """
    links_up_since: Instant | None = None
    """Time since which all NVLinks that were ever up are up; None: a link is down."""


def update_recovery_signs(
    before: Mapping[int, RecoverySigns], gpus: GpuRuleState, generation: int, now: Instant
) -> Mapping[int, RecoverySigns]:
    """Return the recovery signs by GPU number; SHARED: those of all GPUs together."""
    found = {}
    for gpu in gpus.registry:
        sample, gpu_state = gpus.samples.get(gpu.number), gpus.per_gpu[gpu.number]
        signs = _with_generation(before.get(gpu.number, RecoverySigns()), generation, now)
        if sample is None or not sample.passes:
            found[gpu.number] = signs
        elif sample.status != NvmlReturnCode.OK:
            reset_required = sample.status == NvmlReturnCode.RESET_REQUIRED
            found[gpu.number] = signs._replace(
                reset_required=reset_required, calm_since=None, links_up_since=None
            )
        elif sample.beat_ns == signs.read_ns:
            found[gpu.number] = signs
        else:
            found[gpu.number] = _signs_after_pass(signs, sample, gpu_state.seen.links_up, now)
    found[SHARED] = _shared_signs(found.values())
    return found


def _with_generation(before: RecoverySigns, generation: int, now: Instant) -> RecoverySigns:
    if not generation or generation == before.generation:
        return before
    return before._replace(generation=generation, reloaded_at=now if before.generation else None)


def _signs_after_pass(before: RecoverySigns, sample: GpuSample, links_up: int, now: Instant) -> RecoverySigns:
    counters = tuple(sample[which] for which in VOLATILE_COUNTERS)
    cleared = any(
        isinstance(was, int) and isinstance(value, int) and value < was
        for was, value in zip(before.counters, counters, strict=False)
    )
    action, links = sample[GpuField.RECOVERY_ACTION], sample[GpuField.LINKS_UP]
    action_done = before.action != 0 and action == 0
    at = instant_at_mono(sample.beat_ns, now)
    read_since_reload = before.reloaded_at is not None and sample.beat_ns > before.reloaded_at.mono_ns
    reset_at = before.reloaded_at if read_since_reload else before.reset_at
    calm = action == 0 and not any(sample[which] == 1 for which in _PENDING)
    all_up = isinstance(links, int) and not links_up & ~links
    return RecoverySigns(
        counters=tuple(
            value if isinstance(value, int) else was
            for was, value in zip(before.counters or counters, counters, strict=True)
        ),
        action=action if isinstance(action, int) else before.action,
        generation=before.generation,
        reloaded_at=None if read_since_reload else before.reloaded_at,
        read_ns=sample.beat_ns,
        reset_at=at if cleared or action_done or before.reset_required else reset_at,
        calm_since=(before.calm_since or at) if calm else None,
        links_up_since=(before.links_up_since or at) if all_up else None,
    )


def _shared_signs(all_gpus: Iterable[RecoverySigns]) -> RecoverySigns:
    """Return the recovery signs for faults that all GPUs share: only signs that every GPU has."""
    gpus = list(all_gpus)
    resets = [gpu.reset_at for gpu in gpus]
    calm = [gpu.calm_since for gpu in gpus]
    linked = [gpu.links_up_since for gpu in gpus]
    return RecoverySigns(
        read_ns=min((gpu.read_ns for gpu in gpus), default=0),
        reset_at=min((at for at in resets if at), default=None) if all(resets) else None,
        calm_since=max((at for at in calm if at), default=None) if all(calm) else None,
        links_up_since=max((at for at in linked if at), default=None) if all(linked) else None,
    )


def resolve_faults(
    log: FaultLog,
    decisions: Mapping[FaultKey, FaultDecision],
    signs: Mapping[int, RecoverySigns],
    now: Instant,
) -> tuple[FaultLog, int | None]:
    """Mark faults that have ended as resolved, and drop old resolved INFO faults.

    Args:
        decisions: Severity and cure of each fault in this evaluation; a fault that it lacks is not resolved.

    Returns:
        The fault log, and the monotonic time at which the next fault may end [ns]; None: no such time.
    """
    if not log.faults:
        return log, None
    faults: dict[FaultKey, Fault] = {}
    due: list[int] = []
    for key, fault in log.faults.items():
        decision = decisions.get(key)
        if fault.resolved or decision is None:
            if not _is_expired(fault, now):
                faults[key] = fault
            continue
        ends_ns = min(
            _resolution_times(fault, decision.cure, signs.get(key.gpu_number, RecoverySigns()), now),
            default=None,
        )
        if ends_ns is None or ends_ns > now.mono_ns:
            faults[key] = fault
            due += [ends_ns] if ends_ns is not None else []
        else:
            faults[key] = replace(fault, resolved=now, last_decision=decision)
    return replace(log, faults=faults), min(due, default=None)


def _is_expired(fault: Fault, now: Instant) -> bool:
    """Return whether a resolved fault of severity INFO is a day old; a recurrence is then a new fault."""
    return fault.resolved is not None and fault.was_info and now.mono_ns - fault.last.mono_ns >= DAY_NS


def _resolution_times(fault: Fault, cure: Cure, signs: RecoverySigns, now: Instant) -> Iterator[int]:
    """Yield the monotonic times at which a fault may end, by its cure and the recovery signs [ns]."""
    last_ns = fault.last.mono_ns
    if cure is Cure.EXPIRES:
        yield last_ns + EXPIRE_NS
    if cure in _BY_RESET and signs.reset_at and signs.reset_at.mono_ns > last_ns:
        yield signs.reset_at.mono_ns
    if cure in _BY_RESET and signs.reloaded_at:
        yield now.mono_ns + NS
    # a reset may have followed a fault from before the agent's start: then no recovery action is requested
    calm = cure in _WHEN_CALM or (cure is Cure.RESET and fault.before_start)
    for since in (
        signs.calm_since if calm else None,
        signs.links_up_since if cure is Cure.LINKS_UP else None,
    ):
        if since is not None:
            settled_ns = max(since.mono_ns, last_ns + SETTLE_NS)
            yield settled_ns if not now.mono_ns >= settled_ns > signs.read_ns else now.mono_ns + NS
