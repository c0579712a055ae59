"""Health rules for RDMA network adapters (NICs) that drivers declare: presence, ports, links and errors.

Other rules, in agent.health.host.pci, evaluate the NIC as a PCI function, with its kernel-log lines.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from agent.health.host.nic.state import BOOT_WAIT_S, NicPortRuleInput, NicRuleInput
from agent.health.host.pci.rules import OFF_THE_BUS
from agent.health.rate_window import WindowedCounter
from agent.health.rules import (
    OK,
    Rule,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    counter_limit_result,
    format_duration,
)
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.machine_samples import (
    LINK_UP,
    LinkLayer,
    NicPortSample,
    NicSample,
    physical_state_name,
    port_state_name,
)
from agent.model.reading import Missing, is_absent
from agent.model.settings import HostLimits

_LIMITS: Final = HostLimits()
NOT_READ_YET: Final = RuleInconclusive("the NIC has not been read yet")
NO_NIC: Final = RuleInconclusive("the NIC has no RDMA device")
NEVER_ACTIVE: Final = RuleNotApplicable("no port of the NIC has been active")
MAY_COME_UP: Final = RuleInconclusive(
    f"a port that has not been active yet may come up for {format_duration(BOOT_WAIT_S)}"
)


def detect_missing_nic(view: NicRuleInput) -> RuleResult:
    """A NIC that a driver declares has no RDMA device: it is gone, or its driver is not loaded.

    Source: ``/sys/class/infiniband``.
    """
    if isinstance(view.nic, NicSample):
        return OK
    if isinstance(view.nic, Missing):
        return RuleInputUnreadable("class/infiniband", view.nic)
    if not view.has_been_read:
        return NOT_READ_YET
    if view.function is not None and view.function.has_bus_been_read and view.function.function is None:
        return OFF_THE_BUS  # reported by pci.missing
    if view.was_present:
        return Finding("nic.missing", Severity.UNHEALTHY, f"the RDMA device {view.label} is gone")
    advice = "correct the declaration, or load the NIC's RDMA driver; rdma link shows all RDMA devices"
    evidence = f"no RDMA device {view.label}"
    return Finding("nic.missing", Severity.UNHEALTHY, evidence, advice, Blame.CONFIGURATION)


def _ports_error(view: NicRuleInput) -> RuleResult:
    """Return OK if a NIC has ports that a rule can evaluate. Otherwise, return the result with which the rule
    states why it cannot evaluate them."""
    if not isinstance(view.nic, NicSample):
        return NO_NIC if view.has_been_read else NOT_READ_YET
    if isinstance(view.nic.ports, Missing):
        return RuleInputUnreadable(f"ports of {view.nic.name}", view.nic.ports)
    if not view.nic.ports:
        return RuleNotApplicable("the NIC has no ports")
    return OK


def _state_error(view: NicRuleInput) -> RuleResult:
    """Return OK if the states of all ports of a NIC are known, so that a rule can compare them. Otherwise,
    return the result with which the rule states why it cannot compare them."""
    for port in view.ports:
        for file, state in (("state", port.sample.state), ("phys_state", port.sample.phys_state)):
            if isinstance(state, Missing):
                return RuleInputUnreadable(f"{file} of {port.sample.label}", state)
    return OK


def detect_port_down(view: NicRuleInput) -> RuleResult:
    """A port that was active is no longer active. Unhealthy if the NIC has no active port, unless a bond
    works over other NICs.

    A port without a link since boot (no cable), or disabled since the agent's start, does not count.

    Source: ``ports/<n>/state`` and ``phys_state``; ``link_downed`` and ``carrier_up_count`` show whether a
    port had a link before the agent started.
    """
    if (result := _ports_error(view) or _state_error(view)) is not OK:
        return result
    inactive = [port for port in view.ports if not port.sample.is_active]
    down = [port for port in inactive if port.was_active or (port.had_link and not port.is_waiting)]
    if down:
        evidence = "; ".join(map(_describe_down, down))
        works = len(inactive) < len(view.ports) or all(port.sample.working_bond for port in down)
        return Finding("nic.port_down", Severity.DEGRADED if works else Severity.UNHEALTHY, evidence)
    if any(port.is_waiting for port in inactive):
        return MAY_COME_UP
    return NEVER_ACTIVE if len(inactive) == len(view.ports) else OK


def _describe_down(port: NicPortRuleInput) -> str:
    sample = port.sample
    text = f"{sample.label} is {_state_text(sample)}"
    if sample.phys_state == LINK_UP and not port.was_active and sample.link_layer is LinkLayer.INFINIBAND:
        text += ": the subnet manager has not activated it"
    if sample.interface and not sample.is_interface_up:
        text += "; the interface is set down"
    return f"{text}; {sample.working_bond} works" if sample.working_bond else text


def _state_text(port: NicPortSample) -> str:
    assert isinstance(port.state, int), "checked by _state_error()"
    assert isinstance(port.phys_state, int), "checked by _state_error()"
    return f"{port_state_name(port.state)}, physical state {physical_state_name(port.phys_state)}"


def detect_no_link(view: NicRuleInput) -> RuleResult:
    """No port of the NIC has had a link since boot: no cable is connected, or the ports are disabled.

    Source: ``ports/<n>/state`` and ``phys_state``, ``link_downed``, ``carrier_up_count``.
    """
    if (result := _ports_error(view) or _state_error(view)) is not OK:
        return result
    if any(port.sample.is_active or port.was_active or port.had_link for port in view.ports):
        return OK
    if any(port.is_waiting for port in view.ports):
        return MAY_COME_UP
    states = "; ".join(f"{port.sample.label} is {_state_text(port.sample)}" for port in view.ports)
    return Finding("nic.no_link", Severity.INFO, f"no link since boot: {states}")


def detect_wrong_physical_state(view: NicRuleInput) -> RuleResult:
    """An active port's physical state is not LinkUp, for example because the link recovers from errors.

    Source: ``ports/<n>/phys_state``.
    """
    if (result := _ports_error(view) or _state_error(view)) is not OK:
        return result
    active = [port.sample for port in view.ports if port.sample.is_active]
    # some drivers do not report a physical state, which is 0 then
    wrong = [port for port in active if port.phys_state not in (0, LINK_UP)]
    if wrong:
        evidence = "; ".join(f"{port.label} is {_state_text(port)}" for port in wrong)
        return Finding("nic.phys_state", Severity.DEGRADED, evidence)
    return OK if active else RuleNotApplicable("no port of the NIC is active")


def detect_slow_link(view: NicRuleInput) -> RuleResult:
    """An active port has a lower data rate, or fewer lanes, than before.

    Source: ``ports/<n>/rate`` [Gb/s, lanes].
    """
    return _ports_result(view, "nic.rate", _slow_link_result)


def _slow_link_result(port: NicPortRuleInput) -> RuleResult:
    sample = port.sample
    if not sample.is_active:
        return RuleInconclusive(f"{sample.label} is not active")
    rate, width, best_rate, best_width = (
        sample.rate_mbps,
        sample.width,
        port.best_rate_mbps,
        port.best_width,
    )
    if isinstance(rate, Missing) or isinstance(width, Missing):
        missing = rate if isinstance(rate, Missing) else width
        assert isinstance(missing, Missing)
        if is_absent(missing) and isinstance(best_rate, Missing):
            return RuleNotApplicable("the NIC does not report its data rate")
        return RuleInputUnreadable(f"rate of {sample.label}", missing)
    assert isinstance(best_rate, int), "the current rate is known"
    assert isinstance(best_width, int), "the current width is known"
    if rate >= best_rate and width >= best_width:
        return OK
    evidence = (
        f"{sample.label} has {rate / 1000:g} Gb/s over {width} lanes; before: {best_rate / 1000:g} Gb/s "
        f"over {best_width} lanes"
    )
    return Finding("nic.rate", Severity.DEGRADED, evidence)


def _ports_result(
    view: NicRuleInput, code: str, evaluate: Callable[[NicPortRuleInput], RuleResult]
) -> RuleResult:
    """Return the result of a rule that evaluates each port of a NIC that was active before.

    The result is one finding with the evidence of all ports that have a fault. If no port has a fault, it is
    the first result that is not OK; else OK.

    Args:
        evaluate: Function that evaluates one port.
    """
    if (result := _ports_error(view)) is not OK:
        return result
    results = [evaluate(port) for port in view.ports if port.was_active]
    if not results:
        return NEVER_ACTIVE
    if found := [result for result in results if isinstance(result, Finding)]:
        return Finding(code, found[0].severity, "; ".join(finding.evidence for finding in found))
    for kind in (RuleInputUnreadable, RuleInconclusive):
        if (first := next((result for result in results if isinstance(result, kind)), OK)) is not OK:
            return first
    return next((OK for result in results if result is OK), results[0])


class _NicCounter(NamedTuple):
    """Counter of a NIC's port, for a rule that compares the growth of the counter with a limit."""

    field: str
    """Name of the counter's field in NicPortSample and NicPortCounters."""
    infiniband_file: str
    ethernet_file: str
    """Sysfs file with the counter of an Ethernet port; empty: Ethernet has no such counter."""
    maximum: int
    """Value at which the counter of an InfiniBand port stops counting."""
    events: str
    """Name of the counted events in the evidence of the rule."""


def _counter_result(
    view: NicRuleInput, code: str, counter: _NicCounter, limit: int, window_s: int
) -> RuleResult:
    """Return the result of a rule that compares the growth of one counter with a limit, for all ports of a
    NIC."""
    return _ports_result(view, code, partial(_port_counter_result, code, counter, limit, window_s))


def _port_counter_result(
    code: str, counter: _NicCounter, limit: int, window_s: int, port: NicPortRuleInput
) -> RuleResult:
    label = port.sample.label
    is_ethernet = port.sample.link_layer is LinkLayer.ETHERNET
    file = (is_ethernet and counter.ethernet_file) or counter.infiniband_file
    evidence = f"{label}: {counter.events}: at least {limit} in {format_duration(window_s)}"
    windowed: WindowedCounter = getattr(port.counters, counter.field)
    result = counter_limit_result(
        windowed.growth,
        limit,
        window_s,
        Finding(code, Severity.DEGRADED, evidence),
        counter=f"{file} of {label}",
        reason=f"the port's driver does not count {counter.events}",
    )
    is_infiniband = port.sample.link_layer is LinkLayer.INFINIBAND
    is_stuck = is_infiniband and getattr(port.sample, counter.field) == counter.maximum
    if is_stuck and not isinstance(result, Finding):
        return RuleInconclusive(
            f"{file} of {label} has its maximum of {counter.maximum}; perfquery -R resets it"
        )
    return result


_LINK_DOWNS: Final = _NicCounter("link_downs", "link_downed", "carrier_down_count", 0xFF, "link went down")
_SYMBOL_ERRORS: Final = _NicCounter("symbol_errors", "symbol_error", "", 0xFFFF, "symbol errors")
_RECEIVE_ERRORS: Final = _NicCounter(
    "receive_errors", "port_rcv_errors", "rx_crc_errors", 0xFFFF, "damaged packets"
)
_INTEGRITY_ERRORS: Final = _NicCounter(
    "integrity_errors", "local_link_integrity_errors", "", 0xF, "link integrity errors"
)
_BUFFER_OVERRUNS: Final = _NicCounter(
    "buffer_overruns", "excessive_buffer_overrun_errors", "", 0xF, "buffer overruns"
)


def detect_flapping_link(view: NicRuleInput) -> RuleResult:
    """The link of a port went down repeatedly within the window.

    Source: growth of ``counters/link_downed`` (InfiniBand), ``carrier_down_count`` of the network interface
    (Ethernet) [count].
    """
    limits = view.limits
    return _counter_result(view, "nic.flapping", _LINK_DOWNS, limits.nic_link_downs, limits.nic_link_window_s)


def detect_symbol_errors(view: NicRuleInput) -> RuleResult:
    """A port had more symbol errors than a sound InfiniBand link has, within the window.

    Source: growth of ``counters/symbol_error`` [count]; not for Ethernet.
    """
    limits = view.limits
    return _counter_result(
        view, "nic.symbol_errors", _SYMBOL_ERRORS, limits.nic_errors, limits.nic_error_window_s
    )


def detect_receive_errors(view: NicRuleInput) -> RuleResult:
    """A port received more damaged packets than the limit allows, within the window.

    Source: growth of ``counters/port_rcv_errors`` (InfiniBand), ``statistics/rx_crc_errors`` of the network
    interface (Ethernet) [count].
    """
    limits = view.limits
    return _counter_result(
        view, "nic.receive_errors", _RECEIVE_ERRORS, limits.nic_errors, limits.nic_error_window_s
    )


def detect_integrity_errors(view: NicRuleInput) -> RuleResult:
    """A link had more physical errors than its hardware limit allows.

    Source: growth of ``counters/local_link_integrity_errors`` [count]; not for Ethernet.
    """
    return _counter_result(view, "nic.link_integrity", _INTEGRITY_ERRORS, 1, view.limits.nic_error_window_s)


def detect_buffer_overruns(view: NicRuleInput) -> RuleResult:
    """A port dropped packets because its receive buffer was full, which a lossless fabric rules out.

    Source: growth of ``counters/excessive_buffer_overrun_errors`` [count]; not for Ethernet.
    """
    return _counter_result(view, "nic.buffer_overruns", _BUFFER_OVERRUNS, 1, view.limits.nic_error_window_s)


_CHECK_CABLE: Final = "clean or replace cable and transceiver; compare with other ports of the switch"
_TRY_SYSFS: Final = "in a copy of sysfs (--sysfs-root) {} in class/infiniband/<name>/ports/1/{}"
_ERROR_WINDOW: Final = format_duration(_LIMITS.nic_error_window_s)

_nic_rule = partial(
    Rule, severity=Severity.DEGRADED, blame=Blame.HARDWARE, repair=Repair.INSPECT_HARDWARE, source="nic"
)
"""Constructor of a ``Rule`` for NICs; defaults: severity ``degraded``, blame on the hardware."""
NIC_RULES: Final = (
    _nic_rule(
        code="nic.missing",
        severity=Severity.UNHEALTHY,
        repair=Repair.RELOAD_DRIVER,
        threshold="any declared NIC",
        why="a claim may hold a NIC that cannot be used",
        advice="check lspci and the kernel log; load the driver again, or reset the NIC; else replace it",
        evaluate=detect_missing_nic,
        listed_first=True,
        try_it="declare a NIC and echo <address> > /sys/bus/pci/drivers/mlx5_core/unbind",
    ),
    _nic_rule(
        code="nic.port_down",
        severity=Severity.UNHEALTHY,
        threshold="a port that was active, or had a link since boot and is neither disabled nor active after "
        f"{format_duration(BOOT_WAIT_S)}; degraded while another port is active, or the bond works",
        why="connections over the port have failed",
        advice="check cable, transceiver and switch port; ibstat or ip link shows the port",
        evaluate=detect_port_down,
        try_it=_TRY_SYSFS.format("write '1: DOWN'", "state"),
    ),
    _nic_rule(
        code="nic.phys_state",
        threshold="an active port whose physical state is not LinkUp",
        why="the link recovers from errors, or is about to go down",
        advice=_CHECK_CABLE,
        evaluate=detect_wrong_physical_state,
        try_it=_TRY_SYSFS.format("write '6: LinkErrorRecovery'", "phys_state"),
    ),
    _nic_rule(
        code="nic.flapping",
        threshold=f"{_LIMITS.nic_link_downs} times in {format_duration(_LIMITS.nic_link_window_s)} "
        "(nic.link-downs, nic.link-window)",
        why="each time all connections over the port fail",
        advice=_CHECK_CABLE,
        evaluate=detect_flapping_link,
        counts_growth=True,
        limit_in_view="limits.nic_link_downs",
        window_s=_LIMITS.nic_link_window_s,
        try_it=_TRY_SYSFS.format(f"add {_LIMITS.nic_link_downs}", "counters/link_downed"),
    ),
    _nic_rule(
        code="nic.symbol_errors",
        threshold=f"{_LIMITS.nic_errors} errors in {_ERROR_WINDOW} (nic.errors, nic.error-window)",
        why="such a link loses packets, and collective operations wait for the slowest link",
        advice=_CHECK_CABLE,
        evaluate=detect_symbol_errors,
        counts_growth=True,
        limit_in_view="limits.nic_errors",
        window_s=_LIMITS.nic_error_window_s,
        try_it=_TRY_SYSFS.format(f"add {_LIMITS.nic_errors}", "counters/symbol_error"),
    ),
    _nic_rule(
        code="nic.receive_errors",
        threshold=f"{_LIMITS.nic_errors} packets in {_ERROR_WINDOW} (nic.errors, nic.error-window)",
        why="lost packets are sent again, and collective operations wait for the slowest link",
        advice=_CHECK_CABLE,
        evaluate=detect_receive_errors,
        counts_growth=True,
        limit_in_view="limits.nic_errors",
        window_s=_LIMITS.nic_error_window_s,
        try_it=_TRY_SYSFS.format(f"add {_LIMITS.nic_errors}", "counters/port_rcv_errors"),
    ),
    _nic_rule(
        code="nic.link_integrity",
        threshold=f"1 error in {_ERROR_WINDOW} (nic.error-window)",
        why="the link works outside its specification and may fail",
        advice=_CHECK_CABLE,
        evaluate=detect_integrity_errors,
        counts_growth=True,
        window_s=_LIMITS.nic_error_window_s,
        try_it=_TRY_SYSFS.format("add 1", "counters/local_link_integrity_errors"),
    ),
    _nic_rule(
        code="nic.buffer_overruns",
        threshold=f"1 error in {_ERROR_WINDOW} (nic.error-window)",
        why="the packet was lost, and its connection may have failed",
        advice="check flow control and buffers of the port and of the switch",
        evaluate=detect_buffer_overruns,
        counts_growth=True,
        window_s=_LIMITS.nic_error_window_s,
        try_it=_TRY_SYSFS.format("add 1", "counters/excessive_buffer_overrun_errors"),
    ),
    _nic_rule(
        code="nic.rate",
        threshold="a lower data rate or fewer lanes than the port had since the agent's start",
        why="transfers are slower, and collective operations wait for the slowest link",
        advice=_CHECK_CABLE,
        evaluate=detect_slow_link,
        try_it=_TRY_SYSFS.format("write '100 Gb/sec (2X HDR)'", "rate"),
    ),
    _nic_rule(
        code="nic.no_link",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        repair=Repair.NONE,
        threshold=f"no port has had a link since boot, after {format_duration(BOOT_WAIT_S)}",
        why="a pod cannot communicate over the NIC",
        advice="connect a cable and enable the port, or take the NIC out of the declaration",
        evaluate=detect_no_link,
        try_it="declare a NIC without a cable",
    ),
)
