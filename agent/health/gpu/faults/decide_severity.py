"""Step 3 for latched faults: decide the severity of each fault, and turn the decisions into findings.

A latched fault is reported once, such as an XID, and kept until it is resolved.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from agent.health.gpu.faults import fault_log
from agent.health.gpu.faults.fault_log import SHARED, Fault, FaultKey, FaultLog, recurrence_ns
from agent.health.gpu.faults.match_reports import is_placeholder_instance
from agent.health.gpu.memory import FAILED_REPAIRS
from agent.health.gpu.rule_state import GpuRuleState
from agent.health.gpu.xid.decisions import (
    FaultDecision,
    XidOccurrences,
    XidReadings,
    announced_action,
    decide_sxid,
    decide_xid,
)
from agent.health.gpu.xid.sxid_table import sxid_row
from agent.health.gpu.xid.xid_table import RecoveryAction, XidEffect, xid_row
from agent.health.rules import SXID_PREFIX, XID_PREFIX, CatalogRow, CounterGrowth
from agent.model.gpu import WHOLE_GPU, GpuField, GpuSample
from agent.model.health import Finding, Severity
from agent.model.persistent_faults import Cure
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import GpuLimits
from agent.model.time import NS, Instant

SEVERITY_OF_EFFECT: Final = {
    XidEffect.ALWAYS: Severity.UNHEALTHY,
    XidEffect.CONDITIONAL: Severity.UNHEALTHY,
    XidEffect.NEVER: Severity.INFO,
}
"""Severity in the catalog row of an XID, the worst that a decision can have, by effect of the XID."""


class LatchedFinding(NamedTuple):
    """Finding of a latched fault (reported once, and kept until resolved) for a GPU or MIG instance."""

    finding: Finding
    since: Instant
    """Time of the first occurrence, possibly before the agent's start."""


def evaluate_faults(
    log: FaultLog, gpus: GpuRuleState, limits: GpuLimits, now: Instant
) -> dict[FaultKey, FaultDecision]:
    """Decide the severity, advice and cure (the event that ends it) of each unresolved fault. Faults of GPUs
    that were not read yet are left out."""
    if not log.faults:
        return {}
    overrides = dict(limits.xids)
    facts: dict[int, XidReadings] = {}
    found = {}
    for key, fault in log.faults.items():
        if fault.resolved:
            continue
        sample = gpus.samples.get(key.gpu_number)
        unread = key.gpu_number != SHARED and not (sample and sample.passes)
        restored = fault.last_decision if fault.xid not in overrides else None
        if restored and (unread or restored.cure is Cure.REPLACE):
            found[key] = restored
        elif unread and fault.before_start and not _first_pass_is_late(sample, log, limits, now):
            continue  # may have ended: the first pass shows it
        elif key.code.startswith(XID_PREFIX):
            if key.gpu_number not in facts:
                facts[key.gpu_number] = _xid_readings(log, gpus, key.gpu_number)
            own_facts = facts[key.gpu_number]._replace(has_root=fault.has_root)
            found[key] = decide_xid(
                xid_row(fault.xid), _xid_fault(key.code, fault, now), own_facts, overrides.get(fault.xid)
            )
        elif key.code.startswith(SXID_PREFIX):
            found[key] = decide_sxid(sxid_row(fault.xid), fault.switch_line)
        else:
            row = fault_log.ROW_BY_CODE[key.code]
            found[key] = FaultDecision(row.severity, row.meaning, row.advice, row.blame, row.cure, row.repair)
    return found


def _first_pass_is_late(sample: GpuSample | None, log: FaultLog, limits: GpuLimits, now: Instant) -> bool:
    """Return whether the first reading of a GPU takes longer than the deadline of an NVML call."""
    since_ns = sample.call_ns if sample and sample.call else log.started_ns
    return now.mono_ns - since_ns >= limits.deadline_s * NS


def _xid_fault(code: str, fault: Fault, now: Instant) -> XidOccurrences:
    since_ns = now.mono_ns - recurrence_ns(code)
    recent = [burst for burst in fault.bursts if burst.start.mono_ns > since_ns]
    # a PID of an earlier boot, whose times are negative, is that of another process
    processes = {(burst.pid, burst.start.mono_ns < 0) for burst in recent if burst.pid is not None}
    return XidOccurrences(
        times=fault.times,
        bursts=max(1, len(recent)),
        lines=fault.xid_lines,
        processes=len(processes),
        followers=fault.followers,
    )


def _xid_readings(log: FaultLog, gpus: GpuRuleState, number: int) -> XidReadings:
    xid_154 = log.faults.get(FaultKey(number, f"{XID_PREFIX}154"))
    announced = announced_action(xid_154.xid_lines) if xid_154 and not xid_154.resolved else None
    sample, gpu_state = gpus.samples.get(number), gpus.per_gpu.get(number)
    if sample is None or gpu_state is None:  # the readings are missing, and may exist
        return XidReadings(announced=announced, has_action=True)
    action = sample[GpuField.RECOVERY_ACTION]
    links = sample[GpuField.LINKS_UP]
    if sample[GpuField.MIG_MODE] == 1:  # such a GPU uses no NVLinks
        links = gpu_state.seen.links_up
    replays = gpu_state.growth.get(GpuField.PCIE_REPLAY, CounterGrowth(0, 0.0)).events
    return XidReadings(
        action=RecoveryAction(action) if isinstance(action, int) else None,
        has_action=isinstance(action, int) or action.absence is Absence.UNREADABLE,
        announced=announced,
        remap_pending=_flag(sample, GpuField.REMAP_PENDING),
        remap_failed=any(_flag(sample, field) for field in FAILED_REPAIRS),
        page_pending=_flag(sample, GpuField.RETIRED_PENDING),
        sram_threshold=_flag(sample, GpuField.SRAM_THRESHOLD),
        links_down=bool(gpu_state.seen.links_up & ~links) if isinstance(links, int) else None,
        replays_growing=isinstance(replays, int) and replays > 0,
        ecc_on=_flag(sample, GpuField.ECC_MODE),
    )


def _flag(sample: GpuSample, field: GpuField) -> bool | None:
    value: Reading = sample[field]
    return None if isinstance(value, Missing) else bool(value)


def gpu_findings(
    decisions: Mapping[FaultKey, FaultDecision],
    faults: Mapping[FaultKey, Fault],
    gpus: GpuRuleState,
    number: int,
) -> dict[str, LatchedFinding]:
    """Return the findings of latched faults for a GPU, by finding code.

    Three kinds of faults are included: faults of the GPU, faults that all GPUs share, and faults of the GPU's
    MIG instances, which get the severity INFO. Faults of a MIG instance that no longer exists count as faults
    of the GPU.
    """
    sample = gpus.samples.get(number)
    migs = next((gpu.migs for gpu in gpus.registry if gpu.number == number), ())
    linked = sample is None or sample.links > 0
    whole: dict[str, LatchedFinding] = {}
    of_instances: dict[str, list[tuple[str, Instant]]] = {}
    for key, decision in decisions.items():
        shared = key.gpu_number == SHARED and (linked or key.code == fault_log.API_MISMATCH)
        if decision.severity is Severity.OK or not (shared or key.gpu_number == number):
            continue
        since = faults[key].first
        if key.gi != WHOLE_GPU and not is_placeholder_instance(key, gpus):
            ci = "" if key.ci == WHOLE_GPU else f"/{key.ci}"
            decision = decision._replace(evidence=f"instance {key.gi}{ci}: {decision.evidence}")
        if any(key.affects_only(mig) for mig in migs):
            of_instances.setdefault(key.code, []).append((decision.evidence, since))
        elif key.code not in whole or decision.severity > whole[key.code].finding.severity:
            whole[key.code] = LatchedFinding(decision.finding(key.code), since)
    for code, evidences in of_instances.items():
        if code not in whole:
            evidence = "; ".join(sorted(text for text, _ in evidences))
            since = min(since for _, since in evidences)
            whole[code] = LatchedFinding(Finding(code, Severity.INFO, evidence), since)
    return whole


def mig_findings(
    decisions: Mapping[FaultKey, FaultDecision],
    faults: Mapping[FaultKey, Fault],
    number: int,
    gi: int,
    ci: int,
) -> dict[str, LatchedFinding]:
    """Return the findings of latched faults for one MIG instance, by code; of several with one code, the
    worst."""
    found: dict[str, LatchedFinding] = {}
    for key, decision in decisions.items():
        if key.gpu_number != number or key.gi != gi or key.ci not in (ci, WHOLE_GPU):
            continue
        worse = key.code not in found or decision.severity > found[key.code].finding.severity
        if decision.severity is not Severity.OK and worse:
            found[key.code] = LatchedFinding(decision.finding(key.code), faults[key].first)
    return found


def is_latched_fault_code(code: str) -> bool:
    """Return whether a finding code, such as ``gpu.xid.79``, is that of a latched fault. A latched fault is
    reported once, and kept until it is resolved."""
    if code in fault_log.ROW_BY_CODE:
        return True
    digits = code.removeprefix(SXID_PREFIX if code.startswith(SXID_PREFIX) else XID_PREFIX)
    return digits != code and digits.isascii() and digits.isdecimal()


@lru_cache(1024)
def latched_fault_row(code: str, limits: GpuLimits, *, is_unhealthy: bool = False) -> CatalogRow:
    """Return the catalog row of a latched fault: its usual severity and advice. The decision on a single
    fault can change both; ``is_unhealthy``: it made the device Unhealthy."""
    if code.startswith(XID_PREFIX):
        xid = xid_row(int(code.removeprefix(XID_PREFIX)))
        values = SEVERITY_OF_EFFECT[xid.effect], xid.blame, xid.meaning, xid.advice.value, xid.repair
    elif code.startswith(SXID_PREFIX):
        sxid = decide_sxid(sxid_row(int(code.removeprefix(SXID_PREFIX))), None)
        values = sxid.severity, sxid.blame, sxid.evidence, sxid.advice, sxid.repair
    else:
        event = fault_log.ROW_BY_CODE[code]
        values = event.severity, event.blame, event.why, event.advice, event.repair
    severity, blame, why, advice, repair = values
    return CatalogRow(
        code=code,
        severity=severity,
        blame=blame,
        source="gpu",
        threshold="once",
        why=why,
        advice=advice,
        repair=repair,
        probation_ns=int(limits.probation_s * NS) if is_unhealthy or severity is Severity.UNHEALTHY else 0,
    )
