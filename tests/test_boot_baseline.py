"""Values at start over restarts of the agent: kept within a boot, configured, and accepted by operators."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from gpu_samples import ALL_UP, pci_sample
from nic_samples import NIC, PORT, nic_sample
from paper import ABSENT, cpus_sample, node_sample, pool_sample
from paper_gpus import FIRST_BOOT, SECOND_BOOT, GpuNode

from agent.engine.step import initial_state
from agent.health.gpu.faults.checkpoint import restore_faults
from agent.health.host.cpu.state import CpuRuleState
from agent.health.host.pci.state import pci_baselines
from agent.health.state_updates import rebaseline_declared_part
from agent.model.cleared_faults import ClearRefusal, ClearRequest, ClearResult, Operator
from agent.model.declared_devices import (
    DeclaredFile,
    DeclaredHugepageDevice,
    DeclaredNicDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverCheckSample,
    DriverDevice,
)
from agent.model.health import Blame, Cause, Health, Repair, Severity
from agent.model.machine_samples import LogLine, MachineSample, NumaMemorySample, PerCpuSample, PressureSample
from agent.model.persistent_faults import BootBaseline, PersistentState
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.model.report import Report
from agent.model.settings import EngineSettings, HostLimits, RuleOverride
from agent.model.snapshot import CpuSetsSample, Snapshot
from agent.model.time import NS
from agent.store.gpu_fault_file import decode_gpu_faults, encode_gpu_faults
from agent.store.state_files import UnusableFile

DRIVER: Final = "a.example.com"
ROOT: Final = Operator(0, 4711, 1000)
UNREAD: Final = Missing(Absence.UNREADABLE, 5)
FUNCTION: Final = "0000:3b:00.0"
POOL, CPU, MEMORY = "hugepages-2mi-node0", "cpu-node0", "memory-node0"


def memory(blocks_offline: int = 0) -> NumaMemorySample:
    return NumaMemorySample(0, 1 << 20, 0, 8, blocks_offline)


def core(cpu: int, cap_khz: int = 3_000_000) -> PerCpuSample:
    return PerCpuSample(cpu, cpu, 0, 3_000_000, cap_khz, ABSENT)


class Node(GpuNode):
    """Node with CPUs, memory, a pool, a GPU, and a PCI function and a NIC that a driver declares."""

    numa = memory()
    cores = (core(0), core(1))
    smt: Reading = 1
    function = pci_sample()._replace(address=FUNCTION)
    nic = nic_sample()
    is_function_gone = False

    def __init__(self) -> None:
        self.declared: dict[str, DeclaredPart] = {
            "pci-0": DeclaredPciDevice(FUNCTION, ""),
            "nic-0": DeclaredNicDevice(NIC, ""),
        }
        self.requests: tuple[ClearRequest, ...] = ()
        self.lines: tuple[LogLine, ...] = ()
        super().__init__(1)
        self.restore()
        self._start(PersistentState())

    def snapshot(self) -> Snapshot:
        read = super().snapshot()
        names = ("edac", "memory", "cores", "pressure", "pci", "nic")
        sources = tuple(
            SourceSample(name, SourceState.OK, self.now_ns, NS, 0, "", passes=self.passes, vital=False)
            for name in names
        )
        machine = MachineSample(
            dimms=(),
            numa=(self.numa,),
            cores=self.cores,
            pressure=PressureSample(*[ABSENT] * len(PressureSample._fields)),
            nodes_online=1,
            nodes_memory=1,
            corrupted_kib=0,
            surplus_failed=0,
            smt_active=self.smt,
            sources=sources[:4],
        )
        functions = (self.function, pci_sample(driver="mlx5_core")._replace(address=NIC))
        devices = [DriverDevice(DRIVER, "node-a", name, part, 0) for name, part in self.declared.items()]
        assert read.log is not None
        return replace(
            read,
            log=replace(read.log, lines=(*read.log.lines, *self.lines)),
            machine=machine,
            pci=() if self.is_function_gone else functions,
            nics=(self.nic,),
            sources=(*read.sources, *sources),
            declared=(DeclaredFile(DRIVER, tuple(devices)),),
            clear_requests=self.requests,
        )

    def log_host(self, text: str) -> None:
        """Write a line about the host to the kernel log."""
        us = self.now_ns // 1000
        self.lines += (LogLine(0, 1, us, us, text, text, len(self.lines)),)

    def restore(self) -> None:
        """Give each device what it has at start."""
        self.cpus = cpus_sample()._replace(isolated=0b10)
        self.numa = memory()
        self.cores = (core(0), core(1))
        self.smt = 1
        self.function = pci_sample()._replace(address=FUNCTION)
        self.nic = nic_sample()
        self.pool(pool_sample(64))
        self.set_readings(0, links_up=ALL_UP)

    def lose(self) -> None:
        """Take something from each device."""
        self.cpus = cpus_sample(0b01)
        self.numa = memory(2)
        self.cores = (core(0, 2_000_000), core(1))
        self.smt = 0
        self.pool(pool_sample(40))
        self.function = self.function._replace(driver="vfio-pci", width=4)
        self.nic = nic_sample(PORT._replace(state=1, phys_state=3))
        self.set_readings(0, links_up=0b1)

    def start_again(
        self, boot_id: str = FIRST_BOOT, settings: EngineSettings | None = None, passes: int = 4
    ) -> Report:
        """Let the next agent start with the stored state, and evaluate some passes."""
        kept = decode_gpu_faults(encode_gpu_faults(self.state.checkpoint))
        self.boot_id, self.settings = boot_id, settings or self.settings
        self._start(kept)
        passed, self.passes = self.passes, 0
        self.evaluate()  # no source has finished a pass
        self.passes = passed
        return self.next(passes)

    def _start(self, kept: PersistentState) -> None:
        restored = restore_faults(kept, self.boot_id, self.settings.gpu, self.now)
        self.state = initial_state(self.settings, restored, kept, self.boot_id)

    def clear(self, device: str, code: str = "") -> ClearResult:
        """Request a clear, evaluate once, and return the answer."""
        number = self.state.last_clear_request + 1
        self.requests = (ClearRequest(number, device, code, ROOT),)
        (result,) = self.next().clear_results
        self.requests = ()
        return result


def cause_codes(report: Report, lowest: Severity = Severity.INFO) -> dict[str, set[str]]:
    """Return the codes of the causes of each device."""
    return {
        device.device: {cause.code for cause in device.causes if cause.severity >= lowest}
        for device in report.devices
        if any(cause.severity >= lowest for cause in device.causes)
    }


def cause_of(report: Report, device: str, code: str) -> Cause:
    (verdict,) = (found_device for found_device in report.devices if found_device.device == device)
    (cause,) = (cause for cause in verdict.causes if cause.code == code)
    return cause


# --- raised faults ------------------------------------------------------------------------------------------


def test_restart_keeps_faults_that_the_first_readings_do_not_show() -> None:
    """Counters have no history yet, and the caps of the CPUs are over: their cause is in its probation."""
    node = Node()
    node.settings = replace(node.settings, host=HostLimits(nic_link_window_s=300))
    node.start_again()
    node.nic, node.cores = nic_sample(PORT._replace(link_downs=100)), (core(0, 2_000_000), core(1))
    node.next(3)
    node.cores = (core(0), core(1))
    held = {"nic-0": {"nic.flapping"}, CPU: {"cpu.capped"}}
    before = node.next(4)
    assert cause_codes(before) == held
    after = node.start_again(passes=1)
    assert cause_codes(after) == held
    for device, (code,) in held.items():
        assert cause_of(after, device, code) == cause_of(before, device, code)
    assert cause_codes(node.next(52)) == held, "a restart does not prolong the probation"
    assert cause_codes(node.next(10)) == {"nic-0": {"nic.flapping"}}
    assert cause_codes(node.next(240)) == {}, "the window is full"


def test_clear_ends_a_restored_fault_of_a_rate_whose_window_is_not_full() -> None:
    """An agent that restarts more often than the window would keep the fault for ever."""
    node = Node()
    node.next(3)
    node.nic = nic_sample(PORT._replace(link_downs=100))
    node.next(3)
    for _ in range(6):
        node.start_again(passes=100)
    assert cause_codes(node.next()) == {"nic-0": {"nic.flapping"}}
    result = node.clear("nic-0", "nic.flapping")
    assert [record.code for record in result.cleared] == ["nic.flapping"], result.reason
    assert cause_codes(node.next(2)) == {}


def test_restarts_do_not_prolong_the_probation_of_a_rate() -> None:
    node = Node()
    rule = RuleOverride("nic.flapping", severity=Severity.UNHEALTHY, probation_s=60)
    node.settings = replace(node.settings, host=HostLimits(nic_link_window_s=120), rules=(rule,))
    node.start_again()
    node.nic = nic_sample(PORT._replace(link_downs=100))
    node.next(3)
    assert "(over; " in cause_of(node.next(125), "nic-0", "nic.flapping").evidence
    assert cause_codes(node.start_again(passes=30)) == {"nic-0": {"nic.flapping"}}
    assert cause_codes(node.start_again(passes=40)) == {}


def test_restart_keeps_a_fault_of_a_device_whose_check_has_not_run_yet() -> None:
    class CheckedNode(Node):
        """Node whose driver also reports a check of the NIC."""

        reports = True

        def snapshot(self) -> Snapshot:
            read = super().snapshot()
            (file,) = read.declared
            subject = f"{DRIVER}/node-a/nic-0"
            devices = tuple(
                device._replace(checks=("link",)) if device.name == "nic-0" else device
                for device in file.devices
            )
            result = DriverCheckSample(
                "link",
                subject,
                finding=None,
                no_result_reason="",
                passes=5 + self.passes,
                beat_ns=self.now_ns,
                period_ns=5 * NS,
                raise_after=1,
                clear_after=1,
                lease_ns=15 * NS,
            )
            checks = (result,) if self.reports else ()
            return replace(read, declared=(file._replace(devices=devices),), checks=checks)

    node = CheckedNode()
    node.next(3)
    node.nic = nic_sample(PORT._replace(link_downs=100))
    before = cause_codes(node.next(3))
    assert "nic.flapping" in before["nic-0"]
    node.reports = False
    node.start_again(passes=1)
    node.reports = True
    assert cause_codes(node.next()) == before


def test_milder_severity_applies_to_a_restored_fault_at_once() -> None:
    node = Node()
    node.start_again()
    node.nic = nic_sample(PORT._replace(link_downs=100))
    assert cause_codes(node.next(3)) == {"nic-0": {"nic.flapping"}}
    milder = RuleOverride("nic.flapping", severity=Severity.INFO)
    report = node.start_again(settings=replace(node.settings, rules=(milder,)), passes=1)
    assert cause_codes(report, Severity.DEGRADED) == {}


LOST: Final = {
    CPU: {"cpu.offline", "cpu.isolation", "cpu.capped", "cpu.smt"},
    MEMORY: {"mem.blocks.offline"},
    POOL: {"mem.hugepages.pool_shrunk"},
    "pci-0": {"pci.unbound", "pci.link_width"},
    "nic-0": {"nic.port_down"},
    "gpu-0": {"gpu.nvlink.down"},
}


def test_faults_against_start_survive_a_restart_of_the_agent() -> None:
    node = Node()
    assert cause_codes(node.next(4)) == {}
    node.lose()
    before = node.next(4)
    assert cause_codes(before) == LOST
    for _ in range(2):
        again = node.start_again()
        assert cause_codes(again) == LOST
        texts = [[cause.evidence for cause in device.causes] for device in again.devices]
        assert texts == [[cause.evidence for cause in device.causes] for device in before.devices]
    node.restore()
    assert cause_codes(node.next(80), Severity.DEGRADED) == {}


@pytest.mark.parametrize(("device", "address"), [("nic-0", NIC), ("pci-0", FUNCTION)])
def test_cleared_line_about_a_nic_does_not_count_after_a_restart(device: str, address: str) -> None:
    node = Node()
    line = f"mlx5_core {address}: synd 0x8: unrecoverable hardware error"
    node.next(4)
    node.log_host(line)
    assert cause_codes(node.next(4), Severity.DEGRADED) == {device: {"pci.nic.stopped"}}
    assert not node.clear(f"{DRIVER}/node-a/{device}", "pci.nic.stopped").refusal
    assert cause_codes(node.next(4), Severity.DEGRADED) == {}
    assert cause_codes(node.start_again(), Severity.DEGRADED) == {}
    node.log_host(line)
    assert cause_codes(node.next(4), Severity.DEGRADED) == {device: {"pci.nic.stopped"}}


def test_line_about_a_function_stays_a_fault_if_another_code_is_cleared() -> None:
    node = Node()
    node.next(4)
    node.log_host(f"nvme {FUNCTION}: AER: device recovery failed")
    node.lose()
    node.next(4)
    assert not node.clear(f"{DRIVER}/node-a/pci-0", "pci.link_width").refusal
    assert cause_codes(node.next(4))["pci-0"] == {"pci.unbound", "pci.fault"}


def test_values_at_start_survive_unreadable_values_at_a_restart() -> None:
    node = Node()
    node.next(4)
    stored = node.state.checkpoint.start
    node.cpus = CpuSetsSample(UNREAD, UNREAD, UNREAD)
    node.numa = node.numa._replace(blocks=UNREAD, blocks_offline=UNREAD)
    node.cores = tuple(core._replace(cap_khz=UNREAD) for core in node.cores)
    node.smt = UNREAD
    node.pool(pool_sample(UNREAD))
    node.start_again()
    assert node.state.checkpoint.start == stored
    node.lose()
    assert cause_codes(node.next(4)) == LOST


CPU_FAULTS: Final = (
    "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: b200000000070f0f",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [cat:123]",
)


@pytest.mark.parametrize("left", [0b0111, 0b0011])
@pytest.mark.parametrize("expected", [None, 0b1111])
def test_offline_cpu_keeps_its_numa_node_and_faults_over_restarts(left: int, expected: int | None) -> None:
    node = Node()
    node.cpus = CpuSetsSample(0b1111, 0b1111, 0)
    node.nodes = {0: node_sample(0, 0b0011), 1: node_sample(1, 0b1100)}
    node.start_again(settings=replace(node.settings, expect_cpus=expected))
    for line in CPU_FAULTS:
        node.log_host(line)
    node.cpus = CpuSetsSample(0b1111, left, 0)
    faults = {"cpu-node1": {"cpu.offline", "cpu.machine_check", "cpu.lockup.soft"}}
    assert cause_codes(node.next(4), Severity.DEGRADED) == faults
    node.nodes[1] = node_sample(1, 0b1100 & left)  # a new agent reads which CPUs are online
    for _ in range(2):
        assert cause_codes(node.start_again(), Severity.DEGRADED) == faults
    node.cpus = CpuSetsSample(0b1111, 0b1111, 0)
    assert cause_codes(node.next(80), Severity.DEGRADED) == {
        "cpu-node1": faults["cpu-node1"] - {"cpu.offline"}
    }


def test_state_file_of_an_earlier_version_has_the_cpus_at_start() -> None:
    node = Node()
    node.next(4)
    node.log_host(CPU_FAULTS[0].replace("CPU 3", "CPU 1"))
    node.cpus, node.nodes = cpus_sample(0b01), {0: node_sample(0, 0b01)}
    kept = node.state.checkpoint
    kept = replace(kept, start=replace(kept.start, numa_cpus=()))
    node.state = initial_state(node.settings, None, kept, FIRST_BOOT)
    assert cause_codes(node.next(4))[CPU] >= {"cpu.offline", "cpu.machine_check"}


@pytest.mark.parametrize("boot_id", [SECOND_BOOT, ""])
def test_values_of_another_boot_are_no_values_at_start(boot_id: str) -> None:
    node = Node()
    node.next(4)
    node.lose()
    node.next(4)
    report = node.start_again(boot_id)
    # the number of blocks that are offline, and a port that could have a link, need no values at start
    assert cause_codes(report, Severity.DEGRADED).keys() <= {"nic-0"}
    assert node.state.checkpoint.start.boot_id == boot_id


def test_device_that_is_gone_is_reported_after_a_restart() -> None:
    node = Node()
    node.next(4)
    node.pools.clear()
    node.next(4)
    report = node.start_again()
    assert cause_codes(report)[POOL] == {"mem.hugepages.pool_shrunk"}


def test_pci_function_that_is_gone_is_a_fault_of_hardware_after_a_restart() -> None:
    node = Node()
    node.next(4)
    node.is_function_gone = True
    before = cause_of(node.next(4), "pci-0", "pci.missing")
    assert (before.blame, before.repair) == (Blame.HARDWARE, Repair.REBOOT_NODE)
    after = cause_of(node.start_again(), "pci-0", "pci.missing")
    assert (after.evidence, after.blame, after.repair) == (before.evidence, before.blame, before.repair)
    node.is_function_gone = False
    assert cause_codes(node.next(80), Severity.DEGRADED) == {}


def test_gains_count_from_the_next_start_of_the_agent() -> None:
    node = Node()
    node.cpus = cpus_sample(0b01)
    node.next(4)
    node.cpus = cpus_sample()
    node.pool(pool_sample(96))
    node.next(4)
    assert cause_codes(node.start_again()) == {}
    node.cpus = cpus_sample(0b01)
    node.pool(pool_sample(64))
    assert cause_codes(node.next(4)) == {CPU: {"cpu.offline"}, POOL: {"mem.hugepages.pool_shrunk"}}


def test_configured_values_outrank_those_at_start() -> None:
    node = Node()
    node.next(4)
    node.lose()
    node.next(4)
    expecting = replace(node.settings, expect_cpus=0b01, expect_pools={POOL: 40})
    report = node.start_again(settings=expecting)
    assert "cpu.offline" not in cause_codes(report).get(CPU, set())
    assert POOL not in cause_codes(report)
    assert node.state.checkpoint.start.cpus == (), "the configuration's values are not of the machine"
    assert [pool.pages for pool in node.state.checkpoint.start.pools] == [-1]


# --- accepted values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOST)
def test_clear_sets_present_values_as_the_baseline(name: str) -> None:
    node = Node()
    node.next(4)
    node.lose()
    node.next(4)
    subject = f"{DRIVER}/node-a/{name}" if name in node.declared else name
    result = node.clear(subject)
    assert result.refusal is None, result.reason
    shown = LOST[name] - {"cpu.smt"}
    assert {(fault.device, fault.code) for fault in result.cleared} == {(subject, code) for code in shown}
    for report in (node.evaluate(), node.next(4), node.start_again()):
        others = {device: codes for device, codes in LOST.items() if device != name}
        assert cause_codes(report, Severity.DEGRADED) == {
            device: codes - {"cpu.smt"} for device, codes in others.items()
        }
        assert {fault.code for fault in report.cleared} == shown


@pytest.mark.parametrize(("name", "code"), [(name, code) for name in LOST for code in sorted(LOST[name])])
def test_clear_with_a_code_sets_only_the_baseline_of_its_rule(name: str, code: str) -> None:
    node = Node()
    node.next(4)
    node.lose()
    node.next(4)
    subject = f"{DRIVER}/node-a/{name}" if name in node.declared else name
    result = node.clear(subject, code)
    assert [(fault.device, fault.code) for fault in result.cleared] == [(subject, code)], result.reason
    report = node.next(80)
    left = {device: codes - {"cpu.smt"} for device, codes in {**LOST, name: LOST[name] - {code}}.items()}
    assert cause_codes(report, Severity.DEGRADED) == {
        device: codes for device, codes in left.items() if codes
    }
    assert ("cpu.smt" in cause_codes(report)[CPU]) is (code != "cpu.smt")


def test_clear_of_a_nic_port_keeps_the_rate_of_the_other_port() -> None:
    node = Node()
    slow = PORT._replace(number=2)
    node.nic = nic_sample(PORT, slow)
    node.next(4)
    node.nic = nic_sample(PORT._replace(state=1, phys_state=3), slow._replace(rate_mbps=100_000))
    subject = f"{DRIVER}/node-a/nic-0"
    assert cause_codes(node.next(4))["nic-0"] == {"nic.port_down", "nic.rate"}
    assert node.clear(subject, "nic.port_down").refusal is None
    assert cause_codes(node.next(80))["nic-0"] == {"nic.rate"}
    assert node.clear(subject, "nic.rate").refusal is None
    assert "nic-0" not in cause_codes(node.next(80))


def test_accepted_values_are_the_new_start() -> None:
    node = Node()
    node.next(4)
    node.pool(pool_sample(40))
    node.next(4)
    node.clear(POOL)
    node.pool(pool_sample(39))
    report = node.next(4)
    assert cause_codes(report) == {POOL: {"mem.hugepages.pool_shrunk"}}
    (cause,) = next(device for device in report.devices if device.device == POOL).causes
    assert cause.evidence == "39 pages of 2mi, 40 at start"


def test_info_cause_is_accepted_only_by_its_code() -> None:
    node = Node()
    node.next(4)
    node.smt = 0
    node.next(4)
    assert node.clear(CPU).refusal is ClearRefusal.UNKNOWN
    assert node.clear(CPU, "cpu.smt").refusal is None
    assert cause_codes(node.next()) == {}


@pytest.mark.parametrize(
    ("settings", "declared", "evidence"),
    [
        ({"expect_pools": {POOL: 64}}, {}, "40 pages of 2mi, 64 configured"),
        ({}, {"pages-0": DeclaredHugepageDevice(2048, 64, 0)}, "40 pages of 2mi on NUMA node 0, 64 declared"),
    ],
)
def test_configured_and_declared_values_cannot_be_cleared(
    settings: dict[str, Any], declared: dict[str, DeclaredPart], evidence: str
) -> None:
    node = Node()
    node.declared |= declared
    node.start_again(settings=replace(node.settings, **settings))
    node.pool(pool_sample(40))
    node.next(4)
    subject = f"{DRIVER}/node-a/pages-0" if declared else POOL
    result = node.clear(subject, "mem.hugepages.pool_shrunk")
    assert result.refusal is ClearRefusal.NOT_LATCHED
    assert evidence in result.reason
    report = node.next()
    assert (
        next(device for device in report.devices if device.device in subject.split("/")).health
        is Health.UNHEALTHY
    )


def test_unreadable_values_cannot_be_accepted() -> None:
    node = Node()
    node.next(4)
    node.pool(pool_sample(40))
    node.next(4)
    node.pool(pool_sample(UNREAD))
    assert node.clear(POOL).refusal is not None
    node.pool(pool_sample(40))
    assert cause_codes(node.next(4)) == {POOL: {"mem.hugepages.pool_shrunk"}}


# --- stored values ---------------------------------------------------------------------------------------


def test_stored_values_change_only_with_the_values_at_start() -> None:
    node = Node()
    node.next(4)
    before = node.state.checkpoint
    node.lose()
    node.next(4)
    assert node.state.checkpoint.start == before.start
    node.pool(pool_sample(65))
    node.next()
    assert node.state.checkpoint.start.pools[0].max_seen == 65


def test_clear_of_a_pci_function_has_the_time_of_the_evaluation() -> None:
    node = Node()
    node.next(4)
    host = node.state.host._replace(cpus=CpuRuleState())  # the CPUs were not evaluated yet
    part = DeclaredPciDevice(FUNCTION, "")
    cleared = rebaseline_declared_part(host, node.snapshot(), part, "", node.now)
    (function,) = [start for start in pci_baselines(cleared.pci) if start.address == FUNCTION]
    assert function.repaired_ns == node.now_ns


def test_machine_that_was_not_read_stores_nothing() -> None:
    node = Node()
    node.passes = 0
    assert node.evaluate().starting
    assert node.state.checkpoint.start == BootBaseline(FIRST_BOOT)


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"0-1"', b'"0-9999"'),
        lambda data: data.replace(b'"runs": 1', b'"runs": -1'),
        lambda data: data.replace(b'"smt": 1', b'"smt": "on"'),
    ],
)
def test_invalid_stored_values_make_the_file_unusable(damage: Damage) -> None:
    node = Node()
    node.next(4)
    data = encode_gpu_faults(node.state.checkpoint)
    assert decode_gpu_faults(data) == node.state.checkpoint
    damaged = damage(data)
    assert damaged != data
    with pytest.raises(UnusableFile, match="file"):
        decode_gpu_faults(damaged)
