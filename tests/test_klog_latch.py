"""What is remembered of the log: counts that grow, times that can be, and no more than there is room for."""

from dataclasses import replace
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from agent.health.kernel_log.latch import KEPT, remember_log
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.model.log import LogLine, LogSample
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

START_S: Final = 10_000
LOCKUP: Final = "watchdog: BUG: soft lockup - CPU#{} stuck for {}s! [cat:7]"
HUNG: Final = "INFO: task {}:7 blocked for more than 122 seconds."
FATAL: Final = "mce: [Hardware Error]: CPU {}: Machine Check: 0 Bank 5: be00000000800400"
OOM: Final = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/pod{},task_memcg=/pod{},task=a,pid=1"
)
XID: Final = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def at(second: float) -> Instant:
    return Instant(int(second * NS), 1_700_000_000.0 + second)


def line(
    text: str,
    times: int = 1,
    *,
    first: float = 100,
    last: float | None = None,
    before: str = "",
    pattern: int = 0,
) -> LogLine:
    """An entry of the reader's table; ``before`` is its first text, if that is another. Times in seconds."""
    us = int(first * 1e6), int((first if last is None else last) * 1e6)
    return LogLine(pattern, times, *us, before or text, text, 1)


def sample(*lines: LogLine, state: SourceState = SourceState.OK) -> LogSample:
    return LogSample(lines, SourceSample("kmsg", state, 0, 10 * NS, 0, ""))


class Watch:
    """Looks at a log, second after second."""

    def __init__(self) -> None:
        self.past = LogPast()
        self.second = START_S

    def see(self, *lines: LogLine, state: SourceState = SourceState.OK) -> LogPast:
        self.second += 1
        self.past = remember_log(self.past, sample(*lines, state=state), at(self.second))
        return self.past

    def fact(self, code: LogCode, place: str) -> LogFact:
        return self.past.facts[code, place]


def test_a_line_becomes_a_fact() -> None:
    watch = Watch()
    watch.see(line(LOCKUP.format(3, 26), 4, first=100, last=160.5))
    text = LOCKUP.format(3, 26)
    assert watch.past.facts == {
        (LogCode.SOFT_LOCKUP, "cpu3"): LogFact(
            LogCode.SOFT_LOCKUP, "cpu3", 4, at(100), at(160.5), text, ("26", "cat:7")
        )
    }


def test_no_log_is_no_past() -> None:
    assert remember_log(LogPast(), None, at(1)) == LogPast()


def test_a_log_that_is_no_longer_read_keeps_its_facts() -> None:
    watch = Watch()
    past = watch.see(line(LOCKUP.format(3, 26)))
    assert remember_log(past, None, at(START_S + 9)) is past


def test_lines_of_others_are_nobodys() -> None:
    watch = Watch()
    assert watch.see(line(XID), line("usb 1-1: new device")).facts == {}


def test_the_same_lines_are_the_same_past() -> None:
    watch = Watch()
    lines = (line(LOCKUP.format(3, 26)), line(XID))
    past = watch.see(*lines)
    assert watch.see(*[replace_nothing(one) for one in lines]) is past


def replace_nothing(one: LogLine) -> LogLine:
    return one._replace()


def test_other_lines_of_others_leave_the_facts_what_they_are() -> None:
    watch = Watch()
    facts = watch.see(line(LOCKUP.format(3, 26))).facts
    assert watch.see(line(LOCKUP.format(3, 26)), line(XID)).facts is facts


def test_a_count_grows_by_what_is_new() -> None:
    watch = Watch()
    watch.see(line(LOCKUP.format(3, 26), 4, first=100, last=160))
    watch.see(line(LOCKUP.format(3, 99), 6, first=100, last=watch.second + 0.5, before=LOCKUP.format(3, 26)))
    fact = watch.fact(LogCode.SOFT_LOCKUP, "cpu3")
    assert (fact.times, fact.first, fact.last) == (6, at(100), at(watch.second - 0.5))
    assert fact.values == ("99", "cat:7")


def test_several_patterns_and_keys_of_one_place_are_one_fact() -> None:
    watch = Watch()
    timeout, down = "nvme nvme0: I/O 1 QID 3 timeout, aborting", "nvme nvme0: controller is down; will reset"
    watch.see(line(down, 1, first=300, pattern=2), line(timeout, 5, first=200, last=250, pattern=1))
    fact = watch.fact(LogCode.NVME, "nvme0")
    assert (fact.times, fact.first, fact.last, fact.text) == (6, at(200), at(300), down)


def test_an_entry_that_found_no_more_room_keeps_its_fact() -> None:
    watch = Watch()
    watch.see(line(FATAL.format(3), 2))
    watch.see(line(XID))
    assert watch.fact(LogCode.MACHINE_CHECK, "cpu3").times == 2


def test_an_entry_that_comes_back_is_counted_on() -> None:
    watch = Watch()
    watch.see(line(FATAL.format(3), 2, first=100))
    watch.see(line(XID))
    watch.see(line(FATAL.format(3), 3, first=watch.second + 0.5))
    fact = watch.fact(LogCode.MACHINE_CHECK, "cpu3")
    assert (fact.times, fact.first, fact.last) == (5, at(100), at(watch.second - 0.5))


def test_an_entry_about_several_places_tells_of_those_that_are_known() -> None:
    """All tasks that hang are one entry: its first line and its newest are there, and the sum is right."""
    watch = Watch()
    watch.see(line(HUNG.format("dd"), 7, first=100, last=130, before=HUNG.format("python3")))
    assert {fact.place: fact.times for fact in watch.past.of(LogCode.HUNG_TASK)} == {"python3": 1, "dd": 6}
    watch.see(line(HUNG.format("sh"), 9, first=100, last=watch.second, before=HUNG.format("python3")))
    assert [fact.place for fact in watch.past.of(LogCode.HUNG_TASK)] == ["python3", "dd", "sh"]
    assert sum(fact.times for fact in watch.past.facts.values()) == 9


# --- times ------------------------------------------------------------------------------------------------


def test_what_was_there_at_the_start_has_the_logs_own_time() -> None:
    watch = Watch()
    watch.see(line(LOCKUP.format(1, 26), first=50), state=SourceState.STARTING)
    watch.see(line(LOCKUP.format(1, 26), first=50), line(LOCKUP.format(2, 26), first=60))
    assert [fact.last for fact in watch.past.of(LogCode.SOFT_LOCKUP)] == [at(50), at(60)]


def test_a_time_that_cannot_be_is_not_believed() -> None:
    """After weeks the log's clock is a minute off CLOCK_MONOTONIC, to either side."""
    watch = Watch()
    watch.see()
    watch.see(
        line(LOCKUP.format(1, 26), first=watch.second - 60), line(LOCKUP.format(2, 26), first=START_S * 2)
    )
    assert [fact.last for fact in watch.past.of(LogCode.SOFT_LOCKUP)] == [at(watch.second)] * 2


def test_no_fact_is_of_the_future() -> None:
    watch = Watch()
    watch.see(line(LOCKUP.format(1, 26), first=START_S * 2))
    assert watch.fact(LogCode.SOFT_LOCKUP, "cpu1").last == at(watch.second)


# --- bounds -----------------------------------------------------------------------------------------------


def test_of_each_kind_those_that_came_last_stay() -> None:
    watch = Watch()
    watch.see(*(line(OOM.format(pod, pod), first=100 + pod) for pod in range(KEPT + 10)))
    kept = watch.past.of(LogCode.OOM_KILL)
    assert [fact.place for fact in kept] == [f"/pod{pod}" for pod in range(10, KEPT + 10)]


def test_what_is_broken_is_not_forgotten_for_a_flood() -> None:
    watch = Watch()
    watch.see(*(line(FATAL.format(cpu)) for cpu in range(KEPT * 4)))
    watch.see(*(line(OOM.format(pod, pod), first=watch.second) for pod in range(512)))
    assert len(watch.past.of(LogCode.MACHINE_CHECK)) == KEPT * 4
    assert len(watch.past.of(LogCode.OOM_KILL)) == KEPT


COUNTS: Final = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=12)


@given(COUNTS)
def test_every_line_that_came_is_in_a_fact_once(steps: list[list[int]]) -> None:
    """Entries of three CPUs, which grow or are gone and begin anew."""
    watch = Watch()
    times, first, sums = [0, 0, 0], [0.0, 0.0, 0.0], [0, 0, 0]
    for step in steps:
        for cpu, more in enumerate(step):
            if more == 0:
                times[cpu] = 0  # evicted
                continue
            if times[cpu] == 0:
                first[cpu] = watch.second + 0.1
            times[cpu] += more
            sums[cpu] += more
        watch.see(
            *(
                line(FATAL.format(cpu), times[cpu], first=first[cpu], last=watch.second + 0.5)
                for cpu in range(3)
                if times[cpu]
            )
        )
    told = {fact.place: fact.times for fact in watch.past.of(LogCode.MACHINE_CHECK)}
    assert told == {f"cpu{cpu}": total for cpu, total in enumerate(sums) if total}


def test_looks_change_nothing_in_place() -> None:
    first = remember_log(LogPast(), sample(line(FATAL.format(1))), at(START_S))
    before = replace(first, facts=dict(first.facts), counted=dict(first.counted))
    remember_log(first, sample(line(FATAL.format(1), 3), line(FATAL.format(2))), at(START_S + 1))
    assert first == before
