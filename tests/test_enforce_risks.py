"""Risks follow from how pods ask, although every cgroup says what it should."""

import re

import pytest
from enforce_pods import V2, asked, claim, container, pod, pod_object

from agent.allocatable.facts import CgroupDriver, Exclusive, NodeFacts
from agent.allocatable.pod import Pod
from agent.allocatable.pod_object import parse_pod
from agent.allocatable.risks import ADVICE, Risk, risks_of, shared_mappings
from agent.model.cpuset import parse_cpus

CPUS = parse_cpus("2-5")
OWN = [Exclusive("c1", CPUS, by_kubelet=False)]
LIMITED = container("c1", "cpu=1 memory=1Gi", "cpu=2 memory=1Gi")


def codes(risks: tuple[Risk, ...]) -> list[str]:
    for risk in risks:
        assert risk.advice == ADVICE[risk.code]
        assert risk.what
        assert "\n" not in risk.what
    return [risk.code for risk in risks]


def test_a_pod_without_claims_or_cpus_of_its_own_has_none() -> None:
    assert risks_of(pod(container("c1")), V2) == ()
    assert risks_of(pod(LIMITED), NodeFacts(counts_claims=False)) == ()


def test_a_claim_does_not_save_a_pod_from_best_effort() -> None:
    (risk,) = risks_of(pod(container("c1"), claims=[claim("x", "c1", "cpu=2 memory=1Gi")]), V2)
    assert (risk.code, risk.pod, risk.container) == ("claim.best_effort", "default/p", "")
    assert "2000m of cpu and 1Gi of memory" in risk.what


def test_a_claim_that_gives_a_best_effort_pod_pages_alone_is_kept() -> None:
    assert risks_of(pod(container("c1"), claims=[claim("x", "c1", "hugepages-2Mi=4Mi")]), V2) == ()


def test_a_kubelet_that_does_not_count_claims() -> None:
    mine = pod(LIMITED, claims=[claim("x", "c1", "cpu=2"), claim("a", "c1", "cpu=1")])
    (risk,) = risks_of(mine, NodeFacts(counts_claims=False))
    assert (risk.code, risk.what) == ("claim.not_counted", "the kubelet does not count what is given by a, x")


def test_less_for_the_pod_as_a_whole_than_its_claims_give() -> None:
    mine = pod(
        container("c1"),
        level=asked("cpu=1 memory=4Gi", "cpu=8 memory=1Gi"),
        claims=[claim("x", "c1", "cpu=2 memory=2Gi")],
    )
    assert [risk.what for risk in risks_of(mine, V2)] == [
        "cpu: the pod level request is 1000m, its claims give 2000m",
        "memory: the pod level limit is 1Gi, its claims give 2Gi",
    ]


def test_a_container_without_a_request_starves_beside_others() -> None:
    beside = container("c2", "cpu=1")
    mine = pod(container("c1"), beside, claims=[claim("x", "c1", "cpu=2")])
    (risk,) = risks_of(mine, V2)
    assert (risk.code, risk.container) == ("claim.starved", "c1")
    assert "2000m" in risk.what
    assert codes(risks_of(pod(LIMITED, beside, claims=[claim("x", "c1", "cpu=2")]), V2)) == []
    alone = pod(container("c1", "memory=1Gi"), claims=[claim("x", "c1", "cpu=2")])
    assert codes(risks_of(alone, V2)) == []


@pytest.mark.parametrize(
    ("limits", "throttled", "found"),
    [
        ("cpu=2", 0, ["cpus.exclusive_quota"]),
        ("cpu=2", 7, ["cpus.exclusive_quota", "cpus.exclusive_throttled"]),
        ("cpu=4", 0, []),
        ("cpu=4", 7, ["cpus.exclusive_throttled"]),
        ("", 7, []),
    ],
)
def test_cpus_from_a_driver_under_a_quota(limits: str, throttled: int, found: list[str]) -> None:
    mine = pod(container("c1", "cpu=1", limits))
    assert codes(risks_of(mine, V2, OWN, {"c1": throttled})) == found


def test_what_claims_give_raises_the_quota_over_such_cpus() -> None:
    mine = pod(LIMITED, claims=[claim("x", "c1", "cpu=2")])
    assert codes(risks_of(mine, V2, OWN)) == []
    (quota,) = [one for one in risks_of(mine, NodeFacts(counts_claims=False), OWN) if one.container]
    assert quota.what == "CPUs 2-5 are its own, 4000m; its quota is 2000m (limit)"


def test_the_kubelets_own_cpus_have_no_quota() -> None:
    own = [Exclusive("c1", CPUS, by_kubelet=True)]
    assert risks_of(pod(LIMITED), V2, own, {"c1": 7}) == ()
    assert risks_of(pod(LIMITED), V2, [*own, *OWN], {"c1": 7}) == ()
    unenforced = NodeFacts(2, CgroupDriver.SYSTEMD, enforces_quota=False)
    assert risks_of(pod(LIMITED), unenforced, OWN, {"c1": 7}) == ()


def test_amounts_that_are_unsaid_make_no_risk() -> None:
    mine = pod(container("c1"), claims=[{"resourceClaimName": "x", "shape": "of 1.40"}])
    assert risks_of(mine, V2) == shared_mappings([mine, mine]) == ()


# --- several pods ------------------------------------------------------------------------------------------


def user(name: str, namespace: str = "default", phase: str = "Running", **amounts: str) -> Pod:
    obj = pod_object(LIMITED, claims=[claim("shared", "c1", **amounts)], phase=phase)
    obj["metadata"] |= {"name": name, "namespace": namespace}
    return parse_pod(obj)


def test_a_mapping_that_several_pods_share_is_a_risk_for_each() -> None:
    pods = [user("b", mapping="cpu=5"), user("a", mapping="cpu=5"), user("c", "other", mapping="cpu=5")]
    risks = shared_mappings(pods)
    assert codes(risks) == ["claim.shared_mapping"] * 2
    assert [risk.pod for risk in risks] == ["default/b", "default/a"]
    assert {risk.what for risk in risks} == {"claim shared counts in full for default/a, default/b"}


def test_overhead_may_be_shared() -> None:
    assert shared_mappings([user("a", per_pod="cpu=1"), user("b", per_pod="cpu=1")]) == ()


def test_a_pod_that_is_over_shares_nothing() -> None:
    assert shared_mappings([user("a", mapping="cpu=5"), user("b", phase="Failed", mapping="cpu=5")]) == ()


def test_codes_are_dotted_and_advice_is_one_line() -> None:
    for code, advice in ADVICE.items():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", code)
        assert "\n" not in advice
