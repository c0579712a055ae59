"""Keeps the record of who used which device, and how it was when that ended, up to date on the disk.

What a use is, and when it ends, is agent.devices.consumers.usage's; the file is agent.store.history's. What
could not be written yet is held in memory, up to a limit, and written as soon as it can be. A disk that is
full or gone is told of once. What takes memory is imported late: SQLite when a device is in use, or was, and
the rest when somebody knows who uses what.
"""

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.errors import DrahealthError
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.model.use_limits import RUNNING_MAX, Limits

if TYPE_CHECKING:
    from agent.devices.consumers.usage import Uses
    from agent.model.consumers import ConsumerMap
    from agent.model.uses import DeviceUsage
    from agent.store.history import History

FILE: Final = "history.sqlite"
"""In the state directory."""
ALIVE_S: Final = 300.0
"""How often it is written that the agent still looks, while something is in use [s]."""
RETRY_S: Final = 10.0
"""After a disk that took nothing [s]."""
SET_S: Final = 60.0
"""A wall clock that moved by more against the other was set [s]."""
TRUST_S: Final = 3600.0
"""How long the wall clock must not have been set before rows go because they are old [s]: one that starts in
another decade is to cost nothing."""

log = logging.getLogger(__name__)


class Recorder:
    """The record, and what of it is not on the disk yet."""

    def __init__(self, state_dir: Path, *, limits: Limits, drivers: Iterable[str] = ()) -> None:
        """
        Args:
            state_dir: Of the agent; it is made when there is something to be kept.
            limits: No rows: nothing is kept.
            drivers: Those that the agent serves.
        """
        self._path = state_dir / FILE
        self._limits = limits
        self._drivers = frozenset(drivers)
        self._uses: Uses | None = None
        self._file: History | None = None
        self._pending: dict[str, DeviceUsage] = {}
        self._merged: set[str] = set()
        self._lost = 0
        self._now = Instant(0, 0)
        self._wrote_ns = self._retry_ns = 0
        self._clock_s, self._set_ns = 0.0, 0
        self._told = ""
        self._told_left_out = False
        self._working = threading.Lock()

    def take(self, known: "ConsumerMap", report: Report, now: Instant) -> None:
        """What is known by now. Takes as long as a disk takes; raises nothing because of one.

        Args:
            known: Made of all sources, those that could not be heard among them.
        """
        if not self._limits.rows or report.starting:
            return
        from agent.devices.consumers.driver_names import states
        from agent.devices.consumers.usage import Uses, follow

        with self._working:
            self._look_at_clock(now)
            uses = self._read(self._uses or Uses(os.urandom(6).hex()))
            step = follow(uses, known, states(report, self._drivers), now)
            self._uses, self._now = step.uses, now
            self._merged.update(step.merged)
            self._hold(step.changed)
            self._tell(step.uses.left_out)
            is_due = bool(step.uses.running) and now.mono_ns - self._wrote_ns >= ALIVE_S * NS
            if (self._pending or self._merged or is_due) and now.mono_ns >= self._retry_ns:
                self._write()

    def close(self, timeout_s: float) -> bool:
        """Write what is not yet written. False if a disk hangs for longer than that, and it was not."""
        thread = threading.Thread(target=self._finish, name="dh-recorder", daemon=True)
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _finish(self) -> None:
        with self._working:
            if self._pending or self._merged or (self._uses and self._uses.running):
                self._write()

    # --- memory ----------------------------------------------------------------------------------------

    def _hold(self, changed: "Iterable[DeviceUsage]") -> None:
        """Until it is written. Of what has ended the oldest goes, should it become too much."""
        for use in changed:
            self._pending.pop(use.id, None)
            self._pending[use.id] = use
        for id_ in self._merged:
            self._pending.pop(id_, None)
        ended = [id_ for id_, use in self._pending.items() if use.ended]
        for id_ in ended[: max(0, len(ended) - self._limits.rows)]:
            del self._pending[id_]
            self._lost += 1

    def _look_at_clock(self, now: Instant) -> None:
        clock_s = now.wall_s - now.mono_ns / NS
        if abs(clock_s - self._clock_s) > SET_S:
            self._clock_s, self._set_ns = clock_s, now.mono_ns

    def _tell(self, left_out: int) -> None:
        if left_out and not self._told_left_out:
            log.warning("%d uses of devices are not recorded: %d are the limit", left_out, RUNNING_MAX)
        self._told_left_out = bool(left_out)

    # --- the disk --------------------------------------------------------------------------------------

    def _read(self, uses: "Uses") -> "Uses":
        """With what an agent before this one has left; again whenever there is another file."""
        from agent.devices.consumers.usage import resume

        if self._file is None and not os.path.lexists(self._path):
            return uses
        try:
            kept = self._history().news()
        except DrahealthError as error:
            self._complain(error)
        else:
            if kept is None:
                return uses
            uses = resume(uses, kept)
        self._hold(one.use for one in uses.running.values())  # the next file has none of them
        return uses

    def _write(self) -> None:
        by_age = self._now.mono_ns - self._set_ns >= TRUST_S * NS
        changed = tuple(self._pending.values())
        try:
            self._history().write(changed, self._merged, self._now.wall_s, by_age=by_age)
        except DrahealthError as error:
            self._complain(error)
            self._retry_ns = self._now.mono_ns + round(RETRY_S * NS)
            return
        if self._lost:
            log.warning("%s: %d uses that ended meanwhile are lost", self._path, self._lost)
        self._pending.clear()
        self._merged.clear()
        self._lost, self._told, self._wrote_ns = 0, "", self._now.mono_ns

    def _complain(self, error: DrahealthError) -> None:
        if str(error) != self._told:
            log.warning("%s; who used which device is held in memory (--state-dir)", error)
        self._told = str(error)

    def _history(self) -> "History":
        if self._file is None:
            from agent.store.history import History  # SQLite is 1 MB that few nodes should pay

            self._file = History(self._path, self._limits)
        return self._file
