"""Rules for a GPU's NVLinks and for the NVLink fabric.

The NVLink rules report links that went down, and errors on links that are up. A link that was never up is not
a fault, because boards leave links unconnected.

The fabric rules report the registration of each GPU with the fabric, its health in the fabric, and the state
of the fabric manager. The fabric connects GPUs through NVSwitches; nv-fabricmanager sets it up. GPUs without
a fabric report "not supported", or "not started" for ever. These two states are not faults.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.health.gpu.rule_input import (
    GpuRuleInput,
    GrowthLimit,
    gpu_probation_ns,
    gpu_reading,
    growth_limit_result,
    hardware_rule,
    nvml_code_text,
    worst_result,
)
from agent.health.rules import (
    OK,
    Rule,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    missing_reading_result,
)
from agent.model.cpuset import format_cpus
from agent.model.gpu import GpuField, GpuWakeCondition
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.reading import Absence, Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS

NO_LINKS: Final = "the GPU has no NVLinks"
NO_COUNTERS: Final = "the driver counts no such errors"
MAX_LINKS_LISTED: Final = 3
"""Largest number of NVLinks that the evidence lists as the links with most errors."""

ERROR_LIMITS: Final = (
    GrowthLimit(GpuField.LINK_CRC, 6_000, 60, "NVLink CRC errors"),  # 100 a second
    GrowthLimit(GpuField.LINK_REPLAY, 1, 600, "NVLink replays"),
    GrowthLimit(GpuField.LINK_RECOVERY, 1, 600, "NVLink recoveries"),
    GrowthLimit(GpuField.LINK_RECEIVE_ERRORS, 1, 600, "NVLink receive errors"),
    GrowthLimit(GpuField.LINK_SYMBOL_ERRORS, 1, 600, "NVLink symbol errors"),
    # one link of 400 Gbit/s has 24 a minute at a bit error rate of 1e-12; this is the sum over all links
    GrowthLimit(GpuField.LINK_EFFECTIVE_ERRORS, 240, 60, "NVLink effective errors"),
)
"""Limits of NVIDIA's health checks (DCGM). Errors that must never occur are reported for ten minutes."""
RECOVERY_FAILED: Final = GrowthLimit(GpuField.LINK_RECOVERY_FAILED, 1, 600, "NVLink recoveries that failed")


def evaluate_links_down(view: GpuRuleInput) -> RuleResult:
    """NVLinks that were up are down.

    Source: NVML field 165 for each link, or nvmlDeviceGetNvLinkState, compared with the links that were
    active.
    """
    if gpu_reading(view, GpuField.MIG_MODE) == 1:
        return RuleNotApplicable("a GPU in MIG mode uses no NVLinks")
    up = gpu_reading(view, GpuField.LINKS_UP)
    if isinstance(up, Missing):
        return missing_reading_result(GpuField.LINKS_UP, up, NO_LINKS)
    if not view.seen.links_up:
        return RuleNotApplicable("no NVLink was up")
    lost = view.seen.links_up & ~up
    if not lost:
        return OK
    links = "NVLink" if lost.bit_count() == 1 else "NVLinks"
    evidence = f"{links} {format_cpus(lost)} down, up before: {format_cpus(view.seen.links_up)}"
    return Finding("gpu.nvlink.down", Severity.UNHEALTHY, evidence)


def _worst_links_text(counts: tuple[int, ...]) -> str:
    """Format the numbers of the NVLinks with most errors; empty: no NVLink, or too many to list."""
    most = max(counts, default=0)
    worst = sum(1 << link for link, count in enumerate(counts) if most and count * 2 > most)
    if not 0 < worst.bit_count() <= MAX_LINKS_LISTED:
        return ""
    return f"; since the driver was loaded, most on NVLink {format_cpus(worst)}"


def evaluate_link_errors(view: GpuRuleInput) -> RuleResult:
    """NVLinks have more errors than the limits allow. Each kind has a limit for the sum over all links.

    Source: growth of NVML fields 161 to 163, on NVLink 5 of fields 208, 219 and 221 [count].
    """
    results = [
        growth_limit_result(view, budget, "gpu.nvlink.errors", Severity.DEGRADED, NO_COUNTERS)
        for budget in ERROR_LIMITS
    ]
    found = [result.evidence for result in results if isinstance(result, Finding)]
    if not found:
        if any(result is OK for result in results):  # a counter of 0 had no event, however short its history
            results = [
                result
                for result, budget in zip(results, ERROR_LIMITS, strict=True)
                if not isinstance(result, RuleInconclusive) or gpu_reading(view, budget.field) != 0
            ]
        return worst_result(*results)
    evidence = ", ".join(found) + _worst_links_text(view.sample.link_errors if view.sample else ())
    return Finding("gpu.nvlink.errors", Severity.DEGRADED, evidence)


def evaluate_failed_recoveries(view: GpuRuleInput) -> RuleResult:
    """The recovery of an NVLink failed, so that the link was given up.

    Source: growth of NVML field 214 for each link [count]; NVLink 5.
    """
    code = "gpu.nvlink.recovery_failed"
    return growth_limit_result(view, RECOVERY_FAILED, code, Severity.DEGRADED, NO_COUNTERS)


def nvlink_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for a GPU's NVLinks. The texts of the rules name the configured limits."""
    window_s = min(budget.window_s for budget in ERROR_LIMITS)
    cables = "reset the GPU and its NVLink peers; if the fault recurs, check bridge, cables or baseboard"
    return (
        hardware_rule(
            code="gpu.nvlink.down",
            severity=Severity.UNHEALTHY,
            gpu_reads=(GpuWakeCondition(GpuField.LINKS_UP), GpuWakeCondition(GpuField.MIG_MODE)),
            threshold="any link that was up since the agent started",
            why="GPUs that communicate through the link can no longer do so, or only slowly",
            advice=cables,
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_links_down,
            probation_ns=gpu_probation_ns(limits),
            try_it="gpu 0 set nvlink.4.state=0",
        ),
        hardware_rule(
            code="gpu.nvlink.recovery_failed",
            severity=Severity.DEGRADED,
            gpu_reads=(RECOVERY_FAILED.wake,),
            threshold=RECOVERY_FAILED.text,
            why="the link was given up at least once, and its traffic was lost",
            advice=cables,
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_failed_recoveries,
            counts_growth=True,
            window_s=RECOVERY_FAILED.window_s,
            limit_in_view="rule_limit",
            try_it="in the scenario set recoveries_failed=0 on every link, as on NVLink 5; "
            "then: gpu 0 set nvlink.4.recoveries_failed=1",
        ),
        hardware_rule(
            code="gpu.nvlink.errors",
            severity=Severity.DEGRADED,
            gpu_reads=tuple(budget.wake for budget in ERROR_LIMITS),
            threshold="; ".join(budget.text for budget in ERROR_LIMITS),
            why="traffic between GPUs is slow and uneven, and all GPUs wait for the slowest",
            advice=cables,
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_link_errors,
            counts_growth=True,
            window_s=window_s,
            try_it="gpu 0 set nvlink.4.replay=+1",
        ),
    )


# --- the NVLink fabric -------------------------------------------------------------------------------------

JOIN_S: Final = 60
"""Time within which a GPU must register with its fabric [s]; usually it takes a few seconds."""


class FabricRegistration:
    """NVML's numbers for the states of a GPU's registration with the fabric."""

    NOT_SUPPORTED: Final = 0
    NOT_STARTED: Final = 1
    IN_PROGRESS: Final = 2
    COMPLETED: Final = 3


class FabricHealthField(NamedTuple):
    """Group of bits in NVML's fabric health mask, with severity and text of each value that is a fault."""

    shift: int
    mask: int
    bad: dict[int, tuple[Severity, str]]


_TRUE, _FALSE = 1, 2  # 0: not supported
FABRIC_HEALTH_FIELDS: Final = (
    FabricHealthField(0, 0x3, {_TRUE: (Severity.DEGRADED, "bandwidth is degraded")}),
    FabricHealthField(2, 0x3, {_TRUE: (Severity.DEGRADED, "routes are being recovered")}),
    FabricHealthField(4, 0x3, {_TRUE: (Severity.UNHEALTHY, "a route is unhealthy")}),
    FabricHealthField(6, 0x3, {_TRUE: (Severity.DEGRADED, "recovering from an access timeout")}),
    FabricHealthField(
        8,
        0xF,
        {
            2: (Severity.UNHEALTHY, "wrong system GUID"),
            3: (Severity.UNHEALTHY, "wrong chassis serial number"),
            4: (Severity.UNHEALTHY, "not in a partition"),
            5: (Severity.UNHEALTHY, "too few NVLinks"),
            6: (Severity.UNHEALTHY, "incompatible GPU firmware"),
            7: (Severity.UNHEALTHY, "invalid location"),
            8: (Severity.UNHEALTHY, "invalid GPU state"),
            **dict.fromkeys(range(9, 16), (Severity.UNHEALTHY, "incorrect configuration of an unknown kind")),
        },
    ),
    FabricHealthField(12, 0x3, {_FALSE: (Severity.DEGRADED, "no partition is assigned")}),
    FabricHealthField(14, 0x3, {_FALSE: (Severity.DEGRADED, "the global fabric manager is not connected")}),
)
"""Groups of bits in NVML's fabric health mask (NVML_GPU_FABRIC_HEALTH_MASK_*)."""
SUMMARY_PROBLEMS: Final = {
    2: (Severity.UNHEALTHY, "summary: unhealthy"),
    3: (Severity.DEGRADED, "summary: limited capacity"),
}
"""Severity and text of each bad value of NVML's fabric health summary."""
NO_FABRIC: Final = "the GPU has no fabric, or the driver does not report it"
NO_HEALTH: Final = "the driver does not report the fabric's health (before 550), or the GPU has no fabric"
UNFINISHED: Final = RuleInconclusive("registration with the fabric is not complete")


def _is_registering(view: GpuRuleInput) -> bool:
    """Return whether the registration of a GPU with a fabric is not complete.

    A GPU without a fabric can report "not started" for ever. This state counts only where a fabric manager
    runs, ran or is needed.
    """
    registration = gpu_reading(view, GpuField.FABRIC_STATE)
    if registration == FabricRegistration.NOT_STARTED:
        return view.seen.fabric_manager or not isinstance(view.host.fabric_manager, Missing)
    return registration == FabricRegistration.IN_PROGRESS


def evaluate_registration_state(view: GpuRuleInput) -> RuleResult:
    """The GPU is not registered with the fabric, so that CUDA does not start (error 802).

    A registration that has not started counts only where a fabric manager runs, ran or is needed.

    Source: nvmlDeviceGetGpuFabricInfoV, state [0 to 3].
    """
    registration = gpu_reading(view, GpuField.FABRIC_STATE)
    if isinstance(registration, Missing):
        return missing_reading_result(GpuField.FABRIC_STATE, registration, NO_FABRIC)
    if registration == FabricRegistration.NOT_SUPPORTED:
        return RuleNotApplicable(NO_FABRIC)
    if registration == FabricRegistration.IN_PROGRESS:
        return Finding("gpu.fabric.state", Severity.UNHEALTHY, "registration with the fabric does not finish")
    if registration == FabricRegistration.NOT_STARTED:
        if not _is_registering(view):
            return RuleNotApplicable("registration has not begun, and no Fabric Manager will begin it")
        return Finding("gpu.fabric.state", Severity.UNHEALTHY, "registration with the fabric does not begin")
    return OK


def evaluate_registration_status(view: GpuRuleInput) -> RuleResult:
    """Registration with the fabric ended with an error.

    A GPU registers again when the fabric manager restarts. The old error stands until that has ended.

    Source: nvmlDeviceGetGpuFabricInfoV, status [NVML's return code], which is
    valid only in state COMPLETED.
    """
    registration, code = gpu_reading(view, GpuField.FABRIC_STATE), gpu_reading(view, GpuField.FABRIC_STATUS)
    if isinstance(registration, Missing):
        return missing_reading_result(GpuField.FABRIC_STATE, registration, NO_FABRIC)
    if isinstance(code, Missing):
        return missing_reading_result(GpuField.FABRIC_STATUS, code, NO_FABRIC)
    if registration != FabricRegistration.COMPLETED:
        return UNFINISHED if _is_registering(view) else RuleNotApplicable("registration is not complete")
    if not code:
        return OK
    evidence = f"registration with the fabric failed: {nvml_code_text(code)}"
    return Finding("gpu.fabric.status", Severity.UNHEALTHY, evidence)


def _problems(mask: int, summary: int) -> Iterator[tuple[Severity, str]]:
    for part in FABRIC_HEALTH_FIELDS:
        value = mask >> part.shift & part.mask
        if value in part.bad:
            yield part.bad[value]
    if summary in SUMMARY_PROBLEMS:
        yield SUMMARY_PROBLEMS[summary]


def evaluate_fabric_health(view: GpuRuleInput) -> RuleResult:
    """The fabric reports a problem of this GPU.

    While the GPU registers, both readings can be empty. An old problem stands until they are back.

    Source: nvmlDeviceGetGpuFabricInfoV, health mask (version 2 and later) and summary (version 3 and later).
    """
    mask, summary = gpu_reading(view, GpuField.FABRIC_HEALTH), gpu_reading(view, GpuField.FABRIC_SUMMARY)
    if isinstance(mask, Missing):
        return missing_reading_result(GpuField.FABRIC_HEALTH, mask, NO_HEALTH)
    if isinstance(summary, Missing):
        if summary.absence is Absence.UNREADABLE:
            return RuleInputUnreadable(GpuField.FABRIC_SUMMARY, summary)
        summary = 0  # older drivers have only the mask
    if not mask and not summary:
        return UNFINISHED if _is_registering(view) else RuleNotApplicable(NO_HEALTH)
    found = list(_problems(mask, summary))
    if not found:
        return OK
    severity = max(severity for severity, _ in found)
    return Finding("gpu.fabric.health", severity, ", ".join(text for _, text in found))


def evaluate_fabric_manager(view: GpuRuleInput) -> RuleResult:
    """nv-fabricmanager is not running on a machine with NVSwitches, or where it ran before.

    Source: processes of the machine, and NVSwitches on its PCI bus; procfs, sysfs.
    """
    running = view.host.fabric_manager
    if running is True:
        return OK
    if isinstance(running, Missing) and running.absence is Absence.UNREADABLE:
        return RuleInputUnreadable("processes", running)
    if view.seen.fabric_manager:
        evidence = "nv-fabricmanager was running, and is not any more"
    elif running is False:
        evidence = "nv-fabricmanager is not running, and the machine has NVSwitches"
    else:
        return RuleNotApplicable("no NVSwitches on the PCI bus, or processes cannot be listed")
    return Finding("gpu.fabric.manager", Severity.DEGRADED, evidence)


def fabric_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for the NVLink fabric. The texts of the rules name the configured limits."""
    watch_ns = gpu_probation_ns(limits)
    check_manager = "check whether nvidia-fabricmanager runs, and read its log"
    return (
        hardware_rule(
            code="gpu.fabric.status",
            severity=Severity.UNHEALTHY,
            gpu_reads=(GpuWakeCondition(GpuField.FABRIC_STATUS), GpuWakeCondition(GpuField.FABRIC_STATE)),
            threshold="state 3 (completed) with any return code except 0",
            why="CUDA does not start on the GPU, or the GPU cannot reach the others",
            advice=check_manager + "; then reset the GPU",
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_registration_status,
            probation_ns=watch_ns,
            try_it="gpu 0 set fabric.status=999",
        ),
        Rule(
            code="gpu.fabric.state",
            severity=Severity.UNHEALTHY,
            blame=Blame.DRIVER,
            source="gpu",
            gpu_reads=(GpuWakeCondition(GpuField.FABRIC_STATE),),
            threshold=f"state 2, or 1 where a manager is needed, for {JOIN_S} s",
            why="CUDA does not start on the GPU (error 802, system not yet initialized)",
            advice=check_manager,
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_registration_state,
            raise_ns=JOIN_S * NS,
            probation_ns=watch_ns,
            try_it="gpu 0 set fabric.state=2",
        ),
        hardware_rule(
            code="gpu.fabric.health",
            severity=Severity.UNHEALTHY,
            gpu_reads=(
                GpuWakeCondition(GpuField.FABRIC_HEALTH),
                GpuWakeCondition(GpuField.FABRIC_SUMMARY),
                GpuWakeCondition(GpuField.FABRIC_STATE),
            ),
            threshold="unhealthy route, incorrect configuration; degraded: less bandwidth, a recovery",
            why="workloads on several GPUs or machines are slow or fail",
            advice=check_manager + "; compare with the other GPUs of the fabric",
            evaluate=evaluate_fabric_health,
            probation_ns=watch_ns,
            try_it="gpu 0 set fabric.health=0x1a9",
        ),
        Rule(
            code="gpu.fabric.manager",
            severity=Severity.DEGRADED,
            blame=Blame.DRIVER,
            source="host",
            threshold="not running where it ran, or where there are NVSwitches",
            why="existing connections continue; no link is repaired, and no GPU can rejoin after a reset",
            advice="start nvidia-fabricmanager; it must have the driver's version",
            repair=Repair.RELOAD_DRIVER,
            evaluate=evaluate_fabric_manager,
            valid_when_stalled=True,
            try_it="run a copy of sleep(1) named nv-fabricmanager, and stop it",
        ),
    )
