/*
 * sampler.h - what the sources of the sampler share. Not seen by Python.
 *
 * One thread owns everything here but `pub`, `live` and the descriptors it is told to stop
 * and to wake by. Sources write their records into `work` through dh_set() and dh_valid(), which
 * also decide whether the reader must be woken; dh_publish() then copies what became dirty.
 */
#ifndef DH_SAMPLER_H
#define DH_SAMPLER_H

#include <stdatomic.h>
#include <stdbool.h>

#include "clock.h"
#include "drahealth.h"
#include "kernfile.h"
#include "seqlock.h"
#include "worker.h"

#define DH_ROOT_MAX 200
#define DH_FIELD_BIT(field) (1ull << (field))
_Static_assert(DH_FIELD_NUM <= 64, "a field is a bit");

/* Tables are copied by words, and readers are told to align to 8; an ABI that aligns less fails here. */
_Static_assert(_Alignof(struct dh_snapshot) == 8 && _Alignof(struct dh_node) == 8 &&
                   _Alignof(struct dh_pool) == 8 && _Alignof(struct dh_group) == 8 &&
                   _Alignof(struct dh_throttle) == 8,
               "records are aligned to 8");

/* A file kept open, and read with pread(2). */
struct dh_held {
    int fd;       /* -1: to be opened */
    int err;      /* why the last read failed, 0 if it did not */
    bool seen;    /* it is there, or was; one that never was is looked for now and then */
    uint32_t len; /* of `last` */
    uint32_t cap;
    char *last;   /* bytes of the last successful read: equal bytes need no parsing */
    char path[128];
};

enum dh_read { DH_READ_SAME, DH_READ_NEW, DH_READ_FAILED };

/* Per CPU: what its throttle counters said last. */
struct dh_cpu_throttle {
    uint64_t last[2]; /* core, package: as read */
    uint64_t grown[2];
    int err[2];    /* why the file cannot be read, 0 if it can, or while the CPU is offline */
    bool known[2]; /* `last` is of this stay online; false after the CPU was away */
    bool has[2];   /* the file is there, or was */
};

struct dh_tables {
    struct dh_snapshot head;
    struct dh_node node[DH_NODE_MAX];
    struct dh_throttle throttle[DH_CORE_MAX]; /* by CPU; `throttles` of them */
    struct dh_pool pool[DH_POOL_MAX];
    struct dh_group group[]; /* group_max */
};

struct dh_cgroups;

struct dh_sampler {
    /* set by dh_sampler_open(), constant since */
    struct dh_options opt;
    struct dh_wake wakes[DH_FIELD_NUM];
    uint64_t rising; /* bit per field with DH_WAKE_RISE */
    char sysfs[DH_ROOT_MAX + 1];
    char cgroupfs[DH_ROOT_MAX + 1];
    char kubelet_root[DH_ROOT_MAX + 1];
    size_t table_bytes;
    int wake_fd;
    int poke_fd;

    /* the sampler thread's own */
    struct dh_tables *work; /* the records as last read */
    struct dh_tables *base; /* same layout: where each DH_WAKE_RISE counter stood */
    uint64_t base_ns[DH_FIELD_NUM];
    int sysfs_fd; /* O_PATH; -1 while it cannot be opened */
    int timer_fd, epoll_fd;
    int inotify_fd; /* -1 while there is none to be had */
    int oom_fd;     /* an epoll of the pods' eventfds; -1 until the first */
    uint32_t oom_fds; /* in it */
    uint64_t now_ns;      /* of this pass */
    uint64_t resync_ns;   /* when everything was last read */
    uint64_t throttle_ns; /* when the throttle counters were last read */
    uint64_t use_ns;      /* periods since who has hugepages was last read */
    uint64_t sysfs_ns;    /* when the sysfs root was last asked for */
    uint64_t absent_ns;   /* when what was absent was last looked for */
    uint64_t poke_ns;     /* when a poke was last followed */
    bool first;           /* this is the first pass */
    bool resync;          /* this pass reads everything */
    bool absent;          /* this pass looks for what was absent; each resync does, and each poke */
    bool poked;           /* the next pass does, and lists nodes and pools anew */
    bool nodes_lost, pools_lost; /* a listing of them failed, or a file that only it reads */
    bool pools_of_nodes;  /* there are such; the machine's are their sums */
    bool wake;            /* a rule can see what changed */
    bool ring;            /* that is published, and the reader not woken yet */
    uint32_t full;        /* bit per source: it found more than there is room for */
    bool head_dirty, dirty;
    uint64_t node_dirty; /* bit per node record */
    uint64_t pool_dirty[(DH_POOL_MAX + 63) / 64];
    bool throttle_dirty;
    uint32_t *group_dirty; /* slots, each once */
    uint32_t group_dirty_num;
    uint64_t stamps; /* given to groups */
    uint8_t *group_is_dirty;
    uint64_t reads, opens;

    struct dh_held online, present, isolated;
    struct dh_held pool_file[DH_POOL_MAX][5];
    struct dh_cpu_throttle *throttle; /* per CPU up to throttle_cpus */
    uint32_t throttle_cpus;
    struct dh_cgroups *cgroups;

    /* shared with readers */
    struct dh_tables *pub;
    struct dh_seqlock pub_lock;
    struct {
        _Atomic uint64_t beat_ns, passes, reads, opens, rung_ns;
        _Atomic uint64_t source_beat_ns[DH_SOURCE_NUM], source_passes[DH_SOURCE_NUM];
    } live;

    struct dh_worker worker;
};

/* records.c: writing records, waking, publishing */
int dh_tables_map(struct dh_sampler *s);
void dh_tables_unmap(struct dh_sampler *s);
bool dh_set(struct dh_sampler *s, uint64_t *slot, enum dh_field field, uint64_t value);
bool dh_reading(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field, uint64_t *slot,
                int err, uint64_t value);
bool dh_valid(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field, bool ok);
void dh_wake_on(struct dh_sampler *s, enum dh_field field);
bool dh_field_rises(uint32_t field);
void dh_bases_renew(struct dh_sampler *s);
void dh_node_touch(struct dh_sampler *s, uint32_t index);
void dh_pool_touch(struct dh_sampler *s, uint32_t index);
void dh_group_touch(struct dh_sampler *s, uint32_t slot);
void dh_source_failed(struct dh_sampler *s, enum dh_source_id id, enum dh_field field, int err);
void dh_source_full(struct dh_sampler *s, enum dh_source_id id, enum dh_field field);
void dh_source_root(struct dh_sampler *s, enum dh_source_id id, enum dh_field root, int err);
void dh_source_state(struct dh_sampler *s, enum dh_source_id id, enum dh_source_state state);
void dh_publish(struct dh_sampler *s);
void dh_ring(struct dh_sampler *s);

/* files.c: reading files */
bool dh_due(const struct dh_sampler *s, uint64_t last_ns, uint64_t every_ns);
enum dh_read dh_held_read(struct dh_sampler *s, struct dh_held *f);
__attribute__((format(printf, 3, 4)))
int dh_held_init(struct dh_held *f, uint32_t cap, const char *format, ...);
void dh_held_close(struct dh_held *f);
bool dh_held_floor(const struct dh_held *f);
int64_t dh_read_at(struct dh_sampler *s, int dir_fd, const char *path, char *buf, size_t cap);
int dh_list_dir(struct dh_sampler *s, int dir_fd, const char *path,
                void (*each)(struct dh_sampler *s, void *arg, const char *name, size_t len), void *arg);

/* cpus.c, hugepages.c, throttle.c, cgroups.c: one source each */
void dh_cpus_pass(struct dh_sampler *s);
bool dh_throttle_pass(struct dh_sampler *s); /* false: not yet due */
void dh_hugepages_pass(struct dh_sampler *s);
int64_t dh_hugepages_floor(const struct dh_sampler *s);
int dh_cgroups_make(struct dh_sampler *s);
void dh_cgroups_pass(struct dh_sampler *s);
void dh_cgroups_events(struct dh_sampler *s);
void dh_cgroups_ooms(struct dh_sampler *s);
int64_t dh_cgroups_sweep(struct dh_sampler *s, bool floor);
void dh_cgroups_free(struct dh_sampler *s);

#endif
