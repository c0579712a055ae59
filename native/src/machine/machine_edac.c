/*
 * machine_edac.c - reads the errors that memory controllers count, per controller and per memory module.
 *
 * Source: /sys/devices/system/edac/mc/mc<N>/{ce_count,ue_count,mc_name} and, below it,
 * {dimm,rank}<M>/{dimm_ce_count,dimm_ue_count,dimm_label,dimm_location} [errors since the driver was loaded,
 * or since a write to reset_counters]. Absent in virtual machines and without an EDAC driver.
 *
 * The counts of a controller include those of its modules and unattributed errors: so only they are read in
 * every pass, two files per controller, and the modules' after a change. The files are opened each time, for
 * 5 us each: with 16 controllers, as in a big host, that is 0.02 % of a core. Kept open, they would cost less
 * than a tenth of that, and 140 KiB of kernel memory.
 */
#include <stdio.h>
#include <string.h>

#include "machine/machine.h"
#include "core/text.h"

#define MC "devices/system/edac/mc"

static bool is_controller(const struct dh_dimm *d)
{
    return d->dimm == DH_CONTROLLER;
}

/* Find or add the record of a module or controller; NULL if there is no room. */
static struct dh_dimm *record_find(struct dh_machine *m, uint32_t mc, uint32_t dimm)
{
    struct dh_machine_tables *t = &m->work;

    for (uint32_t i = 0; i < t->head.dimms; i++)
        if (t->dimm[i].mc == mc && t->dimm[i].dimm == dimm)
            return &t->dimm[i];
    if (t->head.dimms == DH_DIMM_MAX) {
        dh_machine_full(m, DH_MACHINE_EDAC, DH_EDAC_LIST);
        return NULL;
    }
    t->dimm[t->head.dimms].mc = mc;
    t->dimm[t->head.dimms].dimm = dimm;
    m->dimms_dirty = m->wake = true;
    return &t->dimm[t->head.dimms++];
}

/* Write the path of a file. The controller's layout decides whether modules are named dimm<N> or rank<N>. */
static const char *file_path(const struct dh_machine *m, const struct dh_dimm *d, const char *file,
                             char path[96])
{
    const char *kind = m->rank[d - m->work.dimm] ? "rank" : "dimm";

    if (is_controller(d))
        snprintf(path, 96, MC "/mc%u/%s", d->mc, file);
    else
        snprintf(path, 96, MC "/mc%u/%s%u/%s", d->mc, kind, d->dimm, file);
    return path;
}

/* Copy a name of the firmware without trailing blanks; bytes other than printable ASCII become "?". */
static void name_clean(const char *text, size_t n, char name[DH_LABEL_LEN])
{
    memset(name, 0, DH_LABEL_LEN);
    while (n && (text[n - 1] == '\n' || text[n - 1] == ' '))
        n--;
    for (size_t i = 0; i < n && i < DH_LABEL_LEN - 1; i++)
        name[i] = (text[i] < ' ' || text[i] > '~') ? '?' : text[i];
}

/* Read a name. A failure keeps the old name: only counts can be unreadable. */
static void name_read(struct dh_machine *m, struct dh_dimm *d, const char *file, char name[DH_LABEL_LEN])
{
    char path[96], text[256], now[DH_LABEL_LEN];
    int64_t n = dh_machine_read_text(m, DH_ROOT_SYSFS, text, sizeof(text), "%s", file_path(m, d, file, path));

    if (n < 0)
        return;
    name_clean(text, (size_t)n, now);
    if (!memcmp(name, now, sizeof(now)))
        return;
    memcpy(name, now, sizeof(now));
    m->dimms_dirty = m->wake = true;
}

static bool count_read(struct dh_machine *m, struct dh_dimm *d, enum dh_machine_field field, const char *file,
                       uint64_t *slot)
{
    struct dh_machine_record r = { DH_MACHINE_EDAC, &d->valid, &d->seen, &m->dimm_assumed[d - m->work.dimm],
                                   &d->err, &m->dimms_dirty };
    uint64_t value = 0;
    char path[96];
    int err = dh_machine_read_number(m, DH_ROOT_SYSFS, &value, "%s", file_path(m, d, file, path));

    return dh_machine_store(m, &r, field, slot, err, value);
}

/* Read the counts of a controller or module. Return: whether they changed. */
static bool counts_read(struct dh_machine *m, struct dh_dimm *d)
{
    bool changed = count_read(m, d, DH_DIMM_CE, is_controller(d) ? "ce_count" : "dimm_ce_count", &d->ce);

    return count_read(m, d, DH_DIMM_UE, is_controller(d) ? "ue_count" : "dimm_ue_count", &d->ue) || changed;
}

struct listing {
    struct dh_machine *m;
    uint32_t mc;
};

static void module_found(void *arg, const char *name, size_t len)
{
    const struct listing *in = arg;
    struct dh_machine *m = in->m;
    uint32_t number;
    bool is_rank = !dh_text_numbered(name, len, "rank", &number);
    struct dh_dimm *d;

    if ((!is_rank && dh_text_numbered(name, len, "dimm", &number)) || number == DH_CONTROLLER)
        return;
    d = record_find(m, in->mc, number);
    if (!d)
        return;
    m->rank[d - m->work.dimm] = is_rank;
    name_read(m, d, "dimm_label", d->label);
    name_read(m, d, "dimm_location", d->location);
}

static void list(struct dh_machine *m, const char *path, void (*found)(void *, const char *, size_t),
                 uint32_t mc)
{
    struct listing in = { m, mc };
    int err = dh_machine_list_dir(m, path, found, &in);

    if (!err || dh_is_absence(err))
        return;
    m->edac_failed = true;
    dh_machine_failed(m, DH_MACHINE_EDAC, DH_EDAC_LIST, err);
}

static void controller_found(void *arg, const char *name, size_t len)
{
    struct dh_machine *m = ((const struct listing *)arg)->m;
    struct dh_dimm *d;
    uint32_t mc;
    char path[64];

    if (dh_text_numbered(name, len, "mc", &mc))
        return;
    d = record_find(m, mc, DH_CONTROLLER);
    if (!d)
        return;
    name_read(m, d, "mc_name", d->label);
    snprintf(path, sizeof(path), MC "/mc%u", mc);
    list(m, path, module_found, mc);
}

static void modules_read(struct dh_machine *m, uint32_t mc)
{
    for (uint32_t i = 0; i < m->work.head.dimms; i++)
        if (m->work.dimm[i].mc == mc && !is_controller(&m->work.dimm[i]))
            counts_read(m, &m->work.dimm[i]);
}

void dh_machine_edac_pass(struct dh_machine *m)
{
    struct dh_machine_tables *t = &m->work;
    uint64_t seen = 0, unreadable = 0;
    bool is_read;

    if (m->rare || m->edac_failed) {
        m->edac_failed = false;
        list(m, MC, controller_found, 0);
    }
    for (uint32_t i = 0; i < t->head.dimms; i++)
        if (is_controller(&t->dimm[i]) && (counts_read(m, &m->work.dimm[i]) || m->rare))
            modules_read(m, t->dimm[i].mc);
    for (uint32_t i = 0; i < t->head.dimms; i++) {
        seen |= t->dimm[i].seen;
        unreadable |= t->dimm[i].seen & ~t->dimm[i].valid;
    }
    dh_machine_state(m, DH_MACHINE_EDAC, seen, unreadable | m->edac_failed);
    is_read = t->head.dimms || m->edac_failed;
    t->head.source[DH_MACHINE_EDAC].period_ns = is_read ? m->opt.period_ns : m->opt.slow_ns;
}
