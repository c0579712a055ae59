"""What can be wrong with PCI functions that drivers declare: gone, given away, badly connected.

What is wrong with a GPU's connection is judged by what NVML says of it, in agent.health.gpu.pcie.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.pci.state import WINDOW_S, PciView
from agent.health.kernel_log.silence import silence
from agent.health.kernel_log.values import LogCode
from agent.health.rules import (
    OK,
    Growth,
    RuleNotApplicable,
    RuleNotEvaluated,
    RuleResult,
    Unreadable,
    over_limit,
)
from agent.health.words import duration
from agent.model.health import Blame, Finding, Severity
from agent.model.pci import PciSample
from agent.model.reading import Absence, Missing

CORRECTABLE: Final = 100
"""Nobody publishes a limit. A sound link has some in a day."""
HOUR: Final = duration(WINDOW_S)
NO_AER: Final = "no PCIe error counters: the kernel or the platform has no AER"
UNLOOKED: Final = RuleNotEvaluated("nobody has looked at the PCI bus yet")
OFF_THE_BUS: Final = RuleNotEvaluated("it is not on the PCI bus")


def missing(view: PciView) -> RuleResult:
    """A function that a driver declares is not on the bus.

    Source: ``/sys/bus/pci/devices/<address>``.
    """
    function = view.function
    if isinstance(function, PciSample):
        return OK
    if not view.looked:
        return UNLOOKED
    if isinstance(function, Missing):
        if function.absence is Absence.UNREADABLE:
            return Unreadable("bus/pci/devices", function)
        return Finding("pci.missing", Severity.UNHEALTHY, "the machine has no PCI bus")
    if view.start is not None:
        evidence = f"{view.address} is gone from the PCI bus"
        if fact := view.told.get(LogCode.PCI_FAULT):
            evidence += f"; the kernel log: {fact.text}"
        return Finding("pci.missing", Severity.UNHEALTHY, evidence)
    advice = "correct the declaration, or look for the device in lspci and rescan the bus"
    evidence = f"no {view.address} on the PCI bus"
    return Finding("pci.missing", Severity.UNHEALTHY, evidence, advice, Blame.CONFIGURATION)


def _unseen(view: PciView) -> RuleNotEvaluated:
    """Why a function that is not there cannot be judged; pci.missing says the rest."""
    return OFF_THE_BUS if view.looked else UNLOOKED


def unbound(view: PciView) -> RuleResult:
    """Another driver is bound to the function than its declaration names, or than was at start; or none.

    Source: ``/sys/bus/pci/devices/<address>/driver``.
    """
    function = view.function
    if not isinstance(function, PciSample):
        return _unseen(view)
    at_start = view.start.driver if view.start else ""
    wanted = view.driver or at_start
    if not wanted:
        return RuleNotApplicable("no driver is declared, and none was bound so far")
    if function.driver == wanted:
        return OK
    known = f"{wanted} is declared" if view.driver else f"{wanted} was at start"
    evidence = f"{function.driver or 'no driver'} is bound; {known}"
    return Finding("pci.unbound", Severity.UNHEALTHY, evidence)


def link_width(view: PciView) -> RuleResult:
    """The link has fewer lanes than at start, and than it can have.

    Source: ``current_link_width`` and ``max_link_width`` [lanes].
    """
    function = view.function
    if not isinstance(function, PciSample):
        return _unseen(view)
    at_start = view.start.width if view.start else function.width
    if isinstance(function.width, Missing):
        if function.width.absence is Absence.UNREADABLE or isinstance(at_start, int):
            return Unreadable("current_link_width", function.width)
        return RuleNotApplicable("it has no PCIe link of its own")
    most = function.width_max if isinstance(function.width_max, int) else at_start
    if isinstance(at_start, Missing) or isinstance(most, Missing) or function.width >= min(at_start, most):
        return OK
    evidence = f"{function.width} of {most} lanes, {at_start} at start"
    return Finding("pci.link_width", Severity.DEGRADED, evidence)


def _too_many(view: PciView, growth: Growth, file: str, found: Finding, limit: int = 1) -> RuleResult:
    """The answer of a rule that has one counter."""
    if not isinstance(view.function, PciSample):
        return _unseen(view)
    return over_limit(growth, limit, WINDOW_S, found, counter=file, reason=NO_AER)


def fatal(view: PciView) -> RuleResult:
    """The link broke; what was read over it then is not to be trusted.

    Source: ``aer_dev_fatal``, TOTAL_ERR_FATAL [count], its growth; the kernel log.
    """
    found = Finding("pci.aer.fatal", Severity.UNHEALTHY, f"fatal PCIe errors: at least 1 in {HOUR}")
    return found if LogCode.AER_FATAL in view.told else _too_many(view, view.fatal, "aer_dev_fatal", found)


def nonfatal(view: PciView) -> RuleResult:
    """A transaction was lost; the link itself goes on.

    Source: ``aer_dev_nonfatal``, TOTAL_ERR_NONFATAL [count], its growth; the kernel log.
    """
    found = Finding("pci.aer.nonfatal", Severity.DEGRADED, f"non-fatal PCIe errors: at least 1 in {HOUR}")
    if LogCode.AER_NONFATAL in view.told:
        return found
    return _too_many(view, view.nonfatal, "aer_dev_nonfatal", found)


def correctable(view: PciView) -> RuleResult:
    """The link corrects errors more often than the limit allows.

    Source: ``aer_dev_correctable``, TOTAL_ERR_COR [count], its growth. Not the kernel log, which limits how
    many lines it writes of them.
    """
    evidence = f"correctable PCIe errors: at least {CORRECTABLE} in {HOUR}"
    found = Finding("pci.aer.correctable", Severity.DEGRADED, evidence)
    return _too_many(view, view.correctable, "aer_dev_correctable", found, CORRECTABLE)


def fault(view: PciView) -> RuleResult:
    """The link to the function went down, or could not be recovered, and the function is there all the same.

    Source: lines of the kernel log about the function, or the port above it.
    """
    if not isinstance(view.function, PciSample):
        return _unseen(view)
    if fact := view.told.get(LogCode.PCI_FAULT):
        return Finding("pci.fault", Severity.DEGRADED, f"the kernel log: {fact.text}")
    return silence(view.log_state)


_RESEAT: Final = "reseat the card, check riser and cables; compare with other slots"
_COPY: Final = "in a copy of sysfs (--sysfs-root) add {} to {} in bus/pci/devices/<address>/{}"

PCI_RULES: Final = (
    Rule(
        code="pci.missing",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="pci",
        threshold="any declared function",
        why="a claim may hold a device that nobody can reach",
        advice="look for it in lspci; rescan the bus or reboot; if it stays away reseat or replace it",
        judge=missing,
        leads=True,
        try_it="declare a PCI device and echo 1 > /sys/bus/pci/devices/<address>/remove",
    ),
    Rule(
        code="pci.unbound",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        source="pci",
        threshold="any other driver than the declared one, or than that of the start",
        why="what runs on the device has lost it, or somebody else has it now",
        advice="echo <address> > /sys/bus/pci/drivers/<driver>/bind, or correct the declaration",
        judge=unbound,
        try_it="declare a PCI device and echo <address> > /sys/bus/pci/devices/<address>/driver/unbind",
    ),
    Rule(
        code="pci.aer.fatal",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"1 error in {HOUR}",
        why="the link was reset; the workload that used it has lost its device",
        advice="drain the device and reset it; " + _RESEAT,
        judge=fatal,
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
        why="somebody's transfer failed, and a link that begins so often breaks",
        advice=_RESEAT,
        judge=nonfatal,
        counter=True,
        window_s=WINDOW_S,
        try_it=_COPY.format(1, "TOTAL_ERR_NONFATAL", "aer_dev_nonfatal"),
    ),
    Rule(
        code="pci.aer.correctable",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"{CORRECTABLE} errors in {HOUR}",
        why="each costs a little time; so many mean a bad contact or a bad lane",
        advice=_RESEAT,
        judge=correctable,
        counter=True,
        window_s=WINDOW_S,
        try_it=_COPY.format(CORRECTABLE, "TOTAL_ERR_COR", "aer_dev_correctable"),
    ),
    Rule(
        code="pci.link_width",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold="fewer lanes than at start, and than it can have",
        why="transfers to and from the machine are slower by the lanes that are lost",
        advice=_RESEAT,
        judge=link_width,
        try_it="in a copy of sysfs (--sysfs-root) write 8 into bus/pci/devices/<address>/current_link_width",
    ),
    Rule(
        code="pci.fault",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="pci",
        threshold=f"a line in the last {HOUR}",
        why="a link that went down once will do so again",
        advice=_RESEAT,
        judge=fault,
        try_it="declare a PCI device, and for it or the port above it: "
        "echo '<3>pcieport <address>: pciehp: Slot(1): Link Down' > /dev/kmsg",
    ),
)
