"""Catalog of the agent's health checks, collected from the tables of the health rules. Pure.

Only ``drahealth checks`` imports this module: it loads the tables of all rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

from agent.embed.core_components import CORE_FAILED_ROW
from agent.health.declared.driver_reports import (
    CHECK_EXPIRED,
    CHECK_WITHOUT_RESULT,
    CUSTOM_FAULT,
    CUSTOM_WITHOUT_RESULT,
    FAILED_DEVICE,
    UNCHECKED,
)
from agent.health.declared.verdicts import DECLARED_GPU_RULES, INVALID_FILE, UNWATCHED
from agent.health.declared.verdicts import NOT_EVALUATED_YET as UNSEEN_DECLARED
from agent.health.declared.verdicts import REMOVED_DEVICE as DECLARED_GONE
from agent.health.gpu.faults import fault_log
from agent.health.gpu.faults.fault_log import EventFaultRow
from agent.health.gpu.rule_state import gpu_rules
from agent.health.gpu.verdicts import NOT_READ_YET, REMOVED_INSTANCE
from agent.health.gpu.xid import sxid_table as sxids
from agent.health.gpu.xid import xid_table as xids
from agent.health.gpu.xid.decisions import decide_sxid
from agent.health.gpu.xid.sxid_table import SxidRow, SxidScope
from agent.health.gpu.xid.xid_table import CatalogAnswer, XidCondition, XidEffect, XidRow
from agent.health.host.cgroup.rules import CGROUP_RULES
from agent.health.host.cpu.rules import CPU_RULES
from agent.health.host.hugepages import POOL_RULES
from agent.health.host.memory.rules import MEMORY_RULES
from agent.health.host.pod import POD_AUDIT_ROWS, PODS_UNREADABLE_ROW, UNLISTED_FINDINGS_ROW, PodFindingRow
from agent.health.host.verdicts import ALL_HOST_RULES, DECLARED_RULES, HOST_RULES, NODE_RULES
from agent.health.rules import (
    STALLED,
    STALLED_ADVICE,
    SXID_PREFIX,
    XID_PREFIX,
    CatalogRow,
    Rule,
    unreadable_row,
)
from agent.model.health import Blame, Repair, Severity, repair_for_severity
from agent.model.settings import GpuLimits


class CheckDescription(NamedTuple):
    """Health check of the agent, described by the finding that it reports."""

    code: str
    severity: Severity
    """Worst severity that the finding can have."""
    blame: Blame
    source: str
    meaning: str
    threshold: str
    """Condition under which the check reports its finding."""
    why: str
    """Reason why the finding matters; for an XID, the mildest sufficient repair; for an SXid, its scope."""
    advice: str
    repair: Repair
    """Repair that the advice names; for some XIDs the GPU's readings decide on another one."""
    try_command: str = ""
    """Command of a fake-NVML scenario that provokes the finding, or a text that explains how; empty: none."""


class CheckSection(NamedTuple):
    """Section of the list of checks: a title, an introduction and the checks below it."""

    title: str
    intro: str
    checks: tuple[CheckDescription, ...]
    prefix: str = ""
    """Common prefix of codes that differ only in a number; the section is then printed as one table."""
    threshold_title: str = "when"
    why_title: str = "why it matters"


# --- XIDs and SXids; a test compares these texts with agent.health.gpu.xid.decisions -----------------------

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
    XidCondition.LOST_AGAIN: (Severity.UNHEALTHY, "always; twice within 30 days points to seat or hardware"),
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
"""Worst severity of an XID, and the case in which the XID has it, by the condition in the XID table."""

_PLAIN: Final = {XidEffect.ALWAYS: (Severity.UNHEALTHY, "always"), XidEffect.NEVER: (Severity.INFO, "always")}

_FATAL: Final[dict[SxidScope, str]] = {
    SxidScope.FABRIC: "if its line contains Fatal; else degraded",
    SxidScope.PORT: "if its line contains Fatal: a link is lost; else info",
    SxidScope.SWITCH: "unless its line contains Fatal and names no link",
    SxidScope.NON_FATAL: "unless its line contains Fatal",
    SxidScope.UNLISTED: "if its line states no severity, or is Fatal; unhealthy if it is Fatal and names no "
    "link; else info",
}


def xid_check(row: XidRow) -> CheckDescription:
    """Return the description of the check for one XID (error code of the NVIDIA driver).

    The field ``why`` has the mildest repair that suffices.
    """
    severity, when = _PLAIN[row.effect] if row.condition is XidCondition.PLAIN else _WORST[row.condition]
    if row.effect is XidEffect.NEVER:
        severity = min(severity, Severity.DEGRADED)
    return CheckDescription(
        f"{XID_PREFIX}{row.code}",
        severity,
        row.blame,
        "nvml-events, kmsg",
        row.meaning,
        f"{severity.name.lower()} {when}",
        _sufficient_repair(row),
        row.advice.value,
        repair_for_severity(row.repair, severity),
        f"gpu 0 xid {row.code}",
    )


def _sufficient_repair(row: XidRow) -> str:
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


def sxid_check(row: SxidRow) -> CheckDescription:
    """Return the description of the check for one SXid (error code of an NVSwitch).

    The field ``why`` has the scope of the error.
    """
    decision = decide_sxid(row, None)
    severity = "Fatal, Link 32 " if row.states_severity else ""
    line = f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {row.code}, {severity}{row.meaning}"
    return CheckDescription(
        f"{SXID_PREFIX}{row.code}",
        decision.severity,
        decision.blame,
        "kmsg",
        row.meaning,
        f"{decision.severity.name.lower()} {_FATAL[row.scope] if row.states_severity else 'always'}",
        row.scope.value,
        decision.advice,
        decision.repair,
        f'echo "{line}" > /dev/kmsg',
    )


# --- all checks --------------------------------------------------------------------------------------------

LOG_LINES: Final = {
    fault_log.INIT_FAILED: "NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x62:0xffff:1863)",
    fault_log.LINK_SETUP_FAILED: "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: failed to update link mask",
    fault_log.API_MISMATCH: (
        "NVRM: API mismatch: the client has the version 570.86.15, but this kernel module has the version "
        "570.86.10."
    ),
}
"""Kernel log line that provokes a finding, by finding code, for findings without an NVML event."""


def checks_by_section(limits: GpuLimits) -> tuple[CheckSection, ...]:
    """Return all checks by section. Texts of GPU checks contain the thresholds in `limits`."""
    return (
        CheckSection("CPUs", "Devices `cpu-node<N>`.", tuple(map(_rule_check, CPU_RULES))),
        CheckSection("Memory", "Devices `memory-node<N>`.", tuple(map(_rule_check, MEMORY_RULES))),
        CheckSection("Hugepages", "Devices `hugepages-<size>-node<N>`.", tuple(map(_rule_check, POOL_RULES))),
        CheckSection(
            "Devices that drivers declare",
            "In addition to the checks of the host's devices: declared CPUs, memory and pages are checked "
            "like those, and a declared GPU has the health of the host's. See "
            "[declared-devices.md](declared-devices.md).",
            (
                *(
                    _rule_check(rule)
                    for rule in dict.fromkeys(chain(*DECLARED_RULES.values()))
                    if not any(rule in host_rules for host_rules in HOST_RULES.values())
                ),
                *map(_rule_check, DECLARED_GPU_RULES),
                _catalog_check(UNWATCHED, "A GPU is declared, but the agent does not read GPUs."),
                _catalog_check(UNSEEN_DECLARED, "The device was not checked yet."),
                _catalog_check(DECLARED_GONE, "Its driver no longer declares the device."),
                _catalog_check(UNCHECKED, "No check covers the device."),
                _catalog_check(CHECK_WITHOUT_RESULT, "A check of the driver could not be run."),
                _catalog_check(CHECK_EXPIRED, "A check of the driver is no longer reported."),
                _catalog_check(
                    FAILED_DEVICE, "The driver found the device broken while it prepared a claim."
                ),
                _catalog_check(CORE_FAILED_ROW, "The monitor inside a driver has ended."),
                _catalog_check(INVALID_FILE, "A note: a driver's declaration file is not valid."),
            ),
        ),
        CheckSection(
            "Checks of the operator",
            "Commands that the configuration defines as `[[check]]`, for any device or for the node: see "
            "[custom-checks.md](custom-checks.md).",
            (
                _catalog_check(CUSTOM_FAULT, "The command of an operator's check reports a fault."),
                _catalog_check(CUSTOM_WITHOUT_RESULT, "The command of an operator's check could not be run."),
            ),
        ),
        CheckSection(
            "Pods and their containers",
            "Notes. If a pod lacks resources of a device, the note is also a cause of that device; see "
            "[host.md](host.md#notes). Notes whose source is pods come from [audits](audit.md). The checks "
            "claim.* need the amounts of claims, which the kubelet does not list: they are made by drahealth "
            "audit --pods FILE.",
            (*map(_rule_check, CGROUP_RULES), *map(_pod_audit_check, POD_AUDIT_ROWS.values())),
        ),
        CheckSection(
            "The node",
            "Notes that belong to no device.",
            (
                *map(_rule_check, NODE_RULES),
                *map(_pod_audit_check, (UNLISTED_FINDINGS_ROW, PODS_UNREADABLE_ROW)),
            ),
        ),
        CheckSection(
            "GPUs: state",
            "Devices `gpu-<N>` and their MIG instances. The first is the driver's own verdict, and takes "
            "precedence over conclusions from the others.",
            (
                *map(_rule_check, gpu_rules(limits)),
                _catalog_check(
                    NOT_READ_YET, "The GPU was not read yet.", "gpu 0 hang nvmlDeviceGetFieldValues 3s"
                ),
                _catalog_check(REMOVED_INSTANCE, "The MIG instance no longer exists.", "gpu 0 mig off"),
            ),
        ),
        CheckSection(
            "GPUs: events",
            "Events of NVML and lines of the kernel log. They cannot be read again, so the agent keeps them "
            "until they are resolved, also over restarts.",
            tuple(map(_event_check, fault_log.EVENT_FAULT_ROWS)),
        ),
        CheckSection(
            "XIDs",
            "`gpu.xid.<N>`: numbered errors of the driver, from NVML's events and from the kernel log. The "
            "third column has the severity; an XID of severity info is reported, and the device stays "
            "healthy. A number that is not listed comes from a newer driver: degraded, unless the driver "
            "reports that no recovery is needed. The configuration can change the severity of each "
            "(`[gpu.xids]` or `[[rules]]`).",
            tuple(map(xid_check, xids.XIDS.values())),
            XID_PREFIX,
            "verdict",
            "sufficient repair",
        ),
        CheckSection(
            "SXids",
            "`gpu.fabric.sxid.<N>`: errors of NVSwitches, from the kernel log. A switch belongs to no GPU, "
            "so every GPU with NVLinks gets the verdict. A number that is not listed comes from a newer "
            "driver: degraded, or by the severity in its line.",
            tuple(map(sxid_check, sxids.SXIDS.values())),
            SXID_PREFIX,
            "verdict",
            "scope",
        ),
        CheckSection("The agent itself", "", (_STALLED_SOURCE,)),
    )


_STALLED_SOURCE: Final = CheckDescription(
    code=STALLED,
    severity=Severity.UNKNOWN,
    blame=Blame.AGENT,
    source="any",
    meaning="A source is stalled: the device was not read for too long.",
    threshold="no finished pass for three periods and at least 2 s",
    why="the last known state of the device may be outdated",
    advice=STALLED_ADVICE,
    repair=Repair.NONE,
)


def _rule_check(rule: Rule) -> CheckDescription:
    # the first paragraph of the function's docstring is written for operators
    meaning = (inspect.getdoc(rule.evaluate) or "").partition("\n\n")[0]
    return _catalog_check(rule, " ".join(meaning.split()))


def _catalog_check(row: CatalogRow, meaning: str, try_command: str | None = None) -> CheckDescription:
    command = row.try_it if try_command is None else try_command
    return CheckDescription(
        row.code,
        row.severity,
        row.blame,
        row.source,
        meaning,
        row.threshold,
        row.why,
        row.advice,
        repair_for_severity(row.repair, row.severity),
        command,
    )


def _pod_audit_check(row: PodFindingRow) -> CheckDescription:
    return _catalog_check(row, row.description)


def _event_check(row: EventFaultRow) -> CheckDescription:
    return CheckDescription(
        row.code,
        row.severity,
        row.blame,
        "nvml-events" if row.event else "kmsg",
        f"{row.meaning[:1].upper()}{row.meaning[1:]}.",
        f"NVML event {row.event:#x}, once" if row.event else "a kernel log line, once",
        row.why,
        row.advice,
        repair_for_severity(row.repair, row.severity),
        f"gpu 0 event {row.event:#x}" if row.event else f'echo "{LOG_LINES[row.code]}" > /dev/kmsg',
    )


def unlisted_check(prefix: str, number: int) -> CheckDescription:
    """Return the description of the check for an XID or SXid that is in no table of the agent.

    Such a number comes from a newer driver. `prefix` selects whether `number` is an XID or an SXid.
    """
    return xid_check(xids.xid_row(number)) if prefix == XID_PREFIX else sxid_check(sxids.sxid_row(number))


def unreadable_check(check: CheckDescription) -> CheckDescription | None:
    """Return the check that reports that the data for `check` cannot be read; None: there is none."""
    rules: Iterable[Rule] = (*ALL_HOST_RULES, *DECLARED_GPU_RULES, *gpu_rules(GpuLimits()))
    rule = next((rule for rule in rules if rule.code == check.code), None)
    if rule is None:
        return None
    return _catalog_check(unreadable_row(rule), f"The data that {rule.code} needs can no longer be read.", "")
