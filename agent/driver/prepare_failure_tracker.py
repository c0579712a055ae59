"""Tracker of a driver's prepares: classifies and records failures, and reports broken devices.

If a prepare fails because a device is broken, the fault is saved on disk, the device becomes Unhealthy on the
health streams, and its taint is published; then the prepare returns. A hung disk, a stopped engine and an
unreachable API server delay the prepare by 5 s at most. agent.prepare defines the ledger (the
file of results) and the classification.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from agent.driver.ledger_writer import LedgerWriter
from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Health
from agent.model.prepare import DriverFault, ErrorClass, LastPrepareResult, PrepareVerdict
from agent.prepare import prepare_ledger as ledgers
from agent.prepare.classify import PrepareContext, classify, classify_evidence, classify_unhealthy_devices
from agent.prepare.error_tables import ErrorPattern
from agent.prepare.errors import PrepareError
from agent.prepare.evidence import Evidence
from agent.prepare.kubelet_message import kubelet_text
from agent.prepare.prepare_ledger import PrepareLedger, health_without_faults
from agent.system.output import get_logger
from agent.system.timing import random_fraction, read_clocks

FailureEvidence = BaseException | Sequence[Evidence]
"""Evidence of a failed prepare or unprepare: an exception, or pieces of evidence, the outermost first."""

DELIVERY_S: Final = 1.5
"""Longest time that a failed prepare waits until the health of a broken device is delivered [s]."""
TAINT_WAIT_S: Final = 2.0
"""Default of the longest time that a failed prepare waits until a broken device's taint is published [s]."""

EVALUATION_WAIT_S: Final = 2.0
"""Longest time that a failure without a proven cause waits for newer health of the claim's devices [s]."""
RECENT_S: Final = 900.0
"""Age up to which a failed prepare is named in the errors of a pod's other drivers [s].
A cached failure is tried again after ten minutes, and the kubelet retries every minute or so."""
OPEN_CLASSES: Final = frozenset({ErrorClass.UNKNOWN, ErrorClass.TRANSIENT})
"""Error classes of failed prepares whose cause can be a fault that the health engine is about to find."""

log = get_logger(__name__)


class HealthEngine(Protocol):
    """Interface to the health engine for the prepare tracker: device health, delivery of reported faults."""

    @property
    def is_up(self) -> bool:
        """Whether the engine evaluates devices now, so that :meth:`health_of` is not outdated."""

    def health_of(self, device: DeviceRef) -> DeviceHealth | None:
        """Return a device's health; None: the engine does not know the device."""

    def report_faults(self, faults: Sequence[DriverFault]) -> None:
        """Replace all faults that the driver reported. Thread-safe. Never blocks."""

    def wait_delivered(self, faults: Sequence[DriverFault], timeout_s: float) -> bool:
        """Block until all health streams have the health that follows from these faults.

        Returns False on timeout.
        """

    def wait_evaluated(self, devices: Collection[DeviceRef], timeout_s: float) -> None:
        """Block until the devices' health is based on readings newer than this call, or until a timeout."""

    def wait_tainted(self, devices: Collection[DeviceRef], timeout_s: float) -> bool:
        """Publish the current taints of devices at once, and block until that is done.

        Returns False on timeout.
        """


class PrepareFailureTracker:
    """Tracker of one driver's prepares: classifies failures, and records results in a ledger. Thread-safe."""

    def __init__(
        self,
        driver: str,
        directory: Path | None,
        engine: HealthEngine,
        *,
        version: str = "",
        patterns: Sequence[ErrorPattern] = (),
        taint_wait_s: float = TAINT_WAIT_S,
        claims_file: Path | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random_fraction,
    ) -> None:
        """Load the saved ledger. Blocks up to 1.5 s.

        Args:
            driver: Name of the driver.
            directory: Directory of the ledger's file, created at the first write; None: not saved.
            engine: Health engine. It gets the restored faults at once; the health of devices is read only
                when a prepare fails.
            version: Version of the driver; failures cached for another version are retried.
            patterns: Patterns for error texts, tried before the built-in ones.
            taint_wait_s: Longest time that a failed prepare waits until a broken device's taint is published
                [s].
            claims_file: The kubelet's checkpoint, which names the devices of claims that the ledger does not
                know; None: not read.
            clock: Returns the seconds since 1970.
            monotonic: Returns a monotonic time [s].
            jitter: Returns a random number from 0 to 1.
        """
        self.monotonic = monotonic
        self.jitter = jitter
        self._driver = driver
        self._directory = directory
        self._engine = engine
        self._version = version
        self._patterns = tuple(patterns)
        self._taint_wait_s = taint_wait_s
        self._claims_file = claims_file
        self._clock = clock
        self._reporting = threading.Lock()
        self._reported: tuple[DriverFault, ...] = ()
        self._writer = LedgerWriter(driver, directory, version, clock, self._report_faults, monotonic)
        self._writer.restore()
        self._report_faults()

    def close(self, timeout_s: float) -> bool:
        """Save the prepare ledger. Returns False if the write has not ended within ``timeout_s``."""
        return self._writer.close(timeout_s)

    # --- prepares ------------------------------------------------------------------------------------------

    def cached_failure(self, claim: Claim) -> PrepareError | None:
        """Return the cached error of an earlier prepare of the same claim; None: the driver must be called.

        Takes microseconds.
        """
        verdict = ledgers.cached_failure(
            self._writer.ledger,
            claim,
            lambda: self._health_fingerprint(claim),
            self._clock(),
            self._version,
            self.monotonic(),
        )
        return PrepareError(verdict, kubelet_text(verdict)) if verdict else None

    def known_blocker(self, claim: Claim) -> PrepareVerdict | None:
        """Return the classified error with which a prepare of a claim is known to fail.

        None: it may succeed.

        The prepare fails if a failure is cached or a device is Unhealthy. The case of the Unhealthy device is
        recorded as a failed prepare. Driver-reported faults are ignored, because only a prepare can show
        whether they have passed. Takes microseconds.
        """
        if cached := self.cached_failure(claim):
            return cached.verdict
        faults = self.driver_faults()
        known = {device.ref: self._engine_health(device.ref) for device in claim.devices}
        health = {
            ref: health_without_faults(faults, found) for ref, found in known.items() if found is not None
        }
        verdict = classify_unhealthy_devices(PrepareContext(claim, health, engine_up=self._engine.is_up))
        if verdict is None:
            return None
        fingerprint = self._health_fingerprint(claim)

        def record(ledger: PrepareLedger, now_wall_s: float) -> tuple[PrepareLedger, PrepareVerdict]:
            unhealthy = frozenset(verdict.devices)
            return ledgers.with_failure(
                ledger, claim, fingerprint, verdict, now_wall_s, self._version, unhealthy
            )

        self._engine.wait_tainted(verdict.devices, 0)  # only hastens the taints
        return self._writer.update(record)

    def set_patterns(self, patterns: Sequence[ErrorPattern]) -> None:
        """Replace the patterns for texts of prepare errors, for failures from now on. Thread-safe."""
        self._patterns = tuple(patterns)

    def classify(
        self, claim: Claim, evidence: FailureEvidence, patterns: Sequence[ErrorPattern] = ()
    ) -> PrepareVerdict:
        """Classify a failure by its evidence and the health of the claim's devices; records nothing.

        Args:
            patterns: Patterns for error texts, tried before those of the tracker.
        """
        known = {device.ref: self._health(device.ref) for device in claim.devices}
        health = {ref: found for ref, found in known.items() if found is not None}
        context = PrepareContext(
            claim, health, engine_up=self._engine.is_up, patterns=(*patterns, *self._patterns)
        )
        if isinstance(evidence, BaseException):
            return classify(evidence, context)
        return classify_evidence(evidence, context)

    def classify_by_newer_health(
        self,
        claim: Claim,
        verdict: PrepareVerdict,
        evidence: FailureEvidence,
        patterns: Sequence[ErrorPattern] = (),
    ) -> PrepareVerdict:
        """Classify a failure again after a wait for newer health of the claim's devices. Blocks up to 2 s.

        The health engine often finds the fault that made a prepare fail a moment later. If the cause of a
        failure is not proven, this method waits for the fault, so that the kubelet gets one error text
        instead of two.

        Args:
            verdict: Verdict on the failure by the health that is known now.
        """
        if verdict.error_class not in OPEN_CLASSES or not claim.devices or not self._engine.is_up:
            return verdict
        self._engine.wait_evaluated({device.ref for device in claim.devices}, EVALUATION_WAIT_S)
        return self.classify(claim, evidence, patterns)

    def record_failure_and_wait(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Record a failed prepare, and wait until faults of its devices are published. Blocks up to 5 s.

        All health streams then have the health of the broken devices, and the taints are published.

        Args:
            error: Exception of a failure of class unknown; its traceback is logged at the first failure.

        Returns:
            The verdict with the number of failures and the time of the first one.
        """
        verdict = self.record_failure(claim, verdict, error)
        self.wait_delivered([verdict])
        return verdict

    def record_failure(
        self, claim: Claim, verdict: PrepareVerdict, error: BaseException | None = None
    ) -> PrepareVerdict:
        """Record a failed prepare; return its verdict with the number of failures.

        The caller must call :meth:`wait_delivered` later.
        """
        fingerprint, unhealthy = self._health_fingerprint(claim), self._unhealthy_devices(claim)

        def record(ledger: PrepareLedger, now_wall_s: float) -> tuple[PrepareLedger, PrepareVerdict]:
            return ledgers.with_failure(
                ledger, claim, fingerprint, verdict, now_wall_s, self._version, unhealthy
            )

        verdict = self._save_failure(record)
        level = logging.WARNING if verdict.error_class is ErrorClass.UNKNOWN else logging.INFO
        log.log(
            level if verdict.count == 1 else logging.DEBUG,
            "claim %s: prepare failed: %s",
            claim.ref,
            kubelet_text(verdict),
            exc_info=error if level == logging.WARNING else None,
        )
        return verdict

    def record_success(self, claim: Claim) -> None:
        """Record a successful prepare, which ends driver-reported faults of its devices. Never blocks."""
        fingerprint = self._health_fingerprint(claim)
        self._writer.update(
            lambda ledger, now: (ledgers.with_success(ledger, claim, fingerprint, now, self._version), None)
        )
        self._report_faults()

    def end_faults(self, ended: Sequence[DriverFault]) -> None:
        """End driver-reported faults that an operator cleared, or whose device was replaced. Never blocks."""
        self._writer.update(lambda ledger, now: (ledgers.with_ended_faults(ledger, ended, now), None))
        self._report_faults()

    # --- unprepares ----------------------------------------------------------------------------------------

    def unprepare_failed(
        self,
        ref: ClaimRef,
        evidence: FailureEvidence,
        devices: Sequence[ClaimDevice] = (),
        *,
        reads_checkpoint: bool = True,
    ) -> PrepareVerdict | None:
        """Record a failed unprepare, and return the verdict that the driver reports. Blocks up to 7 s.

        Args:
            devices: The claim's devices, used if the ledger has none for the claim. If both have none, the
                claim was prepared before the driver used this tracker, and the kubelet's checkpoint has them.
            reads_checkpoint: Whether the checkpoint is read. False until the driver has declared its devices:
                a device of the host can have the same name.

        Returns:
            Verdict to report. None: the driver must report success, because a device is broken and the pod
            would otherwise never terminate.
        """
        known = ledgers.prepared_devices(self._writer.ledger, ref)
        if reads_checkpoint and not (known or devices):
            known = self._checkpointed_devices(ref)
        claim = Claim(*ref, devices=tuple(ClaimDevice("", *device) for device in known) or tuple(devices))
        verdict = self.classify_by_newer_health(claim, self.classify(claim, evidence), evidence)
        unhealthy = self._unhealthy_devices(claim)
        force_release = verdict.error_class is ErrorClass.FAILED_DEVICE or bool(unhealthy)

        def record(ledger: PrepareLedger, now_wall_s: float) -> tuple[PrepareLedger, PrepareVerdict]:
            ledger, counted = ledgers.with_unprepare_failure(
                ledger, claim, verdict, now_wall_s, self._version, unhealthy
            )
            return (ledgers.with_unprepare(ledger, ref, now_wall_s) if force_release else ledger), counted

        verdict = self._save_failure(record)
        self.wait_delivered([verdict])
        log.warning(
            "claim %s: unprepare failed: %s%s",
            ref,
            kubelet_text(verdict),
            "; the claim is released, because a device is broken" if force_release else "",
        )
        return None if force_release else verdict

    def _checkpointed_devices(self, ref: ClaimRef) -> tuple[DeviceRef, ...]:
        """Return the driver's devices that the kubelet's checkpoint has for a claim. Blocks on the disk."""
        if self._claims_file is None:
            return ()
        from agent.sources.kubelet_files import read_claims_checkpoint  # 1 MiB that few drivers need

        read = read_claims_checkpoint(self._claims_file, read_clocks())
        uses = (use for claim in read.items if claim.ref.uid == ref.uid for use in claim.devices)
        return tuple(use.device for use in uses if use.device.driver == self._driver)

    def unprepared(self, ref: ClaimRef) -> None:
        """Record a successful unprepare. Never blocks."""
        self._writer.update(lambda ledger, now: (ledgers.with_unprepare(ledger, ref, now), None))

    # --- state ---------------------------------------------------------------------------------------------

    def outcomes(self) -> tuple[LastPrepareResult, ...]:
        """Return the outcome of each claim's last prepare or unprepare, the newest first."""
        entries = sorted(
            self._writer.ledger.claims.values(), key=lambda entry: entry.changed_wall_s, reverse=True
        )
        return tuple(entry.outcome for entry in entries)

    def recorded_failures(self, uids: Iterable[str]) -> list[PrepareVerdict]:
        """Return the verdicts on the claims with these UIDs whose last prepare failed, however long ago."""
        claims = self._writer.ledger.claims
        verdicts = (claims[uid].outcome.verdict for uid in uids if uid in claims)
        return [verdict for verdict in verdicts if verdict is not None]

    def recent_failures(self, uids: Iterable[str]) -> list[PrepareVerdict]:
        """Return the verdicts on recently failed prepares of the claims with these UIDs.

        Only the last prepare of each claim counts.
        """
        claims, since_wall_s = self._writer.ledger.claims, self._clock() - RECENT_S
        entries = [claims[uid] for uid in sorted(uids) if uid in claims]
        return [
            entry.outcome.verdict
            for entry in entries
            if entry.outcome.verdict is not None
            and not entry.unprepared_wall_s
            and entry.outcome.at_wall_s >= since_wall_s
            and ledgers.UNPREPARE_EVIDENCE not in entry.outcome.verdict.evidence
        ]

    def driver_faults(self) -> tuple[DriverFault, ...]:
        """Return all driver-reported faults, including recently expired ones (``expired_wall_s`` is set)."""
        return ledgers.expire_entries(
            self._writer.ledger, self._clock(), self.monotonic()
        ).driver_faults.faults

    def _health(self, device: DeviceRef) -> DeviceHealth | None:
        """Return a device's health, including the driver-reported faults that have not expired."""
        health = self._engine_health(device)
        expired = (fault for fault in self.driver_faults() if fault.expired_wall_s)
        return health and health_without_faults(expired, health)

    def _engine_health(self, device: DeviceRef) -> DeviceHealth | None:
        """Return a device's health from the engine; None: the engine is down or does not know the device."""
        return self._engine.health_of(device) if self._engine.is_up else None

    def _unhealthy_devices(self, claim: Claim) -> frozenset[DeviceRef]:
        known = ((device.ref, self._health(device.ref)) for device in claim.devices)
        return frozenset(ref for ref, found in known if found and found.health is Health.UNHEALTHY)

    def _health_fingerprint(self, claim: Claim) -> str:
        faults = self._writer.ledger.driver_faults.faults
        known = (self._engine_health(device.ref) for device in claim.devices)
        return ledgers.health_fingerprint(
            health and health_without_faults(faults, health) for health in known
        )

    # --- delivery ------------------------------------------------------------------------------------------

    def wait_delivered(self, verdicts: Sequence[PrepareVerdict]) -> None:
        """Block until device faults that failed prepares have shown are published. Blocks up to 3.5 s.

        All health streams then have the health of the broken devices, and the taints are published.
        """
        broken = {(device, verdict.code) for verdict in verdicts for device in verdict.devices}
        faults = [
            fault
            for fault in self.driver_faults()
            if not fault.expired_wall_s and (fault.device, fault.code) in broken
        ]
        if faults and self._engine.is_up and not self._engine.wait_delivered(faults, DELIVERY_S):
            log.warning(
                "device %s: fault not delivered to all health streams within %g s; the prepare returns",
                faults[0].subject,
                DELIVERY_S,
            )
        causes = [found for found in verdicts if found.taint or found.error_class is ErrorClass.FAILED_DEVICE]
        tainted = sorted({device for cause in causes for device in cause.devices})
        if tainted and self._engine.is_up and not self._engine.wait_tainted(tainted, self._taint_wait_s):
            log.warning(
                "device %s: taint not published within %g s; the prepare returns, publishing continues",
                tainted[0],
                self._taint_wait_s,
            )

    def _save_failure(
        self, record: Callable[[PrepareLedger, float], tuple[PrepareLedger, PrepareVerdict]]
    ) -> PrepareVerdict:
        """Change the ledger by ``record``, which adds a failed prepare, and report faults to the engine.

        Waits up to 1.5 s for the disk.
        """
        verdict = self._writer.update(record, urgent=True)
        self._report_faults()
        return verdict

    def _report_faults(self) -> None:
        """Report all driver-reported faults to the engine if they have changed."""
        with self._reporting:  # one caller at a time, so that the newest report comes last
            faults = self.driver_faults()
            if faults != self._reported:
                self._reported = faults
                self._engine.report_faults(faults)
