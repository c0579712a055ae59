"""Hands the newest to somebody who may block on a disk, once at a time; what nobody has taken is replaced."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, ParamSpec

P = ParamSpec("P")

log = logging.getLogger(__name__)


class LatestJob(Generic[P]):
    """There is a thread while somebody is busy with what was handed over, and else none."""

    def __init__(self, to: Callable[P, None]) -> None:
        """``to``: takes as long as it likes, and is never called again before it has returned."""
        self._to = to
        self._lock = threading.Lock()
        self._next: Callable[[], None] | None = None
        self._is_busy = False

    def give(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Returns at once."""
        with self._lock:
            self._next = partial(self._to, *args, **kwargs)
            if not self._is_busy:
                threading.Thread(target=self._run, name="dh-pods-record", daemon=True).start()
                self._is_busy = True  # not before there is a thread: it may be refused

    def _run(self) -> None:
        while True:
            with self._lock:
                work, self._next = self._next, None
                if work is None:
                    self._is_busy = False
                    return
            try:
                work()
            except Exception:  # a mistake there is no reason to hand over nothing any more
                log.exception("what was heard of pods could not be recorded")
