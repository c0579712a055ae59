"""Watcher of GPUs and PCI devices: on a fake NVML, plain files, and events of the real kernel."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from agents import LATE_STOP, Agent, play_in_time, short_tmp
from fake_nvml import FakeNvml, fake_nvml
from golden.commands import run_process
from netns import Injector, netns
from patience import PATIENCE_S
from running_watchers import RunningWatcher
from trio.testing import MockClock
from wire.serving import eventually

from agent.config.config import Config
from agent.health.rules import CLEAN_PASSES
from agent.model.declared_devices import Declarations, DeclaredFile, DeclaredPciDevice, DriverDevice
from agent.model.gpu import GpuAttributes, GpuOsSample
from agent.model.machine_samples import Subsystem, UeventCounts
from agent.model.reading import Missing, SourceSample, SourceState
from agent.model.time import NS
from agent.native.kernel_events import UeventListener
from agent.node.pci_watcher import GpuPciWatcher, _merge_inventory
from agent.sources.nvml import read_gpu_inventory

__all__ = ["short_tmp"]

BUS = "0000:1b:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Config:
    """A machine with a PCI bus and no NVML."""
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "proc/2").mkdir(parents=True)
    (tmp_path / "proc/2/comm").write_text("kthreadd\n")
    (tmp_path / "proc/stat").write_text("btime 1700000000\n")
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "kmsg").touch()
    return Config(
        node_name="n",
        sysfs_root=tmp_path / "sys",
        procfs_root=tmp_path / "proc",
        cgroupfs_root=tmp_path / "cgroup",
        kmsg=tmp_path / "kmsg",
        nvml_library=str(tmp_path / "libnvidia-ml.so.1"),
    )


def plug_in(machine: Config, bus: str, pci_class: str) -> None:
    device = machine.sysfs_root / "bus/pci/devices" / bus
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text(f"{pci_class}\n")


def host_of(machine: Config) -> GpuOsSample:
    watch = GpuPciWatcher(machine.sysfs_root, machine.procfs_root, 60, read_inventory=tuple)
    watch.start_single_read().join(PATIENCE_S)
    return watch.gpu_system


def flags_of(machine: Config) -> list[str]:
    return [
        *("--sysfs-root", str(machine.sysfs_root), "--procfs-root", str(machine.procfs_root)),
        *("--cgroupfs-root", str(machine.cgroupfs_root), "--kmsg", str(machine.kmsg)),
    ]


# --- a single read -----------------------------------------------------------------------------------


def test_host_without_gpu_is_not_scanned_for_processes(machine: Config) -> None:
    plug_in(machine, "0000:05:00.0", "0x068000")
    assert host_of(machine) == GpuOsSample()


def test_gpu_on_bus_enables_process_scan(machine: Config) -> None:
    plug_in(machine, "0000:05:00.0", "0x068000")
    plug_in(machine, BUS, "0x030200")
    host = host_of(machine)
    assert (host.bus_gpus, host.fabric_manager) == ((BUS,), False)


def scan_causes(machine: Config, fake: FakeNvml) -> list[str]:
    """Return the causes of the only GPU in ``scan``."""
    flags = ["--nvml-library", str(fake.library), *flags_of(machine)]
    outputs: list[str] = []

    def is_read() -> bool:
        """Return False if the machine is so busy that the scan did not read it twice within 5 s."""
        outputs.append(run_process(["scan", "-o", "json", *flags], FAKE_NVML=str(fake.scenario))[1])
        return bool(outputs[-1])

    eventually(is_read, "a scan")
    gpus = [device for device in json.loads(outputs[-1])["devices"] if device["kind"] == "gpu"]
    assert [gpu["name"] for gpu in gpus] == ["gpu-0"]
    return [cause["code"] for cause in gpus[0]["causes"]]


def test_scan_reports_gpu_whose_driver_does_not_start(machine: Config, tmp_path: Path) -> None:
    plug_in(machine, BUS, "0x030200")
    assert scan_causes(machine, fake_nvml(tmp_path, "profile h100", "init 9")) == ["gpu.driver.init"]


def test_scan_reports_missing_fabric_manager_with_nvswitches(machine: Config, tmp_path: Path) -> None:
    plug_in(machine, "0000:05:00.0", "0x068000")
    plug_in(machine, BUS, "0x030200")
    assert scan_causes(machine, fake_nvml(tmp_path, "profile h100")) == ["gpu.fabric.manager"]


# --- the inventory -----------------------------------------------------------------------------------------


def row(number: int, bus: str = "") -> GpuAttributes:
    return GpuAttributes(f"GPU-{number}", bus or f"0000:0{number}:00.0", serial=f"{number}{number}")


def test_inventory_of_unresponsive_gpu_keeps_serial_number() -> None:
    assert _merge_inventory([row(1), row(2)], [GpuAttributes("", ""), row(2)]) == (row(2), row(1))


def test_inventory_row_of_replaced_gpu_is_dropped() -> None:
    assert _merge_inventory([row(1), row(2)], [row(3, row(1).bus), row(2)]) == (row(3, row(1).bus), row(2))


def test_inventory_of_gpu_moved_to_another_slot_is_kept() -> None:
    assert _merge_inventory([row(1)], [row(1, "0000:09:00.0")]) == (row(1, "0000:09:00.0"),)


# --- the PCI bus -------------------------------------------------------------------------------------------

NIC = "0000:5e:00.0"


def plug_nic(machine: Config, driver: str = "mlx5_core") -> Path:
    device = machine.sysfs_root / "bus/pci/devices" / NIC
    device.mkdir()
    (device / "vendor").write_text("0x15b3\n")
    bind(device, driver)
    return device


def bind(device: Path, driver: str) -> None:
    (device / "driver").unlink(missing_ok=True)
    (device / "driver").symlink_to(f"../../drivers/{driver}")


def declarations_of(*addresses: str) -> Declarations:
    whats = [DeclaredPciDevice(address, "") for address in addresses]
    devices = [DriverDevice("d.example.com", "n", f"pci-{i}", what, 0) for i, what in enumerate(whats)]
    return (DeclaredFile("d.example.com", tuple(devices)),)


def events(count: int, state: SourceState = SourceState.OK) -> UeventCounts:
    source = SourceSample("uevents", state, 0, NS, 0, "", vital=False)
    return UeventCounts(source, {Subsystem.PCI: count})


class PciWatcher(RunningWatcher):
    """Watcher with an interval of an hour, so that an earlier read has a trigger."""

    def __init__(self, machine: Config, *, gpus: bool = True) -> None:
        roots = machine.sysfs_root, machine.procfs_root
        self.counted = 0
        self.watch = GpuPciWatcher(
            *roots,
            3600,
            read_inventory=partial(read_gpu_inventory, machine.nvml_library, machine.sysfs_root)
            if gpus
            else None,
            count_gpus=self.count,
        )

    def count(self) -> None:
        self.counted += 1

    @property
    def drivers(self) -> dict[str, str]:
        pci = self.watch.pci
        return {function.address: function.driver for function in pci} if isinstance(pci, tuple) else {}

    @property
    def passes(self) -> int:
        source = self.watch.source
        return source.passes if source else 0


async def until(condition: Callable[[], object]) -> None:
    """Wait in real time, or with a mock clock until the threads are done."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


def test_bus_without_watched_devices_is_not_read(machine: Config) -> None:
    plug_nic(machine)
    watcher = PciWatcher(machine)
    watcher.watch.start_single_read().join(PATIENCE_S)
    watcher.watch.set_inputs(None, events(0))
    assert (watcher.watch.pci, watcher.watch.source) == (None, None)


def test_single_read_finds_gpus_and_declared_devices(machine: Config) -> None:
    plug_in(machine, BUS, "0x030200")
    plug_nic(machine)
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, None, declarations_of(NIC))
    watcher.watch.start_single_read().join(PATIENCE_S)
    assert watcher.drivers == {BUS: "", NIC: "mlx5_core"}


def test_pci_event_requests_a_count_of_the_gpus(machine: Config) -> None:
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, events(0))
    watcher.watch.set_inputs(None, events(0), declarations_of(NIC))
    assert watcher.counted == 0
    watcher.watch.set_inputs(None, events(1))
    watcher.watch.set_inputs(None, events(1))
    assert watcher.counted == 1


def test_gpu_watch_disabled_still_finds_declared_devices(machine: Config) -> None:
    plug_in(machine, BUS, "0x030200")
    plug_nic(machine)
    watcher = PciWatcher(machine, gpus=False)
    watcher.watch.set_inputs(None, None, declarations_of(NIC))
    watcher.watch.start_single_read().join(PATIENCE_S)
    assert watcher.watch.gpu_system == GpuOsSample()
    assert NIC in watcher.drivers


async def test_declared_device_triggers_read_and_is_unknown_until_then(machine: Config) -> None:
    plug_nic(machine)
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, events(0))
    async with watcher.run_watch():
        watcher.watch.set_inputs(None, events(0), declarations_of(NIC))
        source = watcher.watch.source
        assert source is not None
        assert (watcher.watch.pci, source.state) == (None, SourceState.STARTING)
        await until(lambda: watcher.drivers == {NIC: "mlx5_core"})
        watcher.watch.set_inputs(None, events(0), declarations_of(NIC, BUS))
        assert watcher.watch.pci is None  # not Missing: the bus was not read
        await until(lambda: watcher.watch.pci is not None)
        assert watcher.drivers == {NIC: "mlx5_core"}
        watcher.watch.set_inputs(None, events(0))
        assert watcher.watch.source is None


async def test_hung_bus_read_reports_nothing_until_it_returns(machine: Config) -> None:
    vendor = plug_nic(machine) / "vendor"
    whole, pipe = vendor.read_text(), vendor.with_name("pipe")
    vendor.unlink()
    os.mkfifo(vendor)
    os.link(vendor, pipe)
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, events(0), declarations_of(NIC))
    async with watcher.run_watch():
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert watcher.watch.pci is None
        assert watcher.watch.source
        assert watcher.watch.source.state is SourceState.STARTING
        vendor.with_name("new").write_text(whole)
        vendor.with_name("new").rename(vendor)
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # releases the reader, which finds nothing
        with trio.fail_after(PATIENCE_S):
            await until(lambda: watcher.drivers == {NIC: "mlx5_core"})
    assert watcher.watch.source.state is SourceState.OK


async def test_device_event_triggers_bus_read_at_once(machine: Config) -> None:
    nic = plug_nic(machine)
    plug_in(machine, BUS, "0x030200")
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, events(7), declarations_of(NIC))
    async with watcher.run_watch():
        await until(lambda: watcher.drivers.get(NIC) and watcher.watch.gpu_system.bus_gpus == (BUS,))
        bind(nic, "vfio-pci")
        shutil.rmtree(machine.sysfs_root / "bus/pci/devices" / BUS)
        watcher.watch.set_inputs(None, events(8), declarations_of(NIC))
        await until(lambda: watcher.drivers == {NIC: "vfio-pci"} and watcher.watch.gpu_system.bus_gpus == ())
        assert watcher.wakes >= 2


async def test_bus_change_is_followed_by_enough_rechecks_to_clear_a_fault(
    machine: Config, autojump_clock: MockClock
) -> None:
    nic = plug_nic(machine)
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, events(0), declarations_of(NIC))
    async with watcher.run_watch():
        await until(lambda: watcher.passes == CLEAN_PASSES)
        bind(nic, "vfio-pci")
        watcher.watch.set_inputs(None, events(1), declarations_of(NIC))
        await until(lambda: watcher.passes == 2 * CLEAN_PASSES)
        soon_s = trio.current_time() + 60
        await until(lambda: trio.current_time() > soon_s)
        assert watcher.passes == 2 * CLEAN_PASSES


async def test_gpu_plugged_in_is_found_at_once(machine: Config) -> None:
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, events(0))
    async with watcher.run_watch():
        await until(lambda: not watcher.watch.unfinished_reads(0))
        plug_in(machine, BUS, "0x030200")
        watcher.watch.set_inputs(None, events(1))
        await until(lambda: watcher.drivers == {BUS: ""})


async def test_flapping_device_is_read_at_growing_intervals(
    machine: Config, autojump_clock: MockClock
) -> None:
    nic = plug_nic(machine)
    nics = declarations_of(NIC)
    watcher = PciWatcher(machine)
    async with watcher.run_watch():
        for number in range(1000):
            watcher.watch.set_inputs(None, events(number), nics)
            await trio.sleep(0.1)
        assert watcher.passes <= 30
        bind(nic, "vfio-pci")
        watcher.watch.set_inputs(None, events(1000), nics)
        await until(lambda: watcher.drivers == {NIC: "vfio-pci"})
        assert trio.current_time() < 3600


@pytest.mark.parametrize("uevents", [None, events(0, SourceState.ABSENT), events(0, SourceState.FAILING)])
async def test_bus_without_kernel_events_is_read_every_ten_seconds(
    machine: Config, autojump_clock: MockClock, uevents: UeventCounts | None
) -> None:
    nic = plug_nic(machine)
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, uevents, declarations_of(NIC))
    async with watcher.run_watch():
        await until(lambda: watcher.drivers == {NIC: "mlx5_core"})
        source = watcher.watch.source
        assert source is not None
        assert source.period_ns == 10 * NS
        bind(nic, "vfio-pci")
        await until(lambda: watcher.drivers == {NIC: "vfio-pci"})
        assert trio.current_time() < 3600


def test_absent_bus_is_missing_and_not_empty(machine: Config) -> None:
    (machine.sysfs_root / "bus/pci/devices").rmdir()
    watcher = PciWatcher(machine)
    watcher.watch.set_inputs(None, None, declarations_of(NIC))
    watcher.watch.start_single_read().join(PATIENCE_S)
    source = watcher.watch.source
    assert source is not None
    assert isinstance(watcher.watch.pci, Missing)
    assert source.state is SourceState.ABSENT


async def test_unbind_event_of_kernel_triggers_bus_read(machine: Config) -> None:
    nic = plug_nic(machine)
    nics = declarations_of(NIC)
    watcher = PciWatcher(machine)
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    with netns(), Injector() as kernel:
        listener = UeventListener(fd)
        listener.start()

        def reads() -> GpuPciWatcher:
            watcher.watch.set_inputs(None, listener.read(), nics)
            return watcher.watch

        try:
            async with watcher.run_watch():
                await until(lambda: reads().pci and watcher.watch.source.period_ns == 3600 * NS)
                (nic / "driver").unlink()
                kernel.inject("unbind", f"/devices/pci0000:5d/{NIC}", SUBSYSTEM="pci", PCI_SLOT_NAME=NIC)
                await until(lambda: reads().pci and watcher.drivers == {NIC: ""})
        finally:
            assert listener.stop(PATIENCE_S)
            os.close(fd)


# --- an agent ----------------------------------------------------------------------------------------------


def picture(agent: Agent) -> dict[str, Any]:
    """Return the attributes of devices by name."""
    command = [sys.executable, "-m", "agent", "watch", "--once", "-o", "json", str(agent.agent_socket)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if "no health report within" in ran.stderr:  # 10 s, on a busy machine
        return {}
    return {device["name"]: device["attributes"] for device in json.loads(ran.stdout)["devices"]}


def test_hung_inventory_delays_neither_verdicts_nor_shutdown(machine: Config, short_tmp: Path) -> None:
    def play() -> str:
        directory = Path(tempfile.mkdtemp(dir=short_tmp))
        fake = fake_nvml(directory, "profile h100", "gpu 0 hang nvmlDeviceGetVbiosVersion")
        flags = ["--nvml-library", str(fake.library), *flags_of(machine), "--period", "100ms"]
        environ = {"FAKE_NVML": str(fake.scenario)}
        with Agent(directory, *flags, environ=environ, expect="gpu-0 Healthy") as agent:
            eventually(lambda: fake.calls(0, "nvmlDeviceGetVbiosVersion") > 0, "the hang")
            assert agent.end() == 0
            assert LATE_STOP in agent.log or not agent.agent_socket.exists()
            return agent.log

    play_in_time(play, LATE_STOP)  # the process that hangs in NVML is killed


def test_new_mig_instances_get_their_profiles_at_once(machine: Config, short_tmp: Path) -> None:
    fake = fake_nvml(short_tmp, "profile a100", "gpu 0 mig 7g.40gb")
    flags = ["--nvml-library", str(fake.library), *flags_of(machine), "--period", "100ms"]
    with Agent(short_tmp, *flags, environ={"FAKE_NVML": str(fake.scenario)}, expect="gpu-0 Healthy") as agent:
        eventually(lambda: "7g.40gb" in str(picture(agent)), "the profile")
        fake.send("gpu 0 mig 3g.20gb 3g.20gb")
        eventually(lambda: str(picture(agent)).count("'3g.20gb'") == 2, "the new profiles")
