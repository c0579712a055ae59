/*
 * events.c - event sets: only events registered before they happened are delivered.
 *
 * A set's handle is its number and how often that number was used. If a set is freed during a wait, the wait
 * ends too. A full set loses further events; how real sets overflow is not known.
 */
#include "fake.h"

#define OLD_TYPES \
    (nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError | nvmlEventTypePState | \
     nvmlEventTypeXidCriticalError | nvmlEventTypeClock)
#define NEW_TYPES 0xfe00ull /* from the storm of single-bit errors to the recovery action */

static struct fake_event_set *set_of(nvmlEventSet_t handle)
{
    uintptr_t number = (uintptr_t)handle & 0xff;
    struct fake_event_set *set;

    if (number == 0 || number > FAKE_SETS)
        return NULL;
    set = &fake.set[number - 1];
    return set->used && set->uses == (uintptr_t)handle >> 8 ? set : NULL;
}

static void set_free(struct fake_event_set *set)
{
    uint16_t uses = set->uses;

    *set = (struct fake_event_set){ .uses = (uint16_t)(uses + 1) };
    pthread_cond_broadcast(&fake.changed);
}

void fake_sets_free(void)
{
    for (int i = 0; i < FAKE_SETS; i++)
        if (fake.set[i].used)
            set_free(&fake.set[i]);
}

static uint64_t supported(void)
{
    uint64_t types = OLD_TYPES;

    if (fake.profile->mig[0].name)
        types |= nvmlEventMigConfigChange;
    if (FAKE_BRANCH >= 570 && fake.profile->newer_events)
        types |= NEW_TYPES;
    return types;
}

void fake_emit(struct fake_gpu *g, uint64_t type, uint64_t data, uint32_t gi, uint32_t ci)
{
    for (struct fake_event_set *set = fake.set; set < fake.set + FAKE_SETS; set++) {
        if (!set->used || !(set->types[g - fake.gpu] & type) || set->num == FAKE_EVENTS)
            continue;
        set->ring[(set->first + set->num++) % FAKE_EVENTS] = (nvmlEventData_t){
            .device = fake_handle(g, NULL), .eventType = type, .eventData = data, .gpuInstanceId = gi,
            .computeInstanceId = ci };
    }
    pthread_cond_broadcast(&fake.changed);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *handle)
{
    if (!handle)
        return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&fake.lock);
    if (!fake_in_session())
        return fake_leave(NVML_ERROR_UNINITIALIZED);
    for (int i = 0; i < FAKE_SETS; i++) {
        struct fake_event_set *set = &fake.set[i];

        if (set->used)
            continue;
        set->used = true;
        *handle = (nvmlEventSet_t)((uintptr_t)set->uses << 8 | (uintptr_t)(i + 1));
        return fake_leave(NVML_SUCCESS);
    }
    return fake_leave(NVML_ERROR_INSUFFICIENT_RESOURCES);
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t handle)
{
    struct fake_event_set *set;

    pthread_mutex_lock(&fake.lock);
    if (!fake_in_session())
        return fake_leave(NVML_ERROR_UNINITIALIZED);
    set = set_of(handle);
    if (!set)
        return fake_leave(NVML_ERROR_INVALID_ARGUMENT);
    set_free(set);
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!types)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetSupportedEventTypes, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    *types = supported();
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t handle)
{
    struct fake_gpu *g;
    struct fake_event_set *set;
    nvmlReturn_t answer = fake_enter(CALL_nvmlDeviceRegisterEvents, device, &g, NULL);

    if (answer != NVML_SUCCESS)
        return answer;
    set = set_of(handle);
    if (!set)
        return fake_leave(NVML_ERROR_INVALID_ARGUMENT);
    if (types & ~supported())
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    set->types[g - fake.gpu] |= types;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t handle, nvmlEventData_t *data, unsigned int timeout_ms)
{
    uint64_t until = fake_now() + timeout_ms * (FAKE_NS / 1000);

    if (!data)
        return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&fake.lock);
    for (;;) {
        struct fake_event_set *set = set_of(handle);

        if (!fake_in_session())
            return fake_leave(NVML_ERROR_UNINITIALIZED);
        if (!set)
            return fake_leave(NVML_ERROR_INVALID_ARGUMENT);
        if (fake.wait_answer)
            return fake_leave(fake.wait_answer);
        if (fake.wait_empty)
            return fake_leave(NVML_SUCCESS);
        if (set->num) {
            *data = set->ring[set->first];
            set->first = (set->first + 1) % FAKE_EVENTS;
            set->num--;
            return fake_leave(NVML_SUCCESS);
        }
        if (fake_now() >= until)
            return fake_leave(NVML_ERROR_TIMEOUT);
        fake_wait(until);
    }
}
