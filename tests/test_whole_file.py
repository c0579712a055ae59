"""A file is read as a whole or not at all, whatever lies where it should be."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.reading import Absence
from agent.system.read_file import ReadError, WholeFile, read_bounded

LIMIT = 100


def unread(path: Path) -> ReadError:
    with pytest.raises(ReadError) as caught:
        read_bounded(path, LIMIT)
    assert str(caught.value) == f"{path}: {caught.value.reason}"
    return caught.value


def test_a_file_at_its_limit_is_read_with_its_age(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"x" * LIMIT)
    os.utime(path, (0, 1234.5))
    link.symlink_to(path)
    assert read_bounded(link, LIMIT) == WholeFile(b"x" * LIMIT, 1234.5)


def test_a_byte_more_is_too_much_and_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (LIMIT + 1))
    assert unread(tmp_path / "file").reason == "is 101 bytes, limit 100"


def test_a_file_without_a_size_has_a_limit_too() -> None:
    assert unread(Path("/proc/self/maps")).reason == "is 101 bytes, limit 100"


@pytest.mark.parametrize("name", ["gone", "file/below"])
def test_what_is_not_there_is_absent(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert unread(tmp_path / name).absence is Absence.ABSENT


@pytest.mark.parametrize(
    ("make", "reason", "number"),
    [
        (os.mkfifo, "is no regular file", 0),
        (os.mkdir, "Is a directory", errno.EISDIR),
        (lambda path: os.symlink("/dev/null", path), "is no regular file", 0),
        (lambda path: os.symlink(path, path), "Too many levels of symbolic links", errno.ELOOP),
    ],
)
def test_what_is_there_and_no_file_is_unreadable(tmp_path: Path, make, reason: str, number: int) -> None:
    make(tmp_path / "it")
    error = unread(tmp_path / "it")
    assert (error.absence, error.reason, error.errno) == (Absence.UNREADABLE, reason, number)
    assert not error.is_forbidden


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A file that this user may not read, whoever runs the tests."""
    path = tmp_path / "file"
    path.touch(mode=0)
    before = os.geteuid()
    os.seteuid(before or 65534)
    yield path
    os.seteuid(before)


def test_what_another_user_might_read_is_forbidden(locked: Path) -> None:
    error = unread(locked)
    assert (error.absence, error.errno, error.is_forbidden) == (Absence.UNREADABLE, errno.EACCES, True)
