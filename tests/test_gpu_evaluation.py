"""Evaluations of a node with GPUs: starts, hangs, clock steps, and random sequences of events."""

import copy
import sys
from dataclasses import replace
from typing import Any, Final

import pytest
from gpu_samples import ABSENT, EIO, H100
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import PaperNode, codes, device_of
from paper_gpus import GpuNode

from agent.engine.loop import visible_state
from agent.engine.step import FIRST_PASS_WAIT_NS, EngineState, initial_state, step
from agent.health.gpu.verdicts import NOT_READ_YET
from agent.health.rules import CLEAN_PASSES, STALLED
from agent.model.gpu import WHOLE_GPU, GpuEvent, GpuField, GpuOsSample, NvmlReturnCode
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.reading import Absence, Missing, SourceState, sources_in_state
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant
from agent.serve.health.service import HealthFeed

DEADLINE_S: Final = 5
DEAD_S: Final = 60
PROBATION_S: Final = 60


def names(report: Report) -> list[str]:
    return [device.device for device in report.devices]


def begin_opening(node: GpuNode) -> None:
    """Let a node begin to open NVML, in a call that lasts."""
    node.nvml = node.nvml._replace(state=SourceState.STARTING, passes=0, beat_ns=node.now_ns)
    node.library |= {"call": "nvmlInit_v2", "call_ns": node.now_ns}


def finish_opening(node: GpuNode) -> None:
    node.nvml = node.nvml._replace(state=SourceState.OK, passes=1, beat_ns=node.now_ns)
    node.library |= {"call": "", "call_ns": 0}


def fresh_start(gpus: int = 2) -> GpuNode:
    """Return a node whose agent has just started without stored state, and opens NVML."""
    node = GpuNode(gpus)
    node.restart(evaluate=False)
    begin_opening(node)
    node.state = EngineState(node.settings)
    return node


# --- starts -------------------------------------------------------------------------------------------------


def test_no_device_is_healthy_before_its_first_pass() -> None:
    node = fresh_start()
    seen: list[DeviceHealth] = []
    node.read()
    for tenth in range(40):
        if tenth == 10:
            finish_opening(node)
        if tenth == 15:
            node.change(1, passes=1, beat_ns=node.now_ns)
        report = node.evaluate()
        if not report.starting:
            seen += [device for device in report.devices if device.device == "gpu-0"]
        node.wait(0.1)
    assert seen
    assert {device.health for device in seen} == {Health.UNKNOWN}


def test_hanging_library_delays_other_devices_at_most_2_s() -> None:
    node = fresh_start()
    node.read()
    began_ns = node.now_ns
    assert node.evaluate().starting
    assert node.state.due_ns is not None
    assert node.state.due_ns <= began_ns + FIRST_PASS_WAIT_NS
    node.wait((node.state.due_ns - node.now_ns) / NS)
    report = node.evaluate()
    assert not report.starting
    assert {device.device: device.health for device in report.devices}["cpu-node0"] is Health.HEALTHY


def test_fast_first_passes_are_reported_without_delay() -> None:
    node = fresh_start()
    finish_opening(node)
    node.read()
    report = node.evaluate()
    assert not report.starting
    assert (names(report)[1:3], device_of(report, "gpu-1").health) == (["gpu-0", "gpu-1"], Health.HEALTHY)


def test_known_gpus_are_unknown_then_unhealthy_while_nvml_hangs() -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    node.restart(evaluate=False)
    begin_opening(node)
    node.read()
    node.evaluate()
    node.rest(2)
    report = node.evaluate()
    assert not report.starting
    for name in ("gpu-0", "gpu-0-mig-1-0", "gpu-1"):
        assert (node.health(name), node.codes(name)[0]) == (Health.UNKNOWN, "gpu.unseen"), name
    node.rest(DEAD_S)
    assert node.health("gpu-0") is Health.UNHEALTHY
    finish_opening(node)
    node.rest(PROBATION_S + 20)
    assert [node.health(name) for name in ("gpu-0", "gpu-0-mig-1-0", "gpu-1")] == [Health.HEALTHY] * 3


def test_gpus_of_bus_are_unknown_while_first_nvml_init_hangs() -> None:
    node = fresh_start(1)
    bus = (node.gpus[0].bus,)
    node.host = GpuOsSample(bus_gpus=bus, bound_gpus=bus)
    node.rest(3)
    assert (node.health(), node.codes()) == (Health.UNKNOWN, ["gpu.unseen"])
    finish_opening(node)
    node.rest(40)
    assert (node.health(), dict(node.verdict().attributes)["uuid"]) == (Health.HEALTHY, "GPU-00000000")


def test_counted_gpu_without_sample_is_unknown_not_missing() -> None:
    node = GpuNode()
    node.rest(5)
    gpus, node.gpus = node.gpus, {}
    node.library["count"] = len(gpus)
    node.restart(evaluate=False)
    node.evaluate()
    assert [node.health(f"gpu-{number}") for number in gpus] == [Health.UNKNOWN] * 2
    assert node.codes() == [NOT_READ_YET.code]
    node.gpus = gpus
    node.rest(5)
    assert [node.health(f"gpu-{number}") for number in gpus] == [Health.HEALTHY] * 2


def test_gpus_of_new_library_are_reported_with_first_samples() -> None:
    node = GpuNode()
    gpus, node.gpus = node.gpus, {}
    node.nvml = node.nvml._replace(state=SourceState.ABSENT)
    node.host = GpuOsSample(bus_gpus=tuple(gpu.bus for gpu in gpus.values()))
    node.state = initial_state(node.settings)
    node.rest(5)
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.library["count"] = len(gpus)
    assert [device.device for device in node.evaluate().devices if device.device.startswith("gpu")] == []
    node.gpus = gpus
    node.next()
    assert [node.health(f"gpu-{number}") for number in gpus] == [Health.HEALTHY] * 2


def test_new_gpu_is_reported_after_first_pass_or_delay() -> None:
    node = GpuNode(2)
    late = node.gpus.pop(1)
    node = _with(node, node.gpus)
    node.gpus[2] = replace(late, index=2, uuid="GPU-late", bus="0000:fb:00.0", passes=0, beat_ns=0)
    node.nvml = node.nvml._replace(beat_ns=node.now_ns)
    assert "gpu-2" not in names(node.evaluate())
    node.wait(FIRST_PASS_WAIT_NS / NS - 0.1)
    assert "gpu-2" not in names(node.evaluate())
    node.wait(0.2)
    assert node.health("gpu-2") is Health.UNKNOWN
    node.next()
    assert (node.health("gpu-2"), node.codes("gpu-2")) == (Health.HEALTHY, [])


def _with(node: GpuNode, gpus: Any) -> GpuNode:
    node.gpus = gpus
    node.state = EngineState(node.settings)
    node.next()
    return node


def test_disabled_gpu_monitoring_reports_none_and_keeps_state() -> None:
    node = GpuNode(2)
    node.xid(0, 79)
    node.evaluate()
    kept = node.checkpoint
    plain = PaperNode.snapshot(node)
    node.state, report = step(node.state, plain, node.now)
    assert names(report) == ["cpu-node0"]
    assert node.checkpoint == kept


def test_old_log_lines_are_evaluated_after_first_pass() -> None:
    node = GpuNode(1)
    node.log_xid(0, 48)
    node.restart(away_s=3600, evaluate=False)
    begin_opening(node)
    for _ in range(3):
        node.read()
        assert "gpu.xid.48" not in node.codes()
    finish_opening(node)
    node.next()
    assert (node.health(), node.codes()) == (Health.HEALTHY, []), "its driver asks for nothing"


# --- hangs --------------------------------------------------------------------------------------------------


def test_hanging_gpu_is_unknown_then_unhealthy_then_recovers() -> None:
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


def test_short_hang_clears_after_three_passes() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(20)
    node.return_from_hang(0)
    healths = [device_of(node.next(), "gpu-0").health for _ in range(CLEAN_PASSES + 1)]
    assert healths[: CLEAN_PASSES - 1] == [Health.UNKNOWN] * (CLEAN_PASSES - 1)
    assert healths[-1] is Health.HEALTHY


def test_text_of_hang_changes_only_in_steps() -> None:
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


def test_hang_of_one_gpu_does_not_affect_other_devices() -> None:
    node = GpuNode(8)
    quiet = GpuNode(8)
    node.hang(3)
    for _ in range(40):
        a, b = node.next(), quiet.next()
        assert [d for d in a.devices if d.device != "gpu-3"] == [d for d in b.devices if d.device != "gpu-3"]
    vital = [source for source in a.sources if source.vital]
    assert vital
    assert all(source.state is not SourceState.STALLED for source in vital)


def test_latched_fault_is_raised_while_gpu_hangs() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(10)
    node.xid(0, 79)
    assert node.codes() == ["gpu.xid.79", "gpu.not_answering"]
    assert node.health() is Health.UNHEALTHY


def test_earlier_fault_stays_during_hang() -> None:
    node = GpuNode(2)
    node.xid(0, 62)
    node.hang(0)
    node.rest(3600)
    assert set(node.codes()) == {"gpu.xid.62", "gpu.not_answering"}


@pytest.mark.parametrize("silent", ["hangs", "lost"])
def test_verdict_on_hanging_gpu_is_verified_at_each_heartbeat(silent: str) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    if silent == "hangs":
        node.hang(0)
    else:
        node.lose(0)
    node.rest(100)
    sent: list[list[str]] = []
    feed = HealthFeed(lambda devices, _: [",".join(device.device for device in devices).encode()])
    feed.publish(node.evaluate().devices)
    for _ in range(5):
        number = feed.number
        feed.publish(node.rest(10).devices)
        (message,) = feed.pending_messages(number)
        sent.append([name for name in message.decode().split(",") if name.startswith("gpu-0")])
    assert sent == [["gpu-0", "gpu-0-mig-1-0"]] * 5


def test_report_of_hanging_gpu_does_not_change_every_second() -> None:
    node = GpuNode(2)
    node.hang(0)
    node.rest(70)
    first = visible_state(node.evaluate())
    node.rest(40)
    assert visible_state(node.evaluate()) == first


def test_stalled_gpu_source_without_open_call_is_unknown() -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    node.hanging.add(0)
    node.rest(25)  # a pass of calls that each just keep their deadline
    assert node.health() is Health.HEALTHY
    node.rest(20)
    for name in ("gpu-0", "gpu-0-mig-1-0"):
        assert (node.health(name), node.codes(name)) == (Health.UNKNOWN, [STALLED])
    node.hanging.clear()
    node.rest(5)
    assert node.health() is Health.HEALTHY


# --- readings -----------------------------------------------------------------------------------------------


def test_unreadable_reading_is_unknown_and_absent_one_is_healthy() -> None:
    node = GpuNode(2)
    node.set_readings(1, recovery_action=ABSENT)
    node.set_readings(0, recovery_action=EIO)
    report = node.next()
    assert (node.health("gpu-0"), node.codes("gpu-0")) == (Health.UNKNOWN, ["gpu.recovery_action.unreadable"])
    assert (node.health("gpu-1"), node.codes("gpu-1")) == (Health.HEALTHY, [])
    assert ("gpu-1", "gpu.recovery_action") in {(row.device, row.code) for row in report.not_applicable}
    node.set_readings(0, recovery_action=0)
    node.next(CLEAN_PASSES)
    assert (node.health("gpu-0"), node.codes("gpu-0")) == (Health.HEALTHY, [])


@pytest.fixture(scope="module")
def node_at_rest() -> GpuNode:
    """A node after an hour without events, to be copied."""
    node = GpuNode(2)
    node.rest(3700)
    return node


@pytest.mark.parametrize(
    "field",
    [field for field in GpuField if isinstance(H100[field], int) and H100[field] == 0],
)
def test_unreadable_field_is_never_taken_for_zero(node_at_rest: GpuNode, field: GpuField) -> None:
    node = copy.deepcopy(node_at_rest)
    zero = node.next()
    node.set_readings(0, **{field: EIO})
    gone = node.next()
    verdicts = [device_of(report, "gpu-0") for report in (zero, gone)]
    findings = {row.code for row in gone.not_evaluated if row.device == "gpu-0"}
    unreadable = [code for code in codes(verdicts[1]) if code.endswith(".unreadable")]
    assert verdicts[0].health is Health.HEALTHY
    assert bool(unreadable) is (verdicts[1].health is Health.UNKNOWN)
    assert not [code for code in codes(verdicts[1]) if not code.endswith(".unreadable")]
    assert findings or unreadable or verdicts[1].causes == verdicts[0].causes


def test_status_15_and_16_are_unhealthy_until_probation_ends() -> None:
    for status, code in (
        (NvmlReturnCode.LOST, "gpu.lost"),
        (NvmlReturnCode.RESET_REQUIRED, "gpu.reset_required"),
    ):
        node = GpuNode(2)
        node.lose(0, status)
        assert (node.health(), node.codes()) == (Health.UNHEALTHY, [code])
        node.next(5)
        node.recover(0)
        node.rest(PROBATION_S - 1)
        assert node.health() is Health.UNHEALTHY
        node.rest(10)
        assert (node.health(), node.codes()) == (Health.HEALTHY, [])


@pytest.mark.parametrize("status", [NvmlReturnCode.LOST, NvmlReturnCode.RESET_REQUIRED])
def test_lost_gpu_stays_unhealthy_while_nvml_lists_no_gpus(status: int) -> None:
    node = GpuNode()
    node.lose(0, status)
    node.rest(5)
    gpus = dict(node.gpus)
    node.gpus.clear()
    node.nvml = node.nvml._replace(state=SourceState.FAILING)
    node.library["err"] = NvmlReturnCode.UNKNOWN
    node.rest(300)
    assert (node.health(), node.health("gpu-1")) == (Health.UNHEALTHY, Health.UNKNOWN)
    node.gpus.update(gpus)
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.library["err"] = NvmlReturnCode.OK
    node.recover(0)
    node.rest(100)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_xid_109_is_not_unhealthy_while_nvml_lists_no_gpus() -> None:
    node = GpuNode()
    node.rest(5)
    node.xid(0, 109)
    node.rest(3)
    assert node.health() is Health.HEALTHY
    node.gpus.clear()
    node.nvml = node.nvml._replace(state=SourceState.FAILING)
    node.library["err"] = NvmlReturnCode.UNKNOWN
    node.rest(5)
    assert node.health() is Health.UNKNOWN


@pytest.mark.parametrize("status", [NvmlReturnCode.LOST, NvmlReturnCode.RESET_REQUIRED])
def test_unloaded_driver_does_not_clear_lost_gpu(status: int) -> None:
    node = GpuNode()
    node.lose(0, status)
    node.rest(5)
    node.lose(0, NvmlReturnCode.UNINITIALIZED)
    node.rest(300)
    assert (node.health(), node.health("gpu-1")) == (Health.UNHEALTHY, Health.HEALTHY)
    node.recover(0)
    node.rest(100)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


@pytest.mark.parametrize(
    ("code", "broken", "registering", "sound"),
    [
        ("gpu.fabric.status", {"fabric_status": 999}, {}, {"fabric_status": 0}),
        (
            "gpu.fabric.health",
            {"fabric_health": 0x19A, "fabric_summary": 2},
            {"fabric_health": 0, "fabric_summary": 0},
            {"fabric_health": 0x1AA, "fabric_summary": 1},
        ),
    ],
)
def test_fabric_fault_is_held_while_gpu_registers_again(
    code: str, broken: dict[str, int], registering: dict[str, int], sound: dict[str, int]
) -> None:
    node = GpuNode(2)
    node.set_readings(0, **broken)
    node.rest(30)
    assert (node.health(), node.codes()) == (Health.UNHEALTHY, [code])
    for state in (1, 2):
        node.set_readings(0, fabric_state=state, **registering)
        node.rest(25)
        assert (node.health(), node.codes()) == (Health.UNHEALTHY, [code])
    node.set_readings(0, fabric_state=3, **sound)
    node.rest(30)
    assert f"{code}: " in node.verdict().message
    assert "(over; reported until " in node.verdict().message
    node.rest(PROBATION_S)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_idle_time_between_two_slow_readings_is_no_time_under_load() -> None:
    node = GpuNode(2)
    node.set_readings(0, pcie_gen=1, utilization=90, pstate=0)
    node.rest(1)
    node.set_readings(0, utilization=0, pstate=8)
    node.rest(600)
    node.set_readings(0, utilization=90, pstate=0)
    node.next()
    assert node.codes() == []
    node.rest(40)
    assert node.codes() == ["gpu.pcie.gen"]


def test_time_without_a_pass_does_not_confirm_a_finding() -> None:
    node = GpuNode(1)
    node.rest(30)
    node.set_readings(0, pcie_gen=1, utilization=90, pstate=0)
    node.next()
    for _ in range(4):
        node.wait(10)
        assert "gpu.pcie.gen" not in node.codes(), "one pass in 30 s"


def test_time_in_which_the_agent_is_stopped_does_not_confirm_a_finding() -> None:
    node = GpuNode(1)
    node.rest(30)
    node.set_readings(0, pcie_gen=1, utilization=90, pstate=0)
    node.next()
    for _ in range(2):
        node.wait(70)
        node.next(2)
        assert "gpu.pcie.gen" not in node.codes(), "four readings in 140 s"
    node.next(30)
    assert "gpu.pcie.gen" in node.codes()


def evaluate_late(node: GpuNode, delay_s: float) -> Report:
    """Evaluate a delay after the time at which the engine needs it; all sources make a pass each second."""
    due_ns = max(node.state.due_ns or sys.maxsize, node.now_ns + NS // 10)
    wait_s = min(10, (due_ns - node.now_ns) / NS) + delay_s
    for _ in range(int(wait_s)):
        node.read()
    node.wait(wait_s % 1)
    return node.evaluate()


@pytest.mark.parametrize("delay_s", [1.5, 5])
@pytest.mark.parametrize(
    ("readings", "code", "limit_s"),
    [
        ({"pcie_gen": 1, "utilization": 90, "pstate": 0}, "gpu.pcie.gen", 30),
        ({"fabric_state": 2}, "gpu.fabric.state", 60),
    ],
)
def test_pending_fault_is_raised_on_a_busy_machine(
    delay_s: float, readings: dict[str, int], code: str, limit_s: int
) -> None:
    node = GpuNode(1)
    node.rest(30)
    node.set_readings(0, **readings)
    node.next()
    begin_ns = node.now_ns
    while code not in codes(device_of(evaluate_late(node, delay_s), "gpu-0")):
        assert node.now_ns - begin_ns <= 2 * limit_s * NS


@pytest.mark.parametrize("delay_s", [1.5, 5])
def test_hang_of_a_source_on_a_busy_machine_is_found_in_two_heartbeats(delay_s: float) -> None:
    node = GpuNode(1)
    node.rest(30)
    node.stuck = {"cpus", "hugepages", "cgroups", "throttle"}
    begin_ns = node.now_ns
    while not list(sources_in_state(evaluate_late(node, delay_s).sources, SourceState.STALLED)):
        assert node.now_ns - begin_ns <= 2 * (10 + delay_s) * NS


def test_pause_after_an_unread_field_delays_a_pending_fault_once() -> None:
    node = GpuNode(1)
    node.rest(30)
    node.set_readings(0, pcie_gen=1, utilization=90, pstate=0)
    node.next(20)
    node.set_readings(0, pcie_gen=Missing(Absence.UNREADABLE, 5))
    node.next()
    node.set_readings(0, pcie_gen=1)
    node.wait(600)
    node.next(13)
    assert "gpu.pcie.gen" in node.codes()


def test_recovery_action_is_the_first_cause() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=2)
    node.xid(0, 48)
    device = node.verdict()
    assert codes(device) == ["gpu.recovery_action", "gpu.xid.48"]
    assert "reboot the node" in device.message


# --- clock steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
def test_wall_clock_step_of_a_day_changes_no_verdict(step_s: float) -> None:
    def public_verdicts(node: GpuNode) -> object:
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
        assert public_verdicts(steady) == public_verdicts(stepped), minute


# --- random sequences of events -----------------------------------------------------------------------------

numbers = st.integers(0, 1)
instances = st.sampled_from([(WHOLE_GPU, WHOLE_GPU), (1, 0), (2, WHOLE_GPU)])
xids = st.sampled_from(
    [13, 31, 43, 45, 46, 48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 149, 154, 155, 162, 163, 999]
)
events = st.one_of(
    st.tuples(st.just("xid"), numbers, xids, instances),
    st.tuples(st.just("nvml_xid"), numbers, xids, instances),
    st.tuples(st.just("log_xid"), numbers, xids),
    st.tuples(st.just("nvml_event"), numbers, st.sampled_from(GpuEvent)),
    st.tuples(st.just("action"), numbers, st.sampled_from([0, 1, 2, 9, EIO])),
    st.tuples(st.just("pending"), numbers, st.sampled_from([0, 1, EIO])),
    st.tuples(st.just("links"), numbers, st.sampled_from([0, 1, (1 << 18) - 1])),
    st.tuples(st.just("lose"), numbers, st.sampled_from([15, 16, 28, 999])),
    st.tuples(st.just("recover"), numbers),
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


def apply_event(node: GpuNode, event: str, arguments: list[Any]) -> None:
    """Apply one event of a story."""
    match event, arguments:
        case "xid", [number, code, (gi, ci)]:
            node.xid(number, code, gi, ci)
        case "nvml_xid", [number, code, (gi, ci)]:
            node.nvml_xid(number, code, gi, ci)
        case "log_xid", [number, code]:
            node.log_xid(number, code)
        case "nvml_event", [number, gpu_event]:
            node.nvml_event(number, gpu_event)
        case "action", [number, action]:
            node.set_readings(number, recovery_action=action)
        case "pending", [number, pending]:
            node.set_readings(number, remap_pending=pending)
        case "links", [number, up]:
            node.set_readings(number, links_up=up)
        case "lose", [number, status]:
            node.lose(number, status)
        case "recover", [number]:
            node.recover(number)
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
def test_any_sequence_of_events_reports_current_faults(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    for event, *arguments in story:
        apply_event(node, event, arguments)
        report = node.next()
        for number, gpu in node.gpus.items():
            device = device_of(report, f"gpu-{number}")
            action = gpu.readings.get(GpuField.RECOVERY_ACTION)
            if number not in node.hanging and (action in (1, 2, 9) or gpu.status in (15, 16)):
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
def test_instance_is_never_healthier_than_its_gpu(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    for event, *arguments in story:
        apply_event(node, event, arguments)
        report = node.next()
        parent = device_of(report, "gpu-0")
        for device in report.devices:
            if device.device.startswith("gpu-0-mig"):
                assert device.severity >= parent.severity or parent.severity <= Severity.INFO


CURED_BY_ACTION: Final = (48, 94, 95, 119, 120, 140, 143)


@settings(max_examples=settings().max_examples // 5)  # an hour has 360 evaluations: 0.5 s of CPU
@given(stories, st.sampled_from(CURED_BY_ACTION))
def test_gpu_is_healthy_an_hour_after_resolved_fault(story: list[Any], code: int) -> None:
    node = GpuNode(2)
    for event, *arguments in story:
        if event in ("rest", "wall", "restart", "recover", "action", "lose", "hang", "return"):
            apply_event(node, event, arguments)
            node.next()
    for number in (0, 1):
        node.return_from_hang(number)
        node.recover(number)
    node.xid(0, code)
    node.evaluate()
    node.rest(3600)
    assert [(d.device, d.health) for d in node.evaluate().devices if d.device.startswith("gpu")] == [
        ("gpu-0", Health.HEALTHY),
        ("gpu-1", Health.HEALTHY),
    ]


@given(stories)
def test_replayed_sequence_gives_equal_reports(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    state = node.state
    history: list[tuple[Snapshot, Instant, Report]] = []
    for event, *arguments in story:
        if event in ("restart", "rest"):
            continue
        apply_event(node, event, arguments)
        node.read()
        seen, now = node.snapshot(), node.now
        history.append((seen, now, node.evaluate()))
    for seen, now, report in history:
        frozen = copy.deepcopy((state, seen))
        state, again = step(state, seen, now)
        assert again == report
        assert step(*frozen, now) == (state, again)


@given(stories)
def test_second_evaluation_at_same_time_gives_same_gpu_verdicts(story: list[Any]) -> None:
    node = GpuNode(2, migs={0: [(1, 0)]})
    for event, *arguments in story:
        apply_event(node, event, arguments)
        node.read()
        first, second = node.evaluate(), node.evaluate()
        assert second.devices == first.devices


@pytest.mark.parametrize(
    ("field", "code", "events"),
    [
        ("ecc_correctable", "gpu.ecc.correctable_rate", 1000),
        ("link_replay", "gpu.nvlink.errors", 1),
        ("pcie_replay", "gpu.pcie.replay", 9),
    ],
)
@pytest.mark.parametrize("reloaded", [False, True], ids=["counter reset", "driver reloaded"])
def test_reset_of_the_counter_ends_its_cause(field: str, code: str, events: int, *, reloaded: bool) -> None:
    node = GpuNode()
    node.rest(20)
    node.set_readings(0, **{field: events})
    node.rest(5)
    assert node.codes() == [code]
    if reloaded:
        node.lose(0, NvmlReturnCode.UNINITIALIZED)
        node.rest(90)
        node.recover(0)
        node.rest(15)
        codes = set(node.codes())
    else:
        node.set_readings(0, **{field: 0})
        node.rest(15)
        codes = set(node.codes())
    assert code not in codes
