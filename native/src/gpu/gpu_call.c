/* gpu_call.c - deadlines of NVML calls, and the reader's wake. */
#include "core/worker.h"
#include "gpu/gpu_call.h"

/*
 * dh_deadline_ns() - return the duration after which a call is overdue. Starts of calls are known as of the
 * last tick, so one tick is added.
 */
uint64_t dh_deadline_ns(const struct dh_gpu_watch *w, const struct dh_caller *c, uint64_t call)
{
    uint64_t kind = call & DH_CALL_MASK, deadline_ns = w->opt.deadline_ns;

    if (kind == DH_CALL_WAIT)
        deadline_ns += w->event_wait_ns;
    else if (c == &w->opener || kind == DH_CALL_HANDLE)
        deadline_ns = w->opt.open_deadline_ns;
    return deadline_ns + w->tick_ns;
}

/*
 * dh_gpus_notify() - wake the reader. Takes the lock, so that wake_fd is not written to after dh_gpus_stop().
 */
void dh_gpus_notify(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    if (!w->abandoned) {
        atomic_fetch_add(&w->wakes_done, 1);
        dh_eventfd_notify(w->wake_fd);
    }
    pthread_mutex_unlock(&w->lock);
}
