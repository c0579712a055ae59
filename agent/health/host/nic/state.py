"""State that the rules for declared NICs carry between evaluations, and NicRuleInput, the input of these
rules."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from agent.health.host.pci.state import PciRuleInput
from agent.health.rate_window import WindowedCounter, next_counter
from agent.model.declared_devices import DeclaredNicDevice, declared_nics
from agent.model.machine_samples import LINK_UP, NicPortSample, NicSample
from agent.model.persistent_faults import NicBaseline, NicPortBaseline
from agent.model.reading import NEVER_READ, Missing, Reading
from agent.model.settings import HostLimits
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

BOOT_WAIT_S: Final = 300
"""Time for which a port that the agent has never seen active may come up [s]: after a boot, links train and
the subnet manager configures ports for minutes."""


class NicPortCounters(NamedTuple):
    """Counters of one port of a NIC, with their growth within the windows of the settings."""

    link_downs: WindowedCounter = WindowedCounter()
    symbol_errors: WindowedCounter = WindowedCounter()
    receive_errors: WindowedCounter = WindowedCounter()
    integrity_errors: WindowedCounter = WindowedCounter()
    buffer_overruns: WindowedCounter = WindowedCounter()


class _NicPortState(NamedTuple):
    """State of one port of a NIC, collected from all readings of the port since the agent's start."""

    first_ns: int
    """CLOCK_MONOTONIC of the port's first reading [ns]."""
    was_active: bool = False
    """True: the agent has seen the port active."""
    rate_mbps: Reading = NEVER_READ
    """Highest data rate of the active port [Mb/s]."""
    width: Reading = NEVER_READ
    """Highest number of lanes of the active port."""
    counters: NicPortCounters = NicPortCounters()


class NicPortRuleInput(NamedTuple):
    """Input of the rules for one port of a NIC."""

    sample: NicPortSample
    was_active: bool
    """True: the agent has seen the port active."""
    had_link: bool
    """True: the port has or had a link since boot and is not disabled, so a cable is connected."""
    is_waiting: bool
    """True: the agent has never seen the port active, and has known it for less than ``BOOT_WAIT_S``."""
    best_rate_mbps: Reading
    best_width: Reading
    counters: NicPortCounters


class NicRuleInput(NamedTuple):
    """Input of the rules for one NIC that a driver declares."""

    label: str
    """Name of the NIC in texts: ``mlx5_0``, or its PCI address while it has no RDMA device."""
    nic: NicSample | Missing | None
    """Sample of the NIC; None: it does not exist, or has not been read; Missing: NICs cannot be listed."""
    has_been_read: bool
    """True: the RDMA devices have been read since the NIC was declared."""
    was_present: bool
    """True: an earlier reading of the NICs found this one."""
    ports: tuple[NicPortRuleInput, ...]
    limits: HostLimits
    function: PciRuleInput | None
    """Input of the PCI rules for the NIC's PCI function: its link, driver and kernel-log facts by address;
    None: the function is unknown, or the NIC is no PCI function."""


class _NicState(NamedTuple):
    """State of one declared NIC that is or was present, kept between evaluations."""

    name: str
    address: str
    guid: str
    """Node GUID; if it changes, another card is in the slot and the state restarts."""
    ports: Mapping[int, _NicPortState]


@dataclass(frozen=True, slots=True)
class NicRuleState:
    """Values that the NIC rules carry from one evaluation to the next."""

    states: Mapping[DeclaredNicDevice, _NicState] = field(default_factory=dict)
    read_ns: int = 0
    """CLOCK_MONOTONIC of the last reading of the NICs [ns]."""
    restored: Mapping[DeclaredNicDevice, _NicState] = field(default_factory=dict)
    """States of NICs that the agent before a restart stored, and that no driver has declared again yet."""

    @property
    def addresses(self) -> frozenset[str]:
        """PCI addresses of the NICs that are or were present."""
        return frozenset(state.address for state in self.states.values() if state.address)

    @property
    def restored_addresses(self) -> Mapping[str, str]:
        """PCI addresses of the NICs in ``restored``, by RDMA name."""
        return {state.name: state.address for state in self.restored.values() if state.address}


def next_nic_state(
    previous: NicRuleState, snapshot: Snapshot, limits: HostLimits, now: Instant
) -> NicRuleState:
    """Return the state of the NIC rules after a snapshot (the newest readings)."""
    if not isinstance(snapshot.nics, tuple):
        return previous
    read_ns = next((source.beat_ns for source in snapshot.sources if source.name == "nic"), now.mono_ns)
    parts = declared_nics(snapshot.declared)
    known = {**previous.restored, **previous.states}
    states = {part: known[part] for part in parts & known.keys()}
    for part in parts:
        nic = find_nic(snapshot.nics, part)
        if nic is not None and (part not in previous.states or read_ns != previous.read_ns):
            states[part] = _next_nic_state(states.get(part), nic, limits, read_ns)
    restored = {part: state for part, state in previous.restored.items() if part not in parts}
    return NicRuleState(states, read_ns, restored)


def nic_baselines(state: NicRuleState) -> Iterator[NicBaseline]:
    """Yield the best values of each NIC since the agent's start (active ports, rates), to be stored."""
    for declared, nic in sorted({**state.restored, **state.states}.items()):
        ports = tuple(
            NicPortBaseline(
                number,
                port.first_ns,
                port.was_active,
                port.rate_mbps if isinstance(port.rate_mbps, int) else -1,
                port.width if isinstance(port.width, int) else -1,
            )
            for number, port in sorted(nic.ports.items())
        )
        yield NicBaseline(declared.pci, declared.rdma, nic.name, nic.address, nic.guid, ports)


def restored_nic_state(nics: Iterable[NicBaseline]) -> NicRuleState:
    """Return the state of the NIC rules with the values that the agent stored before a restart."""
    return NicRuleState(
        restored={
            DeclaredNicDevice(nic.declared_pci, nic.declared_rdma): _NicState(
                nic.name, nic.address, nic.guid, {port.number: _restored_port(port) for port in nic.ports}
            )
            for nic in nics
        }
    )


def _restored_port(port: NicPortBaseline) -> _NicPortState:
    return _NicPortState(
        port.first_ns,
        port.was_active,
        port.rate_mbps if port.rate_mbps >= 0 else NEVER_READ,
        port.width if port.width >= 0 else NEVER_READ,
    )


def rebaseline_nic(
    state: NicRuleState, snapshot: Snapshot, declared: DeclaredNicDevice, code: str = ""
) -> NicRuleState:
    """Return the NIC rules' state in which the present state of a NIC's ports replaces their best earlier
    state.

    Args:
        code: Finding code of the rule whose values are replaced; empty: the values of all rules.
    """
    nic = find_nic(snapshot.nics, declared) if isinstance(snapshot.nics, tuple) else None
    known = state.states.get(declared)
    if known is None or nic is None or not isinstance(nic.ports, tuple):
        return state
    ports = dict(known.ports) if code else {}
    for port in nic.ports:
        if (before := known.ports.get(port.number)) is None:
            continue
        if code in ("", "nic.port_down"):
            before = before._replace(was_active=port.is_active)
        if code in ("", "nic.rate"):
            before = before._replace(rate_mbps=port.rate_mbps, width=port.width)
        ports[port.number] = before
    return replace(state, states={**state.states, declared: known._replace(ports=ports)})


def find_nic(nics: tuple[NicSample, ...], declared: DeclaredNicDevice) -> NicSample | None:
    """Return the newest readings of a declared NIC; None: the NIC does not exist."""
    for nic in nics:
        if nic.name == declared.rdma or (declared.pci and nic.address == declared.pci):
            return nic
    return None


def _next_nic_state(before: _NicState | None, nic: NicSample, limits: HostLimits, read_ns: int) -> _NicState:
    if before is not None and nic.guid and before.guid not in ("", nic.guid):
        before = None
    ports = dict(before.ports) if before else {}
    for sample in nic.ports if isinstance(nic.ports, tuple) else ():
        port = ports.get(sample.number, _NicPortState(read_ns))
        ports[sample.number] = _next_port_state(port, sample, limits, read_ns)
    guid = nic.guid or (before.guid if before else "")
    return _NicState(nic.name, nic.address, guid, ports)


def _next_port_state(
    before: _NicPortState, port: NicPortSample, limits: HostLimits, read_ns: int
) -> _NicPortState:
    errors_s, link_s, known = limits.nic_error_window_s, limits.nic_link_window_s, before.counters
    counters = NicPortCounters(
        next_counter(known.link_downs, port.link_downs, read_ns, link_s),
        next_counter(known.symbol_errors, port.symbol_errors, read_ns, errors_s),
        next_counter(known.receive_errors, port.receive_errors, read_ns, errors_s),
        next_counter(known.integrity_errors, port.integrity_errors, read_ns, errors_s),
        next_counter(known.buffer_overruns, port.buffer_overruns, read_ns, errors_s),
    )
    if not port.is_active:
        return before._replace(counters=counters)
    return before._replace(
        was_active=True,
        rate_mbps=_higher_reading(before.rate_mbps, port.rate_mbps),
        width=_higher_reading(before.width, port.width),
        counters=counters,
    )


def _higher_reading(before: Reading, now: Reading) -> Reading:
    if isinstance(before, Missing) or isinstance(now, Missing):
        return before if isinstance(now, Missing) else now
    return max(before, now)


def nic_address(state: NicRuleState, declared: DeclaredNicDevice) -> str:
    """Return the PCI address of a declared NIC; empty: it is unknown, or the NIC is no PCI function."""
    known = state.states.get(declared)
    return declared.pci or (known.address if known else "")


def nic_rule_input(
    state: NicRuleState,
    snapshot: Snapshot,
    declared: DeclaredNicDevice,
    limits: HostLimits,
    function: PciRuleInput | None,
) -> NicRuleInput:
    """Return the NIC rules' input for one declared NIC.

    Args:
        function: Input of the PCI rules for the NIC's PCI function; None: the NIC has no PCI function, or the
            function is unknown.
    """
    known = state.states.get(declared)
    nic = find_nic(snapshot.nics, declared) if isinstance(snapshot.nics, tuple) else snapshot.nics
    ports: tuple[NicPortRuleInput, ...] = ()
    if known and isinstance(nic, NicSample) and isinstance(nic.ports, tuple):
        ports = tuple(
            _port_input(port, known.ports[port.number], state.read_ns)
            for port in nic.ports
            if port.number in known.ports
        )
    return NicRuleInput(
        label=(known.name if known else "") or declared.rdma or declared.pci,
        nic=nic,
        has_been_read=snapshot.nics is not None,
        was_present=known is not None,
        ports=ports,
        limits=limits,
        function=function,
    )


def _port_input(port: NicPortSample, known: _NicPortState, read_ns: int) -> NicPortRuleInput:
    counts = (port.link_ups, port.link_downs)
    had_link = port.phys_state == LINK_UP or any(isinstance(count, int) and count > 0 for count in counts)
    had_link = had_link and not port.is_disabled
    return NicPortRuleInput(
        sample=port,
        was_active=known.was_active,
        had_link=had_link,
        is_waiting=not known.was_active and read_ns - known.first_ns < BOOT_WAIT_S * NS,
        best_rate_mbps=known.rate_mbps,
        best_width=known.width,
        counters=known.counters,
    )
