/* gpus.h - functions shared by the files of the GPU watch. Not seen by Python. */
#ifndef DH_GPUS_H
#define DH_GPUS_H

#include "gpu/gpu_call.h"
#include "gpu/nvml_session.h"

/* gpu_deadline.c */
void *dh_deadline_main(void *arg);

/* threads: gpus.c, gpu_open.c, gpu_thread.c, gpu_schedule.c, gpu_events.c */
void *dh_opener_main(void *arg);
void *dh_waiter_main(void *arg);
void *dh_gpus_common_main(void *arg);
void *dh_gpu_main(void *arg);
void dh_gpus_split(struct dh_gpu_watch *w);
uint64_t dh_gpus_check_common(struct dh_gpu_watch *w, uint64_t now_ns);
void dh_gpus_publish_start(struct dh_gpu_watch *w);
void dh_opener_pass(struct dh_gpu_watch *w, bool reinit_requested);
void dh_opener_shutdown(struct dh_gpu_watch *w);
bool dh_gpu_pass_once(struct dh_gpu_slot *s);
uint64_t dh_gpu_next_pass_ns(const struct dh_gpu_slot *s, uint64_t due_ns, uint64_t now_ns);

/* gpu_budget.c */
uint64_t dh_gpu_mean_ns(const struct dh_gpus_options *o, uint64_t mean_ns, uint64_t took_ns, uint64_t weight,
                        uint32_t gpus);
uint64_t dh_gpu_period_ns(const struct dh_gpus_options *o, uint64_t now_ns, uint64_t fast_ns, uint64_t slow_ns,
                          uint32_t gpus);
void dh_gpus_note_usage(struct dh_gpu_watch *w, uint64_t done, struct dh_thread_usage *used);

/* gpu_slots.c, gpu_handle.c: records and their GPUs */
void dh_slots_update(struct dh_gpu_watch *w);
nvmlReturn_t dh_gpu_handle(struct dh_gpu_slot *s, nvmlDevice_t *dev);

/* gpu_register.c, gpu_latch.c: registration for events, and counting of events */
#define DH_KNOWN_EVENTS                                                                                 \
    (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeXidCriticalError |   \
     nvmlEventMigConfigChange | nvmlEventTypeSingleBitEccErrorStorm | nvmlEventTypeDramRetirementEvent | \
     nvmlEventTypeDramRetirementFailure | nvmlEventTypeNonFatalPoisonError |                             \
     nvmlEventTypeFatalPoisonError | nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction)

void dh_gpu_register(struct dh_gpu_slot *s);
bool dh_event_latch(struct dh_gpu_watch *w, const nvmlEventData_t *event);
void dh_events_flush(struct dh_gpu_watch *w, bool at_once);

/*
 * Return the events that are certain to be delivered if they happen: those that the GPU is registered for, while the
 * waiter waits in time. No event is awaited for slow_ns after any event of the GPU, or one that may be of it: faults
 * come in groups, a driver may count an error after it announced it, and during a storm it may announce no more.
 */
static inline uint64_t dh_gpu_awaited_events(const struct dh_gpu_slot *s)
{
    const struct dh_gpu_watch *w = s->w;
    uint64_t mask = atomic_load(&s->event_mask), event_ns = atomic_load(&s->event_ns);

    if (!mask || s->now_ns >= atomic_load(&w->waited_ns) + 2 * w->event_wait_ns ||
        (event_ns && s->now_ns < event_ns + w->opt.slow_ns))
        return 0;
    return mask;
}

/*
 * gpu_text.c: texts of the library. The library may ignore the size of a buffer by some bytes, or forget the
 * end of the text, so texts are read into a buffer with room to spare.
 */
#define DH_TEXT_ROOM 1024

struct dh_text {
    char bytes[DH_TEXT_ROOM]; /* zeroed before the call */
};

bool dh_text_keep(char *to, size_t cap, const struct dh_text *text);
bool dh_uuid_keep(char to[DH_UUID_LEN], const struct dh_text *text);

/* gpu_fields.c: the table of fields */
enum dh_gpu_pace { DH_PACE_FAST, DH_PACE_SLOW, DH_PACE_FIXED };

struct dh_gpu_row {
    const char *name;
    uint8_t pace;     /* enum dh_gpu_pace */
    bool per_link;
    uint16_t field_id;      /* id for nvmlDeviceGetFieldValues, 0 = none */
    uint16_t announced_by;  /* events of which one announces each change, 0 = none */
};

extern const struct dh_gpu_row dh_gpu_rows[DH_GPU_FIELD_NUM];
uint16_t dh_gpu_field_id(enum dh_gpu_field field, uint32_t driver_major);

static inline bool dh_gpu_has_bit(const uint64_t fields[DH_GPU_WORDS], uint32_t field)
{
    return fields[field / 64] >> (field % 64) & 1;
}

static inline bool dh_gpu_is_valid(const struct dh_gpu *g, uint32_t field)
{
    return dh_gpu_has_bit(g->valid, field);
}

static inline bool dh_gpu_is_due(const struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    return dh_gpu_has_bit(s->due, field);
}

/* gpu_record.c: writing a record */
void dh_gpu_store(struct dh_gpu_slot *s, enum dh_gpu_field field, int code, uint64_t value);
void dh_gpu_plan_fields(struct dh_gpu_slot *s);
bool dh_gpu_is_unsupported(int code);
bool dh_gpu_is_unreachable(nvmlReturn_t code);
nvmlReturn_t dh_gpu_note_status(struct dh_gpu_slot *s, nvmlReturn_t code);
void dh_gpu_invalidate(struct dh_gpu_slot *s);
void dh_gpu_publish(struct dh_gpu_slot *s);

/* gpu_wake.c: pure functions */
bool dh_gpu_wakes(const struct dh_gpu_wake *wake, struct dh_gpu_rise_base *base, const struct dh_gpu *before,
                  const struct dh_gpu *now, uint64_t now_ns);

/* gpu_batch.c, gpu_sensors.c, gpu_links.c, gpu_mig.c, gpu_aer.c: the reads of a pass */
void dh_gpu_read_batch(struct dh_gpu_slot *s);
void dh_gpu_put_queries(const struct dh_gpu_slot *s, nvmlFieldValue_t batch[DH_QUERY_MAX]);
void dh_gpu_read_sensors(struct dh_gpu_slot *s);
bool dh_gpu_is_responding(struct dh_gpu_slot *s, nvmlDevice_t dev);
void dh_gpu_read_links(struct dh_gpu_slot *s);
void dh_gpu_link_sums(struct dh_gpu_slot *s, enum dh_gpu_field field, uint32_t n,
                      const struct dh_field_query *queries, const nvmlFieldValue_t *answers);
uint64_t dh_gpu_links_to_query(struct dh_gpu_slot *s, enum dh_gpu_field field);
void dh_gpu_read_migs(struct dh_gpu_slot *s);
void dh_gpu_read_aer(struct dh_gpu_slot *s);

/*
 * Calls NVML in a GPU's thread. An unreachable GPU is not called again in the same pass. Between two calls of
 * a pass nothing takes long, so one read of the clock ends one call and begins the next. The coarse clock is
 * precise enough: deadlines are tens of milliseconds at least, and dh_deadline_ns() adds one tick.
 */
#define DH_GPU_NVML(s, call, function, ...)                                                             \
    ((s)->unreachable                                                                                   \
         ? (s)->status                                                                                  \
         : dh_gpu_note_status((s), dh_gpu_call_done((s), DH_NVML_AT((s)->w, &(s)->caller, call,         \
                                                                    (s)->call_end_ns, function,         \
                                                                    __VA_ARGS__))))

static inline nvmlReturn_t dh_gpu_call_done(struct dh_gpu_slot *s, nvmlReturn_t code)
{
    s->call_end_ns = dh_tick_ns();
    return code;
}

#endif
