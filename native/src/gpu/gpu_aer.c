/* gpu_aer.c - the kernel's counts of a GPU's PCIe errors, which NVML does not report. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpu/gpus.h"
#include "core/text.h"

#define ERRNO_BASE 4096 /* dh_gpu.code of a file is errno + this */

static const struct {
    enum dh_gpu_field field;
    const char *file;
    const char *key;
} table[] = {
    { DH_GPU_AER_CORRECTABLE, "aer_dev_correctable", "TOTAL_ERR_COR" },
    { DH_GPU_AER_NONFATAL, "aer_dev_nonfatal", "TOTAL_ERR_NONFATAL" },
    { DH_GPU_AER_FATAL, "aer_dev_fatal", "TOTAL_ERR_FATAL" },
};

/* Read a file into @buf. Return: its length, or -errno. */
static int64_t read_text(const char *path, char *buf, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int64_t n;

    if (fd < 0)
        return -errno;
    n = read(fd, buf, cap);
    if (n < 0)
        n = -errno;
    close(fd);
    return n;
}

static int read_total(const char *path, const char *name, uint64_t *value)
{
    struct dh_text_key key = { .key = name, .len = (uint32_t)strlen(name) };
    char text[2048];
    int64_t n = read_text(path, text, sizeof(text));

    if (n < 0)
        return (int)-n;
    if (dh_text_keys(text, (size_t)n, &key, 1) != 1)
        return EPROTO;
    *value = key.value;
    return 0;
}

/*
 * Read the AER counters, in slow passes. A removed PCI function has no files; NVML reports that it is lost. A function
 * has all of the files or none.
 */
void dh_gpu_read_aer(struct dh_gpu_slot *s)
{
    int err = 0;

    for (size_t i = 0; i < sizeof(table) / sizeof(*table) && *s->work.bus; i++) {
        char path[DH_SYSFS_MAX + 80];
        uint64_t value = 0;

        if (!dh_gpu_is_due(s, table[i].field))
            continue;
        if (err == ENOENT) {
            dh_gpu_store(s, table[i].field, err + ERRNO_BASE, 0);
            continue;
        }
        snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/%s", s->w->sysfs, s->work.bus, table[i].file);
        if (!dh_call_begin(s->w, &s->caller, DH_CALL_AER, s->call_end_ns))
            return;
        s->caller.calls--; /* not a call of NVML */
        err = read_total(path, table[i].key, &value);
        dh_gpu_call_done(s, dh_call_end(s->w, &s->caller, NVML_SUCCESS));
        dh_gpu_store(s, table[i].field, err ? err + ERRNO_BASE : 0, value);
    }
}
