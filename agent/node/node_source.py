"""Combination of all data sources of the machine into one snapshot, with one eventfd for all of them.

The C threads and the watchers write to the eventfd, which wakes the engine loop. This module does not import
agent.serve, so that ``drahealth scan`` does not load it.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import trio

from agent.config.config import Config
from agent.health.gpu.rule_state import gpu_wakes
from agent.health.gpu.xid.log_lines import GPU_LOG_PATTERNS
from agent.health.host.verdicts import sampler_wakes
from agent.health.kernel_log.facts import HOST_PATTERNS
from agent.health.rules import xid_overrides
from agent.model.declared_devices import Declarations
from agent.model.gpu import GpuAttributes, NvmlCosts
from agent.model.pod_findings import PodsSample
from agent.model.reading import PassDurations
from agent.model.settings import EngineSettings, GpuLimits, HostLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.native.gpu_watch import GpuWatch, GpuWatchOptions
from agent.native.kernel_events import KernelLogReader, UeventListener
from agent.native.machine_watch import MachineWatch
from agent.native.sampler import Sampler, SamplerOptions
from agent.node.declaration_watcher import DeclarationWatcher
from agent.node.nvml_process import NvmlProcess
from agent.node.pci_watcher import GpuPciWatcher, NicWatcher
from agent.sources.nvml import read_gpu_inventory
from agent.system.timing import PassTimer

HOST_PERIOD_FACTOR: Final = 6
"""Time between two reads of PCI bus and GPU processes, in multiples of ``gpu.slow-period``."""
MEMORY_CONTROLLER_NS: Final = NS
"""Interval of memory controller reads; at least the sampler's period [ns]."""
MEMORY_PERIOD_NS: Final = 5 * NS
"""Interval of memory and pressure reads [ns]; shorter than a heartbeat, so that each has new values."""
EXPENSIVE_PERIOD_NS: Final = 60 * NS
"""Time between two reads of files that are expensive for the kernel [ns]."""


class PodsSource(Protocol):
    """Interface of the source that reports which pods use devices, as :class:`NodeSource` uses it."""

    @property
    def sample(self) -> PodsSample | None:
        """Newest sample of pods that use devices; None: not known yet."""

    @property
    def timer(self) -> PassTimer:
        """Timer that holds the durations of the source's polls."""

    def handle_snapshot(self, snapshot: Snapshot) -> None:
        """Store the newest snapshot, for the cgroups and declared devices in it. Never blocks."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start the source's threads, which call `wake` when the sample has changed."""

    def request_stop(self) -> None:
        """Request the source's threads to end. Never blocks."""

    def stop(self, timeout_s: float) -> bool:
        """Stop the source's threads. Returns True if all ended, False if one hangs and is abandoned."""


class NodeSource:
    """All data sources of the machine: C core threads, watchers of PCI bus, NICs, declarations and pods.

    Args:
        config: Root directories and periods.
        sampler: Thread that reads CPUs, hugepages and cgroups; started and stopped with the other threads.
        limits: Limits of the GPU rules, which decide which readings wake the engine loop.
        period_ns: Time between two reads of the fast sources [ns].
        reads_declarations: Whether devices are declared by files in the runtime directory; False: by
            :meth:`declare` only.
        use_udev: Whether libudev is used; finding the library starts a process.
        pods: Source of pods that use devices; None: pods are not watched.

    Raises:
        ConfigError: An option is out of range, or a root path is too long.
        ProbeError: The kernel refused descriptors or memory.
    """

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        limits: GpuLimits,
        period_ns: int,
        *,
        reads_declarations: bool,
        use_udev: bool = True,
        pods: PodsSource | None = None,
    ) -> None:
        self._sampler = sampler
        self._stop_lock = threading.Lock()
        self._is_stopped = False
        self._pods = pods
        self._gpus: GpuWatch | NvmlProcess | None = None
        self._kmsg: KernelLogReader | None = None
        self._machine: MachineWatch | None = None
        self._uevents: UeventListener | None = None
        every_s = HOST_PERIOD_FACTOR * config.gpu_slow_ns / NS
        self._host = GpuPciWatcher(
            config.sysfs_root,
            config.procfs_root,
            every_s,
            read_inventory=self._read_inventory if config.gpu_watch else None,
            count_gpus=self._count_gpus,
            use_udev=use_udev,
        )
        self._nics = NicWatcher(config.sysfs_root, config.gpu_slow_ns / NS)
        self._declared = (
            DeclarationWatcher(config.runtime_dir, config.node_name) if reads_declarations else None
        )
        self._declared_by_caller: Declarations = ()
        wake = sampler.fileno()
        try:
            if config.gpu_watch:
                options = _gpu_options(config, limits, period_ns)
                self._read_inventory_here = partial(read_gpu_inventory, options.library, options.sysfs_root)
                if config.gpu_process:
                    self._gpus = NvmlProcess(options, config.procfs_root, wake)
                else:
                    self._gpus = GpuWatch(options, wake)
            patterns = (*GPU_LOG_PATTERNS, *HOST_PATTERNS)
            self._kmsg = KernelLogReader(config.kmsg, patterns, wake, config.kmsg_any_facility)
            fast_ns = max(MEMORY_CONTROLLER_NS, period_ns)
            paces = (fast_ns, max(MEMORY_PERIOD_NS, fast_ns), max(EXPENSIVE_PERIOD_NS, fast_ns))
            self._machine = MachineWatch(config.sysfs_root, config.procfs_root, wake, *paces)
            self._uevents = UeventListener(wake, [sampler.rescan_fileno(), self._machine.rescan_fileno()])
        except BaseException:
            self.stop(0)
            raise

    def restore_nic_addresses(self, addresses: Mapping[str, str]) -> None:
        """Set the PCI addresses of NICs, by RDMA name, from before a restart of the agent. Call it before
        :meth:`start`."""
        self._nics.restore_addresses(addresses)

    def start(self) -> None:
        """Start all threads. The uevent listener is first, so that no event after the first read is lost."""
        for part in (self._uevents, self._sampler, self._machine, self._gpus, self._kmsg):
            if part is not None:
                part.start()
        if self._pods is not None:
            self._pods.start(self._wake)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a value that rules use has changed."""
        return self._sampler.fileno()

    def clear(self) -> None:
        """Reset the wake-up eventfd of all sources; call this before :meth:`read`."""
        self._sampler.clear()

    def read(self) -> Snapshot | None:
        """Return the newest values of all sources as one snapshot; None: the sources were not started."""
        sampled = self._sampler.read()
        if sampled is None:
            return None
        gpus = self._gpus.read() if self._gpus else None
        kmsg = self._kmsg.read() if self._kmsg else None
        machine = self._machine.read() if self._machine else None
        uevents = self._uevents.read() if self._uevents else None
        declared = self.declarations
        self._nics.set_inputs(declared, uevents)
        self._host.set_inputs(gpus, uevents, declared, self._nics.addresses)
        sources = [*sampled.sources]
        if machine is not None:
            sources += machine.sources
        if gpus is not None:
            sources += [gpus.nvml, gpus.events]
        parts = (kmsg, uevents, self._declared)
        sources += [part.source for part in parts if part is not None]
        sources += [part.source for part in (self._host, self._nics) if part.source is not None]
        pods = self._pods.sample if self._pods else None
        if pods is not None:
            sources.append(pods.source)
        snapshot = Snapshot(  # not replace(), which takes twice the time
            seq=sampled.seq,
            cpus=sampled.cpus,
            nodes=sampled.nodes,
            throttle=sampled.throttle,
            pools=sampled.pools,
            groups=sampled.groups,
            core=sampled.core,
            gpus=gpus,
            log=kmsg,
            machine=machine,
            host=self._host.gpu_system,
            pci=self._host.pci,
            nics=self._nics.nics,
            declared=declared,
            pods=pods,
            sources=tuple(sources),
        )
        if self._pods is not None:
            self._pods.handle_snapshot(snapshot)
        return snapshot

    def nvml_costs(self) -> NvmlCosts | None:
        """Return the CPU time and durations of NVML calls; None: NVML is not called. Thread-safe.

        Blocks up to 10 ms.
        """
        with self._stop_lock:
            return self._gpus.costs() if self._gpus is not None and not self._is_stopped else None

    def pass_durations(self) -> Mapping[str, PassDurations]:
        """Return how long the passes (complete readings) of each source took, by source name.

        Sources that wait for events are left out. The durations of NVML start at zero with each NVML process.
        Thread-safe. Blocks up to 10 ms.
        """
        found: dict[str, PassDurations] = {}
        with self._stop_lock:
            if not self._is_stopped:
                found |= self._sampler.pass_durations()
                if self._machine is not None:
                    found |= self._machine.pass_durations()
                gpus = self._gpus.pass_durations() if self._gpus else None
                if gpus is not None:
                    found["nvml"] = gpus
        parts = (self._host, self._nics, self._declared, self._pods)
        timers = [part.timer for part in parts if part is not None]
        return found | {timer.source: timer.read() for timer in timers}

    @property
    def declarations(self) -> Declarations:
        """Devices that drivers declare, by their files or by :meth:`declare`. Thread-safe."""
        return self._declared.declarations if self._declared else self._declared_by_caller

    def declare(self, declarations: Declarations) -> None:
        """Set the declared devices. Allowed only if the devices are not read from files. Thread-safe."""
        self._declared_by_caller = declarations

    async def run_watchers(self) -> None:
        """Run the watchers of PCI bus, GPUs, NICs and declaration files until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._host.run, self._wake)
            nursery.start_soon(self._nics.run, self._wake)
            if self._declared is not None:
                nursery.start_soon(self._declared.run, self._wake)

    def start_single_read(self) -> threading.Thread:
        """Start a thread that reads PCI bus and GPU processes once; return the thread."""
        return self._host.start_single_read()

    def stop(self, timeout_s: float) -> Sequence[str]:
        """Stop all threads within `timeout_s`. Returns the names of threads that hang.

        These threads are abandoned. All threads are requested to end before the first wait, so that each has
        the whole timeout, whichever hangs.
        """
        end_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, end_s - time.monotonic())

        with self._stop_lock:  # pass_durations() uses memory that the C core now frees
            self._is_stopped = True
        parts = (
            # first: the process is killed after most of the time that is left
            ("NVML process" if isinstance(self._gpus, NvmlProcess) else "GPU thread", self._gpus),
            ("pod tracker", self._pods),
            ("kernel log reader", self._kmsg),
            ("uevent listener", self._uevents),
            ("machine thread", self._machine),
            ("sampler thread", self._sampler),
        )
        for _, part in parts:
            if part is not None:
                part.request_stop()
        hanging = [name for name, part in parts if part is not None and not part.stop(left_s())]
        hanging += self._host.unfinished_reads(left_s())
        return [*hanging, *self._nics.unfinished_reads(left_s())]

    def _read_inventory(self) -> tuple[GpuAttributes, ...]:
        """Read the attributes of the GPUs with pynvml, in the process that calls NVML. Blocks up to 30 s.

        Raises:
            ProbeError: NVML failed, or there is no such process.
        """
        if isinstance(self._gpus, NvmlProcess):
            return self._gpus.read_inventory()
        return self._read_inventory_here()

    def _count_gpus(self) -> None:
        if self._gpus is not None:
            self._gpus.request_count()

    def _wake(self) -> None:
        os.eventfd_write(self._sampler.fileno(), 1)


def _gpu_options(config: Config, limits: GpuLimits, period_ns: int) -> GpuWatchOptions:
    return GpuWatchOptions(
        library=config.nvml_library,
        sysfs_root=config.sysfs_root,
        period_ns=period_ns,
        slow_ns=max(config.gpu_slow_ns, period_ns),
        cpu_budget_ns=config.gpu_cpu_ns,
        deadline_ns=int(limits.deadline_s * NS),
        wakes=gpu_wakes(limits, config.rules),
    )


SOURCES_STOP_S: Final = 0.6
"""Longest time that all sources together have to stop at shutdown [s]."""


def engine_settings(config: Config) -> EngineSettings:
    """Return the engine's settings from the configuration: limits, expected hardware, verdict lifetime."""
    return EngineSettings(
        node=config.node_name,
        drivers=config.drivers,
        lease_s=config.lease_s,
        throttle_events=config.throttle_events,
        throttle_window_s=config.throttle_window_s,
        expect_cpus=config.expect_cpus,
        expect_pools=config.expect_pools,
        host=HostLimits(
            correctable_errors=config.correctable_errors,
            correctable_window_s=config.correctable_window_s,
            throttled_percent=config.throttled_percent,
            throttled_window_s=config.throttled_window_s,
            pressure_percent=config.pressure_percent,
            pressure_window_s=config.pressure_window_s,
            nic_errors=config.nic_errors,
            nic_error_window_s=config.nic_error_window_s,
            nic_link_downs=config.nic_link_downs,
            nic_link_window_s=config.nic_link_window_s,
        ),
        gpu=GpuLimits(
            deadline_s=config.gpu_deadline_ns / NS,
            dead_s=config.gpu_dead_ns / NS,
            probation_s=config.gpu_probation_ns / NS,
            correctable_errors=config.gpu_correctable_errors,
            correctable_window_s=config.gpu_correctable_window_s,
            expect=config.expect_gpus,
            xids=tuple(sorted({**config.gpu_xids, **xid_overrides(config.rules)}.items())),
        ),
        rules=config.rules,
        checks=config.checks,
    )


def open_sampler(config: Config, period_ns: int) -> Sampler:
    """Create a sampler, the thread that reads CPUs, hugepages and cgroups; the caller starts it.

    Raises:
        ConfigError: A root path is too long.
        ProbeError: The kernel refused descriptors or memory.
    """
    return Sampler(
        SamplerOptions(
            sysfs_root=config.sysfs_root,
            cgroupfs_root=config.cgroupfs_root,
            kubelet_cgroup_root=config.kubelet_cgroup_root,
            period_ns=period_ns,
            sweep_ns=config.sweep_ns,
            resync_ns=config.resync_ns,
            group_max=config.group_max,
            held_bytes=config.held_bytes,
            wakes=sampler_wakes(config.throttle_events, config.throttle_window_s, config.rules),
        )
    )


def open_node_source(
    config: Config,
    settings: EngineSettings,
    period_ns: int,
    *,
    reads_declarations: bool,
    use_udev: bool = True,
    pods: PodsSource | None = None,
) -> NodeSource:
    """Create the sampler and all other data sources of the machine; the caller starts them.

    See :class:`NodeSource`.
    """
    sampler = open_sampler(config, period_ns)
    return NodeSource(
        config,
        sampler,
        settings.gpu,
        period_ns,
        reads_declarations=reads_declarations,
        use_udev=use_udev,
        pods=pods,
    )
