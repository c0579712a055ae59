"""Two instances of the driver at once, as in a rolling update: one picture, painted by the newest."""

import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from kubelet.history import Changed, Cleared, Message, StreamEnded

from driver_scenarios.node import CPU_0, CPU_1, HOSTDEV, PAGES, REAL, Ask, Node
from driver_scenarios.program import Program

OLD_POD, NEW_POD = "pod-old", "pod-new"


class Update(NamedTuple):
    """Both instances, in the middle of a rolling update."""

    node: Node
    old: Program
    new: Program

    def sending_sockets(self, since: int, otherwise: str) -> set[str]:
        """Return the names of the sockets whose health lists came since then.

        A list and the clear come to the kubelet by two streams, each in a thread of its own: of the list that
        is accepted after the clear may be recorded before it. A real kubelet does not show from whom a list
        came: the socket of the pod ``otherwise`` is returned.
        """
        if self.node.is_real:
            return {f"dra-{otherwise}.sock"}
        messages = self.node.kubelet.history.of(Message, since=since)
        return {message.endpoint.rpartition("/")[2] for message in messages}

    def wait_all_known(self, health: str) -> None:
        """Wait until the kubelet has this health of the pages, and Healthy for all other devices."""
        self.node.kubelet.wait_health(HOSTDEV, "node-1", PAGES, health)
        self.node.wait_healthy(CPU_0, CPU_1)


@pytest.fixture(params=[pytest.param(("1.37", False), id="fake-1.37"), *REAL])
def update(request: pytest.FixtureRequest, make_node: Callable[..., Node]) -> Iterator[Update]:
    """Wait until both are registered and the old instance is muted."""
    version, real = request.param
    node = make_node(version=version, real=real)
    old = node.hostdev("--pod-uid", OLD_POD)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    new = node.hostdev("--pod-uid", NEW_POD)
    node.kubelet.wait_registered(HOSTDEV, count=2)
    old.logs("a newer instance leads; this instance sends no health")
    return Update(node, old, new)


def test_only_the_newest_instance_sends_and_the_old_stream_stays(update: Update) -> None:
    node = update.node
    node.sysfs.resize(7)
    update.wait_all_known("Unhealthy")
    since = len(node.kubelet.history)  # a list that the old instance sent before has arrived
    node.sysfs.resize(8)
    update.wait_all_known("Healthy")
    assert update.sending_sockets(since, NEW_POD) == {f"dra-{NEW_POD}.sock"}
    assert node.kubelet.history.of(StreamEnded) == []
    pod = node.run_and_wait("it", Ask("it", {"cpu": CPU_0}))
    assert [call.endpoint.rpartition("/")[2] for call in node.calls()] == [f"dra-{NEW_POD}.sock"]
    node.end(pod)


def test_new_instance_inherits_a_shrunk_pool(make_node: Callable[..., Node]) -> None:
    """No claim holds the pages; the old instance still runs when the new one begins."""
    node = make_node(version="1.37")
    node.hostdev("--pod-uid", OLD_POD)
    node.wait_healthy(PAGES)
    node.sysfs.resize(5)
    before = node.kubelet.wait_health(HOSTDEV, "node-1", PAGES, "Unhealthy").message
    since = len(node.kubelet.history)
    node.hostdev("--pod-uid", NEW_POD)
    node.kubelet.wait_for(
        lambda: [
            message
            for message in node.kubelet.history.of(Message, since=since)
            if message.endpoint.endswith(f"dra-{NEW_POD}.sock")
        ],
        "a list of the new instance",
    )
    now = node.kubelet.health(HOSTDEV, "node-1", PAGES)
    assert (now.health, now.message) == ("Unhealthy", before)
    changes = node.kubelet.history.of(Changed, since=since)
    assert [change for change in changes if change.device == PAGES and change.health == "Healthy"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_new_instance_resends_everything_after_the_old_one_ends(
    update: Update, number: signal.Signals
) -> None:
    """The kubelet forgets the driver's health with the old one's stream."""
    node = update.node
    pod = node.run_and_wait("it", Ask("it", {"pages": PAGES}))
    node.sysfs.resize(7)
    update.wait_all_known("Unhealthy")
    begun = len(node.kubelet.history)
    assert update.old.end(number) == (0 if number is signal.SIGTERM else -number)
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the clear")
    since = last_clear(node)
    update.wait_all_known("Unhealthy")
    changed = {change.device: change.health for change in node.kubelet.history.of(Changed, since=since)}
    assert changed == {PAGES: "Unhealthy", CPU_0: "Healthy", CPU_1: "Healthy"}
    assert update.sending_sockets(begun, NEW_POD) == {f"dra-{NEW_POD}.sock"}
    node.end(pod)


def test_old_instance_sends_again_after_the_new_one_is_killed(update: Update) -> None:
    """The old instance also prepares, with the shared ledger."""
    node = update.node
    pod = node.run_and_wait("it", Ask("it", {"cpu": CPU_0}))
    begun = len(node.kubelet.history)
    update.new.end(signal.SIGKILL)
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the clear")
    since = last_clear(node)
    update.wait_all_known("Healthy")
    assert (
        update.sending_sockets(since, OLD_POD)
        <= {f"dra-{OLD_POD}.sock"}
        <= update.sending_sockets(begun, OLD_POD)
    )
    other = node.run("other", Ask("other", {"r": CPU_0}))
    node.kubelet.wait_for(
        lambda: any("code=cpu.overlap" in event.message for event in node.kubelet.events_of(other)),
        "what the other one gave away",
    )
    node.end(pod)
    node.kubelet.wait_running(other)
    assert node.calls()[-1].endpoint.endswith(f"dra-{OLD_POD}.sock")


def last_clear(node: Node) -> int:
    """Return the index of the history entry at which the kubelet last forgot the driver."""
    entries = list(node.kubelet.history)
    return max(at for at, entry in enumerate(entries, 1) if isinstance(entry, Cleared))
