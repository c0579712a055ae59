"""From counted lines to facts: what the kernel log has said of the host stays known when its lines are gone.

The reader counts, and forgets what it has no more room for; this file takes the differences. What a line says
is agent.health.kernel_log.parse', what follows from a fact the rules'.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from agent.health.kernel_log.parse import parse
from agent.health.kernel_log.values import Entry, LogCode, LogFact, LogPast
from agent.model.log import LogLine, LogSample
from agent.model.source import SourceState
from agent.model.time import Instant, at_mono

KEPT: Final = 64
"""Facts of one code. What comes in hundreds, cgroups that run out of memory, is of interest by its newest."""
LASTING: Final = frozenset({LogCode.MACHINE_CHECK, LogCode.MEMORY_FAILURE, LogCode.EDAC_UNCORRECTED})
LASTING_KEPT: Final = 8192
"""What is broken stays so until the machine is started anew; there are no more CPUs or modules than this."""

Facts = Mapping[tuple[LogCode, str], LogFact]
_Clock = Callable[[int], Instant]
"""From the log's time [us] to ours."""


def remember_log(past: LogPast, log: LogSample | None, now: Instant) -> LogPast:
    """The past after a look at the log: the same object, and hardly a cost, if there are no other lines."""
    if log is None:
        return past
    caught_up = past.looked_ns > 0 or log.source.state is SourceState.OK
    if log.lines == past.lines and (past.looked_ns > 0) is caught_up:
        return past
    past = _taken_in(past, log.lines, _clock(past, now))
    return replace(past, looked_ns=now.mono_ns if caught_up else 0)


def _clock(past: LogPast, now: Instant) -> _Clock:
    """What was there at the start has only the log's clock, which is not slewed as CLOCK_MONOTONIC is.

    After weeks it is off by a minute. A line that is new is no older than those that were new before it.
    """

    def moment(us: int) -> Instant:
        believed = not past.looked_ns or past.looked_ns <= us * 1000 <= now.mono_ns
        return at_mono(us * 1000, now) if believed else now

    return moment


def _taken_in(past: LogPast, lines: tuple[LogLine, ...], moment: _Clock) -> LogPast:
    told: list[LogFact] = []
    counted: dict[Entry, int] = {}
    for line in lines:
        entry = Entry(line.pattern, line.first_us, line.first_text)
        counted[entry] = line.times
        before = past.counted.get(entry, 0)
        if line.times > before:
            told.extend(_told(line, before, moment))
    return LogPast(_joined(past.facts, told) if told else past.facts, lines, counted)


def _told(line: LogLine, before: int, moment: _Clock) -> Iterator[LogFact]:
    """What an entry says anew. Its first line and its newest are known, and may be about two places."""
    newest, last = parse(line.text), moment(line.last_us)
    times, since = line.times - before, last
    if not before:
        first = newest if line.first_text == line.text else parse(line.first_text)
        since = moment(line.first_us)
        if first is not None and (newest is None or first[:2] != newest[:2]):
            yield LogFact(first.code, first.place, 1, since, since, line.first_text, first.values)
            times, since = times - 1, last
    if newest is not None and times:
        yield LogFact(newest.code, newest.place, times, since, last, line.text, newest.values)


def _joined(known: Facts, told: Iterable[LogFact]) -> Facts:
    facts = dict(known)
    for fact in told:
        before = facts.get((fact.code, fact.place))
        facts[fact.code, fact.place] = _sum(before, fact) if before else fact
    return _bounded(facts)


def _sum(known: LogFact, told: LogFact) -> LogFact:
    newest = told if told.last >= known.last else known
    return newest._replace(times=known.times + told.times, first=min(known.first, told.first))


def _bounded(facts: dict[tuple[LogCode, str], LogFact]) -> Facts:
    """Of each code those that came last."""
    by_code: dict[LogCode, list[LogFact]] = {}
    for fact in facts.values():
        by_code.setdefault(fact.code, []).append(fact)
    for code, those in by_code.items():
        those.sort(key=lambda fact: fact.last)
        for fact in those[: -LASTING_KEPT if code in LASTING else -KEPT]:
            del facts[fact.code, fact.place]
    return facts
