/*
 * gpu_handle.c - identity of a GPU, and a handle that belongs to it.
 *
 * NVML renumbers GPUs whenever the driver is loaded, and a lost GPU may come back under another index. The
 * UUID is stable: a record keeps the first UUID that it gets, and no other record can take it.
 */
#include <stdio.h>
#include <string.h>

#include "gpu/gpus.h"

/* Claim a UUID for this record. Return: false if another record has it. */
static bool claim_uuid(struct dh_gpu_slot *s, const char *uuid)
{
    struct dh_gpu_watch *w = s->w;
    bool free = true;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        const struct dh_gpu_slot *other = dh_gpu_slot_at(w, i);

        free &= other == s || strcmp(other->claimed_uuid, uuid) != 0;
    }
    if (free)
        snprintf(s->claimed_uuid, sizeof(s->claimed_uuid), "%s", uuid);
    pthread_mutex_unlock(&w->lock);
    return free;
}

/* Write the sysfs form, 0000:3b:00.0, of NVML's 00000000:3B:00.0. */
static void bus_format(char *out, size_t cap, const nvmlPciInfo_t *pci)
{
    snprintf(out, cap, "%04x:%02x:%02x.0", pci->domain, pci->bus & 0xff, pci->device & 0x1f);
}

/*
 * Read the identity of a handle's GPU. A record keeps its first identity: NVML_ERROR_GPU_NOT_FOUND if the
 * handle belongs to another GPU.
 */
static nvmlReturn_t identify(struct dh_gpu_slot *s, nvmlDevice_t dev)
{
    char uuid[sizeof(s->work.uuid)];
    struct dh_text text = { 0 };
    struct dh_gpu *g = &s->work;
    nvmlPciInfo_t pci = { 0 };
    nvmlReturn_t code = DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetUUID, dev, text.bytes,
                                    NVML_DEVICE_UUID_V2_BUFFER_SIZE);

    if (!code && !dh_uuid_keep(uuid, &text))
        code = NVML_ERROR_UNKNOWN; /* an empty UUID would match every record */
    if (code)
        return code;
    if (*g->uuid && strcmp(uuid, g->uuid) != 0)
        return NVML_ERROR_GPU_NOT_FOUND;
    if (!claim_uuid(s, uuid))
        return NVML_ERROR_GPU_NOT_FOUND;
    s->unchanged = false;
    memcpy(g->uuid, uuid, sizeof(g->uuid));
    if (!DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetPciInfo_v3, dev, &pci))
        bus_format(g->bus, sizeof(g->bus), &pci);
    if (!*g->name) {
        text = (struct dh_text){ 0 };
        DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetName, dev, text.bytes, sizeof(g->name));
        dh_text_keep(g->name, sizeof(g->name), &text);
    }
    if (!*g->serial) {
        text = (struct dh_text){ 0 };
        DH_GPU_NVML(s, DH_CALL_IDENTITY, nvmlDeviceGetSerial, dev, text.bytes, sizeof(g->serial));
        dh_text_keep(g->serial, sizeof(g->serial), &text);
    }
    return s->unreachable ? s->status : NVML_SUCCESS;
}

/* Get a handle that belongs to this record's GPU. */
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
        s->unreachable = false; /* NVML may know the GPU by its bus address */
        code = DH_GPU_NVML(s, DH_CALL_HANDLE, nvmlDeviceGetHandleByPciBusId_v2, g->bus, dev);
    }
    if (!code)
        code = identify(s, *dev);
    if (code == NVML_ERROR_NOT_FOUND || code == NVML_ERROR_INVALID_ARGUMENT)
        code = NVML_ERROR_GPU_NOT_FOUND;
    return code;
}
