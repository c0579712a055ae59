/*
 * gpu_handle.c - who a GPU is, and a handle that answers for this very one.
 *
 * NVML counts GPUs anew whenever the driver is loaded, and a lost one may come back in another place. What
 * lasts is the UUID: the first that a record is told is its own for good, and no other record's.
 */
#include <stdio.h>
#include <string.h>

#include "gpus.h"

/* Take over a UUID, unless another record did. */
static bool claim(struct dh_gpu_slot *s, const char *uuid)
{
    struct dh_gpu_watch *w = s->w;
    bool free = true;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        const struct dh_gpu_slot *other = atomic_load(&w->slot[i]);

        free &= other == s || strcmp(other->claim, uuid) != 0;
    }
    if (free)
        snprintf(s->claim, sizeof(s->claim), "%s", uuid);
    pthread_mutex_unlock(&w->lock);
    return free;
}

/* What NVML spells 00000000:3B:00.0 is 0000:3b:00.0 in sysfs. */
static void bus_spell(char *out, size_t cap, const nvmlPciInfo_t *pci)
{
    snprintf(out, cap, "%04x:%02x:%02x.0", pci->domain, pci->bus & 0xff, pci->device & 0x1f);
}

/*
 * Who is behind a handle. The first answer is for good: a GPU keeps its record. NVML_ERROR_GPU_NOT_FOUND if
 * it is another GPU than the record's.
 */
static nvmlReturn_t identify(struct dh_gpu_slot *s, nvmlDevice_t dev)
{
    char uuid[sizeof(s->work.uuid)] = ""; /* 41 bytes, says NVML */
    struct dh_gpu *g = &s->work;
    nvmlPciInfo_t pci = { 0 };
    nvmlReturn_t code = DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetUUID, dev, uuid, sizeof(uuid));

    if (!code && !*uuid)
        code = NVML_ERROR_UNKNOWN; /* nobody's name would be everybody's */
    if (code)
        return code;
    if (*g->uuid && strcmp(uuid, g->uuid) != 0)
        return NVML_ERROR_GPU_NOT_FOUND;
    if (!claim(s, uuid))
        return NVML_ERROR_GPU_NOT_FOUND;
    s->same = false;
    memcpy(g->uuid, uuid, sizeof(g->uuid));
    if (!DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetPciInfo_v3, dev, &pci))
        bus_spell(g->bus, sizeof(g->bus), &pci);
    if (!*g->name)
        DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetName, dev, g->name, sizeof(g->name));
    if (!*g->serial)
        DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetSerial, dev, g->serial, sizeof(g->serial));
    return s->dead ? s->status : NVML_SUCCESS;
}

/* A handle that answers for this very GPU. */
nvmlReturn_t dh_gpu_handle(struct dh_gpu_slot *s, nvmlDevice_t *dev)
{
    const struct dh_gpu *g = &s->work;
    nvmlReturn_t code;

    s->handle_ns = s->now_ns;
    if (!*g->uuid)
        code = DH_GPU_NVML(s, DH_CALL_HANDLE, nvmlDeviceGetHandleByIndex_v2, g->index, dev);
    else
        code = DH_GPU_NVML(s, DH_CALL_HANDLE, nvmlDeviceGetHandleByUUID, g->uuid, dev);
    if (code && *g->bus) {
        s->dead = false; /* another name may be known */
        code = DH_GPU_NVML(s, DH_CALL_HANDLE, nvmlDeviceGetHandleByPciBusId_v2, g->bus, dev);
    }
    if (!code)
        code = identify(s, *dev);
    if (code == NVML_ERROR_NOT_FOUND || code == NVML_ERROR_INVALID_ARGUMENT)
        code = NVML_ERROR_GPU_NOT_FOUND;
    return code;
}
