"""The whole core with GPUs: starts, hangs, returns, clocks that step, and whatever else may happen."""

import copy
from dataclasses import replace
from typing import Any, Final

import pytest
from gpu_samples import ABSENT, EIO, H100
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from paper import PaperNode, codes, device_of
from paper_gpus import GpuNode

from agent.engine.loop import visible_state
from agent.engine.step import START_NS, State, begin, step
from agent.health.catalog import CLEAN_PASSES, STALLED
from agent.health.gpu.verdicts import UNSEEN
from agent.model.gpu import WHOLE_GPU, GpuEvent, GpuField, GpuHost, Status
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant
from agent.serve.health.feed import Feed

DEADLINE_S: Final = 5
DEAD_S: Final = 60
PROBATION_S: Final = 60


def names(report: Report) -> list[str]:
    return [device.device for device in report.devices]


def opening(node: GpuNode) -> None:
    """NVML is being opened, and that takes its time."""
    node.nvml = node.nvml._replace(state=SourceState.STARTING, passes=0, beat_ns=node.now_ns)
    node.library |= {"call": "nvmlInit_v2", "call_ns": node.now_ns}


def opened(node: GpuNode) -> None:
    node.nvml = node.nvml._replace(state=SourceState.OK, passes=1, beat_ns=node.now_ns)
    node.library |= {"call": "", "call_ns": 0}


def fresh_start(gpus: int = 2) -> GpuNode:
    """The agent has just begun, on a node that it has never seen, and NVML is being opened."""
    node = GpuNode(gpus)
    node.restart(looks=False)
    opening(node)
    node.state = State(node.settings)
    return node


# --- starts -------------------------------------------------------------------------------------------------


def test_nothing_is_healthy_before_somebody_has_looked_at_it() -> None:
    node = fresh_start()
    said: list[DeviceHealth] = []
    node.read()
    for tenth in range(40):
        if tenth == 10:
            opened(node)
        if tenth == 15:
            node.change(1, passes=1, beat_ns=node.now_ns)
        report = node.look()
        if not report.starting:
            said += [device for device in report.devices if device.device == "gpu-0"]
        node.wait(0.1)
    assert said
    assert {device.health for device in said} == {Health.UNKNOWN}


def test_a_library_that_hangs_delays_the_other_devices_by_two_seconds_at_most() -> None:
    node = fresh_start()
    node.read()
    began_ns = node.now_ns
    assert node.look().starting
    assert node.state.due_ns is not None
    assert node.state.due_ns <= began_ns + START_NS
    node.wait((node.state.due_ns - node.now_ns) / NS)
    report = node.look()
    assert not report.starting
    assert {device.device: device.health for device in report.devices}["cpu-node0"] is Health.HEALTHY


def test_what_is_quick_is_not_waited_with() -> None:
    node = fresh_start()
    opened(node)
    node.read()
    report = node.look()
    assert not report.starting
    assert (names(report)[1:3], device_of(report, "gpu-1").health) == (["gpu-0", "gpu-1"], Health.HEALTHY)


def test_gpus_known_from_before_are_unknown_while_nvml_hangs_and_dead_after_a_minute() -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    node.restart(looks=False)
    opening(node)
    node.read()
    node.look()
    node.rest(2)
    report = node.look()
    assert not report.starting
    for name in ("gpu-0", "gpu-0-mig-1-0", "gpu-1"):
        assert (node.health(name), node.codes(name)[0]) == (Health.UNKNOWN, "gpu.unseen"), name
    node.rest(DEAD_S)
    assert node.health("gpu-0") is Health.UNHEALTHY
    opened(node)
    node.rest(PROBATION_S + 20)
    assert [node.health(name) for name in ("gpu-0", "gpu-0-mig-1-0", "gpu-1")] == [Health.HEALTHY] * 3


def test_gpus_of_the_bus_are_unknown_while_nvml_hangs_in_its_first_start() -> None:
    node = fresh_start(1)
    node.host = GpuHost(bus_gpus=(node.gpus[0].bus,))
    node.rest(3)
    assert (node.health(), node.codes()) == (Health.UNKNOWN, ["gpu.unseen"])
    opened(node)
    node.rest(40)
    assert (node.health(), dict(node.now_says().attributes)["uuid"]) == (Health.HEALTHY, "GPU-00000000")


def test_a_gpu_that_is_counted_and_has_no_record_yet_is_unknown_and_not_missing() -> None:
    node = GpuNode()
    node.rest(5)
    gpus, node.gpus = node.gpus, {}
    node.library["count"] = len(gpus)
    node.restart(looks=False)
    node.look()
    assert [node.health(f"gpu-{number}") for number in gpus] == [Health.UNKNOWN] * 2
    assert node.codes() == [UNSEEN.code]
    node.gpus = gpus
    node.rest(5)
    assert [node.health(f"gpu-{number}") for number in gpus] == [Health.HEALTHY] * 2


def test_gpus_of_a_library_that_was_just_installed_are_told_of_when_they_have_records() -> None:
    node = GpuNode()
    gpus, node.gpus = node.gpus, {}
    node.nvml = node.nvml._replace(state=SourceState.ABSENT)
    node.host = GpuHost(bus_gpus=tuple(gpu.bus for gpu in gpus.values()))
    node.state = begin(node.settings)
    node.rest(5)
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.library["count"] = len(gpus)
    assert [device.device for device in node.look().devices if device.device.startswith("gpu")] == []
    node.gpus = gpus
    node.next()
    assert [node.health(f"gpu-{number}") for number in gpus] == [Health.HEALTHY] * 2


def test_a_gpu_that_appears_is_told_of_when_it_was_looked_at_or_is_late_to_be() -> None:
    node = GpuNode(2)
    late = node.gpus.pop(1)
    node = _with(node, node.gpus)
    node.gpus[2] = replace(late, index=2, uuid="GPU-late", bus="0000:fb:00.0", passes=0, beat_ns=0)
    node.nvml = node.nvml._replace(beat_ns=node.now_ns)
    assert "gpu-2" not in names(node.look())
    node.wait(START_NS / NS - 0.1)
    assert "gpu-2" not in names(node.look())
    node.wait(0.2)
    assert node.health("gpu-2") is Health.UNKNOWN
    node.next()
    assert (node.health("gpu-2"), node.codes("gpu-2")) == (Health.HEALTHY, [])


def _with(node: GpuNode, gpus: Any) -> GpuNode:
    node.gpus = gpus
    node.state = State(node.settings)
    node.next()
    return node


def test_whoever_is_told_not_to_look_for_gpus_has_none_and_forgets_none() -> None:
    node = GpuNode(2)
    node.xid(0, 79)
    node.look()
    kept = node.kept
    plain = PaperNode.snapshot(node)
    node.state, report = step(node.state, plain, node.now)
    assert names(report) == ["cpu-node0"]
    assert node.kept == kept


def test_old_lines_are_judged_when_the_gpu_was_looked_at_and_not_before() -> None:
    node = GpuNode(1)
    node.line(0, 48)
    node.restart(away_s=3600, looks=False)
    opening(node)
    for _ in range(3):
        node.read()
        assert "gpu.xid.48" not in node.codes()
    opened(node)
    node.next()
    assert (node.health(), node.codes()) == (Health.HEALTHY, []), "its driver asks for nothing"


# --- hangs --------------------------------------------------------------------------------------------------


def test_a_gpu_that_hangs_is_unknown_at_the_deadline_unhealthy_later_and_back_when_it_answers() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(DEADLINE_S - 0.5)
    assert node.health() is Health.HEALTHY
    node.rest(0.5)
    assert (node.health(), node.codes()) == (Health.UNKNOWN, ["gpu.not_answering"])
    node.rest(DEAD_S - DEADLINE_S - 0.5)
    assert node.health() is Health.UNKNOWN
    node.rest(0.5)
    assert node.health() is Health.UNHEALTHY
    node.return_from_hang(0)
    node.rest(PROBATION_S)
    assert node.health() is Health.UNHEALTHY
    node.rest(10)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_one_that_was_silent_for_a_moment_only_is_believed_after_three_passes() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(20)
    node.return_from_hang(0)
    told = [device_of(node.next(), "gpu-0").health for _ in range(CLEAN_PASSES + 1)]
    assert told[: CLEAN_PASSES - 1] == [Health.UNKNOWN] * (CLEAN_PASSES - 1)
    assert told[-1] is Health.HEALTHY


def test_its_text_changes_in_steps_and_at_no_other_time() -> None:
    node = GpuNode(2)
    node.hang(0)
    texts = []
    for _ in range(700):
        node.wait(0.5)
        texts.append(node.cause("gpu.not_answering").evidence if node.codes() else "")
    changes = [text for before, text in zip(["", *texts], texts, strict=False) if text != before]
    assert [text.rpartition("than ")[2] for text in changes] == [
        "5 s",
        "10 s",
        "30 s",
        "1 min",
        "2 min",
        "5 min",
    ]


def test_the_others_and_the_host_do_not_notice() -> None:
    node = GpuNode(8)
    quiet = GpuNode(8)
    node.hang(3)
    for _ in range(40):
        a, b = node.next(), quiet.next()
        assert [d for d in a.devices if d.device != "gpu-3"] == [d for d in b.devices if d.device != "gpu-3"]
    vital = [source for source in a.sources if source.vital]
    assert vital
    assert all(source.state is not SourceState.STALLED for source in vital)


def test_what_is_latched_is_raised_while_it_hangs() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(10)
    node.xid(0, 79)
    assert node.codes() == ["gpu.xid.79", "gpu.not_answering"]
    assert node.health() is Health.UNHEALTHY


def test_a_fault_of_before_stays_through_a_hang() -> None:
    node = GpuNode(2)
    node.xid(0, 62)
    node.hang(0)
    node.rest(3600)
    assert set(node.codes()) == {"gpu.xid.62", "gpu.not_answering"}


@pytest.mark.parametrize("silent", ["hangs", "lost"])
def test_what_is_told_of_a_gpu_that_does_not_answer_is_sent_at_each_heartbeat(silent: str) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    if silent == "hangs":
        node.hang(0)
    else:
        node.lose(0)
    node.rest(100)
    sent: list[list[str]] = []
    feed = Feed(lambda devices, _: [",".join(device.device for device in devices).encode()])
    feed.publish(node.look().devices)
    for _ in range(5):
        number = feed.number
        feed.publish(node.rest(10).devices)
        (message,) = feed.pending_for(number)
        sent.append([name for name in message.decode().split(",") if name.startswith("gpu-0")])
    assert sent == [["gpu-0", "gpu-0-mig-1-0"]] * 5


def test_the_picture_of_a_gpu_that_hangs_is_no_news_every_second() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(70)
    first = visible_state(node.look())
    node.rest(40)
    assert visible_state(node.look()) == first


def test_a_gpus_thread_that_stands_still_without_a_call_is_unknown_too() -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    node.hung.add(0)
    node.rest(25)  # a pass of calls that each just keep their deadline
    assert node.health() is Health.HEALTHY
    node.rest(20)
    for name in ("gpu-0", "gpu-0-mig-1-0"):
        assert (node.health(name), node.codes(name)) == (Health.UNKNOWN, [STALLED])
    node.hung.clear()
    node.rest(5)
    assert node.health() is Health.HEALTHY


# --- readings -----------------------------------------------------------------------------------------------


def test_a_gpu_whose_reading_can_no_longer_be_read_is_unknown_and_one_that_never_had_it_is_well() -> None:
    node = GpuNode(2)
    node.answer(1, recovery_action=ABSENT)
    node.answer(0, recovery_action=EIO)
    report = node.next()
    assert (node.health("gpu-0"), node.codes("gpu-0")) == (Health.UNKNOWN, ["gpu.recovery_action.unreadable"])
    assert (node.health("gpu-1"), node.codes("gpu-1")) == (Health.HEALTHY, [])
    assert ("gpu-1", "gpu.recovery_action") in {(row.device, row.code) for row in report.not_applicable}
    node.answer(0, recovery_action=0)
    node.next(CLEAN_PASSES)
    assert (node.health("gpu-0"), node.codes("gpu-0")) == (Health.HEALTHY, [])


@pytest.mark.parametrize(
    "field",
    [field for field in GpuField if isinstance(H100[field], int) and H100[field] == 0],
)
def test_a_field_that_is_gone_is_never_taken_for_zero(field: GpuField) -> None:
    node = GpuNode(2)
    node.rest(3700)
    zero = node.next()
    node.answer(0, **{field: EIO})
    gone = node.next()
    told = [device_of(report, "gpu-0") for report in (zero, gone)]
    judged = {row.code for row in gone.not_evaluated if row.device == "gpu-0"}
    unreadable = [code for code in codes(told[1]) if code.endswith(".unreadable")]
    assert told[0].health is Health.HEALTHY
    assert bool(unreadable) is (told[1].health is Health.UNKNOWN)
    assert not [code for code in codes(told[1]) if not code.endswith(".unreadable")]
    assert judged or unreadable or told[1].causes == told[0].causes


def test_status_15_and_16_are_unhealthy_at_once_and_over_after_their_probation() -> None:
    for status, code in ((Status.LOST, "gpu.lost"), (Status.RESET_REQUIRED, "gpu.reset_required")):
        node = GpuNode(2)
        node.lose(0, status)
        assert (node.health(), node.codes()) == (Health.UNHEALTHY, [code])
        node.next(5)
        node.find(0)
        node.rest(PROBATION_S - 1)
        assert node.health() is Health.UNHEALTHY
        node.rest(10)
        assert (node.health(), node.codes()) == (Health.HEALTHY, [])


@pytest.mark.parametrize("status", [Status.LOST, Status.RESET_REQUIRED])
def test_a_lost_gpu_of_a_driver_that_is_unloaded_has_not_come_back(status: int) -> None:
    node = GpuNode()
    node.lose(0, status)
    node.rest(5)
    node.lose(0, Status.UNINITIALIZED)
    node.rest(300)
    assert (node.health(), node.health("gpu-1")) == (Health.UNHEALTHY, Health.HEALTHY)
    node.find(0)
    node.rest(100)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_the_drivers_own_demand_comes_first() -> None:
    node = GpuNode()
    node.answer(0, recovery_action=2)
    node.xid(0, 48)
    device = node.now_says()
    assert codes(device) == ["gpu.recovery_action", "gpu.xid.48"]
    assert "reboot the node" in device.message


# --- clocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_steps_by_a_day_changes_no_verdict(step_s: float) -> None:
    def told(node: GpuNode) -> object:
        report = node.rest(7)
        return [(d.device, d.health, d.severity, d.message) for d in report.devices]

    steady, stepped = GpuNode(3), GpuNode(3)
    for node in (steady, stepped):
        node.xid(0, 48)
        node.xid(1, 80)
        node.xid(2, 79)
        node.rest(100)
    stepped.wall_s += step_s
    for minute in range(30):
        if minute == 3:
            steady.xid(1, 80)
            stepped.xid(1, 80)
        assert told(steady) == told(stepped), minute


# --- whatever happens ---------------------------------------------------------------------------------------

numbers = st.integers(0, 1)
instances = st.sampled_from([(WHOLE_GPU, WHOLE_GPU), (1, 0), (2, WHOLE_GPU)])
xids = st.sampled_from(
    [13, 31, 43, 45, 46, 48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 149, 154, 155, 162, 163, 999]
)
events = st.one_of(
    st.tuples(st.just("xid"), numbers, xids, instances),
    st.tuples(st.just("event"), numbers, xids, instances),
    st.tuples(st.just("line"), numbers, xids),
    st.tuples(st.just("tell"), numbers, st.sampled_from(GpuEvent)),
    st.tuples(st.just("action"), numbers, st.sampled_from([0, 1, 2, 9, EIO])),
    st.tuples(st.just("pending"), numbers, st.sampled_from([0, 1, EIO])),
    st.tuples(st.just("links"), numbers, st.sampled_from([0, 1, (1 << 18) - 1])),
    st.tuples(st.just("lose"), numbers, st.sampled_from([15, 16, 28, 999])),
    st.tuples(st.just("find"), numbers),
    st.tuples(st.just("hang"), numbers),
    st.tuples(st.just("return"), numbers),
    st.tuples(st.just("reset"), numbers),
    st.tuples(st.just("reload")),
    st.tuples(st.just("partition"), st.sampled_from([(), ((1, 0),), ((1, 0), (2, 0))])),
    st.tuples(st.just("sxid"), st.sampled_from(["Fatal", "Non-fatal"])),
    st.tuples(st.just("rest"), st.sampled_from([0.3, 1, 5, 15, 70])),
    st.tuples(st.just("wall"), st.sampled_from([-86_400.0, 86_400.0])),
    st.tuples(st.just("restart"), st.sampled_from(["", "same", "other"])),
)
stories = st.lists(events, max_size=25)


def happen(node: GpuNode, what: str, how: list[Any]) -> None:
    """One event of a story."""
    match what, how:
        case "xid", [number, code, (gi, ci)]:
            node.xid(number, code, gi, ci)
        case "event", [number, code, (gi, ci)]:
            node.event(number, code, gi, ci)
        case "line", [number, code]:
            node.line(number, code)
        case "tell", [number, event]:
            node.tell(number, event)
        case "action", [number, action]:
            node.answer(number, recovery_action=action)
        case "pending", [number, pending]:
            node.answer(number, remap_pending=pending)
        case "links", [number, up]:
            node.answer(number, links_up=up)
        case "lose", [number, status]:
            node.lose(number, status)
        case "find", [number]:
            node.find(number)
        case "hang", [number]:
            node.hang(number)
        case "return", [number]:
            node.return_from_hang(number)
        case "reset", [number]:
            node.reset(number)
        case "reload", []:
            node.reload()
        case "partition", [migs]:
            node.partition(0, *migs)
        case "sxid", [word]:
            node.log(f"nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, {word}, Link 30 LTSSM Fault Up")
        case "rest", [seconds]:
            node.rest(seconds)
        case "wall", [step_s]:
            node.wall_s += step_s
        case "restart", [boot]:
            node.restart(boot_id=f"boot-{node.passes}" if boot == "other" else "")


@given(stories)
@hypothesis_settings(deadline=None, max_examples=150)
def test_nothing_that_happens_is_an_error_or_hides_what_is_wrong_now(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    for what, *how in story:
        happen(node, what, how)
        report = node.next()
        for number, gpu in node.gpus.items():
            device = device_of(report, f"gpu-{number}")
            action = gpu.readings.get(GpuField.RECOVERY_ACTION)
            if number not in node.hung and (action in (1, 2, 9) or gpu.status in (15, 16)):
                assert device.health is not Health.HEALTHY
                assert gpu.status not in (0, 15, 16) or device.health is Health.UNHEALTHY
            if gpu.status or not gpu.passes:
                assert device.health is not Health.HEALTHY
        for device in report.devices:
            worst = max((cause.severity for cause in device.causes), default=Severity.OK)
            assert device.severity is worst
            assert len(set(codes(device))) == len(codes(device))
            assert len(device.message.encode()) <= 1024
        assert node.state.due_ns is None or node.state.due_ns > node.now_ns


@given(stories)
@hypothesis_settings(deadline=None, max_examples=60)
def test_an_instance_is_never_better_than_its_gpu(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    for what, *how in story:
        happen(node, what, how)
        report = node.next()
        parent = device_of(report, "gpu-0")
        for device in report.devices:
            if device.device.startswith("gpu-0-mig"):
                assert device.severity >= parent.severity or parent.severity <= Severity.INFO


CURED_BY_ACTION: Final = (48, 94, 95, 119, 120, 140, 143)


@given(stories, st.sampled_from(CURED_BY_ACTION))
@hypothesis_settings(deadline=None, max_examples=40)
def test_an_hour_after_a_fault_that_the_driver_cures_all_is_well(story: list[Any], code: int) -> None:
    node = GpuNode(2)
    for what, *how in story:
        if what in ("rest", "wall", "restart", "find", "action", "lose", "hang", "return"):
            happen(node, what, how)
            node.next()
    for number in (0, 1):
        node.return_from_hang(number)
        node.find(number)
    node.xid(0, code)
    node.look()
    node.rest(3600)
    assert [(d.device, d.health) for d in node.look().devices if d.device.startswith("gpu")] == [
        ("gpu-0", Health.HEALTHY),
        ("gpu-1", Health.HEALTHY),
    ]


@given(stories)
@hypothesis_settings(deadline=None, max_examples=30)
def test_a_day_of_gpus_can_be_replayed_and_nothing_is_changed_in_place(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    state = node.state
    history: list[tuple[Snapshot, Instant, Report]] = []
    for what, *how in story:
        if what in ("restart", "rest"):
            continue
        happen(node, what, how)
        node.read()
        seen, now = node.snapshot(), node.now
        history.append((seen, now, node.look()))
    for seen, now, report in history:
        frozen = copy.deepcopy((state, seen))
        state, again = step(state, seen, now)
        assert again == report
        assert step(*frozen, now) == (state, again)


@given(stories)
@hypothesis_settings(deadline=None, max_examples=40)
def test_looking_twice_at_the_same_moment_says_the_same_of_gpus(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    for what, *how in story:
        happen(node, what, how)
        node.read()
        first, second = node.look(), node.look()
        assert second.devices == first.devices
