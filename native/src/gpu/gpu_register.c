/*
 * gpu_register.c - registration of a GPU for events, on the GPU's own thread.
 *
 * A registration can hang like any call. On the waiter's thread it would block the events of all other GPUs.
 */
#include "gpu/gpus.h"

/*
 * Later events of the handle are of this GPU: NVML may have given it the handle of a GPU that is gone. The caller holds
 * the lock.
 */
static void forget_former_owner(struct dh_gpu_slot *s)
{
    for (uint32_t i = 0; i < atomic_load(&s->w->gpus); i++) {
        struct dh_gpu_slot *other = dh_gpu_slot_at(s->w, i);

        if (other == s)
            continue;
        if (atomic_load(&other->event_dev[1]) == s->dev)
            atomic_store(&other->event_dev[1], NULL);
        if (atomic_load(&other->event_dev[0]) == s->dev) {
            atomic_store(&other->event_dev[0], NULL);
            atomic_store(&other->event_mask, 0);
        }
    }
}

/*
 * Take the set to register with, NULL if there is none. Stores the handle first: events may arrive at once.
 */
static nvmlEventSet_t set_acquire(struct dh_gpu_slot *s, uint64_t *id)
{
    struct dh_gpu_watch *w = s->w;
    nvmlEventSet_t set;

    pthread_mutex_lock(&w->lock);
    set = w->set;
    *id = w->set_id;
    if (set) {
        w->set_users++;
        if (atomic_load(&s->event_dev[0]) != s->dev)
            atomic_store(&s->event_dev[1], atomic_load(&s->event_dev[0]));
        atomic_store(&s->event_dev[0], s->dev);
        forget_former_owner(s);
    }
    pthread_mutex_unlock(&w->lock);
    return set;
}

/* Release the set and note the outcome, unless the set was retired in the meantime. */
static void set_release(struct dh_gpu_slot *s, uint64_t id, nvmlReturn_t code, uint64_t types)
{
    struct dh_gpu_watch *w = s->w;
    bool registered = !code && types;

    pthread_mutex_lock(&w->lock);
    if (id == w->set_id) {
        w->set_users--;
        w->registered += registered;
        w->eventless += code ? dh_gpu_is_unsupported((int)code) : !types;
        atomic_store(&s->event_mask, registered ? types : 0);
        pthread_cond_broadcast(&w->changed);
    }
    pthread_mutex_unlock(&w->lock);
}

/*
 * Whether there is a set that the GPU is not registered with. A failed registration is retried in slow
 * passes.
 */
static bool needs_set(struct dh_gpu_slot *s)
{
    uint64_t id = atomic_load(&s->w->set_id);
    bool needs = id % 2 && (s->set_id != id || s->set_handle != s->work.handles);
    bool fresh = s->tried_set_id != id || s->tried_handle != s->work.handles;

    return needs && (fresh || s->now_ns - s->register_ns >= s->w->opt.slow_ns);
}

/* Register the GPU for all known events that it supports, once per set and handle. */
void dh_gpu_register(struct dh_gpu_slot *s)
{
    unsigned long long types = 0;
    nvmlEventSet_t set;
    nvmlReturn_t code;
    uint64_t id;

    if (s->unreachable || !needs_set(s))
        return;
    set = set_acquire(s, &id);
    if (!set)
        return;
    s->register_ns = s->now_ns;
    s->tried_set_id = id;
    s->tried_handle = s->work.handles;
    code = DH_GPU_NVML(s, DH_CALL_REGISTER, nvmlDeviceGetSupportedEventTypes, s->dev, &types);
    types &= DH_KNOWN_EVENTS;
    if (!code && types)
        code = DH_GPU_NVML(s, DH_CALL_REGISTER, nvmlDeviceRegisterEvents, s->dev, types, set);
    set_release(s, id, code, types);
    if (code && !dh_gpu_is_unsupported((int)code)) {
        atomic_store(&s->w->register_err, (int32_t)code);
        return;
    }
    s->set_id = id;
    s->set_handle = s->work.handles;
}
