"""Rules for declared PCI functions: both sides of each limit, and the carried state."""

from dataclasses import replace
from typing import Final

import pytest
from paper import without_since

from agent.health.host.pci.rules import BUS_NOT_READ, CORRECTABLE_ERRORS, NO_AER, OFF_THE_BUS, PCI_RULES
from agent.health.host.pci.state import (
    ERROR_WINDOW_S,
    PciRuleInput,
    PciRuleState,
    next_pci_rule_state,
    pci_rule_input,
)
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState
from agent.health.kernel_log.parse import parse_host_line
from agent.health.rules import OK, RuleInconclusive, RuleInputUnreadable, RuleNotApplicable, RuleResult
from agent.model.declared_devices import DeclaredFile, DeclaredPciDevice, DriverDevice
from agent.model.health import Blame, Finding, Severity
from agent.model.machine_samples import LogSample, PciSample
from agent.model.reading import Absence, Missing, SourceSample, SourceState
from agent.model.snapshot import CpuSetsSample, Snapshot
from agent.model.time import NS, Instant

ABSENT: Final = Missing(Absence.ABSENT, 2)
EIO: Final = Missing(Absence.UNREADABLE, 5)
NIC: Final = "0000:5e:00.0"
PORT: Final = "0000:5d:00.0"
WELL: Final = PciSample(NIC, 0x15B3, 0x1021, "mlx5_core", "", 16, 16, 0, 0, 0, PORT)
ROWS: Final = {rule.code: rule for rule in PCI_RULES}
DECLARED: Final = (
    DeclaredFile(
        "nic.example.com", (DriverDevice("nic.example.com", "n", "nic-0", DeclaredPciDevice(NIC, ""), 0),)
    ),
)
HISTORY: Final = RuleInconclusive("needs 1 h of history")


class Node:
    """Machine with one declared function, simulated time and bus readings."""

    def __init__(self, driver: str = "") -> None:
        self.driver = driver
        self.function: PciSample | None = WELL
        self.bus: Missing | None = None
        self.past = PciRuleState()
        self.log = KernelLogState()
        self.log_state = SourceState.OK
        self.declared = DECLARED
        self.now_ns = 10_000 * NS

    def snapshot(self) -> Snapshot:
        source = SourceSample("pci", SourceState.OK, self.now_ns, 60 * NS, 0, "", vital=False)
        bus = self.bus or ((self.function,) if self.function else ())
        kmsg = SourceSample("kmsg", self.log_state, self.now_ns, NS, 0, "", vital=False)
        cpus = CpuSetsSample(ABSENT, ABSENT, ABSENT)
        log = LogSample((), kmsg)
        return Snapshot(1, cpus, sources=(source,), pci=bus, log=log, declared=self.declared)

    @property
    def now(self) -> Instant:
        return Instant(self.now_ns, 0.0)

    def view(self, snapshot: Snapshot | None = None) -> PciRuleInput:
        snapshot = snapshot or self.snapshot()
        return pci_rule_input(self.past, self.log, snapshot, NIC, self.driver, self.now)

    def read(self, seconds: float = 60, **changed: object) -> PciRuleInput:
        """Read the bus after some seconds, with changed readings."""
        self.now_ns += int(seconds * NS)
        if self.function:
            self.function = self.function._replace(**changed)
        self.past = next_pci_rule_state(self.past, self.snapshot(), self.now)
        return self.view()

    def write_line(
        self,
        code: KernelLogCode,
        location: str = NIC,
        text: str = "what happened",
        values: tuple[str, ...] = (),
    ) -> None:
        fact = KernelLogFact(code, location, 1, self.now, self.now, text, values)
        self.log = KernelLogState({**self.log.facts, (code, location): fact})


@pytest.fixture
def node() -> Node:
    """Return a node that was observed for as long as any rule needs."""
    node = Node()
    for _ in range(ERROR_WINDOW_S // 60 + 1):
        node.read()
    return node


def result_of(code: str, view: PciRuleInput) -> RuleResult:
    return without_since(ROWS[code].evaluate(view))


def finding(code: str, evidence: str) -> Finding:
    return Finding(code, ROWS[code].severity, evidence)


# --- the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PCI_RULES, ids=lambda rule: rule.code)
def test_every_pci_row_is_complete_and_ok_for_a_good_function(rule, node: Node) -> None:
    assert all([rule.threshold, rule.why, rule.advice, rule.try_it])
    assert "Source:" in rule.evaluate.__doc__
    assert rule.counts_growth == bool(rule.window_s)
    assert rule.evaluate(node.view()) is OK


@pytest.mark.parametrize("rule", PCI_RULES, ids=lambda rule: rule.code)
def test_pci_rules_before_the_bus_is_read_are_not_evaluated(rule) -> None:
    node = Node()
    assert rule.evaluate(node.view(replace(node.snapshot(), pci=None))) == BUS_NOT_READ


@pytest.mark.parametrize("rule", PCI_RULES[1:], ids=lambda rule: rule.code)
def test_missing_function_has_no_other_findings(rule, node: Node) -> None:
    node.function = None
    assert rule.evaluate(node.read()) == OFF_THE_BUS


# --- pci.missing ------------------------------------------------------------------------------------------


def test_removed_function_is_missing(node: Node) -> None:
    node.function = None
    assert result_of("pci.missing", node.read()) == finding(
        "pci.missing", f"{NIC} is no longer on the PCI bus"
    )


def test_missing_function_cites_the_log_line_of_its_port(node: Node) -> None:
    node.function = None
    node.write_line(KernelLogCode.PCI_FAULT, PORT, f"pcieport {PORT}: pciehp: Slot(3): Card not present")
    line = f"pcieport {PORT}: pciehp: Slot(3): Card not present"
    text = f"{NIC} is no longer on the PCI bus; the kernel log: {line}"
    assert result_of("pci.missing", node.read()) == finding("pci.missing", text)


def test_missing_function_cites_only_recent_log_lines() -> None:
    node = Node()
    node.read()
    node.write_line(KernelLogCode.PCI_FAULT, PORT, "long ago")
    node.read(ERROR_WINDOW_S + 60)
    node.function = None
    assert result_of("pci.missing", node.read()) == finding(
        "pci.missing", f"{NIC} is no longer on the PCI bus"
    )
    node.write_line(KernelLogCode.PCI_FAULT, PORT, "why")
    code = finding("pci.missing", f"{NIC} is no longer on the PCI bus; the kernel log: why")
    assert [
        result_of("pci.missing", node.read(seconds)) for seconds in (1, ERROR_WINDOW_S, ERROR_WINDOW_S)
    ] == [code] * 3
    node.function = WELL
    assert result_of("pci.fault", node.read()) is OK


def test_never_seen_function_blames_the_declaration() -> None:
    node = Node()
    node.function = None
    answer = result_of("pci.missing", node.read())
    assert isinstance(answer, Finding)
    assert (answer.severity, answer.evidence) == (Severity.UNHEALTHY, f"no {NIC} on the PCI bus")
    assert answer.blame is Blame.CONFIGURATION
    assert "declaration" in answer.advice


def test_machine_without_pci_bus_lacks_the_function() -> None:
    node = Node()
    node.bus = ABSENT
    assert result_of("pci.missing", node.read()) == finding("pci.missing", "the machine has no PCI bus")


def test_unreadable_bus_is_not_empty(node: Node) -> None:
    node.bus = EIO
    assert result_of("pci.missing", node.read()) == RuleInputUnreadable("bus/pci/devices", EIO)


def test_returned_function_is_ok(node: Node) -> None:
    node.function = None
    node.read()
    node.function = WELL
    assert [rule.code for rule in PCI_RULES if isinstance(rule.evaluate(node.read()), Finding)] == []


# --- pci.unbound ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "bound", "evidence"),
    [
        ("", "", "no driver is bound; bound at start: mlx5_core"),
        ("", "vfio-pci", "vfio-pci is bound; bound at start: mlx5_core"),
        ("vfio-pci", "mlx5_core", "mlx5_core is bound; declared: vfio-pci"),
        ("vfio-pci", "", "no driver is bound; declared: vfio-pci"),
    ],
)
def test_other_bound_driver_is_found(node: Node, declared: str, bound: str, evidence: str) -> None:
    node.driver = declared
    assert result_of("pci.unbound", node.read(driver=bound)) == finding("pci.unbound", evidence)


def test_declared_driver_outranks_the_driver_at_start(node: Node) -> None:
    node.driver = "vfio-pci"
    assert result_of("pci.unbound", node.read(driver="vfio-pci")) is OK


def test_function_without_any_driver_is_not_applicable() -> None:
    node = Node()
    assert isinstance(result_of("pci.unbound", node.read(driver="")), RuleNotApplicable)
    assert result_of("pci.unbound", node.read(driver="mlx5_core")) is OK
    assert isinstance(result_of("pci.unbound", node.read(driver="")), Finding)


# --- pci.link_width ---------------------------------------------------------------------------------------


def test_lost_lanes_are_degraded(node: Node) -> None:
    lost = finding("pci.link_width", "8 of 16 lanes, 16 at start")
    assert result_of("pci.link_width", node.read(width=8)) == lost
    assert result_of("pci.link_width", node.read(width=16)) is OK


def test_width_is_compared_with_its_first_reading() -> None:
    node = Node()
    node.read(width=EIO)
    node.read(width=16)
    assert result_of("pci.link_width", node.read(width=8)) == finding(
        "pci.link_width", "8 of 16 lanes, 16 at start"
    )


def test_slot_narrow_since_the_start_is_ok() -> None:
    assert result_of("pci.link_width", Node().read(width=8)) is OK


def test_width_at_the_cards_maximum_is_ok(node: Node) -> None:
    assert result_of("pci.link_width", node.read(width=8, width_max=8)) is OK


def test_width_without_maximum_is_compared_with_the_start(node: Node) -> None:
    lost = finding("pci.link_width", "8 of 16 lanes, 16 at start")
    assert result_of("pci.link_width", node.read(width=8, width_max=EIO)) == lost


def test_function_without_link_has_no_width_rule() -> None:
    assert result_of("pci.link_width", Node().read(width=ABSENT)) == RuleNotApplicable(
        "the PCI function has no PCIe link of its own"
    )


@pytest.mark.parametrize("why", [ABSENT, EIO])
def test_unreadable_width_is_unknown(node: Node, why: Missing) -> None:
    assert result_of("pci.link_width", node.read(width=why)) == RuleInputUnreadable("current_link_width", why)


# --- pci.aer.* --------------------------------------------------------------------------------------------

ERRORS: Final = [
    ("pci.aer.fatal", "aer_fatal", 1, "fatal PCIe errors: at least 1 in 1 h"),
    ("pci.aer.nonfatal", "aer_nonfatal", 1, "non-fatal PCIe errors: at least 1 in 1 h"),
    (
        "pci.aer.correctable",
        "aer_correctable",
        CORRECTABLE_ERRORS,
        "correctable PCIe errors: at least 100 in 1 h",
    ),
]
each_kind = pytest.mark.parametrize(("code", "field", "limit", "text"), ERRORS)


@each_kind
def test_pci_errors_count_from_their_limit(node: Node, code: str, field: str, limit: int, text: str) -> None:
    assert result_of(code, node.read(**{field: limit - 1})) is OK
    assert result_of(code, node.read(**{field: limit})) == finding(code, text)


@each_kind
def test_pci_errors_expire_after_an_hour(node: Node, code: str, field: str, limit: int, text: str) -> None:
    node.read(**{field: limit})
    for _ in range(ERROR_WINDOW_S // 60):
        view = node.read()
    assert result_of(code, view) is OK


@each_kind
def test_pci_errors_before_the_start_are_ignored(code: str, field: str, limit: int, text: str) -> None:
    node = Node()
    assert result_of(code, node.read(**{field: 7 * limit})) == HISTORY
    assert result_of(code, node.read(**{field: 8 * limit})) == finding(code, text)


@each_kind
def test_restarted_pci_counters_are_no_errors(
    node: Node, code: str, field: str, limit: int, text: str
) -> None:
    node.read(**{field: 5 * limit})
    assert result_of(code, node.read(**{field: limit})) == HISTORY
    assert result_of(code, node.read(**{field: 2 * limit})) == finding(code, text)


def test_restarted_pci_counter_keeps_the_others(node: Node) -> None:
    node.read(aer_correctable=50)
    view = node.read(aer_correctable=0, aer_fatal=1)
    assert isinstance(result_of("pci.aer.fatal", view), Finding)
    assert result_of("pci.aer.nonfatal", view) is OK
    assert result_of("pci.aer.correctable", view) == HISTORY


@each_kind
def test_absent_pci_counters_are_not_zero(node: Node, code: str, field: str, limit: int, text: str) -> None:
    assert result_of(code, node.read(**{field: EIO})) == RuleInputUnreadable(
        f"aer_dev_{field.removeprefix('aer_')}", EIO
    )
    assert result_of(code, node.read(**{field: ABSENT})) == RuleNotApplicable(NO_AER)


@pytest.mark.parametrize("identity", ["vendor", "device"])
def test_briefly_unreadable_identity_is_the_same_card(node: Node, identity: str) -> None:
    node.read(**{identity: -1, "driver": "", "width": 8})
    view = node.read(vendor=WELL.vendor, device=WELL.device)
    assert result_of("pci.unbound", view) == finding(
        "pci.unbound", "no driver is bound; bound at start: mlx5_core"
    )
    assert result_of("pci.link_width", view) == finding("pci.link_width", "8 of 16 lanes, 16 at start")


def test_replaced_card_restarts_its_state(node: Node) -> None:
    view = node.read(device=0x1017, aer_fatal=9, driver="ionic", width=8)
    assert [rule.code for rule in PCI_RULES if isinstance(rule.evaluate(view), Finding)] == []


@pytest.mark.parametrize(
    ("code", "log_code"),
    [("pci.aer.fatal", KernelLogCode.AER_FATAL), ("pci.aer.nonfatal", KernelLogCode.AER_NONFATAL)],
)
def test_pci_error_in_the_log_counts_for_an_hour(node: Node, code: str, log_code: KernelLogCode) -> None:
    node.write_line(log_code)
    text = next(text for row, _, _, text in ERRORS if row == code)
    assert result_of(code, node.read(ERROR_WINDOW_S - 1, aer_fatal=ABSENT, aer_nonfatal=ABSENT)) == finding(
        code, text
    )
    assert result_of(code, node.read(1)) == RuleNotApplicable(NO_AER)


def test_log_lines_about_other_functions_are_ignored(node: Node) -> None:
    for code in (KernelLogCode.AER_FATAL, KernelLogCode.AER_NONFATAL):
        node.write_line(code, PORT)
    node.write_line(KernelLogCode.PCI_FAULT, "0000:01:00.0")
    assert [rule.code for rule in PCI_RULES if isinstance(rule.evaluate(node.view()), Finding)] == []


# --- pci.fault --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", [NIC, PORT])
def test_recovered_link_is_reported_for_an_hour(node: Node, location: str) -> None:
    node.write_line(KernelLogCode.PCI_FAULT, location, "Link Down")
    assert result_of("pci.fault", node.read(ERROR_WINDOW_S - 1)) == finding(
        "pci.fault", "the kernel log: Link Down"
    )
    assert result_of("pci.fault", node.read(1)) is OK


def test_pci_fault_without_log_is_not_applicable(node: Node) -> None:
    node.log_state = SourceState.FAILING
    assert result_of("pci.fault", node.view()) == RuleNotApplicable("the kernel log cannot be read")
    node.write_line(KernelLogCode.PCI_FAULT, text="Link Down")
    assert isinstance(result_of("pci.fault", node.view()), Finding), "facts survive an unreadable log"


# --- faults of a NIC --------------------------------------------------------------------------------------

DAY_S: Final = 86_400
NIC_LINES: Final = [
    (f"mlx5_core {NIC}: poll_health:852:(pid 0): device's health compromised - reached miss count",
     "pci.nic.stopped", Severity.UNHEALTHY, "device's health compromised", DAY_S),
    (f"mlx5_core {NIC}: print_health_info:458:(pid 0): synd 0x8: unrecoverable hardware error",
     "pci.nic.stopped", Severity.UNHEALTHY, "unrecoverable hardware error", DAY_S),
    (f"mlx5_core {NIC}: wait_func:1195:(pid 7): ENABLE_HCA(0x104) timeout. Will cause a leak of a command",
     "pci.nic.stopped", Severity.UNHEALTHY, "ENABLE_HCA not answered", DAY_S),
    (f"efa {NIC}: Device isn't ready, can't reset device",
     "pci.nic.stopped", Severity.UNHEALTHY, "Device isn't ready", DAY_S),
    ("infiniband rdmap94s0: Admin queue is closed",
     "pci.nic.stopped", Severity.UNHEALTHY, "Admin queue is closed", DAY_S),
    (f"mlx5_core {NIC}: print_health_info:424:(pid 0): Health issue observed, High temperature, severity(3) "
     "ERROR:", "pci.nic.hot", Severity.DEGRADED, "High temperature", ERROR_WINDOW_S),
    (f"mlx5_core {NIC}: print_health_info:424:(pid 0): synd 0x10: High temperature",
     "pci.nic.hot", Severity.DEGRADED, "High temperature", ERROR_WINDOW_S),
    (f"mlx5_core {NIC}: temp_warn:170:(pid 0): High temperature on sensors with bit set 0x0 0x1",
     "pci.nic.hot", Severity.DEGRADED, "High temperature", ERROR_WINDOW_S),
    (f"mlx5_core {NIC}: Detected insufficient power on the PCIe slot (27W).",
     "pci.nic.power", Severity.DEGRADED, "insufficient power in its slot (27W)", DAY_S),
    (f"mlx5_core {NIC}: Port module event[error]: module 0, Cable error, High Temperature",
     "pci.nic.module", Severity.DEGRADED, "Cable error, High Temperature", DAY_S),
    (f"mlx5_core {NIC}: Port module event: module 0, Cable unplugged",
     "pci.nic.module", Severity.INFO, "Cable unplugged", DAY_S),
    (f"mlx5_core {NIC} eth0: NETDEV WATCHDOG: CPU: 5: transmit queue 0 timed out 5020 ms",
     "pci.nic.tx_timeout", Severity.DEGRADED, "a transmit queue of eth0 hung", ERROR_WINDOW_S),
    (f"mlx5_core {NIC} eth0: TX timeout detected",
     "pci.nic.tx_timeout", Severity.DEGRADED, "a transmit queue of eth0 hung", ERROR_WINDOW_S),
    (f"mlx5_core {NIC}: ACCESS_REG(0x805) op_mod(0x1) failed, status bad resource(0x5), syndrome (0x3)",
     "pci.nic.register", Severity.INFO, "a register access failed: bad resource", ERROR_WINDOW_S),
]  # fmt: skip


def write_parsed(node: Node, text: str) -> None:
    """Add the fact of a kernel-log line."""
    parsed = parse_host_line(text)
    assert parsed is not None
    node.write_line(parsed.code, parsed.location, text, parsed.values)


@pytest.mark.parametrize(("text", "code", "severity", "fault", "held_s"), NIC_LINES)
def test_log_line_about_a_nic_is_a_finding_of_its_function(
    node: Node, text: str, code: str, severity: Severity, fault: str, held_s: int
) -> None:
    write_parsed(node, text)
    expected = Finding(code, severity, f"{fault}; the kernel log: {text}")
    found = [answer for rule in PCI_RULES if isinstance(answer := rule.evaluate(node.view()), Finding)]
    assert [without_since(finding) for finding in found] == [expected]
    assert without_since(result_of(code, node.read(held_s - 1))) == expected
    assert result_of(code, node.read(1)) is OK


@pytest.mark.parametrize("text", [row[0] for row in NIC_LINES])
def test_log_line_about_another_nic_is_no_finding(node: Node, text: str) -> None:
    write_parsed(node, text.replace(NIC, "0000:01:00.0").replace("rdmap94s0", "rdmap1s0"))
    assert [rule.code for rule in PCI_RULES if isinstance(rule.evaluate(node.view()), Finding)] == []


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ("synd 0x1: firmware internal error", "health recovery succeeded"),
        ("device's health compromised - reached miss count", "health revovery succeded"),
        (
            "Detected insufficient power on the PCIe slot (27W).",
            "PCIe slot advertised sufficient power (75W).",
        ),
        ("Port module event: module 0, Cable unplugged", "Port module event: module 0, Cable plugged"),
    ],
)
def test_log_line_about_an_end_clears_a_nic_until_the_next(node: Node, fault: str, end: str) -> None:
    write_parsed(node, f"mlx5_core {NIC}: {fault}")
    node.read(1)
    write_parsed(node, f"mlx5_core {NIC}: {end}")
    assert [rule.code for rule in PCI_RULES if isinstance(rule.evaluate(node.view()), Finding)] == []
    node.read(1)
    write_parsed(node, f"mlx5_core {NIC}: {fault}")
    assert any(isinstance(rule.evaluate(node.view()), Finding) for rule in PCI_RULES)


def test_heat_of_a_stopped_nic_leaves_it_unhealthy(node: Node) -> None:
    write_parsed(node, f"mlx5_core {NIC}: device's health compromised - reached miss count")
    node.read(1)
    write_parsed(node, f"mlx5_core {NIC}: Health issue observed, High temperature, severity(3) ERROR:")
    write_parsed(node, f"mlx5_core {NIC}: synd 0x10: High temperature")
    found = {rule.code for rule in PCI_RULES if isinstance(rule.evaluate(node.view()), Finding)}
    assert found == {"pci.nic.stopped", "pci.nic.hot"}


# --- state between evaluations ----------------------------------------------------------------------------


def test_evaluation_between_bus_readings_keeps_the_state(node: Node) -> None:
    assert next_pci_rule_state(node.past, node.snapshot(), node.now) is node.past


def test_undeclared_function_is_dropped(node: Node) -> None:
    node.function, node.declared = None, ()
    node.read()
    assert node.past.states == {}
