"""NVML as pynvml speaks it: one session at a time, with the library that was named, let go of afterwards.

Cold path, for the inventory and the cross-check; what is watched is the native core's. Any call may hang in
the driver, so callers use a thread that they can leave behind. pynvml is imported when a session is opened:
it costs 80 ms and 2 MiB, and most nodes have no GPU.
"""

import _ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from agent.errors import ProbeError
from agent.model.gpu import Status

_ONE: Final = threading.Lock()  # pynvml keeps its library in a global


class Refusal(NamedTuple):
    """What NVML answered instead of a value."""

    code: int
    """Its return code, or 13 where the library or pynvml has no such function."""
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.code})"


class Nvml:
    """A session: what is asked for is answered or refused, never raised."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        """The module pynvml, for its constants and structures."""
        self._names = {
            value: name.removeprefix("NVML_ERROR_").lower().replace("_", " ")
            for name, value in vars(binding).items()
            if name.startswith("NVML_ERROR_")
        }

    def refusal(self, code: int) -> Refusal:
        """A return code and its name in words."""
        return Refusal(code, self._names.get(code, "unknown code"))

    def ask(self, function: str, *args: object) -> Any:
        """The answer of one of pynvml's functions, or the :class:`Refusal`."""
        call = getattr(self.binding, function, None)
        if call is None:
            return self.refusal(Status.FUNCTION_NOT_FOUND)
        try:
            return call(*args)
        except self.binding.NVMLError as error:
            return self.refusal(error.value)
        except UnicodeDecodeError:  # a text of the driver that is none
            return self.refusal(Status.UNKNOWN)

    def handles(self) -> list[Any]:
        """A handle, or the refusal, for each GPU that is counted, in NVML's order.

        Raises:
            ProbeError: NVML does not count.
        """
        count = self.ask("nvmlDeviceGetCount")
        if isinstance(count, Refusal):
            raise ProbeError(f"nvmlDeviceGetCount: {count}")
        return [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def bus_of(self, handle: Any) -> str:
        """The PCI address as sysfs writes it, ``0000:3b:00.0``; empty if it is refused."""
        pci = self.ask("nvmlDeviceGetPciInfo", handle)
        return "" if isinstance(pci, Refusal) else normal_bus(_decoded(pci.busId))


@contextmanager
def session(library: str) -> Iterator[Nvml]:
    """NVML initialised, and shut down afterwards.

    Args:
        library: A name for the dynamic linker, or a path.

    Raises:
        ProbeError: It cannot be loaded or initialised, with NVML's code; or an earlier session has not ended.
    """
    if not _ONE.acquire(blocking=False):
        raise ProbeError(f"{library}: an earlier call of NVML has not returned")
    try:
        with _loaded(library) as nvml:
            refused = nvml.ask("nvmlInit")
            if isinstance(refused, Refusal):
                raise ProbeError(f"{library}: nvmlInit: {refused}")
            try:
                yield nvml
            finally:
                nvml.ask("nvmlShutdown")
    finally:
        _ONE.release()


@contextmanager
def _loaded(library: str) -> Iterator[Nvml]:
    import pynvml

    loaded = _load(pynvml, library)
    pynvml.nvmlLib = loaded  # while it is unset, pynvml loads what it has in mind itself
    try:
        yield Nvml(pynvml)
    finally:
        # Whoever keeps the library keeps the old driver's when a new one is installed: the native core would
        # be given it again, and be told of a mismatch until the agent is restarted.
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()
        _ctypes.dlclose(loaded._handle)


def _load(binding: Any, library: str) -> Any:
    try:
        return binding.CDLL(library)
    except OSError as error:
        raise ProbeError(str(error)) from None


def normal_bus(bus: str) -> str:
    """A PCI address as the kernel writes it: NVML's domain has eight digits, and capitals."""
    domain, _, rest = bus.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return ""


def _decoded(text: bytes | str) -> str:
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text
