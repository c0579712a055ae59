"""Each rule: when it is content, when it is not, at which number that changes, and when it cannot tell."""

from dataclasses import replace
from typing import Final

import pytest
from paper import ABSENT, EIO, NO_LIMIT, group_sample, hugetlb_sample, node_sample, pool_sample

from agent.health.catalogue import Rule, unreadable_of
from agent.health.host.catalogue import ALL_RULES, wakes
from agent.health.host.cpu_view import CpuView
from agent.health.host.cpus import CPU_RULES, cpu_throttled_core
from agent.health.host.group_view import GroupView
from agent.health.host.groups import GROUP_RULES, hugetlb_limit_hit
from agent.health.host.hugepages import POOL_RULES
from agent.health.host.pool_view import PoolView
from agent.health.rules import (
    FINE,
    Answer,
    Growth,
    Inapplicable,
    Unevaluated,
    Unreadable,
)
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Reading
from agent.model.time import NS
from agent.model.wake import Field, Wake

MIB: Final = 1 << 20
CPU: Final = CpuView(
    node=node_sample(),
    online=0b1111,
    expected=0b1111,
    configured=False,
    throttled_core=Growth(0, 60.0),
    throttled_package=Growth(0, 60.0),
    throttle_events=10,
    throttle_window_s=60,
)


def pool(nr: Reading, surplus: Reading = 0, expected: Reading = 10, *, configured: bool = False) -> PoolView:
    return PoolView(pool_sample(nr, surplus), 2048, expected, configured)


def hit(
    *hits: int, limit: Reading = NO_LIMIT, rsvd: Reading = NO_LIMIT, pod: Reading = NO_LIMIT
) -> GroupView:
    """A container with as many page sizes as there are counts of hits."""
    sizes = (2048, 1 << 20)[: len(hits)]
    of_pod = [hugetlb_sample(0, size_kib=kib, limit=pod) for kib in sizes]
    own = [hugetlb_sample(0, size_kib=kib, limit=limit, rsvd=rsvd) for kib in sizes]
    return GroupView(group_sample(2, *own), group_sample(1, *of_pod, container=""), hits)


def core(events: Reading, span_s: float = 60.0) -> CpuView:
    return CPU._replace(throttled_core=Growth(events, span_s))


def package(events: Reading, span_s: float = 60.0) -> CpuView:
    return CPU._replace(throttled_package=Growth(events, span_s))


def bad(code: str, severity: Severity, evidence: str) -> Finding:
    return Finding(code, severity, evidence)


SHRUNK: Final = "mem.hugepages.pool_shrunk"
CASES: Final[list[tuple[str, object, Answer]]] = [
    # --- cpu.offline
    ("cpu.offline", CPU, FINE),
    ("cpu.offline", CPU._replace(online=0b11111), FINE),
    ("cpu.offline", CPU._replace(expected=0, online=0b1), FINE),
    ("cpu.offline", CPU._replace(online=0b1101),
     bad("cpu.offline", Severity.UNHEALTHY, "CPU 1 offline, online at start: 0-3")),
    ("cpu.offline", CPU._replace(online=0b0001, configured=True),
     bad("cpu.offline", Severity.UNHEALTHY, "CPUs 1-3 offline, configured: 0-3")),
    ("cpu.offline", CPU._replace(online=EIO), Unreadable("cpu/online", EIO)),
    ("cpu.offline", CPU._replace(online=ABSENT), Unreadable("cpu/online", ABSENT)),
    ("cpu.offline", CPU._replace(node=node_sample(3, ABSENT), expected=0),
     Unreadable("node3/cpulist", ABSENT)),
    # --- cpu.throttled.*
    ("cpu.throttled.core", core(0), FINE),
    ("cpu.throttled.core", core(9), FINE),
    ("cpu.throttled.core", core(10),
     bad("cpu.throttled.core", Severity.DEGRADED, "at least 10 core thermal-throttle events in 60 s")),
    ("cpu.throttled.core", core(10, 0.5),
     bad("cpu.throttled.core", Severity.DEGRADED, "at least 10 core thermal-throttle events in 60 s")),
    ("cpu.throttled.core", core(9, 59.9), Unevaluated("needs 60 s of history")),
    ("cpu.throttled.core", core(ABSENT, 0.0), Inapplicable("no thermal_throttle counters")),
    ("cpu.throttled.core", core(EIO, 0.0), Unreadable("core_throttle_count", EIO)),
    ("cpu.throttled.package", package(9), FINE),
    ("cpu.throttled.package", package(10_000),
     bad("cpu.throttled.package", Severity.DEGRADED, "at least 10 package thermal-throttle events in 60 s")),
    ("cpu.throttled.package", package(0, 0.0), Unevaluated("needs 60 s of history")),
    ("cpu.throttled.package", package(ABSENT, 0.0), Inapplicable("no thermal_throttle counters")),
    ("cpu.throttled.package", package(EIO, 0.0), Unreadable("package_throttle_count", EIO)),
    # --- mem.hugepages.pool_shrunk
    (SHRUNK, pool(10), FINE),
    (SHRUNK, pool(11), FINE),
    (SHRUNK, pool(9), bad(SHRUNK, Severity.UNHEALTHY, "9 pages of 2mi, 10 at start")),
    (SHRUNK, pool(0, configured=True), bad(SHRUNK, Severity.UNHEALTHY, "0 pages of 2mi, 10 configured")),
    (SHRUNK, pool(12, 2), FINE),
    (SHRUNK, pool(12, 3), bad(SHRUNK, Severity.UNHEALTHY, "9 pages of 2mi, 10 at start")),
    (SHRUNK, pool(10, ABSENT), FINE),
    (SHRUNK, pool(EIO), Unreadable("nr_hugepages", EIO)),
    (SHRUNK, pool(10, EIO), Unreadable("surplus_hugepages", EIO)),
    (SHRUNK, pool(ABSENT, expected=ABSENT), Unreadable("nr_hugepages", ABSENT)),
    (SHRUNK, pool(0, expected=0), FINE),
    (SHRUNK, PoolView(None, 1 << 20, 4, configured=True),
     bad(SHRUNK, Severity.UNHEALTHY, "no pool of 1gi pages, 4 configured")),
    (SHRUNK, PoolView(None, 1 << 20, 0, configured=True), FINE),
    # --- cgroup.hugetlb.max_hit
    ("cgroup.hugetlb.max_hit", hit(0, 0), FINE),
    ("cgroup.hugetlb.max_hit", hit(1, limit=8 * MIB),
     bad("cgroup.hugetlb.max_hit", Severity.INFO, "2mi pages hit the limit (limit 8 MiB)")),
    ("cgroup.hugetlb.max_hit", hit(7, 2, limit=8 * MIB, rsvd=6 * MIB),
     bad("cgroup.hugetlb.max_hit", Severity.INFO,
         "2mi pages hit the limit (limit 6 MiB), 1gi pages hit the limit (limit 6 MiB)")),
    ("cgroup.hugetlb.max_hit", hit(0, 3, pod=1024 * MIB),
     bad("cgroup.hugetlb.max_hit", Severity.INFO, "1gi pages hit the limit (limit 1 GiB)")),
    ("cgroup.hugetlb.max_hit", hit(1, limit=0),
     bad("cgroup.hugetlb.max_hit", Severity.INFO, "2mi pages hit the limit (limit 0 B)")),
    ("cgroup.hugetlb.max_hit", hit(1, limit=ABSENT, rsvd=EIO),
     bad("cgroup.hugetlb.max_hit", Severity.INFO, "2mi pages hit the limit")),
    ("cgroup.hugetlb.max_hit", hit(0, 1)._replace(pod=group_sample(1, hugetlb_sample(), container="")),
     bad("cgroup.hugetlb.max_hit", Severity.INFO, "1gi pages hit the limit")),
    ("cgroup.hugetlb.max_hit", hit(1)._replace(pod=None),
     bad("cgroup.hugetlb.max_hit", Severity.INFO, "2mi pages hit the limit")),
]  # fmt: skip
ROWS: Final = {rule.code: rule for rule in ALL_RULES}


@pytest.mark.parametrize(("code", "view", "answer"), CASES)
def test_a_view_has_this_answer(code: str, view: object, answer: Answer) -> None:
    assert ROWS[code].judge(view) == answer


@pytest.mark.parametrize("code", ROWS)
def test_every_rule_is_shown_content_and_shown_bad(code: str) -> None:
    answers = [answer for named, _, answer in CASES if named == code]
    assert FINE in answers
    assert [a.severity for a in answers if isinstance(a, Finding)], "nothing above makes it raise"


@pytest.mark.parametrize("code", [rule.code for rule in ALL_RULES if rule.counter])
def test_every_rate_is_shown_without_history_and_every_one_without_counters(code: str) -> None:
    kinds = {type(answer) for named, _, answer in CASES if named == code}
    assert kinds >= {Unevaluated, Inapplicable, Unreadable}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1025, "1025 B"), (3 * MIB, "3 MiB"), (5 << 30, "5 GiB")],
)
def test_a_limit_is_told_in_the_largest_unit_that_keeps_it_whole(size: int, text: str) -> None:
    answer = hugetlb_limit_hit(hit(1, limit=size))
    assert isinstance(answer, Finding)
    assert answer.evidence == f"2mi pages hit the limit (limit {text})"


@pytest.mark.parametrize("events", [10, 11, 500])
def test_the_evidence_of_a_rate_does_not_move_with_the_rate(events: int) -> None:
    answers = {cpu_throttled_core(core(n)) for n in (10, events)}
    assert len(answers) == 1


# --- the catalogue ------------------------------------------------------------------------------------------


def test_codes_are_unique_and_dotted() -> None:
    assert len(ROWS) == len(ALL_RULES)
    assert all(code.count(".") >= 1 and code == code.lower() for code in ROWS)


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.code)
def test_every_row_is_complete(rule: Rule) -> None:
    assert rule.severity in {Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY}
    assert rule.blame in Blame
    assert rule.source in {"cpus", "throttle", "hugepages", "cgroups"}
    assert rule.reads
    assert all([rule.threshold, rule.why, rule.advice])
    assert rule.raise_after >= 1
    assert rule.clear_after >= 1
    assert rule.judge.__doc__
    assert "Source:" in rule.judge.__doc__


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.code)
def test_a_finding_has_the_code_and_the_severity_of_its_row(rule: Rule) -> None:
    found = [answer for code, _, answer in CASES if code == rule.code and isinstance(answer, Finding)]
    assert {(finding.code, finding.severity) for finding in found} == {(rule.code, rule.severity)}


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.code)
def test_what_cannot_be_read_is_nobodys_fault_but_ours(rule: Rule) -> None:
    row = unreadable_of(replace(rule, raise_after=5, probation_ns=NS))
    assert (row.code, row.severity, row.blame) == (f"{rule.code}.unreadable", Severity.UNKNOWN, Blame.AGENT)
    assert (row.raise_after, row.probation_ns, row.source) == (1, 0, rule.source)
    assert row.advice


def test_each_kind_of_subject_has_rules() -> None:
    assert all([CPU_RULES, POOL_RULES, GROUP_RULES])


def test_the_core_is_woken_for_exactly_what_the_rules_read() -> None:
    found = wakes(10, 60)
    fields = [wake.field for wake in found]
    assert sorted(fields, key=str) == sorted({f for rule in ALL_RULES for f in rule.reads}, key=str)
    assert Field.POOL_FREE not in fields, "it moves all the time"


def test_counters_wake_from_the_threshold_of_their_rule_on() -> None:
    found = {wake.field: wake for wake in wakes(7, 30)}
    assert found[Field.NODE_THROTTLE_CORE] == Wake(Field.NODE_THROTTLE_CORE, 7, 30 * NS)
    assert found[Field.NODE_THROTTLE_PACKAGE] == Wake(Field.NODE_THROTTLE_PACKAGE, 7, 30 * NS)
    assert found[Field.POOL_NR] == Wake(Field.POOL_NR)
