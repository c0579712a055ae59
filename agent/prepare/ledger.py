"""Ledger of a driver's prepares: each claim's last outcome, and devices that the driver found broken.

Decides when a repeated prepare gets its last failure from the cache. Pure: every function returns a new
ledger. Times are wall clock, because the ledger outlives the process; a time in the future means that the
clock was set back, and counts as expired.

Repetition never makes a failure worse: the verdict follows from its evidence, only its count grows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import inf
from typing import Final, NamedTuple

from agent.model.claim import Claim, ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Severity
from agent.model.prepare import ErrorClass, Outcome, PrepareVerdict
from agent.prepare import driver_faults as faults
from agent.prepare.driver_faults import DriverFaults

CLAIMS_MAX: Final = 1024
"""Most claims in a ledger, many times those of a node; the oldest is dropped."""
UNPREPARED_KEPT_S: Final = 86_400.0
"""Time that the ledger keeps a claim after its unprepare [s]."""
DRIVER_FAULT_CACHE_S: Final = 60
"""Time that a failure is cached which only the driver's report shows [s]. The kubelet retries after
60 to 90 s; then the driver is called again, because nothing else can show that the device works."""
CACHED_CLASSES: Final = frozenset({ErrorClass.BAD_CONFIG, ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT})
"""Classes of failures that a repeated prepare gets from the cache; other classes need a new try."""

TEXT_MAX: Final = 2000
"""Most characters of each text of a verdict."""
TEXTS_MAX: Final = 16
"""Most lines of evidence of a verdict."""
HEALTH_FINGERPRINT_MAX: Final = 120

UNPREPARING: Final = "while unpreparing"
"""First line of evidence in the verdict of a failed unprepare."""


class LedgerEntry(NamedTuple):
    """Outcome of one claim's last prepare."""

    outcome: Outcome
    version: str
    """Version of the driver that prepared the claim."""
    unprepared_wall_s: float = 0.0
    """Time of the unprepare; 0: the claim is still prepared."""

    @property
    def changed_wall_s(self) -> float:
        """Time of the claim's last prepare or unprepare."""
        return max(self.outcome.at_wall_s, self.unprepared_wall_s)


@dataclass(frozen=True, slots=True)
class PrepareLedger:
    """All claims and driver-reported faults of one driver. The default is the ledger of a first start."""

    claims: Mapping[str, LedgerEntry] = field(default_factory=dict)
    """Ledger entries by the UID of their claim; at most :data:`CLAIMS_MAX`."""
    driver_faults: DriverFaults = DriverFaults()  # noqa: RUF009  # a tuple


# --- queries -----------------------------------------------------------------------------------------------


def cached_failure(
    ledger: PrepareLedger,
    claim: Claim,
    health_fingerprint: str | Callable[[], str],
    now_wall_s: float,
    version: str,
) -> PrepareVerdict | None:
    """Return the cached verdict of the claim's last failed prepare; None: the driver must be called.

    A failure is cached only for the same request: the claim has the same allocation and parameters, the
    driver has the same version and, where a device is to blame, the state of the devices has not changed.

    Args:
        health_fingerprint: State of the claim's devices, see :func:`health_fingerprint`, or a function that
            returns it and is called only if it matters.
    """
    entry = ledger.claims.get(claim.uid)
    if entry is None or (verdict := entry.outcome.verdict) is None:
        return None
    if verdict.error_class not in CACHED_CLASSES:
        return None
    if not 0 <= now_wall_s - verdict.last_wall_s < verdict.sticky_s or entry.version != version:
        return None
    if entry.outcome.fingerprint != claim.fingerprint:
        return None
    if verdict.error_class is ErrorClass.FAILED_DEVICE:
        health = health_fingerprint if isinstance(health_fingerprint, str) else health_fingerprint()
        return verdict if entry.outcome.generation == _generation(ledger, claim, health) else None
    return verdict


def health_fingerprint(devices: Iterable[DeviceHealth | None]) -> str:
    """Return a short text that changes only if the devices' health changes, not at a restart.

    Args:
        devices: In the order of the claim, without driver-reported faults; None: unknown to the engine.
    """
    text = " ".join(map(_device_fingerprint, devices))
    if len(text) <= HEALTH_FINGERPRINT_MAX:
        return text
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _device_fingerprint(device: DeviceHealth | None) -> str:
    if device is None:
        return "?"
    codes = {cause.code for cause in device.causes if cause.severity > Severity.INFO}
    return ":".join([device.health.name.lower(), *sorted(codes)])


def _generation(ledger: PrepareLedger, claim: Claim, health: str) -> str:
    """Return the health fingerprint with the active driver-reported faults of the claim's devices."""
    active = {(fault.device, fault.code) for fault in ledger.driver_faults.faults if not fault.expired_wall_s}
    codes = sorted(code for device, code in active if device in _refs(claim))
    # this separator is in the ledgers on disk
    return " told:".join([health, *codes])  # verbatim


def devices_of(ledger: PrepareLedger, claim: ClaimRef) -> tuple[DeviceRef, ...]:
    """Return the devices that a claim had at its last prepare."""
    entry = ledger.claims.get(claim.uid)
    return entry.outcome.devices if entry else ()


# --- events of a claim -------------------------------------------------------------------------------------


def succeeded(
    ledger: PrepareLedger, claim: Claim, health_fingerprint: str, now_wall_s: float, version: str = ""
) -> PrepareLedger:
    """Record a successful prepare; driver-reported faults of the claim's devices are cleared."""
    devices = _refs(claim)
    outcome = Outcome(claim.ref, claim.fingerprint, health_fingerprint, devices, now_wall_s, None)
    ledger = replace(ledger, driver_faults=faults.clear(ledger.driver_faults, devices, now_wall_s))
    return _with_entry(ledger, LedgerEntry(outcome, version), now_wall_s)


def failed(
    ledger: PrepareLedger,
    claim: Claim,
    health_fingerprint: str,
    verdict: PrepareVerdict,
    now_wall_s: float,
    version: str = "",
    unhealthy: Collection[DeviceRef] = (),
) -> tuple[PrepareLedger, PrepareVerdict]:
    """Record a failed prepare. Returns the verdict with its count and its first time.

    Args:
        health_fingerprint: State of the claim's devices, see :func:`health_fingerprint`.
        unhealthy: Devices that are Unhealthy already: no fault is recorded for them.
    """
    verdict = _bounded(verdict)
    known = faults.record(ledger.driver_faults, claim.ref, verdict, now_wall_s, unhealthy)
    ledger = replace(ledger, driver_faults=known)
    verdict = _with_count(ledger, claim, verdict, now_wall_s)
    generation = _generation(ledger, claim, health_fingerprint)
    outcome = Outcome(claim.ref, claim.fingerprint, generation, _refs(claim), now_wall_s, verdict)
    return _with_entry(ledger, LedgerEntry(outcome, version), now_wall_s), verdict


def unprepared(ledger: PrepareLedger, claim: ClaimRef, now_wall_s: float) -> PrepareLedger:
    """Record that a claim was unprepared. The outcome of the last prepare is kept for
    :data:`UNPREPARED_KEPT_S`."""
    entry = ledger.claims.get(claim.uid)
    if entry is None:
        return ledger
    return _with_entry(ledger, entry._replace(unprepared_wall_s=now_wall_s), now_wall_s)


def unprepare_failed(
    ledger: PrepareLedger,
    claim: Claim,
    verdict: PrepareVerdict,
    now_wall_s: float,
    version: str = "",
    unhealthy: Collection[DeviceRef] = (),
) -> tuple[PrepareLedger, PrepareVerdict]:
    """Record a failed unprepare; a later prepare never gets this failure from the cache.

    Args:
        claim: The claim with the devices of its prepare.
    """
    verdict = replace(verdict, evidence=(UNPREPARING, *verdict.evidence), sticky_s=0)
    return failed(ledger, claim, "", verdict, now_wall_s, version, unhealthy)


def _refs(claim: Claim) -> tuple[DeviceRef, ...]:
    return tuple(dict.fromkeys(device.ref for device in claim.devices))


def _bounded(verdict: PrepareVerdict) -> PrepareVerdict:
    return replace(
        verdict,
        summary=verdict.summary[:TEXT_MAX],
        detail=verdict.detail[:TEXT_MAX],
        advice=verdict.advice[:TEXT_MAX],
        evidence=tuple(text[:TEXT_MAX] for text in verdict.evidence[:TEXTS_MAX]),
    )


def _with_count(
    ledger: PrepareLedger, claim: Claim, verdict: PrepareVerdict, now_wall_s: float
) -> PrepareVerdict:
    entry = ledger.claims.get(claim.uid)
    before = entry.outcome.verdict if entry else None
    first_wall_s, count = now_wall_s, 1
    if entry and before and entry.outcome.fingerprint == claim.fingerprint and _is_same(before, verdict):
        first_wall_s, count = before.first_wall_s, before.count + 1
    sticky_s, known = verdict.sticky_s, ledger.driver_faults
    if verdict.devices and all(faults.is_active(known, device, verdict.code) for device in verdict.devices):
        sticky_s = min(sticky_s, DRIVER_FAULT_CACHE_S)
    return replace(verdict, first_wall_s=first_wall_s, last_wall_s=now_wall_s, count=count, sticky_s=sticky_s)


def _is_same(before: PrepareVerdict, verdict: PrepareVerdict) -> bool:
    return (before.error_class, before.code) == (verdict.error_class, verdict.code)


# --- expiry and merging ------------------------------------------------------------------------------------


def expire(ledger: PrepareLedger, now_wall_s: float) -> PrepareLedger:
    """Return the ledger with old claims removed and driver-reported faults expired that reached their
    limit."""
    known = faults.expire(ledger.driver_faults, now_wall_s)
    claims = {uid: entry for uid, entry in ledger.claims.items() if not _is_expired(entry, now_wall_s)}
    if known == ledger.driver_faults and len(claims) == len(ledger.claims):
        return ledger
    return PrepareLedger(claims, known)


def _is_expired(entry: LedgerEntry, now_wall_s: float) -> bool:
    return bool(entry.unprepared_wall_s) and abs(now_wall_s - entry.unprepared_wall_s) >= UNPREPARED_KEPT_S


def merge(mine: PrepareLedger, theirs: PrepareLedger, now_wall_s: float) -> PrepareLedger:
    """Merge two ledgers, with the newest entry of each claim.

    During a rolling update two instances of a driver share one file.
    """
    claims = dict(theirs.claims)
    for uid, entry in mine.claims.items():
        other = claims.get(uid)
        if other is None or _recency(entry, now_wall_s) >= _recency(other, now_wall_s):
            claims[uid] = entry
    known = faults.merge(mine.driver_faults, theirs.driver_faults)
    return expire(PrepareLedger(_newest(claims, now_wall_s), known), now_wall_s)


def _with_entry(ledger: PrepareLedger, entry: LedgerEntry, now_wall_s: float) -> PrepareLedger:
    claims = {**ledger.claims, entry.outcome.claim.uid: entry}
    return expire(replace(ledger, claims=_newest(claims, now_wall_s)), now_wall_s)


def _newest(claims: Mapping[str, LedgerEntry], now_wall_s: float) -> Mapping[str, LedgerEntry]:
    if len(claims) <= CLAIMS_MAX:
        return claims
    ranked = sorted(claims.items(), key=lambda item: _recency(item[1], now_wall_s), reverse=True)
    return dict(ranked[:CLAIMS_MAX])


def _recency(entry: LedgerEntry, now_wall_s: float) -> float:
    """Return the sort key of a ledger entry, greater for newer ones; a time in the future is the oldest."""
    return entry.changed_wall_s if entry.changed_wall_s <= now_wall_s else -inf
