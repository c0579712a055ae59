"""``[[rules]]``: which rules are off, and their severity, probation and limit, by code and device."""

from dataclasses import replace
from typing import Any, Final

import pytest
from paper import EIO, PaperNode, codes, device_of, node_sample, pool_sample
from paper_gpus import GpuNode

from agent.config.config import Config
from agent.config.tables import parse_rules, rules_to_tables
from agent.engine.step import with_settings
from agent.health.evaluation import RULE_OFF
from agent.health.gpu.rule_input import GpuRuleInput
from agent.health.gpu.rule_state import gpu_rules, gpu_wakes
from agent.health.host.cpu.state import CpuRuleInput
from agent.health.host.memory.rules import MemoryRuleInput
from agent.health.host.verdicts import ALL_HOST_RULES, sampler_wakes
from agent.health.rules import NO_CHANGE, RuleChange, RuleChanges, xid_overrides
from agent.model.gpu import GpuField, SamplerField
from agent.model.health import Health, Severity, XidOverride
from agent.model.settings import EngineSettings, GpuLimits, HostLimits, RuleOverride
from agent.model.time import NS
from agent.node.node_source import engine_settings

CPU: Final = "cpu-node0"
POOL: Final = "hugepages-2mi-node0"
SHRUNK: Final = "mem.hugepages.pool_shrunk"
THROTTLED: Final = "cpu.throttled.core"


def set_rules(node: PaperNode, *rules: RuleOverride) -> None:
    """Change the rules between two steps."""
    node.state = with_settings(node.state, replace(node.state.settings, rules=rules), node.now)


def shrunk_node(*rules: RuleOverride) -> PaperNode:
    """Return a node whose pool has lost two of ten pages."""
    node = PaperNode(EngineSettings("node-a", rules=rules))
    node.pool(pool_sample(10))
    node.next()
    node.pool(pool_sample(8))
    node.next()
    return node


# --- lookup -------------------------------------------------------------------------------------------------


def test_last_matching_entry_decides_each_property_alone() -> None:
    changes = RuleChanges(
        (
            RuleOverride("gpu.*", severity=Severity.INFO, probation_s=5),
            RuleOverride("gpu.ecc.*", "gpu-[01]", severity=Severity.DEGRADED),
            RuleOverride("gpu.ecc.off", off=True),
            RuleOverride("gpu.ecc.off", "gpu-1", off=False),
        )
    )
    assert changes.of("gpu-3", "gpu.lost") == RuleChange(False, Severity.INFO, 5 * NS)
    assert changes.of("gpu-0", "gpu.ecc.off") == RuleChange(True, Severity.DEGRADED, 5 * NS)
    assert changes.of("gpu-1", "gpu.ecc.off") == RuleChange(False, Severity.DEGRADED, 5 * NS)
    assert changes.of("check:gpu-0", "ecc/gpu.ecc.x").severity is Severity.DEGRADED
    assert changes.of("cpu-node0", "cpu.offline") is NO_CHANGE


# --- rules that are off -------------------------------------------------------------------------------------


def test_rule_that_is_off_finds_nothing_and_is_listed() -> None:
    node = shrunk_node(RuleOverride(SHRUNK, off=True))
    report = node.evaluate()
    assert device_of(report, POOL).health is Health.HEALTHY
    listed = [entry for entry in report.not_applicable if entry.code == SHRUNK]
    assert [(entry.device, entry.reason) for entry in listed] == [(POOL, RULE_OFF)]


def test_rule_that_is_off_for_one_device_works_for_others() -> None:
    node = PaperNode(EngineSettings("node-a", rules=(RuleOverride(SHRUNK, "hugepages-1gi-*", off=True),)))
    for size_kib in (2048, 1 << 20):
        node.pool(pool_sample(10, size_kib=size_kib))
    node.next()
    for size_kib in (2048, 1 << 20):
        node.pool(pool_sample(8, size_kib=size_kib))
    report = node.next()
    assert device_of(report, POOL).health is Health.UNHEALTHY
    assert device_of(report, "hugepages-1gi-node0").health is Health.HEALTHY


def test_rule_turned_off_by_a_reload_ends_its_fault_at_once_and_returns() -> None:
    node = shrunk_node()
    assert codes(device_of(node.evaluate(), POOL)) == [SHRUNK]
    set_rules(node, RuleOverride("mem.hugepages.*", off=True))
    assert codes(device_of(node.evaluate(), POOL)) == []
    set_rules(node)
    assert codes(device_of(node.evaluate(), POOL)) == [SHRUNK], "the pages at start are still known"


def test_gpu_rule_that_is_off_has_no_finding_but_latched_faults_stay() -> None:
    node = GpuNode()
    node.state = with_settings(
        node.state, replace(node.settings, rules=(RuleOverride("gpu.recovery_action", off=True),)), node.now
    )
    node.set_readings(0, recovery_action=2)
    node.xid(0, 48)
    assert node.codes() == ["gpu.xid.48"]


def test_latched_fault_that_is_off_returns_when_the_entry_is_removed() -> None:
    node = GpuNode()
    node.set_readings(0, recovery_action=2)
    node.xid(0, 48)
    node.evaluate()
    set_rules(node, RuleOverride("gpu.xid.48", "gpu-0", off=True))
    assert node.codes() == ["gpu.recovery_action"]
    set_rules(node)
    assert "gpu.xid.48" in node.codes()


# --- severity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severity", "health"),
    [
        (Severity.INFO, Health.HEALTHY),
        (Severity.DEGRADED, Health.HEALTHY),
        (Severity.UNHEALTHY, Health.UNHEALTHY),
    ],
)
def test_severity_of_a_rule_is_the_one_that_is_set(severity: Severity, health: Health) -> None:
    device = device_of(shrunk_node(RuleOverride(SHRUNK, severity=severity)).evaluate(), POOL)
    assert (device.causes[0].severity, device.health) == (severity, health)
    assert bool(device.message) is (severity is not Severity.INFO)


def test_milder_severity_applies_to_a_raised_fault_at_once() -> None:
    node = GpuNode()
    node.lose(0)
    assert node.health() is Health.UNHEALTHY
    set_rules(node, RuleOverride("gpu.lost", severity=Severity.DEGRADED))
    assert node.health() is not Health.UNHEALTHY
    assert node.cause("gpu.lost").severity is Severity.DEGRADED


def test_severity_of_a_rule_does_not_hide_unreadable_data() -> None:
    node = PaperNode(EngineSettings("node-a", rules=(RuleOverride("cpu.*", severity=Severity.INFO),)))
    node.states = {}
    node.nodes[0] = node_sample(core=0, package=0)
    node.next(2)
    node.nodes[0] = node_sample(core=EIO, package=0)
    assert device_of(node.next(), CPU).health is Health.UNKNOWN


def test_fault_of_one_mig_instance_stays_information_for_its_gpu() -> None:
    node = GpuNode(migs={0: [(1, 0), (2, 0)]})
    set_rules(node, RuleOverride("gpu.xid.*", severity=Severity.UNHEALTHY))
    node.set_readings(0, recovery_action=1)
    node.xid(0, 48, 1, 0)
    assert node.cause("gpu.xid.48").severity is Severity.INFO


# --- probation ----------------------------------------------------------------------------------------------


def test_probation_of_a_rule_holds_its_cause_and_states_the_end() -> None:
    node = shrunk_node(RuleOverride(SHRUNK, probation_s=30))
    node.pool(pool_sample(10))
    assert codes(device_of(node.next(20), POOL)) == [SHRUNK]
    assert "(over; reported until " in device_of(node.evaluate(), POOL).message
    assert codes(device_of(node.next(30), POOL)) == []


def test_probation_of_one_gpu_differs_from_that_of_others() -> None:
    node = GpuNode(probation_s=60)
    set_rules(node, RuleOverride("gpu.lost", "gpu-1", probation_s=600))
    for number in (0, 1):
        node.lose(number)
    node.next(5)
    for number in (0, 1):
        node.recover(number)
    node.rest(120)
    assert (node.health("gpu-0"), node.health("gpu-1")) == (Health.HEALTHY, Health.UNHEALTHY)


def test_probation_of_a_rule_that_has_begun_gets_the_changed_end() -> None:
    node = shrunk_node(RuleOverride(SHRUNK, probation_s=30))
    node.pool(pool_sample(10))
    before = device_of(node.next(20), POOL).message
    set_rules(node, RuleOverride(SHRUNK, probation_s=300))
    after = device_of(node.next(60), POOL).message
    assert after.count("reported until") == 1
    assert after > before, "a later end"


# --- limit --------------------------------------------------------------------------------------------------


def test_limit_of_one_rule_differs_from_that_of_the_key_that_it_shares() -> None:
    node = PaperNode(EngineSettings("node-a", rules=(RuleOverride(THROTTLED, limit=3),)))
    node.states = {}
    node.nodes[0] = node_sample(core=0, package=0)
    node.next(70)
    node.nodes[0] = node_sample(core=4, package=4)
    assert codes(device_of(node.next(), CPU)) == [THROTTLED]


def test_limit_of_one_gpu_differs_from_that_of_others() -> None:
    node = GpuNode(correctable_window_s=60)
    set_rules(node, RuleOverride("gpu.ecc.correctable_rate", "gpu-1", limit=5))
    node.rest(70)
    for number in (0, 1):
        node.set_readings(number, ecc_correctable=9)
    node.next()
    assert (node.codes("gpu-0"), node.codes("gpu-1")) == ([], ["gpu.ecc.correctable_rate"])
    assert "at least 5 in" in node.cause("gpu.ecc.correctable_rate", "gpu-1").evidence


@pytest.mark.parametrize(
    "rule",
    [rule for rule in (*ALL_HOST_RULES, *gpu_rules(GpuLimits())) if rule.limit_in_view],
    ids=lambda rule: rule.code,
)
def test_field_of_each_limit_exists(rule: Any) -> None:
    *of_limits, name = rule.limit_in_view.split(".")
    views = {"cpu": CpuRuleInput, "mem": MemoryRuleInput, "gpu": GpuRuleInput}
    assert name in (dir(HostLimits()) if of_limits else views[rule.code.partition(".")[0]]._fields)


@pytest.mark.parametrize(
    ("code", "reading"), [("gpu.pcie.replay", "pcie_replay"), ("gpu.ecc.correctable_rate", "ecc_correctable")]
)
def test_limit_of_a_gpu_counter_decides_between_limit_and_limit_less_one(code: str, reading: str) -> None:
    node = GpuNode(correctable_window_s=60)
    set_rules(node, RuleOverride(code, limit=4))
    node.rest(130)
    start = node.gpus[0].readings[GpuField(reading)]
    assert isinstance(start, int)
    node.set_readings(0, **{reading: start + 3})
    node.next()
    assert node.codes() == []
    node.set_readings(0, **{reading: start + 4})
    node.next()
    assert node.codes() == [code]


def test_core_wakes_the_engine_for_the_lowest_limit() -> None:
    rules = (
        RuleOverride("cpu.throttled.*", "cpu-node1", limit=4),
        RuleOverride("gpu.pcie.replay", "gpu-1", limit=2),
        RuleOverride("nic.flapping", limit=1),
    )
    events = {wake.field: wake.threshold for wake in sampler_wakes(10, 60, rules)}
    assert events[SamplerField.NODE_THROTTLE_CORE] == events[SamplerField.NODE_THROTTLE_PACKAGE] == 4
    gpu_events = {wake.field: wake.threshold for wake in gpu_wakes(GpuLimits(), rules)}
    assert gpu_events[GpuField.PCIE_REPLAY] == 2
    assert gpu_events[GpuField.ECC_CORRECTABLE] == GpuLimits().correctable_errors


# --- XIDs ---------------------------------------------------------------------------------------------------


def test_entry_for_one_xid_is_like_the_key_gpu_xids_and_outranks_it() -> None:
    rules = parse_rules(
        [
            {"code": "gpu.xid.31", "off": True},
            {"code": "gpu.xid.63", "severity": "unhealthy"},
            {"code": "gpu.xid.79", "device": "gpu-1", "severity": "info"},
            {"code": "gpu.xid.*", "severity": "info"},
        ]
    )
    assert xid_overrides(rules) == {31: XidOverride.IGNORE, 63: XidOverride.UNHEALTHY}
    config = Config(node_name="n", gpu_xids={31: XidOverride.INFO, 48: XidOverride.INFO}, rules=rules)
    assert dict(engine_settings(config).gpu.xids) == {
        31: XidOverride.IGNORE,
        48: XidOverride.INFO,
        63: XidOverride.UNHEALTHY,
    }


# --- the tables ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"off": True}, "rule 1: code is missing"),
        ({"code": 5, "off": True}, "rule 1: code: 5 is not a string"),
        ({"code": "cpu.offlne", "off": True}, "code 'cpu.offlne'; did you mean 'cpu.offline'?"),
        ({"code": "offline", "off": True}, "no rule that can be changed has the code 'offline'"),
        ({"code": "cpu.*.x", "off": True}, "cpu.*.x"),
        ({"code": "source.stalled", "of": True}, "unknown key 'of'; did you mean 'off'?"),
        ({"code": "cpu.offline"}, "rule 1: nothing is changed; set off, severity, probation or limit"),
        (
            {"code": "cpu.offline", "off": 1},
            "rule 1: off: 1 is neither true nor false; write one of them without quotes",
        ),
        (
            {"code": "cpu.offline", "severity": "bad"},
            "severity: 'bad' is not one of info, degraded, unhealthy",
        ),
        ({"code": "cpu.offline", "probation": "25h"}, "probation: 25h is over the limit of 24h"),
        ({"code": "cpu.offline", "limit": 1}, "limit: rule cpu.offline has no limit that can be set"),
        ({"code": "cpu.*", "limit": 1}, "has no limit that can be set"),
        ({"code": THROTTLED, "limit": 0}, "limit: 0 is below the limit of 1"),
        ({"code": "node.pressure.io", "limit": 101}, "limit: 101 is over the limit of 100"),
        ({"code": THROTTLED, "limit": "5"}, "limit: '5' is not a whole number; write digits without quotes"),
        (
            {"code": THROTTLED, "device": "", "limit": 5},
            "device: pattern of device names is 0 characters long",
        ),
    ],
)
def test_wrong_entry_is_refused_with_key_and_value(entry: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        parse_rules([entry])
    assert words in str(caught.value)
    assert str(caught.value).startswith("rule 1: ")


def test_code_of_a_drivers_own_check_is_accepted() -> None:
    assert parse_rules([{"code": "fpga.hot", "off": True}]) == (RuleOverride("fpga.hot", off=True),)


def test_parsed_entries_are_shown_as_they_were_written() -> None:
    tables = [
        {"code": THROTTLED, "device": "cpu-node*", "severity": "info", "probation": "5m", "limit": 7},
        {"code": "gpu.xid.*", "off": False},
    ]
    assert rules_to_tables(parse_rules(tables)) == tables


def test_more_than_64_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="65 rules, limit 64"):
        parse_rules(65 * [{"code": THROTTLED, "off": True}])
