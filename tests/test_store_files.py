"""A kept file is whole, whoever writes it at the same time, and nobody's directory becomes everybody's."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.store.files import CorruptFile, decode_json, load, make_directory, replace

LIMIT = 1 << 20

WRITER = """
import sys
from pathlib import Path
from agent.store.files import replace
path, letter, size = Path(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
for _ in range(200):
    replace(path, letter * size, 1 << 20)
"""


class Head(msgspec.Struct):
    version: int


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_two_processes_that_write_at_once_leave_the_one_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    whole = {b"a" * 300_000, b"b" * 100_000}
    replace(path, b"b" * 100_000, LIMIT)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), *how])
        for how in (("a", "300000"), ("b", "100000"))
    ]
    while any(writer.poll() is None for writer in writers):
        assert path.read_bytes() in whole
    assert [writer.returncode for writer in writers] == [0, 0], "and each could write"
    assert list(tmp_path.iterdir()) == [path]


def test_threads_of_one_process_do_not_write_into_one_file_either(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    failures: list[Exception] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(50):
                replace(path, data, LIMIT)
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
def test_directories_are_not_everybodys_whatever_the_umask(tmp_path: Path) -> None:
    replace(tmp_path / "plugins" / "driver" / "drahealth" / "kept.json", b"{}", LIMIT)
    made = [tmp_path / name for name in ("plugins", "plugins/driver", "plugins/driver/drahealth")]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o755", "0o755", "0o700"]


def test_a_directory_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    make_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o711


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    path = tmp_path / "state" / "kept.json"
    why = f"{path}: Not a directory; could not be set aside: Not a directory"
    assert load(path, LIMIT, lambda raw: decode_json(raw, Head, 1), None) == (None, why)


@pytest.mark.parametrize(
    "data",
    [b'{"version": 1, "x": ' + b"[" * 500_000, b'{"version": 1, "x": ' + b'{"a":' * 100_000],
    ids=["arrays", "objects"],
)
def test_a_file_that_is_nested_without_end_is_set_aside_like_any_other(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="is not understood: maximum recursion depth exceeded"):
        decode_json(data, Head, 1)
    found, problem = load(path, LIMIT, lambda raw: decode_json(raw, Head, 1), None)
    assert found is None
    assert problem.endswith("set aside as kept.json.corrupt-1")
