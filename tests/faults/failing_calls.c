/* Preloaded library that fails one call of the C library: of the process's calls of a kind, the n-th.
 *
 * FAIL_CALL is <kind>:<n>:<errno>, FAIL_BELOW the directory whose files count: calls on other files are those of
 * the interpreter. A call without a file (socket, mmap, thread) counts from the first open below the directory
 * on.
 * The failed call is written into the file FAIL_MARK, so that a test knows that n was reached. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_int counted, begun;

static void mark(const char *what) {
    const char *path = getenv("FAIL_MARK");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (fd < 0)
        return;
    syscall(SYS_write, fd, what, strlen(what));
    syscall(SYS_write, fd, "\n", 1UL);
    syscall(SYS_close, fd);
}

/* Whether this call of a kind is to fail; sets errno. */
static int fails(const char *kind, const char *what) {
    const char *order = getenv("FAIL_CALL");
    size_t length = strlen(kind);
    int number, error;
    if (!order || strncmp(order, kind, length) || sscanf(order + length, ":%d:%d", &number, &error) != 2)
        return 0;
    if (atomic_fetch_add(&counted, 1) + 1 != number)
        return 0;
    mark(what);
    errno = error;
    return 1;
}

static int below(const char *path) {
    const char *directory = getenv("FAIL_BELOW");
    return directory && path && !strncmp(path, directory, strlen(directory));
}

static int fd_path(int fd, char *path, size_t size) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, path, size - 1);
    path[length > 0 ? length : 0] = 0;
    return below(path);
}

static int fails_on(const char *kind, int fd) {
    char path[4096];
    int saved = errno, counts = fd_path(fd, path, sizeof path);
    errno = saved;
    return counts && fails(kind, path);
}

static int fails_at(const char *kind, int at, const char *path) {
    char whole[8192] = "";
    if (path && path[0] != '/' && at != AT_FDCWD) {
        if (!fd_path(at, whole, sizeof whole / 2))
            return 0;
        snprintf(whole + strlen(whole), sizeof whole / 2, "/%s", path);
    } else if (path) {
        snprintf(whole, sizeof whole, "%s", path);
    }
    if (!below(whole))
        return 0;
    atomic_store(&begun, 1);
    return fails(kind, whole);
}

static int fails_from_begin(const char *kind) {
    return atomic_load(&begun) && fails(kind, kind);
}

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                      \
    int name(const char *path, int flags, ...) {        \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode_t mode = va_arg(rest, mode_t);             \
        va_end(rest);                                   \
        REAL(name);                                     \
        return fails_at("open", AT_FDCWD, path) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                    \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        mode_t mode = va_arg(rest, mode_t);             \
        va_end(rest);                                   \
        REAL(name);                                     \
        return fails_at("open", at, path) ? -1 : real(at, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t read(int fd, void *to, size_t size) {
    REAL(read);
    return fails_on("read", fd) ? -1 : real(fd, to, size);
}

ssize_t pread(int fd, void *to, size_t size, off_t at) {
    REAL(pread);
    return fails_on("read", fd) ? -1 : real(fd, to, size, at);
}

ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
    REAL(pread64);
    return fails_on("read", fd) ? -1 : real(fd, to, size, at);
}

ssize_t write(int fd, const void *from, size_t size) {
    REAL(write);
    return fails_on("write", fd) ? -1 : real(fd, from, size);
}

int fsync(int fd) {
    REAL(fsync);
    return fails_on("fsync", fd) ? -1 : real(fd);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    return fails_at("rename", AT_FDCWD, to) ? -1 : real(from, to);
}

int renameat(int from_at, const char *from, int to_at, const char *to) {
    REAL(renameat);
    return fails_at("rename", to_at, to) ? -1 : real(from_at, from, to_at, to);
}

int socket(int domain, int type, int protocol) {
    REAL(socket);
    return fails_from_begin("socket") ? -1 : real(domain, type, protocol);
}

void *mmap(void *at, size_t size, int prot, int flags, int fd, off_t offset) {
    REAL(mmap);
    return fails_from_begin("mmap") ? MAP_FAILED : real(at, size, prot, flags, fd, offset);
}

void *mmap64(void *at, size_t size, int prot, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    return fails_from_begin("mmap") ? MAP_FAILED : real(at, size, prot, flags, fd, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    REAL(pthread_create);
    return fails_from_begin("thread") ? errno : real(thread, how, run, with);
}
