"""Health rules for PCI functions that drivers declare: presence, bound driver, link width and link errors.

The rules also evaluate the PCI functions of declared NICs. The links of GPUs have rules in
agent.health.gpu.pcie.
"""

from functools import partial
from typing import Final

from agent.health.host.machine.state import LASTING_FAULT_HELD_S
from agent.health.host.pci.state import ERROR_WINDOW_S, STOPPED_CODES, PciRuleInput, nic_faults
from agent.health.kernel_log.facts import KernelLogCode, no_log_lines_result
from agent.health.rules import (
    OK,
    CounterGrowth,
    Rule,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    counter_limit_result,
    format_duration,
)
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.machine_samples import PciSample
from agent.model.reading import Absence, Missing

CORRECTABLE_ERRORS: Final = 100
"""Number of correctable errors within the window that is a fault: a sound link has a few errors in a day."""
HOUR: Final = format_duration(ERROR_WINDOW_S)
DAY: Final = format_duration(LASTING_FAULT_HELD_S)
NO_AER: Final = "no PCIe error counters: the kernel or the platform has no AER"
BUS_NOT_READ: Final = RuleInconclusive("the PCI bus has not been read yet")
OFF_THE_BUS: Final = RuleInconclusive("the PCI function is not on the PCI bus")


def detect_missing_function(view: PciRuleInput) -> RuleResult:
    """A PCI function that a driver declares is not on the PCI bus.

    Source: ``/sys/bus/pci/devices/<address>``.
    """
    function = view.function
    if isinstance(function, PciSample):
        return OK
    if not view.has_bus_been_read:
        return BUS_NOT_READ
    if isinstance(function, Missing):
        if function.absence is Absence.UNREADABLE:
            return RuleInputUnreadable("bus/pci/devices", function)
        return Finding("pci.missing", Severity.UNHEALTHY, "the machine has no PCI bus")
    if view.start is not None:
        evidence = f"{view.address} is no longer on the PCI bus"
        if fact := view.log_facts.get(KernelLogCode.PCI_FAULT):
            evidence += f"; the kernel log: {fact.text}"
        return Finding("pci.missing", Severity.UNHEALTHY, evidence)
    advice = "correct the declaration, or check lspci and rescan the bus"
    evidence = f"no {view.address} on the PCI bus"
    return Finding(
        "pci.missing", Severity.UNHEALTHY, evidence, advice, Blame.CONFIGURATION, repair=Repair.NONE
    )


def _not_on_bus_result(view: PciRuleInput) -> RuleInconclusive:
    """Return the result of a PCI rule for a function that is not on the PCI bus. Only the rule pci.missing
    reports the missing function."""
    return OFF_THE_BUS if view.has_bus_been_read else BUS_NOT_READ


def detect_wrong_driver(view: PciRuleInput) -> RuleResult:
    """The declared kernel driver, or the one bound at start, is not bound to the PCI function.

    Source: ``/sys/bus/pci/devices/<address>/driver``.
    """
    function = view.function
    if not isinstance(function, PciSample):
        return _not_on_bus_result(view)
    at_start = view.start.driver if view.start else ""
    expected = view.declared_driver or at_start
    if not expected:
        return RuleNotApplicable(
            "no kernel driver is declared, and none was bound to the PCI function so far"
        )
    if function.driver == expected:
        return OK
    basis = "declared" if view.declared_driver else "bound at start"
    evidence = f"{function.driver or 'no driver'} is bound; {basis}: {expected}"
    return Finding("pci.unbound", Severity.UNHEALTHY, evidence)


def detect_lost_lanes(view: PciRuleInput) -> RuleResult:
    """The PCIe link has fewer lanes than at start, and fewer than the device supports.

    Source: ``current_link_width`` and ``max_link_width`` [lanes].
    """
    function = view.function
    if not isinstance(function, PciSample):
        return _not_on_bus_result(view)
    at_start = view.start.width if view.start else function.width
    if isinstance(function.width, Missing):
        if function.width.absence is Absence.UNREADABLE or isinstance(at_start, int):
            return RuleInputUnreadable("current_link_width", function.width)
        return RuleNotApplicable("the PCI function has no PCIe link of its own")
    widest = function.width_max if isinstance(function.width_max, int) else at_start
    if isinstance(at_start, Missing) or isinstance(widest, Missing):
        return OK
    if function.width >= min(at_start, widest):
        return OK
    evidence = f"{function.width} of {widest} lanes, {at_start} at start"
    return Finding("pci.link_width", Severity.DEGRADED, evidence)


def _error_counter_result(
    view: PciRuleInput, growth: CounterGrowth, file: str, found: Finding, limit: int = 1
) -> RuleResult:
    """Return the result of a rule that compares the growth of one error counter of a PCIe link with a limit.

    Args:
        growth: Growth of the counter within ERROR_WINDOW_S.
        file: File of sysfs with the counter, for the result if the file cannot be read.
        found: Result if the growth reaches the limit.
        limit: Smallest growth that is a fault.
    """
    if not isinstance(view.function, PciSample):
        return _not_on_bus_result(view)
    return counter_limit_result(growth, limit, ERROR_WINDOW_S, found, counter=file, reason=NO_AER)


def detect_fatal_errors(view: PciRuleInput) -> RuleResult:
    """The PCIe link had a fatal error; data that was read over it at that time cannot be trusted.

    Source: growth of ``aer_dev_fatal``, TOTAL_ERR_FATAL [count]; the kernel log.
    """
    found = Finding("pci.aer.fatal", Severity.UNHEALTHY, f"fatal PCIe errors: at least 1 in {HOUR}")
    if fact := view.log_facts.get(KernelLogCode.AER_FATAL):
        return found._replace(since=fact.since)
    return _error_counter_result(view, view.fatal, "aer_dev_fatal", found)


def detect_nonfatal_errors(view: PciRuleInput) -> RuleResult:
    """The PCIe link had a non-fatal error: a transaction was lost, but the link still works.

    Source: growth of ``aer_dev_nonfatal``, TOTAL_ERR_NONFATAL [count]; the kernel log.
    """
    found = Finding("pci.aer.nonfatal", Severity.DEGRADED, f"non-fatal PCIe errors: at least 1 in {HOUR}")
    if fact := view.log_facts.get(KernelLogCode.AER_NONFATAL):
        return found._replace(since=fact.since)
    return _error_counter_result(view, view.nonfatal, "aer_dev_nonfatal", found)


def detect_frequent_correctable_errors(view: PciRuleInput) -> RuleResult:
    """The PCIe link corrected errors more often than the limit allows, within the window.

    Source: growth of ``aer_dev_correctable``, TOTAL_ERR_COR [count]; not the kernel log, which
    limits its lines.
    """
    evidence = f"correctable PCIe errors: at least {CORRECTABLE_ERRORS} in {HOUR}"
    found = Finding("pci.aer.correctable", Severity.DEGRADED, evidence)
    return _error_counter_result(view, view.correctable, "aer_dev_correctable", found, CORRECTABLE_ERRORS)


def detect_link_fault(view: PciRuleInput) -> RuleResult:
    """The link of a PCI function went down or could not be recovered, but the function is on the PCI bus.

    Source: lines of the kernel log about the PCI function or the port above it.
    """
    if not isinstance(view.function, PciSample):
        return _not_on_bus_result(view)
    if fact := view.log_facts.get(KernelLogCode.PCI_FAULT):
        evidence = f"the kernel log: {fact.text}"
        return Finding("pci.fault", Severity.DEGRADED, evidence, since=fact.since)
    return no_log_lines_result(view.log_state)


def _nic_result(view: PciRuleInput, code: str, *log_codes: KernelLogCode) -> RuleResult:
    """Return a rule's result: the worst fault of a NIC in kernel-log lines with one of ``log_codes``."""
    if not isinstance(view.function, PciSample):
        return _not_on_bus_result(view)
    faults = [fault for fault in nic_faults(view.log_facts) if fault.fact.code in log_codes]
    if not faults:
        return no_log_lines_result(view.log_state)
    worst = max(faults, key=lambda fault: (fault.severity, fault.fact.last.mono_ns))
    evidence = f"{worst.text}; the kernel log: {worst.fact.text}"
    return Finding(code, worst.severity, evidence, since=worst.fact.since)


def detect_stopped_nic(view: PciRuleInput) -> RuleResult:
    """A NIC has stopped: its firmware or hardware failed, or it does not answer its driver.

    Source: lines of the kernel log, from mlx5_core and efa; a line about a recovery ends it.
    """
    return _nic_result(view, "pci.nic.stopped", *STOPPED_CODES)


def detect_hot_nic(view: PciRuleInput) -> RuleResult:
    """The firmware of the NIC reported a high temperature; the NIC still works.

    Source: lines of the kernel log, from mlx5_core.
    """
    return _nic_result(view, "pci.nic.hot", KernelLogCode.NIC_HEAT)


def detect_nic_tx_timeout(view: PciRuleInput) -> RuleResult:
    """A transmit queue of the NIC hung.

    Source: lines of the kernel log that name the PCI address, from the network watchdog and mlx5_core.
    """
    return _nic_result(view, "pci.nic.tx_timeout", KernelLogCode.TX_TIMEOUT)


def detect_nic_power_shortage(view: PciRuleInput) -> RuleResult:
    """The slot of the NIC does not supply enough power.

    Source: lines of the kernel log, from mlx5_core; a line about sufficient power ends it.
    """
    return _nic_result(view, "pci.nic.power", KernelLogCode.NIC_POWER)


def detect_nic_module_fault(view: PciRuleInput) -> RuleResult:
    """The transceiver or cable of the NIC has an error, or is unplugged.

    Source: lines of the kernel log, from mlx5_core; a line about a plugged cable ends it.
    """
    return _nic_result(view, "pci.nic.module", KernelLogCode.NIC_MODULE)


def detect_nic_register_error(view: PciRuleInput) -> RuleResult:
    """The NIC refused an access to a register.

    Source: lines of the kernel log, from mlx5_core.
    """
    return _nic_result(view, "pci.nic.register", KernelLogCode.NIC_REGISTER)


_RESEAT: Final = "reseat the card, check riser and cables; compare with other slots"
_TRY_LINE: Final = "declare a PCI device, and for it: echo '<3>{}' > /dev/kmsg"
_TRY_SYSFS_COPY: Final = "in a copy of sysfs (--sysfs-root) add {} to {} in bus/pci/devices/<address>/{}"

_pci_rule = partial(
    Rule, severity=Severity.DEGRADED, blame=Blame.HARDWARE, source="pci", repair=Repair.INSPECT_HARDWARE
)
"""Constructor of a ``Rule`` for PCI functions; defaults: severity ``degraded``, blame on the hardware."""
PCI_RULES: Final = (
    _pci_rule(
        code="pci.missing",
        severity=Severity.UNHEALTHY,
        threshold="any declared PCI function",
        why="a claim may hold a device that cannot be reached",
        advice="check lspci; rescan the bus or reboot; if it stays missing, reseat or replace it",
        repair=Repair.REBOOT_NODE,
        evaluate=detect_missing_function,
        listed_first=True,
        try_it="declare a PCI device and echo 1 > /sys/bus/pci/devices/<address>/remove",
    ),
    _pci_rule(
        code="pci.unbound",
        severity=Severity.UNHEALTHY,
        blame=Blame.CONFIGURATION,
        threshold="any other driver than declared, or than at start",
        why="the workload has lost the device, or another driver uses it now",
        advice="echo <address> > /sys/bus/pci/drivers/<driver>/bind, or correct the declaration",
        repair=Repair.RELOAD_DRIVER,
        evaluate=detect_wrong_driver,
        try_it="declare a PCI device and echo <address> > /sys/bus/pci/devices/<address>/driver/unbind",
    ),
    _pci_rule(
        code="pci.aer.fatal",
        severity=Severity.UNHEALTHY,
        threshold=f"1 error in {HOUR}",
        why="the link was reset; the workload has lost the device",
        advice="drain the device and reset it; " + _RESEAT,
        repair=Repair.RESET_DEVICE,
        evaluate=detect_fatal_errors,
        counts_growth=True,
        window_s=ERROR_WINDOW_S,
        try_it=_TRY_SYSFS_COPY.format(1, "TOTAL_ERR_FATAL", "aer_dev_fatal"),
    ),
    _pci_rule(
        code="pci.aer.nonfatal",
        threshold=f"1 error in {HOUR}",
        why="a transfer failed, and links with such errors often fail completely later",
        advice=_RESEAT,
        evaluate=detect_nonfatal_errors,
        counts_growth=True,
        window_s=ERROR_WINDOW_S,
        try_it=_TRY_SYSFS_COPY.format(1, "TOTAL_ERR_NONFATAL", "aer_dev_nonfatal"),
    ),
    _pci_rule(
        code="pci.aer.correctable",
        threshold=f"{CORRECTABLE_ERRORS} errors in {HOUR}",
        why="each costs some time; this many indicate a bad contact or lane",
        advice=_RESEAT,
        evaluate=detect_frequent_correctable_errors,
        counts_growth=True,
        window_s=ERROR_WINDOW_S,
        try_it=_TRY_SYSFS_COPY.format(CORRECTABLE_ERRORS, "TOTAL_ERR_COR", "aer_dev_correctable"),
    ),
    _pci_rule(
        code="pci.link_width",
        threshold="fewer lanes than at start, and than supported",
        why="transfers are slower in proportion to the lost lanes",
        advice=_RESEAT,
        evaluate=detect_lost_lanes,
        try_it="in a copy of sysfs (--sysfs-root) write 8 into bus/pci/devices/<address>/current_link_width",
    ),
    _pci_rule(
        code="pci.fault",
        threshold=f"a line in the last {HOUR}",
        why="a link that went down once is likely to do so again",
        advice=_RESEAT,
        evaluate=detect_link_fault,
        try_it="declare a PCI device, and for it or the port above it: "
        "echo '<3>pcieport <address>: pciehp: Slot(1): Link Down' > /dev/kmsg",
    ),
    _pci_rule(
        code="pci.nic.stopped",
        severity=Severity.UNHEALTHY,
        threshold=f"a line in the last {DAY}, and no later line that it has recovered",
        why="no traffic passes, and drivers hang that wait for it",
        advice="reset the NIC or reboot the node; update its firmware; replace it if it happens again",
        evaluate=detect_stopped_nic,
        try_it=_TRY_LINE.format("mlx5_core <address>: synd 0x8: unrecoverable hardware error"),
    ),
    _pci_rule(
        code="pci.nic.hot",
        threshold=f"a line in the last {HOUR}",
        why="a NIC that gets hotter limits its speed or switches itself off",
        advice="check fans, inlet temperature and the air flow in front of the slot",
        evaluate=detect_hot_nic,
        try_it=_TRY_LINE.format("mlx5_core <address>: synd 0x10: High temperature"),
    ),
    _pci_rule(
        code="pci.nic.tx_timeout",
        threshold=f"a line in the last {HOUR}",
        why="the interface sent nothing for seconds; its driver resets it",
        advice="check cable, firmware and the lines before it in the kernel log; reset the NIC",
        evaluate=detect_nic_tx_timeout,
        try_it=_TRY_LINE.format("mlx5_core <address> eth0: TX timeout detected"),
    ),
    _pci_rule(
        code="pci.nic.power",
        threshold=f"a line in the last {DAY}, and no later line about sufficient power",
        why="the NIC may limit its speed, and transceivers may stay off",
        advice="check the slot's power limit in the BIOS and with lspci -vv; use another slot",
        evaluate=detect_nic_power_shortage,
        try_it=_TRY_LINE.format("mlx5_core <address>: Detected insufficient power on the PCIe slot (27W)."),
    ),
    _pci_rule(
        code="pci.nic.module",
        threshold=f"a line in the last {DAY}, and no later line about a plugged cable; unplugged: info",
        why="the port is down, or goes down when the transceiver gets too hot",
        advice="see the transceiver's temperature in ethtool -m; clean, reseat or replace it",
        evaluate=detect_nic_module_fault,
        try_it=_TRY_LINE.format(
            "mlx5_core <address>: Port module event[error]: module 0, Cable error, High Temperature"
        ),
    ),
    _pci_rule(
        code="pci.nic.register",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        threshold=f"a line in the last {HOUR}",
        why="nothing fails: mostly a monitoring tool reads a register that the NIC does not have",
        advice="none; to end the lines, update the tool that reads the register, or the firmware",
        evaluate=detect_nic_register_error,
        try_it=_TRY_LINE.format(
            "mlx5_core <address>: ACCESS_REG(0x805) op_mod(0x1) failed, status bad resource(0x5), "
            "syndrome (0x305684), err(-22)"
        ),
    ),
)
