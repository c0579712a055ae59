"""Reader of the settings of single cgroups, through the C core, on demand and on the caller's thread."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent.errors import PermissionDeniedError, ProbeError
from agent.model.pod_findings import CgroupSettings, HugepageLimits
from agent.model.reading import NEVER_READ, Absence, Missing, Reading, return_code_text
from agent.native._core import ffi, lib
from agent.native.published_tables import ABSENT

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
            raise _open_error(f"cgroupfs root {cgroupfs_root}", code)
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
            raise _open_error(f"cgroup {path}", code)
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


def _open_error(subject: str, code: int) -> PermissionDeniedError | ProbeError:
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
    return _to_missing(setting.err) if setting.err else int(setting.value)


def _cpu_set_reading(words: Any, err: int) -> Reading:
    return _to_missing(err) if err else int.from_bytes(ffi.buffer(words)[:], "little")


def _to_missing(err: int) -> Missing:
    return ABSENT if err == errno.ENOENT else Missing(Absence.UNREADABLE, err)
