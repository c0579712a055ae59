"""The machine watch on the real kernel's CPUs: topology, machine checks, a CPU that goes offline."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import hotplug, machine_lock
from patience import PATIENCE_S

from agent.model.machine_samples import MachineSample, PerCpuSample
from agent.model.reading import Absence, Missing, Reading, SourceState
from agent.native.machine_watch import MachineWatch

CPUS = Path("/sys/devices/system/cpu")
ABSENT = Missing(Absence.ABSENT, 2)


@contextmanager
def watch() -> Iterator[MachineWatch]:
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    machine = MachineWatch(Path("/sys"), Path("/proc"), wake)
    try:
        yield machine
    finally:
        assert machine.stop(PATIENCE_S)
        os.close(wake)


def rescan(machine: MachineWatch) -> MachineSample:
    """Return the sample of a pass after a rescan request."""
    os.eventfd_write(machine.rescan_fileno(), 1)
    machine.run_pass()
    sample = machine.read()
    assert sample is not None
    assert next(source for source in sample.sources if source.name == "cores").state is SourceState.OK
    return sample


def cpu_list(text: str) -> list[int]:
    """Return the numbers of a list like ``0-2,8``."""
    ends = [part.partition("-") for part in text.strip().split(",")]
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]


def number(path: Path) -> Reading:
    return int(path.read_text()) if path.exists() else ABSENT


def machine_checks() -> dict[int, int]:
    """Return row MCE by CPU; an empty mapping without the row."""
    header, *rows = Path("/proc/interrupts").read_text().splitlines()
    cpus = [int(name.removeprefix("CPU")) for name in header.split()]
    for label, *counts in map(str.split, rows):
        if label == "MCE:":
            return dict(zip(cpus, map(int, counts), strict=False))
    return {}


def core_on_disk(cpu: int, checks: Reading) -> PerCpuSample:
    directory = CPUS / f"cpu{cpu}"
    return PerCpuSample(
        cpu=cpu,
        core=cpu_list((directory / "topology/core_cpus_list").read_text())[0],
        package=number(directory / "topology/physical_package_id"),
        max_khz=number(directory / "cpufreq/cpuinfo_max_freq"),
        cap_khz=number(directory / "cpufreq/scaling_max_freq"),
        machine_checks=checks,
    )


def test_online_cpus_match_their_files() -> None:
    with machine_lock(), watch() as machine:  # no other test takes a CPU offline meanwhile
        seen = rescan(machine)
        checks = machine_checks()
        online = cpu_list((CPUS / "online").read_text())
        assert seen.cores == tuple(core_on_disk(cpu, checks.get(cpu, ABSENT)) for cpu in online)
        assert seen.smt_active == number(CPUS / "smt/active")


def test_cpu_going_offline_keeps_its_place() -> None:
    with hotplug(1) as cpu, watch() as machine:
        before = rescan(machine).cores
        cpu.set_online(False)
        assert not (CPUS / "cpu1/topology").exists()
        assert rescan(machine).cores == before
        cpu.set_online(True)
        assert rescan(machine).cores == before
