"""Lines of the kernel log: on the host on paper, but for one that is written into the real log."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
from agents import HEALTHY, UNHEALTHY, say
from machine import machine_lock

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
    ("node.hung_task: blocked for minutes: dd", "INFO: task dd:456 blocked for more than 122 seconds."),
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
def test_what_the_log_says_of_a_cpu_is_the_verdict_on_it(
    paper: Paper, cpu: int, health: int, verdict: str, line: str
) -> None:
    paper.stage.cause(LINE + verdict.partition(":")[0], EMULATED)
    paper.host.kernel(line)
    paper.stage.hears(f"cpu-node{cpu}", health, verdict)


def test_machine_checks_that_were_corrected_count_from_a_number_on(paper: Paper) -> None:
    line = "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 5: 8c00004000010091"
    paper.stage.cause("24 corrected machine checks of a CPU in the kernel log (FIFO)", EMULATED)
    paper.host.kernel(line, times=24)
    text = "cpu.machine_check.corrected: at least 24 corrected machine checks on CPU 4 in 1 d"
    paper.stage.hears("cpu-node4", HEALTHY, text)


@pytest.mark.usefixtures("poisoned")  # another node has one in its count, where it will be found later
def test_a_page_with_a_hardware_error_is_the_memorys_where_nobody_else_counts_it(paper: Paper) -> None:
    paper.stage.cause(LINE + "hwpoison", EMULATED)
    paper.host.kernel("Memory failure: 0x40fa6: recovery action for dirty LRU page: Recovered")
    text = "mem.poisoned: 1 line of memory failure in the kernel log"
    paper.stage.hears("memory-node5", UNHEALTHY, text)
    paper.stage.hears("memory-node1", HEALTHY, "")


def test_errors_of_a_memory_module_are_the_memorys_of_its_socket(paper: Paper) -> None:
    module = "CPU_SrcID#3_MC#0_Chan#1_DIMM#0"
    paper.stage.cause(LINE + "EDAC UE with the module's label", EMULATED)
    paper.host.kernel(f"EDAC MC0: 1 UE memory read error on {module} (channel:1 slot:0 page:0x1 offset:0x0)")
    paper.stage.hears("memory-node3", UNHEALTHY, f"mem.ecc.uncorrectable: mc0 {module}: ")
    paper.stage.hears("memory-node2", HEALTHY, "")


def test_an_error_of_a_pci_device_is_its_drivers_news_and_the_nodes(paper: Paper) -> None:
    paper.stage.cause(LINE + "AER, fatal", EMULATED)
    error = "PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
    paper.host.kernel(f"{MELLANOX} {CARD}: {error}")
    text = "pci.aer.fatal: fatal PCIe errors: at least 1 in 1 h"
    paper.stage.hears("nic-1", UNHEALTHY, text, OWNER)
    paper.stage.notes("node", f"node.pci: {CARD}: fatal error; ")
    paper.stage.hears("nic-0", HEALTHY, "", OWNER)


@pytest.mark.parametrize(("note", "line"), NODE, ids=[note.partition(":")[0] for note, _ in NODE])
def test_what_befalls_the_whole_node_is_a_note(paper: Paper, note: str, line: str) -> None:
    paper.stage.cause(LINE + note.partition(":")[0], EMULATED)
    paper.host.kernel(line)
    found = paper.stage.notes("node", note)
    assert found["severity"] == "degraded"


def test_a_flood_costs_no_memory_and_hides_nothing(paper: Paper) -> None:
    """Of the same error again and again, with other lines in between, and one task at the end."""
    noise = "usb 1-1: new high-speed USB device number 7 using xhci_hcd"
    error = "EDAC MC0: 1 UE memory read error on CPU_SrcID#3_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x2)"
    before_mib = paper.stage.resident_mib()
    began_s = time.monotonic()
    for _ in range(FLOOD // CHUNK):
        paper.host.kernel(noise, error, times=CHUNK // 2)
    wrote_s = time.monotonic() - began_s
    paper.stage.cause(f"a hung task's line behind a flood of {FLOOD} lines", EMULATED)
    paper.host.kernel("INFO: task flooded:9 blocked for more than 122 seconds.")
    paper.stage.notes("node", "node.hung_task: blocked for minutes: dd, flooded")
    paper.stage.hears("memory-node3", UNHEALTHY, "mem.ecc.uncorrectable: ")
    say(
        f"flood: {FLOOD} lines in {wrote_s:.1f} s; resident {before_mib:.1f} MiB before, "
        f"{paper.stage.resident_mib():.1f} MiB after"
    )
    paper.stage.hears("memory-node2", HEALTHY, "")


def test_a_line_in_the_real_log_is_heard(directory: Path, figures: Figures) -> None:
    """Of a device in a PCI domain that nobody else has: the line stays in everybody's log."""
    address = f"{os.getpid() % 0xE000 + 0x1000:04x}:5e:00.0"
    own = directory / "log"
    own.mkdir()
    declared = device("nic", "pci", address=address)
    with machine_lock(), closing(PaperHost(own)) as host:
        host.plug(address)
        flags = [*host.flags, "--kmsg", str(DEVICE), "--kmsg-any-facility"]
        with Stage(own, figures, *flags, environ=host.environ, declared=declared) as stage:
            stage.hears("nic", HEALTHY, "", OWNER)
            stage.cause("a line in the real kernel log: link down", REAL)
            write_or_skip(f"<12>pcieport {address}: pciehp: Slot(1): Link Down\n")
            stage.hears("nic", HEALTHY, f"pci.fault: the kernel log: pcieport {address}: ", OWNER)


def write_or_skip(text: str) -> None:
    """A record of the real kernel log."""
    try:
        DEVICE.write_text(text)
    except OSError as error:
        pytest.skip(f"may not write {DEVICE}: {error.strerror}")
