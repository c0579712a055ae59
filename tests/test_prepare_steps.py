"""Steps of a prepare: calls, retries, pauses and exceptions that pass through."""

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from prepare_samples import NOW, FakeEngine, claim

from agent.driver.prepare_failure_tracker import PrepareFailureTracker
from agent.model.claim import Claim
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.errors import BadConfigError, FailedDeviceError, PrepareError, TransientError
from agent.prepare.step_runners import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MIN_PAUSE_S,
    RETRY_WINDOW_S,
    CallHandlerStep,
    PauseStep,
    RunInThreadStep,
    prepare_steps,
    retry_pause_s,
    run_async,
    run_asyncio,
    run_blocking,
    run_trio,
)

A = claim("a")


class ManualClock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def tracker(clock: ManualClock) -> PrepareFailureTracker:
    return PrepareFailureTracker(
        "gpu.example.com", None, FakeEngine(), clock=lambda: NOW, monotonic=clock, jitter=lambda: 1.0
    )


def play(tracker: PrepareFailureTracker, clock: ManualClock, *answers: object) -> tuple[object, list[float]]:
    """Run a prepare whose handler gives these answers; it repeats the last answer.

    Returns:
        The result or the error, and the pauses that were made.
    """
    left = list(answers)
    pauses = []
    steps = prepare_steps(tracker, A)
    try:
        step = next(steps)
        while True:
            match step:
                case CallHandlerStep():
                    answer = left.pop(0) if len(left) > 1 else left[0]
                    step = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
                case PauseStep(seconds):
                    pauses.append(seconds)
                    clock.now += seconds
                    step = steps.send(None)
                case RunInThreadStep(function):
                    step = steps.send(function())
    except StopIteration as end:
        return end.value, pauses
    except PrepareError as error:
        return error, pauses


# --- errors that are retried -------------------------------------------------------------------------------


def test_result_of_the_handler_is_returned_and_recorded(tracker, clock):
    assert play(tracker, clock, ["cdi-id"]) == (["cdi-id"], [])
    (outcome,) = tracker.outcomes()
    assert (outcome.claim, outcome.verdict) == (A.ref, None)


def test_failure_is_raised_with_verdict_text_and_cause(tracker, clock):
    culprit = BadConfigError("mode 'x' is none of a, b")
    error, pauses = play(tracker, clock, culprit)
    assert isinstance(error, PrepareError)
    assert error.verdict.error_class is ErrorClass.BAD_CONFIG
    assert str(error) == error.text
    assert "mode 'x' is none of a, b" in error.text
    assert error.__cause__ is culprit
    assert pauses == []


def test_cached_failure_is_raised_without_a_call(tracker, clock):
    first, _ = play(tracker, clock, BadConfigError("no"))
    again, _ = play(tracker, clock, AssertionError("called again"))
    assert again.text == first.text


@pytest.mark.parametrize("error", [BadConfigError("no"), ValueError("no"), FailedDeviceError("gpu-0", "no")])
def test_only_transient_failures_are_retried_within_the_call(tracker, clock, error):
    found, pauses = play(tracker, clock, error)
    assert pauses == []
    assert found.verdict.count == 1


def test_transient_failure_is_retried_until_success(tracker, clock):
    assert play(tracker, clock, TransientError("busy"), TransientError("busy"), "done") == (
        "done",
        [0.1, 0.2],
    )
    assert [outcome.verdict for outcome in tracker.outcomes()] == [None]


def test_transient_failure_beyond_the_window_is_one_failure(tracker, clock):
    error, pauses = play(tracker, clock, TransientError("busy"))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    assert (error.verdict.error_class, error.verdict.count) == (ErrorClass.TRANSIENT, 1)


def test_failure_that_no_call_waits_for_is_not_retried(tracker):
    handler = Handler(TransientError("busy"))
    with pytest.raises(PrepareError, match="class=transient"):
        run_blocking(prepare_steps(tracker, A, may_retry=lambda: False), handler)
    assert handler.calls == 1


def test_retries_end_when_the_last_call_stops_waiting(tracker):
    handler, answers = Handler(TransientError("busy")), [True, True, True, False]
    steps = prepare_steps(tracker, A, may_retry=lambda: answers.pop(0))
    with pytest.raises(PrepareError, match="class=transient"):
        run_blocking(steps, handler, sleep=lambda _: None)
    assert handler.calls == 2
    (outcome,) = tracker.outcomes()
    assert outcome.verdict.count == 1


class Handler:
    """Prepare handler that always fails, and counts its calls."""

    def __init__(self, error: Exception) -> None:
        self.calls = 0
        self._error = error

    def __call__(self) -> None:
        self.calls += 1
        raise self._error


def test_retry_after_beyond_the_window_is_not_tried(tracker, clock):
    assert play(tracker, clock, TransientError("busy", retry_after_s=RETRY_WINDOW_S + 1))[1] == []
    assert play(tracker, clock, TransientError("busy", retry_after_s=20))[1] == [20]


def test_classified_failure_is_not_classified_again(tracker, clock):
    error, _ = play(tracker, clock, BadConfigError("no"))
    other = PrepareFailureTracker("gpu.example.com", None, FakeEngine())
    found, _ = play(other, clock, error)
    assert found is error
    assert other.outcomes() == ()


# --- the pauses --------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.floats(0, 60), st.floats(0, 1), st.none() | st.floats())
def test_no_try_begins_after_the_window_and_no_pause_is_zero(attempt, spent, jitter, after):
    pause = retry_pause_s(attempt, spent, jitter, after)
    if pause is not None:
        assert pause >= MIN_PAUSE_S
        assert spent + pause <= RETRY_WINDOW_S
        assert after is None or not pause < after


def test_pause_bound_doubles_up_to_the_maximum():
    bounds = [retry_pause_s(attempt, 0, 1.0) for attempt in range(10)]
    assert bounds[0] == FIRST_PAUSE_S
    assert all(later == min(2 * earlier, MAX_PAUSE_S) for earlier, later in pairwise(bounds))


def test_pause_is_fully_random():
    assert retry_pause_s(6, 0, 0.5) == MAX_PAUSE_S / 2
    assert retry_pause_s(6, 0, 0.0) == MIN_PAUSE_S


# --- the three kinds of callers ----------------------------------------------------------------------------


def run_without_loop(tracker: PrepareFailureTracker, handler: Callable[[], object]) -> object:
    return run_blocking(prepare_steps(tracker, A), handler)


def run_in_asyncio(tracker: PrepareFailureTracker, handler: Callable[[], object], run=run_asyncio) -> object:
    async def call() -> object:
        await asyncio.sleep(0)
        return handler()

    return asyncio.run(run(prepare_steps(tracker, A), call))


def run_in_trio(tracker: PrepareFailureTracker, handler: Callable[[], object], run=run_trio) -> object:
    async def call() -> object:
        await trio.lowlevel.checkpoint()
        return handler()

    return trio.run(run, prepare_steps(tracker, A), call)


def run_detected_asyncio(tracker: PrepareFailureTracker, handler: Callable[[], object]) -> object:
    return run_in_asyncio(tracker, handler, run_async)


def run_detected_trio(tracker: PrepareFailureTracker, handler: Callable[[], object]) -> object:
    return run_in_trio(tracker, handler, run_async)


PROGRAMS = pytest.mark.parametrize(
    "program", [run_without_loop, run_in_asyncio, run_in_trio, run_detected_asyncio, run_detected_trio]
)


@pytest.fixture
def quick() -> PrepareFailureTracker:
    """Return a tracker with the real clock and the shortest pauses."""
    return PrepareFailureTracker("gpu.example.com", None, FakeEngine(), jitter=lambda: 0.0)


@PROGRAMS
def test_prepare_succeeds_in_every_kind_of_program(program, quick):
    answers = iter([TransientError("busy"), OSError(16, "Device or resource busy"), None])

    def handler() -> str:
        if error := next(answers):
            raise error
        return "done"

    assert program(quick, handler) == "done"


@PROGRAMS
def test_prepare_fails_in_every_kind_of_program(program, quick):
    def handler() -> None:
        raise FailedDeviceError("gpu-0", "no answer")

    with pytest.raises(PrepareError, match=r"class=failed-device code=driver\.failed_device"):
        program(quick, handler)
    assert [fault.device for fault in quick.driver_faults()] == [A.devices[0].ref]


@PROGRAMS
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_passes_through_and_is_not_recorded(program, quick, kind):
    def handler() -> None:
        raise kind

    with pytest.raises(kind):
        program(quick, handler)
    assert quick.outcomes() == ()


@PROGRAMS
def test_stop_iteration_of_a_handler_is_a_failure(program, quick):
    with pytest.raises(PrepareError):
        program(quick, lambda: next(iter(())))


class SlowTracker(PrepareFailureTracker):
    """Tracker whose disk is slow."""

    def __init__(self) -> None:
        super().__init__("gpu.example.com", None, FakeEngine())
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def record_failure_and_wait(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().record_failure_and_wait(claim, verdict, error)


def test_delivery_of_a_failure_does_not_block_asyncio():
    tracker = SlowTracker()

    async def call() -> None:
        raise BadConfigError("no")

    async def main() -> None:
        task = asyncio.create_task(run_asyncio(prepare_steps(tracker, A), call))
        while not tracker.entered.is_set():  # noqa: ASYNC110  # set by a thread
            await asyncio.sleep(0.001)
        tracker.go_on.set()  # set by the loop, which is not blocked
        with pytest.raises(PrepareError):
            await task

    asyncio.run(main())


async def test_delivery_of_a_failure_does_not_block_trio():
    tracker = SlowTracker()

    async def call() -> None:
        raise BadConfigError("no")

    async with trio.open_nursery() as nursery:

        async def main() -> None:
            with pytest.raises(PrepareError):
                await run_trio(prepare_steps(tracker, A), call)

        nursery.start_soon(main)
        while not tracker.entered.is_set():  # noqa: ASYNC110  # set by a thread
            await trio.sleep(0.001)
        tracker.go_on.set()


def test_hung_threads_do_not_delay_the_delivery_of_a_failure(quick):
    """asyncio's own threads are as many as the driver's handlers can take."""
    end = threading.Event()

    async def call() -> None:
        raise BadConfigError("no")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hung = [loop.run_in_executor(None, end.wait) for _ in range(64)]
        with pytest.raises(PrepareError):
            await run_asyncio(prepare_steps(quick, A), call)
        end.set()
        await asyncio.gather(*hung)

    asyncio.run(main())


def test_cancelled_asyncio_task_is_not_recorded(quick):
    async def main() -> None:
        began = asyncio.Event()

        async def call() -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(run_asyncio(prepare_steps(quick, A), call))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert quick.outcomes() == ()


async def test_trio_task_can_be_cancelled_during_a_pause():
    tracker = PrepareFailureTracker("gpu.example.com", None, FakeEngine(), jitter=lambda: 1.0)

    async def call() -> None:
        raise TransientError("busy", retry_after_s=25)

    with trio.CancelScope() as scope:
        scope.cancel()
        await run_trio(prepare_steps(tracker, A), call)
    assert scope.cancelled_caught
    assert tracker.outcomes() == ()


def test_trio_task_inside_asyncio_is_detected():
    """Trio as the guest of a loop of asyncio's: both run in this thread."""
    tracker = PrepareFailureTracker("gpu.example.com", None, FakeEngine(), jitter=lambda: 0.0)

    async def call() -> str:
        await trio.lowlevel.checkpoint()  # asyncio would not understand it
        return "done"

    async def main() -> object:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        trio.lowlevel.start_guest_run(
            run_async,
            prepare_steps(tracker, A),
            call,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
        )
        return (await ended).unwrap()

    assert asyncio.run(main()) == "done"


def test_time_before_the_first_try_counts(tracker, clock):
    clock.now = 100.0
    steps = prepare_steps(tracker, A, began_s=100.0 - RETRY_WINDOW_S)
    assert isinstance(next(steps), CallHandlerStep)
    assert isinstance(steps.throw(TransientError("busy")), RunInThreadStep)


def test_pause_stays_bounded_after_many_tries():
    assert retry_pause_s(100_000, 0.0, 1.0) == MAX_PAUSE_S
