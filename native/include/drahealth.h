/*
 * drahealth.h - the native core, as the compiler and cffi both read it.
 *
 * Everything between the two "cffi" marks is plain C that cffi's parser understands: integer
 * macros, enums, structs of fixed-width members without pointers, and functions.
 *
 * Conventions
 *   Return codes  0 or a count on success, -errno on failure, own codes from -4096 down.
 *   Records       no pointers, members of fixed width, `size` and `version` where a record
 *                 crosses the boundary as an argument. A bit in `valid` says that a member was
 *                 read; a member whose bit is clear is 0 and means nothing.
 *   Time          CLOCK_MONOTONIC in nanoseconds.
 *   Ownership     the caller owns every buffer it passes; strings are borrowed for the call.
 */
#ifndef DRAHEALTH_H
#define DRAHEALTH_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

#define DH_VERSION 1

#define DH_CPU_WORDS 128  /* 8,192 CPUs: the largest CONFIG_NR_CPUS that distributions build */
#define DH_NODE_MAX 64    /* NUMA nodes; more make the source fail with DH_EFULL */
#define DH_HP_MAX 6       /* hugepage sizes; no architecture registers more */
#define DH_POOL_MAX 390   /* DH_HP_MAX sizes x (DH_NODE_MAX nodes + the machine) */
#define DH_UID_LEN 40     /* a pod's uid: 36 characters, or a static pod's 32-digit hash */
#define DH_NAME_LEN 80    /* a container's id: 64 hex digits */
#define DH_MACHINE (-1)   /* dh_pool.node of the machine-wide pool */

/* Own return codes. */
#define DH_EABI (-4096)   /* a record's size or version is not the one this core was built with */
#define DH_EPARSE (-4097) /* a file was read, and its text makes no sense */
#define DH_ETORN (-4098)  /* the writer was never quiet long enough for a whole copy */
#define DH_EFULL (-4099)  /* there is more of it than a table of fixed size has room for */

/* What is read. The number is the bit in `valid` and the name in dh_field_name(). */
enum dh_field {
    DH_CPU_PRESENT,
    DH_CPU_ONLINE,
    DH_CPU_OFFLINE,
    DH_CPU_ISOLATED,
    DH_NODE_CPUS,
    DH_NODE_THROTTLE_CORE,
    DH_NODE_THROTTLE_PACKAGE,
    DH_POOL_NR,
    DH_POOL_FREE,
    DH_POOL_RESERVED,
    DH_POOL_SURPLUS,
    DH_POOL_OVERCOMMIT,
    DH_GROUP_SET, /* which groups exist; no member of a record */
    DH_GROUP_POPULATED,
    DH_GROUP_FROZEN,
    DH_GROUP_MEM_LOW,
    DH_GROUP_MEM_HIGH,
    DH_GROUP_MEM_MAX,
    DH_GROUP_MEM_OOM,
    DH_GROUP_MEM_OOM_KILL,
    DH_GROUP_MEM_FAILCNT,
    DH_GROUP_CPU_PERIODS,
    DH_GROUP_CPU_THROTTLED,
    DH_GROUP_CPU_THROTTLED_US,
    DH_GROUP_HT_CURRENT,
    DH_GROUP_HT_MAX,
    DH_GROUP_HT_RSVD_CURRENT,
    DH_GROUP_HT_RSVD_MAX,
    DH_GROUP_HT_EVENTS,
    DH_SYSFS,    /* the roots, for dh_source.err_field; no members of a record */
    DH_CGROUPFS,
    DH_FIELD_NUM
};

/* When a change of a field wakes the reader. Fields without a dh_wake never do. */
enum dh_wake_mode {
    DH_WAKE_CHANGE = 1, /* any change of value or validity */
    DH_WAKE_RISE = 2    /* grew by `threshold` since the window began, or validity changed */
};

struct dh_wake {
    uint32_t field;     /* enum dh_field */
    uint32_t mode;      /* enum dh_wake_mode */
    uint64_t threshold; /* DH_WAKE_RISE: in the field's own unit, at least 1 */
    uint64_t window_ns; /* DH_WAKE_RISE: the base is taken anew this often */
};

struct dh_options {
    uint32_t size;       /* sizeof(struct dh_options) */
    uint32_t version;    /* DH_VERSION */
    uint64_t period_ns;  /* of a pass: 10 ms to 1 h */
    uint64_t sweep_ns;   /* every group's silent counters are read once in this time */
    uint64_t resync_ns;  /* everything, the notified files too, is read once in this time */
    uint32_t group_max;  /* capacity of the group table, 1 to 65,536 */
    uint32_t reserved;   /* 0 */
};

/* The sources of the sampler. GPUs will bring sources and threads of their own. */
enum dh_source_id { DH_SOURCE_CPUS, DH_SOURCE_THROTTLE, DH_SOURCE_HUGEPAGES, DH_SOURCE_CGROUPS, DH_SOURCE_NUM };

enum dh_source_state {
    DH_STATE_ABSENT = 0,  /* the machine does not have what it reads */
    DH_STATE_OK = 1,
    DH_STATE_FAILING = 2, /* something that is there cannot be read: err and err_field say what */
    DH_STATE_STARTING = 3 /* its first pass is not published yet */
};

struct dh_source {
    uint32_t state;     /* enum dh_source_state */
    uint32_t err_field; /* enum dh_field of the last failure */
    int32_t err;        /* errno of the last failure, or an own (negative) code; 0 = none yet. With a root
                           that does not exist ENOENT, though the source does not fail but is absent */
    uint32_t reserved;
    uint64_t passes;    /* over this source, since start */
    uint64_t beat_ns;   /* end of the last of them; before the first, when the thread was started. What
                           it read is in this copy, unless that was in the sampler's first pass */
    uint64_t period_ns; /* how often it is read */
    uint64_t failures;  /* failed reads since start */
};

struct dh_node {
    uint64_t valid;
    uint64_t seen; /* bits of what is there, or was: "absent" and "unreadable" differ by this */
    uint32_t node;
    int32_t err;   /* why a member that is there could not be read last */
    uint64_t throttle_core;      /* events since start, summed over the node's CPUs; never falls */
    uint64_t throttle_package;   /* events since start, the largest of the node's CPUs */
    uint64_t cpus[DH_CPU_WORDS]; /* bit set; a CPU that went offline stays with its node, and while
                                    DH_NODE_CPUS is not valid so does the last that was read */
};

struct dh_pool {
    uint64_t valid;
    uint64_t seen;
    uint64_t size_kib;
    int32_t node;     /* or DH_MACHINE */
    int32_t err;
    uint64_t nr;      /* pages, as all below */
    uint64_t free;
    uint64_t reserved;
    uint64_t surplus;
    uint64_t overcommit;
};

enum dh_group_kind { DH_GROUP_POD = 1, DH_GROUP_CONTAINER = 2 };

struct dh_hugetlb {
    uint64_t size_kib;
    uint64_t current; /* bytes, as the next three; no limit reads as 2^64-1 */
    uint64_t max;
    uint64_t rsvd_current;
    uint64_t rsvd_max;
    uint64_t events;  /* allocations that hit the limit, since the group was made */
    uint64_t valid;
    uint64_t seen;
};

struct dh_group {
    uint64_t valid;
    uint64_t seen;
    uint64_t born_ns;
    uint32_t id;         /* unique for the sampler's life */
    uint32_t kind;       /* enum dh_group_kind */
    uint32_t sizes;      /* used entries of hugetlb[] */
    int32_t err;
    char uid[DH_UID_LEN];   /* the pod's, dashes restored, NUL-padded */
    char name[DH_NAME_LEN]; /* the container's id, NUL-padded; empty for a pod */
    uint64_t populated;
    uint64_t frozen;
    uint64_t mem_low;
    uint64_t mem_high;
    uint64_t mem_max;
    uint64_t mem_oom;
    uint64_t mem_oom_kill;
    uint64_t mem_failcnt;
    uint64_t cpu_periods;
    uint64_t cpu_throttled;
    uint64_t cpu_throttled_us;
    struct dh_hugetlb hugetlb[DH_HP_MAX];
};

/*
 * The head of what dh_sampler_read() copies out. Behind it, without gaps, follow `nodes` records
 * of struct dh_node, `pools` of struct dh_pool and `groups` of struct dh_group.
 */
struct dh_snapshot {
    uint32_t size;    /* sizeof(struct dh_snapshot) */
    uint32_t version; /* DH_VERSION */
    uint32_t nodes;
    uint32_t pools;
    uint32_t groups;  /* used length of the group table; a record with id 0 is a gap */
    uint32_t dropped; /* groups that have no room now; of a pod without room the containers are not known */
    uint64_t seq;     /* publications that woke the reader, this one included; 0 before the first pass */
    uint64_t beat_ns; /* end of the last pass; 0 before the first */
    uint64_t passes;
    uint64_t reads;   /* read(2) and pread(2) calls since start */
    uint64_t opens;   /* openat(2) calls since start */
    uint64_t descriptors;
    uint64_t watches;
    uint64_t kernel_bytes; /* estimate: kernel memory behind descriptors and watches */
    uint64_t unwatched;    /* notified files that no watch could be had for; they are swept */
    uint64_t overflows;    /* inotify queue overflows, each answered by reading everything */
    uint64_t cpu_valid;    /* valid bits of the four sets below */
    uint64_t cpu_seen;
    int32_t cpu_err;
    uint32_t reserved;
    uint64_t cpu_present[DH_CPU_WORDS];
    uint64_t cpu_online[DH_CPU_WORDS];
    uint64_t cpu_offline[DH_CPU_WORDS];
    uint64_t cpu_isolated[DH_CPU_WORDS];
    struct dh_source source[DH_SOURCE_NUM];
};

struct dh_sampler;

/*
 * dh_sampler_open() - make a sampler; nothing is read yet.
 * @o:       checked: size, version, ranges
 * @sysfs, @cgroupfs, @kubelet_root: roots, at most 200 bytes each. @kubelet_root is the
 *           kubelet's --cgroup-root, relative to @cgroupfs.
 * @wakes:   @nwakes entries, copied
 * @out:     the sampler; the caller's, until dh_sampler_stop()
 *
 * Return:  0; DH_EABI; -EINVAL, -ENAMETOOLONG, -ENOMEM, -EMFILE. To have no inotify is no failure: all
 *          files are swept then, and it is asked for again at each resync.
 * Threads: any. Blocks: no; the roots are first touched by the sampler's own thread.
 */
int dh_sampler_open(const struct dh_options *o, const char *sysfs, const char *cgroupfs,
                    const char *kubelet_root, const struct dh_wake *wakes, uint32_t nwakes,
                    struct dh_sampler **out);

/*
 * dh_sampler_start() - start the thread; the first pass begins at once.
 *
 * From here on dh_sampler_read() has something to copy: before the first pass has ended, a head
 * with passes 0 and every source in DH_STATE_STARTING, so that a pass that hangs can be told.
 *
 * Return:  0; -EBUSY if started before; -EAGAIN as pthread_create(3).
 * Threads: the owner's. Blocks: no.
 */
int dh_sampler_start(struct dh_sampler *s);

/*
 * dh_sampler_eventfd() - the descriptor that becomes readable after a visible change.
 *
 * The end of the first pass counts as a change. The sampler owns it; the reader clears it with
 * read(2) of 8 bytes before it calls dh_sampler_read().
 */
int dh_sampler_eventfd(const struct dh_sampler *s);

/*
 * dh_sampler_pass() - one pass on the caller's thread, instead of dh_sampler_start().
 *
 * For tests and benchmarks. Return: 0; -EBUSY if the thread runs. Blocks: as the files do.
 */
int dh_sampler_pass(struct dh_sampler *s);

/*
 * dh_sampler_floor() - the bare system calls of a quiet pass: the same reads, nothing else.
 *
 * For benchmarks, after at least one dh_sampler_pass(). With @sweep, the opens, reads and closes
 * of one whole sweep over the groups as well.
 *
 * Return: the number of reads; -EBUSY if the thread runs.
 */
int64_t dh_sampler_floor(struct dh_sampler *s, int sweep);

/*
 * dh_sampler_sweep() - read every group's silent counters now, on the caller's thread.
 *
 * For benchmarks, after at least one dh_sampler_pass(). Return: groups read; -EBUSY as above.
 */
int64_t dh_sampler_sweep(struct dh_sampler *s);

/*
 * dh_sampler_size() - bytes that dh_sampler_read() can need at most, for any number of groups.
 */
size_t dh_sampler_size(const struct dh_sampler *s);

/*
 * dh_sampler_read() - copy the newest whole publication.
 * @buf: @cap bytes, aligned to 8
 *
 * Return:  bytes used, a multiple of 8; -ENODATA before dh_sampler_start(), or the first
 *          dh_sampler_pass(); -ENOSPC if @cap is too small for what is there now; DH_ETORN.
 * Threads: any number of readers. Blocks: some 10 ms at most, and only while the writer is preempted
 *          in the middle of a copy.
 */
int64_t dh_sampler_read(struct dh_sampler *s, void *buf, size_t cap);

/*
 * dh_sampler_stop() - end the thread and free the sampler.
 * @timeout_ns: how long to wait for a thread that is inside a read
 *
 * Return:  0, and @s is gone; -ETIMEDOUT: the thread hangs in the kernel. It is left behind with
 *          everything it uses, touches nothing of the caller's, and ends if its read returns.
 * Threads: the owner's. Blocks: at most @timeout_ns.
 */
int dh_sampler_stop(struct dh_sampler *s, uint64_t timeout_ns);

/* dh_field_name() - the file or key behind a field, "nr_hugepages"; NULL if there is none such. */
const char *dh_field_name(uint32_t field);

/*
 * One device in a health list. The texts stand in a buffer beside the records; offsets and
 * lengths are in bytes.
 */
struct dh_health {
    uint32_t pool_off;
    uint32_t pool_len;
    uint32_t device_off;
    uint32_t device_len;
    uint32_t message_off;
    uint32_t message_len;
    int32_t health;          /* HealthStatus: 0 unknown, 1 healthy, 2 unhealthy */
    uint32_t reserved;
    int64_t last_updated_s;  /* seconds since 1970 */
    int64_t timeout_s;       /* seconds */
};

/*
 * dh_health_encode() - devices as one NodeWatchResourcesResponse (KEP-4680, v1 and v1alpha1).
 * @list:  @n records; @text holds their strings, valid UTF-8
 * @out:   @cap bytes
 * @taken: how many devices fitted; the caller goes on from there with the next message
 *
 * Return:  bytes written; -EINVAL if a record points outside @text; -ENOSPC if not even the
 *          first device fits.
 * Threads: any; pure. Blocks: no.
 */
int64_t dh_health_encode(const struct dh_health *list, uint32_t n, const uint8_t *text,
                         size_t text_len, uint8_t *out, size_t cap, uint32_t *taken);

/* cffi: end */

#endif
