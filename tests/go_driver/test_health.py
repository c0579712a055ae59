"""Health through the Go driver: the agent's health, and Unknown while the agent is absent."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent, wait_for_health
from kubelet.history import Changed, Registered, StreamEnded, StreamOpened
from kubelet_real.implementations import MARKS
from wire.google import watch_health

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, SHORT, SHORT_LEASE_S, Ask, GoNode

SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
SHRUNK = "mem.hugepages.pool_shrunk: 7 pages of 2mi on NUMA node 0, 8 declared. Advice: "


def health_changes(node: GoNode, device: str, since: int) -> list[tuple[str, str]]:
    """Return health and message of each change of a device, from an entry of the kubelet's history on."""
    changes = node.kubelet.history.of(Changed, since=since)
    return [(change.health, change.message) for change in changes if change.device == device]


# --- with the agent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kubelet", "service"),
    [
        pytest.param({"version": "1.34", "health": True}, "v1alpha1.DRAResourceHealth", id="1.34"),
        pytest.param({"version": "1.36"}, "v1alpha1.DRAResourceHealth", id="1.36"),
        pytest.param({"version": "1.37"}, "v1.DRAResourceHealth", id="1.37"),
        pytest.param(
            {"version": "1.36", "real": True}, "v1alpha1.DRAResourceHealth", id="real-1.36", marks=MARKS
        ),
        pytest.param({"version": "1.37", "real": True}, "v1.DRAResourceHealth", id="real-1.37", marks=MARKS),
    ],
)
def test_each_kubelet_version_gets_the_agents_health(
    make_node: Callable[..., GoNode], kubelet: dict[str, Any], service: str
) -> None:
    node = make_node(**kubelet)
    node.agent()
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.kubelet.wait_registered(GO)
    (registered,) = node.kubelet.history.of(Registered)
    assert (registered.driver, registered.services) == (GO, SERVICES)
    assert [stream.service for stream in node.kubelet.history.of(StreamOpened)] == [service]
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES, "cpu": CPU_0}))
    node.sysfs.resize(7)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    with watch_health(node.socket) as agent:
        agent_message = wait_for_health(agent, PAGES, 2).message
    assert agent_message.startswith(SHRUNK)
    assert message == (agent_message if node.kubelet.version.reads_message else "")
    node.wait_resources(pod, [("Unhealthy", message), ("Healthy", "")])
    node.sysfs.resize(8)
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_agent_and_driver_sockets_serve_the_same_health(node: GoNode) -> None:
    node.sysfs.resize(7)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    for socket in (node.socket, node.plugin_socket):
        devices = node.drahealth("watch", "--once", str(socket))["devices"]
        served = {device["name"]: (device["health"], device["message"]) for device in devices}
        assert served == {CPU_0: ("Healthy", ""), CPU_1: ("Healthy", ""), PAGES: ("Unhealthy", message)}


# --- without the agent -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_agent_makes_every_device_unknown_with_reason(
    node: GoNode, agent: Agent, number: signal.Signals
) -> None:
    """The change comes before a lease expires, which would drop the reason."""
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}))
    since = len(node.kubelet.history)
    agent.end(number)
    assert node.socket.exists() is (number is signal.SIGKILL)
    node.wait_agent_absent(PAGES, CPU_0, CPU_1)
    ((_, reason),) = health_changes(node, PAGES, since)
    node.wait_resources(pod, [("Unknown", reason)])
    node.agent()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.wait_resources(pod, [("Healthy", "")])
    assert list(dict.fromkeys(health_changes(node, PAGES, since))) == [("Unknown", reason), ("Healthy", "")]
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


def test_driver_without_agent_prepares_and_reports_unknown(node: GoNode) -> None:
    node.driver()
    node.wait_agent_absent(PAGES, CPU_0, CPU_1)
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES, "cpu": CPU_1}))
    node.agent()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


def test_unknown_with_reason_is_repeated_before_a_lease_expires(node: GoNode) -> None:
    """An expired lease drops the reason, so that it must be repeated."""
    agent = node.agent(config=SHORT)
    node.driver()
    node.wait_healthy(PAGES)
    agent.end(signal.SIGKILL)
    node.wait_agent_absent(PAGES)
    for _ in range(2):
        node.kubelet.clock.advance(SHORT_LEASE_S + 1)
        node.wait_agent_absent(PAGES)


def test_hung_agent_makes_every_device_unknown(node: GoNode) -> None:
    """The sockets of a hung agent are open and the kernel accepts connections, but no message arrives."""
    agent = node.agent(config=SHORT)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    agent.process.send_signal(signal.SIGSTOP)
    node.wait_agent_absent(PAGES, CPU_0, CPU_1)
    since = len(node.kubelet.history)
    node.sysfs.resize(7)
    agent.process.send_signal(signal.SIGCONT)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    assert message.startswith(SHRUNK)
    assert "Healthy" not in {health for health, _ in health_changes(node, PAGES, since)}
    node.wait_healthy(CPU_0, CPU_1)
    assert node.kubelet.history.of(StreamEnded) == []


def test_driver_connects_to_the_replacement_of_a_hung_agent(node: GoNode) -> None:
    agent = node.agent(config=SHORT)
    node.driver()
    node.wait_healthy(PAGES)
    agent.process.send_signal(signal.SIGSTOP)
    node.wait_agent_absent(PAGES)
    agent.end(signal.SIGKILL)
    node.agent(config=SHORT)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    assert node.kubelet.history.of(StreamEnded) == []


@pytest.mark.usefixtures("driver")
def test_several_kubelets_have_independent_streams(node: GoNode) -> None:
    """Streams of either version; a slow reader does not delay the others."""
    with watch_health(node.plugin_socket, "v1") as new, watch_health(node.plugin_socket, "v1alpha1") as old:
        for kubelet in (new, old):
            assert {device.device.device_name for device in kubelet.next().devices} == {PAGES, CPU_0, CPU_1}
        node.sysfs.resize(7)
        assert wait_for_health(new, PAGES, 2).message == wait_for_health(old, PAGES, 2).message
    node.sysfs.resize(8)
    node.wait_healthy(PAGES)
