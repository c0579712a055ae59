"""Broken devices: the pod's events and status have the same text, whether driver or engine found the
fault."""

import time
from pathlib import Path

import pytest
from kubelet.history import Called, Changed, Message

from driver_scenarios.node import CPU_1, HOSTDEV, NODE, ORDER_TRIES, PAGES, SICK, Ask, Node, parameters
from driver_scenarios.program import Program

THING = f"{SICK}/{NODE}/thing-0"
EVENT_TEXT = (
    f"[class=failed-device code=thing.broken device={THING} request=r retry=after-repair] bank 3 is dark;"
    " the device is Unhealthy, its taint is offered."
)
MESSAGE = "thing.broken: bank 3 is dark. Advice: check the device"


# --- faults that the engine finds -----------------------------------------------------------------------


@pytest.mark.usefixtures("hostdev")
def test_prepare_fails_with_the_engines_cause(node: Node) -> None:
    node.sysfs.resize(7)
    unhealthy = node.kubelet.wait_health(HOSTDEV, NODE, PAGES, "Unhealthy")
    summary = "7 pages of 2mi on NUMA node 0, 8 declared"
    assert unhealthy.message.startswith(f"mem.hugepages.pool_shrunk: {summary}. Advice: ")
    pod = node.run("it", Ask("it", {"r": PAGES}, [parameters("HugepagesParameters", pages=1)]))
    node.wait_event(
        pod,
        "it",
        f"[class=failed-device code=mem.hugepages.pool_shrunk device={HOSTDEV}/{NODE}/{PAGES} request=r"
        f" retry=after-repair] {summary}; the device is Unhealthy, its taint is offered.",
    )
    verdict = node.verdict("it")
    assert (verdict["class"], verdict["code"]) == ("failed-device", "mem.hugepages.pool_shrunk")
    assert verdict["taint"] == {"effect": "NoSchedule", "value": ""}
    node.run_and_wait("other", Ask("other", {"r": CPU_1}))
    node.sysfs.resize(8)
    node.kubelet.wait_running(pod)
    node.wait_healthy(PAGES)


@pytest.mark.usefixtures("hostdev")
def test_prepare_before_the_first_evaluation_gets_its_cause(node: Node) -> None:
    """The pages disappear just before the prepare, so that no evaluation has found the fault yet."""
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
    messages = [event.message for event in node.kubelet.events_of(pod)]
    assert len(messages) <= 2, messages
    assert all("code=mem.hugepages." in message for message in messages)


# --- faults that the driver finds -------------------------------------------------------------------------


def test_driver_reported_device_is_unhealthy_before_the_pods_event(
    node: Node, failing_driver: Program
) -> None:
    """The fault is saved, streamed, its taint published, then answered, with the same text everywhere."""
    began_s = wall_clock_offset_s()
    node.fate(it=["broken", "thing-0", "bank 3 is dark"])
    pod = node.run("it", Ask("it", {"r": "thing-0", "s": "thing-1"}), driver=SICK)
    node.wait_event(pod, "it", EVENT_TEXT)
    assert node.kubelet.health(SICK, NODE, "thing-0").message == MESSAGE
    assert node.kubelet.health(SICK, NODE, "thing-1").health == "Healthy"

    (known,) = failing_driver.records("broken")
    assert (known["claim"], known["kept"], known["health"]) == ("it", True, ["UNHEALTHY"])
    ((device, (taint,)),) = known["tainted"].items()
    assert (device, taint["key"], taint["effect"]) == ("thing-0", f"{SICK}/thing.broken", "NoSchedule")
    # which of the two a kubelet's threads take first is chance; tests/test_embed_plugin.py has it of the wire
    if not node.is_real:  # a real kubelet shows no single lists
        assert saved_s(node, began_s) <= min(delivered_s(node))
    written = [(record["what"], record["tainted"]) for record in failing_driver.records("taints", "broken")]
    before_error = written[: written.index(("broken", known["tainted"]))]
    assert ("taints", known["tainted"]) in before_error, "the taint is published before the error"
    assert len(failing_driver.records("prepare")) == 1, "the second try was answered from the cache"


def wall_clock_offset_s() -> float:
    """Return how far the wall clock is ahead of the monotonic clock [s]."""
    # an interrupt between the two reads gives too small a value
    return max(time.time() - time.monotonic() for _ in range(1000))


def saved_s(node: Node, began_s: float) -> float:
    """Return the monotonic time at which the file was written [s]."""
    file = node.kubelet.root / "plugins" / SICK / "drahealth" / "prepares.json"
    most_s = max(began_s, wall_clock_offset_s())  # a clock that is being set right runs faster or slower
    return file.stat().st_ctime - most_s


def delivered_s(node: Node) -> tuple[float, float]:
    """Return the monotonic times at which the device was Unhealthy and at which the call ended [s]."""
    timed = node.kubelet.history.timed_entries()
    shown = next(
        i for i, at in enumerate(timed) if isinstance(at.entry, Changed) and at.entry.health == "Unhealthy"
    )
    # what a busy kubelet makes of a message may come after the answer to its call
    shown_s = max(at.mono_s for at in timed[:shown] if isinstance(at.entry, Message))
    refused_s = next(at.mono_s for at in timed if isinstance(at.entry, Called))
    return shown_s, refused_s


def test_driver_reported_fault_holds_until_the_next_prepare(node: Node, failing_driver: Program) -> None:
    """The driver's check reports the device healthy all the time; another claim is not blocked."""
    node.fate(it=["broken", "thing-0", "bank 3 is dark"])
    it = node.run("it", Ask("it", {"r": "thing-0"}), driver=SICK)
    node.wait_event(it, "it", EVENT_TEXT, times=3)
    node.fate()  # of the driver, which is not asked again until the fault ends
    other = node.run_and_wait("other", Ask("other", {"r": "thing-0"}), driver=SICK)
    node.wait_healthy("thing-0", driver=SICK)
    node.wait_resources(other, [("Healthy", "")])
    node.kubelet.wait_running(it)
    assert [record["claim"] for record in failing_driver.records("prepare")] == ["it", "other", "it"]


def test_all_broken_devices_of_a_call_are_named_in_each_text(node: Node, failing_driver: Program) -> None:
    node.fate(**{name: ["broken", f"thing-{i}", "bank 3 is dark"] for i, name in enumerate("ab")})
    pod = node.pod("it", *(Ask(name, {"r": f"thing-{i}"}) for i, name in enumerate("abc")), driver=SICK)
    errors = set()
    for _ in range(ORDER_TRIES):
        with pytest.raises(ValueError, match="failed for ResourceClaim") as caught:
            node.kubelet.prepare_pod(pod)
        errors.add(str(caught.value).partition("ResourceClaim ")[2])
        if len(errors) == 2:
            break
    assert errors == {
        f"{mine}: [class=failed-device code=thing.broken device={SICK}/{NODE}/thing-{number} request=r"
        " retry=after-repair] bank 3 is dark; the device is Unhealthy, its taint is offered. Other failing"
        f" claims in this call: default/{other} (failed-device thing.broken"
        f" device={SICK}/{NODE}/thing-{1 - number})."
        for number, (mine, other) in enumerate(("ab", "ba"))
    }


# --- end of a fault ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("failing_driver")
def test_pod_of_a_dead_device_can_terminate(node: Node) -> None:
    """e2e_node: unprepare fails then succeeds"""
    pods = [
        node.run_and_wait(name, Ask(name, {"r": f"thing-{i}"}), driver=SICK) for i, name in enumerate("ab")
    ]
    node.fate(una=["broken", "thing-0", "bank 3 is dark"], unb=["busy", "in use"])
    node.end(pods[0])
    node.kubelet.wait_health(SICK, NODE, "thing-0", "Unhealthy")
    node.kubelet.delete_pod(pods[1])
    node.kubelet.wait_for(lambda: len(node.calls("NodeUnprepareResources")) > 2, "a second try")
    assert "code=driver.transient" in node.calls("NodeUnprepareResources")[-1].response.claims["uid-b"].error
    node.fate()
    node.kubelet.wait_gone(pods[1])


@pytest.mark.usefixtures("hostdev")
def test_pod_of_a_shrunk_pool_can_terminate(node: Node) -> None:
    pod = node.run_and_wait("it", Ask("it", {"r": PAGES}))
    node.sysfs.resize(7)
    node.kubelet.wait_health(HOSTDEV, NODE, PAGES, "Unhealthy")
    node.end(pod)
    assert node.cdi_files() == set()
    assert Path(node.kubelet.root / "plugins" / HOSTDEV / "ledger.json").read_bytes().count(b"uid-it") == 0
