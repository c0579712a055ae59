"""Store of the faults that the kernel log reports, which keeps a fault after its lines were dropped.

The native kernel-log reader counts lines and can drop old ones. This module adds up the differences of the
counts for each fact: all lines of one kind about one location.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogLineGroupId, KernelLogState
from agent.health.kernel_log.parse import HostLogLine, parse_host_line
from agent.health.rate_window import CounterPoint, RateWindow, append_reading
from agent.model.machine_samples import LogLine, LogSample
from agent.model.reading import SourceState
from agent.model.time import NS, Instant, instant_at_mono

MAX_FACTS: Final = 64
"""Largest number of facts that are kept for one code; the newest are kept."""
ONE_KILL_NS: Final = NS
"""Longest time between the first and the last kernel-log line about one OOM kill [ns]."""
LASTING_CODES: Final = frozenset(
    {
        KernelLogCode.MACHINE_CHECK,
        KernelLogCode.MEMORY_FAILURE,
        KernelLogCode.EDAC_UNCORRECTED,
        KernelLogCode.NIC_HEALTH,
        KernelLogCode.NIC_HARDWARE,
        KernelLogCode.NIC_COMMAND,
        KernelLogCode.EFA,
    }
)
"""Codes of faults that make a device unhealthy: no flood may displace one."""
MAX_LASTING_FACTS: Final = 8192
"""Largest number of facts that are kept for a code in ``LASTING_CODES``: more than any machine has CPUs,
memory modules or virtual functions of NICs."""

_MINUTES_10, _HOUR, _DAY = 600 * NS, 3600 * NS, 86_400 * NS
_PAUSE_NS: Final = {
    **dict.fromkeys(
        (KernelLogCode.AER_CORRECTED, KernelLogCode.AER_NONFATAL, KernelLogCode.AER_FATAL), _HOUR
    ),
    KernelLogCode.PCI_FAULT: _HOUR,
    KernelLogCode.READ_ONLY: _DAY,
    KernelLogCode.MACHINE_CHECK_DEFERRED: _DAY,
    KernelLogCode.HARDWARE_ERROR: _DAY,
    KernelLogCode.HARDWARE_ERROR_CORRECTED: _DAY,
    KernelLogCode.MACHINE_CHECK_CORRECTED: _DAY,
}
"""Time without lines after which the next line reports a new fault, because rules no longer reported the
last one then [ns]; other codes: ten minutes. Faults of LASTING_CODES have no pauses."""

_COUNTING_CODES: Final = frozenset({KernelLogCode.EDAC_CORRECTED, KernelLogCode.EDAC_UNCORRECTED})
"""Codes whose lines state the number of faults: a memory controller is read once per second."""
_END_VALUES: Final = {
    KernelLogCode.NIC_HEALTH: "recovered",
    KernelLogCode.NIC_POWER: "sufficient",
    KernelLogCode.NIC_MODULE: "plugged",
    KernelLogCode.NFS: "up",
}
"""First value of the line that ends a fault, for codes that have such lines."""
KernelLogFacts = Mapping[tuple[KernelLogCode, str], KernelLogFact]
_LogTimeConverter = Callable[[int], Instant]
"""Function that converts a time of the kernel log [us] to an Instant."""


def next_log_state(previous: KernelLogState, log: LogSample | None, now: Instant) -> KernelLogState:
    """Return the faults that the kernel log has reported, after a sample of it. The same object is returned
    if there are no new lines."""
    if log is None:
        return previous
    caught_up = previous.caught_up_ns > 0 or log.source.state is SourceState.OK
    is_same = log.lines == previous.lines and not previous.ends
    if is_same and (previous.caught_up_ns > 0) is caught_up:
        return previous
    state = _with_lines(previous, log.lines, _log_time_converter(previous, now))
    return replace(state, caught_up_ns=now.mono_ns if caught_up else 0)


def _log_time_converter(state: KernelLogState, now: Instant) -> _LogTimeConverter:
    """Return a function that converts times of the kernel log to instants.

    The log's clock is not adjusted as CLOCK_MONOTONIC is. After weeks, it differs by a minute. So a new line
    with a time before the last evaluation gets the time ``now``.
    """

    def moment(us: int) -> Instant:
        is_plausible = not state.caught_up_ns or state.caught_up_ns <= us * 1000 <= now.mono_ns
        return instant_at_mono(us * 1000, now) if is_plausible else now

    return moment


def _with_lines(
    previous: KernelLogState, lines: tuple[LogLine, ...], moment: _LogTimeConverter
) -> KernelLogState:
    grown: list[tuple[LogLine, int]] = []
    counted: dict[KernelLogLineGroupId, int] = {}
    for line in lines:
        entry = KernelLogLineGroupId(line.pattern, line.first_us, line.first_text)
        counted[entry] = line.times
        before = previous.counted.get(entry, 0)
        if line.times > before:
            grown.append((line, before))
    # oldest first: of lines that get the same time, the newest states how things are now
    grown.sort(key=lambda item: (item[0].last_us, item[0].seq))
    new, faulty, ends = list(previous.ends), set[str](), list[KernelLogFact]()
    for line, before in grown:
        for fact in _new_facts(line, before, moment):
            if not _is_end(fact):
                faulty.add(fact.location)
            elif fact.location in faulty and previous.caught_up_ns:
                ends.append(fact)
                continue
            new.append(fact)
    facts = _merge_facts(previous.facts, new) if new else previous.facts
    return KernelLogState(facts, lines, counted, ends=tuple(ends))


def _is_end(line: HostLogLine | KernelLogFact) -> bool:
    return line.code in _END_VALUES and line.values[0] == _END_VALUES[line.code]


def _new_facts(line: LogLine, before: int, moment: _LogTimeConverter) -> Iterator[KernelLogFact]:
    """Yield facts for kernel-log lines that the native reader has counted since the last evaluation.

    A fact is a fault that lines of one kind report about one location. The reader counts similar lines
    together, and keeps the text of the first and the newest line. If these two lines name different devices
    or places, or only one of them ends a fault, each line yields a fact.

    Args:
        line: Similar lines with their number and both texts.
        before: Number of these lines at the last evaluation.
        moment: Function that converts a time of the kernel log to an Instant.
    """
    newest, last = parse_host_line(line.text), moment(line.last_us)
    times, since = line.times - before, last
    more = 0
    if not before:
        first = newest if line.first_text == line.text else parse_host_line(line.first_text)
        since = moment(line.first_us)
        is_other = first and (not newest or first[:2] != newest[:2] or _is_end(first) != _is_end(newest))
        if first is not None and is_other:
            count = _error_count(first)
            yield KernelLogFact(
                first.code, first.location, count, since, since, line.first_text, first.values
            )
            times, since = times - 1, last
        elif first is not None and times > 1:
            more = _error_count(first) - 1
    if newest is not None and times:
        times += more + _error_count(newest) - 1
        yield KernelLogFact(newest.code, newest.location, times, since, last, line.text, newest.values)


def _error_count(line: HostLogLine) -> int:
    """Return the number of faults that a kernel-log line states; 1 if it states no number. Of lines that are
    counted together, only the first and the newest have a text. Each other line counts 1."""
    return max(1, int(line.values[0])) if line.code in _COUNTING_CODES and line.values else 1


def _merge_facts(known: KernelLogFacts, new: Iterable[KernelLogFact]) -> KernelLogFacts:
    facts = dict(known)
    for fact in new:
        if fact.code is KernelLogCode.OOM_VICTIM and _add_victim(facts, fact):
            continue
        before = facts.get((fact.code, fact.location))
        facts[fact.code, fact.location] = _merge_fact(before, fact) if before else fact
    return _drop_oldest_facts(facts)


def _add_victim(facts: dict[tuple[KernelLogCode, str], KernelLogFact], victim: KernelLogFact) -> bool:
    """Add the killed task to the fact about an OOM kill, and return whether such a fact was found.

    Kernels before 5.0 write the cgroup that reached its limit and the killed task in two separate lines. The
    two lines must be close in time.
    """
    limits = [
        fact
        for fact in facts.values()
        if fact.code is KernelLogCode.OOM_KILL
        and fact.location
        and not fact.values[1]
        and abs(victim.last.mono_ns - fact.last.mono_ns) <= ONE_KILL_NS
    ]
    if not limits:
        return False
    newest = max(limits, key=lambda fact: fact.last)
    constraint, _, cgroup = newest.values
    facts[newest.code, newest.location] = newest._replace(values=(constraint, victim.location, cgroup))
    return True


def _merge_fact(known: KernelLogFact, new: KernelLogFact) -> KernelLogFact:
    newest = new if new.last >= known.last else known
    first, since = min(known.first, new.first), min(known.since, new.since)
    pause_ns = new.since.mono_ns - known.last.mono_ns
    if known.code not in LASTING_CODES and pause_ns >= _PAUSE_NS.get(known.code, _MINUTES_10):
        since = new.since
    return newest._replace(
        times=known.times + new.times, first=first, series_first=None if since == first else since
    )


def _drop_oldest_facts(facts: dict[tuple[KernelLogCode, str], KernelLogFact]) -> KernelLogFacts:
    """Drop the oldest kernel-log facts of each code that has more facts than the allowed number."""
    by_code: dict[KernelLogCode, list[KernelLogFact]] = {}
    for fact in facts.values():
        by_code.setdefault(fact.code, []).append(fact)
    for code, of_code in by_code.items():
        of_code.sort(key=lambda fact: fact.last)
        for fact in of_code[: -MAX_LASTING_FACTS if code in LASTING_CODES else -MAX_FACTS]:
            del facts[fact.code, fact.location]
    return facts


def next_line_window(before: RateWindow, fact: KernelLogFact, t_ns: int, window_ns: int) -> RateWindow:
    """Return the window over the number of a fact's kernel-log lines, with the current number appended.

    Only the first and the last line of a fact have a time. So all lines from before the agent's start count
    at the time of the first line. If that time is before the window, none of these lines counts.

    Args:
        before: Window after the last evaluation; empty in the first evaluation.
        fact: Current fact. Fewer lines than before mean that the fact was dropped and added again.
        t_ns: CLOCK_MONOTONIC of the evaluation [ns].
        window_ns: Longest window over which a growth will be computed [ns].
    """
    if not before or fact.times < before[-1].value:
        before = (CounterPoint(fact.first.mono_ns - 1, 0),)  # no lines just before the first
    return append_reading(before, fact.times, t_ns, window_ns)
