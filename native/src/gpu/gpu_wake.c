/* gpu_wake.c - whether a change between two passes over a GPU matters to a rule. Pure functions. */
#include "gpu/gpus.h"

/* Signed comparison: a margin can be negative, temperatures too. */
static bool is_over(const struct dh_gpu *g, const struct dh_gpu_wake *wake)
{
    return dh_gpu_is_valid(g, wake->field) && dh_gpu_is_valid(g, wake->limit) &&
           (int64_t)g->value[wake->field] >= (int64_t)g->value[wake->limit];
}

static bool is_below(const struct dh_gpu *g, const struct dh_gpu_wake *wake)
{
    return dh_gpu_is_valid(g, wake->field) && (int64_t)g->value[wake->field] < (int64_t)wake->threshold;
}

/*
 * Windows are consecutive: a burst across a border is found by the reader's own sliding window at its next
 * evaluation. A counter that fell was reset, which ends the causes that it had: its new value is the base.
 */
static bool has_risen_or_fallen(struct dh_gpu_rise_base *base, const struct dh_gpu_wake *wake,
                                uint64_t before, uint64_t now, uint64_t now_ns)
{
    if (now < before) {
        *base = (struct dh_gpu_rise_base){ now, now_ns };
        return true;
    }
    if (now_ns - base->since_ns >= wake->window_ns)
        *base = (struct dh_gpu_rise_base){ before, now_ns };
    if (now - base->value < wake->threshold)
        return false;
    base->value = now;
    return true;
}

bool dh_gpu_wakes(const struct dh_gpu_wake *wake, struct dh_gpu_rise_base *base, const struct dh_gpu *before,
                  const struct dh_gpu *now, uint64_t now_ns)
{
    uint64_t was = before->value[wake->field], is = now->value[wake->field];

    if (dh_gpu_is_valid(before, wake->field) != dh_gpu_is_valid(now, wake->field)) {
        *base = (struct dh_gpu_rise_base){ is, now_ns };
        return true;
    }
    switch ((enum dh_gpu_wake_mode)wake->mode) {
    case DH_GPU_WAKE_CHANGE:
        return was != is;
    case DH_GPU_WAKE_RISE:
        return has_risen_or_fallen(base, wake, was, is, now_ns);
    case DH_GPU_WAKE_OVER:
        return is_over(before, wake) != is_over(now, wake);
    case DH_GPU_WAKE_BELOW:
        return is_below(before, wake) != is_below(now, wake);
    case DH_GPU_WAKE_BITS:
        return ((was ^ is) & wake->threshold) != 0;
    }
    return false;
}
