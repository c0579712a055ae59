"""Availability of devices: times in each state, faults, flapping and rules, from the verdict history."""

from itertools import pairwise
from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_samples import GPU, HEALTHY, HOT, LOST, OTHER_GPU, STALLED, SimulatedNode, node_with

from agent.health.availability_statistics import (
    AvailabilitySummary,
    DeviceAvailability,
    ObservedTimeAxis,
    listed_changes,
    summarize,
    verdict_spans,
)
from agent.model.history import (
    GONE,
    ClockReading,
    ObservedPeriod,
    RecordedState,
    StoredVerdicts,
    VerdictChange,
)

HOUR_S, DAY_S = 3600.0, 86_400.0
VERDICTS = (HEALTHY, HOT, STALLED, LOST, GONE)


def summary_of(node: SimulatedNode, last_s: float | None = None) -> AvailabilitySummary:
    timeline = ObservedTimeAxis(node.stored.periods, node.clocks)
    since_s = None if last_s is None else node.wall_s - last_s
    return summarize(verdict_spans(node.stored, timeline), timeline, since_s)


def availability(node: SimulatedNode, last_s: float | None = None) -> DeviceAvailability:
    (only,) = (device for device in summary_of(node, last_s).devices if device.device == GPU)
    return only


# --- times -------------------------------------------------------------------------------------------------


moves = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 100_000)),
    st.tuples(st.just("change"), st.sampled_from([GPU, OTHER_GPU]), st.sampled_from(VERDICTS)),
    st.tuples(st.just("restart"), st.integers(0, 100_000), st.integers(-10_000_000, 10_000_000)),
    st.tuples(st.just("clock"), st.integers(-10_000_000, 10_000_000)),
)


@settings(max_examples=100)  # each takes a millisecond
@given(st.lists(moves, max_size=30), st.integers(0, 100_000))
def test_restarts_and_clock_steps_leave_exact_times_in_each_state(moves: list, away_s: int) -> None:
    node = SimulatedNode()
    node.start()
    for kind, *values in moves:
        match kind:
            case "run":
                node.run(*values)
            case "change":
                node.change(*values)
            case "restart":
                away, step = values
                node.stop(away)
                node.set_wall_clock(step)
                node.start()
            case "clock":
                node.set_wall_clock(*values)
    node.stop(away_s)
    timeline = ObservedTimeAxis(node.stored.periods, node.clocks)
    spans = verdict_spans(node.stored, timeline)
    for device in summarize(spans, timeline).devices:
        assert device.observed_s == pytest.approx(node.true_s[device.device], abs=1e-3)
        assert device.not_observed_s == pytest.approx(node.away_s[device.device], abs=1e-3)
        assert sum(device.observed_s.values()) + device.not_observed_s == pytest.approx(
            device.total_s, abs=1e-3
        )


times = st.one_of(st.just(0.0), st.floats(0, 2e9), st.floats(-1e4, 1e4))
periods = st.lists(
    st.tuples(st.sampled_from(["", "boot-1", "boot-2"]), times, st.floats(0, 1e9), times), max_size=6
)
changes = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.sampled_from([GPU, OTHER_GPU]),
        st.sampled_from([None, *RecordedState]),
        st.sampled_from(VERDICTS),
        times,
    ),
    max_size=12,
)
clocks = st.builds(ClockReading, times, times, st.sampled_from(["", "boot-1", "boot-2"]))


@settings(max_examples=100)
@given(periods, changes, clocks, st.none() | st.floats(0, 1e9))
def test_times_of_any_history_sum_to_the_wall_time(given, changed, now, last_s) -> None:
    """The history has clocks that were set, reboots, and deleted periods."""
    stored = StoredVerdicts(
        tuple(ObservedPeriod(f"p-{number}", *values) for number, values in enumerate(given)),
        tuple(
            VerdictChange(f"p-{period}", number, device, before, verdict, 0.0, abs(offset_s))
            for number, (period, device, before, verdict, offset_s) in enumerate(changed)
        ),
    )
    timeline = ObservedTimeAxis(stored.periods, now)
    spans = verdict_spans(stored, timeline)
    for known in spans.values():
        for device, following in pairwise(known):
            assert device.begin_s <= device.end_s == following.begin_s
    found = summarize(spans, timeline, None if last_s is None else now.wall_s - last_s)
    for device in found.devices:
        assert device.begin_s <= device.end_s
        assert min(device.observed_s.values()) > -1e-3
        assert 0 <= device.not_observed_s <= device.total_s
        assert isclose(sum(device.observed_s.values()) + device.not_observed_s, device.total_s, abs_tol=1e-2)
        assert last_s is None or device.total_s <= last_s + 1e-3
        assert (device.mean_to_recover_s or 0) >= 0


def test_time_over_a_reboot_is_not_observed() -> None:
    node = node_with([(HEALTHY, HOUR_S)])
    node.stop(600)
    node.reboot()
    node.start()
    node.run(HOUR_S)
    gpu = availability(node)
    assert gpu.not_observed_s == pytest.approx(600)
    assert gpu.observed_s[RecordedState.HEALTHY] == pytest.approx(2 * HOUR_S)


@pytest.mark.parametrize("step_s", [-1e7, 1e7])
def test_wall_clock_set_while_the_agent_is_away_changes_no_time(step_s: float) -> None:
    node = node_with([(HEALTHY, HOUR_S)])
    node.stop(600)
    node.set_wall_clock(step_s)
    node.start()
    node.run(HOUR_S)
    assert availability(node).not_observed_s == pytest.approx(600)


def test_wall_clock_that_is_wrong_until_after_boot_adds_no_time() -> None:
    """A node without a battery boots in 1970, and sets its clock when the network is up."""
    node = node_with([(HEALTHY, HOUR_S)])
    node.stop(600)
    node.reboot()
    node.set_wall_clock(-1e9)
    node.start()
    node.run(10)
    node.set_wall_clock(1e9)
    node.run(HOUR_S)
    assert availability(node).not_observed_s == pytest.approx(600)


def test_restart_before_the_clock_is_right_leaves_the_time_over_a_reboot() -> None:
    node = node_with([(HEALTHY, HOUR_S)])
    node.stop(600)
    node.reboot()
    node.set_wall_clock(-1e9)
    for seconds in (10, 20):
        node.start()
        node.run(seconds)
        node.stop(1)
    node.set_wall_clock(1e9)
    node.start()
    node.run(HOUR_S)
    assert availability(node).not_observed_s == pytest.approx(602)


def test_boot_that_ends_with_its_clock_behind_adds_no_time() -> None:
    """Its machine reboots once more before the clock is set."""
    node = node_with([(HEALTHY, 5 * DAY_S), (LOST, HOUR_S)])
    for step_s in (-20 * DAY_S, 20 * DAY_S):
        node.stop(600)
        node.reboot()
        node.set_wall_clock(step_s)
        node.start()
        node.run(60)
    gpu = availability(node)
    assert gpu.total_s == pytest.approx(5 * DAY_S + HOUR_S + 2 * 660)
    assert gpu.not_observed_s == pytest.approx(1200)
    timeline = ObservedTimeAxis(node.stored.periods, node.clocks)
    (change,) = listed_changes(verdict_spans(node.stored, timeline), node.wall_s - 2 * HOUR_S)
    assert change.verdict == LOST


@pytest.mark.parametrize(
    ("is_same_boot", "ahead_s"), [(True, DAY_S), (False, 20 * DAY_S)], ids=["next run", "next boot"]
)
def test_boot_with_its_clock_ahead_leaves_the_time_after_it(is_same_boot: bool, ahead_s: float) -> None:
    """The clock is right at the end of the boot, or was ahead of the present time."""
    node = node_with([(HEALTHY, HOUR_S)])
    node.set_wall_clock(ahead_s)
    node.run(60)
    node.set_wall_clock(-ahead_s)
    for number in range(3):
        if number or not is_same_boot:
            node.reboot()
        node.start()
        node.run(60)
        node.stop(2 * DAY_S)
    assert availability(node).not_observed_s == pytest.approx(6 * DAY_S)


def test_window_cuts_the_state_that_began_before() -> None:
    node = node_with([(LOST, 10 * HOUR_S), (HEALTHY, HOUR_S)])
    gpu = availability(node, last_s=4 * HOUR_S)
    assert gpu.observed_s[RecordedState.UNHEALTHY] == pytest.approx(3 * HOUR_S)
    assert gpu.total_s == pytest.approx(4 * HOUR_S)
    assert gpu.lost_s == pytest.approx(3 * HOUR_S)


def test_device_is_counted_from_its_first_record() -> None:
    node = SimulatedNode()
    node.start()
    node.run(HOUR_S)
    node.follow((HEALTHY, 60))
    assert availability(node, last_s=2 * HOUR_S).total_s == pytest.approx(60)


def test_device_that_vanished_before_the_window_is_left_out() -> None:
    node = node_with([(HEALTHY, 60), (GONE, 2 * HOUR_S)])
    assert summary_of(node, last_s=HOUR_S).devices == ()
    assert availability(node).observed_s[RecordedState.ABSENT] == pytest.approx(2 * HOUR_S)


# --- faults ------------------------------------------------------------------------------------------------


def test_faults_are_counted_with_their_means() -> None:
    node = node_with([(HEALTHY, 900), (LOST, 60), (HOT, 900), (LOST, 180), (HEALTHY, 1000)])
    gpu = availability(node)
    assert gpu.faults == 2
    assert gpu.mean_between_faults_s == pytest.approx(1400)
    assert gpu.mean_to_recover_s == pytest.approx(120)
    assert gpu.changes == 4  # the first report is none


def test_fault_that_continues_has_no_time_to_recover() -> None:
    gpu = availability(node_with([(HEALTHY, 900), (LOST, 60)]))
    assert (gpu.faults, gpu.mean_to_recover_s) == (1, None)


def test_unknown_and_absent_do_not_end_a_fault() -> None:
    node = node_with([(HEALTHY, 60), (LOST, 60), (STALLED, 60), (GONE, 60), (LOST, 60), (HEALTHY, 60)])
    gpu = availability(node)
    assert (gpu.faults, gpu.mean_to_recover_s) == (1, pytest.approx(240))


def test_restart_of_the_agent_is_no_fault_of_an_unhealthy_device() -> None:
    node = node_with([(HEALTHY, 60), (LOST, 60)])
    for _ in range(3):
        node.stop(30)
        node.start((GPU, LOST))
        node.run(60)
    gpu = availability(node)
    assert (gpu.faults, gpu.changes, gpu.interruptions) == (1, 1, 1)


def test_repair_during_a_reboot_counts_with_the_time_of_the_reboot() -> None:
    node = node_with([(HEALTHY, 60), (LOST, 60)])
    node.stop(300)
    node.reboot()
    node.start((GPU, HEALTHY))
    node.run(60)
    assert availability(node).mean_to_recover_s == pytest.approx(360)


def test_fault_before_the_window_counts_only_as_recovery() -> None:
    node = node_with([(HEALTHY, 60), (LOST, HOUR_S), (HEALTHY, 60)])
    gpu = availability(node, last_s=600)
    assert (gpu.faults, gpu.mean_between_faults_s) == (0, None)
    assert gpu.mean_to_recover_s == pytest.approx(HOUR_S)


@pytest.mark.parametrize("is_deleted", [False, True], ids=["first record", "deleted period"])
def test_fault_from_before_the_history_is_not_counted(is_deleted: bool) -> None:
    node = SimulatedNode()
    node.start()
    node.follow(*[(HEALTHY, 60)] * is_deleted, (LOST, 60))
    node.stop(60)
    node.start()
    node.follow((LOST, 10), (HEALTHY, 60), (LOST, 20), (HEALTHY, 60))
    stored = node.stored._replace(
        periods=node.stored.periods[is_deleted:], changes=node.stored.changes[is_deleted:]
    )
    timeline = ObservedTimeAxis(stored.periods, node.clocks)
    (device,) = summarize(verdict_spans(stored, timeline), timeline).devices
    assert (device.faults, device.mean_to_recover_s) == (1, pytest.approx(20))
    assert device.mean_between_faults_s == pytest.approx(120)


# --- flapping ----------------------------------------------------------------------------------------------


def test_three_interruptions_in_an_hour_are_flapping() -> None:
    node = node_with([(HEALTHY, 60), *[(STALLED, 60), (HEALTHY, 600)] * 2])
    assert not availability(node).is_flapping
    node.follow((LOST, 60))
    assert availability(node).is_flapping


def test_interruptions_over_more_than_an_hour_are_no_flapping() -> None:
    node = node_with([(HEALTHY, 60), *[(LOST, 60), (HEALTHY, 1900)] * 6])
    gpu = availability(node)
    assert (gpu.interruptions, gpu.faults) == (2, 6)


def test_devices_unknown_after_each_restart_do_not_flap() -> None:
    node = node_with([(HEALTHY, 60)])
    for _ in range(5):
        node.stop(5)
        node.start((GPU, STALLED))
        node.run(5)
        node.follow((HEALTHY, 60))
    assert availability(node).interruptions == 0


# --- rules and changes -------------------------------------------------------------------------------------


def test_rule_is_raised_once_while_its_cause_lasts() -> None:
    both = LOST._replace(causes=(*LOST.causes, *HOT.causes))
    node = node_with([(HEALTHY, 60), (HOT, 60), (both, 60), (LOST, 60), (HEALTHY, 60), (LOST, 60)])
    rules = {rule.code: rule for rule in summary_of(node).rules}
    assert [(rule.raised, rule.active_s) for rule in rules.values()] == [
        (2, pytest.approx(180)),
        (1, pytest.approx(120)),
    ]
    assert list(rules) == ["gpu.xid.79", "gpu.heat"]
    assert rules["gpu.heat"].devices == (GPU,)


def test_first_record_of_a_device_is_no_change() -> None:
    node = SimulatedNode()
    node.start((GPU, LOST))
    node.run(60)
    node.follow((HEALTHY, 60), (LOST, 30))
    timeline = ObservedTimeAxis(node.stored.periods, node.clocks)
    found = listed_changes(verdict_spans(node.stored, timeline))
    assert [(span.change.before, span.verdict, span.end_s - span.begin_s) for span in found] == [
        (RecordedState.HEALTHY, LOST, pytest.approx(30)),
        (RecordedState.UNHEALTHY, HEALTHY, pytest.approx(60)),
    ]


def test_change_of_a_deleted_period_is_at_the_begin_of_the_history() -> None:
    node = node_with([(HEALTHY, 60), (LOST, 60)])
    node.stop(60)
    node.start()
    node.run(600)
    stored = StoredVerdicts(node.stored.periods[1:], node.stored.changes[-1:])
    timeline = ObservedTimeAxis(stored.periods, node.clocks)
    (device,) = summarize(verdict_spans(stored, timeline), timeline).devices
    assert device.total_s == pytest.approx(600)


def test_empty_history_has_no_device() -> None:
    timeline = ObservedTimeAxis((), ClockReading(0.0, 0.0))
    assert summarize(verdict_spans(StoredVerdicts(), timeline), timeline) == ((), ())
    assert timeline.unobserved_s(-inf, 0.0) == inf
