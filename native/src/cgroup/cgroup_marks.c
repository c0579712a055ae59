/* cgroup_marks.c - marks on a group's files: due to be read, or without a watch. */
#include "cgroup/cgroups.h"

/* Return the files of a group about which the kernel notifies, also by a notification about its pod. */
uint64_t dh_cg_watched(const struct dh_cgroups *c, uint32_t slot)
{
    const struct dh_cg_group *p = &c->group[slot];

    return p->watched | (p->parent ? c->group[p->parent - 1].watched & ~c->local : 0);
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
