/*
 * machine_state.h - state of the machine watch. Not seen by Python.
 *
 * machine.c is the thread, machine_records.c stores and publishes, machine_roots.c reads files.
 * machine_edac.c, machine_memory.c, machine_cores.c and machine_pressure.c are one source each. A source
 * reads with dh_machine_read_text() and similar functions, and passes the results to dh_machine_store(),
 * which decides whether to wake the reader. At the end of its pass it calls dh_machine_state().
 */
#ifndef DH_MACHINE_STATE_H
#define DH_MACHINE_STATE_H

#include <stdbool.h>

#include "core/clock.h"
#include "drahealth.h"
#include "machine/interrupts.h"
#include "core/kernfile.h"
#include "core/seqlock.h"
#include "core/worker.h"

#define DH_MACHINE_ROOT_LEN 201
#define DH_MACHINE_TRIGGERS 3
#define DH_MACHINE_BIT(field) (1ull << (field))

_Static_assert(_Alignof(struct dh_machine_head) == 8 && _Alignof(struct dh_dimm) == 8 &&
               _Alignof(struct dh_numa) == 8 && _Alignof(struct dh_core) == 8,
               "records are aligned to 8");
_Static_assert(DH_MACHINE_FIELD_NUM <= 64, "a field is a bit");

struct dh_machine_tables {
    struct dh_machine_head head;
    struct dh_dimm dimm[DH_DIMM_MAX];
    struct dh_numa numa[DH_NODE_MAX];
    struct dh_core core[DH_CORE_MAX];
};

enum dh_machine_root { DH_ROOT_SYSFS, DH_ROOT_PROCFS, DH_ROOT_NUM };

/* The last scan of a node's memory blocks; shows whether their states must be read again. */
struct dh_blocks {
    uint64_t total_kib; /* of the node at that time; UINT64_MAX: read the states again */
    uint64_t listed;
    uint64_t names;     /* digest of the listing */
};

struct dh_machine {
    /* constant since dh_machine_open() */
    struct dh_machine_options opt;
    int wake_fd, rescan_fd;

    /* used by the thread only */
    struct {
        char path[DH_MACHINE_ROOT_LEN];
        int fd;  /* O_PATH; -1 while it cannot be opened */
        int err; /* why it cannot be opened, or 0 */
    } root[DH_ROOT_NUM];
    uint64_t now_ns;           /* start of this pass */
    uint64_t slow_ns, rare_ns; /* last slow pass and last rare pass; a rare pass is also a slow one */
    uint64_t root_ns;          /* when the roots were last opened */
    uint64_t next_ns;          /* the next pass */
    uint64_t source_start_ns;  /* when the source that is being read began */
    struct dh_durations durations[DH_MACHINE_SOURCE_NUM]; /* read by any thread; see core/durations.h */
    uint64_t began_cpu_ns;     /* CPU time of the thread when it began to read everything */
    uint64_t rescan_after_ns;  /* rescan requests are ignored until then */
    uint32_t settle_passes;    /* rare passes left because of a rescan request or failure, including this one */
    bool slow, rare;           /* kind of this pass */
    bool read_all;             /* the first pass, or a requested rescan: read everything; implies a rare
                                  pass */
    bool first;
    bool wake;                 /* a change that wakes the reader was stored */
    bool notify_due;                 /* a change that wakes the reader was published */
    uint32_t full;             /* bit per source: a table has no room for all that it found */
    uint64_t deferred;             /* bit per field: the reader is to be woken for it when slow_ns has passed */
    uint64_t notified_ns[DH_MACHINE_FIELD_NUM]; /* last wake for a rate-limited field; 0: never */
    bool dimms_dirty, numas_dirty, cores_dirty; /* table to be published; the head always is */

    /* used by the sources only */
    uint64_t head_assumed, dimm_assumed[DH_DIMM_MAX], numa_assumed[DH_NODE_MAX], core_assumed[DH_CORE_MAX];
    bool edac_failed;            /* a listing failed */
    bool rank[DH_DIMM_MAX];      /* by index of the record: the module's directory is rank<N>, not dimm<N> */
    struct dh_blocks blocks[DH_NODE_MAX];
    struct dh_interrupts interrupts;
    int trigger[DH_MACHINE_TRIGGERS]; /* pressure triggers, polled for POLLPRI; -1: none. Closed at the end */

    struct dh_machine_tables work; /* the records as last read */

    /* shared with readers */
    struct dh_machine_tables pub;
    struct dh_seqlock pub_lock;

    struct dh_worker worker;
};

#endif
