/*
 * Tests of the device event thread in a private network namespace: fast readers get no torn copy, a flood
 * does not delay the stop, and without events the heartbeat continues.
 */
#include "check.h"
#include "fixture.h"
#include "uevent_fixture.h"
#include "readers_fixture.h"

#define READERS 3
#define EVENTS 5000
#define CHANGES 10 /* that each reader must see */
#define AHEAD 100 /* of the listener, so that the smallest buffer loses nothing */

static _Atomic bool over;

static struct dh_uevents *started(uint64_t period_ns)
{
    struct dh_uevents *u;
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    fx_must(!dh_uevents_open(wake_fd, &wake_fd, 1, &u), "dh_uevents_open");
    close(wake_fd); /* the listener has a duplicate */
    u->counts.sample.period_ns = period_ns;
    CHECK_INT(dh_uevents_start(u), 0);
    CHECK_INT(dh_uevents_start(u), -EBUSY);
    return u;
}

static bool is_listening(struct dh_uevents *u, struct dh_uevent_sample *sample)
{
    return dh_uevents_read(u, sample, sizeof(*sample)) > 0 && sample->state != DH_STATE_STARTING;
}

/* Of two subsystems in turn: a complete sample has the same count for both, or one less for one. */
static void event(uint64_t number)
{
    ue_inject("change", "/devices/x", number % 2 ? "edac" : "pci");
}

static uint64_t events(const struct dh_uevent_sample *s)
{
    return s->changes[DH_SUBSYSTEM_PCI] + s->changes[DH_SUBSYSTEM_EDAC];
}

static const char *check_copy_of(const void *was_before, const void *is_now)
{
    const struct dh_uevent_sample *before = was_before, *now = is_now;

    if (events(now) < events(before) || now->passes < before->passes || now->heartbeat_ns < before->heartbeat_ns)
        return "time went back";
    if (now->lost || now->failures || now->malformed)
        return "events were lost";
    if (now->changes[DH_SUBSYSTEM_PCI] - now->changes[DH_SUBSYSTEM_EDAC] > 1)
        return "counts of two moments";
    return NULL;
}

static int64_t copy(void *from, void *buf, size_t cap)
{
    return dh_uevents_read(from, buf, cap);
}

static uint64_t moves(const void *now)
{
    return events(now);
}

static void test_reader_never_gets_a_torn_copy(void)
{
    struct dh_uevents *u = started(DH_NS);
    const struct rx_source source = { u, sizeof(struct dh_uevent_sample), copy, check_copy_of, moves, CHANGES };
    struct rx readers;
    struct dh_uevent_sample sample;
    uint64_t number = 0;

    EVENTUALLY(is_listening(u, &sample));
    rx_start(&readers, &source, READERS);
    while (number < EVENTS) {
        event(number++);
        if (number % AHEAD == 0)
            EVENTUALLY(is_listening(u, &sample) && events(&sample) == number);
        if (number % (EVENTS / CHANGES) == 0)
            EVENTUALLY(rx_have_seen(&readers, number / (EVENTS / CHANGES)));
    }
    rx_end(&readers);
    CHECK_INT(dh_uevents_stop(u, FX_PATIENCE_NS), 0);
}

static void *flood_main(void *arg)
{
    (void)arg;
    for (uint64_t number = 0; !atomic_load(&over); number++)
        event(number);
    return NULL;
}

static void test_flood_does_not_delay_the_stop(void)
{
    struct dh_uevents *u = started(DH_NS);
    struct dh_uevent_sample sample;
    pthread_t flood;

    atomic_store(&over, false);
    fx_must(!pthread_create(&flood, NULL, flood_main, NULL), "pthread_create");
    EVENTUALLY(is_listening(u, &sample) && events(&sample) > 1000);
    CHECK_INT(dh_uevents_stop(u, FX_PATIENCE_NS), 0);
    atomic_store(&over, true);
    pthread_join(flood, NULL);
}

static void test_idle_thread_keeps_its_heartbeat(void)
{
    uint64_t begun = dh_now_ns();
    struct dh_uevents *u = started(DH_NS / 100);
    struct dh_uevent_sample sample;

    EVENTUALLY(dh_uevents_read(u, &sample, sizeof(sample)) > 0);
    CHECK(sample.heartbeat_ns >= begun);
    EVENTUALLY(is_listening(u, &sample) && sample.passes > 20);
    CHECK_U64(events(&sample), 0);
    CHECK_INT(dh_uevents_stop(u, FX_PATIENCE_NS), 0);
}

int main(void)
{
    int descriptors;

    if (!ue_isolated())
        return check_skip("test_thread_uevents", "no network namespace of its own");
    descriptors = fx_count("/proc/self/fd");
    test_reader_never_gets_a_torn_copy();
    test_flood_does_not_delay_the_stop();
    test_idle_thread_keeps_its_heartbeat();
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    return check_done("test_thread_uevents");
}
