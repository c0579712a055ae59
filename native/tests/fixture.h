/*
 * fixture.h - a machine made of files for the sampler: trees below a temporary directory, a sampler that
 * reads them, and its records as a reader gets them.
 *
 * Passes run on the caller's thread, and time passes when a test calls fx_elapse(), which changes the
 * sampler's time stamps. Include once per program, after check.h.
 */
#ifndef DH_FIXTURE_H
#define DH_FIXTURE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup/cgroups.h"

#define FX_PATIENCE_NS (60 * DH_NS) /* generous for a busy machine; with a bug the check fails instead of
                                       hanging */

/*
 * Check a condition that another thread brings about. The other threads continue: a later CHECK must concern
 * something that stays, or the same copy. The reader is woken after the data are available.
 */
#define EVENTUALLY(cond)                                                                               \
    do {                                                                                               \
        uint64_t since_ = dh_now_ns();                                                                 \
        bool came_;                                                                                    \
        while (!(came_ = (cond)) && dh_now_ns() - since_ < FX_PATIENCE_NS)                             \
            poll(NULL, 0, 1);                                                                          \
        check_that(came_, __FILE__, __LINE__, #cond);                                                  \
    } while (0)

static char fx_root[] = "/dev/shm/drahealth-XXXXXX"; /* of this program; created by fx_begin() */

static inline void fx_must(bool ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    exit(2);
}

/* ---- files ---- */

#define FX_PATH 1024

static inline const char *fx_vpath(char out[FX_PATH], const char *format, va_list args)
{
    int n = snprintf(out, FX_PATH, "%s/", fx_root);

    fx_must(vsnprintf(out + n, FX_PATH - (size_t)n, format, args) < FX_PATH - n, "fx_vpath");
    return out;
}

/* Let every open(2) fail with EMFILE, or work again. Open descriptors stay usable. */
static inline void fx_exhaust_descriptors(bool exhausted)
{
    static rlim_t before;
    struct rlimit limit;

    fx_must(!getrlimit(RLIMIT_NOFILE, &limit), "getrlimit");
    if (exhausted)
        before = limit.rlim_cur;
    limit.rlim_cur = exhausted ? 0 : before;
    fx_must(!setrlimit(RLIMIT_NOFILE, &limit), "setrlimit");
}

/* All functions take a path below the fixture's root as a printf format. */
#define FX_PRINTF(at) __attribute__((format(printf, at, (at) + 1)))
#define FX_ARGS(path, format)                                                                          \
    do {                                                                                               \
        va_list args_;                                                                                 \
        va_start(args_, format);                                                                       \
        fx_vpath(path, format, args_);                                                                 \
        va_end(args_);                                                                                 \
    } while (0)

static inline void fx_parents(char *path)
{
    for (char *slash = path + strlen(fx_root) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = '\0';
        fx_must(!mkdir(path, 0755) || errno == EEXIST, path);
    }
}

FX_PRINTF(1) static inline void fx_dir(const char *format, ...)
{
    char path[FX_PATH];

    FX_ARGS(path, format);
    fx_parents(path);
    fx_must(!mkdir(path, 0755) || errno == EEXIST, path);
}

/* Write a file in place: its inode stays, and it is never empty meanwhile. */
FX_PRINTF(2) static inline void fx_write(const char *text, const char *format, ...)
{
    char path[FX_PATH];
    size_t n = strlen(text);
    int fd;

    FX_ARGS(path, format);
    fx_parents(path);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    fx_must(fd >= 0 && write(fd, text, n) == (ssize_t)n && !ftruncate(fd, (off_t)n), path);
    close(fd);
}

FX_PRINTF(2) static inline void fx_symlink(const char *target, const char *format, ...)
{
    char path[FX_PATH];

    FX_ARGS(path, format);
    fx_parents(path);
    unlink(path);
    fx_must(!symlink(target, path), path);
}

FX_PRINTF(1) static inline void fx_fifo(const char *format, ...)
{
    char path[FX_PATH];

    FX_ARGS(path, format);
    fx_parents(path);
    unlink(path);
    fx_must(!mkfifo(path, 0644), path);
}

static inline int fx_unlink_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* Remove a file, or a directory with its contents, children first as rmdir(2) of cgroups requires. */
FX_PRINTF(1) static inline void fx_remove(const char *format, ...)
{
    char path[FX_PATH];

    FX_ARGS(path, format);
    fx_must(!nftw(path, fx_unlink_entry, 16, FTW_DEPTH | FTW_PHYS), path);
}

static inline void fx_end(void)
{
    nftw(fx_root, fx_unlink_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static inline void fx_begin(void)
{
    fx_must(mkdtemp(fx_root) != NULL, fx_root);
    atexit(fx_end);
}

/* Count the open descriptors or the threads of this process. */
static inline int fx_count(const char *proc_dir)
{
    DIR *dir = opendir(proc_dir);
    int n = 0;

    fx_must(dir != NULL, proc_dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* ---- the sampler ---- */

struct fx {
    struct dh_sampler *s;
    struct dh_snapshot *head;
    size_t cap;
};

static inline struct dh_options fx_options(void)
{
    struct dh_options o = { .size = sizeof(o), .version = DH_VERSION, .group_max = 4096 };

    o.period_ns = DH_NS;
    o.sweep_ns = 10 * DH_NS;
    o.resync_ns = 60 * DH_NS;
    o.held_bytes = 4 << 20;
    return o;
}

static inline struct fx fx_open(const struct dh_options *o, const char *kubelet_root,
                                const struct dh_wake *wakes, uint32_t nwakes)
{
    char sysfs[FX_PATH], cgroupfs[FX_PATH];
    struct fx f = { 0 };

    snprintf(sysfs, sizeof(sysfs), "%s/sys", fx_root);
    snprintf(cgroupfs, sizeof(cgroupfs), "%s/cg", fx_root);
    fx_must(!dh_sampler_open(o, sysfs, cgroupfs, kubelet_root, wakes, nwakes, &f.s), "dh_sampler_open");
    f.cap = dh_sampler_size(f.s);
    f.head = aligned_alloc(8, f.cap + 8);
    fx_must(f.head != NULL, "aligned_alloc");
    return f;
}

static inline void fx_close(struct fx *f)
{
    CHECK_INT(dh_sampler_stop(f->s, FX_PATIENCE_NS), 0);
    free(f->head);
}

static inline void fx_read(struct fx *f)
{
    EVENTUALLY(dh_sampler_read(f->s, 0, f->head, f->cap) > 0); /* DH_ETORN: the thread was preempted in a
                                                                  copy */
}

/* Do what the thread does when inotify has events. */
static inline void fx_events(struct fx *f)
{
    f->s->now_ns = dh_now_ns();
    dh_cgroups_events(f->s);
    dh_sampler_publish(f->s);
    dh_sampler_notify(f->s);
    fx_read(f);
}

static inline void fx_pass(struct fx *f)
{
    CHECK_INT(dh_sampler_pass(f->s), 0);
    fx_read(f);
}

/* Let time pass: move all time stamps of the sampler back. */
static inline void fx_elapse(struct fx *f, uint64_t ns)
{
    f->s->resync_ns -= ns;
    f->s->throttle_ns -= ns;
    f->s->sysfs_ns -= ns;
    f->s->absent_ns -= ns;
    f->s->cgroups->retry_ns -= ns;
    for (uint32_t i = 0; i < f->s->work->head.groups; i++)
        f->s->cgroups->group[i].born_ns -= ns;
    for (uint32_t i = 0; i < DH_FIELD_NUM; i++)
        f->s->base_ns[i] -= ns;
}

/*
 * Let the held descriptors of removed files fail, as those of cgroupfs do; the files here could still be read
 * through them. The errno differs.
 */
static inline void fx_fail_removed(struct fx *f)
{
    const struct dh_cgroups *c = f->s->cgroups;
    int dir = open(fx_root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct stat st;

    for (uint32_t i = 0; i < c->held_used; i++)
        if (c->held[i].fd >= 0 && !fstat(c->held[i].fd, &st) && !st.st_nlink)
            fx_must(dup3(dir, c->held[i].fd, O_CLOEXEC) >= 0, "dup3");
    close(dir);
}

/* Run a pass that reads everything. */
static inline void fx_resync(struct fx *f)
{
    fx_elapse(f, f->s->opt.resync_ns);
    fx_pass(f);
}

static inline bool fx_woken(struct fx *f)
{
    uint64_t n;

    return read(dh_sampler_eventfd(f->s), &n, sizeof(n)) == sizeof(n);
}

/* ---- records ---- */

static inline const struct dh_node *fx_nodes(const struct fx *f)
{
    return (const struct dh_node *)(const void *)(f->head + 1);
}

static inline const struct dh_node *fx_node(const struct fx *f, uint32_t number)
{
    static const struct dh_node none;

    for (uint32_t i = 0; i < f->head->nodes; i++)
        if (fx_nodes(f)[i].node == number)
            return &fx_nodes(f)[i];
    return &none;
}

static inline const struct dh_throttle *fx_throttles(const struct fx *f)
{
    return (const struct dh_throttle *)(const void *)(fx_nodes(f) + f->head->nodes);
}

static inline const struct dh_pool *fx_pools(const struct fx *f)
{
    return (const struct dh_pool *)(const void *)(fx_throttles(f) + f->head->throttles);
}

static inline const struct dh_pool *fx_pool(const struct fx *f, uint64_t size_kib, int32_t node)
{
    static const struct dh_pool none;
    const struct dh_pool *pool = fx_pools(f);

    for (uint32_t i = 0; i < f->head->pools; i++)
        if (pool[i].size_kib == size_kib && pool[i].node == node)
            return &pool[i];
    return &none;
}

static inline const uint64_t *fx_stamps(const struct fx *f)
{
    return (const uint64_t *)(const void *)(fx_pools(f) + f->head->pools);
}

/*
 * Return the groups, of any fixture.
 */
static inline const struct dh_group *fx_groups(const struct fx *f)
{
    return (const struct dh_group *)(const void *)(fx_stamps(f) + f->head->groups);
}

/*
 * Return the group of a pod or, with @name, of a container; a group with id 0 if there is none.
 */
static inline const struct dh_group *fx_group(const struct fx *f, const char *uid, const char *name)
{
    static const struct dh_group none;
    const struct dh_group *group = fx_groups(f);

    for (uint32_t i = 0; i < f->head->groups; i++)
        if (group[i].id && !strcmp(group[i].uid, uid) && !strcmp(group[i].name, name))
            return &group[i];
    return &none;
}

static inline uint32_t fx_group_count(const struct fx *f)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < f->head->groups; i++)
        n += fx_groups(f)[i].id != 0;
    return n;
}

#define HAS(mask, field) (((mask) & DH_FIELD_BIT(field)) != 0)

#endif
