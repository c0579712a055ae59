"""Declared PCI functions as their rules see them, and what is remembered for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.health.kernel_log.silence import reader_state
from agent.health.kernel_log.values import LogCode, LogFact, LogPast
from agent.health.rate_window import Counter, read_again
from agent.health.rules import Growth
from agent.model.declared import Declarations, DeclaredPci
from agent.model.pci import PciSample
from agent.model.reading import Missing, Reading
from agent.model.snapshot import Snapshot
from agent.model.source import SourceState
from agent.model.time import NS, Instant

WINDOW_S: Final = 3600
"""Of errors on a link: the bus is read once a minute, and a bad contact is not bad every minute."""


class PciStart(NamedTuple):
    """What a function had when it was first seen."""

    driver: str
    """The first that was bound to it since; empty if none ever was."""
    width: Reading


class PciView(NamedTuple):
    """One declared PCI function."""

    address: str
    looked: bool
    """Somebody has looked for it on the bus."""
    function: PciSample | Missing | None
    """None: it is not on the bus. Missing: the bus cannot be read."""
    start: PciStart | None
    """None: it was never seen."""
    driver: str
    """That is declared; empty: any, or none."""
    fatal: Growth
    nonfatal: Growth
    correctable: Growth
    told: Mapping[LogCode, LogFact]
    """What the kernel log told of it, or of the link to it, within the window; of one that is gone, since a
    window before it was last there. The newest of each kind."""
    log_state: SourceState
    """How the reader of the kernel log is doing."""


class _Errors(NamedTuple):
    """The counters of errors on its link."""

    fatal: Counter = Counter()
    nonfatal: Counter = Counter()
    correctable: Counter = Counter()


class _Known(NamedTuple):
    """What is remembered of one function, on the bus or gone from it."""

    identity: tuple[int, int]
    """Vendor and device: another card in the slot is another function."""
    start: PciStart
    port: str
    errors: _Errors = _Errors()
    seen_ns: int = 0
    """When it was last there."""


@dataclass(frozen=True, slots=True)
class PciPast:
    """What the rules of PCI functions compare with."""

    known: Mapping[str, _Known] = field(default_factory=dict)
    """By address."""
    read_ns: int = 0
    """When the bus was read last."""
    functions: Mapping[str, PciSample] = field(default_factory=dict)
    """Those that were on it then, by address."""


def remember_pci(past: PciPast, snapshot: Snapshot, now: Instant) -> PciPast:
    """The past after a snapshot."""
    read_ns = next((source.beat_ns for source in snapshot.sources if source.name == "pci"), now.mono_ns)
    if not isinstance(snapshot.pci, tuple) or read_ns == past.read_ns:
        return past
    seen = {one.address: _known(past.known.get(one.address), one, read_ns) for one in snapshot.pci}
    gone = {address: past.known[address] for address in _declared(snapshot.declared) & past.known.keys()}
    return PciPast({**gone, **seen}, read_ns, {one.address: one for one in snapshot.pci})


def _declared(declared: Declarations) -> set[str]:
    devices = (device.what for file in declared for device in file.devices)
    return {what.address for what in devices if isinstance(what, DeclaredPci)}


def _known(before: _Known | None, function: PciSample, read_ns: int) -> _Known:
    identity = (function.vendor, function.device)
    if before is not None and -1 in identity:
        identity = before.identity  # what cannot be read is no other card
    if before is None or before.identity != identity:
        before = _Known(identity, PciStart(function.driver, function.width), function.port)
    start = before.start._replace(driver=before.start.driver or function.driver)
    if isinstance(start.width, Missing):
        start = start._replace(width=function.width)
    errors = _Errors(
        read_again(before.errors.fatal, function.aer_fatal, read_ns, WINDOW_S),
        read_again(before.errors.nonfatal, function.aer_nonfatal, read_ns, WINDOW_S),
        read_again(before.errors.correctable, function.aer_correctable, read_ns, WINDOW_S),
    )
    return _Known(identity, start, function.port, errors, read_ns)


def _told(log: LogPast, address: str, port: str, since_ns: int) -> dict[LogCode, LogFact]:
    places = [(code, address) for code in (LogCode.AER_FATAL, LogCode.AER_NONFATAL, LogCode.PCI_FAULT)]
    found = (log.facts.get(place) for place in (*places, (LogCode.PCI_FAULT, port)))
    facts = sorted((fact for fact in found if fact), key=lambda fact: fact.last.mono_ns)
    return {fact.code: fact for fact in facts if fact.last.mono_ns > since_ns}


def view_pci(
    past: PciPast,
    log: LogPast,
    snapshot: Snapshot,
    address: str,
    driver: str,
    now: Instant,
) -> PciView:
    """One function; ``driver`` is what its declaration says of that, or empty."""
    known = past.known.get(address)
    function = past.functions.get(address) if isinstance(snapshot.pci, tuple) else snapshot.pci
    there_ns = known.seen_ns if known and function is None else now.mono_ns
    errors = known.errors if known else _Errors()
    return PciView(
        address=address,
        looked=snapshot.pci is not None,
        function=function,
        start=known.start if known else None,
        driver=driver,
        fatal=errors.fatal.growth,
        nonfatal=errors.nonfatal.growth,
        correctable=errors.correctable.growth,
        told=_told(log, address, known.port if known else "", there_ns - WINDOW_S * NS),
        log_state=reader_state(snapshot.log),
    )
