"""Reader of PCI functions from sysfs: NVIDIA's GPUs, and PCI functions that drivers declare.

libudev lists the functions with their model names; without libudev, or with another sysfs root, sysfs lists
them. Call the reader from a thread that can be abandoned: reading a link's width wakes the device and may
hang. agent.sources.gpu_os_facts counts the GPUs that NVML should see.

The module also has the reader of RDMA network adapters (NICs) that drivers declare, from sysfs.

Call the reader of NICs from a thread that can be abandoned: some drivers ask the NIC's firmware for a port's
state and counters, which may hang.
"""

import errno
import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Final

from agent.errors import LACK_ERRNOS
from agent.model.declared_devices import DeclaredNicDevice
from agent.model.machine_samples import LinkLayer, NicPortSample, NicSample, PciSample
from agent.model.reading import NEVER_READ, Absence, Missing, Reading
from agent.sources.gpu_os_facts import (
    GPU_PCI_CLASSES,
    NVIDIA_VENDOR_ID,
    missing_from_error,
    pci_address_sort_key,
)
from agent.system.files import exists, may_exist

UDEV_SYSFS_ROOT: Final = Path("/sys")
"""The only sysfs root that libudev reads."""
LINK_WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})
"""Valid widths of a PCIe link [lanes]. A removed device reports 63, an unknown width is 255."""
UNPARSABLE: Final = Missing(Absence.UNREADABLE, -1)
_ADDRESS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[01][0-9a-f]\.[0-7])")


def parse_pci_address(text: str) -> str:
    """Convert a PCI address to the kernel's form: ``00000000:3B:00.0`` becomes ``0000:3b:00.0``.

    Raises:
        ValueError: The text is not a PCI address with a domain.
    """
    found = _ADDRESS.fullmatch(text.lower())
    if found is None:
        raise ValueError(f"{text!r} is not a PCI address with a domain, such as 0000:3b:00.0")
    return f"{int(found[1], 16):04x}:{found[2]}"


def read_pci_functions(
    sysfs_root: Path, declared: Collection[str], *, udev: bool = True
) -> tuple[PciSample, ...] | Missing:
    """Read identity, driver, link widths and error counts of PCI functions, in bus order. May hang.

    Included are the `declared` PCI functions, and NVIDIA's GPUs, also those passed to a virtual machine but
    no virtual functions. Missing: the PCI bus cannot be read.

    Args:
        sysfs_root: Mount point of sysfs.
        declared: Addresses of PCI functions that drivers declare.
        udev: Whether to list by libudev, which knows model names; finding the library starts a process, once.

    Source: /sys/bus/pci/devices/*.
    """
    bus = sysfs_root / "bus/pci/devices"
    try:
        names = _list_by_sysfs(bus, declared)
        if names and udev and sysfs_root == UDEV_SYSFS_ROOT:
            # libudev has model names; in a container, or without descriptors, it lists too few functions
            models = _list_by_udev(declared)
            names = {address: models.get(address, "") for address in names}
        samples = [_read_pci_function(bus / address, model) for address, model in names.items()]
    except OSError as error:
        return missing_from_error(error)
    return tuple(sorted(filter(None, samples), key=lambda sample: pci_address_sort_key(sample.address)))


# --- list of PCI functions: address to model ---------------------------------------------------------------


@cache  # in the process of a driver, finding the library runs ldconfig
def _udev_context() -> Any:
    """Return libudev's context for lists of devices; None: libudev is not available.

    The import is late, because it takes 0.8 MiB.
    """
    try:
        import pyudev

        return pyudev.Context()
    except (ImportError, OSError):
        return None


def _list_by_udev(declared: Collection[str]) -> dict[str, str]:
    if (context := _udev_context()) is None:
        return {}
    by_vendor = context.list_devices(subsystem="pci").match_attribute("vendor", f"{NVIDIA_VENDOR_ID:#06x}")
    by_name = context.list_devices(subsystem="pci").match_sys_name("")  # matches nothing by itself
    for address in declared:
        by_name.match_sys_name(address)
    try:
        found = [device for device in by_vendor if _is_gpu(Path(device.sys_path))]
        found += by_name
        return {device.sys_name: device.properties.get("ID_MODEL_FROM_DATABASE", "") for device in found}
    except (LookupError, OSError, UnicodeError):  # removed meanwhile, or an undecodable name
        return {}


def _list_by_sysfs(bus: Path, declared: Collection[str]) -> dict[str, str]:
    """Return the addresses of declared PCI functions and NVIDIA's GPUs in sysfs, without model names.

    Raises OSError if the bus cannot be listed, or this process lacks descriptors or memory.
    """
    return {
        address: ""
        for address in os.listdir(bus)
        if address in declared
        or (_read_id(bus / address / "vendor") == NVIDIA_VENDOR_ID and _is_gpu(bus / address))
    }


def _is_gpu(device: Path) -> bool:
    """Return whether an NVIDIA PCI function is a GPU and no virtual function. Raises as _read_id()."""
    pci_class = _read_id(device / "class")
    is_display = isinstance(pci_class, int) and pci_class >> 8 in GPU_PCI_CLASSES
    return is_display and not exists(device / "physfn", follow_symlinks=False)


def _read_id(path: Path) -> Reading:
    """Read a number that decides whether a PCI function is listed.

    Raises OSError if this process lacks descriptors or memory: a GPU that is left out would count as lost.
    """
    number = _read_number(path)
    _raise_own_failure(number)
    return number


def _raise_own_failure(reading: object) -> None:
    """Raise OSError if a reading is missing because this process lacks descriptors or memory."""
    if isinstance(reading, Missing) and reading.errno in LACK_ERRNOS:
        raise OSError(reading.errno, os.strerror(reading.errno))


# --- fields of a PCI function ------------------------------------------------------------------------------


def _read_pci_function(device: Path, model: str) -> PciSample | None:
    """Read one PCI function from its directory in sysfs; None: it was removed."""
    vendor = _read_number(device / "vendor")
    if isinstance(vendor, Missing) and not may_exist(device):
        return None
    return PciSample(
        address=device.name,
        vendor=_id_or_unknown(vendor),
        device=_id_or_unknown(_read_number(device / "device")),
        driver=_bound_driver(device),
        model=model,
        width=_read_link_width(device / "current_link_width"),
        width_max=_read_link_width(device / "max_link_width"),
        aer_nonfatal=_read_aer_total(device / "aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
        aer_fatal=_read_aer_total(device / "aer_dev_fatal", "TOTAL_ERR_FATAL"),
        aer_correctable=_read_aer_total(device / "aer_dev_correctable", "TOTAL_ERR_COR"),
        upstream_bridge=_upstream_bridge(device),
    )


def _bound_driver(device: Path) -> str:
    """Return the kernel driver of a PCI function; empty: none is bound.

    Raises OSError if this process lacks descriptors or memory: a function without a driver is a fault.
    """
    try:
        return os.path.basename(os.readlink(device / "driver"))
    except OSError as error:
        if error.errno in LACK_ERRNOS:
            raise
        return ""


def _upstream_bridge(device: Path) -> str:
    above = Path(os.path.realpath(device)).parent.name
    return above if _ADDRESS.fullmatch(above) else ""


def _id_or_unknown(reading: Reading) -> int:
    return reading if isinstance(reading, int) else -1


def read_sysfs_text(path: Path) -> str | Missing:
    """Read a file of a device in sysfs; Missing if it cannot be read.

    ENODEV means absent: the device was removed meanwhile.
    """
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("ascii")
    except UnicodeDecodeError:
        return UNPARSABLE
    except OSError as error:
        gone = error.errno == errno.ENODEV
        return Missing(Absence.ABSENT, errno.ENODEV) if gone else missing_from_error(error)


def _read_number(path: Path) -> Reading:
    text = read_sysfs_text(path)
    if isinstance(text, Missing):
        return text
    try:
        return int(text, 0)
    except ValueError:
        return UNPARSABLE


def _read_link_width(path: Path) -> Reading:
    """Read the width of a PCIe link [lanes]; Missing for a virtual function, which reports 0."""
    lanes = _read_number(path)
    if isinstance(lanes, int) and lanes not in LINK_WIDTHS:
        return UNPARSABLE if lanes else Missing(Absence.ABSENT)
    return lanes


def _read_aer_total(path: Path, name: str) -> Reading:
    text = read_sysfs_text(path)
    return text if isinstance(text, Missing) else parse_aer_total(text, name)


def parse_aer_total(text: str, name: str) -> Reading:
    """Return the count in the line `name` of an ``aer_dev_*`` file; Missing if there is no such line."""
    for line in text.splitlines():
        key, _, count = line.partition(" ")
        if key == name and count.isdecimal():
            return int(count)
    return UNPARSABLE


# --- network adapters --------------------------------------------------------------------------------------

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
        ports: tuple[NicPortSample, ...] | Missing = tuple(
            _read_port(sysfs_root / "class/net", device, number) for number in numbers
        )
    except OSError as error:
        ports = Missing(Absence.UNREADABLE, error.errno or 0)
    return NicSample(device.name, address, "" if isinstance(guid, Missing) else guid.strip(), ports)


def _read_port(interfaces: Path, device: Path, number: int) -> NicPortSample:
    """Read a port of a NIC. Raises as _read_deciding_text()."""
    port = device / "ports" / str(number)
    text = _read_deciding_text(port / "link_layer")
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


def _read_deciding_text(path: Path) -> str | Missing:
    """Read a file that decides which interface and bond a port of a NIC has.

    Raises OSError if this process lacks descriptors or memory: a port without its bond would count as failed.
    """
    text = read_sysfs_text(path)
    _raise_own_failure(text)
    return text


def _interface(port: Path, device: Path, number: int) -> str:
    """Return the network interface of a NIC's Ethernet port; empty: not found.

    It is the interface of the port's first GID, or else the interface with the port's number of the same PCI
    function. Raises as _read_deciding_text().
    """
    name = _read_deciding_text(port / "gid_attrs/ndevs/0")
    if isinstance(name, str) and name.strip():
        return os.path.basename(name.strip())
    try:
        names = sorted(os.listdir(device / "device/net"))
    except OSError as error:
        if error.errno in LACK_ERRNOS:
            raise
        return ""
    for found in names:
        dev_port = _read_deciding_text(device / "device/net" / found / "dev_port")
        if isinstance(dev_port, str) and dev_port.strip() == str(number - 1):
            return found
    return ""


def _is_interface_up(interface: Path) -> bool:
    """Return False if a network interface is set down; True if it is up, or cannot be read."""
    flags = _read_deciding_text(interface / "flags")
    try:
        return isinstance(flags, Missing) or bool(int(flags, 0) & _IFF_UP)
    except ValueError:
        return True


def _working_bond(interfaces: Path, name: str) -> str:
    try:
        master = os.path.basename(os.readlink(interfaces / name / "master"))
    except OSError as error:
        if error.errno in LACK_ERRNOS:
            raise
        return ""
    carrier = _read_deciding_text(interfaces / master / "carrier")
    works = isinstance(carrier, str) and carrier.strip() == "1"
    return master if works and (interfaces / master / "bonding").is_dir() else ""
