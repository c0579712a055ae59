"""Runners of the steps of a prepare in plain code, asyncio or Trio, and the ``@classified`` decorator.

The runners decide nothing: they execute the steps that :mod:`agent.prepare.prepare_steps` yields.
"""

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from agent.model.claim import Claim, ClaimRef
from agent.prepare.error_patterns import ErrorPattern
from agent.prepare.prepare_steps import CallHandlerStep, PauseStep, PrepareResultTracker, Step, prepare_steps

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
    from agent.system.threads.with_timeout import call_in_thread

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
    """Return True if the caller is a Trio task, also if one loop runs inside the other."""
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
        TypeError: Raised by the decorated handler: no argument is a claim.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def steps(*args: P.args, **kwargs: P.kwargs) -> Steps[Any]:
            prepared = (
                get_claim(*args, **kwargs) if get_claim else _find_claim(function, (*args, *kwargs.values()))
            )
            tracker: PrepareResultTracker = (
                tracker_or_monitor.tracker
                if isinstance(tracker_or_monitor, HasPrepareFailureTracker)
                else tracker_or_monitor
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
    similar = next((one for one in given if all(hasattr(one, key) for key in ClaimRef._fields)), None)
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
