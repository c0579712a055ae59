"""A GPU's way to the machine: the width and generation of its PCIe link, and the errors on it.

The width never changes by itself. The generation does: an idle link slows down to save power, so it is
judged under load only.
"""

from typing import Final

from agent.health.catalog import Rule
from agent.health.gpu.common import Budget, over_budget, probation_ns, read
from agent.health.gpu.view import GpuView
from agent.health.rules import OK, RuleNotEvaluated, RuleResult, lacking
from agent.model.gpu import GpuField
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode

BUSY_PERCENT: Final = 50
FASTEST_IDLE: Final = 3
"""The first performance state that is not meant for work: 0 to 2 are."""
GEN_S: Final = 30
"""Three readings at the default pace: the link takes a moment to speed up when work begins."""

NO_LINK: Final = "the driver tells no PCIe link: a virtual machine, or an integrated GPU"
NO_AER: Final = "no PCIe error counters: the kernel or the platform has no AER"

REPLAYS: Final = Budget(GpuField.PCIE_REPLAY, 9, 60, "PCIe replays")
"""The vendor's own checks tolerate 8 a minute."""
CORRECTABLE: Final = Budget(GpuField.AER_CORRECTABLE, 100, 60, "correctable PCIe errors")
"""Nobody publishes a limit. A sound link has some in a day; one that sheds one or two a second is bad."""
NONFATAL: Final = Budget(GpuField.AER_NONFATAL, 1, 600, "non-fatal PCIe errors")
FATAL: Final = Budget(GpuField.AER_FATAL, 1, 600, "fatal PCIe errors")


def width(view: GpuView) -> RuleResult:
    """The link has lost lanes.

    Source: nvmlDeviceGetCurrPcieLinkWidth against nvmlDeviceGetMaxPcieLinkWidth, which is what GPU and slot
    can do together [lanes].
    """
    now, most = read(view, GpuField.PCIE_WIDTH), read(view, GpuField.PCIE_WIDTH_MAX)
    if isinstance(now, Missing):
        return lacking(GpuField.PCIE_WIDTH, now, NO_LINK)
    if isinstance(most, Missing):
        return lacking(GpuField.PCIE_WIDTH_MAX, most, NO_LINK)
    if now >= most:
        return OK
    return Finding("gpu.pcie.width", Severity.DEGRADED, f"{now} of {most} lanes")


def _idle(view: GpuView) -> bool:
    """Whether the link has reason to be slow. What cannot be read is no reason to call it slow."""
    busy, state = read(view, GpuField.UTILIZATION), read(view, GpuField.PSTATE)
    if isinstance(busy, Missing) or busy < BUSY_PERCENT:
        return True
    return isinstance(state, int) and state >= FASTEST_IDLE


def generation(view: GpuView) -> RuleResult:
    """Under load the link runs at a lower generation than it could.

    Source: nvmlDeviceGetCurrPcieLinkGeneration against nvmlDeviceGetMaxPcieLinkGeneration; load is
    nvmlDeviceGetUtilizationRates [%] and, if it is told, nvmlDeviceGetPerformanceState.
    """
    now, most = read(view, GpuField.PCIE_GEN), read(view, GpuField.PCIE_GEN_MAX)
    if isinstance(now, Missing):
        return lacking(GpuField.PCIE_GEN, now, NO_LINK)
    if isinstance(most, Missing):
        return lacking(GpuField.PCIE_GEN_MAX, most, NO_LINK)
    if now >= most:
        return OK
    if _idle(view):
        return RuleNotEvaluated("needs load: an idle link slows down")
    return Finding("gpu.pcie.gen", Severity.DEGRADED, f"generation {now} of {most} under load")


def replay(view: GpuView) -> RuleResult:
    """Packets must be sent again, more often than the limit allows.

    Source: NVML field 94 [count], its growth.
    """
    return over_budget(view, REPLAYS, "gpu.pcie.replay", Severity.DEGRADED, "the driver counts no replays")


def correctable(view: GpuView) -> RuleResult:
    """The link corrects errors more often than the limit allows.

    Source: ``/sys/bus/pci/devices/<bus>/aer_dev_correctable``, TOTAL_ERR_COR [count], its growth.
    """
    return over_budget(view, CORRECTABLE, "gpu.pcie.aer.correctable", Severity.DEGRADED, NO_AER)


def nonfatal(view: GpuView) -> RuleResult:
    """A transaction with the GPU was lost; the link itself goes on.

    Source: ``aer_dev_nonfatal`` [count], its growth.
    """
    return over_budget(view, NONFATAL, "gpu.pcie.aer.nonfatal", Severity.DEGRADED, NO_AER)


def fatal(view: GpuView) -> RuleResult:
    """The link to the GPU broke; what is read after that is not to be trusted.

    Source: ``aer_dev_fatal`` [count], its growth.
    """
    return over_budget(view, FATAL, "gpu.pcie.aer.fatal", Severity.UNHEALTHY, NO_AER)


def rows(limits: GpuLimits) -> tuple[Rule, ...]:
    """The rows of these rules. Their limits are of the link; nothing is configured but the probation."""
    reseat = "reseat the GPU, check riser and cables; compare with other slots"
    aer = "in a copy of sysfs (--sysfs-root) add {} to {} in bus/pci/devices/<bus>/{}"
    return (
        Rule(
            code="gpu.pcie.aer.fatal",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(FATAL.wake,),
            threshold=FATAL.text,
            why="the link was reset; the workload that used it has lost its GPU",
            advice="drain the GPU and reset it; " + reseat,
            judge=fatal,
            probation_ns=probation_ns(limits),
            counter=True,
            window_s=FATAL.window_s,
            try_it=aer.format(FATAL.events, "TOTAL_ERR_FATAL", "aer_dev_fatal"),
        ),
        Rule(
            code="gpu.pcie.aer.nonfatal",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(NONFATAL.wake,),
            threshold=NONFATAL.text,
            why="somebody's transfer failed, and a link that begins so often breaks",
            advice=reseat,
            judge=nonfatal,
            counter=True,
            window_s=NONFATAL.window_s,
            try_it=aer.format(NONFATAL.events, "TOTAL_ERR_NONFATAL", "aer_dev_nonfatal"),
        ),
        Rule(
            code="gpu.pcie.aer.correctable",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(CORRECTABLE.wake,),
            threshold=CORRECTABLE.text,
            why="each costs a little time; so many mean a bad contact or a bad lane",
            advice=reseat,
            judge=correctable,
            counter=True,
            window_s=CORRECTABLE.window_s,
            try_it=aer.format(CORRECTABLE.events, "TOTAL_ERR_COR", "aer_dev_correctable"),
        ),
        Rule(
            code="gpu.pcie.replay",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(REPLAYS.wake,),
            threshold=REPLAYS.text,
            why="the link is noisy: transfers are slow, and errors beyond repair follow",
            advice=reseat,
            judge=replay,
            counter=True,
            window_s=REPLAYS.window_s,
            try_it=f"gpu 0 set pcie.replay=+{REPLAYS.events}",
        ),
        Rule(
            code="gpu.pcie.width",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.PCIE_WIDTH), GpuWake(GpuField.PCIE_WIDTH_MAX)),
            threshold="fewer lanes than GPU and slot have together",
            why="transfers to and from the machine are slower by the lanes that are lost",
            advice=reseat,
            judge=width,
            try_it="gpu 0 set pcie.width=8",
        ),
        Rule(
            code="gpu.pcie.gen",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(
                GpuWake(GpuField.PCIE_GEN),
                GpuWake(GpuField.PCIE_GEN_MAX),
                GpuWake(GpuField.UTILIZATION, GpuWakeMode.BELOW, BUSY_PERCENT),
                GpuWake(GpuField.PSTATE, GpuWakeMode.BELOW, FASTEST_IDLE),
            ),
            threshold=f"a lower generation than GPU and slot can do, {BUSY_PERCENT} % busy or more, "
            f"for {GEN_S} s",
            why="each generation less halves the speed of transfers",
            advice="check the slot's setting in the firmware; " + reseat,
            judge=generation,
            raise_ns=GEN_S * NS,
            try_it="gpu 0 set pcie.gen=1 utilization.gpu=90",
        ),
    )
