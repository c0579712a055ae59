/*
 * cgroups.c - when what is read: on events, in the sweep, at resync.
 *
 * Events  a pod's notified file changed, or cgroup v1's eventfd told of it: that file of the pod and of
 *         its containers is read. Limits are read with what wakes the reader, as evidence.
 * Sweep   counters that never notify, all groups once in sweep_ns, a slice of them in each pass. One that
 *         stands still is read in every sixth sweep only: most do, for days.
 * Resync  every file of a group, and every directory, once in resync_ns: what a lost event, a full
 *         table or a watch that could not be had would otherwise hide for good.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cgroups.h"

/* Directories that are not there yet, and the settling of new groups, are looked at this often. */
#define RETRY_NS DH_NS

/* The sweep's slices are so far apart: fifty groups at once cost less than ten times five, cold each. */
#define SLICE_NS DH_NS

/*
 * Of so many sweeps of a group one is whole. A file that stood still from one of these to the next is left out of
 * the others, until it changes or the kernel tells of its pod.
 */
#define WHOLE_SWEEPS 6

/* Of one batch of events, which are bounded in time too. */
#define BATCH_READS 64
#define BATCH_BYTES 2048

static size_t group_bytes(const struct dh_sampler *s)
{
    return s->opt.group_max * sizeof(struct dh_cg_group);
}

/*
 * Get inotify. A user has 128 instances by default and other programs may hold them all; without one
 * every watch is refused, so everything is swept. What was refused until now is asked for again.
 */
static void inotify_open(struct dh_sampler *s)
{
    struct epoll_event on = { .events = EPOLLIN };
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);

    if (fd < 0)
        return;
    on.data.fd = fd;
    if (epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, fd, &on)) {
        close(fd);
        return;
    }
    s->inotify_fd = fd;
    s->cgroups->rescan = !s->first;
    s->work->head.descriptors++;
    s->head_dirty = true;
}

int dh_cgroups_make(struct dh_sampler *s)
{
    struct dh_cgroups *c = calloc(1, sizeof(*c));
    void *groups;

    s->cgroups = c;
    if (!c)
        return -ENOMEM;
    groups = mmap(NULL, group_bytes(s), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                  -1, 0);
    if (groups == MAP_FAILED)
        return -ENOMEM;
    c->group = groups;
    c->pending = calloc(s->opt.group_max, sizeof(*c->pending));
    if (!c->pending || dh_map_make(&c->by_path, s->opt.group_max) ||
        dh_map_make(&c->by_wd, s->opt.group_max * 5 + DH_CG_DIRS))
        return -ENOMEM;
    inotify_open(s);
    return 0;
}

void dh_cgroups_free(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    if (!c)
        return;
    for (uint32_t i = 0; i < c->hiers; i++)
        close(c->hier[i].fd);
    dh_cg_oom_free(s);
    if (c->group)
        munmap(c->group, group_bytes(s));
    dh_map_free(&c->by_path);
    dh_map_free(&c->by_wd);
    free(c->pending);
    free(c);
}

/* Read every file of a group in one hierarchy; it leaves the hierarchy if it is gone. */
void dh_cg_visit(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;

    if (!dh_cg_dir_there(s, slot, hier)) {
        dh_cg_leave(s, slot, hier);
        return;
    }
    for (uint32_t i = 0; i < c->files; i++) {
        if (c->file[i].hier == hier && !dh_cg_file_read(s, slot, i)) {
            dh_cg_leave(s, slot, hier);
            return;
        }
    }
    if (!c->group[slot].parent)
        dh_cg_pod_list(s, slot, hier);
}

static void resync_group(struct dh_sampler *s, uint32_t slot)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint8_t h = 0; h < c->hiers; h++) {
        if (!(c->group[slot].hiers & 1u << h))
            continue;
        dh_cg_watch(s, slot, h);
        dh_cg_visit(s, slot, h);
    }
}

/* Pages of a size of which the machine has none, and may make none, cannot be in use. */
static bool size_idle(const struct dh_sampler *s, const struct dh_cg_file *f)
{
    const uint64_t both = DH_FIELD_BIT(DH_POOL_NR) | DH_FIELD_BIT(DH_POOL_OVERCOMMIT);
    const struct dh_tables *t = s->work;

    if (f->size < 0)
        return false;
    for (uint32_t i = 0; i < t->head.pools; i++) {
        const struct dh_pool *pool = &t->pool[i];

        if (pool->node == DH_MACHINE && pool->size_kib == s->cgroups->size_kib[f->size])
            return (pool->valid & both) == both && !pool->nr && !pool->overcommit;
    }
    return false;
}

/* The files that a whole sweep reads of a group. */
static uint64_t swept_files(const struct dh_sampler *s, uint32_t slot)
{
    const struct dh_cgroups *c = s->cgroups;
    const struct dh_cg_group *p = &c->group[slot];
    uint64_t heard = p->watched | (p->parent ? c->group[p->parent - 1].watched & ~c->local : 0);
    uint64_t mask = 0;

    for (uint64_t m = p->has & ~heard; m; m &= m - 1) {
        const struct dh_cg_file *f = &c->file[__builtin_ctzll(m)];

        if (f->spec->read != DH_CG_RARE && !size_idle(s, f))
            mask |= m & -m;
    }
    return mask;
}

/* Those of them that every sweep reads: what changed lately, and what stands in for an event. */
static uint64_t restless_files(const struct dh_sampler *s, uint32_t slot)
{
    const struct dh_cgroups *c = s->cgroups;
    const struct dh_cg_group *p = &c->group[slot];
    uint64_t silent = p->oom_heard ? c->swept | c->oom : c->swept;

    return swept_files(s, slot) & ~(silent & ~(p->stirred | p->lively));
}

static uint64_t limits_of(const struct dh_cgroups *c, const struct dh_cg_file *counter)
{
    uint64_t limits = 0;

    for (uint32_t i = 0; counter->spec->read != DH_CG_RARE && i < c->files; i++) {
        const struct dh_cg_file *f = &c->file[i];

        if (f->spec->read == DH_CG_RARE && f->hier == counter->hier && f->size == counter->size &&
            f->spec->controller == counter->spec->controller)
            limits |= DH_CG_FILE_BIT(i);
    }
    return limits;
}

/*
 * Read files of a group, and the limits of what wakes the reader: they are evidence, and may have been
 * written since the resync. Not at every event: who reclaims at its limit of memory is told of every 10 ms.
 * False if the group left the hierarchy of one of them.
 */
static bool files_read(struct dh_sampler *s, uint32_t slot, uint64_t files)
{
    const struct dh_cgroups *c = s->cgroups;
    bool woke = s->wake, there = true;

    while (files && there) {
        const struct dh_cg_file *f = &c->file[__builtin_ctzll(files)];

        s->wake = false;
        there = dh_cg_file_read(s, slot, (uint32_t)(f - c->file));
        files &= files - 1;
        if (s->wake) {
            woke = true;
            files |= limits_of(c, f);
        }
        if (!there)
            dh_cg_leave(s, slot, f->hier);
    }
    s->wake |= woke;
    return there;
}

static void sweep_group(struct dh_sampler *s, uint32_t slot, bool whole)
{
    struct dh_cgroups *c = s->cgroups;

    if (!files_read(s, slot, whole ? swept_files(s, slot) : restless_files(s, slot)))
        return;
    for (uint8_t h = 0; h < c->hiers; h++)
        if (c->group[slot].refused & DH_CG_DIR_BIT(h))
            dh_cg_pod_list(s, slot, h);
}

/* Read the same files, and nothing else: the floor that a sweep is measured against. */
static int64_t floor_group(struct dh_sampler *s, uint32_t slot)
{
    struct dh_cgroups *c = s->cgroups;
    int64_t reads = 0;

    for (uint64_t m = swept_files(s, slot); m; m &= m - 1) {
        uint32_t file = (uint32_t)__builtin_ctzll(m);
        char path[DH_CG_PATH + 64], text[8192];
        size_t skip;
        int dir = dh_cg_base(s, slot, c->file[file].hier, &skip);

        dh_cg_path(s, slot, file, path);
        reads += dh_read_at(s, dir, path + skip, text, sizeof(text)) >= 0;
    }
    return reads;
}

static void near_begin(struct dh_cgroups *c, uint32_t pod)
{
    /* a pod without containers has too few files to be worth one more open */
    c->near = c->group[pod].child ? pod + 1 : 0;
    for (uint32_t h = 0; h < DH_CG_HIERS; h++)
        c->near_fd[h] = -1;
}

static void near_end(struct dh_cgroups *c)
{
    for (uint32_t h = 0; c->near && h < c->hiers; h++)
        if (c->near_fd[h] >= 0)
            close(c->near_fd[h]);
    c->near = 0;
}

/* By slot, so that not all pods have theirs in the same sweep. */
static uint32_t turn_of(const struct dh_cgroups *c, uint32_t pod)
{
    return c->group[pod].visits + pod;
}

static bool is_whole_turn(const struct dh_cgroups *c, uint32_t pod)
{
    return turn_of(c, pod) % WHOLE_SWEEPS == WHOLE_SWEEPS - 1;
}

/* In a whole sweep: what is read now and changes stays restless until the next but one. */
static void calm(struct dh_cg_group *p)
{
    p->lively = p->stirred;
    p->stirred = 0;
}

enum pod_pass { POD_SWEEP, POD_WHOLE, POD_RESYNC, POD_FLOOR };

/* One pod and its containers. Counts its groups, and in POD_FLOOR its reads. */
static int64_t pod_pass(struct dh_sampler *s, uint32_t pod, enum pod_pass what, uint32_t *groups)
{
    struct dh_cgroups *c = s->cgroups;
    bool calms = what != POD_FLOOR && is_whole_turn(c, pod);
    int64_t reads = 0;

    near_begin(c, pod);
    for (uint32_t slot = pod + 1, next = c->group[pod].child; slot; slot = next) {
        if (slot != pod + 1)
            next = c->group[slot - 1].next;
        ++*groups;
        c->group[slot - 1].visits += what != POD_FLOOR;
        if (calms)
            calm(&c->group[slot - 1]);
        if (what == POD_FLOOR)
            reads += floor_group(s, slot - 1);
        else if (what == POD_RESYNC)
            resync_group(s, slot - 1);
        else
            sweep_group(s, slot - 1, what == POD_WHOLE);
        if (!c->group[pod].hiers)
            break; /* it is gone, and its containers with it */
    }
    near_end(c);
    return reads;
}

static bool is_pod(const struct dh_cgroups *c, uint32_t slot)
{
    return c->group[slot].hiers && !c->group[slot].parent;
}

int64_t dh_cgroups_sweep(struct dh_sampler *s, bool floor)
{
    int64_t reads = 0;
    uint32_t groups = 0;

    for (uint32_t slot = 0; slot < s->work->head.groups; slot++)
        if (is_pod(s->cgroups, slot))
            reads += pod_pass(s, slot, floor ? POD_FLOOR : POD_WHOLE, &groups);
    return floor ? reads : groups;
}

/* Whether nobody would tell that a pod, or a container of it, has come or gone. */
static bool is_unheard(const struct dh_cgroups *c, uint32_t pod)
{
    return c->dirs_refused || c->group[pod].refused >> DH_CG_FILES;
}

static enum pod_pass pass_of(const struct dh_sampler *s, uint32_t pod)
{
    const struct dh_cgroups *c = s->cgroups;
    uint64_t resync = s->opt.resync_ns / s->opt.sweep_ns;

    if (turn_of(c, pod) % resync == resync - 1)
        return POD_RESYNC;
    return is_whole_turn(c, pod) || is_unheard(c, pod) ? POD_WHOLE : POD_SWEEP;
}

/* The slice of the sweep that this pass owes, in whole pods, each pod's resync among it. */
static void sweep_slice(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    const int64_t each = (int64_t)s->opt.sweep_ns;
    int64_t most;

    c->owed += (int64_t)(s->work->head.groups * s->opt.period_ns);
    c->slice_ns += s->opt.period_ns;
    if (c->slice_ns < SLICE_NS && c->slice_ns < s->opt.sweep_ns / 10)
        return;
    c->slice_ns = 0;
    /* what was owed of groups that are gone since, or was paid ahead of time for them, is nobody's */
    most = (int64_t)s->work->head.groups * each;
    c->owed = c->owed > most ? most : c->owed < -most ? -most : c->owed;
    for (uint32_t looked = 0; c->owed >= each && looked < s->work->head.groups; looked++) {
        uint32_t slot = c->cursor < s->work->head.groups ? c->cursor : 0, groups = 0;

        c->cursor = slot + 1;
        if (!is_pod(c, slot)) {
            c->owed -= c->group[slot].hiers ? 0 : each; /* a gap is owed like a group, and paid at once */
            continue;
        }
        pod_pass(s, slot, pass_of(s, slot), &groups);
        c->owed -= groups * each;
    }
}

/* Whether what began then has had its share of the period; the rest is for others. */
static bool share_spent(const struct dh_sampler *s, uint64_t begun_ns)
{
    return dh_now_ns() - begun_ns > s->opt.period_ns / 2;
}

/* Read every group, over as many passes as it takes. A group that comes meanwhile is read as it comes. */
static void reread(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    uint64_t begun_ns = dh_now_ns();

    while (c->reread) {
        if (c->group[--c->reread].hiers)
            resync_group(s, c->reread);
        if (share_spent(s, begun_ns))
            return;
    }
}

static void rescan(struct dh_sampler *s)
{
    s->cgroups->rescan = false;
    dh_cg_tree_list(s, false);
    s->cgroups->reread = s->work->head.groups;
    reread(s);
}

static void pending_pass(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->pending_num; i++) {
        uint32_t slot = c->pending[i], next;
        uint64_t pending = c->group[slot].pending;

        c->group[slot].pending = 0;
        c->group[slot].stirred = ~0ull;
        for (uint32_t child = c->group[slot].child; child; child = next) {
            next = c->group[child - 1].next;
            c->group[child - 1].stirred = ~0ull;
            files_read(s, child - 1, pending);
        }
        if (c->group[slot].hiers && pending)
            files_read(s, slot, pending);
    }
    c->pending_num = 0;
}

/* The kernel told of a pod's file: it is to be read, of the pod and of its containers. */
void dh_cg_notified(struct dh_sampler *s, uint32_t slot, uint32_t file)
{
    struct dh_cgroups *c = s->cgroups;

    if (!c->group[slot].pending) {
        if (c->pending_num == s->opt.group_max) {
            c->rescan = true; /* slots freed and taken again within one batch */
            return;
        }
        c->pending[c->pending_num++] = slot;
    }
    c->group[slot].pending |= DH_CG_FILE_BIT(file);
}

static void state_set(struct dh_sampler *s)
{
    const struct dh_cgroups *c = s->cgroups;

    if (c->lost || (c->root_err && c->root_err != ENOENT))
        dh_source_state(s, DH_SOURCE_CGROUPS, DH_STATE_FAILING);
    else
        dh_source_state(s, DH_SOURCE_CGROUPS, c->hiers ? DH_STATE_OK : DH_STATE_ABSENT);
}

/*
 * A runtime makes a group first and writes its limits then; systemd enables its controllers then.
 * So a group is read once more when it is a second old.
 */
static void settle(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t slot = 0; slot < s->work->head.groups; slot++) {
        struct dh_cg_group *p = &c->group[slot];

        if (!p->hiers || p->settled || !dh_due(s, p->born_ns, RETRY_NS))
            continue;
        p->settled = true;
        resync_group(s, slot);
    }
}

void dh_cgroups_pass(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    bool retry = s->absent || dh_due(s, c->retry_ns, RETRY_NS);

    if (retry)
        c->retry_ns = s->now_ns;
    if (s->resync && s->inotify_fd < 0)
        inotify_open(s);
    if (retry && (!c->hiers || c->root_err))
        dh_cg_hiers_find(s);
    if (s->resync && !s->first)
        dh_cg_tree_list(s, false);
    if (s->absent)
        c->relist |= s->work->head.dropped > 0;
    if (c->oom_owed) {
        dh_cg_oom_again(s);
        pending_pass(s);
    }
    if (c->rescan) {
        rescan(s);
    } else if (c->hiers) {
        reread(s);
        if (retry && !s->resync)
            dh_cg_tree_list(s, true);
        if (retry)
            settle(s);
        if (!s->first)
            sweep_slice(s);
    }
    state_set(s);
}

static void event(struct dh_sampler *s, const struct inotify_event *e)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t slot, file;
    uint64_t watch;

    if (e->mask & IN_Q_OVERFLOW) {
        s->work->head.overflows++;
        s->head_dirty = true;
        c->rescan = true;
        return;
    }
    if (e->wd <= 0 || !dh_map_get(&c->by_wd, (uint64_t)e->wd, &watch))
        return; /* of a group that is gone */
    if (e->mask & IN_IGNORED) {
        dh_cg_watch_ended(s, watch);
    } else if (dh_cg_watch_is_file(watch, &slot, &file)) {
        if (e->mask & IN_MODIFY)
            dh_cg_notified(s, slot, file);
    } else if (e->mask & (IN_CREATE | IN_DELETE) && e->mask & IN_ISDIR) {
        dh_cg_entry(s, watch, e->name, e->mask & IN_DELETE);
    }
}

/*
 * Take what inotify has queued. Bounded, so that a storm of events cannot keep the timer waiting;
 * epoll is level-triggered here and calls again. For the same reason what an overflow lost is read
 * in the next pass and not here.
 */
void dh_cgroups_events(struct dh_sampler *s)
{
    _Alignas(struct inotify_event) char buf[BATCH_BYTES];
    uint64_t begun_ns = dh_now_ns();

    for (int reads = 0; reads < BATCH_READS && !share_spent(s, begun_ns); reads++) {
        ssize_t n = read(s->inotify_fd, buf, sizeof(buf));

        if (n <= 0)
            break;
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *e = (const struct inotify_event *)(const void *)(buf + at);

            event(s, e);
            at += (ssize_t)(sizeof(*e) + e->len);
        }
        pending_pass(s);
    }
    state_set(s);
}

/* Take what the eventfds of pods have told. */
void dh_cgroups_ooms(struct dh_sampler *s)
{
    dh_cg_oom_hear(s);
    pending_pass(s);
    state_set(s);
}
