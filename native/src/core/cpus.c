/*
 * cpus.c - the sets of present, online and isolated CPUs, and the CPUs of each NUMA node.
 *
 * Source: /sys/devices/system/cpu/{present,online,isolated}, node/node<N>/cpulist.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "core/sampler.h"
#include "core/text.h"

/* Parse a set. An empty set of present or online CPUs is impossible, so the text was cut short. */
static int set_parse(const struct dh_cached_file *f, enum dh_field field, uint64_t *words)
{
    static const uint64_t none[DH_CPU_WORDS];
    int err = dh_text_cpus(f->last, f->len, words);

    if (!err && (field == DH_CPU_ONLINE || field == DH_CPU_PRESENT) && !memcmp(words, none, sizeof(none)))
        return DH_EPARSE;
    return err;
}

/*
 * Read a set of CPUs, such as the online ones, from its file into @words. Return: whether the set changed, or
 * became readable or unreadable.
 */
static bool set_read(struct dh_sampler *s, struct dh_cached_file *f, enum dh_field field, uint64_t *words)
{
    struct dh_snapshot *head = &s->work->head;
    uint64_t now[DH_CPU_WORDS];

    switch (dh_cached_file_read(s, f)) {
    case DH_READ_SAME:
        return false;
    case DH_READ_NEW:
        f->err = set_parse(f, field, now);
        if (!f->err) {
            bool changed = dh_store_validity(s, &head->cpu_valid, &head->cpu_seen, field, true);

            if (memcmp(words, now, sizeof(now))) {
                memcpy(words, now, sizeof(now));
                dh_wake_if_watched(s, field);
                changed = true;
            }
            s->head_dirty |= changed;
            return changed;
        }
        break;
    case DH_READ_FAILED:
        if (!f->seen) {
            bool changed = dh_store_absence(s, &head->cpu_valid, &head->cpu_seen, field);

            s->head_dirty |= changed;
            return changed;
        }
        break;
    }
    memset(words, 0, DH_CPU_WORDS * 8);
    head->cpu_err = f->err;
    dh_source_failed(s, DH_SOURCE_CPUS, field, f->err);
    return dh_store_validity(s, &head->cpu_valid, &head->cpu_seen, field, false);
}

static struct dh_node *node_find(struct dh_sampler *s, uint32_t number)
{
    struct dh_tables *t = s->work;

    for (uint32_t i = 0; i < t->head.nodes; i++)
        if (t->node[i].node == number)
            return &t->node[i];
    if (t->head.nodes == DH_NODE_MAX) {
        dh_source_full(s, DH_SOURCE_CPUS, DH_NODE_CPUS);
        return NULL;
    }
    t->node[t->head.nodes].node = number;
    s->head_dirty = true;
    return &t->node[t->head.nodes++];
}

/* The CPUs of a node are unknown, though it has some. */
static void node_clear_cpus(struct dh_sampler *s, struct dh_node *node, int err)
{
    bool changed = dh_store_validity(s, &node->valid, &node->seen, DH_NODE_CPUS, false);

    if (changed || node->err != err)
        dh_node_mark_dirty(s, (uint32_t)(node - s->work->node));
    node->err = err;
}

static void node_failed(struct dh_sampler *s, struct dh_node *node, int err)
{
    node_clear_cpus(s, node, err);
    s->nodes_failed = true;
    dh_source_failed(s, DH_SOURCE_CPUS, DH_NODE_CPUS, err);
}

/* Add CPUs to a node. The kernel lists online CPUs only; here a CPU that went offline stays with its node. */
static void node_add_cpus(struct dh_sampler *s, struct dh_node *node, const uint64_t *cpus)
{
    bool changed = dh_store_validity(s, &node->valid, &node->seen, DH_NODE_CPUS, true);

    for (int i = 0; i < DH_CPU_WORDS; i++) {
        changed |= (cpus[i] & ~node->cpus[i]) != 0;
        node->cpus[i] |= cpus[i];
    }
    if (changed) {
        dh_wake_if_watched(s, DH_NODE_CPUS);
        dh_node_mark_dirty(s, (uint32_t)(node - s->work->node));
    }
}

static void node_read(struct dh_sampler *s, void *arg, const char *name, size_t len)
{
    uint64_t number, cpus[DH_CPU_WORDS];
    char path[64], text[8192];
    struct dh_node *node;
    int64_t n;

    (void)arg;
    if (len < 5 || memcmp(name, "node", 4) || dh_text_u64(name + 4, len - 4, &number) || number > 9999)
        return;
    node = node_find(s, (uint32_t)number);
    if (!node)
        return;
    snprintf(path, sizeof(path), "devices/system/node/node%u/cpulist", (unsigned)number);
    n = dh_sampler_read_file(s, s->sysfs_fd, path, text, sizeof(text));
    if (n >= 0 && !dh_text_cpus(text, (size_t)n, cpus))
        node_add_cpus(s, node, cpus);
    else if (n >= 0)
        node_failed(s, node, DH_EPARSE);
    else if (node->seen & DH_FIELD_BIT(DH_NODE_CPUS) ||
             !(dh_is_absence((int)-n) || dh_is_own_failure((int)-n)))
        node_failed(s, node, (int)-n);
    else if (dh_is_own_failure((int)-n)) { /* tried again in the next pass */
        s->nodes_failed = true;
        dh_source_failed(s, DH_SOURCE_CPUS, DH_NODE_CPUS, (int)-n);
    }
}

static void nodes_list(struct dh_sampler *s)
{
    const struct dh_snapshot *head = &s->work->head;
    int err = -dh_sampler_list_dir(s, s->sysfs_fd, "devices/system/node", node_read, NULL);
    struct dh_node *node;

    if (err && !dh_is_absence(err)) {
        s->nodes_failed = true;
        dh_source_failed(s, DH_SOURCE_CPUS, DH_NODE_CPUS, err);
    } else if (err && head->cpu_seen & DH_FIELD_BIT(DH_CPU_ONLINE) && (node = node_find(s, 0))) {
        /* a kernel without NUMA: all CPUs are of node 0 */
        if (head->cpu_valid & DH_FIELD_BIT(DH_CPU_ONLINE))
            node_add_cpus(s, node, head->cpu_online);
        else
            node_clear_cpus(s, node, head->cpu_err); /* the failed read of the set was counted already */
    }
}

/* Return whether to read a set that rarely changes: when nodes are listed, and after a failure. */
static bool set_due(const struct dh_sampler *s, const struct dh_cached_file *f, bool list)
{
    return list || (s->probe_absent && !f->seen) || (f->seen && f->err);
}

void dh_cpus_pass(struct dh_sampler *s)
{
    struct dh_snapshot *head = &s->work->head;
    bool changed, list;

    if (s->sysfs_fd < 0)
        return;
    changed = set_read(s, &s->online, DH_CPU_ONLINE, head->cpu_online);
    list = changed || s->resync || s->nodes_failed;
    if (set_due(s, &s->present, list))
        set_read(s, &s->present, DH_CPU_PRESENT, head->cpu_present);
    if (set_due(s, &s->isolated, list))
        set_read(s, &s->isolated, DH_CPU_ISOLATED, head->cpu_isolated);
    if (list) {
        s->nodes_failed = false;
        nodes_list(s);
    }
    if (head->cpu_valid != head->cpu_seen || s->nodes_failed)
        dh_source_state(s, DH_SOURCE_CPUS, DH_STATE_FAILING);
    else
        dh_source_state(s, DH_SOURCE_CPUS, head->cpu_seen ? DH_STATE_OK : DH_STATE_ABSENT);
}
