"""Host of plain files: eight CPUs, each with memory on its own NUMA node, two GPUs and two NICs.

Each part fails in one test only, so that tests do not interfere.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from scenarios.machine_files import MachineFiles
from scenarios.row import Row

NODES: Final = 8
COUNTING: Final = 4
"""Number of nodes that count their bad pages; for the others only the kernel log reports them."""
BLOCKS: Final = 4
NODE_KIB: Final = 1 << 20
MAX_KHZ: Final = 3_000_000
PCI: Final = "bus/pci/devices"
NIC: Final = "0000:5e:00.0"
CARD: Final = "0000:5f:00.0"
PORT: Final = "0000:5d:00.0"
MELLANOX: Final = "mlx5_core"


class PaperHost(MachineFiles):
    """Files of the host, with the kernel log as a FIFO that wakes its reader as the real one does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Row("host", (), gpus=2), directory)
        every = f"0-{NODES - 1}"
        for name in ("present", "online"):
            self.sysfs.write(f"devices/system/cpu/{name}", every)
        for name in ("online", "has_memory"):
            self.sysfs.write(f"devices/system/node/{name}", every)
        self.sysfs.write("devices/system/cpu/smt/active", "1")
        self.sysfs.write("devices/system/edac/mc/mc0/mc_name", "Skylake Socket#0 IMC#0")  # without counters
        for number in range(NODES):
            self._add_node(number)
        for address in (NIC, CARD):
            self.plug(address)
        (self.procfs / "meminfo").write_text(f"MemTotal: {NODES * NODE_KIB} kB\nHardwareCorrupted: 0 kB\n")
        self.log.unlink()
        os.mkfifo(self.log)
        self._writer = os.open(self.log, os.O_RDWR | os.O_CLOEXEC)  # keeps the FIFO open

    def close(self) -> None:
        """Close the log."""
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
        """Overwrite a file that the agent may hold open with a text of at most the same length."""
        with (self.sysfs.root / path).open("r+b", buffering=0) as file:
            file.write(f"{text}\n".encode())
            file.truncate()

    def switch_off(self, block: int) -> str:
        """Take a block of memory offline; return the expected message of its node."""
        self.sysfs.write(self._block(block), "offline")
        first = block // BLOCKS * BLOCKS
        states = [self.sysfs.root / self._block(number) for number in range(first, first + BLOCKS)]
        online = sum(state.read_text() == "online\n" for state in states)
        noun = "block" if online == 1 else "blocks"
        return f"mem.blocks.offline: {online} memory {noun} online, {BLOCKS} at start"

    def switch_on(self, block: int) -> None:
        """Bring the block online again."""
        self.sysfs.write(self._block(block), "online")

    def _block(self, number: int) -> str:
        return f"devices/system/node/node{number // BLOCKS}/memory{number}/state"

    def plug(self, address: str) -> None:
        """Add a NIC to the bus, below its port, with its driver and all lanes."""
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
        """Remove the function from the bus."""
        entry = self.sysfs.root / PCI / address
        whole = entry.resolve()
        if entry.is_symlink():
            entry.unlink()
        shutil.rmtree(whole)

    def unbind(self, address: str) -> None:
        """Unbind the driver."""
        (self.sysfs.root / PCI / address / "driver").unlink()
