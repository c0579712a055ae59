"""Events as client-go counts, combines and withholds them, in the fake kubelet."""

from typing import Final

import pytest
from kubelet.events import BURST, EventStore, Recorder
from kubelet.history import History
from kubelet.pace import NS

REASON: Final = "FailedPrepareDynamicResources"


class Book:
    """A recorder, its store, and a clock that stands still until it is put forward."""

    def __init__(self) -> None:
        self.at_ns = 0
        self.store = EventStore(lambda: self.at_ns, History())
        self.recorder = Recorder(self.store, lambda: self.at_ns)

    def warn(self, message: str, pod: str = "pod") -> None:
        self.recorder.warn(pod, REASON, message)

    def advance(self, seconds: float) -> None:
        self.at_ns += int(seconds * NS)

    @property
    def texts(self) -> dict[str, int]:
        return {event.message: event.count for event in self.store.all()}


@pytest.fixture
def book() -> Book:
    return Book()


def test_the_same_text_is_one_event_that_counts(book: Book) -> None:
    for _ in range(20):
        book.warn("no pages")
    assert book.texts == {"no pages": 20}


def test_the_tenth_text_within_ten_minutes_is_combined_and_so_are_all_that_follow(book: Book) -> None:
    for number in range(12):
        book.warn(f"attempt {number}")
    assert len(book.texts) == 10
    assert book.texts["attempt 8"] == 1
    assert book.texts["(combined from similar events): attempt 11"] == 3


def test_after_ten_quiet_minutes_texts_are_told_apart_again(book: Book) -> None:
    for number in range(12):
        book.warn(f"attempt {number}")
    book.advance(601)
    book.warn("attempt 12")
    assert book.texts["attempt 12"] == 1


def test_the_twenty_sixth_event_of_a_pod_is_withheld_and_counted(book: Book) -> None:
    for _ in range(BURST + 5):
        book.warn("no pages")
    assert book.texts == {"no pages": BURST}
    book.advance(299)
    book.warn("no pages")
    assert book.texts == {"no pages": BURST}
    book.advance(1)
    book.warn("no pages")
    assert book.texts == {"no pages": BURST + 7}


def test_pods_are_withheld_one_by_one(book: Book) -> None:
    for _ in range(BURST + 5):
        book.warn("no pages")
    book.warn("no device", pod="other")
    assert book.texts == {"no pages": BURST, "no device": 1}


def test_an_event_is_gone_an_hour_after_it_was_last_written(book: Book) -> None:
    book.warn("no pages")
    book.advance(3600)
    assert book.texts == {"no pages": 1}
    book.advance(1)
    assert book.texts == {}


def test_a_kubelet_that_starts_anew_counts_from_one(book: Book) -> None:
    book.warn("no pages")
    book.recorder = Recorder(book.store, lambda: book.at_ns)
    book.warn("no pages")
    assert [event.count for event in book.store.all()] == [1, 1]
