"""Prepare ledger: cached failures answer only the same request, and every entry expires."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_samples import NOW, claim, health, ref, verdict

from agent.model.health import Health, Severity
from agent.model.prepare import DriverFault, ErrorClass
from agent.prepare import prepare_ledger
from agent.prepare.prepare_ledger import (
    CLAIMS_MAX,
    DRIVER_FAULT_CACHE_S,
    EXPIRED_KEPT_S,
    FAULT_LIMIT_S,
    FAULTS_MAX,
    UNPREPARED_KEPT_S,
    DriverFaults,
    PrepareLedger,
    cached_failure,
    health_fingerprint,
    health_without_faults,
)

A = claim("a")
UNHEALTHY = health_fingerprint([health(("gpu.xid.79", Severity.UNHEALTHY))])
XID = verdict(ErrorClass.FAILED_DEVICE, "gpu.xid.79")
STUCK = verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck")


def ledger_after_failure(of=A, failure=None, at=NOW, ledger=None, **more):
    """Return the ledger after a failure of a device that is Unhealthy already."""
    more = {"fingerprint": UNHEALTHY, "version": "1", "unhealthy": {ref()}} | more
    return prepare_ledger.with_failure(
        ledger or PrepareLedger(),
        of,
        more["fingerprint"],
        failure or XID,
        at,
        more["version"],
        more["unhealthy"],
    )


# --- the same request --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ErrorClass.BAD_CONFIG, ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT])
def test_lasting_failure_is_answered_from_the_cache(kind):
    ledger, failure = ledger_after_failure(failure=verdict(kind, "a.b"))
    assert cached_failure(ledger, A, UNHEALTHY, NOW + 30, "1") == failure


@pytest.mark.parametrize("kind", [ErrorClass.TRANSIENT, ErrorClass.UNKNOWN])
def test_transient_failure_is_never_cached(kind):
    ledger, _ = ledger_after_failure(failure=replace(verdict(kind, "a.b"), sticky_s=600))
    assert cached_failure(ledger, A, UNHEALTHY, NOW, "1") is None


@pytest.mark.parametrize("seconds", [599.9, 600, -0.1, -1e6])
def test_cache_entry_expires_also_when_the_clock_is_set_back(seconds):
    ledger, failure = ledger_after_failure(failure=verdict(ErrorClass.BAD_CONFIG))
    assert cached_failure(ledger, A, "", NOW + seconds, "1") == (failure if 0 <= seconds < 600 else None)


def test_changed_allocation_or_parameters_is_another_request():
    ledger, failure = ledger_after_failure(failure=verdict(ErrorClass.BAD_CONFIG))
    assert cached_failure(ledger, A, "", NOW, "1") == failure
    assert cached_failure(ledger, claim("a", mode="exclusive"), "", NOW, "1") is None
    assert cached_failure(ledger, claim("a", "gpu-1"), "", NOW, "1") is None
    assert cached_failure(ledger, claim("b"), "", NOW, "1") is None


def test_new_driver_version_ignores_the_cache():
    ledger, _ = ledger_after_failure(failure=verdict(ErrorClass.PERMANENT, "cdi.write"))
    assert cached_failure(ledger, A, "", NOW, "2") is None


def test_failed_device_is_retried_when_its_health_changes():
    ledger, failure = ledger_after_failure()
    assert cached_failure(ledger, A, UNHEALTHY, NOW + 3600, "1") == failure
    for known in (health(), health(("gpu.lost", Severity.UNHEALTHY)), None):
        assert cached_failure(ledger, A, health_fingerprint([known]), NOW, "1") is None


def test_health_is_not_read_for_a_cached_bad_config():
    ledger, failure = ledger_after_failure(failure=verdict(ErrorClass.BAD_CONFIG))
    assert cached_failure(ledger, A, pytest.fail, NOW, "1") == failure


def test_success_ends_the_cache_entry():
    ledger, _ = ledger_after_failure()
    ledger = prepare_ledger.with_success(ledger, A, UNHEALTHY, NOW + 1, "1")
    assert cached_failure(ledger, A, UNHEALTHY, NOW + 2, "1") is None
    assert ledger.claims[A.uid].outcome.verdict is None


def test_failed_unprepare_never_answers_a_prepare():
    ledger, failure = prepare_ledger.with_unprepare_failure(
        PrepareLedger(), A, verdict(ErrorClass.PERMANENT, "cdi.write"), NOW, "1"
    )
    assert failure.evidence[0] == "while unpreparing"
    assert cached_failure(ledger, A, "", NOW, "1") is None


def test_health_fingerprint_is_stable_and_has_no_times():
    sick = health(("gpu.xid.79", Severity.UNHEALTHY), ("gpu.heat", Severity.INFO))
    later = sick._replace(
        since=replace(sick.since, mono_ns=9), verified=replace(sick.verified, wall_s=NOW + 5)
    )
    assert health_fingerprint([sick, None, health()]) == "unhealthy:gpu.xid.79 ? healthy"
    assert health_fingerprint([later, None, health()]) == health_fingerprint([sick, None, health()])


def test_health_fingerprint_of_many_devices_is_short_and_distinct():
    many = [health(("gpu.xid.79", Severity.UNHEALTHY))] * 64
    assert len(health_fingerprint(many)) == 16
    assert health_fingerprint(many) != health_fingerprint([*many[:-1], health()])


# --- counting ----------------------------------------------------------------------------------------------


def test_same_failure_is_counted_and_keeps_its_first_time():
    ledger, _ = ledger_after_failure()
    ledger, _ = ledger_after_failure(ledger=ledger, at=NOW + 60)
    _, third = ledger_after_failure(ledger=ledger, at=NOW + 120)
    assert (third.count, third.first_wall_s, third.last_wall_s) == (3, NOW, NOW + 120)


@pytest.mark.parametrize(
    ("of", "failure"),
    [
        (A, verdict(ErrorClass.FAILED_DEVICE, "gpu.lost")),
        (A, verdict(ErrorClass.UNKNOWN, "gpu.xid.79")),
        (claim("a", mode="exclusive"), XID),
    ],
    ids=["other code", "other class", "other parameters"],
)
def test_different_failure_starts_a_new_count(of, failure):
    ledger, _ = ledger_after_failure()
    _, now = ledger_after_failure(of, failure, NOW + 60, ledger)
    assert (now.count, now.first_wall_s) == (1, NOW + 60)


kinds = st.sampled_from(ErrorClass)
codes = st.sampled_from(["a.b", "gpu.xid.79", "config.invalid"])
names = st.sampled_from(["a", "b", "c"])
steps = st.tuples(
    names,
    st.one_of(st.none(), st.builds(verdict, kinds, codes)),
    st.floats(-1000, 1000, allow_nan=False),
    st.booleans(),
)


@given(st.lists(steps, max_size=30))
def test_repetition_never_makes_a_failure_worse(steps):
    ledger, now = PrepareLedger(), NOW
    for name, failure, passed, is_unhealthy in steps:
        now += passed
        if failure is None:
            ledger = prepare_ledger.with_success(ledger, claim(name), "g", now)
        else:
            ledger, counted = prepare_ledger.with_failure(
                ledger, claim(name), "g", failure, now, "", {ref()} if is_unhealthy else set()
            )
            assert (counted.error_class, counted.code, counted.taint) == (
                failure.error_class,
                failure.code,
                failure.taint,
            )
            assert counted.sticky_s <= failure.sticky_s
            assert counted.count >= 1
        numbers = [fault.number for fault in ledger.driver_faults.faults]
        assert numbers == sorted(set(numbers))
        assert all(number < ledger.driver_faults.next_number for number in numbers)


@given(st.lists(steps, max_size=20), names, st.sampled_from(["shared", "exclusive"]), st.integers(-100, 1000))
def test_cached_failure_answers_only_the_same_request(steps, name, mode, passed):
    ledger, now, failures = PrepareLedger(), NOW, {}
    for claim_name, failure, _, _ in steps:
        if failure is None:
            ledger = prepare_ledger.with_success(ledger, claim(claim_name), "g", now)
            failures.pop(claim_name, None)
        else:
            ledger, failures[claim_name] = prepare_ledger.with_failure(
                ledger, claim(claim_name), "g", failure, now
            )
    cached = cached_failure(ledger, claim(name, mode=mode), "g", now + passed, "")
    if cached is not None:
        assert cached == failures[name]
        assert mode == "shared"
        assert 0 <= passed < cached.sticky_s
        assert cached.error_class in prepare_ledger.CACHED_CLASSES


# --- limits ------------------------------------------------------------------------------------------------


def test_oldest_claim_is_dropped_beyond_the_limit():
    ledger = PrepareLedger()
    for number in range(CLAIMS_MAX + 3):
        ledger = prepare_ledger.with_success(ledger, claim(str(number)), "", NOW + number)
    assert len(ledger.claims) == CLAIMS_MAX
    assert set(ledger.claims).isdisjoint({"uid-0", "uid-1", "uid-2"})


def test_changing_codes_do_not_grow_the_ledger():
    ledger = PrepareLedger()
    for number in range(FAULTS_MAX + 5):
        failure = verdict(ErrorClass.FAILED_DEVICE, f"fpga.{number}")
        ledger, _ = ledger_after_failure(
            failure=failure, at=NOW + number / 1000, ledger=ledger, unhealthy=set()
        )
    assert len(ledger.driver_faults.faults) == FAULTS_MAX
    assert ledger.driver_faults.faults[-1].code == f"fpga.{FAULTS_MAX + 4}"


def test_texts_of_a_verdict_are_cut():
    long = replace(XID, summary="x" * 10_000, detail="y" * 10_000, evidence=("z" * 10_000,) * 100)
    ledger, failure = ledger_after_failure(failure=long)
    kept = ledger.claims[A.uid].outcome.verdict
    assert kept == failure
    assert (len(kept.summary), len(kept.detail)) == (2000, 2000)
    assert [len(text) for text in kept.evidence] == [2000] * 16


def test_unprepared_claim_is_kept_for_a_day():
    ledger, failure = ledger_after_failure()
    ledger = prepare_ledger.with_unprepare(ledger, A.ref, NOW + 10)
    kept = prepare_ledger.expire_entries(ledger, NOW + UNPREPARED_KEPT_S).claims[A.uid]
    assert (kept.outcome.verdict, kept.unprepared_wall_s) == (failure, NOW + 10)
    assert not prepare_ledger.expire_entries(ledger, NOW + 10 + UNPREPARED_KEPT_S).claims


def test_unprepare_of_an_unknown_claim_is_ignored():
    assert prepare_ledger.with_unprepare(PrepareLedger(), A.ref, NOW) == PrepareLedger()


def test_devices_of_a_claim_are_known_at_unprepare():
    ledger = prepare_ledger.with_success(PrepareLedger(), claim("a", "gpu-0", "gpu-1", "gpu-0"), "", NOW)
    assert prepare_ledger.prepared_devices(ledger, A.ref) == (ref("gpu-0"), ref("gpu-1"))
    assert prepare_ledger.prepared_devices(ledger, claim("b").ref) == ()


# --- driver-reported faults --------------------------------------------------------------------------------


def with_fault(failure=STUCK, at=NOW, ledger=None, unhealthy=()) -> PrepareLedger:
    return ledger_after_failure(
        failure=failure, at=at, ledger=ledger, fingerprint="healthy", unhealthy=unhealthy
    )[0]


def test_fault_of_a_healthy_device_is_recorded_once():
    ledger = with_fault(ledger=with_fault(), at=NOW + 60)
    assert ledger.driver_faults.faults == (
        DriverFault(1, ref(), "fpga.stuck", "what it is, 3 of 4", "what to do", NOW, A.ref),
    )


def test_no_fault_is_recorded_for_an_unhealthy_device():
    assert with_fault(unhealthy={ref()}).driver_faults == DriverFaults()


@pytest.mark.parametrize("kind", sorted(set(ErrorClass) - {ErrorClass.FAILED_DEVICE}))
def test_only_failed_devices_are_recorded(kind):
    assert with_fault(verdict(kind, "a.b")).driver_faults == DriverFaults()


def test_driver_reported_fault_is_cached_for_60_s():
    ledger = with_fault()
    (kept,) = ledger.claims.values()
    assert cached_failure(ledger, A, "healthy", NOW + DRIVER_FAULT_CACHE_S - 1, "1") == kept.outcome.verdict
    assert cached_failure(ledger, A, "healthy", NOW + DRIVER_FAULT_CACHE_S, "1") is None


def test_success_of_another_claim_clears_fault_and_cache():
    ledger = prepare_ledger.with_success(with_fault(), claim("b"), "", NOW + 5)
    assert ledger.driver_faults.faults[0].expired_wall_s == NOW + 5
    assert cached_failure(ledger, A, "healthy", NOW + 6, "1") is None


def test_success_with_admin_access_clears_no_fault():
    with_admin = claim("b", "gpu-1", "gpu-0")
    devices = tuple(device._replace(admin=device.device == "gpu-0") for device in with_admin.devices)
    ledger = prepare_ledger.with_success(with_fault(), replace(with_admin, devices=devices), "", NOW + 5)
    assert ledger.driver_faults.faults[0].expired_wall_s == 0
    assert ledger.claims["uid-b"].outcome.devices == (ref("gpu-1"), ref("gpu-0"))


def test_success_with_another_device_clears_no_fault():
    ledger = prepare_ledger.with_success(with_fault(), claim("b", "gpu-1"), "", NOW + 5)
    assert ledger.driver_faults.faults[0].expired_wall_s == 0


@pytest.mark.parametrize("at", [NOW + FAULT_LIMIT_S, NOW - FAULT_LIMIT_S])
def test_fault_expires_also_when_the_clock_is_set(at):
    ledger = prepare_ledger.expire_entries(with_fault(), at)
    assert ledger.driver_faults.faults[0].expired_wall_s == at


@pytest.mark.parametrize("step_s", [0.001, 1, FAULT_LIMIT_S - 1])
def test_fault_outlives_a_clock_that_is_set_back_a_little(step_s):
    ledger = prepare_ledger.expire_entries(with_fault(), NOW - step_s)
    assert ledger.driver_faults.faults[0].expired_wall_s == 0
    assert prepare_ledger.next_expiry_wall_s(ledger.driver_faults, NOW - step_s) == NOW + FAULT_LIMIT_S


def test_repeated_failure_does_not_extend_the_fault():
    ledger = with_fault(ledger=with_fault(), at=NOW + FAULT_LIMIT_S - 1, unhealthy={ref()})
    assert prepare_ledger.next_expiry_wall_s(ledger.driver_faults, NOW) == NOW + FAULT_LIMIT_S


def test_fault_after_its_expiry_gets_a_new_number():
    ledger = prepare_ledger.with_success(with_fault(), A, "", NOW + 5, "1")
    (fault,) = with_fault(ledger=ledger, at=NOW + 10).driver_faults.faults
    assert (fault.number, fault.reported_wall_s, fault.expired_wall_s) == (2, NOW + 10, 0)


@pytest.mark.parametrize("at", [NOW + FAULT_LIMIT_S, NOW + 10 * FAULT_LIMIT_S, NOW - FAULT_LIMIT_S])
def test_failure_after_the_limit_records_a_new_fault(at):
    """The fault of before has not been expired yet, because the clock was set."""
    faults_now = with_fault(ledger=with_fault(), at=at).driver_faults.faults
    assert [(fault.reported_wall_s, fault.expired_wall_s) for fault in faults_now] == [(at, 0.0)]


def test_expired_fault_is_dropped_after_an_hour():
    ledger = prepare_ledger.with_success(with_fault(), A, "", NOW)
    assert prepare_ledger.expire_entries(ledger, NOW + EXPIRED_KEPT_S - 1).driver_faults.faults
    assert not prepare_ledger.expire_entries(ledger, NOW + EXPIRED_KEPT_S).driver_faults.faults
    assert prepare_ledger.expire_entries(ledger, NOW + EXPIRED_KEPT_S).driver_faults.next_number == 2
    assert not prepare_ledger.expire_entries(ledger, NOW - EXPIRED_KEPT_S).driver_faults.faults, (
        "the clock was set back"
    )


def test_expired_fault_has_no_next_expiry():
    assert prepare_ledger.next_expiry_wall_s(with_fault().driver_faults, NOW) == NOW + FAULT_LIMIT_S
    assert (
        prepare_ledger.next_expiry_wall_s(
            prepare_ledger.with_success(with_fault(), A, "", NOW + 5).driver_faults, NOW + 5
        )
        is None
    )


def test_fault_in_the_future_expires_now():
    assert prepare_ledger.next_expiry_wall_s(with_fault().driver_faults, NOW - 1800) == NOW - 1800


def test_expired_faults_are_dropped_first_beyond_the_limit():
    ledger = prepare_ledger.with_success(
        with_fault(verdict(ErrorClass.FAILED_DEVICE, "fpga.old")), claim("b", "gpu-1"), "", NOW
    )
    for number in range(FAULTS_MAX):
        other = claim("b", f"gpu-{number + 1}")
        failure = verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck", other)
        ledger, _ = ledger_after_failure(other, failure, NOW + 1, ledger, unhealthy=set())
        ledger = prepare_ledger.with_success(ledger, other, "", NOW + 1)
    assert len(ledger.driver_faults.faults) == FAULTS_MAX
    assert ledger.driver_faults.faults[0].code == "fpga.old"


def test_driver_reported_cause_is_removed_from_health():
    (fault,) = with_fault().driver_faults.faults
    reported, found = (
        health(("fpga.stuck", Severity.UNHEALTHY), driver_reported=True),
        health(("gpu.heat", Severity.DEGRADED)),
    )
    rest = health_without_faults([fault], reported._replace(causes=reported.causes + found.causes))
    assert (rest.health, rest.severity) == (Health.HEALTHY, Severity.DEGRADED)
    assert [cause.code for cause in rest.causes] == ["gpu.heat"]
    assert rest.message == "gpu.heat: gpu.heat holds"
    two = health(("fpga.stuck", Severity.UNHEALTHY), ("fpga.dead", Severity.UNHEALTHY), driver_reported=True)
    assert health_without_faults([fault], two).health is Health.UNHEALTHY
    other = health(("fpga.stuck", Severity.UNHEALTHY), device="gpu-1", driver_reported=True)
    assert health_without_faults([fault], other) == other


def test_cause_of_the_engine_stays_with_the_same_code() -> None:
    (fault,) = with_fault().driver_faults.faults
    found = health(("fpga.stuck", Severity.UNHEALTHY))
    assert health_without_faults([fault], found) == found


def test_second_clear_does_not_extend_an_expired_fault():
    ledger = prepare_ledger.with_success(with_fault(), A, "", NOW + 5)
    ledger = prepare_ledger.with_success(ledger, claim("b"), "", NOW + 50)
    assert [fault.expired_wall_s for fault in ledger.driver_faults.faults] == [NOW + 5]


def test_fault_of_another_device_does_not_change_the_fingerprint():
    other = claim("b", "gpu-1")
    ledger, _ = ledger_after_failure(
        other, verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck", other), unhealthy=set()
    )
    ledger, failure = ledger_after_failure(ledger=ledger)
    ledger = prepare_ledger.with_success(ledger, claim("c", "gpu-1"), "", NOW + 5)
    assert cached_failure(ledger, A, UNHEALTHY, NOW + 6, "1") == failure


def test_unhealthy_device_keeps_the_long_cache_time():
    both = claim("a", "gpu-0", "gpu-1")
    failure = replace(XID, devices=(ref("gpu-0"), ref("gpu-1")))
    for unhealthy, sticky_s in (({ref("gpu-0")}, 86_400), (set(), DRIVER_FAULT_CACHE_S)):
        assert ledger_after_failure(both, failure, unhealthy=unhealthy)[1].sticky_s == sticky_s


# --- two instances -----------------------------------------------------------------------------------------


def test_merge_keeps_the_newest_entry_of_each_claim():
    mine, _ = ledger_after_failure(at=NOW + 10)
    theirs = prepare_ledger.with_success(
        prepare_ledger.with_success(PrepareLedger(), A, "", NOW + 5), claim("b"), "", NOW
    )
    merged = prepare_ledger.merge_ledgers(mine, theirs, NOW + 20)
    assert merged.claims == {**theirs.claims, **mine.claims}
    assert prepare_ledger.merge_ledgers(theirs, mine, NOW + 20).claims == merged.claims


def test_entry_from_the_future_yields_to_a_current_one():
    theirs, _ = ledger_after_failure(at=NOW + 1e8)
    mine = prepare_ledger.with_success(PrepareLedger(), A, "", NOW)
    assert prepare_ledger.merge_ledgers(mine, theirs, NOW + 1).claims == mine.claims


def test_merge_keeps_an_unprepare():
    theirs = prepare_ledger.with_success(PrepareLedger(), A, "", NOW)
    mine = prepare_ledger.with_unprepare(theirs, A.ref, NOW + 1)
    for merged in (
        prepare_ledger.merge_ledgers(mine, theirs, NOW + 2),
        prepare_ledger.merge_ledgers(theirs, mine, NOW + 2),
    ):
        assert merged.claims[A.uid].unprepared_wall_s == NOW + 1


def test_merged_faults_have_unique_numbers():
    mine, theirs = with_fault(), with_fault(verdict(ErrorClass.FAILED_DEVICE, "fpga.lost"))
    merged = prepare_ledger.merge_ledgers(mine, theirs, NOW).driver_faults
    assert [(fault.number, fault.code) for fault in merged.faults] == [(1, "fpga.lost"), (2, "fpga.stuck")]
    assert merged.next_number == 3


def test_merge_keeps_an_expiry_of_either_instance():
    theirs = with_fault()
    mine = prepare_ledger.with_success(theirs, claim("b"), "", NOW + 5)
    for merged in (
        prepare_ledger.merge_ledgers(mine, theirs, NOW + 6),
        prepare_ledger.merge_ledgers(theirs, mine, NOW + 6),
    ):
        assert [fault.expired_wall_s for fault in merged.driver_faults.faults] == [NOW + 5]


def test_merge_keeps_a_new_fault_after_the_clock_was_set_back():
    saved, now = with_fault(), NOW - 1800
    mine = with_fault(ledger=saved, at=now)
    merged = prepare_ledger.merge_ledgers(mine, saved, now + 1).driver_faults.faults
    assert [(fault.reported_wall_s, fault.expired_wall_s) for fault in merged] == [(now, 0.0)]


def ledger_of(steps) -> PrepareLedger:
    ledger = PrepareLedger()
    for name, failure, passed, is_unhealthy in steps:
        at = NOW + abs(passed)
        if failure is None:
            ledger = prepare_ledger.with_success(ledger, claim(name), "g", at)
        else:
            unhealthy = {ref()} if is_unhealthy else set()
            ledger, _ = prepare_ledger.with_failure(ledger, claim(name), "g", failure, at, "", unhealthy)
    return ledger


some_ledgers = st.lists(steps, max_size=12).map(ledger_of)


@given(some_ledgers, some_ledgers)
def test_merge_is_idempotent_with_unique_numbers(mine, theirs):
    now = NOW + 2000
    merged = prepare_ledger.merge_ledgers(mine, theirs, now)
    assert prepare_ledger.merge_ledgers(merged, merged, now) == merged
    assert prepare_ledger.merge_ledgers(mine, merged, now).claims == merged.claims
    numbers = [fault.number for fault in merged.driver_faults.faults]
    assert len(numbers) == len(set(numbers))
