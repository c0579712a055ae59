/*
 * memory.c - ECC counters, remapped rows (Ampere and later), retired pages (earlier GPUs).
 *
 * Without ECC there are no counters. In fake.h the four counters of a memory are consecutive: correctable
 * volatile, correctable aggregate, uncorrectable volatile, uncorrectable aggregate.
 */
#include "fake.h"

#include <string.h>

#define SRAM_FROM_DRAM (Q_SRAM_CORRECTABLE - Q_DRAM_CORRECTABLE)

/* Read the counter @first of DRAM, or of SRAM; or, with @both, of DRAM and SRAM together. */
nvmlReturn_t fake_ecc(const struct fake_gpu *g, enum fake_quantity first, bool both, int64_t *errors)
{
    int64_t sram = both ? g->value[first + SRAM_FROM_DRAM] : 0;

    if (g->value[Q_ECC_MODE] != 1 || g->value[first] == FAKE_NONE || sram == FAKE_NONE)
        return NVML_ERROR_NOT_SUPPORTED;
    *errors = g->value[first] + sram;
    return NVML_SUCCESS;
}

static nvmlReturn_t counter_of(enum fake_call call, nvmlDevice_t device, enum fake_quantity first, bool both,
                               unsigned long long *errors)
{
    struct fake_gpu *g;
    nvmlReturn_t answer = fake_enter(call, device, &g, NULL);
    int64_t number = 0;

    if (answer != NVML_SUCCESS)
        return answer;
    answer = fake_ecc(g, first, both, &number);
    if (answer == NVML_SUCCESS)
        *errors = (unsigned long long)number;
    return fake_leave(answer);
}

static bool is_counter(nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter)
{
    return (unsigned int)type <= NVML_MEMORY_ERROR_TYPE_UNCORRECTED &&
           (unsigned int)counter <= NVML_AGGREGATE_ECC;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t counter, unsigned long long *errors)
{
    if (!errors || !is_counter(type, counter))
        return NVML_ERROR_INVALID_ARGUMENT;
    return counter_of(CALL_nvmlDeviceGetTotalEccErrors, device, Q_DRAM_CORRECTABLE + 2 * type + counter, true,
                      errors);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                             unsigned long long *errors)
{
    enum fake_quantity first = Q_DRAM_CORRECTABLE;

    if (!errors || !is_counter(type, counter) || (unsigned int)location > NVML_MEMORY_LOCATION_SRAM)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (location == NVML_MEMORY_LOCATION_SRAM)
        first = Q_SRAM_CORRECTABLE;
    else if (location != NVML_MEMORY_LOCATION_DRAM)
        return NVML_ERROR_NOT_SUPPORTED;
    return counter_of(CALL_nvmlDeviceGetMemoryErrorCounter, device, first + 2 * type + counter, false,
                      errors);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetEccMode, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_ECC_MODE] == FAKE_NONE || g->value[Q_ECC_MODE_PENDING] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *current = (nvmlEnableState_t)g->value[Q_ECC_MODE];
    *pending = (nvmlEnableState_t)g->value[Q_ECC_MODE_PENDING];
    return fake_leave(NVML_SUCCESS);
}

#if FAKE_BRANCH >= 570
/*
 * All uncorrectable errors are reported as double-bit errors of a multiprocessor. Two quantities of their own
 * are counted by source only, and not in the total.
 */
nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!status)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (status->version != nvmlEccSramErrorStatus_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    answer = fake_enter(CALL_nvmlDeviceGetSramEccErrorStatus, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_SRAM_THRESHOLD] == FAKE_NONE || g->value[Q_ECC_MODE] != 1)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *status = (nvmlEccSramErrorStatus_t){
        .version = status->version,
        .volatileCor = (uint64_t)g->value[Q_SRAM_CORRECTABLE],
        .aggregateCor = (uint64_t)g->value[Q_SRAM_CORRECTABLE_EVER],
        .volatileUncParity = (uint64_t)g->value[Q_SRAM_PARITY],
        .volatileUncSecDed = (uint64_t)(g->value[Q_SRAM_UNCORRECTABLE] + g->value[Q_SRAM_SECDED]),
        .aggregateUncSecDed = (uint64_t)g->value[Q_SRAM_UNCORRECTABLE_EVER],
        .aggregateUncBucketSm = (uint64_t)g->value[Q_SRAM_UNCORRECTABLE_EVER],
        .bThresholdExceeded = (unsigned int)g->value[Q_SRAM_THRESHOLD],
    };
    return fake_leave(NVML_SUCCESS);
}
#endif

#if FAKE_BRANCH >= 580
nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *status)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!status)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (status->version != nvmlRepairStatus_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    answer = fake_enter(CALL_nvmlDeviceGetRepairStatus, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_CHANNEL_REPAIR] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    status->bChannelRepairPending = (unsigned int)g->value[Q_CHANNEL_REPAIR];
    status->bTpcRepairPending = (unsigned int)g->value[Q_TPC_REPAIR];
    return fake_leave(NVML_SUCCESS);
}
#endif

#if FAKE_BRANCH >= 590
nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, nvmlUnrepairableMemory_v1_t *status)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!status)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (status->version != nvmlUnrepairableMemory_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    answer = fake_enter(CALL_nvmlDeviceGetUnrepairableMemoryFlag_v1, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_UNREPAIRABLE] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    status->unrepairableMemory = (unsigned int)g->value[Q_UNREPAIRABLE];
    return fake_leave(NVML_SUCCESS);
}
#endif

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable,
                                       unsigned int *uncorrectable, unsigned int *pending,
                                       unsigned int *failure)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!correctable || !uncorrectable || !pending || !failure)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetRemappedRows, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    for (int q = Q_REMAP_CORRECTABLE; q <= Q_REMAP_FAILURE; q++)
        if (g->value[q] == FAKE_NONE)
            return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *correctable = (unsigned int)g->value[Q_REMAP_CORRECTABLE];
    *uncorrectable = (unsigned int)g->value[Q_REMAP_UNCORRECTABLE];
    *pending = (unsigned int)g->value[Q_REMAP_PENDING];
    *failure = (unsigned int)g->value[Q_REMAP_FAILURE];
    return fake_leave(NVML_SUCCESS);
}

/* Adjacent pages, one per hour since 2024. */
static nvmlReturn_t pages(enum fake_call call, nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                          unsigned int *count, unsigned long long *addresses, unsigned long long *times)
{
    const unsigned long long page = 0x10000, year_2024_us = 1704067200000000, hour_us = 3600000000;
    struct fake_gpu *g;
    nvmlReturn_t answer;
    unsigned int num, room;

    if (!count || (*count && !addresses) ||
        (unsigned int)cause > NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(call, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_RETIRED_SBE + cause] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    room = *count;
    num = *count = (unsigned int)g->value[Q_RETIRED_SBE + cause];
    if (num > room)
        return fake_leave(NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < num; i++) {
        addresses[i] = page * (1 + i + 1000 * (unsigned int)cause);
        if (times)
            times[i] = year_2024_us + i * hour_us;
    }
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                                       unsigned int *count, unsigned long long *addresses)
{
    return pages(CALL_nvmlDeviceGetRetiredPages, device, cause, count, addresses, NULL);
}

nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                                          unsigned int *count, unsigned long long *addresses,
                                          unsigned long long *times)
{
    return pages(CALL_nvmlDeviceGetRetiredPages_v2, device, cause, count, addresses, times);
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    return fake_number(CALL_nvmlDeviceGetRetiredPagesPendingStatus, device, Q_RETIRED_PENDING, pending);
}
