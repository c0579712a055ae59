"""Watchers of the PCI bus: GPUs and their inventory, and the network adapters (NICs) that drivers declare.

The bus, the processes in the GPU driver, the GPU inventory and the NICs are read periodically. Each read has
a thread that may be abandoned, because a read can hang with the GPU driver or the NIC's firmware. The
last result of each read is kept. A uevent about an added, removed or rebound PCI device triggers a read of
bus, inventory and NICs; without uevents the bus is read more often instead. Without declared NICs no NIC is
read.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import trio

from agent.errors import ProbeError
from agent.model.declared_devices import (
    Declarations,
    DeclaredGpuDevice,
    DeclaredNicDevice,
    DeclaredPciDevice,
    declared_nics,
)
from agent.model.gpu import GpuAttributes, GpuOsSample, NvmlSample
from agent.model.machine_samples import NicSample, PciSample, Subsystem, UeventCounts
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.time import NS
from agent.sources.gpu_os_facts import GpuOsReader, NvidiaPciDevices, read_nvidia_devices
from agent.sources.pci import RDMA_CLASS, read_nics, read_pci_functions
from agent.system.output import get_logger
from agent.system.threads.thread_start import DaemonThread
from agent.system.threads.trio_calls import call_in_thread_when_possible
from agent.system.timing import PassTimer

IDLE_FACTOR: Final = 10
"""Factor by which reads on a machine without GPUs are rarer; a new GPU in NVML triggers one at once."""
NO_EVENTS_POLL_S: Final = 10.0
"""Time between two reads of the PCI bus if the kernel's uevents are not received [s]."""
DEBOUNCE_S: Final = 0.1
"""Delay of a read after a uevent [s]: a device that is plugged in sends a dozen, which trigger one read."""
DEBOUNCE_MAX_S: Final = 5.0
"""Longest delay of a read after a uevent [s], for a device that appears and disappears all the time."""
RECHECKS: Final = 3
"""Number of PCI bus reads in quick succession after a change: as many as the rules need to clear a cause."""
RECHECK_S: Final = 1.0
"""Time between the RECHECKS reads of the PCI bus that follow a change [s]."""
HOST_READ: Final = "read of GPU processes"
INVENTORY_READ: Final = "read of the GPU inventory"
BUS_READ: Final = "read of the PCI bus"
_UNREAD_HOST: Final = GpuOsSample()
"""Sample of GPU processes, inventory and GPUs on the bus before their first read."""

log = get_logger(__name__)
T = TypeVar("T")


class _PciBusReading(NamedTuple):
    """Result of one read of the PCI bus."""

    functions: tuple[PciSample, ...] | Missing | None = None
    gpus: tuple[str, ...] | Missing = ()
    bound: tuple[str, ...] = ()
    requested: frozenset[str] = frozenset()
    """PCI addresses of declared devices that the read included."""
    beat_ns: int = 0
    passes: int = 0


class GpuPciWatcher:
    """Watcher that holds the newest PCI functions, GPU processes and GPU inventory of the machine."""

    def __init__(
        self,
        sysfs_root: Path,
        procfs_root: Path,
        period_s: float,
        *,
        read_inventory: Callable[[], tuple[GpuAttributes, ...]] | None,
        count_gpus: Callable[[], None] = lambda: None,
        use_udev: bool = True,
    ) -> None:
        """Create the watcher.

        Args:
            period_s: Interval of reads on a machine with GPUs, and of retries [s].
            read_inventory: Reads the attributes of the GPUs; may hang. None: GPUs are not watched, only
                declared PCI devices.
            count_gpus: Requests that NVML counts the GPUs now; called when a PCI device was added or removed.
            use_udev: Whether to use libudev; finding the library starts a process.
        """
        self.timer: Final = PassTimer("pci")
        self._every_s = period_s
        self._read_inventory = read_inventory
        self._count_gpus = count_gpus
        self._uses_udev = use_udev
        self._sysfs_root = sysfs_root
        self._reader = GpuOsReader(sysfs_root, procfs_root)
        self._gpu_system = _UNREAD_HOST
        self._gpus: NvmlSample | None = None
        self._declared: Declarations = ()
        self._nics: frozenset[str] = frozenset()
        self._declared_addresses: frozenset[str] = frozenset()
        self._has_uevents = False
        self._bus = _PciBusReading(beat_ns=time.monotonic_ns())
        self._trigger: tuple[object, int, object, bool] = (
            _inventory_key(None),
            0,
            self._declared_addresses,
            self._has_uevents,
        )
        self._changed = trio.Event()
        self._wake_readers = trio.Event()
        self._running_reads: dict[str, threading.Event] = {}
        self._logged: dict[str, str] = {}

    @property
    def gpu_system(self) -> GpuOsSample:
        """Last reading of processes in the GPU driver, of the GPU inventory, and of GPUs on the PCI bus."""
        return self._gpu_system

    @property
    def pci(self) -> tuple[PciSample, ...] | Missing | None:
        """PCI functions of the last bus read; None: no read yet has all devices that are declared now."""
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

    def set_inputs(
        self,
        gpus: NvmlSample | None,
        uevents: UeventCounts | None = None,
        declared: Declarations = (),
        nics: frozenset[str] = frozenset(),
    ) -> None:
        """Store the newest inputs of the watcher; a relevant change triggers a read.

        The inputs are GPU samples, uevents, declared devices, and PCI addresses of declared NICs.
        """
        watched = self._watches_bus()
        self._gpus = gpus
        if declared is not self._declared or nics != self._nics:
            self._declared, self._nics = declared, nics
            self._declared_addresses = _declared_pci_addresses(declared) | nics
        self._has_uevents = uevents is not None and uevents.source.state in (
            SourceState.OK,
            SourceState.STARTING,
        )
        if self._watches_bus() != watched:
            self._reset_bus()
        changes = uevents.changes[Subsystem.PCI] if uevents else 0
        if changes != self._trigger[1]:
            self._count_gpus()
        trigger = (_inventory_key(gpus), changes, self._declared_addresses, self._has_uevents)
        if trigger != self._trigger:
            self._trigger = trigger
            self._changed.set()

    def start_single_read(self) -> threading.Thread:
        """Start a thread that reads PCI bus and GPU processes once; for callers without an event loop."""

        def read() -> None:
            if self._read_inventory is not None:
                found = self._run_read(HOST_READ, self._read_gpu_system)
                self._gpu_system = found or self._gpu_system
            if self._watches_bus():
                bus = self._run_read(BUS_READ, partial(self._read_bus, self._declared_addresses))
                self._bus = bus or self._bus

        thread = DaemonThread(read, "dh-host")
        thread.start()
        return thread

    async def run(self, wake: Callable[[], None]) -> None:
        """Read bus, processes and inventory until cancelled, and call `wake` when a result has changed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._debounce_changes)
            nursery.start_soon(self._watch_bus, wake)
            if self._read_inventory is not None:
                nursery.start_soon(self._watch_gpu_system, wake)
                nursery.start_soon(self._watch_inventory, self._read_inventory, wake)

    def unfinished_reads(self, timeout_s: float) -> Sequence[str]:
        """Return the names of the reads that last longer than `timeout_s`. Use after :meth:`run`."""
        end_s = time.monotonic() + timeout_s
        running = list(self._running_reads.items())
        return [name for name, done in running if not done.wait(max(0.0, end_s - time.monotonic()))]

    async def _debounce_changes(self) -> None:
        """Start reads of the PCI bus and the GPU inventory after a change.

        The delay grows while changes follow each other.
        """
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

    async def _watch_gpu_system(self, wake: Callable[[], None]) -> None:
        while True:
            woken, had_gpus = self._wake_readers, self._has_gpus()
            host = await self._in_thread(HOST_READ, self._read_gpu_system)
            if host is not None:
                self._set_gpu_system(replace(host, inventory=self._gpu_system.inventory), wake)
            if self._has_gpus():
                if not had_gpus:
                    self._reset_bus()
                    self._changed.set()
                await trio.sleep(self._every_s)
            else:
                await _wait_for_event(woken, IDLE_FACTOR * self._every_s)

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
                        self._set_gpu_system(
                            replace(self._gpu_system, bus_gpus=bus.gpus, bound_gpus=bus.bound), wake
                        )
                    if is_new or is_recheck:
                        wake()
            await _wait_for_event(woken, RECHECK_S if rechecks else self._bus_period_s())

    def _read_bus(self, addresses: frozenset[str]) -> _PciBusReading:
        with self.timer.measure():
            bus = read_nvidia_devices(self._sysfs_root)
            functions = read_pci_functions(self._sysfs_root, addresses, udev=self._uses_udev)
        gpus, bound = (bus, ()) if isinstance(bus, Missing) else (bus.gpus, bus.bound)
        return _PciBusReading(functions, gpus, bound, addresses, time.monotonic_ns(), self._bus.passes + 1)

    def _reset_bus(self) -> None:
        """Discard the last bus read, and restart the timeout after which the source ``pci`` is stalled."""
        self._bus = _PciBusReading(beat_ns=time.monotonic_ns(), passes=self._bus.passes)

    def _watches_bus(self) -> bool:
        return bool(self._declared_addresses) or self._has_gpus()

    def _bus_period_s(self) -> float:
        if not self._watches_bus():
            return float("inf")
        return self._every_s if self._has_uevents else min(NO_EVENTS_POLL_S, self._every_s)

    def _read_gpu_system(self) -> GpuOsSample | None:
        """Read the processes in the GPU driver and the GPUs on the PCI bus; None: no GPU was ever found.

        Without a GPU, no processes are read.
        """
        if not self._has_gpus():
            bus = read_nvidia_devices(self._sysfs_root)
            if not isinstance(bus, NvidiaPciDevices) or not bus.gpus:
                return None
        return self._reader.read()

    def _has_gpus(self) -> bool:
        return self._gpu_system != _UNREAD_HOST or bool(self._gpus and self._gpus.gpus)

    async def _watch_inventory(
        self, read: Callable[[], tuple[GpuAttributes, ...]], wake: Callable[[], None]
    ) -> None:
        while True:
            woken, gpus = self._wake_readers, self._gpus
            found = None
            # while one NVML call hangs, another would hang as well
            if gpus and gpus.gpus and not any(gpu.call and gpu.overdue for gpu in gpus.gpus):
                found = await self._in_thread(INVENTORY_READ, read)
            if found is not None:
                self._set_gpu_system(
                    replace(self._gpu_system, inventory=_merge_inventory(self._gpu_system.inventory, found)),
                    wake,
                )
            has_failed = found is None and bool(gpus and gpus.gpus)
            await _wait_for_event(woken, self._every_s if has_failed else float("inf"))

    async def _in_thread(self, name: str, read: Callable[[], T]) -> T | None:
        return await call_in_thread_when_possible(partial(self._run_read, name, read), "dh-host")

    def _run_read(self, name: str, read: Callable[[], T]) -> T | None:
        """Run `read` in a thread and return its result; None: it failed. A new reason of failure is logged.

        Args:
            name: Name of the read in log lines: ``read of the PCI bus``.
        """
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

    def _set_gpu_system(self, host: GpuOsSample, wake: Callable[[], None]) -> None:
        if host != self._gpu_system:
            self._gpu_system = host
            wake()


async def _wait_for_event(event: trio.Event, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await event.wait()


def _bus_topology(functions: tuple[PciSample, ...] | Missing | None) -> object:
    """Return address, driver and link width of each PCI function, without counters, to detect a change."""
    if not isinstance(functions, tuple):
        return functions
    return [(function.address, function.driver, function.width) for function in functions]


def _inventory_key(gpus: NvmlSample | None) -> tuple[object, ...]:
    """Return the GPU values of which any change triggers a new read of the inventory."""
    if gpus is None or not gpus.gpus:
        return ()
    return (gpus.generation, *((gpu.uuid, gpu.handles, gpu.migs) for gpu in gpus.gpus))


def _declared_pci_addresses(declared: Declarations) -> frozenset[str]:
    found = set()
    for file in declared:
        for device in file.devices:
            match device.part:
                case DeclaredPciDevice(address=address) | DeclaredGpuDevice(pci=address) if address:
                    found.add(address)
    return frozenset(found)


def _merge_inventory(
    before: Sequence[GpuAttributes], now: Sequence[GpuAttributes]
) -> tuple[GpuAttributes, ...]:
    """Return the attributes of GPUs after a new read of the inventory.

    GPUs that do not answer keep their earlier entry, because a replacement needs their serial number. The
    entry is dropped when another GPU is at its address.
    """
    known = [gpu for gpu in now if gpu.uuid]
    present = {gpu.uuid for gpu in known} | {gpu.bus for gpu in known}
    return (*known, *(gpu for gpu in before if not {gpu.uuid, gpu.bus} & present))


# --- network adapters --------------------------------------------------------------------------------------

READ_GAP_S: Final = 1.0
"""Shortest time between two reads of the NICs [s], for a PCI device that appears and disappears all the time.
"""
NIC_READ: Final = "read of the NICs"


class _NicReading(NamedTuple):
    """Result of one read of the declared NICs."""

    nics: tuple[NicSample, ...] | Missing | None = None
    requested: frozenset[DeclaredNicDevice] = frozenset()
    """NICs that the read included."""
    beat_ns: int = 0
    passes: int = 0


class NicWatcher:
    """Watcher that holds the newest samples of the declared NICs.

    Args:
        sysfs_root: Mount point of sysfs.
        period_s: Interval of reads [s].
    """

    def __init__(self, sysfs_root: Path, period_s: float) -> None:
        self.timer: Final = PassTimer("nic")
        self._sysfs_root = sysfs_root
        self._period_s = period_s
        self._declarations: Declarations = ()
        self._declared: frozenset[DeclaredNicDevice] = frozenset()
        self._pci_changes = 0
        self._reading = _NicReading(beat_ns=time.monotonic_ns())
        self._address_of: Mapping[str, str] = {}
        """Last known PCI addresses of NICs that are or were declared, by RDMA name."""
        self._changed = trio.Event()
        self._done = threading.Event()
        self._done.set()

    @property
    def nics(self) -> tuple[NicSample, ...] | Missing | None:
        """Declared NICs as of the last read; None: no read yet has all NICs that are declared now."""
        return self._reading.nics if self._declared <= self._reading.requested else None

    @property
    def addresses(self) -> frozenset[str]:
        """PCI addresses of the declared NICs, with the last known address of a NIC that is gone."""
        found = (part.pci or self._address_of.get(part.rdma, "") for part in self._declared)
        return frozenset(address for address in found if address)

    @property
    def source(self) -> SourceSample | None:
        """State of the source ``nic``; None: no NIC is declared."""
        if not self._declared:
            return None
        state, detail = SourceState.OK, ""
        if self.nics is None:
            state = SourceState.STARTING
        elif isinstance(self.nics, Missing):
            state, detail = SourceState.FAILING, f"{RDMA_CLASS}: {self.nics}"
        beat_ns, passes = self._reading.beat_ns, self._reading.passes
        period_ns = int(self._period_s * NS)
        return SourceSample("nic", state, beat_ns, period_ns, 0, detail, passes=passes, vital=False)

    def restore_addresses(self, addresses: Mapping[str, str]) -> None:
        """Set the PCI addresses of NICs, by RDMA name, that the agent stored before a restart. Without them,
        the PCI bus is not searched for a NIC whose RDMA device is gone."""
        self._address_of = addresses

    def set_inputs(self, declared: Declarations, uevents: UeventCounts | None = None) -> None:
        """Store the newest declared devices and uevents; a relevant change triggers a read."""
        if declared is not self._declarations:
            self._declarations, parts = declared, declared_nics(declared)
            if parts != self._declared:
                if not self._declared:  # restart the time after which the source is stalled
                    self._reading = self._reading._replace(beat_ns=time.monotonic_ns())
                self._declared = parts
                self._changed.set()
        changes = uevents.changes[Subsystem.PCI] if uevents else 0
        if changes != self._pci_changes:
            self._pci_changes = changes
            self._changed.set()

    async def run(self, wake: Callable[[], None]) -> None:
        """Read the declared NICs until cancelled, and call `wake` when a sample has changed."""
        while True:
            self._changed = trio.Event()
            began_s = trio.current_time()
            if self._declared:
                before, was_unread = self._reading.nics, self.nics is None
                read = await call_in_thread_when_possible(partial(self._read, self._declared), "dh-nics")
                self._reading = read
                nics = read.nics if isinstance(read.nics, tuple) else ()
                known = {nic.name: nic.address for nic in nics if nic.address}
                self._address_of = {**self._address_of, **known}
                if was_unread or read.nics != before:
                    wake()
            with trio.move_on_after(self._period_s if self._declared else float("inf")):
                await self._changed.wait()
                await trio.sleep_until(max(trio.current_time() + DEBOUNCE_S, began_s + READ_GAP_S))

    def _read(self, declared: frozenset[DeclaredNicDevice]) -> _NicReading:
        self._done.clear()
        try:
            with self.timer.measure():
                nics = read_nics(self._sysfs_root, declared)
        finally:
            self._done.set()
        return _NicReading(nics, declared, time.monotonic_ns(), self._reading.passes + 1)

    def unfinished_reads(self, timeout_s: float) -> Sequence[str]:
        """Return the name of the read of NICs if it lasts longer than `timeout_s`. Use after :meth:`run`."""
        return [] if self._done.wait(timeout_s) else [NIC_READ]
