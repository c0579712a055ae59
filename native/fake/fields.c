/*
 * fields.c - nvmlDeviceGetFieldValues(): the quantity of fake.h behind each field id, by branch. A field that
 * a branch or a GPU lacks is not supported; the others still answer.
 */
#include "fake.h"

#include <time.h>

#define ALL_LINKS 0xffffffffu

struct field {
    uint16_t id;
    uint16_t what; /* enum fake_quantity or enum fake_link_quantity */
    uint8_t type;  /* nvmlValueType_t */
    enum { ONE, ECC, ECC_SUM, OF_LINK, LINK_COUNTER, LINK_COUNT } kind;
};

#define UINT NVML_VALUE_TYPE_UNSIGNED_INT
#define ULLONG NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
#define INT NVML_VALUE_TYPE_SIGNED_INT
#define FI(name) NVML_FI_DEV_##name

static const struct field fields[] = {
    { FI(ECC_CURRENT), Q_ECC_MODE, UINT, ONE },
    { FI(ECC_PENDING), Q_ECC_MODE_PENDING, UINT, ONE },
    { FI(ECC_SBE_VOL_TOTAL), Q_DRAM_CORRECTABLE, ULLONG, ECC_SUM },
    { FI(ECC_DBE_VOL_TOTAL), Q_DRAM_UNCORRECTABLE, ULLONG, ECC_SUM },
    { FI(ECC_SBE_AGG_TOTAL), Q_DRAM_CORRECTABLE_EVER, ULLONG, ECC_SUM },
    { FI(ECC_DBE_AGG_TOTAL), Q_DRAM_UNCORRECTABLE_EVER, ULLONG, ECC_SUM },
    { FI(ECC_SBE_VOL_DEV), Q_DRAM_CORRECTABLE, ULLONG, ECC },
    { FI(ECC_DBE_VOL_DEV), Q_DRAM_UNCORRECTABLE, ULLONG, ECC },
    { FI(ECC_SBE_AGG_DEV), Q_DRAM_CORRECTABLE_EVER, ULLONG, ECC },
    { FI(ECC_DBE_AGG_DEV), Q_DRAM_UNCORRECTABLE_EVER, ULLONG, ECC },
    { FI(RETIRED_SBE), Q_RETIRED_SBE, ULLONG, ONE },
    { FI(RETIRED_DBE), Q_RETIRED_DBE, ULLONG, ONE },
    { FI(RETIRED_PENDING), Q_RETIRED_PENDING, ULLONG, ONE },
    { FI(PERF_POLICY_POWER), Q_POLICY_POWER, ULLONG, ONE },
    { FI(PERF_POLICY_THERMAL), Q_POLICY_THERMAL, ULLONG, ONE },
    { FI(PERF_POLICY_SYNC_BOOST), Q_POLICY_SYNC_BOOST, ULLONG, ONE },
    { FI(PERF_POLICY_BOARD_LIMIT), Q_POLICY_BOARD_LIMIT, ULLONG, ONE },
    { FI(PERF_POLICY_LOW_UTILIZATION), Q_POLICY_LOW_UTILIZATION, ULLONG, ONE },
    { FI(PERF_POLICY_RELIABILITY), Q_POLICY_RELIABILITY, ULLONG, ONE },
    { FI(PERF_POLICY_TOTAL_APP_CLOCKS), Q_POLICY_APP_CLOCKS, ULLONG, ONE },
    { FI(PERF_POLICY_TOTAL_BASE_CLOCKS), Q_POLICY_BASE_CLOCKS, ULLONG, ONE },
    { FI(MEMORY_TEMP), Q_TEMPERATURE_MEMORY, UINT, ONE },
    { FI(NVLINK_LINK_COUNT), 0, UINT, LINK_COUNT },
    { FI(PCIE_REPLAY_COUNTER), Q_PCIE_REPLAY, UINT, ONE },
    { FI(PCIE_REPLAY_ROLLOVER_COUNTER), Q_PCIE_REPLAY_ROLLOVER, UINT, ONE },
    { FI(REMAPPED_COR), Q_REMAP_CORRECTABLE, UINT, ONE },
    { FI(REMAPPED_UNC), Q_REMAP_UNCORRECTABLE, UINT, ONE },
    { FI(REMAPPED_PENDING), Q_REMAP_PENDING, UINT, ONE },
    { FI(REMAPPED_FAILURE), Q_REMAP_FAILURE, UINT, ONE },
    { FI(NVLINK_ERROR_DL_REPLAY), L_REPLAY, ULLONG, LINK_COUNTER },
    { FI(NVLINK_ERROR_DL_RECOVERY), L_RECOVERY, ULLONG, LINK_COUNTER },
    { FI(NVLINK_ERROR_DL_CRC), L_CRC_FLIT, ULLONG, LINK_COUNTER },
    { FI(NVLINK_GET_SPEED), L_SPEED, UINT, OF_LINK },
    { FI(NVLINK_GET_STATE), L_STATE, UINT, OF_LINK },
    { FI(PCIE_L0_TO_RECOVERY_COUNTER), Q_PCIE_L0_TO_RECOVERY, UINT, ONE },
    { FI(PCIE_COUNT_CORRECTABLE_ERRORS), Q_PCIE_CORRECTABLE, UINT, ONE },
    { FI(PCIE_COUNT_NAKS_RECEIVED), Q_PCIE_NAKS_RECEIVED, UINT, ONE },
    { FI(PCIE_COUNT_RECEIVER_ERROR), Q_PCIE_RECEIVER_ERROR, UINT, ONE },
    { FI(PCIE_COUNT_BAD_TLP), Q_PCIE_BAD_TLP, UINT, ONE },
    { FI(PCIE_COUNT_NAKS_SENT), Q_PCIE_NAKS_SENT, UINT, ONE },
    { FI(PCIE_COUNT_BAD_DLLP), Q_PCIE_BAD_DLLP, UINT, ONE },
    { FI(PCIE_COUNT_NON_FATAL_ERROR), Q_PCIE_NON_FATAL, UINT, ONE },
    { FI(PCIE_COUNT_FATAL_ERROR), Q_PCIE_FATAL, UINT, ONE },
    { FI(PCIE_COUNT_UNSUPPORTED_REQ), Q_PCIE_UNSUPPORTED_REQUEST, UINT, ONE },
    { FI(PCIE_COUNT_LCRC_ERROR), Q_PCIE_LCRC_ERROR, UINT, ONE },
    { FI(PCIE_COUNT_LANE_ERROR), Q_PCIE_LANE_ERROR, UINT, ONE },
    { FI(TEMPERATURE_SHUTDOWN_TLIMIT), Q_TLIMIT_SHUTDOWN, INT, ONE },
    { FI(TEMPERATURE_SLOWDOWN_TLIMIT), Q_TLIMIT_SLOWDOWN, INT, ONE },
    { FI(TEMPERATURE_MEM_MAX_TLIMIT), Q_TLIMIT_MEMORY_MAX, INT, ONE },
    { FI(TEMPERATURE_GPU_MAX_TLIMIT), Q_TLIMIT_GPU_MAX, INT, ONE },
#if FAKE_BRANCH >= 570 /* the header of 535 ends at 196 */
    { FI(NVLINK_COUNT_MALFORMED_PACKET_ERRORS), L_MALFORMED_PACKETS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_BUFFER_OVERRUN_ERRORS), L_BUFFER_OVERRUNS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_RCV_ERRORS), L_RECEIVE_ERRORS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_RCV_REMOTE_ERRORS), L_RECEIVE_REMOTE_ERRORS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_RCV_GENERAL_ERRORS), L_RECEIVE_GENERAL_ERRORS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS), L_LINK_INTEGRITY_ERRORS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_XMIT_DISCARDS), L_TRANSMIT_DISCARDS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS), L_RECOVERIES_DONE, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS), L_RECOVERIES_FAILED, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_LINK_RECOVERY_EVENTS), L_RECOVERIES, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_EFFECTIVE_ERRORS), L_EFFECTIVE_ERRORS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_EFFECTIVE_BER), L_EFFECTIVE_BER, ULLONG, OF_LINK },
    { FI(NVLINK_COUNT_SYMBOL_ERRORS), L_SYMBOL_ERRORS, ULLONG, LINK_COUNTER },
    { FI(NVLINK_COUNT_SYMBOL_BER), L_SYMBOL_BER, ULLONG, OF_LINK },
    { FI(GET_GPU_RECOVERY_ACTION), Q_RECOVERY_ACTION, UINT, ONE },
#endif
#if FAKE_BRANCH == 575
    { NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, Q_THROTTLE_SW_THERMAL, ULLONG, ONE },
    { NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, Q_THROTTLE_HW_THERMAL, ULLONG, ONE },
    { NVML_R575_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, Q_THROTTLE_POWER_BRAKE, ULLONG, ONE },
#elif FAKE_BRANCH >= 570 /* these ids, throttle times in 575, are power smoothing: on, privilege, ramp */
    { 251, Q_POWER_SMOOTHING, UINT, ONE },
    { 252, Q_POWER_SMOOTHING, UINT, ONE },
    { 253, Q_POWER_SMOOTHING, UINT, ONE },
#endif
#if FAKE_BRANCH >= 580
    { FI(CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN), Q_THROTTLE_SW_THERMAL, ULLONG, ONE },
    { FI(CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN), Q_THROTTLE_HW_THERMAL, ULLONG, ONE },
    { FI(CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN), Q_THROTTLE_POWER_BRAKE, ULLONG, ONE },
#endif
};

static nvmlReturn_t of_link(const struct fake_gpu *g, const struct field *f, unsigned int scope,
                            int64_t *number)
{
    unsigned int from = scope, to = scope + 1;

    if (fake.profile->links == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    if (scope == ALL_LINKS && f->kind == LINK_COUNTER) {
        from = 0;
        to = fake.profile->links;
    } else if (scope >= fake.profile->links) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *number = 0;
    for (unsigned int link = from; link < to; link++) {
        if (g->fail_link[link])
            return g->fail_link[link];
        if (g->link[link][f->what] == FAKE_NONE)
            return NVML_ERROR_NOT_SUPPORTED;
        *number += g->link[link][f->what];
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t read_field(const struct fake_gpu *g, const struct field *f, unsigned int scope,
                               int64_t *number)
{
    switch (f->kind) {
    case ECC:
    case ECC_SUM:
        return fake_ecc(g, f->what, f->kind == ECC_SUM, number);
    case OF_LINK:
    case LINK_COUNTER:
        return of_link(g, f, scope, number);
    case LINK_COUNT:
        *number = fake.profile->links ? fake.profile->links : FAKE_NONE;
        break;
    case ONE:
        *number = g->value[f->what];
    }
    return *number == FAKE_NONE ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

static void answer_field(const struct fake_gpu *g, nvmlFieldValue_t *v, long long now_us)
{
    const struct field *f = fields, *end = fields + sizeof(fields) / sizeof(fields[0]);
    int64_t number = 0;

    v->timestamp = now_us;
    v->latencyUsec = 1;
    v->value.ullVal = 0;
    v->nvmlReturn = v->fieldId < FAKE_FIELDS ? g->fail_field[v->fieldId] : NVML_SUCCESS;
    if (v->nvmlReturn != NVML_SUCCESS)
        return;
    while (f < end && f->id != v->fieldId)
        f++;
    v->nvmlReturn = f < end ? read_field(g, f, v->scopeId, &number) : NVML_ERROR_NOT_SUPPORTED;
    if (v->nvmlReturn != NVML_SUCCESS)
        return;
    v->valueType = f->type;
    if (f->type == ULLONG)
        v->value.ullVal = (unsigned long long)number;
    else if (f->type == INT)
        v->value.siVal = (int)number;
    else
        v->value.uiVal = (unsigned int)number;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct fake_gpu *g;
    struct timespec t;
    nvmlReturn_t answer;

    if (!values || count < 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetFieldValues, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    clock_gettime(CLOCK_REALTIME, &t);
    for (int i = 0; i < count; i++)
        answer_field(g, &values[i], (long long)t.tv_sec * 1000000 + t.tv_nsec / 1000);
    return fake_leave(NVML_SUCCESS);
}
