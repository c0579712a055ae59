"""What is done with a claim: it is fetched, then prepared by the driver, or unprepared.

Each claim is worked on in a thread of its own. Who may call the driver when, and what follows from a failure,
are agent.serve.dra_plugin.serialize_lock's and the desk's.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from agent.driver.prepare_tracker import PrepareTracker
from agent.embed.callback_runner import ENDED, CallbackRunner, call_in_thread
from agent.embed.monitor import Monitor
from agent.model.claim import Claim, ClaimDevice, ClaimRef
from agent.model.prepare import PrepareVerdict
from agent.prepare.errors import DriverError, PrepareError, TransientError
from agent.prepare.message import text
from agent.prepare.runners import run_plain
from agent.prepare.steps import attempt
from agent.serve.dra_plugin.in_flight import Kind
from agent.serve.dra_plugin.result import PreparedDevice, check_prepared
from agent.serve.dra_plugin.serialize_lock import SerializeLock
from agent.serve.dra_plugin.server import SHUTTING_DOWN


class Driver(Protocol):
    """What a driver does with claims. Each may be plain, or async and of the loop that starts the server."""

    def prepare(self, claim: Claim) -> Sequence[PreparedDevice] | Awaitable[Sequence[PreparedDevice]]:
        """Makes the claim's devices ready. Called again with the same claim, it gives the same answer."""

    def unprepare(self, ref: ClaimRef) -> Awaitable[None] | None:
        """Undoes that; of a claim that is not prepared there is nothing to undo."""


class PrepareWorker:
    """What a run of a claim does: everything of it in one thread of its own, which a hung driver may keep."""

    def __init__(
        self,
        monitor: Monitor,
        driver: Driver,
        claims: Callable[[ClaimRef], Claim | Awaitable[Claim]],
        serial: SerializeLock | None,
    ) -> None:
        self.stopping = False
        """Nothing may begin any more."""
        self.host = CallbackRunner()
        """Where the driver's functions run."""
        self._monitor = monitor
        self._driver = driver
        self._claims = claims
        self._serial = serial
        self._needs_loop = any(map(inspect.iscoroutinefunction, (driver.prepare, driver.unprepare, claims)))

    def begin(self, host: CallbackRunner) -> None:
        """The driver's functions run where this host says, from now on."""
        self.host = host
        self.stopping = False

    async def run(self, kind: Kind, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        """Prepares or unprepares a claim. Raises PrepareError.

        A turn is waited for until ``until_s``, as the loop's time, which is that of :func:`time.monotonic`.
        """
        work = self._prepare if kind is Kind.PREPARE else self._unprepare
        return await call_in_thread(lambda: work(ref, until_s), name=f"dh-{kind}")

    def judge(self, ref: ClaimRef, error: Exception) -> PrepareVerdict:
        """Of what kind a failure is that the driver has not seen."""
        return self._monitor.tracker.judge(Claim(*ref), error)

    def refusal(self) -> str:
        """Why nothing can be prepared now; empty: it can."""
        if self.stopping:
            return SHUTTING_DOWN
        if self._needs_loop and self.host.has_ended:
            return ENDED
        return ""

    def _prepare(self, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        desk = self._monitor.tracker
        began = desk.monotonic()
        claim = run_plain(
            attempt(_Fetching(desk), self._recorded(ref), began_s=began), lambda: self._fetch(ref)
        )
        return run_plain(attempt(desk, claim, began_s=began), lambda: self._call_prepare(claim, until_s))

    def _recorded(self, ref: ClaimRef) -> Claim:
        """What is known of the claim before it is fetched: the devices that it had the last time."""
        last = next((one for one in self._monitor.tracker.outcomes() if one.claim.uid == ref.uid), None)
        return Claim(
            *ref, devices=tuple(ClaimDevice("", *device) for device in (last.devices if last else ()))
        )

    def _fetch(self, ref: ClaimRef) -> Claim:
        self._check_stopping(ref)
        claim = self.host.call(self._claims, ref)
        if not isinstance(claim, Claim):
            raise DriverError(
                f"claims returned {type(claim).__name__}, not a Claim", code="driver.bug.answer"
            )
        if claim.ref != ref:
            raise TransientError(
                f"claims returned {claim.ref} of uid {claim.uid}, not {ref} of uid {ref.uid}",
                code="claim.uid_mismatch",
            )
        return claim

    def _call_prepare(self, claim: Claim, until_s: float) -> tuple[PreparedDevice, ...]:
        with self._turn(claim.ref, until_s):
            answer = self.host.call(self._driver.prepare, claim)
        return check_prepared(claim, answer)

    def _unprepare(self, ref: ClaimRef, until_s: float) -> tuple[PreparedDevice, ...]:
        desk, failure = self._monitor.tracker, None
        with self._turn(ref, until_s):
            try:
                self.host.call(self._driver.unprepare, ref)
            except Exception as error:
                failure = error
        if failure is None:
            desk.unprepared(ref)
        elif (verdict := desk.unprepare_failed(ref, failure)) is not None:
            raise PrepareError(verdict, text(verdict)) from failure
        return ()

    @contextmanager
    def _turn(self, ref: ClaimRef, until_s: float) -> Iterator[None]:
        """Holds the turn for a call of the driver's. Raises PrepareError if it does not come."""
        with ExitStack() as turn:
            if self._serial is not None:
                try:
                    turn.enter_context(self._serial.hold(until_s))
                except (TransientError, OSError) as error:
                    raise self._unbegun(ref, error) from error
            self._check_stopping(ref)
            yield

    def _check_stopping(self, ref: ClaimRef) -> None:
        """Lets nothing begin, or be tried again, when the server has ended."""
        if self.stopping:
            raise self._unbegun(ref, TransientError(SHUTTING_DOWN, code="driver.shutting_down"))

    def _unbegun(self, ref: ClaimRef, error: Exception) -> PrepareError:
        """Why the driver was not called: nothing of the claim's, so nobody tries again or remembers it."""
        verdict = self.judge(ref, error)
        return PrepareError(verdict, text(verdict))


class _Fetching:
    """The desk while a claim is fetched: to have it is no success yet."""

    def __init__(self, desk: PrepareTracker) -> None:
        self._desk = desk
        self.judge = desk.judge
        self.failed = desk.failed
        self.monotonic = desk.monotonic
        self.jitter = desk.jitter

    def cached_failure(self, claim: Claim) -> None:
        """Nothing: the claim may be another by now."""

    def succeeded(self, claim: Claim) -> None:
        """It has still to be prepared."""
