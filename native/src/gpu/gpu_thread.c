/*
 * gpu_thread.c - one pass over one GPU: the order of its reads, and how a lost GPU is found again.
 *
 * A lost GPU costs one cheap call in each pass, and a request for a new handle from time to time. Other GPUs
 * are not affected.
 */
#include <string.h>

#include "core/durations.h"
#include "gpu/gpus.h"

#define READS_MAX 3 /* in one pass: a lost field, the mode that explains it, and the fields of that mode */

/* Read all fields again, unsupported ones included: the GPU may have been reset or repartitioned. */
static void retry_fields(struct dh_gpu_slot *s)
{
    memset(s->unsupported_ns, 0, sizeof(s->unsupported_ns));
    memset(s->via_function, 0, sizeof(s->via_function));
    s->links_ns = 0;
    s->slow = s->mig_due = true;
}

/* The GPU may lack fields that it had before: its mode changed, or another driver may be loaded. */
static void expect_lost_fields(struct dh_gpu_slot *s)
{
    memset(s->may_lack, 0xff, sizeof(s->may_lack));
}

static void adopt_handle(struct dh_gpu_slot *s, nvmlDevice_t dev)
{
    s->dev = dev;
    s->dev_epoch = s->caller.epoch;
    s->status = NVML_SUCCESS;
    s->unreachable = false;
    s->work.handles++;
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        if (dh_gpu_rows[f].pace == DH_PACE_FIXED)
            s->work.valid[f / 64] &= ~(1ull << (f % 64));
    retry_fields(s);
}

static bool is_slow_read_due(const struct dh_gpu_slot *s, uint64_t last_ns)
{
    const struct dh_gpus_options *o = &s->w->opt;

    return !last_ns || dh_is_due(s->now_ns, last_ns, o->slow_ns, s->work.period_ns);
}

/* The handle belongs to a GPU that NVML no longer lists, or to another GPU, which needs a record of its own. */
static void drop_handle(struct dh_gpu_slot *s)
{
    s->dev = NULL;
    s->status = NVML_ERROR_GPU_NOT_FOUND;
    pthread_mutex_lock(&s->w->lock);
    s->w->scan_requested = true;
    pthread_mutex_unlock(&s->w->lock);
}

/*
 * NVML counts fewer GPUs than have a handle, and a handle of a removed GPU may still answer. Return: whether
 * NVML still lists this GPU.
 */
static bool is_still_listed(struct dh_gpu_slot *s)
{
    nvmlDevice_t dev = NULL;
    nvmlReturn_t code = dh_gpu_handle(s, &dev);

    if (code == NVML_ERROR_GPU_NOT_FOUND) {
        drop_handle(s);
        return false;
    }
    s->unreachable = false; /* another failure: the pass itself shows whether the GPU answers */
    s->status = NVML_SUCCESS;
    if (!code && dev != s->dev)
        adopt_handle(s, dev);
    return true;
}

/* Get a handle of the current session, if necessary and possible. */
static bool has_handle(struct dh_gpu_slot *s)
{
    nvmlDevice_t dev = NULL;
    nvmlReturn_t code;

    if (s->dev && s->dev_epoch == s->caller.epoch)
        return !s->verify_due || is_still_listed(s);
    if (s->dev || s->dev_epoch != s->caller.epoch)
        s->handle_ns = 0;
    if (s->dev_epoch != s->caller.epoch)
        expect_lost_fields(s);
    s->dev = NULL;
    s->dev_epoch = s->caller.epoch;
    if (!is_slow_read_due(s, s->handle_ns)) {
        s->status = (nvmlReturn_t)s->work.status;
        return false;
    }
    code = dh_gpu_handle(s, &dev);
    if (code) {
        s->status = code;
        return false;
    }
    adopt_handle(s, dev);
    return true;
}

/* Return whether a GPU that did not answer in the last pass answers now. */
static bool is_back(struct dh_gpu_slot *s)
{
    nvmlDevice_t dev = NULL;
    nvmlReturn_t code;

    if (dh_gpu_is_responding(s, s->dev)) {
        code = dh_gpu_handle(s, &dev);
        if (code == NVML_ERROR_GPU_NOT_FOUND) {
            drop_handle(s);
            return false;
        }
        if (code) { /* the old handle still works */
            s->unreachable = false;
            s->status = NVML_SUCCESS;
            retry_fields(s);
        } else {
            adopt_handle(s, dev);
        }
        return true;
    }
    if (!s->status) /* a plain failure must not hide the earlier, more precise status */
        s->status = (nvmlReturn_t)s->work.status;
    if (!is_slow_read_due(s, s->handle_ns))
        return false;
    s->unreachable = false;
    if (dh_gpu_handle(s, &dev) || !dh_gpu_is_responding(s, dev)) {
        s->unreachable = true;
        return false;
    }
    adopt_handle(s, dev);
    return true;
}

/*
 * After a read that changed the record. Return: whether the GPU may have other fields than before, so that all
 * must be read: a mode changed, or a field was lost and the modes, which are slow fields, were not read.
 */
static bool has_other_fields(struct dh_gpu_slot *s)
{
    const struct dh_gpu *g = &s->work;
    bool lost_field = s->lost_field && !s->slow, mode_changed = g->value[DH_GPU_MIG_MODE] != s->mig_mode;

    s->lost_field = false;
    s->mig_mode = g->value[DH_GPU_MIG_MODE]; /* with MIG a GPU has no NVLinks and other counters */
    if (dh_gpu_is_valid(g, DH_GPU_ECC_MODE)) {
        mode_changed |= s->has_ecc_mode && g->value[DH_GPU_ECC_MODE] != s->ecc_mode;
        s->has_ecc_mode = true;
        s->ecc_mode = g->value[DH_GPU_ECC_MODE];
    }
    if (mode_changed) {
        expect_lost_fields(s);
        s->slow_ns = 0; /* the next pass reads what this pass could not know of */
    }
    return mode_changed || lost_field;
}

/* Read the fields that are due. Return: whether the GPU may have other fields now, so that all must be read. */
static bool read_all(struct dh_gpu_slot *s)
{
    uint64_t links = s->links, awaited = dh_gpu_awaited_events(s);
    bool is_other;

    s->fast_ok = !s->slow;
    s->plan_reusable &= s->fast_ok & (awaited == s->awaited);
    s->awaited = awaited;
    s->unchanged = s->plan_reusable;
    if (!s->plan_reusable)
        dh_gpu_plan_fields(s);
    if (s->slow) {
        s->mig_due = true;
        memset(s->work.link_errors, 0, sizeof(s->work.link_errors)); /* summed again in this pass */
    }
    dh_gpu_register(s); /* first: later faults then appear as an event, if not in a field */
    dh_gpu_read_batch(s);
    dh_gpu_read_sensors(s);
    dh_gpu_read_links(s);
    if (s->slow) {
        dh_gpu_read_aer(s);
        s->slow_ns = s->now_ns;
        for (uint32_t i = 0; i < DH_GPU_WORDS; i++)
            s->may_lack[i] &= ~s->work.valid[i];
    }
    is_other = !s->unchanged && has_other_fields(s);
    is_other |= s->links != links; /* the counters of links that were just found are not read yet */
    dh_gpu_read_migs(s);
    s->plan_reusable = s->fast_ok;
    return is_other;
}

/* Read all fields until the GPU shows no further change of the fields that it has. */
static void read_again(struct dh_gpu_slot *s)
{
    for (int reads = 1; reads < READS_MAX; reads++) {
        retry_fields(s);
        if (!read_all(s))
            return;
    }
    s->slow_ns = 0; /* the next pass reads what may still be missing */
}

static void finish_pass(struct dh_gpu_slot *s)
{
    struct dh_gpu *g = &s->work;
    bool lost = dh_gpu_is_unreachable(s->status);

    if (lost && s->ok_epoch == s->caller.epoch && s->status != NVML_ERROR_GPU_IS_LOST &&
        s->status != NVML_ERROR_GPU_NOT_FOUND) {
        s->ok_epoch = 0;
        dh_nvml_session_request_reinit(s->w); /* the GPU answered before: the driver was reloaded or unloaded */
    }
    if (!s->status)
        s->ok_epoch = s->caller.epoch;
    if (lost)
        dh_gpu_invalidate(s);
    g->status = (int32_t)s->status;
    g->state = s->status ? DH_STATE_FAILING : DH_STATE_OK;
    g->failures += s->status != NVML_SUCCESS;
    g->passes++;
    g->heartbeat_ns = s->call_end_ns;
    dh_durations_note(&s->durations, s->call_end_ns - s->now_ns);
    dh_gpu_publish(s);
}

/* Discard a pass whose answers came from a library that was being closed. */
static void roll_back(struct dh_gpu_slot *s)
{
    memcpy(&s->work, &s->pub, DH_GPU_THREAD_BYTES);
}

static void pass(struct dh_gpu_slot *s)
{
    nvmlReturn_t status_before = (nvmlReturn_t)s->work.status;
    bool is_void = status_before == NVML_ERROR_INVALID_ARGUMENT && is_slow_read_due(s, s->handle_ns); /* the handle may
                                                                                               be invalid */
    bool was_unreachable = dh_gpu_is_unreachable(status_before) || is_void;
    uint64_t handles = s->work.handles;

    s->slow = s->slow || is_slow_read_due(s, s->slow_ns);
    s->caller.is_measured = s->slow || s->follows_slow;
    s->follows_slow = s->slow;
    if (has_handle(s) && (!was_unreachable || s->work.handles != handles || is_back(s))) {
        if (read_all(s) || (status_before && !s->status && !s->slow)) /* it answers again: slow fields failed */
            read_again(s);
        s->work.slow_passes += s->slow;
    }
    if (dh_nvml_session_is_stale(s->w, &s->caller))
        roll_back(s);
    else
        finish_pass(s);
}

/* The library cannot be used: report its error as the status of the GPU. */
static void pass_closed(struct dh_gpu_slot *s)
{
    pthread_mutex_lock(&s->w->lock);
    s->status = (nvmlReturn_t)s->w->closed_err;
    s->pass_requested |= !s->status;
    pthread_mutex_unlock(&s->w->lock);
    if (!s->status) /* it was opened meanwhile: the next pass reads */
        return;
    s->ok_epoch = 0;
    dh_gpu_invalidate(s);
    finish_pass(s);
}

/* Run one pass, also without a usable library. Return: false if the watch is being stopped. */
bool dh_gpu_pass_once(struct dh_gpu_slot *s)
{
    enum dh_session_entry entered = dh_nvml_session_enter(s->w, &s->caller);

    if (entered == DH_ENTRY_STOPPING)
        return false;
    s->now_ns = s->call_end_ns = dh_tick_ns();
    s->status = NVML_SUCCESS;
    s->unreachable = false;
    if (entered == DH_ENTRY_OPEN) {
        pass(s);
        dh_nvml_session_exit(s->w, &s->caller);
    } else {
        pass_closed(s);
    }
    return true;
}
