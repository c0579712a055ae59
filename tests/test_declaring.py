"""What a driver declares over its socket, as the file that it could have written itself."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_disk import run_on_small_disk

from agent.driver.declare import declare, file_of
from agent.errors import Busy, ConfigError
from agent.model.declared import (
    Declared,
    DeclaredCpus,
    DeclaredGpu,
    DeclaredHugepages,
    DeclaredMemory,
    DeclaredPci,
)
from agent.serve.driver_link.service import Row
from agent.sources.declared import read_declarations
from agent.sources.declared_file import parse_declaration

DRIVER = "gpu.example.com"
NODE = "node-1"
ROWS = (
    Row(
        "",
        {"name": "set-0", "kind": "cpu", "cpus": "0-1,8", "numa": 0, "exclusive": True, "isolated": False},
    ),
    Row("rack-1", {"name": "pages", "kind": "hugepages", "size": "2Mi", "pages": 512, "numa": 1}),
    Row("", {"name": "dimm", "kind": "memory", "size": "64Gi", "numa": 0, "lease": "90s"}),
    Row("", {"name": "gpu", "kind": "gpu", "uuid": "MIG-1f0c", "gi": 1, "ci": 0}),
    Row("", {"name": "nic", "kind": "pci", "address": "0000:5e:00.1", "driver": "mlx5_core"}),
)


def declared(directory: Path) -> tuple[Declared, ...]:
    """What the agent reads there; the file has no mistake."""
    [file] = read_declarations(directory, (), NODE)
    assert (file.driver, file.error) == (DRIVER, "")
    return file.devices


def test_what_is_declared_is_what_the_agent_reads(tmp_path: Path) -> None:
    assert declare(tmp_path / "devices.d", DRIVER, NODE, ROWS) == 5
    assert declared(tmp_path / "devices.d") == (
        Declared(DRIVER, NODE, "set-0", DeclaredCpus(0b1_0000_0011, 0, True, False), 0),
        Declared(DRIVER, "rack-1", "pages", DeclaredHugepages(2048, 512, 1), 0),
        Declared(DRIVER, NODE, "dimm", DeclaredMemory(64 << 30, 0), 90),
        Declared(DRIVER, NODE, "gpu", DeclaredGpu("", "MIG-1f0c", 1, 0), 0),
        Declared(DRIVER, NODE, "nic", DeclaredPci("0000:5e:00.1", "mlx5_core"), 0),
    )


def test_the_newest_word_is_all_of_it(tmp_path: Path) -> None:
    declare(tmp_path, DRIVER, NODE, ROWS)
    declare(tmp_path, DRIVER, NODE, ROWS[:1])
    assert [one.name for one in declared(tmp_path)] == ["set-0"]
    declare(tmp_path, DRIVER, NODE, ())
    assert declared(tmp_path) == ()


def test_the_same_word_again_writes_nothing(tmp_path: Path) -> None:
    declare(tmp_path, DRIVER, NODE, ROWS)
    before = (tmp_path / f"{DRIVER}.toml").stat()
    declare(tmp_path, DRIVER, NODE, ROWS)
    after = (tmp_path / f"{DRIVER}.toml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_nobody_else_may_write_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        declare(tmp_path / "devices.d", DRIVER, NODE, ROWS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "devices.d" / f"{DRIVER}.toml").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "devices.d").stat().st_mode) == 0o755
    assert [path.name for path in (tmp_path / "devices.d").iterdir()] == [f"{DRIVER}.toml"]


def test_a_file_that_somebody_else_wrote_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / f"{DRIVER}.toml"
    path.write_text("version = 1\n")
    with pytest.raises(Busy) as caught:
        declare(tmp_path, DRIVER, NODE, ROWS)
    words = "not written by drahealth; remove it to declare devices over the socket"
    assert str(caught.value) == f"{path}: {words}"
    assert path.read_text() == "version = 1\n"


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    """To a file that would be ours."""
    declare(path.parent / "elsewhere", DRIVER, NODE, ROWS)
    path.symlink_to(path.parent / "elsewhere" / path.name)


@pytest.mark.parametrize(
    "make", [make_fifo, make_link, Path.mkdir, Path.touch], ids=["fifo", "link", "directory", "empty"]
)
def test_whatever_else_lies_in_its_place_is_somebody_elses(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / f"{DRIVER}.toml"
    make(path)
    before = path.lstat()
    with pytest.raises(Busy, match="not written by drahealth"):
        declare(tmp_path, DRIVER, NODE, ROWS)
    assert path.lstat().st_ino == before.st_ino


def test_what_a_killed_agent_left_half_written_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / f".{DRIVER}.toml.new").write_text("[[dev")
    assert read_declarations(tmp_path, (), NODE) == ()
    declare(tmp_path, DRIVER, NODE, ROWS)
    assert len(declared(tmp_path)) == 5
    assert [path.name for path in tmp_path.iterdir()] == [f"{DRIVER}.toml"]


def test_a_mistake_names_device_key_value_and_limit_and_changes_nothing(tmp_path: Path) -> None:
    declare(tmp_path, DRIVER, NODE, ROWS)
    wrong = Row("", {"name": "set-1", "kind": "cpu", "cpus": "0-1", "numa": 1024})
    with pytest.raises(ConfigError) as caught:
        declare(tmp_path, DRIVER, NODE, (*ROWS, wrong))
    assert str(caught.value) == "device 6 (set-1): numa: 1024 is over the limit of 1023"
    assert len(declared(tmp_path)) == 5


def test_more_than_a_file_may_hold_is_refused_with_the_numbers(tmp_path: Path) -> None:
    rows = [Row("x" * 300, {"name": f"m-{n}", "kind": "memory", "numa": 0}) for n in range(4000)]
    with pytest.raises(ConfigError, match=r"the devices take \d{7} bytes as a file, limit 1048576"):
        declare(tmp_path, DRIVER, NODE, rows)


def test_a_value_that_no_line_holds_is_named_by_device_and_key(tmp_path: Path) -> None:
    """Of the file's lines the driver knows nothing."""
    long = Row("", {"name": "set-1", "kind": "cpu", "cpus": ",".join(map(str, range(0, 8192, 2)))})
    with pytest.raises(ConfigError) as caught:
        declare(tmp_path, DRIVER, NODE, (ROWS[0], long))
    assert str(caught.value) == "device 2 (set-1): cpus: takes a line of 19933 bytes, limit 4096"


def test_a_disk_that_is_full_is_named_and_keeps_what_was_there(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from agent.driver.declare import declare
from agent.serve.driver_link.service import Row
from agent.store.files import NotKept
top = Path({str(tmp_path)!r})
rows = [Row("", {{"name": f"m-{{n}}", "kind": "memory", "numa": 0}}) for n in range(4000)]
declare(top, {DRIVER!r}, {NODE!r}, rows[:2])
try:
    declare(top, {DRIVER!r}, {NODE!r}, rows)
except NotKept as error:
    print(error)
print((top / "{DRIVER}.toml").read_text().count("[[device]]"), len(list(top.iterdir())))
"""
    error, left = run_on_small_disk(program, tmp_path)
    assert "No space left on device" in error
    assert f"{DRIVER}.toml" in error
    assert left == "2 1"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_a_value_that_is_read_as_it_was(text: str) -> None:
    data = file_of(DRIVER, [Row("", {"name": "n", "kind": "gpu", "uuid": text})])
    try:
        [device] = parse_declaration(data, DRIVER, NODE)
        assert device.what == DeclaredGpu("", text, -1, -1)
    except ConfigError as error:
        words = f"{text!r} is no UUID of NVIDIA's, such as GPU-... or MIG-..."
        assert str(error) == f"device 1 (n): uuid: {words}"  # noqa: PT017  # either of the two
