/*
 * throttle.c - counts how often CPUs were slowed down because they or their package were too hot.
 *
 * Source: /sys/devices/system/cpu/cpu<N>/thermal_throttle/{core,package}_throttle_count [events], x86 only
 * and absent in most virtual machines.
 *
 * A CPU's counters restart when it comes online, so the growth since the sampler's start is published. All
 * CPUs of a package count the same package events, so the largest count is published.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/sampler.h"
#include "core/text.h"

/* Two files per CPU, so they are read once a second at most. */
#define THROTTLE_PERIOD_NS DH_NS

static const char *const counter_file[2] = { "core_throttle_count", "package_throttle_count" };
static const enum dh_field field[2] = { DH_NODE_THROTTLE_CORE, DH_NODE_THROTTLE_PACKAGE };

static bool has_bit(const uint64_t *words, uint32_t bit)
{
    return words[bit / 64] >> (bit % 64) & 1;
}

static void cpus_grow(struct dh_sampler *s)
{
    const uint64_t *online = s->work->head.cpu_online;
    struct dh_cpu_throttle *table;
    uint32_t cpus = 0;

    for (uint32_t word = 0; word < DH_CPU_WORDS; word++)
        if (online[word])
            cpus = word * 64 + 64 - (uint32_t)__builtin_clzll(online[word]);
    if (cpus <= s->throttle_cpus)
        return;
    table = realloc(s->throttle, cpus * sizeof(*table));
    if (!table)
        return; /* CPUs with an entry are read; the growth is retried later */
    memset(table + s->throttle_cpus, 0, (cpus - s->throttle_cpus) * sizeof(*table));
    s->throttle = table;
    s->throttle_cpus = cpus;
}

/* Read one counter of one online CPU. Return: 0, or why an existing counter cannot be read. */
static int counter_read(struct dh_sampler *s, uint32_t cpu, int level)
{
    struct dh_cpu_throttle *t = &s->throttle[cpu];
    char path[96], text[32];
    uint64_t value;
    int64_t n;

    if (!t->has[level] && !t->err[level] && !s->probe_absent)
        return 0;
    snprintf(path, sizeof(path), "devices/system/cpu/cpu%u/thermal_throttle/%s", cpu, counter_file[level]);
    n = dh_sampler_read_file(s, s->sysfs_fd, path, text, sizeof(text));
    if ((n == -ENOENT || n == -ENODEV) && t->known[level]) {
        t->known[level] = false; /* the CPU may be going offline: only the next failure counts */
        return 0;
    }
    if (n >= 0 && dh_text_u64(text, (size_t)n, &value))
        n = DH_EPARSE;
    if (n < 0 && !t->has[level] && dh_is_absence((int)-n))
        return 0;
    if (n < 0 && !t->has[level] && dh_is_own_failure((int)-n))
        return (int)-n;
    t->has[level] = true;
    if (n < 0)
        return n == DH_EPARSE ? DH_EPARSE : (int)-n;
    if (t->known[level] && value > t->last[level])
        t->grown[level] += value - t->last[level];
    t->last[level] = value;
    t->known[level] = true;
    return 0;
}

/*
 * Return the error of a counter without a read of its file. A CPU that is offline has none. If the set of
 * online CPUs cannot be read, the counter is unreadable, and keeps its last value for the growth until then.
 */
static int counter_skip(struct dh_sampler *s, uint32_t cpu, int level)
{
    struct dh_cpu_throttle *t = &s->throttle[cpu];

    if (s->work->head.cpu_seen & ~s->work->head.cpu_valid & DH_FIELD_BIT(DH_CPU_ONLINE))
        return t->has[level] ? s->online.err : 0;
    t->known[level] = false;
    return 0;
}

/* Read the counters of a node's CPUs. Return: whether each could be read. */
static bool node_pass(struct dh_sampler *s, struct dh_node *node)
{
    uint64_t total[2] = { 0, 0 };
    bool any[2] = { false, false }, changed = false;
    int err[2] = { 0, 0 };

    for (uint32_t cpu = 0; cpu < s->throttle_cpus; cpu++) {
        struct dh_cpu_throttle *t = &s->throttle[cpu];

        if (!has_bit(node->cpus, cpu))
            continue;
        for (int level = 0; level < 2; level++) {
            t->err[level] = has_bit(s->work->head.cpu_online, cpu) ? counter_read(s, cpu, level)
                                                                   : counter_skip(s, cpu, level);
            if (t->err[level]) {
                err[level] = t->err[level];
                dh_source_failed(s, DH_SOURCE_THROTTLE, field[level], err[level]);
            }
            any[level] |= t->has[level];
        }
        total[0] += t->grown[0];
        total[1] = t->grown[1] > total[1] ? t->grown[1] : total[1];
    }
    if ((err[0] || err[1]) && node->err != (err[0] ? err[0] : err[1])) {
        node->err = err[0] ? err[0] : err[1];
        changed = true;
    }
    if (any[0])
        changed |= dh_store_reading(s, &node->valid, &node->seen, field[0], &node->throttle_core, err[0],
                                    total[0]);
    if (any[1])
        changed |= dh_store_reading(s, &node->valid, &node->seen, field[1], &node->throttle_package, err[1],
                                    total[1]);
    if (changed)
        dh_node_mark_dirty(s, (uint32_t)(node - s->work->node));
    return !err[0] && !err[1];
}

static struct dh_throttle cpu_record(const struct dh_cpu_throttle *from, uint32_t cpu)
{
    const bool ok[2] = { from->has[0] && !from->err[0], from->has[1] && !from->err[1] };
    struct dh_throttle to = { .cpu = cpu, .err = from->err[0] ? from->err[0] : from->err[1] };

    for (int level = 0; level < 2; level++) {
        to.seen |= from->has[level] ? DH_FIELD_BIT(field[level]) : 0;
        to.valid |= ok[level] ? DH_FIELD_BIT(field[level]) : 0;
    }
    to.core = ok[0] ? from->grown[0] : 0;
    to.package = ok[1] ? from->grown[1] : 0;
    return to;
}

/*
 * Publish the counters of each CPU, because a device may consist of some of a node's CPUs. That wakes no
 * reader by itself: the node's counters grow whenever those of a CPU do.
 */
static void cpus_publish(struct dh_sampler *s)
{
    struct dh_tables *t = s->work;
    uint32_t n = 0;

    for (uint32_t cpu = 0; cpu < s->throttle_cpus; cpu++) {
        struct dh_throttle now;

        if (!s->throttle[cpu].has[0] && !s->throttle[cpu].has[1])
            continue;
        now = cpu_record(&s->throttle[cpu], cpu);
        if (n >= t->head.throttles || memcmp(&t->throttle[n], &now, sizeof(now))) {
            t->throttle[n] = now;
            s->throttle_dirty = s->dirty = true;
        }
        n++;
    }
    if (t->head.throttles != n) {
        t->head.throttles = n;
        s->head_dirty = true;
    }
}

bool dh_throttle_pass(struct dh_sampler *s)
{
    const uint64_t counters = DH_FIELD_BIT(DH_NODE_THROTTLE_CORE) | DH_FIELD_BIT(DH_NODE_THROTTLE_PACKAGE);
    struct dh_tables *t = s->work;
    uint64_t seen = 0, unreadable = 0;
    bool failed = false;

    if (s->sysfs_fd < 0)
        return true;
    if (!s->probe_absent && !dh_sampler_is_due(s, s->throttle_ns, THROTTLE_PERIOD_NS))
        return false;
    s->throttle_ns = s->now_ns;
    if (s->probe_absent)
        cpus_grow(s);
    for (uint32_t i = 0; i < t->head.nodes; i++) {
        failed |= !node_pass(s, &t->node[i]);
        seen |= t->node[i].seen & counters;
        unreadable |= (t->node[i].seen & ~t->node[i].valid) & counters;
    }
    if (seen)
        cpus_publish(s);
    dh_source_state(s, DH_SOURCE_THROTTLE,
                    unreadable || failed ? DH_STATE_FAILING : seen ? DH_STATE_OK : DH_STATE_ABSENT);
    return true;
}
