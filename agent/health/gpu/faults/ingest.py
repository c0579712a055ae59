"""Step 1 for latched faults: new occurrences, from the growing counts of NVML and the kernel log.

This module finds the GPU and the time of an occurrence. agent.health.gpu.faults.correlate recognises several
reports of one fault.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from agent.devices.gpu_identity import replaced
from agent.health.gpu.faults import events as gpu_events
from agent.health.gpu.faults.correlate import correlate
from agent.health.gpu.faults.values import (
    LOST,
    LOST_XID,
    SHARED,
    SXID,
    XID,
    CountedEvents,
    FaultKey,
    FaultLog,
    FaultReporter,
    Occurrence,
)
from agent.health.gpu.rule_state import GpuRuleState
from agent.health.gpu.xid.lines import (
    InitFailedLine,
    LinkSetupLine,
    LostLine,
    MismatchLine,
    ParsedLine,
    SxidLine,
    XidLine,
    parse,
)
from agent.model.gpu import GpuEvent, GpuSet
from agent.model.kernel_messages import LogLine, LogSample
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant, at_mono


def ingest_faults(
    log: FaultLog, snapshot: Snapshot, gpus: GpuRuleState, evaluated_ns: int, now: Instant
) -> FaultLog:
    """Return the fault log after a snapshot; the same object if the snapshot reports nothing new.

    Args:
        evaluated_ns: Time of the last evaluation.
    """
    log = _without_replaced_gpus(log, gpus)
    if not log.started_ns:
        log = replace(log, started_ns=now.mono_ns)
    occurrences: list[Occurrence] = []
    if snapshot.gpus is not None:
        log = _from_nvml(log, snapshot.gpus, gpus, now, occurrences)
    if snapshot.log is not None:
        log = _from_log(log, snapshot.log, evaluated_ns, now, occurrences)
    return correlate(log, occurrences, gpus, now) if occurrences or log.waiting else log


def _without_replaced_gpus(log: FaultLog, gpus: GpuRuleState) -> FaultLog:
    """Return the fault log without the faults of replaced GPUs: a new GPU does not inherit them."""
    if gpus.registry == log.registry:
        return log
    removed = replaced(log.registry, gpus.registry)
    return replace(
        log,
        registry=gpus.registry,
        faults={key: fault for key, fault in log.faults.items() if key.number not in removed},
        waiting=tuple(waiting for waiting in log.waiting if waiting.key.number not in removed),
    )


def _from_nvml(
    log: FaultLog, seen: GpuSet, gpus: GpuRuleState, now: Instant, occurrences: list[Occurrence]
) -> FaultLog:
    xids: dict[tuple[int, int, int, int], CountedEvents] = {}
    events: dict[tuple[int, GpuEvent], int] = {}
    numbers = {sample.index: number for number, sample in gpus.samples.items()}
    for sample in seen.gpus:
        if (number := numbers.get(sample.index)) is None:
            continue
        for xid in sample.xids:
            at = (sample.index, xid.code, xid.gi, xid.ci)
            xids[at] = CountedEvents(xid.times, xid.first_ns)
            before = log.nvml_counted.get(at)
            times = xid.times - (before.times if before and before.since == xid.first_ns else 0)
            if times > 0:
                key = FaultKey(number, f"{XID}{xid.code}", xid.gi, xid.ci)
                last = at_mono(xid.last_ns, now)
                first = at_mono(xid.first_ns, now) if times == xid.times else last
                occurrences.append(
                    Occurrence(key, xid.code, times, first, last, now.mono_ns, FaultReporter.NVML)
                )
        for event, count in sample.events.items():
            events[sample.index, event] = count.times
            row = gpu_events.BY_EVENT.get(event)
            times = count.times - log.events_counted.get((sample.index, event), 0)
            if row and times > 0:
                last = at_mono(count.last_ns, now)
                key = FaultKey(number, row.code)
                occurrences.append(Occurrence(key, 0, times, last, last, now.mono_ns, FaultReporter.NVML))
    if xids == log.nvml_counted and events == log.events_counted:
        return log
    return replace(log, nvml_counted=xids, events_counted=events)


def _from_log(
    log: FaultLog, seen: LogSample, evaluated_ns: int, now: Instant, occurrences: list[Occurrence]
) -> FaultLog:
    by_bus = {gpu.bus: gpu.number for gpu in log.registry if gpu.bus}
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
    unclaimed = log.unclaimed & counted.keys() if buses == log.buses else frozenset()
    for at, line in zip(counted, seen.lines, strict=True):
        if line.times <= before.get(at, 0):
            continue
        parsed = parse(line.text)
        if key := _key_of(parsed, by_bus):
            occurrences.extend(_occurrences(key, parsed, line, line.times - before.get(at, 0), log, now))
        elif _has_bus(parsed):
            unclaimed |= {at}
    return replace(
        log,
        lines=seen.lines,
        lines_counted=counted,
        unclaimed=unclaimed,
        buses=buses,
        newest_before_start_us=newest_us,
    )


def _occurrences(
    key: FaultKey, parsed: ParsedLine, line: LogLine, times: int, log: FaultLog, now: Instant
) -> Iterator[Occurrence]:
    kept_us = log.checkpoint_us.get((key.number, key.code), 0)
    if line.last_us <= kept_us:
        return
    if line.first_us <= kept_us:
        times = 1  # the number that an earlier agent counted is not known
    old = log.newest_before_start_us is None or line.last_us <= log.newest_before_start_us
    last = at_mono(line.last_us * 1000, now) if old else _time_of_line(line, log, now)
    yield Occurrence(
        key=key,
        xid=_xid_number(parsed),
        times=times,
        first=at_mono(line.first_us * 1000, now) if old and times == line.times else last,
        last=last,
        seen_ns=now.mono_ns,
        reporter=FaultReporter.COMPANION_LINE if isinstance(parsed, LostLine) else FaultReporter.LOG,
        log_us=line.last_us,
        text=line.text,
        line=parsed if isinstance(parsed, XidLine | SxidLine) else None,
        before_start=old,
    )


def _time_of_line(line: LogLine, log: FaultLog, now: Instant) -> Instant:
    """Return the time of a log line that is new since the last evaluation.

    The log's clock is not slewed as CLOCK_MONOTONIC is, and is off by a minute after weeks. An impossible
    time is replaced by the time of this evaluation.
    """
    line_ns = line.last_us * 1000
    return at_mono(line_ns, now) if log.previous_evaluation_ns <= line_ns <= now.mono_ns else now


def _key_of(fact: ParsedLine, by_bus: Mapping[str, int]) -> FaultKey | None:
    """Return the key of the fault that a log line reports; None if it reports no fault or an unknown GPU."""
    match fact:
        case SxidLine():
            return FaultKey(SHARED, f"{SXID}{fact.code}")
        case LinkSetupLine():
            return FaultKey(SHARED, gpu_events.LINK_SETUP_FAILED)
        case MismatchLine():
            return FaultKey(SHARED, gpu_events.API_MISMATCH)
        case XidLine() if fact.bus in by_bus:
            return FaultKey(by_bus[fact.bus], f"{XID}{fact.code}", fact.gi, fact.ci)
        case LostLine() if fact.bus in by_bus:
            return FaultKey(by_bus[fact.bus], LOST)
        case InitFailedLine() if fact.bus in by_bus:
            return FaultKey(by_bus[fact.bus], gpu_events.INIT_FAILED)
        case _:
            return None


def _has_bus(fact: ParsedLine) -> bool:
    return isinstance(fact, XidLine | LostLine | InitFailedLine) and bool(fact.bus)


def _xid_number(fact: ParsedLine) -> int:
    if isinstance(fact, XidLine | SxidLine):
        return fact.code
    return LOST_XID if isinstance(fact, LostLine) else 0
