/* links.c - NVLinks and the fabric. */
#include "fake.h"

/* Begin a call on a link. On NVML_SUCCESS the lock is held, as after fake_enter(). */
static nvmlReturn_t link_enter(enum fake_call call, nvmlDevice_t device, unsigned int link,
                               enum fake_link_quantity quantity, int64_t *number)
{
    struct fake_gpu *g;
    nvmlReturn_t answer = fake_enter(call, device, &g, NULL);

    if (answer != NVML_SUCCESS)
        return answer;
    if (fake.profile->links == 0)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    if (link >= fake.profile->links)
        return fake_leave(NVML_ERROR_INVALID_ARGUMENT);
    if (g->fail_link[link])
        return fake_leave(g->fail_link[link]);
    if (g->link[link][quantity] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *number = g->link[link][quantity];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active)
{
    nvmlReturn_t answer;
    int64_t number;

    if (!active)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = link_enter(CALL_nvmlDeviceGetNvLinkState, device, link, L_STATE, &number);
    if (answer != NVML_SUCCESS)
        return answer;
    *active = (nvmlEnableState_t)number;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link,
                                             nvmlNvLinkErrorCounter_t counter, unsigned long long *errors)
{
    static const enum fake_link_quantity quantities[] = { L_REPLAY, L_RECOVERY, L_CRC_FLIT, L_CRC_DATA,
                                                          L_ECC_DATA };
    nvmlReturn_t answer;
    int64_t number;

    if (!errors || (unsigned int)counter > NVML_NVLINK_ERROR_DL_ECC_DATA)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = link_enter(CALL_nvmlDeviceGetNvLinkErrorCounter, device, link, quantities[counter], &number);
    if (answer != NVML_SUCCESS)
        return answer;
    *errors = (unsigned long long)number;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetGpuFabricInfo, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_FABRIC_STATE] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *info = (nvmlGpuFabricInfo_t){ .status = (nvmlReturn_t)g->value[Q_FABRIC_STATUS],
                                   .cliqueId = (unsigned int)g->value[Q_FABRIC_CLIQUE],
                                   .state = (nvmlGpuFabricState_t)g->value[Q_FABRIC_STATE] };
    return fake_leave(NVML_SUCCESS);
}

#if FAKE_BRANCH >= 570
/* The third version exists since branch 580. Members of the second are in the same place. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != nvmlGpuFabricInfo_v2 && (FAKE_BRANCH < 580 || info->version != nvmlGpuFabricInfo_v3))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    answer = fake_enter(CALL_nvmlDeviceGetGpuFabricInfoV, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_FABRIC_STATE] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *info = (nvmlGpuFabricInfo_v2_t){ .version = info->version,
                                      .status = (nvmlReturn_t)g->value[Q_FABRIC_STATUS],
                                      .cliqueId = (unsigned int)g->value[Q_FABRIC_CLIQUE],
                                      .state = (nvmlGpuFabricState_t)g->value[Q_FABRIC_STATE],
                                      .healthMask = (unsigned int)g->value[Q_FABRIC_HEALTH] };
    if (info->version == nvmlGpuFabricInfo_v3)
        ((nvmlGpuFabricInfo_v3_t *)info)->healthSummary = (unsigned char)g->value[Q_FABRIC_SUMMARY];
    return fake_leave(NVML_SUCCESS);
}

_Static_assert(offsetof(nvmlGpuFabricInfo_v3_t, healthMask) == offsetof(nvmlGpuFabricInfo_v2_t, healthMask) &&
                   offsetof(nvmlGpuFabricInfo_v3_t, state) == offsetof(nvmlGpuFabricInfo_v2_t, state),
               "version 3 is version 2 and one more member");
#endif
