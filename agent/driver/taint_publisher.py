"""Publisher of a driver's taints: passes the newest taints to the driver, rate-limited, until they are
published.

agent.devices.taints decides the taints. Nothing here calls Kubernetes: the driver's callback does. A callback
that fails or hangs while the API server is away delays no verdict.
"""

import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import trio

from agent.config.config import Config
from agent.devices.taints import TaintPolicy, decide_taints, domain_of, restore_taints
from agent.model.report import Report
from agent.model.taint import Taint, Taints
from agent.model.time import NS, Instant, rfc3339
from agent.store.taints import WriteError, load, save
from agent.system.timing import random_fraction

DEBOUNCE_S: Final = 1.0
"""Delay after a change, so that several changes are published together [s]."""
MIN_INTERVAL_S: Final = 5.0
"""Shortest time from a successful call to the next call [s]."""
CALL_S: Final = 60.0
"""Longest duration of a call [s]."""
RETRY_S: Final = 1.0
"""Upper bound of the pause after a failed call, doubled after each further one [s]."""
RETRY_MAX_S: Final = 60.0
"""Upper bound of all pauses [s]."""
SAVE_RETRY_S: Final = 60.0
"""Delay after a failed write of the file [s]."""

TaintCallback = Callable[[Taints], object]
"""Function of the driver that publishes taints. A plain function is called in a thread of its own; an async
one in the core's Trio loop, and cancelled at its deadline. When it raises, it is called again."""

log = logging.getLogger(__name__)


def policy_of(config: Config) -> TaintPolicy:
    """Return the taint policy of a configuration."""
    return TaintPolicy(
        evict=config.taint_evict,
        quiet_s=config.taint_quiet_s,
        report_unknown=config.taint_unknown,
        inform=config.taint_inform,
    )


class TaintPublisher:
    """Newest taints of one driver, passed to its callback and saved on disk."""

    def __init__(
        self,
        callback: TaintCallback | None,
        *,
        driver: str,
        policy: TaintPolicy | None = None,
        path: Path | None = None,
        clock: Callable[[], Instant],
        jitter: Callable[[], float] = random_fraction,
    ) -> None:
        """Load the saved taints. Blocks while a disk hangs.

        Args:
            callback: Publishes the taints; None: they can only be read.
            driver: Name of the driver.
            policy: Policy of the operator; None: the default.
            path: File that keeps the time since which each taint is published; None: not saved.
            clock: Returns the time on both clocks.
            jitter: Returns a random number from 0 to 1.

        Raises:
            ConfigError: The driver's name is no valid prefix of a taint key, and the policy has no domain.
        """
        self._callback = callback
        self._driver = driver
        self._policy = policy or TaintPolicy()
        self._path = path
        self._clock = clock
        self._jitter = jitter
        domain_of(driver, self._policy)
        saved, problem = load(path) if path is not None else (Taints(), "")
        if problem:
            log.warning("%s; the timeAdded of all taints starts again", problem)
        self._decided = restore_taints(saved, driver, self._policy)
        self._saved = saved
        self._report: Report | None = None
        """Newest complete report."""
        self._reported = trio.Event()
        self._changed = trio.Event()
        self._unsaved = trio.Event()
        self._limiter = trio.CapacityLimiter(1)  # a hung callback keeps only its own thread

    @property
    def taints(self) -> Taints:
        """Current taints; before the first report those of the last run. Thread-safe."""
        return self._decided.taints

    def update(self, report: Report, now: Instant) -> None:
        """Decide the taints for a new report; incomplete reports are ignored. Core thread only. Never
        blocks."""
        if report.starting:
            return
        first = self._report is None
        before, self._report = self._decided, report
        self._decided = decide_taints(before, report, self._driver, self._policy, now)
        self._reported.set()
        if first or self._decided.taints != before.taints:
            self._changed.set()
        if self._decided.kept != self._saved:
            self._unsaved.set()

    async def run(self) -> None:
        """Publish and save taints until cancelled.

        The first call comes with the first complete report, even without taints: taints of the last run
        must be removed.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._update_when_due)
            if self._callback is not None:
                nursery.start_soon(self._publish, self._callback)
            if self._path is not None:
                nursery.start_soon(self._save, self._path)

    async def _update_when_due(self) -> None:
        """Decide the taints again when a delay of a taint ends without a new report."""
        while True:
            self._reported = trio.Event()
            with trio.move_on_after(self._time_left_s()) as scope:
                await self._reported.wait()
            if scope.cancelled_caught and self._report is not None:
                self.update(self._report, self._clock())

    def _time_left_s(self) -> float:
        due_ns = self._decided.due_ns
        return float("inf") if due_ns is None else max(0.01, (due_ns - self._clock().mono_ns) / NS)

    # --- driver --------------------------------------------------------------------------------------------

    async def _publish(self, callback: TaintCallback) -> None:
        logged, pause_s = "", RETRY_S
        while True:
            await self._changed.wait()
            await trio.sleep(DEBOUNCE_S)
            self._changed = trio.Event()
            error = await self._call(callback, self.taints)
            if error is None:
                if logged:
                    log.info("driver %s: publishing taints works again", self._driver)
                logged, pause_s = "", RETRY_S
                await trio.sleep(MIN_INTERVAL_S)
                continue
            text = traceback.format_exception_only(error)[-1].strip()
            if text != logged:
                log.warning(
                    "driver %s: publishing taints failed: %s; retrying", self._driver, text, exc_info=error
                )
            logged = text
            self._changed.set()  # even if nothing changed: the failed call may have done a part
            await trio.sleep(self._jitter() * pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _call(self, callback: TaintCallback, taints: Taints) -> BaseException | None:
        """Call the callback; returns its error or None. While a call hangs, no second call starts."""
        if inspect.iscoroutinefunction(callback):
            result = _call_safely(callback, taints)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._log_hang)
                result = await trio.to_thread.run_sync(
                    _call_safely, callback, taints, abandon_on_cancel=True, limiter=self._limiter
                )
                nursery.cancel_scope.cancel()
        return result.error if result.awaitable is None else await _await_safely(result.awaitable)

    async def _log_hang(self) -> None:
        await trio.sleep(CALL_S)
        log.warning("driver %s: publishing taints takes longer than %g s; waiting", self._driver, CALL_S)

    # --- disk ----------------------------------------------------------------------------------------------

    async def _save(self, path: Path) -> None:
        """Save taints until cancelled. While a write hangs, no second write starts."""
        logged_errno: int | None = None
        while True:
            await self._unsaved.wait()
            self._unsaved = trio.Event()
            saved = self._decided.kept
            try:
                await trio.to_thread.run_sync(save, path, saved, abandon_on_cancel=True)
            except WriteError as error:
                if error.errno != logged_errno:
                    log.warning("%s; after a restart the timeAdded of new taints starts again", error)
                logged_errno = error.errno
                await trio.sleep(SAVE_RETRY_S)
                self._unsaved.set()
            else:
                self._saved, logged_errno = saved, None


class _CallResult(NamedTuple):
    """Result of a call of the driver's function."""

    error: BaseException | None = None
    awaitable: Awaitable[object] | None = None
    """Awaitable that the function returned; None: the function was plain."""


def _call_safely(callback: TaintCallback, taints: Taints) -> _CallResult:
    """Call the driver's function and return its result or the exception that it raised."""
    try:
        result = callback(taints)
    except BaseException as error:
        return _CallResult(error)
    return _CallResult(awaitable=result) if inspect.isawaitable(result) else _CallResult()


async def _await_safely(awaitable: Awaitable[object]) -> BaseException | None:
    try:
        with trio.move_on_after(CALL_S) as scope:
            await awaitable
    except (Exception, SystemExit) as error:
        return error
    return TimeoutError(f"no answer within {CALL_S:g} s") if scope.cancelled_caught else None


def as_objects(taints: Iterable[Taint]) -> list[dict[str, str]]:
    """Return a device's taints in the format of a ResourceSlice: ``spec.devices[].taints``."""
    return [
        {
            "key": taint.key,
            **({"value": taint.value} if taint.value else {}),
            "effect": str(taint.effect),
            "timeAdded": rfc3339(taint.added_wall_s),
        }
        for taint in taints
    ]
