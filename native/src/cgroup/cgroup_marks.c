/* cgroup_marks.c - marks on a group's files: due to be read, or without a watch. */
#include "cgroup/cgroups.h"

/* Return the files of a group about which the kernel notifies, also by a notification about its pod. */
uint64_t dh_cg_watched(const struct dh_cgroups *c, uint32_t slot)
{
    const struct dh_cg_group *p = &c->group[slot];

    return p->watched | (p->parent ? c->group[p->parent - 1].watched & ~c->local : 0);
}

/* Return whether no page of a size can be in use: the machine has none, and may create none. */
static bool is_idle(const struct dh_sampler *s, uint64_t size_kib)
{
    const uint64_t both = DH_FIELD_BIT(DH_POOL_NR) | DH_FIELD_BIT(DH_POOL_OVERCOMMIT);
    const struct dh_tables *t = s->work;

    for (uint32_t i = 0; i < t->head.pools; i++) {
        const struct dh_pool *pool = &t->pool[i];

        if (pool->node == DH_MACHINE && pool->size_kib == size_kib)
            return (pool->valid & both) == both && !pool->nr && !pool->overcommit;
    }
    return false;
}

/* Note the files of page sizes of which no page can be in use. Return: whether a size can be in use from now on. */
bool dh_cg_note_idle_sizes(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    uint64_t before = c->idle;

    c->idle = 0;
    for (uint32_t i = 0; i < c->files; i++)
        if (c->file[i].size >= 0 && is_idle(s, c->size_kib[c->file[i].size]))
            c->idle |= DH_CG_FILE_BIT(i);
    return before & ~c->idle;
}

/* Return the files of a group that a whole sweep reads if they exist. */
uint64_t dh_cg_swept(const struct dh_cgroups *c, uint32_t slot)
{
    return ~(c->rare | c->idle | dh_cg_watched(c, slot));
}

/* Return the files of a group that did not change lately, and that not every sweep reads. */
uint64_t dh_cg_still(const struct dh_cgroups *c, uint32_t slot)
{
    const struct dh_cg_group *p = &c->group[slot];
    uint64_t silent = p->oom_registered ? c->swept | c->oom : c->swept;

    return (silent | dh_cg_watched(c, slot)) & ~(p->active | p->was_active);
}

/* Mark a pod's file as due: it is read for the pod and its containers. The kernel notified about it. */
void dh_cg_mark_due(struct dh_sampler *s, uint32_t slot, uint32_t file)
{
    struct dh_cgroups *c = s->cgroups;

    if (!c->group[slot].pending) {
        if (c->pending_num == s->opt.group_max) {
            c->rescan = true; /* slots were freed and taken again within one batch */
            return;
        }
        c->pending[c->pending_num++] = slot;
    }
    c->group[slot].pending |= DH_CG_FILE_BIT(file);
}

/* Count an existing directory or file without a watch. Return: @is. */
bool dh_cg_count_unwatched(struct dh_sampler *s, bool was, bool is)
{
    if (was != is) {
        s->work->head.unwatched += is;
        s->work->head.unwatched -= was;
        s->head_dirty = true;
    }
    return is;
}

/* Mark whether an existing part of a group has no watch. */
void dh_cg_mark_unwatched(struct dh_sampler *s, uint32_t slot, uint64_t bit, bool is)
{
    struct dh_cg_group *p = &s->cgroups->group[slot];

    p->unwatched = dh_cg_count_unwatched(s, p->unwatched & bit, is) ? p->unwatched | bit : p->unwatched & ~bit;
}
