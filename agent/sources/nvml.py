"""NVML sessions through pynvml, and the inventory of GPUs. Cold path: the native core watches GPUs.

One session is open at a time, with the configured library, which is unloaded afterwards. Any call may hang in
the driver, so callers use a thread that they can abandon. pynvml is imported by the first session: it takes
80 ms and 2 MiB, and most nodes have no GPU.
"""

import _ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.errors import ProbeError
from agent.model.gpu import GpuAttributes, NvmlStatus

_SESSION_LOCK: Final = threading.Lock()  # pynvml keeps its library in a global


class NvmlFailure(NamedTuple):
    """Error that NVML returned instead of a value."""

    code: int
    """Return code of NVML, or 13 if the library or pynvml lacks the function."""
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.code})"


class Nvml:
    """Open NVML session; a failed call returns an NvmlFailure and does not raise."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        """Module pynvml, for its constants and structures."""
        self._names = {
            value: name.removeprefix("NVML_ERROR_").lower().replace("_", " ")
            for name, value in vars(binding).items()
            if name.startswith("NVML_ERROR_")
        }

    def error_of(self, code: int) -> NvmlFailure:
        """Return the failure for an NVML return code, with the code's name."""
        return NvmlFailure(code, self._names.get(code, "unknown code"))

    def call(self, function: str, *args: object) -> Any:
        """Call a function of pynvml. Returns its result, or an :class:`NvmlFailure`."""
        pynvml_function = getattr(self.binding, function, None)
        if pynvml_function is None:
            return self.error_of(NvmlStatus.FUNCTION_NOT_FOUND)
        try:
            return pynvml_function(*args)
        except self.binding.NVMLError as error:
            return self.error_of(error.value)
        except UnicodeDecodeError:  # the driver returned an invalid text
            return self.error_of(NvmlStatus.UNKNOWN)

    def handles(self) -> list[Any]:
        """Return a handle or a failure for each GPU that NVML counts, in NVML's order.

        Raises:
            ProbeError: NVML cannot count the GPUs.
        """
        count = self.call("nvmlDeviceGetCount")
        if isinstance(count, NvmlFailure):
            raise ProbeError(f"nvmlDeviceGetCount: {count}")
        return [self.call("nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def bus_of(self, handle: Any) -> str:
        """Return the PCI address as sysfs writes it, ``0000:3b:00.0``; empty if NVML fails."""
        pci = self.call("nvmlDeviceGetPciInfo", handle)
        return "" if isinstance(pci, NvmlFailure) else normal_bus(_decoded(pci.busId))


@contextmanager
def session(library: str) -> Iterator[Nvml]:
    """Open an NVML session: initialise NVML, and shut it down afterwards.

    Args:
        library: A name for the dynamic linker, or a path.

    Raises:
        ProbeError: The library cannot be loaded or initialised, with NVML's code; or another session is open.
    """
    if not _SESSION_LOCK.acquire(blocking=False):
        raise ProbeError(f"{library}: an earlier call of NVML has not returned")
    try:
        with _loaded(library) as nvml:
            failure = nvml.call("nvmlInit")
            if isinstance(failure, NvmlFailure):
                raise ProbeError(f"{library}: nvmlInit: {failure}")
            try:
                yield nvml
            finally:
                nvml.call("nvmlShutdown")
    finally:
        _SESSION_LOCK.release()


@contextmanager
def _loaded(library: str) -> Iterator[Nvml]:
    import pynvml

    loaded = _load(pynvml, library)
    pynvml.nvmlLib = loaded  # while this is unset, pynvml loads its own choice of library
    try:
        yield Nvml(pynvml)
    finally:
        # A library that stays loaded is the old driver's after an upgrade: the native core would get it again
        # and fail with a version mismatch until the agent is restarted.
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()
        _ctypes.dlclose(loaded._handle)


def _load(binding: Any, library: str) -> Any:
    try:
        return binding.CDLL(library)
    except OSError as error:
        raise ProbeError(str(error)) from None


def normal_bus(bus: str) -> str:
    """Convert NVML's PCI address, with eight digits of domain and capitals, to the kernel's form."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return ""


def _decoded(text: bytes | str) -> str:
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text


_PROFILE: Final = re.compile(r"\bMIG ((?:\d+c\.)?\d+g\.\d+gb\S*)")


def read_inventory(library: str, sysfs_root: Path) -> tuple[GpuAttributes, ...]:
    """Read the attributes of the GPUs that NVML counts, in NVML's order. A field that a GPU does not support
    is empty.

    May hang in the driver: call it from a thread that can be abandoned.

    Args:
        library: ``libnvidia-ml.so.1``, or a path.
        sysfs_root: Mount point of sysfs.

    Raises:
        ProbeError: NVML cannot be loaded, initialised or count GPUs, with its code; or another session is
            open.

    Source:
        nvmlDeviceGet{UUID,Serial,Name,VbiosVersion,Architecture,PciInfo}, nvmlSystemGetDriverVersion; sysfs
        ``numa_node``, because nvmlDeviceGetNumaNodeId returns the NUMA node of the GPU's own memory.
    """
    with session(library) as nvml:
        driver = _text(nvml.call("nvmlSystemGetDriverVersion"))
        return tuple(_read_gpu(nvml, handle, driver, sysfs_root) for handle in nvml.handles())


def _read_gpu(nvml: Nvml, handle: Any, driver: str, sysfs_root: Path) -> GpuAttributes:
    if isinstance(handle, NvmlFailure):
        return GpuAttributes(uuid="", bus="", driver=driver)
    bus = nvml.bus_of(handle)
    return GpuAttributes(
        uuid=_text(nvml.call("nvmlDeviceGetUUID", handle)),
        bus=bus,
        serial=_text(nvml.call("nvmlDeviceGetSerial", handle)),
        product=_text(nvml.call("nvmlDeviceGetName", handle)),
        driver=driver,
        vbios=_text(nvml.call("nvmlDeviceGetVbiosVersion", handle)),
        architecture=_architecture(nvml, handle),
        numa_node=_read_numa_node(sysfs_root, bus),
        profiles=_read_profiles(nvml, handle),
    )


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else ""


def _architecture(nvml: Nvml, handle: Any) -> str:
    """Return the GPU's architecture, such as ``Hopper``; empty if pynvml has no name for it."""
    number = nvml.call("nvmlDeviceGetArchitecture", handle)
    prefix = "NVML_DEVICE_ARCH_"
    constants = vars(nvml.binding).items()
    names = [name for name, value in constants if name.startswith(prefix) and value == number]
    return names[0].removeprefix(prefix).capitalize() if names and names != [prefix + "UNKNOWN"] else ""


def _read_numa_node(sysfs_root: Path, bus: str) -> int | None:
    """Read the NUMA node of a PCI device; None without NUMA, or if the firmware does not report the node
    (-1)."""
    if not bus:
        return None
    try:
        node = int((sysfs_root / "bus/pci/devices" / bus / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_profiles(nvml: Nvml, handle: Any) -> tuple[tuple[str, str], ...]:
    """Read UUID and profile of each MIG instance."""
    most = nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle)
    instances = (
        nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        for index in range(0 if isinstance(most, NvmlFailure) else most)
    )
    return tuple(
        (uuid, parse_profile(_text(nvml.call("nvmlDeviceGetName", instance))))
        for instance in instances
        if not isinstance(instance, NvmlFailure)
        if (uuid := _text(nvml.call("nvmlDeviceGetUUID", instance)))
    )


def parse_profile(name: str) -> str:
    """Return the profile in a MIG instance's name: ``1g.10gb`` of ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``; else
    empty."""
    found = _PROFILE.search(name)
    return found[1] if found else ""
