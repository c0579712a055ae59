/* sensors.c - temperature, power, clocks, load and the PCIe link: one number each. */
#include "fake.h"

static nvmlReturn_t reasons_of(enum fake_call call, nvmlDevice_t device, unsigned long long *reasons)
{
    unsigned int number;
    nvmlReturn_t answer;

    if (!reasons)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_number(call, device, Q_CLOCKS_REASONS, &number);
    if (answer == NVML_SUCCESS)
        *reasons = number;
    return answer;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return reasons_of(CALL_nvmlDeviceGetCurrentClocksEventReasons, device, reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return reasons_of(CALL_nvmlDeviceGetCurrentClocksThrottleReasons, device, reasons);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                      unsigned int *temperature)
{
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    return fake_number(CALL_nvmlDeviceGetTemperature, device, Q_TEMPERATURE, temperature);
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold,
                                               unsigned int *temperature)
{
    static const enum fake_quantity quantities[] = { Q_TEMPERATURE_SHUTDOWN, Q_TEMPERATURE_SLOWDOWN,
                                                     Q_TEMPERATURE_MEMORY_MAX, Q_TEMPERATURE_GPU_MAX };

    if ((unsigned int)threshold >= sizeof(quantities) / sizeof(quantities[0]))
        return NVML_ERROR_INVALID_ARGUMENT;
    return fake_number(CALL_nvmlDeviceGetTemperatureThreshold, device, quantities[threshold], temperature);
}

#if FAKE_BRANCH >= 570
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    if (!temperature || temperature->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != nvmlTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return fake_number(CALL_nvmlDeviceGetTemperatureV, device, Q_TEMPERATURE,
                       (unsigned int *)&temperature->temperature);
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin)
{
    if (!margin)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (margin->version != nvmlMarginTemperature_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return fake_number(CALL_nvmlDeviceGetMarginTemperature, device, Q_TEMPERATURE_MARGIN,
                       (unsigned int *)&margin->marginTemperature);
}
#endif

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    return fake_number(CALL_nvmlDeviceGetPowerUsage, device, Q_POWER_USAGE, milliwatts);
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    return fake_number(CALL_nvmlDeviceGetEnforcedPowerLimit, device, Q_POWER_LIMIT, milliwatts);
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
    return fake_number(CALL_nvmlDeviceGetPerformanceState, device, Q_PSTATE, state);
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!utilization)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetUtilizationRates, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->mig_on || g->value[Q_UTILIZATION_GPU] == FAKE_NONE || g->value[Q_UTILIZATION_MEMORY] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    utilization->gpu = (unsigned int)g->value[Q_UTILIZATION_GPU];
    utilization->memory = (unsigned int)g->value[Q_UTILIZATION_MEMORY];
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    return fake_number(CALL_nvmlDeviceGetCurrPcieLinkGeneration, device, Q_PCIE_GEN, generation);
}

nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    return fake_number(CALL_nvmlDeviceGetMaxPcieLinkGeneration, device, Q_PCIE_GEN_MAX, generation);
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *lanes)
{
    return fake_number(CALL_nvmlDeviceGetCurrPcieLinkWidth, device, Q_PCIE_WIDTH, lanes);
}

nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *lanes)
{
    return fake_number(CALL_nvmlDeviceGetMaxPcieLinkWidth, device, Q_PCIE_WIDTH_MAX, lanes);
}

nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *replays)
{
    return fake_number(CALL_nvmlDeviceGetPcieReplayCounter, device, Q_PCIE_REPLAY, replays);
}
