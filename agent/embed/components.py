"""What a monitor opens in its core thread, and closes when that has ended: sources, memory, taints, the core.

Opening can take as long as a disk takes; nobody but the core waits for it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from agent.config.config import Config
from agent.devices.taints import TaintPolicy
from agent.driver.taint_publisher import Callback, TaintPublisher
from agent.embed.source import BareSource, DriverSource
from agent.engine.loop import EngineLoop, Timing
from agent.engine.step import begin
from agent.health.gpu.faults.checkpoint import Restored, restore
from agent.model.faults import FaultMemory
from agent.model.report import Report
from agent.model.settings import Settings
from agent.model.taint import Taints
from agent.model.time import Instant
from agent.node.node_source import Node
from agent.node.open import NODE_STOP_S, open_node, settings_of
from agent.sources.gpu_host import read_boot_id
from agent.store import faults
from agent.store import taints as taint_store
from agent.store.fault_checkpoint import FaultCheckpointWriter
from agent.system import jitter as dice
from agent.system.threads.trio_thread import Task

STOP_LEAST_S: Final = 0.05
"""What a part has to end, even if one before it hangs and took all the time [s]."""

log = logging.getLogger(__name__)


class Components:
    """All that is open. Of the core thread, but for :attr:`taints`, and :meth:`close` when it has ended."""

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
        """
        Args:
            driver: Whose devices.
            config: What to read.
            source: What the driver says; goes on top of the host's sources.
            hardware: The host is watched, too.
            directory: Of what outlives the process; None: nothing does.
            policy: Of taints.
            clock: Now, on both clocks.
            publish: Takes each report, when its taints have been offered.
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
        self._node: Node | None = None
        self._bare: BareSource | None = None
        self._keeper: FaultCheckpointWriter | None = None

    @property
    def taints(self) -> Taints:
        """As they are now; none before all is open."""
        return self._publisher.taints if self._publisher else Taints()

    def open(self, callback: Callback | None) -> Sequence[Task]:
        """Opens everything, and starts what has threads of its own. Returns the tasks of the core thread.

        Args:
            callback: Takes the taints.

        Raises:
            ConfigError: a root is too long.
            ProbeError: the kernel refused descriptors or memory.
        """
        settings = settings_of(self._config)
        tasks, restored, remember = self._open_memory(settings)
        if self._hardware:
            # a driver that waits for its children must not find one of ours
            node = open_node(self._config, settings, self._config.period_ns, declares=False, udev=False)
            self._node = node
            self._source.open(node, node.declare)
            node.start()
            tasks.append(node.watch)
        else:
            self._bare = BareSource()
            self._source.open(self._bare)
        publisher = self._publisher = TaintPublisher(
            callback,
            driver=self._driver,
            policy=self._policy,
            path=self._directory / taint_store.FILE if self._directory else None,
            clock=self._clock,
        )
        core = EngineLoop(
            source=self._source,
            state=begin(settings, restored),
            timing=Timing(self._config.heartbeat_s, self._config.coalesce_ns, watchdog_s=None),
            clock=self._clock,
            publish=lambda report: self._offer(report, publisher),
            remember=remember,
            alive=_nobody_asks,
            jitter=dice.random_fraction,
        )
        return [core.run, publisher.run, *tasks]

    def close(self, end_s: float) -> list[str]:
        """Ends everything by that time of the monotonic clock. Returns what hangs, in words."""

        def left_s() -> float:
            return max(STOP_LEAST_S, end_s - time.monotonic())

        self._source.close()
        left: list[str] = []
        if self._node is not None:
            left += self._node.stop(min(NODE_STOP_S, left_s()))
        if self._bare is not None:
            self._bare.close()
        if self._keeper is not None and not self._keeper.close(left_s()):
            left.append("what writes the fault memory")
        return left

    def _open_memory(
        self, settings: Settings
    ) -> tuple[list[Task], Restored | None, Callable[[FaultMemory], None]]:
        """What is remembered of GPUs, and who is to remember it from now on."""
        if not self._hardware or self._directory is None:
            return [], None, _forget
        path = self._directory / faults.FILE
        kept, problem = faults.load(path)
        if problem:
            log.warning("%s", problem)
        keeper = self._keeper = FaultCheckpointWriter(path, kept)
        restored = restore(kept, read_boot_id(self._config.procfs_root), settings.gpu, self._clock())
        return [keeper.run], restored, keeper.update

    def _offer(self, report: Report, publisher: TaintPublisher) -> None:
        """The taints first: whoever sees the report may rely on their being offered."""
        publisher.take(report, report.at)
        self._publish(report)


def _forget(memory: FaultMemory) -> None:
    """There is nowhere to keep it."""


def _nobody_asks() -> None:
    """No watchdog waits for a sign of life."""
