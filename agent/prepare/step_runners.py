"""Steps of the prepare of one claim, their runners in plain code, asyncio or Trio, and the ``@classified``
decorator.

:func:`prepare_steps` is pure and yields the next step: cached failure, driver's handler, classification,
retry. A runner executes the step, with or without an event loop, and makes no decisions. Cancellation and
Ctrl-C are not failures of a claim: they pass through and are not recorded.

A transient failure is retried within the same call: the kubelet waits 45 s for an answer and retries after 60
to 90 s. A driver that used up the 45 s itself would miss the deadline of its own answer. The retries end when
no call waits for the claim any more, because another claim of its pod failed.
"""

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from agent.model.claim import Claim, ClaimRef
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.error_tables import ErrorPattern
from agent.prepare.errors import PrepareError
from agent.prepare.kubelet_message import kubelet_text

FIRST_PAUSE_S: Final = 0.1
"""Upper bound of the pause before the first retry of a prepare, doubled for each further retry [s]."""
MAX_PAUSE_S: Final = 5.0
"""Upper bound of the pauses between the tries of a prepare [s]."""
MIN_PAUSE_S: Final = 0.01
"""Shortest pause between two tries of a prepare, whatever the jitter is [s]."""
RETRY_WINDOW_S: Final = 30.0
"""Longest time from the kubelet's call to the last try [s]; the rest of the 45 s is for that try."""


def retry_pause_s(
    retries: int, spent_s: float, jitter: float, retry_after_s: float | None = None
) -> float | None:
    """Return the pause before the next try of a failed prepare [s]; None: no more tries.

    Args:
        retries: Number of retries so far: 0 after the first try.
        spent_s: Time since the call began [s].
        jitter: A new random number from 0 to 1, which spreads the retries of a cluster's drivers.
        retry_after_s: Shortest useful pause, according to the failure [s]; None: unknown.
    """
    bound = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(retries, 16))
    pause = max(MIN_PAUSE_S, bound * jitter, retry_after_s or 0.0)
    return pause if spent_s + pause <= RETRY_WINDOW_S else None


class CallHandlerStep(NamedTuple):
    """Step of a prepare in which the runner calls the driver's handler.

    The generator gets the handler's result or exception.
    """


class PauseStep(NamedTuple):
    """Step of a prepare in which the runner waits between two tries, without blocking an event loop."""

    seconds: float


class RunInThreadStep(NamedTuple):
    """Step of a prepare in which the runner calls a function that may block for some seconds. prepare_steps()
    gets the result."""

    function: Callable[[], PrepareVerdict]


Step = CallHandlerStep | PauseStep | RunInThreadStep


@runtime_checkable
class PrepareResultTracker(Protocol):
    """Tracker of prepare results: classifies failures and keeps the ledger of results.

    See agent.driver.prepare_failure_tracker.
    """

    def cached_failure(self, claim: Claim) -> PrepareError | None:
        """Return the cached failure of the claim's last prepare; None: the handler must be called."""

    def classify(
        self, claim: Claim, error: BaseException, /, patterns: Sequence[ErrorPattern] = ()
    ) -> PrepareVerdict:
        """Return the verdict (class, code, advice) on a failed prepare from its exception. Never blocks."""

    def classify_by_newer_health(
        self,
        claim: Claim,
        verdict: PrepareVerdict,
        evidence: BaseException,
        patterns: Sequence[ErrorPattern] = (),
    ) -> PrepareVerdict:
        """Return the verdict on a failed prepare, with regard to the health of devices after the failure.

        Blocks up to 2 s.
        """

    def record_failure_and_wait(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Record a failed prepare; wait until the kubelet and the API server have received the devices'
        health and taints.

        Blocks up to 5 s.
        """

    def record_success(self, claim: Claim) -> None:
        """Record that a claim was prepared. Never blocks."""

    def monotonic(self) -> float:
        """Return the time on a monotonic clock [s]."""

    def jitter(self) -> float:
        """Return a random number from 0 to 1, which spreads the retries of a cluster's drivers."""


def prepare_steps(
    tracker: PrepareResultTracker,
    claim: Claim,
    patterns: Sequence[ErrorPattern] = (),
    *,
    began_s: float | None = None,
    may_retry: Callable[[], bool] = lambda: True,
) -> Generator[Step, Any, Any]:
    """Yield the steps of the prepare of a claim; the generator returns the result of the driver's handler.

    Args:
        patterns: Patterns for error texts, tried before those of the tracker.
        began_s: Start of the kubelet's call, by :meth:`PrepareResultTracker.monotonic`; None: now.
        may_retry: Returns whether a transient failure is still to be retried; called before and after each
            pause.

    Raises:
        PrepareError: The claim could not be prepared; the failure is classified, recorded and delivered.
    """
    if known := tracker.cached_failure(claim):
        raise known
    began, tries = tracker.monotonic() if began_s is None else began_s, 0
    while True:
        try:
            result = yield CallHandlerStep()
        except PrepareError:  # classified already
            raise
        except Exception as error:
            verdict = tracker.classify(claim, error, patterns)
            spent = tracker.monotonic() - began
            pause = None
            if verdict.error_class is ErrorClass.TRANSIENT and may_retry():
                pause = retry_pause_s(tries, spent, tracker.jitter(), verdict.retry_after_s)
            if pause is not None:
                yield PauseStep(pause)
            if pause is None or not may_retry():
                record = partial(_record_failure, tracker, claim, verdict, error, patterns)
                verdict = yield RunInThreadStep(record)
                raise PrepareError(verdict, kubelet_text(verdict)) from error
        else:
            tracker.record_success(claim)
            return result
        tries += 1


def _record_failure(
    tracker: PrepareResultTracker,
    claim: Claim,
    verdict: PrepareVerdict,
    error: Exception,
    patterns: Sequence[ErrorPattern],
) -> PrepareVerdict:
    verdict = tracker.classify_by_newer_health(claim, verdict, error, patterns)
    return tracker.record_failure_and_wait(claim, verdict, error)


# --- runners -----------------------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")

THREAD: Final = "dh-prepare"
"""Name of a thread in which an async runner executes a RunInThreadStep."""
Steps = Generator[Step, Any, T]


def run_blocking(
    steps: Steps[T], handler: Callable[[], object], sleep: Callable[[float], object] = time.sleep
) -> T:
    """Run the steps of a prepare in the calling thread. Blocks until the last step has ended.

    Args:
        handler: Prepares the claim; called for each :class:`CallHandlerStep`.
        sleep: Makes the pause of a :class:`PauseStep`; may end it early.
    """
    try:
        step = next(steps)
        while True:
            match step:
                case CallHandlerStep():
                    try:
                        result = handler()
                    except Exception as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(result)
                case PauseStep(seconds):
                    sleep(seconds)
                    step = steps.send(None)
                case _:
                    step = steps.send(step.function())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of the generator's own type


async def run_asyncio(steps: Steps[T], handler: Callable[[], Awaitable[object]]) -> T:
    """Run the steps of a prepare in an asyncio task."""
    from agent.system.threads.worker_threads import call_in_thread

    return await _run_in_loop(steps, handler, asyncio.sleep, partial(call_in_thread, name=THREAD))


async def run_trio(steps: Steps[T], handler: Callable[[], Awaitable[object]]) -> T:
    """Run the steps of a prepare in a Trio task."""
    import trio

    from agent.system.threads.trio_calls import call_in_thread

    return await _run_in_loop(steps, handler, trio.sleep, partial(call_in_thread, name=THREAD))


async def run_async(steps: Steps[T], handler: Callable[[], Awaitable[object]]) -> T:
    """Run the steps of a prepare in the running event loop, asyncio's or Trio's."""
    return await (run_trio(steps, handler) if _in_trio() else run_asyncio(steps, handler))


async def _run_in_loop(
    steps: Steps[T],
    handler: Callable[[], Awaitable[object]],
    sleep: Callable[[float], Awaitable[object]],
    in_thread: Callable[[Callable[[], object]], Awaitable[object]],
) -> T:
    try:
        step = next(steps)
        while True:
            match step:
                case CallHandlerStep():
                    try:
                        result = await handler()
                    except Exception as error:
                        step = steps.throw(error)
                    else:
                        step = steps.send(result)
                case PauseStep(seconds):
                    step = steps.send(await sleep(seconds))
                case _:
                    step = steps.send(await in_thread(step.function))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of the generator's own type


def _in_trio() -> bool:
    """Return True if the caller is a Trio task, also if a Trio loop and an asyncio loop are nested."""
    if "trio" not in sys.modules:
        return False
    import trio

    try:
        task = asyncio.current_task()
    except RuntimeError:  # no asyncio loop runs in this thread
        task = None
    return task is None and trio.lowlevel.in_trio_task()


@runtime_checkable
class HasPrepareFailureTracker(Protocol):
    """Object with a prepare tracker, such as drahealth.Monitor."""

    @property
    def tracker(self) -> PrepareResultTracker:
        """Prepare tracker, which classifies and records the driver's prepares."""


def classified(
    tracker_or_monitor: PrepareResultTracker | HasPrepareFailureTracker,
    *,
    get_claim: Callable[..., Claim] | None = None,
    patterns: Sequence[ErrorPattern] = (),
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a prepare handler of one claim: a function or a method, plain or async.

    Exceptions of the handler are classified. A transient failure is retried within the call, so the handler
    must be idempotent, as the kubelet requires anyway. A lasting failure is cached and answers the same
    request again. A plain handler blocks its thread, also during the pause between two tries.

    Args:
        tracker_or_monitor: Monitor of the driver, or its prepare tracker.
        get_claim: Returns the claim from the handler's arguments; None: the first argument that is an
            :class:`drahealth.Claim`.
        patterns: Patterns for the handler's error texts, in addition to those of the monitor.

    Raises:
        PrepareError: Raised by the decorated handler: the verdict and the text for the kubelet.
        TypeError: The decorator has no monitor. Raised by the decorated handler: no argument is a claim.
    """
    given: object = tracker_or_monitor  # of ``@classified`` without parentheses the handler, never called
    tracker = given.tracker if isinstance(given, HasPrepareFailureTracker) else given
    if not isinstance(tracker, PrepareResultTracker):
        raise TypeError(f"classified(): {given!r} is not a monitor; write @drahealth.classified(monitor)")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def steps(*args: P.args, **kwargs: P.kwargs) -> Steps[Any]:
            prepared = (
                get_claim(*args, **kwargs) if get_claim else _find_claim(function, (*args, *kwargs.values()))
            )
            return prepare_steps(tracker, prepared, patterns)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def prepare_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await run_async(steps(*args, **kwargs), functools.partial(function, *args, **kwargs))

            return cast(Callable[P, T], prepare_async)

        @functools.wraps(function)
        def prepare(*args: P.args, **kwargs: P.kwargs) -> T:
            return cast(
                T,
                run_blocking(
                    steps(*args, **kwargs), lambda: _require_plain_result(function(*args, **kwargs))
                ),
            )

        return prepare

    return decorate


def _find_claim(function: Callable[..., object], arguments: Iterable[object]) -> Claim:
    """Return the claim among a prepare handler's arguments; raises TypeError if no argument is a claim."""
    given = tuple(arguments)
    for argument in given:
        if isinstance(argument, Claim):
            return argument
    name = getattr(function, "__qualname__", repr(function))
    similar = next((arg for arg in given if all(hasattr(arg, key) for key in ClaimRef._fields)), None)
    found = f"a {type(similar).__qualname__}" if similar is not None else "no claim"
    raise TypeError(
        f"prepare handler {name}() was given {found}, not a drahealth.Claim; pass classified(get_claim=...)"
    )


def _require_plain_result(result: T) -> T:
    """Return the result of a plain (not async) prepare handler; raises TypeError if it is an awaitable."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(f"the prepare handler returned a {type(result).__qualname__}; define it with async def")
