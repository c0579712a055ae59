/*
 * records.c - the tables of records: written by one thread, read whole by others.
 *
 * dh_tables has three copies. `work` is what the sources write. `base` has the same layout, so a
 * counter's base for DH_WAKE_RISE stands at the counter's own offset. `pub` is what readers copy.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sampler.h"

/*
 * Kernel memory behind one watch (with the inode and dentry it pins) and one held file, measured. An
 * eventfd with what it is registered for costs as much as a watch.
 */
#define WATCH_BYTES 760
#define DESCRIPTOR_BYTES 4400

static struct dh_tables *tables_map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

/* Mapped, not allocated: a table for 4,096 groups costs memory only where groups are. */
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

/* Most counters are 0, and so are their bases: what is not written to costs no memory. */
static void base_put(uint64_t *base, uint64_t value)
{
    if (*base != value)
        *base = value;
}

/* The base of a counter that has woken: it need not again in this window, however fast it grows. */
#define SPENT UINT64_MAX

/* Store a member; true if it changed. Wakes as the field's dh_wake says. */
bool dh_set(struct dh_sampler *s, uint64_t *slot, enum dh_field field, uint64_t value)
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
            *base = value; /* it was reset: no event, but a new base */
        else if (*base != SPENT && value - *base >= w->threshold) {
            s->wake = true;
            *base = SPENT;
        }
    }
    return true;
}

/* Say whether a member that is there could be read; true if that changed. */
bool dh_valid(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field, bool ok)
{
    uint64_t bit = DH_FIELD_BIT(field);

    if (*seen & bit && ok == !!(*valid & bit))
        return false;
    *seen |= bit;
    *valid = ok ? *valid | bit : *valid & ~bit;
    dh_wake_on(s, field);
    return true;
}

/*
 * The outcome of one read of one member: its value, or err. A member that cannot be read is 0.
 * The first value of a counter is its base. True if the record changed.
 */
bool dh_reading(struct dh_sampler *s, uint64_t *valid, uint64_t *seen, enum dh_field field, uint64_t *slot,
                int err, uint64_t value)
{
    bool changed;

    if (err) {
        changed = dh_valid(s, valid, seen, field, false);
        if (changed)
            *slot = 0;
        return changed;
    }
    changed = dh_valid(s, valid, seen, field, true);
    if (!changed)
        return dh_set(s, slot, field, value);
    *slot = value;
    if (s->wakes[field].mode == DH_WAKE_RISE)
        base_put(base_of(s, slot), value);
    return true;
}

void dh_wake_on(struct dh_sampler *s, enum dh_field field)
{
    if (s->wakes[field].mode)
        s->wake = true;
}

/* Where the counters that DH_WAKE_RISE can follow stand; the fields of one table follow each other. */
static const size_t place[DH_FIELD_NUM] = {
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

/* Whether a field is a number that can grow; 0 is no place, since no record begins with one. */
bool dh_field_rises(uint32_t field)
{
    return field < DH_FIELD_NUM && place[field];
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
            base_renew(s, &t->node[i], place[field]);
    } else if (field < DH_GROUP_SET) {
        for (uint32_t i = 0; i < t->head.pools; i++)
            base_renew(s, &t->pool[i], place[field]);
    } else if (field < DH_GROUP_HT_MAX) {
        for (uint32_t i = 0; i < t->head.groups; i++)
            base_renew(s, &t->group[i], place[field]);
    } else {
        for (uint32_t i = 0; i < t->head.groups; i++)
            for (uint32_t k = 0; k < t->group[i].sizes; k++)
                base_renew(s, &t->group[i].hugetlb[k], place[field]);
    }
}

/*
 * Take the bases of DH_WAKE_RISE anew where a window has passed. Windows tumble: a burst across
 * their border is seen by the reader's own, sliding, window at its next look.
 */
void dh_bases_renew(struct dh_sampler *s)
{
    for (uint64_t m = s->rising; m; m &= m - 1) {
        uint32_t f = (uint32_t)__builtin_ctzll(m);

        if (s->now_ns - s->base_ns[f] < s->wakes[f].window_ns)
            continue;
        s->base_ns[f] = s->now_ns;
        field_renew(s, f);
    }
}

void dh_node_touch(struct dh_sampler *s, uint32_t index)
{
    s->node_dirty |= 1ull << index;
    s->dirty = true;
}

void dh_pool_touch(struct dh_sampler *s, uint32_t index)
{
    s->pool_dirty[index / 64] |= 1ull << (index % 64);
    s->dirty = true;
}

void dh_group_touch(struct dh_sampler *s, uint32_t slot)
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

/* There is more than its tables have room for. None of them ever shrinks, so it fails for good. */
void dh_source_full(struct dh_sampler *s, enum dh_source_id id, enum dh_field field)
{
    s->full |= 1u << id;
    dh_source_failed(s, id, field, DH_EFULL);
}

/* The root below which a source reads was asked for: it is there (0), does not exist (ENOENT), or fails. */
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

/* A source that begins or ceases to fail is what a rule can see. */
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

        from->group[slot].stamp = ++s->stamps;
        dh_words_store(&to->group[slot], &from->group[slot], sizeof(from->group[slot]));
        s->group_is_dirty[slot] = 0;
    }
    if (s->throttle_dirty)
        dh_words_store(to->throttle, from->throttle, from->head.throttles * sizeof(*from->throttle));
    s->throttle_dirty = false;
    s->node_dirty = 0;
    s->group_dirty_num = 0;
    from->head.kernel_bytes = (from->head.watches + s->oom_fds) * WATCH_BYTES +
                              (from->head.descriptors - s->oom_fds) * DESCRIPTOR_BYTES;
    if (s->head_dirty)
        dh_words_store(&to->head, &from->head, sizeof(from->head));
}

/*
 * Publish what became dirty. The reader is woken by dh_ring(), so that who publishes can beat before:
 * a beat is never newer than the records that it stands for. A pass that changed nothing writes a few words.
 */
void dh_publish(struct dh_sampler *s)
{
    if (s->wake) {
        s->work->head.seq++;
        s->head_dirty = s->ring = true;
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

/* Wake the reader if a rule can see what was published. */
void dh_ring(struct dh_sampler *s)
{
    uint64_t one = 1;

    if (!s->ring)
        return;
    s->ring = false;
    atomic_store_explicit(&s->live.rung_ns, dh_now_ns(), memory_order_relaxed);
    /* fails only when 2^64-2 wakes are unread, and then the reader is due to wake anyway */
    (void)!write(s->wake_fd, &one, sizeof(one));
}

uint64_t dh_sampler_rung_ns(const struct dh_sampler *s)
{
    return atomic_load_explicit(&s->live.rung_ns, memory_order_relaxed);
}

size_t dh_sampler_size(const struct dh_sampler *s)
{
    return s->table_bytes + s->opt.group_max * sizeof(uint64_t);
}

/* What changes in every pass, and needs no publication. */
struct alive {
    uint64_t beat_ns, passes, reads, opens;
    uint64_t source_beat_ns[DH_SOURCE_NUM], source_passes[DH_SOURCE_NUM];
};

/* Acquire, and before the copy: what was published before a beat is then in the copy. */
static void alive_load(struct dh_sampler *s, struct alive *a)
{
    a->beat_ns = atomic_load_explicit(&s->live.beat_ns, memory_order_acquire);
    a->passes = atomic_load_explicit(&s->live.passes, memory_order_acquire);
    a->reads = atomic_load_explicit(&s->live.reads, memory_order_relaxed);
    a->opens = atomic_load_explicit(&s->live.opens, memory_order_relaxed);
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        a->source_beat_ns[i] = atomic_load_explicit(&s->live.source_beat_ns[i], memory_order_acquire);
        a->source_passes[i] = atomic_load_explicit(&s->live.source_passes[i], memory_order_acquire);
    }
}

static void alive_put(struct dh_snapshot *head, const struct alive *a)
{
    head->beat_ns = a->beat_ns;
    head->passes = a->passes;
    head->reads = a->reads;
    head->opens = a->opens;
    for (int i = 0; i < DH_SOURCE_NUM; i++) {
        head->source[i].beat_ns = a->source_beat_ns[i];
        head->source[i].passes = a->source_passes[i];
    }
}

struct copy {
    struct dh_sampler *s;
    uint64_t since;
    char *buf;
    size_t cap;
};

/* The stamps of @n groups, and the records behind the reader's. Bytes used, or more than @cap. */
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
    struct alive alive;
    char *to;

    alive_load(c->s, &alive);
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
    alive_put(head, &alive);
    return (int64_t)used;
}

int64_t dh_sampler_read(struct dh_sampler *s, uint64_t since, void *buf, size_t cap)
{
    struct copy copy = { .s = s, .since = since, .buf = buf, .cap = cap };

    if (cap < sizeof(struct dh_snapshot))
        return -ENOSPC;
    return dh_seqlock_read(&s->pub_lock, copy_out, &copy);
}
