"""The intake of latched faults: NVML and the kernel log count, this file takes the differences.

Owns which GPU a telling is about, and when it was. That several tellings are one fault is
agent.health.gpu.faults.correlate's business.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from agent.devices.gpu_identity import replaced
from agent.health.gpu.faults import events as gpu_events
from agent.health.gpu.faults.correlate import join
from agent.health.gpu.faults.values import (
    LOST,
    LOST_XID,
    SHARED,
    SXID,
    XID,
    Counted,
    FaultLog,
    FaultReporter,
    Key,
    Occurrence,
)
from agent.health.gpu.views import GpuRuleState
from agent.health.gpu.xid.lines import (
    InitFailedLine,
    Line,
    LinkSetupLine,
    LostLine,
    MismatchLine,
    SxidLine,
    XidLine,
    parse,
)
from agent.model.gpu import GpuEvent, GpuSet
from agent.model.log import LogLine, LogSample
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import Instant, at_mono


def take_in(log: FaultLog, snapshot: Snapshot, gpus: GpuRuleState, looked_ns: int, now: Instant) -> FaultLog:
    """The faults after a snapshot: the same object if that tells nothing new.

    Args:
        looked_ns: When the last look was.
    """
    log = _of_the_same_gpus(log, gpus)
    if not log.started_ns:
        log = replace(log, started_ns=now.mono_ns)
    news: list[Occurrence] = []
    if snapshot.gpus is not None:
        log = _from_nvml(log, snapshot.gpus, gpus, now, news)
    if snapshot.log is not None:
        log = _from_log(log, snapshot.log, looked_ns, now, news)
    return join(log, news, gpus, now) if news or log.held else log


def _of_the_same_gpus(log: FaultLog, gpus: GpuRuleState) -> FaultLog:
    """Without the faults of a GPU that is gone for good: the one in its place does not inherit them."""
    if gpus.roll == log.roll:
        return log
    gone = replaced(log.roll, gpus.roll)
    return replace(
        log,
        roll=gpus.roll,
        faults={key: fault for key, fault in log.faults.items() if key.number not in gone},
        held=tuple(one for one in log.held if one.key.number not in gone),
    )


def _from_nvml(
    log: FaultLog, seen: GpuSet, gpus: GpuRuleState, now: Instant, news: list[Occurrence]
) -> FaultLog:
    xids: dict[tuple[int, int, int, int], Counted] = {}
    events: dict[tuple[int, GpuEvent], int] = {}
    numbers = {sample.index: number for number, sample in gpus.samples.items()}
    for sample in seen.gpus:
        if (number := numbers.get(sample.index)) is None:
            continue
        for xid in sample.xids:
            at = (sample.index, xid.code, xid.gi, xid.ci)
            xids[at] = Counted(xid.times, xid.first_ns)
            before = log.nvml_read.get(at)
            times = xid.times - (before.times if before and before.since == xid.first_ns else 0)
            if times > 0:
                key = Key(number, f"{XID}{xid.code}", xid.gi, xid.ci)
                last = at_mono(xid.last_ns, now)
                first = at_mono(xid.first_ns, now) if times == xid.times else last
                news.append(Occurrence(key, xid.code, times, first, last, now.mono_ns, FaultReporter.NVML))
        for event, count in sample.events.items():
            events[sample.index, event] = count.times
            row = gpu_events.BY_EVENT.get(event)
            times = count.times - log.events_read.get((sample.index, event), 0)
            if row and times > 0:
                last = at_mono(count.last_ns, now)
                key = Key(number, row.code)
                news.append(Occurrence(key, 0, times, last, last, now.mono_ns, FaultReporter.NVML))
    if xids == log.nvml_read and events == log.events_read:
        return log
    return replace(log, nvml_read=xids, events_read=events)


def _from_log(
    log: FaultLog, seen: LogSample, looked_ns: int, now: Instant, news: list[Occurrence]
) -> FaultLog:
    by_bus = {gpu.bus: gpu.number for gpu in log.roll if gpu.bus}
    buses = frozenset(by_bus)
    old_us = log.old_us
    if old_us is None and seen.source.state is not SourceState.STARTING:
        old_us = max((line.last_us for line in seen.lines), default=0)
    if (seen.lines, buses, old_us) == (log.lines, log.buses, log.old_us):
        return log
    log = replace(log, before_ns=looked_ns)
    before = log.lines_read
    if buses != log.buses:
        before = {at: times for at, times in before.items() if at not in log.unclaimed}
    lines_read = {(line.pattern, line.first_us, line.first_text): line.times for line in seen.lines}
    unclaimed = log.unclaimed & lines_read.keys() if buses == log.buses else frozenset()
    for at, line in zip(lines_read, seen.lines, strict=True):
        if line.times <= before.get(at, 0):
            continue
        fact = parse(line.text)
        if key := _key_of(fact, by_bus):
            news.extend(_news_of(key, fact, line, line.times - before.get(at, 0), log, now))
        elif _names_a_gpu(fact):
            unclaimed |= {at}
    return replace(
        log, lines=seen.lines, lines_read=lines_read, unclaimed=unclaimed, buses=buses, old_us=old_us
    )


def _news_of(
    key: Key, fact: Line, line: LogLine, times: int, log: FaultLog, now: Instant
) -> Iterator[Occurrence]:
    kept_us = log.kept_us.get((key.number, key.code), 0)
    if line.last_us <= kept_us:
        return
    if line.first_us <= kept_us:
        times = 1  # how many of them an earlier life counted cannot be told
    old = log.old_us is None or line.last_us <= log.old_us
    last = at_mono(line.last_us * 1000, now) if old else _moment_of(line, log, now)
    yield Occurrence(
        key=key,
        xid=_number_of(fact),
        times=times,
        first=at_mono(line.first_us * 1000, now) if old and times == line.times else last,
        last=last,
        seen_ns=now.mono_ns,
        teller=FaultReporter.COMPANION_LINE if isinstance(fact, LostLine) else FaultReporter.LOG,
        log_us=line.last_us,
        text=line.text,
        line=fact if isinstance(fact, XidLine | SxidLine) else None,
        before_us=old,
    )


def _moment_of(line: LogLine, log: FaultLog, now: Instant) -> Instant:
    """When a line came that was not there at the last look.

    The log's clock is not slewed as CLOCK_MONOTONIC is, and after weeks it is off by a minute. A time that
    cannot be is not believed.
    """
    line_ns = line.last_us * 1000
    return at_mono(line_ns, now) if log.before_ns <= line_ns <= now.mono_ns else now


def _key_of(fact: Line, by_bus: Mapping[str, int]) -> Key | None:
    """The fault that a line tells of; None if none, or if its GPU is not known."""
    match fact:
        case SxidLine():
            return Key(SHARED, f"{SXID}{fact.code}")
        case LinkSetupLine():
            return Key(SHARED, gpu_events.LINK_SETUP_FAILED)
        case MismatchLine():
            return Key(SHARED, gpu_events.API_MISMATCH)
        case XidLine() if fact.bus in by_bus:
            return Key(by_bus[fact.bus], f"{XID}{fact.code}", fact.gi, fact.ci)
        case LostLine() if fact.bus in by_bus:
            return Key(by_bus[fact.bus], LOST)
        case InitFailedLine() if fact.bus in by_bus:
            return Key(by_bus[fact.bus], gpu_events.INIT_FAILED)
        case _:
            return None


def _names_a_gpu(fact: Line) -> bool:
    return isinstance(fact, XidLine | LostLine | InitFailedLine) and bool(fact.bus)


def _number_of(fact: Line) -> int:
    if isinstance(fact, XidLine | SxidLine):
        return fact.code
    return LOST_XID if isinstance(fact, LostLine) else 0
