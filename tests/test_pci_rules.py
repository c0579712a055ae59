"""Declared PCI functions: each rule on both sides of its limit, and what is remembered for that."""

from dataclasses import replace
from typing import Final

import pytest

from agent.health.host.pci.rules import (
    CORRECTABLE,
    NO_AER,
    OFF_THE_BUS,
    PCI_RULES,
    UNLOOKED,
)
from agent.health.host.pci.state import WINDOW_S, PciPast, PciView, remember_pci, view_pci
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rules import OK, RuleNotApplicable, RuleNotEvaluated, RuleResult, Unreadable
from agent.model.declared import Declared, DeclaredFile, DeclaredPci
from agent.model.health import Blame, Finding, Severity
from agent.model.log import LogSample
from agent.model.pci import PciSample
from agent.model.reading import Absence, Missing
from agent.model.snapshot import CpuSample, Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS, Instant

ABSENT: Final = Missing(Absence.ABSENT, 2)
EIO: Final = Missing(Absence.UNREADABLE, 5)
NIC: Final = "0000:5e:00.0"
PORT: Final = "0000:5d:00.0"
WELL: Final = PciSample(NIC, 0x15B3, 0x1021, "mlx5_core", "", 16, 16, 0, 0, 0, PORT)
ROWS: Final = {rule.code: rule for rule in PCI_RULES}
DECLARED: Final = (
    DeclaredFile("nic.example.com", (Declared("nic.example.com", "n", "nic-0", DeclaredPci(NIC, ""), 0),)),
)
HISTORY: Final = RuleNotEvaluated("needs 1 h of history")


class Node:
    """A machine with one declared function; time passes, and the bus is read."""

    def __init__(self, driver: str = "") -> None:
        self.driver = driver
        self.function: PciSample | None = WELL
        self.bus: Missing | None = None
        self.past = PciPast()
        self.log = LogPast()
        self.log_state = SourceState.OK
        self.declared = DECLARED
        self.now_ns = 10_000 * NS

    def snapshot(self) -> Snapshot:
        source = SourceSample("pci", SourceState.OK, self.now_ns, 60 * NS, 0, "", vital=False)
        bus = self.bus or ((self.function,) if self.function else ())
        kmsg = SourceSample("kmsg", self.log_state, self.now_ns, NS, 0, "", vital=False)
        cpus = CpuSample(ABSENT, ABSENT, ABSENT)
        log = LogSample((), kmsg)
        return Snapshot(1, cpus, sources=(source,), pci=bus, log=log, declared=self.declared)

    @property
    def now(self) -> Instant:
        return Instant(self.now_ns, 0.0)

    def view(self, snapshot: Snapshot | None = None) -> PciView:
        snapshot = snapshot or self.snapshot()
        return view_pci(self.past, self.log, snapshot, NIC, self.driver, self.now)

    def read(self, seconds: float = 60, **changed: object) -> PciView:
        """The bus, so much later; with these readings changed."""
        self.now_ns += int(seconds * NS)
        if self.function:
            self.function = self.function._replace(**changed)
        self.past = remember_pci(self.past, self.snapshot(), self.now)
        return self.view()

    def tell(self, code: LogCode, place: str = NIC, text: str = "what happened") -> None:
        fact = LogFact(code, place, 1, self.now, self.now, text)
        self.log = LogPast({**self.log.facts, (code, place): fact})


@pytest.fixture
def node() -> Node:
    """One that has been watched for as long as any rule needs."""
    node = Node()
    for _ in range(WINDOW_S // 60 + 1):
        node.read()
    return node


def says(code: str, view: PciView) -> RuleResult:
    return ROWS[code].judge(view)


def finding(code: str, evidence: str) -> Finding:
    return Finding(code, ROWS[code].severity, evidence)


# --- the rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PCI_RULES, ids=lambda rule: rule.code)
def test_every_row_is_complete_and_a_function_that_is_well_is_fine(rule, node: Node) -> None:
    assert all([rule.threshold, rule.why, rule.advice, rule.try_it])
    assert "Source:" in rule.judge.__doc__
    assert rule.counter == bool(rule.window_s)
    assert rule.judge(node.view()) is OK


@pytest.mark.parametrize("rule", PCI_RULES, ids=lambda rule: rule.code)
def test_nothing_is_said_before_somebody_has_looked(rule) -> None:
    node = Node()
    assert rule.judge(node.view(replace(node.snapshot(), pci=None))) == UNLOOKED


@pytest.mark.parametrize("rule", PCI_RULES[1:], ids=lambda rule: rule.code)
def test_one_that_is_gone_is_judged_by_nothing_else(rule, node: Node) -> None:
    node.function = None
    assert rule.judge(node.read()) == OFF_THE_BUS


# --- pci.missing -------------------------------------------------------------------------------------------


def test_a_function_that_was_there_is_gone(node: Node) -> None:
    node.function = None
    assert says("pci.missing", node.read()) == finding("pci.missing", f"{NIC} is gone from the PCI bus")


def test_why_it_is_gone_the_kernel_told_of_its_port(node: Node) -> None:
    node.function = None
    node.tell(LogCode.PCI_FAULT, PORT, f"pcieport {PORT}: pciehp: Slot(3): Card not present")
    text = (
        f"{NIC} is gone from the PCI bus; the kernel log: pcieport {PORT}: pciehp: Slot(3): Card not present"
    )
    assert says("pci.missing", node.read()) == finding("pci.missing", text)


def test_why_it_is_gone_is_told_for_as_long_as_it_is_and_what_was_long_before_is_not() -> None:
    node = Node()
    node.read()
    node.tell(LogCode.PCI_FAULT, PORT, "long ago")
    node.read(WINDOW_S + 60)
    node.function = None
    assert says("pci.missing", node.read()) == finding("pci.missing", f"{NIC} is gone from the PCI bus")
    node.tell(LogCode.PCI_FAULT, PORT, "why")
    told = finding("pci.missing", f"{NIC} is gone from the PCI bus; the kernel log: why")
    assert [says("pci.missing", node.read(seconds)) for seconds in (1, WINDOW_S, WINDOW_S)] == [told] * 3
    node.function = WELL
    assert says("pci.fault", node.read()) is OK


def test_one_that_never_was_there_is_the_declarations_fault() -> None:
    node = Node()
    node.function = None
    answer = says("pci.missing", node.read())
    assert isinstance(answer, Finding)
    assert (answer.severity, answer.evidence) == (Severity.UNHEALTHY, f"no {NIC} on the PCI bus")
    assert answer.blame is Blame.CONFIGURATION
    assert "declaration" in answer.advice


def test_a_machine_without_a_bus_has_no_such_function() -> None:
    node = Node()
    node.bus = ABSENT
    assert says("pci.missing", node.read()) == finding("pci.missing", "the machine has no PCI bus")


def test_a_bus_that_cannot_be_read_is_not_an_empty_one(node: Node) -> None:
    node.bus = EIO
    assert says("pci.missing", node.read()) == Unreadable("bus/pci/devices", EIO)


def test_one_that_comes_back_is_well_again(node: Node) -> None:
    node.function = None
    node.read()
    node.function = WELL
    assert [rule.code for rule in PCI_RULES if isinstance(rule.judge(node.read()), Finding)] == []


# --- pci.unbound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "bound", "evidence"),
    [
        ("", "", "no driver is bound; mlx5_core was at start"),
        ("", "vfio-pci", "vfio-pci is bound; mlx5_core was at start"),
        ("vfio-pci", "mlx5_core", "mlx5_core is bound; vfio-pci is declared"),
        ("vfio-pci", "", "no driver is bound; vfio-pci is declared"),
    ],
)
def test_another_driver_than_there_should_be(node: Node, declared: str, bound: str, evidence: str) -> None:
    node.driver = declared
    assert says("pci.unbound", node.read(driver=bound)) == finding("pci.unbound", evidence)


def test_the_declared_driver_counts_and_not_that_of_the_start(node: Node) -> None:
    node.driver = "vfio-pci"
    assert says("pci.unbound", node.read(driver="vfio-pci")) is OK


def test_a_function_that_never_had_a_driver_has_lost_none() -> None:
    node = Node()
    assert isinstance(says("pci.unbound", node.read(driver="")), RuleNotApplicable)
    assert says("pci.unbound", node.read(driver="mlx5_core")) is OK
    assert isinstance(says("pci.unbound", node.read(driver="")), Finding)


# --- pci.link_width ----------------------------------------------------------------------------------------


def test_lanes_that_are_lost(node: Node) -> None:
    lost = finding("pci.link_width", "8 of 16 lanes, 16 at start")
    assert says("pci.link_width", node.read(width=8)) == lost
    assert says("pci.link_width", node.read(width=16)) is OK


def test_a_width_that_could_not_be_read_at_start_is_held_to_the_first_that_could() -> None:
    node = Node()
    node.read(width=EIO)
    node.read(width=16)
    assert says("pci.link_width", node.read(width=8)) == finding(
        "pci.link_width", "8 of 16 lanes, 16 at start"
    )


def test_a_slot_that_always_was_narrow_is_no_fault() -> None:
    assert says("pci.link_width", Node().read(width=8)) is OK


def test_a_card_that_can_have_no_more_has_lost_nothing(node: Node) -> None:
    assert says("pci.link_width", node.read(width=8, width_max=8)) is OK


def test_without_its_most_the_width_is_held_to_that_of_the_start(node: Node) -> None:
    lost = finding("pci.link_width", "8 of 16 lanes, 16 at start")
    assert says("pci.link_width", node.read(width=8, width_max=EIO)) == lost


def test_a_function_without_a_link_is_not_judged_by_one() -> None:
    assert says("pci.link_width", Node().read(width=ABSENT)) == RuleNotApplicable(
        "it has no PCIe link of its own"
    )


@pytest.mark.parametrize("why", [ABSENT, EIO])
def test_a_width_that_can_no_longer_be_read_is_not_none(node: Node, why: Missing) -> None:
    assert says("pci.link_width", node.read(width=why)) == Unreadable("current_link_width", why)


# --- pci.aer.* ---------------------------------------------------------------------------------------------

ERRORS: Final = [
    ("pci.aer.fatal", "aer_fatal", 1, "fatal PCIe errors: at least 1 in 1 h"),
    ("pci.aer.nonfatal", "aer_nonfatal", 1, "non-fatal PCIe errors: at least 1 in 1 h"),
    ("pci.aer.correctable", "aer_correctable", CORRECTABLE, "correctable PCIe errors: at least 100 in 1 h"),
]
each_kind = pytest.mark.parametrize(("code", "field", "limit", "text"), ERRORS)


@each_kind
def test_errors_count_from_their_limit_on(node: Node, code: str, field: str, limit: int, text: str) -> None:
    assert says(code, node.read(**{field: limit - 1})) is OK
    assert says(code, node.read(**{field: limit})) == finding(code, text)


@each_kind
def test_errors_are_forgotten_an_hour_later(node: Node, code: str, field: str, limit: int, text: str) -> None:
    node.read(**{field: limit})
    for _ in range(WINDOW_S // 60):
        view = node.read()
    assert says(code, view) is OK


@each_kind
def test_errors_from_before_the_agent_began_are_old_news(
    code: str, field: str, limit: int, text: str
) -> None:
    node = Node()
    assert says(code, node.read(**{field: 7 * limit})) == HISTORY
    assert says(code, node.read(**{field: 8 * limit})) == finding(code, text)


@each_kind
def test_counts_that_begin_again_are_no_errors(
    node: Node, code: str, field: str, limit: int, text: str
) -> None:
    node.read(**{field: 5 * limit})
    assert says(code, node.read(**{field: limit})) == HISTORY
    assert says(code, node.read(**{field: 2 * limit})) == finding(code, text)


def test_a_count_that_begins_again_takes_nothing_from_the_others(node: Node) -> None:
    node.read(aer_correctable=50)
    view = node.read(aer_correctable=0, aer_fatal=1)
    assert isinstance(says("pci.aer.fatal", view), Finding)
    assert says("pci.aer.nonfatal", view) is OK
    assert says("pci.aer.correctable", view) == HISTORY


@each_kind
def test_counts_that_are_not_there_are_not_zero(
    node: Node, code: str, field: str, limit: int, text: str
) -> None:
    assert says(code, node.read(**{field: EIO})) == Unreadable(f"aer_dev_{field.removeprefix('aer_')}", EIO)
    assert says(code, node.read(**{field: ABSENT})) == RuleNotApplicable(NO_AER)


@pytest.mark.parametrize("identity", ["vendor", "device"])
def test_a_card_whose_identity_cannot_be_read_for_a_moment_is_no_other(node: Node, identity: str) -> None:
    node.read(**{identity: -1, "driver": "", "width": 8})
    view = node.read(vendor=WELL.vendor, device=WELL.device)
    assert says("pci.unbound", view) == finding("pci.unbound", "no driver is bound; mlx5_core was at start")
    assert says("pci.link_width", view) == finding("pci.link_width", "8 of 16 lanes, 16 at start")


def test_another_card_in_the_slot_has_a_history_of_its_own(node: Node) -> None:
    view = node.read(device=0x1017, aer_fatal=9, driver="ionic", width=8)
    assert [rule.code for rule in PCI_RULES if isinstance(rule.judge(view), Finding)] == []


@pytest.mark.parametrize(
    ("code", "told"), [("pci.aer.fatal", LogCode.AER_FATAL), ("pci.aer.nonfatal", LogCode.AER_NONFATAL)]
)
def test_what_only_the_log_tells_counts_for_an_hour(node: Node, code: str, told: LogCode) -> None:
    node.tell(told)
    text = next(text for row, _, _, text in ERRORS if row == code)
    assert says(code, node.read(WINDOW_S - 1, aer_fatal=ABSENT, aer_nonfatal=ABSENT)) == finding(code, text)
    assert says(code, node.read(1)) == RuleNotApplicable(NO_AER)


def test_what_the_log_tells_of_others_is_theirs(node: Node) -> None:
    for code in (LogCode.AER_FATAL, LogCode.AER_NONFATAL):
        node.tell(code, PORT)
    node.tell(LogCode.PCI_FAULT, "0000:01:00.0")
    assert [rule.code for rule in PCI_RULES if isinstance(rule.judge(node.view()), Finding)] == []


# --- pci.fault ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [NIC, PORT])
def test_a_link_that_went_down_and_came_back_is_told_for_an_hour(node: Node, place: str) -> None:
    node.tell(LogCode.PCI_FAULT, place, "Link Down")
    assert says("pci.fault", node.read(WINDOW_S - 1)) == finding("pci.fault", "the kernel log: Link Down")
    assert says("pci.fault", node.read(1)) is OK


def test_without_the_log_nobody_would_know(node: Node) -> None:
    node.log_state = SourceState.FAILING
    assert says("pci.fault", node.view()) == RuleNotApplicable("the kernel log cannot be read")
    node.tell(LogCode.PCI_FAULT, text="Link Down")
    assert isinstance(says("pci.fault", node.view()), Finding), "what was told stays told"


# --- what is remembered ------------------------------------------------------------------------------------


def test_a_look_between_two_readings_remembers_nothing(node: Node) -> None:
    assert remember_pci(node.past, node.snapshot(), node.now) is node.past


def test_a_function_that_nobody_declares_any_more_is_forgotten(node: Node) -> None:
    node.function, node.declared = None, ()
    node.read()
    assert node.past.known == {}
