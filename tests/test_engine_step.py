"""step() on a simulated node: the report after each kind of event."""

import copy
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper import (
    ABSENT,
    EIO,
    ENODEV,
    MIB,
    NO_LIMIT,
    SOURCES,
    PaperNode,
    codes,
    cpus_sample,
    device_of,
    group_sample,
    hugetlb_sample,
    node_sample,
    pool_sample,
    without_times,
)

from agent.engine.step import EngineState, initial_state, step
from agent.health.host.cpu.rules import CPU_RULES
from agent.health.host.hugepages import POOL_RULES
from agent.health.host.verdicts import ALL_HOST_RULES
from agent.health.rules import CLEAN_PASSES, STALLED
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.health import Blame, Health, Severity
from agent.model.persistent_faults import PersistentState
from agent.model.reading import Missing, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.serve.health.service import EXTRA_LEASE_S
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults

CPU: Final = "cpu-node0"
POOL: Final = "hugepages-2mi-node0"
PAGES_KIB: Final = (2048, 1 << 20)
SHRUNK: Final = "mem.hugepages.pool_shrunk"


def node_with_pool(settings: EngineSettings | None = None, *, period_ns: int = NS) -> PaperNode:
    node = PaperNode(settings, period_ns=period_ns)
    node.pool(pool_sample(10))
    return node


def node_with_counters(core: int = 0, **settings: Any) -> PaperNode:
    node = PaperNode(EngineSettings("node-a", **settings))
    node.states = {}
    node.nodes[0] = node_sample(core=core, package=0)
    return node


def health(report: Report, name: str = POOL) -> Health:
    return device_of(report, name).health


# --- the report -----------------------------------------------------------------------------------------


def test_node_without_faults_is_healthy_with_empty_messages() -> None:
    report = node_with_pool().next()
    assert (report.node, report.notes) == ("node-a", ())
    assert [
        (d.pool, d.device, d.kind, d.health, d.severity, d.message, d.causes) for d in report.devices
    ] == [
        ("node-a", CPU, "cpu", Health.HEALTHY, Severity.OK, "", ()),
        ("node-a", POOL, "hugepages", Health.HEALTHY, Severity.OK, "", ()),
    ]


def test_absent_hardware_is_reported_as_not_applicable() -> None:
    report = node_with_pool().next()
    assert [(row.device, row.code, row.reason) for row in report.not_applicable] == [
        (CPU, "cpu.throttled.core", "the CPUs have no thermal_throttle counters"),
        (CPU, "cpu.throttled.package", "the CPUs have no thermal_throttle counters"),
    ]
    assert report.not_evaluated == ()


def test_every_rule_names_a_source_of_the_engine() -> None:
    of_machine = {"edac", "memory", "cores", "pressure"}
    assert {rule.source for rule in ALL_HOST_RULES} == {*SOURCES, *of_machine, "kmsg", "nic", "pci"}


def test_verified_is_the_last_pass_of_the_slowest_source() -> None:
    node = node_with_pool()
    node.next()
    node.wait(1.5)
    device = device_of(node.evaluate(), POOL)
    assert node.now_ns - device.verified.mono_ns == 1.5 * NS
    assert node.wall_s - device.verified.wall_s == pytest.approx(1.5)


def test_verified_is_the_oldest_pass_of_several_sources() -> None:
    node = node_with_counters()
    read = node.next().at
    node.stuck = {"throttle"}
    assert device_of(node.next(2), CPU).verified == read


def test_lease_is_longer_than_three_passes() -> None:
    assert device_of(node_with_pool().next(), POOL).timeout_s == 30
    assert device_of(node_with_pool(period_ns=20 * NS).next(), POOL).timeout_s == 60
    assert device_of(node_with_pool(period_ns=10 * NS + 1).next(), POOL).timeout_s == 31


def test_since_is_the_last_change_of_the_verdict() -> None:
    node = node_with_pool()
    first = node.next().at
    node.next(5)
    assert device_of(node.evaluate(), POOL).since == first
    node.pool(pool_sample(9))
    changed = node.next().at
    node.next(5)
    assert device_of(node.evaluate(), POOL).since == changed
    assert device_of(node.evaluate(), CPU).since == first


# --- hugepages ------------------------------------------------------------------------------------------


def test_shrunk_pool_is_unhealthy_at_once_with_evidence_and_advice() -> None:
    node = node_with_pool()
    node.next()
    node.pool(pool_sample(9))
    device = device_of(node.next(), POOL)
    assert (device.health, device.severity, codes(device)) == (Health.UNHEALTHY, Severity.UNHEALTHY, [SHRUNK])
    assert device.causes[0].blame is Blame.CONFIGURATION
    assert device.message == f"{SHRUNK}: 9 pages of 2mi, 10 at start. Advice: {device.causes[0].advice}"


def test_pool_recovers_after_three_clean_passes() -> None:
    node = node_with_pool()
    node.next()
    node.pool(pool_sample(9))
    node.next()
    node.pool(pool_sample(10))
    assert [health(node.next()) for _ in range(CLEAN_PASSES)] == [
        Health.UNHEALTHY,
        Health.UNHEALTHY,
        Health.HEALTHY,
    ]
    assert device_of(node.evaluate(), POOL).message == ""


def test_evaluations_between_passes_do_not_clear_sooner() -> None:
    node = node_with_pool()
    node.next()
    node.pool(pool_sample(9))
    node.next()
    node.pool(pool_sample(10))
    node.next()
    for _ in range(10):
        node.wait(0.01)
        assert health(node.evaluate()) is Health.UNHEALTHY


def test_clearing_condition_schedules_an_evaluation() -> None:
    node = node_with_pool()
    node.next()
    assert node.state.due_ns is None
    node.pool(pool_sample(9))
    node.next()
    assert node.state.due_ns is None
    node.pool(pool_sample(10))
    node.next()
    assert node.state.due_ns is not None
    assert 2 * NS < node.state.due_ns - node.now_ns < 2.5 * NS


def test_surplus_pages_do_not_count_for_the_pool() -> None:
    node = PaperNode()
    node.pool(pool_sample(12, surplus=2))
    node.next()
    node.pool(pool_sample(10, surplus=0))
    assert health(node.next()) is Health.HEALTHY
    node.pool(pool_sample(11, surplus=2))
    assert health(node.next()) is Health.UNHEALTHY


def test_grown_pool_is_compared_with_its_size_at_start() -> None:
    node = node_with_pool()
    node.next()
    node.pool(pool_sample(20))
    node.next()
    node.pool(pool_sample(10))
    assert health(node.next()) is Health.HEALTHY


def test_configured_pool_is_compared_from_the_first_evaluation() -> None:
    node = node_with_pool(EngineSettings("node-a", expect_pools={POOL: 12, "hugepages-1gi-node0": 1}))
    report = node.next()
    assert "10 pages of 2mi, 12 configured" in device_of(report, POOL).message
    assert "no pool of 1gi pages, 1 configured" in device_of(report, "hugepages-1gi-node0").message
    node.pool(pool_sample(12))
    node.pool(pool_sample(1, size_kib=1 << 20))
    assert {health(node.next(CLEAN_PASSES), name) for name in (POOL, "hugepages-1gi-node0")} == {
        Health.HEALTHY
    }


def test_pool_unreadable_from_the_start_is_unknown() -> None:
    node = PaperNode()
    node.pool(pool_sample(ABSENT, ABSENT))
    assert health(node.next()) is Health.UNKNOWN
    node.pool(pool_sample(10))
    assert health(node.next(CLEAN_PASSES)) is Health.HEALTHY
    node.pool(pool_sample(9))
    assert health(node.next()) is Health.UNHEALTHY


def test_expected_pool_without_hugepages_has_a_verifying_source() -> None:
    node = PaperNode(EngineSettings("node-a", expect_pools={POOL: 1}))
    node.states["hugepages"] = SourceState.ABSENT
    read = node.next().at
    node.wait(60)
    assert device_of(node.evaluate(), POOL).verified.mono_ns == read.mono_ns


# --- CPUs -----------------------------------------------------------------------------------------------


def test_offline_cpu_is_named_until_it_returns() -> None:
    node = PaperNode()
    node.next()
    node.set_online("0")
    device = device_of(node.next(), CPU)
    assert device.health is Health.UNHEALTHY
    assert device.message.startswith("cpu.offline: CPU 1 offline, online at start: 0-1. Advice: ")
    node.set_online("0-1")
    assert health(node.next(CLEAN_PASSES), CPU) is Health.HEALTHY


def test_cpu_offline_at_start_is_no_finding() -> None:
    node = PaperNode()
    node.set_online("0")
    assert health(node.next(), CPU) is Health.HEALTHY


def test_configured_cpu_without_node_is_expected_on_the_first_node() -> None:
    node = PaperNode(EngineSettings("node-a", expect_cpus=0b1001))
    node.nodes = {0: node_sample(0, 0b0011), 1: node_sample(1, 0b0100)}
    node.cpus = cpus_sample(0b0101)
    report = node.next()
    assert "CPU 3 offline, configured: 0,3" in device_of(report, CPU).message
    assert health(report, "cpu-node1") is Health.HEALTHY


def test_configured_cpu_keeps_its_node_while_nodes_are_unreadable() -> None:
    node = PaperNode(EngineSettings("node-a", expect_cpus=0b111))
    node.cpus = cpus_sample(0b111)
    node.nodes[1] = node_sample(1, 0b100)
    node.next()
    node.nodes[1] = node_sample(1, EIO)
    node.cpus = cpus_sample(0b011)
    report = node.next()
    assert health(report, CPU) is Health.HEALTHY
    assert health(report, "cpu-node1") is Health.UNKNOWN


def test_offline_cpu_affects_only_its_numa_node() -> None:
    node = PaperNode()
    node.nodes = {0: node_sample(0, 0b01), 1: node_sample(1, 0b10)}
    node.next()
    node.set_online("0")
    report = node.next()
    assert health(report, CPU) is Health.HEALTHY
    assert health(report, "cpu-node1") is Health.UNHEALTHY


def test_numa_node_with_unreadable_cpulist_is_unknown() -> None:
    node = PaperNode()
    node.nodes[0] = node_sample(cpus=ABSENT)
    assert health(node.next(), CPU) is Health.UNKNOWN
    node.nodes[0] = node_sample()
    assert health(node.next(CLEAN_PASSES), CPU) is Health.HEALTHY
    node.set_online("0")
    assert health(node.next(), CPU) is Health.UNHEALTHY


# --- thermal throttling ---------------------------------------------------------------------------------


def test_throttling_at_threshold_is_degraded_and_reported_healthy() -> None:
    node = node_with_counters()
    node.next(61)
    node.nodes[0] = node_sample(core=9, package=0)
    assert device_of(node.next(), CPU).severity is Severity.OK
    node.nodes[0] = node_sample(core=10, package=0)
    device = device_of(node.next(), CPU)
    assert (device.health, device.severity) == (Health.HEALTHY, Severity.DEGRADED)
    assert device.message.startswith("cpu.throttled.core: at least 10 core thermal-throttle events in 60 s")
    assert device.causes[0].blame is Blame.HARDWARE


def test_rate_rules_schedule_evaluations_within_half_a_window() -> None:
    node = node_with_counters(throttle_window_s=30)
    node.next()
    assert node.state.due_ns == node.now_ns + 15 * NS


def test_events_before_the_start_are_no_rate() -> None:
    node = node_with_counters(core=5_000_000)
    assert device_of(node.next(120), CPU).severity is Severity.OK


def test_events_leave_the_sliding_window() -> None:
    node = node_with_counters()
    node.next(61)
    node.nodes[0] = node_sample(core=10, package=0)
    assert device_of(node.next(), CPU).severity is Severity.DEGRADED
    seconds = 0
    while device_of(node.next(), CPU).severity is Severity.DEGRADED:
        seconds += 1
        assert seconds < 75
    # the window is kept to 5 s, and clearing takes three clean passes
    assert seconds >= 55


def test_slow_events_never_reach_the_limit() -> None:
    node = node_with_counters()
    for second in range(600):
        node.nodes[0] = node_sample(core=second // 7, package=0)
        assert device_of(node.next(), CPU).severity is Severity.OK


@pytest.mark.parametrize("gap_s", [1, 9.9])
def test_burst_across_two_windows_is_found(gap_s: float) -> None:
    node = node_with_counters()
    node.next(57)
    node.nodes[0] = node_sample(core=5, package=0)
    node.next()
    node.wait(gap_s)
    node.nodes[0] = node_sample(core=10, package=0)
    assert device_of(node.next(), CPU).severity is Severity.DEGRADED


def test_heartbeat_evaluations_suffice_for_a_window() -> None:
    node = node_with_counters()
    for _ in range(12):
        node.wait(9)
        report = node.next()
    assert report.not_evaluated == ()


def test_window_is_thinned_to_its_steps() -> None:
    node = node_with_counters()
    for count in range(300):
        node.nodes[0] = node_sample(core=count, package=0)
        node.next()
    assert 12 < len(node.state.host.cpus.node_throttle[0].core.window) < 15


def test_rate_in_a_short_window_is_raised_but_not_cleared() -> None:
    node = node_with_counters()
    report = node.next()
    reason = "needs 1 min of history"
    assert {(row.code, row.reason) for row in report.not_evaluated} == {
        ("cpu.throttled.core", reason),
        ("cpu.throttled.package", reason),
    }
    node.nodes[0] = node_sample(core=0, package=10)
    report = node.next()
    assert codes(device_of(report, CPU)) == ["cpu.throttled.package"]
    assert [row.code for row in report.not_evaluated] == ["cpu.throttled.core"]


def test_limits_follow_the_configuration() -> None:
    node = node_with_counters(throttle_events=3, throttle_window_s=5)
    node.next(6)
    node.nodes[0] = node_sample(core=3, package=0)
    assert "at least 3 core thermal-throttle events in 5 s" in device_of(node.next(), CPU).message


def test_counters_that_vanish_and_return_do_not_clear_a_cause() -> None:
    node = node_with_counters()
    node.next(61)
    node.nodes[0] = node_sample(core=10, package=0)
    node.next()
    node.nodes[0] = node_sample(core=EIO, package=0)
    assert device_of(node.next(10), CPU).health is Health.UNKNOWN
    node.nodes[0] = node_sample(core=10, package=0)
    device = device_of(node.next(CLEAN_PASSES + 1), CPU)
    assert codes(device) == ["cpu.throttled.core"], "the window is too short to clear it"
    assert device_of(node.next(65), CPU).severity is Severity.OK


# --- hugetlb limits -------------------------------------------------------------------------------------


def hits(node: PaperNode, *counts: Any, ident: int = 2, of_pod: bool = False) -> None:
    """Set the hits of a container by page size; the limit is its own or its pod's."""
    own, pods = (NO_LIMIT, 8 * MIB) if of_pod else (8 * MIB, NO_LIMIT)
    pod = [hugetlb_sample(0, size_kib=kib, limit=pods) for _, kib in zip(counts, PAGES_KIB, strict=False)]
    container = [
        hugetlb_sample(n, size_kib=kib, limit=own) for n, kib in zip(counts, PAGES_KIB, strict=False)
    ]
    node.groups = [group_sample(1, *pod, container=""), group_sample(ident, *container)]


def test_hugetlb_hit_is_a_note_on_the_container_only() -> None:
    node = node_with_pool()
    hits(node, 0, 0)
    assert node.next().notes == ()
    hits(node, 1, 0)
    report = node.next()
    (note,) = report.notes
    assert note.subject == "pod pod-a container container-a"
    assert (note.cause.code, note.cause.severity) == ("cgroup.hugetlb.max_hit", Severity.INFO)
    assert note.cause.evidence == "2mi pages hit the limit (limit 8 MiB)"
    assert note.cause.blame is Blame.WORKLOAD
    assert all((d.severity, d.message) == (Severity.OK, "") for d in report.devices)
    assert report.groups == 2


def test_hugetlb_hit_may_be_of_the_pods_limit() -> None:
    node = PaperNode()
    node.next()
    hits(node, 1, of_pod=True)
    (note,) = node.next().notes
    assert note.cause.evidence == "2mi pages hit the limit (limit 8 MiB)"


def test_further_hits_do_not_change_the_note() -> None:
    node = PaperNode()
    hits(node, 0)
    node.next()
    hits(node, 1)
    first = node.next().notes
    hits(node, 4000)
    assert node.next().notes == first


def test_hits_before_the_start_are_ignored() -> None:
    node = PaperNode()
    hits(node, 7)
    assert node.next().notes == ()
    hits(node, 8)
    assert len(node.next().notes) == 1


def test_hit_of_one_size_does_not_renew_another_size() -> None:
    node = PaperNode()
    hits(node, 7, 0)
    node.next()
    hits(node, 7, 1)
    (note,) = node.next().notes
    assert note.cause.evidence == "1gi pages hit the limit (limit 8 MiB)"


def test_container_created_later_counts_all_its_hits() -> None:
    node = PaperNode()
    node.next()
    hits(node, 1)
    assert len(node.next().notes) == 1


def test_hit_is_reported_for_ten_minutes_after_the_last() -> None:
    node = PaperNode()
    hits(node, 0)
    node.next()
    hits(node, 1)
    node.next()
    node.wait(500)
    hits(node, 2)
    node.next()
    node.wait(597)
    assert len(node.next().notes) == 1
    node.wait(2)
    assert node.next(CLEAN_PASSES).notes == ()
    hits(node, 3)
    assert len(node.next().notes) == 1


def test_briefly_unreadable_count_is_no_new_hit() -> None:
    node = PaperNode()
    hits(node, 7)
    node.next()
    hits(node, EIO)
    node.next()
    hits(node, 7)
    assert node.next().notes == ()
    hits(node, 8)
    assert len(node.next().notes) == 1


def test_removed_container_is_reported_for_ten_minutes() -> None:
    node = PaperNode()
    hits(node, 0)
    node.next()
    hits(node, 3)
    notes = node.next().notes
    node.groups = []
    assert node.next().notes == notes
    assert node.next(590).notes == notes
    assert node.next(20).notes == ()
    assert not node.state.host.groups.active
    assert not [subject for subject, _ in node.state.conditions if subject.startswith("group:")]


def test_restarted_container_is_a_new_subject() -> None:
    node = PaperNode()
    hits(node, 5)
    node.next()
    hits(node, 1, ident=3)
    assert len(node.next().notes) == 1


def test_only_the_active_one_of_1000_groups_is_reported() -> None:
    node = node_with_pool()
    before = node.next()
    node.groups = [group_sample(i, hugetlb_sample(0), container=f"c{i}") for i in range(1, 1001)]
    report = node.next()
    assert (report.groups, report.notes) == (1000, ())
    assert [d.health for d in report.devices] == [d.health for d in before.devices]
    node.groups[499] = group_sample(500, hugetlb_sample(2), container="c500")
    assert [note.subject for note in node.next().notes] == ["pod pod-a container c500"]


# --- sources that fail, stall and return ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "broken"),
    [
        (CPU, "cpu.offline.unreadable", lambda node: setattr(node, "cpus", cpus_sample(EIO))),
        (POOL, f"{SHRUNK}.unreadable", lambda node: node.pool(pool_sample(EIO))),
        (POOL, f"{SHRUNK}.unreadable", lambda node: node.pool(pool_sample(10, surplus=EIO))),
    ],
)
def test_unreadable_source_is_unknown_with_reason_until_it_returns(name: str, code: str, broken: Any) -> None:
    node = node_with_pool()
    fine = copy.copy(node)
    fine.pools = dict(node.pools)
    node.next()
    broken(node)
    device = device_of(node.next(), name)
    assert (device.health, device.severity, codes(device)) == (Health.UNKNOWN, Severity.UNKNOWN, [code])
    assert "Input/output error" in device.message
    assert device.causes[0].blame is Blame.AGENT
    node.cpus, node.pools = fine.cpus, fine.pools
    assert [health(node.next(), name) for _ in range(3)] == [Health.UNKNOWN, Health.UNKNOWN, Health.HEALTHY]


def test_unreadable_counter_is_unknown_absent_one_not_applicable() -> None:
    node = node_with_counters()
    node.nodes[0] = node_sample(core=0, package=ABSENT)
    node.next(61)
    node.nodes[0] = node_sample(core=ENODEV, package=ABSENT)
    report = node.next()
    assert codes(device_of(report, CPU)) == ["cpu.throttled.core.unreadable"]
    assert [row.code for row in report.not_applicable] == ["cpu.throttled.package"]


def test_unreadable_reading_does_not_clear_a_fault() -> None:
    node = node_with_pool()
    node.next()
    node.pool(pool_sample(9))
    node.next()
    node.pool(pool_sample(EIO))
    device = device_of(node.next(20), POOL)
    assert (device.health, codes(device)) == (Health.UNHEALTHY, [SHRUNK, f"{SHRUNK}.unreadable"])
    node.pool(pool_sample(10))
    assert health(node.next(CLEAN_PASSES)) is Health.HEALTHY


def test_stalled_source_makes_only_its_devices_unknown() -> None:
    node = node_with_pool()
    node.next()
    node.stuck = {"hugepages"}
    node.next(3)
    report = node.evaluate()
    assert health(report) is Health.HEALTHY, "three periods are not yet too long"
    report = node.next()
    device = device_of(report, POOL)
    assert (device.health, device.severity, codes(device)) == (Health.UNKNOWN, Severity.UNKNOWN, [STALLED])
    assert device.message.startswith("source.stalled: hugepages: no pass for more than 3 s. Advice: ")
    assert health(report, CPU) is Health.HEALTHY
    assert {source.name: source.state for source in report.sources}["hugepages"] is SourceState.STALLED


def test_fast_source_stalls_after_two_seconds() -> None:
    node = node_with_pool(period_ns=NS // 100)
    node.next()
    node.wait(1.9)
    assert health(node.evaluate()) is Health.HEALTHY
    node.wait(0.2)
    assert "no pass for more than 2 s" in device_of(node.evaluate(), POOL).message


def test_stall_outranks_a_fault_and_keeps_it_listed() -> None:
    node = node_with_pool()
    node.next()
    node.pool(pool_sample(9))
    node.next()
    node.stuck = {"hugepages"}
    device = device_of(node.next(20), POOL)
    assert (device.health, codes(device)) == (Health.UNKNOWN, [STALLED, SHRUNK])
    assert device.message.startswith("source.stalled: ")
    assert SHRUNK in device.message
    node.stuck = set()
    device = device_of(node.next(CLEAN_PASSES), POOL)
    assert (device.health, codes(device)) == (Health.UNHEALTHY, [SHRUNK])


def test_resumed_source_counts_after_three_passes() -> None:
    node = node_with_pool()
    node.next()
    for _ in range(5):
        node.stuck = {"hugepages"}
        assert health(node.next(20)) is Health.UNKNOWN
        node.stuck = set()
        assert health(node.next(CLEAN_PASSES - 1)) is Health.UNKNOWN
    assert health(node.next()) is Health.HEALTHY


def test_stall_since_is_its_detection_with_a_constant_message() -> None:
    node = node_with_pool()
    node.next()
    node.stuck = {"hugepages"}
    first = device_of(node.next(5), POOL)
    later = device_of(node.next(100), POOL)
    assert first.causes == later.causes
    assert (first.message, first.verified.mono_ns) == (later.message, later.verified.mono_ns)


@pytest.mark.parametrize(("period_s", "again_s"), [(0.01, 1), (1, 1), (20, 20)])
def test_stalled_source_schedules_an_evaluation(period_s: float, again_s: float) -> None:
    node = node_with_pool(period_ns=int(period_s * NS))
    node.next()
    node.stuck = {"hugepages"}
    node.wait(100)
    node.next(400)
    assert node.state.due_ns == node.now_ns + again_s * NS
    node.stuck = set()
    assert health(node.next(CLEAN_PASSES)) is Health.HEALTHY
    assert node.state.due_ns is None


def test_absent_source_does_not_stall() -> None:
    node = PaperNode()
    node.next()
    node.stuck = {"throttle"}
    assert health(node.next(60), CPU) is Health.HEALTHY


def test_clearing_condition_without_readings_schedules_nothing() -> None:
    def clearing_node() -> PaperNode:
        node = node_with_pool()
        node.next()
        node.pool(pool_sample(9))
        node.next()
        node.pool(pool_sample(10))
        node.next()
        assert node.state.due_ns is not None
        return node

    unreadable, stalled = clearing_node(), clearing_node()
    unreadable.pool(pool_sample(EIO))
    stalled.stuck = {"hugepages"}
    for node in (unreadable, stalled):
        node.next()
        node.wait(3600)
        assert health(node.next(5)) is not Health.HEALTHY
    assert unreadable.state.due_ns is None
    assert stalled.state.due_ns == stalled.now_ns + NS, "for its return, and for nothing else"
    unreadable.pool(pool_sample(10))
    assert health(unreadable.next(CLEAN_PASSES)) is Health.HEALTHY


def test_fast_passes_clear_only_after_a_second() -> None:
    node = node_with_pool(period_ns=NS // 100)
    node.next()
    for flap in range(100):
        node.pool(pool_sample(9))
        assert health(node.next()) is Health.UNHEALTHY
        node.pool(pool_sample(10))
        assert health(node.next(5)) is Health.UNHEALTHY, f"flap {flap}"
    assert node.state.due_ns is not None
    assert 0.9 * NS < node.state.due_ns - node.now_ns < NS
    assert health(node.next(100)) is Health.HEALTHY


# --- before the end of the first pass -------------------------------------------------------------------

EXPECTING: Final = EngineSettings("node-a", expect_cpus=0b11, expect_pools={POOL: 10})


def states(report: Report) -> set[SourceState]:
    return {source.state for source in report.sources}


def test_before_the_first_pass_no_device_is_healthy() -> None:
    node = node_with_pool(EXPECTING)
    report = node.evaluate()
    assert states(report) == {SourceState.STARTING}
    assert (report.notes, report.not_applicable, report.not_evaluated) == ((), (), ())
    assert [d.device for d in report.devices] == [CPU, POOL]
    assert node.state.due_ns is not None
    assert 3 * NS < node.state.due_ns - node.started_ns < 3.1 * NS


def test_hanging_first_pass_makes_expected_devices_unknown() -> None:
    node = node_with_pool(EXPECTING)
    node.evaluate()
    assert node.state.due_ns is not None
    node.wait((node.state.due_ns - node.now_ns) / NS)
    report = node.evaluate()
    assert states(report) == {SourceState.STALLED}
    assert [(d.device, d.health, set(codes(d))) for d in report.devices] == [
        (CPU, Health.UNKNOWN, {STALLED}),
        (POOL, Health.UNKNOWN, {STALLED}),
    ]
    assert node_with_pool().evaluate().devices == ()


def test_late_first_pass_becomes_the_baseline() -> None:
    node = node_with_pool(replace(EXPECTING, expect_pools={}))
    hits(node, 7)
    node.evaluate()
    node.wait(60)
    node.evaluate()
    node.nodes = {1: node_sample(1, 0b11)}
    report = node.next(CLEAN_PASSES)
    assert [(d.device, d.health) for d in report.devices] == [
        ("cpu-node1", Health.HEALTHY),
        (POOL, Health.HEALTHY),
    ]
    assert report.notes == (), "hits before the first pass are old news"
    node.pool(pool_sample(9))
    assert "9 pages of 2mi, 10 at start" in device_of(node.next(), POOL).message


# --- clocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [-40 * 365 * 86400.0, 40 * 365 * 86400.0])
def test_wall_clock_step_changes_no_verdict(step_s: float) -> None:
    steady, stepped = node_with_counters(), node_with_counters()
    for node in (steady, stepped):
        node.pool(pool_sample(10))
        node.next(30)
        node.pool(pool_sample(9))
        node.next()
    stepped.wall_s += step_s
    for node in (steady, stepped):
        node.pool(pool_sample(10))
    for _ in range(60):
        a, b = steady.next(), stepped.next()
        assert [(d.health, d.severity, d.message, d.timeout_s) for d in a.devices] == [
            (d.health, d.severity, d.message, d.timeout_s) for d in b.devices
        ]
        assert [d.verified.mono_ns for d in a.devices] == [d.verified.mono_ns for d in b.devices]
        assert a.not_evaluated == b.not_evaluated
        assert steady.state.due_ns == stepped.state.due_ns


def test_gap_longer_than_the_lease_toggles_the_lease_salt() -> None:
    node = node_with_pool()
    assert device_of(node.next(), POOL).timeout_s == 30
    node.wait(29)
    assert device_of(node.next(), POOL).timeout_s == 30
    node.wait(31)
    assert device_of(node.next(), POOL).timeout_s == 31
    assert device_of(node.next(), POOL).timeout_s == 31
    node.wait(31)
    assert device_of(node.next(), POOL).timeout_s == 30


def test_two_runs_in_a_row_have_no_lease_in_common() -> None:
    saved, leases = PersistentState(), list[set[int]]()
    for _ in range(4):
        node = node_with_pool()
        node.state = initial_state(EngineSettings("node-a"), saved=saved)
        first = device_of(node.next(), POOL).timeout_s
        node.wait(40)
        salted = device_of(node.next(), POOL).timeout_s
        leases.append({lease + extra for lease in (first, salted) for extra in (0, EXTRA_LEASE_S)})
        saved = decode_gpu_faults(encode_gpu_faults(node.state.checkpoint))
    assert leases[0] == {30, 31, 32, 33}
    assert [leases[i] & leases[i + 1] for i in range(3)] == [set()] * 3
    assert max(map(max, leases)) == 37


# --- random events --------------------------------------------------------------------------------------

readings = st.one_of(st.integers(0, 12), st.sampled_from([ABSENT, EIO, ENODEV]))
events = st.one_of(
    st.tuples(st.just("pool"), readings, readings),
    st.tuples(st.just("online"), st.one_of(st.integers(0, 3), st.just(EIO))),
    st.tuples(st.just("counters"), readings, readings),
    st.tuples(st.just("hits"), readings),
    st.tuples(st.just("stuck"), st.sets(st.sampled_from(["cpus", "throttle", "hugepages", "cgroups"]))),
    st.tuples(st.just("pass")),
    st.tuples(st.just("pass")),
    st.tuples(st.just("evaluate")),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 1, 30, 700])),
    st.tuples(st.just("wall"), st.sampled_from([-1e9, 1e9])),
)
stories = st.lists(events, max_size=30)
History = list[tuple[Snapshot, Instant, Report]]


def evaluate_story(story: list[Any], settings: EngineSettings | None = None) -> tuple[EngineState, History]:
    """Run a story with an evaluation after each event."""
    node = node_with_pool(settings)
    node.states = {}
    first = node.state
    history: History = []
    for what, *how in [("pass",), *story]:
        match what:
            case "pool":
                node.pool(pool_sample(*how))
            case "online":
                node.cpus = cpus_sample(how[0])
            case "counters":
                node.nodes[0] = node_sample(core=how[0], package=how[1])
            case "hits":
                hits(node, how[0])
            case "stuck":
                node.stuck = how[0]
            case "pass":
                node.read()
            case "wait":
                node.wait(how[0])
            case "wall":
                node.wall_s += how[0]
        snapshot = node.snapshot()
        history.append((snapshot, node.now, node.evaluate()))
    return first, history


@given(stories)
def test_verdict_is_its_worst_cause_and_unread_is_unknown(story: list[Any]) -> None:
    for _, _, report in evaluate_story(story)[1]:
        stalled = {source.name for source in report.sources if source.state is SourceState.STALLED}
        for device in report.devices:
            worst = max((cause.severity for cause in device.causes), default=Severity.OK)
            sources = {rule.source for rule in (CPU_RULES if device.kind == "cpu" else POOL_RULES)}
            if sources & stalled:
                assert (device.health, device.severity) == (Health.UNKNOWN, Severity.UNKNOWN)
                assert codes(device)[0] == STALLED
            else:
                assert device.severity is worst
                assert device.health is HEALTH_OF_SEVERITY[worst]
                assert STALLED not in codes(device)
                assert [c.severity for c in device.causes] == sorted(
                    (c.severity for c in device.causes), reverse=True
                )
            assert len(set(codes(device))) == len(codes(device)) or codes(device).count(STALLED) > 1
            assert (device.message == "") is (device.severity <= Severity.INFO)
            assert len(device.message.encode()) <= 1024
            assert device.message.startswith(f"{codes(device)[0]}: " if device.causes else "")


@given(stories)
def test_unreadable_device_is_never_healthy(story: list[Any]) -> None:
    for snapshot, _, report in evaluate_story(story)[1]:
        nr = snapshot.pools[0].nr
        if isinstance(nr, Missing):
            assert health(report) is not Health.HEALTHY
        if isinstance(snapshot.cpus.online, Missing):
            assert health(report, CPU) is not Health.HEALTHY


@given(stories)
def test_shrunk_pool_is_never_healthy(story: list[Any]) -> None:
    _, history = evaluate_story(story)
    for snapshot, _, report in history:
        nr, surplus = snapshot.pools[0].nr, snapshot.pools[0].surplus
        short = isinstance(nr, int) and isinstance(surplus, int) and nr - surplus < 10
        if short:
            assert health(report) is not Health.HEALTHY


@given(stories)
def test_replay_is_identical_and_changes_nothing_in_place(story: list[Any]) -> None:
    state, history = evaluate_story(story)
    before = state
    for snapshot, now, report in history:
        frozen = copy.deepcopy((state, snapshot))
        state, again = step(state, snapshot, now)
        assert again == report
        twice = step(frozen[0], frozen[1], now)
        assert twice == (state, again)
    assert before == EngineState(before.settings)


@given(stories)
def test_second_evaluation_at_the_same_time_is_identical(story: list[Any]) -> None:
    state, history = evaluate_story(story)
    for snapshot, now, _ in history:
        state, first = step(state, snapshot, now)
        state, second = step(state, snapshot, now)
        assert without_times(second.devices) == without_times(first.devices)
        assert second.notes == first.notes


@given(stories)
def test_due_time_is_in_the_future(story: list[Any]) -> None:
    state, history = evaluate_story(story)
    for snapshot, now, _ in history:
        state, _ = step(state, snapshot, now)
        assert state.due_ns is None or state.due_ns > now.mono_ns


@given(stories)
def test_after_recovery_every_device_is_healthy(story: list[Any]) -> None:
    node = node_with_pool()
    node.states = {}
    node.nodes[0] = node_sample(core=0, package=0)
    node.next()
    for what, *how in story:
        if what == "pool":
            node.pool(pool_sample(*how))
        elif what == "online":
            node.cpus = cpus_sample(how[0])
        elif what == "stuck":
            node.stuck = how[0]
        elif what in {"pass", "evaluate"}:
            node.read()
        node.evaluate()
    node.pool(pool_sample(10))
    node.set_online("0-1")
    node.stuck = set()
    report = node.next(2 * CLEAN_PASSES)  # as many to believe the source, as many to believe the device
    assert [(d.health, d.message, d.causes) for d in report.devices] == [(Health.HEALTHY, "", ())] * 2


def test_settings_are_immutable() -> None:
    settings = EngineSettings("node-a", expect_pools={POOL: 3}, expect_cpus=0b1)
    node = node_with_pool(settings)
    node.next(5)
    assert node.state.settings is settings
    assert settings == replace(settings, expect_pools={POOL: 3})
