"""Control of the garbage collector during polls of pods, with this process's real collector."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from agent.node.pods.poller import GC_FREEZE_SIZE, GC_FREEZES_MAX, GcControl


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    gc.unfreeze()  # objects that a former test froze would end meanwhile, and count no longer
    yield
    gc.unfreeze()
    gc.enable()


def collections() -> int:
    return sum(int(stat["collections"]) for stat in gc.get_stats())


def test_collector_is_off_during_poll_and_large_results_are_frozen() -> None:
    apart = gc.get_freeze_count()
    with GcControl().paused_during(lambda: GC_FREEZE_SIZE):
        before = collections()
        made: list[Any] = [[number] for number in range(100_000)]
        assert collections() == before
    assert gc.get_freeze_count() >= apart + len(made)
    assert gc.isenabled()


def test_small_poll_leaves_its_objects_to_the_collector() -> None:
    apart = gc.get_freeze_count()
    with GcControl().paused_during(lambda: GC_FREEZE_SIZE - 1):
        pass
    assert gc.get_freeze_count() == apart
    assert gc.isenabled()


def test_failed_poll_leaves_the_collector_enabled() -> None:
    with pytest.raises(ValueError, match="ours"), GcControl().paused_during(lambda: GC_FREEZE_SIZE):
        raise ValueError("ours")
    assert gc.isenabled()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_of_large_polls_are_collected_eventually() -> None:
    heap, gone = GcControl(), []
    for number in range(GC_FREEZES_MAX):
        with heap.paused_during(lambda: GC_FREEZE_SIZE):
            weakref.finalize(Cycle(), gone.append, number)
        assert not gone or number == GC_FREEZES_MAX - 1
    assert gone == list(range(GC_FREEZES_MAX)), "each of them, and none before its time"


def test_memory_is_given_back_after_large_polls_only() -> None:
    trims: list[int] = []
    control = GcControl(lambda: trims.append(size))
    for size in (10, 8000, 7000, 8000, 5, 5, 5, 5, 5, 300, 5, 200):
        with control.paused_during(lambda: size):  # noqa: B023
            pass
    assert trims == [5, 5, 5, 5]
