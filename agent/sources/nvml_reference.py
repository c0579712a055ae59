"""The slow reading of a GPU: every field once more, through pynvml, by ways that the native core does not go.

For ``scan --backend``: two readers that share no code and agree are right. Where NVML has a function of its
own for what the native core asks by field id, the function is asked, and the id only if there is none.
Numbers and layouts are pynvml's. One table says how. Does not watch, cache or judge.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.model.gpu import GpuField, Status
from agent.sources.nvml import Nvml, Refusal, session

UNSUPPORTED: Final = frozenset({2, Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND, 25})
"""Codes of a question that this driver or GPU does not know: invalid argument and argument version mismatch
are what older drivers answer to newer structures and field ids."""
MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of a field's value, by nvmlValueType_t."""
TIMES_575: Final = 269 - 251
"""How far the ids of the times spent slowed down were from today's in branch 575; earlier ones had none."""
FABRICS: Final = ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")

Answer = int | Refusal


class TwinGpu(NamedTuple):
    """One GPU as pynvml reads it."""

    uuid: str
    """Empty if it does not say."""
    bus: str
    readings: Mapping[GpuField, Answer]
    """Every field of :class:`GpuField`."""


def read_twin(library: str, sysfs_root: Path) -> list[TwinGpu]:
    """Every field of every GPU that NVML counts, in its order. May hang in the driver.

    Raises:
        ProbeError: There is no library, or it cannot be initialised, or does not count.
    """
    with session(library) as nvml:
        version = nvml.ask("nvmlSystemGetDriverVersion")
        major = int(version.partition(".")[0]) if isinstance(version, str) else 0
        return [_read_gpu(nvml, handle, major, sysfs_root) for handle in nvml.handles()]


def _read_gpu(nvml: Nvml, handle: Any, major: int, sysfs_root: Path) -> TwinGpu:
    if isinstance(handle, Refusal):
        return TwinGpu("", "", dict.fromkeys(GpuField, handle))
    bus = nvml.bus_of(handle)
    gpu = _Gpu(nvml, handle, major, sysfs_root / "bus/pci/devices" / bus)
    uuid = nvml.ask("nvmlDeviceGetUUID", handle)
    readings = {field: how(gpu) for field, how in HOW.items()}
    return TwinGpu("" if isinstance(uuid, Refusal) else uuid, bus, readings)


@dataclass(frozen=True, slots=True)
class _Gpu:
    nvml: Nvml
    handle: Any
    driver: int
    """Branch."""
    sysfs: Path

    def ask(self, function: str, *args: object) -> Any:
        return self.nvml.ask(function, self.handle, *args)

    def field(self, number: int, scope: int = 0) -> Answer:
        values = self.ask("nvmlDeviceGetFieldValues", [(number, scope)])
        if isinstance(values, Refusal):
            return values
        if values[0].nvmlReturn:
            return self.nvml.refusal(values[0].nvmlReturn)
        if not 0 <= values[0].valueType < len(MEMBERS):
            return self.nvml.refusal(Status.UNKNOWN)
        return int(getattr(values[0].value, MEMBERS[values[0].valueType]))

    def constant(self, name: str) -> int:
        return int(getattr(self.nvml.binding, name))


How = Callable[[_Gpu], Answer]


# --- ways to ask -------------------------------------------------------------------------------------------


def _function(name: str, *constants: str, part: int | str | None = None) -> How:
    """One of pynvml's functions; ``part`` is the place or the name of the value in what it answers."""

    def how(gpu: _Gpu) -> Answer:
        answer = gpu.ask(name, *map(gpu.constant, constants))
        if isinstance(answer, Refusal):
            return answer
        if isinstance(part, str):
            return int(getattr(answer, part))
        return int(answer if part is None else answer[part])

    return how


def _id(name: str) -> How:
    """nvmlDeviceGetFieldValues, one field at a time."""
    return lambda gpu: gpu.field(gpu.constant(f"NVML_FI_DEV_{name}"))


def _first(*ways: How) -> How:
    """The answer of the first way that this driver knows."""

    def how(gpu: _Gpu) -> Answer:
        answer = ways[0](gpu)
        for way in ways[1:]:
            if not isinstance(answer, Refusal) or answer.code not in UNSUPPORTED:
                break
            answer = way(gpu)
        return answer

    return how


def _ecc(kind: str, life: str) -> How:
    """All memories of the GPU."""
    return _function("nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind}", f"NVML_{life}_ECC")


def _ecc_of(memory: str, kind: str, life: str) -> How:
    return _function(
        "nvmlDeviceGetMemoryErrorCounter",
        f"NVML_MEMORY_ERROR_TYPE_{kind}",
        f"NVML_{life}_ECC",
        f"NVML_MEMORY_LOCATION_{memory}",
    )


def _remapped(part: int) -> How:
    return _function("nvmlDeviceGetRemappedRows", part=part)


def _retired(cause: str) -> How:
    def how(gpu: _Gpu) -> Answer:
        pages = gpu.ask("nvmlDeviceGetRetiredPages", gpu.constant(f"NVML_PAGE_RETIREMENT_CAUSE_{cause}"))
        return pages if isinstance(pages, Refusal) else len(pages)

    return how


def _slowed(reason: str) -> How:
    """Time with clocks held down: ids that moved from branch to branch."""

    def how(gpu: _Gpu) -> Answer:
        number = gpu.constant(f"NVML_FI_DEV_CLOCKS_EVENT_REASON_{reason}")
        if gpu.driver >= 580:
            return gpu.field(number)
        return gpu.field(number - TIMES_575) if gpu.driver == 575 else gpu.nvml.refusal(Status.NOT_SUPPORTED)

    return how


def _threshold(name: str) -> How:
    return _function("nvmlDeviceGetTemperatureThreshold", f"NVML_TEMPERATURE_THRESHOLD_{name}")


def _sram_threshold(gpu: _Gpu) -> Answer:
    status = gpu.nvml.binding.c_nvmlEccSramErrorStatus_v1_t()
    refused = gpu.ask("nvmlDeviceGetSramEccErrorStatus", gpu.nvml.binding.byref(status))
    return refused if isinstance(refused, Refusal) else int(status.bThresholdExceeded != 0)


def _fabric(member: str) -> How:
    """Of the newest structure that the driver knows; a member that it does not have is not supported."""

    def how(gpu: _Gpu) -> Answer:
        binding = gpu.nvml.binding
        for name in FABRICS:
            info = getattr(binding, name)()
            refused = gpu.ask("nvmlDeviceGetGpuFabricInfoV", binding.byref(info))
            if not isinstance(refused, Refusal) or refused.code not in UNSUPPORTED - {Status.NOT_SUPPORTED}:
                break
        else:
            info = binding.c_nvmlGpuFabricInfo_t()
            refused = gpu.ask("nvmlDeviceGetGpuFabricInfo", binding.byref(info))
        if isinstance(refused, Refusal):
            return refused
        return int(getattr(info, member)) if hasattr(info, member) else gpu.nvml.refusal(Status.NOT_SUPPORTED)

    return how


def _links(gpu: _Gpu) -> Mapping[int, int] | Refusal:
    """State of each NVLink that answers."""
    number = gpu.constant("NVML_FI_DEV_NVLINK_GET_STATE")
    states: dict[int, int] = {}
    refused = gpu.nvml.refusal(Status.NOT_SUPPORTED)
    for link in range(gpu.constant("NVML_NVLINK_MAX_LINKS")):
        state = gpu.field(number, link)
        if isinstance(state, Refusal) and state.code in UNSUPPORTED:
            state = gpu.ask("nvmlDeviceGetNvLinkState", link)
        if not isinstance(state, Refusal):
            states[link] = state
        elif state.code not in UNSUPPORTED:
            refused = state
    return states or refused


def _links_up(gpu: _Gpu) -> Answer:
    links = _links(gpu)
    return links if isinstance(links, Refusal) else sum(1 << link for link, state in links.items() if state)


def _link_errors(number: str, counter: str = "") -> How:
    """The sum over all NVLinks, by field id or, where there is one, by nvmlDeviceGetNvLinkErrorCounter."""

    def of_link(gpu: _Gpu, link: int) -> Answer:
        answer = gpu.field(gpu.constant(f"NVML_FI_DEV_NVLINK_{number}"), link)
        if counter and isinstance(answer, Refusal) and answer.code in UNSUPPORTED:
            answer = gpu.ask("nvmlDeviceGetNvLinkErrorCounter", link, gpu.constant(counter))
        return answer

    def how(gpu: _Gpu) -> Answer:
        links = _links(gpu)
        if isinstance(links, Refusal):
            return links
        answers = [of_link(gpu, link) for link in links]
        refusals = [answer for answer in answers if isinstance(answer, Refusal)]
        return refusals[0] if refusals else sum(answer for answer in answers if isinstance(answer, int))

    return how


def _aer(file: str, key: str) -> How:
    """The kernel's count, from sysfs. A refusal has errno for its code, as the native core's has."""

    def how(gpu: _Gpu) -> Answer:
        try:
            lines = (gpu.sysfs / file).read_text().splitlines()
        except OSError as error:
            return Refusal(error.errno or 0, error.strerror or "unreadable")
        found = [line.split()[1] for line in lines if line.startswith(f"{key} ")]
        return int(found[0]) if found else Refusal(0, f"no {key}")

    return how


HOW: Final[Mapping[GpuField, How]] = {
    GpuField.RECOVERY_ACTION: _id("GET_GPU_RECOVERY_ACTION"),
    GpuField.ECC_UNCORRECTABLE: _first(_ecc("UNCORRECTED", "VOLATILE"), _id("ECC_DBE_VOL_TOTAL")),
    GpuField.ECC_CORRECTABLE: _first(_ecc("CORRECTED", "VOLATILE"), _id("ECC_SBE_VOL_TOTAL")),
    GpuField.REMAP_CORRECTABLE: _first(_remapped(0), _id("REMAPPED_COR")),
    GpuField.REMAP_UNCORRECTABLE: _first(_remapped(1), _id("REMAPPED_UNC")),
    GpuField.REMAP_PENDING: _first(_remapped(2), _id("REMAPPED_PENDING")),
    GpuField.REMAP_FAILURE: _first(_remapped(3), _id("REMAPPED_FAILURE")),
    GpuField.RETIRED_SBE: _first(_retired("MULTIPLE_SINGLE_BIT_ECC_ERRORS"), _id("RETIRED_SBE")),
    GpuField.RETIRED_DBE: _first(_retired("DOUBLE_BIT_ECC_ERROR"), _id("RETIRED_DBE")),
    GpuField.RETIRED_PENDING: _first(
        _function("nvmlDeviceGetRetiredPagesPendingStatus"), _id("RETIRED_PENDING")
    ),
    GpuField.PCIE_REPLAY: _first(_function("nvmlDeviceGetPcieReplayCounter"), _id("PCIE_REPLAY_COUNTER")),
    GpuField.MEM_TEMP: _id("MEMORY_TEMP"),
    GpuField.SLOWED_SW_POWER: _id("PERF_POLICY_POWER"),
    GpuField.SLOWED_SW_THERMAL: _slowed("SW_THERM_SLOWDOWN"),
    GpuField.SLOWED_HW_THERMAL: _slowed("HW_THERM_SLOWDOWN"),
    GpuField.SLOWED_HW_BRAKE: _slowed("HW_POWER_BRAKE_SLOWDOWN"),
    GpuField.TEMP: _first(
        _function("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
        _function("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    ),
    GpuField.MARGIN: _function("nvmlDeviceGetMarginTemperature"),
    GpuField.CLOCK_REASONS: _first(
        _function("nvmlDeviceGetCurrentClocksEventReasons"),
        _function("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    GpuField.LINKS_UP: _links_up,
    GpuField.ECC_MODE: _function("nvmlDeviceGetEccMode", part=0),
    GpuField.ECC_MODE_PENDING: _function("nvmlDeviceGetEccMode", part=1),
    GpuField.ECC_UNCORRECTABLE_LIFE: _first(_ecc("UNCORRECTED", "AGGREGATE"), _id("ECC_DBE_AGG_TOTAL")),
    GpuField.ECC_CORRECTABLE_LIFE: _first(_ecc("CORRECTED", "AGGREGATE"), _id("ECC_SBE_AGG_TOTAL")),
    GpuField.ECC_UNCORRECTABLE_DRAM: _ecc_of("DRAM", "UNCORRECTED", "VOLATILE"),
    GpuField.ECC_UNCORRECTABLE_SRAM: _ecc_of("SRAM", "UNCORRECTED", "VOLATILE"),
    GpuField.ECC_CORRECTABLE_DRAM: _ecc_of("DRAM", "CORRECTED", "VOLATILE"),
    GpuField.ECC_CORRECTABLE_SRAM: _ecc_of("SRAM", "CORRECTED", "VOLATILE"),
    GpuField.ECC_UNCORRECTABLE_DRAM_LIFE: _ecc_of("DRAM", "UNCORRECTED", "AGGREGATE"),
    GpuField.ECC_UNCORRECTABLE_SRAM_LIFE: _ecc_of("SRAM", "UNCORRECTED", "AGGREGATE"),
    GpuField.ECC_CORRECTABLE_DRAM_LIFE: _ecc_of("DRAM", "CORRECTED", "AGGREGATE"),
    GpuField.ECC_CORRECTABLE_SRAM_LIFE: _ecc_of("SRAM", "CORRECTED", "AGGREGATE"),
    GpuField.SRAM_THRESHOLD: _sram_threshold,
    GpuField.LINK_REPLAY: _link_errors("ERROR_DL_REPLAY", "NVML_NVLINK_ERROR_DL_REPLAY"),
    GpuField.LINK_RECOVERY: _link_errors("ERROR_DL_RECOVERY", "NVML_NVLINK_ERROR_DL_RECOVERY"),
    GpuField.LINK_CRC: _link_errors("ERROR_DL_CRC", "NVML_NVLINK_ERROR_DL_CRC_FLIT"),
    GpuField.LINK_RECEIVE_ERRORS: _link_errors("COUNT_RCV_ERRORS"),
    GpuField.LINK_RECOVERY_FAILED: _link_errors("COUNT_LINK_RECOVERY_FAILED_EVENTS"),
    GpuField.LINK_EFFECTIVE_ERRORS: _link_errors("COUNT_EFFECTIVE_ERRORS"),
    GpuField.LINK_SYMBOL_ERRORS: _link_errors("COUNT_SYMBOL_ERRORS"),
    GpuField.FABRIC_STATE: _fabric("state"),
    GpuField.FABRIC_STATUS: _fabric("status"),
    GpuField.FABRIC_HEALTH: _fabric("healthMask"),
    GpuField.FABRIC_SUMMARY: _fabric("healthSummary"),
    GpuField.PCIE_WIDTH: _function("nvmlDeviceGetCurrPcieLinkWidth"),
    GpuField.PCIE_GEN: _function("nvmlDeviceGetCurrPcieLinkGeneration"),
    GpuField.PSTATE: _function("nvmlDeviceGetPerformanceState"),
    GpuField.UTILIZATION: _function("nvmlDeviceGetUtilizationRates", part="gpu"),
    GpuField.PERSISTENCE: _function("nvmlDeviceGetPersistenceMode"),
    GpuField.MIG_MODE: _function("nvmlDeviceGetMigMode", part=0),
    GpuField.AER_CORRECTABLE: _aer("aer_dev_correctable", "TOTAL_ERR_COR"),
    GpuField.AER_NONFATAL: _aer("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
    GpuField.AER_FATAL: _aer("aer_dev_fatal", "TOTAL_ERR_FATAL"),
    GpuField.TEMP_SHUTDOWN: _threshold("SHUTDOWN"),
    GpuField.TEMP_SLOWDOWN: _threshold("SLOWDOWN"),
    GpuField.TEMP_GPU_MAX: _threshold("GPU_MAX"),
    GpuField.TEMP_MEM_MAX: _threshold("MEM_MAX"),
    GpuField.PCIE_WIDTH_MAX: _function("nvmlDeviceGetMaxPcieLinkWidth"),
    GpuField.PCIE_GEN_MAX: _function("nvmlDeviceGetMaxPcieLinkGeneration"),
    GpuField.ARCHITECTURE: _function("nvmlDeviceGetArchitecture"),
}
