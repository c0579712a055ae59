"""A GPU's way to other GPUs: NVLinks that went down, and the errors on those that are up.

A link that was never up is no fault: boards leave links unconnected. What connects the links of a whole
machine is in agent.health.gpu.fabric.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.gpu.common import Budget, foremost, over_budget, probation_ns, read
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotApplicable, RuleResult, lacking
from agent.model.cpuset import format_cpus
from agent.model.gpu import GpuField
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.wake import GpuWake

NO_LINKS: Final = "the GPU has no NVLinks"
NO_COUNTERS: Final = "the driver counts no such errors"
BLAMED: Final = 3
"""Links with most of the errors are named, if they are so few."""

BUDGETS: Final = (
    Budget(GpuField.LINK_CRC, 6_000, 60, "NVLink CRC errors"),  # 100 a second
    Budget(GpuField.LINK_REPLAY, 1, 600, "NVLink replays"),
    Budget(GpuField.LINK_RECOVERY, 1, 600, "NVLink recoveries"),
    Budget(GpuField.LINK_RECEIVE_ERRORS, 1, 600, "NVLink receive errors"),
    Budget(GpuField.LINK_SYMBOL_ERRORS, 1, 600, "NVLink symbol errors"),
    # one link's 400 Gbit/s at a bit error rate of 1e-12 has 24 a minute; here all links are summed
    Budget(GpuField.LINK_EFFECTIVE_ERRORS, 240, 60, "NVLink effective errors"),
)
"""The limits of the vendor's own checks, which apply them per link and minute. What must never happen is told
for ten minutes."""
RECOVERY_FAILED: Final = Budget(GpuField.LINK_RECOVERY_FAILED, 1, 600, "NVLink recoveries that failed")


def down(view: GpuView) -> RuleResult:
    """Links that have been up are down.

    Source: NVML field 165 per link, or nvmlDeviceGetNvLinkState, against every link that has been active.
    """
    if read(view, GpuField.MIG_MODE) == 1:
        return RuleNotApplicable("a GPU in MIG mode uses no NVLinks")
    up = read(view, GpuField.LINKS_UP)
    if isinstance(up, Missing):
        return lacking(GpuField.LINKS_UP, up, NO_LINKS)
    if not view.start.links_up:
        return RuleNotApplicable("no NVLink has been up")
    gone = view.start.links_up & ~up
    if not gone:
        return OK
    links = "NVLink" if gone.bit_count() == 1 else "NVLinks"
    evidence = f"{links} {format_cpus(gone)} down, up before: {format_cpus(view.start.links_up)}"
    return Finding("gpu.nvlink.down", Severity.UNHEALTHY, evidence)


def _blamed(counts: tuple[int, ...]) -> str:
    """The links that have most of the errors since the driver was loaded, if they are few."""
    most = max(counts, default=0)
    worst = sum(1 << link for link, count in enumerate(counts) if most and count * 2 > most)
    if not 0 < worst.bit_count() <= BLAMED:
        return ""
    return f"; since the driver was loaded, most on NVLink {format_cpus(worst)}"


def errors(view: GpuView) -> RuleResult:
    """Links make more errors than the limits allow. Each kind has its own limit; the sum over links counts.

    Source: NVML fields 161 to 163, on NVLink 5 fields 208, 219 and 221 [count], their growth.
    """
    answers = [
        over_budget(view, budget, "gpu.nvlink.errors", Severity.DEGRADED, NO_COUNTERS) for budget in BUDGETS
    ]
    found = [answer.evidence for answer in answers if isinstance(answer, Finding)]
    if not found:
        return foremost(*answers)
    evidence = ", ".join(found) + _blamed(view.gpu.link_errors if view.gpu else ())
    return Finding("gpu.nvlink.errors", Severity.DEGRADED, evidence)


def recovery_failed(view: GpuView) -> RuleResult:
    """A link lost its partner, tried to come back and was given up.

    Source: NVML field 214 per link [count], its growth; NVLink 5.
    """
    code = "gpu.nvlink.recovery_failed"
    return over_budget(view, RECOVERY_FAILED, code, Severity.DEGRADED, NO_COUNTERS)


def rows(limits: GpuLimits) -> tuple[Rule, ...]:
    """The rows of these rules."""
    window_s = min(budget.window_s for budget in BUDGETS)
    cables = "reset the GPU with those it is linked to; if it comes again check bridge, cables or baseboard"
    return (
        Rule(
            code="gpu.nvlink.down",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.LINKS_UP), GpuWake(GpuField.MIG_MODE)),
            threshold="any link that has been up since the agent started",
            why="GPUs that worked together through it no longer can, or only slowly",
            advice=cables,
            judge=down,
            probation_ns=probation_ns(limits),
            try_it="gpu 0 set nvlink.4.state=0",
        ),
        Rule(
            code="gpu.nvlink.recovery_failed",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(RECOVERY_FAILED.wake,),
            threshold=RECOVERY_FAILED.text,
            why="the link was given up at least once, and whatever went through it was lost",
            advice=cables,
            judge=recovery_failed,
            counter=True,
            window_s=RECOVERY_FAILED.window_s,
            try_it="in the scenario set recoveries_failed=0 on every link, as NVLink 5 has it; "
            "then: gpu 0 set nvlink.4.recoveries_failed=1",
        ),
        Rule(
            code="gpu.nvlink.errors",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=tuple(budget.wake for budget in BUDGETS),
            threshold="; ".join(budget.text for budget in BUDGETS),
            why="traffic between GPUs is slow and uneven, and everybody waits for the slowest",
            advice=cables,
            judge=errors,
            counter=True,
            window_s=window_s,
            try_it="gpu 0 set nvlink.4.replay=+1",
        ),
    )
