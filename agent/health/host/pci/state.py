"""State that the rules for declared PCI functions carry between evaluations, and PciRuleInput, their input.

The module also collects the faults of NICs that the kernel log reports for a PCI function.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.health.host.machine.state import LASTING_FAULT_HELD_S
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState, log_reader_state
from agent.health.rate_window import WindowedCounter, next_counter
from agent.health.rules import CounterGrowth
from agent.model.declared_devices import DeclaredNicDevice, DeclaredPciDevice
from agent.model.health import Severity
from agent.model.machine_samples import PciSample
from agent.model.persistent_faults import PciBaseline
from agent.model.reading import NEVER_READ, Missing, Reading, SourceState
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

NIC_CODES: Final = (
    KernelLogCode.NIC_HEALTH,
    KernelLogCode.NIC_HARDWARE,
    KernelLogCode.NIC_COMMAND,
    KernelLogCode.EFA,
    KernelLogCode.NIC_POWER,
    KernelLogCode.NIC_MODULE,
    KernelLogCode.NIC_REGISTER,
    KernelLogCode.NIC_HEAT,
)
"""Codes of kernel-log lines about a NIC that mlx5_core and efa write."""
STOPPED_CODES: Final = frozenset(
    {
        KernelLogCode.NIC_HEALTH,
        KernelLogCode.NIC_HARDWARE,
        KernelLogCode.NIC_COMMAND,
        KernelLogCode.EFA,
    }
)
"""Codes of faults with which a NIC has stopped. They stay for a day, or until the driver has recovered it."""
HELD_FOR_A_DAY: Final = STOPPED_CODES | {KernelLogCode.NIC_POWER, KernelLogCode.NIC_MODULE}
"""Codes of kernel-log lines that report a state, which lasts until another line ends it, or for a day.

Lines of other codes report single events.
"""


class NicFault(NamedTuple):
    """Fault of a NIC that lines of the kernel log report."""

    fact: KernelLogFact
    severity: Severity
    text: str


_MODULE_SEVERITIES: Final = {
    "error": Severity.DEGRADED,
    "unplugged": Severity.INFO,
    "disabled": Severity.INFO,
}


def nic_faults(facts: Mapping[KernelLogCode, KernelLogFact]) -> Iterator[NicFault]:
    """Yield the faults that kernel-log lines about one NIC report.

    Args:
        facts: Newest report of each code that still counts. A line that states an end (recovered, plugged,
            sufficient power) ends the fault before it.
    """
    health = facts.get(KernelLogCode.NIC_HEALTH)
    recovered_ns = health.last.mono_ns if health and health.values[0] == "recovered" else -1
    for code, fact in facts.items():
        if code in STOPPED_CODES and fact.last.mono_ns <= recovered_ns:
            continue
        match code:
            case KernelLogCode.NIC_HEALTH:
                yield NicFault(fact, Severity.UNHEALTHY, fact.values[1])
            case KernelLogCode.NIC_HARDWARE | KernelLogCode.NIC_COMMAND | KernelLogCode.EFA:
                yield NicFault(fact, Severity.UNHEALTHY, fact.values[0])
            case KernelLogCode.NIC_HEAT:
                yield NicFault(fact, Severity.DEGRADED, fact.values[0])
            case KernelLogCode.NIC_POWER if fact.values[0] == "insufficient":
                power = f" ({fact.values[1]})" if fact.values[1] else ""
                yield NicFault(fact, Severity.DEGRADED, f"insufficient power in its slot{power}")
            case KernelLogCode.NIC_MODULE if fact.values[0] in _MODULE_SEVERITIES:
                yield NicFault(fact, _MODULE_SEVERITIES[fact.values[0]], fact.values[1])
            case KernelLogCode.NIC_REGISTER:
                yield NicFault(fact, Severity.INFO, f"a register access failed: {fact.values[0]}")
            case KernelLogCode.TX_TIMEOUT:
                yield NicFault(fact, Severity.DEGRADED, f"a transmit queue of {fact.values[0]} hung")
            case _:
                pass


# --- state -------------------------------------------------------------------------------------------------

PCI_LOG_CODES: Final = (
    KernelLogCode.AER_FATAL,
    KernelLogCode.AER_NONFATAL,
    KernelLogCode.PCI_FAULT,
    KernelLogCode.TX_TIMEOUT,
    *NIC_CODES,
)
"""Codes of kernel-log lines that can name a declared PCI function."""
_LOG_FINDINGS: Final = ("pci.nic.", "pci.fault", "pci.aer.")
"""First parts of the codes of findings that kernel-log lines report."""
ERROR_WINDOW_S: Final = 3600
"""Window in which link errors are counted [s]; long, because a bad contact causes errors with long pauses."""


class PciBaselineValues(NamedTuple):
    """Values of a PCI function when it was first seen on the PCI bus.

    Rules compare later readings with them.
    """

    driver: str
    """First kernel driver that was bound to the function; empty if none was."""
    width: Reading
    """Number of lanes of the PCIe link."""
    repaired_ns: int = 0
    """CLOCK_MONOTONIC at which an operator cleared faults that lines of the kernel log report [ns]."""


class PciRuleInput(NamedTuple):
    """Input of the rules for one PCI function that a driver declares."""

    address: str
    has_bus_been_read: bool
    """True: the PCI bus has been read at least once."""
    function: PciSample | Missing | None
    """Sample of the PCI function; None: not on the PCI bus; Missing: the bus cannot be read."""
    start: PciBaselineValues | None
    """Values when the PCI function was first on the bus; None: it never was."""
    declared_driver: str
    """Kernel driver that the declaration requires; empty: none is declared."""
    fatal: CounterGrowth
    """Growth of the fatal PCIe errors within ``ERROR_WINDOW_S``."""
    nonfatal: CounterGrowth
    correctable: CounterGrowth
    log_facts: Mapping[KernelLogCode, KernelLogFact]
    """Newest kernel-log fact of each code about the PCI function or its port, within ``ERROR_WINDOW_S``;
    facts that a NIC's driver reports, within a day. For a function that is gone, this time ends when it was
    last on the bus."""
    log_state: SourceState


class _PciErrorCounters(NamedTuple):
    """PCIe error counters of a PCI function, with their growth."""

    fatal: WindowedCounter = WindowedCounter()
    nonfatal: WindowedCounter = WindowedCounter()
    correctable: WindowedCounter = WindowedCounter()


class _PciFunctionState(NamedTuple):
    """State of one PCI function that is or was on the PCI bus: its values when first seen, and error
    counters."""

    identity: tuple[int, int]
    """Vendor ID and device ID; if they change, another card is in the slot and the state restarts."""
    start: PciBaselineValues
    upstream_bridge: str
    errors: _PciErrorCounters = _PciErrorCounters()
    seen_ns: int = 0
    """CLOCK_MONOTONIC at which the PCI function was last on the bus [ns]; 0: not since the agent's start."""


@dataclass(frozen=True, slots=True)
class PciRuleState:
    """Values that the PCI rules carry from one evaluation to the next."""

    states: Mapping[str, _PciFunctionState] = field(default_factory=dict)
    read_ns: int = 0
    """CLOCK_MONOTONIC of the last reading of the PCI bus [ns]."""
    functions: Mapping[str, PciSample] = field(default_factory=dict)
    """PCI functions on the bus at the last reading, by PCI address."""
    restored: Mapping[str, PciBaseline] = field(default_factory=dict)
    """Values at start that the agent before a restart stored, of PCI functions that are not in ``states``
    yet.
    """


def next_pci_rule_state(
    previous: PciRuleState, snapshot: Snapshot, now: Instant, nics: Collection[str] = ()
) -> PciRuleState:
    """Return the state of the PCI rules after a snapshot (the newest readings).

    Args:
        nics: PCI addresses of the declared NICs.
    """
    read_ns = next((source.beat_ns for source in snapshot.sources if source.name == "pci"), now.mono_ns)
    if not isinstance(snapshot.pci, tuple) or read_ns == previous.read_ns:
        return previous
    seen = {
        function.address: _next_function_state(_known_state(previous, function.address), function, read_ns)
        for function in snapshot.pci
    }
    parts = [device.part for file in snapshot.declared for device in file.devices]
    declared = {part.address for part in parts if isinstance(part, DeclaredPciDevice)}
    declared |= {part.pci for part in parts if isinstance(part, DeclaredNicDevice)} | {*nics}
    gone = {address: previous.states[address] for address in declared & previous.states.keys()}
    return PciRuleState(
        {**gone, **seen},
        read_ns,
        {function.address: function for function in snapshot.pci},
        {address: start for address, start in previous.restored.items() if address not in seen},
    )


def _known_state(state: PciRuleState, address: str) -> _PciFunctionState | None:
    """Return the rules' state of a PCI function.

    If there is none, return the state stored before a restart.
    """
    if address in state.states:
        return state.states[address]
    start = state.restored.get(address)
    if start is None:
        return None
    width = start.width if start.width >= 0 else NEVER_READ
    values = PciBaselineValues(start.driver, width, start.repaired_ns)
    return _PciFunctionState((start.vendor, start.device), values, "")


def pci_baselines(state: PciRuleState) -> Iterator[PciBaseline]:
    """Yield the values of each PCI function at the agent's start, to be stored for its restart."""
    known = {
        address: PciBaseline(
            address,
            *of_function.identity,
            of_function.start.driver,
            of_function.start.width if isinstance(of_function.start.width, int) else -1,
            of_function.start.repaired_ns,
        )
        for address, of_function in state.states.items()
    }
    yield from (start for _, start in sorted({**state.restored, **known}.items()))


def restored_pci_state(functions: Iterable[PciBaseline]) -> PciRuleState:
    """Return the state of the PCI rules with the values at start that the agent stored before a restart."""
    return PciRuleState(restored={start.address: start for start in functions})


def rebaseline_pci(state: PciRuleState, address: str, now_ns: int, code: str = "") -> PciRuleState:
    """Return the PCI rules' state in which a PCI function's present values replace its values at start, and
    kernel-log lines up to now no longer count.

    Args:
        now_ns: CLOCK_MONOTONIC of the evaluation [ns].
        code: Finding code of the rule whose value is replaced; empty: the values of all rules.
    """
    function, known = state.functions.get(address), state.states.get(address)
    if function is None or known is None:
        return state
    start = PciBaselineValues(
        function.driver if code in ("", "pci.unbound") else known.start.driver,
        function.width if code in ("", "pci.link_width") else known.start.width,
        now_ns if not code or code.startswith(_LOG_FINDINGS) else known.start.repaired_ns,
    )
    return replace(state, states={**state.states, address: known._replace(start=start)})


def _next_function_state(
    before: _PciFunctionState | None, function: PciSample, read_ns: int
) -> _PciFunctionState:
    identity = (function.vendor, function.device)
    if before is not None and -1 in identity:
        identity = before.identity  # an unreadable identity does not mean another card
    if before is None or before.identity != identity:
        before = _PciFunctionState(
            identity, PciBaselineValues(function.driver, function.width), function.upstream_bridge
        )
    start = before.start._replace(driver=before.start.driver or function.driver)
    if isinstance(start.width, Missing):
        start = start._replace(width=function.width)
    errors = _PciErrorCounters(
        next_counter(before.errors.fatal, function.aer_fatal, read_ns, ERROR_WINDOW_S),
        next_counter(before.errors.nonfatal, function.aer_nonfatal, read_ns, ERROR_WINDOW_S),
        next_counter(before.errors.correctable, function.aer_correctable, read_ns, ERROR_WINDOW_S),
    )
    return _PciFunctionState(identity, start, function.upstream_bridge, errors, read_ns)


def _log_facts(
    log: KernelLogState, address: str, known: _PciFunctionState | None, since_ns: int
) -> dict[KernelLogCode, KernelLogFact]:
    port, repaired_ns = (known.upstream_bridge, known.start.repaired_ns) if known else ("", 0)
    keys = [*((code, address) for code in PCI_LOG_CODES), (KernelLogCode.PCI_FAULT, port)]
    found = (log.facts.get(key) for key in keys)
    facts = sorted((fact for fact in found if fact), key=lambda fact: fact.last.mono_ns)
    longer_ns = (LASTING_FAULT_HELD_S - ERROR_WINDOW_S) * NS
    return {
        fact.code: fact
        for fact in facts
        if fact.last.mono_ns > max(since_ns - longer_ns * (fact.code in HELD_FOR_A_DAY), repaired_ns)
    }


def pci_rule_input(
    state: PciRuleState, log: KernelLogState, snapshot: Snapshot, address: str, driver: str, now: Instant
) -> PciRuleInput:
    """Return the PCI rules' input for one declared PCI function.

    Args:
        address: PCI address of the function.
        driver: Kernel driver that must be bound to the function; empty: no driver is declared.
    """
    known = _known_state(state, address)
    function = state.functions.get(address) if isinstance(snapshot.pci, tuple) else snapshot.pci
    # 0: seen before a restart of the agent only
    present_ns = known.seen_ns if known and known.seen_ns and function is None else now.mono_ns
    errors = known.errors if known else _PciErrorCounters()
    return PciRuleInput(
        address=address,
        has_bus_been_read=snapshot.pci is not None,
        function=function,
        start=known.start if known else None,
        declared_driver=driver,
        fatal=errors.fatal.growth,
        nonfatal=errors.nonfatal.growth,
        correctable=errors.correctable.growth,
        log_facts=_log_facts(log, address, known, present_ns - ERROR_WINDOW_S * NS),
        log_state=log_reader_state(snapshot.log),
    )
