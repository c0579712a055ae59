"""Background writer of GPU faults: real files, and a mock clock."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from held_lock import held_lock
from patience import PATIENCE_S
from trio.lowlevel import Task
from trio.testing import MockClock

from agent.model.persistent_faults import KnownGpu, PersistentState
from agent.store.gpu_fault_file import GpuFaultWriter, load_gpu_faults, save_gpu_faults

ONE = PersistentState((KnownGpu(0, "GPU-0", "0000:1b:00.0", "H100"),))
TWO = PersistentState((*ONE.gpus, KnownGpu(1, "GPU-1", "0000:43:00.0", "H100")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "gpu-faults.json"


class Steps(trio.abc.Instrument):
    """Counter of task steps."""

    def __init__(self) -> None:
        self.taken = 0

    def before_task_step(self, task: Task) -> None:
        self.taken += task.name.endswith("GpuFaultWriter.run")


async def until(condition: Callable[[], object]) -> None:
    """Advance the mock clock until the condition holds; threads run in real time."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(1)


async def test_updated_faults_are_written(path: Path, autojump_clock: MockClock) -> None:
    writer = GpuFaultWriter(path, PersistentState())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        writer.set_newest(ONE)
        await until(lambda: load_gpu_faults(path)[0] == ONE)
        nursery.cancel_scope.cancel()


async def test_writer_without_changes_does_not_wake(path: Path, autojump_clock: MockClock) -> None:
    steps = Steps()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GpuFaultWriter(path, ONE).run)
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(24 * 3600)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    assert steps.taken == 1


async def test_unusable_directory_is_logged_once_and_retried(
    path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    def records() -> list[logging.LogRecord]:
        """Return the log records of this file; a write of an earlier test may end meanwhile."""
        return [record for record in caplog.records if f"{path}: " in record.getMessage()]

    path.parent.write_text("in the way")
    writer = GpuFaultWriter(path, PersistentState())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for memory in (ONE, TWO) * 10:  # other sizes appear in the error text
            writer.set_newest(memory)
            await trio.sleep(100)
        await until(records)
        assert writer.error.startswith(f"{path}: ")
        path.parent.unlink()
        await until(lambda: load_gpu_faults(path)[0] == TWO)
        await until(lambda: not writer.error)
        nursery.cancel_scope.cancel()
    assert [record.levelno for record in records()] == [logging.WARNING]


async def test_faults_that_change_back_during_a_write_are_written_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def save_slowly(path: Path, memory: PersistentState) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        save_gpu_faults(path, memory)

    save_gpu_faults(path, ONE)
    monkeypatch.setattr("agent.store.gpu_fault_file.save_gpu_faults", save_slowly)
    monkeypatch.setattr("agent.store.gpu_fault_file.COUNTS_INTERVAL_S", 100 * PATIENCE_S)
    writer = GpuFaultWriter(path, ONE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        writer.set_newest(TWO)
        with trio.fail_after(PATIENCE_S):
            await until_in_real_time(begun.is_set)
            writer.set_newest(ONE)
            begun.clear()
            goes_on.set()
            await until_in_real_time(begun.is_set)
            await until_in_real_time(lambda: load_gpu_faults(path)[0] == ONE)
        nursery.cancel_scope.cancel()


async def until_in_real_time(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, without a mock clock."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.01)


async def test_start_of_a_later_instance_is_not_uncounted(path: Path, autojump_clock: MockClock) -> None:
    """Two instances of a driver in a rolling update have the same file."""
    old, new = GpuFaultWriter(path, PersistentState()), GpuFaultWriter(path, PersistentState())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(old.run)
        nursery.start_soon(new.run)
        old.set_newest(replace(ONE, runs=1))
        await until(lambda: load_gpu_faults(path)[0].runs == 1)
        new.set_newest(replace(ONE, runs=2))
        await until(lambda: load_gpu_faults(path)[0].runs == 2)
        old.set_newest(replace(TWO, runs=1))
        await until(lambda: load_gpu_faults(path)[0] == replace(TWO, runs=2))
        nursery.cancel_scope.cancel()


def test_last_update_is_written_at_close(path: Path) -> None:
    writer = GpuFaultWriter(path, PersistentState())
    writer.set_newest(ONE)
    assert writer.close(PATIENCE_S)
    assert load_gpu_faults(path)[0] == ONE


def test_saved_faults_are_not_written_again(path: Path) -> None:
    assert GpuFaultWriter(path, ONE).close(PATIENCE_S)
    assert not path.exists()


def test_close_does_not_wait_for_hung_disk(path: Path) -> None:
    path.parent.mkdir()
    writer = GpuFaultWriter(path, PersistentState())
    with held_lock(path.with_name(f"{path.name}.new")):
        writer.set_newest(ONE)
        assert not writer.close(0.05)
    assert writer.close(PATIENCE_S)


def test_writes_are_serialized_and_the_newest_is_last(path: Path) -> None:
    path.parent.mkdir()
    writer = GpuFaultWriter(path, PersistentState())
    with held_lock(path.with_name(f"{path.name}.new")):
        writer.set_newest(ONE)
        assert not writer.close(0.05)
        writer.set_newest(TWO)
        assert not writer.close(0.05)
    assert writer.close(PATIENCE_S)
    assert load_gpu_faults(path)[0] == TWO
