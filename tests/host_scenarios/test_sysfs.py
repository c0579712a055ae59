"""Counters and states in sysfs: the real one with files bound over it, and one of plain files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from agents import HEALTHY, UNHEALTHY
from private_mounts import within_mounts

from host_scenarios.declarations import device
from host_scenarios.figures import Figures
from host_scenarios.hosts import Paper
from host_scenarios.paper_host import CARD, MAX_KHZ, NIC, PCI
from host_scenarios.stage import OWNER, Stage

OVERLAY: Final = "a file laid over the real /sys"
PAPER: Final = "emulated, with an event of the real kernel"
LAY_OVER: Final = 'mount --make-rprivate /; mount -t overlay overlay -o "lowerdir=$1:/sys" /sys'
MODULE: Final = "CPU_SrcID#0_MC#0_Chan#0_DIMM#0"
EDAC: Final = "devices/system/edac/mc/mc0"
CPU0: Final = "devices/system/cpu/cpu0"
CONFIG: Final = '[gpu]\nslow-period = "200ms"\n[errors]\ncorrectable = 24\n'
"""The PCI bus is read at a sixth of the rate of slow GPU readings."""

FUNCTION: Final = {
    "vendor": "0x15b3",
    "device": "0x101d",
    "class": "0x020000",
    "current_link_width": "16",
    "max_link_width": "16",
    "aer_dev_fatal": "TOTAL_ERR_FATAL 0",
    "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0",
    "aer_dev_correctable": "TOTAL_ERR_COR 0",
}
"""Files of a NIC's PCI function."""
FILES: Final = {
    f"{EDAC}/mc_name": "Skylake Socket#0 IMC#0",
    f"{EDAC}/dimm0/dimm_label": MODULE,
    **{f"{EDAC}/{where}{count}": "0" for where in ("", "dimm0/dimm_") for count in ("ce_count", "ue_count")},
    **{f"{CPU0}/thermal_throttle/{scope}_throttle_count": "0" for scope in ("core", "package")},
    **{f"{PCI}/{address}/{name}": text for address in (NIC, CARD) for name, text in FUNCTION.items()},
}
"""Memory controller, thermal counters and NICs, which virtual machines lack."""


class OverlaidSysfs(NamedTuple):
    """Real /sys with files bound over it."""

    stage: Stage
    files: Path

    def write(self, path: str, text: str) -> None:
        """Write in place: a new file would not be visible."""
        with (self.files / path).open("r+b", buffering=0) as file:
            file.write(f"{text}\n".encode())
            file.truncate()


@pytest.fixture(scope="module")
def overlaid_sysfs(directory: Path, figures: Figures) -> Iterator[OverlaidSysfs]:
    """Agent that reads /sys in its own mount namespace."""
    own = directory / "laid"
    files = own / "sys"
    for path, text in FILES.items():
        (files / path).parent.mkdir(parents=True, exist_ok=True)
        (files / path).write_text(f"{text}\n")
    (own / "cgroup").mkdir()
    within = within_mounts(LAY_OVER, files)
    flags = ["--cgroupfs-root", str(own / "cgroup"), "--nvml-library", "/nonexistent"]
    with Stage(
        own,
        figures,
        *flags,
        config=CONFIG,
        environ={"SYSTEMD_DEVICE_VERIFY_SYSFS": "0"},  # libudev accepts no other filesystem
        within=within,
        declared=device("nic", "pci", address=NIC) + device("card", "pci", address=CARD),
    ) as stage:
        for name in ("nic", "card"):
            stage.expect_health(name, HEALTHY, "", OWNER)
        yield OverlaidSysfs(stage, files)


@pytest.mark.parametrize("scope", ["core", "package"])
def test_heat_throttled_cpus_are_degraded(overlaid_sysfs: OverlaidSysfs, scope: str) -> None:
    overlaid_sysfs.stage.cause(f"10 thermal-throttle events of a {scope}", OVERLAY)
    overlaid_sysfs.write(f"{CPU0}/thermal_throttle/{scope}_throttle_count", "10")
    text = f"at least 10 {scope} thermal-throttle events in 60 s"
    overlaid_sysfs.stage.expect_health("cpu-node0", HEALTHY, "cpu.throttled.", also=text)


def test_module_with_many_corrected_errors_is_named(overlaid_sysfs: OverlaidSysfs) -> None:
    overlaid_sysfs.stage.cause("24 correctable errors of a memory module (EDAC)", OVERLAY)
    overlaid_sysfs.write(f"{EDAC}/dimm0/dimm_ce_count", "24")
    overlaid_sysfs.write(f"{EDAC}/ce_count", "24")
    text = f"mem.ecc.correctable_rate: mc0 {MODULE}: at least 24 correctable errors in 1 d"
    overlaid_sysfs.stage.expect_health("memory-node0", HEALTHY, text)


def test_module_with_lost_data_is_named_until_a_reset(overlaid_sysfs: OverlaidSysfs) -> None:
    overlaid_sysfs.stage.cause("an uncorrectable error of a memory module (EDAC)", OVERLAY)
    for counter in ("dimm0/dimm_ce_count", "ce_count"):
        overlaid_sysfs.write(f"{EDAC}/{counter}", "24")  # the message after the reset
    overlaid_sysfs.write(f"{EDAC}/dimm0/dimm_ue_count", "1")
    overlaid_sysfs.write(f"{EDAC}/ue_count", "1")
    text = f"mem.ecc.uncorrectable: mc0 {MODULE}: 1 uncorrectable error since"
    overlaid_sysfs.stage.expect_health("memory-node0", UNHEALTHY, text)
    overlaid_sysfs.write(f"{EDAC}/dimm0/dimm_ue_count", "0")
    overlaid_sysfs.stage.cause("the count of uncorrectable errors reset", OVERLAY)
    overlaid_sysfs.write(f"{EDAC}/ue_count", "0")
    overlaid_sysfs.stage.expect_health("memory-node0", HEALTHY, "mem.ecc.correctable_rate: ")


def test_link_with_lost_lanes_is_degraded_until_they_return(overlaid_sysfs: OverlaidSysfs) -> None:
    overlaid_sysfs.stage.cause("a PCI link of 8 lanes instead of 16", OVERLAY)
    overlaid_sysfs.write(f"{PCI}/{NIC}/current_link_width", "8")
    overlaid_sysfs.stage.expect_health("nic", HEALTHY, "pci.link_width: 8 of 16 lanes, 16 at start", OWNER)
    overlaid_sysfs.write(f"{PCI}/{NIC}/current_link_width", "16")
    overlaid_sysfs.stage.expect_health("nic", HEALTHY, "", OWNER)


def test_fatal_link_error_is_unhealthy(overlaid_sysfs: OverlaidSysfs) -> None:
    overlaid_sysfs.stage.cause("a fatal PCIe error (AER)", OVERLAY)
    overlaid_sysfs.write(f"{PCI}/{CARD}/aer_dev_fatal", "TOTAL_ERR_FATAL 1")
    overlaid_sysfs.stage.expect_health(
        "card", UNHEALTHY, "pci.aer.fatal: fatal PCIe errors: at least 1 in 1 h", OWNER
    )


# --- host of plain files ----------------------------------------------------------------------------------


def test_offline_memory_block_is_unhealthy_until_it_returns(paper: Paper) -> None:
    block = {"path": "/devices/system/memory/memory4", "SUBSYSTEM": "memory"}
    paper.stage.cause("a memory block offline", PAPER)
    text = paper.host.switch_off(4)
    paper.events.inject("offline", **block)
    paper.stage.expect_health("memory-node1", UNHEALTHY, text)
    paper.stage.cause("the memory block online again", PAPER)
    paper.host.switch_on(4)
    paper.events.inject("online", **block)
    paper.stage.expect_health("memory-node1", HEALTHY, "")


def test_offline_numa_node_is_unhealthy_until_it_returns(paper: Paper) -> None:
    paper.stage.cause("a NUMA node offline", PAPER)
    for name in ("online", "has_memory"):
        paper.host.sysfs.write(f"devices/system/node/{name}", "0-1,3-7")
    paper.events.inject("remove", "/devices/system/node/node2", SUBSYSTEM="node")
    paper.stage.expect_health(
        "memory-node2", UNHEALTHY, "mem.numa.offline: NUMA node 2 is offline, it was online"
    )
    paper.stage.cause("the NUMA node online again", PAPER)
    for name in ("online", "has_memory"):
        paper.host.sysfs.write(f"devices/system/node/{name}", "0-7")
    paper.events.inject("add", "/devices/system/node/node2", SUBSYSTEM="node")
    paper.stage.expect_health("memory-node2", HEALTHY, "")


def test_disabled_smt_is_reported_as_info(paper: Paper) -> None:
    paper.stage.cause("SMT off, which takes CPUs offline", PAPER)
    paper.host.sysfs.write("devices/system/cpu/smt/active", "0")
    paper.events.inject("offline", "/devices/system/cpu/cpu0", SUBSYSTEM="cpu")
    paper.stage.expect_cause("cpu-node0", "info", "cpu.smt: SMT off, on at start")
    paper.stage.expect_health("cpu-node0", HEALTHY, "")


def test_capped_cpu_is_degraded(paper: Paper) -> None:
    paper.stage.cause("a CPU's frequency capped; read at CPU events, else every 60 s", PAPER)
    paper.host.sysfs.write("devices/system/cpu/cpu6/cpufreq/scaling_max_freq", f"{MAX_KHZ // 2}")
    paper.events.inject("change", "/devices/system/cpu/cpu6", SUBSYSTEM="cpu")
    paper.stage.expect_health("cpu-node6", HEALTHY, "cpu.capped: CPU 6 capped at 1.5 GHz, 3 GHz at start")
