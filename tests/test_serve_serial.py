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
from agent.serve.dra_plugin.serialize_lock import FILE, Serial


def soon(timeout_s: float = PATIENCE_S) -> float:
    """A time to wait until."""
    return time.monotonic() + timeout_s


@pytest.fixture
def serial(tmp_path: Path) -> Serial:
    return Serial(tmp_path)


def test_turns_come_in_the_order_of_the_asking(serial: Serial) -> None:
    came: list[int] = []

    def ask(number: int) -> None:
        with serial.turn(soon()):
            came.append(number)

    with ThreadPoolExecutor(20) as pool, serial.turn(soon()):
        for number in range(20):
            pool.submit(ask, number)
            eventually(lambda: len(serial._line) == number + 2, "it waits")  # noqa: B023
        assert came == []
    assert came == list(range(20))


def test_no_two_have_the_turn_at_once(tmp_path: Path) -> None:
    """Threads of two instances."""
    instances = [Serial(tmp_path), Serial(tmp_path)]
    inside = threading.Semaphore(1)

    def ask(serial: Serial) -> bool:
        with serial.turn(soon()):
            alone = inside.acquire(blocking=False)
            time.sleep(0)
            inside.release()
            return alone

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, instances * 20))


def test_who_waits_in_vain_gives_up_its_place_and_nobody_elses(serial: Serial) -> None:
    def ask(until_s: float) -> str:
        with serial.turn(until_s):
            return "came"

    with ThreadPoolExecutor(2) as pool:
        with serial.turn(soon()):
            patient: Future[str] = pool.submit(ask, soon())
            eventually(lambda: len(serial._line) == 2, "it waits")
            with pytest.raises(TransientError, match="what came before it was not done in time") as raised:
                ask(soon(0.05))
            assert raised.value.code == "deadline"
        assert patient.result(PATIENCE_S) == "came"


def test_a_turn_that_is_free_comes_even_when_the_time_is_over(serial: Serial) -> None:
    with serial.turn(until_s=0):
        pass


def test_a_wait_longer_than_any_clock_counts_takes_nobodys_turn(serial: Serial) -> None:
    """``grpc-timeout: 99999999H``."""

    def ask() -> str:
        with serial.turn(soon(99_999_999 * 3600.0)):
            return "came"

    with ThreadPoolExecutor(1) as pool:
        with serial.turn(soon()):
            patient: Future[str] = pool.submit(ask)
            eventually(lambda: len(serial._line) == 2, "it waits")
        assert patient.result(PATIENCE_S) == "came"
    with serial.turn(soon(0.05)):
        pass


def test_a_child_that_is_forked_in_a_turn_does_not_keep_it(serial: Serial) -> None:
    """It has the same lock, by the same open file."""
    with serial.turn(soon()):
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.pause()
    try:
        with serial.turn(soon(0.05)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_another_instance_has_the_turn_and_then_lets_it_go(tmp_path: Path) -> None:
    ours, theirs = Serial(tmp_path), Serial(tmp_path)
    with theirs.turn(soon()):
        with (
            pytest.raises(
                TransientError, match=r"another instance of the driver holds serialize\.lock"
            ) as raised,
            ours.turn(soon(0.05)),
        ):
            pass
        assert raised.value.code == "lock.timeout"
    with ours.turn(soon()):
        pass


def test_a_lock_file_that_cannot_be_made_leaves_the_turn_free(serial: Serial, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(IsADirectoryError), serial.turn(soon()):
        pass
    (tmp_path / FILE).rmdir()
    with serial.turn(soon()):
        pass


def test_a_lock_file_that_was_removed_is_made_again(serial: Serial, tmp_path: Path) -> None:
    for _ in range(2):
        with serial.turn(soon()):
            (tmp_path / FILE).unlink()


def test_whatever_is_raised_in_a_turn_ends_it(serial: Serial) -> None:
    with pytest.raises(StopIteration), serial.turn(soon()):
        raise StopIteration
    with serial.turn(soon()):
        pass
