"""Taints of the agent that the Go driver publishes in its ResourceSlices."""

import time
from collections.abc import Mapping
from typing import Any

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, GoNode

FIRST_TAINTS_S = 5
"""Time for which the client waits for an answer of the agent [s]; a busy machine may need longer."""
QUICK = '[taints]\nquiet = "1s"\n'
KEY = f"{GO}/mem.hugepages.pool_shrunk"


def taints_of(*slices: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the taints in ResourceSlices, by device."""
    devices = [device for device_slice in slices for device in device_slice["spec"]["devices"]]
    return {device["name"]: device.get("taints", []) for device in devices}


def wait_published(node: GoNode, **tainted: int) -> dict[str, list[Mapping[str, Any]]]:
    """Wait until exactly these devices have these numbers of taints; return the taints."""
    expected = {CPU_0: 0, CPU_1: 0, PAGES: tainted.get("pages", 0)}

    def published_taints() -> dict[str, list[Mapping[str, Any]]] | None:
        found = taints_of(*node.api.slices(GO))
        return found if {device: len(taints) for device, taints in found.items()} == expected else None

    return node.kubelet.wait_for(
        published_taints, f"ResourceSlices with {expected} taints"
    )  # updates are 5 s apart


def test_taint_is_published_with_its_cause_and_removed_with_it(node: GoNode) -> None:
    node.agent(config=QUICK)
    node.driver()
    wait_published(node)
    node.sysfs.resize(7)
    (taint,) = wait_published(node, pages=1)[PAGES]
    assert (taint["key"], taint["effect"], taint.get("value", "")) == (KEY, "NoSchedule", "")
    node.sysfs.resize(8)
    wait_published(node)
    assert {device_slice["spec"]["pool"]["generation"] for device_slice in node.api.slices(GO)} == {1}


def test_taint_survives_restarts_with_its_time(node: GoNode) -> None:
    """A driver without an answer of the agent publishes no slices for 5 s, so that the taint stays."""
    agent, driver = node.agent(config=QUICK), node.driver()
    node.wait_healthy(PAGES)
    node.sysfs.resize(7)
    (before,) = wait_published(node, pages=1)[PAGES]
    version = node.api.version
    assert driver.end() == 0
    agent.end()
    begun_s = time.monotonic()
    node.driver()
    node.wait_agent_absent(PAGES)
    node.agent(config=QUICK)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    node.api.wipe(GO)  # as a kubelet does at its start
    assert wait_published(node, pages=1)[PAGES] == [before]
    published = node.api.published_slices(GO, version)
    untainted_s = [change.at_s - begun_s for change in published if not taints_of(change.object)[PAGES]]
    assert min(untainted_s, default=FIRST_TAINTS_S) >= FIRST_TAINTS_S
