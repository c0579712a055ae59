"""A pod from its first prepare to its end, with each kubelet that the driver can meet."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from kubelet import ResourceHealth
from kubelet.history import Called, Connected, StreamOpened
from kubelet_real.implementations import MARKS

from driver_scenarios.node import CPU_1, HOSTDEV, NODE, PAGES, Ask, Node, parameters

ALPHA, V1 = "v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"
KUBELETS = [
    pytest.param({"version": "1.34", "health": True}, ALPHA, id="1.34"),
    pytest.param({"version": "1.35", "health": True}, ALPHA, id="1.35"),
    pytest.param({"version": "1.36"}, ALPHA, id="1.36"),
    pytest.param({"version": "1.37"}, V1, id="1.37"),
    pytest.param({"version": "1.36", "real": True}, ALPHA, id="real-1.36", marks=MARKS),
    pytest.param({"version": "1.37", "real": True}, V1, id="real-1.37", marks=MARKS),
]
"""Kubelet, with the gate ResourceHealthStatus if it must be set, and the health service that it calls."""
ADVICE = (
    ". Advice: write the number to nr_hugepages and read it back; if it stays lower, free memory or reboot"
)
BOTH = Ask("both", {"pages": PAGES, "cpu": CPU_1}, [parameters("HugepagesParameters", "pages", pages=4)])


@pytest.mark.parametrize(("kubelet", "service"), KUBELETS)
def test_pod_runs_from_prepare_to_unprepare(
    make_node: Callable[..., Node], kubelet: dict[str, Any], service: str
) -> None:
    """e2e_node: one connection for all calls; one connection for service and health"""
    node = make_node(**kubelet)
    node.hostdev()
    (plugin,) = node.kubelet.wait_registered(HOSTDEV)
    node.wait_healthy(PAGES, CPU_1)
    pod = node.run_and_wait("it", BOTH)

    (spec,) = [json.loads(path.read_text()) for path in node.cdi.iterdir()]
    ids = [f"{HOSTDEV}/device={device['name']}" for device in spec["devices"]]
    assert node.cdi_files() == {BOTH.uid}
    assert [device["containerEdits"]["env"] for device in spec["devices"]] == [
        [f"HOSTDEV_HUGEPAGES=/dev/hugepages/{PAGES}", "HOSTDEV_NUMA=0"],
        ["HOSTDEV_CPUS=1"],
    ]
    (mount,) = spec["devices"][0]["containerEdits"]["mounts"]
    assert mount["options"] == ["nosuid", "nodev", "pagesize=2048K", "size=8192K", "mode=1777"]
    status = node.kubelet.pod_status(pod)
    assert status.resources == {
        "main": {"claim:both": tuple(ResourceHealth(cdi_id, "Healthy", "") for cdi_id in ids)}
    }
    assert len(set(ids)) == 2, "each device has an own resourceID"

    node.end(pod)
    assert node.cdi_files() == set()
    assert node.kubelet.claim_info("both") is None
    assert [(call.method, call.error) for call in node.kubelet.history.of(Called)] == [
        ("NodePrepareResources", ""),
        ("NodeUnprepareResources", ""),
    ]
    order = [entry for entry in node.kubelet.history if isinstance(entry, Connected | StreamOpened | Called)]
    # threads of their own notice the connection and open the stream on it
    assert {type(entry) for entry in order[:2]} == {Connected, StreamOpened}
    assert [type(entry) for entry in order[2:]] == [Called, Called]
    assert {entry.endpoint for entry in order} == {plugin.endpoint}
    assert [opened.service for opened in node.kubelet.history.of(StreamOpened)] == [service]


@pytest.mark.parametrize(("kubelet", "_"), KUBELETS[1:])
def test_unhealthy_device_is_shown_in_its_pods_status_only(
    make_node: Callable[..., Node], kubelet: dict[str, Any], _: str
) -> None:
    """e2e_node: transitions Healthy, Unhealthy, Healthy"""
    node = make_node(**kubelet)
    messages = node.kubelet.version.reads_message
    node.hostdev()
    node.wait_healthy(PAGES, CPU_1)
    pod = node.run_and_wait("it", BOTH)
    node.sysfs.resize(7)
    text = "mem.hugepages.pool_shrunk: 7 pages of 2mi on NUMA node 0, 8 declared" + ADVICE
    node.wait_resources(pod, [("Unhealthy", text if messages else ""), ("Healthy", "")])
    node.sysfs.resize(8)
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])


@pytest.mark.parametrize("version", ["1.34", "1.35"])
def test_pods_run_without_the_health_feature_gate(make_node: Callable[..., Node], version: str) -> None:
    """e2e_node: nothing published when the gate is off"""
    node = make_node(version=version)
    node.hostdev()
    node.kubelet.wait_registered(HOSTDEV)
    pod = node.run_and_wait("it", BOTH)
    assert node.kubelet.pod_status(pod).resources == {}
    assert node.kubelet.history.of(StreamOpened) == []
    assert node.kubelet.health(HOSTDEV, NODE, PAGES).health == "Unknown"


def test_strict_kubelet_accepts_the_driver(
    make_node: Callable[..., Node],
) -> None:
    """e2e_node: registration"""
    node = make_node(version="1.38")
    node.hostdev("--pod-uid", "0f3c1d2e-4b5a-6978-8796-a5b4c3d2e1f0")
    node.kubelet.wait_registered(HOSTDEV)
    node.end(node.run_and_wait("it", BOTH))


@pytest.mark.parametrize(("kubelet", "_"), KUBELETS[2:])
def test_concurrent_pods_are_prepared_and_shown_separately(
    make_node: Callable[..., Node], kubelet: dict[str, Any], _: str
) -> None:
    """e2e_node: concurrent pods and health"""
    node = make_node(**kubelet)
    node.hostdev("--hugepage-shares", "8")
    shares = [PAGES.removesuffix("0") + str(share) for share in range(8)]
    node.wait_healthy(*shares)
    pods = [node.run(f"pod-{i}", Ask(f"claim-{i}", {"pages": share})) for i, share in enumerate(shares)]
    for pod in pods:
        node.kubelet.wait_running(pod)
    assert node.cdi_files() == {f"uid-claim-{i}" for i in range(8)}
    node.sysfs.resize(4)
    for pod in pods:
        text = "mem.hugepages.pool_shrunk: 4 pages of 2mi on NUMA node 0, 8 declared by 8 devices" + ADVICE
        node.wait_resources(pod, [("Unhealthy", text)])
    node.end(*pods)
    assert node.cdi_files() == set()
