"""One prepare of one claim, step by step: whether to try, what a failure is, whether to try again. Pure.

A generator says what is to be done next; whoever runs it (:mod:`agent.prepare.runners`) does it, with or
without an event loop. Cancellation and Ctrl-C are no failures of a claim: they pass through, and nobody
remembers them.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from agent.model.claim import Claim
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.errors import PrepareError
from agent.prepare.message import text
from agent.prepare.patterns import Pattern
from agent.prepare.retry import pause_s


class Call(NamedTuple):
    """Call the handler; send what it returns, throw what it raises."""


class Pause(NamedTuple):
    """Wait, without blocking anybody's loop."""

    seconds: float


class Work(NamedTuple):
    """Call this where it may block for some seconds, and send what it returns."""

    function: Callable[[], PrepareVerdict]


Step = Call | Pause | Work


class PrepareService(Protocol):
    """What a prepare needs to know and to have remembered: :class:`agent.driver.prepare_tracker.Desk`."""

    def cached_failure(self, claim: Claim) -> PrepareError | None:
        """The answer, if the same question had one that still holds. Microseconds."""

    def judge(self, claim: Claim, error: BaseException, patterns: Sequence[Pattern] = ()) -> PrepareVerdict:
        """Of what kind a failure is. Blocks nobody."""

    def failed(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Has it remembered, and told to whom it concerns. May block for some seconds."""

    def succeeded(self, claim: Claim) -> None:
        """The claim is prepared. Blocks nobody."""

    def monotonic(self) -> float:
        """Time that passes [s]."""

    def jitter(self) -> float:
        """A throw of the dice, from 0 to 1."""


def attempt(
    desk: PrepareService, claim: Claim, patterns: Sequence[Pattern] = (), *, began_s: float | None = None
) -> Generator[Step, Any, Any]:
    """Prepares a claim; returns what the handler returned.

    Args:
        patterns: Of the texts of failures, beside the desk's own.
        began_s: When the call began, if time was spent on it before, as the desk's clock has it.

    Raises:
        PrepareError: It could not be prepared; judged, remembered, and told to whom it concerns.
    """
    if known := desk.cached_failure(claim):
        raise known
    began, tries = desk.monotonic() if began_s is None else began_s, 0
    while True:
        try:
            result = yield Call()
        except PrepareError:  # judged by whoever raised it
            raise
        except Exception as error:
            verdict = desk.judge(claim, error, patterns)
            spent = desk.monotonic() - began
            pause = None
            if verdict.error_class is ErrorClass.TRANSIENT:
                pause = pause_s(tries, spent, desk.jitter(), verdict.retry_after_s)
            if pause is None:
                verdict = yield Work(partial(desk.failed, claim, verdict, error))
                raise PrepareError(verdict, text(verdict)) from error
        else:
            desk.succeeded(claim)
            return result
        tries += 1
        yield Pause(pause)
