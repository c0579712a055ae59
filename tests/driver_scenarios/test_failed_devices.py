"""Broken devices: what the pod's events and its status say of them is the same, whoever knew it first."""

import time
from pathlib import Path

import pytest
from kubelet.history import Called, Changed, Message

from driver_scenarios.node import CPU_1, HOSTDEV, NODE, PAGES, SICK, Ask, Node, parameters
from driver_scenarios.program import Program

THING = f"{SICK}/{NODE}/thing-0"
TOLD = (
    f"[class=failed-device code=thing.broken device={THING} request=r retry=after-repair] bank 3 is dark;"
    " the device is Unhealthy, its taint is offered."
)
MESSAGE = "thing.broken: bank 3 is dark. Advice: see to the device"


# --- found by the health engine -------------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_what_the_health_engine_holds_of_a_device_is_what_a_prepare_is_refused_with(node: Node) -> None:
    node.sysfs.resize(7)
    unhealthy = node.kubelet.wait_health(HOSTDEV, NODE, PAGES, "Unhealthy")
    summary = "7 pages of 2mi on node 0, 8 declared"
    assert unhealthy.message.startswith(f"mem.hugepages.pool_shrunk: {summary}. Advice: ")
    pod = node.run("it", Ask("it", {"r": PAGES}, [parameters("HugepagesParameters", pages=1)]))
    node.tells(
        pod,
        "it",
        f"[class=failed-device code=mem.hugepages.pool_shrunk device={HOSTDEV}/{NODE}/{PAGES} request=r"
        f" retry=after-repair] {summary}; the device is Unhealthy, its taint is offered.",
    )
    verdict = node.verdict("it")
    assert (verdict["class"], verdict["code"]) == ("failed-device", "mem.hugepages.pool_shrunk")
    assert verdict["taint"] == {"effect": "NoSchedule", "value": ""}
    node.running("other", Ask("other", {"r": CPU_1}))
    node.sysfs.resize(8)
    node.kubelet.wait_running(pod)
    node.wait_healthy(PAGES)


@pytest.mark.usefixtures("hostdev")
def test_whoever_asks_before_the_engine_has_looked_is_told_in_the_end_what_it_found(node: Node) -> None:
    """The pages are gone in the moment of the prepare; that a device is broken, one must have seen."""
    free = "devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages"
    node.sysfs.write(free, "7")
    node.sysfs.resize(7)
    pod = node.run("it", Ask("it", {"r": PAGES}))
    node.kubelet.wait_for(
        lambda: [
            event
            for event in node.kubelet.events_of(pod)
            if "code=mem.hugepages.pool_shrunk" in event.message and event.count > 1
        ],
        "the engine's word",
    )
    told = [event.message for event in node.kubelet.events_of(pod)]
    assert len(told) <= 2, told
    assert all("code=mem.hugepages." in one for one in told)


# --- found by the driver ----------------------------------------------------------------------------------


def test_a_device_that_only_its_driver_finds_broken_is_unhealthy_before_the_pod_hears_of_it(
    node: Node, sick: Program
) -> None:
    """On the disk, on the stream, as a taint, then in the answer; and the same words everywhere."""
    began_s = ahead_s()
    node.fate(it=["broken", "thing-0", "bank 3 is dark"])
    pod = node.run("it", Ask("it", {"r": "thing-0", "s": "thing-1"}), driver=SICK)
    node.tells(pod, "it", TOLD)
    assert node.kubelet.health(SICK, NODE, "thing-0").message == MESSAGE
    assert node.kubelet.health(SICK, NODE, "thing-1").health == "Healthy"

    (known,) = sick.said("broken")
    assert (known["claim"], known["kept"], known["health"]) == ("it", True, ["UNHEALTHY"])
    ((device, (taint,)),) = known["tainted"].items()
    assert (device, taint["key"], taint["effect"]) == ("thing-0", f"{SICK}/thing.broken", "NoSchedule")
    # which of the two a kubelet's threads take first is chance; tests/test_embed_plugin.py has it of the wire
    assert kept_s(node, began_s) <= min(told_s(node))
    node.kubelet.wait_for(
        lambda: known["tainted"] in [one["tainted"] for one in sick.said("taints")], "taint"
    )
    assert len(sick.said("prepare")) == 1, "the second try was answered from memory"


def ahead_s() -> float:
    """How much the wall clock, whose times files have, is ahead of the other now [s]."""
    # whoever is interrupted between the two clocks takes too little
    return max(time.time() - time.monotonic() for _ in range(1000))


def kept_s(node: Node, began_s: float) -> float:
    """When the file was written [monotonic s]."""
    file = node.kubelet.root / "plugins" / SICK / "drahealth" / "prepares.json"
    most_s = max(began_s, ahead_s())  # a clock that is being set right runs faster or slower
    return file.stat().st_ctime - most_s


def told_s(node: Node) -> tuple[float, float]:
    """When the device was said to be Unhealthy, and the call ended [monotonic s]."""
    timed = node.kubelet.history.timed()
    shown = next(
        i for i, at in enumerate(timed) if isinstance(at.entry, Changed) and at.entry.health == "Unhealthy"
    )
    # what a busy kubelet makes of a message may come after the answer to its call
    shown_s = max(at.mono_s for at in timed[:shown] if isinstance(at.entry, Message))
    refused_s = next(at.mono_s for at in timed if isinstance(at.entry, Called))
    return shown_s, refused_s


def test_a_driver_s_word_holds_until_it_prepares_the_device_again(node: Node, sick: Program) -> None:
    """Its check holds the device healthy all the time. Another claim is another question."""
    node.fate(it=["broken", "thing-0", "bank 3 is dark"])
    it = node.run("it", Ask("it", {"r": "thing-0"}), driver=SICK)
    node.tells(it, "it", TOLD, times=3)
    other = node.running("other", Ask("other", {"r": "thing-0"}), driver=SICK)
    node.wait_healthy("thing-0", driver=SICK)
    node.wait_resources(other, [("Healthy", "")])
    node.fate()
    node.kubelet.wait_running(it)
    assert [one["claim"] for one in sick.said("prepare")] == ["it", "other", "it"]


def test_all_broken_devices_of_a_call_are_named_in_each_text(node: Node, sick: Program) -> None:
    node.fate(**{name: ["broken", f"thing-{i}", "bank 3 is dark"] for i, name in enumerate("ab")})
    pod = node.pod("it", *(Ask(name, {"r": f"thing-{i}"}) for i, name in enumerate("abc")), driver=SICK)
    said = set()
    for _ in range(16):
        with pytest.raises(ValueError, match="failed for ResourceClaim") as caught:
            node.kubelet.prepare_pod(pod)
        said.add(str(caught.value).partition("ResourceClaim ")[2])
    assert said == {
        f"{mine}: [class=failed-device code=thing.broken device={SICK}/{NODE}/thing-{number} request=r"
        " retry=after-repair] bank 3 is dark; the device is Unhealthy, its taint is offered. Other failing"
        f" claims in this call: default/{other} (failed-device thing.broken"
        f" device={SICK}/{NODE}/thing-{1 - number})."
        for number, (mine, other) in enumerate(("ab", "ba"))
    }


# --- when it ends -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sick")
def test_the_pod_of_a_dead_device_can_end(node: Node) -> None:
    """e2e_node: unprepare fails then succeeds"""
    pods = [node.running(name, Ask(name, {"r": f"thing-{i}"}), driver=SICK) for i, name in enumerate("ab")]
    node.fate(una=["broken", "thing-0", "bank 3 is dark"], unb=["busy", "in use"])
    node.end(pods[0])
    node.kubelet.wait_health(SICK, NODE, "thing-0", "Unhealthy")
    node.kubelet.delete_pod(pods[1])
    node.kubelet.wait_for(lambda: len(node.calls("NodeUnprepareResources")) > 2, "a second try")
    assert "code=driver.transient" in node.calls("NodeUnprepareResources")[-1].response.claims["uid-b"].error
    node.fate()
    node.kubelet.wait_gone(pods[1])


@pytest.mark.usefixtures("hostdev")
def test_the_pod_of_a_pool_that_shrank_can_end(node: Node) -> None:
    pod = node.running("it", Ask("it", {"r": PAGES}))
    node.sysfs.resize(7)
    node.kubelet.wait_health(HOSTDEV, NODE, PAGES, "Unhealthy")
    node.end(pod)
    assert node.cdi_files() == set()
    assert Path(node.kubelet.root / "plugins" / HOSTDEV / "ledger.json").read_bytes().count(b"uid-it") == 0
