/*
 * hugepages.c - the hugepage pools of the machine and of each NUMA node, for every page size.
 *
 * Source: /sys/kernel/mm/hugepages/hugepages-<n>kB and node/node<N>/hugepages/... [pages]. The kernel never
 * notifies of changes, so the files are kept open. The sizes of the nodes' pools are read every pass. Free
 * and reserved pages are not urgent, and the machine's pools are the sums of the nodes': these are read every
 * second, and when a size has changed. A pool without pages has no free, surplus or reserved ones.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/sampler.h"
#include "core/text.h"

/* How often a pool that changes during the read is read in one pass. */
#define REREAD_MAX 4

#define POOL_USE_PERIOD_NS DH_NS

struct pool_member {
    enum dh_field field;
    const char *file;
    size_t offset;
    bool machine_only;
    bool is_size; /* size of the pool; nr includes surplus pages */
    bool is_part; /* a number of pages of the pool: 0 if nr is 0 */
};

static const struct pool_member members[5] = {
    { DH_POOL_NR, "nr_hugepages", offsetof(struct dh_pool, nr), false, true, false },
    { DH_POOL_FREE, "free_hugepages", offsetof(struct dh_pool, free), false, false, true },
    { DH_POOL_SURPLUS, "surplus_hugepages", offsetof(struct dh_pool, surplus), false, true, true },
    { DH_POOL_RESERVED, "resv_hugepages", offsetof(struct dh_pool, reserved), true, false, true },
    { DH_POOL_OVERCOMMIT, "nr_overcommit_hugepages", offsetof(struct dh_pool, overcommit), true, false, false },
};

struct listing {
    const char *dir;
    int32_t node;
};

static void pool_add(struct dh_sampler *s, const struct listing *in, const char *name, uint64_t kib)
{
    struct dh_tables *t = s->work;
    struct dh_pool *pool = &t->pool[t->head.pools];

    for (uint32_t i = 0; i < t->head.pools; i++)
        if (t->pool[i].node == in->node && t->pool[i].size_kib == kib)
            return;
    if (t->head.pools == DH_POOL_MAX) {
        dh_source_full(s, DH_SOURCE_HUGEPAGES, DH_POOL_NR);
        return;
    }
    for (int m = 0; m < 5; m++) {
        struct dh_cached_file *f = &s->pool_file[t->head.pools][m];

        if (in->node != DH_MACHINE && members[m].machine_only)
            continue;
        if (dh_cached_file_init(f, 64, "%s/%s/%s", in->dir, name, members[m].file)) {
            while (m--) /* out of memory: retried at the next resync */
                dh_cached_file_close(&s->pool_file[t->head.pools][m]);
            return;
        }
    }
    pool->node = in->node;
    pool->size_kib = kib;
    s->pools_of_nodes |= in->node != DH_MACHINE;
    dh_pool_mark_dirty(s, t->head.pools++);
    s->head_dirty = true;
}

static void size_found(struct dh_sampler *s, void *arg, const char *name, size_t len)
{
    uint64_t kib;

    if (!dh_text_hugepage_dir(name, len, &kib))
        pool_add(s, arg, name, kib);
}

static void sizes_list(struct dh_sampler *s, struct listing in)
{
    int err = -dh_sampler_list_dir(s, s->sysfs_fd, in.dir, size_found, &in);

    if (!err || dh_is_absence(err))
        return;
    s->pools_failed = true;
    dh_source_failed(s, DH_SOURCE_HUGEPAGES, DH_POOL_NR, err);
}

static void pools_find(struct dh_sampler *s)
{
    const struct listing machine = { "kernel/mm/hugepages", DH_MACHINE };
    char dir[64];

    s->pools_failed = false;
    sizes_list(s, machine);
    for (uint32_t i = 0; i < s->work->head.nodes; i++) {
        const struct listing node = { dir, (int32_t)s->work->node[i].node };

        snprintf(dir, sizeof(dir), "devices/system/node/node%d/hugepages", node.node);
        sizes_list(s, node);
    }
}

static bool member_read(struct dh_sampler *s, struct dh_pool *pool, struct dh_cached_file *f,
                        const struct pool_member *m)
{
    uint64_t *slot = (uint64_t *)(void *)((char *)pool + m->offset);
    uint64_t value = 0;

    switch (dh_cached_file_read(s, f)) {
    case DH_READ_SAME:
        return false;
    case DH_READ_NEW:
        f->err = dh_text_u64(f->last, f->len, &value);
        break;
    case DH_READ_FAILED:
        if (!f->seen)
            return dh_store_absence(s, &pool->valid, &pool->seen, m->field);
        break;
    }
    if (f->err) {
        if (pool->err != f->err)
            dh_pool_mark_dirty(s, (uint32_t)(pool - s->work->pool));
        pool->err = f->err;
        dh_source_failed(s, DH_SOURCE_HUGEPAGES, m->field, f->err);
    }
    return dh_store_reading(s, &pool->valid, &pool->seen, m->field, slot, f->err, value);
}

/* Return whether a pool is read in every pass: a node's pool, or the machine's if it has no nodes. */
static bool is_read_each_pass(const struct dh_sampler *s, uint32_t i)
{
    return s->work->pool[i].node != DH_MACHINE || !s->pools_of_nodes;
}

/* Return whether a member is known to be 0 without a read: its pool has no pages. */
static bool is_known(const struct dh_pool *pool, const struct pool_member *m)
{
    const uint64_t both = DH_FIELD_BIT(DH_POOL_NR) | DH_FIELD_BIT(m->field);

    return m->is_part && (pool->valid & both) == both && !pool->nr &&
           !*(const uint64_t *)(const void *)((const char *)pool + m->offset);
}

/*
 * Read the size of a pool or, with @read_all and after a change, all members. Return: whether anything
 * changed.
 */
static bool pool_read(struct dh_sampler *s, uint32_t i, bool read_all)
{
    const struct dh_pool *pool = &s->work->pool[i];
    bool changed = true, any_changed = false;

    /* two files make up the size: read them until nothing changes in between */
    for (int tries = 0; changed && tries < REREAD_MAX; tries++) {
        changed = false;
        for (int m = 0; m < 5; m++) {
            bool is_due = members[m].is_size || read_all || any_changed;

            if (is_due && (s->probe_absent || !is_known(pool, &members[m])))
                changed |= member_read(s, &s->work->pool[i], &s->pool_file[i][m], &members[m]);
            any_changed |= changed;
        }
    }
    if (any_changed)
        dh_pool_mark_dirty(s, i);
    return any_changed;
}

void dh_hugepages_pass(struct dh_sampler *s)
{
    struct dh_tables *t = s->work;
    bool read_all;
    uint64_t unreadable = 0;

    if (s->sysfs_fd < 0)
        return;
    if (s->resync || s->pools_failed || (s->probe_absent && !t->head.pools))
        pools_find(s);
    s->pool_use_ns += s->opt.period_ns;
    read_all = s->probe_absent || dh_is_due(s->pool_use_ns, 0, POOL_USE_PERIOD_NS, s->opt.period_ns);
    if (read_all)
        s->pool_use_ns = 0;
    for (uint32_t i = t->head.pools; i--;) { /* descending: the machine's pools were found first, and are read
                                                after the nodes' */
        if (read_all || is_read_each_pass(s, i))
            read_all |= pool_read(s, i, read_all);
        unreadable |= t->pool[i].seen & ~t->pool[i].valid;
    }
    if (unreadable || s->pools_failed)
        dh_source_state(s, DH_SOURCE_HUGEPAGES, DH_STATE_FAILING);
    else
        dh_source_state(s, DH_SOURCE_HUGEPAGES, t->head.pools ? DH_STATE_OK : DH_STATE_ABSENT);
}

int64_t dh_hugepages_lower_bound(const struct dh_sampler *s)
{
    int64_t reads = 0;

    for (uint32_t i = s->work->head.pools; i--;)
        for (int m = 0; is_read_each_pass(s, i) && m < 5; m++)
            reads += members[m].is_size && !is_known(&s->work->pool[i], &members[m]) &&
                     dh_cached_file_read_bare(&s->pool_file[i][m]);
    return reads;
}
