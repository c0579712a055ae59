/*
 * files.c - small kernel files: kept open and read again, or opened, read and closed.
 *
 * An open file costs 4.5 KiB of kernel memory once read (its seq_file buffer). The few machine-wide files are
 * kept open; of the files of groups, cgroup_held.c keeps as many open as its limit allows.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/sampler.h"

/* Return whether periodic work is due in this pass. */
bool dh_sampler_is_due(const struct dh_sampler *s, uint64_t last_ns, uint64_t every_ns)
{
    return dh_is_due(s->now_ns, last_ns, every_ns, s->opt.period_ns);
}

int dh_cached_file_init(struct dh_cached_file *f, uint32_t cap, const char *format, ...)
{
    va_list args;
    int n;

    memset(f, 0, sizeof(*f));
    f->fd = -1;
    va_start(args, format);
    n = vsnprintf(f->path, sizeof(f->path), format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof(f->path))
        return -ENAMETOOLONG;
    f->last = malloc(cap);
    if (!f->last)
        return -ENOMEM;
    f->cap = cap;
    return 0;
}

void dh_cached_file_close(struct dh_cached_file *f)
{
    if (f->last && f->fd >= 0)
        close(f->fd);
    free(f->last);
    f->last = NULL;
    f->fd = -1;
}

static int file_open(struct dh_sampler *s, struct dh_cached_file *f)
{
    s->opens++;
    f->fd = openat(s->sysfs_fd, f->path, O_RDONLY | O_CLOEXEC);
    if (f->fd < 0)
        return -errno;
    s->work->head.descriptors++;
    s->head_dirty = true;
    return 0;
}

static void file_drop(struct dh_sampler *s, struct dh_cached_file *f)
{
    close(f->fd);
    f->fd = -1;
    s->work->head.descriptors--;
    s->head_dirty = true;
}

static void read_failed(struct dh_cached_file *f, int err)
{
    f->err = err;
    if (dh_is_absence(err))
        f->seen &= !f->assumed;
    f->assumed = dh_is_own_failure(err) && (f->assumed || !f->seen);
    f->seen |= !dh_is_absence(err);
}

/*
 * Read a file that is kept open into f->last. DH_READ_SAME if its bytes equal those of the last successful
 * read, which is usual and needs no parsing. After DH_READ_FAILED f->err is a positive errno, and the next
 * successful read is DH_READ_NEW, whatever its bytes.
 */
enum dh_read_result dh_cached_file_read(struct dh_sampler *s, struct dh_cached_file *f)
{
    char buf[8192];
    ssize_t n = -1;
    int err = 0;

    if (!f->last || (!f->seen && !s->probe_absent))
        return DH_READ_FAILED;
    /* ENODEV: the object of the descriptor is gone, but a new object may have its name */
    for (int tries = 0; tries < 2; tries++) {
        if (f->fd < 0) {
            err = -file_open(s, f);
            if (err)
                break;
        }
        s->reads++;
        n = pread(f->fd, buf, f->cap < sizeof(buf) ? f->cap : sizeof(buf), 0);
        err = n < 0 ? errno : 0;
        if (!err)
            break;
        file_drop(s, f);
        if (err != ENODEV)
            break;
    }
    if (!err && (uint32_t)n == f->cap)
        err = EFBIG; /* a cut text could parse as another number */
    if (err) {
        read_failed(f, err);
        return DH_READ_FAILED;
    }
    if (f->seen && !f->err && (uint32_t)n == f->len && !memcmp(buf, f->last, f->len))
        return DH_READ_SAME;
    memcpy(f->last, buf, (size_t)n);
    f->len = (uint32_t)n;
    f->err = 0;
    f->seen = true;
    f->assumed = false;
    return DH_READ_NEW;
}

/* Make the same read and nothing else: for the lower bound of a pass. */
bool dh_cached_file_read_bare(const struct dh_cached_file *f)
{
    char buf[8192];

    return f->last && f->fd >= 0 && pread(f->fd, buf, f->cap, 0) >= 0;
}

/* Read a file as dh_file_read(), and count the calls. */
int64_t dh_sampler_read_file(struct dh_sampler *s, int dir_fd, const char *path, char *buf, size_t cap)
{
    s->opens++;
    return dh_file_read(dir_fd, path, buf, cap, &s->reads);
}

struct listing {
    struct dh_sampler *s;
    void (*each)(struct dh_sampler *s, void *arg, const char *name, size_t len);
    void *arg;
};

static void entry_found(void *arg, const char *name, size_t len)
{
    const struct listing *in = arg;

    in->each(in->s, in->arg, name, len);
}

/* List a directory as dh_dir_list(), and count the open. */
int dh_sampler_list_dir(struct dh_sampler *s, int dir_fd, const char *path,
                        void (*each)(struct dh_sampler *s, void *arg, const char *name, size_t len), void *arg)
{
    struct listing in = { .s = s, .each = each, .arg = arg };

    s->opens++;
    return dh_dir_list(dir_fd, path, entry_found, &in);
}
