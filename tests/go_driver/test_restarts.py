"""The driver in Go, or the kubelet, ends and comes back: nothing is forgotten, and nothing is left behind."""

import signal
from collections.abc import Callable

import pytest
from driver_scenarios.program import Program
from kubelet.history import Cleared, Registered, StreamEnded

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, SHORT, Ask, GoNode, parameters

OLD_POD, NEW_POD = "pod-old", "pod-new"


def test_a_driver_that_ends_leaves_no_socket_and_a_new_one_takes_up_where_it_was(
    node: GoNode, driver: Program
) -> None:
    pod = node.running("it", Ask("it", {"pages": PAGES, "cpu": CPU_1}))
    wrong = node.run("wrong", Ask("wrong", {"r": CPU_0}, [parameters("CpuParameters", cpus="9")]))
    node.kubelet.wait_for(lambda: node.failures(wrong), "the error")
    files = {path.name: path.read_bytes() for path in node.cdi.iterdir()}
    assert driver.end() == 0
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the end")
    sockets = [path for path in node.kubelet.root.rglob("*") if path.is_socket()]
    assert sockets == []
    assert {path.name: path.read_bytes() for path in node.cdi.iterdir()} == files, "pods still use it"
    (event,) = node.failures(wrong)
    node.driver()
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    node.kubelet.wait_for(lambda: node.failures(wrong)[0].count > event.count, "the error again")
    assert len(node.failures(wrong)) == 1, "in the same words"
    assert node.verdict("wrong")["count"] == 1, "and from the agent's memory"
    node.end(pod, wrong)
    assert list(node.cdi.iterdir()) == []


def test_a_killed_driver_is_followed_by_one_that_prepares_the_same(node: GoNode, driver: Program) -> None:
    claim = Ask("it", {"pages": PAGES}, [parameters("HugepagesParameters", pages=3)])
    pod = node.running("it", claim)
    (file,) = node.cdi.iterdir()
    before = file.read_bytes()
    assert driver.end(signal.SIGKILL) == -signal.SIGKILL
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the end")
    node.driver()
    node.wait_healthy(PAGES)
    node.kubelet.restart()  # which asks for everything once more
    node.kubelet.wait_registered(GO)
    node.wait_resources(pod, [("Healthy", "")])
    assert file.read_bytes() == before
    node.end(pod)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("graceful", [True, False])
def test_a_kubelet_that_comes_back_shows_what_it_showed(node: GoNode, graceful: bool) -> None:
    pod = node.running("it", Ask("it", {"pages": PAGES}))
    node.sysfs.resize(7)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    node.wait_resources(pod, [("Unhealthy", message)])
    node.kubelet.stop(graceful=graceful)
    node.kubelet.clock.advance(60)  # every lease is over
    node.kubelet.start()
    node.wait_resources(pod, [("Unhealthy", message)])
    node.wait_healthy(CPU_0, CPU_1)
    node.end(pod)


def test_two_instances_say_and_prepare_the_same_and_either_can_go(make_node: Callable[..., GoNode]) -> None:
    """A rolling update. The kubelet forgets all health with the first stream that ends; the other has it
    told again before a lease is over, by what the agent verifies."""
    node = make_node(version="1.37")
    node.agent(config=SHORT)
    old = node.driver("--pod-uid", OLD_POD)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    pod = node.running("it", Ask("it", {"pages": PAGES, "cpu": CPU_0}))
    node.driver("--pod-uid", NEW_POD)
    node.kubelet.wait_registered(GO, count=2)
    names = {one.endpoint.rpartition("/")[2] for one in node.kubelet.history.of(Registered)}
    assert names == {f"dra-{OLD_POD}.sock", f"dra-{NEW_POD}.sock"}
    assert old.end() == 0
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the clear")
    (ended,) = node.kubelet.history.of(StreamEnded)
    assert ended.endpoint.endswith(f"dra-{OLD_POD}.sock")
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    node.sysfs.resize(7)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    node.end(pod, node.running("another", Ask("another", {"cpu": CPU_1})))
    assert node.calls()[-1].endpoint.endswith(f"dra-{NEW_POD}.sock")
