"""Checkpoint of GPU faults: faults survive restarts, some survive reboots, none passes to another GPU."""

from dataclasses import replace

import pytest
from gpu_samples import gpu_sample
from paper import codes, device_of
from paper_gpus import FIRST_BOOT, OLD_DRIVER, SECOND_BOOT, THIRD_BOOT, GpuNode

from agent.health.gpu.faults.checkpoint import (
    KEPT_MAX,
    build_checkpoint,
    restore_faults,
    with_present_times,
)
from agent.model.gpu import WHOLE_GPU, NvmlReturnCode
from agent.model.health import Health, Severity, XidOverride
from agent.model.persistent_faults import Cure, KnownGpu, PersistentFault, PersistentState
from agent.model.reading import SourceState
from agent.model.settings import GpuLimits, RuleOverride
from agent.model.time import NS, WALL_MAX_S, Instant
from agent.store.gpu_fault_file import SIZE_MAX, decode_gpu_faults, encode_gpu_faults

DAY_S = 86_400
INSTANCES = ("gpu-0-mig-1-0", "gpu-0-mig-2-0")


def public_verdict(node: GpuNode, name: str = "gpu-0") -> object:
    """Return what clients see of a device, without the time of its verification."""
    device = node.verdict(name)
    causes = [(cause, round(cause.since.wall_s)) for cause in device.causes if cause.severity > Severity.INFO]
    return (
        device.health,
        device.message,
        round(device.since.wall_s),
        [(replace(cause, since=Instant(0, 0.0)), since_s) for cause, since_s in causes],
    )


# --- the same boot ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [0.1, 5.0, 7200.0])
@pytest.mark.parametrize("code", [48, 62, 79, 119])
def test_restart_during_fault_reports_same_verdict_at_once(code: int, away_s: float) -> None:
    node = GpuNode()
    node.rest(3)
    node.set_readings(0, recovery_action=1)
    node.xid(0, code)
    node.rest(30)
    before = public_verdict(node)
    node.restart(away_s=away_s, evaluate=False)
    first = node.evaluate()
    assert device_of(first, "gpu-0").health is Health.UNHEALTHY
    assert public_verdict(node)[:1] == before[:1]
    node.next()
    assert [c.since.wall_s for c in node.verdict().causes if c.code == f"gpu.xid.{code}"] == pytest.approx(
        [since for cause, since in before[3] if cause.code == f"gpu.xid.{code}"], abs=1
    )


def test_first_report_after_restart_equals_last_before() -> None:
    node = GpuNode()
    node.rest(100)
    node.xid(0, 79)
    node.rest(20)
    before = public_verdict(node)
    node.restart()
    assert public_verdict(node) == before


def test_all_causes_survive_restart() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    for _ in range(2):
        node.xid(0, 94)
        node.rest(100)
    before = node.verdict()
    assert before.health is Health.UNHEALTHY, "it recurs"
    node.restart()
    assert (node.verdict().message, node.health()) == (before.message, Health.UNHEALTHY)
    node.rest(1000)
    assert (node.verdict().message, node.health()) == (before.message, Health.UNHEALTHY)


def test_sxid_verdict_survives_restart() -> None:
    node = GpuNode()
    node.rest(1)
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11004, Fatal, something without a port")
    before = public_verdict(node)
    assert node.health() is Health.UNHEALTHY
    node.restart()
    node.rest(100)
    assert public_verdict(node) == before


def test_suspicion_after_second_boot_survives_restart() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.evaluate()
    node.restart(boot_id=SECOND_BOOT, away_s=20 * 86_400)
    node.rest(100)
    node.xid(0, 79)
    before = node.cause("gpu.xid.79").advice
    node.restart()
    assert node.cause("gpu.xid.79").advice == before


def test_old_log_lines_do_not_raise_resolved_fault() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=5)
    node.next()
    node.xid(0, 46)
    node.rest(20)
    node.reset(0)
    node.rest(100)
    assert node.codes() == []
    for _ in range(3):
        node.restart(away_s=60)
        node.rest(30)
        assert node.codes() == []


def test_log_lines_written_while_stopped_raise_fault() -> None:
    node = GpuNode()
    node.rest(5)
    node.log_xid(0, 79)
    node.restart()
    assert node.codes() == ["gpu.xid.79"]
    assert node.times(0, 79) == 1


def test_recurrence_while_stopped_raises_resolved_fault() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=5)
    node.next()
    node.xid(0, 46)
    node.next()
    node.reset(0)
    node.rest(100)
    assert node.codes() == []
    node.log_xid(0, 46)
    node.restart(away_s=30)
    assert node.codes() == ["gpu.xid.46"]


def test_restart_in_probation_keeps_probation() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.evaluate()
    node.rest(30)
    assert node.health() is Health.UNHEALTHY
    node.restart()
    assert node.health() is Health.UNHEALTHY
    node.rest(75)
    assert node.health() is Health.HEALTHY
    node.restart()
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_restarts_do_not_prolong_probation() -> None:
    node = GpuNode(probation_s=600.0)
    node.xid(0, 48)
    node.rest(12)
    ended = node.now_ns
    for _ in range(6):
        node.rest(60)
        assert node.health() is Health.UNHEALTHY
        before = node.cause("gpu.xid.48")
        node.restart(away_s=30)
        after = node.cause("gpu.xid.48")
        assert "(over; reported until " in after.evidence
        assert (after.severity, after.since) == (before.severity, before.since)
    node.rest((ended + 600 * NS - node.now_ns) / NS - 15)
    assert node.health() is Health.UNHEALTHY
    node.rest(15)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_probation_that_ends_while_stopped_needs_a_pass_of_the_new_run() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.rest(30)
    assert node.health() is Health.UNHEALTHY
    node.restart(away_s=42, evaluate=False)
    for _ in range(5):
        node.wait(1)
        assert "gpu.xid.48" in node.codes()
    node.rest(3)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


@pytest.mark.parametrize("code", ["gpu.lost", "gpu.recovery_action", "gpu.xid.109"])
def test_restarts_keep_the_probation_of_a_fault_that_readings_show(code: str) -> None:
    """XID 109 is info as soon as the driver requests no action."""
    node = GpuNode(probation_s=600.0)
    if code == "gpu.lost":
        node.lose(0)
    else:
        node.set_readings(0, recovery_action=1)
    if code == "gpu.xid.109":
        node.xid(0, 109)
    node.rest(20)
    assert node.cause(code).severity is Severity.UNHEALTHY
    node.recover(0)
    node.rest(10)
    ended, over = node.now_ns, node.cause(code)
    assert "(over; reported until " in over.evidence
    for _ in range(4):
        node.restart(away_s=30)
        assert node.cause(code) == over
        node.rest(60)
    node.rest((ended + 600 * NS - node.now_ns) / NS - 30)
    assert node.health() is Health.UNHEALTHY
    node.rest(40)
    assert node.health() is Health.HEALTHY


def test_fault_of_readings_that_ends_while_stopped_has_a_probation() -> None:
    """A GPU can be reset only while the agent is stopped."""
    node = GpuNode()
    node.set_readings(0, recovery_action=1)
    node.rest(5)
    node.reset(0)
    node.restart(away_s=30)
    assert node.health() is Health.UNHEALTHY
    node.rest(50)
    assert "(over; reported until " in node.cause("gpu.recovery_action").evidence
    node.rest(20)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_restart_keeps_a_fault_of_a_rate_until_its_window_is_full() -> None:
    node = GpuNode(correctable_window_s=600)
    for corrected in range(0, 2000, 200):
        node.set_readings(0, ecc_correctable=corrected)
        node.rest(30)
    cause = node.cause("gpu.ecc.correctable_rate")
    node.restart()
    assert node.cause("gpu.ecc.correctable_rate") == cause
    node.restart()
    assert node.cause("gpu.ecc.correctable_rate") == cause
    node.rest(570)
    assert "gpu.ecc.correctable_rate" in node.codes()
    node.rest(60)
    assert node.codes() == []
    assert node.state.checkpoint.conditions == ()


def test_reboot_ends_a_fault_of_readings_without_probation() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=2)
    node.rest(5)
    node.restart(boot_id=SECOND_BOOT, away_s=60)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_recurrence_in_restored_probation_raises_fault() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.rest(30)
    node.restart()
    node.set_readings(0, recovery_action=1)
    node.xid(0, 48)
    assert "over" not in node.cause("gpu.xid.48").evidence
    node.rest(600)
    assert node.health() is Health.UNHEALTHY


def test_reboot_restarts_probation() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.rest(30)
    assert node.health() is Health.UNHEALTHY
    node.restart(boot_id=SECOND_BOOT, away_s=30)
    node.rest(55)
    assert node.health() is Health.UNHEALTHY
    node.rest(15)
    assert node.health() is Health.HEALTHY


def test_restarts_after_a_reboot_do_not_prolong_probation() -> None:
    node = GpuNode(probation_s=600.0)
    node.xid(0, 48)
    node.rest(30)
    node.restart(boot_id=SECOND_BOOT, away_s=30)
    node.rest(30)
    over = node.cause("gpu.xid.48")
    assert "(over; reported until " in over.evidence
    for _ in range(2):
        node.rest(200)
        node.restart()
        assert node.cause("gpu.xid.48") == over
    node.rest(200)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_reboot_restarts_probation_of_a_fault_days_old() -> None:
    node = GpuNode()
    node.xid(0, 46)
    node.wait(3 * 86_400)
    node.rest(1)
    node.restart(boot_id=SECOND_BOOT, away_s=60)
    assert node.health() is Health.UNHEALTHY
    node.rest(75)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_changed_probation_and_severity_of_a_rule_apply_after_restart() -> None:
    node = GpuNode()
    longer = RuleOverride("gpu.xid.48", device="gpu-0", probation_s=300)
    milder = RuleOverride("gpu.xid.48", device="gpu-1", severity=Severity.DEGRADED)
    node.settings = replace(node.settings, rules=(longer, milder))
    node.restart()
    node.xid(0, 48)
    node.xid(1, 48)
    node.rest(30)
    node.restart(away_s=120)
    assert (node.health("gpu-0"), node.health("gpu-1")) == (Health.UNHEALTHY, Health.HEALTHY)
    node.rest(160)
    assert node.health("gpu-0") is Health.HEALTHY


def test_old_line_of_instance_fault_does_not_affect_gpu_after_restart() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.set_readings(0, recovery_action=1)
    node.xid(0, 48, 1, 0)
    node.rest(10)
    node.restart()
    node.reset(0)
    assert "gpu.xid.48" in node.codes(INSTANCES[0])
    assert "gpu.xid.48" not in node.codes(INSTANCES[1])
    assert node.cause("gpu.xid.48").severity is Severity.INFO


def test_uncounted_line_of_counted_event_is_not_counted_again() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.nvml_xid(0, 46, 1, 0)
    node.evaluate()
    node.log_xid(0, 46)
    node.restart()
    assert node.times(0, 46) == 1
    assert [node.health(name) for name in INSTANCES] == [Health.UNHEALTHY, Health.HEALTHY]


def test_instances_are_known_before_nvml_answers() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    node.xid(0, 79)
    node.nvml_xid(1, 46)
    node.rest(5)
    since = node.cause("gpu.xid.79", INSTANCES[1]).since.wall_s
    node.restart(evaluate=False)
    node.nvml = node.nvml._replace(state=SourceState.STARTING, passes=0)
    node.evaluate()
    assert [node.health(name) for name in INSTANCES] == [Health.UNHEALTHY] * 2
    assert node.cause("gpu.xid.79", INSTANCES[1]).since.wall_s == pytest.approx(since, abs=0.01)


def test_reset_while_stopped_is_detected_by_recovery_action() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=1)
    node.xid(0, 46)
    node.rest(20)
    node.reset(0)
    node.restart(away_s=120)
    assert node.health() is Health.UNHEALTHY
    node.rest(80)
    assert node.health() is Health.HEALTHY


def test_reset_while_stopped_is_detected_by_answer_after_reset_required() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 46)
    node.lose(0, NvmlReturnCode.RESET_REQUIRED)
    node.rest(20)
    node.restart()
    node.rest(5)
    node.recover(0, OLD_DRIVER)
    node.restart(away_s=120)
    assert node.health() is Health.UNHEALTHY
    node.rest(80)
    assert node.health() is Health.HEALTHY


# --- another boot, another GPU ------------------------------------------------------------------------------


def beyond_repair(flag: str = "remap_failure") -> GpuNode:
    node = GpuNode()
    node.set_readings(0, **{flag: 1})
    node.xid(0, 64)
    node.rest(5)
    return node


@pytest.mark.parametrize("flag", ["remap_failure", "unrepairable_memory"])
def test_fault_that_needs_replacement_survives_reboots(flag: str) -> None:
    node = beyond_repair(flag)
    before = node.cause("gpu.xid.64")
    for boot in (SECOND_BOOT, THIRD_BOOT):
        node.restart(boot_id=boot, away_s=86_400)
        after = node.cause("gpu.xid.64")
        assert (after.evidence, after.advice, after.severity) == (
            before.evidence,
            before.advice,
            before.severity,
        )
        assert after.since.wall_s == pytest.approx(before.since.wall_s, abs=1)
        node.rest(3600)
        assert node.health() is Health.UNHEALTHY


@pytest.mark.parametrize("code", [157, 161, 164, 165])
def test_worn_out_gpu_stays_degraded_after_a_reset_and_a_reboot(code: int) -> None:
    node = GpuNode(1)
    node.set_readings(0, ecc_correctable=7)
    node.rest(30)
    node.xid(0, code)
    node.rest(30)
    node.reset(0)
    node.rest(700)
    assert node.codes() == [f"gpu.xid.{code}"]
    node.restart(boot_id=SECOND_BOOT)
    node.rest(700)
    assert node.codes() == [f"gpu.xid.{code}"]


def test_boot_without_nvml_keeps_all_faults() -> None:
    node = beyond_repair()
    node.restart(boot_id=SECOND_BOOT, evaluate=False)
    node.nvml = node.nvml._replace(state=SourceState.STARTING, passes=0)
    node.library |= {"call": "nvmlInit_v2", "call_ns": node.now_ns}
    node.rest(100)
    assert node.checkpoint.faults[0].cure is Cure.REPLACE
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.library |= {"call": "", "call_ns": 0}
    node.restart(boot_id=THIRD_BOOT)
    assert "gpu.xid.64" in node.codes()


@pytest.mark.parametrize("boot_id", ["", SECOND_BOOT])
def test_replacement_gpu_does_not_inherit_fault(boot_id: str) -> None:
    node = beyond_repair()
    node.change(0, uuid="GPU-new", serial="new")
    node.reset(0)
    node.set_readings(0, remap_failure=0)
    node.restart(boot_id=boot_id, evaluate=False)
    if boot_id == "":
        assert node.kmsg is not None
        node.kmsg.forget()
    node.next()
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])
    assert dict(node.verdict().attributes)["uuid"] == "GPU-new"
    node.rest(5)
    assert [saved for saved in node.checkpoint.faults if not saved.healed] == []


def test_configured_severity_ends_fault_that_needs_replacement() -> None:
    node = beyond_repair()
    node.settings = replace(node.settings, gpu=GpuLimits(xids=((64, XidOverride.IGNORE),)))
    node.set_readings(0, remap_failure=0)
    node.restart()
    node.rest(80)
    assert (node.health(), node.codes()) == (Health.HEALTHY, [])


def test_fault_follows_gpu_to_another_slot() -> None:
    node = beyond_repair()
    first, other = node.gpus[0], node.gpus[1]
    node.gpus[0] = replace(other, index=0, bus=first.bus)
    node.gpus[1] = replace(first, index=1, bus=other.bus)
    node.restart(boot_id=SECOND_BOOT)
    assert dict(node.verdict("gpu-0").attributes)["uuid"] == first.uuid
    assert "gpu.xid.64" in node.codes("gpu-0")
    assert node.codes("gpu-1") == []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_fault_follows_gpu_if_an_added_gpu_is_identified_first(order: tuple[int, ...]) -> None:
    """The added GPU has a lower slot, so that the PCI addresses of the others have moved."""
    node = beyond_repair()
    node.restart(boot_id=SECOND_BOOT, evaluate=False)
    first, other = node.gpus[0], node.gpus[1]
    added = gpu_sample(number=9, uuid="GPU-added", bus=first.bus)
    identified = (added, replace(first, bus=other.bus), replace(other, bus="0000:5b:00.0"))
    node.gpus = {
        index: replace(gpu, index=index, uuid="", bus="", passes=0, beat_ns=node.now_ns)
        for index, gpu in enumerate(identified)
    }
    assert "gpu.xid.64" in node.codes("gpu-0")
    for index in order:
        node.gpus[index] = replace(identified[index], index=index, passes=1, beat_ns=node.now_ns)
        found = [code for device in node.evaluate().devices for code in codes(device)]
        assert "gpu.missing" not in found
    node.rest(5)
    devices = [device for device in node.evaluate().devices if device.device.startswith("gpu-")]
    uuids = [dict(device.attributes)["uuid"] for device in devices]
    assert uuids == [first.uuid, other.uuid, "GPU-added"]
    assert "gpu.xid.64" in node.codes("gpu-0")
    assert (node.codes("gpu-1"), node.codes("gpu-2")) == ([], [])


def test_logged_xid_belongs_to_the_gpu_that_has_the_address_now() -> None:
    node = GpuNode(gpus=3)
    node.rest(5)
    last = node.gpus.pop(2)
    node.change(1, bus=last.bus)
    node.restart(boot_id=SECOND_BOOT)
    node.rest(5)
    node.log_xid(1, 62)
    node.rest(5)
    assert node.codes("gpu-1") == ["gpu.xid.62"]
    assert node.codes("gpu-2") == ["gpu.missing"]


@pytest.mark.parametrize("state", [SourceState.OK, SourceState.STARTING])
def test_xid_logged_before_nvml_is_read_is_of_the_gpu_of_this_boot(
    state: SourceState,
) -> None:
    """An added card has moved the PCI addresses of the GPUs since the last boot."""
    node = GpuNode()
    node.rest(5)
    first, other = node.gpus[0], node.gpus[1]
    node.restart(boot_id=SECOND_BOOT, evaluate=False)
    moved = (replace(first, bus=other.bus), replace(other, bus="0000:5b:00.0"))
    node.nvml = node.nvml._replace(state=state)
    node.gpus = {
        index: replace(gpu, index=index, uuid="", bus="", passes=0, beat_ns=node.now_ns)
        for index, gpu in enumerate(moved)
    }
    node.log(f"NVRM: Xid (PCI:{other.bus.removesuffix('.0')}): 79, GPU has fallen off the bus.")
    node.evaluate()
    node.nvml = node.nvml._replace(state=SourceState.OK)
    for index, gpu in enumerate(moved):
        node.gpus[index] = replace(gpu, index=index, passes=1, beat_ns=node.now_ns)
    node.rest(5)
    assert (node.codes("gpu-0"), node.codes("gpu-1")) == (["gpu.xid.79"], [])


def test_xid_of_a_gpu_that_hangs_at_first_is_reported_after_the_deadline() -> None:
    node = GpuNode()
    node.rest(5)
    node.restart(boot_id=SECOND_BOOT, evaluate=False)
    node.log_xid(1, 79)
    node.change(1, uuid="", bus="", passes=0, beat_ns=node.now_ns)
    node.hang(1)
    assert "gpu.xid.79" not in [code for device in node.rest(1).devices for code in codes(device)]
    node.rest(node.limits.deadline_s)
    assert node.health("gpu-1") is Health.UNHEALTHY
    assert "gpu.xid.79" in node.codes("gpu-1")


def test_lower_expected_gpu_count_keeps_faults_of_present_gpus_at_restart() -> None:
    node = GpuNode(gpus=3, kmsg=False)
    node.nvml_xid(2, 62)
    node.rest(30)
    del node.gpus[0]
    node.settings = replace(node.settings, gpu=GpuLimits(expect=2))
    node.nvml = node.nvml._replace(state=SourceState.STARTING)
    node.restart()
    node.nvml = node.nvml._replace(state=SourceState.OK)
    report = node.rest(10)
    assert [device.device for device in report.devices if device.device.startswith("gpu-")] == [
        "gpu-1",
        "gpu-2",
    ]
    assert node.codes("gpu-2") == ["gpu.xid.62"]


def test_missing_boot_id_resolves_no_fault() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.evaluate()
    node.boot_id = ""
    node.restart()
    node.rest(300)
    assert node.health() is Health.UNHEALTHY


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0])
def test_wall_clock_step_while_stopped_changes_no_verdict(step_s: float) -> None:
    steady, stepped = GpuNode(readings=OLD_DRIVER), GpuNode(readings=OLD_DRIVER)
    for node in (steady, stepped):
        node.xid(0, 94)
        node.rest(100)
        node.xid(0, 79)
        node.rest(100)
    stepped.wall_s += step_s
    for node in (steady, stepped):
        node.restart(away_s=60)
    for _ in range(10):
        assert public_verdict(steady)[:2] == public_verdict(stepped)[:2]
        steady.rest(60)
        stepped.rest(60)


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
def test_clock_step_while_stopped_does_not_change_probation(step_s: float) -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.rest(30)
    node.wall_s += step_s
    node.restart()
    assert node.health() is Health.UNHEALTHY
    node.rest(75)
    assert node.health() is Health.HEALTHY


def test_clock_step_while_stopped_keeps_bursts_of_the_day() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 94)
    node.rest(100)
    node.wall_s += 2 * 86_400
    node.restart()
    node.xid(0, 94)
    assert node.health() is Health.UNHEALTHY, "it recurs"


def test_fault_of_file_without_monotonic_times_has_times_by_wall_clock() -> None:
    now = Instant(10**12, 1.7e9)
    saved = kept_fault(first_wall_s=now.wall_s - 100, last_wall_s=now.wall_s - 10)
    memory = decode_gpu_faults(encode_gpu_faults(PersistentState((KnownGpu(0, "GPU-0", "", ""),), (saved,))))
    (fault,) = restore_faults(memory, FIRST_BOOT, GpuLimits(), now).faults.faults.values()
    assert (fault.first.mono_ns, fault.last.mono_ns) == (now.mono_ns - 100 * NS, now.mono_ns - 10 * NS)


def test_monotonic_times_of_another_boot_are_ignored() -> None:
    now = Instant(10**12, 1.7e9)
    saved = kept_fault(cure=Cure.REPLACE, last_wall_s=now.wall_s - 10, last_ns=5 * NS)
    memory = PersistentState((KnownGpu(0, "GPU-0", "", ""),), (saved,))
    (fault,) = restore_faults(memory, SECOND_BOOT, GpuLimits(), now).faults.faults.values()
    assert fault.last.mono_ns == now.mono_ns - 10 * NS


@pytest.mark.parametrize("behind_s", [0, 4 * DAY_S, 6 * DAY_S, 400 * DAY_S])
def test_reboot_with_clock_behind_raises_no_ended_fault(behind_s: int) -> None:
    node = GpuNode()
    node.lose(0)
    node.xid(0, 79)
    node.rest(100)
    node.recover(0)
    node.restart(boot_id=SECOND_BOOT)
    node.rest(300)
    assert node.health() is Health.HEALTHY
    node.wall_s -= behind_s
    node.restart(boot_id=THIRD_BOOT, away_s=5 * DAY_S, evaluate=False)
    assert node.state.conditions == {}
    node.next()
    assert node.health() is Health.HEALTHY


def test_reboot_with_clock_behind_keeps_stored_times() -> None:
    now = Instant(30 * NS, 1.7e9)
    past_s = now.wall_s - 5 * DAY_S
    ended = kept_fault(
        first_wall_s=past_s, last_wall_s=past_s, bursts_wall_s=(past_s,), pids=(0,),
        healed=True, healed_wall_s=past_s + 600,
    )  # fmt: skip
    stored = PersistentState(
        (KnownGpu(0, "GPU-0", "", ""),), (ended, ended._replace(code="gpu.xid.64", cure=Cure.REPLACE))
    )
    behind = replace(now, wall_s=now.wall_s - 400 * DAY_S)
    restored = restore_faults(stored, SECOND_BOOT, GpuLimits(), behind)
    log = with_present_times(restored.faults, now)
    assert (restored.conditions, log) == ({}, restored.faults)
    saved = build_checkpoint(log, {}, stored.gpus, {}).faults
    assert {(f.first_wall_s, f.last_wall_s, f.bursts_wall_s, f.healed_wall_s) for f in saved} == {
        (past_s, past_s, (past_s,), past_s + 600)
    }


@pytest.mark.parametrize("behind_s", [0, 6 * DAY_S, 400 * DAY_S])
def test_boot_with_clock_behind_does_not_hide_recurrence(behind_s: int) -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.rest(100)
    node.wall_s -= behind_s
    node.restart(boot_id=SECOND_BOOT, away_s=5 * DAY_S)
    node.rest(300)
    node.wall_s += behind_s
    node.restart(boot_id=THIRD_BOOT)
    node.rest(300)
    node.xid(0, 79)
    assert "recurred within 30 days" in node.cause("gpu.xid.79").evidence


def test_fault_before_the_clock_is_set_is_stored_with_the_right_time() -> None:
    node = GpuNode()
    right_s = node.wall_s
    node.wall_s -= 400 * DAY_S
    node.xid(0, 79)
    node.rest(30)
    node.wall_s += 400 * DAY_S
    node.rest(30)
    (fault,) = node.checkpoint.faults
    assert (fault.first_wall_s, *fault.bursts_wall_s) == pytest.approx((right_s, right_s), abs=1)
    before = node.checkpoint
    node.rest(100)
    assert node.checkpoint is before


# --- content of the checkpoint ------------------------------------------------------------------------------


def test_repeats_change_only_counts_in_checkpoint() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.evaluate()
    before = node.checkpoint
    node.rest(60)
    assert node.checkpoint is before
    node.xid(0, 79)
    node.evaluate()
    assert node.checkpoint != before


def test_info_fault_is_not_in_checkpoint() -> None:
    node = GpuNode()
    node.xid(0, 13)
    node.xid(1, 79)
    node.evaluate()
    assert [saved.code for saved in node.checkpoint.faults] == ["gpu.xid.79"]


def test_largest_checkpoint_fits_file_limit() -> None:
    node = GpuNode(15, readings=OLD_DRIVER)
    text = "x" * 200
    for burst in range(16):
        for number in range(15):
            for code in range(1000, 1064):
                node.log_xid(number, code, f"pid={burst}, name=python, {text}")
        node.evaluate()
        node.wait(61)
    assert len(node.checkpoint.faults) == KEPT_MAX
    assert len(encode_gpu_faults(node.checkpoint)) < SIZE_MAX


def test_gpu_without_uuid_is_not_in_checkpoint() -> None:
    node = GpuNode(1)
    node.change(0, uuid="", bus="", name="")
    fresh = GpuNode(1)
    fresh.gpus = node.gpus
    fresh.restart()
    assert fresh.checkpoint.gpus[-1].uuid != ""


def kept_fault(**fields: object) -> PersistentFault:
    plain = PersistentFault(
        uuid="GPU-0", code="gpu.xid.79", gi=WHOLE_GPU, ci=WHOLE_GPU, times=1, first_wall_s=1e9,
        last_wall_s=1e9, log_us=1, boot_id=FIRST_BOOT, cure=Cure.REBOOT, healed=False, evidence="",
        advice="", severity=4,
    )  # fmt: skip
    return plain._replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"code": "gpu.xid."},
        {"code": "gpu.xid.many"},
        {"code": "gpu.fabric.sxid.²"},
        {"code": "gpu.lost"},
        {"code": "cpu.offline"},
        {"code": ""},
        {"uuid": "GPU-of-another-node"},
    ],
)
def test_unknown_entry_of_checkpoint_is_left_out(fields: dict[str, object]) -> None:
    memory = PersistentState((KnownGpu(0, "GPU-0", "", ""),), (kept_fault(**fields),))
    restored = restore_faults(
        decode_gpu_faults(encode_gpu_faults(memory)), FIRST_BOOT, GpuLimits(), Instant(10**12, 1.7e9)
    )
    assert (restored.faults.faults, restored.conditions) == ({}, {})


def test_losses_in_earlier_boots_that_release_0_1_stored_are_a_recurrence() -> None:
    kept = kept_fault(
        earlier_boots=1, bursts_wall_s=(1.7e9,), pids=(7, 8), first_wall_s=1.7e9, last_wall_s=1.7e9
    )
    memory = PersistentState((KnownGpu(0, "GPU-0", "", ""),), (kept,))
    restored = restore_faults(memory, FIRST_BOOT, GpuLimits(), Instant(10**12, 1.7e9 + 60))
    (fault,) = restored.faults.faults.values()
    assert [(burst.start.wall_s, burst.pid) for burst in fault.bursts] == [(1.7e9, 7), (1.7e9, 8)]


@pytest.mark.parametrize("wall_s", [-1e300, 0.0, 1e18, 1e300])
def test_impossible_times_in_checkpoint_are_accepted(wall_s: float) -> None:
    memory = PersistentState(
        (KnownGpu(0, "GPU-0", "", ""),),
        (kept_fault(first_wall_s=wall_s, last_wall_s=wall_s, bursts_wall_s=(wall_s,)),),
    )
    now = Instant(10**12, 1.7e9)
    restored = restore_faults(decode_gpu_faults(encode_gpu_faults(memory)), FIRST_BOOT, GpuLimits(), now)
    (fault,) = restored.faults.faults.values()
    assert 0 <= fault.first.wall_s <= WALL_MAX_S
    assert build_checkpoint(restored.faults, {}, memory.gpus, {}).gpus == memory.gpus


def test_missing_gpu_stays_in_checkpoint() -> None:
    node = GpuNode()
    node.lose(0)
    node.xid(0, 79)
    node.rest(5)
    node.restart(evaluate=False)
    node.change(0, uuid="", bus="", name="", serial="", status=NvmlReturnCode.LOST)
    node.next()
    assert node.codes("gpu-0")[:1] in (["gpu.lost"], ["gpu.xid.79"])
    assert dict(node.verdict("gpu-0").attributes)["uuid"] == "GPU-00000000"
