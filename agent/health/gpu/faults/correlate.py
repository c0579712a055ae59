"""How tellings become faults: what NVML and the kernel log say of the same fault is joined and counted once.

On a partitioned GPU NVML has the last word on which instance is hit: a line of the log that names none waits
a moment for it. Everything is bounded: a flood of one fault is one entry with a large number.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from agent.health.gpu.faults.values import (
    DAY_NS,
    NO_REPORTS,
    XID,
    Fault,
    FaultLog,
    FaultReporter,
    Key,
    Occurrence,
    ReportCounts,
    near,
)
from agent.health.gpu.views import GpuRuleState
from agent.health.gpu.xid.lines import SxidLine, XidLine
from agent.health.gpu.xid.nvlink4 import grade
from agent.health.gpu.xid.nvlink5 import Remedy, decode
from agent.health.gpu.xid.table import CANCELS, row_of
from agent.health.gpu.xid.words import Mark
from agent.model.gpu import WHOLE_GPU, GpuEvent
from agent.model.time import NS, Instant

WINDOW_NS: Final = 5 * NS
"""What two tellers say of a GPU within this time, by the same code, is one fault."""
HOLD_NS: Final = NS
"""So long a line of the log waits for NVML to say which instance it is about."""
BURST_NS: Final = 60 * NS
"""Repeats with less than this between them are one burst."""
FAULTS_MAX: Final = 64  # of one GPU
KEPT_LINES: Final = 4
KEPT_PIDS: Final = 16
KEPT_BURSTS: Final = 16
HELD_MAX: Final = 64


def join(log: FaultLog, news: Iterable[Occurrence], gpus: GpuRuleState, now: Instant) -> FaultLog:
    """The faults with these tellings in them. What NVML says goes first: it names the instance."""
    faults = dict(log.faults)
    held: list[Occurrence] = []
    for one in sorted([*log.held, *news], key=lambda one: (one.teller, one.last.mono_ns)):
        if one.teller is FaultReporter.NVML:
            _take_over(faults, one, log.boot_id)
        elif (meant := _same_by_nvml(faults, one)) is not None:
            one = one._replace(key=meant)
        elif _must_wait(one, gpus, now):
            held.append(one)
            continue
        faults[one.key] = grown(faults.get(one.key), one, log.boot_id)
    for one in held[HELD_MAX:]:  # in a flood nobody is named anyway
        faults[one.key] = grown(faults.get(one.key), one, log.boot_id)
    _cancel(faults)
    return replace(log, faults=_bounded(faults), held=tuple(held[:HELD_MAX]))


def next_ns(log: FaultLog) -> int | None:
    """When a line has waited for long enough."""
    return min((one.seen_ns + HOLD_NS for one in log.held), default=None)


# --- the same fault -----------------------------------------------------------------------------------------


def _may_be_same(one: Key, other: Key) -> bool:
    """Whether two keys may be about the same, one of them naming less of the instance."""
    return one[:2] == other[:2] and all(
        a == b or WHOLE_GPU in (a, b) for a, b in zip(one[2:], other[2:], strict=True)
    )


def _same_by_nvml(faults: dict[Key, Fault], one: Occurrence) -> Key | None:
    """Whom NVML named for what this line tells of; best one of whom no line has told yet."""
    found = [
        (key, fault)
        for key, fault in faults.items()
        if _may_be_same(key, one.key) and fault.run[FaultReporter.NVML] and near(fault, one.last, WINDOW_NS)
    ]
    found.sort(
        key=lambda item: (item[1].run[one.teller] >= item[1].run[FaultReporter.NVML], item[0] != one.key)
    )
    return found[0][0] if found else None


def _take_over(faults: dict[Key, Fault], one: Occurrence, boot_id: str) -> None:
    """What the log alone had told of, by another instance or none, is what NVML now tells of."""
    for key in [key for key in faults if key != one.key and _may_be_same(key, one.key)]:
        guess = faults[key]
        told = guess.run[FaultReporter.LOG] + guess.run[FaultReporter.COMPANION_LINE]
        if guess.healed or guess.run[FaultReporter.NVML] or not told or not near(guess, one.last, WINDOW_NS):
            continue
        if guess.times > max(guess.run):
            continue  # it was there before this run: not all of it can be what NVML means
        del faults[key]
        known = faults.get(one.key)
        if known is None:
            faults[one.key] = guess
            continue
        again = one._replace(
            times=told,
            last=guess.last,
            teller=FaultReporter.LOG,
            log_us=guess.log_us,
            text=guess.texts[-1] if guess.texts else "",
            line=guess.lines[-1] if guess.lines else None,
        )
        faults[one.key] = grown(known, again, boot_id)


def _must_wait(one: Occurrence, gpus: GpuRuleState, now: Instant) -> bool:
    sample = gpus.samples.get(one.key.number)
    if sample is None or not sample.migs or not sample.event_mask & GpuEvent.XID:
        return False
    if one.key.gi != WHOLE_GPU or not isinstance(one.line, XidLine) or one.before_us:
        return False
    return now.mono_ns - one.seen_ns < HOLD_NS


# --- one fault ----------------------------------------------------------------------------------------------


def grown(before: Fault | None, one: Occurrence, boot_id: str) -> Fault:
    """The fault with one more telling in it. One that was over begins anew."""
    fresh = Fault(one.xid, one.first, one.last, before_us=one.before_us, boot_id=boot_id)
    if before is None:
        fault = fresh
    elif before.healed:
        fault = replace(fresh, earlier_boots=before.earlier_boots + (before.boot_id != boot_id))
        if before.is_word:  # nobody has mended anything since
            fault = replace(fault, lines=before.lines, texts=before.texts, pids=before.pids)
    else:
        fault = before
    run = fault.run if near(fault, one.last, WINDOW_NS) else NO_REPORTS
    told = _told(run, one)
    lines = (*fault.lines, one.line) if one.line else fault.lines
    texts = (*fault.texts, one.text) if one.text else fault.texts
    goes = _dispensable(lines)
    pids = fault.pids
    if isinstance(one.line, XidLine) and one.line.pid is not None and len(pids) < KEPT_PIDS:
        pids |= {one.line.pid}
    return replace(
        fault,
        first=min(fault.first, one.first),
        last=max(fault.last, one.last),
        times=fault.times + max(told) - max(run),
        run=told,
        log_us=max(fault.log_us, one.log_us),
        lines=lines if len(lines) <= KEPT_LINES else (*lines[:goes], *lines[goes + 1 :]),
        texts=texts if len(texts) <= KEPT_LINES else (*texts[:goes], *texts[goes + 1 :]),
        pids=pids,
        bursts=_bursts(before, one),
        followers=frozenset(),
        before_us=fault.before_us and one.before_us,
        boot_id=boot_id,
        earlier_boots=fault.earlier_boots + (fault.boot_id != boot_id),
    )


def _dispensable(lines: tuple[XidLine | SxidLine, ...]) -> int:
    """Which of too many lines goes: the oldest, but never the first of the gravest."""
    gravest = max(range(len(lines)), key=lambda at: _gravity(lines[at]), default=0)
    return 1 if lines and gravest == 0 and _gravity(lines[0]) else 0


def _gravity(line: XidLine | SxidLine) -> int:
    """How bad a line is by its own words, among those of the same code; 0 if they decide nothing."""
    if isinstance(line, SxidLine):
        return int(line.fatal)
    if line.nvlink5:
        return Remedy.RESET if line.nvlink5.fatal else decode(line.code, line.nvlink5).remedy
    return grade(line.nvlink4.registers) if line.nvlink4 else 0


def _told(run: ReportCounts, one: Occurrence) -> ReportCounts:
    nvml, log, afterword = run
    match one.teller:
        case FaultReporter.NVML:
            return nvml + one.times, log, afterword
        case FaultReporter.LOG:
            return nvml, log + one.times, afterword
        case FaultReporter.COMPANION_LINE:
            return nvml, log, afterword + one.times


def _bursts(before: Fault | None, one: Occurrence) -> tuple[Instant, ...]:
    if before is None:
        return (one.last,)
    day = tuple(began for began in before.bursts if one.last.mono_ns - began.mono_ns < DAY_NS)
    if day and one.last.mono_ns - before.last.mono_ns < BURST_NS:
        return day
    return (*day, one.last)[-KEPT_BURSTS:]


def _cancel(faults: dict[Key, Fault]) -> None:
    """What says that another is over follows it."""
    for key, fault in list(faults.items()):
        over = key._replace(code=f"{XID}{CANCELS.get(fault.xid, 0)}")
        other = faults.get(over)
        if other is not None and other.last <= fault.last:
            faults[over] = replace(other, followers=other.followers | {fault.xid})


def _bounded(faults: dict[Key, Fault]) -> dict[Key, Fault]:
    """At most so many faults of one GPU: what is over goes first, then what is worth least, the oldest."""
    if len(faults) <= FAULTS_MAX:
        return faults
    for number in {key.number for key in faults}:
        mine = [key for key in faults if key.number == number]
        mine.sort(key=lambda key: _worth(key, faults[key]))
        for key in mine[: max(0, len(mine) - FAULTS_MAX)]:
            del faults[key]
    return faults


def _worth(key: Key, fault: Fault) -> tuple[bool, int, Instant]:
    mark = row_of(fault.xid).mark if key.code.startswith(XID) else Mark.ALWAYS
    if fault.switch_line and not fault.switch_line.fatal:
        mark = Mark.NEVER
    return not fault.healed, (Mark.NEVER, Mark.CONDITIONAL, Mark.ALWAYS).index(mark), fault.last
