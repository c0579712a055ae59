/*
 * gpu_deadline.c - the thread that looks at the clock while others call NVML.
 *
 * It calls nothing that can hang. It wakes the reader once for each call that misses its deadline; the
 * caller itself does so when the call returns after all.
 */
#include "gpus.h"

/* How long after its start a call is overdue. That is told as of the tick before, so one is added. */
uint64_t dh_deadline_ns(const struct dh_gpu_watch *w, const struct dh_caller *c, uint64_t word)
{
    uint64_t call = word & DH_CALL_MASK, deadline_ns = w->opt.deadline_ns;

    if (call == DH_CALL_WAIT)
        deadline_ns += DH_EVENT_WAIT_NS;
    else if (c == &w->opener || call == DH_CALL_HANDLE)
        deadline_ns = w->opt.open_deadline_ns;
    return deadline_ns + w->tick_ns;
}

/* Under the lock. Count a call that has become overdue; return when to look again. */
static uint64_t look(struct dh_gpu_watch *w, struct dh_caller *c, uint64_t now_ns, bool *ring)
{
    uint64_t word = atomic_load(&c->now), due_ns;

    if (!word || word == atomic_load(&c->told))
        return now_ns + w->opt.deadline_ns; /* the next call may begin right now */
    due_ns = (word & ~DH_CALL_MASK) + dh_deadline_ns(w, c, word);
    if (due_ns > now_ns)
        return due_ns;
    atomic_store(&c->told, word);
    atomic_fetch_add(&c->overdue, 1);
    *ring = true;
    return now_ns + w->opt.deadline_ns;
}

static uint64_t look_all(struct dh_gpu_watch *w, bool *ring)
{
    uint64_t now_ns = dh_now_ns(), wake_ns = look(w, &w->waiter, now_ns, ring), due_ns;

    due_ns = look(w, &w->opener, now_ns, ring);
    wake_ns = due_ns < wake_ns ? due_ns : wake_ns;
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        due_ns = look(w, &atomic_load(&w->slot[i])->caller, now_ns, ring);
        wake_ns = due_ns < wake_ns ? due_ns : wake_ns;
    }
    return wake_ns;
}

void *dh_deadline_main(void *arg)
{
    struct dh_gpu_watch *w = arg;

    pthread_mutex_lock(&w->lock);
    while (!w->stopping) {
        bool ring = false;
        uint64_t wake_ns = look_all(w, &ring);

        if (ring) {
            pthread_mutex_unlock(&w->lock);
            dh_gpus_ring(w);
            pthread_mutex_lock(&w->lock);
        } else if (w->phase == DH_PHASE_CLOSED && !w->opening) {
            dh_gate_wait(w, DH_NEVER); /* nobody calls anything: a machine without GPUs costs nothing */
        } else {
            dh_gate_wait(w, wake_ns);
        }
    }
    pthread_mutex_unlock(&w->lock);
    dh_gpus_leave(w);
    return NULL;
}
