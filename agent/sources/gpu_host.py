"""What the machine says of its GPUs without NVML: PCI bus, fabric manager, processes held in the driver.

Facts, read rarely, for rules to judge. What cannot be read is Missing, never "no". Reading processes can hang
where the driver does: call it from a thread that can be left behind.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from agent.model.gpu import GpuHost, StuckProcess
from agent.model.pci import GIVEN_AWAY
from agent.model.reading import Absence, Missing
from agent.sources.procfs import procfs

NVIDIA: Final = 0x10DE
DISPLAY: Final = frozenset({0x0300, 0x0302})
"""PCI classes of GPUs: VGA controller, 3D controller."""
NVSWITCH: Final = 0x0680
"""PCI class of other bridges. Of NVIDIA's: an NVSwitch."""
FABRIC_MANAGER: Final = "nv-fabricmanager"[:15]  # the kernel keeps no more of a name
LOOKS: Final = 3
"""A process in uninterruptible sleep in so many looks in a row is stuck: one that waits for a disk is not."""


class PciBus(NamedTuple):
    """NVIDIA's devices on the PCI bus."""

    gpus: tuple[str, ...]
    """Addresses in order, which is NVML's."""
    nvswitches: int


class Waiting(NamedTuple):
    """A process in uninterruptible sleep in the driver. A pid that is used again starts at another time."""

    process: StuckProcess
    started_s: float


class Processes(NamedTuple):
    """What the process list said."""

    fabric_manager: bool
    waiting: frozenset[Waiting]


class GpuHostReader:
    """Looks at the host again and again; remembers how long processes have been waiting."""

    def __init__(self, sysfs_root: Path, procfs_root: Path) -> None:
        self._sysfs_root = sysfs_root
        self._procfs_root = procfs_root
        self._looks: dict[Waiting, int] = {}

    def read(self) -> GpuHost:
        """The host now, without the inventory.

        ``fabric_manager`` is False only where it is needed and does not run: on a machine without NVSwitches,
        or where only this container's processes are seen, it is absent, unless it runs all the same.
        """
        bus = read_bus(self._sysfs_root)
        processes = read_processes(self._procfs_root)
        if isinstance(processes, Missing):
            self._looks = {}
        else:
            self._looks = {one: self._looks.get(one, 0) + 1 for one in processes.waiting}
        return GpuHost(
            bus_gpus=bus if isinstance(bus, Missing) else bus.gpus,
            fabric_manager=_fabric_manager(bus, processes),
            stuck=self._stuck(),
            boot_id=read_boot_id(self._procfs_root),
        )

    def _stuck(self) -> tuple[StuckProcess, ...] | Missing:
        if not may_look_into_processes(self._procfs_root):
            return Missing(Absence.ABSENT, errno.EPERM)
        return tuple(sorted(one.process for one, looks in self._looks.items() if looks >= LOOKS))


def may_look_into_processes(procfs_root: Path) -> bool:
    """Whether this process may ask what another one sleeps in; the first process stands for all of them."""
    init = procfs_root / "1"
    for read in (lambda: (init / "stack").read_bytes(), lambda: os.listdir(init / "fd")):
        try:
            read()
        except OSError:
            continue
        return True
    return False


def _fabric_manager(bus: PciBus | Missing, processes: Processes | Missing) -> bool | Missing:
    if isinstance(processes, Missing):
        return processes
    if processes.fabric_manager:
        return True
    if isinstance(bus, Missing):
        return bus
    return False if bus.nvswitches else Missing(Absence.ABSENT)


# --- the PCI bus -------------------------------------------------------------------------------------------


def read_bus(sysfs_root: Path) -> PciBus | Missing:
    """NVIDIA's GPUs and NVSwitches; virtual functions and devices given to a virtual machine do not count.

    Source: /sys/bus/pci/devices/*/{vendor,class,driver,physfn}.
    """
    devices = sysfs_root / "bus/pci/devices"
    gpus, nvswitches = [], 0
    try:
        for address in os.listdir(devices):
            kind = _class_of_nvidia(devices / address)
            if kind in DISPLAY and not _is_given_away(devices / address):
                gpus.append(address)
            nvswitches += kind == NVSWITCH
    except OSError as error:
        return missing_for(error)
    return PciBus(tuple(sorted(gpus, key=in_bus_order)), nvswitches)


def _class_of_nvidia(device: Path) -> int:
    """Class and subclass; 0 of another vendor's device, and of one that went away meanwhile."""
    try:
        if int((device / "vendor").read_text(), 16) != NVIDIA:
            return 0
        return int((device / "class").read_text(), 16) >> 8
    except (FileNotFoundError, ValueError):
        return 0
    except OSError as error:
        if error.errno == errno.ENODEV:
            return 0
        raise


def _is_given_away(device: Path) -> bool:
    if (device / "physfn").is_symlink():
        return True
    try:
        return os.path.basename(os.readlink(device / "driver")) == GIVEN_AWAY
    except FileNotFoundError:  # no driver at all
        return False


def in_bus_order(address: str) -> tuple[int, str]:
    """A key to sort addresses by: domains can have more than four digits."""
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


# --- the processes -----------------------------------------------------------------------------------------


def read_processes(procfs_root: Path) -> Processes | Missing:
    """Whether the fabric manager runs, and who waits in the driver; Missing in a container of its own."""
    try:
        # Process 2 is the kernel's own where all processes are seen: only there does absence mean anything.
        if (procfs_root / "2/comm").read_text() != "kthreadd\n":
            return Missing(Absence.ABSENT)
        with procfs(procfs_root):
            return _look_at_all(procfs_root)
    except OSError as error:
        return missing_for(error)


def _look_at_all(procfs_root: Path) -> Processes:
    import psutil  # here, and not above: see agent.sources.procfs

    fabric_manager, waiting = False, set()
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                if process.status() == psutil.STATUS_DISK_SLEEP:
                    # not name(): it reads the command line, for which a stuck process can let us wait
                    name = (procfs_root / str(process.pid) / "comm").read_text().rstrip("\n")
                    if is_in_driver(procfs_root / str(process.pid)):
                        waiting.add(Waiting(StuckProcess(process.pid, name), process.create_time()))
                else:
                    name = process.name()
                fabric_manager |= name.startswith(FABRIC_MANAGER)
        except (psutil.Error, FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    return Processes(fabric_manager, frozenset(waiting))


def is_in_driver(process: Path) -> bool:
    """Whether a sleeping process sleeps in NVIDIA's driver.

    The kernel's stack names the module. It is root's to read; everybody else takes a process that has one of
    the driver's devices open for one that waits there. What may not be read at all is not accused.
    """
    try:
        return "[nvidia" in (process / "stack").read_text()
    except OSError:
        pass
    try:
        return any(target.startswith("/dev/nvidia") for target in _open_files(process))
    except OSError:
        return False


def _open_files(process: Path) -> Iterator[str]:
    for descriptor in os.listdir(process / "fd"):
        try:
            yield os.readlink(process / "fd" / descriptor)
        except FileNotFoundError:  # closed meanwhile
            continue


def read_boot_id(procfs_root: Path) -> str:
    """Another one after each boot; empty if it cannot be read."""
    try:
        return (procfs_root / "sys/kernel/random/boot_id").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def missing_for(error: OSError) -> Missing:
    """Why a reading is not there."""
    absence = Absence.ABSENT if isinstance(error, FileNotFoundError) else Absence.UNREADABLE
    return Missing(absence, error.errno or 0)
