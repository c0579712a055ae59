"""Step 2 for latched faults: match reports of NVML and of the kernel log, and count each occurrence once.

On a GPU that is partitioned into MIG instances, only NVML reports which instance has the fault. So a log line
without an instance waits up to a second for NVML's report. Memory is bounded: many occurrences of a fault are
one entry with a count.
"""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Final

from agent.health.gpu.faults.fault_log import (
    LOST_CODE,
    NO_REPORTS,
    Burst,
    Fault,
    FaultChannel,
    FaultKey,
    FaultLog,
    Occurrence,
    ReportCounts,
    occurred_near,
    recurrence_ns,
)
from agent.health.gpu.rule_state import GpuRuleState
from agent.health.gpu.xid.decisions import decide_sxid
from agent.health.gpu.xid.log_lines import RequiredAction, SxidLine, XidLine, decode_nvlink5, grade_registers
from agent.health.gpu.xid.sxid_table import SXID_ENDS, sxid_row
from agent.health.gpu.xid.xid_table import ENDED_XIDS, XidCondition, XidEffect, xid_row
from agent.health.rules import XID_PREFIX
from agent.model.gpu import WHOLE_GPU, GpuEvent, GpuField
from agent.model.health import Severity
from agent.model.time import NS, Instant

SAME_FAULT_NS: Final = 5 * NS
"""Time within which reports of one finding code and GPU by different reporters are one occurrence [ns]."""
WAIT_FOR_NVML_NS: Final = NS
"""Time for which a log line waits for NVML to name the MIG instance [ns]."""
BURST_NS: Final = 60 * NS
"""Largest time between two occurrences of a fault in one burst [ns]."""
ROOT_NS: Final = 10 * NS
"""Longest time between an XID and another XID that may be its cause [ns]."""
SECONDARY_XIDS: Final = frozenset({43, 45, 154})
"""XIDs that are never the cause of another XID."""
FAULTS_MAX: Final = 64  # for each GPU
KEPT_LINES: Final = 4
KEPT_SWITCHES: Final = 16
"""Largest number of NVSwitches at which one fault is followed to its end; machines have at most twelve."""
KEPT_BURSTS: Final = 16
WAITING_MAX: Final = 64


def match_reports(
    log: FaultLog, occurrences: Iterable[Occurrence], gpus: GpuRuleState, now: Instant
) -> FaultLog:
    """Return the fault log with new reports added. A further report of a known fault does not add a second
    fault. Most faults are reported by NVML and by the kernel log. Reports of NVML are added first."""
    faults = dict(log.faults)
    waiting: list[Occurrence] = []
    reports = sorted([*log.waiting, *occurrences], key=attrgetter("reporter", "last.mono_ns", "log_us"))
    lines = [new for new in reports if new.reporter is not FaultChannel.NVML]
    for new in reports:
        if is_placeholder_instance(new.key, gpus):
            new = new._replace(key=new.key._replace(gi=WHOLE_GPU, ci=WHOLE_GPU))
        if new.reporter is FaultChannel.NVML:
            new = _with_times_of_lines(new, lines, faults)
            _reassign_log_faults(faults, new, log.boot_id)
        elif isinstance(new.line, SxidLine) and (new.line.ended or new.line.is_companion):
            is_new = _is_unreported(faults.get(new.key), log.faults.get(new.key))
            if new.line.ended and is_new and len(waiting) < WAITING_MAX:
                waiting.append(new)
            else:
                _apply_switch_remark(faults, new, new.line, log.boot_id)
            continue
        elif (key := _matching_nvml_fault(faults, new)) is not None:
            new = new._replace(key=key)
        elif len(waiting) < WAITING_MAX and _must_wait_for_nvml(new, gpus, now):
            waiting.append(new)
            continue
        faults[new.key] = with_occurrence(faults.get(new.key), new, log.boot_id)
    _mark_cancelled(faults)
    mark_roots(faults)
    return replace(log, faults=_without_excess(faults), waiting=tuple(waiting))


def next_wait_end_ns(log: FaultLog) -> int | None:
    """Return the monotonic time at which the first waiting log line stops waiting [ns]. None: no line
    waits."""
    return min((waiting.read_ns + WAIT_FOR_NVML_NS for waiting in log.waiting), default=None)


# --- the same fault -----------------------------------------------------------------------------------------


def is_placeholder_instance(key: FaultKey, gpus: GpuRuleState) -> bool:
    """Return whether a fault names MIG instance 0/0 of a GPU without MIG. Some drivers use 0/0 for the whole
    GPU. False for a GPU that was not read yet."""
    sample, state = gpus.samples.get(key.gpu_number), gpus.per_gpu.get(key.gpu_number)
    if (key.gi, key.ci) != (0, 0) or sample is None or not sample.passes or state is None:
        return False
    return sample[GpuField.MIG_MODE] != 1 and not state.instances


def _may_name_same_fault(left: FaultKey, right: FaultKey) -> bool:
    """Return whether two identities may belong to the same fault: WHOLE_GPU matches every MIG instance."""
    return left[:2] == right[:2] and all(
        a == b or WHOLE_GPU in (a, b) for a, b in zip(left[2:], right[2:], strict=True)
    )


def _with_times_of_lines(
    new: Occurrence, lines: list[Occurrence], faults: dict[FaultKey, Fault]
) -> Occurrence:
    """Return NVML's report ``new``, with the times of the log lines about the same fault if it came late.

    NVML's report has the time at which an NVML call returned. After a pause in which the agent got no CPU
    time, this is the end of the pause, but log lines have the times of the fault.

    Args:
        lines: New log lines that match no report of NVML. Those that match ``new`` are removed.
    """
    known = [
        Occurrence(key, new.xid, times, fault.last, fault.last, fault.log_read_ns, FaultChannel.LOG)
        for key, fault in faults.items()
        if (times := max(fault.recent_reports) - fault.recent_reports[FaultChannel.NVML])
    ]
    found: list[Occurrence] = []
    for line in sorted([*known, *lines], key=attrgetter("last.mono_ns")):
        is_same = _may_name_same_fault(line.key, new.key) and _may_be_same_report(line, new.last)
        if is_same and sum(taken.times for taken in found) < new.times:
            found.append(line)
    if sum(line.times for line in found) < new.times:
        return new
    lines[:] = [line for line in lines if line not in found]
    if all(new.last.mono_ns - line.last.mono_ns <= SAME_FAULT_NS for line in found):
        return new
    last = found[-1].last
    return new._replace(first=found[0].first if new.times > 1 else last, last=last)


def _may_be_same_report(line: Occurrence, moment: Instant) -> bool:
    """Return whether a report of NVML at ``moment`` may be about the fault of a log line: it is near the
    line's time, or after it, but at most SAME_FAULT_NS after the agent read the line."""
    until_ns = max(line.last.mono_ns, line.read_ns) + SAME_FAULT_NS
    return line.last.mono_ns - SAME_FAULT_NS <= moment.mono_ns <= until_ns


def _is_same_series(fault: Fault, new: Occurrence) -> bool:
    """Return whether a report belongs to the newest series of reports of a fault: it is near the last
    occurrence, or it is a log line of a pause, for which the series has a report of NVML."""
    if occurred_near(fault, new.last, SAME_FAULT_NS):
        return True
    is_missing = fault.recent_reports[new.reporter] < fault.recent_reports[FaultChannel.NVML]
    return is_missing and _may_be_same_report(new, fault.last)


def _matching_nvml_fault(faults: dict[FaultKey, Fault], new: Occurrence) -> FaultKey | None:
    """Return the identity of the fault of NVML that the log line ``new`` also reports; None: no such fault.
    If several faults match, one that no log line has reported yet is preferred."""
    found = [
        (key, fault)
        for key, fault in faults.items()
        if _may_name_same_fault(key, new.key)
        and fault.recent_reports[FaultChannel.NVML]
        and _is_same_series(fault, new)
    ]
    found.sort(
        key=lambda item: (
            not occurred_near(item[1], new.last, SAME_FAULT_NS),
            item[1].recent_reports[new.reporter] >= item[1].recent_reports[FaultChannel.NVML],
            item[0] != new.key,
        )
    )
    return found[0][0] if found else None


def _reassign_log_faults(faults: dict[FaultKey, Fault], new: Occurrence, boot_id: str) -> None:
    """Move faults that only log lines reported to the MIG instance that NVML's report ``new`` names."""
    for key in [key for key in faults if key != new.key and _may_name_same_fault(key, new.key)]:
        logged = faults[key]
        by_nvml, by_log, by_companion = logged.recent_reports
        reports = by_log + by_companion
        if logged.resolved or by_nvml or not reports or not occurred_near(logged, new.last, SAME_FAULT_NS):
            continue
        if logged.times > max(logged.recent_reports):
            continue  # older than this series of reports: NVML cannot mean all of it
        del faults[key]
        known = faults.get(new.key)
        if known is None:
            faults[new.key] = logged
            continue
        moved = new._replace(
            times=reports,
            last=logged.last,
            read_ns=logged.log_read_ns,
            reporter=FaultChannel.LOG,
            log_us=logged.log_us,
            text=logged.texts[-1] if logged.texts else "",
            line=logged.lines[-1] if logged.lines else None,
        )
        faults[new.key] = with_occurrence(known, moved, boot_id)


def _must_wait_for_nvml(new: Occurrence, gpus: GpuRuleState, now: Instant) -> bool:
    sample = gpus.samples.get(new.key.gpu_number)
    if sample is None or not sample.migs or not sample.event_mask & GpuEvent.XID:
        return False
    if new.key.gi != WHOLE_GPU or not isinstance(new.line, XidLine) or new.before_start:
        return False
    return now.mono_ns - new.read_ns < WAIT_FOR_NVML_NS


# --- lines of NVSwitches that are no occurrences -----------------------------------------------------------


def _is_unreported(fault: Fault | None, before: Fault | None) -> bool:
    """Return whether a fault occurred since the last evaluation, after which it was ``before``. Then its end
    waits for the next evaluation, so that the fault is reported."""
    if fault is None or fault.resolved or fault.before_start:
        return False
    return before is None or before.resolved is not None


def _apply_switch_remark(
    faults: dict[FaultKey, Fault], new: Occurrence, line: SxidLine, boot_id: str
) -> None:
    """Apply an NVSwitch log line that does not report a fault itself.

    The line either reports the end of a fault, or is a companion: a line that accompanies the main line of a
    fault. A companion counts as an occurrence only if the main line is missing or less severe.
    """
    fault = faults.get(new.key)
    if fault is None:
        if not line.ended:
            faults[new.key] = with_occurrence(None, new, boot_id)
        return
    if line.ended:
        fault = _ended_at_switch(fault, new, line)
    elif not _has_line_of(fault, new, line):
        fault = with_occurrence(fault, new, boot_id)
    faults[new.key] = replace(fault, log_us=max(fault.log_us, new.log_us))


def _has_line_of(fault: Fault, new: Occurrence, companion: SxidLine) -> bool:
    """Return whether the fault has the main line that the line ``companion`` accompanies. The main line must
    be near in time and as severe."""
    first_ns, last_ns = fault.first.mono_ns - SAME_FAULT_NS, fault.last.mono_ns + SAME_FAULT_NS
    if not first_ns <= new.last.mono_ns <= last_ns:
        return False
    line = fault.switch_line
    return line is None or line.rank >= companion.rank


def _ended_at_switch(fault: Fault, new: Occurrence, end: SxidLine) -> Fault:
    """Return the fault without the NVSwitch that reports the end of the fault. The fault is resolved if no
    other NVSwitch still has it."""
    if fault.resolved:
        return fault
    kept = [
        (line, text)
        for line, text in zip(fault.lines, fault.texts, strict=False)
        if not (isinstance(line, SxidLine) and line.bus == end.bus)
    ]
    if not kept:
        return replace(fault, resolved=new.last)
    return replace(fault, lines=tuple(line for line, _ in kept), texts=tuple(text for _, text in kept))


# --- one fault ----------------------------------------------------------------------------------------------


def with_occurrence(before: Fault | None, new: Occurrence, boot_id: str) -> Fault:
    """Return a latched fault with a new report added.

    If the fault was resolved, its counts start from zero.
    """
    fresh = Fault(new.xid, new.first, new.last, before_start=new.before_start, boot_id=boot_id)
    if before is None:
        fault = fresh
    elif before.resolved:
        fault = fresh
        is_place = xid_row(new.xid).condition is XidCondition.SAME_PLACE
        is_recent = new.last.mono_ns - before.last.mono_ns < recurrence_ns(new.key.code)
        # nothing was repaired since, or each burst has its place
        if is_recent and (before.was_info or is_place):
            fault = replace(fault, lines=before.lines, texts=before.texts)
    else:
        fault = before
    earlier = fault.recent_reports if _is_same_series(fault, new) else NO_REPORTS
    reports = _add_reports(earlier, new)
    if new.first_line and new.first_line.location:
        lines, texts = _with_line(fault, new._replace(line=new.first_line, text=new.first_text))
        fault = replace(fault, lines=lines, texts=texts)
    lines, texts = _with_line(fault, new)
    return replace(
        fault,
        first=min(fault.first, new.first),
        last=max(fault.last, new.last),
        times=fault.times + max(reports) - max(earlier),
        recent_reports=reports,
        log_us=max(fault.log_us, new.log_us),
        log_read_ns=fault.log_read_ns if new.reporter is FaultChannel.NVML else new.read_ns,
        lines=lines,
        texts=texts,
        bursts=_bursts(before, new, boot_id),
        followers=frozenset(),
        has_root=False,
        before_start=fault.before_start and new.before_start,
        boot_id=boot_id,
    )


def _with_line(fault: Fault, new: Occurrence) -> tuple[tuple[XidLine | SxidLine, ...], tuple[str, ...]]:
    """Return the log lines of a fault, and their texts, with a new line added. Of too many lines, one is
    dropped. If a fault ends at each NVSwitch separately, one line of each switch is kept. If lines name
    places on the GPU, one line of each place is kept."""
    kept_max = KEPT_LINES
    places = {line.location for line in fault.lines if isinstance(line, XidLine) and line.location}
    if places and isinstance(new.line, XidLine) and new.line.location in {None, *places}:
        return fault.lines, fault.texts
    if isinstance(new.line, SxidLine) and new.line.code in SXID_ENDS.values():
        if any(isinstance(line, SxidLine) and line.bus == new.line.bus for line in fault.lines):
            return fault.lines, fault.texts
        kept_max = KEPT_SWITCHES
    lines = (*fault.lines, new.line) if new.line else fault.lines
    texts = (*fault.texts, new.text) if new.text else fault.texts
    dropped = _least_needed_line(lines)
    if len(lines) > kept_max:
        lines = (*lines[:dropped], *lines[dropped + 1 :])
    if len(texts) > kept_max:
        texts = (*texts[:dropped], *texts[dropped + 1 :])
    return lines, texts


def _least_needed_line(lines: tuple[XidLine | SxidLine, ...]) -> int:
    """Return the index of the log line to drop from a fault: the oldest, but not the first of the most
    severe."""
    worst = max(range(len(lines)), key=lambda at: _line_severity(lines[at]), default=0)
    return 1 if lines and worst == 0 and _line_severity(lines[0]) else 0


def _line_severity(line: XidLine | SxidLine) -> int:
    """Return the severity that a fault's log line states, as a number; 0: the line states no severity."""
    if isinstance(line, SxidLine):
        return line.rank
    if line.nvlink5:
        return (
            RequiredAction.RESET if line.nvlink5.fatal else decode_nvlink5(line.code, line.nvlink5).required
        )
    return grade_registers(line.nvlink4.registers) if line.nvlink4 else 0


def _add_reports(earlier: ReportCounts, new: Occurrence) -> ReportCounts:
    counts = list(earlier)
    counts[new.reporter] += new.times
    return counts[0], counts[1], counts[2]


def _bursts(before: Fault | None, new: Occurrence, boot_id: str) -> tuple[Burst, ...]:
    """Return the newest bursts of a fault, with those of a new report.

    A report of several occurrences, such as lines from before the agent's start, has the times of the first
    and the last occurrence. They are two bursts if they are too far apart for the others to join them.
    """
    pid = new.line.pid if isinstance(new.line, XidLine) else None
    first = Burst(new.first, new.first_line.pid if new.first_line else pid)
    gap_ns = new.last.mono_ns - new.first.mono_ns
    is_recurrence = new.key.code != LOST_CODE and gap_ns >= max(new.times - 1, 1) * BURST_NS
    if not is_recurrence:  # a later line of the burst may name the process
        first = first._replace(pid=first.pid or pid)
    is_overlap = before is not None and new.first <= before.last
    newest = Burst(new.last, pid) if is_recurrence or is_overlap else first
    if before is None:
        return (first, newest) if is_recurrence else (newest,)
    since_ns = new.last.mono_ns - recurrence_ns(new.key.code)
    kept = tuple(burst for burst in before.bursts if burst.start.mono_ns > since_ns)
    if is_recurrence and new.first.mono_ns - before.last.mono_ns >= BURST_NS:
        kept = (*kept, first)
    elif is_recurrence and kept and kept[0].start.mono_ns - new.first.mono_ns >= BURST_NS:
        kept = (first, *kept)[-KEPT_BURSTS:]
    is_same_loss = new.key.code == LOST_CODE and before.resolved is None
    begin = new.last if is_recurrence else new.first
    is_soon = begin.mono_ns - before.last.mono_ns < BURST_NS
    if not kept or before.boot_id != boot_id or not (is_same_loss or is_soon):
        return (*kept, newest)[-KEPT_BURSTS:]
    return (*kept[:-1], kept[-1]._replace(pid=kept[-1].pid or newest.pid))


def _mark_cancelled(faults: dict[FaultKey, Fault]) -> None:
    """Mark XIDs whose end a later XID reports: add the later XID to the earlier fault's ``followers``."""
    for key, fault in list(faults.items()):
        cancelled = key._replace(code=f"{XID_PREFIX}{ENDED_XIDS.get(fault.xid, 0)}")
        other = faults.get(cancelled)
        if other is not None and other.last <= fault.last:
            faults[cancelled] = replace(other, followers=other.followers | {fault.xid})


def mark_roots(faults: dict[FaultKey, Fault]) -> None:
    """Mark XIDs near which another XID of the same GPU occurred. The mark stays until the XID occurs again,
    also if the other XID occurs again at other times."""
    roots = [(key, root) for key, root in faults.items() if root.xid and root.xid not in SECONDARY_XIDS]
    for key, fault in list(faults.items()):
        others = (root for at, root in roots if at.gpu_number == key.gpu_number and root.xid != fault.xid)
        if not fault.has_root and any(_is_near_burst(root, fault.last) for root in others):
            faults[key] = replace(fault, has_root=True)


def _is_near_burst(root: Fault, moment: Instant) -> bool:
    """Return whether a moment is close to the start of a burst of a fault, or to its last occurrence.

    The time between them does not count: a burst can last for hours.
    """
    times = (*(burst.start.mono_ns for burst in root.bursts), root.last.mono_ns)
    return any(abs(at - moment.mono_ns) <= ROOT_NS for at in times)


def _without_excess(faults: dict[FaultKey, Fault]) -> dict[FaultKey, Fault]:
    """Drop faults of GPUs that have more than FAULTS_MAX: first resolved, then mildest and oldest faults."""
    if len(faults) <= FAULTS_MAX:
        return faults
    for number in {key.gpu_number for key in faults}:
        keys = [key for key in faults if key.gpu_number == number]
        keys.sort(key=lambda key: _keep_priority(key, faults[key]))
        for key in keys[: max(0, len(keys) - FAULTS_MAX)]:
            del faults[key]
    return faults


def _keep_priority(key: FaultKey, fault: Fault) -> tuple[bool, int, Instant]:
    mark = xid_row(fault.xid).effect if key.code.startswith(XID_PREFIX) else XidEffect.ALWAYS
    line = fault.switch_line
    if line and decide_sxid(sxid_row(fault.xid), line).severity <= Severity.INFO:
        mark = XidEffect.NEVER
    return (
        not fault.resolved,
        (XidEffect.NEVER, XidEffect.CONDITIONAL, XidEffect.ALWAYS).index(mark),
        fault.last,
    )
