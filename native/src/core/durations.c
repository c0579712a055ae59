/* durations.c - histogram of the durations of passes. */
#include "core/durations.h"

#define MS 1000000ull

static const uint64_t bounds_ns[DH_DURATION_NUM] = {
    MS / 20,  MS / 10,  MS / 2,    MS,          5 * MS,      10 * MS,
    50 * MS,  100 * MS, 500 * MS,  1000 * MS,   5000 * MS,   UINT64_MAX,
};

uint64_t dh_duration_bound(uint32_t bucket)
{
    return bounds_ns[bucket < DH_DURATION_NUM ? bucket : DH_DURATION_NUM - 1];
}

static void add(uint64_t *to, uint64_t amount)
{
    __atomic_store_n(to, *to + amount, __ATOMIC_RELAXED); /* not an atomic addition: there is one writer */
}

void dh_durations_note(struct dh_durations *d, uint64_t took_ns)
{
    uint32_t bucket = 0;

    while (took_ns > bounds_ns[bucket])
        bucket++;
    add(&d->count[bucket], 1);
    add(&d->sum_ns, took_ns);
}

struct dh_durations dh_durations_read(const struct dh_durations *d)
{
    struct dh_durations copy;

    for (int i = 0; i < DH_DURATION_NUM; i++)
        copy.count[i] = __atomic_load_n(&d->count[i], __ATOMIC_RELAXED);
    copy.sum_ns = __atomic_load_n(&d->sum_ns, __ATOMIC_RELAXED);
    return copy;
}
