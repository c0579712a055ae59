"""Memory rules: limits, missing readings, resets, and the NUMA node of an error."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest
from paper import ABSENT, EIO, ENODEV, cpus_sample, node_sample, without_since
from patience import PATIENCE_S

from agent.health.host.memory.rules import (
    DECLARED_MEMORY_RULES,
    MEMORY_RULES,
    MemoryRuleInput,
    MemoryRuleState,
    declared_memory_rule_input,
    memory_rule_input,
    next_memory_state,
)
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState
from agent.health.kernel_log.parse import parse_host_line
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.declared_devices import DeclaredMemoryDevice, DriverDevice
from agent.model.health import Finding, Repair, Severity
from agent.model.machine_samples import (
    DimmSample,
    LogSample,
    MachineSample,
    NumaMemorySample,
    PerCpuSample,
    PressureSample,
)
from agent.model.reading import Reading, SourceSample, SourceState
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import NumaCpuSample, Snapshot
from agent.model.time import NS, Instant
from agent.native.machine_watch import MachineWatch

ROWS: Final = {rule.code: rule for rule in DECLARED_MEMORY_RULES}
LOST: Final = "mem.ecc.uncorrectable"
RATE: Final = "mem.ecc.correctable_rate"
POISONED: Final = "mem.poisoned"
OFFLINE: Final = "mem.numa.offline"
BLOCKS: Final = "mem.blocks.offline"
MISSING: Final = "mem.missing"
HOUR: Final = 3600
DAY: Final = 24 * HOUR
GIB_KIB: Final = 1 << 20
A1: Final = "CPU_SrcID#0_MC#0_Chan#0_DIMM#0"
B1: Final = "CPU_SrcID#1_MC#0_Chan#0_DIMM#0"
SINCE: Final = "since the EDAC driver was loaded"
NO_COUNTERS: Final = RuleNotApplicable("the machine has no EDAC error counters")
NOT_YET: Final = RuleInconclusive("the machine's memory has not been read yet")
NO_MEMORY: Final = RuleInconclusive("the NUMA node has no memory")
UNKNOWN: Final = " (NUMA node unknown)"


def controller(number: int, ce: Reading = 0, ue: Reading = 0, name: str = "") -> DimmSample:
    return DimmSample(number, None, name, "", ce, ue)


def module(number: int, dimm: int, ce: Reading = 0, ue: Reading = 0, label: str = A1) -> DimmSample:
    return DimmSample(number, dimm, label, f"channel {dimm} slot 0", ce, ue)


def numa(
    node: int = 0,
    *,
    kib: Reading = 16 * GIB_KIB,
    poisoned: Reading = 0,
    blocks: Reading = 128,
    offline: Reading = 0,
) -> NumaMemorySample:
    return NumaMemorySample(node, kib, poisoned, blocks, offline)


@dataclass
class PaperMemory:
    """Simulated memory: attributes hold the readings, and each view updates the state."""

    dimms: tuple[DimmSample, ...] = ()
    numa: tuple[NumaMemorySample, ...] = (numa(),)
    nodes: tuple[NumaCpuSample, ...] = ()
    packages: Mapping[int, Reading] = field(default_factory=dict)
    online: Reading = 0b1
    having: Reading = 0b1
    corrupted_kib: Reading = 0
    edac: SourceState = SourceState.OK
    memory: SourceState = SourceState.OK
    cores: SourceState = SourceState.OK
    settings: EngineSettings = field(default_factory=lambda: EngineSettings("node-a"))
    facts: Mapping[tuple[KernelLogCode, str], KernelLogFact] = field(default_factory=dict)
    log: LogSample | None = None
    now_s: float = 1_000 * DAY
    past: MemoryRuleState = field(default_factory=MemoryRuleState)

    @property
    def now(self) -> Instant:
        return Instant(int(self.now_s * NS), self.now_s)

    def write_lines(self, code: KernelLogCode, location: str = "", times: int = 1) -> None:
        """Add lines of one kind to the log, the newest now."""
        known = self.facts.get((code, location))
        first = known.first if known else self.now
        self.facts = {
            **self.facts,
            (code, location): KernelLogFact(code, location, times, first, self.now, "a line"),
        }

    def two_sockets(self, nodes_each: int = 1) -> None:
        """Set up two packages with two CPUs per NUMA node."""
        count = 2 * nodes_each
        self.numa = tuple(numa(node) for node in range(count))
        self.nodes = tuple(node_sample(node, cpus=0b11 << 2 * node) for node in range(count))
        self.packages = {cpu: cpu // (2 * nodes_each) for cpu in range(2 * count)}
        self.online = self.having = (1 << count) - 1

    def snapshot(self) -> Snapshot:
        beat_ns = self.now.mono_ns
        states = {"edac": self.edac, "memory": self.memory, "cores": self.cores}
        return Snapshot(
            seq=1,
            log=self.log,
            cpus=cpus_sample(),
            nodes=self.nodes,
            machine=MachineSample(
                dimms=self.dimms,
                numa=self.numa,
                cores=tuple(
                    PerCpuSample(cpu, cpu, package, *[ABSENT] * 3) for cpu, package in self.packages.items()
                ),
                pressure=PressureSample(ABSENT, ABSENT, ABSENT),
                nodes_online=self.online,
                nodes_memory=self.having,
                corrupted_kib=self.corrupted_kib,
                surplus_failed=0,
                smt_active=ABSENT,
                sources=tuple(
                    SourceSample(name, state, beat_ns, NS, 0, "") for name, state in states.items()
                ),
            ),
        )

    def view(
        self, node: int = 0, after_s: float = 0, declared: DriverDevice | None = None
    ) -> MemoryRuleInput:
        """Return the view of a NUMA node, or of the declared device."""
        self.now_s += after_s
        snapshot = self.snapshot()
        self.past = next_memory_state(
            self.past, KernelLogState(self.facts), snapshot, self.settings, self.now
        )
        if declared is not None:
            return declared_memory_rule_input(self.past, snapshot, self.settings, declared)
        return memory_rule_input(self.past, snapshot, self.settings, node)

    def result(self, code: str, node: int = 0, after_s: float = 0) -> RuleResult:
        """Return the result of a rule for a NUMA node."""
        return without_since(ROWS[code].evaluate(self.view(node, after_s)))

    def declared_result(self, code: str, size: int = 0, node: int = 0) -> RuleResult:
        """Return the result of a rule for declared memory."""
        declared = DriverDevice("mem.example", "node-a", "mem-1", DeclaredMemoryDevice(size, node), 0)
        return ROWS[code].evaluate(self.view(declared=declared))


def bad(code: str, evidence: str, severity: Severity | None = None) -> Finding:
    return Finding(code, ROWS[code].severity if severity is None else severity, evidence)


def lost_finding(*locations: str) -> Finding:
    return bad(LOST, ", ".join(locations))


def frequent_errors(*locations: str, limit: int = 24, window: str = "1 d") -> Finding:
    what = f"at least {limit} correctable errors in {window}"
    return bad(RATE, ", ".join(f"{location}: {what}" for location in locations))


# --- uncorrectable errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dimms", "answer"),
    [
        ([], NO_COUNTERS),
        ([controller(0), module(0, 0)], OK),
        ([controller(0, ue=1), module(0, 0, ue=1)], lost_finding(f"mc0 {A1}: 1 uncorrectable error {SINCE}")),
        (
            [controller(0, ue=43), module(0, 0, ue=43)],
            lost_finding(f"mc0 {A1}: at least 10 uncorrectable errors {SINCE}"),
        ),
        # errors of no module count for the controller
        ([controller(0, ue=2, name="F19h")], lost_finding(f"mc0 (F19h): 2 uncorrectable errors {SINCE}")),
        ([controller(1, ue=2), module(1, 0)], lost_finding(f"mc1: 2 uncorrectable errors {SINCE}")),
        (
            [controller(0, ue=3), module(0, 0, ue=1), module(0, 1, label="")],
            lost_finding(f"mc0 {A1}: 1 uncorrectable error {SINCE}", f"mc0: 2 uncorrectable errors {SINCE}"),
        ),
        # modules are read shortly before or after their controller
        ([controller(0, ue=0), module(0, 0, ue=1)], lost_finding(f"mc0 {A1}: 1 uncorrectable error {SINCE}")),
        # without a label the location, without that the number
        (
            [controller(0, ue=1), module(0, 1, ue=1, label="")],
            lost_finding(f"mc0 channel 1 slot 0: 1 uncorrectable error {SINCE}"),
        ),
        ([DimmSample(0, 3, "", "", 0, 1)], lost_finding(f"mc0 module 3: 1 uncorrectable error {SINCE}")),
        ([controller(0, ue=EIO), module(0, 0)], RuleInputUnreadable("ue_count of mc0", EIO)),
        ([controller(0), module(0, 0, ue=ENODEV)], RuleInputUnreadable(f"ue_count of mc0 {A1}", ENODEV)),
        # old kernels do not count by module
        ([controller(0), module(0, 0, ce=ABSENT, ue=ABSENT)], OK),
        (
            [controller(0, ue=1), module(0, 0, ce=ABSENT, ue=ABSENT)],
            lost_finding(f"mc0: 1 uncorrectable error {SINCE}"),
        ),
        ([controller(0, ce=ABSENT, ue=ABSENT)], NO_COUNTERS),
    ],
)
def test_uncorrectable_errors_have_result(dimms: list[DimmSample], answer: RuleResult) -> None:
    assert PaperMemory(tuple(dimms)).result(LOST) == answer


def test_uncorrectable_error_outranks_an_unreadable_count() -> None:
    paper = PaperMemory((controller(0, ue=1), module(0, 0, ue=1), controller(1, ue=EIO)))
    assert paper.result(LOST) == lost_finding(f"mc0 {A1}: 1 uncorrectable error {SINCE}")


def test_uncorrectable_error_is_held_until_a_reset() -> None:
    paper = PaperMemory((controller(0, ue=1),))
    for _ in range(3):
        assert isinstance(paper.result(LOST, after_s=30 * DAY), Finding)
    paper.dimms = (controller(0),)
    assert paper.result(LOST, after_s=1) is OK


def test_long_list_of_modules_ends_with_the_remaining_count() -> None:
    paper = PaperMemory(tuple(module(0, n, ue=1, label=f"DIMM_A{n}") for n in range(6)))
    answer = paper.result(LOST)
    assert isinstance(answer, Finding)
    assert answer.evidence.count("uncorrectable") == 4
    assert answer.evidence.endswith(", and 2 more")


def test_long_list_of_modules_names_those_with_most_errors() -> None:
    errors = (1, 1, 9, 1, 8, 7)
    paper = PaperMemory(tuple(module(0, n, ue=count, label=f"DIMM_A{n}") for n, count in enumerate(errors)))
    answer = paper.result(LOST)
    assert isinstance(answer, Finding)
    assert re.findall(r"DIMM_A\d", answer.evidence) == ["DIMM_A0", "DIMM_A2", "DIMM_A4", "DIMM_A5"]


# --- correctable errors -----------------------------------------------------------------------------------


def result_after_growth(
    ce: Reading, *, limits: HostLimits | None = None, after_s: float = HOUR
) -> RuleResult:
    """Return the result after the count of a module grew from 100 to ``ce``."""
    paper = PaperMemory((module(0, 0, 100),))
    paper.settings = replace(paper.settings, host=limits or HostLimits())
    paper.view()
    paper.dimms = (module(0, 0, ce),)
    return paper.result(RATE, after_s=after_s)


@pytest.mark.parametrize(
    ("ce", "answer"),
    [
        (123, RuleInconclusive("needs 1 d of history")),
        (124, frequent_errors(f"mc0 {A1}")),
        (100_000, frequent_errors(f"mc0 {A1}")),
        (EIO, RuleInputUnreadable(f"ce_count of mc0 {A1}", EIO)),
        (0, RuleInconclusive("needs 1 d of history")),  # a reset is no growth
        (99, RuleInconclusive("needs 1 d of history")),
    ],
)
def test_correctable_errors_within_the_window_have_result(ce: Reading, answer: RuleResult) -> None:
    assert result_after_growth(ce) == answer


def test_numa_node_of_a_module_is_known_once_nodes_are() -> None:
    paper = PaperMemory(edac=SourceState.ABSENT, memory=SourceState.STARTING, numa=(), having=ABSENT)
    paper.write_lines(KernelLogCode.EDAC_UNCORRECTED, "mc0")
    log = KernelLogState(paper.facts)
    past = next_memory_state(paper.past, log, paper.snapshot(), paper.settings, paper.now)
    paper.memory, paper.numa, paper.having = SourceState.OK, (numa(),), 0b1
    seen = paper.snapshot()
    view = memory_rule_input(
        next_memory_state(past, log, seen, paper.settings, paper.now), seen, paper.settings, 0
    )
    fault = "mc0: 1 uncorrectable error in the kernel log"
    assert without_since(ROWS[LOST].evaluate(view)) == bad(LOST, fault)


def test_correctable_limit_and_window_follow_the_configuration() -> None:
    few = HostLimits(correctable_errors=3, correctable_window_s=90)
    assert result_after_growth(102, limits=few, after_s=60) == RuleInconclusive("needs 90 s of history")
    assert result_after_growth(102, limits=few, after_s=90) is OK
    assert result_after_growth(103, limits=few, after_s=90) == frequent_errors(
        f"mc0 {A1}", limit=3, window="90 s"
    )
    too_rare = RuleInconclusive("needs 90 s of history")
    assert result_after_growth(103, limits=few, after_s=91) == too_rare, (
        "it may be from before the window, or within it"
    )


@pytest.mark.parametrize(("every_s", "answer"), [(65 * 60, OK), (55 * 60, frequent_errors(f"mc0 {A1}"))])
def test_slow_correctable_errors_are_no_rate(every_s: int, answer: RuleResult) -> None:
    paper, results = PaperMemory(), []
    for count in range(30 * DAY // every_s):
        paper.dimms = (module(0, 0, count),)
        results.append(paper.result(RATE, after_s=every_s))
    assert set(results) == {RuleInconclusive("needs 1 d of history"), answer}


def test_burst_leaves_the_window_and_one_after_a_reset_counts() -> None:
    paper = PaperMemory((controller(0, 0), module(0, 0, 0)))
    paper.view()
    paper.dimms = (controller(0, 30), module(0, 0, 30))
    assert isinstance(paper.result(RATE, after_s=HOUR), Finding)
    paper.dimms = (controller(0, 0), module(0, 0, 0))
    assert isinstance(paper.result(RATE, after_s=HOUR), Finding), "the reset took none of them back"
    assert [paper.result(RATE, after_s=HOUR) for _ in range(26)][-1] is OK
    paper.dimms = (controller(0, 23), module(0, 0, 23))
    assert paper.result(RATE, after_s=10) is OK
    paper.dimms = (controller(0, 24), module(0, 0, 24))
    assert paper.result(RATE, after_s=10) == frequent_errors(f"mc0 {A1}")


def test_briefly_unreadable_module_keeps_its_window() -> None:
    paper = PaperMemory((controller(0, 0), module(0, 0, 0)))
    paper.view()
    paper.dimms = (controller(0, 24), module(0, 0, EIO))
    assert paper.result(RATE, after_s=60) == frequent_errors("mc0"), "the controller still counts"
    paper.dimms = (controller(0, 24), module(0, 0, 24))
    assert paper.result(RATE, after_s=60) == frequent_errors(f"mc0 {A1}")


def test_errors_spread_over_modules_are_no_finding() -> None:
    labels = [f"DIMM_A{n}" for n in range(8)]
    paper = PaperMemory((controller(0, 0), *(module(0, n, 0, label=label) for n, label in enumerate(labels))))
    paper.view()
    paper.dimms = (
        controller(0, 160),
        *(module(0, n, 20, label=label) for n, label in enumerate(labels)),
    )
    assert paper.result(RATE, after_s=HOUR) == RuleInconclusive("needs 1 d of history")


def test_errors_without_a_module_count_for_the_controller() -> None:
    paper = PaperMemory((controller(0, 0, name="F19h"), module(0, 0, 0)))
    paper.view()
    paper.dimms = (controller(0, 33, name="F19h"), module(0, 0, 10))
    assert paper.result(RATE, after_s=HOUR) == RuleInconclusive("needs 1 d of history")
    paper.dimms = (controller(0, 34, name="F19h"), module(0, 0, 10))
    assert paper.result(RATE, after_s=HOUR) == frequent_errors("mc0 (F19h)")


def test_memory_without_counters_is_not_applicable() -> None:
    assert PaperMemory().result(RATE) == NO_COUNTERS
    assert PaperMemory(edac=SourceState.ABSENT).result(RATE) == NO_COUNTERS


def test_unread_512_modules_are_not_evaluated_again() -> None:
    paper = PaperMemory(tuple(module(n // 8, n % 8) for n in range(512)))
    paper.view()
    before, log = paper.past, KernelLogState()
    past = next_memory_state(before, log, paper.snapshot(), paper.settings, paper.now)
    again = next_memory_state(past, log, paper.snapshot(), paper.settings, paper.now)
    assert again.errors is past.errors
    assert again.locations is past.locations


# --- lines of the log where there are no counters ---------------------------------------------------------


def test_log_lines_count_without_counters() -> None:
    paper = PaperMemory()
    paper.write_lines(KernelLogCode.EDAC_UNCORRECTED, f"mc0 {A1}")
    paper.write_lines(KernelLogCode.EDAC_CORRECTED, "mc1", 23)
    assert paper.result(LOST) == lost_finding(f"mc0 {A1}: 1 uncorrectable error in the kernel log")
    assert paper.result(RATE, after_s=HOUR) is OK
    paper.write_lines(KernelLogCode.EDAC_CORRECTED, "mc1", 24)
    assert paper.result(RATE, after_s=HOUR) == frequent_errors("mc1")
    assert [paper.result(RATE, after_s=HOUR) for _ in range(26)][-1] is OK, "they are a day old"
    assert isinstance(paper.result(LOST), Finding), "what is lost stays lost"


def test_log_lines_do_not_count_if_the_controller_does() -> None:
    paper = PaperMemory((controller(0), module(0, 0)))
    paper.write_lines(KernelLogCode.EDAC_UNCORRECTED, f"mc0 {A1}")
    paper.write_lines(KernelLogCode.EDAC_CORRECTED, f"mc0 {A1}", 1_000)
    assert paper.result(LOST) is OK, "the counters were reset since"
    assert paper.result(RATE) == RuleInconclusive("needs 1 d of history")
    paper.write_lines(KernelLogCode.EDAC_UNCORRECTED, "mc1")
    assert paper.result(LOST) == lost_finding("mc1: 1 uncorrectable error in the kernel log")


def test_log_lines_from_long_before_the_start_are_no_rate() -> None:
    paper = PaperMemory()
    paper.write_lines(KernelLogCode.EDAC_CORRECTED, "mc0", 1_000)
    paper.now_s += 2 * DAY
    assert paper.result(RATE) is OK
    paper.write_lines(KernelLogCode.EDAC_CORRECTED, "mc0", 1_023)
    assert paper.result(RATE, after_s=60) is OK
    paper.write_lines(KernelLogCode.EDAC_CORRECTED, "mc0", 1_024)
    assert paper.result(RATE, after_s=60) == frequent_errors("mc0")


@pytest.mark.parametrize(
    ("line", "code", "answer"),
    [
        (
            f"EDAC MC0: 1 UE memory read error on {A1} (channel:0 slot:0 page:0x0 offset:0x0 grain:32)",
            LOST,
            lost_finding(f"mc0 {A1}: 1 uncorrectable error in the kernel log"),
        ),
        (
            "Memory failure: 0x12345: recovery action for dirty LRU page: Recovered",
            POISONED,
            bad(POISONED, "1 line of memory failure in the kernel log"),
        ),
    ],
)
def test_edac_line_has_result(line: str, code: str, answer: RuleResult) -> None:
    parsed_line = parse_host_line(line)
    assert parsed_line is not None
    paper = PaperMemory(numa=(numa(poisoned=ABSENT),))
    paper.write_lines(parsed_line.code, parsed_line.location)
    assert paper.result(code) == answer


# --- which NUMA node --------------------------------------------------------------------------------------


def found_on(paper: PaperMemory, nodes: int = 2) -> list[int]:
    """Return the nodes with a finding about an uncorrectable error."""
    return [node for node in range(nodes) if isinstance(paper.result(LOST, node), Finding)]


def test_error_before_the_cores_are_read_counts_for_no_node() -> None:
    """The core publishes EDAC's counters first, and the packages of the CPUs last."""
    paper = PaperMemory((controller(1, ue=1), module(1, 0, ue=1, label=B1)))
    paper.two_sockets()
    packages, paper.packages, paper.cores = paper.packages, {}, SourceState.STARTING
    assert paper.result(LOST, node=0) == paper.result(LOST, node=1) == NOT_YET
    paper.packages, paper.cores = packages, SourceState.OK
    assert paper.result(LOST, node=0) == NO_COUNTERS
    assert paper.result(LOST, node=1) == lost_finding(f"mc1 {B1}: 1 uncorrectable error {SINCE}")


@pytest.mark.parametrize("label", [B1, "CPU_SrcID#1_Channel#0_DIMM#1", "CPU_SrcID#1_Ha#0_Chan#2_DIMM#0"])
def test_module_belongs_to_the_socket_in_its_label(label: str) -> None:
    paper = PaperMemory((controller(2, ue=1), module(2, 0, ue=1, label=label)))
    paper.two_sockets()
    assert found_on(paper) == [1]
    assert paper.result(LOST, 1) == lost_finding(f"mc2 {label}: 1 uncorrectable error {SINCE}")


@pytest.mark.parametrize(
    ("dimms", "place"),
    [
        ((controller(1, ue=1), module(1, 0, ue=1, label=B1)), f"mc1 {B1}"),
        ((controller(0, name="F19h"), controller(1, ue=1, name="F19h")), "mc1 (F19h)"),
    ],
)
def test_module_of_a_node_whose_memory_is_offline_belongs_to_it(
    dimms: tuple[DimmSample, ...], place: str
) -> None:
    paper = PaperMemory()
    paper.two_sockets()
    assert found_on(paper) == []
    paper.dimms, paper.numa, paper.having = dimms, (numa(),), 0b01
    paper.now_s += 1
    assert found_on(paper) == [1]
    assert paper.result(LOST, 1) == lost_finding(f"{place}: 1 uncorrectable error {SINCE}")


def test_sockets_of_a_single_numa_node_share_it() -> None:
    paper = PaperMemory((controller(1, ue=1), module(1, 0, ue=1, label=B1)))
    paper.nodes, paper.packages = (node_sample(0, cpus=0b1111),), {0: 0, 1: 0, 2: 1, 3: 1}
    assert paper.result(LOST) == lost_finding(f"mc1 {B1}: 1 uncorrectable error {SINCE}")


def test_controller_without_modules_belongs_to_the_socket_in_its_name() -> None:
    paper = PaperMemory((controller(5, ue=1, name="Skylake Socket#1 IMC#1"),))
    paper.two_sockets()
    assert found_on(paper) == [1]


def test_modules_count_for_all_nodes_of_their_socket() -> None:
    paper = PaperMemory((controller(0, ue=1), module(0, 0, ue=1, label=B1)))
    paper.two_sockets(nodes_each=2)
    assert found_on(paper, 4) == [2, 3]


@pytest.mark.parametrize("name", ["F19h", "F19h_M10h", "F1Ah", "F17h_M30h", "F15h"])
def test_amd_controllers_are_numbered_by_socket(name: str) -> None:
    paper = PaperMemory((controller(0, name=name), controller(1, ue=1, name=name)))
    paper.two_sockets()
    assert found_on(paper) == [1]
    paper.two_sockets(nodes_each=4)
    assert found_on(paper, 8) == [4, 5, 6, 7]


def test_first_epyc_has_a_controller_per_numa_node() -> None:
    paper = PaperMemory(tuple(controller(n, ue=n == 5, name="F17h") for n in range(8)))
    paper.two_sockets(nodes_each=4)
    assert found_on(paper, 8) == [5]


def test_gpu_memory_controllers_are_not_those_of_cpus() -> None:
    gpus = tuple(controller(n, name="MI200") for n in range(8, 12))
    paper = PaperMemory((controller(0, name="F19h_M30h"), controller(1, ue=1, name="F19h_M30h"), *gpus))
    paper.two_sockets()
    assert found_on(paper) == [1]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ghes_edac", "P1-DIMMA1"),  # of the first socket here, of the second there
        ("", "CPU_SrcID#7_MC#0_Chan#0_DIMM#0"),  # no such socket
        ("", "CPU_SrcID#0_HBMC#3_Chan#1"),  # may be a NUMA node of its own
        ("F19h", "mc#0csrow#1channel#0"),  # neither as many as nodes nor as many as sockets
    ],
)
def test_module_on_an_unknown_node_counts_for_every_node(name: str, label: str) -> None:
    paper = PaperMemory((controller(0, ue=1, name=name), module(0, 0, ue=1, label=label)))
    paper.two_sockets()
    assert found_on(paper) == [0, 1]
    assert paper.result(LOST) == lost_finding(f"mc0 {label}: 1 uncorrectable error {SINCE}{UNKNOWN}")
    paper.numa, paper.having, paper.past = (numa(),), 0b1, MemoryRuleState()
    assert paper.result(LOST) == lost_finding(f"mc0 {label}: 1 uncorrectable error {SINCE}"), (
        "there is only one node"
    )


def test_unknown_sockets_leave_the_node_unknown() -> None:
    paper = PaperMemory((controller(0, ue=1), module(0, 0, ue=1)))
    paper.two_sockets()
    paper.packages = dict.fromkeys(paper.packages, ABSENT)
    paper.nodes = (paper.nodes[0], node_sample(1, EIO))
    assert found_on(paper) == [0, 1]


# --- pages that were taken out ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "kib", "lines", "answer"),
    [
        (0, 0, 0, OK),
        (0, 8, 1, OK),  # on another node, or taken out of use without an error
        (1, 0, 0, bad(POISONED, "1 page with hardware errors")),
        (12, 0, 0, bad(POISONED, "at least 10 pages with hardware errors")),
        (EIO, 4, 1, RuleInputUnreadable("memory_failure/total", EIO)),
        (ABSENT, 0, 0, OK),
        (ABSENT, 4, 0, bad(POISONED, "4 KiB with hardware errors")),
        (ABSENT, 4, 1, bad(POISONED, "4 KiB with hardware errors")),
        (ABSENT, 0, 2, bad(POISONED, "2 lines of memory failure in the kernel log")),
        (ABSENT, ABSENT, 1, bad(POISONED, "1 line of memory failure in the kernel log")),
        (ABSENT, EIO, 0, RuleInputUnreadable("HardwareCorrupted", EIO)),
        (ABSENT, ABSENT, 0, RuleNotApplicable("the kernel does not count pages with hardware errors")),
    ],
)
def test_pages_with_hardware_errors_have_the_result_of_the_table(
    pages: Reading, kib: Reading, lines: int, answer: RuleResult
) -> None:
    paper = PaperMemory(numa=(numa(poisoned=pages),), corrupted_kib=kib)
    if lines:
        paper.write_lines(KernelLogCode.MEMORY_FAILURE, times=lines)
    assert paper.result(POISONED) == answer


PRECAUTION: Final = bad(POISONED, "8 KiB taken out of use as a precaution", Severity.DEGRADED)
FAILED_PAGES: Final = bad(POISONED, "8 KiB with hardware errors")


@pytest.mark.parametrize(
    ("reader", "is_complete", "lines", "answer"),
    [
        (SourceState.OK, True, 0, PRECAUTION),
        (SourceState.OK, True, 1, FAILED_PAGES),
        (SourceState.OK, False, 0, FAILED_PAGES),  # the line may have been overwritten
        (SourceState.FAILING, True, 0, FAILED_PAGES),
        (SourceState.STALLED, True, 0, FAILED_PAGES),
        (SourceState.STARTING, False, 0, RuleInconclusive("the kernel log is still being read")),
        (SourceState.STARTING, False, 1, FAILED_PAGES),
    ],
)
def test_pages_without_a_line_of_failure_in_a_whole_log_are_degraded(
    reader: SourceState, is_complete: bool, lines: int, answer: RuleResult
) -> None:
    paper = PaperMemory(numa=(numa(poisoned=ABSENT),), corrupted_kib=8)
    paper.log = LogSample((), SourceSample("kmsg", reader, 0, NS, 0, ""), is_complete=is_complete)
    if lines:
        paper.write_lines(KernelLogCode.MEMORY_FAILURE, times=lines)
    found = paper.result(POISONED)
    if isinstance(found, Finding):
        is_precaution = found.severity is Severity.DEGRADED
        assert found.repair is (Repair.INSPECT_HARDWARE if is_precaution else None)
        found = found._replace(advice="", repair=None)
    assert found == answer


def test_poisoned_pages_count_for_their_node_or_for_all() -> None:
    paper = PaperMemory()
    paper.two_sockets()
    paper.numa = (numa(0), numa(1, poisoned=1))
    assert paper.result(POISONED, 0) is OK
    assert paper.result(POISONED, 1) == bad(POISONED, "1 page with hardware errors")
    paper.numa = tuple(numa(node, poisoned=ABSENT) for node in range(2))
    paper.corrupted_kib = 8
    somewhere = bad(POISONED, "8 KiB with hardware errors, NUMA node unknown")
    assert [paper.result(POISONED, node) for node in range(2)] == [somewhere] * 2


# --- nodes and blocks -------------------------------------------------------------------------------------


def test_numa_node_offline_or_without_memory_is_a_finding() -> None:
    paper = PaperMemory()
    paper.two_sockets()
    assert [paper.result(OFFLINE, node) for node in range(2)] == [OK, OK]
    paper.having = 0b01
    assert paper.result(OFFLINE, 1) == bad(OFFLINE, "NUMA node 1 has no memory, it had some")
    paper.online, paper.numa = 0b01, (numa(0), numa(1, kib=ENODEV, poisoned=ENODEV, blocks=ENODEV))
    assert paper.result(OFFLINE, 1) == bad(OFFLINE, "NUMA node 1 is offline, it was online")
    assert paper.result(OFFLINE, 0) is OK
    # reported once
    assert paper.result(POISONED, 1) == paper.result(BLOCKS, 1) == NO_MEMORY
    paper.two_sockets()
    assert paper.result(OFFLINE, 1) is OK


def test_numa_node_that_never_had_memory_is_no_finding() -> None:
    paper = PaperMemory(numa=(numa(0), numa(1, kib=0)), online=0b11)
    assert paper.result(OFFLINE, 1) is OK


@pytest.mark.parametrize(
    ("online", "having", "answer"),
    [
        (EIO, 0b1, RuleInputUnreadable("node/online", EIO)),
        (0b1, EIO, RuleInputUnreadable("node/has_memory", EIO)),
        (0b1, ABSENT, OK),
        (ABSENT, ABSENT, RuleNotApplicable("the kernel reports no NUMA nodes")),
    ],
)
def test_unreadable_numa_nodes_have_result(online: Reading, having: Reading, answer: RuleResult) -> None:
    assert PaperMemory(online=online, having=having).result(OFFLINE) == answer


def test_blocks_offline_at_start_are_info_later_ones_a_fault() -> None:
    paper = PaperMemory(numa=(numa(blocks=256, offline=3),))
    assert paper.result(BLOCKS) == bad(BLOCKS, "3 of 256 memory blocks offline", Severity.INFO)
    paper.numa = (numa(blocks=256, offline=4),)
    assert paper.result(BLOCKS) == bad(BLOCKS, "252 memory blocks online, 253 at start")
    paper.numa = (numa(blocks=252, offline=0),)
    assert paper.result(BLOCKS) == bad(BLOCKS, "252 memory blocks online, 253 at start"), "it was taken away"
    paper.numa = (numa(blocks=256, offline=255),)
    assert paper.result(BLOCKS) == bad(BLOCKS, "1 memory block online, 253 at start")
    paper.numa = (numa(blocks=256, offline=0),)
    assert paper.result(BLOCKS) is OK


@pytest.mark.parametrize(
    ("blocks", "offline", "answer"),
    [
        (ABSENT, ABSENT, RuleNotApplicable("the kernel reports no memory blocks")),
        (EIO, EIO, RuleInputUnreadable("memory blocks", EIO)),
        (8, ENODEV, RuleInputUnreadable("memory blocks", ENODEV)),
    ],
)
def test_unreadable_blocks_have_result(blocks: Reading, offline: Reading, answer: RuleResult) -> None:
    assert PaperMemory(numa=(numa(blocks=blocks, offline=offline),)).result(BLOCKS) == answer


def test_blocks_unreadable_at_start_are_counted_later() -> None:
    paper = PaperMemory(numa=(numa(blocks=EIO, offline=EIO),))
    paper.view()
    paper.numa = (numa(blocks=8, offline=1),)
    assert paper.result(BLOCKS) == bad(BLOCKS, "1 of 8 memory blocks offline", Severity.INFO)
    paper.numa = (numa(blocks=8, offline=2),)
    assert paper.result(BLOCKS) == bad(BLOCKS, "6 memory blocks online, 7 at start")


# --- declared memory --------------------------------------------------------------------------------------

GIB: Final = 1 << 30


@pytest.mark.parametrize(
    ("size", "node", "answer"),
    [
        (0, 0, OK),
        (16 * GIB, 0, OK),
        (16 * GIB + 1, 0, bad(MISSING, "16384 MiB on NUMA node 0, 16385 MiB declared")),
        (64 * GIB, 0, bad(MISSING, "16384 MiB on NUMA node 0, 65536 MiB declared")),
        (0, 1, bad(MISSING, "NUMA node 1 has no memory")),
        (0, 3, bad(MISSING, "no NUMA node 3")),
        (GIB, 1023, bad(MISSING, "no NUMA node 1023")),
    ],
)
def test_declared_memory_must_exist(size: int, node: int, answer: RuleResult) -> None:
    paper = PaperMemory(numa=(numa(0), numa(1, kib=0)), online=0b11, having=0b01)
    assert paper.declared_result(MISSING, size, node) == answer


def test_lost_declared_memory_has_one_finding() -> None:
    paper = PaperMemory()
    paper.two_sockets()
    assert paper.declared_result(MISSING, GIB, 1) is OK
    paper.online = paper.having = 0b01
    assert paper.declared_result(MISSING, GIB, 1) is OK
    assert paper.declared_result(OFFLINE, GIB, 1) == bad(OFFLINE, "NUMA node 1 is offline, it was online")


@pytest.mark.parametrize(
    ("kib", "answer"),
    [
        (EIO, RuleInputUnreadable("MemTotal", EIO)),
        (ABSENT, RuleNotApplicable("the kernel has no meminfo files of NUMA nodes")),
    ],
)
def test_unreadable_size_is_not_too_small(kib: Reading, answer: RuleResult) -> None:
    paper = PaperMemory(numa=(numa(kib=kib),))
    assert paper.declared_result(MISSING, GIB) == answer
    assert paper.declared_result(MISSING) is OK, "no size is declared"


def test_unreadable_nodes_are_reported_by_one_rule() -> None:
    paper = PaperMemory(online=EIO)
    assert paper.declared_result(MISSING, GIB) == RuleInconclusive("node/online cannot be read")
    assert isinstance(paper.declared_result(OFFLINE, GIB), RuleInputUnreadable)


def test_kernel_without_numa_has_node_0_only() -> None:
    paper = PaperMemory(numa=(), online=ABSENT, having=ABSENT)
    assert paper.declared_result(MISSING) is OK
    assert paper.declared_result(MISSING, GIB) == RuleNotApplicable(
        "the kernel has no meminfo files of NUMA nodes"
    )
    assert paper.declared_result(MISSING, 0, 1) == bad(MISSING, "no NUMA node 1")


# --- missing readings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ROWS)
def test_memory_rules_before_the_first_pass_are_not_evaluated(code: str) -> None:
    paper = PaperMemory(
        numa=(), online=ABSENT, having=ABSENT, edac=SourceState.STARTING, memory=SourceState.STARTING
    )
    paper.write_lines(KernelLogCode.EDAC_UNCORRECTED, "mc0")
    assert paper.result(code) == NOT_YET
    snapshot = replace(paper.snapshot(), machine=None)
    past = next_memory_state(MemoryRuleState(), KernelLogState(), snapshot, paper.settings, paper.now)
    assert ROWS[code].evaluate(memory_rule_input(past, snapshot, paper.settings, 0)) == NOT_YET


def test_virtual_machine_has_no_memory_findings() -> None:
    paper = PaperMemory(edac=SourceState.ABSENT)
    answers = {rule.code: rule.evaluate(paper.view()) for rule in MEMORY_RULES}
    assert answers.pop(LOST) == answers.pop(RATE) == NO_COUNTERS
    assert set(answers.values()) == {OK}


# --- on real files ----------------------------------------------------------------------------------------


class RealMachine:
    """Machine as the native source reads it, with simulated time."""

    def __init__(self, machine: MachineWatch) -> None:
        self._machine = machine
        self._past = MemoryRuleState()
        self._now_s = 0.0

    def answers(self, after_s: float = 0) -> dict[str, RuleResult]:
        """Return the results of all rules for NUMA node 0 after another pass."""
        self._machine.run_pass()
        self._now_s += after_s
        now = Instant(int(self._now_s * NS), self._now_s)
        sample = self._machine.read()
        assert sample is not None
        sources = tuple(source._replace(beat_ns=now.mono_ns) for source in sample.sources)
        snapshot = Snapshot(seq=1, cpus=cpus_sample(), machine=replace(sample, sources=sources))
        self._past = next_memory_state(self._past, KernelLogState(), snapshot, EngineSettings("node-a"), now)
        view = memory_rule_input(self._past, snapshot, EngineSettings("node-a"), 0)
        return {rule.code: rule.evaluate(view) for rule in MEMORY_RULES}

    def evidence_by_code(self, after_s: float = 0) -> dict[str, str]:
        """Return the evidence of the findings, by code."""
        found = self.answers(after_s)
        return {code: answer.evidence for code, answer in found.items() if isinstance(answer, Finding)}

    def poke(self) -> None:
        """Have rarely read files read in the next pass."""
        os.eventfd_write(self._machine.rescan_fileno(), 1)


@contextmanager
def real_machine(sysfs_root: Path, procfs_root: Path) -> Iterator[RealMachine]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    machine = MachineWatch(sysfs_root, procfs_root, fd)
    try:
        yield RealMachine(machine)
    finally:
        assert machine.stop(PATIENCE_S)
        os.close(fd)


def test_memory_of_this_machine_has_no_findings() -> None:
    if Path("/sys/devices/system/edac/mc/mc0").exists():
        pytest.skip("this machine has memory controllers, which may have counted something")
    with real_machine(Path("/sys"), Path("/proc")) as machine:
        answers = machine.answers()
        assert answers.pop(LOST) == answers.pop(RATE) == NO_COUNTERS
        assert answers.pop(OFFLINE) is OK
        assert [
            answer
            for answer in answers.values()
            if isinstance(answer, RuleInputUnreadable | RuleInconclusive)
        ] == []


def test_failing_module_is_named_as_in_sysfs(tmp_path: Path) -> None:
    mc, nodes = tmp_path / "devices/system/edac/mc/mc0", tmp_path / "devices/system/node"
    files = {mc / "mc_name": "Skylake Socket#0 IMC#0", mc / "ce_count": "0", mc / "ue_count": "0"}
    files |= {mc / "dimm0/dimm_label": A1, mc / "dimm0/dimm_location": "channel 0 slot 0"}
    files |= {mc / "dimm0/dimm_ce_count": "0", mc / "dimm0/dimm_ue_count": "0"}
    files |= {nodes / "online": "0", nodes / "has_memory": "0"}
    files |= {nodes / "node0/meminfo": "Node 0 MemTotal:       16000000 kB"}
    files |= {nodes / "node0/memory_failure/total": "0"}
    files |= {nodes / f"node0/memory{n}/state": "online" for n in range(4)}

    def write(**texts: str) -> None:
        """Write each text to the files of this name."""
        for path, before in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts.get(path.name, before) + "\n")

    write()
    (tmp_path / "proc").mkdir()
    with real_machine(tmp_path, tmp_path / "proc") as machine:
        assert machine.evidence_by_code() == {}
        write(ce_count="30", dimm_ce_count="30")
        assert machine.evidence_by_code(1) == {RATE: f"mc0 {A1}: at least 24 correctable errors in 1 d"}
        write(ce_count="30", dimm_ce_count="30", ue_count="1", dimm_ue_count="1")
        assert machine.evidence_by_code(1)[LOST] == f"mc0 {A1}: 1 uncorrectable error {SINCE}"
        write(ce_count="0", dimm_ce_count="0")
        assert set(machine.evidence_by_code(1)) == {RATE}, "the counters were reset"
        write(total="2")
        (nodes / "node0/memory3/state").write_text("offline\n")
        machine.poke()
        found = machine.evidence_by_code(10)
        assert found[POISONED] == "2 pages with hardware errors"
        assert found[BLOCKS] == "3 memory blocks online, 4 at start"


# --- the rows ---------------------------------------------------------------------------------------------


def test_missing_memory_rule_is_for_declared_memory_only() -> None:
    assert [rule.code for rule in DECLARED_MEMORY_RULES if rule not in MEMORY_RULES] == [MISSING]


@pytest.mark.parametrize("code", ROWS)
def test_every_row_is_complete(code: str) -> None:
    row = ROWS[code]
    assert all([row.threshold, row.why, row.advice, row.try_it])
    assert row.source in {"edac", "memory"}
    assert not row.sampler_reads, "the watch over the machine wakes by itself"
    assert row.evaluate.__doc__
    assert "Source:" in row.evaluate.__doc__
