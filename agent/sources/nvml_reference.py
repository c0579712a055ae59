"""Reference reader of GPU fields through pynvml, for the comparison with the native core in ``scan
--backend``.

It shares no code with the native core. Where NVML has a function for a field that the native core reads by
field id, the function is called, and the field id is only the fallback. Numbers and layouts are pynvml's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.model.gpu import GpuField, NvmlStatus
from agent.sources.nvml import Nvml, NvmlFailure, session

UNSUPPORTED: Final = frozenset({2, NvmlStatus.NOT_SUPPORTED, NvmlStatus.FUNCTION_NOT_FOUND, 25})
"""Codes for what a driver or GPU does not support. Older drivers return invalid argument (2) and argument
version mismatch (25) for newer structures and field ids."""
MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of a field's value, by nvmlValueType_t."""
TIMES_575: Final = 269 - 251
"""Offset of the slowdown times' field ids in branch 575; earlier branches have none."""
FABRICS: Final = ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")

FieldValue = int | NvmlFailure


class ReferenceGpu(NamedTuple):
    """GPU as read through pynvml."""

    uuid: str
    """UUID; empty if NVML fails."""
    bus: str
    readings: Mapping[GpuField, FieldValue]
    """Value or failure of every :class:`GpuField`."""


def read_reference(library: str, sysfs_root: Path) -> list[ReferenceGpu]:
    """Read every field of every GPU that NVML counts, in NVML's order. May hang in the driver.

    Raises:
        ProbeError: NVML cannot be loaded, initialised or count GPUs.
    """
    with session(library) as nvml:
        version = nvml.call("nvmlSystemGetDriverVersion")
        major = int(version.partition(".")[0]) if isinstance(version, str) else 0
        return [_read_gpu(nvml, handle, major, sysfs_root) for handle in nvml.handles()]


def _read_gpu(nvml: Nvml, handle: Any, major: int, sysfs_root: Path) -> ReferenceGpu:
    if isinstance(handle, NvmlFailure):
        return ReferenceGpu("", "", dict.fromkeys(GpuField, handle))
    bus = nvml.bus_of(handle)
    gpu = _GpuHandle(nvml, handle, major, sysfs_root / "bus/pci/devices" / bus)
    uuid = nvml.call("nvmlDeviceGetUUID", handle)
    readings = {field: read(gpu) for field, read in READERS.items()}
    return ReferenceGpu("" if isinstance(uuid, NvmlFailure) else uuid, bus, readings)


@dataclass(frozen=True, slots=True)
class _GpuHandle:
    nvml: Nvml
    handle: Any
    driver: int
    """Branch of the driver."""
    sysfs: Path

    def call(self, function: str, *args: object) -> Any:
        return self.nvml.call(function, self.handle, *args)

    def field(self, number: int, scope: int = 0) -> FieldValue:
        values = self.call("nvmlDeviceGetFieldValues", [(number, scope)])
        if isinstance(values, NvmlFailure):
            return values
        if values[0].nvmlReturn:
            return self.nvml.error_of(values[0].nvmlReturn)
        if not 0 <= values[0].valueType < len(MEMBERS):
            return self.nvml.error_of(NvmlStatus.UNKNOWN)
        return int(getattr(values[0].value, MEMBERS[values[0].valueType]))

    def constant(self, name: str) -> int:
        return int(getattr(self.nvml.binding, name))


FieldReader = Callable[[_GpuHandle], FieldValue]


# --- readers of one field ----------------------------------------------------------------------------------


def _function(name: str, *constants: str, part: int | str | None = None) -> FieldReader:
    """Return a reader that calls a pynvml function; `part` is the index or member of the value in the
    result."""

    def read(gpu: _GpuHandle) -> FieldValue:
        answer = gpu.call(name, *map(gpu.constant, constants))
        if isinstance(answer, NvmlFailure):
            return answer
        if isinstance(part, str):
            return int(getattr(answer, part))
        return int(answer if part is None else answer[part])

    return read


def _id(name: str) -> FieldReader:
    """Return a reader that calls nvmlDeviceGetFieldValues for the field id of that name."""
    return lambda gpu: gpu.field(gpu.constant(f"NVML_FI_DEV_{name}"))


def _first(*readers: FieldReader) -> FieldReader:
    """Return a reader that uses the first of `readers` that the driver supports."""

    def read(gpu: _GpuHandle) -> FieldValue:
        answer = readers[0](gpu)
        for reader in readers[1:]:
            if not isinstance(answer, NvmlFailure) or answer.code not in UNSUPPORTED:
                break
            answer = reader(gpu)
        return answer

    return read


def _ecc(kind: str, life: str) -> FieldReader:
    """Return a reader of a GPU's count of ECC errors in all its memories."""
    return _function("nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind}", f"NVML_{life}_ECC")


def _ecc_of(memory: str, kind: str, life: str) -> FieldReader:
    return _function(
        "nvmlDeviceGetMemoryErrorCounter",
        f"NVML_MEMORY_ERROR_TYPE_{kind}",
        f"NVML_{life}_ECC",
        f"NVML_MEMORY_LOCATION_{memory}",
    )


def _remapped(part: int) -> FieldReader:
    return _function("nvmlDeviceGetRemappedRows", part=part)


def _retired(cause: str) -> FieldReader:
    def read(gpu: _GpuHandle) -> FieldValue:
        pages = gpu.call("nvmlDeviceGetRetiredPages", gpu.constant(f"NVML_PAGE_RETIREMENT_CAUSE_{cause}"))
        return pages if isinstance(pages, NvmlFailure) else len(pages)

    return read


def _slowed(reason: str) -> FieldReader:
    """Return a reader of the time that a GPU ran with reduced clocks, whose field ids differ between
    branches."""

    def read(gpu: _GpuHandle) -> FieldValue:
        number = gpu.constant(f"NVML_FI_DEV_CLOCKS_EVENT_REASON_{reason}")
        if gpu.driver >= 580:
            return gpu.field(number)
        return (
            gpu.field(number - TIMES_575)
            if gpu.driver == 575
            else gpu.nvml.error_of(NvmlStatus.NOT_SUPPORTED)
        )

    return read


def _threshold(name: str) -> FieldReader:
    return _function("nvmlDeviceGetTemperatureThreshold", f"NVML_TEMPERATURE_THRESHOLD_{name}")


def _sram_threshold(gpu: _GpuHandle) -> FieldValue:
    status = gpu.nvml.binding.c_nvmlEccSramErrorStatus_v1_t()
    failure = gpu.call("nvmlDeviceGetSramEccErrorStatus", gpu.nvml.binding.byref(status))
    return failure if isinstance(failure, NvmlFailure) else int(status.bThresholdExceeded != 0)


def _fabric(member: str) -> FieldReader:
    """Return a reader of one member of NVML's newest fabric structure that the driver supports; a missing
    member is not supported."""

    def read(gpu: _GpuHandle) -> FieldValue:
        binding = gpu.nvml.binding
        for name in FABRICS:
            info = getattr(binding, name)()
            failure = gpu.call("nvmlDeviceGetGpuFabricInfoV", binding.byref(info))
            if not isinstance(failure, NvmlFailure) or failure.code not in UNSUPPORTED - {
                NvmlStatus.NOT_SUPPORTED
            }:
                break
        else:
            info = binding.c_nvmlGpuFabricInfo_t()
            failure = gpu.call("nvmlDeviceGetGpuFabricInfo", binding.byref(info))
        if isinstance(failure, NvmlFailure):
            return failure
        return (
            int(getattr(info, member))
            if hasattr(info, member)
            else gpu.nvml.error_of(NvmlStatus.NOT_SUPPORTED)
        )

    return read


def _links(gpu: _GpuHandle) -> Mapping[int, int] | NvmlFailure:
    """Read the state of each NVLink that answers, by link number."""
    number = gpu.constant("NVML_FI_DEV_NVLINK_GET_STATE")
    states: dict[int, int] = {}
    failure = gpu.nvml.error_of(NvmlStatus.NOT_SUPPORTED)
    for link in range(gpu.constant("NVML_NVLINK_MAX_LINKS")):
        state = gpu.field(number, link)
        if isinstance(state, NvmlFailure) and state.code in UNSUPPORTED:
            state = gpu.call("nvmlDeviceGetNvLinkState", link)
        if not isinstance(state, NvmlFailure):
            states[link] = state
        elif state.code not in UNSUPPORTED:
            failure = state
    return states or failure


def _links_up(gpu: _GpuHandle) -> FieldValue:
    links = _links(gpu)
    return (
        links if isinstance(links, NvmlFailure) else sum(1 << link for link, state in links.items() if state)
    )


def _link_errors(number: str, counter: str = "") -> FieldReader:
    """Return a reader of an error count summed over all NVLinks, by field id or
    nvmlDeviceGetNvLinkErrorCounter."""

    def of_link(gpu: _GpuHandle, link: int) -> FieldValue:
        answer = gpu.field(gpu.constant(f"NVML_FI_DEV_NVLINK_{number}"), link)
        if counter and isinstance(answer, NvmlFailure) and answer.code in UNSUPPORTED:
            answer = gpu.call("nvmlDeviceGetNvLinkErrorCounter", link, gpu.constant(counter))
        return answer

    def read(gpu: _GpuHandle) -> FieldValue:
        links = _links(gpu)
        if isinstance(links, NvmlFailure):
            return links
        answers = [of_link(gpu, link) for link in links]
        failures = [answer for answer in answers if isinstance(answer, NvmlFailure)]
        return failures[0] if failures else sum(answer for answer in answers if isinstance(answer, int))

    return read


def _aer(file: str, key: str) -> FieldReader:
    """Return a reader of the kernel's count of PCIe errors (AER) in sysfs. The failure's code is errno, as in
    the native core."""

    def read(gpu: _GpuHandle) -> FieldValue:
        try:
            lines = (gpu.sysfs / file).read_text().splitlines()
        except OSError as error:
            return NvmlFailure(error.errno or 0, error.strerror or "unreadable")
        found = [line.split()[1] for line in lines if line.startswith(f"{key} ")]
        return int(found[0]) if found else NvmlFailure(0, f"no {key}")

    return read


READERS: Final[Mapping[GpuField, FieldReader]] = {
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
