"""What each GPU is: serial number, product, firmware, place in the machine. Through pynvml, for display.

Facts that no verdict hangs on, read when GPUs appear. Does not watch anything.
"""

import re
from pathlib import Path
from typing import Any, Final

from agent.model.gpu import GpuAttributes
from agent.sources.nvml import Nvml, Refusal, session

_PROFILE: Final = re.compile(r"\bMIG ((?:\d+c\.)?\d+g\.\d+gb\S*)")


def read_inventory(library: str, sysfs_root: Path) -> tuple[GpuAttributes, ...]:
    """The GPUs that NVML counts, in its order. Fields that one GPU refuses are empty, of that GPU only.

    May hang in the driver: call it from a thread that can be left behind.

    Args:
        library: ``libnvidia-ml.so.1``, or a path.
        sysfs_root: Where sysfs is mounted.

    Raises:
        ProbeError: There is no library, or it cannot be initialised, or does not count; NVML's code in words
            and as a number. Also while an earlier call has not returned.

    Source:
        nvmlDeviceGet{UUID,Serial,Name,VbiosVersion,Architecture,PciInfo}, nvmlSystemGetDriverVersion; sysfs
        ``numa_node``: nvmlDeviceGetNumaNodeId has the node of a GPU's own memory, where that is one.
    """
    with session(library) as nvml:
        driver = _text(nvml.ask("nvmlSystemGetDriverVersion"))
        return tuple(_read_gpu(nvml, handle, driver, sysfs_root) for handle in nvml.handles())


def _read_gpu(nvml: Nvml, handle: Any, driver: str, sysfs_root: Path) -> GpuAttributes:
    if isinstance(handle, Refusal):
        return GpuAttributes(uuid="", bus="", driver=driver)
    bus = nvml.bus_of(handle)
    return GpuAttributes(
        uuid=_text(nvml.ask("nvmlDeviceGetUUID", handle)),
        bus=bus,
        serial=_text(nvml.ask("nvmlDeviceGetSerial", handle)),
        product=_text(nvml.ask("nvmlDeviceGetName", handle)),
        driver=driver,
        vbios=_text(nvml.ask("nvmlDeviceGetVbiosVersion", handle)),
        architecture=_architecture(nvml, handle),
        numa_node=_read_numa_node(sysfs_root, bus),
        profiles=_read_profiles(nvml, handle),
    )


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else ""


def _architecture(nvml: Nvml, handle: Any) -> str:
    """``Hopper``; empty for one that pynvml has no name for."""
    number = nvml.ask("nvmlDeviceGetArchitecture", handle)
    prefix = "NVML_DEVICE_ARCH_"
    constants = vars(nvml.binding).items()
    names = [name for name, value in constants if name.startswith(prefix) and value == number]
    return names[0].removeprefix(prefix).capitalize() if names and names != [prefix + "UNKNOWN"] else ""


def _read_numa_node(sysfs_root: Path, bus: str) -> int | None:
    """None where the machine has no nodes, or the firmware did not say (-1)."""
    if not bus:
        return None
    try:
        node = int((sysfs_root / "bus/pci/devices" / bus / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_profiles(nvml: Nvml, handle: Any) -> tuple[tuple[str, str], ...]:
    """UUID and profile of each MIG instance."""
    most = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle)
    instances = (
        nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        for index in range(0 if isinstance(most, Refusal) else most)
    )
    return tuple(
        (uuid, parse_profile(_text(nvml.ask("nvmlDeviceGetName", instance))))
        for instance in instances
        if not isinstance(instance, Refusal)
        if (uuid := _text(nvml.ask("nvmlDeviceGetUUID", instance)))
    )


def parse_profile(name: str) -> str:
    """``1g.10gb`` of an instance's name, ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``; empty if it has none."""
    found = _PROFILE.search(name)
    return found[1] if found else ""
