"""What is left to be told of an audited pod: by code and resource, in words that say the numbers."""

from collections.abc import Mapping, Sequence

from audit_paper import CONTAINER, running
from enforce_pods import SYSTEMD, UID, claim, container, pod_object

from agent.allocatable.evaluate import Node, judge_pod
from agent.allocatable.facts import Exclusive
from agent.allocatable.findings import RESOURCES, findings_of
from agent.allocatable.knobs import Knob
from agent.allocatable.pod import Pod
from agent.allocatable.pod_object import parse_pod
from agent.allocatable.risks import ADVICE
from agent.model.cgroup import CgroupKnobs, PageKnobs
from agent.model.pods import PodFinding, Resource
from agent.model.reading import NEVER_READ

NOW = 1_800_000_000.0
TOP = "/kubepods.slice/kubepods-burstable.slice"
POD = f"{TOP}/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
SCOPE = f"{POD}/cri-containerd-{CONTAINER}.scope"
PAGES = tuple(PageKnobs(size, 0, 0) for size in SYSTEMD.hugepages_kib)


def knobs(**given: object) -> CgroupKnobs:
    """A cgroup of a pod that asks for 500m to 1 CPU, 256Mi to 512Mi, and no pages."""
    values = {
        "controllers": frozenset({"cpu", "memory", "hugetlb", "cpuset"}),
        "weight": 20,
        "quota_us": 100_000,
        "period_us": 100_000,
        "throttled": 0,
        "memory": 512 << 20,
        "cpus": 0,
        "effective": 3,
        "pages": PAGES,
    }
    return CgroupKnobs(**{**values, **given})


def found(
    tree: Mapping[str, CgroupKnobs], pod: Pod | None = None, exclusive: Sequence[Exclusive] = ()
) -> list[PodFinding]:
    judged = judge_pod(pod or asking(), Node(SYSTEMD), lambda path, _: tree.get(path), NOW, exclusive)
    return [*findings_of(judged)]


def asking(*claims: object, limit: str = "cpu=1 memory=512Mi") -> Pod:
    status = {"containerStatuses": [running("c1", CONTAINER)], "phase": "Running"}
    asks = container("c1", "cpu=500m memory=256Mi", limit)
    return parse_pod(pod_object(asks, claims=claims, **status))


def test_what_is_as_promised_is_not_told() -> None:
    assert found({POD: knobs(), SCOPE: knobs()}) == []


def test_what_nobody_could_read_is_not_told_as_right_or_wrong() -> None:
    assert found({}) == []


def test_each_knob_is_told_with_its_numbers_its_resource_and_its_size() -> None:
    pages = (PageKnobs(2048, 4 << 20, 0), *PAGES[1:])
    wrong = knobs(quota_us=50_000, memory=1 << 30, pages=pages)
    told = found({POD: knobs(quota_us=200_000, memory=2 << 30, pages=pages), SCOPE: wrong})
    of_container = {(one.code, one.resource, one.size_kib) for one in told if one.container == "c1"}
    assert of_container == {
        ("cgroup.lower", Resource.CPU, 0),
        ("cgroup.higher", Resource.MEMORY, 0),
        ("cgroup.higher", Resource.HUGEPAGES, 2048),
    }
    assert {one.pod_uid for one in told} == {UID}
    evidence = {one.resource: one.evidence for one in told if one.container == "c1"}
    assert evidence[Resource.CPU].startswith("cpu quota: 50000 us, expected 100000 us: ")
    assert evidence[Resource.MEMORY].startswith("memory limit: 1Gi, expected 512Mi: ")
    assert evidence[Resource.HUGEPAGES].startswith("2MB hugepages limit: 4Mi, expected 0: ")


def test_a_missing_file_is_told_with_why() -> None:
    without = knobs(controllers=frozenset({"cpu", "hugetlb", "cpuset"}), memory=NEVER_READ)
    told = [one for one in found({POD: knobs(), SCOPE: without}) if one.container]
    assert [(one.code, one.resource) for one in told] == [("cgroup.missing", Resource.MEMORY)]
    assert told[0].evidence == "memory limit: the controller memory is not enabled"


def test_risks_come_with_their_advice_and_name_cpus_if_they_are_about_cpus() -> None:
    exclusive = (Exclusive("c1", 0b11, by_kubelet=False),)
    told = found({POD: knobs(), SCOPE: knobs(throttled=3)}, exclusive=exclusive)
    risks = {one.code: (one.container, one.resource, one.advice) for one in told if one.advice}
    assert risks == {
        code: ("c1", Resource.CPU, ADVICE[code])
        for code in ("cpus.exclusive_quota", "cpus.exclusive_throttled")
    }


def test_a_risk_of_the_pod_as_a_whole_is_about_no_resource() -> None:
    given = claim("gpu-share", "c1", per_pod="memory=1Gi")
    pod = parse_pod(
        pod_object(
            container("c1"), claims=[given], containerStatuses=[running("c1", CONTAINER)], phase="Running"
        )
    )
    risks = [one for one in found({}, pod) if one.code.startswith("claim.")]
    assert [(one.code, one.container, one.resource) for one in risks] == [("claim.best_effort", "", None)]


def test_every_knob_has_a_resource() -> None:
    assert RESOURCES.keys() == set(Knob)
