"""Who shows reports to people, in a thread of its own: the newest wins, and the end is bounded.

The agent's threads never wait for a terminal (Ctrl-S is enough to stop one), nor for whoever reads a log.
"""

import threading
from abc import ABC, abstractmethod
from typing import Final

from agent.model.report import Report

GOODBYE_S: Final = 0.5
"""How long closing may wait for the output [s]: the agent must be gone within 2 s of its signal."""


class ReportPrinter(ABC):
    """Takes reports from any thread, and tells of them in its own until it is closed."""

    def __init__(self, name: str, lock: "threading.RLock | None" = None) -> None:
        """``name`` is the thread's. It starts at once: whatever ``_run`` needs must be there before.

        ``lock`` is one that others hold when they have news; without it there is one of its own.
        """
        self._report: Report | None = None
        self._is_closed = False
        self._news = threading.Condition(lock)
        # A daemon thread: one that hangs in its output must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def show(self, report: Report) -> None:
        """Tells of this report soon, if no newer one comes. Any thread; never blocks on the output."""
        with self._news:
            self._report = report
            self._news.notify()

    def close(self) -> bool:
        """Tells what is left, and ends. Bounded by GOODBYE_S.

        Returns:
            Whether that was done; if not, nobody reads the output.
        """
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join(GOODBYE_S)
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """The thread: waits on ``_news`` for ``_report`` to change, until ``_is_closed``."""
