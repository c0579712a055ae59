"""Prepares and unprepares that are in progress: one run per claim at a time, shared by the kubelet's calls.

The kubelet repeats a call after its timeout, while the driver may still work on the first one. So a run
continues after the call that started it has ended, and the next call for the claim waits for the same run.
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
from agent.serve.dra_plugin.prepared_devices import PreparedDevice
from agent.system.timing import LogRateLimiter

RUNS_LIMIT: Final = 256
"""Maximum number of runs at a time, each in a thread; only a driver that hangs reaches it."""

log = logging.getLogger(__name__)

ClaimOutcome = tuple[PreparedDevice, ...] | PrepareVerdict
"""Devices of a prepared claim, no devices after an unprepare, or the verdict on a failure."""


class ClaimOperation(StrEnum):
    """Operation of the driver on a claim."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"


ClaimRunner = Callable[[ClaimOperation, ClaimRef, float], Awaitable[tuple[PreparedDevice, ...]]]
"""Function that prepares or unprepares one claim; the last argument is the event loop's time until which it
may wait for other claims. Raises PrepareError."""

ClassifyFailure = Callable[[ClaimRef, Exception], PrepareVerdict]
"""Function that returns the verdict on a failure of a claim that the driver's code did not raise."""


@dataclass(slots=True, eq=False)
class _ClaimRun:
    """Prepare or unprepare of one claim that is in progress or waits for the run before it."""

    operation: ClaimOperation
    ref: ClaimRef
    before: "_ClaimRun | None"
    """Earlier run of the claim for which this run waits; None: this run does not wait."""
    task: "asyncio.Task[ClaimOutcome]" = field(init=False)

    def unfinished_run(self) -> "_ClaimRun | None":
        """Return the newest unfinished run of the claim: this one or an earlier one; None: all are
        finished."""
        run: _ClaimRun | None = self
        while run is not None and run.task.done():
            run = run.before
        return run


class InFlightClaims:
    """Runs in progress of one instance of the driver: at most one per claim at a time. Event loop only."""

    def __init__(self, runner: ClaimRunner, classify: ClassifyFailure) -> None:
        self._runner = runner
        self._classify = classify
        self._last: dict[str, _ClaimRun] = {}
        self._slots = asyncio.Semaphore(RUNS_LIMIT)
        self._log_limit = LogRateLimiter()

    def join_or_start(
        self, operation: ClaimOperation, ref: ClaimRef, until_s: float
    ) -> "asyncio.Task[ClaimOutcome]":
        """Return the task of the claim's run for an operation; start a run if none is in progress.

        A new run first waits for the claim's run of the other operation, until ``until_s`` (the event loop's
        time). The run itself has no time limit. The task never raises an exception.
        """
        last = self._last.get(ref.uid)
        if last is not None and (last.operation, last.ref) == (operation, ref):
            return last.task
        run = _ClaimRun(operation, ref, last)
        run.task = asyncio.create_task(self._run(run, until_s))
        run.task.add_done_callback(lambda _: self._forget(run))
        self._last[ref.uid] = run
        return run.task

    def _forget(self, run: _ClaimRun) -> None:
        """Remove a finished run; if it never began, keep the run before it."""
        if self._last.get(run.ref.uid) is run:
            holder = run.unfinished_run()
            if holder is None:
                del self._last[run.ref.uid]
            else:
                self._last[run.ref.uid] = holder

    async def _run(self, run: _ClaimRun, until_s: float) -> ClaimOutcome:
        try:
            await self._begin(run, until_s)
            try:
                return await self._runner(run.operation, run.ref, until_s)
            finally:
                self._slots.release()
        except PrepareError as error:
            return error.verdict
        except TransientError as error:
            return self._classify(run.ref, error)
        except Exception as error:  # an internal error fails only this claim
            log.exception(
                "claim %s: %s failed: internal error; reported to the kubelet", run.ref, run.operation
            )
            return self._classify(run.ref, error)

    async def _begin(self, run: _ClaimRun, until_s: float) -> None:
        """Wait for the claim's earlier runs and a free slot. Raises TransientError at `until_s`."""
        while run.before is not None and (holder := run.before.unfinished_run()) is not None:
            done, _ = await asyncio.wait({holder.task}, timeout=_left_s(until_s))
            if not done:
                raise TransientError(
                    f"the claim's previous {holder.operation} is not done yet", code="deadline"
                )
        try:
            async with asyncio.timeout(_left_s(until_s)):
                await self._slots.acquire()
        except TimeoutError:
            if count := self._log_limit.tick():
                log.warning(
                    "claims: limit of %d claims at a time reached; %d more timed out; the driver may hang",
                    RUNS_LIMIT, count,
                )  # fmt: skip
            raise TransientError(
                f"limit of {RUNS_LIMIT} claims at a time reached; none finished in time", code="deadline"
            ) from None
        run.before = None


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time())
