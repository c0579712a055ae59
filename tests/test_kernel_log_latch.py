"""Latch of the kernel log: counts, times and bounds of the facts."""

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health.kernel_log.facts import (
    HOST_PATTERNS,
    KernelLogCode,
    KernelLogFact,
    KernelLogState,
    compile_pattern,
)
from agent.health.kernel_log.latch import MAX_FACTS, next_log_state
from agent.model.machine_samples import LogLine, LogSample
from agent.model.reading import SourceSample, SourceState
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
    """Return an entry of the reader's table; ``before`` is its first text if that differs. Times [s]."""
    us = int(first * 1e6), int((first if last is None else last) * 1e6)
    return LogLine(pattern, times, *us, before or text, text, 1)


def sample(*lines: LogLine, state: SourceState = SourceState.OK) -> LogSample:
    return LogSample(lines, SourceSample("kmsg", state, 0, 10 * NS, 0, ""))


def log_line(text: str, second: float, *, before: str = "") -> LogLine:
    """Return one line, or two lines with the text `before` first, at a time after the first evaluation."""
    number = next(i for i, pattern in enumerate(HOST_PATTERNS) if compile_pattern(pattern).match(text))
    at_s = START_S + 1 + second / 10
    return line(text, 2 if before else 1, first=at_s, last=at_s, before=before, pattern=number)


class LogLatch:
    """Latch with an evaluation every second."""

    def __init__(self) -> None:
        self.past = KernelLogState()
        self.second = START_S

    def evaluate(self, *lines: LogLine, state: SourceState = SourceState.OK) -> KernelLogState:
        self.second += 1
        self.past = next_log_state(self.past, sample(*lines, state=state), at(self.second))
        return self.past

    def fact(self, code: KernelLogCode, location: str) -> KernelLogFact:
        return self.past.facts[code, location]


def test_line_becomes_a_fact() -> None:
    watch = LogLatch()
    watch.evaluate(line(LOCKUP.format(3, 26), 4, first=100, last=160.5))
    text = LOCKUP.format(3, 26)
    assert watch.past.facts == {
        (KernelLogCode.SOFT_LOCKUP, "cpu3"): KernelLogFact(
            KernelLogCode.SOFT_LOCKUP, "cpu3", 4, at(100), at(160.5), text, ("26", "cat:7")
        )
    }


EDAC: Final = "EDAC MC{}: {} CE memory read error on A1 (channel:0 slot:0 page:0x0 offset:0x0 grain:32)"


def test_lines_that_state_a_number_count_that_many_faults() -> None:
    watch = LogLatch()
    key = KernelLogCode.EDAC_CORRECTED, "mc0 A1"
    watch.evaluate(line(EDAC.format(0, 4)))
    assert watch.fact(*key).times == 4
    watch.evaluate(line(EDAC.format(0, 6), 2, before=EDAC.format(0, 4)))
    assert watch.fact(*key).times == 4 + 6


def test_lines_between_the_first_and_the_newest_count_one_fault_each() -> None:
    watch = LogLatch()
    watch.evaluate(line(EDAC.format(0, 128), 5, before=EDAC.format(0, 3)))
    assert watch.fact(KernelLogCode.EDAC_CORRECTED, "mc0 A1").times == 3 + 3 * 1 + 128


def test_first_line_about_another_part_counts_its_own_number() -> None:
    watch = LogLatch()
    watch.evaluate(line(EDAC.format(1, 7), 2, before=EDAC.format(0, 5)))
    counts = {location: fact.times for (_, location), fact in watch.past.facts.items()}
    assert counts == {"mc0 A1": 5, "mc1 A1": 7}


def test_without_log_the_state_is_unchanged() -> None:
    assert next_log_state(KernelLogState(), None, at(1)) == KernelLogState()


def test_unread_log_keeps_its_facts() -> None:
    watch = LogLatch()
    past = watch.evaluate(line(LOCKUP.format(3, 26)))
    assert next_log_state(past, None, at(START_S + 9)) is past


def test_unrelated_lines_are_no_facts() -> None:
    watch = LogLatch()
    assert watch.evaluate(line(XID), line("usb 1-1: new device")).facts == {}


def test_unchanged_lines_return_the_same_state() -> None:
    watch = LogLatch()
    lines = (line(LOCKUP.format(3, 26)), line(XID))
    past = watch.evaluate(*lines)
    assert watch.evaluate(*[replace_nothing(line) for line in lines]) is past


def replace_nothing(found_line: LogLine) -> LogLine:
    return found_line._replace()


def test_unrelated_new_lines_keep_the_facts_object() -> None:
    watch = LogLatch()
    facts = watch.evaluate(line(LOCKUP.format(3, 26))).facts
    assert watch.evaluate(line(LOCKUP.format(3, 26)), line(XID)).facts is facts


def test_fact_counts_only_new_lines() -> None:
    watch = LogLatch()
    watch.evaluate(line(LOCKUP.format(3, 26), 4, first=100, last=160))
    watch.evaluate(
        line(LOCKUP.format(3, 99), 6, first=100, last=watch.second + 0.5, before=LOCKUP.format(3, 26))
    )
    fact = watch.fact(KernelLogCode.SOFT_LOCKUP, "cpu3")
    assert (fact.times, fact.first, fact.last) == (6, at(100), at(watch.second - 0.5))
    assert fact.values == ("99", "cat:7")


def test_lines_about_one_location_are_one_fact() -> None:
    watch = LogLatch()
    timeout, down = "nvme nvme0: I/O 1 QID 3 timeout, aborting", "nvme nvme0: controller is down; will reset"
    watch.evaluate(line(down, 1, first=300, pattern=2), line(timeout, 5, first=200, last=250, pattern=1))
    fact = watch.fact(KernelLogCode.NVME, "nvme0")
    assert (fact.times, fact.first, fact.last, fact.text) == (6, at(200), at(300), down)


def test_evicted_entry_keeps_its_fact() -> None:
    watch = LogLatch()
    watch.evaluate(line(FATAL.format(3), 2))
    watch.evaluate(line(XID))
    assert watch.fact(KernelLogCode.MACHINE_CHECK, "cpu3").times == 2


def test_returned_entry_adds_to_its_fact() -> None:
    watch = LogLatch()
    watch.evaluate(line(FATAL.format(3), 2, first=100))
    watch.evaluate(line(XID))
    watch.evaluate(line(FATAL.format(3), 3, first=watch.second + 0.5))
    fact = watch.fact(KernelLogCode.MACHINE_CHECK, "cpu3")
    assert (fact.times, fact.first, fact.last) == (5, at(100), at(watch.second - 0.5))


def test_entry_about_several_locations_gives_known_facts() -> None:
    """All hung tasks are one entry with its first and newest line; the sum is right."""
    watch = LogLatch()
    watch.evaluate(line(HUNG.format("dd"), 7, first=100, last=130, before=HUNG.format("python3")))
    assert {fact.location: fact.times for fact in watch.past.select(KernelLogCode.HUNG_TASK)} == {
        "python3": 1,
        "dd": 6,
    }
    watch.evaluate(line(HUNG.format("sh"), 9, first=100, last=watch.second, before=HUNG.format("python3")))
    assert [fact.location for fact in watch.past.select(KernelLogCode.HUNG_TASK)] == ["python3", "dd", "sh"]
    assert sum(fact.times for fact in watch.past.facts.values()) == 9


# --- times ------------------------------------------------------------------------------------------------


def test_lines_at_the_start_keep_the_logs_time() -> None:
    watch = LogLatch()
    watch.evaluate(line(LOCKUP.format(1, 26), first=50), state=SourceState.STARTING)
    watch.evaluate(line(LOCKUP.format(1, 26), first=50), line(LOCKUP.format(2, 26), first=60))
    assert [fact.last for fact in watch.past.select(KernelLogCode.SOFT_LOCKUP)] == [at(50), at(60)]


def test_implausible_time_is_replaced_by_now() -> None:
    """After weeks the log's clock differs from CLOCK_MONOTONIC by a minute, in either direction."""
    watch = LogLatch()
    watch.evaluate()
    watch.evaluate(
        line(LOCKUP.format(1, 26), first=watch.second - 60), line(LOCKUP.format(2, 26), first=START_S * 2)
    )
    assert [fact.last for fact in watch.past.select(KernelLogCode.SOFT_LOCKUP)] == [at(watch.second)] * 2


def test_fact_time_is_never_in_the_future() -> None:
    watch = LogLatch()
    watch.evaluate(line(LOCKUP.format(1, 26), first=START_S * 2))
    assert watch.fact(KernelLogCode.SOFT_LOCKUP, "cpu1").last == at(watch.second)


# --- limits -----------------------------------------------------------------------------------------------


def test_newest_facts_of_each_kind_are_kept() -> None:
    watch = LogLatch()
    watch.evaluate(*(line(OOM.format(pod, pod), first=100 + pod) for pod in range(MAX_FACTS + 10)))
    kept = watch.past.select(KernelLogCode.OOM_KILL)
    assert [fact.location for fact in kept] == [f"/pod{pod}" for pod in range(10, MAX_FACTS + 10)]


def test_lasting_facts_survive_a_flood() -> None:
    watch = LogLatch()
    watch.evaluate(*(line(FATAL.format(cpu)) for cpu in range(MAX_FACTS * 4)))
    watch.evaluate(*(line(OOM.format(pod, pod), first=watch.second) for pod in range(512)))
    assert len(watch.past.select(KernelLogCode.MACHINE_CHECK)) == MAX_FACTS * 4
    assert len(watch.past.select(KernelLogCode.OOM_KILL)) == MAX_FACTS


COUNTS: Final = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=12)


@given(COUNTS)
def test_every_line_counts_in_one_fact_once(steps: list[list[int]]) -> None:
    """Entries of three CPUs grow, or are evicted and begin again."""
    watch = LogLatch()
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
        watch.evaluate(
            *(
                line(FATAL.format(cpu), times[cpu], first=first[cpu], last=watch.second + 0.5)
                for cpu in range(3)
                if times[cpu]
            )
        )
    counts = {fact.location: fact.times for fact in watch.past.select(KernelLogCode.MACHINE_CHECK)}
    assert counts == {f"cpu{cpu}": total for cpu, total in enumerate(sums) if total}


def test_evaluations_change_nothing_in_place() -> None:
    first = next_log_state(KernelLogState(), sample(line(FATAL.format(1))), at(START_S))
    before = replace(first, facts=dict(first.facts), counted=dict(first.counted))
    next_log_state(first, sample(line(FATAL.format(1), 3), line(FATAL.format(2))), at(START_S + 1))
    assert first == before


def test_oom_lines_of_an_old_kernel_join_into_one_fact() -> None:
    watch = LogLatch()
    limit = line("Task in /pod/a killed as a result of limit of /pod", first=100)
    victim = line("Memory cgroup out of memory: Kill process 7 (java) score 9", first=100.001, pattern=1)
    (fact,) = watch.evaluate(victim, limit).facts.values()
    assert (fact.location, fact.times, fact.values) == ("/pod", 1, ("memcg", "java", "/pod/a"))


def test_oom_victim_much_later_than_a_limit_is_its_own_fact() -> None:
    watch = LogLatch()
    limit = line("Task in /pod/a killed as a result of limit of /pod", first=100)
    victim = line("Memory cgroup out of memory: Kill process 7 (java) score 9", first=102, pattern=1)
    watch.evaluate(limit, victim)
    assert watch.fact(KernelLogCode.OOM_KILL, "/pod").values[1] == ""
    assert watch.fact(KernelLogCode.OOM_VICTIM, "java").times == 1


def test_newest_line_decides_when_lines_get_the_same_time() -> None:
    """Lines get the time of the evaluation if the log's clock is off."""
    watch = LogLatch()
    watch.evaluate()
    up = line("nfs: server a OK", first=102, pattern=1)
    down = line("nfs: server a not responding, timed out", first=101)
    watch.evaluate(up, down)
    assert watch.fact(KernelLogCode.NFS, "a").values == ("down",)
    read_at = at(watch.second)
    watch.evaluate(up, down)
    fact = watch.fact(KernelLogCode.NFS, "a")
    assert (fact.last, fact.values) == (read_at, ("up",))


def test_flood_of_other_lines_keeps_the_fault_of_a_nic() -> None:
    watch = LogLatch()
    broken = "mlx5_core 0000:{:02x}:00.0: synd 0x8: unrecoverable hardware error"
    watch.evaluate(*(line(broken.format(bus)) for bus in range(MAX_FACTS + 9)))
    watch.evaluate(*(line(f"I/O error, dev dm-{n}, sector 1", first=watch.second) for n in range(500)))
    assert len(watch.past.select(KernelLogCode.NIC_HARDWARE)) == MAX_FACTS + 9
    assert len(watch.past.select(KernelLogCode.IO_ERROR)) == MAX_FACTS


MLX5: Final = "mlx5_core 0000:3b:00.0: "
FAILED: Final = f"{MLX5}poll_health:1013:(pid 0): device's health compromised - reached miss count"
RECOVERED: Final = f"{MLX5}mlx5_health_try_recover:337:(pid 9): health recovery succeeded"
UNPLUGGED: Final = f"{MLX5}Port module event: module 0, Cable unplugged"
PLUGGED: Final = f"{MLX5}Port module event: module 0, Cable plugged"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((log_line(FAILED, 1), log_line(RECOVERED, 2)), ["failed", "recovered"]),
        ((log_line(PLUGGED, 2, before=UNPLUGGED),), ["unplugged", "plugged"]),
        (
            (log_line("nfs: server a not responding, still trying", 1), log_line("nfs: server a OK", 2)),
            ["down", "up"],
        ),
    ],
)
def test_end_of_a_new_fault_is_read_one_evaluation_later(
    lines: tuple[LogLine, ...], expected: list[str]
) -> None:
    watch = LogLatch()
    watch.evaluate()
    found = []
    for _ in range(3):
        (fact,) = watch.evaluate(*lines).facts.values()
        found.append((fact.values[0], fact.times))
    assert found == [(expected[0], 1), (expected[1], 2), (expected[1], 2)]
    assert watch.past.lines == lines


def test_fault_after_the_waiting_end_of_a_fault_stays() -> None:
    watch = LogLatch()
    watch.evaluate()
    watch.evaluate(log_line(FAILED, 1), ended := log_line(RECOVERED, 2))
    again = log_line(FAILED, 1)._replace(times=2, last_us=int((START_S + 2.3) * 1e6))
    for _ in range(3):
        (fact,) = watch.evaluate(again, ended).facts.values()
        assert (fact.values[0], fact.times) == ("failed", 3)


def test_end_of_a_new_fault_counts_although_its_entry_is_evicted() -> None:
    watch = LogLatch()
    watch.evaluate()
    watch.evaluate(failed := log_line(FAILED, 1), log_line(RECOVERED, 2))
    (fact,) = watch.evaluate(failed).facts.values()
    assert fact.values[0] == "recovered"


def test_end_of_an_old_fault_is_read_at_once() -> None:
    watch = LogLatch()
    lines = log_line(FAILED, 1), log_line(RECOVERED, 2)
    (fact,) = watch.evaluate(*lines, state=SourceState.STARTING).facts.values()
    assert fact.values[0] == "recovered", "both lines are from before the agent's start"
    watch = LogLatch()
    watch.evaluate(lines[0])
    (fact,) = watch.evaluate(*lines).facts.values()
    assert fact.values[0] == "recovered"
