/* Tests of the nodes' memory: total, broken and offline memory; and how often each file is read. */
#include "check.h"
#include "machine_fixture.h"

#define NODE "sys/devices/system/node"
#define BLOCKS 8 /* of each node */

static void total_write(uint32_t node, uint32_t kib)
{
    char text[256];

    snprintf(text, sizeof(text), "Node %u MemTotal:       %u kB\nNode %u MemFree:        100 kB\n", node, kib,
             node);
    fx_write(text, NODE "/node%u/meminfo", node);
}

static void state_write(uint32_t node, uint32_t block, const char *state)
{
    fx_write(state, NODE "/node%u/memory%u/state", node, block);
}

static void node_write(uint32_t node)
{
    total_write(node, 1000000);
    fx_write("0\n", NODE "/node%u/memory_failure/total", node);
    for (uint32_t i = 0; i < BLOCKS; i++)
        state_write(node, node * BLOCKS + i, "online\n");
    fx_write("4\n", NODE "/node%u/numastat", node);
}

static void vmstat_write(const char *failed)
{
    char text[8192] = "";
    size_t n = 0;

    for (int i = 0; i < 180; i++) /* more than a page: one read(2) of the real file would not suffice */
        n += (size_t)snprintf(text + n, sizeof(text) - n, "nr_counter_of_something_%d 123\n", i);
    snprintf(text + n, sizeof(text) - n, "htlb_buddy_alloc_success 9\nhtlb_buddy_alloc_fail %s\nthp 0\n",
             failed);
    fx_write(text, "proc/vmstat");
}

static struct mx opened(void)
{
    const struct dh_machine_options o = mx_options();

    fx_remove("sys");
    fx_remove("proc");
    fx_dir("sys");
    fx_dir("proc");
    return mx_open(&o);
}

/* Open a watch with two nodes, both with memory. */
static struct mx machine(void)
{
    struct mx x = opened();

    fx_write("0-1\n", NODE "/online");
    fx_write("0-1\n", NODE "/has_memory");
    node_write(0);
    node_write(1);
    fx_write("MemTotal:       2000000 kB\nHardwareCorrupted:     0 kB\nHugePages_Total:       0\n",
             "proc/meminfo");
    vmstat_write("3");
    mx_pass(&x);
    CHECK(mx_woken(&x));
    return x;
}

static uint64_t reads_of(struct mx *x, void (*pass)(struct mx *x))
{
    uint64_t before = x->head->reads;

    pass(x);
    return x->head->reads - before;
}

static void a_slow_pass(struct mx *x)
{
    mx_later(x, 10 * DH_NS);
}

static void a_rare_pass(struct mx *x)
{
    mx_later(x, 60 * DH_NS);
}

static void test_everything_is_read_at_start(void)
{
    struct mx x = machine();

    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    CHECK_U64(x.head->nodes_online, 3);
    CHECK_U64(x.head->nodes_memory, 3);
    CHECK_U64(x.head->corrupted_kib, 0);
    CHECK_U64(x.head->surplus_failed, 3);
    CHECK_U64(x.head->valid, x.head->seen);
    CHECK_U64(x.head->numas, 2);
    CHECK_U64(mx_numa(&x, 1)->total_kib, 1000000);
    CHECK_U64(mx_numa(&x, 1)->poisoned, 0);
    CHECK_U64(mx_numa(&x, 1)->blocks, BLOCKS);
    CHECK_U64(mx_numa(&x, 1)->blocks_offline, 0);
    CHECK_U64(mx_numa(&x, 1)->valid, mx_numa(&x, 1)->seen);
    mx_close(&x);
}

/* Reads: none in an ordinary pass, 7 in a slow one; a rare one reads vmstat twice more to reach its end. */
static void test_expensive_files_are_read_rarely(void)
{
    struct mx x = machine();

    CHECK_U64(reads_of(&x, mx_pass), 0);
    CHECK_U64(reads_of(&x, a_slow_pass), 7);
    CHECK_U64(reads_of(&x, a_rare_pass), 7 + 2);
    CHECK_U64(reads_of(&x, mx_rescan), 7 + 2 + 2 * BLOCKS);
    CHECK(!mx_woken(&x));
    mx_close(&x);
}

static void test_block_states_are_read_after_total_or_list_changed(void)
{
    struct mx x = machine();

    total_write(1, 900000);
    state_write(1, 9, "offline\n");
    CHECK_U64(reads_of(&x, a_slow_pass), 7);
    CHECK(!mx_woken(&x)); /* a new total does not wake the reader */
    CHECK_U64(mx_numa(&x, 1)->total_kib, 900000);
    CHECK_U64(mx_numa(&x, 1)->blocks_offline, 0);
    CHECK_U64(reads_of(&x, a_rare_pass), 7 + 2 + BLOCKS);
    CHECK_U64(mx_numa(&x, 1)->blocks_offline, 1);
    CHECK(mx_woken(&x));
    CHECK_U64(reads_of(&x, a_rare_pass), 7 + 2);
    fx_remove(NODE "/node0/memory0");
    CHECK_U64(reads_of(&x, a_rare_pass), 7 + 2 + BLOCKS - 1);
    CHECK_U64(mx_numa(&x, 0)->blocks, BLOCKS - 1);
    CHECK(mx_woken(&x));
    state_write(0, 77, "offline\n"); /* the same number of other blocks */
    CHECK_U64(reads_of(&x, a_rare_pass), 7 + 2 + BLOCKS);
    CHECK_U64(mx_numa(&x, 0)->blocks_offline, 1);
    mx_close(&x);
}

static void test_block_going_offline_is_read_again(void)
{
    struct mx x = machine();

    state_write(0, 3, "going-offline\n");
    mx_rescan(&x);
    CHECK_U64(mx_numa(&x, 0)->blocks, BLOCKS);
    CHECK_U64(mx_numa(&x, 0)->blocks_offline, 0);
    state_write(0, 3, "offline\n");
    a_rare_pass(&x);
    CHECK_U64(mx_numa(&x, 0)->blocks_offline, 1);
    CHECK(mx_woken(&x));
    mx_close(&x);
}

static void test_unreadable_block_state_is_not_online(void)
{
    const uint64_t bit = DH_MACHINE_BIT(DH_NUMA_BLOCKS);
    struct mx x = machine();

    state_write(0, 3, "\n");
    mx_rescan(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(mx_numa(&x, 0)->valid & bit, 0);
    CHECK_U64(mx_numa(&x, 0)->blocks, 0);
    CHECK_INT(mx_numa(&x, 0)->err, DH_EPARSE);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->err_field, DH_NUMA_BLOCKS);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING);
    fx_remove(NODE "/node0/memory3/state");
    fx_dir(NODE "/node0/memory3/state");
    mx_rescan(&x);
    CHECK_INT(mx_numa(&x, 0)->err, EISDIR);
    fx_remove(NODE "/node0/memory3/state"); /* the block was removed after the listing */
    a_rare_pass(&x);
    CHECK_U64(mx_numa(&x, 0)->valid & bit, bit);
    CHECK_U64(mx_numa(&x, 0)->blocks, BLOCKS - 1);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    mx_close(&x);
}

static void test_poisoned_pages_wake_at_once(void)
{
    struct mx x = machine();

    fx_write("1\n", NODE "/node1/memory_failure/total");
    a_slow_pass(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(mx_numa(&x, 1)->poisoned, 1);
    fx_write("HardwareCorrupted:     4 kB\n", "proc/meminfo");
    a_slow_pass(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(x.head->corrupted_kib, 4);
    mx_close(&x);
}

static void test_failed_allocations_wake_rate_limited(void)
{
    const struct dh_machine_options often = { sizeof(often), DH_VERSION, DH_NS, 10 * DH_NS, 10 * DH_NS };
    struct mx x = machine();

    x.m->opt = often;
    vmstat_write("4");
    a_slow_pass(&x);
    CHECK(mx_woken(&x));
    vmstat_write("5");
    mx_rescan(&x);
    CHECK_U64(x.head->surplus_failed, 5);
    CHECK(!mx_woken(&x));
    a_slow_pass(&x);
    CHECK(mx_woken(&x));
    mx_close(&x);
}

static void test_removed_node_keeps_its_record(void)
{
    struct mx x = machine();

    fx_write("0\n", NODE "/online");
    fx_write("0\n", NODE "/has_memory");
    fx_remove(NODE "/node1");
    mx_rescan(&x);
    CHECK(mx_woken(&x));
    CHECK_U64(x.head->nodes_online, 1);
    CHECK_U64(x.head->nodes_memory, 1);
    CHECK_U64(x.head->numas, 2);
    CHECK_U64(mx_numa(&x, 1)->valid, 0);
    CHECK(mx_numa(&x, 1)->seen != 0);
    CHECK_INT(mx_numa(&x, 1)->err, ENOENT);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING);
    fx_write("0-1\n", NODE "/online");
    node_write(1);
    mx_rescan(&x);
    CHECK_U64(x.head->numas, 2);
    CHECK_U64(mx_numa(&x, 1)->blocks, BLOCKS);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    mx_close(&x);
}

/* Before Linux 6.4, without memory hotplug, without NUMA, without hwpoison, without hugepages. */
static void test_files_missing_in_the_kernel_are_absent(void)
{
    struct mx x = opened();

    fx_write("MemTotal:       2000000 kB\n", "proc/meminfo");
    fx_write("nr_free_pages 1\n", "proc/vmstat");
    mx_pass(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_ABSENT);
    CHECK_U64(mx_source(&x, DH_MACHINE_MEMORY)->failures, 0);
    CHECK_U64(x.head->seen, 0);
    fx_write("0\n", NODE "/online");
    total_write(0, 500);
    mx_rescan(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    CHECK_U64(mx_source(&x, DH_MACHINE_MEMORY)->failures, 0);
    CHECK_U64(mx_numa(&x, 0)->seen, DH_MACHINE_BIT(DH_NUMA_TOTAL));
    CHECK_U64(x.head->seen, DH_MACHINE_BIT(DH_NODES_ONLINE));
    mx_close(&x);
}

static void test_without_numa_all_memory_belongs_to_node_0(void)
{
    struct mx x = opened();

    fx_write("0-1\n", "sys/devices/system/cpu/online");
    fx_write("MemTotal:       2000000 kB\nHardwareCorrupted:     4 kB\n", "proc/meminfo");
    mx_pass(&x);
    CHECK_U64(x.head->numas, 1);
    CHECK_U64(mx_numa(&x, 0)->total_kib, 2000000);
    CHECK_U64(mx_numa(&x, 0)->seen, DH_MACHINE_BIT(DH_NUMA_TOTAL));
    CHECK_U64(x.head->seen & DH_MACHINE_BIT(DH_NODES_ONLINE), 0);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    CHECK_U64(mx_source(&x, DH_MACHINE_MEMORY)->failures, 0);
    fx_remove("proc/meminfo");
    a_slow_pass(&x);
    CHECK_U64(mx_numa(&x, 0)->valid, 0); /* rather than all memory gone */
    CHECK_INT(mx_numa(&x, 0)->err, ENOENT);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING);
    mx_close(&x);
}

static void test_malformed_node_sets_are_failures(void)
{
    static const struct {
        const char *text;
        int err;
    } rows[] = { { "", DH_EPARSE }, { "\n", DH_EPARSE }, { "x\n", DH_EPARSE }, { "0,64\n", DH_EFULL } };
    struct mx x = machine();

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        check_row = rows[i].text;
        fx_write(rows[i].text, NODE "/online");
        a_slow_pass(&x);
        CHECK_U64(x.head->valid & DH_MACHINE_BIT(DH_NODES_ONLINE), 0);
        CHECK_U64(x.head->nodes_online, 0);
        CHECK_INT(x.head->err, rows[i].err);
        CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING);
        CHECK_U64(mx_numa(&x, 1)->total_kib, 1000000); /* the nodes are still read */
    }
    check_row = "";
    fx_write("0-1,63\n", NODE "/online");
    a_slow_pass(&x);
    CHECK_U64(x.head->nodes_online, 3 | 1ull << 63);
    CHECK_U64(x.head->numas, 3);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    mx_close(&x);
}

static void test_cut_meminfo_row_is_a_failure(void)
{
    struct mx x = machine();

    fx_write("HardwareCorrupted:     4", "proc/meminfo");
    fx_write("Node 1 MemTotal:  x kB\n", NODE "/node1/meminfo");
    vmstat_write("no number");
    mx_rescan(&x);
    CHECK_U64(x.head->valid & DH_MACHINE_BIT(DH_MEM_CORRUPTED), 0);
    CHECK_U64(x.head->valid & DH_MACHINE_BIT(DH_SURPLUS_FAILED), 0);
    CHECK_INT(x.head->err, DH_EPARSE);
    CHECK_INT(mx_numa(&x, 1)->err, DH_EPARSE);
    CHECK_U64(mx_numa(&x, 1)->total_kib, 0);
    CHECK_U64(mx_numa(&x, 0)->total_kib, 1000000);
    mx_close(&x);
}

/* A lack of descriptors says nothing of a file: what never existed is absent again afterwards. */
static void test_absent_files_are_absent_again_after_a_lack_of_descriptors(void)
{
    struct mx x = opened();

    fx_write("MemTotal:       2000000 kB\n", "proc/meminfo");
    fx_write("nr_free_pages 1\n", "proc/vmstat");
    fx_write("0\n", NODE "/online");
    total_write(0, 500);
    mx_pass(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    fx_exhaust_descriptors(true);
    mx_rescan(&x);
    fx_exhaust_descriptors(false);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING);
    CHECK_U64(mx_numa(&x, 0)->valid, 0);
    CHECK_INT(mx_numa(&x, 0)->err, EMFILE);
    mx_rescan(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_OK);
    CHECK_U64(mx_numa(&x, 0)->seen, DH_MACHINE_BIT(DH_NUMA_TOTAL));
    CHECK_U64(mx_numa(&x, 0)->valid, DH_MACHINE_BIT(DH_NUMA_TOTAL));
    CHECK_U64(x.head->seen, DH_MACHINE_BIT(DH_NODES_ONLINE));
    fx_remove(NODE "/node0/meminfo");
    mx_rescan(&x);
    CHECK_INT(mx_source(&x, DH_MACHINE_MEMORY)->state, DH_STATE_FAILING); /* what existed is lost, not absent */
    mx_close(&x);
}

/* Else its fields would stay Unknown for a minute, and for another until the fault clears. */
static void test_lack_of_descriptors_in_a_rare_pass_is_over_in_the_next(void)
{
    struct mx x = machine();

    fx_exhaust_descriptors(true);
    a_rare_pass(&x);
    fx_exhaust_descriptors(false);
    CHECK_U64(mx_numa(&x, 0)->valid & DH_MACHINE_BIT(DH_NUMA_BLOCKS), 0);
    mx_later(&x, DH_NS);
    CHECK(mx_numa(&x, 0)->valid & DH_MACHINE_BIT(DH_NUMA_BLOCKS));
    mx_close(&x);
}

int main(void)
{
    fx_begin();
    fx_dir("sys");
    fx_dir("proc");
    test_everything_is_read_at_start();
    test_expensive_files_are_read_rarely();
    test_block_states_are_read_after_total_or_list_changed();
    test_block_going_offline_is_read_again();
    test_unreadable_block_state_is_not_online();
    test_poisoned_pages_wake_at_once();
    test_failed_allocations_wake_rate_limited();
    test_removed_node_keeps_its_record();
    test_files_missing_in_the_kernel_are_absent();
    test_without_numa_all_memory_belongs_to_node_0();
    test_malformed_node_sets_are_failures();
    test_cut_meminfo_row_is_a_failure();
    test_absent_files_are_absent_again_after_a_lack_of_descriptors();
    test_lack_of_descriptors_in_a_rare_pass_is_over_in_the_next();
    return check_done("test_machine_memory");
}
