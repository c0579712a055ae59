"""Open, start, read and stop the GPU watch: the threads that call NVML.

Owns the threads and the decoding of their records; rules evaluate the values elsewhere. A process that could
not stop them (:meth:`Gpus.stop`) has threads in the driver and should end with :func:`os._exit`.
"""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.errors import ConfigError, ProbeError
from agent.model.gpu import GpuField, GpuSet
from agent.model.time import NS
from agent.model.wake import GpuWake
from agent.native._core import ffi, lib
from agent.native.gpu_records import GpuDecoder
from agent.native.publication import CachedDecoder, Publication

_FIELDS: Final = {field: getattr(lib, f"DH_GPU_{field.name}") for field in GpuField}


@dataclass(frozen=True, slots=True)
class GpuWatchOptions:
    """Options of a GPU watch: library, periods, deadlines, and changes that wake the reader."""

    library: str = "libnvidia-ml.so.1"
    """Name or path of NVML; a missing library is no error."""
    sysfs_root: Path = Path("/sys")
    period_ns: int = NS
    """Time between two passes that read a GPU [ns]: 10 ms to 1 h."""
    slow_ns: int = 10 * NS
    """Time between two reads of values that change rarely or are expensive [ns]; at least a period."""
    deadline_ns: int = 5 * NS
    """Duration after which a call is overdue [ns]: 10 ms to 10 min."""
    open_deadline_ns: int = 30 * NS
    """Duration after which a call that initialises the driver is overdue [ns]."""
    retry_ns: int = 10 * NS
    """Time between two checks of the library, driver version and number of GPUs [ns]: 100 ms to 1 h."""
    wakes: Sequence[GpuWake] = ()


class GpuWatch:
    """Watch of all GPUs: threads that call NVML, and their newest results.

    Args:
        options: Library, periods and wakes.
        wake_fd: An eventfd that is written to when a value that a rule evaluates has changed. Borrowed
            for the call, and never written to once :meth:`stop` has returned.

    Raises:
        ConfigError: an option is out of range, or a path too long.
        ProbeError: the kernel refused a descriptor or memory.
    """

    def __init__(self, options: GpuWatchOptions, wake_fd: int) -> None:
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
            },
        )
        wakes = ffi.new("struct dh_gpu_wake[]", [_wake(wake) for wake in options.wakes])
        out = ffi.new("struct dh_gpu_watch **")
        library, sysfs = os.fsencode(options.library), os.fsencode(options.sysfs_root)
        code = lib.dh_gpus_open(record, library, sysfs, wakes, len(wakes), wake_fd, out)
        if code:
            raise _open_error(code, options)
        self._watch = out[0]
        self._publication = Publication(
            lambda buffer, size: lib.dh_gpus_read(self._watch, buffer, size),
            lib.dh_gpus_size(self._watch),
            CachedDecoder(GpuDecoder().gpu_set),
            wake_fd,
        )

    def start(self) -> None:
        """Start the threads. Does not wait for NVML.

        Raises:
            ProbeError: the kernel refused a thread.
        """
        code = lib.dh_gpus_start(self._watch)
        if code:
            raise ProbeError(f"GPU watch: {os.strerror(-code)}")

    def read(self) -> GpuSet | None:
        """Return the newest complete record of each GPU, or None before :meth:`start`. Never waits for NVML.

        While a writer is preempted in the middle of a copy, returns the records of the last read and wakes
        the reader again.
        """
        return self._publication.read()

    def run_pass(self) -> int:
        """Run one pass over all GPUs on this thread, instead of :meth:`start`. Return the number of calls.

        For benchmarks.
        """
        return self._run_here(lib.dh_gpus_pass)

    def run_lower_bound(self) -> int:
        """Make the bare NVML calls of the last pass. Return how many succeeded. For benchmarks."""
        return self._run_here(lib.dh_gpus_lower_bound)

    def _run_here(self, function: Callable[[Any], int]) -> int:
        number = int(function(self._watch))
        if number < 0:
            raise ProbeError("GPU watch: its threads run already")
        return number

    def stop(self, timeout_s: float) -> bool:
        """End the threads. Returns True if all ended, False if one hangs in a call and is abandoned. Blocks
        up to ``timeout_s``."""
        watch, self._watch = self._watch, ffi.NULL
        return watch == ffi.NULL or int(lib.dh_gpus_stop(watch, int(timeout_s * NS))) == 0


def _wake(wake: GpuWake) -> dict[str, int]:
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
            f"GPU watch: period {_seconds(options.period_ns)} or slow period {_seconds(options.slow_ns)} "
            f"is not in 10 ms to 1 h, deadline {_seconds(options.deadline_ns)} or "
            f"{_seconds(options.open_deadline_ns)} not in 10 ms to 10 min, "
            f"retry {_seconds(options.retry_ns)} not in 100 ms to 1 h, "
            f"or one of {len(options.wakes)} wakes is invalid"
        )
    if code == -errno.ENAMETOOLONG:
        library, sysfs = len(os.fsencode(options.library)), len(os.fsencode(options.sysfs_root))
        return ConfigError(f"library is {library} bytes, limit 4000, or sysfs root {sysfs}, limit 200")
    return ProbeError(f"GPU watch: {os.strerror(-code) if -code < 4096 else f'code {code}'}")
