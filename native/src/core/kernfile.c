/* kernfile.c - reads small files and lists directories of kernel file systems. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/kernfile.h"

bool dh_is_absence(int err)
{
    return err == ENOENT || err == ENODEV || err == ENOTDIR;
}

bool dh_is_own_failure(int err)
{
    return err == EMFILE || err == ENFILE || err == ENOMEM;
}

/* Measured: the page into which the kernel formats the text, and 0.5 KiB of its objects of an open file. */
size_t dh_open_file_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE) + 512;
}

int64_t dh_fd_read(int fd, char *buf, size_t cap, uint64_t *reads)
{
    ssize_t n;

    ++*reads;
    n = pread(fd, buf, cap, 0);
    if (n < 0)
        return -errno;
    return (size_t)n == cap ? -EFBIG : n;
}

int64_t dh_file_read(int dir_fd, const char *path, char *buf, size_t cap, uint64_t *reads)
{
    int fd = openat(dir_fd, path, O_RDONLY | O_CLOEXEC);
    ssize_t n;
    int err;

    if (fd < 0)
        return -errno;
    ++*reads;
    n = read(fd, buf, cap);
    err = errno;
    close(fd);
    if (n < 0)
        return -err;
    return (size_t)n == cap ? -EFBIG : n;
}

int64_t dh_file_read_all(int dir_fd, const char *path, char *buf, size_t cap, uint64_t *reads)
{
    int fd = openat(dir_fd, path, O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    ssize_t n;
    int err;

    if (fd < 0)
        return -errno;
    do {
        ++*reads;
        n = read(fd, buf + used, cap - used);
        err = errno;
        used += n > 0 ? (size_t)n : 0;
    } while (n > 0 && used < cap);
    close(fd);
    if (n < 0)
        return -err;
    return used == cap ? -EFBIG : (int64_t)used;
}

/* getdents64 into the stack, since fdopendir(3) allocates. */
int dh_dir_list(int dir_fd, const char *path, void (*each)(void *arg, const char *name, size_t len),
                void *arg)
{
    _Alignas(struct dirent64) char buf[4096];
    int fd = openat(dir_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long n;
    int err = 0;

    if (fd < 0)
        return -errno;
    while ((n = syscall(SYS_getdents64, fd, buf, sizeof(buf))) > 0) {
        for (long at = 0; at < n;) {
            const struct dirent64 *d = (const struct dirent64 *)(const void *)(buf + at);

            if (strcmp(d->d_name, ".") && strcmp(d->d_name, ".."))
                each(arg, d->d_name, strlen(d->d_name));
            at += d->d_reclen;
        }
    }
    if (n < 0)
        err = -errno;
    close(fd);
    return err;
}
