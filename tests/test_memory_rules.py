"""The rules of memory: at which number each changes its mind, what it cannot tell, and whose it was."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest
from paper import ABSENT, EIO, ENODEV, cpus_sample, node_sample
from patience import PATIENCE_S

from agent.health.host.memory.rules import DECLARED_MEMORY_RULES, MEMORY_RULES
from agent.health.host.memory.state import (
    MemoryPast,
    MemoryView,
    remember_memory,
    view_declared_memory,
    view_memory,
)
from agent.health.kernel_log.parse import parse
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable
from agent.model.declared import Declared, DeclaredMemory
from agent.model.health import Finding, Severity
from agent.model.machine import CoreSample, DimmSample, MachineSample, NumaSample, PressureSample
from agent.model.reading import Reading
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import NodeSample, Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant
from agent.native.machine import Machine

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
NO_COUNTERS: Final = RuleNotApplicable("no EDAC counters")
NOT_YET: Final = RuleNotEvaluated("not read yet")
NO_MEMORY: Final = RuleNotEvaluated("the NUMA node has no memory")
UNKNOWN: Final = " (its NUMA node is not known)"


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
) -> NumaSample:
    return NumaSample(node, kib, poisoned, blocks, offline)


@dataclass
class PaperMemory:
    """What is read of memory is in the attributes; each look remembers it."""

    dimms: tuple[DimmSample, ...] = ()
    numa: tuple[NumaSample, ...] = (numa(),)
    nodes: tuple[NodeSample, ...] = ()
    packages: Mapping[int, Reading] = field(default_factory=dict)
    online: Reading = 0b1
    having: Reading = 0b1
    corrupted_kib: Reading = 0
    edac: SourceState = SourceState.OK
    memory: SourceState = SourceState.OK
    settings: Settings = field(default_factory=lambda: Settings("node-a"))
    facts: Mapping[tuple[LogCode, str], LogFact] = field(default_factory=dict)
    now_s: float = 1_000 * DAY
    past: MemoryPast = field(default_factory=MemoryPast)

    @property
    def now(self) -> Instant:
        return Instant(int(self.now_s * NS), self.now_s)

    def tell(self, code: LogCode, place: str = "", times: int = 1) -> None:
        """The log has lines of one kind, the newest written just now; the first now, too, or when it was."""
        known = self.facts.get((code, place))
        first = known.first if known else self.now
        self.facts = {**self.facts, (code, place): LogFact(code, place, times, first, self.now, "a line")}

    def two_sockets(self, nodes_each: int = 1) -> None:
        """Two packages of two CPUs per NUMA node."""
        count = 2 * nodes_each
        self.numa = tuple(numa(node) for node in range(count))
        self.nodes = tuple(node_sample(node, cpus=0b11 << 2 * node) for node in range(count))
        self.packages = {cpu: cpu // (2 * nodes_each) for cpu in range(2 * count)}
        self.online = self.having = (1 << count) - 1

    def snapshot(self) -> Snapshot:
        beat_ns = self.now.mono_ns
        states = {"edac": self.edac, "memory": self.memory}
        return Snapshot(
            seq=1,
            cpus=cpus_sample(),
            nodes=self.nodes,
            machine=MachineSample(
                dimms=self.dimms,
                numa=self.numa,
                cores=tuple(
                    CoreSample(cpu, cpu, package, *[ABSENT] * 3) for cpu, package in self.packages.items()
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

    def look(self, node: int = 0, after_s: float = 0, declared: Declared | None = None) -> MemoryView:
        """The view of a NUMA node, or of what is declared."""
        self.now_s += after_s
        snapshot = self.snapshot()
        self.past = remember_memory(self.past, LogPast(self.facts), snapshot, self.settings, self.now)
        if declared is not None:
            return view_declared_memory(self.past, snapshot, self.settings, declared)
        return view_memory(self.past, snapshot, self.settings, node)

    def ask(self, code: str, node: int = 0, after_s: float = 0) -> RuleResult:
        """What a rule says of a NUMA node."""
        return ROWS[code].judge(self.look(node, after_s))

    def ask_declared(self, code: str, size: int = 0, node: int = 0) -> RuleResult:
        """What a rule says of memory that a driver declares."""
        declared = Declared("mem.example", "node-a", "mem-1", DeclaredMemory(size, node), 0)
        return ROWS[code].judge(self.look(declared=declared))


def bad(code: str, evidence: str, severity: Severity | None = None) -> Finding:
    return Finding(code, ROWS[code].severity if severity is None else severity, evidence)


def lost(*places: str) -> Finding:
    return bad(LOST, ", ".join(places))


def often(*places: str, limit: int = 24, window: str = "1 d") -> Finding:
    what = f"at least {limit} correctable errors in {window}"
    return bad(RATE, ", ".join(f"{place}: {what}" for place in places))


# --- uncorrectable errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dimms", "answer"),
    [
        ([], NO_COUNTERS),
        ([controller(0), module(0, 0)], OK),
        ([controller(0, ue=1), module(0, 0, ue=1)], lost(f"mc0 {A1}: 1 uncorrectable error {SINCE}")),
        (
            [controller(0, ue=43), module(0, 0, ue=43)],
            lost(f"mc0 {A1}: at least 10 uncorrectable errors {SINCE}"),
        ),
        # what no module has to answer for is its controller's
        ([controller(0, ue=2, name="F19h")], lost(f"mc0 (F19h): 2 uncorrectable errors {SINCE}")),
        ([controller(1, ue=2), module(1, 0)], lost(f"mc1: 2 uncorrectable errors {SINCE}")),
        (
            [controller(0, ue=3), module(0, 0, ue=1), module(0, 1, label="")],
            lost(f"mc0 {A1}: 1 uncorrectable error {SINCE}", f"mc0: 2 uncorrectable errors {SINCE}"),
        ),
        # modules are read a moment before their controller, or after it
        ([controller(0, ue=0), module(0, 0, ue=1)], lost(f"mc0 {A1}: 1 uncorrectable error {SINCE}")),
        # no label: where it sits; not even that: its number
        (
            [controller(0, ue=1), module(0, 1, ue=1, label="")],
            lost(f"mc0 channel 1 slot 0: 1 uncorrectable error {SINCE}"),
        ),
        ([DimmSample(0, 3, "", "", 0, 1)], lost(f"mc0 module 3: 1 uncorrectable error {SINCE}")),
        ([controller(0, ue=EIO), module(0, 0)], Unreadable("ue_count of mc0", EIO)),
        ([controller(0), module(0, 0, ue=ENODEV)], Unreadable(f"ue_count of mc0 {A1}", ENODEV)),
        # of old kernels no module has counts
        ([controller(0), module(0, 0, ce=ABSENT, ue=ABSENT)], OK),
        (
            [controller(0, ue=1), module(0, 0, ce=ABSENT, ue=ABSENT)],
            lost(f"mc0: 1 uncorrectable error {SINCE}"),
        ),
        ([controller(0, ce=ABSENT, ue=ABSENT)], NO_COUNTERS),
    ],
)
def test_uncorrectable_errors(dimms: list[DimmSample], answer: RuleResult) -> None:
    assert PaperMemory(tuple(dimms)).ask(LOST) == answer


def test_what_is_known_to_be_lost_outranks_what_cannot_be_read() -> None:
    paper = PaperMemory((controller(0, ue=1), module(0, 0, ue=1), controller(1, ue=EIO)))
    assert paper.ask(LOST) == lost(f"mc0 {A1}: 1 uncorrectable error {SINCE}")


def test_an_uncorrectable_error_stays_until_the_counters_are_reset() -> None:
    paper = PaperMemory((controller(0, ue=1),))
    for _ in range(3):
        assert isinstance(paper.ask(LOST, after_s=30 * DAY), Finding)
    paper.dimms = (controller(0),)
    assert paper.ask(LOST, after_s=1) is OK


def test_a_list_of_bad_modules_ends_with_how_many_more_there_are() -> None:
    paper = PaperMemory(tuple(module(0, n, ue=1, label=f"DIMM_A{n}") for n in range(6)))
    answer = paper.ask(LOST)
    assert isinstance(answer, Finding)
    assert answer.evidence.count("uncorrectable") == 4
    assert answer.evidence.endswith(", and 2 more")


# --- correctable errors -------------------------------------------------------------------------------------


def grown(ce: Reading, *, limits: HostLimits | None = None, after_s: float = HOUR) -> RuleResult:
    """What is said when a module that had 100 has so many."""
    paper = PaperMemory((module(0, 0, 100),))
    paper.settings = replace(paper.settings, host=limits or HostLimits())
    paper.look()
    paper.dimms = (module(0, 0, ce),)
    return paper.ask(RATE, after_s=after_s)


@pytest.mark.parametrize(
    ("ce", "answer"),
    [
        (123, RuleNotEvaluated("needs 1 d of history")),
        (124, often(f"mc0 {A1}")),
        (100_000, often(f"mc0 {A1}")),
        (EIO, Unreadable(f"ce_count of mc0 {A1}", EIO)),
        (0, RuleNotEvaluated("needs 1 d of history")),  # a reset is no growth
        (99, RuleNotEvaluated("needs 1 d of history")),
    ],
)
def test_correctable_errors_within_the_window(ce: Reading, answer: RuleResult) -> None:
    assert grown(ce) == answer


def test_where_a_module_is_is_known_as_soon_as_the_nodes_are() -> None:
    paper = PaperMemory(edac=SourceState.ABSENT, memory=SourceState.STARTING, numa=(), having=ABSENT)
    paper.tell(LogCode.EDAC_UNCORRECTED, "mc0")
    log = LogPast(paper.facts)
    past = remember_memory(paper.past, log, paper.snapshot(), paper.settings, paper.now)
    paper.memory, paper.numa, paper.having = SourceState.OK, (numa(),), 0b1
    seen = paper.snapshot()
    view = view_memory(remember_memory(past, log, seen, paper.settings, paper.now), seen, paper.settings, 0)
    assert ROWS[LOST].judge(view) == bad(LOST, "mc0: 1 uncorrectable error in the kernel log")


def test_a_limit_and_a_window_are_as_configured() -> None:
    few = HostLimits(correctable_errors=3, correctable_window_s=90)
    assert grown(102, limits=few, after_s=60) == RuleNotEvaluated("needs 90 s of history")
    assert grown(102, limits=few, after_s=90) is OK
    assert grown(103, limits=few, after_s=90) == often(f"mc0 {A1}", limit=3, window="90 s")
    too_rare = RuleNotEvaluated("needs 90 s of history")
    assert grown(103, limits=few, after_s=91) == too_rare, "it may be from before the window, or within it"


@pytest.mark.parametrize(("every_s", "answer"), [(65 * 60, OK), (55 * 60, often(f"mc0 {A1}"))])
def test_a_slow_drip_is_no_rate_however_long_it_lasts(every_s: int, answer: RuleResult) -> None:
    paper, said = PaperMemory(), []
    for count in range(30 * DAY // every_s):
        paper.dimms = (module(0, 0, count),)
        said.append(paper.ask(RATE, after_s=every_s))
    assert set(said) == {RuleNotEvaluated("needs 1 d of history"), answer}


def test_a_burst_is_over_a_window_later_and_another_reset_later_still_counts() -> None:
    paper = PaperMemory((controller(0, 0), module(0, 0, 0)))
    paper.look()
    paper.dimms = (controller(0, 30), module(0, 0, 30))
    assert isinstance(paper.ask(RATE, after_s=HOUR), Finding)
    paper.dimms = (controller(0, 0), module(0, 0, 0))
    assert isinstance(paper.ask(RATE, after_s=HOUR), Finding), "the reset took none of them back"
    assert [paper.ask(RATE, after_s=HOUR) for _ in range(26)][-1] is OK
    paper.dimms = (controller(0, 23), module(0, 0, 23))
    assert paper.ask(RATE, after_s=10) is OK
    paper.dimms = (controller(0, 24), module(0, 0, 24))
    assert paper.ask(RATE, after_s=10) == often(f"mc0 {A1}")


def test_a_module_that_cannot_be_read_for_a_while_loses_no_history() -> None:
    paper = PaperMemory((controller(0, 0), module(0, 0, 0)))
    paper.look()
    paper.dimms = (controller(0, 24), module(0, 0, EIO))
    assert paper.ask(RATE, after_s=60) == often("mc0"), "the controller still counts"
    paper.dimms = (controller(0, 24), module(0, 0, 24))
    assert paper.ask(RATE, after_s=60) == often(f"mc0 {A1}")


def test_errors_spread_over_modules_are_no_fault_of_one_and_none_of_their_controller() -> None:
    labels = [f"DIMM_A{n}" for n in range(8)]
    paper = PaperMemory((controller(0, 0), *(module(0, n, 0, label=label) for n, label in enumerate(labels))))
    paper.look()
    paper.dimms = (
        controller(0, 160),
        *(module(0, n, 20, label=label) for n, label in enumerate(labels)),
    )
    assert paper.ask(RATE, after_s=HOUR) == RuleNotEvaluated("needs 1 d of history")


def test_errors_that_a_controller_puts_down_to_no_module_are_its_own() -> None:
    paper = PaperMemory((controller(0, 0, name="F19h"), module(0, 0, 0)))
    paper.look()
    paper.dimms = (controller(0, 33, name="F19h"), module(0, 0, 10))
    assert paper.ask(RATE, after_s=HOUR) == RuleNotEvaluated("needs 1 d of history")
    paper.dimms = (controller(0, 34, name="F19h"), module(0, 0, 10))
    assert paper.ask(RATE, after_s=HOUR) == often("mc0 (F19h)")


def test_memory_without_counters_has_no_rate() -> None:
    assert PaperMemory().ask(RATE) == NO_COUNTERS
    assert PaperMemory(edac=SourceState.ABSENT).ask(RATE) == NO_COUNTERS


def test_512_modules_that_nobody_has_read_again_are_not_looked_at_again() -> None:
    paper = PaperMemory(tuple(module(n // 8, n % 8) for n in range(512)))
    paper.look()
    before, log = paper.past, LogPast()
    past = remember_memory(before, log, paper.snapshot(), paper.settings, paper.now)
    again = remember_memory(past, log, paper.snapshot(), paper.settings, paper.now)
    assert again.errors is past.errors
    assert again.places is past.places


# --- lines of the log where there are no counters -----------------------------------------------------------


def test_lines_of_the_log_count_where_there_are_no_counters() -> None:
    paper = PaperMemory()
    paper.tell(LogCode.EDAC_UNCORRECTED, f"mc0 {A1}")
    paper.tell(LogCode.EDAC_CORRECTED, "mc1", 23)
    assert paper.ask(LOST) == lost(f"mc0 {A1}: 1 uncorrectable error in the kernel log")
    assert paper.ask(RATE, after_s=HOUR) is OK
    paper.tell(LogCode.EDAC_CORRECTED, "mc1", 24)
    assert paper.ask(RATE, after_s=HOUR) == often("mc1")
    assert [paper.ask(RATE, after_s=HOUR) for _ in range(26)][-1] is OK, "they are a day old"
    assert isinstance(paper.ask(LOST), Finding), "what is lost stays lost"


def test_lines_count_for_nothing_where_their_controller_counts() -> None:
    paper = PaperMemory((controller(0), module(0, 0)))
    paper.tell(LogCode.EDAC_UNCORRECTED, f"mc0 {A1}")
    paper.tell(LogCode.EDAC_CORRECTED, f"mc0 {A1}", 1_000)
    assert paper.ask(LOST) is OK, "the counters were reset since"
    assert paper.ask(RATE) == RuleNotEvaluated("needs 1 d of history")
    paper.tell(LogCode.EDAC_UNCORRECTED, "mc1")
    assert paper.ask(LOST) == lost("mc1: 1 uncorrectable error in the kernel log")


def test_lines_from_long_before_the_start_are_no_rate() -> None:
    paper = PaperMemory()
    paper.tell(LogCode.EDAC_CORRECTED, "mc0", 1_000)
    paper.now_s += 2 * DAY
    assert paper.ask(RATE) is OK
    paper.tell(LogCode.EDAC_CORRECTED, "mc0", 1_023)
    assert paper.ask(RATE, after_s=60) is OK
    paper.tell(LogCode.EDAC_CORRECTED, "mc0", 1_024)
    assert paper.ask(RATE, after_s=60) == often("mc0")


@pytest.mark.parametrize(
    ("line", "code", "answer"),
    [
        (
            f"EDAC MC0: 1 UE memory read error on {A1} (channel:0 slot:0 page:0x0 offset:0x0 grain:32)",
            LOST,
            lost(f"mc0 {A1}: 1 uncorrectable error in the kernel log"),
        ),
        (
            "Memory failure: 0x12345: recovery action for dirty LRU page: Recovered",
            POISONED,
            bad(POISONED, "1 line of memory failure in the kernel log"),
        ),
    ],
)
def test_a_line_that_the_kernel_writes_is_understood(line: str, code: str, answer: RuleResult) -> None:
    told = parse(line)
    assert told is not None
    paper = PaperMemory(numa=(numa(poisoned=ABSENT),))
    paper.tell(told.code, told.place)
    assert paper.ask(code) == answer


# --- which NUMA node ----------------------------------------------------------------------------------------


def found_on(paper: PaperMemory, nodes: int = 2) -> list[int]:
    """The nodes that are told of an uncorrectable error."""
    return [node for node in range(nodes) if isinstance(paper.ask(LOST, node), Finding)]


@pytest.mark.parametrize("label", [B1, "CPU_SrcID#1_Channel#0_DIMM#1", "CPU_SrcID#1_Ha#0_Chan#2_DIMM#0"])
def test_a_module_is_of_the_socket_that_its_driver_names(label: str) -> None:
    paper = PaperMemory((controller(2, ue=1), module(2, 0, ue=1, label=label)))
    paper.two_sockets()
    assert found_on(paper) == [1]
    assert paper.ask(LOST, 1) == lost(f"mc2 {label}: 1 uncorrectable error {SINCE}")


def test_a_controller_without_modules_is_of_the_socket_in_its_name() -> None:
    paper = PaperMemory((controller(5, ue=1, name="Skylake Socket#1 IMC#1"),))
    paper.two_sockets()
    assert found_on(paper) == [1]


def test_all_nodes_of_a_socket_have_its_modules() -> None:
    paper = PaperMemory((controller(0, ue=1), module(0, 0, ue=1, label=B1)))
    paper.two_sockets(nodes_each=2)
    assert found_on(paper, 4) == [2, 3]


@pytest.mark.parametrize("name", ["F19h", "F19h_M10h", "F1Ah", "F17h_M30h", "F15h"])
def test_amd_numbers_its_controllers_by_socket(name: str) -> None:
    paper = PaperMemory((controller(0, name=name), controller(1, ue=1, name=name)))
    paper.two_sockets()
    assert found_on(paper) == [1]
    paper.two_sockets(nodes_each=4)
    assert found_on(paper, 8) == [4, 5, 6, 7]


def test_the_first_epyc_has_a_controller_per_numa_node() -> None:
    paper = PaperMemory(tuple(controller(n, ue=n == 5, name="F17h") for n in range(8)))
    paper.two_sockets(nodes_each=4)
    assert found_on(paper, 8) == [5]


def test_a_gpus_memory_controllers_are_not_taken_for_a_cpus() -> None:
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
def test_a_module_whose_node_is_not_known_is_every_nodes_and_said_to_be(name: str, label: str) -> None:
    paper = PaperMemory((controller(0, ue=1, name=name), module(0, 0, ue=1, label=label)))
    paper.two_sockets()
    assert found_on(paper) == [0, 1]
    assert paper.ask(LOST) == lost(f"mc0 {label}: 1 uncorrectable error {SINCE}{UNKNOWN}")
    paper.numa, paper.having, paper.past = (numa(),), 0b1, MemoryPast()
    assert paper.ask(LOST) == lost(f"mc0 {label}: 1 uncorrectable error {SINCE}"), "there is only one node"


def test_sockets_that_nobody_knows_leave_the_node_unknown() -> None:
    paper = PaperMemory((controller(0, ue=1), module(0, 0, ue=1)))
    paper.two_sockets()
    paper.packages = dict.fromkeys(paper.packages, ABSENT)
    paper.nodes = (paper.nodes[0], node_sample(1, EIO))
    assert found_on(paper) == [0, 1]


# --- pages that were taken out ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "kib", "lines", "answer"),
    [
        (0, 0, 0, OK),
        (0, 8, 1, OK),  # taken out before they failed, or of another node
        (1, 0, 0, bad(POISONED, "1 page with hardware errors")),
        (12, 0, 0, bad(POISONED, "at least 10 pages with hardware errors")),
        (EIO, 4, 1, Unreadable("memory_failure/total", EIO)),
        (ABSENT, 0, 0, OK),
        (ABSENT, 4, 0, bad(POISONED, "4 KiB with hardware errors")),
        (ABSENT, 4, 1, bad(POISONED, "4 KiB with hardware errors")),
        (ABSENT, 0, 2, bad(POISONED, "2 lines of memory failure in the kernel log")),
        (ABSENT, ABSENT, 1, bad(POISONED, "1 line of memory failure in the kernel log")),
        (ABSENT, EIO, 0, Unreadable("HardwareCorrupted", EIO)),
        (ABSENT, ABSENT, 0, RuleNotApplicable("no count of bad pages")),
    ],
)
def test_pages_with_hardware_errors(pages: Reading, kib: Reading, lines: int, answer: RuleResult) -> None:
    paper = PaperMemory(numa=(numa(poisoned=pages),), corrupted_kib=kib)
    if lines:
        paper.tell(LogCode.MEMORY_FAILURE, times=lines)
    assert paper.ask(POISONED) == answer


def test_bad_pages_are_of_the_node_that_has_them_or_of_all_if_nobody_knows() -> None:
    paper = PaperMemory()
    paper.two_sockets()
    paper.numa = (numa(0), numa(1, poisoned=1))
    assert paper.ask(POISONED, 0) is OK
    assert paper.ask(POISONED, 1) == bad(POISONED, "1 page with hardware errors")
    paper.numa = tuple(numa(node, poisoned=ABSENT) for node in range(2))
    paper.corrupted_kib = 8
    somewhere = bad(POISONED, "8 KiB with hardware errors, on a NUMA node that the kernel does not tell")
    assert [paper.ask(POISONED, node) for node in range(2)] == [somewhere] * 2


# --- nodes and blocks ---------------------------------------------------------------------------------------


def test_a_node_that_goes_offline_or_loses_its_memory() -> None:
    paper = PaperMemory()
    paper.two_sockets()
    assert [paper.ask(OFFLINE, node) for node in range(2)] == [OK, OK]
    paper.having = 0b01
    assert paper.ask(OFFLINE, 1) == bad(OFFLINE, "NUMA node 1 has no memory, it had some")
    paper.online, paper.numa = 0b01, (numa(0), numa(1, kib=ENODEV, poisoned=ENODEV, blocks=ENODEV))
    assert paper.ask(OFFLINE, 1) == bad(OFFLINE, "NUMA node 1 is offline, it was online")
    assert paper.ask(OFFLINE, 0) is OK
    # that is told once
    assert paper.ask(POISONED, 1) == paper.ask(BLOCKS, 1) == NO_MEMORY
    paper.two_sockets()
    assert paper.ask(OFFLINE, 1) is OK


def test_a_node_that_never_had_memory_is_not_missed() -> None:
    paper = PaperMemory(numa=(numa(0), numa(1, kib=0)), online=0b11)
    assert paper.ask(OFFLINE, 1) is OK


@pytest.mark.parametrize(
    ("online", "having", "answer"),
    [
        (EIO, 0b1, Unreadable("node/online", EIO)),
        (0b1, EIO, Unreadable("node/has_memory", EIO)),
        (0b1, ABSENT, OK),
        (ABSENT, ABSENT, RuleNotApplicable("no NUMA nodes")),
    ],
)
def test_what_cannot_be_told_of_nodes(online: Reading, having: Reading, answer: RuleResult) -> None:
    assert PaperMemory(online=online, having=having).ask(OFFLINE) == answer


def test_blocks_that_go_offline_are_a_fault_and_those_that_were_offline_at_start_are_not() -> None:
    paper = PaperMemory(numa=(numa(blocks=256, offline=3),))
    assert paper.ask(BLOCKS) == bad(BLOCKS, "3 of 256 memory blocks offline", Severity.INFO)
    paper.numa = (numa(blocks=256, offline=4),)
    assert paper.ask(BLOCKS) == bad(BLOCKS, "252 memory blocks online, 253 at start")
    paper.numa = (numa(blocks=252, offline=0),)
    assert paper.ask(BLOCKS) == bad(BLOCKS, "252 memory blocks online, 253 at start"), "it was taken away"
    paper.numa = (numa(blocks=256, offline=255),)
    assert paper.ask(BLOCKS) == bad(BLOCKS, "1 memory block online, 253 at start")
    paper.numa = (numa(blocks=256, offline=0),)
    assert paper.ask(BLOCKS) is OK


@pytest.mark.parametrize(
    ("blocks", "offline", "answer"),
    [
        (ABSENT, ABSENT, RuleNotApplicable("no memory blocks")),
        (EIO, EIO, Unreadable("memory blocks", EIO)),
        (8, ENODEV, Unreadable("memory blocks", ENODEV)),
    ],
)
def test_what_cannot_be_told_of_blocks(blocks: Reading, offline: Reading, answer: RuleResult) -> None:
    assert PaperMemory(numa=(numa(blocks=blocks, offline=offline),)).ask(BLOCKS) == answer


def test_blocks_that_could_not_be_read_at_start_are_counted_when_they_can() -> None:
    paper = PaperMemory(numa=(numa(blocks=EIO, offline=EIO),))
    paper.look()
    paper.numa = (numa(blocks=8, offline=1),)
    assert paper.ask(BLOCKS) == bad(BLOCKS, "1 of 8 memory blocks offline", Severity.INFO)
    paper.numa = (numa(blocks=8, offline=2),)
    assert paper.ask(BLOCKS) == bad(BLOCKS, "6 memory blocks online, 7 at start")


# --- what drivers declare -----------------------------------------------------------------------------------

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
def test_declared_memory_must_be_there(size: int, node: int, answer: RuleResult) -> None:
    paper = PaperMemory(numa=(numa(0), numa(1, kib=0)), online=0b11, having=0b01)
    assert paper.ask_declared(MISSING, size, node) == answer


def test_declared_memory_that_was_there_is_told_of_once() -> None:
    paper = PaperMemory()
    paper.two_sockets()
    assert paper.ask_declared(MISSING, GIB, 1) is OK
    paper.online = paper.having = 0b01
    assert paper.ask_declared(MISSING, GIB, 1) is OK
    assert paper.ask_declared(OFFLINE, GIB, 1) == bad(OFFLINE, "NUMA node 1 is offline, it was online")


@pytest.mark.parametrize(
    ("kib", "answer"),
    [(EIO, Unreadable("MemTotal", EIO)), (ABSENT, RuleNotApplicable("no meminfo of NUMA nodes"))],
)
def test_a_size_that_cannot_be_read_is_not_too_little(kib: Reading, answer: RuleResult) -> None:
    paper = PaperMemory(numa=(numa(kib=kib),))
    assert paper.ask_declared(MISSING, GIB) == answer
    assert paper.ask_declared(MISSING) is OK, "no size is declared"


def test_what_cannot_be_read_of_nodes_is_told_by_one_rule() -> None:
    paper = PaperMemory(online=EIO)
    assert paper.ask_declared(MISSING, GIB) == RuleNotEvaluated("node/online cannot be read")
    assert isinstance(paper.ask_declared(OFFLINE, GIB), Unreadable)


def test_a_kernel_without_numa_has_node_0_alone() -> None:
    paper = PaperMemory(numa=(), online=ABSENT, having=ABSENT)
    assert paper.ask_declared(MISSING) is OK
    assert paper.ask_declared(MISSING, GIB) == RuleNotApplicable("no meminfo of NUMA nodes")
    assert paper.ask_declared(MISSING, 0, 1) == bad(MISSING, "no NUMA node 1")


# --- nothing read, nothing there ----------------------------------------------------------------------------


@pytest.mark.parametrize("code", ROWS)
def test_before_the_first_pass_nothing_is_said(code: str) -> None:
    paper = PaperMemory(
        numa=(), online=ABSENT, having=ABSENT, edac=SourceState.STARTING, memory=SourceState.STARTING
    )
    paper.tell(LogCode.EDAC_UNCORRECTED, "mc0")
    assert paper.ask(code) == NOT_YET
    snapshot = replace(paper.snapshot(), machine=None)
    past = remember_memory(MemoryPast(), LogPast(), snapshot, paper.settings, paper.now)
    assert ROWS[code].judge(view_memory(past, snapshot, paper.settings, 0)) == NOT_YET


def test_an_ordinary_virtual_machine_is_fine() -> None:
    paper = PaperMemory(edac=SourceState.ABSENT)
    answers = {rule.code: rule.judge(paper.look()) for rule in MEMORY_RULES}
    assert answers.pop(LOST) == answers.pop(RATE) == NO_COUNTERS
    assert set(answers.values()) == {OK}


# --- on real files ------------------------------------------------------------------------------------------


class RealMachine:
    """A machine as the native watch reads it; time passes on paper."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._past = MemoryPast()
        self._now_s = 0.0

    def answers(self, after_s: float = 0) -> dict[str, RuleResult]:
        """What each rule says of NUMA node 0 after another pass."""
        self._machine.run_pass()
        self._now_s += after_s
        now = Instant(int(self._now_s * NS), self._now_s)
        sample = self._machine.read()
        assert sample is not None
        sources = tuple(source._replace(beat_ns=now.mono_ns) for source in sample.sources)
        snapshot = Snapshot(seq=1, cpus=cpus_sample(), machine=replace(sample, sources=sources))
        self._past = remember_memory(self._past, LogPast(), snapshot, Settings("node-a"), now)
        view = view_memory(self._past, snapshot, Settings("node-a"), 0)
        return {rule.code: rule.judge(view) for rule in MEMORY_RULES}

    def raised(self, after_s: float = 0) -> dict[str, str]:
        """The findings, with their evidence."""
        found = self.answers(after_s)
        return {code: answer.evidence for code, answer in found.items() if isinstance(answer, Finding)}

    def poke(self) -> None:
        """What is read rarely is read in the next pass."""
        os.eventfd_write(self._machine.pokeno(), 1)


@contextmanager
def real_machine(sysfs_root: Path, procfs_root: Path) -> Iterator[RealMachine]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    machine = Machine(sysfs_root, procfs_root, fd)
    try:
        yield RealMachine(machine)
    finally:
        assert machine.stop(PATIENCE_S)
        os.close(fd)


def test_nothing_is_wrong_with_the_memory_of_this_machine() -> None:
    if Path("/sys/devices/system/edac/mc/mc0").exists():
        pytest.skip("this machine has memory controllers, which may have counted something")
    with real_machine(Path("/sys"), Path("/proc")) as machine:
        answers = machine.answers()
        assert answers.pop(LOST) == answers.pop(RATE) == NO_COUNTERS
        assert answers.pop(OFFLINE) is OK
        assert [
            answer for answer in answers.values() if isinstance(answer, Unreadable | RuleNotEvaluated)
        ] == []


def test_a_module_that_fails_is_named_as_its_files_name_it(tmp_path: Path) -> None:
    mc, nodes = tmp_path / "devices/system/edac/mc/mc0", tmp_path / "devices/system/node"
    files = {mc / "mc_name": "Skylake Socket#0 IMC#0", mc / "ce_count": "0", mc / "ue_count": "0"}
    files |= {mc / "dimm0/dimm_label": A1, mc / "dimm0/dimm_location": "channel 0 slot 0"}
    files |= {mc / "dimm0/dimm_ce_count": "0", mc / "dimm0/dimm_ue_count": "0"}
    files |= {nodes / "online": "0", nodes / "has_memory": "0"}
    files |= {nodes / "node0/meminfo": "Node 0 MemTotal:       16000000 kB"}
    files |= {nodes / "node0/memory_failure/total": "0"}
    files |= {nodes / f"node0/memory{n}/state": "online" for n in range(4)}

    def write(**texts: str) -> None:
        """Each to the files of this name."""
        for path, before in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts.get(path.name, before) + "\n")

    write()
    (tmp_path / "proc").mkdir()
    with real_machine(tmp_path, tmp_path / "proc") as machine:
        assert machine.raised() == {}
        write(ce_count="30", dimm_ce_count="30")
        assert machine.raised(1) == {RATE: f"mc0 {A1}: at least 24 correctable errors in 1 d"}
        write(ce_count="30", dimm_ce_count="30", ue_count="1", dimm_ue_count="1")
        assert machine.raised(1)[LOST] == f"mc0 {A1}: 1 uncorrectable error {SINCE}"
        write(ce_count="0", dimm_ce_count="0")
        assert set(machine.raised(1)) == {RATE}, "somebody has reset the counters"
        write(total="2")
        (nodes / "node0/memory3/state").write_text("offline\n")
        machine.poke()
        found = machine.raised(10)
        assert found[POISONED] == "2 pages with hardware errors"
        assert found[BLOCKS] == "3 memory blocks online, 4 at start"


# --- the rows -----------------------------------------------------------------------------------------------


def test_only_a_declaration_can_be_of_memory_that_never_was() -> None:
    assert [rule.code for rule in DECLARED_MEMORY_RULES if rule not in MEMORY_RULES] == [MISSING]


@pytest.mark.parametrize("code", ROWS)
def test_every_row_is_complete(code: str) -> None:
    row = ROWS[code]
    assert all([row.threshold, row.why, row.advice, row.try_it])
    assert row.source in {"edac", "memory"}
    assert not row.reads, "the watch over the machine wakes by itself"
    assert row.judge.__doc__
    assert "Source:" in row.judge.__doc__
