"""A whole DRA plugin for a driver written in Python: what the kubelet calls, and who answers.

The driver prepares claims. This serves the kubelet beside it, in a thread of its own, so that a driver that
blocks for half a minute keeps neither its health from flowing nor the kubelet from an answer.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agent.embed.callback_runner import CallbackRunner
from agent.embed.monitor import Monitor
from agent.embed.prepare_worker import Driver, PrepareWorker
from agent.model.claim import Claim, ClaimRef
from agent.model.report import Report
from agent.prepare.wire import WireMode
from agent.serve.dra_plugin.paths import plugin_paths
from agent.serve.dra_plugin.registration import OnStatus
from agent.serve.dra_plugin.serialize_lock import SerializeLock
from agent.serve.dra_plugin.server import Plugin
from agent.system.threads.latest import Latest
from agent.system.threads.loop_thread import IoThread

START_S: Final = 5.0
STOP_S: Final = 5.0
END_S: Final = 1.5
"""Of the time to stop, what is kept for ending streams and connections [s]."""

log = logging.getLogger(__name__)


class PluginServer:
    """Serves a driver to the kubelet: DRAPlugin v1 and v1beta1, health v1 and v1alpha1, registration.

    Each claim is worked on in a thread of its own, which a driver that hangs may keep. Started within a
    running loop (asyncio's or Trio's) it runs the driver's async functions in that loop; without one, in the
    claim's thread. ``async with`` starts and ends it within a loop, ``with`` elsewhere.

    It never ends the driver's process. If its own thread fails, :attr:`failure` has the exception,
    ``on_error`` is called with it, and the sockets are gone: the kubelet knows.

    Args:
        monitor: Where health comes from, and where failures are judged and remembered. Started by the driver.
        driver: Prepares and unprepares.
        claims: Gets the claim that the kubelet names, plain or async: from the API server, as a rule. Several
            may be asked for at once. What it raises is judged like what ``prepare`` raises.
        kubelet_dir: The kubelet's directory, by the path that the kubelet itself has for it; None: the
            monitor's.
        plugin_dir: For the driver's socket; None: ``plugins/<driver>`` in the kubelet's directory.
        registry_dir: That the kubelet watches; None: ``plugins_registry`` in the kubelet's directory.
        pod_uid: Of the driver's pod, if a new instance starts before the old one ends.
        wire: Whether an error's class is sent as a number, too.
        serialize: One call of ``prepare`` or ``unprepare`` after the other, across the driver's instances; a
            claim that waits for its next try lets the others by. False: all at once.
        on_status: Told how each registration ended: whether it is registered, and the kubelet's words if not.
            Must return at once.
        on_error: Called when the server has failed, from a thread of ours.
    """

    def __init__(
        self,
        monitor: Monitor,
        driver: Driver,
        *,
        claims: Callable[[ClaimRef], Claim | Awaitable[Claim]],
        kubelet_dir: Path | None = None,
        plugin_dir: Path | None = None,
        registry_dir: Path | None = None,
        pod_uid: str = "",
        wire: WireMode = WireMode.NONE,
        serialize: bool = True,
        on_status: OnStatus | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Raises ConfigError: a socket cannot be where it should (see :func:`plugin_paths`)."""
        self.paths = plugin_paths(
            monitor.driver,
            kubelet_dir=kubelet_dir or monitor.kubelet_dir,
            plugin_dir=plugin_dir,
            registry_dir=registry_dir,
            pod_uid=pod_uid,
        )
        """Where its sockets are."""
        self.failure: BaseException | None = None
        """What ended it; None: nothing has."""
        self._monitor = monitor
        self._work = PrepareWorker(
            monitor, driver, claims, SerializeLock(self.paths.plugin_dir) if serialize else None
        )
        self._pod_uid = pod_uid
        self._wire = wire
        self._on_status = on_status
        self._on_error = on_error
        self._lock = threading.Lock()
        self._latest: Latest[Report] | None = None
        self._plugin: Plugin | None = None
        self._thread: IoThread | None = None

    def start(self, timeout_s: float = START_S) -> None:
        """Serves from now on; returns when the kubelet can find the driver. Blocks meanwhile.

        Once it was stopped, it can be started again.

        Raises:
            Busy: another instance serves one of the sockets; see ``pod_uid``.
            ConfigError: a directory or socket cannot be used.
            PermissionDenied: we may not make one.
            RuntimeError: it is started already, or was stopped meanwhile; or the monitor was not started.
            TimeoutError: it took longer than ``timeout_s``.
        """
        self._start(CallbackRunner(), timeout_s)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Takes leave of the kubelet, finishes what is under way, and ends. Blocks meanwhile.

        What does not end in time is left behind: a hung prepare keeps its thread, and nobody waits for it. A
        second call does nothing.

        Returns:
            Whether everything has ended.

        Raises:
            RuntimeError: the loop calls it that the server was started in, and that the driver's functions
                need to finish; see :meth:`aclose`.
        """
        if self._thread is not None and self._work.host.is_here:
            raise RuntimeError("stop() would block the driver's own loop: use 'await server.aclose()'")
        return self._stop(timeout_s)

    async def aclose(self, timeout_s: float = STOP_S) -> bool:
        """As :meth:`stop`, for a task of any loop, asyncio's or Trio's; cancelled or not."""
        return await CallbackRunner().finish(lambda: self._stop(timeout_s))

    def _stop(self, timeout_s: float = STOP_S) -> bool:
        with self._lock:
            thread, plugin, latest = self._thread, self._plugin, self._latest
            self._thread = self._plugin = self._latest = None
        if thread is None or plugin is None:
            return True
        self._work.stopping = True
        plugin.finish_s = max(0.0, timeout_s - END_S)
        ended = True
        try:
            ended = thread.stop(timeout_s)
        except Exception:  # of a thread that has ended, and of a server that is of no use any more
            log.exception("%s: the server failed while it ended", self._monitor.driver)
        finally:
            if latest is not None:
                self._monitor.unsubscribe(latest)
        if not ended:
            log.warning(
                "%s: the server did not end within %g s, and is left behind", self._monitor.driver, timeout_s
            )
        return ended

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        host = CallbackRunner()
        try:
            await host.finish(lambda: self._start(host, START_S))
        except asyncio.CancelledError:  # it has started meanwhile; what fails to start leaves nothing
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _start(self, host: CallbackRunner, timeout_s: float) -> None:
        with self._lock:
            if self._thread is not None:
                raise RuntimeError(f"{self._monitor.driver}: is started already")
            if not self._monitor.is_started:
                raise RuntimeError(f"{self._monitor.driver}: nobody would look: start the monitor first")
            self.failure = None
            self._work.begin(host)
            self._latest = self._monitor.subscribe()
            self._plugin = Plugin(
                self._latest,
                self._work,
                driver=self._monitor.driver,
                paths=self.paths,
                pod_uid=self._pod_uid,
                wire=self._wire,
                on_status=self._on_status,
            )
            self._thread = IoThread(self._plugin.run, on_failure=self._fail)
            thread = self._thread
        try:
            thread.start(timeout_s)
        except BaseException:
            self._stop()
            raise

    def _fail(self, error: BaseException) -> None:
        """In the thread that failed, when nothing is served any more."""
        self.failure = error
        log.error(
            "%s: serving has ended, and the driver with it for the kubelet",
            self._monitor.driver,
            exc_info=error,
        )
        if self._latest is not None:
            self._monitor.unsubscribe(self._latest)
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException:
                log.exception("%s: on_error raised", self._monitor.driver)
