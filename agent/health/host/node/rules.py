"""Rules for the machine as a whole: tasks, hardware, pressure, and gaps in the kernel log.

They return notes; no device's health depends on them. Named CPUs, memory modules and declared PCI devices
have rules of their own.
"""

from collections.abc import Sequence
from typing import Final

from agent.health.host.node.state import CORRECTED_WINDOW_S, HELD_S, LASTING_HELD_S, NodeView
from agent.health.kernel_log.values import LogCode, LogFact, no_lines_result
from agent.health.rules import Rule, RuleNotEvaluated, RuleResult, at_least, counter_result, duration
from agent.model.health import Blame, Finding, Severity

MAX_NAMES: Final = 3


def first_names(names: Sequence[str]) -> str:
    """Format the first MAX_NAMES names, and how many more there are."""
    names = list(dict.fromkeys(names))
    more = [f"{at_least(len(names) - MAX_NAMES)} more"] if len(names) > MAX_NAMES else []
    return ", ".join([*names[:MAX_NAMES], *more])


def line_count(facts: Sequence[LogFact]) -> str:
    """Format the total number of kernel-log lines of the facts."""
    times = sum(fact.times for fact in facts)
    return f"{at_least(times)} line{'s' if times > 1 else ''} of the kernel log"


CORRECTED_ERRORS: Final = 100
"""Limit of corrected PCIe errors within an hour; no vendor publishes a limit. A sound link has a few errors
in a day."""
_AER_TEXTS: Final = {LogCode.AER_FATAL: "fatal error", LogCode.AER_NONFATAL: "uncorrected error"}


def nvme(view: NodeView) -> RuleResult:
    """An NVMe controller timed out, was reset, or was given up.

    Source: lines of the kernel log, from the nvme driver.
    """
    facts = view.recent(HELD_S, LogCode.NVME)
    if not facts:
        return no_lines_result(view.log_state)
    evidence = f"{first_names([f'{fact.location}: {fact.values[0]}' for fact in facts])}; {line_count(facts)}"
    return Finding("node.nvme", Severity.DEGRADED, evidence)


def read_only(view: NodeView) -> RuleResult:
    """The kernel made a filesystem read-only, or shut it down, after an error.

    Source: lines of the kernel log, from ext4, XFS, Btrfs and FAT.
    """
    facts = view.recent(LASTING_HELD_S, LogCode.READ_ONLY)
    if not facts:
        return no_lines_result(view.log_state)
    evidence = first_names([f"{fact.values[0]} on {fact.location}" for fact in facts])
    return Finding("node.read_only", Severity.DEGRADED, evidence)


def pci(view: NodeView) -> RuleResult:
    """A PCI device had an uncorrected error, or its link went down.

    Source: lines of the kernel log, from AER, DPC and hot-plug.
    """
    facts = view.recent(HELD_S, LogCode.AER_FATAL, LogCode.AER_NONFATAL, LogCode.PCI_FAULT)
    if not facts:
        return no_lines_result(view.log_state)
    worst_first = sorted(facts, key=lambda fact: fact.code is not LogCode.AER_FATAL)
    errors = [f"{fact.location}: {_AER_TEXTS.get(fact.code) or fact.values[0]}" for fact in worst_first]
    return Finding("node.pci", Severity.DEGRADED, f"{first_names(errors)}; {line_count(facts)}")


def pci_corrected(view: NodeView) -> RuleResult:
    """PCI links correct errors more often than the limit allows.

    Source: number of lines of the kernel log from AER within an hour. The kernel leaves some out.
    """
    grown = view.corrected
    if isinstance(grown.events, int) and grown.events >= CORRECTED_ERRORS:
        facts = view.recent(CORRECTED_WINDOW_S, LogCode.AER_CORRECTED)
        rate = f"at least {CORRECTED_ERRORS} in {duration(CORRECTED_WINDOW_S)}"
        evidence = f"corrected PCIe errors: {rate}, of {first_names([fact.location for fact in facts])}"
        return Finding("node.pci.corrected", Severity.INFO, evidence)
    if grown.span_s < CORRECTED_WINDOW_S:
        return RuleNotEvaluated(f"needs {duration(CORRECTED_WINDOW_S)} of history")
    return no_lines_result(view.log_state)


def machine_check(view: NodeView) -> RuleResult:
    """The hardware reported an error, and no line around that time names the part.

    Source: lines of the kernel log, from machine checks and firmware.
    """
    uncorrected = [fact for fact in view.unexplained if fact.code is LogCode.HARDWARE_ERROR]
    if uncorrected:
        evidence = f"an uncorrected error of an unnamed part; {line_count(uncorrected)}"
        return Finding("node.machine_check", Severity.DEGRADED, evidence)
    if view.unexplained:
        evidence = f"corrected errors of an unnamed part; {line_count(view.unexplained)}"
        return Finding("node.machine_check", Severity.INFO, evidence)
    return no_lines_result(view.log_state)


HARDWARE_RULES: Final = (
    Rule(
        code="node.nvme",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="I/O on that disk hangs, and its data is lost if the controller does not recover",
        advice="run nvme smart-log; check the firmware, the slot and power saving; replace the disk",
        evaluate=nvme,
        try_it="echo '<4>nvme nvme0: I/O 12 QID 3 timeout, aborting' > /dev/kmsg",
    ),
    Rule(
        code="node.read_only",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(LASTING_HELD_S)}",
        why="writes to it fail: logs, images, state of pods",
        advice="find its disk in the kernel log; drain the node, check the filesystem, replace the disk",
        evaluate=read_only,
        try_it="echo '<2>EXT4-fs (sda1): Remounting filesystem read-only' > /dev/kmsg",
    ),
    Rule(
        code="node.pci",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="a transfer was lost, or the device with its state",
        advice="identify the device with lspci -s; reseat it, check risers and cables, update its firmware",
        evaluate=pci,
        try_it="echo '<3>nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal)' > /dev/kmsg",
    ),
    Rule(
        code="node.pci.corrected",
        severity=Severity.INFO,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"{CORRECTED_ERRORS} lines in {duration(CORRECTED_WINDOW_S)}",
        why="no data is lost, but each error repeats a transfer, and a link that degrades further fails",
        advice="reseat the device, check risers and cables; compare with other slots",
        evaluate=pci_corrected,
        try_it="for i in $(seq 100); do echo '<4>nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, "
        "type=Physical Layer' > /dev/kmsg; done",
        counter=True,
        window_s=CORRECTED_WINDOW_S,
    ),
    Rule(
        code="node.machine_check",
        severity=Severity.DEGRADED,
        blame=Blame.HARDWARE,
        source="kmsg",
        threshold=f"a line in the last {duration(LASTING_HELD_S)}",
        why="some part of the machine has errors; corrected ones do no harm yet",
        advice="find the part in later lines of the kernel log and in the BMC's event log; replace it",
        evaluate=machine_check,
        try_it="echo '<2>{1}[Hardware Error]: event severity: recoverable' > /dev/kmsg",
    ),
)


def records_lost(view: NodeView) -> RuleResult:
    """Records of the kernel log were overwritten before the agent read them.

    Source: gaps in the sequence numbers of ``/dev/kmsg``.
    """
    if not view.lost:
        return no_lines_result(view.log_state)
    records = f"{at_least(view.lost)} record{'s' if view.lost > 1 else ''}"
    evidence = f"{records} of the kernel log overwritten before the agent read them"
    return Finding("node.log.lost", Severity.INFO, evidence)


LOG_RULES: Final = (
    Rule(
        code="node.log.lost",
        severity=Severity.INFO,
        blame=Blame.CONFIGURATION,
        source="kmsg",
        threshold=f"a record in the last {duration(LASTING_HELD_S)}",
        why="a fault that only the log reports, such as an XID or a machine check, may have been among them",
        advice="find out with dmesg what floods the log and stop it, or boot with a larger log_buf_len",
        evaluate=records_lost,
        try_it=r"printf '6,1,1,-;one\n6,9,9,-;two\n' > /tmp/log; drahealth run --kmsg /tmp/log",
    ),
)


CPU_PERCENT: Final = 80
"""Limit of the share of time in which a task waits for a CPU [%]; some waiting is normal on a busy
machine."""


def _pressure(view: NodeView, resource: str, percent: int, text: str) -> RuleResult:
    window_s = view.limits.pressure_window_s
    evidence = f"{text} for at least {percent} % of {duration(window_s)}"
    return counter_result(
        view.waited[resource],
        percent * window_s * 10_000,  # [us] in one percent of a second
        window_s,
        Finding(f"node.pressure.{resource}", Severity.INFO, evidence),
        counter=f"/proc/pressure/{resource}",
        reason="no /proc/pressure: the kernel has no PSI, or it is not enabled",
    )


def memory_pressure(view: NodeView) -> RuleResult:
    """All non-idle tasks waited for memory at the same time, for reclaim or for pages to be read back.

    Source: growth of ``/proc/pressure/memory``, total of "full" [us].
    """
    return _pressure(view, "memory", view.limits.pressure_percent, "all tasks waited for memory")


def io_pressure(view: NodeView) -> RuleResult:
    """All non-idle tasks waited for disks at the same time.

    Source: growth of ``/proc/pressure/io``, total of "full" [us].
    """
    return _pressure(view, "io", view.limits.pressure_percent, "all tasks waited for disks")


def cpu_pressure(view: NodeView) -> RuleResult:
    """Runnable tasks waited for a CPU nearly all the time.

    Source: growth of ``/proc/pressure/cpu``, total of "some" [us].
    """
    return _pressure(view, "cpu", CPU_PERCENT, "tasks waited for a CPU")


PRESSURE_RULES: Final = (
    Rule(
        code="node.pressure.memory",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="pressure",
        threshold="10 % of 60 s (pressure.percent, pressure.window)",
        why="the node spends its time on reclaim and is close to OOM kills",
        advice="find the pod by memory.pressure in its cgroup; give it a limit, or the node fewer pods",
        evaluate=memory_pressure,
        try_it="in a pod without a limit, use all memory that is left and go on using it",
        counter=True,
        window_s=60,
    ),
    Rule(
        code="node.pressure.io",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="pressure",
        threshold="10 % of 60 s (pressure.percent, pressure.window)",
        why="the disks are too slow for the load, or one of them fails",
        advice="find the pod by io.pressure in its cgroup, and the disk with iostat -x",
        evaluate=io_pressure,
        try_it="write more than the disk can take: dd if=/dev/zero of=file oflag=direct, several at once",
        counter=True,
        window_s=60,
    ),
    Rule(
        code="node.pressure.cpu",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="pressure",
        threshold=f"{CPU_PERCENT} % of 60 s (pressure.window)",
        why="tasks wait longer than they run",
        advice="find the pod by cpu.pressure in its cgroup; give the node fewer pods if they are too slow",
        evaluate=cpu_pressure,
        try_it="run two busy loops per CPU: yes > /dev/null",
        counter=True,
        window_s=60,
    ),
)


_OOM_TEXTS: Final = {
    "cpuset": "the NUMA nodes of a cpuset had no memory left",
    "memory_policy": "the NUMA nodes of a memory policy had no memory left",
}


def hung_task(view: NodeView) -> RuleResult:
    """Tasks have been blocked for minutes in an uninterruptible call.

    Source: lines of the kernel log, from the hung-task detector.
    """
    facts = view.recent(HELD_S, LogCode.HUNG_TASK)
    if not facts:
        return no_lines_result(view.log_state)
    evidence = f"blocked for minutes: {first_names([fact.location for fact in facts])}; {line_count(facts)}"
    return Finding("node.hung_task", Severity.DEGRADED, evidence)


def rcu_stall(view: NodeView) -> RuleResult:
    """A CPU or a task has delayed an RCU grace period for 20 seconds or more.

    Source: lines of the kernel log, from RCU's stall detector.
    """
    facts = view.recent(HELD_S, LogCode.RCU_STALL)
    if not facts:
        return no_lines_result(view.log_state)
    evidence = f"{first_names([fact.values[0] for fact in facts])} stalled; {line_count(facts)}"
    return Finding("node.rcu_stall", Severity.DEGRADED, evidence)


def out_of_memory(view: NodeView) -> RuleResult:
    """The node ran out of memory and the kernel killed a task. Kills by a cgroup's limit do not count.

    Source: ``oom-kill:`` lines of the kernel log that name no cgroup.
    """
    facts = [fact for fact in view.recent(HELD_S, LogCode.OOM_KILL) if not fact.location]
    if not facts:
        return no_lines_result(view.log_state)
    constraint, task, _ = facts[-1].values
    killed = f", {task} was killed" if task else ""
    evidence = f"{_OOM_TEXTS.get(constraint, 'no memory left')}{killed}; {line_count(facts)}"
    return Finding("node.oom", Severity.DEGRADED, evidence)


NODE_RULES: Final = (
    Rule(
        code="node.hung_task",
        severity=Severity.DEGRADED,
        blame=Blame.DRIVER,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="they wait for a disk or a network filesystem that does not answer, and cannot be killed",
        advice="the stacks in the kernel log show what they wait for; repair that, or reboot the node",
        evaluate=hung_task,
        try_it="echo '<3>INFO: task dd:456 blocked for more than 122 seconds.' > /dev/kmsg",
    ),
    Rule(
        code="node.rcu_stall",
        severity=Severity.DEGRADED,
        blame=Blame.DRIVER,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="memory that RCU should free accumulates, and tasks that wait for the grace period hang",
        advice="the stacks in the kernel log show which CPU spins; in a virtual machine, check its host too",
        evaluate=rcu_stall,
        try_it="echo '<3>rcu: INFO: rcu_preempt self-detected stall on CPU' > /dev/kmsg",
    ),
    Rule(
        code="node.oom",
        severity=Severity.DEGRADED,
        blame=Blame.WORKLOAD,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="the kernel may kill any pod, and the node's own services",
        advice="set memory limits for pods, and the kubelet's reservations and eviction thresholds",
        evaluate=out_of_memory,
        try_it="echo '<6>oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/,task=sh' > /dev/kmsg",
    ),
    *HARDWARE_RULES,
    *PRESSURE_RULES,
    *LOG_RULES,
)
