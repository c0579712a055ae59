"""The GPU watch: NVML's threads, opened, started, read and stopped.

Owns the threads, and how their records become samples. Decides nothing about what is read. A process that
could not stop it (:meth:`Gpus.stop`) has threads in the driver and should end with :func:`os._exit`.
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
from agent.native.publication import Publication, Same

_FIELDS: Final = {field: getattr(lib, f"DH_GPU_{field.name}") for field in GpuField}


@dataclass(frozen=True, slots=True)
class GpusOptions:
    """What a watch reads, and how often."""

    library: str = "libnvidia-ml.so.1"
    """Name or path of NVML; that there is none is no error."""
    sysfs_root: Path = Path("/sys")
    period_ns: int = NS
    """Of a pass over a GPU: 10 ms to 1 h."""
    slow_ns: int = 10 * NS
    """Of what changes rarely, or costs much to ask; at least a period."""
    deadline_ns: int = 5 * NS
    """A call that takes longer is overdue: 10 ms to 10 min."""
    open_deadline_ns: int = 30 * NS
    """The same for what initialises the driver."""
    retry_ns: int = 10 * NS
    """Between two looks at the library, the driver's version and the count of GPUs: 100 ms to 1 h."""
    wakes: Sequence[GpuWake] = ()


class Gpus:
    """The watch over all GPUs.

    Args:
        options: See there.
        wake_fd: An eventfd that is written to when something that a rule can see has changed. Borrowed
            for the call, and never written to once :meth:`stop` has returned.

    Raises:
        ConfigError: an option is out of range, or a path too long.
        ProbeError: the kernel refused a descriptor or memory.
    """

    def __init__(self, options: GpusOptions, wake_fd: int) -> None:
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
            Same(GpuDecoder().gpu_set),
            wake_fd,
        )

    def start(self) -> None:
        """Start the threads. Never waits for NVML.

        Raises:
            ProbeError: the kernel refused a thread.
        """
        code = lib.dh_gpus_start(self._watch)
        if code:
            raise ProbeError(f"GPU watch: {os.strerror(-code)}")

    def read(self) -> GpuSet | None:
        """The newest whole record of each GPU, or None before :meth:`start`. Never waits for NVML.

        If a writer is held up in the middle of a copy, what was read before, and a wake to read again.
        """
        return self._publication.read()

    def run_pass(self) -> int:
        """One pass over all GPUs on this thread, instead of :meth:`start`; how many calls. For benchmarks."""
        return self._alone(lib.dh_gpus_pass)

    def run_floor(self) -> int:
        """The bare NVML calls of a quiet pass; how many were answered."""
        return self._alone(lib.dh_gpus_floor)

    def _alone(self, work: Callable[[Any], int]) -> int:
        number = int(work(self._watch))
        if number < 0:
            raise ProbeError("GPU watch: its own threads run")
        return number

    def stop(self, timeout_s: float) -> bool:
        """End the threads, in at most that long. False if one hangs in a call: it is left behind."""
        watch, self._watch = self._watch, ffi.NULL
        return watch == ffi.NULL or int(lib.dh_gpus_stop(watch, int(timeout_s * NS))) == 0


def _wake(wake: GpuWake) -> dict[str, int]:
    return {
        "field": _FIELDS[wake.field],
        "mode": getattr(lib, f"DH_GPU_WAKE_{wake.mode.name}"),
        "limit": 0 if wake.limit is None else _FIELDS[wake.limit],
        "threshold": wake.threshold & (1 << 64) - 1,  # a margin's may be negative
        "window_ns": wake.window_ns,
    }


def _s(ns: int) -> str:
    return f"{ns / NS:g} s"


def _open_error(code: int, options: GpusOptions) -> Exception:
    if code == -errno.EINVAL:
        return ConfigError(
            f"GPU watch: period {_s(options.period_ns)} or slow period {_s(options.slow_ns)} is not in "
            f"10 ms to 1 h, deadline {_s(options.deadline_ns)} or {_s(options.open_deadline_ns)} not in "
            f"10 ms to 10 min, retry {_s(options.retry_ns)} not in 100 ms to 1 h, "
            f"or one of {len(options.wakes)} wakes makes no sense"
        )
    if code == -errno.ENAMETOOLONG:
        library, sysfs = len(os.fsencode(options.library)), len(os.fsencode(options.sysfs_root))
        return ConfigError(f"library is {library} bytes, limit 4000, or sysfs root {sysfs}, limit 200")
    return ProbeError(f"GPU watch: {os.strerror(-code) if -code < 4096 else f'code {code}'}")
