"""Latch for lines of the kernel log: facts stay known when the reader has dropped their lines.

The reader counts lines and drops old entries; this module adds up the differences.
:mod:`agent.health.kernel_log.parse` parses a line, and rules decide what a fact means.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from agent.health.kernel_log.parse import parse
from agent.health.kernel_log.values import LogCode, LogEntryId, LogFact, LogState
from agent.health.rate_window import CounterPoint, RateWindow, appended
from agent.model.kernel_messages import LogLine, LogSample
from agent.model.source import SourceState
from agent.model.time import Instant, at_mono

MAX_FACTS: Final = 64
"""Largest number of facts kept for one code: for codes with hundreds of locations, such as OOM kills, the
newest facts suffice.
"""
LASTING: Final = frozenset({LogCode.MACHINE_CHECK, LogCode.MEMORY_FAILURE, LogCode.EDAC_UNCORRECTED})
"""Codes whose facts hold until the machine restarts."""
MAX_LASTING_FACTS: Final = 8192
"""Largest number of facts kept for a code in ``LASTING``: a broken part stays broken until the machine
restarts. Larger than the number of CPUs or memory modules of any machine.
"""

Facts = Mapping[tuple[LogCode, str], LogFact]
_Clock = Callable[[int], Instant]
"""Function that converts a time of the kernel log [us] to an Instant."""


def next_log_state(previous: LogState, log: LogSample | None, now: Instant) -> LogState:
    """Return the state of the kernel-log facts after a sample; the same object if there are no new lines."""
    if log is None:
        return previous
    caught_up = previous.caught_up_ns > 0 or log.source.state is SourceState.OK
    if log.lines == previous.lines and (previous.caught_up_ns > 0) is caught_up:
        return previous
    state = _with_lines(previous, log.lines, _log_clock(previous, now))
    return replace(state, caught_up_ns=now.mono_ns if caught_up else 0)


def _log_clock(state: LogState, now: Instant) -> _Clock:
    """Return a function that converts times of the log, which runs on a clock that is not slewed.

    After weeks that clock is off by a minute. So if a new line has a time before the last evaluation, the
    time is replaced by now.
    """

    def moment(us: int) -> Instant:
        is_plausible = not state.caught_up_ns or state.caught_up_ns <= us * 1000 <= now.mono_ns
        return at_mono(us * 1000, now) if is_plausible else now

    return moment


def _with_lines(previous: LogState, lines: tuple[LogLine, ...], moment: _Clock) -> LogState:
    new: list[LogFact] = []
    counted: dict[LogEntryId, int] = {}
    for line in lines:
        entry = LogEntryId(line.pattern, line.first_us, line.first_text)
        counted[entry] = line.times
        before = previous.counted.get(entry, 0)
        if line.times > before:
            new.extend(_new_facts(line, before, moment))
    return LogState(_merged(previous.facts, new) if new else previous.facts, lines, counted)


def _new_facts(line: LogLine, before: int, moment: _Clock) -> Iterator[LogFact]:
    """Yield the facts of the new lines of a reader's entry. Its first and its newest line are known and may
    differ in location.
    """
    newest, last = parse(line.text), moment(line.last_us)
    times, since = line.times - before, last
    if not before:
        first = newest if line.first_text == line.text else parse(line.first_text)
        since = moment(line.first_us)
        if first is not None and (newest is None or first[:2] != newest[:2]):
            yield LogFact(first.code, first.location, 1, since, since, line.first_text, first.values)
            times, since = times - 1, last
    if newest is not None and times:
        yield LogFact(newest.code, newest.location, times, since, last, line.text, newest.values)


def _merged(known: Facts, new: Iterable[LogFact]) -> Facts:
    facts = dict(known)
    for fact in new:
        before = facts.get((fact.code, fact.location))
        facts[fact.code, fact.location] = _merged_fact(before, fact) if before else fact
    return _bounded(facts)


def _merged_fact(known: LogFact, new: LogFact) -> LogFact:
    newest = new if new.last >= known.last else known
    return newest._replace(times=known.times + new.times, first=min(known.first, new.first))


def _bounded(facts: dict[tuple[LogCode, str], LogFact]) -> Facts:
    """Return the newest facts of each code."""
    by_code: dict[LogCode, list[LogFact]] = {}
    for fact in facts.values():
        by_code.setdefault(fact.code, []).append(fact)
    for code, of_code in by_code.items():
        of_code.sort(key=lambda fact: fact.last)
        for fact in of_code[: -MAX_LASTING_FACTS if code in LASTING else -MAX_FACTS]:
            del facts[fact.code, fact.location]
    return facts


def next_line_counts(before: RateWindow, fact: LogFact, t_ns: int, window_ns: int) -> RateWindow:
    """Return the window over the number of a fact's lines, with the newest count appended.

    Only the first and the last line of a fact have a time. So all lines of a fact from before the agent's
    start count at the time of the first line; if that is older than the window, none counts.

    Args:
        before: Window after the last evaluation; empty in the first one.
        fact: Current fact. A lower count than before means that the fact was dropped and came back.
        t_ns: Time of the evaluation.
        window_ns: Longest window over which a growth will be computed.
    """
    if not before or fact.times < before[-1].value:
        before = (CounterPoint(fact.first.mono_ns - 1, 0),)  # no lines just before the first
    return appended(before, fact.times, t_ns, window_ns)
