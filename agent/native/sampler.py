"""Sampler: the C core's thread that reads CPUs, hugepages and cgroups, and its newest snapshot."""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.errors import ConfigError, ProbeError
from agent.model.reading import return_code_text
from agent.model.snapshot import Snapshot
from agent.model.source_state import PassDurations
from agent.model.time import NS
from agent.model.wake_conditions import SamplerField, WakeCondition
from agent.native._core import ffi, lib
from agent.native.published_tables import PublicationReader
from agent.native.sampler_records import SOURCE_NAMES, SnapshotDecoder, pass_durations_by_source

_FIELDS: Final = {field: getattr(lib, f"DH_{field.name}") for field in SamplerField}


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options of a sampler: root directories, periods, and value changes that wake the reader."""

    sysfs_root: Path = Path("/sys")
    cgroupfs_root: Path = Path("/sys/fs/cgroup")
    kubelet_cgroup_root: str = "/"
    period_ns: int = NS
    """Time between two passes over the files that are read in every pass [ns]: 10 ms to 1 h."""
    sweep_ns: int = 10 * NS
    """Time in which every cgroup's counters that the kernel does not notify about are read once [ns].

    At least `period_ns`. Counters that do not change are read once in six times this time.
    """
    resync_ns: int = 300 * NS
    """Time in which every file is read once, whether or not the kernel notified [ns]."""
    group_max: int = 4096
    """Largest number of cgroups that the sampler watches: 1 to 65536."""
    held_bytes: int = 4 << 20
    """Kernel memory for descriptors of cgroup files that stay open between two reads [bytes]; 0: none stay
    open. Fewer stay open if RLIMIT_NOFILE is low."""
    wakes: Sequence[WakeCondition] = ()


class Sampler:
    """Sampler: one thread that reads CPUs, hugepages and cgroups periodically, and its newest snapshot.

    Raises:
        ConfigError: An option is out of range, or a root too long.
        ProbeError: The kernel refused descriptors or memory.
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
                "held_bytes": options.held_bytes,
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
        decoder = SnapshotDecoder({lib.DH_SYSFS: options.sysfs_root, lib.DH_CGROUPFS: options.cgroupfs_root})
        self._publication = PublicationReader(
            lambda buffer, size: lib.dh_sampler_read(self._sampler, decoder.newest_stamp, buffer, size),
            lib.dh_sampler_size(self._sampler),
            decoder.decode,
            self._fd,
        )

    def start(self) -> None:
        """Start the thread that reads CPUs, hugepages and cgroups; its first pass begins at once."""
        code = lib.dh_sampler_start(self._sampler)
        if code:
            raise ProbeError(f"sampler thread cannot be started: {os.strerror(-code)}")

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a value that a rule evaluates has changed."""
        return self._fd

    def rescan_fileno(self) -> int:
        """Return the eventfd for other threads to write to when CPUs, memory or NUMA nodes have changed."""
        return int(lib.dh_sampler_rescan_fd(self._sampler))

    def last_wake_ns(self) -> int:
        """Return when the sampler last woke the reader [ns, CLOCK_MONOTONIC]; 0: never. For benchmarks."""
        return int(lib.dh_sampler_notified_ns(self._sampler))

    def clear(self) -> None:
        """Reset the wake-up descriptor; call this before :meth:`read`. Never blocks."""
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return

    def read(self) -> Snapshot | None:
        """Return the newest snapshot; None: not started.

        Until the first pass has ended, the snapshot counts 0 passes, and every source's state is "starting".
        """
        return self._publication.read()

    def pass_durations(self) -> Mapping[str, PassDurations]:
        """Return the durations of the passes of each source. Any thread, until :meth:`stop`."""
        return pass_durations_by_source(
            lambda records: lib.dh_sampler_durations(self._sampler, records), SOURCE_NAMES
        )

    def run_pass(self) -> None:
        """Read all files once on this thread, instead of :meth:`start`. For benchmarks and tests."""
        if lib.dh_sampler_pass(self._sampler):
            raise ProbeError(
                "sampler: files not read: the sampler's own thread reads them; stop the sampler first"
            )

    def run_sweep(self) -> int:
        """Read, on this thread, those counters of every cgroup that the kernel does not notify about.

        Returns the number of cgroups that were read. For benchmarks and tests.
        """
        return int(lib.dh_sampler_sweep(self._sampler))

    def run_lower_bound(self, *, sweep: bool, opens: bool = False) -> int:
        """Repeat only the system calls of a pass; return the number of reads. For benchmarks.

        ``sweep``: also repeat the calls of :meth:`run_sweep`. ``opens``: open every file of it, also those
        whose descriptors stay open.
        """
        swept = lib.DH_BARE_OPENS if opens else lib.DH_BARE_SWEEP
        return int(lib.dh_sampler_lower_bound(self._sampler, swept if sweep else lib.DH_BARE_PASS))

    def stop(self, timeout_s: float) -> bool:
        """End the thread that reads CPUs, hugepages and cgroups.

        Returns False if it still hangs in the kernel after ``timeout_s`` seconds; it is abandoned.
        """
        sampler, self._sampler = self._sampler, ffi.NULL
        return sampler == ffi.NULL or int(lib.dh_sampler_stop(sampler, int(timeout_s * NS))) == 0


def _open_error(code: int, options: SamplerOptions) -> Exception:
    if code == -errno.EINVAL:
        return ConfigError(
            f"sampler: period {options.period_ns / 1e6:g} ms is not in 10 ms to 1 h, "
            f"or the cgroup limit {options.group_max} is not in 1 to 65536"
        )
    if code == -errno.ENAMETOOLONG:
        roots = (str(options.sysfs_root), str(options.cgroupfs_root), options.kubelet_cgroup_root)
        longest = max(roots, key=lambda root: len(os.fsencode(root)))
        return ConfigError(f"sampler: root path {longest!r} is {len(os.fsencode(longest))} bytes, limit 200")
    return ProbeError(f"sampler: cannot be opened: {return_code_text(code)}")
