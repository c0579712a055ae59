/*
 * machine_records.c - the records of the machine: written by its thread, copied by others; and which changes
 * wake the reader.
 */
#include <errno.h>

#include "core/durations.h"
#include "machine/machine.h"

/*
 * The fields: their names in the kernel, and when a new value wakes the reader. Errors come in bursts: the
 * first wakes at once, later ones at most once per slow_ns. A change of validity always wakes at once.
 */
enum { WAKE_NEVER, WAKE_AT_ONCE, WAKE_RATE_LIMITED };
static const struct {
    const char *name;
    int wake;
} fields[DH_MACHINE_FIELD_NUM] = {
    [DH_DIMM_CE] = { "ce_count", WAKE_RATE_LIMITED },
    [DH_DIMM_UE] = { "ue_count", WAKE_AT_ONCE },
    [DH_NUMA_TOTAL] = { "node meminfo MemTotal", WAKE_NEVER },
    [DH_NUMA_POISONED] = { "memory_failure/total", WAKE_AT_ONCE },
    [DH_NUMA_BLOCKS] = { "memory block state", WAKE_AT_ONCE },
    [DH_CORE_CORE] = { "core_cpus_list", WAKE_AT_ONCE },
    [DH_CORE_PACKAGE] = { "physical_package_id", WAKE_AT_ONCE },
    [DH_CORE_MAX_KHZ] = { "cpuinfo_max_freq", WAKE_RATE_LIMITED },
    [DH_CORE_CAP_KHZ] = { "scaling_max_freq", WAKE_RATE_LIMITED },
    [DH_CORE_MCE] = { "interrupts MCE", WAKE_RATE_LIMITED },
    [DH_NODES_ONLINE] = { "node/online", WAKE_AT_ONCE },
    [DH_NODES_MEMORY] = { "node/has_memory", WAKE_AT_ONCE },
    [DH_MEM_CORRUPTED] = { "meminfo HardwareCorrupted", WAKE_AT_ONCE },
    [DH_SURPLUS_FAILED] = { "vmstat htlb_buddy_alloc_fail", WAKE_RATE_LIMITED },
    [DH_SMT_ACTIVE] = { "smt/active", WAKE_AT_ONCE },
    [DH_PSI_CPU] = { "pressure/cpu", WAKE_NEVER },
    [DH_PSI_MEMORY] = { "pressure/memory", WAKE_NEVER },
    [DH_PSI_IO] = { "pressure/io", WAKE_NEVER },
    [DH_EDAC_LIST] = { "edac/mc", WAKE_NEVER },
    [DH_CORE_LIST] = { "cpu/online", WAKE_NEVER },
    [DH_MACHINE_SYSFS] = { "sysfs root", WAKE_NEVER },
    [DH_MACHINE_PROCFS] = { "procfs root", WAKE_NEVER },
};

/* Bit per root that a source needs. */
static const uint32_t source_roots[DH_MACHINE_SOURCE_NUM] = {
    [DH_MACHINE_EDAC] = 1 << DH_ROOT_SYSFS,
    [DH_MACHINE_MEMORY] = 1 << DH_ROOT_SYSFS | 1 << DH_ROOT_PROCFS,
    [DH_MACHINE_CORES] = 1 << DH_ROOT_SYSFS | 1 << DH_ROOT_PROCFS,
    [DH_MACHINE_PRESSURE] = 1 << DH_ROOT_PROCFS,
};

const char *dh_machine_field_name(uint32_t field)
{
    return field < DH_MACHINE_FIELD_NUM ? fields[field].name : NULL;
}

struct dh_machine_record dh_machine_head_record(struct dh_machine *m, enum dh_machine_source source)
{
    struct dh_machine_head *head = &m->work.head;

    return (struct dh_machine_record){ source, &head->valid, &head->seen, &m->head_assumed, &head->err, NULL };
}

void dh_machine_failed(struct dh_machine *m, enum dh_machine_source source, enum dh_machine_field field,
                       int err)
{
    struct dh_source *src = &m->work.head.source[source];

    src->failures++;
    src->err = err;
    src->err_field = (uint32_t)field;
    if (dh_is_own_failure(err))
        m->settle_passes = RESCAN_PASSES + 1;
}

void dh_machine_full(struct dh_machine *m, enum dh_machine_source source, enum dh_machine_field field)
{
    if (!(m->full & 1u << source))
        dh_machine_failed(m, source, field, DH_EFULL);
    m->full |= 1u << source;
}

/* Return whether slow_ns has passed since the reader was last woken for a field. */
static bool may_notify(const struct dh_machine *m, uint32_t field)
{
    return !m->notified_ns[field] || m->now_ns - m->notified_ns[field] >= m->opt.slow_ns;
}

static void wake_rate_limited(struct dh_machine *m, uint32_t field)
{
    if (may_notify(m, field)) {
        m->notified_ns[field] = m->now_ns;
        m->deferred &= ~DH_MACHINE_BIT(field);
        m->wake = true;
    } else {
        m->deferred |= DH_MACHINE_BIT(field);
    }
}

void dh_machine_wake_deferred(struct dh_machine *m)
{
    for (uint64_t deferred = m->deferred; deferred; deferred &= deferred - 1)
        wake_rate_limited(m, (uint32_t)__builtin_ctzll(deferred));
}

/* Store that a member does not exist after all, though it was assumed to. */
static bool store_absence(struct dh_machine *m, const struct dh_machine_record *r, uint64_t bit)
{
    *r->assumed &= ~bit;
    *r->seen &= ~bit;
    if (r->dirty)
        *r->dirty = true;
    m->wake = true;
    return true;
}

static bool store_failure(struct dh_machine *m, const struct dh_machine_record *r, enum dh_machine_field field,
                          uint64_t *slot, int err)
{
    uint64_t bit = DH_MACHINE_BIT(field);
    bool changed = *r->valid & bit || !(*r->seen & bit);

    if (dh_is_absence(err) && *r->assumed & bit)
        return store_absence(m, r, bit);
    if (dh_is_absence(err) && !(*r->seen & bit))
        return false;
    if (!dh_is_own_failure(err))
        *r->assumed &= ~bit;
    else if (!(*r->seen & bit))
        *r->assumed |= bit;
    dh_machine_failed(m, r->source, field, err);
    if (r->dirty)
        *r->dirty |= changed || *r->err != err;
    *r->err = err;
    *r->seen |= bit;
    *r->valid &= ~bit;
    *slot = 0;
    m->wake |= changed;
    return changed;
}

bool dh_machine_store(struct dh_machine *m, const struct dh_machine_record *r, enum dh_machine_field field,
                      uint64_t *slot, int err, uint64_t value)
{
    uint64_t bit = DH_MACHINE_BIT(field);
    bool was_valid = *r->valid & bit;

    if (err)
        return store_failure(m, r, field, slot, err);
    if (was_valid && *slot == value)
        return false;
    *slot = value;
    *r->seen |= bit;
    *r->valid |= bit;
    *r->assumed &= ~bit;
    if (r->dirty)
        *r->dirty = true;
    if (!was_valid || fields[field].wake == WAKE_AT_ONCE)
        m->wake = true;
    else if (fields[field].wake == WAKE_RATE_LIMITED)
        wake_rate_limited(m, (uint32_t)field);
    return true;
}

void dh_machine_state(struct dh_machine *m, enum dh_machine_source source, uint64_t seen, uint64_t unreadable)
{
    struct dh_source *src = &m->work.head.source[source];
    enum dh_source_state state = seen ? DH_STATE_OK : DH_STATE_ABSENT;
    enum dh_machine_field field = DH_MACHINE_FIELD_NUM;
    int err = dh_machine_root_err(m, source_roots[source], &field);

    if (err && err != ENOENT)
        dh_machine_failed(m, source, field, err);
    if (unreadable || m->full & 1u << source || (err && err != ENOENT))
        state = DH_STATE_FAILING;
    if (state == DH_STATE_ABSENT && err) { /* no failure, but the reason of the absence */
        src->err = err;
        src->err_field = (uint32_t)field;
    } else if (state != DH_STATE_FAILING && src->err == ENOENT && src->err_field >= DH_MACHINE_SYSFS) {
        src->err = 0; /* the root exists now */
        src->err_field = 0;
    }
    m->wake |= src->state != (uint32_t)state;
    src->state = (uint32_t)state;
}

void dh_machine_publish(struct dh_machine *m)
{
    struct dh_machine_tables *from = &m->work, *to = &m->pub;

    if (m->wake && !m->first) { /* the first pass wakes the reader once, at its end */
        from->head.wakes++;
        m->notify_due = true;
        m->wake = false;
    }
    dh_seqlock_begin(&m->pub_lock);
    if (m->dimms_dirty)
        dh_words_store(to->dimm, from->dimm, from->head.dimms * sizeof(*from->dimm));
    if (m->numas_dirty)
        dh_words_store(to->numa, from->numa, from->head.numas * sizeof(*from->numa));
    if (m->cores_dirty)
        dh_words_store(to->core, from->core, from->head.cores * sizeof(*from->core));
    dh_words_store(&to->head, &from->head, sizeof(from->head));
    dh_seqlock_end(&m->pub_lock);
    m->dimms_dirty = m->numas_dirty = m->cores_dirty = false;
}

void dh_machine_notify(struct dh_machine *m)
{
    if (!m->notify_due)
        return;
    m->notify_due = false;
    dh_eventfd_notify(m->wake_fd);
}

struct copy {
    struct dh_machine *m;
    char *buf;
    size_t cap;
};

static int64_t copy_out(void *arg)
{
    const struct copy *c = arg;
    struct dh_machine_head *head = (struct dh_machine_head *)(void *)c->buf;
    struct dh_machine_tables *pub = &c->m->pub;
    char *to = c->buf + sizeof(*head);
    size_t dimms, numas, cores;

    dh_words_load(head, &pub->head, sizeof(*head));
    if (head->dimms > DH_DIMM_MAX || head->numas > DH_NODE_MAX || head->cores > DH_CORE_MAX)
        return DH_ETORN;
    dimms = head->dimms * sizeof(struct dh_dimm);
    numas = head->numas * sizeof(struct dh_numa);
    cores = head->cores * sizeof(struct dh_core);
    if (sizeof(*head) + dimms + numas + cores > c->cap)
        return -ENOSPC;
    dh_words_load(to, pub->dimm, dimms);
    dh_words_load(to + dimms, pub->numa, numas);
    dh_words_load(to + dimms + numas, pub->core, cores);
    return (int64_t)(sizeof(*head) + dimms + numas + cores);
}

void dh_machine_durations(const struct dh_machine *m, struct dh_durations *out)
{
    for (int i = 0; i < DH_MACHINE_SOURCE_NUM; i++)
        out[i] = dh_durations_read(&m->durations[i]);
}

size_t dh_machine_size(const struct dh_machine *m)
{
    return sizeof(m->pub);
}

int64_t dh_machine_read(struct dh_machine *m, void *buf, size_t cap)
{
    struct copy copy = { .m = m, .buf = buf, .cap = cap };

    if (cap < sizeof(struct dh_machine_head))
        return -ENOSPC;
    return dh_seqlock_read(&m->pub_lock, copy_out, &copy);
}
