"""Sampler: the C core's thread that reads CPUs, hugepages and cgroups, and its newest snapshot.

Reader of the settings of single cgroups, through the C core, on demand and on the caller's thread.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent.errors import ConfigError, PermissionDeniedError, ProbeError
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.pod_findings import CgroupSettings, HugepageLimits
from agent.model.reading import NEVER_READ, Absence, Missing, PassDurations, Reading, return_code_text
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.native._core import ffi, lib
from agent.native.published_tables import PublicationReader
from agent.native.sampler_records import ABSENT, SOURCE_NAMES, SnapshotDecoder, pass_durations_by_source

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


# --- settings of single cgroups ----------------------------------------------------------------------------

_CONTROLLERS: Final = {
    "cpu": lib.DH_CG_CPU,
    "memory": lib.DH_CG_MEMORY,
    "hugetlb": lib.DH_CG_HUGETLB,
    "cpuset": lib.DH_CG_CPUSET,
}


class CgroupSettingReader:
    """Reader of weight, limits and CPU sets of cgroups. Closed by :meth:`close` or ``with``.

    Args:
        cgroupfs_root: ``/sys/fs/cgroup``, or a tree like it: v2, v1, or both.
        hugepage_sizes_kib: Hugepage sizes whose limits are read [KiB], at most 6.

    Raises:
        ProbeError: No cgroup hierarchy is mounted, or one cannot be opened.
        PermissionDeniedError: The user may not open a hierarchy.
    """

    def __init__(self, cgroupfs_root: Path, hugepage_sizes_kib: Sequence[int]) -> None:
        out = ffi.new("struct dh_knob_reader **")
        code = lib.dh_knobs_open(
            os.fsencode(cgroupfs_root), list(hugepage_sizes_kib), len(hugepage_sizes_kib), out
        )
        if code == -errno.ENOENT:
            raise ProbeError(f"cgroupfs root {cgroupfs_root}: no cgroup hierarchy is mounted here")
        if code == -errno.EINVAL:
            raise ProbeError(f"the host has {len(hugepage_sizes_kib)} hugepage sizes, limit {lib.DH_HP_MAX}")
        if code:
            raise _settings_open_error(f"cgroupfs root {cgroupfs_root}", code)
        self._reader: Any = ffi.gc(out[0], lib.dh_knobs_close)
        self._record = ffi.new(
            "struct dh_knobs *", {"size": ffi.sizeof("struct dh_knobs"), "version": lib.DH_VERSION}
        )

    @property
    def cgroup_version(self) -> int:
        """Version of the cgroups that limit CPU time: 1 or 2."""
        return int(lib.dh_knobs_version(self._reader))

    def read(self, path: str, exclusive_cpus: bool = False) -> CgroupSettings | None:
        """Return the settings of a cgroup; None: the cgroup does not exist, or was removed meanwhile.

        Args:
            path: Path of the cgroup below the mounts.
            exclusive_cpus: Also read the CPU sets and the throttling count, which matter for containers with
                exclusive CPUs only; the kernel adds up all CPUs for the count.

        Raises:
            ProbeError: The cgroup exists and cannot be opened.
            PermissionDeniedError: The user may not open it.
        """
        code = lib.dh_knobs_read(self._reader, os.fsencode(path), exclusive_cpus, self._record)
        if code == -errno.ENOENT:
            return None
        if code:
            raise _settings_open_error(f"cgroup {path}", code)
        return _decode_settings(self._record, exclusive_cpus)

    def close(self) -> None:
        """Close the cgroup hierarchies; later reads fail. A second call does nothing."""
        reader, self._reader = self._reader, None
        if reader is not None:
            ffi.release(reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settings_open_error(subject: str, code: int) -> PermissionDeniedError | ProbeError:
    kind = PermissionDeniedError if -code in {errno.EACCES, errno.EPERM} else ProbeError
    return kind(f"{subject}: {return_code_text(code)}")


def _decode_settings(record: Any, own_cpus: bool) -> CgroupSettings:
    bits = record.controllers
    names = frozenset(name for name, bit in _CONTROLLERS.items() if bits & bit)
    return CgroupSettings(
        controllers=None if record.controllers_err else names,
        weight=_setting_reading(record.weight),
        quota_us=_setting_reading(record.quota),
        period_us=_setting_reading(record.period),
        throttled=_setting_reading(record.throttled) if own_cpus else NEVER_READ,
        memory=_setting_reading(record.memory),
        cpus=_cpu_set_reading(record.cpus, record.cpus_err) if own_cpus else NEVER_READ,
        effective=_cpu_set_reading(record.effective, record.effective_err) if own_cpus else NEVER_READ,
        pages=tuple(
            HugepageLimits(page.size_kib, _setting_reading(page.max), _setting_reading(page.rsvd_max))
            for page in record.pages[0 : record.sizes]
        ),
    )


def _setting_reading(setting: Any) -> Reading:
    return _missing(setting.err) if setting.err else int(setting.value)


def _cpu_set_reading(words: Any, err: int) -> Reading:
    return _missing(err) if err else int.from_bytes(ffi.buffer(words)[:], "little")


def _missing(err: int) -> Missing:
    return ABSENT if err == errno.ENOENT else Missing(Absence.UNREADABLE, err)
