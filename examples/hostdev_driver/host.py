"""Devices of the host, found in sysfs once when the driver starts.

A device is a share of a NUMA node's hugepage pool, some of its CPUs, or a GPU. Names are stable over restarts
while the hardware is the same. Hardware that an earlier instance of the driver found stays offered, so that
its loss is a fault of the device (see hostdev_driver.saved_hardware). drahealth determines the health of the
devices.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Final, NamedTuple

import drahealth

NVIDIA: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"
_UNITS: Final = ("Ki", "Mi", "Gi", "Ti")


class Found(NamedTuple):
    """Device of the host with its device nodes."""

    device: drahealth.Device
    nodes: tuple[str, ...] = ()
    """Paths of the device nodes."""


class CpuPlace(NamedTuple):
    """Place of a CPU in the host; the kernel no longer reports it when the CPU is offline."""

    numa: int | None
    """NUMA node; None: the kernel has no NUMA."""
    core: int
    """Lowest CPU of the same physical core."""


class Pool(NamedTuple):
    """Hugepage pool of one page size on one NUMA node."""

    numa: int
    size_kib: int


class Hardware(NamedTuple):
    """Hardware that devices consist of."""

    pages: Mapping[Pool, int] = {}
    """Number of pages of each hugepage pool."""
    cpus: Mapping[int, CpuPlace] = {}
    """Places of the CPUs, by number."""
    gpus: Mapping[str, int] = {}
    """Numbers of the GPUs' device nodes, by PCI address."""


class Host:
    """Devices of the host at the start of the driver.

    Args:
        pool: Pool of all devices: the node's name.
        sysfs: Root of sysfs.
        procfs: Root of procfs, where the NVIDIA driver lists the device nodes of GPUs.
        shares: Number of devices per hugepage pool.
        cpus_each: Number of CPUs per device; 0: all CPUs of a NUMA node are one device.
        reserved: CPUs that are never offered.
        hardware: Hardware of the devices; None: what the host has now.
    """

    def __init__(
        self,
        pool: str,
        sysfs: Path = Path("/sys"),
        procfs: Path = Path("/proc"),
        *,
        shares: int = 1,
        cpus_each: int = 0,
        reserved: Set[int] = frozenset(),
        hardware: Hardware | None = None,
    ) -> None:
        self.pool = pool
        self._sysfs = sysfs
        hardware = hardware or find_hardware(sysfs, procfs)
        found = [
            *_hugepage_devices(pool, hardware.pages, shares),
            *_cpu_devices(pool, hardware.cpus, cpus_each, reserved),
            *_gpu_devices(pool, hardware.gpus),
        ]
        self.found = {part.device.name: part for part in found}

    @property
    def devices(self) -> list[drahealth.Device]:
        """Devices to publish and to monitor."""
        return [part.device for part in self.found.values()]

    def find(self, device: drahealth.ClaimDevice) -> Found:
        """Return the device that is allocated to a claim.

        Raises:
            PermanentError: ``device.unknown``: the claim was allocated from an outdated ResourceSlice.
        """
        if device.pool != self.pool or device.device not in self.found:
            raise drahealth.PermanentError(f"{device.ref} is not on this node", code="device.unknown")
        return self.found[device.device]

    def page_sizes(self) -> set[str]:
        """Return the sizes of offered hugepages."""
        parts = (part.device.part for part in self.found.values())
        return {part.size for part in parts if isinstance(part, drahealth.Hugepages)}

    def free_pages(self, size: str, numa: int) -> int:
        """Return the free pages of a pool.

        Raises:
            OSError: The count cannot be read.
        """
        with drahealth.doing(drahealth.Operation.DEVICE):
            return _number(self._pool_directory(size, numa) / "free_hugepages")

    def read_pool(self, size: str, numa: int) -> tuple[int, int]:
        """Return the pages in use and the free pages of a pool, which may change its size meanwhile.

        Raises:
            OSError: A count cannot be read.
        """
        with drahealth.doing(drahealth.Operation.DEVICE):
            directory = self._pool_directory(size, numa)
            before = _number(directory / "nr_hugepages")
            free = _number(directory / "free_hugepages")
            after = _number(directory / "nr_hugepages")
        # a page that the kernel removes from the pool meanwhile is neither free nor in use
        return max(min(before, after) - free, 0), free

    def _pool_directory(self, size: str, numa: int) -> Path:
        return _pools(self._sysfs).get(numa, self._sysfs) / f"hugepages-{parse_size_kib(size)}kB"


def find_hardware(sysfs: Path, procfs: Path) -> Hardware:
    """Return the hardware that the host has now."""
    pages = {
        Pool(numa, size_kib): _number(path / "nr_hugepages")
        for numa, directory in _pools(sysfs).items()
        for size_kib, path in _numbered(directory, r"hugepages-(\d+)kB").items()
    }
    return Hardware(pages, _find_cpus(sysfs), dict(_find_gpus(sysfs, procfs)))


# --- hugepages ---------------------------------------------------------------------------------------------


def _hugepage_devices(pool: str, pages_of: Mapping[Pool, int], shares: int) -> Iterator[Found]:
    for (numa, size_kib), all_pages in sorted(pages_of.items()):
        pages, size = all_pages // shares, format_size(size_kib)
        for share in range(shares if pages else 0):
            name = f"hugepages-{size.lower()}-node{numa}-{share}"
            yield Found(drahealth.Device(name, drahealth.Hugepages(size, pages=pages, numa=numa), pool=pool))


def _pools(sysfs: Path) -> dict[int, Path]:
    """Return the hugepage directory of each NUMA node; a kernel without NUMA has node 0 only."""
    nodes = _numbered(sysfs / "devices/system/node", r"node(\d+)")
    found = {numa: path / "hugepages" for numa, path in nodes.items() if (path / "hugepages").is_dir()}
    whole = sysfs / "kernel/mm/hugepages"
    return found or ({0: whole} if whole.is_dir() else {})


def format_size(size_kib: int) -> str:
    """Return a size as a Kubernetes quantity: ``2Mi``."""
    unit = 0
    while size_kib % 1024 == 0 and unit + 1 < len(_UNITS):
        size_kib, unit = size_kib // 1024, unit + 1
    return f"{size_kib}{_UNITS[unit]}"


def parse_size_kib(size: str) -> int:
    """Parse a Kubernetes quantity of a size [KiB].

    Raises:
        ValueError: The text is not a size.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,11})(Ki|Mi|Gi|Ti)", size)
    if found is None:
        raise ValueError(f"{size!r} is not a size; write a number and Ki, Mi, Gi or Ti, such as 2Mi")
    return int(found[1]) << 10 * _UNITS.index(found[2])


# --- CPUs --------------------------------------------------------------------------------------------------


def _find_cpus(sysfs: Path) -> dict[int, CpuPlace]:
    """Return the places of the CPUs that are online."""
    cpus = sysfs / "devices/system/cpu"
    online = parse_cpus(_text(cpus / "online"))
    nodes = _numbered(sysfs / "devices/system/node", r"node(\d+)")
    lists: dict[int | None, set[int]] = {
        numa: parse_cpus(_text(path / "cpulist")) for numa, path in nodes.items()
    }
    return {
        cpu: CpuPlace(numa, min(_siblings(cpus, cpu)))
        for numa, members in (lists or {None: online}).items()
        for cpu in members & online
    }


def _cpu_devices(pool: str, places: Mapping[int, CpuPlace], each: int, reserved: Set[int]) -> Iterator[Found]:
    usable = {cpu: place for cpu, place in places.items() if cpu not in reserved}
    for numa in sorted({place.numa for place in usable.values()}, key=lambda numa: numa or 0):
        members = [cpu for cpu, place in usable.items() if place.numa == numa]
        # sort CPUs by core, so that two devices share a core only if the numbers require it
        ordered = sorted(members, key=lambda cpu: (usable[cpu].core, cpu))
        step = each or len(ordered)
        for number, first in enumerate(range(0, len(ordered) - step + 1, step)):
            part = drahealth.Cpus(format_cpus(ordered[first : first + step]), numa=numa)
            yield Found(drahealth.Device(f"cpus-node{numa or 0}-{number}", part, pool=pool))


def _siblings(cpus: Path, cpu: int) -> set[int]:
    try:
        return parse_cpus(_text(cpus / f"cpu{cpu}/topology/thread_siblings_list")) | {cpu}
    except FileNotFoundError:
        return {cpu}


def parse_cpus(text: str) -> set[int]:
    """Parse CPUs in the kernel's list format, ``0-3,8``.

    Raises:
        ValueError: A part is neither a CPU number nor a range; names the part.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        found = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part!r} is not a CPU number or range")
        cpus |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cpus


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs in the kernel's list format."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1][1:] = [cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, span)) for span in ranges)


# --- GPUs --------------------------------------------------------------------------------------------------


def _gpu_devices(pool: str, gpus: Mapping[str, int]) -> Iterator[Found]:
    for address, minor in sorted(gpus.items()):
        nodes = (f"/dev/nvidia{minor}", "/dev/nvidiactl", "/dev/nvidia-uvm")
        yield Found(drahealth.Device(f"gpu-{minor}", drahealth.Gpu(pci=address), pool=pool), nodes)


def _find_gpus(sysfs: Path, procfs: Path) -> Iterator[tuple[str, int]]:
    """Find GPUs bound to the NVIDIA driver; a GPU passed to a virtual machine is not offered."""
    for information in sorted(procfs.glob("driver/nvidia/gpus/*/information")):
        address = information.parent.name
        function = sysfs / "bus/pci/devices" / address
        minor = re.search(r"^Device Minor:\s*([0-9]+)\s*$", _text(information), re.MULTILINE)
        if (
            minor
            and _text(function / "vendor") == NVIDIA
            and _text(function / "class").startswith(DISPLAY_CLASS)
        ):
            yield address, int(minor[1])


# --- files -------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    return path.read_text().strip()


def _number(path: Path) -> int:
    return int(_text(path))


def _numbered(directory: Path, pattern: str) -> dict[int, Path]:
    """Return entries of a directory by the number in their names; none without the directory."""
    if not directory.is_dir():
        return {}
    found = ((re.fullmatch(pattern, path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in found if match}
