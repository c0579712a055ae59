/*
 * drahealth.h - the C core's interface, as the compiler and cffi both read it.
 *
 * Everything between the two "cffi" marks is plain C that cffi's parser understands: integer macros, enums,
 * structs of fixed-width members without pointers, and functions.
 *
 * Conventions
 *   Return codes  0 or a count on success, -errno on failure, own codes from -4096 down.
 *   Records       no pointers, members of fixed width, `size` and `version` where a record
 *                 crosses the boundary as an argument. A bit in `valid` is set if the member was
 *                 read; a member whose bit is clear is 0 and has no meaning.
 *   Time          CLOCK_MONOTONIC in nanoseconds.
 *   Ownership     the caller owns every buffer it passes; strings are borrowed for the call.
 *   Reader        the Python thread that copies publications out; an eventfd wakes it.
 */
#ifndef DRAHEALTH_H
#define DRAHEALTH_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

#define DH_VERSION 1

#define DH_CPU_WORDS 128      /* 8,192 CPUs: the largest CONFIG_NR_CPUS that distributions build */
#define DH_NODE_MAX 64        /* NUMA nodes; with more the source fails with DH_EFULL */
#define DH_HP_MAX 6           /* hugepage sizes; no architecture registers more */
#define DH_POOL_MAX 390       /* DH_HP_MAX sizes x (DH_NODE_MAX nodes + the machine) */
#define DH_UID_LEN 40         /* a pod's uid: 36 characters, or a static pod's 32-digit hash */
#define DH_NAME_LEN 80        /* a container's id: 64 hex digits */
#define DH_GROUP_CPU_WORDS 32 /* 2,048 CPUs: on a machine with more, the CPUs of a group are not read */
#define DH_MACHINE (-1)       /* dh_pool.node of the machine-wide pool */

/* Own return codes. */
#define DH_EABI (-4096)   /* a record's size or version is not the one this core was built with */
#define DH_EPARSE (-4097) /* a file was read, but its text has another format */
#define DH_ETORN (-4098)  /* the writer never paused long enough for a whole copy */
#define DH_EFULL (-4099)  /* a table of fixed size has no room for all that was found */

/* Fields that are read. The number is the bit in `valid` and the argument of dh_field_name(). */
enum dh_field {
    DH_CPU_PRESENT,
    DH_CPU_ONLINE,
    DH_CPU_ISOLATED,
    DH_NODE_CPUS,
    DH_NODE_THROTTLE_CORE,
    DH_NODE_THROTTLE_PACKAGE,
    DH_POOL_NR,
    DH_POOL_FREE,
    DH_POOL_RESERVED,
    DH_POOL_SURPLUS,
    DH_POOL_OVERCOMMIT,
    DH_GROUP_SET, /* which groups exist; not a member of a record */
    DH_GROUP_POPULATED,
    DH_GROUP_FROZEN,
    DH_GROUP_MEM_HIGH,
    DH_GROUP_MEM_MAX,
    DH_GROUP_MEM_OOM,
    DH_GROUP_MEM_OOM_KILL,
    DH_GROUP_MEM_FAILCNT,
    DH_GROUP_CPU_PERIODS,
    DH_GROUP_CPU_THROTTLED,
    DH_GROUP_HT_MAX,
    DH_GROUP_HT_RSVD_MAX,
    DH_GROUP_HT_EVENTS,
    DH_GROUP_HT_RSVD_FAILED,
    DH_GROUP_MEM_LIMIT,
    DH_GROUP_CPUS,
    DH_SYSFS,    /* the roots, for dh_source.err_field; not members of a record */
    DH_CGROUPFS,
    DH_FIELD_NUM
};

/* When a change of a field wakes the reader. A field without a dh_wake never wakes it. */
enum dh_wake_mode {
    DH_WAKE_CHANGE = 1, /* any change of value or validity */
    DH_WAKE_RISE = 2    /* the value grew by `threshold` since the window began (one wake per window), or
                           validity changed */
};

struct dh_wake {
    uint32_t field;     /* enum dh_field */
    uint32_t mode;      /* enum dh_wake_mode */
    uint64_t threshold; /* DH_WAKE_RISE: in the field's unit, at least 1 */
    uint64_t window_ns; /* DH_WAKE_RISE: the comparison starts again from the current value this often */
};

struct dh_options {
    uint32_t size;       /* sizeof(struct dh_options) */
    uint32_t version;    /* DH_VERSION */
    uint64_t period_ns;  /* time between two passes: 10 ms to 1 h */
    uint64_t sweep_ns;   /* every group's counters without notification are read once in this time; a counter
                            that did not change for 6 to 12 times it is read once in 6 times it */
    uint64_t resync_ns;  /* everything, notified files included, is read once in this time */
    uint32_t group_max;  /* capacity of the group table, 1 to 65,536 */
    uint32_t reserved;   /* 0 */
    uint64_t held_bytes; /* kernel memory for descriptors of group files that stay open; 0 = none stays open.
                            Fewer stay open if RLIMIT_NOFILE is low */
};

/* The sources of the sampler. */
enum dh_source_id { DH_SOURCE_CPUS, DH_SOURCE_THROTTLE, DH_SOURCE_HUGEPAGES, DH_SOURCE_CGROUPS, DH_SOURCE_NUM };

enum dh_source_state {
    DH_STATE_ABSENT = 0,  /* the machine lacks what the source reads */
    DH_STATE_OK = 1,
    DH_STATE_FAILING = 2, /* something that exists cannot be read: err and err_field name it */
    DH_STATE_STARTING = 3 /* the first pass is not published yet */
};

struct dh_source {
    uint32_t state;     /* enum dh_source_state */
    uint32_t err_field; /* enum dh_field of the last failure */
    int32_t err;        /* errno of the last failure, or an own (negative) code; 0 = none yet. ENOENT if the
                           root does not exist, though the source is then absent and not failing */
    uint32_t reserved;
    uint64_t passes;       /* completed passes of this source since start */
    uint64_t heartbeat_ns; /* end of the last pass; before the first, the start of the thread. This copy
                              holds what the pass read, except during the sampler's first pass */
    uint64_t period_ns;    /* time between two passes of this source */
    uint64_t failures;     /* failed reads since start */
};

#define DH_DURATION_NUM 12

/* Histogram of the durations of a source's passes since start. */
struct dh_durations {
    uint64_t count[DH_DURATION_NUM]; /* passes that took at most dh_duration_bound() of the index, and longer
                                        than that of the index before */
    uint64_t sum_ns;
};

/* dh_duration_bound() - return the upper bound of a bucket [ns]; UINT64_MAX for the last one. */
uint64_t dh_duration_bound(uint32_t bucket);

struct dh_node {
    uint64_t valid;
    uint64_t seen; /* bits of members that exist, or existed: separates "absent" from "unreadable" */
    uint32_t node;
    int32_t err;                 /* why an existing member could not be read last */
    uint64_t throttle_core;      /* events since start, summed over the node's CPUs; never falls */
    uint64_t throttle_package;   /* events since start, the largest of the node's CPUs */
    uint64_t cpus[DH_CPU_WORDS]; /* bit set; a CPU that went offline stays with its node. While DH_NODE_CPUS
                                    is not valid, the last set that was read */
};

struct dh_pool {
    uint64_t valid;
    uint64_t seen;
    uint64_t size_kib;
    int32_t node;     /* NUMA node, or DH_MACHINE */
    int32_t err;
    uint64_t nr;      /* pages, as all members below */
    uint64_t free;
    uint64_t reserved;
    uint64_t surplus;
    uint64_t overcommit;
};

/* Thermal-throttle events of one CPU since the sampler started; never fall, not even while it is offline. */
struct dh_throttle {
    uint64_t valid; /* bits of DH_NODE_THROTTLE_CORE and _PACKAGE, as in `seen` */
    uint64_t seen;
    uint32_t cpu;
    int32_t err;    /* why an existing counter could not be read last */
    uint64_t core;
    uint64_t package;
};

enum dh_group_kind { DH_GROUP_POD = 1, DH_GROUP_CONTAINER = 2 };

struct dh_hugetlb {
    uint64_t size_kib;
    uint64_t max; /* bytes, as rsvd_max; no limit reads as 2^64-1 */
    uint64_t rsvd_max;
    uint64_t events;      /* allocations that hit the limit since the group was created */
    uint64_t rsvd_failed; /* cgroup v1: reservations that hit their limit; v2 counts them in `events` */
    uint64_t valid;
    uint64_t seen;
};

struct dh_group {
    uint64_t stamp; /* unique among groups; grows whenever the record changes */
    uint64_t valid;
    uint64_t seen;
    uint32_t id;         /* unique for the life of the sampler */
    uint32_t kind;       /* enum dh_group_kind */
    uint32_t sizes;      /* used entries of hugetlb[] */
    int32_t err;
    char uid[DH_UID_LEN];   /* the pod's uid with its dashes restored, NUL-padded */
    char name[DH_NAME_LEN]; /* the container's id, NUL-padded; empty for a pod */
    uint64_t populated;
    uint64_t frozen;
    uint64_t mem_high;
    uint64_t mem_max;
    uint64_t mem_oom;
    uint64_t mem_oom_kill;
    uint64_t mem_failcnt;
    uint64_t cpu_periods;
    uint64_t cpu_throttled;
    uint64_t mem_limit; /* bytes; no limit reads as 2^64-1 */
    uint64_t cpus[DH_GROUP_CPU_WORDS]; /* bit set: cpuset.cpus.effective */
    struct dh_hugetlb hugetlb[DH_HP_MAX];
};

/*
 * Head of the copy that dh_sampler_read() makes. Without gaps follow: `nodes` records of struct dh_node,
 * `throttles` of struct dh_throttle, `pools` of struct dh_pool, the stamps of `groups` groups (uint64_t),
 * and, in the order of the stamps, a struct dh_group for each group whose stamp is above the reader's.
 */
struct dh_snapshot {
    uint32_t size;    /* sizeof(struct dh_snapshot) */
    uint32_t version; /* DH_VERSION */
    uint32_t nodes;
    uint32_t pools;
    uint32_t groups;       /* used length of the group table; a record with id 0 is unused */
    uint32_t dropped;      /* groups without room in the table; the containers of a pod without room are not
                              counted */
    uint64_t seq;          /* publications that woke the reader, including this one; 0 before the first pass */
    uint64_t heartbeat_ns; /* end of the last pass; 0 before the first */
    uint64_t passes;
    uint64_t reads;   /* read(2) and pread(2) calls since start */
    uint64_t opens;   /* openat(2) calls since start */
    uint64_t descriptors;
    uint64_t watches;
    uint64_t kernel_bytes; /* estimated kernel memory behind descriptors and watches */
    uint64_t unwatched;    /* notified files without an inotify watch; the sweep reads them instead */
    uint64_t overflows;    /* inotify queue overflows; after each, everything is read */
    uint64_t cpu_valid;    /* valid bits of the three sets below */
    uint64_t cpu_seen;
    int32_t cpu_err;
    uint32_t throttles; /* CPUs that have thermal_throttle counters */
    uint64_t cpu_present[DH_CPU_WORDS];
    uint64_t cpu_online[DH_CPU_WORDS];
    uint64_t cpu_isolated[DH_CPU_WORDS];
    struct dh_source source[DH_SOURCE_NUM];
};

struct dh_sampler;

/*
 * dh_sampler_open() - make a sampler. It reads nothing yet.
 * @o:                               options; size, version and ranges are checked
 * @sysfs, @cgroupfs, @kubelet_root: roots, at most 200 bytes each. @kubelet_root is the kubelet's
 *                                   --cgroup-root, relative to @cgroupfs.
 * @wakes:                           @nwakes entries, copied
 * @out:                             the sampler, owned by the caller until dh_sampler_stop()
 *
 * Return: 0; DH_EABI; -EINVAL, -ENAMETOOLONG, -ENOMEM, -EMFILE. Without inotify it succeeds: the sweep then
 *         reads all files, and inotify is requested again at each resync.
 * Threads: any.
 * Blocks: no; only the sampler's own thread opens the roots.
 */
int dh_sampler_open(const struct dh_options *o, const char *sysfs, const char *cgroupfs,
                    const char *kubelet_root, const struct dh_wake *wakes, uint32_t nwakes,
                    struct dh_sampler **out);

/*
 * dh_sampler_start() - start the thread. The first pass begins at once.
 *
 * From here on dh_sampler_read() succeeds. Until the first pass ends it returns a head with 0 passes and
 * every source in DH_STATE_STARTING, so that the reader can detect a pass that hangs.
 *
 * Return: 0; -EBUSY if started before; -EAGAIN as pthread_create(3).
 * Threads: the owner's.
 * Blocks: no.
 */
int dh_sampler_start(struct dh_sampler *s);

/*
 * dh_sampler_eventfd() - return the descriptor that becomes readable after a change that wakes the reader.
 *
 * The end of the first pass counts as a change. The sampler owns the descriptor; the reader clears it with
 * read(2) of 8 bytes before it calls dh_sampler_read().
 */
int dh_sampler_eventfd(const struct dh_sampler *s);

/*
 * dh_sampler_rescan_fd() - return the eventfd that requests a pass after CPUs, memory or NUMA nodes have
 * changed.
 *
 * After a write(2) of 8 bytes the next pass begins at once and also checks files that were absent. The
 * sampler owns the descriptor; other writers dup(2) it.
 */
int dh_sampler_rescan_fd(const struct dh_sampler *s);

/* dh_sampler_notified_ns() - return when the eventfd was last written to, or 0. For benchmarks. */
uint64_t dh_sampler_notified_ns(const struct dh_sampler *s);

/*
 * dh_sampler_pass() - run one pass on the caller's thread, instead of dh_sampler_start(). For tests and
 * benchmarks.
 *
 * Return: 0; -EBUSY if the thread runs.
 * Blocks: as the files do.
 */
int dh_sampler_pass(struct dh_sampler *s);

/* The system calls of dh_sampler_lower_bound(). */
enum dh_bare {
    DH_BARE_PASS,  /* system calls of a pass without a sweep */
    DH_BARE_SWEEP, /* system calls of a whole sweep: pread for files whose descriptors stay open; openat, read
                      and close for others */
    DH_BARE_OPENS, /* as DH_BARE_SWEEP, with openat, read and close for all files */
    DH_BARE_NUM
};

/*
 * dh_sampler_lower_bound() - make the bare system calls of a pass without changes: the same reads and nothing
 * else.
 * @bare: enum dh_bare
 *
 * For benchmarks, after at least one dh_sampler_pass().
 *
 * Return: the number of reads; -EBUSY if the thread runs; -EINVAL.
 */
int64_t dh_sampler_lower_bound(struct dh_sampler *s, uint32_t bare);

/*
 * dh_sampler_sweep() - read every group's counters without notification now, on the caller's thread.
 *
 * For benchmarks, after at least one dh_sampler_pass().
 *
 * Return: the number of groups that were read; -EBUSY if the thread runs.
 */
int64_t dh_sampler_sweep(struct dh_sampler *s);

/* dh_sampler_size() - return the most bytes that dh_sampler_read() can need, for any number of groups. */
size_t dh_sampler_size(const struct dh_sampler *s);

/*
 * dh_sampler_durations() - copy the durations of the passes of each source.
 * @out: DH_SOURCE_NUM records
 *
 * A pass that ends during the call may be counted in `count` only.
 * Threads: any, until dh_sampler_stop().
 * Blocks: no.
 */
void dh_sampler_durations(const struct dh_sampler *s, struct dh_durations *out);

/*
 * dh_sampler_read() - copy the newest complete publication.
 * @since: highest stamp of a group that the reader has, or 0; records with higher stamps are copied
 * @buf:   @cap bytes, aligned to 8
 *
 * Return: bytes used, a multiple of 8; -ENODATA before dh_sampler_start() or the first dh_sampler_pass();
 *         -ENOSPC if @cap is too small for the current publication; DH_ETORN.
 * Threads: any number of readers.
 * Blocks: about 10 ms at most, and only while the writer is preempted in the middle of a copy.
 */
int64_t dh_sampler_read(struct dh_sampler *s, uint64_t since, void *buf, size_t cap);

/*
 * dh_sampler_request_stop() - request the thread to end without waiting. With several owners of threads, request all
 * before dh_sampler_stop() waits for the first: then all have the same time.
 *
 * Threads: the owner's.
 */
void dh_sampler_request_stop(struct dh_sampler *s);

/*
 * dh_sampler_stop() - end the thread and free the sampler.
 * @timeout_ns: how long to wait for a thread that is inside a read
 *
 * Return: 0, and @s is freed; -ETIMEDOUT: the thread hangs in the kernel. It is abandoned with everything it
 *         uses, accesses nothing of the caller's, and ends if its read returns.
 * Threads: the owner's.
 * Blocks: at most @timeout_ns.
 */
int dh_sampler_stop(struct dh_sampler *s, uint64_t timeout_ns);

/* dh_field_name() - return the file or key of a field, "nr_hugepages"; NULL for an unknown field. */
const char *dh_field_name(uint32_t field);

/* Machine state that changes rarely: machine/ */

#define DH_DIMM_MAX 512          /* memory modules and controllers */
#define DH_CORE_MAX 8192         /* same as DH_CPU_WORDS */
#define DH_LABEL_LEN 64          /* a memory module's label with its NUL; firmware labels have at most 31 bytes */
#define DH_CONTROLLER 0xffffffff /* dh_dimm.dimm in the record of a controller itself */

/*
 * Fields that are read; the number is the bit in `valid` and `seen`, and the argument of
 * dh_machine_field_name().
 */
enum dh_machine_field {
    DH_DIMM_CE, /* members of dh_dimm */
    DH_DIMM_UE,
    DH_NUMA_TOTAL, /* members of dh_numa */
    DH_NUMA_POISONED,
    DH_NUMA_BLOCKS, /* blocks and blocks_offline */
    DH_CORE_CORE,   /* members of dh_core */
    DH_CORE_PACKAGE,
    DH_CORE_MAX_KHZ,
    DH_CORE_CAP_KHZ,
    DH_CORE_MCE,
    DH_NODES_ONLINE, /* members of the head, as all that follow */
    DH_NODES_MEMORY,
    DH_MEM_CORRUPTED,
    DH_SURPLUS_FAILED,
    DH_SMT_ACTIVE,
    DH_PSI_CPU,
    DH_PSI_MEMORY,
    DH_PSI_IO,
    DH_EDAC_LIST,   /* listings, for dh_source.err_field; not members of a record */
    DH_CORE_LIST,
    DH_MACHINE_SYSFS,
    DH_MACHINE_PROCFS,
    DH_MACHINE_FIELD_NUM
};

enum dh_machine_source {
    DH_MACHINE_EDAC,
    DH_MACHINE_MEMORY,
    DH_MACHINE_CORES,
    DH_MACHINE_PRESSURE,
    DH_MACHINE_SOURCE_NUM
};

struct dh_machine_options {
    uint32_t size;      /* sizeof(struct dh_machine_options) */
    uint32_t version;   /* DH_VERSION */
    uint64_t period_ns; /* time between two passes, each of which reads the controllers' counts: 10 ms to 1 h */
    uint64_t slow_ns;   /* time between two reads of NUMA node memory and of pressure; at least period_ns */
    uint64_t rare_ns;   /* time between two reads of expensive files (interrupts, vmstat, one file per CPU
                           or module) and of every listing; at least slow_ns. A rescan request reads them
                           at once */
};

/* A memory module or, if dimm is DH_CONTROLLER, its memory controller. */
struct dh_dimm {
    uint64_t valid;
    uint64_t seen;
    uint32_t mc;
    uint32_t dimm;
    int32_t err;     /* why an existing member could not be read last */
    uint32_t reserved;
    uint64_t ce;     /* as read; falls when an operator resets the counter */
    uint64_t ue;
    char label[DH_LABEL_LEN];    /* NUL-padded, printable ASCII; for a controller its mc_name */
    char location[DH_LABEL_LEN];
};

struct dh_numa {
    uint64_t valid;
    uint64_t seen;
    uint32_t node;
    int32_t err;
    uint64_t total_kib;
    uint64_t poisoned;
    uint64_t blocks;
    uint64_t blocks_offline;
};

struct dh_core {
    uint64_t valid;
    uint64_t seen;
    uint32_t cpu;
    int32_t err;
    uint64_t core;    /* lowest number of the CPUs that share the core */
    uint64_t package;
    uint64_t max_khz;
    uint64_t cap_khz;
    uint64_t mce;
};

/*
 * Head of the copy that dh_machine_read() makes; `dimms` records of struct dh_dimm, `numas` of struct dh_numa
 * and `cores` of struct dh_core follow without gaps.
 */
struct dh_machine_head {
    uint32_t size;    /* sizeof(struct dh_machine_head) */
    uint32_t version; /* DH_VERSION */
    uint32_t dimms;
    uint32_t numas;
    uint32_t cores;
    int32_t err;      /* why an existing member of the head could not be read last */
    uint64_t valid;
    uint64_t seen;
    uint64_t nodes_online; /* bit sets of NUMA nodes */
    uint64_t nodes_memory;
    uint64_t corrupted_kib;
    uint64_t surplus_failed;
    uint64_t smt_active;
    uint64_t psi_cpu_some_us;
    uint64_t psi_memory_full_us;
    uint64_t psi_io_full_us;
    uint64_t wakes;
    uint64_t reads;    /* read(2) and pread(2) calls since start */
    struct dh_source source[DH_MACHINE_SOURCE_NUM]; /* err_field is an enum dh_machine_field */
};

struct dh_machine;

/*
 * dh_machine_open() - make a watch over the machine. It reads nothing yet.
 * @sysfs, @procfs: roots, at most 200 bytes each
 * @wake_fd:        an eventfd, duplicated. Written to when a value that a rule evaluates has changed: error
 *                  counts and inventory at once and then at most every slow_ns, pressure when a trigger
 *                  fires. Waiting times of tasks and amounts of memory alone wake no reader.
 *
 * Return: 0; DH_EABI; -EINVAL, -ENAMETOOLONG, -ENOMEM, -EMFILE; -EBADF if @wake_fd is no descriptor.
 * Threads: any.
 * Blocks: no.
 */
int dh_machine_open(const struct dh_machine_options *o, const char *sysfs, const char *procfs, int wake_fd,
                    struct dh_machine **out);

/* dh_machine_start() - start the thread. Return: 0; -EBUSY if started before; -EAGAIN as pthread_create(3). */
int dh_machine_start(struct dh_machine *m);

/*
 * dh_machine_rescan_fd() - return an eventfd; after a write everything is read at once, as
 * dh_sampler_rescan_fd().
 */
int dh_machine_rescan_fd(const struct dh_machine *m);

/*
 * dh_machine_pass() - run one pass on the caller's thread, instead of dh_machine_start(). For tests and
 * benchmarks.
 */
int dh_machine_pass(struct dh_machine *m);

/* dh_machine_size() - return the most bytes that dh_machine_read() can need. */
size_t dh_machine_size(const struct dh_machine *m);

/* dh_machine_durations() - copy DH_MACHINE_SOURCE_NUM records, as dh_sampler_durations(). */
void dh_machine_durations(const struct dh_machine *m, struct dh_durations *out);

/* dh_machine_read() - copy the newest complete publication, as dh_sampler_read(). */
int64_t dh_machine_read(struct dh_machine *m, void *buf, size_t cap);

/* dh_machine_request_stop() - request the thread to end, as dh_sampler_request_stop(). */
void dh_machine_request_stop(struct dh_machine *m);

/* dh_machine_stop() - end the thread and free the watch, as dh_sampler_stop(). */
int dh_machine_stop(struct dh_machine *m, uint64_t timeout_ns);

/* dh_machine_field_name() - return the file or row of a field, "ce_count"; NULL for an unknown field. */
const char *dh_machine_field_name(uint32_t field);

/* Device events of the kernel: uevent/ */

enum dh_subsystem {
    DH_SUBSYSTEM_CPU,
    DH_SUBSYSTEM_MEMORY,
    DH_SUBSYSTEM_NODE,
    DH_SUBSYSTEM_PCI,
    DH_SUBSYSTEM_EDAC,
    DH_SUBSYSTEM_MACHINECHECK,
    DH_SUBSYSTEM_NUM /* all other subsystems, whose events are not counted */
};

/* The copy that dh_uevents_read() makes. */
struct dh_uevent_sample {
    uint32_t size;    /* sizeof(struct dh_uevent_sample) */
    uint32_t version; /* DH_VERSION */
    uint32_t state;   /* enum dh_source_state; ABSENT: the kernel has no such socket, or `silent` */
    int32_t err;      /* errno of the last failure; 0 = none yet */
    uint32_t silent;  /* 1: the network namespace belongs to a user namespace, and the kernel sends no
                         events to it */
    uint32_t reserved;
    uint64_t passes;  /* runs of the thread's loop; at least one every period_ns */
    uint64_t heartbeat_ns;
    uint64_t period_ns;
    uint64_t failures;
    uint64_t foreign;   /* messages from senders other than the kernel; ignored */
    uint64_t malformed; /* messages of the kernel that could not be parsed */
    uint64_t lost;      /* socket overflows: ENOBUFS */
    uint64_t changes[DH_SUBSYSTEM_NUM]; /* events, plus one for each overflow and each time that the socket
                                           was reopened: the reader must scan the subsystem again */
};

struct dh_uevents;

/*
 * dh_uevents_open() - make a listener to the kernel's device events. The thread opens the socket, in the
 * network namespace of the caller of dh_uevents_start().
 * @wake_fd:          an eventfd, duplicated; written to after a new event of one of the subsystems: at once
 *                    for the first, and at most ten times per second
 * @rescan, @nrescan: at most 4 eventfds, duplicated; written to when a CPU, memory block, NUMA node or memory
 *                    controller was added, removed or changed, and after an overflow
 *
 * Return: 0; -EINVAL, -ENOMEM, -EMFILE; -EBADF.
 * Threads: any.
 * Blocks: no.
 */
int dh_uevents_open(int wake_fd, const int *rescan, uint32_t nrescan, struct dh_uevents **out);

/* dh_uevents_start() - start the thread. Return: 0; -EBUSY if started before; -EAGAIN as pthread_create(3). */
int dh_uevents_start(struct dh_uevents *u);

/* dh_uevents_read() - copy the newest complete publication, a struct dh_uevent_sample, as dh_kmsg_read(). */
int64_t dh_uevents_read(struct dh_uevents *u, void *buf, size_t cap);

/* dh_uevents_request_stop() - request the thread to end, as dh_sampler_request_stop(). */
void dh_uevents_request_stop(struct dh_uevents *u);

/* dh_uevents_stop() - end the thread and free the listener, as dh_sampler_stop(). */
int dh_uevents_stop(struct dh_uevents *u, uint64_t timeout_ns);

/*
 * dh_directory_watch() - return an inotify descriptor for entries that are moved or removed, and files that are written.
 * @writes: 0 leaves out files that are closed after writing, and changes of attributes
 *
 * The descriptor is non-blocking, close-on-exec and owned by the caller. Its data need no parsing: read until
 * EAGAIN, then list the directory.
 *
 * Return: the descriptor, or -errno of inotify_init1(2) or inotify_add_watch(2).
 */
int dh_directory_watch(const char *path, int writes);

/* GPUs through NVML: gpu/ */

#define DH_GPU_MAX 32             /* NVML counts at most 16 in any machine sold; more are reported as DH_EFULL */
#define DH_MIG_MAX 8              /* instances of one GPU; NVML documents 7 */
#define DH_LINK_MAX 36            /* NVLinks of one GPU; 18 on Blackwell */
#define DH_XID_MAX 48             /* different XIDs of one GPU that are kept */
#define DH_GPU_WORDS 2            /* words of a bit set of fields */
#define DH_GPU_EVENTS 24          /* NVML event bits that are counted */
#define DH_NO_INSTANCE 0xffffffff /* gi, ci of an event that names no instance */
#define DH_VERSION_LEN 80

/*
 * Fields that are read of a GPU. Fast fields are read every pass, slow fields every `slow_ns`, fixed fields
 * once per handle. FI: a field id of nvmlDeviceGetFieldValues; one call reads all of a pass.
 * dh_gpu_field_name() returns the name of a field.
 */
enum dh_gpu_field {
    /* fast */
    DH_GPU_RECOVERY_ACTION,      /* FI 230; enum of NVML, 0 none */
    DH_GPU_ECC_UNCORRECTABLE,    /* FI 4; count since the driver was loaded, all memories */
    DH_GPU_ECC_CORRECTABLE,      /* FI 3 */
    DH_GPU_REMAP_CORRECTABLE,    /* FI 142; rows */
    DH_GPU_REMAP_UNCORRECTABLE,  /* FI 143 */
    DH_GPU_REMAP_PENDING,        /* FI 144; 0 or 1 */
    DH_GPU_REMAP_FAILURE,        /* FI 145; 0 or 1 */
    DH_GPU_RETIRED_SBE,          /* FI 29; pages, before Ampere */
    DH_GPU_RETIRED_DBE,          /* FI 30 */
    DH_GPU_RETIRED_PENDING,      /* FI 31; 0 or 1 */
    DH_GPU_PCIE_REPLAY,          /* FI 94; count */
    DH_GPU_MEM_TEMP,             /* FI 82; C */
    DH_GPU_SLOWED_SW_POWER,      /* FI 74; ns */
    DH_GPU_SLOWED_SW_THERMAL,    /* FI 251 in branch 575, 269 from 580 on; ns */
    DH_GPU_SLOWED_HW_THERMAL,    /* FI 252, 270; ns */
    DH_GPU_SLOWED_HW_BRAKE,      /* FI 253, 271; ns */
    DH_GPU_TEMP,                 /* nvmlDeviceGetTemperature; C */
    DH_GPU_MARGIN,               /* nvmlDeviceGetMarginTemperature; C, signed: below 0 is too hot */
    DH_GPU_CLOCK_REASONS,        /* nvmlDeviceGetCurrentClocksEventReasons; bit set */
    DH_GPU_LINKS_UP,             /* FI 165 per link, else nvmlDeviceGetNvLinkState; bit set of active links */
    /* slow */
    DH_GPU_ECC_MODE,             /* nvmlDeviceGetEccMode; current, 0 or 1 */
    DH_GPU_ECC_MODE_PENDING,
    DH_GPU_ECC_UNCORRECTABLE_LIFE, /* FI 6; count over the GPU's life */
    DH_GPU_ECC_CORRECTABLE_LIFE,   /* FI 5 */
    DH_GPU_ECC_UNCORRECTABLE_DRAM, /* nvmlDeviceGetMemoryErrorCounter, volatile, as the next three */
    DH_GPU_ECC_UNCORRECTABLE_SRAM,
    DH_GPU_ECC_CORRECTABLE_DRAM,
    DH_GPU_ECC_CORRECTABLE_SRAM,
    DH_GPU_ECC_UNCORRECTABLE_DRAM_LIFE, /* aggregate, as the next three */
    DH_GPU_ECC_UNCORRECTABLE_SRAM_LIFE,
    DH_GPU_ECC_CORRECTABLE_DRAM_LIFE,
    DH_GPU_ECC_CORRECTABLE_SRAM_LIFE,
    DH_GPU_SRAM_PARITY,           /* nvmlDeviceGetSramEccErrorStatus; volatileUncParity, count */
    DH_GPU_SRAM_SECDED,           /* volatileUncSecDed, count */
    DH_GPU_SRAM_THRESHOLD,        /* bThresholdExceeded, 0 or 1 */
    DH_GPU_CHANNEL_REPAIR_PENDING, /* nvmlDeviceGetRepairStatus; bChannelRepairPending, 0 or 1 */
    DH_GPU_TPC_REPAIR_PENDING,    /* bTpcRepairPending, 0 or 1 */
    DH_GPU_UNREPAIRABLE_MEMORY,   /* nvmlDeviceGetUnrepairableMemoryFlag_v1; 0 or 1 */
    DH_GPU_LINK_REPLAY,           /* FI 161 per link, else nvmlDeviceGetNvLinkErrorCounter; sum over links */
    DH_GPU_LINK_RECOVERY,         /* FI 162; sum */
    DH_GPU_LINK_CRC,              /* FI 163; sum */
    DH_GPU_LINK_RECEIVE_ERRORS,   /* FI 208 per link (NVLink 5); sum */
    DH_GPU_LINK_RECOVERY_FAILED,  /* FI 214; sum */
    DH_GPU_LINK_EFFECTIVE_ERRORS, /* FI 219; sum */
    DH_GPU_LINK_SYMBOL_ERRORS,    /* FI 221; sum */
    DH_GPU_FABRIC_STATE,          /* nvmlDeviceGetGpuFabricInfoV, else nvmlDeviceGetGpuFabricInfo */
    DH_GPU_FABRIC_STATUS,         /* nvmlReturn_t of the registration; meaningful in state 3 (completed) */
    DH_GPU_FABRIC_HEALTH,         /* health mask, from v2 of the structure on */
    DH_GPU_FABRIC_SUMMARY,        /* health summary, from v3 on */
    DH_GPU_PCIE_WIDTH,            /* nvmlDeviceGetCurrPcieLinkWidth; lanes */
    DH_GPU_PCIE_GEN,              /* nvmlDeviceGetCurrPcieLinkGeneration */
    DH_GPU_PSTATE,                /* nvmlDeviceGetPerformanceState; 0 is the fastest, 32 unknown */
    DH_GPU_UTILIZATION,           /* nvmlDeviceGetUtilizationRates; % of time the GPU was busy */
    DH_GPU_PERSISTENCE,           /* nvmlDeviceGetPersistenceMode; 0 or 1 */
    DH_GPU_MIG_MODE,              /* nvmlDeviceGetMigMode; current, 0 or 1 */
    DH_GPU_AER_CORRECTABLE,       /* sysfs, aer_dev_correctable; TOTAL_ERR_COR since boot */
    DH_GPU_AER_NONFATAL,          /* aer_dev_nonfatal */
    DH_GPU_AER_FATAL,             /* aer_dev_fatal */
    /* fixed */
    DH_GPU_TEMP_SHUTDOWN,        /* nvmlDeviceGetTemperatureThreshold; C */
    DH_GPU_TEMP_SLOWDOWN,
    DH_GPU_TEMP_GPU_MAX,
    DH_GPU_TEMP_MEM_MAX,
    DH_GPU_PCIE_WIDTH_MAX,       /* nvmlDeviceGetMaxPcieLinkWidth: of GPU and slot together */
    DH_GPU_PCIE_GEN_MAX,
    DH_GPU_ARCHITECTURE,         /* nvmlDeviceGetArchitecture */
    DH_GPU_FIELD_NUM
};

/* When a change of a field wakes the reader, as enum dh_wake_mode and three more: */
enum dh_gpu_wake_mode {
    DH_GPU_WAKE_CHANGE = 1, /* any change of value or validity */
    DH_GPU_WAKE_RISE = 2,   /* the value grew by `threshold` since the window began, or fell (the counter
                               was reset), or validity changed */
    DH_GPU_WAKE_OVER = 3,   /* the value reached the value of field `limit`, or fell below it again */
    DH_GPU_WAKE_BELOW = 4,  /* the signed value fell below `threshold`, or reached it again */
    DH_GPU_WAKE_BITS = 5    /* a bit of `threshold` changed */
};

struct dh_gpu_wake {
    uint32_t field; /* enum dh_gpu_field */
    uint32_t mode;  /* enum dh_gpu_wake_mode */
    uint32_t limit; /* enum dh_gpu_field */
    uint32_t reserved;
    uint64_t threshold;
    uint64_t window_ns;
};

struct dh_gpus_options {
    uint32_t size;             /* sizeof(struct dh_gpus_options) */
    uint32_t version;          /* DH_VERSION */
    uint64_t period_ns;        /* time between two passes over a GPU: 10 ms to 1 h */
    uint64_t slow_ns;          /* time between two reads of the slow fields; at least period_ns */
    uint64_t deadline_ns;      /* a call of a GPU's thread that takes longer is overdue: 10 ms to 10 min */
    uint64_t open_deadline_ns; /* deadline_ns of calls that initialize the library: nvmlInit, handles */
    uint64_t retry_ns;         /* time between two attempts to load and initialize the library: 100 ms to 1 h */
    uint64_t cpu_budget_ns;    /* CPU time per second of all passes together; a pass over a GPU is delayed, by up
                                  to 10 s, until the passes keep within it. 0: no limit */
};

struct dh_mig {
    uint32_t gi;
    uint32_t ci;
    char uuid[48];
};

struct dh_xid {
    uint32_t code;
    uint32_t gi;       /* DH_NO_INSTANCE: the whole GPU */
    uint32_t ci;
    uint32_t reserved;
    uint64_t count;
    uint64_t first_ns;
    uint64_t last_ns;
};

/*
 * One GPU. The GPU's thread writes the record, except `call`, `call_ns` and the members from `event_count`
 * on, which the event waiter writes.
 */
struct dh_gpu {
    uint32_t index;      /* place in the list since start; a GPU keeps it when NVML renumbers */
    uint32_t state;      /* enum dh_source_state: STARTING before the first pass, FAILING if status is not 0 */
    int32_t status;      /* nvmlReturn_t of the last pass as a whole: 0, or a failure of its calls: 15 lost,
                            16 reset required, 1 or 9 no driver. An unsupported field is no failure */
    uint32_t call;       /* enum dh_nvml_call under way, 0 if none */
    uint64_t call_ns;    /* start of that call */
    uint64_t passes;
    uint64_t heartbeat_ns;    /* end of the last pass */
    uint64_t period_ns;
    uint64_t slow_passes;
    uint64_t failures;     /* passes whose status was not 0 */
    uint64_t overdue;      /* calls that missed their deadline */
    uint64_t probe_p50_ns; /* duration of nvmlDeviceGetFieldValues in whole kernel ticks of 1 to 10 ms: median
                              of the last 15 calls; 1 if below one tick, 0 if never answered */
    uint64_t handles;      /* number of handles obtained: 1 at start; grows when a lost GPU is found again */
    uint64_t calls;        /* calls of NVML since start */
    uint64_t changes;      /* passes that woke the reader because of a change that rules evaluate; events apart */
    uint64_t valid[DH_GPU_WORDS];
    uint64_t seen[DH_GPU_WORDS];   /* bits of fields that were valid once: separates "absent" from "unreadable" */
    uint64_t value[DH_GPU_FIELD_NUM];
    uint16_t code[DH_GPU_FIELD_NUM]; /* nvmlReturn_t of the field's last read: 3 not supported, 13 no such
                                        function; errno + 4096 for a field that is read from a file */
    uint32_t links;                /* NVLinks that the GPU has */
    uint64_t link_errors[DH_LINK_MAX]; /* per link, sum of replay, recovery and CRC errors, or of its NVLink 5
                                          errors */
    char uuid[48];
    char bus[24];                  /* 0000:3b:00.0 */
    char name[96];
    char serial[32];
    uint32_t migs;
    uint32_t mig_generation;       /* grows with every change of the list */
    struct dh_mig mig[DH_MIG_MAX];
    uint64_t event_count[DH_GPU_EVENTS]; /* by bit number: [3] is nvmlEventTypeXidCriticalError */
    uint64_t event_last_ns[DH_GPU_EVENTS];
    uint64_t event_last_data[DH_GPU_EVENTS];
    uint64_t event_mask;           /* event bits that are registered */
    uint64_t xid_evicted;          /* XIDs dropped because there were more than DH_XID_MAX */
    uint32_t xids;
    uint32_t event_reserved;
    struct dh_xid xid[DH_XID_MAX];
};

/* Calls of NVML that can hang, for dh_gpu.call; names from dh_nvml_call_name(). */
enum dh_nvml_call {
    DH_CALL_NONE,
    DH_CALL_OPEN,  /* dlopen(3), its constructors included */
    DH_CALL_INIT,
    DH_CALL_SHUTDOWN,
    DH_CALL_SYSTEM, /* versions, count */
    DH_CALL_HANDLE,
    DH_CALL_IDENTITY,
    DH_CALL_FIELDS,
    DH_CALL_TEMPERATURE,
    DH_CALL_MARGIN,
    DH_CALL_CLOCK_REASONS,
    DH_CALL_THRESHOLD,
    DH_CALL_LINKS,
    DH_CALL_MEMORY,
    DH_CALL_FABRIC,
    DH_CALL_PCIE,
    DH_CALL_MIG,
    DH_CALL_MODES,
    DH_CALL_REGISTER,
    DH_CALL_WAIT,
    DH_CALL_AER,    /* sysfs, not NVML */
    DH_CALL_NUM
};

/*
 * Cost of the measured calls of one kind: those of the first two passes after each slow_ns, and all of the threads
 * that open the library and wait for events.
 */
struct dh_call_cost {
    uint64_t calls;
    uint64_t cpu_ns;
    uint64_t wall_ns; /* for DH_CALL_WAIT, the time until an event included */
};

/* Costs of a GPU watch since its start. */
struct dh_gpu_costs {
    uint64_t cpu_ns;    /* CPU time of the threads that read GPUs */
    uint64_t switches;  /* their context switches */
    uint64_t period_ns; /* longest time between two passes that is in force */
    struct dh_call_cost call[DH_CALL_NUM];
};

/* Head of the copy that dh_gpus_read() makes; `gpus` records of struct dh_gpu follow. */
struct dh_gpus {
    uint32_t size;
    uint32_t version;
    uint32_t gpus;       /* records that follow: GPUs seen since start */
    uint32_t state;      /* enum dh_source_state: ABSENT no library, FAILING library unusable, STARTING no
                            answer yet */
    int32_t err;         /* why: nvmlReturn_t of nvmlInit_v2 or a later call; 12 no library; DH_EFULL too many
                            GPUs */
    uint32_t call;       /* enum dh_nvml_call under way in the thread that opens the library */
    uint64_t call_ns;
    uint64_t passes;     /* passes of that thread; each checks GPU count, driver version and new GPUs, every
                            retry_ns */
    uint64_t heartbeat_ns;
    uint64_t period_ns;
    uint64_t failures;
    uint64_t generation; /* grows when the driver was reloaded; 1 after the first initialization. Without
                            `module`, each initialization of the library counts as a reload */
    uint64_t module;     /* inode of module/nvidia in sysfs: a load of the kernel module changes it; 0 unknown */
    uint32_t count;      /* GPUs that NVML last counted */
    uint32_t wait_state; /* enum dh_source_state of the event waiter; ABSENT if NVML has no events */
    int32_t wait_err;    /* nvmlReturn_t of the last failed wait or registration; 28: an event of an unknown
                            GPU */
    uint32_t wait_reserved;
    uint64_t wait_passes; /* waits that ended, with or without an event */
    uint64_t wait_heartbeat_ns;
    uint64_t wait_period_ns; /* longest wait */
    uint64_t wait_failures;
    uint64_t wakes;      /* number of wakes of the reader */
    char driver[DH_VERSION_LEN];
    char nvml[DH_VERSION_LEN];
    char err_text[200];     /* text of dlerror(3), or the name of a missing function, if that is the cause */
};

struct dh_gpu_watch;

/* dh_gpus_memory_size() - return the bytes of memory that a watch needs. */
size_t dh_gpus_memory_size(void);

/*
 * dh_gpus_open() - make a watch over all GPUs. It does not load the library yet.
 * @library:   name or path for dlopen(3)
 * @sysfs:     root, at most 200 bytes
 * @wake_fd:   an eventfd, duplicated; written to after a change that wakes the reader
 * @memory_fd: a memfd of dh_gpus_memory_size() bytes, zeroed and sealed against shrinking, that holds the
 *             watch, so that another process can read it; -1: private memory
 *
 * Return: 0; DH_EABI; -EINVAL, -ENAMETOOLONG, -ENOMEM, -EMFILE.
 * Threads: any.
 * Blocks: no.
 */
int dh_gpus_open(const struct dh_gpus_options *o, const char *library, const char *sysfs,
                 const struct dh_gpu_wake *wakes, uint32_t nwakes, int wake_fd, int memory_fd,
                 struct dh_gpu_watch **out);

/*
 * dh_gpus_attach() - map the watch of another process, read-only.
 * @memory_fd: the memfd that the other process passes to dh_gpus_open(), before or after this call
 *
 * The other process must run the same build. Its memory is not trusted: dh_gpus_read() checks all counts. Only
 * dh_gpus_read(), dh_gpus_size() and dh_gpus_detach() accept the result.
 *
 * Return: 0; -EINVAL: the file is too small or can shrink; -EBADF, -ENOMEM.
 */
int dh_gpus_attach(int memory_fd, struct dh_gpu_watch **out);

/* dh_gpus_detach() - undo dh_gpus_attach(). */
void dh_gpus_detach(struct dh_gpu_watch *w);

/*
 * dh_gpus_start() - start the threads: one that opens the library and finds GPUs, one per GPU once it is
 * found, one that waits for events, and one that checks the deadlines of all calls.
 *
 * Return: 0; -EBUSY if started before; -EAGAIN as pthread_create(3).
 */
int dh_gpus_start(struct dh_gpu_watch *w);

/*
 * dh_gpus_pass() - run one pass over every GPU on the caller's thread, instead of dh_gpus_start(). For
 * benchmarks.
 *
 * The first pass opens the library and finds the GPUs. Deadlines are not checked, and events are not waited
 * for.
 *
 * Return: the number of NVML calls over the GPUs; -EBUSY if the threads run.
 * Blocks: as NVML does.
 */
int64_t dh_gpus_pass(struct dh_gpu_watch *w);

/*
 * dh_gpus_lower_bound() - make the bare NVML calls of the last dh_gpus_pass(), if no slow field was due in
 * it. For benchmarks.
 *
 * Return: the number of calls that succeeded; -EBUSY if the threads run.
 */
int64_t dh_gpus_lower_bound(struct dh_gpu_watch *w);

/*
 * dh_gpus_check_count() - request that the thread that opens the library counts the GPUs within a second,
 * because the PCI bus changed.
 *
 * Threads: any.
 * Blocks: no.
 */
void dh_gpus_check_count(struct dh_gpu_watch *w);

/* dh_gpus_size() - return the most bytes that dh_gpus_read() can need. */
size_t dh_gpus_size(const struct dh_gpu_watch *w);

/*
 * dh_gpus_durations() - copy the durations of the passes over all GPUs, as dh_sampler_durations(). Measured in
 * kernel ticks of 1 to 10 ms: shorter passes count as 0 or as one tick, and the sum is right on average.
 */
void dh_gpus_durations(struct dh_gpu_watch *w, struct dh_durations *out);

/* dh_gpus_costs() - copy the costs of the threads that read GPUs, as dh_gpus_durations(). */
void dh_gpus_costs(struct dh_gpu_watch *w, struct dh_gpu_costs *out);

/*
 * dh_gpus_read() - copy the newest record of each GPU. Each record is complete; they may be of different
 * moments.
 * @buf: @cap bytes, aligned to 8
 *
 * Return: bytes used; -ENODATA before dh_gpus_start(); -ENOSPC; DH_ETORN; -EBADMSG: the memory holds an impossible
 *         count, because the other process overwrote it.
 * Threads: any number of readers.
 * Blocks: as dh_sampler_read().
 */
int64_t dh_gpus_read(struct dh_gpu_watch *w, void *buf, size_t cap);

/* dh_gpus_request_stop() - request the threads to end, as dh_sampler_request_stop(). */
void dh_gpus_request_stop(struct dh_gpu_watch *w);

/*
 * dh_gpus_stop() - end the threads and free the watch.
 *
 * Return: 0, and the library was shut down; -ETIMEDOUT: at least one thread hangs in a call. It is abandoned
 *         with what it uses, and the library stays initialized: nvmlShutdown could hang as well.
 * Blocks: at most @timeout_ns.
 */
int dh_gpus_stop(struct dh_gpu_watch *w, uint64_t timeout_ns);

/* dh_gpu_field_name() - return the name of a field, "ecc_uncorrectable"; NULL for an unknown field. */
const char *dh_gpu_field_name(uint32_t field);
/*
 * dh_nvml_call_name() - return the main function of a group of calls, "nvmlDeviceGetFieldValues"; NULL for an
 * unknown call.
 */
const char *dh_nvml_call_name(uint32_t call);

/* The kernel log: kmsg/ */

#define DH_LOG_MAX 512     /* different lines that are kept */
#define DH_LOG_TEXT 512    /* of a line's text, with its NUL: an OOM kill names two cgroups of 190 bytes */
#define DH_LOG_KEY 256     /* bytes of the key that distinguishes lines of one pattern; a difference behind
                              them is ignored */
#define DH_PATTERN_MAX 160 /* patterns */

/*
 * Patterns select the lines that are kept, and define which lines are counted as the same. A pattern matches
 * the beginning of a line's text. It consists of literal bytes and fields:
 *
 *   %b  a PCI address: 0000:3b:00, 0000:3b:00.0, 00000018:01:00.0
 *   %d  decimal digits
 *   %x  "0x" and hex digits
 *   %w  bytes other than blanks, commas and parentheses
 *   %k  the rest of the line; must end the pattern
 *   %*  as few bytes as possible before the literal that must follow; at the end of the pattern, anything
 *
 * All fields but %* match as many bytes as possible, without backtracking: matching takes one scan of the
 * line. The key of a line consists of its fields except %*.
 */
struct dh_kmsg_options {
    uint32_t size;         /* sizeof(struct dh_kmsg_options) */
    uint32_t version;      /* DH_VERSION */
    uint32_t any_facility; /* 0: only messages of the kernel itself; user space cannot write under the
                              kernel's facility */
    uint32_t reserved;     /* 0 */
};

/*
 * Lines with one pattern and one key. Texts: printable ASCII, \xNN for other bytes, cut at 511, NUL-padded.
 */
struct dh_log_line {
    uint32_t pattern;  /* index of the first pattern that matched */
    uint32_t reserved;
    uint64_t count;
    uint64_t first_us; /* the kernel's clock for its log, since boot; close to CLOCK_MONOTONIC, but not equal
                          to it */
    uint64_t last_us;
    uint64_t seq;      /* number of the last line in the log */
    char first[DH_LOG_TEXT];
    char last[DH_LOG_TEXT];
};

/* Head of the copy that dh_kmsg_read() makes; `entries` records of struct dh_log_line follow. */
struct dh_log {
    uint32_t size;      /* sizeof(struct dh_log) */
    uint32_t version;   /* DH_VERSION */
    uint32_t entries;   /* never falls; entries are not ordered by time */
    uint32_t state;     /* enum dh_source_state; STARTING until the end of the log was reached once */
    int32_t err;        /* errno of the last failure, or DH_EPARSE for a line that is no record; 0 = none yet */
    uint32_t reserved;
    uint64_t passes;       /* runs of the thread's loop; at least one every period_ns */
    uint64_t heartbeat_ns; /* end of the last run; before the first, the start of the thread */
    uint64_t period_ns;
    uint64_t failures;  /* failed opens and reads since start, and lines that are no records */
    uint64_t lines;     /* records that were read, of any facility */
    uint64_t matched;
    uint64_t lost;      /* records that were overwritten before they were read or were too long, by their
                           sequence numbers */
    uint64_t evicted;   /* entries dropped for lack of room, least recently seen first of the pattern with most entries */
    uint64_t next_seq;  /* records below this number were read or are lost */
    uint64_t wakes;     /* number of wakes of the reader */
};

struct dh_kmsg;

/*
 * dh_kmsg_open() - make a reader of the kernel log. It opens nothing yet.
 * @path:     /dev/kmsg, or a file or FIFO of such records, one per line; borrowed for the call. For /dev/kmsg
 *            the thread reads standard input if that is the same device.
 * @patterns: strings, each with its NUL, one after another in @len bytes; tried in this order
 * @wake_fd:  an eventfd, duplicated. Written to after a change: at once for a new entry or state, otherwise
 *            at most ten times per second.
 *
 * Return: 0; DH_EABI; -EINVAL for an invalid pattern, or more than DH_PATTERN_MAX patterns; -ENOMEM, -EMFILE;
 *         -EBADF if @wake_fd is no descriptor.
 * Threads: any.
 * Blocks: no.
 */
int dh_kmsg_open(const struct dh_kmsg_options *o, const char *path, const char *patterns, size_t len,
                 int wake_fd, struct dh_kmsg **out);

/*
 * dh_kmsg_start() - start the thread. It begins with the oldest record that the kernel holds.
 *
 * Return: 0; -EBUSY if started before; -EAGAIN as pthread_create(3).
 */
int dh_kmsg_start(struct dh_kmsg *k);

/* dh_kmsg_size() - return the most bytes that dh_kmsg_read() can need. */
size_t dh_kmsg_size(const struct dh_kmsg *k);

/*
 * dh_kmsg_read() - copy the newest complete publication.
 * @buf: @cap bytes, aligned to 8
 *
 * Return: bytes used, a multiple of 8; -ENODATA before dh_kmsg_start(); -ENOSPC; DH_ETORN.
 * Threads: any number of readers.
 * Blocks: as dh_sampler_read().
 */
int64_t dh_kmsg_read(struct dh_kmsg *k, void *buf, size_t cap);

/* dh_kmsg_request_stop() - request the thread to end, as dh_sampler_request_stop(). */
void dh_kmsg_request_stop(struct dh_kmsg *k);

/* dh_kmsg_stop() - end the thread and free the reader, as dh_sampler_stop(). */
int dh_kmsg_stop(struct dh_kmsg *k, uint64_t timeout_ns);

/* dh_pattern_check() - return 0 for a valid pattern, else 1 + the offset of the error. */
int dh_pattern_check(const char *pattern);

/*
 * dh_pattern_match() - match one line and extract its key.
 * @pattern:  a pattern that passed dh_pattern_check()
 * @text, @n: the line, without newline
 * @key:      @cap bytes; receives the fields except %*, each followed by a newline, cut at @cap
 *
 * Return: the length of the key; -ENOENT if the line does not match.
 */
int64_t dh_pattern_match(const char *pattern, const char *text, size_t n, char *key, size_t cap);

/* Settings of one cgroup, read on demand: cgroup/knobs.c */

enum dh_cg_controller {
    DH_CG_CORE = 1, /* v2's own files, where v1 has the freezer */
    DH_CG_MEMORY = 2,
    DH_CG_CPU = 4,
    DH_CG_HUGETLB = 8,
    DH_CG_CPUSET = 16,
    DH_CG_FREEZER = 32
};

/* A number from a file of the cgroup. */
struct dh_knob {
    uint64_t value;
    int32_t err; /* 0; ENOENT: the file does not exist; otherwise the errno or own code of the failed read */
    uint32_t reserved;
};

struct dh_page_knobs {
    uint64_t size_kib;
    struct dh_knob max;      /* hugetlb.<size>.max, .limit_in_bytes [bytes]; no limit reads as 2^64-1 */
    struct dh_knob rsvd_max; /* limit of reservations */
};

/*
 * Settings of one cgroup. Each is read where its controller is mounted: cgroup v1 or v2. Both have quota and
 * period, v2 in one file; the second name is v1's file.
 */
struct dh_knobs {
    uint32_t size;            /* sizeof(struct dh_knobs), set by the caller */
    uint32_t version;         /* DH_VERSION, set by the caller */
    uint32_t controllers;     /* bits of enum dh_cg_controller: v1 has a cgroup there, or v2 enables the
                                 controller in it; v2 controllers without any file to read are left out */
    int32_t controllers_err;  /* why the v2 controllers are unknown: a file is missing, and cgroup.controllers
                                 cannot be read; 0 = known */
    uint32_t attempts;        /* 1; 2: a file was missing in the first attempt, so the cgroup may have been
                                 removed */
    uint32_t sizes;           /* used entries of pages[] */
    struct dh_knob weight;    /* cpu.weight [1 to 10,000], cpu.shares [2 to 262,144] */
    struct dh_knob quota;     /* cpu.max, cpu.cfs_quota_us [us]; no limit reads as 2^64-1 */
    struct dh_knob period;    /* cpu.max, cpu.cfs_period_us [us] */
    struct dh_knob throttled; /* cpu.stat, nr_throttled: periods since the cgroup was created; ENOENT unless
                                 @exclusive_cpus, as the sets below */
    struct dh_knob memory;    /* memory.max, memory.limit_in_bytes [bytes]; no limit reads as 2^64-1 */
    int32_t cpus_err;         /* error of the sets, as dh_knob.err */
    int32_t effective_err;
    uint64_t cpus[DH_CPU_WORDS];      /* cpuset.cpus; empty in v2: inherited from the parent cgroup */
    uint64_t effective[DH_CPU_WORDS]; /* cpuset.cpus.effective, cpuset.effective_cpus */
    struct dh_page_knobs pages[DH_HP_MAX];
};

struct dh_knob_reader;

/*
 * dh_knobs_open() - find the mounted hierarchies.
 * @cgroupfs: mount point; borrowed for the call
 * @size_kib: @sizes hugepage sizes to read, at most DH_HP_MAX
 * @out:      the reader, owned by the caller until dh_knobs_close()
 *
 * Return: 0; -ENOENT if nothing is mounted; -errno if it cannot be opened; -EINVAL, -ENOMEM.
 * Threads: any.
 * Blocks: as opening a directory does.
 */
int dh_knobs_open(const char *cgroupfs, const uint64_t *size_kib, uint32_t sizes, struct dh_knob_reader **out);

/* dh_knobs_version() - return the version, 1 or 2, of the cgroups that limit CPU time. */
int dh_knobs_version(const struct dh_knob_reader *r);

/*
 * dh_knobs_read() - read the settings of a cgroup.
 * @path:           below the mounts; leading slashes are ignored
 * @exclusive_cpus: not 0: also read cpu.stat and cpuset.*, which matter for containers with exclusive CPUs
 *                  only; the kernel adds up all CPUs for cpu.stat
 *
 * Each file is opened, read once and closed, relative to the cgroup's directory. The kernel removes the files
 * before the directory: if a file is missing and the directory is gone, all is read once more.
 *
 * Return: 0; -ENOENT: the cgroup does not exist, or was removed during both attempts; -errno if none of its
 *         directories can be opened; DH_EABI.
 * Threads: any number at a time. No allocation.
 * Blocks: as the files do.
 */
int dh_knobs_read(const struct dh_knob_reader *r, const char *path, int exclusive_cpus, struct dh_knobs *out);

/* dh_knobs_close() - close the hierarchies and free the reader. */
void dh_knobs_close(struct dh_knob_reader *r);

/* One device in a health list. A separate buffer holds the texts; offsets and lengths are in bytes. */
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
 * dh_health_fill() - make records of devices from columns of values.
 * @list:    @n records
 * @columns: 32 * @n bytes: the lengths of all pools, of all devices and of all messages, whose texts follow each other
 *           in this order (uint32_t); then all values of @health (int32_t), @last_updated_s and @timeout_s (int64_t)
 *
 * Return: 0; -EOVERFLOW if the texts together exceed UINT32_MAX bytes.
 * Threads: any; pure.
 * Blocks: no.
 */
int dh_health_fill(struct dh_health *list, uint32_t n, const uint8_t *columns);

/*
 * dh_health_encode() - encode devices as one NodeWatchResourcesResponse (KEP-4680, v1 and v1alpha1).
 * @list:  @n records; @text holds their strings, valid UTF-8
 * @out:   @cap bytes
 * @taken: number of devices that fit; the caller continues from there with the next message
 *
 * Return: bytes written; -EINVAL if a record points outside @text; -ENOSPC if not even the first device fits.
 * Threads: any; pure.
 * Blocks: no.
 */
int64_t dh_health_encode(const struct dh_health *list, uint32_t n, const uint8_t *text,
                         size_t text_len, uint8_t *out, size_t cap, uint32_t *taken);

#define DH_STREAM_FRAME 16384    /* smallest limit of the data in an HTTP/2 frame that a peer may set, bytes */
#define DH_STREAM_MESSAGE 262144 /* longest message that dh_streams_send() sends, bytes */

/* A stream of an HTTP/2 connection with nothing to send: no other bytes wait for its socket. */
struct dh_stream {
    int32_t fd;          /* the connection's socket */
    uint32_t id;         /* number of the stream in its connection */
    uint32_t frame_size; /* limit of the data in a frame, bytes */
    uint32_t group;      /* streams with equal groups get equal messages */
    int64_t room;        /* data that the peer's flow-control windows still allow, bytes */
    uint64_t number;     /* last publication that the stream has got */
    uint64_t sent;       /* data sent since the stream is in the array, bytes */
    uint32_t unsent;     /* end of the last message's frames that the socket has not taken, bytes */
    uint32_t lists;      /* messages sent since the stream is in the array */
};

/*
 * dh_streams_send() - send one gRPC message, as DATA frames, to the streams of a group that have a publication.
 * @streams: @n streams; each has a connection of its own
 * @since:   publication that a stream must have to get the message
 * @number:  publication that it has then
 * @message: @len bytes; if @len is 0, nothing is sent, and only the publication counts
 * @cut:     number of streams whose socket took only a part of the message
 *
 * Leaves out streams whose windows lack room or whose last message was not taken as a whole. A stream whose socket
 * takes no byte, or has an error, stays as it was. If the socket takes a part, @unsent is the size of the rest, which
 * the caller must send before any other byte. A message longer than DH_STREAM_MESSAGE is not sent.
 *
 * Return: the number of streams that got the message.
 * Threads: any; the caller ensures that no other thread uses the array or writes to the sockets.
 * Blocks: no.
 */
uint32_t dh_streams_send(struct dh_stream *streams, uint32_t n, uint32_t group, uint64_t since, uint64_t number,
                         const uint8_t *message, uint32_t len, uint32_t *cut);

/*
 * dh_streams_behind() - count the streams that lack a publication or a part of their last message.
 * @streams: @n streams
 *
 * Return: the number of such streams.
 * Threads: any, as dh_streams_send().
 * Blocks: no.
 */
uint32_t dh_streams_behind(const struct dh_stream *streams, uint32_t n, uint64_t number);

/*
 * dh_confine() - take from this process what it does not need, before it loads a foreign library.
 * @parent:       process id of the parent; the kernel kills this process when the parent's thread that started
 *                it ends
 * @memory_bytes: limit of RLIMIT_DATA: private writable memory, thread stacks included
 *
 * The process gains no privileges by execve(2), and loses all capabilities but CAP_SYS_ADMIN, with which NVML
 * reads MIG instances; capset(2) is called only if there are others. It ignores SIGINT, SIGTERM and SIGHUP.
 *
 * Return: 0; -ESRCH: the parent has ended; -EPERM, -EINVAL as prctl(2), setrlimit(2) and capset(2).
 * Threads: the process must have one.
 * Blocks: no.
 */
int dh_confine(int parent, uint64_t memory_bytes);

/* Step of a child before execve(2), in the message of a failed one. */
enum dh_spawn_step {
    DH_SPAWN_SESSION,
    DH_SPAWN_CGROUP,
    DH_SPAWN_DESCRIPTORS,
    DH_SPAWN_USER,
    DH_SPAWN_RIGHTS,
    DH_SPAWN_EXEC
};

/* Command to start: its rights and descriptors. */
struct dh_spawn {
    uint32_t size;     /* sizeof(struct dh_spawn) */
    uint32_t version;  /* DH_VERSION */
    int64_t uid;       /* -1: the user and the groups of this process */
    int64_t gid;
    int32_t cgroup_fd; /* cgroup.procs of the child's cgroup, open for writing; -1: the cgroup of this process */
    int32_t out_fd;    /* standard output */
    int32_t err_fd;    /* standard error */
    int32_t reserved;
};

/*
 * dh_spawn() - start a command in a session of its own.
 * @argv:     path of the command and its arguments, ending with NULL
 * @envp:     its environment, ending with NULL
 * @error_fd: pipe that takes two int32_t, the enum dh_spawn_step that failed and its errno, and that ends
 *            without them when execve(2) has succeeded; the caller closes it
 *
 * The child has standard input from /dev/null, no other descriptors, the default of every signal, the working
 * directory /, no core file, and gains no privileges by execve(2). The kernel kills it when the calling thread
 * ends.
 *
 * Return: process id, which the caller collects; -EINVAL: wrong @s or no command; -errno as fork(2).
 * Threads: any.
 * Blocks: for the copy of this process's page tables.
 */
int dh_spawn(const struct dh_spawn *s, const char *const *argv, const char *const *envp, int *error_fd);

/*
 * dh_heap_one_arena() - let all threads of this process share one arena of the C library's heap.
 *
 * Each thread would otherwise keep the free memory of an arena of its own.
 *
 * Threads: before others have allocated memory.
 * Blocks: no.
 */
void dh_heap_one_arena(void);

/*
 * dh_heap_trim() - give free pages of the C library's heap back to the kernel.
 *
 * Threads: any.
 * Blocks: other threads that allocate memory, for milliseconds with a large heap.
 */
void dh_heap_trim(void);

/* cffi: end */

#endif
