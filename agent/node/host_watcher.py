"""What the host says of its GPUs and PCI devices, asked now and then: the bus, processes, inventory.

Each is read in a thread that may be left behind: it can hang where the driver does, and then nothing waits
for it but its own next reading. What was read last is kept. Nothing here judges it.

A device that comes, goes or changes its driver is news of the kernel: then the bus and the inventory are read
again at once. Where the kernel tells nobody, the bus is looked at more often instead.
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
from agent.model.pci import PciSample
from agent.model.reading import Absence, Missing
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS
from agent.model.uevent import Subsystem, UeventSample
from agent.sources.gpu_host import GpuHostReader, PciBus, read_bus
from agent.sources.gpu_inventory import read_inventory
from agent.sources.pci import read_pci

IDLE: Final = 10
"""How much more rarely a host without GPUs is asked whether one is on its bus; one that NVML counts is known
at once."""
DEAF_S: Final = 10.0
"""How often the bus is looked at where the kernel sends no events [s]."""
DEBOUNCE_S: Final = 0.1
"""A device that is plugged in sends a dozen events: they are answered together [s]..."""
UNREST_S: Final = 5.0
"""...and one that comes and goes all the time is followed no faster than this [s]."""
CLEAN_LOOKS: Final = 3
"""When something came or went, so many looks follow each other soon: as many good ones end a fault."""
SOON_S: Final = 1.0
LOOK: Final = "the look at GPUs' processes"
INVENTORY: Final = "the inventory of GPUs"
BUS: Final = "the look at the PCI bus"
_NOTHING: Final = GpuHost()
"""Of a host that nobody has looked at yet."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class _Bus(NamedTuple):
    """A look at the PCI bus."""

    functions: tuple[PciSample, ...] | Missing | None = None
    gpus: tuple[str, ...] | Missing = ()
    asked: frozenset[str] = frozenset()
    """The addresses that were looked for."""
    beat_ns: int = 0
    passes: int = 0


class HostWatcher:
    """The newest of what the host said."""

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
        """
        Args:
            library: NVML's, a name or a path.
            sysfs_root: Where sysfs is mounted.
            procfs_root: Where procfs is mounted.
            every_s: How often a host with GPUs is asked, and what failed is tried again [s].
            gpus: GPUs are looked for, and not what drivers declare alone.
            udev: libudev may be asked, which starts a process to find it.
        """
        self._every_s = every_s
        self._looks_for_gpus = gpus
        self._asks_udev = udev
        self._library = library
        self._sysfs_root = sysfs_root
        self._reader = GpuHostReader(sysfs_root, procfs_root)
        self._host = _NOTHING
        self._gpus: GpuSet | None = None
        self._declared: Declarations = ()
        self._wanted: frozenset[str] = frozenset()
        self._hears = False
        self._bus = _Bus(beat_ns=time.monotonic_ns())
        self._seen: object = (_identity(None), 0, self._wanted, self._hears)
        self._news = trio.Event()
        self._others = trio.Event()
        self._under_way: dict[str, threading.Event] = {}
        self._told: dict[str, str] = {}

    @property
    def host(self) -> GpuHost:
        """What was read last."""
        return self._host

    @property
    def pci(self) -> tuple[PciSample, ...] | Missing | None:
        """The bus as it was read last; None: not yet, or not for all that is declared now."""
        return self._bus.functions if self._wanted <= self._bus.asked else None

    @property
    def source(self) -> SourceSample | None:
        """How reading the bus is going, as ``pci``; None: nothing on it is watched."""
        if not self._bus_matters():
            return None
        bus = self._bus
        state, detail = SourceState.OK, ""
        if self.pci is None:
            state = SourceState.STARTING
        elif isinstance(self.pci, Missing):
            absent = self.pci.absence is Absence.ABSENT
            state = SourceState.ABSENT if absent else SourceState.FAILING
            detail = f"bus/pci/devices: {self.pci}"
        period_ns = int(self._bus_pace_s() * NS)
        return SourceSample("pci", state, bus.beat_ns, period_ns, 0, detail, passes=bus.passes, vital=False)

    def note(
        self, gpus: GpuSet | None, uevents: UeventSample | None = None, declared: Declarations = ()
    ) -> None:
        """What is known now. Other GPUs, instances, drivers or declared devices are asked about at once."""
        mattered = self._bus_matters()
        self._gpus = gpus
        if declared is not self._declared:
            self._declared, self._wanted = declared, _addresses(declared)
        self._hears = uevents is not None and uevents.source.state in (SourceState.OK, SourceState.STARTING)
        if self._bus_matters() != mattered:
            self._begin_bus()
        moves = uevents.changes[Subsystem.PCI] if uevents else 0
        seen = (_identity(gpus), moves, self._wanted, self._hears)
        if seen != self._seen:
            self._seen = seen
            self._news.set()

    def look(self) -> threading.Thread:
        """Looks once, without the inventory, in a thread of its own: for those who have no loop."""

        def read() -> None:
            if self._looks_for_gpus:
                found = self._attempt(LOOK, self._look)
                self._host = found or self._host
            if self._bus_matters():
                bus = self._attempt(BUS, partial(self._read_bus, self._wanted))
                self._bus = bus or self._bus

        thread = threading.Thread(target=read, name="host", daemon=True)
        thread.start()
        return thread

    async def run(self, wake: Callable[[], None]) -> None:
        """Asks until cancelled, and calls ``wake`` when something is new."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._gather_news)
            nursery.start_soon(self._watch_bus, wake)
            if self._looks_for_gpus:
                nursery.start_soon(self._watch_host, wake)
                nursery.start_soon(self._watch_inventory, wake)

    def unfinished(self, timeout_s: float) -> Sequence[str]:
        """The readings that do not return within that time, in words. After :meth:`run`."""
        end_s = time.monotonic() + timeout_s
        under_way = list(self._under_way.items())
        return [name for name, done in under_way if not done.wait(max(0.0, end_s - time.monotonic()))]

    async def _gather_news(self) -> None:
        """Passes news on: the first after a moment, a stream of them less and less often."""
        pause_s, last_s = DEBOUNCE_S, -UNREST_S
        while True:
            await self._news.wait()
            calm = trio.current_time() - last_s > UNREST_S
            pause_s = DEBOUNCE_S if calm else min(2 * pause_s, UNREST_S)
            await trio.sleep(pause_s)
            last_s = trio.current_time()
            self._news = trio.Event()
            self._others.set()
            self._others = trio.Event()

    async def _watch_host(self, wake: Callable[[], None]) -> None:
        while True:
            others, had_gpus = self._others, self._has_gpus()
            host = await self._in_thread(LOOK, self._look)
            if host is not None:
                self._set(replace(host, inventory=self._host.inventory), wake)
            if self._has_gpus():
                if not had_gpus:
                    self._begin_bus()
                    self._news.set()
                await trio.sleep(self._every_s)
            else:
                await _wait(others, IDLE * self._every_s)

    async def _watch_bus(self, wake: Callable[[], None]) -> None:
        more = 0  # looks that follow soon
        while True:
            others = self._others
            if self._bus_matters():
                bus = await self._in_thread(BUS, partial(self._read_bus, self._wanted))
                if bus is not None:
                    is_news = self.pci is None or bus.functions != self._bus.functions
                    is_awaited = more > 0  # good news is that it is good once more
                    came_or_went = _bound(bus.functions) != _bound(self._bus.functions)
                    more = CLEAN_LOOKS - 1 if came_or_went else max(0, more - 1)
                    self._bus = bus
                    if self._has_gpus():
                        self._set(replace(self._host, bus_gpus=bus.gpus), wake)
                    if is_news or is_awaited:
                        wake()
            await _wait(others, SOON_S if more else self._bus_pace_s())

    def _read_bus(self, wanted: frozenset[str]) -> _Bus:
        bus = read_bus(self._sysfs_root)
        functions = read_pci(self._sysfs_root, wanted, udev=self._asks_udev)
        gpus = bus if isinstance(bus, Missing) else bus.gpus
        return _Bus(functions, gpus, wanted, time.monotonic_ns(), self._bus.passes + 1)

    def _begin_bus(self) -> None:
        """It matters from now on: who has not read it yet is late from now on."""
        self._bus = _Bus(beat_ns=time.monotonic_ns(), passes=self._bus.passes)

    def _bus_matters(self) -> bool:
        return bool(self._wanted) or self._has_gpus()

    def _bus_pace_s(self) -> float:
        if not self._bus_matters():
            return float("inf")
        return self._every_s if self._hears else min(DEAF_S, self._every_s)

    def _look(self) -> GpuHost | None:
        """The host now. None if it has no GPU and never had: its processes are of no interest then."""
        if not self._has_gpus():
            bus = read_bus(self._sysfs_root)
            if not isinstance(bus, PciBus) or not bus.gpus:
                return None
        return self._reader.read()

    def _has_gpus(self) -> bool:
        return self._host != _NOTHING or bool(self._gpus and self._gpus.gpus)

    async def _watch_inventory(self, wake: Callable[[], None]) -> None:
        while True:
            others, gpus = self._others, self._gpus
            found = None
            # where one call hangs, another would only hang beside it
            if gpus and gpus.gpus and not any(gpu.call and gpu.overdue for gpu in gpus.gpus):
                read = partial(read_inventory, self._library, self._sysfs_root)
                found = await self._in_thread(INVENTORY, read)
            if found is not None:
                self._set(replace(self._host, inventory=_renewed(self._host.inventory, found)), wake)
            is_owed = found is None and bool(gpus and gpus.gpus)
            await _wait(others, self._every_s if is_owed else float("inf"))

    async def _in_thread(self, name: str, read: Callable[[], T]) -> T | None:
        return await trio.to_thread.run_sync(partial(self._attempt, name, read), abandon_on_cancel=True)

    def _attempt(self, name: str, read: Callable[[], T]) -> T | None:
        """What a reading says, or None if it fails; why, that is told when it is news."""
        done = self._under_way[name] = threading.Event()
        try:
            found = read()
        except (ProbeError, OSError) as error:
            if self._told.get(name) != str(error):
                log.warning("%s", error)
            self._told[name] = str(error)
            return None
        finally:
            done.set()
        self._told.pop(name, None)
        return found

    def _set(self, host: GpuHost, wake: Callable[[], None]) -> None:
        if host != self._host:
            self._host = host
            wake()


async def _wait(event: trio.Event, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await event.wait()


def _bound(functions: tuple[PciSample, ...] | Missing | None) -> object:
    """Who is there, bound to which driver, by how many lanes; counters move all the time."""
    if not isinstance(functions, tuple):
        return functions
    return [(function.address, function.driver, function.width) for function in functions]


def _identity(gpus: GpuSet | None) -> tuple[object, ...]:
    """What the inventory depends on."""
    if gpus is None or not gpus.gpus:
        return ()
    return (gpus.generation, *((gpu.uuid, gpu.handles, gpu.migs) for gpu in gpus.gpus))


def _addresses(declared: Declarations) -> frozenset[str]:
    """Where declared devices are on the bus."""
    found = set()
    for file in declared:
        for device in file.devices:
            match device.what:
                case DeclaredPci(address=address) | DeclaredGpu(pci=address) if address:
                    found.add(address)
    return frozenset(found)


def _renewed(before: Sequence[GpuAttributes], now: Sequence[GpuAttributes]) -> tuple[GpuAttributes, ...]:
    """What is known now and, of GPUs that do not answer, what was: a lost one is sent back by its serial.

    A row ends when another part is in its place.
    """
    known = [gpu for gpu in now if gpu.uuid]
    taken = {gpu.uuid for gpu in known} | {gpu.bus for gpu in known}
    return (*known, *(gpu for gpu in before if not {gpu.uuid, gpu.bus} & taken))
