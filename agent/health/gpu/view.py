"""Input of the rules for one GPU, and helpers that the rules share.

The rules are grouped by theme, with their catalog rows: answers, driver, memory, heat, pcie, nvlink and
fabric. They evaluate readings. Faults that NVML or the kernel log reports once, such as XIDs, are latched and
evaluated in agent.health.gpu.faults.

"The vendor's limits" are those that NVIDIA's own health checks (DCGM) apply.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from agent.health.rules import (
    OK,
    Growth,
    RuleNotApplicable,
    RuleNotEvaluated,
    RuleResult,
    Unreadable,
    counter_result,
    duration,
)
from agent.model.gpu import GpuField, GpuHost, GpuSample, GpuSet, NvmlStatus
from agent.model.health import Finding, Severity
from agent.model.pci import PciSample
from agent.model.reading import NEVER_READ, Reading
from agent.model.settings import GpuLimits
from agent.model.source import SourceState
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode


class GpuStart(NamedTuple):
    """Features of a GPU that were active at any reading since the agent started."""

    links_up: int = 0
    """Bit set of NVLinks that were ever active; a link that never was is not a fault."""
    ecc: bool = False
    """Whether ECC was ever on."""
    fabric_manager: bool = False
    """Whether nv-fabricmanager was ever running."""


class GpuView(NamedTuple):
    """Input of the rules for one GPU: its readings, its earlier state, and the limits."""

    gpu: GpuSample | None
    """Newest sample; None: a known or expected GPU that NVML has not listed since the agent started."""
    name: str
    """Name of the device, ``gpu-3``."""
    start: GpuStart
    gpus: GpuSet
    host: GpuHost
    growth: Mapping[GpuField, Growth]
    """Growth of each counter over its window in :func:`agent.health.gpu.catalog.windows`."""
    siblings_p50_ns: tuple[int, ...]
    """Median probe time of every other GPU that answers [ns]."""
    limits: GpuLimits
    now_ns: int
    log_read: bool = True
    """Whether the kernel log can be read."""
    pci: PciSample | None = None
    """PCI function of the GPU; None: not on the bus, bus not read, or a GPU that NVML never listed."""


NVML_NAMES: Final = {
    NvmlStatus.UNINITIALIZED: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    NvmlStatus.NOT_SUPPORTED: "NOT_SUPPORTED",
    NvmlStatus.NO_PERMISSION: "NO_PERMISSION",
    NvmlStatus.NOT_FOUND: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    NvmlStatus.DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED",
    NvmlStatus.TIMEOUT: "TIMEOUT",
    11: "IRQ_ISSUE",
    NvmlStatus.LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND",
    NvmlStatus.FUNCTION_NOT_FOUND: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    NvmlStatus.LOST: "GPU_IS_LOST",
    NvmlStatus.RESET_REQUIRED: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    NvmlStatus.MISMATCH: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    23: "INSUFFICIENT_RESOURCES",
    27: "NOT_READY",
    NvmlStatus.GPU_NOT_FOUND: "GPU_NOT_FOUND",
    29: "INVALID_STATE",
    NvmlStatus.UNKNOWN: "UNKNOWN",
}
"""Names of NVML's return codes, without the prefix ``NVML_ERROR_``."""


def nvml_name(code: int) -> str:
    """Format a return code of NVML: ``GPU_IS_LOST (15)``."""
    return f"{NVML_NAMES[code]} ({code})" if code in NVML_NAMES else f"code {code}"


def library_error(gpus: GpuSet) -> int:
    """Return the NVML error code because of which the library cannot be used; 0 if it can be used.

    Negative codes come from the native core, and do not mean that the library fails.
    """
    if gpus.nvml.state is SourceState.ABSENT:
        return gpus.err or NvmlStatus.LIBRARY_NOT_FOUND
    return max(gpus.err, 0)


def is_opening(gpus: GpuSet) -> bool:
    """Return whether NVML still lists its GPUs, so that a GPU without a sample may get one later."""
    incomplete = gpus.nvml.state is SourceState.OK and len(gpus.gpus) < gpus.count
    return gpus.nvml.state is SourceState.STARTING or bool(gpus.call) or incomplete


def probation_ns(limits: GpuLimits) -> int:
    """Return the length of the probation of a GPU that was Unhealthy [ns]."""
    return int(limits.probation_s * NS)


def read(view: GpuView, field: GpuField) -> Reading:
    """Return the GPU's reading of a field, or the reason why the reading is missing."""
    return view.gpu[field] if view.gpu else NEVER_READ


class GrowthLimit(NamedTuple):
    """Limit for the growth of a GPU counter within a window."""

    field: GpuField
    events: int
    """Smallest number of events within the window that is a finding."""
    window_s: int
    events_text: str
    """Name of the counted events in evidence texts."""

    @property
    def text(self) -> str:
        """Text of the limit: ``PCIe replays: at least 9 in 1 min``."""
        return f"{self.events_text}: at least {self.events} in {duration(self.window_s)}"

    @property
    def wake(self) -> GpuWake:
        """Wake-up of the engine when the counter reaches the limit."""
        return GpuWake(self.field, GpuWakeMode.RISE, self.events, self.window_s * NS)


def growth(view: GpuView, field: GpuField) -> Growth:
    """Return the growth of a counter of the GPU within its window."""
    return view.growth.get(field, Growth(NEVER_READ, 0.0))


def budget_result(
    view: GpuView, budget: GrowthLimit, code: str, severity: Severity, reason: str
) -> RuleResult:
    """Return the result of a rule that compares one counter with its limit.

    ``reason`` states why a GPU may not have the counter.
    """
    grown, found = growth(view, budget.field), Finding(code, severity, budget.text)
    return counter_result(grown, budget.events, budget.window_s, found, counter=budget.field, reason=reason)


_RESULT_ORDER: Final = (Finding, Unreadable, RuleNotEvaluated, type(OK), RuleNotApplicable)


def worst_result(*results: RuleResult) -> RuleResult:
    """Return the worst of several results: the first finding, else unreadable, then not evaluated."""
    return min(results, key=lambda result: _RESULT_ORDER.index(type(result)))
