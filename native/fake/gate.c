/*
 * gate.c - checks that every call on a GPU passes, in this order: session, handle, hang, slowness, loss,
 * failure.
 *
 * A handle is no pointer but encodes its GPU or MIG device, the driver load and the partitioning. So a void
 * handle is recognized, and never dereferenced.
 */
#include "fake.h"

#include <string.h>
#include <time.h>

const char *fake_call_name(enum fake_call call)
{
#define X(result, name, arguments) #name,
    static const char *const names[] = { NVML_FUNCTIONS(X) "all" };
#undef X

    return names[call];
}

nvmlDevice_t fake_handle(const struct fake_gpu *g, const struct fake_mig *m)
{
    uintptr_t handle = (uintptr_t)(g - fake.gpu) + 1;

    if (m)
        handle |= (uintptr_t)(m - g->mig + 1) << 8 | (uintptr_t)g->partitioned << 16;
    return (nvmlDevice_t)(handle | (uintptr_t)fake.handles << 24);
}

static nvmlReturn_t resolve(nvmlDevice_t device, struct fake_gpu **g, struct fake_mig **mig)
{
    uintptr_t handle = (uintptr_t)device;
    uint32_t gpu = handle & 0xff, slot = handle >> 8 & 0xff;
    struct fake_mig *m = NULL;

    if (handle >> 24 != fake.handles || gpu == 0 || gpu > fake.gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    *g = &fake.gpu[gpu - 1];
    if (slot) {
        if (slot > (*g)->migs || (handle >> 16 & 0xff) != (*g)->partitioned)
            return NVML_ERROR_INVALID_ARGUMENT;
        m = &(*g)->mig[slot - 1];
    }
    if (m && !mig)
        return NVML_ERROR_NOT_SUPPORTED;
    if (mig)
        *mig = m;
    return NVML_SUCCESS;
}

bool fake_in_session(void)
{
    return fake.references > 0 && fake.session == fake.driver_load;
}

static bool hangs(const struct fake_gpu *g, enum fake_call call)
{
    return g->hang.on && (g->hang.call == CALL_ALL || g->hang.call == call) &&
           (g->hang.until_ns == 0 || fake_now() < g->hang.until_ns);
}

/* Wait until this call no longer hangs, and no other call holds the driver's lock. */
static void hang(struct fake_gpu *g, enum fake_call call)
{
    bool holds = false;

    g->hung++;
    for (;;) {
        bool here = hangs(g, call);

        if (holds && !(here && g->hang.holds_driver)) {
            holds = false;
            fake.driver_held--;
            pthread_cond_broadcast(&fake.changed);
        }
        if (!here && fake.driver_held == 0)
            break;
        if (here && g->hang.holds_driver && !holds) {
            holds = true;
            fake.driver_held++;
        }
        fake_wait(here ? g->hang.until_ns : 0);
    }
    g->hung--;
}

static void slow(uint64_t ns)
{
    struct timespec t = { .tv_sec = (time_t)(ns / FAKE_NS), .tv_nsec = (long)(ns % FAKE_NS) };

    pthread_mutex_unlock(&fake.lock);
    clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
    pthread_mutex_lock(&fake.lock);
}

nvmlReturn_t fake_pass(enum fake_call call, struct fake_gpu *g)
{
    g->calls[call]++;
    hang(g, call);
    if (g->slow_ns)
        slow(g->slow_ns);
    if (!fake_in_session())
        return NVML_ERROR_UNINITIALIZED;
    if (g->lost)
        return NVML_ERROR_GPU_IS_LOST;
    return g->fail_call[call] ? g->fail_call[call] : g->fail_call[CALL_ALL];
}

nvmlReturn_t fake_enter(enum fake_call call, nvmlDevice_t device, struct fake_gpu **g, struct fake_mig **mig)
{
    nvmlReturn_t answer = NVML_ERROR_UNINITIALIZED;

    pthread_mutex_lock(&fake.lock);
    if (fake_in_session())
        answer = resolve(device, g, mig);
    if (answer == NVML_SUCCESS)
        answer = fake_pass(call, *g);
    if (answer == NVML_SUCCESS) /* it may have been repartitioned meanwhile */
        answer = resolve(device, g, mig);
    if (answer != NVML_SUCCESS)
        pthread_mutex_unlock(&fake.lock);
    return answer;
}

nvmlReturn_t fake_leave(nvmlReturn_t answer)
{
    pthread_mutex_unlock(&fake.lock);
    return answer;
}

nvmlReturn_t fake_number(enum fake_call call, nvmlDevice_t device, enum fake_quantity quantity,
                         unsigned int *out)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(call, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[quantity] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    *out = (unsigned int)g->value[quantity];
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t fake_text(char *out, unsigned int length, const char *text)
{
    if (length <= strlen(text))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    if (fake.endless) { /* other bytes in each call, as a buffer that was never cleared */
        static uint8_t byte;

        for (size_t i = strlen(text); i < length; i++)
            out[i] = (char)('!' + byte++ % 90);
    }
    return NVML_SUCCESS;
}
