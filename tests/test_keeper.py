"""The fault memory on its way to the disk: real files, and a clock that jumps."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.lowlevel import Task
from trio.testing import MockClock

from agent.model.faults import FaultMemory, KnownGpu
from agent.store.fault_checkpoint import FaultCheckpointWriter
from agent.store.faults import load

ONE = FaultMemory((KnownGpu(0, "GPU-0", "0000:1b:00.0", "H100"),))
TWO = FaultMemory((*ONE.gpus, KnownGpu(1, "GPU-1", "0000:43:00.0", "H100")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "gpu-faults.json"


class Steps(trio.abc.Instrument):
    """Counts how often anything ran."""

    def __init__(self) -> None:
        self.taken = 0

    def before_task_step(self, task: Task) -> None:
        self.taken += task.name.endswith("FaultCheckpointWriter.run")


async def until(claim: Callable[[], object]) -> None:
    """Lets the clock jump until it is true; threads take no part in the clock."""
    while not claim():  # noqa: ASYNC110
        await trio.sleep(1)


async def test_what_is_taken_is_written(path: Path, autojump_clock: MockClock) -> None:
    keeper = FaultCheckpointWriter(path, FaultMemory())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        keeper.update(ONE)
        await until(lambda: load(path).memory == ONE)
        nursery.cancel_scope.cancel()


async def test_while_there_is_nothing_new_nobody_is_woken(path: Path, autojump_clock: MockClock) -> None:
    steps = Steps()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(FaultCheckpointWriter(path, ONE).run)
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(24 * 3600)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    assert steps.taken == 1


async def test_a_directory_that_cannot_be_made_is_told_of_once_and_tried_again(
    path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("in the way")
    keeper = FaultCheckpointWriter(path, FaultMemory())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        for memory in (ONE, TWO) * 10:  # of other sizes, which the text names
            keeper.update(memory)
            await trio.sleep(100)
        await until(lambda: caplog.records)
        path.parent.unlink()
        await until(lambda: load(path).memory == TWO)
        nursery.cancel_scope.cancel()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{path}: " in caplog.text


def test_what_came_last_is_written_at_the_end(path: Path) -> None:
    keeper = FaultCheckpointWriter(path, FaultMemory())
    keeper.update(ONE)
    assert keeper.close(10)
    assert load(path).memory == ONE


def test_a_memory_that_is_kept_is_not_written_again(path: Path) -> None:
    assert FaultCheckpointWriter(path, ONE).close(10)
    assert not path.exists()


def test_the_end_does_not_wait_for_a_disk_that_hangs(path: Path) -> None:
    path.parent.mkdir()
    hanging = path.with_name(f"{path.name}.new")
    os.mkfifo(hanging)  # whose opening waits for a reader
    keeper = FaultCheckpointWriter(path, FaultMemory())
    keeper.update(ONE)
    assert not keeper.close(0.05)
    os.close(os.open(hanging, os.O_RDONLY | os.O_NONBLOCK))


def test_two_writes_are_one_after_the_other_and_the_newest_is_the_last(path: Path) -> None:
    path.parent.mkdir()
    hanging = path.with_name(f"{path.name}.new")
    os.mkfifo(hanging)
    keeper = FaultCheckpointWriter(path, FaultMemory())
    keeper.update(ONE)
    assert not keeper.close(0.05)
    keeper.update(TWO)
    assert not keeper.close(0.05)
    reader = os.open(hanging, os.O_RDONLY | os.O_NONBLOCK)  # the first goes on: a FIFO cannot be synced
    assert keeper.close(10)
    os.close(reader)
    assert load(path).memory == TWO
