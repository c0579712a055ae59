"""Taint publisher: when the driver's callback is called, with which taints, and what follows a failure."""

import logging
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import trio
import trio.testing
from patience import PATIENCE_S
from trio.testing import MockClock

from agent.devices.taints import TaintPolicy
from agent.driver.taint_callback_publisher import (
    CALL_S,
    DEBOUNCE_S,
    MIN_INTERVAL_S,
    RETRY_MAX_S,
    TaintCallback,
    TaintCallbackPublisher,
    taint_objects,
)
from agent.errors import ApiError, ConfigError
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.claim import DeviceRef
from agent.model.health import Blame, Cause, DeviceHealth, Effect, Severity, Taint, Taints
from agent.model.report import Report
from agent.model.time import NS, Instant
from agent.store.driver_files import load_taints, save_taints

DRIVER: Final = "gpu.example.com"
GPU: Final = DeviceRef(DRIVER, "node-1", "gpu-0")
BOOT_S: Final = 1_790_000_000
NEVER: Final = Instant(0, 0.0)
XID: Final = Taint(f"{DRIVER}/xid", "79", Effect.NO_SCHEDULE, BOOT_S)
OLD_XID: Final = XID._replace(added_wall_s=BOOT_S - 86_400)


def clock() -> Instant:
    return Instant(round(trio.current_time() * NS), BOOT_S + trio.current_time())


def report(*codes: str, starting: bool = False) -> Report:
    """Return a report of one device that is Unhealthy with these codes."""
    causes = tuple(Cause(code, Severity.UNHEALTHY, Blame.HARDWARE, "", "", NEVER) for code in codes)
    worst = Severity.UNHEALTHY if codes else Severity.OK
    device = DeviceHealth(
        GPU.pool,
        GPU.device,
        "gpu",
        HEALTH_OF_SEVERITY[worst],
        worst,
        "",
        NEVER,
        NEVER,
        30,
        causes,
        driver=DRIVER,
    )
    return Report("node-1", NEVER, (device,), declaring=(DRIVER,), starting=starting)


def publisher(
    callback: TaintCallback | None, *, path: Path | None = None, jitter: Callable[[], float] = lambda: 1.0
) -> TaintCallbackPublisher:
    return TaintCallbackPublisher(callback, driver=DRIVER, path=path, clock=clock, jitter=jitter)


@asynccontextmanager
async def run_publisher(taint_publisher: TaintCallbackPublisher) -> AsyncIterator[TaintCallbackPublisher]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(taint_publisher.run)
        await trio.testing.wait_all_tasks_blocked()  # it listens to other threads
        yield taint_publisher
        nursery.cancel_scope.cancel()


def keys(taints: Taints) -> list[str]:
    return [taint.key.removeprefix(f"{DRIVER}/") for taint in taints.devices.get(GPU, ())]


class Driver:
    """Driver whose callback records its calls and plays given results."""

    def __init__(self, *answers: Callable[[], Awaitable[object]]) -> None:
        self.calls: list[tuple[float, list[str]]] = []
        self._answers = list(answers)

    async def publish(self, taints: Taints) -> None:
        self.calls.append((trio.current_time(), keys(taints)))
        if self._answers:
            await self._answers.pop(0)()


def failing_callback(text: str) -> Callable[[], Awaitable[object]]:
    async def answer() -> None:
        raise RuntimeError(text)

    return answer


async def until(condition: Callable[[], object]) -> None:
    """Let the clock jump until a condition is true; threads do not follow the clock."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(1)


# --- calls ------------------------------------------------------------------------------------------------


async def test_first_call_comes_without_any_taint(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    assert driver.calls == [(DEBOUNCE_S, [])]


async def test_no_call_comes_before_a_complete_report(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79", starting=True), clock())
        await trio.sleep(1000)
    assert driver.calls == []


async def test_concurrent_changes_are_published_together(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        for codes in (["a"], ["a", "b"], ["a", "b", "c"]):
            taint_publisher.update(report(*codes), clock())
            await trio.sleep(DEBOUNCE_S / 4)
        await trio.sleep(1000)
    assert driver.calls == [(DEBOUNCE_S, ["a", "b", "c"])]


async def test_calls_are_5_s_apart_and_the_last_has_the_newest_taints(
    autojump_clock: MockClock,
) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        for number in range(100):
            taint_publisher.update(report(*(f"c{seen:02}" for seen in range(number % 10 + 1))), clock())
            await trio.sleep(0.25)
        await trio.sleep(1000)
    times = [at for at, _ in driver.calls]
    assert times[0] == DEBOUNCE_S
    assert all(later - sooner >= MIN_INTERVAL_S for sooner, later in pairwise(times))
    assert driver.calls[1][1] == [f"c{number:02}" for number in range(10)]
    # all go after their quiet time but the last report's
    assert driver.calls[-1][1] == [f"c{number:02}" for number in range(10)]
    assert keys(taint_publisher.taints) == driver.calls[-1][1]


async def test_unchanged_taints_are_not_published_again(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        for _ in range(100):
            taint_publisher.update(report("gpu.xid.79"), clock())
            await trio.sleep(10)
    assert driver.calls == [(DEBOUNCE_S, ["xid"])]


async def test_quiet_time_ends_without_a_report(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        await trio.sleep(10)
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    assert driver.calls == [(DEBOUNCE_S, ["xid"]), (70 + DEBOUNCE_S, [])]


async def test_taints_can_be_read_without_a_callback(autojump_clock: MockClock) -> None:
    async with run_publisher(publisher(None)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        assert taint_publisher.taints == Taints({GPU: (XID,)})
        taint_publisher.update(report(), clock())
        await trio.sleep(61)
        assert taint_publisher.taints == Taints({GPU: ()})


# --- calls of the callback ---------------------------------------------------------------------------------


async def test_changed_policy_applies_to_the_next_report(autojump_clock: MockClock) -> None:
    taint_publisher = publisher(None)
    async with run_publisher(taint_publisher):
        taint_publisher.update(report("gpu.xid.79"), clock())
        taint_publisher.set_policy(TaintPolicy(evict=frozenset({"gpu.xid.79"})))
        taint_publisher.update(report("gpu.xid.79"), clock())
    effects = {taint.effect for taint in taint_publisher.taints.devices[GPU]}
    assert effects == {Effect.NO_EXECUTE}


async def test_plain_callback_is_called_in_a_thread(autojump_clock: MockClock) -> None:
    calls: list[tuple[threading.Thread, Taints]] = []
    async with run_publisher(
        publisher(lambda taints: calls.append((threading.current_thread(), taints)))
    ) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        await until(lambda: calls)
    [(thread, taints)] = calls
    assert thread is not threading.current_thread()
    assert taints == taint_publisher.taints


async def test_awaitable_of_a_plain_callback_is_awaited(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(lambda taints: driver.publish(taints))) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        await until(lambda: driver.calls)


# --- failures ---------------------------------------------------------------------------------------------


async def test_failed_callback_is_retried_with_backoff_and_newest_taints(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(*[failing_callback("no API server")] * 9)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("a"), clock())
        await trio.sleep(30)
        taint_publisher.update(report("a", "b"), clock())
        await trio.sleep(1000)
    times = [at for at, _ in driver.calls]
    pauses = [later - sooner - DEBOUNCE_S for sooner, later in pairwise(times)]
    assert pauses == [1, 2, 4, 8, 16, 32, RETRY_MAX_S, RETRY_MAX_S, RETRY_MAX_S]
    assert [named for at, named in driver.calls] == [["a"]] * 5 + [["a", "b"]] * 5
    assert [
        record.levelno for record in caplog.records if record.name == "agent.driver.taint_callback_publisher"
    ] == [
        logging.WARNING  # once, since it is always the same
    ]
    assert "driver gpu.example.com: publishing taints failed: RuntimeError: no API server; will retry" in (
        caplog.text
    )


async def test_success_resets_the_backoff_and_the_log(autojump_clock: MockClock) -> None:
    fail = failing_callback("no")
    driver = Driver(fail, fail, fail, trio.lowlevel.checkpoint, fail)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(100)
        taint_publisher.update(report("a"), clock())
        await trio.sleep(100)
    assert [at for at, _ in driver.calls] == [1, 3, 6, 11, 101, 103]


async def test_retry_after_of_the_api_server_delays_the_next_call(autojump_clock: MockClock) -> None:
    async def refuse() -> None:
        raise ApiError(429, "TooManyRequests", "", retry_after_s=45)

    driver = Driver(refuse, refuse)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    asked_s = 45 + DEBOUNCE_S
    assert [at for at, _ in driver.calls] == [DEBOUNCE_S, DEBOUNCE_S + asked_s, DEBOUNCE_S + 2 * asked_s]


async def test_different_failure_is_logged_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent.driver.taint_callback_publisher")
    driver = Driver(
        failing_callback("one"), failing_callback("two"), failing_callback("two"), failing_callback("one")
    )
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    assert [record.getMessage().rpartition("failed: ")[2] for record in caplog.records] == [
        "RuntimeError: one; will retry", "RuntimeError: two; will retry", "RuntimeError: one; will retry",
        "driver gpu.example.com: taints published after earlier failures",
    ]  # fmt: skip


async def test_retry_never_comes_before_the_debounce_time(autojump_clock: MockClock) -> None:
    driver = Driver(*[failing_callback("no")] * 3)
    async with run_publisher(publisher(driver.publish, jitter=lambda: 0.0)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    assert [at for at, _ in driver.calls] == [1, 2, 3, 4]


async def test_failed_callback_is_retried_even_if_taints_are_as_before(
    autojump_clock: MockClock,
) -> None:
    driver = Driver(trio.lowlevel.checkpoint, *[failing_callback("half done")] * 6)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(10)
        taint_publisher.update(report("a"), clock())
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    assert [named for _, named in driver.calls] == [[], *[["a"]] * 6, []]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("no")])
async def test_no_exception_of_a_plain_callback_ends_the_publisher(
    error: BaseException, autojump_clock: MockClock
) -> None:
    errors = [error]
    taken: list[Taints] = []

    def callback(taints: Taints) -> None:
        if errors:
            raise errors.pop()
        taken.append(taints)

    async with run_publisher(publisher(callback)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        await until(lambda: taken)
    assert taken == [Taints({GPU: (XID,)})]


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        BaseExceptionGroup("tasks of the callback failed", [SystemExit(3)]),
        ValueError("no"),
    ],
)
async def test_no_exception_of_an_async_callback_ends_the_publisher(
    error: BaseException, autojump_clock: MockClock
) -> None:
    errors = [error]
    taken: list[Taints] = []

    async def callback(taints: Taints) -> None:
        await trio.lowlevel.checkpoint()
        if errors:
            raise errors.pop()
        taken.append(taints)

    async with run_publisher(publisher(callback)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        await until(lambda: taken)
    assert taken == [Taints({GPU: (XID,)})]


async def test_hung_async_callback_is_cancelled_and_retried(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(trio.sleep_forever)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("a"), clock())
        await trio.sleep(10)
        taint_publisher.update(report("a", "b"), clock())
        await trio.sleep(1000)
    again_s = DEBOUNCE_S + CALL_S + 1 + DEBOUNCE_S
    assert driver.calls == [(DEBOUNCE_S, ["a"]), (again_s, ["a", "b"])]
    assert (
        "publishing taints failed: TimeoutError: callback that publishes taints did not return within 60 s; "
        "will retry" in caplog.text
    )


async def test_hung_plain_callback_is_logged_and_not_called_twice(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    calls: list[list[str]] = []

    def messages() -> list[str]:
        name = "agent.driver.taint_callback_publisher"
        return [record.getMessage() for record in caplog.records if record.name == name]

    def callback(taints: Taints) -> None:
        calls.append(keys(taints))
        go_on.wait()

    async with run_publisher(publisher(callback)) as taint_publisher:
        try:
            taint_publisher.update(report("a"), clock())
            await until(lambda: messages() and calls)  # the clock does not wait for a thread to begin
            for number in range(5):
                taint_publisher.update(report("a", f"b{number}"), clock())
                await trio.sleep(1000)
            assert calls == [["a"]]
            assert messages() == [
                "driver gpu.example.com: publishing taints has not ended after 60 s; taints are not updated "
                "until it ends"
            ]
            assert keys(taint_publisher.taints) == ["a", "b4"]
        finally:
            go_on.set()
        await until(lambda: len(calls) == 2)
    assert calls[1] == ["a", "b4"]


async def test_hung_plain_callback_does_not_delay_the_shutdown(autojump_clock: MockClock) -> None:
    called, go_on, returned = (threading.Event() for _ in range(3))

    def callback(taints: Taints) -> None:
        called.set()
        go_on.wait(PATIENCE_S)
        returned.set()

    try:
        async with run_publisher(publisher(callback)) as taint_publisher:
            taint_publisher.update(report("a"), clock())
            await until(called.is_set)
        assert not returned.is_set()
    finally:
        go_on.set()


# --- prepares that wait for a taint -----------------------------------------------------------------------


async def wait_until_published(
    taint_publisher: TaintCallbackPublisher, timeout_s: float = PATIENCE_S
) -> bool:
    """Wait like a failed prepare, in a thread, until the taints of the GPU are published."""
    return await trio.to_thread.run_sync(taint_publisher.wait_published, [GPU], timeout_s)


async def test_waiting_prepare_gets_its_taint_published_at_once(mock_clock: MockClock) -> None:
    """The fake clock does not run, so no pause can have ended."""
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report(), clock())
        assert await wait_until_published(taint_publisher)
        taint_publisher.update(report("gpu.xid.79"), clock())
        assert await wait_until_published(taint_publisher)
        assert await wait_until_published(taint_publisher), "they are published"
    assert driver.calls == [(0.0, []), (0.0, ["xid"])]


async def test_failed_callback_is_repeated_once_for_each_waiting_prepare(mock_clock: MockClock) -> None:
    driver = Driver(*[failing_callback("no API server")] * 3)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        for number in range(1, 4):
            assert not await wait_until_published(taint_publisher, 0.0)
            while len(driver.calls) < number:  # a thread calls the driver
                await trio.testing.wait_all_tasks_blocked(0.001)
            await trio.testing.wait_all_tasks_blocked()
            assert driver.calls == [(0.0, ["xid"])] * number
        assert await wait_until_published(taint_publisher)
    assert len(driver.calls) == 4


async def test_waiting_prepare_does_not_shorten_a_retry_after(mock_clock: MockClock) -> None:
    async def refuse() -> None:
        raise ApiError(429, "TooManyRequests", "", retry_after_s=30)

    driver = Driver(refuse, refuse)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        for at in (0.0, 30.0):
            assert not await wait_until_published(taint_publisher, 0.0)
            await trio.testing.wait_all_tasks_blocked(0.001)
            assert driver.calls[-1] == (at, ["xid"])
            assert not await wait_until_published(taint_publisher, 0.0)
            await trio.testing.wait_all_tasks_blocked(0.001)
            mock_clock.jump(29.0)
            await trio.testing.wait_all_tasks_blocked(0.001)
            assert driver.calls[-1] == (at, ["xid"])
            mock_clock.jump(1.0)
        assert await wait_until_published(taint_publisher)
    assert driver.calls == [(at, ["xid"]) for at in (0.0, 30.0, 60.0)]


async def test_end_of_the_publisher_does_not_wait_for_a_retry_after(mock_clock: MockClock) -> None:
    """The fake clock does not run, so the publisher ends in its pause."""

    async def refuse() -> None:
        raise ApiError(429, "TooManyRequests", "", retry_after_s=30)

    driver = Driver(refuse)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        assert not await wait_until_published(taint_publisher, 0.0)
        await trio.testing.wait_all_tasks_blocked(0.001)
    assert driver.calls == [(0.0, ["xid"])]


async def test_hung_callback_ends_the_wait_at_its_limit(mock_clock: MockClock) -> None:
    driver = Driver(trio.sleep_forever)
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        assert not await wait_until_published(taint_publisher, 0.05)


async def test_pause_after_a_hastened_call_is_the_usual_one(autojump_clock: MockClock) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        taint_publisher.update(report("a"), clock())
        assert await wait_until_published(taint_publisher)
        published_s = driver.calls[0][0]
        taint_publisher.update(report("a", "b"), clock())
        await trio.sleep(1000)
    assert driver.calls[1:] == [(published_s + MIN_INTERVAL_S + DEBOUNCE_S, ["a", "b"])]


async def test_wait_noticed_after_the_publication_hastens_no_later_call(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core thread is late: it gets to know of the wait when the taints are published already."""
    driver, late = Driver(), list[Callable[[], object]]()
    async with run_publisher(publisher(driver.publish)) as taint_publisher:
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(taint_publisher, "_token", SimpleNamespace(run_sync_soon=late.append))
        taint_publisher.update(report("a"), clock())
        assert not taint_publisher.wait_published([GPU], 0.0)
        await trio.sleep(DEBOUNCE_S + 1)
        [notice] = late
        notice()
        taint_publisher.update(report("a", "b"), clock())
        await trio.sleep(1000)
    assert driver.calls == [(DEBOUNCE_S, ["a"]), (2 * DEBOUNCE_S + MIN_INTERVAL_S, ["a", "b"])]


async def test_wait_without_a_callback_ends_at_once(mock_clock: MockClock) -> None:
    taint_publisher = publisher(None)
    taint_publisher.update(report("gpu.xid.79"), clock())
    assert taint_publisher.wait_published([GPU], 0.0)


# --- restarts ---------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "taints.json"


async def test_published_taints_are_saved(path: Path, autojump_clock: MockClock) -> None:
    async with run_publisher(publisher(None, path=path)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
        await until(lambda: load_taints(path)[0] == Taints({GPU: (XID,)}))
        taint_publisher.update(report(), clock())
        await until(lambda: load_taints(path)[0] == Taints())


async def test_taints_that_change_back_during_a_save_are_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def save_slowly(path: Path, taints: Taints) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        save_taints(path, taints)

    monkeypatch.setattr("agent.driver.taint_callback_publisher.save_taints", save_slowly)

    async def until_in_real_time(condition: Callable[[], object]) -> None:
        with trio.fail_after(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.01)

    taint_publisher = TaintCallbackPublisher(
        None, driver=DRIVER, policy=TaintPolicy(quiet_s=0), path=path, clock=clock
    )
    async with run_publisher(taint_publisher):
        taint_publisher.update(report("gpu.xid.79"), clock())
        await until_in_real_time(begun.is_set)
        taint_publisher.update(report(), clock())
        begun.clear()
        goes_on.set()
        await until_in_real_time(begun.is_set)
        await until_in_real_time(lambda: load_taints(path)[0] == Taints())


async def test_taints_decided_right_before_the_end_are_saved(path: Path, mock_clock: MockClock) -> None:
    async with run_publisher(publisher(None, path=path)) as taint_publisher:
        taint_publisher.update(report("gpu.xid.79"), clock())
    assert load_taints(path)[0] == Taints({GPU: (XID,)})


async def test_restart_keeps_time_added(path: Path, autojump_clock: MockClock) -> None:
    save_taints(path, Taints({GPU: (OLD_XID,)}))
    taken: list[Taints] = []

    async def callback(taints: Taints) -> None:
        taken.append(taints)

    async with run_publisher(publisher(callback, path=path)) as taint_publisher:
        assert taint_publisher.taints == Taints({GPU: (OLD_XID,)})
        taint_publisher.update(report("gpu.xid.79"), clock())
        await trio.sleep(1000)
    assert taken == [Taints({GPU: (OLD_XID,)})]


async def test_saved_taints_without_a_cause_are_removed(path: Path, autojump_clock: MockClock) -> None:
    save_taints(path, Taints({GPU: (OLD_XID,)}))
    driver = Driver()
    async with run_publisher(publisher(driver.publish, path=path)) as taint_publisher:
        taint_publisher.update(report(), clock())
        await trio.sleep(1000)
    assert driver.calls == [(DEBOUNCE_S, ["xid"]), (60 + DEBOUNCE_S, [])]


async def test_write_error_is_logged_once_and_retried(
    path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    async with run_publisher(publisher(driver.publish, path=path)) as taint_publisher:
        path.parent.write_text("a file")
        for codes in (["a"], ["a", "b"]) * 5:
            taint_publisher.update(report(*codes), clock())
            await trio.sleep(100)
        await until(lambda: caplog.records)
        assert driver.calls, "the driver is not delayed"
        path.parent.unlink()
        await until(lambda: load_taints(path)[0] == taint_publisher.taints)
    assert len(caplog.records) == 1
    assert f"{path}: " in caplog.text


def test_corrupt_file_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_text("{")
    assert publisher(None, path=path).taints == Taints()
    assert "renamed to taints.json.corrupt-1; all taints get a new timeAdded" in caplog.text


# --- values ------------------------------------------------------------------------------------------------


def test_driver_name_without_a_valid_key_prefix_is_rejected() -> None:
    with pytest.raises(ConfigError, match="driver: 'GPU' is not a DNS subdomain"):
        TaintCallbackPublisher(None, driver="GPU", clock=clock)


def test_code_of_the_page_about_taints_publishes_them() -> None:
    page = (Path(__file__).parents[1] / "docs/taints.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    entries: dict[str, dict[str, object]] = {GPU.device: {"name": GPU.device}}
    updates: list[tuple[object, int]] = []
    names: dict[str, Any] = {
        "entries": entries,
        "pool": GPU.pool,
        "update_resource_slices": lambda found, at_most: updates.append((found, at_most)),
    }
    exec(block, names)
    names["publish"](Taints({GPU: (XID,)}))
    assert updates == [(entries, 64)]
    assert entries[GPU.device]["taints"] == taint_objects((XID,))


def test_as_objects_has_the_format_of_a_resource_slice() -> None:
    assert taint_objects((XID, XID._replace(value="", effect=Effect.NONE))) == [
        {
            "key": "gpu.example.com/xid",
            "value": "79",
            "effect": "NoSchedule",
            "timeAdded": "2026-09-21T14:13:20Z",
        },
        {"key": "gpu.example.com/xid", "effect": "None", "timeAdded": "2026-09-21T14:13:20Z"},
    ]
