/*
 * gpu_alone.c - a watch without threads: passes, and their floor, on the caller's thread. For benchmarks.
 *
 * Nobody watches the deadlines and nobody waits for events; everything else is what the threads do.
 */
#include <errno.h>

#include "gpus.h"

int64_t dh_gpus_pass(struct dh_gpu_watch *w)
{
    int64_t calls = 0;

    if (w->started)
        return -EBUSY;
    if (!atomic_load(&w->gpus)) {
        dh_gpus_begin(w);
        dh_opener_pass(w, false);
    }
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++) {
        struct dh_gpu_slot *s = atomic_load(&w->slot[i]);

        calls -= (int64_t)s->caller.calls;
        s->slow = false; /* unless that is due */
        dh_gpu_turn(s);
        calls += (int64_t)s->caller.calls;
    }
    return calls;
}

/* The calls that the last pass made, and nothing else. */
static int64_t bare(struct dh_gpu_slot *s)
{
    const struct dh_nvml *nvml = &s->w->nvml;
    nvmlMarginTemperature_t margin = { .version = nvmlMarginTemperature_v1 };
    unsigned long long reasons;
    unsigned int celsius;
    int64_t calls = 0;

    if (s->asked)
        calls += !nvml->nvmlDeviceGetFieldValues(s->dev, s->asked, s->batch);
    if (dh_gpu_is_valid(&s->work, DH_GPU_TEMP))
        calls += !nvml->nvmlDeviceGetTemperature(s->dev, NVML_TEMPERATURE_GPU, &celsius);
    if (dh_gpu_is_valid(&s->work, DH_GPU_MARGIN))
        calls += !nvml->nvmlDeviceGetMarginTemperature(s->dev, &margin);
    if (dh_gpu_is_valid(&s->work, DH_GPU_CLOCK_REASONS))
        calls += !nvml->nvmlDeviceGetCurrentClocksEventReasons(s->dev, &reasons);
    return calls;
}

int64_t dh_gpus_floor(struct dh_gpu_watch *w)
{
    int64_t calls = 0;

    if (w->started)
        return -EBUSY;
    for (uint32_t i = 0; i < atomic_load(&w->gpus); i++)
        if (atomic_load(&w->slot[i])->dev)
            calls += bare(atomic_load(&w->slot[i]));
    return calls;
}
