"""Components of a monitor that run in its core thread: sources, fault checkpoint, taints and the engine
loop.

Opening may block on a disk; only the core thread waits for it. After a failure of the core every device is
reported Unknown (:func:`failed_report`).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.config.config import Config
from agent.devices.inventory import declared_device
from agent.devices.taints import TaintPolicy
from agent.driver.driver_source import DriverSource, EmptySource
from agent.driver.taint_publisher import TaintCallback, TaintPublisher
from agent.engine.loop import EngineLoop, LoopTiming
from agent.engine.step import initial_state
from agent.health.gpu.faults.checkpoint import RestoredFaults, restore_faults
from agent.health.rules import CatalogRow
from agent.health.verdict import message
from agent.model.declared import Declared
from agent.model.faults import PersistentGpuState
from agent.model.health import Blame, Cause, DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.taint import Taints
from agent.model.time import Instant
from agent.node.node_source import NODE_STOP_S, NodeSource, open_node, settings_of
from agent.sources.gpu_host import read_boot_id
from agent.store import faults
from agent.store import taints as taint_store
from agent.store.faults import FaultCheckpointWriter
from agent.system.threads.loop_thread import Task
from agent.system.timing import random_fraction

MIN_STOP_S: Final = 0.05
"""Shortest time that each part has to stop, even if an earlier part used up the whole timeout [s]."""

log = logging.getLogger(__name__)


class Components:
    """Open components of a monitor. Core thread only, except :attr:`taints`, and :meth:`close` after its
    end."""

    def __init__(
        self,
        driver: str,
        config: Config,
        source: DriverSource,
        *,
        hardware: bool,
        directory: Path | None,
        policy: TaintPolicy,
        clock: Callable[[], Instant],
        publish: Callable[[Report], None],
    ) -> None:
        """Create components that are not open.

        Args:
            driver: Name of the driver.
            config: Configuration of the monitor.
            source: Source with the driver's reports; it reads the host's source, which :meth:`open` opens.
            hardware: Whether the host's hardware is monitored, too.
            directory: Directory of saved state; None: no state is saved.
            policy: Policy of the taints.
            clock: Returns the time on both clocks.
            publish: Called with each report after its taints were decided.
        """
        self._driver = driver
        self._config = config
        self._source = source
        self._hardware = hardware
        self._directory = directory
        self._policy = policy
        self._clock = clock
        self._publish = publish
        self._publisher: TaintPublisher | None = None
        self._node: NodeSource | None = None
        self._empty: EmptySource | None = None
        self._checkpoint: FaultCheckpointWriter | None = None

    @property
    def taints(self) -> Taints:
        """Taints that the driver's devices should have now; no taints before :meth:`open`."""
        return self._publisher.taints if self._publisher else Taints()

    def open(self, callback: TaintCallback | None) -> Sequence[Task]:
        """Open all components and start their threads. Returns the tasks of the core thread.

        Args:
            callback: Publishes the taints.

        Raises:
            ConfigError: A root path is too long.
            ProbeError: The kernel refused descriptors or memory.
        """
        settings = settings_of(self._config)
        tasks, restored, save_faults = self._open_checkpoint(settings)
        if self._hardware:
            # udev=False: looking for libudev starts a process, which a driver that reaps children would find
            node = open_node(self._config, settings, self._config.period_ns, declares=False, udev=False)
            self._node = node
            self._source.open(node, node.declare)
            node.start()
            tasks.append(node.watch)
        else:
            self._empty = EmptySource()
            self._source.open(self._empty)
        publisher = self._publisher = TaintPublisher(
            callback,
            driver=self._driver,
            policy=self._policy,
            path=self._directory / taint_store.FILE if self._directory else None,
            clock=self._clock,
        )
        core = EngineLoop(
            source=self._source,
            state=initial_state(settings, restored),
            timing=LoopTiming(self._config.heartbeat_s, self._config.coalesce_ns, watchdog_s=None),
            clock=self._clock,
            publish=lambda report: self._publish_with_taints(report, publisher),
            save_faults=save_faults,
            notify_watchdog=_no_watchdog,
            jitter=random_fraction,
        )
        return [core.run, publisher.run, *tasks]

    def close(self, end_s: float) -> list[str]:
        """Stop all components by a time of the monotonic clock. Returns the names of hung ones."""

        def left_s() -> float:
            return max(MIN_STOP_S, end_s - time.monotonic())

        self._source.close()
        hung: list[str] = []
        if self._node is not None:
            hung += self._node.stop(min(NODE_STOP_S, left_s()))
        if self._empty is not None:
            self._empty.close()
        if self._checkpoint is not None and not self._checkpoint.close(left_s()):
            hung.append("fault checkpoint writer")
        return hung

    def _open_checkpoint(
        self, settings: Settings
    ) -> tuple[list[Task], RestoredFaults | None, Callable[[PersistentGpuState], None]]:
        """Load the fault checkpoint; returns its task, the restored state and the function that saves it."""
        if not self._hardware or self._directory is None:
            return [], None, _discard
        path = self._directory / faults.FILE
        saved, problem = faults.load(path)
        if problem:
            log.warning("%s", problem)
        checkpoint = self._checkpoint = FaultCheckpointWriter(path, saved)
        restored = restore_faults(saved, read_boot_id(self._config.procfs_root), settings.gpu, self._clock())
        return [checkpoint.run], restored, checkpoint.update

    def _publish_with_taints(self, report: Report, publisher: TaintPublisher) -> None:
        """Decide taints before the report is published: its readers rely on them."""
        publisher.update(report, report.at)
        self._publish(report)


def _discard(memory: PersistentGpuState) -> None:
    """Discard the faults that would be saved, because the monitor has no state directory."""


def _no_watchdog() -> None:
    """Do nothing: an embedded monitor has no watchdog."""


FAILED: Final = CatalogRow(
    code="agent.failed",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    threshold="an exception in the health core",
    why="the driver's devices are not evaluated any more",
    advice="restart the driver; its log has the traceback",
    try_it="let the clock of a monitor raise an exception",
)


def failed_report(
    last: Report | None,
    declared: Iterable[Declared],
    error: BaseException,
    node: str,
    lease_s: int,
    now: Instant,
) -> Report:
    """Return a report in which every device is Unknown: those of the last report and those declared since.

    Args:
        last: Last report of the core; None: there was none.
        error: Exception that ended the core. The report names only its type, because its text may vary.
        node: Name of the node.
        lease_s: Lease of devices that were in no report [s].
        now: Time of the failure.
    """
    cause = Cause(FAILED.code, FAILED.severity, FAILED.blame, type(error).__name__, FAILED.advice, now)
    known = {health.key: health for health in last.devices} if last else {}
    for device in declared:
        key = (device.driver, device.pool, device.name)
        known.setdefault(key, _unreported(device, lease_s, now))
    devices = tuple(_unknown(health, cause) for health in known.values())
    drivers = tuple(sorted({*(last.declaring if last else ()), *(device.driver for device in declared)}))
    return replace(last or Report(node, now), at=now, devices=devices, declaring=drivers, starting=False)


def _unknown(device: DeviceHealth, cause: Cause) -> DeviceHealth:
    return device._replace(
        health=Health.UNKNOWN,
        severity=Severity.UNKNOWN,
        message=message([cause]),
        causes=(cause,),
        since=cause.since,
    )


def _unreported(declared: Declared, lease_s: int, now: Instant) -> DeviceHealth:
    """Return a device that was in no report yet, with health Unknown."""
    return DeviceHealth(
        driver=declared.driver,
        pool=declared.pool,
        device=declared.name,
        kind=declared_device(declared).kind,
        health=Health.UNKNOWN,
        severity=Severity.UNKNOWN,
        message="",
        since=now,
        verified=now,
        timeout_s=declared.lease_s or lease_s,
    )
