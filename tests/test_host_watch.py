"""What the host says of its GPUs, and that nothing waits for it: on a fake NVML and plain files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, short_tmp
from fake_nvml import FakeNvml, fake_nvml
from wire.serving import eventually

from agent.config import Config
from agent.host_watch import HostWatch, _renewed
from agent.model.gpu import GpuAttributes, GpuHost

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


def host_of(machine: Config) -> GpuHost:
    watch = HostWatch(machine.nvml_library, machine.sysfs_root, machine.procfs_root, 60)
    watch.look().join(10)
    return watch.host


def flags_of(machine: Config) -> list[str]:
    return [
        *("--sysfs-root", str(machine.sysfs_root), "--procfs-root", str(machine.procfs_root)),
        *("--cgroupfs-root", str(machine.cgroupfs_root), "--kmsg", str(machine.kmsg)),
    ]


# --- a look ------------------------------------------------------------------------------------------------


def test_where_there_is_no_gpu_no_process_is_looked_at(machine: Config) -> None:
    plug_in(machine, "0000:05:00.0", "0x068000")
    assert host_of(machine) == GpuHost()


def test_a_gpu_on_the_bus_is_reason_enough(machine: Config) -> None:
    plug_in(machine, "0000:05:00.0", "0x068000")
    plug_in(machine, BUS, "0x030200")
    host = host_of(machine)
    assert (host.bus_gpus, host.fabric_manager) == ((BUS,), False)


def scanned(machine: Config, fake: FakeNvml) -> list[str]:
    """What ``scan`` has to say against its only GPU."""
    flags = ["--nvml-library", str(fake.library), *flags_of(machine)]
    command = [sys.executable, "-m", "agent", "scan", "-o", "json", *flags]
    ran = subprocess.run(command, env=fake.env, capture_output=True, text=True, timeout=30, check=False)
    gpus = [device for device in json.loads(ran.stdout)["devices"] if device["kind"] == "gpu"]
    assert [gpu["name"] for gpu in gpus] == ["gpu-0"]
    return [cause["code"] for cause in gpus[0]["causes"]]


def test_a_scan_tells_of_a_gpu_whose_driver_does_not_start(machine: Config, tmp_path: Path) -> None:
    plug_in(machine, BUS, "0x030200")
    assert scanned(machine, fake_nvml(tmp_path, "profile h100", "init 9")) == ["gpu.driver.init"]


def test_a_scan_misses_the_fabric_manager_where_there_are_nvswitches(machine: Config, tmp_path: Path) -> None:
    plug_in(machine, "0000:05:00.0", "0x068000")
    plug_in(machine, BUS, "0x030200")
    assert scanned(machine, fake_nvml(tmp_path, "profile h100")) == ["gpu.fabric.manager"]


# --- the inventory -----------------------------------------------------------------------------------------


def row(number: int, bus: str = "") -> GpuAttributes:
    return GpuAttributes(f"GPU-{number}", bus or f"0000:0{number}:00.0", serial=f"{number}{number}")


def test_a_gpu_that_no_longer_answers_keeps_its_serial_number() -> None:
    assert _renewed([row(1), row(2)], [GpuAttributes("", ""), row(2)]) == (row(2), row(1))


def test_a_part_that_was_replaced_is_forgotten() -> None:
    assert _renewed([row(1), row(2)], [row(3, row(1).bus), row(2)]) == (row(3, row(1).bus), row(2))


def test_a_card_in_another_slot_is_the_same_card() -> None:
    assert _renewed([row(1)], [row(1, "0000:09:00.0")]) == (row(1, "0000:09:00.0"),)


# --- an agent ----------------------------------------------------------------------------------------------


def picture(agent: Agent) -> dict[str, Any]:
    """Attributes of its devices, by name."""
    command = [sys.executable, "-m", "agent", "watch", "--once", "-o", "json", str(agent.agent_socket)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return {device["name"]: device["attributes"] for device in json.loads(ran.stdout)["devices"]}


def test_an_inventory_that_hangs_delays_neither_verdicts_nor_the_end(
    machine: Config, short_tmp: Path
) -> None:
    fake = fake_nvml(short_tmp, "profile h100", "gpu 0 hang nvmlDeviceGetVbiosVersion")
    flags = ["--nvml-library", str(fake.library), *flags_of(machine), "--period", "100ms"]
    with Agent(short_tmp, *flags, environ={"FAKE_NVML": str(fake.scenario)}, expect="gpu-0 Healthy") as agent:
        eventually(lambda: fake.calls(0, "nvmlDeviceGetVbiosVersion") > 0, "the hang")
        assert agent.end() == 0
        assert "the inventory of GPUs hangs and is left behind" in agent.log
        assert not agent.agent_socket.exists()


def test_new_instances_have_their_profiles_at_once(machine: Config, short_tmp: Path) -> None:
    fake = fake_nvml(short_tmp, "profile a100", "gpu 0 mig 7g.40gb")
    flags = ["--nvml-library", str(fake.library), *flags_of(machine), "--period", "100ms"]
    with Agent(short_tmp, *flags, environ={"FAKE_NVML": str(fake.scenario)}, expect="gpu-0 Healthy") as agent:
        eventually(lambda: "7g.40gb" in str(picture(agent)), "the profile", 15)
        fake.tell("gpu 0 mig 3g.20gb 3g.20gb")
        eventually(lambda: str(picture(agent)).count("'3g.20gb'") == 2, "the new profiles", 25)
