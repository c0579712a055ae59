"""Running pods as kubectl shows them, and cgroup trees of plain files with their expected values."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from cgroup_audit_pods import SYSTEMD, UID, claim, container, pod_object

from agent.model.pod_findings import CgroupSettings, HugepageLimits

CONTAINER: Final = "c0de" * 16
LONG_AGO: Final = "2026-01-02T03:04:05Z"
STARTED: Final = {"running": {"startedAt": LONG_AGO}}
MAX: Final = "max"
GI: Final = 1 << 30

NOW: Final = 1_800_000_000.0
TOP: Final = "/kubepods.slice/kubepods-burstable.slice"
POD: Final = f"{TOP}/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
SCOPE: Final = f"{POD}/cri-containerd-{CONTAINER}.scope"
PAGES: Final = tuple(HugepageLimits(size, 0, 0) for size in SYSTEMD.hugepages_kib)

Object = dict[str, Any]
Files = Mapping[str, object]

UNUSED_KNOBS: Final[Files] = {
    "cgroup.controllers": "cpuset cpu io memory hugetlb pids",
    "cpu.stat": "usage_usec 1\nnr_periods 0\nnr_throttled 0",
    "cpuset.cpus": "",
    "cpuset.cpus.effective": "0-7",
    "hugetlb.2MB.max": 0,
    "hugetlb.2MB.rsvd.max": 0,
    "hugetlb.1GB.max": 0,
    "hugetlb.1GB.rsvd.max": 0,
}
"""Files of a v2 cgroup for resources that the pod does not request."""
POD_KNOBS: Final[Files] = {
    "cpu.weight": 274,
    "cpu.max": "900000 100000",
    "memory.max": 9 * GI,
    **UNUSED_KNOBS,
}
"""Files of the cgroup of kep_pod()."""
CONTAINER_KNOBS: Final[Files] = {
    **POD_KNOBS,
    "cpu.weight": 174,
    "memory.high": MAX,
    "memory.swap.max": 0,
}
CLASS_KNOBS: Final[Files] = {
    "cgroup.controllers": "cpuset cpu memory hugetlb",
    "cpu.weight": 1,
    "memory.max": MAX,
    "memory.low": 0,
    **{name: MAX for name in UNUSED_KNOBS if name.startswith("hugetlb.")},
}
SIZES: Final = (2048, 1048576)
KUBEPODS_KNOBS: Final[Files] = {
    "cgroup.controllers": "cpuset cpu memory hugetlb",
    "cpu.weight": 313,
    "memory.max": 64 * GI,
    "memory.min": 0,
}
"""Files of the cgroup kubepods of a node with 8 CPUs and 64 GiB, of which nothing is reserved."""


def knobs(**given: object) -> CgroupSettings:
    """Return settings of a cgroup: CPU 500m to 1, memory 256Mi to 512Mi, no hugepages, and those given."""
    values = {
        "controllers": frozenset({"cpu", "memory", "hugetlb", "cpuset"}),
        "weight": 20,
        "quota_us": 100_000,
        "period_us": 100_000,
        "throttled": 0,
        "memory": 512 << 20,
        "cpus": 0,
        "effective": 3,
        "pages": PAGES,
    }
    return CgroupSettings(**{**values, **given})


def kep_pod(
    name: str = "p", uid: str = UID, ident: str = CONTAINER, *, started: str = LONG_AGO, node: str = "n1"
) -> Object:
    """Return the first example of KEP-5517, Burstable: requests 2 CPUs, 2Gi; limits 4, 4Gi; claim 5, 5Gi."""
    made = pod_object(
        container("c1", "cpu=2 memory=2Gi", "cpu=4 memory=4Gi"),
        claims=[claim(f"{name}-cpus", "c1", "cpu=5 memory=5Gi")],
        qosClass="Burstable",
        phase="Running",
        containerStatuses=[running_status("c1", ident, started)],
    )
    made["metadata"] |= {"name": name, "uid": uid}
    made["spec"] |= {"nodeName": node, "resourceClaims": [{"name": "x", "resourceClaimName": f"{name}-cpus"}]}
    return made


def running_status(name: str, ident: str = CONTAINER, started: str = LONG_AGO) -> Object:
    """Return the status of a running container."""
    state = {"running": {"startedAt": started}}
    return {"name": name, "containerID": f"containerd://{ident}", "state": state}


def write_pod_list(path: Path, *pods: Object) -> Path:
    """Write the pods as ``kubectl get -o json`` does; return the path."""
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(pods)}))
    return path


def systemd_path(uid: str = UID, ident: str = "") -> str:
    """Return the systemd path of a Burstable pod's cgroup, or of a container's if ``ident`` is given."""
    pod = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    return f"{pod}/cri-containerd-{ident}.scope" if ident else pod


def write_cgroup(root: Path, path: str, files: Files) -> None:
    """Write a cgroup as plain files."""
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name).write_text(f"{value}\n")


def v2_tree(root: Path, pods: Iterable[Object], burstable: int) -> Path:
    """Write correct cgroups for pods of kep_pod(), in systemd's naming; return the root.

    Args:
        burstable: CPU weight of the Burstable class.
    """
    write_cgroup(root, "", {"cgroup.controllers": "cpuset cpu memory hugetlb"})
    write_cgroup(root, "kubepods.slice", KUBEPODS_KNOBS)
    write_cgroup(root, "kubepods.slice/kubepods-besteffort.slice", CLASS_KNOBS)
    write_cgroup(root, "kubepods.slice/kubepods-burstable.slice", {**CLASS_KNOBS, "cpu.weight": burstable})
    for pod in pods:
        uid = pod["metadata"]["uid"]
        ident = pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        write_cgroup(root, systemd_path(uid), POD_KNOBS)
        write_cgroup(root, systemd_path(uid, ident), CONTAINER_KNOBS)
    return root


def sysfs_tree(root: Path) -> Path:
    """Create a ``/sys`` with hugepages of 2 MiB and 1 GiB and 8 CPUs; return its root."""
    (root / "devices/system/cpu").mkdir(parents=True)
    for name in ("online", "present"):
        (root / "devices/system/cpu" / name).write_text("0-7\n")
    for size in SIZES:
        (root / f"kernel/mm/hugepages/hugepages-{size}kB").mkdir(parents=True)
    return root


def procfs_tree(root: Path, config: str = "", *flags: str, swap_kib: int = 0) -> Path:
    """Create a ``/proc`` of a machine with 64 GiB, with the process of a kubelet; return its root.

    Args:
        config: Fields of the kubelet's configuration file, as YAML.
        flags: Flags of the kubelet other than ``--config``.
    """
    (root / "77").mkdir(parents=True)
    (root / "meminfo").write_text(f"MemTotal:       {64 << 20} kB\nSwapTotal:      {swap_kib} kB\n")
    (root / "77/comm").write_text("kubelet\n")
    arguments = ("/usr/bin/kubelet", "--config=/var/lib/kubelet/config.yaml", *flags)
    (root / "77/cmdline").write_bytes(b"".join(argument.encode() + b"\0" for argument in arguments))
    (root / "77/root/var/lib/kubelet").mkdir(parents=True)
    text = f"apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n{config}"
    (root / "77/root/var/lib/kubelet/config.yaml").write_text(text)
    return root


def write_process(procfs: Path, pid: int, score: int, started: int = 100) -> None:
    """Write a process with an OOM score; ``started``: its start time in clock ticks."""
    (procfs / str(pid)).mkdir(parents=True)
    (procfs / f"{pid}/oom_score_adj").write_text(f"{score}\n")
    (procfs / f"{pid}/stat").write_text(f"{pid} (a (b) c) S {'0 ' * 18}{started} 0 0\n")
