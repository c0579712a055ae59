"""Device events through the real kernel in a network namespace: received, dropped, forged, and none."""

from contextlib import closing
from pathlib import Path

from agents import DRIVER, HEALTHY, UNHEALTHY, suspend_process
from machine import machine_lock
from netns import Injector, run_in_user_namespace
from scenarios.row import BUSES

from host_scenarios.declarations import device
from host_scenarios.figures import Figures
from host_scenarios.hosts import Paper
from host_scenarios.paper_host import MELLANOX, NIC, PCI, PaperHost
from host_scenarios.stage import OWNER, Stage
from host_scenarios.subscribers import Kubelet, source_of

HOW = "event of the real kernel, plain files, fake NVML"
FLOOD = 5_000
ATTEMPTS = 5
LISTS = 3
"""Number of health lists, one each 500 ms, by which a reading of the memory would be seen."""
TOO_MANY = 30_000
"""Number of events of 830 bytes each in the kernel, more than the largest buffer of 16 MiB."""
GPU = BUSES[1]
NIC_VARIABLES = {"SUBSYSTEM": "pci", "PCI_CLASS": "20000", "PCI_ID": "15B3:101D", "PCI_SLOT_NAME": NIC}


def emit_event(events: Injector, action: str, address: str = NIC) -> None:
    """Emit an event of a PCI device."""
    variables = NIC_VARIABLES | {"PCI_SLOT_NAME": address}
    events.inject(action, f"/devices/pci0000:5d/{address}", **variables)


def test_gpu_recovers_after_losing_its_driver_and_its_slot(paper: Paper) -> None:
    """NVML's count is read every ten seconds; events report the bus at once."""
    paper.stage.cause("GPU unbound from its driver; NVML's count is asked for every 10 s", HOW)
    paper.host.unbind(GPU)
    emit_event(paper.events, "unbind", GPU)
    paper.host.fake.send("reload gpus=1")
    paper.stage.expect_health("gpu-1", UNHEALTHY, "gpu.", also=f"no driver is bound to {GPU}")
    paper.stage.cause("GPU removed from the bus", HOW)
    whole, elsewhere = paper.host.sysfs.root / PCI / GPU, paper.host.sysfs.root / "removed"
    whole.rename(elsewhere)
    emit_event(paper.events, "remove", GPU)
    missing = f"gpu.missing: not among the 1 GPUs of NVML; {GPU} is no longer on the PCI bus"
    paper.stage.expect_health("gpu-1", UNHEALTHY, "gpu.", also=missing)
    paper.stage.expect_health("gpu-0", HEALTHY, "")
    paper.stage.cause("GPU added and bound again; NVML's count, and 1 s of probation", HOW)
    elsewhere.rename(whole)
    paper.host.bind(GPU, "nvidia")
    for action in ("add", "bind"):
        emit_event(paper.events, action, GPU)
    paper.host.fake.send("reload gpus=2")
    paper.stage.expect_health("gpu-1", HEALTHY, "")


def test_removed_declared_device_is_unhealthy_until_it_returns(paper: Paper) -> None:
    paper.stage.cause("declared PCI device removed", HOW)
    paper.host.unplug(NIC)
    emit_event(paper.events, "remove")
    paper.stage.expect_health("nic-0", UNHEALTHY, f"pci.missing: {NIC} is no longer on the PCI bus", OWNER)
    paper.stage.cause("declared PCI device added again", HOW)
    paper.host.plug(NIC)
    emit_event(paper.events, "add")
    paper.stage.expect_health("nic-0", HEALTHY, "", OWNER)


def test_declared_device_bound_to_another_driver_is_unhealthy(paper: Paper) -> None:
    paper.stage.cause("declared PCI device unbound, another driver bound", HOW)
    paper.host.bind(NIC, "vfio-pci")
    for action in ("unbind", "bind"):
        emit_event(paper.events, action)
    text = f"pci.unbound: vfio-pci is bound; bound at start: {MELLANOX}"
    paper.stage.expect_health("nic-0", UNHEALTHY, text, OWNER)
    paper.host.bind(NIC, MELLANOX)
    emit_event(paper.events, "bind")
    paper.stage.expect_health("nic-0", HEALTHY, "", OWNER)


def test_change_event_of_a_device_causes_a_reading(paper: Paper) -> None:
    paper.stage.cause("declared PCI device changed: 4 lanes instead of 16", HOW)
    paper.host.rewrite(f"{PCI}/{NIC}/current_link_width", "4")
    emit_event(paper.events, "change")
    paper.stage.expect_health("nic-0", HEALTHY, "pci.link_width: 4 of 16 lanes, 16 at start", OWNER)
    paper.host.rewrite(f"{PCI}/{NIC}/current_link_width", "16")
    emit_event(paper.events, "change")
    paper.stage.expect_health("nic-0", HEALTHY, "", OWNER)


# --- memory blocks, which are read only at events --------------------------------------------------------


def memory(block: int) -> dict[str, str]:
    """Return path and variables of a memory block's events."""
    return {"path": f"/devices/system/memory/memory{block}", "SUBSYSTEM": "memory"}


def test_forged_event_causes_no_reading(paper: Paper) -> None:
    """The kernel's next event, about something else, is received; then it sends the forged event itself.

    The event of a real CPU that another test took offline is received here, too, and its reading can be late.
    An agent that heeds a forged event does so at every attempt.
    """
    kubelet = paper.stage.kubelets[DRIVER]
    paper.stage.expect_health("memory-node1", HEALTHY, "")
    for _ in range(ATTEMPTS):
        with machine_lock():
            text = paper.host.switch_off(5)
            paper.events.spoof("offline", **memory(5))
            paper.host.unplug(NIC)
            emit_event(paper.events, "remove")
            missing = f"pci.missing: {NIC} is no longer on the PCI bus"
            paper.stage.expect_health("nic-0", UNHEALTHY, missing, OWNER)
            for _ in range(LISTS):
                wait_for_list(kubelet, "memory-node1")
            is_ignored = kubelet.entries["memory-node1"].health == HEALTHY
        if is_ignored:
            break
        switch_on(paper, 5)
        plug_nic(paper)
    assert is_ignored, f"memory was read in {ATTEMPTS} attempts"
    paper.stage.cause("memory block offline; after a forged event that was ignored", HOW)
    paper.events.inject("offline", **memory(5))
    paper.stage.expect_health("memory-node1", UNHEALTHY, text)
    switch_on(paper, 5)
    plug_nic(paper)


def switch_on(paper: Paper, block: int) -> None:
    """Bring a block of memory online again, and wait until its node is Healthy."""
    paper.host.switch_on(block)
    paper.events.inject("online", **memory(block))
    paper.stage.expect_health("memory-node1", HEALTHY, "")


def wait_for_list(kubelet: Kubelet, device: str) -> None:
    """Wait for the next health list with the device."""
    before = kubelet.entries[device]
    kubelet.wait_for(lambda: kubelet.entries[device] is not before, f"another list with {device}")


def plug_nic(paper: Paper) -> None:
    """Add the NIC to the bus again, and wait until it is Healthy."""
    paper.host.plug(NIC)
    emit_event(paper.events, "add")
    paper.stage.expect_health("nic-0", HEALTHY, "", OWNER)


def test_event_flood_hides_no_event(paper: Paper) -> None:
    for number in range(FLOOD):
        paper.events.inject("change", f"/devices/flood{number}", SUBSYSTEM="pci")
    paper.stage.cause(f"memory block offline, behind {FLOOD} events of PCI devices", HOW)
    text = paper.host.switch_off(6)
    paper.events.inject("offline", **memory(6))
    paper.stage.expect_health("memory-node1", UNHEALTHY, text)
    switch_on(paper, 6)


def test_dropped_events_are_recovered_by_a_reading(paper: Paper) -> None:
    with suspend_process(paper.stage.agent.pid):
        for _ in range(TOO_MANY):
            paper.events.inject("change")
        text = paper.host.switch_off(7)
        paper.events.inject("offline", **memory(7))  # the buffer is full
        paper.stage.cause(f"memory block offline, its event lost among {TOO_MANY}", HOW)
    paper.stage.expect_health("memory-node1", UNHEALTHY, text)
    document = paper.stage.follower.wait_for(
        lambda entry: "dropped" in source_of(entry, "uevents")["detail"], "a loss"
    )
    assert source_of(document, "uevents")["state"] == "ok"
    switch_on(paper, 7)


# --- no events -------------------------------------------------------------------------------------------


def test_bus_is_polled_without_events(directory: Path, figures: Figures) -> None:
    run_in_user_namespace("true")
    own = directory / "deaf"
    own.mkdir()
    with (
        closing(PaperHost(own)) as host,
        Stage(
            own,
            figures,
            *(*host.flags, "--nvml-library", "/nonexistent"),
            config='[gpu]\nslow-period = "500ms"\n',
            within=["unshare", "-U", "-r", "-n"],
            declared=device("nic", "pci", address=NIC),
        ) as stage,
    ):
        stage.expect_health("nic", HEALTHY, "", OWNER)
        document = stage.follower.wait_for(
            lambda entry: source_of(entry, "uevents")["state"] != "starting", "the source of events has begun"
        )
        uevents = source_of(document, "uevents")
        assert uevents["state"] == "absent"
        assert "the kernel sends no device events to this network namespace" in uevents["detail"]
        assert uevents["detail"].endswith("devices are polled instead")
        stage.cause("declared PCI device removed; no events (user namespace), bus read every 3 s", HOW)
        host.unplug(NIC)
        stage.expect_health("nic", UNHEALTHY, f"pci.missing: {NIC} is no longer on the PCI bus", OWNER)
