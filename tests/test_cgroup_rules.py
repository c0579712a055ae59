"""Cgroup rules: limits, time, resets."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import pytest
from paper import ABSENT, EIO, MIB, NO_LIMIT, PaperNode, group_sample, hugetlb_sample, pods_sample

from agent.health.host.cgroup.rules import CGROUP_RULES, FROZEN_S, detect_hugepage_limit_hit
from agent.health.host.cgroup.state import (
    MAX_REMOVED_CGROUPS,
    CgroupRuleInput,
    CpuThrottling,
    cgroup_rule_inputs,
    exclusive_cpu_devices,
    exclusive_devices_of_cgroup,
)
from agent.health.host.verdicts import sampler_wakes
from agent.health.rules import CLEAN_PASSES, OK, RuleInconclusive, RuleResult
from agent.model.claim import DeviceRef
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import DeclaredCpuDevice, DeclaredFile, DriverDevice
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.health import Finding, NonDeviceCause, Severity
from agent.model.reading import Reading, SourceState
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import CgroupSample, HugetlbSample, Snapshot
from agent.model.time import NS

HIT: Final = "cgroup.hugetlb.max_hit"
THROTTLED: Final = "cgroup.cpu.throttled"
EXCLUSIVE: Final = "cgroup.cpu.throttled_exclusive"
KILL: Final = "cgroup.memory.oom_kill"
OOM: Final = "cgroup.memory.oom"
AT_MAX: Final = "cgroup.memory.max"
AT_HIGH: Final = "cgroup.memory.high"
FROZEN: Final = "cgroup.frozen"
POD: Final = group_sample(1, hugetlb_sample(), container="")
CONTAINER: Final = group_sample(2, hugetlb_sample())
SLOW: Final = CpuThrottling(throttled=6, periods=20, evaluations=2)


def hugepage_hits(
    *hits: int, limit: Reading = NO_LIMIT, rsvd: Reading = NO_LIMIT, pod: Reading = NO_LIMIT
) -> CgroupRuleInput:
    """Return a container with one page size per count of hits."""
    sizes = (2048, 1 << 20)[: len(hits)]
    of_pod = [hugetlb_sample(0, size_kib=kib, limit=pod) for kib in sizes]
    own = [hugetlb_sample(0, size_kib=kib, limit=limit, rsvd=rsvd) for kib in sizes]
    group, parent = group_sample(2, *own), group_sample(1, *of_pod, container="")
    return CgroupRuleInput(group, parent, hits=hits, refusals=(0,) * len(hits))


def v1(size: HugetlbSample) -> HugetlbSample:
    """Return the sample of cgroup v1, which counts reservations separately."""
    return size._replace(rsvd_failed=0)


def v1_pages(hits: int, refusals: int) -> CgroupRuleInput:
    """Return a container of cgroup v1."""
    size = v1(hugetlb_sample(limit=8 * MIB, rsvd=4 * MIB))
    return CgroupRuleInput(group_sample(2, size), None, hits=(hits,), refusals=(refusals,))


def view_with(view: CgroupRuleInput, **members: Any) -> CgroupRuleInput:
    return view._replace(**members)


def pinned_container(cpus: str, evaluations: int = 2) -> CgroupRuleInput:
    """Return a container on CPUs that a driver declares as exclusive."""
    group = CONTAINER._replace(cpus=parse_cpus(cpus))
    return CgroupRuleInput(
        group, exclusive=("driver/node-a/cpuset-1",), throttling=CpuThrottling(evaluations, 9, evaluations)
    )


def memory(limit: Reading, pods: Reading = NO_LIMIT, **members: Any) -> CgroupRuleInput:
    return CgroupRuleInput(CONTAINER._replace(mem_limit=limit), POD._replace(mem_limit=pods), **members)


def info(code: str, evidence: str) -> Finding:
    return Finding(code, Severity.INFO, evidence)


SIZES: Final = CgroupRuleInput(CONTAINER, POD, hits=(0,), refusals=(0,))
SHARE: Final = "throttled in more than 25 % of its CPU periods in 60 s"
TEN_TIMES: Final = "hit its memory limit at least 10 times in 60 s"
CASES: Final[list[tuple[str, CgroupRuleInput, RuleResult]]] = [
    # --- hugepages
    (HIT, hugepage_hits(0, 0), OK),
    (HIT, hugepage_hits(1, limit=8 * MIB), info(HIT, "2mi pages hit the limit (limit 8 MiB)")),
    (HIT, hugepage_hits(7, 2, limit=8 * MIB, rsvd=6 * MIB),
     info(HIT, "2mi pages hit the limit (limit 6 MiB), 1gi pages hit the limit (limit 6 MiB)")),
    (HIT, hugepage_hits(0, 3, pod=1024 * MIB), info(HIT, "1gi pages hit the limit (limit 1 GiB)")),
    (HIT, hugepage_hits(1, limit=0), info(HIT, "2mi pages hit the limit (limit 0 B)")),
    (HIT, hugepage_hits(1, limit=ABSENT, rsvd=EIO), info(HIT, "2mi pages hit the limit")),
    (HIT, view_with(hugepage_hits(0, 1), pod=POD), info(HIT, "1gi pages hit the limit")),
    (HIT, view_with(hugepage_hits(1), pod=None), info(HIT, "2mi pages hit the limit")),
    (HIT, v1_pages(0, 1),
     info(HIT, "2mi pages could not be reserved, mmap failed with ENOMEM (limit 4 MiB)")),
    (HIT, v1_pages(1, 0), info(HIT, "2mi pages hit the limit (limit 8 MiB)")),
    (HIT, v1_pages(5, 5), info(HIT, "2mi pages hit the limit (limit 8 MiB), 2mi pages could not be reserved, "
                                   "mmap failed with ENOMEM (limit 4 MiB)")),
    (HIT, CgroupRuleInput(POD, hits=(1,), refusals=(0,)), info(HIT, "2mi pages hit the limit")),
    (HIT, CgroupRuleInput(POD, hits=(1,), refusals=(0,), containers=(hugepage_hits(1),)), OK),
    (HIT, CgroupRuleInput(POD, hits=(1,), refusals=(0,), containers=(hugepage_hits(0),)),
     info(HIT, "2mi pages hit the limit")),
    # --- CPU time
    (THROTTLED, SIZES, OK),
    (THROTTLED, view_with(SIZES, throttling=SLOW), info(THROTTLED, SHARE)),
    (THROTTLED, view_with(SIZES, throttling=CpuThrottling(5, 20)), OK),
    (THROTTLED, view_with(SIZES, throttling=CpuThrottling(19, 19)), OK),
    (THROTTLED,
     view_with(SIZES, throttling=CpuThrottling(6, 20), limits=HostLimits(throttled_percent=30)), OK),
    (THROTTLED, view_with(SIZES, throttling=CpuThrottling(7, 20),
                   limits=HostLimits(throttled_percent=30, throttled_window_s=30)),
     info(THROTTLED, "throttled in more than 30 % of its CPU periods in 30 s")),
    (THROTTLED, CgroupRuleInput(POD, throttling=SLOW), info(THROTTLED, SHARE)),
    (THROTTLED, CgroupRuleInput(POD, throttling=SLOW, containers=(view_with(SIZES, throttling=SLOW),)), OK),
    (EXCLUSIVE, pinned_container("2-3", 1), OK),
    (EXCLUSIVE, pinned_container("2-3"),
     Finding(EXCLUSIVE, Severity.DEGRADED, "throttled on exclusive CPUs 2-3")),
    (EXCLUSIVE, view_with(pinned_container("2-3"), containers=(pinned_container("2-3"),)), OK),
    (EXCLUSIVE, view_with(pinned_container("2-3"), exclusive=()), OK),
    (EXCLUSIVE, view_with(pinned_container("2-3"), group=CONTAINER._replace(cpus=EIO)), OK),
    # --- memory
    (KILL, memory(32 * MIB), OK),
    (KILL, memory(32 * MIB, kills=1), info(KILL, "processes were killed: out of memory (limit 32 MiB)")),
    (KILL, memory(NO_LIMIT, 64 * MIB, kills=9),
     info(KILL, "processes were killed: out of memory (limit 64 MiB)")),
    (KILL, memory(NO_LIMIT, kills=1),
     info(KILL, "processes were killed: out of memory (no limit of its own)")),
    (KILL, memory(EIO, kills=1), info(KILL, "processes were killed: out of memory")),
    (KILL, memory(NO_LIMIT, ABSENT, kills=1), info(KILL, "processes were killed: out of memory")),
    (KILL, CgroupRuleInput(POD, kills=2, containers=(memory(MIB, kills=1),)), OK),
    (KILL, CgroupRuleInput(POD, kills=2, containers=(memory(MIB, at_max=99),)),
     info(KILL, "processes were killed: out of memory (no limit of its own)")),
    (OOM, memory(32 * MIB), OK),
    (OOM, memory(32 * MIB, ooms=1), info(OOM, "out of memory, no process was killed (limit 32 MiB)")),
    (OOM, memory(32 * MIB, ooms=2, kills=1), OK),
    (AT_MAX, memory(32 * MIB, at_max=9), OK),
    (AT_MAX, memory(32 * MIB, at_max=10), info(AT_MAX, f"{TEN_TIMES} (limit 32 MiB)")),
    (AT_MAX, memory(32 * MIB, at_max=10_000), info(AT_MAX, f"{TEN_TIMES} (limit 32 MiB)")),
    (AT_HIGH, memory(NO_LIMIT, at_high=9), OK),
    (AT_HIGH, memory(NO_LIMIT, at_high=10), info(AT_HIGH, "above memory.high at least 10 times in 60 s")),
    # --- freezer
    (FROZEN, SIZES, OK),
    (FROZEN, view_with(SIZES, group=CONTAINER._replace(frozen=1)), info(FROZEN, "frozen")),
    (FROZEN, view_with(SIZES, group=CONTAINER._replace(frozen=ABSENT)), OK),
    (FROZEN, view_with(SIZES, group=CONTAINER._replace(frozen=EIO)),
     RuleInconclusive("whether it is still frozen cannot be read")),
    (FROZEN, CgroupRuleInput(POD._replace(frozen=1), containers=(view_with(SIZES,
     group=CONTAINER._replace(frozen=1)),)),
     OK),
]  # fmt: skip
ROWS: Final = {rule.code: rule for rule in CGROUP_RULES}


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_view_has_result(code: str, view: CgroupRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


@pytest.mark.parametrize("code", ROWS)
def test_every_cgroup_rule_has_good_and_bad_cases(code: str) -> None:
    answers = [answer for named, _, answer in CASES if named == code]
    assert OK in answers
    found = [answer for answer in answers if isinstance(answer, Finding)]
    assert {(finding.code, finding.severity) for finding in found} == {(code, ROWS[code].severity)}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1025, "1025 B"), (3 * MIB, "3 MiB"), (5 << 30, "5 GiB")],
)
def test_limit_text_uses_the_largest_whole_unit(size: int, text: str) -> None:
    answer = detect_hugepage_limit_hit(hugepage_hits(1, limit=size))
    assert isinstance(answer, Finding)
    assert answer.evidence == f"2mi pages hit the limit (limit {text})"


def test_growing_counters_do_not_wake_each_time() -> None:
    found = {wake.field: wake for wake in sampler_wakes(10, 60)}
    for field, threshold in [
        (SamplerField.GROUP_CPU_THROTTLED, 5),
        (SamplerField.GROUP_MEM_MAX, 10),
        (SamplerField.GROUP_MEM_HIGH, 10),
        (SamplerField.GROUP_MEM_FAILCNT, 10),
    ]:
        assert found[field] == WakeCondition(field, threshold, 60 * NS)
    assert SamplerField.GROUP_CPU_PERIODS not in found
    assert found[SamplerField.GROUP_MEM_OOM_KILL] == WakeCondition(SamplerField.GROUP_MEM_OOM_KILL)


# --- which devices a container uses ----------------------------------------------------------------------


def declared_cpus(*cpus: str, exclusive: bool = True) -> tuple[DeclaredFile, ...]:
    """Return CPU devices of one driver, ``cpuset-0`` and on."""
    devices = [
        DriverDevice(
            "driver", "node-a", f"cpuset-{n}", DeclaredCpuDevice(parse_cpus(text), 0, exclusive, False), 0
        )
        for n, text in enumerate(cpus)
    ]
    return (DeclaredFile("driver", tuple(devices)),)


@pytest.mark.parametrize(
    ("cpus", "devices"),
    [
        ("2-3", ["cpuset-0"]),
        ("3", ["cpuset-0"]),
        ("2-7", ["cpuset-0", "cpuset-1"]),
        ("1-3", []),
        ("0-1", []),
        ("2-3,8", []),
        ("", []),
        (EIO, []),
        (ABSENT, []),
    ],
)
def test_container_uses_exclusive_cpus_if_it_has_no_others(cpus: Any, devices: list[str]) -> None:
    node = PaperNode()
    node.next()
    snapshot = replace(node.snapshot(), declared=declared_cpus("2-3", "4-7"))
    group = CONTAINER._replace(cpus=parse_cpus(cpus) if isinstance(cpus, str) else cpus)
    assert exclusive_devices_of_cgroup(group, exclusive_cpu_devices(snapshot)) == tuple(
        f"driver/node-a/{name}" for name in devices
    )


def test_shared_cpus_are_not_exclusive() -> None:
    node = PaperNode()
    node.next()
    snapshot = replace(node.snapshot(), declared=declared_cpus("2-3", exclusive=False))
    assert (
        exclusive_devices_of_cgroup(
            CONTAINER._replace(cpus=parse_cpus("2-3")), exclusive_cpu_devices(snapshot)
        )
        == ()
    )


# --- sequences of reports --------------------------------------------------------------------------------


class Pods(PaperNode):
    """Pod with one container, read every ten seconds."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        super().__init__(settings, period_ns=10 * NS)
        self.pod, self.container = POD, CONTAINER
        self.there = True
        self.dropped = 0
        self.declares: tuple[DeclaredFile, ...] = ()

    def snapshot(self) -> Snapshot:
        self.groups = [self.pod, self.container] if self.there else []
        read = super().snapshot()
        core = replace(read.core, groups_dropped=self.dropped)
        return replace(read, core=core, declared=self.declares)

    def prepare(self, *devices: str, pod: str = POD.pod_uid) -> None:
        """Set the devices of ``driver`` that are prepared for a pod."""
        self.pods = pods_sample({pod: tuple(DeviceRef("driver", "node-a", name) for name in devices)})

    def notes_after(self, **members: Any) -> list[NonDeviceCause]:
        """Set the container's counters; return the notes."""
        self.container = self.container._replace(**members)
        return list(self.next().notes)

    def codes_after(self, periods: int, throttled: int, passes: int = 1) -> list[str]:
        """Add periods in each pass; return the codes of the notes at the end."""
        notes: list[NonDeviceCause] = []
        for _ in range(passes):
            group = self.container
            assert isinstance(group.cpu_periods, int)
            assert isinstance(group.cpu_throttled, int)
            notes = self.notes_after(
                cpu_periods=group.cpu_periods + periods, cpu_throttled=group.cpu_throttled + throttled
            )
        return codes_of(notes)


def codes_of(notes: list[NonDeviceCause]) -> list[str]:
    return [note.cause.code for note in notes]


def pod_with_counters(**members: Any) -> Pods:
    """Return a pod with these counters from the start."""
    node = Pods()
    assert node.notes_after(**members) == []
    return node


def test_oom_kill_is_reported_for_ten_minutes_with_pod_and_limit() -> None:
    node = pod_with_counters(mem_limit=32 * MIB)
    (note,) = node.notes_after(mem_oom_kill=1)
    assert (note.subject, note.cause.code) == ("pod pod-a container container-a", KILL)
    assert note.cause.evidence.endswith("(limit 32 MiB)")
    node.wait(580)
    assert codes_of(list(node.next().notes)) == [KILL]
    node.wait(10)
    assert node.next(CLEAN_PASSES).notes == ()


@pytest.mark.parametrize(
    "member", ["mem_oom_kill", "mem_oom", "mem_max", "mem_failcnt", "mem_high", "cpu_throttled"]
)
def test_counts_from_before_the_start_are_ignored(member: str) -> None:
    node = pod_with_counters(cpu_periods=10**6, **{member: 10**6})
    assert node.next(3).notes == ()
    assert not node.state.host.groups.active


def test_new_container_counts_from_zero() -> None:
    node = Pods()
    node.there = False
    node.next()
    node.there = True
    assert codes_of(node.notes_after(mem_oom_kill=1, mem_max=10, cpu_periods=30, cpu_throttled=30)) == [
        THROTTLED,
        AT_MAX,
        KILL,
    ]


def test_container_that_had_no_room_in_the_table_has_no_old_events() -> None:
    node = Pods()
    node.there, node.dropped = False, 2
    node.next()
    node.there, node.dropped = True, 0
    counts = {"mem_oom_kill": 5, "mem_max": 10, "cpu_periods": 30, "cpu_throttled": 30}
    assert node.notes_after(**counts) == []
    assert codes_of(node.notes_after(mem_oom_kill=6)) == [KILL]


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"mem_oom": 1}, [OOM]),
        ({"mem_oom_kill": 1}, [KILL]),
        ({"mem_oom": 1, "mem_oom_kill": 1}, [KILL]),
        ({"hugetlb": (hugetlb_sample(1),)}, [HIT]),
        ({"hugetlb": (v1(hugetlb_sample())._replace(rsvd_failed=1),)}, [HIT]),
    ],
)
def test_single_event_of_a_known_container_is_reported(change: dict[str, Any], codes: list[str]) -> None:
    node = pod_with_counters(hugetlb=(v1(hugetlb_sample()),))
    assert codes_of(node.notes_after(**change)) == codes


def test_kill_counted_at_the_pod_alone_is_reported_for_the_pod() -> None:
    node = pod_with_counters()
    node.pod = POD._replace(mem_oom_kill=1)
    (note,) = node.next().notes
    assert (note.subject, note.cause.code) == ("pod pod-a", KILL)
    node.notes_after(mem_oom_kill=1)
    assert [note.subject for note in node.next(CLEAN_PASSES).notes] == ["pod pod-a container container-a"]


def test_kill_is_reported_after_its_pod_is_gone() -> None:
    node = pod_with_counters(mem_limit=NO_LIMIT)
    node.pod = POD._replace(mem_limit=64 * MIB)
    notes = node.notes_after(mem_oom_kill=1)
    node.there = False
    assert list(node.next(50).notes) == notes
    assert node.next(20).notes == ()
    assert not node.state.host.groups.active
    assert not [subject for subject, _ in node.state.conditions if subject.startswith("group:")]


def test_restart_loop_keeps_a_bounded_number_of_groups() -> None:
    node = PaperNode()
    node.next()
    many = MAX_REMOVED_CGROUPS + 50
    for first in range(0, many, 100):
        node.groups = [killed_container(ident) for ident in range(first, min(first + 100, many))]
        node.next()
    node.groups = []
    node.next()
    kept = node.state.host.groups.active
    assert len(kept) == MAX_REMOVED_CGROUPS
    assert min(kept) == 50, "the newest are kept"


def killed_container(ident: int) -> CgroupSample:
    """Return a container with one OOM kill."""
    return group_sample(ident + 1, container=f"c{ident + 1}")._replace(id=ident, mem_oom_kill=1)


@pytest.mark.parametrize("member", ["mem_oom_kill", "mem_max", "cpu_throttled"])
def test_fallen_counter_is_no_event_and_counts_on(member: str) -> None:
    node = pod_with_counters(cpu_periods=1000, **{member: 1000})
    assert node.notes_after(**{member: 3}) == []
    assert node.notes_after(**{member: 3}) == []
    more = {member: 40, "cpu_periods": 1050}
    assert len(node.notes_after(**more)) == 1


def test_reset_does_not_undo_a_kill() -> None:
    node = pod_with_counters(mem_oom_kill=1)
    node.notes_after(mem_oom_kill=2)
    assert codes_of(node.notes_after(mem_oom_kill=0)) == [KILL]
    assert codes_of(node.notes_after(mem_oom_kill=0)) == [KILL]


@pytest.mark.parametrize("member", ["mem_oom_kill", "mem_max", "mem_high"])
def test_briefly_unreadable_counter_keeps_its_value(member: str) -> None:
    node = pod_with_counters(**{member: 50})
    assert node.notes_after(**{member: EIO}) == []
    assert node.notes_after(**{member: 50}) == []
    assert len(node.notes_after(**{member: 70})) == 1


def test_ended_rate_is_kept_until_its_condition_clears() -> None:
    node = pod_with_counters(mem_max=0)
    code = "cgroup.memory.max"
    assert codes_of(node.notes_after(mem_max=50)) == [code]
    assert codes_of(list(node.next(60 // 10).notes)) == [code], "one clean pass is never enough"
    assert node.next(CLEAN_PASSES).notes == ()


def test_counter_that_appears_later_starts_at_zero() -> None:
    node = pod_with_counters(mem_oom_kill=ABSENT)
    assert codes_of(node.notes_after(mem_oom_kill=1)) == [KILL]


def test_kill_during_unreadable_time_is_found_later() -> None:
    node = pod_with_counters(mem_oom_kill=0)
    node.notes_after(mem_oom_kill=EIO)
    assert node.next(100).notes == ()
    assert codes_of(node.notes_after(mem_oom_kill=1)) == [KILL]


def test_cgroup_v1_failures_count_like_v2_events() -> None:
    assert codes_of(pod_with_counters(mem_max=ABSENT).notes_after(mem_failcnt=10)) == [AT_MAX]
    assert codes_of(pod_with_counters(mem_failcnt=ABSENT).notes_after(mem_max=10)) == [AT_MAX]
    assert codes_of(pod_with_counters(mem_failcnt=ABSENT).notes_after(mem_high=10)) == [AT_HIGH]


def test_slow_limit_hits_are_no_rate() -> None:
    node = pod_with_counters()
    for count in range(1, 100):
        assert node.notes_after(mem_max=count, mem_high=count) == []


def test_rate_is_reported_until_its_window_ends() -> None:
    node = pod_with_counters()
    assert codes_of(node.notes_after(mem_max=10)) == [AT_MAX]
    assert codes_of(list(node.next(5).notes)) == [AT_MAX]
    assert node.next(4).notes == ()
    assert node.next(2).notes == ()
    assert not node.state.host.groups.active


@pytest.mark.parametrize("passes", [5, 6, 7, 20])
def test_events_after_a_pause_count_in_full(passes: int) -> None:
    """The counter was flat until the last evaluation, so the events are within the window."""
    node = pod_with_counters()
    node.notes_after(mem_max=10)
    node.next(passes)
    node.notes_after(mem_max=60)
    (view,) = cgroup_rule_inputs(node.state.host.groups, node.snapshot(), node.state.settings, node.now)
    assert view.at_max == 50


def test_throttled_share_needs_twenty_periods() -> None:
    node = pod_with_counters()
    assert node.codes_after(19, 19) == []
    assert node.codes_after(1, 0) == [THROTTLED]
    assert node.codes_after(100, 0, 6 + CLEAN_PASSES) == []
    assert node.codes_after(100, 25, 12) == []
    assert node.codes_after(100, 40, 12) == [THROTTLED]


def test_throttled_share_covers_the_window_only() -> None:
    node = pod_with_counters(cpu_periods=10**9)
    assert node.codes_after(100, 50, 7) == [THROTTLED]
    node = pod_with_counters(cpu_periods=10**9, cpu_throttled=10**9)
    assert node.codes_after(100, 1, 12) == []


def test_pod_throttling_is_reported_unless_in_a_container() -> None:
    node = pod_with_counters()
    node.pod = POD._replace(cpu_periods=100, cpu_throttled=90)
    assert [note.subject for note in node.next().notes] == ["pod pod-a"]
    node.notes_after(cpu_periods=100, cpu_throttled=30)
    assert [note.subject for note in node.next(CLEAN_PASSES).notes] == ["pod pod-a container container-a"]


def test_exclusive_throttling_needs_two_evaluations() -> None:
    node = Pods()
    node.declares = declared_cpus("0-1")
    node.prepare("cpuset-0")
    node.notes_after(cpus=0b11)
    assert node.codes_after(100, 1) == [], "the kubelet takes the quota off right after the start"
    assert node.codes_after(100, 0, 3) == []
    assert node.codes_after(100, 1) == [EXCLUSIVE]
    (note,) = node.next().notes
    assert note.cause.severity is Severity.DEGRADED
    assert note.devices == ("driver/node-a/cpuset-0",)
    assert node.codes_after(100, 0, 7 + CLEAN_PASSES) == []
    assert node.codes_after(100, 1) == []


@pytest.mark.parametrize(
    ("prepared", "pod"),
    [((), POD.pod_uid), (("cpuset-0",), POD.pod_uid), (("cpuset-0", "cpuset-1"), "pod-b")],
)
def test_cpus_of_devices_prepared_for_others_are_not_exclusive(prepared: Iterable[str], pod: str) -> None:
    node = Pods()
    node.declares = declared_cpus("0-1", "2-3")
    node.prepare(*prepared, pod=pod)
    node.notes_after(cpus=0b1111)
    assert node.codes_after(100, 1, 4) == []


def test_exclusive_throttling_follows_a_change_of_pods() -> None:
    node = Pods()
    node.declares = declared_cpus("0-1")
    node.notes_after(cpus=0b11)
    assert node.codes_after(100, 30, 4) == [THROTTLED], "pods are unknown"
    node.prepare("cpuset-0")
    assert codes_of(list(node.next().notes)) == [EXCLUSIVE, THROTTLED]
    assert node.pods is not None
    stalled = node.pods.source._replace(state=SourceState.STALLED)
    node.pods = replace(node.pods, source=stalled)
    node.next(CLEAN_PASSES)
    assert EXCLUSIVE not in node.codes_after(100, 30, CLEAN_PASSES)


def test_occasional_throttling_of_shared_cpus_is_no_finding() -> None:
    node = pod_with_counters(cpus=0b11)
    assert node.codes_after(100, 1, 7) == []


def test_frozen_container_is_reported_after_five_minutes() -> None:
    node = pod_with_counters()
    assert node.notes_after(frozen=1) == []
    assert node.state.due_ns is not None, "nothing wakes the core when the time is over"
    assert node.next(FROZEN_S // 10 - 1).notes == ()
    assert codes_of(list(node.next().notes)) == [FROZEN]
    assert codes_of(node.notes_after(frozen=EIO)) == [FROZEN], "unreadable is not thawed"
    assert codes_of(node.notes_after(frozen=0)) == [FROZEN], "one clean pass is never enough"
    assert node.next(CLEAN_PASSES).notes == ()
    assert not node.state.host.groups.active


def test_unreadable_freezer_state_does_not_thaw() -> None:
    node = pod_with_counters(frozen=1)
    node.next(FROZEN_S // 10)
    node.notes_after(frozen=EIO)
    assert codes_of(list(node.next(12).notes)) == [FROZEN]
    assert codes_of(node.notes_after(frozen=0)) == [FROZEN], "one clean pass is never enough"


def test_container_frozen_at_start_is_reported() -> None:
    node = pod_with_counters(frozen=1)
    assert codes_of(list(node.next(FROZEN_S // 10).notes)) == [FROZEN]


def test_briefly_frozen_container_is_not_reported() -> None:
    node = pod_with_counters()
    for _ in range(20):
        assert node.notes_after(frozen=1) == []
        assert node.notes_after(frozen=0) == []


def test_removed_frozen_group_is_dropped() -> None:
    node = pod_with_counters(frozen=1)
    node.next(FROZEN_S // 10)
    node.there = False
    assert node.next(2).notes == ()
    assert not node.state.host.groups.active


def test_unchanged_group_sample_is_not_evaluated_again() -> None:
    node = pod_with_counters(mem_oom_kill=7, cpu_throttled=7)
    by_id = node.state.host.groups.by_id
    node.next(3)
    assert node.state.host.groups.by_id is by_id
    node.notes_after(cpu_periods=8)
    assert node.state.host.groups.by_id is not by_id
    assert not node.state.host.groups.active, "no recent events"
