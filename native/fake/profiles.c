/*
 * profiles.c - the GPUs that can be simulated: their names, and their readings when healthy.
 *
 * A profile is an h100 with differences. A value that is not from a data sheet or an nvidia-smi report is one
 * that such a GPU could show.
 */
#include "fake.h"

#include <string.h>

#define X(enumerator, text, when_reset, of_h100) { .name = text, .fate = when_reset, .value = of_h100 },
const struct fake_trait fake_traits[Q_NUM] = { FAKE_QUANTITIES(X) };
const struct fake_trait fake_link_traits[L_NUM] = { FAKE_LINK_QUANTITIES(X) };
#undef X

static const struct fake_profile profiles[] = {
    {
        .name = "h100",
        .product = "NVIDIA H100 80GB HBM3",
        .vbios = "96.00.89.00.01",
        .brand = NVML_BRAND_NVIDIA,
        .architecture = NVML_DEVICE_ARCH_HOPPER,
        .pci_device = 0x233010de,
        .pci_subsystem = 0x16c110de,
        .links = 18,
        .link_speed = 26562,
        .newer_events = true,
        .mig = {
            { "1g.10gb", 1, 1, 16, 9984 },
            { "1g.20gb", 1, 2, 26, 20096 },
            { "2g.20gb", 2, 2, 32, 20096 },
            { "3g.40gb", 3, 4, 60, 40448 },
            { "4g.40gb", 4, 4, 64, 40448 },
            { "7g.80gb", 7, 8, 132, 81151 },
        },
    },
    {
        .name = "a100",
        .product = "NVIDIA A100-SXM4-40GB",
        .vbios = "92.00.45.00.03",
        .brand = NVML_BRAND_NVIDIA,
        .architecture = NVML_DEVICE_ARCH_AMPERE,
        .pci_device = 0x20b010de,
        .pci_subsystem = 0x134f10de,
        .links = 12,
        .link_speed = 25781,
        .newer_events = true,
        .other = {
            { Q_POWER_USAGE, 52000 },
            { Q_POWER_LIMIT, 400000 },
            { Q_TEMPERATURE_MARGIN, FAKE_NONE },
            { Q_TEMPERATURE_SHUTDOWN, 92 },
            { Q_TEMPERATURE_SLOWDOWN, 89 },
            { Q_TEMPERATURE_GPU_MAX, 85 },
            { Q_TLIMIT_SHUTDOWN, FAKE_NONE },
            { Q_TLIMIT_SLOWDOWN, FAKE_NONE },
            { Q_TLIMIT_MEMORY_MAX, FAKE_NONE },
            { Q_TLIMIT_GPU_MAX, FAKE_NONE },
            { Q_PCIE_GEN, 4 },
            { Q_PCIE_GEN_MAX, 4 },
            { Q_FABRIC_STATE, FAKE_NONE },
        },
        .mig = {
            { "1g.5gb", 1, 1, 14, 4864 },
            { "1g.10gb", 1, 2, 14, 9856 },
            { "2g.10gb", 2, 2, 28, 9856 },
            { "3g.20gb", 3, 4, 42, 19968 },
            { "4g.20gb", 4, 4, 56, 19968 },
            { "7g.40gb", 7, 8, 98, 40192 },
        },
    },
    {
        .name = "t4",
        .product = "Tesla T4",
        .vbios = "90.04.96.00.9F",
        .brand = NVML_BRAND_TESLA,
        .architecture = NVML_DEVICE_ARCH_TURING,
        .pci_device = 0x1eb810de,
        .pci_subsystem = 0x12a210de,
        .other = {
            { Q_POWER_USAGE, 10000 },
            { Q_POWER_LIMIT, 70000 },
            { Q_TEMPERATURE_MEMORY, FAKE_NONE },
            { Q_TEMPERATURE_MARGIN, FAKE_NONE },
            { Q_TEMPERATURE_SHUTDOWN, 96 },
            { Q_TEMPERATURE_SLOWDOWN, 93 },
            { Q_TEMPERATURE_MEMORY_MAX, FAKE_NONE },
            { Q_TEMPERATURE_GPU_MAX, 85 },
            { Q_TLIMIT_SHUTDOWN, FAKE_NONE },
            { Q_TLIMIT_SLOWDOWN, FAKE_NONE },
            { Q_TLIMIT_MEMORY_MAX, FAKE_NONE },
            { Q_TLIMIT_GPU_MAX, FAKE_NONE },
            { Q_PCIE_GEN, 3 },
            { Q_PCIE_GEN_MAX, 3 },
            { Q_SRAM_THRESHOLD, FAKE_NONE },
            { Q_REMAP_CORRECTABLE, FAKE_NONE },
            { Q_REMAP_UNCORRECTABLE, FAKE_NONE },
            { Q_REMAP_PENDING, FAKE_NONE },
            { Q_REMAP_FAILURE, FAKE_NONE },
            { Q_CHANNEL_REPAIR, FAKE_NONE },
            { Q_UNREPAIRABLE, FAKE_NONE },
            { Q_RETIRED_SBE, 0 },
            { Q_RETIRED_DBE, 0 },
            { Q_RETIRED_PENDING, 0 },
            { Q_RECOVERY_ACTION, FAKE_NONE },
            { Q_FABRIC_STATE, FAKE_NONE },
        },
    },
};

const struct fake_profile *fake_profile_find(const char *name)
{
    for (size_t i = 0; i < sizeof(profiles) / sizeof(profiles[0]); i++)
        if (strcmp(profiles[i].name, name) == 0)
            return &profiles[i];
    return NULL;
}
