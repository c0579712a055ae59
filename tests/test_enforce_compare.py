"""What cgroups say is compared with what they should, knob by knob; what cannot be compared is said."""

import errno
from collections.abc import Mapping
from typing import Final

import pytest
from enforce_pods import GI, MI, SIZES, SYSTEMD, V1, V2, asked, claim, container, exact, knob, pod
from hypothesis import given
from hypothesis import strategies as st

from agent.allocatable.cgroups import Level
from agent.allocatable.compare import changed_s, compare, expected_text
from agent.allocatable.expected import ExpectedGroup, GroupRef, expect_pod, expect_qos
from agent.allocatable.facts import Exclusive, NodeFacts
from agent.allocatable.knobs import Knob, KnobId
from agent.allocatable.verdicts import CONCERNS, RISKS, Actual, Compared, Verdict
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import parse_cpus
from agent.model.reading import Absence, Missing, Reading

V08: Final = pod(
    container("c1", "cpu=2 memory=128Mi", "cpu=4 memory=256Mi"),
    claims=[claim("cpus", "c1", "cpu=200m memory=128Mi hugepages-2Mi=64Mi")],
)
POD, C1, C2 = KnobId(Knob.QUOTA), "c1", "c2"
ABSENT: Final = Missing(Absence.ABSENT)
Values = Mapping[KnobId, Reading]


def right(groups: tuple[ExpectedGroup, ...], rounded: bool = False) -> dict[GroupRef, Actual]:
    """Cgroups that say what they should: the first value, or the last."""
    return {
        group.group: Actual({one.knob: one.accepted[-1 if rounded else 0].value for one in group.knobs})
        for group in groups
    }


def changed(
    actual: Mapping[GroupRef, Actual], container: str, values: Values, **more: object
) -> dict[GroupRef, Actual]:
    """The same but for some values of the pod, or of a container."""
    return {
        group: Actual({**one.values, **values}, **more) if group.container == container else one  # type: ignore[arg-type]
        for group, one in actual.items()
    }


def judged(
    values: Values,
    container: str = "",
    facts: NodeFacts = V2,
    exclusive: tuple[Exclusive, ...] = (),
    **more: object,
) -> dict[KnobId, Compared]:
    """The verdicts on one cgroup of V08 that has other values; all other cgroups are right."""
    groups = expect_pod(V08, facts, exclusive)
    found = compare(groups, changed(right(groups), container, values, **more), facts.version)
    return {one.knob: one for one in found if one.group.container == container}


def verdict(
    what: Knob, value: Reading, size: int = 0, container: str = "c1", facts: NodeFacts = V2
) -> Verdict:
    return judged({KnobId(what, size): value}, container, facts)[KnobId(what, size)].verdict


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [V1, V2, SYSTEMD])
def test_cgroups_that_say_what_they_should_match(facts: NodeFacts) -> None:
    groups = expect_pod(V08, facts)
    found = compare(groups, right(groups), facts.version)
    assert {one.verdict for one in found} == {Verdict.MATCH}
    assert {one.risk for one in found} == {""}
    assert len(found) == sum(len(group.knobs) for group in groups)


@pytest.mark.parametrize(
    ("what", "value", "size", "expected"),
    [
        (Knob.WEIGHT, 174, 0, Verdict.MATCH),
        (Knob.WEIGHT, 79, 0, Verdict.MATCH),
        (Knob.WEIGHT, 1, 0, Verdict.LOWER),
        (Knob.WEIGHT, 100, 0, Verdict.LOWER),
        (Knob.WEIGHT, 175, 0, Verdict.HIGHER),
        (Knob.QUOTA, 420_000, 0, Verdict.MATCH),
        (Knob.QUOTA, 400_000, 0, Verdict.LOWER),
        (Knob.QUOTA, 420_001, 0, Verdict.HIGHER),
        (Knob.QUOTA, NO_LIMIT, 0, Verdict.UNLIMITED),
        (Knob.PERIOD, 100_000, 0, Verdict.MATCH),
        (Knob.MEMORY, 384 * MI, 0, Verdict.MATCH),
        (Knob.MEMORY, 256 * MI, 0, Verdict.LOWER),
        (Knob.MEMORY, GI, 0, Verdict.HIGHER),
        (Knob.MEMORY, NO_LIMIT, 0, Verdict.UNLIMITED),
        (Knob.MEMORY, 9223372036854771712, 0, Verdict.UNLIMITED),
        (Knob.PAGES, 64 * MI, SIZES[0], Verdict.MATCH),
        (Knob.PAGES, 0, SIZES[0], Verdict.LOWER),
        (Knob.PAGES, 2**62, SIZES[0], Verdict.UNLIMITED),
        (Knob.PAGES, 0, SIZES[1], Verdict.MATCH),
        (Knob.PAGES, GI, SIZES[1], Verdict.HIGHER),
        (Knob.RESERVED, 0, SIZES[0], Verdict.LOWER),
        (Knob.RESERVED, NO_LIMIT, SIZES[1], Verdict.UNLIMITED),
    ],
)
def test_a_value_and_its_verdict(what: Knob, value: int, size: int, expected: Verdict) -> None:
    compared = judged({KnobId(what, size): value}, "c1")[KnobId(what, size)]
    assert compared.verdict is expected
    assert compared.actual == value
    assert bool(compared.risk) is (expected in CONCERNS)


def test_the_formula_that_was_used_is_told() -> None:
    weights = {value: judged({KnobId(Knob.WEIGHT): value}, "c1")[KnobId(Knob.WEIGHT)] for value in (174, 79)}
    assert weights[174].why.endswith(", quadratic")
    assert weights[79].why.endswith(", linear")


def test_a_limit_where_there_should_be_none() -> None:
    groups = expect_pod(pod(container("c1", "cpu=1")), V2)
    values = {KnobId(Knob.QUOTA): 10_000, KnobId(Knob.MEMORY): GI}
    found = compare(groups, changed(right(groups), "c1", values), 2)
    limited = [one for one in found if one.verdict is Verdict.LIMITED]
    assert [one.knob for one in limited] == list(values)
    assert [one.risk for one in limited] == [RISKS[Verdict.LOWER][one.knob.knob] for one in limited]


def test_classes_have_as_good_as_no_limit_of_pages() -> None:
    groups = expect_qos([V08], V2)
    actual = right(groups)
    pages = {one.knob: 2**62 for one in groups[0].knobs if one.knob.size_kib}
    actual[groups[0].group] = Actual({**actual[groups[0].group].values, **pages})
    assert {one.verdict for one in compare(groups, actual, 2)} == {Verdict.MATCH}


def test_what_rounding_makes_of_the_right_value_is_tolerated() -> None:
    mine = pod(container("c1", "cpu=1255m memory=1G", "cpu=1255m memory=1G"))
    groups = expect_pod(mine, SYSTEMD)
    found = {
        one.knob.knob: one for one in compare(groups, right(groups, rounded=True), 2) if one.group.container
    }
    assert found[Knob.QUOTA].verdict is found[Knob.MEMORY].verdict is Verdict.ROUNDED
    assert "126000 us, expected 125500 us: 1255m (limit)" in found[Knob.QUOTA].why
    assert found[Knob.QUOTA].why.endswith("systemd rounds up")


def test_cgroupfs_does_not_round_quotas() -> None:
    mine = pod(container("c1", limits="cpu=1255m memory=1Gi"))
    groups = expect_pod(mine, V2)
    found = compare(groups, changed(right(groups), "c1", {KnobId(Knob.QUOTA): 126_000}), 2)
    assert Verdict.HIGHER in {one.verdict for one in found if one.knob.knob is Knob.QUOTA}


def test_a_wrong_value_whose_reason_is_known_has_it() -> None:
    compared = judged({KnobId(Knob.QUOTA): 400_000})[KnobId(Knob.QUOTA)]
    assert compared.verdict is Verdict.LOWER
    assert compared.why == (
        "400000 us, expected 420000 us: 4000m (c1) + 200m (claim cpus) = 4200m -> 420000 us of 100000;"
        " 400000 us is as if the kubelet did not count claims; one of its containers has 420000 us"
    )
    assert compared.risk == "it is throttled before it has used what it was given"


def test_a_quota_over_another_period_is_the_same_share() -> None:
    found = judged({KnobId(Knob.QUOTA): 210_000, KnobId(Knob.PERIOD): 50_000}, "c1")
    assert found[KnobId(Knob.QUOTA)].verdict is Verdict.MATCH
    assert "here of 50000" in found[KnobId(Knob.QUOTA)].why
    assert found[KnobId(Knob.PERIOD)].verdict is Verdict.LOWER
    assert found[KnobId(Knob.PERIOD)].risk == "it is throttled more often, each time more briefly"


# --- CPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "expected", "words"),
    [
        ("2-5", Verdict.MATCH, "CPUs 2-5, expected CPUs 2-5: CPUs 2-5 from a driver"),
        ("2-3", Verdict.LOWER, "without 4-5"),
        ("2-7", Verdict.HIGHER, "besides 6-7"),
        ("0-3", Verdict.LOWER, "without 4-5, and besides 0-1"),
    ],
)
def test_sets_of_cpus(cpus: str, expected: Verdict, words: str) -> None:
    own = (Exclusive("c1", parse_cpus("2-5"), by_kubelet=False),)
    for what in (KnobId(Knob.CPUS), KnobId(Knob.EFFECTIVE)):
        compared = judged({what: parse_cpus(cpus)}, "c1", exclusive=own)[what]
        assert compared.verdict is expected
        assert words in compared.why


def test_no_set_of_its_own_is_the_parents_in_v2_and_no_cpu_at_all_in_v1() -> None:
    own = (Exclusive("c1", parse_cpus("2-5"), by_kubelet=False),)
    none = {KnobId(Knob.CPUS): 0, KnobId(Knob.EFFECTIVE): 0}
    for facts, expected in ((V2, Verdict.UNLIMITED), (V1, Verdict.LOWER)):
        found = judged(none, "c1", facts, own)
        assert found[KnobId(Knob.CPUS)].verdict is expected
        assert found[KnobId(Knob.CPUS)].why.startswith("CPUs none, expected CPUs 2-5: CPUs 2-5 from a driver")
        assert found[KnobId(Knob.EFFECTIVE)].verdict is Verdict.LOWER


def test_cpus_of_kubelet_and_driver_that_differ_are_whose_write_was_the_last() -> None:
    first, other = (Exclusive("c1", parse_cpus(cpus), cpus == "2-5") for cpus in ("2-5", "6-7"))
    groups = expect_pod(V08, V2, [first, other])
    what = knob(groups, Knob.CPUS, "c1")
    assert (what.accepted, what.unknown) == ((), "CPUs 2-5 from the kubelet and 6-7 from a driver")
    agreed = expect_pod(V08, V2, [first, other._replace(cpus=first.cpus)])
    assert exact(agreed, Knob.CPUS, "c1") == first.cpus


def test_a_set_with_cpu_62_and_more_is_no_missing_limit() -> None:
    cpus = parse_cpus("60-127")
    what = KnobId(Knob.CPUS)
    found = judged({what: cpus}, "c1", exclusive=(Exclusive("c1", cpus, by_kubelet=False),))
    assert found[what].verdict is Verdict.MATCH


# --- a pod and its containers ------------------------------------------------------------------------------


def test_a_container_that_was_given_more_behind_the_kubelets_back_makes_its_pod_too_tight() -> None:
    """NRI changes containers, not pods."""
    groups = expect_pod(V08, V2)
    found = compare(groups, changed(right(groups), "c1", {KnobId(Knob.MEMORY): GI}), 2)
    pods = {one.knob: one for one in found if not one.group.container}
    assert pods[KnobId(Knob.MEMORY)].verdict is Verdict.PARENT_TIGHTER
    assert pods[KnobId(Knob.MEMORY)].why.endswith("; one of its containers has 1Gi")
    assert pods[KnobId(Knob.QUOTA)].verdict is Verdict.MATCH


def two(claims: str = "") -> tuple[ExpectedGroup, ...]:
    both = ("cpu=2 memory=1Gi", "cpu=2 memory=1Gi")
    granted = [claim("x", "c1 c2", claims)] if claims else []
    return expect_pod(pod(container("c1", *both), container("c2", *both), claims=granted), V2)


def test_a_pod_must_hold_all_its_containers() -> None:
    groups = two()
    found = compare(groups, changed(right(groups), "c1", {KnobId(Knob.QUOTA): 300_000}), 2)
    assert found[1].verdict is Verdict.PARENT_TIGHTER
    assert found[1].why.endswith("; its containers together have 500000 us")


def test_a_claim_that_containers_share_counts_once() -> None:
    """Together they may have more than their pod."""
    groups = two("cpu=4 memory=4Gi")
    assert {one.verdict for one in compare(groups, right(groups), 2)} == {Verdict.MATCH}


def test_limits_of_the_pod_as_a_whole_may_be_less_than_its_containers_by_intent() -> None:
    mine = pod(container("c1", limits="cpu=4"), container("c2"), level=asked("cpu=1", "cpu=2"))
    groups = expect_pod(mine, V2)
    assert {one.verdict for one in compare(groups, right(groups), 2)} == {Verdict.MATCH}


def test_what_is_rounded_one_by_one_does_not_make_the_whole_too_tight() -> None:
    """Two quotas of 125500 us that systemd rounds up are 1000 us more than their sum."""
    one = ("cpu=1255m memory=1Gi", "cpu=1255m memory=1Gi")
    groups = expect_pod(pod(container("c1", *one), container("c2", *one)), SYSTEMD)
    found = compare(groups, right(groups, rounded=True), 2)
    assert {one.verdict for one in found if one.knob.knob is Knob.QUOTA} == {Verdict.MATCH, Verdict.ROUNDED}


def test_periods_are_minded_when_pod_and_container_are_compared() -> None:
    groups = expect_pod(V08, V2)
    double = {KnobId(Knob.QUOTA): 840_000, KnobId(Knob.PERIOD): 200_000}
    found = compare(groups, changed(right(groups), "c1", double), 2)
    quotas = [one.verdict for one in found if one.knob.knob is Knob.QUOTA]
    assert quotas == [Verdict.MATCH, Verdict.MATCH]


def test_a_pod_that_has_too_little_stays_lower_and_has_one_reason_more() -> None:
    compared = judged({KnobId(Knob.MEMORY): 128 * MI})[KnobId(Knob.MEMORY)]
    assert compared.verdict is Verdict.LOWER
    assert compared.why.endswith("; one of its containers has 384Mi")


# --- what is not there -------------------------------------------------------------------------------------


def test_a_controller_that_is_not_enabled() -> None:
    found = judged({KnobId(Knob.MEMORY): ABSENT}, "c1", controllers=frozenset({"cpu"}))
    compared = found[KnobId(Knob.MEMORY)]
    assert (compared.verdict, compared.why) == (Verdict.MISSING, "the controller memory is not enabled")
    assert compared.risk


@pytest.mark.parametrize(("facts", "file"), [(V1, "memory.limit_in_bytes"), (V2, "memory.max")])
def test_a_file_that_is_not_there(facts: NodeFacts, file: str) -> None:
    compared = judged({KnobId(Knob.MEMORY): ABSENT}, "c1", facts)[KnobId(Knob.MEMORY)]
    assert (compared.verdict, compared.why) == (Verdict.MISSING, f"there is no {file}")


def test_a_file_that_cannot_be_read() -> None:
    missing = Missing(Absence.UNREADABLE, errno.EACCES)
    compared = judged({KnobId(Knob.MEMORY): missing}, "c1")[KnobId(Knob.MEMORY)]
    assert (compared.verdict, compared.why) == (
        Verdict.MISSING,
        "memory.max cannot be read: Permission denied",
    )


def test_no_limit_is_not_missed_where_there_is_nothing_to_limit() -> None:
    groups = expect_pod(pod(container("c1", "cpu=1")), V2)
    values = {KnobId(Knob.MEMORY): ABSENT, KnobId(Knob.QUOTA): ABSENT, KnobId(Knob.WEIGHT): ABSENT}
    found = {one.knob.knob: one for one in compare(groups, changed(right(groups), "c1", values), 2)}
    assert found[Knob.MEMORY].verdict is found[Knob.QUOTA].verdict is Verdict.NOT_MISSED
    assert found[Knob.WEIGHT].verdict is Verdict.MISSING


def test_old_kernels_have_no_limits_of_reservations() -> None:
    assert verdict(Knob.RESERVED, ABSENT, SIZES[0]) is Verdict.NOT_MISSED
    assert verdict(Knob.PAGES, ABSENT, SIZES[0]) is Verdict.MISSING


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOENT])
def test_a_cgroup_that_vanished_while_it_was_read(number: int) -> None:
    missing = Missing(Absence.UNREADABLE, number)
    assert verdict(Knob.MEMORY, missing) is verdict(Knob.QUOTA, missing) is Verdict.VANISHED


def test_a_cgroup_that_is_gone_is_nobodys_fault() -> None:
    groups = expect_pod(V08, V2)
    found = compare(groups, {**right(groups), groups[1].group: Actual(vanished=True)}, 2)
    assert {one.verdict for one in found if one.group.container} == {Verdict.VANISHED}
    assert {one.verdict for one in found if not one.group.container} == {Verdict.MATCH}


def test_what_nobody_read_is_unknown_not_right() -> None:
    groups = expect_pod(V08, V2)
    assert {one.verdict for one in compare(groups, {}, 2)} == {Verdict.UNKNOWN}
    assert {one.verdict for one in compare(groups, {groups[0].group: Actual()}, 2)} == {Verdict.UNKNOWN}


def test_what_nobody_knows_what_it_should_be_is_unknown() -> None:
    unsaid = pod(container("c1", "cpu=1"), claims=[{"resourceClaimName": "x", "shape": "of 1.40"}])
    groups = expect_pod(unsaid, V2)
    (weight, *_) = compare(groups, {groups[0].group: Actual({KnobId(Knob.WEIGHT): 39})}, 2)
    assert weight.verdict is Verdict.UNKNOWN
    assert "claim x" in weight.why
    assert expected_text(weight.expected) == "unknown"


# --- quiet -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        (0.0, Verdict.QUIET),
        (29.9, Verdict.QUIET),
        (-5.0, Verdict.QUIET),
        (30.0, Verdict.LOWER),
        (-31.0, Verdict.LOWER),
    ],
)
def test_for_half_a_minute_after_a_change_nothing_is_wrong(since: float, expected: Verdict) -> None:
    compared = judged({KnobId(Knob.MEMORY): MI}, "c1", changed_s=since)[KnobId(Knob.MEMORY)]
    assert compared.verdict is expected
    assert bool(compared.risk) is (expected is not Verdict.QUIET)


def test_what_is_right_is_so_at_once() -> None:
    found = judged({}, "c1", changed_s=1.0)
    assert {one.verdict for one in found.values()} == {Verdict.MATCH}


def test_classes_have_a_minute_and_a_half() -> None:
    groups = expect_qos([V08], V2)
    low = {groups[0].group: Actual({KnobId(Knob.WEIGHT): 1}, changed_s=80)}
    assert compare(groups, low, 2)[0].verdict is Verdict.QUIET
    low = {groups[0].group: Actual({KnobId(Knob.WEIGHT): 1}, changed_s=91)}
    assert compare(groups, low, 2)[0].verdict is Verdict.LOWER


def test_since_when_comes_from_starts_and_resizes() -> None:
    states = [
        {"name": name, "state": {"running": {"startedAt": f"1970-01-01T00:0{minute}:00Z"}}}
        for name, minute in (("c1", 1), ("c2", 2))
    ]
    both = pod(container("c1"), container("c2"), containerStatuses=states)
    assert [changed_s(both, 200.0, name) for name in ("", "c1", "c2", "c3")] == [80.0, 140.0, 80.0, None]
    resize = {"type": "PodResizeInProgress", "status": "True", "lastTransitionTime": "1970-01-01T00:03:00Z"}
    resized = pod(container("c1"), containerStatuses=states, conditions=[resize])
    assert changed_s(resized, 200.0, "c1") == 20.0
    assert changed_s(pod(container("c1")), 200.0) is None


# --- completeness ------------------------------------------------------------------------------------------


def test_every_concern_has_a_risk_for_every_knob_that_can_have_it() -> None:
    assert RISKS.keys() == CONCERNS
    for one in CONCERNS - {Verdict.PARENT_TIGHTER}:
        assert RISKS[one].keys() == set(Knob)


@given(
    st.sampled_from([*Knob][:4]),
    st.one_of(st.integers(0, NO_LIMIT), st.builds(Missing, st.sampled_from(Absence), st.integers(0, 40))),
    st.sampled_from([V1, V2, SYSTEMD]),
    st.sampled_from(["", "c1"]),
)
def test_any_reading_has_a_verdict_and_only_an_accepted_value_matches(
    what: Knob, reading: Reading, facts: NodeFacts, name: str
) -> None:
    compared = judged({KnobId(what): reading}, name, facts)[KnobId(what)]
    accepted = {option.value for option in compared.expected.accepted}
    if compared.verdict in {Verdict.MATCH, Verdict.ROUNDED}:
        assert reading in accepted
    assert (compared.verdict in CONCERNS) is bool(compared.risk)
    assert compared.group.level is (Level.CONTAINER if name else Level.POD)
