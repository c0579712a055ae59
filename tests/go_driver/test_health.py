"""Health through the driver in Go: the agent's own words, and Unknown whenever there is nobody to say any."""

import signal
from collections.abc import Callable

import pytest
from agents import Agent, hear_health
from kubelet.history import Changed, Registered, StreamEnded, StreamOpened
from wire.google import watch_health

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, SHORT, Ask, GoNode

SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
SHRUNK = "mem.hugepages.pool_shrunk: 7 pages of 2mi on node 0, 8 declared. Advice: "


def said(node: GoNode, device: str, since: int) -> list[tuple[str, str]]:
    """Health and message of each change of a device, from some entry of the kubelet's history on."""
    changes = node.kubelet.history.of(Changed, since=since)
    return [(one.health, one.message) for one in changes if one.device == device]


# --- the agent's words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "service"),
    [
        ("1.34", "v1alpha1.DRAResourceHealth"),
        ("1.36", "v1alpha1.DRAResourceHealth"),
        ("1.37", "v1.DRAResourceHealth"),
    ],
)
def test_each_kubelet_hears_what_the_agent_says(
    make_node: Callable[..., GoNode], version: str, service: str
) -> None:
    node = make_node(version=version, health=True)
    node.agent()
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    (registered,) = node.kubelet.history.of(Registered)
    assert (registered.driver, registered.services) == (GO, SERVICES)
    assert [one.service for one in node.kubelet.history.of(StreamOpened)] == [service]
    pod = node.running("it", Ask("it", {"pages": PAGES, "cpu": CPU_0}))
    node.sysfs.resize(7)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    with watch_health(node.socket) as agent:
        words = hear_health(agent, PAGES, 2).message
    assert words.startswith(SHRUNK)
    assert message == (words if node.kubelet.version.reads_message else "")
    node.wait_resources(pod, [("Unhealthy", message), ("Healthy", "")])
    node.sysfs.resize(8)
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


@pytest.mark.usefixtures("driver")
def test_whoever_follows_either_socket_reads_the_same(node: GoNode) -> None:
    node.sysfs.resize(7)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    for socket in (node.socket, node.plugin_socket):
        devices = node.drahealth("watch", "--once", str(socket))["devices"]
        said = {one["name"]: (one["health"], one["message"]) for one in devices}
        assert said == {CPU_0: ("Healthy", ""), CPU_1: ("Healthy", ""), PAGES: ("Unhealthy", message)}


# --- nobody to say any ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_agent_that_ends_leaves_every_device_unknown_with_the_reason(
    node: GoNode, agent: Agent, number: signal.Signals
) -> None:
    """Long before a lease ends, which would take the reason with it; and all is well when it is back."""
    pod = node.running("it", Ask("it", {"pages": PAGES}))
    since = len(node.kubelet.history)
    agent.end(number)
    assert node.socket.exists() is (number is signal.SIGKILL)
    node.wait_away(PAGES, CPU_0, CPU_1)
    ((_, reason),) = said(node, PAGES, since)
    node.wait_resources(pod, [("Unknown", reason)])
    node.agent()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.wait_resources(pod, [("Healthy", "")])
    assert list(dict.fromkeys(said(node, PAGES, since))) == [("Unknown", reason), ("Healthy", "")]
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


def test_a_driver_without_an_agent_registers_prepares_and_says_that_nobody_looks(node: GoNode) -> None:
    node.driver()
    node.wait_away(PAGES, CPU_0, CPU_1)
    pod = node.running("it", Ask("it", {"pages": PAGES, "cpu": CPU_1}))
    node.agent()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    assert node.kubelet.history.of(StreamEnded) == []
    node.end(pod)


def test_an_agent_that_stays_away_is_told_of_again_and_again(node: GoNode) -> None:
    """A lease that runs out takes the reason with it, and no kubelet says it a second time by itself."""
    agent = node.agent(config=SHORT)
    node.driver()
    node.wait_healthy(PAGES)
    agent.end(signal.SIGKILL)
    node.wait_away(PAGES)
    for _ in range(2):
        node.kubelet.clock.advance(4)
        node.wait_away(PAGES)


def test_an_agent_that_hangs_is_no_healthy_agent(node: GoNode) -> None:
    """Its sockets are open, connections are accepted by the kernel, and nothing comes."""
    agent = node.agent(config=SHORT)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    since = len(node.kubelet.history)
    agent.process.send_signal(signal.SIGSTOP)
    node.wait_away(PAGES, CPU_0, CPU_1)
    node.sysfs.resize(7)
    agent.process.send_signal(signal.SIGCONT)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    assert message.startswith(SHRUNK)
    assert "Healthy" not in {health for health, _ in said(node, PAGES, since)}
    node.wait_healthy(CPU_0, CPU_1)
    assert node.kubelet.history.of(StreamEnded) == []


def test_a_hung_agent_is_replaced(node: GoNode) -> None:
    agent = node.agent(config=SHORT)
    node.driver()
    node.wait_healthy(PAGES)
    agent.process.send_signal(signal.SIGSTOP)
    node.wait_away(PAGES)
    agent.end(signal.SIGKILL)
    node.agent(config=SHORT)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    assert node.kubelet.history.of(StreamEnded) == []


@pytest.mark.usefixtures("driver")
def test_several_kubelets_have_a_stream_each(node: GoNode) -> None:
    """Of either version: what one of them reads, or does not, is nothing to the others."""
    with watch_health(node.plugin_socket, "v1") as new, watch_health(node.plugin_socket, "v1alpha1") as old:
        for kubelet in (new, old):
            assert {one.device.device_name for one in kubelet.next().devices} == {PAGES, CPU_0, CPU_1}
        node.sysfs.resize(7)
        assert hear_health(new, PAGES, 2).message == hear_health(old, PAGES, 2).message
    node.sysfs.resize(8)
    node.wait_healthy(PAGES)
