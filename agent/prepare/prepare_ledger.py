"""Ledger of a driver's prepares: the last result of each claim, and faults that the driver reported.

The module decides when a repeated prepare gets the last failure from the cache. The functions are pure: each
returns a new ledger. Times are wall clock, because the ledger outlives the process; a time in the future (the
clock was set back) counts as expired. Records of this run also have their monotonic time, and their age does
not change with a step of the wall clock.

The module also has the faults of devices that a driver reported when it failed to prepare a claim.

The health engine cannot verify what only the driver saw. So a fault ends when the driver prepares the device
again, or after a time limit, so that a prepare tries the device. One fault is kept per device and code.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import inf
from typing import Final, NamedTuple

from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.health.verdict import kubelet_message
from agent.model.claim import Claim, ClaimDevice, ClaimRef, DeviceRef
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.prepare import DriverFault, ErrorClass, LastPrepareResult, PrepareVerdict, Scope
from agent.prepare.failure_kinds import failure_kind

FAULT_LIMIT_S: Final = 600.0
"""Time after which a driver-reported fault expires [s]."""
EXPIRED_KEPT_S: Final = 3600.0
"""Time for which an expired fault is kept, so that clients of the agent see its end [s]."""
FAULTS_MAX: Final = 256
"""Largest number of faults of one driver that are kept; expired ones are dropped first, then the oldest."""


class DriverFaults(NamedTuple):
    """Active and expired faults that one driver reported while it prepared claims."""

    faults: tuple[DriverFault, ...] = ()
    """Active and expired faults, sorted by their number."""
    next_number: int = 1
    """Number that the next new fault gets."""
    reported_mono_s: Mapping[tuple[DeviceRef, str], float] = {}
    """Monotonic times of the faults that were reported in this run [s], by device and code; not stored."""


def add_faults(
    known: DriverFaults,
    claim: ClaimRef,
    verdict: PrepareVerdict,
    now_wall_s: float,
    unhealthy: Collection[DeviceRef],
) -> DriverFaults:
    """Add a fault for each device that a failed prepare shows to be Unhealthy or Unknown.

    Args:
        verdict: Verdict on the failed prepare of ``claim``.
        unhealthy: Devices that the health engine reports Unhealthy: no fault is added for these devices.
    """
    is_broken = verdict.error_class is ErrorClass.FAILED_DEVICE
    health = Health.UNHEALTHY if is_broken else verdict.health
    if health is None or health is Health.HEALTHY:
        return known
    blamed = [device for device in dict.fromkeys(verdict.devices) if device not in unhealthy]
    new_devices = [device for device in blamed if not has_active_fault(known, device, verdict.code)]
    added = [
        DriverFault(
            number,
            device,
            verdict.code,
            verdict.summary,
            verdict.advice,
            now_wall_s,
            claim,
            health=health,
            keep_away=is_broken or verdict.taint is not None,
            repair=verdict.repair,
        )
        for number, device in enumerate(new_devices, known.next_number)
    ]
    # A new number for an expired fault: a reader must not take it for the one that ended.
    replaced = {_key(fault) for fault in added}
    others = [fault for fault in known.faults if _key(fault) not in replaced]
    mono_s = {key: at for key, at in known.reported_mono_s.items() if key not in replaced}
    return DriverFaults(_keep_newest_faults([*others, *added]), known.next_number + len(added), mono_s)


def has_active_fault(known: DriverFaults, device: DeviceRef, code: str) -> bool:
    """Return True if a driver-reported fault of the device with this code has not expired."""
    return any(_key(fault) == (device, code) and not fault.expired_wall_s for fault in known.faults)


def expire_faults_of_devices(
    known: DriverFaults, devices: Collection[DeviceRef], now_wall_s: float
) -> DriverFaults:
    """Mark the driver-reported faults of ``devices`` as expired, because the driver has prepared the devices.

    Faults of the driver itself, such as a fault of its state file, expire on all devices.
    """
    return known._replace(
        faults=tuple(
            fault._replace(expired_wall_s=now_wall_s)
            if (fault.device in devices or _concerns_driver(fault)) and not fault.expired_wall_s
            else fault
            for fault in known.faults
        )
    )


def expire_faults(known: DriverFaults, ended: Collection[DriverFault], now_wall_s: float) -> DriverFaults:
    """Mark the driver-reported faults ``ended`` as expired.

    The faults are found by their numbers.
    """
    numbers = {(fault.number, fault.reported_wall_s) for fault in ended}
    return known._replace(
        faults=tuple(
            fault._replace(expired_wall_s=now_wall_s)
            if (fault.number, fault.reported_wall_s) in numbers and not fault.expired_wall_s
            else fault
            for fault in known.faults
        )
    )


def _concerns_driver(fault: DriverFault) -> bool:
    kind = failure_kind(fault.code, ErrorClass.PERMANENT)
    return fault.health is Health.UNKNOWN and kind.scope is Scope.DRIVER


def expire_old_faults(
    known: DriverFaults, now_wall_s: float, now_mono_s: float | None = None
) -> DriverFaults:
    """Mark driver-reported faults that are older than :data:`FAULT_LIMIT_S` as expired.

    A fault of an earlier run whose time is further in the future, because the clock was set back, expires
    too. Faults that expired more than :data:`EXPIRED_KEPT_S` ago are dropped.

    Args:
        now_mono_s: Monotonic time [s]; None: faults of this run do not expire.
    """
    faults = []
    for fault in known.faults:
        if not fault.expired_wall_s and _remaining_s(known, fault, now_wall_s, now_mono_s) <= 0:
            faults.append(fault._replace(expired_wall_s=now_wall_s))
        elif not fault.expired_wall_s or abs(now_wall_s - fault.expired_wall_s) < EXPIRED_KEPT_S:
            faults.append(fault)
    return known._replace(faults=tuple(faults))


def _remaining_s(
    known: DriverFaults, fault: DriverFault, now_wall_s: float, now_mono_s: float | None
) -> float:
    """Return the time until an active fault expires [s]; at most 0: it expires now."""
    reported_mono_s = known.reported_mono_s.get(_key(fault))
    if reported_mono_s is not None:
        return inf if now_mono_s is None else reported_mono_s + FAULT_LIMIT_S - now_mono_s
    age_s = now_wall_s - fault.reported_wall_s
    return 0.0 if age_s <= -FAULT_LIMIT_S else FAULT_LIMIT_S - age_s


def next_expiry_wall_s(
    known: DriverFaults, now_wall_s: float, now_mono_s: float | None = None
) -> float | None:
    """Return the wall-clock time at which the next driver-reported fault expires; None: none is active.

    A fault of an earlier run whose time is :data:`FAULT_LIMIT_S` in the future, because the clock was set
    back, expires now.
    """
    active = (fault for fault in known.faults if not fault.expired_wall_s)
    remaining = (_remaining_s(known, fault, now_wall_s, now_mono_s) for fault in active)
    return min((now_wall_s + remaining_s for remaining_s in remaining), default=None)


def merge_faults(mine: DriverFaults, theirs: DriverFaults, now_wall_s: float) -> DriverFaults:
    """Merge the faults that two instances of a driver reported.

    The newest fault of each device and code stays; a fault with a time in the future counts as oldest. A
    fault is expired if it is expired in either instance.
    Faults of ``mine`` get new numbers where ``theirs`` has the same number.
    """
    found = {_key(fault): fault for fault in theirs.faults}
    mine_keys = set(map(_key, mine.faults))
    mono_s = {key: at for key, at in mine.reported_mono_s.items() if key in mine_keys}
    taken = {fault.number for fault in theirs.faults}
    next_number = max(mine.next_number, theirs.next_number)
    for fault in mine.faults:
        other = found.get(_key(fault))
        if other and other.reported_wall_s == fault.reported_wall_s:
            expired_wall_s = max(other.expired_wall_s, fault.expired_wall_s)
            found[_key(fault)] = other._replace(expired_wall_s=expired_wall_s)
        elif other is None or _past(other.reported_wall_s, now_wall_s) < _past(
            fault.reported_wall_s, now_wall_s
        ):
            number = fault.number
            if number in taken:
                number, next_number = next_number, next_number + 1
            taken.add(number)
            found[_key(fault)] = fault._replace(number=number)
        else:
            mono_s.pop(_key(fault), None)
    return DriverFaults(_keep_newest_faults(found.values()), next_number, mono_s)


def health_without_faults(faults: Iterable[DriverFault], device: DeviceHealth) -> DeviceHealth:
    """Return a device's health without the driver-reported ``faults``; faults that rules found stay.

    Args:
        faults: Faults that one driver reported.
        device: Device of the driver; or a host device, which a driver without declared devices serves.
    """
    codes = {
        fault.code
        for fault in faults
        if (device.driver or fault.device.driver, *fault.device[1:]) == (fault.device.driver, *device.key[1:])
    }
    rest = tuple(cause for cause in device.causes if not (cause.driver_reported and cause.code in codes))
    if len(rest) == len(device.causes):
        return device
    worst = max((cause.severity for cause in rest), default=Severity.OK)
    return device._replace(
        health=HEALTH_OF_SEVERITY[worst], severity=worst, causes=rest, message=kubelet_message(rest)
    )


def _key(fault: DriverFault) -> tuple[DeviceRef, str]:
    return (fault.device, fault.code)


def _keep_newest_faults(faults: Iterable[DriverFault]) -> tuple[DriverFault, ...]:
    ranked = sorted(faults, key=lambda fault: (bool(fault.expired_wall_s), -fault.reported_wall_s))
    return tuple(sorted(ranked[:FAULTS_MAX], key=lambda fault: fault.number))


# --- the ledger --------------------------------------------------------------------------------------------

CLAIMS_MAX: Final = 1024
"""Largest number of claims in a ledger, many times those of a Kubernetes node; the oldest is dropped."""
UNPREPARED_KEPT_S: Final = 86_400.0
"""Time for which the ledger keeps a claim after its unprepare [s]."""
DRIVER_FAULT_CACHE_S: Final = 60
"""Time for which a failure that only the driver reported is cached [s].

At the kubelet's next retry, after 60 to 90 s, the driver is called: nothing else can show that the device
works.
"""
CACHED_CLASSES: Final = frozenset({ErrorClass.BAD_CONFIG, ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT})
"""Error classes of failures that are cached; after a failure of another class the driver is called again."""

TEXT_MAX: Final = 2000
"""Length to which each text of a verdict in the ledger is cut [characters]."""
TEXTS_MAX: Final = 16
"""Largest number of evidence lines of a verdict that the ledger keeps."""
HEALTH_FINGERPRINT_MAX: Final = 120

UNPREPARE_EVIDENCE: Final = "while unpreparing"
"""First line of evidence in the verdict of a failed unprepare."""


class LedgerEntry(NamedTuple):
    """Entry of the prepare ledger: result of one claim's last prepare."""

    outcome: LastPrepareResult
    driver_version: str
    """Version of the driver that prepared the claim."""
    unprepared_wall_s: float = 0.0
    """Time at which the claim was unprepared [s since 1970]; 0: it was not unprepared."""
    at_mono_s: float | None = None
    """Monotonic time of the last prepare in this run [s]; None: it was in an earlier run. Not stored."""

    @property
    def changed_wall_s(self) -> float:
        """Time of the claim's last prepare or unprepare [s since 1970]."""
        return max(self.outcome.at_wall_s, self.unprepared_wall_s)


@dataclass(frozen=True, slots=True)
class PrepareLedger:
    """Prepare ledger of one driver: the last result of each claim, and the driver-reported faults.

    A new ledger is empty.
    """

    claims: Mapping[str, LedgerEntry] = field(default_factory=dict)
    """Ledger entries by claim UID."""
    driver_faults: DriverFaults = DriverFaults()  # noqa: RUF009  # a tuple


def cached_failure(
    ledger: PrepareLedger,
    claim: Claim,
    health_fingerprint: str | Callable[[], str],
    now_wall_s: float,
    driver_version: str,
    now_mono_s: float | None = None,
) -> PrepareVerdict | None:
    """Return the cached, classified failure of a claim's last prepare; None: the driver must be called.

    A failure is cached only for the same request: the claim has the same allocation and parameters, the
    driver has the same version and, where a device is to blame, the state of the devices has not changed. A
    later successful prepare ends the caching. For a fault of the node or driver, it can be the prepare of any
    claim; else it must be that of a claim with one of the devices.

    Args:
        health_fingerprint: Result of :func:`health_fingerprint` for the claim's devices, or a function that
            returns it and is called only for failed devices.
        now_mono_s: Monotonic time [s]; None: the wall clock decides about the age of the failure.
    """
    entry = ledger.claims.get(claim.uid)
    if entry is None or (verdict := entry.outcome.verdict) is None:
        return None
    if verdict.error_class not in CACHED_CLASSES:
        return None
    age_s = now_wall_s - verdict.last_wall_s
    if entry.at_mono_s is not None and now_mono_s is not None:
        age_s = now_mono_s - entry.at_mono_s
    if not 0 <= age_s < verdict.sticky_s or entry.driver_version != driver_version:
        return None
    if entry.outcome.fingerprint != claim.fingerprint:
        return None
    if verdict.error_class is ErrorClass.FAILED_DEVICE:
        health = health_fingerprint if isinstance(health_fingerprint, str) else health_fingerprint()
        return verdict if entry.outcome.generation == _health_and_faults(ledger, claim, health) else None
    return None if _is_repaired(ledger, claim, entry, verdict) else verdict


def _is_repaired(ledger: PrepareLedger, claim: Claim, failed: LedgerEntry, verdict: PrepareVerdict) -> bool:
    """Return True if the cause of a cached failure must be gone, because a later prepare has succeeded.

    For a fault of the node or driver, the prepare of any claim is enough. Otherwise the prepared claim must
    have a device of this claim.
    """
    devices = set(_device_refs(claim.devices))
    concerns_all = verdict.scope in {Scope.NODE, Scope.DRIVER}
    return any(
        entry.outcome.verdict is None
        and _is_later(entry, failed)
        and (concerns_all or not devices.isdisjoint(entry.outcome.devices))
        for entry in ledger.claims.values()
    )


def _is_later(entry: LedgerEntry, failed: LedgerEntry) -> bool:
    if entry.at_mono_s is not None and failed.at_mono_s is not None:
        return entry.at_mono_s > failed.at_mono_s
    return entry.outcome.at_wall_s > failed.outcome.at_wall_s


def health_fingerprint(devices: Iterable[DeviceHealth | None]) -> str:
    """Return a short text that changes only if the health of the devices changes.

    Args:
        devices: Devices in the order of the claim, without driver-reported faults; None: not evaluated.
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


def _health_and_faults(ledger: PrepareLedger, claim: Claim, health: str) -> str:
    """Return the text that shows whether the state of a claim's devices has changed since a prepare.

    Args:
        health: Result of :func:`health_fingerprint`; codes of active driver-reported faults are appended.
    """
    active = {(fault.device, fault.code) for fault in ledger.driver_faults.faults if not fault.expired_wall_s}
    codes = sorted(code for device, code in active if device in _device_refs(claim.devices))
    # this separator is in the ledgers on disk
    return " told:".join([health, *codes])  # verbatim


def prepared_devices(ledger: PrepareLedger, claim: ClaimRef) -> tuple[DeviceRef, ...]:
    """Return the devices of a claim at its last prepare; empty: the claim is not in the ledger."""
    entry = ledger.claims.get(claim.uid)
    return entry.outcome.devices if entry else ()


def with_success(
    ledger: PrepareLedger, claim: Claim, health_fingerprint: str, now_wall_s: float, driver_version: str = ""
) -> PrepareLedger:
    """Return the prepare ledger with the successful prepare of a claim added.

    Driver-reported faults of the claim's devices expire, but not those of devices with admin access: the
    claim's pods do not use such a device, so the prepare does not show that it works.
    """
    devices = _device_refs(claim.devices)
    used = _device_refs(device for device in claim.devices if not device.admin)
    outcome = LastPrepareResult(claim.ref, claim.fingerprint, health_fingerprint, devices, now_wall_s, None)
    ledger = replace(ledger, driver_faults=expire_faults_of_devices(ledger.driver_faults, used, now_wall_s))
    return _with_entry(ledger, LedgerEntry(outcome, driver_version), now_wall_s)


def with_ended_faults(
    ledger: PrepareLedger, ended: Collection[DriverFault], now_wall_s: float
) -> PrepareLedger:
    """Return the prepare ledger with the driver-reported faults ``ended`` expired.

    An operator cleared them, or their devices were replaced.
    """
    return replace(ledger, driver_faults=expire_faults(ledger.driver_faults, ended, now_wall_s))


def with_failure(
    ledger: PrepareLedger,
    claim: Claim,
    health_fingerprint: str,
    verdict: PrepareVerdict,
    now_wall_s: float,
    driver_version: str = "",
    unhealthy: Collection[DeviceRef] = (),
) -> tuple[PrepareLedger, PrepareVerdict]:
    """Return the prepare ledger with a failed prepare added, and the verdict with the failure's count and
    first time.

    Args:
        unhealthy: Devices that the health engine reports Unhealthy: no fault is recorded for these devices.
    """
    verdict = _as_stored(verdict)
    # a fault whose time is over must not take the place of this one, and then expire
    current = expire_old_faults(ledger.driver_faults, now_wall_s)
    known = add_faults(current, claim.ref, verdict, now_wall_s, unhealthy)
    ledger = replace(ledger, driver_faults=known)
    verdict = _with_count(ledger, claim, verdict, now_wall_s)
    generation = _health_and_faults(ledger, claim, health_fingerprint)
    outcome = LastPrepareResult(
        claim.ref, claim.fingerprint, generation, _device_refs(claim.devices), now_wall_s, verdict
    )
    return _with_entry(ledger, LedgerEntry(outcome, driver_version), now_wall_s), verdict


def _as_stored(verdict: PrepareVerdict) -> PrepareVerdict:
    """Return a verdict that the ledger's file can have: with short texts, and names that are texts."""
    return replace(
        verdict,
        summary=verdict.summary[:TEXT_MAX],
        detail=verdict.detail[:TEXT_MAX],
        advice=verdict.advice[:TEXT_MAX],
        evidence=tuple(text[:TEXT_MAX] for text in verdict.evidence[:TEXTS_MAX]),
        devices=tuple(DeviceRef(*map(str, device)) for device in verdict.devices),  # a saved 3 is unreadable
    )


def with_unprepare(ledger: PrepareLedger, claim: ClaimRef, now_wall_s: float) -> PrepareLedger:
    """Return the prepare ledger with the unprepare of a claim added.

    The claim's entry is kept for :data:`UNPREPARED_KEPT_S`.
    """
    entry = ledger.claims.get(claim.uid)
    if entry is None:
        return ledger
    return _with_entry(ledger, entry._replace(unprepared_wall_s=now_wall_s), now_wall_s)


def with_unprepare_failure(
    ledger: PrepareLedger,
    claim: Claim,
    verdict: PrepareVerdict,
    now_wall_s: float,
    driver_version: str = "",
    unhealthy: Collection[DeviceRef] = (),
) -> tuple[PrepareLedger, PrepareVerdict]:
    """Return the prepare ledger with a failed unprepare of a claim added.

    The arguments are those of :func:`with_failure`. The failure is never cached.
    """
    verdict = replace(verdict, evidence=(UNPREPARE_EVIDENCE, *verdict.evidence), sticky_s=0)
    return with_failure(ledger, claim, "", verdict, now_wall_s, driver_version, unhealthy)


def _device_refs(devices: Iterable[ClaimDevice]) -> tuple[DeviceRef, ...]:
    return tuple(dict.fromkeys(DeviceRef(*map(str, device.ref)) for device in devices))


def _with_count(
    ledger: PrepareLedger, claim: Claim, verdict: PrepareVerdict, now_wall_s: float
) -> PrepareVerdict:
    entry = ledger.claims.get(claim.uid)
    before = entry.outcome.verdict if entry else None
    first_wall_s, count = now_wall_s, 1
    if (
        entry
        and before
        and entry.outcome.fingerprint == claim.fingerprint
        and (before.error_class, before.code) == (verdict.error_class, verdict.code)
    ):
        first_wall_s, count = before.first_wall_s, before.count + 1
    sticky_s, known = verdict.sticky_s, ledger.driver_faults
    if verdict.devices and all(has_active_fault(known, device, verdict.code) for device in verdict.devices):
        sticky_s = min(sticky_s, DRIVER_FAULT_CACHE_S)
    return replace(verdict, first_wall_s=first_wall_s, last_wall_s=now_wall_s, count=count, sticky_s=sticky_s)


def with_monotonic_times(before: PrepareLedger, ledger: PrepareLedger, now_mono_s: float) -> PrepareLedger:
    """Return the prepare ledger with the monotonic time of the records that ``before`` does not have."""
    known, old = ledger.driver_faults, set(before.driver_faults.faults)
    mono_s = dict(known.reported_mono_s)
    mono_s |= {
        _key(fault): now_mono_s for fault in known.faults if not (fault in old or fault.expired_wall_s)
    }
    claims = dict(ledger.claims)
    for uid, entry in ledger.claims.items():
        earlier = before.claims.get(uid)
        if earlier is None or earlier.outcome is not entry.outcome:
            claims[uid] = entry._replace(at_mono_s=now_mono_s)
    return PrepareLedger(claims, known._replace(reported_mono_s=mono_s))


def expire_entries(
    ledger: PrepareLedger, now_wall_s: float, now_mono_s: float | None = None
) -> PrepareLedger:
    """Return the prepare ledger without claims that were unprepared long ago.

    Old driver-reported faults in the result are expired, those of this run only with ``now_mono_s``.
    """
    known = expire_old_faults(ledger.driver_faults, now_wall_s, now_mono_s)
    claims = {uid: entry for uid, entry in ledger.claims.items() if not _is_expired(entry, now_wall_s)}
    if known == ledger.driver_faults and len(claims) == len(ledger.claims):
        return ledger
    return PrepareLedger(claims, known)


def _is_expired(entry: LedgerEntry, now_wall_s: float) -> bool:
    return bool(entry.unprepared_wall_s) and abs(now_wall_s - entry.unprepared_wall_s) >= UNPREPARED_KEPT_S


def merge_ledgers(mine: PrepareLedger, theirs: PrepareLedger, now_wall_s: float) -> PrepareLedger:
    """Merge the prepare ledgers of two instances of a driver.

    The result has each claim's newest entry, and all faults.
    """
    claims = dict(theirs.claims)
    for uid, entry in mine.claims.items():
        other = claims.get(uid)
        if other is None or _recency(entry, now_wall_s) >= _recency(other, now_wall_s):
            claims[uid] = entry
    known = merge_faults(mine.driver_faults, theirs.driver_faults, now_wall_s)
    return expire_entries(PrepareLedger(_keep_newest(claims, now_wall_s), known), now_wall_s)


def _with_entry(ledger: PrepareLedger, entry: LedgerEntry, now_wall_s: float) -> PrepareLedger:
    claims = {**ledger.claims, entry.outcome.claim.uid: entry}
    return expire_entries(replace(ledger, claims=_keep_newest(claims, now_wall_s)), now_wall_s)


def _keep_newest(claims: Mapping[str, LedgerEntry], now_wall_s: float) -> Mapping[str, LedgerEntry]:
    if len(claims) <= CLAIMS_MAX:
        return claims
    ranked = sorted(claims.items(), key=lambda item: _recency(item[1], now_wall_s), reverse=True)
    return dict(ranked[:CLAIMS_MAX])


def _recency(entry: LedgerEntry, now_wall_s: float) -> float:
    """Return a sort key of an entry of the prepare ledger, greater for newer entries.

    An entry with a time in the future counts as oldest.
    """
    return _past(entry.changed_wall_s, now_wall_s)


def _past(at_wall_s: float, now_wall_s: float) -> float:
    """Return a time as a sort key; a time in the future comes first."""
    return at_wall_s if at_wall_s <= now_wall_s else -inf
