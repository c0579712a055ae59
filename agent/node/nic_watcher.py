"""Watcher of the RDMA network adapters (NICs) that drivers declare.

They are read periodically in a thread of their own that may be abandoned, because a read can hang with the
NIC's firmware. A uevent about a PCI device triggers a read. Without declared NICs nothing is read.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

from agent.model.declared_devices import Declarations, DeclaredNicDevice, declared_nics
from agent.model.kernel_messages import Subsystem, UeventCounts
from agent.model.nic import NicSample
from agent.model.reading import Missing
from agent.model.source_state import SourceSample, SourceState
from agent.model.time import NS
from agent.sources.nic import RDMA_CLASS, read_nics
from agent.system.threads.trio_calls import call_in_thread_when_possible
from agent.system.timing import PassTimer

DEBOUNCE_S: Final = 0.1
"""Delay of a read of the NICs after a uevent or a new declaration [s]."""
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
        self._changed = trio.Event()
        self._done = threading.Event()
        self._done.set()

    @property
    def nics(self) -> tuple[NicSample, ...] | Missing | None:
        """Declared NICs as of the last read; None: not read yet, or not with all NICs declared now."""
        return self._reading.nics if self._declared <= self._reading.requested else None

    @property
    def addresses(self) -> frozenset[str]:
        """PCI addresses of the declared NICs; of a NIC that is gone, its last address."""
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

    def note_inputs(self, declared: Declarations, uevents: UeventCounts | None = None) -> None:
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
                names = {part.rdma for part in self._declared}
                known = {name: address for name, address in self._address_of.items() if name in names}
                self._address_of = known | {nic.name: nic.address for nic in nics if nic.address}
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
        """Return the name of the read of NICs if it hangs for longer than `timeout_s` after :meth:`run`."""
        return [] if self._done.wait(timeout_s) else [NIC_READ]
