"""Directories of the agent: a link in place of a checked directory is refused, and never used."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ECONNREFUSED
from pathlib import Path

import pytest
from other_user import OTHER_USER

from agent.engine.step import EngineState
from agent.errors import DrahealthError
from agent.model.health import Taints
from agent.model.history import ObservedPeriod
from agent.model.persistent_faults import PersistentState
from agent.model.settings import EngineSettings, UsageHistoryLimits
from agent.prepare.prepare_ledger import PrepareLedger
from agent.record.segment_file import SegmentHead, SegmentWriter
from agent.serve.dra_plugin.instance_locks import LeaderElection, SerializeLock
from agent.serve.sockets import UnixListener
from agent.sources.declaration_file import read_declarations
from agent.store.driver_files import TAINTS_FILE, load_taints, save_ledger, save_taints
from agent.store.gpu_fault_file import save_gpu_faults
from agent.store.history_file import HistoryFile, write_period_file
from agent.system import files
from agent.system.files import CheckedDirectory, DirectoryLock, UnsafeDirectory, read_bounded

HISTORY = "history.sqlite"


def hold_serialize_lock(directory: Path) -> None:
    with SerializeLock(directory).hold(time.monotonic()):
        pass


def make_segment(directory: Path) -> None:
    state = EngineState(EngineSettings("node-a"))
    SegmentWriter(directory / "record-00000001.drahrec", SegmentHead("", "node-a", ""), state).close()


def write_history(directory: Path) -> None:
    HistoryFile(directory / HISTORY, UsageHistoryLimits()).write_uses((), (), 1.0, delete_by_age=False)


USES: dict[str, Callable[[Path], object]] = {
    "lock of the directory": lambda directory: DirectoryLock(directory).close(),
    "socket": lambda directory: UnixListener(directory / "a.sock").close(),
    "instance of a driver": lambda directory: LeaderElection(directory).leave(),
    "serialized prepares": hold_serialize_lock,
    "GPU faults": lambda directory: save_gpu_faults(directory / "gpu-faults.json", PersistentState()),
    "prepares": lambda directory: save_ledger(directory, "gpu.example.com", "1", PrepareLedger(), 1.0),
    "taints": lambda directory: save_taints(directory / TAINTS_FILE, Taints()),
    "history": write_history,
    "period": lambda directory: write_period_file(
        directory / "period", ObservedPeriod("p", "b", 0.0, 1.0, 2.0)
    ),
    "segment": make_segment,
    "declarations": lambda directory: read_declarations(directory, (), "node-a"),
}


@pytest.fixture(params=USES, ids=lambda name: name.replace(" ", "-"))
def use(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return USES[request.param]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir(0o755)
    return tmp_path / "run"


@contextmanager
def replaced_after_check(directory: Path, target: Path) -> Iterator[None]:
    """Replace a directory by a link to another one in the moment after its check."""
    with pytest.MonkeyPatch.context() as patch:
        check = files._check_open_directory

        def replace(path: Path, found: os.stat_result) -> None:
            check(path, found)
            patch.undo()
            directory.rename(directory.with_name("moved"))
            directory.symlink_to(target)

        patch.setattr(files, "_check_open_directory", replace)
        yield


def test_directory_that_all_may_write_is_refused(directory: Path, use: Callable[[Path], object]) -> None:
    directory.chmod(0o777)
    why = f"directory {directory}:? (not read: )?has mode 0777: all users may write to it; run chmod o-w"
    with pytest.raises((OSError, DrahealthError), match=why):
        use(directory)
    assert list(directory.iterdir()) == []


def test_directory_replaced_after_its_check_is_not_used(
    directory: Path, use: Callable[[Path], object]
) -> None:
    """A socket is bound in the other directory, but no client can connect to it."""
    elsewhere = directory.with_name("elsewhere")
    elsewhere.mkdir()
    with (
        replaced_after_check(directory, elsewhere),
        suppress(OSError, DrahealthError),
    ):
        use(directory)
    assert directory.is_symlink()
    for path in elsewhere.iterdir():
        with socket.socket(socket.AF_UNIX) as client:
            assert client.connect_ex(str(path)) == ECONNREFUSED


def test_socket_in_a_directory_replaced_after_its_check_is_refused(directory: Path) -> None:
    elsewhere = directory.with_name("elsewhere")
    elsewhere.mkdir()
    with (
        replaced_after_check(directory, elsewhere),
        pytest.raises(DrahealthError, match=r"a\.sock: cannot be created: the directory was replaced by"),
    ):
        UnixListener(directory / "a.sock")


def test_history_in_a_directory_replaced_after_its_check_is_refused(directory: Path) -> None:
    elsewhere = directory.with_name("elsewhere")
    elsewhere.mkdir()
    write_history(elsewhere)
    before = (elsewhere / HISTORY).read_bytes()
    with (
        replaced_after_check(directory, elsewhere),
        pytest.raises(DrahealthError, match=r"history\.sqlite: was replaced by another process"),
    ):
        write_history(directory)
    assert (elsewhere / HISTORY).read_bytes() == before


def test_link_in_place_of_a_file_is_refused_and_named(directory: Path) -> None:
    (directory / "file").symlink_to(directory / "elsewhere")
    with CheckedDirectory(directory) as checked, pytest.raises(OSError, match="run/file") as caught:
        checked.open("file", os.O_WRONLY | os.O_CREAT)
    assert files.open_error_reason(caught.value) == "is a symbolic link"
    assert not (directory / "elsewhere").exists()


def test_own_file_that_is_a_link_is_not_read(directory: Path) -> None:
    (directory / "file").write_text("text")
    (directory / "link").symlink_to("file")
    assert read_bounded(directory / "link", 10).data == b"text"
    assert read_bounded(directory / "file", 10, is_own=True).data == b"text"
    with pytest.raises(files.ReadError, match="run/link: is a symbolic link"):
        read_bounded(directory / "link", 10, is_own=True)


def test_state_in_a_world_writable_directory_is_not_used(directory: Path) -> None:
    save_taints(directory / TAINTS_FILE, Taints())
    before = {path: path.read_bytes() for path in directory.iterdir()}
    directory.chmod(0o777)
    taints, problem = load_taints(directory / TAINTS_FILE)
    assert (taints, problem.endswith("run chmod o-w on it; neither read nor replaced")) == (Taints(), True)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_links_of_this_user_to_a_directory_are_followed(directory: Path) -> None:
    (directory / "deep").mkdir()
    (directory / "relative").symlink_to("deep")
    (directory / "absolute").symlink_to(directory / "relative")
    with CheckedDirectory(directory / "absolute") as checked:
        assert os.path.samestat(os.fstat(checked.fd), (directory / "deep").stat())
    with pytest.raises(UnsafeDirectory, match="is a symbolic link; remove it"):
        CheckedDirectory(directory / "absolute", accepts_link=False)


def test_circle_of_links_is_refused(directory: Path) -> None:
    (directory / "a").symlink_to("b")
    (directory / "b").symlink_to("a")
    with pytest.raises(OSError, match="directory"):
        CheckedDirectory(directory / "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a link to another user")
def test_link_of_another_user_behind_our_own_is_refused(directory: Path) -> None:
    (directory / "deep").mkdir()
    (directory / "foreign").symlink_to("deep")
    os.chown(directory / "foreign", OTHER_USER, -1, follow_symlinks=False)
    (directory / "ours").symlink_to("foreign")
    with pytest.raises(UnsafeDirectory, match=f"belongs to uid {OTHER_USER}"):
        CheckedDirectory(directory / "ours")
