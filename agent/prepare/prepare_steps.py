"""Steps of the prepare of one claim: cached failure, driver's handler, classification, retry. Pure.

:func:`prepare_steps` yields the next step; a runner (:mod:`agent.prepare.step_runners`) executes it, with or
without an event loop. Cancellation and Ctrl-C are not failures of a claim: they pass through and are not
recorded.

A transient failure is retried within the same call: the kubelet waits 45 s for an answer and retries after 60
to 90 s. A driver that used up the 45 s itself would miss the deadline of its own answer. The retries end when
no call waits for the claim any more, because another claim of its pod failed.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from agent.model.claim import Claim
from agent.model.prepare import ErrorClass, PrepareVerdict
from agent.prepare.error_patterns import ErrorPattern
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
    """Step: call the driver's handler; send its result to the generator, or throw its exception."""


class PauseStep(NamedTuple):
    """Step: wait between two tries of a prepare, without blocking an event loop."""

    seconds: float


class RunInThreadStep(NamedTuple):
    """Step: call a function that may block for some seconds; send its result to the generator."""

    function: Callable[[], PrepareVerdict]


Step = CallHandlerStep | PauseStep | RunInThreadStep


class PrepareResultTracker(Protocol):
    """Tracker of prepare results: classifies failures and keeps the ledger; see
    agent.driver.prepare_failure_tracker."""

    def cached_failure(self, claim: Claim) -> PrepareError | None:
        """Return the cached failure of the claim's last prepare; None: the handler must be called."""

    def classify(
        self, claim: Claim, error: BaseException, patterns: Sequence[ErrorPattern] = ()
    ) -> PrepareVerdict:
        """Return the verdict (class, code, advice) on a failed prepare from its exception. Never blocks."""

    def classify_by_newer_health(
        self,
        claim: Claim,
        verdict: PrepareVerdict,
        evidence: BaseException,
        patterns: Sequence[ErrorPattern] = (),
    ) -> PrepareVerdict:
        """Return the verdict on a failed prepare, by device health after the failure. Blocks up to 2 s."""

    def record_failure_and_wait(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Record a failed prepare; wait until kubelet and API server know of the devices' health and taints.

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
