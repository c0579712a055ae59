"""Rules for declared NICs: faults, look-alikes of faults, both sides of each limit, and the carried state."""

from dataclasses import replace
from typing import Any, Final

import pytest
from nic_samples import ABSENT, EIO, ETHERNET_PORT, NIC, PORT, UNCABLED, nic_sample

from agent.health.host.nic.rules import MAY_COME_UP, NEVER_ACTIVE, NIC_RULES, NO_NIC, NOT_READ_YET
from agent.health.host.nic.state import (
    BOOT_WAIT_S,
    NicRuleInput,
    NicRuleState,
    next_nic_state,
    nic_address,
    nic_baselines,
    nic_rule_input,
    restored_nic_state,
)
from agent.health.host.pci.rules import OFF_THE_BUS
from agent.health.host.pci.state import PciRuleState, pci_rule_input
from agent.health.kernel_log.facts import KernelLogState
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.declared_devices import DeclaredFile, DeclaredNicDevice, DriverDevice
from agent.model.health import Blame, Finding, Severity
from agent.model.machine_samples import NicPortSample, NicSample, PciSample
from agent.model.reading import Missing, SourceSample, SourceState
from agent.model.settings import HostLimits
from agent.model.snapshot import CpuSetsSample, Snapshot
from agent.model.time import NS, Instant

PERIOD_S: Final = 10
ROWS: Final = {rule.code: rule for rule in NIC_RULES}
HOUR: Final = 3600


class Node:
    """Machine with one declared NIC, simulated time and readings."""

    def __init__(self, *ports: NicPortSample, declared: DeclaredNicDevice | None = None) -> None:
        self.part = declared or DeclaredNicDevice("", "mlx5_0")
        self.nic: NicSample | None = nic_sample(*ports)
        self.failure: Missing | None = None
        self.limits = HostLimits()
        self.state = NicRuleState()
        self.now_ns = 10_000 * NS

    def snapshot(self) -> Snapshot:
        source = SourceSample("nic", SourceState.OK, self.now_ns, PERIOD_S * NS, 0, "", vital=False)
        nics = self.failure or ((self.nic,) if self.nic else ())
        device = DriverDevice("nic.example.com", "n", "nic-0", self.part, 0)
        files = (DeclaredFile("nic.example.com", (device,)),)
        cpus = CpuSetsSample(ABSENT, ABSENT, ABSENT)
        return Snapshot(1, cpus, sources=(source,), nics=nics, declared=files)

    def view(self, snapshot: Snapshot | None = None) -> NicRuleInput:
        return nic_rule_input(self.state, snapshot or self.snapshot(), self.part, self.limits, None)

    def read(self, seconds: float = PERIOD_S, **changed: Any) -> NicRuleInput:
        """Read the NIC after some seconds, with changed readings of port 1."""
        return self.read_ports(seconds, {1: changed})

    def read_ports(self, seconds: float, changed: dict[int, dict[str, Any]]) -> NicRuleInput:
        self.now_ns += int(seconds * NS)
        if self.nic and isinstance(self.nic.ports, tuple):
            ports = [port._replace(**changed.get(port.number, {})) for port in self.nic.ports]
            self.nic = self.nic._replace(ports=tuple(ports))
        self.state = next_nic_state(self.state, self.snapshot(), self.limits, Instant(self.now_ns, 0.0))
        return self.view()

    def read_for(self, seconds: float) -> NicRuleInput:
        """Read the NIC repeatedly for some seconds."""
        for _ in range(int(seconds) // PERIOD_S):
            view = self.read()
        return view


def node_with_history(*ports: NicPortSample) -> Node:
    """Return a node that was observed for as long as any rule needs."""
    node = Node(*ports)
    node.read()
    node.read_for(HOUR)
    return node


def port(number: int, **values: Any) -> NicPortSample:
    return PORT._replace(number=number, **values)


def result_of(code: str, view: NicRuleInput) -> RuleResult:
    return ROWS[code].evaluate(view)


def findings(view: NicRuleInput) -> dict[str, Severity]:
    results = [rule.evaluate(view) for rule in NIC_RULES]
    return {result.code: result.severity for result in results if isinstance(result, Finding)}


# --- the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", NIC_RULES, ids=lambda rule: rule.code)
@pytest.mark.parametrize("ports", [(PORT, port(2)), (ETHERNET_PORT,)], ids=["InfiniBand", "Ethernet"])
def test_every_nic_row_is_complete_and_finds_no_fault_in_a_good_nic(rule, ports) -> None:
    assert all([rule.threshold, rule.why, rule.advice, rule.try_it])
    assert "Source:" in rule.evaluate.__doc__
    assert rule.counts_growth == bool(rule.window_s)
    result = rule.evaluate(node_with_history(*ports).view())
    assert result is OK or (isinstance(result, RuleNotApplicable) and ports == (ETHERNET_PORT,))


@pytest.mark.parametrize("rule", NIC_RULES, ids=lambda rule: rule.code)
def test_nic_rules_before_the_first_reading_are_not_evaluated(rule) -> None:
    node = Node()
    assert rule.evaluate(node.view(replace(node.snapshot(), nics=None))) == NOT_READ_YET


@pytest.mark.parametrize("rule", NIC_RULES[1:], ids=lambda rule: rule.code)
def test_missing_nic_has_no_other_findings(rule) -> None:
    node = node_with_history()
    node.nic = None
    assert rule.evaluate(node.read()) == NO_NIC


@pytest.mark.parametrize("rule", NIC_RULES[1:], ids=lambda rule: rule.code)
def test_nic_with_unlistable_ports_is_unknown(rule) -> None:
    node = node_with_history()
    assert node.nic
    node.nic = node.nic._replace(ports=EIO)
    assert rule.evaluate(node.read()) == RuleInputUnreadable("ports of mlx5_0", EIO)


# --- nic.missing ------------------------------------------------------------------------------------------


GONE: Final = Finding("nic.missing", Severity.UNHEALTHY, "the RDMA device mlx5_0 is gone")


def test_nic_that_is_gone_is_unhealthy() -> None:
    node = node_with_history()
    node.nic = None
    assert result_of("nic.missing", node.read()) == GONE
    node.nic = nic_sample()
    assert findings(node.read()) == {}


def test_nic_that_never_existed_blames_the_declaration() -> None:
    node = Node(declared=DeclaredNicDevice(NIC, ""))
    node.nic = None
    result = result_of("nic.missing", node.read())
    assert isinstance(result, Finding)
    assert (result.evidence, result.blame) == (f"no RDMA device {NIC}", Blame.CONFIGURATION)


def test_unreadable_rdma_class_is_unknown() -> None:
    node = node_with_history()
    node.failure = EIO
    assert result_of("nic.missing", node.read()) == RuleInputUnreadable("class/infiniband", EIO)


@pytest.mark.parametrize(("bus", "result"), [((), OFF_THE_BUS), (None, GONE), (EIO, GONE)])
def test_nic_off_the_pci_bus_is_reported_by_the_pci_rule(
    bus: tuple[PciSample, ...] | Missing | None, result: RuleResult
) -> None:
    node = node_with_history()
    node.nic = None
    snapshot = replace(node.snapshot(), pci=bus)
    assert nic_address(node.state, node.part) == NIC
    function = pci_rule_input(PciRuleState(), KernelLogState(), snapshot, NIC, "", Instant(0, 0))
    view = nic_rule_input(node.state, snapshot, node.part, node.limits, function)
    assert result_of("nic.missing", view) == result


# --- nic.port_down ----------------------------------------------------------------------------------------


def test_nic_without_an_active_port_is_unhealthy() -> None:
    node = node_with_history()
    evidence = "port 1 is DOWN, physical state Polling"
    down = Finding("nic.port_down", Severity.UNHEALTHY, evidence)
    assert result_of("nic.port_down", node.read(state=1, phys_state=2)) == down
    assert result_of("nic.port_down", node.read(state=4, phys_state=5)) is OK


def test_one_down_port_of_two_is_degraded_and_named() -> None:
    node = node_with_history(port(1), port(2))
    down = {"state": 1, "phys_state": 3}
    result = result_of("nic.port_down", node.read_ports(PERIOD_S, {2: down}))
    assert result == Finding("nic.port_down", Severity.DEGRADED, "port 2 is DOWN, physical state Disabled")
    both = result_of("nic.port_down", node.read_ports(PERIOD_S, {1: down}))
    assert isinstance(both, Finding)
    assert both.severity is Severity.UNHEALTHY
    assert both.evidence.startswith("port 1 is DOWN")
    assert "port 2 is DOWN" in both.evidence


def test_port_that_lost_its_subnet_manager_is_down() -> None:
    node = node_with_history()
    result = result_of("nic.port_down", node.read(state=2))
    assert isinstance(result, Finding)
    assert result.evidence == "port 1 is INIT, physical state LinkUp"


@pytest.mark.parametrize("link_downs", [0, 1, 2])
def test_ports_down_for_minutes_after_boot_are_no_fault(link_downs: int) -> None:
    """Links train after a boot; a driver that resets its ports counts that as a link that went down."""
    node = Node(*(port(number, state=1, phys_state=2, link_downs=link_downs) for number in (1, 2)))
    for _ in range(BOOT_WAIT_S // PERIOD_S):
        view = node.read()
        assert findings(view) == {}
        assert result_of("nic.port_down", view) == MAY_COME_UP
    up = {"state": 4, "phys_state": 5}
    assert findings(node.read_ports(PERIOD_S, {1: up, 2: up})) == {}


@pytest.mark.parametrize("phys_state", [2, 3], ids=["Polling", "Disabled"])
def test_port_without_cable_since_boot_is_not_down(phys_state: int) -> None:
    node = node_with_history(port(1), port(2, **UNCABLED | {"phys_state": phys_state}))
    assert [rule.code for rule in NIC_RULES if rule.evaluate(node.view()) is not OK] == []


def test_uncabled_port_does_not_keep_a_nic_with_a_down_port_working() -> None:
    node = node_with_history(port(1), port(2, **UNCABLED))
    result = result_of("nic.port_down", node.read(state=1, phys_state=2))
    assert result == Finding("nic.port_down", Severity.UNHEALTHY, "port 1 is DOWN, physical state Polling")


@pytest.mark.parametrize(
    "before",
    [
        port(1, state=1, phys_state=2, link_downs=1),
        ETHERNET_PORT._replace(state=1, phys_state=3, link_ups=1),
    ],
    ids=["InfiniBand", "Ethernet"],
)
def test_port_that_went_down_before_the_agent_started_is_found(before: NicPortSample) -> None:
    node = Node(before)
    node.read()
    assert findings(node.read_for(BOOT_WAIT_S - PERIOD_S)) == {}
    assert findings(node.read()) == {"nic.port_down": Severity.UNHEALTHY}


@pytest.mark.parametrize(
    "disabled",
    [
        port(1, state=1, phys_state=3, link_downs=1),
        ETHERNET_PORT._replace(state=1, phys_state=3, link_ups=1, is_interface_up=False),
    ],
    ids=["InfiniBand", "Ethernet"],
)
def test_port_disabled_since_the_start_is_not_down(disabled: NicPortSample) -> None:
    """Clouds disable the second port of a NIC, which had a link while the machine booted."""
    node = Node(disabled, port(2))
    node.read()
    assert findings(node.read_for(2 * BOOT_WAIT_S)) == {}


def test_interface_that_is_set_down_is_named_in_the_evidence() -> None:
    down = node_with_history(ETHERNET_PORT).read(state=1, phys_state=3, is_interface_up=False)
    evidence = "port 1 (eth2) is DOWN, physical state Disabled; the interface is set down"
    assert result_of("nic.port_down", down) == Finding("nic.port_down", Severity.UNHEALTHY, evidence)


def test_port_that_is_never_activated_blames_the_subnet_manager() -> None:
    node = Node(port(1, state=2))
    node.read()
    result = result_of("nic.port_down", node.read_for(BOOT_WAIT_S))
    assert isinstance(result, Finding)
    assert result.evidence.endswith("LinkUp: the subnet manager has not activated it")


def test_down_slave_of_a_working_bond_is_only_degraded() -> None:
    node = node_with_history(ETHERNET_PORT)
    down = node.read(state=1, phys_state=3, working_bond="bond0")
    evidence = "port 1 (eth2) is DOWN, physical state Disabled; bond0 works"
    assert result_of("nic.port_down", down) == Finding("nic.port_down", Severity.DEGRADED, evidence)
    assert findings(node.read(working_bond="")) == {"nic.port_down": Severity.UNHEALTHY}


@pytest.mark.parametrize("file", ["state", "phys_state"])
def test_unreadable_port_state_is_unknown(file: str) -> None:
    node = node_with_history(port(1), port(2))
    view = node.read_ports(PERIOD_S, {2: {file: EIO}})
    assert result_of("nic.port_down", view) == RuleInputUnreadable(f"{file} of port 2", EIO)


# --- nic.no_link, nic.phys_state --------------------------------------------------------------------------


def test_nic_without_any_cable_is_info_after_the_boot() -> None:
    node = Node(port(1, **UNCABLED))
    node.read()
    assert findings(node.read_for(BOOT_WAIT_S - PERIOD_S)) == {}
    view = node.read()
    assert findings(view) == {"nic.no_link": Severity.INFO}
    assert result_of("nic.port_down", view) == NEVER_ACTIVE
    assert findings(node.read(state=4, phys_state=5)) == {}


def test_active_port_that_recovers_its_link_is_degraded() -> None:
    view = node_with_history().read(phys_state=6)
    evidence = "port 1 is ACTIVE, physical state LinkErrorRecovery"
    assert result_of("nic.phys_state", view) == Finding("nic.phys_state", Severity.DEGRADED, evidence)


def test_driver_without_physical_state_is_ok() -> None:
    assert result_of("nic.phys_state", node_with_history(port(1, phys_state=0)).view()) is OK


# --- nic.rate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"rate_mbps": 200_000}, "200 Gb/s over 4 lanes"), ({"width": 2}, "400 Gb/s over 2 lanes")],
)
def test_slower_link_is_degraded_until_it_is_fast_again(changed: dict[str, Any], text: str) -> None:
    node = node_with_history()
    evidence = f"port 1 has {text}; before: 400 Gb/s over 4 lanes"
    assert result_of("nic.rate", node.read(**changed)) == Finding("nic.rate", Severity.DEGRADED, evidence)
    assert result_of("nic.rate", node.read(rate_mbps=400_000, width=4)) is OK


def test_rate_of_a_down_port_is_not_compared() -> None:
    node = node_with_history()
    assert isinstance(result_of("nic.rate", node.read(state=1, rate_mbps=10_000)), RuleInconclusive)
    assert result_of("nic.rate", node.read(state=4, rate_mbps=400_000)) is OK


def test_link_slow_since_the_start_is_ok() -> None:
    assert result_of("nic.rate", Node(port(1, rate_mbps=100_000)).read()) is OK


@pytest.mark.parametrize("reading", [EIO, ABSENT])
def test_rate_that_becomes_unreadable_is_unknown(reading: Missing) -> None:
    view = node_with_history().read(rate_mbps=reading, width=reading)
    assert result_of("nic.rate", view) == RuleInputUnreadable("rate of port 1", reading)


def test_nic_without_rate_has_no_rate_rule() -> None:
    view = Node(port(1, rate_mbps=ABSENT, width=ABSENT)).read()
    assert isinstance(result_of("nic.rate", view), RuleNotApplicable)


# --- counters ---------------------------------------------------------------------------------------------

COUNTERS: Final = [
    ("nic.flapping", "link_downs", 3, "link_downed", "link went down: at least 3 in 10 min", 0xFF),
    ("nic.symbol_errors", "symbol_errors", 120, "symbol_error", "symbol errors: at least 120 in 1 h", 0xFFFF),
    ("nic.receive_errors", "receive_errors", 120, "port_rcv_errors", "damaged packets: at least 120 in 1 h",
     0xFFFF),
    ("nic.link_integrity", "integrity_errors", 1, "local_link_integrity_errors",
     "link integrity errors: at least 1 in 1 h", 0xF),
    ("nic.buffer_overruns", "buffer_overruns", 1, "excessive_buffer_overrun_errors",
     "buffer overruns: at least 1 in 1 h", 0xF),
]  # fmt: skip
each_counter = pytest.mark.parametrize(
    ("code", "field", "limit", "file", "text", "maximum"), COUNTERS, ids=[row[0] for row in COUNTERS]
)


@each_counter
def test_nic_counter_is_a_fault_from_its_limit(code, field, limit, file, text, maximum) -> None:
    node = node_with_history()
    assert result_of(code, node.read(**{field: limit - 1})) is OK
    assert result_of(code, node.read(**{field: limit})) == Finding(code, Severity.DEGRADED, f"port 1: {text}")


@each_counter
def test_nic_errors_expire_with_the_window(code, field, limit, file, text, maximum) -> None:
    node = node_with_history()
    node.read(**{field: limit})
    assert result_of(code, node.read_for(HOUR)) is OK


@each_counter
def test_nic_counter_with_a_high_first_value_is_no_fault(code, field, limit, file, text, maximum) -> None:
    node = Node(port(1, **{field: maximum - limit}))
    assert isinstance(result_of(code, node.read()), RuleInconclusive)
    assert findings(node.read_for(HOUR)) == {}
    assert isinstance(result_of(code, node.read(**{field: maximum})), Finding)


@each_counter
def test_reset_nic_counter_is_no_fault(code, field, limit, file, text, maximum) -> None:
    node = Node(port(1, **{field: maximum - 1}))
    node.read()
    node.read_for(HOUR)
    assert isinstance(result_of(code, node.read(**{field: 0})), RuleInconclusive)
    assert isinstance(result_of(code, node.read(**{field: limit})), Finding)


@each_counter
def test_nic_counter_at_its_maximum_is_not_evaluated(code, field, limit, file, text, maximum) -> None:
    node = node_with_history(port(1, **{field: maximum}))
    reason = f"{file} of port 1 has its maximum of {maximum}; perfquery -R resets it"
    assert result_of(code, node.view()) == RuleInconclusive(reason)


@each_counter
def test_unreadable_nic_counter_is_unknown(code, field, limit, file, text, maximum) -> None:
    node = node_with_history()
    assert result_of(code, node.read(**{field: EIO})) == RuleInputUnreadable(f"{file} of port 1", EIO)
    assert isinstance(result_of(code, node.read(**{field: ABSENT})), RuleNotApplicable)


@each_counter
def test_errors_of_a_port_without_cable_are_ignored(code, field, limit, file, text, maximum) -> None:
    node = node_with_history(port(1), port(2, **UNCABLED))
    assert result_of(code, node.read_ports(PERIOD_S, {2: {field: limit}})) is OK


def test_limits_of_the_settings_replace_the_defaults() -> None:
    node = node_with_history()
    node.limits = HostLimits(nic_errors=5, nic_error_window_s=60, nic_link_downs=1, nic_link_window_s=120)
    view = node.read(symbol_errors=5, link_downs=1)
    assert set(findings(view)) == {"nic.symbol_errors", "nic.flapping"}
    result = result_of("nic.flapping", view)
    assert isinstance(result, Finding)
    assert result.evidence == "port 1: link went down: at least 1 in 2 min"


def test_ethernet_port_has_its_interfaces_counters_only() -> None:
    node = node_with_history(ETHERNET_PORT)
    view = node.read(link_downs=0xFF, receive_errors=0xFFFF)
    assert set(findings(view)) == {"nic.flapping", "nic.receive_errors"}
    for code in ("nic.symbol_errors", "nic.link_integrity", "nic.buffer_overruns"):
        assert isinstance(result_of(code, view), RuleNotApplicable)
    # an interface's counters have no maximum that is reached in practice
    assert result_of("nic.flapping", node.read_for(HOUR)) is OK


# --- state between evaluations ----------------------------------------------------------------------------


def test_replaced_nic_restarts_its_state() -> None:
    node = node_with_history()
    assert node.nic
    node.nic = node.nic._replace(guid="other")
    assert findings(node.read(rate_mbps=100_000, symbol_errors=5000)) == {}


def test_briefly_unreadable_guid_is_the_same_nic() -> None:
    node = node_with_history()
    assert node.nic
    guid = node.nic.guid
    node.nic = node.nic._replace(guid="")
    node.read()
    node.nic = node.nic._replace(guid=guid)
    assert findings(node.read(rate_mbps=100_000)) == {"nic.rate": Severity.DEGRADED}


def test_evaluation_between_readings_keeps_the_nic_state() -> None:
    node = node_with_history()
    assert next_nic_state(node.state, node.snapshot(), node.limits, Instant(node.now_ns, 0)) == node.state


def test_stored_port_of_unknown_rate_has_the_rate_of_its_first_reading() -> None:
    """Its rate could not be read before the restart of the agent."""
    node = node_with_history()
    (stored,) = nic_baselines(node.state)
    ports = tuple(port._replace(rate_mbps=-1, width=-1) for port in stored.ports)
    restored = restored_nic_state([stored._replace(ports=ports)]).restored
    node.state = NicRuleState(read_ns=node.now_ns, restored=restored)
    assert findings(node.read(0)) == {}
    assert findings(node.read(rate_mbps=100_000)) == {"nic.rate": Severity.DEGRADED}


def test_undeclared_nic_is_forgotten() -> None:
    node = node_with_history()
    snapshot = replace(node.snapshot(), declared=())
    state = next_nic_state(node.state, snapshot, node.limits, Instant(node.now_ns, 0))
    assert state.states == {}
