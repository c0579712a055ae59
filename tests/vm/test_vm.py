"""The agent in a virtual machine: cgroup v2 with all controllers, two NUMA nodes, injected hardware errors.

One machine is booted, under software emulation, and guest.py runs all steps in it; each test here compares
the result of a step with the expected report. ``make test-all`` runs the tests if QEMU is installed;
``make test-vm`` installs missing packages first.
"""

import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import pytest
from image import build

BUILD: Final = Path(__file__).resolve().parents[2] / "build/vm"
SILENCE_LIMIT_S: Final = 900
"""Limit for the time between two lines of the guest. Other tests on the host slow the emulated machine."""


@pytest.fixture(scope="session")
def results() -> dict[str, dict[str, Any]]:
    """Results of the guest, by step."""
    for program in ("qemu-system-x86_64", "busybox", "cpio", "apt-get"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    image = build(BUILD)
    found_file = BUILD / "results"
    memory = "-object memory-backend-ram,size=1536M,id"
    nodes = f"{memory}=m0 {memory}=m1 -numa node,cpus=0,memdev=m0 -numa node,cpus=1,memdev=m1"
    machine = "-accel tcg,thread=multi -cpu max -smp 2 -m 3072 -nic none -device virtio-rng-pci,addr=05.0"
    command = [
        *("qemu-system-x86_64", *machine.split(), *nodes.split(), "-nographic", "-no-reboot"),
        *("-serial", "mon:stdio", "-serial", f"file:{found_file}"),
        *("-kernel", image.kernel, "-initrd", image.initrd, "-append", "console=ttyS0 panic=-1 quiet"),
    ]
    log = BUILD / "log"
    found_file.write_bytes(b"")
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output) as machine,
    ):
        try:
            status = wait_while_it_writes(machine, (log, found_file))
        finally:
            machine.kill()
    text = log.read_text("utf-8", "replace")
    assert status == 0, (
        f"the guest wrote no line for {SILENCE_LIMIT_S} s" if status is None else f"QEMU: exit code {status}"
    ) + f"; its log is {log}:\n{text[-3000:]}"
    found = {
        found_step["step"]: found_step
        for found_step in map(json.loads, found_file.read_text("utf-8").splitlines())
    }
    assert "end" in found, f"the guest did not finish; its log is {log}:\n{text[-3000:]}"
    for step, values in found.items():
        if values.get("reported") and values.get("cause"):
            print(
                f"{step}: reported after {1000 * (values['reported'] - values['cause']):.0f} ms: "
                f"{values['found']}"
            )
    return found


def wait_while_it_writes(machine: subprocess.Popen[bytes], files: tuple[Path, ...]) -> int | None:
    """Return the exit code of a process, or None if its files did not grow for SILENCE_LIMIT_S."""
    written, growth_s = -1, time.monotonic()
    while time.monotonic() - growth_s < SILENCE_LIMIT_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return machine.wait(timeout=1)
        if (size := sum(file.stat().st_size for file in files)) != written:
            written, growth_s = size, time.monotonic()
    return None


def cause_of(results: dict[str, dict[str, Any]], step: str) -> dict[str, Any]:
    """Return the finding of a step."""
    found = results[step]["found"]
    assert found, f"{step}: nothing was reported: {results[step]}"
    return found


@pytest.fixture
def first(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """First report of the agent."""
    return cause_of(results, "first")


def test_machine_without_faults_is_healthy(first: dict[str, Any]) -> None:
    devices = {device["name"]: device["health"] for device in first["devices"]}
    expected = {f"{kind}-node{node}" for kind in ("cpu", "memory", "hugepages-2mi") for node in (0, 1)}
    assert {*devices} >= {*expected, "rng-0"}
    assert {*devices.values()} == {"Healthy"}


def test_machine_has_the_needed_cgroup_controllers(results: dict[str, dict[str, Any]]) -> None:
    assert {"cpu", "cpuset", "memory", "hugetlb"} <= {*results["first"]["controllers"]}


def test_offline_cpu_is_reported_and_cleared(results: dict[str, dict[str, Any]]) -> None:
    cause = cause_of(results, "cpu-offline")
    assert (cause["health"], cause["evidence"]) == ("Unhealthy", "CPU 1 offline, online at start: 1")
    assert cause_of(results, "cpu-online")["health"] == "Healthy"


def test_shrunk_pool_of_one_node_is_reported_and_cleared(results: dict[str, dict[str, Any]]) -> None:
    cause = cause_of(results, "pool-shrunk")
    assert (cause["health"], cause["evidence"]) == ("Unhealthy", "2 pages of 2mi, 8 at start")
    assert cause_of(results, "pool-grown")["health"] == "Healthy"


def test_removed_declared_device_is_reported_and_cleared(
    results: dict[str, dict[str, Any]],
) -> None:
    assert cause_of(results, "pci-removed")["health"] == "Unhealthy"
    assert cause_of(results, "pci-rescanned")["health"] == "Healthy"


def test_offline_memory_block_is_reported_and_cleared(results: dict[str, dict[str, Any]]) -> None:
    assert cause_of(results, "block-offline")["health"] == "Unhealthy"
    assert cause_of(results, "block-online")["health"] == "Healthy"


def test_oom_kill_by_a_v2_limit_is_reported_for_the_pod(results: dict[str, dict[str, Any]]) -> None:
    note = cause_of(results, "oom-killed")
    assert results["oom-killed"]["status"] == -9
    assert "oom_kill 1" in results["oom-killed"]["events"]
    assert "64 MiB" in note["evidence"]
    assert "0f3c1d2e-0000-4000-8000-000000000001" in note["subject"]


def test_throttled_v2_container_is_reported(results: dict[str, dict[str, Any]]) -> None:
    assert "throttled" in cause_of(results, "throttled")["evidence"]


def test_logged_machine_check_is_reported_for_its_cpu(results: dict[str, dict[str, Any]]) -> None:
    assert results["machine-check"]["log"], "the kernel logged nothing"
    assert cause_of(results, "machine-check")["health"] == "Unhealthy"


def test_poisoned_page_is_reported_for_memory(results: dict[str, dict[str, Any]]) -> None:
    assert results["poisoned"]["log"], "the kernel logged nothing"
    assert cause_of(results, "poisoned")["health"] == "Unhealthy"


def test_log_line_from_user_space_is_ignored(results: dict[str, dict[str, Any]]) -> None:
    assert results["not-the-kernels"]["log"], "the line is not in the log"
    assert not any(note["code"] == "node.read_only" for note in results["last"]["found"])


@pytest.mark.parametrize("naming", ["cgroupfs", "systemd"])
def test_audit_finds_exactly_the_wrong_values(results: dict[str, dict[str, Any]], naming: str) -> None:
    audit = results[f"audit-{naming}"]
    assert (audit["status"], audit["error"]) == (1, "")
    document = audit["found"]
    assert (document["cgroups"]["version"], document["cgroups"]["driver"]) == (2, naming)
    (without_kubelet,) = document["notKnown"]
    assert without_kubelet.startswith("configuration of the kubelet: no process named kubelet")
    assert document["unread"] == []
    kept, wrong, vanished = document["pods"]
    assert {knob["verdict"] for knob in (*kept["knobs"], *document["classes"])} == {"match", "rounded"}
    assert mismatches(wrong) == [
        ("", "cpu.weight", "lower"),
        ("", "memory.max", "unlimited"),
        ("c1", "cpu.max", "lower"),
        ("c1", "memory.max", "lower"),
        ("c1", "hugetlb.2MB.max", "lower"),
        ("c1", "hugetlb.1GB.rsvd.max", "unlimited"),
        ("c1", "cpuset.cpus", "higher"),
        ("c1", "cpuset.cpus.effective", "higher"),
    ]
    assert {(container, verdict) for container, _, verdict in mismatches(vanished)} == {("c1", "vanished")}


def mismatches(pod: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return container, file and verdict of each value that does not match."""
    fine = {"match", "rounded"}
    return [
        (knob["container"], knob["file"], knob["verdict"])
        for knob in pod["knobs"]
        if knob["verdict"] not in fine
    ]


def test_recreated_cgroup_is_read_completely_or_not_at_all(results: dict[str, dict[str, Any]]) -> None:
    whole = f"(100, {2**64 - 1}, {2**64 - 1}, {2**64 - 1})"
    seen = results["audit-restless"]["found"]
    assert {*seen} <= {whole, "None"}
    assert len(seen) == 2


def test_agent_exits_0_and_the_kernel_logged_no_bug(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results["end"]["status"] == 0
    assert results["oops"]["found"] == []


def test_commands_of_checks_have_the_limits_of_their_cgroups(results):
    memory, processes = (
        cause_of(results, "custom-memory.unknown"),
        cause_of(results, "custom-processes.unknown"),
    )
    assert memory["evidence"] == "the command exceeded its memory limit of 32 MiB"
    assert "fork" in processes["evidence"]
    place = cause_of(results, "custom-place")["evidence"]
    assert place.startswith("0::/drahealth.service/check-place-")
    assert results["custom-own"]["found"], "the agent has moved itself to a child of its cgroup"
