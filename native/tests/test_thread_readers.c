/*
 * Readers that copy as fast as they can while the sampler's thread publishes: no copy is torn.
 *
 * The files of each pool are written in the opposite order to the sampler's reading, and their
 * numbers grow. So in every whole copy a file that is read later is not behind one that is read
 * earlier, no number ever falls from one copy to the next, and two copies with the same sequence
 * number are the same but for the clocks in their heads.
 */
#include "check.h"
#include "fixture.h"

#define READERS 3
#define SIZES 12
#define DIGITS 18
#define MM "sys/kernel/mm/hugepages"

static const char *const files[] = { "surplus_hugepages", "free_hugepages", "nr_hugepages" }; /* as written */
static _Atomic bool over;

struct reader {
    pthread_t thread;
    struct dh_sampler *s;
    size_t cap;
    uint64_t copies, changes;
    const char *broken;
};

static uint64_t sum_of(const struct dh_snapshot *head, size_t used)
{
    const uint64_t *word = (const uint64_t *)(const void *)(head + 1);
    uint64_t sum = 0;

    for (size_t i = 0; i < (used - sizeof(*head)) / 8; i++)
        sum = (sum ^ word[i]) * 0x100000001b3ull;
    return sum;
}

static const char *compare(const struct dh_snapshot *a, const struct dh_snapshot *b, size_t bytes)
{
    const struct fx before = { .head = (struct dh_snapshot *)(uintptr_t)a };
    const struct fx after = { .head = (struct dh_snapshot *)(uintptr_t)b };

    if (b->size != sizeof(*b) || b->version != DH_VERSION || b->nodes != 1 || b->pools != SIZES)
        return "the head is no head";
    if (b->seq < a->seq || b->passes < a->passes || b->beat_ns < a->beat_ns || b->reads < a->reads)
        return "time went back";
    if (b->seq == a->seq && sum_of(a, bytes) != sum_of(b, bytes))
        return "a change without a publication that says so";
    for (int i = 0; i < SIZES; i++) {
        const struct dh_pool *p = fx_pool(&before, 64ull << i, DH_MACHINE);
        const struct dh_pool *q = fx_pool(&after, 64ull << i, DH_MACHINE);

        if (q->nr < p->nr || q->free < p->free || q->surplus < p->surplus)
            return "a number fell";
        if (q->nr > q->free || q->free > q->surplus)
            return "a file that is read later is behind";
    }
    return NULL;
}

static void *reader_main(void *arg)
{
    struct reader *r = arg;
    struct dh_snapshot *now = aligned_alloc(8, r->cap + 8), *before = aligned_alloc(8, r->cap + 8), *spare;
    bool any = false;

    while (!atomic_load(&over) && !r->broken) {
        int64_t used = dh_sampler_read(r->s, now, r->cap);

        if (used == DH_ETORN || (used > 0 && !now->passes))
            continue;
        if (used < 0) {
            r->broken = "an error";
            break;
        }
        if (any) {
            r->broken = compare(before, now, (size_t)used);
            r->changes += now->seq != before->seq;
        }
        r->copies++;
        any = true;
        spare = before;
        before = now;
        now = spare;
    }
    free(now);
    free(before);
    return NULL;
}

int main(void)
{
    const struct dh_wake wakes[] = { { .field = DH_POOL_NR, .mode = DH_WAKE_CHANGE },
                                     { .field = DH_POOL_FREE, .mode = DH_WAKE_CHANGE },
                                     { .field = DH_POOL_SURPLUS, .mode = DH_WAKE_CHANGE } };
    struct dh_options o = fx_options();
    struct reader reader[READERS] = { 0 };
    char text[] = "100000000000000000\n";
    struct fx f;

    fx_begin();
    fx_write("0\n", "sys/devices/system/cpu/online");
    o.period_ns = DH_NS / 100;
    for (int i = 0; i < SIZES; i++)
        for (int k = 0; k < 3; k++)
            fx_write(text, MM "/hugepages-%dkB/%s", 64 << i, files[k]);
    f = fx_open(&o, "/", wakes, 3);
    CHECK_INT(dh_sampler_start(f.s), 0);
    for (int i = 0; i < READERS; i++) {
        reader[i].s = f.s;
        reader[i].cap = f.cap;
        fx_must(!pthread_create(&reader[i].thread, NULL, reader_main, &reader[i]), "pthread_create");
    }
    for (char *digit = text; digit < text + DIGITS; digit += *digit == '9') {
        ++*digit; /* one byte at a time: there is no half-written number to be read */
        for (int k = 0; k < 3; k++)
            for (int i = 0; i < SIZES; i++)
                fx_write(text, MM "/hugepages-%dkB/%s", 64 << i, files[k]);
        usleep(4000); /* two or three changes for each pass */
    }
    atomic_store(&over, true);
    for (int i = 0; i < READERS; i++) {
        pthread_join(reader[i].thread, NULL);
        CHECK_STR(reader[i].broken ? reader[i].broken : "", "");
        CHECK(reader[i].copies > 100);
        CHECK(reader[i].changes > 10);
    }
    fx_close(&f);
    return check_done("test_thread_readers");
}
