/*
 * gpu_thread.c - the thread of one GPU: the order of a pass, and how a GPU is lost and found.
 *
 * A GPU that is lost is asked one cheap thing in each pass, and for a fresh handle now and then. Nothing of
 * any other GPU is ever asked for its sake.
 */
#include <string.h>

#include "gpus.h"

/* Ask anew for all, and for what this GPU did not have: it may have been reset, or partitioned. */
static void wake_fields(struct dh_gpu_slot *s)
{
    memset(s->asleep_ns, 0, sizeof(s->asleep_ns));
    memset(s->by_call, 0, sizeof(s->by_call));
    s->links_ns = 0;
    s->slow = s->mig_due = true;
}

static void adopt(struct dh_gpu_slot *s, nvmlDevice_t dev)
{
    s->dev = dev;
    s->dev_epoch = s->caller.epoch;
    s->status = NVML_SUCCESS;
    s->dead = false;
    s->work.handles++;
    for (uint32_t f = 0; f < DH_GPU_FIELD_NUM; f++)
        if (dh_gpu_rows[f].pace == DH_PACE_FIXED)
            s->work.valid[f / 64] &= ~(1ull << (f % 64));
    wake_fields(s);
}

static bool is_due(const struct dh_gpu_slot *s, uint64_t last_ns)
{
    const struct dh_gpus_options *o = &s->w->opt;

    return !last_ns || dh_is_due(s->now_ns, last_ns, o->slow_ns, o->period_ns);
}

/* A handle of this opening of the library. */
static bool has_handle(struct dh_gpu_slot *s)
{
    nvmlDevice_t dev = NULL;
    nvmlReturn_t code;

    if (s->dev && s->dev_epoch == s->caller.epoch)
        return true;
    if (s->dev || s->dev_epoch != s->caller.epoch)
        s->handle_ns = 0;
    s->dev = NULL;
    s->dev_epoch = s->caller.epoch;
    if (!is_due(s, s->handle_ns)) {
        s->status = (nvmlReturn_t)s->work.status;
        return false;
    }
    code = dh_gpu_handle(s, &dev);
    if (code) {
        s->status = code;
        return false;
    }
    adopt(s, dev);
    return true;
}

/* The GPU did not answer in the last pass. Does it now? */
static bool revives(struct dh_gpu_slot *s)
{
    nvmlDevice_t dev = NULL;

    if (dh_gpu_answers(s, s->dev)) {
        if (dh_gpu_handle(s, &dev)) { /* the one it has will do */
            s->dead = false;
            s->status = NVML_SUCCESS;
            wake_fields(s);
        } else {
            adopt(s, dev);
        }
        return true;
    }
    if (!s->status) /* what it answered says less than what it did before */
        s->status = (nvmlReturn_t)s->work.status;
    if (!is_due(s, s->handle_ns))
        return false;
    s->dead = false;
    if (dh_gpu_handle(s, &dev) || !dh_gpu_answers(s, dev)) {
        s->dead = true;
        return false;
    }
    adopt(s, dev);
    return true;
}

static void read_all(struct dh_gpu_slot *s)
{
    uint64_t mig_mode = s->work.value[DH_GPU_MIG_MODE], links = s->links;

    s->quiet = !s->slow;
    s->settled &= s->quiet;
    s->same = s->settled;
    if (!s->settled)
        dh_gpu_plan(s);
    if (s->slow) {
        s->mig_due = true;
        memset(s->work.link_errors, 0, sizeof(s->work.link_errors)); /* summed anew */
    }
    dh_gpu_register(s); /* first: what happens from here on is told by an event, if not by a field */
    dh_gpu_batch(s);
    dh_gpu_sensors(s);
    dh_gpu_links(s);
    if (s->slow) {
        dh_gpu_aer(s);
        s->slow_ns = s->now_ns;
        s->work.slow_passes++;
    }
    if (s->work.value[DH_GPU_MIG_MODE] != mig_mode)
        wake_fields(s); /* with MIG a GPU has no NVLinks, and other counters */
    if (s->work.value[DH_GPU_MIG_MODE] != mig_mode || s->links != links)
        s->slow_ns = 0; /* the next pass asks for what this one could not know of */
    dh_gpu_migs(s);
    s->settled = s->quiet;
}

static void finish(struct dh_gpu_slot *s)
{
    struct dh_gpu *g = &s->work;
    bool lost = dh_gpu_is_dead(s->status);

    if (lost && s->good_epoch == s->caller.epoch && s->status != NVML_ERROR_GPU_IS_LOST &&
        s->status != NVML_ERROR_GPU_NOT_FOUND) {
        s->good_epoch = 0;
        dh_gate_renew(s->w); /* it answered, and now the driver is another one, or gone */
    }
    if (!s->status)
        s->good_epoch = s->caller.epoch;
    if (lost)
        dh_gpu_forget(s);
    g->status = (int32_t)s->status;
    g->state = s->status ? DH_STATE_FAILING : DH_STATE_OK;
    g->failures += s->status != NVML_SUCCESS;
    g->passes++;
    g->beat_ns = s->called_ns;
    dh_gpu_publish(s);
}

/* Its answers were those of a library that was being closed: the record is what it was before. */
static void gone_back(struct dh_gpu_slot *s)
{
    memcpy(&s->work, &s->pub, DH_GPU_PART);
}

static void pass(struct dh_gpu_slot *s)
{
    nvmlReturn_t was = (nvmlReturn_t)s->work.status;
    bool is_void = was == NVML_ERROR_INVALID_ARGUMENT && is_due(s, s->handle_ns); /* the handle, maybe */
    bool was_dead = dh_gpu_is_dead(was) || is_void;
    uint64_t handles = s->work.handles;

    s->slow = s->slow || is_due(s, s->slow_ns);
    if (has_handle(s) && (!was_dead || s->work.handles != handles || revives(s)))
        read_all(s);
    if (dh_gate_is_stale(s->w, &s->caller))
        gone_back(s);
    else
        finish(s);
}

/* The library cannot be used: that is how it is with the GPU as well. */
static void pass_closed(struct dh_gpu_slot *s)
{
    pthread_mutex_lock(&s->w->lock);
    s->status = (nvmlReturn_t)s->w->closed_err;
    pthread_mutex_unlock(&s->w->lock);
    s->good_epoch = 0;
    dh_gpu_forget(s);
    finish(s);
}

/*
 * Sleep until the next pass is due, or until somebody wants one: that may be soon, but never a flood.
 * False if the watch is being stopped.
 */
static bool rest(struct dh_gpu_slot *s, uint64_t next_ns)
{
    struct dh_gpu_watch *w = s->w;
    uint64_t soon_ns = dh_now_ns() + w->opt.period_ns / 10;
    bool go_on;

    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        uint64_t until_ns = (s->nudged || s->mig_nudged) && soon_ns < next_ns ? soon_ns : next_ns;

        if (dh_now_ns() >= until_ns)
            break;
        dh_gate_wait(w, until_ns);
    }
    s->slow = s->mig_nudged;
    s->nudged = s->mig_nudged = false;
    go_on = !w->stopping;
    pthread_mutex_unlock(&w->lock);
    return go_on;
}

/* One pass, whether or not the library can be used. False if the watch is being stopped. */
bool dh_gpu_turn(struct dh_gpu_slot *s)
{
    enum dh_enter entered = dh_gate_enter(s->w, &s->caller);

    if (entered == DH_ENTER_STOP)
        return false;
    s->now_ns = s->called_ns = dh_tick_ns();
    s->status = NVML_SUCCESS;
    s->dead = false;
    if (entered == DH_ENTER_OPEN) {
        pass(s);
        dh_gate_leave(s->w, &s->caller);
    } else {
        pass_closed(s);
    }
    return true;
}

void *dh_gpu_main(void *arg)
{
    struct dh_gpu_slot *s = arg;
    struct dh_gpu_watch *w = s->w;
    uint64_t next_ns = dh_now_ns();

    while (rest(s, next_ns) && dh_gpu_turn(s)) {
        /* a pass that took longer than the period rests for one before the next */
        next_ns += w->opt.period_ns;
        if (next_ns <= dh_now_ns())
            next_ns = dh_now_ns() + w->opt.period_ns;
    }
    dh_gpus_leave(w);
    return NULL;
}
