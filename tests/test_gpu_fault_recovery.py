"""End of latched faults: by the recovery action, a detected reset, a reboot, or time."""

from dataclasses import replace

import pytest
from gpu_samples import H100
from paper_gpus import OLD_DRIVER, SECOND_BOOT, THIRD_BOOT, GpuNode

from agent.model.gpu import WHOLE_GPU, GpuEvent, NvmlReturnCode, XidCount
from agent.model.health import Blame, Health, Severity
from agent.model.reading import SourceState
from agent.model.time import NS

UNTIL_RESET = (46, 62, 64)
UNTIL_REBOOT = (79, 54)
H100_LINKS = (1 << 18) - 1
FABRIC_ERROR = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12020, Fatal, Link 30 egress sequence id error"


def seconds_until_healthy(node: GpuNode, name: str = "gpu-0", limit_s: int = 300) -> int:
    """Return the time until a device is Healthy [s]."""
    start_ns = node.now_ns
    while node.health(name) is not Health.HEALTHY:
        assert node.now_ns - start_ns < limit_s * NS, f"{name} is not healthy after {limit_s} s"
        node.rest(1)
    return round((node.now_ns - start_ns) / NS)


# --- recovery action none -----------------------------------------------------------------------------------


def test_action_none_resolves_fault_after_10_s_then_probation_follows() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.evaluate()
    node.rest(9)
    assert not any(fault.resolved for fault in node.state.gpus.fault_log.faults.values())
    assert 10 + 60 <= 9 + seconds_until_healthy(node) <= 10 + 60 + 5


def test_resolution_time_counts_from_last_occurrence() -> None:
    node = GpuNode()
    for _ in range(5):
        node.xid(0, 48)
        node.evaluate()
        node.rest(8)
    assert not any(fault.resolved for fault in node.state.gpus.fault_log.faults.values())


@pytest.mark.parametrize("pending", ["remap_pending", "remap_failure"])
def test_pending_remapping_keeps_fault_unresolved(pending: str) -> None:
    node = GpuNode()
    node.set_readings(0, **{pending: 1})
    node.xid(0, 48)
    node.rest(600)
    assert "gpu.xid.48" in node.codes()
    node.reset(0)
    node.set_readings(0, **{pending: 0})
    assert seconds_until_healthy(node) <= 10 + 60 + 5


def test_requested_action_keeps_fault_unresolved() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=1)
    node.xid(0, 48)
    node.rest(3600)
    assert node.codes() == ["gpu.recovery_action", "gpu.xid.48"]
    node.reset(0)
    assert 60 <= seconds_until_healthy(node) <= 66


def test_driver_without_action_field_does_not_resolve_fault() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 48)
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY


def test_action_read_before_fault_does_not_resolve_it() -> None:
    node = GpuNode()
    node.xid(0, 119)
    node.hang(0)
    node.rest(40)
    assert not any(fault.resolved for fault in node.state.gpus.fault_log.faults.values())
    node.return_from_hang(0)
    node.rest(2)
    assert all(fault.resolved for fault in node.state.gpus.fault_log.faults.values())


@pytest.mark.parametrize("reporter", ["nvml", "log"])
def test_fault_that_ended_before_its_first_evaluation_is_reported(reporter: str) -> None:
    node = GpuNode()
    node.nvml_xid(0, 48) if reporter == "nvml" else node.log_xid(0, 48)
    for _ in range(30):  # the agent gets no CPU time for its evaluations
        node.read()
    assert node.cause("gpu.xid.48").severity is Severity.UNHEALTHY
    assert 60 <= seconds_until_healthy(node) <= 60 + 5


def test_fault_that_recurred_and_ended_between_evaluations_is_reported() -> None:
    node = GpuNode()
    node.xid(0, 48)
    seconds_until_healthy(node)
    node.xid(0, 48)
    for _ in range(30):
        node.read()
    assert node.cause("gpu.xid.48").severity is Severity.UNHEALTHY
    assert 60 <= seconds_until_healthy(node) <= 60 + 5


@pytest.mark.parametrize(("gap_s", "times"), [(5, 12), (70, 1)])
def test_fault_that_got_worse_and_ended_between_evaluations_is_reported(gap_s: int, times: int) -> None:
    node = GpuNode()
    node.xid(0, 94)
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED
    node.wait(gap_s)
    node.xid(0, 94, times=times)
    for _ in range(30):
        node.read()
    assert node.cause("gpu.xid.94").severity is Severity.UNHEALTHY
    assert 60 <= seconds_until_healthy(node) <= 60 + 5


def test_late_event_of_resolved_fault_does_not_report_it_again() -> None:
    node = GpuNode()
    node.log_xid(0, 48)
    occurred_ns = node.now_ns
    seconds_until_healthy(node)
    node.change(0, xids=(XidCount(48, WHOLE_GPU, WHOLE_GPU, 1, occurred_ns, occurred_ns),))
    assert node.health() is Health.HEALTHY


# --- probation ----------------------------------------------------------------------------------------------


def test_new_fault_in_probation_is_raised_at_once_and_restarts_it() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.evaluate()
    node.rest(40)
    (fault,) = node.state.gpus.fault_log.faults.values()
    assert fault.resolved, "in probation"
    node.xid(0, 95)
    assert node.codes()[0] in ("gpu.xid.48", "gpu.xid.95")
    assert 70 <= seconds_until_healthy(node) <= 76


def test_same_fault_in_probation_is_another_burst() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.evaluate()
    node.rest(75)
    node.xid(0, 48)
    node.evaluate()
    (fault,) = node.state.gpus.fault_log.faults.values()
    assert (fault.times, len(fault.bursts), fault.resolved) == (1, 2, None)
    assert 70 <= seconds_until_healthy(node) <= 76


def test_alternating_pending_flag_does_not_flap_verdict() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 94)
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED
    for pending in (1, 0, 1, 0):
        node.set_readings(0, remap_pending=pending)
        node.rest(4)
        assert node.cause("gpu.xid.94").severity is Severity.UNHEALTHY
    assert 50 <= seconds_until_healthy(node) <= 66
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED


# --- a reset ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_fault_that_needs_reset_is_not_resolved_by_action_none(code: int) -> None:
    node = GpuNode()
    node.xid(0, code)
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_cleared_volatile_counters_show_a_reset(code: int) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=7)
    node.next()
    node.xid(0, code)
    node.next(2)
    node.reset(0)
    assert seconds_until_healthy(node) <= 66


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_ecc_counts_cleared_by_an_operator_show_no_reset(code: int) -> None:
    """A reset would clear the count of PCIe replays too."""
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=7, pcie_replay=7)
    node.next()
    node.xid(0, code)
    node.rest(90)  # the replays are no finding any more
    node.set_readings(0, ecc_correctable=0)
    node.rest(300)
    assert node.health() is Health.UNHEALTHY
    node.set_readings(0, pcie_replay=1)
    assert seconds_until_healthy(node) <= 66


@pytest.mark.parametrize("persistence", [0, 1])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_counts_of_a_closed_gpu_show_a_reset_with_persistence_only(
    is_restarted: bool, persistence: int
) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=7, persistence=persistence)
    node.xid(0, 46)
    node.next(2)
    if is_restarted:
        node.restart(evaluate=False)
    else:
        node.change(0, status=NvmlReturnCode.UNINITIALIZED)
        node.next()
        node.change(0, status=0)
    node.set_readings(0, ecc_correctable=0)
    node.rest(100)
    assert ("gpu.xid.46" in node.codes()) is (persistence == 0)
    node.set_readings(0, ecc_correctable=1)
    node.next()
    node.reset(0)
    node.rest(100)
    assert node.codes() == (["gpu.driver.persistence_off"] if persistence == 0 else [])


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_withdrawn_recovery_action_shows_a_reset(code: int) -> None:
    node = GpuNode()
    node.xid(0, code)
    node.set_readings(0, recovery_action=1)
    node.rest(20)
    node.set_readings(0, recovery_action=0)
    assert seconds_until_healthy(node) <= 66


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_driver_reload_resolves_faults_of_every_gpu(code: int) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, code)
    node.rest(20)
    node.reload()
    assert seconds_until_healthy(node) <= 66


@pytest.mark.parametrize("code", UNTIL_RESET)
def test_driver_reload_while_the_agent_is_stopped_resolves_faults(code: int) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.library["module"] = 4711
    node.next(2)
    node.xid(0, code)
    node.rest(20)
    node.restart(away_s=60)
    node.rest(200)
    assert node.health() is Health.UNHEALTHY, "the module is the same"
    node.reload_stopped(away_s=60)
    assert seconds_until_healthy(node) <= 66


def test_fault_between_stop_and_start_is_not_resolved_by_a_reload() -> None:
    """Whether the line came before the reload is not known."""
    node = GpuNode(readings=OLD_DRIVER)
    node.library["module"] = 4711
    node.next(2)
    node.xid(0, 46)
    node.rest(20)
    node.log_xid(0, 62)
    node.reload_stopped(away_s=60)
    node.rest(200)
    assert node.codes() == ["gpu.xid.62"]


def test_module_of_another_boot_is_no_reload() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.library["module"] = 4711
    node.next(2)
    node.restart(boot_id=SECOND_BOOT, away_s=120, evaluate=False)
    node.library["module"] = 9
    node.log_xid(0, 46)
    node.rest(200)
    assert node.health() is Health.UNHEALTHY
    assert node.checkpoint.module == (SECOND_BOOT, 9)


def test_fault_after_driver_reload_is_not_resolved_by_it() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.reload()
    node.next(3)
    node.xid(0, 46)
    node.rest(300)
    assert node.health() is Health.UNHEALTHY


def test_gpu_that_answers_after_reset_required_was_reset() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 46)
    node.lose(0, NvmlReturnCode.RESET_REQUIRED)
    node.rest(20)
    node.recover(0, OLD_DRIVER)
    assert seconds_until_healthy(node) <= 66


def test_gpu_that_fails_between_reset_required_and_its_answer_was_reset() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.xid(0, 46)
    for status in (NvmlReturnCode.RESET_REQUIRED, NvmlReturnCode.LOST, NvmlReturnCode.UNKNOWN):
        node.lose(0, status)
        node.rest(5)
    node.recover(0, OLD_DRIVER)
    assert seconds_until_healthy(node) <= 66


def test_reset_of_one_gpu_does_not_resolve_faults_of_another() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    for number in (0, 1):
        node.set_readings(number, ecc_correctable=7)
        node.xid(number, 46)
    node.next(2)
    node.reset(1)
    assert seconds_until_healthy(node, "gpu-1") <= 66
    assert node.health("gpu-0") is Health.UNHEALTHY


def node_with_fabric_error() -> GpuNode:
    """Return a node with two GPUs, which share a fault of the fabric."""
    node = GpuNode(2)
    for number in (0, 1):
        node.set_readings(number, ecc_correctable=7)
    node.next()
    node.log(FABRIC_ERROR)
    node.next()
    return node


def test_shared_fault_is_resolved_when_last_gpu_was_reset() -> None:
    node = node_with_fabric_error()
    node.reset(0)
    node.rest(200)
    assert node.codes("gpu-0") == node.codes("gpu-1") == ["gpu.fabric.sxid.12020"]
    node.reset(1)
    node.rest(100)
    assert node.codes("gpu-0") == node.codes("gpu-1") == []


@pytest.mark.parametrize("resets", [1, 2])
@pytest.mark.parametrize("shown_by", ["recovery_action", "pcie_replay", "reset_required"])
def test_reset_of_all_gpus_of_a_stopped_agent_resolves_shared_fault(shown_by: str, resets: int) -> None:
    node = GpuNode(2)
    for number in (0, 1):
        if shown_by == "reset_required":
            node.lose(number, NvmlReturnCode.RESET_REQUIRED)
        else:
            node.set_readings(number, **{shown_by: 1})
    node.next()
    node.log(FABRIC_ERROR)
    node.next(2)
    for number in range(resets):
        if shown_by == "reset_required":
            node.recover(number)
        node.set_readings(number, recovery_action=0, pcie_replay=0)
    node.restart()
    node.rest(100)
    for name in ("gpu-0", "gpu-1"):
        assert ("gpu.fabric.sxid.12020" in node.codes(name)) is (resets == 1)


@pytest.mark.parametrize("is_reset", [False, True])
def test_port_fault_is_resolved_by_a_gpu_reset_while_the_agent_is_stopped(is_reset: bool) -> None:
    node = GpuNode(2)
    node.set_readings(1, pcie_replay=3)
    node.next()
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    node.next()
    if is_reset:
        node.set_readings(1, pcie_replay=0)
    node.restart()
    node.rest(100)
    assert ("gpu.fabric.sxid.20034" in node.codes("gpu-0")) is not is_reset


@pytest.mark.parametrize("recurs", [False, True])
def test_shared_fault_is_resolved_by_resets_before_and_after_a_restart(recurs: bool) -> None:
    node = node_with_fabric_error()
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11004, Fatal, something without a port")
    node.next()
    node.reset(0)
    node.next(2)
    for _ in range(2):
        node.restart()
        node.rest(20)
    if recurs:
        node.log(FABRIC_ERROR)
        node.next()
        node.restart()
        node.next()
    node.reset(1)
    node.rest(600)
    codes = ["gpu.fabric.sxid.12020"] if recurs else []
    assert node.codes("gpu-0") == node.codes("gpu-1") == codes


def test_reset_before_a_stop_leaves_a_shared_fault_that_recurs_during_it() -> None:
    node = node_with_fabric_error()
    node.reset(0)
    node.next(2)
    node.log(FABRIC_ERROR)
    node.set_readings(1, ecc_correctable=0)
    node.restart()
    node.rest(600)
    assert node.codes("gpu-0") == node.codes("gpu-1") == ["gpu.fabric.sxid.12020"]


def test_shared_fault_of_a_file_without_readings_of_each_gpu_stays() -> None:
    node = GpuNode(2)
    node.log(FABRIC_ERROR)
    node.next()
    kept = node.checkpoint
    earlier = replace(kept, faults=tuple(fault._replace(counters=(0,) * 7) for fault in kept.faults))
    node.state = replace(node.state, checkpoint=earlier)
    node.restart()
    node.rest(100)
    assert node.codes("gpu-0") == node.codes("gpu-1") == ["gpu.fabric.sxid.12020"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_fatal_sxid_that_its_table_row_calls_harmless_has_a_probation(is_restarted: bool) -> None:
    node = GpuNode(gpus=1)
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11004, Fatal, something without a port")
    node.rest(20)
    node.reload()
    node.rest(20)
    if is_restarted:
        node.restart()
        node.rest(5)
    assert "(over; reported until" in node.verdict().message
    assert 20 <= seconds_until_healthy(node) <= 60


def test_port_fault_is_resolved_by_a_gpu_reset_once_all_links_are_up() -> None:
    node = GpuNode(2)
    for number in (0, 1):
        node.set_readings(number, ecc_correctable=7)
    node.next()
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    node.set_readings(0, links_up=H100_LINKS & ~1)
    node.next()
    node.reset(1)
    node.rest(200)
    assert "gpu.fabric.sxid.20034" in node.codes("gpu-1"), "a link is still down"
    node.set_readings(0, links_up=H100_LINKS)
    node.rest(15)
    assert not any("sxid" in code for name in ("gpu-0", "gpu-1") for code in node.codes(name))


def test_fault_of_one_port_stays_without_a_reset_of_a_gpu() -> None:
    node = GpuNode(2)
    node.next()
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    node.rest(200)
    assert node.codes("gpu-0") == node.codes("gpu-1") == ["gpu.fabric.sxid.20034"]


def test_fault_from_before_start_is_resolved_by_action_none() -> None:
    for code in (*UNTIL_RESET, 48):
        node = GpuNode()
        node.restart()
        node.log_xid(0, code)
        node.restart(away_s=3600)
        node.rest(90)
        assert node.health() is Health.HEALTHY, code


def failed_init() -> GpuNode:
    node = GpuNode(readings=OLD_DRIVER)
    bus = node.gpus[0].bus
    node.log(f"NVRM: GPU {bus}: RmInitAdapter failed! (0x62:0xffff:1863)")
    node.rest(200)
    assert node.codes() == ["gpu.init_failed"], "the handle is older than the line"
    return node


def test_failed_initialization_is_resolved_when_a_new_handle_answers() -> None:
    node = failed_init()
    node.lose(0)
    node.rest(200)
    assert "gpu.init_failed" in node.codes()
    node.recover(0, OLD_DRIVER)
    assert seconds_until_healthy(node) <= 66


def test_failed_initialization_before_start_is_resolved_by_the_first_pass() -> None:
    node = failed_init()
    node.lose(0)
    node.restart(away_s=60)
    node.rest(200)
    assert "gpu.init_failed" in node.codes(), "the GPU does not answer"
    node.recover(0, OLD_DRIVER)
    assert seconds_until_healthy(node) <= 66


# --- a boot -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", UNTIL_REBOOT)
def test_fault_that_needs_reboot_is_not_resolved_by_reset(code: int) -> None:
    node = GpuNode()
    node.set_readings(0, ecc_correctable=7)
    node.next()
    node.xid(0, code)
    node.next()
    node.reset(0)
    node.reload()
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY
    node.restart()
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY
    node.restart(boot_id=SECOND_BOOT, away_s=120)
    assert node.health() is Health.UNHEALTHY, "it has its probation before it"
    assert 60 <= seconds_until_healthy(node) <= 66


def test_gpu_lost_in_two_boots_is_advised_to_be_replaced() -> None:
    node = GpuNode()
    node.xid(0, 79)
    first = node.cause("gpu.xid.79")
    node.restart(boot_id=SECOND_BOOT, away_s=20 * 86_400)
    node.rest(3600)
    assert node.health() is Health.HEALTHY
    node.xid(0, 79)
    again = node.cause("gpu.xid.79")
    assert (first.blame, again.blame) == (Blame.HARDWARE, Blame.HARDWARE)
    assert "reseat or replace" in again.advice
    assert "reseat or replace" not in first.advice
    assert again.evidence == f"{first.evidence}: it recurred within 30 days"


def test_gpu_lost_again_after_30_days_is_a_first_loss() -> None:
    node = GpuNode()
    node.xid(0, 79)
    first = node.cause("gpu.xid.79")
    node.restart(boot_id=SECOND_BOOT, away_s=31 * 86_400)
    node.rest(3600)
    node.xid(0, 79)
    again = node.cause("gpu.xid.79")
    assert (again.evidence, again.advice) == (first.evidence, first.advice)


def test_gpu_lost_30_days_after_a_boot_with_a_loss_is_a_first_loss() -> None:
    node = GpuNode()
    node.xid(0, 79)
    first = node.cause("gpu.xid.79")
    node.restart(boot_id=SECOND_BOOT, away_s=86_400)
    node.rest(100)
    node.wait(30 * 86_400)
    node.rest(1)
    node.xid(0, 79)
    again = node.cause("gpu.xid.79")
    assert (again.evidence, again.advice) == (first.evidence, first.advice)


def test_contained_error_days_after_a_boot_with_another_does_not_recur() -> None:
    node = GpuNode()
    node.xid(0, 94)
    node.evaluate()
    node.restart(boot_id=SECOND_BOOT, away_s=3600)
    node.rest(100)
    node.wait(5 * 86_400)
    node.rest(20)
    node.xid(0, 94)
    assert (node.health(), node.codes()) == (Health.HEALTHY, ["gpu.xid.94"])


def test_contained_error_in_two_boots_of_one_day_recurs() -> None:
    node = GpuNode()
    node.xid(0, 94)
    node.evaluate()
    node.restart(boot_id=SECOND_BOOT, away_s=3600)
    node.rest(100)
    node.xid(0, 94)
    assert node.health() is Health.UNHEALTHY


def test_boot_without_fault_is_not_counted() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.evaluate()
    node.restart(boot_id=SECOND_BOOT, away_s=60)
    node.rest(100)
    node.restart(boot_id=THIRD_BOOT, away_s=60)
    node.rest(100)
    node.xid(0, 79)
    node.evaluate()
    (fault,) = node.state.gpus.fault_log.faults.values()
    assert len(fault.bursts) == 2


def test_suspicion_after_a_reboot_ends_after_a_day() -> None:
    node = GpuNode()
    node.xid(0, 80)
    node.rest(120)
    node.xid(0, 80)
    node.evaluate()
    node.restart(boot_id=SECOND_BOOT, away_s=3600)
    node.xid(0, 80)
    assert node.cause("gpu.xid.80").severity is Severity.DEGRADED
    node.wait(86_500)
    node.rest(30)
    assert node.codes() == []


# --- time ---------------------------------------------------------------------------------------------------


def test_info_fault_is_reported_for_ten_minutes() -> None:
    node = GpuNode()
    node.xid(0, 13)
    node.evaluate()
    node.rest(590)
    assert node.codes() == ["gpu.xid.13"]
    node.rest(20)
    assert node.codes() == []


def test_ecc_storm_is_reported_for_ten_minutes_after_last_event() -> None:
    node = GpuNode()
    node.nvml_event(0, GpuEvent.SINGLE_BIT_ECC_STORM)
    node.evaluate()
    node.rest(500)
    node.nvml_event(0, GpuEvent.SINGLE_BIT_ECC_STORM)
    node.evaluate()
    node.rest(500)
    assert node.codes() == ["gpu.ecc.storm"]
    node.rest(110)
    assert node.codes() == []


def test_xid_155_is_resolved_when_all_links_are_up() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, links_up=0b1)
    node.xid(0, 155)
    node.rest(300)
    assert node.health() is Health.UNHEALTHY
    node.set_readings(0, links_up=H100_LINKS)
    assert seconds_until_healthy(node) <= 90


def test_links_of_a_gpu_in_mig_mode_are_not_down() -> None:
    """Such a GPU uses no NVLinks, and the software brings them down."""
    node = GpuNode()
    node.rest(5)
    node.partition(0, (1, 0))
    node.set_readings(0, links_up=0)
    node.xid(0, 155)
    assert (node.health(), node.cause("gpu.xid.155").severity) == (Health.HEALTHY, Severity.INFO)
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    node.set_readings(1, ecc_correctable=7)
    node.rest(5)
    node.reset(1)
    node.rest(60)
    assert node.codes("gpu-1") == []


def test_failing_library_keeps_fault_unresolved() -> None:
    node = GpuNode()
    node.xid(0, 48)
    node.evaluate()
    node.nvml = node.nvml._replace(state=SourceState.FAILING)
    node.lose(0, NvmlReturnCode.UNINITIALIZED)
    node.rest(3600)
    assert node.health() is Health.UNHEALTHY
    node.nvml = node.nvml._replace(state=SourceState.OK)
    node.recover(0, H100)
    assert seconds_until_healthy(node) <= 10 + 60 + 30


def test_reset_while_the_agent_is_stopped_ends_a_fault_of_a_rate() -> None:
    node = GpuNode(correctable_window_s=3600)
    for count in range(0, 2000, 200):
        node.set_readings(0, ecc_correctable=count)
        node.rest(30)
    assert node.codes() == ["gpu.ecc.correctable_rate"]
    node.restart()
    assert node.codes() == ["gpu.ecc.correctable_rate"]
    node.reset(0)
    node.restart(away_s=60)
    node.rest(10)
    assert node.codes() == []
