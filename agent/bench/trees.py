"""Cgroup and sysfs trees for benchmarks: real cgroups, or files on tmpfs with the same layout.

All trees are removed at the end of their block. Real cgroups are made below a directory that no kubelet uses;
suites start the agent with ``--kubelet-cgroup-root``.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CGROUPFS: Final = Path("/sys/fs/cgroup")
LOCK: Final = Path("/tmp/drahealth-machine.lock")  # tests hold the same lock while they change the machine
CONTROLLERS: Final = ("memory", "cpu", "hugetlb")
V1_HIERARCHIES: Final = ("memory", "cpu", "hugetlb")


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """Cgroups in the layout of a kubelet."""

    cgroupfs: Path
    """Cgroupfs root of the sampler."""
    kubelet_root: str
    backend: str
    """``real cgroups (v1 memory, cpu; v2)`` or ``files on tmpfs``; printed with each figure."""
    hierarchies: Mapping[str, Path]
    """Mount points of the hierarchies, by v1 controller; ``v2`` for the unified hierarchy."""
    groups: tuple[tuple[str, str], ...]
    """Pod UID and container ID of each cgroup; the container ID of a pod is empty."""

    def path(self, hierarchy: str, uid: str, container: str) -> Path:
        """Return the directory of a cgroup in one of :attr:`hierarchies`."""
        return self.hierarchies[hierarchy] / group_path(self.kubelet_root, uid, container)


def group_path(kubelet_root: str, uid: str, container: str) -> Path:
    """Return the path that the kubelet's cgroupfs driver uses for a burstable pod or its container."""
    return Path(kubelet_root.strip("/"), "kubepods", "burstable", f"pod{uid}", container)


def group_names(number: int, containers: int = 1) -> tuple[tuple[str, str], ...]:
    """Return the UIDs and container IDs of ``number`` cgroups: pods with ``containers`` containers each."""
    names: list[tuple[str, str]] = []
    for pod in range(-(-number // (containers + 1))):
        uid = f"{pod:08x}-beac-4000-8000-000000000000"
        names.append((uid, ""))
        names += ((uid, f"{pod:032x}{index:032x}") for index in range(containers))
    return tuple(names[:number])


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Exclude other benchmarks and tests that change machine-wide state. Blocks until the lock is free.

    Raises:
        OSError: This process may not open the lock file.
    """
    fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for {LOCK}: held by a test or benchmark ...", file=sys.stderr, flush=True)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def real_tree(number: int, containers: int = 1) -> Iterator[CgroupTree]:
    """Make real cgroups in each hierarchy that the agent reads.

    Raises:
        OSError: This process may not make cgroups.
    """
    hierarchies = _hierarchies()
    if not hierarchies:
        raise OSError(f"{CGROUPFS}: no cgroup hierarchy has memory, cpu or hugetlb")
    names = ", ".join(["v1 " + name for name in hierarchies if name != "v2"] + ["v2"] * ("v2" in hierarchies))
    root = f"/drahealth-bench-{os.getpid()}"
    tree = CgroupTree(CGROUPFS, root, f"real cgroups ({names})", hierarchies, group_names(number, containers))
    with machine_lock(), contextlib.ExitStack() as undo:
        for name, mount in hierarchies.items():
            if name == "v2":
                _enable_root_controllers(mount, undo)
            undo.callback(_remove, mount / root.strip("/"))
            (mount / root.strip("/")).mkdir()
            for uid, container in tree.groups:
                _make(mount, group_path(root, uid, container), v2=name == "v2")
        yield tree


def _hierarchies() -> dict[str, Path]:
    if (CGROUPFS / "cgroup.controllers").exists():
        return {"v2": CGROUPFS}
    found = {name: CGROUPFS / name for name in V1_HIERARCHIES if (CGROUPFS / name / "tasks").exists()}
    if (CGROUPFS / "unified" / "cgroup.controllers").exists():
        found["v2"] = CGROUPFS / "unified"
    return found


def _make(mount: Path, group: Path, *, v2: bool) -> None:
    """Make a cgroup and its parents; in v2, enable the available controllers on the way."""
    path = mount
    for part in group.parts:
        if v2 and path != mount:
            _enable_controllers(path)
        path /= part
        if not path.exists():
            path.mkdir()


def _enable_controllers(group: Path) -> None:
    offered = set((group / "cgroup.controllers").read_text().split())
    enabled = set((group / "cgroup.subtree_control").read_text().split())
    for name in (offered & set(CONTROLLERS)) - enabled:
        (group / "cgroup.subtree_control").write_text(f"+{name}")


def _enable_root_controllers(mount: Path, undo: contextlib.ExitStack) -> None:
    """Enable the controllers in the v2 root; ``undo`` disables those that were disabled before."""
    control = mount / "cgroup.subtree_control"
    offered = set((mount / "cgroup.controllers").read_text().split())
    for name in (offered & set(CONTROLLERS)) - set(control.read_text().split()):
        control.write_text(f"+{name}")
        undo.callback(_disable_controller, control, name)


def _disable_controller(control: Path, name: str) -> None:
    with contextlib.suppress(OSError):  # another process uses the controller now
        control.write_text(f"-{name}")


def _remove(root: Path) -> None:
    for directory, _, _ in os.walk(root, topdown=False):
        os.rmdir(directory)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary directory, on tmpfs if available, and remove it afterwards."""
    shm = Path("/dev/shm")
    directory = Path(
        tempfile.mkdtemp(prefix="drahealth-bench-", dir=shm if os.access(shm, os.W_OK) else None)
    )
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


V2_FILES: Final = {
    "cgroup.events": "populated 1\nfrozen 0\n",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    "cpu.stat": "usage_usec 1034\nuser_usec 0\nsystem_usec 1034\n"
    "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\nnr_bursts 0\nburst_usec 0\n",
    "hugetlb.2MB.events": "max 0\n",
    "hugetlb.2MB.max": "max\n",
    "hugetlb.2MB.rsvd.max": "max\n",
}
POOL_FILES: Final = {"nr_hugepages": "8\n", "free_hugepages": "8\n", "surplus_hugepages": "0\n"}
MACHINE_POOL_FILES: Final = POOL_FILES | {"resv_hugepages": "0\n", "nr_overcommit_hugepages": "0\n"}
CPU_FILES: Final = {"present": "0-7\n", "online": "0-7\n", "isolated": "\n"}
CONTROLLER_FILES: Final = {"ce_count": "0\n", "ue_count": "0\n", "mc_name": "skx_edac\n"}
MODULE_FILES: Final = {
    "dimm_ce_count": "0\n",
    "dimm_ue_count": "0\n",
    "dimm_label": "CPU_SrcID#0_MC#0_Chan#0_DIMM#0\n",
    "dimm_location": "channel 0 slot 0\n",
}
PROC_FILES: Final = {
    "meminfo": "MemTotal:       65536000 kB\nMemFree:        60000000 kB\nHardwareCorrupted:     0 kB\n",
    "vmstat": "nr_free_pages 15000000\nhtlb_buddy_alloc_success 0\nhtlb_buddy_alloc_fail 0\n",
    "interrupts": "     CPU0 CPU1 CPU2 CPU3 CPU4 CPU5 CPU6 CPU7\nMCE: 0 0 0 0 0 0 0 0  Machine checks\n",
}
_WAITED: Final = " avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
PRESSURE_FILES: Final = dict.fromkeys(("cpu", "memory", "io"), f"some{_WAITED}full{_WAITED}")


def _write(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def write_sysfs(root: Path) -> None:
    """Write a sysfs with eight CPUs on one NUMA node and a pool of eight 2 MiB pages."""
    _write(root / "devices/system/cpu", CPU_FILES)
    _write(root / "devices/system/node/node0", {"cpulist": CPU_FILES["online"]})
    _write(root / "devices/system/node/node0/hugepages/hugepages-2048kB", POOL_FILES)
    _write(root / "kernel/mm/hugepages/hugepages-2048kB", MACHINE_POOL_FILES)


def write_machine(root: Path, controllers: int) -> None:
    """Write the rarely changing files of the machine of :func:`write_sysfs`: ``sys`` and ``proc``.

    Args:
        root: Parent directory of both.
        controllers: Number of memory controllers with one module each; 0 as in a virtual machine.
    """
    devices = root / "sys/devices/system"
    _write(devices / "cpu", CPU_FILES)
    for cpu in range(8):
        topology = {"core_cpus_list": f"{cpu}\n", "physical_package_id": "0\n"}
        _write(devices / f"cpu/cpu{cpu}/topology", topology)
    _write(devices / "node", {"online": "0\n", "has_memory": "0\n"})
    _write(devices / "node/node0", {"meminfo": "Node 0 MemTotal:       65536000 kB\n"})
    for block in range(4):
        _write(devices / f"node/node0/memory{block}", {"state": "online\n"})
    for controller in range(controllers):
        _write(devices / f"edac/mc/mc{controller}", CONTROLLER_FILES)
        _write(devices / f"edac/mc/mc{controller}/dimm0", MODULE_FILES)
    _write(root / "proc", PROC_FILES)
    _write(root / "proc/pressure", PRESSURE_FILES)


def write_groups(root: Path, number: int) -> CgroupTree:
    """Write files that look like ``number`` cgroups of a cgroup v2 mount at ``root``."""
    tree = CgroupTree(root, "/", "files on tmpfs (looks like v2)", {"v2": root}, group_names(number))
    _write(root, {"cgroup.controllers": "cpu memory hugetlb\n"})
    for uid, container in tree.groups:
        _write(tree.path("v2", uid, container), V2_FILES)
    return tree


def write_knobs(root: Path, name: str) -> None:
    """Write a cgroup v2 mount of files at ``root`` with one cgroup and the limits that an audit reads."""
    limits = {"cpu.weight": "59\n", "cpu.max": "150000 100000\n", "memory.max": "536870912\n"}
    _write(root, {"cgroup.controllers": "cpu memory hugetlb\n"})
    _write(root / name, {**limits, "hugetlb.2MB.max": "0\n", "hugetlb.2MB.rsvd.max": "0\n"})


@contextlib.contextmanager
def real_or_file_tree(number: int) -> Iterator[tuple[CgroupTree, str]]:
    """Yield a tree of real cgroups, or of files if this process may not make cgroups; and the reason."""
    with contextlib.ExitStack() as stack:
        try:
            tree = stack.enter_context(real_tree(number))
            reason = ""
        except OSError as error:
            reason = f"no real cgroups: {error}"
            tree = write_groups(stack.enter_context(scratch()), number)
        yield tree, reason
