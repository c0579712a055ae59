"""Readers of GPU facts that need no NVML: PCI bus, fabric manager, processes stuck in the GPU driver.

An unreadable fact is Missing, never False. A function that reads processes can hang with the GPU driver: call
it from a thread that can be abandoned.

The module also has the reader of the kubelet's, container runtimes' and agents' processes, for the command
``scan`` only; no health rule uses these processes.

Only ``scan`` imports psutil, which takes 1.2 MiB.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.errors import LACK_ERRNOS
from agent.model.gpu import GpuOsSample, StuckProcess
from agent.model.machine_samples import NVIDIA_DRIVER, PASSTHROUGH_DRIVER
from agent.model.reading import Absence, Missing
from agent.system.files import exists
from agent.system.process_stat import UNINTERRUPTIBLE, read_process_stat

if TYPE_CHECKING:
    import psutil


@contextmanager
def psutil_procfs_root(root: Path) -> Iterator[None]:
    """Make psutil read processes from the procfs at `root` while the context is open."""
    import psutil

    before = psutil.PROCFS_PATH
    if before == str(root):
        yield
        return
    psutil.PROCFS_PATH = str(root)
    psutil.process_iter.cache_clear()  # a pid names another process there
    try:
        yield
    finally:
        psutil.PROCFS_PATH = before
        psutil.process_iter.cache_clear()


RUNTIME_PROCESS_NAMES: Final = frozenset({"kubelet", "containerd", "crio", "dockerd"})
AGENT_PROCESS_NAME: Final = "drahealth"


class ProcessFacts(NamedTuple):
    """Identity and resource use of one process of the kubelet, a container runtime or an agent."""

    name: str
    """Role of the process: ``kubelet``, ``containerd``, ``crio``, ``dockerd``, or ``drahealth`` (an
    agent).
    """
    pid: int
    since_s: float
    """Start time of the process [s since 1970]."""
    cpu_s: float
    """User and system CPU time that the process has used [s]."""
    rss_bytes: int
    """Resident memory [bytes]."""
    threads: int


def process_role(name: str, cmdline: list[str]) -> str:
    """Return the role of a process: ``kubelet``, ``containerd``, ``crio``, ``dockerd`` or ``drahealth``.

    Empty: another process. An agent runs in an interpreter, so it is recognized by its arguments: ``drahealth
    run`` or ``python -m agent run``.
    """
    if name in RUNTIME_PROCESS_NAMES:
        return name
    args = [Path(arg).name for arg in cmdline[:5]]
    for command in ((AGENT_PROCESS_NAME, "run"), ("-m", "agent", "run")):
        if any(tuple(args[i : i + len(command)]) == command for i in range(3)):
            return AGENT_PROCESS_NAME
    return ""


def read_node_processes(procfs_root: Path) -> list[ProcessFacts]:
    """Read the processes of kubelet, container runtimes and agents, sorted by name; empty without procfs."""
    import psutil

    facts: list[ProcessFacts] = []
    with psutil_procfs_root(procfs_root):
        for process in _list_processes():
            try:
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                    name = process.name()
                    # only an interpreter or entry script can be an agent: no need to read other command lines
                    may_be_agent = name.startswith(("python", AGENT_PROCESS_NAME))
                    role = process_role(name, process.cmdline() if may_be_agent else [])
                    if role:
                        cpu = process.cpu_times()
                        facts.append(
                            ProcessFacts(
                                name=role,
                                pid=process.pid,
                                since_s=process.create_time(),
                                cpu_s=cpu.user + cpu.system,
                                rss_bytes=process.memory_info().rss,
                                threads=process.num_threads(),
                            )
                        )
            except psutil.Error:  # ended meanwhile, or no permission
                continue
    return sorted(facts)


def _list_processes() -> list["psutil.Process"]:
    import psutil

    try:
        return list(psutil.process_iter())
    except (OSError, IndexError):  # no procfs; psutil fails on a directory without processes
        return []


# --- GPU facts ---------------------------------------------------------------------------------------------

NVIDIA_VENDOR_ID: Final = 0x10DE
GPU_PCI_CLASSES: Final = frozenset({0x0300, 0x0302})
"""PCI class and subclass of GPUs: VGA controller, 3D controller."""
NVSWITCH_PCI_CLASS: Final = 0x0680
"""PCI class "other bridge"; an NVIDIA device of this class is an NVSwitch."""
FABRIC_MANAGER_PROCESS: Final = "nv-fabricmanager"[:15]  # the kernel cuts process names
STUCK_READS: Final = 3
"""Number of consecutive reads that must find a process asleep (uninterruptibly) for it to count as stuck."""


class NvidiaPciDevices(NamedTuple):
    """GPUs and NVSwitches that sysfs lists on the PCI bus."""

    gpus: tuple[str, ...]
    """PCI addresses of GPUs, in NVML's order."""
    bound: tuple[str, ...]
    """PCI addresses of the GPUs that are bound to the driver ``nvidia``, in NVML's order."""
    nvswitches: int
    """Number of NVSwitches on the PCI bus."""


class SleepingProcess(NamedTuple):
    """Process in uninterruptible sleep in the GPU driver, in one scan."""

    process: StuckProcess
    started_s: float
    """Start time [s since boot], which distinguishes a reused pid."""


class GpuProcessScan(NamedTuple):
    """Facts about GPUs in one scan of the process list: fabric manager and sleeping processes."""

    fabric_manager: bool
    """True: NVIDIA's fabric manager (nv-fabricmanager) runs."""
    sleeping: frozenset[SleepingProcess]


class GpuOsReader:
    """Reader of GPU facts without NVML; it counts how often each process slept in the GPU driver."""

    def __init__(self, sysfs_root: Path, procfs_root: Path) -> None:
        self._sysfs_root = sysfs_root
        self._procfs_root = procfs_root
        self._reads_asleep: dict[SleepingProcess, int] = {}

    def read(self) -> GpuOsSample:
        """Read GPUs on the bus, fabric manager, stuck processes and boot id; leave the inventory empty.

        ``fabric_manager`` is False only if NVSwitches require it and it does not run; Missing if it is not
        required or other processes are not visible.
        """
        bus = read_nvidia_devices(self._sysfs_root)
        processes = scan_gpu_processes(self._procfs_root)
        if isinstance(processes, GpuProcessScan):
            self._reads_asleep = {
                process: self._reads_asleep.get(process, 0) + 1 for process in processes.sleeping
            }
        elif processes.absence is Absence.ABSENT:
            self._reads_asleep = {}
        return GpuOsSample(
            bus_gpus=bus if isinstance(bus, Missing) else bus.gpus,
            bound_gpus=() if isinstance(bus, Missing) else bus.bound,
            fabric_manager=_fabric_manager_state(bus, processes),
            stuck=self._stuck_processes(processes),
            boot_id=read_boot_id(self._procfs_root),
        )

    def _stuck_processes(self, processes: GpuProcessScan | Missing) -> tuple[StuckProcess, ...] | Missing:
        if isinstance(processes, Missing) and processes.absence is not Absence.ABSENT:
            return processes
        try:
            if not can_inspect_processes(self._procfs_root):
                return Missing(Absence.ABSENT, errno.EPERM)
        except OSError as error:
            return missing_from_error(error)
        return tuple(
            sorted(asleep.process for asleep, reads in self._reads_asleep.items() if reads >= STUCK_READS)
        )


def can_inspect_processes(procfs_root: Path) -> bool:
    """Return whether this process may read kernel stack or open files of process 1, thus of all processes.

    Raises OSError if this process lacks descriptors or memory.
    """
    init = procfs_root / "1"
    for read in (lambda: (init / "stack").read_bytes(), lambda: os.listdir(init / "fd")):
        try:
            read()
        except OSError as error:
            if error.errno in LACK_ERRNOS:
                raise
            continue
        return True
    return False


def _fabric_manager_state(
    bus: NvidiaPciDevices | Missing, processes: GpuProcessScan | Missing
) -> bool | Missing:
    if isinstance(processes, Missing):
        return processes
    if processes.fabric_manager:
        return True
    if isinstance(bus, Missing):
        return bus
    return False if bus.nvswitches else Missing(Absence.ABSENT)


# --- the PCI bus -------------------------------------------------------------------------------------------


def read_nvidia_devices(sysfs_root: Path) -> NvidiaPciDevices | Missing:
    """List NVIDIA's GPUs and NVSwitches, without virtual functions and GPUs passed to a virtual machine.

    Source: /sys/bus/pci/devices/*/{vendor,class,driver,physfn}. Missing: the PCI bus cannot be read.
    """
    devices = sysfs_root / "bus/pci/devices"
    drivers: dict[str, str] = {}
    nvswitches = 0
    try:
        for address in os.listdir(devices):
            kind, physfn = _nvidia_pci_class(devices / address), devices / address / "physfn"
            if kind in GPU_PCI_CLASSES and not exists(physfn, follow_symlinks=False):
                driver = _bound_driver(devices / address)
                if driver != PASSTHROUGH_DRIVER:
                    drivers[address] = driver
            nvswitches += kind == NVSWITCH_PCI_CLASS
    except OSError as error:
        return missing_from_error(error)
    gpus = tuple(sorted(drivers, key=pci_address_sort_key))
    bound = tuple(address for address in gpus if drivers[address] == NVIDIA_DRIVER)
    return NvidiaPciDevices(gpus, bound, nvswitches)


def _nvidia_pci_class(device: Path) -> int:
    """Return PCI class and subclass of an NVIDIA device; 0: another vendor's device, or just removed."""
    try:
        if int((device / "vendor").read_text(), 16) != NVIDIA_VENDOR_ID:
            return 0
        return int((device / "class").read_text(), 16) >> 8
    except (FileNotFoundError, ValueError):
        return 0
    except OSError as error:
        if error.errno == errno.ENODEV:
            return 0
        raise


def _bound_driver(device: Path) -> str:
    """Return the name of the kernel driver that is bound to a PCI device; empty: none is bound."""
    try:
        return os.path.basename(os.readlink(device / "driver"))
    except FileNotFoundError:
        return ""


def pci_address_sort_key(address: str) -> tuple[int, str]:
    """Return the key that sorts PCI addresses by the number of their domain, which can exceed four digits."""
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


# --- the processes -----------------------------------------------------------------------------------------


def scan_gpu_processes(procfs_root: Path) -> GpuProcessScan | Missing:
    """Find the fabric manager and processes asleep in the GPU driver.

    Missing: procfs is unreadable, or shows only the processes of a container's own pid namespace.
    """
    try:
        # kthreadd has pid 2 only where all processes are visible; elsewhere absence means nothing
        if (procfs_root / "2/comm").read_text() != "kthreadd\n":
            return Missing(Absence.ABSENT)
        return _scan_processes(procfs_root)
    except OSError as error:
        return missing_from_error(error)


def _scan_processes(procfs_root: Path) -> GpuProcessScan:
    fabric_manager, sleeping = False, set()
    for pid in filter(str.isdecimal, os.listdir(procfs_root)):
        process = procfs_root / pid
        try:
            stat = read_process_stat(process)  # not the command line, which blocks for a stuck process
            if stat.state == UNINTERRUPTIBLE and is_in_gpu_driver(process):
                sleeping.add(SleepingProcess(StuckProcess(int(pid), stat.name), stat.started_s))
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            continue  # it has ended, or is hidden
        fabric_manager |= stat.name.startswith(FABRIC_MANAGER_PROCESS)
    return GpuProcessScan(fabric_manager, frozenset(sleeping))


def is_in_gpu_driver(process: Path) -> bool:
    """Return whether a sleeping process sleeps in NVIDIA's kernel module. ``process``: its procfs directory.

    The kernel stack names the module, but only root can read it. Without it, an open ``/dev/nvidia*`` file
    counts. Without permission for either, the result is False. Raises OSError if this process lacks
    descriptors or memory.
    """
    try:
        return "[nvidia" in (process / "stack").read_text()
    except OSError as error:
        if error.errno in LACK_ERRNOS:
            raise
    try:
        return any(target.startswith("/dev/nvidia") for target in _open_file_targets(process))
    except OSError as error:
        if error.errno in LACK_ERRNOS:
            raise
        return False


def _open_file_targets(process: Path) -> Iterator[str]:
    for descriptor in os.listdir(process / "fd"):
        try:
            yield os.readlink(process / "fd" / descriptor)
        except FileNotFoundError:  # closed meanwhile
            continue


def read_boot_id(procfs_root: Path) -> str:
    """Read the kernel's boot id, which differs after each boot; empty if unreadable."""
    try:
        return (procfs_root / "sys/kernel/random/boot_id").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def missing_from_error(error: OSError) -> Missing:
    """Return Missing for a failed read, with its errno.

    ABSENT if the file does not exist, else UNREADABLE.
    """
    absence = Absence.ABSENT if isinstance(error, FileNotFoundError) else Absence.UNREADABLE
    return Missing(absence, error.errno or 0)
