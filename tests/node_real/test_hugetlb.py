"""Hugepage limits on a whole node, with a container runtime that sets them and with one that does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from wire.serving import eventually

from node_real.node import GO_DRIVER, NODE, WAIT_S, RealNode, is_ready
from node_real.test_node import EXPECTED, allocated_device, audit, audit_verdicts
from node_real.workloads import (
    GO_CLASS,
    PODS,
    RESOURCE,
    create_claim,
    create_pod,
    has_health,
    phase_is,
    resource_status,
)

pytestmark = pytest.mark.usefixtures("clean")

LIMIT: Final = 4 << 20
RESOURCES: Final = {"limits": {"cpu": "50m", "memory": "32Mi", "hugepages-2Mi": "4Mi"}}
PAGES_KIB: Final = 2048


@contextmanager
def containerd_with(node: RealNode, *, hugetlb: bool) -> Iterator[None]:
    """Containerd runs with or without hugetlb limits of containers; without, its default, afterwards."""

    def restart(*, hugetlb: bool) -> None:
        node.stop("containerd")
        node.start_containerd(hugetlb=hugetlb)
        node.api.wait(f"/api/v1/nodes/{NODE}", is_ready, "Ready with the new containerd")

    if not hugetlb:
        yield
        return
    restart(hugetlb=True)
    try:
        yield
    finally:
        restart(hugetlb=False)


@pytest.mark.parametrize(
    "hugetlb", [pytest.param(False, id="containerds-default"), pytest.param(True, id="with-limits")]
)
def test_hugepage_limits_of_either_runtime_are_as_expected(
    node: RealNode, go_driver: None, hugetlb: bool
) -> None:
    if not node.has_hugetlb():
        pytest.skip(f"pods have no hugetlb here: {node.log('namespaces').strip()}")
    with containerd_with(node, hugetlb=hugetlb):
        right, lowered = (paged_pod(node, name) for name in ("paged", "lowered"))
        create_pod(node, "without-pages")
        node.api.wait(f"{PODS}/without-pages", phase_is("Running"), "Running")
        eventually(lambda: "quiet" not in audit_verdicts(node), "the audit without recent starts", WAIT_S)

        found = audit(node)
        assert {limit["verdict"] for limit in page_limits(found)} <= EXPECTED
        levels = {
            limit["level"]: limit
            for limit in page_limits(found, "paged")
            if limit["knob"] == "hugepages limit"
        }
        assert levels["pod"]["actual"] == LIMIT
        assert levels["container"]["expected"] == [LIMIT]
        assert (levels["container"]["actual"] == LIMIT) is hugetlb, levels["container"]
        named = any("disable_hugetlb_controller" in note for note in found["notes"])
        assert named is not hugetlb

        lower_limit(node, lowered)  # what the agent's audit finds, so it has audited the other pod, too
        node.api.wait(lowered, has_health("Healthy", "cgroup.lower: pod default/lowered: 2MB"), "the finding")
        status = resource_status(node.api.call("GET", right))
        assert [(health.health, health.message) for health in status] == [("Healthy", "")]
        tainted = tainted_devices(node)
        assert allocated_device(node, "paged") not in tainted, tainted


def paged_pod(node: RealNode, name: str) -> str:
    """Create a pod with a claim of the driver in Go and hugepages of its own; wait until it is Healthy."""
    create_claim(node, name, GO_CLASS)
    pod = create_pod(node, name, name, resources=RESOURCES)
    node.api.wait(pod, phase_is("Running"), "Running")
    node.api.wait(pod, has_health("Healthy"), "Healthy")
    return pod


def page_limits(found: Any, pod: str = "") -> list[dict[str, Any]]:
    """Return the comparisons of hugepage limits in an audit, of one pod or of all."""
    return [
        knob
        for found_pod in found["pods"]
        for knob in found_pod["knobs"]
        if knob["sizeKiB"] == PAGES_KIB and pod in {"", found_pod["name"]}
    ]


def lower_limit(node: RealNode, pod: str) -> None:
    """Halve the hugepage limit of a pod's cgroup."""
    uid = node.api.call("GET", pod)["metadata"]["uid"]
    names = " -o ".join(f"-path '*/pod{uid}/hugetlb.2MB.{name}'" for name in ("limit_in_bytes", "max"))
    node.run("sh", "-c", f"echo {LIMIT // 2} >$(find /sys/fs/cgroup {names})")


def tainted_devices(node: RealNode) -> set[str]:
    """Return the devices of the driver in Go that have a taint."""
    slices = node.api.call("GET", f"{RESOURCE}/resourceslices?fieldSelector=spec.driver%3D{GO_DRIVER}")
    devices = [device for item in slices["items"] for device in item["spec"].get("devices") or []]
    assert devices
    return {device["name"] for device in devices if device.get("taints")}
