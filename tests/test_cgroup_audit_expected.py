"""Expected values of cgroup knobs, and the cases in which the expected value is unknown."""

from dataclasses import replace
from typing import Any

import pytest
from cgroup_audit_pods import (
    MI,
    SIZES,
    SYSTEMD,
    V1,
    V2,
    amounts,
    claim,
    container,
    exact_value,
    knob,
    pod,
    pod_object,
    resources,
    sidecar,
    values,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.cgroup_audit.cgroup_paths import CgroupLevel
from agent.cgroup_audit.cgroup_settings import (
    CgroupSettingId,
    SettingFile,
    SettingKind,
    hugepage_size_name,
    setting_file,
)
from agent.cgroup_audit.expected_cgroups import (
    QOS_QUIET_S,
    QUIET_S,
    ExpectedCgroup,
    expected_pod_cgroups,
    expected_qos_cgroups,
)
from agent.cgroup_audit.kubelet_config import ExclusiveCpus, KubeletConfig, NodeFacts
from agent.cgroup_audit.pod_model import Pod, QosClass
from agent.cgroup_audit.pod_parser import parse_pod
from agent.model.cpuset import parse_cpus
from agent.model.pod_findings import NO_LIMIT

FULL = container("c1", "cpu=1 memory=1Gi", "cpu=2 memory=2Gi")
CPUS = parse_cpus("2-5")


def test_every_cgroup_has_an_expected_value_for_every_setting() -> None:
    knobs = {
        CgroupSettingId(SettingKind.WEIGHT),
        CgroupSettingId(SettingKind.QUOTA),
        CgroupSettingId(SettingKind.PERIOD),
        CgroupSettingId(SettingKind.MEMORY),
        *(
            CgroupSettingId(kind, size)
            for kind in (SettingKind.PAGES, SettingKind.RESERVED)
            for size in SIZES
        ),
    }
    for group in expected_pod_cgroups(pod(FULL), SYSTEMD):
        assert {setting.setting for setting in group.settings} == knobs
        assert len(group.settings) == len(knobs)
        assert group.quiet_s == QUIET_S


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        (CgroupSettingId(SettingKind.WEIGHT), ("cpu", "cpu.shares"), ("cpu", "cpu.weight")),
        (CgroupSettingId(SettingKind.QUOTA), ("cpu", "cpu.cfs_quota_us"), ("cpu", "cpu.max")),
        (CgroupSettingId(SettingKind.PERIOD), ("cpu", "cpu.cfs_period_us"), ("cpu", "cpu.max")),
        (CgroupSettingId(SettingKind.MEMORY), ("memory", "memory.limit_in_bytes"), ("memory", "memory.max")),
        (
            CgroupSettingId(SettingKind.PAGES, 2 << 10),
            ("hugetlb", "hugetlb.2MB.limit_in_bytes"),
            ("hugetlb", "hugetlb.2MB.max"),
        ),
        (
            CgroupSettingId(SettingKind.RESERVED, 1 << 20),
            ("hugetlb", "hugetlb.1GB.rsvd.limit_in_bytes"),
            ("hugetlb", "hugetlb.1GB.rsvd.max"),
        ),
        (CgroupSettingId(SettingKind.CPUS), ("cpuset", "cpuset.cpus"), ("cpuset", "cpuset.cpus")),
        (
            CgroupSettingId(SettingKind.EFFECTIVE),
            ("cpuset", "cpuset.effective_cpus"),
            ("cpuset", "cpuset.cpus.effective"),
        ),
    ],
)
def test_setting_has_its_controller_and_file_in_v1_and_v2(
    kind: CgroupSettingId, first: tuple[str, str], second: tuple[str, str]
) -> None:
    assert (setting_file(kind, 1), setting_file(kind, 2)) == (SettingFile(*first), SettingFile(*second))


@pytest.mark.parametrize(
    ("size_kib", "name"), [(64, "64KB"), (2048, "2MB"), (32768, "32MB"), (1 << 24, "16GB")]
)
def test_page_size_has_the_kernels_name(size_kib: int, name: str) -> None:
    assert hugepage_size_name(size_kib) == name


# --- kubelet and runtime -----------------------------------------------------------------------------------


def test_pod_weight_is_linear_and_container_weight_quadratic_first() -> None:
    groups = expected_pod_cgroups(pod(FULL), V2)
    assert values(knob(groups, SettingKind.WEIGHT)) == [39]
    assert values(knob(groups, SettingKind.WEIGHT, "c1")) == [100, 39]
    assert [value.note for value in knob(groups, SettingKind.WEIGHT, "c1").accepted] == [
        "quadratic",
        "linear",
    ]


def test_quadratic_weight_of_a_pod_or_qos_class_is_not_accepted() -> None:
    eight = pod(container("c1", "cpu=8"))
    assert values(knob(expected_pod_cgroups(eight, V2), SettingKind.WEIGHT)) == [313]
    (burstable, _) = expected_qos_cgroups([eight], V2)
    assert values(burstable.settings[0]) == [313]
    assert values(knob(expected_pod_cgroups(eight, V2), SettingKind.WEIGHT, "c1")) == [532, 313]


def sidecar_pod(second: str = "", **more: Any) -> Pod:
    """Return a Burstable pod with two sidecars, of which only the first has limits."""
    init = [sidecar("s1", limits="cpu=1 memory=64Mi"), sidecar("s2", limits=second)]
    return pod(container("c1", limits="cpu=2 memory=128Mi"), init=init, qosClass="Burstable", **more)


@pytest.mark.parametrize(
    ("counts", "quota", "memory"),
    [
        (True, [300_000], [192 * MI]),
        (False, [NO_LIMIT], [NO_LIMIT]),
        (None, [NO_LIMIT, 300_000], [NO_LIMIT, 192 * MI]),
    ],
)
def test_sidecar_without_limit_after_a_limited_one_follows_the_kubelet(
    counts: bool | None, quota: list[int], memory: list[int]
) -> None:
    groups = expected_pod_cgroups(sidecar_pod(), replace(V2, counts_earlier_sidecars=counts))
    assert values(knob(groups, SettingKind.QUOTA)) == quota
    assert values(knob(groups, SettingKind.MEMORY)) == memory
    assert values(knob(groups, SettingKind.QUOTA, "s2")) == [NO_LIMIT]


def test_init_container_without_limit_after_a_limited_sidecar_is_limited() -> None:
    init = [sidecar("s1", limits="cpu=1"), container("i1")]
    after = pod(container("c1", limits="cpu=2"), init=init, qosClass="Burstable")
    before = pod(container("c1", limits="cpu=2"), init=[*reversed(init)], qosClass="Burstable")
    no_app = pod(container("c1"), init=init, qosClass="Burstable")
    old = replace(V2, counts_earlier_sidecars=True)
    found = [
        exact_value(expected_pod_cgroups(setting, old), SettingKind.QUOTA)
        for setting in (after, before, no_app)
    ]
    assert found == [300_000, NO_LIMIT, NO_LIMIT]


def test_pod_with_every_limit_has_one_value_for_all_kubelets() -> None:
    groups = expected_pod_cgroups(sidecar_pod("cpu=1 memory=64Mi"), V2)
    assert values(knob(groups, SettingKind.QUOTA)) == [400_000]


def test_formulas_with_equal_results_give_one_accepted_value() -> None:
    weight = knob(expected_pod_cgroups(pod(container("c1")), V2), SettingKind.WEIGHT)
    assert [(value.value, value.note) for value in weight.accepted] == [(1, "")]
    assert weight.arithmetic == "BestEffort: the least -> shares 2 -> weight 1"


def test_hugepage_limit_rounded_down_to_whole_pages_is_accepted() -> None:
    mine = pod(container("c1", "cpu=1 hugepages-2Mi=3Mi", "hugepages-2Mi=3Mi"))
    for kind in (SettingKind.PAGES, SettingKind.RESERVED):
        expected = knob(expected_pod_cgroups(mine, V2), kind, "c1", SIZES[0])
        assert [(value.value, value.is_rounded) for value in expected.accepted] == [
            (3 * MI, False),
            (2 * MI, True),
        ]


def test_value_without_claims_is_explained_and_not_accepted() -> None:
    groups = expected_pod_cgroups(pod(FULL, claims=[claim("x", "c1", "cpu=3 hugepages-2Mi=4Mi")]), V1)
    for kind, wrong, size in (
        (SettingKind.WEIGHT, 1024, 0),
        (SettingKind.QUOTA, 200_000, 0),
        (SettingKind.PAGES, 0, SIZES[0]),
    ):
        expected = knob(groups, kind, "", size)
        assert [value.value for value in expected.explained_wrong_values] == [wrong]
        assert wrong not in values(expected)
    assert knob(groups, SettingKind.MEMORY).explained_wrong_values == ()


def test_kubelet_that_counts_no_claims_has_values_without_claims() -> None:
    mine = pod(FULL, claims=[claim("x", "c1", "cpu=3 memory=1Gi hugepages-2Mi=4Mi")])
    uncounted = NodeFacts(hugepages_kib=SIZES, counts_claims=False)
    assert expected_pod_cgroups(mine, uncounted) == expected_pod_cgroups(pod(FULL), uncounted)


# --- exclusive CPUs ----------------------------------------------------------------------------------------


def test_exclusive_cpus_from_the_kubelet_lift_both_quotas() -> None:
    mine = pod(FULL, container("c2", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi"))
    groups = expected_pod_cgroups(mine, V2, [ExclusiveCpus("c1", CPUS, by_kubelet=True)])
    assert exact_value(groups, SettingKind.QUOTA) == exact_value(groups, SettingKind.QUOTA, "c1") == NO_LIMIT
    assert exact_value(groups, SettingKind.QUOTA, "c2") == 100_000
    assert "c1 has exclusive CPUs" in knob(groups, SettingKind.QUOTA).arithmetic


@pytest.mark.parametrize(
    ("gates", "accepted"),
    [
        ({"DisableCPUQuotaWithExclusiveCPUs": False}, [200_000]),
        ({"DisableCPUQuotaWithExclusiveCPUs": True}, [NO_LIMIT]),
        ({}, [NO_LIMIT]),
        ({"AllBeta": False}, [NO_LIMIT, 200_000]),
        (None, [NO_LIMIT, 200_000]),
    ],
)
def test_gate_decides_whether_exclusive_cpus_lift_the_quota(
    gates: dict[str, bool] | None, accepted: list[int]
) -> None:
    kubelet = None if gates is None else KubeletConfig("file", gates=gates)
    mine = pod(container("c1", "cpu=2 memory=1Gi", "cpu=2 memory=1Gi"))
    groups = expected_pod_cgroups(mine, replace(V2, kubelet=kubelet), [ExclusiveCpus("c1", 0b1100, True)])
    for name in ("", "c1"):
        assert values(knob(groups, SettingKind.QUOTA, name)) == accepted


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (container("c2"), [400_000, NO_LIMIT, 400_000]),
        (container("c2", "cpu=1 memory=1Gi", "cpu=2 memory=1Gi"), [400_000, NO_LIMIT, 200_000]),
        (container("c2", "cpu=1500m memory=1Gi", "cpu=1500m memory=1Gi"), [400_000, NO_LIMIT, 150_000]),
        (container("c2", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi"), [NO_LIMIT] * 3),
    ],
    ids=["no-limit", "burstable", "fraction", "own-cpus"],
)
def test_container_that_shares_the_cpus_of_its_pod_keeps_its_quota(
    second: dict[str, object], expected: list[int]
) -> None:
    level = {kind: {"cpu": "4", "memory": "4Gi"} for kind in ("requests", "limits")}
    mine = pod(container("c1", "cpu=2 memory=1Gi", "cpu=2 memory=1Gi"), second, level=level)
    exclusive = [ExclusiveCpus(name, CPUS, by_kubelet=True) for name in ("c1", "c2")]
    facts = replace(V2, kubelet=KubeletConfig("file"))
    groups = expected_pod_cgroups(mine, facts, exclusive)
    assert [exact_value(groups, SettingKind.QUOTA, name) for name in ("", "c1", "c2")] == expected


def test_exclusive_cpus_from_a_driver_leave_the_quotas() -> None:
    """The kubelet does not know of CPUs from a driver."""
    groups = expected_pod_cgroups(pod(FULL), V2, [ExclusiveCpus("c1", CPUS, by_kubelet=False)])
    assert exact_value(groups, SettingKind.QUOTA) == exact_value(groups, SettingKind.QUOTA, "c1") == 200_000
    for kind in (SettingKind.CPUS, SettingKind.EFFECTIVE):
        assert values(knob(groups, kind, "c1")) == [CPUS]
    assert all(setting.setting.kind is not SettingKind.CPUS for setting in groups[0].settings)


# --- unknown amounts ---------------------------------------------------------------------------------------


def unknown_knobs(groups: tuple[ExpectedCgroup, ...], level: CgroupLevel) -> set[SettingKind]:
    (group,) = [group for group in groups if group.cgroup.level is level]
    for setting in group.settings:
        assert bool(setting.accepted) is not bool(setting.unknown_reason)
    return {setting.setting.kind for setting in group.settings if setting.unknown_reason}


def test_unknown_claim_amount_makes_only_dependent_settings_unknown() -> None:
    status_entry = {"resourceClaimName": "cpus", "containers": ["c1"], "shape": "of 1.40"}
    groups = expected_pod_cgroups(pod(FULL, claims=[status_entry]), V2)
    depends = {
        SettingKind.WEIGHT,
        SettingKind.QUOTA,
        SettingKind.MEMORY,
        SettingKind.PAGES,
        SettingKind.RESERVED,
    }
    assert unknown_knobs(groups, CgroupLevel.POD) == depends
    assert unknown_knobs(groups, CgroupLevel.CONTAINER) == depends - {SettingKind.WEIGHT}
    assert "claim cpus" in knob(groups, SettingKind.QUOTA, "c1").unknown_reason


def test_unknown_claim_amount_is_ignored_where_it_has_no_effect() -> None:
    status_entry = {"resourceClaimName": "cpus", "shape": "of 1.40"}
    limitless = expected_pod_cgroups(pod(container("c1", "cpu=1"), claims=[status_entry]), V2)
    assert SettingKind.QUOTA not in unknown_knobs(limitless, CgroupLevel.POD) | unknown_knobs(
        limitless, CgroupLevel.CONTAINER
    )
    whole = expected_pod_cgroups(
        pod(container("c1"), level=resources("cpu=1", "cpu=2"), claims=[status_entry]), V2
    )
    assert exact_value(whole, SettingKind.WEIGHT) == 39
    assert exact_value(whole, SettingKind.QUOTA) == exact_value(whole, SettingKind.QUOTA, "c1") == 200_000
    uncounted = expected_pod_cgroups(
        pod(FULL, claims=[status_entry]), NodeFacts(hugepages_kib=SIZES, counts_claims=False)
    )
    assert (
        unknown_knobs(uncounted, CgroupLevel.POD) == unknown_knobs(uncounted, CgroupLevel.CONTAINER) == set()
    )


def test_pods_api_without_claim_amounts_gives_lower_bounds() -> None:
    made = pod_object(container("c1", "cpu=1 memory=1Gi", "cpu=2 memory=2Gi"), phase="Running")
    made["spec"]["resourceClaims"] = [{"name": "x", "resourceClaimName": "cpus"}]
    del made["status"]["nodeAllocatableResourceClaimStatuses"]
    groups = expected_pod_cgroups(parse_pod(made, from_kubelet=True), V2)
    bounds = [knob(groups, kind) for kind in (SettingKind.WEIGHT, SettingKind.QUOTA, SettingKind.MEMORY)]
    assert [(values(bound), bound.at_least) for bound in bounds] == [([], 39), ([], 200_000), ([], 2 << 30)]
    assert "pods API does not list the amounts of claims" in bounds[0].unknown_reason
    assert "drahealth audit --pods FILE" in bounds[0].unknown_reason
    from_server = expected_pod_cgroups(parse_pod(made), V2)
    assert values(knob(from_server, SettingKind.QUOTA)) == [200_000]


def test_best_effort_weight_is_unknown_if_claim_amounts_are() -> None:
    made = pod_object(container("c1"), phase="Running")
    made["spec"]["resourceClaims"] = [{"name": "x", "resourceClaimName": "cpus"}]
    del made["status"]["nodeAllocatableResourceClaimStatuses"]
    weight = knob(expected_pod_cgroups(parse_pod(made, from_kubelet=True), V2), SettingKind.WEIGHT)
    assert (values(weight), weight.at_least) == ([], 1)


def pod_with_pending_resize(**status: Any) -> Pod:
    conditions = [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]
    return pod(container("c1", "cpu=4 memory=4Gi", "cpu=4 memory=4Gi"), conditions=conditions, **status)


def test_pending_resize_uses_the_allocated_requests() -> None:
    state = {"name": "c1", "allocatedResources": {"cpu": "1", "memory": "1Gi"}}
    groups = expected_pod_cgroups(
        pod_with_pending_resize(containerStatuses=[state], qosClass="Guaranteed"), V1
    )
    assert exact_value(groups, SettingKind.WEIGHT) == exact_value(groups, SettingKind.WEIGHT, "c1") == 1024
    assert (
        unknown_knobs(groups, CgroupLevel.POD)
        == unknown_knobs(groups, CgroupLevel.CONTAINER)
        == {SettingKind.QUOTA, SettingKind.MEMORY}
    )
    assert "Deferred" in knob(groups, SettingKind.QUOTA).unknown_reason


def test_pending_resize_without_allocated_requests_is_unknown() -> None:
    groups = expected_pod_cgroups(pod_with_pending_resize(), V1)
    unknown = {SettingKind.WEIGHT, SettingKind.QUOTA, SettingKind.MEMORY}
    assert unknown_knobs(groups, CgroupLevel.POD) == unknown_knobs(groups, CgroupLevel.CONTAINER) == unknown


# --- QoS classes -------------------------------------------------------------------------------------------


def test_qos_class_has_no_page_limit_and_a_quiet_time_of_90_s() -> None:
    for group in expected_qos_cgroups([pod(FULL)], V2):
        pages = [
            setting
            for setting in group.settings
            if setting.setting.kind in {SettingKind.PAGES, SettingKind.RESERVED}
        ]
        assert [values(page) for page in pages] == [[NO_LIMIT]] * 4
        assert (group.cgroup.level, group.quiet_s) == (CgroupLevel.QOS, QOS_QUIET_S)


def test_qos_class_sums_requests_rounded_up_per_pod() -> None:
    (burstable, _) = expected_qos_cgroups([pod(container("c1", "cpu=0.0001"))] * 1000, V1)
    assert values(burstable.settings[0]) == [1024]
    assert burstable.settings[0].arithmetic == "1000m (1000 pods) -> shares 1024"


@pytest.mark.parametrize("reason", ["Deferred", "Infeasible"])
def test_pending_resize_counts_for_the_qos_class_as_in_the_spec(reason: str) -> None:
    state = {"name": "c1", "allocatedResources": {"cpu": "2", "memory": "1Gi"}}
    conditions = [{"type": "PodResizePending", "status": "True", "reason": reason}]
    resized = pod(container("c1", "cpu=8 memory=2Gi"), conditions=conditions, containerStatuses=[state])
    (burstable, _) = expected_qos_cgroups([resized, pod(container("c1", "cpu=1"))], V1)
    assert values(burstable.settings[0]) == [9 * 1024]


def test_ended_pods_do_not_count_for_the_qos_class() -> None:
    (burstable, _) = expected_qos_cgroups([pod(FULL), pod(FULL, phase="Succeeded")], V1)
    assert values(burstable.settings[0]) == [1024]


def test_pod_with_unknown_amount_makes_its_qos_class_unknown() -> None:
    unknown_claim = pod(FULL, claims=[{"resourceClaimName": "cpus", "shape": "of 1.40"}])
    burstable, best_effort = expected_qos_cgroups([pod(FULL), unknown_claim], V1)
    assert burstable.cgroup.qos is QosClass.BURSTABLE
    assert "pod default/p" in burstable.settings[0].unknown_reason
    assert values(best_effort.settings[0]) == [2]


# --- properties --------------------------------------------------------------------------------------------

milli = st.integers(1, 64_000)
mebi = st.integers(1, 64_000)
sizes = st.tuples(milli, mebi)
grants = st.tuples(st.integers(0, 9_000), st.integers(0, 9_000), st.integers(0, 64), st.booleans())


def amounts_of(cpu: int, memory: int) -> dict[str, str]:
    pages = memory % 7 * 2
    return amounts(f"cpu={cpu}m memory={memory}Mi hugepages-2Mi={pages}Mi")


@st.composite
def limited_pods(draw: st.DrawFn) -> Pod:
    """Draw a pod whose containers have limits equal to requests, with any claims and no pod-level limit."""
    kinds = ["containers", *draw(st.lists(st.sampled_from(["containers", "init", "sidecar"]), max_size=4))]
    names = [f"c{number}" for number in range(len(kinds))]
    lists: dict[str, list[dict[str, Any]]] = {"containers": [], "initContainers": []}
    for name, kind in zip(names, kinds, strict=True):
        amount = amounts_of(*draw(sizes))
        status_entry = {"name": name, "resources": {"requests": amount, "limits": amount}}
        always = {"restartPolicy": "Always"} if kind == "sidecar" else {}
        lists["containers" if kind == "containers" else "initContainers"].append({**status_entry, **always})
    claims = []
    for number, (cpu, memory, pages, each) in enumerate(draw(st.lists(grants, max_size=3))):
        users = " ".join(draw(st.lists(st.sampled_from(names), unique=True)))
        mapping = f"cpu={cpu}m memory={memory}Mi hugepages-2Mi={pages * 2}Mi"
        claims.append(claim(f"x{number}", users, mapping, "", "memory=3Mi" if each else ""))
    obj = pod_object(claims=claims)
    obj["spec"] |= lists
    return parse_pod(obj)


@given(limited_pods(), st.sampled_from([V1, V2, SYSTEMD]))
def test_pod_limit_is_at_least_that_of_its_largest_container(mine: Pod, facts: NodeFacts) -> None:
    groups = expected_pod_cgroups(mine, facts)
    for kind, size in (
        (SettingKind.QUOTA, 0),
        (SettingKind.MEMORY, 0),
        (SettingKind.PAGES, SIZES[0]),
        (SettingKind.RESERVED, SIZES[0]),
    ):
        largest = max(values(knob(groups, kind, container.name, size)) for container in mine.containers)
        assert values(knob(groups, kind, "", size))[0] >= largest[0]
        assert max(values(knob(groups, kind, "", size))) >= max(largest)


@given(sizes, sizes, grants, st.sampled_from([V1, V2, SYSTEMD]))
def test_larger_request_never_lowers_an_expected_value(
    value: tuple[int, int], other: tuple[int, int], granted: tuple[int, int, int, bool], facts: NodeFacts
) -> None:
    less, more = (tuple(edge(pair) for pair in zip(value, other, strict=True)) for edge in (min, max))
    claims = [claim("x", "c1", f"cpu={granted[0]}m memory={granted[1]}Mi")]

    def groups(cpu: int, memory: int) -> tuple[ExpectedCgroup, ...]:
        amount = f"cpu={cpu}m memory={memory}Mi"
        return expected_pod_cgroups(pod(container("c1", amount, amount), claims=claims), facts)

    small, large = groups(*less), groups(*more)
    for name in ("", "c1"):
        for kind in (SettingKind.WEIGHT, SettingKind.QUOTA, SettingKind.MEMORY):
            assert exact_value(small, kind, name) <= exact_value(large, kind, name)


@given(grants, grants, st.sampled_from([V1, V2, SYSTEMD]))
def test_larger_claim_amount_never_lowers_an_expected_value(
    value: tuple[int, int, int, bool], other: tuple[int, int, int, bool], facts: NodeFacts
) -> None:
    def groups(amount: tuple[int, ...]) -> tuple[ExpectedCgroup, ...]:
        granted = f"cpu={amount[0]}m memory={amount[1]}Mi hugepages-2Mi={amount[2] * 2}Mi"
        return expected_pod_cgroups(pod(FULL, claims=[claim("x", "c1", granted)]), facts)

    less, more = (tuple(edge(pair) for pair in zip(value[:3], other[:3], strict=True)) for edge in (min, max))
    small, large = groups(less), groups(more)
    for name in ("", "c1"):
        for kind, size in (
            (SettingKind.WEIGHT, 0),
            (SettingKind.QUOTA, 0),
            (SettingKind.MEMORY, 0),
            (SettingKind.PAGES, SIZES[0]),
        ):
            assert exact_value(small, kind, name, size) <= exact_value(large, kind, name, size)
