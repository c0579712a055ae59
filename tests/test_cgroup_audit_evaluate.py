"""Audit of a pod: the cgroups that are read, second reads of wrong values, and inconclusive verdicts."""

from collections.abc import Mapping

import pytest
from audit_samples import CONTAINER, NOW, POD, SCOPE, TOP, knobs, running_status
from cgroup_audit_pods import SYSTEMD, UID, claim, container, pod_object

from agent.cgroup_audit.audit import (
    VANISHED_CGROUP,
    AuditedNode,
    PodAudit,
    ReadCgroup,
    actual_cgroup,
    audit_pod_cgroups,
    audit_qos_cgroups,
    confirmed_qos_comparisons,
    qos_differences,
    with_inherited_page_limits,
)
from agent.cgroup_audit.audit_verdicts import DRIFT_VERDICTS, AuditVerdict, SettingComparison
from agent.cgroup_audit.cgroup_settings import CgroupSettingId, SettingKind
from agent.cgroup_audit.kubelet_config import ExclusiveCpus
from agent.cgroup_audit.pod_model import Pod, QosClass
from agent.cgroup_audit.pod_parser import parse_pod
from agent.errors import ProbeError
from agent.model.pod_findings import NO_LIMIT, CgroupSettings, HugepageLimits
from agent.model.reading import NEVER_READ, Absence, Missing

NODE = AuditedNode(SYSTEMD)


def sample_pod(claims: tuple[object, ...] = (), ident: str = CONTAINER, **status: object) -> Pod:
    given = {"containerStatuses": [running_status("c1", ident)], "phase": "Running", **status}
    asks = container("c1", "cpu=500m memory=256Mi", "cpu=1 memory=512Mi")
    return parse_pod(pod_object(asks, claims=claims, **given))


def reads(tree: Mapping[str, CgroupSettings]) -> ReadCgroup:
    return lambda path, _: tree.get(path)


def audit(
    tree: Mapping[str, CgroupSettings], pod: Pod | None = None, node: AuditedNode = NODE, **more: object
) -> PodAudit:
    return audit_pod_cgroups(pod or sample_pod(), node, reads(tree), NOW, **more)


def verdicts(found: PodAudit) -> set[AuditVerdict]:
    return {compared.verdict for compared in found.comparisons}


def test_pod_and_container_cgroups_are_read_at_their_paths() -> None:
    reads_done = []

    def read(path: str, _: bool) -> CgroupSettings:
        reads_done.append(path)
        return knobs()

    assert verdicts(audit_pod_cgroups(sample_pod(), NODE, read, NOW)) == {AuditVerdict.MATCH}
    assert reads_done == [POD, SCOPE]


def test_only_cgroups_with_a_wrong_value_are_read_again() -> None:
    reads_done = []

    def read(path: str, _: bool) -> CgroupSettings | None:
        reads_done.append(path)
        first = reads_done.count(path) == 1
        return knobs(memory=1 << 20) if path == SCOPE and first else knobs()

    assert verdicts(audit_pod_cgroups(sample_pod(), NODE, read, NOW)) == {AuditVerdict.MATCH}
    assert reads_done == [POD, SCOPE, SCOPE]


def test_value_wrong_in_two_reads_is_reported() -> None:
    found = audit({POD: knobs(), SCOPE: knobs(weight=1)})
    assert [
        (each.setting.kind, each.verdict)
        for each in found.comparisons
        if each.verdict is not AuditVerdict.MATCH
    ] == [(SettingKind.WEIGHT, AuditVerdict.LOWER)]


def test_waiting_container_is_idle_and_not_read() -> None:
    waiting = sample_pod(containerStatuses=[{"name": "c1", "state": {"waiting": {}}}])
    found = audit({}, waiting)
    assert (found.comparisons, found.risks, found.stopped_containers) == ((), (), ("c1",))


def test_ended_init_container_is_idle_and_not_read() -> None:
    both = pod_object(
        container("c1", "cpu=500m memory=256Mi", "cpu=1 memory=512Mi"),
        init=[container("setup")],
        containerStatuses=[running_status("c1")],
        initContainerStatuses=[{"name": "setup", "containerID": f"containerd://{'0' * 64}", "state": {}}],
    )
    found = audit({POD: knobs(), SCOPE: knobs()}, parse_pod(both))
    assert found.stopped_containers == ("setup",)
    assert {compared.cgroup.container for compared in found.comparisons} == {"", "c1"}


@pytest.mark.parametrize("ident", ["../..", "a/b/c/d", "deadbeef.service"])
def test_container_id_that_is_no_path_component_is_refused(ident: str) -> None:
    with pytest.raises(ProbeError, match=r"pod default/p: .* is not the path of its cgroup"):
        audit({}, sample_pod(ident=ident))


def test_pod_uid_that_is_no_path_component_is_refused() -> None:
    odd = pod_object(container("c1"), containerStatuses=[running_status("c1")])
    odd["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "../../system.slice"}
    with pytest.raises(ProbeError, match="is not the path of its cgroup"):
        audit({}, parse_pod(odd))


def test_without_hugetlb_only_requested_pages_are_missing() -> None:
    bare = AuditedNode(SYSTEMD, has_hugetlb=False)
    none = knobs(
        controllers=frozenset({"cpu", "memory"}),
        pages=tuple(HugepageLimits(size, NEVER_READ, NEVER_READ) for size in SYSTEMD.hugepages_kib),
    )
    assert verdicts(audit({POD: none, SCOPE: none}, node=bare)) == {AuditVerdict.MATCH}
    asks = sample_pod((claim("pages", "c1", "hugepages-2Mi=64Mi"),))
    missing = [
        compared.setting.size_kib
        for compared in audit({POD: none, SCOPE: none}, asks, bare).comparisons
        if compared.verdict is AuditVerdict.MISSING
    ]
    assert missing == [2048] * 4


def guaranteed_pod() -> Pod:
    asks = container("c1", "cpu=1 memory=512Mi", "cpu=1 memory=512Mi")
    return parse_pod(pod_object(asks, containerStatuses=[running_status("c1")]))


def cgroups_without_quota() -> dict[str, CgroupSettings]:
    top = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
    free = knobs(weight=39, quota_us=NO_LIMIT, cpus=2, effective=2)
    return {top: free, f"{top}/cri-containerd-{CONTAINER}.scope": free}


def test_no_quota_with_exclusive_cpus_matches() -> None:
    exclusive = [ExclusiveCpus("c1", 2, by_kubelet=True)]
    assert verdicts(audit(cgroups_without_quota(), guaranteed_pod(), exclusive_cpus=exclusive)) == {
        AuditVerdict.MATCH
    }


def test_cpuset_is_read_only_for_containers_with_exclusive_cpus() -> None:
    reads_done: dict[str, bool] = {}

    def read(path: str, with_cpus: bool) -> CgroupSettings | None:
        reads_done[path] = with_cpus
        return cgroups_without_quota()[path]

    audit_pod_cgroups(guaranteed_pod(), NODE, read, NOW, [ExclusiveCpus("c1", 2, by_kubelet=False)])
    assert [exclusive for path, exclusive in reads_done.items() if path.endswith(".scope")] == [True]
    assert [exclusive for path, exclusive in reads_done.items() if path.endswith(".slice")] == [False]
    audit_pod_cgroups(guaranteed_pod(), NODE, read, NOW)
    assert set(reads_done.values()) == {False}


def test_no_quota_is_unknown_while_exclusive_cpus_are_unknown() -> None:
    assert verdicts(audit(cgroups_without_quota(), guaranteed_pod())) == {
        AuditVerdict.MATCH,
        AuditVerdict.UNLIMITED,
    }
    assert verdicts(audit(cgroups_without_quota(), guaranteed_pod(), exclusive_cpus_complete=False)) == {
        AuditVerdict.MATCH,
        AuditVerdict.UNKNOWN,
    }


def test_no_quota_with_a_fractional_cpu_request_is_unlimited() -> None:
    free = knobs(quota_us=NO_LIMIT)
    assert AuditVerdict.UNLIMITED in verdicts(audit({POD: free, SCOPE: free}, exclusive_cpus_complete=False))


def test_qos_class_weight_sums_its_pods_and_is_quiet_after_a_start() -> None:
    free = knobs(pages=tuple(HugepageLimits(size, NO_LIMIT, NO_LIMIT) for size in SYSTEMD.hugepages_kib))
    tree = {TOP: free, "/kubepods.slice/kubepods-besteffort.slice": knobs(weight=1, pages=free.pages)}
    assert {each.verdict for each in audit_qos_cgroups([sample_pod()], NODE, reads(tree), NOW)} == {
        AuditVerdict.MATCH
    }
    more = audit_qos_cgroups([sample_pod(), sample_pod()], NODE, reads(tree), NOW)
    assert qos_differences(more, NOW) is not None
    assert [found.verdict for found in more if found.setting.kind is SettingKind.WEIGHT] == [
        AuditVerdict.LOWER,
        AuditVerdict.MATCH,
    ]
    started_now = parse_pod(pod_object(container("c1", "cpu=1"), containerStatuses=[running_status("c1")]))
    started = started_now.containers[0].started_wall_s
    assert started is not None
    early = audit_qos_cgroups([sample_pod(), started_now], NODE, reads(tree), started + 60)
    assert [found.verdict for found in early if found.setting.kind is SettingKind.WEIGHT] == [
        AuditVerdict.QUIET,
        AuditVerdict.MATCH,
    ]


def qos_verdicts_after(apart_s: float, weights: tuple[int, int]) -> list[AuditVerdict]:
    """Return the verdicts on the weight of Burstable in an audit, `apart_s` after an audit before it."""

    def compare_qos(weight: int, now_s: float) -> tuple[SettingComparison, ...]:
        found = audit_qos_cgroups([sample_pod()], NODE, reads({TOP: knobs(weight=weight)}), now_s)
        return tuple(comparison for comparison in found if comparison.cgroup.qos is QosClass.BURSTABLE)[:1]

    earlier = qos_differences(compare_qos(weights[0], NOW), NOW)
    now_s = NOW + apart_s
    found = confirmed_qos_comparisons(compare_qos(weights[1], now_s), now_s, earlier)
    return [comparison.verdict for comparison in found]


@pytest.mark.parametrize(
    ("apart_s", "weights", "verdict"),
    [
        (60, (10, 10), AuditVerdict.LOWER),
        (60, (400, 10), AuditVerdict.LOWER),
        (59, (10, 10), AuditVerdict.QUIET),
        (60, (20, 10), AuditVerdict.QUIET),
        (60, (10, 20), AuditVerdict.MATCH),
    ],
)
def test_qos_weight_differs_only_if_wrong_in_two_audits_a_minute_apart(
    apart_s: float, weights: tuple[int, int], verdict: AuditVerdict
) -> None:
    assert qos_verdicts_after(apart_s, weights) == [verdict]


# --- hugepage limits that the runtime does not set ---------------------------------------------------------

PAGES_2M = 64 << 20


def pages(limit: int | Missing, of_2m: int | Missing | None = None) -> tuple[HugepageLimits, ...]:
    """Return limits of all hugepage sizes; `of_2m`: that of 2 MiB, if it differs."""
    two = limit if of_2m is None else of_2m
    return tuple(
        HugepageLimits(size, *2 * [two if size == 2048 else limit]) for size in SYSTEMD.hugepages_kib
    )


def page_pod(**more: object) -> Pod:
    """Return a pod of two containers: c1 requests 64Mi of 2 MiB pages, c2 none."""
    asks = container(
        "c1", "cpu=500m memory=256Mi hugepages-2Mi=64Mi", "cpu=1 memory=512Mi hugepages-2Mi=64Mi"
    )
    states = [running_status("c1"), running_status("c2", "beef" * 16)]
    return parse_pod(
        pod_object(asks, container("c2"), qosClass="Burstable", containerStatuses=states, **more)
    )


def page_audit(of_pod: tuple[HugepageLimits, ...], *of_containers: tuple[HugepageLimits, ...]) -> PodAudit:
    """Audit page_pod() with these hugepage limits; other settings are as expected."""
    second = f"{POD}/cri-containerd-{'beef' * 16}.scope"
    free = {"quota_us": NO_LIMIT, "memory": NO_LIMIT}
    tree = {
        POD: knobs(**free, pages=of_pod),
        SCOPE: knobs(pages=of_containers[0]),
        second: knobs(**free, weight=1, pages=of_containers[-1]),
    }
    return audit(tree, page_pod())


NO_OWN_LIMITS = pytest.mark.parametrize("own", [NO_LIMIT, Missing(Absence.ABSENT)], ids=["max", "no-file"])


@NO_OWN_LIMITS
def test_page_limit_of_the_pod_is_compared_if_the_runtime_sets_none(own: int | Missing) -> None:
    before = page_audit(pages(0, PAGES_2M), pages(own))
    assert verdicts(before) & DRIFT_VERDICTS
    (found,), is_inherited = with_inherited_page_limits([before])
    assert is_inherited
    assert verdicts(found) == {AuditVerdict.MATCH, AuditVerdict.NOT_MISSED}
    spare = [
        comparison.cgroup.container
        for comparison in found.comparisons
        if comparison.verdict is AuditVerdict.NOT_MISSED
    ]
    assert spare == ["c2", "c2"]


@NO_OWN_LIMITS
def test_page_limit_of_the_pod_below_a_containers_is_lower(own: int | Missing) -> None:
    (found,), _ = with_inherited_page_limits([page_audit(pages(0, 32 << 20), pages(own))])
    lower = [
        comparison.cgroup.container
        for comparison in found.comparisons
        if comparison.verdict is AuditVerdict.LOWER
    ]
    assert lower == ["", "", "c1", "c1"]
    assert verdicts(found) & DRIFT_VERDICTS == {AuditVerdict.LOWER}


def test_container_without_page_limit_is_unlimited_if_others_have_one() -> None:
    before = page_audit(pages(0, PAGES_2M), pages(NO_LIMIT), pages(0))
    (found,), is_inherited = with_inherited_page_limits([before])
    assert (found, is_inherited) == (before, False)
    assert AuditVerdict.UNLIMITED in verdicts(found)


def test_missing_setting_keeps_its_absence_in_the_actual_values() -> None:
    assert actual_cgroup(None, 1.0) is VANISHED_CGROUP
    lost = Missing(Absence.UNREADABLE, 5)
    found = actual_cgroup(knobs(memory=lost), None)
    assert found.values[CgroupSettingId(SettingKind.MEMORY)] == lost
    assert found.values[CgroupSettingId(SettingKind.RESERVED, 1048576)] == 0


def test_actual_values_have_every_setting() -> None:
    found = set(actual_cgroup(knobs(), None).values)
    assert {known.kind for known in found} == set(SettingKind)
