"""Pods that run, as kubectl shows them, and cgroups of plain files for them, both naming values by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from enforce_pods import UID, claim, container, pod_object

CONTAINER: Final = "c0de" * 16
LONG_AGO: Final = "2026-01-02T03:04:05Z"
STARTED: Final = {"running": {"startedAt": LONG_AGO}}
MAX: Final = "max"
GI: Final = 1 << 30

Object = dict[str, Any]
Files = Mapping[str, object]

NOTHING_ELSE: Final[Files] = {
    "cgroup.controllers": "cpuset cpu io memory hugetlb pids",
    "cpu.stat": "usage_usec 1\nnr_periods 0\nnr_throttled 0",
    "cpuset.cpus": "",
    "cpuset.cpus.effective": "0-7",
    "hugetlb.2MB.max": 0,
    "hugetlb.2MB.rsvd.max": 0,
    "hugetlb.1GB.max": 0,
    "hugetlb.1GB.rsvd.max": 0,
}
"""What a cgroup of v2 says of which its pod asks for nothing."""
POD: Final[Files] = {"cpu.weight": 274, "cpu.max": "900000 100000", "memory.max": 9 * GI, **NOTHING_ELSE}
"""Of :func:`walk`'s pod."""
ITS_CONTAINER: Final[Files] = {**POD, "cpu.weight": 174}
CLASS: Final[Files] = {
    "cgroup.controllers": "cpuset cpu memory hugetlb",
    "cpu.weight": 1,
    **{name: MAX for name in NOTHING_ELSE if name.startswith("hugetlb.")},
}
SIZES: Final = (2048, 1048576)


def walk(
    name: str = "p", uid: str = UID, ident: str = CONTAINER, *, started: str = LONG_AGO, node: str = "n1"
) -> Object:
    """KEP-5517's first walk: 2 CPUs and 2Gi, limits 4 and 4Gi, and a claim of 5 and 5Gi; Burstable."""
    made = pod_object(
        container("c1", "cpu=2 memory=2Gi", "cpu=4 memory=4Gi"),
        claims=[claim(f"{name}-cpus", "c1", "cpu=5 memory=5Gi")],
        qosClass="Burstable",
        phase="Running",
        containerStatuses=[running("c1", ident, started)],
    )
    made["metadata"] |= {"name": name, "uid": uid}
    made["spec"] |= {"nodeName": node, "resourceClaims": [{"name": "x", "resourceClaimName": f"{name}-cpus"}]}
    return made


def running(name: str, ident: str = CONTAINER, started: str = LONG_AGO) -> Object:
    """A container's status."""
    state = {"running": {"startedAt": started}}
    return {"name": name, "containerID": f"containerd://{ident}", "state": state}


def kubectl(path: Path, *pods: Object) -> Path:
    """The file that kubectl writes of them."""
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(pods)}))
    return path


def slices(uid: str = UID, ident: str = "") -> str:
    """Where systemd has a burstable pod's cgroup, or its container's."""
    pod = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    return f"{pod}/cri-containerd-{ident}.scope" if ident else pod


def write_cgroup(root: Path, path: str, files: Files) -> None:
    """A cgroup of plain files."""
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name).write_text(f"{value}\n")


def v2_tree(root: Path, pods: Iterable[Object], burstable: int) -> Path:
    """Cgroups for the pods of :func:`walk`, all as promised, in systemd's naming.

    Args:
        burstable: Weight of their class.
    """
    write_cgroup(root, "", {"cgroup.controllers": "cpuset cpu memory hugetlb"})
    write_cgroup(root, "kubepods.slice", {"cgroup.controllers": "cpuset cpu memory hugetlb"})
    write_cgroup(root, "kubepods.slice/kubepods-besteffort.slice", CLASS)
    write_cgroup(root, "kubepods.slice/kubepods-burstable.slice", {**CLASS, "cpu.weight": burstable})
    for one in pods:
        uid = one["metadata"]["uid"]
        ident = one["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        write_cgroup(root, slices(uid), POD)
        write_cgroup(root, slices(uid, ident), ITS_CONTAINER)
    return root


def sysfs_tree(root: Path) -> Path:
    """A ``/sys`` that has hugepages of 2 MiB and 1 GiB."""
    for size in SIZES:
        (root / f"kernel/mm/hugepages/hugepages-{size}kB").mkdir(parents=True)
    return root
