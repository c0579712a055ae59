"""What cgroups should say is known where it can be, and said to be unknown where it cannot."""

from typing import Any

import pytest
from enforce_pods import (
    MI,
    SIZES,
    SYSTEMD,
    V1,
    V2,
    amounts,
    asked,
    claim,
    container,
    exact,
    knob,
    pod,
    pod_object,
    values,
)
from hypothesis import given
from hypothesis import strategies as st

from agent.allocatable.cgroups import Level
from agent.allocatable.expected import QOS_QUIET_S, QUIET_S, ExpectedGroup, expect_pod, expect_qos
from agent.allocatable.facts import Exclusive, NodeFacts
from agent.allocatable.knobs import Knob, KnobFile, KnobId, file_of, page_name
from agent.allocatable.pod import Pod, Qos
from agent.allocatable.pod_object import parse_pod
from agent.model.cgroup import NO_LIMIT
from agent.model.cpuset import parse_cpus

FULL = container("c1", "cpu=1 memory=1Gi", "cpu=2 memory=2Gi")
CPUS = parse_cpus("2-5")


def test_every_knob_of_every_cgroup_is_expected() -> None:
    knobs = {
        KnobId(Knob.WEIGHT),
        KnobId(Knob.QUOTA),
        KnobId(Knob.PERIOD),
        KnobId(Knob.MEMORY),
        *(KnobId(what, size) for what in (Knob.PAGES, Knob.RESERVED) for size in SIZES),
    }
    for group in expect_pod(pod(FULL), SYSTEMD):
        assert {one.knob for one in group.knobs} == knobs
        assert len(group.knobs) == len(knobs)
        assert group.quiet_s == QUIET_S


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        (KnobId(Knob.WEIGHT), ("cpu", "cpu.shares"), ("cpu", "cpu.weight")),
        (KnobId(Knob.QUOTA), ("cpu", "cpu.cfs_quota_us"), ("cpu", "cpu.max")),
        (KnobId(Knob.PERIOD), ("cpu", "cpu.cfs_period_us"), ("cpu", "cpu.max")),
        (KnobId(Knob.MEMORY), ("memory", "memory.limit_in_bytes"), ("memory", "memory.max")),
        (
            KnobId(Knob.PAGES, 2 << 10),
            ("hugetlb", "hugetlb.2MB.limit_in_bytes"),
            ("hugetlb", "hugetlb.2MB.max"),
        ),
        (
            KnobId(Knob.RESERVED, 1 << 20),
            ("hugetlb", "hugetlb.1GB.rsvd.limit_in_bytes"),
            ("hugetlb", "hugetlb.1GB.rsvd.max"),
        ),
        (KnobId(Knob.CPUS), ("cpuset", "cpuset.cpus"), ("cpuset", "cpuset.cpus")),
        (KnobId(Knob.EFFECTIVE), ("cpuset", "cpuset.effective_cpus"), ("cpuset", "cpuset.cpus.effective")),
    ],
)
def test_the_file_of_a_knob(what: KnobId, first: tuple[str, str], second: tuple[str, str]) -> None:
    assert (file_of(what, 1), file_of(what, 2)) == (KnobFile(*first), KnobFile(*second))


@pytest.mark.parametrize(
    ("size_kib", "name"), [(64, "64KB"), (2048, "2MB"), (32768, "32MB"), (1 << 24, "16GB")]
)
def test_page_sizes_are_named_as_the_kernel_names_them(size_kib: int, name: str) -> None:
    assert page_name(size_kib) == name


# --- who writes it -----------------------------------------------------------------------------------------


def test_the_kubelets_weight_is_linear_first_and_a_runtimes_quadratic() -> None:
    groups = expect_pod(pod(FULL), V2)
    assert values(knob(groups, Knob.WEIGHT)) == [39, 100]
    assert values(knob(groups, Knob.WEIGHT, "c1")) == [100, 39]
    assert [one.note for one in knob(groups, Knob.WEIGHT, "c1").accepted] == ["quadratic", "linear"]


def test_formulas_that_agree_are_told_once() -> None:
    weight = knob(expect_pod(pod(container("c1")), V2), Knob.WEIGHT)
    assert [(one.value, one.note) for one in weight.accepted] == [(1, "")]
    assert weight.arithmetic == "BestEffort: the least -> shares 2 -> weight 1"


def test_hugepage_limits_are_rounded_down_to_whole_pages() -> None:
    mine = pod(container("c1", "cpu=1 hugepages-2Mi=3Mi", "hugepages-2Mi=3Mi"))
    for what in (Knob.PAGES, Knob.RESERVED):
        expected = knob(expect_pod(mine, V2), what, "c1", SIZES[0])
        assert [(one.value, one.rounded) for one in expected.accepted] == [(3 * MI, False), (2 * MI, True)]


def test_what_a_kubelet_writes_that_does_not_count_claims_is_known_to_be_wrong() -> None:
    groups = expect_pod(pod(FULL, claims=[claim("x", "c1", "cpu=3 hugepages-2Mi=4Mi")]), V1)
    for what, wrong, size in ((Knob.WEIGHT, 1024, 0), (Knob.QUOTA, 200_000, 0), (Knob.PAGES, 0, SIZES[0])):
        expected = knob(groups, what, "", size)
        assert [one.value for one in expected.explains] == [wrong]
        assert wrong not in values(expected)
    assert knob(groups, Knob.MEMORY).explains == ()


def test_a_kubelet_that_does_not_count_claims_is_right_without() -> None:
    mine = pod(FULL, claims=[claim("x", "c1", "cpu=3 memory=1Gi hugepages-2Mi=4Mi")])
    uncounted = NodeFacts(hugepages_kib=SIZES, counts_claims=False)
    assert expect_pod(mine, uncounted) == expect_pod(pod(FULL), uncounted)


# --- CPUs of one's own -------------------------------------------------------------------------------------


def test_cpus_from_the_kubelet_lift_the_quota_of_the_container_and_of_the_pod() -> None:
    mine = pod(FULL, container("c2", "cpu=1 memory=1Gi", "cpu=1 memory=1Gi"))
    groups = expect_pod(mine, V2, [Exclusive("c1", CPUS, by_kubelet=True)])
    assert exact(groups, Knob.QUOTA) == exact(groups, Knob.QUOTA, "c1") == NO_LIMIT
    assert exact(groups, Knob.QUOTA, "c2") == 100_000
    assert "c1 has CPUs of its own" in knob(groups, Knob.QUOTA).arithmetic


def test_cpus_from_a_driver_leave_the_quota_as_it_is() -> None:
    """The kubelet knows nothing of them."""
    groups = expect_pod(pod(FULL), V2, [Exclusive("c1", CPUS, by_kubelet=False)])
    assert exact(groups, Knob.QUOTA) == exact(groups, Knob.QUOTA, "c1") == 200_000
    for what in (Knob.CPUS, Knob.EFFECTIVE):
        assert values(knob(groups, what, "c1")) == [CPUS]
    assert all(one.knob.knob is not Knob.CPUS for one in groups[0].knobs)


# --- what nobody knows -------------------------------------------------------------------------------------


def unknown_of(groups: tuple[ExpectedGroup, ...], level: Level) -> set[Knob]:
    (group,) = [one for one in groups if one.group.level is level]
    for one in group.knobs:
        assert bool(one.accepted) is not bool(one.unknown)
    return {one.knob.knob for one in group.knobs if one.unknown}


def test_amounts_that_are_unsaid_make_unknown_what_depends_on_them_and_nothing_else() -> None:
    entry = {"resourceClaimName": "cpus", "containers": ["c1"], "shape": "of 1.40"}
    groups = expect_pod(pod(FULL, claims=[entry]), V2)
    depends = {Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY, Knob.PAGES, Knob.RESERVED}
    assert unknown_of(groups, Level.POD) == depends
    assert unknown_of(groups, Level.CONTAINER) == depends - {Knob.WEIGHT}
    assert "claim cpus" in knob(groups, Knob.QUOTA, "c1").unknown


def test_amounts_that_do_not_matter_need_not_be_known() -> None:
    entry = {"resourceClaimName": "cpus", "shape": "of 1.40"}
    limitless = expect_pod(pod(container("c1", "cpu=1"), claims=[entry]), V2)
    assert Knob.QUOTA not in unknown_of(limitless, Level.POD) | unknown_of(limitless, Level.CONTAINER)
    whole = expect_pod(pod(container("c1"), level=asked("cpu=1", "cpu=2"), claims=[entry]), V2)
    assert exact(whole, Knob.WEIGHT) == 39
    assert exact(whole, Knob.QUOTA) == exact(whole, Knob.QUOTA, "c1") == 200_000
    uncounted = expect_pod(pod(FULL, claims=[entry]), NodeFacts(hugepages_kib=SIZES, counts_claims=False))
    assert unknown_of(uncounted, Level.POD) == unknown_of(uncounted, Level.CONTAINER) == set()


def pending(**status: Any) -> Pod:
    conditions = [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]
    return pod(container("c1", "cpu=4 memory=4Gi", "cpu=4 memory=4Gi"), conditions=conditions, **status)


def test_while_a_resize_waits_the_requests_are_those_that_were_granted() -> None:
    state = {"name": "c1", "allocatedResources": {"cpu": "1", "memory": "1Gi"}}
    groups = expect_pod(pending(containerStatuses=[state], qosClass="Guaranteed"), V1)
    assert exact(groups, Knob.WEIGHT) == exact(groups, Knob.WEIGHT, "c1") == 1024
    assert unknown_of(groups, Level.POD) == unknown_of(groups, Level.CONTAINER) == {Knob.QUOTA, Knob.MEMORY}
    assert "Deferred" in knob(groups, Knob.QUOTA).unknown


def test_while_a_resize_waits_without_that_nothing_of_cpu_and_memory_is_known() -> None:
    groups = expect_pod(pending(), V1)
    unknown = {Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY}
    assert unknown_of(groups, Level.POD) == unknown_of(groups, Level.CONTAINER) == unknown


# --- classes -----------------------------------------------------------------------------------------------


def test_classes_have_no_limit_of_pages_and_a_minute_and_a_half() -> None:
    for group in expect_qos([pod(FULL)], V2):
        pages = [one for one in group.knobs if one.knob.knob in {Knob.PAGES, Knob.RESERVED}]
        assert [values(one) for one in pages] == [[NO_LIMIT]] * 4
        assert (group.group.level, group.quiet_s) == (Level.QOS, QOS_QUIET_S)


def test_each_pods_request_is_rounded_up_before_they_are_added() -> None:
    (burstable, _) = expect_qos([pod(container("c1", "cpu=0.0001"))] * 1000, V1)
    assert values(burstable.knobs[0]) == [1024]
    assert burstable.knobs[0].arithmetic == "1000m (1000 pods) -> shares 1024"


def test_pods_that_are_over_do_not_count() -> None:
    (burstable, _) = expect_qos([pod(FULL), pod(FULL, phase="Succeeded")], V1)
    assert values(burstable.knobs[0]) == [1024]


def test_one_pod_of_which_nobody_knows_makes_its_class_unknown() -> None:
    unsaid = pod(FULL, claims=[{"resourceClaimName": "cpus", "shape": "of 1.40"}])
    burstable, best_effort = expect_qos([pod(FULL), unsaid], V1)
    assert burstable.group.qos is Qos.BURSTABLE
    assert "pod default/p" in burstable.knobs[0].unknown
    assert values(best_effort.knobs[0]) == [2]


# --- properties --------------------------------------------------------------------------------------------

milli = st.integers(1, 64_000)
mebi = st.integers(1, 64_000)
sizes = st.tuples(milli, mebi)
grants = st.tuples(st.integers(0, 9_000), st.integers(0, 9_000), st.integers(0, 64), st.booleans())


def resources(cpu: int, memory: int) -> dict[str, str]:
    pages = memory % 7 * 2
    return amounts(f"cpu={cpu}m memory={memory}Mi hugepages-2Mi={pages}Mi")


@st.composite
def limited_pods(draw: st.DrawFn) -> Pod:
    """Each container is limited to what it requests; claims are of any kind; the pod itself has no limit."""
    kinds = draw(st.lists(st.sampled_from(["containers", "init", "sidecar"]), min_size=1, max_size=5))
    names = [f"c{number}" for number in range(len(kinds))]
    lists: dict[str, list[dict[str, Any]]] = {"containers": [], "initContainers": []}
    for name, kind in zip(names, kinds, strict=True):
        asked_for = resources(*draw(sizes))
        entry = {"name": name, "resources": {"requests": asked_for, "limits": asked_for}}
        always = {"restartPolicy": "Always"} if kind == "sidecar" else {}
        lists["containers" if kind == "containers" else "initContainers"].append({**entry, **always})
    claims = []
    for number, (cpu, memory, pages, each) in enumerate(draw(st.lists(grants, max_size=3))):
        users = " ".join(draw(st.lists(st.sampled_from(names), unique=True)))
        mapping = f"cpu={cpu}m memory={memory}Mi hugepages-2Mi={pages * 2}Mi"
        claims.append(claim(f"x{number}", users, mapping, "", "memory=3Mi" if each else ""))
    obj = pod_object(claims=claims)
    obj["spec"] |= lists
    return parse_pod(obj)


@given(limited_pods(), st.sampled_from([V1, V2, SYSTEMD]))
def test_a_pod_has_at_least_what_its_largest_container_has(mine: Pod, facts: NodeFacts) -> None:
    groups = expect_pod(mine, facts)
    for what, size in ((Knob.QUOTA, 0), (Knob.MEMORY, 0), (Knob.PAGES, SIZES[0]), (Knob.RESERVED, SIZES[0])):
        largest = max(values(knob(groups, what, one.name, size)) for one in mine.containers)
        assert values(knob(groups, what, "", size))[0] >= largest[0]
        assert max(values(knob(groups, what, "", size))) >= max(largest)


@given(sizes, sizes, grants, st.sampled_from([V1, V2, SYSTEMD]))
def test_whoever_asks_for_more_gets_no_less(
    one: tuple[int, int], other: tuple[int, int], given_: tuple[int, int, int, bool], facts: NodeFacts
) -> None:
    less, more = (tuple(edge(pair) for pair in zip(one, other, strict=True)) for edge in (min, max))
    claims = [claim("x", "c1", f"cpu={given_[0]}m memory={given_[1]}Mi")]

    def groups(cpu: int, memory: int) -> tuple[ExpectedGroup, ...]:
        asked_for = f"cpu={cpu}m memory={memory}Mi"
        return expect_pod(pod(container("c1", asked_for, asked_for), claims=claims), facts)

    small, large = groups(*less), groups(*more)
    for name in ("", "c1"):
        for what in (Knob.WEIGHT, Knob.QUOTA, Knob.MEMORY):
            assert exact(small, what, name) <= exact(large, what, name)


@given(grants, grants, st.sampled_from([V1, V2, SYSTEMD]))
def test_whoever_is_given_more_by_a_claim_has_no_less(
    one: tuple[int, int, int, bool], other: tuple[int, int, int, bool], facts: NodeFacts
) -> None:
    def groups(amount: tuple[int, ...]) -> tuple[ExpectedGroup, ...]:
        given_ = f"cpu={amount[0]}m memory={amount[1]}Mi hugepages-2Mi={amount[2] * 2}Mi"
        return expect_pod(pod(FULL, claims=[claim("x", "c1", given_)]), facts)

    less, more = (tuple(edge(pair) for pair in zip(one[:3], other[:3], strict=True)) for edge in (min, max))
    small, large = groups(less), groups(more)
    for name in ("", "c1"):
        for what, size in ((Knob.WEIGHT, 0), (Knob.QUOTA, 0), (Knob.MEMORY, 0), (Knob.PAGES, SIZES[0])):
            assert exact(small, what, name, size) <= exact(large, what, name, size)
