"""Expected memory QoS, swap limits, OOM scores and node cgroups; some numbers are of upstream's tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
from cgroup_audit_pods import GI, MI, V1, V2, claim, container, exact_value, knob, pod_object, sidecar, values

from agent.cgroup_audit.audit import PodAudit, audit_findings
from agent.cgroup_audit.audit_verdicts import ActualCgroup, AuditVerdict
from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind
from agent.cgroup_audit.compare import compare_cgroups
from agent.cgroup_audit.expected_cgroups import (
    ExpectedCgroup,
    expected_node_cgroups,
    expected_pod_cgroups,
    expected_qos_cgroups,
)
from agent.cgroup_audit.expected_values import ExpectedSetting
from agent.cgroup_audit.kubelet_config import (
    CgroupDriver,
    MemoryQosMode,
    NodeFacts,
    parse_kubelet_config,
    possible_memory_qos,
)
from agent.cgroup_audit.pod_model import Pod
from agent.cgroup_audit.pod_parser import parse_pod
from agent.model.pod_findings import NO_LIMIT, Resource

HIGH, MIN, LOW = SettingKind.HIGH, SettingKind.MIN, SettingKind.LOW
SWAP, SCORE = SettingKind.SWAP, SettingKind.OOM_SCORE
TIERED: Final = {"featureGates": {"MemoryQoS": True}, "memoryReservationPolicy": "TieredReservation"}
THROTTLED: Final = {"featureGates": {"MemoryQoS": True}, "memoryThrottlingFactor": 0.9}


def facts_of(config: Mapping[str, object] | None, minor: int | None = 37, base: NodeFacts = V2) -> NodeFacts:
    """Return facts of a node of 8 CPUs, 8 GiB of memory and 4 GiB of swap, with a kubelet's configuration."""
    return replace(
        base,
        kubelet=None if config is None else parse_kubelet_config(config, "test"),
        kubelet_minor=minor,
        memory_bytes=8 * GI,
        swap_bytes=4 * GI,
        cpu_counts=(8,),
    )


def pod_of(*containers: Any, metadata: Mapping[str, Any] | None = None, **more: Any) -> Pod:
    spec = more.pop("spec", {})
    obj = pod_object(*containers, **more)
    obj["metadata"] |= metadata or {}
    obj["spec"] |= spec
    return parse_pod(obj)


def groups_of(pod: Pod, facts: NodeFacts) -> tuple[ExpectedCgroup, ...]:
    return expected_pod_cgroups(pod, facts)


def kinds_of(group: ExpectedCgroup) -> set[SettingKind]:
    return {setting.setting.kind for setting in group.settings}


def setting_of(group: ExpectedCgroup, kind: SettingKind) -> ExpectedSetting:
    return next(setting for setting in group.settings if setting.setting == CgroupSettingId(kind))


BURSTABLE: Final = container("c1", "memory=256Mi", "memory=512Mi")
GUARANTEED: Final = container("c1", "cpu=1 memory=256Mi", "cpu=1 memory=256Mi")
BEST_EFFORT: Final = container("c1")


# --- memory.high -------------------------------------------------------------------------------------------


def test_throttling_limit_lies_between_request_and_limit() -> None:
    expected = knob(groups_of(pod_of(BURSTABLE), facts_of(THROTTLED)), HIGH, "c1")
    assert values(expected) == [int((256 * MI + 256 * MI * 0.9) // 4096) * 4096]
    assert expected.arithmetic == "256Mi (request) + 0.9 * (512Mi (limit) - 256Mi) -> 510025728 bytes"


def test_throttling_factor_of_one_is_the_limit() -> None:
    factor = {**THROTTLED, "memoryThrottlingFactor": 1}
    assert exact_value(groups_of(pod_of(BURSTABLE), facts_of(factor)), HIGH, "c1") == 512 * MI


def test_memory_high_without_a_memory_limit_follows_allocatable_memory() -> None:
    config = {**THROTTLED, "kubeReserved": {"memory": "1Gi"}, "systemReserved": {"memory": "1Gi"}}
    expected = knob(groups_of(pod_of(container("c1", "memory=1Gi")), facts_of(config)), HIGH, "c1")
    assert values(expected) == [int((GI + 5 * GI * 0.9) // 4096) * 4096]
    assert "6Gi (allocatable memory of the node)" in expected.arithmetic


def test_eviction_threshold_does_not_change_the_throttling_limit() -> None:
    mine, evicts = pod_of(container("c1", "memory=1Gi")), {"evictionHard": {"memory.available": "2Gi"}}
    with_threshold = exact_value(groups_of(mine, facts_of({**THROTTLED, **evicts})), HIGH, "c1")
    assert with_threshold == exact_value(groups_of(mine, facts_of(THROTTLED)), HIGH, "c1")


@pytest.mark.parametrize("spec", [GUARANTEED, container("c1", "memory=1Gi", "memory=1Gi")])
def test_container_whose_request_equals_its_limit_is_not_throttled(spec: Any) -> None:
    assert values(knob(groups_of(pod_of(spec), facts_of(THROTTLED)), HIGH, "c1")) == [NO_LIMIT]


def test_best_effort_container_is_throttled_from_137_on_only() -> None:
    expected = knob(groups_of(pod_of(BEST_EFFORT), facts_of(THROTTLED)), HIGH, "c1")
    assert values(expected) == [int(8 * GI * 0.9 // 4096) * 4096, NO_LIMIT]
    assert expected.accepted[1].note == "as kubelets up to 1.36 leave it without a request"


def test_claim_sets_no_memory_high_if_the_request_equals_the_limit() -> None:
    equal = container("c1", "memory=1Gi", "memory=1Gi")
    mine = pod_of(equal, container("c2"), claims=[claim("m", "c1", "memory=1Gi")])
    assert values(knob(groups_of(mine, facts_of(THROTTLED)), HIGH, "c1")) == [NO_LIMIT]


def test_claim_raises_the_throttling_limit_with_the_memory_limit() -> None:
    mine = pod_of(BURSTABLE, claims=[claim("m", "c1", "memory=256Mi")])
    assert exact_value(groups_of(mine, facts_of(THROTTLED)), HIGH, "c1") == int(
        (256 + 512 * 0.9) * MI // 4096 * 4096
    )


@pytest.mark.parametrize("cpu_and_request", [{"memory": "1Gi"}, {"cpu": "1", "memory": "2Gi"}])
def test_throttling_limit_of_pod_level_memory_is_unknown(cpu_and_request: dict[str, str]) -> None:
    """This holds for a Guaranteed pod, too, whose containers may have limits above their requests."""
    level = {"requests": cpu_and_request, "limits": {**cpu_and_request, "memory": "2Gi"}}
    expected = knob(groups_of(pod_of(BURSTABLE, level=level), facts_of(THROTTLED)), HIGH, "c1")
    assert expected.accepted == ()
    assert expected.unknown_reason == "kubelets differ for pods with pod-level memory"


def test_throttling_limit_is_unknown_while_a_resize_is_pending() -> None:
    pending = {"type": "PodResizePending", "status": "True", "reason": "Deferred"}
    status = {"name": "c1", "allocatedResources": {"memory": "128Mi"}}
    mine = pod_of(BURSTABLE, conditions=[pending], containerStatuses=[status])
    facts = facts_of({**TIERED, **THROTTLED})
    assert knob(groups_of(mine, facts), HIGH, "c1").accepted == ()
    assert values(knob(groups_of(mine, facts), LOW, "c1")) == [128 * MI]


def test_unknown_configuration_expects_no_memory_qos() -> None:
    mine = groups_of(pod_of(BURSTABLE), facts_of(None))
    assert not (kinds_of(mine[0]) | kinds_of(mine[1])) & {HIGH, MIN, LOW, SWAP}


def test_cgroup_v1_has_no_memory_qos() -> None:
    mine = groups_of(pod_of(BURSTABLE), facts_of(TIERED, base=V1))
    assert not (kinds_of(mine[0]) | kinds_of(mine[1])) & {HIGH, MIN, LOW}


# --- memory.min and memory.low -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"), [(GUARANTEED, (256 * MI, 0)), (BURSTABLE, (0, 256 * MI))], ids=["min", "low"]
)
def test_tiered_reservation_protects_requests_by_qos_class(spec: Any, expected: tuple[int, int]) -> None:
    groups = groups_of(pod_of(spec), facts_of(TIERED))
    for name in ("", "c1"):
        assert (exact_value(groups, MIN, name), exact_value(groups, LOW, name)) == expected


def test_pod_protection_is_the_sum_of_requests_and_claims() -> None:
    mine = pod_of(
        BURSTABLE,
        container("c2", "memory=128Mi"),
        claims=[claim("m", "c1", "memory=64Mi")],
        overhead="memory=8Mi",
    )
    groups = groups_of(mine, facts_of(TIERED))
    assert exact_value(groups, LOW) == (256 + 128 + 64 + 8) * MI
    assert [value.value for value in knob(groups, LOW).explained_wrong_values] == [(256 + 128 + 8) * MI]
    assert values(knob(groups, LOW, "c1")) == [256 * MI, 320 * MI]
    assert values(knob(groups, LOW, "c2")) == [128 * MI]


def test_best_effort_pod_has_no_protection_to_compare() -> None:
    groups = groups_of(pod_of(BEST_EFFORT), facts_of(TIERED))
    assert not (kinds_of(groups[0]) | kinds_of(groups[1])) & {MIN, LOW}


def test_without_a_policy_pod_protections_are_not_compared() -> None:
    groups = groups_of(pod_of(BURSTABLE), facts_of({}))
    assert not (kinds_of(groups[0]) | kinds_of(groups[1])) & {MIN, LOW}


def test_kubelet_135_protects_all_requests_by_minimum() -> None:
    groups = groups_of(pod_of(BURSTABLE), facts_of({"featureGates": {"MemoryQoS": True}}, minor=35))
    assert (exact_value(groups, MIN, "c1"), exact_value(groups, LOW, "c1")) == (256 * MI, 0)


def test_unknown_version_accepts_the_protections_of_all_versions() -> None:
    groups = groups_of(pod_of(BURSTABLE), facts_of({"featureGates": {"MemoryQoS": True}}, minor=None))
    assert set(values(knob(groups, MIN, "c1"))) == {0, 256 * MI}
    assert set(values(knob(groups, HIGH, "c1"))) == {NO_LIMIT, 510025728}


GATE: Final = {"featureGates": {"MemoryQoS": True}}
OFF: Final = {"featureGates": {"MemoryQoS": False}}


@pytest.mark.parametrize(
    ("config", "minor", "expected"),
    [
        ({}, 37, [MemoryQosMode()]),
        ({}, 36, [MemoryQosMode()]),
        ({}, None, [MemoryQosMode()]),
        (GATE, 37, [MemoryQosMode()]),
        (GATE, 36, [MemoryQosMode(0.9)]),
        (GATE, 35, [MemoryQosMode(0.9, reserves=True, is_tiered=False)]),
        ({"memoryThrottlingFactor": 0.8}, 37, [MemoryQosMode(0.8)]),
        ({"memoryThrottlingFactor": 0.8}, 36, [MemoryQosMode()]),
        ({"memoryThrottlingFactor": 0.8}, None, [MemoryQosMode(0.8), MemoryQosMode()]),
        (
            {"memoryReservationPolicy": "TieredReservation"},
            None,
            [MemoryQosMode(reserves=True), MemoryQosMode()],
        ),
        ({"memoryReservationPolicy": "None"}, 37, [MemoryQosMode()]),
        ({**TIERED, **OFF}, 37, [MemoryQosMode()]),
        ({"featureGates": {"AllAlpha": True}}, 36, [MemoryQosMode(), MemoryQosMode(0.9)]),
    ],
)
def test_memory_qos_follows_from_gate_version_and_configuration(config, minor, expected) -> None:
    assert list(possible_memory_qos(parse_kubelet_config(config, "test"), minor)) == expected


# --- swap --------------------------------------------------------------------------------------------------

LIMITED: Final = {"memorySwap": {"swapBehavior": "LimitedSwap"}}


def test_container_without_swap_has_a_limit_of_zero() -> None:
    expected = knob(groups_of(pod_of(BURSTABLE), facts_of({})), SWAP, "c1")
    assert (values(expected), expected.arithmetic) == ([0], "no swap: memorySwap.swapBehavior is NoSwap")


def test_limited_swap_is_the_share_of_the_request() -> None:
    expected = knob(groups_of(pod_of(BURSTABLE), facts_of(LIMITED)), SWAP, "c1")
    assert values(expected) == [128 * MI]
    assert expected.arithmetic == "256Mi (request) / 8Gi * 4Gi of swap -> 134217728 bytes"


def test_limited_swap_is_rounded_down_to_pages() -> None:
    odd = pod_of(container("c1", "memory=1000001", "memory=1Gi"))
    assert values(knob(groups_of(odd, facts_of(LIMITED)), SWAP, "c1")) == [500_000, 499_712]


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        (pod_of(GUARANTEED), "Guaranteed pods do not swap"),
        (pod_of(BEST_EFFORT), "BestEffort pods do not swap"),
        (pod_of(container("c1", "cpu=1")), "no request"),
        (pod_of(container("c1", "memory=1Gi", "memory=1Gi")), "the request equals the limit"),
        (pod_of(BURSTABLE, spec={"priority": 2_000_000_000}), "the pod is critical"),
        (
            pod_of(BURSTABLE, metadata={"annotations": {"kubernetes.io/config.mirror": "x"}}),
            "the pod is critical",
        ),
        (
            pod_of(BURSTABLE, metadata={"annotations": {"kubernetes.io/config.source": "file"}}),
            "the pod is critical",
        ),
    ],
    ids=["guaranteed", "best-effort", "no-request", "equal", "priority", "mirror", "static"],
)
def test_pods_that_do_not_swap_have_a_limit_of_zero(mine: Pod, reason: str) -> None:
    expected = knob(groups_of(mine, facts_of(LIMITED)), SWAP, "c1")
    assert (values(expected), expected.arithmetic) == ([0], f"no swap: {reason}")


def test_other_swap_limit_of_a_changed_pod_may_be_correct() -> None:
    changed = pod_of(BURSTABLE, metadata={"generation": 2})
    expected = knob(groups_of(changed, facts_of(LIMITED)), SWAP, "c1")
    assert values(expected) == [128 * MI]
    assert "may have changed" in expected.doubt


def test_cgroup_v1_limits_memory_and_swap_to_the_memory_limit() -> None:
    groups = groups_of(pod_of(BURSTABLE, claims=[claim("m", "c1", "memory=1Mi")]), facts_of({}, base=V1))
    expected = knob(groups, SWAP, "c1")
    assert values(expected) == [513 * MI]
    assert expected.arithmetic.startswith("no swap: memory limit 512Mi (limit) + 1Mi (claim m)")


def test_cgroup_v1_without_a_memory_limit_has_no_swap_limit() -> None:
    groups = groups_of(pod_of(container("c1", "memory=1Gi")), facts_of({}, base=V1))
    assert SWAP not in kinds_of(groups[1])


# --- OOM scores --------------------------------------------------------------------------------------------


def score(mine: Pod, name: str = "c1", facts: NodeFacts | None = None) -> list[int]:
    return values(knob(groups_of(mine, facts or facts_of(None)), SCORE, name))


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (pod_of(GUARANTEED), -997),
        (pod_of(BEST_EFFORT), 1000),
        (pod_of(container("c1", "cpu=1")), 999),  # 1000 is that of BestEffort
        (pod_of(container("c1", "memory=4Gi")), 500),
        (pod_of(container("c1", "memory=8Gi")), 3),  # not below 1000 - 997
        (pod_of(container("c1", "memory=1Gi", "memory=2Gi")), 875),
        (pod_of(container("c1", "", "memory=4Gi")), 500),  # the limit is the request
    ],
    ids=["guaranteed", "best-effort", "cpu-only", "half", "all", "eighth", "limit"],
)
def test_oom_score_follows_from_qos_class_and_request(mine: Pod, expected: int) -> None:
    assert score(mine) == [expected]


def test_oom_score_shows_its_arithmetic() -> None:
    expected = knob(groups_of(pod_of(container("c1", "memory=4Gi")), facts_of(None)), SCORE, "c1")
    assert expected.arithmetic == "1000 - 1000 * 4Gi (request) / 8Gi -> 500"


def test_node_critical_pod_is_killed_last() -> None:
    spec = {"priority": 2_000_001_000, "priorityClassName": "system-node-critical"}
    assert score(pod_of(BEST_EFFORT, spec=spec)) == [-997]
    assert score(pod_of(BEST_EFFORT, spec={"priorityClassName": "system-node-critical"})) == [1000]


def test_claims_memory_is_shared_in_the_oom_score() -> None:
    given = claim("m", "c1 c2", "memory=2Gi", per_pod="memory=1Gi", per_container="memory=512Mi")
    mine = pod_of(container("c1", "memory=1Gi"), container("c2", "memory=1Gi"), claims=[given])
    assert score(mine) == [1000 - 1000 * (1024 + 1024 + 512 + 512) // 8192]
    explained = knob(groups_of(mine, facts_of(None)), SCORE, "c1").explained_wrong_values
    assert [(value.value, value.note) for value in explained] == [
        (875, "the value of a kubelet that does not count claims")
    ]
    uncounted = replace(facts_of(None), counts_claims=False)
    assert score(mine, facts=uncounted) == [875]


def test_rest_of_a_pod_level_request_is_shared_among_all_containers() -> None:
    level = {"requests": {"memory": "4Gi"}}
    mine = pod_of(container("c1", "memory=1Gi"), container("c2"), init=[container("i1")], level=level)
    assert score(mine) == [1000 - 1000 * 2048 // 8192]


def test_sidecar_is_killed_no_earlier_than_the_app_containers() -> None:
    mine = pod_of(container("c1", "memory=4Gi"), init=[sidecar("s1", "memory=1Gi")])
    assert score(mine, "s1") == [500]
    larger = pod_of(container("c1", "memory=1Gi"), init=[sidecar("s1", "memory=4Gi")])
    assert score(larger, "s1") == [500]


def test_oom_score_of_a_sidecar_counts_the_claims_of_the_app_containers() -> None:
    given = claim("m", "c1 c2", "memory=4Gi")
    mine = pod_of(
        container("c1", "memory=1Gi"), container("c2", "memory=2Gi"), init=[sidecar("s1")], claims=[given]
    )
    assert score(mine, "s1") == score(mine, "c1") == [1000 - 1000 * 3072 // 8192]


def test_rest_of_a_pod_level_request_excludes_the_memory_of_claims() -> None:
    level = {"requests": {"memory": "6Gi"}}
    given = claim("m", "c1", "memory=2Gi")
    mine = pod_of(container("c1", "memory=1Gi"), container("c2"), level=level, claims=[given])
    assert score(mine) == [1000 - 1000 * (1024 + 2048 + 1536) // 8192]
    assert score(mine, "c2") == [1000 - 1000 * 1536 // 8192]


@pytest.mark.parametrize(("score", "verdict"), [(969, AuditVerdict.MATCH), (900, AuditVerdict.UNKNOWN)])
def test_other_oom_score_of_a_changed_pod_is_not_evaluated(score: int, verdict: AuditVerdict) -> None:
    groups = groups_of(pod_of(BURSTABLE, metadata={"generation": 2}), facts_of(None))
    actual = {groups[1].cgroup: ActualCgroup({CgroupSettingId(SCORE): score})}
    (found,) = [cgroup for cgroup in compare_cgroups(groups[1:], actual, 2) if cgroup.setting.kind is SCORE]
    assert found.verdict is verdict


def test_oom_score_of_a_guaranteed_pod_never_changes() -> None:
    groups = groups_of(pod_of(GUARANTEED, metadata={"generation": 2}), facts_of(None))
    assert (exact_value(groups, SCORE, "c1"), knob(groups, SCORE, "c1").doubt) == (-997, "")


def test_tie_break_gate_leaves_burstable_oom_scores_out() -> None:
    facts = facts_of({"featureGates": {"KubeletOOMScoreAdjTieBreak": True}})
    assert SCORE not in kinds_of(groups_of(pod_of(BURSTABLE), facts)[1])
    assert score(pod_of(GUARANTEED), facts=facts) == [-997]


def test_wrong_oom_score_is_no_finding_of_a_device_resource() -> None:
    mine = pod_of(BURSTABLE)
    groups = groups_of(mine, facts_of({}))
    actual = ActualCgroup({CgroupSettingId(SCORE): 1000, CgroupSettingId(HIGH): GI})
    compared = [
        comparison
        for comparison in compare_cgroups(groups[1:], {groups[1].cgroup: actual}, 2)
        if comparison.setting.kind in {SCORE, HIGH}
    ]
    assert {comparison.verdict for comparison in compared} == {AuditVerdict.HIGHER, AuditVerdict.LIMITED}
    found = list(audit_findings(PodAudit(mine, tuple(compared), (), ())))
    assert [(risk.code, risk.resource) for risk in found] == [("cgroup.limited", Resource.MEMORY)]


# --- QoS classes and the node ------------------------------------------------------------------------------


def pods_of_classes() -> list[Pod]:
    """Return upstream's pods: Guaranteed 128Mi, Burstable 128Mi and 256Mi."""
    return [
        pod_of(container("foo", "cpu=1 memory=128Mi", "cpu=1 memory=128Mi")),
        pod_of(container("foo", "cpu=1 memory=128Mi", "cpu=2 memory=256Mi")),
        pod_of(container("foo", "cpu=2 memory=256Mi")),
        pod_of(container("foo", "memory=1Gi"), phase="Failed"),
    ]


def test_qos_classes_protect_the_requests_of_their_pods() -> None:
    facts, pods = facts_of(TIERED), pods_of_classes()
    burstable, best_effort = expected_qos_cgroups(pods, facts)
    assert values(setting_of(burstable, LOW)) == [384 * MI]
    assert not kinds_of(best_effort) & {MIN, LOW}
    (kubepods,) = expected_node_cgroups(pods, facts)
    assert values(setting_of(kubepods, MIN)) == [512 * MI]


def test_without_a_policy_qos_classes_protect_nothing() -> None:
    facts, pods = facts_of({}), pods_of_classes()
    assert values(setting_of(expected_qos_cgroups(pods, facts)[0], LOW)) == [0]
    assert values(setting_of(expected_node_cgroups(pods, facts)[0], MIN)) == [0]


def test_qos_classes_have_no_memory_limit_unless_requests_are_reserved() -> None:
    assert values(setting_of(expected_qos_cgroups([], facts_of({}))[0], SettingKind.MEMORY)) == [NO_LIMIT]
    reserved = facts_of({"featureGates": {"QOSReserved": True}})
    assert SettingKind.MEMORY not in kinds_of(expected_qos_cgroups([], reserved)[0])


RESERVED: Final = {
    "kubeReserved": {"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "1Gi"},
    "systemReserved": {"cpu": "1500m", "memory": "1Gi"},
    "kubeReservedCgroup": "/kube.slice",
    "systemReservedCgroup": "/system.slice",
}


def test_kubepods_limit_is_the_machine_less_reservations() -> None:
    (kubepods,) = expected_node_cgroups(None, facts_of(RESERVED))
    assert kubepods.cgroup.name == "kubepods"
    assert values(setting_of(kubepods, SettingKind.MEMORY)) == [6 * GI]
    assert setting_of(kubepods, SettingKind.MEMORY).arithmetic == (
        "8Gi of memory - 2Gi reserved -> 6442450944 bytes"
    )
    weight = setting_of(kubepods, SettingKind.WEIGHT)
    assert weight.arithmetic == "8 CPUs - 2000m reserved -> shares 6144 -> weight 235"
    assert MIN not in kinds_of(kubepods)  # the pods are not all known


def test_kubepods_gets_all_without_enforcement() -> None:
    (kubepods,) = expected_node_cgroups(None, facts_of({**RESERVED, "enforceNodeAllocatable": ["none"]}))
    assert values(setting_of(kubepods, SettingKind.MEMORY)) == [8 * GI]
    assert values(setting_of(kubepods, SettingKind.WEIGHT)) == [313]


def test_kubepods_weight_accepts_the_cpus_of_the_kubelets_start() -> None:
    facts = replace(facts_of({}), cpu_counts=(6, 8))
    (kubepods,) = expected_node_cgroups(None, facts)
    assert values(setting_of(kubepods, SettingKind.WEIGHT)) == [235, 313]


def test_reserved_cpus_replace_both_cpu_reservations() -> None:
    (kubepods,) = expected_node_cgroups(None, facts_of({**RESERVED, "reservedSystemCPUs": "0,2-3"}))
    assert "8 CPUs - 3000m reserved" in setting_of(kubepods, SettingKind.WEIGHT).arithmetic


def test_reserved_cgroups_have_limits_if_they_are_enforced() -> None:
    enforced = {
        **RESERVED,
        "enforceNodeAllocatable": ["pods", "kube-reserved", "system-reserved-compressible"],
    }
    _, kube, system = expected_node_cgroups(None, facts_of({**enforced, "featureGates": {"MemoryQoS": True}}))
    assert (kube.cgroup.name, system.cgroup.name) == ("kube-reserved", "system-reserved")
    assert values(setting_of(kube, SettingKind.WEIGHT)) == [20]
    assert values(setting_of(kube, SettingKind.MEMORY)) == values(setting_of(kube, MIN)) == [GI]
    assert kinds_of(system) == {SettingKind.WEIGHT}


def test_one_cgroup_for_both_reservations_is_not_compared() -> None:
    enforced = {**RESERVED, "enforceNodeAllocatable": ["pods", "kube-reserved", "system-reserved"]}
    both = {**enforced, "kubeReservedCgroup": "/r.slice", "systemReservedCgroup": "/r.slice"}
    assert [cgroup.cgroup.name for cgroup in expected_node_cgroups(None, facts_of(both))] == ["kubepods"]


def test_unknown_configuration_expects_no_node_cgroups() -> None:
    assert expected_node_cgroups([], facts_of(None)) == ()


def test_cgroup_v1_node_has_shares_and_a_memory_limit() -> None:
    facts = facts_of(RESERVED, base=replace(V1, cgroup_driver=CgroupDriver.SYSTEMD))
    (kubepods,) = expected_node_cgroups([], facts)
    assert values(setting_of(kubepods, SettingKind.WEIGHT)) == [6144]
    assert kinds_of(kubepods) == {SettingKind.WEIGHT, SettingKind.MEMORY}
