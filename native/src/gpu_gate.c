/*
 * gpu_gate.c - who is inside the library, who sleeps, and who is the last to leave the watch.
 *
 * The library is closed and loaded anew when the driver was: then every thread must be outside, but for
 * those that hang, and their later calls must not begin. `epoch` counts: odd while the library is open.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "gpus.h"

#define STACK_BYTES (1024 * 1024) /* only reserved; how much of it a driver uses nobody says */

int dh_gate_make(struct dh_gpu_watch *w)
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

void dh_gate_unmake(struct dh_gpu_watch *w)
{
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
}

/* Under the lock: sleep until something changed, or until a time. */
void dh_gate_wait(struct dh_gpu_watch *w, uint64_t until_ns)
{
    const struct timespec t = { .tv_sec = (time_t)(until_ns / DH_NS), .tv_nsec = (long)(until_ns % DH_NS) };

    if (until_ns == DH_NEVER)
        pthread_cond_wait(&w->changed, &w->lock);
    else
        pthread_cond_timedwait(&w->changed, &w->lock, &t);
}

/* Sleep until a time. False if the watch is being stopped. */
bool dh_gate_rest(struct dh_gpu_watch *w, uint64_t until_ns)
{
    bool go_on;

    pthread_mutex_lock(&w->lock);
    while (!w->stopping && dh_now_ns() < until_ns)
        dh_gate_wait(w, until_ns);
    go_on = !w->stopping;
    pthread_mutex_unlock(&w->lock);
    return go_on;
}

/* Go inside, once it is known whether the library is open. */
enum dh_enter dh_gate_enter(struct dh_gpu_watch *w, struct dh_caller *c)
{
    enum dh_enter entered = DH_ENTER_CLOSED;

    pthread_mutex_lock(&w->lock);
    while (w->phase == DH_PHASE_BUSY && !w->stopping)
        dh_gate_wait(w, DH_NEVER);
    if (w->stopping) {
        entered = DH_ENTER_STOP;
    } else if (w->phase == DH_PHASE_OPEN) {
        entered = DH_ENTER_OPEN;
        c->inside = true;
        c->epoch = atomic_load(&w->epoch);
    }
    pthread_mutex_unlock(&w->lock);
    return entered;
}

void dh_gate_leave(struct dh_gpu_watch *w, struct dh_caller *c)
{
    pthread_mutex_lock(&w->lock);
    c->inside = false;
    if (w->phase == DH_PHASE_BUSY || w->stopping)
        pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

bool dh_gate_is_stopping(struct dh_gpu_watch *w)
{
    bool stopping;

    pthread_mutex_lock(&w->lock);
    stopping = w->stopping;
    pthread_mutex_unlock(&w->lock);
    return stopping;
}

/* The library was closed since it entered: what it was answered last means nothing. */
bool dh_gate_is_stale(struct dh_gpu_watch *w, const struct dh_caller *c)
{
    return atomic_load(&w->epoch) != c->epoch;
}

/* When somebody inside counts as hung; DH_NEVER if he is not inside, 0 if he does already. */
static uint64_t hung_at(const struct dh_gpu_watch *w, const struct dh_caller *c, uint64_t now_ns)
{
    uint64_t word = atomic_load(&c->now), due_ns;

    if (!c->inside)
        return DH_NEVER;
    if (!word)
        return now_ns + DH_NS / 1000; /* between two calls: the next is refused */
    due_ns = (word & ~DH_CALL_MASK) + dh_deadline_ns(w, c, word);
    return due_ns > now_ns ? due_ns : 0;
}

static struct dh_caller *caller_at(struct dh_gpu_watch *w, uint32_t i)
{
    return i ? &atomic_load(&w->slot[i - 1])->caller : &w->waiter;
}

/*
 * For the opener: let nobody in, and wait until whoever is inside has left or hangs.
 *
 * Return: whether nobody is inside.
 */
bool dh_gate_park(struct dh_gpu_watch *w)
{
    bool empty;

    pthread_mutex_lock(&w->lock);
    if (w->phase == DH_PHASE_OPEN)
        w->opener.epoch = atomic_fetch_add(&w->epoch, 1) + 1;
    w->phase = DH_PHASE_BUSY;
    pthread_cond_broadcast(&w->changed);
    for (;;) {
        uint64_t now_ns = dh_now_ns(), wake_ns = DH_NEVER;

        empty = true;
        for (uint32_t i = 0; i <= atomic_load(&w->gpus); i++) {
            uint64_t at = hung_at(w, caller_at(w, i), now_ns);

            empty &= at == DH_NEVER;
            if (at && at < wake_ns)
                wake_ns = at;
        }
        if (wake_ns == DH_NEVER || w->stopping)
            break;
        dh_gate_wait(w, wake_ns);
    }
    pthread_mutex_unlock(&w->lock);
    return empty;
}

void dh_gate_open(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->opener.epoch = atomic_fetch_add(&w->epoch, 1) + 1;
    w->phase = DH_PHASE_OPEN;
    w->closed_err = 0;
    w->absent = false;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* It cannot be had, for now. */
void dh_gate_close(struct dh_gpu_watch *w, int32_t err, bool absent)
{
    pthread_mutex_lock(&w->lock);
    w->phase = DH_PHASE_CLOSED;
    w->closed_err = err;
    w->absent = absent;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Nobody inside is there since before the library was last opened. */
bool dh_gate_is_clean(struct dh_gpu_watch *w)
{
    bool clean = true;

    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i <= atomic_load(&w->gpus); i++) {
        const struct dh_caller *c = caller_at(w, i);

        clean &= !c->inside || c->epoch == w->opener.epoch;
    }
    pthread_mutex_unlock(&w->lock);
    return clean;
}

/* Have the opener initialise the library anew. */
void dh_gate_renew(struct dh_gpu_watch *w)
{
    pthread_mutex_lock(&w->lock);
    w->renew = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Wake the reader. The lock makes sure that nothing of the caller's is touched once he stopped waiting. */
void dh_gpus_ring(struct dh_gpu_watch *w)
{
    uint64_t one = 1;

    pthread_mutex_lock(&w->lock);
    if (!w->abandoned) {
        atomic_fetch_add(&w->wakes_done, 1);
        /* fails only when 2^64-2 wakes are unread, and then the reader is due to wake anyway */
        (void)!write(w->wake_fd, &one, sizeof(one));
    }
    pthread_mutex_unlock(&w->lock);
}

/* Under the lock: start a thread, detached, with all signals blocked, which it inherits. */
int dh_gpus_thread(struct dh_gpu_watch *w, const char *name, void *(*run)(void *), void *arg)
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
    pthread_setname_np(thread, name); /* it waits for the lock if it is done already */
    w->threads++;
    return 0;
}

void dh_gpus_leave(struct dh_gpu_watch *w)
{
    bool last;

    pthread_mutex_lock(&w->lock);
    w->threads--;
    last = w->abandoned && !w->threads;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
    if (last)
        dh_gpus_free(w);
}
