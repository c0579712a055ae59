/* machine.h - functions shared by the files of the machine watch. Not seen by Python. */
#ifndef DH_MACHINE_INSIDE_H
#define DH_MACHINE_INSIDE_H

#include "machine/machine_state.h"

/*
 * Rare passes after a rescan request, and after a lack of descriptors or memory: a recovery needs several clean passes, and
 * need not wait for rare_ns.
 */
#define RESCAN_PASSES 3

/* A record, as a parameter of dh_machine_store(). */
struct dh_machine_record {
    enum dh_machine_source source;
    uint64_t *valid;
    uint64_t *seen;
    uint64_t *assumed; /* bits of `seen` that are only assumed: every read failed for lack of descriptors or
                          memory */
    int32_t *err;
    bool *dirty; /* marks the record's table; NULL: the head, which is always published */
};

/* machine_records.c */

/* dh_machine_head_record() - return the part of the head that @source reads. */
struct dh_machine_record dh_machine_head_record(struct dh_machine *m, enum dh_machine_source source);

/*
 * dh_machine_store() - store the outcome of reading one member.
 * @slot: the member; set to 0 while it is not valid
 * @err:  0; an errno; DH_EPARSE or DH_EFULL. "No such file" is no failure of a member that never existed: it
 *        stays absent.
 *
 * Wakes the reader according to the field's row in machine_records.c.
 *
 * Return: whether the member or its validity changed.
 */
bool dh_machine_store(struct dh_machine *m, const struct dh_machine_record *r, enum dh_machine_field field,
                      uint64_t *slot, int err, uint64_t value);

/* dh_machine_failed() - note that something existing cannot be read; @err as in dh_machine_store(). */
void dh_machine_failed(struct dh_machine *m, enum dh_machine_source source, enum dh_machine_field field,
                       int err);

/* dh_machine_full() - note that a table has no room. Tables never shrink: the source fails permanently. */
void dh_machine_full(struct dh_machine *m, enum dh_machine_source source, enum dh_machine_field field);

/*
 * dh_machine_state() - set the state of a source at the end of its pass.
 * @seen:       not 0 if a file of the source exists or existed
 * @unreadable: not 0 if such a file cannot be read
 */
void dh_machine_state(struct dh_machine *m, enum dh_machine_source source, uint64_t seen, uint64_t unreadable);

/*
 * dh_machine_wake_deferred() - wake the reader for changes that came too soon after the last wake for the
 * same field.
 */
void dh_machine_wake_deferred(struct dh_machine *m);

/* dh_machine_pause_rescans() - ignore requests for a while after a pass that read everything. */
void dh_machine_pause_rescans(struct dh_machine *m);

/* dh_machine_publish() - publish changed tables and the head. */
void dh_machine_publish(struct dh_machine *m);

/* dh_machine_notify() - wake the reader if the publication contains a change that wakes it. */
void dh_machine_notify(struct dh_machine *m);

/* machine_roots.c */

/* dh_machine_roots_open() - open the roots, if due. Everything below a root that just appeared is new. */
void dh_machine_roots_open(struct dh_machine *m);

/*
 * dh_machine_root_err() - return why one of the roots in the bit set @roots cannot be opened; @field names
 * it.
 *
 * Return: 0; ENOENT only if the sole problem is a root that does not exist.
 */
int dh_machine_root_err(const struct dh_machine *m, uint32_t roots, enum dh_machine_field *field);

/*
 * dh_machine_read_text() - read a file once, as dh_file_read(). -ENOENT if the root cannot be opened.
 * @format: path below @root
 */
__attribute__((format(printf, 5, 6)))
int64_t dh_machine_read_text(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                             const char *format, ...);

/* dh_machine_read_text_all() - read a file to its end, as dh_file_read_all(). */
int64_t dh_machine_read_text_all(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                                 const char *path);

/* dh_machine_read_number() - read a file with one number. Return: 0, an errno, or DH_EPARSE. */
__attribute__((format(printf, 4, 5)))
int dh_machine_read_number(struct dh_machine *m, enum dh_machine_root root, uint64_t *value, const char *format,
                           ...);

/* dh_machine_list_dir() - list a directory of sysfs, as dh_dir_list(). Return: 0 or an errno. */
int dh_machine_list_dir(struct dh_machine *m, const char *path,
                        void (*each)(void *arg, const char *name, size_t len), void *arg);

/*
 * dh_machine_to_err() - convert a return value of dh_machine_read_text() to an error for dh_machine_store().
 */
static inline int dh_machine_to_err(int64_t n)
{
    return n >= 0 ? 0 : n <= DH_EABI ? (int)n : (int)-n;
}

/* The passes of the sources, called every pass, in slow passes, or in rare passes. */
void dh_machine_edac_pass(struct dh_machine *m);     /* every pass */
void dh_machine_memory_pass(struct dh_machine *m);   /* slow passes */
void dh_machine_cores_pass(struct dh_machine *m);    /* rare passes */
void dh_machine_pressure_pass(struct dh_machine *m); /* slow passes */

/*
 * dh_machine_pressure_fired() - handle an event of trigger[@which].
 * @revents: of poll(2). After POLLERR the trigger is closed here: it would fire for ever.
 *
 * Return: whether pressure was read, which counts as a pass over it.
 */
bool dh_machine_pressure_fired(struct dh_machine *m, int which, short revents);

#endif
