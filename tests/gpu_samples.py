"""Samples and views of a healthy H100 and T4, with changes by tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from agent.health.gpu.h100_readings import ALL_UP, IDLE_H100, LINKS
from agent.health.gpu.rule_input import GpuRuleInput, SeenGpuFeatures
from agent.health.gpu.rule_state import counter_windows_s
from agent.health.rules import CounterGrowth
from agent.model.gpu import GpuField, GpuOsSample, GpuSample, NvmlSample
from agent.model.machine_samples import PciSample
from agent.model.reading import Absence, Missing, Reading, SourceSample, SourceState
from agent.model.settings import GpuLimits
from agent.model.time import NS

ABSENT: Final = Missing(Absence.ABSENT)
EIO: Final = Missing(Absence.UNREADABLE, 5)
LIMITS: Final = GpuLimits()
NOW_NS: Final = 1_000 * NS

NO_PAGES: Final = {
    GpuField.RETIRED_SBE: ABSENT,
    GpuField.RETIRED_DBE: ABSENT,
    GpuField.RETIRED_PENDING: ABSENT,
}
H100: Final[Mapping[GpuField, Reading]] = {**dict.fromkeys(GpuField, 0), **IDLE_H100, **NO_PAGES}
"""Readings of an idle, healthy H100."""
T4: Final[Mapping[GpuField, Reading]] = {
    **H100,
    **dict.fromkeys(NO_PAGES, 0),
    **{
        field: ABSENT
        for field in GpuField
        if field.startswith(
            (
                "remap",
                "channel",
                "tpc",
                "unrep",
                "link",
                "fabric",
                "sram",
                "mem_",
                "recovery",
                "mig",
                "margin",
            )
        )
    },
    GpuField.TEMP_MEM_MAX: ABSENT,
    GpuField.TEMP_SLOWDOWN: 93,
    GpuField.PCIE_GEN: 1,
    GpuField.PCIE_GEN_MAX: 3,
    GpuField.PSTATE: 8,
    GpuField.ARCHITECTURE: 6,
}
"""Readings of a healthy T4, a GPU without NVLink, row remapping, fabric and recovery action."""


def source_sample(state: SourceState = SourceState.OK, name: str = "nvml") -> SourceSample:
    """Return a source sample."""
    return SourceSample(name, state, NOW_NS, NS, 0, "", passes=100, vital=False)


def gpu_sample(
    changed: Mapping[GpuField, Reading] | None = None,
    *,
    readings: Mapping[GpuField, Reading] = H100,
    number: int = 0,
    **attributes: Any,
) -> GpuSample:
    """Return the sample of a GPU that answers, with ``changed`` readings and other ``attributes``."""
    healthy = GpuSample(
        index=number,
        uuid=f"GPU-{number:08x}",
        bus=f"0000:{number + 1}b:00.0",
        name="NVIDIA H100 80GB HBM3",
        serial=f"{number}",
        status=0,
        passes=100,
        beat_ns=NOW_NS,
        period_ns=NS,
        probe_p50_ns=400_000,
        links=LINKS,
        link_errors=(0,) * LINKS,
        readings={**readings, **(changed or {})},
    )
    return replace(healthy, **attributes)


def pci_sample(number: int = 0, driver: str = "nvidia", model: str = "") -> PciSample:
    """Return the PCI function of a GPU."""
    bus = f"0000:{number + 1}b:00.0"
    return PciSample(bus, 0x10DE, 0x2330, driver, model, 16, 16, 0, 0, 0)


def gpu_set(*gpus: GpuSample, state: SourceState = SourceState.OK, **attributes: Any) -> NvmlSample:
    """Return a set of GPUs with a working library."""
    events = source_sample(name="nvml-events")
    healthy = NvmlSample(
        gpus, source_sample(state), events, generation=1, count=len(gpus), driver="570.86.15"
    )
    return replace(healthy, **attributes)


def flat_growth(limits: GpuLimits, readings: Mapping[GpuField, Reading]) -> dict[GpuField, CounterGrowth]:
    """Return the growth of counters that did not change within their windows; absent ones stay absent."""
    counts = {field: readings.get(field, ABSENT) for field in counter_windows_s(limits)}
    return {
        field: CounterGrowth(0, float(window_s))
        if isinstance(counts[field], int)
        else CounterGrowth(counts[field], 0.0)
        for field, window_s in counter_windows_s(limits).items()
    }


def gpu_view(
    changed: Mapping[GpuField, Reading] | None = None,
    *,
    grown: Mapping[GpuField, CounterGrowth | int] | None = None,
    limits: GpuLimits = LIMITS,
    readings: Mapping[GpuField, Reading] = H100,
    **attributes: Any,
) -> GpuRuleInput:
    """Return the view of gpu-0, one of eight GPUs.

    Args:
        changed: Readings that differ from those of a healthy GPU.
        grown: Growth of counters, as a number or a Growth.
        limits: Limits from the configuration.
        readings: Readings of a healthy GPU.
        attributes: Further attributes of the view.
    """
    gpu = gpu_sample(changed, readings=readings)
    growth = flat_growth(limits, gpu.readings)
    for field, by in (grown or {}).items():
        growth[field] = (
            by
            if isinstance(by, CounterGrowth)
            else CounterGrowth(by, float(counter_windows_s(limits)[field]))
        )
    others = [gpu_sample(number=number) for number in range(1, 8)]
    healthy = GpuRuleInput(
        sample=gpu,
        name="gpu-0",
        seen=SeenGpuFeatures(links_up=ALL_UP, ecc=True, fabric_manager=True),
        gpu_set=gpu_set(gpu, *others),
        host=GpuOsSample(bus_gpus=tuple(each.bus for each in (gpu, *others)), fabric_manager=True),
        growth=growth,
        siblings_p50_ns=(400_000,) * 7,
        limits=limits,
        now_ns=NOW_NS,
    )
    return healthy._replace(**attributes)


def hanging_view(age_s: float, call: str = "nvmlDeviceGetFieldValues", **attributes: Any) -> GpuRuleInput:
    """Return the view of a GPU whose NVML call has hung for ``age_s``."""
    gpu = gpu_sample(call=call, call_ns=NOW_NS - int(age_s * NS))
    return gpu_view(sample=gpu, **attributes)
