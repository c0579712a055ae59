/*
 * kmsg.c - the thread that reads the kernel log: first what the kernel still holds, then new records.
 *
 * It is separate from the sampler: no pass waits for a flood of lines, and no line for a read that hangs.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "kmsg/kmsg.h"

#define DEVICE "/dev/kmsg"
#define DEVICE_NUMBER makedev(1, 11) /* Documentation/admin-guide/devices.txt */

#define PERIOD_NS (10 * DH_NS)
#define RETRY_MIN_NS DH_NS
#define RETRY_MAX_NS (60 * DH_NS)
#define END_OF_FILE_NS (DH_NS / 10) /* poll(2) does not report that a file grows or that a FIFO gets a writer */
#define RUN_READS 256               /* one record each; the smallest log of a distribution holds 300 */
#define STACK_BYTES (256 * 1024)

/*
 * Why the reader is to be woken, and the shortest time after the last wake. A new entry wakes almost at once:
 * with 10,000 new entries per second the reader gets 200 wakes. More lines of known entries wake ten times
 * per second, which suffices for rates and bursts.
 */
enum { WAKE_NONE, WAKE_REPEATED, WAKE_NEW_ENTRY, WAKE_STATE };
static const uint64_t wake_gap_ns[] = { 0, DH_NS / 10, DH_NS / 200, 0 };

static void kmsg_free(void *owner)
{
    struct dh_kmsg *k = owner;

    if (k->fd >= 0)
        close(k->fd);
    if (k->wake_fd >= 0)
        close(k->wake_fd);
    dh_worker_close(&k->worker);
    free(k->path);
    free(k->patterns);
    free(k);
}

static void request_wake(struct dh_kmsg *k, int reason)
{
    if (k->wake_reason < reason)
        k->wake_reason = reason;
}

static void state_set(struct dh_kmsg *k, enum dh_source_state state)
{
    if (k->lines.work.head.state == (uint32_t)state)
        return;
    k->lines.work.head.state = (uint32_t)state;
    request_wake(k, WAKE_STATE);
}

/* No device in this container (ENOENT), or in this kernel (ENXIO, built without printk). */
static void fail(struct dh_kmsg *k, int err)
{
    bool absent = err == ENOENT || err == ENXIO;

    if (k->fd >= 0)
        close(k->fd);
    k->fd = -1;
    k->lines.buffered = 0;
    k->lines.overlong = false;
    k->lines.work.head.err = err;
    k->lines.work.head.failures += !absent;
    state_set(k, absent ? DH_STATE_ABSENT : DH_STATE_FAILING);
    k->paused_until_ns = dh_now_ns() + k->retry_ns;
    k->retry_ns = 2 * k->retry_ns < RETRY_MAX_NS ? 2 * k->retry_ns : RETRY_MAX_NS;
}

static void caught_up(struct dh_kmsg *k)
{
    k->retry_ns = RETRY_MIN_NS;
    if (k->lines.work.head.state == DH_STATE_ABSENT)
        k->lines.work.head.err = 0; /* absence is no failure */
    state_set(k, k->lines.malformed ? DH_STATE_FAILING : DH_STATE_OK);
}

/*
 * Return the CPU time of this thread.
 */
static uint64_t thread_cpu_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_nsec;
}

/*
 * Read available records, up to the limit of one run. A flood takes half a core at most: after a run that did
 * not reach the end, the thread rests for as long as it has worked. Records lost meanwhile are counted.
 */
static void log_read(struct dh_kmsg *k)
{
    struct dh_lines *l = &k->lines;
    uint64_t begun_ns = thread_cpu_ns();
    int skipped = 0;

    for (int i = 0; i < RUN_READS; i++) {
        ssize_t n = read(k->fd, l->buf + l->buffered, sizeof(l->buf) - l->buffered);

        if (n > 0) {
            dh_lines_feed(l, (size_t)n);
        } else if (n == 0 || errno == EAGAIN) {
            if (n == 0)
                k->paused_until_ns = dh_now_ns() + END_OF_FILE_NS;
            caught_up(k);
            return;
        } else if (errno == EPIPE || errno == EINVAL) {
            skipped++; /* overwritten or too long: reading continues behind, and the sequence numbers reveal
                          the loss */
        } else if (errno != EINTR) {
            fail(k, errno);
            return;
        }
    }
    if (skipped == RUN_READS) {
        fail(k, EINVAL);
        return;
    }
    k->paused_until_ns = dh_now_ns() + (thread_cpu_ns() - begun_ns);
    if (l->work.head.lost)
        caught_up(k); /* in an endless flood, the records that were overrun are the past */
}

static void publish(struct dh_kmsg *k)
{
    struct dh_lines *l = &k->lines;
    struct dh_log_table *to = &k->pub;

    l->work.head.heartbeat_ns = dh_now_ns();
    dh_seqlock_begin(&k->pub_lock);
    for (uint32_t word = 0; word < DH_LOG_MAX / 64; word++) {
        for (uint64_t m = l->dirty[word]; m; m &= m - 1) {
            uint32_t i = word * 64 + (uint32_t)__builtin_ctzll(m);

            dh_words_store(&to->line[i], &l->work.line[i], sizeof(to->line[i]));
        }
        l->dirty[word] = 0;
    }
    dh_words_store(&to->head, &l->work.head, sizeof(to->head));
    dh_seqlock_end(&k->pub_lock);
}

/*
 * Return a descriptor of the log, -1 with errno on failure. A service manager that opened the kernel log as
 * standard input spares this process the capability to open it.
 */
static int log_open(const char *path)
{
    struct stat input;
    int fd;

    if (strcmp(path, DEVICE) || fstat(STDIN_FILENO, &input) < 0 || !S_ISCHR(input.st_mode) ||
        input.st_rdev != DEVICE_NUMBER)
        return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    fd = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return fd;
    if (fcntl(fd, F_SETFL, O_NONBLOCK) == 0 && lseek(fd, 0, SEEK_SET) == 0)
        return fd;
    close(fd);
    return -1;
}

/* When to wake the reader. What the log held at start wakes it once, at the end. */
static uint64_t wake_time_ns(const struct dh_kmsg *k)
{
    if (!k->wake_reason || k->lines.work.head.state == DH_STATE_STARTING)
        return UINT64_MAX;
    return k->notified_ns + wake_gap_ns[k->wake_reason];
}

void dh_kmsg_run_once(struct dh_kmsg *k)
{
    struct dh_lines *l = &k->lines;
    uint64_t now_ns = dh_now_ns();
    bool notify;

    if (now_ns >= k->paused_until_ns) {
        if (k->fd < 0)
            k->fd = log_open(k->path);
        if (k->fd < 0)
            fail(k, errno);
        else
            log_read(k);
    }
    if (l->changed)
        request_wake(k, l->new_entry ? WAKE_NEW_ENTRY : WAKE_REPEATED);
    l->changed = l->new_entry = false;
    now_ns = dh_now_ns();
    notify = wake_time_ns(k) <= now_ns;
    l->work.head.wakes += notify;
    l->work.head.passes++;
    publish(k);
    if (!notify)
        return;
    k->wake_reason = WAKE_NONE;
    k->notified_ns = now_ns;
    dh_eventfd_notify(k->wake_fd);
}

/* Wait for work. Return: whether the thread must end. */
static bool wait_for_work(struct dh_kmsg *k)
{
    uint64_t now_ns = dh_now_ns(), until_ns = now_ns + k->lines.work.head.period_ns, wake_ns = wake_time_ns(k);
    bool paused = k->paused_until_ns > now_ns;

    if (wake_ns < until_ns)
        until_ns = wake_ns;
    if (paused && k->paused_until_ns < until_ns)
        until_ns = k->paused_until_ns;
    return dh_worker_wait(&k->worker, paused ? -1 : k->fd, until_ns);
}

static void run(void *owner)
{
    do
        dh_kmsg_run_once(owner);
    while (!wait_for_work(owner));
}

static int patterns_take(struct dh_kmsg *k, const char *patterns, size_t len)
{
    struct dh_lines *l = &k->lines;

    if (len && patterns[len - 1])
        return -EINVAL;
    k->patterns = malloc(len + 1);
    if (!k->patterns)
        return -ENOMEM;
    memcpy(k->patterns, patterns, len);
    for (const char *p = k->patterns; p < k->patterns + len; p += strlen(p) + 1) {
        if (l->patterns == DH_PATTERN_MAX || dh_pattern_check(p))
            return -EINVAL;
        l->pattern[l->patterns++] = p;
    }
    return 0;
}

static int kmsg_make(struct dh_kmsg *k, const char *path, const char *patterns, size_t len, int wake_fd)
{
    int err = dh_worker_open(&k->worker, run, kmsg_free, k);

    if (err)
        return err;
    k->wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
    if (k->wake_fd < 0)
        return -errno;
    k->path = strdup(path);
    if (!k->path)
        return -ENOMEM;
    return patterns_take(k, patterns, len);
}

int dh_kmsg_open(const struct dh_kmsg_options *o, const char *path, const char *patterns, size_t len,
                 int wake_fd, struct dh_kmsg **out)
{
    struct dh_kmsg *k;
    int err;

    if (o->size != sizeof(*o) || o->version != DH_VERSION)
        return DH_EABI;
    if (o->any_facility > 1 || o->reserved)
        return -EINVAL;
    k = calloc(1, sizeof(*k));
    if (!k)
        return -ENOMEM;
    k->fd = k->wake_fd = -1;
    k->retry_ns = RETRY_MIN_NS;
    k->lines.any_facility = o->any_facility;
    k->lines.work.head = (struct dh_log){
        .size = sizeof(struct dh_log),
        .version = DH_VERSION,
        .state = DH_STATE_STARTING,
        .period_ns = PERIOD_NS,
    };
    err = kmsg_make(k, path, patterns, len, wake_fd);
    if (err) {
        kmsg_free(k);
        return err;
    }
    *out = k;
    return 0;
}

int dh_kmsg_start(struct dh_kmsg *k)
{
    if (k->worker.running)
        return -EBUSY;
    publish(k);
    return dh_worker_start(&k->worker, "dh-kmsg", STACK_BYTES);
}

size_t dh_kmsg_size(const struct dh_kmsg *k)
{
    return sizeof(k->pub);
}

struct copy {
    struct dh_kmsg *k;
    char *buf;
    size_t cap;
};

static int64_t copy_out(void *arg)
{
    const struct copy *c = arg;
    struct dh_log *head = (struct dh_log *)(void *)c->buf;
    size_t lines;

    dh_words_load(head, &c->k->pub.head, sizeof(*head));
    if (head->entries > DH_LOG_MAX)
        return DH_ETORN;
    lines = head->entries * sizeof(struct dh_log_line);
    if (sizeof(*head) + lines > c->cap)
        return -ENOSPC;
    dh_words_load(c->buf + sizeof(*head), c->k->pub.line, lines);
    return (int64_t)(sizeof(*head) + lines);
}

int64_t dh_kmsg_read(struct dh_kmsg *k, void *buf, size_t cap)
{
    struct copy copy = { .k = k, .buf = buf, .cap = cap };

    if (cap < sizeof(struct dh_log))
        return -ENOSPC;
    return dh_seqlock_read(&k->pub_lock, copy_out, &copy);
}

void dh_kmsg_request_stop(struct dh_kmsg *k)
{
    dh_worker_request_stop(&k->worker);
}

int dh_kmsg_stop(struct dh_kmsg *k, uint64_t timeout_ns)
{
    return dh_worker_stop(&k->worker, timeout_ns);
}
