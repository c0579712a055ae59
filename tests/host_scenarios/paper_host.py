"""A host of plain files: eight CPUs, each with its memory on a NUMA node of its own, two GPUs and two NICs.

Every part is sick once, so that no test stands in another's way: who is sick of what, the tests say.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from scenarios.machine_files import MachineFiles
from scenarios.row import Row

NODES: Final = 8
COUNTING: Final = 4
"""So many nodes count their bad pages; of the others only the kernel log tells."""
BLOCKS: Final = 4
NODE_KIB: Final = 1 << 20
MAX_KHZ: Final = 3_000_000
PCI: Final = "bus/pci/devices"
NIC: Final = "0000:5e:00.0"
CARD: Final = "0000:5f:00.0"
PORT: Final = "0000:5d:00.0"
MELLANOX: Final = "mlx5_core"


class PaperHost(MachineFiles):
    """The files, and the kernel log as a FIFO: its reader is woken by it as by the real one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Row("host", (), gpus=2), directory)
        every = f"0-{NODES - 1}"
        for name in ("present", "online"):
            self.sysfs.write(f"devices/system/cpu/{name}", every)
        for name in ("online", "has_memory"):
            self.sysfs.write(f"devices/system/node/{name}", every)
        self.sysfs.write("devices/system/cpu/smt/active", "1")
        self.sysfs.write("devices/system/edac/mc/mc0/mc_name", "Skylake Socket#0 IMC#0")  # it counts nothing
        for number in range(NODES):
            self._add_node(number)
        for address in (NIC, CARD):
            self.plug(address)
        (self.procfs / "meminfo").write_text(f"MemTotal: {NODES * NODE_KIB} kB\nHardwareCorrupted: 0 kB\n")
        self.log.unlink()
        os.mkfifo(self.log)
        self._writer = os.open(self.log, os.O_RDWR | os.O_CLOEXEC)  # so that it never ends

    def close(self) -> None:
        """Its log ends."""
        os.close(self._writer)

    def _add_node(self, number: int) -> None:
        cpu, node = f"devices/system/cpu/cpu{number}", f"devices/system/node/node{number}"
        self.sysfs.write(f"{node}/cpulist", f"{number}")
        self.sysfs.write(f"{node}/meminfo", f"Node {number} MemTotal: {NODE_KIB} kB")
        if number < COUNTING:
            self.sysfs.write(f"{node}/memory_failure/total", "0")
        for block in range(number * BLOCKS, (number + 1) * BLOCKS):
            self.switch_on(block)
        self.sysfs.write(f"{cpu}/topology/core_cpus_list", f"{number}")
        self.sysfs.write(f"{cpu}/topology/physical_package_id", f"{number}")
        for name in ("cpuinfo_max_freq", "scaling_max_freq"):
            self.sysfs.write(f"{cpu}/cpufreq/{name}", f"{MAX_KHZ}")
        for name in ("core", "package"):
            self.sysfs.write(f"{cpu}/thermal_throttle/{name}_throttle_count", "0")

    def rewrite(self, path: str, text: str) -> None:
        """A file that the agent may hold open has another text of at most the same length."""
        with (self.sysfs.root / path).open("r+b", buffering=0) as file:
            file.write(f"{text}\n".encode())
            file.truncate()

    def switch_off(self, block: int) -> str:
        """A block of memory is offline. Returns what must be said of its node."""
        self.sysfs.write(self._block(block), "offline")
        first = block // BLOCKS * BLOCKS
        states = [self.sysfs.root / self._block(number) for number in range(first, first + BLOCKS)]
        online = sum(state.read_text() == "online\n" for state in states)
        noun = "block" if online == 1 else "blocks"
        return f"mem.blocks.offline: {online} memory {noun} online, {BLOCKS} at start"

    def switch_on(self, block: int) -> None:
        """It is online again."""
        self.sysfs.write(self._block(block), "online")

    def _block(self, number: int) -> str:
        return f"devices/system/node/node{number // BLOCKS}/memory{number}/state"

    def plug(self, address: str) -> None:
        """A NIC is on the bus, below its port, with its driver and all its lanes."""
        at = f"devices/pci0000:5d/{PORT}/{address}"
        for name, text in (("vendor", "0x15b3"), ("device", "0x101d"), ("class", "0x020000")):
            self.sysfs.write(f"{at}/{name}", text)
        for name in ("current", "max"):
            self.sysfs.write(f"{at}/{name}_link_width", "16")
        for kind, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
            self.sysfs.write(f"{at}/aer_dev_{kind}", f"TOTAL_ERR_{total} 0")
        self.sysfs.link(f"{PCI}/{address}", f"../../../{at}")
        self.bind(address, MELLANOX)

    def unplug(self, address: str) -> None:
        """Nothing is on the bus there."""
        entry = self.sysfs.root / PCI / address
        whole = entry.resolve()
        if entry.is_symlink():
            entry.unlink()
        shutil.rmtree(whole)

    def unbind(self, address: str) -> None:
        """No driver has it."""
        (self.sysfs.root / PCI / address / "driver").unlink()
