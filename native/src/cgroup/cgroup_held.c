/*
 * cgroup_held.c - descriptors of group files that stay open between two reads.
 *
 * A read through an open descriptor takes a quarter of the time of openat, read and close. Each open one takes
 * kernel memory, so their number has a limit: that of dh_options.held_bytes, and that of RLIMIT_NOFILE. Within
 * it a descriptor stays open if the sweep reads its file. When there is no room left, a file that every sweep
 * reads replaces one that only whole sweeps read, and no other: files of equal rank never replace each other.
 *
 * The descriptor of a removed group fails with ENODEV, also after a group of its name was created. Then it is
 * closed, and the file is opened by its name. A resync opens every file by its name.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cgroup/cgroups.h"
#include "core/text.h"

/* Entries that one search for a file of lower rank looks at: the search goes on where the last one ended. */
#define SEARCH 16

/*
 * Return how many descriptors may stay open. The agent's sockets take half of RLIMIT_NOFILE; of the other half
 * the eventfds of pods and everything else come first.
 */
static uint32_t room(const struct dh_sampler *s)
{
    uint64_t most = s->opt.held_bytes / dh_open_file_bytes();
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit))
        return 0;
    if (limit.rlim_cur != RLIM_INFINITY) {
        uint64_t half = limit.rlim_cur / 2, rest = half > DH_CG_OTHER_FDS ? half - DH_CG_OTHER_FDS : 0;

        most = most < rest ? most : rest;
    }
    return most < DH_CG_HELD_MAX ? (uint32_t)most : DH_CG_HELD_MAX;
}

int dh_cg_held_make(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    c->held_max = room(s);
    if (!c->held_max)
        return 0;
    c->held = calloc(c->held_max, sizeof(*c->held));
    return c->held ? 0 : -ENOMEM;
}

void dh_cg_held_free(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->held_used; i++)
        if (c->held[i].fd >= 0)
            close(c->held[i].fd);
    free(c->held);
}

struct dh_cg_held *dh_cg_held_find(const struct dh_cgroups *c, uint32_t slot, uint32_t file)
{
    const struct dh_cg_group *p = &c->group[slot];
    uint32_t at = p->held_first;

    if (!(p->held & DH_CG_FILE_BIT(file)))
        return NULL;
    while (c->held[at - 1].file != file)
        at = c->held[at - 1].next;
    return &c->held[at - 1];
}

/* Note the text of a file as parsed; without bytes, its next text is parsed in any case. */
void dh_cg_held_note(struct dh_cgroups *c, uint32_t slot, uint32_t file, const char *text, size_t n)
{
    struct dh_cg_held *h = dh_cg_held_find(c, slot, file);

    if (!h)
        return;
    h->digest = n ? dh_text_digest(text, n) : 0;
}

static void count(struct dh_sampler *s, int32_t change)
{
    s->cgroups->held_num += (uint32_t)change;
    s->work->head.descriptors += (uint64_t)(int64_t)change;
    s->head_dirty = true;
}

/* Close the descriptors of some of a group's files. */
void dh_cg_held_drop(struct dh_sampler *s, uint32_t slot, uint64_t files)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];
    uint32_t *link = &p->held_first;

    if (!(p->held & files))
        return;
    while (*link) {
        uint32_t at = *link;
        struct dh_cg_held *h = &c->held[at - 1];

        if (!(files & DH_CG_FILE_BIT(h->file))) {
            link = &h->next;
            continue;
        }
        *link = h->next;
        close(h->fd);
        h->fd = -1;
        h->next = c->held_free;
        c->held_free = at;
        count(s, -1);
    }
    p->held &= ~files;
}

/* Without room, close the descriptor of a file that is still, if a short search finds one. */
static void make_room(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (int i = 0; i < SEARCH && c->held_num == c->held_max; i++) {
        const struct dh_cg_held *h = &c->held[c->held_hand++ % c->held_max];

        if (dh_cg_still(c, h->slot) & DH_CG_FILE_BIT(h->file))
            dh_cg_held_drop(s, h->slot, DH_CG_FILE_BIT(h->file));
    }
}

/* Take over the descriptor of a file that was read: it stays open if there is room for it, or is closed. */
void dh_cg_held_offer(struct dh_sampler *s, uint32_t slot, uint32_t file, int fd)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];
    struct dh_cg_held *h;
    uint32_t at;

    if (!c->held_max || c->file[file].spec->read == DH_CG_RARE) {
        close(fd);
        return;
    }
    if (!(dh_cg_still(c, slot) & DH_CG_FILE_BIT(file)))
        make_room(s);
    if (c->held_num == c->held_max) {
        close(fd);
        return;
    }
    at = c->held_free ? c->held_free : ++c->held_used;
    h = &c->held[at - 1];
    if (at == c->held_free)
        c->held_free = h->next;
    h->fd = fd;
    h->slot = slot;
    h->file = (uint16_t)file;
    h->digest = 0;
    h->next = p->held_first;
    p->held_first = at;
    p->held |= DH_CG_FILE_BIT(file);
    count(s, 1);
}
