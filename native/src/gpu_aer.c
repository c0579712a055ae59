/* gpu_aer.c - the kernel's count of a GPU's PCIe errors, which NVML does not tell. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gpus.h"
#include "text.h"

#define ERRNO_CODE 4096 /* dh_gpu.code of a file: errno + this */

static const struct {
    enum dh_gpu_field field;
    const char *file;
    const char *key;
} table[] = {
    { DH_GPU_AER_CORRECTABLE, "aer_dev_correctable", "TOTAL_ERR_COR" },
    { DH_GPU_AER_NONFATAL, "aer_dev_nonfatal", "TOTAL_ERR_NONFATAL" },
    { DH_GPU_AER_FATAL, "aer_dev_fatal", "TOTAL_ERR_FATAL" },
};

/* The text of a file into @buf; its length, or -errno. */
static int64_t slurp(const char *path, char *buf, size_t cap)
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

static int total(const char *path, const char *name, uint64_t *value)
{
    struct dh_text_key key = { .key = name, .len = (uint32_t)strlen(name) };
    char text[2048];
    int64_t n = slurp(path, text, sizeof(text));

    if (n < 0)
        return (int)-n;
    if (dh_text_keys(text, (size_t)n, &key, 1) != 1)
        return EPROTO;
    *value = key.value;
    return 0;
}

/* At the slow pace. A function that went away with its device has no files: that is told once by NVML. */
void dh_gpu_aer(struct dh_gpu_slot *s)
{
    for (size_t i = 0; i < sizeof(table) / sizeof(*table) && *s->work.bus; i++) {
        char path[DH_SYSFS_MAX + 80];
        uint64_t value = 0;
        int err;

        if (!dh_gpu_is_due(s, table[i].field))
            continue;
        snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/%s", s->w->sysfs, s->work.bus, table[i].file);
        if (!dh_call_begin(s->w, &s->caller, DH_CALL_AER, s->called_ns))
            return;
        s->caller.calls--; /* none of NVML */
        err = total(path, table[i].key, &value);
        dh_gpu_called(s, dh_call_end(s->w, &s->caller, NVML_SUCCESS));
        dh_gpu_put(s, table[i].field, err ? err + ERRNO_CODE : 0, value);
    }
}
