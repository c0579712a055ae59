"""Scenarios on the real host: hugepages of another process, a shrinking pool, an offline CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import HugepagePool, held_hugepages, hotplug, hugepages

from driver_scenarios.node import CPU_1, HOSTDEV, NODE, PAGES, Ask, Node, parameters

POOL_PAGES = 4
SOME = [parameters("HugepagesParameters", pages=POOL_PAGES)]


@pytest.fixture
def pool(node: Node) -> Iterator[HugepagePool]:
    """Four pages of 2 MiB, which the driver offers."""
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: on which of them pages go is the kernel's choice")
    with hugepages(2048, POOL_PAGES) as pool:
        node.hostdev(real=True)
        node.wait_healthy(PAGES)
        yield pool


def test_pages_of_another_process_are_waited_for(node: Node, pool: HugepagePool) -> None:
    """e2e_node: prepare fails then succeeds"""
    with held_hugepages(pool, 0):
        pod = node.run("it", Ask("it", {"r": PAGES}, SOME))
        node.wait_event(
            pod,
            "it",
            f"[class=transient code=mem.hugepages.insufficient device={HOSTDEV}/{NODE}/{PAGES} request=r"
            " retry=after-release] 4 pages of 2Mi needed on NUMA node 0, 0 are free; the kubelet retries.",
        )
        assert node.verdict("it")["class"] == "transient"
        assert node.kubelet.health(HOSTDEV, NODE, PAGES).health == "Healthy"
    node.kubelet.wait_running(pod)
    node.end(pod)


def test_claim_of_a_shrunk_pool_fails_with_its_health_text(node: Node, pool: HugepagePool) -> None:
    """e2e_node: transitions Healthy, Unhealthy, Healthy"""
    running = node.run_and_wait(
        "running", Ask("running", {"r": PAGES}, [parameters("HugepagesParameters", pages=1)])
    )
    pool.resize(POOL_PAGES - 1)
    summary = "3 pages of 2mi on NUMA node 0, 4 declared"
    message = node.kubelet.wait_health(HOSTDEV, NODE, PAGES, "Unhealthy").message
    assert message.startswith(f"mem.hugepages.pool_shrunk: {summary}. Advice: ")
    pod = node.run("it", Ask("it", {"r": PAGES}, SOME))
    node.wait_event(
        pod,
        "it",
        f"[class=failed-device code=mem.hugepages.pool_shrunk device={HOSTDEV}/{NODE}/{PAGES} request=r"
        f" retry=after-repair] {summary}; the device is Unhealthy, its taint is offered.",
    )
    assert node.verdict("it")["code"] == "mem.hugepages.pool_shrunk"
    node.wait_resources(running, [("Unhealthy", message)])
    pool.resize(POOL_PAGES)
    node.kubelet.wait_running(pod)
    node.wait_resources(running, [("Healthy", "")])
    node.end(running, pod)


def test_offline_cpu_fails_only_claims_of_its_device(node: Node) -> None:
    with hotplug(1) as cpu:
        node.hostdev(real=True)
        node.wait_healthy(CPU_1)
        other = "cpus-node0-0"
        cpu.set_online(False)
        message = node.kubelet.wait_health(HOSTDEV, NODE, CPU_1, "Unhealthy").message
        assert message.startswith("cpu.offline: CPU 1 offline, declared: 1. Advice: ")
        pod = node.run("it", Ask("it", {"r": CPU_1}))
        node.wait_event(
            pod,
            "it",
            f"[class=failed-device code=cpu.offline device={HOSTDEV}/{NODE}/{CPU_1} request=r"
            " retry=after-repair] CPU 1 offline, declared: 1; the device is Unhealthy, its taint is offered.",
        )
        node.end(node.run_and_wait("other", Ask("other", {"r": other})))
        cpu.set_online(True)
        node.kubelet.wait_running(pod)
        node.wait_healthy(CPU_1)
