/*
 * hammer.c - stress test for the sanitizers: callers, waiters, sessions, hangs, repartitioning at the same
 * time.
 *
 * Linked with the fake itself. argv[1] is the control socket of the scenario in the environment. Succeeds if
 * every answer is possible in its situation, and successful answers and events are among them.
 */
#include "../fake.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define COMMANDS 3000

static atomic_uint good, events;
static atomic_bool done; /* all commands were sent, with a driver reload at the end */

static void expect(nvmlReturn_t answer, const char *call)
{
    switch (answer) {
    case NVML_SUCCESS: case NVML_ERROR_UNINITIALIZED: case NVML_ERROR_INVALID_ARGUMENT:
    case NVML_ERROR_NOT_SUPPORTED: case NVML_ERROR_NOT_FOUND: case NVML_ERROR_TIMEOUT:
    case NVML_ERROR_GPU_IS_LOST: case NVML_ERROR_INSUFFICIENT_RESOURCES:
        return;
    default:
        fprintf(stderr, "%s: %d\n", call, answer);
        exit(1);
    }
}

static void *caller(void *number)
{
    unsigned int index = *(unsigned int *)number;

    while (!done) {
        nvmlFieldValue_t values[3] = { { .fieldId = 4 }, { .fieldId = 230 }, { .fieldId = 161 } };
        nvmlDevice_t device, mig;
        char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
        nvmlReturn_t answer = nvmlDeviceGetHandleByIndex_v2(index, &device);

        expect(answer, "handle");
        if (answer != NVML_SUCCESS)
            continue;
        answer = nvmlDeviceGetFieldValues(device, 3, values);
        expect(answer, "fields");
        good += answer == NVML_SUCCESS;
        answer = nvmlDeviceGetMigDeviceHandleByIndex(device, 0, &mig);
        expect(answer, "mig");
        if (answer == NVML_SUCCESS)
            expect(nvmlDeviceGetUUID(mig, uuid, sizeof(uuid)), "uuid");
    }
    return NULL;
}

static void *waiter(void *unused)
{
    while (!done) {
        nvmlEventSet_t set;
        nvmlEventData_t data;
        nvmlReturn_t answer = nvmlEventSetCreate(&set);

        expect(answer, "create");
        for (unsigned int index = 0; answer == NVML_SUCCESS && index < 4; index++) {
            nvmlDevice_t device;

            answer = nvmlDeviceGetHandleByIndex_v2(index, &device);
            if (answer == NVML_SUCCESS)
                expect(nvmlDeviceRegisterEvents(device, nvmlEventTypeXidCriticalError, set), "register");
            answer = NVML_SUCCESS;
        }
        for (int wait = 0; wait < 20; wait++) {
            answer = nvmlEventSetWait_v2(set, &data, 1);
            expect(answer, "wait");
            events += answer == NVML_SUCCESS;
        }
        expect(nvmlEventSetFree(set), "free");
    }
    return unused;
}

static void *sessions(void *unused)
{
    while (!done) {
        expect(nvmlInit_v2(), "init");
        expect(nvmlShutdown(), "shutdown");
    }
    return unused;
}

static void *commander(void *path)
{
    static const char *const lines[] = {
        "gpu 0 set ecc.dram.uncorrectable.volatile=+1 nvlink.0.replay=+1", "gpu 1 mig 3g.40gb 3g.40gb",
        "gpu 1 mig off", "gpu 2 lost", "gpu 2 back", "gpu 3 hang nvmlDeviceGetFieldValues lock 1ms",
        "gpu 3 hang all", "gpu 3 release", "gpu 0 reset", "gpu 0 replace", "gpu 0 xid 31", "wait 10",
        "wait 0", "at 1ms gpu 1 xid 13", "gpu 0 calls nvmlDeviceGetUUID",
    };
    const int num = sizeof(lines) / sizeof(lines[0]);
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    memcpy(address.sun_path, path, strlen(path) + 1);
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        perror("connect");
        exit(1);
    }
    for (int i = 0; i < COMMANDS; i++) {
        char line[256], answer[256];
        int n = snprintf(line, sizeof(line), "%s\n", i < COMMANDS - 1 ? lines[i % num] : "reload");

        if (write(fd, line, (size_t)n) != n || read(fd, answer, sizeof(answer)) < 3 ||
            memcmp(answer, "ok", 2) != 0) {
            fprintf(stderr, "refused: %s", line);
            exit(1);
        }
    }
    close(fd);
    done = true;
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[8];
    unsigned int index[4] = { 0, 1, 2, 3 };

    if (argc != 2 || nvmlInit_v2() != NVML_SUCCESS)
        return 1;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, caller, &index[i]);
    pthread_create(&threads[4], NULL, waiter, NULL);
    pthread_create(&threads[5], NULL, waiter, NULL);
    pthread_create(&threads[6], NULL, sessions, NULL);
    pthread_create(&threads[7], NULL, commander, argv[1]);
    for (int i = 0; i < 8; i++)
        pthread_join(threads[i], NULL);
    if (nvmlShutdown() != NVML_SUCCESS || good == 0 || events == 0) {
        fprintf(stderr, "%u good answers, %u events\n", good, events);
        return 1;
    }
    return 0;
}
