/*
 * gpu_latch.c - counts events in the record of their GPU, wakes the reader and requests passes.
 *
 * An event cannot be read again, so each type and each XID keeps its count, its last time and its last data.
 * A storm of events wakes the reader at most a hundred times a second.
 */
#include "gpu/gpus.h"

#define COALESCE_NS (DH_NS / 100)

/* events after which the fields are read at once, as they hold details */
#define REREAD_EVENTS                                                                                  \
    (nvmlEventMigConfigChange | nvmlEventTypeDramRetirementEvent | nvmlEventTypeDramRetirementFailure | \
     nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction)

/* An event of an unknown GPU may be of any. */
static void note_unassigned_event(struct dh_gpu_watch *w, uint64_t now_ns)
{
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++)
        atomic_store(&dh_gpu_slot_at(w, i)->event_ns, now_ns);
}

/* Find the GPU of a handle. Its UUID cannot be queried: a lost GPU does not answer. */
static struct dh_gpu_slot *slot_of(struct dh_gpu_watch *w, nvmlDevice_t dev)
{
    for (uint32_t age = 0; age < 2; age++) {
        for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
            struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

            if (dev && atomic_load(&s->event_dev[age]) == dev)
                return s;
        }
    }
    return NULL;
}

/* Find or add the entry of an XID. A full list replaces the entry with the oldest last event. */
static struct dh_xid *xid_entry(struct dh_gpu *g, const nvmlEventData_t *event)
{
    uint32_t code = (uint32_t)event->eventData;
    struct dh_xid *oldest = g->xid, *x;

    for (x = g->xid; x < g->xid + g->xids; x++) {
        if (x->code == code && x->gi == event->gpuInstanceId && x->ci == event->computeInstanceId)
            return x;
        if (x->last_ns < oldest->last_ns)
            oldest = x;
    }
    if (g->xids < DH_XID_MAX) {
        g->xids++;
    } else {
        g->xid_evicted++;
        x = oldest;
    }
    *x = (struct dh_xid){
        .code = code,
        .gi = event->gpuInstanceId,
        .ci = event->computeInstanceId,
    };
    return x;
}

/* Count one event. Return: whether it is the first of its type or XID. */
static bool latch_event(struct dh_gpu_slot *s, const nvmlEventData_t *event, uint64_t now_ns)
{
    struct dh_gpu *g = &s->work;
    bool first = false;

    for (uint64_t m = event->eventType & DH_KNOWN_EVENTS; m; m &= m - 1) {
        int bit = __builtin_ctzll(m);

        first |= !g->event_count[bit]++;
        g->event_last_ns[bit] = now_ns;
        g->event_last_data[bit] = event->eventData;
    }
    if (event->eventType & nvmlEventTypeXidCriticalError) {
        struct dh_xid *x = xid_entry(g, event);

        first |= !x->count++;
        x->last_ns = now_ns;
        if (x->count == 1)
            x->first_ns = now_ns;
    }
    s->event_dirty = s->w->event_dirty = true;
    return first;
}

/* Request a pass by setting @requested, a member of the GPU's slot. */
static void request_pass(struct dh_gpu_slot *s, bool *requested)
{
    pthread_mutex_lock(&s->w->lock);
    if (!*requested)
        pthread_cond_broadcast(&s->w->changed);
    *requested = true;
    pthread_mutex_unlock(&s->w->lock);
}

static void publish_events(struct dh_gpu_watch *w, uint64_t now_ns)
{
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

        if (!s->event_dirty)
            continue;
        s->event_dirty = false;
        dh_seqlock_begin(&s->event_seq);
        dh_words_store(s->pub.event_count, s->work.event_count, DH_GPU_WAITER_BYTES);
        dh_seqlock_end(&s->event_seq);
    }
    w->event_dirty = false;
    w->notified_ns = now_ns;
    dh_gpus_notify(w);
}

/* Latch one event. Return: false for an unregistered event type or an unknown GPU. */
bool dh_event_latch(struct dh_gpu_watch *w, const nvmlEventData_t *event)
{
    struct dh_gpu_slot *s = slot_of(w, event->device);
    uint64_t now_ns = dh_now_ns();

    if (!s) {
        note_unassigned_event(w, now_ns);
        return false;
    }
    atomic_store(&s->event_ns, now_ns);
    if (!(event->eventType & DH_KNOWN_EVENTS))
        return false;
    if (latch_event(s, event, now_ns) || now_ns - w->notified_ns >= COALESCE_NS)
        publish_events(w, now_ns);
    if (event->eventType & nvmlEventMigConfigChange)
        request_pass(s, &s->mig_pass_requested);
    else if (event->eventType & REREAD_EVENTS)
        request_pass(s, &s->pass_requested);
    else if (event->eventType & nvmlEventTypeDoubleBitEccError)
        request_pass(s, &s->error_pass_requested);
    return true;
}

/*
 * Publish the last events of a storm. Until then the waiter waits at most SHORT_WAIT_NS at a time. @at_once: no
 * wait follows.
 */
void dh_events_flush(struct dh_gpu_watch *w, bool at_once)
{
    uint64_t now_ns = dh_now_ns();

    if (w->event_dirty && (at_once || now_ns - w->notified_ns >= COALESCE_NS))
        publish_events(w, now_ns);
}
