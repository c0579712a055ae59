"""Rules for a GPU's NVLinks: links that went down, and errors on links that are up.

A link that was never up is not a fault, because boards leave links unconnected.
"""

from typing import Final

from agent.health.gpu.rule_input import (
    GpuRuleInput,
    GrowthLimit,
    gpu_probation_ns,
    gpu_reading,
    growth_limit_result,
    hardware_rule,
    worst_result,
)
from agent.health.rules import (
    OK,
    Rule,
    RuleInconclusive,
    RuleNotApplicable,
    RuleResult,
    missing_reading_result,
)
from agent.model.cpuset import format_cpus
from agent.model.gpu import GpuField
from agent.model.health import Finding, Repair, Severity
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.wake_conditions import GpuWakeCondition

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
    """Format the NVLinks with most errors, by the count per link; empty: no link, or many links."""
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
    """Return the rules for a GPU's NVLinks, with the configured limits in their texts."""
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
