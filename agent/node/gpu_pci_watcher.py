"""Watcher of facts about GPUs and PCI devices: PCI bus, processes in the GPU driver, GPU inventory.

Each fact is read periodically in a thread of its own that may be abandoned: a read can hang with the GPU
driver, and then delays no other fact. The last result of each read is kept.

A kernel event about an added, removed or rebound PCI device triggers a read of bus and inventory. Without
kernel events the bus is read more often instead.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import trio

from agent.errors import ProbeError
from agent.model.declared import Declarations, DeclaredGpu, DeclaredPci
from agent.model.gpu import GpuAttributes, GpuHost, GpuSet
from agent.model.kernel_messages import Subsystem, UeventSample
from agent.model.pci import PciSample
from agent.model.reading import Absence, Missing
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS
from agent.sources.gpu_host import GpuHostReader, PciBus, read_bus
from agent.sources.nvml import read_inventory
from agent.sources.pci import read_pci

IDLE_FACTOR: Final = 10
"""Factor by which a host without GPUs is read less often; a GPU that NVML counts triggers a read at once."""
NO_EVENTS_POLL_S: Final = 10.0
"""Interval of bus reads without kernel events [s]."""
DEBOUNCE_S: Final = 0.1
"""Debounce: a device that is plugged in sends a dozen events, which trigger one read [s]."""
DEBOUNCE_MAX_S: Final = 5.0
"""Longest debounce, for a device that appears and disappears all the time [s]."""
RECHECKS: Final = 3
"""Number of PCI bus reads in quick succession after a change: as many as rules need to clear a fault."""
RECHECK_S: Final = 1.0
"""Interval of the bus reads that follow a change [s]."""
HOST_READ: Final = "read of GPU processes"
INVENTORY_READ: Final = "read of the GPU inventory"
BUS_READ: Final = "read of the PCI bus"
_UNREAD_HOST: Final = GpuHost()
"""Facts of the host before the first read."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class _BusReading(NamedTuple):
    """Result of one read of the PCI bus."""

    functions: tuple[PciSample, ...] | Missing | None = None
    gpus: tuple[str, ...] | Missing = ()
    requested: frozenset[str] = frozenset()
    """PCI addresses of declared devices that the read included."""
    beat_ns: int = 0
    passes: int = 0


class GpuPciWatcher:
    """Watcher that holds the newest facts of the host."""

    def __init__(
        self,
        library: str,
        sysfs_root: Path,
        procfs_root: Path,
        every_s: float,
        *,
        gpus: bool = True,
        udev: bool = True,
    ) -> None:
        """Create the watcher.

        Args:
            library: NVML library, a name or a path.
            sysfs_root: Mount point of sysfs.
            procfs_root: Mount point of procfs.
            every_s: Interval of reads on a host with GPUs, and of retries [s].
            gpus: Whether to watch GPUs in addition to declared devices.
            udev: Whether to use libudev, which starts a process to find the library.
        """
        self._every_s = every_s
        self._watches_gpus = gpus
        self._uses_udev = udev
        self._library = library
        self._sysfs_root = sysfs_root
        self._reader = GpuHostReader(sysfs_root, procfs_root)
        self._host = _UNREAD_HOST
        self._gpus: GpuSet | None = None
        self._declared: Declarations = ()
        self._declared_addresses: frozenset[str] = frozenset()
        self._has_uevents = False
        self._bus = _BusReading(beat_ns=time.monotonic_ns())
        self._trigger: object = (_inventory_key(None), 0, self._declared_addresses, self._has_uevents)
        self._changed = trio.Event()
        self._wake_readers = trio.Event()
        self._running_reads: dict[str, threading.Event] = {}
        self._logged: dict[str, str] = {}

    @property
    def host(self) -> GpuHost:
        """Newest facts about the host's GPUs."""
        return self._host

    @property
    def pci(self) -> tuple[PciSample, ...] | Missing | None:
        """PCI functions of the last bus read; None: not read yet, or read without a device that is declared
        now."""
        return self._bus.functions if self._declared_addresses <= self._bus.requested else None

    @property
    def source(self) -> SourceSample | None:
        """State of the source ``pci``; None: no device on the PCI bus is watched."""
        if not self._watches_bus():
            return None
        bus = self._bus
        state, detail = SourceState.OK, ""
        if self.pci is None:
            state = SourceState.STARTING
        elif isinstance(self.pci, Missing):
            absent = self.pci.absence is Absence.ABSENT
            state = SourceState.ABSENT if absent else SourceState.FAILING
            detail = f"bus/pci/devices: {self.pci}"
        period_ns = int(self._bus_period_s() * NS)
        return SourceSample("pci", state, bus.beat_ns, period_ns, 0, detail, passes=bus.passes, vital=False)

    def note(
        self, gpus: GpuSet | None, uevents: UeventSample | None = None, declared: Declarations = ()
    ) -> None:
        """Store the newest inputs. A change of GPUs, MIG instances, GPU drivers or declared devices triggers
        a read."""
        watched = self._watches_bus()
        self._gpus = gpus
        if declared is not self._declared:
            self._declared, self._declared_addresses = declared, _declared_pci_addresses(declared)
        self._has_uevents = uevents is not None and uevents.source.state in (
            SourceState.OK,
            SourceState.STARTING,
        )
        if self._watches_bus() != watched:
            self._reset_bus()
        changes = uevents.changes[Subsystem.PCI] if uevents else 0
        trigger = (_inventory_key(gpus), changes, self._declared_addresses, self._has_uevents)
        if trigger != self._trigger:
            self._trigger = trigger
            self._changed.set()

    def start_single_read(self) -> threading.Thread:
        """Start a thread that reads the host once, without the GPU inventory, for callers without an event
        loop."""

        def read() -> None:
            if self._watches_gpus:
                found = self._run_read(HOST_READ, self._read_host)
                self._host = found or self._host
            if self._watches_bus():
                bus = self._run_read(BUS_READ, partial(self._read_bus, self._declared_addresses))
                self._bus = bus or self._bus

        thread = threading.Thread(target=read, name="host", daemon=True)
        thread.start()
        return thread

    async def run(self, wake: Callable[[], None]) -> None:
        """Read the host's facts until cancelled, and call `wake` when a fact has changed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._debounce_changes)
            nursery.start_soon(self._watch_bus, wake)
            if self._watches_gpus:
                nursery.start_soon(self._watch_host, wake)
                nursery.start_soon(self._watch_inventory, wake)

    def unfinished_reads(self, timeout_s: float) -> Sequence[str]:
        """Return the names of the reads that do not return within `timeout_s`, after :meth:`run`."""
        end_s = time.monotonic() + timeout_s
        running = list(self._running_reads.items())
        return [name for name, done in running if not done.wait(max(0.0, end_s - time.monotonic()))]

    async def _debounce_changes(self) -> None:
        """Wake the readers after a change: soon after the first, with growing pauses during a stream of
        changes."""
        pause_s, last_s = DEBOUNCE_S, -DEBOUNCE_MAX_S
        while True:
            await self._changed.wait()
            is_first = trio.current_time() - last_s > DEBOUNCE_MAX_S
            pause_s = DEBOUNCE_S if is_first else min(2 * pause_s, DEBOUNCE_MAX_S)
            await trio.sleep(pause_s)
            last_s = trio.current_time()
            self._changed = trio.Event()
            self._wake_readers.set()
            self._wake_readers = trio.Event()

    async def _watch_host(self, wake: Callable[[], None]) -> None:
        while True:
            woken, had_gpus = self._wake_readers, self._has_gpus()
            host = await self._in_thread(HOST_READ, self._read_host)
            if host is not None:
                self._set(replace(host, inventory=self._host.inventory), wake)
            if self._has_gpus():
                if not had_gpus:
                    self._reset_bus()
                    self._changed.set()
                await trio.sleep(self._every_s)
            else:
                await _wait(woken, IDLE_FACTOR * self._every_s)

    async def _watch_bus(self, wake: Callable[[], None]) -> None:
        rechecks = 0
        while True:
            woken = self._wake_readers
            if self._watches_bus():
                bus = await self._in_thread(BUS_READ, partial(self._read_bus, self._declared_addresses))
                if bus is not None:
                    is_new = self.pci is None or bus.functions != self._bus.functions
                    is_recheck = rechecks > 0  # rules count an unchanged good read as well
                    has_moved = _bus_topology(bus.functions) != _bus_topology(self._bus.functions)
                    rechecks = RECHECKS - 1 if has_moved else max(0, rechecks - 1)
                    self._bus = bus
                    if self._has_gpus():
                        self._set(replace(self._host, bus_gpus=bus.gpus), wake)
                    if is_new or is_recheck:
                        wake()
            await _wait(woken, RECHECK_S if rechecks else self._bus_period_s())

    def _read_bus(self, addresses: frozenset[str]) -> _BusReading:
        bus = read_bus(self._sysfs_root)
        functions = read_pci(self._sysfs_root, addresses, udev=self._uses_udev)
        gpus = bus if isinstance(bus, Missing) else bus.gpus
        return _BusReading(functions, gpus, addresses, time.monotonic_ns(), self._bus.passes + 1)

    def _reset_bus(self) -> None:
        """Discard the last bus read, and restart the time after which the source ``pci`` is stalled."""
        self._bus = _BusReading(beat_ns=time.monotonic_ns(), passes=self._bus.passes)

    def _watches_bus(self) -> bool:
        return bool(self._declared_addresses) or self._has_gpus()

    def _bus_period_s(self) -> float:
        if not self._watches_bus():
            return float("inf")
        return self._every_s if self._has_uevents else min(NO_EVENTS_POLL_S, self._every_s)

    def _read_host(self) -> GpuHost | None:
        """Read the GPU facts of the host. Returns None, without reading processes, if the host never had a
        GPU."""
        if not self._has_gpus():
            bus = read_bus(self._sysfs_root)
            if not isinstance(bus, PciBus) or not bus.gpus:
                return None
        return self._reader.read()

    def _has_gpus(self) -> bool:
        return self._host != _UNREAD_HOST or bool(self._gpus and self._gpus.gpus)

    async def _watch_inventory(self, wake: Callable[[], None]) -> None:
        while True:
            woken, gpus = self._wake_readers, self._gpus
            found = None
            # while one NVML call hangs, another would hang as well
            if gpus and gpus.gpus and not any(gpu.call and gpu.overdue for gpu in gpus.gpus):
                read = partial(read_inventory, self._library, self._sysfs_root)
                found = await self._in_thread(INVENTORY_READ, read)
            if found is not None:
                self._set(replace(self._host, inventory=_merge_inventory(self._host.inventory, found)), wake)
            has_failed = found is None and bool(gpus and gpus.gpus)
            await _wait(woken, self._every_s if has_failed else float("inf"))

    async def _in_thread(self, name: str, read: Callable[[], T]) -> T | None:
        return await trio.to_thread.run_sync(partial(self._run_read, name, read), abandon_on_cancel=True)

    def _run_read(self, name: str, read: Callable[[], T]) -> T | None:
        """Call `read` and return its result. Returns None if it fails; logs the reason unless it was the last
        logged."""
        done = self._running_reads[name] = threading.Event()
        try:
            found = read()
        except (ProbeError, OSError) as error:
            if self._logged.get(name) != str(error):
                log.warning("%s: failed: %s; the last result is kept", name, error)
            self._logged[name] = str(error)
            return None
        finally:
            done.set()
        self._logged.pop(name, None)
        return found

    def _set(self, host: GpuHost, wake: Callable[[], None]) -> None:
        if host != self._host:
            self._host = host
            wake()


async def _wait(event: trio.Event, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await event.wait()


def _bus_topology(functions: tuple[PciSample, ...] | Missing | None) -> object:
    """Return addresses, drivers and link widths of PCI functions, without counters, which change all the
    time."""
    if not isinstance(functions, tuple):
        return functions
    return [(function.address, function.driver, function.width) for function in functions]


def _inventory_key(gpus: GpuSet | None) -> tuple[object, ...]:
    """Return the GPU values whose change requires a new read of the inventory."""
    if gpus is None or not gpus.gpus:
        return ()
    return (gpus.generation, *((gpu.uuid, gpu.handles, gpu.migs) for gpu in gpus.gpus))


def _declared_pci_addresses(declared: Declarations) -> frozenset[str]:
    """Return the PCI addresses of declared devices."""
    found = set()
    for file in declared:
        for device in file.devices:
            match device.part:
                case DeclaredPci(address=address) | DeclaredGpu(pci=address) if address:
                    found.add(address)
    return frozenset(found)


def _merge_inventory(
    before: Sequence[GpuAttributes], now: Sequence[GpuAttributes]
) -> tuple[GpuAttributes, ...]:
    """Return the new inventory entries, and the old entries of GPUs that do not answer: their serial numbers
    are needed for replacement.

    An old entry is dropped when another GPU is at its address.
    """
    known = [gpu for gpu in now if gpu.uuid]
    present = {gpu.uuid for gpu in known} | {gpu.bus for gpu in known}
    return (*known, *(gpu for gpu in before if not {gpu.uuid, gpu.bus} & present))
