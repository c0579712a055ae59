"""Parts of a health monitor that run in its core thread: sources, saved GPU faults, taints and engine loop.

After a failure of that thread every device is reported Unknown (:func:`failed_report`).
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.config.config import Config
from agent.devices.inventory import declared_device
from agent.devices.taints import TaintPolicy
from agent.driver.merged_snapshot_source import HostAndDriverSource, UnmonitoredHostSource
from agent.driver.taint_callback_publisher import TaintCallback, TaintCallbackPublisher
from agent.engine.loop import EngineLoop, LoopTiming
from agent.engine.step import EngineState, initial_state
from agent.health.gpu.faults.checkpoint import restore_faults
from agent.health.rules import CatalogRow, cause_from_row
from agent.health.verdict import kubelet_message
from agent.model.claim import DeviceRef
from agent.model.declared_devices import DriverDevice
from agent.model.health import Blame, DeviceHealth, Health, Repair, Severity, Taints
from agent.model.persistent_faults import BootBaseline, PersistentState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.time import Instant
from agent.node.node_source import SOURCES_STOP_S, NodeSource, engine_settings, open_node_source
from agent.sources.gpu_os_facts import read_boot_id
from agent.store import driver_files, gpu_fault_file
from agent.store.gpu_fault_file import GpuFaultWriter
from agent.system.output import get_logger
from agent.system.threads.loop_thread import TrioTask
from agent.system.timing import random_fraction

MIN_STOP_S: Final = 0.05
"""Least time that each component has to stop, even if an earlier component used up the timeout [s]."""

log = get_logger(__name__)


class CoreComponents:
    """Sources, saved state and publishers of an embedded monitor, which its core thread uses.

    Core thread only, except ``taints`` and :meth:`wait_tainted`.
    """

    def __init__(
        self,
        driver: str,
        config: Config,
        source: HostAndDriverSource,
        *,
        hardware: bool,
        directory: Path | None,
        policy: TaintPolicy,
        clock: Callable[[], Instant],
        publish: Callable[[Report], None],
        on_evaluated: Callable[[Report], None],
    ) -> None:
        """Store the settings; :meth:`open` opens the components.

        Args:
            driver: Name of the driver.
            config: Configuration of the monitor.
            source: Source of the driver's health checks and faults; :meth:`open` adds the machine's sources.
            hardware: Whether the machine's hardware is monitored, too.
            directory: Directory of saved state; None: no state is saved.
            policy: Policy of the taints.
            clock: Returns wall clock and monotonic time.
            publish: Called with each report after its taints were decided.
            on_evaluated: Called with the report of each evaluation, published or not.
        """
        self._driver = driver
        self._config = config
        self._source = source
        self._hardware = hardware
        self._directory = directory
        self._policy = policy
        self._clock = clock
        self._publish = publish
        self._on_evaluated = on_evaluated
        self._publisher: TaintCallbackPublisher | None = None
        self._node: NodeSource | None = None
        self._empty: UnmonitoredHostSource | None = None
        self._checkpoint: GpuFaultWriter | None = None

    @property
    def taints(self) -> Taints:
        """Taints that the driver's devices should have now; no taints before :meth:`open`."""
        return self._publisher.taints if self._publisher else Taints()

    def wait_tainted(self, devices: Collection[DeviceRef], timeout_s: float) -> bool:
        """Publish the current taints of devices at once, and block until that is done.

        Returns False on timeout.

        Thread-safe.
        """
        return self._publisher is None or self._publisher.wait_published(devices, timeout_s)

    def open(self, publish_taints: TaintCallback | None) -> Sequence[TrioTask]:
        """Open all components of the monitor and start their threads.

        Returns the tasks that the core thread has to run.

        Args:
            publish_taints: The driver's function that publishes taints; None: taints are not published.

        Raises:
            ConfigError: A root path is too long.
            ProbeError: The kernel refused descriptors or memory.
        """
        settings = replace(engine_settings(self._config), checks=())  # only the agent runs commands
        node: NodeSource | None = None
        if self._hardware:
            # udev=False: looking for libudev starts a process, which a driver that reaps children would find
            node = open_node_source(
                self._config, settings, self._config.period_ns, reads_declarations=False, use_udev=False
            )
        # after the sources: each attempt without descriptors would keep the file as unreadable
        tasks, state, save_state = self._open_checkpoint(settings)
        if node is not None:
            node.restore_nic_addresses(state.host.nics.restored_addresses)
            self._source.open(node, node.declare)
            try:
                node.start()
            except BaseException:  # the next attempt opens other sources
                self._source.close()
                node.stop(SOURCES_STOP_S)
                raise
            self._node = node
            tasks.append(node.run_watchers)
        else:
            self._empty = UnmonitoredHostSource()
            self._source.open(self._empty)
        publisher = self._publisher = TaintCallbackPublisher(
            publish_taints,
            driver=self._driver,
            policy=self._policy,
            path=self._directory / driver_files.TAINTS_FILE if self._directory else None,
            clock=self._clock,
        )
        core = EngineLoop(
            source=self._source,
            state=state,
            timing=LoopTiming(self._config.heartbeat_s, self._config.coalesce_ns, watchdog_s=None),
            clock=self._clock,
            publish=lambda report: self._publish_with_taints(report, publisher),
            save_state=save_state,
            notify_watchdog=lambda: None,
            jitter=random_fraction,
            on_evaluated=self._on_evaluated,
            is_urgent=lambda: self._source.is_urgent,
        )
        return [core.run, publisher.run, *tasks]

    def close(self, end_s: float) -> list[str]:
        """Stop all components by `end_s` [s, monotonic clock]. Returns the names of hung components."""

        def left_s() -> float:
            return max(MIN_STOP_S, end_s - time.monotonic())

        self._source.close()
        hung: list[str] = []
        if self._node is not None:
            hung += self._node.stop(min(SOURCES_STOP_S, left_s()))
        if self._empty is not None:
            self._empty.close()
        if self._checkpoint is not None and not self._checkpoint.close(left_s()):
            hung.append("fault checkpoint writer")
        return hung

    def _open_checkpoint(
        self, settings: EngineSettings
    ) -> tuple[list[TrioTask], EngineState, Callable[[PersistentState], None]]:
        """Load the file of saved GPU faults.

        Returns the task that writes the file, the engine's first state, and a function that saves state.
        """
        if self._directory is None:
            return [], initial_state(settings), lambda _: None
        path = self._directory / gpu_fault_file.FILE
        saved, problem = gpu_fault_file.load_gpu_faults(path)
        if problem:
            log.warning("%s", problem)
        checkpoint = self._checkpoint = GpuFaultWriter(path, saved)
        boot_id = read_boot_id(self._config.procfs_root)
        if self._hardware:
            restored = restore_faults(saved, boot_id, settings.gpu, self._clock(), settings.rules)
            state = initial_state(settings, restored, saved, boot_id)
        else:
            # values at start of an earlier monitor with hardware are not of this one
            own = replace(saved, start=BootBaseline(saved.start.boot_id))
            state = initial_state(settings, saved=own, boot_id=boot_id)
        checkpoint.set_newest(state.checkpoint)
        return [checkpoint.run], state, checkpoint.set_newest

    def _publish_with_taints(self, report: Report, publisher: TaintCallbackPublisher) -> None:
        """Decide the taints of a report, then publish the report."""
        publisher.update(report, report.at)
        self._publish(report)


CORE_FAILED_ROW: Final = CatalogRow(
    code="agent.failed",
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    threshold="an exception in the core thread of an embedded monitor",
    why="the driver's devices are not evaluated any more",
    advice="restart the driver; its log has the traceback",
    repair=Repair.NONE,
    try_it="let the clock of a monitor raise an exception",
)


def failed_report(
    last: Report | None,
    declared: Iterable[DriverDevice],
    error: BaseException,
    node: str,
    lease_s: int,
    now: Instant,
) -> Report:
    """Return the report after a failure of the core thread: all known devices are Unknown.

    Known are the devices of the last report, and the devices that the driver declares.

    Args:
        last: Last report before the failure; None: there was none.
        declared: Devices that the driver declares.
        error: Exception that ended the core thread. The report names its type only: the text may vary.
        node: Name of the Kubernetes node.
        lease_s: Lease of the health of devices that were in no earlier report [s].
        now: Time of the failure.
    """
    cause = cause_from_row(CORE_FAILED_ROW, type(error).__name__, now)
    known = {health.key: health for health in last.devices} if last else {}
    for device in declared:
        kind, timeout_s = declared_device(device).kind, device.lease_s or lease_s
        known.setdefault(
            (device.driver, device.pool, device.name),
            DeviceHealth(
                device.pool, device.name, kind, Health.UNKNOWN, Severity.UNKNOWN, "", now, now, timeout_s,
                driver=device.driver,
            ),
        )  # fmt: skip
    text = kubelet_message([cause])
    devices = tuple(
        found._replace(
            health=Health.UNKNOWN, severity=Severity.UNKNOWN, message=text, causes=(cause,), since=now
        )
        for found in known.values()
    )
    drivers = tuple(sorted({*(last.declaring if last else ()), *(device.driver for device in declared)}))
    return replace(last or Report(node, now), at=now, devices=devices, declaring=drivers, starting=False)
