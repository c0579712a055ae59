"""Pods and the agent as a process: affected pods in the log, and audit findings in device health. Real
cgroups."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from agents import (
    DRIVER,
    HEALTHY,
    UNHEALTHY,
    Agent,
    PlainSysfs,
    entry,
    short_tmp,
    wait_for_health,
    wait_for_message,
)
from audit_samples import CONTAINER
from cgroup_audit_pods import UID
from explain_node import Node as Kubelet
from kubelet_files import claim, device
from machine import Kubepods, kubepods_tree
from patience import PATIENCE_S
from wire.kubelet_apis import ListingApi, message_class
from wire.serving import eventually

from agent.serve.kubelet import pods_api

__all__ = ["short_tmp"]

NODE: Final = "node-1"
PAGES: Final = "huge-2mi-0"
MIB: Final = 1 << 20
DECLARED: Final = f"""
version = 1

[[device]]
name = "{PAGES}"
kind = "hugepages"
size = "2Mi"
pages = 8
numa = 0
"""
FAST: Final = '[pods]\nperiod = "1s"\naudit = "10s"\n'


def its_pod() -> bytes:
    """Return a pod with the claim and a container limited to eight pages."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = "train-0", "ml", UID
    found.metadata.ownerReferences.add(
        apiVersion="batch/v1", kind="Job", name="train", uid="j-1", controller=True
    )
    found.spec.nodeName, found.status.phase, found.status.qosClass = NODE, "Running", "Burstable"
    found.spec.resourceClaims.add(name="mine", resourceClaimName="pages")
    container = found.spec.containers.add(name="main", image="")
    container.resources.claims.add(name="mine")
    for resource, amount in {"cpu": "1", "memory": "64Mi", "hugepages-2Mi": "16Mi"}.items():
        container.resources.requests[resource].string = amount
        container.resources.limits[resource].string = amount
    container.resources.requests["cpu"].string = "500m"
    state = found.status.containerStatuses.add(name="main", containerID=f"containerd://{CONTAINER}")
    state.state.running.startedAt.seconds = 1_700_000_000
    return bytes(found.SerializeToString())


@pytest.fixture
def tree() -> Iterator[Kubepods]:
    """Create the pod's cgroups as the kubelet does, with the claimed hugepages."""
    with kubepods_tree("cpu", "memory", hugetlb=True) as made:
        for name in (("burstable", UID, ""), ("burstable", UID, CONTAINER)):
            directory = made.make(*name)
            for file in ("hugetlb.2MB.max", "hugetlb.2MB.rsvd.max"):
                (directory / file).write_text(f"{16 * MIB}")
        yield made


@pytest.fixture
def answers() -> threading.Event:
    """Return the event without which the kubelet's pods API does not answer."""
    made = threading.Event()
    made.set()
    return made


@pytest.fixture
def asked() -> threading.Event:
    """Return the event that each call of the kubelet's pods API sets."""
    return threading.Event()


@pytest.fixture
def kubelet(
    short_tmp: Path, capsys: pytest.CaptureFixture[str], answers: threading.Event, asked: threading.Event
) -> Iterator[Kubelet]:
    """Write the state of a kubelet that prepared the device for the pod."""
    made = Kubelet(short_tmp, capsys)
    given = {DRIVER: {"Devices": [device(PAGES, pool=NODE)]}}
    made.write_checkpoint(claim("c-1", name="pages", namespace="ml", pods=[UID], drivers=given))
    answer = message_class("v1alpha1", "ListPodsResponse")(pods=[its_pod()])

    def list_pods() -> Any:
        asked.set()
        answers.wait()
        return answer

    with ListingApi(made.kubelet / pods_api.SOCKET, pods_api.LIST, list_pods):
        yield made
        answers.set()


@pytest.fixture
def agent(kubelet: Kubelet, tree: Kubepods, short_tmp: Path) -> Iterator[Any]:
    sysfs = PlainSysfs(short_tmp / "sys")
    declarations = short_tmp / "run" / "devices.d"
    declarations.mkdir(parents=True)
    (declarations / f"{DRIVER}.toml").write_text(DECLARED)
    flags = ["--sysfs-root", str(sysfs.root), "--nvml-library", "/nonexistent", "--node-name", NODE]
    flags += ["--kmsg", "/nonexistent", "--period", "50ms", "--kubelet-dir", str(kubelet.kubelet)]
    flags += ["--kubelet-cgroup-root", tree.cgroup_root]
    with Agent(short_tmp, *flags, config=FAST) as running:
        running.sysfs = sysfs  # type: ignore[attr-defined]
        yield running


def nth_line(agent: Any, text: str, number: int) -> str:
    """Wait until so many lines of the log have a text; return the last of them.

    A source that a busy machine stalls makes the device Unknown, and it may be Healthy again once more.
    """

    def found_lines() -> list[str]:
        return [line for line in agent.log.splitlines(keepends=True) if text in line and line.endswith("\n")]

    eventually(lambda: len(found_lines()) >= number, f"{number} lines with {text!r}")
    lines = found_lines()
    assert len(lines) <= number + agent.log.count("is Unknown (source.stalled)")
    return lines[-1].rstrip()


def test_unhealthy_device_logs_its_pod(agent: Any) -> None:
    """A busy machine may not answer within the 2 s that the agent waits for owners of pods."""
    name = f"{DRIVER}/{NODE}/{PAGES}"
    who = "ml/train-0 (Job train, claim ml/pages: container main)"
    expected = [f"{name} is Unhealthy (mem.hugepages.pool_shrunk): affects {who}"]
    expected += [f"{name} is Healthy again; used by {who}"]
    found: list[str] = []
    with agent.kubelet() as listener:
        wait_for_health(listener, PAGES, HEALTHY)
        for number in range(1, 6):
            agent.sysfs.resize(3)
            wait_for_health(listener, PAGES, UNHEALTHY)
            found = [nth_line(agent, f"{name} is Unhealthy", number)]
            agent.sysfs.resize(8)
            wait_for_health(listener, PAGES, HEALTHY)
            found += [nth_line(agent, f"{name} is Healthy again", number)]
            if all(text in line for text, line in zip(expected, found, strict=True)):
                return
    pytest.fail(f"no lines with {who} among\n{agent.log}")


def test_audit_finding_appears_in_device_health_and_clears(agent: Any, tree: Kubepods) -> None:
    """Lower the container's hugepage limit, and restore it."""
    limit = tree.roots[0] / tree.directory("burstable", UID, CONTAINER) / "hugetlb.2MB.max"
    with agent.kubelet() as listener:
        wait_for_health(listener, PAGES, HEALTHY)
        limit.write_text(f"{4 * MIB}")
        words = "cgroup.lower: "
        received = wait_for_message(
            listener, lambda m: entry(m, PAGES) and words in entry(m, PAGES).message, words
        )
        assert entry(received, PAGES).health == HEALTHY
        assert "pod ml/train-0 container main" in entry(received, PAGES).message
        limit.write_text(f"{16 * MIB}")
        wait_for_message(
            listener, lambda m: entry(m, PAGES) and not entry(m, PAGES).message, "all is well again"
        )


def test_agent_stops_in_time_while_kubelet_does_not_answer(
    agent: Any, answers: threading.Event, asked: threading.Event
) -> None:
    with agent.kubelet() as listener:
        wait_for_health(listener, PAGES, HEALTHY)
    answers.clear()
    asked.clear()
    assert asked.wait(PATIENCE_S), "the agent calls the kubelet again"
    assert agent.end() == 0
