"""Two instances of the driver at once, as in a rolling update: one picture, painted by the newest."""

import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from kubelet.history import Changed, Cleared, Message, StreamEnded

from driver_scenarios.node import CPU_0, CPU_1, HOSTDEV, PAGES, Ask, Node
from driver_scenarios.program import Program

OLD_POD, NEW_POD = "pod-old", "pod-new"


class Update(NamedTuple):
    """In the middle of it."""

    node: Node
    old: Program
    new: Program

    def speakers(self, since: int) -> set[str]:
        """Whose health lists came since then, by the names of their sockets.

        A list and the clear come to the kubelet by two streams, each in a thread of its own: of the list that
        is believed after the clear the history may tell before it.
        """
        messages = self.node.kubelet.history.of(Message, since=since)
        return {one.endpoint.rpartition("/")[2] for one in messages}

    def wait_all_known(self, health: str) -> None:
        """Returns when the kubelet believes this of the pages, and Healthy of all else."""
        self.node.kubelet.wait_health(HOSTDEV, "node-1", PAGES, health)
        self.node.wait_healthy(CPU_0, CPU_1)


@pytest.fixture
def update(make_node: Callable[..., Node]) -> Iterator[Update]:
    """Both are registered, and the old one knows that it is to be quiet."""
    node = make_node(version="1.37")
    old = node.hostdev("--pod-uid", OLD_POD)
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    new = node.hostdev("--pod-uid", NEW_POD)
    node.kubelet.wait_registered(HOSTDEV, count=2)
    old.logs("a newer instance of the driver speaks for it from now on")
    return Update(node, old, new)


def test_only_the_newest_speaks_and_the_old_ones_stream_stays_open(update: Update) -> None:
    node, since = update.node, len(update.node.kubelet.history)
    node.sysfs.resize(7)
    update.wait_all_known("Unhealthy")
    node.sysfs.resize(8)
    update.wait_all_known("Healthy")
    assert update.speakers(since) == {f"dra-{NEW_POD}.sock"}
    assert node.kubelet.history.of(StreamEnded) == []
    pod = node.running("it", Ask("it", {"cpu": CPU_0}))
    assert [call.endpoint.rpartition("/")[2] for call in node.calls()] == [f"dra-{NEW_POD}.sock"]
    node.end(pod)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_old_one_is_gone_the_new_one_says_everything_again(
    update: Update, number: signal.Signals
) -> None:
    """The kubelet forgets the driver's health with the old one's stream."""
    node = update.node
    pod = node.running("it", Ask("it", {"pages": PAGES}))
    node.sysfs.resize(7)
    update.wait_all_known("Unhealthy")
    begun = len(node.kubelet.history)
    assert update.old.end(number) == (0 if number is signal.SIGTERM else -number)
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the clear")
    since = last_clear(node)
    update.wait_all_known("Unhealthy")
    changed = {one.device: one.health for one in node.kubelet.history.of(Changed, since=since)}
    assert changed == {PAGES: "Unhealthy", CPU_0: "Healthy", CPU_1: "Healthy"}
    assert update.speakers(begun) == {f"dra-{NEW_POD}.sock"}
    node.end(pod)


def test_when_the_new_one_is_killed_the_old_one_speaks_again(update: Update) -> None:
    """And prepares, with what both of them know."""
    node = update.node
    pod = node.running("it", Ask("it", {"cpu": CPU_0}))
    begun = len(node.kubelet.history)
    update.new.end(signal.SIGKILL)
    node.kubelet.wait_for(lambda: node.kubelet.history.of(Cleared), "the clear")
    since = last_clear(node)
    update.wait_all_known("Healthy")
    assert update.speakers(since) <= {f"dra-{OLD_POD}.sock"} <= update.speakers(begun)
    other = node.run("other", Ask("other", {"r": CPU_0}))
    node.kubelet.wait_for(
        lambda: any("code=cpu.overlap" in event.message for event in node.kubelet.events_of(other)),
        "what the other one gave away",
    )
    node.end(pod)
    node.kubelet.wait_running(other)
    assert node.calls()[-1].endpoint.endswith(f"dra-{OLD_POD}.sock")


def last_clear(node: Node) -> int:
    """After how many entries of its history the kubelet last forgot the driver."""
    entries = list(node.kubelet.history)
    return max(at for at, entry in enumerate(entries, 1) if isinstance(entry, Cleared))
