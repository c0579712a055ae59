"""Reader of RDMA network adapters (NICs) that drivers declare, from sysfs.

Call this from a thread that can be abandoned: some drivers ask the NIC's firmware for a port's state and
counters, which may hang.
"""

import errno
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from agent.model.declared_devices import DeclaredNicDevice
from agent.model.nic import LinkLayer, NicPortSample, NicSample
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.sources.gpu_without_nvml import missing_from_error
from agent.sources.pci import UNPARSABLE, parse_pci_address, read_sysfs_text

RDMA_CLASS: Final = "class/infiniband"
_NOT_COUNTED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errnos of counter files which mean that the NIC, for example a virtual function, lacks the counter."""
_IFF_UP: Final = 1
"""Bit in the flags of a network interface: the interface is set up."""
_RATE: Final = re.compile(r"([0-9]{1,6})(?:\.([0-9]))? Gb/sec \(([0-9]{1,3})X\b.*\)\s*")


def read_nics(sysfs_root: Path, declared: Collection[DeclaredNicDevice]) -> tuple[NicSample, ...] | Missing:
    """Read the declared NICs, sorted by RDMA name; a NIC that does not exist is left out. May hang.

    Missing: the RDMA devices cannot be listed. No files of other NICs are read.

    Source: /sys/class/infiniband.
    """
    devices = sysfs_root / RDMA_CLASS
    try:
        names = sorted(os.listdir(devices))
    except FileNotFoundError:  # the kernel has no RDMA devices, or their driver is not loaded
        return ()
    except OSError as error:
        return missing_from_error(error)
    wanted = {part.rdma or part.pci for part in declared}
    addresses = {name: _pci_address(devices / name) for name in names}
    return tuple(
        _read_nic(sysfs_root, devices / name, address)
        for name, address in addresses.items()
        if {name, address} & wanted
    )


def _pci_address(device: Path) -> str:
    try:
        return parse_pci_address(os.path.basename(os.path.realpath(device / "device")))
    except ValueError:  # soft RoCE, or a subfunction
        return ""


def _read_nic(sysfs_root: Path, device: Path, address: str) -> NicSample:
    guid = read_sysfs_text(device / "node_guid")
    try:
        numbers = sorted(int(name) for name in os.listdir(device / "ports") if name.isdecimal())
    except OSError as error:
        ports: tuple[NicPortSample, ...] | Missing = Missing(Absence.UNREADABLE, error.errno or 0)
    else:
        ports = tuple(_read_port(sysfs_root / "class/net", device, number) for number in numbers)
    return NicSample(device.name, address, "" if isinstance(guid, Missing) else guid.strip(), ports)


def _read_port(interfaces: Path, device: Path, number: int) -> NicPortSample:
    port = device / "ports" / str(number)
    text = read_sysfs_text(port / "link_layer")
    error, layer = (text, LinkLayer.UNKNOWN) if isinstance(text, Missing) else (NEVER_READ, _link_layer(text))
    name = _interface(port, device, number) if layer is LinkLayer.ETHERNET else ""
    interface = interfaces / name

    def count(infiniband: str, ethernet: str) -> Reading:
        """Read a counter of the port from the file of its link layer.

        Args:
            infiniband: File of an InfiniBand port; empty: InfiniBand does not count this.
            ethernet: File of the network interface of an Ethernet port; empty: Ethernet does not count this.
        """
        if layer is LinkLayer.INFINIBAND and infiniband:
            return _read_count(port / "counters" / infiniband)
        return _read_count(interface / ethernet) if name and ethernet else error

    rate, width = _read_rate(port / "rate")
    return NicPortSample(
        number,
        layer,
        _read_state(port / "state"),
        _read_state(port / "phys_state"),
        rate,
        width,
        link_downs=count("link_downed", "carrier_down_count"),
        link_ups=count("", "carrier_up_count"),
        symbol_errors=count("symbol_error", ""),
        receive_errors=count("port_rcv_errors", "statistics/rx_crc_errors"),
        integrity_errors=count("local_link_integrity_errors", ""),
        buffer_overruns=count("excessive_buffer_overrun_errors", ""),
        interface=name,
        is_interface_up=not name or _is_interface_up(interface),
        working_bond=_working_bond(interfaces, name) if name else "",
    )


def _link_layer(text: str) -> LinkLayer:
    return LinkLayer.ETHERNET if text.strip() == LinkLayer.ETHERNET else LinkLayer.INFINIBAND


def _read_state(path: Path) -> Reading:
    """Read the number of a NIC port's state from a file with a text such as ``4: ACTIVE``.

    A port always has a state, so a missing file counts as unreadable.
    """
    text = read_sysfs_text(path)
    if isinstance(text, Missing):
        return Missing(Absence.UNREADABLE, text.errno)
    number = text.partition(":")[0]
    return int(number) if number.isdecimal() else UNPARSABLE


def _read_rate(path: Path) -> tuple[Reading, Reading]:
    """Read a NIC port's data rate [Mb/s] and number of lanes from a text such as ``2.5 Gb/sec (1X SDR)``."""
    text = read_sysfs_text(path)
    if isinstance(text, Missing):
        return text, text
    found = _RATE.fullmatch(text)
    if found is None:
        return UNPARSABLE, UNPARSABLE
    return int(found[1]) * 1000 + int(found[2] or 0) * 100, int(found[3])


def _read_count(path: Path) -> Reading:
    text = read_sysfs_text(path)
    if isinstance(text, Missing):
        return NEVER_READ if text.errno in _NOT_COUNTED else text
    if text.startswith("N/A"):
        return NEVER_READ
    return int(text) if text.strip().isdecimal() else UNPARSABLE


def _interface(port: Path, device: Path, number: int) -> str:
    """Return the network interface of a NIC's Ethernet port; empty: not found.

    It is the interface of the port's first GID, or else that of the PCI function with the port's number.
    """
    name = read_sysfs_text(port / "gid_attrs/ndevs/0")
    if isinstance(name, str) and name.strip():
        return os.path.basename(name.strip())
    try:
        names = sorted(os.listdir(device / "device/net"))
    except OSError:
        return ""
    for found in names:
        dev_port = read_sysfs_text(device / "device/net" / found / "dev_port")
        if isinstance(dev_port, str) and dev_port.strip() == str(number - 1):
            return found
    return ""


def _is_interface_up(interface: Path) -> bool:
    """Return False if a network interface is set down; True if it is up, or cannot be read."""
    flags = read_sysfs_text(interface / "flags")
    try:
        return isinstance(flags, Missing) or bool(int(flags, 0) & _IFF_UP)
    except ValueError:
        return True


def _working_bond(interfaces: Path, name: str) -> str:
    try:
        master = os.path.basename(os.readlink(interfaces / name / "master"))
    except OSError:
        return ""
    carrier = read_sysfs_text(interfaces / master / "carrier")
    works = isinstance(carrier, str) and carrier.strip() == "1"
    return master if works and (interfaces / master / "bonding").is_dir() else ""
