"""Counts, combinations and rate limits of a kubelet's events: the fake kubelet, and client-go's own code."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

import pytest
from agents import short_tmp
from kubelet.events import BURST, Event, EventStore, Recorder
from kubelet.history import History
from kubelet.pace import NS, Pace
from kubelet_real.implementations import MARKS, binary_of
from kubelet_real.program import Program

__all__ = ["short_tmp"]  # a fixture

REASON: Final = "FailedPrepareDynamicResources"


class Warns(Protocol):
    """A recorder of one process of the kubelet."""

    def warn(self, pod: str, reason: str, message: str) -> None: ...


class RecorderSetup:
    """A recorder, its store and a manual clock."""

    def __init__(self) -> None:
        self.now_ns = NS
        self.store = EventStore(lambda: self.now_ns, History())
        self.restart()

    def restart(self) -> None:
        """Replace the recorder, as a restart of the kubelet does."""
        self.recorder = self.new_recorder()

    def new_recorder(self) -> Warns:
        return Recorder(self.store, lambda: self.now_ns, Pace())

    def warn(self, message: str, pod: str = "pod") -> None:
        self.recorder.warn(pod, REASON, message)

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)

    @property
    def counts(self) -> dict[str, int]:
        return {event.message: event.count for event in self.store.all()}


class RealSetup(RecorderSetup):
    """Implementation with client-go's correlator, which decides what the recorder writes."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._numbers = itertools.count()
        super().__init__()

    def new_recorder(self) -> Warns:
        return _Correlator(self, self._program, next(self._numbers))


class _Correlator:
    def __init__(self, setup: RecorderSetup, program: Program, number: int) -> None:
        self._setup, self._program, self._number = setup, program, number

    def warn(self, pod: str, reason: str, message: str) -> None:
        """Write the event unless the correlator drops it."""
        given = {"metadata": {"namespace": "default", "name": f"pod-{pod}", "uid": pod}}
        found: dict[str, Any] | None = self._program.call(
            "correlate",
            Correlator=self._number,
            NowNs=self._setup.now_ns,
            Pod=given,
            Reason=reason,
            Message=message,
        )
        if found is not None:
            now_ns, count = self._setup.now_ns, found["count"]
            event = Event(pod, found["reason"], found["message"], count, now_ns, now_ns)
            self._setup.store.write(found["metadata"]["name"], event)


@pytest.fixture(params=["fake", *(pytest.param(version, marks=MARKS) for version in ("1.36", "1.37"))])
def events(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[RecorderSetup]:
    if request.param == "fake":
        yield RecorderSetup()
        return
    with ExitStack() as stack:
        nowhere = ("--node", "node-1", "--server", "http://127.0.0.1:9")
        program = Program(binary_of(request.param), short_tmp, *nowhere, on_event=lambda _: None)
        stack.callback(program.end, graceful=True)
        yield RealSetup(program)


def test_repeated_text_is_one_event_with_a_count(events: RecorderSetup) -> None:
    for _ in range(20):
        events.warn("no pages")
    assert events.counts == {"no pages": 20}


def test_texts_from_the_tenth_in_ten_minutes_on_are_combined(events: RecorderSetup) -> None:
    for number in range(12):
        events.warn(f"attempt {number}")
    assert len(events.counts) == 10
    assert events.counts["attempt 8"] == 1
    assert events.counts["(combined from similar events): attempt 11"] == 3


def test_texts_are_separate_again_after_ten_quiet_minutes(events: RecorderSetup) -> None:
    for number in range(12):
        events.warn(f"attempt {number}")
    events.advance(601)
    events.warn("attempt 12")
    assert events.counts["attempt 12"] == 1


def test_26th_event_of_a_pod_is_dropped_and_counted(events: RecorderSetup) -> None:
    for _ in range(BURST + 5):
        events.warn("no pages")
    assert events.counts == {"no pages": BURST}
    events.advance(299)
    events.warn("no pages")
    assert events.counts == {"no pages": BURST}
    events.advance(1)
    events.warn("no pages")
    assert events.counts == {"no pages": BURST + 7}


def test_events_are_limited_per_pod(events: RecorderSetup) -> None:
    for _ in range(BURST + 5):
        events.warn("no pages")
    events.warn("no device", pod="other")
    assert events.counts == {"no pages": BURST, "no device": 1}


def test_event_expires_an_hour_after_its_last_write(events: RecorderSetup) -> None:
    events.warn("no pages")
    events.advance(3600)
    assert events.counts == {"no pages": 1}
    events.advance(1)
    assert events.counts == {}


def test_restarted_kubelet_counts_from_one(events: RecorderSetup) -> None:
    events.warn("no pages")
    events.restart()
    events.warn("no pages")
    assert [event.count for event in events.store.all()] == [1, 1]
