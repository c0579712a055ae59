"""Publisher of a driver's taints: passes the newest taints to the driver's callback.

The callback writes the taints to Kubernetes. It is called again until a call succeeds.

agent.devices.taints decides the taints. A callback that fails or hangs, for example while the API server is
unreachable, does not delay health reports.
"""

import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from agent.config.config import Config
from agent.devices.taints import TaintPolicy, decide_taints, restore_taints, taint_domain
from agent.model.claim import DeviceRef
from agent.model.health import Taint, Taints
from agent.model.report import Report
from agent.model.time import NS, Instant, rfc3339
from agent.serve.kube_api.object_watch import retry_after_s
from agent.store.driver_files import load_taints, save_taints
from agent.store.state_files import StateWriteError
from agent.system.output import get_logger
from agent.system.threads.thread_start import ThreadStartError
from agent.system.threads.trio_calls import call_in_thread, call_in_thread_when_possible, cancellation
from agent.system.timing import random_fraction

DEBOUNCE_S: Final = 1.0
"""Delay after a change, so that several changes are published together [s]."""
MIN_INTERVAL_S: Final = 5.0
"""Shortest time from a successful callback to the next call [s]."""
CALL_S: Final = 60.0
"""Time limit of a callback [s]: an async one is cancelled, for a plain one a warning is logged."""
RETRY_S: Final = 1.0
"""Largest random pause after the first failed callback, doubled after each further failure [s]."""
RETRY_MAX_S: Final = 60.0
"""Upper limit of the pause after failed callbacks [s]."""
SAVE_RETRY_S: Final = 60.0
"""Delay after a failed write of the taint file [s]."""
SAVE_END_S: Final = 0.5
"""Longest time for the last write of the taint file when the publisher ends [s]."""

TaintCallback = Callable[[Taints], object]
"""Function of the driver that publishes taints. A plain function is called in a thread; an async function
runs in the core's Trio loop and is cancelled after CALL_S. When the function raises, it is called again
later."""

log = get_logger(__name__)


def taint_policy(config: Config) -> TaintPolicy:
    """Return the taint policy that the configuration sets."""
    return TaintPolicy(
        evict=config.taint_evict,
        quiet_s=config.taint_quiet_s,
        report_unknown=config.taint_unknown,
        inform=config.taint_inform,
    )


class TaintCallbackPublisher:
    """Publisher that passes the taints of one driver's devices to its callback, and saves them on disk."""

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
            callback: Publishes the taints; None: the caller reads :attr:`taints` instead.
            driver: Name of the driver.
            policy: Taint policy of the operator; None: the default policy.
            path: File that keeps the ``timeAdded`` of each taint over a restart; None: not saved.
            clock: Returns the time on the monotonic and the wall clock.
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
        taint_domain(driver, self._policy)
        saved, problem = load_taints(path) if path is not None else (Taints(), "")
        if problem:
            log.warning("%s; all taints get a new timeAdded", problem)
        self._decided = restore_taints(saved, driver, self._policy)
        self._saved = saved
        self._writing = threading.Lock()
        self._report: Report | None = None
        """Newest report for which all sources had finished their first pass; None: there was none."""
        self._reported = trio.Event()
        self._changed = trio.Event()
        self._unsaved = trio.Event()
        self._urgent = trio.Event()
        """Set while a failed prepare waits for taints that are not published yet: a callback is due now."""
        self._token: trio.lowlevel.TrioToken | None = None
        self._publishing = threading.Condition()
        self._published: Taints | None = None
        """Taints of the last successful call of the callback; None: there was no such call."""

    def set_policy(self, policy: TaintPolicy) -> None:
        """Replace the operator's taint policy; the next report's taints follow it. Thread-safe."""
        self._policy = policy

    @property
    def taints(self) -> Taints:
        """Current taints; before the first report the saved taints. Thread-safe."""
        return self._decided.taints

    def wait_published(self, devices: Collection[DeviceRef], timeout_s: float) -> bool:
        """Call the callback without delay, and block until it has succeeded with the devices' current taints.

        Thread-safe. A retry after a failed call waits for the ``Retry-After`` of the API server.

        Returns:
            True: the callback published the taints, or there is no callback because the caller publishes the
            taints itself. False: timeout.
        """
        if self._callback is None:
            return True

        def is_published() -> bool:
            published, current = self._published, self.taints.devices
            return published is not None and all(
                published.devices.get(device, ()) == current.get(device, ()) for device in devices
            )

        def hasten() -> None:
            if not is_published():  # otherwise a later, unrelated change would be published without a pause
                self._urgent.set()

        with self._publishing:
            if not is_published() and self._token is not None:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(hasten)
            return self._publishing.wait_for(is_published, timeout_s)

    def update(self, report: Report, now: Instant) -> None:
        """Decide the taints for a new report.

        Reports from before the first reading of all sources are ignored.

        Called only in the core thread. Never blocks.
        """
        if report.starting:
            return
        first = self._report is None
        before, self._report = self._decided, report
        self._decided = decide_taints(before, report, self._driver, self._policy, now)
        self._reported.set()
        if first or self._decided.taints != before.taints:
            self._changed.set()
        if self._decided.stored_taints != self._saved:
            self._unsaved.set()

    async def run(self) -> None:
        """Publish and save taints until cancelled.

        The callback is called after the first report even if no device has a taint, because taints from
        before a restart must be removed.
        """
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._update_when_due)
            if self._callback is not None:
                nursery.start_soon(self._publish, self._callback)
            if self._path is not None:
                nursery.start_soon(self._save, self._path)

    async def _update_when_due(self) -> None:
        """Decide the taints again when a taint's delay ends, because a new report may not come then."""
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
            await self._pause(DEBOUNCE_S)
            self._changed, self._urgent = trio.Event(), trio.Event()
            taints = self.taints
            error = await self._call(callback, taints)
            if error is None:
                self._store_published(taints)
                if logged:
                    log.info("driver %s: taints published after earlier failures", self._driver)
                logged, pause_s = "", RETRY_S
                await self._pause(MIN_INTERVAL_S)
                continue
            text = traceback.format_exception_only(error)[-1].strip()
            if text != logged:
                log.warning(
                    "driver %s: publishing taints failed: %s; will retry", self._driver, text, exc_info=error
                )
            logged = text
            self._changed.set()  # even if nothing changed: the failed call may have done a part
            await trio.sleep(asked_s := retry_after_s(error))
            await self._pause(max(self._jitter() * pause_s - asked_s, 0.0))
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep for some time, or shorter if a failed prepare waits for taints that are not published yet."""
        with trio.move_on_after(seconds):
            await self._urgent.wait()

    def _store_published(self, taints: Taints) -> None:
        if not self._changed.is_set():  # a request that came during the call has been met by it
            self._urgent = trio.Event()
        with self._publishing:
            self._published = taints
            self._publishing.notify_all()

    async def _call(self, callback: TaintCallback, taints: Taints) -> BaseException | None:
        """Call the driver's callback with the taints and wait for it. Returns its error; None: success."""
        if inspect.iscoroutinefunction(callback):
            result = _call_safely(callback, taints)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._log_hang)
                result = await call_in_thread_when_possible(
                    partial(_call_safely, callback, taints), "dh-taints"
                )
                nursery.cancel_scope.cancel()
        return result.error if result.awaitable is None else await _await_safely(result.awaitable)

    async def _log_hang(self) -> None:
        await trio.sleep(CALL_S)
        log.warning(
            "driver %s: publishing taints has not ended after %g s; taints are not updated until it ends",
            self._driver,
            CALL_S,
        )

    # --- disk ----------------------------------------------------------------------------------------------

    async def _save(self, path: Path) -> None:
        """Save changed taints to the file until cancelled, one write at a time.

        The last changes are saved at the end.
        """
        logged_errno: int | None = None
        try:
            while True:
                await self._unsaved.wait()
                self._unsaved = trio.Event()
                write = partial(self._write, path)
                try:
                    await call_in_thread_when_possible(write, "dh-taints")
                except StateWriteError as error:
                    if error.errno != logged_errno:
                        log.warning("%s; new taints get another timeAdded after a restart; will retry", error)
                    logged_errno = error.errno
                    await trio.sleep(SAVE_RETRY_S)
                    self._unsaved.set()
                else:
                    logged_errno = None
                    if self._decided.stored_taints != self._saved:  # changed back to what was saved before
                        self._unsaved.set()
        finally:
            if self._decided.stored_taints != self._saved:
                with trio.move_on_after(SAVE_END_S, shield=True), suppress(StateWriteError, ThreadStartError):
                    await call_in_thread(partial(self._write, path), "dh-taints")

    def _write(self, path: Path) -> None:
        """Write changed taints to the file, after an abandoned write has ended. Raises StateWriteError."""
        with self._writing:
            taints = self._decided.stored_taints
            if taints != self._saved:
                save_taints(path, taints)
                self._saved = taints


class _CallResult(NamedTuple):
    """Result of a call of the driver's callback: an error, or the awaitable that the callback returned."""

    error: BaseException | None = None
    awaitable: Awaitable[object] | None = None
    """Awaitable that an async callback returned; None: the callback is a plain function."""


def _call_safely(callback: TaintCallback, taints: Taints) -> _CallResult:
    try:
        result = callback(taints)
    except BaseException as error:
        return _CallResult(error)
    return _CallResult(awaitable=result) if inspect.isawaitable(result) else _CallResult()


async def _await_safely(awaitable: Awaitable[object]) -> BaseException | None:
    try:
        with trio.move_on_after(CALL_S) as scope:
            await awaitable
    except BaseException as error:  # a SystemExit of the callback must not end the core thread
        if (cancelled := cancellation(error)) is not None:
            raise cancelled from None
        return error
    return (
        TimeoutError(f"callback that publishes taints did not return within {CALL_S:g} s")
        if scope.cancelled_caught
        else None
    )


def taint_objects(taints: Iterable[Taint]) -> list[dict[str, str]]:
    """Convert a device's taints to the JSON objects of ``spec.devices[].taints`` in a ResourceSlice."""
    return [
        {
            "key": taint.key,
            **({"value": taint.value} if taint.value else {}),
            "effect": str(taint.effect),
            "timeAdded": rfc3339(taint.added_wall_s),
        }
        for taint in taints
    ]
