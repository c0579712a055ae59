"""A host on paper for the example driver, and claims for it."""

from pathlib import Path
from typing import Any

import pytest
from hostdev_driver.host import Host
from hostdev_driver.parameters import VERSION

import drahealth

DRIVER = "hostdev.drahealth.example.com"
NODE = "node-1"
REF = drahealth.ClaimRef("team-a", "train", "uid-1")


def claim_object(**metadata: str) -> dict[str, Any]:
    result = {"request": "g", "driver": DRIVER, "pool": NODE, "device": "gpu-3"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {**REF._asdict(), **metadata},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def pool(root: Path, numa: int, size_kib: int, pages: int, free: int | None = None) -> None:
    directory = root / f"devices/system/node/node{numa}/hugepages/hugepages-{size_kib}kB"
    write(directory / "nr_hugepages", pages)
    write(directory / "free_hugepages", pages if free is None else free)


def gpu(
    root: Path, address: str, minor: int, *, vendor: str = "0x10de", device_class: str = "0x030200"
) -> None:
    write(root / f"sys/bus/pci/devices/{address}/vendor", vendor)
    write(root / f"sys/bus/pci/devices/{address}/class", device_class)
    text = f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\nGPU Excluded:\t No"
    write(root / f"proc/driver/nvidia/gpus/{address}/information", text)


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """Two NUMA nodes of two cores of two threads each; CPU 7 is offline; hugepages on one of them; a GPU."""
    sysfs = tmp_path / "host/sys"
    write(sysfs / "devices/system/cpu/online", "0-6")
    write(sysfs / "devices/system/cpu/present", "0-7")
    for numa, cpus in enumerate(["0-1,4-5", "2-3,6-7"]):
        write(sysfs / f"devices/system/node/node{numa}/cpulist", cpus)
    for cpu in range(7):
        siblings = f"{cpu % 4},{cpu % 4 + 4}" if cpu % 4 != 3 else "3"
        write(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
    pool(sysfs, 0, 2048, 512)
    pool(sysfs, 0, 1048576, 2)
    pool(sysfs, 1, 2048, 0)
    gpu(tmp_path / "host", "0000:3b:00.0", 3)
    return tmp_path / "host"


def host_of(paper: Path, **options: Any) -> Host:
    return Host(NODE, paper / "sys", paper / "proc", **options)


def parts(host: Host) -> dict[str, object]:
    return {name: found.device.part for name, found in host.found.items()}


def claim_of(
    *devices: tuple[str, str], uid: str = "uid-1", configs: Any = (), name: str = "c"
) -> drahealth.Claim:
    """Return a claim with allocated devices, each for a request."""
    return drahealth.Claim(
        "team-a",
        name,
        uid,
        devices=tuple(drahealth.ClaimDevice(request, DRIVER, NODE, device) for request, device in devices),
        configs=tuple(configs),
    )


def parameters_of(kind: str, *requests: str, **fields: object) -> drahealth.ClaimConfig:
    return drahealth.ClaimConfig("FromClaim", requests, {"apiVersion": VERSION, "kind": kind, **fields})
