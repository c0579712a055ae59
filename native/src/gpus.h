/*
 * gpus.h - what the threads of a GPU watch share. Not seen by Python.
 *
 *   opener    loads and initialises the library, counts GPUs, starts their threads     gpu_open.c
 *   GPU       one each: handle, identity, passes over the fields, registration         gpu_thread.c
 *   waiter    waits for events and latches them                                        gpu_events.c
 *   deadline  finds calls that take too long, and wakes the reader                     gpu_deadline.c
 *
 * Any call of NVML can hang. So no lock is held across one, no thread waits for another one's, and a record
 * has one writer. `lock` guards only what is named below it, for a few instructions at a time.
 */
#ifndef DH_GPUS_H
#define DH_GPUS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "clock.h"
#include "drahealth.h"
#include "nvml_load.h"
#include "seqlock.h"

#define DH_SYSFS_MAX 200
#define DH_LIBRARY_MAX 4000
#define DH_GPU_WAKES_MAX 256
#define DH_PROBES 15
#define DH_QUESTIONS (DH_GPU_FIELD_NUM + 8 * DH_LINK_MAX) /* of one call: 8 fields have one for each link */
#define DH_EVENT_WAIT_NS (DH_NS / 2) /* a wait cannot be interrupted: stop and reload last as long */
#define DH_NEVER UINT64_MAX

/* What one GPU thread writes of struct dh_gpu; the waiter writes the rest. */
#define DH_GPU_PART offsetof(struct dh_gpu, event_count)
#define DH_EVENT_PART (sizeof(struct dh_gpu) - DH_GPU_PART)

_Static_assert(DH_GPU_PART % 8 == 0 && DH_EVENT_PART % 8 == 0 && sizeof(struct dh_gpus) % 8 == 0 &&
                   _Alignof(struct dh_gpu) == 8 && _Alignof(struct dh_gpus) == 8,
               "records are copied by words");

/* A thread that calls NVML, as others see it. */
struct dh_caller {
    _Atomic uint64_t now;     /* the call under way; see dh_call_word() */
    _Atomic uint64_t told;    /* the last `now` that was found overdue */
    _Atomic uint64_t overdue; /* how many were */
    uint64_t epoch;           /* of the library when it entered; its own */
    uint64_t calls;           /* its own */
    bool inside;              /* under the lock */
};

/*
 * A call and its start in one word, so that nobody sees one without the other: ns with the lowest 5 bits
 * replaced by enum dh_nvml_call.
 */
#define DH_CALL_MASK 31ull
_Static_assert(DH_CALL_NUM <= DH_CALL_MASK + 1, "a call fits into 5 bits");

static inline uint64_t dh_call_word(enum dh_nvml_call call, uint64_t now_ns)
{
    return (now_ns & ~DH_CALL_MASK) | (uint64_t)call;
}

/* Where a DH_GPU_WAKE_RISE counter stood when its window began. */
struct dh_gpu_base {
    uint64_t value, since_ns;
};

/* One question of nvmlDeviceGetFieldValues, and its answer: as they stand in nvmlFieldValue_t. */
struct dh_question {
    unsigned int field, scope;
};

struct dh_answer {
    nvmlValueType_t type;
    nvmlReturn_t code;
    nvmlValue_t value;
};

/* The questions of one field: they follow each other, in the order of the parts. */
struct dh_gpu_part {
    uint16_t field, questions;
};

struct dh_gpu_watch;

struct dh_gpu_slot {
    struct dh_gpu_watch *w;
    uint32_t index;
    struct dh_caller caller;

    /* the GPU thread's own */
    struct dh_gpu work;            /* as it reads now; from `event_count` on the waiter's */
    nvmlDevice_t dev;              /* NULL while there is none to be had */
    uint64_t dev_epoch;            /* of the library that gave it */
    uint64_t good_epoch;           /* of the library when the GPU last answered, 0 since it does not */
    uint64_t now_ns;               /* of this pass; like all times here, as of the last tick */
    uint64_t called_ns;            /* when its last call of this pass returned, or the pass began */
    uint64_t slow_ns, handle_ns, register_ns; /* when that was last done, 0 never */
    bool slow, dead;               /* this pass reads the slow fields; no call of this pass can answer */
    nvmlReturn_t status;           /* of this pass */
    bool quiet;                    /* this pass is a fast one, and no reading of it failed */
    bool settled;                  /* the last that read anything was, so this one asks the same */
    bool same;                     /* and its record holds nothing new: who writes there, clears it */
    uint64_t due[DH_GPU_WORDS];    /* fields that this pass asks for */
    uint64_t asleep_ns[DH_GPU_FIELD_NUM]; /* since when a field is not asked for, being unsupported */
    uint64_t links;                /* bit set of links that answer */
    uint64_t links_ns;             /* when all were last asked, and each said something; 0 never */
    uint64_t by_call[DH_GPU_WORDS]; /* link fields that nvmlDeviceGetFieldValues does not know */
    uint64_t probe[DH_PROBES], sorted[DH_PROBES]; /* in turn, and by size */
    uint32_t probes;
    bool mig_due;
    uint64_t set_id, tried_id;     /* of the event set that it is, or tried to be, registered with */
    uint64_t set_handle, tried_handle; /* work.handles when it was, or tried */
    struct dh_gpu_base base[DH_GPU_WAKES_MAX];
    nvmlFieldValue_t batch[DH_QUESTIONS]; /* as the driver has it in its hands */
    struct dh_question question[DH_QUESTIONS];
    struct dh_answer known[DH_QUESTIONS]; /* the last, to each */
    int asked;                     /* questions, in this pass */
    struct dh_gpu_part part[DH_GPU_FIELD_NUM];
    uint32_t parts;
    uint8_t sensor[DH_GPU_FIELD_NUM]; /* rows of the table of functions, in this pass */
    uint32_t sensors;

    /* shared */
    _Atomic(nvmlDevice_t) event_dev[2]; /* registered last, and before that: an event names either */
    _Atomic uint64_t event_mask;
    bool event_dirty;              /* the waiter's own */
    struct dh_seqlock gpu_seq, event_seq;
    struct dh_gpu pub;

    /* under the lock */
    bool nudged, mig_nudged;       /* look at once */
    char claim[48];                /* UUID of the GPU that this record is of; empty: not known */
};

enum dh_phase { DH_PHASE_CLOSED, DH_PHASE_BUSY, DH_PHASE_OPEN };

/* How the waiter does: its part of struct dh_gpus. */
struct dh_wait {
    uint32_t state;
    int32_t err;
    uint64_t passes, beat_ns, failures;
};

struct dh_gpu_watch {
    /* constant */
    struct dh_gpus_options opt;
    char library[DH_LIBRARY_MAX + 1];
    char sysfs[DH_SYSFS_MAX + 1];
    struct dh_gpu_wake wakes[DH_GPU_WAKES_MAX];
    uint32_t nwakes;
    int wake_fd;
    uint64_t tick_ns;        /* length of the clock's that GPU threads look at */

    /* the opener's own */
    struct dh_nvml nvml;     /* read by all who are inside, written while nobody is */
    struct dh_caller opener;
    struct dh_gpus head;
    uint32_t inits;          /* not yet answered by a shutdown */
    uint32_t scanned;        /* GPUs counted when all were last known by name */
    bool unclean;            /* initialised anew while somebody hung inside */
    bool missed;             /* the last look got no answer of use */
    uint64_t reopen_ns;      /* when it last tried to */

    /* the waiter's own */
    struct dh_caller waiter;
    struct dh_wait wait;
    uint64_t rung_ns;
    bool event_dirty;

    /* shared with readers */
    struct dh_seqlock head_seq, wait_seq;
    struct dh_gpus head_pub;
    struct dh_wait wait_pub;
    _Atomic uint32_t gpus;
    _Atomic(struct dh_gpu_slot *) slot[DH_GPU_MAX];
    _Atomic uint64_t wakes_done;
    _Atomic uint64_t epoch;      /* of the library: odd while it is open */
    _Atomic uint32_t driver_major;
    _Atomic int32_t register_err;
    _Atomic uint64_t set_id;     /* of the event set: odd while there is one. Written under the lock */

    pthread_mutex_t lock;
    pthread_cond_t changed;  /* with CLOCK_MONOTONIC */
    /* under the lock */
    enum dh_phase phase;
    int32_t closed_err;      /* why it is closed: nvmlReturn_t */
    bool absent;             /* because there is no library */
    bool started, stopping, abandoned, renew, opening;
    uint32_t threads;
    nvmlEventSet_t set;      /* to register with; NULL while there is none */
    uint32_t set_users;      /* threads that register with it now */
    uint32_t registered;     /* times that a GPU did */
    uint32_t eventless;      /* times that one turned out to have no events */
};

/* gpu_gate.c: who is inside the library, and who sleeps */
enum dh_enter { DH_ENTER_OPEN, DH_ENTER_CLOSED, DH_ENTER_STOP };

int dh_gate_make(struct dh_gpu_watch *w);
void dh_gate_unmake(struct dh_gpu_watch *w);
enum dh_enter dh_gate_enter(struct dh_gpu_watch *w, struct dh_caller *c);
void dh_gate_leave(struct dh_gpu_watch *w, struct dh_caller *c);
bool dh_gate_is_stopping(struct dh_gpu_watch *w);
bool dh_gate_is_stale(struct dh_gpu_watch *w, const struct dh_caller *c);
void dh_gate_wait(struct dh_gpu_watch *w, uint64_t until_ns); /* under the lock */
bool dh_gate_rest(struct dh_gpu_watch *w, uint64_t until_ns);
bool dh_gate_park(struct dh_gpu_watch *w);
void dh_gate_open(struct dh_gpu_watch *w);
void dh_gate_close(struct dh_gpu_watch *w, int32_t err, bool absent);
bool dh_gate_is_clean(struct dh_gpu_watch *w);
void dh_gate_renew(struct dh_gpu_watch *w);
void dh_gpus_ring(struct dh_gpu_watch *w);
int dh_gpus_thread(struct dh_gpu_watch *w, const char *name, void *(*run)(void *), void *arg);
void dh_gpus_leave(struct dh_gpu_watch *w); /* a thread's last deed */
void dh_gpus_free(struct dh_gpu_watch *w);

/* gpu_deadline.c */
uint64_t dh_deadline_ns(const struct dh_gpu_watch *w, const struct dh_caller *c, uint64_t word);
void *dh_deadline_main(void *arg);

/* gpus.c, gpu_open.c, gpu_thread.c, gpu_events.c */
void dh_gpus_begin(struct dh_gpu_watch *w);
void dh_opener_pass(struct dh_gpu_watch *w, bool renew);
void dh_opener_shut(struct dh_gpu_watch *w);
bool dh_gpu_turn(struct dh_gpu_slot *s);
void *dh_opener_main(void *arg);
void *dh_gpu_main(void *arg);
void *dh_waiter_main(void *arg);

/* gpu_slots.c, gpu_handle.c: records and GPUs */
void dh_slots_find(struct dh_gpu_watch *w);
nvmlReturn_t dh_gpu_handle(struct dh_gpu_slot *s, nvmlDevice_t *dev);

/* gpu_register.c, gpu_latch.c: a GPU and the event set, an event and its GPU */
#define DH_KNOWN_EVENTS                                                                                 \
    (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeXidCriticalError |   \
     nvmlEventMigConfigChange | nvmlEventTypeSingleBitEccErrorStorm | nvmlEventTypeDramRetirementEvent | \
     nvmlEventTypeDramRetirementFailure | nvmlEventTypeNonFatalPoisonError |                             \
     nvmlEventTypeFatalPoisonError | nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction)

void dh_gpu_register(struct dh_gpu_slot *s);
bool dh_event_latch(struct dh_gpu_watch *w, const nvmlEventData_t *event);
void dh_events_settle(struct dh_gpu_watch *w);

/* gpu_fields.c: the table of fields */
enum dh_gpu_pace { DH_PACE_FAST, DH_PACE_SLOW, DH_PACE_FIXED };

struct dh_gpu_row {
    const char *name;
    uint8_t pace;     /* enum dh_gpu_pace */
    bool per_link;
    uint16_t fi;      /* id for nvmlDeviceGetFieldValues, 0 none */
};

extern const struct dh_gpu_row dh_gpu_rows[DH_GPU_FIELD_NUM];
uint16_t dh_gpu_fi(enum dh_gpu_field field, uint32_t driver_major);

static inline bool dh_gpu_has(const uint64_t fields[DH_GPU_WORDS], uint32_t field)
{
    return fields[field / 64] >> (field % 64) & 1;
}

static inline bool dh_gpu_is_valid(const struct dh_gpu *g, uint32_t field)
{
    return dh_gpu_has(g->valid, field);
}

static inline bool dh_gpu_is_due(const struct dh_gpu_slot *s, enum dh_gpu_field field)
{
    return dh_gpu_has(s->due, field);
}

/* gpu_record.c: writing a record */
void dh_gpu_put(struct dh_gpu_slot *s, enum dh_gpu_field field, int code, uint64_t value);
void dh_gpu_plan(struct dh_gpu_slot *s);
bool dh_gpu_is_unsupported(int code);
bool dh_gpu_is_dead(nvmlReturn_t code);
nvmlReturn_t dh_gpu_note(struct dh_gpu_slot *s, nvmlReturn_t code);
void dh_gpu_forget(struct dh_gpu_slot *s);
void dh_gpu_publish(struct dh_gpu_slot *s);

/* gpu_wake.c: pure */
bool dh_gpu_wakes(const struct dh_gpu_wake *wake, struct dh_gpu_base *base, const struct dh_gpu *before,
                  const struct dh_gpu *now, uint64_t now_ns);

/* gpu_batch.c, gpu_sensors.c, gpu_links.c, gpu_mig.c, gpu_aer.c: what a pass reads */
void dh_gpu_batch(struct dh_gpu_slot *s);
void dh_gpu_sensors(struct dh_gpu_slot *s);
bool dh_gpu_answers(struct dh_gpu_slot *s, nvmlDevice_t dev);
void dh_gpu_links(struct dh_gpu_slot *s);
void dh_gpu_link_sums(struct dh_gpu_slot *s, enum dh_gpu_field field, uint32_t n,
                      const struct dh_question *questions, const nvmlFieldValue_t *answers);
uint64_t dh_gpu_links_asked(struct dh_gpu_slot *s, enum dh_gpu_field field);
void dh_gpu_migs(struct dh_gpu_slot *s);
void dh_gpu_aer(struct dh_gpu_slot *s);

/*
 * A call may begin: nobody closed the library since its caller entered. Both accesses are sequentially
 * consistent and stand in this order, as their counterparts in dh_gate_park() do in the other: either the
 * caller sees that the library is being closed, or who closes it sees the call.
 */
static inline bool dh_call_begin(struct dh_gpu_watch *w, struct dh_caller *c, enum dh_nvml_call call,
                                 uint64_t now_ns)
{
    atomic_store(&c->now, dh_call_word(call, now_ns));
    if (atomic_load(&w->epoch) != c->epoch) {
        atomic_store(&c->now, 0);
        return false;
    }
    c->calls++;
    return true;
}

/* Passes @code on. Whoever was told that the call is overdue is told that it is over. */
static inline nvmlReturn_t dh_call_end(struct dh_gpu_watch *w, struct dh_caller *c, nvmlReturn_t code)
{
    uint64_t word = atomic_load_explicit(&c->now, memory_order_relaxed);

    atomic_store(&c->now, 0);
    if (atomic_load(&c->told) == word)
        dh_gpus_ring(w);
    return code;
}

/* Every call of NVML goes through here. What an older library lacks answers that it is not found. */
#define DH_NVML_AT(w, c, call, now_ns, function, ...)                                                   \
    (!(w)->nvml.function                      ? NVML_ERROR_FUNCTION_NOT_FOUND                           \
     : !dh_call_begin((w), (c), call, now_ns) ? NVML_ERROR_UNINITIALIZED                                \
                                              : dh_call_end((w), (c), (w)->nvml.function(__VA_ARGS__)))

#define DH_NVML(w, c, call, function, ...) DH_NVML_AT(w, c, call, dh_now_ns(), function, __VA_ARGS__)

/* The same for the opener. */
#define OPENER_NVML(w, call, function, ...) DH_NVML(w, &(w)->opener, call, function, __VA_ARGS__)

/*
 * The same for a GPU's thread. A GPU that is dead is not asked again in the same pass. Nothing that could last
 * happens between two calls of a pass, so one look at the clock ends the one and begins the other. As of the
 * last tick will do: deadlines are tens of milliseconds at least, and whoever watches them adds one tick.
 */
#define DH_GPU_NVML(s, call, function, ...)                                                             \
    ((s)->dead ? (s)->status                                                                            \
               : dh_gpu_note((s), dh_gpu_called((s), DH_NVML_AT((s)->w, &(s)->caller, call,              \
                                                                (s)->called_ns, function, __VA_ARGS__))))

static inline nvmlReturn_t dh_gpu_called(struct dh_gpu_slot *s, nvmlReturn_t code)
{
    s->called_ns = dh_tick_ns();
    return code;
}

#endif
