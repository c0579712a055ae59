"""Queue of requests to clear faults: each is in the snapshots until it is answered or withdrawn."""

from agent.engine.loop import ClearRequestQueue, Unanswered
from agent.model.cleared_faults import ClearResult, Operator

ROOT = Operator(0, 1)


class RecordingSource:
    """Receiver of the unanswered requests."""

    def __init__(self) -> None:
        self.queue = ClearRequestQueue(self.set_requests)
        self.requests: Unanswered = ()

    def set_requests(self, requests: Unanswered) -> None:
        self.requests = requests

    @property
    def numbers(self) -> list[int]:
        """Numbers of the unanswered requests."""
        return [request.number for request in self.requests]


def test_answered_request_leaves_queue_with_its_own_answer() -> None:
    source = RecordingSource()
    first, second = (source.queue.submit(name, "", ROOT) for name in ("gpu-0", "gpu-1"))
    assert source.numbers == [1, 2]
    assert source.queue.accept([ClearResult(2)]) == frozenset()
    source.queue.answer([ClearResult(2, reason="b")])
    assert (source.numbers, second.result(0).reason, first.done()) == ([1], "b", False)
    source.queue.accept([ClearResult(1)])
    source.queue.answer([ClearResult(1, reason="a")])
    assert (source.numbers, first.result(0).reason) == ([], "a")


def test_withdrawn_request_is_not_accepted() -> None:
    source = RecordingSource()
    first, second = (source.queue.submit("gpu-0", "", ROOT) for _ in range(2))
    assert first.cancel()
    assert source.numbers == [2]
    assert source.queue.accept([ClearResult(1), ClearResult(2)]) == {1}
    assert source.queue.accept([ClearResult(2)]) == frozenset()
    source.queue.answer([ClearResult(2)])
    assert (first.cancelled(), second.result(0)) == (True, ClearResult(2))


def test_accepted_request_cannot_be_withdrawn() -> None:
    source = RecordingSource()
    future = source.queue.submit("gpu-0", "", ROOT)
    source.queue.accept([ClearResult(1)])
    assert not future.cancel()
    source.queue.answer([ClearResult(1)])
    assert future.result(0) == ClearResult(1)
