"""Prepares and unprepares that are in progress: one run per claim at a time, shared by the kubelet's calls.

The kubelet repeats a call after its timeout, while the driver may still work on the first one. So a run
continues after the call that started it has ended, and the next call for the claim waits for the same run.
A run for which no call waits makes no further tries.
"""

import asyncio
import logging
import threading
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
"""Largest number of prepares and unprepares in progress, each in a thread: only a hung driver reaches it."""

log = logging.getLogger(__name__)

ClaimOutcome = tuple[PreparedDevice, ...] | PrepareVerdict
"""Outcome of a run: the prepared devices, no devices after an unprepare, or the verdict on a failure."""


class ClaimOperation(StrEnum):
    """Operation of the driver on a claim: prepare or unprepare."""

    PREPARE = "prepare"
    UNPREPARE = "unprepare"


ClaimRunner = Callable[
    [ClaimOperation, ClaimRef, float, threading.Event], Awaitable[tuple[PreparedDevice, ...]]
]
"""Function that prepares or unprepares one claim. Its last arguments are the event loop's time until which it
may wait for other claims, and an event that is set while no call waits for the run. Raises PrepareError."""

ClassifyFailure = Callable[[ClaimRef, Exception], PrepareVerdict]
"""Function that returns the verdict on a failure of a claim that the driver's code did not raise."""


@dataclass(slots=True, eq=False)
class _ClaimRun:
    """Prepare or unprepare of one claim that is in progress, or that waits for an earlier run of it."""

    operation: ClaimOperation
    ref: ClaimRef
    before: "_ClaimRun | None"
    """Earlier run of the claim for which this run waits; None: this run does not wait."""
    calls: int = 0
    """Number of the kubelet's calls that wait for the run."""
    unawaited: threading.Event = field(default_factory=threading.Event)
    """Set while no call waits for the run, so that it makes no further tries."""
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
        self._of_task: dict[asyncio.Task[ClaimOutcome], _ClaimRun] = {}
        self._slots = asyncio.Semaphore(RUNS_LIMIT)
        self._log_limit = LogRateLimiter()

    def join_or_start(
        self, operation: ClaimOperation, ref: ClaimRef, until_s: float
    ) -> "asyncio.Task[ClaimOutcome]":
        """Return the task of the claim's prepare or unprepare; start one if none is in progress.

        A new run first waits for the claim's run of the other operation, until ``until_s`` (the event loop's
        time). The run itself has no time limit. The task never raises an exception. The caller calls
        :meth:`leave` when it no longer waits for the run.
        """
        run = self._last.get(ref.uid)
        if run is None or (run.operation, run.ref) != (operation, ref):
            run = self._start(operation, ref, run, until_s)
        run.calls += 1
        run.unawaited.clear()
        return run.task

    def leave(self, task: "asyncio.Task[ClaimOutcome]") -> None:
        """End a caller's wait for the run of ``task``.

        Without any caller the run continues, but makes no further tries.
        """
        run = self._of_task.get(task)
        if run is not None:  # else the run is finished
            run.calls -= 1
            if not run.calls:
                run.unawaited.set()

    def _start(
        self, operation: ClaimOperation, ref: ClaimRef, before: _ClaimRun | None, until_s: float
    ) -> _ClaimRun:
        run = _ClaimRun(operation, ref, before)
        run.task = asyncio.create_task(self._run(run, until_s))
        run.task.add_done_callback(lambda _: self._forget(run))
        self._last[ref.uid] = self._of_task[run.task] = run
        return run

    def _forget(self, run: _ClaimRun) -> None:
        """Stop tracking a claim's ended run; if it never began, track the unfinished run before it."""
        del self._of_task[run.task]
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
                return await self._runner(run.operation, run.ref, until_s, run.unawaited)
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
        """Wait until the claim's earlier runs have ended, and fewer than RUNS_LIMIT claims are in progress.

        Raises TransientError at `until_s`.
        """
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
                    "claims: %d claims are in progress, the limit; %d more timed out while waiting; the "
                    "driver may hang",
                    RUNS_LIMIT, count,
                )  # fmt: skip
            raise TransientError(
                f"limit of {RUNS_LIMIT} claims at a time reached; none finished in time", code="deadline"
            ) from None
        run.before = None


def _left_s(until_s: float) -> float:
    return max(0.0, until_s - asyncio.get_running_loop().time())
