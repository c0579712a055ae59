/*
 * kmsg.c - the thread that reads the kernel log: what the kernel still has, and then as it comes.
 *
 * It is no part of the sampler: neither does a pass wait for a flood of lines, nor lines for a read that
 * hangs.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kmsg.h"

#define PERIOD_NS (10 * DH_NS)
#define RETRY_MIN_NS DH_NS
#define RETRY_MAX_NS (60 * DH_NS)
#define END_OF_FILE_NS (DH_NS / 10) /* poll(2) cannot tell when a file grows, or a FIFO finds a writer */
#define TURN_READS 256              /* of a record each; the smallest log of a distribution's holds 300 */
#define STACK_BYTES (256 * 1024)

/*
 * What the reader was not woken for, and how long after the last wake it is at the earliest. A new entry
 * wakes at once, but when each of 10,000 lines per second is a new one, the reader gets 200 wakes of them;
 * of more of what is known ten, which is what a rate or a burst is judged by.
 */
enum { NEWS_NONE, NEWS_AGAIN, NEWS_ENTRY, NEWS_STATE };
static const uint64_t news_gap_ns[] = { 0, DH_NS / 10, DH_NS / 200, 0 };

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

static void news(struct dh_kmsg *k, int what)
{
    if (k->news < what)
        k->news = what;
}

static void state_set(struct dh_kmsg *k, enum dh_source_state state)
{
    if (k->lines.work.head.state == (uint32_t)state)
        return;
    k->lines.work.head.state = (uint32_t)state;
    news(k, NEWS_STATE);
}

/* No device: none in this container (ENOENT), or none in this kernel (ENXIO, built without printk). */
static void fail(struct dh_kmsg *k, int err)
{
    bool absent = err == ENOENT || err == ENXIO;

    if (k->fd >= 0)
        close(k->fd);
    k->fd = -1;
    k->lines.have = 0;
    k->lines.overlong = false;
    k->lines.work.head.err = err;
    k->lines.work.head.failures += !absent;
    state_set(k, absent ? DH_STATE_ABSENT : DH_STATE_FAILING);
    k->rest_ns = dh_now_ns() + k->retry_ns;
    k->retry_ns = 2 * k->retry_ns < RETRY_MAX_NS ? 2 * k->retry_ns : RETRY_MAX_NS;
}

static void caught_up(struct dh_kmsg *k)
{
    k->retry_ns = RETRY_MIN_NS;
    if (k->lines.work.head.state == DH_STATE_ABSENT)
        k->lines.work.head.err = 0; /* absence was no failure */
    state_set(k, k->lines.broken ? DH_STATE_FAILING : DH_STATE_OK);
}

/* CPU time of this thread. */
static uint64_t spent_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * DH_NS + (uint64_t)t.tv_nsec;
}

/*
 * Read what there is, but no more than a turn's share. A flood takes half a core at most: after a turn that
 * did not reach the end the thread rests for as long as it has worked. What is lost by that is counted.
 */
static void log_read(struct dh_kmsg *k)
{
    struct dh_lines *l = &k->lines;
    uint64_t begun_ns = spent_ns();
    int skipped = 0;

    for (int i = 0; i < TURN_READS; i++) {
        ssize_t n = read(k->fd, l->buf + l->have, sizeof(l->buf) - l->have);

        if (n > 0) {
            dh_lines_take(l, (size_t)n);
        } else if (n == 0 || errno == EAGAIN) {
            if (n == 0)
                k->rest_ns = dh_now_ns() + END_OF_FILE_NS;
            caught_up(k);
            return;
        } else if (errno == EPIPE || errno == EINVAL) {
            skipped++; /* overwritten, or too long: reading goes on behind, and the next number tells */
        } else if (errno != EINTR) {
            fail(k, errno);
            return;
        }
    }
    if (skipped == TURN_READS) {
        fail(k, EINVAL);
        return;
    }
    k->rest_ns = dh_now_ns() + (spent_ns() - begun_ns);
    if (l->work.head.lost)
        caught_up(k); /* in a flood that never ends, what it overran is the past */
}

static void publish(struct dh_kmsg *k)
{
    struct dh_lines *l = &k->lines;
    struct dh_log_table *to = &k->pub;

    l->work.head.beat_ns = dh_now_ns();
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

/* When the reader is due to be woken. All that the log held at start is one piece of news, at its end. */
static uint64_t ring_ns(const struct dh_kmsg *k)
{
    if (!k->news || k->lines.work.head.state == DH_STATE_STARTING)
        return UINT64_MAX;
    return k->rung_ns + news_gap_ns[k->news];
}

void dh_kmsg_turn(struct dh_kmsg *k)
{
    struct dh_lines *l = &k->lines;
    uint64_t one = 1, now_ns = dh_now_ns();
    bool ring;

    if (now_ns >= k->rest_ns) {
        if (k->fd < 0)
            k->fd = open(k->path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        if (k->fd < 0)
            fail(k, errno);
        else
            log_read(k);
    }
    if (l->latched)
        news(k, l->fresh ? NEWS_ENTRY : NEWS_AGAIN);
    l->latched = l->fresh = false;
    now_ns = dh_now_ns();
    ring = ring_ns(k) <= now_ns;
    l->work.head.wakes += ring;
    l->work.head.passes++;
    publish(k);
    if (!ring)
        return;
    k->news = NEWS_NONE;
    k->rung_ns = now_ns;
    (void)!write(k->wake_fd, &one, sizeof(one));
}

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Wait for something to do; whether the thread is asked to end. */
static bool turn_wait(struct dh_kmsg *k)
{
    uint64_t now_ns = dh_now_ns(), until_ns = sooner(now_ns + k->lines.work.head.period_ns, ring_ns(k));
    bool resting = k->rest_ns > now_ns;
    struct pollfd fds[] = { { .fd = k->worker.stop_fd, .events = POLLIN },
                            { .fd = resting ? -1 : k->fd, .events = POLLIN } };
    struct timespec t;

    if (resting)
        until_ns = sooner(until_ns, k->rest_ns);
    until_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    t.tv_sec = (time_t)(until_ns / DH_NS);
    t.tv_nsec = (long)(until_ns % DH_NS);
    return ppoll(fds, 2, &t, NULL) > 0 && fds[0].revents;
}

static void run(void *owner)
{
    do
        dh_kmsg_turn(owner);
    while (!turn_wait(owner));
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

int dh_kmsg_stop(struct dh_kmsg *k, uint64_t timeout_ns)
{
    return dh_worker_stop(&k->worker, timeout_ns);
}
