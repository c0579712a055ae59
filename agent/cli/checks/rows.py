"""List of the findings that the agent can report, collected from the tables of the rules. Pure.

Only the verb that prints the checks imports this module, when it runs: this loads every table.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Final, NamedTuple

from agent.embed.components import FAILED
from agent.health.declared.checks import NO_ANSWER, UNCHECKED
from agent.health.declared.devices import INVALID_FILE, UNWATCHED
from agent.health.declared.devices import NOT_EVALUATED_YET as UNSEEN_DECLARED
from agent.health.declared.devices import REMOVED as DECLARED_GONE
from agent.health.declared.driver_faults import FAILED_DEVICE
from agent.health.declared.gpus import DECLARED_GPU_RULES
from agent.health.gpu.catalog import gpu_rules
from agent.health.gpu.faults import events as gpu_events
from agent.health.gpu.faults.events import EventRow
from agent.health.gpu.faults.values import SXID, XID
from agent.health.gpu.verdicts import NOT_READ_YET, REMOVED
from agent.health.gpu.xid import sxids
from agent.health.gpu.xid import table as xids
from agent.health.gpu.xid.rules import decide_sxid
from agent.health.gpu.xid.sxids import SxidRow, SxidScope
from agent.health.gpu.xid.values import CatalogAnswer, XidCondition, XidEffect, XidRow
from agent.health.host.catalog import ALL_RULES, DECLARED_RULES, RULES
from agent.health.host.cgroup.rules import GROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES
from agent.health.host.hugepages.rules import POOL_RULES
from agent.health.host.memory.rules import MEMORY_RULES
from agent.health.host.node.rules import NODE_RULES
from agent.health.host.pod.rules import ALLOCATION_ROWS, UNLISTED, UNREAD, AllocationRow
from agent.health.rules import (
    STALLED,
    STALLED_ADVICE,
    CatalogRow,
    Rule,
    unreadable_row,
)
from agent.model.health import Blame, Severity
from agent.model.settings import GpuLimits


class CheckRow(NamedTuple):
    """One finding that the agent can report about a device."""

    code: str
    severity: Severity
    """Worst severity of the finding."""
    blame: Blame
    source: str
    meaning: str
    threshold: str
    """Condition under which the finding is reported."""
    why: str
    """Reason why the finding matters; for an XID, the mildest sufficient repair; for an SXid, its scope."""
    advice: str
    try_it: str = ""
    """Command of a fake-NVML scenario that provokes the finding, or a text that explains how; empty: none."""


class CheckGroup(NamedTuple):
    """Checks that are printed under one title."""

    title: str
    text: str
    checks: tuple[CheckRow, ...]
    prefix: str = ""
    """Common prefix of codes that differ only in a number; such a group is printed as one table."""
    threshold_title: str = "when"
    why_title: str = "why it matters"


# --- XIDs and SXids; a test compares these texts with agent.health.gpu.xid.rules ---------------------------

_WORST: Final[dict[XidCondition, tuple[Severity, str]]] = {
    XidCondition.ALWAYS_DEGRADED: (Severity.DEGRADED, "always"),
    XidCondition.RETIRED: (Severity.DEGRADED, "unless the driver reports that no recovery is needed"),
    XidCondition.UNLISTED: (Severity.DEGRADED, "unless the driver reports that no recovery is needed"),
    XidCondition.FOLLOWER: (Severity.INFO, "always: it only accompanies another XID"),
    XidCondition.RECOVERY_ACTION: (
        Severity.UNHEALTHY,
        "if the driver requests a recovery action; degraded if it does not report the need",
    ),
    XidCondition.REQUESTED_ONLY: (Severity.DEGRADED, "if the driver requests a recovery action"),
    XidCondition.ANNOUNCES: (
        Severity.UNHEALTHY,
        "if its text requests an action and the driver has no field for it",
    ),
    XidCondition.STUCK: (
        Severity.UNHEALTHY,
        "if the driver requests a recovery action, or is too old to report one; degraded if it does not "
        "report the need",
    ),
    XidCondition.SAME_PLACE: (Severity.DEGRADED, "if the same GPC and TPC report it again within a day"),
    XidCondition.ACROSS_WORKLOADS: (Severity.DEGRADED, "if it affects different processes within a day"),
    XidCondition.WITH_REPLAYS: (
        Severity.DEGRADED,
        "if it repeats within a day while the PCIe link replays packets",
    ),
    XidCondition.ON_REPEAT: (Severity.DEGRADED, "if it repeats within a day"),
    XidCondition.REMAP_PENDING: (
        Severity.UNHEALTHY,
        "if a row remapping is pending and the driver requests a recovery action; else degraded",
    ),
    XidCondition.CONTAINED: (
        Severity.UNHEALTHY,
        "if a row remapping is pending, the driver requests a recovery action, or it repeats; else degraded",
    ),
    XidCondition.REMAP_FAILED: (Severity.UNHEALTHY, "always"),
    XidCondition.LOST_AGAIN: (
        Severity.UNHEALTHY,
        "always; twice within a day points to seat or hardware",
    ),
    XidCondition.LINK_REGISTERS: (
        Severity.UNHEALTHY,
        "if the registers in its line point to hardware, links are down, or the driver requests a "
        "recovery action; degraded without registers",
    ),
    XidCondition.LINK_WORDS: (
        Severity.UNHEALTHY,
        "if its line contains Fatal, or its error status requires a reset; degraded if that is not known",
    ),
    XidCondition.LINKS_DOWN: (Severity.UNHEALTHY, "while links are down; degraded if they cannot be read"),
    XidCondition.RESET_PENDING: (Severity.UNHEALTHY, "until the GPU was reset"),
    XidCondition.CAPACITY_CUT: (
        Severity.UNHEALTHY,
        "if the driver requests a recovery action; degraded if it does not report the need",
    ),
    XidCondition.DRAM_OF_48: (
        Severity.UNHEALTHY,
        "if a row remapping is pending, or the driver requests a recovery action; else degraded, unless it "
        "accompanies another XID",
    ),
    XidCondition.SRAM_OF_48: (
        Severity.UNHEALTHY,
        "if SRAM errors exceed the limit, or the driver requests a recovery action; else degraded, unless it "
        "accompanies another XID",
    ),
    XidCondition.CANCELLED: (Severity.DEGRADED, "until XID 162 reports the end"),
}
"""Worst severity of an XID, and its condition. A milder XID is reported, and the device stays Healthy."""

_PLAIN: Final = {
    XidEffect.ALWAYS: (Severity.UNHEALTHY, "always"),
    XidEffect.NEVER: (Severity.INFO, "always"),
}

_FATAL: Final[dict[SxidScope, str]] = {
    SxidScope.FABRIC: "if its line contains Fatal; else degraded",
    SxidScope.PORT: "if its line contains Fatal: a link is lost; else info",
    SxidScope.NON_FATAL: "unless its line contains Fatal",
    SxidScope.UNLISTED: "if its line contains Fatal; unhealthy if it names no link; else info",
}


def of_xid(row: XidRow) -> CheckRow:
    """Return the check of an XID; its ``why`` is the mildest repair that suffices."""
    severity, when = _PLAIN[row.mark] if row.condition is XidCondition.PLAIN else _WORST[row.condition]
    if row.mark is XidEffect.NEVER:
        severity = min(severity, Severity.DEGRADED)
    return CheckRow(
        f"{XID}{row.code}",
        severity,
        row.blame,
        "nvml-events, kmsg",
        row.meaning,
        f"{severity.name.lower()} {when}",
        _sufficient_repair(row),
        row.advice.value,
        f"gpu 0 xid {row.code}",
    )


def _sufficient_repair(row: XidRow) -> str:
    """Return the mildest repair that resolves an XID."""
    steps = (
        ("restart of the program", row.repairs.app_restart),
        ("GPU reset", row.repairs.gpu_reset),
        ("reboot", row.repairs.reboot),
    )
    if (
        row.repairs.app_restart is CatalogAnswer.NOT_NEEDED
        and row.repairs.gpu_reset is CatalogAnswer.NOT_NEEDED
    ):
        return "none needed"
    for step, answer in steps:
        if answer is CatalogAnswer.YES:
            return step
    for step, answer in steps:
        if answer is CatalogAnswer.MAYBE:
            return f"perhaps a {step}"
    if row.repairs.app_restart is CatalogAnswer.BY_TEXT:
        return "see its text"
    return "hardware repair" if row.repairs.hardware is CatalogAnswer.YES else "not known"


def of_sxid(row: SxidRow) -> CheckRow:
    """Return the check of an SXid; its ``why`` is the scope of the SXid."""
    decision = decide_sxid(row, None)
    line = f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {row.code}, Fatal, Link 32 {row.meaning}"
    return CheckRow(
        f"{SXID}{row.code}",
        decision.severity,
        decision.blame,
        "kmsg",
        row.meaning,
        f"{decision.severity.name.lower()} {_FATAL[row.scope]}",
        row.scope.value,
        decision.advice,
        f'echo "{line}" > /dev/kmsg',
    )


# --- all checks --------------------------------------------------------------------------------------------

LOG_LINES: Final = {
    gpu_events.INIT_FAILED: "NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x62:0xffff:1863)",
    gpu_events.LINK_SETUP_FAILED: "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: failed to update link mask",
    gpu_events.API_MISMATCH: (
        "NVRM: API mismatch: the client has the version 570.86.15, but this kernel module has the version "
        "570.86.10."
    ),
}
"""Kernel log lines that raise the findings for which NVML has no event."""


def groups(limits: GpuLimits) -> tuple[CheckGroup, ...]:
    """Return all checks, with the numbers of `limits` in their texts."""
    return (
        CheckGroup("CPUs", "Devices `cpu-node<N>`.", tuple(map(_of_rule, CPU_RULES))),
        CheckGroup("Memory", "Devices `memory-node<N>`.", tuple(map(_of_rule, MEMORY_RULES))),
        CheckGroup("Hugepages", "Devices `hugepages-<size>-node<N>`.", tuple(map(_of_rule, POOL_RULES))),
        CheckGroup(
            "Devices that drivers declare",
            "In addition to the checks of the host's devices: declared CPUs, memory and pages are checked "
            "like those, and a declared GPU has the health of the host's. See "
            "[declared-devices.md](declared-devices.md).",
            (
                *(_of_rule(rule) for rules in DECLARED_RULES.values() for rule in rules if _is_extra(rule)),
                *map(_of_rule, DECLARED_GPU_RULES),
                _of_row(UNWATCHED, "A GPU is declared, but the agent does not read GPUs.", UNWATCHED.try_it),
                _of_row(UNSEEN_DECLARED, "The device was not checked yet.", UNSEEN_DECLARED.try_it),
                _of_row(DECLARED_GONE, "Its driver no longer declares the device.", DECLARED_GONE.try_it),
                _of_row(UNCHECKED, "No check covers the device.", UNCHECKED.try_it),
                _of_row(NO_ANSWER, "A check of the driver could not be run.", NO_ANSWER.try_it),
                _of_row(
                    FAILED_DEVICE,
                    "The driver found the device broken while it prepared a claim.",
                    FAILED_DEVICE.try_it,
                ),
                _of_row(FAILED, "The monitor inside a driver has ended.", FAILED.try_it),
                _of_row(
                    INVALID_FILE, "A note: a driver's declaration file is not valid.", INVALID_FILE.try_it
                ),
            ),
        ),
        CheckGroup(
            "Pods and their containers",
            "Notes. If a pod lacks resources of a device, the note is also a cause of that device; see "
            "[host.md](host.md#notes). Notes whose source is pods come from [audits](audit.md).",
            (*map(_of_rule, GROUP_RULES), *map(_of_allocation, ALLOCATION_ROWS.values())),
        ),
        CheckGroup(
            "The node",
            "Notes that belong to no device.",
            (*map(_of_rule, NODE_RULES), *map(_of_allocation, (UNLISTED, UNREAD))),
        ),
        CheckGroup(
            "GPUs: state",
            "Devices `gpu-<N>` and their MIG instances. The first is the driver's own verdict, and takes "
            "precedence over conclusions from the others.",
            (
                *map(_of_rule, gpu_rules(limits)),
                _of_row(NOT_READ_YET, "The GPU was not read yet.", "gpu 0 hang nvmlDeviceGetFieldValues 3s"),
                _of_row(REMOVED, "The MIG instance no longer exists.", "gpu 0 mig off"),
            ),
        ),
        CheckGroup(
            "GPUs: events",
            "Events of NVML and lines of the kernel log. They cannot be read again, so the agent keeps them "
            "until they are resolved, also over restarts.",
            tuple(map(_of_event, gpu_events.ROWS)),
        ),
        CheckGroup(
            "XIDs",
            "`gpu.xid.<N>`: numbered errors of the driver, from NVML's events and from the kernel log. The "
            "third column has the severity; an XID of severity info is reported, and the device stays "
            "healthy. A number that is not listed comes from a newer driver: degraded, unless the driver "
            "reports that no recovery is needed. The configuration can change the severity of each "
            "(`[gpu.xids]`).",
            tuple(map(of_xid, xids.XIDS.values())),
            XID,
            "verdict",
            "sufficient repair",
        ),
        CheckGroup(
            "SXids",
            "`gpu.fabric.sxid.<N>`: errors of NVSwitches, from the kernel log. A switch belongs to no GPU, "
            "so every GPU with NVLinks gets the verdict.",
            tuple(map(of_sxid, sxids.SXIDS.values())),
            SXID,
            "verdict",
            "scope",
        ),
        CheckGroup("The agent itself", "", (_STALLED_SOURCE,)),
    )


def _is_extra(rule: Rule) -> bool:
    return not any(rule in rules for rules in RULES.values())


_STALLED_SOURCE: Final = CheckRow(
    code=STALLED,
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    meaning="A source is stalled: the device was not read for too long.",
    threshold="no finished pass for three periods and at least 2 s",
    why="the last known state of the device may be outdated",
    advice=STALLED_ADVICE,
)


def _of_rule(rule: Rule) -> CheckRow:
    return _of_row(rule, _first_paragraph(rule.evaluate), rule.try_it)


def _of_row(row: CatalogRow, meaning: str, try_it: str) -> CheckRow:
    return CheckRow(
        row.code,
        row.severity,
        row.blame,
        row.source,
        meaning,
        row.threshold,
        row.why,
        row.advice,
        try_it,
    )


def _of_allocation(row: AllocationRow) -> CheckRow:
    return _of_row(row, row.description, row.try_it)


def _first_paragraph(evaluate: object) -> str:
    """Return the first paragraph of a rule's docstring, which is written for operators as well."""
    return " ".join((inspect.getdoc(evaluate) or "").partition("\n\n")[0].split())


def _of_event(row: EventRow) -> CheckRow:
    return CheckRow(
        row.code,
        row.severity,
        row.blame,
        "nvml-events" if row.event else "kmsg",
        f"{row.meaning[:1].upper()}{row.meaning[1:]}.",
        f"NVML event {row.event:#x}, once" if row.event else "a kernel log line, once",
        row.why,
        row.advice,
        f"gpu 0 event {row.event:#x}" if row.event else f'echo "{LOG_LINES[row.code]}" > /dev/kmsg',
    )


def unlisted(prefix: str, number: int) -> CheckRow:
    """Return the check for an XID or SXid `number` that the list of `prefix` lacks, from a newer driver."""
    return of_xid(xids.row_of(number)) if prefix == XID else of_sxid(sxids.row_of(number))


def unreadable(check: CheckRow) -> CheckRow | None:
    """Return the check that reports that the source of `check` cannot be read; None if it has none."""
    rules: Iterable[Rule] = (*ALL_RULES, *DECLARED_GPU_RULES, *gpu_rules(GpuLimits()))
    rule = next((rule for rule in rules if rule.code == check.code), None)
    if rule is None:
        return None
    return _of_row(unreadable_row(rule), f"The data that {rule.code} needs can no longer be read.", "")
