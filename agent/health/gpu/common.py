"""What the rules of GPUs have in common: readings that are missing, counters that grow, NVML's words.

The rules stand by theme, each with its rows of the catalogue: answers, driver, memory, heat, pcie, nvlink and
fabric, beside this file. They judge readings. What NVML or the kernel log tells once, XIDs above all, is
latched, and judged in agent.health.gpu.faults.

Limits that are called the vendor's are those that NVIDIA's own health checks apply (DCGM).
"""

from typing import Final, NamedTuple

from agent.health.gpu.view import GpuView
from agent.health.rules import (
    OK,
    Growth,
    RuleNotApplicable,
    RuleNotEvaluated,
    RuleResult,
    Unreadable,
    over_limit,
)
from agent.health.words import duration
from agent.model.gpu import GpuField, GpuSet, Status
from agent.model.health import Finding, Severity
from agent.model.reading import NEVER_READ, Reading
from agent.model.settings import GpuLimits
from agent.model.source import SourceState
from agent.model.time import NS
from agent.model.wake import GpuWake, GpuWakeMode

NVML_NAMES: Final = {
    Status.UNINITIALIZED: "UNINITIALIZED",
    2: "INVALID_ARGUMENT",
    Status.NOT_SUPPORTED: "NOT_SUPPORTED",
    Status.NO_PERMISSION: "NO_PERMISSION",
    Status.NOT_FOUND: "NOT_FOUND",
    7: "INSUFFICIENT_SIZE",
    8: "INSUFFICIENT_POWER",
    Status.DRIVER_NOT_LOADED: "DRIVER_NOT_LOADED",
    Status.TIMEOUT: "TIMEOUT",
    11: "IRQ_ISSUE",
    Status.LIBRARY_NOT_FOUND: "LIBRARY_NOT_FOUND",
    Status.FUNCTION_NOT_FOUND: "FUNCTION_NOT_FOUND",
    14: "CORRUPTED_INFOROM",
    Status.LOST: "GPU_IS_LOST",
    Status.RESET_REQUIRED: "RESET_REQUIRED",
    17: "OPERATING_SYSTEM",
    Status.MISMATCH: "LIB_RM_VERSION_MISMATCH",
    19: "IN_USE",
    20: "MEMORY",
    23: "INSUFFICIENT_RESOURCES",
    27: "NOT_READY",
    Status.GPU_NOT_FOUND: "GPU_NOT_FOUND",
    29: "INVALID_STATE",
    Status.UNKNOWN: "UNKNOWN",
}
"""NVML's return codes, less the prefix ``NVML_ERROR_``."""


def nvml_name(code: int) -> str:
    """A return code of NVML for people: ``GPU_IS_LOST (15)``."""
    return f"{NVML_NAMES[code]} ({code})" if code in NVML_NAMES else f"code {code}"


def library_error(gpus: GpuSet) -> int:
    """NVML's return code for why the library is of no use to anybody; 0 if it is.

    Codes below 0 are the native core's own, of a library that works.
    """
    if gpus.nvml.state is SourceState.ABSENT:
        return gpus.err or Status.LIBRARY_NOT_FOUND
    return max(gpus.err, 0)


def is_opening(gpus: GpuSet) -> bool:
    """Whether NVML is still asked who there is: a GPU without a record may yet get one."""
    counted = gpus.nvml.state is SourceState.OK and len(gpus.gpus) < gpus.count
    return gpus.nvml.state is SourceState.STARTING or bool(gpus.call) or counted


def probation_ns(limits: GpuLimits) -> int:
    """How long a GPU that was Unhealthy is watched before it is believed again [ns]."""
    return int(limits.probation_s * NS)


def read(view: GpuView, field: GpuField) -> Reading:
    """A reading of the GPU, or why there is none."""
    return view.gpu[field] if view.gpu else NEVER_READ


class Budget(NamedTuple):
    """How many events of a counter are too many."""

    field: GpuField
    events: int
    """So many within the window."""
    window_s: int
    what: str
    """The events, for people."""

    @property
    def text(self) -> str:
        """``PCIe replays: at least 9 in 1 min``."""
        return f"{self.what}: at least {self.events} in {duration(self.window_s)}"

    @property
    def wake(self) -> GpuWake:
        """Wake the core when it is used up."""
        return GpuWake(self.field, GpuWakeMode.RISE, self.events, self.window_s * NS)


def growth(view: GpuView, field: GpuField) -> Growth:
    """How far a counter of the GPU has grown within its window."""
    return view.growth.get(field, Growth(NEVER_READ, 0.0))


def over_budget(view: GpuView, budget: Budget, code: str, severity: Severity, reason: str) -> RuleResult:
    """The answer of a rule that has one counter and nothing else; ``reason``: why it may have none."""
    grown, found = growth(view, budget.field), Finding(code, severity, budget.text)
    return over_limit(grown, budget.events, budget.window_s, found, counter=budget.field, reason=reason)


_FOREMOST: Final = (Finding, Unreadable, RuleNotEvaluated, type(OK), RuleNotApplicable)


def foremost(*answers: RuleResult) -> RuleResult:
    """The answer of a rule that looks at several things: the first that is bad, else what is not known."""
    return min(answers, key=lambda answer: _FOREMOST.index(type(answer)))
