/* sampler.c - the sampler's thread: start and stop, its timer, and the order of a pass. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "cgroup/cgroups.h"
#include "core/durations.h"
#include "core/sampler.h"

#define PERIOD_MIN_NS (10 * 1000000ull)
#define RESCAN_GAP_NS PERIOD_MIN_NS
#define PERIOD_MAX_NS (3600 * DH_NS)
#define ROOT_RETRY_NS DH_NS
#define ABSENT_RETRY_NS (10 * DH_NS)

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void sampler_free(void *owner)
{
    struct dh_sampler *s = owner;
    struct dh_cached_file *sets[] = { &s->online, &s->present, &s->isolated };

    dh_cgroups_free(s);
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        dh_cached_file_close(sets[i]);
    for (uint32_t i = 0; i < DH_POOL_MAX; i++)
        for (int m = 0; m < 5; m++)
            dh_cached_file_close(&s->pool_file[i][m]);
    close_fd(s->wake_fd);
    close_fd(s->rescan_fd);
    close_fd(s->timer_fd);
    close_fd(s->inotify_fd);
    close_fd(s->epoll_fd);
    close_fd(s->sysfs_fd);
    dh_worker_close(&s->worker);
    dh_tables_unmap(s);
    free(s->group_dirty);
    free(s->group_is_dirty);
    free(s->throttle);
    free(s);
}

static int options_check(const struct dh_options *o, const struct dh_wake *wakes, uint32_t nwakes)
{
    if (o->size != sizeof(*o) || o->version != DH_VERSION)
        return DH_EABI;
    if (o->period_ns < PERIOD_MIN_NS || o->period_ns > PERIOD_MAX_NS || o->sweep_ns < o->period_ns ||
        o->resync_ns < o->sweep_ns || !o->group_max || o->group_max > 65536 || o->reserved)
        return -EINVAL;
    for (uint32_t i = 0; i < nwakes; i++) {
        const struct dh_wake *w = &wakes[i];

        if (w->field >= DH_FIELD_NUM || (w->mode != DH_WAKE_CHANGE && w->mode != DH_WAKE_RISE))
            return -EINVAL;
        if (w->mode == DH_WAKE_RISE && (!w->threshold || !w->window_ns || !dh_field_rises(w->field)))
            return -EINVAL;
    }
    return 0;
}

static int root_copy(char *to, const char *root)
{
    size_t n = strlen(root);

    if (n > DH_ROOT_MAX)
        return -ENAMETOOLONG;
    memcpy(to, root, n + 1);
    return 0;
}

static int files_init(struct dh_sampler *s)
{
    static const char dir[] = "devices/system/cpu";
    int err;

    /*
     * 8 KiB: only a list of 8,192 CPUs with every second one missing needs 20 KiB, and no such machine exists
     */
    if ((err = dh_cached_file_init(&s->online, 8192, "%s/online", dir)))
        return err;
    if ((err = dh_cached_file_init(&s->present, 8192, "%s/present", dir)))
        return err;
    return dh_cached_file_init(&s->isolated, 8192, "%s/isolated", dir);
}

static int descriptors_make(struct dh_sampler *s)
{
    struct epoll_event timer = { .events = EPOLLIN, .data.fd = s->timer_fd };
    struct epoll_event rescan = { .events = EPOLLIN, .data.fd = s->rescan_fd };
    struct epoll_event stop = { .events = EPOLLIN, .data.fd = s->worker.stop_fd };

    if (epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->timer_fd, &timer) ||
        epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->rescan_fd, &rescan) ||
        epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->worker.stop_fd, &stop))
        return -errno;
    return 0;
}

static int sampler_make(struct dh_sampler *s, const struct dh_wake *wakes, uint32_t nwakes)
{
    int err;

    for (uint32_t i = 0; i < nwakes; i++)
        s->wakes[wakes[i].field] = wakes[i];
    for (uint32_t field = 0; field < DH_FIELD_NUM; field++)
        if (s->wakes[field].mode == DH_WAKE_RISE)
            s->rising |= DH_FIELD_BIT(field);
    err = dh_tables_map(s);
    if (err)
        return err;
    s->group_dirty = calloc(s->opt.group_max, sizeof(*s->group_dirty));
    s->group_is_dirty = calloc(s->opt.group_max, 1);
    if (!s->group_dirty || !s->group_is_dirty)
        return -ENOMEM;
    s->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s->rescan_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (s->wake_fd < 0 || s->rescan_fd < 0 || s->timer_fd < 0 || s->epoll_fd < 0)
        return -errno;
    s->work->head.descriptors = 6;
    err = descriptors_make(s);
    if (!err)
        err = files_init(s);
    if (!err)
        err = dh_cgroups_make(s);
    return err;
}

static void run(void *owner); /* the thread's function, below */

int dh_sampler_open(const struct dh_options *o, const char *sysfs, const char *cgroupfs,
                    const char *kubelet_root, const struct dh_wake *wakes, uint32_t nwakes,
                    struct dh_sampler **out)
{
    struct dh_sampler *s;
    int err = options_check(o, wakes, nwakes);

    if (err)
        return err;
    s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->wake_fd = s->rescan_fd = s->timer_fd = s->inotify_fd = s->oom_fd = s->epoll_fd = s->sysfs_fd = -1;
    s->opt = *o;
    s->first = true;
    err = dh_worker_open(&s->worker, run, sampler_free, s);
    if (!err)
        err = root_copy(s->sysfs, sysfs);
    if (!err)
        err = root_copy(s->cgroupfs, cgroupfs);
    if (!err)
        err = root_copy(s->kubelet_root, kubelet_root);
    if (!err)
        err = sampler_make(s, wakes, nwakes);
    if (err) {
        sampler_free(s);
        return err;
    }
    s->work->head.size = sizeof(s->work->head);
    s->work->head.version = DH_VERSION;
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        s->work->head.source[i].state = DH_STATE_STARTING;
        s->work->head.source[i].period_ns = o->period_ns;
    }
    if (o->period_ns < DH_NS)
        s->work->head.source[DH_SOURCE_THROTTLE].period_ns = DH_NS;
    *out = s;
    return 0;
}

/* Note the end of a source's pass, where the pass of the next source begins. */
static void heartbeat(struct dh_sampler *s, enum dh_source_id id)
{
    uint64_t end_ns = dh_now_ns();

    dh_durations_note(&s->durations[id], end_ns - s->source_start_ns);
    s->source_start_ns = end_ns;
    /* release: a reader that sees the heartbeat also sees what was published before it */
    atomic_store_explicit(&s->live.source_heartbeat_ns[id], end_ns, memory_order_release);
    atomic_fetch_add_explicit(&s->live.source_passes[id], 1, memory_order_release);
}

/* Open an empty root again: it may have been mounted on since it was opened. */
static void sysfs_renew(struct dh_sampler *s)
{
    const struct dh_source *source = s->work->head.source;
    int fd;

    if (!s->probe_absent || source[DH_SOURCE_CPUS].state != DH_STATE_ABSENT ||
        source[DH_SOURCE_HUGEPAGES].state != DH_STATE_ABSENT)
        return;
    fd = open(s->sysfs, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return;
    close(s->sysfs_fd);
    s->sysfs_fd = fd;
}

/* Open the sysfs root. Everything below a root that just appeared is new. */
static void sysfs_open(struct dh_sampler *s)
{
    static const enum dh_source_id ids[] = { DH_SOURCE_CPUS, DH_SOURCE_HUGEPAGES, DH_SOURCE_THROTTLE };
    int err;

    if (s->sysfs_fd >= 0)
        sysfs_renew(s);
    if (s->sysfs_fd >= 0 || (!s->resync && !dh_sampler_is_due(s, s->sysfs_ns, ROOT_RETRY_NS)))
        return;
    s->sysfs_ns = s->now_ns;
    s->sysfs_fd = open(s->sysfs, O_PATH | O_DIRECTORY | O_CLOEXEC);
    err = s->sysfs_fd < 0 ? errno : 0;
    for (size_t i = 0; i < sizeof(ids) / sizeof(*ids); i++) {
        dh_source_root(s, ids[i], DH_SYSFS, err);
        if (err) /* otherwise the sources set their own states */
            dh_source_state(s, ids[i], err == ENOENT ? DH_STATE_ABSENT : DH_STATE_FAILING);
    }
    if (err)
        return;
    s->resync = s->probe_absent = true;
    s->resync_ns = s->now_ns;
    s->work->head.descriptors++;
    s->head_dirty = true;
}

/*
 * Publish what a source read before its heartbeat, and before the next source may hang. The first pass is
 * published as a whole: until then every source is in DH_STATE_STARTING.
 */
static void source_done(struct dh_sampler *s, enum dh_source_id id)
{
    if (!s->first)
        dh_sampler_publish(s);
    heartbeat(s, id);
    dh_sampler_notify(s);
}

/*
 * Run one pass. Each source gets a heartbeat when it is done, so a read that hangs shows as a stalled
 * heartbeat of its source and of those after it.
 */
static void pass(struct dh_sampler *s)
{
    s->now_ns = s->source_start_ns = dh_now_ns();
    s->resync = s->first || dh_sampler_is_due(s, s->resync_ns, s->opt.resync_ns);
    if (s->resync)
        s->resync_ns = s->now_ns;
    s->probe_absent = s->resync || s->rescan_requested || dh_sampler_is_due(s, s->absent_ns, ABSENT_RETRY_NS);
    s->nodes_failed |= s->rescan_requested; /* so that nodes are listed again */
    s->pools_failed |= s->rescan_requested;
    s->rescan_requested = false;
    if (s->probe_absent)
        s->absent_ns = s->now_ns;
    sysfs_open(s);
    dh_rise_bases_renew(s);
    dh_cpus_pass(s);
    source_done(s, DH_SOURCE_CPUS);
    dh_hugepages_pass(s);
    source_done(s, DH_SOURCE_HUGEPAGES);
    if (dh_throttle_pass(s))
        source_done(s, DH_SOURCE_THROTTLE);
    dh_cgroups_pass(s);
    if (s->first)
        s->wake = true;
    s->first = false;
    dh_sampler_publish(s);
    heartbeat(s, DH_SOURCE_CGROUPS);
    atomic_fetch_add_explicit(&s->live.passes, 1, memory_order_release);
    atomic_store_explicit(&s->live.heartbeat_ns, dh_now_ns(), memory_order_release);
    dh_sampler_notify(s); /* after `passes`, from which the reader knows that the first pass has ended */
}

/*
 * Arm the timer for multiples of the period, first after half a period to one and a half: the passes over GPUs, in
 * another process, are due at the same times, and two threads that wake together cost less than two wakes.
 */
static int timer_arm(struct dh_sampler *s)
{
    uint64_t period_ns = s->opt.period_ns, soon_ns = dh_now_ns() + period_ns / 2;
    struct itimerspec every = { dh_timespec(period_ns), dh_timespec((soon_ns / period_ns + 1) * period_ns) };

    return timerfd_settime(s->timer_fd, TFD_TIMER_ABSTIME, &every, NULL) ? -errno : 0;
}

/*
 * Run one pass. After a pass longer than the period the thread rests for at least half a period, so it never uses
 * a whole core.
 */
static void pass_paced(struct dh_sampler *s)
{
    pass(s);
    if (dh_now_ns() - s->now_ns >= s->opt.period_ns)
        timer_arm(s);
}

/*
 * Begin a requested rescan. Requests are served at once, but at most every 10 ms, and the thread sleeps in
 * between: hot-plugged memory arrives as thousands of blocks. Return: whether the thread must end.
 */
static bool rescan_begin(struct dh_sampler *s)
{
    uint64_t next_ns = s->rescan_ns + RESCAN_GAP_NS;

    if (dh_now_ns() < next_ns && dh_worker_wait(&s->worker, -1, next_ns))
        return true;
    s->rescan_ns = dh_now_ns();
    s->rescan_requested = true;
    return false;
}

static void run(void *owner)
{
    struct dh_sampler *s = owner;
    struct epoll_event events[5];

    pass_paced(s);
    for (;;) {
        int n = epoll_wait(s->epoll_fd, events, 5, -1);
        bool due = false, has_events = false, has_oom_events = false;

        for (int i = 0; i < n; i++) {
            uint64_t count; /* may be more than one: missed passes are not made up for */
            int fd = events[i].data.fd;

            if (fd == s->worker.stop_fd || (fd == s->rescan_fd && rescan_begin(s)))
                return;
            has_events |= fd == s->inotify_fd;
            has_oom_events |= fd == s->oom_fd;
            if (fd == s->timer_fd || fd == s->rescan_fd)
                due |= read(fd, &count, sizeof(count)) > 0;
        }
        if (due)
            pass_paced(s);
        if (has_events || has_oom_events) {
            s->now_ns = dh_now_ns();
            if (has_oom_events)
                dh_cgroups_oom_events(s);
            if (has_events)
                dh_cgroups_events(s);
            dh_sampler_publish(s);
            dh_sampler_notify(s);
        }
    }
}

int dh_sampler_start(struct dh_sampler *s)
{
    uint64_t now_ns = dh_now_ns();
    int err;

    if (s->worker.running)
        return -EBUSY;
    err = timer_arm(s);
    if (err)
        return err;
    for (int i = 0; i < DH_SOURCE_NUM; i++)
        atomic_store_explicit(&s->live.source_heartbeat_ns[i], now_ns, memory_order_relaxed);
    s->head_dirty = true;
    dh_sampler_publish(s);
    return dh_worker_start(&s->worker, "dh-sampler", 0);
}

int dh_sampler_eventfd(const struct dh_sampler *s)
{
    return s->wake_fd;
}

int dh_sampler_rescan_fd(const struct dh_sampler *s)
{
    return s->rescan_fd;
}

int dh_sampler_pass(struct dh_sampler *s)
{
    if (s->worker.running)
        return -EBUSY;
    pass(s);
    return 0;
}

int64_t dh_sampler_sweep(struct dh_sampler *s)
{
    int64_t groups;

    if (s->worker.running)
        return -EBUSY;
    s->now_ns = dh_now_ns();
    groups = dh_cgroups_sweep(s);
    dh_sampler_publish(s);
    dh_sampler_notify(s);
    return groups;
}

int64_t dh_sampler_lower_bound(struct dh_sampler *s, uint32_t bare)
{
    int64_t reads;

    if (s->worker.running)
        return -EBUSY;
    if (bare >= DH_BARE_NUM)
        return -EINVAL;
    reads = dh_cached_file_read_bare(&s->online) + dh_hugepages_lower_bound(s);
    if (bare != DH_BARE_PASS)
        reads += dh_cgroups_lower_bound(s, bare == DH_BARE_OPENS);
    return reads;
}

void dh_sampler_request_stop(struct dh_sampler *s)
{
    dh_worker_request_stop(&s->worker);
}

int dh_sampler_stop(struct dh_sampler *s, uint64_t timeout_ns)
{
    return dh_worker_stop(&s->worker, timeout_ns);
}
