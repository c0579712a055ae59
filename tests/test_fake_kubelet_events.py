"""How the fake kubelet counts, combines and rate-limits events, as client-go does."""

from typing import Final

import pytest
from kubelet.events import BURST, EventStore, Recorder
from kubelet.history import History
from kubelet.pace import NS

REASON: Final = "FailedPrepareDynamicResources"


class RecorderSetup:
    """A recorder, its store and a manual clock."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.store = EventStore(lambda: self.now_ns, History())
        self.recorder = Recorder(self.store, lambda: self.now_ns)

    def warn(self, message: str, pod: str = "pod") -> None:
        self.recorder.warn(pod, REASON, message)

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)

    @property
    def counts(self) -> dict[str, int]:
        return {event.message: event.count for event in self.store.all()}


@pytest.fixture
def events() -> RecorderSetup:
    return RecorderSetup()


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
    events.recorder = Recorder(events.store, lambda: events.now_ns)
    events.warn("no pages")
    assert [event.count for event in events.store.all()] == [1, 1]
