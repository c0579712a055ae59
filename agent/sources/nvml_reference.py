"""Reader of GPU fields through pynvml, with which ``scan --backend both`` checks the C core's values.

It shares no code with the C core. Where the C core reads a field by NVML's field id, this module calls NVML's
function for the field, and uses the field id only as fallback. Numbers of constants and layouts of
structures are those of pynvml.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.model.gpu import UNSUPPORTED_CODES, GpuField, NvmlReturnCode
from agent.sources.nvml import NvmlFailure, NvmlSession, open_nvml_session

MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Name of the member of nvmlValue_t that holds a field's value, by its nvmlValueType_t."""
TIMES_575: Final = 269 - 251
"""Difference between the field ids of slowdown times in driver branches 580 and 575."""
FABRICS: Final = ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")

FieldValue = int | NvmlFailure


class ReferenceGpu(NamedTuple):
    """Readings of one GPU, with every field read through pynvml."""

    uuid: str
    """UUID of the GPU; empty if NVML fails."""
    bus: str
    readings: Mapping[GpuField, FieldValue]
    """Value, or failure of the read, of every :class:`GpuField`."""


def read_reference_gpus(library: str, sysfs_root: Path) -> list[ReferenceGpu]:
    """Read every GPU field of every GPU that NVML counts, in NVML's order. May hang in the GPU driver.

    Raises:
        ProbeError: NVML cannot be loaded, initialized or count GPUs.
    """
    with open_nvml_session(library) as nvml:
        version = nvml.call("nvmlSystemGetDriverVersion")
        major = int(version.partition(".")[0]) if isinstance(version, str) else 0
        return [_read_gpu(nvml, handle, major, sysfs_root) for handle in nvml.list_gpu_handles()]


def _read_gpu(nvml: NvmlSession, handle: Any, major: int, sysfs_root: Path) -> ReferenceGpu:
    if isinstance(handle, NvmlFailure):
        return ReferenceGpu("", "", dict.fromkeys(GpuField, handle))
    bus = nvml.read_pci_address(handle)
    gpu = _GpuHandle(nvml, handle, major, sysfs_root / "bus/pci/devices" / bus)
    uuid = nvml.call("nvmlDeviceGetUUID", handle)
    readings = {field: read(gpu) for field, read in READERS.items()}
    return ReferenceGpu("" if isinstance(uuid, NvmlFailure) else uuid, bus, readings)


@dataclass(frozen=True, slots=True)
class _GpuHandle:
    nvml: NvmlSession
    handle: Any
    driver: int
    """Branch of the GPU driver: the first number of its version, such as 575."""
    sysfs: Path

    def call(self, function: str, *args: object) -> Any:
        return self.nvml.call(function, self.handle, *args)

    def field(self, number: int, scope: int = 0) -> FieldValue:
        values = self.call("nvmlDeviceGetFieldValues", [(number, scope)])
        if isinstance(values, NvmlFailure):
            return values
        if values[0].nvmlReturn:
            return self.nvml.failure_for(values[0].nvmlReturn)
        if not 0 <= values[0].valueType < len(MEMBERS):
            return self.nvml.failure_for(NvmlReturnCode.UNKNOWN)
        return int(getattr(values[0].value, MEMBERS[values[0].valueType]))

    def constant(self, name: str) -> int:
        return int(getattr(self.nvml.binding, name))


FieldReader = Callable[[_GpuHandle], FieldValue]


# --- readers of one field ----------------------------------------------------------------------------------


def _by_function(name: str, *constants: str, part: int | str | None = None) -> FieldReader:
    """Return a reader of a GPU field that calls a pynvml function.

    Args:
        name: Name of the function.
        constants: Names of pynvml's constants that are passed after the GPU's handle.
        part: Index or member of the value in the function's result; None: the result is the value.
    """

    def read(gpu: _GpuHandle) -> FieldValue:
        answer = gpu.call(name, *map(gpu.constant, constants))
        if isinstance(answer, NvmlFailure):
            return answer
        if isinstance(part, str):
            return int(getattr(answer, part))
        return int(answer if part is None else answer[part])

    return read


def _field_id(name: str) -> FieldReader:
    """Return a reader of a GPU field that calls nvmlDeviceGetFieldValues for the field id ``name``."""
    return lambda gpu: gpu.field(gpu.constant(f"NVML_FI_DEV_{name}"))


def _first_of(*readers: FieldReader) -> FieldReader:
    """Return a reader of a GPU field that tries `readers` in order until the GPU driver supports one."""

    def read(gpu: _GpuHandle) -> FieldValue:
        answer = readers[0](gpu)
        for reader in readers[1:]:
            if not isinstance(answer, NvmlFailure) or answer.code not in UNSUPPORTED_CODES:
                break
            answer = reader(gpu)
        return answer

    return read


def _ecc_total(kind: str, life: str) -> FieldReader:
    """Return a reader of a GPU's number of ECC errors in all its memories.

    Args:
        kind: Corrected or uncorrected errors, as a part of NVML's constant.
        life: Since the driver was loaded, or over the GPU's lifetime, as a part of NVML's constant.
    """
    return _by_function("nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind}", f"NVML_{life}_ECC")


def _ecc_of_memory(memory: str, kind: str, life: str) -> FieldReader:
    return _by_function(
        "nvmlDeviceGetMemoryErrorCounter",
        f"NVML_MEMORY_ERROR_TYPE_{kind}",
        f"NVML_{life}_ECC",
        f"NVML_MEMORY_LOCATION_{memory}",
    )


def _remapped_rows(part: int) -> FieldReader:
    return _by_function("nvmlDeviceGetRemappedRows", part=part)


def _retired_pages(cause: str) -> FieldReader:
    def read(gpu: _GpuHandle) -> FieldValue:
        pages = gpu.call("nvmlDeviceGetRetiredPages", gpu.constant(f"NVML_PAGE_RETIREMENT_CAUSE_{cause}"))
        return pages if isinstance(pages, NvmlFailure) else len(pages)

    return read


def _slowdown_time(reason: str) -> FieldReader:
    """Return a reader of the time in which a GPU's clocks were reduced for a reason [ns].

    NVML's field id of this time depends on the branch of the GPU driver.
    """

    def read(gpu: _GpuHandle) -> FieldValue:
        number = gpu.constant(f"NVML_FI_DEV_CLOCKS_EVENT_REASON_{reason}")
        if gpu.driver >= 580:
            return gpu.field(number)
        if gpu.driver == 575:
            return gpu.field(number - TIMES_575)
        return gpu.nvml.failure_for(NvmlReturnCode.NOT_SUPPORTED)

    return read


def _temperature_threshold(name: str) -> FieldReader:
    return _by_function("nvmlDeviceGetTemperatureThreshold", f"NVML_TEMPERATURE_THRESHOLD_{name}")


def _sram_status(member: str) -> FieldReader:
    """Return a reader of one member of NVML's structure of SRAM error counts."""

    def read(gpu: _GpuHandle) -> FieldValue:
        status = gpu.nvml.binding.c_nvmlEccSramErrorStatus_v1_t()
        failure = gpu.call("nvmlDeviceGetSramEccErrorStatus", gpu.nvml.binding.byref(status))
        return failure if isinstance(failure, NvmlFailure) else int(getattr(status, member))

    return read


def _fabric_member(member: str) -> FieldReader:
    """Return a reader of one member of NVML's fabric structure, in the newest version that the GPU driver
    supports."""

    def read(gpu: _GpuHandle) -> FieldValue:
        binding = gpu.nvml.binding
        for name in FABRICS:
            info = getattr(binding, name)()
            failure = gpu.call("nvmlDeviceGetGpuFabricInfoV", binding.byref(info))
            if not isinstance(failure, NvmlFailure) or failure.code not in UNSUPPORTED_CODES - {
                NvmlReturnCode.NOT_SUPPORTED
            }:
                break
        else:
            info = binding.c_nvmlGpuFabricInfo_t()
            failure = gpu.call("nvmlDeviceGetGpuFabricInfo", binding.byref(info))
        if isinstance(failure, NvmlFailure):
            return failure
        if hasattr(info, member):
            return int(getattr(info, member))
        return gpu.nvml.failure_for(NvmlReturnCode.NOT_SUPPORTED)

    return read


def _read_link_states(gpu: _GpuHandle) -> Mapping[int, int] | NvmlFailure:
    """Read the state of each NVLink of a GPU (0: down), by link number, without links that fail."""
    number = gpu.constant("NVML_FI_DEV_NVLINK_GET_STATE")
    states: dict[int, int] = {}
    failure = gpu.nvml.failure_for(NvmlReturnCode.NOT_SUPPORTED)
    for link in range(gpu.constant("NVML_NVLINK_MAX_LINKS")):
        state = gpu.field(number, link)
        if isinstance(state, NvmlFailure) and state.code in UNSUPPORTED_CODES:
            state = gpu.call("nvmlDeviceGetNvLinkState", link)
        if not isinstance(state, NvmlFailure):
            states[link] = state
        elif state.code not in UNSUPPORTED_CODES:
            failure = state
    return states or failure


def _links_up(gpu: _GpuHandle) -> FieldValue:
    links = _read_link_states(gpu)
    if isinstance(links, NvmlFailure):
        return links
    return sum(1 << link for link, state in links.items() if state)


def _link_errors(number: str, counter: str = "") -> FieldReader:
    """Return a reader of an error count summed over all NVLinks of a GPU."""

    def of_link(gpu: _GpuHandle, link: int) -> FieldValue:
        answer = gpu.field(gpu.constant(f"NVML_FI_DEV_NVLINK_{number}"), link)
        if counter and isinstance(answer, NvmlFailure) and answer.code in UNSUPPORTED_CODES:
            answer = gpu.call("nvmlDeviceGetNvLinkErrorCounter", link, gpu.constant(counter))
        return answer

    def read(gpu: _GpuHandle) -> FieldValue:
        links = _read_link_states(gpu)
        if isinstance(links, NvmlFailure):
            return links
        answers = [of_link(gpu, link) for link in links]
        failures = [answer for answer in answers if isinstance(answer, NvmlFailure)]
        return failures[0] if failures else sum(answer for answer in answers if isinstance(answer, int))

    return read


def _aer_count(file: str, key: str) -> FieldReader:
    """Return a reader of the kernel's count of PCIe errors (AER) in sysfs; a failure's code is an errno.

    Args:
        file: File in the directory of the GPU's PCI device.
        key: First word of the line with the count.
    """

    def read(gpu: _GpuHandle) -> FieldValue:
        try:
            lines = (gpu.sysfs / file).read_text().splitlines()
        except OSError as error:
            return NvmlFailure(error.errno or 0, error.strerror or "unreadable")
        found = [line.split()[1] for line in lines if line.startswith(f"{key} ")]
        return int(found[0]) if found else NvmlFailure(0, f"no {key}")

    return read


READERS: Final[Mapping[GpuField, FieldReader]] = {
    GpuField.RECOVERY_ACTION: _field_id("GET_GPU_RECOVERY_ACTION"),
    GpuField.ECC_UNCORRECTABLE: _first_of(
        _ecc_total("UNCORRECTED", "VOLATILE"), _field_id("ECC_DBE_VOL_TOTAL")
    ),
    GpuField.ECC_CORRECTABLE: _first_of(_ecc_total("CORRECTED", "VOLATILE"), _field_id("ECC_SBE_VOL_TOTAL")),
    GpuField.REMAP_CORRECTABLE: _first_of(_remapped_rows(0), _field_id("REMAPPED_COR")),
    GpuField.REMAP_UNCORRECTABLE: _first_of(_remapped_rows(1), _field_id("REMAPPED_UNC")),
    GpuField.REMAP_PENDING: _first_of(_remapped_rows(2), _field_id("REMAPPED_PENDING")),
    GpuField.REMAP_FAILURE: _first_of(_remapped_rows(3), _field_id("REMAPPED_FAILURE")),
    GpuField.CHANNEL_REPAIR_PENDING: _by_function("nvmlDeviceGetRepairStatus", part=0),
    GpuField.TPC_REPAIR_PENDING: _by_function("nvmlDeviceGetRepairStatus", part=1),
    GpuField.UNREPAIRABLE_MEMORY: _by_function("nvmlDeviceGetUnrepairableMemoryFlag_v1"),
    GpuField.RETIRED_SBE: _first_of(
        _retired_pages("MULTIPLE_SINGLE_BIT_ECC_ERRORS"), _field_id("RETIRED_SBE")
    ),
    GpuField.RETIRED_DBE: _first_of(_retired_pages("DOUBLE_BIT_ECC_ERROR"), _field_id("RETIRED_DBE")),
    GpuField.RETIRED_PENDING: _first_of(
        _by_function("nvmlDeviceGetRetiredPagesPendingStatus"), _field_id("RETIRED_PENDING")
    ),
    GpuField.PCIE_REPLAY: _first_of(
        _by_function("nvmlDeviceGetPcieReplayCounter"), _field_id("PCIE_REPLAY_COUNTER")
    ),
    GpuField.MEM_TEMP: _field_id("MEMORY_TEMP"),
    GpuField.SLOWED_SW_POWER: _field_id("PERF_POLICY_POWER"),
    GpuField.SLOWED_SW_THERMAL: _slowdown_time("SW_THERM_SLOWDOWN"),
    GpuField.SLOWED_HW_THERMAL: _slowdown_time("HW_THERM_SLOWDOWN"),
    GpuField.SLOWED_HW_BRAKE: _slowdown_time("HW_POWER_BRAKE_SLOWDOWN"),
    GpuField.TEMP: _first_of(
        _by_function("nvmlDeviceGetTemperatureV", "NVML_TEMPERATURE_GPU"),
        _by_function("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    ),
    GpuField.MARGIN: _by_function("nvmlDeviceGetMarginTemperature"),
    GpuField.CLOCK_REASONS: _first_of(
        _by_function("nvmlDeviceGetCurrentClocksEventReasons"),
        _by_function("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    GpuField.LINKS_UP: _links_up,
    GpuField.ECC_MODE: _by_function("nvmlDeviceGetEccMode", part=0),
    GpuField.ECC_MODE_PENDING: _by_function("nvmlDeviceGetEccMode", part=1),
    GpuField.ECC_UNCORRECTABLE_LIFE: _first_of(
        _ecc_total("UNCORRECTED", "AGGREGATE"), _field_id("ECC_DBE_AGG_TOTAL")
    ),
    GpuField.ECC_CORRECTABLE_LIFE: _first_of(
        _ecc_total("CORRECTED", "AGGREGATE"), _field_id("ECC_SBE_AGG_TOTAL")
    ),
    GpuField.ECC_UNCORRECTABLE_DRAM: _ecc_of_memory("DRAM", "UNCORRECTED", "VOLATILE"),
    GpuField.ECC_UNCORRECTABLE_SRAM: _ecc_of_memory("SRAM", "UNCORRECTED", "VOLATILE"),
    GpuField.ECC_CORRECTABLE_DRAM: _ecc_of_memory("DRAM", "CORRECTED", "VOLATILE"),
    GpuField.ECC_CORRECTABLE_SRAM: _ecc_of_memory("SRAM", "CORRECTED", "VOLATILE"),
    GpuField.ECC_UNCORRECTABLE_DRAM_LIFE: _ecc_of_memory("DRAM", "UNCORRECTED", "AGGREGATE"),
    GpuField.ECC_UNCORRECTABLE_SRAM_LIFE: _ecc_of_memory("SRAM", "UNCORRECTED", "AGGREGATE"),
    GpuField.ECC_CORRECTABLE_DRAM_LIFE: _ecc_of_memory("DRAM", "CORRECTED", "AGGREGATE"),
    GpuField.ECC_CORRECTABLE_SRAM_LIFE: _ecc_of_memory("SRAM", "CORRECTED", "AGGREGATE"),
    GpuField.SRAM_PARITY: _sram_status("volatileUncParity"),
    GpuField.SRAM_SECDED: _sram_status("volatileUncSecDed"),
    GpuField.SRAM_THRESHOLD: _sram_status("bThresholdExceeded"),
    GpuField.LINK_REPLAY: _link_errors("ERROR_DL_REPLAY", "NVML_NVLINK_ERROR_DL_REPLAY"),
    GpuField.LINK_RECOVERY: _link_errors("ERROR_DL_RECOVERY", "NVML_NVLINK_ERROR_DL_RECOVERY"),
    GpuField.LINK_CRC: _link_errors("ERROR_DL_CRC", "NVML_NVLINK_ERROR_DL_CRC_FLIT"),
    GpuField.LINK_RECEIVE_ERRORS: _link_errors("COUNT_RCV_ERRORS"),
    GpuField.LINK_RECOVERY_FAILED: _link_errors("COUNT_LINK_RECOVERY_FAILED_EVENTS"),
    GpuField.LINK_EFFECTIVE_ERRORS: _link_errors("COUNT_EFFECTIVE_ERRORS"),
    GpuField.LINK_SYMBOL_ERRORS: _link_errors("COUNT_SYMBOL_ERRORS"),
    GpuField.FABRIC_STATE: _fabric_member("state"),
    GpuField.FABRIC_STATUS: _fabric_member("status"),
    GpuField.FABRIC_HEALTH: _fabric_member("healthMask"),
    GpuField.FABRIC_SUMMARY: _fabric_member("healthSummary"),
    GpuField.PCIE_WIDTH: _by_function("nvmlDeviceGetCurrPcieLinkWidth"),
    GpuField.PCIE_GEN: _by_function("nvmlDeviceGetCurrPcieLinkGeneration"),
    GpuField.PSTATE: _by_function("nvmlDeviceGetPerformanceState"),
    GpuField.UTILIZATION: _by_function("nvmlDeviceGetUtilizationRates", part="gpu"),
    GpuField.PERSISTENCE: _by_function("nvmlDeviceGetPersistenceMode"),
    GpuField.MIG_MODE: _by_function("nvmlDeviceGetMigMode", part=0),
    GpuField.AER_CORRECTABLE: _aer_count("aer_dev_correctable", "TOTAL_ERR_COR"),
    GpuField.AER_NONFATAL: _aer_count("aer_dev_nonfatal", "TOTAL_ERR_NONFATAL"),
    GpuField.AER_FATAL: _aer_count("aer_dev_fatal", "TOTAL_ERR_FATAL"),
    GpuField.TEMP_SHUTDOWN: _temperature_threshold("SHUTDOWN"),
    GpuField.TEMP_SLOWDOWN: _temperature_threshold("SLOWDOWN"),
    GpuField.TEMP_GPU_MAX: _temperature_threshold("GPU_MAX"),
    GpuField.TEMP_MEM_MAX: _temperature_threshold("MEM_MAX"),
    GpuField.PCIE_WIDTH_MAX: _by_function("nvmlDeviceGetMaxPcieLinkWidth"),
    GpuField.PCIE_GEN_MAX: _by_function("nvmlDeviceGetMaxPcieLinkGeneration"),
    GpuField.ARCHITECTURE: _by_function("nvmlDeviceGetArchitecture"),
}
