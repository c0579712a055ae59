/*
 * gpu_sensors.c - the fields of a GPU that have an NVML function of their own, and a table of these
 * functions.
 */
#include <string.h>

#include "gpu/gpus.h"

#define CALL(call, function, ...) DH_GPU_NVML(s, call, function, s->dev, __VA_ARGS__)

typedef nvmlReturn_t reader(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value);

/* Define a reader for a function that returns one unsigned int. */
#define READ_UINT(name, call, function)                                                                \
    static nvmlReturn_t name(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)                 \
    {                                                                                                  \
        unsigned int v = 0;                                                                            \
        nvmlReturn_t code = CALL(call, function, &v);                                                   \
                                                                                                       \
        (void)arg;                                                                                     \
        *value = v;                                                                                    \
        return code;                                                                                   \
    }

READ_UINT(pcie_width, DH_CALL_PCIE, nvmlDeviceGetCurrPcieLinkWidth)
READ_UINT(pcie_gen, DH_CALL_PCIE, nvmlDeviceGetCurrPcieLinkGeneration)
READ_UINT(pcie_width_max, DH_CALL_PCIE, nvmlDeviceGetMaxPcieLinkWidth)
READ_UINT(pcie_gen_max, DH_CALL_PCIE, nvmlDeviceGetMaxPcieLinkGeneration)
READ_UINT(pstate, DH_CALL_MODES, nvmlDeviceGetPerformanceState)
READ_UINT(architecture, DH_CALL_IDENTITY, nvmlDeviceGetArchitecture)

static nvmlReturn_t temp_of(struct dh_gpu_slot *s, nvmlDevice_t dev, uint64_t *value)
{
    nvmlTemperature_t t = { .version = nvmlTemperature_v1, .sensorType = NVML_TEMPERATURE_GPU };
    unsigned int celsius = 0;
    nvmlReturn_t code =
        DH_GPU_NVML(s, DH_CALL_TEMPERATURE, nvmlDeviceGetTemperature, dev, NVML_TEMPERATURE_GPU, &celsius);

    *value = celsius;
    if (code != NVML_ERROR_FUNCTION_NOT_FOUND)
        return code;
    code = DH_GPU_NVML(s, DH_CALL_TEMPERATURE, nvmlDeviceGetTemperatureV, dev, &t);
    *value = (uint64_t)(int64_t)t.temperature;
    return code;
}

static nvmlReturn_t temp(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    (void)arg;
    return temp_of(s, s->dev, value);
}

static nvmlReturn_t margin(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    nvmlMarginTemperature_t m = { .version = nvmlMarginTemperature_v1 };
    nvmlReturn_t code = CALL(DH_CALL_MARGIN, nvmlDeviceGetMarginTemperature, &m);

    (void)arg;
    *value = (uint64_t)(int64_t)m.marginTemperature;
    return code;
}

static nvmlReturn_t clock_reasons(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    unsigned long long reasons = 0;
    nvmlReturn_t code = CALL(DH_CALL_CLOCK_REASONS, nvmlDeviceGetCurrentClocksEventReasons, &reasons);

    (void)arg;
    *value = reasons;
    return code;
}

static nvmlReturn_t threshold(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    unsigned int celsius = 0;
    nvmlReturn_t code = CALL(DH_CALL_THRESHOLD, nvmlDeviceGetTemperatureThreshold,
                             (nvmlTemperatureThresholds_t)arg, &celsius);

    *value = celsius;
    return code;
}

/* An error counter: its type, volatile or aggregate, and the memory location. */
#define ERRORS(type, counter, location) ((unsigned int)(type) << 16 | (counter) << 8 | (location))

static nvmlReturn_t errors(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    unsigned long long n = 0;
    nvmlReturn_t code =
        CALL(DH_CALL_MEMORY, nvmlDeviceGetMemoryErrorCounter, (nvmlMemoryErrorType_t)(arg >> 16),
             (nvmlEccCounterType_t)(arg >> 8 & 0xff), (nvmlMemoryLocation_t)(arg & 0xff), &n);

    *value = n;
    return code;
}

static nvmlReturn_t utilization(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    nvmlUtilization_t u = { 0 };
    nvmlReturn_t code = CALL(DH_CALL_MODES, nvmlDeviceGetUtilizationRates, &u);

    (void)arg;
    *value = u.gpu;
    return code;
}

static nvmlReturn_t persistence(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    nvmlEnableState_t mode = NVML_FEATURE_DISABLED;
    nvmlReturn_t code = CALL(DH_CALL_MODES, nvmlDeviceGetPersistenceMode, &mode);

    (void)arg;
    *value = mode == NVML_FEATURE_ENABLED;
    return code;
}

static nvmlReturn_t mig_mode(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    unsigned int current = 0, pending = 0;
    nvmlReturn_t code = CALL(DH_CALL_MIG, nvmlDeviceGetMigMode, &current, &pending);

    (void)arg;
    *value = current;
    return code;
}

/* A driver whose structure has no version writes the flag in its place. */
static nvmlReturn_t unrepairable_memory(struct dh_gpu_slot *s, unsigned int arg, uint64_t *value)
{
    nvmlUnrepairableMemory_v1_t status = { .version = nvmlUnrepairableMemory_v1 };
    nvmlReturn_t code = CALL(DH_CALL_MEMORY, nvmlDeviceGetUnrepairableMemoryFlag_v1, &status);

    (void)arg;
    *value = (status.version == nvmlUnrepairableMemory_v1 ? status.unrepairableMemory : status.version) != 0;
    return code;
}

#define UNC NVML_MEMORY_ERROR_TYPE_UNCORRECTED
#define COR NVML_MEMORY_ERROR_TYPE_CORRECTED
#define NOW NVML_VOLATILE_ECC
#define LIFE NVML_AGGREGATE_ECC
#define DRAM NVML_MEMORY_LOCATION_DRAM
#define SRAM NVML_MEMORY_LOCATION_SRAM

static const struct {
    enum dh_gpu_field field;
    reader *read;
    unsigned int arg;
} sensors_table[] = {
    { DH_GPU_TEMP, temp, 0 },
    { DH_GPU_MARGIN, margin, 0 },
    { DH_GPU_CLOCK_REASONS, clock_reasons, 0 },
    { DH_GPU_ECC_UNCORRECTABLE_DRAM, errors, ERRORS(UNC, NOW, DRAM) },
    { DH_GPU_ECC_UNCORRECTABLE_SRAM, errors, ERRORS(UNC, NOW, SRAM) },
    { DH_GPU_ECC_CORRECTABLE_DRAM, errors, ERRORS(COR, NOW, DRAM) },
    { DH_GPU_ECC_CORRECTABLE_SRAM, errors, ERRORS(COR, NOW, SRAM) },
    { DH_GPU_ECC_UNCORRECTABLE_DRAM_LIFE, errors, ERRORS(UNC, LIFE, DRAM) },
    { DH_GPU_ECC_UNCORRECTABLE_SRAM_LIFE, errors, ERRORS(UNC, LIFE, SRAM) },
    { DH_GPU_ECC_CORRECTABLE_DRAM_LIFE, errors, ERRORS(COR, LIFE, DRAM) },
    { DH_GPU_ECC_CORRECTABLE_SRAM_LIFE, errors, ERRORS(COR, LIFE, SRAM) },
    { DH_GPU_UNREPAIRABLE_MEMORY, unrepairable_memory, 0 },
    { DH_GPU_PCIE_WIDTH, pcie_width, 0 },
    { DH_GPU_PCIE_GEN, pcie_gen, 0 },
    { DH_GPU_PSTATE, pstate, 0 },
    { DH_GPU_UTILIZATION, utilization, 0 },
    { DH_GPU_PERSISTENCE, persistence, 0 },
    { DH_GPU_MIG_MODE, mig_mode, 0 },
    { DH_GPU_TEMP_SHUTDOWN, threshold, NVML_TEMPERATURE_THRESHOLD_SHUTDOWN },
    { DH_GPU_TEMP_SLOWDOWN, threshold, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN },
    { DH_GPU_TEMP_GPU_MAX, threshold, NVML_TEMPERATURE_THRESHOLD_GPU_MAX },
    { DH_GPU_TEMP_MEM_MAX, threshold, NVML_TEMPERATURE_THRESHOLD_MEM_MAX },
    { DH_GPU_PCIE_WIDTH_MAX, pcie_width_max, 0 },
    { DH_GPU_PCIE_GEN_MAX, pcie_gen_max, 0 },
    { DH_GPU_ARCHITECTURE, architecture, 0 },
};

static void ecc_mode(struct dh_gpu_slot *s)
{
    nvmlEnableState_t current = NVML_FEATURE_DISABLED, pending = NVML_FEATURE_DISABLED;
    nvmlReturn_t code;

    if (!dh_gpu_is_due(s, DH_GPU_ECC_MODE))
        return;
    code = CALL(DH_CALL_MEMORY, nvmlDeviceGetEccMode, &current, &pending);
    dh_gpu_store(s, DH_GPU_ECC_MODE, (int)code, current == NVML_FEATURE_ENABLED);
    dh_gpu_store(s, DH_GPU_ECC_MODE_PENDING, (int)code, pending == NVML_FEATURE_ENABLED);
}

/* SRAM errors by source. A driver may count them here before, or without, the totals of all memories. */
static void sram_status(struct dh_gpu_slot *s)
{
    nvmlEccSramErrorStatus_t status = { .version = nvmlEccSramErrorStatus_v1 };
    int code;

    if (!dh_gpu_is_due(s, DH_GPU_SRAM_THRESHOLD))
        return;
    code = (int)CALL(DH_CALL_MEMORY, nvmlDeviceGetSramEccErrorStatus, &status);
    dh_gpu_store(s, DH_GPU_SRAM_PARITY, code, status.volatileUncParity);
    dh_gpu_store(s, DH_GPU_SRAM_SECDED, code, status.volatileUncSecDed);
    dh_gpu_store(s, DH_GPU_SRAM_THRESHOLD, code, status.bThresholdExceeded != 0);
}

/* Repairs of memory channels and of TPCs that wait for a reset. */
static void repair_status(struct dh_gpu_slot *s)
{
    nvmlRepairStatus_t status = { .version = nvmlRepairStatus_v1 };
    int code;

    if (!dh_gpu_is_due(s, DH_GPU_CHANNEL_REPAIR_PENDING))
        return;
    code = (int)CALL(DH_CALL_MEMORY, nvmlDeviceGetRepairStatus, &status);
    dh_gpu_store(s, DH_GPU_CHANNEL_REPAIR_PENDING, code, status.bChannelRepairPending != 0);
    dh_gpu_store(s, DH_GPU_TPC_REPAIR_PENDING, code, status.bTpcRepairPending != 0);
}

/* Read the newest structure version that the driver supports. Each version extends the one before. */
static nvmlReturn_t fabric_read(struct dh_gpu_slot *s, nvmlGpuFabricInfo_v3_t *info, int *version)
{
    /* the function's type is of version 2; the driver reads the version from the first member */
    nvmlGpuFabricInfo_v2_t *as_v2 = (nvmlGpuFabricInfo_v2_t *)(void *)info;
    nvmlGpuFabricInfo_t v1 = { 0 };
    nvmlReturn_t code;

    for (*version = 3; *version > 1; --*version) {
        *info = (nvmlGpuFabricInfo_v3_t){
            .version = *version == 3 ? nvmlGpuFabricInfo_v3 : nvmlGpuFabricInfo_v2,
        };
        code = CALL(DH_CALL_FABRIC, nvmlDeviceGetGpuFabricInfoV, as_v2);
        if (code != NVML_ERROR_ARGUMENT_VERSION_MISMATCH && code != NVML_ERROR_INVALID_ARGUMENT &&
            code != NVML_ERROR_FUNCTION_NOT_FOUND)
            return code;
    }
    code = CALL(DH_CALL_FABRIC, nvmlDeviceGetGpuFabricInfo, &v1);
    info->state = v1.state;
    info->status = v1.status;
    return code;
}

static void fabric(struct dh_gpu_slot *s)
{
    nvmlGpuFabricInfo_v3_t info;
    int version, code;

    if (!dh_gpu_is_due(s, DH_GPU_FABRIC_STATE))
        return;
    code = (int)fabric_read(s, &info, &version);
    dh_gpu_store(s, DH_GPU_FABRIC_STATE, code, info.state);
    dh_gpu_store(s, DH_GPU_FABRIC_STATUS, code, (uint64_t)info.status);
    if (!code && version < 2)
        code = NVML_ERROR_NOT_SUPPORTED;
    dh_gpu_store(s, DH_GPU_FABRIC_HEALTH, code, info.healthMask);
    if (!code && version < 3)
        code = NVML_ERROR_NOT_SUPPORTED;
    dh_gpu_store(s, DH_GPU_FABRIC_SUMMARY, code, info.healthSummary);
}

/* Make the cheapest call that fails for a lost GPU. Some drivers return "unknown" instead of "lost". */
bool dh_gpu_is_responding(struct dh_gpu_slot *s, nvmlDevice_t dev)
{
    uint64_t value;
    nvmlReturn_t code = temp_of(s, dev, &value);

    return !code || code == NVML_ERROR_RESET_REQUIRED || dh_gpu_is_unsupported((int)code);
}

_Static_assert(sizeof(sensors_table) / sizeof(*sensors_table) <= DH_GPU_FIELD_NUM,
               "each row of the table has a place");

static void plan_sensors(struct dh_gpu_slot *s)
{
    s->sensors = 0;
    for (uint8_t i = 0; i < sizeof(sensors_table) / sizeof(*sensors_table); i++)
        if (dh_gpu_is_due(s, sensors_table[i].field))
            s->sensor[s->sensors++] = i;
}

/* Read all sensors that are due. */
void dh_gpu_read_sensors(struct dh_gpu_slot *s)
{
    if (!s->plan_reusable)
        plan_sensors(s);
    for (uint32_t i = 0; i < s->sensors && !s->unreachable; i++) {
        enum dh_gpu_field field = sensors_table[s->sensor[i]].field;
        uint64_t value = 0;
        nvmlReturn_t code = sensors_table[s->sensor[i]].read(s, sensors_table[s->sensor[i]].arg, &value);

        dh_gpu_store(s, field, (int)code, value);
    }
    if (s->slow && !s->unreachable) {
        ecc_mode(s);
        sram_status(s);
        repair_status(s);
        fabric(s);
    }
}
