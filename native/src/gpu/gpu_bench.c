/*
 * gpu_bench.c - passes and their lower bound on the caller's thread, without the watch's threads. For
 * benchmarks.
 *
 * Deadlines are not checked and events are not waited for; everything else is done as in the threads.
 */
#include <errno.h>
#include <string.h>

#include "gpu/gpus.h"

int64_t dh_gpus_pass(struct dh_gpu_watch *w)
{
    int64_t calls = 0;

    if (w->started)
        return -EBUSY;
    if (!atomic_load(&w->gpus)) {
        dh_gpus_publish_start(w);
        dh_opener_pass(w, false);
    }
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

        calls -= (int64_t)s->caller.calls;
        s->slow = false; /* unless the slow fields are due */
        dh_gpu_pass_once(s);
        calls += (int64_t)s->caller.calls;
    }
    return calls;
}

static bool has_same_queries(const struct dh_gpu_slot *a, const struct dh_gpu_slot *b)
{
    return a->query_count == b->query_count &&
           !memcmp(a->query, b->query, (size_t)a->query_count * sizeof(*a->query));
}

/* Make the calls of the last pass and nothing else. Return: the number that succeeded. */
static int64_t bare_calls(struct dh_gpu_slot *s, nvmlFieldValue_t batch[DH_QUERY_MAX])
{
    const struct dh_nvml *nvml = &s->w->nvml;
    nvmlMarginTemperature_t margin = { .version = nvmlMarginTemperature_v1 };
    unsigned long long reasons;
    unsigned int celsius;
    int64_t calls = 0;

    if (s->query_count)
        calls += !nvml->nvmlDeviceGetFieldValues(s->dev, s->query_count, batch);
    if (dh_gpu_is_valid(&s->work, DH_GPU_TEMP))
        calls += !nvml->nvmlDeviceGetTemperature(s->dev, NVML_TEMPERATURE_GPU, &celsius);
    if (dh_gpu_is_valid(&s->work, DH_GPU_MARGIN))
        calls += !nvml->nvmlDeviceGetMarginTemperature(s->dev, &margin);
    if (dh_gpu_is_valid(&s->work, DH_GPU_CLOCK_REASONS))
        calls += !nvml->nvmlDeviceGetCurrentClocksEventReasons(s->dev, &reasons);
    return calls;
}

int64_t dh_gpus_lower_bound(struct dh_gpu_watch *w)
{
    nvmlFieldValue_t batch[DH_QUERY_MAX];
    const struct dh_gpu_slot *before = NULL;
    int64_t calls = 0;

    if (w->started)
        return -EBUSY;
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        struct dh_gpu_slot *s = dh_gpu_slot_at(w, i);

        if (!s->dev)
            continue;
        if (!before || !has_same_queries(before, s))
            dh_gpu_put_queries(s, batch);
        before = s;
        calls += bare_calls(s, batch);
    }
    return calls;
}
