"""In-flight prepares and unprepares: one run per claim at a time, shared by all calls for the claim.

The kubelet gives up after its deadline and retries while the driver still works on the first call. So a run
belongs to its claim, not to the call that started it: it continues when the call has ended, and the next
call for the same claim joins it.
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
from agent.system.timing import RateLimiter

RUNS_LIMIT: Final = 256
"""Maximum number of claims that are prepared or unprepared at a time, each in a thread. Only a driver that
hangs reaches this limit."""

log = logging.getLogger(__name__)

ClaimOutcome = tuple[PreparedDevice, ...] | PrepareVerdict
"""Devices of a prepared claim (empty: the claim was unprepared), or the error of the failed run."""


class RunKind(StrEnum):
    """Kind of a run: prepare or unprepare."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"


ClaimRunner = Callable[[RunKind, ClaimRef, float], Awaitable[tuple[PreparedDevice, ...]]]
"""Function that prepares or unprepares one claim, after waiting for other claims until the given time of the
event loop. Raises PrepareError."""

ClassifyFailure = Callable[[ClaimRef, Exception], PrepareVerdict]
"""Function that classifies a failure of a claim outside of the driver's code."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """Unfinished prepare or unprepare of one claim."""

    kind: RunKind
    ref: ClaimRef
    before: "_InFlight | None"
    """Run for the same claim that this run waits for; None: this run has begun, or has none to wait for."""
    task: "asyncio.Task[ClaimOutcome]" = field(init=False)

    def holder(self) -> "_InFlight | None":
        """Return the run that holds the claim: this run, or an unfinished run before it; None: no run holds
        the claim.
        """
        run: _InFlight | None = self
        while run is not None and run.task.done():
            run = run.before
        return run


class InFlightClaims:
    """In-flight prepares and unprepares of one instance of the driver. Event loop only."""

    def __init__(self, runner: ClaimRunner, classify: ClassifyFailure) -> None:
        self._runner = runner
        self._classify = classify
        self._last: dict[str, _InFlight] = {}
        self._slots = asyncio.Semaphore(RUNS_LIMIT)
        self._log_limit = RateLimiter()

    def join(self, kind: RunKind, ref: ClaimRef, until_s: float) -> "asyncio.Task[ClaimOutcome]":
        """Return the task of that kind for the claim; start a task if there is none. The task never raises.

        Another run for the claim is waited for first, but not longer than until ``until_s`` (the loop's
        time). Once begun, a run has all the time that the driver takes.
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
        """Remove a finished run; if this run never began, the run before it remains."""
        if self._last.get(run.ref.uid) is run:
            holder = run.holder()
            if holder is None:
                del self._last[run.ref.uid]
            else:
                self._last[run.ref.uid] = holder

    async def _run(self, run: _InFlight, until_s: float) -> ClaimOutcome:
        try:
            await self._begin(run, until_s)
            try:
                return await self._runner(run.kind, run.ref, until_s)
            finally:
                self._slots.release()
        except PrepareError as error:
            return error.verdict
        except TransientError as error:
            return self._classify(run.ref, error)
        except Exception as error:  # an internal error fails this claim only
            log.exception("claim %s: %s failed: internal error", run.ref, run.kind)
            return self._classify(run.ref, error)

    async def _begin(self, run: _InFlight, until_s: float) -> None:
        """Wait until no other run holds the claim and fewer than RUNS_LIMIT runs are active.

        Raises TransientError if that takes until `until_s`.
        """
        while run.before is not None and (holder := run.before.holder()) is not None:
            done, _ = await asyncio.wait({holder.task}, timeout=_left_s(until_s))
            if not done:
                raise TransientError(f"the claim's previous {holder.kind} is not done yet", code="deadline")
        try:
            async with asyncio.timeout(_left_s(until_s)):
                await self._slots.acquire()
        except TimeoutError:
            if count := self._log_limit.tick():
                log.warning(
                    "claims: limit of %d in-flight claims reached; %d more timed out; the driver may hang",
                    RUNS_LIMIT,
                    count,
                )
            raise TransientError(
                f"{RUNS_LIMIT} other claims were not done in time", code="deadline"
            ) from None
        run.before = None


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time())
