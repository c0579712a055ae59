/* gpu_mig.c - the MIG instances of a GPU. */
#include <stdlib.h>
#include <string.h>

#include "gpu/gpus.h"

/* Read one instance. NVML_ERROR_NOT_FOUND: no instance has this index, which is no failure. */
static nvmlReturn_t mig_read(struct dh_gpu_slot *s, unsigned int index, struct dh_mig *mig)
{
    struct dh_text text = { 0 };
    nvmlDevice_t dev = NULL;
    nvmlReturn_t code =
        DH_GPU_NVML(s, DH_CALL_MIG, nvmlDeviceGetMigDeviceHandleByIndex, s->dev, index, &dev);

    if (!code)
        code = DH_GPU_NVML(s, DH_CALL_MIG, nvmlDeviceGetGpuInstanceId, dev, &mig->gi);
    if (!code)
        code = DH_GPU_NVML(s, DH_CALL_MIG, nvmlDeviceGetComputeInstanceId, dev, &mig->ci);
    if (!code)
        code = DH_GPU_NVML(s, DH_CALL_MIG, nvmlDeviceGetUUID, dev, text.bytes, NVML_DEVICE_UUID_V2_BUFFER_SIZE);
    dh_uuid_keep(mig->uuid, &text);
    return code;
}

static int compare(const void *a, const void *b)
{
    const struct dh_mig *x = a, *y = b;

    if (x->gi != y->gi)
        return x->gi < y->gi ? -1 : 1;
    return x->ci < y->ci ? -1 : x->ci > y->ci;
}

/* Read all instances, sorted by id. A list that changes during the read is read again in the next pass. */
static nvmlReturn_t migs_read(struct dh_gpu_slot *s, struct dh_mig migs[DH_MIG_MAX], uint32_t *n)
{
    unsigned int max = 0;
    nvmlReturn_t code = DH_GPU_NVML(s, DH_CALL_MIG, nvmlDeviceGetMaxMigDeviceCount, s->dev, &max);

    *n = 0;
    if (dh_gpu_is_unsupported((int)code))
        return NVML_SUCCESS;
    for (unsigned int i = 0; !code && i < max && i < DH_MIG_MAX; i++) {
        migs[*n] = (struct dh_mig){ 0 };
        code = mig_read(s, i, &migs[*n]);
        if (!code)
            ++*n;
        else if (code == NVML_ERROR_NOT_FOUND)
            code = NVML_SUCCESS;
    }
    qsort(migs, *n, sizeof(*migs), compare);
    return code;
}

/* Update the list, in slow passes and after an event about a change. */
void dh_gpu_read_migs(struct dh_gpu_slot *s)
{
    struct dh_mig migs[DH_MIG_MAX];
    struct dh_gpu *g = &s->work;
    uint32_t n = 0;

    if (!s->mig_due || !dh_gpu_is_valid(g, DH_GPU_MIG_MODE))
        return;
    if (g->value[DH_GPU_MIG_MODE] && migs_read(s, migs, &n))
        return;
    s->mig_due = false;
    memset(&migs[n], 0, (DH_MIG_MAX - n) * sizeof(*migs));
    if (n == g->migs && !memcmp(migs, g->mig, sizeof(migs)))
        return;
    memcpy(g->mig, migs, sizeof(migs));
    g->migs = n;
    g->mig_generation++;
    s->unchanged = false;
}
