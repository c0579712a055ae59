/*
 * gpu_slots.c - the records of GPUs and who gets one; the opener's work.
 *
 * Nothing is asked of a single GPU at first: each thread finds out whose it is by itself, so that one that
 * hangs does not hide the others. A GPU that came later is known by a UUID that no record has.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpus.h"

#define INDEX_MAX 256 /* a count beyond is nonsense, and becomes no loop */

/*
 * Make a record and start its thread, if the watch has threads; @uuid is empty if the GPU is whoever NVML has
 * at that index.
 */
static int slot_start(struct dh_gpu_watch *w, const char *uuid)
{
    uint32_t index = atomic_load(&w->gpus);
    struct dh_gpu_slot *s = calloc(1, sizeof(*s));
    char name[16];
    int err;

    if (!s)
        return -ENOMEM;
    s->w = w;
    s->index = s->work.index = index;
    s->work.state = DH_STATE_STARTING;
    s->work.period_ns = w->opt.period_ns;
    s->work.beat_ns = dh_now_ns();
    snprintf(s->work.uuid, sizeof(s->work.uuid), "%s", uuid);
    memcpy(s->claim, s->work.uuid, sizeof(s->claim));
    s->pub = s->work;
    atomic_store(&s->gpu_seq.seq, 2);
    atomic_store(&s->event_seq.seq, 2);
    snprintf(name, sizeof(name), "dh-gpu-%u", index);
    pthread_mutex_lock(&w->lock);
    err = w->started ? dh_gpus_thread(w, name, dh_gpu_main, s) : 0;
    if (!err) {
        atomic_store(&w->slot[index], s);
        atomic_store(&w->gpus, index + 1);
    }
    pthread_mutex_unlock(&w->lock);
    if (err)
        free(s);
    return err;
}

/* Why some GPU is not watched. */
static void slots_told(struct dh_gpu_watch *w, int err, const char *why)
{
    w->head.err = err;
    memset(w->head.why, 0, sizeof(w->head.why)); /* equal records have equal bytes */
    snprintf(w->head.why, sizeof(w->head.why), "%s", why);
}

static void slots_full(struct dh_gpu_watch *w)
{
    char why[80];

    snprintf(why, sizeof(why), "NVML counts %u GPUs, of which %u are watched", w->head.count,
             atomic_load(&w->gpus));
    slots_told(w, DH_EFULL, why);
}

/* The first GPUs that are counted; nothing is asked of them. */
static void slots_first(struct dh_gpu_watch *w)
{
    int err = 0;

    while (!err && atomic_load(&w->gpus) < w->head.count && atomic_load(&w->gpus) < DH_GPU_MAX)
        err = slot_start(w, "");
    w->scanned = err ? 0 : w->head.count;
    if (err)
        slots_told(w, err, strerror(-err));
    else if (w->head.count > DH_GPU_MAX)
        slots_full(w);
}

/* Whether a record is of this GPU, or of one that it may turn out to be. */
static bool is_known(struct dh_gpu_watch *w, uint32_t nvml_index, const char *uuid)
{
    bool known = false;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        const struct dh_gpu_slot *s = atomic_load(&w->slot[i]);

        known |= *s->claim ? !strcmp(s->claim, uuid) : i == nvml_index;
    }
    pthread_mutex_unlock(&w->lock);
    return known;
}

/* Look for GPUs that have no record. One that does not say who it is is asked again in the next pass. */
static void slots_scan(struct dh_gpu_watch *w)
{
    bool all = true, full = w->head.count > INDEX_MAX;
    int err = 0;

    for (uint32_t i = 0; i < w->head.count && i < INDEX_MAX; i++) {
        char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "";
        nvmlDevice_t dev = NULL;
        nvmlReturn_t code = OPENER_NVML(w, DH_CALL_HANDLE, nvmlDeviceGetHandleByIndex_v2, i, &dev);

        if (!code)
            code = OPENER_NVML(w, DH_CALL_IDENTITY, nvmlDeviceGetUUID, dev, uuid, sizeof(uuid));
        uuid[sizeof(w->slot[0]->claim) - 1] = '\0';
        if (code || !*uuid)
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
        slots_told(w, err, err ? strerror(-err) : "");
}

/* Have a record of each GPU that NVML counts. */
void dh_slots_find(struct dh_gpu_watch *w)
{
    if (atomic_load(&w->gpus))
        slots_scan(w);
    else
        slots_first(w);
}
