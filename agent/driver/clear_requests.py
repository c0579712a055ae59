"""Unanswered requests of operators to clear remembered faults (``drahealth clear``).

The agent's API adds them, and the engine loop answers them.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from agent.model.cleared_faults import ClearRequest, ClearResult, Operator

Unanswered = tuple[ClearRequest, ...]


class ClearRequestQueue:
    """Unanswered requests to clear faults, in order. Thread-safe. Never blocks."""

    def __init__(self, set_requests: Callable[[Unanswered], None]) -> None:
        """Create an empty queue; ``set_requests`` is called with all requests after each change."""
        self._set_requests: Final = set_requests
        self._lock = threading.Lock()
        self._last_number = 0
        self._open: dict[ClearRequest, Future[ClearResult]] = {}

    def submit(self, device: str, code: str, operator: Operator) -> Future[ClearResult]:
        """Add a request to clear faults of a device.

        The returned future gets the answer; cancelling the future withdraws the request.
        """
        answer: Future[ClearResult] = Future()
        with self._lock:
            self._last_number += 1
            request = ClearRequest(self._last_number, device, code, operator)
            self._open[request] = answer
            self._set_requests(tuple(self._open))
        answer.add_done_callback(lambda _: self._remove({request.number}))
        return answer

    def answer(self, results: Iterable[ClearResult]) -> None:
        """Answer the requests that the results belong to; results of withdrawn requests are ignored."""
        by_number = {result.number: result for result in results}
        with self._lock:
            answered = [
                (request, future) for request, future in self._open.items() if request.number in by_number
            ]
        for request, future in answered:
            if future.set_running_or_notify_cancel():
                future.set_result(by_number[request.number])

    def _remove(self, numbers: set[int]) -> None:
        with self._lock:
            self._open = {
                request: future for request, future in self._open.items() if request.number not in numbers
            }
            self._set_requests(tuple(self._open))
