/*
 * gpu_events.c - the thread that waits for NVML's events: one set over all GPUs, made anew when it fails.
 *
 * NVML keeps no event that came before registration. A wait that fails is no verdict on any GPU, whatever
 * it answers.
 */
#include "gpus.h"

#define SETTLE_NS (DH_NS / 100) /* a wait while the reader has not seen the last event */
#define BACKOFF_MIN_NS DH_NS
#define BACKOFF_MAX_NS (60 * DH_NS)

static void wait_publish(struct dh_gpu_watch *w, enum dh_source_state state, int32_t err)
{
    bool news = w->wait.state != (uint32_t)state;

    w->wait.state = (uint32_t)state;
    if (err)
        w->wait.err = err;
    w->wait.beat_ns = dh_now_ns();
    dh_seqlock_begin(&w->wait_seq);
    dh_words_store(&w->wait_pub, &w->wait, sizeof(w->wait));
    dh_seqlock_end(&w->wait_seq);
    if (news)
        dh_gpus_ring(w);
}

static nvmlReturn_t set_make(struct dh_gpu_watch *w)
{
    nvmlEventSet_t set = NULL;
    nvmlReturn_t code = DH_NVML(w, &w->waiter, DH_CALL_REGISTER, nvmlEventSetCreate, &set);

    if (code)
        return code;
    pthread_mutex_lock(&w->lock);
    w->set = set;
    w->set_id++;
    w->set_users = w->registered = w->eventless = 0;
    atomic_store(&w->register_err, 0);
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++)
        atomic_load(&w->slot[i])->nudged = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return NVML_SUCCESS;
}

/* A set with which a thread hangs in registration is left to NVML, which ends it with nvmlShutdown. */
static void set_retire(struct dh_gpu_watch *w)
{
    nvmlEventSet_t set;
    bool used;

    pthread_mutex_lock(&w->lock);
    set = w->set;
    w->set = NULL;
    w->set_id++;
    used = w->set_users > 0;
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        struct dh_gpu_slot *s = atomic_load(&w->slot[i]);

        atomic_store(&s->event_mask, 0);
        atomic_store(&s->event_dev[0], NULL); /* the next library may give the handle to another GPU */
        atomic_store(&s->event_dev[1], NULL);
    }
    pthread_mutex_unlock(&w->lock);
    if (used || !w->nvml.nvmlEventSetFree)
        return;
    /* even if the library is being closed */
    atomic_store(&w->waiter.now, dh_call_word(DH_CALL_REGISTER, dh_now_ns()));
    w->nvml.nvmlEventSetFree(set);
    dh_call_end(w, &w->waiter, NVML_SUCCESS);
}

/* Real NVML may not like to wait with nobody registered. False: go on to the next round. */
static bool somebody_registered(struct dh_gpu_watch *w)
{
    bool somebody;

    pthread_mutex_lock(&w->lock);
    if (!w->registered && !w->stopping && !dh_gate_is_stale(w, &w->waiter))
        dh_gate_wait(w, dh_now_ns() + DH_EVENT_WAIT_NS);
    somebody = w->registered && !w->stopping;
    pthread_mutex_unlock(&w->lock);
    return somebody;
}

/* What to say while nobody is registered: no GPU has events, none can register, or none has tried yet. */
static enum dh_source_state state_idle(struct dh_gpu_watch *w)
{
    bool eventless;

    pthread_mutex_lock(&w->lock);
    eventless = w->eventless > 0;
    pthread_mutex_unlock(&w->lock);
    if (atomic_load(&w->register_err))
        return DH_STATE_FAILING;
    return eventless ? DH_STATE_ABSENT : (enum dh_source_state)w->wait.state;
}

/* One wait, and what came of it. */
static nvmlReturn_t wait_once(struct dh_gpu_watch *w)
{
    nvmlEventData_t event = { .gpuInstanceId = DH_NO_INSTANCE, .computeInstanceId = DH_NO_INSTANCE };
    uint64_t begun_ns = dh_now_ns(), wait_ns = w->event_dirty ? SETTLE_NS : DH_EVENT_WAIT_NS, now_ns;
    nvmlReturn_t code = DH_NVML(w, &w->waiter, DH_CALL_WAIT, nvmlEventSetWait_v2, w->set, &event,
                                (unsigned int)(wait_ns / 1000000));

    now_ns = dh_now_ns();
    if (!code && !dh_event_latch(w, &event)) {
        w->wait.failures++;
        w->wait.err = NVML_ERROR_GPU_NOT_FOUND;
        dh_gate_rest(w, now_ns + SETTLE_NS); /* a wait that does not wait must not become a loop */
    }
    dh_events_settle(w);
    if (code == NVML_ERROR_TIMEOUT && now_ns - begun_ns < wait_ns / 2)
        dh_gate_rest(w, begun_ns + wait_ns); /* nor this one */
    return code == NVML_ERROR_TIMEOUT ? NVML_SUCCESS : code;
}

/* The life of one event set. Returns why it is over. */
static nvmlReturn_t serve(struct dh_gpu_watch *w, uint64_t *backoff_ns)
{
    nvmlReturn_t code = set_make(w);

    if (code)
        return code;
    while (!code && !dh_gate_is_stopping(w) && !dh_gate_is_stale(w, &w->waiter)) {
        if (!somebody_registered(w)) {
            wait_publish(w, state_idle(w), atomic_load(&w->register_err));
            continue;
        }
        code = wait_once(w);
        w->wait.passes++;
        if (code)
            break;
        *backoff_ns = BACKOFF_MIN_NS;
        wait_publish(w, DH_STATE_OK, atomic_load(&w->register_err));
    }
    set_retire(w);
    return code;
}

/* Until the library is opened or closed again. */
static void rest_closed(struct dh_gpu_watch *w)
{
    bool absent;
    int32_t err;

    pthread_mutex_lock(&w->lock);
    absent = w->absent;
    err = w->closed_err;
    pthread_mutex_unlock(&w->lock);
    wait_publish(w, absent ? DH_STATE_ABSENT : DH_STATE_FAILING, err);
    pthread_mutex_lock(&w->lock);
    if (w->phase == DH_PHASE_CLOSED && !w->stopping)
        dh_gate_wait(w, absent ? DH_NEVER : dh_now_ns() + DH_EVENT_WAIT_NS);
    pthread_mutex_unlock(&w->lock);
}

/* Until then, or until the library is opened anew. */
static void back_off(struct dh_gpu_watch *w, uint64_t until_ns)
{
    uint64_t now_ns;

    while ((now_ns = dh_now_ns()) < until_ns && !dh_gate_is_stale(w, &w->waiter)) {
        uint64_t beat_ns = now_ns + DH_EVENT_WAIT_NS;

        pthread_mutex_lock(&w->lock);
        if (w->stopping)
            until_ns = now_ns;
        else
            dh_gate_wait(w, beat_ns < until_ns ? beat_ns : until_ns);
        pthread_mutex_unlock(&w->lock);
        wait_publish(w, (enum dh_source_state)w->wait.state, 0);
    }
}

void *dh_waiter_main(void *arg)
{
    struct dh_gpu_watch *w = arg;
    uint64_t backoff_ns = BACKOFF_MIN_NS;
    enum dh_enter entered;

    while ((entered = dh_gate_enter(w, &w->waiter)) != DH_ENTER_STOP) {
        nvmlReturn_t code;

        if (entered == DH_ENTER_CLOSED) {
            rest_closed(w);
            continue;
        }
        code = serve(w, &backoff_ns);
        if (dh_gate_is_stale(w, &w->waiter))
            code = NVML_SUCCESS;
        dh_gate_leave(w, &w->waiter);
        if (!code)
            continue;
        if (dh_gpu_is_unsupported((int)code)) {
            wait_publish(w, DH_STATE_ABSENT, (int32_t)code);
        } else {
            w->wait.failures++;
            wait_publish(w, DH_STATE_FAILING, (int32_t)code);
        }
        if (code == NVML_ERROR_UNINITIALIZED || code == NVML_ERROR_DRIVER_NOT_LOADED)
            dh_gate_renew(w);
        back_off(w, dh_now_ns() + backoff_ns);
        backoff_ns = 2 * backoff_ns < BACKOFF_MAX_NS ? 2 * backoff_ns : BACKOFF_MAX_NS;
    }
    dh_gpus_leave(w);
    return NULL;
}
