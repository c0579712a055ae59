"""Node rules: from which line or number on, for how long, and which findings belong to other subjects."""

import re
from collections.abc import Iterable
from typing import Final

import pytest
from log_lines import match_pattern
from paper import ABSENT, EIO, cpus_sample

from agent.health.host.machine.state import (
    MachineRuleInput,
    MachineRuleState,
    machine_rule_input,
    next_machine_state,
)
from agent.health.host.verdicts import NODE_RULES
from agent.health.kernel_log.facts import HOST_PATTERNS, KernelLogState
from agent.health.kernel_log.latch import next_log_state
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.health import Finding, Severity
from agent.model.machine_samples import LogLine, LogSample, MachineSample, PerCpuSample, PressureSample
from agent.model.reading import Reading, SourceSample, SourceState
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

RULES: Final = {rule.code: rule for rule in NODE_RULES}
DAY_S: Final = 86_400
HUNG: Final = "INFO: task {}:7 blocked for more than 122 seconds."
OOM: Final = (
    "oom-kill:constraint=CONSTRAINT_{},nodemask=(null),cpuset=/,mems_allowed=0,{},task_memcg=/a,task=sh,pid=7"
)
TIMEOUT: Final = "nvme nvme0: I/O 12 QID 3 timeout, aborting"
CORRECTED: Final = (
    "nvme 0000:{:02x}:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"
)
FATAL: Final = "nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Inaccessible, (ID)"
FIRMWARE: Final = "{{1}}[Hardware Error]: event severity: {}"
LOGGED: Final = "mce: [Hardware Error]: Machine check events logged"


class Node:
    """Simulated node with a log, pressure and time."""

    def __init__(self, limits: HostLimits | None = None) -> None:
        self.settings = EngineSettings("node-a", host=limits or HostLimits())
        self.now_s = 100_000.0
        self.log_state: SourceState | None = SourceState.OK
        self.lines: dict[str, LogLine] = {}
        self.lost = 0
        self.waited: dict[str, Reading] = {"cpu_some": 0, "memory_full": 0, "io_full": 0}
        self.machine = True
        self.checks: tuple[int, ...] = ()
        self.log = KernelLogState()
        self.past = MachineRuleState()
        self.evaluated_ns = 0
        self.view()

    def write(self, text: str, times: int = 1) -> None:
        """Add lines to the log now."""
        us = int(self.now_s * 1e6)
        known = self.lines.get(text, LogLine(0, 0, us, us, text, text, 1))
        self.lines[text] = known._replace(times=known.times + times, last_us=us)

    def wait(self, seconds: float, **share: float) -> None:
        """Let time pass with an evaluation every ten seconds; tasks wait for a resource during ``share`` of
        it.
        """
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            step_s = min(10.0, end_s - self.now_s)
            self.now_s += step_s
            for name, part in share.items():
                before = self.waited[name]
                assert isinstance(before, int)
                self.waited[name] = before + round(step_s * part * 1e6)
            self.view()

    @property
    def now(self) -> Instant:
        return Instant(int(self.now_s * NS), self.now_s)

    def snapshot(self) -> Snapshot:
        source = self._source("kmsg", self.log_state or SourceState.ABSENT)
        log = LogSample(tuple(self.lines.values()), source, self.lost)
        pressure = PressureSample(self.waited["cpu_some"], self.waited["memory_full"], self.waited["io_full"])
        source = self._source("pressure", SourceState.OK)
        cores = tuple(PerCpuSample(cpu, *[ABSENT] * 4, count) for cpu, count in enumerate(self.checks))
        machine = MachineSample((), (), cores, pressure, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, (source,))
        return Snapshot(
            seq=1,
            cpus=cpus_sample(),
            log=log if self.log_state else None,
            machine=machine if self.machine else None,
        )

    def _source(self, name: str, state: SourceState) -> SourceSample:
        return SourceSample(name, state, int(self.now_s * NS), 10 * NS, 0, "")

    def view(self) -> MachineRuleInput:
        snapshot = self.snapshot()
        self.log = next_log_state(self.log, snapshot.log, self.now)
        self.past = next_machine_state(
            self.past, self.log, snapshot, self.settings, self.now, self.evaluated_ns
        )
        self.evaluated_ns = self.now.mono_ns
        return machine_rule_input(self.past, self.log, snapshot, self.settings, self.now)

    def answer(self, code: str) -> RuleResult:
        return RULES[code].evaluate(self.view())

    def findings(self) -> dict[str, str]:
        """Return the evidence of the findings, by code."""
        view = self.view()
        answers = (rule.evaluate(view) for rule in NODE_RULES)
        return {answer.code: answer.evidence for answer in answers if isinstance(answer, Finding)}


def findings_of_lines(*lines: str) -> dict[str, str]:
    """Return the findings after these lines."""
    node = Node()
    for text in lines:
        node.write(text)
    return node.findings()


# --- lines ------------------------------------------------------------------------------------------------


def test_healthy_node_has_no_findings() -> None:
    node = Node()
    node.wait(120)
    assert [rule.evaluate(node.view()) for rule in NODE_RULES] == [OK] * len(NODE_RULES)


def test_long_list_names_the_newest_faults_in_order_of_their_first_line() -> None:
    node = Node()
    for name in ("a", "b", "c", "d", "e"):
        node.write(HUNG.format(name))
        node.wait(10)
    assert node.findings()["node.hung_task"].startswith("blocked for minutes: c, d, e, 2 more;")
    node.write(HUNG.format("a"))
    assert node.findings()["node.hung_task"].startswith("blocked for minutes: a, d, e, 2 more;")


def test_long_list_of_pci_faults_names_an_old_fatal_error() -> None:
    node = Node()
    node.write(FATAL)
    for slot in range(1, 6):
        node.wait(10)
        node.write(f"pcieport 0000:0{slot}:00.0: pciehp: Slot({slot}): Link Down")
    evidence = node.findings()["node.pci"]
    assert evidence.startswith("0000:3b:00.0: fatal error, 0000:04:00.0: Slot(4): Link Down, 0000:05:00.0")


DEFERRED: Final = (
    "[Hardware Error]: CPU:0 (19:11:1) MC21_STATUS[-|-|MiscV|AddrV|-|-|SyndV|-|UECC|Deferred|-|-]: "
    "0x9c2031000000011b"
)
CASES: Final[list[tuple[Iterable[str], dict[str, str]]]] = [
    ([HUNG.format("dd")], {"node.hung_task": "blocked for minutes: dd; 1 line of the kernel log"}),
    ([HUNG.format(name) for name in ("a", "b", "c", "d", "e")],
     {"node.hung_task": "blocked for minutes: a, b, c, 2 more; 5 lines of the kernel log"}),
    (["rcu: INFO: rcu_sched self-detected stall on CPU"],
     {"node.rcu_stall": "rcu_sched stalled; 1 line of the kernel log"}),
    ([OOM.format("NONE", "global_oom")],
     {"node.oom": "no memory left, sh was killed; 1 line of the kernel log"}),
    ([OOM.format("CPUSET", "global_oom")],
     {"node.oom": "the NUMA nodes of a cpuset had no memory left, sh was killed; 1 line of the kernel log"}),
    (["oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null)"],
     {"node.oom": "no memory left; 1 line of the kernel log"}),
    ([OOM.format("MEMCG", "oom_memcg=/a")], {}),
    ([TIMEOUT, "nvme nvme1: controller is down; will reset: CSTS=0xffffffff"],
     {"node.nvme": "nvme0: I/O timeout, nvme1: controller is down; 2 lines of the kernel log"}),
    (["EXT4-fs (sda1): Remounting filesystem read-only"], {"node.read_only": "EXT4 on sda1"}),
    ([FATAL], {"node.pci": "0000:3b:00.0: fatal error; 1 line of the kernel log"}),
    (["pcieport 0000:00:01.0: pciehp: Slot(3): Link Down", FATAL],
     {"node.pci": "0000:3b:00.0: fatal error, 0000:00:01.0: Slot(3): Link Down; 2 lines of the kernel log"}),
    (["tg3 0000:04:00.0: AER: aer_uncor_severity: 0x000ef030",
      "pcieport 0000:00:01.0: pciehp: Slot(3): Link Down"],
     {"node.pci": "0000:00:01.0: Slot(3): Link Down, 0000:04:00.0: uncorrected error; "
                  "2 lines of the kernel log"}),
    ([CORRECTED.format(1)], {}),
    ([LOGGED], {"node.machine_check": "corrected errors of an unnamed part; 1 line of the kernel log"}),
    ([FIRMWARE.format("corrected")],
     {"node.machine_check": "corrected errors of an unnamed part; 1 line of the kernel log"}),
    ([FIRMWARE.format("recoverable")],
     {"node.machine_check": "an uncorrected error of an unnamed part; 1 line of the kernel log"}),
    ([DEFERRED],
     {"node.machine_check": "an uncorrected error of an unnamed part; 1 line of the kernel log"}),
    ([DEFERRED, "EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1)"],
     {"node.machine_check": "an uncorrected error of an unnamed part; 1 line of the kernel log"}),
    # --- lines about devices with rules of their own
    ([DEFERRED, "EDAC MC0: 1 UE Cannot decode normalized address on unknown memory ( page:0x0 offset:0x0)"],
     {}),
    (["watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [cat:7]"], {}),
    (["mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400", LOGGED], {}),
    (["EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1)", LOGGED, FIRMWARE.format("corrected")], {}),
    (["Memory failure: 0x1: recovery action for dirty LRU page: Recovered", FIRMWARE.format("fatal")], {}),
    ([CORRECTED.format(1), FIRMWARE.format("corrected")], {}),
    (["HugeTLB: allocating 16 of page size 1.00 GiB failed.  Only allocated 12 hugepages."], {}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "findings"), CASES, ids=range(len(CASES)))
def test_lines_have_findings(lines: Iterable[str], findings: dict[str, str]) -> None:
    assert findings_of_lines(*lines) == findings


SHORT: Final = {
    "node.hung_task": HUNG.format("dd"),
    "node.rcu_stall": "rcu: INFO: rcu_sched self-detected stall on CPU",
    "node.oom": OOM.format("NONE", "global_oom"),
    "node.nvme": TIMEOUT,
    "node.pci": FATAL,
}
LONG: Final = {
    "node.read_only": "XFS (dm-0): I/O Error Detected. Shutting down filesystem",
    "node.machine_check": LOGGED,
}


@pytest.mark.parametrize(
    ("code", "text", "held_s"),
    [*((*item, 600) for item in SHORT.items()), *((*item, DAY_S) for item in LONG.items())],
)
def test_finding_is_held_after_its_last_line(code: str, text: str, held_s: int) -> None:
    node = Node()
    node.write(text)
    node.now_s += held_s - 1
    node.write(text)
    node.now_s += held_s - 1
    assert node.answer(code) is not OK
    node.now_s += 1
    assert node.answer(code) is OK


def test_evidence_is_constant_while_facts_are() -> None:
    node = Node()
    node.write(TIMEOUT, 10)
    before = node.findings()
    node.write(TIMEOUT, 80)
    assert (
        node.findings() == before == {"node.nvme": "nvme0: I/O timeout; at least 10 lines of the kernel log"}
    )


def test_uncorrected_error_is_worse_than_a_corrected_one() -> None:
    node = Node()
    node.write(FIRMWARE.format("corrected"))
    corrected = node.answer("node.machine_check")
    node.write(FIRMWARE.format("fatal"))
    uncorrected = node.answer("node.machine_check")
    assert isinstance(corrected, Finding)
    assert isinstance(uncorrected, Finding)
    assert (corrected.severity, uncorrected.severity) == (Severity.INFO, Severity.DEGRADED)


def test_error_at_another_time_does_not_name_the_part() -> None:
    node = Node()
    node.write("EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1)")
    node.wait(11)
    node.write(LOGGED)
    assert list(node.findings()) == ["node.machine_check"]


@pytest.mark.parametrize(
    ("checks", "line", "is_found"),
    [
        ((1, 1), LOGGED, True),
        ((1, 1), "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400", False),
        ((1, 1), "Memory failure: 0x1: recovery action for dirty LRU page: Recovered", False),
        ((0, 1), LOGGED, False),
        ((1,), LOGGED, False),
    ],
)
def test_machine_check_on_all_cpus_is_one_fault(checks: tuple[int, ...], line: str, is_found: bool) -> None:
    node = Node()
    node.checks = checks
    node.write(line)
    node.now_s += DAY_S + 1
    evidence = "uncorrected machine check of an unnamed part since boot: all CPUs counted it"
    assert node.findings() == ({"node.machine_check": evidence} if is_found else {})


def test_part_named_shortly_after_explains_the_error() -> None:
    node = Node()
    node.write(LOGGED)
    node.wait(9)
    node.write("EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1)")
    assert node.findings() == {}


def test_explained_error_stays_explained() -> None:
    node = Node()
    node.write("EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1)")
    node.now_s += 9
    node.write(LOGGED)
    node.now_s += DAY_S - 1  # the line that names the part is older than a day, the other is not
    assert node.findings() == {}


def test_part_with_later_errors_explains_the_first() -> None:
    node = Node()
    edac = "EDAC MC0: 1 CE memory read error on DIMM_A1 (channel:1)"
    node.write(LOGGED)
    node.write(edac)
    node.view()
    node.wait(60)
    node.write(edac)
    assert node.findings() == {}


NIC_CORRECTED: Final = "mlx5_core 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer"
NIC_FATAL: Final = (
    "mlx5_core 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
)
UNNAMED: Final = "an uncorrected error of an unnamed part; 1 line of the kernel log"


@pytest.mark.parametrize("other", [NIC_CORRECTED, NIC_FATAL])
def test_errors_long_before_and_after_do_not_name_the_part(other: str) -> None:
    node = Node()
    node.write(other)
    node.wait(60)
    node.write(FIRMWARE.format("recoverable"))
    assert node.findings()["node.machine_check"] == UNNAMED
    node.wait(60)
    node.write(other)
    assert node.findings()["node.machine_check"] == UNNAMED
    node.now_s += DAY_S
    assert "node.machine_check" not in node.findings()


def test_corrected_error_does_not_name_the_part_of_an_uncorrected_one() -> None:
    node = Node()
    node.write(NIC_CORRECTED)
    node.write(FIRMWARE.format("recoverable"))
    assert node.findings() == {"node.machine_check": UNNAMED}
    node.write(NIC_FATAL)
    assert "node.machine_check" not in node.findings()


def test_line_read_late_at_the_start_names_the_part() -> None:
    node = Node()
    node.log, node.past, node.log_state = KernelLogState(), MachineRuleState(), SourceState.STARTING
    node.write(FIRMWARE.format("recoverable"))
    fatal = {NIC_FATAL: LogLine(0, 1, *[int(node.now_s * 1e6)] * 2, NIC_FATAL, NIC_FATAL, 2)}
    node.now_s += 60
    assert "node.machine_check" not in node.findings()
    node.lines, node.log_state = {**node.lines, **fatal}, SourceState.OK
    assert "node.machine_check" not in node.findings()


def test_later_error_of_a_named_part_does_not_end_an_earlier_one() -> None:
    node = Node()
    node.write(FIRMWARE.format("recoverable"))
    node.wait(60)
    node.write(FIRMWARE.format("recoverable"))
    node.write(NIC_FATAL)
    assert "node.machine_check" in node.findings()
    node.now_s += DAY_S - 30
    assert "node.machine_check" not in node.findings()


KMSG_CODES: Final = [rule.code for rule in NODE_RULES if rule.source == "kmsg"]


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        (None, RuleNotApplicable("no kernel log")),
        (SourceState.ABSENT, RuleNotApplicable("no kernel log")),
        (SourceState.FAILING, RuleNotApplicable("the kernel log cannot be read")),
        (SourceState.STARTING, RuleInconclusive("the kernel log is still being read")),
    ],
)
def test_unread_log_has_result(state: SourceState | None, answer: RuleResult) -> None:
    node = Node()
    node.log_state = state
    assert [node.answer(code) for code in KMSG_CODES] == [answer] * len(KMSG_CODES)


def test_facts_survive_an_unreadable_log() -> None:
    node = Node()
    node.write(TIMEOUT)
    node.view()
    node.log_state = SourceState.FAILING
    assert list(node.findings()) == ["node.nvme"]


# --- lost records ---------------------------------------------------------------------------------------


def test_lost_records_are_reported_for_a_day() -> None:
    node = Node()
    node.lost = 1
    evidence = "1 record of the kernel log overwritten before the agent read them"
    assert node.answer("node.log.lost") == Finding("node.log.lost", Severity.INFO, evidence)
    node.now_s += DAY_S - 1
    node.lost = 40
    evidence = "at least 10 records of the kernel log overwritten before the agent read them"
    assert node.findings() == {"node.log.lost": evidence}
    node.log_state = SourceState.FAILING  # does not prove that the records were read
    node.now_s += DAY_S - 1
    assert node.findings() == {"node.log.lost": evidence}
    node.log_state = SourceState.OK
    node.now_s += 1
    assert node.answer("node.log.lost") is OK


# --- rate of corrected errors ---------------------------------------------------------------------


def test_corrected_pci_errors_above_the_hourly_limit_are_found() -> None:
    node = Node()
    node.write(CORRECTED.format(1), 60)
    node.wait(600)
    node.write(CORRECTED.format(2), 39)
    assert node.answer("node.pci.corrected") == RuleInconclusive("needs 1 h of history")
    node.write(CORRECTED.format(2))
    evidence = "corrected PCIe errors: at least 100 in 1 h, of 0000:01:00.0, 0000:02:00.0"
    assert node.answer("node.pci.corrected") == Finding("node.pci.corrected", Severity.INFO, evidence)
    node.wait(3700)
    assert node.answer("node.pci.corrected") is OK


def test_slow_corrected_pci_errors_are_no_rate() -> None:
    node = Node()
    for _ in range(150):
        node.write(CORRECTED.format(1))
        node.wait(60)
    assert node.answer("node.pci.corrected") is OK


def test_corrected_pci_errors_before_the_start_are_no_rate() -> None:
    node = Node()
    node.log, node.past = KernelLogState(), MachineRuleState()
    node.write(CORRECTED.format(1), 5000)
    assert node.answer("node.pci.corrected") == RuleInconclusive("needs 1 h of history")


def test_corrected_pci_errors_read_at_the_start_are_no_rate() -> None:
    node = Node()
    node.log, node.past, node.log_state = KernelLogState(), MachineRuleState(), SourceState.STARTING
    node.write(CORRECTED.format(1))
    node.wait(10)
    node.write(CORRECTED.format(1), 5000)
    node.wait(10)
    node.log_state = SourceState.OK
    assert node.findings() == {}


# --- pressure ---------------------------------------------------------------------------------------------

PRESSURE: Final = [
    ("memory", "memory_full", 0.10, "all tasks waited for memory for at least 10 % of 1 min"),
    ("io", "io_full", 0.10, "all tasks waited for disks for at least 10 % of 1 min"),
    ("cpu", "cpu_some", 0.80, "tasks waited for a CPU for at least 80 % of 1 min"),
]


@pytest.mark.parametrize(("resource", "field", "share", "evidence"), PRESSURE)
def test_pressure_is_found_from_its_limit(resource: str, field: str, share: float, evidence: str) -> None:
    code = f"node.pressure.{resource}"
    node = Node()
    node.wait(120, **{field: share - 0.01})
    assert node.answer(code) is OK
    node.wait(120, **{field: share})
    assert node.findings() == {code: evidence}
    node.wait(60)
    assert node.answer(code) is OK


@pytest.mark.parametrize("resource", ["memory", "io", "cpu"])
def test_pressure_needs_a_full_window(resource: str) -> None:
    node = Node()
    assert node.answer(f"node.pressure.{resource}") == RuleInconclusive("needs 1 min of history")
    node.wait(50)
    assert node.answer(f"node.pressure.{resource}") == RuleInconclusive("needs 1 min of history")
    node.wait(10)
    assert node.answer(f"node.pressure.{resource}") is OK


def test_pressure_above_the_limit_is_raised_before_the_window_ends() -> None:
    node = Node()
    node.wait(10, memory_full=0.6)
    assert list(node.findings()) == ["node.pressure.memory"]


def test_pressure_after_idle_hours_counts_in_full() -> None:
    node = Node()
    node.wait(7200)
    node.wait(10, memory_full=0.59)
    assert node.answer("node.pressure.memory") is OK
    node = Node()
    node.wait(7200)
    node.wait(10, memory_full=0.6)
    assert list(node.findings()) == ["node.pressure.memory"]


def test_pressure_with_rare_readings_is_found() -> None:
    node = Node()
    for _ in range(3):
        node.now_s += 100
        node.waited["memory_full"] = int(node.now_s * 0.2e6)
        node.view()
    assert list(node.findings()) == ["node.pressure.memory"]


def test_wait_across_the_window_start_counts_in_proportion() -> None:
    node = Node(HostLimits(pressure_window_s=25))
    node.wait(10, memory_full=0.5)
    node.wait(20)
    assert list(node.findings()) == ["node.pressure.memory"], "half of 5 s is 10 % of 25 s"
    node.wait(10)
    assert node.answer("node.pressure.memory") is OK


def test_pressure_limits_follow_the_configuration() -> None:
    node = Node(HostLimits(pressure_percent=50, pressure_window_s=10))
    node.wait(60, io_full=0.49)
    assert node.answer("node.pressure.io") is OK
    node.wait(20, io_full=0.5)
    assert node.findings() == {"node.pressure.io": "all tasks waited for disks for at least 50 % of 10 s"}


def test_time_without_readings_is_no_pressure() -> None:
    node = Node()
    node.wait(60)
    node.now_s += 3600
    node.waited["memory_full"] = 10**9
    assert node.answer("node.pressure.memory") == RuleInconclusive("needs 1 min of history")


def test_fallen_total_is_no_pressure() -> None:
    node = Node()
    node.wait(60, memory_full=0.05)
    node.waited["memory_full"] = 0
    node.wait(70, memory_full=0.05)
    assert node.answer("node.pressure.memory") is OK


@pytest.mark.parametrize("resource", ["memory", "io", "cpu"])
def test_absent_pressure_is_not_applicable(resource: str) -> None:
    node = Node()
    node.waited = dict.fromkeys(node.waited, ABSENT)
    reason = "no /proc/pressure: the kernel has no PSI, or it is not enabled"
    assert node.answer(f"node.pressure.{resource}") == RuleNotApplicable(reason)
    node.machine = False
    assert node.answer(f"node.pressure.{resource}") == RuleNotApplicable(reason)


@pytest.mark.parametrize("resource", ["memory", "io", "cpu"])
def test_unreadable_pressure_is_unknown(resource: str) -> None:
    node = Node()
    node.wait(60)
    node.waited = dict.fromkeys(node.waited, EIO)
    assert node.answer(f"node.pressure.{resource}") == RuleInputUnreadable(f"/proc/pressure/{resource}", EIO)


# --- the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [code for code in KMSG_CODES if code not in ("node.log.lost", "node.gpu")])
def test_try_it_line_of_a_row_raises_its_code(code: str) -> None:
    written = re.search(r"echo '<[0-7]>(.*?)' > /dev/kmsg", RULES[code].try_it)
    assert written is not None
    assert any(match_pattern(pattern, written[1]) is not None for pattern in HOST_PATTERNS)
    node = Node()
    node.write(written[1], 100)
    assert code in node.findings()


def test_evaluations_change_nothing_in_place() -> None:
    node = Node()
    node.wait(60, memory_full=0.5)
    before = node.past
    stalls, corrected = dict(before.wait_totals), before.corrected_pci_errors
    node.wait(60, memory_full=0.5)
    assert (before.wait_totals, before.corrected_pci_errors) == (stalls, corrected)


# --- faults that only the log reports ---------------------------------------------------------------------

MLX5: Final = "mlx5_core 0000:41:00.0: "
LOG_CASES: Final[list[tuple[Iterable[str], dict[str, tuple[Severity, str]]]]] = [
    (["blk_update_request: I/O error, dev sda, sector 1", "critical medium error, dev sdb, sector 1",
      "Buffer I/O error on dev sda1, logical block 0, async page read"],
     {"node.io_error": (Severity.DEGRADED,
                        "sda: I/O error, sdb: critical medium error; 3 lines of the kernel log")}),
    (["md/raid1:md1: Disk failure on sda1, disabling device."],
     {"node.raid": (Severity.DEGRADED, "md1 sda1: degraded; 1 line of the kernel log")}),
    (["md/raid1:md1: Disk failure on sda1, disabling device.",
      "md/raid0md0: Disk failure on nvme0n1p1 detected, failing array."],
     {"node.raid": (Severity.UNHEALTHY,
                    "md0 nvme0n1p1: failed, md1 sda1: degraded; 2 lines of the kernel log")}),
    (["block nvme0n1: no available path - failing I/O"],
     {"node.nvme.path": (Severity.DEGRADED, "nvme0n1: failing I/O; 1 line of the kernel log")}),
    (["attempt to access beyond end of device"],
     {"node.beyond_end": (Severity.DEGRADED, "a disk; 1 line of the kernel log")}),
    (["EXT4-fs (sda1): I/O error while writing superblock", "EXT4-fs error (device sda1): f:1: x"],
     {"node.filesystem": (Severity.DEGRADED, "EXT4 on sda1; 2 lines of the kernel log")}),
    (["nfs: server a not responding, timed out", "nfs4_reclaim_open_state: Lock reclaim failed!"],
     {"node.nfs": (Severity.DEGRADED, "a not responding, file locks lost; 2 lines of the kernel log")}),
    (["BUG: unable to handle kernel NULL pointer dereference at 0000000000000078", "Oops: 0000 [#1] SMP"],
     {"node.oops": (Severity.DEGRADED, "Oops; 2 lines of the kernel log")}),
    (["nf_conntrack: table full, dropping packet", "VFS: file-max limit 1000 reached"],
     {"node.table_full": (Severity.DEGRADED, "nf_conntrack, file-max; 2 lines of the kernel log")}),
    (["unregister_netdevice: waiting for lo to become free. Usage count = 1"],
     {"node.netdev_held": (Severity.DEGRADED, "lo; 1 line of the kernel log")}),
    (["NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out"],
     {"node.tx_timeout": (Severity.DEGRADED, "eth0 (mlx5_core); 1 line of the kernel log")}),
    (["nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context"],
     {"node.peermem": (Severity.DEGRADED, "detected invalid context; 1 line of the kernel log")}),
    (["python3[7]: segfault at 0 ip 00 sp 00 error 4 in libnccl.so.2[7f+1000]"],
     {"node.nccl": (Severity.INFO, "python3; 1 line of the kernel log")}),
    ([MLX5 + "Port module event: module 1, Cable unplugged"],
     {"node.nic": (Severity.INFO, "0000:41:00.0: Cable unplugged; 1 line of the kernel log")}),
    ([MLX5 + "Detected insufficient power on the PCIe slot (27W).",
      MLX5 + "synd 0x8: unrecoverable hardware error"],
     {"node.nic": (Severity.UNHEALTHY, "0000:41:00.0: unrecoverable hardware error, "
                   "0000:41:00.0: insufficient power in its slot (27W); 2 lines of the kernel log")}),
    ([MLX5 + "Health issue observed, High temperature, severity(3) ERROR:"],
     {"node.nic": (Severity.DEGRADED, "0000:41:00.0: High temperature; 1 line of the kernel log")}),
    # --- old kernels write an OOM kill at a cgroup's limit in several lines
    (["Task in /a/b killed as a result of limit of /a",
      "Memory cgroup out of memory: Kill process 7 (java) score 9 or sacrifice child",
      "Killed process 7 (java) total-vm:1kB, anon-rss:1kB, file-rss:1kB"], {}),
    (["Out of memory: Kill process 7 (java) score 9 or sacrifice child",
      "Killed process 7 (java) total-vm:1kB, anon-rss:1kB, file-rss:1kB"],
     {"node.oom": (Severity.DEGRADED, "no memory left, java was killed; 1 line of the kernel log")}),
    ([FIRMWARE.format("fatal"), "{1}[Hardware Error]:   section_type: memory error"],
     {"node.machine_check": (Severity.DEGRADED, "an uncorrected error of memory; 1 line of the kernel log")}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "findings"), LOG_CASES, ids=range(len(LOG_CASES)))
def test_log_faults_have_findings(lines: Iterable[str], findings: dict[str, tuple[Severity, str]]) -> None:
    node = Node()
    for text in lines:
        node.write(text)
        node.now_s += 0.1
    view = node.view()
    found = [answer for rule in NODE_RULES if isinstance(answer := rule.evaluate(view), Finding)]
    assert {cause.code: (cause.severity, cause.evidence) for cause in found} == findings


def test_node_view_with_lines_about_a_nic_is_constant_while_facts_are() -> None:
    """Equal views are not evaluated again."""
    node = Node()
    node.write(MLX5 + "synd 0x8: unrecoverable hardware error")
    node.wait(200)
    before = node.view()
    node.wait(10)
    assert node.view() == before


@pytest.mark.parametrize(
    ("code", "fault", "end"),
    [
        ("node.nfs", "nfs: server a not responding, still trying", "nfs: server a OK"),
        ("node.nic", MLX5 + "Detected insufficient power on the PCIe slot (27W).",
         MLX5 + "PCIe slot advertised sufficient power (75W)."),
        ("node.nic", MLX5 + "Port module event[error]: module 0, Cable error, High Temperature",
         MLX5 + "Port module event: module 0, Cable plugged"),
        ("node.nic", MLX5 + "synd 0x1: firmware internal error", MLX5 + "health recovery succeeded"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pause_s", [0.001, 3600])
def test_log_line_about_an_end_clears_the_fault(code: str, fault: str, end: str, pause_s: float) -> None:
    node = Node()
    node.write(fault)
    if pause_s > 1:
        assert code in node.findings()
    node.now_s += pause_s
    node.write(end)
    assert (code in node.findings()) is (pause_s < 1), "each fault is reported once"
    node.now_s += 1
    assert code not in node.findings()
    node.now_s += pause_s
    node.write(fault)
    assert code in node.findings(), "a later line raises it again"
