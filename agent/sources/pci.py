"""Reader of PCI functions from sysfs: NVIDIA's GPUs, and PCI functions that drivers declare.

libudev lists them with the model name of the hardware database. Without libudev, or with another sysfs root,
the bus is listed from sysfs. Call this from a thread that can be abandoned: reading a link's width wakes the
device and may hang. agent.sources.gpu_host counts the GPUs that NVML should see.
"""

import errno
import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Final

from agent.model.pci import PciSample
from agent.model.reading import Absence, Missing, Reading
from agent.sources.gpu_host import DISPLAY, NVIDIA, bus_sort_key, missing_for

SYSFS: Final = Path("/sys")
"""Root that libudev reads."""
WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})
"""Valid link widths. A removed device reports 63, a device with an unknown width reports 255."""
UNPARSABLE: Final = Missing(Absence.UNREADABLE, -1)
_ADDRESS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[01][0-9a-f]\.[0-7])")


def parse_address(text: str) -> str:
    """Convert a PCI address to the kernel's form: ``00000000:3B:00.0`` becomes ``0000:3b:00.0``.

    Raises:
        ValueError: The text is not a PCI address with a domain.
    """
    found = _ADDRESS.fullmatch(text.lower())
    if found is None:
        raise ValueError(f"{text!r} is not a PCI address, such as 0000:3b:00.0")
    return f"{int(found[1], 16):04x}:{found[2]}"


def read_pci(
    sysfs_root: Path, declared: Collection[str], *, udev: bool = True
) -> tuple[PciSample, ...] | Missing:
    """Read NVIDIA's GPUs and the `declared` PCI functions that are present, in bus order. May hang.

    GPUs passed to a virtual machine are included, virtual functions are not.

    Args:
        sysfs_root: Mount point of sysfs.
        declared: Addresses of PCI functions that drivers declare.
        udev: Whether to use libudev for model names; finding the library starts a process, once.

    Source: /sys/bus/pci/devices/*.
    """
    bus = sysfs_root / "bus/pci/devices"
    try:
        # libudev may list nothing in a container, so an empty answer is checked against sysfs
        names = (_list_by_udev(declared) if udev and sysfs_root == SYSFS else {}) or _list_by_sysfs(
            bus, declared
        )
    except OSError as error:
        return missing_for(error)
    samples = (_sample(bus / address, model) for address, model in names.items())
    return tuple(sorted(filter(None, samples), key=lambda sample: bus_sort_key(sample.address)))


# --- list of functions: address to model -------------------------------------------------------------------


@cache  # finding the library starts a process
def _udev() -> Any:
    """Return a context of libudev; None: libudev is not available. The import is late: it takes 0.8 MiB."""
    try:
        import pyudev

        return pyudev.Context()
    except (ImportError, OSError):
        return None


def _list_by_udev(declared: Collection[str]) -> dict[str, str]:
    if (context := _udev()) is None:
        return {}
    by_vendor = context.list_devices(subsystem="pci").match_attribute("vendor", f"{NVIDIA:#06x}")
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
    """List the PCI functions by sysfs, without model names."""
    return {
        address: ""
        for address in os.listdir(bus)
        if address in declared or (_number(bus / address / "vendor") == NVIDIA and _is_gpu(bus / address))
    }


def _is_gpu(device: Path) -> bool:
    """Return whether a device of NVIDIA is a GPU."""
    pci_class = _number(device / "class")
    is_display = isinstance(pci_class, int) and pci_class >> 8 in DISPLAY
    return is_display and not (device / "physfn").is_symlink()


# --- fields of a function ----------------------------------------------------------------------------------


def _sample(device: Path, model: str) -> PciSample | None:
    """Read a PCI function; None: the function was removed."""
    vendor = _number(device / "vendor")
    if isinstance(vendor, Missing) and not device.is_dir():
        return None
    return PciSample(
        address=device.name,
        vendor=_identity(vendor),
        device=_identity(_number(device / "device")),
        driver=_driver(device),
        model=model,
        width=_lanes(device / "current_link_width"),
        width_max=_lanes(device / "max_link_width"),
        aer_nonfatal=_total(device / "aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
        aer_fatal=_total(device / "aer_dev_fatal", "TOTAL_ERR_FATAL"),
        aer_correctable=_total(device / "aer_dev_correctable", "TOTAL_ERR_COR"),
        port=_port(device),
    )


def _driver(device: Path) -> str:
    try:
        return os.path.basename(os.readlink(device / "driver"))
    except OSError:
        return ""


def _port(device: Path) -> str:
    above = Path(os.path.realpath(device)).parent.name
    return above if _ADDRESS.fullmatch(above) else ""


def _identity(reading: Reading) -> int:
    return reading if isinstance(reading, int) else -1


def _text(path: Path) -> str | Missing:
    try:
        with path.open("rb") as file:
            return file.read(4096).decode("ascii")
    except UnicodeDecodeError:
        return UNPARSABLE
    except OSError as error:
        gone = error.errno == errno.ENODEV
        return Missing(Absence.ABSENT, errno.ENODEV) if gone else missing_for(error)


def _number(path: Path) -> Reading:
    text = _text(path)
    if isinstance(text, Missing):
        return text
    try:
        return int(text, 0)
    except ValueError:
        return UNPARSABLE


def _lanes(path: Path) -> Reading:
    """Read the width of a PCIe link; Missing for a virtual function, which reports 0."""
    lanes = _number(path)
    if isinstance(lanes, int) and lanes not in WIDTHS:
        return UNPARSABLE if lanes else Missing(Absence.ABSENT)
    return lanes


def _total(path: Path, name: str) -> Reading:
    text = _text(path)
    return text if isinstance(text, Missing) else parse_total(text, name)


def parse_total(text: str, name: str) -> Reading:
    """Return one total of an ``aer_dev_*`` file, which has a line per kind of error."""
    for line in text.splitlines():
        key, _, count = line.partition(" ")
        if key == name and count.isdecimal():
            return int(count)
    return UNPARSABLE
