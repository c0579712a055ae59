"""Counting of waits between heartbeats in the output of strace."""

import os
from pathlib import Path
from typing import Final

import pytest

from agent.bench.result import MeasurementError
from agent.bench.syscall_counts import (
    CORE_WAKES,
    HEARTBEAT_THREADS,
    _thread_names,
    count_waits,
    interpreter_memory,
    parse_calls,
)

INTERPRETER: Final = (range(0x7000, 0x8000),)
CORE, IO, OTHER = 1, 2, 3
CORE_TEXT: Final = """\
10.000000 sendto(31, "\\0", 1, 0, NULL, 0) = 1
11.000000 epoll_wait(73, [], 3, 0) = 0
12.000000 epoll_wait(73, [], 3, 9718) = 0
13.000000 futex(0x7010, FUTEX_WAIT_BITSET_PRIVATE, 0, {tv_sec=15, tv_nsec=1}, FUTEX_BITSET_MATCH_ANY) = 0
14.000000 futex(0x7010, FUTEX_WAKE_PRIVATE, 1) = 1
15.000000 futex(0x9010, FUTEX_WAKE_PRIVATE, 1) = 0
16.000000 futex(0x9010, FUTEX_WAIT_PRIVATE, 2, NULL) = -1 EAGAIN (Resource temporarily unavailable)
17.000000 futex(0x9020, FUTEX_WAKE_PRIVATE, 1) = 1
20.000000 sendto(31, "\\0", 1, 0, NULL, 0) = 1
22.000000 epoll_wait(73, [], 3, 9718) = 0
22.500000 futex(0x9020, FUTEX_WAKE_PRIVATE, 1) = 1
30.000000 sendto(31, "\\0", 1, 0, NULL, 0) = 1
31.000000 epoll_wait(73, [], 3, 9718"""
IO_TEXT: Final = """\
12.000000 epoll_wait(29, [{events=EPOLLIN, data={u32=30, u64=30}}], 8, 45563) = 1
13.000000 futex(0x9010, FUTEX_WAIT_BITSET_PRIVATE|FUTEX_CLOCK_REALTIME, 0, NULL, FUTEX_BITSET_MATCH_ANY) = 0
22.000000 epoll_wait(29, [{events=EPOLLIN, data={u32=30, u64=30}}], 8, 45563) = 1
"""


def waits_of(others: dict[int, str], names: dict[int, str]) -> dict[str, float]:
    calls = {thread: list(parse_calls(text)) for thread, text in ({CORE: CORE_TEXT} | others).items()}
    return dict(count_waits(CORE, calls, {CORE: "core"} | names, INTERPRETER))


def test_waits_between_heartbeats_exclude_those_for_the_interpreter() -> None:
    none = dict.fromkeys(HEARTBEAT_THREADS, 0)
    assert waits_of({IO: IO_TEXT}, {IO: "io"}) == none | {"core": 1, "io": 1.5, CORE_WAKES: 1}


def test_waits_of_a_thread_that_ended_are_counted() -> None:
    assert waits_of({OTHER: IO_TEXT}, {})["ended"] == 1.5


def test_thread_that_ends_while_names_are_read_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [*Path(f"/proc/{os.getpid()}/task").iterdir(), Path(f"/proc/{os.getpid()}/task/0")]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(tasks))
    names = _thread_names(os.getpid())
    assert names[os.getpid()] == "core"
    assert 0 not in names


def test_thread_without_a_budget_raises() -> None:
    with pytest.raises(MeasurementError, match="thread 'dh-new' is not in HEARTBEAT_THREADS"):
        waits_of({OTHER: ""}, {OTHER: "dh-new"})


def test_thread_of_the_c_core_is_not_counted() -> None:
    assert waits_of({OTHER: IO_TEXT}, {OTHER: "dh-kmsg"}) == waits_of({}, {})


def test_memory_of_the_interpreter_has_its_variables_but_no_heap() -> None:
    found = interpreter_memory(os.getpid())
    assert any(id(type) in memory for memory in found)
    assert not any(id(object()) in memory for memory in found)
