"""Steps 4 and 5 for latched faults: resolve them after a recovery, and save them in a checkpoint. Pure.

A latched fault is reported once, such as an XID, and kept until it is resolved.

Step 4 detects resets and other recoveries of GPUs. Resolved faults stay in the fault log, because they may
recur, and old kernel log lines must not raise them again. They are reported as causes until their probation
time ends.

Step 5 saves the faults, and restores them when the agent starts. If the machine was not rebooted in between,
all faults continue. A reboot resolves them, except faults that only the replacement of the GPU ends. The
checkpoint also has readings that show a reset, because GPUs are often reset while the agent is stopped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple

from agent.devices.inventory import gpu_device, mig_device
from agent.health.gpu.faults.decide_severity import is_latched_fault_code, latched_fault_row
from agent.health.gpu.faults.fault_log import (
    DAY_NS,
    INIT_FAILED,
    NO_REPORTS,
    SHARED,
    Burst,
    Fault,
    FaultKey,
    FaultLog,
    number_in_code,
    recurrence_ns,
)
from agent.health.gpu.faults.match_reports import mark_roots
from agent.health.gpu.memory import FAILED_REPAIRS, PENDING_REPAIRS
from agent.health.gpu.rule_state import GpuRuleState, MigInstance, PerGpuState
from agent.health.gpu.xid.decisions import FaultDecision
from agent.health.gpu.xid.log_lines import SxidLine, XidLine, parse_line
from agent.health.gpu.xid.xid_table import XidAdvice
from agent.health.rules import RuleChange, RuleChanges, with_severity
from agent.health.state_machine import Condition, ConditionPhase, with_probation_time
from agent.model.cleared_faults import ClearedFault
from agent.model.gpu import GpuField, GpuSample, NvmlReturnCode
from agent.model.health import Repair, Severity, repair_for_severity
from agent.model.persistent_faults import (
    NO_MODULE,
    BootBaseline,
    Cure,
    DriverModule,
    KnownGpu,
    PersistentFault,
    PersistentState,
)
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.model.settings import GpuLimits, RuleOverride
from agent.model.time import NS, WALL_MAX_S, Instant, instant_at_mono, with_present_clock

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
"""Counters that a reset of the GPU and a reload of the driver clear, so that smaller values show one."""
_PENDING: Final = (*PENDING_REPAIRS, *FAILED_REPAIRS, GpuField.RETIRED_PENDING)
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
    """True: NVML returned RESET_REQUIRED since the last pass over the GPU without an error."""
    generation: int = 0
    """Number of loads of the driver at the last evaluation; a reload adds one."""
    reloaded_at: Instant | None = None
    """Time of a driver reload after which the GPU was not read yet; else None."""
    read_ns: int = 0
    """Monotonic time of the GPU's last reading [ns]: a fault is resolved only by later readings. 0: the GPU
    was not read since NVML was opened."""
    reset_at: Instant | None = None
    """Time at which the last reset of the GPU was detected; None: no reset."""
    any_reset_at: Instant | None = None
    """Of all GPUs together: time at which the last reset of any GPU was detected; None: no reset."""
    calm_since: Instant | None = None
    """Time since which no recovery action is requested, and no memory waits for a reset.

    None: one of both does.
    """
    links_up_since: Instant | None = None
    """Time since which all NVLinks that were ever up are up, or unused (MIG); None: a link is down."""
    handles: int = 0
    """Number of NVML handles of the GPU at its last reading."""
    opened_at: Instant | None = None
    """Time of the first pass without an error with the present NVML handle; None: no such pass."""


def update_recovery_signs(
    before: Mapping[int, RecoverySigns],
    gpus: GpuRuleState,
    generation: int,
    now: Instant,
    reloaded_at: Instant | None = None,
) -> Mapping[int, RecoverySigns]:
    """Return the readings that show a recovery of a GPU, by GPU number; by SHARED those of all GPUs together.

    Args:
        reloaded_at: Earliest time of a reload that happened while the agent was stopped, once it is detected.
    """
    found = {}
    for gpu in gpus.registry:
        sample, gpu_state = gpus.samples.get(gpu.number), gpus.per_gpu[gpu.number]
        signs = before.get(gpu.number, RecoverySigns())
        if generation and generation != signs.generation:
            signs = signs._replace(generation=generation, reloaded_at=now if signs.generation else None)
        if reloaded_at is not None:
            signs = signs._replace(reloaded_at=reloaded_at)
        if sample is None or not sample.passes:
            found[gpu.number] = signs
        elif sample.status != NvmlReturnCode.OK:
            reset_required = signs.reset_required or sample.status == NvmlReturnCode.RESET_REQUIRED
            read_ns = 0 if sample.status == NvmlReturnCode.UNINITIALIZED else signs.read_ns
            found[gpu.number] = signs._replace(
                reset_required=reset_required, read_ns=read_ns, calm_since=None, links_up_since=None
            )
        elif sample.beat_ns == signs.read_ns:
            found[gpu.number] = signs
        else:
            found[gpu.number] = _signs_after_pass(signs, sample, gpu_state.seen.links_up, now)
    found[SHARED] = _shared_signs(found.values())
    return found


def _signs_after_pass(before: RecoverySigns, sample: GpuSample, links_up: int, now: Instant) -> RecoverySigns:
    counters = tuple(sample[field] for field in VOLATILE_COUNTERS)
    action, links = sample[GpuField.RECOVERY_ACTION], sample[GpuField.LINKS_UP]
    action_done = before.action != 0 and action == 0
    # a GPU without persistence mode is shut down while no process has it open, which clears the counts, too
    was_closed = not before.read_ns and sample[GpuField.PERSISTENCE] == 0
    is_cleared = not was_closed and _are_cleared(before.counters, counters)
    at = instant_at_mono(sample.beat_ns, now)
    read_since_reload = before.reloaded_at is not None and sample.beat_ns > before.reloaded_at.mono_ns
    reset_at = before.reloaded_at if read_since_reload else before.reset_at
    calm = action == 0 and not any(sample[field] == 1 for field in _PENDING)
    all_up = sample[GpuField.MIG_MODE] == 1 or (isinstance(links, int) and not links_up & ~links)
    return RecoverySigns(
        counters=tuple(
            value if isinstance(value, int) else was
            for was, value in zip(before.counters or counters, counters, strict=True)
        ),
        action=action if isinstance(action, int) else before.action,
        generation=before.generation,
        reloaded_at=None if read_since_reload else before.reloaded_at,
        read_ns=sample.beat_ns,
        reset_at=at if is_cleared or action_done or before.reset_required else reset_at,
        calm_since=(before.calm_since or at) if calm else None,
        links_up_since=(before.links_up_since or at) if all_up else None,
        handles=sample.handles,
        opened_at=before.opened_at if sample.handles == before.handles else at,
    )


def _are_cleared(before: Sequence[Reading], counters: Sequence[Reading]) -> bool:
    """Return whether readings of the counters in VOLATILE_COUNTERS show a reset. An operator can clear the
    ECC counts (``nvidia-smi --reset-ecc-errors=0``); alone, they show a reset only if there was no replay."""
    had_replays = False
    fell = set()
    for field, was, value in zip(VOLATILE_COUNTERS, before, counters, strict=False):
        if field is GpuField.PCIE_REPLAY and isinstance(was, int):
            had_replays = was > 0
        if isinstance(was, int) and isinstance(value, int) and value < was:
            fell.add(field)
    return GpuField.PCIE_REPLAY in fell or (bool(fell) and not had_replays)


def _shared_signs(all_gpus: Iterable[RecoverySigns]) -> RecoverySigns:
    """Return the signs of a recovery that every GPU shows. They end faults that all GPUs share."""
    gpus = list(all_gpus)
    resets = [gpu.reset_at for gpu in gpus]
    calm = [gpu.calm_since for gpu in gpus]
    linked = [gpu.links_up_since for gpu in gpus]
    return RecoverySigns(
        any_reset_at=max((at for at in resets if at), default=None),
        read_ns=min((gpu.read_ns for gpu in gpus), default=0),
        reset_at=min((at for at in resets if at), default=None) if all(resets) else None,
        calm_since=max((at for at in calm if at), default=None) if all(calm) else None,
        links_up_since=max((at for at in linked if at), default=None) if all(linked) else None,
    )


def resolve_faults(
    log: FaultLog,
    decisions: Mapping[FaultKey, FaultDecision],
    signs: Mapping[int, RecoverySigns],
    before: Mapping[FaultKey, Fault],
    now: Instant,
) -> tuple[FaultLog, int | None]:
    """Mark latched faults that have ended as resolved, and drop old resolved faults of severity INFO.

    A fault that occurred since the last evaluation is not resolved yet, even if it has ended: it is reported
    once, and its probation time follows.

    Args:
        decisions: Severity and cure (the event that ends the fault) of each fault. A fault without a decision
            is not resolved.
        before: Faults after the last evaluation.

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
            if not _is_old_info(fault, now):
                faults[key] = fault
            continue
        ends_ns = min(
            _resolution_times(key, fault, decision, signs.get(key.gpu_number, RecoverySigns()), now),
            default=None,
        )
        if ends_ns is not None and _has_new_occurrence(fault, before.get(key)):
            ends_ns = max(ends_ns, now.mono_ns + NS)
        if ends_ns is None or ends_ns > now.mono_ns:
            faults[key] = fault
            due += [ends_ns] if ends_ns is not None else []
        else:
            faults[key] = replace(fault, resolved=now, last_decision=decision)
    return replace(log, faults=faults), min(due, default=None)


def _has_new_occurrence(fault: Fault, before: Fault | None) -> bool:
    """Return whether a fault occurred since the last evaluation, while the agent ran.

    A late report of a fault that was resolved in between is no new occurrence.
    """
    if fault.before_start:
        return False
    if before is None:
        return True
    if before.resolved:
        return fault.last.mono_ns > before.resolved.mono_ns
    return (fault.last, fault.times) != (before.last, before.times)


def _is_old_info(fault: Fault, now: Instant) -> bool:
    """Return whether a fault is resolved, INFO and a day old; if it recurs, it is a new fault."""
    return bool(fault.resolved and fault.was_info and now.mono_ns - fault.last.mono_ns >= DAY_NS)


def _resolution_times(
    key: FaultKey, fault: Fault, decision: FaultDecision, signs: RecoverySigns, now: Instant
) -> Iterator[int]:
    """Yield the monotonic times at which a fault may end [ns]. They follow from the fault's cure (the event
    that ends the fault) and from readings that show a recovery."""
    last_ns, cure = fault.last.mono_ns, decision.cure
    if cure is Cure.EXPIRES:
        yield last_ns + EXPIRE_NS
    if cure in _BY_RESET and signs.reset_at and signs.reset_at.mono_ns > last_ns:
        yield signs.reset_at.mono_ns
    if key.code == INIT_FAILED and signs.opened_at and signs.opened_at.mono_ns > last_ns:
        yield signs.opened_at.mono_ns  # only an initialized GPU gives a handle
    # the line of a switch does not name the GPU behind the port, so the reset may be that of any GPU
    reset_at, up_since = signs.any_reset_at, signs.links_up_since
    if decision.advice == XidAdvice.CHECK_LINKS and up_since and reset_at and reset_at.mono_ns > last_ns:
        yield max(reset_at, up_since).mono_ns
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


# --- step 5: checkpoint ------------------------------------------------------------------------------------

KEPT_MAX: Final = 256
"""Largest number of faults in the checkpoint file. Their log lines are left out where the file would be too
large."""
_RESET_REQUIRED: Final = -1  # stored in place of the recovery action after NVML returned RESET_REQUIRED
_WAS_RESET: Final = -2  # stored in place of it once the GPU was reset after a fault that all GPUs share
CLEARING_NS: Final = 10 * NS
"""Longest time from the end of a fault until its probation starts [ns]."""


class RestoredFaults(NamedTuple):
    """State of GPUs and of their latched faults (such as XIDs), restored from the state file at the agent's
    start."""

    gpus: GpuRuleState
    faults: FaultLog
    recovery_signs: Mapping[int, RecoverySigns]
    """Last readings of each GPU with an unresolved fault, also one that all GPUs share, by GPU number."""
    conditions: Mapping[tuple[str, str], Condition]
    """Conditions of the restored faults, raised or in their probation, by device name and finding code."""
    cleared: tuple[ClearedFault, ...] = ()
    """Faults that operators cleared within a day."""
    module: DriverModule = NO_MODULE
    """Module of the GPU driver when the last run of the agent ended, if it ended in this boot."""
    reloaded_at: Instant | None = None
    """Earliest time of a reload of the driver since the last run of the agent: that of its newest fault."""
    saved: PersistentState = PersistentState()
    """Known GPUs and latched GPU faults, as the checkpoint has them."""


# --- save ---------------------------------------------------------------------------------------------------


def build_checkpoint(
    log: FaultLog,
    decisions: Mapping[FaultKey, FaultDecision],
    registry: tuple[KnownGpu, ...],
    signs: Mapping[int, RecoverySigns],
    cleared: tuple[ClearedFault, ...] = (),
    module: DriverModule = NO_MODULE,
) -> PersistentState:
    """Return the state to store for a restart: known GPUs, latched faults above INFO, and ``cleared``.

    A latched fault is reported once, such as an XID, and kept until it is resolved. ``cleared`` has the
    records of faults that operators cleared.
    """
    uuids = {gpu.number: gpu.uuid for gpu in registry}
    gpus = tuple(gpu for gpu in registry if gpu.uuid)
    kept = []
    for key, fault in log.faults.items():
        decision = decisions.get(key) or fault.last_decision
        uuid = uuids.get(key.gpu_number, "")
        if decision is None or (not uuid and key.gpu_number != SHARED):
            continue
        if decision.severity > Severity.INFO:  # INFO faults are restored from the kernel log
            owners = (gpu.number for gpu in gpus if key.gpu_number in (gpu.number, SHARED))
            of_owners = [signs.get(number, RecoverySigns()) for number in owners]
            saved = _kept_fault(key, fault, decision, uuid, of_owners)
            kept.append(_with_monotonic_times(saved, fault) if fault.boot_id == log.boot_id else saved)
    if len(kept) > KEPT_MAX:
        kept.sort(key=lambda fault: (fault.healed, -fault.severity, -fault.last_wall_s))
    return PersistentState(gpus, tuple(sorted(kept[:KEPT_MAX])), cleared, module=module)


def _kept_fault(
    key: FaultKey, fault: Fault, decision: FaultDecision, uuid: str, signs: Iterable[RecoverySigns]
) -> PersistentFault:
    found = [] if fault.resolved else [_saved_signs(gpu, None if uuid else fault.last) for gpu in signs]
    return PersistentFault(
        uuid=uuid,
        code=key.code,
        gi=key.gi,
        ci=key.ci,
        times=fault.times,
        first_wall_s=round(fault.first.wall_s, 3),
        last_wall_s=round(fault.last.wall_s, 3),
        log_us=fault.log_us,
        boot_id=fault.boot_id,
        cure=decision.cure,
        healed=fault.resolved is not None,
        evidence=decision.evidence,
        advice=decision.advice,
        severity=int(decision.severity),
        texts=fault.texts,
        pids=tuple(burst.pid or 0 for burst in fault.bursts),
        bursts_wall_s=tuple(round(burst.start.wall_s, 3) for burst in fault.bursts),
        healed_wall_s=round(fault.resolved.wall_s, 3) if fault.resolved else 0.0,
        blame=decision.blame,
        before_us=fault.before_start,
        action=found[0][0] if uuid and found else 0,
        counters=tuple(chain.from_iterable(values[1:] if uuid else values for values in found)),
    )


def _with_monotonic_times(saved: PersistentFault, fault: Fault) -> PersistentFault:
    """Return a fault of this boot with its monotonic times, which no step of the wall clock changes."""
    return saved._replace(
        first_ns=fault.first.mono_ns,
        last_ns=fault.last.mono_ns,
        healed_ns=fault.resolved.mono_ns if fault.resolved else 0,
        bursts_ns=tuple(burst.start.mono_ns for burst in fault.bursts),
    )


def _saved_signs(signs: RecoverySigns, shared_at: Instant | None) -> tuple[int, ...]:
    """Return the requested recovery action and the counters of a GPU, as the checkpoint has them.

    Args:
        shared_at: Last occurrence of a fault that all GPUs share; None: the fault is this GPU's own.
    """
    counters = signs.counters or (NEVER_READ,) * len(VOLATILE_COUNTERS)
    action = _RESET_REQUIRED if signs.reset_required else signs.action
    if shared_at and signs.reset_at and signs.reset_at.mono_ns > shared_at.mono_ns:
        action = _WAS_RESET
    return action, *(-1 if isinstance(value, Missing) else value for value in counters)


# --- restore ------------------------------------------------------------------------------------------------


def restore_faults(
    kept: PersistentState,
    boot_id: str,
    limits: GpuLimits,
    now: Instant,
    rules: Sequence[RuleOverride] = (),
) -> RestoredFaults:
    """Return the state of latched faults (faults such as XIDs, kept until resolved) at the agent's start.

    Args:
        kept: State that the last run of the agent stored; faults with unknown codes are ignored.
        boot_id: Boot ID of the running kernel. If it is empty (unknown), no fault counts as resolved by a
            reboot.
    """
    changes = RuleChanges(rules)
    numbers = {gpu.uuid: gpu.number for gpu in kept.gpus}
    faults: dict[FaultKey, Fault] = {}
    conditions: dict[tuple[str, str], Condition] = {}
    counted_us: dict[tuple[int, str], int] = {}
    signs: dict[int, RecoverySigns] = {}
    ended_at = {(of.device, of.code): of.ended_ns for of in kept.conditions if not of.check}
    in_boot = bool(boot_id) and kept.start.boot_id == boot_id
    was_evaluated = kept.start != BootBaseline(kept.start.boot_id)
    cleared_s = {(record.device, record.code): record.at_wall_s for record in kept.cleared}
    for saved in kept.faults:
        number = numbers.get(saved.uuid) if saved.uuid else SHARED
        if number is None or not is_latched_fault_code(saved.code):
            continue
        key = FaultKey(number, saved.code, saved.gi, saved.ci)
        same_boot = bool(boot_id) and saved.boot_id == boot_id
        fault = _restored_fault(
            saved,
            limits,
            now,
            same_boot=same_boot,
            ended_by_reboot=bool(boot_id) and not same_boot and saved.cure is not Cure.REPLACE,
        )
        if saved.healed and not same_boot and now.wall_s - saved.last_wall_s > recurrence_ns(saved.code) / NS:
            continue
        faults[key] = fault
        reported = [
            device
            for device in affected_devices(key, kept.gpus)
            if not (saved.healed and cleared_s.get((device, saved.code), 0.0) >= saved.healed_wall_s)
        ]
        if same_boot:
            at = number, saved.code
            # what the log reports of a cleared fault was repaired, even if only NVML had reported it so far
            cleared_us = fault.resolved.mono_ns // 1000 if fault.resolved and not reported else 0
            counted_us[at] = max(counted_us.get(at, 0), saved.log_us, cleared_us)
            if not saved.healed:
                for at_gpu, restored in _restored_signs(number, saved, kept.gpus, fault.last).items():
                    signs[at_gpu] = _merged_signs(signs.get(at_gpu, restored), restored)
        is_current = saved.healed_ns > 0 or saved.boot_id != kept.start.boot_id
        for device in reported:
            ended_ns = ended_at.get((device, saved.code))
            if saved.healed and is_current and was_evaluated and ended_ns is None:
                continue  # its probation was over, or an operator had cleared it
            ended, in_probation = fault, same_boot and saved.healed
            if in_boot and not same_boot and saved.healed and ended_ns:  # its probation began in this boot
                ended, in_probation = replace(fault, resolved=instant_at_mono(ended_ns, now)), True
            change = changes.of(device, saved.code)
            condition = _condition_at_start(ended, saved.code, limits, change, now, in_probation=in_probation)
            if condition is not None:
                conditions[device, saved.code] = condition
    per_gpu = {
        gpu.number: PerGpuState(gpu.uuid, instances=tuple(MigInstance(mig, None) for mig in gpu.migs))
        for gpu in kept.gpus
    }
    gpus = GpuRuleState(registry=kept.gpus, per_gpu=per_gpu)
    mark_roots(faults)
    newest = max((fault.last for fault in faults.values() if fault.boot_id == boot_id), default=None)
    return RestoredFaults(
        gpus,
        FaultLog(boot_id, faults, registry=kept.gpus, checkpoint_us=counted_us),
        signs,
        conditions,
        kept.cleared,
        kept.module if boot_id and kept.module.boot_id == boot_id else NO_MODULE,
        newest and Instant(newest.mono_ns + 1, newest.wall_s),
        kept.gpu_part,
    )


def _merged_signs(first: RecoverySigns, second: RecoverySigns) -> RecoverySigns:
    """Return the signs of a GPU that were stored with two faults: for only some faults, it was reset."""
    resets = [at for at in (first.reset_at, second.reset_at) if at]
    return second._replace(
        action=second.action or first.action,
        reset_required=second.reset_required or first.reset_required,
        reset_at=max(resets, default=None),
    )


def _restored_signs(
    number: int, saved: PersistentFault, gpus: Sequence[KnownGpu], last: Instant
) -> dict[int, RecoverySigns]:
    """Return the stored readings that show a recovery, by GPU number: those of the GPU with the fault, or of
    each GPU if all share the fault."""
    width, values, numbers = len(VOLATILE_COUNTERS) + 1, saved.counters, [gpu.number for gpu in gpus]
    if number != SHARED:
        values, numbers = (saved.action, *values), [number]
    if len(values) != width * len(numbers):
        return {} if number == SHARED else {number: _recovery_signs(saved.action, (), last)}
    rows = (values[at : at + width] for at in range(0, len(values), width))
    return {at: _recovery_signs(row[0], row[1:], last) for at, row in zip(numbers, rows, strict=True)}


def _recovery_signs(action: int, counters: Iterable[int], last: Instant) -> RecoverySigns:
    return RecoverySigns(
        counters=tuple(Missing(Absence.ABSENT) if value < 0 else value for value in counters),
        action=max(action, 0),
        reset_required=action == _RESET_REQUIRED,
        # a recurrence while the agent is stopped is later, and the reset does not end it
        reset_at=Instant(last.mono_ns + 1, last.wall_s) if action == _WAS_RESET else None,
    )


def _restored_fault(
    saved: PersistentFault, limits: GpuLimits, now: Instant, *, same_boot: bool, ended_by_reboot: bool
) -> Fault:
    if not same_boot:  # the monotonic times are those of another boot
        saved = saved._replace(first_ns=0, last_ns=0, healed_ns=0, bursts_ns=())
    # release 0.1 stored the number of earlier boots without their times, and the PIDs of all lines
    bursts_wall_s = saved.bursts_wall_s[:1] * saved.earlier_boots + saved.bursts_wall_s
    unknown = (0,) * len(bursts_wall_s)
    bursts_ns = saved.bursts_ns if len(saved.bursts_ns) == len(unknown) else unknown
    pids = saved.pids if len(saved.pids) == len(unknown) else unknown
    parsed = [parse_line(text) for text in saved.texts]
    severity = Severity(saved.severity)
    repair = repair_for_severity(latched_fault_row(saved.code, limits).repair, severity)
    if saved.cure is Cure.REPLACE:
        repair = Repair.REPLACE_HARDWARE
    resolved = now if ended_by_reboot else None
    if saved.healed:
        resolved = _instant(saved.healed_ns, saved.healed_wall_s, now)
    return Fault(
        xid=number_in_code(saved.code),
        first=_instant(saved.first_ns, saved.first_wall_s, now),
        last=_instant(saved.last_ns, saved.last_wall_s, now),
        times=saved.times,
        # assume a report by NVML, so that a log line of that time adds nothing, whichever instance it names
        recent_reports=(1, 0, 0) if saved.times else NO_REPORTS,
        log_us=saved.log_us,
        lines=tuple(line for line in parsed if isinstance(line, XidLine | SxidLine)),
        texts=saved.texts,
        bursts=tuple(
            Burst(_instant(mono_ns, wall_s, now), pid or None)
            for mono_ns, wall_s, pid in zip(bursts_ns, bursts_wall_s, pids, strict=True)
        ),
        before_start=saved.before_us,
        boot_id=saved.boot_id,
        resolved=resolved,
        last_decision=FaultDecision(severity, saved.evidence, saved.advice, saved.blame, saved.cure, repair),
    )


def _instant(mono_ns: int, wall_s: float, now: Instant) -> Instant:
    """Return the instant of a stored time. A wall time in the future is that of an earlier boot, while the
    clock is not set yet: the time is kept for later boots, and counts as a minute before this boot.

    Args:
        mono_ns: Monotonic time of the running boot [ns]; 0 or less: an earlier boot, or not known.
    """
    wall_s = min(max(wall_s, 0.0), WALL_MAX_S)
    if mono_ns > 0:
        return with_present_clock(Instant(min(mono_ns, now.mono_ns), wall_s), now)
    ago_ns = int((now.wall_s - wall_s) * NS)
    return Instant(now.mono_ns - ago_ns if ago_ns >= 0 else -60 * NS, wall_s)


def with_present_times(log: FaultLog, now: Instant) -> FaultLog:
    """Return the fault log after the wall clock was set: times of this boot follow the clock, since later
    boots compare with the stored times. Times of earlier boots stay."""
    faults = {
        key: replace(
            fault,
            first=with_present_clock(fault.first, now),
            last=with_present_clock(fault.last, now),
            bursts=tuple(Burst(with_present_clock(start, now), pid) for start, pid in fault.bursts),
            resolved=fault.resolved and with_present_clock(fault.resolved, now),
        )
        for key, fault in log.faults.items()
    }
    return replace(log, faults=faults)


def _condition_at_start(
    fault: Fault, code: str, limits: GpuLimits, change: RuleChange, now: Instant, *, in_probation: bool
) -> Condition | None:
    """Return the condition of a restored fault for one device at the agent's start; None: the fault is not
    reported, because it is resolved, and its probation time is over.

    Args:
        change: Changes of the fault's rule by the operator, for the device.
        in_probation: True: the last run of the agent read in this boot that the fault has ended. The
            probation time continues, and ends with the first pass of this run at the earliest. False: the
            fault first needs as many clean passes as any other.
    """
    decision = fault.last_decision
    assert decision is not None, "a fault in the checkpoint has a decision"
    row = latched_fault_row(code, limits, is_unhealthy=decision.severity is Severity.UNHEALTHY)
    finding = with_severity(decision.finding(code), change.severity, row)
    raised = Condition(ConditionPhase.RAISED, finding, fault.first, 0, 0, 0)
    if fault.resolved is None:
        return raised
    probation_ns = row.probation_ns if change.probation_ns is None else change.probation_ns
    if finding.severity is not Severity.UNHEALTHY:
        probation_ns = 0
    # it ended in an earlier boot; how long ago is unknown while the wall clock is behind
    is_undated = fault.resolved.mono_ns < 0 and fault.resolved.wall_s > now.wall_s
    if is_undated or now.mono_ns - fault.resolved.mono_ns >= probation_ns + CLEARING_NS:
        return None
    if not (in_probation and probation_ns):
        return raised
    probation = Condition(ConditionPhase.PROBATION, finding, fault.first, 1, fault.resolved.mono_ns, 0)
    return with_probation_time(probation, probation_ns, now)


def affected_devices(key: FaultKey, gpus: Iterable[KnownGpu]) -> Iterator[str]:
    """Yield the names of the GPUs or MIG instances that a fault affects."""
    for gpu in gpus:
        if key.gpu_number not in (gpu.number, SHARED):
            continue
        named = [mig_device(gpu.number, mig.gi, mig.ci) for mig in gpu.migs if key.affects_only(mig)]
        for device in named or [gpu_device(gpu.number)]:
            yield device.name
