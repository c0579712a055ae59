"""Drivers with faults in prepare and unprepare, and in their CDI files."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
from patience import PATIENCE_S

from conform import faults
from conform.lists import ListedDevice
from conform.preparing import (
    CLAIMS,
    DEVICE,
    KIND,
    MADE,
    RESTART,
    Answered,
    Asked,
    ClaimError,
    PreparingDriver,
)
from conform.servers import RefusedCall, Stream

Answers = Iterable[tuple[str, Sequence[Answered] | str]]


def fails(code: str, *flags: str) -> Any:
    """Return a decorator for a driver that fails that check of claims."""
    return faults.fails(code, *CLAIMS, *flags)


def warns(code: str, *flags: str) -> Any:
    """Return a decorator for a driver that gets a warning from that check of claims."""
    return faults.warns(code, *CLAIMS, *flags)


# --- answers ------------------------------------------------------------------------------------------------


@fails("prepare.first")
class RefusesAllClaims(PreparingDriver):
    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        raise ClaimError("the backend is down")


@fails("prepare.answers")
class AnswersOfOtherClaims(PreparingDriver):
    """Driver that answers for all claims that it knows, instead of those of the request."""

    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        yield from super().prepare_claims(claims)
        yield "uid-other", ()


@fails("prepare.devices")
class ReturnsAnotherRequest(PreparingDriver):
    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        return [device._replace(request="gpu") for device in super().prepare_claim(claim)]


@fails("prepare.devices")
class ReturnsSubrequests(PreparingDriver):
    def request_name(self, request: str) -> str:
        return request


@fails("prepare.health")
class ReportsHealthUnderOtherNames(PreparingDriver):
    def devices(self, stream: Stream, lists: int) -> Sequence[ListedDevice]:
        return [ListedDevice(b"dev-0"), ListedDevice(b"dev-1")]


@warns("prepare.deadline")
class SlowFirstPrepare(PreparingDriver):
    slow = True

    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        if self.slow:
            self.slow = False
            self.ended.wait(10.5)
        return super().prepare_claim(claim)


# --- CDI ----------------------------------------------------------------------------------------------------


@warns("prepare.first_cdi_id")
class OneCdiIdForAllDevices(PreparingDriver):
    def ids(self, claim: Asked, device: str) -> Sequence[str]:
        return [f"{KIND}={claim.uid}"]


@fails("prepare.cdi_ids")
class WritesNoCdiFile(PreparingDriver):
    def write_file(self, claim: Asked, ids: Iterable[str]) -> None:
        self.cdi.mkdir(exist_ok=True)


@fails("prepare.cdi_files")
class CdiFileOfAnOldVersion(PreparingDriver):
    """Driver that writes annotations, which the file's version does not have."""

    def cdi_document(self, ids: Iterable[str]) -> dict[str, Any]:
        return {**super().cdi_document(ids), "cdiVersion": "0.5.0", "annotations": {"a": "b"}}


@fails("unprepare.cdi")
class KeepsCdiFiles(PreparingDriver):
    def unprepare_claim(self, claim: Asked) -> None:
        pass


# --- repeated calls -----------------------------------------------------------------------------------------


@fails("prepare.again")
class RefusesTheSecondCall(PreparingDriver):
    """Driver that refuses the second call with the same claims, and treats the third as a new prepare."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts = Counter[tuple[Asked, ...]]()

    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        self.counts[tuple(claims)] += 1
        is_second = self.counts[tuple(claims)] == 2 and all(claim.name in self.claims for claim in claims)
        if is_second:
            return [(claim.uid, "is prepared already") for claim in claims]
        return super().prepare_claims(claims)


@fails("prepare.second_pod")
class KeepsClaimsByPod(PreparingDriver):
    """Driver that treats the claims of a call as one unit."""

    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        if len(claims) == 1 and claims[0].name in self.claims:
            return [(claims[0].uid, "belongs to another pod")]
        return super().prepare_claims(claims)


@fails("prepare.two_calls")
class BusyDuringPrepare(PreparingDriver):
    """Driver that refuses a call during another one. The first of two calls at once waits for the second."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.whole_calls = 0
        """Number of calls with both claims: the first, its repetition, and then two at once."""
        self.refused = threading.Event()

    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        if not self.claim_lock.acquire(blocking=False):
            self.refused.set()
            return [(claim.uid, "is being prepared") for claim in claims]
        try:
            self.whole_calls += len(claims) == len(self.claims)
            if self.whole_calls == 3:
                self.refused.wait(PATIENCE_S / 2)  # below the session's limit of a call
            return list(super().prepare_claims(claims))
        finally:
            self.claim_lock.release()


@fails("prepare.restart", *RESTART)
class NamesOfTheProcess(PreparingDriver):
    """Driver that gives its CDI devices names with a number of the process."""

    generation = 0

    def forget(self) -> None:
        self.generation += 1

    def ids(self, claim: Asked, device: str) -> Sequence[str]:
        return [f"{KIND}={claim.uid}-{device}-{self.generation}"]


@fails("prepare.reboot", *RESTART, "--remove-cdi")
class WritesCdiFilesOnce(PreparingDriver):
    """Driver that stores what is prepared, and answers from there without writing the file."""

    def write_file(self, claim: Asked, ids: Iterable[str]) -> None:
        stored = self.root / f"stored-{claim.uid}"
        if not stored.exists():
            stored.touch()
            super().write_file(claim, ids)

    def unprepare_claim(self, claim: Asked) -> None:
        (self.root / f"stored-{claim.uid}").unlink(missing_ok=True)
        super().unprepare_claim(claim)


@fails("prepare.reboot", *RESTART, "--remove-cdi")
class NoCdiIdsAfterAReboot(PreparingDriver):
    restarts = 0

    def forget(self) -> None:
        self.restarts += 1

    def ids(self, claim: Asked, device: str) -> Sequence[str]:
        return [] if self.restarts > 1 else super().ids(claim, device)

    def unprepare_claim(self, claim: Asked) -> None:
        super().unprepare_claim(claim)
        self.restarts = 0


@fails("prepare.after_unprepare")
class NoDevicesForReleasedClaims(PreparingDriver):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = set[str]()

    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        return () if claim.uid in self.released else super().prepare_claim(claim)

    def unprepare_claim(self, claim: Asked) -> None:
        super().unprepare_claim(claim)
        self.released.add(claim.uid)


@fails("prepare.after_unprepare")
class RemembersReleasedClaims(PreparingDriver):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = set[str]()

    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        if claim.uid in self.released:
            raise ClaimError(f"claim {claim} was released")
        return super().prepare_claim(claim)

    def unprepare_claim(self, claim: Asked) -> None:
        super().unprepare_claim(claim)
        self.released.add(claim.uid)


# --- failures -----------------------------------------------------------------------------------------------


@fails("prepare.missing_claim")
class NoErrorForMissingClaim(PreparingDriver):
    """Driver that answers without devices if no claim of the call exists."""

    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        if not any(claim.name in self.claims for claim in claims):
            return [(claim.uid, ()) for claim in claims]
        return super().prepare_claims(claims)


@fails("prepare.other_uid")
class IgnoresUids(PreparingDriver):
    def find_claim(self, claim: Asked) -> Any:
        found = self.claims.get(claim.name)
        return super().find_claim(claim) if found is None else found


@warns("prepare.bad_claim")
class FailsTheWholeCall(PreparingDriver):
    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        for claim in claims:
            try:
                self.find_claim(claim)
            except ClaimError as error:
                raise RefusedCall(grpc.StatusCode.INTERNAL, str(error)) from None
        return super().prepare_claims(claims)


@fails("prepare.bad_claim")
class FailsTheGoodClaimsToo(PreparingDriver):
    def prepare_claims(self, claims: Sequence[Asked]) -> Answers:
        found = dict(super().prepare_claims(claims))
        errors = [content for content in found.values() if isinstance(content, str)]
        return [(uid, content if not errors else errors[0]) for uid, content in found.items()]


@fails("prepare.rollback")
class WritesFilesFirst(PreparingDriver):
    """Driver that writes the CDI file before it reads the claim."""

    def find_claim(self, claim: Asked) -> Any:
        self.write_file(claim, [f"{KIND}={claim.uid}-gpu-0"])
        return super().find_claim(claim)


@fails("prepare.errors.stable")
class CountsAttempts(PreparingDriver):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.attempts = itertools.count(1)

    def name_others(self, error: str, others: Sequence[str]) -> str:
        return f"attempt {next(self.attempts)}: {super().name_others(error, others)}"


@warns("prepare.errors.text")
class ErrorWithATraceback(PreparingDriver):
    def name_others(self, error: str, others: Sequence[str]) -> str:
        return f"Traceback:\n  line 1\n{super().name_others(error, others)}"


@warns("prepare.errors.names")
class ErrorOfOneClaim(PreparingDriver):
    def name_others(self, error: str, others: Sequence[str]) -> str:
        return error


# --- unprepare ----------------------------------------------------------------------------------------------


class _FailsOnce(PreparingDriver):
    """Driver that fails the first unprepare of each claim for which a condition holds."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failed = set[str]()

    def is_affected(self, claim: Asked) -> bool:
        raise NotImplementedError

    def unprepare_claim(self, claim: Asked) -> None:
        super().unprepare_claim(claim)
        if claim.uid not in self.failed and self.is_affected(claim):
            self.failed.add(claim.uid)
            raise ClaimError("the device is busy")


@fails("unprepare.all")
class UnprepareNeedsASecondCall(_FailsOnce):
    def is_affected(self, claim: Asked) -> bool:
        return claim.name in self.claims and self.claims[claim.name]["metadata"]["uid"] == claim.uid


@fails("unprepare.lost_device", *DEVICE)
class UnprepareNeedsTheDevice(_FailsOnce):
    def is_affected(self, claim: Asked) -> bool:
        return self.removed


@fails("unprepare.deleted_claim", *MADE)
class UnprepareReadsTheClaim(_FailsOnce):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.known = set[str]()

    def create(self, text: str) -> None:
        super().create(text)
        self.known = set(self.claims)

    def is_affected(self, claim: Asked) -> bool:
        return claim.name in self.known - set(self.claims)


@fails("unprepare.again")
class RefusesTheSecondUnprepare(PreparingDriver):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = set[str]()

    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        self.released.discard(claim.uid)
        return super().prepare_claim(claim)

    def unprepare_claim(self, claim: Asked) -> None:
        if claim.uid in self.released:
            raise ClaimError(f"claim {claim} is not prepared")
        self.released.add(claim.uid)
        super().unprepare_claim(claim)


@fails("unprepare.unknown")
class RefusesToUnprepareTheUnknown(PreparingDriver):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.seen = set[str]()

    def prepare_claim(self, claim: Asked) -> Sequence[Answered]:
        self.seen.add(claim.uid)
        return super().prepare_claim(claim)

    def unprepare_claim(self, claim: Asked) -> None:
        if claim.uid not in self.seen:
            raise ClaimError(f"claim {claim} was never prepared")
        super().unprepare_claim(claim)
