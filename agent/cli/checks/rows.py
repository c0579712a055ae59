"""Every check of the agent as one kind of value, gathered from the tables that judge by them. Pure.

Imported only by the verb that prints it, and late: it loads every table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Final

from agent.cli.checks.check import Check, Group
from agent.cli.checks.codes import of_sxid, of_xid
from agent.embed.failed import FAILED
from agent.health.catalog import (
    STALLED,
    STALLED_ADVICE,
    Row,
    Rule,
    unreadable_of,
)
from agent.health.declared.checks import NO_ANSWER, UNCHECKED
from agent.health.declared.devices import GONE as DECLARED_GONE
from agent.health.declared.devices import UNSEEN as UNSEEN_DECLARED
from agent.health.declared.devices import UNWATCHED, WRONG
from agent.health.declared.driver_faults import TOLD
from agent.health.declared.gpus import DECLARED_GPU_RULES
from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.faults import events as gpu_events
from agent.health.gpu.faults.events import EventRow
from agent.health.gpu.faults.values import SXID, XID
from agent.health.gpu.verdicts import GONE, UNSEEN
from agent.health.gpu.xid import sxids
from agent.health.gpu.xid import table as xids
from agent.health.host.catalog import ALL_RULES, DECLARED_RULES, RULES
from agent.health.host.cgroup.rules import GROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES
from agent.health.host.hugepages.rules import POOL_RULES
from agent.health.host.memory.rules import MEMORY_RULES
from agent.health.host.node.rules import NODE_RULES
from agent.health.host.pod.rule_rows import PROMISES, UNLISTED, UNREAD, PromiseRow
from agent.model.health import Blame, Severity
from agent.model.settings import GpuLimits

LOG_LINES: Final = {
    gpu_events.INIT_FAILED: "NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x62:0xffff:1863)",
    gpu_events.LINK_SETUP_FAILED: "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: failed to update link mask",
    gpu_events.API_MISMATCH: (
        "NVRM: API mismatch: the client has the version 570.86.15, but this kernel module has the version "
        "570.86.10."
    ),
}
"""Lines of the kernel log that raise what NVML has no event for."""


def groups(limits: GpuLimits) -> tuple[Group, ...]:
    """All checks, with the numbers of these limits in their texts."""
    return (
        Group("CPUs", "Of `cpu-node<N>`.", tuple(map(_of_rule, CPU_RULES))),
        Group("Memory", "Of `memory-node<N>`.", tuple(map(_of_rule, MEMORY_RULES))),
        Group("Hugepages", "Of `hugepages-<size>-node<N>`.", tuple(map(_of_rule, POOL_RULES))),
        Group(
            "Devices that drivers declare",
            "Beside what is said of the host's own: declared CPUs, memory and pages are judged as those are, "
            "and a declared GPU is what the host's is. See [declared-devices.md](declared-devices.md).",
            (
                *(_of_rule(rule) for rules in DECLARED_RULES.values() for rule in rules if _is_extra(rule)),
                *map(_of_rule, DECLARED_GPU_RULES),
                _of_row(UNWATCHED, "A GPU is declared, and nobody looks for GPUs.", UNWATCHED.try_it),
                _of_row(UNSEEN_DECLARED, "Nobody has looked at the device yet.", UNSEEN_DECLARED.try_it),
                _of_row(DECLARED_GONE, "Its driver declares the device no more.", DECLARED_GONE.try_it),
                _of_row(UNCHECKED, "Nobody looks at the device.", UNCHECKED.try_it),
                _of_row(NO_ANSWER, "A check of the driver's own could not look.", NO_ANSWER.try_it),
                _of_row(TOLD, "Its driver found it broken while it prepared a claim.", TOLD.try_it),
                _of_row(FAILED, "What watches inside a driver has ended.", FAILED.try_it),
                _of_row(WRONG, "A note: a driver's file breaks the rules of its format.", WRONG.try_it),
            ),
        ),
        Group(
            "Pods and their containers",
            "Notes. What a pod lacks that a device gives it is also a cause of that device; which that is, "
            "[host.md](host.md#notes) says. Where the source is pods, [an audit](audit.md) found it.",
            (*map(_of_rule, GROUP_RULES), *map(_of_promise, PROMISES.values())),
        ),
        Group(
            "The node",
            "Notes: they are about no device.",
            (*map(_of_rule, NODE_RULES), *map(_of_promise, (UNLISTED, UNREAD))),
        ),
        Group(
            "GPUs: what can be read",
            "Of `gpu-<N>`, and of its MIG instances with it. The first is the driver's own word, and comes "
            "before what the others let us guess.",
            (
                *map(_of_rule, gpu_rules(limits)),
                _of_row(
                    UNSEEN, "Nobody has looked at the GPU yet.", "gpu 0 hang nvmlDeviceGetFieldValues 3s"
                ),
                _of_row(GONE, "The MIG instance no longer exists.", "gpu 0 mig off"),
            ),
        ),
        Group(
            "GPUs: what is only announced",
            "Events of NVML and lines of the kernel log. Nobody can read them again, so they are kept until "
            "they are cured, over restarts of the agent too.",
            tuple(map(_of_event, gpu_events.ROWS)),
        ),
        Group(
            "XIDs",
            "`gpu.xid.<N>`: errors that the driver numbers, from NVML's events and from the kernel log. "
            "Unhealthy or degraded as the third column says; what is not so bad is told of, and leaves the "
            "device healthy. A number that is not listed is a newer driver's: degraded, unless the driver "
            "says that no recovery is needed. The configuration can judge any of them otherwise "
            "(`[gpu.xids]`).",
            tuple(map(of_xid, xids.XIDS.values())),
            XID,
            "verdict",
            "enough to mend it",
        ),
        Group(
            "SXids",
            "`gpu.fabric.sxid.<N>`: errors of NVSwitches, from the kernel log. A switch belongs to no GPU: "
            "every GPU with NVLinks shares the verdict.",
            tuple(map(of_sxid, sxids.SXIDS.values())),
            SXID,
            "verdict",
            "reach",
        ),
        Group("The agent itself", "", (_STANDS_STILL,)),
    )


def _is_extra(rule: Rule) -> bool:
    return not any(rule in rules for rules in RULES.values())


_STANDS_STILL: Final = Check(
    code=STALLED,
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    what="A source stands still: nobody has looked at the device for too long.",
    threshold="no finished pass for three periods, and for 2 s at least",
    why="whatever was known of the device may be wrong by now",
    advice=STALLED_ADVICE,
)


def _of_rule(rule: Rule) -> Check:
    return _of_row(rule, _first_paragraph(rule.judge), rule.try_it)


def _of_row(row: Row, what: str, try_it: str) -> Check:
    return Check(
        row.code,
        row.severity,
        row.blame,
        row.source,
        what,
        row.threshold,
        row.why,
        row.advice,
        try_it,
    )


def _of_promise(row: PromiseRow) -> Check:
    return _of_row(row, row.what, row.try_it)


def _first_paragraph(judge: object) -> str:
    """What a rule says, in its own words: they are written for whoever reads the code, and for people."""
    return " ".join((inspect.getdoc(judge) or "").partition("\n\n")[0].split())


def _of_event(row: EventRow) -> Check:
    return Check(
        row.code,
        row.severity,
        row.blame,
        "nvml-events" if row.event else "kmsg",
        f"{row.meaning[:1].upper()}{row.meaning[1:]}.",
        f"NVML's event {row.event:#x}, once" if row.event else "a line of the kernel log, once",
        row.why,
        row.advice,
        f"gpu 0 event {row.event:#x}" if row.event else f'echo "{LOG_LINES[row.code]}" > /dev/kmsg',
    )


def unlisted(prefix: str, number: int) -> Check:
    """The check for a number that the list with this prefix does not have: a newer driver's."""
    return of_xid(xids.row_of(number)) if prefix == XID else of_sxid(sxids.row_of(number))


def unreadable(check: Check) -> Check | None:
    """The check for "what this one reads can no longer be read"; None if it reads nothing."""
    rules: Iterable[Rule] = (*ALL_RULES, *DECLARED_GPU_RULES, *gpu_rules(GpuLimits()))
    rule = next((rule for rule in rules if rule.code == check.code), None)
    if rule is None:
        return None
    return _of_row(unreadable_of(rule), f"What {rule.code} is judged by can no longer be read.", "")
