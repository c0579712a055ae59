"""What a driver remembers of its prepares: how each claim's last one ended, and devices found broken. Pure.

Owns when an answer may be given again without trying. Nothing here is changed in place. Times are the wall
clock's, handed in, because what is remembered outlives the process; what is dated into the future is from
before the clock was set back, and over.

Repetition never makes a failure worse: a verdict comes from its evidence, and only its count grows.
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
"""Many times the claims of a node; the oldest goes."""
OVER_KEPT_S: Final = 86_400.0
"""For how long a claim is remembered that is no longer there [s]."""
TOLD_STICKY_S: Final = 60
"""Of a failure that shows in nothing but the driver's word. The kubelet comes again after 60 to 90 s, and
then the driver is asked again: nobody else could say that the device works [s]."""
STICKY: Final = frozenset({ErrorClass.BAD_CONFIG, ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT})
"""What may be answered without trying; of anything else a new try is the remedy."""

TEXT_MAX: Final = 2000
"""Characters of each text of a verdict that are remembered..."""
TEXTS_MAX: Final = 16
"""...and pieces of evidence."""
GENERATION_MAX: Final = 120

UNPREPARING: Final = "while unpreparing"
"""The first evidence of a verdict that is about an unprepare."""


class LedgerEntry(NamedTuple):
    """What is remembered of one claim."""

    outcome: Outcome
    version: str
    """Of the driver that it happened to."""
    over_wall_s: float = 0.0
    """Since when the claim is unprepared; 0: it is not."""

    @property
    def at_wall_s(self) -> float:
        """When something happened to it last."""
        return max(self.outcome.at_wall_s, self.over_wall_s)


@dataclass(frozen=True, slots=True)
class PrepareLedger:
    """All that is remembered. The default is a driver's first start."""

    claims: Mapping[str, LedgerEntry] = field(default_factory=dict)
    """By the claim's uid; at most :data:`CLAIMS_MAX`."""
    told: DriverFaults = DriverFaults()  # noqa: RUF009  # a tuple


# --- asking ------------------------------------------------------------------------------------------------


def cached_failure(
    book: PrepareLedger, claim: Claim, generation: str | Callable[[], str], now_wall_s: float, version: str
) -> PrepareVerdict | None:
    """The answer to the same question of a while ago, if it still holds.

    The same question is: the same claim with the same allocation and parameters, to the same version of the
    driver and, where a device is to blame, with the same known of the devices.

    Args:
        generation: Of the claim's devices, see :func:`generation_of`; a function is called if it matters.
    """
    kept = book.claims.get(claim.uid)
    if kept is None or (verdict := kept.outcome.verdict) is None or verdict.error_class not in STICKY:
        return None
    if not 0 <= now_wall_s - verdict.last_wall_s < verdict.sticky_s or kept.version != version:
        return None
    if kept.outcome.fingerprint != claim.fingerprint:
        return None
    if verdict.error_class is ErrorClass.FAILED_DEVICE:
        now = generation if isinstance(generation, str) else generation()
        return verdict if kept.outcome.generation == _generation(book, claim, now) else None
    return verdict


def generation_of(devices: Iterable[DeviceHealth | None]) -> str:
    """A short text of what is known of devices: the same while the facts are, over restarts too.

    Args:
        devices: In the order of the claim, apart from what the driver told of them; None: nobody knows.
    """
    text = " ".join(map(_known, devices))
    return text if len(text) <= GENERATION_MAX else sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _known(device: DeviceHealth | None) -> str:
    if device is None:
        return "?"
    codes = {cause.code for cause in device.causes if cause.severity > Severity.INFO}
    return ":".join([device.health.name.lower(), *sorted(codes)])


def _generation(book: PrepareLedger, claim: Claim, known: str) -> str:
    """With what the driver told of the devices: excused, they are no longer what they were."""
    live = {(fault.device, fault.code) for fault in book.told.faults if not fault.excused_wall_s}
    told = sorted(code for device, code in live if device in _refs(claim))
    return " told:".join([known, *told])


def devices_of(book: PrepareLedger, claim: ClaimRef) -> tuple[DeviceRef, ...]:
    """The devices that a claim had when it was prepared last."""
    kept = book.claims.get(claim.uid)
    return kept.outcome.devices if kept else ()


# --- what happens to a claim -------------------------------------------------------------------------------


def succeeded(
    book: PrepareLedger, claim: Claim, generation: str, now_wall_s: float, version: str = ""
) -> PrepareLedger:
    """A claim was prepared: faults that were told of its devices are excused."""
    devices = _refs(claim)
    outcome = Outcome(claim.ref, claim.fingerprint, generation, devices, now_wall_s, None)
    book = replace(book, told=faults.excuse(book.told, devices, now_wall_s))
    return _with(book, LedgerEntry(outcome, version), now_wall_s)


def failed(
    book: PrepareLedger,
    claim: Claim,
    generation: str,
    verdict: PrepareVerdict,
    now_wall_s: float,
    version: str = "",
    held: Collection[DeviceRef] = (),
) -> tuple[PrepareLedger, PrepareVerdict]:
    """A claim could not be prepared. Returns the verdict, too: how often it was so by now, and since when.

    Args:
        generation: Of its devices, see :func:`generation_of`.
        held: Devices that are Unhealthy already; of others that are to blame, a fault is told.
    """
    verdict = _bounded(verdict)
    book = replace(book, told=faults.tell(book.told, claim.ref, verdict, now_wall_s, held))
    verdict = _counted(book, claim, verdict, now_wall_s)
    known = _generation(book, claim, generation)
    outcome = Outcome(claim.ref, claim.fingerprint, known, _refs(claim), now_wall_s, verdict)
    return _with(book, LedgerEntry(outcome, version), now_wall_s), verdict


def unprepared(book: PrepareLedger, claim: ClaimRef, now_wall_s: float) -> PrepareLedger:
    """A claim is no longer prepared. How it failed, if it did, is remembered for a day."""
    kept = book.claims.get(claim.uid)
    return _with(book, kept._replace(over_wall_s=now_wall_s), now_wall_s) if kept else book


def unprepare_failed(
    book: PrepareLedger,
    claim: Claim,
    verdict: PrepareVerdict,
    now_wall_s: float,
    version: str = "",
    held: Collection[DeviceRef] = (),
) -> tuple[PrepareLedger, PrepareVerdict]:
    """A claim could not be unprepared. Nothing follows from that for its next prepare.

    Args:
        claim: As it was when it was prepared: its devices are known from then.
    """
    verdict = replace(verdict, evidence=(UNPREPARING, *verdict.evidence), sticky_s=0)
    return failed(book, claim, "", verdict, now_wall_s, version, held)


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


def _counted(book: PrepareLedger, claim: Claim, verdict: PrepareVerdict, now_wall_s: float) -> PrepareVerdict:
    kept = book.claims.get(claim.uid)
    before = kept.outcome.verdict if kept else None
    first_wall_s, count = now_wall_s, 1
    if kept and before and kept.outcome.fingerprint == claim.fingerprint and _is_same(before, verdict):
        first_wall_s, count = before.first_wall_s, before.count + 1
    sticky_s = verdict.sticky_s
    if verdict.devices and all(faults.is_told(book.told, one, verdict.code) for one in verdict.devices):
        sticky_s = min(sticky_s, TOLD_STICKY_S)
    return replace(verdict, first_wall_s=first_wall_s, last_wall_s=now_wall_s, count=count, sticky_s=sticky_s)


def _is_same(before: PrepareVerdict, verdict: PrepareVerdict) -> bool:
    return (before.error_class, before.code) == (verdict.error_class, verdict.code)


# --- time, and two instances -------------------------------------------------------------------------------


def age(book: PrepareLedger, now_wall_s: float) -> PrepareLedger:
    """The book without what is over by now, and with those excused whose time is over."""
    told = faults.age(book.told, now_wall_s)
    claims = {uid: kept for uid, kept in book.claims.items() if not _is_over(kept, now_wall_s)}
    if told == book.told and len(claims) == len(book.claims):
        return book
    return PrepareLedger(claims, told)


def _is_over(kept: LedgerEntry, now_wall_s: float) -> bool:
    return bool(kept.over_wall_s) and abs(now_wall_s - kept.over_wall_s) >= OVER_KEPT_S


def merge(mine: PrepareLedger, theirs: PrepareLedger, now_wall_s: float) -> PrepareLedger:
    """Both as one, the newest of each claim: two instances of a driver share a file in a rolling update."""
    claims = dict(theirs.claims)
    for uid, kept in mine.claims.items():
        other = claims.get(uid)
        if other is None or _rank(kept, now_wall_s) >= _rank(other, now_wall_s):
            claims[uid] = kept
    return age(PrepareLedger(_newest(claims, now_wall_s), faults.merge(mine.told, theirs.told)), now_wall_s)


def _with(book: PrepareLedger, kept: LedgerEntry, now_wall_s: float) -> PrepareLedger:
    claims = {**book.claims, kept.outcome.claim.uid: kept}
    return age(replace(book, claims=_newest(claims, now_wall_s)), now_wall_s)


def _newest(claims: Mapping[str, LedgerEntry], now_wall_s: float) -> Mapping[str, LedgerEntry]:
    if len(claims) <= CLAIMS_MAX:
        return claims
    ranked = sorted(claims.items(), key=lambda item: _rank(item[1], now_wall_s), reverse=True)
    return dict(ranked[:CLAIMS_MAX])


def _rank(kept: LedgerEntry, now_wall_s: float) -> float:
    """The greater the newer. What is dated into the future is from before the clock was set back."""
    return kept.at_wall_s if kept.at_wall_s <= now_wall_s else -inf
