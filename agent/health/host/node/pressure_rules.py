"""What can be wrong with how tasks fare: they wait for CPUs, memory or disks, and get nothing done.

Notes on the node, for it is what they share; which pod makes them wait its cgroup's own files say.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.host.node.state import NodeView
from agent.health.rules import RuleResult, over_limit
from agent.health.words import duration
from agent.model.health import Blame, Finding, Severity

CPU_PERCENT: Final = 80
"""Some task waits for a CPU on every busy node; where one nearly always does, there are too few."""


def _pressed(view: NodeView, resource: str, percent: int, words: str) -> RuleResult:
    window_s = view.limits.pressure_window_s
    evidence = f"{words} for at least {percent} % of {duration(window_s)}"
    return over_limit(
        view.stalls[resource],
        percent * window_s * 10_000,  # [us] in one percent of a second
        window_s,
        Finding(f"node.pressure.{resource}", Severity.INFO, evidence),
        counter=f"/proc/pressure/{resource}",
        reason="no /proc/pressure: the kernel has no PSI, or it is not enabled",
    )


def memory_pressure(view: NodeView) -> RuleResult:
    """All tasks that were not idle waited for memory at once: they reclaim it, or read back what was.

    Source: ``/proc/pressure/memory``, total of "full" [us], its growth.
    """
    return _pressed(view, "memory", view.limits.pressure_percent, "all tasks waited for memory")


def io_pressure(view: NodeView) -> RuleResult:
    """All tasks that were not idle waited for disks at once.

    Source: ``/proc/pressure/io``, total of "full" [us], its growth.
    """
    return _pressed(view, "io", view.limits.pressure_percent, "all tasks waited for disks")


def cpu_pressure(view: NodeView) -> RuleResult:
    """Tasks that could run waited for a CPU nearly all the time.

    Source: ``/proc/pressure/cpu``, total of "some" [us], its growth.
    """
    return _pressed(view, "cpu", CPU_PERCENT, "tasks waited for a CPU")


PRESSURE_RULES: Final = (
    Rule(
        code="node.pressure.memory",
        severity=Severity.INFO,
        blame=Blame.WORKLOAD,
        source="pressure",
        threshold="10 % of 60 s (pressure.percent, pressure.window)",
        why="the node does little but move memory about, and is near to killing tasks",
        advice="see which pod: memory.pressure in its cgroup; give it a limit, or the node fewer pods",
        judge=memory_pressure,
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
        why="the disks are slower than what is asked of them, or one of them fails",
        advice="see which pod: io.pressure in its cgroup; and iostat -x which disk",
        judge=io_pressure,
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
        advice="see which pod: cpu.pressure in its cgroup; busy is no fault, but a crowded node is slow",
        judge=cpu_pressure,
        try_it="run two busy loops per CPU: yes > /dev/null",
        counter=True,
        window_s=60,
    ),
)
