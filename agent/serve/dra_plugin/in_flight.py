"""What is being prepared and unprepared right now: of each claim one thing at a time, whoever asks.

The kubelet gives up after its deadline and comes again, while the driver still works on the first call. So a
run belongs to its claim, not to the call that began it: it goes on when the call has ended, and the next call
for the same joins it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agent.model.claim import ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.errors import PrepareError, TransientError
from agent.serve.dra_plugin.result import PreparedDevice
from agent.system.rate_limit import RateLimiter

RUNS_LIMIT: Final = 256
"""Claims that are worked on at a time, each in a thread. Only a driver that hangs has as many."""

log = logging.getLogger(__name__)

Outcome = tuple[PreparedDevice, ...] | PrepareVerdict
"""The devices of a claim (none of one that was unprepared), or why there are none."""


class Kind(StrEnum):
    """What is asked for."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"


Work = Callable[[Kind, ClaimRef, float], Awaitable[tuple[PreparedDevice, ...]]]
"""Prepares or unprepares one claim; waits for others until then, as the loop's time. Raises PrepareError."""

Judge = Callable[[ClaimRef, Exception], PrepareVerdict]
"""Of what kind a failure is that no driver saw."""


@dataclass(slots=True, eq=False)
class _InFlight:
    kind: Kind
    ref: ClaimRef
    before: "_InFlight | None"
    """What it waits for; once it has begun, nothing."""
    task: "asyncio.Task[Outcome]" = field(init=False)

    def holder(self) -> "_InFlight | None":
        """Which run has the claim: this one, or one that this has waited for in vain; None: none has it."""
        run: _InFlight | None = self
        while run is not None and run.task.done():
            run = run.before
        return run


class InFlightClaims:
    """The runs of one instance. Of one loop."""

    def __init__(self, work: Work, judge: Judge) -> None:
        self._work = work
        self._judge = judge
        self._last: dict[str, _InFlight] = {}
        self._places = asyncio.Semaphore(RUNS_LIMIT)
        self._complaints = RateLimiter()

    def join(self, kind: Kind, ref: ClaimRef, until_s: float) -> "asyncio.Task[Outcome]":
        """The run of that kind of that claim, begun if there is none; it never raises.

        What else is under way for the claim is waited for first, but not longer than until ``until_s`` (the
        loop's time). Once begun, a run has all the time that the driver takes.
        """
        last = self._last.get(ref.uid)
        if last is not None and (last.kind, last.ref) == (kind, ref):
            return last.task
        run = _InFlight(kind, ref, last)
        run.task = asyncio.create_task(self._run(run, until_s))
        run.task.add_done_callback(lambda _: self._forget(run))
        self._last[ref.uid] = run
        return run.task

    def _forget(self, run: _InFlight) -> None:
        """It is done; if it has never begun, what it waited for is still under way."""
        if self._last.get(run.ref.uid) is run:
            holder = run.holder()
            if holder is None:
                del self._last[run.ref.uid]
            else:
                self._last[run.ref.uid] = holder

    async def _run(self, run: _InFlight, until_s: float) -> Outcome:
        try:
            await self._begin(run, until_s)
            try:
                return await self._work(run.kind, run.ref, until_s)
            finally:
                self._places.release()
        except PrepareError as error:
            return error.verdict
        except TransientError as error:
            return self._judge(run.ref, error)
        except Exception as error:  # a mistake of ours: it is this claim's all the same
            log.exception("%s of claim %s", run.kind, run.ref)
            return self._judge(run.ref, error)

    async def _begin(self, run: _InFlight, until_s: float) -> None:
        """Returns when the claim is free, and there is a place. Raises TransientError if that is too late."""
        while run.before is not None and (holder := run.before.holder()) is not None:
            done, _ = await asyncio.wait({holder.task}, timeout=_left_s(until_s))
            if not done:
                raise TransientError(f"its {holder.kind} before is not done yet", code="deadline")
        try:
            async with asyncio.timeout(_left_s(until_s)):
                await self._places.acquire()
        except TimeoutError:
            if count := self._complaints.tick():
                words = "%d claims are being worked on, %d more waited in vain; does the driver hang?"
                log.warning(words, RUNS_LIMIT, count)
            raise TransientError(f"{RUNS_LIMIT} others were not done in time", code="deadline") from None
        run.before = None


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time())
