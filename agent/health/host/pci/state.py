"""State that the rules for declared PCI functions carry between evaluations, and PciRuleInput, their
input."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.health.host.machine.state import LASTING_FAULT_HELD_S
from agent.health.host.pci.nic_log_faults import HELD_FOR_A_DAY, NIC_CODES
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, KernelLogState, log_reader_state
from agent.health.rate_window import WindowedCounter, next_counter
from agent.health.rules import CounterGrowth
from agent.model.boot_baseline import PciBaseline
from agent.model.declared_devices import DeclaredNicDevice, DeclaredPciDevice
from agent.model.pci import PciSample
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.snapshot import Snapshot
from agent.model.source_state import SourceState
from agent.model.time import NS, Instant

PCI_LOG_CODES: Final = (
    KernelLogCode.AER_FATAL,
    KernelLogCode.AER_NONFATAL,
    KernelLogCode.PCI_FAULT,
    KernelLogCode.TX_TIMEOUT,
    *NIC_CODES,
)
"""Codes of kernel-log lines that can name a declared PCI function."""
ERROR_WINDOW_S: Final = 3600
"""Window in which link errors are counted [s]; long, because a bad contact causes errors with long pauses."""


class PciBaselineValues(NamedTuple):
    """Values of a PCI function when it was first seen on the PCI bus; rules compare with them."""

    driver: str
    """First kernel driver that was bound to the function; empty if none was."""
    width: Reading
    """Number of lanes of the PCIe link."""


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
    """State of one PCI function that is or was on the PCI bus: values when first seen, error counters."""

    identity: tuple[int, int]
    """Vendor ID and device ID; if they change, another card is in the slot and the state restarts."""
    start: PciBaselineValues
    upstream_bridge: str
    errors: _PciErrorCounters = _PciErrorCounters()
    seen_ns: int = 0
    """CLOCK_MONOTONIC at which the PCI function was last on the bus [ns]."""


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
    """Return the state of the PCI rules after a snapshot; ``nics``: PCI addresses of the declared NICs."""
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
    """Return the rules' state of a PCI function, or else the state that the agent before a restart stored."""
    if address in state.states:
        return state.states[address]
    start = state.restored.get(address)
    if start is None:
        return None
    values = PciBaselineValues(start.driver, start.width if start.width >= 0 else NEVER_READ)
    return _PciFunctionState((start.vendor, start.device), values, "")


def pci_baselines(state: PciRuleState) -> Iterator[PciBaseline]:
    """Yield the values that each PCI function had at the agent's start, to be stored as baseline."""
    known = {
        address: PciBaseline(
            address,
            *of_function.identity,
            of_function.start.driver,
            of_function.start.width if isinstance(of_function.start.width, int) else -1,
        )
        for address, of_function in state.states.items()
    }
    yield from (start for _, start in sorted({**state.restored, **known}.items()))


def restored_pci_state(functions: Iterable[PciBaseline]) -> PciRuleState:
    """Return the state of the PCI rules with the baseline that the agent before a restart stored."""
    return PciRuleState(restored={start.address: start for start in functions})


def restart_pci(state: PciRuleState, address: str) -> PciRuleState:
    """Return the PCI rules' state in which a PCI function's present values are its new baseline."""
    function, known = state.functions.get(address), state.states.get(address)
    if function is None or known is None:
        return state
    now = known._replace(start=PciBaselineValues(function.driver, function.width))
    return replace(state, states={**state.states, address: now})


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
    log: KernelLogState, address: str, port: str, since_ns: int
) -> dict[KernelLogCode, KernelLogFact]:
    keys = [*((code, address) for code in PCI_LOG_CODES), (KernelLogCode.PCI_FAULT, port)]
    found = (log.facts.get(key) for key in keys)
    facts = sorted((fact for fact in found if fact), key=lambda fact: fact.last.mono_ns)
    longer_ns = (LASTING_FAULT_HELD_S - ERROR_WINDOW_S) * NS
    return {
        fact.code: fact
        for fact in facts
        if fact.last.mono_ns > since_ns - (longer_ns if fact.code in HELD_FOR_A_DAY else 0)
    }


def pci_rule_input(
    state: PciRuleState, log: KernelLogState, snapshot: Snapshot, address: str, driver: str, now: Instant
) -> PciRuleInput:
    """Return the PCI rules' input for one declared PCI function.

    Args:
        address: PCI address of the function.
        driver: Declared kernel driver; empty: none is declared.
    """
    known = state.states.get(address)
    function = state.functions.get(address) if isinstance(snapshot.pci, tuple) else snapshot.pci
    present_ns = known.seen_ns if known and function is None else now.mono_ns
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
        log_facts=_log_facts(
            log, address, known.upstream_bridge if known else "", present_ns - ERROR_WINDOW_S * NS
        ),
        log_state=log_reader_state(snapshot.log),
    )
