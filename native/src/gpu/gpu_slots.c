/*
 * gpu_slots.c - creates the records of GPUs; part of the opener's work.
 *
 * The first records are created without a call to any GPU: each thread identifies its own GPU, so that a GPU
 * that hangs does not hide the others. A GPU that appears later is recognized by a UUID that no record has.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "gpu/gpus.h"

#define INDEX_MAX 256 /* upper limit of indices that are scanned, whatever count NVML reports */

/*
 * Create a record and start its thread, if the watch has threads. @uuid is empty if the GPU is the one that
 * NVML has at that index.
 */
static int slot_start(struct dh_gpu_watch *w, const char *uuid)
{
    uint32_t index = atomic_load(&w->gpus);
    struct dh_gpu_slot *s = dh_gpu_slot_at(w, index);
    char name[16];
    int err;

    memset(s, 0, sizeof(*s)); /* a thread that did not start may have left values */
    s->w = w;
    s->index = s->work.index = index;
    s->work.state = DH_STATE_STARTING;
    s->work.period_ns = w->opt.period_ns;
    s->work.heartbeat_ns = dh_now_ns();
    snprintf(s->work.uuid, sizeof(s->work.uuid), "%s", uuid);
    memcpy(s->claimed_uuid, s->work.uuid, sizeof(s->claimed_uuid));
    s->pub = s->work;
    s->next_ns = s->work.heartbeat_ns;
    atomic_store(&s->gpu_seq.seq, 2);
    atomic_store(&s->event_seq.seq, 2);
    snprintf(name, sizeof(name), "dh-gpu-%u", index);
    pthread_mutex_lock(&w->lock);
    dh_gpus_split(w); /* its first pass may take long */
    err = w->started ? dh_gpus_thread_start(w, name, dh_gpu_main, s) : 0;
    if (!err)
        atomic_store(&w->gpus, index + 1);
    pthread_mutex_unlock(&w->lock);
    return err;
}

/* Report why a GPU is not watched. */
static void slots_report_error(struct dh_gpu_watch *w, int err, const char *text)
{
    w->head.err = err;
    memset(w->head.err_text, 0, sizeof(w->head.err_text)); /* equal records have equal bytes */
    snprintf(w->head.err_text, sizeof(w->head.err_text), "%s", text);
}

static void slots_full(struct dh_gpu_watch *w)
{
    char text[80];

    snprintf(text, sizeof(text), "NVML counts %u GPUs, of which %u are watched", w->head.count,
             atomic_load(&w->gpus));
    slots_report_error(w, DH_EFULL, text);
}

/* Create the records of the first GPUs that NVML counts, without a call to any of them. */
static void slots_create_first(struct dh_gpu_watch *w)
{
    int err = 0;

    while (!err && atomic_load(&w->gpus) < w->head.count && atomic_load(&w->gpus) < DH_GPU_MAX)
        err = slot_start(w, "");
    w->scanned = err ? 0 : w->head.count;
    if (!err && w->head.count > DH_GPU_MAX)
        slots_full(w);
    else
        slots_report_error(w, err, err ? strerror(-err) : ""); /* also the end of an earlier error */
}

/* Return whether a record belongs to this GPU, or to an unidentified one that may be it. */
static bool is_known(struct dh_gpu_watch *w, uint32_t nvml_index, const char *uuid)
{
    bool last_result = false;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        const struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

        last_result |= *s->claimed_uuid ? !strcmp(s->claimed_uuid, uuid) : i == nvml_index;
    }
    pthread_mutex_unlock(&w->lock);
    return last_result;
}

/* Scan for GPUs without a record. A GPU whose UUID cannot be read is scanned again in the next pass. */
static void slots_scan(struct dh_gpu_watch *w)
{
    bool all = true, full = w->head.count > INDEX_MAX;
    int err = 0;

    for (uint32_t i = 0; i < w->head.count && i < INDEX_MAX; i++) {
        char uuid[sizeof(w->slots[0].claimed_uuid)] = "";
        struct dh_text text = { 0 };
        nvmlDevice_t dev = NULL;
        nvmlReturn_t code = OPENER_NVML(w, DH_CALL_HANDLE, nvmlDeviceGetHandleByIndex_v2, i, &dev);

        if (!code)
            code = OPENER_NVML(w, DH_CALL_IDENTITY, nvmlDeviceGetUUID, dev, text.bytes,
                               NVML_DEVICE_UUID_V2_BUFFER_SIZE);
        if (code || !dh_uuid_keep(uuid, &text))
            all = false;
        else if (is_known(w, i, uuid))
            continue;
        else if (atomic_load(&w->gpus) == DH_GPU_MAX)
            full = true;
        else
            err = slot_start(w, uuid);
        all &= !err;
    }
    w->scanned = all ? w->head.count : 0;
    if (full)
        slots_full(w);
    else if (err || all)
        slots_report_error(w, err, err ? strerror(-err) : "");
}

/* Create a record for each GPU that NVML counts. */
void dh_slots_update(struct dh_gpu_watch *w)
{
    if (atomic_load(&w->gpus))
        slots_scan(w);
    else
        slots_create_first(w);
}
