"""One prepare, step by step: what is tried, what is tried again and for how long, and what passes through."""

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from prepare_paper import NOW, PaperEngine, claim

from agent.driver.prepare_tracker import PrepareTracker
from agent.model.claim import Claim
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.errors import BadConfig, FailedDevice, PrepareError, TransientError
from agent.prepare.retry import FIRST_S, LEAST_S, LONGEST_S, TOTAL_S, pause_s
from agent.prepare.runners import run_async, run_asyncio, run_plain, run_trio
from agent.prepare.steps import Call, Pause, Work, attempt

A = claim("a")


class Watch:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def desk(watch: Watch) -> PrepareTracker:
    return PrepareTracker(
        "gpu.example.com", None, PaperEngine(), clock=lambda: NOW, monotonic=watch, jitter=lambda: 1.0
    )


def play(desk: PrepareTracker, watch: Watch, *answers: object) -> tuple[object, list[float]]:
    """Runs a prepare whose handler gives these answers, the last for ever.

    Returns:
        The result or the error, and the pauses that were made.
    """
    left = list(answers)
    pauses = []
    steps = attempt(desk, A)
    try:
        step = next(steps)
        while True:
            match step:
                case Call():
                    answer = left.pop(0) if len(left) > 1 else left[0]
                    step = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
                case Pause(seconds):
                    pauses.append(seconds)
                    watch.now += seconds
                    step = steps.send(None)
                case Work(function):
                    step = steps.send(function())
    except StopIteration as end:
        return end.value, pauses
    except PrepareError as error:
        return error, pauses


# --- what is tried -----------------------------------------------------------------------------------------


def test_what_the_handler_returns_is_returned_and_remembered(desk, watch):
    assert play(desk, watch, ["cdi-id"]) == (["cdi-id"], [])
    (outcome,) = desk.outcomes()
    assert (outcome.claim, outcome.verdict) == (A.ref, None)


def test_a_failure_is_raised_with_its_verdict_its_text_and_its_cause(desk, watch):
    culprit = BadConfig("mode 'x' is none of a, b")
    error, pauses = play(desk, watch, culprit)
    assert isinstance(error, PrepareError)
    assert error.verdict.error_class is ErrorClass.BAD_CONFIG
    assert str(error) == error.text
    assert "mode 'x' is none of a, b" in error.text
    assert error.__cause__ is culprit
    assert pauses == []


def test_a_known_answer_is_given_without_calling_anybody(desk, watch):
    first, _ = play(desk, watch, BadConfig("no"))
    again, _ = play(desk, watch, AssertionError("called again"))
    assert again.text == first.text


@pytest.mark.parametrize("error", [BadConfig("no"), ValueError("no"), FailedDevice("gpu-0", "no")])
def test_only_what_passes_is_tried_again_within_the_call(desk, watch, error):
    found, pauses = play(desk, watch, error)
    assert pauses == []
    assert found.verdict.count == 1


def test_what_passes_is_tried_again_and_the_claim_is_prepared(desk, watch):
    assert play(desk, watch, TransientError("busy"), TransientError("busy"), "done") == ("done", [0.1, 0.2])
    assert [outcome.verdict for outcome in desk.outcomes()] == [None]


def test_what_does_not_pass_within_the_time_is_one_failure(desk, watch):
    error, pauses = play(desk, watch, TransientError("busy"))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    assert (error.verdict.error_class, error.verdict.count) == (ErrorClass.TRANSIENT, 1)


def test_when_trying_can_help_only_after_the_time_nobody_tries(desk, watch):
    assert play(desk, watch, TransientError("busy", retry_after_s=TOTAL_S + 1))[1] == []
    assert play(desk, watch, TransientError("busy", retry_after_s=20))[1] == [20]


def test_what_was_judged_already_is_not_judged_again(desk, watch):
    error, _ = play(desk, watch, BadConfig("no"))
    other = PrepareTracker("gpu.example.com", None, PaperEngine())
    found, _ = play(other, watch, error)
    assert found is error
    assert other.outcomes() == ()


# --- the pauses --------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.floats(0, 60), st.floats(0, 1), st.none() | st.floats())
def test_no_try_begins_after_the_time_and_no_pause_is_none(attempt, spent, jitter, after):
    pause = pause_s(attempt, spent, jitter, after)
    if pause is not None:
        assert pause >= LEAST_S
        assert spent + pause <= TOTAL_S
        assert after is None or not pause < after


def test_the_bound_doubles_up_to_the_longest():
    bounds = [pause_s(attempt, 0, 1.0) for attempt in range(10)]
    assert bounds[0] == FIRST_S
    assert all(later == min(2 * earlier, LONGEST_S) for earlier, later in pairwise(bounds))


def test_the_whole_of_a_pause_is_by_chance():
    assert pause_s(6, 0, 0.5) == LONGEST_S / 2
    assert pause_s(6, 0, 0.0) == LEAST_S


# --- the three kinds of callers ----------------------------------------------------------------------------


def in_plain(desk: PrepareTracker, handler: Callable[[], object]) -> object:
    return run_plain(attempt(desk, A), handler)


def in_asyncio(desk: PrepareTracker, handler: Callable[[], object], run=run_asyncio) -> object:
    async def call() -> object:
        await asyncio.sleep(0)
        return handler()

    return asyncio.run(run(attempt(desk, A), call))


def in_trio(desk: PrepareTracker, handler: Callable[[], object], run=run_trio) -> object:
    async def call() -> object:
        await trio.lowlevel.checkpoint()
        return handler()

    return trio.run(run, attempt(desk, A), call)


def in_some_asyncio(desk: PrepareTracker, handler: Callable[[], object]) -> object:
    return in_asyncio(desk, handler, run_async)


def in_some_trio(desk: PrepareTracker, handler: Callable[[], object]) -> object:
    return in_trio(desk, handler, run_async)


HOSTS = pytest.mark.parametrize("host", [in_plain, in_asyncio, in_trio, in_some_asyncio, in_some_trio])


@pytest.fixture
def quick() -> PrepareTracker:
    """A desk by the real clock, with the shortest pauses."""
    return PrepareTracker("gpu.example.com", None, PaperEngine(), jitter=lambda: 0.0)


@HOSTS
def test_a_prepare_succeeds_in_every_host(host, quick):
    answers = iter([TransientError("busy"), OSError(16, "Device or resource busy"), None])

    def handler() -> str:
        if error := next(answers):
            raise error
        return "done"

    assert host(quick, handler) == "done"


@HOSTS
def test_a_prepare_fails_in_every_host(host, quick):
    def handler() -> None:
        raise FailedDevice("gpu-0", "no answer")

    with pytest.raises(PrepareError, match=r"class=failed-device code=driver\.failed_device"):
        host(quick, handler)
    assert [fault.device for fault in quick.told()] == [A.devices[0].ref]


@HOSTS
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_wants_to_end_is_not_held_up_and_nothing_is_remembered(host, quick, kind):
    def handler() -> None:
        raise kind

    with pytest.raises(kind):
        host(quick, handler)
    assert quick.outcomes() == ()


@HOSTS
def test_a_handler_that_runs_out_of_an_iterator_is_a_mistake_and_not_a_success(host, quick):
    with pytest.raises(PrepareError):
        host(quick, lambda: next(iter(())))


class SlowDesk(PrepareTracker):
    """One whose disk takes a while; says in which thread it is waited for."""

    def __init__(self) -> None:
        super().__init__("gpu.example.com", None, PaperEngine())
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def failed(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        self.entered.set()
        assert self.go_on.wait(PATIENCE_S)
        return super().failed(claim, verdict, error)


def test_telling_of_a_failure_holds_up_no_loop_of_asyncio():
    desk = SlowDesk()

    async def call() -> None:
        raise BadConfig("no")

    async def main() -> None:
        task = asyncio.create_task(run_asyncio(attempt(desk, A), call))
        while not desk.entered.is_set():  # noqa: ASYNC110  # set by a thread
            await asyncio.sleep(0.001)
        desk.go_on.set()  # said by the loop that is not held up
        with pytest.raises(PrepareError):
            await task

    asyncio.run(main())


async def test_telling_of_a_failure_holds_up_no_loop_of_trio():
    desk = SlowDesk()

    async def call() -> None:
        raise BadConfig("no")

    async with trio.open_nursery() as nursery:

        async def main() -> None:
            with pytest.raises(PrepareError):
                await run_trio(attempt(desk, A), call)

        nursery.start_soon(main)
        while not desk.entered.is_set():  # noqa: ASYNC110  # set by a thread
            await trio.sleep(0.001)
        desk.go_on.set()


def test_threads_that_all_hang_do_not_keep_a_failure_from_being_told(quick):
    """asyncio's own threads are as many as the driver's handlers can take."""
    end = threading.Event()

    async def call() -> None:
        raise BadConfig("no")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        hung = [loop.run_in_executor(None, end.wait) for _ in range(64)]
        with pytest.raises(PrepareError):
            await run_asyncio(attempt(quick, A), call)
        end.set()
        await asyncio.gather(*hung)

    asyncio.run(main())


def test_a_cancelled_task_of_asyncio_is_cancelled_and_nothing_is_remembered(quick):
    async def main() -> None:
        began = asyncio.Event()

        async def call() -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(run_asyncio(attempt(quick, A), call))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert quick.outcomes() == ()


async def test_a_cancelled_task_of_trio_is_cancelled_in_a_pause_too():
    desk = PrepareTracker("gpu.example.com", None, PaperEngine(), jitter=lambda: 1.0)

    async def call() -> None:
        raise TransientError("busy", retry_after_s=25)

    with trio.CancelScope() as scope:
        scope.cancel()
        await run_trio(attempt(desk, A), call)
    assert scope.cancelled_caught
    assert desk.outcomes() == ()


def test_a_task_of_trio_inside_asyncio_is_known_for_one():
    """Trio as the guest of a loop of asyncio's: both run in this thread."""
    desk = PrepareTracker("gpu.example.com", None, PaperEngine(), jitter=lambda: 0.0)

    async def call() -> str:
        await trio.lowlevel.checkpoint()  # asyncio would not understand it
        return "done"

    async def main() -> object:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        trio.lowlevel.start_guest_run(
            run_async,
            attempt(desk, A),
            call,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
        )
        return (await ended).unwrap()

    assert asyncio.run(main()) == "done"


def test_time_that_was_spent_before_the_first_try_counts(desk, watch):
    watch.now = 100.0
    steps = attempt(desk, A, began_s=100.0 - TOTAL_S)
    assert isinstance(next(steps), Call)
    assert isinstance(steps.throw(TransientError("busy")), Work)


def test_however_often_it_was_tried_the_pause_has_its_bound():
    assert pause_s(100_000, 0.0, 1.0) == LONGEST_S
