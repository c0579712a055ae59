"""Kernel-log lines: on the host of plain files, and one in the real log."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from agents import HEALTHY, UNHEALTHY, print_figure
from machine import machine_lock, skip_unless_kernel_log

from host_scenarios.declarations import device
from host_scenarios.figures import EMULATED, REAL, Figures
from host_scenarios.hosts import Paper
from host_scenarios.paper_host import CARD, MELLANOX, PaperHost
from host_scenarios.stage import OWNER, Stage

DEVICE = Path("/dev/kmsg")
FLOOD = 100_000
CHUNK = 1_000
LINE = "a line in the kernel log (FIFO): "

CPUS = [
    (1, HEALTHY, "cpu.lockup.soft: soft lockup on CPU 1",
     "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [a:7]"),
    (2, UNHEALTHY, "cpu.lockup.hard: hard lockup on CPU 2",
     "watchdog: Watchdog detected hard LOCKUP on cpu 2"),
    (3, UNHEALTHY, "cpu.machine_check: uncorrected machine check on CPU 3 since boot",
     "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400"),
]  # fmt: skip
NODE = [
    ("node.hung_task: blocked for minutes: ", "INFO: task dd:456 blocked for more than 122 seconds."),
    ("node.read_only: EXT4 on sda1", "EXT4-fs (sda1): Remounting filesystem read-only"),
    ("node.nvme: nvme0: I/O timeout", "nvme nvme0: I/O 12 QID 3 timeout, aborting"),
    ("node.rcu_stall: rcu_preempt stalled", "rcu: INFO: rcu_preempt self-detected stall on CPU"),
    ("node.oom: no memory left, sh was killed",
     "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=sh,"
     "pid=7,uid=0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cpu", "health", "verdict", "line"), CPUS, ids=["soft lockup", "hard lockup", "MCE"]
)
def test_log_line_about_a_cpu_changes_its_verdict(
    paper: Paper, cpu: int, health: int, verdict: str, line: str
) -> None:
    paper.stage.cause(LINE + verdict.partition(":")[0], EMULATED)
    paper.host.kernel(line)
    paper.stage.expect_health(f"cpu-node{cpu}", health, verdict)


def test_corrected_machine_checks_count_from_a_limit(paper: Paper) -> None:
    line = "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 5: 8c00004000010091"
    paper.stage.cause("24 corrected machine checks of a CPU in the kernel log (FIFO)", EMULATED)
    paper.host.kernel(line, times=24)
    text = "cpu.machine_check.corrected: at least 24 corrected machine checks on CPU 4 in 1 d"
    paper.stage.expect_health("cpu-node4", HEALTHY, text)


@pytest.mark.usefixtures("poisoned_page")  # another node has one in its counter, which is read later
def test_poisoned_page_in_the_log_counts_for_uncounted_memory(paper: Paper) -> None:
    paper.stage.cause(LINE + "hwpoison", EMULATED)
    paper.host.kernel("Memory failure: 0x40fa6: recovery action for dirty LRU page: Recovered")
    text = "mem.poisoned: 1 line of memory failure in the kernel log"
    paper.stage.expect_health("memory-node5", UNHEALTHY, text)
    paper.stage.expect_health("memory-node1", HEALTHY, "")


def test_module_errors_count_for_the_memory_of_its_socket(paper: Paper) -> None:
    module = "CPU_SrcID#3_MC#0_Chan#1_DIMM#0"
    paper.stage.cause(LINE + "EDAC UE with the module's label", EMULATED)
    paper.host.kernel(f"EDAC MC0: 1 UE memory read error on {module} (channel:1 slot:0 page:0x1 offset:0x0)")
    paper.stage.expect_health("memory-node3", UNHEALTHY, f"mem.ecc.uncorrectable: mc0 {module}: ")
    paper.stage.expect_health("memory-node2", HEALTHY, "")


def test_pci_error_is_reported_for_its_driver_and_the_node(paper: Paper) -> None:
    paper.stage.cause(LINE + "AER, fatal", EMULATED)
    error = "PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
    paper.host.kernel(f"{MELLANOX} {CARD}: {error}")
    text = "pci.aer.fatal: fatal PCIe errors: at least 1 in 1 h"
    paper.stage.expect_health("nic-1", UNHEALTHY, text, OWNER)
    paper.stage.expect_note("node", f"node.pci: {CARD}: fatal error; ")
    paper.stage.expect_health("nic-0", HEALTHY, "", OWNER)


@pytest.mark.parametrize(("note", "line"), NODE, ids=[note.partition(":")[0] for note, _ in NODE])
def test_node_wide_log_line_is_a_note(paper: Paper, note: str, line: str) -> None:
    paper.stage.cause(LINE + note.partition(":")[0], EMULATED)
    paper.host.kernel(line)
    found = paper.stage.expect_note("node", note)
    assert found["severity"] == "degraded"


def test_log_flood_costs_no_memory_and_hides_nothing(paper: Paper) -> None:
    """The test repeats one error with other lines in between, and a hung task at the end."""
    noise = "usb 1-1: new high-speed USB device number 7 using xhci_hcd"
    error = "EDAC MC0: 1 UE memory read error on CPU_SrcID#3_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x2)"
    before_mib = paper.stage.resident_mib()
    began_s = time.monotonic()
    for _ in range(FLOOD // CHUNK):
        paper.host.kernel(noise, error, times=CHUNK // 2)
    wrote_s = time.monotonic() - began_s
    paper.stage.cause(f"a hung task's line behind a flood of {FLOOD} lines", EMULATED)
    paper.host.kernel("INFO: task flooded:9 blocked for more than 122 seconds.")
    paper.stage.expect_note("node", "node.hung_task: blocked for minutes: ", also="flooded")
    paper.stage.expect_health("memory-node3", UNHEALTHY, "mem.ecc.uncorrectable: ")
    print_figure(
        f"flood: {FLOOD} lines in {wrote_s:.1f} s; resident {before_mib:.1f} MiB before, "
        f"{paper.stage.resident_mib():.1f} MiB after"
    )
    paper.stage.expect_health("memory-node2", HEALTHY, "")


def test_line_in_the_real_log_is_reported(directory: Path, figures: Figures) -> None:
    """The test uses a device in an unused PCI domain, because the line stays in the real log."""
    address = f"{os.getpid() % 0xE000 + 0x1000:04x}:5e:00.0"
    own = directory / "log"
    own.mkdir()
    declared = device("nic", "pci", address=address)
    with machine_lock(), closing(PaperHost(own)) as host:
        host.plug(address)
        flags = [*host.flags, "--kmsg", str(DEVICE), "--kmsg-any-facility"]
        with Stage(own, figures, *flags, environ=host.environ, declared=declared) as stage:
            stage.expect_health("nic", HEALTHY, "", OWNER)
            stage.cause("a line in the real kernel log: link down", REAL)
            write_or_skip(f"<12>pcieport {address}: pciehp: Slot(1): Link Down\n")
            stage.expect_health("nic", HEALTHY, f"pci.fault: the kernel log: pcieport {address}: ", OWNER)


def write_or_skip(text: str) -> None:
    """Write a record to the real kernel log, or skip the test."""
    skip_unless_kernel_log(os.O_WRONLY)
    DEVICE.write_text(text)
