"""Steps inside the virtual machine: they run the agent, cause faults, and print the agent's reports.

Each line on the second serial port is a JSON object for the test outside: the step, the time of its cause,
and the subscriber's report with its time [s of CLOCK_MONOTONIC]. The test outside evaluates them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from guest_audit import audits

CGROUPS: Final = Path("/sys/fs/cgroup")
CPUS: Final = Path("/sys/devices/system/cpu")
MEMORY: Final = Path("/sys/devices/system/memory")
NODES: Final = Path("/sys/devices/system/node")
DEBUG: Final = Path("/sys/kernel/debug")
RESULTS: Final = Path("/dev/ttyS1")
RUN: Final = Path("/run/drahealth")
DRIVER: Final = "demo.example.com"
POD: Final = "0f3c1d2e-0000-4000-8000-000000000001"
PATIENCE_S: Final = 180.0
"""Long, because the machine is emulated on a busy host: a command alone takes a minute there."""
PAGE: Final = os.sysconf("SC_PAGE_SIZE")

Document = dict[str, Any]


class ReportSubscriber:
    """Subscriber of the agent: collects every report with its time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "agent", "watch", "-o", "json", "--runtime-dir", str(RUN)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reports: list[tuple[float, Document]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._reports.append((time.monotonic(), json.loads(line)))
                self._changed.notify_all()

    def wait(self, since_s: float, find: Callable[[Document], object]) -> tuple[float, object]:
        """Wait for a report since a time in which ``find`` finds something; the time is 0 if none came."""
        with self._changed:
            end_s, checked = time.monotonic() + PATIENCE_S, 0
            while True:
                while checked < len(self._reports):
                    at_s, report = self._reports[checked]
                    checked += 1
                    if at_s >= since_s and (found := find(report)):
                        return at_s, found
                if not self._changed.wait(end_s - time.monotonic()):
                    return 0.0, None


def device(name: str, code: str = "") -> Callable[[Document], object]:
    """Return a finder of a device with a cause of a code; without a code, without causes above info."""

    def find(report: Document) -> object:
        for entry in report["devices"]:
            if entry["name"] == name:
                causes = [cause for cause in entry["causes"] if cause["severity"] != "info"]
                if code:
                    causes = [cause for cause in entry["causes"] if cause["code"] == code]
                    return {**causes[0], "health": entry["health"]} if causes else None
                return {"health": entry["health"]} if not causes else None
        return None

    return find


def note(code: str) -> Callable[[Document], object]:
    """Return a function that finds a note with a code."""
    return lambda report: next((note for note in report["notes"] if note["code"] == code), None)


def report(result: Document) -> None:
    """Write a result to the second serial port; the console is shared with the kernel."""
    with RESULTS.open("w") as line:
        line.write(f"{json.dumps(result)}\n")
    print("guest:", result["step"], flush=True)


def report_step(step: str, cause_s: float, reported: tuple[float, object], **more: object) -> None:
    at_s, found = reported
    result = {"step": step, "cause": cause_s, "reported": at_s, "found": found, **more}
    report(result)


def write(path: Path, text: str) -> float:
    """Write a file; return the time before the write."""
    now_s = time.monotonic()
    path.write_text(text)
    return now_s


# --- the pod -----------------------------------------------------------------------------------------------


def make_pod() -> Path:
    """Create a container's cgroup below kubepods with every controller, as a kubelet on cgroup v2 does."""
    group = CGROUPS
    for part in ("kubepods", f"pod{POD}", "c" * 64):
        (group / "cgroup.subtree_control").write_text("+cpu +cpuset +memory +hugetlb")
        group /= part
        group.mkdir()
    return group


def run_in(group: Path, script: str) -> subprocess.Popen[bytes]:
    """Run a Python script in the cgroup."""
    into = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    return subprocess.Popen([sys.executable, "-c", into + script])


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


CHECKS: Final = """
[[check]]
name = "memory"
command = ["/bin/busybox", "tail", "/dev/zero"]
memory = "32MiB"
period = "1h"
timeout = "60s"
[[check]]
name = "processes"
command = ["/bin/busybox", "sh", "-c", "for i in 1 2 3 4; do /bin/busybox sleep 9 & done; exit 1"]
processes = 3
period = "1h"
timeout = "60s"
[[check]]
name = "place"
command = ["/bin/busybox", "sh", "-c", "/bin/busybox cat /proc/self/cgroup; exit 1"]
period = "1h"
timeout = "60s"
"""
"""Checks by commands that exceed the limits of their cgroups, and one that prints its cgroup."""
SERVICE: Final = CGROUPS / "drahealth.service"
RUN_AGENT: Final = "import os, sys\nos.execv(sys.executable, [sys.executable, *{}])"


def delegated_cgroup() -> Path:
    """Create the cgroup of the agent as a service manager does that delegates it."""
    (CGROUPS / "cgroup.subtree_control").write_text("+memory +pids")
    SERVICE.mkdir()
    os.setxattr(SERVICE, "user.delegate", b"1")
    return SERVICE


# --- the steps ---------------------------------------------------------------------------------------------


def throttle_group(subscriber: ReportSubscriber, group: Path) -> None:
    (group / "cpu.max").write_text("10000 100000")
    cause_s = time.monotonic()
    spinning = run_in(group, "while True: pass")
    report_step("throttled", cause_s, subscriber.wait(cause_s, note("cgroup.cpu.throttled")))
    end(spinning)
    (group / "cpu.max").write_text("max 100000")


def oom_killed(subscriber: ReportSubscriber, group: Path) -> None:
    (group / "memory.max").write_text(str(64 << 20))
    cause_s = time.monotonic()
    status = run_in(group, "kept = []\nwhile True: kept.append(bytearray(1 << 20))").wait()
    reported = subscriber.wait(cause_s, note("cgroup.memory.oom_kill"))
    report_step("oom-killed", cause_s, reported, status=status, events=(group / "memory.events").read_text())
    (group / "memory.max").write_text("max")


def custom_checks(subscriber: ReportSubscriber) -> None:
    for name in ("memory.unknown", "processes.unknown", "place"):
        cause_s = time.monotonic()
        report_step(f"custom-{name}", cause_s, subscriber.wait(0.0, note(f"custom.{name}")))
    report({"step": "custom-own", "found": (SERVICE / "agent/cgroup.procs").read_text().split()})


def cpu_offline(subscriber: ReportSubscriber) -> None:
    cause_s = write(CPUS / "cpu1/online", "0")
    report_step("cpu-offline", cause_s, subscriber.wait(cause_s, device("cpu-node1", "cpu.offline")))
    cause_s = write(CPUS / "cpu1/online", "1")
    report_step("cpu-online", cause_s, subscriber.wait(cause_s, device("cpu-node1")))


def pool_shrunk(subscriber: ReportSubscriber, pool: Path) -> None:
    cause_s = write(pool, "2")
    report_step(
        "pool-shrunk",
        cause_s,
        subscriber.wait(cause_s, device("hugepages-2mi-node1", "mem.hugepages.pool_shrunk")),
    )
    cause_s = write(pool, "8")
    report_step("pool-grown", cause_s, subscriber.wait(cause_s, device("hugepages-2mi-node1")))


def pci_removed(subscriber: ReportSubscriber, address: str) -> None:
    bus = Path("/sys/bus/pci")
    cause_s = write(bus / "devices" / address / "remove", "1")
    report_step("pci-removed", cause_s, subscriber.wait(cause_s, device("rng-0", "pci.missing")))
    cause_s = write(bus / "rescan", "1")
    report_step("pci-rescanned", cause_s, subscriber.wait(cause_s, device("rng-0")))


def block_offline(subscriber: ReportSubscriber) -> None:
    """Take a memory block of node 1 offline: the first that the kernel can empty."""
    for block in sorted(NODES.glob("node1/memory*"), reverse=True):
        state = block / "state"
        if not state.exists():
            continue
        try:
            cause_s = write(state, "offline")
        except OSError:  # the block has pages that cannot be moved
            continue
        reported = subscriber.wait(cause_s, device("memory-node1", "mem.blocks.offline"))
        report_step("block-offline", cause_s, reported, block=block.name)
        cause_s = write(state, "online_movable")
        report_step("block-online", cause_s, subscriber.wait(cause_s, device("memory-node1")))
        return
    report_step("block-offline", 0.0, (0.0, None), block="none that the kernel could empty")


def machine_check(subscriber: ReportSubscriber) -> None:
    """Inject an uncorrected machine check of CPU 0, which the kernel logs without an interrupt."""
    inject = DEBUG / "mce-inject"
    # valid, uncorrected, enabled, address valid, action required but not signalled; a cache error
    for name, value in (
        ("status", "0xb400000000000135"),
        ("addr", "0x12345000"),
        ("cpu", "0"),
        ("flags", "sw\n"),
    ):
        (inject / name).write_text(value)
    cause_s = write(inject / "bank", "4")
    reported = subscriber.wait(cause_s, device("cpu-node0", "cpu.machine_check"))
    report_step("machine-check", cause_s, reported, log=log_lines("[Hardware Error]"))


def poison_page(subscriber: ReportSubscriber) -> None:
    """Poison a page of a process, as after a memory error."""
    script = (
        "import ctypes, mmap, struct, sys, time\n"
        "page = mmap.mmap(-1, 4096); page[0] = 1\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "pagemap = open('/proc/self/pagemap', 'rb'); pagemap.seek(at // 4096 * 8)\n"
        "print(struct.unpack('Q', pagemap.read(8))[0] & (1 << 55) - 1, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    frame = int(owner.stdout.readline())
    cause_s = write(DEBUG / "hwpoison/corrupt-pfn", str(frame))
    names = ("memory-node0", "memory-node1")

    def find(report: Document) -> object:
        return next((found for name in names if (found := device(name, "mem.poisoned")(report))), None)

    report_step("poisoned", cause_s, subscriber.wait(cause_s, find), log=log_lines("Memory failure"))
    owner.kill()


def read_only(subscriber: ReportSubscriber) -> None:
    """Write the kernel's line for a read-only filesystem from user space; the agent must ignore it."""
    cause_s = time.monotonic()
    with Path("/dev/kmsg").open("w") as log:
        log.write("<3>EXT4-fs (vda1): Remounting filesystem read-only\n")
    report_step("not-the-kernels", cause_s, (0.0, None), log=log_lines("EXT4-fs"))


def log_lines(words: str) -> list[str]:
    text = subprocess.run(["/bin/busybox", "dmesg"], capture_output=True, text=True, check=True).stdout
    return [line for line in text.splitlines() if words in line][-4:]


# --- main --------------------------------------------------------------------------------------------------


def declare(address: str) -> None:
    directory = RUN / "devices.d"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{DRIVER}.toml").write_text(
        f'version = 1\n[[device]]\nname = "rng-0"\nkind = "pci"\naddress = "{address}"\n'
    )


def is_whole_and_healthy(report: dict[str, Any]) -> bool:
    """Return whether a report has the declared device, and no source was stalled on a busy host."""
    names = {device["name"] for device in report["devices"]}
    return "rng-0" in names and {device["health"] for device in report["devices"]} == {"Healthy"}


def main() -> None:
    address = "0000:00:05.0"
    pool = NODES / "node1/hugepages/hugepages-2048kB/nr_hugepages"
    pool.write_text("8")
    group = make_pod()
    declare(address)
    config = Path("/tmp/config.toml")
    config.write_text('[cgroups]\nsweep = "1s"\n' + CHECKS)
    flags = ["--driver", DRIVER, "--node-name", "vm", "--period", "100ms", "--table", "never"]
    flags += ["--config", str(config), "--runtime-dir", str(RUN)]
    agent = run_in(delegated_cgroup(), RUN_AGENT.format(["-m", "agent", "run", *flags]))
    while not (RUN / "agent.sock").exists():
        time.sleep(0.1)
    subscriber = ReportSubscriber()
    first = subscriber.wait(0.0, lambda report: report if is_whole_and_healthy(report) else None)
    report_step("first", 0.0, first, controllers=(CGROUPS / "cgroup.controllers").read_text().split())
    custom_checks(subscriber)
    read_only(subscriber)
    cpu_offline(subscriber)
    pool_shrunk(subscriber, pool)
    pci_removed(subscriber, address)
    block_offline(subscriber)
    oom_killed(subscriber, group)
    throttle_group(subscriber, group)
    machine_check(subscriber)
    poison_page(subscriber)
    audits(report)
    last = subscriber.wait(time.monotonic() - 1, lambda report: report["notes"])
    report_step("last", 0.0, last)
    agent.send_signal(signal.SIGTERM)
    report({"step": "oops", "found": [*map(str.strip, bad_lines())]})
    report({"step": "end", "status": agent.wait()})


def bad_lines() -> list[str]:
    """Return log lines of kernel bugs."""
    return [line for line in log_lines("") if re.search(r"\bBUG:|Oops|general protection", line)]


if __name__ == "__main__":
    main()
