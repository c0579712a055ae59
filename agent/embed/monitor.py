"""The monitor: drahealth inside a DRA driver, whatever kind of program that is.

The core decides in a thread of its own, ``dh-core``, so a driver that blocks its own loop delays no verdict.
A failure in here never ends the driver: it surfaces from the monitor, and every device is Unknown at once.
Nothing of the process is changed: no signal handlers, no logging configuration, no event-loop policy.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from agent.config.config import KUBELET_DIR, Config
from agent.config.values import check_driver
from agent.devices.taints import TaintPolicy, domain_of
from agent.driver.prepare_tracker import PrepareTracker
from agent.driver.report_hub import ReportHub
from agent.driver.taint_publisher import Callback, policy_of
from agent.embed.callback_runner import CallbackRunner
from agent.embed.check_scheduler import CheckScheduler
from agent.embed.checks import Check, Function, name_of, patterns_of
from agent.embed.components import STOP_LEAST_S, Components
from agent.embed.devices import Device
from agent.embed.failed import failed_report
from agent.embed.service import STOPPED, SUPPORTED_SERVICES, codec, open_service
from agent.embed.source import DriverSource
from agent.errors import ConfigError
from agent.model.claim import ClaimDevice, DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault
from agent.model.report import Report
from agent.model.taint import Taints
from agent.model.time import NS, Instant
from agent.prepare.errors import FailedDevice
from agent.prepare.patterns import Pattern
from agent.serve.grpc.codec import Codec
from agent.serve.health.embedded_service import EmbeddedHealth
from agent.system.clock import read_clocks
from agent.system.threads.latest import Latest
from agent.system.threads.trio_thread import TrioThread

STOP_S: Final = 2.0
"""What all threads have to end, unless somebody says otherwise [s]."""
CHECKS_STOP_S: Final = 0.2
"""What checks that still run have of that, when all else has ended [s]."""

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Function)


class Default(Enum):
    """Stands for the directory that follows from the kubelet's and the driver's name."""

    DEFAULT = "default"


DEFAULT: Final = Default.DEFAULT


def default_state_dir(kubelet_dir: Path, driver: str) -> Path:
    """Where a driver's monitor keeps what outlives it: in the driver's own directory."""
    return kubelet_dir / "plugins" / driver / "drahealth"


class Monitor:
    """The health of one driver's devices.

    Every method may be called from any thread. It is started once, and after the process has forked, if it
    does: threads do not survive a fork. There may be several in one process. ``with`` and ``async with`` (of
    asyncio and of Trio) start and stop it.
    """

    def __init__(
        self,
        driver: str,
        *,
        version: str = "",
        config: Config | None = None,
        hardware: bool = True,
        kubelet_dir: Path = KUBELET_DIR,
        state_dir: Path | Default | None = DEFAULT,
        patterns: Sequence[Pattern] = (),
        policy: TaintPolicy | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        clock: Callable[[], Instant] = read_clocks,
    ) -> None:
        """
        Args:
            driver: Its name, as it registers with the kubelet.
            version: Of the driver: what one version refused for good, another tries.
            config: The node's name, the limits; None: defaults, and the host's name as the node's.
            hardware: The host is watched, too: CPUs, memory, hugepages, GPUs, the kernel log. Without it no
                thread of C's is started, and only the driver's checks and its failed prepares count.
            kubelet_dir: The kubelet's directory, by the path that the kubelet itself has for it.
            state_dir: Of what outlives the process; None: nothing does. Unless said otherwise it is where
                ``drahealth prepares`` finds it: ``plugins/<driver>/drahealth`` in the kubelet's.
            patterns: Of the texts of prepare errors, beside those that are known.
            policy: Which taints are offered; None: as the configuration says.
            on_error: Called once if the monitor fails, with :attr:`failure`; in the core's thread, from which
                nobody can stop it.
            clock: Now, on both clocks; whatever else it gives than the machine's is for tests.

        Raises:
            ConfigError: a name or a setting cannot be used.
        """
        try:
            check_driver(driver)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _check_type("config", config, Config)
        _check_type("kubelet_dir", kubelet_dir, Path)
        _check_type("state_dir", None if state_dir is DEFAULT else state_dir, Path)
        config = config or Config(node_name=os.uname().nodename.lower())
        policy = policy or policy_of(config)
        domain_of(driver, policy)
        directory = default_state_dir(kubelet_dir, driver) if state_dir is DEFAULT else state_dir
        self._driver = driver
        self._kubelet_dir = kubelet_dir
        self._config = config
        self._on_error = on_error
        self._board = ReportHub()
        self._source = DriverSource(driver)
        self._rounds = CheckScheduler(driver, self._config.node_name, self._source)
        self._parts = Components(
            driver,
            self._config,
            self._source,
            hardware=hardware,
            directory=directory,
            policy=policy,
            clock=clock,
            publish=self._board.publish,
        )
        self._thread = TrioThread(
            lambda: [*self._parts.open(self._callback), self._rounds.run],
            on_failure=self._fail,
            name="dh-core",
        )
        self._lock = threading.Lock()
        self._stopping = threading.Lock()
        self._started = False
        self._stopped: bool | None = None
        self._failure: BaseException | None = None
        self._services: list[EmbeddedHealth] = []
        self._callback: Callback | None = None
        self._desk = PrepareTracker(
            driver,
            directory,
            self,
            version=version,
            patterns=(*patterns, *self._config.prepare_patterns),
        )

    # --- who it is -----------------------------------------------------------------------------------------

    @property
    def driver(self) -> str:
        """The driver's name."""
        return self._driver

    @property
    def node(self) -> str:
        """The node's name: the pool of devices that name none."""
        return self._config.node_name

    @property
    def kubelet_dir(self) -> Path:
        """The kubelet's directory."""
        return self._kubelet_dir

    @property
    def tracker(self) -> PrepareTracker:
        """What judges and remembers failed prepares."""
        return self._desk

    # --- devices and checks --------------------------------------------------------------------------------

    def add(self, *devices: Device) -> None:
        """More devices, at any time: all of them, or none.

        Raises:
            ConfigError: one is there already, or there are too many.
        """
        self._rounds.add(*devices)
        self._repeat_failure()

    def remove(self, *names: str) -> None:
        """Devices that the driver has no longer. They are Unknown for ten minutes, then nothing is said.

        Raises:
            ConfigError: there is no such device.
        """
        self._rounds.remove(*names)

    def check(
        self,
        *,
        every: float,
        timeout: float,
        devices: str | Sequence[str] = "*",
        raise_after: int = 3,
        clear_after: int = 3,
        name: str = "",
    ) -> Callable[[F], F]:
        """Decorates a check of the driver's own devices; it stays the function that it is.

        It is called with a :class:`Device`, in a worker thread if it is a plain function, in the core's Trio
        loop if it is async; that must not block. None or True: all is well. What is wrong it says by what
        :func:`agent.unhealthy`, :func:`agent.degraded` or :func:`agent.unknown` make. Anything else, an
        exception and silence mean that nobody could look: the device is Unknown.

        Args:
            every: From look to look [s], 0.1 to 3600.
            timeout: How long it may take [s], 0.01 to 3600; the next call waits until this one returns.
            devices: One or more patterns of names, as a shell's; devices that are added later count, too.
            raise_after: Bad looks in a row until it is believed, 1 to 1000.
            clear_after: Good ones in a row until it is over, likewise.
            name: A DNS label; empty: the function's name.

        Raises:
            ConfigError: names the check, what is wrong, and the limit.
        """

        def decorate(function: F) -> F:
            self._rounds.check(
                Check(
                    name=name or name_of(function),
                    function=function,
                    every_s=every,
                    timeout_s=timeout,
                    devices=patterns_of(devices),
                    raise_after=raise_after,
                    clear_after=clear_after,
                )
            )
            return function

        return decorate

    def recheck(self, name: str = "") -> None:
        """A check is done now, of all its devices; without a name all are. Raises ConfigError."""
        self._rounds.recheck(name)

    # --- what is known: nobody waits -----------------------------------------------------------------------

    @property
    def report(self) -> Report | None:
        """The newest picture; None: somebody has still to look for the first time."""
        return self._board.report

    @property
    def is_started(self) -> bool:
        """Whether it was started; it may have been stopped since."""
        return self._started

    @property
    def failure(self) -> BaseException | None:
        """Why the core has ended unasked; None: it has not."""
        return self._failure

    @property
    def is_up(self) -> bool:
        """Whether what is said now is what is known now: the core runs, and has spoken within a lease."""
        report = self.report
        if report is None or self._failure is not None or not self._thread.is_alive:
            return False
        return time.monotonic_ns() - report.at.mono_ns <= self._config.lease_s * NS

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """What the newest report says of a device; None: nothing."""
        return self._board.health_of(device)

    def require_healthy(self, device: DeviceRef | ClaimDevice | str) -> None:
        """For prepare handlers: nothing, unless the device is known to be broken.

        Args:
            device: A name alone is that of a device that was added.

        Raises:
            FailedDevice: It is Unhealthy; with the code and the evidence of that. Not knowing stops nobody;
                nor does what an earlier prepare found: whether that is over only a prepare can tell.
        """
        if isinstance(device, str):
            declared = self._rounds.declared.get(device)
            pool = declared.pool if declared else self.node
            device = DeviceRef(self._driver, pool, device)
        ref = device.ref if isinstance(device, ClaimDevice) else device
        found = self.health_of(ref)
        if found is None or found.health is not Health.UNHEALTHY:
            return
        for cause in found.causes:
            if cause.severity is Severity.UNHEALTHY and not cause.told:
                raise FailedDevice(ref, cause.evidence, code=cause.code)

    def wait_ready(self, timeout_s: float) -> bool:
        """Blocks until there is a report. False: there was none in time, or the monitor failed."""
        self._board.wait_until(lambda: self.report is not None or self._is_over(), timeout_s)
        return self.report is not None and self._failure is None

    # --- what a prepare found ------------------------------------------------------------------------------

    def tell(self, told: Sequence[DriverFault]) -> None:
        """All devices that the driver found broken while preparing. For the desk."""
        self._source.tell(told)

    def wait_delivered(self, told: Sequence[DriverFault], timeout_s: float) -> bool:
        """Blocks until a report says it of these devices, taints are offered, and streams have taken it.

        For the desk.

        Returns:
            Whether that is so. A device that nobody declares is not waited for: nothing is said of it.
        """
        ours = {DeviceRef(one.driver, one.pool, one.name) for one in self._rounds.declared.values()}
        awaited = [fault for fault in told if fault.device in ours]
        return self._board.wait_delivered(awaited, timeout_s, self._is_over)

    # --- taints --------------------------------------------------------------------------------------------

    def on_taints(self, callback: Callback) -> Callback:
        """Who publishes the taints; may decorate it. Called when they change, and again until it returns.

        Plain, and called in a worker thread, or async, and called in the core's Trio loop. Before the start.
        """
        with self._lock:
            if self._started:
                raise RuntimeError("on_taints() comes before start()")
            self._callback = callback
        return callback

    @property
    def taints(self) -> Taints:
        """The taints that the devices should have now."""
        return self._parts.taints

    # --- streams -------------------------------------------------------------------------------------------

    @property
    def supported_services(self) -> tuple[str, ...]:
        """What the driver's registration adds to its ``supported_versions``; the newest first."""
        return SUPPORTED_SERVICES

    @property
    def codec(self) -> Codec:
        """The codec of a server that serves :meth:`health_service`."""
        return codec()

    def health_service(self) -> EmbeddedHealth:
        """The kubelet's health API, v1 and v1alpha1, for a grpclib server of the driver's; a new one.

        It runs in the loop of that server, with :attr:`codec`. When the monitor stops, its streams end.
        """
        service = open_service(self.subscribe(), self._driver)
        with self._lock:
            self._services.append(service)
            stopped = self._stopped is not None
        if stopped:
            service.end(STOPPED)
        return service

    def subscribe(self) -> Latest[Report]:
        """Every report from now on, beginning with the newest that there is; for one loop to follow."""
        return self._board.subscribe()

    def unsubscribe(self, latest: Latest[Report]) -> None:
        """Ends what :meth:`subscribe` gave."""
        self._board.unsubscribe(latest)

    # --- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to watch, and returns at once. What goes wrong is in :attr:`failure`.

        Raises:
            RuntimeError: it was started before.
        """
        with self._lock:
            if self._started or self._stopped is not None:
                raise RuntimeError("a monitor is started once; make another")
            self._started = True
        try:
            self._thread.start()
        except RuntimeError as error:  # the system gives us no thread
            self._fail(error)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Ends all threads and streams, in about that long. Again, it does nothing.

        Returns:
            Whether all have ended; what hangs is left behind, and told of in the log.

        Raises:
            RuntimeError: an async check called it: who runs in the core cannot wait for its end.
        """
        if self._thread.is_ours:
            raise RuntimeError("the core cannot be stopped from within")
        with self._stopping:
            if self._stopped is None:
                self._stopped = False
                left = self._end(time.monotonic() + timeout_s)
                for part in left:
                    log.warning("%s hangs and is left behind", part)
                self._stopped = not left
            return self._stopped

    async def aclose(self, timeout_s: float = STOP_S) -> bool:
        """As :meth:`stop`, for a task of any loop, asyncio's or Trio's; cancelled or not."""
        return await CallbackRunner().finish(lambda: self.stop(timeout_s))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()  # waits for nothing
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- when it fails, in the core thread ---------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        log.error("driver %s: the health core failed; its devices are Unknown", self._driver, exc_info=error)
        self._failure = error
        self._repeat_failure()
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException:
                log.exception("driver %s: what was to be told that its health core failed", self._driver)

    def _repeat_failure(self) -> None:
        """Says of every device that nobody looks any more, if that is so."""
        if self._failure is None:
            return
        with self._lock:  # a device that is added meanwhile is in the last of them
            declared, lease_s = self._rounds.declared.values(), self._config.lease_s
            self._board.publish(
                failed_report(self.report, declared, self._failure, self.node, lease_s, read_clocks())
            )

    def _is_over(self) -> bool:
        return self._failure is not None or self._stopped is not None

    # --- the end -------------------------------------------------------------------------------------------

    def _end(self, end_s: float) -> Sequence[str]:
        """Ends every part. Returns those that hang, in words."""

        def left_s(most_s: float = float("inf")) -> float:
            return min(most_s, max(STOP_LEAST_S, end_s - time.monotonic()))

        with self._lock:
            services = list(self._services)
        for service in services:
            service.end(STOPPED)
        self._board.notify()
        left: list[str] = []
        if self._thread.stop(left_s()):
            left += self._parts.close(end_s)
            left += self._rounds.unfinished(left_s(CHECKS_STOP_S))
        else:
            left.append("the core")  # it may still be reading: nothing is taken from under it
        if not self._desk.close(left_s()):
            left.append("what writes the outcomes of prepares")
        return left


def _check_type(name: str, value: object, kind: type) -> None:
    """A text where a path is meant would be noticed in some thread, much later."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}: {value!r} is no {kind.__name__}")
