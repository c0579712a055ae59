"""What can be wrong with a node as a whole: notes, for no device is judged by them.

Here is what befalls its tasks; what befalls its hardware is in agent.health.host.node.hardware_rules, how
tasks fare in agent.health.host.node.pressure_rules, and what nobody could read in
agent.health.host.node.log_rules. CPUs, memory, hugepages and the cgroups of pods have rules of their own.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.node.hardware_rules import HARDWARE_RULES
from agent.health.host.node.log_rules import LOG_RULES
from agent.health.host.node.pressure_rules import PRESSURE_RULES
from agent.health.host.node.state import NodeView
from agent.health.host.node.words import HELD_S, lines_of, named
from agent.health.kernel_log.silence import silence
from agent.health.kernel_log.values import LogCode
from agent.health.rules import RuleResult
from agent.health.words import duration
from agent.model.health import Blame, Finding, Severity

_OOM_WORDS: Final = {
    "cpuset": "the NUMA nodes of a cpuset had no memory left",
    "memory_policy": "the NUMA nodes of a memory policy had no memory left",
}


def hung_task(view: NodeView) -> RuleResult:
    """Tasks have been blocked for minutes in a call that cannot be interrupted.

    Source: lines of the kernel log, of its hung-task detector.
    """
    facts = view.recent(HELD_S, LogCode.HUNG_TASK)
    if not facts:
        return silence(view.log_state)
    evidence = f"blocked for minutes: {named([fact.place for fact in facts])}; {lines_of(facts)}"
    return Finding("node.hung_task", Severity.DEGRADED, evidence)


def rcu_stall(view: NodeView) -> RuleResult:
    """A CPU or a task has held up the whole kernel's clean-up for 20 seconds or more.

    Source: lines of the kernel log, of RCU's stall detector.
    """
    facts = view.recent(HELD_S, LogCode.RCU_STALL)
    if not facts:
        return silence(view.log_state)
    evidence = f"{named([fact.values[0] for fact in facts])} stalled; {lines_of(facts)}"
    return Finding("node.rcu_stall", Severity.DEGRADED, evidence)


def out_of_memory(view: NodeView) -> RuleResult:
    """The node ran out of memory and the kernel killed a task. Kills by a cgroup's limit do not count.

    Source: lines of the kernel log, ``oom-kill:``, that name no cgroup.
    """
    facts = [fact for fact in view.recent(HELD_S, LogCode.OOM_KILL) if not fact.place]
    if not facts:
        return silence(view.log_state)
    constraint, task, _ = facts[-1].values
    killed = f", {task} was killed" if task else ""
    evidence = f"{_OOM_WORDS.get(constraint, 'no memory left')}{killed}; {lines_of(facts)}"
    return Finding("node.oom", Severity.DEGRADED, evidence)


NODE_RULES: Final = (
    Rule(
        code="node.hung_task",
        severity=Severity.DEGRADED,
        blame=Blame.DRIVER,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="what they wait for does not answer, a disk or a network filesystem; nobody can kill them",
        advice="the stacks in the kernel log show what they wait for; mend that, else reboot the node",
        judge=hung_task,
        try_it="echo '<3>INFO: task dd:456 blocked for more than 122 seconds.' > /dev/kmsg",
    ),
    Rule(
        code="node.rcu_stall",
        severity=Severity.DEGRADED,
        blame=Blame.DRIVER,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="memory that the kernel wants to free piles up, and whoever waits for the clean-up waits on",
        advice="the stacks in the kernel log show which CPU spins; in a virtual machine, ask its host, too",
        judge=rcu_stall,
        try_it="echo '<3>rcu: INFO: rcu_preempt self-detected stall on CPU' > /dev/kmsg",
    ),
    Rule(
        code="node.oom",
        severity=Severity.DEGRADED,
        blame=Blame.WORKLOAD,
        source="kmsg",
        threshold=f"a line in the last {duration(HELD_S)}",
        why="the kernel chose whom to kill, from all pods and the node's own services",
        advice="give pods memory limits, and the kubelet its reservations and eviction thresholds",
        judge=out_of_memory,
        try_it="echo '<6>oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg=/,task=sh' > /dev/kmsg",
    ),
    *HARDWARE_RULES,
    *PRESSURE_RULES,
    *LOG_RULES,
)
