"""The example driver's devices in ResourceSlices, and the arguments that name its API server."""

from pathlib import Path

import pytest
from hostdev_driver.__main__ import main
from hostdev_driver.slices import slice_device
from hostdev_samples import host_of, paper

__all__ = ["paper"]


def test_slice_device_has_the_attributes_for_selectors(paper: Path) -> None:
    found = {name: slice_device(part).to_object() for name, part in host_of(paper).found.items()}
    assert found["hugepages-2mi-node0-0"] == {
        "name": "hugepages-2mi-node0-0",
        "attributes": {
            "kind": {"string": "hugepages"},
            "pageSize": {"string": "2Mi"},
            "numaNode": {"int": 0},
        },
        "capacity": {"pages": {"value": "512"}, "memory": {"value": "1Gi"}},
    }
    assert found["cpus-node1-0"] == {
        "name": "cpus-node1-0",
        "attributes": {"kind": {"string": "cpu"}, "numaNode": {"int": 1}},
        "capacity": {"cpus": {"value": "3"}},
    }
    assert found["gpu-3"]["attributes"] == {
        "kind": {"string": "gpu"},
        "pciAddress": {"string": "0000:3b:00.0"},
    }


def test_driver_outside_a_cluster_names_the_missing_variables(
    tmp_path: Path, paper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    roots = ["--sysfs-root", str(paper / "sys"), "--procfs-root", str(paper / "proc")]
    assert main(["--kubelet-dir", str(tmp_path), *roots]) == 78
    assert "no API server is configured" in caplog.text
