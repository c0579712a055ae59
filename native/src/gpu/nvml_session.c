/*
 * nvml_session.c - enter, exit and drain the session in which threads use the open library; start and end of
 * threads.
 *
 * When the driver was reloaded, the library is closed and loaded again: before that every thread must exit
 * the session, except threads that hang in a call, and their later calls are refused. `epoch` counts openings
 * and closings: odd while the library is open.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "gpu/gpu_call.h"
#include "gpu/nvml_session.h"

#define STACK_BYTES (1024 * 1024) /* only reserved; the stack use of a driver is not documented */

int dh_nvml_session_init(struct dh_gpu_watch *w)
{
    pthread_condattr_t attr;
    int err = pthread_mutex_init(&w->lock, NULL);

    if (err)
        return -err;
    err = pthread_condattr_init(&attr);
    if (!err) {
        err = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        if (!err)
            err = pthread_cond_init(&w->changed, &attr);
        pthread_condattr_destroy(&attr);
    }
    if (err)
        pthread_mutex_destroy(&w->lock);
    return -err;
}

void dh_nvml_session_destroy(struct dh_gpu_watch *w)
{
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
}

/* Sleep until a change or @until_ns. The caller holds the lock. */
void dh_gpus_wait(struct dh_gpu_watch *w, uint64_t until_ns)
{
    const struct timespec t = dh_timespec(until_ns);

    if (until_ns == DH_NEVER)
        pthread_cond_wait(&w->changed, &w->lock);
    else
        pthread_cond_timedwait(&w->changed, &w->lock, &t);
}

/* Sleep until @until_ns. Return: false if the watch is being stopped. */
bool dh_gpus_sleep_until(struct dh_gpu_watch *w, uint64_t until_ns)
{
    bool go_on;

    pthread_mutex_lock(&w->lock);
    while (!w->stopping && dh_now_ns() < until_ns)
        dh_gpus_wait(w, until_ns);
    go_on = !w->stopping;
    pthread_mutex_unlock(&w->lock);
    return go_on;
}

/* Enter the session. Waits while the library is being opened or closed. */
enum dh_session_entry dh_nvml_session_enter(struct dh_gpu_watch *w, struct dh_caller *c)
{
    enum dh_session_entry entered = DH_ENTRY_CLOSED;

    pthread_mutex_lock(&w->lock);
    while (w->phase == DH_PHASE_CHANGING && !w->stopping)
        dh_gpus_wait(w, DH_NEVER);
    if (w->stopping) {
        entered = DH_ENTRY_STOPPING;
    } else if (w->phase == DH_PHASE_OPEN) {
        entered = DH_ENTRY_OPEN;
        c->in_session = true;
        c->epoch = atomic_load(&w->epoch);
    }
    pthread_mutex_unlock(&w->lock);
    return entered;
}

void dh_nvml_session_exit(struct dh_gpu_watch *w, struct dh_caller *c)
{
    pthread_mutex_lock(&w->lock);
    c->in_session = false;
    if (w->phase == DH_PHASE_CHANGING || w->stopping)
        pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

bool dh_gpus_is_stopping(struct dh_gpu_watch *w)
{
    bool stopping;

    pthread_mutex_lock(&w->lock);
    stopping = w->stopping;
    pthread_mutex_unlock(&w->lock);
    return stopping;
}

/* The library was closed since the caller entered: the last answers are meaningless. */
bool dh_nvml_session_is_stale(struct dh_gpu_watch *w, const struct dh_caller *c)
{
    return atomic_load(&w->epoch) != c->epoch;
}

/*
 * When a caller in the session counts as hung; DH_NEVER for a caller outside, 0 for a caller that hangs
 * already.
 */
static uint64_t hang_time_ns(const struct dh_gpu_watch *w, const struct dh_caller *c, uint64_t now_ns)
{
    uint64_t call = atomic_load(&c->current_call), due_ns;

    if (!c->in_session)
        return DH_NEVER;
    if (!call)
        return now_ns + DH_NS / 1000; /* between two calls: the next call is refused */
    due_ns = (call & ~DH_CALL_MASK) + dh_deadline_ns(w, c, call);
    return due_ns > now_ns ? due_ns : 0;
}

static struct dh_caller *caller_at(struct dh_gpu_watch *w, uint32_t i)
{
    return i ? &dh_gpu_slot_at(w, i - 1)->caller : &w->waiter;
}

/*
 * dh_nvml_session_drain() - let no thread enter, and wait until every thread in the session has left it or
 * hangs. For the opener.
 *
 * Return: whether no thread is left in the session.
 */
bool dh_nvml_session_drain(struct dh_gpu_watch *w)
{
    bool empty;

    pthread_mutex_lock(&w->lock);
    if (w->phase == DH_PHASE_OPEN)
        w->opener.epoch = atomic_fetch_add(&w->epoch, 1) + 1;
    w->phase = DH_PHASE_CHANGING;
    pthread_cond_broadcast(&w->changed);
    for (;;) {
        uint64_t now_ns = dh_now_ns(), wake_ns = DH_NEVER;

        empty = true;
        for (uint32_t i = 0; i <= atomic_load(&w->gpus); i++) {
            uint64_t at = hang_time_ns(w, caller_at(w, i), now_ns);

            empty &= at == DH_NEVER;
            if (at && at < wake_ns)
                wake_ns = at;
        }
        if (wake_ns == DH_NEVER || w->stopping)
            break;
        dh_gpus_wait(w, wake_ns);
    }
    pthread_mutex_unlock(&w->lock);
    return empty;
}

void dh_nvml_session_open(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->opener.epoch = atomic_fetch_add(&w->epoch, 1) + 1;
    w->phase = DH_PHASE_OPEN;
    w->closed_err = 0;
    w->absent = false;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Mark the library as unusable until the next attempt. */
void dh_nvml_session_close(struct dh_gpu_watch *w, int32_t err, bool absent)
{
    pthread_mutex_lock(&w->lock);
    w->phase = DH_PHASE_CLOSED;
    w->closed_err = err;
    w->absent = absent;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Return whether no thread in the session entered before the library was last opened. */
bool dh_nvml_session_is_current(struct dh_gpu_watch *w)
{
    bool clean = true;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i <= atomic_load(&w->gpus); i++) {
        const struct dh_caller *c = caller_at(w, i);

        clean &= !c->in_session || c->epoch == w->opener.epoch;
    }
    pthread_mutex_unlock(&w->lock);
    return clean;
}

/* Ask the opener to initialize the library again. */
void dh_nvml_session_request_reinit(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->reinit_requested = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Start a detached thread with all signals blocked, which it inherits. The caller holds the lock. */
int dh_gpus_thread_start(struct dh_gpu_watch *w, const char *name, void *(*run)(void *), void *arg)
{
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;
    int err = pthread_attr_init(&attr);

    if (err)
        return -err;
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    err = pthread_create(&thread, &attr, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (err)
        return -err;
    pthread_setname_np(thread, name); /* still valid: a thread that is already done waits for the lock */
    w->threads++;
    return 0;
}

void dh_gpus_thread_exit(struct dh_gpu_watch *w)
{
    bool last;

    pthread_mutex_lock(&w->lock);
    w->threads--;
    last = w->abandoned && !w->threads;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (last)
        w->release(w);
}
