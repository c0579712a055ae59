"""Health monitor inside a DRA driver, for asyncio, Trio and plain programs.

The health engine runs in a thread of its own, ``dh-core``, so a driver that blocks its own loop delays no
report. A failure of the monitor never ends the driver; every device is then Unknown. The monitor sets no
signal handlers, no logging configuration and no event-loop policy.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from agent.config.config import CHECKPOINT, KUBELET_DIR, Config
from agent.config.values import check_driver_name
from agent.devices.taints import TaintPolicy, taint_domain
from agent.driver.merged_snapshot_source import HostAndDriverSource
from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.driver.taint_callback_publisher import TaintCallback, taint_policy
from agent.embed.callback_runner import DriverCallbackRunner
from agent.embed.checks import (
    DriverCheckScheduler,
    HealthCheck,
    HealthCheckFunction,
    as_patterns,
    default_check_name,
)
from agent.embed.core_components import MIN_STOP_S, CoreComponents, failed_report
from agent.embed.devices import Device
from agent.engine.loop import ReportHub
from agent.errors import ConfigError, suggestion
from agent.model.claim import ClaimDevice, DeviceRef
from agent.model.health import DeviceHealth, Health, Severity, Taints
from agent.model.prepare import DriverFault
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.prepare.error_tables import ErrorPattern
from agent.prepare.errors import FailedDeviceError
from agent.serve.grpc.codec import Codec
from agent.serve.grpc_servers import encode_device_health
from agent.serve.health.embedded_service import SERVICES, EmbeddedCodec, EmbeddedHealthService
from agent.system.files import StrPath, as_path
from agent.system.output import get_logger
from agent.system.threads.latest_value import LatestValue
from agent.system.threads.loop_thread import TrioThread
from agent.system.timing import read_clocks

STOPPED: Final = "health monitor stopped"
"""Message of the status UNAVAILABLE that clients get when the monitor stops."""
REEVALUATE_S: Final = 0.1
"""Interval of evaluations while a failed prepare waits for the health of its devices [s]."""
STOP_S: Final = 2.0
"""Default timeout for stopping all threads of a monitor [s]."""
CHECKS_STOP_S: Final = 0.2
"""Longest wait of a stop for running health checks, after the core thread has ended [s]."""

log = get_logger(__name__)
F = TypeVar("F", bound=HealthCheckFunction)


class DefaultStateDir(Enum):
    """Type of the marker for the default state directory, see :func:`default_state_dir`."""

    DEFAULT = "default"


DEFAULT_DIRECTORY: Final = DefaultStateDir.DEFAULT


def default_state_dir(kubelet_dir: Path, driver: str) -> Path:
    """Return the default state directory: ``plugins/<driver>/drahealth`` below the kubelet's directory."""
    return kubelet_dir / "plugins" / driver / "drahealth"


def check_functions(optional: Mapping[str, object], **required: object) -> None:
    """Check arguments by name; those of `optional` may be None. Raises ConfigError if one is no function."""
    given = {argument: value for argument, value in optional.items() if value is not None}
    for argument, value in (required | given).items():
        if not callable(value):
            raise ConfigError(f"argument {argument}: {value!r} is not a function")


class Monitor:
    """Health monitor of one driver's devices. Thread-safe.

    A monitor is started once, and only after a fork, because threads do not survive a fork. A process may
    have several monitors. ``with`` and ``async with`` (asyncio and Trio) start and stop a monitor.
    """

    def __init__(
        self,
        driver: str,
        *,
        version: str = "",
        config: Config | None = None,
        hardware: bool = True,
        kubelet_dir: StrPath = KUBELET_DIR,
        state_dir: StrPath | DefaultStateDir | None = DEFAULT_DIRECTORY,
        patterns: Sequence[ErrorPattern] = (),
        policy: TaintPolicy | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        clock: Callable[[], Instant] = read_clocks,
    ) -> None:
        """Create a monitor and load the saved results of prepares. Blocks up to 1.5 s.

        Args:
            driver: Name of the driver, as it registers with the kubelet.
            version: Version of the driver; prepares whose failures were cached for another version are tried
                again.
            config: Node name and limits; None: defaults, with the host name as the node name.
            hardware: Whether to monitor the machine, too: CPUs, memory, hugepages, GPUs, the kernel log. If
                not, only the driver's health checks and failed prepares count.
            kubelet_dir: The kubelet's directory, as the kubelet itself names it.
            state_dir: Directory of saved state; None: no state is saved. The default is the directory that
                ``drahealth prepares`` reads: ``plugins/<driver>/drahealth`` below the kubelet's directory.
            patterns: Patterns for prepare error texts, in addition to the built-in ones.
            policy: Policy of the taints; None: the policy of the configuration.
            on_error: Called once with :attr:`failure` if the monitor fails; in the core thread, which cannot
                stop the monitor.
            clock: Returns wall clock and monotonic time; replaced in tests.

        Raises:
            ConfigError: A name or a setting is invalid.
        """
        if config is not None and not isinstance(config, Config):
            raise ConfigError(f"argument config: {config!r} is not a configuration; pass a drahealth.Config")
        config = config or Config(node_name=os.uname().nodename.lower())
        texts = {"driver": driver, "config.node_name": config.node_name, "version": version}
        for argument, value in texts.items():
            if not isinstance(value, str):  # such as None, of an environment variable that is not set
                raise ConfigError(f"argument {argument}: {value!r} is not a string")
        if not all(isinstance(pattern, ErrorPattern) for pattern in patterns):
            raise ConfigError(f"argument patterns: {patterns!r} has another object than an ErrorPattern")
        check_functions({"on_error": on_error})
        try:
            check_driver_name(driver)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        root = as_path("kubelet_dir", kubelet_dir) or KUBELET_DIR
        policy = policy or taint_policy(config)
        taint_domain(driver, policy)
        directory = (
            default_state_dir(root, driver)
            if isinstance(state_dir, DefaultStateDir)
            else as_path("state_dir", state_dir)
        )
        self._driver = driver
        self._kubelet_dir = root
        self._config = config
        self._on_error = on_error
        self._hub = ReportHub()
        self._source = HostAndDriverSource(driver)
        self._scheduler = DriverCheckScheduler(driver, self._config.node_name, self._source)
        self._components = CoreComponents(
            driver,
            self._config,
            self._source,
            hardware=hardware,
            directory=directory,
            policy=policy,
            clock=clock,
            publish=self._hub.publish,
            on_evaluated=self._hub.handle_evaluation,
        )
        self._thread = TrioThread(
            lambda: [*self._components.open(self._callback), self._scheduler.run],
            on_failure=self._fail,
            name="dh-core",
        )
        self._lock = threading.Lock()
        self._stopping = threading.Lock()
        self._started = False
        self._pid = 0  # of the process that has started the monitor
        self._stopped: bool | None = None
        self._failure: BaseException | None = None
        self._services: dict[EmbeddedHealthService, LatestValue[Report]] = {}
        self._callback: TaintCallback | None = None
        self._tracker = PrepareFailureTracker(
            driver,
            directory,
            self,
            version=version,
            patterns=(*patterns, *self._config.prepare_patterns),
            taint_wait_s=self._config.taint_wait_s,
            claims_file=root / CHECKPOINT,
        )

    # --- identity ----------------------------------------------------------------------------------------

    @property
    def driver(self) -> str:
        """Name of the driver."""
        return self._driver

    @property
    def node(self) -> str:
        """Name of the Kubernetes node, which is also the DRA pool of devices that name no pool."""
        return self._config.node_name

    @property
    def kubelet_dir(self) -> Path:
        """The kubelet's directory."""
        return self._kubelet_dir

    @property
    def tracker(self) -> PrepareFailureTracker:
        """Prepare tracker, which classifies failed prepares and records all results of prepares."""
        return self._tracker

    # --- devices and checks --------------------------------------------------------------------------------

    def add(self, *devices: Device) -> None:
        """Add devices, all of them or none; allowed at any time.

        Raises:
            ConfigError: A device exists already, or there are too many.
        """
        self._scheduler.add_devices(*devices)
        self._report_failure()

    def remove(self, *names: str) -> None:
        """Remove devices by name. Reports list them as Unknown for ten minutes, and omit them afterwards.

        Raises:
            ConfigError: A device does not exist.
        """
        self._scheduler.remove_devices(*names)

    def check(
        self,
        *,
        every_s: float,
        timeout_s: float,
        devices: str | Sequence[str] = "*",
        raise_after: int = 3,
        clear_after: int = 3,
        name: str = "",
    ) -> Callable[[F], F]:
        """Register a function as a health check of the driver's devices; returns the function unchanged.

        The function gets a :class:`Device`. A plain function is called in a worker thread, an async one in
        the core thread's Trio loop, which it must not block. The function returns None or True for no fault,
        or the result of :func:`drahealth.unhealthy`, :func:`drahealth.degraded` or :func:`drahealth.unknown`.
        Any other answer, an exception or a timeout is no result: the device becomes Unknown after
        `raise_after` of them in a row.

        Args:
            every_s: Period [s], 0.1 to 3600.
            timeout_s: Longest duration of a call [s], 0.01 to 3600; the next call waits for its return.
            devices: One or more shell patterns of device names; they also match devices added later.
            raise_after: Failing calls in a row before a fault is reported, 1 to 1000.
            clear_after: Passing calls in a row before a fault is cleared, 1 to 1000.
            name: A DNS label; empty: the function's name.

        Raises:
            ConfigError: A setting is invalid, or the name is taken.
        """

        def decorate(function: F) -> F:
            self._scheduler.add_check(
                HealthCheck(
                    name=name or default_check_name(function),
                    function=function,
                    every_s=every_s,
                    timeout_s=timeout_s,
                    devices=as_patterns(devices),
                    raise_after=raise_after,
                    clear_after=clear_after,
                )
            )
            return function

        return decorate

    def recheck(self, name: str = "") -> None:
        """Run one health check now on all its devices; empty name: all checks.

        Raises ConfigError if no check has the name.
        """
        self._scheduler.run_now(name)

    # --- state: never blocks --------------------------------------------------------------------------------

    @property
    def report(self) -> Report | None:
        """Newest health report; None: no report yet."""
        return self._hub.report

    @property
    def is_started(self) -> bool:
        """Whether the monitor was started, even if it has been stopped since."""
        return self._started

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the core thread; None: the monitor has not failed."""
        return self._failure

    @property
    def is_up(self) -> bool:
        """Whether the core thread runs and the newest report is younger than its lease (time of validity)."""
        report = self.report
        if report is None or self._failure is not None or not self._thread.is_alive:
            return False
        return time.monotonic_ns() - report.at.mono_ns <= self._config.lease_s * NS

    def health_of(self, device: DeviceRef | ClaimDevice | Device | str) -> DeviceHealth | None:
        """Return a device's health in the newest report; None: the report does not have the device.

        A name alone stands for an added device. Raises TypeError: the argument is not a device.
        """
        if isinstance(device, Device):
            device = device.name
        if isinstance(device, str):
            declared = self._scheduler.declared_devices.get(device)
            device = DeviceRef(self._driver, declared.pool if declared else self.node, device)
        ref = device.ref if isinstance(device, ClaimDevice) else device
        if not isinstance(ref, DeviceRef):  # it would have no health, and pass as a healthy device
            raise TypeError(f"{ref!r} is not a device; pass a claim's device or a name")
        return self._hub.health_of(ref)

    def require_healthy(self, device: DeviceRef | ClaimDevice | Device | str) -> None:
        """Raise FailedDeviceError if a device is Unhealthy. For prepare handlers.

        Args:
            device: The device; a name alone stands for an added device.

        Raises:
            FailedDeviceError: The device is Unhealthy; with code and evidence of the cause. Faults that an
                earlier prepare reported do not count: only the next prepare shows whether these faults have
                passed. A device of a claim with admin access, or with a toleration of any taint that keeps
                pods off, raises nothing.
            ConfigError: A name alone is that of no added device.
            TypeError: The argument is not a device.
        """
        found, known = self.health_of(device), self._scheduler.declared_devices
        if found is None and isinstance(device, str) and device not in known:  # a wrong name would pass
            raise ConfigError(f"device {device!r} does not exist{suggestion(device, known)}")
        if found is None or found.health is not Health.UNHEALTHY:
            return
        if isinstance(device, ClaimDevice) and device.accepts_faults:
            return
        for cause in found.causes:
            if cause.severity is Severity.UNHEALTHY and not cause.driver_reported:
                raise FailedDeviceError(DeviceRef(*found.key), cause.evidence, code=cause.code)

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until the first health report. Returns False after the timeout, or if the monitor failed."""
        self._hub.wait_until(lambda: self.report is not None or self._has_stopped(), timeout_s)
        return self.report is not None and self._failure is None

    # --- engine of the tracker -----------------------------------------------------------------------------

    def report_faults(self, faults: Sequence[DriverFault]) -> None:
        """Replace all faults that failed prepares have reported. Called by the prepare tracker."""
        self._source.set_driver_faults(self._driver, faults)

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        """Block until taints are decided and health streams have a report with these faults.

        Returns False on timeout.

        Faults of undeclared devices are ignored, because no report has them. Called by the prepare tracker.
        """
        declared = {
            DeviceRef(device.driver, device.pool, device.name)
            for device in self._scheduler.declared_devices.values()
        }
        awaited = [fault for fault in faults if fault.device in declared]
        return self._hub.wait_delivered(awaited, timeout_s, self._has_stopped)

    def wait_evaluated(self, devices: Collection[DeviceRef], timeout_s: float) -> None:
        """Block until the devices' health is based on readings that end after this call, or until a timeout.

        Their health checks run at once. A check that finds a fault runs again, until the fault is reported or
        is not confirmed. Called by the prepare tracker.
        """
        began_ns, end_s = time.monotonic_ns(), time.monotonic() + timeout_s
        subjects = {
            device.subject
            for device in self._scheduler.declared_devices.values()
            if DeviceRef(device.driver, device.pool, device.name) in devices
        }
        if not subjects:
            return

        def is_settled() -> bool:
            report = self._hub.evaluated
            known = [dev for dev in report.devices if DeviceRef(*dev.key) in devices] if report else []
            return self._has_stopped() or all(
                dev.health is Health.UNHEALTHY
                or (dev.verified.mono_ns >= began_ns and not self._source.failing_checks({"/".join(dev.key)}))
                for dev in known
            )

        self._scheduler.run_for_devices(subjects)
        while (left_s := end_s - time.monotonic()) > 0:
            self._source.request_evaluation()
            if self._hub.wait_until(is_settled, min(REEVALUATE_S, left_s)):
                return
            if failing := self._source.failing_checks(subjects):
                self._scheduler.run_again(failing)

    def wait_tainted(self, devices: Collection[DeviceRef], timeout_s: float) -> bool:
        """Publish the current taints of devices at once, and block until this is done.

        Returns False on timeout.

        Called by the prepare tracker. True if the driver has no function that publishes taints.
        """
        return self._components.wait_tainted(devices, timeout_s)

    # --- taints --------------------------------------------------------------------------------------------

    def on_taints(self, callback: TaintCallback) -> TaintCallback:
        """Set the function that publishes taints; usable as a decorator. Called before :meth:`start`.

        The function is called when taints change, and again after an exception. A plain function is called in
        a worker thread, an async function in the core thread's Trio loop. A failed prepare whose cause is a
        device waits up to ``taints.wait`` of the configuration until the function has published the device's
        taint.

        Raises RuntimeError: the monitor was started, or has such a function, which may be a SlicePublisher's;
        ConfigError: the argument is not a function.
        """
        check_functions({}, callback=callback)
        with self._lock:
            if self._started or self._callback is not None:  # of two functions one would never be called
                reason = "after start()" if self._started else f"before, with {self._callback!r}"
                raise RuntimeError(f"on_taints() was called {reason}; call it once, before start()")
            self._callback = callback
        return callback

    @property
    def taints(self) -> Taints:
        """Taints that the driver's devices should have now."""
        return self._components.taints

    # --- streams -------------------------------------------------------------------------------------------

    @property
    def supported_services(self) -> tuple[str, ...]:
        """Names of the health services, newest first, for the ``supported_versions`` of a registration."""
        return SERVICES

    @property
    def codec(self) -> Codec:
        """Codec for a :class:`grpclib.server.Server` that serves :meth:`health_service`.

        The codec sends encoded health messages unchanged, and encodes the messages of Google's protobuf and
        betterproto.
        """
        return EmbeddedCodec()

    def health_service(self) -> EmbeddedHealthService:
        """Return a new service of the kubelet's health API, v1 and v1alpha1, for the driver's grpclib server.

        The server needs :attr:`codec`. The service's streams end with the monitor.
        """
        latest = self.subscribe()
        service = EmbeddedHealthService(latest, encode_device_health, self._driver)
        service.on_end = self._drop_service
        with self._lock:
            self._services[service] = latest
            stopped = self._stopped is not None
        if stopped:
            service.end(STOPPED)
        return service

    def _drop_service(self, service: EmbeddedHealthService) -> None:
        with self._lock:
            self.unsubscribe(self._services.pop(service))

    def subscribe(self) -> LatestValue[Report]:
        """Return a cell (holder of one value) that always has the newest report, for one asyncio loop."""
        return self._hub.subscribe()

    def unsubscribe(self, latest: LatestValue[Report]) -> None:
        """Stop updating a cell that :meth:`subscribe` returned."""
        self._hub.unsubscribe(latest)

    # --- life cycle ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the monitor. Never blocks; a later failure is in :attr:`failure`.

        Raises:
            RuntimeError: The monitor was started before.
        """
        with self._lock:
            if self._started or self._stopped is not None:
                text = "can be started only once, and run() of its server starts it; create another one"
                raise RuntimeError(f"monitor of {self._driver}: {text}")
            self._started, self._pid = True, os.getpid()
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may not start another thread
            self._fail(error)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Stop all threads and streams. Blocks up to about ``timeout_s``; a second call has no effect.

        In a forked child of the process that started the monitor, the call has no effect either.

        Returns:
            True if all threads and streams have ended; False: hung threads were abandoned and logged.

        Raises:
            RuntimeError: The caller runs in the core thread, as an async check does.
        """
        if self._thread.is_current:
            raise RuntimeError(
                f"monitor of {self._driver}: stop() was called in its core thread; use another thread"
            )
        if self._pid not in (0, os.getpid()):  # eventfds and child processes are the parent's, too
            return True
        with self._stopping:
            if self._stopped is None:
                self._stopped = False
                hung = self._stop_parts(time.monotonic() + timeout_s)
                self._stopped = not hung
                for part in hung:
                    log.warning(
                        "driver %s: shutdown: %s did not stop in time; abandoning its thread",
                        self._driver,
                        part,
                    )
            return self._stopped

    async def aclose(self, timeout_s: float = STOP_S) -> bool:
        """Return the result of :meth:`stop`, called from an asyncio or Trio task, even a cancelled task."""
        return await DriverCallbackRunner().run_blocking(lambda: self.stop(timeout_s))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()  # does not block the loop
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- failure: core thread only ---------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._report_failure()
        log.error("driver %s: core thread failed; all devices are Unknown", self._driver, exc_info=error)
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException:
                log.exception("driver %s: on_error raised an exception; it is ignored", self._driver)

    def _report_failure(self) -> None:
        """Report every device Unknown if the core thread has failed; else do nothing."""
        if self._failure is None:
            return
        with self._lock:  # of concurrent callers the last one has all added devices
            declared, lease_s = self._scheduler.declared_devices.values(), self._config.lease_s
            self._hub.publish(
                failed_report(self.report, declared, self._failure, self.node, lease_s, read_clocks())
            )

    def _has_stopped(self) -> bool:
        return self._failure is not None or self._stopped is not None

    # --- stop ----------------------------------------------------------------------------------------------

    def _stop_parts(self, end_s: float) -> Sequence[str]:
        """Stop all threads and components; return the names of those that did not stop in time."""

        def left_s(most_s: float = float("inf")) -> float:
            return min(most_s, max(MIN_STOP_S, end_s - time.monotonic()))

        with self._lock:
            services = list(self._services)
        for service in services:
            service.end(STOPPED)
        self._hub.notify()
        hung: list[str] = []
        if self._thread.stop(left_s()):
            hung += self._components.close(end_s)
            hung += self._scheduler.hung_calls(left_s(CHECKS_STOP_S))
        else:
            hung.append("core thread")  # it may still read: its components stay open
        if not self._tracker.close(left_s()):
            hung.append("ledger writer")
        return hung
