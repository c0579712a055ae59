"""Pods with v2 cgroups in both namings, and the output of ``drahealth audit``, without an evaluation.

Values are written as kubelet, runtime and systemd do, so that the kernel rounds and limits them.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from audit_samples import running_status, write_pod_list
from cgroup_audit_pods import claim, container, pod_object
from kubelet_files import DRIVER, checkpoint, device, devices
from kubelet_files import claim as prepared

from agent.native.cgroup_settings import CgroupSettingReader

CGROUPS: Final = Path("/sys/fs/cgroup")
FILES: Final = Path("/tmp/audit")
CONTROLLERS: Final = "+cpu +cpuset +memory +hugetlb"
MIB: Final = 1 << 20
LIMIT: Final = 100_000_000 + 128 * MIB
NAMES: Final = ("kept", "wrong", "gone")
READS: Final = 300

Object = dict[str, Any]
Values = Mapping[str, object]


def uid_of(name: str) -> str:
    return f"0f3c7a52-4a4e-4a52-9f0e-00000000000{NAMES.index(name)}"


def ident_of(name: str) -> str:
    return f"{NAMES.index(name)}" * 64


def audits(report: Callable[[Object], None]) -> None:
    """Audit a tree of each naming, then a container that is created and removed during the reads."""
    pods = write_files()
    for naming in ("cgroupfs", "systemd"):
        flags = ["--pods", pods, "--kubelet-dir", FILES, "--runtime-dir", FILES, "--node-name", "vm"]
        flags += ["--kubelet-cgroup-root", make_tree(naming), "-o", "json"]
        command = [sys.executable, "-m", "agent", "audit", *map(str, flags)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(done.stdout) if done.stdout else None
        report({"step": f"audit-{naming}", "status": done.returncode, "found": found, "error": done.stderr})
    report({"step": "audit-restless", "found": read_restless(CGROUPS / "restless")})


# --- files -------------------------------------------------------------------------------------------------


def pod(name: str) -> Object:
    """Return a pod: CPU 200m to 1255m, memory 64Mi to 100M, a claim of 1500m, 128Mi, 64Mi pages and CPU 1."""
    made = pod_object(
        container("c1", "cpu=200m memory=64Mi", "cpu=1255m memory=100M", claims=[{"name": "x"}]),
        claims=[claim(f"{name}-cpus", "c1", "cpu=1500m memory=128Mi hugepages-2Mi=64Mi")],
        qosClass="Burstable",
        phase="Running",
        containerStatuses=[running_status("c1", ident_of(name))],
    )
    made["metadata"] |= {"name": name, "uid": uid_of(name)}
    made["spec"]["containers"][0]["resources"]["claims"] = [{"name": "x"}]
    made["spec"]["resourceClaims"] = [{"name": "x", "resourceClaimName": f"{name}-cpus"}]
    return made


def write_files() -> Path:
    """Write the files of kubelet and driver, and the pods as kubectl does; return the path of the pods."""
    (FILES / "devices.d").mkdir(parents=True)
    (FILES / f"devices.d/{DRIVER}.toml").write_text(
        'version = 1\npool = "vm"\n[[device]]\nname = "own"\nkind = "cpu"\ncpus = "1"\nexclusive = true\n'
    )
    given = [
        prepared(name, name=f"{name}-cpus", namespace="default", pods=[uid_of(name)], drivers=own)
        for name in NAMES
        for own in [devices(device("own", pool="vm"))]
    ]
    (FILES / "dra_manager_state").write_bytes(checkpoint(given))
    (FILES / "cpu_manager_state").write_text('{"policyName":"none","defaultCpuSet":"","checksum":1}')
    return write_pod_list(FILES / "pods.json", *map(pod, NAMES))


# --- cgroups -----------------------------------------------------------------------------------------------


def make_tree(naming: str) -> str:
    """Create the cgroups, correct except for one pod and one missing container; return the kubelet's root."""
    quota = 276_000 if naming == "systemd" else 275_500  # systemd rounds it up
    pages = {"hugetlb.2MB.max": 64 * MIB, "hugetlb.2MB.rsvd.max": 64 * MIB}
    pages |= {"hugetlb.1GB.max": 0, "hugetlb.1GB.rsvd.max": 0}
    limits = {"cpu.max": f"{quota} 100000", "memory.max": LIMIT, **pages}
    make_cgroup(path_of(naming, "besteffort"), {"cpu.weight": 1})
    make_cgroup(path_of(naming, "burstable"), {"cpu.weight": 200})
    for name in NAMES:
        make_cgroup(path_of(naming, "burstable", name), {"cpu.weight": 67, **limits})
        if name != "gone":
            make_cgroup(
                path_of(naming, "burstable", name, ident_of(name)),
                {"cpu.weight": 8, "cpuset.cpus": "1", **limits},
            )
    write(path_of(naming, "burstable", "wrong"), {"cpu.weight": 8, "memory.max": "max"})
    write(
        path_of(naming, "burstable", "wrong", ident_of("wrong")),
        {
            "cpu.max": "125500 100000",
            "memory.max": 100_000_000,
            "cpuset.cpus": "0-1",
            "hugetlb.2MB.max": 0,
            "hugetlb.1GB.rsvd.max": "max",
        },
    )
    return f"/audit-{naming}"


def path_of(naming: str, *levels: str) -> Path:
    """Return the cgroup path of a QoS class, or of a pod or container in the class."""
    parts = [levels[0], *(f"pod{uid_of(name)}" for name in levels[1:2])]
    if naming == "cgroupfs":
        return CGROUPS.joinpath("audit-cgroupfs", "kubepods", *parts, *levels[2:])
    words = [part.replace("-", "_") for part in ("audit-systemd", "kubepods", *parts)]
    slices = ["-".join(words[: count + 1]) + ".slice" for count in range(len(words))]
    return CGROUPS.joinpath(*slices, *(f"cri-containerd-{ident}.scope" for ident in levels[2:]))


def make_cgroup(at: Path, values: Values) -> None:
    """Create a cgroup with every controller, which its parents must delegate."""
    for parent in reversed([parent for parent in at.parents if parent.is_relative_to(CGROUPS)]):
        parent.mkdir(exist_ok=True)
        (parent / "cgroup.subtree_control").write_text(CONTROLLERS)
    at.mkdir()
    write(at, values)


def write(at: Path, values: Values) -> None:
    for file, value in values.items():
        (at / file).write_text(f"{value}")


# --- a container that comes and goes -----------------------------------------------------------------------


def read_restless(at: Path) -> dict[str, int]:
    """Count the different results of reading a cgroup that is created and removed repeatedly."""
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            at.mkdir()
            at.rmdir()

    seen: dict[str, int] = {}
    going = threading.Thread(target=come_and_go)
    going.start()
    try:
        with CgroupSettingReader(CGROUPS, (2048,)) as reader:
            for _ in range(READS):
                knobs = reader.read(f"/{at.name}")
                page = knobs.pages[0] if knobs else None
                text = repr(knobs and page and (knobs.weight, knobs.quota_us, knobs.memory, page.max))
                seen[text] = seen.get(text, 0) + 1
    finally:
        done.set()
        going.join()
    return seen
