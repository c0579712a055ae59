"""DRA plugin server for a driver written in Python, and the worker that runs the driver's functions.

The server answers the kubelet in a thread of its own, so a driver that blocks for half a minute delays
neither health reports nor other answers.
"""

import asyncio
import inspect
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.embed.callback_runner import LOOP_ENDED, DriverCallbackRunner
from agent.embed.monitor import Monitor, check_functions
from agent.errors import ConfigError
from agent.model.claim import Claim, ClaimDevice, ClaimRef
from agent.model.prepare import Operation, PrepareVerdict
from agent.model.report import Report
from agent.prepare.error_tables import ErrorPattern
from agent.prepare.errors import DriverError, PrepareError, TransientError, doing
from agent.prepare.kubelet_message import kubelet_text
from agent.prepare.step_runners import PrepareResultTracker, Steps, prepare_steps, run_blocking
from agent.serve.dra_plugin.instance_locks import SerializeLock
from agent.serve.dra_plugin.instance_server import (
    SHUTTING_DOWN,
    DriverInstanceServer,
    OnRegistration,
    plugin_paths,
)
from agent.serve.dra_plugin.prepared_devices import PreparedDevice, WireMode, validate_prepared_devices
from agent.serve.dra_plugin.service import ClaimOperation
from agent.system.files import StrPath, as_path
from agent.system.output import get_logger
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import START_LIMIT_S, AsyncioThread
from agent.system.threads.worker_threads import call_in_thread

T = TypeVar("T")


class Driver(Protocol):
    """Functions that a driver provides, plain or async; async ones run in the loop that starts the server."""

    def prepare(self, claim: Claim, /) -> Sequence[PreparedDevice] | Awaitable[Sequence[PreparedDevice]]:
        """Prepare the claim's devices. Idempotent: a second call returns the same answer."""

    def unprepare(self, ref: ClaimRef, /) -> Awaitable[None] | None:
        """Undo the prepare of a claim; does nothing for a claim that is not prepared."""


class PrepareWorker:
    """Worker that prepares and unprepares each claim in its own thread; a hung call blocks no other claim."""

    def __init__(
        self,
        monitor: Monitor,
        driver: Driver,
        get_claim: Callable[[ClaimRef], Claim | Awaitable[Claim]],
        serialize_lock: SerializeLock | None,
        callbacks: DriverCallbackRunner,
    ) -> None:
        self.stopping = False
        """True: the server stops, so no call of the driver may begin, even after the server's next start."""
        self.callbacks = callbacks
        """Runner of the functions that the driver provides, plain or async."""
        self._monitor = monitor
        self._driver = driver
        self._get_claim = get_claim
        self._serial = serialize_lock
        functions = (driver.prepare, driver.unprepare, get_claim)
        self._needs_loop = any(map(inspect.iscoroutinefunction, functions))

    async def run(
        self, kind: ClaimOperation, ref: ClaimRef, until_s: float, unawaited: threading.Event
    ) -> tuple[PreparedDevice, ...]:
        """Prepare or unprepare a claim. Returns its prepared devices; none after an unprepare.

        Args:
            kind: PREPARE or UNPREPARE.
            ref: The claim.
            until_s: Latest time to wait for the calls of other claims [s, monotonic clock].
            unawaited: Set while no call of the kubelet waits: transient failures are then not retried.

        Raises:
            PrepareError: The call failed, or did not begin.
        """
        if kind is ClaimOperation.UNPREPARE:
            return await call_in_thread(lambda: self._unprepare(ref, until_s), name="dh-unprepare")
        return await call_in_thread(lambda: self._prepare(ref, until_s, unawaited), name="dh-prepare")

    def classify(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """Classify a failure of a claim that happened outside the driver's functions."""
        return self._monitor.tracker.classify(Claim(*ref), error)

    def unavailable_reason(self) -> str:
        """Return why no claim can be prepared now; empty: claims can be prepared."""
        if self.stopping:
            return SHUTTING_DOWN
        if self._needs_loop and self.callbacks.has_loop_ended:
            return LOOP_ENDED
        return ""

    def _prepare(
        self, ref: ClaimRef, until_s: float, unawaited: threading.Event
    ) -> tuple[PreparedDevice, ...]:
        tracker = self._monitor.tracker
        began = tracker.monotonic()

        def run(service: PrepareResultTracker, claim: Claim, handler: Callable[[], T]) -> T:
            steps: Steps[T] = prepare_steps(
                service, claim, began_s=began, may_retry=lambda: not unawaited.is_set()
            )
            return run_blocking(steps, handler, sleep=unawaited.wait)

        fetching = _FetchTracker(tracker)
        claim = run(fetching, self._recorded_claim(ref), lambda: self._fetch_claim(ref))
        return run(tracker, claim, lambda: self._call_prepare(claim, until_s))

    def _recorded_claim(self, ref: ClaimRef) -> Claim:
        """Return a claim with the devices of its last recorded prepare, for use until the claim is read."""
        outcomes = self._monitor.tracker.outcomes()
        last = next((outcome for outcome in outcomes if outcome.claim.uid == ref.uid), None)
        return Claim(
            *ref, devices=tuple(ClaimDevice("", *device) for device in (last.devices if last else ()))
        )

    def _fetch_claim(self, ref: ClaimRef) -> Claim:
        self._check_stopping(ref)
        with doing(Operation.API):
            claim = self.callbacks.call(self._get_claim, ref)
        if not isinstance(claim, Claim):
            raise DriverError(
                f"function `get_claim` returned {type(claim).__name__}, not a Claim",
                code="driver.bug.answer",
            )
        if claim.ref != ref:
            raise TransientError(
                f"function `get_claim` returned claim {claim.ref} (UID {claim.uid}), "
                f"not {ref} (UID {ref.uid})",
                code="claim.uid_mismatch",
            )
        return claim

    def _call_prepare(self, claim: Claim, until_s: float) -> tuple[PreparedDevice, ...]:
        with self._serialize_calls(claim.ref, until_s):
            answer = self.callbacks.call(self._driver.prepare, claim)
        return validate_prepared_devices(claim, answer)

    def _unprepare(self, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        tracker, failure = self._monitor.tracker, None
        with self._serialize_calls(ref, until_s):
            try:
                self.callbacks.call(self._driver.unprepare, ref)
            except Exception as error:
                failure = error
        if failure is None:
            tracker.unprepared(ref)
        elif (verdict := tracker.unprepare_failed(ref, failure)) is not None:
            raise PrepareError(verdict, kubelet_text(verdict)) from failure
        return ()

    @contextmanager
    def _serialize_calls(self, ref: ClaimRef, until_s: float) -> Iterator[None]:
        """Hold the lock that serializes the calls of the driver's functions.

        Raises PrepareError if the lock is not free in time.
        """
        with ExitStack() as turn:
            if self._serial is not None:
                try:
                    turn.enter_context(self._serial.hold(until_s))
                except (TransientError, OSError) as error:
                    raise self._not_called_error(ref, error) from error
            self._check_stopping(ref)
            yield

    def _check_stopping(self, ref: ClaimRef) -> None:
        """Raise PrepareError for a claim if the server is stopping."""
        if self.stopping:
            raise self._not_called_error(ref, TransientError(SHUTTING_DOWN, code="driver.shutting_down"))

    def _not_called_error(self, ref: ClaimRef, error: Exception) -> PrepareError:
        """Return the error of a claim for which no driver function was called.

        The failure is neither retried nor recorded.
        """
        verdict = self.classify(ref, error)
        return PrepareError(verdict, kubelet_text(verdict))


class _FetchTracker:
    """Prepare tracker that is used while a claim is read from the API server; records only failures."""

    def __init__(self, tracker: PrepareFailureTracker) -> None:
        self._classify = tracker.classify
        self.record_failure_and_wait = tracker.record_failure_and_wait
        self.monotonic = tracker.monotonic
        self.jitter = tracker.jitter

    def classify(
        self, claim: Claim, error: BaseException, patterns: Sequence[ErrorPattern] = ()
    ) -> PrepareVerdict:
        """Return the verdict without the claim's devices, whose health a read of the claim does not need."""
        return self._classify(Claim(*claim.ref), error, patterns)

    def cached_failure(self, claim: Claim) -> None:
        """Return None: the claim may have changed since a failure, so it is always read again."""

    def classify_by_newer_health(
        self,
        claim: Claim,
        verdict: PrepareVerdict,
        evidence: BaseException,
        patterns: Sequence[ErrorPattern] = (),
    ) -> PrepareVerdict:
        """Return the verdict unchanged, because the read of a claim does not depend on devices' health."""
        return verdict

    def record_success(self, claim: Claim) -> None:
        """Record nothing: the claim is not prepared yet."""


STOP_S: Final = 5.0
END_S: Final = 1.5
"""Part of the timeout of a stop that is reserved for ending streams and connections [s]."""

log = get_logger(__name__)


class PluginServer:
    """DRA plugin server of a driver: DRAPlugin v1 and v1beta1, health v1 and v1alpha1, registration.

    Each claim has a thread of its own; a hung driver blocks only that thread. Started within a running loop
    (asyncio or Trio), the server runs the driver's async functions in that loop, else in the claim's thread.
    ``async with`` starts and stops it within a loop, ``with`` elsewhere.

    The server never ends the driver's process. If its thread fails, :attr:`failure` has the exception,
    ``on_error`` is called and the sockets are removed, so the kubelet notices.

    Args:
        monitor: Monitor that reports health and classifies failures. The driver starts it.
        driver: Prepares and unprepares claims.
        get_claim: Returns the claim that the kubelet names, usually from the API server; plain or async.
            Calls may run concurrently. Its exceptions are classified like those of ``prepare`` within
            ``doing(Operation.API)``: a refused connection is ``api.unreachable``, status 404
            ``claim.not_found``.
        kubelet_dir: The kubelet's directory, as the kubelet itself names it; None: the monitor's.
        plugin_dir: Directory of the driver's socket; None: ``plugins/<driver>`` in the kubelet's directory.
        registry_dir: Directory that the kubelet watches; None: ``plugins_registry`` in the kubelet's.
        pod_uid: UID of the driver's pod, if a new instance starts before the old one ends.
        wire: Whether the class of an error is also sent to the kubelet as a number.
        serialize: Whether calls of ``prepare`` and ``unprepare`` run one after the other, across all
            instances of the driver; a claim that waits for a retry does not block the others.
        on_status: Called after each registration: whether it succeeded, and the kubelet's error. Must not
            block.
        on_error: Called in a thread of the server when the server has failed.
    """

    def __init__(
        self,
        monitor: Monitor,
        driver: Driver,
        *,
        get_claim: Callable[[ClaimRef], Claim | Awaitable[Claim]],
        kubelet_dir: StrPath | None = None,
        plugin_dir: StrPath | None = None,
        registry_dir: StrPath | None = None,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
        serialize: bool = True,
        on_status: OnRegistration | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Create a server that is not started. Raises ConfigError if an argument or a path is invalid."""
        for argument, value, kind in (("monitor", monitor, Monitor), ("wire", wire, WireMode)):
            if not isinstance(value, kind):
                raise ConfigError(f"argument {argument}: {value!r} is not a {kind.__name__}")
        methods = {f"driver.{name}": getattr(driver, name, None) for name in ("prepare", "unprepare")}
        check_functions({"on_status": on_status, "on_error": on_error}, get_claim=get_claim, **methods)
        self.paths = plugin_paths(
            monitor.driver,
            kubelet_dir=as_path("kubelet_dir", kubelet_dir) or monitor.kubelet_dir,
            plugin_dir=as_path("plugin_dir", plugin_dir),
            registry_dir=as_path("registry_dir", registry_dir),
            pod_uid=pod_uid,
        )
        """Paths of the plugin server's sockets."""
        self.failure: BaseException | None = None
        """Exception that ended the server; None: there was none."""
        self._monitor = monitor
        serialize_lock = SerializeLock(self.paths.plugin_dir) if serialize else None
        self._new_worker = partial(PrepareWorker, monitor, driver, get_claim, serialize_lock)
        self._worker = self._new_worker(DriverCallbackRunner())
        self._pod_uid = pod_uid
        self._wire = wire
        self._on_status = on_status
        self._on_error = on_error
        self._lock = threading.Lock()
        self._latest: LatestValue[Report] | None = None
        self._plugin: DriverInstanceServer | None = None
        self._thread: AsyncioThread | None = None
        self._run_end: _RunEnd | None = None
        """Signals and failures that end :meth:`run`; None before the first run."""

    def start(self, timeout_s: float = START_LIMIT_S) -> None:
        """Start the server and block until the kubelet can find the driver.

        A stopped server can be started again.

        Raises:
            ResourceBusyError: Another instance serves one of the sockets; see ``pod_uid``.
            ConfigError: A directory or socket cannot be used.
            PermissionDeniedError: A directory or socket cannot be created.
            RuntimeError: The server runs already or was stopped meanwhile, or the monitor was not started.
            TimeoutError: The server was not ready within ``timeout_s``.
        """
        self._start(DriverCallbackRunner(), timeout_s)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Unregister the driver, finish running calls and stop the server. Blocks up to ``timeout_s``.

        Threads that do not end in time, such as a hung prepare, are abandoned. A second call has no effect.

        Returns:
            True if everything has ended in time.

        Raises:
            RuntimeError: The caller runs in the driver's loop, which the driver's functions need to finish;
                see :meth:`aclose`.
        """
        if self._thread is not None and self._worker.callbacks.runs_in_driver_loop:
            raise RuntimeError(
                "plugin server: stop() blocks the driver's own loop; use 'await server.aclose()'"
            )
        return self._stop(timeout_s)

    async def aclose(self, timeout_s: float = STOP_S) -> bool:
        """Return the result of :meth:`stop`, called from an asyncio or Trio task, even a cancelled task."""
        return await DriverCallbackRunner().run_blocking(lambda: self._stop(timeout_s))

    def run(self) -> None:
        """Run the monitor and the server until SIGTERM or SIGINT, in a program without an event loop.

        Blocks until a signal, or until the server fails; its sockets are then removed. A failed monitor does
        not end the server, because claims can still be prepared. The signals' handlers are restored at the
        end.

        Raises:
            RuntimeError: The caller is not the main thread, or the server failed; ``__cause__`` is then
                :attr:`failure`. Also for the reasons of :meth:`start` and :meth:`Monitor.start`.
            ResourceBusyError, ConfigError, PermissionDeniedError, TimeoutError: See :meth:`start`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("plugin server: run() handles signals, so only the main thread may call it")
        with _RunEnd() as self._run_end, self._monitor, self:
            self._run_end.wait()
        if self.failure is not None:
            raise RuntimeError(
                f"driver {self._monitor.driver}: plugin server failed: {self.failure}; the kubelet cannot "
                "prepare claims with this driver"
            ) from self.failure

    def _stop(self, timeout_s: float = STOP_S) -> bool:
        with self._lock:
            thread, plugin, latest, worker = self._thread, self._plugin, self._latest, self._worker
            self._thread = self._plugin = self._latest = None
        if thread is None or plugin is None:
            return True
        worker.stopping = True
        plugin.drain_s = max(0.0, timeout_s - END_S)
        ended = True
        try:
            ended = thread.stop(timeout_s)
        except Exception:  # the thread has ended all the same
            log.exception(
                "driver %s: plugin server failed while it stopped; its sockets may remain",
                self._monitor.driver,
            )
        finally:
            if latest is not None:
                self._monitor.unsubscribe(latest)
        if not ended:
            log.warning(
                "driver %s: plugin server did not stop within %g s; abandoning its thread",
                self._monitor.driver,
                timeout_s,
            )
        return ended and plugin.has_drained

    def __enter__(self) -> Self:
        if DriverCallbackRunner().runs_in_driver_loop:  # stop() would be refused at the end
            raise RuntimeError("plugin server: 'with' was used in an event loop; write 'async with' instead")
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        callbacks = DriverCallbackRunner()
        try:
            await callbacks.run_blocking(lambda: self._start(callbacks, START_LIMIT_S))
        except asyncio.CancelledError:  # the server has started meanwhile
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _start(self, callbacks: DriverCallbackRunner, timeout_s: float) -> None:
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"driver {self._monitor.driver}: the plugin server runs already")
            if not self._monitor.is_started:
                raise RuntimeError(f"driver {self._monitor.driver}: the monitor does not run; start it first")
            self.failure = None
            self._worker = self._new_worker(callbacks)
            self._latest = self._monitor.subscribe()
            self._plugin = DriverInstanceServer(
                self._latest,
                self._worker,
                driver=self._monitor.driver,
                paths=self.paths,
                pod_uid=self._pod_uid,
                wire=self._wire,
                on_status=self._on_status,
            )
            self._thread = AsyncioThread(self._plugin.run, on_failure=self._fail)
            thread = self._thread
        try:
            thread.start(timeout_s)
        except BaseException:
            self._stop()
            raise

    def _fail(self, error: BaseException) -> None:
        """Store the exception that ended the plugin server and call ``on_error``.

        Runs in the failed thread, after the server's sockets are removed.
        """
        self.failure = error
        if self._latest is not None:
            self._monitor.unsubscribe(self._latest)
        if self._run_end is not None:
            self._run_end.notify()
        log.error(
            "driver %s: plugin server failed; the kubelet can no longer reach the driver",
            self._monitor.driver,
            exc_info=error,
        )
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException:
                log.exception("driver %s: on_error raised an exception; it is ignored", self._monitor.driver)


_END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FAILED: Final = 0
"""Byte that is no signal's number."""


class _RunEnd:
    """Socket on which the main thread waits for SIGTERM, SIGINT or a failure of the server.

    Python's own C handler writes the number of each signal to the socket. A wait for a lock or a queue could
    miss a signal: one that arrives just before the wait begins, or in another thread, does not end the wait.
    """

    def __enter__(self) -> Self:
        """Take the signals' handlers. Main thread only."""
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.getsignal(number) for number in _END_SIGNALS}
        for number in _END_SIGNALS:
            signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._fd_before)
        self._sender.close()
        self._receiver.close()

    def notify(self) -> None:
        """End the wait. Thread-safe. Never blocks."""
        with suppress(OSError):  # full, or closed after the wait
            self._sender.send(bytes([_FAILED]))

    def wait(self) -> None:
        """Block until one of the signals arrives or another thread calls :meth:`notify`."""
        while not {_FAILED, *_END_SIGNALS}.intersection(self._receiver.recv(4096)):
            pass
