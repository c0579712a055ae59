"""The rules of CPUs: at which number each changes its mind, what it cannot tell, and what resets do to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import pytest
from paper import ABSENT, EIO, ENODEV, node_sample

from agent.health.host.cpu.rules import CPU_RULES, DECLARED_CPU_RULES
from agent.health.host.cpu.state import (
    CpuPast,
    CpuView,
    ExpectedCpus,
    remember_cpus,
    view_cpus,
    view_declared_cpus,
)
from agent.health.kernel_log.parse import parse
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rules import OK, Growth, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable
from agent.model.cpuset import parse_cpus
from agent.model.declared import Declared, DeclaredCpus, DeclaredFile
from agent.model.health import Finding, Severity
from agent.model.log import LogSample
from agent.model.machine import CoreSample, MachineSample, PressureSample
from agent.model.reading import Absence, Missing, Reading
from agent.model.settings import HostLimits, Settings
from agent.model.snapshot import CpuSample, NodeSample, Snapshot, ThrottleSample
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

ROWS: Final = {rule.code: rule for rule in (*CPU_RULES, *DECLARED_CPU_RULES)}
NO_FILE: Final = Missing(Absence.UNREADABLE, 2)
MINUTE: Final = 60
DAY: Final = 86_400
PRESSURE: Final = PressureSample(ABSENT, ABSENT, ABSENT)
NOTHING: Final = (ABSENT, ABSENT, ABSENT, ABSENT)


def core_sample(
    cpu: int,
    *,
    core: Reading = ABSENT,
    max_khz: Reading = ABSENT,
    cap_khz: Reading = ABSENT,
    checks: Reading = ABSENT,
) -> CoreSample:
    """One CPU, of a machine that tells nothing of it."""
    return CoreSample(cpu, core, ABSENT, max_khz, cap_khz, checks)


def capped(cpu: int, cap_khz: Reading, max_khz: Reading = 3_500_000) -> CoreSample:
    return core_sample(cpu, cap_khz=cap_khz, max_khz=max_khz)


def counting(*checks: Reading) -> tuple[CoreSample, ...]:
    """CPUs from 0 on, and what each counts."""
    return tuple(core_sample(cpu, checks=count) for cpu, count in enumerate(checks))


@dataclass
class PaperCpus:
    """What is read of CPUs is in the attributes; each look remembers it."""

    settings: Settings = field(default_factory=lambda: Settings("node-a"))
    cpus: CpuSample = field(default_factory=lambda: cpu_sets("0-3"))
    nodes: tuple[NodeSample, ...] = (node_sample(cpus=0b1111),)
    throttle: tuple[ThrottleSample, ...] = ()
    cores: tuple[CoreSample, ...] = ()
    smt: Reading = ABSENT
    declared: Declared | None = None
    log: SourceState | None = SourceState.OK
    facts: Mapping[tuple[LogCode, str], LogFact] = field(default_factory=dict)
    now_s: float = 1_000 * DAY
    past: CpuPast = field(default_factory=CpuPast)

    @property
    def now(self) -> Instant:
        return Instant(int(self.now_s * NS), self.now_s)

    def tell(self, code: LogCode, place: str, times: int = 1, *, first_s: float | None = None) -> None:
        """The log has lines of one kind, the newest written just now; the first now, too, or when it was."""
        known = self.facts.get((code, place))
        first = known.first if known else self.now if first_s is None else Instant(int(first_s * NS), first_s)
        self.facts = {**self.facts, (code, place): LogFact(code, place, times, first, self.now, "a line")}

    def declare(self, cpus: str, *, numa: int | None = None, isolated: bool = False) -> None:
        what = DeclaredCpus(parse_cpus(cpus), numa, exclusive=False, isolated=isolated)
        self.declared = Declared("cpu.example", "node-a", "cpuset-1", what, 0)

    def snapshot(self) -> Snapshot:
        beat_ns = self.now.mono_ns
        kmsg = self.log and SourceSample("kmsg", self.log, beat_ns, 10 * NS, 0, "")
        return Snapshot(
            seq=1,
            cpus=self.cpus,
            nodes=self.nodes,
            throttle=self.throttle,
            sources=(SourceSample("throttle", SourceState.OK, beat_ns, NS, 0, ""),),
            machine=MachineSample((), (), self.cores, PRESSURE, *NOTHING, self.smt, ()),
            log=LogSample((), kmsg) if kmsg else None,
            declared=(DeclaredFile("cpu.example", (self.declared,)),) if self.declared else (),
        )

    def look(self, after_s: float = 0) -> CpuView:
        """The view of node 0, or of what is declared."""
        self.now_s += after_s
        snapshot = self.snapshot()
        self.past = remember_cpus(self.past, LogPast(self.facts), snapshot, self.settings, self.now)
        if self.declared is None:
            return view_cpus(self.past, snapshot, self.settings, 0)
        return view_declared_cpus(self.past, snapshot, self.settings, self.declared)

    def ask(self, code: str, after_s: float = 0) -> RuleResult:
        """What a rule says of it."""
        return ROWS[code].judge(self.look(after_s))


def cpu_sets(online: str, present: str = "0-3", isolated: str = "") -> CpuSample:
    return CpuSample(parse_cpus(present), parse_cpus(online), parse_cpus(isolated))


def bad(code: str, evidence: str) -> Finding:
    return Finding(code, ROWS[code].severity, evidence)


# --- by a view ----------------------------------------------------------------------------------------------

VIEW: Final = PaperCpus().look()._replace(throttled_core=Growth(0, 60.0), throttled_package=Growth(0, 60.0))


def core(events: Reading, span_s: float = 60.0) -> CpuView:
    return VIEW._replace(throttled_core=Growth(events, span_s))


def package(events: Reading, span_s: float = 60.0) -> CpuView:
    return VIEW._replace(throttled_package=Growth(events, span_s))


CASES: Final[list[tuple[str, CpuView, RuleResult]]] = [
    ("cpu.offline", VIEW, OK),
    ("cpu.offline", VIEW._replace(online=0b11111), OK),
    ("cpu.offline", VIEW._replace(expected=ExpectedCpus(0, "configured"), online=0b1), OK),
    ("cpu.offline", VIEW._replace(online=0b1101), bad("cpu.offline", "CPU 1 offline, online at start: 0-3")),
    ("cpu.offline", VIEW._replace(online=0b0001, expected=ExpectedCpus(0b1111, "configured")),
     bad("cpu.offline", "CPUs 1-3 offline, configured: 0-3")),
    ("cpu.offline", VIEW._replace(online=EIO), Unreadable("cpu/online", EIO)),
    ("cpu.offline", VIEW._replace(online=ABSENT), Unreadable("cpu/online", ABSENT)),
    ("cpu.offline", VIEW._replace(node=node_sample(3, ABSENT)), Unreadable("node3/cpulist", ABSENT)),
    ("cpu.throttled.core", core(0), OK),
    ("cpu.throttled.core", core(9), OK),
    ("cpu.throttled.core", core(10),
     bad("cpu.throttled.core", "at least 10 core thermal-throttle events in 60 s")),
    ("cpu.throttled.core", core(10, 0.5),
     bad("cpu.throttled.core", "at least 10 core thermal-throttle events in 60 s")),
    ("cpu.throttled.core", core(9, 59.9), RuleNotEvaluated("needs 60 s of history")),
    ("cpu.throttled.core", core(ABSENT, 0.0), RuleNotApplicable("no thermal_throttle counters")),
    ("cpu.throttled.core", core(EIO, 0.0), Unreadable("core_throttle_count", EIO)),
    ("cpu.throttled.package", package(9), OK),
    ("cpu.throttled.package", package(10_000),
     bad("cpu.throttled.package", "at least 10 package thermal-throttle events in 60 s")),
    ("cpu.throttled.package", package(0, 0.0), RuleNotEvaluated("needs 60 s of history")),
    ("cpu.throttled.package", package(ABSENT, 0.0), RuleNotApplicable("no thermal_throttle counters")),
    ("cpu.throttled.package", package(EIO, 0.0), Unreadable("package_throttle_count", EIO)),
    ("cpu.missing", VIEW, OK),
    ("cpu.missing", VIEW._replace(present=0b0111), bad("cpu.missing", "CPU 3 does not exist, declared: 0-3")),
    ("cpu.missing", VIEW._replace(present=0b0001),
     bad("cpu.missing", "CPUs 1-3 do not exist, declared: 0-3")),
    ("cpu.missing", VIEW._replace(present=EIO), Unreadable("cpu/present", EIO)),
    ("cpu.isolation", VIEW, OK),
    ("cpu.isolation", VIEW._replace(apart=ExpectedCpus(0b11, "declared"), isolated=0b111), OK),
    ("cpu.isolation", VIEW._replace(apart=ExpectedCpus(0b11, "declared"), isolated=0b10),
     bad("cpu.isolation", "CPU 0 not isolated, declared: 0-1")),
    ("cpu.isolation", VIEW._replace(isolated=EIO), Unreadable("cpu/isolated", EIO)),
    ("cpu.isolation", VIEW._replace(isolated=ABSENT),
     RuleNotApplicable("the kernel does not tell which CPUs are isolated")),
    ("cpu.smt", VIEW._replace(smt=1, smt_start=1), OK),
    ("cpu.smt", VIEW._replace(smt=0, smt_start=1), bad("cpu.smt", "SMT off, on at start")),
    ("cpu.smt", VIEW._replace(smt=1, smt_start=0), bad("cpu.smt", "SMT on, off at start")),
    ("cpu.smt", VIEW._replace(smt=EIO, smt_start=1), Unreadable("smt/active", EIO)),
    ("cpu.smt", VIEW, RuleNotApplicable("the kernel does not tell of SMT")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_a_view_has_this_answer(code: str, view: CpuView, answer: RuleResult) -> None:
    assert ROWS[code].judge(view) == answer


@pytest.mark.parametrize("code", [code for code, rule in ROWS.items() if rule.counter])
def test_every_rate_is_shown_without_history_and_every_one_without_counters(code: str) -> None:
    kinds = {type(answer) for named, _, answer in CASES if named == code}
    assert kinds >= {RuleNotEvaluated, RuleNotApplicable, Unreadable}


@pytest.mark.parametrize("events", [10, 11, 500])
def test_the_evidence_of_a_rate_does_not_move_with_the_rate(events: int) -> None:
    judge = ROWS["cpu.throttled.core"].judge
    assert len({judge(core(n)) for n in (10, events)}) == 1


# --- which CPUs there are -----------------------------------------------------------------------------------


def test_a_virtual_machine_has_nothing_to_be_said_of() -> None:
    paper = PaperCpus()
    paper.look()
    view = paper.look(60)
    answers = {rule.code: rule.judge(view) for rule in CPU_RULES}
    assert not [answer for answer in answers.values() if not isinstance(answer, RuleNotApplicable | None)]
    assert {code for code, answer in answers.items() if answer is OK} == {
        "cpu.offline", "cpu.isolation", "cpu.machine_check", "cpu.machine_check.corrected",
        "cpu.lockup.hard", "cpu.lockup.soft",
    }  # fmt: skip


def test_declared_cpus_must_be_online_whatever_was_at_start() -> None:
    paper = PaperCpus(cpus=cpu_sets("0-1"))
    paper.declare("1-2")
    assert paper.ask("cpu.offline") == bad("cpu.offline", "CPU 2 offline, declared: 1-2")


def test_a_declared_cpu_that_does_not_exist_is_not_offline_or_open_to_all_as_well() -> None:
    paper = PaperCpus(cpus=cpu_sets("0-3", isolated="2-3"))
    paper.declare("2-5", isolated=True)
    assert paper.ask("cpu.isolation") is OK
    assert paper.ask("cpu.missing") == bad("cpu.missing", "CPUs 4-5 do not exist, declared: 2-5")
    assert paper.ask("cpu.offline") is OK
    paper.cpus = paper.cpus._replace(present=EIO)
    assert paper.ask("cpu.offline") == bad("cpu.offline", "CPUs 4-5 offline, declared: 2-5")


@pytest.mark.parametrize(
    ("numa", "answer"),
    [
        (None, RuleNotApplicable("no NUMA node is declared")),
        (1, OK),
        (0, bad("cpu.numa", "CPU 2 on NUMA node 1, declared: NUMA node 0")),
        (2, bad("cpu.numa", "CPU 1 on NUMA node 0, CPU 2 on NUMA node 1, declared: NUMA node 2")),
        (3, bad("cpu.numa", "NUMA node 3 does not exist, declared: NUMA node 3")),
        (4, Unreadable("node4/cpulist", EIO)),
    ],
)
def test_declared_cpus_are_on_the_node_that_is_declared(numa: int | None, answer: RuleResult) -> None:
    paper = PaperCpus(
        nodes=(node_sample(0, 0b0011), node_sample(1, 0b1100), node_sample(2, 0), node_sample(4, EIO))
    )
    paper.declare({1: "2-3", 4: "8"}.get(numa or 0, "1-2"), numa=numa)
    assert paper.ask("cpu.numa") == answer


def test_where_no_node_could_be_listed_nobody_knows_where_a_cpu_is() -> None:
    paper = PaperCpus(nodes=())
    paper.declare("0", numa=0)
    assert paper.ask("cpu.numa") == Unreadable("node0/cpulist", Missing(Absence.ABSENT))


def test_a_cpu_that_was_never_online_is_on_no_node_and_not_on_a_wrong_one() -> None:
    paper = PaperCpus(nodes=(node_sample(0, 0b0011), node_sample(1, 0b0100)))
    paper.declare("2-3", numa=1)
    assert paper.ask("cpu.numa") is OK


def test_what_was_isolated_at_start_must_stay_so() -> None:
    paper = PaperCpus(cpus=cpu_sets("0-3", isolated="1-2"))
    assert paper.ask("cpu.isolation") is OK
    paper.cpus = cpu_sets("0-3", isolated="2-3")
    assert paper.ask("cpu.isolation") == bad("cpu.isolation", "CPU 1 not isolated, isolated at start: 1-2")


def test_isolation_concerns_only_the_device_that_has_the_cpu() -> None:
    paper = PaperCpus(
        cpus=cpu_sets("0-3", isolated="3"), nodes=(node_sample(0, 0b0011), node_sample(1, 0b1100))
    )
    paper.look()
    paper.cpus = cpu_sets("0-3")
    assert paper.ask("cpu.isolation") is OK


def test_a_declaration_of_isolation_counts_from_the_first_look() -> None:
    paper = PaperCpus()
    paper.declare("1-2", isolated=True)
    assert paper.ask("cpu.isolation") == bad("cpu.isolation", "CPUs 1-2 not isolated, declared: 1-2")
    paper.declare("1-2")
    assert paper.ask("cpu.isolation") is OK


def test_smt_is_compared_with_the_first_that_could_be_read() -> None:
    paper = PaperCpus(smt=EIO)
    paper.look()
    paper.smt = 1
    assert paper.ask("cpu.smt") is OK
    paper.smt = 0
    assert paper.ask("cpu.smt") == bad("cpu.smt", "SMT off, on at start")


# --- shared cores -------------------------------------------------------------------------------------------

PAIRS: Final = tuple(core_sample(cpu, core=cpu % 2) for cpu in range(4))  # 0 with 2, 1 with 3


@pytest.mark.parametrize(
    ("cpus", "answer"),
    [
        ("0,2", OK),
        ("0-3", OK),
        ("0", bad("cpu.shared_core", "CPU 2 shares a core with 0")),
        ("0-2", bad("cpu.shared_core", "CPU 3 shares a core with 1")),
        ("0-1", bad("cpu.shared_core", "CPUs 2-3 share cores with 0-1")),
    ],
)
def test_whole_cores_are_shared_with_nobody(cpus: str, answer: RuleResult) -> None:
    paper = PaperCpus(cores=PAIRS)
    paper.declare(cpus)
    assert paper.ask("cpu.shared_core") == answer


def test_nobody_runs_on_a_sibling_that_is_offline() -> None:
    paper = PaperCpus(cores=PAIRS, cpus=cpu_sets("0-1"))
    paper.declare("0-1")
    assert paper.ask("cpu.shared_core") is OK
    paper.cpus = cpu_sets("1-3")
    assert paper.ask("cpu.shared_core") == bad("cpu.shared_core", "CPU 3 shares a core with 1")


def test_siblings_share_though_nobody_can_read_who_is_online() -> None:
    paper = PaperCpus(cores=PAIRS)
    paper.declare("0")
    paper.look()
    paper.cpus = paper.cpus._replace(online=EIO)
    assert paper.ask("cpu.shared_core") == bad("cpu.shared_core", "CPU 2 shares a core with 0")


def test_cores_that_cannot_be_told_are_not_whole() -> None:
    paper = PaperCpus(cores=(core_sample(0), core_sample(1, core=EIO), core_sample(2, core=2)))
    paper.declare("0")
    reason = "the kernel does not tell which CPUs share cores"
    assert paper.ask("cpu.shared_core") == RuleNotApplicable(reason)
    paper.declare("1-2")
    assert paper.ask("cpu.shared_core") == Unreadable("cpu1/topology/core_cpus_list", EIO)


# --- heat ---------------------------------------------------------------------------------------------------


def heat(*counts: tuple[Reading, Reading]) -> tuple[ThrottleSample, ...]:
    return tuple(ThrottleSample(cpu, *count) for cpu, count in enumerate(counts))


def test_declared_cpus_answer_for_their_own_heat_alone() -> None:
    paper = PaperCpus(throttle=heat((0, 0), (0, 0), (0, 0)))
    paper.declare("1-2")
    paper.look()
    paper.throttle = heat((100, 100), (5, 9), (4, 9))
    view = paper.look(50)
    assert (view.throttled_core, view.throttled_package) == (Growth(9, 50.0), Growth(9, 50.0))
    paper.throttle = heat((100, 100), (5, 9), (5, 9))
    evidence = "at least 10 core thermal-throttle events in 60 s"
    assert paper.ask("cpu.throttled.core", 1) == bad("cpu.throttled.core", evidence)
    assert paper.look().throttled_package.events == 9, "all CPUs count the same events of a package"


def test_one_pass_of_the_counters_is_one_point_however_often_somebody_looks() -> None:
    paper = PaperCpus(throttle=heat((0, 0)))
    paper.declare("0")
    assert paper.look().throttled_core == paper.look().throttled_core == Growth(0, 0.0)
    (watched,) = paper.past.watched.values()
    assert len(watched.throttled.core.history) == 1


def test_a_device_declared_anew_of_other_cpus_begins_anew() -> None:
    paper = PaperCpus(throttle=heat((0, 0), (500, 500)))
    paper.declare("0")
    paper.look()
    paper.declare("1")
    assert paper.ask("cpu.throttled.core", 60) == RuleNotEvaluated("needs 60 s of history")


def test_a_declaration_that_is_gone_is_forgotten() -> None:
    paper = PaperCpus(throttle=heat((0, 0)))
    paper.declare("0")
    paper.look()
    paper.declared = None
    paper.look()
    assert not paper.past.watched


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ((), RuleNotApplicable("no thermal_throttle counters")),
        (((ABSENT, 0), (ABSENT, 0)), RuleNotApplicable("no thermal_throttle counters")),
        (((0, 0), (EIO, 0)), Unreadable("core_throttle_count", EIO)),
        (((0, 0), (ABSENT, 0)), RuleNotEvaluated("needs 60 s of history")),
    ],
)
def test_counters_that_are_missing_are_no_zeros(
    counts: tuple[tuple[Reading, Reading], ...], answer: RuleResult
) -> None:
    paper = PaperCpus(throttle=heat(*counts))
    paper.declare("0-1")
    assert paper.ask("cpu.throttled.core") == answer


# --- caps ---------------------------------------------------------------------------------------------------


def test_a_cap_that_falls_is_told_with_what_it_was() -> None:
    paper = PaperCpus(cores=tuple(capped(cpu, 3_500_000) for cpu in range(4)))
    assert paper.ask("cpu.capped") is OK
    paper.cores = tuple(capped(cpu, 3_499_999 if cpu else 3_500_000) for cpu in range(4))
    assert paper.ask("cpu.capped") == bad("cpu.capped", "CPUs 1-3 capped at 3.499999 GHz, 3.5 GHz at start")
    paper.cores = tuple(capped(cpu, 2_100_000) for cpu in range(4))
    assert paper.ask("cpu.capped") == bad("cpu.capped", "CPUs 0-3 capped at 2.1 GHz, 3.5 GHz at start")
    paper.cores = tuple(capped(cpu, 3_500_000) for cpu in range(4))
    assert paper.ask("cpu.capped") is OK


def test_a_cap_of_before_the_start_is_only_a_word() -> None:
    paper = PaperCpus(cores=(capped(0, 2_000_000), capped(1, 3_500_000)))
    evidence = "CPU 0 capped at 2 GHz, 3.5 GHz possible"
    assert paper.ask("cpu.capped") == Finding("cpu.capped", Severity.INFO, evidence)
    paper.cores = (capped(0, 2_200_000), capped(1, 3_500_000))
    evidence = "CPU 0 capped at 2.2 GHz, 3.5 GHz possible"
    assert paper.ask("cpu.capped") == Finding("cpu.capped", Severity.INFO, evidence)


def test_what_fell_is_told_before_what_was_low() -> None:
    paper = PaperCpus(cores=(capped(0, 2_000_000), capped(1, 3_500_000)))
    paper.look()
    paper.cores = (capped(0, 2_000_000), capped(1, 3_000_000))
    assert paper.ask("cpu.capped") == bad("cpu.capped", "CPU 1 capped at 3 GHz, 3.5 GHz at start")


def test_many_kinds_of_caps_are_told_in_few_words() -> None:
    paper = PaperCpus(
        cores=tuple(capped(cpu, 3_000_000) for cpu in range(8)),
        nodes=(node_sample(0, 0xFF),),
        cpus=cpu_sets("0-7", "0-7"),
    )
    paper.look()
    paper.cores = tuple(capped(cpu, 1_000_000 + cpu * 100_000) for cpu in range(8))
    answer = paper.ask("cpu.capped")
    assert isinstance(answer, Finding)
    assert answer.evidence == (
        "CPU 0 capped at 1 GHz, 3 GHz at start; CPU 1 capped at 1.1 GHz, 3 GHz at start; "
        "CPU 2 capped at 1.2 GHz, 3 GHz at start; and 5 more"
    )


def test_a_cpu_that_is_offline_is_not_slow() -> None:
    paper = PaperCpus(cores=(capped(0, 3_500_000), capped(1, 3_500_000)))
    paper.look()
    paper.cores = (capped(0, 3_500_000), capped(1, 1_000_000))
    paper.cpus = cpu_sets("0,2-3")
    assert paper.ask("cpu.capped") is OK


def test_a_cap_of_another_node_is_not_told() -> None:
    paper = PaperCpus(cores=(capped(0, 3_500_000), capped(3, 3_500_000)), nodes=(node_sample(0, 0b11),))
    paper.look()
    paper.cores = (capped(0, 3_500_000), capped(3, 1_000_000))
    assert paper.ask("cpu.capped") is OK


@pytest.mark.parametrize("gone", [NO_FILE, ENODEV])
def test_without_a_driver_nobody_caps(gone: Missing) -> None:
    paper = PaperCpus(cores=(capped(0, 3_500_000),))
    paper.look()
    paper.cores = (capped(0, gone, gone),)
    assert paper.ask("cpu.capped") == RuleNotApplicable("no frequency scaling")


def test_a_cap_that_can_no_longer_be_read_is_unknown_unless_another_fell() -> None:
    paper = PaperCpus(cores=(capped(0, 3_500_000), capped(1, 3_500_000)))
    paper.look()
    paper.cores = (capped(0, EIO), capped(1, 3_500_000))
    assert paper.ask("cpu.capped") == Unreadable("cpu0/cpufreq/scaling_max_freq", EIO)
    paper.cores = (capped(0, EIO), capped(1, 1_000_000))
    assert paper.ask("cpu.capped") == bad("cpu.capped", "CPU 1 capped at 1 GHz, 3.5 GHz at start")
    paper.cpus = cpu_sets("1-3")
    paper.cores = (capped(0, EIO), capped(1, 3_500_000))
    assert paper.ask("cpu.capped") is OK, "nobody asks for the cap of a CPU that is offline"


# --- machine checks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ((0, 0, 0, 0), OK),
        ((0, 1, 0, 0), bad("cpu.machine_check", "uncorrected machine check on CPU 1 since boot")),
        ((0, 7, 9, 0), bad("cpu.machine_check", "uncorrected machine check on CPUs 1-2 since boot")),
        ((0, 0, 0, 0, 5), OK),  # of another node
        ((EIO, EIO), Unreadable("MCE of /proc/interrupts", EIO)),
        ((0, EIO), OK),  # it is offline, and has no column
        ((ABSENT, ABSENT), OK),  # and the log says nothing
    ],
)
def test_one_exception_since_boot_is_enough(counts: tuple[Reading, ...], answer: RuleResult) -> None:
    assert PaperCpus(cores=counting(*counts)).ask("cpu.machine_check") == answer


def test_a_machine_check_stands_until_the_next_boot() -> None:
    paper = PaperCpus(cores=counting(0, 1))
    found = bad("cpu.machine_check", "uncorrected machine check on CPU 1 since boot")
    assert paper.ask("cpu.machine_check") == found
    for lost in (EIO, ABSENT, 0):
        paper.cores = counting(0, lost)
        assert paper.ask("cpu.machine_check", DAY) == found
    paper.nodes = (node_sample(cpus=EIO),)
    assert paper.ask("cpu.machine_check") == found, "the node had that CPU when somebody could read it"


def test_what_count_and_log_both_tell_is_told_once() -> None:
    paper = PaperCpus(cores=counting(0, 1))
    paper.tell(LogCode.MACHINE_CHECK, "cpu1")
    assert paper.ask("cpu.machine_check") == bad(
        "cpu.machine_check", "uncorrected machine check on CPU 1 since boot"
    )
    paper.tell(LogCode.MACHINE_CHECK, "cpu3")
    assert paper.ask("cpu.machine_check") == bad(
        "cpu.machine_check", "uncorrected machine check on CPUs 1,3 since boot"
    )


def test_a_log_that_was_read_is_believed_when_it_no_longer_can_be() -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK, "cpu0")
    paper.look()
    paper.log = SourceState.FAILING
    assert isinstance(paper.ask("cpu.machine_check"), Finding)


@pytest.mark.parametrize("place", ["", "cpu", "cpu4", "cpu8192", "cpu99999999999", "cpu1x", "mc0", "cpu-1"])
def test_a_line_of_no_cpu_of_ours_is_nobodys(place: str) -> None:
    paper = PaperCpus()
    for code in LogCode:
        paper.tell(code, place, 1000)
    view = paper.look()
    assert [rule.code for rule in CPU_RULES if isinstance(rule.judge(view), Finding)] == []


def test_corrected_ones_are_no_uncorrected_ones() -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu0", 1000)
    assert paper.ask("cpu.machine_check") is OK


OFTEN: Final = "cpu.machine_check.corrected"
ENOUGH: Final = bad(OFTEN, "at least 24 corrected machine checks on CPU 2 in 1 d")


@pytest.mark.parametrize(("times", "answer"), [(1, OK), (23, OK), (24, ENOUGH), (10_000, ENOUGH)])
def test_corrected_machine_checks_are_too_many_from_the_limit_on(times: int, answer: RuleResult) -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", times)
    assert paper.ask(OFTEN) == answer


def test_the_limits_are_the_configurations() -> None:
    limits = HostLimits(correctable_errors=3, correctable_window_s=5400)
    paper = PaperCpus(Settings("node-a", host=limits))
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 2)
    assert paper.ask(OFTEN) is OK
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 3)
    assert paper.ask(OFTEN) == bad(OFTEN, "at least 3 corrected machine checks on CPU 2 in 90 min")


def test_corrected_ones_of_several_cpus_do_not_add_up() -> None:
    paper = PaperCpus()
    for cpu in range(4):
        paper.tell(LogCode.MACHINE_CHECK_CORRECTED, f"cpu{cpu}", 23)
    assert paper.ask(OFTEN) is OK


def test_corrected_ones_leave_the_window() -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 24)
    paper.look()
    assert paper.ask(OFTEN, DAY - 1) == ENOUGH
    assert paper.ask(OFTEN, 1) is OK
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 47)
    assert paper.ask(OFTEN) is OK
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 48)
    assert paper.ask(OFTEN) == ENOUGH


def test_a_burst_of_corrected_ones_after_a_pause_counts_for_the_whole_window() -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 24)
    assert paper.ask(OFTEN) == ENOUGH
    paper.look(20 * 3600)
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 48)
    assert paper.ask(OFTEN, 1) == ENOUGH
    assert paper.ask(OFTEN, DAY - 10) == ENOUGH
    assert paper.ask(OFTEN, 10) is OK


def test_a_slow_drip_of_corrected_ones_never_adds_up() -> None:
    paper = PaperCpus()
    for number in range(200):
        paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", number + 1)
        assert paper.ask(OFTEN, 2 * 3600) is OK
    for day in range(10):
        paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 200 + 23 * (day + 1))
        assert paper.ask(OFTEN, DAY) is OK


def test_the_history_of_a_cpu_that_is_corrected_every_second_is_bounded() -> None:
    paper = PaperCpus(Settings("node-a", host=HostLimits(correctable_window_s=600)))
    for number in range(1800):
        paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", number + 1)
        paper.look(1)
    assert len(paper.past.told.corrected[2]) < 30


def test_old_lines_whose_times_nobody_knows_are_not_held_against_a_cpu() -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 5_000, first_s=paper.now_s - DAY)
    assert paper.ask(OFTEN) is OK
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 5_024)
    assert paper.ask(OFTEN, 1) == ENOUGH
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 24, first_s=paper.now_s - DAY + 1)
    assert paper.ask(OFTEN) == ENOUGH


def test_a_count_that_began_anew_is_no_growth() -> None:
    paper = PaperCpus()
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 5_000, first_s=paper.now_s - 2 * DAY)
    paper.look()
    paper.facts = {}
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu2", 20)
    assert paper.ask(OFTEN, 60) is OK


# --- lockups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_code", "code", "evidence"),
    [
        (LogCode.HARD_LOCKUP, "cpu.lockup.hard", "hard lockup on CPU 3"),
        (LogCode.SOFT_LOCKUP, "cpu.lockup.soft", "soft lockup on CPU 3"),
    ],
)
def test_a_lockup_is_told_until_ten_minutes_after_its_last_line(
    log_code: LogCode, code: str, evidence: str
) -> None:
    paper = PaperCpus()
    paper.tell(log_code, "cpu3")
    assert paper.ask(code) == bad(code, evidence)
    paper.now_s += 9 * MINUTE
    paper.tell(log_code, "cpu3", 30)
    assert paper.ask(code) == bad(code, evidence)
    assert paper.ask(code, 10 * MINUTE - 1) == bad(code, evidence)
    assert paper.ask(code, 1) is OK
    other = "cpu.lockup.soft" if code.endswith("hard") else "cpu.lockup.hard"
    paper.tell(log_code, "cpu0")
    assert paper.ask(other) is OK


# --- what nobody can tell -----------------------------------------------------------------------------------


UNHEARD: Final[list[tuple[SourceState | None, RuleResult]]] = [
    (None, RuleNotApplicable("no kernel log")),
    (SourceState.ABSENT, RuleNotApplicable("no kernel log")),
    (SourceState.FAILING, RuleNotApplicable("the kernel log cannot be read")),
    (SourceState.STARTING, RuleNotEvaluated("the kernel log is still being read")),
]


@pytest.mark.parametrize(("log", "answer"), UNHEARD)
@pytest.mark.parametrize("code", ["cpu.machine_check", OFTEN, "cpu.lockup.hard", "cpu.lockup.soft"])
def test_silence_of_a_log_that_nobody_reads_is_no_good_news(
    code: str, log: SourceState | None, answer: RuleResult
) -> None:
    assert PaperCpus(log=log).ask(code) == answer


def test_counts_alone_can_tell_that_there_was_no_machine_check() -> None:
    assert PaperCpus(log=None, cores=counting(0, 0)).ask("cpu.machine_check") is OK


def test_a_node_whose_machine_nobody_reads_is_judged_by_the_rest() -> None:
    paper = PaperCpus()
    snapshot = replace(paper.snapshot(), machine=None)
    past = remember_cpus(CpuPast(), LogPast(), snapshot, paper.settings, paper.now)
    view = view_cpus(past, snapshot, paper.settings, 0)
    judged = {rule.code: rule.judge(view) for rule in CPU_RULES if rule.source == "cores"}
    assert judged.pop("cpu.machine_check") is OK, "the log says so"
    assert {type(answer) for answer in judged.values()} == {RuleNotApplicable}


# --- the rows -----------------------------------------------------------------------------------------------


def test_a_declared_device_has_every_rule_of_a_node_but_one() -> None:
    assert {rule.code for rule in CPU_RULES} - {rule.code for rule in DECLARED_CPU_RULES} == {"cpu.smt"}
    only = {rule.code for rule in DECLARED_CPU_RULES} - {rule.code for rule in CPU_RULES}
    assert only == {"cpu.missing", "cpu.numa", "cpu.shared_core"}


@pytest.mark.parametrize("code", ROWS)
def test_every_row_is_complete(code: str) -> None:
    row = ROWS[code]
    assert all([row.threshold, row.why, row.advice, row.try_it])
    assert row.source in {"cpus", "throttle", "cores", "kmsg"}
    assert bool(row.reads) == (row.source in {"cpus", "throttle"}), "the others wake by themselves"
    assert row.judge.__doc__
    assert "Source:" in row.judge.__doc__


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("cpu.machine_check", LogCode.MACHINE_CHECK),
        (OFTEN, LogCode.MACHINE_CHECK_CORRECTED),
        ("cpu.lockup.hard", LogCode.HARD_LOCKUP),
        ("cpu.lockup.soft", LogCode.SOFT_LOCKUP),
    ],
)
def test_the_line_to_try_it_with_is_one_that_is_heard(code: str, told: LogCode) -> None:
    line = parse(ROWS[code].try_it.partition(">")[2].partition("'")[0])
    assert line is not None
    assert (line.code, line.place) == (told, "cpu1")


def test_a_look_at_256_cpus_in_which_nothing_changed_makes_nothing_anew() -> None:
    paper = PaperCpus(cores=tuple(core_sample(cpu, core=cpu % 128, checks=0) for cpu in range(256)))
    paper.tell(LogCode.MACHINE_CHECK_CORRECTED, "cpu0")
    paper.look()
    before = paper.past
    paper.cores = tuple(core_sample(cpu, core=cpu % 128, checks=0) for cpu in range(256))
    paper.look(1)
    assert paper.past.cores is before.cores
    assert paper.past.told is before.told
