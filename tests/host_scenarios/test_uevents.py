"""Device events, through the real kernel in a network namespace: heard, lost, forged, and none at all."""

from contextlib import closing
from pathlib import Path

from agents import HEALTHY, UNHEALTHY
from netns import Injector, run_in_user_namespace
from scenarios.row import BUSES

from host_scenarios.declarations import device
from host_scenarios.figures import Figures
from host_scenarios.hosts import Paper
from host_scenarios.listeners import source_of
from host_scenarios.paper_host import MELLANOX, NIC, PCI, PaperHost
from host_scenarios.stage import OWNER, Stage, stopped

HOW = "event of the real kernel, plain files, fake NVML"
FLOOD = 5_000
TOO_MANY = 30_000
"""Of 830 bytes each in the kernel: the room for them is 16 MiB at most."""
GPU = BUSES[1]
NIC_VARIABLES = {"SUBSYSTEM": "pci", "PCI_CLASS": "20000", "PCI_ID": "15B3:101D", "PCI_SLOT_NAME": NIC}


def tell(events: Injector, action: str, address: str = NIC) -> None:
    """An event of a PCI device."""
    variables = NIC_VARIABLES | {"PCI_SLOT_NAME": address}
    events.inject(action, f"/devices/pci0000:5d/{address}", **variables)


def test_a_gpu_that_loses_its_driver_then_its_place_and_gets_both_back(paper: Paper) -> None:
    """NVML's count is asked for every ten seconds; of the bus events tell."""
    paper.stage.cause("GPU unbound from its driver; NVML's count is asked for every 10 s", HOW)
    paper.host.unbind(GPU)
    tell(paper.events, "unbind", GPU)
    paper.host.fake.tell("reload gpus=1")
    paper.stage.hears("gpu-1", UNHEALTHY, "gpu.", also=f"no driver is bound to {GPU}")
    paper.stage.cause("GPU removed from the bus", HOW)
    whole, elsewhere = paper.host.sysfs.root / PCI / GPU, paper.host.sysfs.root / "removed"
    whole.rename(elsewhere)
    tell(paper.events, "remove", GPU)
    missing = f"gpu.missing: not among the 1 GPUs that NVML counts; {GPU} is gone from the PCI bus"
    paper.stage.hears("gpu-1", UNHEALTHY, "gpu.", also=missing)
    paper.stage.hears("gpu-0", HEALTHY, "")
    paper.stage.cause("GPU added and bound again; NVML's count, and 1 s of probation", HOW)
    elsewhere.rename(whole)
    paper.host.bind(GPU, "nvidia")
    for action in ("add", "bind"):
        tell(paper.events, action, GPU)
    paper.host.fake.tell("reload gpus=2")
    paper.stage.hears("gpu-1", HEALTHY, "")


def test_a_declared_device_that_is_removed_is_missed_until_it_is_back(paper: Paper) -> None:
    paper.stage.cause("declared PCI device removed", HOW)
    paper.host.unplug(NIC)
    tell(paper.events, "remove")
    paper.stage.hears("nic-0", UNHEALTHY, f"pci.missing: {NIC} is gone from the PCI bus", OWNER)
    paper.stage.cause("declared PCI device added again", HOW)
    paper.host.plug(NIC)
    tell(paper.events, "add")
    paper.stage.hears("nic-0", HEALTHY, "", OWNER)


def test_a_declared_device_that_another_driver_gets_is_unhealthy(paper: Paper) -> None:
    paper.stage.cause("declared PCI device unbound, another driver bound", HOW)
    paper.host.bind(NIC, "vfio-pci")
    for action in ("unbind", "bind"):
        tell(paper.events, action)
    text = f"pci.unbound: vfio-pci is bound; {MELLANOX} was at start"
    paper.stage.hears("nic-0", UNHEALTHY, text, OWNER)
    paper.host.bind(NIC, MELLANOX)
    tell(paper.events, "bind")
    paper.stage.hears("nic-0", HEALTHY, "", OWNER)


def test_a_device_that_says_that_it_changed_is_looked_at(paper: Paper) -> None:
    paper.stage.cause("declared PCI device changed: 4 lanes instead of 16", HOW)
    paper.host.rewrite(f"{PCI}/{NIC}/current_link_width", "4")
    tell(paper.events, "change")
    paper.stage.hears("nic-0", HEALTHY, "pci.link_width: 4 of 16 lanes, 16 at start", OWNER)
    paper.host.rewrite(f"{PCI}/{NIC}/current_link_width", "16")
    tell(paper.events, "change")
    paper.stage.hears("nic-0", HEALTHY, "", OWNER)


# --- blocks of memory, which nobody looks at by time --------------------------------------------------------


def memory(block: int) -> dict[str, str]:
    """Path and variables of its events."""
    return {"path": f"/devices/system/memory/memory{block}", "SUBSYSTEM": "memory"}


def test_whoever_is_not_the_kernel_makes_nobody_look(paper: Paper) -> None:
    """What the kernel says next is of something else, and is heard; then it says the same as the forger."""
    text = paper.host.switch_off(5)
    paper.events.spoof("offline", **memory(5))
    paper.host.unplug(NIC)
    tell(paper.events, "remove")
    paper.stage.hears("nic-0", UNHEALTHY, f"pci.missing: {NIC} is gone from the PCI bus", OWNER)
    paper.stage.hears("memory-node1", HEALTHY, "")
    paper.stage.cause("memory block offline; a forged event before, which nobody believed", HOW)
    paper.events.inject("offline", **memory(5))
    paper.stage.hears("memory-node1", UNHEALTHY, text)
    paper.host.plug(NIC)
    tell(paper.events, "add")
    paper.stage.hears("nic-0", HEALTHY, "", OWNER)


def test_a_flood_of_events_hides_none(paper: Paper) -> None:
    for number in range(FLOOD):
        paper.events.inject("change", f"/devices/flood{number}", SUBSYSTEM="pci")
    paper.stage.cause(f"memory block offline, behind {FLOOD} events of PCI devices", HOW)
    text = paper.host.switch_off(6)
    paper.events.inject("offline", **memory(6))
    paper.stage.hears("memory-node1", UNHEALTHY, text)


def test_events_that_the_kernel_threw_away_are_made_good_by_a_look(paper: Paper) -> None:
    with stopped(paper.stage.agent.pid):
        for _ in range(TOO_MANY):
            paper.events.inject("change")
        text = paper.host.switch_off(7)
        paper.events.inject("offline", **memory(7))  # there is no room for it
        paper.stage.cause(f"memory block offline, its event lost among {TOO_MANY}", HOW)
    paper.stage.hears("memory-node1", UNHEALTHY, text)
    said = paper.stage.follower.hear(lambda one: "throw" in source_of(one, "uevents")["detail"], "a loss")
    assert source_of(said, "uevents")["state"] == "ok"


# --- nobody tells -------------------------------------------------------------------------------------------


def test_where_no_events_come_the_bus_is_looked_at_by_time(directory: Path, figures: Figures) -> None:
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
        stage.hears("nic", HEALTHY, "", OWNER)
        uevents = source_of(stage.follower.newest, "uevents")
        assert uevents["state"] == "absent"
        assert "the kernel sends no device events into this network namespace" in uevents["detail"]
        assert uevents["detail"].endswith("looked at by time instead")
        stage.cause("declared PCI device removed; no events (user namespace), bus read every 3 s", HOW)
        host.unplug(NIC)
        stage.hears("nic", UNHEALTHY, f"pci.missing: {NIC} is gone from the PCI bus", OWNER)
