/*
 * The device events' thread, in a network namespace of this program's own: readers that copy as fast as they
 * can get no torn copy, a flood does not keep the thread from ending, and silence does not keep it from
 * beating.
 */
#include "check.h"
#include "fixture.h"
#include "uevent_fixture.h"

#define READERS 3
#define KINDS 40
#define EVENTS 5000 /* at the least; and until each reader saw so many changes: */
#define CHANGES 10
#define AHEAD 100 /* of the listener, so that the smallest buffer loses nothing */

static _Atomic bool over;

struct reader {
    pthread_t thread;
    struct dh_uevents *u;
    _Atomic uint64_t changes;
    const char *_Atomic broken;
};

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
static const char *look(const struct dh_uevents_head *before, const struct dh_uevents_head *now)
{
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

static void *reader_main(void *arg)
{
    struct reader *r = arg;
    size_t cap = dh_uevents_size(r->u);
    struct dh_uevents_head *now = aligned_alloc(8, cap), *before = aligned_alloc(8, cap), *spare;

    memset(before, 0, sizeof(*before));
    while (!atomic_load(&over) && !r->broken) {
        int64_t used = dh_uevents_read(r->u, now, cap);

        if (used == DH_ETORN)
            continue;
        r->broken = used < 0 ? "an error" : look(before, now);
        r->changes += now->messages != before->messages;
        spare = before;
        before = now;
        now = spare;
    }
    free(now);
    free(before);
    return NULL;
}

static bool seen_enough(const struct reader *reader)
{
    for (int i = 0; i < READERS; i++)
        if (reader[i].changes < CHANGES && !reader[i].broken)
            return false;
    return true;
}

static void no_copy_is_torn(void)
{
    struct dh_uevents *u = started(DH_NS);
    struct reader reader[READERS] = { 0 };
    struct dh_uevents_head *head = aligned_alloc(8, dh_uevents_size(u));
    uint64_t begun = dh_now_ns(), number = 0;

    EVENTUALLY(is_listening(u, head));
    for (int i = 0; i < READERS; i++) {
        reader[i].u = u;
        fx_must(!pthread_create(&reader[i].thread, NULL, reader_main, &reader[i]), "pthread_create");
    }
    while (number < EVENTS || (!seen_enough(reader) && dh_now_ns() - begun < 10 * DH_NS)) {
        event(number++);
        if (number % AHEAD == 0)
            EVENTUALLY(is_listening(u, head) && head->changes[DH_SUBSYSTEM_PCI] == number);
    }
    EVENTUALLY(is_listening(u, head) && head->changes[DH_SUBSYSTEM_PCI] == number);
    atomic_store(&over, true);
    for (int i = 0; i < READERS; i++) {
        pthread_join(reader[i].thread, NULL);
        CHECK_STR(reader[i].broken ? reader[i].broken : "", "");
        CHECK(reader[i].changes >= CHANGES);
    }
    CHECK_INT(dh_uevents_stop(u, 5 * DH_NS), 0);
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
    CHECK_INT(dh_uevents_stop(u, 5 * DH_NS), 0);
    atomic_store(&over, true);
    pthread_join(flood, NULL);
    free(head);
}

static void silence_does_not_keep_it_from_beating(void)
{
    uint64_t begun = dh_now_ns();
    struct dh_uevents *u = started(DH_NS / 100);
    struct dh_uevents_head *head = aligned_alloc(8, dh_uevents_size(u));

    CHECK(dh_uevents_read(u, head, dh_uevents_size(u)) > 0);
    CHECK(head->beat_ns >= begun);
    EVENTUALLY(is_listening(u, head) && head->passes > 20);
    CHECK_U64(head->changes[DH_SUBSYSTEM_PCI], 0);
    CHECK_INT(dh_uevents_stop(u, 5 * DH_NS), 0);
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
