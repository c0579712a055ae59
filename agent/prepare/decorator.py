"""``@classified``: what a prepare handler raises becomes a verdict, and what the kubelet is told.

Finds the claim among a handler's arguments, and lets the steps of a prepare (:mod:`agent.prepare.steps`) run
around the handler. The handler stays what it is: a plain function, or an async one of asyncio or Trio.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from agent.model.claim import Claim, ClaimRef
from agent.prepare.patterns import Pattern
from agent.prepare.runners import Steps, run_async, run_plain
from agent.prepare.steps import PrepareService, attempt

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class HasPrepareTracker(Protocol):
    """Whatever keeps a desk: a monitor."""

    @property
    def tracker(self) -> PrepareService:
        """Its desk."""


def classified(
    tracker_or_monitor: PrepareService | HasPrepareTracker,
    *,
    claim: Callable[..., Claim] | None = None,
    patterns: Sequence[Pattern] = (),
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a prepare handler of one claim: a function or a method, plain or async.

    What the handler raises is judged. A transient failure is tried again within the call, so the handler must
    be one that can be called again, as the kubelet does anyway. A failure for good is answered from memory
    when the same question comes again. A plain handler blocks the thread that it is called in, between two
    tries, too.

    Args:
        tracker_or_monitor: Who remembers.
        claim: Called with the handler's arguments, it says which claim is to be prepared. Without it that is
            the first argument that is an :class:`agent.Claim`.
        patterns: Of the texts of the handler's failures, beside those of the monitor.

    Raises:
        PrepareError: By the decorated handler: the verdict, and the text for the kubelet.
        TypeError: By the decorated handler: no argument is a claim.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        def steps(*args: P.args, **kwargs: P.kwargs) -> Steps[Any]:
            of = claim(*args, **kwargs) if claim else _find(function, (*args, *kwargs.values()))
            desk: PrepareService = (
                tracker_or_monitor.tracker
                if isinstance(tracker_or_monitor, HasPrepareTracker)
                else tracker_or_monitor
            )
            return attempt(desk, of, patterns)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def prepare_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                return await run_async(steps(*args, **kwargs), functools.partial(function, *args, **kwargs))

            return cast(Callable[P, T], prepare_async)

        @functools.wraps(function)
        def prepare(*args: P.args, **kwargs: P.kwargs) -> T:
            return cast(T, run_plain(steps(*args, **kwargs), lambda: _plain(function(*args, **kwargs))))

        return prepare

    return decorate


def _find(function: Callable[..., object], arguments: Iterable[object]) -> Claim:
    """The claim among the arguments.

    Raises:
        TypeError: None is one; names what looks like one.
    """
    given = tuple(arguments)
    for one in given:
        if isinstance(one, Claim):
            return one
    name = getattr(function, "__qualname__", repr(function))
    alike = next((one for one in given if all(hasattr(one, key) for key in ClaimRef._fields)), None)
    found = f"a {type(alike).__qualname__}" if alike is not None else "no claim"
    raise TypeError(f"{name}() was given {found}, not an agent.Claim; classified(claim=...) can make one")


def _plain(result: T) -> T:
    """What a plain handler returned.

    Raises:
        TypeError: It has still to be awaited, so nobody knows yet whether it is a success.
    """
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(f"the handler returned a {type(result).__qualname__}; an async one must be an async def")
