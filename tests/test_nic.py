"""Reader and watcher of declared NICs: on plain files, and on soft RoCE of the real kernel."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing
from nic_samples import ABSENT, NIC, NicFiles, nic_sample
from patience import PATIENCE_S
from running_watchers import RunningWatcher, until

from agent.health.host.nic.state import restored_nic_state
from agent.model.declared_devices import Declarations, DeclaredFile, DeclaredNicDevice, DriverDevice
from agent.model.machine_samples import LinkLayer, NicPortSample, NicSample, Subsystem, UeventCounts
from agent.model.persistent_faults import NicBaseline
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.time import NS
from agent.node.pci_watcher import NIC_READ, NicWatcher
from agent.sources import pci
from agent.sources.pci import UNPARSABLE, read_nics

BY_NAME: Final = DeclaredNicDevice("", "mlx5_0")
BY_ADDRESS: Final = DeclaredNicDevice(NIC, "")


@pytest.fixture
def files(tmp_path: Path) -> NicFiles:
    return NicFiles(tmp_path)


def read_one(files: NicFiles, declared: DeclaredNicDevice = BY_NAME) -> NicSample:
    nics = read_nics(files.root, {declared})
    assert isinstance(nics, tuple)
    [nic] = nics
    return nic


def read_port(files: NicFiles, number: int = 1) -> NicPortSample:
    ports = read_one(files).ports
    assert isinstance(ports, tuple)
    return next(port for port in ports if port.number == number)


# --- plain files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [BY_NAME, BY_ADDRESS])
def test_nic_is_found_by_name_and_by_address(files: NicFiles, declared: DeclaredNicDevice) -> None:
    files.add()
    assert read_one(files, declared) == nic_sample()


def test_only_files_of_declared_nics_are_read(files: NicFiles) -> None:
    files.add()
    other = files.add("mlx5_1", "0000:42:00.0")
    os.rename(files.root / other / "ports", files.root / other / "hidden")
    (files.root / other / "ports").symlink_to("ports")  # listing it fails
    assert read_nics(files.root, {BY_NAME}) == (nic_sample(),)
    assert read_nics(files.root, set()) == ()


def test_machine_without_rdma_devices_has_no_nics(files: NicFiles) -> None:
    assert read_nics(files.root, {BY_NAME, BY_ADDRESS}) == ()


def test_unlistable_rdma_class_is_missing(files: NicFiles) -> None:
    files.write("class/infiniband", "not a directory")
    found = read_nics(files.root, {BY_NAME})
    assert isinstance(found, Missing)
    assert found.absence is Absence.UNREADABLE


def test_nic_without_port_directory_is_unreadable(files: NicFiles) -> None:
    device = files.add(ports=0)
    assert isinstance(read_one(files).ports, Missing)
    (files.root / device / "ports").mkdir()
    assert read_one(files).ports == ()


def test_ports_are_read_by_number(files: NicFiles) -> None:
    device = files.add(ports=11)
    files.write(f"{device}/ports/10/state", "1: DOWN")
    ports = read_one(files).ports
    assert isinstance(ports, tuple)
    assert [(port.number, port.state) for port in ports if not port.is_active] == [(10, 1)]
    assert [port.number for port in ports] == list(range(1, 12))


@pytest.mark.parametrize(
    ("text", "rate_mbps", "width"),
    [
        ("2.5 Gb/sec (1X SDR)", 2_500, 1),
        ("200 Gb/sec (4X HDR)", 200_000, 4),
        ("800 Gb/sec (4X XDR)", 800_000, 4),
        ("10 Gb/sec (4X)", 10_000, 4),
        ("fast", UNPARSABLE, UNPARSABLE),
    ],
)
def test_rate_is_parsed_with_its_lanes(files: NicFiles, text: str, rate_mbps, width) -> None:
    device = files.add()
    files.write(f"{device}/ports/1/rate", text)
    port = read_port(files)
    assert (port.rate_mbps, port.width) == (rate_mbps, width)


def test_missing_port_state_is_unreadable_not_absent(files: NicFiles) -> None:
    device = files.add()
    (files.root / device / "ports/1/state").unlink()
    files.write(f"{device}/ports/1/phys_state", "up?")
    port = read_port(files)
    assert isinstance(port.state, Missing)
    assert port.state.absence is Absence.UNREADABLE
    assert port.phys_state == UNPARSABLE
    assert not port.is_active


def test_counters_that_the_nic_lacks_are_absent(files: NicFiles) -> None:
    device = files.add()
    files.write(f"{device}/ports/1/counters/symbol_error", "N/A (no PMA)")
    files.write(f"{device}/ports/1/counters/port_rcv_errors", "many")
    (files.root / device / "ports/1/counters/link_downed").unlink()
    port = read_port(files)
    assert (port.symbol_errors, port.receive_errors) == (ABSENT, UNPARSABLE)
    assert isinstance(port.link_downs, Missing)
    assert port.link_downs.absence is Absence.ABSENT


def test_ethernet_port_has_counters_of_its_interface(files: NicFiles) -> None:
    device = files.add()
    files.make_ethernet(device, "eth2")
    files.write(f"{device}/ports/1/counters/symbol_error", 77)
    port = read_port(files)
    assert (port.link_layer, port.interface) == (LinkLayer.ETHERNET, "eth2")
    assert (port.link_downs, port.link_ups, port.receive_errors) == (1, 2, 3)
    assert (port.symbol_errors, port.integrity_errors, port.buffer_overruns) == (ABSENT, ABSENT, ABSENT)
    assert port.label == "port 1 (eth2)"


@pytest.mark.parametrize(("flags", "is_up"), [("0x1003", True), ("0x1002", False), ("", True)])
def test_interface_set_down_is_read_from_its_flags(files: NicFiles, flags: str, is_up: bool) -> None:
    files.make_ethernet(files.add(), "eth2")
    files.write("class/net/eth2/flags", flags)
    port = read_port(files)
    assert (port.is_interface_up, port.is_disabled) == (is_up, not is_up)


def test_interface_of_a_second_port_is_found_by_its_number(files: NicFiles) -> None:
    device = files.add(ports=2)
    for number, interface in ((1, "eth2"), (2, "eth3")):
        files.make_ethernet(device, interface, number)
        (files.root / device / f"ports/{number}/gid_attrs/ndevs/0").unlink()
        files.write(f"bus/pci/devices/{NIC}/net/{interface}/dev_port", number - 1)
    assert [read_port(files, number).interface for number in (1, 2)] == ["eth2", "eth3"]


def test_ethernet_port_without_interface_has_no_counters(files: NicFiles) -> None:
    device = files.add()
    files.write(f"{device}/ports/1/link_layer", "Ethernet")
    port = read_port(files)
    assert (port.interface, port.link_downs, port.working_bond) == ("", ABSENT, "")


@pytest.mark.parametrize(("carrier", "bond"), [(1, "bond0"), (0, "")])
def test_bond_counts_as_working_with_its_carrier(files: NicFiles, carrier: int, bond: str) -> None:
    files.make_ethernet(files.add(), "eth2")
    files.enslave("eth2", "bond0", carrier)
    assert read_port(files).working_bond == bond


def test_bridge_of_an_interface_is_no_bond(files: NicFiles) -> None:
    files.make_ethernet(files.add(), "eth2")
    files.enslave("eth2", "br0")
    os.rename(files.root / "class/net/br0/bonding", files.root / "class/net/br0/bridge")
    assert read_port(files).working_bond == ""


@pytest.mark.parametrize("name", ["link_layer", "0", "flags", "carrier"])
def test_slave_of_a_bond_is_unknown_without_descriptors(
    files: NicFiles, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A port without its bond would make the NIC Unhealthy."""
    files.make_ethernet(files.add(), "eth2")
    files.enslave("eth2", "bond0")
    read = pci.read_sysfs_text
    failed = []

    def read_without_descriptors(path: Path) -> str | Missing:
        if path.name != name:
            return read(path)
        failed.append(path)
        return Missing(Absence.UNREADABLE, errno.EMFILE)

    monkeypatch.setattr(pci, "read_sysfs_text", read_without_descriptors)
    assert read_one(files).ports == Missing(Absence.UNREADABLE, errno.EMFILE)
    assert failed


def test_port_without_link_layer_has_unreadable_counters(files: NicFiles) -> None:
    device = files.add()
    link_layer = files.root / device / "ports/1/link_layer"
    link_layer.unlink()
    link_layer.symlink_to("link_layer")
    port = read_port(files)
    assert port.link_layer is LinkLayer.UNKNOWN
    assert isinstance(port.symbol_errors, Missing)
    assert port.symbol_errors.absence is Absence.UNREADABLE


# --- soft RoCE --------------------------------------------------------------------------------------------


@pytest.fixture
def soft_roce() -> Iterator[str]:
    """Yield the name of a soft RoCE device on the loopback interface."""
    name = "drahealth_rxe"
    if not shutil.which("rdma"):
        pytest.skip("the command rdma is not installed")
    added = subprocess.run(
        ["rdma", "link", "add", name, "type", "rxe", "netdev", "lo"], capture_output=True, text=True
    )
    if added.returncode:
        pytest.skip(f"the kernel creates no soft RoCE device: {added.stderr.strip()}")
    try:
        yield name
    finally:
        subprocess.run(["rdma", "link", "delete", name], check=True)


@pytest.mark.live
def test_soft_roce_device_of_the_kernel_is_read(soft_roce: str) -> None:
    [nic] = read_nics(Path("/sys"), {DeclaredNicDevice("", soft_roce)}) or ()  # type: ignore[misc]
    assert (nic.name, nic.address) == (soft_roce, "")
    [port] = nic.ports
    assert (port.link_layer, port.interface, port.is_active) == (LinkLayer.ETHERNET, "lo", True)
    readings = (port.phys_state, port.rate_mbps, port.width, port.link_downs, port.receive_errors)
    assert all(isinstance(reading, int) for reading in readings)


# --- the watcher ------------------------------------------------------------------------------------------


def declarations(*parts: DeclaredNicDevice) -> Declarations:
    devices = [DriverDevice("d.example.com", "n", f"nic-{i}", part, 0) for i, part in enumerate(parts)]
    return (DeclaredFile("d.example.com", tuple(devices)),)


def uevents(count: int) -> UeventCounts:
    source = SourceSample("uevents", SourceState.OK, 0, NS, 0, "", vital=False)
    return UeventCounts(source, {Subsystem.PCI: count})


class WatchedNics(RunningWatcher):
    """Watcher with an interval of an hour, so that an earlier read has a trigger."""

    def __init__(self, files: NicFiles, period_s: float = 3600) -> None:
        self.watch = NicWatcher(files.root, period_s)

    @property
    def passes(self) -> int:
        return self.watch.source.passes if self.watch.source else 0


async def test_machine_without_declared_nics_reads_none(files: NicFiles) -> None:
    files.add()
    nics = WatchedNics(files)
    async with nics.run_watch():
        nics.watch.set_inputs((), uevents(0))
        nics.watch.set_inputs((), uevents(1))
        await trio.testing.wait_all_tasks_blocked()
        assert (nics.watch.nics, nics.watch.source, nics.watch.addresses) == (None, None, frozenset())


async def test_declared_nic_is_read_at_once_and_unread_until_then(files: NicFiles) -> None:
    files.add()
    nics = WatchedNics(files)
    async with nics.run_watch():
        nics.watch.set_inputs(declarations(BY_NAME))
        source = nics.watch.source
        assert source is not None
        assert (nics.watch.nics, source.state) == (None, SourceState.STARTING)
        await until(lambda: nics.watch.nics == (nic_sample(),))
        assert nics.wakes == 1
        nics.watch.set_inputs(declarations(BY_NAME, DeclaredNicDevice("", "mlx5_1")))
        assert nics.watch.nics is None  # not missing: the second NIC was not read
        await until(lambda: nics.watch.nics is not None)


async def test_pci_event_triggers_a_read_of_the_nics(files: NicFiles) -> None:
    device = files.add()
    nics = WatchedNics(files)
    async with nics.run_watch():
        nics.watch.set_inputs(declarations(BY_NAME), uevents(0))
        await until(lambda: nics.passes == 1)
        os.rename(files.root / device, files.root / "removed")
        nics.watch.set_inputs(declarations(BY_NAME), uevents(1))
        await until(lambda: nics.watch.nics == ())
        assert nics.wakes == 2
        assert nics.watch.addresses == {NIC}  # where the PCI rules look for its function


async def test_nic_without_rdma_device_after_a_restart_has_the_stored_address(files: NicFiles) -> None:
    stored = NicBaseline("", "mlx5_0", "mlx5_0", NIC, "", ())
    other = NicBaseline("", "mlx5_1", "mlx5_1", "0000:5e:00.0", "", ())
    nics = WatchedNics(files)
    nics.watch.restore_addresses(restored_nic_state([stored, other]).restored_addresses)
    async with nics.run_watch():
        nics.watch.set_inputs(declarations(BY_NAME))
        assert nics.watch.addresses == {NIC}
        await until(lambda: nics.watch.nics == ())
        nics.watch.set_inputs(declarations(BY_NAME, DeclaredNicDevice("", "mlx5_1")))
        assert nics.watch.addresses == {NIC, "0000:5e:00.0"}  # also if it is declared after a read


async def test_changed_port_wakes_the_engine_with_the_next_read(files: NicFiles) -> None:
    device = files.add()
    nics = WatchedNics(files, period_s=0.05)
    async with nics.run_watch():
        nics.watch.set_inputs(declarations(BY_NAME))
        await until(lambda: nics.passes >= 3)
        assert nics.wakes == 1  # equal readings do not wake the engine
        files.write("whole", 1)
        os.rename(files.root / "whole", files.root / device / "ports/1/counters/link_downed")
        await until(lambda: nics.wakes == 2)


async def test_unlistable_nics_are_a_failing_source(files: NicFiles) -> None:
    files.write("class/infiniband", "not a directory")
    nics = WatchedNics(files)
    async with nics.run_watch():
        nics.watch.set_inputs(declarations(BY_NAME))
        await until(lambda: nics.passes == 1)
        source = nics.watch.source
        assert source is not None
        assert (source.state, source.detail) == (
            SourceState.FAILING,
            "class/infiniband: Not a directory",
        )


async def test_hung_read_of_a_nic_is_named_at_the_end(files: NicFiles) -> None:
    """A FIFO without a writer hangs like a file of a NIC whose firmware does not answer."""
    device = files.add()
    state = files.root / device / "ports/1/state"
    state.unlink()
    os.mkfifo(state)
    nics = WatchedNics(files)
    nics.watch.set_inputs(declarations(BY_NAME))
    async with nics.run_watch():
        await until(lambda: nics.watch.unfinished_reads(0) == [NIC_READ])
    assert nics.watch.unfinished_reads(0) == [NIC_READ]
    os.close(os.open(state, os.O_WRONLY))
    assert nics.watch.unfinished_reads(PATIENCE_S) == []
