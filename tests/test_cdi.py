"""CDI files: atomic writes, one id per device, and marked errors."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_user import OTHER_USER
from patience import PATIENCE_S
from private_mounts import within_mounts

from agent.store.cdi_files import CdiDevice, CdiMount, CdiNode, remove_cdi_spec, write_cdi_spec

KIND = "example.com/gpu"
UID = "0f5a1c7e-1111-4222-8333-444455556666"
GPU = CdiDevice("gpu-3", env={"GPU": "3"}, nodes=(CdiNode("/dev/null"),))


def only_file(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def test_file_has_the_edits_of_each_device(tmp_path: Path) -> None:
    pages = CdiDevice(
        "pages",
        mounts=(
            CdiMount("hugetlbfs", "/dev/hugepages", options=("pagesize=2M", "size=4M"), type="hugetlbfs"),
        ),
        annotations={"example.com/pages": "2"},
    )
    renamed = CdiDevice("node", nodes=(CdiNode("/dev/gpu0", host_path="/dev/null", permissions="rwm"),))
    ids = write_cdi_spec(tmp_path, KIND, UID, [GPU, pages, renamed])
    file = only_file(tmp_path)
    assert file.name == f"example.com-gpu_{UID}.json"
    assert file.stat().st_mode & 0o777 == 0o644
    document: dict[str, Any] = json.loads(file.read_bytes())
    names = [device.pop("name") for device in document["devices"]]
    assert ids == tuple(f"{KIND}={name}" for name in names)
    assert document == {
        "cdiVersion": "0.6.0",
        "kind": KIND,
        "devices": [
            {
                "containerEdits": {
                    "env": ["GPU=3"],
                    "deviceNodes": [{"path": "/dev/null", "permissions": "rw"}],
                }
            },
            {
                "annotations": {"example.com/pages": "2"},
                "containerEdits": {
                    "mounts": [
                        {
                            "hostPath": "hugetlbfs",
                            "containerPath": "/dev/hugepages",
                            "options": ["pagesize=2M", "size=4M"],
                            "type": "hugetlbfs",
                        }
                    ]
                },
            },
            {
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/gpu0", "permissions": "rwm", "hostPath": "/dev/null"}]
                }
            },
        ],
    }


# --- names -------------------------------------------------------------------------------------------------


def test_every_device_has_its_own_id_with_the_claim_uid(tmp_path: Path) -> None:
    ids = write_cdi_spec(tmp_path, KIND, UID, [GPU, CdiDevice("gpu-4", env={"GPU": "4"})])
    assert len(set(ids)) == 2
    for name, id_ in zip(["gpu-3", "gpu-4"], ids, strict=True):
        assert re.fullmatch(rf"{KIND}={UID}-{name}-[0-9a-f]{{8}}", id_)


def test_name_changes_when_its_edits_change(tmp_path: Path) -> None:
    first = write_cdi_spec(tmp_path, KIND, UID, [CdiDevice("cpus", env={"CPUS": "0-1"})])
    remove_cdi_spec(tmp_path, KIND, UID)
    then = write_cdi_spec(tmp_path, KIND, UID, [CdiDevice("cpus", env={"CPUS": "2-3"})])
    again = write_cdi_spec(tmp_path, KIND, UID, [CdiDevice("cpus", env={"CPUS": "0-1"})])
    assert first == again
    assert first != then


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CdiDevice("", env={"A": "1"}), "'' is not a CDI device name"),
        (lambda: CdiDevice("a/b", env={"A": "1"}), "'a/b' is not a CDI device name"),
        (lambda: CdiDevice("gpu-", env={"A": "1"}), "'gpu-' is not a CDI device name"),
        (lambda: CdiDevice("gpu"), "CDI device gpu changes nothing in a container; add env"),
        (lambda: CdiDevice("gpu", annotations={"a": "b"}), "CDI device gpu changes nothing in a container"),
        (lambda: CdiDevice("gpu", env={"A=B": "1"}), "'A=B' is not a variable name"),
        (
            lambda: CdiDevice("gpu", env={"A": "1\n2"}),
            r"A='1\\n2' has unprintable characters",
        ),
        (lambda: CdiDevice("gpu", mounts=(CdiMount("", "/x"),)), "mount '/x' has no host_path"),
        (lambda: CdiDevice("gpu", mounts=(CdiMount("/x", "x"),)), "'x' is not an absolute path"),
        (lambda: CdiDevice("gpu", mounts=(CdiMount("/x", "/../x"),)), "'/../x' is not an absolute path"),
        (lambda: CdiDevice("gpu", nodes=(CdiNode("dev/null"),)), "'dev/null' is not an absolute path"),
        (
            lambda: CdiDevice("gpu", nodes=(CdiNode("/dev/a", host_path="null"),)),
            "'null' is not an absolute path",
        ),
        (
            lambda: CdiDevice("gpu", nodes=(CdiNode("/dev/a", permissions="x"),)),
            "permissions 'x': only the letters",
        ),
        (lambda: CdiDevice("gpu", env={"A": "1"}, annotations={"a b": ""}), "'a b' is not an annotation key"),
    ],
)
def test_invalid_device_is_refused_at_construction(make: Callable[[], CdiDevice], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text).replace(re.escape(r"\\n"), re.escape(r"\n"))):
        make()


@pytest.mark.parametrize(
    "kind", ["gpu", "example.com/", "/gpu", "example.com/gpu/x", "1.example/gpu", "a/b.c", "é/x"]
)
def test_invalid_vendor_class_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ValueError, match="is not a CDI vendor/class"):
        write_cdi_spec(tmp_path, kind, UID, [GPU])
    assert not list(tmp_path.iterdir())


@given(
    st.text(max_size=40).filter(
        lambda uid: not re.fullmatch(r"[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", uid, re.ASCII)
    )
)
def test_uid_cannot_escape_the_directory(tmp_path_factory: pytest.TempPathFactory, uid: str) -> None:
    with pytest.raises(ValueError, match="is not a claim UID"):
        remove_cdi_spec(tmp_path_factory.getbasetemp(), KIND, uid)


def test_spec_without_devices_or_with_duplicates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"CDI file .*: no devices; runtimes refuse such a file"):
        write_cdi_spec(tmp_path, KIND, UID, [])
    with pytest.raises(ValueError, match="2 devices are named gpu-3"):
        write_cdi_spec(
            tmp_path, KIND, UID, [GPU, CdiDevice("gpu-3", env={"GPU": "3"}, nodes=(CdiNode("/dev/null"),))]
        )
    assert not list(tmp_path.iterdir())


# --- the file ----------------------------------------------------------------------------------------------


def test_unchanged_spec_is_not_rewritten(tmp_path: Path) -> None:
    ids = write_cdi_spec(tmp_path, KIND, UID, [GPU])
    before = only_file(tmp_path).stat()
    assert write_cdi_spec(tmp_path, KIND, UID, [GPU]) == ids
    after = only_file(tmp_path).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_spec_lost_by_reboot_is_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "cdi"
    ids = write_cdi_spec(directory, KIND, UID, [GPU])
    only_file(directory).unlink()
    directory.rmdir()
    assert write_cdi_spec(directory, KIND, UID, [GPU]) == ids
    assert only_file(directory).stat().st_size


@pytest.mark.parametrize("left", ["", '{"cdiVersion": "0.6', "directory"])
def test_foreign_file_at_path_is_replaced_or_reported(tmp_path: Path, left: str) -> None:
    write_cdi_spec(tmp_path, KIND, UID, [GPU])
    file = only_file(tmp_path)
    good = file.read_bytes()
    file.unlink()
    if left == "directory":
        file.mkdir()
        with pytest.raises(IsADirectoryError):
            write_cdi_spec(tmp_path, KIND, UID, [GPU])
        assert only_file(tmp_path) == file  # and no partial file
    else:
        file.write_text(left)
        write_cdi_spec(tmp_path, KIND, UID, [GPU])
        assert file.read_bytes() == good


def test_symbolic_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    link = tmp_path / "cdi" / f"example.com-gpu_{UID}.json"
    link.symlink_to(precious)
    write_cdi_spec(tmp_path / "cdi", KIND, UID, [GPU])
    assert precious.read_text() == "precious"
    assert not link.is_symlink()


def test_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    write_cdi_spec(tmp_path, KIND, UID, [GPU])
    file, stop, seen = only_file(tmp_path), threading.Event(), set()
    until_s = time.monotonic() + PATIENCE_S

    def read() -> None:
        while not stop.is_set():
            seen.add(json.loads(file.read_bytes())["devices"][0]["containerEdits"]["env"][0])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(200):
            if time.monotonic() > until_s:
                break  # a disk that takes long for each file
            write_cdi_spec(
                tmp_path, KIND, UID, [CdiDevice("gpu-3", env={"GPU": "x" * (1 + number % 2 * 60_000)})]
            )
    finally:
        stop.set()
        reader.join()
    assert seen <= {"GPU=3", "GPU=x", f"GPU={'x' * 60_001}"}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_removal_of_absent_spec_succeeds(tmp_path: Path) -> None:
    write_cdi_spec(tmp_path, KIND, UID, [GPU])
    remove_cdi_spec(tmp_path, KIND, UID)
    assert not list(tmp_path.iterdir())
    remove_cdi_spec(tmp_path, KIND, UID)
    remove_cdi_spec(tmp_path / "never-was", KIND, UID)


def test_directory_without_parent_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_cdi_spec(tmp_path / "typo" / "cdi", KIND, UID, [GPU])


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777], ids=oct)
def test_directory_that_others_may_write_to_is_used(tmp_path: Path, mode: int) -> None:
    """Other programs create the directory, which belongs to the runtimes."""
    tmp_path.chmod(mode)
    write_cdi_spec(tmp_path, KIND, UID, [GPU])
    assert only_file(tmp_path).stat().st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another user")
def test_directory_of_another_user_is_used(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER_USER, -1)
    write_cdi_spec(tmp_path, KIND, UID, [GPU])
    assert only_file(tmp_path).stat().st_uid == 0


# Fills a tmpfs in its own mount namespace, and prints the result of writing a CDI file there.
FULL = """
import sys
from pathlib import Path
from agent.store.cdi_files import CdiDevice, write_cdi_spec
here = Path(sys.argv[1])
device = CdiDevice("gpu-3", env={"GPU": "3"})
write_cdi_spec(here, "example.com/gpu", "before", [device])
old = {path.name for path in here.iterdir()}
try:
    with open(here / "ballast", "wb") as file:
        file.write(b"x" * (1 << 20))
except OSError:
    pass
try:
    write_cdi_spec(here, "example.com/gpu", "after", [device])
except OSError as error:
    print(error.errno, sorted({path.name for path in here.iterdir()} - old))
"""


def test_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    mounted = within_mounts('mount -t tmpfs -o size=64k none "$1"', tmp_path)
    command = [*mounted, sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{errno.ENOSPC} ['ballast']\n"
