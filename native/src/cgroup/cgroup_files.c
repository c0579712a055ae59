/*
 * cgroup_files.c - the files that are read of a group, and how their text becomes members of its record.
 *
 * memory.stat is not read: the kernel spends ten times as much on its 42 lines as on any counter here, and no
 * rule needs it. Limits of CPU time are not read either: the audit of expected allocations reads them on
 * demand. Nor is the number of hugepages in use: failed allocations are counted.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cgroup/cgroups.h"
#include "core/text.h"

#define IN_GROUP(member) offsetof(struct dh_group, member)
#define IN_SIZE(member) offsetof(struct dh_hugetlb, member)
#define END { .field = DH_FIELD_NUM }

/* Keys in the order in which the kernel writes them. */
static const struct dh_cg_spec specs[] = {
    { "cgroup.events", 2, DH_CG_CORE, DH_CG_NOTIFIED,
      { { DH_GROUP_POPULATED, "populated", IN_GROUP(populated), DH_CG_PLAIN }, END } },
    { "cgroup.events", 2, DH_CG_FREEZER, DH_CG_NOTIFIED,
      { { DH_GROUP_POPULATED, "populated", IN_GROUP(populated), DH_CG_PLAIN },
        { DH_GROUP_FROZEN, "frozen", IN_GROUP(frozen), DH_CG_PLAIN }, END } },
    { "memory.events", 2, DH_CG_MEMORY, DH_CG_NOTIFIED,
      { { DH_GROUP_MEM_HIGH, "high", IN_GROUP(mem_high), DH_CG_PLAIN },
        { DH_GROUP_MEM_MAX, "max", IN_GROUP(mem_max), DH_CG_PLAIN },
        { DH_GROUP_MEM_OOM, "oom", IN_GROUP(mem_oom), DH_CG_PLAIN },
        { DH_GROUP_MEM_OOM_KILL, "oom_kill", IN_GROUP(mem_oom_kill), DH_CG_PLAIN } } },
    { "cpu.stat", 2, DH_CG_CPU, DH_CG_SWEPT,
      { { DH_GROUP_CPU_PERIODS, "nr_periods", IN_GROUP(cpu_periods), DH_CG_PLAIN },
        { DH_GROUP_CPU_THROTTLED, "nr_throttled", IN_GROUP(cpu_throttled), DH_CG_PLAIN }, END } },
    { "memory.max", 2, DH_CG_MEMORY, DH_CG_RARE,
      { { DH_GROUP_MEM_LIMIT, NULL, IN_GROUP(mem_limit), DH_CG_LIMIT }, END } },
    { "cpuset.cpus.effective", 2, DH_CG_CPUSET, DH_CG_RARE,
      { { DH_GROUP_CPUS, NULL, IN_GROUP(cpus), DH_CG_CPUS }, END } },
    { "memory.failcnt", 1, DH_CG_MEMORY, DH_CG_SWEPT,
      { { DH_GROUP_MEM_FAILCNT, NULL, IN_GROUP(mem_failcnt), DH_CG_PLAIN }, END } },
    { "memory.limit_in_bytes", 1, DH_CG_MEMORY, DH_CG_RARE,
      { { DH_GROUP_MEM_LIMIT, NULL, IN_GROUP(mem_limit), DH_CG_LIMIT }, END } },
    { "memory.oom_control", 1, DH_CG_MEMORY, DH_CG_OOM,
      { { DH_GROUP_MEM_OOM_KILL, "oom_kill", IN_GROUP(mem_oom_kill), DH_CG_PLAIN }, END } },
    { "cpu.stat", 1, DH_CG_CPU, DH_CG_SWEPT,
      { { DH_GROUP_CPU_PERIODS, "nr_periods", IN_GROUP(cpu_periods), DH_CG_PLAIN },
        { DH_GROUP_CPU_THROTTLED, "nr_throttled", IN_GROUP(cpu_throttled), DH_CG_PLAIN }, END } },
    { "cpuset.effective_cpus", 1, DH_CG_CPUSET, DH_CG_RARE,
      { { DH_GROUP_CPUS, NULL, IN_GROUP(cpus), DH_CG_CPUS }, END } },
    { "freezer.state", 1, DH_CG_FREEZER, DH_CG_SWEPT,
      { { DH_GROUP_FROZEN, NULL, IN_GROUP(frozen), DH_CG_STATE }, END } },
};

static const struct dh_cg_spec size_specs[] = {
    { "hugetlb.%s.events", 2, DH_CG_HUGETLB, DH_CG_NOTIFIED,
      { { DH_GROUP_HT_EVENTS, "max", IN_SIZE(events), DH_CG_PLAIN }, END } },
    { "hugetlb.%s.max", 2, DH_CG_HUGETLB, DH_CG_RARE,
      { { DH_GROUP_HT_MAX, NULL, IN_SIZE(max), DH_CG_LIMIT }, END } },
    { "hugetlb.%s.rsvd.max", 2, DH_CG_HUGETLB, DH_CG_RARE,
      { { DH_GROUP_HT_RSVD_MAX, NULL, IN_SIZE(rsvd_max), DH_CG_LIMIT }, END } },
    { "hugetlb.%s.failcnt", 1, DH_CG_HUGETLB, DH_CG_SWEPT,
      { { DH_GROUP_HT_EVENTS, NULL, IN_SIZE(events), DH_CG_PLAIN }, END } },
    { "hugetlb.%s.rsvd.failcnt", 1, DH_CG_HUGETLB, DH_CG_SWEPT,
      { { DH_GROUP_HT_RSVD_FAILED, NULL, IN_SIZE(rsvd_failed), DH_CG_PLAIN }, END } },
    { "hugetlb.%s.limit_in_bytes", 1, DH_CG_HUGETLB, DH_CG_RARE,
      { { DH_GROUP_HT_MAX, NULL, IN_SIZE(max), DH_CG_LIMIT }, END } },
    { "hugetlb.%s.rsvd.limit_in_bytes", 1, DH_CG_HUGETLB, DH_CG_RARE,
      { { DH_GROUP_HT_RSVD_MAX, NULL, IN_SIZE(rsvd_max), DH_CG_LIMIT }, END } },
};

static void file_add(struct dh_cgroups *c, const struct dh_cg_spec *spec, uint32_t hier, int8_t size,
                     const char *unit)
{
    struct dh_cg_file *f = &c->file[c->files];
    const char *mark = strstr(spec->name, "%s");
    int prefix = mark ? (int)(mark - spec->name) : (int)strlen(spec->name);

    if (c->files == DH_CG_FILES)
        return;
    f->spec = spec;
    f->hier = (uint8_t)hier;
    f->size = size;
    snprintf(f->name, sizeof(f->name), "%.*s%s%s", prefix, spec->name, mark ? unit : "",
             mark ? mark + 2 : "");
    if (spec->read == DH_CG_NOTIFIED && spec->controller & (DH_CG_CORE | DH_CG_FREEZER))
        c->local |= DH_CG_FILE_BIT(c->files);
    if (spec->read == DH_CG_SWEPT)
        c->swept |= DH_CG_FILE_BIT(c->files);
    if (spec->read == DH_CG_OOM)
        c->oom |= DH_CG_FILE_BIT(c->files);
    if (spec->read == DH_CG_RARE)
        c->rare |= DH_CG_FILE_BIT(c->files);
    c->files++;
}

static bool is_in_hierarchy(const struct dh_cg_spec *spec, const struct dh_cg_hier *h)
{
    return spec->version == h->version && (spec->controller & h->controllers);
}

/* Add the page sizes of the machine's new pools; the kernel uses the same sizes in names of cgroup files. */
static void sizes_add(struct dh_sampler *s)
{
    struct dh_cgroups *c = s->cgroups;

    for (; c->pools < s->work->head.pools; c->pools++) {
        const struct dh_pool *pool = &s->work->pool[c->pools];

        if (pool->node == DH_MACHINE && c->sizes < DH_HP_MAX)
            c->size_kib[c->sizes++] = pool->size_kib;
        else if (pool->node == DH_MACHINE)
            dh_source_full(s, DH_SOURCE_CGROUPS, DH_GROUP_HT_MAX);
    }
}

/*
 * Add the files of the hierarchies from @hiers_before on, and those of the page sizes of new pools: sysfs may
 * appear after cgroupfs. Existing groups are then read again.
 */
void dh_cg_files_make(struct dh_sampler *s, uint32_t hiers_before)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t sizes_before = c->sizes;

    if (!c->hiers)
        return;
    sizes_add(s);
    for (uint32_t i = 0; i < c->files; i++) /* v1's freezer appeared, and decides from now on */
        if (c->file[i].spec == &specs[1] && !is_in_hierarchy(&specs[1], &c->hier[c->file[i].hier]))
            c->file[i].spec = &specs[0];
    for (uint32_t slot = 0; c->sizes > sizes_before && slot < s->work->head.groups; slot++) {
        if (!c->group[slot].hiers)
            continue;
        dh_cg_sizes_init(s, &s->work->group[slot]);
        dh_group_mark_dirty(s, slot);
        c->rescan = true;
    }
    for (uint32_t h = 0; h < c->hiers; h++) {
        for (size_t i = 0; h >= hiers_before && i < sizeof(specs) / sizeof(*specs); i++)
            if (is_in_hierarchy(&specs[i], &c->hier[h]))
                file_add(c, &specs[i], h, -1, "");
        for (uint32_t k = h >= hiers_before ? 0 : sizes_before; k < c->sizes; k++) {
            char unit[32];

            dh_text_hugetlb(c->size_kib[k], unit, sizeof(unit));
            for (size_t i = 0; i < sizeof(size_specs) / sizeof(*size_specs); i++)
                if (is_in_hierarchy(&size_specs[i], &c->hier[h]))
                    file_add(c, &size_specs[i], h, (int8_t)k, unit);
        }
    }
    s->pools_changed = true;
}

void dh_cg_sizes_init(struct dh_sampler *s, struct dh_group *g)
{
    const struct dh_cgroups *c = s->cgroups;

    g->sizes = c->sizes;
    for (uint32_t k = 0; k < c->sizes; k++)
        g->hugetlb[k].size_kib = c->size_kib[k];
}

size_t dh_cg_path(const struct dh_sampler *s, uint32_t slot, uint32_t file, char out[DH_CG_PATH + 64])
{
    const struct dh_cgroups *c = s->cgroups;
    size_t dir = strlen(c->group[slot].path), name = strlen(c->file[file].name);

    memcpy(out, c->group[slot].path, dir);
    out[dir] = '/';
    memcpy(out + dir + 1, c->file[file].name, name + 1);
    return dir + 1 + name;
}

/*
 * Return the directory from which a group's files are opened; @skip is the part of dh_cg_path() above it.
 *
 * kernfs takes a lock and revalidates every component of a path, so five components cost more than the file
 * itself. While a pod is swept, its own directory is the base, also for its containers.
 */
int dh_cg_base_dir(struct dh_sampler *s, uint32_t slot, uint8_t hier, size_t *skip)
{
    struct dh_cgroups *c = s->cgroups;
    uint32_t pod = c->group[slot].parent ? c->group[slot].parent : slot + 1;

    *skip = 0;
    if (pod != c->base_pod)
        return c->hier[hier].fd;
    if (c->base_fd[hier] < 0) {
        s->opens++;
        c->base_fd[hier] = openat(c->hier[hier].fd, c->group[pod - 1].path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    }
    if (c->base_fd[hier] < 0)
        return c->hier[hier].fd;
    *skip = strlen(c->group[pod - 1].path) + 1;
    return c->base_fd[hier];
}

/*
 * Return whether a path below a hierarchy does not exist. Another error, such as ENOMEM, shows nothing about it: a group
 * that counted as removed would be found again as a new one, whose counts are all new.
 */
bool dh_cg_missing(const struct dh_cgroups *c, uint8_t hier, const char *path)
{
    return faccessat(c->hier[hier].fd, path, F_OK, 0) && (errno == ENOENT || errno == ENOTDIR || errno == ENODEV);
}

bool dh_cg_dir_exists(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    return !dh_cg_missing(s->cgroups, hier, s->cgroups->group[slot].path);
}

/*
 * Return the record for the values of a file: that of the group, or its hugetlb entry for the file's page size.
 * Set @valid and @seen to the masks of this record.
 */
static char *member_record(struct dh_group *g, const struct dh_cg_file *f, uint64_t **valid, uint64_t **seen)
{
    if (f->size < 0) {
        *valid = &g->valid;
        *seen = &g->seen;
        return (char *)g;
    }
    *valid = &g->hugetlb[f->size].valid;
    *seen = &g->hugetlb[f->size].seen;
    return (char *)&g->hugetlb[f->size];
}

/* Clear a value that cannot be read, or is gone. Return: whether the record changed. */
static bool value_clear(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, char *record,
                        const struct dh_cg_value *v, int err)
{
    if (v->unit == DH_CG_CPUS)
        memset(record + v->offset, 0, sizeof(((struct dh_group *)NULL)->cpus));
    return dh_store_reading(s, valid, seen, v->field, (uint64_t *)(void *)(record + v->offset), err, 0);
}

/* Mark a file as active, after a change or a failed read: every sweep reads it for a while. */
static void mark_active(struct dh_sampler *s, uint32_t slot, const struct dh_cg_file *f)
{
    s->cgroups->group[slot].active |= DH_CG_FILE_BIT(f - s->cgroups->file);
}

/* Clear the values of a file that does not exist: absent, not unreadable. */
static void file_clear(struct dh_sampler *s, uint32_t slot, uint32_t file)
{
    const struct dh_cg_file *f = &s->cgroups->file[file];
    uint64_t *valid, *seen;
    char *record = member_record(&s->work->group[slot], f, &valid, &seen);

    s->cgroups->group[slot].present &= ~DH_CG_FILE_BIT(file);
    s->cgroups->group[slot].failed &= ~DH_CG_FILE_BIT(file);
    for (int i = 0; i < DH_CG_VALUES && f->spec->values[i].field != DH_FIELD_NUM; i++) {
        const struct dh_cg_value *v = &f->spec->values[i];

        value_clear(s, valid, seen, record, v, ENOENT);
        dh_store_absence(s, valid, seen, v->field);
    }
    dh_group_mark_dirty(s, slot);
}

/*
 * Note a failed read. A file that was never read may hold any of its keys; otherwise only the keys seen are
 * cleared. A lack of descriptors or memory does not show that the file exists.
 */
static void file_failed(struct dh_sampler *s, uint32_t slot, uint32_t file, int err)
{
    const struct dh_cg_file *f = &s->cgroups->file[file];
    struct dh_group *g = &s->work->group[slot];
    bool never = !(s->cgroups->group[slot].present & DH_CG_FILE_BIT(file));
    uint64_t *valid, *seen;
    char *record = member_record(g, f, &valid, &seen);
    bool changed = g->err != err;

    for (int i = 0; i < DH_CG_VALUES && f->spec->values[i].field != DH_FIELD_NUM; i++) {
        const struct dh_cg_value *v = &f->spec->values[i];

        if (never || *seen & DH_FIELD_BIT(v->field))
            changed |= value_clear(s, valid, seen, record, v, err);
    }
    g->err = err;
    s->cgroups->group[slot].failed |= DH_CG_FILE_BIT(file);
    if (!dh_is_own_failure(err))
        s->cgroups->group[slot].present |= DH_CG_FILE_BIT(file);
    mark_active(s, slot, f);
    dh_source_failed(s, DH_SOURCE_CGROUPS, f->spec->values[0].field, err);
    if (changed)
        dh_group_mark_dirty(s, slot);
}

static uint64_t convert(const struct dh_cg_value *v, uint64_t value)
{
    return v->unit == DH_CG_LIMIT ? dh_text_limit(value) : value;
}

/* Parse cgroup v1's freezer.state. A group in FREEZING has tasks that still run, so it is not frozen. */
static int state_parse(const char *text, size_t n, uint64_t *frozen)
{
    static const char *const states[] = { "THAWED\n", "FREEZING\n", "FROZEN\n" };

    for (uint64_t i = 0; i < 3; i++) {
        if (n != strlen(states[i]) || memcmp(text, states[i], n))
            continue;
        *frozen = i == 2;
        return 0;
    }
    return DH_EPARSE;
}

/* Store a list of CPUs. Return: 1; DH_EPARSE; DH_EFULL if a CPU exceeds the record's set. */
static int cpus_parse(struct dh_sampler *s, uint32_t slot, const char *text, size_t n)
{
    struct dh_group *g = &s->work->group[slot];
    uint64_t now[DH_CPU_WORDS];
    int err = dh_text_cpus(text, n, now);
    bool changed;

    for (int i = DH_GROUP_CPU_WORDS; !err && i < DH_CPU_WORDS; i++)
        err = now[i] ? DH_EFULL : 0;
    if (err)
        return err;
    changed = dh_store_validity(s, &g->valid, &g->seen, DH_GROUP_CPUS, true);
    if (memcmp(g->cpus, now, sizeof(g->cpus))) {
        memcpy(g->cpus, now, sizeof(g->cpus));
        dh_wake_if_watched(s, DH_GROUP_CPUS);
        changed = true;
    }
    if (changed)
        dh_group_mark_dirty(s, slot);
    return 1;
}

/* Store the numbers of a file. Return: how many were found, or DH_EPARSE. */
static int numbers_parse(struct dh_sampler *s, uint32_t slot, const struct dh_cg_file *f, const char *text,
                         size_t n)
{
    struct dh_text_key keys[DH_CG_VALUES] = { { 0 } };
    const struct dh_cg_value *values = f->spec->values;
    uint64_t *valid, *seen;
    char *record = member_record(&s->work->group[slot], f, &valid, &seen);
    uint32_t num = 0;
    bool changed = false;
    int found;

    while (num < DH_CG_VALUES && values[num].field != DH_FIELD_NUM) {
        keys[num].key = values[num].key;
        keys[num].len = values[num].key ? (uint32_t)strlen(values[num].key) : 0;
        num++;
    }
    if (values[0].key)
        found = dh_text_keys(text, n, keys, num);
    else if (values[0].unit == DH_CG_STATE)
        found = state_parse(text, n, &keys[0].value) ? DH_EPARSE : (keys[0].found = 1);
    else
        found = dh_text_u64(text, n, &keys[0].value) ? DH_EPARSE : (keys[0].found = 1);
    for (uint32_t i = 0; found > 0 && i < num; i++) {
        uint64_t bit = DH_FIELD_BIT(values[i].field);

        if (keys[i].found) {
            changed |= dh_store_reading(s, valid, seen, values[i].field,
                                        (uint64_t *)(void *)(record + values[i].offset), 0,
                                        convert(&values[i], keys[i].value));
        } else if (*seen & ~*valid & bit) {
            *seen &= ~bit; /* the file can be read again, and lacks the key */
            changed = true;
        }
    }
    if (changed) {
        mark_active(s, slot, f);
        dh_group_mark_dirty(s, slot);
    }
    return found;
}

static uint64_t unreadable_fields(const struct dh_group *g)
{
    uint64_t unreadable = g->seen & ~g->valid;

    for (uint32_t k = 0; k < g->sizes; k++)
        unreadable |= g->hugetlb[k].seen & ~g->hugetlb[k].valid;
    return unreadable;
}

static void unreadable_count(struct dh_sampler *s, uint32_t slot)
{
    struct dh_cg_group *p = &s->cgroups->group[slot];
    bool unreadable = unreadable_fields(&s->work->group[slot]) != 0;

    if (unreadable && !p->unreadable)
        s->cgroups->unreadable++;
    if (!unreadable && p->unreadable)
        s->cgroups->unreadable--;
    p->unreadable = unreadable;
}

/* Note that a file never existed, or has none of its keys: a v2 cpu.stat without the cpu controller. */
static void file_absent(struct dh_sampler *s, uint32_t slot, uint32_t file)
{
    if (!(s->cgroups->group[slot].failed & DH_CG_FILE_BIT(file)))
        return;
    file_clear(s, slot, file);
    unreadable_count(s, slot);
}

/*
 * Store the @n bytes that were read of a file, or the -errno of a read. Return: false if the group is gone.
 *
 * A file that never existed stays absent. ENOENT and ENODEV from a file that existed mean that the group is
 * being removed, unless its directory still exists in the next read: the kernel removes the files first. A
 * removed file has also lost its watch, so until the next resync the sweep checks whether it is back.
 */
static bool text_store(struct dh_sampler *s, uint32_t slot, uint32_t file, const char *text, int64_t n)
{
    struct dh_cgroups *c = s->cgroups;
    const struct dh_cg_file *f = &c->file[file];
    struct dh_cg_group *p = &c->group[slot];
    const uint64_t bit = DH_CG_FILE_BIT(file);
    int found = 0;

    if (n == -ENOENT || n == -ENODEV) {
        if (!((p->present | p->failed) & bit))
            return true; /* another file shows whether the group is gone */
        if (!dh_cg_dir_exists(s, slot, f->hier))
            return false;
        if (!(p->present & bit)) {
            file_absent(s, slot, file);
            return true;
        }
        p->watched &= ~bit;
        if (!(p->missed & bit)) {
            p->missed |= bit;
            mark_active(s, slot, f);
            return true;
        }
    }
    if (n >= 0 && f->spec->values[0].unit == DH_CG_CPUS)
        found = cpus_parse(s, slot, text, (size_t)n);
    else if (n >= 0)
        found = numbers_parse(s, slot, f, text, (size_t)n);
    dh_cg_held_note(c, slot, file, text, n >= 0 && found > 0 ? (size_t)n : 0);
    if (n >= 0 && found > 0) {
        p->present |= bit;
        p->missed &= ~bit;
        p->failed &= ~bit;
    } else if (n >= 0 && !found && !(p->present & bit)) {
        file_absent(s, slot, file);
        return true;
    } else {
        file_failed(s, slot, file, n < 0 ? (int)-n : found < 0 ? found : DH_EPARSE);
    }
    unreadable_count(s, slot);
    return true;
}

/* Open a file by its name and read it. @fd: its descriptor, or -1. Return: bytes read, or -errno. */
static int64_t open_read(struct dh_sampler *s, uint32_t slot, uint32_t file, char *text, size_t cap, int *fd)
{
    char path[DH_CG_PATH + 64];
    size_t skip;
    int dir = dh_cg_base_dir(s, slot, s->cgroups->file[file].hier, &skip);

    dh_cg_path(s, slot, file, path);
    s->opens++;
    *fd = openat(dir, path + skip, O_RDONLY | O_CLOEXEC);
    return *fd < 0 ? -errno : dh_fd_read(*fd, text, cap, &s->reads);
}

/*
 * Read one file of one group into its record; with @hold, its descriptor may stay open. Return: false if the
 * group is gone.
 */
bool dh_cg_file_read(struct dh_sampler *s, uint32_t slot, uint32_t file, bool hold)
{
    char text[8192]; /* fits every second of DH_GROUP_CPU_WORDS' CPUs: 4.5 KiB */
    const struct dh_cg_held *held = dh_cg_held_find(s->cgroups, slot, file);
    bool present;
    int fd;
    int64_t n;

    if (held) {
        n = dh_fd_read(held->fd, text, sizeof(text), &s->reads);
        if (n > 0 && held->digest == dh_text_digest(text, (size_t)n))
            return true;
        if (n >= 0)
            return text_store(s, slot, file, text, n);
        dh_cg_held_drop(s, slot, DH_CG_FILE_BIT(file)); /* ENODEV: another group may have its name by now */
    }
    n = open_read(s, slot, file, text, sizeof(text), &fd);
    present = text_store(s, slot, file, text, n);
    if (fd >= 0 && hold && present && n >= 0 && s->cgroups->group[slot].present & DH_CG_FILE_BIT(file))
        dh_cg_held_offer(s, slot, file, fd);
    else if (fd >= 0)
        close(fd);
    return present;
}

/* Clear what a group had in a hierarchy that it left: absent, not unreadable. */
void dh_cg_hier_clear(struct dh_sampler *s, uint32_t slot, uint8_t hier)
{
    struct dh_cgroups *c = s->cgroups;

    for (uint32_t i = 0; i < c->files; i++)
        if (c->file[i].hier == hier && (c->group[slot].present | c->group[slot].failed) & DH_CG_FILE_BIT(i))
            file_clear(s, slot, i);
    unreadable_count(s, slot);
    dh_group_mark_dirty(s, slot);
}
