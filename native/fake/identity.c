/*
 * identity.c - names, bus addresses and processes of a device.
 *
 * Everything follows from profile, index and part: the same scenario always has the same names.
 */
#include "fake.h"

#include <stdio.h>
#include <string.h>

static unsigned int index_of(const struct fake_gpu *g)
{
    return (unsigned int)(g - fake.gpu);
}

/*
 * Format a UUID. A GPU: fa4e and its architecture, part and index. A MIG device: its GPU's, and its
 * instances.
 */
void fake_uuid(const struct fake_gpu *g, const struct fake_mig *m, char out[NVML_DEVICE_UUID_V2_BUFFER_SIZE])
{
    if (m)
        snprintf(out, NVML_DEVICE_UUID_V2_BUFFER_SIZE, "MIG-fa4e%04x-%04x-5%03x-8000-%012x",
                 fake.profile->architecture, g->part, m->gi, index_of(g));
    else if (g->nameless)
        *out = '\0';
    else
        snprintf(out, NVML_DEVICE_UUID_V2_BUFFER_SIZE, "GPU-fa4e%04x-%04x-4000-8000-%012x",
                 fake.profile->architecture, g->part, index_of(g));
}

/*
 * Return the bus of a GPU as in a DGX H100 with eight; the second eight are in a second domain.
 */
static unsigned int bus_of(const struct fake_gpu *g)
{
    static const uint8_t buses[] = { 0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf };

    return buses[index_of(g) % 8];
}

void fake_bus_id(const struct fake_gpu *g, char out[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE])
{
    snprintf(out, NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE, "%08X:%02X:00.0", index_of(g) / 8, bus_of(g));
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!index)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetIndex, device, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    *index = m ? (unsigned int)(m - g->mig) : index_of(g);
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    char text[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!uuid)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetUUID, device, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    fake_uuid(g, m, text);
    return fake_leave(fake_text(uuid, length, text));
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    char text[NVML_DEVICE_SERIAL_BUFFER_SIZE];
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!serial)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetSerial, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    snprintf(text, sizeof(text), "165%04u%03u%03u", fake.profile->architecture, g->part, index_of(g));
    return fake_leave(fake_text(serial, length, text));
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    char text[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    struct fake_gpu *g;
    struct fake_mig *m;
    nvmlReturn_t answer;

    if (!name)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetName, device, &g, &m);
    if (answer != NVML_SUCCESS)
        return answer;
    snprintf(text, sizeof(text), "%s%s%s", fake.profile->product, m ? " MIG " : "",
             m ? m->profile->name : "");
    return fake_leave(fake_text(name, length, text));
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetVbiosVersion, device, &g, NULL);
    return answer == NVML_SUCCESS ? fake_leave(fake_text(version, length, fake.profile->vbios)) : answer;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!brand)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetBrand, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    *brand = fake.profile->brand;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!arch)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetArchitecture, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    *arch = fake.profile->architecture;
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetMinorNumber, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    *minor = index_of(g);
    return fake_leave(NVML_SUCCESS);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct fake_gpu *g;
    nvmlReturn_t answer;

    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetPciInfo_v3, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    memset(pci, 0, sizeof(*pci));
    pci->domain = index_of(g) / 8;
    pci->bus = bus_of(g);
    pci->pciDeviceId = fake.profile->pci_device;
    pci->pciSubSystemId = fake.profile->pci_subsystem;
    fake_bus_id(g, pci->busId);
    memcpy(pci->busIdLegacy, pci->busId + 4, strlen(pci->busId + 4)); /* a domain of four digits */
    return fake_leave(NVML_SUCCESS);
}

#if FAKE_BRANCH >= 570
/* For GPUs whose memory is a NUMA node; no profile has that. */
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    return fake_number(CALL_nvmlDeviceGetNumaNodeId, device, Q_NUMA_NODE, node);
}
#endif

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    return fake_number(CALL_nvmlDeviceGetPersistenceMode, device, Q_PERSISTENCE, mode);
}

/* As many processes as the scenario states, with 1 GiB each, under pids that no process has. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *processes)
{
    const unsigned int above_pid_max = 1u << 22;
    struct fake_gpu *g;
    nvmlReturn_t answer;
    unsigned int num, room;

    if (!count || (*count && !processes))
        return NVML_ERROR_INVALID_ARGUMENT;
    answer = fake_enter(CALL_nvmlDeviceGetComputeRunningProcesses_v3, device, &g, NULL);
    if (answer != NVML_SUCCESS)
        return answer;
    if (g->value[Q_PROCESSES] == FAKE_NONE)
        return fake_leave(NVML_ERROR_NOT_SUPPORTED);
    room = *count;
    num = *count = (unsigned int)g->value[Q_PROCESSES];
    if (num > room)
        return fake_leave(NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < num; i++)
        processes[i] = (nvmlProcessInfo_t){ .pid = above_pid_max + 1 + i, .usedGpuMemory = 1ull << 30,
                                            .gpuInstanceId = FAKE_WHOLE_GPU,
                                            .computeInstanceId = FAKE_WHOLE_GPU };
    return fake_leave(NVML_SUCCESS);
}
