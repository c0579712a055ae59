/*
 * session.c - NVML's initialization and shutdown, its versions, and the lookup of handles.
 *
 * The GPUs outlive a session. A lost GPU is still counted, but has no handle.
 */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool loaded; /* the scenario: once per process, or again after an error */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_condition(void)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&fake.changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

nvmlReturn_t nvmlInit_v2(void)
{
    pthread_once(&once, make_condition);
    pthread_mutex_lock(&fake.lock);
    if (!loaded)
        loaded = fake_scenario_load(getenv("FAKE_NVML"));
    if (!loaded)
        return fake_leave(NVML_ERROR_UNKNOWN);
    while (fake.driver_held || fake_now() < fake.init_hangs_until_ns)
        fake_wait(fake.driver_held ? 0 : fake.init_hangs_until_ns);
    if (fake.init_answer)
        return fake_leave(fake.init_answer);
    if (fake.references++ == 0)
        fake.session = fake.driver_load;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags; /* flags that make missing GPUs no error: here that never is one */
    return nvmlInit_v2();
}

nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&fake.lock);
    if (fake.references == 0)
        return fake_leave(NVML_ERROR_UNINITIALIZED);
    if (--fake.references == 0)
        fake_sets_free();
    return fake_leave(NVML_SUCCESS);
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch",
        "In use by another client", "Insufficient Memory", "No data",
        "vGPU operation not available while ECC is enabled", "Insufficient Resources",
        "Frequency not supported", "Argument version mismatch", "Deprecated", "Not ready", "GPU not found",
        "Invalid state", "Reset type not supported",
    };

    return (unsigned int)result < sizeof(texts) / sizeof(texts[0]) ? texts[result] : "Unknown Error";
}

/* Begin a function below: the lock is held from here on, also on failure. */
static nvmlReturn_t begin(void)
{
    pthread_mutex_lock(&fake.lock);
    while (fake.driver_held)
        fake_wait(0);
    return fake_in_session() ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    nvmlReturn_t answer = version ? begin() : NVML_ERROR_INVALID_ARGUMENT;

    if (!version)
        return answer;
    return fake_leave(answer == NVML_SUCCESS ? fake_text(version, length, fake.driver) : answer);
}

/*
 * Return CUDA's major version and the driver's release.
 */
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[48];
    nvmlReturn_t answer;

    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = begin();
    snprintf(text, sizeof(text), "%d.%s", FAKE_BRANCH >= 580 ? 13 : 12, fake.driver);
    return fake_leave(answer == NVML_SUCCESS ? fake_text(version, length, text) : answer);
}

static uint32_t listed_gpus(void)
{
    return fake.listed < fake.gpus ? fake.listed : fake.gpus;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t answer;

    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = begin();
    if (answer == NVML_SUCCESS)
        answer = fake.count_answer;
    if (fake.count_once)
        fake.count_answer = 0;
    fake.count_once = false;
    if (answer == NVML_SUCCESS)
        *count = listed_gpus();
    return fake_leave(answer);
}

static nvmlReturn_t handle_of(enum fake_call call, struct fake_gpu *g, const struct fake_mig *m,
                              nvmlDevice_t *device)
{
    nvmlReturn_t answer = fake_pass(call, g);

    if (answer == NVML_SUCCESS)
        *device = fake_handle(g, m);
    return answer;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t answer;

    if (!device)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = begin();
    if (answer == NVML_SUCCESS && index >= listed_gpus())
        answer = NVML_ERROR_INVALID_ARGUMENT;
    if (answer == NVML_SUCCESS)
        answer = handle_of(CALL_nvmlDeviceGetHandleByIndex_v2, &fake.gpu[index], NULL, device);
    return fake_leave(answer);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    const enum fake_call call = CALL_nvmlDeviceGetHandleByUUID;
    char its[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    nvmlReturn_t answer;

    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = begin();
    if (answer != NVML_SUCCESS)
        return fake_leave(answer);
    for (struct fake_gpu *g = fake.gpu; g < fake.gpu + listed_gpus(); g++) {
        fake_uuid(g, NULL, its);
        if (strcmp(its, uuid) == 0)
            return fake_leave(handle_of(call, g, NULL, device));
        for (struct fake_mig *m = g->mig; m < g->mig + g->migs; m++) {
            fake_uuid(g, m, its);
            if (strcmp(its, uuid) == 0)
                return fake_leave(handle_of(call, g, m, device));
        }
    }
    return fake_leave(NVML_ERROR_NOT_FOUND);
}

/* Domains may be written with four or eight digits. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlReturn_t answer;

    if (!bus_id || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = begin();
    if (answer != NVML_SUCCESS)
        return fake_leave(answer);
    for (struct fake_gpu *g = fake.gpu; g < fake.gpu + listed_gpus(); g++) {
        char its[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];

        fake_bus_id(g, its);
        if (strcasecmp(its, bus_id) == 0 || strcasecmp(its + 4, bus_id) == 0)
            return fake_leave(handle_of(CALL_nvmlDeviceGetHandleByPciBusId_v2, g, NULL, device));
    }
    return fake_leave(NVML_ERROR_NOT_FOUND);
}
