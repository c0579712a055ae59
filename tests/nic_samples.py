"""Samples of NICs, and sysfs files of NICs for tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.model.machine_samples import LinkLayer, NicPortSample, NicSample
from agent.model.reading import Absence, Missing

ABSENT: Final = Missing(Absence.ABSENT)
EIO: Final = Missing(Absence.UNREADABLE, 5)
NIC: Final = "0000:41:00.0"
PORT: Final = NicPortSample(1, LinkLayer.INFINIBAND, 4, 5, 400_000, 4, 0, ABSENT, 0, 0, 0, 0)
"""Active InfiniBand port."""
ETHERNET_PORT: Final = NicPortSample(
    1, LinkLayer.ETHERNET, 4, 5, 100_000, 4, 0, 1, ABSENT, 0, ABSENT, ABSENT, "eth2"
)
"""Active RoCE port."""
UNCABLED: Final[dict[str, Any]] = {"state": 1, "phys_state": 2, "rate_mbps": 10_000, "link_ups": ABSENT}


def nic_sample(*ports: NicPortSample, name: str = "mlx5_0", guid: str = "946d:ae03:0001:0002") -> NicSample:
    return NicSample(name, NIC, guid, ports or (PORT,))


@dataclass
class NicFiles:
    """NICs in a tree of sysfs files."""

    root: Path

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def add(self, name: str = "mlx5_0", address: str = NIC, ports: int = 1) -> str:
        """Create an RDMA device with active InfiniBand ports; return its path below the root."""
        device = f"class/infiniband/{name}"
        self.write(f"{device}/node_guid", "946d:ae03:0001:0002")
        if address:
            function = self.root / "bus/pci/devices" / address
            function.mkdir(parents=True, exist_ok=True)
            (function / "vendor").write_text("0x15b3\n")
            (self.root / device / "device").symlink_to(function)
        for number in range(1, ports + 1):
            port = f"{device}/ports/{number}"
            self.write(f"{port}/link_layer", "InfiniBand")
            self.write(f"{port}/state", "4: ACTIVE")
            self.write(f"{port}/phys_state", "5: LinkUp")
            self.write(f"{port}/rate", "400 Gb/sec (4X NDR)")
            for counter in (
                "link_downed",
                "symbol_error",
                "port_rcv_errors",
                "local_link_integrity_errors",
                "excessive_buffer_overrun_errors",
            ):
                self.write(f"{port}/counters/{counter}", 0)
        return device

    def make_ethernet(self, device: str, interface: str, number: int = 1) -> None:
        """Turn a port into a RoCE port of a network interface."""
        self.write(f"{device}/ports/{number}/link_layer", "Ethernet")
        self.write(f"{device}/ports/{number}/gid_attrs/ndevs/0", interface)
        self.write(f"class/net/{interface}/flags", "0x1003")
        self.write(f"class/net/{interface}/carrier_down_count", 1)
        self.write(f"class/net/{interface}/carrier_up_count", 2)
        self.write(f"class/net/{interface}/statistics/rx_crc_errors", 3)

    def enslave(self, interface: str, bond: str, carrier: int = 1) -> None:
        """Make a network interface a slave of a bond."""
        self.write(f"class/net/{bond}/bonding/mode", "802.3ad 4")
        self.write(f"class/net/{bond}/carrier", carrier)
        (self.root / f"class/net/{interface}/master").symlink_to(f"../{bond}")
