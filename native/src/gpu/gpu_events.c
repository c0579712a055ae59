/*
 * gpu_events.c - the thread that waits for NVML's events: one set over all GPUs, created again after a
 * failure.
 *
 * NVML keeps no event from before the registration. A failed wait is no verdict on any GPU, whatever its
 * code.
 */
#include "gpu/gpus.h"

#define SHORT_WAIT_NS (DH_NS / 100) /* longest wait while the last events are not published yet */
#define START_WAIT_NS (2 * DH_NS) /* longest wait of a new set for the registration of all GPUs: one may hang */
#define BACKOFF_MIN_NS DH_NS
#define BACKOFF_MAX_NS (60 * DH_NS)

static void wait_publish(struct dh_gpu_watch *w, enum dh_source_state state, int32_t err)
{
    bool notify = w->wait.state != (uint32_t)state;

    w->wait.state = (uint32_t)state;
    if (err)
        w->wait.err = err;
    w->wait.heartbeat_ns = dh_now_ns();
    dh_seqlock_begin(&w->wait_seq);
    dh_words_store(&w->wait_pub, &w->wait, sizeof(w->wait));
    dh_seqlock_end(&w->wait_seq);
    if (notify)
        dh_gpus_notify(w);
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
        dh_gpu_slot_at(w, i)->pass_requested = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    return NVML_SUCCESS;
}

/* Give up the event set. If a thread hangs in its registration, nvmlShutdown frees the set instead. */
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
        struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

        atomic_store(&s->event_mask, 0);
        atomic_store(&s->event_dev[0], NULL); /* the next library may give the handle to another GPU */
        atomic_store(&s->event_dev[1], NULL);
    }
    pthread_mutex_unlock(&w->lock);
    if (used || !w->nvml.nvmlEventSetFree)
        return;
    /* even if the library is being closed */
    dh_call_mark(&w->waiter, DH_CALL_REGISTER, dh_now_ns());
    w->nvml.nvmlEventSetFree(set);
    dh_call_end(w, &w->waiter, NVML_SUCCESS);
}

/*
 * Whether a GPU is registered; waits for it. Waiting for events without a registration is not safe in NVML.
 */
static bool is_any_registered(struct dh_gpu_watch *w)
{
    bool any_registered;

    pthread_mutex_lock(&w->lock);
    if (!w->registered && !w->stopping && !dh_nvml_session_is_stale(w, &w->waiter))
        dh_gpus_wait(w, dh_now_ns() + w->event_wait_ns);
    any_registered = w->registered && !w->stopping;
    pthread_mutex_unlock(&w->lock);
    return any_registered;
}

/* Return whether each GPU had a pass since the set was created, which registered it if that was possible. */
static bool is_each_gpu_tried(struct dh_gpu_watch *w)
{
    bool each = true;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++)
        each &= dh_gpu_slot_at(w, i)->passed_set_id == atomic_load(&w->set_id);
    pthread_mutex_unlock(&w->lock);
    return each;
}

/*
 * State after a wait that did not fail. An event that comes before its GPU is registered is lost: a new set is not OK
 * until then, and the agent's first report waits for it.
 */
static enum dh_source_state state_waited(struct dh_gpu_watch *w, uint64_t made_ns)
{
    bool started = w->wait.state == DH_STATE_OK || is_each_gpu_tried(w) ||
                   dh_now_ns() - made_ns >= START_WAIT_NS;

    return started ? DH_STATE_OK : (enum dh_source_state)w->wait.state;
}

/* State while no GPU is registered: no GPU has events, registrations fail, or none was tried yet. */
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

/* Wait once for an event, and latch it. */
static nvmlReturn_t wait_once(struct dh_gpu_watch *w)
{
    nvmlEventData_t event = { .gpuInstanceId = DH_NO_INSTANCE, .computeInstanceId = DH_NO_INSTANCE };
    /* the agent's first report waits for the first waits, which show that events can be read */
    bool is_short = w->event_dirty || w->wait.state != DH_STATE_OK;
    uint64_t begun_ns = dh_now_ns(), wait_ns = is_short ? SHORT_WAIT_NS : w->event_wait_ns, now_ns;
    nvmlReturn_t code = DH_NVML(w, &w->waiter, DH_CALL_WAIT, nvmlEventSetWait_v2, w->set, &event,
                                (unsigned int)(wait_ns / 1000000));

    now_ns = dh_now_ns();
    if (!code && !dh_event_latch(w, &event)) {
        w->wait.failures++;
        w->wait.err = NVML_ERROR_GPU_NOT_FOUND;
        dh_gpus_sleep_until(w, now_ns + SHORT_WAIT_NS); /* a wait that returns at once must not become a busy
                                                       loop */
    }
    dh_events_flush(w, code && code != NVML_ERROR_TIMEOUT);
    if (code == NVML_ERROR_TIMEOUT && now_ns - begun_ns < wait_ns / 2)
        dh_gpus_sleep_until(w, begun_ns + wait_ns); /* no busy loop after an early end */
    return code == NVML_ERROR_TIMEOUT ? NVML_SUCCESS : code;
}

/* Serve one event set until it fails. Return: why it ended. */
static nvmlReturn_t run_event_set(struct dh_gpu_watch *w, uint64_t *backoff_ns)
{
    nvmlReturn_t code = set_make(w);
    uint64_t made_ns = dh_now_ns();

    if (code)
        return code;
    while (!code && !dh_gpus_is_stopping(w) && !dh_nvml_session_is_stale(w, &w->waiter)) {
        if (!is_any_registered(w)) {
            dh_events_flush(w, true);
            wait_publish(w, state_idle(w), atomic_load(&w->register_err));
            continue;
        }
        code = wait_once(w);
        w->wait.passes++;
        if (code)
            break;
        *backoff_ns = BACKOFF_MIN_NS;
        atomic_store(&w->waited_ns, dh_now_ns());
        wait_publish(w, state_waited(w, made_ns), atomic_load(&w->register_err));
    }
    dh_events_flush(w, true);
    set_retire(w);
    return code;
}

/* Wait until the library is opened or closed again. */
static void wait_while_closed(struct dh_gpu_watch *w)
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
        dh_gpus_wait(w, absent ? DH_NEVER : dh_now_ns() + w->event_wait_ns);
    pthread_mutex_unlock(&w->lock);
}

/* Sleep until @until_ns, or until the library is opened again. */
static void back_off(struct dh_gpu_watch *w, uint64_t until_ns)
{
    uint64_t now_ns;

    while ((now_ns = dh_now_ns()) < until_ns && !dh_nvml_session_is_stale(w, &w->waiter)) {
        uint64_t heartbeat_ns = now_ns + w->event_wait_ns;

        pthread_mutex_lock(&w->lock);
        if (w->stopping)
            until_ns = now_ns;
        else
            dh_gpus_wait(w, heartbeat_ns < until_ns ? heartbeat_ns : until_ns);
        pthread_mutex_unlock(&w->lock);
        wait_publish(w, (enum dh_source_state)w->wait.state, 0);
    }
}

void *dh_waiter_main(void *arg)
{
    struct dh_gpu_watch *w = arg;
    uint64_t backoff_ns = BACKOFF_MIN_NS;
    enum dh_session_entry entered;

    while ((entered = dh_nvml_session_enter(w, &w->waiter)) != DH_ENTRY_STOPPING) {
        nvmlReturn_t code;

        if (entered == DH_ENTRY_CLOSED) {
            wait_while_closed(w);
            continue;
        }
        code = run_event_set(w, &backoff_ns);
        if (dh_nvml_session_is_stale(w, &w->waiter)) {
            code = NVML_SUCCESS;
            if (w->wait.state == DH_STATE_OK) /* before the library is opened again: no GPU is registered */
                wait_publish(w, DH_STATE_FAILING, NVML_ERROR_UNINITIALIZED);
        }
        dh_nvml_session_exit(w, &w->waiter);
        if (!code)
            continue;
        if (dh_gpu_is_unsupported((int)code)) {
            wait_publish(w, DH_STATE_ABSENT, (int32_t)code);
        } else {
            w->wait.failures++;
            wait_publish(w, DH_STATE_FAILING, (int32_t)code);
        }
        if (code == NVML_ERROR_UNINITIALIZED || code == NVML_ERROR_DRIVER_NOT_LOADED)
            dh_nvml_session_request_reinit(w);
        back_off(w, dh_now_ns() + backoff_ns);
        backoff_ns = 2 * backoff_ns < BACKOFF_MAX_NS ? 2 * backoff_ns : BACKOFF_MAX_NS;
    }
    dh_gpus_thread_exit(w);
    return NULL;
}
