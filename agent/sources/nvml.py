"""NVML sessions (from nvmlInit to nvmlShutdown) through pynvml, and the inventory of GPUs.

Only rarely read values come from here; the C core polls the others.

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
from agent.model.gpu import GpuAttributes, NvmlReturnCode

_SESSION_LOCK: Final = threading.Lock()  # pynvml keeps its library in a global


class NvmlFailure(NamedTuple):
    """Error that an NVML call returned instead of a value."""

    code: int
    """NVML return code of the failed call; 13: the library or pynvml lacks the function."""
    name: str
    """Name of the return code in words, ``driver not loaded``."""

    def __str__(self) -> str:
        return f"{self.name} ({self.code})"


class NvmlSession:
    """Open NVML session; a failed call returns an NvmlFailure and does not raise."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        """Module pynvml, from which callers take constants and structures."""
        self._names = {
            value: name.removeprefix("NVML_ERROR_").lower().replace("_", " ")
            for name, value in vars(binding).items()
            if name.startswith("NVML_ERROR_")
        }

    def failure_for(self, code: int) -> NvmlFailure:
        """Return an NvmlFailure for an NVML return code, with the code's name."""
        return NvmlFailure(code, self._names.get(code, "unknown code"))

    def call(self, function_name: str, *args: object) -> Any:
        """Call the pynvml function ``function_name``. Returns its result, or an :class:`NvmlFailure`."""
        pynvml_function = getattr(self.binding, function_name, None)
        if pynvml_function is None:
            return self.failure_for(NvmlReturnCode.FUNCTION_NOT_FOUND)
        try:
            return pynvml_function(*args)
        except self.binding.NVMLError as error:
            return self.failure_for(error.value)
        except UnicodeDecodeError:  # the driver returned an invalid text
            return self.failure_for(NvmlReturnCode.UNKNOWN)

    def list_gpu_handles(self) -> list[Any]:
        """Return a GPU handle, or a failure, for each GPU that NVML counts, in NVML's order.

        Raises:
            ProbeError: NVML cannot count the GPUs.
        """
        count = self.call("nvmlDeviceGetCount")
        if isinstance(count, NvmlFailure):
            raise ProbeError(f"NVML: GPUs cannot be counted: nvmlDeviceGetCount failed: {count}")
        return [self.call("nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def read_pci_address(self, handle: Any) -> str:
        """Return a GPU's PCI address as sysfs writes it, ``0000:3b:00.0``; empty if NVML fails."""
        pci = self.call("nvmlDeviceGetPciInfo", handle)
        return "" if isinstance(pci, NvmlFailure) else normalize_pci_address(_decode_text(pci.busId))


@contextmanager
def open_nvml_session(library: str) -> Iterator[NvmlSession]:
    """Load and initialize NVML while the context is open; shut it down and unload it at the end.

    Args:
        library: ``libnvidia-ml.so.1``, or a path.

    Raises:
        ProbeError: The library cannot be loaded or initialized, with NVML's code; or another session is open.
    """
    if not _SESSION_LOCK.acquire(blocking=False):
        raise ProbeError(f"NVML library {library}: not opened: an earlier call of NVML has not returned")
    try:
        with _loaded_library(library) as nvml:
            failure = nvml.call("nvmlInit")
            if isinstance(failure, NvmlFailure):
                raise ProbeError(f"NVML library {library}: nvmlInit failed: {failure}")
            try:
                yield nvml
            finally:
                nvml.call("nvmlShutdown")
    finally:
        _SESSION_LOCK.release()


@contextmanager
def _loaded_library(library: str) -> Iterator[NvmlSession]:
    import pynvml

    try:
        loaded = pynvml.CDLL(library)
    except OSError as error:
        raise ProbeError(f"NVML library cannot be loaded: {error}") from None
    pynvml.nvmlLib = loaded  # while this is unset, pynvml loads its own choice of library
    try:
        yield NvmlSession(pynvml)
    finally:
        # A library that stays loaded is the old driver's after an upgrade: the C core would get it again
        # and fail with a version mismatch until the agent is restarted.
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()
        _ctypes.dlclose(loaded._handle)


def normalize_pci_address(bus: str) -> str:
    """Convert NVML's ``00000000:3B:00.0`` to sysfs' ``0000:3b:00.0``; empty for an invalid address."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return ""


def _decode_text(text: bytes | str) -> str:
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text


_PROFILE: Final = re.compile(r"\bMIG ((?:\d+c\.)?\d+g\.\d+gb\S*)")


def read_gpu_inventory(library: str, sysfs_root: Path) -> tuple[GpuAttributes, ...]:
    """Read UUID, serial number, versions and MIG profiles (``1g.10gb``) of all GPUs, in order of NVML index.

    An attribute that a GPU does not support is empty. May hang in the driver: call it from a thread that can
    be abandoned.

    Args:
        library: ``libnvidia-ml.so.1``, or a path.
        sysfs_root: Mount point of sysfs.

    Raises:
        ProbeError: NVML cannot be loaded, initialized or count GPUs, or an NvmlSession is open.

    Source:
        nvmlDeviceGet{UUID,Serial,Name,VbiosVersion,Architecture,PciInfo}, nvmlSystemGetDriverVersion; sysfs
        ``numa_node``, because nvmlDeviceGetNumaNodeId returns the NUMA node of the GPU's own memory.
    """
    with open_nvml_session(library) as nvml:
        driver = _text_or_empty(nvml.call("nvmlSystemGetDriverVersion"))
        return tuple(_read_gpu(nvml, handle, driver, sysfs_root) for handle in nvml.list_gpu_handles())


def _read_gpu(nvml: NvmlSession, handle: Any, driver: str, sysfs_root: Path) -> GpuAttributes:
    if isinstance(handle, NvmlFailure):
        return GpuAttributes(uuid="", bus="", driver=driver)
    bus = nvml.read_pci_address(handle)
    return GpuAttributes(
        uuid=_text_or_empty(nvml.call("nvmlDeviceGetUUID", handle)),
        bus=bus,
        serial=_text_or_empty(nvml.call("nvmlDeviceGetSerial", handle)),
        product=_text_or_empty(nvml.call("nvmlDeviceGetName", handle)),
        driver=driver,
        vbios=_text_or_empty(nvml.call("nvmlDeviceGetVbiosVersion", handle)),
        architecture=_architecture_name(nvml, handle),
        numa_node=_read_numa_node(sysfs_root, bus),
        profiles=_read_profiles(nvml, handle),
    )


def _text_or_empty(answer: Any) -> str:
    return answer if isinstance(answer, str) else ""


def _architecture_name(nvml: NvmlSession, handle: Any) -> str:
    """Return the GPU's architecture, such as ``Hopper``; empty if pynvml has no name for it."""
    number = nvml.call("nvmlDeviceGetArchitecture", handle)
    prefix = "NVML_DEVICE_ARCH_"
    constants = vars(nvml.binding).items()
    names = [name for name, value in constants if name.startswith(prefix) and value == number]
    return names[0].removeprefix(prefix).capitalize() if names and names != [prefix + "UNKNOWN"] else ""


def _read_numa_node(sysfs_root: Path, bus: str) -> int | None:
    """Read the NUMA node of a PCI device; None: no NUMA, or the firmware reports none (-1)."""
    if not bus:
        return None
    try:
        node = int((sysfs_root / "bus/pci/devices" / bus / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_profiles(nvml: NvmlSession, handle: Any) -> tuple[tuple[str, str], ...]:
    """Read the UUID and the profile (such as ``1g.10gb``) of each MIG instance of a GPU."""
    most = nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle)
    instances = (
        nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        for index in range(0 if isinstance(most, NvmlFailure) else most)
    )
    return tuple(
        (uuid, parse_mig_profile(_text_or_empty(nvml.call("nvmlDeviceGetName", instance))))
        for instance in instances
        if not isinstance(instance, NvmlFailure)
        if (uuid := _text_or_empty(nvml.call("nvmlDeviceGetUUID", instance)))
    )


def parse_mig_profile(name: str) -> str:
    """Return the profile ``1g.10gb`` from NVML's name of a MIG instance; empty: the name has none.

    NVML's name is ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``.
    """
    found = _PROFILE.search(name)
    return found[1] if found else ""
