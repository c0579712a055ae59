"""Time of one pass over GPUs: the C core, the bare NVML calls, and pynvml.

The fake NVML answers from memory within 0.2 us, where a driver needs 10 us to 1 ms, so that the times are
mostly the overhead of each caller. A process that loaded the fake NVML keeps its number of GPUs, so each
number of GPUs is measured in its own process.

pynvml is called in two ways: PynvmlBatchReader (``good pynvml`` in reports) keeps handles and reads all
fields in one call; PynvmlPerValueReader (``plain pynvml``), like most exporters, gets the handle in each pass
and makes one call per value.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec

from agent.bench.file_trees import temporary_directory
from agent.bench.processes import FakeNvmlUnavailable, write_gpu_scenario
from agent.bench.result import ResultMismatch, ResultTable, RunSize, SuiteOutcome, rows_from_race
from agent.bench.timing import Contender, time_contenders
from agent.model.gpu import GpuField, GpuSample, NvmlSample
from agent.model.time import NS
from agent.native.gpu_watch import GpuWatch, GpuWatchOptions
from agent.sources.nvml import open_nvml_session

GpuValues = dict[tuple[int, GpuField], int]
"""Value of each reading, by index of the GPU in NVML and name of the field."""

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
"""Field ID constants of pynvml without NVML_FI_DEV_; throttle times as in branch 580 and later."""
FUNCTIONS: Final[Mapping[GpuField, str]] = {
    GpuField.TEMP: "nvmlDeviceGetTemperature",
    GpuField.MARGIN: "nvmlDeviceGetMarginTemperature",
    GpuField.CLOCK_REASONS: "nvmlDeviceGetCurrentClocksEventReasons",
}
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


class GpuReadSet(NamedTuple):
    """Fields and functions of NVML that one GPU supports; all compared readers read only these."""

    gpu_index: int
    """Index of the GPU in NVML."""
    fields: tuple[GpuField, ...]
    functions: tuple[GpuField, ...]
    links: int


def fast_values(gpus: Sequence[GpuSample]) -> GpuValues:
    """Return the values of NVML fields that the C core reads often, in each pass over the GPUs.

    Fields that a GPU does not support are left out.
    """
    fields = (*FIELDS, *FUNCTIONS, GpuField.LINKS_UP)
    return {
        (gpu.index, field): value for gpu in gpus for field in fields if isinstance(value := gpu[field], int)
    }


def read_set_of(gpu: GpuSample) -> GpuReadSet:
    """Return the fields and functions that the C core could read on a GPU."""
    available = {field for _, field in fast_values([gpu])}
    return GpuReadSet(
        gpu.index,
        tuple(field for field in FIELDS if field in available),
        tuple(field for field in FUNCTIONS if field in available),
        gpu.links,
    )


class PynvmlBatchReader:
    """Reader with pynvml that keeps NVML handles and makes few calls.

    One call reads all fields of a GPU. Each value that is not an NVML field takes one more call.

    Args:
        binding: Initialized pynvml module.
    """

    def __init__(self, binding: Any, read_sets: Sequence[GpuReadSet]) -> None:
        self._get_fields = binding.nvmlDeviceGetFieldValues
        state = binding.NVML_FI_DEV_NVLINK_GET_STATE
        self._gpus = [
            (
                read_set,
                binding.nvmlDeviceGetHandleByIndex(read_set.gpu_index),
                [_field_id(binding, field) for field in read_set.fields]
                + [(state, link) for link in range(read_set.links)],
                _value_calls(binding, read_set),
            )
            for read_set in read_sets
        ]

    def __call__(self) -> GpuValues:
        values: GpuValues = {}
        for read_set, gpu, ids, calls in self._gpus:
            results = self._get_fields(gpu, ids)
            for field, result in zip(read_set.fields, results, strict=False):
                values[read_set.gpu_index, field] = _result_number(result)
            if read_set.links:
                states = results[len(read_set.fields) :]
                values[read_set.gpu_index, GpuField.LINKS_UP] = _bit_mask(map(_result_number, states))
            for field, call in calls:
                values[read_set.gpu_index, field] = call(gpu)
        return values


class PynvmlPerValueReader:
    """Reader with pynvml that gets handles in each pass over the GPUs, and makes one call per value."""

    def __init__(self, binding: Any, read_sets: Sequence[GpuReadSet]) -> None:
        self._binding = binding
        self._gpus = [(read_set, _value_calls(binding, read_set)) for read_set in read_sets]

    def __call__(self) -> GpuValues:
        binding = self._binding
        values: GpuValues = {}
        for read_set, calls in self._gpus:
            gpu = binding.nvmlDeviceGetHandleByIndex(read_set.gpu_index)
            for field in read_set.fields:
                result = binding.nvmlDeviceGetFieldValues(gpu, [_field_id(binding, field)])[0]
                values[read_set.gpu_index, field] = _result_number(result)
            if read_set.links:
                states = (binding.nvmlDeviceGetNvLinkState(gpu, link) for link in range(read_set.links))
                values[read_set.gpu_index, GpuField.LINKS_UP] = _bit_mask(states)
            for field, call in calls:
                values[read_set.gpu_index, field] = call(gpu)
        return values


def _field_id(binding: Any, field: GpuField) -> int:
    return int(getattr(binding, f"NVML_FI_DEV_{FIELDS[field]}"))


def _value_calls(binding: Any, read_set: GpuReadSet) -> list[tuple[GpuField, Callable[[Any], int]]]:
    calls = {field: getattr(binding, FUNCTIONS[field]) for field in read_set.functions}
    if GpuField.TEMP in calls:
        get_temperature, sensor = calls[GpuField.TEMP], binding.NVML_TEMPERATURE_GPU
        calls[GpuField.TEMP] = lambda gpu: get_temperature(gpu, sensor)
    return list(calls.items())


def _result_number(result: Any) -> int:
    """Return the number in NVML's result for one field, by its type."""
    assert result.nvmlReturn == 0, "unsupported fields are not read"
    return int(getattr(result.value, _MEMBERS[result.valueType]))


def _bit_mask(states: Any) -> int:
    return sum(1 << index for index, state in enumerate(states) if state)


P = ParamSpec("P")

REAL: Final = "libnvidia-ml.so.1"
HOUR_NS: Final = 3600 * NS
SETTLING: Final = 3
"""Number of passes after which the C core knows all unsupported fields and reads fast fields only."""
VARYING: Final = frozenset({GpuField.TEMP, GpuField.MARGIN, GpuField.MEM_TEMP, GpuField.CLOCK_REASONS})
"""Fields of a real GPU that change between two readings."""
LOWER_BOUND: Final = "lower bound: bare NVML calls"
NOTES: Final = (
    "core and lower bound include one call from Python each (0.2 us)",
    "the core adds the deadline of each call and the record that readers copy",
)


def run(run_size: RunSize, outcome: SuiteOutcome) -> None:
    """Measure the fake NVML at several numbers of GPUs, and the driver's library if installed."""
    for count in run_size.gpus:
        with temporary_directory() as directory:
            try:
                fake = write_gpu_scenario(directory, count)
            except FakeNvmlUnavailable as reason:
                outcome.skipped.append(f"poll: GPUs of the fake NVML: {reason}")
                break
            outcome.merge(_in_fresh_process(measure_gpus, run_size, str(fake.library), fake.scenario))
    outcome.merge(_in_fresh_process(measure_real_gpus, run_size))


def _in_fresh_process(function: Callable[P, SuiteOutcome], *args: P.args, **kwargs: P.kwargs) -> SuiteOutcome:
    """Call ``function`` in a new process, which has not loaded NVML; return its result."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def measure_real_gpus(run_size: RunSize) -> SuiteOutcome:
    """Measure all GPUs of this machine; if it has no GPUs, return the reason as a skipped measurement."""
    with open_gpu_watch(REAL) as gpus:
        gpu_set = read_gpus(gpus)
    if gpu_set.gpus:
        return measure_gpus(run_size, REAL, None)
    outcome = SuiteOutcome()
    outcome.skipped.append(f"poll: GPUs of this machine: {gpu_set.nvml.detail or 'none found'}")
    return outcome


def measure_gpus(run_size: RunSize, library: str, scenario: Path | None) -> SuiteOutcome:
    """Measure the reading of all GPUs of an NVML library.

    ``scenario`` is the file that describes the GPUs of the fake NVML; None: ``library`` is the real NVML.
    """
    if scenario:
        os.environ["FAKE_NVML"] = str(scenario)
    outcome = SuiteOutcome()
    with open_gpu_watch(library) as gpus, open_nvml_session(library) as nvml:
        gpu_set = read_gpus(gpus)
        core = fast_values(gpu_set.gpus)
        read_sets = [read_set_of(gpu) for gpu in gpu_set.gpus]
        good, plain = (
            PynvmlBatchReader(nvml.binding, read_sets),
            PynvmlPerValueReader(nvml.binding, read_sets),
        )
        for reader in (good, plain):
            check_equal(core, reader(), frozenset() if scenario else VARYING)
        calls = count_pass_calls(gpus.run_pass(), gpus.run_lower_bound())
        pynvml = f"pynvml {version('nvidia-ml-py')}"
        contenders = [
            Contender("core", "core: dh_gpus_pass", gpus.run_pass),
            Contender("floor", LOWER_BOUND, gpus.run_lower_bound),
            Contender("good", f"good {pynvml}: handles kept, all fields in one call", good),
            Contender("plain", f"plain {pynvml}: a handle each time, a call for each value", plain),
        ]
        timed = time_contenders(contenders, rounds=run_size.warm_rounds, limit_s=run_size.warm_limit_s)
    count = len(gpu_set.gpus)
    kind, name = ("gpus", "fake NVML") if scenario else ("real_gpus", gpu_set.gpus[0].name)
    section = f"pass over GPUs, {name}, driver {gpu_set.driver}; warm, back to back"
    rows = rows_from_race(f"poll.{kind}{count}.warm", timed, "floor")
    equal = (
        f"{len(core)} values equal in core, good and plain; {calls} NVML calls in core, lower bound and good"
    )
    outcome.tables.append(ResultTable(f"{count} GPUs", rows, LOWER_BOUND, (equal, *NOTES), section))
    outcome.reference_ns += timed.reference
    return outcome


@contextmanager
def open_gpu_watch(library: str) -> Iterator[GpuWatch]:
    """Yield the C core's reader of GPUs, which has made its first passes (readings of all GPUs).

    The benchmark calls all further passes itself.
    """
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    gpus = GpuWatch(GpuWatchOptions(library=library, slow_ns=HOUR_NS, retry_ns=HOUR_NS), fd)
    try:
        for _ in range(SETTLING):
            gpus.run_pass()
        yield gpus
    finally:
        gpus.stop(0)
        os.close(fd)


def read_gpus(gpus: GpuWatch) -> NvmlSample:
    """Return the values that the last pass over the GPUs has read."""
    gpu_set = gpus.read()
    assert gpu_set is not None, "watch() makes the first pass"
    return gpu_set


def count_pass_calls(core: int, lower_bound: int) -> int:
    """Return the number of NVML calls in one pass (reading of all GPUs).

    Raises ResultMismatch if the C core and the lower bound make different numbers of calls.
    """
    if core != lower_bound:
        raise ResultMismatch(f"GPUs: the C core makes {core} NVML calls, the lower bound {lower_bound}")
    return core


def check_equal(core: GpuValues, other: GpuValues, varying: frozenset[GpuField]) -> None:
    """Raise ResultMismatch unless the C core and another reader read equal values.

    The error names the first value that differs. Values of the fields in ``varying`` may differ.
    """
    for index, field in sorted(core.keys() | other.keys()):
        core_value, other_value = core.get((index, field)), other.get((index, field))
        if core_value != other_value and (field not in varying or None in {core_value, other_value}):
            raise ResultMismatch(
                f"gpu-{index}: field {field.value}: the C core read {core_value}, pynvml {other_value}"
            )
