/*
 * machine.c - the GPUs of this process, and their changes: values, resets, parts, partitions.
 *
 * The GPUs outlive nvmlShutdown(), as hardware does, and end with the process. Called under the lock.
 */
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define STRING(x) #x
#define VALUE(x) STRING(x)

#if FAKE_BRANCH >= 590
#define RELEASE "48.01"
#elif FAKE_BRANCH >= 580
#define RELEASE "95.05"
#elif FAKE_BRANCH >= 575
#define RELEASE "57.08"
#elif FAKE_BRANCH >= 570
#define RELEASE "133.20"
#else
#define RELEASE "183.06"
#endif

struct fake fake = { .lock = PTHREAD_MUTEX_INITIALIZER };

uint64_t fake_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * FAKE_NS + (uint64_t)t.tv_nsec;
}

void fake_wait(uint64_t until_ns)
{
    struct timespec t = { .tv_sec = (time_t)(until_ns / FAKE_NS), .tv_nsec = (long)(until_ns % FAKE_NS) };

    if (until_ns)
        pthread_cond_timedwait(&fake.changed, &fake.lock, &t);
    else
        pthread_cond_wait(&fake.changed, &fake.lock);
}

static void gpu_make(struct fake_gpu *g)
{
    const struct fake_profile *p = fake.profile;

    for (int q = 0; q < Q_NUM; q++)
        g->value[q] = fake_traits[q].value;
    for (size_t i = 0; p->other[i].quantity || p->other[i].value; i++)
        g->value[p->other[i].quantity] = p->other[i].value;
    for (int link = 0; link < p->links; link++) {
        for (int q = 0; q < L_NUM; q++)
            g->link[link][q] = fake_link_traits[q].value;
        g->link[link][L_SPEED] = p->link_speed;
    }
}

void fake_machine_make(const struct fake_profile *profile, uint32_t gpus)
{
    fake.profile = profile;
    fake.listed = FAKE_GPUS;
    fake.endless = false;
    fake.init_answer = fake.count_answer = fake.wait_answer = NVML_SUCCESS;
    fake.wait_empty = false;
    fake.init_hangs_until_ns = 0;
    memset(fake.gpu, 0, sizeof(fake.gpu));
    for (uint32_t i = 0; i < FAKE_GPUS; i++)
        gpu_make(&fake.gpu[i]);
    fake_driver_load(VALUE(FAKE_BRANCH) "." RELEASE, gpus, false);
}

void fake_gpu_reset(struct fake_gpu *g)
{
    for (int q = 0; q < Q_NUM; q++)
        if (fake_traits[q].fate != FAKE_KEPT && g->value[q] != FAKE_NONE)
            g->value[q] = 0;
    for (int link = 0; link < fake.profile->links; link++)
        for (int q = 0; q < L_NUM; q++)
            if (fake_link_traits[q].fate != FAKE_KEPT && g->link[link][q] != FAKE_NONE)
                g->link[link][q] = 0;
}

void fake_gpu_replace(struct fake_gpu *g)
{
    uint8_t part = (uint8_t)(g->part + 1);
    uint8_t partitioned = (uint8_t)(g->partitioned + 1);
    uint32_t hung = g->hung; /* kept: the hanging calls are still inside */

    memset(g, 0, sizeof(*g));
    g->hung = hung;
    g->part = part;
    g->partitioned = partitioned;
    gpu_make(g);
}

/* Load another driver. Sessions of the driver before must be initialized again: see fake_in_session(). */
void fake_driver_load(const char *version, uint32_t gpus, bool same_handles)
{
    if (version)
        snprintf(fake.driver, sizeof(fake.driver), "%s", version);
    fake.gpus = gpus;
    fake.driver_load++;
    fake.handles += !same_handles;
}

/*
 * Return the ids that an A100 and an H100 assign: by size, each size from its own first id up.
 */
static uint8_t instance_id(const struct fake_gpu *g, const struct fake_mig_profile *profile)
{
    static const uint8_t first[] = { 0, 7, 3, 1, 1, 0, 0, 0 };
    uint8_t id = first[profile->compute];

    for (int i = 0; i < g->migs; i++)
        if (first[g->mig[i].profile->compute] == first[profile->compute])
            id++;
    return id;
}

void fake_partition(struct fake_gpu *g, bool on, const struct fake_mig_profile *const *profiles, uint32_t num)
{
    g->mig_on = on;
    g->migs = 0;
    g->partitioned++;
    for (uint32_t i = 0; i < num; i++) {
        uint8_t id = instance_id(g, profiles[i]);

        g->mig[g->migs++] = (struct fake_mig){ .profile = profiles[i], .gi = id };
    }
    fake_emit(g, nvmlEventMigConfigChange, 0, FAKE_WHOLE_GPU, FAKE_WHOLE_GPU);
}

void fake_add(int64_t *value, const struct fake_trait *trait, bool relative, int64_t by)
{
    if (relative && trait->fate == FAKE_COUNTED && value[1] != FAKE_NONE)
        value[1] = (int64_t)((uint64_t)value[1] + (uint64_t)by);
    if (relative && *value != FAKE_NONE)
        by = (int64_t)((uint64_t)*value + (uint64_t)by);
    *value = by;
}
