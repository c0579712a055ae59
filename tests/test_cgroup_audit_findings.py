"""Findings of an audited pod, by code and resource, with the compared numbers as evidence."""

from collections.abc import Mapping, Sequence

from audit_samples import CONTAINER, NOW, PAGES, POD, SCOPE, knobs, running_status
from cgroup_audit_pods import SYSTEMD, UID, claim, container, pod_object

from agent.cgroup_audit.audit import (
    ADVICE,
    RESOURCE_BY_SETTING,
    AuditedNode,
    audit_findings,
    audit_pod_cgroups,
)
from agent.cgroup_audit.cgroup_settings import SettingKind
from agent.cgroup_audit.kubelet_config import ExclusiveCpus
from agent.cgroup_audit.pod_model import Pod
from agent.cgroup_audit.pod_parser import parse_pod
from agent.model.pod_findings import CgroupSettings, HugepageLimits, PodFinding, Resource
from agent.model.reading import NEVER_READ


def findings_of_tree(
    tree: Mapping[str, CgroupSettings], pod: Pod | None = None, exclusive: Sequence[ExclusiveCpus] = ()
) -> list[PodFinding]:
    audit = audit_pod_cgroups(
        pod or sample_pod(), AuditedNode(SYSTEMD), lambda path, _: tree.get(path), NOW, exclusive
    )
    return [*audit_findings(audit)]


def sample_pod(*claims: object, limit: str = "cpu=1 memory=512Mi") -> Pod:
    status = {"containerStatuses": [running_status("c1", CONTAINER)], "phase": "Running"}
    asks = container("c1", "cpu=500m memory=256Mi", limit)
    return parse_pod(pod_object(asks, claims=claims, **status))


def test_pod_with_expected_allocation_has_no_findings() -> None:
    assert findings_of_tree({POD: knobs(), SCOPE: knobs()}) == []


def test_unread_cgroups_have_no_findings() -> None:
    assert findings_of_tree({}) == []


def test_finding_has_code_resource_size_and_numbers() -> None:
    pages = (HugepageLimits(2048, 4 << 20, 0), *PAGES[1:])
    wrong = knobs(quota_us=50_000, memory=1 << 30, pages=pages)
    findings = findings_of_tree({POD: knobs(quota_us=200_000, memory=2 << 30, pages=pages), SCOPE: wrong})
    of_container = {
        (finding.code, finding.resource, finding.size_kib)
        for finding in findings
        if finding.container == "c1"
    }
    assert of_container == {
        ("cgroup.lower", Resource.CPU, 0),
        ("cgroup.higher", Resource.MEMORY, 0),
        ("cgroup.higher", Resource.HUGEPAGES, 2048),
    }
    assert {finding.pod_uid for finding in findings} == {UID}
    evidence = {finding.resource: finding.evidence for finding in findings if finding.container == "c1"}
    assert evidence[Resource.CPU].startswith("cpu quota: 50000 us, expected 100000 us: ")
    assert evidence[Resource.MEMORY].startswith("memory limit: 1Gi, expected 512Mi: ")
    assert evidence[Resource.HUGEPAGES].startswith("2MB hugepages limit: 4Mi, expected 0: ")


def test_missing_file_is_a_finding_with_its_reason() -> None:
    without = knobs(controllers=frozenset({"cpu", "hugetlb", "cpuset"}), memory=NEVER_READ)
    findings = [finding for finding in findings_of_tree({POD: knobs(), SCOPE: without}) if finding.container]
    assert [(finding.code, finding.resource) for finding in findings] == [("cgroup.missing", Resource.MEMORY)]
    assert findings[0].evidence == "memory limit: the controller memory is not enabled"


def test_cpu_risk_has_its_advice_and_resource_cpu() -> None:
    exclusive = (ExclusiveCpus("c1", 0b11, by_kubelet=False),)
    findings = findings_of_tree({POD: knobs(), SCOPE: knobs(throttled=3)}, exclusive=exclusive)
    risks = {
        finding.code: (finding.container, finding.resource, finding.advice)
        for finding in findings
        if finding.advice
    }
    assert risks == {
        code: ("c1", Resource.CPU, ADVICE[code])
        for code in ("cpus.exclusive_quota", "cpus.exclusive_throttled")
    }


def test_pod_level_risk_has_no_resource() -> None:
    given = claim("gpu-share", "c1", per_pod="memory=1Gi")
    pod = parse_pod(
        pod_object(
            container("c1"),
            claims=[given],
            containerStatuses=[running_status("c1", CONTAINER)],
            phase="Running",
        )
    )
    risks = [finding for finding in findings_of_tree({}, pod) if finding.code.startswith("claim.")]
    assert [(risk.code, risk.container, risk.resource) for risk in risks] == [("claim.best_effort", "", None)]


def test_every_setting_but_the_oom_score_has_a_resource() -> None:
    assert RESOURCE_BY_SETTING.keys() == set(SettingKind) - {SettingKind.OOM_SCORE}
