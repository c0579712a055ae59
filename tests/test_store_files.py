"""State files: concurrent writers, and modes of created directories."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from agent.store.state_files import UnusableFile, decode_json, load_state_file, replace_file
from agent.system.files import make_directory

LIMIT = 1 << 20

WRITER = """
import sys
from pathlib import Path
from agent.store.state_files import replace_file
path, letter, size = Path(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
for _ in range(200):
    replace_file(path, letter * size, 1 << 20)
"""


class Head(msgspec.Struct):
    version: int


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_concurrent_writes_of_two_processes_leave_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    whole = {b"a" * 300_000, b"b" * 100_000}
    replace_file(path, b"b" * 100_000, LIMIT)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), *how])
        for how in (("a", "300000"), ("b", "100000"))
    ]
    while any(writer.poll() is None for writer in writers):
        assert path.read_bytes() in whole
    assert [writer.returncode for writer in writers] == [0, 0], "and each could write"
    assert list(tmp_path.iterdir()) == [path]


def test_concurrent_writes_of_threads_leave_one_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    failures: list[Exception] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(50):
                replace_file(path, data, LIMIT)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter * 50_000,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert path.read_bytes() in {letter * 50_000 for letter in (b"a", b"b", b"c")}


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize(
    "make", [Path.hardlink_to, lambda path, _: os.mkfifo(path)], ids=["hard-link", "fifo"]
)
def test_foreign_temporary_file_is_removed_and_not_written(
    make: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "state.json"
    victim.write_text("text")
    make(tmp_path / "state.json.new", victim)
    replace_file(path, b"state", 10)
    assert (victim.read_text(), path.read_text()) == ("text", "state")
    assert not (tmp_path / "state.json.new").exists()


def test_created_directories_are_not_world_writable(tmp_path: Path) -> None:
    replace_file(tmp_path / "plugins" / "driver" / "drahealth" / "kept.json", b"{}", LIMIT)
    made = [tmp_path / name for name in ("plugins", "plugins/driver", "plugins/driver/drahealth")]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o755", "0o755", "0o700"]


def test_directory_on_a_file_system_without_mkdir_is_an_error(tmp_path: Path) -> None:
    """procfs answers ENOENT although the parent exists."""
    for path in (Path("/proc/drahealth"), Path("/proc/drahealth/deeper")):
        with pytest.raises(FileNotFoundError):
            make_directory(path)


def test_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    make_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o711


def test_file_in_place_of_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    path = tmp_path / "state" / "kept.json"
    why = f"{path}: Not a directory; could not be renamed: Not a directory; the next write replaces it"
    assert load_state_file(path, LIMIT, lambda raw: decode_json(raw, Head, 1), None) == (None, why)


@pytest.mark.parametrize(
    "data",
    [
        b'{"version": 1, "x": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b'{"version": 1, "x": ' + b'{"a":' * 500_000 + b"1" + b"}" * 500_001,
    ],
    ids=["arrays", "objects"],
)
def test_deeply_nested_file_is_set_aside(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(data)
    too_deep = r"file cannot be parsed: (maximum recursion depth exceeded|stack overflow)"
    with pytest.raises(UnusableFile, match=too_deep):
        decode_json(data, Head, 1)
    found, problem = load_state_file(path, 4 * LIMIT, lambda raw: decode_json(raw, Head, 1), None)
    assert found is None
    assert problem.endswith("renamed to kept.json.corrupt-1")
