"""Clears of latched faults by operators, on a simulated node: what is cleared, refused and kept."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from gpu_samples import ALL_UP
from paper import PaperNode, codes, device_of, pool_sample
from paper_gpus import OLD_DRIVER, SECOND_BOOT, THIRD_BOOT, GpuNode

from agent.engine.step import step
from agent.model.claim import ClaimRef, DeviceRef
from agent.model.cleared_faults import ClearRefusal, ClearRequest, ClearResult, Operator
from agent.model.declared_devices import DeclaredFile, DeclaredGpuDevice, DeclaredOtherDevice, DriverDevice
from agent.model.gpu import GpuEvent, NvmlReturnCode
from agent.model.health import Health, Severity
from agent.model.prepare import DriverFault
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings, RuleOverride
from agent.model.snapshot import Snapshot
from agent.model.time import NS

DRIVER = "gpu.example.com"
POOL_SHRUNK = "mem.hugepages.pool_shrunk"
ROOT = Operator(0, 4711, 1000)
FATAL_SXID = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 11004, Fatal, something without a port"
CLAIM = ClaimRef("team-a", "train-0", "u-1")


class ClearNode(GpuNode):
    """Node with GPUs, devices that a driver declares, and requests of operators."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.requests: tuple[ClearRequest, ...] = ()
        self.declared: tuple[DriverDevice, ...] = ()
        self.driver_faults: tuple[DriverFault, ...] = ()
        self.more_sources: tuple[SourceSample, ...] = ()
        self.report: Report | None = None
        self._last_number = 0
        super().__init__(*args, **kwargs)

    def declare(self, **parts: DeclaredGpuDevice | DeclaredOtherDevice) -> None:
        """Let the driver declare devices, by name."""
        self.declared = tuple(DriverDevice(DRIVER, "p", name, part, 0) for name, part in parts.items())

    def snapshot(self) -> Snapshot:
        files = (DeclaredFile(DRIVER, self.declared),) if self.declared else ()
        read = super().snapshot()
        return replace(
            read,
            sources=(*read.sources, *self.more_sources),
            declared=files,
            driver_faults=self.driver_faults,
            clear_requests=self.requests,
        )

    def clear(self, device: str, code: str = "", operator: Operator = ROOT) -> ClearResult:
        """Request a clear, evaluate once, and return the answer."""
        self._last_number += 1
        self.requests = (ClearRequest(self._last_number, device, code, operator),)
        self.report = self.next()
        (result,) = self.report.clear_results
        assert self.evaluate().clear_results == (), "a request is answered once"
        self.requests = ()
        return result

    def report_fault(self, name: str, code: str = "fpga.stuck", number: int = 1, pool: str = "p") -> None:
        """Let the driver report a fault of one of its devices while it prepares a claim."""
        fault = DriverFault(number, DeviceRef(DRIVER, pool, name), code, "stuck", "", self.wall_s, CLAIM)
        self.driver_faults = (*self.driver_faults, fault)

    def open_codes(self, name: str = "gpu-0") -> list[str]:
        """Return the codes of a device's causes above info."""
        return [cause.code for cause in self.verdict(name).causes if cause.severity > Severity.INFO]

    def restart(self, **options: Any) -> Report | None:  # type: ignore[override]
        self._last_number = 0
        return super().restart(**options)


def cleared_faults(result: ClearResult) -> list[tuple[str, str]]:
    """Return device and code of each cleared fault."""
    assert result.refusal is None, result.reason
    return [(fault.device, fault.code) for fault in result.cleared]


# --- clears -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [46, 54, 62, 79])
def test_clear_of_latched_xid_makes_gpu_healthy_at_once(code: int) -> None:
    node = ClearNode()
    node.xid(0, code)
    node.rest(30)
    assert node.health() is Health.UNHEALTHY
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", f"gpu.xid.{code}")]
    assert (node.health(), node.open_codes()) == (Health.HEALTHY, [])
    node.rest(600)
    assert (node.health(), node.open_codes()) == (Health.HEALTHY, [])


def test_gpu_lost_again_in_the_same_boot_recurs_within_30_days() -> None:
    node = ClearNode()
    node.xid(0, 79)
    for _ in range(3):  # further programs find the same loss
        node.rest(600)
        node.xid(0, 79)
    assert "recurred" not in node.cause("gpu.xid.79").evidence
    node.clear("gpu-0")
    node.wait(5 * 86_400)
    node.rest(1)
    node.xid(0, 79)
    assert "it recurred within 30 days" in node.cause("gpu.xid.79").evidence


@pytest.mark.parametrize("step_s", [0.0, -3600.0])
def test_new_xid_while_stopped_is_reported_although_the_clock_was_set_back(step_s: float) -> None:
    node = ClearNode(readings=OLD_DRIVER)
    node.nvml_xid(0, 62)
    node.rest(30)
    node.clear("gpu-0")
    node.rest(60)
    assert node.health() is Health.HEALTHY
    node.log_xid(0, 62)
    node.wall_s += step_s
    node.restart(away_s=30)
    assert node.open_codes() == ["gpu.xid.62"]


def test_code_limits_clear_to_one_fault() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.xid(0, 62)
    node.rest(30)
    assert cleared_faults(node.clear("gpu-0", "gpu.xid.79")) == [("gpu-0", "gpu.xid.79")]
    assert node.open_codes() == ["gpu.xid.62"]
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", "gpu.xid.62")]
    assert node.health() is Health.HEALTHY


def test_clear_of_one_gpu_keeps_faults_of_another() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.xid(1, 79)
    node.rest(30)
    node.clear("gpu-0")
    assert node.health("gpu-0") is Health.HEALTHY
    assert node.health("gpu-1") is Health.UNHEALTHY


@pytest.mark.parametrize("name", ["uuid", "bus", "PCI:{}", "0000{}", "driver", "pool", "p/a", "a"])
def test_device_is_found_by_each_of_its_names(name: str) -> None:
    node = ClearNode()
    gpu = node.gpus[1]
    node.declare(a=DeclaredGpuDevice("", gpu.uuid, -1, -1))
    node.xid(1, 62)
    node.rest(30)
    assert node.health("a") is Health.UNHEALTHY
    names = {"uuid": gpu.uuid, "bus": gpu.bus.upper(), "driver": f"{DRIVER}/p/a"}
    names["pool"] = f"{node.settings.node}/gpu-1"
    assert cleared_faults(node.clear(names.get(name) or name.format(gpu.bus))) == [("gpu-1", "gpu.xid.62")]
    assert node.health("a") is node.health("gpu-1") is Health.HEALTHY
    assert node.report is not None
    assert [fault.device for fault in node.report.cleared] == ["gpu-1", f"{DRIVER}/p/a"]


def test_declared_device_is_found_by_its_name_without_the_pool_of_the_node() -> None:
    node = ClearNode()
    part = DeclaredOtherDevice()
    node.declared = (DriverDevice(DRIVER, node.settings.node, "fpga", part, 0),)
    node.next()
    node.report_fault("fpga", pool=node.settings.node)
    node.next()
    assert cleared_faults(node.clear(f"{DRIVER}/fpga")) == [
        (f"{DRIVER}/{node.settings.node}/fpga", "fpga.stuck")
    ]


@pytest.mark.parametrize("name", ["{driver}/{node}/gpu-1", "{driver}/gpu-1"])
def test_host_device_is_found_as_a_device_of_the_served_driver(name: str) -> None:
    node = ClearNode()
    node.state = replace(node.state, settings=replace(node.settings, drivers=(DRIVER,)))
    node.xid(1, 62)
    node.rest(30)
    found = name.format(driver=DRIVER, node=node.settings.node)
    assert node.clear(found.replace(DRIVER, "other.example.com")).refusal is ClearRefusal.UNKNOWN
    assert cleared_faults(node.clear(found)) == [("gpu-1", "gpu.xid.62")]


def test_name_of_devices_of_two_drivers_is_refused() -> None:
    node = ClearNode()
    node.declare(a=DeclaredOtherDevice())
    other = DriverDevice(DRIVER, "q", "a", DeclaredOtherDevice(), 0)
    node.declared = (*node.declared, other)
    node.next()
    result = node.clear("a")
    assert (result.refusal, result.cleared) == (ClearRefusal.UNKNOWN, ())
    assert "no device 'a' is known" in result.reason


def test_clear_of_fault_in_probation_ends_probation() -> None:
    node = ClearNode(probation_s=300.0)
    node.set_readings(0, ecc_correctable=5)
    node.next()
    node.xid(0, 46)
    node.rest(20)
    node.reset(0)
    node.rest(30)
    assert node.open_codes() == ["gpu.xid.46"], "in its probation"
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", "gpu.xid.46")]
    assert node.health() is Health.HEALTHY
    node.restart()
    assert node.health() is Health.HEALTHY


def test_clear_of_reading_in_probation_ends_probation() -> None:
    node = ClearNode(probation_s=300.0)
    node.lose(0)
    node.rest(10)
    node.recover(0)
    node.rest(30)
    (code,) = node.open_codes()
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", code)]
    assert node.health() is Health.HEALTHY


@pytest.mark.parametrize("code", ["", POOL_SHRUNK])
def test_clear_of_host_reading_in_probation_ends_probation(code: str) -> None:
    node = PaperNode(EngineSettings("node-a", rules=(RuleOverride(POOL_SHRUNK, probation_s=3600),)))
    for pages in (10, 8, 10):
        node.pool(pool_sample(pages))
        report = node.next(60)
    pool = device_of(report, "hugepages-2mi-node0")
    assert (pool.health, codes(pool)) == (Health.UNHEALTHY, [POOL_SHRUNK])
    snapshot = replace(node.snapshot(), clear_requests=(ClearRequest(1, pool.device, code, ROOT),))
    _, report = step(node.state, snapshot, node.now)
    assert cleared_faults(report.clear_results[0]) == [(pool.device, POOL_SHRUNK)]
    assert device_of(report, pool.device).health is Health.HEALTHY


def test_clear_of_shared_fault_clears_it_for_all_gpus() -> None:
    node = ClearNode()
    node.rest(1)
    node.log(FATAL_SXID)
    node.rest(5)
    code = "gpu.fabric.sxid.11004"
    assert cleared_faults(node.clear("gpu-1", code)) == [("gpu-0", code), ("gpu-1", code)]
    assert node.health("gpu-0") is node.health("gpu-1") is Health.HEALTHY


def test_clear_of_mig_instance_keeps_faults_of_other_instance() -> None:
    node = ClearNode(migs={0: [(1, 0), (2, 0)]})
    node.nvml_xid(0, 62, 1, 0)
    node.nvml_xid(0, 62, 2, 0)
    node.rest(30)
    assert cleared_faults(node.clear("gpu-0-mig-1-0")) == [("gpu-0-mig-1-0", "gpu.xid.62")]
    assert node.health("gpu-0-mig-1-0") is Health.HEALTHY
    assert node.health("gpu-0-mig-2-0") is Health.UNHEALTHY


def test_clear_of_gpu_clears_faults_of_its_instances() -> None:
    node = ClearNode(migs={0: [(1, 0), (2, 0)]})
    node.nvml_xid(0, 62, 1, 0)
    node.nvml_xid(0, 79)
    node.rest(30)
    assert set(cleared_faults(node.clear("gpu-0"))) >= {
        ("gpu-0-mig-1-0", "gpu.xid.62"),
        ("gpu-0", "gpu.xid.79"),
    }
    for name in ("gpu-0", "gpu-0-mig-1-0", "gpu-0-mig-2-0"):
        assert node.health(name) is Health.HEALTHY


def test_new_occurrence_after_clear_latches_again() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.clear("gpu-0")
    node.rest(60)
    assert node.health() is Health.HEALTHY
    node.xid(0, 79)
    node.next()
    assert node.open_codes() == ["gpu.xid.79"]
    node.restart()
    assert node.open_codes() == ["gpu.xid.79"]
    node.rest(1000)
    assert node.health() is Health.UNHEALTHY
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", "gpu.xid.79")]


@pytest.mark.parametrize("boot_id", ["", SECOND_BOOT])
@pytest.mark.parametrize("kmsg", [True, False])
def test_restart_keeps_fault_cleared_with_its_record(boot_id: str, kmsg: bool) -> None:
    node = ClearNode(kmsg=kmsg)
    node.xid(0, 79)
    node.rest(30)
    (record,) = node.clear("gpu-0").cleared
    for _ in range(2):
        report = node.restart(boot_id=boot_id)
        assert report is not None
        assert report.cleared == (record,)
        assert node.health() is Health.HEALTHY
        node.rest(600)
        assert node.health() is Health.HEALTHY
    assert (record.uid, record.login_uid, record.pid) == (ROOT.uid, ROOT.login_uid, ROOT.pid)


@pytest.mark.parametrize("boot_id", ["", SECOND_BOOT])
@pytest.mark.parametrize("step_s", [7200.0, 400 * 86_400.0])
def test_clock_step_and_restarts_keep_fault_cleared(boot_id: str, step_s: float) -> None:
    node = ClearNode(probation_s=3600.0)
    node.xid(0, 48)
    node.rest(30)
    node.clear("gpu-0")
    node.wall_s += step_s
    node.rest(60)
    for _ in range(2):
        node.restart(boot_id=boot_id)
        boot_id = ""
        assert (node.health(), node.open_codes()) == (Health.HEALTHY, [])
        node.rest(30)


def test_clear_ends_fault_that_else_only_replacement_ends() -> None:
    node = ClearNode()
    node.xid(0, 165)
    node.rest(30)
    node.restart(boot_id=SECOND_BOOT)
    node.rest(30)
    assert node.open_codes() == ["gpu.xid.165"]
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", "gpu.xid.165")]
    for boot_id in ("", THIRD_BOOT):
        node.restart(boot_id=boot_id)
        node.rest(30)
        assert node.open_codes() == []


def test_log_line_of_cleared_fault_read_after_restart_adds_nothing() -> None:
    node = ClearNode()
    node.log_xid(0, 79)
    lines, node.kmsg = node.kmsg, None
    node.nvml_xid(0, 79)
    node.rest(30)
    node.clear("gpu-0")
    node.kmsg = lines  # readable from now on
    node.restart()
    node.rest(30)
    assert node.health() is Health.HEALTHY


def test_record_is_reported_for_a_day() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.clear("gpu-0")
    node.wait(86_000)
    assert len(node.next().cleared) == 1
    node.wait(500)
    assert node.next().cleared == ()
    assert node.checkpoint.cleared == ()


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "shown"),
    [
        ({"remap_failure": 1}, "gpu.remap.failure"),
        ({"remap_pending": 1}, "gpu.remap.pending"),
        ({"recovery_action": 2}, "gpu.recovery_action"),
    ],
)
def test_clear_is_refused_while_reading_shows_fault(readings: Mapping[str, Any], shown: str) -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.set_readings(0, **readings)
    result = node.clear("gpu-0")
    assert (result.refusal, result.cleared) == (ClearRefusal.STILL_PRESENT, ())
    assert f"gpu-0: a reading still shows a fault: {shown}: " in result.reason
    assert "gpu.xid.79" in node.open_codes()
    assert node.checkpoint.cleared == ()


@pytest.mark.parametrize("status", [NvmlReturnCode.LOST, NvmlReturnCode.RESET_REQUIRED, 999])
def test_clear_is_refused_while_gpu_returns_errors(status: int) -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.lose(0, status)
    result = node.clear("gpu-0", "gpu.xid.79")
    assert result.refusal is ClearRefusal.STILL_PRESENT
    assert "gpu.xid.79" in node.open_codes()


def test_clear_is_refused_while_gpu_hangs() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.hang(0)
    node.rest(30)
    assert node.clear("gpu-0").refusal is ClearRefusal.STILL_PRESENT


def test_clear_is_refused_before_first_reading_of_gpu() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.hanging.add(0)  # the first pass has no overdue call yet
    node.restart(evaluate=False)
    node.next(3)
    result = node.clear("gpu-0")
    assert (result.refusal, "not read yet" in result.reason) == (ClearRefusal.STILL_PRESENT, True)


def test_clear_of_shared_fault_is_refused_while_other_gpu_is_lost() -> None:
    node = ClearNode()
    node.rest(1)
    node.log(FATAL_SXID)
    node.rest(5)
    node.lose(1)
    result = node.clear("gpu-0")
    assert (result.refusal, "gpu-1: " in result.reason) == (ClearRefusal.STILL_PRESENT, True)


@pytest.mark.parametrize(
    ("device", "code", "refusal", "text"),
    [
        ("gpu-7", "", ClearRefusal.UNKNOWN, "no device 'gpu-7' is known; did you mean"),
        ("GPU-none", "", ClearRefusal.UNKNOWN, "no device 'GPU-none' is known"),
        ("gpu-1", "", ClearRefusal.UNKNOWN, "gpu-1 has no latched fault"),
        ("gpu-1", "gpu.xid.79", ClearRefusal.UNKNOWN, "gpu-1 has no latched fault gpu.xid.79"),
        ("gpu-0", "gpu.xid.62", ClearRefusal.UNKNOWN, "gpu-0 has no latched fault gpu.xid.62"),
        ("gpu-0", "gpu.nonsense", ClearRefusal.UNKNOWN, "gpu-0 has no latched fault gpu.nonsense"),
        ("gpu-0", "gpu.xid.13", ClearRefusal.UNKNOWN, "gpu-0: gpu.xid.13 is for information only"),
        ("gpu-0", "gpu.lost", ClearRefusal.NOT_LATCHED, "gpu.lost is not latched: a reading decides it"),
        ("gpu-0", "gpu.ecc.off", ClearRefusal.NOT_LATCHED, "a reading decides it, and shows "),
        ("cpu-node0", "", ClearRefusal.UNKNOWN, "cpu-node0 has no latched fault"),
    ],
)
def test_refused_clear_names_the_fault_that_cannot_be_cleared(
    device: str, code: str, refusal: ClearRefusal, text: str
) -> None:
    node = ClearNode()
    node.set_readings(0, ecc_mode=1)
    node.next()
    node.set_readings(0, ecc_mode=0)
    node.xid(0, 79)
    node.xid(0, 13)
    node.rest(30)
    before = node.open_codes()
    result = node.clear(device, code)
    assert (result.refusal, result.cleared) == (refusal, ())
    assert text in result.reason
    assert node.open_codes() == before


def test_clear_of_instance_names_gpu_that_has_the_fault() -> None:
    node = ClearNode(migs={0: [(1, 0), (2, 0)]})
    node.nvml_xid(0, 79)
    node.rest(30)
    result = node.clear("gpu-0-mig-1-0", "gpu.xid.79")
    assert (result.refusal, result.reason) == (
        ClearRefusal.UNKNOWN,
        "gpu-0-mig-1-0 has gpu.xid.79 from gpu-0; name gpu-0",
    )


def test_second_clear_is_refused() -> None:
    node = ClearNode()
    node.xid(0, 79)
    node.rest(30)
    node.clear("gpu-0")
    assert node.clear("gpu-0").refusal is ClearRefusal.UNKNOWN


def test_two_requests_in_one_evaluation_are_answered_in_order() -> None:
    node = ClearNode()
    node.xid(0, 62)
    node.rest(30)
    node.requests = tuple(ClearRequest(number, "gpu-0", "", ROOT) for number in (2, 1))
    first, second = node.next().clear_results
    assert (first.number, first.refusal) == (1, None)
    assert (second.number, second.refusal) == (2, ClearRefusal.UNKNOWN)


# --- readings that differ from those at start ---------------------------------------------------------------


def test_clear_of_links_keeps_fault_of_fabric_manager() -> None:
    node = ClearNode()
    node.rest(30)
    node.host = replace(node.host, fabric_manager=Missing(Absence.ABSENT))
    node.set_readings(0, links_up=ALL_UP & ~0b10000)
    node.rest(30)
    assert node.open_codes() == ["gpu.nvlink.down", "gpu.fabric.manager"]
    assert cleared_faults(node.clear("gpu-0", "gpu.nvlink.down")) == [("gpu-0", "gpu.nvlink.down")]
    node.rest(400)
    assert node.open_codes() == ["gpu.fabric.manager"]


@pytest.mark.parametrize("code", ["", "gpu.nvlink.down"])
def test_clear_of_links_is_refused_while_recovery_is_requested(code: str) -> None:
    node = ClearNode()
    node.rest(30)
    node.set_readings(0, links_up=ALL_UP & ~0b10000, recovery_action=1)
    node.rest(30)
    result = node.clear("gpu-0", code)
    assert (result.refusal, result.cleared) == (ClearRefusal.STILL_PRESENT, ())
    assert "gpu-0: a reading still shows a fault: gpu.recovery_action: " in result.reason
    node.set_readings(0, recovery_action=0)
    node.rest(400)
    assert node.open_codes() == ["gpu.nvlink.down"]
    assert cleared_faults(node.clear("gpu-0", code)) == [("gpu-0", "gpu.nvlink.down")]


def test_clear_with_a_code_is_refused_if_it_would_end_another_fault() -> None:
    node = ClearNode()
    node.rest(30)
    node.host = replace(node.host, fabric_manager=Missing(Absence.ABSENT))
    node.set_readings(0, fabric_state=1)
    node.rest(90)
    before = node.open_codes()
    assert before == ["gpu.fabric.state", "gpu.fabric.manager"]
    result = node.clear("gpu-0", "gpu.fabric.manager")
    assert (result.refusal, result.reason) == (
        ClearRefusal.STILL_PRESENT,
        "gpu-0: gpu.fabric.manager cannot be cleared alone: gpu.fabric.state would end too",
    )
    node.rest(400)
    assert node.open_codes() == before
    assert {code for _, code in cleared_faults(node.clear("gpu-0"))} == set(before)


# --- faults that drivers report -----------------------------------------------------------------------------


def test_clear_ends_driver_reported_fault_at_once() -> None:
    node = ClearNode()
    node.declare(fpga=DeclaredOtherDevice())
    node.next()
    node.report_fault("fpga")
    node.next()
    assert node.health("fpga") is Health.UNHEALTHY
    result = node.clear(f"{DRIVER}/p/fpga")
    assert cleared_faults(result) == [(f"{DRIVER}/p/fpga", "fpga.stuck")]
    assert result.driver_faults == node.driver_faults
    node.rest(60)  # the ledger has not dropped it yet
    assert "fpga.stuck" not in node.codes("fpga")
    node.driver_faults = tuple(fault._replace(expired_wall_s=node.wall_s) for fault in node.driver_faults)
    node.rest(60)
    assert "fpga.stuck" not in node.codes("fpga")
    node.report_fault("fpga", number=2)
    node.next()
    assert "fpga.stuck" in node.codes("fpga")


def test_fault_that_driver_without_devices_reports_is_of_host_device() -> None:
    node = ClearNode()
    node.report_fault("gpu-0", pool=node.settings.node)
    node.report_fault("gpu-1", number=2, pool="another-pool")
    node.next()
    assert (node.health("gpu-0"), node.open_codes()) == (Health.UNHEALTHY, ["fpga.stuck"])
    assert node.health("gpu-1") is Health.HEALTHY
    node.rest(600)
    assert node.health("gpu-0") is Health.UNHEALTHY, "the fault has not ended"
    result = node.clear("gpu-0")
    assert cleared_faults(result) == [("gpu-0", "fpga.stuck")]
    assert result.driver_faults == node.driver_faults[:1]
    assert node.health("gpu-0") is Health.HEALTHY


def test_fault_reported_without_declared_devices_reaches_the_host_gpus() -> None:
    node = ClearNode()
    node.report_fault("gpu-0", "gpu.driver.init", pool=node.settings.node)
    node.next()
    assert node.open_codes("gpu-0") == node.open_codes("gpu-1") == ["gpu.driver.init"]


def test_fault_of_undeclared_device_waits_until_declarations_are_read() -> None:
    node = ClearNode()
    reading = SourceSample(
        "devices.d", SourceState.STARTING, node.now.mono_ns, NS, 0, "", passes=0, vital=False
    )
    node.more_sources = (reading,)
    node.report_fault("gpu-0", pool=node.settings.node)
    node.next()
    assert node.open_codes("gpu-0") == []
    node.more_sources = (reading._replace(state=SourceState.OK, passes=1),)
    node.next()
    assert node.open_codes("gpu-0") == ["fpga.stuck"]


def test_fault_of_host_device_moves_to_device_that_driver_declares_later() -> None:
    node = ClearNode()
    node.report_fault("gpu-0", pool=node.settings.node)
    node.next()
    assert node.open_codes("gpu-0") == ["fpga.stuck"]
    part = DeclaredGpuDevice(node.gpus[1].bus, "", -1, -1)
    node.declared = (DriverDevice(DRIVER, node.settings.node, "gpu-0", part, 0),)
    node.rest(5)
    assert node.open_codes("gpu-0") == []
    found = next(device for device in node.evaluate().devices if device.driver == DRIVER)
    assert [cause.code for cause in found.causes] == ["fpga.stuck"]


def test_clear_of_gpu_ends_fault_that_driver_reported_of_it() -> None:
    node = ClearNode()
    node.declare(a=DeclaredGpuDevice(node.gpus[0].bus, "", -1, -1))
    node.next()
    node.report_fault("a")
    node.xid(0, 79)
    node.rest(30)
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", "gpu.xid.79"), (f"{DRIVER}/p/a", "fpga.stuck")]
    assert node.health("gpu-0") is node.health("a") is Health.HEALTHY


def test_driver_fault_is_cleared_while_the_fault_of_a_lost_gpu_stays() -> None:
    node = ClearNode()
    node.declare(a=DeclaredGpuDevice(node.gpus[0].bus, "", -1, -1))
    node.next()
    node.report_fault("a")
    node.xid(0, 79)
    node.rest(30)
    node.lose(0)
    assert node.clear("gpu-0").refusal is ClearRefusal.STILL_PRESENT
    assert cleared_faults(node.clear("gpu-0", "fpga.stuck")) == [(f"{DRIVER}/p/a", "fpga.stuck")]
    assert "gpu.xid.79" in node.open_codes()


def test_clear_of_nvml_event_makes_gpu_healthy() -> None:
    node = ClearNode()
    node.nvml_event(0, GpuEvent.FATAL_POISON)
    node.next()
    (code,) = node.open_codes()
    assert cleared_faults(node.clear("gpu-0")) == [("gpu-0", code)]
    assert node.health() is Health.HEALTHY
