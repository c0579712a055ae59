"""Rules for a GPU's memory: ECC errors, remapped rows and retired pages.

The rules evaluate volatile counts, which start at zero when the driver is loaded, and not lifetime counts.
The severity of an uncorrectable error follows from the recovery action that the driver requests.
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
from agent.health.gpu.xid.xid_table import RecoveryAction
from agent.health.rules import (
    OK,
    Rule,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    format_at_least,
    missing_reading_result,
)
from agent.model.gpu import GpuField, GpuWakeCondition
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.reading import Missing, is_absent
from agent.model.settings import GpuLimits

RETIRED_PAGES: Final = 60
"""Number of retired pages, of at most 64, from which on NVIDIA recommends replacement."""
NO_ECC: Final = "the GPU has no ECC"
NO_REMAP: Final = "no row remapping: the GPU is older than Ampere, or has no ECC"
NO_RETIREMENT: Final = "no page retirement: the GPU remaps rows (Ampere and later), or has no ECC"
PENDING_REPAIRS: Final = {
    field: Finding("gpu.remap.pending", Severity.DEGRADED, f"{repair} waits for a reset")
    for field, repair in (
        (GpuField.REMAP_PENDING, "a row remapping"),
        (GpuField.CHANNEL_REPAIR_PENDING, "the repair of a memory channel"),
        (GpuField.TPC_REPAIR_PENDING, "the repair of a TPC"),
    )
}
"""Finding for each flag of a repair that waits for a reset of the GPU."""
FAILED_REPAIRS: Final = {
    field: Finding("gpu.remap.failure", Severity.UNHEALTHY, evidence)
    for field, evidence in (
        (GpuField.REMAP_FAILURE, "a bad memory row could not be remapped"),
        (GpuField.UNREPAIRABLE_MEMORY, "bad memory cannot be repaired"),
    )
}
"""Finding for each flag of a repair that failed."""
_SRAM_SOURCES: Final = (("parity", GpuField.SRAM_PARITY), ("SEC-DED", GpuField.SRAM_SECDED))
UNCORRECTABLE_COUNTS: Final = (
    GpuField.ECC_UNCORRECTABLE,
    GpuField.ECC_UNCORRECTABLE_DRAM,
    GpuField.ECC_UNCORRECTABLE_SRAM,
    GpuField.SRAM_PARITY,
    GpuField.SRAM_SECDED,
)
"""Counters of uncorrectable errors since the driver was loaded: all memories, by memory, by source."""


def _ecc_off(view: GpuRuleInput) -> bool:
    return gpu_reading(view, GpuField.ECC_MODE) == 0


def _correctable_limit(limits: GpuLimits) -> GrowthLimit:
    events, window_s = limits.correctable_errors, limits.correctable_window_s
    return GrowthLimit(GpuField.ECC_CORRECTABLE, events, window_s, "correctable memory errors")


def _count(view: GpuRuleInput, field: GpuField) -> int:
    """Return the number of errors in a memory counter of the GPU; 0 if the counter cannot be read."""
    count = gpu_reading(view, field)
    return 0 if isinstance(count, Missing) else count


def _uncorrectable_errors(view: GpuRuleInput) -> tuple[int, list[str]]:
    """Return the number of uncorrectable errors, and the names of the memories that had them.

    One counter with errors is enough. The total and the counts by memory and by source are read at different
    times, and some drivers leave errors out of the total.
    """
    dram = _count(view, GpuField.ECC_UNCORRECTABLE_DRAM)
    by_source = sum(_count(view, field) for _, field in _SRAM_SOURCES)
    sram = max(_count(view, GpuField.ECC_UNCORRECTABLE_SRAM), by_source)
    sources = ", ".join(name for name, field in _SRAM_SOURCES if _count(view, field))
    parts = (["DRAM"] if dram else []) + ([f"SRAM ({sources})" if sources else "SRAM"] if sram else [])
    return max(_count(view, GpuField.ECC_UNCORRECTABLE), dram + sram), parts


def evaluate_uncorrectable_errors(view: GpuRuleInput) -> RuleResult:
    """The GPU's memory has lost data since the driver was loaded.

    Degraded if the driver requests no recovery action, which means that it contained the error. Unhealthy if
    it requests one, or does not report the need.

    Source: NVML field 4, nvmlDeviceGetMemoryErrorCounter by memory, nvmlDeviceGetSramEccErrorStatus by source
    of SRAM errors [count]; each of them decides.
    """
    if _ecc_off(view):
        return RuleNotApplicable("ECC is off")
    errors, parts = _uncorrectable_errors(view)
    if not errors:
        missing = [
            missing_reading_result(field, reading, NO_ECC)
            for field in UNCORRECTABLE_COUNTS
            if isinstance(reading := gpu_reading(view, field), Missing)
        ]
        is_unread = len(missing) == len(UNCORRECTABLE_COUNTS)
        unreadable = [result for result in missing if isinstance(result, RuleInputUnreadable)]
        return unreadable[0] if unreadable else missing[0] if is_unread else OK
    where = f" in {' and '.join(parts)}" if parts else ""
    noun = "error" if errors == 1 else "errors"
    evidence = f"{format_at_least(errors)} uncorrectable {noun}{where} since the driver was loaded"
    contained = gpu_reading(view, GpuField.RECOVERY_ACTION) == RecoveryAction.NONE
    severity = Severity.DEGRADED if contained else Severity.UNHEALTHY
    return Finding("gpu.ecc.uncorrectable", severity, evidence)


def evaluate_sram_threshold(view: GpuRuleInput) -> RuleResult:
    """SRAM has had more uncorrectable errors in one place than the vendor's limit allows.

    Source: nvmlDeviceGetSramEccErrorStatus, threshold exceeded [0 or 1].
    """
    exceeded = gpu_reading(view, GpuField.SRAM_THRESHOLD)
    if _ecc_off(view):
        return RuleNotApplicable("ECC is off")
    if isinstance(exceeded, Missing):
        return missing_reading_result(
            GpuField.SRAM_THRESHOLD, exceeded, "driver or GPU have no SRAM threshold"
        )
    if not exceeded:
        return OK
    evidence = "uncorrectable SRAM errors exceed the vendor's limit"
    return Finding("gpu.ecc.sram_threshold", Severity.UNHEALTHY, evidence)


def evaluate_correctable_rate(view: GpuRuleInput) -> RuleResult:
    """Memory had more corrected errors than the limit allows, within the window.

    Source: growth of NVML field 3 [count].
    """
    if _ecc_off(view):
        return RuleNotApplicable("ECC is off")
    budget = _correctable_limit(view.limits)
    return growth_limit_result(view, budget, "gpu.ecc.correctable_rate", Severity.DEGRADED, NO_ECC)


def evaluate_ecc_mode(view: GpuRuleInput) -> RuleResult:
    """ECC is off, or will be after the next reset, so that memory errors are not detected.

    Source: nvmlDeviceGetEccMode, current and pending [0 or 1].
    """
    mode, pending = gpu_reading(view, GpuField.ECC_MODE), gpu_reading(view, GpuField.ECC_MODE_PENDING)
    if isinstance(mode, Missing):
        return missing_reading_result(GpuField.ECC_MODE, mode, NO_ECC)
    if mode and pending != 0:
        return OK
    if mode:
        evidence = "ECC will be off after the next reset"
    elif pending == 1:
        evidence = "ECC is off until the next reset"
    else:
        evidence = "ECC is off" + (", but was on at start" if view.seen.ecc else "")
    return Finding("gpu.ecc.off", Severity.INFO, evidence)


def _flag_result(view: GpuRuleInput, field: GpuField, missing_reason: str, found: Finding) -> RuleResult:
    """Return ``found`` if NVML reports that the flag ``field`` of the GPU is set, OK if it is not set.

    Args:
        missing_reason: Reason that is reported if the GPU does not have the flag.
    """
    flag = gpu_reading(view, field)
    if isinstance(flag, Missing):
        return missing_reading_result(field, flag, missing_reason)
    return found if flag else OK


def evaluate_remap_failure(view: GpuRuleInput) -> RuleResult:
    """Bad memory could not be remapped or repaired, for example because its bank has no spare rows.

    Source: NVML field 145; nvmlDeviceGetUnrepairableMemoryFlag_v1, driver 590 and later [0 or 1].
    """
    if is_absent(gpu_reading(view, GpuField.UNREPAIRABLE_MEMORY)):
        return _flag_result(view, GpuField.REMAP_FAILURE, NO_REMAP, FAILED_REPAIRS[GpuField.REMAP_FAILURE])
    return worst_result(*(_flag_result(view, field, NO_REMAP, bad) for field, bad in FAILED_REPAIRS.items()))


def evaluate_pending_remap(view: GpuRuleInput) -> RuleResult:
    """A bad memory row, memory channel or TPC waits for a reset to be remapped or repaired.

    Source: NVML field 144; nvmlDeviceGetRepairStatus, driver 580 and later [0 or 1].
    """
    results = [_flag_result(view, field, NO_REMAP, found) for field, found in PENDING_REPAIRS.items()]
    return worst_result(*results) if any(results) else OK  # the usual case, at little cost


def evaluate_pending_retirement(view: GpuRuleInput) -> RuleResult:
    """A bad page waits for the next load of the driver to be retired.

    Source: NVML field 31 [0 or 1].
    """
    found = Finding("gpu.retired.pending", Severity.DEGRADED, "a page retirement waits for a reset")
    return _flag_result(view, GpuField.RETIRED_PENDING, NO_RETIREMENT, found)


def evaluate_retired_pages(view: GpuRuleInput) -> RuleResult:
    """The table of retired pages is almost full.

    Source: NVML fields 29 and 30 [pages], retired because of single-bit and double-bit errors.
    """
    pages = 0
    for field in (GpuField.RETIRED_SBE, GpuField.RETIRED_DBE):
        count = gpu_reading(view, field)
        if isinstance(count, Missing):
            return missing_reading_result(field, count, NO_RETIREMENT)
        pages += count
    if pages < RETIRED_PAGES:
        return OK
    evidence = f"{pages} pages retired, the limit is {RETIRED_PAGES}"
    return Finding("gpu.retired.pages", Severity.DEGRADED, evidence)


def memory_rules(limits: GpuLimits) -> tuple[Rule, ...]:
    """Return the rules for a GPU's memory. The texts of the rules name the configured limits."""
    budget, watch_ns = _correctable_limit(limits), gpu_probation_ns(limits)
    replace = "drain the GPU, confirm with the vendor's field diagnostic, and replace the GPU"
    reset = "reset the GPU when its work has ended (nvidia-smi --gpu-reset)"
    return (
        hardware_rule(
            code="gpu.remap.failure",
            severity=Severity.UNHEALTHY,
            gpu_reads=tuple(map(GpuWakeCondition, FAILED_REPAIRS)),
            threshold="a flag is set",
            why="bad memory stays in use, and will lose data again",
            advice=replace,
            repair=Repair.REPLACE_HARDWARE,
            evaluate=evaluate_remap_failure,
            probation_ns=watch_ns,
            try_it="gpu 0 set remap.failure=1",
        ),
        hardware_rule(
            code="gpu.ecc.sram_threshold",
            severity=Severity.UNHEALTHY,
            gpu_reads=(GpuWakeCondition(GpuField.SRAM_THRESHOLD),),
            threshold="the flag is set; the vendor's GPU memory error manual lists the limits",
            why="on-chip memory has no spare rows, so errors in one place recur",
            advice=replace,
            repair=Repair.REPLACE_HARDWARE,
            evaluate=evaluate_sram_threshold,
            probation_ns=watch_ns,
            try_it="gpu 0 set ecc.sram.threshold=1",
        ),
        hardware_rule(
            code="gpu.ecc.uncorrectable",
            severity=Severity.UNHEALTHY,
            gpu_reads=(
                *map(GpuWakeCondition, UNCORRECTABLE_COUNTS),
                GpuWakeCondition(GpuField.ECC_MODE),
                GpuWakeCondition(GpuField.RECOVERY_ACTION),
            ),
            threshold="1 error since the driver was loaded; only degraded if the recovery action is none",
            why="a workload has lost data; unless the error was contained, the next workload may too",
            advice=reset + "; if errors recur, run the vendor's field diagnostic",
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_uncorrectable_errors,
            probation_ns=watch_ns,
            try_it="gpu 0 set ecc.dram.uncorrectable.volatile=+2",
        ),
        hardware_rule(
            code="gpu.ecc.correctable_rate",
            severity=Severity.DEGRADED,
            gpu_reads=(budget.wake, GpuWakeCondition(GpuField.ECC_MODE)),
            threshold=f"{budget.text} (gpu.correctable-errors, gpu.correctable-window)",
            why="corrections cost time, and a cell that fails this often may soon fail uncorrectably",
            advice="monitor the rate; " + reset + " so that bad rows are remapped",
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_correctable_rate,
            counts_growth=True,
            window_s=budget.window_s,
            limit_in_view="rule_limit",
            try_it=f"gpu 0 set ecc.dram.correctable.volatile=+{budget.events}",
        ),
        hardware_rule(
            code="gpu.remap.pending",
            severity=Severity.DEGRADED,
            gpu_reads=tuple(map(GpuWakeCondition, PENDING_REPAIRS)),
            threshold="a flag is set",
            why="only a reset replaces the bad part; another error before that may not be contained",
            advice=reset,
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_pending_remap,
            try_it="gpu 0 set remap.pending=1",
        ),
        hardware_rule(
            code="gpu.retired.pages",
            severity=Severity.DEGRADED,
            gpu_reads=(GpuWakeCondition(GpuField.RETIRED_SBE), GpuWakeCondition(GpuField.RETIRED_DBE)),
            threshold=f"{RETIRED_PAGES} pages of both kinds together",
            why="the table holds 64 pages; the next bad page stays in use",
            advice=replace,
            repair=Repair.REPLACE_HARDWARE,
            evaluate=evaluate_retired_pages,
            try_it=f"with profile t4: gpu 0 set retired.dbe={RETIRED_PAGES}",
        ),
        hardware_rule(
            code="gpu.retired.pending",
            severity=Severity.DEGRADED,
            gpu_reads=(GpuWakeCondition(GpuField.RETIRED_PENDING),),
            threshold="the flag is set",
            why="the bad page is still in use until then",
            advice=reset,
            repair=Repair.RESET_DEVICE,
            evaluate=evaluate_pending_retirement,
            try_it="with profile t4: gpu 0 set retired.pending=1",
        ),
        Rule(
            code="gpu.ecc.off",
            severity=Severity.INFO,
            blame=Blame.CONFIGURATION,
            source="gpu",
            gpu_reads=(GpuWakeCondition(GpuField.ECC_MODE), GpuWakeCondition(GpuField.ECC_MODE_PENDING)),
            threshold="mode 0, now or after the next reset",
            why="errors are neither corrected nor counted: results may be wrong without notice",
            advice="run nvidia-smi --ecc-config=1, then reset the GPU, unless ECC is off on purpose",
            repair=Repair.NONE,
            evaluate=evaluate_ecc_mode,
            try_it="gpu 0 set ecc.mode=0 ecc.mode_pending=0",
        ),
    )
