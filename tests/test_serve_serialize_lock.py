"""Lock that serializes the driver's calls across threads and instances."""

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
from agent.serve.dra_plugin.instance_locks import FILE, SerializeLock


def deadline(timeout_s: float = PATIENCE_S) -> float:
    """Return a time until which to wait."""
    return time.monotonic() + timeout_s


@pytest.fixture
def lock(tmp_path: Path) -> SerializeLock:
    return SerializeLock(tmp_path)


def test_waiters_get_the_lock_in_order(lock: SerializeLock) -> None:
    acquired: list[int] = []

    def acquire(number: int) -> None:
        with lock.hold(deadline()):
            acquired.append(number)

    with ThreadPoolExecutor(20) as pool, lock.hold(deadline()):
        for number in range(20):
            pool.submit(acquire, number)
            eventually(lambda: len(lock._waiters) == number + 2, "the thread waits")  # noqa: B023
        assert acquired == []
    assert acquired == list(range(20))


def test_threads_of_two_instances_never_hold_the_lock_together(tmp_path: Path) -> None:
    instances = [SerializeLock(tmp_path), SerializeLock(tmp_path)]
    inside = threading.Semaphore(1)

    def acquire(lock: SerializeLock) -> bool:
        with lock.hold(deadline()):
            exclusive = inside.acquire(blocking=False)
            time.sleep(0)
            inside.release()
            return exclusive

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(acquire, instances * 20))


def test_timed_out_waiter_leaves_other_waiters_in_place(lock: SerializeLock) -> None:
    def acquire(until_s: float) -> str:
        with lock.hold(until_s):
            return "acquired"

    with ThreadPoolExecutor(2) as pool:
        with lock.hold(deadline()):
            waiting: Future[str] = pool.submit(acquire, deadline())
            eventually(lambda: len(lock._waiters) == 2, "the thread waits")
            with pytest.raises(
                TransientError, match="earlier prepares or unprepares of this driver still hang"
            ) as raised:
                acquire(deadline(0.05))
            assert raised.value.code == "deadline"
        assert waiting.result(PATIENCE_S) == "acquired"


def test_free_lock_is_acquired_after_the_deadline(lock: SerializeLock) -> None:
    with lock.hold(until_s=0):
        pass


def test_timeout_beyond_clock_range_waits_for_the_lock(lock: SerializeLock) -> None:
    """``grpc-timeout: 99999999H``."""

    def acquire() -> str:
        with lock.hold(deadline(99_999_999 * 3600.0)):
            return "acquired"

    with ThreadPoolExecutor(1) as pool:
        with lock.hold(deadline()):
            waiting: Future[str] = pool.submit(acquire)
            eventually(lambda: len(lock._waiters) == 2, "the thread waits")
        assert waiting.result(PATIENCE_S) == "acquired"
    with lock.hold(deadline(0.05)):
        pass


def test_child_forked_while_locked_does_not_keep_the_lock(lock: SerializeLock) -> None:
    """The child has the same lock through the same open file."""
    with lock.hold(deadline()):
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.pause()
    try:
        with lock.hold(deadline(0.05)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lock_of_another_instance_times_out_until_released(tmp_path: Path) -> None:
    ours, other = SerializeLock(tmp_path), SerializeLock(tmp_path)
    with other.hold(deadline()):
        with (
            pytest.raises(
                TransientError,
                match=r"serialize\.lock: another instance of the driver did not release this lock",
            ) as raised,
            ours.hold(deadline(0.05)),
        ):
            pass
        assert raised.value.code == "lock.timeout"
    with ours.hold(deadline()):
        pass


def test_failed_lock_file_leaves_the_lock_free(lock: SerializeLock, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(IsADirectoryError), lock.hold(deadline()):
        pass
    (tmp_path / FILE).rmdir()
    with lock.hold(deadline()):
        pass


def test_removed_lock_file_is_created_again(lock: SerializeLock, tmp_path: Path) -> None:
    for _ in range(2):
        with lock.hold(deadline()):
            (tmp_path / FILE).unlink()


def test_exception_while_locked_releases_the_lock(lock: SerializeLock) -> None:
    with pytest.raises(StopIteration), lock.hold(deadline()):
        raise StopIteration
    with lock.hold(deadline()):
        pass
