/*
 * machine.h - the watch over what seldom changes in a machine, inside. Not seen by Python.
 *
 * machine.c is the thread and its clock, machine_records.c what is published, machine_roots.c the reading.
 * machine_edac.c, machine_memory.c, machine_cores.c and machine_pressure.c are one source each. A source
 * reads with dh_machine_text() and its like, and hands what it read to dh_machine_put(), which keeps the
 * record and decides whether the reader is to be woken. At the end of its pass it says with
 * dh_machine_state() how it did.
 */
#ifndef DH_MACHINE_INSIDE_H
#define DH_MACHINE_INSIDE_H

#include <stdbool.h>

#include "clock.h"
#include "drahealth.h"
#include "interrupts.h"
#include "kernfile.h"
#include "seqlock.h"
#include "worker.h"

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

/* What was last read of a node's memory blocks, to tell whether their states must be read again. */
struct dh_blocks {
    uint64_t total_kib; /* of the node, then; UINT64_MAX: read them again */
    uint64_t listed;
    uint64_t names;     /* digest of the listing */
};

struct dh_machine {
    /* constant since dh_machine_open() */
    struct dh_machine_options opt;
    int wake_fd, poke_fd;

    /* the thread's own */
    struct {
        char path[DH_MACHINE_ROOT_LEN];
        int fd;  /* O_PATH; -1 while it cannot be opened */
        int err; /* why, or 0 */
    } root[DH_ROOT_NUM];
    uint64_t now_ns;           /* of this pass */
    uint64_t slow_ns, rare_ns; /* when the last such pass was; a rare one is a slow one, too */
    uint64_t root_ns;          /* when the roots were last asked for */
    uint64_t next_ns;          /* the next pass */
    uint64_t poke_ns;          /* pokes are not heard until then */
    uint32_t settle;           /* passes that are rare ones because of a poke, this one included */
    bool slow, rare;           /* what this pass is */
    bool all;                  /* the first pass, or one after a poke: read everything; it is a rare one */
    bool first;
    bool wake;                 /* a rule can see what changed */
    bool ring;                 /* that is published, and the reader not woken yet */
    uint32_t full;             /* bit per source: it found more than there is room for */
    uint64_t late;             /* bit per field: the reader is to be woken for it when its time has come */
    uint64_t rung_ns[DH_MACHINE_FIELD_NUM]; /* when it was last woken for what comes in floods; 0: never */
    bool dimms_dirty, numas_dirty, cores_dirty; /* to be published; the head always is */

    /* the sources' own */
    bool edac_lost;            /* a listing failed */
    bool rank[DH_DIMM_MAX];    /* by place of the record: the module's directory is rank<N>, not dimm<N> */
    struct dh_blocks blocks[DH_NODE_MAX];
    struct dh_interrupts interrupts;
    int trigger[DH_MACHINE_TRIGGERS]; /* of pressure, polled for POLLPRI; -1: none. Closed at the end */

    struct dh_machine_tables work; /* the records as last read */

    /* shared with readers */
    struct dh_machine_tables pub;
    struct dh_seqlock pub_lock;

    struct dh_worker worker;
};

/* A record, as dh_machine_put() needs it. */
struct dh_machine_record {
    enum dh_machine_source source;
    uint64_t *valid;
    uint64_t *seen;
    int32_t *err;
    bool *dirty; /* of its table; NULL: the head, which is published in any case */
};

/* machine_records.c */

/* dh_machine_head_record() - the members of the head that @source reads. */
struct dh_machine_record dh_machine_head_record(struct dh_machine *m, enum dh_machine_source source);

/*
 * dh_machine_put() - the outcome of one read of one member.
 * @slot: the member; 0 while it is not valid
 * @err:  0; an errno; DH_EPARSE or DH_EFULL. What says that there is no such thing is no failure of a member
 *        that never was there: it stays absent.
 *
 * Wakes the reader as the field's row in machine_records.c says.
 *
 * Return: whether the member or its validity changed.
 */
bool dh_machine_put(struct dh_machine *m, const struct dh_machine_record *r, enum dh_machine_field field,
                    uint64_t *slot, int err, uint64_t value);

/* dh_machine_failed() - something that is there cannot be read, @err as in dh_machine_put(). */
void dh_machine_failed(struct dh_machine *m, enum dh_machine_source source, enum dh_machine_field field,
                       int err);

/* dh_machine_full() - there is more than a table has room for. None shrinks: the source fails for good. */
void dh_machine_full(struct dh_machine *m, enum dh_machine_source source, enum dh_machine_field field);

/*
 * dh_machine_state() - how a source did in the pass that ends.
 * @seen: not 0 if anything of it is there, or was
 * @lost: not 0 if anything of that cannot be read
 */
void dh_machine_state(struct dh_machine *m, enum dh_machine_source source, uint64_t seen, uint64_t lost);

/* dh_machine_wake_late() - wake the reader for what changed when it had just been woken for the same. */
void dh_machine_wake_late(struct dh_machine *m);

/* dh_machine_publish() - publish what changed, and the head. */
void dh_machine_publish(struct dh_machine *m);

/* dh_machine_ring() - wake the reader, if a rule can see what was published. */
void dh_machine_ring(struct dh_machine *m);

/* machine_roots.c */

/* dh_machine_roots_open() - open the roots, if it is time. All that is below one that just came is new. */
void dh_machine_roots_open(struct dh_machine *m);

/*
 * dh_machine_root_err() - why one of the roots in the bit set @roots cannot be opened; @field says which.
 * Return: 0; ENOENT only if all that is wrong is that one does not exist.
 */
int dh_machine_root_err(const struct dh_machine *m, uint32_t roots, enum dh_machine_field *field);

/*
 * dh_machine_text() - read a file once, as dh_file_read(). Below a root that cannot be opened nothing is.
 * @format: its path below @root
 */
__attribute__((format(printf, 5, 6)))
int64_t dh_machine_text(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                        const char *format, ...);

/* dh_machine_text_all() - the same to the end, as dh_file_read_all(). */
int64_t dh_machine_text_all(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                            const char *path);

/* dh_machine_number() - read a file that holds one number. Return: 0, an errno, or DH_EPARSE. */
__attribute__((format(printf, 4, 5)))
int dh_machine_number(struct dh_machine *m, enum dh_machine_root root, uint64_t *value, const char *format,
                      ...);

/* dh_machine_list() - list a directory of sysfs, as dh_dir_list(). Return: 0 or an errno. */
int dh_machine_list(struct dh_machine *m, const char *path,
                    void (*each)(void *arg, const char *name, size_t len), void *arg);

/* dh_machine_err() - a negative return of dh_machine_text() as dh_machine_put() wants it; 0 if it is none. */
static inline int dh_machine_err(int64_t n)
{
    return n >= 0 ? 0 : n <= DH_EABI ? (int)n : (int)-n;
}

/* One pass over one source, called at its pace: every pass, every slow one, every rare one. */
void dh_machine_edac_pass(struct dh_machine *m);     /* every */
void dh_machine_memory_pass(struct dh_machine *m);   /* slow */
void dh_machine_cores_pass(struct dh_machine *m);    /* rare */
void dh_machine_pressure_pass(struct dh_machine *m); /* slow */

/*
 * dh_machine_pressure_fired() - trigger[@which] has something to say.
 * @revents: of poll(2). With POLLERR it is gone, and is closed here: it would not keep silent.
 *
 * Return: whether pressure was read, which counts as a pass over it.
 */
bool dh_machine_pressure_fired(struct dh_machine *m, int which, short revents);

#endif
