"""Rules for a GPU's memory: ECC errors, remapped rows and retired pages.

The rules evaluate volatile counts, which start when the driver is loaded, not lifetime counts. The driver's
recovery action (agent.health.gpu.answers) decides how severe an uncorrectable error is; without it, the count
is a finding until a reset clears it.
"""

from typing import Final

from agent.health.gpu.view import GpuView, GrowthLimit, budget_result, probation_ns, read
from agent.health.gpu.xid.values import RecoveryAction
from agent.health.rules import OK, Rule, RuleNotApplicable, RuleResult, at_least, missing_result
from agent.model.gpu import GpuField
from agent.model.health import Blame, Finding, Severity
from agent.model.reading import Missing
from agent.model.settings import GpuLimits
from agent.model.wake import GpuWake

RETIRED_PAGES: Final = 60
"""The vendor's checks recommend replacement between 60 and 63 pages; the table holds 64."""
NO_ECC: Final = "the GPU has no ECC"
NO_REMAP: Final = "no row remapping: the GPU is older than Ampere, or has no ECC"
NO_RETIREMENT: Final = "no page retirement: the GPU remaps rows (Ampere and later), or has no ECC"
_PARTS: Final = (
    ("DRAM", GpuField.ECC_UNCORRECTABLE_DRAM),
    ("SRAM", GpuField.ECC_UNCORRECTABLE_SRAM),
)


def _ecc_off(view: GpuView) -> bool:
    return read(view, GpuField.ECC_MODE) == 0


def _correctable(limits: GpuLimits) -> GrowthLimit:
    events, window_s = limits.correctable_errors, limits.correctable_window_s
    return GrowthLimit(GpuField.ECC_CORRECTABLE, events, window_s, "correctable memory errors")


def uncorrectable(view: GpuView) -> RuleResult:
    """The GPU's memory has lost data since the driver was loaded.

    Degraded if the driver requests no recovery action, which means that it contained the error. Unhealthy if
    it requests one, or does not report the need.

    Source: NVML field 4 [count]; by part of the memory from nvmlDeviceGetMemoryErrorCounter.
    """
    errors = read(view, GpuField.ECC_UNCORRECTABLE)
    if _ecc_off(view):
        return RuleNotApplicable("ECC is off")
    if isinstance(errors, Missing):
        return missing_result(GpuField.ECC_UNCORRECTABLE, errors, NO_ECC)
    if not errors:
        return OK
    parts = []
    for name, field in _PARTS:
        count = read(view, field)
        if isinstance(count, int) and count:
            parts.append(name)
    where = f" in {' and '.join(parts)}" if parts else ""
    noun = "error" if errors == 1 else "errors"
    evidence = f"{at_least(errors)} uncorrectable {noun}{where} since the driver was loaded"
    contained = read(view, GpuField.RECOVERY_ACTION) == RecoveryAction.NONE
    severity = Severity.DEGRADED if contained else Severity.UNHEALTHY
    return Finding("gpu.ecc.uncorrectable", severity, evidence)


def sram_threshold(view: GpuView) -> RuleResult:
    """SRAM has had more uncorrectable errors in one place than the vendor's limit allows.

    Source: nvmlDeviceGetSramEccErrorStatus, threshold exceeded [0 or 1].
    """
    exceeded = read(view, GpuField.SRAM_THRESHOLD)
    if _ecc_off(view):
        return RuleNotApplicable("ECC is off")
    if isinstance(exceeded, Missing):
        return missing_result(GpuField.SRAM_THRESHOLD, exceeded, "driver or GPU have no SRAM threshold")
    if not exceeded:
        return OK
    evidence = "uncorrectable SRAM errors exceed the vendor's limit"
    return Finding("gpu.ecc.sram_threshold", Severity.UNHEALTHY, evidence)


def correctable_rate(view: GpuView) -> RuleResult:
    """Memory had more corrected errors than the limit allows, within the window.

    Source: growth of NVML field 3 [count].
    """
    if _ecc_off(view):
        return RuleNotApplicable("ECC is off")
    budget = _correctable(view.limits)
    return budget_result(view, budget, "gpu.ecc.correctable_rate", Severity.DEGRADED, NO_ECC)


def ecc_off(view: GpuView) -> RuleResult:
    """ECC is off, or will be after the next reset, so that memory errors are not detected.

    Source: nvmlDeviceGetEccMode, current and pending [0 or 1].
    """
    mode, pending = read(view, GpuField.ECC_MODE), read(view, GpuField.ECC_MODE_PENDING)
    if isinstance(mode, Missing):
        return missing_result(GpuField.ECC_MODE, mode, NO_ECC)
    if mode and pending != 0:
        return OK
    if mode:
        evidence = "ECC will be off after the next reset"
    elif pending == 1:
        evidence = "ECC is off until the next reset"
    else:
        evidence = "ECC is off" + (", but was on at start" if view.start.ecc else "")
    return Finding("gpu.ecc.off", Severity.INFO, evidence)


def remap_failure(view: GpuView) -> RuleResult:
    """A bad row of memory could not be remapped: its bank has no spare rows left.

    Source: NVML field 145 [0 or 1].
    """
    failed = read(view, GpuField.REMAP_FAILURE)
    if isinstance(failed, Missing):
        return missing_result(GpuField.REMAP_FAILURE, failed, NO_REMAP)
    if not failed:
        return OK
    return Finding("gpu.remap.failure", Severity.UNHEALTHY, "a bad memory row could not be remapped")


def remap_pending(view: GpuView) -> RuleResult:
    """A bad row waits for a reset to be remapped; until then its page is not used.

    Source: NVML field 144 [0 or 1].
    """
    pending = read(view, GpuField.REMAP_PENDING)
    if isinstance(pending, Missing):
        return missing_result(GpuField.REMAP_PENDING, pending, NO_REMAP)
    if not pending:
        return OK
    return Finding("gpu.remap.pending", Severity.DEGRADED, "a row remapping waits for a reset")


def retired_pending(view: GpuView) -> RuleResult:
    """A bad page waits for the next load of the driver to be retired.

    Source: NVML field 31 [0 or 1].
    """
    pending = read(view, GpuField.RETIRED_PENDING)
    if isinstance(pending, Missing):
        return missing_result(GpuField.RETIRED_PENDING, pending, NO_RETIREMENT)
    if not pending:
        return OK
    return Finding("gpu.retired.pending", Severity.DEGRADED, "a page retirement waits for a reset")


def retired_pages(view: GpuView) -> RuleResult:
    """The table of retired pages is almost full.

    Source: NVML fields 29 and 30 [pages], retired because of single-bit and double-bit errors.
    """
    pages = 0
    for field in (GpuField.RETIRED_SBE, GpuField.RETIRED_DBE):
        count = read(view, field)
        if isinstance(count, Missing):
            return missing_result(field, count, NO_RETIREMENT)
        pages += count
    if pages < RETIRED_PAGES:
        return OK
    evidence = f"{pages} pages retired, the limit is {RETIRED_PAGES}"
    return Finding("gpu.retired.pages", Severity.DEGRADED, evidence)


def rows(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules of this module."""
    budget, watch_ns = _correctable(limits), probation_ns(limits)
    replace = "drain the GPU, confirm with the vendor's field diagnostic, and replace the GPU"
    reset = "reset the GPU when its work has ended (nvidia-smi --gpu-reset)"
    return (
        Rule(
            code="gpu.remap.failure",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.REMAP_FAILURE),),
            threshold="the flag is set",
            why="a bad row stays in use, and will lose data again",
            advice=replace,
            evaluate=remap_failure,
            probation_ns=watch_ns,
            try_it="gpu 0 set remap.failure=1",
        ),
        Rule(
            code="gpu.ecc.sram_threshold",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.SRAM_THRESHOLD),),
            threshold="the flag is set; the vendor's GPU memory error manual lists the limits",
            why="on-chip memory has no spare rows, so errors in one place recur",
            advice=replace,
            evaluate=sram_threshold,
            probation_ns=watch_ns,
            try_it="gpu 0 set ecc.sram.threshold=1",
        ),
        Rule(
            code="gpu.ecc.uncorrectable",
            severity=Severity.UNHEALTHY,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(
                GpuWake(GpuField.ECC_UNCORRECTABLE),
                GpuWake(GpuField.ECC_MODE),
                GpuWake(GpuField.RECOVERY_ACTION),
                GpuWake(GpuField.ECC_UNCORRECTABLE_DRAM),
                GpuWake(GpuField.ECC_UNCORRECTABLE_SRAM),
            ),
            threshold="1 error since the driver was loaded; only degraded if the recovery action is none",
            why="a workload has lost data; unless the error was contained, the next workload may too",
            advice=reset + "; if errors recur, run the vendor's field diagnostic",
            evaluate=uncorrectable,
            probation_ns=watch_ns,
            try_it="gpu 0 set ecc.dram.uncorrectable.volatile=+2",
        ),
        Rule(
            code="gpu.ecc.correctable_rate",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(budget.wake, GpuWake(GpuField.ECC_MODE)),
            threshold=f"{budget.text} (gpu.correctable-errors, gpu.correctable-window)",
            why="corrections cost time, and a cell that fails this often may soon fail uncorrectably",
            advice="monitor the rate; " + reset + " so that bad rows are remapped",
            evaluate=correctable_rate,
            counter=True,
            window_s=budget.window_s,
            try_it=f"gpu 0 set ecc.dram.correctable.volatile=+{budget.events}",
        ),
        Rule(
            code="gpu.remap.pending",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.REMAP_PENDING),),
            threshold="the flag is set",
            why="only a reset remaps the bad row; another error before that may not be contained",
            advice=reset,
            evaluate=remap_pending,
            try_it="gpu 0 set remap.pending=1",
        ),
        Rule(
            code="gpu.retired.pages",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.RETIRED_SBE), GpuWake(GpuField.RETIRED_DBE)),
            threshold=f"{RETIRED_PAGES} pages of both kinds together",
            why="the table holds 64 pages; the next bad page stays in use",
            advice=replace,
            evaluate=retired_pages,
            try_it=f"with profile t4: gpu 0 set retired.dbe={RETIRED_PAGES}",
        ),
        Rule(
            code="gpu.retired.pending",
            severity=Severity.DEGRADED,
            blame=Blame.HARDWARE,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.RETIRED_PENDING),),
            threshold="the flag is set",
            why="the bad page is still in use until then",
            advice=reset,
            evaluate=retired_pending,
            try_it="with profile t4: gpu 0 set retired.pending=1",
        ),
        Rule(
            code="gpu.ecc.off",
            severity=Severity.INFO,
            blame=Blame.CONFIGURATION,
            source="gpu",
            gpu_reads=(GpuWake(GpuField.ECC_MODE), GpuWake(GpuField.ECC_MODE_PENDING)),
            threshold="mode 0, now or after the next reset",
            why="errors are neither corrected nor counted: results may be wrong without notice",
            advice="run nvidia-smi --ecc-config=1, then reset the GPU, unless ECC is off on purpose",
            evaluate=ecc_off,
            try_it="gpu 0 set ecc.mode=0 ecc.mode_pending=0",
        ),
    )
