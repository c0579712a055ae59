"""Declarations of a linked driver, written as a file into devices.d."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_disk import run_on_small_disk

from agent.driver.session import declaration_text, write_declaration
from agent.errors import ConfigError, ResourceBusyError
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredGpuDevice,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.serve.driver_link.handler_interface import DeviceDeclaration
from agent.sources.declaration_file import parse_declaration, read_declarations

DRIVER = "gpu.example.com"
NODE = "node-1"
ROWS = (
    DeviceDeclaration(
        "",
        {"name": "set-0", "kind": "cpu", "cpus": "0-1,8", "numa": 0, "exclusive": True, "isolated": False},
    ),
    DeviceDeclaration(
        "rack-1", {"name": "pages", "kind": "hugepages", "size": "2Mi", "pages": 512, "numa": 1}
    ),
    DeviceDeclaration("", {"name": "dimm", "kind": "memory", "size": "64Gi", "numa": 0, "lease": "90s"}),
    DeviceDeclaration("", {"name": "gpu", "kind": "gpu", "uuid": "MIG-1f0c", "gi": 1, "ci": 0}),
    DeviceDeclaration("", {"name": "hca", "kind": "nic", "rdma": "mlx5_0"}),
    DeviceDeclaration("", {"name": "nic", "kind": "pci", "address": "0000:5e:00.1", "driver": "mlx5_core"}),
)


def read_devices(directory: Path) -> tuple[DriverDevice, ...]:
    """Return the devices that the agent reads from the directory, without an error."""
    [file] = read_declarations(directory, (), NODE)
    assert (file.driver, file.error) == (DRIVER, "")
    return file.devices


def test_declared_devices_are_read_back_by_the_agent(tmp_path: Path) -> None:
    written = write_declaration(tmp_path / "devices.d", DRIVER, NODE, ROWS)
    assert read_devices(tmp_path / "devices.d") == written
    assert written == (
        DriverDevice(DRIVER, NODE, "set-0", DeclaredCpuDevice(0b1_0000_0011, 0, True, False), 0),
        DriverDevice(DRIVER, "rack-1", "pages", DeclaredHugepageDevice(2048, 512, 1), 0),
        DriverDevice(DRIVER, NODE, "dimm", DeclaredMemoryDevice(64 << 30, 0), 90),
        DriverDevice(DRIVER, NODE, "gpu", DeclaredGpuDevice("", "MIG-1f0c", 1, 0), 0),
        DriverDevice(DRIVER, NODE, "hca", DeclaredNicDevice("", "mlx5_0"), 0),
        DriverDevice(DRIVER, NODE, "nic", DeclaredPciDevice("0000:5e:00.1", "mlx5_core"), 0),
    )


def test_new_declaration_replaces_the_old_one(tmp_path: Path) -> None:
    write_declaration(tmp_path, DRIVER, NODE, ROWS)
    write_declaration(tmp_path, DRIVER, NODE, ROWS[:1])
    assert [device.name for device in read_devices(tmp_path)] == ["set-0"]
    write_declaration(tmp_path, DRIVER, NODE, ())
    assert read_devices(tmp_path) == ()


def test_unchanged_declaration_writes_nothing(tmp_path: Path) -> None:
    write_declaration(tmp_path, DRIVER, NODE, ROWS)
    before = (tmp_path / f"{DRIVER}.toml").stat()
    write_declaration(tmp_path, DRIVER, NODE, ROWS)
    after = (tmp_path / f"{DRIVER}.toml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_file_is_writable_by_the_agent_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_declaration(tmp_path / "devices.d", DRIVER, NODE, ROWS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "devices.d" / f"{DRIVER}.toml").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "devices.d").stat().st_mode) == 0o755
    assert [path.name for path in (tmp_path / "devices.d").iterdir()] == [f"{DRIVER}.toml"]


def test_foreign_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / f"{DRIVER}.toml"
    path.write_text("version = 1\n")
    with pytest.raises(ResourceBusyError) as caught:
        write_declaration(tmp_path, DRIVER, NODE, ROWS)
    problem = "not written by drahealth; remove it to declare devices over the socket"
    assert str(caught.value) == f"declaration file {path}: {problem}"
    assert path.read_text() == "version = 1\n"


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    """Make a symlink to a file that the agent wrote."""
    write_declaration(path.parent / "elsewhere", DRIVER, NODE, ROWS)
    path.symlink_to(path.parent / "elsewhere" / path.name)


@pytest.mark.parametrize(
    "make", [make_fifo, make_link, Path.mkdir, Path.touch], ids=["fifo", "link", "directory", "empty"]
)
def test_foreign_object_in_place_of_the_file_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / f"{DRIVER}.toml"
    make(path)
    before = path.lstat()
    with pytest.raises(ResourceBusyError, match="not written by drahealth"):
        write_declaration(tmp_path, DRIVER, NODE, ROWS)
    assert path.lstat().st_ino == before.st_ino


def test_partial_file_of_a_killed_agent_is_replaced(tmp_path: Path) -> None:
    (tmp_path / f".{DRIVER}.toml.new").write_text("[[dev")
    assert read_declarations(tmp_path, (), NODE) == ()
    write_declaration(tmp_path, DRIVER, NODE, ROWS)
    assert len(read_devices(tmp_path)) == len(ROWS)
    assert [path.name for path in tmp_path.iterdir()] == [f"{DRIVER}.toml"]


def test_invalid_value_is_named_and_changes_nothing(tmp_path: Path) -> None:
    write_declaration(tmp_path, DRIVER, NODE, ROWS)
    wrong = DeviceDeclaration("", {"name": "set-1", "kind": "cpu", "cpus": "0-1", "numa": 1024})
    with pytest.raises(ConfigError) as caught:
        write_declaration(tmp_path, DRIVER, NODE, (*ROWS, wrong))
    assert str(caught.value) == f"device {len(ROWS) + 1} (set-1): numa: 1024 is over the limit of 1023"
    assert len(read_devices(tmp_path)) == len(ROWS)


def test_oversized_declaration_is_rejected_with_numbers(tmp_path: Path) -> None:
    rows = [
        DeviceDeclaration("x" * 300, {"name": f"m-{n}", "kind": "memory", "numa": 0}) for n in range(4000)
    ]
    with pytest.raises(
        ConfigError, match=r"driver gpu\.example\.com: declaration takes \d{7} bytes, limit 1048576"
    ):
        write_declaration(tmp_path, DRIVER, NODE, rows)


def test_too_long_value_is_named_by_device_and_key(tmp_path: Path) -> None:
    long = DeviceDeclaration(
        "", {"name": "set-1", "kind": "cpu", "cpus": ",".join(map(str, range(0, 8192, 2)))}
    )
    with pytest.raises(ConfigError) as caught:
        write_declaration(tmp_path, DRIVER, NODE, (ROWS[0], long))
    assert (
        str(caught.value)
        == "device 2 (set-1): cpus: the value makes a line of 19933 bytes, limit 4096; shorten it"
    )


def test_full_disk_is_named_and_keeps_the_old_file(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from agent.driver.session import write_declaration
from agent.serve.driver_link.requests import DeviceDeclaration
from agent.store.state_files import StateWriteError
top = Path({str(tmp_path)!r})
rows = [DeviceDeclaration("", {{"name": f"m-{{n}}", "kind": "memory", "numa": 0}}) for n in range(4000)]
write_declaration(top, {DRIVER!r}, {NODE!r}, rows[:2])
try:
    write_declaration(top, {DRIVER!r}, {NODE!r}, rows)
except StateWriteError as error:
    print(error)
print((top / "{DRIVER}.toml").read_text().count("[[device]]"), len(list(top.iterdir())))
"""
    error, left = run_on_small_disk(program, tmp_path)
    assert "No space left on device" in error
    assert f"{DRIVER}.toml" in error
    assert left == "2 1"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_value_survives_a_round_trip(text: str) -> None:
    data = declaration_text(DRIVER, [DeviceDeclaration("", {"name": "n", "kind": "gpu", "uuid": text})])
    try:
        [device] = parse_declaration(data, DRIVER, NODE)
        assert device.part == DeclaredGpuDevice("", text, -1, -1)
    except ConfigError as error:
        problem = f"{text!r} is not an NVIDIA UUID, such as GPU-... or MIG-..."
        assert str(error) == f"device 1 (n): uuid: {problem}"  # noqa: PT017  # either of the two
