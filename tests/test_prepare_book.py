"""The book of prepares: the same answer for the same question and no other, and nothing lasts for ever."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_paper import NOW, claim, health, ref, verdict

from agent.model.health import Health, Severity
from agent.model.prepare import DriverFault, ErrorClass
from agent.prepare import driver_faults as faults
from agent.prepare import ledger as books
from agent.prepare.driver_faults import EXCUSED_KEPT_S, LIMIT_S, TOLD_MAX, DriverFaults, without_faults
from agent.prepare.ledger import (
    CLAIMS_MAX,
    OVER_KEPT_S,
    TOLD_STICKY_S,
    PrepareLedger,
    cached_failure,
    generation_of,
)

A = claim("a")
UNHEALTHY = generation_of([health(("gpu.xid.79", Severity.UNHEALTHY))])
XID = verdict(ErrorClass.FAILED_DEVICE, "gpu.xid.79")
STUCK = verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck")


def failed(of=A, said=None, at=NOW, book=None, **more):
    """The book after a failure, the device being held Unhealthy already."""
    more = {"generation": UNHEALTHY, "version": "1", "held": {ref()}} | more
    return books.failed(
        book or PrepareLedger(), of, more["generation"], said or XID, at, more["version"], more["held"]
    )


# --- the same question -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ErrorClass.BAD_CONFIG, ErrorClass.FAILED_DEVICE, ErrorClass.PERMANENT])
def test_what_lasts_is_answered_from_memory(kind):
    book, said = failed(said=verdict(kind, "a.b"))
    assert cached_failure(book, A, UNHEALTHY, NOW + 30, "1") == said


@pytest.mark.parametrize("kind", [ErrorClass.TRANSIENT, ErrorClass.UNKNOWN])
def test_what_may_pass_is_always_tried_again_whatever_the_verdict_says(kind):
    book, _ = failed(said=replace(verdict(kind, "a.b"), sticky_s=600))
    assert cached_failure(book, A, UNHEALTHY, NOW, "1") is None


@pytest.mark.parametrize("seconds", [599.9, 600, -0.1, -1e6])
def test_an_answer_expires_and_a_clock_that_was_set_back_ends_it(seconds):
    book, said = failed(said=verdict(ErrorClass.BAD_CONFIG))
    assert cached_failure(book, A, "", NOW + seconds, "1") == (said if 0 <= seconds < 600 else None)


def test_another_allocation_or_other_parameters_are_another_question():
    book, said = failed(said=verdict(ErrorClass.BAD_CONFIG))
    assert cached_failure(book, A, "", NOW, "1") == said
    assert cached_failure(book, claim("a", mode="exclusive"), "", NOW, "1") is None
    assert cached_failure(book, claim("a", "gpu-1"), "", NOW, "1") is None
    assert cached_failure(book, claim("b"), "", NOW, "1") is None


def test_another_version_of_the_driver_is_asked_anew():
    book, _ = failed(said=verdict(ErrorClass.PERMANENT, "cdi.write"))
    assert cached_failure(book, A, "", NOW, "2") is None


def test_a_failed_device_is_tried_again_as_soon_as_other_is_known_of_it():
    book, said = failed()
    assert cached_failure(book, A, UNHEALTHY, NOW + 3600, "1") == said
    for known in (health(), health(("gpu.lost", Severity.UNHEALTHY)), None):
        assert cached_failure(book, A, generation_of([known]), NOW, "1") is None


def test_what_is_known_of_devices_does_not_matter_to_a_bad_config_and_is_not_asked():
    book, said = failed(said=verdict(ErrorClass.BAD_CONFIG))
    assert cached_failure(book, A, pytest.fail, NOW, "1") == said


def test_a_success_ends_it():
    book, _ = failed()
    book = books.succeeded(book, A, UNHEALTHY, NOW + 1, "1")
    assert cached_failure(book, A, UNHEALTHY, NOW + 2, "1") is None
    assert book.claims[A.uid].outcome.verdict is None


def test_how_an_unprepare_ended_says_nothing_of_the_next_prepare():
    book, said = books.unprepare_failed(
        PrepareLedger(), A, verdict(ErrorClass.PERMANENT, "cdi.write"), NOW, "1"
    )
    assert said.evidence[0] == "while unpreparing"
    assert cached_failure(book, A, "", NOW, "1") is None


def test_the_generation_is_the_same_text_over_restarts_and_has_no_times():
    one = health(("gpu.xid.79", Severity.UNHEALTHY), ("gpu.heat", Severity.INFO))
    later = one._replace(since=replace(one.since, mono_ns=9), verified=replace(one.verified, wall_s=NOW + 5))
    assert generation_of([one, None, health()]) == "unhealthy:gpu.xid.79 ? healthy"
    assert generation_of([later, None, health()]) == generation_of([one, None, health()])


def test_the_generation_of_many_devices_is_short_and_tells_them_apart():
    many = [health(("gpu.xid.79", Severity.UNHEALTHY))] * 64
    assert len(generation_of(many)) == 16
    assert generation_of(many) != generation_of([*many[:-1], health()])


# --- counting ----------------------------------------------------------------------------------------------


def test_the_same_failure_counts_on_and_keeps_its_beginning():
    book, _ = failed()
    book, _ = failed(book=book, at=NOW + 60)
    _, third = failed(book=book, at=NOW + 120)
    assert (third.count, third.first_wall_s, third.last_wall_s) == (3, NOW, NOW + 120)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (A, verdict(ErrorClass.FAILED_DEVICE, "gpu.lost")),
        (A, verdict(ErrorClass.UNKNOWN, "gpu.xid.79")),
        (claim("a", mode="exclusive"), XID),
    ],
    ids=["other code", "other class", "other parameters"],
)
def test_another_failure_begins_anew(of, said):
    book, _ = failed()
    _, now = failed(of, said, NOW + 60, book)
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
    book, now = PrepareLedger(), NOW
    for name, said, passed, is_held in steps:
        now += passed
        if said is None:
            book = books.succeeded(book, claim(name), "g", now)
        else:
            book, told = books.failed(book, claim(name), "g", said, now, "", {ref()} if is_held else set())
            assert (told.error_class, told.code, told.taint) == (said.error_class, said.code, said.taint)
            assert told.sticky_s <= said.sticky_s
            assert told.count >= 1
        numbers = [fault.number for fault in book.told.faults]
        assert numbers == sorted(set(numbers))
        assert all(number < book.told.next_number for number in numbers)


@given(st.lists(steps, max_size=20), names, st.sampled_from(["shared", "exclusive"]), st.integers(-100, 1000))
def test_an_answer_is_only_ever_given_to_the_very_question_that_got_it(steps, name, mode, passed):
    book, now, asked = PrepareLedger(), NOW, {}
    for who, said, _, _ in steps:
        if said is None:
            book = books.succeeded(book, claim(who), "g", now)
            asked.pop(who, None)
        else:
            book, asked[who] = books.failed(book, claim(who), "g", said, now)
    answer = cached_failure(book, claim(name, mode=mode), "g", now + passed, "")
    if answer is not None:
        assert answer == asked[name]
        assert mode == "shared"
        assert 0 <= passed < answer.sticky_s
        assert answer.error_class in books.STICKY


# --- bounds ------------------------------------------------------------------------------------------------


def test_the_oldest_of_too_many_claims_goes():
    book = PrepareLedger()
    for number in range(CLAIMS_MAX + 3):
        book = books.succeeded(book, claim(str(number)), "", NOW + number)
    assert len(book.claims) == CLAIMS_MAX
    assert set(book.claims).isdisjoint({"uid-0", "uid-1", "uid-2"})


def test_a_driver_that_says_another_code_each_time_fills_no_book():
    book = PrepareLedger()
    for number in range(TOLD_MAX + 5):
        said = verdict(ErrorClass.FAILED_DEVICE, f"fpga.{number}")
        book, _ = failed(said=said, at=NOW + number / 1000, book=book, held=set())
    assert len(book.told.faults) == TOLD_MAX
    assert book.told.faults[-1].code == f"fpga.{TOLD_MAX + 4}"


def test_no_text_of_a_driver_is_too_long_to_be_remembered():
    long = replace(XID, summary="x" * 10_000, detail="y" * 10_000, evidence=("z" * 10_000,) * 100)
    book, said = failed(said=long)
    kept = book.claims[A.uid].outcome.verdict
    assert kept == said
    assert (len(kept.summary), len(kept.detail)) == (2000, 2000)
    assert [len(text) for text in kept.evidence] == [2000] * 16


def test_a_claim_that_failed_is_remembered_for_a_day_when_it_is_gone():
    book, said = failed()
    book = books.unprepared(book, A.ref, NOW + 10)
    kept = books.age(book, NOW + OVER_KEPT_S).claims[A.uid]
    assert (kept.outcome.verdict, kept.over_wall_s) == (said, NOW + 10)
    assert not books.age(book, NOW + 10 + OVER_KEPT_S).claims


def test_unpreparing_what_nobody_prepared_is_no_event():
    assert books.unprepared(PrepareLedger(), A.ref, NOW) == PrepareLedger()


def test_the_devices_of_a_claim_are_known_when_it_is_unprepared():
    book = books.succeeded(PrepareLedger(), claim("a", "gpu-0", "gpu-1", "gpu-0"), "", NOW)
    assert books.devices_of(book, A.ref) == (ref("gpu-0"), ref("gpu-1"))
    assert books.devices_of(book, claim("b").ref) == ()


# --- devices that the driver found broken ------------------------------------------------------------------


def told_of(said=STUCK, at=NOW, book=None, held=()) -> PrepareLedger:
    return failed(said=said, at=at, book=book, generation="healthy", held=held)[0]


def test_a_device_that_nobody_holds_unhealthy_is_told_of_once():
    book = told_of(book=told_of(), at=NOW + 60)
    assert book.told.faults == (
        DriverFault(1, ref(), "fpga.stuck", "what it is, 3 of 4", "what to do", NOW, A.ref),
    )


def test_of_a_device_that_is_held_unhealthy_nothing_needs_to_be_told():
    assert told_of(held={ref()}).told == DriverFaults()


@pytest.mark.parametrize("kind", sorted(set(ErrorClass) - {ErrorClass.FAILED_DEVICE}))
def test_only_a_failed_device_is_told_of(kind):
    assert told_of(verdict(kind, "a.b")).told == DriverFaults()


def test_the_driver_is_asked_again_when_the_kubelet_comes_again_since_nobody_else_could_tell():
    book = told_of()
    (kept,) = book.claims.values()
    assert cached_failure(book, A, "healthy", NOW + TOLD_STICKY_S - 1, "1") == kept.outcome.verdict
    assert cached_failure(book, A, "healthy", NOW + TOLD_STICKY_S, "1") is None


def test_a_success_of_another_claim_excuses_the_device_and_ends_the_answer():
    book = books.succeeded(told_of(), claim("b"), "", NOW + 5)
    assert book.told.faults[0].excused_wall_s == NOW + 5
    assert cached_failure(book, A, "healthy", NOW + 6, "1") is None


def test_a_success_with_another_device_excuses_nobody():
    book = books.succeeded(told_of(), claim("b", "gpu-1"), "", NOW + 5)
    assert book.told.faults[0].excused_wall_s == 0


@pytest.mark.parametrize("at", [NOW + LIMIT_S, NOW - 1])
def test_time_ends_it_whatever_the_clock_does(at):
    book = books.age(told_of(), at)
    assert book.told.faults[0].excused_wall_s == at


def test_failing_on_does_not_prolong_it():
    book = told_of(book=told_of(), at=NOW + LIMIT_S - 1, held={ref()})
    assert faults.due_wall_s(book.told) == NOW + LIMIT_S


def test_told_again_after_it_was_excused_is_a_fault_of_its_own():
    book = books.succeeded(told_of(), A, "", NOW + 5, "1")
    (fault,) = told_of(book=book, at=NOW + 10).told.faults
    assert (fault.number, fault.told_wall_s, fault.excused_wall_s) == (2, NOW + 10, 0)


def test_who_is_excused_is_forgotten_when_everybody_has_heard_it():
    book = books.succeeded(told_of(), A, "", NOW)
    assert books.age(book, NOW + EXCUSED_KEPT_S - 1).told.faults
    assert not books.age(book, NOW + EXCUSED_KEPT_S).told.faults
    assert books.age(book, NOW + EXCUSED_KEPT_S).told.next_number == 2
    assert not books.age(book, NOW - EXCUSED_KEPT_S).told.faults, "the clock was set back"


def test_nobody_waits_for_the_end_of_what_is_over():
    assert faults.due_wall_s(told_of().told) == NOW + LIMIT_S
    assert faults.due_wall_s(books.succeeded(told_of(), A, "", NOW + 5).told) is None


def test_of_too_many_faults_those_that_are_over_go_first():
    book = books.succeeded(
        told_of(verdict(ErrorClass.FAILED_DEVICE, "fpga.old")), claim("b", "gpu-1"), "", NOW
    )
    for number in range(TOLD_MAX):
        other = claim("b", f"gpu-{number + 1}")
        said = verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck", other)
        book, _ = failed(other, said, NOW + 1, book, held=set())
        book = books.succeeded(book, other, "", NOW + 1)
    assert len(book.told.faults) == TOLD_MAX
    assert book.told.faults[0].code == "fpga.old"


def test_what_the_driver_told_of_is_no_evidence_of_its_own():
    (fault,) = told_of().told.faults
    told, found = (
        health(("fpga.stuck", Severity.UNHEALTHY), told=True),
        health(("gpu.heat", Severity.DEGRADED)),
    )
    rest = without_faults([fault], told._replace(causes=told.causes + found.causes))
    assert (rest.health, rest.severity) == (Health.HEALTHY, Severity.DEGRADED)
    assert [cause.code for cause in rest.causes] == ["gpu.heat"]
    assert rest.message == "gpu.heat: gpu.heat is so"
    two = health(("fpga.stuck", Severity.UNHEALTHY), ("fpga.dead", Severity.UNHEALTHY), told=True)
    assert without_faults([fault], two).health is Health.UNHEALTHY
    other = health(("fpga.stuck", Severity.UNHEALTHY), device="gpu-1", told=True)
    assert without_faults([fault], other) == other


def test_what_the_engine_found_itself_stays_whatever_the_driver_calls_its_own() -> None:
    (fault,) = told_of().told.faults
    found = health(("fpga.stuck", Severity.UNHEALTHY))
    assert without_faults([fault], found) == found


def test_excused_again_it_is_not_remembered_for_longer():
    book = books.succeeded(told_of(), A, "", NOW + 5)
    book = books.succeeded(book, claim("b"), "", NOW + 50)
    assert [fault.excused_wall_s for fault in book.told.faults] == [NOW + 5]


def test_what_was_told_of_another_claim_s_device_is_not_known_of_this_one_s():
    other = claim("b", "gpu-1")
    book, _ = failed(other, verdict(ErrorClass.FAILED_DEVICE, "fpga.stuck", other), held=set())
    book, said = failed(book=book)
    book = books.succeeded(book, claim("c", "gpu-1"), "", NOW + 5)
    assert cached_failure(book, A, UNHEALTHY, NOW + 6, "1") == said


def test_a_device_that_is_held_anyway_keeps_the_claim_though_the_driver_found_another():
    both = claim("a", "gpu-0", "gpu-1")
    said = replace(XID, devices=(ref("gpu-0"), ref("gpu-1")))
    for held, sticky_s in (({ref("gpu-0")}, 86_400), (set(), TOLD_STICKY_S)):
        assert failed(both, said, held=held)[1].sticky_s == sticky_s


# --- two instances -----------------------------------------------------------------------------------------


def test_of_two_instances_the_newest_word_on_each_claim_counts():
    mine, _ = failed(at=NOW + 10)
    theirs = books.succeeded(books.succeeded(PrepareLedger(), A, "", NOW + 5), claim("b"), "", NOW)
    merged = books.merge(mine, theirs, NOW + 20)
    assert merged.claims == {**theirs.claims, **mine.claims}
    assert books.merge(theirs, mine, NOW + 20).claims == merged.claims


def test_what_was_dated_into_the_future_yields_to_what_happens_now():
    theirs, _ = failed(at=NOW + 1e8)
    mine = books.succeeded(PrepareLedger(), A, "", NOW)
    assert books.merge(mine, theirs, NOW + 1).claims == mine.claims


def test_that_a_claim_is_over_is_not_undone_by_who_has_not_heard_it():
    theirs = books.succeeded(PrepareLedger(), A, "", NOW)
    mine = books.unprepared(theirs, A.ref, NOW + 1)
    for merged in (books.merge(mine, theirs, NOW + 2), books.merge(theirs, mine, NOW + 2)):
        assert merged.claims[A.uid].over_wall_s == NOW + 1


def test_faults_that_two_instances_told_of_at_once_get_numbers_of_their_own():
    mine, theirs = told_of(), told_of(verdict(ErrorClass.FAILED_DEVICE, "fpga.lost"))
    merged = books.merge(mine, theirs, NOW).told
    assert [(fault.number, fault.code) for fault in merged.faults] == [(1, "fpga.lost"), (2, "fpga.stuck")]
    assert merged.next_number == 3


def test_whoever_excused_a_device_is_believed():
    theirs = told_of()
    mine = books.succeeded(theirs, claim("b"), "", NOW + 5)
    for merged in (books.merge(mine, theirs, NOW + 6), books.merge(theirs, mine, NOW + 6)):
        assert [fault.excused_wall_s for fault in merged.told.faults] == [NOW + 5]


def book_of(steps) -> PrepareLedger:
    book = PrepareLedger()
    for name, said, passed, is_held in steps:
        at = NOW + abs(passed)
        if said is None:
            book = books.succeeded(book, claim(name), "g", at)
        else:
            held = {ref()} if is_held else set()
            book, _ = books.failed(book, claim(name), "g", said, at, "", held)
    return book


some_books = st.lists(steps, max_size=12).map(book_of)


@given(some_books, some_books)
def test_merging_again_changes_nothing_and_every_number_is_one_faults(mine, theirs):
    now = NOW + 2000
    merged = books.merge(mine, theirs, now)
    assert books.merge(merged, merged, now) == merged
    assert books.merge(mine, merged, now).claims == merged.claims
    numbers = [fault.number for fault in merged.told.faults]
    assert len(numbers) == len(set(numbers))
