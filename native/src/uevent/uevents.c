/*
 * uevents.c - the thread that receives the kernel's device events.
 *
 * It is separate from the sampler: bursts of events (network devices, when pods start) delay no pass, and a
 * pass that hangs delays no event.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "uevent/uevents.h"

#define PERIOD_NS (10 * DH_NS)
#define RETRY_MIN_NS DH_NS
#define RETRY_MAX_NS (60 * DH_NS)
#define RUN_READS 256               /* 4 us each */
#define RUN_PAUSE_NS (DH_NS / 1000) /* after a run that did not empty the socket: half a core at most */
#define STACK_BYTES (256 * 1024)

/*
 * At most ten wakes per second, but the first ones without delay: a GPU that is removed sends two events
 * within a millisecond, "unbind" and "remove". Five wakes may come at once, then one every 200 ms.
 */
#define NOTIFY_GAP_NS (DH_NS / 5)
#define NOTIFY_AHEAD_NS (4 * NOTIFY_GAP_NS)

static void uevents_free(void *owner)
{
    struct dh_uevents *u = owner;

    if (u->fd >= 0)
        close(u->fd);
    if (u->wake_fd >= 0)
        close(u->wake_fd);
    for (uint32_t i = 0; i < u->rescan_fds; i++)
        close(u->rescan_fd[i]);
    dh_worker_close(&u->worker);
    free(u);
}

static void state_set(struct dh_uevents *u, enum dh_source_state state)
{
    if (u->counts.sample.state == (uint32_t)state)
        return;
    u->counts.sample.state = (uint32_t)state;
    u->counts.is_new = true;
}

/* The kernel was built without the socket, or a filter or policy forbids it. */
static bool is_absence(int err)
{
    return err == EPROTONOSUPPORT || err == EAFNOSUPPORT || err == EPERM || err == EACCES;
}

static void fail(struct dh_uevents *u, int err)
{
    struct dh_uevent_sample *sample = &u->counts.sample;
    bool absent = is_absence(err);

    if (u->fd >= 0)
        close(u->fd);
    u->fd = -1;
    sample->err = err;
    sample->failures += !absent;
    state_set(u, absent ? DH_STATE_ABSENT : DH_STATE_FAILING);
    if (absent)
        u->retry_ns = RETRY_MAX_NS; /* that rarely changes */
    u->paused_until_ns = dh_now_ns() + u->retry_ns;
    u->retry_ns = 2 * u->retry_ns < RETRY_MAX_NS ? 2 * u->retry_ns : RETRY_MAX_NS;
}

/*
 * The socket works. In a silent namespace it may too, if a container manager forwards events, but that is not
 * guaranteed.
 */
static void note_listening(struct dh_uevents *u)
{
    struct dh_uevent_sample *sample = &u->counts.sample;

    u->retry_ns = RETRY_MIN_NS;
    if (sample->state == DH_STATE_ABSENT)
        sample->err = 0; /* absence is no failure */
    state_set(u, sample->silent ? DH_STATE_ABSENT : DH_STATE_OK);
}

static void socket_open(struct dh_uevents *u)
{
    struct dh_uevent_sample *sample = &u->counts.sample;
    int fd = dh_uevent_socket();

    if (fd < 0) {
        fail(u, -fd);
        return;
    }
    u->fd = fd;
    u->events_lost = sample->passes > 0; /* events were missed while there was no socket */
    sample->silent = dh_uevent_netns_is_silent();
}

/*
 * Count a message. The kernel's port is 0, which no other sender can have. A truncated message counts as
 * malformed.
 */
static void message_take(struct dh_uevents *u, const struct sockaddr_nl *from, size_t n)
{
    if (from->nl_pid)
        u->counts.sample.foreign++;
    else
        dh_uevent_count(&u->counts, u->buf, n <= sizeof(u->buf) ? n : 0);
}

/*
 * The socket is empty. After an overflow the kernel drops events until then: a reader that scanned earlier
 * could have scanned too early.
 */
static void caught_up(struct dh_uevents *u)
{
    note_listening(u);
    if (u->events_lost)
        dh_uevent_count_lost(&u->counts);
    u->events_lost = false;
}

/* Read the available messages, up to the limit of one run. */
static void drain(struct dh_uevents *u)
{
    for (int i = 0; i < RUN_READS; i++) {
        struct sockaddr_nl from = { 0 };
        socklen_t from_len = sizeof(from);
        ssize_t n = recvfrom(u->fd, u->buf, sizeof(u->buf), MSG_TRUNC, (struct sockaddr *)&from, &from_len);

        if (n >= 0) {
            message_take(u, &from, (size_t)n);
        } else if (errno == EAGAIN) {
            caught_up(u);
            return;
        } else if (errno == ENOBUFS) { /* the only sign of a loss: sequence numbers also have gaps without
                                          one */
            u->counts.sample.lost++;
            u->events_lost = true;
        } else if (errno != EINTR) {
            fail(u, errno);
            return;
        }
    }
    note_listening(u);
    u->paused_until_ns = dh_now_ns() + RUN_PAUSE_NS;
}

static void publish(struct dh_uevents *u)
{
    u->counts.sample.heartbeat_ns = dh_now_ns();
    dh_seqlock_begin(&u->pub_lock);
    dh_words_store(&u->pub, &u->counts.sample, sizeof(u->pub));
    dh_seqlock_end(&u->pub_lock);
}

/* Request rescans before waking the reader, so that it finds new readings. */
static void notify(struct dh_uevents *u, uint64_t now_ns)
{
    if (u->notify_after_ns + NOTIFY_AHEAD_NS < now_ns)
        u->notify_after_ns = now_ns - NOTIFY_AHEAD_NS;
    u->notify_after_ns += NOTIFY_GAP_NS;
    for (uint32_t i = 0; u->counts.rescan && i < u->rescan_fds; i++)
        dh_eventfd_notify(u->rescan_fd[i]);
    u->counts.is_new = u->counts.rescan = false;
    dh_eventfd_notify(u->wake_fd);
}

void dh_uevents_run_once(struct dh_uevents *u)
{
    if (dh_now_ns() >= u->paused_until_ns) {
        if (u->fd < 0)
            socket_open(u);
        if (u->fd >= 0)
            drain(u);
    }
    u->counts.sample.passes++;
    publish(u);
    if (u->counts.is_new && u->notify_after_ns <= u->counts.sample.heartbeat_ns)
        notify(u, u->counts.sample.heartbeat_ns);
}

/* Wait for work. Return: whether the thread must end. */
static bool wait_for_work(struct dh_uevents *u)
{
    uint64_t now_ns = dh_now_ns(), until_ns = now_ns + u->counts.sample.period_ns;
    bool paused = u->paused_until_ns > now_ns;

    if (u->counts.is_new && u->notify_after_ns < until_ns)
        until_ns = u->notify_after_ns;
    if (paused && u->paused_until_ns < until_ns)
        until_ns = u->paused_until_ns;
    return dh_worker_wait(&u->worker, paused ? -1 : u->fd, until_ns);
}

static void run(void *owner)
{
    do
        dh_uevents_run_once(owner);
    while (!wait_for_work(owner));
}

static int uevents_make(struct dh_uevents *u, int wake_fd, const int *rescan, uint32_t nrescan)
{
    int err = dh_worker_open(&u->worker, run, uevents_free, u);

    if (err)
        return err;
    u->wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
    if (u->wake_fd < 0)
        return -errno;
    for (; u->rescan_fds < nrescan; u->rescan_fds++) {
        u->rescan_fd[u->rescan_fds] = fcntl(rescan[u->rescan_fds], F_DUPFD_CLOEXEC, 0);
        if (u->rescan_fd[u->rescan_fds] < 0)
            return -errno;
    }
    return 0;
}

int dh_uevents_open(int wake_fd, const int *rescan, uint32_t nrescan, struct dh_uevents **out)
{
    struct dh_uevents *u;
    int err;

    if (nrescan > DH_UEVENT_RESCAN_FDS)
        return -EINVAL;
    u = calloc(1, sizeof(*u));
    if (!u)
        return -ENOMEM;
    u->fd = u->wake_fd = -1;
    u->retry_ns = RETRY_MIN_NS;
    u->counts.sample = (struct dh_uevent_sample){
        .size = sizeof(struct dh_uevent_sample),
        .version = DH_VERSION,
        .state = DH_STATE_STARTING,
        .period_ns = PERIOD_NS,
    };
    err = uevents_make(u, wake_fd, rescan, nrescan);
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

void dh_uevents_request_stop(struct dh_uevents *u)
{
    dh_worker_request_stop(&u->worker);
}

int dh_uevents_stop(struct dh_uevents *u, uint64_t timeout_ns)
{
    return dh_worker_stop(&u->worker, timeout_ns);
}
