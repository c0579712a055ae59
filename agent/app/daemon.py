"""The composition root: builds every part, owns the nursery, the signals and the order of the end.

    sampler thread (C) --eventfd--> Trio: step() --Latest--> asyncio thread: sockets
             linked drivers --------^          +--> on_report: a table or a log, with a thread of its own

The Trio thread decides and never blocks; it steps aside when somebody has to tell what it decided.
It is woken by the sampler, by a dwell time that ends, and by the heartbeat, and by nothing else. An exception
here or in the asyncio thread ends the process with its traceback: half an agent would tell the kubelet lies.
"""

import fcntl
import gc
import logging
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from agent.config.config import Config
from agent.driver.links import LinkedSource, Links
from agent.driver.report_hub import ReportHub
from agent.engine.loop import EngineLoop, Timing
from agent.engine.step import begin
from agent.errors import Busy, ConfigError, PermissionDenied
from agent.health.gpu.faults.checkpoint import restore
from agent.model.health import Health
from agent.model.report import Report
from agent.model.source import SourceState
from agent.model.time import NS
from agent.model.use_limits import Limits
from agent.node.open import NODE_STOP_S, open_node, settings_of
from agent.node.pods.history_recorder import Recorder
from agent.node.pods.tracker import PodTracker
from agent.serve.notify import Notifier
from agent.serve.servers import Servers
from agent.serve.sockets import make_directory
from agent.sources.gpu_host import read_boot_id
from agent.store import faults
from agent.store.fault_checkpoint import FaultCheckpointWriter
from agent.system.clock import read_clocks
from agent.system.threads.loop_thread import IoThread
from agent.version import VERSION

if TYPE_CHECKING:
    from agent.driver.link import DriverSession

SWITCH_INTERVAL_S: Final = 0.0005  # a busy thread delays the core by one of these; Python's default is 5 ms
ASIDE_S: Final = 0.001
END_S: Final = 1.7  # from SIGTERM to exit it is less than 2 s, whatever hangs
IO_STOP_S: Final = 0.9
LEAST_S: Final = 0.05  # what each part has to end, even if one before it hangs and took all the time
IO_STUCK_NS: Final = 2 * NS  # it takes a report in microseconds, and in milliseconds on a busy machine

log = logging.getLogger(__name__)


def run(config: Config, on_report: Callable[[Report], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Threads that hang are left behind, and the log names them. A process should leave with :func:`os._exit`:
    the end of a library that a thread is still inside can hang as well.

    Args:
        config: What to read and to serve.
        on_report: Called with every published report, in the thread that decides: it must return at once.

    Raises:
        Busy: another agent holds the runtime directory, or a socket.
        ConfigError: a directory, socket or root cannot be used.
        PermissionDenied: the runtime directory may not be written.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with _directory_lock(config.runtime_dir):
        _serve(config, on_report)


def _serve(config: Config, on_report: Callable[[Report], None] | None) -> None:
    notifier = Notifier.from_environ(os.environ)
    board = ReportHub()
    latest = board.subscribe()

    def link(driver: str, state_dir: Path) -> "DriverSession":
        from agent.driver.link import DriverSession  # 2 MiB that an agent without linked drivers does without

        return DriverSession(
            driver,
            config,
            board,
            state_dir=state_dir,
            declarations=lambda: node.declarations,
            tell=source.tell,
            clock=read_clocks,
        )

    links = Links(config.drivers, config.state_dir, board, link)
    servers = Servers(
        latest, runtime_dir=config.runtime_dir, drivers=config.drivers, version=VERSION, link=links.open
    )
    settings = settings_of(config)
    limits = Limits(config.history_rows, config.history_age_s)
    recorder = Recorder(config.state_dir, limits=limits, drivers=config.drivers)
    pods = PodTracker(config, clock=read_clocks, record=recorder.take if config.history_rows else None)
    try:
        node = open_node(config, settings, config.period_ns, declares=True, pods=pods)
    except BaseException:
        servers.close()
        raise
    source = LinkedSource(node)

    # nobody refuses to run any more
    log.info("drahealth %s on %s, sockets in %s", VERSION, config.node_name, config.runtime_dir)
    links.restore()
    path = config.state_dir / faults.FILE
    kept, problem = faults.load(path)
    if problem:
        log.warning("%s", problem)
    keeper = FaultCheckpointWriter(path, kept)
    boot_id = read_boot_id(config.procfs_root)

    waiting_since_ns = 0  # when the oldest report was published that the I/O thread has not taken

    def publish(report: Report) -> None:
        nonlocal waiting_since_ns
        if latest.is_taken():
            waiting_since_ns = report.at.mono_ns
        links.take(report, report.at)
        step_aside()
        pods.take(report)
        if on_report:
            on_report(report)
        notifier.status(status_line(report))

    def alive() -> None:
        """Feeds the watchdog, unless the I/O thread is stuck: what is decided would reach nobody."""
        if latest.is_taken() or time.monotonic_ns() - waiting_since_ns < IO_STUCK_NS:
            notifier.watchdog()

    core = EngineLoop(
        source=source,
        state=begin(settings, restore(kept, boot_id, settings.gpu, read_clocks())),
        timing=Timing(config.heartbeat_s, config.coalesce_ns, notifier.watchdog_s),
        clock=read_clocks,
        publish=publish,
        remember=keeper.update,
        alive=alive,
        jitter=random.random,
    )
    failed = _Failure()
    io = IoThread(servers.run, on_failure=failed.set)
    try:
        io.start()
        node.start()
        notifier.status("no pass over the node yet")
        gc.freeze()  # 50,000 objects that stay; to walk them would hold up a verdict by 12 ms now and then
        trio.run(_main, core, (node.watch, keeper.run, links.run), failed, notifier.ready)
    finally:
        end_s = time.monotonic() + END_S
        notifier.stopping()
        try:
            if not io.stop(IO_STOP_S):
                log.warning("the I/O thread did not end within %g s", IO_STOP_S)
        finally:
            source.close()
            left = list(node.stop(NODE_STOP_S))
            left += links.close(end_s)
            if not keeper.close(max(0.0, end_s - time.monotonic())):  # a slow disk may have what time is left
                left.append("what writes the fault memory")
            if not recorder.close(max(LEAST_S, end_s - time.monotonic())):
                left.append("what records who used the devices")
            for part in left:
                log.warning("%s hangs and is left behind", part)


async def _main(
    core: EngineLoop,
    beside: tuple[Callable[[], Awaitable[None]], ...],
    failed: "_Failure",
    ready: Callable[[], None],
) -> None:
    failed.bind(trio.lowlevel.current_trio_token())
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        ready()  # not earlier: who says so can be told to stop
        async with trio.open_nursery() as nursery:
            for task in (core.run, *beside, failed.wait):
                nursery.start_soon(task)
            async for number in signals:
                log.info("%s: shutting down", signal.Signals(number).name)
                nursery.cancel_scope.cancel()
                break


class _Failure:
    """An exception of the asyncio thread, on its way to the Trio thread."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._event: trio.Event | None = None

    def bind(self, token: trio.lowlevel.TrioToken) -> None:
        """From the Trio thread, before :meth:`wait`."""
        with self._lock:
            self._token, self._event = token, trio.Event()
            if self._error is not None:
                self._event.set()

    def set(self, error: BaseException) -> None:
        """From any other thread."""
        with self._lock:
            self._error = error
            if self._token is not None and self._event is not None:
                with suppress(trio.RunFinishedError):  # we end already
                    self._token.run_sync_soon(self._event.set)

    async def wait(self) -> None:
        """Raises the exception when there is one."""
        assert self._event is not None, "bind() comes first"
        await self._event.wait()
        assert self._error is not None
        raise self._error


def step_aside() -> None:
    """Python, and a CPU, are for those who tell of a report: what else the Trio thread has to do can wait."""
    time.sleep(ASIDE_S)


@contextmanager
def _directory_lock(runtime_dir: Path) -> Iterator[None]:
    """One agent per runtime directory; the kernel lets go of the lock when the process ends."""
    path = runtime_dir / "agent.lock"
    make_directory(runtime_dir, flag="--runtime-dir")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except PermissionError as error:
        raise PermissionDenied(f"{path}: {error.strerror}; choose another with --runtime-dir") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path}: is in the way, and is no file; remove it")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise Busy(f"{runtime_dir}: another agent (pid {holder}) serves this directory") from None
    try:
        with suppress(OSError):  # a full disk: who comes second is not told who was first
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def status_line(report: Report) -> str:
    """One line for the service manager: ``4 devices: 3 healthy, 1 unhealthy``."""
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
