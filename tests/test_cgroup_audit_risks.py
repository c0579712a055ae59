"""Risks that follow from requests, limits and claims although all cgroups are correct."""

import re
from dataclasses import replace

import pytest
from cgroup_audit_pods import V2, claim, container, pod, pod_object, resources

from agent.cgroup_audit.audit import ADVICE, PodRisk, pod_risks, shared_claim_risks
from agent.cgroup_audit.kubelet_config import CgroupDriver, ExclusiveCpus, NodeFacts
from agent.cgroup_audit.pod_model import Pod, UnknownAmount
from agent.cgroup_audit.pod_parser import parse_pod
from agent.model.cpuset import parse_cpus

CPUS = parse_cpus("2-5")
EXCLUSIVE = [ExclusiveCpus("c1", CPUS, by_kubelet=False)]
LIMITED_CONTAINER = container("c1", "cpu=1 memory=1Gi", "cpu=2 memory=1Gi")


def codes(risks: tuple[PodRisk, ...]) -> list[str]:
    for risk in risks:
        assert risk.advice == ADVICE[risk.code]
        assert risk.description
        assert "\n" not in risk.description
    return [risk.code for risk in risks]


def test_pod_without_claims_and_exclusive_cpus_has_no_risks() -> None:
    assert pod_risks(pod(container("c1")), V2) == ()
    assert pod_risks(pod(LIMITED_CONTAINER), NodeFacts(counts_claims=False)) == ()


def test_best_effort_pod_with_a_claim_is_a_risk() -> None:
    (risk,) = pod_risks(pod(container("c1"), claims=[claim("x", "c1", "cpu=2 memory=1Gi")]), V2)
    assert (risk.code, risk.pod, risk.container) == ("claim.best_effort", "default/p", "")
    assert "2000m of cpu and 1Gi of memory" in risk.description


def test_best_effort_pod_with_a_claim_of_hugepages_is_no_risk() -> None:
    assert pod_risks(pod(container("c1"), claims=[claim("x", "c1", "hugepages-2Mi=4Mi")]), V2) == ()


def test_claims_that_the_kubelet_does_not_count_are_a_risk() -> None:
    mine = pod(LIMITED_CONTAINER, claims=[claim("x", "c1", "cpu=2"), claim("a", "c1", "cpu=1")])
    (risk,) = pod_risks(mine, NodeFacts(counts_claims=False))
    assert (risk.code, risk.description) == (
        "claim.not_counted",
        "the kubelet does not count the resources of claims a, x",
    )


def test_pod_level_resources_below_the_claims_are_a_risk() -> None:
    mine = pod(
        container("c1"),
        level=resources("cpu=1 memory=4Gi", "cpu=8 memory=1Gi"),
        claims=[claim("x", "c1", "cpu=2 memory=2Gi")],
    )
    assert [risk.description for risk in pod_risks(mine, V2)] == [
        "cpu: the pod-level request is 1000m, claims give 2000m",
        "memory: the pod-level limit is 1Gi, claims give 2Gi",
    ]


def test_container_without_cpu_request_among_others_is_a_risk() -> None:
    neighbour = container("c2", "cpu=1")
    mine = pod(container("c1"), neighbour, claims=[claim("x", "c1", "cpu=2")])
    (risk,) = pod_risks(mine, V2)
    assert (risk.code, risk.container) == ("claim.starved", "c1")
    assert "2000m" in risk.description
    assert codes(pod_risks(pod(LIMITED_CONTAINER, neighbour, claims=[claim("x", "c1", "cpu=2")]), V2)) == []
    alone = pod(container("c1", "memory=1Gi"), claims=[claim("x", "c1", "cpu=2")])
    assert codes(pod_risks(alone, V2)) == []


@pytest.mark.parametrize(
    ("limits", "throttled", "expected"),
    [
        ("cpu=2", 0, ["cpus.exclusive_quota"]),
        ("cpu=2", 7, ["cpus.exclusive_quota", "cpus.exclusive_throttled"]),
        ("cpu=4", 0, []),
        ("cpu=4", 7, ["cpus.exclusive_throttled"]),
        ("", 7, []),
    ],
)
def test_quota_below_exclusive_cpus_from_a_driver_is_a_risk(
    limits: str, throttled: int, expected: list[str]
) -> None:
    mine = pod(container("c1", "cpu=1", limits))
    assert codes(pod_risks(mine, V2, EXCLUSIVE, {"c1": throttled})) == expected


def test_claim_that_raises_the_quota_above_the_cpus_is_no_risk() -> None:
    mine = pod(LIMITED_CONTAINER, claims=[claim("x", "c1", "cpu=2")])
    assert codes(pod_risks(mine, V2, EXCLUSIVE)) == []
    (quota,) = [risk for risk in pod_risks(mine, NodeFacts(counts_claims=False), EXCLUSIVE) if risk.container]
    assert quota.description == "exclusive CPUs 2-5 are 4000m; the quota is 2000m (limit)"


def test_unknown_claim_amounts_leave_the_quota_of_the_cgroup_to_judge() -> None:
    unknown = UnknownAmount("the kubelet does not list the amounts of claims")
    mine = replace(pod(LIMITED_CONTAINER), claim_resources=unknown)
    quota, throttled = pod_risks(mine, V2, EXCLUSIVE, {"c1": 7}, {"c1": 2000})
    assert quota.description == "exclusive CPUs 2-5 are 4000m; the quota is 2000m"
    assert (quota.code, throttled.code) == ("cpus.exclusive_quota", "cpus.exclusive_throttled")
    assert pod_risks(mine, V2, EXCLUSIVE, {"c1": 0}, {"c1": 4000}) == ()
    assert pod_risks(mine, V2, EXCLUSIVE, {"c1": 7}) == (), "no quota"


def test_exclusive_cpus_from_the_kubelet_are_no_risk() -> None:
    from_kubelet = [ExclusiveCpus("c1", CPUS, by_kubelet=True)]
    assert pod_risks(pod(LIMITED_CONTAINER), V2, from_kubelet, {"c1": 7}) == ()
    assert pod_risks(pod(LIMITED_CONTAINER), V2, [*from_kubelet, *EXCLUSIVE], {"c1": 7}) == ()
    unenforced = NodeFacts(2, CgroupDriver.SYSTEMD, enforces_quota=False)
    assert pod_risks(pod(LIMITED_CONTAINER), unenforced, EXCLUSIVE, {"c1": 7}) == ()


def test_unknown_claim_amounts_are_no_risk() -> None:
    mine = pod(container("c1"), claims=[{"resourceClaimName": "x", "shape": "of 1.40"}])
    assert pod_risks(mine, V2) == shared_claim_risks([mine, mine]) == ()


# --- several pods ------------------------------------------------------------------------------------------


def pod_with_shared_claim(
    name: str, namespace: str = "default", phase: str = "Running", declared: str = "", **amounts: str
) -> Pod:
    obj = pod_object(LIMITED_CONTAINER, claims=[claim("shared", "c1", **amounts)], phase=phase)
    annotations = {"drahealth/shared-claims": declared} if declared else {}
    obj["metadata"] |= {"name": name, "namespace": namespace, "annotations": annotations}
    return parse_pod(obj)


def test_claim_mapping_shared_by_pods_is_a_risk_for_each_pod() -> None:
    pods = [
        pod_with_shared_claim("b", mapping="cpu=5"),
        pod_with_shared_claim("a", mapping="cpu=5"),
        pod_with_shared_claim("c", "other", mapping="cpu=5"),
    ]
    risks = shared_claim_risks(pods)
    assert codes(risks) == ["claim.shared_mapping"] * 2
    assert [risk.pod for risk in risks] == ["default/b", "default/a"]
    assert {risk.description for risk in risks} == {"claim shared counts in full for default/a, default/b"}


def test_mapping_that_all_pods_declare_as_shared_is_no_risk() -> None:
    pods = [
        pod_with_shared_claim("a", declared="other, shared", mapping="cpu=5"),
        pod_with_shared_claim("b", declared="shared", mapping="cpu=5"),
    ]
    assert shared_claim_risks(pods) == ()


def test_mapping_that_one_pod_does_not_declare_stays_a_risk() -> None:
    pods = [
        pod_with_shared_claim("a", declared="shared", mapping="cpu=5"),
        pod_with_shared_claim("b", declared="others", mapping="cpu=5"),
        pod_with_shared_claim("c", phase="Failed", mapping="cpu=5"),
    ]
    risks = shared_claim_risks(pods)
    assert codes(risks) == ["claim.shared_mapping"] * 2
    assert "drahealth/shared-claims" in risks[0].advice


def test_shared_claim_overhead_is_no_risk() -> None:
    assert (
        shared_claim_risks(
            [pod_with_shared_claim("a", per_pod="cpu=1"), pod_with_shared_claim("b", per_pod="cpu=1")]
        )
        == ()
    )


def test_claim_shared_with_an_ended_pod_is_no_risk() -> None:
    assert (
        shared_claim_risks(
            [
                pod_with_shared_claim("a", mapping="cpu=5"),
                pod_with_shared_claim("b", phase="Failed", mapping="cpu=5"),
            ]
        )
        == ()
    )


def test_risk_codes_are_dotted_and_advice_is_one_line() -> None:
    for code, advice in ADVICE.items():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", code)
        assert "\n" not in advice
