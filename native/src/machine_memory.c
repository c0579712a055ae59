/*
 * machine_memory.c - the memory of the NUMA nodes: how much, what of it is broken, what is switched off.
 *
 * Source: /sys/devices/system/node/{online,has_memory}, node<N>/{meminfo,memory_failure/total} and
 * node<N>/memory<M>/state; HardwareCorrupted of /proc/meminfo; htlb_buddy_alloc_fail of /proc/vmstat. None of
 * these files tells when it changes. A kernel without NUMA has no nodes: all memory is that of node 0 then,
 * MemTotal of /proc/meminfo.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "machine.h"
#include "text.h"

/* A node of number 64 or more is DH_EFULL, like the 65th. */
static int node_set(const char *text, size_t n, uint64_t *set)
{
    uint64_t words[DH_CPU_WORDS], beyond = 0;

    if (dh_text_cpus(text, n, words))
        return DH_EPARSE;
    for (int i = DH_NODE_MAX / 64; i < DH_CPU_WORDS; i++)
        beyond |= words[i];
    *set = words[0];
    return beyond ? DH_EFULL : *set ? 0 : DH_EPARSE; /* no machine is without a node: the text was cut */
}

static void set_read(struct dh_machine *m, enum dh_machine_field field, const char *file, uint64_t *slot)
{
    const struct dh_machine_record r = dh_machine_head_record(m, DH_MACHINE_MEMORY);
    uint64_t set = 0;
    char text[1024];
    int64_t n = dh_machine_text(m, DH_ROOT_SYSFS, text, sizeof(text), "devices/system/node/%s", file);
    int err = n < 0 ? dh_machine_err(n) : node_set(text, (size_t)n, &set);

    dh_machine_put(m, &r, field, slot, err, set);
}

/* A sysfs that has no CPUs either says nothing: it is none, or not mounted yet. */
static bool is_without_numa(const struct dh_machine *m)
{
    return !(m->work.head.seen & DH_MACHINE_BIT(DH_NODES_ONLINE)) && m->root[DH_ROOT_SYSFS].fd >= 0 &&
           !faccessat(m->root[DH_ROOT_SYSFS].fd, "devices/system/cpu", F_OK, 0);
}

/* Every node that was ever online has a record. There is room for all of them: node_set() sees to that. */
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
    bool *dirty = &m->numas_dirty;

    return (struct dh_machine_record){ DH_MACHINE_MEMORY, &numa->valid, &numa->seen, &numa->err, dirty };
}

/* One row of a meminfo, in a buffer of a page and more: no kernel prints more into these files. */
static int row_read(struct dh_machine *m, enum dh_machine_root root, const char *path, const char *key,
                    uint64_t *kib)
{
    char text[8192];
    int64_t n = dh_machine_text(m, root, text, sizeof(text), "%s", path);

    return dh_machine_err(n < 0 ? n : dh_text_kib(text, (size_t)n, key, kib));
}

static void numa_read(struct dh_machine *m, struct dh_numa *numa)
{
    const bool listed = m->work.head.seen & DH_MACHINE_BIT(DH_NODES_ONLINE);
    const struct dh_machine_record r = numa_record(m, numa);
    uint64_t value = 0;
    char path[64];
    int err;

    /* 2.3 us: the kernel sums up the node's zones, and formats 35 rows to show us the first */
    snprintf(path, sizeof(path), "devices/system/node/node%u/meminfo", numa->node);
    err = row_read(m, listed ? DH_ROOT_SYSFS : DH_ROOT_PROCFS, listed ? path : "meminfo", "MemTotal", &value);
    dh_machine_put(m, &r, DH_NUMA_TOTAL, &numa->total_kib, err, value);
    err = dh_machine_number(m, DH_ROOT_SYSFS, &value, "devices/system/node/node%u/memory_failure/total",
                            numa->node);
    dh_machine_put(m, &r, DH_NUMA_POISONED, &numa->poisoned, err, value);
}

/* One look at a node's memory blocks. */
struct block_look {
    struct dh_machine *m;
    uint32_t node;
    bool states;      /* read them, and do not only list the blocks */
    uint64_t listed;
    uint64_t names;   /* a sum over the names: the order in which a directory is listed means nothing */
    uint64_t blocks;  /* whose state was read, as the next two */
    uint64_t offline;
    uint64_t moving;  /* "going-offline": neither, and soon one of them */
    int err;
};

static void state_read(struct block_look *look, uint32_t block)
{
    char text[32];
    int64_t n = dh_machine_text(look->m, DH_ROOT_SYSFS, text, sizeof(text),
                                "devices/system/node/node%u/memory%u/state", look->node, block);

    if (n < 0 && dh_is_absence((int)-n))
        return; /* removed since it was listed */
    if (n > 0 && text[n - 1] == '\n')
        n--;
    look->blocks++;
    if (n < 0)
        look->err = dh_machine_err(n);
    else if (n == 7 && !memcmp(text, "offline", 7))
        look->offline++;
    else if (n == 13 && !memcmp(text, "going-offline", 13))
        look->moving++;
    else if (n != 6 || memcmp(text, "online", 6))
        look->err = DH_EPARSE;
}

static void block_found(void *arg, const char *name, size_t len)
{
    struct block_look *look = arg;
    uint64_t mix;
    uint32_t block;

    if (dh_text_numbered(name, len, "memory", &block))
        return;
    look->listed++;
    mix = (block + 1) * 0x9e3779b97f4a7c15; /* so that 1 and 4 are not 2 and 3 */
    look->names += mix ^ mix >> 32;
    if (look->states)
        state_read(look, block);
}

static struct block_look blocks_look(struct dh_machine *m, uint32_t node, bool states)
{
    struct block_look look = { .m = m, .node = node, .states = states };
    char path[64];
    int err;

    snprintf(path, sizeof(path), "devices/system/node/node%u", node);
    err = dh_machine_list(m, path, block_found, &look);
    look.err = err ? err : look.err;
    return look;
}

static void blocks_put(struct dh_machine *m, struct dh_numa *numa, const struct block_look *look)
{
    const struct dh_machine_record r = numa_record(m, numa);
    bool had = numa->seen & DH_MACHINE_BIT(DH_NUMA_BLOCKS);

    if (!look->err && !look->blocks && !had)
        return; /* a kernel without memory hotplug lists none */
    dh_machine_put(m, &r, DH_NUMA_BLOCKS, &numa->blocks, look->err, look->blocks);
    if (look->err)
        numa->blocks_offline = 0;
    else
        dh_machine_put(m, &r, DH_NUMA_BLOCKS, &numa->blocks_offline, 0, look->offline);
}

/*
 * A host of 1.5 TB has 768 blocks of 2 GiB, or 12,288 of 128 MiB, and reading a state takes 7 us: 90 ms for
 * all of them. Listing them takes three. When a block is switched off, the node's MemTotal shrinks, and the
 * kernel sends an event, which becomes a poke. So the states are read at start and after a poke, and else
 * only in a rare pass that sees the total or the list changed, or could not read them the last time.
 */
static void blocks_read(struct dh_machine *m, struct dh_numa *numa, struct dh_blocks *known)
{
    bool lost = !(numa->valid & DH_MACHINE_BIT(DH_NUMA_BLOCKS));
    bool states = m->all || lost || known->total_kib != numa->total_kib;
    struct block_look look = blocks_look(m, numa->node, states);

    if (!states && !look.err && (look.listed != known->listed || look.names != known->names))
        look = blocks_look(m, numa->node, states = true);
    if (states || look.err)
        blocks_put(m, numa, &look);
    if (states)
        *known = (struct dh_blocks){ look.moving ? UINT64_MAX : numa->total_kib, look.listed, look.names };
}

/* Rows of 20 to 30 bytes, up to 300 of them; the kernel hands out a page per read(2). */
static int vmstat_read(struct dh_machine *m, uint64_t *failed)
{
    struct dh_text_key key = { .key = "htlb_buddy_alloc_fail", .len = 21 };
    char text[16384];
    int64_t n = dh_machine_text_all(m, DH_ROOT_PROCFS, text, sizeof(text), "vmstat");
    int found = n < 0 ? 0 : dh_text_keys(text, (size_t)n, &key, 1);

    *failed = key.value;
    return n < 0 ? dh_machine_err(n) : found < 0 ? found : found ? 0 : ENOENT;
}

static void machine_read(struct dh_machine *m)
{
    const struct dh_machine_record r = dh_machine_head_record(m, DH_MACHINE_MEMORY);
    struct dh_machine_head *head = &m->work.head;
    uint64_t value = 0;
    int err;

    /* 1.8 us: the kernel reads some 50 counters, per-CPU ones among them */
    err = row_read(m, DH_ROOT_PROCFS, "meminfo", "HardwareCorrupted", &value);
    dh_machine_put(m, &r, DH_MEM_CORRUPTED, &head->corrupted_kib, err, value);
    if (!m->rare)
        return;
    /* 8.8 us with two CPUs: the kernel sums up 190 counters over all CPUs, twice if they fill two pages */
    err = vmstat_read(m, &value);
    dh_machine_put(m, &r, DH_SURPLUS_FAILED, &head->surplus_failed, err, value);
}

void dh_machine_memory_pass(struct dh_machine *m)
{
    const uint64_t mine = DH_MACHINE_BIT(DH_NODES_ONLINE) | DH_MACHINE_BIT(DH_NODES_MEMORY) |
                          DH_MACHINE_BIT(DH_MEM_CORRUPTED) | DH_MACHINE_BIT(DH_SURPLUS_FAILED);
    struct dh_machine_head *head = &m->work.head;
    uint64_t seen, lost;

    set_read(m, DH_NODES_ONLINE, "online", &head->nodes_online);
    set_read(m, DH_NODES_MEMORY, "has_memory", &head->nodes_memory);
    numas_find(m);
    machine_read(m);
    seen = head->seen & mine;
    lost = seen & ~head->valid;
    for (uint32_t i = 0; i < head->numas; i++) {
        struct dh_numa *numa = &m->work.numa[i];

        numa_read(m, numa);
        if (m->rare)
            blocks_read(m, numa, &m->blocks[i]);
        seen |= numa->seen;
        lost |= numa->seen & ~numa->valid;
    }
    dh_machine_state(m, DH_MACHINE_MEMORY, seen, lost);
}
