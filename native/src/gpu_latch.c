/*
 * gpu_latch.c - events become counts in the record of their GPU, and wake the reader.
 *
 * An event cannot be read again, so nothing of it may be lost: what matters of a type or an XID is how often
 * it came, when, and the last of it. A storm wakes the reader a hundred times a second at most.
 */
#include "gpus.h"

#define COALESCE_NS (DH_NS / 100)

/* After these the fields tell more, so they are read at once. */
#define TELLING_EVENTS                                                                                  \
    (nvmlEventMigConfigChange | nvmlEventTypeDramRetirementEvent | nvmlEventTypeDramRetirementFailure | \
     nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction)

/* Whose handle it is; asking the device for its UUID is what a lost one could not answer. */
static struct dh_gpu_slot *slot_of(struct dh_gpu_watch *w, nvmlDevice_t dev)
{
    for (uint32_t age = 0; age < 2; age++) {
        for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
            struct dh_gpu_slot *s = atomic_load(&w->slot[i]);

            if (dev && atomic_load(&s->event_dev[age]) == dev)
                return s;
        }
    }
    return NULL;
}

/* The entry of an XID; if there is none, a new one, in the place of the one not heard of for longest. */
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

/* Whether it is the first of its kind. */
static bool latch_one(struct dh_gpu_slot *s, const nvmlEventData_t *event, uint64_t now_ns)
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

static void nudge(struct dh_gpu_slot *s, bool mig)
{
    pthread_mutex_lock(&s->w->lock);
    s->nudged = true;
    s->mig_nudged |= mig;
    pthread_cond_broadcast(&s->w->changed);
    pthread_mutex_unlock(&s->w->lock);
}

static void flush(struct dh_gpu_watch *w, uint64_t now_ns)
{
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        struct dh_gpu_slot *s = atomic_load(&w->slot[i]);

        if (!s->event_dirty)
            continue;
        s->event_dirty = false;
        dh_seqlock_begin(&s->event_seq);
        dh_words_store(s->pub.event_count, s->work.event_count, DH_EVENT_PART);
        dh_seqlock_end(&s->event_seq);
    }
    w->event_dirty = false;
    w->rung_ns = now_ns;
    dh_gpus_ring(w);
}

/* False: it is nothing that was registered for, or of no GPU that is. */
bool dh_event_latch(struct dh_gpu_watch *w, const nvmlEventData_t *event)
{
    struct dh_gpu_slot *s = slot_of(w, event->device);
    uint64_t now_ns = dh_now_ns();

    if (!s || !(event->eventType & DH_KNOWN_EVENTS))
        return false;
    if (latch_one(s, event, now_ns) || now_ns - w->rung_ns >= COALESCE_NS)
        flush(w, now_ns);
    if (event->eventType & TELLING_EVENTS)
        nudge(s, event->eventType & nvmlEventMigConfigChange);
    return true;
}

/* Let the reader see the last of a storm. Until that is done the waiter waits no longer than it takes. */
void dh_events_settle(struct dh_gpu_watch *w)
{
    uint64_t now_ns = dh_now_ns();

    if (w->event_dirty && now_ns - w->rung_ns >= COALESCE_NS)
        flush(w, now_ns);
}
