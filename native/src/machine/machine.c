/*
 * machine.c - the thread that watches machine state that changes rarely: start and stop, and the timing of
 * passes.
 *
 * It is separate from the sampler: expensive files, such as /proc/interrupts on a big host, take milliseconds
 * and must not delay a pass of 100 ms, and firmware that hangs in a read of EDAC must not stop the watch over
 * cgroups.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/durations.h"
#include "machine/machine.h"

#define PERIOD_MIN_NS (10 * 1000000ull)
#define PERIOD_MAX_NS (3600 * DH_NS)
#define RESCAN_SHARE 10 /* requested rescans in sequence get a tenth of a core */
#define STACK_BYTES (256 * 1024)

/* The sources in the order of a pass: urgent ones before expensive ones, which may hang. */
enum pace { EVERY, SLOW, RARE };
static const struct {
    void (*pass)(struct dh_machine *m);
    enum pace pace;
} sources[DH_MACHINE_SOURCE_NUM] = {
    [DH_MACHINE_EDAC] = { dh_machine_edac_pass, EVERY },
    [DH_MACHINE_MEMORY] = { dh_machine_memory_pass, SLOW },
    [DH_MACHINE_CORES] = { dh_machine_cores_pass, RARE },
    [DH_MACHINE_PRESSURE] = { dh_machine_pressure_pass, SLOW },
};

static bool take_rescan_request(struct dh_machine *m)
{
    uint64_t times;

    return read(m->rescan_fd, &times, sizeof(times)) > 0;
}

static void paces_set(struct dh_machine *m)
{
    m->now_ns = dh_now_ns();
    m->read_all = m->first || (m->now_ns >= m->rescan_after_ns && take_rescan_request(m));
    if (m->read_all) {
        m->began_cpu_ns = dh_clock_ns(CLOCK_THREAD_CPUTIME_ID);
        if (!m->first)
            m->settle_passes = RESCAN_PASSES + 1;
    }
    m->settle_passes -= m->settle_passes > 0;
    m->rare = m->read_all || m->settle_passes ||
              dh_is_due(m->now_ns, m->rare_ns, m->opt.rare_ns, m->opt.period_ns);
    m->slow = m->rare || dh_is_due(m->now_ns, m->slow_ns, m->opt.slow_ns, m->opt.period_ns);
    dh_machine_roots_open(m);
    if (m->slow)
        m->slow_ns = m->now_ns;
    if (m->rare)
        m->rare_ns = m->now_ns;
}

static void source_done(struct dh_machine *m, enum dh_machine_source source)
{
    uint64_t end_ns = dh_now_ns();

    dh_durations_note(&m->durations[source], end_ns - m->source_start_ns);
    m->work.head.source[source].passes++;
    m->work.head.source[source].heartbeat_ns = end_ns;
    dh_machine_publish(m);
    dh_machine_notify(m);
}

/*
 * Return the time until the next pass. Without controllers, and with nothing to be retried, only slow passes read
 * something.
 */
static uint64_t pause_ns(const struct dh_machine *m)
{
    bool is_missing = false;

    for (int i = 0; i < DH_ROOT_NUM; i++)
        is_missing |= m->root[i].fd < 0;
    return is_missing || m->settle_passes > 1 || m->deferred ? m->opt.period_ns
                                                         : m->work.head.source[DH_MACHINE_EDAC].period_ns;
}

/* Schedule the next pass. After a pass longer than the period the thread rests for one period. */
static void next_pass_set(struct dh_machine *m)
{
    uint64_t end_ns = dh_now_ns();

    m->next_ns = (end_ns - m->now_ns < m->opt.period_ns ? m->now_ns : end_ns) + pause_ns(m);
}

/*
 * Run one pass. Each source is published and gets a heartbeat when it is done, so a read that hangs shows as
 * a stalled heartbeat of its source and of those after it.
 */
static void pass(struct dh_machine *m)
{
    paces_set(m);
    dh_machine_wake_deferred(m);
    for (uint32_t i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        if ((sources[i].pace == SLOW && !m->slow) || (sources[i].pace == RARE && !m->rare))
            continue;
        m->source_start_ns = dh_now_ns();
        sources[i].pass(m);
        if (i == DH_MACHINE_SOURCE_NUM - 1) {
            m->wake |= m->first || m->settle_passes == 1; /* enough clean passes for a recovery */
            m->first = false;
        }
        source_done(m, (enum dh_machine_source)i);
    }
    next_pass_set(m);
}

static void triggers_handle(struct dh_machine *m, const struct pollfd *fds)
{
    for (int i = 0; i < DH_MACHINE_TRIGGERS; i++) {
        if (!fds[i].revents)
            continue;
        m->now_ns = m->source_start_ns = dh_now_ns();
        if (dh_machine_pressure_fired(m, i, fds[i].revents))
            source_done(m, DH_MACHINE_PRESSURE);
    }
}

/*
 * Sleep until the next pass is due, and handle pressure triggers meanwhile. Return: false if the thread must
 * end.
 */
static bool wait_until_due(struct dh_machine *m)
{
    for (;;) {
        uint64_t now_ns = dh_now_ns(), until_ns = m->next_ns, left_ns;
        bool rescan_paused = m->rescan_after_ns > now_ns;
        struct pollfd fds[2 + DH_MACHINE_TRIGGERS] = {
            { .fd = m->worker.stop_fd, .events = POLLIN },
            { .fd = rescan_paused ? -1 : m->rescan_fd, .events = POLLIN },
        };
        struct timespec t;
        bool is_over;

        for (int i = 0; i < DH_MACHINE_TRIGGERS; i++)
            fds[2 + i] = (struct pollfd){ .fd = m->trigger[i], .events = POLLPRI };
        if (rescan_paused && m->rescan_after_ns < until_ns)
            until_ns = m->rescan_after_ns;
        left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
        t = dh_timespec(left_ns);
        is_over = !ppoll(fds, 2 + DH_MACHINE_TRIGGERS, &t, NULL) && until_ns == m->next_ns;
        if (fds[0].revents)
            return false;
        triggers_handle(m, fds + 2);
        if (fds[1].revents || is_over || now_ns >= m->next_ns)
            return true;
    }
}

/*
 * After a pass that read everything, ignore requests for a multiple of its CPU time: memory blocks that are added one
 * by one cause thousands. A read that hangs uses no CPU.
 */
void dh_machine_pause_rescans(struct dh_machine *m)
{
    if (m->read_all)
        m->rescan_after_ns =
            dh_now_ns() + (dh_clock_ns(CLOCK_THREAD_CPUTIME_ID) - m->began_cpu_ns) * (RESCAN_SHARE - 1);
}

static void run(void *owner)
{
    struct dh_machine *m = owner;

    do {
        pass(m);
        dh_machine_pause_rescans(m);
    } while (wait_until_due(m));
}

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void machine_free(void *owner)
{
    struct dh_machine *m = owner;

    for (int i = 0; i < DH_ROOT_NUM; i++)
        close_fd(m->root[i].fd);
    for (int i = 0; i < DH_MACHINE_TRIGGERS; i++)
        close_fd(m->trigger[i]);
    close_fd(m->wake_fd);
    close_fd(m->rescan_fd);
    dh_worker_close(&m->worker);
    free(m);
}

static int options_check(const struct dh_machine_options *o)
{
    if (o->size != sizeof(*o) || o->version != DH_VERSION)
        return DH_EABI;
    if (o->period_ns < PERIOD_MIN_NS || o->period_ns > PERIOD_MAX_NS || o->slow_ns < o->period_ns ||
        o->rare_ns < o->slow_ns)
        return -EINVAL;
    return 0;
}

static void head_make(struct dh_machine *m)
{
    struct dh_machine_head *head = &m->work.head;
    const uint64_t period_ns[] = { m->opt.period_ns, m->opt.slow_ns, m->opt.rare_ns };

    head->size = sizeof(*head);
    head->version = DH_VERSION;
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++) {
        head->source[i].state = DH_STATE_STARTING;
        head->source[i].period_ns = period_ns[sources[i].pace];
    }
}

static int machine_make(struct dh_machine *m, const char *sysfs, const char *procfs, int wake_fd)
{
    const char *path[DH_ROOT_NUM] = { sysfs, procfs };
    int err = dh_worker_open(&m->worker, run, machine_free, m);

    if (err)
        return err;
    for (int i = 0; i < DH_ROOT_NUM; i++) {
        if (strlen(path[i]) >= sizeof(m->root[i].path))
            return -ENAMETOOLONG;
        strcpy(m->root[i].path, path[i]);
    }
    m->wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
    if (m->wake_fd < 0)
        return -errno;
    m->rescan_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return m->rescan_fd < 0 ? -errno : 0;
}

int dh_machine_open(const struct dh_machine_options *o, const char *sysfs, const char *procfs, int wake_fd,
                    struct dh_machine **out)
{
    struct dh_machine *m;
    int err = options_check(o);

    if (err)
        return err;
    m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    m->opt = *o;
    m->wake_fd = m->rescan_fd = -1;
    for (int i = 0; i < DH_ROOT_NUM; i++)
        m->root[i].fd = -1;
    for (int i = 0; i < DH_MACHINE_TRIGGERS; i++)
        m->trigger[i] = -1;
    m->first = true;
    head_make(m);
    err = machine_make(m, sysfs, procfs, wake_fd);
    if (err) {
        machine_free(m);
        return err;
    }
    *out = m;
    return 0;
}

int dh_machine_start(struct dh_machine *m)
{
    if (m->worker.running)
        return -EBUSY;
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++)
        if (!m->work.head.source[i].passes)
            m->work.head.source[i].heartbeat_ns = dh_now_ns();
    dh_machine_publish(m);
    return dh_worker_start(&m->worker, "dh-machine", STACK_BYTES);
}

int dh_machine_rescan_fd(const struct dh_machine *m)
{
    return m->rescan_fd;
}

int dh_machine_pass(struct dh_machine *m)
{
    if (m->worker.running)
        return -EBUSY;
    pass(m);
    return 0;
}

void dh_machine_request_stop(struct dh_machine *m)
{
    dh_worker_request_stop(&m->worker);
}

int dh_machine_stop(struct dh_machine *m, uint64_t timeout_ns)
{
    return dh_worker_stop(&m->worker, timeout_ns);
}
