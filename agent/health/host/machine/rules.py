"""Health rules for the machine as a whole: hung tasks, hardware errors, resource pressure, kernel-log gaps.

The findings of these rules change the health of no device. CPUs, memory modules and declared PCI devices have
their own rules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from agent.health.host.machine.state import (
    CORRECTED_WINDOW_S,
    FAULT_HELD_S,
    LASTING_FAULT_HELD_S,
    RELATED_NS,
    UNNAMED_UNCORRECTED,
    MachineRuleInput,
)
from agent.health.kernel_log.facts import KernelLogCode, KernelLogFact, earliest_line, no_log_lines_result
from agent.health.rules import (
    Rule,
    RuleInconclusive,
    RuleResult,
    counter_limit_result,
    format_at_least,
    format_duration,
)
from agent.model.health import Blame, Finding, Repair, Severity

MAX_NAMES_LISTED: Final = 3
"""Largest number of names (disks, tasks, filesystems) that the evidence of one finding lists."""


def format_newest_names(
    facts: Sequence[KernelLogFact],
    name_of: Callable[[KernelLogFact], str],
    is_worse: Callable[[KernelLogFact], bool] = lambda _: False,
) -> str:
    """Format the different names of the objects that kernel-log faults are about: ``a, b, c, 2 more``.

    The last number is the number of names left out.

    Args:
        facts: Faults that the kernel log reports, for example about disks.
        name_of: Returns the name of a fault's object. The names are in the order of ``facts``.
        is_worse: Returns whether a fault is worse than others. Of more than MAX_NAMES_LISTED names, those of
            worse faults are listed first, then those with the newest lines.
    """
    newest_first = sorted(facts, key=lambda fact: (not is_worse(fact), -fact.last.mono_ns))
    chosen = list(dict.fromkeys(map(name_of, newest_first)))[:MAX_NAMES_LISTED]
    names = dict.fromkeys(map(name_of, facts))
    rest = len(names) - len(chosen)
    more = [f"{format_at_least(rest)} more"] if rest else []
    return ", ".join([*(name for name in names if name in chosen), *more])


def format_line_count(facts: Sequence[KernelLogFact]) -> str:
    """Format the total number of kernel-log lines that report the faults ``facts``: ``7 lines of the kernel
    log``."""
    times = sum(fact.times for fact in facts)
    return f"{format_at_least(times)} line{'s' if times > 1 else ''} of the kernel log"


CORRECTED_ERRORS: Final = 100
"""Number of corrected PCIe errors within an hour that is a fault: a sound link has a few errors in a day."""
_AER_TEXTS: Final = {KernelLogCode.AER_FATAL: "fatal error", KernelLogCode.AER_NONFATAL: "uncorrected error"}


def detect_nvme_fault(view: MachineRuleInput) -> RuleResult:
    """An NVMe controller timed out, was reset, or was disabled by its driver.

    Source: lines of the kernel log, from the nvme driver.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.NVME)
    if not facts:
        return no_log_lines_result(view.log_state)
    errors = format_newest_names(facts, lambda fact: f"{fact.location}: {fact.values[0]}")
    evidence = f"{errors}; {format_line_count(facts)}"
    return Finding("node.nvme", Severity.DEGRADED, evidence, since=earliest_line(facts))


def detect_read_only_filesystem(view: MachineRuleInput) -> RuleResult:
    """The kernel made a filesystem read-only, or shut it down, after an error.

    Source: lines of the kernel log, from ext4, XFS, Btrfs and FAT.
    """
    facts = view.recent(LASTING_FAULT_HELD_S, KernelLogCode.READ_ONLY)
    if not facts:
        return no_log_lines_result(view.log_state)
    evidence = format_newest_names(facts, lambda fact: f"{fact.values[0]} on {fact.location}")
    return Finding("node.read_only", Severity.DEGRADED, evidence, since=earliest_line(facts))


def _is_fatal(fact: KernelLogFact) -> bool:
    return fact.code is KernelLogCode.AER_FATAL


def _pci_error_text(fact: KernelLogFact) -> str:
    return f"{fact.location}: {_AER_TEXTS.get(fact.code) or fact.values[0]}"


def detect_pci_fault(view: MachineRuleInput) -> RuleResult:
    """A PCI device had an uncorrected error, or its link went down.

    Source: lines of the kernel log, from AER, DPC and hot-plug.
    """
    facts = view.recent(
        FAULT_HELD_S, KernelLogCode.AER_FATAL, KernelLogCode.AER_NONFATAL, KernelLogCode.PCI_FAULT
    )
    if not facts:
        return no_log_lines_result(view.log_state)
    worst_first = sorted(facts, key=lambda fact: not _is_fatal(fact))
    errors = format_newest_names(worst_first, _pci_error_text, _is_fatal)
    evidence = f"{errors}; {format_line_count(facts)}"
    return Finding("node.pci", Severity.DEGRADED, evidence, since=earliest_line(facts))


def detect_frequent_pci_corrections(view: MachineRuleInput) -> RuleResult:
    """PCI links corrected errors more often than the limit allows, within an hour.

    Source: lines of the kernel log from AER; the kernel leaves some out.
    """
    grown = view.corrected_pci_errors
    if isinstance(grown.events, int) and grown.events >= CORRECTED_ERRORS:
        facts = view.recent(CORRECTED_WINDOW_S, KernelLogCode.AER_CORRECTED)
        rate = f"at least {CORRECTED_ERRORS} in {format_duration(CORRECTED_WINDOW_S)}"
        links = format_newest_names(facts, lambda fact: fact.location)
        evidence = f"corrected PCIe errors: {rate}, of {links}"
        return Finding("node.pci.corrected", Severity.INFO, evidence)
    if grown.span_s < CORRECTED_WINDOW_S:
        return RuleInconclusive(f"needs {format_duration(CORRECTED_WINDOW_S)} of history")
    return no_log_lines_result(view.log_state)


def detect_unlocated_hardware_error(view: MachineRuleInput) -> RuleResult:
    """The hardware reported an error, and no kernel-log line around that time names the faulty part.

    An exception that all CPUs counted does not name a CPU either; it stays until the next boot.

    Source: lines of the kernel log, from machine checks and firmware; row ``MCE`` of ``/proc/interrupts``.
    """
    uncorrected = [fact for fact in view.unlocated_errors if fact.code in UNNAMED_UNCORRECTED]
    sections = view.recent(LASTING_FAULT_HELD_S, KernelLogCode.HARDWARE_SECTION)
    if uncorrected:
        named = [
            section
            for section in sections
            if any(abs(section.last.mono_ns - fact.last.mono_ns) <= RELATED_NS for fact in uncorrected)
        ]
        part = format_newest_names(named, lambda fact: fact.location) if named else "an unnamed part"
        evidence = f"an uncorrected error of {part}; {format_line_count(uncorrected)}"
        return Finding("node.machine_check", Severity.DEGRADED, evidence, since=earliest_line(uncorrected))
    if view.is_check_unlocated:
        evidence = "uncorrected machine check of an unnamed part since boot: all CPUs counted it"
        return Finding("node.machine_check", Severity.DEGRADED, evidence)
    if view.unlocated_errors:
        evidence = f"corrected errors of an unnamed part; {format_line_count(view.unlocated_errors)}"
        since = earliest_line(view.unlocated_errors)
        return Finding("node.machine_check", Severity.INFO, evidence, since=since)
    return no_log_lines_result(view.log_state)


_log_rule = partial(
    Rule, severity=Severity.DEGRADED, blame=Blame.HARDWARE, source="kmsg", repair=Repair.INSPECT_HARDWARE
)
"""Constructor of a ``Rule`` for kernel-log lines; defaults: severity ``degraded``, blame on the hardware."""
HARDWARE_RULES: Final = (
    _log_rule(
        code="node.nvme",
        threshold=f"a line in the last {format_duration(FAULT_HELD_S)}",
        why="I/O on that disk hangs, and its data is lost if the controller does not recover",
        advice="run nvme smart-log; check the firmware, the slot and power saving; replace the disk",
        evaluate=detect_nvme_fault,
        try_it="echo '<4>nvme nvme0: I/O 12 QID 3 timeout, aborting' > /dev/kmsg",
    ),
    _log_rule(
        code="node.read_only",
        threshold=f"a line in the last {format_duration(LASTING_FAULT_HELD_S)}",
        why="writes to it fail: logs, images, state of pods",
        advice="find its disk in the kernel log; drain the node, check the filesystem, replace the disk",
        evaluate=detect_read_only_filesystem,
        try_it="echo '<2>EXT4-fs (sda1): Remounting filesystem read-only' > /dev/kmsg",
    ),
    _log_rule(
        code="node.pci",
        threshold=f"a line in the last {format_duration(FAULT_HELD_S)}",
        why="a transfer was lost, or the device with its state",
        advice="identify the device with lspci -s; reseat it, check risers and cables, update its firmware",
        evaluate=detect_pci_fault,
        try_it="echo '<3>nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)' > /dev/kmsg",
    ),
    _log_rule(
        code="node.pci.corrected",
        severity=Severity.INFO,
        threshold=f"{CORRECTED_ERRORS} lines in {format_duration(CORRECTED_WINDOW_S)}",
        why="no data is lost, but each error repeats a transfer, and a link that degrades further fails",
        advice="reseat the device, check risers and cables; compare with other slots",
        repair=Repair.NONE,
        evaluate=detect_frequent_pci_corrections,
        try_it="for i in $(seq 100); do echo '<4>nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, "
        "type=Physical Layer' > /dev/kmsg; done",
        counts_growth=True,
        window_s=CORRECTED_WINDOW_S,
    ),
    _log_rule(
        code="node.machine_check",
        threshold=f"a line in the last {format_duration(LASTING_FAULT_HELD_S)}",
        why="some part of the machine has errors; corrected ones do no harm yet",
        advice="find the part in later lines of the kernel log and in the BMC's event log; replace it",
        evaluate=detect_unlocated_hardware_error,
        try_it="echo '<2>{1}[Hardware Error]: event severity: recoverable' > /dev/kmsg",
    ),
)


def detect_lost_log_records(view: MachineRuleInput) -> RuleResult:
    """Records of the kernel log were overwritten before the agent read them.

    Source: gaps in the sequence numbers of ``/dev/kmsg``.
    """
    if not view.lost_log_records:
        return no_log_lines_result(view.log_state)
    records = f"{format_at_least(view.lost_log_records)} record{'s' if view.lost_log_records > 1 else ''}"
    evidence = f"{records} of the kernel log overwritten before the agent read them"
    return Finding("node.log.lost", Severity.INFO, evidence)


LOG_RULES: Final = (
    _log_rule(
        code="node.log.lost",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        threshold=f"a record in the last {format_duration(LASTING_FAULT_HELD_S)}",
        why="a fault that only the log reports, such as an XID or a machine check, may have been among them",
        advice="find out with dmesg what floods the log and stop it, or boot with a larger log_buf_len",
        repair=Repair.NONE,
        evaluate=detect_lost_log_records,
        try_it=r"printf '6,1,1,-;one\n6,9,9,-;two\n' > /tmp/log; drahealth run --kmsg /tmp/log",
    ),
)


CPU_PRESSURE_PERCENT: Final = 80
"""Share of time in which some task waits for a CPU that is a fault [%]; less is normal on a busy machine."""


def _pressure_result(view: MachineRuleInput, resource: str, percent: int, text: str) -> RuleResult:
    window_s = view.limits.pressure_window_s
    evidence = f"{text} for at least {percent} % of {format_duration(window_s)}"
    return counter_limit_result(
        view.waited[resource],
        percent * window_s * 10_000,  # [us] in one percent of a second
        window_s,
        Finding(f"node.pressure.{resource}", Severity.INFO, evidence),
        counter=f"/proc/pressure/{resource}",
        reason="no /proc/pressure: the kernel has no PSI, or it is not enabled",
    )


def detect_memory_pressure(view: MachineRuleInput) -> RuleResult:
    """All non-idle tasks waited for memory at the same time: for reclaim, or for pages to be read back.

    Source: growth of ``/proc/pressure/memory``, total of "full" [us].
    """
    return _pressure_result(view, "memory", view.limits.pressure_percent, "all tasks waited for memory")


def detect_io_pressure(view: MachineRuleInput) -> RuleResult:
    """All non-idle tasks waited for disks at the same time.

    Source: growth of ``/proc/pressure/io``, total of "full" [us].
    """
    return _pressure_result(view, "io", view.limits.pressure_percent, "all tasks waited for disks")


def detect_cpu_pressure(view: MachineRuleInput) -> RuleResult:
    """Runnable tasks waited for a CPU nearly all the time.

    Source: growth of ``/proc/pressure/cpu``, total of "some" [us].
    """
    return _pressure_result(view, "cpu", CPU_PRESSURE_PERCENT, "tasks waited for a CPU")


_pressure_rule = partial(
    Rule,
    severity=Severity.INFO,
    blame=Blame.WORKLOAD,
    repair=Repair.NONE,
    source="pressure",
    counts_growth=True,
    window_s=60,
)
"""Constructor of a ``Rule`` for the time that tasks wait (PSI); defaults: ``info``, blame on the workload."""
PRESSURE_RULES: Final = (
    _pressure_rule(
        code="node.pressure.memory",
        threshold="10 % of 60 s (pressure.percent, pressure.window)",
        why="the node spends its time on reclaim and is close to OOM kills",
        advice="find the pod by memory.pressure in its cgroup; give it a limit, or the node fewer pods",
        evaluate=detect_memory_pressure,
        limit_in_view="limits.pressure_percent",
        try_it="in a pod without a limit, use all memory that is left and go on using it",
    ),
    _pressure_rule(
        code="node.pressure.io",
        threshold="10 % of 60 s (pressure.percent, pressure.window)",
        why="the disks are too slow for the load, or one of them fails",
        advice="find the pod by io.pressure in its cgroup, and the disk with iostat -x",
        evaluate=detect_io_pressure,
        limit_in_view="limits.pressure_percent",
        try_it="write more than the disk can take: dd if=/dev/zero of=file oflag=direct, several at once",
    ),
    _pressure_rule(
        code="node.pressure.cpu",
        threshold=f"{CPU_PRESSURE_PERCENT} % of 60 s (pressure.window)",
        why="tasks wait longer than they run",
        advice="find the pod by cpu.pressure in its cgroup; give the node fewer pods if they are too slow",
        evaluate=detect_cpu_pressure,
        try_it="run two busy loops per CPU: yes > /dev/null",
    ),
)


_OOM_TEXTS: Final = {
    "cpuset": "the NUMA nodes of a cpuset had no memory left",
    "memory_policy": "the NUMA nodes of a memory policy had no memory left",
}


def detect_hung_tasks(view: MachineRuleInput) -> RuleResult:
    """Tasks have been blocked for minutes in an uninterruptible system call.

    Source: lines of the kernel log, from the hung-task detector.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.HUNG_TASK)
    if not facts:
        return no_log_lines_result(view.log_state)
    tasks = format_newest_names(facts, lambda fact: fact.location)
    evidence = f"blocked for minutes: {tasks}; {format_line_count(facts)}"
    return Finding("node.hung_task", Severity.DEGRADED, evidence, since=earliest_line(facts))


def detect_rcu_stall(view: MachineRuleInput) -> RuleResult:
    """A CPU or a task has delayed an RCU grace period for 20 seconds or more.

    Source: lines of the kernel log, from RCU's stall detector.
    """
    facts = view.recent(FAULT_HELD_S, KernelLogCode.RCU_STALL)
    if not facts:
        return no_log_lines_result(view.log_state)
    flavours = format_newest_names(facts, lambda fact: fact.values[0])
    evidence = f"{flavours} stalled; {format_line_count(facts)}"
    return Finding("node.rcu_stall", Severity.DEGRADED, evidence, since=earliest_line(facts))


def detect_out_of_memory(view: MachineRuleInput) -> RuleResult:
    """The machine ran out of memory and the kernel killed a task. Kills by a cgroup's limit do not count.

    Source: ``oom-kill:`` lines of the kernel log that name no cgroup.
    """
    facts = [fact for fact in view.recent(FAULT_HELD_S, KernelLogCode.OOM_KILL) if not fact.location]
    if not facts:
        return no_log_lines_result(view.log_state)
    constraint, task, _ = facts[-1].values
    killed = f", {task} was killed" if task else ""
    evidence = f"{_OOM_TEXTS.get(constraint, 'no memory left')}{killed}; {format_line_count(facts)}"
    return Finding("node.oom", Severity.DEGRADED, evidence, since=earliest_line(facts))


MACHINE_RULES: Final = (
    _log_rule(
        code="node.hung_task",
        blame=Blame.DRIVER,
        threshold=f"a line in the last {format_duration(FAULT_HELD_S)}",
        why="they wait for a disk or a network filesystem that does not answer, and cannot be killed",
        advice="the stacks in the kernel log show what they wait for; repair that, or reboot the node",
        repair=Repair.REBOOT_NODE,
        evaluate=detect_hung_tasks,
        try_it="echo '<3>INFO: task dd:456 blocked for more than 122 seconds.' > /dev/kmsg",
    ),
    _log_rule(
        code="node.rcu_stall",
        blame=Blame.DRIVER,
        threshold=f"a line in the last {format_duration(FAULT_HELD_S)}",
        why="memory that RCU should free accumulates, and tasks that wait for the grace period hang",
        advice="the stacks in the kernel log show which CPU spins; in a virtual machine, check its host too",
        repair=Repair.NONE,
        evaluate=detect_rcu_stall,
        try_it="echo '<3>rcu: INFO: rcu_preempt self-detected stall on CPU' > /dev/kmsg",
    ),
    _log_rule(
        code="node.oom",
        blame=Blame.WORKLOAD,
        threshold=f"a line in the last {format_duration(FAULT_HELD_S)}",
        why="the kernel may kill any pod, and the node's own services",
        advice="set memory limits for pods, and the kubelet's reservations and eviction thresholds",
        repair=Repair.NONE,
        evaluate=detect_out_of_memory,
        try_it="echo '<6>oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/,task=sh' > /dev/kmsg",
    ),
    *HARDWARE_RULES,
    *PRESSURE_RULES,
    *LOG_RULES,
)
