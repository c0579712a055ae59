"""Changes that tests make on the machine, and their restoration.

Hugepage pools, CPUs and the controllers of the root cgroup are shared by the whole machine. Each context
manager holds one lock while something is changed, skips the test without permission, and always restores. The
module asserts nothing.
"""

import fcntl
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from patience import PATIENCE_S

from agent.bench.file_trees import open_machine_lock

CGROUPFS: Final = Path("/sys/fs/cgroup")
SYSFS: Final = Path("/sys")

_holders: list[int] = []


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the lock of the machine: no other test changes it meanwhile. Re-entrant."""
    if _holders:
        _holders.append(_holders[0])
        try:
            yield
        finally:
            _holders.pop()
        return
    fd = open_machine_lock()
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _holders.append(fd)
        try:
            yield
        finally:
            _holders.pop()
    finally:
        os.close(fd)


KERNEL_LOG: Final = Path("/dev/kmsg")


def why_no_kernel_log(flags: int) -> str:
    """Return why this process may not open the kernel log; empty: it may.

    Some containers have a FIFO in its place.
    """
    try:
        fd = os.open(KERNEL_LOG, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"may not open {KERNEL_LOG}: {error.strerror}"
    try:
        is_log = os.fstat(fd).st_rdev == os.makedev(1, 11)
        return "" if is_log else f"{KERNEL_LOG} is not the kernel log here"
    finally:
        os.close(fd)


def skip_unless_kernel_log(flags: int) -> None:
    """Skip the test unless this process may open the kernel log."""
    if reason := why_no_kernel_log(flags):
        pytest.skip(reason)


def _write_or_skip(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        pytest.skip(f"may not write {path}: {e.strerror}")


# --- hugepages ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HugepagePool:
    """One machine-wide pool."""

    size_kib: int

    @property
    def file(self) -> Path:
        return SYSFS / f"kernel/mm/hugepages/hugepages-{self.size_kib}kB/nr_hugepages"

    @property
    def pages(self) -> int:
        return int(self.file.read_text())

    def resize(self, pages: int) -> None:
        """Ask for so many pages; skips the test if the kernel finds fewer."""
        _write_or_skip(self.file, f"{pages}\n")
        if self.pages != pages:
            pytest.skip(f"asked for {pages} hugepages of {self.size_kib} KiB, got {self.pages}")


@contextmanager
def hugepages(size_kib: int, pages: int) -> Iterator[HugepagePool]:
    """Resize the pool of a page size to ``pages`` for a ``with`` block, and yield the pool."""
    pool = HugepagePool(size_kib)
    if not pool.file.exists():
        pytest.skip(f"no hugepages of {size_kib} KiB on this machine")
    with machine_lock():
        before = pool.pages
        try:
            pool.resize(pages)
            yield pool
        finally:
            if pool.pages != before:
                pool.file.write_text(f"{before}\n")


# Maps pages and touches each, prints a line, and holds them until its input ends.
_HOLD: Final = """
import mmap, sys
size, pages = int(sys.argv[1]), int(sys.argv[2])
HUGETLB = 0x40000 | (size.bit_length() - 1 << 26)
area = mmap.mmap(-1, size * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | HUGETLB)
for page in range(pages):
    area[page * size] = 1
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_hugepages(pool: HugepagePool, surplus: int) -> Iterator[None]:
    """Hold all pages of a pool and ``surplus`` more pages with a process for a ``with`` block."""
    overcommit = pool.file.with_name("nr_overcommit_hugepages")
    with machine_lock(), ExitStack() as stack:
        before = overcommit.read_text()
        stack.callback(overcommit.write_text, before)
        _write_or_skip(overcommit, f"{surplus}\n")
        command = [sys.executable, "-c", _HOLD, str(pool.size_kib * 1024), str(pool.pages + surplus)]
        holder = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(holder.kill)
        assert holder.stdout is not None
        if holder.stdout.readline() != "held\n":
            pytest.skip(f"no {surplus} hugepages of {pool.size_kib} KiB beyond the pool")
        yield


# --- CPUs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cpu:
    """One CPU that can be taken offline."""

    number: int

    @property
    def file(self) -> Path:
        return SYSFS / f"devices/system/cpu/cpu{self.number}/online"

    def is_online(self) -> bool:
        return self.file.read_text() == "1\n"

    def set_online(self, online: bool) -> None:
        _write_or_skip(self.file, f"{online:d}\n")


@contextmanager
def hotplug(number: int) -> Iterator[Cpu]:
    """Yield an online CPU that the test may take offline; the CPU is online afterwards."""
    cpu = Cpu(number)
    with machine_lock():
        if not cpu.file.exists() or not cpu.is_online():
            pytest.skip(f"cpu{number} cannot be taken offline here")
        try:
            yield cpu
        finally:
            if not cpu.is_online():
                cpu.file.write_text("1\n")


@contextmanager
def cpu_offline(number: int) -> Iterator[Cpu]:
    """Take a CPU offline for a ``with`` block, and yield it."""
    with hotplug(number) as cpu:
        cpu.set_online(False)
        yield cpu


# --- cgroups --------------------------------------------------------------------------------------------

_tree_numbers = itertools.count(1)


def unified_root() -> Path | None:
    """Return the mount point of cgroup v2, alone or with v1; None: not mounted."""
    for root in (CGROUPFS, CGROUPFS / "unified"):
        if (root / "cgroup.controllers").exists():
            return root
    return None


@dataclass(frozen=True)
class Kubepods:
    """A kubepods tree of our own below the hierarchies in ``roots``, as one kubelet would make it."""

    cgroup_root: str
    """The kubelet's ``--cgroup-root``."""
    roots: tuple[Path, ...]
    hugetlb: bool
    systemd: bool

    def directory(self, qos: str = "", pod: str = "", container: str = "") -> Path:
        """Return the path of a level below each root: kubepods, a QoS class (or none), a pod, a container."""
        top = self.cgroup_root.strip("/")
        if self.systemd:
            names = [top.replace("-", "_"), "kubepods"]
            names += [qos] if qos else []
            names += ["pod" + pod.replace("-", "_")] if pod else []
            parts = ["-".join(names[: i + 1]) + ".slice" for i in range(len(names))]
            parts += [f"cri-containerd-{container}.scope"] if container else []
        else:
            parts = [part for part in (top, "kubepods", qos, pod and f"pod{pod}", container) if part]
        return Path(*parts)

    def make(self, qos: str = "", pod: str = "", container: str = "") -> Path:
        """Make a level and all above it. Returns its directory below the first root.

        With hugetlb, all but containers hand the controller on, as they must before their children are made.
        """
        relative = self.directory(qos, pod, container)
        for root in self.roots:
            at = root
            for part in relative.parts:
                at /= part
                at.mkdir(exist_ok=True)
                control = at / "cgroup.subtree_control"
                if self.hugetlb and control.exists() and not (container and at == root / relative):
                    control.write_text("+hugetlb")
        return self.roots[0] / relative

    def remove(self, qos: str = "", pod: str = "", container: str = "") -> None:
        """Remove a level and all below it."""
        for root in self.roots:
            _remove_cgroup(root / self.directory(qos, pod, container))


def _remove_cgroup(top: Path) -> None:
    """Remove a cgroup and those below it. Its files need no removing; processes that end now, a wait."""
    for directory, _, _ in os.walk(top, topdown=False):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError:  # EBUSY: a dying process is still being taken out
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
            else:
                break


@contextmanager
def _give_hugetlb_to_children(root: Path) -> Iterator[None]:
    """Give the children of the root cgroup the hugetlb controller for a ``with`` block."""
    control = root / "cgroup.subtree_control"
    if "hugetlb" not in (root / "cgroup.controllers").read_text().split():
        pytest.skip("hugetlb is no controller of cgroup v2 here")
    if "hugetlb" in control.read_text().split():
        yield
        return
    _write_or_skip(control, "+hugetlb")
    try:
        yield
    finally:
        control.write_text("-hugetlb")


@contextmanager
def hugetlb_for_v1(root: Path) -> Iterator[None]:
    """Take the hugetlb controller from cgroup v2 for a ``with`` block, so that v1 can mount it.

    Without the controller in cgroup v2, or if v1 has it already, nothing changes.
    """
    control, controllers = root / "cgroup.subtree_control", root / "cgroup.controllers"
    with machine_lock():
        if "hugetlb" not in control.read_text().split():
            yield
            return
        _write_or_skip(control, "-hugetlb")
        try:
            yield
        finally:
            deadline = time.monotonic() + PATIENCE_S
            while "hugetlb" not in controllers.read_text().split():  # the v1 hierarchy ends with its mounts
                if time.monotonic() > deadline:
                    raise AssertionError(f"{controllers} lacks hugetlb: a v1 hierarchy is still mounted")
                time.sleep(0.02)
            control.write_text("+hugetlb")


@contextmanager
def kubepods_tree(
    *controllers: str, unified: bool = True, hugetlb: bool = False, systemd: bool = False
) -> Iterator[Kubepods]:
    """Create a kubepods tree that has only its parent cgroup, yield it, and remove it afterwards.

    Args:
        controllers: names of v1 hierarchies that are to have it too, ``memory``, ``cpu``.
        unified: whether it is in the v2 hierarchy, which is then the first of ``roots``.
        hugetlb: whether its groups have the v2 hugetlb controller. Takes the machine's lock.
        systemd: named as the kubelet's systemd cgroup driver does, else as its cgroupfs driver.
    """
    roots = [CGROUPFS / controller for controller in controllers]
    for root in roots:
        if not (root / "cgroup.procs").exists():
            pytest.skip(f"no cgroup v1 hierarchy at {root}")
    with ExitStack() as stack:
        if unified:
            v2 = unified_root()
            if v2 is None:
                pytest.skip("no cgroup v2 here")
            if hugetlb:
                stack.enter_context(machine_lock())
                stack.enter_context(_give_hugetlb_to_children(v2))
            roots.insert(0, v2)
        name = f"drahealth-test-{os.getpid()}-{next(_tree_numbers)}"
        tree = Kubepods(f"/{name}", tuple(roots), hugetlb, systemd)
        parent = tree.directory().parts[0]
        try:
            for root in roots:
                try:
                    (root / parent).mkdir()
                except OSError as e:
                    pytest.skip(f"may not make cgroups in {root}: {e.strerror}")
            yield tree
        finally:
            for root in roots:
                _remove_cgroup(root / parent)


class HugetlbHit(NamedTuple):
    """Result of a process that reached its cgroup's hugetlb limit."""

    pages: int
    """Number of pages that it got."""
    at_ns: int
    """CLOCK_MONOTONIC right before the page that it did not get [ns]."""


# Joins the cgroup, then touches one page after the other and writes when. MAP_NORESERVE: the limit that
# counts is hugetlb.<size>.max at the page fault, not the pool's size at mmap().
_TOUCH: Final = """
import mmap, os, resource, struct, sys, time
procs, size, pages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with open(procs, "w") as f:
    f.write(str(os.getpid()))
HUGETLB, NORESERVE = 0x40000 | (size.bit_length() - 1 << 26), 0x4000
area = mmap.mmap(-1, size * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | HUGETLB | NORESERVE)
for page in range(pages):
    os.write(1, struct.pack("=q", time.monotonic_ns()))
    area[page * size] = 1
"""


def hugetlb_hit(cgroup: Path, pages: int, *, size_kib: int = 2048) -> HugetlbHit:
    """Touch ``pages`` hugepages with a process in ``cgroup``, which SIGBUS kills at the limit."""
    touch = [sys.executable, "-c", _TOUCH, str(cgroup / "cgroup.procs"), str(size_kib * 1024), str(pages)]
    done = subprocess.run(touch, capture_output=True, timeout=PATIENCE_S, check=False)
    if done.returncode != -signal.SIGBUS:
        raise AssertionError(
            f"no SIGBUS within {pages} pages, but status {done.returncode}: {done.stderr.decode()}"
        )
    return HugetlbHit(len(done.stdout) // 8 - 1, int.from_bytes(done.stdout[-8:], sys.byteorder))


# --- processes in cgroups -------------------------------------------------------------------------------

_JOIN: Final = "import os, sys\nwith open(sys.argv[1], 'w') as f: f.write(str(os.getpid()))\n"
_SPIN: Final = "while True: pass"
_EAT: Final = "area = bytearray(1)\nwhile True: area += bytes(1 << 20)"


def _process_in(cgroup: Path, program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _JOIN + program, str(cgroup / "cgroup.procs")])


@contextmanager
def cpu_load(cgroup: Path) -> Iterator[None]:
    """Use a whole CPU with a process in a cgroup for a ``with`` block."""
    with _process_in(cgroup, _SPIN) as process:
        try:
            yield
        finally:
            process.kill()


def oom_kill(cgroup: Path) -> None:
    """Allocate memory with a process in a cgroup with a limit until the kernel kills it."""
    with _process_in(cgroup, _EAT) as process:
        if (status := process.wait(PATIENCE_S)) != -signal.SIGKILL:
            raise AssertionError(f"not killed, but status {status}")


# --- pressure -------------------------------------------------------------------------------------------

_THRASH_MIB: Final = 48
_THRASH_LIMIT_MIB: Final = 8

# Joins the cgroup, then reads page after page of a file that does not fit into it.
_THRASH: Final = """
import mmap, os, sys
with open(sys.argv[1], "w") as f:
    f.write(str(os.getpid()))
fd = os.open(sys.argv[2], os.O_RDONLY)
area = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
while True:
    for at in range(0, len(area), mmap.PAGESIZE):
        area[at]
"""


@contextmanager
def memory_pressure(scratch: Path) -> Iterator[None]:
    """Real processes in a v1 memory cgroup wait for their own pages, until the end. Takes the machine's lock.

    Args:
        scratch: a directory on a disk, for a file that is larger than what they may have of it.
    """
    file = scratch / "thrash"
    with machine_lock(), ExitStack() as stack:
        tree = stack.enter_context(kubepods_tree("memory", unified=False))
        group = tree.make()
        (group / "memory.limit_in_bytes").write_text(f"{_THRASH_LIMIT_MIB << 20}")
        with file.open("wb") as f:
            f.write(bytes(_THRASH_MIB << 20))
            f.flush()
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or its pages are charged to us
        stack.callback(file.unlink)
        command = [sys.executable, "-c", _THRASH, str(group / "cgroup.procs"), str(file)]
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield
