/*
 * Tests of readers that copy as fast as they can while the sampler's thread publishes: no copy is torn.
 *
 * The files of each pool are written in the opposite order of the sampler's reads, and their numbers grow. So
 * in every complete copy a file that is read later is not behind a file that is read earlier, no number ever
 * falls from one copy to the next, and two copies with the same sequence number differ only in the clocks of
 * their heads.
 */
#include "check.h"
#include "fixture.h"
#include "readers_fixture.h"

#define READERS 3
#define SIZES 12
#define MM "sys/kernel/mm/hugepages"

static const char *const files[] = { "surplus_hugepages", "free_hugepages", "nr_hugepages" }; /* in the
                                                                                                 order of
                                                                                                 the writes */

static void pools_write(const char *text)
{
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < SIZES; i++)
            fx_write(text, MM "/hugepages-%dkB/%s", 64 << i, files[k]);
}

static struct fx view(const struct dh_snapshot *head)
{
    return (struct fx){ .head = (struct dh_snapshot *)(uintptr_t)head };
}

static uint64_t sum_of(const struct fx *f)
{
    const uint64_t *word = (const uint64_t *)(const void *)(f->head + 1);
    const uint64_t *end = (const uint64_t *)(const void *)(fx_groups(f) + f->head->groups);
    uint64_t sum = 0;

    while (word < end)
        sum = (sum ^ *word++) * 0x100000001b3ull;
    return sum;
}

static const char *check_copy_of(const void *was_before, const void *is_now)
{
    const struct dh_snapshot *a = was_before, *b = is_now;
    const struct fx before = view(a), now = view(b);

    if (b->size != sizeof(*b) || b->version != DH_VERSION || b->nodes != 1 || b->pools != SIZES)
        return "the head has a wrong size";
    if (b->seq < a->seq || b->passes < a->passes || b->heartbeat_ns < a->heartbeat_ns || b->reads < a->reads)
        return "time went back";
    if (b->seq == a->seq && sum_of(&before) != sum_of(&now))
        return "a change without a new sequence number";
    for (int i = 0; i < SIZES; i++) {
        const struct dh_pool *p = fx_pool(&before, 64ull << i, DH_MACHINE);
        const struct dh_pool *q = fx_pool(&now, 64ull << i, DH_MACHINE);

        if (q->nr < p->nr || q->free < p->free || q->surplus < p->surplus)
            return "a number fell";
        if (q->nr > q->free || q->free > q->surplus)
            return "a file that is read later is behind";
    }
    return NULL;
}

/* Before the first pass there is only a head. */
static int64_t copy(void *from, void *buf, size_t cap)
{
    int64_t used = dh_sampler_read(from, 0, buf, cap);

    return used > 0 && !((struct dh_snapshot *)buf)->passes ? DH_ETORN : used;
}

static uint64_t moves(const void *now)
{
    return ((const struct dh_snapshot *)now)->seq;
}

int main(void)
{
    const struct dh_wake wakes[] = { { .field = DH_POOL_NR, .mode = DH_WAKE_CHANGE },
                                     { .field = DH_POOL_FREE, .mode = DH_WAKE_CHANGE },
                                     { .field = DH_POOL_SURPLUS, .mode = DH_WAKE_CHANGE } };
    struct rx_source source = { .copy = copy, .check_copy_of = check_copy_of, .moves = moves, .changes = RX_CHANGES };
    struct dh_options o = fx_options();
    struct rx readers;
    struct fx f;

    fx_begin();
    fx_write("0\n", "sys/devices/system/cpu/online");
    pools_write(RX_NUMBER);
    o.period_ns = DH_NS / 100;
    f = fx_open(&o, "/", wakes, 3);
    source.from = f.s;
    source.bytes = f.cap;
    CHECK_INT(dh_sampler_start(f.s), 0);
    rx_start(&readers, &source, READERS);
    rx_grow(&readers, pools_write);
    rx_end(&readers);
    fx_close(&f);
    return check_done("test_thread_readers");
}
