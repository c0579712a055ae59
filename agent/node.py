"""All sources of the node as one: what wakes the core, and what it reads then.

The C threads and what watches the host write to one eventfd. Nothing here judges what it passes on.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from agent.config import Config
from agent.health.gpu.catalogue import gpu_wakes
from agent.health.xid.patterns import PATTERNS
from agent.host_watch import HostWatch
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.native.gpus import Gpus, GpusOptions
from agent.native.kmsg import Kmsg
from agent.native.sampler import Sampler

HOST_PACE: Final = 6
"""The host is asked so much more rarely than what seldom changes of a GPU."""
STOP_LEAST_S: Final = 0.05
"""What a thread has to end, even if one before it hangs and took all the time [s]."""


class Node:
    """The sampler, the GPUs' threads, the kernel log's, and what the host says now and then.

    Raises:
        ConfigError: an option is out of range, or a root too long.
        ProbeError: the kernel refused descriptors or memory.
    """

    def __init__(self, config: Config, sampler: Sampler, limits: GpuLimits, period_ns: int) -> None:
        self._sampler = sampler
        self._gpus: Gpus | None = None
        self._kmsg: Kmsg | None = None
        every_s = HOST_PACE * config.gpu_slow_ns / NS
        self._host = HostWatch(config.nvml_library, config.sysfs_root, config.procfs_root, every_s)
        try:
            if config.gpu_watch:
                self._gpus = Gpus(_gpu_options(config, limits, period_ns), sampler.fileno())
                self._kmsg = Kmsg(config.kmsg, PATTERNS, sampler.fileno(), config.kmsg_any_facility)
        except BaseException:
            self.stop(0)
            raise

    def start(self) -> None:
        """Start every thread. Each looks at once."""
        self._sampler.start()
        if self._gpus is not None:
            self._gpus.start()
        if self._kmsg is not None:
            self._kmsg.start()

    def fileno(self) -> int:
        """The descriptor that becomes readable when something that a rule can see has changed."""
        return self._sampler.fileno()

    def clear(self) -> None:
        """Take note of the wake, before :meth:`read`."""
        self._sampler.clear()

    def read(self) -> Snapshot | None:
        """The newest of everything, or None before :meth:`start`."""
        snapshot = self._sampler.read()
        if snapshot is None:
            return None
        gpus = self._gpus.read() if self._gpus else None
        self._host.note(gpus)
        kmsg = self._kmsg.read() if self._kmsg else None
        sources = [*snapshot.sources]
        if gpus is not None:
            sources += [gpus.nvml, gpus.events]
        if kmsg is not None:
            sources.append(kmsg.source)
        return replace(snapshot, gpus=gpus, log=kmsg, host=self._host.host, sources=tuple(sources))

    async def watch_host(self) -> None:
        """Asks the host about its GPUs, as long as they are watched. Until cancelled."""
        if self._gpus is not None:
            await self._host.run(lambda: os.eventfd_write(self._sampler.fileno(), 1))

    def look_at_host(self) -> threading.Thread | None:
        """The same once, in a thread that is done when it ends. None: GPUs are not watched."""
        return self._host.look() if self._gpus is not None else None

    def stop(self, timeout_s: float) -> Sequence[str]:
        """End every thread, in about that long. Returns those that hang and are left behind, in words."""
        end_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(STOP_LEAST_S, end_s - time.monotonic())

        parts = [
            ("a GPU's thread", self._gpus),
            ("the kernel log's reader", self._kmsg),
            ("the sampler", self._sampler),
        ]
        hanging = [name for name, part in parts if part is not None and not part.stop(left_s())]
        return [*hanging, *self._host.unfinished(left_s())]


def _gpu_options(config: Config, limits: GpuLimits, period_ns: int) -> GpusOptions:
    return GpusOptions(
        library=config.nvml_library,
        sysfs_root=config.sysfs_root,
        period_ns=period_ns,
        slow_ns=max(config.gpu_slow_ns, period_ns),
        deadline_ns=int(limits.deadline_s * NS),
        wakes=gpu_wakes(limits),
    )
