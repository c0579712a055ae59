"""Turns: one call of the driver's at a time, in the order of the asking, across instances."""

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE_S
from wire.serving import eventually

from agent.prepare.errors import TransientError
from agent.serve.dra_plugin.serialize_lock import FILE, SerializeLock


def soon(timeout_s: float = PATIENCE_S) -> float:
    """A time to wait until."""
    return time.monotonic() + timeout_s


@pytest.fixture
def serial(tmp_path: Path) -> SerializeLock:
    return SerializeLock(tmp_path)


def test_turns_come_in_the_order_of_the_asking(serial: SerializeLock) -> None:
    came: list[int] = []

    def ask(number: int) -> None:
        with serial.hold(soon()):
            came.append(number)

    with ThreadPoolExecutor(20) as pool, serial.hold(soon()):
        for number in range(20):
            pool.submit(ask, number)
            eventually(lambda: len(serial._line) == number + 2, "it waits")  # noqa: B023
        assert came == []
    assert came == list(range(20))


def test_no_two_have_the_turn_at_once(tmp_path: Path) -> None:
    """Threads of two instances."""
    instances = [SerializeLock(tmp_path), SerializeLock(tmp_path)]
    inside = threading.Semaphore(1)

    def ask(serial: SerializeLock) -> bool:
        with serial.hold(soon()):
            alone = inside.acquire(blocking=False)
            time.sleep(0)
            inside.release()
            return alone

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, instances * 20))


def test_who_waits_in_vain_gives_up_its_place_and_nobody_elses(serial: SerializeLock) -> None:
    def ask(until_s: float) -> str:
        with serial.hold(until_s):
            return "came"

    with ThreadPoolExecutor(2) as pool:
        with serial.hold(soon()):
            patient: Future[str] = pool.submit(ask, soon())
            eventually(lambda: len(serial._line) == 2, "it waits")
            with pytest.raises(TransientError, match="what came before it was not done in time") as raised:
                ask(soon(0.05))
            assert raised.value.code == "deadline"
        assert patient.result(PATIENCE_S) == "came"


def test_a_turn_that_is_free_comes_even_when_the_time_is_over(serial: SerializeLock) -> None:
    with serial.hold(until_s=0):
        pass


def test_a_wait_longer_than_any_clock_counts_takes_nobodys_turn(serial: SerializeLock) -> None:
    """``grpc-timeout: 99999999H``."""

    def ask() -> str:
        with serial.hold(soon(99_999_999 * 3600.0)):
            return "came"

    with ThreadPoolExecutor(1) as pool:
        with serial.hold(soon()):
            patient: Future[str] = pool.submit(ask)
            eventually(lambda: len(serial._line) == 2, "it waits")
        assert patient.result(PATIENCE_S) == "came"
    with serial.hold(soon(0.05)):
        pass


def test_a_child_that_is_forked_in_a_turn_does_not_keep_it(serial: SerializeLock) -> None:
    """It has the same lock, by the same open file."""
    with serial.hold(soon()):
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.pause()
    try:
        with serial.hold(soon(0.05)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_another_instance_has_the_turn_and_then_lets_it_go(tmp_path: Path) -> None:
    ours, theirs = SerializeLock(tmp_path), SerializeLock(tmp_path)
    with theirs.hold(soon()):
        with (
            pytest.raises(
                TransientError, match=r"another instance of the driver holds serialize\.lock"
            ) as raised,
            ours.hold(soon(0.05)),
        ):
            pass
        assert raised.value.code == "lock.timeout"
    with ours.hold(soon()):
        pass


def test_a_lock_file_that_cannot_be_made_leaves_the_turn_free(serial: SerializeLock, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(IsADirectoryError), serial.hold(soon()):
        pass
    (tmp_path / FILE).rmdir()
    with serial.hold(soon()):
        pass


def test_a_lock_file_that_was_removed_is_made_again(serial: SerializeLock, tmp_path: Path) -> None:
    for _ in range(2):
        with serial.hold(soon()):
            (tmp_path / FILE).unlink()


def test_whatever_is_raised_in_a_turn_ends_it(serial: SerializeLock) -> None:
    with pytest.raises(StopIteration), serial.hold(soon()):
        raise StopIteration
    with serial.hold(soon()):
        pass
