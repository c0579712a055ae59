"""Gets a driver's taints to the driver: the newest, not too often, and again until they were taken.

What they are agent.devices.taints decides. Nothing here talks to Kubernetes: the driver's callback does, and
may fail or hang as long as the API server is away; that delays no verdict.
"""

import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import trio

from agent.config.config import Config
from agent.devices.taints import TaintPolicy, decide, domain_of, restore
from agent.model.report import Report
from agent.model.taint import Taint, Taints
from agent.model.time import NS, Instant, rfc3339
from agent.store.taints import WriteError, load, save
from agent.system import jitter as dice

DEBOUNCE_S: Final = 1.0
"""What changes together is published together [s]."""
BETWEEN_S: Final = 5.0
"""From the end of a call that went well to the next [s]."""
CALL_S: Final = 60.0
"""How long a call may take [s]."""
RETRY_S: Final = 1.0
"""Pause after a call that failed, at its longest; twice as long after each further one... [s]"""
RETRY_MAX_S: Final = 60.0
"""...up to this."""
KEEP_AGAIN_S: Final = 60.0
"""After a disk did not take the file [s]."""

Callback = Callable[[Taints], object]
"""A plain function is called in a thread of its own; an async function in our Trio, and cancelled at its
deadline. They are taken when it returns; when it raises, it is called again."""

log = logging.getLogger(__name__)


def policy_of(config: Config) -> TaintPolicy:
    """What the operator's configuration says about taints."""
    return TaintPolicy(
        evict=config.taint_evict,
        quiet_s=config.taint_quiet_s,
        tell_unknown=config.taint_tell_unknown,
        inform=config.taint_inform,
    )


class TaintPublisher:
    """The newest taints, and their way to the driver and to the disk."""

    def __init__(
        self,
        callback: Callback | None,
        *,
        driver: str,
        policy: TaintPolicy | None = None,
        path: Path | None = None,
        clock: Callable[[], Instant],
        jitter: Callable[[], float] = dice.random_fraction,
    ) -> None:
        """Reads the file, which can take as long as a disk takes.

        Args:
            callback: Takes the taints; None: nobody does, they are only to be looked at.
            driver: Whose devices.
            policy: What the operator decided; None: nothing.
            path: Of the file that keeps when taints were published first; None: not kept.
            clock: Now, on both clocks.
            jitter: A number from 0 to 1.

        Raises:
            ConfigError: the driver's name can begin no taint's key, and the policy says no domain.
        """
        self._callback = callback
        self._driver = driver
        self._policy = policy or TaintPolicy()
        self._path = path
        self._clock = clock
        self._jitter = jitter
        domain_of(driver, self._policy)
        kept, problem = load(path) if path is not None else (Taints(), "")
        if problem:
            log.warning("%s; taints count as published anew", problem)
        self._past = restore(kept, driver, self._policy)
        self._saved = kept
        self._report: Report | None = None
        """The newest that was a picture."""
        self._reported = trio.Event()
        self._changed = trio.Event()
        self._unkept = trio.Event()
        self._limiter = trio.CapacityLimiter(1)  # a callback that hangs takes nobody else's thread

    @property
    def taints(self) -> Taints:
        """As they are now; before the first report as an earlier life left them. From any thread."""
        return self._past.taints

    def take(self, report: Report, now: Instant) -> None:
        """From the Trio thread; returns at once. A report that is starting counts for nothing."""
        if report.starting:
            return
        first = self._report is None
        before, self._report = self._past, report
        self._past = decide(before, report, self._driver, self._policy, now)
        self._reported.set()
        if first or self._past.taints != before.taints:
            self._changed.set()
        if self._past.kept != self._saved:
            self._unkept.set()

    async def run(self) -> None:
        """Publishes and keeps until cancelled. The first call comes with the first report that is a picture,
        also if nothing is tainted: taints that an earlier life left must go.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._decide_in_time)
            if self._callback is not None:
                nursery.start_soon(self._publish, self._callback)
            if self._path is not None:
                nursery.start_soon(self._keep, self._path)

    async def _decide_in_time(self) -> None:
        """Quiet times end though nobody reports anything."""
        while True:
            self._reported = trio.Event()
            with trio.move_on_after(self._left_s()) as scope:
                await self._reported.wait()
            if scope.cancelled_caught and self._report is not None:
                self.take(self._report, self._clock())

    def _left_s(self) -> float:
        due_ns = self._past.due_ns
        return float("inf") if due_ns is None else max(0.01, (due_ns - self._clock().mono_ns) / NS)

    # --- to the driver -------------------------------------------------------------------------------------

    async def _publish(self, callback: Callback) -> None:
        told, pause_s = "", RETRY_S
        while True:
            await self._changed.wait()
            await trio.sleep(DEBOUNCE_S)
            self._changed = trio.Event()
            error = await self._call(callback, self.taints)
            if error is None:
                if told:
                    log.info("driver %s takes its taints again", self._driver)
                told, pause_s = "", RETRY_S
                await trio.sleep(BETWEEN_S)
                continue
            text = traceback.format_exception_only(error)[-1].strip()
            if text != told:
                words = "driver %s did not take its taints, and is asked again: %s"
                log.warning(words, self._driver, text, exc_info=error)
            told = text
            self._changed.set()  # even if all is as it was: nobody knows what became of them
            await trio.sleep(self._jitter() * pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _call(self, callback: Callback, taints: Taints) -> BaseException | None:
        """What went wrong. A thread that hangs is waited for: there is never a second one."""
        if inspect.iscoroutinefunction(callback):
            answer = _ask(callback, taints)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell_of_hanging)
                answer = await trio.to_thread.run_sync(
                    _ask, callback, taints, abandon_on_cancel=True, limiter=self._limiter
                )
                nursery.cancel_scope.cancel()
        return answer.error if answer.rest is None else await _awaited(answer.rest)

    async def _tell_of_hanging(self) -> None:
        await trio.sleep(CALL_S)
        log.warning("driver %s has not taken its taints within %g s; waiting for it", self._driver, CALL_S)

    # --- to the disk ---------------------------------------------------------------------------------------

    async def _keep(self, path: Path) -> None:
        """A write that hangs is waited for; there is never more than one."""
        told: int | None = None
        while True:
            await self._unkept.wait()
            self._unkept = trio.Event()
            kept = self._past.kept
            try:
                await trio.to_thread.run_sync(save, path, kept, abandon_on_cancel=True)
            except WriteError as error:
                if error.errno != told:
                    log.warning("%s; taints count as published anew when the driver starts again", error)
                told = error.errno
                await trio.sleep(KEEP_AGAIN_S)
                self._unkept.set()
            else:
                self._saved, told = kept, None


class _Answer(NamedTuple):
    """Of a function of the driver's."""

    error: BaseException | None = None
    rest: Awaitable[object] | None = None
    """What it left to be awaited."""


def _ask(callback: Callback, taints: Taints) -> _Answer:
    """Nothing that the driver's code raises may end us."""
    try:
        result = callback(taints)
    except BaseException as error:
        return _Answer(error)
    return _Answer(rest=result) if inspect.isawaitable(result) else _Answer()


async def _awaited(rest: Awaitable[object]) -> BaseException | None:
    try:
        with trio.move_on_after(CALL_S) as scope:
            await rest
    except (Exception, SystemExit) as error:
        return error
    return TimeoutError(f"no answer within {CALL_S:g} s") if scope.cancelled_caught else None


def as_objects(taints: Iterable[Taint]) -> list[dict[str, str]]:
    """One device's taints as its entry in a ResourceSlice has them: ``spec.devices[].taints``."""
    return [
        {
            "key": taint.key,
            **({"value": taint.value} if taint.value else {}),
            "effect": str(taint.effect),
            "timeAdded": rfc3339(taint.added_wall_s),
        }
        for taint in taints
    ]
