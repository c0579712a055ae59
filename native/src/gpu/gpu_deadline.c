/*
 * gpu_deadline.c - the thread that checks the deadlines of NVML calls in other threads.
 *
 * It calls nothing that can hang. It wakes the reader once for each call that misses its deadline; the
 * calling thread wakes the reader again when the call returns after all.
 */
#include "gpu/gpus.h"

/* Count a call that has become overdue. Return: when to check again. The caller holds the lock. */
static uint64_t check_caller(struct dh_gpu_watch *w, struct dh_caller *c, uint64_t now_ns, bool *notify)
{
    uint64_t call = atomic_load(&c->current_call), due_ns;

    if (!call || call == atomic_load(&c->reported_call))
        return now_ns + w->opt.deadline_ns; /* the next call may begin right now */
    due_ns = (call & ~DH_CALL_MASK) + dh_deadline_ns(w, c, call);
    if (due_ns > now_ns)
        return due_ns;
    atomic_store(&c->reported_call, call);
    atomic_fetch_add(&c->overdue, 1);
    *notify = true;
    return now_ns + w->opt.deadline_ns;
}

static uint64_t check_all(struct dh_gpu_watch *w, bool *notify)
{
    uint64_t now_ns = dh_now_ns(), wake_ns = check_caller(w, &w->waiter, now_ns, notify), due_ns;

    due_ns = check_caller(w, &w->opener, now_ns, notify);
    wake_ns = due_ns < wake_ns ? due_ns : wake_ns;
    due_ns = dh_gpus_check_common(w, now_ns);
    wake_ns = due_ns < wake_ns ? due_ns : wake_ns;
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        due_ns = check_caller(w, &dh_gpu_slot_at(w, i)->caller, now_ns, notify);
        wake_ns = due_ns < wake_ns ? due_ns : wake_ns;
    }
    return wake_ns;
}

void *dh_deadline_main(void *arg)
{
    struct dh_gpu_watch *w = arg;

    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        bool notify = false;
        uint64_t wake_ns = check_all(w, &notify);

        if (notify) {
            pthread_mutex_unlock(&w->lock);
            dh_gpus_notify(w);
            pthread_mutex_lock(&w->lock);
        } else if (w->phase == DH_PHASE_CLOSED && !w->opener_active) {
            dh_gpus_wait(w, DH_NEVER); /* no thread calls NVML: a machine without GPUs costs nothing */
        } else {
            dh_gpus_wait(w, wake_ns);
        }
    }
    pthread_mutex_unlock(&w->lock);
    dh_gpus_thread_exit(w);
    return NULL;
}
