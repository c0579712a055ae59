/* Preloaded library that fails one call of the C library: of the process's calls of a kind, the n-th.
 *
 * FAIL_CALL is <kind>:<n>:<errno>, FAIL_BELOW the directory whose files count: calls on other files are those of
 * the interpreter. A call without a file (of sockets, epoll, mmap, thread) counts from the first open below the
 * directory on.
 * The failed call is written into the file FAIL_MARK, so that a test knows that n was reached.
 *
 * With FAIL_ORDER, a file that a test maps, too, the test gives such orders to running processes, one after the
 * other: see struct order. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_int counted, begun;

/* Order of a test: fail the n-th call from now on. */
struct order {
    atomic_int counted;     /* calls of the kind since the order */
    atomic_int thread;      /* the thread whose calls count; 0: any; negative: all but this one */
    atomic_int tcp_thread;  /* the thread that accepted the last TCP connection */
    char program[20];       /* the program whose calls count, by its name in argv; empty: any */
    char call[48];          /* <kind>:<n>:<errno>; empty: no call fails */
};
static struct order *given;

static __attribute__((constructor)) void map_order(void) {
    const char *path = getenv("FAIL_ORDER");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    long map = syscall(SYS_mmap, NULL, sizeof *given, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0L);
    given = map == -1 ? NULL : (struct order *)map;
    syscall(SYS_close, fd);
}

static int is_ordered_here(void) {
    int thread = atomic_load(&given->thread);
    int caller = (int)syscall(SYS_gettid);
    if (thread > 0 ? caller != thread : thread && caller == -thread)
        return 0;
    return !*given->program || !strcmp(given->program, program_invocation_short_name);
}

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
    const char *order = given ? given->call : getenv("FAIL_CALL");
    size_t length = strlen(kind);
    int number, error;
    if (!order || strncmp(order, kind, length) || sscanf(order + length, ":%d:%d", &number, &error) != 2)
        return 0;
    if (given && !is_ordered_here())
        return 0;
    if (atomic_fetch_add(given ? &given->counted : &counted, 1) + 1 != number)
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

static int fails_from_begin_on(const char *kind, const char *what) {
    return (given || atomic_load(&begun)) && fails(kind, what);
}

static int fails_from_begin(const char *kind) {
    return fails_from_begin_on(kind, kind);
}

#define FDS 65536
static atomic_bool paired[FDS];

/* Note whether a socket has its peer in this process; return it. Event loops wake themselves with such a pair, on
 * which the kernel fails no transfer. */
static int socket_made(int fd, int is_paired) {
    if (fd >= 0 && fd < FDS)
        atomic_store(&paired[fd], is_paired);
    return fd;
}

static int fails_transfer(const char *kind, int fd) {
    return !(fd >= 0 && fd < FDS && atomic_load(&paired[fd])) && fails_from_begin(kind);
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

DIR *opendir(const char *path) {
    REAL(opendir);
    return fails_at("open", AT_FDCWD, path) ? NULL : real(path);
}

#define STAT(name, type)                                \
    int name(const char *path, struct type *status) {   \
        REAL(name);                                     \
        return fails_at("stat", AT_FDCWD, path) ? -1 : real(path, status); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define FSTATAT(name, type)                             \
    int name(int at, const char *path, struct type *status, int flags) { \
        REAL(name);                                     \
        return fails_at("stat", at, path) ? -1 : real(at, path, status, flags); \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

#define FCNTL(name)                                     \
    int name(int fd, int command, ...) {                \
        va_list rest;                                   \
        va_start(rest, command);                        \
        void *with = va_arg(rest, void *);              \
        va_end(rest);                                   \
        REAL(name);                                     \
        if ((command == F_DUPFD || command == F_DUPFD_CLOEXEC) && fails_from_begin("dup")) \
            return -1;                                  \
        return real(fd, command, with);                 \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

int memfd_create(const char *name, unsigned flags) {
    REAL(memfd_create);
    return fails_from_begin("memfd") ? -1 : real(name, flags);
}

#define FTRUNCATE(name, type)                           \
    int name(int fd, type size) {                       \
        REAL(name);                                     \
        return fails_from_begin("memfd") ? -1 : real(fd, size); \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *attributes, char *const arguments[], char *const environ[]) {
    REAL(posix_spawn);
    return fails_from_begin("spawn") ? errno : real(pid, path, actions, attributes, arguments, environ);
}

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
    return fails_from_begin("socket") ? -1 : socket_made(real(domain, type, protocol), 0);
}

int socketpair(int domain, int type, int protocol, int pair[2]) {
    REAL(socketpair);
    if (fails_from_begin("socket") || real(domain, type, protocol, pair))
        return -1;
    socket_made(pair[0], 1);
    socket_made(pair[1], 1);
    return 0;
}

int bind(int fd, const struct sockaddr *to, socklen_t size) {
    REAL(bind);
    return fails_from_begin("bind") ? -1 : real(fd, to, size);
}

int listen(int fd, int waiting) {
    REAL(listen);
    return fails_from_begin("listen") ? -1 : real(fd, waiting);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t size) {
    REAL(setsockopt);
    return fails_from_begin("setsockopt") ? -1 : real(fd, level, name, value, size);
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *size) {
    REAL(getsockopt);
    return fails_from_begin("getsockopt") ? -1 : real(fd, level, name, value, size);
}

int connect(int fd, const struct sockaddr *to, socklen_t size) {
    REAL(connect);
    return fails_from_begin("connect") ? -1 : real(fd, to, size);
}

static void note_tcp_thread(int fd) {
    struct sockaddr address = { 0 };
    socklen_t size = sizeof address;
    if (given && !syscall(SYS_getsockname, fd, &address, &size) && address.sa_family == AF_INET)
        atomic_store(&given->tcp_thread, (int)syscall(SYS_gettid));
}

int accept(int fd, struct sockaddr *from, socklen_t *size) {
    REAL(accept);
    note_tcp_thread(fd);
    return fails_from_begin("accept") ? -1 : socket_made(real(fd, from, size), 0);
}

int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags) {
    REAL(accept4);
    note_tcp_thread(fd);
    return fails_from_begin("accept") ? -1 : socket_made(real(fd, from, size, flags), 0);
}

ssize_t send(int fd, const void *from, size_t size, int flags) {
    REAL(send);
    return fails_transfer("send", fd) ? -1 : real(fd, from, size, flags);
}

ssize_t sendto(int fd, const void *from, size_t size, int flags, const struct sockaddr *to, socklen_t to_size) {
    REAL(sendto);
    return fails_transfer("send", fd) ? -1 : real(fd, from, size, flags, to, to_size);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    return fails_transfer("send", fd) ? -1 : real(fd, message, flags);
}

ssize_t recv(int fd, void *to, size_t size, int flags) {
    REAL(recv);
    return fails_transfer("recv", fd) ? -1 : real(fd, to, size, flags);
}

ssize_t recvfrom(int fd, void *to, size_t size, int flags, struct sockaddr *from, socklen_t *from_size) {
    REAL(recvfrom);
    return fails_transfer("recv", fd) ? -1 : real(fd, to, size, flags, from, from_size);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    return fails_transfer("recv", fd) ? -1 : real(fd, message, flags);
}

int epoll_create1(int flags) {
    REAL(epoll_create1);
    return fails_from_begin("epoll") ? -1 : real(flags);
}

int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event) {
    char thread[20] = "", file[256], what[300];
    int saved = errno;
    prctl(PR_GET_NAME, thread);
    fd_path(fd, file, sizeof file);
    snprintf(what, sizeof what, "epoll of %s in thread %s", file, thread);
    errno = saved;
    REAL(epoll_ctl);
    return operation == EPOLL_CTL_ADD && fails_from_begin_on("epoll", what) ? -1 : real(epoll, operation, fd, event);
}

int inotify_init1(int flags) {
    REAL(inotify_init1);
    return fails_from_begin("inotify") ? -1 : real(flags);
}

int inotify_add_watch(int fd, const char *path, uint32_t mask) {
    REAL(inotify_add_watch);
    return fails_from_begin("inotify") ? -1 : real(fd, path, mask);
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
