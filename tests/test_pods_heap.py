"""The collector of cycles, and what a round of the pods' watch makes: the real one, of this process."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from agent.node.pods.gc_control import LARGE, ROUNDS, GcControl


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def collections() -> int:
    return sum(int(one["collections"]) for one in gc.get_stats())


def test_nothing_is_walked_during_a_round_and_a_large_one_not_after_it() -> None:
    apart = gc.get_freeze_count()
    with GcControl().spared(lambda: LARGE):
        before = collections()
        made: list[Any] = [[number] for number in range(100_000)]
        assert collections() == before
    assert gc.get_freeze_count() >= apart + len(made)
    assert gc.isenabled()


def test_what_a_small_round_makes_is_left_to_the_collector() -> None:
    apart = gc.get_freeze_count()
    with GcControl().spared(lambda: LARGE - 1):
        pass
    assert gc.get_freeze_count() == apart
    assert gc.isenabled()


def test_a_round_that_fails_leaves_the_collector_at_work() -> None:
    with pytest.raises(ValueError, match="ours"), GcControl().spared(lambda: LARGE):
        raise ValueError("ours")
    assert gc.isenabled()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_of_large_rounds_go_in_the_end() -> None:
    heap, gone = GcControl(), []
    for number in range(ROUNDS):
        with heap.spared(lambda: LARGE):
            weakref.finalize(Cycle(), gone.append, number)
        assert not gone or number == ROUNDS - 1
    assert gone == list(range(ROUNDS)), "each of them, and none before its time"
