/*
 * The device events' thread, in a network namespace of this program's own: readers that copy as fast as they
 * can get no torn copy, a flood does not keep the thread from ending, and silence does not keep it from
 * beating.
 */
#include "check.h"
#include "fixture.h"
#include "uevent_fixture.h"
#include "readers_fixture.h"

#define READERS 3
#define KINDS 40
#define EVENTS 5000
#define CHANGES 10 /* that each reader sees */
#define AHEAD 100 /* of the listener, so that the smallest buffer loses nothing */

static _Atomic bool over;

static struct dh_uevents *started(uint64_t period_ns)
{
    struct dh_uevents *u;
    int wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

    fx_must(!dh_uevents_open(wake_fd, &wake_fd, 1, &u), "dh_uevents_open");
    close(wake_fd); /* the listener has its own */
    u->heard.work.head.period_ns = period_ns;
    CHECK_INT(dh_uevents_start(u), 0);
    CHECK_INT(dh_uevents_start(u), -EBUSY);
    return u;
}

static bool is_listening(struct dh_uevents *u, struct dh_uevents_head *head)
{
    return dh_uevents_read(u, head, dh_uevents_size(u)) > 0 && head->state != DH_STATE_STARTING;
}

static void event(uint64_t number)
{
    char path[64], driver[24];

    snprintf(path, sizeof(path), "/devices/kind%" PRIu64, number % KINDS);
    snprintf(driver, sizeof(driver), "%" PRIu64, number);
    ue_inject("change", path, "pci", driver);
}

/* Each event says its number, those of one kind are KINDS apart: a whole entry is so in all its members. */
static const char *look(const void *was_before, const void *is_now)
{
    const struct dh_uevents_head *before = was_before, *now = is_now;
    const struct dh_uevent *entry = (const struct dh_uevent *)(const void *)(now + 1);
    uint64_t sum = 0;

    if (now->messages < before->messages || now->passes < before->passes || now->beat_ns < before->beat_ns)
        return "time went back";
    if (now->lost || now->failures || now->evicted || now->malformed)
        return "the head is no head";
    for (uint32_t i = 0; i < now->entries; i++) {
        char driver[24];
        unsigned kind;

        if (entry[i].subsystem != DH_SUBSYSTEM_PCI)
            continue; /* the machine's own */
        if (sscanf(entry[i].path, "devices/kind%u", &kind) != 1 || kind >= KINDS)
            return "a path is torn";
        snprintf(driver, sizeof(driver), "%" PRIu64, kind + (entry[i].count - 1) * KINDS);
        if (strcmp(entry[i].driver, driver) || entry[i].action != DH_ACTION_CHANGE)
            return "an entry is torn";
        sum += entry[i].count;
    }
    return sum == now->changes[DH_SUBSYSTEM_PCI] ? NULL : "entries of another time";
}

static int64_t copy(void *from, void *buf, size_t cap)
{
    return dh_uevents_read(from, buf, cap);
}

static uint64_t moves(const void *now)
{
    return ((const struct dh_uevents_head *)now)->messages;
}

static void no_copy_is_torn(void)
{
    struct dh_uevents *u = started(DH_NS);
    const struct rx_source source = { u, dh_uevents_size(u), copy, look, moves, CHANGES };
    struct rx readers;
    struct dh_uevents_head *head = aligned_alloc(8, dh_uevents_size(u));
    uint64_t number = 0;

    EVENTUALLY(is_listening(u, head));
    rx_start(&readers, &source, READERS);
    while (number < EVENTS) {
        event(number++);
        if (number % AHEAD == 0)
            EVENTUALLY(is_listening(u, head) && head->changes[DH_SUBSYSTEM_PCI] == number);
        if (number % (EVENTS / CHANGES) == 0)
            EVENTUALLY(rx_have_seen(&readers, number / (EVENTS / CHANGES)));
    }
    rx_end(&readers);
    CHECK_INT(dh_uevents_stop(u, FX_PATIENCE_NS), 0);
    free(head);
}

static void *flood_main(void *arg)
{
    (void)arg;
    for (uint64_t number = 0; !atomic_load(&over); number++)
        event(number);
    return NULL;
}

static void a_flood_does_not_keep_the_thread_from_ending(void)
{
    struct dh_uevents *u = started(DH_NS);
    struct dh_uevents_head *head = aligned_alloc(8, dh_uevents_size(u));
    pthread_t flood;

    atomic_store(&over, false);
    fx_must(!pthread_create(&flood, NULL, flood_main, NULL), "pthread_create");
    EVENTUALLY(is_listening(u, head) && head->messages > 1000);
    CHECK_INT(dh_uevents_stop(u, FX_PATIENCE_NS), 0);
    atomic_store(&over, true);
    pthread_join(flood, NULL);
    free(head);
}

static void silence_does_not_keep_it_from_beating(void)
{
    uint64_t begun = dh_now_ns();
    struct dh_uevents *u = started(DH_NS / 100);
    struct dh_uevents_head *head = aligned_alloc(8, dh_uevents_size(u));

    EVENTUALLY(dh_uevents_read(u, head, dh_uevents_size(u)) > 0);
    CHECK(head->beat_ns >= begun);
    EVENTUALLY(is_listening(u, head) && head->passes > 20);
    CHECK_U64(head->changes[DH_SUBSYSTEM_PCI], 0);
    CHECK_INT(dh_uevents_stop(u, FX_PATIENCE_NS), 0);
    free(head);
}

int main(void)
{
    int descriptors;

    if (!ue_isolated()) {
        puts("test_thread_uevents: skipped, no network namespace of its own");
        return EXIT_SUCCESS;
    }
    descriptors = fx_count("/proc/self/fd");
    no_copy_is_torn();
    a_flood_does_not_keep_the_thread_from_ending();
    silence_does_not_keep_it_from_beating();
    CHECK_INT(fx_count("/proc/self/fd"), descriptors);
    return check_done("test_thread_uevents");
}
