"""Effects of a driver and the agent on pods, scheduler and operators, on a whole node."""

import json
import signal
from collections.abc import Mapping
from typing import Any, Final

import pytest
from machine import HugepagePool
from wire.serving import eventually

from node_real.conftest import POOL_PAGES, SHARES, DriverProcess, Times
from node_real.node import WAIT_S, RealNode, may_lower_oom_score
from node_real.programs import kubernetes_version
from node_real.workloads import (
    CLAIMS,
    GO_CLASS,
    PAGES,
    PODS,
    SLICE,
    create_claim,
    create_pod,
    daemon_set,
    events_of,
    has_health,
    phase_is,
    taint_keys,
)

pytestmark = pytest.mark.usefixtures("clean")


APPS: Final = "/apis/apps/v1/namespaces/hostdev"
SHRUNK: Final = "mem.hugepages.pool_shrunk"
AT_FIRST: Final = f", {POOL_PAGES} declared"
"""Part of a message that names the pool's size before it shrank."""


def running_pod(node: RealNode, name: str, device_class: str = PAGES) -> str:
    """Create a pod with a claim for pages, and wait until it runs."""
    create_claim(node, name, device_class)
    path = create_pod(node, name, name)
    node.api.wait(path, phase_is("Running"), "Running")
    return path


def test_shrunk_pool_makes_pod_status_unhealthy_then_healthy(
    node: RealNode, driver: None, pool: HugepagePool, times: Times
) -> None:
    with times.measure("claim and pod created to pod Running"):
        pod = running_pod(node, "healthy")
    node.api.wait(pod, has_health("Healthy"), "Healthy in the status")
    with times.measure("pool shrunk to Unhealthy in the pod's status"):
        pool.resize(POOL_PAGES // 2)
        node.api.wait(pod, has_health("Unhealthy", SHRUNK), "Unhealthy")
    with times.measure("pool restored to Healthy in the pod's status"):
        pool.resize(POOL_PAGES)
        node.api.wait(pod, has_health("Healthy"), "Healthy again")


def test_shrunk_pool_taints_slice_and_next_pod_is_pending(
    node: RealNode, driver: None, pool: HugepagePool, times: Times
) -> None:
    node.api.wait(SLICE, lambda entry: not taint_keys(entry, "NoSchedule"), "without taints")
    with times.measure("pool shrunk to the taint in the ResourceSlice"):
        pool.resize(POOL_PAGES // 2)
        node.api.wait(SLICE, lambda entry: bool(taint_keys(entry, "NoSchedule")), "tainted")
    create_claim(node, "late")
    with times.measure("pod created to Unschedulable"):
        pod = create_pod(node, "late", "late")
        node.api.wait(pod, is_unschedulable, "Unschedulable")
    assert phase_is("Pending")(node.api.call("GET", pod))
    with times.measure("pool restored to the pod Running, after taints.quiet of 60 s"):
        pool.resize(POOL_PAGES)
        node.api.wait(pod, phase_is("Running"), "Running")


def test_prepare_failed_event_names_class_and_code(node: RealNode, driver: None, times: Times) -> None:
    create_claim(node, "greedy", parameters={"kind": "HugepagesParameters", "pages": 4000})
    with times.measure("pod created to the failed prepare in its events"):
        create_pod(node, "greedy", "greedy")
        eventually(lambda: bool(prepare_failures(node, "greedy")), "an event of the failed prepare")
    text = prepare_failures(node, "greedy")[0]
    assert "class=bad-config" in text
    assert "retry=never" in text


def is_unschedulable(pod: Mapping[str, Any]) -> bool:
    """Return whether the scheduler has found no node for a pod."""
    conditions = pod.get("status", {}).get("conditions", [])
    return any(
        condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for condition in conditions
    )


def prepare_failures(node: RealNode, pod: str) -> list[str]:
    """Return the events of a pod's claims that could not be prepared."""
    return events_of(node, pod, "FailedPrepareDynamicResources")


def test_pool_shrunk_pod_evicted_if_the_code_evicts(
    node: RealNode, driver_process: DriverProcess, agent: None, pool: HugepagePool, times: Times
) -> None:
    driver_process.start("--evict", SHRUNK)
    pod = running_pod(node, "evicted")
    uid = node.api.call("GET", pod)["metadata"]["uid"]
    wait_uses(node, "default/evicted", {uid: None})
    with times.measure("pool shrunk to the pod deleted by eviction"):
        pool.resize(POOL_PAGES // 2)
        eventually(lambda: is_gone(node, pod, uid), "the pod evicted", WAIT_S)
    eventually(lambda: end_of(use_of(node, uid)) is not None, "the end of the use in the history", WAIT_S)
    worst = use_of(node, uid)["worst"]
    assert (worst["health"], SHRUNK in worst["evidence"]) == ("Unhealthy", True), worst


def test_kubelet_restarted_status_follows_the_pool(
    node: RealNode, driver: None, pool: HugepagePool, times: Times
) -> None:
    pod = running_pod(node, "kept")
    node.api.wait(pod, has_health("Healthy"), "Healthy")
    node.stop("kubelet")
    pool.resize(POOL_PAGES // 2)
    with times.measure("kubelet started to Unhealthy in the pod's status"):
        node.start_kubelet()
        found = node.api.wait(pod, has_health("Unhealthy", SHRUNK), "Unhealthy after the restart")
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0


def test_kubelet_and_driver_killed_together_status_follows_the_pool(
    node: RealNode, driver_process: DriverProcess, pool: HugepagePool, times: Times
) -> None:
    driver_process.start()
    pod = running_pod(node, "rebooted")
    node.api.wait(pod, has_health("Healthy"), "Healthy")
    node.stop("kubelet", signal.SIGKILL)
    driver_process.stop(signal.SIGKILL)
    pool.resize(POOL_PAGES // 2)
    with times.measure("kubelet and driver started to Unhealthy in the pod's status"):
        node.start_kubelet()
        driver_process.start()
        found = node.api.wait(pod, has_health("Unhealthy", AT_FIRST), "Unhealthy after the restarts")
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0


def test_agent_restarted_status_unknown_with_reason_then_healthy(
    node: RealNode, go_driver: None, times: Times
) -> None:
    pod = running_pod(node, "forwarded", GO_CLASS)
    node.api.wait(pod, has_health("Healthy"), "Healthy")
    with times.measure("agent stopped to Unknown with the reason in the pod's status"):
        node.stop("agent")
        node.api.wait(pod, has_health("Unknown", "drahealth agent does not answer"), "Unknown")
    with times.measure("agent started to Healthy in the pod's status"):
        node.start_agent()
        node.api.wait(pod, has_health("Healthy"), "Healthy")
    with times.measure("agent killed to Unknown with the reason in the pod's status"):
        node.stop("agent", signal.SIGKILL)
        node.api.wait(pod, has_health("Unknown", "drahealth agent does not answer"), "Unknown")
    node.start_agent()
    node.api.wait(pod, has_health("Healthy"), "Healthy")


def test_pod_deleted_and_made_again_history_has_both_uses(
    node: RealNode, go_driver: None, times: Times
) -> None:
    first = running_pod(node, "again", GO_CLASS)
    uids = [node.api.call("GET", first)["metadata"]["uid"]]
    wait_uses(node, "default/again", {uids[0]: None})
    node.api.delete(first)
    second = create_pod(node, "again", "again")
    with times.measure("pod created again with its claim to Healthy in its status"):
        node.api.wait(second, has_health("Healthy"), "Healthy")
    uids.append(node.api.call("GET", second)["metadata"]["uid"])
    with times.measure("pod created again to both uses in the history"):
        wait_uses(node, "default/again", {uids[0]: ENDED, uids[1]: None})


def test_claim_made_again_with_its_name_is_another_in_history_and_explain(
    node: RealNode, go_driver: None
) -> None:
    first = running_pod(node, "renewed", GO_CLASS)
    old = node.api.call("GET", first)["metadata"]["uid"]
    wait_uses(node, "default/renewed", {old: None})
    old_device = allocated_device(node, "renewed")
    node.api.delete(first, grace_s=0)
    node.api.delete(f"{CLAIMS}/renewed")
    running_pod(node, "in-between", GO_CLASS)  # has the old device
    second = running_pod(node, "renewed", GO_CLASS)
    new = node.api.call("GET", second)["metadata"]["uid"]
    new_device = allocated_device(node, "renewed")
    assert new_device != old_device
    wait_uses(node, "default/renewed", {old: ENDED, new: None})
    assert [use_of(node, uid)["device"]["name"] for uid in (old, new)] == [old_device, new_device]
    explained = node.drahealth("explain", "pod", "default/renewed")
    assert [device["name"] for device in explained["devices"]] == [new_device]
    assert explained["conflicts"] == []


def allocated_device(node: RealNode, claim: str) -> str:
    """Return the device that the scheduler allocated to a claim."""
    status = node.api.call("GET", f"{CLAIMS}/{claim}")["status"]
    (result,) = status["allocation"]["devices"]["results"]
    return str(result["device"])


ENDED: Final = "ended"


def end_of(use: Mapping[str, Any]) -> str | None:
    """Return ENDED for the end of a deleted pod, another word for another end, None while it runs.

    The containers of a deleted pod exit with 0 here, so the kubelet reports the phase Succeeded before the
    pod is gone; an agent that reads the kubelet only afterwards sees a released claim, or a replaced one if
    the claim was made again meanwhile.
    """
    if use["ended"] is None:
        return None
    how = str(use["ended"]["how"])
    return ENDED if how in {"released", "replaced", "succeeded"} else how


def use_of(node: RealNode, uid: str) -> Any:
    """Return the only use in the history of a pod with this UID."""
    (use,) = [use for use in node.drahealth("history")["uses"] if use["pod"]["uid"] == uid]
    return use


def is_of(use: Mapping[str, Any], pod: str) -> bool:
    """Return whether a use in the history is that of a pod of this namespace and name."""
    return f"{use['pod']['namespace']}/{use['pod']['name']}" == pod


def wait_uses(node: RealNode, pod: str, expected: Mapping[str, str | None]) -> None:
    """Wait until the history has these uses of a pod's name: the end by UID, None while it runs."""
    found: dict[str, str | None] = {}

    def has_uses() -> bool:
        uses = node.drahealth("history")["uses"]
        found.clear()
        found.update({use["pod"]["uid"]: end_of(use) for use in uses if is_of(use, pod)})
        return found == expected

    try:
        eventually(has_uses, "the uses in the history", WAIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}, expected {expected}") from None


def test_explain_joins_kubelet_driver_and_cgroups(node: RealNode, go_driver: None) -> None:
    pod = running_pod(node, "explained", GO_CLASS)
    node.api.wait(pod, has_health("Healthy"), "Healthy")

    def sources_of(edges: Any) -> set[str]:
        return {edge["source"] for edge in edges}

    def explain() -> Any:
        return node.drahealth("explain", "pod", "default/explained")

    everyone = {"checkpoint", "podresources", "driver"}
    eventually(
        lambda: sources_of(explain()["claims"][0]["devices"]) == everyone, "the driver's prepare", WAIT_S
    )
    found = explain()
    (claim,), (device,) = found["claims"], found["devices"]
    assert sources_of(claim["consumers"]) == {"checkpoint", "podresources", "pods-api"}
    assert {edge["container"] for edge in claim["containers"]} == {"main"}
    assert device["verdict"]["health"] == device["kubelet"]["health"] == "Healthy"
    assert found["pods"][0]["running"]
    assert found["conflicts"] == []
    name = f"{device['driver']}/{device['pool']}/{device['name']}"
    pods = node.drahealth("explain", name)["pods"]
    assert [pod["name"] for pod in pods] == ["explained"]


def test_audit_finds_all_qos_classes_as_expected(node: RealNode, go_driver: None) -> None:
    running_pod(node, "best-effort", GO_CLASS)
    memory = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "32Mi"}}
    guaranteed = {"cpu": "50m", "memory": "16Mi"}
    create_pod(node, "burstable", resources=memory)
    create_pod(node, "guaranteed", resources={"requests": guaranteed, "limits": guaranteed})
    for name in ("burstable", "guaranteed"):
        node.api.wait(f"{PODS}/{name}", phase_is("Running"), "Running")
    eventually(lambda: "quiet" not in audit_verdicts(node), "the audit without recent starts", WAIT_S)
    settings = audited_settings(node)
    odd = [knob for knob in settings if knob["verdict"] not in EXPECTED]
    if not may_lower_oom_score():  # containerd keeps its own score then, which the audit finds
        odd = [knob for knob in odd if (knob["knob"], knob["verdict"]) != ("OOM score", "higher")]
    assert odd == []
    assert "match" in {knob["verdict"] for knob in settings}


EXPECTED: Final = frozenset({"match", "rounded", "not-missed"})
"""Verdicts on a setting that is as expected."""


def audit_verdicts(node: RealNode) -> set[str]:
    """Return the verdicts on all settings of all pods and QoS classes."""
    return {knob["verdict"] for knob in audited_settings(node)}


def audited_settings(node: RealNode) -> list[dict[str, Any]]:
    """Return all settings of all pods and QoS classes, with their verdicts."""
    found = audit(node)
    knobs = [knob for pod in found["pods"] for knob in pod["knobs"]]
    return [*knobs, *found["classes"], *found["nodeCgroups"]]


def audit(node: RealNode) -> Any:
    """Return the audit of all pods; the kubelet's version says that it does not count claims."""
    version = kubernetes_version().removeprefix("v")
    return node.drahealth("audit", "--all", "--kubelet-version", version, codes=(0, 1, 3))


def is_gone(node: RealNode, path: str, uid: str) -> bool:
    """Return whether a pod does not exist any more."""
    found = node.api.get(path)
    return found is None or found["metadata"]["uid"] != uid


def test_daemon_set_rolled_twice_health_follows_and_the_fault_stays(
    node: RealNode, driver_process: DriverProcess, pool: HugepagePool, times: Times
) -> None:
    driver_process.stop()
    objects = f"{APPS}/daemonsets/hostdev-driver"
    with times.measure("DaemonSet created to the driver's pod Ready"):
        node.kubectl("apply", "-f", "-", text=json.dumps(daemon_set(node, f"--hugepage-shares={SHARES}")))
        node.api.wait(objects, is_rolled_out, "rolled out")
    pod = running_pod(node, "served")
    node.api.wait(pod, has_health("Healthy"), "Healthy")
    rolled = daemon_set(node, f"--hugepage-shares={SHARES}", "--log-level=debug")
    with times.measure("DaemonSet changed to the new pod alone"):
        node.kubectl("apply", "-f", "-", text=json.dumps(rolled))
        node.api.wait(objects, is_rolled_out, "rolled out")
    node.api.wait(pod, has_health("Healthy"), "Healthy after the update")
    with times.measure("pool shrunk to Unhealthy through the new pod"):
        pool.resize(POOL_PAGES // 2)
        node.api.wait(pod, has_health("Unhealthy", SHRUNK), "Unhealthy")
    with times.measure("DaemonSet changed during the fault to the new pod alone"):
        again = daemon_set(node, f"--hugepage-shares={SHARES}", "--log-level=info")
        node.kubectl("apply", "-f", "-", text=json.dumps(again))
        node.api.wait(objects, is_rolled_out, "rolled out")
    assert not has_health("Healthy")(node.api.call("GET", pod))
    pool.resize(POOL_PAGES // 4)  # another text, which only the newest pod can have sent
    fault = f"{POOL_PAGES // 4} pages of 2mi on NUMA node 0{AT_FIRST}"
    node.api.wait(pod, has_health("Unhealthy", fault), "Unhealthy")


def is_rolled_out(daemon_set: Mapping[str, Any]) -> bool:
    """Return whether all pods of a DaemonSet have its newest template and are available."""
    status = daemon_set.get("status", {})
    return (
        status.get("observedGeneration") == daemon_set["metadata"]["generation"]
        and status.get("updatedNumberScheduled") == status.get("numberAvailable") == 1
        and status.get("currentNumberScheduled") == 1
    )
