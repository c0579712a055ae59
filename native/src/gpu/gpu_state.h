/*
 * gpu_state.h - the state that the threads of the GPU watch share. Not seen by Python.
 *
 *   opener    loads and initializes the library, counts GPUs, starts their threads     gpu_open.c
 *   GPU       one thread each: handle, identity, passes over the fields, registration  gpu_thread.c
 *   common    runs the passes over all GPUs while they are short                       gpu_schedule.c
 *   waiter    waits for events and latches them                                        gpu_events.c
 *   deadline  finds calls that take too long, and wakes the reader                     gpu_deadline.c
 *
 * Any call of NVML can hang. So no thread holds a lock during a call or waits for a thread that is in a call,
 * and each record has one writer. `lock` guards only the members listed below it, for a few instructions at a
 * time.
 *
 * The whole state is one mapping, which may be shared: then the threads run in a process of their own, and
 * dh_gpus_read() in another process copies the same records from a read-only mapping.
 */
#ifndef DH_GPU_STATE_H
#define DH_GPU_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core/clock.h"
#include "drahealth.h"
#include "gpu/nvml_load.h"
#include "core/seqlock.h"

#define DH_SYSFS_MAX 200
#define DH_LIBRARY_MAX 4000
#define DH_GPU_WAKES_MAX 256
#define DH_LATENCY_SAMPLES 15
#define DH_QUERY_MAX (DH_GPU_FIELD_NUM + 8 * DH_LINK_MAX) /* queries of one call: 8 fields have one per link */

/*
 * Longest wait for NVML's events. A wait cannot be interrupted: a reload takes up to this long, and so does a stop,
 * unless the process ends with it.
 */
#define DH_EVENT_WAIT_NS (DH_NS / 2)
#define DH_EVENT_WAIT_OWN_PROCESS_NS (2 * DH_NS)

#define DH_NEVER UINT64_MAX
#define DH_UUID_LEN sizeof(((struct dh_gpu *)0)->uuid)

/* The part of struct dh_gpu that the GPU's thread writes; the waiter writes the rest. */
#define DH_GPU_THREAD_BYTES offsetof(struct dh_gpu, event_count)
#define DH_GPU_WAITER_BYTES (sizeof(struct dh_gpu) - DH_GPU_THREAD_BYTES)

_Static_assert(DH_GPU_THREAD_BYTES % 8 == 0 && DH_GPU_WAITER_BYTES % 8 == 0 &&
                   sizeof(struct dh_gpus) % 8 == 0 && _Alignof(struct dh_gpu) == 8 &&
                   _Alignof(struct dh_gpus) == 8,
               "records are copied by words");

/* A thread that calls NVML. */
struct dh_caller {
    _Atomic uint64_t current_call;  /* call under way, from dh_call_pack(); 0 = none */
    _Atomic uint64_t reported_call; /* `current_call` of the last call that was reported as overdue */
    _Atomic uint64_t overdue;       /* number of overdue calls */
    uint64_t epoch;                 /* epoch of the library when the thread entered the session; its own */
    uint64_t calls;                 /* used by the thread itself only */
    bool in_session;                /* under the lock */
    bool is_measured;               /* the costs of calls are measured now; used by the thread itself only */
    uint64_t began_ns, began_cpu_ns; /* of the measured call under way */
    struct dh_call_cost cost[DH_CALL_NUM]; /* read by any thread */
};

/* CPU time and context switches of a thread since its start. */
struct dh_thread_usage {
    uint64_t cpu_ns, switches;
};

/* The value of a DH_GPU_WAKE_RISE counter when its window began. */
struct dh_gpu_rise_base {
    uint64_t value, since_ns;
};

/* A query of nvmlDeviceGetFieldValues. */
struct dh_field_query {
    uint16_t field, scope;
};

/* The result of a query, in the layout of nvmlFieldValue_t. */
struct dh_field_result {
    nvmlValueType_t type;
    nvmlReturn_t code;
    nvmlValue_t value;
};

/* The consecutive queries of one field. */
struct dh_gpu_query_span {
    uint16_t field, queries;
};

struct dh_gpu_watch;

/*
 * What a pass without changes uses comes first: after a pause it must be fetched into the caches, eight times with eight
 * GPUs. Large arrays that only other passes use come last.
 */
struct dh_gpu_slot {
    struct dh_gpu_watch *w;
    uint32_t index;

    /* under the lock */
    bool pass_requested, mig_pass_requested; /* run a pass at once */
    bool error_pass_requested;   /* run a pass within the configured period, although the budget stretched it */
    bool is_running;             /* a thread runs a pass now */
    bool verify_requested; /* NVML counts fewer GPUs than have a handle: is this GPU still listed? */
    uint64_t next_ns, ended_ns;  /* when the next pass is due without a request; end of the last pass */
    uint64_t passed_set_id;      /* event set at the start of the last pass, which tried to register the GPU with it */

    /* used by the thread that runs the pass only: the GPU's own or the common one */
    nvmlDevice_t dev;              /* NULL without a handle */
    uint64_t dev_epoch;            /* epoch of the library that returned the handle */
    uint64_t ok_epoch;           /* epoch of the library when the GPU last answered; 0 after a failure */
    uint64_t now_ns;               /* start of this pass; like all times here, as of the last kernel tick */
    uint64_t call_end_ns;            /* end of the last call of this pass, or the start of the pass */
    uint64_t slow_ns, handle_ns, register_ns; /* when each was last done, 0 = never */
    nvmlReturn_t status;           /* outcome of this pass */
    bool slow, unreachable;               /* this pass reads the slow fields; further calls of this pass would
                                             fail as well */
    bool fast_ok;                    /* this is a fast pass, and no read of it failed */
    bool plan_reusable;                  /* the last pass with reads was fast_ok, so this pass repeats its
                                            queries */
    bool unchanged;                     /* the record holds nothing new in this pass; every change of the
                                           record clears it */
    bool lost_field;               /* a field that was valid became unsupported in this pass */
    bool has_ecc_mode;             /* the ECC mode was read */
    bool mig_due;
    bool verify_due; /* this pass gets a handle again although it has one */
    bool follows_slow;               /* this is the first pass after a slow one */
    uint64_t awaited;              /* events whose fields this pass leaves out, unless it is slow */
    uint64_t due[DH_GPU_WORDS];    /* fields that this pass reads */
    uint64_t via_function[DH_GPU_WORDS]; /* link fields that nvmlDeviceGetFieldValues does not support */
    uint64_t links;                /* bit set of links that answer */
    uint64_t set_id, tried_set_id;     /* event set that the GPU is registered with, and that it last tried to
                                          register with */
    uint64_t set_handle, tried_handle; /* work.handles at the registration, and at the attempt */
    uint64_t results_digest;       /* of the last results of all queries: equal ones need no decoding */
    uint32_t latency_count;
    int query_count;                                  /* queries in this pass */
    uint32_t sensors;
    uint8_t sensor[DH_GPU_FIELD_NUM]; /* rows of sensors_table in this pass */
    uint64_t fast_cpu_ns, slow_cpu_ns; /* CPU time of a fast and of a slow pass, averaged */

    /* shared between threads */
    uint64_t cpu_ns, switches;       /* of all passes; read by any thread */
    _Atomic uint64_t event_mask;     /* registered events */
    _Atomic uint64_t event_ns;       /* last event that was, or may have been, of this GPU; 0 = none */
    struct dh_seqlock gpu_seq, event_seq;
    struct dh_durations durations;
    struct dh_caller caller;
    struct dh_gpu pub;

    /* as above `cpu_ns` */
    struct dh_gpu work;            /* the record as last read; members from `event_count` on belong to the
                                      waiter */
    struct dh_field_query query[DH_QUERY_MAX];
    uint64_t latency[DH_LATENCY_SAMPLES], sorted_latency[DH_LATENCY_SAMPLES]; /* ring buffer, and the same
                                                                                 values sorted */
    uint64_t mig_mode, ecc_mode;   /* as last read */
    uint64_t links_ns;             /* when all links were last queried, each with a definite answer; 0 =
                                      never */
    uint64_t may_lack[DH_GPU_WORDS]; /* fields not valid in a slow pass since a mode or the driver changed: the
                                        GPU may lack them now although it had them */
    uint64_t unsupported_ns[DH_GPU_FIELD_NUM]; /* since when a field is skipped because it is unsupported */
    uint32_t spans;
    struct dh_gpu_query_span span[DH_GPU_FIELD_NUM];
    struct dh_field_result last_result[DH_QUERY_MAX]; /* last result of each query */
    struct dh_gpu_rise_base base[DH_GPU_WAKES_MAX];

    /* shared between threads */
    _Atomic(nvmlDevice_t) event_dev[2]; /* handle registered last, and the handle before: an event may name
                                           either */
    bool event_dirty;              /* used by the waiter only */
    char claimed_uuid[48]; /* UUID of the GPU that this record belongs to; empty: unknown. Under the lock */
};

enum dh_session_phase { DH_PHASE_CLOSED, DH_PHASE_CHANGING, DH_PHASE_OPEN };

/* The waiter's part of struct dh_gpus. */
struct dh_waiter_state {
    uint32_t state;
    int32_t err;
    uint64_t passes, heartbeat_ns, failures;
};

struct dh_gpu_watch {
    /* constant */
    struct dh_gpus_options opt;
    char library[DH_LIBRARY_MAX + 1];
    char sysfs[DH_SYSFS_MAX + 1];
    struct dh_gpu_wake wakes[DH_GPU_WAKES_MAX];
    uint32_t nwakes;
    int wake_fd;
    uint64_t event_wait_ns;  /* DH_EVENT_WAIT_NS; longer in a process of its own */
    uint64_t tick_ns;        /* length of a tick of the coarse clock that GPU threads read */

    /* used by the opener only */
    struct dh_nvml nvml;     /* read by threads in the session, written while there are none */
    struct dh_caller opener;
    struct dh_gpus head;
    uint32_t inits;          /* calls of nvmlInit without a matching nvmlShutdown */
    uint32_t scanned;        /* GPUs counted when the UUIDs of all were last known */
    bool reinit_pending;     /* initialized again while a thread hung in a call; to be repeated when
                                that thread returns */
    bool check_failed;       /* the last check of the library failed */
    bool version_changed;    /* the driver has another version than at the last initialization */
    bool module_unread;      /* the kernel module could not be read yet */
    uint64_t reopen_ns;      /* last attempt to open the library */

    /* used by the waiter only */
    struct dh_caller waiter;
    struct dh_waiter_state wait;
    uint64_t notified_ns;
    bool event_dirty;

    /* shared with readers */
    struct dh_seqlock head_seq, wait_seq;
    struct dh_gpus head_pub;
    struct dh_waiter_state wait_pub;
    _Atomic uint32_t gpus;
    _Atomic uint64_t wakes_done;
    _Atomic uint64_t epoch;      /* epoch of the library: odd while it is open */
    _Atomic uint32_t driver_major;
    _Atomic int32_t register_err;
    _Atomic uint64_t set_id;     /* number of the event set: odd while there is a set. Written under the lock */
    _Atomic uint64_t waited_ns;  /* end of the last wait for events that did not fail */

    pthread_mutex_t lock;
    pthread_cond_t changed;  /* with CLOCK_MONOTONIC */
    /* under the lock */
    enum dh_session_phase phase;
    int32_t closed_err;      /* why the library is closed: nvmlReturn_t */
    bool absent;             /* the library does not exist */
    bool started, stopping, abandoned, reinit_requested, check_requested, opener_active;
    bool scan_requested;     /* there may be a GPU without a record although the count did not change */
    uint32_t threads;
    bool is_common;          /* the common thread runs the passes over all GPUs */
    bool is_common_busy;     /* it is in a pass, which may hang */
    uint64_t common_ns;      /* when the pass in the common thread began or its next is due; DH_NEVER: none */
    uint32_t short_passes;   /* short passes in a row, over any GPU */
    nvmlEventSet_t set;      /* set to register with; NULL without a set */
    uint32_t set_users;      /* threads that are registering with the set */
    uint32_t registered;     /* successful registrations of GPUs */
    uint32_t eventless;      /* GPUs that turned out to have no events */

    void (*release)(struct dh_gpu_watch *w); /* frees the watch; the last thread of an abandoned watch calls
                                                it */

    struct dh_gpu_slot slots[DH_GPU_MAX]; /* the first `gpus` are in use; memory of the others is not touched */
};

/* Return the slot of a GPU. A reader in another process finds it by its offset: it must follow no pointer. */
static inline struct dh_gpu_slot *dh_gpu_slot_at(struct dh_gpu_watch *w, uint32_t index)
{
    return &w->slots[index];
}

#endif
