"""GPU watch: the C core's threads that call NVML, and the newest values that they read.

A process whose threads did not stop (:meth:`GpuWatch.stop`) has threads in the GPU driver and should end with
:func:`os._exit`.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.errors import ConfigError, ProbeError
from agent.model.gpu import GpuField, GpuWakeCondition, NvmlCallCost, NvmlCosts, NvmlSample
from agent.model.reading import PassDurations, return_code_text
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.gpu_records import GpuRecordDecoder, call_name
from agent.native.published_tables import CoreThread, PublicationReader, UnchangedBytesCache, pass_durations

_FIELDS: Final = {field: getattr(lib, f"DH_GPU_{field.name}") for field in GpuField}


@dataclass(frozen=True, slots=True)
class GpuWatchOptions:
    """Options of a GPU watch: NVML library, periods, deadlines, and value changes that wake the reader."""

    library: str = "libnvidia-ml.so.1"
    """Name or path of the NVML library; a missing library is no error."""
    sysfs_root: Path = Path("/sys")
    period_ns: int = NS
    """Time between two passes that read a GPU [ns]: 10 ms to 1 h."""
    slow_ns: int = 10 * NS
    """Time between two reads of values that change rarely or are expensive [ns]; at least `period_ns`."""
    deadline_ns: int = 5 * NS
    """Duration after which an NVML call is overdue [ns]: 10 ms to 10 min."""
    open_deadline_ns: int = 30 * NS
    """Duration after which an NVML call that initializes the GPU driver is overdue [ns]."""
    retry_ns: int = 10 * NS
    """Time between two checks of the library, driver version and number of GPUs [ns]: 100 ms to 1 h."""
    cpu_budget_ns: int = 0
    """CPU time per second of all passes [ns]; 0: no limit. Passes are delayed, by up to 10 s, to keep within
    it."""
    wakes: Sequence[GpuWakeCondition] = ()


class GpuWatch(CoreThread[NvmlSample]):
    """Watch of all GPUs: the C core's threads that call NVML, and the newest values that they read.

    No method waits for NVML, except :meth:`stop` for a time.

    Args:
        options: Library, periods, deadlines and wake conditions.
        wake_fd: An eventfd that is written to when a value that a rule evaluates has changed; not written to
            after :meth:`stop` has returned.
        memory_fd: Memory of :func:`create_gpu_memory`, from which another process can read; -1: private
            memory.

    Raises:
        ConfigError: An option is out of range, or a path too long.
        ProbeError: The kernel refused a descriptor or memory.
    """

    def __init__(self, options: GpuWatchOptions, wake_fd: int, memory_fd: int = -1) -> None:
        record = ffi.new(
            "struct dh_gpus_options *",
            {
                "size": ffi.sizeof("struct dh_gpus_options"),
                "version": lib.DH_VERSION,
                "period_ns": options.period_ns,
                "slow_ns": max(options.slow_ns, options.period_ns),
                "deadline_ns": options.deadline_ns,
                "open_deadline_ns": options.open_deadline_ns,
                "retry_ns": options.retry_ns,
                "cpu_budget_ns": options.cpu_budget_ns,
            },
        )
        wakes = ffi.new("struct dh_gpu_wake[]", [_wake(wake) for wake in options.wakes])
        out = ffi.new("struct dh_gpu_watch **")
        library, sysfs = os.fsencode(options.library), os.fsencode(options.sysfs_root)
        code = lib.dh_gpus_open(record, library, sysfs, wakes, len(wakes), wake_fd, memory_fd, out)
        if code:
            raise _open_error(code, options)
        decode = UnchangedBytesCache(GpuRecordDecoder().decode)
        super().__init__("gpus", "GPU watch: threads", out[0], lib.dh_gpus_size(out[0]), decode, wake_fd)

    def pass_durations(self) -> PassDurations:
        """Return how long the readings of all GPUs took. Any thread may call it until :meth:`stop`."""
        return _pass_durations(self._handle)

    def costs(self) -> NvmlCosts:
        """Return the CPU time and durations of the NVML calls. Any thread may call it until :meth:`stop`."""
        return _costs(self._handle)

    def request_count(self) -> None:
        """Request a count of the GPUs within a second, because the PCI bus changed. Never blocks."""
        lib.dh_gpus_check_count(self._handle)

    def run_pass(self) -> int:
        """Read all GPUs once on the caller's thread, without :meth:`start`; return the number of NVML calls.

        For benchmarks.
        """
        return self._run_here(lib.dh_gpus_pass)

    def run_lower_bound(self) -> int:
        """Repeat the NVML calls of the last reading of all GPUs, without decoding; return how many succeeded.

        For benchmarks.
        """
        return self._run_here(lib.dh_gpus_lower_bound)

    def _run_here(self, function: Callable[[Any], int]) -> int:
        number = int(function(self._handle))
        if number < 0:
            raise ProbeError(
                "GPU watch: GPUs not read: the watch's own threads read them; stop the watch first"
            )
        return number


class SharedMemoryGpuReader:
    """Reader of the GPU values that another process publishes in shared memory. That process is not trusted.

    Args:
        memory_fd: Memory of :func:`create_gpu_memory` that the other process passes to its GpuWatch. The
            caller still owns it.
        wake_fd: Eventfd that is written to when the caller must read again.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, memory_fd: int, wake_fd: int) -> None:
        out = ffi.new("struct dh_gpu_watch **")
        code = lib.dh_gpus_attach(memory_fd, out)
        if code:
            raise OSError(-code, f"GPU watch: shared memory cannot be mapped: {os.strerror(-code)}")
        self._watch = out[0]
        decode = UnchangedBytesCache(GpuRecordDecoder().decode)
        try:
            self._reader = PublicationReader(self._copy, lib.dh_gpus_size(self._watch), decode, wake_fd)
        except OSError:
            self.close()
            raise

    def _copy(self, buffer: Any, size: int) -> int:
        used = int(lib.dh_gpus_read(self._watch, buffer, size))
        if used == -errno.EBADMSG:
            raise ValueError("the record of the GPUs lists more GPUs than it has room for")
        return used

    def read(self) -> NvmlSample | None:
        """Return the newest complete record of each GPU, or None before the other process started its watch.

        Raises:
            ValueError, LookupError: The memory has values that the C core never writes.
        """
        return self._reader.read()

    def pass_durations(self) -> PassDurations:
        """Return how long the readings of all GPUs took. Any thread may call it until :meth:`close`."""
        return _pass_durations(self._watch)

    def costs(self) -> NvmlCosts:
        """Return the CPU time and durations of the NVML calls. Any thread may call it until :meth:`close`."""
        return _costs(self._watch)

    def close(self) -> None:
        """Unmap the shared memory. The reader cannot be used afterwards."""
        lib.dh_gpus_detach(self._watch)


def _costs(watch: Any) -> NvmlCosts:
    found = ffi.new("struct dh_gpu_costs *")
    lib.dh_gpus_costs(watch, found)
    calls = (
        NvmlCallCost(call_name(call), cost.calls, cost.cpu_ns / NS, cost.wall_ns / NS)
        for call, cost in enumerate(found.call)
        if cost.calls
    )
    return NvmlCosts(found.cpu_ns / NS, found.switches, found.period_ns / NS, tuple(calls))


def _pass_durations(watch: Any) -> PassDurations:
    record = ffi.new("struct dh_durations *")
    lib.dh_gpus_durations(watch, record)
    return pass_durations(record)


def create_gpu_memory() -> int:
    """Create the memory of a GPU watch that another process can read. Return its descriptor.

    Raises:
        OSError: The kernel refused memory or a descriptor.
    """
    fd = os.memfd_create("drahealth-gpus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, lib.dh_gpus_memory_size())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def confine(parent: int, memory_max: int) -> None:
    """Drop the capabilities of this process that NVML does not need, limit its memory, and let it end with
    its parent.

    Args:
        parent: Process id of the parent.
        memory_max: Limit of the private writable memory [bytes].

    Raises:
        OSError: The kernel refused, or the parent has ended already.
    """
    code = lib.dh_confine(parent, memory_max)
    if code:
        raise OSError(-code, f"NVML process: cannot be confined: {os.strerror(-code)}")


def _wake(wake: GpuWakeCondition) -> dict[str, int]:
    return {
        "field": _FIELDS[wake.field],
        "mode": getattr(lib, f"DH_GPU_WAKE_{wake.mode.name}"),
        "limit": 0 if wake.limit is None else _FIELDS[wake.limit],
        "threshold": wake.threshold & (1 << 64) - 1,  # a margin may be negative
        "window_ns": wake.window_ns,
    }


def _seconds(ns: int) -> str:
    return f"{ns / NS:g} s"


def _open_error(code: int, options: GpuWatchOptions) -> Exception:
    if code == -errno.EINVAL:
        return ConfigError(
            f"GPU watch: option out of range: period {_seconds(options.period_ns)} or slow period "
            f"{_seconds(options.slow_ns)} is not in 10 ms to 1 h, "
            f"deadline {_seconds(options.deadline_ns)} or {_seconds(options.open_deadline_ns)} "
            f"not in 10 ms to 10 min, "
            f"retry {_seconds(options.retry_ns)} not in 100 ms to 1 h, "
            f"or one of {len(options.wakes)} wakes is invalid"
        )
    if code == -errno.ENAMETOOLONG:
        library, sysfs = len(os.fsencode(options.library)), len(os.fsencode(options.sysfs_root))
        return ConfigError(
            f"GPU watch: NVML library path is {library} bytes, limit 4000, or sysfs root {sysfs}, limit 200"
        )
    return ProbeError(f"GPU watch: cannot be opened: {return_code_text(code)}")
