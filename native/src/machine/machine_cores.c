/*
 * machine_cores.c - reads each CPU's core, package, maximum and allowed frequency, and machine checks.
 *
 * Source: /sys/devices/system/cpu/{online,smt/active}, cpu<N>/topology/{core_cpus_list,physical_package_id},
 * cpu<N>/cpufreq/{cpuinfo_max_freq,scaling_max_freq}; row MCE of /proc/interrupts.
 *
 * All of it is expensive, so it is read once a minute and on rescan requests: four files per CPU at about 4
 * us each are 8 ms with 512 CPUs, and for each read of /proc/interrupts the kernel formats the whole file, 10
 * to 20 ms with 256 CPUs and 1,500 interrupts. None of the files interrupts another CPU; cpuinfo_cur_freq
 * would. On servers nearly every CPU has its own frequency policy, so reading by policy would save nothing.
 *
 * For an offline CPU the kernel shows almost nothing, and no column in /proc/interrupts. Its last values are
 * kept: it is the same CPU when it comes back.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "machine/machine.h"
#include "core/text.h"

#define CPUS "devices/system/cpu"
#define INTERRUPTS_MAX (256u << 20) /* bytes; 2,048 CPUs with 10,000 interrupts */

struct online {
    uint64_t cpus[DH_CPU_WORDS];
};

static bool has(const struct online *o, uint32_t cpu)
{
    return o->cpus[cpu / 64] >> (cpu % 64) & 1;
}

static int online_read(struct dh_machine *m, struct online *o)
{
    char text[8192]; /* as in the sampler: no machine has a longer list */
    int64_t n = dh_machine_read_text(m, DH_ROOT_SYSFS, text, sizeof(text), CPUS "/online");

    return dh_machine_to_err(n < 0 ? n : dh_text_cpus(text, (size_t)n, o->cpus));
}

static void core_insert(struct dh_machine *m, uint32_t at, uint32_t cpu)
{
    struct dh_core *core = &m->work.core[at];
    uint64_t *assumed = &m->core_assumed[at];

    memmove(core + 1, core, (m->work.head.cores - at) * sizeof(*core));
    memmove(assumed + 1, assumed, (m->work.head.cores - at) * sizeof(*assumed));
    *core = (struct dh_core){ .cpu = cpu };
    *assumed = 0;
    m->work.head.cores++; /* the table has room for every CPU that a list can contain */
    m->cores_dirty = true;
}

/* Add a record for each CPU that is or was online; records are in ascending order. */
static void cores_add(struct dh_machine *m, const struct online *o)
{
    uint32_t at = 0;

    for (uint32_t cpu = 0; cpu < DH_CORE_MAX; cpu++) {
        if (!has(o, cpu))
            continue;
        while (at < m->work.head.cores && m->work.core[at].cpu < cpu)
            at++;
        if (at == m->work.head.cores || m->work.core[at].cpu != cpu)
            core_insert(m, at, cpu);
    }
}

/* Read again whether a CPU is online; assume so if that cannot be read. */
static bool is_online(struct dh_machine *m, uint32_t cpu)
{
    struct online now;

    return online_read(m, &now) || has(&now, cpu);
}

/*
 * Store a value, but keep the last one after its CPU went offline. EBUSY is the error of cpufreq files then.
 */
static void core_store(struct dh_machine *m, struct dh_core *core, enum dh_machine_field field, uint64_t *slot,
                       int err, uint64_t value)
{
    const struct dh_machine_record r = { DH_MACHINE_CORES,
                                         &core->valid,
                                         &core->seen,
                                         &m->core_assumed[core - m->work.core],
                                         &core->err,
                                         &m->cores_dirty };
    bool was_seen = core->seen & DH_MACHINE_BIT(field);

    if (err == EBUSY || (dh_is_absence(err) && was_seen && !is_online(m, core->cpu)))
        return;
    dh_machine_store(m, &r, field, slot, err, value);
}

/* Read the lowest CPU of the core. The kernel lists online siblings only; the record keeps earlier ones. */
static void siblings_read(struct dh_machine *m, struct dh_core *core)
{
    static const char *const name[] = { "core_cpus_list", "thread_siblings_list" /* before Linux 5.3 */ };
    struct online sharing;
    uint64_t lowest = 0;
    int64_t n = -ENOENT;
    char text[256];
    int err;

    for (int i = 0; i < 2 && n == -ENOENT; i++)
        n = dh_machine_read_text(m, DH_ROOT_SYSFS, text, sizeof(text), CPUS "/cpu%u/topology/%s", core->cpu,
                                 name[i]);
    err = dh_machine_to_err(n < 0 ? n : dh_text_cpus(text, (size_t)n, sharing.cpus));
    if (!err && !has(&sharing, core->cpu))
        err = DH_EPARSE;
    while (!err && !has(&sharing, (uint32_t)lowest))
        lowest++;
    if (core->valid & DH_MACHINE_BIT(DH_CORE_CORE) && core->core < lowest)
        lowest = core->core;
    core_store(m, core, DH_CORE_CORE, &core->core, err, lowest);
}

static void package_read(struct dh_machine *m, struct dh_core *core)
{
    char text[32];
    uint64_t package = 0;
    int64_t n;
    int err;

    n = dh_machine_read_text(m, DH_ROOT_SYSFS, text, sizeof(text), CPUS "/cpu%u/topology/physical_package_id",
                             core->cpu);
    if (n == 3 && !memcmp(text, "-1\n", 3))
        n = -ENOENT; /* unknown to the firmware */
    err = dh_machine_to_err(n < 0 ? n : dh_text_u64(text, (size_t)n, &package));
    core_store(m, core, DH_CORE_PACKAGE, &core->package, err, package);
}

static void speeds_read(struct dh_machine *m, struct dh_core *core)
{
    uint64_t khz = 0;
    int err = dh_machine_read_number(m, DH_ROOT_SYSFS, &khz, CPUS "/cpu%u/cpufreq/cpuinfo_max_freq", core->cpu);

    core_store(m, core, DH_CORE_MAX_KHZ, &core->max_khz, err, khz);
    err = dh_machine_read_number(m, DH_ROOT_SYSFS, &khz, CPUS "/cpu%u/cpufreq/scaling_max_freq", core->cpu);
    core_store(m, core, DH_CORE_CAP_KHZ, &core->cap_khz, err, khz);
}

/* Read the file up to the row of machine checks, which is near the end. */
static int interrupts_stream(struct dh_machine *m, int fd)
{
    struct dh_interrupts *r = &m->interrupts;
    size_t all = 0;

    dh_interrupts_begin(r, "MCE:");
    while (all < INTERRUPTS_MAX) {
        char text[16384]; /* the kernel returns a page at a time, or a longer line in parts */
        ssize_t n = read(fd, text, sizeof(text));
        int found = n > 0 ? dh_interrupts_feed(r, text, (size_t)n) : 0;

        m->work.head.reads++;
        if (n < 0)
            return errno;
        if (n == 0) /* an empty file is a mask: container runtimes mount one over it */
            return all && dh_interrupts_end(r) ? DH_EPARSE : ENOENT;
        if (found)
            return found < 0 ? found : 0;
        all += (size_t)n;
    }
    return EFBIG;
}

static int interrupts_read(struct dh_machine *m)
{
    int fd = openat(m->root[DH_ROOT_PROCFS].fd, "interrupts", O_RDONLY | O_CLOEXEC), err;

    if (fd < 0)
        return errno;
    err = interrupts_stream(m, fd);
    close(fd);
    return err;
}

/*
 * Assign the counts: both lists are ascending. A CPU without a column is offline, or came online during the
 * reads.
 */
static void checks_read(struct dh_machine *m, const struct online *o)
{
    const struct dh_interrupts *r = &m->interrupts;
    uint32_t column = 0;
    int err = m->root[DH_ROOT_PROCFS].fd < 0 ? ENOENT : interrupts_read(m);

    if (err == DH_EPARSE)
        err = interrupts_read(m); /* a CPU may have come or gone during the read */
    for (uint32_t i = 0; i < m->work.head.cores; i++) {
        struct dh_core *core = &m->work.core[i];

        while (!err && column < r->columns && r->cpu[column] < core->cpu)
            column++;
        if (err && has(o, core->cpu))
            core_store(m, core, DH_CORE_MCE, &core->mce, err, 0);
        else if (!err && column < r->columns && r->cpu[column] == core->cpu)
            core_store(m, core, DH_CORE_MCE, &core->mce, 0, r->count[column]);
    }
}

static void smt_read(struct dh_machine *m)
{
    const struct dh_machine_record head = dh_machine_head_record(m, DH_MACHINE_CORES);
    uint64_t active = 0;
    int err = dh_machine_read_number(m, DH_ROOT_SYSFS, &active, CPUS "/smt/active");

    dh_machine_store(m, &head, DH_SMT_ACTIVE, &m->work.head.smt_active, err, active);
}

void dh_machine_cores_pass(struct dh_machine *m)
{
    struct online online = { { 0 } };
    uint64_t seen, unreadable;
    int err = online_read(m, &online);

    smt_read(m);
    seen = m->work.head.seen & DH_MACHINE_BIT(DH_SMT_ACTIVE);
    unreadable = seen & ~m->work.head.valid;
    if (!err) {
        cores_add(m, &online);
    } else if (!dh_is_absence(err) || m->work.head.cores) {
        dh_machine_failed(m, DH_MACHINE_CORES, DH_CORE_LIST, err); /* the last values are kept */
        unreadable = 1;
    }
    for (uint32_t i = 0; i < m->work.head.cores; i++) {
        struct dh_core *core = &m->work.core[i];

        if (!has(&online, core->cpu))
            continue;
        siblings_read(m, core);
        package_read(m, core);
        speeds_read(m, core);
    }
    if (!err)
        checks_read(m, &online);
    for (uint32_t i = 0; i < m->work.head.cores; i++) {
        seen |= m->work.core[i].seen;
        unreadable |= m->work.core[i].seen & ~m->work.core[i].valid;
    }
    dh_machine_state(m, DH_MACHINE_CORES, seen, unreadable);
}
