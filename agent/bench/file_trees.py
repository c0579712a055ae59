"""Directories of cgroups and of sysfs for benchmarks: real cgroups, or files on tmpfs in the same layout.

Each ``with`` block that makes a tree removes it at its end. Real cgroups are made below a directory that no
kubelet uses; suites start the agent with ``--kubelet-cgroup-root``.

The module also writes the files of a Kubernetes node with thousands of pods and claims: the kubelet's
checkpoint, and lists of objects as saved by kubectl.

The files are consistent: each claim is allocated, reserved and prepared for one pod, which references it. So
the agent reports neither conflicts nor risks for them.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.sources import kubelet_files

CGROUPFS: Final = Path("/sys/fs/cgroup")
LOCK: Final = Path("/tmp/drahealth-machine.lock")  # tests hold the same lock while they change the machine
CONTROLLERS: Final = ("memory", "cpu", "hugetlb")
V1_HIERARCHIES: Final = ("memory", "cpu", "hugetlb")


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """Directories of the cgroups of pods and containers, laid out as by a kubelet."""

    cgroupfs: Path
    """Mount point of cgroupfs, for the agent's ``--cgroupfs-root``."""
    kubelet_root: str
    """Parent cgroup of kubepods, for the agent's ``--kubelet-cgroup-root``."""
    backend: str
    """``real cgroups (v1 memory, cpu; v2)`` or ``files on tmpfs``; printed with each figure."""
    hierarchies: Mapping[str, Path]
    """Mount points of the hierarchies, by v1 controller; ``v2`` for the unified hierarchy."""
    groups: tuple[tuple[str, str], ...]
    """Pod UID and container ID of each cgroup; the container ID of a pod is empty."""

    def path(self, hierarchy: str, uid: str, container: str) -> Path:
        """Return the directory of a cgroup in one cgroup hierarchy, which is a key of :attr:`hierarchies`.

        An empty ``container`` means the cgroup of the pod.
        """
        return self.hierarchies[hierarchy] / cgroup_path(self.kubelet_root, uid, container)


def cgroup_path(kubelet_root: str, uid: str, container: str) -> Path:
    """Return the path that the kubelet's cgroupfs driver uses for a burstable pod or its container.

    An empty ``container`` means the cgroup of the pod.
    """
    return Path(kubelet_root.strip("/"), "kubepods", "burstable", f"pod{uid}", container)


def cgroup_names(number: int, containers: int = 1) -> tuple[tuple[str, str], ...]:
    """Return the pod UIDs and container IDs of ``number`` made-up cgroups.

    Each pod has ``containers`` containers. The container ID of a pod's own cgroup is empty.
    """
    names: list[tuple[str, str]] = []
    for pod in range(-(-number // (containers + 1))):
        uid = f"{pod:08x}-beac-4000-8000-000000000000"
        names.append((uid, ""))
        names += ((uid, f"{pod:032x}{index:032x}") for index in range(containers))
    return tuple(names[:number])


def open_machine_lock() -> int:
    """Return a descriptor of the lock file, which is created if it is missing. Raises OSError."""
    try:  # another user's file in /tmp can be opened for reading only, and not with O_CREAT
        return os.open(LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Hold, in a ``with`` block, the lock of benchmarks and tests that change machine-wide state.

    Blocks until the lock is free.

    Raises:
        OSError: This process may not open the lock file.
    """
    fd = open_machine_lock()
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
def real_cgroup_tree(number: int, containers: int = 1) -> Iterator[CgroupTree]:
    """Create ``number`` real cgroups in each cgroup hierarchy that the agent reads, and yield their tree.

    Raises:
        OSError: This process may not make cgroups.
    """
    hierarchies = _hierarchies()
    if not hierarchies:
        raise OSError(f"directory {CGROUPFS}: no cgroup hierarchy has the controllers memory, cpu or hugetlb")
    names = ", ".join(["v1 " + name for name in hierarchies if name != "v2"] + ["v2"] * ("v2" in hierarchies))
    root = f"/drahealth-bench-{os.getpid()}"
    tree = CgroupTree(
        CGROUPFS, root, f"real cgroups ({names})", hierarchies, cgroup_names(number, containers)
    )
    with machine_lock(), contextlib.ExitStack() as undo:
        for name, mount in hierarchies.items():
            if name == "v2":
                _enable_controllers(mount, undo)
            undo.callback(_remove_cgroups, mount / root.strip("/"))
            (mount / root.strip("/")).mkdir()
            for uid, container in tree.groups:
                _make_cgroup(mount, cgroup_path(root, uid, container), v2=name == "v2")
        yield tree


def _hierarchies() -> dict[str, Path]:
    if (CGROUPFS / "cgroup.controllers").exists():
        return {"v2": CGROUPFS}
    found = {name: CGROUPFS / name for name in V1_HIERARCHIES if (CGROUPFS / name / "tasks").exists()}
    if (CGROUPFS / "unified" / "cgroup.controllers").exists():
        found["v2"] = CGROUPFS / "unified"
    return found


def _make_cgroup(mount: Path, group: Path, *, v2: bool) -> None:
    """Make a cgroup and its missing parents; in v2, enable all available controllers in the parents."""
    path = mount
    for part in group.parts:
        if v2 and path != mount:
            _enable_controllers(path)
        path /= part
        if not path.exists():
            path.mkdir()


def _enable_controllers(group: Path, undo: contextlib.ExitStack | None = None) -> None:
    """Enable the available controllers for the children of a v2 cgroup.

    ``undo`` disables these controllers when it is closed; None: they stay enabled.
    """
    control = group / "cgroup.subtree_control"
    available = set((group / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    for name in available - set(control.read_text().split()):
        control.write_text(f"+{name}")
        if undo:
            undo.callback(_disable_controller, control, name)


def _disable_controller(control: Path, name: str) -> None:
    with contextlib.suppress(OSError):  # another process uses the controller now
        control.write_text(f"-{name}")


def _remove_cgroups(root: Path) -> None:
    for directory, _, _ in os.walk(root, topdown=False):
        os.rmdir(directory)


def make_pod(tree: CgroupTree, uid: str, container: str) -> None:
    """Make the cgroups of a pod with one container in a tree of real cgroups or of files."""
    for name, mount in tree.hierarchies.items():
        if tree.cgroupfs == CGROUPFS:
            _make_cgroup(mount, cgroup_path(tree.kubelet_root, uid, container), v2=name == "v2")
        else:
            for group in ("", container):
                _write_files(tree.path(name, uid, group), V2_FILES)


def remove_pod(tree: CgroupTree, uid: str) -> None:
    """Remove the cgroups of a pod and its containers from a tree of real cgroups or of files."""
    for name in tree.hierarchies:
        if tree.cgroupfs == CGROUPFS:
            _remove_cgroups(tree.path(name, uid, ""))
        else:
            shutil.rmtree(tree.path(name, uid, ""))


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
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


def _write_files(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


def write_sysfs(root: Path, nodes: int = 1) -> None:
    """Write a made-up sysfs tree: eight CPUs, and a pool of eight 2 MiB hugepages on NUMA node 0.

    Args:
        root: Directory of the tree.
        nodes: Number of NUMA nodes, 1 to 8. Each node after the first one has one of the CPUs, and no pool.
    """
    _write_files(root / "devices/system/cpu", CPU_FILES)
    _write_files(root / "devices/system/node/node0", {"cpulist": f"0-{8 - nodes}\n"})
    for node in range(1, nodes):
        _write_files(root / f"devices/system/node/node{node}", {"cpulist": f"{8 - nodes + node}\n"})
    _write_files(root / "devices/system/node/node0/hugepages/hugepages-2048kB", POOL_FILES)
    _write_files(root / "kernel/mm/hugepages/hugepages-2048kB", MACHINE_POOL_FILES)


def shrink_pool(sysfs: Path) -> None:
    """Remove one page from each 2 MiB hugepage pool in a sysfs tree of :func:`write_sysfs`."""
    for directory in sysfs.rglob("hugepages-2048kB"):
        pages = directory / "nr_hugepages"
        pages.write_text(f"{int(pages.read_text()) - 1}\n")


def write_machine_files(root: Path, controllers: int) -> None:
    """Write rarely changing files of sysfs and procfs for the made-up machine of :func:`write_sysfs`.

    Args:
        root: Parent directory of ``sys`` and ``proc``.
        controllers: Number of memory controllers, each with one memory module; 0: none, as in a virtual
            machine.
    """
    devices = root / "sys/devices/system"
    _write_files(devices / "cpu", CPU_FILES)
    for cpu in range(8):
        topology = {"core_cpus_list": f"{cpu}\n", "physical_package_id": "0\n"}
        _write_files(devices / f"cpu/cpu{cpu}/topology", topology)
    _write_files(devices / "node", {"online": "0\n", "has_memory": "0\n"})
    _write_files(devices / "node/node0", {"meminfo": "Node 0 MemTotal:       65536000 kB\n"})
    for block in range(4):
        _write_files(devices / f"node/node0/memory{block}", {"state": "online\n"})
    for controller in range(controllers):
        _write_files(devices / f"edac/mc/mc{controller}", CONTROLLER_FILES)
        _write_files(devices / f"edac/mc/mc{controller}/dimm0", MODULE_FILES)
    _write_files(root / "proc", PROC_FILES)
    _write_files(root / "proc/pressure", PRESSURE_FILES)


def write_cgroup_files(root: Path, number: int, kubelet_root: str = "/") -> CgroupTree:
    """Write files that imitate ``number`` cgroups of a cgroup v2 mount at ``root``; return their tree.

    ``kubelet_root`` is the parent cgroup of kubepods.
    """
    backend = "files on tmpfs (looks like v2)"
    tree = CgroupTree(root, kubelet_root, backend, {"v2": root}, cgroup_names(number))
    _write_files(root, {"cgroup.controllers": "cpu memory hugetlb\n"})
    for uid, container in tree.groups:
        _write_files(tree.path("v2", uid, container), V2_FILES)
    return tree


def write_cgroup_limits(root: Path, name: str) -> None:
    """Write files that imitate a cgroup v2 mount at ``root``.

    The mount has one cgroup, ``name``, with the limits that ``drahealth audit`` reads.
    """
    limits = {"cpu.weight": "59\n", "cpu.max": "150000 100000\n", "memory.max": "536870912\n"}
    _write_files(root, {"cgroup.controllers": "cpu memory hugetlb\n"})
    _write_files(root / name, {**limits, "hugetlb.2MB.max": "0\n", "hugetlb.2MB.rsvd.max": "0\n"})


@contextlib.contextmanager
def real_or_file_tree(number: int) -> Iterator[tuple[CgroupTree, str]]:
    """Yield a tree of real cgroups, or of files that imitate cgroups, and the reason for the imitation.

    Files imitate cgroups if this process may not create them. The reason is empty for real cgroups.
    """
    with contextlib.ExitStack() as stack:
        try:
            tree = stack.enter_context(real_cgroup_tree(number))
            reason = ""
        except OSError as error:
            reason = f"no real cgroups: {error}"
            tree = write_cgroup_files(stack.enter_context(temporary_directory()), number)
        yield tree, reason


# --- files of pods and claims ------------------------------------------------------------------------------

DRIVER: Final = "gpu.example.com"
POOL: Final = "node-1"
NAMESPACE: Final = "bench"


class NodePaths(NamedTuple):
    """Paths of the files that describe pods and claims of a Kubernetes node."""

    kubelet_dir: Path
    """Kubelet directory with the checkpoint and without sockets."""
    pods: Path
    """List of pods, as saved by kubectl."""
    claims: Path
    """List of claims, as saved by kubectl."""


def write_node_files(directory: Path, pods: int, claims: int) -> NodePaths:
    """Write the kubelet's checkpoint, ``pods.json`` and ``claims.json`` of a made-up Kubernetes node.

    Args:
        directory: Existing directory for the files, which also serves as the kubelet's directory.
        pods: Number of pods; pod ``n`` is ``bench/pod-<n>``.
        claims: Number of claims; claim ``n`` is ``bench/claim-<n>``, device ``gpu-<n>`` for pod ``n % pods``.
    """
    claims_by_pod: list[list[int]] = [[] for _ in range(pods)]
    for number in range(claims):
        claims_by_pod[number % pods].append(number)
    infos = [_claim_info(number, number % pods) for number in range(claims)]
    data = {
        "kind": kubelet_files.CLAIMS_CHECKPOINT_KIND,
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": infos,
    }
    text = json.dumps(data, separators=(",", ":"))
    checkpoint = {"Data": text, "Checksum": zlib.crc32(text.encode())}
    (directory / kubelet_files.CLAIMS_FILE).write_text(json.dumps(checkpoint))
    files = NodePaths(directory, directory / "pods.json", directory / "claims.json")
    _write_list(files.pods, [_pod_object(number, claims) for number, claims in enumerate(claims_by_pod)])
    _write_list(files.claims, [_claim_object(number, number % pods) for number in range(claims)])
    return files


def pod_uid(number: int) -> str:
    """Return the UID of the made-up pod with this number."""
    return f"{number:08x}-0000-4000-8000-00000000beac"


def claim_uid(number: int) -> str:
    """Return the UID of the made-up claim with this number."""
    return f"{number:08x}-0000-4000-8000-000000000c1a"


def _write_list(path: Path, items: Sequence[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=4))


def _claim_info(number: int, pod: int) -> dict[str, Any]:
    device = {
        "PoolName": POOL,
        "DeviceName": f"gpu-{number}",
        "ShareID": None,
        "RequestNames": ["gpus"],
        "CDIDeviceIDs": [f"{DRIVER}/gpu={claim_uid(number)}"],
    }
    return {
        "ClaimUID": claim_uid(number),
        "ClaimName": f"claim-{number}",
        "Namespace": NAMESPACE,
        "PodUIDs": {pod_uid(pod): {}},
        "DriverState": {DRIVER: {"Devices": [device]}},
    }


def _pod_object(number: int, claims: Sequence[int]) -> dict[str, Any]:
    resources = {"claims": [{"name": f"c-{claim}"} for claim in claims]}
    pod = pod_object(f"pod-{number}", pod_uid(number), f"{number:064x}", resources)
    pod["spec"]["resourceClaims"] = [
        {"name": f"c-{claim}", "resourceClaimName": f"claim-{claim}"} for claim in claims
    ]
    return pod


def pod_object(name: str, uid: str, container_id: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return a running pod with one container as an object of the Kubernetes API."""
    status = {
        "name": "main",
        "containerID": f"containerd://{container_id}",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": uid},
        "spec": {"nodeName": POOL, "containers": [{"name": "main", "resources": resources}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


def _claim_object(number: int, pod: int) -> dict[str, Any]:
    result = {"request": "gpus", "driver": DRIVER, "pool": POOL, "device": f"gpu-{number}"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": NAMESPACE, "name": f"claim-{number}", "uid": claim_uid(number)},
        "spec": {"devices": {"requests": [{"name": "gpus"}]}},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": f"pod-{pod}", "uid": pod_uid(pod)}],
        },
    }
