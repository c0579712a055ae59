"""Restarts of the Go driver and of the kubelet: no state is lost, and no file is left."""

import signal

import pytest
from driver_scenarios.program import Program
from kubelet.history import Cleared, Registered, StreamEnded

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, SHORT, Ask, GoNode, parameters

OLD_POD, NEW_POD = "pod-old", "pod-new"


def test_stopped_driver_leaves_no_socket_and_a_new_one_continues(node: GoNode, driver: Program) -> None:
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES, "cpu": CPU_1}))
    wrong = node.run("wrong", Ask("wrong", {"r": CPU_0}, [parameters("CpuParameters", cpus="9")]))
    node.kubelet.wait_for(
        lambda: any("[class=" in failure.message for failure in node.failures(wrong)), "the error"
    )
    files = {path.name: path.read_bytes() for path in node.cdi.iterdir()}
    assert driver.end() == 0
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the cleared health")
    sockets = [path for path in node.kubelet.root.rglob("*") if path.is_socket()]
    assert sockets == []
    assert {path.name: path.read_bytes() for path in node.cdi.iterdir()} == files, "pods still use the files"
    (event,) = node.failures(wrong)
    node.driver()
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    node.kubelet.wait_for(lambda: node.failures(wrong)[0].count > event.count, "the error again")
    assert len(node.failures(wrong)) == 1, "the text is unchanged"
    assert node.verdict("wrong")["count"] <= 1 + node.unanswered_tries(wrong), "answered from memory"
    node.end(pod, wrong)
    assert list(node.cdi.iterdir()) == []


def test_driver_after_a_kill_prepares_the_same_devices(node: GoNode, driver: Program) -> None:
    claim = Ask("it", {"pages": PAGES}, [parameters("HugepagesParameters", pages=3)])
    pod = node.run_and_wait("it", claim)
    (file,) = node.cdi.iterdir()
    before = file.read_bytes()
    assert driver.end(signal.SIGKILL) == -signal.SIGKILL
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the cleared health")
    node.driver()
    node.wait_healthy(PAGES)
    node.kubelet.restart()  # the kubelet prepares all claims again
    node.kubelet.wait_registered(GO)
    node.wait_resources(pod, [("Healthy", "")])
    assert file.read_bytes() == before
    node.end(pod)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("graceful", [True, False])
def test_restarted_kubelet_shows_the_same_state(node: GoNode, graceful: bool) -> None:
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}))
    node.sysfs.resize(7)
    message = node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy").message
    node.wait_resources(pod, [("Unhealthy", message)])
    node.kubelet.stop(graceful=graceful)
    node.kubelet.clock.advance(60)  # all leases expire
    node.kubelet.start()
    node.wait_resources(pod, [("Unhealthy", message)])
    node.wait_healthy(CPU_0, CPU_1)
    node.end(pod)


def test_old_instance_stops_in_a_rolling_update_without_loss(node: GoNode) -> None:
    """Rolling update: the kubelet clears all health when the first stream ends, and gets it again from the
    other instance before a lease expires."""
    node.agent(config=SHORT)
    old = node.driver("--pod-uid", OLD_POD)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES, "cpu": CPU_0}))
    node.driver("--pod-uid", NEW_POD)
    node.kubelet.wait_registered(GO, count=2)
    names = {plugin.endpoint.rpartition("/")[2] for plugin in node.kubelet.history.of(Registered)}
    assert names == {f"dra-{OLD_POD}.sock", f"dra-{NEW_POD}.sock"}
    assert old.end() == 0
    (ended,) = node.kubelet.wait_for(lambda: node.kubelet.history.of(StreamEnded), "the end of the stream")
    if not node.is_real:  # a real kubelet does not show which of a driver's streams ended
        assert ended.endpoint.endswith(f"dra-{OLD_POD}.sock")
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.wait_resources(pod, [("Healthy", ""), ("Healthy", "")])
    node.sysfs.resize(7)
    node.kubelet.wait_health(GO, NODE, PAGES, "Unhealthy")
    node.end(pod, node.run_and_wait("another", Ask("another", {"cpu": CPU_1})))
    assert node.calls()[-1].endpoint.endswith(f"dra-{NEW_POD}.sock")
