"""Go driver on the real host: a hugepage pool that shrinks, a CPU that goes offline."""

from pathlib import Path

import pytest
from machine import hotplug, hugepages

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, Ask, GoNode

POOL_PAGES = 4


def test_shrunk_real_pool_is_unhealthy_in_the_pod_status(node: GoNode) -> None:
    if Path("/sys/devices/system/node/node1").exists():
        pytest.skip("more than one NUMA node: the kernel chooses the node whose pool shrinks")
    with hugepages(2048, POOL_PAGES) as pool:
        node.agent(real=True)
        node.driver(real=True, pages=POOL_PAGES)
        node.wait_healthy(PAGES)
        pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}))
        pool.resize(POOL_PAGES - 1)
        message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
        assert message.startswith(
            "mem.hugepages.pool_shrunk: 3 pages of 2mi on NUMA node 0, 4 declared. Advice: "
        )
        node.wait_resources(pod, [("Unhealthy", message)])
        pool.resize(POOL_PAGES)
        node.wait_resources(pod, [("Healthy", "")])
        node.end(pod)


def test_offline_real_cpu_fails_only_claims_of_its_device(node: GoNode) -> None:
    with hotplug(1) as cpu:
        node.agent(real=True)
        node.driver(real=True)
        node.wait_healthy(CPU_0, CPU_1)
        cpu.set_online(False)
        message = node.kubelet.wait_health(GO, NODE, CPU_1, "Unhealthy").message
        assert message.startswith("cpu.offline: CPU 1 offline, declared: 1. Advice: ")
        node.own.add("CPUs 1 are not online")
        pod = node.run("it", Ask("it", {"r": CPU_1}))
        node.wait_event(
            pod,
            "it",
            f"[class=failed-device code=cpu.offline device={GO}/{NODE}/{CPU_1} request=r retry=after-repair]"
            " CPU 1 offline, declared: 1; the device is Unhealthy, its taint is offered.",
        )
        node.end(node.run_and_wait("other", Ask("other", {"r": CPU_0})))
        cpu.set_online(True)
        node.kubelet.wait_running(pod)
        node.wait_healthy(CPU_1)
        node.end(pod)
