"""Step 5 for latched faults: save them in a checkpoint, and restore them when the agent starts. Pure.

Without a reboot in between, all faults continue. A reboot resolves them, except faults that only the
replacement of the GPU ends. The checkpoint also has readings that show a reset, because GPUs are often reset
while the agent is stopped.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import gpu_device, mig_device
from agent.health.gpu.faults.evaluate import is_latched_fault_code, latched_fault_row
from agent.health.gpu.faults.fault_log import LOST_CODE, NO_REPORTS, SHARED, Fault, FaultKey, FaultLog
from agent.health.gpu.faults.recovery import VOLATILE_COUNTERS, RecoverySigns
from agent.health.gpu.rule_state import GpuRuleState, MigInstance, PerGpuState
from agent.health.gpu.xid.conditions import FaultDecision
from agent.health.gpu.xid.log_lines import SxidLine, XidLine, parse_line
from agent.health.state_machine import Condition, ConditionPhase
from agent.model.cleared_faults import ClearedFault
from agent.model.health import Repair, Severity, repair_for_severity
from agent.model.persistent_faults import Cure, KnownGpu, PersistentFault, PersistentState
from agent.model.reading import Absence, Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS, Instant

RESOLVED_KEPT_S: Final = 86_400.0
"""Age up to which a resolved fault of an earlier boot is restored [s]."""
LOST_KEPT_S: Final = 30 * RESOLVED_KEPT_S
"""Age up to which a resolved loss of a GPU is restored [s]: a second loss points to broken hardware."""
KEPT_MAX: Final = 256
"""Largest number of faults in the checkpoint file; they need at most half of the file's size limit."""
CLEARING_NS: Final = 10 * NS
"""Longest time from the end of a fault until its probation starts [ns]."""


class RestoredFaults(NamedTuple):
    """State of GPUs and latched faults at the agent's start, restored from the state file."""

    gpus: GpuRuleState
    faults: FaultLog
    recovery_signs: Mapping[int, RecoverySigns]
    """Last readings of each GPU with an unresolved fault, by GPU number."""
    conditions: Mapping[tuple[str, str], Condition]
    """Raised conditions of the restored faults, by device name and finding code."""
    cleared: tuple[ClearedFault, ...] = ()
    """Faults that operators cleared within a day."""
    saved: PersistentState = PersistentState()
    """Known GPUs and latched GPU faults, as the checkpoint has them."""


# --- save ---------------------------------------------------------------------------------------------------


def build_checkpoint(
    log: FaultLog,
    decisions: Mapping[FaultKey, FaultDecision],
    registry: tuple[KnownGpu, ...],
    signs: Mapping[int, RecoverySigns],
    cleared: tuple[ClearedFault, ...] = (),
) -> PersistentState:
    """Return the state to store for a restart: known GPUs, latched faults above INFO, and ``cleared``.

    ``cleared`` has the records of faults that operators cleared.
    """
    uuids = {gpu.number: gpu.uuid for gpu in registry}
    kept = []
    for key, fault in log.faults.items():
        decision = decisions.get(key) or fault.last_decision
        uuid = uuids.get(key.gpu_number, "")
        if decision is None or (not uuid and key.gpu_number != SHARED):
            continue
        if decision.severity > Severity.INFO:  # INFO faults are restored from the kernel log
            kept.append(_kept_fault(key, fault, decision, uuid, signs.get(key.gpu_number, RecoverySigns())))
    if len(kept) > KEPT_MAX:
        kept.sort(key=lambda fault: (fault.healed, -fault.severity, -fault.last_wall_s))
    gpus = tuple(gpu for gpu in registry if gpu.uuid)
    return PersistentState(gpus, tuple(sorted(kept[:KEPT_MAX])), cleared)


def _kept_fault(
    key: FaultKey, fault: Fault, decision: FaultDecision, uuid: str, signs: RecoverySigns
) -> PersistentFault:
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
        pids=tuple(sorted(fault.pids)),
        bursts_wall_s=tuple(round(start.wall_s, 3) for start in fault.bursts),
        earlier_boots=fault.earlier_boots,
        healed_wall_s=round(fault.resolved.wall_s, 3) if fault.resolved else 0.0,
        blame=decision.blame,
        before_us=fault.before_start,
        action=0 if fault.resolved else signs.action,
        counters=()
        if fault.resolved
        else tuple(-1 if isinstance(value, Missing) else value for value in signs.counters),
    )


# --- restore ------------------------------------------------------------------------------------------------


def restore_faults(kept: PersistentState, boot_id: str, limits: GpuLimits, now: Instant) -> RestoredFaults:
    """Return the state of latched faults at the agent's start.

    Args:
        kept: State that the last run of the agent stored; faults with unknown codes are ignored.
        boot_id: Boot ID of the running kernel; empty: unknown, no fault is resolved by a reboot.
        limits: Limits from the configuration.
        now: Time of the start.
    """
    numbers = {gpu.uuid: gpu.number for gpu in kept.gpus}
    faults: dict[FaultKey, Fault] = {}
    conditions: dict[tuple[str, str], Condition] = {}
    counted_us: dict[tuple[int, str], int] = {}
    signs: dict[int, RecoverySigns] = {}
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
            ended_by_reboot=bool(boot_id) and not same_boot and saved.cure is not Cure.REPLACE,
        )
        if fault.resolved and not same_boot and now.wall_s - saved.last_wall_s > _kept_for_s(saved.code):
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
                signs[number] = _recovery_signs(saved)
        if _is_reported_at_start(fault, limits, now):
            conditions.update(
                {(device, saved.code): _raised_condition(fault, saved.code) for device in reported}
            )
    per_gpu = {gpu.number: _per_gpu_state(gpu) for gpu in kept.gpus}
    gpus = GpuRuleState(registry=kept.gpus, per_gpu=per_gpu)
    return RestoredFaults(
        gpus,
        FaultLog(boot_id, faults, registry=kept.gpus, checkpoint_us=counted_us),
        signs,
        conditions,
        kept.cleared,
        kept.gpu_part,
    )


def _recovery_signs(saved: PersistentFault) -> RecoverySigns:
    counters = saved.counters if len(saved.counters) == len(VOLATILE_COUNTERS) else ()
    return RecoverySigns(
        counters=tuple(Missing(Absence.ABSENT) if value < 0 else value for value in counters),
        action=saved.action,
    )


def _kept_for_s(code: str) -> float:
    return LOST_KEPT_S if code == LOST_CODE else RESOLVED_KEPT_S


def _per_gpu_state(gpu: KnownGpu) -> PerGpuState:
    return PerGpuState(uuid=gpu.uuid, instances=tuple(MigInstance(mig, None) for mig in gpu.migs))


def _restored_fault(
    saved: PersistentFault, limits: GpuLimits, now: Instant, *, ended_by_reboot: bool
) -> Fault:
    parsed = [parse_line(text) for text in saved.texts]
    digits = saved.code.rpartition(".")[2]
    severity = Severity(saved.severity)
    resolved = _instant(saved.healed_wall_s, now) if saved.healed else now if ended_by_reboot else None
    return Fault(
        xid=int(digits) if digits.isdecimal() else 0,
        first=_instant(saved.first_wall_s, now),
        last=_instant(saved.last_wall_s, now),
        times=saved.times,
        # assume a report by NVML, so that a log line of that time adds nothing, whichever instance it names
        recent_reports=(1, 0, 0) if saved.times else NO_REPORTS,
        log_us=saved.log_us,
        lines=tuple(line for line in parsed if isinstance(line, XidLine | SxidLine)),
        texts=saved.texts,
        pids=frozenset(saved.pids),
        bursts=tuple(_instant(wall_s, now) for wall_s in saved.bursts_wall_s),
        before_start=saved.before_us,
        boot_id=saved.boot_id,
        earlier_boots=saved.earlier_boots,
        resolved=resolved,
        last_decision=FaultDecision(
            severity, saved.evidence, saved.advice, saved.blame, saved.cure, _restored_repair(saved, limits)
        ),
    )


def _restored_repair(saved: PersistentFault, limits: GpuLimits) -> Repair:
    """Return the repair of a restored GPU fault, which follows from its finding code, cure and severity."""
    if saved.cure is Cure.REPLACE:
        return Repair.REPLACE_HARDWARE
    return repair_for_severity(latched_fault_row(saved.code, limits).repair, Severity(saved.severity))


def _instant(wall_s: float, now: Instant) -> Instant:
    """Convert a wall-clock time [s] to an instant; ``now`` if the time is in the future."""
    wall_s = min(max(wall_s, 0.0), now.wall_s)
    return Instant(now.mono_ns - int((now.wall_s - wall_s) * NS), wall_s)


def _is_reported_at_start(fault: Fault, limits: GpuLimits, now: Instant) -> bool:
    """Return whether a restored fault is reported: it is unresolved, or its probation time is not over."""
    if fault.resolved is None:
        return True
    was_unhealthy = fault.last_decision is not None and fault.last_decision.severity is Severity.UNHEALTHY
    held_ns = (int(limits.probation_s * NS) if was_unhealthy else 0) + CLEARING_NS
    return now.mono_ns - fault.resolved.mono_ns < held_ns


def _raised_condition(fault: Fault, code: str) -> Condition:
    decision = fault.last_decision
    assert decision is not None, "a fault in the checkpoint has a decision"
    return Condition(ConditionPhase.RAISED, decision.finding(code), fault.first, 0, 0, 0)


def affected_devices(key: FaultKey, gpus: Iterable[KnownGpu]) -> Iterator[str]:
    """Yield the names of the GPUs or MIG instances that a fault affects."""
    for gpu in gpus:
        if key.gpu_number not in (gpu.number, SHARED):
            continue
        named = [mig_device(gpu.number, mig.gi, mig.ci) for mig in gpu.migs if key.affects_only(mig)]
        for device in named or [gpu_device(gpu.number)]:
            yield device.name
