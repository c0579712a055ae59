"""Watcher of declarations: on real files and the kernel's inotify, without deadlines."""

# ruff: noqa: ASYNC240 - test files do not block

import errno
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
import trio
from hung_file import hung_file
from patience import PATIENCE_S
from running_watchers import RunningWatcher, until
from trio.lowlevel import Task
from trio.testing import MockClock

from agent.errors import ProbeError
from agent.model.reading import SourceState
from agent.native.kernel_events import watch_directory
from agent.node import declaration_watcher
from agent.node.declaration_watcher import MAX_DUTY_CYCLE, POLL_S, DeclarationWatcher
from agent.system.files import CheckedDirectory

DRIVER: Final = "gpu.example.com"
NODE: Final = "node-7"


def text(*names: str) -> str:
    devices = (f'[[device]]\nname = "{name}"\nkind = "memory"\nnuma = 0\n' for name in names)
    return "version = 1\n" + "".join(devices)


def write(directory: Path, content: str, driver: str = DRIVER) -> None:
    """Write a declaration as a driver should: under another name first."""
    new = directory / f".{driver}.toml"
    new.write_text(content)
    new.chmod(0o644)
    new.rename(directory / f"{driver}.toml")


def switch(link: Path, target: str) -> None:
    """Replace a symbolic link atomically."""
    (link.parent / target).touch()
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


class Follower(RunningWatcher):
    """Running watcher with a count of its wakes."""

    def __init__(self, runtime_dir: Path, watch: Callable[[Path], int] = watch_directory) -> None:
        self.watch = DeclarationWatcher(runtime_dir, NODE, watch)

    @property
    def names(self) -> list[str]:
        return [device.name for file in self.watch.declarations for device in file.devices]

    @property
    def state(self) -> SourceState:
        return self.watch.source.state


async def jump_until(condition: Callable[[], object]) -> None:
    """Advance the mock clock; threads run in real time, to which the limit applies."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await trio.sleep(1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "devices.d"


async def test_directory_is_created_and_new_files_are_read(tmp_path: Path, directory: Path) -> None:
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.state is SourceState.OK)
        assert follower.wakes == 1  # the first read wakes the core even without declarations
        write(directory, text("a", "b"))
        await until(lambda: follower.names == ["a", "b"])
        assert follower.wakes == 2


async def test_files_present_at_start_are_read(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.names == ["a"])


async def test_changed_and_removed_files_are_followed(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.names == ["a"])
        write(directory, text("a", "b"))
        await until(lambda: follower.names == ["a", "b"])
        (directory / f"{DRIVER}.toml").write_text(
            text("c")
        )  # written in place, which is discouraged but works
        await until(lambda: follower.names == ["c"])
        (directory / f"{DRIVER}.toml").unlink()
        await until(lambda: follower.watch.declarations == ())


async def test_invalid_file_is_reported_and_keeps_devices(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.names == ["a"])
        write(directory, "version = 2")
        await until(lambda: follower.watch.declarations[0].error)
        write(directory, text("z"), "z.example.com")
        await until(lambda: follower.names == ["a", "z"])
    problem = "file format version 2 is not supported; write version = 1"
    wrong = f"declaration file {directory}/{DRIVER}.toml: {problem}"
    assert [file.error for file in follower.watch.declarations] == [wrong, ""]


async def test_removed_directory_is_created_again(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.names == ["a"])
        (directory / f"{DRIVER}.toml").unlink()
        directory.rmdir()
        await until(lambda: directory.is_dir() and follower.watch.declarations == ())
        write(directory, text("b"))
        await until(lambda: follower.names == ["b"])


async def test_replaced_directory_is_followed(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.names == ["a"])
        (tmp_path / "other").mkdir()
        write(tmp_path / "other", text("b"))
        directory.rename(tmp_path / "before")
        (tmp_path / "other").rename(directory)
        await until(lambda: follower.names == ["b"])
        write(directory, text("c"))
        await until(lambda: follower.names == ["c"])


async def test_directory_created_again_with_the_same_inode_is_followed(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 and XFS give a new directory the inode of one that was just removed."""

    def reused_id(path: Path) -> tuple[int, int]:
        path.stat()
        return 1, 1

    monkeypatch.setattr(declaration_watcher, "_directory_id", reused_id)
    directory.mkdir()
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.names == ["a"])
        shutil.rmtree(directory)
        directory.mkdir(exist_ok=True)  # the watcher may have created it
        write(directory, text("b"))
        await until(lambda: follower.names == ["b"])
        write(directory, text("c"))
        await until(lambda: follower.names == ["c"])


class Steps(trio.abc.Instrument):
    """Counter of the watcher's task steps."""

    def __init__(self) -> None:
        self.taken = 0

    def before_task_step(self, task: Task) -> None:
        self.taken += task.name.endswith("DeclarationWatcher.run")


async def test_unchanged_declarations_do_not_wake_the_core(
    tmp_path: Path, directory: Path, autojump_clock: MockClock
) -> None:
    directory.mkdir()
    write(directory, text("a"))
    follower, steps = Follower(tmp_path), Steps()
    async with follower.run_watch():
        await jump_until(lambda: follower.names == ["a"])
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(24 * 3600)
        trio.lowlevel.remove_instrument(steps)
    assert steps.taken == 0


async def test_directory_without_inotify_is_polled_every_ten_seconds(
    tmp_path: Path, directory: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> int:
        raise ProbeError(f"{path}: {os.strerror(errno.EMFILE)}")

    follower = Follower(tmp_path, refuse)
    with caplog.at_level(logging.WARNING):
        async with follower.run_watch():
            await jump_until(directory.is_dir)
            write(directory, text("a"))
            await jump_until(lambda: follower.names == ["a"])
            await trio.sleep(3600)
    detail = f"{directory}: Too many open files; polled every 10 s"
    own = [record for record in caplog.records if record.name == DeclarationWatcher.__module__]
    assert [record.message for record in own] == [
        f"declaration directory: cannot be watched for changes: {detail}"
    ]
    assert (follower.state, follower.watch.source.detail) == (SourceState.OK, detail)


async def test_directory_behind_symbolic_link_is_polled(
    tmp_path: Path, directory: Path, autojump_clock: MockClock
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, text(name))
    directory.symlink_to("a")
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await jump_until(lambda: follower.names == ["a"])
        switch(directory, "b")
        await jump_until(lambda: follower.names == ["b"])
    assert follower.watch.source.detail == f"{directory} is a symbolic link; polled every 10 s"


async def test_unreadable_directory_keeps_last_declarations(
    tmp_path: Path, directory: Path, autojump_clock: MockClock
) -> None:
    (tmp_path / "real").mkdir()
    directory.symlink_to("real")
    write(directory, text("a"))
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await jump_until(lambda: follower.names == ["a"])
        switch(directory, "real/.file")
        while "Not a directory" not in follower.watch.source.detail:
            write(tmp_path / "real", text("b"))
            await trio.sleep(1)
        assert follower.names == ["a"]
        assert follower.state is SourceState.FAILING
        switch(directory, "real")
        await jump_until(lambda: follower.names == ["b"])


@pytest.mark.parametrize("of", ["directory", "file"])
async def test_read_error_is_retried_without_a_change(
    of: str, tmp_path: Path, directory: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    write(directory, text("a"))
    failed_s: list[float] = []
    method = "names" if of == "directory" else "open"
    working = getattr(CheckedDirectory, method)

    def fail_twice(*arguments: object) -> object:
        if len(failed_s) < 2:
            failed_s.append(autojump_clock.current_time())
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return working(*arguments)

    monkeypatch.setattr(CheckedDirectory, method, fail_twice)
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await jump_until(lambda: follower.names == ["a"])
    assert failed_s[1] - failed_s[0] >= POLL_S
    assert follower.watch.source.detail == ""
    assert follower.watch.declarations[0].error == ""


async def test_invalid_file_is_not_read_again_without_a_change(
    tmp_path: Path, directory: Path, autojump_clock: MockClock
) -> None:
    directory.mkdir()
    write(directory, "version = 2")
    (directory / "b.example.com.toml").symlink_to("/nowhere")
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await jump_until(lambda: follower.wakes == 1)
        await trio.sleep(3600)
        assert follower.watch.source.passes == 1


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("strict_umask")
async def test_created_directory_has_the_documented_mode_whatever_the_umask(
    tmp_path: Path, directory: Path
) -> None:
    follower = Follower(tmp_path)
    async with follower.run_watch():
        await until(lambda: follower.state is SourceState.OK)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755


async def test_missing_runtime_directory_is_not_created(tmp_path: Path, autojump_clock: MockClock) -> None:
    follower = Follower(tmp_path / "runtime")
    async with follower.run_watch():
        await jump_until(lambda: follower.state is SourceState.OK)
    assert follower.watch.source.detail.endswith("No such file or directory; polled every 10 s")
    assert not (tmp_path / "runtime").exists()


# --- a file that hangs -------------------------------------------------------------------------------------


class Hung:
    """Directory with a file whose readers hang until released."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / f"{DRIVER}.toml"
        self._held = threading.Event()

    def let_go(self) -> None:
        self._held.set()

    @contextmanager
    def hang_readers(self) -> Iterator[threading.Event]:
        """Yield an event that is set once a reader hangs."""
        self._file.touch(0o644)
        with ExitStack() as stack:
            try:
                is_read = stack.enter_context(hung_file(self._file, self._held.is_set))
            except OSError as error:
                pytest.skip(f"no FUSE, or nothing may be mounted: {error}")
            yield is_read


async def test_source_before_first_read_is_starting(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    follower, hung = Follower(tmp_path), Hung(directory)
    with hung.hang_readers():
        async with follower.run_watch():
            write(directory, text("z"), "z.example.com")
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert (follower.state, follower.wakes) == (SourceState.STARTING, 0)
            hung.let_go()
            await until(lambda: follower.state is SourceState.OK)
            await until(lambda: follower.names == ["z"])


async def test_hung_read_does_not_delay_shutdown(tmp_path: Path, directory: Path) -> None:
    directory.mkdir()
    follower = Follower(tmp_path)
    with Hung(directory).hang_readers():
        with trio.fail_after(PATIENCE_S):
            async with follower.run_watch():
                await trio.testing.wait_all_tasks_blocked(0.1)
    assert follower.state is SourceState.STARTING


async def test_slow_read_is_followed_by_pause_of_four_times_its_duration(
    tmp_path: Path, directory: Path, mock_clock: MockClock
) -> None:
    directory.mkdir()
    follower, hung = Follower(tmp_path), Hung(directory)
    async with trio.open_nursery() as nursery:
        with hung.hang_readers() as is_read:
            nursery.start_soon(follower.watch.run, follower.wake)
            while not is_read.is_set():
                await wait_until_idle()
            mock_clock.jump(100)
            hung.let_go()
            while follower.state is not SourceState.OK:
                await wait_until_idle()
        write(directory, text("a"))
        await wait_until_idle()
        mock_clock.jump(MAX_DUTY_CYCLE * 100 - 1)
        await wait_until_idle()
        assert follower.names == []
        mock_clock.jump(1)
        while follower.names != ["a"]:
            await wait_until_idle()
        nursery.cancel_scope.cancel()


async def wait_until_idle() -> None:
    """Wait in real time until nothing happens without the clock."""
    await trio.testing.wait_all_tasks_blocked(0.1)
