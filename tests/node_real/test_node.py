"""What pods, scheduler and operators get from a driver and the agent on a whole node."""

from collections.abc import Mapping
from typing import Any

import pytest
from agents import print_figure
from driver_scenarios.program import Program
from machine import HugepagePool
from wire.serving import eventually

from node_real.conftest import POOL_PAGES, Times
from node_real.node import RealNode
from node_real.workloads import (
    SLICE,
    create_claim,
    create_pod,
    events_of,
    has_health,
    phase_is,
    taint_keys,
)

pytestmark = pytest.mark.usefixtures("clean")


def running_pod(node: RealNode, name: str) -> str:
    """Create a pod with a claim for pages, and wait until it runs."""
    create_claim(node, name)
    path = create_pod(node, name, name)
    node.api.wait(path, phase_is("Running"), "Running")
    return path


def test_pool_shrunk_pod_status_unhealthy_then_healthy(
    node: RealNode, driver: Program, pool: HugepagePool, times: Times
) -> None:
    with times.measure("claim and pod created to pod Running"):
        pod = running_pod(node, "healthy")
    node.api.wait(pod, has_health("Healthy"), "Healthy in the status")
    with times.measure("pool shrunk to Unhealthy in the pod's status"):
        pool.resize(POOL_PAGES // 2)
        node.api.wait(pod, has_health("Unhealthy", "mem.hugepages.pool_shrunk"), "Unhealthy")
    with times.measure("pool restored to Healthy in the pod's status"):
        pool.resize(POOL_PAGES)
        node.api.wait(pod, has_health("Healthy"), "Healthy again")


def test_pool_shrunk_slice_tainted_and_next_pod_pending(
    node: RealNode, driver: Program, pool: HugepagePool, times: Times
) -> None:
    with times.measure("pool shrunk to the taint in the ResourceSlice"):
        pool.resize(POOL_PAGES // 2)
        node.api.wait(SLICE, lambda one: bool(taint_keys(one, "NoSchedule")), "tainted")
    create_claim(node, "late")
    with times.measure("pod created to Unschedulable"):
        pod = create_pod(node, "late", "late")
        node.api.wait(pod, is_unschedulable, "Unschedulable")
    assert phase_is("Pending")(node.api.call("GET", pod))
    with times.measure("pool restored to the pod Running, after taints.quiet of 60 s"):
        pool.resize(POOL_PAGES)
        node.api.wait(pod, phase_is("Running"), "Running")


def test_prepare_failed_event_names_class_and_code(node: RealNode, driver: Program, times: Times) -> None:
    create_claim(node, "greedy", parameters={"kind": "HugepagesParameters", "pages": 4000})
    with times.measure("pod created to the failed prepare in its events"):
        create_pod(node, "greedy", "greedy")
        eventually(lambda: bool(prepare_failures(node, "greedy")), "an event of the failed prepare")
    text = prepare_failures(node, "greedy")[0]
    print_figure(text)
    assert "class=bad-config" in text
    assert "retry=never" in text


def is_unschedulable(pod: Mapping[str, Any]) -> bool:
    """Return whether the scheduler has found no node for a pod."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable" for one in conditions)


def prepare_failures(node: RealNode, pod: str) -> list[str]:
    """Return the events of a pod's claims that could not be prepared."""
    return events_of(node, pod, "FailedPrepareDynamicResources")
