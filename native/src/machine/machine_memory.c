/*
 * machine_memory.c - reads the memory of the NUMA nodes: total, broken and offline memory.
 *
 * Source: /sys/devices/system/node/{online,has_memory}, node<N>/{meminfo,memory_failure/total} and
 * node<N>/memory<M>/state; HardwareCorrupted of /proc/meminfo; htlb_buddy_alloc_fail of /proc/vmstat. None of
 * these files notifies. A kernel without NUMA has no nodes: then all memory, MemTotal of /proc/meminfo,
 * belongs to node 0.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "machine/machine.h"
#include "core/text.h"

/* Parse a set of nodes. A node number of 64 or more is DH_EFULL, as a 65th node is. */
static int node_set(const char *text, size_t n, uint64_t *set)
{
    uint64_t words[DH_CPU_WORDS], beyond = 0;

    if (dh_text_cpus(text, n, words))
        return DH_EPARSE;
    for (int i = DH_NODE_MAX / 64; i < DH_CPU_WORDS; i++)
        beyond |= words[i];
    *set = words[0];
    return beyond ? DH_EFULL : *set ? 0 : DH_EPARSE; /* every machine has a node: the text was cut */
}

static void set_read(struct dh_machine *m, enum dh_machine_field field, const char *file, uint64_t *slot)
{
    const struct dh_machine_record r = dh_machine_head_record(m, DH_MACHINE_MEMORY);
    uint64_t set = 0;
    char text[1024];
    int64_t n = dh_machine_read_text(m, DH_ROOT_SYSFS, text, sizeof(text), "devices/system/node/%s", file);
    int err = n < 0 ? dh_machine_to_err(n) : node_set(text, (size_t)n, &set);

    dh_machine_store(m, &r, field, slot, err, set);
}

/*
 * Whether the kernel has no NUMA. A sysfs without CPUs does not count: it is another directory, or not
 * mounted yet.
 */
static bool is_without_numa(const struct dh_machine *m)
{
    return !(m->work.head.seen & DH_MACHINE_BIT(DH_NODES_ONLINE)) && m->root[DH_ROOT_SYSFS].fd >= 0 &&
           !faccessat(m->root[DH_ROOT_SYSFS].fd, "devices/system/cpu", F_OK, 0);
}

/* Add a record for every node that was ever online. node_set() ensures that there is room. */
static void numas_find(struct dh_machine *m)
{
    struct dh_machine_head *head = &m->work.head;
    uint64_t found = is_without_numa(m) ? 1 : head->nodes_online;

    for (uint32_t i = 0; i < head->numas; i++)
        found &= ~(1ull << m->work.numa[i].node);
    for (; found; found &= found - 1) {
        m->work.numa[head->numas++].node = (uint32_t)__builtin_ctzll(found);
        m->numas_dirty = m->wake = true;
    }
}

static struct dh_machine_record numa_record(struct dh_machine *m, struct dh_numa *numa)
{
    return (struct dh_machine_record){
        DH_MACHINE_MEMORY, &numa->valid, &numa->seen, &m->numa_assumed[numa - m->work.numa],
        &numa->err,        &m->numas_dirty
    };
}

/* Read one row of a meminfo. The buffer exceeds a page: no kernel prints more into these files. */
static int row_read(struct dh_machine *m, enum dh_machine_root root, const char *path, const char *key,
                    uint64_t *kib)
{
    char text[8192];
    int64_t n = dh_machine_read_text(m, root, text, sizeof(text), "%s", path);

    return dh_machine_to_err(n < 0 ? n : dh_text_kib(text, (size_t)n, key, kib));
}

static void numa_read(struct dh_machine *m, struct dh_numa *numa)
{
    const bool listed = m->work.head.seen & DH_MACHINE_BIT(DH_NODES_ONLINE);
    const struct dh_machine_record r = numa_record(m, numa);
    uint64_t value = 0;
    char path[64];
    int err;

    /* 2.3 us: the kernel sums up the node's zones, and formats 35 rows of which the first is needed */
    snprintf(path, sizeof(path), "devices/system/node/node%u/meminfo", numa->node);
    err = row_read(m, listed ? DH_ROOT_SYSFS : DH_ROOT_PROCFS, listed ? path : "meminfo", "MemTotal", &value);
    dh_machine_store(m, &r, DH_NUMA_TOTAL, &numa->total_kib, err, value);
    err = dh_machine_read_number(m, DH_ROOT_SYSFS, &value, "devices/system/node/node%u/memory_failure/total",
                                 numa->node);
    dh_machine_store(m, &r, DH_NUMA_POISONED, &numa->poisoned, err, value);
}

/* One scan of a node's memory blocks. */
struct block_scan {
    struct dh_machine *m;
    uint32_t node;
    bool states;      /* read the states, rather than only list the blocks */
    uint64_t listed;
    uint64_t names;   /* a sum of hashed names, independent of the listing's order */
    uint64_t blocks;  /* blocks whose state was read; offline and moving count among these */
    uint64_t offline;
    uint64_t moving;  /* "going-offline": counted as neither online nor offline */
    int err;
};

static void state_read(struct block_scan *scan, uint32_t block)
{
    char text[32];
    int64_t n = dh_machine_read_text(scan->m, DH_ROOT_SYSFS, text, sizeof(text),
                                     "devices/system/node/node%u/memory%u/state", scan->node, block);

    if (n < 0 && dh_is_absence((int)-n))
        return; /* removed since the listing */
    if (n > 0 && text[n - 1] == '\n')
        n--;
    scan->blocks++;
    if (n < 0)
        scan->err = dh_machine_to_err(n);
    else if (n == 7 && !memcmp(text, "offline", 7))
        scan->offline++;
    else if (n == 13 && !memcmp(text, "going-offline", 13))
        scan->moving++;
    else if (n != 6 || memcmp(text, "online", 6))
        scan->err = DH_EPARSE;
}

static void block_found(void *arg, const char *name, size_t len)
{
    struct block_scan *scan = arg;
    uint64_t mix;
    uint32_t block;

    if (dh_text_numbered(name, len, "memory", &block))
        return;
    scan->listed++;
    mix = (block + 1) * 0x9e3779b97f4a7c15; /* so that blocks 1 and 4 differ from blocks 2 and 3 */
    scan->names += mix ^ mix >> 32;
    if (scan->states)
        state_read(scan, block);
}

static struct block_scan blocks_scan(struct dh_machine *m, uint32_t node, bool states)
{
    struct block_scan scan = { .m = m, .node = node, .states = states };
    char path[64];
    int err;

    snprintf(path, sizeof(path), "devices/system/node/node%u", node);
    err = dh_machine_list_dir(m, path, block_found, &scan);
    scan.err = err ? err : scan.err;
    return scan;
}

static void blocks_store(struct dh_machine *m, struct dh_numa *numa, const struct block_scan *scan)
{
    const struct dh_machine_record r = numa_record(m, numa);
    bool had = numa->seen & DH_MACHINE_BIT(DH_NUMA_BLOCKS);

    if (!scan->err && !scan->blocks && *r.assumed & DH_MACHINE_BIT(DH_NUMA_BLOCKS)) {
        dh_machine_store(m, &r, DH_NUMA_BLOCKS, &numa->blocks, ENOENT, 0);
        return;
    }
    if (!scan->err && !scan->blocks && !had)
        return; /* a kernel without memory hotplug lists no blocks */
    dh_machine_store(m, &r, DH_NUMA_BLOCKS, &numa->blocks, scan->err, scan->blocks);
    if (scan->err)
        numa->blocks_offline = 0;
    else
        dh_machine_store(m, &r, DH_NUMA_BLOCKS, &numa->blocks_offline, 0, scan->offline);
}

/*
 * Read the states of memory blocks, if needed. A host of 1.5 TB has 768 blocks of 2 GiB, or 12,288 of 128
 * MiB, and reading one state takes 7 us: 90 ms for all. Listing them takes 3 ms. When a block goes offline,
 * the node's MemTotal shrinks, and the kernel sends an event, which becomes a rescan request. So the states
 * are read at start and in a rescan, and otherwise only in a rare pass in which the total or the list has
 * changed, or after a failure.
 */
static void blocks_read(struct dh_machine *m, struct dh_numa *numa, struct dh_blocks *last_scan)
{
    bool unreadable = !(numa->valid & DH_MACHINE_BIT(DH_NUMA_BLOCKS));
    bool states = m->read_all || unreadable || last_scan->total_kib != numa->total_kib;
    struct block_scan scan = blocks_scan(m, numa->node, states);

    if (!states && !scan.err && (scan.listed != last_scan->listed || scan.names != last_scan->names))
        scan = blocks_scan(m, numa->node, states = true);
    if (states || scan.err)
        blocks_store(m, numa, &scan);
    if (states)
        *last_scan = (struct dh_blocks){ scan.moving ? UINT64_MAX : numa->total_kib, scan.listed, scan.names };
}

/* 300 rows of 20 to 30 bytes; the kernel returns a page per read(2). */
static int vmstat_read(struct dh_machine *m, uint64_t *failed)
{
    struct dh_text_key key = { .key = "htlb_buddy_alloc_fail", .len = 21 };
    char text[16384];
    int64_t n = dh_machine_read_text_all(m, DH_ROOT_PROCFS, text, sizeof(text), "vmstat");
    int found = n < 0 ? 0 : dh_text_keys(text, (size_t)n, &key, 1);

    *failed = key.value;
    return n < 0 ? dh_machine_to_err(n) : found < 0 ? found : found ? 0 : ENOENT;
}

static void machine_read(struct dh_machine *m)
{
    const struct dh_machine_record r = dh_machine_head_record(m, DH_MACHINE_MEMORY);
    struct dh_machine_head *head = &m->work.head;
    uint64_t value = 0;
    int err;

    /* 1.8 us: the kernel reads some 50 counters, some of them per CPU */
    err = row_read(m, DH_ROOT_PROCFS, "meminfo", "HardwareCorrupted", &value);
    dh_machine_store(m, &r, DH_MEM_CORRUPTED, &head->corrupted_kib, err, value);
    if (!m->rare)
        return;
    /* 8.8 us with two CPUs: the kernel sums up 190 counters over all CPUs, twice if they fill two pages */
    err = vmstat_read(m, &value);
    dh_machine_store(m, &r, DH_SURPLUS_FAILED, &head->surplus_failed, err, value);
}

void dh_machine_memory_pass(struct dh_machine *m)
{
    const uint64_t own_fields = DH_MACHINE_BIT(DH_NODES_ONLINE) | DH_MACHINE_BIT(DH_NODES_MEMORY) |
                          DH_MACHINE_BIT(DH_MEM_CORRUPTED) | DH_MACHINE_BIT(DH_SURPLUS_FAILED);
    struct dh_machine_head *head = &m->work.head;
    uint64_t seen, unreadable;

    set_read(m, DH_NODES_ONLINE, "online", &head->nodes_online);
    set_read(m, DH_NODES_MEMORY, "has_memory", &head->nodes_memory);
    numas_find(m);
    machine_read(m);
    seen = head->seen & own_fields;
    unreadable = seen & ~head->valid;
    for (uint32_t i = 0; i < head->numas; i++) {
        struct dh_numa *numa = &m->work.numa[i];

        numa_read(m, numa);
        if (m->rare)
            blocks_read(m, numa, &m->blocks[i]);
        seen |= numa->seen;
        unreadable |= numa->seen & ~numa->valid;
    }
    dh_machine_state(m, DH_MACHINE_MEMORY, seen, unreadable);
}
