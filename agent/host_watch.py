"""What the host says of its GPUs, asked now and then: PCI bus, processes, inventory.

Each is read in a thread that may be left behind: it can hang where the driver does, and then nothing waits
for it but its own next reading. What was read last is kept. Nothing here judges it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from agent.errors import ProbeError
from agent.model.gpu import GpuAttributes, GpuHost, GpuSet
from agent.sources.gpu_host import GpuHostReader, PciBus, read_bus
from agent.sources.gpu_inventory import read_inventory

IDLE: Final = 10
"""How much more rarely a host without GPUs is asked whether one is on its bus; one that NVML counts is known
at once."""
LOOK: Final = "the look at GPUs' processes"
INVENTORY: Final = "the inventory of GPUs"

log = logging.getLogger(__name__)
T = TypeVar("T")


class HostWatch:
    """The newest of what the host said."""

    def __init__(self, library: str, sysfs_root: Path, procfs_root: Path, every_s: float) -> None:
        """
        Args:
            library: NVML's, a name or a path.
            sysfs_root: Where sysfs is mounted.
            procfs_root: Where procfs is mounted.
            every_s: How often a host with GPUs is asked, and what failed is tried again [s].
        """
        self._every_s = every_s
        self._library = library
        self._sysfs_root = sysfs_root
        self._reader = GpuHostReader(sysfs_root, procfs_root)
        self._host = GpuHost()
        self._gpus: GpuSet | None = None
        self._identity = _identity(None)
        self._others = trio.Event()
        self._under_way: dict[str, threading.Event] = {}
        self._told: dict[str, str] = {}

    @property
    def host(self) -> GpuHost:
        """What was read last."""
        return self._host

    def note(self, gpus: GpuSet | None) -> None:
        """What the native core sees now. Other GPUs, instances or drivers are asked about at once."""
        self._gpus, before = gpus, self._identity
        self._identity = _identity(gpus)
        if self._identity != before:
            self._others.set()
            self._others = trio.Event()

    def look(self) -> threading.Thread:
        """Looks once, without the inventory, in a thread of its own: for those who have no loop."""

        def read() -> None:
            found = self._attempt(LOOK, self._look)
            if found is not None:
                self._host = found

        thread = threading.Thread(target=read, name="host", daemon=True)
        thread.start()
        return thread

    async def run(self, wake: Callable[[], None]) -> None:
        """Asks until cancelled, and calls ``wake`` when something is new."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_host, wake)
            nursery.start_soon(self._watch_inventory, wake)

    def unfinished(self, timeout_s: float) -> Sequence[str]:
        """The readings that do not return within that time, in words. After :meth:`run`."""
        end_s = time.monotonic() + timeout_s
        under_way = list(self._under_way.items())
        return [name for name, done in under_way if not done.wait(max(0.0, end_s - time.monotonic()))]

    async def _watch_host(self, wake: Callable[[], None]) -> None:
        while True:
            others = self._others
            host = await self._in_thread(LOOK, self._look)
            if host is not None:
                self._set(replace(host, inventory=self._host.inventory), wake)
            if self._has_gpus():
                await trio.sleep(self._every_s)
            else:
                await _wait(others, IDLE * self._every_s)

    def _look(self) -> GpuHost | None:
        """The host now. None if it has no GPU and never had: its processes are of no interest then."""
        if not self._has_gpus():
            bus = read_bus(self._sysfs_root)
            if not isinstance(bus, PciBus) or not bus.gpus:
                return None
        return self._reader.read()

    def _has_gpus(self) -> bool:
        return self._host != GpuHost() or bool(self._gpus and self._gpus.gpus)

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


def _identity(gpus: GpuSet | None) -> tuple[object, ...]:
    """What the inventory depends on."""
    if gpus is None or not gpus.gpus:
        return ()
    return (gpus.generation, *((gpu.uuid, gpu.handles, gpu.migs) for gpu in gpus.gpus))


def _renewed(before: Sequence[GpuAttributes], now: Sequence[GpuAttributes]) -> tuple[GpuAttributes, ...]:
    """What is known now and, of GPUs that do not answer, what was: a lost one is sent back by its serial.

    A row ends when another part is in its place.
    """
    known = [gpu for gpu in now if gpu.uuid]
    taken = {gpu.uuid for gpu in known} | {gpu.bus for gpu in known}
    return (*known, *(gpu for gpu in before if not {gpu.uuid, gpu.bus} & taken))
