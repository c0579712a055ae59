"""Taints through the driver in Go: what the agent calls for is published, dated, and leaves."""

from collections.abc import Mapping
from typing import Any

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, GoNode

QUICK = '[taints]\nquiet = "1s"\n'
KEY = f"{GO}/mem.hugepages.pool_shrunk"


def taints_of(*slices: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """What these ResourceSlices say, by device."""
    devices = [device for one in slices for device in one["spec"]["devices"]]
    return {device["name"]: device.get("taints", []) for device in devices}


def wait_published(node: GoNode, **tainted: int) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the taints once these devices, and no others, have so many."""
    wanted = {CPU_0: 0, CPU_1: 0, PAGES: tainted.get("pages", 0)}

    def published() -> dict[str, list[Mapping[str, Any]]] | None:
        found = taints_of(*node.api.slices(GO))
        return found if {device: len(taints) for device, taints in found.items()} == wanted else None

    return node.kubelet.wait_for(published, f"ResourceSlices with {wanted} taints")  # 5 s apart


def test_a_taint_comes_with_its_date_and_goes_with_its_cause(node: GoNode) -> None:
    node.agent(config=QUICK)
    node.driver()
    wait_published(node)
    node.sysfs.resize(7)
    (taint,) = wait_published(node, pages=1)[PAGES]
    assert (taint["key"], taint["effect"], taint.get("value", "")) == (KEY, "NoSchedule", "")
    node.sysfs.resize(8)
    wait_published(node)
    assert {one["spec"]["pool"]["generation"] for one in node.api.slices(GO)} == {1}


def test_a_taint_outlives_driver_and_agent_and_grows_no_younger(node: GoNode) -> None:
    """Nobody takes it back meanwhile: who knows nothing of a device publishes nothing of it."""
    agent, driver = node.agent(config=QUICK), node.driver()
    node.wait_healthy(PAGES)
    node.sysfs.resize(7)
    (before,) = wait_published(node, pages=1)[PAGES]
    seen = node.api.version
    assert driver.end() == 0
    agent.end()
    node.driver()
    node.wait_away(PAGES)
    node.agent(config=QUICK)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    node.api.wipe(GO)  # as a kubelet does when it starts
    assert wait_published(node, pages=1)[PAGES] == [before]
    assert {len(taints_of(one)[PAGES]) for one in node.api.published(GO, seen)} == {1}
