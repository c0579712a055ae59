"""The same readings of GPUs with pynvml: good (handles kept, one call for all fields) and plain.

The plain one is what most exporters do: in each pass the handle anew, and a call for each value. Both return
what they read, so that it can be compared with the core's before anything is timed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agent.model.gpu import GpuField, GpuSample

Values = dict[tuple[int, GpuField], int]
"""By the GPU's index, and what was read of it."""

FIELDS: Final[Mapping[GpuField, str]] = {
    GpuField.RECOVERY_ACTION: "GET_GPU_RECOVERY_ACTION",
    GpuField.ECC_UNCORRECTABLE: "ECC_DBE_VOL_TOTAL",
    GpuField.ECC_CORRECTABLE: "ECC_SBE_VOL_TOTAL",
    GpuField.REMAP_CORRECTABLE: "REMAPPED_COR",
    GpuField.REMAP_UNCORRECTABLE: "REMAPPED_UNC",
    GpuField.REMAP_PENDING: "REMAPPED_PENDING",
    GpuField.REMAP_FAILURE: "REMAPPED_FAILURE",
    GpuField.RETIRED_SBE: "RETIRED_SBE",
    GpuField.RETIRED_DBE: "RETIRED_DBE",
    GpuField.RETIRED_PENDING: "RETIRED_PENDING",
    GpuField.PCIE_REPLAY: "PCIE_REPLAY_COUNTER",
    GpuField.MEM_TEMP: "MEMORY_TEMP",
    GpuField.SLOWED_SW_POWER: "PERF_POLICY_POWER",
    GpuField.SLOWED_SW_THERMAL: "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    GpuField.SLOWED_HW_THERMAL: "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    GpuField.SLOWED_HW_BRAKE: "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}
"""Ids of nvmlDeviceGetFieldValues, behind NVML_FI_DEV_; throttle times as branch 580 and later have them."""
FUNCTIONS: Final[Mapping[GpuField, str]] = {
    GpuField.TEMP: "nvmlDeviceGetTemperature",
    GpuField.MARGIN: "nvmlDeviceGetMarginTemperature",
    GpuField.CLOCK_REASONS: "nvmlDeviceGetCurrentClocksEventReasons",
}
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


class Wanted(NamedTuple):
    """What one GPU has: a careful author asks for nothing that is not there."""

    place: int
    """NVML's index."""
    fields: tuple[GpuField, ...]
    functions: tuple[GpuField, ...]
    links: int


def fast_values(gpus: Sequence[GpuSample]) -> Values:
    """What the core read of that, where there is a value."""
    wanted = (*FIELDS, *FUNCTIONS, GpuField.LINKS_UP)
    return {
        (gpu.index, field): value for gpu in gpus for field in wanted if isinstance(value := gpu[field], int)
    }


def wanted_of(gpu: GpuSample) -> Wanted:
    """What both readers are to read of a GPU: what the core found there."""
    has = {field for _, field in fast_values([gpu])}
    return Wanted(
        gpu.index,
        tuple(field for field in FIELDS if field in has),
        tuple(field for field in FUNCTIONS if field in has),
        gpu.links,
    )


class GoodGpus:
    """Handles kept; of each GPU all fields in one call, and a call for each of the rest.

    Args:
        binding: pynvml, initialised.
    """

    def __init__(self, binding: Any, wanted: Sequence[Wanted]) -> None:
        self._ask = binding.nvmlDeviceGetFieldValues
        state = binding.NVML_FI_DEV_NVLINK_GET_STATE
        self._gpus = [
            (
                one,
                binding.nvmlDeviceGetHandleByIndex(one.place),
                [_id(binding, field) for field in one.fields] + [(state, link) for link in range(one.links)],
                _calls(binding, one),
            )
            for one in wanted
        ]

    def __call__(self) -> Values:
        values: Values = {}
        for one, gpu, ids, calls in self._gpus:
            answers = self._ask(gpu, ids)
            for field, answer in zip(one.fields, answers, strict=False):
                values[one.place, field] = _number(answer)
            if one.links:
                states = answers[len(one.fields) :]
                values[one.place, GpuField.LINKS_UP] = _bits(map(_number, states))
            for field, call in calls:
                values[one.place, field] = call(gpu)
        return values


class PlainGpus:
    """A handle each time, and a call for each value."""

    def __init__(self, binding: Any, wanted: Sequence[Wanted]) -> None:
        self._binding = binding
        self._gpus = [(one, _calls(binding, one)) for one in wanted]

    def __call__(self) -> Values:
        binding = self._binding
        values: Values = {}
        for one, calls in self._gpus:
            gpu = binding.nvmlDeviceGetHandleByIndex(one.place)
            for field in one.fields:
                answer = binding.nvmlDeviceGetFieldValues(gpu, [_id(binding, field)])[0]
                values[one.place, field] = _number(answer)
            if one.links:
                states = (binding.nvmlDeviceGetNvLinkState(gpu, link) for link in range(one.links))
                values[one.place, GpuField.LINKS_UP] = _bits(states)
            for field, call in calls:
                values[one.place, field] = call(gpu)
        return values


def _id(binding: Any, field: GpuField) -> int:
    return int(getattr(binding, f"NVML_FI_DEV_{FIELDS[field]}"))


def _calls(binding: Any, one: Wanted) -> list[tuple[GpuField, Callable[[Any], int]]]:
    calls = {field: getattr(binding, FUNCTIONS[field]) for field in one.functions}
    if GpuField.TEMP in calls:
        ask, sensor = calls[GpuField.TEMP], binding.NVML_TEMPERATURE_GPU
        calls[GpuField.TEMP] = lambda gpu: ask(gpu, sensor)
    return list(calls.items())


def _number(answer: Any) -> int:
    """The value of one answer, by its type."""
    assert answer.nvmlReturn == 0, "only what is there is asked for"
    return int(getattr(answer.value, _MEMBERS[answer.valueType]))


def _bits(states: Any) -> int:
    return sum(1 << place for place, state in enumerate(states) if state)
