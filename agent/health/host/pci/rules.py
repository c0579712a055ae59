"""Rules for PCI functions that drivers declare: presence, driver, link and errors.

The link of a GPU is evaluated from what NVML reports, in agent.health.gpu.pcie.
"""

from typing import Final

from agent.health.host.pci.state import WINDOW_S, PciView
from agent.health.kernel_log.values import LogCode, no_lines_result
from agent.health.rules import (
    OK,
    Growth,
    Rule,
    RuleNotApplicable,
    RuleNotEvaluated,
    RuleResult,
    Unreadable,
    counter_result,
    duration,
)
from agent.model.health import Blame, Finding, Severity
from agent.model.pci import PciSample
from agent.model.reading import Absence, Missing

CORRECTABLE_ERRORS: Final = 100
"""Limit of correctable errors within the window; no vendor publishes a limit. A sound link has a few errors
in a day."""
HOUR: Final = duration(WINDOW_S)
NO_AER: Final = "no PCIe error counters: the kernel or the platform has no AER"
BUS_NOT_READ: Final = RuleNotEvaluated("the PCI bus has not been read yet")
OFF_THE_BUS: Final = RuleNotEvaluated("the function is not on the PCI bus")


def missing(view: PciView) -> RuleResult:
    """A function that a driver declares is not on the bus.

    Source: ``/sys/bus/pci/devices/<address>``.
    """
    function = view.function
    if isinstance(function, PciSample):
        return OK
    if not view.bus_read:
        return BUS_NOT_READ
    if isinstance(function, Missing):
        if function.absence is Absence.UNREADABLE:
            return Unreadable("bus/pci/devices", function)
        return Finding("pci.missing", Severity.UNHEALTHY, "the machine has no PCI bus")
    if view.start is not None:
        evidence = f"{view.address} is no longer on the PCI bus"
        if fact := view.log_facts.get(LogCode.PCI_FAULT):
            evidence += f"; the kernel log: {fact.text}"
        return Finding("pci.missing", Severity.UNHEALTHY, evidence)
    advice = "correct the declaration, or check lspci and rescan the bus"
    evidence = f"no {view.address} on the PCI bus"
    return Finding("pci.missing", Severity.UNHEALTHY, evidence, advice, Blame.CONFIGURATION)


def _not_on_bus(view: PciView) -> RuleNotEvaluated:
    """Return the result of a rule whose PCI function is not on the bus; pci.missing reports the absence."""
    return OFF_THE_BUS if view.bus_read else BUS_NOT_READ


def unbound(view: PciView) -> RuleResult:
    """Another driver is bound to the function than declared, or than at start; or none.

    Source: ``/sys/bus/pci/devices/<address>/driver``.
    """
    function = view.function
    if not isinstance(function, PciSample):
        return _not_on_bus(view)
    at_start = view.start.driver if view.start else ""
    expected = view.driver or at_start
    if not expected:
        return RuleNotApplicable("no driver is declared, and none was bound so far")
    if function.driver == expected:
        return OK
    basis = "declared" if view.driver else "bound at start"
    evidence = f"{function.driver or 'no driver'} is bound; {basis}: {expected}"
    return Finding("pci.unbound", Severity.UNHEALTHY, evidence)


def link_width(view: PciView) -> RuleResult:
    """The link has fewer lanes than at start, and than the device supports.

    Source: ``current_link_width`` and ``max_link_width`` [lanes].
    """
    function = view.function
    if not isinstance(function, PciSample):
        return _not_on_bus(view)
    at_start = view.start.width if view.start else function.width
    if isinstance(function.width, Missing):
        if function.width.absence is Absence.UNREADABLE or isinstance(at_start, int):
            return Unreadable("current_link_width", function.width)
        return RuleNotApplicable("the function has no PCIe link of its own")
    widest = function.width_max if isinstance(function.width_max, int) else at_start
    if isinstance(at_start, Missing) or isinstance(widest, Missing):
        return OK
    if function.width >= min(at_start, widest):
        return OK
    evidence = f"{function.width} of {widest} lanes, {at_start} at start"
    return Finding("pci.link_width", Severity.DEGRADED, evidence)


def _error_counter(view: PciView, growth: Growth, file: str, found: Finding, limit: int = 1) -> RuleResult:
    """Return the result of a rule that compares one error counter of a PCI link with a limit."""
    if not isinstance(view.function, PciSample):
        return _not_on_bus(view)
    return counter_result(growth, limit, WINDOW_S, found, counter=file, reason=NO_AER)


def fatal(view: PciView) -> RuleResult:
    """The link failed; data that was read over it then cannot be trusted.

    Source: growth of ``aer_dev_fatal``, TOTAL_ERR_FATAL [count]; the kernel log.
    """
    found = Finding("pci.aer.fatal", Severity.UNHEALTHY, f"fatal PCIe errors: at least 1 in {HOUR}")
    return (
        found
        if LogCode.AER_FATAL in view.log_facts
        else _error_counter(view, view.fatal, "aer_dev_fatal", found)
    )


def nonfatal(view: PciView) -> RuleResult:
    """A transaction was lost; the link itself still works.

    Source: growth of ``aer_dev_nonfatal``, TOTAL_ERR_NONFATAL [count]; the kernel log.
    """
    found = Finding("pci.aer.nonfatal", Severity.DEGRADED, f"non-fatal PCIe errors: at least 1 in {HOUR}")
    if LogCode.AER_NONFATAL in view.log_facts:
        return found
    return _error_counter(view, view.nonfatal, "aer_dev_nonfatal", found)


def correctable(view: PciView) -> RuleResult:
    """The link corrects errors more often than the limit allows.

    Source: growth of ``aer_dev_correctable``, TOTAL_ERR_COR [count]; not the kernel log, which limits its
    lines.
    """
    evidence = f"correctable PCIe errors: at least {CORRECTABLE_ERRORS} in {HOUR}"
    found = Finding("pci.aer.correctable", Severity.DEGRADED, evidence)
    return _error_counter(view, view.correctable, "aer_dev_correctable", found, CORRECTABLE_ERRORS)


def fault(view: PciView) -> RuleResult:
    """The link to the function went down or could not be recovered, although the function is on the bus.

    Source: lines of the kernel log about the function or the port above it.
    """
    if not isinstance(view.function, PciSample):
        return _not_on_bus(view)
    if fact := view.log_facts.get(LogCode.PCI_FAULT):
        return Finding("pci.fault", Severity.DEGRADED, f"the kernel log: {fact.text}")
    return no_lines_result(view.log_state)


_RESEAT: Final = "reseat the card, check riser and cables; compare with other slots"
_COPY: Final = "in a copy of sysfs (--sysfs-root) add {} to {} in bus/pci/devices/<address>/{}"

PCI_RULES: Final = (
    Rule(
        code="pci.missing",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="pci",
        threshold="any declared function",
        why="a claim may hold a device that cannot be reached",
        advice="check lspci; rescan the bus or reboot; if it stays missing, reseat or replace it",
        evaluate=missing,
        listed_first=True,
        try_it="declare a PCI device and echo 1 > /sys/bus/pci/devices/<address>/remove",
    ),
    Rule(
        code="pci.unbound",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="pci",
        threshold="any other driver than declared, or than at start",
        why="the workload has lost the device, or another driver uses it now",
        advice="echo <address> > /sys/bus/pci/drivers/<driver>/bind, or correct the declaration",
        evaluate=unbound,
        try_it="declare a PCI device and echo <address> > /sys/bus/pci/devices/<address>/driver/unbind",
    ),
    Rule(
        code="pci.aer.fatal",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"1 error in {HOUR}",
        why="the link was reset; the workload has lost the device",
        advice="drain the device and reset it; " + _RESEAT,
        evaluate=fatal,
        counter=True,
        window_s=WINDOW_S,
        try_it=_COPY.format(1, "TOTAL_ERR_FATAL", "aer_dev_fatal"),
    ),
    Rule(
        code="pci.aer.nonfatal",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"1 error in {HOUR}",
        why="a transfer failed, and links with such errors often fail completely later",
        advice=_RESEAT,
        evaluate=nonfatal,
        counter=True,
        window_s=WINDOW_S,
        try_it=_COPY.format(1, "TOTAL_ERR_NONFATAL", "aer_dev_nonfatal"),
    ),
    Rule(
        code="pci.aer.correctable",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"{CORRECTABLE_ERRORS} errors in {HOUR}",
        why="each costs some time; this many indicate a bad contact or lane",
        advice=_RESEAT,
        evaluate=correctable,
        counter=True,
        window_s=WINDOW_S,
        try_it=_COPY.format(CORRECTABLE_ERRORS, "TOTAL_ERR_COR", "aer_dev_correctable"),
    ),
    Rule(
        code="pci.link_width",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold="fewer lanes than at start, and than supported",
        why="transfers are slower in proportion to the lost lanes",
        advice=_RESEAT,
        evaluate=link_width,
        try_it="in a copy of sysfs (--sysfs-root) write 8 into bus/pci/devices/<address>/current_link_width",
    ),
    Rule(
        code="pci.fault",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"a line in the last {HOUR}",
        why="a link that went down once is likely to do so again",
        advice=_RESEAT,
        evaluate=fault,
        try_it="declare a PCI device, and for it or the port above it: "
        "echo '<3>pcieport <address>: pciehp: Slot(1): Link Down' > /dev/kmsg",
    ),
)
