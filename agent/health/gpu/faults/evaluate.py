"""What the latched faults of a GPU come to: each is judged anew in every look, by what is known by then."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from agent.health.catalog import Row
from agent.health.gpu.faults import events as gpu_events
from agent.health.gpu.faults.values import DAY_NS, SHARED, SXID, XID, Fault, FaultLog, Key, near
from agent.health.gpu.views import GpuRuleState
from agent.health.gpu.xid.facts import Decision, XidFacts, XidFault, announced
from agent.health.gpu.xid.recovery import RecoveryAction
from agent.health.gpu.xid.rules import decide
from agent.health.gpu.xid.sxid_rules import decide_sxid
from agent.health.gpu.xid.sxids import row_of as sxid_row_of
from agent.health.gpu.xid.table import row_of
from agent.health.gpu.xid.words import Mark
from agent.health.rules import Growth
from agent.model.faults import Cure
from agent.model.gpu import WHOLE_GPU, GpuField, GpuSample
from agent.model.health import Finding, Severity
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import GpuLimits
from agent.model.time import NS, Instant

FOLLOW_NS: Final = 10 * NS
"""An XID that is the detail of another belongs to one that came less long before or after."""
ECHOES: Final = frozenset({43, 45, 154})
"""XIDs that are nobody's root."""
SEVERITY_OF_MARK: Final = {
    Mark.ALWAYS: Severity.UNHEALTHY,
    Mark.CONDITIONAL: Severity.UNHEALTHY,
    Mark.NEVER: Severity.INFO,
}
"""The worst that a row can come to, for those that may come to something."""


class Latched(NamedTuple):
    """What a latched fault comes to, for one device."""

    finding: Finding
    since: Instant
    """When it came, be that before the agent did."""


def judge_faults(log: FaultLog, gpus: GpuRuleState, limits: GpuLimits, now: Instant) -> dict[Key, Decision]:
    """What each fault that is not over means now, but for those that nobody can judge yet."""
    if not log.faults:
        return {}
    overrides = dict(limits.xids)
    facts: dict[int, XidFacts] = {}
    roots: dict[int, list[Fault]] = {}
    for key, fault in log.faults.items():
        if fault.xid and fault.xid not in ECHOES:
            roots.setdefault(key.number, []).append(fault)
    found = {}
    for key, fault in log.faults.items():
        if fault.healed:
            continue
        sample = gpus.samples.get(key.number)
        unread = key.number != SHARED and not (sample and sample.passes)
        kept = fault.judged if fault.xid not in overrides else None
        if kept and (unread or kept.cure is Cure.REPLACE):
            found[key] = kept  # as the agent's last life saw it
        elif unread and fault.before_us and not _is_silent(sample, log, limits, now):
            continue  # perhaps long over: the first pass will tell
        elif key.code.startswith(XID):
            if key.number not in facts:
                facts[key.number] = _facts(log, gpus, key.number)
            mine = facts[key.number]._replace(has_root=_has_root(roots.get(key.number, ()), fault))
            found[key] = decide(row_of(fault.xid), _xid_fault(fault, now), mine, overrides.get(fault.xid))
        elif key.code.startswith(SXID):
            found[key] = decide_sxid(sxid_row_of(fault.xid), fault.switch_line)
        else:
            row = gpu_events.BY_CODE[key.code]
            found[key] = Decision(row.severity, row.meaning, row.advice, row.blame, row.cure)
    return found


def _is_silent(sample: GpuSample | None, log: FaultLog, limits: GpuLimits, now: Instant) -> bool:
    """Whether the first pass over a GPU has been waited for in vain."""
    since_ns = sample.call_ns if sample and sample.call else log.started_ns
    return now.mono_ns - since_ns >= limits.deadline_s * NS


def _xid_fault(fault: Fault, now: Instant) -> XidFault:
    day = sum(now.mono_ns - began.mono_ns < DAY_NS for began in fault.bursts)
    return XidFault(
        times=fault.times,
        bursts=max(1, day) + fault.earlier_boots,
        details=fault.xid_lines,
        pids=fault.pids,
        followers=fault.followers,
    )


def _has_root(roots: Iterable[Fault], fault: Fault) -> bool:
    """Whether another fault of the same GPU came with this one, of which it may be the echo."""
    return any(root.xid != fault.xid and near(root, fault.last, FOLLOW_NS) for root in roots)


def _facts(log: FaultLog, gpus: GpuRuleState, number: int) -> XidFacts:
    told = log.faults.get(Key(number, f"{XID}154"))
    said = announced(told.xid_lines) if told and not told.healed else None
    sample, past = gpus.samples.get(number), gpus.past.get(number)
    if sample is None or past is None:
        return XidFacts(announced=said)
    action = sample[GpuField.RECOVERY_ACTION]
    links = sample[GpuField.LINKS_UP]
    replays = past.growth.get(GpuField.PCIE_REPLAY, Growth(0, 0.0)).events
    return XidFacts(
        action=RecoveryAction(action) if isinstance(action, int) else None,
        has_action=isinstance(action, int) or action.absence is Absence.UNREADABLE,
        announced=said,
        remap_pending=_flag(sample, GpuField.REMAP_PENDING),
        remap_failed=_flag(sample, GpuField.REMAP_FAILURE),
        page_pending=_flag(sample, GpuField.RETIRED_PENDING),
        sram_threshold=_flag(sample, GpuField.SRAM_THRESHOLD),
        links_down=bool(past.start.links_up & ~links) if isinstance(links, int) else None,
        replays_growing=isinstance(replays, int) and replays > 0,
        ecc_on=_flag(sample, GpuField.ECC_MODE),
    )


def _flag(sample: GpuSample, which: GpuField) -> bool | None:
    value: Reading = sample[which]
    return None if isinstance(value, Missing) else bool(value)


def findings_of(
    decisions: Mapping[Key, Decision], faults: Mapping[Key, Fault], gpus: GpuRuleState, number: int
) -> dict[str, Latched]:
    """By code, the findings of a whole GPU: its own, those of all, and word of those of its instances.

    A fault of an instance that is not there is the GPU's: what was partitioned anew is the same hardware.
    """
    sample = gpus.samples.get(number)
    migs = next((gpu.migs for gpu in gpus.roll if gpu.number == number), ())
    linked = sample is None or sample.links > 0
    whole: dict[str, Latched] = {}
    parts: dict[str, list[tuple[str, Instant]]] = {}
    for key, decision in decisions.items():
        shared = key.number == SHARED and (linked or key.code == gpu_events.API_MISMATCH)
        if decision.severity is Severity.OK or not (shared or key.number == number):
            continue
        since = faults[key].first
        if key.gi != WHOLE_GPU:
            decision = decision._replace(evidence=f"{_instance(key)}: {decision.evidence}")
        if any(key.names(mig) for mig in migs):
            parts.setdefault(key.code, []).append((decision.evidence, since))
        elif key.code not in whole or decision.severity > whole[key.code].finding.severity:
            whole[key.code] = Latched(_finding(key.code, decision), since)
    for code, told in parts.items():
        if code not in whole:
            evidence = "; ".join(sorted(text for text, _ in told))
            since = min(since for _, since in told)
            whole[code] = Latched(Finding(code, Severity.INFO, evidence), since)
    return whole


def instance_findings(
    decisions: Mapping[Key, Decision], faults: Mapping[Key, Fault], number: int, gi: int, ci: int
) -> dict[str, Latched]:
    """By code, the findings of one MIG instance alone; of the same code the worst."""
    found: dict[str, Latched] = {}
    for key, decision in decisions.items():
        if key.number != number or key.gi != gi or key.ci not in (ci, WHOLE_GPU):
            continue
        worse = key.code not in found or decision.severity > found[key.code].finding.severity
        if decision.severity is not Severity.OK and worse:
            found[key.code] = Latched(_finding(key.code, decision), faults[key].first)
    return found


def _finding(code: str, decision: Decision) -> Finding:
    return Finding(code, decision.severity, decision.evidence, decision.advice, decision.blame)


def _instance(key: Key) -> str:
    return f"instance {key.gi}" if key.ci == WHOLE_GPU else f"instance {key.gi}/{key.ci}"


def is_latched(code: str) -> bool:
    """Whether it is the code of a latched fault: one that this version of the agent knows."""
    if code in gpu_events.BY_CODE:
        return True
    digits = code.removeprefix(SXID if code.startswith(SXID) else XID)
    return digits != code and digits.isascii() and digits.isdecimal()


@lru_cache(1024)
def fault_row(code: str, limits: GpuLimits) -> Row:
    """The row of the catalogue for a latched fault; a look may find it worth less, and advise otherwise."""
    if code.startswith(XID):
        xid = row_of(int(code.removeprefix(XID)))
        severity, blame, why, advice = SEVERITY_OF_MARK[xid.mark], xid.blame, xid.meaning, xid.advice.value
    elif code.startswith(SXID):
        sxid = decide_sxid(sxid_row_of(int(code.removeprefix(SXID))), None)
        severity, blame, why, advice = sxid.severity, sxid.blame, sxid.evidence, sxid.advice
    else:
        event = gpu_events.BY_CODE[code]
        severity, blame, why, advice = event.severity, event.blame, event.why, event.advice
    return Row(
        code=code,
        severity=severity,
        blame=blame,
        source="gpu",
        threshold="once",
        why=why,
        advice=advice,
        probation_ns=int(limits.probation_s * NS) if severity is Severity.UNHEALTHY else 0,
    )
