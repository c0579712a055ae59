"""Comparison of actual with expected cgroup values, knob by knob, and the verdicts."""

import errno
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pytest
from cgroup_audit_pods import (
    GI,
    MI,
    SIZES,
    SYSTEMD,
    V1,
    V2,
    claim,
    container,
    exact_value,
    knob,
    pod,
    resources,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.cgroup_audit.audit_verdicts import (
    CONSEQUENCES,
    DRIFT_VERDICTS,
    ActualCgroup,
    AuditVerdict,
    SettingComparison,
)
from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind
from agent.cgroup_audit.compare import compare_cgroups, format_expected, since_change_s
from agent.cgroup_audit.expected_cgroups import (
    CgroupId,
    ExpectedCgroup,
    expected_pod_cgroups,
    expected_qos_cgroups,
)
from agent.cgroup_audit.kubelet_config import ExclusiveCpus, NodeFacts
from agent.model.cpuset import parse_cpus
from agent.model.pod_findings import NO_LIMIT
from agent.model.reading import Absence, Missing, Reading

V08: Final = pod(
    container("c1", "cpu=2 memory=128Mi", "cpu=4 memory=256Mi"),
    claims=[claim("cpus", "c1", "cpu=200m memory=128Mi hugepages-2Mi=64Mi")],
)
POD, C1, C2 = CgroupSettingId(SettingKind.QUOTA), "c1", "c2"
ABSENT: Final = Missing(Absence.ABSENT)
Values = Mapping[CgroupSettingId, Reading]


def correct_groups(groups: tuple[ExpectedCgroup, ...], rounded: bool = False) -> dict[CgroupId, ActualCgroup]:
    """Return cgroups with expected values: the first accepted value, or the last if ``rounded``."""
    return {
        group.cgroup: ActualCgroup(
            {setting.setting: setting.accepted[-1 if rounded else 0].value for setting in group.settings}
        )
        for group in groups
    }


def with_values(
    actual: Mapping[CgroupId, ActualCgroup], container: str, values: Values, **more: object
) -> dict[CgroupId, ActualCgroup]:
    """Return the cgroups with some values of the pod, or of a container, replaced."""
    return {
        group: ActualCgroup({**cgroup.values, **values}, **more) if group.container == container else cgroup  # type: ignore[arg-type]
        for group, cgroup in actual.items()
    }


def compare_v08(
    values: Values,
    container: str = "",
    facts: NodeFacts = V2,
    exclusive: tuple[ExclusiveCpus, ...] = (),
    **more: object,
) -> dict[CgroupSettingId, SettingComparison]:
    """Compare V08 with other values in one cgroup; return the verdicts on that cgroup."""
    groups = expected_pod_cgroups(V08, facts, exclusive)
    found = compare_cgroups(
        groups, with_values(correct_groups(groups), container, values, **more), facts.cgroup_version
    )
    return {
        comparison.setting: comparison for comparison in found if comparison.cgroup.container == container
    }


def verdict(
    kind: SettingKind, value: Reading, size: int = 0, container: str = "c1", facts: NodeFacts = V2
) -> AuditVerdict:
    return compare_v08({CgroupSettingId(kind, size): value}, container, facts)[
        CgroupSettingId(kind, size)
    ].verdict


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [V1, V2, SYSTEMD])
def test_cgroups_with_expected_values_match(facts: NodeFacts) -> None:
    groups = expected_pod_cgroups(V08, facts)
    found = compare_cgroups(groups, correct_groups(groups), facts.cgroup_version)
    assert {comparison.verdict for comparison in found} == {AuditVerdict.MATCH}
    assert {comparison.consequence for comparison in found} == {""}
    assert len(found) == sum(len(group.settings) for group in groups)


@pytest.mark.parametrize(
    ("kind", "value", "size", "expected"),
    [
        (SettingKind.WEIGHT, 174, 0, AuditVerdict.MATCH),
        (SettingKind.WEIGHT, 79, 0, AuditVerdict.MATCH),
        (SettingKind.WEIGHT, 1, 0, AuditVerdict.LOWER),
        (SettingKind.WEIGHT, 100, 0, AuditVerdict.LOWER),
        (SettingKind.WEIGHT, 175, 0, AuditVerdict.HIGHER),
        (SettingKind.QUOTA, 420_000, 0, AuditVerdict.MATCH),
        (SettingKind.QUOTA, 400_000, 0, AuditVerdict.LOWER),
        (SettingKind.QUOTA, 420_001, 0, AuditVerdict.HIGHER),
        (SettingKind.QUOTA, NO_LIMIT, 0, AuditVerdict.UNLIMITED),
        (SettingKind.PERIOD, 100_000, 0, AuditVerdict.MATCH),
        (SettingKind.MEMORY, 384 * MI, 0, AuditVerdict.MATCH),
        (SettingKind.MEMORY, 256 * MI, 0, AuditVerdict.LOWER),
        (SettingKind.MEMORY, GI, 0, AuditVerdict.HIGHER),
        (SettingKind.MEMORY, NO_LIMIT, 0, AuditVerdict.UNLIMITED),
        (SettingKind.MEMORY, 9223372036854771712, 0, AuditVerdict.UNLIMITED),
        (SettingKind.PAGES, 64 * MI, SIZES[0], AuditVerdict.MATCH),
        (SettingKind.PAGES, 0, SIZES[0], AuditVerdict.LOWER),
        (SettingKind.PAGES, 2**62, SIZES[0], AuditVerdict.UNLIMITED),
        (SettingKind.PAGES, 0, SIZES[1], AuditVerdict.MATCH),
        (SettingKind.PAGES, GI, SIZES[1], AuditVerdict.HIGHER),
        (SettingKind.RESERVED, 0, SIZES[0], AuditVerdict.LOWER),
        (SettingKind.RESERVED, NO_LIMIT, SIZES[1], AuditVerdict.UNLIMITED),
    ],
)
def test_verdict_follows_from_actual_and_expected_value(
    kind: SettingKind, value: int, size: int, expected: AuditVerdict
) -> None:
    compared = compare_v08({CgroupSettingId(kind, size): value}, "c1")[CgroupSettingId(kind, size)]
    assert compared.verdict is expected
    assert compared.actual == value
    assert bool(compared.consequence) is (expected in DRIFT_VERDICTS)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (SettingKind.QUOTA, 199_999, AuditVerdict.LOWER),
        (SettingKind.QUOTA, 200_000, AuditVerdict.UNKNOWN),
        (SettingKind.QUOTA, 700_000, AuditVerdict.UNKNOWN),
        (SettingKind.MEMORY, GI, AuditVerdict.LOWER),
        (SettingKind.MEMORY, 7 * GI, AuditVerdict.UNKNOWN),
        (SettingKind.MEMORY, NO_LIMIT, AuditVerdict.UNKNOWN),
    ],
)
def test_value_with_unknown_claim_amounts_is_lower_or_unknown(
    kind: SettingKind, value: int, expected: AuditVerdict
) -> None:
    mine = pod(
        container("c1", "cpu=1 memory=1Gi", "cpu=2 memory=2Gi"),
        claims=[{"resourceClaimName": "x", "shape": "of 1.40"}],
    )
    groups = expected_pod_cgroups(mine, V2)
    compared = compare_cgroups(groups, {groups[0].cgroup: ActualCgroup({CgroupSettingId(kind): value})}, 2)
    assert [
        comparison.verdict
        for comparison in compared
        if comparison.setting.kind is kind and not comparison.cgroup.container
    ] == [expected]


def test_container_without_a_limit_leaves_the_pods_limit_correct() -> None:
    free = {CgroupSettingId(SettingKind.MEMORY): NO_LIMIT}
    groups = expected_pod_cgroups(V08, V2)
    found = compare_cgroups(groups, with_values(correct_groups(groups), "c1", free), 2)
    memory = [comparison.verdict for comparison in found if comparison.setting.kind is SettingKind.MEMORY]
    assert memory == [AuditVerdict.MATCH, AuditVerdict.UNLIMITED]


def test_reason_names_the_weight_formula() -> None:
    weights = {
        value: compare_v08({CgroupSettingId(SettingKind.WEIGHT): value}, "c1")[
            CgroupSettingId(SettingKind.WEIGHT)
        ]
        for value in (174, 79)
    }
    assert weights[174].reason.endswith(", quadratic")
    assert weights[79].reason.endswith(", linear")


def test_limit_where_none_is_expected_is_limited() -> None:
    groups = expected_pod_cgroups(pod(container("c1", "cpu=1")), V2)
    values = {CgroupSettingId(SettingKind.QUOTA): 10_000, CgroupSettingId(SettingKind.MEMORY): GI}
    found = compare_cgroups(groups, with_values(correct_groups(groups), "c1", values), 2)
    limited = [comparison for comparison in found if comparison.verdict is AuditVerdict.LIMITED]
    assert [comparison.setting for comparison in limited] == list(values)
    assert [comparison.consequence for comparison in limited] == [
        CONSEQUENCES[AuditVerdict.LOWER][comparison.setting.kind] for comparison in limited
    ]


def test_huge_page_limit_of_a_qos_class_counts_as_none() -> None:
    groups = expected_qos_cgroups([V08], V2)
    actual = correct_groups(groups)
    pages = {setting.setting: 2**62 for setting in groups[0].settings if setting.setting.size_kib}
    actual[groups[0].cgroup] = ActualCgroup({**actual[groups[0].cgroup].values, **pages})
    assert {comparison.verdict for comparison in compare_cgroups(groups, actual, 2)} == {AuditVerdict.MATCH}


def test_rounded_form_of_the_expected_value_is_accepted() -> None:
    mine = pod(container("c1", "cpu=1255m memory=1G", "cpu=1255m memory=1G"))
    groups = expected_pod_cgroups(mine, SYSTEMD)
    found = {
        comparison.setting.kind: comparison
        for comparison in compare_cgroups(groups, correct_groups(groups, rounded=True), 2)
        if comparison.cgroup.container
    }
    assert found[SettingKind.QUOTA].verdict is found[SettingKind.MEMORY].verdict is AuditVerdict.ROUNDED
    assert "126000 us, expected 125500 us: 1255m (limit)" in found[SettingKind.QUOTA].reason
    assert found[SettingKind.QUOTA].reason.endswith("systemd rounds up")


def test_rounded_quota_with_cgroupfs_is_higher() -> None:
    mine = pod(container("c1", limits="cpu=1255m memory=1Gi"))
    groups = expected_pod_cgroups(mine, V2)
    found = compare_cgroups(
        groups, with_values(correct_groups(groups), "c1", {CgroupSettingId(SettingKind.QUOTA): 126_000}), 2
    )
    assert AuditVerdict.HIGHER in {
        comparison.verdict for comparison in found if comparison.setting.kind is SettingKind.QUOTA
    }


def test_wrong_value_with_a_known_reason_names_the_reason() -> None:
    compared = compare_v08({CgroupSettingId(SettingKind.QUOTA): 400_000})[CgroupSettingId(SettingKind.QUOTA)]
    assert compared.verdict is AuditVerdict.LOWER
    assert compared.reason == (
        "400000 us, expected 420000 us: 4000m (c1) + 200m (claim cpus) = 4200m -> 420000 us of 100000;"
        " 400000 us is the value of a kubelet that does not count claims; one of its containers has 420000 us"
    )
    assert compared.consequence == "the cgroup is throttled before it uses its allocation"


def test_quota_over_another_period_is_scaled_and_matches() -> None:
    found = compare_v08(
        {CgroupSettingId(SettingKind.QUOTA): 210_000, CgroupSettingId(SettingKind.PERIOD): 50_000}, "c1"
    )
    assert found[CgroupSettingId(SettingKind.QUOTA)].verdict is AuditVerdict.MATCH
    assert "scaled to a period of 50000" in found[CgroupSettingId(SettingKind.QUOTA)].reason
    assert found[CgroupSettingId(SettingKind.PERIOD)].verdict is AuditVerdict.LOWER
    assert (
        found[CgroupSettingId(SettingKind.PERIOD)].consequence
        == "the cgroup is throttled more often, for shorter times"
    )


@pytest.mark.parametrize(
    ("quota", "period", "verdicts"),
    [
        (NO_LIMIT, 100_000, {AuditVerdict.UNKNOWN}),
        (20_000, 10_000, {AuditVerdict.MATCH}),
        (10_000, 10_000, {AuditVerdict.LOWER}),
    ],
)
def test_quota_without_the_kubelets_configuration_has_no_expected_period(
    quota: int, period: int, verdicts: set[AuditVerdict]
) -> None:
    mine = pod(container("c1", limits="cpu=2 memory=1Gi"))
    groups = expected_pod_cgroups(mine, replace(V2, are_quotas_known=False))
    changed = {CgroupSettingId(SettingKind.QUOTA): quota, CgroupSettingId(SettingKind.PERIOD): period}
    found = compare_cgroups(groups, with_values(correct_groups(groups), "c1", changed), 2)
    assert SettingKind.PERIOD not in {comparison.setting.kind for comparison in found}
    assert {
        comparison.verdict
        for comparison in found
        if comparison.cgroup.container == "c1" and comparison.setting.kind is SettingKind.QUOTA
    } == verdicts


# --- CPUs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "expected", "text"),
    [
        ("2-5", AuditVerdict.MATCH, "CPUs 2-5, expected CPUs 2-5: CPUs 2-5 from a driver"),
        ("2-3", AuditVerdict.LOWER, "missing 4-5"),
        ("2-7", AuditVerdict.HIGHER, "extra 6-7"),
        ("0-3", AuditVerdict.LOWER, "missing 4-5, extra 0-1"),
    ],
)
def test_verdict_on_a_cpu_set_names_missing_and_extra_cpus(
    cpus: str, expected: AuditVerdict, text: str
) -> None:
    exclusive = (ExclusiveCpus("c1", parse_cpus("2-5"), by_kubelet=False),)
    for kind in (CgroupSettingId(SettingKind.CPUS), CgroupSettingId(SettingKind.EFFECTIVE)):
        compared = compare_v08({kind: parse_cpus(cpus)}, "c1", exclusive=exclusive)[kind]
        assert compared.verdict is expected
        assert text in compared.reason


def test_empty_cpuset_is_unlimited_in_v2_and_lower_in_v1() -> None:
    exclusive = (ExclusiveCpus("c1", parse_cpus("2-5"), by_kubelet=False),)
    none = {CgroupSettingId(SettingKind.CPUS): 0, CgroupSettingId(SettingKind.EFFECTIVE): 0}
    for facts, expected in ((V2, AuditVerdict.UNLIMITED), (V1, AuditVerdict.LOWER)):
        found = compare_v08(none, "c1", facts, exclusive)
        assert found[CgroupSettingId(SettingKind.CPUS)].verdict is expected
        assert found[CgroupSettingId(SettingKind.CPUS)].reason.startswith(
            "CPUs none, expected CPUs 2-5: CPUs 2-5 from a driver"
        )
        assert found[CgroupSettingId(SettingKind.EFFECTIVE)].verdict is AuditVerdict.LOWER


def test_expected_cpuset_is_unknown_if_kubelet_and_driver_differ() -> None:
    first, other = (ExclusiveCpus("c1", parse_cpus(cpus), cpus == "2-5") for cpus in ("2-5", "6-7"))
    groups = expected_pod_cgroups(V08, V2, [first, other])
    kind = knob(groups, SettingKind.CPUS, "c1")
    assert (kind.accepted, kind.unknown_reason) == ((), "CPUs 2-5 from the kubelet and 6-7 from a driver")
    agreed = expected_pod_cgroups(V08, V2, [first, other._replace(cpus=first.cpus)])
    assert exact_value(agreed, SettingKind.CPUS, "c1") == first.cpus


def test_cpuset_with_cpu_62_and_above_is_not_unlimited() -> None:
    cpus = parse_cpus("60-127")
    kind = CgroupSettingId(SettingKind.CPUS)
    found = compare_v08({kind: cpus}, "c1", exclusive=(ExclusiveCpus("c1", cpus, by_kubelet=False),))
    assert found[kind].verdict is AuditVerdict.MATCH


# --- a pod and its containers ------------------------------------------------------------------------------


def test_pod_limit_below_a_container_limit_is_parent_tighter() -> None:
    """An NRI plugin changes containers, not pods."""
    groups = expected_pod_cgroups(V08, V2)
    found = compare_cgroups(
        groups, with_values(correct_groups(groups), "c1", {CgroupSettingId(SettingKind.MEMORY): GI}), 2
    )
    pods = {comparison.setting: comparison for comparison in found if not comparison.cgroup.container}
    assert pods[CgroupSettingId(SettingKind.MEMORY)].verdict is AuditVerdict.PARENT_TIGHTER
    assert pods[CgroupSettingId(SettingKind.MEMORY)].reason.endswith("; one of its containers has 1Gi")
    assert pods[CgroupSettingId(SettingKind.QUOTA)].verdict is AuditVerdict.MATCH


def two_containers(claims: str = "") -> tuple[ExpectedCgroup, ...]:
    both = ("cpu=2 memory=1Gi", "cpu=2 memory=1Gi")
    granted = [claim("x", "c1 c2", claims)] if claims else []
    return expected_pod_cgroups(pod(container("c1", *both), container("c2", *both), claims=granted), V2)


def test_pod_quota_below_the_sum_of_its_containers_is_parent_tighter() -> None:
    groups = two_containers()
    found = compare_cgroups(
        groups, with_values(correct_groups(groups), "c1", {CgroupSettingId(SettingKind.QUOTA): 300_000}), 2
    )
    assert found[1].verdict is AuditVerdict.PARENT_TIGHTER
    assert found[1].reason.endswith("; its containers together have 500000 us")


def test_claim_shared_by_containers_counts_once_for_the_pod() -> None:
    """The sum of the containers' limits may exceed the pod's limit."""
    groups = two_containers("cpu=4 memory=4Gi")
    assert {cgroup.verdict for cgroup in compare_cgroups(groups, correct_groups(groups), 2)} == {
        AuditVerdict.MATCH
    }


def test_pod_level_limit_below_its_containers_matches() -> None:
    mine = pod(container("c1", limits="cpu=4"), container("c2"), level=resources("cpu=1", "cpu=2"))
    groups = expected_pod_cgroups(mine, V2)
    assert {cgroup.verdict for cgroup in compare_cgroups(groups, correct_groups(groups), 2)} == {
        AuditVerdict.MATCH
    }


def test_sum_of_rounded_container_quotas_is_not_parent_tighter() -> None:
    """systemd rounds each of two quotas of 125500 us up: 1000 us above their exact sum."""
    same = ("cpu=1255m memory=1Gi", "cpu=1255m memory=1Gi")
    groups = expected_pod_cgroups(pod(container("c1", *same), container("c2", *same)), SYSTEMD)
    found = compare_cgroups(groups, correct_groups(groups, rounded=True), 2)
    assert {comparison.verdict for comparison in found if comparison.setting.kind is SettingKind.QUOTA} == {
        AuditVerdict.MATCH,
        AuditVerdict.ROUNDED,
    }


def test_pod_and_container_quotas_are_compared_per_period() -> None:
    groups = expected_pod_cgroups(V08, V2)
    double = {CgroupSettingId(SettingKind.QUOTA): 840_000, CgroupSettingId(SettingKind.PERIOD): 200_000}
    found = compare_cgroups(groups, with_values(correct_groups(groups), "c1", double), 2)
    quotas = [comparison.verdict for comparison in found if comparison.setting.kind is SettingKind.QUOTA]
    assert quotas == [AuditVerdict.MATCH, AuditVerdict.MATCH]


def test_pod_limit_below_expected_and_containers_stays_lower() -> None:
    compared = compare_v08({CgroupSettingId(SettingKind.MEMORY): 128 * MI})[
        CgroupSettingId(SettingKind.MEMORY)
    ]
    assert compared.verdict is AuditVerdict.LOWER
    assert compared.reason.endswith("; one of its containers has 384Mi")


# --- missing values ----------------------------------------------------------------------------------------


def test_setting_of_a_disabled_controller_is_missing() -> None:
    found = compare_v08({CgroupSettingId(SettingKind.MEMORY): ABSENT}, "c1", controllers=frozenset({"cpu"}))
    compared = found[CgroupSettingId(SettingKind.MEMORY)]
    assert (compared.verdict, compared.reason) == (
        AuditVerdict.MISSING,
        "the controller memory is not enabled",
    )
    assert compared.consequence


@pytest.mark.parametrize(
    ("requests", "expected"), [("", AuditVerdict.UNKNOWN), ("hugepages-2Mi=4Mi", AuditVerdict.MISSING)]
)
def test_disabled_controller_is_missing_only_for_known_requests(
    requests: str, expected: AuditVerdict
) -> None:
    mine = pod(
        container("c1", f"cpu=1 memory=1Gi {requests}", f"cpu=1 memory=1Gi {requests}"),
        claims=[{"resourceClaimName": "x", "shape": "of 1.40"}],
    )
    groups, pages = expected_pod_cgroups(mine, V2), CgroupSettingId(SettingKind.PAGES, 2048)
    actual = ActualCgroup({pages: ABSENT}, controllers=frozenset({"cpu", "memory"}))
    compared = compare_cgroups(groups, {groups[0].cgroup: actual}, 2)
    (found,) = [
        comparison
        for comparison in compared
        if comparison.setting == pages and not comparison.cgroup.container
    ]
    assert found.verdict is expected
    assert found.reason.startswith("the controller hugetlb is not enabled")
    assert bool(found.consequence) is (expected is AuditVerdict.MISSING)


@pytest.mark.parametrize(("facts", "file"), [(V1, "memory.limit_in_bytes"), (V2, "memory.max")])
def test_setting_without_its_file_is_missing(facts: NodeFacts, file: str) -> None:
    compared = compare_v08({CgroupSettingId(SettingKind.MEMORY): ABSENT}, "c1", facts)[
        CgroupSettingId(SettingKind.MEMORY)
    ]
    assert (compared.verdict, compared.reason) == (AuditVerdict.MISSING, f"there is no {file}")


def test_unreadable_setting_is_missing_with_the_error() -> None:
    missing = Missing(Absence.UNREADABLE, errno.EACCES)
    compared = compare_v08({CgroupSettingId(SettingKind.MEMORY): missing}, "c1")[
        CgroupSettingId(SettingKind.MEMORY)
    ]
    assert (compared.verdict, compared.reason) == (
        AuditVerdict.MISSING,
        "memory.max cannot be read: Permission denied",
    )


def test_absent_limit_where_none_is_expected_is_not_missed() -> None:
    groups = expected_pod_cgroups(pod(container("c1", "cpu=1")), V2)
    values = {
        CgroupSettingId(SettingKind.MEMORY): ABSENT,
        CgroupSettingId(SettingKind.QUOTA): ABSENT,
        CgroupSettingId(SettingKind.WEIGHT): ABSENT,
    }
    found = {
        comparison.setting.kind: comparison
        for comparison in compare_cgroups(groups, with_values(correct_groups(groups), "c1", values), 2)
    }
    assert found[SettingKind.MEMORY].verdict is found[SettingKind.QUOTA].verdict is AuditVerdict.NOT_MISSED
    assert found[SettingKind.WEIGHT].verdict is AuditVerdict.MISSING


def test_absent_reservation_limit_of_an_old_kernel_is_not_missed() -> None:
    assert verdict(SettingKind.RESERVED, ABSENT, SIZES[0]) is AuditVerdict.NOT_MISSED
    assert verdict(SettingKind.PAGES, ABSENT, SIZES[0]) is AuditVerdict.MISSING


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENOENT])
def test_setting_of_a_cgroup_that_vanished_during_the_read_is_vanished(number: int) -> None:
    missing = Missing(Absence.UNREADABLE, number)
    assert (
        verdict(SettingKind.MEMORY, missing) is verdict(SettingKind.QUOTA, missing) is AuditVerdict.VANISHED
    )


def test_settings_of_a_removed_cgroup_are_vanished() -> None:
    groups = expected_pod_cgroups(V08, V2)
    found = compare_cgroups(
        groups, {**correct_groups(groups), groups[1].cgroup: ActualCgroup(is_gone=True)}, 2
    )
    assert {comparison.verdict for comparison in found if comparison.cgroup.container} == {
        AuditVerdict.VANISHED
    }
    assert {comparison.verdict for comparison in found if not comparison.cgroup.container} == {
        AuditVerdict.MATCH
    }


def test_unread_settings_are_unknown() -> None:
    groups = expected_pod_cgroups(V08, V2)
    assert {comparison.verdict for comparison in compare_cgroups(groups, {}, 2)} == {AuditVerdict.UNKNOWN}
    assert {
        comparison.verdict for comparison in compare_cgroups(groups, {groups[0].cgroup: ActualCgroup()}, 2)
    } == {AuditVerdict.UNKNOWN}


def test_setting_with_unknown_expected_value_is_unknown() -> None:
    unknown_claim = pod(container("c1", "cpu=1"), claims=[{"resourceClaimName": "x", "shape": "of 1.40"}])
    groups = expected_pod_cgroups(unknown_claim, V2)
    (weight, *_) = compare_cgroups(
        groups, {groups[0].cgroup: ActualCgroup({CgroupSettingId(SettingKind.WEIGHT): 39})}, 2
    )
    assert weight.verdict is AuditVerdict.UNKNOWN
    assert "claim x" in weight.reason
    assert format_expected(weight.expected) == "at least 39"


# --- quiet time after a change
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        (0.0, AuditVerdict.QUIET),
        (29.9, AuditVerdict.QUIET),
        (-5.0, AuditVerdict.QUIET),
        (30.0, AuditVerdict.LOWER),
        (-31.0, AuditVerdict.LOWER),
    ],
)
def test_wrong_value_within_30_s_of_a_change_is_quiet(since: float, expected: AuditVerdict) -> None:
    compared = compare_v08({CgroupSettingId(SettingKind.MEMORY): MI}, "c1", since_change_s=since)[
        CgroupSettingId(SettingKind.MEMORY)
    ]
    assert compared.verdict is expected
    assert bool(compared.consequence) is (expected is not AuditVerdict.QUIET)


def test_expected_value_matches_right_after_a_change() -> None:
    found = compare_v08({}, "c1", since_change_s=1.0)
    assert {comparison.verdict for comparison in found.values()} == {AuditVerdict.MATCH}


def test_wrong_value_of_a_qos_class_is_quiet_for_90_s() -> None:
    groups = expected_qos_cgroups([V08], V2)
    low = {groups[0].cgroup: ActualCgroup({CgroupSettingId(SettingKind.WEIGHT): 1}, since_change_s=80)}
    assert compare_cgroups(groups, low, 2)[0].verdict is AuditVerdict.QUIET
    low = {groups[0].cgroup: ActualCgroup({CgroupSettingId(SettingKind.WEIGHT): 1}, since_change_s=91)}
    assert compare_cgroups(groups, low, 2)[0].verdict is AuditVerdict.LOWER


def test_time_since_change_counts_from_last_start_or_resize() -> None:
    states = [
        {"name": name, "state": {"running": {"startedAt": f"1970-01-01T00:0{minute}:00Z"}}}
        for name, minute in (("c1", 1), ("c2", 2))
    ]
    both = pod(container("c1"), container("c2"), containerStatuses=states)
    assert [since_change_s(both, 200.0, name) for name in ("", "c1", "c2", "c3")] == [80.0, 140.0, 80.0, None]
    resize = {"type": "PodResizeInProgress", "status": "True", "lastTransitionTime": "1970-01-01T00:03:00Z"}
    resized = pod(container("c1"), containerStatuses=states, conditions=[resize])
    assert since_change_s(resized, 200.0, "c1") == 20.0
    assert since_change_s(pod(container("c1")), 200.0) is None


# --- completeness ------------------------------------------------------------------------------------------


def test_every_drift_verdict_has_a_consequence_for_each_setting() -> None:
    assert CONSEQUENCES.keys() == DRIFT_VERDICTS
    for comparison in DRIFT_VERDICTS - {AuditVerdict.PARENT_TIGHTER}:
        assert CONSEQUENCES[comparison].keys() == set(SettingKind)


@given(
    st.sampled_from([*SettingKind][:4]),
    st.one_of(st.integers(0, NO_LIMIT), st.builds(Missing, st.sampled_from(Absence), st.integers(0, 40))),
    st.sampled_from([V1, V2, SYSTEMD]),
    st.sampled_from(["", "c1"]),
)
def test_only_accepted_values_match_and_every_drift_has_a_risk(
    kind: SettingKind, reading: Reading, facts: NodeFacts, name: str
) -> None:
    compared = compare_v08({CgroupSettingId(kind): reading}, name, facts)[CgroupSettingId(kind)]
    accepted = {option.value for option in compared.expected.accepted}
    if compared.verdict in {AuditVerdict.MATCH, AuditVerdict.ROUNDED}:
        assert reading in accepted
    assert (compared.verdict in DRIFT_VERDICTS) is bool(compared.consequence)
    assert compared.cgroup.level is (CgroupLevel.CONTAINER if name else CgroupLevel.POD)
