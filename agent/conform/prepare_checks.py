"""Conformance checks of NodePrepareResources and NodeUnprepareResources, and of the CDI files of claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from agent.conform.cdi_schema import cdi_file_error, cdi_id_error, cdi_ids
from agent.conform.outcomes import (
    TEXT_LIMIT,
    CheckOutcome,
    CheckVerdict,
    describe_status,
    failed,
    format_count,
    format_seconds,
    join_first,
    not_run,
    passed,
    shorten,
    skipped,
    warned,
    worst_outcome,
)
from agent.conform.session_record import (
    CdiFile,
    CdiSnapshot,
    ClaimReply,
    ClaimSessionRecord,
    PrepareCall,
    PrepareStage,
    ReturnedDevice,
    SessionRecord,
)
from agent.model.claim import ClaimRef

DEADLINE_S: Final = 45.0
"""Timeout of prepare and unprepare calls in the kubelet [s]."""
SLOW_S: Final = 10.0
"""Duration of a successful prepare or unprepare call above which a check warns [s]."""
ERROR_BYTES: Final = 1024
"""Longest error of a claim without a warning [bytes]."""
READY_STAGES: Final = (
    PrepareStage.FIRST,
    PrepareStage.AGAIN,
    PrepareStage.ALONE,
    PrepareStage.AT_ONCE,
    PrepareStage.RESTARTED,
    PrepareStage.REBOOTED,
    PrepareStage.RELEASED,
)
"""Stages of a session in which the driver should prepare every claim."""
NO_ANSWER: Final = ("", "DEADLINE_EXCEEDED")
"""Statuses of calls without an answer: the connection was lost, or the driver took too long."""
NO_IDS: Final = "the driver returned no CDI ids"


def missing_stage(stage: PrepareStage) -> Callable[[SessionRecord], CheckOutcome | None]:
    """Return a function that returns SKIPPED or NOT_RUN if a stage of the session did not run, or None."""

    def find_missing(session: SessionRecord) -> CheckOutcome | None:
        if session.prepare is None:
            return skipped("claims are prepared with --prepare only")
        return session.prepare.omitted.get(stage)

    return find_missing


def missing_prepared_claims(session: SessionRecord) -> CheckOutcome | None:
    """Return an outcome for the checks that cannot run, if a claim may not be prepared.
    None: the first prepare of all claims succeeded."""
    if missing := missing_stage(PrepareStage.FIRST)(session):
        return missing
    record = _record(session)
    if any(_errors(record.calls[PrepareStage.FIRST], _refs(record))):
        return not_run("not every claim was prepared: see prepare.first")
    return None


def _record(session: SessionRecord) -> ClaimSessionRecord:
    assert session.prepare is not None
    return session.prepare


def _refs(record: ClaimSessionRecord) -> list[ClaimRef]:
    return [claim.ref for claim in record.claims]


def _errors(calls: Iterable[PrepareCall], refs: Iterable[ClaimRef]) -> Iterator[str]:
    """Yield ``<claim>: <error>`` for each claim of ``refs`` that failed in a prepare or unprepare call."""
    refs = frozenset(refs)
    for call in calls:
        for ref in call.claims:
            if ref in refs and (error := call.error_of(ref)):
                yield f"{shorten(str(ref))}: {shorten(error, TEXT_LIMIT)}"


def _all_succeeded(session: SessionRecord, stage: PrepareStage, observation_if_good: str) -> CheckOutcome:
    """Return FAIL with the claims that failed in the prepare or unprepare calls of a stage, else PASS."""
    record = _record(session)
    found = [failed(text) for text in _errors(record.calls[stage], _refs(record))]
    return worst_outcome(found, passed(observation_if_good))


# --- answers -----------------------------------------------------------------------------------------------


def check_first_prepare(session: SessionRecord) -> CheckOutcome:
    """Calls NodePrepareResources with all claims."""
    record = _record(session)
    return _all_succeeded(
        session, PrepareStage.FIRST, f"{format_count(len(record.claims), 'claim')} with {record.version}"
    )


def check_answers(session: SessionRecord) -> CheckOutcome:
    """Compares the UIDs in each answer to a prepare or unprepare with those of the request, and decodes the
    answer."""
    found = []
    for stage, calls in _record(session).calls.items():
        for call in calls:
            if not call.result.is_ok:
                continue
            if call.decode_error:
                found.append(failed(f"{stage}: {call.decode_error}"))
                continue
            requested, answered = [ref.uid for ref in call.claims], [answer.uid for answer in call.answers]
            found += [
                failed(f"{stage}: no answer for {shorten(str(ref))}")
                for ref in call.claims
                if ref.uid not in answered
            ]
            for uid in answered:
                if uid not in requested:
                    found.append(failed(f"{stage}: answer for {shorten(uid)!r}, which was not requested"))
                elif answered.count(uid) > 1:
                    found.append(failed(f"{stage}: several answers for {shorten(uid)}"))
    return worst_outcome(found, passed("one answer for each claim of each call"))


def _prepared_devices(
    record: ClaimSessionRecord, stage: PrepareStage
) -> Iterator[tuple[ClaimRef, ReturnedDevice]]:
    """Yield each claim with each of its devices that the driver returned in the calls of a stage."""
    for call in record.calls.get(stage, ()):
        for claim in record.claims:
            answer = call.answer(claim.ref.uid)
            for device in answer.devices if answer else ():
                yield claim.ref, device


def _device_name(device: ReturnedDevice) -> str:
    return shorten(f"{device.pool}/{device.name}")


def check_devices(session: SessionRecord) -> CheckOutcome:
    """Compares the devices and requests in the answer to the first prepare with the allocation of each
    claim."""
    record, found, number = _record(session), [], 0
    for claim in record.claims:
        answer = record.first_call(PrepareStage.FIRST).answer(claim.ref.uid)
        returned = answer.devices if answer else ()
        number += len(returned)
        place = shorten(str(claim.ref))
        allocated = {(pool, name): set[str]() for _, pool, name in claim.devices}
        for request, pool, name in claim.devices:
            allocated[pool, name].add(request.partition("/")[0])
        for device in returned:
            requests = allocated.get((device.pool, device.name))
            if requests is None:
                found.append(failed(f"{place}: {_device_name(device)} is not allocated to it"))
                continue
            for name in sorted(set(device.requests) - requests):
                problem = f"is not allocated to request {shorten(name)!r}"
                if (request := name.partition("/")[0]) in requests:
                    problem = f"has subrequest {shorten(name)!r}, but containers name {shorten(request)!r}"
                if request not in requests & set(device.requests):
                    found.append(failed(f"{place}: {_device_name(device)} {problem}"))
        for pool, name in allocated.keys() - {(device.pool, device.name) for device in returned}:
            found.append(warned(f"{place}: {shorten(f'{pool}/{name}')} is allocated and was not returned"))
    return worst_outcome(found, passed(f"{format_count(number, 'device')}, as allocated"))


def check_health_names(session: SessionRecord) -> CheckOutcome:
    """Searches the health lists for the pool and name of each device that the first prepare returned."""
    reported = {device.key for stream in session.streams for sent in stream.lists for device in sent.devices}
    if not reported:
        return not_run("no device was reported in a health stream")
    devices = [device for _, device in _prepared_devices(_record(session), PrepareStage.FIRST)]
    found = [
        failed(f"{_device_name(device)} is in no health list")
        for device in devices
        if (device.pool.encode(), device.name.encode()) not in reported
    ]
    return worst_outcome(found, passed(f"{format_count(len(devices), 'device')} in the health lists"))


# --- CDI ---------------------------------------------------------------------------------------------------


def check_first_cdi_id(session: SessionRecord) -> CheckOutcome:
    """Compares the first CDI ids of all devices that the first prepare returned."""
    by_id: dict[str, dict[str, None]] = {}
    for _, device in _prepared_devices(_record(session), PrepareStage.FIRST):
        if device.cdi_ids:
            by_id.setdefault(device.cdi_ids[0], {})[_device_name(device)] = None
    found = [
        warned(f"{join_first(devices)} share {shorten(cdi_id)}")
        for cdi_id, devices in by_id.items()
        if len(devices) > 1
    ]
    return worst_outcome(found, passed(f"{format_count(len(by_id), 'id')}" if by_id else NO_IDS))


def _returned_ids(record: ClaimSessionRecord) -> set[str]:
    """Return the CDI ids that the driver returned in those stages that should prepare all claims."""
    return {
        cdi_id
        for stage in READY_STAGES
        for _, device in _prepared_devices(record, stage)
        for cdi_id in device.cdi_ids
    }


def _ids_of(record: ClaimSessionRecord, stage: PrepareStage) -> list[str]:
    return sorted({cdi_id for _, device in _prepared_devices(record, stage) for cdi_id in device.cdi_ids})


def _defined_ids(snapshot: CdiSnapshot) -> frozenset[str]:
    """Return the CDI ids that the CDI files in a snapshot define."""
    return frozenset[str]().union(*(cdi_ids(file.document) for file in snapshot.files))


def check_cdi_ids(session: SessionRecord) -> CheckOutcome:
    """Searches the CDI files after the first prepare for each CDI id of the answer."""
    record = _record(session)
    ids = _ids_of(record, PrepareStage.FIRST)
    if not ids:
        return passed(NO_IDS)
    malformed = {cdi_id: problem for cdi_id in ids if (problem := cdi_id_error(cdi_id))}
    if malformed:
        return failed(join_first(f"{shorten(cdi_id)!r} {why}" for cdi_id, why in malformed.items()))
    return _check_defined(ids, record.cdi_prepared) or passed(f"{format_count(len(ids), 'id')} in CDI files")


def _check_defined(ids: list[str], snapshot: CdiSnapshot) -> CheckOutcome | None:
    """Return FAIL with those of ``ids`` that no CDI file defines, NOT_RUN if the files are unknown.
    None: all are defined."""
    if snapshot.error:
        return not_run(f"{snapshot.error}; see --cdi-dir")
    missing = [shorten(cdi_id) for cdi_id in ids if cdi_id not in _defined_ids(snapshot)]
    return failed(f"no CDI file defines {join_first(missing)}") if missing else None


def claim_files(record: ClaimSessionRecord) -> list[CdiFile]:
    """Return the CDI files of the session's claims.

    They did not exist before the first prepare, or they define CDI ids that the driver returned.
    """
    known = {file.path for file in record.cdi_before.files}
    ids = _returned_ids(record)
    return [
        file for file in record.cdi_prepared.files if file.path not in known or ids & cdi_ids(file.document)
    ]


def check_cdi_files(session: SessionRecord) -> CheckOutcome:
    """Compares each CDI file of the claims with the CDI specification: fields, types, names, and the version
    that they need."""
    record = _record(session)
    files = claim_files(record)
    if not files and _ids_of(record, PrepareStage.FIRST):
        return not_run("no CDI file of the claims was found: see prepare.cdi_ids")
    found = [
        failed(f"{shorten(file.path)}: {problem}")
        for file in files
        if (problem := file.error or cdi_file_error(file.document))
    ]
    return worst_outcome(found, passed(f"{format_count(len(files), 'CDI file')}" if files else NO_IDS))


# --- repeated prepares -------------------------------------------------------------------------------------


def _devices_in_fixed_order(answer: ClaimReply | None) -> list[ReturnedDevice]:
    devices = answer.devices if answer else ()
    return sorted(device._replace(requests=tuple(sorted(device.requests))) for device in devices)


def _describe_answer(answer: ClaimReply | None) -> str:
    return (
        join_first(
            " ".join([_device_name(device), *map(shorten, device.cdi_ids)])
            for device in _devices_in_fixed_order(answer)
        )
        or "no device"
    )


def _devices_without_ids(answer: ClaimReply | None) -> set[tuple[str, str, bool]]:
    """Return (pool, name, True if it has CDI ids) of each device in an answer."""
    devices = answer.devices if answer else ()
    return {(device.pool, device.name, bool(device.cdi_ids)) for device in devices}


def _same_answer(session: SessionRecord, stage: PrepareStage, observation_if_good: str) -> CheckOutcome:
    """Return FAIL with the claims that fail in a stage or get another answer than in the first prepare.

    The outcome is PASS with `observation_if_good` if there is no such claim. After an unprepare, CDI ids may
    have other names.
    """
    compared = {PrepareStage.RELEASED: _devices_without_ids}.get(stage, _devices_in_fixed_order)
    record = _record(session)
    first = record.first_call(PrepareStage.FIRST)
    found = [failed(text) for text in _errors(record.calls[stage], _refs(record))]
    for call in record.calls[stage]:
        for ref in set(call.claims) & set(_refs(record)):
            now, before = call.answer(ref.uid), first.answer(ref.uid)
            if not call.error_of(ref) and compared(now) != compared(before):
                was, is_ = _describe_answer(before), _describe_answer(now)
                found.append(failed(f"{shorten(str(ref))}: {is_}, was {was}"))
    return worst_outcome(found, passed(observation_if_good))


def check_repeated_prepare(session: SessionRecord) -> CheckOutcome:
    """Repeats the first prepare, and compares the answers."""
    return _same_answer(session, PrepareStage.AGAIN, "the same answer")


def check_second_pod(session: SessionRecord) -> CheckOutcome:
    """Prepares each claim in a call of its own after all were prepared in one call, and compares the
    answers."""
    calls = _record(session).calls[PrepareStage.ALONE]
    return _same_answer(session, PrepareStage.ALONE, f"the same answer in {format_count(len(calls), 'call')}")


def check_concurrent_prepares(session: SessionRecord) -> CheckOutcome:
    """Prepares all claims in two calls at the same time, and compares the answers."""
    return _same_answer(session, PrepareStage.AT_ONCE, "the same answer in both calls")


def check_restart(session: SessionRecord) -> CheckOutcome:
    """Runs the command of --restart-command, waits for the driver, prepares all claims again, and compares
    the answers."""
    return _same_answer(session, PrepareStage.RESTARTED, "the same answer")


def _defined_again(session: SessionRecord, stage: PrepareStage, snapshot: CdiSnapshot) -> CheckOutcome:
    """Return the outcome of :func:`_same_answer`; if it is PASS, that of a search for the stage's CDI ids."""
    record = _record(session)
    ids = _ids_of(record, stage)
    good = f"{format_count(len(ids), 'id')} in CDI files" if ids else NO_IDS
    outcome = _same_answer(session, stage, good)
    if outcome.verdict is not CheckVerdict.PASS or not ids:
        return outcome
    if first := _check_defined(_ids_of(record, PrepareStage.FIRST), record.cdi_prepared):
        return not_run(f"after the first prepare, {first.observation}: see prepare.cdi_ids")
    return _check_defined(ids, snapshot) or outcome


def check_reboot(session: SessionRecord) -> CheckOutcome:
    """Removes the claims' CDI files, restarts the driver, prepares all claims again, compares the answers,
    and searches for the files; only with --remove-cdi and --restart-command."""
    return _defined_again(session, PrepareStage.REBOOTED, _record(session).cdi_rebooted)


def check_prepare_after_unprepare(session: SessionRecord) -> CheckOutcome:
    """Prepares all claims again after their unprepare, compares the devices, and searches for their CDI
    ids."""
    return _defined_again(session, PrepareStage.RELEASED, _record(session).cdi_released)


# --- failures ----------------------------------------------------------------------------------------------


def _refusal(call: PrepareCall, ref: ClaimRef) -> str:
    """Return the error with which the driver refused a claim or the whole call; empty: it refused neither."""
    answer = call.answer(ref.uid)
    is_refused = call.result.status not in NO_ANSWER if not call.result.is_ok else answer and answer.error
    return call.error_of(ref) if is_refused else ""


def _check_refused(session: SessionRecord, stage: PrepareStage) -> CheckOutcome:
    call = _record(session).first_call(stage)
    if error := _refusal(call, call.claims[0]):
        return passed(shorten(error, TEXT_LIMIT))
    return failed(shorten(call.error_of(call.claims[0]) or "prepared without an error", TEXT_LIMIT))


def check_missing_claim(session: SessionRecord) -> CheckOutcome:
    """Prepares a claim that does not exist."""
    return _check_refused(session, PrepareStage.MISSING)


def check_other_uid(session: SessionRecord) -> CheckOutcome:
    """Prepares the first claim by its name, with a UID that it does not have."""
    return _check_refused(session, PrepareStage.OTHER_UID)


def check_bad_claims(session: SessionRecord) -> CheckOutcome:
    """Prepares bad claims (those of --bad-claims, or two that do not exist) and the good ones in one call."""
    record = _record(session)
    call = record.first_call(PrepareStage.BAD)
    if not call.result.is_ok:
        text = describe_status(call.result.status, call.result.text)
        outcome = failed if call.result.status in NO_ANSWER else warned
        return outcome(f"the whole call failed with {text}")
    accepted = [
        failed(f"{shorten(str(ref))}: {shorten(call.error_of(ref) or 'no error', TEXT_LIMIT)}")
        for ref in record.bad_claims
        if not _refusal(call, ref)
    ]
    refused = [failed(text) for text in _errors([call], _refs(record))]
    return worst_outcome(
        [*accepted, *refused],
        passed(f"errors for {format_count(len(record.bad_claims), 'claim')}, none for the others"),
    )


def check_rollback(session: SessionRecord) -> CheckOutcome:
    """Searches for CDI files and ids that exist after bad claims were prepared, but did not exist before."""
    record = _record(session)
    before, after = record.cdi_before_bad, record.cdi_after_bad
    if before.error or after.error:
        reason = f"{before.error or after.error}; see --cdi-dir"
        return not_run(reason) if _returned_ids(record) else passed(NO_IDS)
    known = {file.path for file in before.files}
    files = [shorten(file.path) for file in after.files if file.path not in known]
    ids = [shorten(cdi_id) for cdi_id in sorted(_defined_ids(after) - _defined_ids(before))]
    if files or ids:
        return failed(f"left after the failure: {join_first([*files, *ids])}")
    return passed("nothing was left in CDI files")


def _bad_errors(call: PrepareCall, record: ClaimSessionRecord) -> dict[ClaimRef, str]:
    return {ref: error for ref in record.bad_claims if (error := _refusal(call, ref))}


def check_stable_errors(session: SessionRecord) -> CheckOutcome:
    """Repeats the call with bad claims, and compares the errors."""
    record = _record(session)
    first, second = (_bad_errors(call, record) for call in record.calls[PrepareStage.BAD][:2])
    if not first:
        return not_run("no claim failed: see prepare.bad_claim")
    found = [
        failed(f"{shorten(str(ref))}: {shorten(second.get(ref, 'no error'))!r}, was {shorten(error)!r}")
        for ref, error in first.items()
        if second.get(ref) != error
    ]
    return worst_outcome(found, passed("the same text"))


def check_error_text(session: SessionRecord) -> CheckOutcome:
    """Measures each claim's error text, and searches it for line breaks and control characters."""
    found, number = [], 0
    for calls in _record(session).calls.values():
        for call in calls:
            for error in filter(None, (answer.error for answer in call.answers)):
                number += 1
                if (size := len(error.encode())) > ERROR_BYTES:
                    found.append(warned(f"{size:,} bytes, limit {ERROR_BYTES:,}: {shorten(error)}"))
                if not error.isprintable():
                    found.append(warned(f"has line breaks or control characters: {shorten(repr(error))}"))
    if not number:
        return not_run("no claim failed with an error of its own: see prepare.bad_claim")
    return worst_outcome(found, passed(format_count(number, "error")))


def check_error_names(session: SessionRecord) -> CheckOutcome:
    """Searches the error of each bad claim for the names of the other bad claims of the call."""
    record = _record(session)
    call = record.first_call(PrepareStage.BAD)
    errors = {ref: error for ref, error in _bad_errors(call, record).items() if call.result.is_ok}
    if len(record.bad_claims) < 2:
        return skipped("only with two claims in --bad-claims")
    if len(errors) < 2:
        return not_run("not several claims failed in one call: see prepare.bad_claim")
    found = [
        warned(f"the error of {shorten(str(ref))} does not name {shorten(str(other))}")
        for ref, error in errors.items()
        for other in errors
        if other != ref and other.name not in error
    ]
    return worst_outcome(found, passed("each error names the others"))


def check_deadline(session: SessionRecord) -> CheckOutcome:
    """Measures the duration of all prepare and unprepare calls.
    A call that fails may use the time for more attempts."""
    found, slowest_s = [], 0.0
    for stage, calls in _record(session).calls.items():
        for call in calls:
            slowest_s = max(slowest_s, call.result.took_s)
            if call.result.status == "DEADLINE_EXCEEDED" or call.result.took_s >= DEADLINE_S:
                found.append(failed(f"{stage}: no answer within {DEADLINE_S:g} s"))
            elif call.result.took_s > SLOW_S and not any(map(call.error_of, call.claims)):
                found.append(warned(f"{stage}: answered after {format_seconds(call.result.took_s)}"))
    return worst_outcome(found, passed(f"answered after {format_seconds(slowest_s)} at most"))


# --- unprepare ---------------------------------------------------------------------------------------------


def check_unprepare(session: SessionRecord) -> CheckOutcome:
    """Calls NodeUnprepareResources with all claims."""
    number = len(_record(session).claims)
    return _all_succeeded(session, PrepareStage.UNPREPARED, format_count(number, "claim"))


def check_repeated_unprepare(session: SessionRecord) -> CheckOutcome:
    """Repeats the unprepare of all claims."""
    return _all_succeeded(session, PrepareStage.UNPREPARED_AGAIN, "no error")


def check_unknown_unprepare(session: SessionRecord) -> CheckOutcome:
    """Unprepares a claim that was never prepared and does not exist."""
    call = _record(session).first_call(PrepareStage.UNKNOWN)
    error = call.error_of(call.claims[0])
    return failed(shorten(error, TEXT_LIMIT)) if error else passed("no error")


def check_lost_device(session: SessionRecord) -> CheckOutcome:
    """Runs the command of --device-command with the word remove, unprepares all claims, then runs it with the
    word restore."""
    return _all_succeeded(session, PrepareStage.LOST_DEVICE, "no error")


def check_deleted_claim(session: SessionRecord) -> CheckOutcome:
    """Deletes the claims that were made with --kubeconfig or --claim-command, then unprepares them."""
    return _all_succeeded(session, PrepareStage.DELETED_CLAIM, "no error")


def check_unprepared_cdi(session: SessionRecord) -> CheckOutcome:
    """Searches the CDI files after the unprepare for the ids that prepare returned; ids that were defined
    before the first prepare do not count."""
    record = _record(session)
    returned = _returned_ids(record)
    if not returned:
        return passed(NO_IDS)
    if record.cdi_unprepared.error:
        return not_run(f"{record.cdi_unprepared.error}; see --cdi-dir")
    own = returned & _defined_ids(record.cdi_prepared) - _defined_ids(record.cdi_before)
    left = sorted(own & _defined_ids(record.cdi_unprepared))
    if left:
        return failed(f"still defined: {join_first(map(shorten, left))}")
    return passed(f"{format_count(len(own), 'id')} gone")
