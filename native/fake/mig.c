/* mig.c - MIG devices. There is one compute instance, 0, in each GPU instance. */
#include "fake.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetMigMode, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (!fake.profile->mig[0].name)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *current = *pending = g->mig_on ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetMaxMigDeviceCount, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    *count = g->mig_on ? FAKE_MIGS : 0;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetMigDeviceHandleByIndex, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (!fake.profile->mig[0].name)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    if (index >= g->migs)
        return fake_leave(NVML_ERROR_NOT_FOUND);
    *mig = fake_handle(g, &g->mig[index]);
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!is_mig)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceIsMigDeviceHandle, device, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    *is_mig = m != NULL;
    return fake_leave(NVML_SUCCESS);
}

/* Begin a call as fake_enter(), but refuse a GPU's own handle. */
static nvmlReturn_t mig_enter(enum fake_call call, nvmlDevice_t mig, struct fake_gpu **g, struct fake_mig **m)
{
    nvmlReturn_t answer = fake_enter(call, mig, g, m);

    return answer == NVML_SUCCESS && !*m ? fake_leave(NVML_ERROR_NOT_SUPPORTED) : answer;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t mig, unsigned int *id)
{
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!id)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = mig_enter(CALL_nvmlDeviceGetGpuInstanceId, mig, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    *id = m->gi;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t mig, unsigned int *id)
{
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!id)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = mig_enter(CALL_nvmlDeviceGetComputeInstanceId, mig, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    *id = 0;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!device)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = mig_enter(CALL_nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    *device = fake_handle(g, NULL);
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t mig, nvmlDeviceAttributes_t *attributes)
{
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!attributes)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = mig_enter(CALL_nvmlDeviceGetAttributes_v2, mig, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    *attributes = (nvmlDeviceAttributes_t){ .multiprocessorCount = m->profile->multiprocessors,
                                            .sharedCopyEngineCount = m->profile->compute,
                                            .gpuInstanceSliceCount = m->profile->compute,
                                            .computeInstanceSliceCount = m->profile->compute,
                                            .memorySizeMB = m->profile->mib };
    return fake_leave(NVML_SUCCESS);
}
