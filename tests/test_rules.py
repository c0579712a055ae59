"""Catalog of the host's rules as a whole; the rules are tested by theme."""

from dataclasses import replace
from typing import Final

import pytest

from agent.health.host.cgroup.rules import CGROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES
from agent.health.host.hugepages import POOL_RULES
from agent.health.host.verdicts import ALL_HOST_RULES, sampler_wakes
from agent.health.rules import Rule, unreadable_row
from agent.model.gpu import SamplerField, WakeCondition
from agent.model.health import Blame, Severity
from agent.model.time import NS

SAMPLED: Final = {"cpus", "throttle", "hugepages", "cgroups"}
ROWS: Final = {rule.code: rule for rule in ALL_HOST_RULES}


def test_codes_are_unique_and_dotted() -> None:
    assert len(ROWS) == len(ALL_HOST_RULES)
    assert all(code.count(".") >= 1 and code == code.lower() for code in ROWS)


@pytest.mark.parametrize("rule", ALL_HOST_RULES, ids=lambda rule: rule.code)
def test_every_row_is_complete(rule: Rule) -> None:
    assert rule.severity in {Severity.INFO, Severity.DEGRADED, Severity.UNHEALTHY}
    assert rule.blame in Blame
    assert rule.source in SAMPLED | {"edac", "memory", "cores", "pressure", "pci", "nic", "kmsg"}
    assert bool(rule.sampler_reads) == (rule.source in SAMPLED), "the others wake by themselves"
    assert all([rule.threshold, rule.why, rule.advice])
    assert rule.raise_after >= 1
    assert rule.clear_after >= 1
    assert rule.evaluate.__doc__
    assert "Source:" in rule.evaluate.__doc__


@pytest.mark.parametrize("rule", ALL_HOST_RULES, ids=lambda rule: rule.code)
def test_unreadable_row_blames_the_agent(rule: Rule) -> None:
    row = unreadable_row(replace(rule, raise_after=5, probation_ns=NS))
    assert (row.code, row.severity, row.blame) == (f"{rule.code}.unreadable", Severity.UNKNOWN, Blame.AGENT)
    assert (row.raise_after, row.probation_ns, row.source) == (1, 0, rule.source)
    assert row.advice


def test_every_kind_of_subject_has_rules() -> None:
    assert all([CPU_RULES, POOL_RULES, CGROUP_RULES])


def test_wakes_match_the_fields_that_rules_read() -> None:
    found = sampler_wakes(10, 60)
    fields = [wake.field for wake in found]
    read = {
        f.field if isinstance(f, WakeCondition) else f for rule in ALL_HOST_RULES for f in rule.sampler_reads
    }
    assert sorted(fields, key=str) == sorted(read, key=str)
    assert SamplerField.POOL_FREE not in fields, "it moves all the time"


def test_counters_wake_from_the_threshold_of_their_rule() -> None:
    found = {wake.field: wake for wake in sampler_wakes(7, 30)}
    assert found[SamplerField.NODE_THROTTLE_CORE] == WakeCondition(
        SamplerField.NODE_THROTTLE_CORE, 7, 30 * NS
    )
    assert found[SamplerField.NODE_THROTTLE_PACKAGE] == WakeCondition(
        SamplerField.NODE_THROTTLE_PACKAGE, 7, 30 * NS
    )
    assert found[SamplerField.POOL_NR] == WakeCondition(SamplerField.POOL_NR)
