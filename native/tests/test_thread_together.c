/*
 * Tests of the sampler, the machine watch, the device event listener and the kernel log reader as an agent
 * runs them: with one eventfd, and a device event that requests a rescan of two of them. A reader that reads
 * only when the eventfd fires misses nothing, and while all four publish as fast as they can, no two access
 * the same memory.
 */
#include <signal.h>

#include "check.h"
#include "machine_fixture.h"
#include "uevent_fixture.h"

#define ROUNDS 12
#define POOL "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
#define ERRORS "sys/devices/system/edac/mc/mc0/ue_count"
#define PATTERN "round %d"

static struct dh_sampler *sampler;
static struct dh_machine *machine;
static struct dh_uevents *uevents;
static struct dh_kmsg *kmsg;
static int log_fd;
static _Atomic bool over;

/* A reader's copies. */
struct copies {
    struct fx node;
    struct mx machine;
    struct dh_uevent_sample uevents;
    struct dh_log *log;
};

static void *buffer(size_t size)
{
    void *copy = aligned_alloc(8, size);

    fx_must(copy != NULL, "aligned_alloc");
    return copy;
}

static struct copies copies_make(void)
{
    return (struct copies){
        .node = { sampler, buffer(dh_sampler_size(sampler) + 8), dh_sampler_size(sampler) },
        .machine = { machine, buffer(dh_machine_size(machine)), dh_machine_size(machine), -1 },
        .log = buffer(dh_kmsg_size(kmsg)),
    };
}

static void copies_free(struct copies *c)
{
    free(c->node.head);
    free(c->machine.head);
    free(c->log);
}

static int64_t copy_once(struct copies *c)
{
    int64_t used = dh_sampler_read(sampler, 0, c->node.head, c->node.cap);

    if (used > 0)
        used = dh_machine_read(machine, c->machine.head, c->machine.cap);
    if (used > 0)
        used = dh_uevents_read(uevents, &c->uevents, sizeof(c->uevents));
    return used > 0 ? dh_kmsg_read(kmsg, c->log, dh_kmsg_size(kmsg)) : used;
}

/* A copy may fail while a thread is preempted; it is repeated, as no other wake may come. */
static bool check_copy_of(struct copies *c)
{
    int64_t used;

    do
        used = copy_once(c);
    while (used == DH_ETORN);
    return used > 0;
}

/* All values are of this round. */
static bool has_seen(const struct copies *c, uint64_t round)
{
    return fx_pool(&c->node, 2048, DH_MACHINE)->nr == round &&
           mx_dimm(&c->machine, 0, DH_CONTROLLER)->ue == round &&
           c->uevents.changes[DH_SUBSYSTEM_MEMORY] >= round && c->log->matched == round;
}

static bool is_listening(const struct copies *c)
{
    return c->node.head->passes && c->machine.head->source[DH_MACHINE_PRESSURE].passes &&
           c->uevents.state != DH_STATE_STARTING;
}

/* Passes an hour apart: only a rescan request causes another one. */
static void all_open(void)
{
    const struct dh_kmsg_options log = { .size = sizeof(log), .version = DH_VERSION };
    static const struct dh_wake wakes[] = { { .field = DH_POOL_NR, .mode = DH_WAKE_CHANGE } };
    struct dh_machine_options rare = mx_options();
    struct dh_options o = fx_options();
    char sysfs[FX_PATH], procfs[FX_PATH], path[FX_PATH];
    int wake_fd;

    snprintf(sysfs, sizeof(sysfs), "%s/sys", fx_root);
    snprintf(procfs, sizeof(procfs), "%s/proc", fx_root);
    snprintf(path, sizeof(path), "%s/kmsg", fx_root);
    o.period_ns = o.sweep_ns = o.resync_ns = 3600 * DH_NS;
    rare.period_ns = rare.slow_ns = rare.rare_ns = 3600 * DH_NS;
    fx_must(!dh_sampler_open(&o, sysfs, sysfs, "/", wakes, 1, &sampler), "dh_sampler_open");
    wake_fd = dh_sampler_eventfd(sampler);
    fx_must(!dh_machine_open(&rare, sysfs, procfs, wake_fd, &machine), "dh_machine_open");
    fx_must(!dh_uevents_open(wake_fd, (int[]){ dh_sampler_rescan_fd(sampler), dh_machine_rescan_fd(machine) }, 2,
                             &uevents), "dh_uevents_open");
    fx_must(!dh_kmsg_open(&log, path, PATTERN, sizeof(PATTERN), wake_fd, &kmsg), "dh_kmsg_open");
}

static void all_start(void)
{
    char path[FX_PATH];

    CHECK_INT(dh_sampler_start(sampler), 0);
    CHECK_INT(dh_machine_start(machine), 0);
    CHECK_INT(dh_uevents_start(uevents), 0);
    CHECK_INT(dh_kmsg_start(kmsg), 0);
    snprintf(path, sizeof(path), "%s/kmsg", fx_root);
    log_fd = open(path, O_WRONLY | O_CLOEXEC);
    fx_must(log_fd >= 0, path);
}

/* The sampler last: it owns the eventfd, and the others have duplicates. */
static void all_stop(void)
{
    CHECK_INT(dh_sampler_stop(sampler, FX_PATIENCE_NS), 0);
    CHECK_INT(dh_kmsg_stop(kmsg, FX_PATIENCE_NS), 0);
    CHECK_INT(dh_uevents_stop(uevents, FX_PATIENCE_NS), 0);
    CHECK_INT(dh_machine_stop(machine, FX_PATIENCE_NS), 0);
    close(log_fd);
}

static void change_all(uint64_t round)
{
    char text[64];
    int n;

    snprintf(text, sizeof(text), "%" PRIu64 "\n", round);
    fx_write(text, POOL);
    fx_write(text, ERRORS);
    n = snprintf(text, sizeof(text), "6,%" PRIu64 ",0,-;round %" PRIu64 "\n", round, round);
    fx_must(write(log_fd, text, (size_t)n) == n, "kmsg");
    ue_inject("online", "/devices/system/memory/memory32", "memory");
}

/* Read only when the eventfd fires. Return: false if it fires no more, and something was missed. */
static bool follows(struct copies *c, bool (*done)(const struct copies *c, uint64_t round), uint64_t round)
{
    struct pollfd woken = { .fd = dh_sampler_eventfd(sampler), .events = POLLIN };
    uint64_t times;

    while (!done(c, round))
        if (poll(&woken, 1, FX_PATIENCE_NS / 1000000) <= 0 || read(woken.fd, &times, sizeof(times)) < 0 ||
            !check_copy_of(c))
            return false;
    return true;
}

static bool are_listening(const struct copies *c, uint64_t round)
{
    (void)round;
    return is_listening(c);
}

static void *reader_main(void *arg)
{
    struct copies c = copies_make();
    bool *ok = arg;

    for (*ok = true; *ok && !atomic_load(&over);)
        *ok = check_copy_of(&c);
    copies_free(&c);
    return NULL;
}

static void test_reader_woken_by_all_threads_misses_nothing(void)
{
    struct copies c;
    pthread_t reader;
    bool ok;

    all_open();
    c = copies_make();
    memset(c.node.head, 0, sizeof(*c.node.head));
    memset(c.machine.head, 0, sizeof(*c.machine.head));
    memset(&c.uevents, 0, sizeof(c.uevents));
    memset(c.log, 0, sizeof(*c.log));
    all_start();
    fx_must(!pthread_create(&reader, NULL, reader_main, &ok), "pthread_create");
    CHECK(follows(&c, are_listening, 0));
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        change_all(round);
        CHECK(follows(&c, has_seen, round));
    }
    CHECK_U64(c.uevents.lost, 0);
    atomic_store(&over, true);
    pthread_join(reader, NULL);
    CHECK(ok);
    copies_free(&c);
    all_stop();
}

int main(void)
{
    int descriptors;

    if (!ue_isolated())
        return check_skip("test_thread_together", "no network namespace of its own");
    signal(SIGPIPE, SIG_IGN);
    fx_begin();
    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("0\n", POOL);
    fx_write("0\n", ERRORS);
    fx_dir("proc");
    fx_fifo("kmsg");
    descriptors = fx_count("/proc/self/fd");
    test_reader_woken_by_all_threads_misses_nothing();
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    return check_done("test_thread_together");
}
