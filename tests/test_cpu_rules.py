"""CPU rules: limits, missing readings, resets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import pytest
from paper import ABSENT, EIO, ENODEV, node_sample, without_since

from agent.health.host.cpu.rules import CPU_RULES, DECLARED_CPU_RULES
from agent.health.host.cpu.state import (
    CpuRuleInput,
    CpuRuleState,
    ExpectedCpus,
    declared_cpu_rule_input,
    next_cpu_state,
    numa_cpu_rule_input,
)
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState
from agent.health.kernel_log.parse import parse_host_line
from agent.health.rules import (
    OK,
    CounterGrowth,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
)
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import DeclaredCpuDevice, DeclaredFile, DriverDevice
from agent.model.health import Finding, Severity
from agent.model.machine_samples import LogSample, MachineSample, PerCpuSample, PressureSample
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.model.settings import EngineSettings, HostLimits
from agent.model.snapshot import CpuSetsSample, CpuThrottleSample, NumaCpuSample, Snapshot
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
) -> PerCpuSample:
    """Return the sample of one CPU of which nothing can be read."""
    return PerCpuSample(cpu, core, ABSENT, max_khz, cap_khz, checks)


def capped_cpu(cpu: int, cap_khz: Reading, max_khz: Reading = 3_500_000) -> PerCpuSample:
    return core_sample(cpu, cap_khz=cap_khz, max_khz=max_khz)


def cpus_with_checks(*checks: Reading) -> tuple[PerCpuSample, ...]:
    """Return CPUs from 0 on with these counts of machine checks."""
    return tuple(core_sample(cpu, checks=count) for cpu, count in enumerate(checks))


@dataclass
class PaperCpus:
    """Simulated CPUs: attributes hold the readings, and each view updates the state."""

    settings: EngineSettings = field(default_factory=lambda: EngineSettings("node-a"))
    cpus: CpuSetsSample = field(default_factory=lambda: cpu_sets("0-3"))
    nodes: tuple[NumaCpuSample, ...] = (node_sample(cpus=0b1111),)
    throttle: tuple[CpuThrottleSample, ...] = ()
    cores: tuple[PerCpuSample, ...] = ()
    smt: Reading = ABSENT
    declared: DriverDevice | None = None
    log: SourceState | None = SourceState.OK
    facts: Mapping[tuple[KernelLogCode, str], KernelLogFact] = field(default_factory=dict)
    now_s: float = 1_000 * DAY
    past: CpuRuleState = field(default_factory=CpuRuleState)

    @property
    def now(self) -> Instant:
        return Instant(int(self.now_s * NS), self.now_s)

    def write_lines(
        self, code: KernelLogCode, location: str, times: int = 1, *, first_s: float | None = None
    ) -> None:
        """Add lines of one kind to the log, the newest now; the first now too, or at ``first_s``."""
        known = self.facts.get((code, location))
        first = known.first if known else self.now if first_s is None else Instant(int(first_s * NS), first_s)
        self.facts = {
            **self.facts,
            (code, location): KernelLogFact(code, location, times, first, self.now, "a line"),
        }

    def declare(self, cpus: str, *, numa: int | None = None, isolated: bool = False) -> None:
        what = DeclaredCpuDevice(parse_cpus(cpus), numa, exclusive=False, isolated=isolated)
        self.declared = DriverDevice("cpu.example", "node-a", "cpuset-1", what, 0)

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

    def view(self, after_s: float = 0) -> CpuRuleInput:
        """Return the view of node 0, or of the declared device."""
        self.now_s += after_s
        snapshot = self.snapshot()
        self.past = next_cpu_state(self.past, KernelLogState(self.facts), snapshot, self.settings, self.now)
        if self.declared is None:
            return numa_cpu_rule_input(self.past, snapshot, self.settings, 0)
        return declared_cpu_rule_input(self.past, snapshot, self.settings, self.declared)

    def result(self, code: str, after_s: float = 0) -> RuleResult:
        """Return the result of a rule."""
        return without_since(ROWS[code].evaluate(self.view(after_s)))


def cpu_sets(online: str, present: str = "0-3", isolated: str = "") -> CpuSetsSample:
    return CpuSetsSample(parse_cpus(present), parse_cpus(online), parse_cpus(isolated))


def bad(code: str, evidence: str) -> Finding:
    return Finding(code, ROWS[code].severity, evidence)


# --- rules on a view --------------------------------------------------------------------------------------

VIEW: Final = (
    PaperCpus()
    .view()
    ._replace(throttled_core=CounterGrowth(0, 60.0), throttled_package=CounterGrowth(0, 60.0))
)


def core(events: Reading, span_s: float = 60.0) -> CpuRuleInput:
    return VIEW._replace(throttled_core=CounterGrowth(events, span_s))


def package(events: Reading, span_s: float = 60.0) -> CpuRuleInput:
    return VIEW._replace(throttled_package=CounterGrowth(events, span_s))


def offline_finding(evidence: str, files: str) -> Finding:
    advice = f"write 1 to /sys/devices/system/cpu/{files}; if that fails, check for machine checks"
    return Finding("cpu.offline", Severity.UNHEALTHY, evidence, advice)


CASES: Final[list[tuple[str, CpuRuleInput, RuleResult]]] = [
    ("cpu.offline", VIEW, OK),
    ("cpu.offline", VIEW._replace(online=0b11111), OK),
    ("cpu.offline", VIEW._replace(expected_online=ExpectedCpus(0, "configured"), online=0b1), OK),
    ("cpu.offline", VIEW._replace(online=0b1101),
     offline_finding("CPU 1 offline, online at start: 0-3", "cpu1/online")),
    ("cpu.offline", VIEW._replace(online=0b0001, expected_online=ExpectedCpus(0b1111, "configured")),
     offline_finding("CPUs 1-3 offline, configured: 0-3", "cpu<N>/online of CPUs 1-3")),
    ("cpu.offline", VIEW._replace(online=EIO), RuleInputUnreadable("cpu/online", EIO)),
    ("cpu.offline", VIEW._replace(online=ABSENT), RuleInputUnreadable("cpu/online", ABSENT)),
    ("cpu.offline", VIEW._replace(node=node_sample(3, ABSENT)), RuleInputUnreadable("node3/cpulist", ABSENT)),
    ("cpu.throttled.core", core(0), OK),
    ("cpu.throttled.core", core(9), OK),
    ("cpu.throttled.core", core(10),
     bad("cpu.throttled.core", "at least 10 core thermal-throttle events in 60 s")),
    ("cpu.throttled.core", core(10, 0.5),
     bad("cpu.throttled.core", "at least 10 core thermal-throttle events in 60 s")),
    ("cpu.throttled.core", core(9, 59.9), RuleInconclusive("needs 1 min of history")),
    ("cpu.throttled.core", core(ABSENT, 0.0),
     RuleNotApplicable("the CPUs have no thermal_throttle counters")),
    ("cpu.throttled.core", core(EIO, 0.0), RuleInputUnreadable("core_throttle_count", EIO)),
    ("cpu.throttled.package", package(9), OK),
    ("cpu.throttled.package", package(10_000),
     bad("cpu.throttled.package", "at least 10 package thermal-throttle events in 60 s")),
    ("cpu.throttled.package", package(0, 0.0), RuleInconclusive("needs 1 min of history")),
    ("cpu.throttled.package", package(ABSENT, 0.0),
     RuleNotApplicable("the CPUs have no thermal_throttle counters")),
    ("cpu.throttled.package", package(EIO, 0.0), RuleInputUnreadable("package_throttle_count", EIO)),
    ("cpu.missing", VIEW, OK),
    ("cpu.missing", VIEW._replace(present=0b0111), bad("cpu.missing", "CPU 3 does not exist, declared: 0-3")),
    ("cpu.missing", VIEW._replace(present=0b0001),
     bad("cpu.missing", "CPUs 1-3 do not exist, declared: 0-3")),
    ("cpu.missing", VIEW._replace(present=EIO), RuleInputUnreadable("cpu/present", EIO)),
    ("cpu.isolation", VIEW, OK),
    ("cpu.isolation", VIEW._replace(expected_isolated=ExpectedCpus(0b11, "declared"), isolated=0b111), OK),
    ("cpu.isolation", VIEW._replace(expected_isolated=ExpectedCpus(0b11, "declared"), isolated=0b10),
     bad("cpu.isolation", "CPU 0 not isolated, declared: 0-1")),
    ("cpu.isolation", VIEW._replace(isolated=EIO), RuleInputUnreadable("cpu/isolated", EIO)),
    ("cpu.isolation", VIEW._replace(isolated=ABSENT),
     RuleNotApplicable("the kernel does not report which CPUs are isolated")),
    ("cpu.smt", VIEW._replace(smt=1, smt_start=1), OK),
    ("cpu.smt", VIEW._replace(smt=0, smt_start=1), bad("cpu.smt", "SMT off, on at start")),
    ("cpu.smt", VIEW._replace(smt=1, smt_start=0), bad("cpu.smt", "SMT on, off at start")),
    ("cpu.smt", VIEW._replace(smt=EIO, smt_start=1), RuleInputUnreadable("smt/active", EIO)),
    ("cpu.smt", VIEW, RuleNotApplicable("the kernel does not report the state of SMT")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_view_has_result(code: str, view: CpuRuleInput, answer: RuleResult) -> None:
    assert ROWS[code].evaluate(view) == answer


@pytest.mark.parametrize("code", [code for code, rule in ROWS.items() if rule.counts_growth])
def test_every_rate_has_cases_without_window_and_counters(code: str) -> None:
    kinds = {type(answer) for named, _, answer in CASES if named == code}
    assert kinds >= {RuleInconclusive, RuleNotApplicable, RuleInputUnreadable}


@pytest.mark.parametrize("events", [10, 11, 500])
def test_evidence_of_a_rate_is_constant_above_the_limit(events: int) -> None:
    judge = ROWS["cpu.throttled.core"].evaluate
    assert len({judge(core(n)) for n in (10, events)}) == 1


# --- which CPUs there are ---------------------------------------------------------------------------------


def test_virtual_machine_has_no_cpu_findings() -> None:
    paper = PaperCpus()
    paper.view()
    view = paper.view(60)
    answers = {rule.code: rule.evaluate(view) for rule in CPU_RULES}
    assert not [answer for answer in answers.values() if not isinstance(answer, RuleNotApplicable | None)]
    assert {code for code, answer in answers.items() if answer is OK} == {
        "cpu.offline", "cpu.isolation", "cpu.machine_check", "cpu.machine_check.corrected",
        "cpu.lockup.hard", "cpu.lockup.soft",
    }  # fmt: skip


def test_declared_cpus_must_be_online_regardless_of_the_start() -> None:
    paper = PaperCpus(cpus=cpu_sets("0-1"))
    paper.declare("1-2")
    assert paper.result("cpu.offline") == offline_finding("CPU 2 offline, declared: 1-2", "cpu2/online")


def test_nonexistent_declared_cpu_has_one_finding() -> None:
    paper = PaperCpus(cpus=cpu_sets("0-3", isolated="2-3"))
    paper.declare("2-5", isolated=True)
    assert paper.result("cpu.isolation") is OK
    assert paper.result("cpu.missing") == bad("cpu.missing", "CPUs 4-5 do not exist, declared: 2-5")
    assert paper.result("cpu.offline") is OK
    paper.cpus = paper.cpus._replace(present=EIO)
    assert paper.result("cpu.offline") == offline_finding(
        "CPUs 4-5 offline, declared: 2-5", "cpu<N>/online of CPUs 4-5"
    )


@pytest.mark.parametrize(
    ("numa", "answer"),
    [
        (None, RuleNotApplicable("no NUMA node is declared")),
        (1, OK),
        (0, bad("cpu.numa", "CPU 2 on NUMA node 1, declared: NUMA node 0")),
        (2, bad("cpu.numa", "CPU 1 on NUMA node 0, CPU 2 on NUMA node 1, declared: NUMA node 2")),
        (3, bad("cpu.numa", "NUMA node 3 does not exist, declared: NUMA node 3")),
        (4, RuleInputUnreadable("node4/cpulist", EIO)),
    ],
)
def test_declared_cpus_on_another_numa_node_are_found(numa: int | None, answer: RuleResult) -> None:
    paper = PaperCpus(
        nodes=(node_sample(0, 0b0011), node_sample(1, 0b1100), node_sample(2, 0), node_sample(4, EIO))
    )
    paper.declare({1: "2-3", 4: "8"}.get(numa or 0, "1-2"), numa=numa)
    assert paper.result("cpu.numa") == answer


def test_cpu_numa_without_node_lists_is_unreadable() -> None:
    paper = PaperCpus(nodes=())
    paper.declare("0", numa=0)
    assert paper.result("cpu.numa") == RuleInputUnreadable("node0/cpulist", Missing(Absence.ABSENT))


def test_cpu_never_online_is_not_on_a_wrong_node() -> None:
    paper = PaperCpus(nodes=(node_sample(0, 0b0011), node_sample(1, 0b0100)))
    paper.declare("2-3", numa=1)
    assert paper.result("cpu.numa") is OK


def test_cpu_isolated_at_start_must_stay_isolated() -> None:
    paper = PaperCpus(cpus=cpu_sets("0-3", isolated="1-2"))
    assert paper.result("cpu.isolation") is OK
    paper.cpus = cpu_sets("0-3", isolated="2-3")
    assert paper.result("cpu.isolation") == bad("cpu.isolation", "CPU 1 not isolated, isolated at start: 1-2")


def test_isolation_affects_only_the_device_with_the_cpu() -> None:
    paper = PaperCpus(
        cpus=cpu_sets("0-3", isolated="3"), nodes=(node_sample(0, 0b0011), node_sample(1, 0b1100))
    )
    paper.view()
    paper.cpus = cpu_sets("0-3")
    assert paper.result("cpu.isolation") is OK


def test_declared_isolation_counts_from_the_first_evaluation() -> None:
    paper = PaperCpus()
    paper.declare("1-2", isolated=True)
    assert paper.result("cpu.isolation") == bad("cpu.isolation", "CPUs 1-2 not isolated, declared: 1-2")
    paper.declare("1-2")
    assert paper.result("cpu.isolation") is OK


def test_smt_is_compared_with_its_first_reading() -> None:
    paper = PaperCpus(smt=EIO)
    paper.view()
    paper.smt = 1
    assert paper.result("cpu.smt") is OK
    paper.smt = 0
    assert paper.result("cpu.smt") == bad("cpu.smt", "SMT off, on at start")


# --- shared cores -----------------------------------------------------------------------------------------

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
def test_whole_cores_are_not_shared(cpus: str, answer: RuleResult) -> None:
    paper = PaperCpus(cores=PAIRS)
    paper.declare(cpus)
    assert paper.result("cpu.shared_core") == answer


def test_offline_sibling_does_not_share_a_core() -> None:
    paper = PaperCpus(cores=PAIRS, cpus=cpu_sets("0-1"))
    paper.declare("0-1")
    assert paper.result("cpu.shared_core") is OK
    paper.cpus = cpu_sets("1-3")
    assert paper.result("cpu.shared_core") == bad("cpu.shared_core", "CPU 3 shares a core with 1")


def test_siblings_share_a_core_if_online_is_unreadable() -> None:
    paper = PaperCpus(cores=PAIRS)
    paper.declare("0")
    paper.view()
    paper.cpus = paper.cpus._replace(online=EIO)
    assert paper.result("cpu.shared_core") == bad("cpu.shared_core", "CPU 2 shares a core with 0")


def test_unknown_cores_are_not_applicable() -> None:
    paper = PaperCpus(cores=(core_sample(0), core_sample(1, core=EIO), core_sample(2, core=2)))
    paper.declare("0")
    reason = "the kernel does not report which CPUs share cores"
    assert paper.result("cpu.shared_core") == RuleNotApplicable(reason)
    paper.declare("1-2")
    assert paper.result("cpu.shared_core") == RuleInputUnreadable("cpu1/topology/core_cpus_list", EIO)


# --- heat -------------------------------------------------------------------------------------------------


def heat(*counts: tuple[Reading, Reading]) -> tuple[CpuThrottleSample, ...]:
    return tuple(CpuThrottleSample(cpu, *count) for cpu, count in enumerate(counts))


def test_declared_cpus_count_only_their_own_throttling() -> None:
    paper = PaperCpus(throttle=heat((0, 0), (0, 0), (0, 0)))
    paper.declare("1-2")
    paper.view()
    paper.throttle = heat((100, 100), (5, 9), (4, 9))
    view = paper.view(50)
    assert (view.throttled_core, view.throttled_package) == (CounterGrowth(9, 50.0), CounterGrowth(9, 50.0))
    paper.throttle = heat((100, 100), (5, 9), (5, 9))
    evidence = "at least 10 core thermal-throttle events in 60 s"
    assert paper.result("cpu.throttled.core", 1) == bad("cpu.throttled.core", evidence)
    assert paper.view().throttled_package.events == 9, "all CPUs count the same events of a package"


def test_repeated_evaluation_of_a_reading_adds_one_point() -> None:
    paper = PaperCpus(throttle=heat((0, 0)))
    paper.declare("0")
    assert paper.view().throttled_core == paper.view().throttled_core == CounterGrowth(0, 0.0)
    (watched,) = paper.past.declared_throttle.values()
    assert len(watched.throttled.core.window) == 1


def test_device_redeclared_with_other_cpus_restarts_its_window() -> None:
    paper = PaperCpus(throttle=heat((0, 0), (500, 500)))
    paper.declare("0")
    paper.view()
    paper.declare("1")
    assert paper.result("cpu.throttled.core", 60) == RuleInconclusive("needs 1 min of history")


def test_removed_declaration_drops_its_counters() -> None:
    paper = PaperCpus(throttle=heat((0, 0)))
    paper.declare("0")
    paper.view()
    paper.declared = None
    paper.view()
    assert not paper.past.declared_throttle


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ((), RuleNotApplicable("the CPUs have no thermal_throttle counters")),
        (((ABSENT, 0), (ABSENT, 0)), RuleNotApplicable("the CPUs have no thermal_throttle counters")),
        (((0, 0), (EIO, 0)), RuleInputUnreadable("core_throttle_count", EIO)),
        (((0, 0), (ABSENT, 0)), RuleInconclusive("needs 1 min of history")),
    ],
)
def test_missing_throttle_counters_are_not_zero(
    counts: tuple[tuple[Reading, Reading], ...], answer: RuleResult
) -> None:
    paper = PaperCpus(throttle=heat(*counts))
    paper.declare("0-1")
    assert paper.result("cpu.throttled.core") == answer


# --- caps -------------------------------------------------------------------------------------------------


def test_lowered_cap_is_reported_with_its_start_value() -> None:
    paper = PaperCpus(cores=tuple(capped_cpu(cpu, 3_500_000) for cpu in range(4)))
    assert paper.result("cpu.capped") is OK
    paper.cores = tuple(capped_cpu(cpu, 3_499_999 if cpu else 3_500_000) for cpu in range(4))
    assert paper.result("cpu.capped") == bad(
        "cpu.capped", "CPUs 1-3 capped at 3.499999 GHz, 3.5 GHz at start"
    )
    paper.cores = tuple(capped_cpu(cpu, 2_100_000) for cpu in range(4))
    assert paper.result("cpu.capped") == bad("cpu.capped", "CPUs 0-3 capped at 2.1 GHz, 3.5 GHz at start")
    paper.cores = tuple(capped_cpu(cpu, 3_500_000) for cpu in range(4))
    assert paper.result("cpu.capped") is OK


def test_cap_from_before_the_start_is_info() -> None:
    paper = PaperCpus(cores=(capped_cpu(0, 2_000_000), capped_cpu(1, 3_500_000)))
    evidence = "CPU 0 capped at 2 GHz, 3.5 GHz possible"
    assert paper.result("cpu.capped") == Finding("cpu.capped", Severity.INFO, evidence)
    paper.cores = (capped_cpu(0, 2_200_000), capped_cpu(1, 3_500_000))
    evidence = "CPU 0 capped at 2.2 GHz, 3.5 GHz possible"
    assert paper.result("cpu.capped") == Finding("cpu.capped", Severity.INFO, evidence)


def test_lowered_cap_is_reported_before_an_old_cap() -> None:
    paper = PaperCpus(cores=(capped_cpu(0, 2_000_000), capped_cpu(1, 3_500_000)))
    paper.view()
    paper.cores = (capped_cpu(0, 2_000_000), capped_cpu(1, 3_000_000))
    assert paper.result("cpu.capped") == bad("cpu.capped", "CPU 1 capped at 3 GHz, 3.5 GHz at start")


def test_many_caps_are_summarized() -> None:
    paper = PaperCpus(
        cores=tuple(capped_cpu(cpu, 3_000_000) for cpu in range(8)),
        nodes=(node_sample(0, 0xFF),),
        cpus=cpu_sets("0-7", "0-7"),
    )
    paper.view()
    paper.cores = tuple(capped_cpu(cpu, 1_000_000 + cpu * 100_000) for cpu in range(8))
    answer = paper.result("cpu.capped")
    assert isinstance(answer, Finding)
    assert answer.evidence == (
        "CPU 0 capped at 1 GHz, 3 GHz at start; CPU 1 capped at 1.1 GHz, 3 GHz at start; "
        "CPU 2 capped at 1.2 GHz, 3 GHz at start; and 5 more"
    )


def test_long_list_of_caps_has_the_lowest() -> None:
    paper = PaperCpus(
        cores=tuple(capped_cpu(cpu, 3_000_000) for cpu in range(8)),
        nodes=(node_sample(0, 0xFF),),
        cpus=cpu_sets("0-7", "0-7"),
    )
    paper.view()
    paper.cores = tuple(capped_cpu(cpu, 2_000_000 - cpu * 100_000) for cpu in range(8))
    answer = paper.result("cpu.capped")
    assert isinstance(answer, Finding)
    assert answer.evidence.startswith("CPU 5 capped at 1.5 GHz, 3 GHz at start; CPU 6 capped at 1.4 GHz")
    assert answer.evidence.endswith("CPU 7 capped at 1.3 GHz, 3 GHz at start; and 5 more")


def test_offline_cpu_is_not_capped() -> None:
    paper = PaperCpus(cores=(capped_cpu(0, 3_500_000), capped_cpu(1, 3_500_000)))
    paper.view()
    paper.cores = (capped_cpu(0, 3_500_000), capped_cpu(1, 1_000_000))
    paper.cpus = cpu_sets("0,2-3")
    assert paper.result("cpu.capped") is OK


def test_cap_on_another_numa_node_is_not_reported() -> None:
    paper = PaperCpus(
        cores=(capped_cpu(0, 3_500_000), capped_cpu(3, 3_500_000)), nodes=(node_sample(0, 0b11),)
    )
    paper.view()
    paper.cores = (capped_cpu(0, 3_500_000), capped_cpu(3, 1_000_000))
    assert paper.result("cpu.capped") is OK


@pytest.mark.parametrize("gone", [NO_FILE, ENODEV])
def test_unloaded_cpufreq_driver_is_no_cap(gone: Missing) -> None:
    paper = PaperCpus(cores=(capped_cpu(0, 3_500_000),))
    paper.view()
    paper.cores = (capped_cpu(0, gone, gone),)
    assert paper.result("cpu.capped") == RuleNotApplicable("the CPUs have no frequency scaling")


def test_unreadable_cap_is_unknown_unless_another_was_lowered() -> None:
    paper = PaperCpus(cores=(capped_cpu(0, 3_500_000), capped_cpu(1, 3_500_000)))
    paper.view()
    paper.cores = (capped_cpu(0, EIO), capped_cpu(1, 3_500_000))
    assert paper.result("cpu.capped") == RuleInputUnreadable("cpu0/cpufreq/scaling_max_freq", EIO)
    paper.cores = (capped_cpu(0, EIO), capped_cpu(1, 1_000_000))
    assert paper.result("cpu.capped") == bad("cpu.capped", "CPU 1 capped at 1 GHz, 3.5 GHz at start")
    paper.cpus = cpu_sets("1-3")
    paper.cores = (capped_cpu(0, EIO), capped_cpu(1, 3_500_000))
    assert paper.result("cpu.capped") is OK, "the cap of an offline CPU is not read"


# --- machine checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "answer"),
    [
        ((0, 0, 0, 0), OK),
        ((0, 1, 0, 0), bad("cpu.machine_check", "uncorrected machine check on CPU 1 since boot")),
        ((0, 7, 9, 0), bad("cpu.machine_check", "uncorrected machine check on CPUs 1-2 since boot")),
        ((0, 0, 0, 0, 5), OK),  # of another node
        ((1, 1, 1, 1), OK),  # broadcast to all CPUs, a finding of the machine
        ((1, 1, 1, 1, 0, 0, 0, 0), OK),  # a broadcast before the other CPUs were set online
        ((1, 1, 1, 0, 0, 0, 0), bad("cpu.machine_check", "uncorrected machine check on CPUs 0-2 since boot")),
        ((7,), bad("cpu.machine_check", "uncorrected machine check on CPU 0 since boot")),
        ((EIO, EIO), RuleInputUnreadable("MCE of /proc/interrupts", EIO)),
        ((0, EIO), OK),  # an offline CPU has no column
        ((ABSENT, ABSENT), OK),  # without log lines
    ],
)
def test_one_machine_check_since_boot_is_a_finding(counts: tuple[Reading, ...], answer: RuleResult) -> None:
    assert PaperCpus(cores=cpus_with_checks(*counts)).result("cpu.machine_check") == answer


def test_machine_check_is_held_until_the_next_boot() -> None:
    paper = PaperCpus(cores=cpus_with_checks(0, 1))
    found = bad("cpu.machine_check", "uncorrected machine check on CPU 1 since boot")
    assert paper.result("cpu.machine_check") == found
    for lost in (EIO, ABSENT, 0):
        paper.cores = cpus_with_checks(0, lost)
        assert paper.result("cpu.machine_check", DAY) == found
    paper.nodes = (node_sample(cpus=EIO),)
    assert paper.result("cpu.machine_check") == found, "the node had that CPU when it was last readable"


def test_machine_check_in_count_and_log_is_one_finding() -> None:
    paper = PaperCpus(cores=cpus_with_checks(0, 1))
    paper.write_lines(KernelLogCode.MACHINE_CHECK, "cpu1")
    assert paper.result("cpu.machine_check") == bad(
        "cpu.machine_check", "uncorrected machine check on CPU 1 since boot"
    )
    paper.write_lines(KernelLogCode.MACHINE_CHECK, "cpu3")
    assert paper.result("cpu.machine_check") == bad(
        "cpu.machine_check", "uncorrected machine check on CPUs 1,3 since boot"
    )


def test_broadcast_machine_check_is_one_of_the_cpus_in_the_log() -> None:
    paper = PaperCpus(cores=cpus_with_checks(0, 0, 1, 0))
    paper.view()
    paper.cores = cpus_with_checks(1, 1, 2, 1)
    paper.write_lines(KernelLogCode.MACHINE_CHECK, "cpu3")
    assert paper.result("cpu.machine_check") == bad(
        "cpu.machine_check", "uncorrected machine check on CPUs 2-3 since boot"
    )


def test_machine_check_line_counts_after_the_log_becomes_unreadable() -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK, "cpu0")
    paper.view()
    paper.log = SourceState.FAILING
    assert isinstance(paper.result("cpu.machine_check"), Finding)


@pytest.mark.parametrize(
    "location", ["", "cpu", "cpu4", "cpu8192", "cpu99999999999", "cpu1x", "mc0", "cpu-1"]
)
def test_line_about_an_unknown_cpu_is_ignored(location: str) -> None:
    paper = PaperCpus()
    for code in KernelLogCode:
        paper.write_lines(code, location, 1000)
    view = paper.view()
    assert [rule.code for rule in CPU_RULES if isinstance(rule.evaluate(view), Finding)] == []


def test_corrected_machine_checks_are_not_uncorrected() -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu0", 1000)
    assert paper.result("cpu.machine_check") is OK


OFTEN: Final = "cpu.machine_check.corrected"
ENOUGH: Final = bad(OFTEN, "at least 24 corrected machine checks on CPU 2 in 1 d")


@pytest.mark.parametrize(("times", "answer"), [(1, OK), (23, OK), (24, ENOUGH), (10_000, ENOUGH)])
def test_corrected_machine_checks_count_from_the_limit(times: int, answer: RuleResult) -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", times)
    assert paper.result(OFTEN) == answer


def test_limits_follow_the_configuration() -> None:
    limits = HostLimits(correctable_errors=3, correctable_window_s=5400)
    paper = PaperCpus(EngineSettings("node-a", host=limits))
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 2)
    assert paper.result(OFTEN) is OK
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 3)
    assert paper.result(OFTEN) == bad(OFTEN, "at least 3 corrected machine checks on CPU 2 in 90 min")


def test_corrected_machine_checks_of_several_cpus_do_not_add_up() -> None:
    paper = PaperCpus()
    for cpu in range(4):
        paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, f"cpu{cpu}", 23)
    assert paper.result(OFTEN) is OK


def test_corrected_machine_checks_leave_the_window() -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 24)
    paper.view()
    assert paper.result(OFTEN, DAY - 1) == ENOUGH
    assert paper.result(OFTEN, 1) is OK
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 47)
    assert paper.result(OFTEN) is OK
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 48)
    assert paper.result(OFTEN) == ENOUGH


def test_burst_of_corrected_checks_after_a_pause_counts() -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 24)
    assert paper.result(OFTEN) == ENOUGH
    paper.view(20 * 3600)
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 48)
    assert paper.result(OFTEN, 1) == ENOUGH
    assert paper.result(OFTEN, DAY - 10) == ENOUGH
    assert paper.result(OFTEN, 10) is OK


def test_slow_corrected_machine_checks_never_reach_the_limit() -> None:
    paper = PaperCpus()
    for number in range(200):
        paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", number + 1)
        assert paper.result(OFTEN, 2 * 3600) is OK
    for day in range(10):
        paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 200 + 23 * (day + 1))
        assert paper.result(OFTEN, DAY) is OK


def test_window_of_frequent_corrected_checks_is_bounded() -> None:
    paper = PaperCpus(EngineSettings("node-a", host=HostLimits(correctable_window_s=600)))
    for number in range(1800):
        paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", number + 1)
        paper.view(1)
    assert len(paper.past.log_facts.corrected[2]) < 30


def test_old_lines_without_times_do_not_count_for_a_cpu() -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 5_000, first_s=paper.now_s - DAY)
    assert paper.result(OFTEN) is OK
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 5_024)
    assert paper.result(OFTEN, 1) == ENOUGH
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 24, first_s=paper.now_s - DAY + 1)
    assert paper.result(OFTEN) == ENOUGH


def test_restarted_line_count_is_no_growth() -> None:
    paper = PaperCpus()
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 5_000, first_s=paper.now_s - 2 * DAY)
    paper.view()
    paper.facts = {}
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu2", 20)
    assert paper.result(OFTEN, 60) is OK


# --- lockups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_code", "code", "evidence"),
    [
        (KernelLogCode.HARD_LOCKUP, "cpu.lockup.hard", "hard lockup on CPU 3"),
        (KernelLogCode.SOFT_LOCKUP, "cpu.lockup.soft", "soft lockup on CPU 3"),
    ],
)
def test_lockup_is_reported_for_ten_minutes_after_its_last_line(
    log_code: KernelLogCode, code: str, evidence: str
) -> None:
    paper = PaperCpus()
    paper.write_lines(log_code, "cpu3")
    assert paper.result(code) == bad(code, evidence)
    paper.now_s += 9 * MINUTE
    paper.write_lines(log_code, "cpu3", 30)
    assert paper.result(code) == bad(code, evidence)
    assert paper.result(code, 10 * MINUTE - 1) == bad(code, evidence)
    assert paper.result(code, 1) is OK
    other = "cpu.lockup.soft" if code.endswith("hard") else "cpu.lockup.hard"
    paper.write_lines(log_code, "cpu0")
    assert paper.result(other) is OK


# --- results without a verdict ----------------------------------------------------------------------------


UNHEARD: Final[list[tuple[SourceState | None, RuleResult]]] = [
    (None, RuleNotApplicable("no kernel log")),
    (SourceState.ABSENT, RuleNotApplicable("no kernel log")),
    (SourceState.FAILING, RuleNotApplicable("the kernel log cannot be read")),
    (SourceState.STARTING, RuleInconclusive("the kernel log is still being read")),
]


@pytest.mark.parametrize(("log", "answer"), UNHEARD)
@pytest.mark.parametrize("code", ["cpu.machine_check", OFTEN, "cpu.lockup.hard", "cpu.lockup.soft"])
def test_unread_log_does_not_prove_health(code: str, log: SourceState | None, answer: RuleResult) -> None:
    assert PaperCpus(log=log).result(code) == answer


def test_counts_alone_prove_that_there_was_no_machine_check() -> None:
    assert PaperCpus(log=None, cores=cpus_with_checks(0, 0)).result("cpu.machine_check") is OK


def test_node_without_machine_sample_is_evaluated_by_the_rest() -> None:
    paper = PaperCpus()
    snapshot = replace(paper.snapshot(), machine=None)
    past = next_cpu_state(CpuRuleState(), KernelLogState(), snapshot, paper.settings, paper.now)
    view = numa_cpu_rule_input(past, snapshot, paper.settings, 0)
    judged = {rule.code: rule.evaluate(view) for rule in CPU_RULES if rule.source == "cores"}
    assert judged.pop("cpu.machine_check") is OK, "by the log"
    assert {type(answer) for answer in judged.values()} == {RuleNotApplicable}


# --- the rows ---------------------------------------------------------------------------------------------


def test_declared_cpus_have_every_node_rule_but_smt() -> None:
    assert {rule.code for rule in CPU_RULES} - {rule.code for rule in DECLARED_CPU_RULES} == {"cpu.smt"}
    only = {rule.code for rule in DECLARED_CPU_RULES} - {rule.code for rule in CPU_RULES}
    assert only == {"cpu.missing", "cpu.numa", "cpu.shared_core"}


@pytest.mark.parametrize("code", ROWS)
def test_every_row_is_complete(code: str) -> None:
    row = ROWS[code]
    assert all([row.threshold, row.why, row.advice, row.try_it])
    assert row.source in {"cpus", "throttle", "cores", "kmsg"}
    assert bool(row.sampler_reads) == (row.source in {"cpus", "throttle"}), "the others wake by themselves"
    assert row.evaluate.__doc__
    assert "Source:" in row.evaluate.__doc__


@pytest.mark.parametrize(
    ("code", "log_code"),
    [
        ("cpu.machine_check", KernelLogCode.MACHINE_CHECK),
        (OFTEN, KernelLogCode.MACHINE_CHECK_CORRECTED),
        ("cpu.lockup.hard", KernelLogCode.HARD_LOCKUP),
        ("cpu.lockup.soft", KernelLogCode.SOFT_LOCKUP),
    ],
)
def test_try_it_line_matches_its_pattern(code: str, log_code: KernelLogCode) -> None:
    line = parse_host_line(ROWS[code].try_it.partition(">")[2].partition("'")[0])
    assert line is not None
    assert (line.code, line.location) == (log_code, "cpu1")


def test_unchanged_256_cpus_reuse_their_facts() -> None:
    paper = PaperCpus(cores=tuple(core_sample(cpu, core=cpu % 128, checks=0) for cpu in range(256)))
    paper.write_lines(KernelLogCode.MACHINE_CHECK_CORRECTED, "cpu0")
    paper.view()
    before = paper.past
    paper.cores = tuple(core_sample(cpu, core=cpu % 128, checks=0) for cpu in range(256))
    paper.view(1)
    assert paper.past.cpu_facts is before.cpu_facts
    assert paper.past.log_facts is before.log_facts
