/* machine_roots.c - opens the roots of sysfs and procfs, and reads below them. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "machine/machine.h"
#include "core/text.h"

#define ROOT_RETRY_NS DH_NS

static const enum dh_machine_field root_field[DH_ROOT_NUM] = { DH_MACHINE_SYSFS, DH_MACHINE_PROCFS };

/*
 * Each rare pass opens the roots again, because a file system may have been mounted on one since. A root that
 * is gone by then keeps its descriptor, and the files below it cannot be read.
 */
void dh_machine_roots_open(struct dh_machine *m)
{
    bool missing = m->root[DH_ROOT_SYSFS].fd < 0 || m->root[DH_ROOT_PROCFS].fd < 0;

    if (!m->rare && !(missing && dh_is_due(m->now_ns, m->root_ns, ROOT_RETRY_NS, m->opt.period_ns)))
        return;
    m->root_ns = m->now_ns;
    for (int i = 0; i < DH_ROOT_NUM; i++) {
        int fd = open(m->root[i].path, O_PATH | O_DIRECTORY | O_CLOEXEC);

        m->root[i].err = fd < 0 && m->root[i].fd < 0 ? errno : 0;
        if (fd < 0)
            continue;
        if (m->root[i].fd < 0) /* everything below it is new */
            m->read_all = m->rare = m->slow = true;
        else
            close(m->root[i].fd);
        m->root[i].fd = fd;
    }
}

int dh_machine_root_err(const struct dh_machine *m, uint32_t roots, enum dh_machine_field *field)
{
    int err = 0;

    for (int i = 0; i < DH_ROOT_NUM; i++) {
        if (!(roots & 1u << i) || !m->root[i].err || (err && m->root[i].err == ENOENT))
            continue;
        err = m->root[i].err;
        *field = root_field[i];
    }
    return err;
}

static int64_t text_read(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                         const char *format, va_list args)
{
    char path[128];
    int n = vsnprintf(path, sizeof(path), format, args);

    if (m->root[root].fd < 0)
        return -ENOENT;
    if (n < 0 || (size_t)n >= sizeof(path))
        return -ENAMETOOLONG;
    return dh_file_read(m->root[root].fd, path, buf, cap, &m->work.head.reads);
}

int64_t dh_machine_read_text(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                             const char *format, ...)
{
    va_list args;
    int64_t n;

    va_start(args, format);
    n = text_read(m, root, buf, cap, format, args);
    va_end(args);
    return n;
}

int64_t dh_machine_read_text_all(struct dh_machine *m, enum dh_machine_root root, char *buf, size_t cap,
                                 const char *path)
{
    if (m->root[root].fd < 0)
        return -ENOENT;
    return dh_file_read_all(m->root[root].fd, path, buf, cap, &m->work.head.reads);
}

int dh_machine_read_number(struct dh_machine *m, enum dh_machine_root root, uint64_t *value, const char *format,
                           ...)
{
    char text[32];
    va_list args;
    int64_t n;

    va_start(args, format);
    n = text_read(m, root, text, sizeof(text), format, args);
    va_end(args);
    return dh_machine_to_err(n < 0 ? n : dh_text_u64(text, (size_t)n, value));
}

int dh_machine_list_dir(struct dh_machine *m, const char *path,
                        void (*each)(void *arg, const char *name, size_t len), void *arg)
{
    if (m->root[DH_ROOT_SYSFS].fd < 0)
        return ENOENT;
    return -dh_dir_list(m->root[DH_ROOT_SYSFS].fd, path, each, arg);
}
