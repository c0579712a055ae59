/*
 * hugepages.c - the hugepage pools, of the machine and of each NUMA node, every size.
 *
 * Source: /sys/kernel/mm/hugepages/hugepages-<n>kB and node/node<N>/hugepages/... [pages]. The
 * kernel never notifies of a change in them, so they are held open. How large each node's pools are is read
 * every pass. Who has the pages decides nothing by the moment, and the machine's pools are the sums of the
 * nodes': these are read every second, and when a size has changed.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "sampler.h"
#include "text.h"

/* A pool that changes while it is read is read again, so often at most in one pass. */
#define SETTLE_TRIES 4

#define USE_PERIOD_NS DH_NS

struct pool_member {
    enum dh_field field;
    const char *file;
    size_t offset;
    bool machine_only;
    bool size; /* of the pool; nr counts surplus pages too */
};

static const struct pool_member members[5] = {
    { DH_POOL_NR, "nr_hugepages", offsetof(struct dh_pool, nr), false, true },
    { DH_POOL_FREE, "free_hugepages", offsetof(struct dh_pool, free), false, false },
    { DH_POOL_SURPLUS, "surplus_hugepages", offsetof(struct dh_pool, surplus), false, true },
    { DH_POOL_RESERVED, "resv_hugepages", offsetof(struct dh_pool, reserved), true, false },
    { DH_POOL_OVERCOMMIT, "nr_overcommit_hugepages", offsetof(struct dh_pool, overcommit), true, false },
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
        struct dh_held *f = &s->pool_file[t->head.pools][m];

        if (in->node != DH_MACHINE && members[m].machine_only)
            continue;
        if (dh_held_init(f, 64, "%s/%s/%s", in->dir, name, members[m].file)) {
            while (m--) /* out of memory: tried again at the next resync */
                dh_held_close(&s->pool_file[t->head.pools][m]);
            return;
        }
    }
    pool->node = in->node;
    pool->size_kib = kib;
    s->pools_of_nodes |= in->node != DH_MACHINE;
    dh_pool_touch(s, t->head.pools++);
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
    int err = -dh_list_dir(s, s->sysfs_fd, in.dir, size_found, &in);

    if (!err || dh_is_absence(err))
        return;
    s->pools_lost = true;
    dh_source_failed(s, DH_SOURCE_HUGEPAGES, DH_POOL_NR, err);
}

static void pools_find(struct dh_sampler *s)
{
    const struct listing machine = { "kernel/mm/hugepages", DH_MACHINE };
    char dir[64];

    s->pools_lost = false;
    sizes_list(s, machine);
    for (uint32_t i = 0; i < s->work->head.nodes; i++) {
        const struct listing node = { dir, (int32_t)s->work->node[i].node };

        snprintf(dir, sizeof(dir), "devices/system/node/node%d/hugepages", node.node);
        sizes_list(s, node);
    }
}

static bool member_read(struct dh_sampler *s, struct dh_pool *pool, struct dh_held *f,
                        const struct pool_member *m)
{
    uint64_t *slot = (uint64_t *)(void *)((char *)pool + m->offset);
    uint64_t value = 0;

    switch (dh_held_read(s, f)) {
    case DH_READ_SAME:
        return false;
    case DH_READ_NEW:
        f->err = dh_text_u64(f->last, f->len, &value);
        break;
    case DH_READ_FAILED:
        if (!f->seen)
            return false;
        break;
    }
    if (f->err) {
        if (pool->err != f->err)
            dh_pool_touch(s, (uint32_t)(pool - s->work->pool));
        pool->err = f->err;
        dh_source_failed(s, DH_SOURCE_HUGEPAGES, m->field, f->err);
    }
    return dh_reading(s, &pool->valid, &pool->seen, m->field, slot, f->err, value);
}

/* Whether a pool is read in every pass: a node's, or the machine's where it has no nodes. */
static bool is_judged(const struct dh_sampler *s, uint32_t i)
{
    return s->work->pool[i].node != DH_MACHINE || !s->pools_of_nodes;
}

/* Read one pool: its size or @whole, and whole from a change on. Whether anything changed. */
static bool pool_read(struct dh_sampler *s, uint32_t i, bool whole)
{
    bool changed = true, ever = false;

    /* the size is two files: read on until both are of one moment */
    for (int tries = 0; changed && tries < SETTLE_TRIES; tries++) {
        changed = false;
        for (int m = 0; m < 5; m++) {
            if (members[m].size || whole || ever)
                changed |= member_read(s, &s->work->pool[i], &s->pool_file[i][m], &members[m]);
            ever |= changed;
        }
    }
    if (ever)
        dh_pool_touch(s, i);
    return ever;
}

void dh_hugepages_pass(struct dh_sampler *s)
{
    struct dh_tables *t = s->work;
    bool whole;
    uint64_t lost = 0;

    if (s->sysfs_fd < 0)
        return;
    if (s->resync || s->pools_lost || (s->absent && !t->head.pools))
        pools_find(s);
    s->use_ns += s->opt.period_ns;
    whole = s->absent || dh_is_due(s->use_ns, 0, USE_PERIOD_NS, s->opt.period_ns);
    if (whole)
        s->use_ns = 0;
    for (uint32_t i = t->head.pools; i--;) { /* the machine's, found first, after the nodes' */
        if (whole || is_judged(s, i))
            whole |= pool_read(s, i, whole);
        lost |= t->pool[i].seen & ~t->pool[i].valid;
    }
    if (lost || s->pools_lost)
        dh_source_state(s, DH_SOURCE_HUGEPAGES, DH_STATE_FAILING);
    else
        dh_source_state(s, DH_SOURCE_HUGEPAGES, t->head.pools ? DH_STATE_OK : DH_STATE_ABSENT);
}

int64_t dh_hugepages_floor(const struct dh_sampler *s)
{
    int64_t reads = 0;

    for (uint32_t i = s->work->head.pools; i--;)
        for (int m = 0; is_judged(s, i) && m < 5; m++)
            reads += members[m].size && dh_held_floor(&s->pool_file[i][m]);
    return reads;
}
