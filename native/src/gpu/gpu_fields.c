/* gpu_fields.c - the table of fields that are read of a GPU, and the names of NVML's calls. */
#include "gpu/gpus.h"

#define FAST(name, fi) { name, DH_PACE_FAST, false, fi, 0 }
#define EVENT(name, fi, event) { name, DH_PACE_FAST, false, fi, event }
#define SLOW(name, fi) { name, DH_PACE_SLOW, false, fi, 0 }
#define LINK(name, fi) { name, DH_PACE_SLOW, true, fi, 0 }
#define FIXED(name) { name, DH_PACE_FIXED, false, 0, 0 }

/*
 * The ids of the three throttle times are those of branch 580 and later; see dh_gpu_field_id().
 *
 * A fast pass leaves out fields whose change an event announces, see dh_gpu_awaited_events(). If a driver accepts the
 * registration and sends no event, such a field is late by the time between two slow passes, so it must be one that
 * requires no action at once. These have an event and are FAST all the same:
 *   recovery_action: it decides how severe every other fault is
 *   ecc_uncorrectable: data was lost; errors of texture memory are counted without an event
 *   ecc_correctable: no event announces that it falls, which shows a reset, whose time decides which faults it ended
 *   remap_pending, remap_failure, retired_pending: the GPU must be reset or replaced
 * They change with the counts of remappings and retirements. The events of P-states and clocks do not announce
 * clock_reasons or slowed times, and come far more often than passes. Other fields have no event.
 */
const struct dh_gpu_row dh_gpu_rows[DH_GPU_FIELD_NUM] = {
    [DH_GPU_RECOVERY_ACTION] = FAST("recovery_action", NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
    [DH_GPU_ECC_UNCORRECTABLE] = FAST("ecc_uncorrectable", NVML_FI_DEV_ECC_DBE_VOL_TOTAL),
    [DH_GPU_ECC_CORRECTABLE] = FAST("ecc_correctable", NVML_FI_DEV_ECC_SBE_VOL_TOTAL),
    [DH_GPU_REMAP_CORRECTABLE] =
        EVENT("remap_correctable", NVML_FI_DEV_REMAPPED_COR, nvmlEventTypeDramRetirementEvent),
    [DH_GPU_REMAP_UNCORRECTABLE] =
        EVENT("remap_uncorrectable", NVML_FI_DEV_REMAPPED_UNC, nvmlEventTypeDramRetirementEvent),
    [DH_GPU_REMAP_PENDING] = FAST("remap_pending", NVML_FI_DEV_REMAPPED_PENDING),
    [DH_GPU_REMAP_FAILURE] = FAST("remap_failure", NVML_FI_DEV_REMAPPED_FAILURE),
    [DH_GPU_RETIRED_SBE] =
        EVENT("retired_sbe", NVML_FI_DEV_RETIRED_SBE, nvmlEventTypeDramRetirementEvent),
    [DH_GPU_RETIRED_DBE] =
        EVENT("retired_dbe", NVML_FI_DEV_RETIRED_DBE, nvmlEventTypeDramRetirementEvent),
    [DH_GPU_RETIRED_PENDING] = FAST("retired_pending", NVML_FI_DEV_RETIRED_PENDING),
    [DH_GPU_PCIE_REPLAY] = FAST("pcie_replay", NVML_FI_DEV_PCIE_REPLAY_COUNTER),
    [DH_GPU_MEM_TEMP] = FAST("mem_temp", NVML_FI_DEV_MEMORY_TEMP),
    [DH_GPU_SLOWED_SW_POWER] = FAST("slowed_sw_power", NVML_FI_DEV_PERF_POLICY_POWER),
    [DH_GPU_SLOWED_SW_THERMAL] =
        FAST("slowed_sw_thermal", NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN),
    [DH_GPU_SLOWED_HW_THERMAL] =
        FAST("slowed_hw_thermal", NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN),
    [DH_GPU_SLOWED_HW_BRAKE] =
        FAST("slowed_hw_brake", NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN),
    [DH_GPU_TEMP] = FAST("temp", 0),
    [DH_GPU_MARGIN] = FAST("margin", 0),
    [DH_GPU_CLOCK_REASONS] = FAST("clock_reasons", 0),
    [DH_GPU_LINKS_UP] = { "links_up", DH_PACE_FAST, true, NVML_FI_DEV_NVLINK_GET_STATE, 0 },
    [DH_GPU_ECC_MODE] = SLOW("ecc_mode", 0),
    [DH_GPU_ECC_MODE_PENDING] = SLOW("ecc_mode_pending", 0),
    [DH_GPU_ECC_UNCORRECTABLE_LIFE] = SLOW("ecc_uncorrectable_life", NVML_FI_DEV_ECC_DBE_AGG_TOTAL),
    [DH_GPU_ECC_CORRECTABLE_LIFE] = SLOW("ecc_correctable_life", NVML_FI_DEV_ECC_SBE_AGG_TOTAL),
    [DH_GPU_ECC_UNCORRECTABLE_DRAM] = SLOW("ecc_uncorrectable_dram", 0),
    [DH_GPU_ECC_UNCORRECTABLE_SRAM] = SLOW("ecc_uncorrectable_sram", 0),
    [DH_GPU_ECC_CORRECTABLE_DRAM] = SLOW("ecc_correctable_dram", 0),
    [DH_GPU_ECC_CORRECTABLE_SRAM] = SLOW("ecc_correctable_sram", 0),
    [DH_GPU_ECC_UNCORRECTABLE_DRAM_LIFE] = SLOW("ecc_uncorrectable_dram_life", 0),
    [DH_GPU_ECC_UNCORRECTABLE_SRAM_LIFE] = SLOW("ecc_uncorrectable_sram_life", 0),
    [DH_GPU_ECC_CORRECTABLE_DRAM_LIFE] = SLOW("ecc_correctable_dram_life", 0),
    [DH_GPU_ECC_CORRECTABLE_SRAM_LIFE] = SLOW("ecc_correctable_sram_life", 0),
    [DH_GPU_SRAM_PARITY] = SLOW("sram_parity", 0),
    [DH_GPU_SRAM_SECDED] = SLOW("sram_secded", 0),
    [DH_GPU_SRAM_THRESHOLD] = SLOW("sram_threshold", 0),
    [DH_GPU_CHANNEL_REPAIR_PENDING] = SLOW("channel_repair_pending", 0),
    [DH_GPU_TPC_REPAIR_PENDING] = SLOW("tpc_repair_pending", 0),
    [DH_GPU_UNREPAIRABLE_MEMORY] = SLOW("unrepairable_memory", 0),
    [DH_GPU_LINK_REPLAY] = LINK("link_replay", NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY),
    [DH_GPU_LINK_RECOVERY] = LINK("link_recovery", NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY),
    [DH_GPU_LINK_CRC] = LINK("link_crc", NVML_FI_DEV_NVLINK_ERROR_DL_CRC),
    [DH_GPU_LINK_RECEIVE_ERRORS] = LINK("link_receive_errors", NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS),
    [DH_GPU_LINK_RECOVERY_FAILED] =
        LINK("link_recovery_failed", NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS),
    [DH_GPU_LINK_EFFECTIVE_ERRORS] =
        LINK("link_effective_errors", NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS),
    [DH_GPU_LINK_SYMBOL_ERRORS] = LINK("link_symbol_errors", NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS),
    [DH_GPU_FABRIC_STATE] = SLOW("fabric_state", 0),
    [DH_GPU_FABRIC_STATUS] = SLOW("fabric_status", 0),
    [DH_GPU_FABRIC_HEALTH] = SLOW("fabric_health", 0),
    [DH_GPU_FABRIC_SUMMARY] = SLOW("fabric_summary", 0),
    [DH_GPU_PCIE_WIDTH] = SLOW("pcie_width", 0),
    [DH_GPU_PCIE_GEN] = SLOW("pcie_gen", 0),
    [DH_GPU_PSTATE] = SLOW("pstate", 0),
    [DH_GPU_UTILIZATION] = SLOW("utilization", 0),
    [DH_GPU_PERSISTENCE] = SLOW("persistence", 0),
    [DH_GPU_MIG_MODE] = SLOW("mig_mode", 0),
    [DH_GPU_AER_CORRECTABLE] = SLOW("aer_correctable", 0),
    [DH_GPU_AER_NONFATAL] = SLOW("aer_nonfatal", 0),
    [DH_GPU_AER_FATAL] = SLOW("aer_fatal", 0),
    [DH_GPU_TEMP_SHUTDOWN] = FIXED("temp_shutdown"),
    [DH_GPU_TEMP_SLOWDOWN] = FIXED("temp_slowdown"),
    [DH_GPU_TEMP_GPU_MAX] = FIXED("temp_gpu_max"),
    [DH_GPU_TEMP_MEM_MAX] = FIXED("temp_mem_max"),
    [DH_GPU_PCIE_WIDTH_MAX] = FIXED("pcie_width_max"),
    [DH_GPU_PCIE_GEN_MAX] = FIXED("pcie_gen_max"),
    [DH_GPU_ARCHITECTURE] = FIXED("architecture"),
};

static const char *const calls[DH_CALL_NUM] = {
    [DH_CALL_NONE] = "",
    [DH_CALL_OPEN] = "dlopen",
    [DH_CALL_INIT] = "nvmlInit",
    [DH_CALL_SHUTDOWN] = "nvmlShutdown",
    [DH_CALL_SYSTEM] = "nvmlDeviceGetCount",
    [DH_CALL_HANDLE] = "nvmlDeviceGetHandleByUUID",
    [DH_CALL_IDENTITY] = "nvmlDeviceGetUUID",
    [DH_CALL_FIELDS] = "nvmlDeviceGetFieldValues",
    [DH_CALL_TEMPERATURE] = "nvmlDeviceGetTemperature",
    [DH_CALL_MARGIN] = "nvmlDeviceGetMarginTemperature",
    [DH_CALL_CLOCK_REASONS] = "nvmlDeviceGetCurrentClocksEventReasons",
    [DH_CALL_THRESHOLD] = "nvmlDeviceGetTemperatureThreshold",
    [DH_CALL_LINKS] = "nvmlDeviceGetNvLinkState",
    [DH_CALL_MEMORY] = "nvmlDeviceGetMemoryErrorCounter",
    [DH_CALL_FABRIC] = "nvmlDeviceGetGpuFabricInfo",
    [DH_CALL_PCIE] = "nvmlDeviceGetCurrPcieLinkWidth",
    [DH_CALL_MIG] = "nvmlDeviceGetMigDeviceHandleByIndex",
    [DH_CALL_MODES] = "nvmlDeviceGetPersistenceMode",
    [DH_CALL_REGISTER] = "nvmlDeviceRegisterEvents",
    [DH_CALL_WAIT] = "nvmlEventSetWait",
    [DH_CALL_AER] = "aer_dev_correctable",
};

/*
 * Return the id of a field in this driver, 0 if the driver has none. Ids 251 to 253 are the throttle times in
 * branch 575 only, and power smoothing in older and newer branches.
 */
uint16_t dh_gpu_field_id(enum dh_gpu_field field, uint32_t driver_major)
{
    uint16_t fi = dh_gpu_rows[field].field_id;

    if (fi < NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN ||
        fi > NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN || driver_major >= 580)
        return fi;
    if (driver_major != 575)
        return 0;
    return (uint16_t)(fi - NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN +
                      NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN);
}

const char *dh_gpu_field_name(uint32_t field)
{
    return field < DH_GPU_FIELD_NUM ? dh_gpu_rows[field].name : NULL;
}

const char *dh_nvml_call_name(uint32_t call)
{
    return call < DH_CALL_NUM ? calls[call] : NULL;
}
