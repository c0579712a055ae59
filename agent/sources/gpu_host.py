"""Facts about GPUs that need no NVML: PCI bus, fabric manager, processes stuck in the driver.

An unreadable fact is Missing, never False. Reading processes can hang with the driver: call it from a thread
that can be abandoned.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from agent.model.gpu import GpuHost, StuckProcess
from agent.model.pci import GIVEN_AWAY
from agent.model.reading import Absence, Missing
from agent.sources.processes import procfs

NVIDIA: Final = 0x10DE
DISPLAY: Final = frozenset({0x0300, 0x0302})
"""PCI classes of GPUs: VGA controller, 3D controller."""
NVSWITCH: Final = 0x0680
"""PCI class "other bridge"; an NVIDIA device of this class is an NVSwitch."""
FABRIC_MANAGER: Final = "nv-fabricmanager"[:15]  # the kernel cuts process names
STUCK_READS: Final = 3
"""Consecutive reads in uninterruptible sleep from which a process is stuck, and not just waiting for a
disk."""


class PciBus(NamedTuple):
    """NVIDIA's devices on the PCI bus."""

    gpus: tuple[str, ...]
    """PCI addresses of GPUs, in NVML's order."""
    nvswitches: int


class SleepingProcess(NamedTuple):
    """Process in uninterruptible sleep in the GPU driver. The start time distinguishes a reused pid."""

    process: StuckProcess
    started_s: float


class ProcessScan(NamedTuple):
    """Result of one scan of the process list."""

    fabric_manager: bool
    sleeping: frozenset[SleepingProcess]


class GpuHostReader:
    """Reader of GPU facts; counts for how many consecutive reads each process has been asleep in the GPU
    driver."""

    def __init__(self, sysfs_root: Path, procfs_root: Path) -> None:
        self._sysfs_root = sysfs_root
        self._procfs_root = procfs_root
        self._reads_asleep: dict[SleepingProcess, int] = {}

    def read(self) -> GpuHost:
        """Read the GPU facts of the host, without the inventory.

        ``fabric_manager`` is False only where it is required and does not run. On a machine without
        NVSwitches, or where only this container's processes are visible, it is Missing unless it runs.
        """
        bus = read_bus(self._sysfs_root)
        processes = read_processes(self._procfs_root)
        if isinstance(processes, Missing):
            self._reads_asleep = {}
        else:
            self._reads_asleep = {
                process: self._reads_asleep.get(process, 0) + 1 for process in processes.sleeping
            }
        return GpuHost(
            bus_gpus=bus if isinstance(bus, Missing) else bus.gpus,
            fabric_manager=_fabric_manager(bus, processes),
            stuck=self._stuck(),
            boot_id=read_boot_id(self._procfs_root),
        )

    def _stuck(self) -> tuple[StuckProcess, ...] | Missing:
        if not can_inspect_processes(self._procfs_root):
            return Missing(Absence.ABSENT, errno.EPERM)
        return tuple(
            sorted(asleep.process for asleep, reads in self._reads_asleep.items() if reads >= STUCK_READS)
        )


def can_inspect_processes(procfs_root: Path) -> bool:
    """Return whether this process may read the kernel stack or open files of process 1, thus of all
    processes."""
    init = procfs_root / "1"
    for read in (lambda: (init / "stack").read_bytes(), lambda: os.listdir(init / "fd")):
        try:
            read()
        except OSError:
            continue
        return True
    return False


def _fabric_manager(bus: PciBus | Missing, processes: ProcessScan | Missing) -> bool | Missing:
    if isinstance(processes, Missing):
        return processes
    if processes.fabric_manager:
        return True
    if isinstance(bus, Missing):
        return bus
    return False if bus.nvswitches else Missing(Absence.ABSENT)


# --- the PCI bus -------------------------------------------------------------------------------------------


def read_bus(sysfs_root: Path) -> PciBus | Missing:
    """Read NVIDIA's GPUs and NVSwitches, without virtual functions and devices passed to a virtual machine.

    Source: /sys/bus/pci/devices/*/{vendor,class,driver,physfn}.
    """
    devices = sysfs_root / "bus/pci/devices"
    gpus, nvswitches = [], 0
    try:
        for address in os.listdir(devices):
            kind = _class_of_nvidia(devices / address)
            if kind in DISPLAY and not _is_passed_through(devices / address):
                gpus.append(address)
            nvswitches += kind == NVSWITCH
    except OSError as error:
        return missing_for(error)
    return PciBus(tuple(sorted(gpus, key=bus_sort_key)), nvswitches)


def _class_of_nvidia(device: Path) -> int:
    """Return PCI class and subclass of an NVIDIA device; 0 for another vendor's device, or one just
    removed."""
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


def _is_passed_through(device: Path) -> bool:
    if (device / "physfn").is_symlink():
        return True
    try:
        return os.path.basename(os.readlink(device / "driver")) == GIVEN_AWAY
    except FileNotFoundError:  # no driver is bound
        return False


def bus_sort_key(address: str) -> tuple[int, str]:
    """Return the sort key of a PCI address: domains can have more than four digits."""
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


# --- the processes -----------------------------------------------------------------------------------------


def read_processes(procfs_root: Path) -> ProcessScan | Missing:
    """Scan for the fabric manager and for processes asleep in the GPU driver; Missing in a container's own
    pid namespace."""
    try:
        # kthreadd has pid 2 only where all processes are visible; elsewhere absence means nothing
        if (procfs_root / "2/comm").read_text() != "kthreadd\n":
            return Missing(Absence.ABSENT)
        with procfs(procfs_root):
            return _scan_processes(procfs_root)
    except OSError as error:
        return missing_for(error)


def _scan_processes(procfs_root: Path) -> ProcessScan:
    import psutil  # late import: see agent.sources.processes

    fabric_manager, sleeping = False, set()
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                if process.status() == psutil.STATUS_DISK_SLEEP:
                    # not name(): it reads the command line, which blocks for a stuck process
                    name = (procfs_root / str(process.pid) / "comm").read_text().rstrip("\n")
                    if is_in_driver(procfs_root / str(process.pid)):
                        sleeping.add(SleepingProcess(StuckProcess(process.pid, name), process.create_time()))
                else:
                    name = process.name()
                fabric_manager |= name.startswith(FABRIC_MANAGER)
        except (psutil.Error, FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    return ProcessScan(fabric_manager, frozenset(sleeping))


def is_in_driver(process: Path) -> bool:
    """Return whether a sleeping process sleeps in NVIDIA's driver.

    The kernel stack names the module, but only root can read it. Without it, an open device file of the
    driver counts. Without permission for either, the result is False.
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
    """Read the boot id, which differs after each boot; empty if unreadable."""
    try:
        return (procfs_root / "sys/kernel/random/boot_id").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def missing_for(error: OSError) -> Missing:
    """Convert an OSError to Missing."""
    absence = Absence.ABSENT if isinstance(error, FileNotFoundError) else Absence.UNREADABLE
    return Missing(absence, error.errno or 0)
