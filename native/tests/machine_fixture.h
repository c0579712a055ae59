/*
 * machine_fixture.h - a machine watch over files: opened, passed on the caller's thread, and read.
 *
 * Time passes when a test calls mx_later(), which changes the watch's time stamps. Include once per program,
 * after check.h.
 */
#ifndef DH_MACHINE_FIXTURE_H
#define DH_MACHINE_FIXTURE_H

#include <sys/eventfd.h>

#include "fixture.h"
#include "machine/machine.h"

struct mx {
    struct dh_machine *m;
    struct dh_machine_head *head;
    size_t cap;
    int wake_fd;
};

static inline struct dh_machine_options mx_options(void)
{
    return (struct dh_machine_options){ sizeof(struct dh_machine_options), DH_VERSION, DH_NS, 10 * DH_NS,
                                        60 * DH_NS };
}

/* Open a watch over sys/ and proc/ of the fixture. */
static inline struct mx mx_open(const struct dh_machine_options *o)
{
    struct mx x = { .wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) };
    char sysfs[FX_PATH], procfs[FX_PATH];

    snprintf(sysfs, sizeof(sysfs), "%s/sys", fx_root);
    snprintf(procfs, sizeof(procfs), "%s/proc", fx_root);
    fx_must(!dh_machine_open(o, sysfs, procfs, x.wake_fd, &x.m), "dh_machine_open");
    x.cap = dh_machine_size(x.m);
    x.head = aligned_alloc(8, x.cap);
    fx_must(x.head != NULL, "aligned_alloc");
    return x;
}

static inline void mx_close(struct mx *x)
{
    CHECK_INT(dh_machine_stop(x->m, FX_PATIENCE_NS), 0);
    close(x->wake_fd);
    free(x->head);
}

static inline void mx_read(struct mx *x)
{
    EVENTUALLY(dh_machine_read(x->m, x->head, x->cap) > 0); /* repeated as in fx_read() */
}

static inline void mx_pass(struct mx *x)
{
    CHECK_INT(dh_machine_pass(x->m), 0);
    mx_read(x);
}

/* Let time pass, and run a pass. */
static inline void mx_later(struct mx *x, uint64_t ns)
{
    x->m->slow_ns -= ns;
    x->m->rare_ns -= ns;
    x->m->root_ns -= ns;
    for (uint32_t i = 0; i < DH_MACHINE_FIELD_NUM; i++)
        if (x->m->notified_ns[i])
            x->m->notified_ns[i] -= ns;
    mx_pass(x);
}

static inline void mx_rescan(struct mx *x)
{
    fx_must(!eventfd_write(dh_machine_rescan_fd(x->m), 1), "eventfd_write");
    mx_pass(x);
}

/*
 * Return whether the reader was woken since the last call.
 */
static inline bool mx_woken(struct mx *x)
{
    uint64_t n;

    return read(x->wake_fd, &n, sizeof(n)) == sizeof(n);
}

static inline const struct dh_dimm *mx_dimms(const struct mx *x)
{
    return (const struct dh_dimm *)(const void *)(x->head + 1);
}

/*
 * Return the record of a module or, with DH_CONTROLLER, of its controller; an empty record if there is none.
 */
static inline const struct dh_dimm *mx_dimm(const struct mx *x, uint32_t mc, uint32_t dimm)
{
    static const struct dh_dimm none;

    for (uint32_t i = 0; i < x->head->dimms; i++)
        if (mx_dimms(x)[i].mc == mc && mx_dimms(x)[i].dimm == dimm)
            return &mx_dimms(x)[i];
    return &none;
}

static inline const struct dh_numa *mx_numas(const struct mx *x)
{
    return (const struct dh_numa *)(const void *)(mx_dimms(x) + x->head->dimms);
}

static inline const struct dh_numa *mx_numa(const struct mx *x, uint32_t node)
{
    static const struct dh_numa none;

    for (uint32_t i = 0; i < x->head->numas; i++)
        if (mx_numas(x)[i].node == node)
            return &mx_numas(x)[i];
    return &none;
}

static inline const struct dh_core *mx_cores(const struct mx *x)
{
    return (const struct dh_core *)(const void *)(mx_numas(x) + x->head->numas);
}

static inline const struct dh_core *mx_core(const struct mx *x, uint32_t cpu)
{
    static const struct dh_core none;

    for (uint32_t i = 0; i < x->head->cores; i++)
        if (mx_cores(x)[i].cpu == cpu)
            return &mx_cores(x)[i];
    return &none;
}

static inline const struct dh_source *mx_source(const struct mx *x, enum dh_machine_source source)
{
    return &x->head->source[source];
}

#endif
