"""State of the rules for PCI functions that drivers declare, and views, which are the inputs of these
rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.kernel_log.values import LogCode, LogFact, LogState, reader_state
from agent.health.rate_window import WindowedCounter, next_counter
from agent.health.rules import Growth
from agent.model.declared import Declarations, DeclaredPci
from agent.model.pci import PciSample
from agent.model.reading import Missing, Reading
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

WINDOW_S: Final = 3600
"""Window over link errors [s]: long, because the bus is read once a minute and a bad contact pauses."""


class PciStart(NamedTuple):
    """Values of a PCI function when it was first on the bus."""

    driver: str
    """First kernel driver that was bound to the function; empty if none was."""
    width: Reading


class PciView(NamedTuple):
    """Input of the rules for one PCI function that a driver declares."""

    address: str
    bus_read: bool
    """True if the PCI bus has been read at least once."""
    function: PciSample | Missing | None
    """Sample of the function; None: not on the bus; Missing: the bus cannot be read."""
    start: PciStart | None
    """Values when the function was first on the bus; None: it never was."""
    driver: str
    """Kernel driver that the declaration requires; empty: none is declared."""
    fatal: Growth
    nonfatal: Growth
    correctable: Growth
    log_facts: Mapping[LogCode, LogFact]
    """Newest fact of each kind about the PCI function or its link, within the window; for a function that is
    gone, within a window before it was last on the bus.
    """
    log_state: SourceState
    """State of the kernel-log reader."""


class _Errors(NamedTuple):
    """Error counters of a PCI function's link."""

    fatal: WindowedCounter = WindowedCounter()
    nonfatal: WindowedCounter = WindowedCounter()
    correctable: WindowedCounter = WindowedCounter()


class _FunctionState(NamedTuple):
    """State of one PCI function that is on the bus or was there."""

    identity: tuple[int, int]
    """Vendor and device ID; another card in the slot is another PCI function."""
    start: PciStart
    port: str
    errors: _Errors = _Errors()
    seen_ns: int = 0
    """Time when the function was last on the bus."""


@dataclass(frozen=True, slots=True)
class PciState:
    """State of the PCI rules, which the next evaluation compares with."""

    states: Mapping[str, _FunctionState] = field(default_factory=dict)
    """States of PCI functions, by address."""
    read_ns: int = 0
    """Time of the last reading of the bus."""
    functions: Mapping[str, PciSample] = field(default_factory=dict)
    """PCI functions on the bus at the last reading, by address."""


def next_pci_state(previous: PciState, snapshot: Snapshot, now: Instant) -> PciState:
    """Return the state of the PCI rules after a snapshot."""
    read_ns = next((source.beat_ns for source in snapshot.sources if source.name == "pci"), now.mono_ns)
    if not isinstance(snapshot.pci, tuple) or read_ns == previous.read_ns:
        return previous
    seen = {
        function.address: _next_function_state(previous.states.get(function.address), function, read_ns)
        for function in snapshot.pci
    }
    gone = {
        address: previous.states[address]
        for address in _declared_addresses(snapshot.declared) & previous.states.keys()
    }
    return PciState({**gone, **seen}, read_ns, {function.address: function for function in snapshot.pci})


def _declared_addresses(declared: Declarations) -> set[str]:
    devices = (device.part for file in declared for device in file.devices)
    return {part.address for part in devices if isinstance(part, DeclaredPci)}


def _next_function_state(before: _FunctionState | None, function: PciSample, read_ns: int) -> _FunctionState:
    identity = (function.vendor, function.device)
    if before is not None and -1 in identity:
        identity = before.identity  # an unreadable identity does not mean another card
    if before is None or before.identity != identity:
        before = _FunctionState(identity, PciStart(function.driver, function.width), function.port)
    start = before.start._replace(driver=before.start.driver or function.driver)
    if isinstance(start.width, Missing):
        start = start._replace(width=function.width)
    errors = _Errors(
        next_counter(before.errors.fatal, function.aer_fatal, read_ns, WINDOW_S),
        next_counter(before.errors.nonfatal, function.aer_nonfatal, read_ns, WINDOW_S),
        next_counter(before.errors.correctable, function.aer_correctable, read_ns, WINDOW_S),
    )
    return _FunctionState(identity, start, function.port, errors, read_ns)


def _log_facts(log: LogState, address: str, port: str, since_ns: int) -> dict[LogCode, LogFact]:
    places = [(code, address) for code in (LogCode.AER_FATAL, LogCode.AER_NONFATAL, LogCode.PCI_FAULT)]
    found = (log.facts.get(place) for place in (*places, (LogCode.PCI_FAULT, port)))
    facts = sorted((fact for fact in found if fact), key=lambda fact: fact.last.mono_ns)
    return {fact.code: fact for fact in facts if fact.last.mono_ns > since_ns}


def view_pci(
    state: PciState,
    log: LogState,
    snapshot: Snapshot,
    address: str,
    driver: str,
    now: Instant,
) -> PciView:
    """Return the rules' input for one PCI function; ``driver`` is the declared kernel driver; empty: none is
    declared."""
    known = state.states.get(address)
    function = state.functions.get(address) if isinstance(snapshot.pci, tuple) else snapshot.pci
    present_ns = known.seen_ns if known and function is None else now.mono_ns
    errors = known.errors if known else _Errors()
    return PciView(
        address=address,
        bus_read=snapshot.pci is not None,
        function=function,
        start=known.start if known else None,
        driver=driver,
        fatal=errors.fatal.growth,
        nonfatal=errors.nonfatal.growth,
        correctable=errors.correctable.growth,
        log_facts=_log_facts(log, address, known.port if known else "", present_ns - WINDOW_S * NS),
        log_state=reader_state(snapshot.log),
    )
