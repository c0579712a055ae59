"""Step 1 for latched faults: find new reports in the event counts of NVML and in kernel log lines.

This step determines the GPU and the time of each report. The next step,
agent.health.gpu.faults.match_reports, finds reports of the same fault.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from agent.health.gpu.faults import fault_log
from agent.health.gpu.faults.fault_log import (
    LOST_CODE,
    SHARED,
    UNLISTED,
    FaultChannel,
    FaultKey,
    FaultLog,
    NvmlEventCount,
    Occurrence,
    number_in_code,
)
from agent.health.gpu.faults.match_reports import match_reports
from agent.health.gpu.rule_state import GpuRuleState, replaced_gpu_numbers
from agent.health.gpu.xid.log_lines import (
    GpuLostLine,
    InitFailedLine,
    LinkSetupFailedLine,
    ParsedLine,
    SxidLine,
    VersionMismatchLine,
    XidLine,
    parse_line,
)
from agent.health.rules import SXID_PREFIX, XID_PREFIX
from agent.model.gpu import GpuEvent, NvmlSample
from agent.model.machine_samples import LogLine, LogSample
from agent.model.reading import SourceState
from agent.model.snapshot import Snapshot
from agent.model.time import Instant, instant_at_mono


def ingest_faults(
    log: FaultLog,
    snapshot: Snapshot,
    gpus: GpuRuleState,
    evaluated_ns: int,
    now: Instant,
    unidentified: Container[int] = (),
) -> FaultLog:
    """Return the fault log with the new reports of a snapshot; ``log`` itself if there is no new report.

    Args:
        evaluated_ns: Monotonic time of the last evaluation [ns].
        unidentified: Numbers of GPUs whose PCI address may have changed; kernel log lines about them wait.
    """
    log = _without_replaced_gpus(log, gpus)
    if not log.started_ns:
        log = replace(log, started_ns=now.mono_ns)
    occurrences: list[Occurrence] = []
    if snapshot.gpus is not None:
        log = _add_nvml_occurrences(log, snapshot.gpus, gpus, now, occurrences)
    if snapshot.log is not None:
        by_bus = {gpu.bus: gpu.number for gpu in log.registry if gpu.bus and gpu.number not in unidentified}
        log = _add_log_occurrences(log, snapshot.log, by_bus, evaluated_ns, now, occurrences)
    return match_reports(log, occurrences, gpus, now) if occurrences or log.waiting else log


def _without_replaced_gpus(log: FaultLog, gpus: GpuRuleState) -> FaultLog:
    """Return the fault log without the faults of GPUs that have been replaced by other GPUs."""
    if gpus.registry == log.registry:
        return log
    removed = replaced_gpu_numbers(log.registry, gpus.registry)
    return replace(
        log,
        registry=gpus.registry,
        faults={key: fault for key, fault in log.faults.items() if key.gpu_number not in removed},
        waiting=tuple(waiting for waiting in log.waiting if waiting.key.gpu_number not in removed),
    )


def _add_nvml_occurrences(
    log: FaultLog, seen: NvmlSample, gpus: GpuRuleState, now: Instant, occurrences: list[Occurrence]
) -> FaultLog:
    xids: dict[tuple[int, int, int, int], NvmlEventCount] = {}
    events: dict[tuple[int, GpuEvent], int] = {}
    numbers = {sample.index: number for number, sample in gpus.samples.items()}
    for sample in seen.gpus:
        if (number := numbers.get(sample.index)) is None:
            continue
        for xid in sample.xids:
            at = (sample.index, xid.code, xid.gi, xid.ci)
            xids[at] = NvmlEventCount(xid.times, xid.first_ns)
            before = log.nvml_counted.get(at)
            times = xid.times - (before.times if before and before.since == xid.first_ns else 0)
            if times > 0:
                key = FaultKey(number, f"{XID_PREFIX}{xid.code}", xid.gi, xid.ci)
                last = instant_at_mono(xid.last_ns, now)
                first = instant_at_mono(xid.first_ns, now) if times == xid.times else last
                occurrences.append(
                    Occurrence(key, xid.code, times, first, last, now.mono_ns, FaultChannel.NVML)
                )
        for event, count in sample.events.items():
            events[sample.index, event] = count.times
            row = fault_log.ROW_BY_EVENT.get(event)
            times = count.times - log.events_counted.get((sample.index, event), 0)
            if row and times > 0:
                last = instant_at_mono(count.last_ns, now)
                key = FaultKey(number, row.code)
                occurrences.append(Occurrence(key, 0, times, last, last, now.mono_ns, FaultChannel.NVML))
    if xids == log.nvml_counted and events == log.events_counted:
        return log
    return replace(log, nvml_counted=xids, events_counted=events)


def _add_log_occurrences(
    log: FaultLog,
    seen: LogSample,
    by_bus: Mapping[str, int],
    evaluated_ns: int,
    now: Instant,
    occurrences: list[Occurrence],
) -> FaultLog:
    buses = frozenset(by_bus)
    newest_us = log.newest_before_start_us
    if newest_us is None and seen.source.state is not SourceState.STARTING:
        newest_us = max((line.last_us for line in seen.lines), default=0)
    if (seen.lines, buses, newest_us) == (log.lines, log.buses, log.newest_before_start_us):
        return log
    log = replace(log, previous_evaluation_ns=evaluated_ns)
    before = log.lines_counted
    if buses != log.buses:
        before = {at: times for at, times in before.items() if at not in log.unclaimed}
    counted = {(line.pattern, line.first_us, line.first_text): line.times for line in seen.lines}
    unlisted = {at: known for at, known in log.unlisted.items() if at in counted and buses == log.buses}
    for at, line in zip(counted, seen.lines, strict=True):
        if line.times <= before.get(at, 0):
            continue
        parsed = parse_line(line.text)
        key = _fault_key(parsed, by_bus)
        if key is None:
            continue
        if key.gpu_number == UNLISTED and isinstance(parsed, XidLine | GpuLostLine | InitFailedLine):
            unlisted[at] = parsed.bus, key.code
            continue
        times = line.times - before.get(at, 0)
        occurrences.extend(_occurrences(key, parsed, line, times, log, now, waited=at in log.unclaimed))
    return replace(
        log,
        lines=seen.lines,
        lines_counted=counted,
        unclaimed=(log.unclaimed & counted.keys() if buses == log.buses else frozenset()) | unlisted.keys(),
        unlisted=unlisted,
        buses=buses,
        newest_before_start_us=newest_us,
    )


def _occurrences(
    key: FaultKey,
    parsed: ParsedLine,
    line: LogLine,
    times: int,
    log: FaultLog,
    now: Instant,
    *,
    waited: bool,
) -> Iterator[Occurrence]:
    """Yield the new occurrences of a fault that a kernel log line reports.

    An occurrence that was counted before a restart of the agent is left out.

    Args:
        waited: Whether the line was read before the last evaluation, when its GPU was not known yet.
    """
    kept_us = log.checkpoint_us.get((key.gpu_number, key.code), 0)
    if line.last_us <= kept_us:
        return
    if line.first_us <= kept_us:
        times = 1  # how many of them were counted before a restart is not known
    old = log.newest_before_start_us is None or line.last_us <= log.newest_before_start_us
    earliest_ns = 0 if old or waited else log.previous_evaluation_ns
    last = _time_of_line(line.last_us, earliest_ns, now)
    is_first_new = times == line.times
    first = _time_of_line(line.first_us, earliest_ns, now) if is_first_new else last
    first_line = parse_line(line.first_text) if is_first_new and line.first_text != line.text else None
    is_companion = isinstance(parsed, GpuLostLine) or (isinstance(parsed, SxidLine) and parsed.is_companion)
    yield Occurrence(
        key=key,
        xid=number_in_code(key.code),
        times=times,
        first=min(first, last),
        last=last,
        read_ns=last.mono_ns if old else now.mono_ns,
        reporter=FaultChannel.COMPANION_LINE if is_companion else FaultChannel.LOG,
        log_us=line.last_us,
        text=line.text,
        line=parsed if isinstance(parsed, XidLine | SxidLine) else None,
        first_text=line.first_text,
        first_line=first_line if isinstance(first_line, XidLine) else None,
        before_start=old,
    )


def _time_of_line(line_us: int, earliest_ns: int, now: Instant) -> Instant:
    """Return the time of a kernel log line; ``now`` if the line's time is impossible.

    The kernel log's clock is not adjusted as CLOCK_MONOTONIC is. After weeks, it differs by a minute.

    Args:
        line_us: Time by the kernel log's clock [us].
        earliest_ns: Monotonic time before which the line cannot have been written [ns].
    """
    line_ns = line_us * 1000
    return instant_at_mono(line_ns, now) if earliest_ns <= line_ns <= now.mono_ns else now


def _fault_key(fact: ParsedLine, by_bus: Mapping[str, int]) -> FaultKey | None:
    """Return the identity of the fault that a kernel log line reports; None: no fault, or no PCI address."""
    match fact:
        case SxidLine():
            return FaultKey(SHARED, f"{SXID_PREFIX}{fact.ended or fact.code}")
        case LinkSetupFailedLine():
            return FaultKey(SHARED, fault_log.LINK_SETUP_FAILED)
        case VersionMismatchLine():
            return FaultKey(SHARED, fault_log.API_MISMATCH)
        case XidLine():
            return FaultKey(by_bus.get(fact.bus, UNLISTED), f"{XID_PREFIX}{fact.code}", fact.gi, fact.ci)
        case GpuLostLine():
            return FaultKey(by_bus.get(fact.bus, UNLISTED), LOST_CODE)
        case InitFailedLine() if fact.bus:
            return FaultKey(by_bus.get(fact.bus, UNLISTED), fault_log.INIT_FAILED)
        case _:
            return None
