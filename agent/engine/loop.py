"""The core's loop: when to look, and when to speak.

Looks when the source says that something visible changed, when a dwell time ends, and at each heartbeat.
Speaks when a look changed the picture, and at each heartbeat. What it sees and says is pipeline.step()'s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Protocol

import trio

from agent.engine.step import State, step
from agent.health.stalls import stands_still
from agent.model.faults import FaultMemory
from agent.model.health import DeviceHealth
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

JITTER: Final = 0.1  # heartbeats come up to a tenth early, never late: a thousand nodes fall out of step
MAX_DUTY_CYCLE: Final = 4  # in a flood of wakes a look rests for four times its own length: a fifth of a core

_TIMES: Final = frozenset({"since", "verified"})
_pictured: Final = itemgetter(*(at for at, name in enumerate(DeviceHealth._fields) if name not in _TIMES))


class Source(Protocol):
    """What wakes the core and is read by it: a native thread with a record and a beat of its own."""

    def fileno(self) -> int:
        """Readable when something that a rule can see has changed."""

    def clear(self) -> None:
        """Take note of the wake; before :meth:`read`."""

    def read(self) -> Snapshot | None:
        """The newest whole picture, or None if there is none yet."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How often the core speaks."""

    heartbeat_s: float
    coalesce_ns: int
    watchdog_s: float | None
    """Somebody expects to hear that we are alive at least this often."""

    @property
    def alive_ns(self) -> int | None:
        """Between two signs of life: half of what is expected."""
        return int(self.watchdog_s * NS / 2) if self.watchdog_s else None


class EngineLoop:
    """Drives ``step()`` and publishes what it says."""

    def __init__(
        self,
        *,
        source: Source,
        state: State,
        timing: Timing,
        clock: Callable[[], Instant],
        publish: Callable[[Report], None],
        remember: Callable[[FaultMemory], None],
        alive: Callable[[], None],
        jitter: Callable[[], float],
    ) -> None:
        """
        Args:
            source: Woken by and read.
            state: To begin with.
            timing: Heartbeat, coalescing, signs of life.
            clock: Now, on both clocks.
            publish: Takes a report at once, without blocking.
            remember: Takes what is to outlive the agent, whenever it has changed; likewise.
            alive: Called when a look found every source beating.
            jitter: A number from 0 to 1.
        """
        self._source = source
        self._state = state
        self._timing = timing
        self._clock = clock
        self._publish = publish
        self._remember = remember
        self._alive = alive
        self._jitter = jitter
        self._said: tuple[object, ...] | None = None
        """The picture of what was published last."""
        self._kept = state.gpus.kept
        self._spoke_ns = -(10**18)  # long ago: the first change goes out at once
        self._rest_until_ns = 0
        self._heartbeat_ns = 0
        self._alive_ns = 0

    async def run(self) -> None:
        """Until cancelled."""
        now_ns = self._clock().mono_ns
        self._heartbeat_ns, self._alive_ns = now_ns, now_ns
        while True:
            if await self._wait():
                await self._rest()
            self._source.clear()
            snapshot = self._source.read()
            now = self._clock()
            if snapshot is None:
                self._put_off(now)
            else:
                self._look(snapshot, now)

    def _put_off(self, now: Instant) -> None:
        """The first pass is not over: there is nothing to say, and no life to be signed."""
        self._heartbeat_ns = now.mono_ns + int(self._timing.heartbeat_s * NS)
        self._alive_ns = now.mono_ns + (self._timing.alive_ns or 0)

    def _look(self, snapshot: Snapshot, now: Instant) -> None:
        self._state, report = step(self._state, snapshot, now)
        if report.starting:
            self._put_off(now)
            return
        if self._state.gpus.kept is not self._kept:
            self._kept = self._state.gpus.kept
            self._remember(self._kept)
        picture = visible_state(report)
        changed = picture != self._said
        if changed or now.mono_ns >= self._heartbeat_ns:
            self._publish(report)
            self._said = picture
            self._heartbeat_ns = now.mono_ns + int(
                self._timing.heartbeat_s * NS * (1 - JITTER * self._jitter())
            )
            if changed:
                self._spoke_ns = now.mono_ns
        beating = _is_beating(report, now)
        if self._timing.alive_ns is not None and now.mono_ns >= self._alive_ns:
            self._alive_ns = now.mono_ns + self._timing.alive_ns
            if beating:
                self._alive()
        self._rest_until_ns = now.mono_ns + (MAX_DUTY_CYCLE + 1) * (self._clock().mono_ns - now.mono_ns)

    async def _wait(self) -> bool:
        """True: the source woke us. False: it is time."""
        until_ns = self._owed_ns()
        if self._state.due_ns is not None:
            until_ns = min(until_ns, self._state.due_ns)
        with trio.move_on_after(self._left_s(until_ns)):
            await trio.lowlevel.wait_readable(self._source.fileno())
            return True
        return False

    async def _rest(self) -> None:
        """The first change goes out at once; those that follow it closely go out together."""
        until_ns = max(self._spoke_ns + self._timing.coalesce_ns, self._rest_until_ns)
        if (left_s := self._left_s(min(until_ns, self._owed_ns()))) > 0:
            await trio.sleep(left_s)

    def _owed_ns(self) -> int:
        """When somebody next expects to hear from us, whatever happens."""
        if self._timing.alive_ns is None:
            return self._heartbeat_ns
        return min(self._heartbeat_ns, self._alive_ns)

    def _left_s(self, until_ns: int) -> float:
        return max(0.0, (until_ns - self._clock().mono_ns) / NS)


def _is_beating(report: Report, now: Instant) -> bool:
    """Whether none of the vital sources stands still, nor all of those that found nothing to read."""
    vital = [source for source in report.sources if source.vital]
    stalled = any(source.state is SourceState.STALLED for source in vital)
    return not stalled and any(not stands_still(source, now) for source in vital)


def visible_state(report: Report) -> tuple[object, ...]:
    """What makes a report worth sending at once: all but times, counters and what it costs us.

    Of a source only that it stands still. One that fails does so off and on, and what that means for a device
    the device says.
    """
    return (
        list(map(_pictured, report.devices)),
        report.declaring,
        report.notes,
        report.not_applicable,
        [source.name for source in report.sources if source.state is SourceState.STALLED],
    )
