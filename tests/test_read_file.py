"""Bounded reads of whole files, and errors for anything else at the path."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_user import become_other_user
from patience import PATIENCE_S

from agent.model.reading import Absence
from agent.system import files
from agent.system.files import FileContent, ReadError, read_bounded

LIMIT = 100


def read_error(path: Path) -> ReadError:
    with pytest.raises(ReadError) as caught:
        read_bounded(path, LIMIT)
    assert str(caught.value) == f"{path}: {caught.value.reason}"
    return caught.value


def test_file_at_size_limit_is_read_with_its_time(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"x" * LIMIT)
    os.utime(path, (0, 1234.5))
    link.symlink_to(path)
    assert read_bounded(link, LIMIT) == FileContent(b"x" * LIMIT, 1234.5)


def test_file_above_size_limit_is_refused_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (LIMIT + 1))
    assert read_error(tmp_path / "file").reason == "file is 101 bytes, limit 100"


def test_file_without_reported_size_has_the_limit_too() -> None:
    assert read_error(Path("/proc/self/maps")).reason == "file is 101 bytes, limit 100"


def test_pseudo_file_without_data_now_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/kmsg is a regular file, and a read that would wait fails with EAGAIN."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr("agent.system.files._open", lambda *_: reader)
    monkeypatch.setattr("stat.S_ISREG", lambda _: True)
    assert read_bounded(Path("/proc/kmsg"), LIMIT).data == b""
    os.close(writer)


@pytest.mark.parametrize("name", ["gone", "file/below"])
def test_absent_file_is_absent(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert read_error(tmp_path / name).absence is Absence.ABSENT


@pytest.mark.parametrize(
    ("make", "reason", "number"),
    [
        (os.mkfifo, "is not a regular file", 0),
        (os.mkdir, "Is a directory", errno.EISDIR),
        (lambda path: os.symlink("/dev/null", path), "is not a regular file", 0),
        (lambda path: os.symlink(path, path), "Too many levels of symbolic links", errno.ELOOP),
    ],
)
def test_path_that_is_no_file_is_unreadable(tmp_path: Path, make, reason: str, number: int) -> None:
    make(tmp_path / "it")
    error = read_error(tmp_path / "it")
    assert (error.absence, error.reason, error.errno) == (Absence.UNREADABLE, reason, number)
    assert not error.is_forbidden


@pytest.mark.parametrize("is_named", [True, False])
def test_input_may_be_a_pipe_or_standard_input(tmp_path: Path, is_named: bool) -> None:
    reader, writer = os.pipe()
    before = os.dup(0)
    try:
        os.write(writer, b"objects")
        os.close(writer)
        os.dup2(reader, 0)
        path = Path(f"/dev/fd/{reader}" if is_named else "-")
        assert read_bounded(path, LIMIT, is_input=True).data == b"objects"
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reader)


def test_input_pipe_is_read_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not wait for the writer gets no more than the pipe holds, 64 KiB."""
    monkeypatch.setattr(files, "WRITER_S", PATIENCE_S)
    size = 1 << 20
    with subprocess.Popen(["head", "-c", str(size), "/dev/zero"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        path = Path(f"/dev/fd/{process.stdout.fileno()}")
        assert len(read_bounded(path, size, is_input=True).data) == size


def test_input_pipe_whose_writer_comes_later_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITER_S", PATIENCE_S)
    os.mkfifo(tmp_path / "pods")
    with subprocess.Popen(["sh", "-c", f"echo objects >{tmp_path}/pods"]):
        assert read_bounded(tmp_path / "pods", LIMIT, is_input=True).data == b"objects\n"


def test_input_pipe_of_a_slow_writer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITER_S", 0.0)
    os.mkfifo(tmp_path / "pods")
    reader = os.open(tmp_path / "pods", os.O_RDONLY | os.O_NONBLOCK)  # keeps what a fast writer wrote
    writer = os.open(tmp_path / "pods", os.O_WRONLY)
    with subprocess.Popen(["echo", "objects"], stdout=writer):
        os.close(writer)
        assert read_bounded(tmp_path / "pods", LIMIT, is_input=True).data == b"objects\n"
    os.close(reader)


def test_input_pipe_written_at_the_end_of_the_wait_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WRITER_S", 0.0)
    os.mkfifo(tmp_path / "pods")
    reader = os.open(tmp_path / "pods", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "pods", os.O_WRONLY)
    opened = os.open

    def write_and_end(path: Any, flags: int) -> int:
        if flags & os.O_WRONLY:
            os.write(writer, b"objects")
            os.close(writer)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", write_and_end)
    assert read_bounded(tmp_path / "pods", LIMIT, is_input=True).data == b"objects"
    os.close(reader)


def test_input_pipe_without_a_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITER_S", 0.0)
    os.mkfifo(tmp_path / "pods")
    with pytest.raises(ReadError, match="no process wrote to this pipe within 0 s; start its writer"):
        read_bounded(tmp_path / "pods", LIMIT, is_input=True)


def test_directory_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="Is a directory"):
        read_bounded(tmp_path, LIMIT, is_input=True)


@pytest.fixture
def forbidden_path(tmp_path: Path) -> Iterator[Path]:
    """Path that this user may not read, even if root runs the tests."""
    path = tmp_path / "file"
    path.touch(mode=0)
    before = os.geteuid()
    if before == 0:
        become_other_user()
    yield path
    os.seteuid(before)


def test_file_of_another_user_is_forbidden(forbidden_path: Path) -> None:
    error = read_error(forbidden_path)
    assert (error.absence, error.errno, error.is_forbidden) == (Absence.UNREADABLE, errno.EACCES, True)
