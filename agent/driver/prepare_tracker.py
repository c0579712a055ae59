"""The desk: judges what a driver's prepares raise, remembers it, and sees that everybody agrees on it.

Owns the order for a device that a driver finds broken: it is on the disk, then Unhealthy on the stream, then
offered to be tainted, then the driver's caller hears of it. Neither a hung disk nor a dead engine holds a
prepare up for longer than three seconds. What is remembered and what follows is agent.prepare's.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from agent.driver.ledger_writer import LedgerWriter
from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Health
from agent.model.prepare import DriverFault, ErrorClass, Outcome, PrepareVerdict
from agent.prepare import ledger as books
from agent.prepare.classify import Context, classify, classify_evidence, judge_devices
from agent.prepare.driver_faults import without_faults
from agent.prepare.errors import PrepareError
from agent.prepare.evidence import Evidence
from agent.prepare.ledger import PrepareLedger
from agent.prepare.message import text
from agent.prepare.patterns import Pattern
from agent.system import jitter as dice

Shown = BaseException | Sequence[Evidence]
"""What shows of what kind a failure is: the exception, or what was made of it, the outermost first."""

TELL_S: Final = 1.5
"""How long a failed prepare waits until everybody knows of a broken device [s]."""

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What knows how the devices are."""

    @property
    def is_up(self) -> bool:
        """Whether it looks at devices and is heard."""

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """What it says of a device now; None: nothing."""

    def tell(self, faults: Sequence[DriverFault]) -> None:
        """All devices that the driver found broken; from any thread, returns at once."""

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        """Blocks until these devices are Unhealthy for everybody who asks; False if that takes longer."""


class PrepareTracker:
    """Where the prepares of a driver are judged and remembered. From any thread."""

    def __init__(
        self,
        driver: str,
        directory: Path | None,
        engine: Engine,
        *,
        version: str = "",
        patterns: Sequence[Pattern] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = dice.random_fraction,
    ) -> None:
        """
        Args:
            driver: Its name.
            directory: Of the file; made when there is something to be kept. None: nothing is kept.
            engine: Told at once what is remembered; asked when something fails, not before.
            version: Of the driver: what one version could never do, the next may.
            patterns: Of the texts of failures, looked at before our own.
            clock: Seconds since 1970.
            monotonic: Seconds that pass.
            jitter: A number from 0 to 1.
        """
        self.monotonic = monotonic
        self.jitter = jitter
        self._driver = driver
        self._directory = directory
        self._engine = engine
        self._version = version
        self._patterns = tuple(patterns)
        self._clock = clock
        self._telling = threading.Lock()
        self._heard: tuple[DriverFault, ...] = ()
        self._scribe = LedgerWriter(driver, directory, version, clock, self._tell)
        self._scribe.restore()
        self._tell()

    def close(self, timeout_s: float) -> bool:
        """Writes what is not yet written. False if it is not kept in the end, or not in time."""
        return self._scribe.close(timeout_s)

    # --- a prepare -----------------------------------------------------------------------------------------

    def cached_failure(self, claim: Claim) -> PrepareError | None:
        """The answer, if the same question had one that still holds. Takes microseconds."""
        verdict = books.cached_failure(
            self._scribe.book, claim, lambda: self._generation(claim), self._clock(), self._version
        )
        return PrepareError(verdict, text(verdict)) if verdict else None

    def known_blocker(self, claim: Claim) -> PrepareVerdict | None:
        """Why a claim need not be tried; None: nothing is known against it. Takes microseconds.

        The answer of a while ago, or a device that is Unhealthy; then it is remembered as a try that failed.
        What an earlier prepare found of a device stops nobody: whether that is over only a prepare can tell.
        """
        if answer := self.cached_failure(claim):
            return answer.verdict
        told = self.told()
        known = {device.ref: self._said(device.ref) for device in claim.devices}
        health = {ref: without_faults(told, found) for ref, found in known.items() if found is not None}
        verdict = judge_devices(Context(claim, health, engine_up=self._engine.is_up))
        if verdict is None:
            return None
        generation = self._generation(claim)

        def note(book: PrepareLedger, now_wall_s: float) -> tuple[PrepareLedger, PrepareVerdict]:
            return books.failed(
                book, claim, generation, verdict, now_wall_s, self._version, frozenset(verdict.devices)
            )

        return self._scribe.change(note)

    def judge(self, claim: Claim, shown: Shown, patterns: Sequence[Pattern] = ()) -> PrepareVerdict:
        """Of what kind a failure is, by what shows it and by what is known of the claim's devices."""
        known = {device.ref: self._known(device.ref) for device in claim.devices}
        health = {ref: found for ref, found in known.items() if found is not None}
        context = Context(claim, health, engine_up=self._engine.is_up, patterns=(*patterns, *self._patterns))
        return (
            classify(shown, context)
            if isinstance(shown, BaseException)
            else classify_evidence(shown, context)
        )

    def failed(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Has it remembered and told; blocks for three seconds at most, so call it in a thread.

        Args:
            error: Of which nobody may know what it is: then the log has where it came from, once.

        Returns:
            The verdict, with how often it was so and since when.
        """
        verdict = self.note_failed(claim, verdict, error)
        self.wait_delivered([verdict])
        return verdict

    def note_failed(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """As :meth:`failed`, for one of several: :meth:`wait_heard` of all of them comes next."""
        generation, held = self._generation(claim), self._held(claim)

        def note(book: PrepareLedger, now_wall_s: float) -> tuple[PrepareLedger, PrepareVerdict]:
            return books.failed(book, claim, generation, verdict, now_wall_s, self._version, held)

        verdict = self._remember(note)
        level = logging.INFO
        if verdict.error_class is ErrorClass.UNKNOWN:
            level = logging.WARNING
        log.log(
            level if verdict.count == 1 else logging.DEBUG,
            "claim %s could not be prepared: %s",
            claim.ref,
            text(verdict),
            exc_info=error if level == logging.WARNING else None,
        )
        return verdict

    def succeeded(self, claim: Claim) -> None:
        """The claim is prepared, and so its devices work. Returns at once."""
        generation = self._generation(claim)
        self._scribe.change(
            lambda book, now: (books.succeeded(book, claim, generation, now, self._version), None)
        )
        self._tell()

    # --- an unprepare --------------------------------------------------------------------------------------

    def unprepare_failed(
        self, ref: ClaimRef, shown: Shown, devices: Sequence[ClaimDevice] = ()
    ) -> PrepareVerdict | None:
        """What to say of a claim that could not be unprepared; blocks as :meth:`failed` does.

        Args:
            devices: The claim's; those that it was prepared with count, if they are remembered.

        Returns:
            None: let it succeed. Nothing is left to be undone on a device that is broken, and the pod would
            never end.
        """
        known = tuple(ClaimDevice("", *device) for device in books.devices_of(self._scribe.book, ref))
        claim = Claim(*ref, devices=known or tuple(devices))
        verdict = self.judge(claim, shown)
        held = self._held(claim)
        let_go = verdict.error_class is ErrorClass.FAILED_DEVICE or bool(held)

        def note(book: PrepareLedger, now_wall_s: float) -> tuple[PrepareLedger, PrepareVerdict]:
            book, counted = books.unprepare_failed(book, claim, verdict, now_wall_s, self._version, held)
            return (books.unprepared(book, ref, now_wall_s) if let_go else book), counted

        verdict = self._remember(note)
        self.wait_delivered([verdict])
        log.warning(
            "claim %s could not be unprepared%s: %s",
            ref,
            ", and is let go: a device of it is broken" if let_go else "",
            text(verdict),
        )
        return None if let_go else verdict

    def unprepared(self, ref: ClaimRef) -> None:
        """The claim is not prepared any more. Returns at once."""
        self._scribe.change(lambda book, now: (books.unprepared(book, ref, now), None))

    # --- what is known -------------------------------------------------------------------------------------

    def outcomes(self) -> tuple[Outcome, ...]:
        """How the last prepare of each claim ended, the newest first."""
        kept = sorted(self._scribe.book.claims.values(), key=lambda one: one.at_wall_s, reverse=True)
        return tuple(one.outcome for one in kept)

    def told(self) -> tuple[DriverFault, ...]:
        """Devices that the driver found broken, those too that are excused by now."""
        return books.age(self._scribe.book, self._clock()).told.faults

    def _known(self, device: DeviceRef) -> DeviceHealth | None:
        """What is known of a device; what the driver told of it once and takes back proves nothing."""
        health = self._said(device)
        return health and without_faults((one for one in self.told() if one.excused_wall_s), health)

    def _said(self, device: DeviceRef) -> DeviceHealth | None:
        """What the engine says of a device; what it said before it went down is no longer known."""
        return self._engine.health_of(device) if self._engine.is_up else None

    def _held(self, claim: Claim) -> frozenset[DeviceRef]:
        known = ((device.ref, self._known(device.ref)) for device in claim.devices)
        return frozenset(ref for ref, found in known if found and found.health is Health.UNHEALTHY)

    def _generation(self, claim: Claim) -> str:
        told = self._scribe.book.told.faults
        known = (self._said(device.ref) for device in claim.devices)
        return books.generation_of(health and without_faults(told, health) for health in known)

    # --- telling -------------------------------------------------------------------------------------------

    def wait_delivered(self, verdicts: Sequence[PrepareVerdict]) -> None:
        """Returns when everybody who must knows of the devices that are broken, or time is over."""
        broken = {(device, verdict.code) for verdict in verdicts for device in verdict.devices}
        faults = [one for one in self.told() if not one.excused_wall_s and (one.device, one.code) in broken]
        if faults and self._engine.is_up and not self._engine.wait_delivered(faults, TELL_S):
            log.warning("%s: not everybody heard of it within %g s", faults[0].subject, TELL_S)

    def _remember(
        self, note: Callable[[PrepareLedger, float], tuple[PrepareLedger, PrepareVerdict]]
    ) -> PrepareVerdict:
        """A failure, on the disk if that takes it in time, and on its way to the engine."""
        verdict = self._scribe.change(note, urgent=True)
        self._tell()
        return verdict

    def _tell(self) -> None:
        """The engine hears what is new. One at a time, so that the newest is the last that it hears."""
        with self._telling:
            told = self.told()
            if told != self._heard:
                self._heard = told
                self._engine.tell(told)
