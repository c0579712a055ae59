"""PCI functions as sysfs shows them: NVIDIA's GPUs, and those that drivers declare.

libudev says which there are and what the hardware database calls them; without it, and where sysfs is not the
machine's own, a listing of the bus does. Read rarely, and in a thread that can be left behind: the width of a
link is asked of the device itself, which must be woken for that, and may hang.

Which GPUs are there for NVML to count is in agent.sources.gpu_host.
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
from agent.sources.gpu_host import DISPLAY, NVIDIA, in_bus_order, missing_for

SYSFS: Final = Path("/sys")
"""Where libudev looks, and nowhere else."""
WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})
"""Lanes that a link can have. A device that is gone says 63, one that does not know 255."""
UNINTELLIGIBLE: Final = Missing(Absence.UNREADABLE, -1)
_ADDRESS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[01][0-9a-f]\.[0-7])")


def parse_address(text: str) -> str:
    """A PCI address as the kernel writes it: ``0000:3b:00.0`` for ``00000000:3B:00.0``.

    Raises:
        ValueError: It is none; the domain is part of it.
    """
    found = _ADDRESS.fullmatch(text.lower())
    if found is None:
        raise ValueError(f"{text!r} is no PCI address, such as 0000:3b:00.0")
    return f"{int(found[1], 16):04x}:{found[2]}"


def read_pci(
    sysfs_root: Path, wanted: Collection[str], *, udev: bool = True
) -> tuple[PciSample, ...] | Missing:
    """NVIDIA's GPUs, those given to a virtual machine among them but no virtual functions, and the functions
    with ``wanted`` addresses; those that are on the bus, in its order. May hang.

    Args:
        udev: libudev is asked, which knows the models' names. To find it takes a process, once.

    Source: /sys/bus/pci/devices/*.
    """
    bus = sysfs_root / "bus/pci/devices"
    try:
        # an empty answer is doubted: libudev skips what it takes for no sysfs, as in some containers
        names = (_ask_udev(wanted) if udev and sysfs_root == SYSFS else {}) or _list(bus, wanted)
    except OSError as error:
        return missing_for(error)
    samples = (_sample(bus / address, model) for address, model in names.items())
    return tuple(sorted(filter(None, samples), key=lambda sample: in_bus_order(sample.address)))


# --- which there are: address to model ---------------------------------------------------------------------


@cache  # finding the library starts a process: once
def _udev() -> Any:
    """A context of libudev, or None. Imported when there is something to look for: it costs 0.8 MiB."""
    try:
        import pyudev

        return pyudev.Context()
    except (ImportError, OSError):
        return None


def _ask_udev(wanted: Collection[str]) -> dict[str, str]:
    if (context := _udev()) is None:
        return {}
    by_vendor = context.list_devices(subsystem="pci").match_attribute("vendor", f"{NVIDIA:#06x}")
    by_name = context.list_devices(subsystem="pci").match_sys_name("")  # nobody, or any of these
    for address in wanted:
        by_name.match_sys_name(address)
    try:
        found = [device for device in by_vendor if _is_gpu(Path(device.sys_path))]
        found += by_name
        return {one.sys_name: one.properties.get("ID_MODEL_FROM_DATABASE", "") for one in found}
    except (LookupError, OSError, UnicodeError):  # one went away meanwhile, or is called what nobody can read
        return {}


def _list(bus: Path, wanted: Collection[str]) -> dict[str, str]:
    """Likewise, by name only."""
    return {
        address: ""
        for address in os.listdir(bus)
        if address in wanted or (_number(bus / address / "vendor") == NVIDIA and _is_gpu(bus / address))
    }


def _is_gpu(device: Path) -> bool:
    """Of a device of NVIDIA's."""
    pci_class = _number(device / "class")
    is_display = isinstance(pci_class, int) and pci_class >> 8 in DISPLAY
    return is_display and not (device / "physfn").is_symlink()


# --- what is read of each ----------------------------------------------------------------------------------


def _sample(device: Path, model: str) -> PciSample | None:
    """None: it is gone."""
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
        return UNINTELLIGIBLE
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
        return UNINTELLIGIBLE


def _lanes(path: Path) -> Reading:
    """A link's width. A virtual function has no lanes of its own, and says 0."""
    lanes = _number(path)
    if isinstance(lanes, int) and lanes not in WIDTHS:
        return UNINTELLIGIBLE if lanes else Missing(Absence.ABSENT)
    return lanes


def _total(path: Path, name: str) -> Reading:
    text = _text(path)
    return text if isinstance(text, Missing) else parse_total(text, name)


def parse_total(text: str, name: str) -> Reading:
    """One total of an ``aer_dev_*`` file, which counts every kind of error in a line of its own."""
    for line in text.splitlines():
        word, _, count = line.partition(" ")
        if word == name and count.isdecimal():
            return int(count)
    return UNINTELLIGIBLE
