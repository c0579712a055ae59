/*
 * uevents.c - the thread that hears the kernel's device events.
 *
 * It is no part of the sampler: events that come in masses (network devices, at the start of pods) keep no
 * pass waiting, and a pass that hangs no event.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "uevents.h"

#define PERIOD_NS (10 * DH_NS)
#define RETRY_MIN_NS DH_NS
#define RETRY_MAX_NS (60 * DH_NS)
#define TURN_READS 256              /* 4 us each */
#define TURN_REST_NS (DH_NS / 1000) /* after a turn that did not reach the end: half a core at most */
#define STACK_BYTES (256 * 1024)

/*
 * Ten wakes per second at most, but no gap between the first ones: a GPU that goes sends two events within a
 * millisecond, "unbind" and "remove". Five may come at once, then one in 200 ms.
 */
#define RING_GAP_NS (DH_NS / 5)
#define RING_AHEAD_NS (4 * RING_GAP_NS)

static void uevents_free(void *owner)
{
    struct dh_uevents *u = owner;

    if (u->fd >= 0)
        close(u->fd);
    if (u->wake_fd >= 0)
        close(u->wake_fd);
    for (uint32_t i = 0; i < u->pokes; i++)
        close(u->poke_fd[i]);
    dh_worker_close(&u->worker);
    free(u);
}

static void state_set(struct dh_uevents *u, enum dh_source_state state)
{
    if (u->heard.sample.state == (uint32_t)state)
        return;
    u->heard.sample.state = (uint32_t)state;
    u->heard.news = true;
}

/* The kernel was built without it, or a filter or policy lets nobody like us have one. */
static bool is_absence(int err)
{
    return err == EPROTONOSUPPORT || err == EAFNOSUPPORT || err == EPERM || err == EACCES;
}

static void fail(struct dh_uevents *u, int err)
{
    struct dh_uevent_sample *sample = &u->heard.sample;
    bool absent = is_absence(err);

    if (u->fd >= 0)
        close(u->fd);
    u->fd = -1;
    sample->err = err;
    sample->failures += !absent;
    state_set(u, absent ? DH_STATE_ABSENT : DH_STATE_FAILING);
    if (absent)
        u->retry_ns = RETRY_MAX_NS; /* that seldom changes */
    u->rest_ns = dh_now_ns() + u->retry_ns;
    u->retry_ns = 2 * u->retry_ns < RETRY_MAX_NS ? 2 * u->retry_ns : RETRY_MAX_NS;
}

/* In a deaf namespace too: a container's manager may pass events on. That it does nobody promises. */
static void hears(struct dh_uevents *u)
{
    struct dh_uevent_sample *sample = &u->heard.sample;

    u->retry_ns = RETRY_MIN_NS;
    if (sample->state == DH_STATE_ABSENT)
        sample->err = 0; /* absence was no failure */
    state_set(u, sample->deaf ? DH_STATE_ABSENT : DH_STATE_OK);
}

static void listen_anew(struct dh_uevents *u)
{
    struct dh_uevent_sample *sample = &u->heard.sample;
    int fd = dh_uevent_socket();

    if (fd < 0) {
        fail(u, -fd);
        return;
    }
    u->fd = fd;
    u->missed = sample->passes > 0; /* what there was while nobody listened */
    sample->deaf = dh_uevent_deaf();
}

/* The kernel's port is 0, and nobody else can have it. A message that did not fit is none at all. */
static void message_take(struct dh_uevents *u, const struct sockaddr_nl *from, size_t n)
{
    if (from->nl_pid)
        u->heard.sample.foreign++;
    else
        dh_heard_take(&u->heard, u->buf, n <= sizeof(u->buf) ? n : 0);
}

/*
 * The socket is empty. After an overflow the kernel throws away what comes until that is so, without another
 * word: whoever looked again before it, could have looked too early.
 */
static void caught_up(struct dh_uevents *u)
{
    hears(u);
    if (u->missed)
        dh_heard_missed(&u->heard);
    u->missed = false;
}

/* All that there is, but no more than a turn's share. */
static void drain(struct dh_uevents *u)
{
    for (int i = 0; i < TURN_READS; i++) {
        struct sockaddr_nl from = { 0 };
        socklen_t from_len = sizeof(from);
        ssize_t n = recvfrom(u->fd, u->buf, sizeof(u->buf), MSG_TRUNC, (struct sockaddr *)&from, &from_len);

        if (n >= 0) {
            message_take(u, &from, (size_t)n);
        } else if (errno == EAGAIN) {
            caught_up(u);
            return;
        } else if (errno == ENOBUFS) { /* the only sign of a loss: numbers have gaps without any */
            u->heard.sample.lost++;
            u->missed = true;
        } else if (errno != EINTR) {
            fail(u, errno);
            return;
        }
    }
    hears(u);
    u->rest_ns = dh_now_ns() + TURN_REST_NS;
}

static void publish(struct dh_uevents *u)
{
    u->heard.sample.beat_ns = dh_now_ns();
    dh_seqlock_begin(&u->pub_lock);
    dh_words_store(&u->pub, &u->heard.sample, sizeof(u->pub));
    dh_seqlock_end(&u->pub_lock);
}

static void raise_fd(int fd)
{
    uint64_t one = 1;

    (void)!write(fd, &one, sizeof(one));
}

/* Whoever is poked reads before whoever is woken asks. */
static void ring(struct dh_uevents *u, uint64_t now_ns)
{
    if (u->ring_ns + RING_AHEAD_NS < now_ns)
        u->ring_ns = now_ns - RING_AHEAD_NS;
    u->ring_ns += RING_GAP_NS;
    for (uint32_t i = 0; u->heard.poke && i < u->pokes; i++)
        raise_fd(u->poke_fd[i]);
    u->heard.news = u->heard.poke = false;
    raise_fd(u->wake_fd);
}

void dh_uevents_turn(struct dh_uevents *u)
{
    if (dh_now_ns() >= u->rest_ns) {
        if (u->fd < 0)
            listen_anew(u);
        if (u->fd >= 0)
            drain(u);
    }
    u->heard.sample.passes++;
    publish(u);
    if (u->heard.news && u->ring_ns <= u->heard.sample.beat_ns)
        ring(u, u->heard.sample.beat_ns);
}

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Wait for something to do; whether the thread is asked to end. */
static bool turn_wait(struct dh_uevents *u)
{
    uint64_t now_ns = dh_now_ns(), until_ns = now_ns + u->heard.sample.period_ns;
    bool resting = u->rest_ns > now_ns;
    struct pollfd fds[] = { { .fd = u->worker.stop_fd, .events = POLLIN },
                            { .fd = resting ? -1 : u->fd, .events = POLLIN } };
    struct timespec t;

    if (u->heard.news)
        until_ns = sooner(until_ns, u->ring_ns);
    if (resting)
        until_ns = sooner(until_ns, u->rest_ns);
    until_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    t.tv_sec = (time_t)(until_ns / DH_NS);
    t.tv_nsec = (long)(until_ns % DH_NS);
    return ppoll(fds, 2, &t, NULL) > 0 && fds[0].revents;
}

static void run(void *owner)
{
    do
        dh_uevents_turn(owner);
    while (!turn_wait(owner));
}

static int uevents_make(struct dh_uevents *u, int wake_fd, const int *poke, uint32_t npoke)
{
    int err = dh_worker_open(&u->worker, run, uevents_free, u);

    if (err)
        return err;
    u->wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
    if (u->wake_fd < 0)
        return -errno;
    for (; u->pokes < npoke; u->pokes++) {
        u->poke_fd[u->pokes] = fcntl(poke[u->pokes], F_DUPFD_CLOEXEC, 0);
        if (u->poke_fd[u->pokes] < 0)
            return -errno;
    }
    return 0;
}

int dh_uevents_open(int wake_fd, const int *poke, uint32_t npoke, struct dh_uevents **out)
{
    struct dh_uevents *u;
    int err;

    if (npoke > DH_UEVENT_POKES)
        return -EINVAL;
    u = calloc(1, sizeof(*u));
    if (!u)
        return -ENOMEM;
    u->fd = u->wake_fd = -1;
    u->retry_ns = RETRY_MIN_NS;
    u->heard.sample = (struct dh_uevent_sample){
        .size = sizeof(struct dh_uevent_sample),
        .version = DH_VERSION,
        .state = DH_STATE_STARTING,
        .period_ns = PERIOD_NS,
    };
    err = uevents_make(u, wake_fd, poke, npoke);
    if (err) {
        uevents_free(u);
        return err;
    }
    *out = u;
    return 0;
}

int dh_uevents_start(struct dh_uevents *u)
{
    if (u->worker.running)
        return -EBUSY;
    publish(u);
    return dh_worker_start(&u->worker, "dh-uevents", STACK_BYTES);
}

struct copy {
    struct dh_uevents *u;
    void *buf;
};

static int64_t copy_out(void *arg)
{
    const struct copy *c = arg;

    dh_words_load(c->buf, &c->u->pub, sizeof(c->u->pub));
    return (int64_t)sizeof(c->u->pub);
}

int64_t dh_uevents_read(struct dh_uevents *u, void *buf, size_t cap)
{
    struct copy copy = { .u = u, .buf = buf };

    if (cap < sizeof(u->pub))
        return -ENOSPC;
    return dh_seqlock_read(&u->pub_lock, copy_out, &copy);
}

int dh_uevents_stop(struct dh_uevents *u, uint64_t timeout_ns)
{
    return dh_worker_stop(&u->worker, timeout_ns);
}
