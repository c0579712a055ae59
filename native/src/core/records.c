/*
 * records.c - the tables of records: written by one thread, copied by others.
 *
 * There are three dh_tables. The sources write `work`. `base` has the same layout: the base of a DH_WAKE_RISE
 * counter is at the counter's own offset. Readers copy `pub`.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "core/durations.h"
#include "core/sampler.h"

/*
 * Measured kernel memory behind one watch, with the inode and dentry that it pins. An eventfd with its
 * registrations costs as much.
 */
#define WATCH_BYTES 760

static struct dh_tables *tables_map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

/* Map the tables: a mapped table for 4,096 groups costs memory only for groups that exist. */
int dh_tables_map(struct dh_sampler *s)
{
    s->table_bytes = sizeof(struct dh_tables) + s->opt.group_max * sizeof(struct dh_group);
    s->work = tables_map(s->table_bytes);
    s->base = tables_map(s->table_bytes);
    s->pub = tables_map(s->table_bytes);
    return s->work && s->base && s->pub ? 0 : -ENOMEM;
}

void dh_tables_unmap(struct dh_sampler *s)
{
    struct dh_tables *all[] = { s->work, s->base, s->pub };

    for (size_t i = 0; i < 3; i++)
        if (all[i])
            munmap(all[i], s->table_bytes);
}

static uint64_t *base_of(struct dh_sampler *s, const uint64_t *slot)
{
    return (uint64_t *)((char *)s->base + ((const char *)slot - (const char *)s->work));
}

/* Most counters and their bases are 0: pages that are never written cost no memory. */
static void base_put(uint64_t *base, uint64_t value)
{
    if (*base != value)
        *base = value;
}

/* The base of a counter that has woken the reader in this window: it does so only once per window. */
#define SPENT UINT64_MAX

/* Store a member, and wake the reader as the field's dh_wake demands. Return: whether the member changed. */
bool dh_store(struct dh_sampler *s, uint64_t *slot, enum dh_field field, uint64_t value)
{
    const struct dh_wake *w = &s->wakes[field];
    bool fell = value < *slot;

    if (*slot == value)
        return false;
    *slot = value;
    if (w->mode == DH_WAKE_CHANGE) {
        s->wake = true;
    } else if (w->mode == DH_WAKE_RISE) {
        uint64_t *base = base_of(s, slot);

        if (fell)
            *base = value; /* the counter was reset: no event, but a new base */
        else if (*base != SPENT && value - *base >= w->threshold) {
            s->wake = true;
            *base = SPENT;
        }
    }
    return true;
}

/* Store whether an existing member could be read. Return: whether that changed. */
bool dh_store_validity(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field, bool ok)
{
    uint64_t bit = DH_FIELD_BIT(field);

    if (*seen & bit && ok == !!(*valid & bit))
        return false;
    *seen |= bit;
    *valid = ok ? *valid | bit : *valid & ~bit;
    dh_wake_if_watched(s, field);
    return true;
}

/* Store that a member does not exist after all. Return: whether that changed. */
bool dh_store_absence(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field)
{
    uint64_t bit = DH_FIELD_BIT(field);

    if (!(*seen & bit))
        return false;
    *seen &= ~bit;
    *valid &= ~bit;
    dh_wake_if_watched(s, field);
    return true;
}

/*
 * Store the outcome of reading one member: its value, or @err. A member that cannot be read is 0. The first
 * value of a counter becomes its base. Return: whether the record changed.
 */
bool dh_store_reading(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field,
                      uint64_t *slot, int err, uint64_t value)
{
    bool changed;

    if (err) {
        changed = dh_store_validity(s, valid, seen, field, false);
        if (changed)
            *slot = 0;
        return changed;
    }
    changed = dh_store_validity(s, valid, seen, field, true);
    if (!changed)
        return dh_store(s, slot, field, value);
    *slot = value;
    if (s->wakes[field].mode == DH_WAKE_RISE)
        base_put(base_of(s, slot), value);
    return true;
}

void dh_wake_if_watched(struct dh_sampler *s, enum dh_field field)
{
    if (s->wakes[field].mode)
        s->wake = true;
}

/* Offsets of the counters that DH_WAKE_RISE supports; the fields of one table are consecutive. */
static const size_t counter_offset[DH_FIELD_NUM] = {
    [DH_NODE_THROTTLE_CORE] = offsetof(struct dh_node, throttle_core),
    [DH_NODE_THROTTLE_PACKAGE] = offsetof(struct dh_node, throttle_package),
    [DH_POOL_NR] = offsetof(struct dh_pool, nr),
    [DH_POOL_FREE] = offsetof(struct dh_pool, free),
    [DH_POOL_RESERVED] = offsetof(struct dh_pool, reserved),
    [DH_POOL_SURPLUS] = offsetof(struct dh_pool, surplus),
    [DH_POOL_OVERCOMMIT] = offsetof(struct dh_pool, overcommit),
    [DH_GROUP_POPULATED] = offsetof(struct dh_group, populated),
    [DH_GROUP_FROZEN] = offsetof(struct dh_group, frozen),
    [DH_GROUP_MEM_HIGH] = offsetof(struct dh_group, mem_high),
    [DH_GROUP_MEM_MAX] = offsetof(struct dh_group, mem_max),
    [DH_GROUP_MEM_OOM] = offsetof(struct dh_group, mem_oom),
    [DH_GROUP_MEM_OOM_KILL] = offsetof(struct dh_group, mem_oom_kill),
    [DH_GROUP_MEM_FAILCNT] = offsetof(struct dh_group, mem_failcnt),
    [DH_GROUP_CPU_PERIODS] = offsetof(struct dh_group, cpu_periods),
    [DH_GROUP_CPU_THROTTLED] = offsetof(struct dh_group, cpu_throttled),
    [DH_GROUP_HT_MAX] = offsetof(struct dh_hugetlb, max),
    [DH_GROUP_HT_RSVD_MAX] = offsetof(struct dh_hugetlb, rsvd_max),
    [DH_GROUP_HT_EVENTS] = offsetof(struct dh_hugetlb, events),
    [DH_GROUP_HT_RSVD_FAILED] = offsetof(struct dh_hugetlb, rsvd_failed),
};

/* Return whether a field is a number that can grow. Offset 0 marks other fields: no record begins with one. */
bool dh_field_rises(uint32_t field)
{
    return field < DH_FIELD_NUM && counter_offset[field];
}

static void base_renew(struct dh_sampler *s, const void *record, size_t offset)
{
    const uint64_t *slot = (const uint64_t *)(const void *)((const char *)record + offset);

    base_put(base_of(s, slot), *slot);
}

static void field_renew(struct dh_sampler *s, uint32_t field)
{
    const struct dh_tables *t = s->work;

    if (field < DH_POOL_NR) {
        for (uint32_t i = 0; i < t->head.nodes; i++)
            base_renew(s, &t->node[i], counter_offset[field]);
    } else if (field < DH_GROUP_SET) {
        for (uint32_t i = 0; i < t->head.pools; i++)
            base_renew(s, &t->pool[i], counter_offset[field]);
    } else if (field < DH_GROUP_HT_MAX) {
        for (uint32_t i = 0; i < t->head.groups; i++)
            base_renew(s, &t->group[i], counter_offset[field]);
    } else {
        for (uint32_t i = 0; i < t->head.groups; i++)
            for (uint32_t k = 0; k < t->group[i].sizes; k++)
                base_renew(s, &t->group[i].hugetlb[k], counter_offset[field]);
    }
}

/*
 * Take new bases for DH_WAKE_RISE fields whose window has ended. Windows are consecutive: a burst across a
 * border is found by the reader's own sliding window at its next evaluation.
 */
void dh_rise_bases_renew(struct dh_sampler *s)
{
    for (uint64_t m = s->rising; m; m &= m - 1) {
        uint32_t f = (uint32_t)__builtin_ctzll(m);

        if (s->now_ns - s->base_ns[f] < s->wakes[f].window_ns)
            continue;
        s->base_ns[f] = s->now_ns;
        field_renew(s, f);
    }
}

void dh_node_mark_dirty(struct dh_sampler *s, uint32_t index)
{
    s->node_dirty |= 1ull << index;
    s->dirty = true;
}

void dh_pool_mark_dirty(struct dh_sampler *s, uint32_t index)
{
    s->pool_dirty[index / 64] |= 1ull << (index % 64);
    s->dirty = s->pools_changed = true;
}

void dh_group_mark_dirty(struct dh_sampler *s, uint32_t slot)
{
    s->dirty = true;
    if (s->group_is_dirty[slot])
        return;
    s->group_is_dirty[slot] = 1;
    s->group_dirty[s->group_dirty_num++] = slot;
}

void dh_source_failed(struct dh_sampler *s, enum dh_source_id id, enum dh_field field, int err)
{
    struct dh_source *src = &s->work->head.source[id];

    src->failures++;
    src->err = err;
    src->err_field = (uint32_t)field;
    s->head_dirty = true;
}

/* A table has no room for all that was found. Tables never shrink, so the source fails permanently. */
void dh_source_full(struct dh_sampler *s, enum dh_source_id id, enum dh_field field)
{
    s->full |= 1u << id;
    dh_source_failed(s, id, field, DH_EFULL);
}

/* Note the result of opening a source's root: it exists (0), does not exist (ENOENT), or fails. */
void dh_source_root(struct dh_sampler *s, enum dh_source_id id, enum dh_field root, int err)
{
    struct dh_source *src = &s->work->head.source[id];

    if (err && err != ENOENT) {
        dh_source_failed(s, id, root, err);
    } else if (err ? src->err != err : src->err_field == (uint32_t)root && src->err == ENOENT) {
        src->err = err;
        src->err_field = err ? (uint32_t)root : 0;
        s->head_dirty = true;
    }
}

/* Set the state of a source. A change wakes the reader. */
void dh_source_state(struct dh_sampler *s, enum dh_source_id id, enum dh_source_state state)
{
    struct dh_source *src = &s->work->head.source[id];

    if (state == DH_STATE_OK && s->full & 1u << id)
        state = DH_STATE_FAILING;
    if (src->state == (uint32_t)state)
        return;
    src->state = (uint32_t)state;
    s->head_dirty = true;
    s->wake = true;
}

static void publish_dirty(struct dh_sampler *s)
{
    struct dh_tables *from = s->work, *to = s->pub;

    for (uint64_t m = s->node_dirty; m; m &= m - 1) {
        int i = __builtin_ctzll(m);

        dh_words_store(&to->node[i], &from->node[i], sizeof(from->node[i]));
    }
    for (uint32_t word = 0; word < sizeof(s->pool_dirty) / 8; word++) {
        for (uint64_t m = s->pool_dirty[word]; m; m &= m - 1) {
            uint32_t i = word * 64 + (uint32_t)__builtin_ctzll(m);

            dh_words_store(&to->pool[i], &from->pool[i], sizeof(from->pool[i]));
        }
        s->pool_dirty[word] = 0;
    }
    for (uint32_t k = 0; k < s->group_dirty_num; k++) {
        uint32_t slot = s->group_dirty[k];

        from->group[slot].stamp = ++s->last_stamp;
        dh_words_store(&to->group[slot], &from->group[slot], sizeof(from->group[slot]));
        s->group_is_dirty[slot] = 0;
    }
    if (s->throttle_dirty)
        dh_words_store(to->throttle, from->throttle, from->head.throttles * sizeof(*from->throttle));
    s->throttle_dirty = false;
    s->node_dirty = 0;
    s->group_dirty_num = 0;
    from->head.kernel_bytes = (from->head.watches + s->oom_fds) * WATCH_BYTES +
                              (from->head.descriptors - s->oom_fds) * dh_open_file_bytes();
    if (s->head_dirty)
        dh_words_store(&to->head, &from->head, sizeof(from->head));
}

/*
 * Publish records that changed. dh_sampler_notify() wakes the reader later, so that the heartbeat can be set
 * in between: a heartbeat is never newer than the records that it stands for. A pass without changes writes a
 * few machine words.
 */
void dh_sampler_publish(struct dh_sampler *s)
{
    if (s->wake) {
        s->work->head.seq++;
        s->head_dirty = s->notify_due = true;
        s->wake = false;
    }
    if (s->dirty || s->head_dirty) {
        dh_seqlock_begin(&s->pub_lock);
        publish_dirty(s);
        dh_seqlock_end(&s->pub_lock);
    }
    s->dirty = s->head_dirty = false;
    atomic_store_explicit(&s->live.reads, s->reads, memory_order_relaxed);
    atomic_store_explicit(&s->live.opens, s->opens, memory_order_relaxed);
}

/* Wake the reader if the publication contains a change that wakes it. */
void dh_sampler_notify(struct dh_sampler *s)
{
    if (!s->notify_due)
        return;
    s->notify_due = false;
    atomic_store_explicit(&s->live.notified_ns, dh_now_ns(), memory_order_relaxed);
    dh_eventfd_notify(s->wake_fd);
}

uint64_t dh_sampler_notified_ns(const struct dh_sampler *s)
{
    return atomic_load_explicit(&s->live.notified_ns, memory_order_relaxed);
}

void dh_sampler_durations(const struct dh_sampler *s, struct dh_durations *out)
{
    for (int i = 0; i < DH_SOURCE_NUM; i++)
        out[i] = dh_durations_read(&s->durations[i]);
}

size_t dh_sampler_size(const struct dh_sampler *s)
{
    return s->table_bytes + s->opt.group_max * sizeof(uint64_t);
}

/* Counters that change in every pass and need no publication. */
struct progress {
    uint64_t heartbeat_ns, passes, reads, opens;
    uint64_t source_heartbeat_ns[DH_SOURCE_NUM], source_passes[DH_SOURCE_NUM];
};

/* Acquire, and before the copy: what was published before a heartbeat is then in the copy. */
static void progress_load(struct dh_sampler *s, struct progress *a)
{
    a->heartbeat_ns = atomic_load_explicit(&s->live.heartbeat_ns, memory_order_acquire);
    a->passes = atomic_load_explicit(&s->live.passes, memory_order_acquire);
    a->reads = atomic_load_explicit(&s->live.reads, memory_order_relaxed);
    a->opens = atomic_load_explicit(&s->live.opens, memory_order_relaxed);
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        a->source_heartbeat_ns[i] = atomic_load_explicit(&s->live.source_heartbeat_ns[i], memory_order_acquire);
        a->source_passes[i] = atomic_load_explicit(&s->live.source_passes[i], memory_order_acquire);
    }
}

static void progress_put(struct dh_snapshot *head, const struct progress *a)
{
    head->heartbeat_ns = a->heartbeat_ns;
    head->passes = a->passes;
    head->reads = a->reads;
    head->opens = a->opens;
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        head->source[i].heartbeat_ns = a->source_heartbeat_ns[i];
        head->source[i].passes = a->source_passes[i];
    }
}

struct copy {
    struct dh_sampler *s;
    uint64_t since;
    char *buf;
    size_t cap;
};

/*
 * Copy the stamps of @n groups, and the records that the reader lacks. Return: bytes needed, which may exceed
 * @cap.
 */
static size_t groups_copy(const struct copy *c, char *to, size_t cap, uint32_t n)
{
    struct dh_group *group = c->s->pub->group;
    uint64_t *stamp = (uint64_t *)(void *)to;
    size_t used = n * sizeof(*stamp);

    for (uint32_t i = 0; used <= cap && i < n; i++) {
        dh_words_load(&stamp[i], &group[i].stamp, sizeof(*stamp));
        if (stamp[i] <= c->since)
            continue;
        if (used + sizeof(*group) <= cap)
            dh_words_load(to + used, &group[i], sizeof(*group));
        used += sizeof(*group);
    }
    return used;
}

static int64_t copy_out(void *arg)
{
    const struct copy *c = arg;
    struct dh_snapshot *head = (struct dh_snapshot *)(void *)c->buf;
    struct dh_tables *pub = c->s->pub;
    size_t nodes, throttles, pools, used;
    struct progress progress;
    char *to;

    progress_load(c->s, &progress);
    dh_words_load(head, &pub->head, sizeof(*head));
    if (head->nodes > DH_NODE_MAX || head->throttles > DH_CORE_MAX || head->pools > DH_POOL_MAX ||
        head->groups > c->s->opt.group_max)
        return DH_ETORN;
    nodes = head->nodes * sizeof(struct dh_node);
    throttles = head->throttles * sizeof(struct dh_throttle);
    pools = head->pools * sizeof(struct dh_pool);
    used = sizeof(*head) + nodes + throttles + pools;
    if (used > c->cap)
        return -ENOSPC;
    to = c->buf + sizeof(*head);
    dh_words_load(to, pub->node, nodes);
    dh_words_load(to + nodes, pub->throttle, throttles);
    dh_words_load(to + nodes + throttles, pub->pool, pools);
    used += groups_copy(c, c->buf + used, c->cap - used, head->groups);
    if (used > c->cap)
        return -ENOSPC;
    progress_put(head, &progress);
    return (int64_t)used;
}

int64_t dh_sampler_read(struct dh_sampler *s, uint64_t since, void *buf, size_t cap)
{
    struct copy copy = { .s = s, .since = since, .buf = buf, .cap = cap };

    if (cap < sizeof(struct dh_snapshot))
        return -ENOSPC;
    return dh_seqlock_read(&s->pub_lock, copy_out, &copy);
}
