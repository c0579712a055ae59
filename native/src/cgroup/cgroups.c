/*
 * cgroups.c - schedule of the cgroup source: on events, in the sweep, at resync.
 *
 * Events  a pod's notified file changed, or cgroup v1's eventfd fired: that file of the pod and of its
 *         containers is read. When a counter wakes the reader, its limits are read as evidence.
 * Sweep   reads counters without notification, all groups once in sweep_ns, a slice of them in each pass.
 *         A counter that did not change is read in every sixth sweep only: most do not for days.
 * Resync  every file of a group once in resync_ns, and every directory that is not watched since the last time: finds
 *         what a full table or a refused watch would hide otherwise. A lost event causes a resync of everything.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cgroup/cgroups.h"

/* Interval of checks for missing directories and for new groups to be read a second time. */
#define RETRY_NS DH_NS

/* Interval between slices of the sweep: fifty groups at once cost less than ten groups five times. */
#define SLICE_NS DH_NS

/*
 * One of this many sweeps of a group is whole. A file that did not change between two whole sweeps is skipped
 * in the others, until it changes or the kernel notifies about its pod.
 */
#define WHOLE_SWEEPS 6

/* Limits of one batch of events; its time is limited too. */
#define BATCH_READS 64
#define BATCH_BYTES 2048

static size_t group_bytes(const struct dh_sampler *s)
{
    return s->opt.group_max * sizeof(struct dh_cg_group);
}

/*
 * Open inotify. A user has 128 instances by default, and other programs may use all of them; without inotify
 * every watch is refused, so everything is swept. Refused watches are set again here.
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
    if (dh_cg_held_make(s))
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
    dh_cg_held_free(s);
    if (c->group)
        munmap(c->group, group_bytes(s));
    dh_map_free(&c->by_path);
    dh_map_free(&c->by_wd);
    free(c->pending);
    free(c);
}

/*
 * Read all files of a group, set missing watches, and list a pod. A pod's directory that is still watched need not be
 * listed: the kernel reports each change. With @all, events were lost.
 */
static void resync_group(struct dh_sampler *s, uint32_t slot, bool all)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];

    for (uint8_t h = 0; h < c->hiers; h++) {
        uint8_t bit = (uint8_t)(1u << h);
        bool same;

        if (!(p->hiers & bit))
            continue;
        if (!p->parent)
            p->same_dirs = dh_cg_watch_dir(s, slot, h) ? p->same_dirs | bit : p->same_dirs & (uint8_t)~bit;
        same = !all && (p->parent ? c->group[p->parent - 1].same_dirs : p->same_dirs) & bit;
        dh_cg_watch_files(s, slot, h);
        dh_cg_group_read(s, slot, h, same);
    }
}

/* The files of a group that a whole sweep reads. One that cannot be read is tried again, whatever its kind. */
static uint64_t swept_files(const struct dh_cgroups *c, uint32_t slot)
{
    return c->group[slot].failed | (c->group[slot].present & dh_cg_swept(c, slot));
}

/*
 * The files among them that every sweep reads: recently changed ones, and those whose notification is
 * missing.
 */
static uint64_t active_files(const struct dh_cgroups *c, uint32_t slot)
{
    return swept_files(c, slot) & ~dh_cg_still(c, slot);
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
 * Read files of a group, and the limits of a counter that wakes the reader: the limits are evidence, and may
 * have changed since the resync. Not for every event: a group that reclaims at its memory limit causes one
 * every 10 ms. Return: false if the group left the hierarchy of one of the files.
 */
static bool files_read(struct dh_sampler *s, uint32_t slot, uint64_t files)
{
    const struct dh_cgroups *c = s->cgroups;
    bool woke = s->wake, present = true;

    while (files && present) {
        const struct dh_cg_file *f = &c->file[__builtin_ctzll(files)];

        s->wake = false;
        present = dh_cg_file_read(s, slot, (uint32_t)(f - c->file), true);
        files &= files - 1;
        if (s->wake) {
            woke = true;
            files |= limits_of(c, f);
        }
        if (!present)
            dh_cg_group_leave(s, slot, f->hier);
    }
    s->wake |= woke;
    return present;
}

static void sweep_group(struct dh_sampler *s, uint32_t slot, bool whole)
{
    struct dh_cgroups *c = s->cgroups;

    if (!files_read(s, slot, whole ? swept_files(c, slot) : active_files(c, slot)))
        return;
    for (uint8_t h = 0; h < c->hiers; h++)
        if (c->group[slot].unwatched & DH_CG_DIR_BIT(h))
            dh_cg_pod_list(s, slot, h);
}

/* Read the same files and nothing else: the lower bound of a sweep. With @opens, held files are opened too. */
static int64_t read_group_bare(struct dh_sampler *s, uint32_t slot, bool opens)
{
    struct dh_cgroups *c = s->cgroups;
    int64_t reads = 0;

    for (uint64_t m = swept_files(c, slot); m; m &= m - 1) {
        uint32_t file = (uint32_t)__builtin_ctzll(m);
        char path[DH_CG_PATH + 64], text[8192];
        size_t skip;
        const struct dh_cg_held *held = opens ? NULL : dh_cg_held_find(c, slot, file);
        int dir;

        if (held) {
            reads += pread(held->fd, text, sizeof(text), 0) >= 0;
            continue;
        }
        dir = dh_cg_base_dir(s, slot, c->file[file].hier, &skip);
        dh_cg_path(s, slot, file, path);
        reads += dh_sampler_read_file(s, dir, path + skip, text, sizeof(text)) >= 0;
    }
    return reads;
}

static void base_dir_open(struct dh_cgroups *c, uint32_t pod)
{
    /* a pod without containers has too few files to justify one more open */
    c->base_pod = c->group[pod].child ? pod + 1 : 0;
    for (uint32_t h = 0; h < DH_CG_HIERS; h++)
        c->base_fd[h] = -1;
}

static void base_dir_close(struct dh_cgroups *c)
{
    for (uint32_t h = 0; c->base_pod && h < c->hiers; h++)
        if (c->base_fd[h] >= 0)
            close(c->base_fd[h]);
    c->base_pod = 0;
}

/* Count by slot as well, so that pods have their whole sweeps at different times. */
static uint32_t sweep_number(const struct dh_cgroups *c, uint32_t pod)
{
    return c->group[pod].sweeps + pod;
}

static bool is_whole_sweep(const struct dh_cgroups *c, uint32_t pod)
{
    return sweep_number(c, pod) % WHOLE_SWEEPS == WHOLE_SWEEPS - 1;
}

/* In a whole sweep: a file that changes from now on stays active until the next whole sweep but one. */
static void age_activity(struct dh_cg_group *p)
{
    p->was_active = p->active;
    p->active = 0;
}

enum sweep_kind { POD_SWEEP, POD_WHOLE, POD_RESYNC, POD_REREAD, POD_BARE, POD_BARE_OPENS };

/*
 * Sweep one pod and then its containers: pending_pass() says why in this order. Adds up its groups. Return:
 * in a bare sweep, the number of reads.
 */
static int64_t pod_sweep(struct dh_sampler *s, uint32_t pod, enum sweep_kind kind, uint32_t *groups)
{
    struct dh_cgroups *c = s->cgroups;
    bool bare = kind == POD_BARE || kind == POD_BARE_OPENS, ages = !bare && is_whole_sweep(c, pod);
    int64_t reads = 0;

    base_dir_open(c, pod);
    for (uint32_t slot = pod + 1, next = c->group[pod].child; slot; slot = next) {
        if (slot != pod + 1)
            next = c->group[slot - 1].next;
        ++*groups;
        c->group[slot - 1].sweeps += !bare;
        if (ages)
            age_activity(&c->group[slot - 1]);
        if (bare)
            reads += read_group_bare(s, slot - 1, kind == POD_BARE_OPENS);
        else if (kind == POD_RESYNC || kind == POD_REREAD)
            resync_group(s, slot - 1, kind == POD_REREAD);
        else
            sweep_group(s, slot - 1, kind == POD_WHOLE);
        if (!c->group[pod].hiers)
            break; /* the pod is gone with its containers */
    }
    base_dir_close(c);
    return reads;
}

static bool is_pod(const struct dh_cgroups *c, uint32_t slot)
{
    return c->group[slot].hiers && !c->group[slot].parent;
}

/* Sweep all pods. @groups: their groups, added up. Return: in a bare sweep, the number of reads. */
static int64_t all_sweep(struct dh_sampler *s, enum sweep_kind kind, uint32_t *groups)
{
    int64_t reads = 0;

    for (uint32_t slot = 0; slot < s->work->head.groups; slot++)
        if (is_pod(s->cgroups, slot))
            reads += pod_sweep(s, slot, kind, groups);
    return reads;
}

int64_t dh_cgroups_sweep(struct dh_sampler *s)
{
    uint32_t groups = 0;

    all_sweep(s, POD_WHOLE, &groups);
    return groups;
}

int64_t dh_cgroups_lower_bound(struct dh_sampler *s, bool opens)
{
    uint32_t groups = 0;

    return all_sweep(s, opens ? POD_BARE_OPENS : POD_BARE, &groups);
}

/* Return whether no watch reports that a pod or one of its containers is created or removed. */
static bool is_unwatched(const struct dh_cgroups *c, uint32_t pod)
{
    return c->dirs_unwatched || c->group[pod].unwatched >> DH_CG_FILES;
}

static enum sweep_kind sweep_kind_of(const struct dh_sampler *s, uint32_t pod)
{
    const struct dh_cgroups *c = s->cgroups;
    uint64_t resync = s->opt.resync_ns / s->opt.sweep_ns;

    if (sweep_number(c, pod) % resync == resync - 1)
        return POD_RESYNC;
    return is_whole_sweep(c, pod) || is_unwatched(c, pod) ? POD_WHOLE : POD_SWEEP;
}

/* Run the part of the sweep that is due in this pass, in whole pods, including each pod's resync. */
static void sweep_slice(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    const int64_t cost = (int64_t)s->opt.sweep_ns;
    int64_t max_debt;

    c->sweep_debt += (int64_t)(s->work->head.groups * s->opt.period_ns);
    c->slice_ns += s->opt.period_ns;
    if (c->slice_ns < SLICE_NS && c->slice_ns < s->opt.sweep_ns / 10)
        return;
    c->slice_ns = 0;
    /* a debt or credit for groups that are gone is dropped */
    max_debt = (int64_t)s->work->head.groups * cost;
    c->sweep_debt = c->sweep_debt > max_debt ? max_debt : c->sweep_debt < -max_debt ? -max_debt : c->sweep_debt;
    for (uint32_t visited = 0; c->sweep_debt >= cost && visited < s->work->head.groups; visited++) {
        uint32_t slot = c->cursor < s->work->head.groups ? c->cursor : 0, groups = 0;

        c->cursor = slot + 1;
        if (!is_pod(c, slot)) {
            c->sweep_debt -= c->group[slot].hiers ? 0 : cost; /* an unused slot counts as a group that costs
                                                                 nothing */
            continue;
        }
        pod_sweep(s, slot, sweep_kind_of(s, slot), &groups);
        c->sweep_debt -= groups * cost;
    }
}

/* Return whether work that began at @begun_ns has used its half of the period. */
static bool is_share_used(const struct dh_sampler *s, uint64_t begun_ns)
{
    return dh_now_ns() - begun_ns > s->opt.period_ns / 2;
}

/* Read every pod, over as many passes as it takes. A new group is read when it is found. */
static void reread(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    uint64_t begun_ns = dh_now_ns();
    uint32_t groups = 0;

    while (c->reread) {
        if (is_pod(c, --c->reread))
            pod_sweep(s, c->reread, POD_REREAD, &groups);
        if (is_share_used(s, begun_ns))
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

/*
 * Read the files that the kernel notified about, of each pod and then of its containers. The kernel counts an
 * event for the container before it counts it for the pod. If the containers were read first, a kill between
 * the two reads would be counted for the pod alone, and the report would blame the pod's limit.
 */
static void pending_pass(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->pending_num; i++) {
        uint32_t slot = c->pending[i], next;
        uint64_t pending = c->group[slot].pending;

        c->group[slot].pending = 0;
        c->group[slot].active = ~0ull;
        if (c->group[slot].hiers && pending)
            files_read(s, slot, pending);
        for (uint32_t child = c->group[slot].child; child; child = next) {
            next = c->group[child - 1].next;
            c->group[child - 1].active = ~0ull;
            files_read(s, child - 1, pending);
        }
    }
    c->pending_num = 0;
}

static void state_set(struct dh_sampler *s)
{
    const struct dh_cgroups *c = s->cgroups;

    if (c->unreadable || c->unlisted || (c->root_err && c->root_err != ENOENT))
        dh_source_state(s, DH_SOURCE_CGROUPS, DH_STATE_FAILING);
    else
        dh_source_state(s, DH_SOURCE_CGROUPS, c->hiers ? DH_STATE_OK : DH_STATE_ABSENT);
}

/*
 * Read each group once more when it is a second old: a runtime writes the limits of a group after creating
 * it, and systemd enables its controllers then.
 */
static void settle(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t groups = c->has_new ? s->work->head.groups : 0;

    c->has_new = false;
    for (uint32_t slot = 0; slot < groups; slot++) {
        struct dh_cg_group *p = &c->group[slot];

        if (!p->hiers || p->settled)
            continue;
        if (!dh_sampler_is_due(s, p->born_ns, RETRY_NS)) {
            c->has_new = true;
            continue;
        }
        p->settled = true;
        resync_group(s, slot, false);
    }
}

void dh_cgroups_pass(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    bool retry = s->probe_absent || dh_sampler_is_due(s, c->retry_ns, RETRY_NS);

    if (retry)
        c->retry_ns = s->now_ns;
    if (s->resync && s->inotify_fd < 0)
        inotify_open(s);
    if (retry && (!c->hiers || c->root_err || (s->resync && c->hier[0].version == 1)))
        dh_cg_hiers_find(s); /* a v1 hierarchy may be mounted at any time */
    if (c->pools < s->work->head.pools)
        dh_cg_files_make(s, c->hiers);
    if (s->resync && !s->first)
        dh_cg_tree_list(s, false);
    if (s->pools_changed && dh_cg_note_idle_sizes(s))
        c->reread = s->work->head.groups; /* limits of a size are not read while it has no pages */
    s->pools_changed = false;
    if (s->probe_absent)
        c->relist |= s->work->head.dropped > 0;
    if (c->oom_pods_due) {
        dh_cg_oom_reread(s);
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
        return; /* an event of a removed group */
    if (e->mask & IN_IGNORED) {
        dh_cg_watch_ended(s, watch);
    } else if (dh_cg_watch_is_file(watch, &slot, &file)) {
        if (e->mask & IN_MODIFY)
            dh_cg_mark_due(s, slot, file);
    } else if (e->mask & (IN_CREATE | IN_DELETE) && e->mask & IN_ISDIR) {
        dh_cg_entry_changed(s, watch, e->name, e->mask & IN_DELETE);
    }
}

/*
 * Handle queued inotify events. Bounded, so that a storm of events cannot delay the timer; epoll is
 * level-triggered here and calls again. For the same reason the next pass, not this function, reads what an
 * overflow lost.
 */
void dh_cgroups_events(struct dh_sampler *s)
{
    _Alignas(struct inotify_event) char buf[BATCH_BYTES];
    uint64_t begun_ns = dh_now_ns();

    for (int reads = 0; reads < BATCH_READS && !is_share_used(s, begun_ns); reads++) {
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

/* Handle the pods' eventfds. */
void dh_cgroups_oom_events(struct dh_sampler *s)
{
    dh_cg_oom_take_events(s);
    pending_pass(s);
    state_set(s);
}
