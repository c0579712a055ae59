"""Between two lives of the agent: which faults are kept in a file, and what a new start makes of them. Pure.

Within one boot a fault goes on as it was. After a new boot the node has had its strongest medicine: what a
boot cures is over, and held for its probation; what only another GPU cures goes on. A GPU can be reset when
nobody has it open, so resets happen when the agent is away: what would show one is kept with the fault.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from agent.devices.inventory import gpu_device, mig_device
from agent.health.gpu.faults.evaluate import is_latched
from agent.health.gpu.faults.recovery import VOLATILE, Watched
from agent.health.gpu.faults.values import LOST, NO_REPORTS, SHARED, Fault, FaultLog, Key
from agent.health.gpu.views import GpuPast, GpuRuleState, Instance
from agent.health.gpu.xid.facts import Decision
from agent.health.gpu.xid.lines import SxidLine, XidLine, parse
from agent.health.state_machine import Condition, Phase
from agent.model.faults import Cure, FaultMemory, KeptFault, KnownGpu
from agent.model.health import Finding, Severity
from agent.model.reading import Absence, Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS, Instant

DAY_S: Final = 86_400.0
"""How long a fault of another boot is remembered when it is over..."""
LOST_KEPT_S: Final = 30 * DAY_S
"""...and a GPU that fell off the bus: one that does so again is broken."""
KEPT_MAX: Final = 256
"""Faults in the file: eight for each of 32 GPUs; at their longest, half of what the file may hold."""
CLEARING_NS: Final = 10 * NS
"""How long a cause takes to clear at most, before its probation."""


class Restored(NamedTuple):
    """Where the agent goes on from."""

    gpus: GpuRuleState
    faults: FaultLog
    watched: Mapping[int, Watched]
    """What the last life saw of each GPU that has a fault, to be compared with."""
    tracks: Mapping[tuple[str, str], Condition]
    """Causes that are held from the first look on, by device and code."""


# --- what is kept -------------------------------------------------------------------------------------------


def keep(
    log: FaultLog,
    decisions: Mapping[Key, Decision],
    roll: tuple[KnownGpu, ...],
    watched: Mapping[int, Watched],
) -> FaultMemory:
    """What is to be in the file: all that the next start could not find out by itself."""
    uuids = {gpu.number: gpu.uuid for gpu in roll}
    kept = []
    for key, fault in log.faults.items():
        decision = decisions.get(key) or fault.judged
        uuid = uuids.get(key.number, "")
        if decision is None or (not uuid and key.number != SHARED):
            continue
        if decision.severity > Severity.INFO:  # a word is told again by the log, if it is young enough
            kept.append(_kept(key, fault, decision, uuid, watched.get(key.number, Watched())))
    if len(kept) > KEPT_MAX:
        kept.sort(key=lambda one: (one.healed, -one.severity, -one.last_wall_s))
    return FaultMemory(tuple(gpu for gpu in roll if gpu.uuid), tuple(sorted(kept[:KEPT_MAX])))


def _kept(key: Key, fault: Fault, decision: Decision, uuid: str, seen: Watched) -> KeptFault:
    return KeptFault(
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
        healed=fault.healed is not None,
        evidence=decision.evidence,
        advice=decision.advice,
        severity=int(decision.severity),
        texts=fault.texts,
        pids=tuple(sorted(fault.pids)),
        bursts_wall_s=tuple(round(began.wall_s, 3) for began in fault.bursts),
        earlier_boots=fault.earlier_boots,
        healed_wall_s=round(fault.healed.wall_s, 3) if fault.healed else 0.0,
        blame=decision.blame,
        before_us=fault.before_us,
        action=0 if fault.healed else seen.action,
        counters=()
        if fault.healed
        else tuple(-1 if isinstance(value, Missing) else value for value in seen.counters),
    )


# --- what is made of it -------------------------------------------------------------------------------------


def restore(kept: FaultMemory, boot_id: str, limits: GpuLimits, now: Instant) -> Restored:
    """The state of a new start.

    Args:
        kept: What is in the file. A code that this version does not know is left out.
        boot_id: Of this boot; empty if nobody can tell: then nothing is taken for cured by a boot.
        limits: How GPUs are judged.
        now: The time of the start.
    """
    numbers = {gpu.uuid: gpu.number for gpu in kept.gpus}
    faults: dict[Key, Fault] = {}
    tracks: dict[tuple[str, str], Condition] = {}
    kept_us: dict[tuple[int, str], int] = {}
    watched: dict[int, Watched] = {}
    for one in kept.faults:
        number = numbers.get(one.uuid) if one.uuid else SHARED
        if number is None or not is_latched(one.code):
            continue
        key = Key(number, one.code, one.gi, one.ci)
        same_boot = bool(boot_id) and one.boot_id == boot_id
        fault = _fault(one, now, cured=bool(boot_id) and not same_boot and one.cure is not Cure.REPLACE)
        if fault.healed and not same_boot and now.wall_s - one.last_wall_s > _kept_s(one.code):
            continue
        faults[key] = fault
        if same_boot:
            at = number, one.code
            kept_us[at] = max(kept_us.get(at, 0), one.log_us)
            if not one.healed:
                watched[number] = _watched(one)
        if _is_held(fault, limits, now):
            tracks.update({(device, one.code): _track(fault, one.code) for device in _devices(key, kept)})
    past = {gpu.number: _past(gpu) for gpu in kept.gpus}
    gpus = GpuRuleState(roll=kept.gpus, past=past)
    return Restored(gpus, FaultLog(boot_id, faults, roll=kept.gpus, kept_us=kept_us), watched, tracks)


def _watched(one: KeptFault) -> Watched:
    counters = one.counters if len(one.counters) == len(VOLATILE) else ()
    return Watched(
        counters=tuple(Missing(Absence.ABSENT) if value < 0 else value for value in counters),
        action=one.action,
    )


def _kept_s(code: str) -> float:
    return LOST_KEPT_S if code == LOST else DAY_S


def _past(gpu: KnownGpu) -> GpuPast:
    return GpuPast(uuid=gpu.uuid, instances=tuple(Instance(mig, None) for mig in gpu.migs))


def _fault(one: KeptFault, now: Instant, *, cured: bool) -> Fault:
    parsed = [parse(text) for text in one.texts]
    digits = one.code.rpartition(".")[2]
    severity = Severity(one.severity)
    healed = _instant(one.healed_wall_s, now) if one.healed else now if cured else None
    return Fault(
        xid=int(digits) if digits.isdecimal() else 0,
        first=_instant(one.first_wall_s, now),
        last=_instant(one.last_wall_s, now),
        times=one.times,
        # NVML had told of it, for all that anybody knows: a line of that moment is no news, whatever it names
        run=(1, 0, 0) if one.times else NO_REPORTS,
        log_us=one.log_us,
        lines=tuple(line for line in parsed if isinstance(line, XidLine | SxidLine)),
        texts=one.texts,
        pids=frozenset(one.pids),
        bursts=tuple(_instant(wall_s, now) for wall_s in one.bursts_wall_s),
        before_us=one.before_us,
        boot_id=one.boot_id,
        earlier_boots=one.earlier_boots,
        healed=healed,
        judged=Decision(severity, one.evidence, one.advice, one.blame, one.cure),
    )


def _instant(wall_s: float, now: Instant) -> Instant:
    """A moment that only the wall clock remembers; a clock that was set back makes none later than now."""
    wall_s = min(max(wall_s, 0.0), now.wall_s)
    return Instant(now.mono_ns - int((now.wall_s - wall_s) * NS), wall_s)


def _is_held(fault: Fault, limits: GpuLimits, now: Instant) -> bool:
    """Whether its cause was held when the agent ended, or would be now: also in its probation."""
    if fault.healed is None:
        return True
    held_ns = int(limits.probation_s * NS) + CLEARING_NS
    return now.mono_ns - fault.healed.mono_ns < held_ns


def _track(fault: Fault, code: str) -> Condition:
    judged = fault.judged
    assert judged is not None, "what is in the file was judged"
    finding = Finding(code, judged.severity, judged.evidence, judged.advice, judged.blame)
    return Condition(Phase.RAISED, finding, fault.first, 0, 0, 0)


def _devices(key: Key, kept: FaultMemory) -> Iterator[str]:
    """Whose cause it is; instances have that of their GPU by being its instances."""
    for gpu in kept.gpus:
        if key.number not in (gpu.number, SHARED):
            continue
        named = [mig_device(gpu.number, mig.gi, mig.ci) for mig in gpu.migs if key.names(mig)]
        for device in named or [gpu_device(gpu.number)]:
            yield device.name
