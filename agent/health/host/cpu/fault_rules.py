"""What CPUs and the kernel on them tell of: machine checks, and CPUs that no longer come back.

Both are told once. A machine check is counted by the kernel, too; the log alone tells of a lockup.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.cpu.log_facts import LOCKUP_HELD_S
from agent.health.host.cpu.state import CpuView, named
from agent.health.kernel_log.silence import silence
from agent.health.rules import OK, RuleResult, Unreadable
from agent.health.words import duration
from agent.model.cpuset import CpuSet
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Absence


def cpu_machine_check(view: CpuView) -> RuleResult:
    """The hardware has found an error that it could not correct, since boot.

    The count stands until the next boot, and so does the finding. What firmware reports without a word of
    where it was is the node's.

    Source: row ``MCE`` of ``/proc/interrupts`` [exceptions]; lines of the kernel log.
    """
    if mine := view.machine_checks & view.cpus:
        evidence = f"uncorrected machine check on {named(mine)} since boot"
        return Finding("cpu.machine_check", Severity.UNHEALTHY, evidence)
    counting = view.cores.checks
    if isinstance(counting, int):
        return OK
    if counting.absence is Absence.UNREADABLE:
        return Unreadable("MCE of /proc/interrupts", counting)
    return silence(view.log_state)


def cpu_machine_check_corrected(view: CpuView) -> RuleResult:
    """The hardware had to correct errors of one CPU more often than the limit allows, within the window.

    The window is kept to a twelfth. Lines from before the agent's start count if the first of them is within
    it.

    Source: lines of the kernel log that name the CPU.
    """
    limits = view.limits
    if mine := view.corrected & view.cpus:
        window = duration(limits.correctable_window_s)
        evidence = (
            f"at least {limits.correctable_errors} corrected machine checks on {named(mine)} in {window}"
        )
        return Finding("cpu.machine_check.corrected", Severity.DEGRADED, evidence)
    return silence(view.log_state)


def _lockup(view: CpuView, code: str, severity: Severity, locked: CpuSet, what: str) -> RuleResult:
    if mine := locked & view.cpus:
        return Finding(code, severity, f"{what} lockup on {named(mine)}")
    return silence(view.log_state)


def cpu_lockup_hard(view: CpuView) -> RuleResult:
    """A CPU has not even taken interrupts for ten seconds or more.

    Source: lines of the kernel log, of its NMI watchdog.
    """
    return _lockup(view, "cpu.lockup.hard", Severity.UNHEALTHY, view.hard_lockups, "hard")


def cpu_lockup_soft(view: CpuView) -> RuleResult:
    """A CPU has been kept by one task in the kernel for twenty seconds or more.

    Source: lines of the kernel log, of its watchdog.
    """
    return _lockup(view, "cpu.lockup.soft", Severity.DEGRADED, view.soft_lockups, "soft")


FAULT_RULES: Final = (
    Rule(
        code="cpu.machine_check",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="cores",
        threshold="1 machine check since boot",
        why="data was lost or a program was killed, and the part that did it is still there",
        advice="drain the node; look for mce and EDAC lines in the kernel log, and for the BMC's event log; "
        "have the part replaced, then boot",
        judge=cpu_machine_check,
        try_it="echo '<0>mce: [Hardware Error]: CPU 1: Machine Check Exception: 5 Bank 4: b200000000070f0f' "
        "> /dev/kmsg",
    ),
    Rule(
        code="cpu.machine_check.corrected",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold="24 machine checks of one CPU in 1 d (errors.correctable, errors.window)",
        why="what had to be corrected that often will not be correctable for long",
        advice="look for mce lines in the kernel log; plan a replacement before the errors are uncorrectable",
        judge=cpu_machine_check_corrected,
        try_it="for i in $(seq 24); do echo '<6>mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 5: "
        "9c00000000010090' > /dev/kmsg; done",
    ),
    Rule(
        code="cpu.lockup.hard",
        severity=Severity.UNHEALTHY,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"1 lockup in the last {duration(LOCKUP_HELD_S)}",
        why="nothing runs on the CPU any more, and what waits for it waits for ever",
        advice="reboot the node; if it comes again, look for firmware updates and machine checks",
        judge=cpu_lockup_hard,
        try_it="echo '<0>watchdog: Watchdog detected hard LOCKUP on cpu 1' > /dev/kmsg",
    ),
    Rule(
        code="cpu.lockup.soft",
        severity=Severity.DEGRADED,
        blame=Blame.DRIVER,
        source="kmsg",
        threshold=f"1 lockup in the last {duration(LOCKUP_HELD_S)}",
        why="no other task gets the CPU: a driver or the kernel itself spins, or a hypervisor took it away",
        advice="read the stack in the kernel log: the function at its top is the one that spins",
        judge=cpu_lockup_soft,
        try_it="echo '<0>watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [cat:123]' > /dev/kmsg",
    ),
)
