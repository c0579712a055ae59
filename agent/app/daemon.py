"""Daemon of ``drahealth run``: creates all parts, runs the core loop, handles signals, and stops all parts.

SIGHUP reloads the configuration, unless the agent runs on a terminal; see agent.app.reload.

    sampler thread (C) --eventfd--> Trio: step() --LatestValue--> asyncio thread: sockets
             linked drivers --------^          +--> on_report: a table or a log, with a thread of its own

The core thread (Trio) evaluates the rules and does not wait for clients; after each report it yields to the
I/O thread (asyncio), which sends the report. An exception in either thread ends the process with its
traceback: an agent with only one of them would report wrong health to the kubelet.
"""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import trio

from agent.app.reload import ConfigReloader
from agent.config.config import Config, LoadedConfig
from agent.driver.merged_snapshot_source import HostAndDriverSource
from agent.driver.sessions import DriverSessions
from agent.engine.loop import ClearRequestQueue, EngineLoop, LoopTiming, ReportHub
from agent.engine.step import initial_state
from agent.errors import ConfigError, PermissionDeniedError, ResourceBusyError
from agent.health.gpu.faults.checkpoint import restore_faults
from agent.model.cleared_faults import ClearResult
from agent.model.health import Health
from agent.model.reading import SourceState
from agent.model.report import PartsStatus, Report, StateFile
from agent.model.settings import HISTORY_FILE, UsageHistoryLimits
from agent.model.time import NS
from agent.node.custom_check_runner import CustomCheckRunner
from agent.node.node_source import SOURCES_STOP_S, engine_settings, open_node_source
from agent.node.pods.tracker import PodTracker
from agent.node.pods.usage_recorder import UsageRecorder
from agent.node.verdict_recorder import VerdictRecorder
from agent.serve.agent_api.service import collect_status
from agent.serve.grpc_servers import GrpcServers
from agent.serve.sd_notify import SystemdNotifier
from agent.serve.sockets import connection_limit, make_socket_directory
from agent.sources.gpu_os_facts import read_boot_id
from agent.store import gpu_fault_file
from agent.store.gpu_fault_file import GpuFaultWriter
from agent.store.history_file import HistoryFile
from agent.system.files import (
    LOCK_FILE,
    DirectoryLock,
    LockHeld,
    UnsafeDirectory,
    check_directory,
    make_directory,
    open_error_reason,
)
from agent.system.output import get_logger, has_terminal
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import AsyncioThread
from agent.system.timing import read_clocks
from agent.version import VERSION

if TYPE_CHECKING:
    from agent.cluster.cluster_publisher import ClusterPublisher
    from agent.cluster.sentinel_publisher import SentinelPublisher
    from agent.driver.session import DriverSession
    from agent.http.agent_view import AgentView
    from agent.http.server import HttpServer
    from agent.model.consumers import ConsumerMap
    from agent.record.recorder import SnapshotRecorder

SWITCH_INTERVAL_S: Final = 0.0005  # a busy thread delays the core by this; Python's default is 5 ms
YIELD_S: Final = 0.001
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_S: Final = 1.7  # the process exits less than 2 s after SIGTERM, even if a thread hangs
IO_STOP_S: Final = 0.9
HTTP_STOP_S: Final = 0.2
CLUSTER_STOP_S: Final = 0.05
MIN_STOP_S: Final = 0.05  # shortest time that each part has to stop, even after a hung one
IO_STUCK_NS: Final = 2 * NS  # normally the I/O thread reads a report within microseconds

log = get_logger(__name__)


class ReportReceiver(Protocol):
    """Interface to a function that gets each published health report in the core thread. Must not block."""

    def __call__(self, report: Report, *, is_repeat: bool) -> None:
        """Take a report; ``is_repeat``: a heartbeat, whose devices and notes are those of the last report."""


def run(
    config: Config,
    on_report: ReportReceiver | None = None,
    load: Callable[[], LoadedConfig] | None = None,
    encode_report: Callable[[Report], dict[str, Any]] | None = None,
) -> None:
    """Run the agent until SIGTERM or SIGINT.

    Threads that hang at the end are abandoned and logged. The process should then end with :func:`os._exit`,
    because the cleanup of a library that such a thread uses may hang, too. After the core loop the process
    ignores the signals that it handled.

    Args:
        config: Configuration of the agent.
        on_report: Called with each published health report.
        load: Loads the configuration again for a reload, in a thread; None: a reload changes nothing.
        encode_report: Returns a report as JSON for the HTTP server; None: no server is started.

    Raises:
        ResourceBusyError: Another agent holds the runtime directory, the state directory, or a socket.
        ConfigError: A directory, socket or root cannot be used.
        PermissionDeniedError: The runtime directory is not writable.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with _directory_locks(config) as locks:
        Daemon(
            config, on_report, load or (lambda: LoadedConfig(config, {}, ())), locks, encode_report
        ).serve()


class Daemon:
    """The running agent, which creates, starts and stops all its parts."""

    def __init__(
        self,
        config: Config,
        on_report: ReportReceiver | None,
        load: Callable[[], LoadedConfig],
        locks: Sequence[DirectoryLock],
        encode_report: Callable[[Report], dict[str, Any]] | None = None,
    ) -> None:
        """Create all parts of the agent without starting a thread.

        ``locks`` are those of the agent's directories; other arguments and errors as for :func:`run`.
        """
        self._config = config
        self._on_report = on_report
        self._notifier = SystemdNotifier.from_environ(os.environ)
        self._hub = ReportHub()
        self._latest = self._hub.subscribe()
        self._unread_since_ns = 0  # publication of the oldest report that the I/O thread has not read
        self._source = HostAndDriverSource()
        self._clear_requests = ClearRequestQueue(self._source.set_clear_requests)
        self._sessions = DriverSessions(
            config.drivers,
            config.state_dir,
            self._hub,
            self._open_session,
            consumer_map=lambda: self._pods.newest_map,
        )
        self._servers = GrpcServers(
            self._latest,
            runtime_dir=config.runtime_dir,
            drivers=config.drivers,
            version=VERSION,
            open_handler=self._sessions.open,
            clear_requests=self._clear_requests,
            parts=self._parts_status,
            locks=locks,
            sockets=_served_sockets(config),
        )
        limits = UsageHistoryLimits(config.history_rows, config.history_age_s)
        history = HistoryFile(config.state_dir / HISTORY_FILE, limits)
        self._recorder = UsageRecorder(history, limits=limits, drivers=config.drivers)
        record = self._recorder.record if config.history_rows else None
        self._pods = PodTracker(config, clock=read_clocks, record=record)
        settings = engine_settings(config)
        self._http: _Http | None = None
        self._cluster: ClusterPublisher | None = None
        self._nvsentinel = _sentinel_publisher(config)
        try:
            config.check_web_config()
            self._cluster = _cluster_publisher(config, lambda: self._pods.newest_map)
            if config.listen and encode_report is not None:
                self._http = self._open_http(encode_report, history.path)
            self._node = open_node_source(
                config, settings, config.period_ns, reads_declarations=True, pods=self._pods
            )
        except BaseException:
            self._servers.close()
            if self._http is not None:
                self._http.server.close()
            raise
        self._source.open(self._node)

        # from here on nothing can refuse to start
        log.info(
            "agent: drahealth %s starts on node %s; sockets in %s",
            VERSION,
            config.node_name,
            config.runtime_dir,
        )
        if self._http is not None:
            log.info("http: listening on %s", ", ".join(map(str, config.listen)))
            if config.web_config is None and (open_to := [a for a in config.listen if not a.is_local]):
                log.warning(
                    "http: no TLS and no password on %s: every client that reaches this address can read "
                    "the reports; see --web-config",
                    ", ".join(map(str, open_to)),
                )
        self._sessions.restore()
        path = config.state_dir / gpu_fault_file.FILE
        saved, problem = gpu_fault_file.load_gpu_faults(path)
        if problem:
            log.warning("%s", problem)
        self._checkpoint = GpuFaultWriter(path, saved)
        boot_id = read_boot_id(config.procfs_root)
        self._verdict_recorder = VerdictRecorder(
            history, limits=limits, boot_id=boot_id, heartbeat_s=config.heartbeat_s
        )
        self._boot_id = boot_id
        self._snapshot_recorder = _snapshot_recorder(config, boot_id)
        self._closed_recorder: SnapshotRecorder | None = None
        """Recorder of snapshots before a reload that ended or moved the recording; it may still write."""
        restored = restore_faults(saved, boot_id, settings.gpu, read_clocks(), settings.rules)
        state = initial_state(settings, restored, saved, boot_id)
        self._checkpoint.set_newest(state.checkpoint)
        self._node.restore_nic_addresses(state.host.nics.restored_addresses)
        self._core = EngineLoop(
            source=self._source,
            state=state,
            timing=self._loop_timing(config),
            clock=read_clocks,
            publish=self._publish,
            repeat=self._repeat,
            save_state=self._checkpoint.set_newest,
            notify_watchdog=self._notify_watchdog,
            jitter=random.random,
            on_evaluated=self._handle_evaluation,
            record=self._snapshot_recorder.record if self._snapshot_recorder else None,
            accept_clears=self._clear_requests.accept,
            is_urgent=lambda: self._source.is_urgent,
        )
        self._custom_checks = CustomCheckRunner(
            config.checks, config.node_name, self._source.set_custom_checks
        )
        self._reloader = ConfigReloader(config, load, self._reconfigure, self._notifier, time.time)
        self._io_failure = _IoFailure()
        self._io = AsyncioThread(self._servers.run, on_failure=self._io_failure.set)

    def serve(self) -> None:
        """Start all threads, run the core loop until SIGTERM or SIGINT, then stop all parts."""
        try:
            self._io.start()
            if self._http is not None:
                self._http.thread.start()
            if self._cluster is not None:
                self._cluster.start()
            if self._nvsentinel is not None:
                self._nvsentinel.start()
            self._node.start()
            self._notifier.status("first pass over the node has not finished")
            gc.freeze()  # a full collection over 50,000 permanent objects would delay a verdict by 12 ms
            trio.run(self._run_core)
        finally:
            self._stop()

    async def _run_core(self) -> None:
        failure = self._io_failure
        failure.bind(trio.lowlevel.current_trio_token())
        tasks = (
            self._core.run,
            self._node.run_watchers,
            self._checkpoint.run,
            self._sessions.run,
            self._custom_checks.run,
            self._reloader.run,
            failure.wait,
        )
        outside = _collect_signals_outside_receiver()
        with trio.open_signal_receiver(*_SIGNALS) as signals, _unblock_signal(signal.SIGHUP):
            for early in tuple(outside):
                signal.raise_signal(early)
            self._notifier.ready()  # after the receiver: from now on the service manager may send SIGTERM
            async with trio.open_nursery() as nursery:
                for task in tasks:
                    nursery.start_soon(task)
                async for number in signals:
                    if number == signal.SIGHUP and not has_terminal():
                        self._reloader.request()
                        continue
                    log.info("agent: %s received; shutting down", signal.Signals(number).name)
                    nursery.cancel_scope.cancel()
                    break

    def _loop_timing(self, config: Config) -> LoopTiming:
        return LoopTiming(config.heartbeat_s, config.coalesce_ns, self._notifier.watchdog_s)

    def _reconfigure(self, config: Config) -> None:
        """Pass a reloaded configuration to all parts of the agent between evaluations. Core thread only."""
        before, self._config = self._config, config
        self._sessions.reconfigure(config)
        self._pods.reconfigure(config)
        if _record_settings(config) != _record_settings(before):
            self._replace_snapshot_recorder(config)
        self._custom_checks.reconfigure(config.checks)
        self._verdict_recorder.reconfigure(config.heartbeat_s)
        if self._cluster is not None:
            self._cluster.reconfigure(config)
        self._core.reconfigure(engine_settings(config), self._loop_timing(config))

    def _replace_snapshot_recorder(self, config: Config) -> None:
        """Start, end or move the recording of snapshots after a reload.
        The former recorder still writes its queued evaluations."""
        if self._snapshot_recorder is not None:
            self._snapshot_recorder.close(0.0)
            self._closed_recorder = self._snapshot_recorder
        try:
            self._snapshot_recorder = _snapshot_recorder(config, self._boot_id, self._closed_recorder)
        except ConfigError as error:
            log.warning(
                "record: cannot be started: %s; no snapshots are recorded until the next reload", error
            )
            self._snapshot_recorder = None
        self._core.set_record(self._snapshot_recorder.record if self._snapshot_recorder else None)

    def _stop(self) -> None:
        end_s = time.monotonic() + STOP_S
        self._notifier.stopping()
        self._custom_checks.close()
        try:
            if not self._io.stop(IO_STOP_S):
                log.warning("shutdown: the I/O thread did not stop within %g s; abandoning it", IO_STOP_S)
        finally:
            if self._http is not None and not self._http.thread.stop(HTTP_STOP_S):
                log.warning("shutdown: the HTTP thread did not stop within %g s; abandoning it", HTTP_STOP_S)
            if self._cluster is not None and not self._cluster.close(CLUSTER_STOP_S):
                log.warning(
                    "shutdown: the cluster thread did not stop within %g s; abandoning it", CLUSTER_STOP_S
                )
            if self._nvsentinel is not None and not self._nvsentinel.close(CLUSTER_STOP_S):
                log.warning(
                    "shutdown: the NVSentinel thread did not stop within %g s; abandoning it", CLUSTER_STOP_S
                )
            self._source.close()
            hung = list(self._node.stop(SOURCES_STOP_S))
            hung += self._sessions.close(end_s)
            if not self._checkpoint.close(max(0.0, end_s - time.monotonic())):  # gets all remaining time
                hung.append("fault checkpoint writer")
            if not self._recorder.close(max(MIN_STOP_S, end_s - time.monotonic())):
                hung.append("history recorder")
            if not self._verdict_recorder.close(max(MIN_STOP_S, end_s - time.monotonic())):
                hung.append("verdict recorder")
            if self._snapshot_recorder is not None and not self._snapshot_recorder.close(
                max(MIN_STOP_S, end_s - time.monotonic())
            ):
                hung.append("snapshot recorder")
            for part in hung:
                log.warning("shutdown: %s did not stop in time; abandoning its thread", part)

    def _open_session(self, driver: str, state_dir: Path) -> "DriverSession":
        from agent.driver.session import DriverSession  # 2 MiB that an agent without linked drivers saves

        return DriverSession(
            driver,
            self._config,
            self._hub,
            state_dir=state_dir,
            declarations=lambda: self._node.declarations,
            on_faults=self._source.set_driver_faults,
            on_checks=self._source.set_reported_checks,
            other_failures=self._sessions.failures_at_other_drivers,
            clock=read_clocks,
        )

    def _open_http(self, encode_report: Callable[[Report], dict[str, Any]], history_file: Path) -> "_Http":
        """Open the sockets of the HTTP server. Raises the same errors as :func:`run`."""
        try:
            from agent.http.agent_view import AgentView, TotalsSinceStart
            from agent.http.app import create_app  # 5 MiB, only with --listen
            from agent.http.metrics import HttpConnectionCounts
            from agent.http.server import HttpServer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"http.listen: the package {error.name} is not installed; install drahealth[http], or do "
                "without --listen"
            ) from None
        view = AgentView(
            latest=LatestValue(),
            config=lambda: self._config,
            snapshot=lambda: self._source.newest,
            consumers=lambda: self._pods.newest_map,
            pass_durations=lambda: self._node.pass_durations(),
            status=lambda: collect_status(
                *self._latest.peek(), version=VERSION, subscribers=self._servers.subscribers()
            ),
            totals=TotalsSinceStart(),
            subscribers=self._servers.subscribers,
            prepares=self._sessions.prepare_counts,
            parts=self._parts_status,
            history_file=history_file,
            encode_report=encode_report,
        )
        app = create_app(
            view, clock=read_clocks, server=lambda: HttpConnectionCounts(server.connections, server.refused)
        )
        server = HttpServer(
            self._config.listen,
            app,
            web_config=self._config.web_config,
            connections_max=connection_limit(_served_sockets(self._config)),
        )
        thread = AsyncioThread(server.run, on_failure=_log_http_failure, name="dh-http")
        return _Http(view, server, thread)

    def _parts_status(self) -> PartsStatus:
        recorder = self._snapshot_recorder  # a reload may replace it meanwhile
        return PartsStatus(
            config_reload=self._reloader.last,
            cluster=None if self._cluster is None else self._cluster.status,
            nvsentinel=None if self._nvsentinel is None else self._nvsentinel.status,
            nvml=self._node.nvml_costs(),
            lost_snapshots=None if recorder is None else recorder.lost,
            files=tuple(self._state_files(recorder)),
        )

    def _state_files(self, recorder: "SnapshotRecorder | None") -> Iterator[StateFile]:
        """Yield the files that the agent writes, each with the error of the last write."""
        yield StateFile("faults", self._checkpoint.error)
        if self._config.history_rows:
            yield StateFile("history", self._verdict_recorder.error or self._recorder.error)
        if recorder is not None:
            yield StateFile("record", recorder.error)

    def _publish(self, report: Report) -> None:
        """Publish a health report, first to drivers' taints and health streams, then to other receivers."""
        self._publish_to_clients(report)
        yield_to_senders()
        if self._http is not None:
            self._http.view.totals.handle_report(report)
        if report.clear_results:
            self._answer_clear_requests(report.clear_results)
        self._distribute_report(report, is_repeat=False)
        self._record_verdicts(report)

    def _repeat(self, report: Report) -> None:
        """Publish a report that is equal to the previous one and serves as a heartbeat.

        The health streams get the report last: the I/O thread, which it wakes, then has the interpreter lock
        as soon as it runs, because the core thread sleeps. No other thread is woken.
        """
        self._distribute_report(report, is_repeat=True)
        self._record_verdicts(report)
        self._publish_to_clients(report)

    def _publish_to_clients(self, report: Report) -> None:
        if self._latest.is_delivered():
            self._unread_since_ns = report.at.mono_ns
        self._sessions.update_taints(report, report.at)
        self._hub.publish(report)

    def _distribute_report(self, report: Report, *, is_repeat: bool) -> None:
        self._pods.handle_report(report)
        self._custom_checks.handle_report(report)
        if self._http is not None:
            self._http.view.latest.publish(report)
        if self._cluster is not None:
            self._cluster.handle_report(report)
        if self._nvsentinel is not None:
            self._nvsentinel.handle_report(report)
        if self._on_report:
            self._on_report(report, is_repeat=is_repeat)
        self._notifier.status(status_line(report))

    def _handle_evaluation(self, report: Report) -> None:
        self._hub.handle_evaluation(report)
        snapshot = self._source.newest
        if self._http is not None and snapshot is not None and snapshot.gpus is not None:
            self._http.view.totals.count_xids(snapshot.gpus.gpus)

    def _record_verdicts(self, report: Report) -> None:
        """Record the verdicts of a published report in the history file, unless the history is off."""
        if self._config.history_rows:
            self._verdict_recorder.handle_report(report)

    def _answer_clear_requests(self, results: Sequence[ClearResult]) -> None:
        """Handle the results of ``drahealth clear`` that an evaluation returned.

        Log the cleared faults, end the faults that drivers reported, and answer the operators.
        """
        for result in results:
            for fault in result.cleared:
                log.info("device %s: fault %s cleared by %s", fault.device, fault.code, fault.operator)
            self._sessions.record_clear(result.driver_faults)
        self._clear_requests.answer(results)

    def _notify_watchdog(self) -> None:
        """Notify systemd's watchdog. Omit this while the I/O thread hangs and clients get no reports."""
        if self._latest.is_delivered() or time.monotonic_ns() - self._unread_since_ns < IO_STUCK_NS:
            self._notifier.watchdog()


def _served_sockets(config: Config) -> int:
    """Return the number of sockets that share the agent's descriptors; the HTTP server counts as one."""
    return len(config.drivers) + 1 + bool(config.listen)


def _record_settings(config: Config) -> tuple[object, ...]:
    return config.record_dir, config.record_size, config.record_age_s


def _snapshot_recorder(
    config: Config, boot_id: str, previous: "SnapshotRecorder | None" = None
) -> "SnapshotRecorder | None":
    """Return the recorder of snapshots; None: ``record.dir`` is not set. Raises ConfigError.

    Args:
        previous: Recorder before a reload, which is closed but may still write; None: there was no recorder.
    """
    if config.record_dir is None:
        return None
    from agent.record.events import SegmentHead
    from agent.record.recorder import RecordLimits, SnapshotRecorder

    limits = RecordLimits(config.record_size, config.record_age_s)
    head = SegmentHead(VERSION, config.node_name, boot_id)
    return SnapshotRecorder(config.record_dir, limits, head, previous=previous)


def _cluster_publisher(
    config: Config, consumer_map: "Callable[[], ConsumerMap | None]"
) -> "ClusterPublisher | None":
    """Return the part that publishes health to the API server; None: ``k8s.enabled`` is false.
    Raises the same errors as :func:`run`."""
    if not config.k8s_enabled:
        return None
    from agent.cluster.cluster_publisher import open_cluster_publisher  # with the HTTP client, 3 MiB

    return open_cluster_publisher(config, consumer_map)


def _sentinel_publisher(config: Config) -> "SentinelPublisher | None":
    """Return the part that sends health to NVSentinel; None: ``nvsentinel.socket`` is not set."""
    if config.nvsentinel_socket is None:
        return None
    from agent.cluster.sentinel_publisher import SentinelPublisher

    return SentinelPublisher(
        config.nvsentinel_socket,
        config.node_name,
        remediate=config.nvsentinel_remediate,
        state_dir=config.state_dir,
    )


class _Http(NamedTuple):
    """HTTP server with its thread, and the view through which the server reads the agent's state."""

    view: "AgentView"
    server: "HttpServer"
    thread: AsyncioThread


def _log_http_failure(error: BaseException) -> None:
    """Log the exception that ended the HTTP server, which serves the metrics and the status page.

    The agent continues, because health reports do not need the server.
    """
    log.error("http: the server ended; metrics are missing until a restart of the agent", exc_info=error)


class _IoFailure:
    """Exception that ended the I/O thread (asyncio), passed to the core thread (Trio)."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._event: trio.Event | None = None

    def bind(self, token: trio.lowlevel.TrioToken) -> None:
        """Set the Trio loop in which :meth:`wait` will be called. Core thread only."""
        with self._lock:
            self._token, self._event = token, trio.Event()
            if self._error is not None:
                self._event.set()

    def set(self, error: BaseException) -> None:
        """Store the exception that ended the I/O thread, and wake :meth:`wait`. Thread-safe."""
        with self._lock:
            self._error = error
            if self._token is not None and self._event is not None:
                with suppress(trio.RunFinishedError):  # the agent ends already
                    self._token.run_sync_soon(self._event.set)

    async def wait(self) -> None:
        """Wait for the exception that ends the I/O thread, and raise it. Core thread only."""
        assert self._event is not None, "bind() comes first"
        await self._event.wait()
        assert self._error is not None
        raise self._error


def yield_to_senders() -> None:
    """Sleep for YIELD_S, so that the I/O thread sends the report before the core thread does other work."""
    time.sleep(YIELD_S)


@contextmanager
def _directory_locks(config: Config) -> Iterator[list[DirectoryLock]]:
    """Hold the locks of the runtime and the state directory in a ``with`` block.

    The locks ensure that only one agent serves the sockets and writes the state.

    If the state directory cannot be created or written, it has no lock, and the agent keeps its state in
    memory.
    """
    with ExitStack() as held:
        make_socket_directory(config.runtime_dir, setting="--runtime-dir")
        try:
            locks = [_lock_directory(config.runtime_dir, "runtime directory", "serves it")]
            held.callback(locks[0].close)
        except PermissionError as error:
            raise PermissionDeniedError(
                f"lock file {error.filename}: cannot be opened: {error.strerror}; choose another "
                "--runtime-dir"
            ) from error
        except OSError as error:
            reason = open_error_reason(error)
            raise ConfigError(
                f"lock file {config.runtime_dir / LOCK_FILE}: cannot be opened: {reason}; choose another "
                "--runtime-dir"
            ) from error
        try:
            make_directory(config.state_dir)
            check_directory(config.state_dir)
            if not os.path.samefile(config.state_dir, config.runtime_dir):
                locks.append(_lock_directory(config.state_dir, "state directory", "uses it"))
                held.callback(locks[1].close)
        except UnsafeDirectory as error:
            raise ConfigError(
                f"state directory {config.state_dir}: {error.reason}, or choose another directory with "
                "--state-dir"
            ) from None
        except OSError as error:
            log.warning(
                "state directory %s: not locked: %s; a second agent with this state is not detected",
                config.state_dir,
                open_error_reason(error),
            )
        yield locks


def _lock_directory(directory: Path, name: str, use: str) -> DirectoryLock:
    """Lock a directory of the agent; ``name`` and ``use`` describe the directory in error texts.
    Raises OSError if the lock file cannot be opened."""
    try:
        return DirectoryLock(directory)
    except LockHeld as error:
        raise ResourceBusyError(
            f"{name} {directory}: another agent (pid {error.pid} on the host or in its container) {use}; "
            "stop that agent"
        ) from None
    except ValueError as error:
        raise ConfigError(f"lock file {directory / LOCK_FILE}: {error}; remove it") from None


def _collect_signals_outside_receiver() -> Sequence[int]:
    """Return a list that gets each signal of ``_SIGNALS`` while Trio's receiver does not handle it.

    When the receiver closes, it restores the handlers that this function has set, so that signals no longer
    end the process: it stops within ``STOP_S`` anyway, and a second SIGTERM, or the first one while a failed
    agent stops, would end it before it has saved the faults and logged its failure. Main thread only.
    """
    collected: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _frame: collected.append(number))
    return collected


@contextmanager
def _unblock_signal(number: signal.Signals) -> Iterator[None]:
    """Unblock a signal in a ``with`` block; a signal that was sent while it was blocked is then delivered."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def status_line(report: Report) -> str:
    """Return the status text for systemd: ``4 devices: 3 healthy, 1 unhealthy``, and stalled sources."""
    counts = {health: sum(device.health is health for device in report.devices) for health in Health}
    parts = [
        f"{counts[health]} {health.name.lower()}"
        for health in (Health.HEALTHY, Health.UNHEALTHY, Health.UNKNOWN)
        if counts[health]
    ]
    stalled = [source.name for source in report.sources if source.state is SourceState.STALLED]
    devices = "device" if len(report.devices) == 1 else "devices"
    text = f"{len(report.devices)} {devices}: {', '.join(parts) or 'none'}"
    return f"{text}; stalled: {', '.join(stalled)}" if stalled else text
