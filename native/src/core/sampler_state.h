/*
 * sampler_state.h - state of the sampler. Not seen by Python.
 *
 * The sampler's thread owns everything here except `pub`, `live` and the descriptors that stop it and wake
 * the reader. Sources write their records into `work` through dh_store() and dh_store_validity(), which also
 * decide whether to wake the reader; dh_sampler_publish() then copies the records that changed.
 */
#ifndef DH_SAMPLER_STATE_H
#define DH_SAMPLER_STATE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "core/clock.h"
#include "drahealth.h"
#include "core/kernfile.h"
#include "core/seqlock.h"
#include "core/worker.h"

#define DH_ROOT_MAX 200
#define DH_FIELD_BIT(field) (1ull << (field))
_Static_assert(DH_FIELD_NUM <= 64, "a field is a bit");

/* Tables are copied as 64-bit words, and readers align to 8; an ABI with a smaller alignment fails here. */
_Static_assert(_Alignof(struct dh_snapshot) == 8 && _Alignof(struct dh_node) == 8 &&
               _Alignof(struct dh_pool) == 8 && _Alignof(struct dh_group) == 8 &&
               _Alignof(struct dh_throttle) == 8,
               "records are aligned to 8");

/* A file that is kept open and read with pread(2). */
struct dh_cached_file {
    int fd;       /* -1: not open */
    int err;      /* errno of the last read, 0 after success */
    bool seen;    /* it exists or existed; a file that was never seen is probed from time to time */
    bool assumed; /* `seen` is only assumed: every read so far failed for lack of descriptors or memory */
    uint32_t len; /* bytes in `last` */
    uint32_t cap;
    char *last;   /* text of the last successful read: equal bytes need no parsing */
    char path[128];
};

enum dh_read_result { DH_READ_SAME, DH_READ_NEW, DH_READ_FAILED };

/* The throttle counters of one CPU. */
struct dh_cpu_throttle {
    uint64_t last[2]; /* core, package: value of the last read */
    uint64_t grown[2];
    int err[2];    /* why the file cannot be read; 0 if it can, or while the CPU is offline */
    bool known[2]; /* `last` was read since the CPU came online; false after it was offline */
    bool has[2];   /* the file exists or existed */
};

struct dh_tables {
    struct dh_snapshot head;
    struct dh_node node[DH_NODE_MAX];
    struct dh_throttle throttle[DH_CORE_MAX]; /* by CPU; `throttles` entries are used */
    struct dh_pool pool[DH_POOL_MAX];
    struct dh_group group[]; /* group_max entries */
};

struct dh_cgroups;

struct dh_sampler {
    /* set by dh_sampler_open(), constant since then */
    struct dh_options opt;
    struct dh_wake wakes[DH_FIELD_NUM];
    uint64_t rising; /* bit per field with DH_WAKE_RISE */
    char sysfs[DH_ROOT_MAX + 1];
    char cgroupfs[DH_ROOT_MAX + 1];
    char kubelet_root[DH_ROOT_MAX + 1];
    size_t table_bytes;
    int wake_fd;
    int rescan_fd;

    /* used by the sampler's thread only */
    struct dh_tables *work; /* the records as last read */
    struct dh_tables *base; /* same layout: bases of the DH_WAKE_RISE counters */
    uint64_t base_ns[DH_FIELD_NUM];
    int sysfs_fd; /* O_PATH; -1 while it cannot be opened */
    int timer_fd, epoll_fd;
    int inotify_fd; /* -1 while inotify is not available */
    int oom_fd;     /* an epoll of the pods' eventfds; -1 until there is one */
    uint32_t oom_fds; /* number of eventfds in oom_fd */
    uint64_t now_ns;      /* start of this pass */
    uint64_t resync_ns;   /* when everything was last read */
    uint64_t throttle_ns; /* when the throttle counters were last read */
    uint64_t pool_use_ns;      /* time since free and reserved pages were last read */
    uint64_t sysfs_ns;    /* when the sysfs root was last opened */
    uint64_t absent_ns;   /* when absent files were last probed */
    uint64_t rescan_ns;     /* when a rescan was last begun */
    bool first;           /* this is the first pass */
    bool resync;          /* this pass reads everything */
    bool probe_absent;          /* this pass probes absent files, as each resync and each rescan does */
    bool rescan_requested;           /* the next pass is a rescan: it probes absent files, and lists nodes and
                                        pools again */
    bool nodes_failed, pools_failed; /* a listing failed, or a file that only the listing reads */
    bool pools_changed;   /* the cgroup source has not looked at the pools since a record of one changed */
    bool pools_of_nodes;  /* nodes have pools; the machine's pools are their sums */
    bool wake;            /* a change that wakes the reader was stored */
    bool notify_due;            /* a change that wakes the reader was published */
    uint32_t full;        /* bit per source: a table has no room for all that it found */
    bool head_dirty, dirty;
    uint64_t node_dirty; /* bit per node record */
    uint64_t pool_dirty[(DH_POOL_MAX + 63) / 64];
    bool throttle_dirty;
    uint32_t *group_dirty; /* slots, each at most once */
    uint32_t group_dirty_num;
    uint64_t last_stamp; /* highest stamp given to a group */
    uint8_t *group_is_dirty;
    uint64_t reads, opens;
    uint64_t source_start_ns; /* when the source that is being read began */

    struct dh_cached_file online, present, isolated;
    struct dh_cached_file pool_file[DH_POOL_MAX][5];
    struct dh_cpu_throttle *throttle; /* throttle_cpus entries */
    uint32_t throttle_cpus;
    struct dh_cgroups *cgroups;

    /* shared with readers */
    struct dh_tables *pub;
    struct dh_seqlock pub_lock;
    struct {
        _Atomic uint64_t heartbeat_ns, passes, reads, opens, notified_ns;
        _Atomic uint64_t source_heartbeat_ns[DH_SOURCE_NUM], source_passes[DH_SOURCE_NUM];
    } live;
    struct dh_durations durations[DH_SOURCE_NUM]; /* written by the thread only; see durations.h */

    struct dh_worker worker;
};

#endif
