"""Input of the rules for one GPU, and functions that the GPU rules share.

Rules evaluate readings. Faults that NVML or the kernel log reports only once, such as XIDs, are evaluated in
agent.health.gpu.faults.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Final, NamedTuple

from agent.health.rules import (
    OK,
    CounterGrowth,
    Rule,
    RuleInconclusive,
    RuleInputUnreadable,
    RuleNotApplicable,
    RuleResult,
    counter_limit_result,
    format_duration,
)
from agent.model.gpu import (
    GpuField,
    GpuOsSample,
    GpuSample,
    GpuWakeCondition,
    GpuWakeMode,
    NvmlReturnCode,
    NvmlSample,
)
from agent.model.health import Blame, Finding, Repair, Severity
from agent.model.machine_samples import PciSample
from agent.model.reading import NEVER_READ, Reading, SourceState
from agent.model.settings import GpuLimits
from agent.model.time import NS


class SeenGpuFeatures(NamedTuple):
    """Features of a GPU that a reading since the agent's start showed. Rules report their loss."""

    links_up: int = 0
    """Bit set of the NVLinks that were up at any time."""
    ecc: bool = False
    """True: ECC was on at some time."""
    fabric_manager: bool = False
    """True: nv-fabricmanager was running at some time."""


class GpuRuleInput(NamedTuple):
    """Input of the rules for one GPU: its readings, features seen earlier, and the limits."""

    sample: GpuSample | None
    """Newest sample; None: a known or expected GPU that NVML has not listed since the agent started."""
    name: str
    """Name of the GPU's device in reports, such as ``gpu-3``."""
    seen: SeenGpuFeatures
    gpu_set: NvmlSample
    host: GpuOsSample
    growth: Mapping[GpuField, CounterGrowth]
    """Growth of each GPU counter over its window in :func:`agent.health.gpu.rule_state.counter_windows_s`."""
    siblings_p50_ns: tuple[int, ...]
    """Median answer time of every other GPU that answers [ns]."""
    limits: GpuLimits
    now_ns: int
    is_log_readable: bool = True
    """True: the kernel log, in which the driver reports XIDs, can be read."""
    pci_function: PciSample | None = None
    """PCI function of the GPU; None: not found on the bus, or NVML never listed the GPU."""
    rule_limit: int | None = None
    """Limit that the operator sets for the growth of the evaluated rule's counter; None: the rule's own."""


# fmt: off
NVML_NAMES: Final = {
    NvmlReturnCode.UNINITIALIZED: "UNINITIALIZED", 2: "INVALID_ARGUMENT",
    NvmlReturnCode.NOT_SUPPORTED: "NOT_SUPPORTED", NvmlReturnCode.NO_PERMISSION: "NO_PERMISSION",
    NvmlReturnCode.NOT_FOUND: "NOT_FOUND", 7: "INSUFFICIENT_SIZE", 8: "INSUFFICIENT_POWER",
    NvmlReturnCode.DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED", NvmlReturnCode.TIMEOUT: "TIMEOUT", 11: "IRQ_ISSUE",
    NvmlReturnCode.LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND",
    NvmlReturnCode.FUNCTION_NOT_FOUND: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM", NvmlReturnCode.LOST: "GPU_IS_LOST",
    NvmlReturnCode.RESET_REQUIRED: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM", NvmlReturnCode.MISMATCH: "LIB_RM_VERSION_MISMATCH", 19: "IN_USE", 20: "MEMORY",
    23: "INSUFFICIENT_RESOURCES", 27: "NOT_READY", NvmlReturnCode.GPU_NOT_FOUND: "GPU_NOT_FOUND",
    29: "INVALID_STATE", NvmlReturnCode.UNKNOWN: "UNKNOWN",
}
# fmt: on
"""Names of NVML's return codes, without the prefix ``NVML_ERROR_``."""


def nvml_code_text(code: int) -> str:
    """Format a return code of NVML: ``GPU_IS_LOST (15)``."""
    return f"{NVML_NAMES[code]} ({code})" if code in NVML_NAMES else f"unknown code {code}"


def nvml_library_error(gpus: NvmlSample) -> int:
    """Return the NVML return code that makes the whole NVML library unusable; 0: the library can be used."""
    if gpus.nvml.state is SourceState.ABSENT:
        return gpus.err or NvmlReturnCode.LIBRARY_NOT_FOUND
    return max(gpus.err, 0)


def is_answering(sample: GpuSample | None, limits: GpuLimits, now_ns: int) -> bool:
    """Return whether a GPU answers: its last read succeeded, and no NVML call exceeds its deadline."""
    if sample is None or not sample.passes or sample.status != NvmlReturnCode.OK:
        return False
    return not sample.call or now_ns - sample.call_ns < limits.deadline_s * NS


def is_listing_gpus(gpus: NvmlSample) -> bool:
    """Return whether NVML is being opened or is listing GPUs, so that a missing GPU may still appear."""
    incomplete = gpus.nvml.state is SourceState.OK and len(gpus.gpus) < gpus.count
    return gpus.nvml.state is SourceState.STARTING or bool(gpus.call) or incomplete


def is_identifying_gpus(gpus: NvmlSample, limit_s: float, now_ns: int) -> bool:
    """Return whether NVML has listed a GPU whose UUID and PCI address are still being read. A GPU for which
    this takes ``limit_s`` or longer no longer counts."""
    return any(
        not (gpu.passes or (gpu.uuid and gpu.bus)) and now_ns - max(gpu.call_ns, gpu.beat_ns) < limit_s * NS
        for gpu in gpus.gpus
    )


def gpu_probation_ns(limits: GpuLimits) -> int:
    """Return the configured probation time: how long an ended fault is still reported [ns]."""
    return int(limits.probation_s * NS)


def gpu_reading(view: GpuRuleInput, field: GpuField) -> Reading:
    """Return the GPU's newest reading of a field, or the reason why there is none."""
    sample = view.sample
    return sample.readings.get(field, NEVER_READ) if sample else NEVER_READ


LONG_WINDOW_S: Final = 120
"""Shortest window of a limit for which the evidence says until when the cause stays [s]."""


class GrowthLimit(NamedTuple):
    """Limit for the growth of a GPU counter within a time window."""

    field: GpuField
    events: int
    """Smallest growth of the counter within the window that is a finding."""
    window_s: int
    events_text: str
    """Name of the counted events, for the texts of evidence."""

    @property
    def text(self) -> str:
        """Limit in words, for the threshold that a rule states: ``PCIe replays: at least 9 in 1 min``."""
        return f"{self.events_text}: at least {self.events} in {format_duration(self.window_s)}"

    @property
    def evidence(self) -> str:
        """Evidence that the counter reached the limit; for a long window also until when it is reported."""
        if self.window_s < LONG_WINDOW_S:
            return self.text
        return f"{self.text} (reported until {format_duration(self.window_s)} after the last, or a reset)"

    @property
    def wake(self) -> GpuWakeCondition:
        """Condition that wakes the evaluation engine: the counter grows by ``events`` within the window."""
        return GpuWakeCondition(self.field, GpuWakeMode.RISE, self.events, self.window_s * NS)


_UNREAD_GROWTH: Final = CounterGrowth(NEVER_READ, 0.0)


@lru_cache(256)
def _growth_finding(budget: GrowthLimit, code: str, severity: Severity) -> Finding:
    return Finding(code, severity, budget.evidence)


def growth_limit_result(
    view: GpuRuleInput, budget: GrowthLimit, code: str, severity: Severity, reason: str
) -> RuleResult:
    """Return a finding if the growth of a GPU counter has reached its limit ``budget``.

    Args:
        reason: Why a GPU may not have the counter.
    """
    if view.rule_limit is not None:
        budget = budget._replace(events=view.rule_limit)
    grown = view.growth.get(budget.field, _UNREAD_GROWTH)
    found = _growth_finding(budget, code, severity)
    return counter_limit_result(
        grown, budget.events, budget.window_s, found, counter=budget.field, reason=reason
    )


hardware_rule: Final = partial(Rule, blame=Blame.HARDWARE, source="gpu", repair=Repair.INSPECT_HARDWARE)
"""Create a rule for a hardware fault that readings of the GPU show.

By default, someone must inspect the hardware.
"""

_RESULT_ORDER: Final = (Finding, RuleInputUnreadable, RuleInconclusive, type(OK), RuleNotApplicable)


def worst_result(*results: RuleResult) -> RuleResult:
    """Return the worst of several rule results. The worst result is the first finding; else an unreadable
    input; else an inconclusive result; else OK."""
    return min(results, key=lambda result: _RESULT_ORDER.index(type(result)))
