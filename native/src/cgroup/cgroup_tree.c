/*
 * cgroup_tree.c - pods and containers: their discovery, watches and removal.
 *
 * Directories of kubepods, its QoS classes and the pods are watched for entries created and removed. Of
 * files, a pod's notified files are watched: the kernel reports a memory or hugetlb event of a container to
 * every ancestor, so one watch serves the pod and all its containers. Only cgroup.events, which the kernel
 * does not report to ancestors, is watched for each group.
 *
 * The watch is set before the directory is listed, so that no entry created in between is missed. The removal
 * of a cgroup is reported by the watch on its parent: the kernel sends no IN_DELETE_SELF for it, and a watch
 * on a cgroup or file that was removed and created again stays silent. So the watches on a pod's directory and files are
 * set again at each resync. For a live watch that changes nothing and returns the same descriptor: then the directory is
 * the same, and no cgroup in it is unknown. Its files may be others: those of a controller that was enabled again.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup/cgroups.h"
#include "core/text.h"

enum watch_kind { WATCH_DIR, WATCH_POD, WATCH_FILE };

static uint64_t watch_pack(enum watch_kind kind, uint8_t hier, uint32_t file, uint32_t index)
{
    return (uint64_t)kind << 56 | (uint64_t)hier << 48 | (uint64_t)file << 40 | index;
}

static enum watch_kind watch_kind(uint64_t w)
{
    return (enum watch_kind)(w >> 56);
}

static uint8_t watch_hier(uint64_t w)
{
    return (uint8_t)(w >> 48);
}

static uint32_t watch_file(uint64_t w)
{
    return (uint32_t)(w >> 40) & 0xff;
}

static uint32_t watch_index(uint64_t w)
{
    return (uint32_t)w;
}

bool dh_cg_watch_is_file(uint64_t watch, uint32_t *slot, uint32_t *file)
{
    *slot = watch_index(watch);
    *file = watch_file(watch);
    return watch_kind(watch) == WATCH_FILE;
}

static void watches_count(struct dh_sampler *s)
{
    s->work->head.watches = s->cgroups->by_wd.used;
    s->head_dirty = true;
}

/*
 * Watch a path below a hierarchy. Return: the watch descriptor; -ENOENT if the path does not exist, checked
 * also without inotify; another -errno if the watch was refused: the sweep then reads the files. inotify
 * takes no directory descriptor, so the path goes through /proc/self/fd.
 */
static int watch_add(struct dh_sampler *s, uint8_t hier, const char *path, uint32_t mask, uint64_t meaning)
{
    struct dh_cgroups *c = s->cgroups;
    char full[DH_CG_PATH + 128];
    int wd;

    if (s->inotify_fd < 0)
        return dh_cg_missing(c, hier, path) ? -ENOENT : -EMFILE;
    snprintf(full, sizeof(full), "/proc/self/fd/%d/%s", c->hier[hier].fd, path);
    wd = inotify_add_watch(s->inotify_fd, full, mask);
    if (wd < 0 && dh_is_absence(errno)) /* of the path, or of /proc/self/fd */
        return dh_cg_missing(c, hier, path) ? -ENOENT : -EACCES;
    if (wd < 0)
        return -errno;
    if (!dh_map_put(&c->by_wd, (uint64_t)wd, meaning)) {
        inotify_rm_watch(s->inotify_fd, wd);
        return -ENOSPC;
    }
    watches_count(s);
    return wd;
}

static void watch_drop(struct dh_sampler *s, int wd)
{
    inotify_rm_watch(s->inotify_fd, wd);
    dh_map_drop(&s->cgroups->by_wd, (uint64_t)wd);
    watches_count(s);
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), e = strlen(end);

    return n >= e && !memcmp(name + n - e, end, e);
}

/* Room for any name in any known directory. */
#define JOINED (DH_CG_PATH + NAME_MAX + 1)

static void join(char out[JOINED], const char *dir, const char *name)
{
    snprintf(out, JOINED, "%s%s%s", dir, *dir ? "/" : "", name);
}

static bool path_fits(struct dh_sampler *s, const char *path)
{
    if (strlen(path) < DH_CG_PATH)
        return true;
    dh_source_full(s, DH_SOURCE_CGROUPS, DH_GROUP_SET);
    return false;
}

/* ---- groups ---- */

static uint64_t path_key(const char *path)
{
    uint64_t h = 0xcbf29ce484222325ull; /* FNV-1a */

    for (; *path; path++)
        h = (h ^ (unsigned char)*path) * 0x100000001b3ull;
    return h ? h : 1; /* 0 marks an empty place in the map */
}

static bool group_find(const struct dh_cgroups *c, const char *path, uint32_t *slot)
{
    uint64_t value;

    if (!dh_map_get(&c->by_path, path_key(path), &value) || strcmp(c->group[value].path, path))
        return false;
    *slot = (uint32_t)value;
    return true;
}

static bool slot_take(struct dh_sampler *s, uint32_t *slot)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = c->free_hint; i < s->opt.group_max; i++) {
        if (c->group[i].hiers)
            continue;
        *slot = i;
        c->free_hint = i + 1;
        if (i >= s->work->head.groups)
            s->work->head.groups = i + 1;
        return true;
    }
    return false;
}

static bool has_watch(const struct dh_cg_group *p, int wd)
{
    for (uint32_t i = 0; i < p->watches; i++)
        if (p->wd[i] == wd)
            return true;
    return false;
}

/* Note a watch of a group, to drop it together with the group. Return: false if there is no room. */
static bool watch_note(struct dh_cg_group *p, int wd)
{
    if (has_watch(p, wd))
        return true;
    if (p->watches == DH_CG_WATCHES)
        return false;
    p->wd[p->watches++] = wd;
    return true;
}

/*
 * Drop a group's watches with the same @meaning, except @newest: their objects are gone. Their IN_IGNORED
 * events may have been lost, and they would fill the group's table.
 */
static void drop_outdated_watches(struct dh_sampler *s, uint32_t slot, uint64_t meaning, int newest)
{
    struct dh_cg_group *p = &s->cgroups->group[slot];
    uint64_t other;
    uint8_t kept = 0;

    for (uint8_t i = 0; i < p->watches; i++) {
        if (p->wd[i] != newest && dh_map_get(&s->cgroups->by_wd, (uint64_t)p->wd[i], &other) &&
            other == meaning)
            watch_drop(s, p->wd[i]);
        else
            p->wd[kept++] = p->wd[i];
    }
    p->watches = kept;
}

/*
 * Watch a file or the directory of a group. Return: whether its watch was set before and is alive, so that no event
 * about it was missed.
 */
static bool watch_part(struct dh_sampler *s, uint32_t slot, uint8_t hier, const char *path, uint32_t mask,
                       uint64_t meaning, uint64_t bit)
{
    struct dh_cg_group *p = &s->cgroups->group[slot];
    int wd = watch_add(s, hier, path, mask, meaning);
    bool same = wd >= 0 && p->watched & bit && has_watch(p, wd);

    if (wd >= 0)
        drop_outdated_watches(s, slot, meaning, wd);
    if (wd >= 0 && !watch_note(p, wd)) {
        watch_drop(s, wd);
        wd = -ENOSPC;
    }
    p->watched = wd >= 0 ? p->watched | bit : p->watched & ~bit;
    dh_cg_mark_unwatched(s, slot, bit, wd < 0 && wd != -ENOENT);
    return same;
}

/* Watch a pod's directory in a hierarchy. Return: as watch_part(). */
bool dh_cg_watch_dir(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    return watch_part(s, slot, hier, s->cgroups->group[slot].path, IN_CREATE | IN_DELETE | IN_ONLYDIR,
                      watch_pack(WATCH_POD, hier, 0, slot), DH_CG_DIR_BIT(hier));
}

/*
 * Watch the notified files of a pod in a hierarchy; of a container only files whose events the kernel does not report
 * to the pod. A file that was created again, as the kernel does when a controller is enabled again, gets a new watch.
 */
void dh_cg_watch_files(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;
    bool pod = !c->group[slot].parent;

    for (uint32_t i = 0; i < c->files; i++) {
        char path[DH_CG_PATH + 64];

        if (c->file[i].hier == hier && c->file[i].spec->read == DH_CG_OOM)
            dh_cg_oom_watch(s, slot, i);
        if (c->file[i].hier != hier || c->file[i].spec->read != DH_CG_NOTIFIED)
            continue;
        if (!pod && !(c->local & DH_CG_FILE_BIT(i)))
            continue;
        dh_cg_path(s, slot, i, path);
        watch_part(s, slot, hier, path, IN_MODIFY, watch_pack(WATCH_FILE, hier, i, slot), DH_CG_FILE_BIT(i));
    }
}

/* A watch of a live group has ended because its file or directory is gone: swept until the next resync. */
void dh_cg_watch_ended(struct dh_sampler *s, uint64_t watch)
{
    uint64_t bit = DH_CG_FILE_BIT(watch_file(watch));

    if (watch_kind(watch) == WATCH_DIR)
        return; /* the next dir_watch() drops this one */
    if (watch_kind(watch) == WATCH_POD)
        bit = DH_CG_DIR_BIT(watch_hier(watch));
    drop_outdated_watches(s, watch_index(watch), watch, -1);
    s->cgroups->group[watch_index(watch)].watched &= ~bit;
}

/* Drop the watches and close the descriptors of a group in a hierarchy. */
static void drop_watches(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];
    uint64_t bits = DH_CG_DIR_BIT(hier), watch;
    uint8_t kept = 0;

    for (uint8_t i = 0; i < p->watches; i++) {
        if (dh_map_get(&c->by_wd, (uint64_t)p->wd[i], &watch) && watch_hier(watch) == hier)
            watch_drop(s, p->wd[i]);
        else
            p->wd[kept++] = p->wd[i];
    }
    p->watches = kept;
    for (uint32_t i = 0; i < c->files; i++)
        if (c->file[i].hier == hier)
            bits |= DH_CG_FILE_BIT(i);
    for (uint64_t m = p->unwatched & bits; m; m &= m - 1)
        dh_cg_count_unwatched(s, true, false);
    p->watched &= ~bits;
    p->unwatched &= ~bits;
    dh_cg_held_drop(s, slot, bits);
    dh_cg_oom_unwatch(s, slot, hier);
}

static void group_make(struct dh_sampler *s, uint32_t slot, const char *path, const char *uid,
                       const char *name, uint32_t parent)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];
    struct dh_group *g = &s->work->group[slot];

    memset(p, 0, sizeof(*p));
    memset(g, 0, sizeof(*g));
    memcpy(p->path, path, strlen(path) + 1);
    p->key = path_key(path);
    p->born_ns = s->now_ns;
    c->has_new = true;
    p->parent = parent;
    if (parent) {
        p->next = c->group[parent - 1].child;
        c->group[parent - 1].child = slot + 1;
    }
    g->id = ++c->next_id;
    g->kind = parent ? DH_GROUP_CONTAINER : DH_GROUP_POD;
    memcpy(g->uid, uid, sizeof(g->uid));
    memcpy(g->name, name, sizeof(g->name));
    dh_cg_sizes_init(s, g);
    dh_map_put(&c->by_path, p->key, slot);
    dh_wake_if_watched(s, DH_GROUP_SET);
    dh_group_mark_dirty(s, slot);
    s->head_dirty = true;
}

/* The directory that contains an entry. */
struct listed_dir {
    uint8_t hier;
    uint8_t level;
    uint32_t parent; /* slot + 1 of the pod, at level DH_CG_POD */
    const char *path;
    uint32_t *dropped; /* groups in this directory without room in the table */
};

/* Count a group without room. Every v1 hierarchy has the same groups: only those of the first are counted. */
static void count_dropped(struct dh_sampler *s, const struct listed_dir *in)
{
    if (in->hier)
        return;
    ++*in->dropped;
    s->work->head.dropped++;
    s->head_dirty = true;
}

static void clear_dropped(struct dh_sampler *s, uint32_t *dropped)
{
    if (!*dropped)
        return;
    s->work->head.dropped -= *dropped;
    s->head_dirty = true;
    *dropped = 0;
}

/* Note whether a listing of an existing directory failed. Return: the same. */
static bool count_unlisted(struct dh_sampler *s, bool was, int err)
{
    bool is = err && !dh_is_absence(err);

    s->cgroups->unlisted += is;
    s->cgroups->unlisted -= was;
    if (is)
        dh_source_failed(s, DH_SOURCE_CGROUPS, DH_GROUP_SET, err);
    return is;
}

static void pod_mark_unlisted(struct dh_sampler *s, uint32_t slot, uint8_t hier, int err)
{
    struct dh_cg_group *p = &s->cgroups->group[slot];
    uint8_t bit = (uint8_t)(1u << hier);

    p->unlisted = count_unlisted(s, p->unlisted & bit, err) ? p->unlisted | bit : p->unlisted & (uint8_t)~bit;
}

/*
 * Read every file of a group in one hierarchy; @same: its directory is the same as before, or that of its pod. Files
 * that the sweep does not read are not held. A group that is gone leaves the hierarchy.
 */
void dh_cg_group_read(struct dh_sampler *s, uint32_t slot, uint8_t hier, bool same)
{
    struct dh_cgroups *c = s->cgroups;

    if (!same && !dh_cg_dir_exists(s, slot, hier)) {
        dh_cg_group_leave(s, slot, hier);
        return;
    }
    for (uint32_t i = 0; i < c->files; i++) {
        bool swept = dh_cg_swept(c, slot) & DH_CG_FILE_BIT(i);

        if (c->file[i].hier != hier || (same && c->idle & ~c->group[slot].failed & DH_CG_FILE_BIT(i)))
            continue;
        if (!same || !swept)
            dh_cg_held_drop(s, slot, DH_CG_FILE_BIT(i)); /* another file may have its name by now */
        if (!dh_cg_file_read(s, slot, i, same && swept)) {
            dh_cg_group_leave(s, slot, hier);
            return;
        }
    }
    if (!same && !c->group[slot].parent)
        dh_cg_pod_list(s, slot, hier);
}

static void group_found(struct dh_sampler *s, const struct listed_dir *in, const char *path, const char *uid,
                        const char *name)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t slot;

    if (group_find(c, path, &slot)) {
        if (c->group[slot].hiers & 1u << in->hier)
            return;
    } else {
        if (!path_fits(s, path))
            return;
        if (!slot_take(s, &slot)) {
            count_dropped(s, in);
            return;
        }
        group_make(s, slot, path, uid, name, in->parent);
    }
    c->group[slot].hiers |= (uint8_t)(1u << in->hier);
    if (!in->parent)
        dh_cg_watch_dir(s, slot, in->hier);
    dh_cg_watch_files(s, slot, in->hier);
    dh_cg_group_read(s, slot, in->hier, false);
}

static void group_remove(struct dh_sampler *s, uint32_t slot)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_group *p = &c->group[slot];

    while (p->child)
        group_remove(s, p->child - 1);
    if (p->parent) {
        uint32_t *link = &c->group[p->parent - 1].child;

        while (*link != slot + 1)
            link = &c->group[*link - 1].next;
        *link = p->next;
    }
    for (uint8_t h = 0; h < c->hiers; h++) {
        drop_watches(s, slot, h);
        pod_mark_unlisted(s, slot, h, 0);
    }
    dh_map_drop(&c->by_path, p->key);
    clear_dropped(s, &p->dropped);
    c->relist |= s->work->head.dropped > 0; /* a slot is free now */
    c->unreadable -= p->unreadable;
    memset(p, 0, sizeof(*p));
    memset(&s->work->group[slot], 0, sizeof(s->work->group[slot]));
    if (slot < c->free_hint)
        c->free_hint = slot;
    while (s->work->head.groups && !c->group[s->work->head.groups - 1].hiers)
        s->work->head.groups--;
    s->head_dirty = true;
    dh_wake_if_watched(s, DH_GROUP_SET);
    dh_group_mark_dirty(s, slot);
}

/* A group left one hierarchy; after the last one it is removed. */
void dh_cg_group_leave(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cg_group *p = &s->cgroups->group[slot];

    if (!(p->hiers & 1u << hier))
        return;
    p->hiers &= (uint8_t)~(1u << hier);
    if (!p->hiers) {
        group_remove(s, slot);
        return;
    }
    drop_watches(s, slot, hier);
    pod_mark_unlisted(s, slot, hier, 0);
    dh_cg_hier_clear(s, slot, hier);
}

/* ---- directories ---- */

static void dir_list(struct dh_sampler *s, uint32_t index); /* below: it calls entry_found() for each entry */

/* List a known directory that did not exist before. Return: whether the directory is known. */
static bool known_dir_found(struct dh_sampler *s, uint8_t hier, const char *path)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->dirs; i++) {
        if (c->dir[i].hier != hier || strcmp(c->dir[i].path, path))
            continue;
        if (c->dir[i].wd < 0)
            dir_list(s, i);
        return true;
    }
    return false;
}

static void entry_found(struct dh_sampler *s, const struct listed_dir *in, const char *name, size_t len)
{
    static const char no_name[DH_NAME_LEN];
    char path[JOINED], uid[DH_UID_LEN], id[DH_NAME_LEN];

    join(path, in->path, name);
    switch (in->level) {
    case DH_CG_ABOVE:
        known_dir_found(s, in->hier, path);
        break;
    case DH_CG_PARENT:
        if (!strcmp(name, "kubepods") || !strcmp(name, "kubepods.slice") ||
            ends_with(name, "-kubepods.slice"))
            dh_cg_dir_add(s, in->hier, DH_CG_KUBEPODS, path);
        break;
    case DH_CG_KUBEPODS:
        if (!strcmp(name, "burstable") || !strcmp(name, "besteffort") ||
            ends_with(name, "-burstable.slice") || ends_with(name, "-besteffort.slice")) {
            dh_cg_dir_add(s, in->hier, DH_CG_QOS, path);
            break;
        }
        /* fall through */
    case DH_CG_QOS:
        if (!dh_text_pod(name, len, uid))
            group_found(s, in, path, uid, no_name);
        break;
    case DH_CG_POD:
        if (!dh_text_container(name, len, id))
            group_found(s, in, path, s->work->group[in->parent - 1].uid, id);
        break;
    default:
        break;
    }
}

static void each_entry(struct dh_sampler *s, void *arg, const char *name, size_t len)
{
    entry_found(s, arg, name, len);
}

/* List the containers of a pod in a hierarchy. */
void dh_cg_pod_list(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;
    struct listed_dir in = { hier, DH_CG_POD, slot + 1, c->group[slot].path, &c->group[slot].dropped };

    if (!hier)
        clear_dropped(s, in.dropped);
    pod_mark_unlisted(s, slot, hier, -dh_sampler_list_dir(s, c->hier[hier].fd, in.path, each_entry, &in));
}

static const char *dir_path(const struct dh_cg_dir *d)
{
    return *d->path ? d->path : ".";
}

/* Return whether a missing directory is still missing: cheaper than a watch, whose path begins in /proc. */
static bool is_still_missing(const struct dh_cgroups *c, const struct dh_cg_dir *d)
{
    return d->wd < 0 && !d->unwatched && dh_cg_missing(c, d->hier, dir_path(d));
}

/* Watch a directory. Return: true if its watch changed, or it has none. */
static bool dir_watch(struct dh_sampler *s, uint32_t index)
{
    struct dh_cg_dir *d = &s->cgroups->dir[index];
    int before = d->wd, wd;

    if (is_still_missing(s->cgroups, d))
        return true;
    wd = watch_add(s, d->hier, dir_path(d), IN_CREATE | IN_DELETE | IN_ONLYDIR,
                   watch_pack(WATCH_DIR, d->hier, 0, index));
    d->wd = wd < 0 ? -1 : wd;
    s->cgroups->dirs_unwatched -= d->unwatched;
    d->unwatched = dh_cg_count_unwatched(s, d->unwatched, wd < 0 && wd != -ENOENT);
    s->cgroups->dirs_unwatched += d->unwatched;
    if (before >= 0 && before != d->wd)
        watch_drop(s, before);
    return d->wd < 0 || d->wd != before;
}

static void dir_list(struct dh_sampler *s, uint32_t index)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_dir *d = &c->dir[index];
    struct listed_dir in = { d->hier, d->level, 0, d->path, &d->dropped };
    int err = 0;

    dir_watch(s, index);
    clear_dropped(s, in.dropped);
    if (d->wd >= 0 || d->unwatched) /* otherwise it does not exist */
        err = -dh_sampler_list_dir(s, c->hier[d->hier].fd, dir_path(d), each_entry, &in);
    d->unlisted = count_unlisted(s, d->unlisted, err);
}

/* Return the index plus one of the directory that contains @path; 0: it is not known. */
static uint32_t dir_above(const struct dh_cgroups *c, uint8_t hier, const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 0;

    for (uint32_t i = 0; *path && i < c->dirs; i++)
        if (c->dir[i].hier == hier && strlen(c->dir[i].path) == length && !memcmp(c->dir[i].path, path, length))
            return i + 1;
    return 0;
}

void dh_cg_dir_add(struct dh_sampler *s, uint8_t hier, uint8_t level, const char *path)
{
    struct dh_cgroups *c = s->cgroups;
    struct dh_cg_dir *d;

    if (known_dir_found(s, hier, path) || !path_fits(s, path))
        return;
    if (c->dirs == DH_CG_DIRS) {
        dh_source_full(s, DH_SOURCE_CGROUPS, DH_GROUP_SET);
        return;
    }
    d = &c->dir[c->dirs];
    d->hier = hier;
    d->level = level;
    d->wd = -1;
    d->above = dir_above(c, hier, path);
    memcpy(d->path, path, strlen(path) + 1);
    dir_list(s, c->dirs++);
}

static void dir_gone(struct dh_sampler *s, uint8_t hier, const char *path)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->dirs; i++) {
        if (c->dir[i].hier != hier || strcmp(c->dir[i].path, path))
            continue;
        clear_dropped(s, &c->dir[i].dropped);
        c->dir[i].unlisted = count_unlisted(s, c->dir[i].unlisted, 0);
        if (c->dir[i].wd < 0)
            continue;
        watch_drop(s, c->dir[i].wd);
        c->dir[i].wd = -1;
    }
}

/* Handle an event of a watched directory: an entry was created or removed. */
void dh_cg_entry_changed(struct dh_sampler *s, uint64_t watch, const char *name, bool gone)
{
    struct dh_cgroups *c = s->cgroups;
    struct listed_dir in = { .hier = watch_hier(watch), .level = DH_CG_POD };
    char path[JOINED];
    uint32_t slot, before;

    if (watch_kind(watch) == WATCH_DIR) {
        in.level = c->dir[watch_index(watch)].level;
        in.path = c->dir[watch_index(watch)].path;
        in.dropped = &c->dir[watch_index(watch)].dropped;
    } else {
        in.parent = watch_index(watch) + 1;
        in.path = c->group[watch_index(watch)].path;
        in.dropped = &c->group[watch_index(watch)].dropped;
    }
    join(path, in.path, name);
    if (gone) {
        dir_gone(s, in.hier, path);
        c->relist |= *in.dropped > 0; /* the entry may be one of the groups without room */
        if (group_find(c, path, &slot))
            dh_cg_group_leave(s, slot, in.hier);
        return;
    }
    for (uint32_t i = 0; i < c->dirs; i++) {
        if (c->dir[i].hier == in.hier && !strcmp(c->dir[i].path, path)) {
            dir_list(s, i); /* it existed before, and exists again */
            return;
        }
    }
    before = *in.dropped;
    entry_found(s, &in, name, strlen(name));
    c->relist |= *in.dropped > before; /* the listing may have counted it before the event arrived */
}

/*
 * Whether a watch reports that a directory is created or removed: that of the directory above it, or, while that one is
 * missing too, of the next that exists. The root of a hierarchy always exists.
 */
static bool is_reported(const struct dh_cgroups *c, const struct dh_cg_dir *d)
{
    const struct dh_cg_dir *above = d->above ? &c->dir[d->above - 1] : NULL;

    if (!above)
        return !*d->path && d->wd >= 0;
    return above->wd >= 0 || (!above->unwatched && is_reported(c, above));
}

/*
 * List the known directories, or only those that could not be listed or watched, and those that were created although
 * no watch reports that. Groups without room are searched for again when slots may be free.
 */
void dh_cg_tree_list(struct dh_sampler *s, bool missing_only)
{
    struct dh_cgroups *c = s->cgroups;
    bool dropped = c->relist;

    c->relist = false;
    for (uint32_t i = 0; i < c->dirs; i++) {
        const struct dh_cg_dir *d = &c->dir[i];

        if (!missing_only || dropped || d->unlisted || d->unwatched || (!is_reported(c, d) && dir_watch(s, i)))
            dir_list(s, i);
    }
    for (uint32_t slot = 0; (dropped || c->unlisted) && slot < s->work->head.groups; slot++) {
        uint8_t hiers = dropped && c->group[slot].dropped ? c->group[slot].hiers : c->group[slot].unlisted;

        for (uint8_t h = 0; h < c->hiers; h++)
            if (hiers & 1u << h)
                dh_cg_pod_list(s, slot, h);
    }
}
