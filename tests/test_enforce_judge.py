"""A pod as a whole: where its cgroups are looked for, what is looked at twice, and what is nobody's fault."""

from collections.abc import Mapping

import pytest
from audit_paper import CONTAINER, running
from enforce_pods import SYSTEMD, UID, claim, container, pod_object

from agent.allocatable.actual import GONE, actual_of
from agent.allocatable.evaluate import JudgedPod, Node, Read, judge_classes, judge_pod
from agent.allocatable.facts import Exclusive
from agent.allocatable.knobs import Knob, KnobId
from agent.allocatable.pod import Pod
from agent.allocatable.pod_object import parse_pod
from agent.allocatable.verdicts import Verdict
from agent.errors import ProbeError
from agent.model.cgroup import NO_LIMIT, CgroupKnobs, PageKnobs
from agent.model.reading import NEVER_READ, Absence, Missing

NOW = 1_800_000_000.0
TOP = "/kubepods.slice/kubepods-burstable.slice"
POD = f"{TOP}/kubepods-burstable-pod{UID.replace('-', '_')}.slice"
SCOPE = f"{POD}/cri-containerd-{CONTAINER}.scope"
NODE = Node(SYSTEMD)


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
        "pages": tuple(PageKnobs(size, 0, 0) for size in SYSTEMD.hugepages_kib),
    }
    return CgroupKnobs(**{**values, **given})


def one(claims: tuple[object, ...] = (), ident: str = CONTAINER, **status: object) -> Pod:
    given = {"containerStatuses": [running("c1", ident)], "phase": "Running", **status}
    asks = container("c1", "cpu=500m memory=256Mi", "cpu=1 memory=512Mi")
    return parse_pod(pod_object(asks, claims=claims, **given))


def reads(tree: Mapping[str, CgroupKnobs]) -> Read:
    return lambda path, _: tree.get(path)


def judged(
    tree: Mapping[str, CgroupKnobs], pod: Pod | None = None, node: Node = NODE, **more: object
) -> JudgedPod:
    return judge_pod(pod or one(), node, reads(tree), NOW, **more)


def verdicts(found: JudgedPod) -> set[Verdict]:
    return {compared.verdict for compared in found.compared}


def test_a_pod_and_its_container_are_read_where_the_kubelet_and_the_runtime_have_them() -> None:
    asked = []

    def read(path: str, _: bool) -> CgroupKnobs:
        asked.append(path)
        return knobs()

    assert verdicts(judge_pod(one(), NODE, read, NOW)) == {Verdict.MATCH}
    assert asked == [POD, SCOPE]


def test_what_is_wrong_is_looked_at_again_and_nothing_else_is() -> None:
    asked = []

    def read(path: str, _: bool) -> CgroupKnobs | None:
        asked.append(path)
        first = asked.count(path) == 1
        return knobs(memory=1 << 20) if path == SCOPE and first else knobs()

    assert verdicts(judge_pod(one(), NODE, read, NOW)) == {Verdict.MATCH}
    assert asked == [POD, SCOPE, SCOPE]


def test_what_is_wrong_twice_is_wrong() -> None:
    found = judged({POD: knobs(), SCOPE: knobs(weight=1)})
    assert [(one.knob.knob, one.verdict) for one in found.compared if one.verdict is not Verdict.MATCH] == [
        (Knob.WEIGHT, Verdict.LOWER)
    ]


def test_a_container_that_does_not_run_is_not_looked_for() -> None:
    waiting = one(containerStatuses=[{"name": "c1", "state": {"waiting": {}}}])
    found = judged({}, waiting)
    assert (found.compared, found.risks, found.idle) == ((), (), ("c1",))


def test_a_container_that_ran_once_and_ended_is_not_missed() -> None:
    both = pod_object(
        container("c1", "cpu=500m memory=256Mi", "cpu=1 memory=512Mi"),
        init=[container("setup")],
        containerStatuses=[running("c1")],
        initContainerStatuses=[{"name": "setup", "containerID": f"containerd://{'0' * 64}", "state": {}}],
    )
    found = judged({POD: knobs(), SCOPE: knobs()}, parse_pod(both))
    assert found.idle == ("setup",)
    assert {compared.group.container for compared in found.compared} == {"", "c1"}


@pytest.mark.parametrize("ident", ["../..", "a/b/c/d", "deadbeef.service"])
def test_an_id_that_leads_elsewhere_is_refused(ident: str) -> None:
    with pytest.raises(ProbeError, match=r"pod default/p: .* is no path of a cgroup"):
        judged({}, one(ident=ident))


def test_a_uid_that_leads_elsewhere_is_refused() -> None:
    odd = pod_object(container("c1"), containerStatuses=[running("c1")])
    odd["metadata"]["annotations"] = {"kubernetes.io/config.hash": "../../system.slice"}
    with pytest.raises(ProbeError, match="is no path of a cgroup"):
        judged({}, parse_pod(odd))


def test_where_nobody_has_limits_of_pages_only_what_was_asked_for_is_missed() -> None:
    bare = Node(SYSTEMD, has_hugetlb=False)
    none = knobs(
        controllers=frozenset({"cpu", "memory"}),
        pages=tuple(PageKnobs(size, NEVER_READ, NEVER_READ) for size in SYSTEMD.hugepages_kib),
    )
    assert verdicts(judged({POD: none, SCOPE: none}, node=bare)) == {Verdict.MATCH}
    asks = one((claim("pages", "c1", "hugepages-2Mi=64Mi"),))
    missing = [
        compared.knob.size_kib
        for compared in judged({POD: none, SCOPE: none}, asks, bare).compared
        if compared.verdict is Verdict.MISSING
    ]
    assert missing == [2048] * 4


def exact() -> Pod:
    asks = container("c1", "cpu=1 memory=512Mi", "cpu=1 memory=512Mi")
    return parse_pod(pod_object(asks, containerStatuses=[running("c1")]))


def lifted() -> dict[str, CgroupKnobs]:
    top = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
    free = knobs(weight=39, quota_us=NO_LIMIT, cpus=2, effective=2)
    return {top: free, f"{top}/cri-containerd-{CONTAINER}.scope": free}


def test_a_quota_that_is_lifted_for_cpus_of_its_own_is_right() -> None:
    own = [Exclusive("c1", 2, by_kubelet=True)]
    assert verdicts(judged(lifted(), exact(), exclusive=own)) == {Verdict.MATCH}


def test_only_a_container_with_cpus_of_its_own_is_asked_for_them() -> None:
    asked: dict[str, bool] = {}

    def read(path: str, own_cpus: bool) -> CgroupKnobs | None:
        asked[path] = own_cpus
        return lifted()[path]

    judge_pod(exact(), NODE, read, NOW, [Exclusive("c1", 2, by_kubelet=False)])
    assert [own for path, own in asked.items() if path.endswith(".scope")] == [True]
    assert [own for path, own in asked.items() if path.endswith(".slice")] == [False]
    judge_pod(exact(), NODE, read, NOW)
    assert set(asked.values()) == {False}


def test_a_quota_that_is_lifted_for_nothing_is_wrong_and_unknown_while_nobody_can_tell() -> None:
    assert verdicts(judged(lifted(), exact())) == {Verdict.MATCH, Verdict.UNLIMITED}
    assert verdicts(judged(lifted(), exact(), all_known=False)) == {Verdict.MATCH, Verdict.UNKNOWN}


def test_a_quota_of_parts_of_a_cpu_is_never_lifted() -> None:
    free = knobs(quota_us=NO_LIMIT)
    assert Verdict.UNLIMITED in verdicts(judged({POD: free, SCOPE: free}, all_known=False))


def test_the_classes_are_the_sums_of_all_pods_and_quiet_after_a_start() -> None:
    free = knobs(pages=tuple(PageKnobs(size, NO_LIMIT, NO_LIMIT) for size in SYSTEMD.hugepages_kib))
    tree = {TOP: free, "/kubepods.slice/kubepods-besteffort.slice": knobs(weight=1, pages=free.pages)}
    assert {one.verdict for one in judge_classes([one()], NODE, reads(tree), NOW)} == {Verdict.MATCH}
    more = judge_classes([one(), one()], NODE, reads(tree), NOW)
    assert [found.verdict for found in more if found.knob.knob is Knob.WEIGHT] == [
        Verdict.LOWER,
        Verdict.MATCH,
    ]
    young = parse_pod(pod_object(container("c1", "cpu=1"), containerStatuses=[running("c1")]))
    started = young.containers[0].started_wall_s
    assert started is not None
    soon = judge_classes([one(), young], NODE, reads(tree), started + 60)
    assert [found.verdict for found in soon if found.knob.knob is Knob.WEIGHT] == [
        Verdict.QUIET,
        Verdict.MATCH,
    ]


def test_what_is_not_there_was_not_read_as_nothing() -> None:
    assert actual_of(None, 1.0) is GONE
    lost = Missing(Absence.UNREADABLE, 5)
    found = actual_of(knobs(memory=lost), None)
    assert found.values[KnobId(Knob.MEMORY)] == lost
    assert found.values[KnobId(Knob.RESERVED, 1048576)] == 0


def test_every_knob_that_is_expected_is_read() -> None:
    found = set(actual_of(knobs(), None).values)
    assert {known.knob for known in found} == set(Knob)
