/*
 * knobs.c - reads the settings of one cgroup on demand, for the comparison with the expected allocation.
 *
 * CPU time limits and weights are read only here: a wrong limit is no event, so the sampler need not read
 * them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cgroup/cgroup_mounts.h"
#include "core/kernfile.h"
#include "core/text.h"

#define TEXT_LEN 24576 /* fits every second of 8,192 CPUs: 20 KiB */
#define NAME_LEN 64

struct dh_knob_reader {
    struct dh_cg_hier hier[DH_CG_HIERS];
    uint32_t hiers;
    uint32_t sizes;
    uint64_t size_kib[DH_HP_MAX];
};

/* Format of a file, which becomes the member at @offset of the record. */
enum knob_text {
    KNOB_NUMBER,
    KNOB_BYTES,     /* a limit of memory or pages */
    KNOB_QUOTA,     /* v1: -1 is no limit */
    KNOB_CPU_MAX,   /* two members: quota, then period */
    KNOB_THROTTLED, /* one key among others */
    KNOB_CPUS
};

struct knob_file {
    const char *name; /* %s stands for a page size */
    uint8_t version;
    enum dh_cg_controller controller;
    enum knob_text text;
    size_t offset; /* in struct dh_knobs or struct dh_page_knobs */
};

#define IN_KNOBS(member) offsetof(struct dh_knobs, member)
#define IN_SIZE(member) offsetof(struct dh_page_knobs, member)

static const struct knob_file files[] = {
    { "cpu.weight", 2, DH_CG_CPU, KNOB_NUMBER, IN_KNOBS(weight) },
    { "cpu.max", 2, DH_CG_CPU, KNOB_CPU_MAX, IN_KNOBS(quota) },
    { "memory.max", 2, DH_CG_MEMORY, KNOB_BYTES, IN_KNOBS(memory) },
    { "cpu.shares", 1, DH_CG_CPU, KNOB_NUMBER, IN_KNOBS(weight) },
    { "cpu.cfs_quota_us", 1, DH_CG_CPU, KNOB_QUOTA, IN_KNOBS(quota) },
    { "cpu.cfs_period_us", 1, DH_CG_CPU, KNOB_NUMBER, IN_KNOBS(period) },
    { "memory.limit_in_bytes", 1, DH_CG_MEMORY, KNOB_BYTES, IN_KNOBS(memory) },
};

static const struct knob_file exclusive_cpus_files[] = {
    { "cpu.stat", 2, DH_CG_CPU, KNOB_THROTTLED, IN_KNOBS(throttled) },
    { "cpuset.cpus", 2, DH_CG_CPUSET, KNOB_CPUS, IN_KNOBS(cpus) },
    { "cpuset.cpus.effective", 2, DH_CG_CPUSET, KNOB_CPUS, IN_KNOBS(effective) },
    { "cpu.stat", 1, DH_CG_CPU, KNOB_THROTTLED, IN_KNOBS(throttled) },
    { "cpuset.cpus", 1, DH_CG_CPUSET, KNOB_CPUS, IN_KNOBS(cpus) },
    { "cpuset.effective_cpus", 1, DH_CG_CPUSET, KNOB_CPUS, IN_KNOBS(effective) },
};

static const struct knob_file size_files[] = {
    { "hugetlb.%s.max", 2, DH_CG_HUGETLB, KNOB_BYTES, IN_SIZE(max) },
    { "hugetlb.%s.rsvd.max", 2, DH_CG_HUGETLB, KNOB_BYTES, IN_SIZE(rsvd_max) },
    { "hugetlb.%s.limit_in_bytes", 1, DH_CG_HUGETLB, KNOB_BYTES, IN_SIZE(max) },
    { "hugetlb.%s.rsvd.limit_in_bytes", 1, DH_CG_HUGETLB, KNOB_BYTES, IN_SIZE(rsvd_max) },
};

_Static_assert(IN_KNOBS(period) == IN_KNOBS(quota) + sizeof(struct dh_knob), "KNOB_CPU_MAX writes both");

#define COUNT_OF(files) (sizeof(files) / sizeof(*(files)))
#define CONTROLLERS ((unsigned)(DH_CG_CPU | DH_CG_MEMORY | DH_CG_HUGETLB | DH_CG_CPUSET))

/* The directory of a cgroup in one hierarchy. */
struct hierarchy_dir {
    int fd;  /* the cgroup's directory */
    int err; /* why it is not open, or 0 */
    uint8_t version;
    uint8_t controllers;
    bool missed; /* a file did not exist; the removal of the directory would explain it */
};

/* ---- text to members ---- */

static int number_parse(enum knob_text format, const char *text, size_t n, uint64_t *value)
{
    struct dh_text_key throttled = { .key = "nr_throttled", .len = 12 };
    int found;

    switch (format) {
    case KNOB_QUOTA:
        return dh_text_quota(text, n, value);
    case KNOB_THROTTLED:
        found = dh_text_keys(text, n, &throttled, 1);
        *value = throttled.value;
        return found > 0 ? 0 : found ? found : ENOENT; /* v2's cpu.stat without the controller lacks the key */
    case KNOB_BYTES:
        found = dh_text_u64(text, n, value);
        *value = dh_text_limit(*value);
        return found;
    default:
        return dh_text_u64(text, n, value);
    }
}

static void knob_set(struct dh_knob *knob, int err, uint64_t value)
{
    knob->err = err;
    knob->value = err ? 0 : value;
}

/* Store a file's value. @err: why there is no text, or 0. */
static void value_store(const struct knob_file *f, struct dh_knobs *out, char *record, const char *text,
                        size_t n, int err)
{
    struct dh_knob *knob = (struct dh_knob *)(void *)(record + f->offset);
    uint64_t value = 0, period = 0;

    if (f->text == KNOB_CPUS) {
        bool is_configured = f->offset == IN_KNOBS(cpus);

        *(is_configured ? &out->cpus_err : &out->effective_err) =
            err ? err : dh_text_cpus(text, n, is_configured ? out->cpus : out->effective);
    } else if (f->text == KNOB_CPU_MAX) {
        err = err ? err : dh_text_cpu_max(text, n, &value, &period);
        knob_set(&knob[0], err, value);
        knob_set(&knob[1], err, period);
    } else {
        err = err ? err : number_parse(f->text, text, n, &value);
        knob_set(knob, err, value);
    }
}

/* ---- files ---- */

static void file_read(struct hierarchy_dir *dir, const struct knob_file *f, struct dh_knobs *out, char *record,
                      const char *unit)
{
    const char *mark = strstr(f->name, "%s");
    char name[NAME_LEN], text[TEXT_LEN];
    uint64_t reads = 0;
    int64_t n;

    if (f->version != dir->version || !(f->controller & dir->controllers))
        return;
    if (mark)
        snprintf(name, sizeof(name), "%.*s%s%s", (int)(mark - f->name), f->name, unit, mark + 2);
    else
        snprintf(name, sizeof(name), "%s", f->name);
    n = dir->err ? -dir->err : dh_file_read(dir->fd, name, text, sizeof(text), &reads);
    if (n < 0 && dh_is_absence((int)-n)) {
        dir->missed = true;
        n = -ENOENT; /* ENODEV: the controller was just disabled */
    } else if (!dir->err) {
        out->controllers |= f->controller;
    }
    value_store(f, out, record, text, n < 0 ? 0 : (size_t)n, n < 0 ? (int)-n : 0);
}

/*
 * Read cgroup.controllers, the controllers that v2 enables in this cgroup: "cpuset cpu io memory hugetlb\n".
 * Not needed if every file exists.
 */
static void controllers_read(struct hierarchy_dir *dir, struct dh_knobs *out)
{
    static const struct {
        const char *name;
        enum dh_cg_controller bit;
    } known[] = {
        { "cpu", DH_CG_CPU },
        { "memory", DH_CG_MEMORY },
        { "hugetlb", DH_CG_HUGETLB },
        { "cpuset", DH_CG_CPUSET },
    };
    char text[1024];
    uint64_t reads = 0;
    int64_t n = dir->err;

    n = n ? -n : dh_file_read(dir->fd, "cgroup.controllers", text, sizeof(text), &reads);
    if (n < 0) {
        dir->missed |= dh_is_absence((int)-n);
        out->controllers_err = (int32_t)-n;
        return;
    }
    out->controllers &= ~(uint32_t)dir->controllers;
    for (int64_t at = 0, len; at < n; at += len + 1) {
        for (len = 0; at + len < n && text[at + len] != ' ' && text[at + len] != '\n';)
            len++;
        for (size_t i = 0; i < COUNT_OF(known); i++)
            if ((size_t)len == strlen(known[i].name) && !memcmp(text + at, known[i].name, (size_t)len))
                out->controllers |= known[i].bit & dir->controllers;
    }
}

static void hierarchy_read(const struct dh_knob_reader *r, struct hierarchy_dir *dir, bool exclusive_cpus,
                           struct dh_knobs *out)
{
    for (size_t i = 0; i < COUNT_OF(files); i++)
        file_read(dir, &files[i], out, (char *)out, "");
    for (size_t i = 0; exclusive_cpus && i < COUNT_OF(exclusive_cpus_files); i++)
        file_read(dir, &exclusive_cpus_files[i], out, (char *)out, "");
    for (uint32_t k = 0; k < r->sizes; k++) {
        char unit[32];

        dh_text_hugetlb(r->size_kib[k], unit, sizeof(unit));
        for (size_t i = 0; i < COUNT_OF(size_files); i++)
            file_read(dir, &size_files[i], out, (char *)&out->pages[k], unit);
    }
    if (dir->version != 2)
        out->controllers |= dir->controllers;
    else if (dir->missed || dir->err)
        controllers_read(dir, out);
}

/* ---- a cgroup ---- */

/* Reset the record: absent, until a hierarchy has the value. */
static void knobs_clear(const struct dh_knob_reader *r, struct dh_knobs *out)
{
    struct dh_knob *const knobs[] = { &out->weight, &out->quota, &out->period, &out->throttled, &out->memory };

    memset(out, 0, sizeof(*out));
    out->size = sizeof(*out);
    out->version = DH_VERSION;
    out->sizes = r->sizes;
    out->cpus_err = out->effective_err = ENOENT;
    for (size_t i = 0; i < sizeof(knobs) / sizeof(*knobs); i++)
        knobs[i]->err = ENOENT;
    for (uint32_t k = 0; k < r->sizes; k++) {
        out->pages[k].size_kib = r->size_kib[k];
        out->pages[k].max.err = out->pages[k].rsvd_max.err = ENOENT;
    }
}

/* Return whether the path still leads to the open directory, and not to a new one or none. */
static bool is_same_dir(const struct dh_cg_hier *hier, const char *path, int fd)
{
    struct stat open, now;

    return fstatat(hier->fd, path, &now, 0) ? !dh_is_absence(errno)
                                            : !fstat(fd, &open) && open.st_dev == now.st_dev &&
                                                  open.st_ino == now.st_ino;
}

/* Read all hierarchies once. @gone: the cgroup is being removed from one of them. */
static int read_once(const struct dh_knob_reader *r, const char *path, bool exclusive_cpus,
                     struct dh_knobs *out, bool *gone)
{
    int err = ENOENT, found = 0;

    *gone = false;
    for (uint32_t h = 0; h < r->hiers; h++) {
        const struct dh_cg_hier *hier = &r->hier[h];
        struct hierarchy_dir dir = { .version = hier->version, .controllers = hier->controllers & CONTROLLERS };

        if (!dir.controllers)
            continue;
        dir.fd = openat(hier->fd, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        dir.err = dir.fd < 0 ? errno : 0;
        if (dir.err && dh_is_absence(dir.err))
            continue;
        hierarchy_read(r, &dir, exclusive_cpus, out);
        if (dir.err) {
            err = dir.err;
            continue;
        }
        found++;
        *gone |= dir.missed && !is_same_dir(hier, path, dir.fd);
        close(dir.fd);
    }
    return found ? 0 : -err;
}

int dh_knobs_read(const struct dh_knob_reader *r, const char *path, int exclusive_cpus, struct dh_knobs *out)
{
    bool gone = false;
    int code = 0;

    if (out->size != sizeof(*out) || out->version != DH_VERSION)
        return DH_EABI;
    path += strspn(path, "/");
    for (uint32_t attempts = 1; attempts <= 2 && (attempts == 1 || gone || code == -ENOENT); attempts++) {
        knobs_clear(r, out);
        out->attempts = attempts;
        code = read_once(r, *path ? path : ".", exclusive_cpus, out, &gone);
    }
    return code ? code : gone ? -ENOENT : 0;
}

int dh_knobs_open(const char *cgroupfs, const uint64_t *size_kib, uint32_t sizes, struct dh_knob_reader **out)
{
    struct dh_knob_reader *r;
    int err;

    if (sizes > DH_HP_MAX)
        return -EINVAL;
    r = calloc(1, sizeof(*r));
    if (!r)
        return -ENOMEM;
    r->sizes = sizes;
    for (uint32_t k = 0; k < sizes; k++)
        r->size_kib[k] = size_kib[k];
    err = dh_cg_mounts_find(cgroupfs, r->hier, &r->hiers);
    if (err || !r->hiers) {
        dh_knobs_close(r);
        return err ? -err : -ENOENT;
    }
    *out = r;
    return 0;
}

int dh_knobs_version(const struct dh_knob_reader *r)
{
    for (uint32_t h = 0; h < r->hiers; h++)
        if (r->hier[h].controllers & DH_CG_CPU)
            return r->hier[h].version;
    return 2; /* no hierarchy has the controller: CPU time settings cannot be read either */
}

void dh_knobs_close(struct dh_knob_reader *r)
{
    for (uint32_t h = 0; h < r->hiers; h++)
        close(r->hier[h].fd);
    free(r);
}
