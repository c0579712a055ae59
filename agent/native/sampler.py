"""The sampler thread: opened, started, read and stopped.

Owns the thread and its descriptors. Does not decide anything about what it reads.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.errors import ConfigError, ProbeError
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.model.wake import Field, Wake
from agent.native._core import ffi, lib
from agent.native.publication import Publication
from agent.native.records import Decoder

_FIELDS: Final = {field: getattr(lib, f"DH_{field.name}") for field in Field}


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What a sampler reads, and how often."""

    sysfs_root: Path = Path("/sys")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    kubelet_cgroup_root: str = "/"
    period_ns: int = NS
    """Of a pass: 10 ms to 1 h."""
    sweep_ns: int = 10 * NS
    """Every cgroup's silent counters are read once in this time, those that stand still once in six times it;
    at least a period."""
    resync_ns: int = 300 * NS
    """Everything is read once in this time, whether or not the kernel notified."""
    group_max: int = 4096
    wakes: Sequence[Wake] = ()


class Sampler:
    """One sampler of the native core.

    Raises:
        ConfigError: an option is out of range, or a root too long.
        ProbeError: the kernel refused descriptors or memory.
    """

    def __init__(self, options: SamplerOptions) -> None:
        sweep_ns = max(options.sweep_ns, options.period_ns)
        record = ffi.new(
            "struct dh_options *",
            {
                "size": ffi.sizeof("struct dh_options"),
                "version": lib.DH_VERSION,
                "period_ns": options.period_ns,
                "sweep_ns": sweep_ns,
                "resync_ns": max(options.resync_ns, sweep_ns),
                "group_max": options.group_max,
            },
        )
        wakes = ffi.new(
            "struct dh_wake[]",
            [
                {
                    "field": _FIELDS[wake.field],
                    "mode": lib.DH_WAKE_RISE if wake.threshold else lib.DH_WAKE_CHANGE,
                    "threshold": wake.threshold,
                    "window_ns": wake.window_ns,
                }
                for wake in options.wakes
            ],
        )
        out = ffi.new("struct dh_sampler **")
        code = lib.dh_sampler_open(
            record,
            os.fsencode(options.sysfs_root),
            os.fsencode(options.cgroupfs_root),
            os.fsencode(options.kubelet_cgroup_root),
            wakes,
            len(wakes),
            out,
        )
        if code:
            raise _open_error(code, options)
        self._sampler = out[0]
        self._fd: int = lib.dh_sampler_eventfd(self._sampler)
        decoder = Decoder({lib.DH_SYSFS: options.sysfs_root, lib.DH_CGROUPFS: options.cgroupfs_root})
        self._publication = Publication(
            lambda buffer, size: lib.dh_sampler_read(self._sampler, decoder.since, buffer, size),
            lib.dh_sampler_size(self._sampler),
            decoder.snapshot,
            self._fd,
        )

    def start(self) -> None:
        """Start the thread; its first pass begins at once."""
        code = lib.dh_sampler_start(self._sampler)
        if code:
            raise ProbeError(f"sampler thread: {os.strerror(-code)}")

    def fileno(self) -> int:
        """The descriptor that becomes readable when something that a rule can see has changed."""
        return self._fd

    def pokeno(self) -> int:
        """The descriptor that others write to when CPUs, memory or NUMA nodes have changed."""
        return int(lib.dh_sampler_pokefd(self._sampler))

    def rung_ns(self) -> int:
        """When it last woke the reader (CLOCK_MONOTONIC); 0 before it did. For benchmarks."""
        return int(lib.dh_sampler_rung_ns(self._sampler))

    def clear(self) -> None:
        """Take note of the wake, before :meth:`read`. Never blocks."""
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return

    def read(self) -> Snapshot | None:
        """The newest whole publication, or None before :meth:`start`.

        Until the first pass has ended it has no passes, and every source is starting. If the writer is
        held up in the middle of a copy, the last that was whole, and a wake to read again.
        """
        return self._publication.read()

    def run_pass(self) -> None:
        """One pass on this thread, instead of :meth:`start`. For benchmarks and tests."""
        if lib.dh_sampler_pass(self._sampler):
            raise ProbeError("sampler: its own thread runs")

    def run_sweep(self) -> int:
        """Read every cgroup's silent counters now, on this thread. Returns how many cgroups."""
        return int(lib.dh_sampler_sweep(self._sampler))

    def run_floor(self, *, sweep: bool) -> int:
        """The bare system calls of a pass, or of a pass and a sweep. Returns how many reads."""
        return int(lib.dh_sampler_floor(self._sampler, int(sweep)))

    def stop(self, timeout_s: float) -> bool:
        """End the thread. False if it hangs in the kernel: then it is left behind, and harmless."""
        sampler, self._sampler = self._sampler, ffi.NULL
        return sampler == ffi.NULL or int(lib.dh_sampler_stop(sampler, int(timeout_s * NS))) == 0


def _open_error(code: int, options: SamplerOptions) -> Exception:
    if code == -errno.EINVAL:
        return ConfigError(
            f"sampler: period {options.period_ns / 1e6:g} ms is not in 10 ms to 1 h, "
            f"or {options.group_max} cgroups not in 1 to 65536"
        )
    if code == -errno.ENAMETOOLONG:
        roots = (str(options.sysfs_root), str(options.cgroupfs_root), options.kubelet_cgroup_root)
        longest = max(roots, key=lambda root: len(os.fsencode(root)))
        return ConfigError(f"root {longest!r} is {len(os.fsencode(longest))} bytes, limit 200")
    return ProbeError(f"sampler: {os.strerror(-code) if -code < 4096 else f'code {code}'}")
