/*
 * uevent_parse.c - counts messages of the kernel by subsystem. No I/O, no clock.
 *
 * A message consists of NUL-terminated strings: "change@/devices/system/cpu/cpu1", then "KEY=value" of which
 * ACTION, DEVPATH and SUBSYSTEM come first and are always present (lib/kobject_uevent.c). Whatever happened
 * to a device, the reader scans its subsystem again: so the other keys are not parsed.
 */
#include <string.h>

#include "uevent/uevents.h"

#define SUBSYSTEM "SUBSYSTEM="

static const char *const subsystems[DH_SUBSYSTEM_NUM] = {
    [DH_SUBSYSTEM_CPU] = "cpu",   [DH_SUBSYSTEM_MEMORY] = "memory",
    [DH_SUBSYSTEM_NODE] = "node", [DH_SUBSYSTEM_PCI] = "pci",
    [DH_SUBSYSTEM_EDAC] = "edac", [DH_SUBSYSTEM_MACHINECHECK] = "machinecheck",
};

static int subsystem_of(const char *name)
{
    int i;

    for (i = 0; i < DH_SUBSYSTEM_NUM; i++)
        if (!strcmp(subsystems[i], name))
            break;
    return i;
}

int dh_uevent_subsystem(const char *s, size_t n)
{
    const char *end = s + n, *at;

    if (!n || end[-1])
        return DH_EPARSE;
    at = strchr(s, '@');
    if (!at || at[1] != '/')
        return DH_EPARSE;
    for (s = at + strlen(at) + 1; s < end; s += strlen(s) + 1)
        if (!strncmp(s, SUBSYSTEM, strlen(SUBSYSTEM)))
            return subsystem_of(s + strlen(SUBSYSTEM));
    return DH_EPARSE;
}

void dh_uevent_count(struct dh_uevent_counts *h, const char *s, size_t n)
{
    int subsystem = dh_uevent_subsystem(s, n);

    if (subsystem < 0) {
        h->sample.malformed++;
    } else if (subsystem != DH_SUBSYSTEM_NUM) {
        h->sample.changes[subsystem]++;
        h->is_new = true;
        h->rescan |= subsystem != DH_SUBSYSTEM_PCI;
    }
}

void dh_uevent_count_lost(struct dh_uevent_counts *h)
{
    for (int i = 0; i < DH_SUBSYSTEM_NUM; i++)
        h->sample.changes[i]++;
    h->is_new = h->rescan = true;
}
