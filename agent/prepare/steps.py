"""Steps of one prepare of one claim: cached answer, call of the handler, classification, retry. Pure.

:func:`attempt` is a generator that yields the next step; a runner (:mod:`agent.prepare.runners`) carries it
out, with or without an event loop. Cancellation and Ctrl-C are not failures of a claim: they pass through and
are not recorded.

A transient failure is retried within the same call: the kubelet waits 45 s for an answer and retries after 60
to 90 s. A driver that used up the 45 s itself would miss the deadline of its own answer.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from agent.model.claim import Claim
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.errors import PrepareError
from agent.prepare.message import kubelet_text
from agent.prepare.patterns import Pattern

FIRST_PAUSE_S: Final = 0.1
"""Upper bound of the first pause, doubled for each further pause [s]."""
MAX_PAUSE_S: Final = 5.0
"""Upper bound of all pauses [s]."""
MIN_PAUSE_S: Final = 0.01
"""Shortest pause, whatever the jitter is [s]."""
RETRY_WINDOW_S: Final = 30.0
"""Longest time from the call to its last try [s]; the rest of the 45 s is for that try."""


def retry_pause_s(
    attempt: int, spent_s: float, jitter: float, retry_after_s: float | None = None
) -> float | None:
    """Return the pause before the next try; None: no more tries.

    Args:
        attempt: Number of failed tries less one: 0 after the first.
        spent_s: Time since the call began.
        jitter: A new random number from 0 to 1. Full jitter spreads the retries of a cluster's drivers that
            failed at the same time.
        retry_after_s: Earliest time at which a retry can help, according to the failure [s]. Beyond the retry
        window
            there is no further try.
    """
    bound = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 16))
    pause = max(MIN_PAUSE_S, bound * jitter, retry_after_s or 0.0)
    return pause if spent_s + pause <= RETRY_WINDOW_S else None


class CallHandler(NamedTuple):
    """Step: call the handler; send its result or throw its exception."""


class Pause(NamedTuple):
    """Step: wait without blocking an event loop."""

    seconds: float


class RunInThread(NamedTuple):
    """Step: call a function that may block for some seconds; send its result."""

    function: Callable[[], PrepareVerdict]


Step = CallHandler | Pause | RunInThread


class PrepareService(Protocol):
    """Classification and ledger of prepares; :class:`agent.driver.prepare_tracker.PrepareTracker` is one."""

    def cached_failure(self, claim: Claim) -> PrepareError | None:
        """Return the error cached for the same request; None: no failure is cached. Takes microseconds."""

    def classify(
        self, claim: Claim, error: BaseException, patterns: Sequence[Pattern] = ()
    ) -> PrepareVerdict:
        """Classify a failure. Never blocks."""

    def failed(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Record a failure and wait until all streams have the health of its devices. Blocks up to 3 s."""

    def succeeded(self, claim: Claim) -> None:
        """Record that the claim is prepared. Never blocks."""

    def monotonic(self) -> float:
        """Return a monotonic time [s]."""

    def jitter(self) -> float:
        """Return a random number from 0 to 1."""


def attempt(
    tracker: PrepareService, claim: Claim, patterns: Sequence[Pattern] = (), *, began_s: float | None = None
) -> Generator[Step, Any, Any]:
    """Prepare a claim; returns what the handler returned.

    Args:
        patterns: Patterns for error texts, tried before those of the tracker.
        began_s: When the call began, by the tracker's clock, if time was spent on it before; None: now.

    Raises:
        PrepareError: The claim could not be prepared; the failure is classified, recorded and delivered.
    """
    if known := tracker.cached_failure(claim):
        raise known
    began, tries = tracker.monotonic() if began_s is None else began_s, 0
    while True:
        try:
            result = yield CallHandler()
        except PrepareError:  # classified already
            raise
        except Exception as error:
            verdict = tracker.classify(claim, error, patterns)
            spent = tracker.monotonic() - began
            pause = None
            if verdict.error_class is ErrorClass.TRANSIENT:
                pause = retry_pause_s(tries, spent, tracker.jitter(), verdict.retry_after_s)
            if pause is None:
                verdict = yield RunInThread(partial(tracker.failed, claim, verdict, error))
                raise PrepareError(verdict, kubelet_text(verdict)) from error
        else:
            tracker.succeeded(claim)
            return result
        tries += 1
        yield Pause(pause)
