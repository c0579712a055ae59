"""All sources of the node as one: what wakes the core, and what it reads then.

The C threads, and what watches the host, the drivers' declarations and the pods, write to one eventfd.
Nothing here judges what it passes on.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import trio

from agent.config.config import Config
from agent.health.gpu.catalog import gpu_wakes
from agent.health.gpu.xid.patterns import PATTERNS
from agent.health.kernel_log.patterns import HOST_PATTERNS
from agent.model.declared import Declarations
from agent.model.pods import PodsSample
from agent.model.settings import GpuLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.native.gpus import Gpus, GpusOptions
from agent.native.kmsg import Kmsg
from agent.native.machine import Machine
from agent.native.sampler import Sampler
from agent.native.uevents import Uevents
from agent.node.declaration_watcher import DeclarationWatcher
from agent.node.host_watcher import HostWatcher

HOST_PACE: Final = 6
"""The host is asked so much more rarely than what seldom changes of a GPU."""
MACHINE_NS: Final = NS
"""Memory controllers are asked so often, and at each pass of the sampler if those are rarer..."""
SLOW_NS: Final = 5 * NS
"""...memory, pressure so often: read again before every heartbeat, so that none of them goes without..."""
RARE_NS: Final = 60 * NS
"""...and what is dear to read so often."""
STOP_LEAST_S: Final = 0.05
"""What a thread has to end, even if one before it hangs and took all the time [s]."""


class Pods(Protocol):
    """Follows the pods that use devices, in threads of its own."""

    @property
    def sample(self) -> PodsSample | None:
        """The newest; None: nothing is known yet, and nobody need wait for it."""

    def note(self, snapshot: Snapshot) -> None:
        """What was read last; returns at once."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begins, and calls ``wake`` when something else is known."""

    def stop(self, timeout_s: float) -> bool:
        """Ends. False: it hangs, and is left behind."""


class Node:
    """The sampler, the machine's slow part, the GPUs' threads, the kernel log and the device events, what
    drivers declare, what the host says now and then, and who uses the devices.

    Args:
        declares: Drivers may declare devices, in a directory below the runtime directory; else only
            :meth:`declare` says any.
        udev: libudev may be asked, which starts a process to find it.
        pods: Who uses the devices; None: nobody asks.

    Raises:
        ConfigError: an option is out of range, or a root too long.
        ProbeError: the kernel refused descriptors or memory.
    """

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        limits: GpuLimits,
        period_ns: int,
        *,
        declares: bool,
        udev: bool = True,
        pods: Pods | None = None,
    ) -> None:
        self._sampler = sampler
        self._pods = pods
        self._gpus: Gpus | None = None
        self._kmsg: Kmsg | None = None
        self._machine: Machine | None = None
        self._uevents: Uevents | None = None
        every_s = HOST_PACE * config.gpu_slow_ns / NS
        self._host = HostWatcher(
            config.nvml_library,
            config.sysfs_root,
            config.procfs_root,
            every_s,
            gpus=config.gpu_watch,
            udev=udev,
        )
        self._declared = DeclarationWatcher(config.runtime_dir, config.node_name) if declares else None
        self._said: Declarations = ()
        wake = sampler.fileno()
        try:
            if config.gpu_watch:
                self._gpus = Gpus(_gpu_options(config, limits, period_ns), wake)
            patterns = (*PATTERNS, *HOST_PATTERNS)
            self._kmsg = Kmsg(config.kmsg, patterns, wake, config.kmsg_any_facility)
            fast_ns = max(MACHINE_NS, period_ns)
            paces = (fast_ns, max(SLOW_NS, fast_ns), max(RARE_NS, fast_ns))
            self._machine = Machine(config.sysfs_root, config.procfs_root, wake, *paces)
            self._uevents = Uevents(wake, [sampler.pokeno(), self._machine.pokeno()])
        except BaseException:
            self.stop(0)
            raise

    def start(self) -> None:
        """Start every thread. The listener comes first: what was before, the others have still to read."""
        for part in (self._uevents, self._sampler, self._machine, self._gpus, self._kmsg):
            if part is not None:
                part.start()
        if self._pods is not None:
            self._pods.start(self._wake)

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
        kmsg = self._kmsg.read() if self._kmsg else None
        machine = self._machine.read() if self._machine else None
        uevents = self._uevents.read() if self._uevents else None
        declared = self.declarations
        self._host.note(gpus, uevents, declared)
        sources = [*snapshot.sources]
        if machine is not None:
            sources += machine.sources
        if gpus is not None:
            sources += [gpus.nvml, gpus.events]
        parts = (kmsg, uevents, self._declared)
        sources += [part.source for part in parts if part is not None]
        if self._host.source is not None:
            sources.append(self._host.source)
        pods = self._pods.sample if self._pods else None
        if pods is not None:
            sources.append(pods.source)
        snapshot = replace(
            snapshot,
            gpus=gpus,
            log=kmsg,
            machine=machine,
            host=self._host.host,
            pci=self._host.pci,
            declared=declared,
            pods=pods,
            sources=tuple(sources),
        )
        if self._pods is not None:
            self._pods.note(snapshot)
        return snapshot

    @property
    def declarations(self) -> Declarations:
        """What drivers declare, as it was read or said last. From any thread."""
        return self._declared.declarations if self._declared else self._said

    def declare(self, declarations: Declarations) -> None:
        """What is declared, where it is not read from files: by whoever opened this. From any thread."""
        self._said = declarations

    async def watch(self) -> None:
        """Asks the host about its devices, and follows what drivers declare. Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._host.run, self._wake)
            if self._declared is not None:
                nursery.start_soon(self._declared.run, self._wake)

    def look_at_host(self) -> threading.Thread:
        """Asks once, in a thread that is done when it ends."""
        return self._host.look()

    def stop(self, timeout_s: float) -> Sequence[str]:
        """End every thread, in about that long. Returns those that hang and are left behind, in words."""
        end_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(STOP_LEAST_S, end_s - time.monotonic())

        parts = [
            ("what follows the pods", self._pods),
            ("a GPU's thread", self._gpus),
            ("the kernel log's reader", self._kmsg),
            ("the listener to device events", self._uevents),
            ("the machine's watch", self._machine),
            ("the sampler", self._sampler),
        ]
        hanging = [name for name, part in parts if part is not None and not part.stop(left_s())]
        return [*hanging, *self._host.unfinished(left_s())]

    def _wake(self) -> None:
        os.eventfd_write(self._sampler.fileno(), 1)


def _gpu_options(config: Config, limits: GpuLimits, period_ns: int) -> GpusOptions:
    return GpusOptions(
        library=config.nvml_library,
        sysfs_root=config.sysfs_root,
        period_ns=period_ns,
        slow_ns=max(config.gpu_slow_ns, period_ns),
        deadline_ns=int(limits.deadline_s * NS),
        wakes=gpu_wakes(limits),
    )
