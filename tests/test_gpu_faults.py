"""Latched faults: affected devices, correlation of reports, and bounds in a flood."""

from collections.abc import Mapping
from typing import Any, Final

import pytest
from gpu_samples import ABSENT, H100, T4
from paper_gpus import OLD_DRIVER, SECOND_BOOT, GpuNode, PaperLog

from agent.health.gpu.faults.match_reports import FAULTS_MAX, WAITING_MAX
from agent.model.gpu import WHOLE_GPU, GpuEvent, GpuField, GpuOsSample
from agent.model.health import Health, Severity, XidOverride
from agent.model.reading import Reading
from agent.model.time import NS

XID_48, XID_45, XID_79 = "gpu.xid.48", "gpu.xid.45", "gpu.xid.79"
INSTANCES: Final = ("gpu-0-mig-1-0", "gpu-0-mig-2-0", "gpu-0-mig-2-1")


def partitioned_node(**options: object) -> GpuNode:
    return GpuNode(2, migs={0: [(1, 0), (2, 0), (2, 1)]}, **options)  # type: ignore[arg-type]


# --- decisions on codes -------------------------------------------------------------------------------------


def test_xid_45_after_48_is_info_and_keeps_severity() -> None:
    node = GpuNode()
    node.xid(0, 48)
    before = node.verdict()
    node.wait(2)
    node.xid(0, 45)
    after = node.verdict()
    assert (before.health, after.health) == (Health.UNHEALTHY, Health.UNHEALTHY)
    assert after.message == before.message
    assert [(cause.code, cause.severity) for cause in after.causes] == [
        (XID_48, Severity.UNHEALTHY),
        (XID_45, Severity.INFO),
    ]


@pytest.mark.parametrize("readings", [H100, T4], ids=["h100", "t4"])
def test_xid_of_instance_0_0_without_mig_names_the_gpu(readings: Mapping[GpuField, Reading]) -> None:
    node = GpuNode(readings=readings)
    node.nvml_xid(0, 48, gi=0, ci=0)
    node.log_xid(0, 48)
    node.log_xid(0, 63, instance=" GPU-I:00 GPU-CI:00")
    assert "instance" not in " ".join(cause.evidence for cause in node.verdict().causes)
    (fault,) = [fault for fault in node.checkpoint.faults if fault.code == XID_48]
    assert (fault.times, fault.gi, fault.ci) == (1, WHOLE_GPU, WHOLE_GPU)


def test_xid_of_instance_0_0_of_lost_gpu_names_the_gpu() -> None:
    node = GpuNode()
    node.rest(20)
    node.lose(0)
    node.nvml_xid(0, 79, gi=0, ci=0)
    assert "instance" not in node.cause(XID_79).evidence


def test_xid_of_instance_0_0_with_mig_names_the_instance() -> None:
    node = GpuNode(1, migs={0: [(0, 0)]})
    node.nvml_xid(0, 48, gi=0, ci=0)
    assert node.verdict("gpu-0-mig-0-0").health is Health.UNHEALTHY
    assert node.cause(XID_48).evidence.startswith("instance 0/0: ")


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_workload_fault_is_info_and_gpu_stays_healthy(code: int) -> None:
    node = GpuNode()
    for _ in range(20):
        node.xid(0, code)
        assert node.codes() == [f"gpu.xid.{code}"]
        assert node.health() is Health.HEALTHY
        node.rest(100)


def test_xid_154_follows_readable_recovery_action() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=1)
    node.log_xid(0, 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert node.cause("gpu.xid.154").severity is Severity.INFO
    assert node.codes()[0] == "gpu.recovery_action"


def test_xid_154_replaces_unreadable_recovery_action() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.log_xid(0, 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert node.health() is Health.UNHEALTHY
    node.wait(30)
    node.log_xid(0, 154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert node.rest(90).devices[1].device == "gpu-0"
    assert node.health() is Health.HEALTHY


def test_xid_162_ends_163_but_not_the_next_163() -> None:
    node = GpuNode()
    node.xid(0, 163)
    assert node.cause("gpu.xid.163").severity is Severity.DEGRADED
    node.wait(10)
    node.xid(0, 162)
    node.rest(5)
    assert node.cause("gpu.xid.163").severity is Severity.INFO
    node.wait(10)
    node.xid(0, 163)
    assert node.cause("gpu.xid.163").severity is Severity.DEGRADED


def test_xid_163_after_162_in_same_read_is_not_ended() -> None:
    node = GpuNode()
    node.log_xid(0, 162)
    node.wait(1)
    node.log_xid(0, 163)
    assert node.cause("gpu.xid.163").severity is Severity.DEGRADED


def test_configured_severity_overrides_xid() -> None:
    xids = ((13, XidOverride.UNHEALTHY), (48, XidOverride.IGNORE))
    node = GpuNode(xids=xids)
    node.xid(0, 48)
    assert node.codes() == []
    node.xid(0, 13)
    assert (node.codes(), node.health()) == (["gpu.xid.13"], Health.UNHEALTHY)


def test_expired_xid_that_recurs_within_a_day_is_suspect() -> None:
    node = GpuNode()
    node.xid(0, 80)
    assert node.cause("gpu.xid.80").severity is Severity.INFO
    node.rest(3600)
    assert node.codes() == []
    node.xid(0, 80)
    assert node.cause("gpu.xid.80").severity is Severity.DEGRADED


def test_xid_that_recurs_after_two_days_is_a_first_one() -> None:
    node = GpuNode()
    node.xid(0, 80)
    node.rest(700)
    node.wait(2 * 86_400)
    node.rest(1)
    node.xid(0, 80)
    assert node.cause("gpu.xid.80").severity is Severity.INFO


def test_xid_13_at_different_locations_is_not_suspect() -> None:
    node = GpuNode()
    for gpc in (0, 3):
        detail = f"Graphics SM Warp Exception on (GPC {gpc}, TPC 2, SM 0): Illegal Instruction"
        node.log_xid(0, 13, f"pid=12, name=python, {detail}")
        assert node.cause("gpu.xid.13").severity is Severity.INFO
        node.rest(3600)


PLACE: Final = "pid=12, name=python, Graphics SM Warp Exception on (GPC {}, TPC {}, SM 0): Illegal Address"
GRAPHICS: Final = "pid=12, name=python, Graphics Exception: {}"


def test_xid_13_of_a_program_that_faults_everywhere_is_not_suspect() -> None:
    """The driver prints a line for each place, in the same order each time."""
    node = GpuNode()
    for _ in range(4):
        for gpc in range(7):
            for tpc in range(9):
                node.log_xid(0, 13, PLACE.format(gpc, tpc))
        assert node.cause("gpu.xid.13").severity is Severity.INFO
        node.rest(3600)


def test_xid_13_with_lines_without_a_place_keeps_its_places() -> None:
    """A slow console delays the lines, so that the agent reads few of them at once."""
    node = GpuNode()
    for _ in range(2):
        for gpc, tpc in ((0, 0), (0, 7), (6, 0), (6, 7)):
            for detail in (PLACE.format(gpc, tpc), GRAPHICS.format("ESR 0x1=0x2"), PLACE.format(gpc, tpc)):
                node.log_xid(0, 13, detail)
                assert node.cause("gpu.xid.13").severity is Severity.INFO
        node.log_xid(0, 13, GRAPHICS.format("ChID 0010, Class 0000c7c0, Offset 00000000"))
        assert node.cause("gpu.xid.13").severity is Severity.INFO
        node.rest(3600)


def test_xid_13_on_all_tpcs_of_its_only_gpc_is_not_suspect() -> None:
    """The log reader counts the lines of a GPC together, and passes on the first and the last of them."""
    node = GpuNode()
    for _ in range(2):
        for tpc in range(9):
            node.log_xid(0, 13, PLACE.format(0, tpc))
        assert node.cause("gpu.xid.13").severity is Severity.INFO
        node.rest(3600)


def test_xid_13_at_one_place_days_after_another_place_is_suspect() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=7)
    for gpc in (0, 3):
        for severity in (Severity.INFO, Severity.DEGRADED):
            node.rest(120)
            node.log_xid(0, 13, PLACE.format(gpc, 2))
            assert node.cause("gpu.xid.13").severity is severity
        node.reset(0)
        node.rest(700)
        node.wait(2 * 86_400)


def test_xid_13_at_another_place_after_a_reset_is_not_suspect() -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.set_readings(0, ecc_correctable=7)
    for _ in range(2):
        node.rest(120)
        node.log_xid(0, 13, PLACE.format(0, 1))
    assert node.cause("gpu.xid.13").severity is Severity.DEGRADED
    node.reset(0)
    node.rest(60)
    node.log_xid(0, 13, PLACE.format(3, 2))
    assert node.cause("gpu.xid.13").severity is Severity.INFO


def later(node: GpuNode, seconds: float) -> None:
    """Let time pass in which nothing is evaluated, and then a pass."""
    node.wait(seconds)
    node.rest(1)


def mmu_fault(node: GpuNode, pid: int) -> Severity:
    """Report an XID 31 of a process, and return its severity."""
    node.nvml_xid(0, 31)
    node.log_xid(0, 31, f"pid={pid}, name=python, Ch 00000010, intr 00000000. MMU Fault")
    return node.cause("gpu.xid.31").severity


def test_xid_31_of_processes_days_apart_is_not_suspect() -> None:
    node = GpuNode()
    mmu_fault(node, 100)
    for _ in range(6):
        later(node, 36_000)
        severity = mmu_fault(node, 200)
    assert severity is Severity.INFO
    later(node, 3600)
    assert mmu_fault(node, 300) is Severity.DEGRADED


def test_xid_31_of_one_workload_with_two_processes_is_not_suspect() -> None:
    node = GpuNode()
    for _ in range(2):
        mmu_fault(node, 100)
        assert mmu_fault(node, 101) is Severity.INFO
        node.rest(120)


@pytest.mark.parametrize(("boot_id", "severity"), [("", Severity.INFO), (SECOND_BOOT, Severity.DEGRADED)])
def test_xid_31_of_the_same_pid_is_another_process_after_a_reboot(boot_id: str, severity: Severity) -> None:
    node = GpuNode()
    mmu_fault(node, 100)
    node.rest(120)
    assert mmu_fault(node, 200) is Severity.DEGRADED
    for pid in (200, 100):  # then the first two bursts are more than a day ago
        later(node, 50_000)
        assert mmu_fault(node, pid) is Severity.DEGRADED
    node.restart(boot_id=boot_id, away_s=50_000)
    mmu_fault(node, 100)
    node.rest(20)
    assert node.cause("gpu.xid.31").severity is severity


SYMPATHETIC: Final = "NVLink: fatal error detected on link 14(0x100000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("gaps_s", [(1, 19), (1, 40, 300)])
def test_sympathetic_xid_74_stays_info_when_its_root_recurs(gaps_s: tuple[int, ...], is_live: bool) -> None:
    """The XID 74 occurs a second after an XID 94. ``gaps_s`` are the times between the lines."""
    node = GpuNode(1)
    node.restart(evaluate=is_live)
    node.log_xid(0, 94)
    for gap_s in gaps_s:
        node.wait(gap_s)
        node.log_xid(0, *((74, SYMPATHETIC) if gap_s == 1 else (94,)))
        if is_live and "gpu.xid.74" in node.codes():
            assert node.cause("gpu.xid.74").severity is Severity.INFO
    node.next()
    assert node.cause("gpu.xid.74").severity is Severity.INFO
    node.restart()
    assert node.cause("gpu.xid.74").severity is Severity.INFO


def test_sympathetic_xid_74_stays_info_after_the_burst_of_its_root() -> None:
    node = GpuNode(1)
    for code, gap_s in ((94, 40), (94, 1), (74, 150), (94, 150)):
        node.log_xid(0, code, SYMPATHETIC)
        node.rest(gap_s)
    assert node.cause("gpu.xid.74").severity is Severity.INFO


def test_sympathetic_xid_74_that_was_unhealthy_keeps_its_root_over_restart() -> None:
    node = GpuNode(1)
    node.rest(20)
    links_up = node.gpus[0].readings[GpuField.LINKS_UP]
    node.set_readings(0, links_up=0, recovery_action=1)
    node.log_xid(0, 94)
    node.log_xid(0, 74, SYMPATHETIC)
    assert node.cause("gpu.xid.74").severity is Severity.UNHEALTHY
    node.restart()
    node.set_readings(0, links_up=links_up)
    node.rest(120)
    assert node.cause("gpu.xid.74").severity is Severity.INFO


def test_sympathetic_xid_74_that_recurs_without_a_root_is_unhealthy() -> None:
    node = GpuNode(1)
    for code, severity in ((94, Severity.INFO), (43, Severity.UNHEALTHY)):
        node.log_xid(0, code)
        node.log_xid(0, 74, SYMPATHETIC)
        assert node.cause("gpu.xid.74").severity is severity
        node.wait(300)


def test_sympathetic_xid_74_within_a_burst_of_an_unrelated_xid_has_no_root() -> None:
    """A program that is started again and again has an XID 31 every 50 s, in a single burst."""
    node = GpuNode(1)
    node.set_readings(0, recovery_action=ABSENT)  # with it, the fault would end
    for code, gap_s in ((31, 50), (31, 25), (74, 25), (31, 50), (31, 1)):
        detail = SYMPATHETIC if code == 74 else "pid=7, name=python, Ch 00000010. MMU Fault"
        node.log_xid(0, code, detail)
        node.rest(gap_s)
    cause = node.cause("gpu.xid.74")
    assert cause.severity is Severity.UNHEALTHY
    assert cause.evidence == "NVLink fault: link 14, the consequence of an unknown fault"


def test_nvml_event_is_a_fault_of_its_gpu_only() -> None:
    node = GpuNode()
    node.nvml_event(1, GpuEvent.FATAL_POISON)
    assert (node.health("gpu-1"), node.codes("gpu-1")) == (Health.UNHEALTHY, ["gpu.poison.fatal"])
    assert node.codes("gpu-0") == []


def test_sxid_is_a_cause_of_every_linked_gpu() -> None:
    node = GpuNode(3)
    node.change(2, links=0)
    node.log("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    assert node.codes("gpu-0") == node.codes("gpu-1") == ["gpu.fabric.sxid.20034"]
    assert node.codes("gpu-2") == []


def test_log_line_waits_until_its_gpu_is_known() -> None:
    node = GpuNode(1)
    node.log("NVRM: Xid (PCI:0000:fb:00): 79, pid=1, GPU has fallen off the bus.")
    node.rest(20)
    node.gpus[1] = node.gpus[0]
    node.change(1, index=1, uuid="GPU-late", bus="0000:fb:00.0")
    assert node.codes("gpu-1") == [XID_79]
    assert node.times(1, 79) == 1


def notes(node: GpuNode) -> list[tuple[str, str, Severity, str]]:
    found = node.evaluate().notes
    return [(note.subject, note.cause.code, note.cause.severity, note.cause.evidence) for note in found]


def unlisted_gpu_note(*gpus: str) -> list[tuple[str, str, Severity, str]]:
    return [("node", "node.gpu", Severity.DEGRADED, f"NVML lists no GPU at {', '.join(gpus)}")]


def test_faults_of_a_gpu_that_nvml_does_not_list_are_a_note() -> None:
    node = GpuNode(1)
    node.host = GpuOsSample(bus_gpus=("0000:1b:00.0",), fabric_manager=True)
    node.log("NVRM: Xid (PCI:0000:fb:00): 79, pid=1, GPU has fallen off the bus.")
    node.log("NVRM: GPU 0000:fb:00.0: GPU has fallen off the bus.")
    node.log("NVRM: GPU 0000:fa:00.0: RmInitAdapter failed! (0x62:0xffff:1863)")
    of_both = unlisted_gpu_note("0000:fa:00.0 (gpu.init_failed)", "0000:fb:00.0 (gpu.xid.79)")
    assert notes(node) == of_both
    node.rest(1000)
    assert (notes(node), node.codes()) == (of_both, [])
    node.gpus[1] = node.gpus[0]
    node.change(1, index=1, uuid="GPU-late", bus="0000:fb:00.0")
    node.rest(15)
    assert notes(node) == unlisted_gpu_note("0000:fa:00.0 (gpu.init_failed)")
    assert node.codes("gpu-1") == [XID_79]


def test_workload_fault_of_gpu_that_nvml_never_listed_is_no_note() -> None:
    node = GpuNode(1)
    node.log("NVRM: Xid (PCI:0000:fb:00): 31, pid=1, name=python, MMU fault")
    node.rest(100)
    assert notes(node) == []


@pytest.mark.parametrize(
    "limits", [{"expect": 1}, {"xids": ((79, XidOverride.IGNORE),)}, {"xids": ((79, XidOverride.INFO),)}]
)
def test_fault_of_gpu_that_is_not_expected_or_ignored_is_no_note(limits: dict[str, Any]) -> None:
    node = GpuNode(1, **limits)
    node.host = GpuOsSample(bus_gpus=("0000:1b:00.0",), fabric_manager=True)
    node.log("NVRM: Xid (PCI:0000:fb:00): 79, pid=1, GPU has fallen off the bus.")
    node.rest(100)
    assert notes(node) == []


def test_fault_of_unlisted_gpu_waits_while_nvml_may_list_the_gpu() -> None:
    node = GpuNode(1)
    node.host = GpuOsSample(bus_gpus=("0000:1b:00.0",), fabric_manager=True)
    node.library["count"] = 2
    node.log("NVRM: Xid (PCI:0000:fb:00): 79, pid=1, GPU has fallen off the bus.")
    node.rest(50)
    assert notes(node) == []
    node.rest(20)
    assert notes(node) == unlisted_gpu_note("0000:fb:00.0 (gpu.xid.79)")


# --- correlation of reports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("between_s", [0.0, 0.5, 4.9])
@pytest.mark.parametrize("nvml_first", [True, False])
def test_nvml_and_log_reports_close_together_are_one_fault(nvml_first: bool, between_s: float) -> None:
    node = GpuNode()
    reporters = [lambda: node.nvml_xid(0, 48), lambda: node.log_xid(0, 48)]
    first, second = reporters if nvml_first else reporters[::-1]
    first()
    assert node.times(0, 48) == 1
    node.wait(between_s)
    second()
    assert node.times(0, 48) == 1
    assert node.codes() == [XID_48]


@pytest.mark.parametrize("nvml_first", [True, False])
def test_reports_ten_seconds_apart_are_two_occurrences(nvml_first: bool) -> None:
    node = GpuNode()
    reporters = [lambda: node.nvml_xid(0, 48), lambda: node.log_xid(0, 48)]
    first, second = reporters if nvml_first else reporters[::-1]
    first()
    node.evaluate()
    node.wait(10)
    second()
    assert node.times(0, 48) == 2


def report_after_pause(node: GpuNode, code: int, order: str, *, pause_s: float, times: int = 1) -> None:
    """Report an XID during a pause in which no process runs: NVML's call returns at the end of the pause."""
    node.log_xid(0, code, times=times)
    lines, node.kmsg = node.kmsg, PaperLog()
    node.wait(pause_s)
    gi, ci = (1, 0) if node.gpus[0].migs else (WHOLE_GPU, WHOLE_GPU)
    if order == "nvml":
        node.nvml_xid(0, code, gi, ci, times)
        node.evaluate()
        node.wait(0.2)
    node.kmsg = lines
    if order == "log":
        node.evaluate()
        node.wait(2)
    if order != "nvml":
        node.nvml_xid(0, code, gi, ci, times)
    node.evaluate()


@pytest.mark.parametrize("order", ["nvml", "log", "together"])
@pytest.mark.parametrize("pause_s", [6, 90])
def test_xid_during_a_pause_of_the_agent_is_one_occurrence(order: str, pause_s: float) -> None:
    node = GpuNode()
    node.rest(30)
    report_after_pause(node, 94, order, pause_s=pause_s, times=3)
    (fault,) = node.state.gpus.fault_log.faults.values()
    assert (fault.times, len(fault.bursts)) == (3, 1)
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED


@pytest.mark.parametrize("order", ["nvml", "log", "together"])
@pytest.mark.parametrize("pause_s", [6, 90])
def test_xid_of_an_instance_during_a_pause_affects_that_instance(order: str, pause_s: float) -> None:
    node = partitioned_node()
    node.rest(30)
    report_after_pause(node, 94, order, pause_s=pause_s)
    node.rest(2)
    assert ["gpu.xid.94" in node.codes(name) for name in INSTANCES] == [True, False, False]
    assert [(f.times, len(f.bursts)) for f in node.state.gpus.fault_log.faults.values()] == [(1, 1)]


def test_xid_after_an_xid_during_a_pause_of_the_agent_is_in_its_burst() -> None:
    node = GpuNode()
    node.rest(30)
    node.xid(0, 94)
    node.rest(9)
    node.wait(40)
    report_after_pause(node, 94, "together", pause_s=30)
    assert node.cause("gpu.xid.94").severity is Severity.DEGRADED


@pytest.mark.parametrize("is_nvml_paused", [True, False])
def test_xids_of_two_instances_during_a_pause_affect_these_instances(is_nvml_paused: bool) -> None:
    node = partitioned_node()
    node.rest(30)
    for gi, ci, gap_s in ((1, 0, 20), (2, 1, 70)):
        node.log_xid(0, 94, f"pid={gi}, name=python, Contained memory error")
        if not is_nvml_paused:
            node.nvml_xid(0, 94, gi, ci)
        node.wait(gap_s)
    if is_nvml_paused:
        node.nvml_xid(0, 94, 1, 0)
        node.nvml_xid(0, 94, 2, 1)
    node.evaluate()
    node.rest(3)
    assert ["gpu.xid.94" in node.codes(name) for name in INSTANCES] == [True, False, True]
    assert node.cause("gpu.xid.94").severity is Severity.INFO


def test_bursts_during_a_pause_of_the_agent_are_a_recurrence() -> None:
    node = GpuNode()
    node.rest(30)
    node.log_xid(0, 94)
    node.wait(70)
    node.log_xid(0, 94)
    node.wait(30)
    node.nvml_xid(0, 94, times=2)
    assert node.cause("gpu.xid.94").severity is Severity.UNHEALTHY
    assert node.times(0, 94) == 2


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("nvml_first", [True, False])
def test_xids_six_seconds_apart_after_a_pause_are_two_occurrences(nvml_first: bool, is_paused: bool) -> None:
    node = GpuNode()
    node.rest(30)
    report_after_pause(node, 48, "together", pause_s=90 if is_paused else 0)
    node.wait(6)
    node.xid(0, 48)
    assert node.times(0, 48) == 2
    reporters = [lambda: node.nvml_xid(0, 48), lambda: node.log_xid(0, 48)]
    for times, report in enumerate(reporters if nvml_first else reporters[::-1], 3):
        node.wait(6)
        report()
        assert node.times(0, 48) == times


def test_each_occurrence_is_counted_once() -> None:
    node = GpuNode()
    for times in range(1, 6):
        node.xid(0, 94)
        assert node.times(0, 94) == times
        node.wait(8)
    node.xid(0, 94, times=10)
    assert node.times(0, 94) == 15


def test_gpu_loss_with_event_xid_and_companion_line_is_one_fault() -> None:
    node = GpuNode()
    node.log("NVRM: GPU at PCI:0000:1b:00: GPU has fallen off the bus.")
    node.evaluate()
    node.xid(0, 79)
    assert node.times(0, 79) == 1
    node.wait(30)
    node.log("NVRM: GPU at PCI:0000:1b:00: GPU has fallen off the bus.")
    assert node.times(0, 79) == 2


def test_log_with_clock_off_by_a_minute_is_correlated() -> None:
    for drift_s in (-60, 60):
        node = GpuNode()
        node.nvml_xid(0, 48)
        now_ns, node.now_ns = node.now_ns, node.now_ns + drift_s * NS
        node.log_xid(0, 48)
        node.now_ns = now_ns
        assert node.times(0, 48) == 1
        assert node.state.gpus.fault_log.faults


def test_xid_that_left_nvml_table_and_recurs_is_counted() -> None:
    node = GpuNode(kmsg=False)
    for _ in range(3):
        node.nvml_xid(0, 48)
    assert node.times(0, 48) == 3
    node.change(0, xids=())
    node.wait(30)
    node.nvml_xid(0, 48)
    assert node.times(0, 48) == 4


# --- affected devices ---------------------------------------------------------------------------------------


def test_fault_of_whole_gpu_affects_every_instance() -> None:
    node = partitioned_node()
    node.nvml_xid(0, 48)
    for name in ("gpu-0", *INSTANCES):
        assert (node.health(name), node.codes(name)) == (Health.UNHEALTHY, [XID_48]), name
    assert node.health("gpu-1") is Health.HEALTHY


@pytest.mark.parametrize(
    ("gi", "ci", "hit"),
    [(1, 0, INSTANCES[:1]), (2, 1, INSTANCES[2:]), (2, WHOLE_GPU, INSTANCES[1:])],
)
def test_fault_of_instance_is_info_on_its_gpu(gi: int, ci: int, hit: tuple[str, ...]) -> None:
    node = partitioned_node()
    node.xid(0, 48, gi, ci)
    unhealthy = [name for name in INSTANCES if node.health(name) is Health.UNHEALTHY]
    assert unhealthy == list(hit)
    assert all(node.codes(name) == [] for name in INSTANCES if name not in hit)
    word = node.cause(XID_48)
    assert (node.health(), word.severity) == (Health.HEALTHY, Severity.INFO)
    assert word.evidence.startswith(f"instance {gi}")
    assert node.times(0, 48) == 1


@pytest.mark.parametrize(
    ("instance", "hit"), [(" GPU-I:01 GPU-CI:00", INSTANCES[:1]), (" GPU-I:02", INSTANCES[1:])]
)
def test_log_line_with_instance_affects_that_instance(instance: str, hit: tuple[str, ...]) -> None:
    node = partitioned_node()
    node.log_xid(0, 48, instance=instance)
    assert [name for name in INSTANCES if node.health(name) is Health.UNHEALTHY] == list(hit)


@pytest.mark.parametrize(("gi", "ci"), [(9, 0), (9, WHOLE_GPU), (1, 3)])
def test_fault_of_absent_instance_belongs_to_gpu(gi: int, ci: int) -> None:
    for node in (GpuNode(), partitioned_node()):
        node.nvml_xid(0, 48, gi, ci)
        devices = [device.device for device in node.evaluate().devices if device.device.startswith("gpu-0")]
        assert all((node.health(name), node.codes(name)) == (Health.UNHEALTHY, [XID_48]) for name in devices)
        assert node.cause(XID_48).evidence.startswith(f"instance {gi}")
        assert node.health("gpu-1") is Health.HEALTHY


def test_repartition_moves_fault_to_gpu_and_keeps_it() -> None:
    node = partitioned_node(readings=OLD_DRIVER)
    node.xid(0, 48, 1, 0)
    node.rest(5)
    node.partition(0, (7, 0), (8, 0))
    node.rest(700)
    there = ("gpu-0", "gpu-0-mig-7-0", "gpu-0-mig-8-0")
    assert [node.health(name) for name in there] == [Health.UNHEALTHY] * 3
    node.partition(0)
    node.restart()
    assert (node.health(), node.codes()) == (Health.UNHEALTHY, [XID_48])


def test_line_without_instance_waits_one_second_for_nvml() -> None:
    node = partitioned_node()
    node.log_xid(0, 48)
    assert [node.codes(name) for name in ("gpu-0", *INSTANCES)] == [[], [], [], []]
    node.wait(0.5)
    node.nvml_xid(0, 48, 1, 0)
    assert node.codes(INSTANCES[0]) == [XID_48]
    node.rest(5)
    assert (node.health(), node.codes(INSTANCES[1])) == (Health.HEALTHY, [])
    assert node.times(0, 48) == 1


def test_line_without_nvml_report_affects_whole_gpu() -> None:
    node = partitioned_node()
    node.log_xid(0, 48)
    node.evaluate()
    node.rest(1.1)
    assert [node.health(name) for name in ("gpu-0", *INSTANCES)] == [Health.UNHEALTHY] * 4


def test_late_nvml_report_moves_log_fault_to_instance() -> None:
    node = partitioned_node()
    node.log_xid(0, 46)
    node.evaluate()
    node.rest(2)
    assert node.health(INSTANCES[1]) is Health.UNHEALTHY
    node.nvml_xid(0, 46, 1, 0)
    assert node.times(0, 46) == 1
    node.rest(80)
    assert [node.health(name) for name in INSTANCES] == [
        Health.UNHEALTHY,
        Health.HEALTHY,
        Health.HEALTHY,
    ]


def test_older_log_fault_stays_when_nvml_names_instance() -> None:
    node = partitioned_node()
    node.log_xid(0, 46)
    node.rest(60)
    node.log_xid(0, 46)
    node.rest(2)
    node.nvml_xid(0, 46, 1, 0)
    node.rest(80)
    assert [node.health(name) for name in INSTANCES] == [Health.UNHEALTHY] * 3


def test_line_of_unpartitioned_gpu_does_not_wait() -> None:
    node = GpuNode()
    node.log_xid(0, 48)
    assert node.codes() == [XID_48]


def test_fault_of_gpu_outranks_info_of_its_instance() -> None:
    node = partitioned_node(readings=OLD_DRIVER)
    node.nvml_xid(0, 94, 1, 0)
    assert node.cause("gpu.xid.94", INSTANCES[0]).severity is Severity.DEGRADED
    for _ in range(2):
        node.rest(100)
        node.nvml_xid(0, 94)
    assert [node.health(name) for name in INSTANCES] == [Health.UNHEALTHY] * 3


# --- later lines of the same code keep the fault ------------------------------------------------------------

RESETTING: Final = "RLW_REMAP Nonfatal XC0 i0 Link 13 (0x00000004 0x00000040 0x00000001 0x00000000)"
HARDWARE: Final = "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"
SWITCH: Final = "nvidia-nvswitch{}: SXid (PCI:0000:c1:00.0): {}, {}, Link {} something"


@pytest.mark.parametrize(
    ("code", "grave", "benign"),
    [
        (145, RESETTING, "RLW_RXPIPE Nonfatal XC0 i0 Link {} (0x00000004 0x00000100 0x00000001 0x00000000)"),
        (74, HARDWARE, "NVLink: fatal error detected on link {}(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"),
    ],
)
def test_benign_line_of_other_link_keeps_fault(code: int, grave: str, benign: str) -> None:
    node = GpuNode(readings=OLD_DRIVER)
    node.log_xid(0, code, grave)
    before = node.verdict()
    for link in range(10):
        node.log_xid(0, code, benign.format(link))
        node.rest(1)
        assert node.verdict().message == before.message
    node.rest(1000)
    assert node.verdict().message == before.message
    node.restart()
    assert node.verdict().message == before.message


def test_nonfatal_line_of_other_switch_keeps_fault() -> None:
    node = GpuNode()
    node.log(SWITCH.format(3, 12020, "Fatal", 30))
    before = node.verdict()
    for link in range(10):
        node.log(SWITCH.format(2, 12020, "Non-fatal", link))
        node.rest(1)
    node.rest(1000)
    assert (node.verdict().message, node.health()) == (before.message, Health.UNHEALTHY)


def test_evidence_of_fabric_fault_keeps_its_first_link() -> None:
    node = GpuNode()
    node.log(SWITCH.format(3, 20034, "Fatal", 30))
    before = node.verdict()
    for link in range(10):
        node.log(SWITCH.format(3, 20034, "Fatal", link))
        node.rest(1)
        assert node.verdict().message == before.message


# --- floods -------------------------------------------------------------------------------------------------


def test_flood_of_one_fault_is_one_entry_with_stable_evidence() -> None:
    node = GpuNode()
    node.xid(0, 48)
    first = node.verdict()
    for _ in range(10):
        node.xid(0, 48, times=10_000)
        node.wait(0.1)
        assert node.verdict().causes == first.causes
    assert node.times(0, 48) == 100_001
    assert len(node.state.gpus.fault_log.faults) == 1
    assert len(node.checkpoint.faults) == 1


def test_fault_log_is_bounded_and_keeps_worst_fault() -> None:
    node = partitioned_node()
    node.xid(0, 79)
    for code in range(1000, 2000):
        node.log_xid(0, code)
        node.log_xid(1, code)
        if code % 100 == 0:
            node.evaluate()
    node.rest(3)
    log = node.state.gpus.fault_log
    for number in (0, 1):
        assert sum(key.gpu_number == number for key in log.faults) <= FAULTS_MAX
    assert len(log.waiting) <= WAITING_MAX
    assert all(len(fault.texts) <= 4 and len(fault.bursts) <= 16 for fault in log.faults.values())
    assert len(node.verdict().message.encode()) <= 1024


def test_info_faults_are_dropped_first() -> None:
    node = GpuNode()
    node.xid(0, 79)
    node.wait(60)
    for code in range(1, 2 * FAULTS_MAX):
        if code not in (43, 45):
            node.xid(0, code)
    node.evaluate()
    assert XID_79 in node.codes()


def test_nonfatal_sxids_are_dropped_before_fatal_ones() -> None:
    node = GpuNode()
    node.log(SWITCH.format(3, 12020, "Fatal", 30))
    node.rest(60)
    for code in range(30_000, 30_000 + 2 * FAULTS_MAX):
        node.log(SWITCH.format(3, code, "Non-fatal", 30))
    node.rest(100)
    assert "gpu.fabric.sxid.12020" in node.codes()


def test_lines_dropped_by_reader_are_no_longer_counted() -> None:
    node = GpuNode()
    for code in range(1000, 1500):
        node.log_xid(0, code)
    node.evaluate()
    assert len(node.state.gpus.fault_log.lines_counted) == 500
    assert node.kmsg is not None
    node.kmsg.forget()
    node.log_xid(0, 48)
    node.evaluate()
    assert len(node.state.gpus.fault_log.lines_counted) == 1


def test_simulated_gpu_has_healthy_readings() -> None:
    node = GpuNode(3, readings=H100)
    assert [(node.health(f"gpu-{n}"), node.codes(f"gpu-{n}")) for n in range(3)] == [(Health.HEALTHY, [])] * 3


# --- lines of NVSwitches ------------------------------------------------------------------------------------

HOT: Final = "nvidia-nvswitch{0}: SXid (PCI:0000:{0:02x}:00.0): 10004, NVSWITCH Temperature 95C | TSENSE WARN"
COOL: Final = "nvidia-nvswitch{0}: SXid (PCI:0000:{0:02x}:00.0): 10005, Thermal slowdown Disengaged"
SLOW: Final = "gpu.fabric.sxid.10004"
ERROR: Final = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {}, {}"
COMPANIONS: Final = (
    "Severity 1 Engine instance 30 Sub-engine instance 00",
    "Data {0x00000001, 0x00000000, 0x00000000, 0x00000000}",
    "Data {0x00000002, 0x00000000, 0x00000000, 0x00000000}",
)


def sxid_times(node: GpuNode, code: int) -> list[int]:
    node.evaluate()
    faults = node.state.gpus.fault_log.faults.items()
    return [fault.times for key, fault in faults if key.code == f"gpu.fabric.sxid.{code}"]


def test_switch_that_shuts_down_makes_linked_gpus_unhealthy() -> None:
    node = GpuNode(2)
    node.log(ERROR.format(10006, "TSENSE OVERT Threshold reached. Shutting Down"))
    assert [node.health(f"gpu-{number}") for number in (0, 1)] == [Health.UNHEALTHY] * 2
    assert node.codes() == ["gpu.fabric.sxid.10006"]


def test_thermal_slowdown_lasts_until_every_switch_has_ended_it() -> None:
    node = GpuNode(1)
    for switch in range(6):
        node.log(HOT.format(switch))
        node.wait(1)
    assert node.cause(SLOW).severity is Severity.DEGRADED
    for switch in range(5):
        node.log(COOL.format(switch))
        node.rest(20)
        assert node.codes() == [SLOW]
    node.log(COOL.format(5))
    node.rest(20)
    assert node.codes() == []
    node.log(HOT.format(2))
    node.rest(20)
    assert node.codes() == [SLOW]


def test_thermal_slowdown_at_two_switches_survives_restart_and_ends() -> None:
    node = GpuNode(1)
    for switch in (0, 1):
        node.log(HOT.format(switch))
    node.rest(5)
    node.log(COOL.format(0))
    node.rest(5)
    node.restart()
    assert node.codes() == [SLOW]
    node.log(COOL.format(1))
    node.rest(20)
    assert node.codes() == []
    node.restart()
    assert node.codes() == []


def test_thermal_slowdown_that_ended_before_the_start_is_no_cause() -> None:
    node = GpuNode(1)
    node.restart(evaluate=False)
    node.log(HOT.format(0))
    node.wait(60)
    node.log(COOL.format(0))
    node.wait(60)
    node.next()
    assert node.codes() == []


@pytest.mark.parametrize("is_known", [True, False])
def test_thermal_slowdown_that_ended_between_evaluations_is_reported(is_known: bool) -> None:
    node = GpuNode(1)
    node.rest(20)
    if is_known:
        for line in (HOT, COOL):
            node.log(line.format(0))
            node.rest(20)
    for line in (HOT, COOL):
        node.log(line.format(0))
        node.wait(0.5)
    assert node.codes() == [SLOW]
    assert node.state.due_ns is not None
    assert node.state.due_ns <= node.now_ns + NS
    node.rest(20)
    assert node.codes() == []
    assert all(fault.resolved for fault in node.state.gpus.fault_log.faults.values())


def test_slowdown_that_ends_and_begins_again_between_evaluations_lasts() -> None:
    node = GpuNode(1)
    node.rest(20)
    for line in (HOT, COOL):
        node.log(line.format(0))
        node.wait(0.5)
    node.evaluate()
    node.log(HOT.format(0))
    node.rest(20)
    assert node.codes() == [SLOW]


def test_flood_of_ends_of_slowdowns_ends_all_of_them() -> None:
    node = GpuNode(1)
    node.rest(20)
    for line in (HOT, COOL):
        for switch in range(WAITING_MAX + 2):
            node.log(line.format(switch))
    node.evaluate()
    assert len(node.state.gpus.fault_log.waiting) == WAITING_MAX
    node.rest(20)
    assert node.codes() == []
    assert sxid_times(node, 10005) == []


def test_end_of_a_slowdown_that_is_not_known_is_no_cause() -> None:
    node = GpuNode(1)
    node.log(COOL.format(0))
    node.rest(20)
    assert node.codes() == []
    assert sxid_times(node, 10005) == []


def test_error_with_number_of_an_end_is_a_cause() -> None:
    node = GpuNode(1)
    node.log(ERROR.format(28001, "OSFP Thermal Warn Activated"))
    node.log(ERROR.format(28002, "Fatal, Link 46 MC TS tag store ECC DBE"))
    assert sorted(node.codes()) == ["gpu.fabric.sxid.28001", "gpu.fabric.sxid.28002"]


def test_companion_lines_add_no_occurrence() -> None:
    node = GpuNode(1)
    for _ in range(3):
        node.log(ERROR.format(20034, "Fatal, Link 30 LTSSM Fault Up"))
        for companion in COMPANIONS:
            node.log(ERROR.format(20034, companion))
        node.rest(60)
    assert sxid_times(node, 20034) == [3]
    assert node.cause("gpu.fabric.sxid.20034").evidence.endswith("link 30, Fatal")


def test_companion_line_in_the_next_evaluation_adds_no_occurrence() -> None:
    node = GpuNode(1)
    node.log(ERROR.format(20034, "Fatal, Link 30 LTSSM Fault Up"))
    node.evaluate()
    node.wait(0.001)
    node.log(ERROR.format(20034, COMPANIONS[0]))
    assert sxid_times(node, 20034) == [1]
    node.rest(5)
    node.restart()
    assert sxid_times(node, 20034) == [1]


def test_companion_line_stands_for_an_overwritten_line() -> None:
    node = GpuNode(1)
    for companion in COMPANIONS:
        node.log(ERROR.format(12020, companion))
    assert node.health() is Health.UNHEALTHY
    assert sxid_times(node, 12020) == [1]


def test_companion_with_more_severity_than_the_line_raises_the_severity() -> None:
    node = GpuNode(1)
    node.log(ERROR.format(12020, "Non-fatal, Link 30 egress sequence id error"))
    assert node.cause("gpu.fabric.sxid.12020").severity is Severity.DEGRADED
    node.wait(2)
    node.log(ERROR.format(12020, COMPANIONS[0]))
    assert node.cause("gpu.fabric.sxid.12020").severity is Severity.UNHEALTHY


def test_companion_read_after_restart_does_not_raise_a_resolved_fault() -> None:
    node = GpuNode(1)
    node.log(ERROR.format(12020, "Fatal, Link 30 egress sequence id error"))
    for companion in COMPANIONS:
        node.wait(0.001)
        node.log(ERROR.format(12020, companion))
    node.rest(30)
    node.reload()
    node.rest(400)
    assert "gpu.fabric.sxid.12020" not in node.codes()
    node.restart()
    node.rest(20)
    assert "gpu.fabric.sxid.12020" not in node.codes()


# --- times of log lines -----------------------------------------------------------------------------------


def test_fault_read_at_start_keeps_the_time_of_its_first_line_over_restart() -> None:
    node = GpuNode(1)
    node.restart(evaluate=False)
    node.log_xid(0, 79)
    first_s = node.wall_s
    node.wait(500)
    node.log_xid(0, 79)
    node.wait(60)
    node.next()
    assert node.cause(XID_79).since.wall_s == pytest.approx(first_s, abs=0.01)
    node.rest(30)
    node.restart()
    assert node.cause(XID_79).since.wall_s == pytest.approx(first_s, abs=0.01)


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(
    ("code", "gaps_s", "severity"),
    [
        (94, (9000,), Severity.UNHEALTHY),
        (94, (40, 40), Severity.DEGRADED),
        (80, (9000,), Severity.DEGRADED),
        (80, (1, 1, 9000, 1), Severity.DEGRADED),
        (80, (40,) * 4, Severity.INFO),
        (80, (2 * 86_400,), Severity.INFO),
    ],
)
def test_bursts_before_the_start_count_like_observed_bursts(
    code: int, gaps_s: tuple[int, ...], severity: Severity, is_live: bool
) -> None:
    node = GpuNode(1)
    node.restart(evaluate=is_live)
    node.log_xid(0, code)
    for gap_s in gaps_s:
        if is_live:
            node.rest(1)
        node.wait(gap_s - is_live)
        node.log_xid(0, code)
    node.next()
    assert node.cause(f"gpu.xid.{code}").severity is severity


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize(("at", "severity"), [(0, Severity.DEGRADED), (1, Severity.INFO)])
def test_processes_before_the_start_count_like_observed_processes(
    at: int, severity: Severity, is_live: bool
) -> None:
    """Of four lines in two bursts, the line with the index ``at`` is of another process."""
    node = GpuNode(1)
    node.restart(evaluate=is_live)
    for index, gap_s in enumerate((1, 3600, 1, 0)):
        node.log_xid(0, 31, f"pid={100 + (index == at)}, name=python, Ch 00000010. MMU Fault")
        if is_live:
            node.evaluate()
        node.wait(gap_s)
    node.next()
    assert node.cause("gpu.xid.31").severity is severity


def test_report_that_begins_soon_after_the_last_occurrence_is_in_its_burst() -> None:
    """The log reader counts lines with a place apart from those without."""
    node = GpuNode(1)
    node.restart(evaluate=False)
    node.log_xid(0, 13, "pid=12, name=python, Graphics Exception: ESR 0x500000=0x80000000")
    for _ in range(3):
        node.wait(30)
        node.log_xid(0, 13, PLACE.format(0, 2))
    node.next()
    assert node.cause("gpu.xid.13").severity is Severity.INFO


def test_burst_has_the_process_of_a_later_line_if_the_first_names_none() -> None:
    node = GpuNode(1)
    node.restart(evaluate=False)
    for pid, gap_s in (("'<unknown>'", 1), ("100", 3600), ("200", 0)):
        node.log_xid(0, 31, f"pid={pid}, name=python, Ch 00000010. MMU Fault")
        if gap_s != 1:
            node.next()
        node.wait(gap_s)
    node.next()
    assert node.cause("gpu.xid.31").severity is Severity.DEGRADED


@pytest.mark.parametrize("by_nvml", [True, False])
def test_burst_before_the_start_counts_if_the_next_is_read_with_it(by_nvml: bool) -> None:
    node = GpuNode(1)
    node.restart(evaluate=False)
    node.log_xid(0, 80)
    node.wait(9000)
    if by_nvml:
        node.nvml_xid(0, 80)
    node.log_xid(0, 80)
    node.next()
    assert node.cause("gpu.xid.80").severity is Severity.DEGRADED
    (fault,) = [fault for fault in node.checkpoint.faults if fault.code == "gpu.xid.80"]
    assert (fault.times, len(fault.bursts_ns)) == (2, 2)


def test_burst_between_two_evaluations_has_the_time_of_its_first_line() -> None:
    node = GpuNode(1)
    node.evaluate()
    first_s = node.wall_s
    for _ in range(5):
        node.log_xid(0, 79)
        node.wait(2)
    assert node.cause(XID_79).since.wall_s == pytest.approx(first_s, abs=0.01)


def test_line_that_waited_for_its_gpu_has_its_own_time() -> None:
    node = GpuNode(1)
    node.rest(20)
    first_s = node.wall_s
    node.log("NVRM: Xid (PCI:0000:fb:00): 79, pid=1, GPU has fallen off the bus.")
    node.rest(20)
    node.gpus[1] = node.gpus[0]
    node.change(1, index=1, uuid="GPU-late", bus="0000:fb:00.0")
    assert node.cause(XID_79, "gpu-1").since.wall_s == pytest.approx(first_s, abs=0.01)
